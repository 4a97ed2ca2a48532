"""`register_type`: types with a name on the wire, and functions to a state and back.

`encode` calls `name_for_sending` and `state_of`, `decode` calls `restore`. The rest of the file
makes the functions of types that need only their class, lists the types that every reader knows,
and finds classes that the other side has imported.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jagcodec._arguments import check_function
from jagcodec._compiling import untraced
from jagcodec._dependencies import module_with_torch
from jagcodec.columns.outside_errors import pass_on
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief
from jagcodec.wire.checks import fail
from jagcodec.wire.spec import BATCHED_DATA_DICT, ORDERED_DICT, PACKED_COLUMN

T = TypeVar("T")


class NamedType(NamedTuple):
    """A type that messages have by name."""

    cls: type
    name: str  # on the wire
    to_state: Callable[[Any], Any]
    from_state: Callable[[Any], Any]


# The types that are registered in this process. All code uses single dict operations, so one thread
# may register types while another encodes, without a lock.
_by_name: dict[str, NamedType] = {}
_name_of: dict[type, str] = {}


@untraced
def register_type(
    cls: type[T],
    name: str | None = None,
    *,
    to_state: Callable[[T], Any] | None = None,
    from_state: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let `encode` accept values of a type in this process, and `decode` make them.

    Both sides register the type under one name. Subclasses need a registration of their own.
    For `datetime`, `deque`, `Path` and others see `jagcodec.stdlib`.

    Args:
        cls: A class. A dataclass, a tensorclass, a `TypedTensorDict`, a named tuple or an `Enum`
            needs nothing more. The fields of the first four are encoded, and arrive as they were:
            neither `__init__` nor `__post_init__` is run again. If a tensorclass holds others,
            register those too. Members of an `Enum` are encoded by name.
        name: What the type is called in messages, by default its module and qualified name.
        to_state: Turns a value into anything that can be encoded.
        from_state: Turns that into a value. It must check its argument, which the sender wrote.

    Returns:
        `cls`, so that this can be a decorator of a class.

    Raises:
        ArgumentError: The name is taken by another class.
        ArgumentTypeError: `cls` is not a class, or is another class and one of the two
            functions is missing.

    Example:
        >>> import dataclasses
        >>> from jagcodec import decode, encode, register_type
        >>> @register_type
        ... @dataclasses.dataclass
        ... class Sampling:
        ...     temperature: float
        ...     stop: tuple[str, ...]
        >>> decode(encode([Sampling(0.7, ("</s>",))]))
        [Sampling(temperature=0.7, stop=('</s>',))]
    """
    if not isinstance(cls, type):
        detail = f"expected a class, found {type(cls).__name__}"
        raise ArgumentTypeError("bad_type", "register_type(cls)", detail)
    if to_state is None and from_state is None:
        to_state, from_state = _state_functions(cls)
    if to_state is None or from_state is None:
        detail = (
            "expected a dataclass, a tensorclass, a TypedTensorDict, a named tuple, an Enum, "
            "or both to_state and from_state, found none of these"
        )
        raise ArgumentTypeError("bad_type", f"register_type({cls.__qualname__})", detail)
    if name is not None and not isinstance(name, str):
        detail = f"expected a name, or None, found {brief(name)}"
        raise ArgumentTypeError("bad_type", "register_type(name)", detail)
    for option, function in (("to_state", to_state), ("from_state", from_state)):
        check_function(function, f"register_type({option})", "a function of one value")
    name = _qualified(cls) if name is None else name
    taken = _by_name[name].cls if name in _by_name else cls
    if taken is not cls and _qualified(taken) != _qualified(cls):
        detail = (
            f"expected a separate name for {cls.__qualname__}, found {name!r}, "
            f"which is {taken.__qualname__}'s; pass another name"
        )
        raise ArgumentError("bad_option", "register_type(name)", detail)
    _by_name[name] = NamedType(cls, name, to_state, from_state)
    _name_of[cls] = name
    return cls


def name_for_sending(cls: type) -> str | None:
    """The name of a class in messages; None if it has none.

    Registers the class first if this library has or knows it, or if it is a loaded class that
    needs no registration (`accept_loaded_subclasses`).
    """
    name = _name_of.get(cls)
    if name is None and _qualified(cls).startswith(("torch.", "tensordict.")):
        _types_of_tensors()
        name = _name_of.get(cls)
    if name is None and _qualified(cls).startswith("jagcodec."):
        _register_library_types()
        name = _name_of.get(cls)
    if name is None and _loaded_class(_qualified(cls)) is cls:
        register_type(cls)
        name = _name_of[cls]
    return name


def state_of(value: Any) -> Any:
    """The state of a value of a registered type."""
    return _by_name[_name_of[type(value)]].to_state(value)


def restore(name: str, state: Any) -> Any:
    """The value of a registered type from its state."""
    registered = _find(name)
    if registered is None:
        detail = (
            f"expected a type that is registered here, found {brief(name)}; "
            "call jagcodec.register_type for it on this side too"
        )
        raise fail("unknown_type", detail)
    try:
        return registered.from_state(state)
    except Exception as error:  # the user's function may raise anything
        if name in _NAMES_OF_LIBRARY:
            pass_on(error)
        detail = (
            f"expected the state of {brief(name)}, "
            f"found one that raises {type(error).__name__}: {error!s:.200}"
        )
        raise fail("bad_value", detail) from error


def _find(name: str) -> NamedType | None:
    """The type of this name, or None. As `name_for_sending`, this may register the type."""
    if name in _by_name:
        return _by_name[name]
    if name in _NAMES_OF_TENSORS:
        _types_of_tensors()
    elif name in _NAMES_OF_LIBRARY:
        _register_library_types()
    else:
        cls = _loaded_class(name)
        if cls is not None:
            register_type(cls)
    return _by_name.get(name)


def _qualified(cls: type) -> str:
    """What a class is called with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


# --- types that are registered by the class alone ----------------------------------------------


def require_type(state: Any, cls: type) -> Any:
    """The state. Raises an error if its type is not exactly `cls`."""
    if type(state) is not cls:
        raise ValueError(f"expected {cls.__name__}, found {type(state).__name__}")
    return state


def _state_functions(
    cls: Any,
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | tuple[None, None]:
    """The functions from a value of a class to a state and back; (None, None) for other classes."""
    if issubclass(cls, enum.Flag):
        back = lambda bits: cls(_require_member_bits(cls, require_type(bits, int)))  # noqa: E731
        return lambda value: _require_member_bits(cls, int(value.value)), back
    if issubclass(cls, enum.Enum):
        return lambda value: value.name, lambda name: cls.__members__[require_type(name, str)]
    if _is_named_tuple(cls):
        return tuple, partial(_make_named_tuple, cls)
    if "tensordict" in sys.modules:
        functions: Any = _types_of_tensors().state_functions(cls)
        if functions is not None:
            return functions  # type: ignore[no-any-return]
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return partial(_values_of_fields, names), partial(_make_dataclass, cls, names)
    return None, None


def _require_member_bits(cls: Any, bits: int) -> int:
    """The bits of a flag. Raises an error for bits that no member of the class has."""
    # Python keeps every combination of bits that was ever made. Only known bits are accepted, so a
    # stranger cannot make it keep more and more.
    all_bits = functools.reduce(operator.or_, (each.value for each in cls.__members__.values()), 0)
    if bits & ~all_bits:
        raise ValueError(f"expected bits of {cls.__qualname__}'s members, found {bits}")
    return bits


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _make_named_tuple(cls: Any, items: Any) -> Any:
    if len(require_type(items, tuple)) != len(cls._fields):
        raise ValueError(f"expected the fields {list(cls._fields)}")
    return tuple.__new__(cls, items)


def _values_of_fields(names: list[str], value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _make_dataclass(cls: Any, names: list[str], fields: Any) -> Any:
    if list(require_type(fields, dict)) != names:
        raise ValueError(f"expected the fields {names}")
    make: Any = object.__new__
    value = make(cls)
    for name, item in fields.items():
        # Use `object.__setattr__`, as __init__ does: the one of a frozen class raises.
        object.__setattr__(value, name, item)
    return value


# --- types that every reader knows by name -----------------------------------------------------


def maker_of_one(make: Callable[[Any], Any], cls: type) -> Callable[[Any], Any]:
    """A function that checks the type of a state, exactly, and calls `make` with it."""
    return lambda state: make(require_type(state, cls))


def maker_of_fields(make: Callable[..., Any], *types: type) -> Callable[[Any], Any]:
    """A function that checks that a state is a tuple of these types, and calls `make(*state)`."""

    def from_state(state: Any) -> Any:
        if [type(part) for part in require_type(state, tuple)] != list(types):
            raise ValueError(f"expected {[cls.__name__ for cls in types]}")
        return make(*state)

    return from_state


def _ordered_state(value: OrderedDict[Any, Any]) -> Any:
    """The state of an OrderedDict: its items, and `_metadata` if it is a state dict of torch."""
    attributes = vars(value)
    if not attributes:
        return dict(value)
    if [*attributes] != ["_metadata"]:
        names = brief(list(attributes))
        raise ValueError(f"expected no attribute but _metadata, found {names}; call dict(x)")
    return dict(value), attributes["_metadata"]


def _make_ordered(state: Any) -> OrderedDict[Any, Any]:
    if type(state) is dict:
        return OrderedDict(state)
    items, metadata = require_type(state, tuple)
    value: Any = OrderedDict(require_type(items, dict))
    value._metadata = metadata
    return value  # type: ignore[no-any-return]


def _make_slice(state: Any) -> slice:
    start, stop, step = require_type(state, tuple)
    return slice(start, stop, step)


def register_types(types: Iterable[NamedType]) -> None:
    """Register types that are not registered yet."""
    for cls, name, to_state, from_state in types:
        if name_for_sending(cls) is None:
            register_type(cls, name, to_state=to_state, from_state=from_state)


_bounds = operator.attrgetter("start", "stop", "step")


PLAIN_TYPES: tuple[NamedType, ...] = (
    NamedType(OrderedDict, ORDERED_DICT, _ordered_state, _make_ordered),
    NamedType(
        complex,
        "complex",
        operator.attrgetter("real", "imag"),
        maker_of_fields(complex, float, float),
    ),
    NamedType(range, "range", _bounds, maker_of_fields(range, int, int, int)),
    NamedType(slice, "slice", _bounds, _make_slice),
    NamedType(np.str_, "numpy.str_", str, maker_of_one(np.str_, str)),
    NamedType(np.bytes_, "numpy.bytes_", bytes, maker_of_one(np.bytes_, bytes)),
)

_NAMES_OF_TENSORS = (
    *("torch.Size", "torch.dtype", "torch.device"),
    *("tensordict.MetaData", "tensordict.UnbatchedTensor"),
)
"""The names of types that `registry_tensors` registers."""


def _types_of_tensors() -> Any:
    """The module for types of torch and tensordict. The first call imports these."""
    return module_with_torch("wire.registry_tensors", "types of torch")


_NAMES_OF_LIBRARY = (BATCHED_DATA_DICT, PACKED_COLUMN)


def _register_library_types() -> None:
    """Register the types of `_NAMES_OF_LIBRARY`, whose modules import this one."""
    module_with_torch("train.batched_data_dict", "types of jagcodec")


# --- classes that the other side knows by their name -------------------------------------------

_loaded_bases: set[type] = set()  # their subclasses need no registration where they are loaded
_LONGEST_NAME = 1024  # characters of a name that is looked up: each beginning may be a module's


def accept_loaded_subclasses(*bases: type) -> None:
    """From now on subclasses of these types need no registration.

    Readers find the classes that they have imported.
    """
    _loaded_bases.update(bases)


def _loaded_class(name: str) -> Any:
    """The imported class of this name, if it needs no registration; runs no code of its module."""
    steps = name.split(".") if _loaded_bases and len(name) <= _LONGEST_NAME else []
    for i in range(len(steps) - 1, 0, -1):
        item: Any = sys.modules.get(".".join(steps[:i]))
        if isinstance(item, ModuleType):
            for step in steps[i:]:
                # Look into the dict of a module: its `__getattr__` could import something.
                item = vars(item).get(step) if isinstance(item, (ModuleType, type)) else None
            return item if _needs_no_registration(item) and _qualified(item) == name else None
    return None


def _needs_no_registration(item: Any) -> bool:
    """Whether an object is a class that needs no registration."""
    if not isinstance(item, type):
        return False
    if _is_named_tuple(item):
        # Not a class of this library: `encode` gives those a meaning.
        is_of_library = item.__module__.partition(".")[0] == __name__.partition(".")[0]
        return tuple in _loaded_bases and not is_of_library
    return enum.Enum in _loaded_bases and issubclass(item, enum.Enum)


register_types(PLAIN_TYPES)
