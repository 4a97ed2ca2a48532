"""`decode`: nodes of an open message, and records of its documents, to Python values."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import numpy as np

from jagcodec import kernels
from jagcodec._arguments import check_options
from jagcodec._compiling import untraced
from jagcodec._dependencies import check_torch, with_or_without_torch
from jagcodec.columns.batch import VALUES
from jagcodec.columns.outside_errors import pass_on
from jagcodec.errors import JagcodecError, WireFormatError, brief
from jagcodec.memory.arrays import AnyArray, ByteArray, IntArray, object_array
from jagcodec.memory.buffers import MessageLike
from jagcodec.rows.chosen_rows import ChosenRows
from jagcodec.rows.copy_bytes import bytes_of_cells
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire import documents
from jagcodec.wire.array_rows import array_maker, rows_of_arrays
from jagcodec.wire.checks import bad, check_distinct, expect, fail, inside
from jagcodec.wire.documents import RECORDS
from jagcodec.wire.dtypes import check_text, numpy_dtype
from jagcodec.wire.leaf import Leaf
from jagcodec.wire.limits import Limits, exceeded
from jagcodec.wire.native import are_values
from jagcodec.wire.read.message import Budget, Message, owned_array, writable
from jagcodec.wire.read.opening import open_message, open_row, usable_reading
from jagcodec.wire.registry import restore
from jagcodec.wire.schema import GROUP, STORAGE_CODE, Node, child_step, numpy_itemsize
from jagcodec.wire.spec import IN_ARRAY, IN_LIST, ONE_OBJECT, PLAIN, Kind

if TYPE_CHECKING:
    import torch


class DecodeOptions(TypedDict, total=False):
    """The options of `decode`."""

    copy: bool | None
    device: torch.device | str | None
    allow_pickle: bool
    limits: Limits | None


@untraced
def decode(
    frames: MessageLike,
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> Any:
    """The value that `encode` was given.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from jagcodec import decode, encode
        >>> td = TensorDict({"ids": torch.arange(6).view(2, 3), "tag": "gsm8k"}, batch_size=[2])
        >>> back = decode(encode(td))
        >>> back["ids"].tolist(), back["tag"]
        ([[0, 1, 2], [3, 4, 5]], 'gsm8k')

    Args:
        frames: The message's frames in order, each of the buffer protocol (bytes, bytearray,
            memoryview, numpy array, `zmq.Frame`) or a uint8 CPU tensor; or a blob, as `to_blob`
            makes it.
        copy: None aliases writable frames and copies read-only ones, each once: torch has no
            read-only tensors, and a write into read-only memory can kill the process. True copies
            every frame, as tensors need that move to shared memory later (``share_memory_()``,
            queues of torch.multiprocessing). False copies none: never write to what comes back if
            a frame was read-only.
        device: Where tensors go, and the `device` of TensorDicts. None: the CPU, and None.
        allow_pickle: Unpickle what an `encode` with the same option pickled. That runs whatever
            code the sender chose: only for peers that you trust with your process.
        limits: Bounds for the message; None means the defaults of `Limits`.

    Returns:
        The value. Tensors and arrays that alias a frame keep it alive, each with a storage of its
        own; unaligned ones are copied. Columns with equal row lengths share one offsets tensor, so
        ``td["a"] * td["b"]`` works.

    Raises:
        WireFormatError: The frames are not a whole message of this format and version.
        ArgumentTypeError: `frames` is neither a list of frames nor a buffer.
        ArgumentError: There is no such device; or frames are compressed, and the library that
            decompresses them is not installed.

    Names in a message are only looked up in the tables of `docs/wire-format.md`, among the types
    that you registered and, after `register_stdlib_types`, among enums and named tuples that are
    imported already. Safe to call from several threads at once.
    """
    check_torch("decode")
    # Import torch before the message is opened: once it is imported, all dtypes are torch's.
    _value_module()
    how = usable_reading("decode", limits, copy, device, allow_pickle)
    message = open_message(frames, "decode(frames)", how)
    return build(message, message.header.schema.root)


@untraced
class MsgpackDecoder:
    """`decode` as an object, where a framework wants one. Holds its options and no other state.

    Example:
        >>> from jagcodec import MsgpackDecoder, MsgpackEncoder
        >>> decoder = MsgpackDecoder(copy=True)
        >>> decoder.decode(MsgpackEncoder().encode({"a": 1}))
        {'a': 1}
    """

    def __init__(self, **options: Unpack[DecodeOptions]) -> None:
        """Take the options of `decode`."""
        check_options(options, DecodeOptions.__annotations__, "MsgpackDecoder")
        self._options = options

    def decode(self, frames: MessageLike) -> Any:
        """See `decode`."""
        return decode(frames, **self._options)


# --- nodes to values ---------------------------------------------------------------------------


def build(message: Message, node: Node, budget: Budget | None = None) -> Any:
    """The value of a node; `budget` counts for the whole read."""
    try:
        make = _BUILDERS.get(node.kind) or _value_module().BUILDERS[node.kind]
        return make(message, node, budget or Budget(message))
    except (JagcodecError, OSError, MemoryError):  # a store may raise such errors, too
        raise
    except Exception as error:  # torch, numpy and tensordict raise all kinds
        pass_on(error)
        raise bad(f"a {node.kind.name}", error) from error


def _value_module() -> Any:
    """`tensor_values`, or where torch is not installed `array_values`."""
    return with_or_without_torch(*VALUES)


def build_children(message: Message, node: Node, budget: Budget) -> list[Any]:
    budget.check_depth(message, node.depth + 1)
    values = []
    for i, child in enumerate(node.children):
        try:
            values.append(build(message, child, budget))
        except WireFormatError as error:
            raise inside(error, child_step(node, i)) from error
    return values


def _read_document(message: Message, index: int, depth: int) -> Any:
    value, max_depth = message.document(index), message.limits.depth
    if are_values((value,), max_depth - depth + 1):
        return value
    return with_records_resolved(value, depth, max_depth, message.allow_pickle)


def message_meta(message: Message) -> dict[str, Any]:
    """The `meta` that was passed to `encode`; empty if there was none."""
    index = message.header.schema.value_count
    if len(message.header.values) == index:
        return {}
    meta = _read_document(message, index, 0)
    if type(meta) is not dict:
        raise inside(bad("a mapping", type(meta).__name__), "meta")
    return meta


def _build_user(message: Message, node: Node, budget: Budget) -> Any:
    (state,) = build_children(message, node, budget)
    return restore(node.fields[0], state)


def _build_dict(message: Message, node: Node, budget: Budget) -> dict[Any, Any]:
    keys, *items = build_children(message, node, budget)
    if type(keys) is not list or node.children[0].kind is not Kind.VALUE:
        raise bad("a list of keys", type(keys).__name__)
    return _dict_of(keys, items)


def _build_array(message: Message, node: Node, budget: Budget) -> AnyArray:
    dtype = numpy_dtype(node.fields[0])
    shape = message.shape(node)
    size = math.prod(shape) * dtype.itemsize
    alignment = math.gcd(dtype.alignment, 16)
    buffer, offset = message.numbers[node.number : node.dims]
    data = message.bytes_at(buffer, offset, size, alignment)
    array: AnyArray = np.ndarray(shape, dtype=dtype, buffer=data)
    check_text(array)
    return array


def _build_tensor_views(message: Message, node: Node, budget: Budget) -> list[Any]:
    base, bounds = node.children
    ranges, rows = read_int64s(message, bounds), message.numbers[base.dims]
    starts, ends = ranges.T
    are_within = (starts >= 0) & (starts <= ends) & (ends <= rows)
    if not are_within.all():
        i = int(np.argmin(are_within))
        detail = f"expected a range within {rows}, found {brief(ranges[i].tolist())}"
        raise WireFormatError("out_of_bounds", f"$[{i}]", detail)
    values = _value_module().tensor_of_node(message, base)
    return [values[start:end] for start, end in ranges.tolist()]


def read_int64s(message: Message, node: Node) -> IntArray:
    """A TENSOR of int64s that are not narrowed, on the host."""
    buffer, offset, _, *shape = message.numbers[node.number : node.end]
    return message.int64s_at(buffer, offset, math.prod(shape)).reshape(shape)


# Rows of objects


class _RowsToRead(NamedTuple):
    """Rows of documents, each of which becomes an object of its own."""

    view: RaggedView
    rows: Sequence[int]  # their row numbers, for errors
    objects: IntArray | None  # for each row of the column, which of these; None if in this order


def _build_object_array(message: Message, node: Node, budget: Budget) -> AnyArray:
    shape = message.shape(node)
    items = read_objects(message, node, budget)
    if len(items) != math.prod(shape):
        raise bad(f"{math.prod(shape)} items", len(items))
    return object_array(items).reshape(shape)


def read_objects(
    message: Message, node: Node, budget: Budget, chosen: ChosenRows | None = None
) -> list[Any]:
    """The objects of all rows, or of chosen ones, of a NON_TENSOR_ROWS or OBJECT_ARRAY."""
    return read_objects_of_view(message, node, budget, chosen, message.view(node, chosen))


def read_objects_of_view(
    message: Message,
    node: Node,
    budget: Budget,
    chosen: ChosenRows | None,
    view: RaggedView,
    data: ByteArray | None = None,
) -> list[Any]:
    """The objects of rows of documents: of the rows of `view`, or of `data`, a copy of them."""
    plain = message.numbers[node.number + STORAGE_CODE] == PLAIN  # most columns
    leaf = None if plain else message.leaf(node)
    rows: Any = range(view.row_splits.rows) if chosen is None else chosen.index
    index = None
    if leaf is not None and leaf.runs:
        view, rows, index = _rows_to_read(message, budget, leaf, view, rows)
    if data is None:
        data = bytes_of_cells(view)
    depth = budget.containers_around + node.depth + 1  # of each row: the node is one more
    bounds = view.row_splits.offsets_array
    if leaf is None or not leaf.blobs:
        items = _read_documents(message, depth, data, bounds, rows)
    else:
        items = _decode_messages(message, budget, depth, data, bounds, rows)
        if node.kind is Kind.NON_TENSOR_ROWS:
            _check_payloads(items, rows)
    return items if index is None else [items[k] for k in index.tolist()]


def _rows_to_read(
    message: Message, budget: Budget, leaf: Leaf, view: RaggedView, rows: Sequence[int]
) -> _RowsToRead:
    """The rows of elided documents that become objects, which `budget` counts."""
    if leaf.place.storage_code != ONE_OBJECT:
        budget.count_documents(message, leaf.shape[0])
        return _RowsToRead(view, rows, None)
    # Rows that share a document share one object.
    view, index, first = _distinct_rows(view)
    budget.count_documents(message, view.row_splits.total)
    numbers: Any = np.asarray(rows)[first]
    return _RowsToRead(view, numbers, index)


def _check_payloads(items: Sequence[Any], rows: Sequence[int]) -> None:
    """Refuse objects that tensordict would take apart when it stores them."""
    is_payload = _value_module().is_payload
    for row, item in zip(rows, items, strict=True):
        if not is_payload(item):
            raise inside(bad("a payload", type(item).__name__), int(row))


def read_arrays(message: Message, node: Node, chosen: ChosenRows | None = None) -> list[Any]:
    """All rows of an ARRAY_ROWS, or the chosen ones."""
    cells, table = node.children
    are_tensors = bool(node.fields[1])
    splits = message.splits(message.numbers[cells.number + GROUP], message.numbers[cells.dims])
    rows: Any = range(splits.rows)
    if chosen is not None:
        rows, splits = chosen.index, chosen.among(splits)[0]
    dims, itemsize = message.int64s_of_node(table, chosen), cells.itemsize
    make_row = _value_module().maker_of_rows(message, cells, chosen) if are_tensors else None
    if make_row is None:
        make_row = array_maker(owned_array(message, message.view(cells, chosen)))
    return rows_of_arrays(make_row, itemsize, splits.lengths, dims, rows)


def _build_array_rows(message: Message, node: Node, budget: Budget) -> Any:
    budget.check_depth(message, node.depth + 1)
    items, holder = read_arrays(message, node), node.fields[0]
    if holder == IN_LIST:
        return items
    return object_array(items) if holder == IN_ARRAY else _value_module().column_of_objects(items)


def _distinct_rows(view: RaggedView) -> tuple[RaggedView, IntArray, IntArray]:
    """The distinct rows, the index of each row among them, and where each occurs first.

    Rows are the same if they start at the same cell.
    """
    lengths = view.row_splits.lengths
    _, first, index = np.unique(view.row_starts(), return_index=True, return_inverse=True)
    if (lengths != lengths[first][index]).any():
        raise bad("one length of one object", "several")
    return view.choose(first, RowSplits.from_lengths(lengths[first])), index, first


def _read_documents(
    message: Message, depth: int, data: ByteArray, bounds: IntArray, rows: Sequence[int]
) -> list[Any]:
    """The objects of documents between these bounds; `rows` has their row numbers, for errors."""
    # A copy: what was checked must not change with the message's memory.
    raw = data.tobytes()
    items = documents.parsed_rows(raw, bounds[1:].tolist(), rows)
    max_depth = message.limits.depth
    if are_values(items, max_depth - depth + 1):
        return items
    for i, item in enumerate(items):
        try:
            items[i] = with_records_resolved(item, depth, max_depth, message.allow_pickle)
        except WireFormatError as error:
            raise inside(error, int(rows[i])) from error
    return items


def _decode_messages(
    message: Message,
    budget: Budget,
    depth: int,
    data: ByteArray,
    bounds: IntArray,
    rows: Sequence[int],
) -> list[Any]:
    """As `_read_documents`, if each row is a message of its own."""
    items = []
    around, budget.containers_around = budget.containers_around, depth
    data = writable(data, message.reading.copy)
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        try:
            inner = open_row(data[start:end], message)
            budget.count_objects(inner)
            # The check of its header did not count the containers around it.
            budget.check_depth(inner, inner.header.schema.depth)
            items.append(build(inner, inner.header.schema.root, budget))
        except WireFormatError as error:
            raise inside(error, int(rows[i])) from error
    budget.containers_around = around
    return items


def rows_differ(expected: Any, found: Any) -> WireFormatError:
    """The error for a column whose rows differ from those of its batch."""
    return WireFormatError("bad_rows", "$", f"expected batch size {expected}, found {brief(found)}")


_BUILDERS: dict[Kind, Callable[[Message, Node, Budget], Any]] = {
    Kind.VALUE: lambda message, node, budget: _read_document(
        message, node.value, budget.containers_around + node.depth
    ),
    Kind.TUPLE: lambda message, node, budget: tuple(build_children(message, node, budget)),
    Kind.LIST: build_children,
    Kind.MAP: lambda message, node, budget: dict(
        zip(node.fields[0], build_children(message, node, budget), strict=True)
    ),
    Kind.DICT: _build_dict,
    Kind.BYTES: lambda message, node, budget: message.read(
        *message.numbers[node.number : node.end]
    ).tobytes(),
    Kind.ARRAY: _build_array,
    Kind.OBJECT_ARRAY: _build_object_array,
    Kind.NON_TENSOR_ROWS: lambda message, node, budget: _value_module().column_of_objects(
        read_objects(message, node, budget)
    ),
    Kind.ARRAY_ROWS: _build_array_rows,
    Kind.TENSOR_VIEWS: _build_tensor_views,
    Kind.USER: _build_user,
}
"""Builders that are the same with and without torch; `_value_module()` has the others."""


# --- records of documents ----------------------------------------------------------------------

_WITHOUT_RECORDS = frozenset((str, int, float, bool, bytes, type(None)))


def with_records_resolved(value: Any, depth: int, max_depth: int, allow_pickle: bool) -> Any:
    """A document with values in place of its records. It changes the document in place.

    `depth` is the number of containers around it, and `max_depth` the limit.
    """
    kind = type(value)
    if kind in _WITHOUT_RECORDS:
        return value
    if kind is not list and kind is not dict:
        raise WireFormatError("unknown_kind", "$", f"expected a value, found a {kind.__name__}")
    if depth > max_depth:
        raise exceeded("depth", max_depth, depth, "levels")
    tag, parts = None, value
    if kind is list and value and type(value[0]) is Kind:
        tag, parts = value[0], value[1:]
    items: Any = value.items() if kind is dict else enumerate(parts)
    if tag in (Kind.SCALAR, Kind.NUMBERS):  # their fields are never records
        items = ()
    step: Any = None
    try:
        for step, item in items:
            if type(item) not in _WITHOUT_RECORDS:
                parts[step] = with_records_resolved(item, depth + 1, max_depth, allow_pickle)
    except WireFormatError as error:
        raise inside(error, step) from error
    return parts if tag is None else _value_of_record(tag, parts, allow_pickle)


def _value_of_record(kind: Kind, fields: list[Any], allow_pickle: bool) -> Any:
    names, count = RECORDS[kind], len(fields)
    fits = names[0] == "*items" or count == len(names)
    expect(fits, "bad_record", f"{len(names)} fields of {kind.name}", count)
    try:
        options = (allow_pickle,) if kind is Kind.PICKLE else ()
        return _RECORDS[kind](*fields, *options)
    except (WireFormatError, OSError, MemoryError):
        raise
    except Exception as error:  # torch and numpy raise all kinds
        pass_on(error)
        raise bad(f"a {kind.name}", error) from error


def _dict_of(keys: Sequence[Any], items: Sequence[Any]) -> dict[Any, Any]:
    """A dict of keys that a stranger chose, if they are distinct and do not collide."""
    check_distinct(keys, "dict keys")
    value = dict(zip(keys, items, strict=True))
    if len(value) != len(keys):
        raise bad("every dict key once", "some twice")
    return value


def _set_of_members(*items: Any) -> set[Any]:
    check_distinct(items, "set members", run=10)
    members = set(items)
    if len(members) != len(items):
        raise bad("every set member once", "some twice")
    return members


def _dict_of_pairs(*items: Any) -> dict[Any, Any]:
    expect(len(items) % 2 == 0, "bad_record", "keys and values in turn", len(items))
    return _dict_of(items[::2], items[1::2])


def _big_int(data: Any) -> int:
    expect(type(data) is bytes and data != b"", "bad_record", "bytes", data)
    return int.from_bytes(data, "little", signed=True)


def _list_of_numbers(dtype: Any, data: Any) -> list[Any]:
    is_known = type(dtype) is str and dtype in kernels.LIST_DTYPES
    expect(is_known, "unknown_dtype", f"one of {', '.join(kernels.LIST_DTYPES)}", dtype)
    expect(type(data) is bytes, "bad_record", "bytes", data)
    numbers = kernels.list_of_narrow(dtype, data)
    if numbers is None:
        raise bad(f"cells of {dtype}, bools of 0 and 1", f"{len(data)} bytes")
    return numbers


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    itemsize = numpy_itemsize(dtype)
    fits = type(data) is bytes and len(data) == itemsize
    expect(fits, "bad_record", f"{itemsize} bytes", data)
    array: Any = np.ndarray((), dtype=numpy_dtype(dtype), buffer=bytearray(data))
    check_text(array)
    return array[()]


def _value_of_user(name: Any, state: Any) -> Any:
    expect(type(name) is str, "bad_record", "a type's name", name)
    return restore(name, state)


def _unpickled(data: Any, allow_pickle: bool) -> Any:
    expect(type(data) is bytes, "bad_record", "bytes", data)
    if not allow_pickle:
        detail = (
            "expected a message without pickle, found a pickled object; if you trust the sender "
            "with this process, pass allow_pickle=True on both sides"
        )
        raise fail("pickle_refused", detail)
    try:
        return pickle.loads(data)  # noqa: S301
    except Exception as error:  # unpickling may raise anything
        raise bad("data that unpickles", f"{type(error).__name__}: {error!s:.200}") from error


_RECORDS: dict[Kind, Callable[..., Any]] = {
    Kind.BIG_INT: _big_int,
    Kind.TUPLE: lambda *items: items,
    Kind.SET: _set_of_members,
    Kind.FROZENSET: lambda *items: frozenset(_set_of_members(*items)),
    Kind.DICT: _dict_of_pairs,
    Kind.NUMBERS: _list_of_numbers,
    Kind.SCALAR: _numpy_scalar,
    Kind.USER: _value_of_user,
    Kind.PICKLE: _unpickled,
}
