"""Describes messages (columns, rows, bytes), checks them, and compares them.

To describe a message, `describe_message` reads its header and the offsets of its rows. It reads no
cell, and makes no value of a type that this process does not know. `check_message` reads the whole
message, and `differences` compares two. All three take a message apart in the same way: into a
batch, its columns, and the values next to it. So they are in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgpack
import numpy as np

from jagcodec._arguments import known_names
from jagcodec.columns.batch import As, source_in, views_of
from jagcodec.errors import WireFormatError, child_path
from jagcodec.memory.buffers import MessageLike
from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.checks import inside
from jagcodec.wire.claims import Claims, check_node
from jagcodec.wire.compare import WHOLE, BatchColumns, Difference, each_difference
from jagcodec.wire.frames import buffer_bytes, frame_bounds, is_blob
from jagcodec.wire.leaf import Leaf, field_of, kind_of, leaf_of, rows_of_node
from jagcodec.wire.read.batch_node import batch_in
from jagcodec.wire.read.decoder import build, message_meta
from jagcodec.wire.read.message import Message, Reading
from jagcodec.wire.read.opening import open_message
from jagcodec.wire.read.wire_batch import WireBatch, batch_of_message, open_whole
from jagcodec.wire.schema import FORMS, GROUP, INTEGER_ROWS, Node, child_step, size_at_code
from jagcodec.wire.spec import NO_INDEX, Kind, is_widened_on_read
from jagcodec.wire.stored.elided_rows import runs_at

# --- opening -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A column of a message; or another value in it, whose name is a path that begins with $."""

    name: str
    keys: tuple[str, ...]  # the names on the way to a column; empty for other values
    node: Node


class OpenMessage(NamedTuple):
    """A message whose header was read."""

    message: Message
    bytes: int  # of the blob, or of all frames
    entries: list[Entry]
    batch: Node | None  # the node that holds the columns


def open_source(source: Any, path: str) -> OpenMessage:
    """Open a message of any value, and check its checksums, if it has any."""
    message = open_message(source, path, Reading(value_by_value=True))
    header, size = message.header, message.header.total
    if is_blob(buffer_bytes(source[0] if isinstance(source, (list, tuple)) else source, path)):
        size = frame_bounds(size - sum(header.sent_sizes), header.sent_sizes)[-1]
    root = header.schema.root
    batch, others = batch_in(root) or (None, [])
    entries = _values_of(root) if batch is None else [*_entries_of(batch, ())]
    for name, node in others:
        entries.append(Entry(child_path("$", "meta_info" if name is None else name), (), node))
    return OpenMessage(message, size, entries, batch)


def _entries_of(node: Node, above: tuple[str, ...]) -> Iterator[Entry]:
    for name, child in zip(node.fields[-1], node.children, strict=True):
        keys = (*above, name)
        if child.kind is Kind.TENSORDICT:
            yield from _entries_of(child, keys)
        else:
            yield Entry(".".join(keys), keys, child)


def _values_of(root: Node) -> list[Entry]:
    """The entries of a value that is not a batch: one for each of its direct items."""
    if root.kind not in (Kind.LIST, Kind.TUPLE, Kind.MAP) or not root.children:
        return [Entry("$", (), root)]
    steps = [child_step(root, i) for i in range(len(root.children))]
    names = [child_path("$", step) if type(step) is str else f"$[{step}]" for step in steps]
    return [Entry(name, (), child) for name, child in zip(names, root.children, strict=True)]


def chosen_entries(found: OpenMessage, names: Sequence[str]) -> list[Entry]:
    """The columns and values with these names, in this order."""
    everything = {entry.name: entry for entry in found.entries}
    return [everything[name] for name in known_names(names, everything, "columns")]


# --- descriptions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnDescription:
    """An `Entry`, described."""

    name: str
    keys: tuple[str, ...]
    kind: str
    dtype: str | None  # on the wire
    shape: tuple[int | None, ...] | None  # None for the ragged dim
    stored: str  # "narrow", "indirect", both, or empty
    bytes: int  # cells that columns share count for the first of them
    # The index of its `RowLengths` in `MessageDescription.rows_of`; None if it is not jagged.
    rows: int | None


@dataclass(frozen=True)
class RowLengths:
    """Row lengths that some columns share, in tokens; all numbers are 0 without rows."""

    columns: tuple[str, ...]
    rows: int
    tokens: int
    min: int
    mean: float
    median: float
    max: int


@dataclass(frozen=True)
class MessageDescription:
    """What a message holds: its columns, and then the values next to them."""

    value: str  # "TensorDict", "BatchedDataDict" or "dict" if it is a batch
    rows: int | None
    bytes: int  # of the blob, or of all frames
    plain_bytes: int  # before compression
    frames: int  # with the header
    narrow: bool
    elide: bool
    compress: str | None
    checksum: bool
    columns: tuple[ColumnDescription, ...]
    meta: tuple[str, ...] | None  # names; None if this process cannot read it
    rows_of: tuple[RowLengths, ...]
    overhead: int  # bytes of the header, of row offsets and of gaps


def describe_message(found: OpenMessage) -> MessageDescription:
    """Describe an open message, from its header and the offsets of its rows."""
    message, header = found.message, found.message.header
    root = header.schema.root
    walk = _ColumnWalk(message)
    columns = tuple(map(walk.describe, found.entries))
    value, rows = root.kind.name.lower(), None
    if found.batch is not None:
        value = {Kind.USER: "BatchedDataDict", Kind.MAP: "dict"}.get(root.kind, "TensorDict")
        with suppress(WireFormatError):  # a batch without dims
            rows = len(batch_of_message(message))
    elif root.kind is Kind.USER:
        value = f"user type {root.fields[0]}"
    plain = header.total - sum(header.sent_sizes) + sum(header.sizes)
    return MessageDescription(
        value=value,
        rows=rows,
        bytes=found.bytes,
        plain_bytes=plain,
        frames=1 + len(header.sizes),
        narrow=any("narrow" in column.stored for column in columns),
        elide=any("indirect" in column.stored for column in columns),
        compress="zstd" if header.compressed else None,
        checksum=header.checksums is not None,
        columns=columns,
        meta=names_of_meta(lambda: message_meta(message)),
        rows_of=tuple(
            _row_lengths(tuple(names), message.row_splits(group))
            for group, (_, names) in walk.groups.items()
        ),
        overhead=plain - sum(column.bytes for column in columns),
    )


def _row_lengths(columns: tuple[str, ...], splits: RowSplits) -> RowLengths:
    """The row lengths that these columns share."""
    lengths = splits.lengths if splits.rows else np.zeros(1)
    mean, median = float(lengths.mean()), float(np.median(lengths))
    return RowLengths(columns, splits.rows, splits.total, splits.min, mean, median, splits.max)


def names_of_meta(read: Callable[[], dict[str, Any]]) -> tuple[str, ...] | None:
    """The names in `meta`; None if `meta` has a value that this process cannot make."""
    try:
        return tuple(map(str, read()))
    except WireFormatError as error:
        if error.reason not in UNKNOWN:
            raise
        return None


UNKNOWN = frozenset(("unknown_type", "pickle_refused"))
"""Reasons of errors about values that this process cannot make, in messages that may be sound."""


class _ColumnWalk(Claims):
    """One walk over the columns of a message, which counts their bytes.

    `check_node` calls `claim` for each place of a node. `Claims` checks the place there; the header
    was checked already, so this class overrides `claim` to count the bytes of the place instead.
    """

    def __init__(self, message: Message) -> None:
        super().__init__(message.header.sizes)
        # For each ragged group, its place in `rows_of`, and the names of its columns.
        self.groups: dict[int, tuple[int, list[str]]] = {}
        self._message = message
        self._values = _document_bounds(message.header.value_bytes)
        # Writers share only whole places, so the start of a place identifies it.
        self._counted: set[tuple[int, int]] = set()
        # The bytes of the column that is described now, and how they are stored.
        self._size = 0
        self._stored: set[str] = set()

    def describe(self, entry: Entry) -> ColumnDescription:
        """Describe a column, and count its bytes without those that an earlier column has."""
        node, rows = entry.node, None
        self._size, self._stored = 0, set()
        self._count_node(node)
        if node.kind is Kind.JAGGED:
            group = self._message.numbers[node.number + GROUP]
            rows, names = self.groups.setdefault(group, (len(self.groups), []))
            names.append(entry.name)
        kind = f"type {node.fields[0]}" if node.kind is Kind.USER else kind_of(node)
        typed = node.children[0] if node.kind in INTEGER_ROWS else node
        form = FORMS.get(typed.kind)
        dtype = typed.fields[0] if form is not None and "dtype" in form.fields else None
        shape, stored = _shape(self._message, node), ", ".join(sorted(self._stored))
        return ColumnDescription(
            entry.name, entry.keys, kind, dtype, shape, stored, self._size, rows
        )

    def claim(self, buffer: int, offset: int, size: int, path: str = "$") -> None:
        """Count the bytes of a place, unless a column before has them."""
        if size and (buffer, offset) not in self._counted:
            self._counted.add((buffer, offset))
            self._size += size

    def _count_node(self, node: Node) -> None:
        message, form = self._message, FORMS.get(node.kind)
        if node.kind is Kind.VALUE:
            start, end = self._values[node.value]
            self._size += end - start
        elif form is not None and form.numbers:
            check_node(node, message.numbers, message.header.groups, self)
        leaf = leaf_of(node, message.numbers)
        if leaf is not None:
            places = [(leaf.place.storage_code, leaf.place.elements)]
            places = [*self._count_runs(leaf)] if leaf.runs else places
            if any(size and is_widened_on_read(code) for code, size in places):
                self._stored.add("narrow")
        for child in node.children:
            self._count_node(child)

    def _count_runs(self, leaf: Leaf) -> Iterator[tuple[int, int]]:
        """Count the places in a table of runs; yield how each is stored, and its bytes."""
        self._stored.add("indirect")
        for run in runs_at(self._message, leaf):
            elements = run.cells * leaf.elements_per_cell
            size = size_at_code(leaf.place.dtype_name, run.storage_code, elements)
            yield run.storage_code, size
            self.claim(run.buffer, run.offset, size)
            if run.index_buffer != NO_INDEX:
                groups = self._message.header.groups
                rows = leaf.shape[0] if leaf.group is None else groups[leaf.group].rows
                index = size_at_code("int64", run.index_storage_code, rows)
                self.claim(run.index_buffer, run.index_offset, index)


def _shape(message: Message, node: Node) -> tuple[int | None, ...] | None:
    """The shape of a value, with None for each ragged dim; None for a value without a shape."""
    kind, form = node.kind, FORMS.get(node.kind)
    rows = rows_of_node(node, message.numbers, message.header.groups)
    if kind is Kind.NON_TENSOR_ROWS:
        return (rows,)
    if kind is Kind.ARRAY_ROWS:
        return (rows, *[None] * (message.shape(node.children[1])[1] - 1))
    if kind is Kind.TENSOR_VIEWS:
        return (rows, None, *message.shape(node.children[0])[1:])
    if form is None or form.numbers[-1:] != ("*",):
        return None
    if kind is Kind.JAGGED:
        return field_of(node, message.numbers, rows or 0).shape
    return tuple(message.shape(node))


def _document_bounds(packed: bytes) -> list[tuple[int, int]]:
    """Where each document of a header begins and ends."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(packed) or 1, strict_map_key=False)
    unpacker.feed(packed)
    bounds = []
    for _ in range(unpacker.read_array_header()):
        start = unpacker.tell()
        unpacker.skip()
        bounds.append((start, unpacker.tell()))
    return bounds


# --- read whole --------------------------------------------------------------------------------


def batch_in_message(message: Message) -> WireBatch | None:
    """The one batch of a message; None for another value, and for a batch without dims."""
    try:
        return batch_of_message(message)
    except WireFormatError:  # if the message is unsound, building its value finds the fault again
        return None


def columns_of(batch: WireBatch) -> BatchColumns:
    """The columns of an open batch and of the batches inside it, read without torch."""
    columns = views_of(batch, As.HOST)
    sizes = source_in(batch).sizes[1:]
    return BatchColumns(
        {name: columns_of(x) if isinstance(x, WireBatch) else x for name, x in columns.items()},
        [len(batch), *sizes],
    )


def column_inside(batch: WireBatch, keys: Sequence[str]) -> WireBatch:
    """A batch of one column, whose `keys` are the names of the batches around it, and its own."""
    *above, name = keys
    for key in above:
        batch = views_of(batch.select([key]), As.HOST)[key]
    return batch.select([name])


def check_message(source: MessageLike) -> tuple[OpenMessage, dict[str, str]]:
    """Read a whole message; return it, and the errors of values that cannot be made, by name."""
    found = open_source(source, "check_message(source)")
    message = found.message
    batch = batch_in_message(message)
    try:
        if batch is None:
            build(message, message.header.schema.root)
            message_meta(message)
        else:
            columns_of(batch)
            source_in(batch).meta()
        return found, {}
    except WireFormatError as error:
        whole = error
    unknown: dict[str, str] = {}
    for entry in (*found.entries, None):  # find which one fails; None is the meta
        try:
            if entry is None:
                message_meta(message)
            elif batch is None or not entry.keys:
                build(message, entry.node)
            else:
                columns_of(column_inside(batch, entry.keys))
        except WireFormatError as error:
            if error.reason not in UNKNOWN:
                if entry is None or (batch is not None and entry.keys):
                    raise error from None  # it names the column, or `meta`
                raise in_entry(entry, error) from None
            unknown["meta" if entry is None else entry.name] = str(error)
    if not unknown:
        raise whole  # each column is sound, but the columns do not fit together
    return found, unknown


def in_entry(entry: Entry, error: WireFormatError) -> WireFormatError:
    """The error, with the name of its column or value in the path."""
    if entry.name.startswith("$"):
        return WireFormatError(
            error.reason, entry.name + error.path.removeprefix("$"), error.detail
        )
    return inside(error, entry.name)


# --- differences -------------------------------------------------------------------------------


class MessageContents(NamedTuple):
    """A whole message, or some columns of it."""

    kind: str  # of a batch; empty for another value
    value: Any  # the columns of a batch
    meta: dict[str, Any]


def read_whole(source: Any, path: str, columns: Sequence[str] | None = None) -> MessageContents:
    """The parts of a message that `differences` compares; errors call the message `path`."""
    if columns is not None:
        return MessageContents("columns", columns_of(open_whole(source, path).select(columns)), {})
    message = open_message(source, path, Reading(value_by_value=True))
    root, batch = message.header.schema.root, batch_in_message(message)
    if batch is None:
        return MessageContents("", build(message, root), message_meta(message))
    read, found = columns_of(batch), batch_in(root)
    if root.kind is Kind.TENSORDICT:
        return MessageContents("TensorDict", read, message_meta(message))
    if found is None or root.kind is not Kind.MAP:
        return MessageContents("BatchedDataDict", read, batch.meta)
    names = zip(root.fields[0], root.children, strict=True)
    value = {name: read if x is found.node else build(message, x) for name, x in names}
    return MessageContents("dict", value, message_meta(message))


def differences(a: MessageContents, b: MessageContents) -> Iterator[Difference]:
    """The first difference of each column."""
    start = WHOLE if a.kind and b.kind else replace(WHOLE, column="$")
    if a.kind == b.kind:
        yield from each_difference(a.value, b.value, start)
    else:
        left, right = (x.kind or type(x.value).__name__ for x in (a, b))
        yield replace(start, what="type", left=left, right=right)
    yield from each_difference(a.meta, b.meta, replace(WHOLE, column="meta"))
