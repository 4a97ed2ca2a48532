"""Records of documents to Python values."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jagcodec import cells
from jagcodec.errors import WireFormatError
from jagcodec.wire.checks import bad, check_distinct, expect, inside
from jagcodec.wire.documents import RECORDS
from jagcodec.wire.dtypes import check_text, numpy_dtype
from jagcodec.wire.limits import exceeded
from jagcodec.wire.registry import restore
from jagcodec.wire.schema import numpy_itemsize
from jagcodec.wire.spec import Kind

_NATIVE = frozenset((str, int, float, bool, bytes, type(None)))


def revived(value: Any, depth: int, most: int, allow_pickle: bool) -> Any:
    """A document with its records as values; its lists and dicts are written to.

    `depth` counts the containers around it, of which there are at most `most`.
    """
    kind = type(value)
    if kind in _NATIVE:
        return value
    if kind is not list and kind is not dict:
        raise WireFormatError("unknown_kind", "$", f"expected a value, found a {kind.__name__}")
    if depth > most:
        raise exceeded("depth", most, depth, "levels")
    step: Any = None
    depth += 1
    try:
        if kind is dict:
            for step, item in value.items():
                if type(item) not in _NATIVE:
                    value[step] = revived(item, depth, most, allow_pickle)
            return value
        tag = value[0] if value and type(value[0]) is Kind else None
        if tag in (Kind.SCALAR, Kind.NUMBERS):
            return _record(tag, value[1:], allow_pickle)  # whose fields are plain
        parts = value if tag is None else value[1:]
        for index, item in enumerate(parts):
            step = index
            if type(item) not in _NATIVE:
                parts[index] = revived(item, depth, most, allow_pickle)
    except WireFormatError as error:
        raise inside(error, step) from error
    return parts if tag is None else _record(tag, parts, allow_pickle)


def _record(kind: Kind, fields: list[Any], allow_pickle: bool) -> Any:
    names = RECORDS[kind]
    if names[0] != "*items" and len(fields) != len(names):
        expected = f"expected {len(names)} fields of {kind.name}"
        raise WireFormatError("bad_record", "$", f"{expected}, found {len(fields)}")
    try:
        return _RECORDS[kind](allow_pickle, *fields)
    except (WireFormatError, MemoryError):
        raise
    except Exception as error:  # torch and numpy raise all kinds
        raise bad(f"a {kind.name}", error) from error


def dict_of(keys: list[Any], items: Sequence[Any]) -> dict[Any, Any]:
    """A dict of keys that a stranger chose."""
    check_distinct(keys, "dict keys")
    value = dict(zip(keys, items, strict=True))
    if len(value) != len(keys):
        raise bad("every dict key once", "some twice")
    return value


def _big_int(_: bool, data: Any) -> int:
    expect(type(data) is bytes and data != b"", "bad_record", "bytes", data)
    return int.from_bytes(data, "little", signed=True)


def _members(_: bool, *items: Any) -> tuple[Any, ...]:
    check_distinct(items, "set members", run=10)
    if len(set(items)) != len(items):
        raise bad("every set member once", "some twice")
    return items


def _dict_record(_: bool, *items: Any) -> dict[Any, Any]:
    expect(len(items) % 2 == 0, "bad_record", "keys and values in turn", len(items))
    return dict_of(list(items[::2]), items[1::2])


def _numbers(_: bool, dtype: Any, data: Any) -> list[Any]:
    known = type(dtype) is str and dtype in cells.PACKED
    expect(known, "unknown_dtype", f"one of {', '.join(cells.PACKED)}", dtype)
    expect(type(data) is bytes, "bad_record", "bytes", data)
    numbers = cells.unpack_numbers(dtype, data)
    if numbers is None:
        raise bad(f"cells of {dtype}, bools of 0 and 1", f"{len(data)} bytes")
    return numbers


def _scalar_record(_: bool, dtype: Any, data: Any) -> Any:
    itemsize = numpy_itemsize(dtype)
    fits = type(data) is bytes and len(data) == itemsize
    expect(fits, "bad_record", f"{itemsize} bytes", data)
    own = np.frombuffer(bytearray(data), dtype=np.uint8)
    array: Any = np.ndarray((), dtype=numpy_dtype(dtype), buffer=own)
    check_text(array)
    return array[()]


def _user_record(_: bool, name: Any, state: Any) -> Any:
    expect(type(name) is str, "bad_record", "a type's name", name)
    return restore(name, state)


def _pickle(allow_pickle: bool, data: Any) -> Any:
    expect(type(data) is bytes, "bad_record", "bytes", data)
    if not allow_pickle:
        raise WireFormatError(
            "pickle_refused",
            "$",
            "expected a message without pickle, found a pickled object; if you trust the "
            "sender with this process, pass allow_pickle=True on both sides",
        )
    try:
        return pickle.loads(data)  # noqa: S301
    except Exception as error:  # whatever unpickling may raise
        raise bad("data that unpickles", f"{type(error).__name__}: {error!s:.200}") from error


_RECORDS: dict[Kind, Callable[..., Any]] = {
    Kind.BIG_INT: _big_int,
    Kind.TUPLE: lambda _, *items: items,
    Kind.SET: lambda _, *items: set(_members(_, *items)),
    Kind.FROZENSET: lambda _, *items: frozenset(_members(_, *items)),
    Kind.DICT: _dict_record,
    Kind.NUMBERS: _numbers,
    Kind.SCALAR: _scalar_record,
    Kind.USER: _user_record,
    Kind.PICKLE: _pickle,
}
