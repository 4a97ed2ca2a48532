"""Types that have a name on the wire, a way to a state that can be encoded, and a way back.

They are the user's, and those of tensordict's whose state is a value of another kind.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)
from tensordict.tensorclass import NonTensorDataBase

from jagcodec.errors import ArgumentError, ArgumentTypeError, WireFormatError, brief
from jagcodec.ragged.non_tensor import (
    fields_of,
    source_of,
    tensorclass_of,
    unbatched_of,
    unbatched_parts,
)
from jagcodec.wire.plain_types import PLAIN_TYPES, of_type

T = TypeVar("T")


class _Registration(NamedTuple):
    cls: type
    to_state: Callable[[Any], Any]
    from_state: Callable[[Any], Any]


# The one state of this process: what its types are called. Single dict operations, so that
# registering in one thread and encoding in another need no lock.
_by_name: dict[str, _Registration] = {}
_name_of: dict[type, str] = {}


def register_type(
    cls: type[T],
    name: str | None = None,
    *,
    to_state: Callable[[T], Any] | None = None,
    from_state: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let `encode` take the values of a type in this process, and `decode` make them.

    Both sides register the type under one name. Exactly this class is meant, not its subclasses.

    Args:
        cls: A class. A dataclass, a tensorclass, a `TypedTensorDict`, a named tuple or an `Enum`
            needs nothing more. The fields of the first four are encoded, and arrive as they were:
            neither `__init__` nor `__post_init__` is run on them again. Of a tensorclass that
            holds others, those are registered too. Members of an `Enum` are encoded by name.
        name: What the type is called in messages, by default its module and qualified name. Give
            one that outlives the next refactoring.
        to_state: A value to anything that can be encoded.
        from_state: That, on the other side, to a value. It sees what the sender wrote, so it
            checks what it is given.

    Returns:
        `cls`, so that this can stand above a class as a decorator.

    Raises:
        ArgumentError: The name is taken by another class.
        ArgumentTypeError: `cls` is not a class, or is none of the above and one of the two
            functions is missing.

    For `OrderedDict`, `datetime`, `Path` and others see `jagcodec.stdlib`.

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
    where = "register_type"
    if not isinstance(cls, type):
        raise ArgumentTypeError(
            "bad_type", f"{where}(cls)", f"expected a class, found {type(cls).__name__}"
        )
    if to_state is None and from_state is None:
        to_state, from_state = _short_way(cls)
    if to_state is None or from_state is None:
        raise ArgumentTypeError(
            "bad_type",
            f"{where}({cls.__qualname__})",
            "expected a dataclass, a tensorclass, a TypedTensorDict, a named tuple, an Enum, or "
            "both to_state and from_state, found none of these",
        )
    name = _qualified(cls) if name is None else name
    taken = _by_name.get(name)
    if taken is not None and taken.cls is not cls and _qualified(taken.cls) != _qualified(cls):
        raise ArgumentError(
            "bad_option",
            f"{where}(name)",
            f"expected a name of its own for {cls.__qualname__}, found {name!r}, which is "
            f"{taken.cls.__qualname__}'s; pass another name",
        )
    _by_name[name] = _Registration(cls, to_state, from_state)
    _name_of[cls] = name
    return cls


def registered_name(cls: type) -> str | None:
    """What a class is called in messages, or None if it is not registered."""
    name = _name_of.get(cls)
    if name is None and _loaded_too and _is_known_by_name(cls):
        register_type(cls)
        return _qualified(cls)
    return name


def state_of(value: Any) -> Any:
    """The state of a value of a registered type."""
    return _by_name[_name_of[type(value)]].to_state(value)


def restore(name: str, state: Any) -> Any:
    """The value of a registered type from its state."""
    registration = _by_name.get(name)
    if registration is None and _loaded_too:
        cls = _loaded_class(name)
        if cls is not None and _is_known_by_name(cls):
            register_type(cls)
            registration = _by_name[name]
    if registration is None:
        raise WireFormatError(
            "unknown_type",
            "$",
            f"expected a type that is registered here, found {brief(name)}; "
            "call jagcodec.register_type for it on this side too",
        )
    try:
        return registration.from_state(state)
    except Exception as error:  # whatever the user's function raises
        raise WireFormatError(
            "bad_value",
            "$",
            f"expected the state of {brief(name)}, found one that raises "
            f"{type(error).__name__}: {error!s:.200}",
        ) from error


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# --- types that are registered by the class alone ----------------------------------------------

_State = tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]


def _short_way(cls: Any) -> _State:
    if issubclass(cls, enum.Enum):
        return _enum_state(cls)
    if is_named_tuple(cls):
        return tuple, _named_tuple_from(cls)
    if issubclass(cls, NonTensorDataBase):
        return _non_tensor_data, _non_tensor_from(cls)
    if is_tensorclass(cls):
        return _tensorclass_state, _tensorclass_from(cls)
    if issubclass(cls, TensorDictBase) and hasattr(cls, "__required_keys__"):
        return source_of, _typed_from(cls)
    if dataclasses.is_dataclass(cls):
        return _dataclass_state(cls)
    return None, None


def _dataclass_state(cls: Any) -> _State:
    names = [field.name for field in dataclasses.fields(cls)]

    def to_state(value: Any) -> Any:
        return {name: getattr(value, name) for name in names}

    def from_state(state: Any) -> Any:
        if type(state) is not dict or list(state) != names:
            raise ValueError(f"expected the fields {names}")
        make: Any = object.__new__
        value = make(cls)
        for name, item in state.items():
            # Past a frozen class's own __setattr__, as its __init__ does.
            object.__setattr__(value, name, item)
        return value

    return to_state, from_state


def _enum_state(cls: Any) -> _State:
    if issubclass(cls, enum.Flag):  # combinations of members have no name of their own
        known = functools.reduce(operator.or_, (each.value for each in cls.__members__.values()), 0)

        def bits(value: Any) -> Any:
            # Python keeps every combination that was ever made: of known bits there are so many.
            if of_type(value, int) & ~known:
                raise ValueError(f"expected bits of {cls.__qualname__}'s members, found {value}")
            return value

        return lambda value: bits(int(value.value)), lambda state: cls(bits(state))
    return lambda value: value.name, lambda state: cls.__members__[of_type(state, str)]


def is_named_tuple(cls: type) -> bool:
    """Whether a class is one of `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _named_tuple_from(cls: Any) -> Callable[[Any], Any]:
    def from_state(state: Any) -> Any:
        if len(of_type(state, tuple)) != len(cls._fields):
            raise ValueError(f"expected the fields {list(cls._fields)}")
        return tuple.__new__(cls, state)

    return from_state


# --- tensordict's ------------------------------------------------------------------------------


def _tensorclass_state(value: Any) -> Any:
    fields, others = fields_of(value)
    return (fields, others) if others else fields


def _tensorclass_from(cls: Any) -> Callable[[Any], Any]:
    def from_state(state: Any) -> Any:
        fields, others = state if type(state) is tuple else (state, {})
        of_type(others, dict)
        return tensorclass_of(cls, _tensordict(fields), others)

    return from_state


def _typed_from(cls: Any) -> Callable[[Any], Any]:
    return lambda state: cls.from_tensordict(_tensordict(state), check=False)


def _tensordict(state: Any) -> TensorDictBase:
    if not isinstance(state, TensorDictBase) or isinstance(state, NonTensorStack):
        raise ValueError(f"expected a TensorDict, found {type(state).__name__}")
    return state


def _non_tensor_data(value: Any) -> NonTensorData:
    return NonTensorData(value.data, batch_size=value.batch_size, names=value.names)


def _non_tensor_from(cls: Any) -> Callable[[Any], Any]:
    def from_state(state: Any) -> Any:
        of_type(state, NonTensorData)
        return cls(state.data, batch_size=state.batch_size)

    return from_state


def _unbatched_from(state: Any) -> Any:
    size, tensor = state
    if not (size is None or type(size) is torch.Size) or type(tensor) is not torch.Tensor:
        raise ValueError("expected a batch size or None, and a tensor")
    return unbatched_of(size, tensor)


for _cls, (_name, _to_state, _from_state) in PLAIN_TYPES.items():
    register_type(_cls, _name, to_state=_to_state, from_state=_from_state)


BATCHED_DATA_DICT = "jagcodec.BatchedDataDict"
"""What a `BatchedDataDict` is called."""

register_type(MetaData, "tensordict.MetaData")
register_type(
    UnbatchedTensor,
    "tensordict.UnbatchedTensor",
    to_state=unbatched_parts,
    from_state=_unbatched_from,
)


# --- classes that the other side knows by their name -------------------------------------------

_loaded_too: list[type] = []
"""Once `use_loaded` was called: which subclasses need no registration where they are loaded."""


def use_loaded(*bases: type) -> None:
    """Let named tuples and members of `Enum` be encoded and decoded without registration.

    Nothing is imported: `decode` finds a class only in a module that this process has imported
    already, under the name that it has there.
    """
    _loaded_too[:] = dict.fromkeys((*_loaded_too, *bases))


def _is_known_by_name(cls: type) -> bool:
    if enum.Enum in _loaded_too and issubclass(cls, enum.Enum):
        return _loaded_class(_qualified(cls)) is cls
    if tuple in _loaded_too and is_named_tuple(cls):
        # This library's own mean something to `encode`.
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        return not ours and _loaded_class(_qualified(cls)) is cls
    return False


_LONGEST_NAME = 1024
"""Characters of a name that is looked up, each of whose beginnings may be that of a module."""


def _loaded_class(name: str) -> Any:
    """The class of this qualified name, if its module is loaded, else None. Runs no code of it."""
    steps = name.split(".") if len(name) <= _LONGEST_NAME else []
    for i in range(len(steps) - 1, 0, -1):
        module = sys.modules.get(".".join(steps[:i]))
        if isinstance(module, ModuleType):
            found: Any = module
            for step in steps[i:]:
                # From its dict: a module may import what is asked of it.
                found = vars(found).get(step) if isinstance(found, (ModuleType, type)) else None
            return found if isinstance(found, type) else None
    return None
