"""A range of the rows of a message as another message, cut from its bytes.

No value is built: what is together in a message is together in a part of it, so that a part is
bytes cut out, and numbers for their new places. The frames are those that `encode` makes of
the same rows, in a third of its time. `WireBatch.to_frames` calls `encode` for parts that cannot be
cut out.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import sub
from typing import Any, NamedTuple

from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.frames import Frame, frames_of
from jagcodec.wire.header import start_of
from jagcodec.wire.items import item_of_cells
from jagcodec.wire.leaf import leaf_of
from jagcodec.wire.message import Message
from jagcodec.wire.place import MessageWriter
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind


class _Cuttable(NamedTuple):
    """A column whose rows are end to end."""

    data: memoryview
    cell: int  # bytes of one cell, or of a row of a rectangle
    offsets: int | None  # which of the offsets of the message are those of its rows
    dims: tuple[int, ...]  # of a cell; () if it is a document


class Slicer(NamedTuple):
    """The columns of one message, from which parts are cut out."""

    columns: list[_Cuttable]
    offsets: list[list[int]]  # where rows begin, in cells; columns share them
    start: bytes  # of the header of each part
    values: bytes

    def cut(self, start: int, stop: int) -> list[Frame]:
        """The frames of rows `start` to `stop`, of which there are some."""
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
            items.append(item_of_cells(cut, (last - first, *dims), group))
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
    start = start_of((int(Kind.TENSORDICT), 1, tuple(nodes), *nodes_of))
    offsets = [message.row_splits(group).offsets_array.tolist() for group in groups]
    return Slicer(columns, offsets, start, header.value_bytes)


def _cuttable(message: Message, node: Node, rows: int, groups: dict[int, int]) -> _Cuttable | None:
    """A column from which rows can be cut out; None if they cannot be. `groups` gets its group."""
    leaf = leaf_of(node, message.numbers)
    if leaf is None or not leaf.shape or leaf.ragged_dim > 1 or leaf.place.stored != PLAIN:
        return None
    if leaf.blobs:  # some may be documents in a part of the rows
        return None
    which, found = None, leaf.shape[0]
    if leaf.group is not None:
        which = groups.setdefault(leaf.group, len(groups))
        found = message.splits(leaf.group, found).rows
    if found != rows:
        return None
    data = message.read(*leaf.place[:2], leaf.shape[0] * leaf.cell_bytes)
    return _Cuttable(data.data, leaf.cell_bytes, which, leaf.shape[1:])
