"""The records of documents -> Python values (see `documents`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from jagcodec import cells
from jagcodec.errors import WireFormatError
from jagcodec.wire import numpy_dtypes
from jagcodec.wire.checks import check_distinct, expect, inside
from jagcodec.wire.documents import RECORDS, Tag
from jagcodec.wire.dtypes import unknown_dtype
from jagcodec.wire.limits import exceeded
from jagcodec.wire.registry import restore
from jagcodec.wire.schema import numpy_itemsize
from jagcodec.wire.spec import Kind

AnyArray: TypeAlias = npt.NDArray[Any]

# Of every dtype that this torch has: a dtype itself can be encoded even where its tensors cannot.
_ALL_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}

_NATIVE = frozenset((str, int, float, bool, bytes, type(None)))


def revived(value: Any, depth: int, most: int, allow_pickle: bool) -> Any:
    """A document in which records are what they stand for; its lists and dicts are written to.

    `depth` counts the containers around it, of which there are at most `most`.

    Raises:
        WireFormatError: It nests too deep, or a record is malformed.
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
        tag = value[0].kind if value and type(value[0]) is Tag else None
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
        raise WireFormatError(
            "bad_record", "$", f"expected {len(names)} fields of {kind.name}, found {len(fields)}"
        )
    try:
        return _RECORDS[kind](allow_pickle, *fields)
    except (WireFormatError, MemoryError):
        raise
    except Exception as error:  # torch and numpy raise all kinds
        raise bad(f"a {kind.name}", error) from error


def bad(expected: str, found: Any) -> WireFormatError:
    """The error of parts that do not fit together."""
    # Foreign texts can be long: torch's dispatch tables, a stranger's own words.
    return WireFormatError("bad_value", "$", f"expected {expected}, found {found!s:.200}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a checked name.

    Raises:
        WireFormatError: This numpy has no such dtype.
    """
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:
        raise WireFormatError(
            "unknown_dtype",
            "$",
            f"expected a dtype of numpy {np.__version__}, found {error!s:.200}",
        ) from error


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


def _complex(_: bool, real: Any, imag: Any) -> complex:
    expect(type(real) is type(imag) is float, "bad_record", "floats", [real, imag])
    return complex(real, imag)


def _members(_: bool, *items: Any) -> tuple[Any, ...]:
    check_distinct(items, "set members", run=10)
    if len(set(items)) != len(items):
        raise bad("every set member once", "some twice")
    return items


def _dict_record(_: bool, *items: Any) -> dict[Any, Any]:
    expect(len(items) % 2 == 0, "bad_record", "keys and values in turn", len(items))
    return dict_of(list(items[::2]), items[1::2])


def _range(_: bool, *parts: Any) -> range:
    expect(all(type(part) is int for part in parts), "bad_record", "integers", list(parts))
    expect(parts[2] != 0, "bad_record", "a step other than 0", parts[2])
    return range(*parts)


def _numbers(_: bool, dtype: Any, data: Any) -> list[Any]:
    known = type(dtype) is str and dtype in cells.PACKED
    expect(known, "unknown_dtype", f"one of {', '.join(cells.PACKED)}", dtype)
    expect(type(data) is bytes, "bad_record", "bytes", data)
    numbers = cells.unpack(dtype, data)
    if numbers is None:
        raise bad(f"cells of {dtype}, bools of 0 and 1", f"{len(data)} bytes")
    return numbers


def _scalar_record(_: bool, dtype: Any, data: Any) -> Any:
    itemsize = numpy_itemsize(dtype)
    fits = type(data) is bytes and len(data) == itemsize
    expect(fits, "bad_record", f"{itemsize} bytes", data)
    own = np.frombuffer(bytearray(data), dtype=np.uint8)
    array: AnyArray = np.ndarray((), dtype=numpy_dtype(dtype), buffer=own)
    numpy_dtypes.check_text(array)
    return array[()]


def _string_scalar(_: bool, value: Any) -> Any:
    expect(type(value) in (str, bytes), "bad_record", "a str or bytes", value)
    return np.str_(value) if isinstance(value, str) else np.bytes_(value)


def _size(_: bool, *dims: Any) -> torch.Size:
    for dim in dims:
        fits = type(dim) is int and -(1 << 63) <= dim < 1 << 63
        expect(fits, "bad_record", "a 64-bit int", dim)
    return torch.Size(dims)


def _dtype(_: bool, name: Any) -> torch.dtype:
    expect(type(name) is str, "unknown_dtype", "a dtype's name", name)
    dtype = _ALL_DTYPES.get(name)
    if dtype is None:
        raise unknown_dtype(name)
    return dtype


def _device(_: bool, kind: Any, number: Any) -> torch.device:
    # Before torch is asked, which quotes what it does not know.
    word = type(kind) is str and kind.isascii() and kind.isalnum()
    expect(word, "bad_record", "a device type", kind)
    fits = number is None or (type(number) is int and 0 <= number < 128)
    expect(fits, "bad_record", "a device number (0 to 127) or None", number)
    return torch.device(kind) if number is None else torch.device(kind, number)


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
    Kind.COMPLEX: _complex,
    Kind.TUPLE: lambda _, *items: items,
    Kind.SET: lambda _, *items: set(_members(_, *items)),
    Kind.FROZENSET: lambda _, *items: frozenset(_members(_, *items)),
    Kind.DICT: _dict_record,
    Kind.RANGE: _range,
    Kind.SLICE: lambda _, *parts: slice(*parts),
    Kind.NUMBERS: _numbers,
    Kind.SCALAR: _scalar_record,
    Kind.STRING_SCALAR: _string_scalar,
    Kind.SIZE: _size,
    Kind.DTYPE: _dtype,
    Kind.DEVICE: _device,
    Kind.USER: _user_record,
    Kind.PICKLE: _pickle,
}
