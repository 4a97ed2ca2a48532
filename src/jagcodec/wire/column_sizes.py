"""What each column of a batch takes of a message: the bytes that its numbers name, counted once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from jagcodec.wire.frames import blob_end, is_blob
from jagcodec.wire.indirect import runs_at
from jagcodec.wire.message import Message, open_message
from jagcodec.wire.registry import BATCHED_DATA_DICT
from jagcodec.wire.schema import FORMS, Node, Places, check_node, stored_size
from jagcodec.wire.spec import NO_INDEX, PLAIN, Kind


class ColumnSize(NamedTuple):
    """A column of a message.

    Attributes:
        name: Its keys, from the outermost.
        layout: ``"jagged"``, ``"rectangular"``, ``"object"`` or ``"other"``.
        sent: Bytes of it: cells, tables and indices that no column before it names, and documents.
        rows: Of a jagged one: how many.
        longest: Of a jagged one: tokens of its longest row.
        tokens: Of a jagged one: of all its rows.
        token: Of a jagged one: bytes of one, as wide as its dtype.
    """

    name: tuple[str, ...]
    layout: str
    sent: int
    rows: int = 0
    longest: int = 0
    tokens: int = 0
    token: int = 0


class MessageSize(NamedTuple):
    """A message, in bytes.

    Attributes:
        total: All of it, as a blob if it is one, and otherwise its frames.
        plain: The same before it was compressed; of frames.
        columns: Those of its batch; none where it holds none.
        narrow: Whether any cells are stored narrow.
        elide: Whether any column is indirect.
        compress: ``"zstd"`` where frames are compressed.
        checksum: Whether it has checksums.
    """

    total: int
    plain: int
    columns: list[ColumnSize]
    narrow: bool
    elide: bool
    compress: str | None
    checksum: bool


def message_size(frames: Any, path: str) -> MessageSize:
    """What a message is made of, column by column; `frames` are those of a batch, or its blob.

    Raises:
        ArgumentTypeError: It is neither frames nor a blob.
        WireFormatError: It is malformed.
        ArgumentError: Frames are compressed, and the library for that is not installed.
    """
    message = open_message(frames, path, by_range=True, verify=False)
    arrays: Any = message.frames
    header = message.header
    total = sum(map(len, arrays))
    if not isinstance(frames, (list, tuple)) or (len(frames) == 1 and _is_blob(frames[0])):
        total = blob_end(len(arrays[0]), header.stored)
    weighing = Weighing(message)
    batch = batch_node(header.schema.root)
    columns = [weighing.column(*column) for column in columns_of(batch)] if batch else []
    plain = len(arrays[0]) + sum(header.sizes)
    compress = "zstd" if header.compressed else None
    seen = weighing.narrow, weighing.elide, compress, header.checksums is not None
    return MessageSize(total, plain, columns, *seen)


def _is_blob(buffer: Any) -> bool:
    data = memoryview(buffer)
    return data.nbytes > 0 and is_blob(data.cast("B")[:8])  # type: ignore[arg-type]


def batch_node(root: Node) -> Node | None:
    """The columns of a message, where `open_wire` finds them; None where it finds none."""
    if root.kind is Kind.TENSORDICT:
        return root
    if root.kind is Kind.USER and root.fields[0] == BATCHED_DATA_DICT:
        state = root.children[0].children
        return state[0] if len(state) == 2 and state[0].kind is Kind.MAP else None
    found = [child for child in root.children if child.kind is Kind.TENSORDICT]
    return found[0] if root.kind is Kind.MAP and len(found) == 1 else None


def columns_of(node: Node, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """The columns of a batch with their keys, those of the batches in it too."""
    for name, child in zip(node.fields[-1], node.children, strict=True):
        if child.kind is Kind.TENSORDICT:
            yield from columns_of(child, (*above, name))
        else:
            yield (*above, name), child


class Named(Places):
    """The places that the numbers of a node name."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes, sum(sizes))
        self.named: list[tuple[int, int, int]] = []

    def claim(self, buffer: int, offset: int, size: int, path: str = "$") -> None:
        if size:
            self.named.append((buffer, offset, size))


class Weighing:
    """The state of one walk over the columns of a message: which bytes were counted already."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self.narrow: bool = False
        self.elide: bool = False
        # Of each buffer, where counted ranges begin and where they end; none touch or overlap.
        self._counted: list[tuple[list[int], list[int]]] = [([], []) for _ in message.header.sizes]
        for group in message.header.groups:
            if group.rows > 1:
                # Offsets of rows belong to no column: all of their group share them.
                self._fresh(group.buffer, group.offset, 8 * (group.rows + 1))
        self._values = _value_sizes(message.header.packed_values)

    def sent(self, node: Node) -> int:
        """Bytes of a node and what is in it that nobody has counted yet."""
        return sum(map(self._sent, _within(node)))

    def column(self, name: tuple[str, ...], node: Node) -> ColumnSize:
        """What a column takes."""
        sent = self.sent(node)
        if node.kind not in (Kind.JAGGED, Kind.INNER_FIRST):
            return ColumnSize(name, _LAYOUTS.get(node.kind, "other"), sent)
        if node.kind is Kind.INNER_FIRST:
            (node,) = node.children
        shape = list(self._message.shape(node))
        del shape[node.fields[2] - 1]
        splits = self._message.row_splits(self._message.numbers[node.number + 3])
        token = math.prod(shape) * node.itemsize
        return ColumnSize(name, "jagged", sent, splits.rows, splits.max, splits.total, token)

    def _sent(self, node: Node) -> int:
        if node.kind is Kind.VALUE:
            return self._values[node.value]
        if node.kind not in FORMS or not FORMS[node.kind].numbers:
            return 0
        numbers, groups = self._message.numbers, self._message.header.groups
        places = Named(self._message.header.sizes)
        check_node(node, numbers, groups, places)
        named = places.named
        if named and FORMS[node.kind].numbers[2:3] == ("stored",):
            stored = numbers[node.number + 2]
            if self._message.is_indirect(node):
                self.elide = True
                named = named + self._runs(node)
            elif stored != PLAIN:
                self.narrow = True
        return sum(self._fresh(*place) for place in named)

    def _runs(self, node: Node) -> list[tuple[int, int, int]]:
        """The places that a table names."""
        places: list[tuple[int, int, int]] = []
        leaf, groups = self._message.leaf(node), self._message.header.groups
        for run in runs_at(self._message, leaf):
            rows = leaf.shape[0]
            if leaf.group is not None:
                rows = groups[run.group].rows if 0 <= run.group < len(groups) else 0
            size = stored_size(leaf.place.name, run.stored, run.cells * leaf.inner)
            self.narrow = self.narrow or bool(size and run.stored != PLAIN)
            places.append((run.buffer, run.offset, size))
            if run.index_buffer != NO_INDEX:
                index = stored_size("int64", run.index_stored, rows)
                places.append((run.index_buffer, run.index_offset, index))
        return [place for place in places if place[2] > 0]

    def _fresh(self, buffer: int, offset: int, size: int) -> int:
        """How many bytes at a place nobody has counted yet; from now on they are."""
        if not 0 <= buffer < len(self._counted):
            return 0  # of a table that is malformed, which reading its column says
        starts, ends = self._counted[buffer]
        end = offset + size
        first = bisect_left(ends, offset)
        last = first
        counted = 0
        begin, stop = offset, end
        while last < len(starts) and starts[last] <= end:
            counted += max(0, min(end, ends[last]) - max(offset, starts[last]))
            begin, stop = min(begin, starts[last]), max(stop, ends[last])
            last += 1
        starts[first:last] = [begin]
        ends[first:last] = [stop]
        return size - counted


_LAYOUTS = {
    Kind.TENSOR: "rectangular",
    Kind.ARRAY: "rectangular",
    Kind.NON_TENSOR_DATA: "object",
    Kind.NON_TENSOR_ROWS: "object",
    Kind.NON_TENSOR_STACK: "object",
    Kind.OBJECT_ARRAY: "object",
    Kind.LIST: "object",
    Kind.VALUE: "object",
}


def _within(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _within(child)


def _value_sizes(packed: bytes) -> list[int]:
    """Bytes of each document of a header."""
    return [end - start for start, end in document_bounds(packed)]


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
