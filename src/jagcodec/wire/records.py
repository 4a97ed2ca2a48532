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
    tag, parts = None, value
    if kind is list and value and type(value[0]) is Kind:
        tag, parts = value[0], value[1:]
    step: Any = None
    try:
        if tag not in (Kind.SCALAR, Kind.NUMBERS):  # whose fields are plain
            for step, item in value.items() if kind is dict else enumerate(parts):
                if type(item) not in _NATIVE:
                    parts[step] = revived(item, depth + 1, most, allow_pickle)
    except WireFormatError as error:
        raise inside(error, step) from error
    return parts if tag is None else _record(tag, parts, allow_pickle)


def _record(kind: Kind, fields: list[Any], allow_pickle: bool) -> Any:
    names = RECORDS[kind]
    if names[0] != "*items" and len(fields) != len(names):
        expected = f"expected {len(names)} fields of {kind.name}"
        raise WireFormatError("bad_record", "$", f"{expected}, found {len(fields)}")
    try:
        options = (allow_pickle,) if kind is Kind.PICKLE else ()
        return _RECORDS[kind](*fields, *options)
    except (WireFormatError, MemoryError):
        raise
    except Exception as error:  # torch and numpy raise all kinds
        raise bad(f"a {kind.name}", error) from error


def dict_of(keys: Sequence[Any], items: Sequence[Any]) -> dict[Any, Any]:
    """A dict of keys that a stranger chose."""
    check_distinct(keys, "dict keys")
    value = dict(zip(keys, items, strict=True))
    if len(value) != len(keys):
        raise bad("every dict key once", "some twice")
    return value


def _set(*items: Any) -> set[Any]:
    check_distinct(items, "set members", run=10)
    members = set(items)
    if len(members) != len(items):
        raise bad("every set member once", "some twice")
    return members


def _dict(*items: Any) -> dict[Any, Any]:
    expect(len(items) % 2 == 0, "bad_record", "keys and values in turn", len(items))
    return dict_of(items[::2], items[1::2])


def _big_int(data: Any) -> int:
    expect(type(data) is bytes and data != b"", "bad_record", "bytes", data)
    return int.from_bytes(data, "little", signed=True)


def _numbers(dtype: Any, data: Any) -> list[Any]:
    known = type(dtype) is str and dtype in cells.PACKED
    expect(known, "unknown_dtype", f"one of {', '.join(cells.PACKED)}", dtype)
    expect(type(data) is bytes, "bad_record", "bytes", data)
    numbers = cells.unpack_numbers(dtype, data)
    if numbers is None:
        raise bad(f"cells of {dtype}, bools of 0 and 1", f"{len(data)} bytes")
    return numbers


def _scalar(dtype: Any, data: Any) -> Any:
    itemsize = numpy_itemsize(dtype)
    fits = type(data) is bytes and len(data) == itemsize
    expect(fits, "bad_record", f"{itemsize} bytes", data)
    array: Any = np.ndarray((), dtype=numpy_dtype(dtype), buffer=bytearray(data))
    check_text(array)
    return array[()]


def _user(name: Any, state: Any) -> Any:
    expect(type(name) is str, "bad_record", "a type's name", name)
    return restore(name, state)


def _pickle(data: Any, allow_pickle: bool) -> Any:
    expect(type(data) is bytes, "bad_record", "bytes", data)
    if not allow_pickle:
        raise WireFormatError(
            "pickle_refused",
            "$",
            "expected a message without pickle, found a pickled object; if you trust the sender "
            "with this process, pass allow_pickle=True on both sides",
        )
    try:
        return pickle.loads(data)  # noqa: S301
    except Exception as error:  # whatever unpickling may raise
        raise bad("data that unpickles", f"{type(error).__name__}: {error!s:.200}") from error


_RECORDS: dict[Kind, Callable[..., Any]] = {
    Kind.BIG_INT: _big_int,
    Kind.TUPLE: lambda *items: items,
    Kind.SET: _set,
    Kind.FROZENSET: lambda *items: frozenset(_set(*items)),
    Kind.DICT: _dict,
    Kind.NUMBERS: _numbers,
    Kind.SCALAR: _scalar,
    Kind.USER: _user,
    Kind.PICKLE: _pickle,
}
