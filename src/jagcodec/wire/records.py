"""What the value tree is made of: one record per kind that msgpack lacks, and its checks.

Plain data and plain checks: no torch, no numpy, no msgpack. A record that passed its check points
inside the buffers of its message and names only things of the tables in `spec`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jagcodec.errors import Reason, WireFormatError
from jagcodec.wire.spec import (
    COMPRESSED_LAYOUTS,
    MAX_DEPTH,
    MAX_EQUAL_HASHES,
    MAX_NDIM,
    MAX_UNBACKED_ROWS,
    TORCH_DTYPES,
    Kind,
)

INT64_MAX = (1 << 63) - 1


class Place(NamedTuple):
    """Where a value's bytes lie: a buffer of the table and a byte offset into it."""

    buffer: int
    offset: int


class Group(NamedTuple):
    """A ragged group: int64 row offsets (rows + 1 of them) with the shortest and longest row."""

    buffer: int
    offset: int
    rows: int
    min: int
    max: int


# Records. The field order is the wire's field order.


class BigInt(NamedTuple):
    data: bytes


class Complex(NamedTuple):
    real: float
    imag: float


class Tuple(NamedTuple):
    items: list[Any]


class Set(NamedTuple):
    items: list[Any]


class FrozenSet(NamedTuple):
    items: list[Any]


class Dict(NamedTuple):
    """A dict with a key that is not a string: keys and values in turn."""

    items: list[Any]


class Range(NamedTuple):
    start: Any
    stop: Any
    step: Any


class Slice(NamedTuple):
    start: Any
    stop: Any
    step: Any


class Bytes(NamedTuple):
    size: int
    buffer: int
    offset: int


class Array(NamedTuple):
    dtype: Any
    shape: list[int]
    buffer: int
    offset: int


class ObjectArray(NamedTuple):
    shape: list[int]
    items: list[Any]


class FieldArray(NamedTuple):
    """A structured array with object fields: one array per field."""

    dtype: Any
    shape: list[int]
    columns: list[Any]


class StringArray(NamedTuple):
    """numpy's variable-width strings; `missing` marks the items that are `na`."""

    shape: list[int]
    items: list[Any]
    coerce: bool
    has_na: bool
    na: Any


class Scalar(NamedTuple):
    """A numpy scalar: its dtype and bytes, or a 0-d array for one with object fields."""

    dtype: Any
    data: Any


class StringScalar(NamedTuple):
    """`numpy.str_` or `numpy.bytes_`."""

    value: str | bytes


class Tensor(NamedTuple):
    dtype: str
    shape: list[int]
    buffer: int
    offset: int


class Jagged(NamedTuple):
    dtype: str
    shape: list[int]
    buffer: int
    offset: int
    group: int
    ragged_dim: int


class StridedNested(NamedTuple):
    """A `torch.strided` nested tensor: its components' shapes and their cells, end to end."""

    sizes: Any
    values: Any


class SparseCoo(NamedTuple):
    shape: list[int]
    indices: Any
    values: Any
    coalesced: bool


class SparseCompressed(NamedTuple):
    layout: str
    shape: list[int]
    compressed: Any
    plain: Any
    values: Any


class Size(NamedTuple):
    shape: list[int]


class DType(NamedTuple):
    name: str


class Device(NamedTuple):
    type: str
    number: int | None


class TensorDict(NamedTuple):
    """Batch size, dim names or None, then keys and leaves in turn."""

    batch_size: list[int]
    names: list[str | None] | None
    items: list[Any]


class LazyStack(NamedTuple):
    stack_dim: int
    dim_name: str | None
    items: list[Any]


class NonTensorData(NamedTuple):
    batch_size: list[int]
    payload: Any


class NonTensorRows(NamedTuple):
    """A `NonTensorStack` along its only dim, by its payloads."""

    payloads: list[Any]


class NonTensorStack(NamedTuple):
    """Any other `NonTensorStack`, by its members."""

    stack_dim: int
    items: list[Any]


class Header(NamedTuple):
    """A checked header: sizes of the buffers, ragged groups, and the tree as packed bytes."""

    version: int
    buffers: Sequence[int]
    groups: Sequence[Group]
    tree: bytes


# Checks of single values


def fail(reason: Reason, detail: str, *, path: str = "$") -> WireFormatError:
    return WireFormatError(reason, path, detail)


def brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def expect(ok: bool, reason: Reason, expected: str, found: Any, path: str = "$") -> None:
    if not ok:
        raise fail(reason, f"expected {expected}, found {brief(found)}", path=path)


def count(value: Any, what: str, reason: Reason = "bad_record", *, path: str = "$") -> int:
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise fail(reason, f"expected {what} (0 to 2**63 - 1), found {brief(value)}", path=path)
    return value


def within(place: Place, size: int, buffers: Sequence[int], path: str = "$") -> None:
    """Do `size` bytes lie at `place`? Nothing lies anywhere, so 0 bytes need no buffer."""
    if size == 0:
        return
    if place.buffer >= len(buffers):
        raise fail(
            "out_of_bounds",
            f"expected a buffer below {len(buffers)}, found buffer {place.buffer}",
            path=path,
        )
    if place.offset + size > buffers[place.buffer]:
        raise fail(
            "out_of_bounds",
            f"expected {size} bytes at {place.offset} of buffer {place.buffer}, "
            f"found a buffer of {buffers[place.buffer]}",
            path=path,
        )


def _shape(shape: Any) -> int:
    """Check a shape and return its number of cells."""
    expect(
        type(shape) is list and len(shape) <= MAX_NDIM,
        "bad_record",
        f"a shape of at most {MAX_NDIM} dims",
        shape,
    )
    for dim in shape:
        count(dim, "a dim")
    # Strides are products of the other dims even where one dim is 0, so bound those too.
    nonzero = math.prod(dim for dim in shape if dim)
    expect(nonzero <= INT64_MAX, "bad_record", "fewer than 2**63 cells", shape)
    return 0 if 0 in shape else nonzero


def _list(value: Any, what: str) -> list[Any]:
    expect(type(value) is list, "bad_record", f"a list of {what}", value)
    return value  # type: ignore[no-any-return]


def _batch(batch_size: Any, header: Header) -> None:
    rows = _shape(batch_size)
    if rows > MAX_UNBACKED_ROWS and rows > sum(header.buffers):
        raise fail(
            "bad_rows",
            f"expected at most {MAX_UNBACKED_ROWS} rows, or a payload of as many bytes, "
            f"found batch size {brief(batch_size)} over {sum(header.buffers)} bytes",
        )


_NUMPY_DTYPE = re.compile(
    r"(?P<bool>\|b1)|\|[iu]1|[<>][iu](?:2|4|8)|[<>]f(?:2|4|8)|[<>]c(?:8|16)"
    r"|[<>][mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|[SV]\d{1,10}|[<>]U\d{1,10}"
)
# long double has one name in numpy and two formats in the world
_LONG_DOUBLES = {"float80": 16, "complex160": 32, "float128": 16, "complex256": 32}


def numpy_itemsize(dtype: Any, depth: int = 0) -> int:
    """Bytes per element of a numpy dtype as the wire describes it.

    A string is numpy's own (``<f4``, ``|S8``, ``<M8[ns]``) or a long double's name;
    ``["sub", dtype, shape]`` and ``["struct", itemsize, aligned, [[name, title, offset, dtype]]]``
    nest. ``|O`` counts as a pointer: it occurs only in the fields of a FIELD_ARRAY.

    Raises:
        WireFormatError: The description is none of these.
    """
    if type(dtype) is str:
        if dtype in _LONG_DOUBLES:
            return _LONG_DOUBLES[dtype]
        if dtype == "|O":
            return 8
        if _NUMPY_DTYPE.fullmatch(dtype) is None:
            raise fail("unknown_dtype", f"expected a numpy dtype, found {brief(dtype)}")
        digits = re.match(r"\d+", dtype[2:])
        size = int(digits.group()) if digits else 0
        return size * 4 if dtype[1] == "U" else size
    expect(depth <= MAX_DEPTH, "too_deep", "a shallower dtype", "more levels")
    if type(dtype) is list and len(dtype) == 3 and dtype[0] == "sub":
        return _shape(dtype[2]) * numpy_itemsize(dtype[1], depth + 1)
    if type(dtype) is list and len(dtype) == 4 and dtype[0] == "struct":
        _, itemsize, aligned, fields = dtype
        itemsize = count(itemsize, "an item size")
        expect(type(aligned) is bool, "bad_record", "a bool", aligned)
        for field in _list(fields, "fields"):
            expect(type(field) is list and len(field) == 4, "bad_record", "a field", field)
            name, title, offset, inner = field
            expect(type(name) is str, "bad_record", "a field name", name)
            expect(title is None or type(title) is str, "bad_record", "a field title", title)
            end = count(offset, "a field offset") + numpy_itemsize(inner, depth + 1)
            expect(end <= itemsize, "out_of_bounds", f"a field within {itemsize} bytes", end)
        return itemsize
    raise fail("unknown_dtype", f"expected a numpy dtype, found {brief(dtype)}")


def has_object(dtype: Any) -> bool:
    """Whether a (checked) numpy dtype description holds Python objects."""
    if type(dtype) is str:
        return dtype == "|O"
    if dtype[0] == "sub":
        return has_object(dtype[1])
    return any(has_object(field[3]) for field in dtype[3])


def check_distinct(keys: Sequence[Any], what: str) -> None:
    """Refuse keys that a stranger chose to collide.

    Raises:
        WireFormatError: A key cannot be hashed, or too many distinct keys share one hash.
    """
    try:
        hashes = sorted(map(hash, keys))
    except TypeError as error:
        raise fail("bad_value", f"expected hashable {what}, found {error}") from error
    step = MAX_EQUAL_HASHES
    if any(a == b for a, b in zip(hashes, hashes[step:], strict=False)):
        raise fail("bad_value", f"expected {what} of distinct hashes, found over {step} alike")


# Checks of whole records: record, header -> record


def _check_tensor(record: Any, header: Header) -> Any:
    cells = _shape(record.shape)
    itemsize = TORCH_DTYPES.get(record.dtype) if type(record.dtype) is str else None
    if itemsize is None:
        raise fail(
            "unknown_dtype",
            f"expected a torch dtype of the table, found {brief(record.dtype)}",
        )
    _at(record, cells * itemsize, header)
    return record


def _at(record: Any, size: int, header: Header) -> None:
    count(record.buffer, "a buffer")
    count(record.offset, "a byte offset")
    within(Place(record.buffer, record.offset), size, header.buffers)


def _check_jagged(record: Jagged, header: Header) -> Jagged:
    _check_tensor(record, header)
    group = count(record.group, "a ragged group")
    expect(group < len(header.groups), "bad_record", f"a group below {len(header.groups)}", group)
    dim = count(record.ragged_dim, "a ragged dim")
    expect(1 <= dim <= len(record.shape), "bad_record", f"1 to {len(record.shape)}", dim)
    return record


def _check_array(record: Array, header: Header) -> Array:
    itemsize = numpy_itemsize(record.dtype)
    expect(not has_object(record.dtype), "unknown_dtype", "a dtype without objects", record.dtype)
    size = _shape(record.shape) * itemsize
    expect(size <= INT64_MAX, "bad_record", "fewer than 2**63 bytes", record.shape)
    _at(record, size, header)
    return record


def _check_object_array(record: ObjectArray, header: Header) -> ObjectArray:
    cells = _shape(record.shape)
    items = _list(record.items, "items")
    expect(len(items) == cells, "bad_record", f"{cells} items", len(items))
    return record


def _check_field_array(record: FieldArray, header: Header) -> FieldArray:
    itemsize = numpy_itemsize(record.dtype)
    expect(
        type(record.dtype) is list and record.dtype[0] == "struct",
        "unknown_dtype",
        "a structured dtype",
        record.dtype,
    )
    # The fields ride, the array's own bytes do not: a forged item size must not be believed.
    size = _shape(record.shape) * itemsize
    bound = 64 * (1024 + len(header.tree) + sum(header.buffers))
    expect(size <= bound, "out_of_bounds", f"an array below {bound} bytes", size)
    columns = _list(record.columns, "fields")
    wanted = len(record.dtype[3])
    expect(len(columns) == wanted, "bad_record", f"{wanted} fields", len(columns))
    return record


def _check_string_array(record: StringArray, header: Header) -> StringArray:
    cells = _shape(record.shape)
    items = _list(record.items, "strings")
    expect(len(items) == cells, "bad_record", f"{cells} strings", len(items))
    expect(type(record.coerce) is bool, "bad_record", "a bool", record.coerce)
    expect(type(record.has_na) is bool, "bad_record", "a bool", record.has_na)
    for item in items:
        missing = item is None and record.has_na
        expect(missing or type(item) is str, "bad_record", "a string", item)
    return record


def _check_scalar(record: Scalar, header: Header) -> Scalar:
    if record.dtype is None:
        return record
    itemsize = numpy_itemsize(record.dtype)
    expect(not has_object(record.dtype), "unknown_dtype", "a dtype without objects", record.dtype)
    expect(
        type(record.data) is bytes and len(record.data) == itemsize,
        "bad_record",
        f"{itemsize} bytes",
        record.data,
    )
    return record


def _check_string_scalar(record: StringScalar, header: Header) -> StringScalar:
    expect(type(record.value) in (str, bytes), "bad_record", "a str or bytes", record.value)
    return record


def _check_big_int(record: BigInt, header: Header) -> BigInt:
    expect(type(record.data) is bytes and record.data != b"", "bad_record", "bytes", record.data)
    return record


def _check_complex(record: Complex, header: Header) -> Complex:
    for part in record:
        expect(type(part) is float, "bad_record", "a float", part)
    return record


def _check_items(record: Any, header: Header) -> Any:
    _list(record.items, "items")
    return record


def _check_dict(record: Dict, header: Header) -> Dict:
    items = _list(record.items, "keys and values")
    expect(len(items) % 2 == 0, "bad_record", "keys and values in turn", len(items))
    return record


def _check_range(record: Range, header: Header) -> Range:
    for part in record:
        expect(type(part) is int, "bad_record", "an int", part)
    expect(record.step != 0, "bad_record", "a step other than 0", record.step)
    return record


def _check_any(record: Any, header: Header) -> Any:
    return record


def _check_bytes(record: Bytes, header: Header) -> Bytes:
    _at(record, count(record.size, "a size"), header)
    return record


def _check_sparse_coo(record: SparseCoo, header: Header) -> SparseCoo:
    _shape(record.shape)
    expect(type(record.coalesced) is bool, "bad_record", "a bool", record.coalesced)
    return record


def _check_sparse_compressed(record: SparseCompressed, header: Header) -> SparseCompressed:
    _shape(record.shape)
    known = type(record.layout) is str and record.layout in COMPRESSED_LAYOUTS
    expect(known, "bad_record", f"one of {', '.join(COMPRESSED_LAYOUTS)}", record.layout)
    return record


def _check_size(record: Size, header: Header) -> Size:
    for dim in _list(record.shape, "dims"):
        fits = type(dim) is int and -INT64_MAX - 1 <= dim <= INT64_MAX
        expect(fits, "bad_record", "a 64-bit int", dim)
    return record


def _check_dtype(record: DType, header: Header) -> DType:
    expect(type(record.name) is str, "unknown_dtype", "a dtype's name", record.name)
    return record


def _check_device(record: Device, header: Header) -> Device:
    expect(type(record.type) is str, "bad_record", "a device type", record.type)
    number = record.number
    fits = number is None or (type(number) is int and 0 <= number < 128)
    expect(fits, "bad_record", "a device number (0 to 127) or None", number)
    return record


def _check_tensordict(record: TensorDict, header: Header) -> TensorDict:
    _batch(record.batch_size, header)
    names = record.names
    if names is not None:
        for name in _list(names, "dim names"):
            expect(name is None or type(name) is str, "bad_record", "a dim name or None", name)
        expect(
            len(names) == len(record.batch_size),
            "bad_record",
            f"{len(record.batch_size)} dim names",
            names,
        )
    items = _list(record.items, "keys and leaves")
    keys = items[::2]
    for key in keys:
        expect(type(key) is str, "bad_record", "a string key", key)
    expect(len(items) % 2 == 0, "bad_record", "keys and leaves in turn", len(items))
    expect(len(set(keys)) == len(keys), "bad_record", "every key once", keys)
    return record


def _check_lazy_stack(record: LazyStack, header: Header) -> LazyStack:
    count(record.stack_dim, "a stack dim")
    name = record.dim_name
    expect(name is None or type(name) is str, "bad_record", "a dim name or None", name)
    _list(record.items, "members")
    return record


def _check_non_tensor_data(record: NonTensorData, header: Header) -> NonTensorData:
    _batch(record.batch_size, header)
    return record


def _check_non_tensor_rows(record: NonTensorRows, header: Header) -> NonTensorRows:
    _list(record.payloads, "payloads")
    return record


def _check_non_tensor_stack(record: NonTensorStack, header: Header) -> NonTensorStack:
    count(record.stack_dim, "a stack dim")
    _list(record.items, "members")
    return record


CHECKS: dict[type, Callable[[Any, Header], Any]] = {
    BigInt: _check_big_int,
    Complex: _check_complex,
    Tuple: _check_items,
    Set: _check_items,
    FrozenSet: _check_items,
    Dict: _check_dict,
    Range: _check_range,
    Slice: _check_any,
    Bytes: _check_bytes,
    Array: _check_array,
    ObjectArray: _check_object_array,
    FieldArray: _check_field_array,
    StringArray: _check_string_array,
    Scalar: _check_scalar,
    StringScalar: _check_string_scalar,
    Tensor: _check_tensor,
    Jagged: _check_jagged,
    StridedNested: _check_any,
    SparseCoo: _check_sparse_coo,
    SparseCompressed: _check_sparse_compressed,
    Size: _check_size,
    DType: _check_dtype,
    Device: _check_device,
    TensorDict: _check_tensordict,
    LazyStack: _check_lazy_stack,
    NonTensorData: _check_non_tensor_data,
    NonTensorRows: _check_non_tensor_rows,
    NonTensorStack: _check_non_tensor_stack,
}


KINDS: dict[type, Kind] = {
    BigInt: Kind.BIG_INT,
    Complex: Kind.COMPLEX,
    Tuple: Kind.TUPLE,
    Set: Kind.SET,
    FrozenSet: Kind.FROZENSET,
    Dict: Kind.DICT,
    Range: Kind.RANGE,
    Slice: Kind.SLICE,
    Bytes: Kind.BYTES,
    Array: Kind.ARRAY,
    ObjectArray: Kind.OBJECT_ARRAY,
    FieldArray: Kind.FIELD_ARRAY,
    StringArray: Kind.STRING_ARRAY,
    Scalar: Kind.SCALAR,
    StringScalar: Kind.STRING_SCALAR,
    Tensor: Kind.TENSOR,
    Jagged: Kind.JAGGED,
    StridedNested: Kind.STRIDED_NESTED,
    SparseCoo: Kind.SPARSE_COO,
    SparseCompressed: Kind.SPARSE_COMPRESSED,
    Size: Kind.SIZE,
    DType: Kind.DTYPE,
    Device: Kind.DEVICE,
    TensorDict: Kind.TENSORDICT,
    LazyStack: Kind.LAZY_STACK,
    NonTensorData: Kind.NON_TENSOR_DATA,
    NonTensorRows: Kind.NON_TENSOR_ROWS,
    NonTensorStack: Kind.NON_TENSOR_STACK,
}
RECORDS: dict[int, Any] = {int(kind): record for record, kind in KINDS.items()}
