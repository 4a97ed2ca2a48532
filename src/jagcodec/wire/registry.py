"""Types of the user's: a name on the wire, a way to a state that can ride, and a way back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tensordict import is_tensorclass

from jagcodec.errors import ArgumentError, ArgumentTypeError, WireFormatError, brief

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
    """Let values of a type ride: in this process `encode` takes them, and `decode` makes them.

    Both sides register the type under one name. Exactly this class is meant, not its subclasses.

    Args:
        cls: A class. A dataclass or a tensorclass needs nothing more: its fields ride, and come
            back as they were (a dataclass without `__init__` or `__post_init__` being run).
        name: What the type is called in messages, by default its module and qualified name. Give
            one that outlives the next refactoring.
        to_state: A value to anything that can ride.
        from_state: That, on the other side, to a value. It sees what the sender wrote, so it
            checks what it is given.

    Returns:
        `cls`, so that this can stand above a class as a decorator.

    Raises:
        ArgumentError: The name is taken by another class.
        ArgumentTypeError: `cls` is no class, or is neither a dataclass nor a tensorclass and one
            of the two functions is missing.

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
            "expected a dataclass, a tensorclass, or both to_state and from_state, found neither",
        )
    name = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
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
    return _name_of.get(cls)


def state_of(value: Any) -> Any:
    """The state of a value of a registered type."""
    return _by_name[_name_of[type(value)]].to_state(value)


def restore(name: str, state: Any) -> Any:
    """The value of a registered type from its state.

    Raises:
        WireFormatError: No type has this name here, or the state does not make one.
    """
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


def _short_way(cls: Any) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    if is_tensorclass(cls):
        return (lambda value: value.to_tensordict(), cls.from_tensordict)
    if not dataclasses.is_dataclass(cls):
        return None, None
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
