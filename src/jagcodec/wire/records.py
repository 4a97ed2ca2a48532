"""What the value tree is made of: one record per kind that msgpack lacks, and its checks.

Plain data and plain checks: no torch, no numpy, no msgpack. A record that passed its check points
inside the buffers of its message and names only things of the tables in `spec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jagcodec.wire.checks import (
    INT64_MAX,
    Place,
    brief,
    cells_of,
    count,
    expect,
    fail,
    list_of,
    within,
)
from jagcodec.wire.dtypes import has_object, numpy_itemsize, torch_size
from jagcodec.wire.spec import COMPRESSED_LAYOUTS, MAX_NDIM, MAX_UNBACKED_ROWS, TORCH_DTYPES, Kind


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
    """`dtype` is a name, or ``[name, stored]`` for integers that are stored narrower."""

    dtype: Any
    shape: list[int]
    buffer: int
    offset: int


class Jagged(NamedTuple):
    dtype: Any
    shape: list[int]
    buffer: int
    offset: int
    group: int
    ragged_dim: int


class TensorViews(NamedTuple):
    """A list of tensors that are row ranges of one: view i is its ``starts[i] : ends[i]``.

    `shape` and what follows it are those of the one tensor that they view.
    """

    starts: list[int]
    ends: list[int]
    dtype: str
    shape: list[int]
    buffer: int
    offset: int


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


class User(NamedTuple):
    """A value of a registered type: the name it is registered under, and its state."""

    name: str
    state: Any


class Pickle(NamedTuple):
    data: bytes


class Batch(NamedTuple):
    """A TensorDict without dim names that is the value of a message.

    Attributes:
        batch_size: Of the TensorDict.
        leaves: By their names: the record of a `Tensor` or `Jagged`, anything else as the
            extension (code, payload) that stands for it.
    """

    batch_size: list[int]
    leaves: dict[str, Any]


class Header(NamedTuple):
    """A checked header: sizes of the buffers, ragged groups, checksums, and the packed tree.

    `checksums` are the CRC-32 of the tree and of each buffer, or None. `batch` is what the tree
    holds, if that was read with the header: its records are checked, and stand for `held` bytes.
    """

    version: int
    buffers: Sequence[int]
    groups: Sequence[Group]
    checksums: Sequence[int] | None
    tree: bytes
    batch: Batch | None = None
    held: int = 0


def _batch(batch_size: Any, header: Header) -> None:
    cells_of(batch_size)
    # A dim of 0 beside it makes a large one no smaller.
    rows = math.prod(dim for dim in batch_size if dim)
    if rows > MAX_UNBACKED_ROWS and rows > sum(header.buffers):
        raise fail(
            "bad_rows",
            f"expected at most {MAX_UNBACKED_ROWS} rows, or a payload of as many bytes, "
            f"found batch size {brief(batch_size)} over {sum(header.buffers)} bytes",
        )


# Checks of whole records: record, header -> record


def _check_tensor(record: Any, header: Header) -> Any:
    if not _is_plain(record, header):
        _at(record, torch_size(record.dtype, cells_of(record.shape)), header)
    return record


def _is_plain(record: Any, header: Header) -> bool:
    """Whether a record is sound at first sight, as most are; the checks one by one take longer."""
    dtype, shape, buffer, offset = record.dtype, record.shape, record.buffer, record.offset
    size = TORCH_DTYPES.get(dtype, 0) if type(dtype) is str else 0
    if not (size and type(shape) is list and len(shape) <= MAX_NDIM):
        return False
    for dim in shape:
        if type(dim) is not int or dim <= 0:
            return False
        size *= dim
    # Within a buffer, whose size was checked, it is below 2^63 too.
    is_place = type(buffer) is type(offset) is int and buffer >= 0 and offset >= 0
    return is_place and buffer < len(header.buffers) and offset + size <= header.buffers[buffer]


def _at(record: Any, size: int, header: Header) -> None:
    count(record.buffer, "a buffer")
    count(record.offset, "a byte offset")
    within(Place(record.buffer, record.offset), size, header.buffers)


def _check_jagged(record: Jagged, header: Header) -> Jagged:
    _check_tensor(record, header)
    group = count(record.group, "a ragged group")
    if group >= len(header.groups):
        raise fail("bad_record", f"expected a group below {len(header.groups)}, found {group}")
    dim = count(record.ragged_dim, "a ragged dim")
    if not 1 <= dim <= len(record.shape):
        raise fail("bad_record", f"expected a ragged dim of 1 to {len(record.shape)}, found {dim}")
    return record


def _check_tensor_views(record: TensorViews, header: Header) -> TensorViews:
    _check_tensor(record, header)
    expect(type(record.dtype) is str and record.shape != [], "bad_record", "plain rows", record)
    starts, ends = list_of(record.starts, "starts"), list_of(record.ends, "ends")
    expect(len(starts) == len(ends), "bad_record", f"{len(starts)} ends", len(ends))
    for start, end in zip(starts, ends, strict=True):
        within_rows = type(start) is type(end) is int and 0 <= start <= end <= record.shape[0]
        expect(within_rows, "out_of_bounds", f"a range within {record.shape[0]}", (start, end))
    return record


def _check_user(record: User, header: Header) -> User:
    expect(type(record.name) is str, "bad_record", "a type's name", record.name)
    return record


def _check_pickle(record: Pickle, header: Header) -> Pickle:
    expect(type(record.data) is bytes, "bad_record", "bytes", record.data)
    return record


def _check_array(record: Array, header: Header) -> Array:
    itemsize = numpy_itemsize(record.dtype)
    expect(not has_object(record.dtype), "unknown_dtype", "a dtype without objects", record.dtype)
    size = cells_of(record.shape) * itemsize
    expect(size <= INT64_MAX, "bad_record", "fewer than 2**63 bytes", record.shape)
    _at(record, size, header)
    return record


def _check_object_array(record: ObjectArray, header: Header) -> ObjectArray:
    cells = cells_of(record.shape)
    items = list_of(record.items, "items")
    expect(len(items) == cells, "bad_record", f"{cells} items", len(items))
    return record


def field_array_bound(header: Header) -> int:
    """Bytes that the FIELD_ARRAYs of a message may take, each and together."""
    return 64 * (1024 + len(header.tree) + sum(header.buffers))


def _check_field_array(record: FieldArray, header: Header) -> FieldArray:
    itemsize = numpy_itemsize(record.dtype)
    expect(
        type(record.dtype) is list and record.dtype[0] == "struct",
        "unknown_dtype",
        "a structured dtype",
        record.dtype,
    )
    # The fields ride, the array's own bytes do not: a forged item size must not be believed.
    size = cells_of(record.shape) * itemsize
    bound = field_array_bound(header)
    expect(size <= bound, "out_of_bounds", f"an array below {bound} bytes", size)
    columns = list_of(record.columns, "fields")
    wanted = len(record.dtype[3])
    expect(len(columns) == wanted, "bad_record", f"{wanted} fields", len(columns))
    return record


def _check_string_array(record: StringArray, header: Header) -> StringArray:
    cells = cells_of(record.shape)
    items = list_of(record.items, "strings")
    expect(len(items) == cells, "bad_record", f"{cells} strings", len(items))
    expect(type(record.coerce) is bool, "bad_record", "a bool", record.coerce)
    expect(type(record.has_na) is bool, "bad_record", "a bool", record.has_na)
    known = record.na is None or type(record.na) in (float, str)
    expect(known, "bad_record", "None, a float or a str for missing", record.na)
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
    list_of(record.items, "items")
    return record


def _check_dict(record: Dict, header: Header) -> Dict:
    items = list_of(record.items, "keys and values")
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
    cells_of(record.shape)
    expect(type(record.coalesced) is bool, "bad_record", "a bool", record.coalesced)
    return record


def _check_sparse_compressed(record: SparseCompressed, header: Header) -> SparseCompressed:
    cells_of(record.shape)
    known = type(record.layout) is str and record.layout in COMPRESSED_LAYOUTS
    expect(known, "bad_record", f"one of {', '.join(COMPRESSED_LAYOUTS)}", record.layout)
    return record


def _check_size(record: Size, header: Header) -> Size:
    for dim in list_of(record.shape, "dims"):
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
        for name in list_of(names, "dim names"):
            expect(name is None or type(name) is str, "bad_record", "a dim name or None", name)
        given = [name for name in names if name is not None]
        expect(len(set(given)) == len(given), "bad_record", "distinct dim names", names)
        expect(
            len(names) == len(record.batch_size),
            "bad_record",
            f"{len(record.batch_size)} dim names",
            names,
        )
    items = list_of(record.items, "keys and leaves")
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
    members = list_of(record.items, "members")
    expect(bool(members) or name is None, "bad_record", "members for the dim name", name)
    return record


def _check_non_tensor_data(record: NonTensorData, header: Header) -> NonTensorData:
    _batch(record.batch_size, header)
    return record


def _check_non_tensor_rows(record: NonTensorRows, header: Header) -> NonTensorRows:
    list_of(record.payloads, "payloads")
    return record


def _check_non_tensor_stack(record: NonTensorStack, header: Header) -> NonTensorStack:
    count(record.stack_dim, "a stack dim")
    list_of(record.items, "members")
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
    TensorViews: _check_tensor_views,
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
    User: _check_user,
    Pickle: _check_pickle,
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
    TensorViews: Kind.TENSOR_VIEWS,
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
    User: Kind.USER,
    Pickle: Kind.PICKLE,
}
RECORDS: dict[int, Any] = {int(kind): record for record, kind in KINDS.items()}
