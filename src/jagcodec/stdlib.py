"""`register_stdlib_types`: types of the standard library that `encode` then accepts.

`_TYPES`, at the end, has each of them with the functions that write and read it.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any
from uuid import UUID

from jagcodec._compiling import untraced
from jagcodec.wire.registry import (
    NamedType,
    accept_loaded_subclasses,
    maker_of_fields,
    maker_of_one,
    register_types,
)


@untraced
def register_stdlib_types() -> None:
    """Let `encode` and `decode` in this process accept types of the standard library.

    Both sides call it, once, for example where they import jagcodec.

    Example:
        >>> import datetime, pathlib
        >>> from jagcodec import decode, encode
        >>> from jagcodec.stdlib import register_stdlib_types
        >>> register_stdlib_types()
        >>> value = {"at": datetime.datetime(2026, 1, 2), "log": pathlib.Path("runs/7/log")}
        >>> decode(encode(value)) == value
        True

    These arrive as they were, alone, inside other values, and as dict keys if they can be hashed:

    * `bytearray`, `deque` without `maxlen`, and `defaultdict` with a factory of the
      builtins list, dict, set, tuple, str, bytes, int, float, bool, or with None;
    * `datetime` without a time zone or with an offset for one; `date`, `timedelta`, `UUID`,
      `Decimal`;
    * `Path` (it arrives as the `Path` of the receiver's platform);
    * members of any `Enum`, and named tuples, if their class is in a module under its own
      name, and the receiver has imported that module.

    Nothing is ever imported on the word of a message. A sender can choose among all enums and named
    tuples that the receiver has imported, but not run any code by it, except for `_missing_` of a
    `Flag`. Subclasses of the other types are rejected. You may call this again.
    """
    register_types(_TYPES)
    accept_loaded_subclasses(enum.Enum, tuple)


_FACTORIES = {cls.__name__: cls for cls in (list, dict, set, tuple, str, bytes, int, float, bool)}


def _defaultdict_state(value: defaultdict[Any, Any]) -> Any:
    """The name of the factory, empty for None, and the items."""
    factory: Any = value.default_factory
    name = getattr(factory, "__name__", None)
    if factory is not None and _FACTORIES.get(str(name)) is not factory:
        expected = f"expected None or one of {', '.join(_FACTORIES)} for its factory"
        raise ValueError(f"{expected}, found {factory!r}; call dict(x)")
    return name or "", dict(value)


def _defaultdict(name: str, items: dict[Any, Any]) -> defaultdict[Any, Any]:
    return defaultdict(_FACTORIES[name] if name else None, items)


def _deque_items(value: deque[Any]) -> list[Any]:
    if value.maxlen is not None:
        raise ValueError(f"expected a deque without maxlen, found {value.maxlen}; call list(x)")
    return list(value)


def _datetime_text(value: datetime) -> str:
    zone, offset = value.tzinfo, value.utcoffset()
    is_plain = zone is None if offset is None else repr(zone) == repr(timezone(offset))
    if value.fold or not is_plain:
        expected = "expected no fold, and an offset for a time zone, found fold"
        raise ValueError(f"{expected} {value.fold} and {zone!r}; call x.astimezone(datetime.UTC)")
    return value.isoformat()


_PARTS = attrgetter("days", "seconds", "microseconds")

_TYPES: tuple[NamedType, ...] = (
    NamedType(
        defaultdict,
        "collections.defaultdict",
        _defaultdict_state,
        maker_of_fields(_defaultdict, str, dict),
    ),
    NamedType(deque, "collections.deque", _deque_items, maker_of_one(deque, list)),
    NamedType(bytearray, "bytearray", bytes, maker_of_one(bytearray, bytes)),
    NamedType(
        datetime, "datetime.datetime", _datetime_text, maker_of_one(datetime.fromisoformat, str)
    ),
    NamedType(date, "datetime.date", date.isoformat, maker_of_one(date.fromisoformat, str)),
    NamedType(timedelta, "datetime.timedelta", _PARTS, maker_of_fields(timedelta, int, int, int)),
    NamedType(
        UUID, "uuid.UUID", attrgetter("bytes"), maker_of_one(lambda data: UUID(bytes=data), bytes)
    ),
    NamedType(Decimal, "decimal.Decimal", str, maker_of_one(Decimal, str)),
    NamedType(type(Path()), "pathlib.Path", str, maker_of_one(Path, str)),
)
