"""A range of the rows of a message as another message, cut from its bytes.

Neighbouring rows of a column are end to end in a message. So a part copies or aliases their bytes,
and computes numbers for the new places; it builds no value. The frames equal those that `encode`
makes of the same rows, which takes longer. `WireBatch.to_frames` calls `encode` for parts that
cannot be cut out.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import sub
from typing import Any, NamedTuple

from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.frames import Frame, frames_of
from jagcodec.wire.header import header_start
from jagcodec.wire.items import Item
from jagcodec.wire.leaf import leaf_of
from jagcodec.wire.read.message import Message
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind
from jagcodec.wire.write.place import MessageWriter


class _Cuttable(NamedTuple):
    """A column whose rows are end to end."""

    data: memoryview
    cell: int  # bytes of one cell, or of one row of a rectangle
    offsets: int | None  # the index in `Slicer.offsets` of its offsets; None for a rectangle
    dims: tuple[int, ...]  # the dims of a cell; () for documents


class Slicer(NamedTuple):
    """Cuts ranges of rows out of the columns of one message."""

    columns: list[_Cuttable]
    offsets: list[list[int]]  # where rows begin, in cells; columns share them
    start: bytes  # how the header of each part begins
    values: bytes

    def cut(self, start: int, stop: int) -> list[Frame]:
        """The message of rows `start` to `stop`, as frames; there is at least one row."""
        rows = stop - start
        items: list[Any] = [rows]
        bounds = [(offsets[start], offsets[stop]) for offsets in self.offsets]
        splits = [
            RowSplits.from_counts(tuple(map(sub, offsets[start + 1 : stop + 1], offsets[start:])))
            for offsets in self.offsets
        ]
        for data, cell, which, dims in self.columns:
            first, last = (start, stop) if which is None else bounds[which]
            group = None if which is None else splits[which]
            cut = data[first * cell : last * cell]
            items.append(Item(cut, (last - first, *dims), group))
        writer = MessageWriter()
        return frames_of(writer.finish(self.start, writer.place(items), self.values))


def slicer_of(message: Message, nodes: Mapping[str, Node], rows: int) -> Slicer | None:
    """A slicer of these columns of a message in memory; None if they cannot be cut out."""
    header = message.header
    if rows > MAX_UNBACKED_ROWS or header.schema.value_count:
        return None
    groups: dict[int, int] = {}  # a group of the message to its index in `Slicer.offsets`
    columns: list[_Cuttable] = []
    for node in nodes.values():
        column = _cuttable(message, node, rows, groups)
        if column is None:
            return None
        columns.append(column)
    nodes_of = [(int(node.kind), *node.fields) for node in nodes.values()]
    start = header_start((int(Kind.TENSORDICT), 1, tuple(nodes), *nodes_of))
    offsets = [message.row_splits(group).offsets_array.tolist() for group in groups]
    return Slicer(columns, offsets, start, header.value_bytes)


def _cuttable(message: Message, node: Node, rows: int, groups: dict[int, int]) -> _Cuttable | None:
    """A column from which rows can be cut out, or None. Adds its ragged group to `groups`."""
    leaf = leaf_of(node, message.numbers)
    if leaf is None or not leaf.shape or leaf.ragged_dim > 1 or leaf.place.storage_code != PLAIN:
        return None
    if leaf.blobs:  # a part may have only rows that `encode` writes as documents
        return None
    which, found = None, leaf.shape[0]
    if leaf.group is not None:
        which = groups.setdefault(leaf.group, len(groups))
        found = message.splits(leaf.group, found).rows
    if found != rows:
        return None
    data = message.read(*leaf.place[:2], leaf.shape[0] * leaf.cell_bytes)
    return _Cuttable(data.data, leaf.cell_bytes, which, leaf.shape[1:])
