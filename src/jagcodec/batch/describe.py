"""Descriptions of messages: columns, rows, bytes, and whether they are sound.

Describing a message reads its header and the offsets of its rows. No cell is read, and no value
of a type that this process does not know is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from jagcodec._arguments import known_names
from jagcodec.errors import WireFormatError, child_path
from jagcodec.memory.buffers import MessageLike
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.wire.checks import inside
from jagcodec.wire.decoder import build
from jagcodec.wire.frames import Reading, blob_end, buffer_bytes, is_blob
from jagcodec.wire.indirect import runs_at
from jagcodec.wire.leaf import Leaf, leaf_of
from jagcodec.wire.message import Message, open_message
from jagcodec.wire.schema import (
    FORMS,
    INTEGER_ROWS,
    Node,
    Places,
    check_node,
    child_step,
    stored_size,
)
from jagcodec.wire.spec import NO_INDEX, PLAIN, Kind
from jagcodec.wire.wire_batch import batch_in, batch_of_message

# --- opening -----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A column of a message, or another value in it, whose name is a path that begins with $."""

    name: str
    keys: tuple[str, ...]  # of a column, from the outermost
    node: Node


class OpenMessage(NamedTuple):
    """A message whose header was read; see `MessageDescription`."""

    message: Message
    bytes: int
    behind: int
    entries: list[Entry]
    batch: Node | None  # which holds the columns


def open_source(source: Any, path: str) -> OpenMessage:
    """Open a message of any value, and compare its checksums, if it has any."""
    message = open_message(source, path, Reading(by_range=True))
    arrays: Any = message.frames
    header = message.header
    total, behind = sum(map(len, arrays)), 0
    whole = buffer_bytes(source[0] if isinstance(source, (list, tuple)) else source, path)
    if len(arrays) == 1 + len(header.stored) and is_blob(whole):
        total = blob_end(len(arrays[0]), header.stored)
        behind = len(whole) - total
    root = header.schema.root
    batch, others = batch_in(root) or (None, [])
    entries = _values_of(root) if batch is None else _named_columns(batch)
    for name, node in others:
        entries.append(Entry(child_path("$", "meta_info" if name is None else name), (), node))
    return OpenMessage(message, total, behind, entries, batch)


def _named_columns(batch: Node) -> list[Entry]:
    """The columns of a batch and of the batches in it, under different names."""
    listed = [(".".join(keys), keys, node) for keys, node in _columns_of(batch, ())]
    counts = Counter(name for name, _, _ in listed)
    return [
        Entry(str(keys) if counts[name] > 1 or name.startswith(("$", "('")) else name, keys, node)
        for name, keys, node in listed
    ]


def _columns_of(node: Node, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    for name, child in zip(node.fields[-1], node.children, strict=True):
        if child.kind is Kind.TENSORDICT:
            yield from _columns_of(child, (*above, name))
        else:
            yield (*above, name), child


CONTAINERS = frozenset((Kind.LIST, Kind.TUPLE, Kind.MAP))
"""Kinds of values that are described entry by entry."""


def _values_of(root: Node) -> list[Entry]:
    """The entries of a value that is not a batch, one level down."""
    if root.kind not in CONTAINERS or not root.children:
        return [Entry("$", (), root)]
    found = []
    for i, child in enumerate(root.children):
        step = child_step(root, i)
        name = child_path("$", step) if type(step) is str else f"$[{i}]"
        found.append(Entry(name, (), child))
    return found


def chosen_entries(found: OpenMessage, names: Sequence[str]) -> list[Entry]:
    """The columns and values of these names, in this order."""
    everything = {entry.name: entry for entry in found.entries}
    return [everything[name] for name in known_names(names, everything, "columns")]


# --- descriptions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnDescription:
    """A column of a message, or another value in it, whose name is a path that begins with $."""

    name: str
    keys: tuple[str, ...]  # from the outermost; empty for any other value
    kind: str
    dtype: str | None  # on the wire
    shape: tuple[int | None, ...] | None  # None for the ragged dim
    stored: str  # "narrow", "indirect" or empty
    bytes: int  # cells that columns share count for the first of them
    share: float  # of the message before compression, 0 to 1
    rows: int | None  # index in MessageDescription.rows_of


@dataclass(frozen=True)
class RowLengths:
    """Rows that columns share: (N,) tokens of each row, and the names of the columns."""

    columns: tuple[str, ...]
    lengths: IntArray = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Everything except the lengths themselves, for JSON."""
        lengths = self.lengths
        numbers: dict[str, Any] = dict.fromkeys(("min", "mean", "median", "max"))
        if len(lengths):
            numbers = {
                "min": int(lengths.min()),
                "mean": float(lengths.mean()),
                "median": float(np.median(lengths)),
                "max": int(lengths.max()),
            }
        sums = {"rows": len(lengths), "tokens": int(lengths.sum())}
        return {"columns": list(self.columns), **sums, **numbers}


@dataclass(frozen=True)
class MessageDescription:
    """What a message holds: its columns, and then the values next to them."""

    value: str  # "TensorDict", "BatchedDataDict" or "dict" if it is a batch
    rows: int | None
    bytes: int  # of the blob, or of all frames
    plain_bytes: int  # before compression
    frames: int  # with the header
    behind: int  # bytes past the end of a blob, which no reader uses
    narrow: bool
    elide: bool
    compress: str | None
    checksum: bool
    columns: tuple[ColumnDescription, ...]
    meta: tuple[str, ...] | None  # names; None if this process cannot read it
    rows_of: tuple[RowLengths, ...]
    overhead: int  # bytes of the header, of row offsets and of gaps

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        rows_of = [rows.as_dict() for rows in self.rows_of]
        return {**vars(self), "columns": [*map(vars, self.columns)], "rows_of": rows_of}


def describe_message(source: MessageLike) -> MessageDescription:
    """Describe a message of any value, from its header and the offsets of its rows."""
    return description_of(open_source(source, "describe_message(source)"))


def description_of(found: OpenMessage) -> MessageDescription:
    """As `describe_message`, for a message that is open."""
    message, header = found.message, found.message.header
    root = header.schema.root
    walk = _Walk(message)
    columns = tuple(map(walk.column, found.entries))
    value = root.kind.name.lower()
    if found.batch is not None:
        value = {Kind.USER: "BatchedDataDict", Kind.MAP: "dict"}.get(root.kind, "TensorDict")
    elif root.kind is Kind.USER:
        value = f"user type {root.fields[0]}"
    return MessageDescription(
        value=value,
        rows=None if found.batch is None else _rows(message),
        bytes=found.bytes,
        plain_bytes=walk.plain,
        frames=1 + len(header.sizes),
        behind=found.behind,
        narrow=walk.narrow,
        elide=walk.elide,
        compress="zstd" if header.compressed else None,
        checksum=has_checksums(message),
        columns=columns,
        meta=names_of_meta(message.meta),
        rows_of=tuple(
            RowLengths(tuple(names), message.row_splits(group).lengths)
            for group, (_, names) in walk.groups.items()
        ),
        overhead=walk.plain - sum(column.bytes for column in columns),
    )


def has_checksums(message: Message) -> bool:
    """Whether a message has checksums; without a payload, whether its header has one."""
    header = message.header
    sizes = len(header.sizes) * (2 if header.compressed else 1)
    return len(header.numbers) > header.schema.numbers + 2 + 5 * len(header.groups) + sizes


def _rows(message: Message) -> int | None:
    try:
        return len(batch_of_message(message))
    except WireFormatError:  # a batch without dims
        return None


def names_of_meta(read: Callable[[], dict[str, Any]]) -> tuple[str, ...] | None:
    """The names in `meta`; None if it has a value that this process cannot make."""
    try:
        return tuple(map(str, read()))
    except WireFormatError as error:
        if error.reason not in UNKNOWN:
            raise
        return None


UNKNOWN = frozenset(("unknown_type", "pickle_refused"))
"""Reasons of errors about values that this process cannot make, in messages that may be sound."""


# --- one walk ----------------------------------------------------------------------------------


class _Walk(Places):
    """One walk over the columns of a message, which counts their bytes."""

    def __init__(self, message: Message) -> None:
        header = message.header
        super().__init__(header.sizes)
        self.plain: int = header.total - sum(header.stored) + sum(header.sizes)
        self.narrow: bool = False
        self.elide: bool = False
        # Of each ragged group: its place among them, and the names of its columns.
        self.groups: dict[int, tuple[int, list[str]]] = {}
        self._message = message
        self._values = document_bounds(header.packed_values)
        self._size = 0  # of the column that is described now
        # Writers share whole places alone, so a place is counted once by where it begins.
        self._counted: set[tuple[int, int]] = set()

    def column(self, entry: Entry) -> ColumnDescription:
        """Describe a column, and count the bytes in it that no column before it has."""
        node = entry.node
        self._size = 0
        self._count(node)
        leaf = leaf_of(node, self._message.numbers)
        stored, rows = "", None
        if leaf is not None and (leaf.runs or _is_narrow(leaf)):
            stored = "indirect" if leaf.runs else "narrow"
        if node.kind is Kind.JAGGED and leaf is not None and leaf.group is not None:
            rows, names = self.groups.setdefault(leaf.group, (len(self.groups), []))
            names.append(entry.name)
        typed = node.children[0] if node.kind in INTEGER_ROWS else node
        form = FORMS.get(typed.kind)
        dtype = typed.fields[0] if form is not None and "dtype" in form.fields else None
        return ColumnDescription(
            name=entry.name,
            keys=entry.keys,
            kind=_kind(node),
            dtype=dtype,
            shape=_shape(self._message, node),
            stored=stored,
            bytes=self._size,
            share=self._size / self.plain if self.plain else 0.0,
            rows=rows,
        )

    def claim(self, buffer: int, offset: int, size: int, path: str = "$") -> None:
        """Count a place that was checked when the message was opened."""
        if size and (buffer, offset) not in self._counted:
            self._counted.add((buffer, offset))
            self._size += size

    def _count(self, node: Node) -> None:
        message, form = self._message, FORMS.get(node.kind)
        if node.kind is Kind.VALUE:
            start, end = self._values[node.value]
            self._size += end - start
        elif form is not None and form.numbers:
            check_node(node, message.numbers, message.header.groups, self)
        leaf = leaf_of(node, message.numbers)
        if leaf is not None:
            self.elide = self.elide or leaf.runs > 0
            self.narrow = self.narrow or _is_narrow(leaf)
            self._count_runs(leaf)
        for child in node.children:
            self._count(child)

    def _count_runs(self, leaf: Leaf) -> None:
        """Count the places that the table of a column names."""
        groups = self._message.header.groups
        for run in runs_at(self._message, leaf) if leaf.runs else ():
            cells = stored_size(leaf.place.name, run.stored, run.cells * leaf.inner)
            self.narrow = self.narrow or bool(cells and run.stored != PLAIN)
            self.claim(run.buffer, run.offset, cells)
            if run.index_buffer != NO_INDEX:
                rows = leaf.shape[0] if leaf.group is None else groups[leaf.group].rows
                index = stored_size("int64", run.index_stored, rows)
                self.claim(run.index_buffer, run.index_offset, index)


def _is_narrow(leaf: Leaf) -> bool:
    return bool(leaf.place.stored != PLAIN and leaf.place.cells and not leaf.runs)


def _kind(node: Node) -> str:
    if node.kind is Kind.USER:
        return f"type {node.fields[0]}"
    payload = node.kind in (Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_ROWS, Kind.NON_TENSOR_STACK)
    return "object" if payload else node.kind.name.lower()


def _shape(message: Message, node: Node) -> tuple[int | None, ...] | None:
    kind, form = node.kind, FORMS.get(node.kind)
    if kind is Kind.NON_TENSOR_ROWS:
        return (message.row_splits(message.numbers[node.number + 3]).rows,)
    if kind is Kind.TENSOR_VIEWS:
        base, bounds = node.children
        return (message.numbers[bounds.dims], None, *message.shape(base)[1:])
    if form is None or form.numbers[-1:] != ("*",):
        return None
    dims: list[int | None] = [*message.shape(node)]
    if kind is Kind.JAGGED:
        dims[node.fields[2] - 1] = None
        dims.insert(0, message.row_splits(message.numbers[node.number + 3]).rows)
    return tuple(dims)


def document_bounds(packed: bytes) -> list[tuple[int, int]]:
    """Where each document of a header begins and ends."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(packed) or 1, strict_map_key=False)
    unpacker.feed(packed)
    count = unpacker.read_array_header()
    at, bounds = unpacker.tell(), []
    for _ in range(count):
        unpacker.skip()
        bounds.append((at, unpacker.tell()))
        at = unpacker.tell()
    return bounds


# --- soundness ---------------------------------------------------------------------------------


def check_message(source: MessageLike) -> tuple[OpenMessage, dict[str, str]]:
    """Read a message whole; the errors of values that this process cannot make, by name."""
    found = open_source(source, "check_message(source)")
    message = found.message
    unknown: dict[str, str] = {}
    try:
        build(message, message.header.schema.root)
        message.meta()
        return found, unknown
    except WireFormatError as error:
        whole = error
    for entry in found.entries:  # which of them it is
        try:
            build(message, entry.node)
        except WireFormatError as error:
            if error.reason not in UNKNOWN:
                raise in_entry(entry, error) from error
            unknown[entry.name] = str(error)
    try:
        message.meta()
    except WireFormatError as error:
        if error.reason not in UNKNOWN:
            raise
        unknown["meta"] = str(error)
    if not unknown:
        raise whole  # they do not fit together
    return found, unknown


def in_entry(entry: Entry, error: WireFormatError) -> WireFormatError:
    """The error of one column, or of another value, with its name in the path."""
    if entry.name.startswith("$"):
        return WireFormatError(
            error.reason, entry.name + error.path.removeprefix("$"), error.detail
        )
    return inside(error, entry.name)
