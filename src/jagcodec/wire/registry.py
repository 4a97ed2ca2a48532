"""`register_type`: types with a name on the wire, and ways to a state and back.

They are the user's, and those of tensordict's whose state is a value of another kind.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import sys
from collections.abc import Callable
from functools import partial
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
    """Let `encode` accept values of a type in this process, and `decode` make them.

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
        `cls`, so that this can be a decorator of a class.

    Raises:
        ArgumentError: The name is taken by another class.
        ArgumentTypeError: `cls` is not a class, or is another class and one of the two
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
        to_state, from_state = _ways_of(cls)
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
            f"expected a separate name for {cls.__qualname__}, found {name!r}, which is "
            f"{taken.cls.__qualname__}'s; pass another name",
        )
    _by_name[name] = _Registration(cls, to_state, from_state)
    _name_of[cls] = name
    return cls


def registered_name(cls: type) -> str | None:
    """What a class is called in messages, or None if it is not registered."""
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
    cls = _loaded_class(name) if name not in _by_name else None
    if cls is not None:
        register_type(cls)
    registration = _by_name.get(name)
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

_Ways = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""To a state, and back."""


def _ways_of(cls: Any) -> _Ways | tuple[None, None]:
    if issubclass(cls, enum.Flag):
        return lambda value: _known_bits(cls, int(value.value)), partial(_flag, cls)
    if issubclass(cls, enum.Enum):
        return lambda value: value.name, lambda name: cls.__members__[of_type(name, str)]
    if is_named_tuple(cls):
        return tuple, partial(_named_tuple, cls)
    if issubclass(cls, NonTensorDataBase):
        return _non_tensor_data, partial(_non_tensor, cls)
    if is_tensorclass(cls):
        return _parts_of_tensorclass, partial(_tensorclass, cls)
    if issubclass(cls, TensorDictBase) and hasattr(cls, "__required_keys__"):
        return source_of, lambda td: cls.from_tensordict(_tensordict(td), check=False)
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
        return partial(_fields, names), partial(_dataclass, cls, names)
    return None, None


def _known_bits(cls: Any, bits: int) -> int:
    # Python keeps every combination that was ever made: of known bits there are so many.
    known = functools.reduce(operator.or_, (each.value for each in cls.__members__.values()), 0)
    if bits & ~known:
        raise ValueError(f"expected bits of {cls.__qualname__}'s members, found {bits}")
    return bits


def _flag(cls: Any, bits: Any) -> Any:
    return cls(_known_bits(cls, of_type(bits, int)))


def is_named_tuple(cls: type) -> bool:
    """Whether a class is one of `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _named_tuple(cls: Any, items: Any) -> Any:
    if len(of_type(items, tuple)) != len(cls._fields):
        raise ValueError(f"expected the fields {list(cls._fields)}")
    return tuple.__new__(cls, items)


def _fields(names: list[str], value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _dataclass(cls: Any, names: list[str], fields: Any) -> Any:
    if list(of_type(fields, dict)) != names:
        raise ValueError(f"expected the fields {names}")
    make: Any = object.__new__
    value = make(cls)
    for name, item in fields.items():
        # Past a frozen class's own __setattr__, as its __init__ does.
        object.__setattr__(value, name, item)
    return value


# --- tensordict's ------------------------------------------------------------------------------


def _parts_of_tensorclass(value: Any) -> Any:
    fields, others = fields_of(value)
    return (fields, others) if others else fields


def _tensorclass(cls: Any, state: Any) -> Any:
    fields, others = state if type(state) is tuple else (state, {})
    return tensorclass_of(cls, _tensordict(fields), of_type(others, dict))


def _tensordict(state: Any) -> TensorDictBase:
    if not isinstance(state, TensorDictBase) or isinstance(state, NonTensorStack):
        raise ValueError(f"expected a TensorDict, found {type(state).__name__}")
    return state


def _non_tensor_data(value: Any) -> NonTensorData:
    return NonTensorData(value.data, batch_size=value.batch_size, names=value.names)


def _non_tensor(cls: Any, payload: Any) -> Any:
    of_type(payload, NonTensorData)
    return cls(payload.data, batch_size=payload.batch_size)


def _unbatched(state: Any) -> Any:
    size, tensor = state
    if not (size is None or type(size) is torch.Size) or type(tensor) is not torch.Tensor:
        raise ValueError("expected a batch size or None, and a tensor")
    return unbatched_of(size, tensor)


for _cls, (_name, _to_state, _from_state) in PLAIN_TYPES.items():
    register_type(_cls, _name, to_state=_to_state, from_state=_from_state)


BATCHED_DATA_DICT = "jagcodec.BatchedDataDict"
"""What a `BatchedDataDict` is called."""

register_type(MetaData, "tensordict.MetaData")
_unbatched_name = "tensordict.UnbatchedTensor"
register_type(UnbatchedTensor, _unbatched_name, to_state=unbatched_parts, from_state=_unbatched)


# --- classes that the other side knows by their name -------------------------------------------

_loaded_too: set[type] = set()
"""Subclasses of these need no registration where they are loaded."""


def use_loaded(*bases: type) -> None:
    """Let named tuples or members of `Enum` be encoded and decoded without registration.

    Nothing is imported: `decode` finds a class only in a module that this process has imported
    already, under the name that it has there.
    """
    _loaded_too.update(bases)


_LONGEST_NAME = 1024
"""Characters of a name that is looked up, each of whose beginnings may be that of a module."""


def _loaded_class(name: str) -> Any:
    """The class that needs no registration under this name, or None. Runs no code of it."""
    steps = name.split(".") if _loaded_too and len(name) <= _LONGEST_NAME else []
    for i in range(len(steps) - 1, 0, -1):
        module = sys.modules.get(".".join(steps[:i]))
        if isinstance(module, ModuleType):
            found: Any = module
            for step in steps[i:]:
                # From its dict: a module may import what is asked of it.
                found = vars(found).get(step) if isinstance(found, (ModuleType, type)) else None
            return found if _is_found(found) and _qualified(found) == name else None
    return None


def _is_found(found: Any) -> bool:
    """Whether something is a class that needs no registration."""
    if not isinstance(found, type):
        return False
    if is_named_tuple(found):
        # This library's own mean something to `encode`.
        ours = found.__module__.partition(".")[0] == __name__.partition(".")[0]
        return tuple in _loaded_too and not ours
    return enum.Enum in _loaded_too and issubclass(found, enum.Enum)
