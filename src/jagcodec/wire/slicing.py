"""A range of the rows of a message as another message, cut from its bytes.

No value is built: what is together in a message is together in a part of it, so that a part is
bytes cut out, and numbers for their new places. The frames are those that `encode` makes of
the same rows. `WireBatch.to_frames` calls `encode` for parts that cannot be cut out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from jagcodec.wire.at_once import frames_of_items
from jagcodec.wire.frames import Frame
from jagcodec.wire.header import start_of
from jagcodec.wire.leaf import leaf_of
from jagcodec.wire.lowered import Item
from jagcodec.wire.message import Message
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
        items: list[int | Item] = [rows]
        bounds = [
            (offsets[start], offsets[stop], _rows_between(offsets[start : stop + 1]))
            for offsets in self.offsets
        ]
        for data, cell, which, dims in self.columns:
            if which is None:
                items.append((data[start * cell : stop * cell], PLAIN, None, (rows, *dims)))
            else:
                first, last, group = bounds[which]
                cut = data[first * cell : last * cell]
                items.append((cut, PLAIN, group, (last - first, *dims)))
        return frames_of_items(self.start, items, self.values)


def _rows_between(offsets: list[int]) -> tuple[int, int, int, bytes]:
    """The rows between offsets, as an `Item` has them."""
    if len(offsets) == 2:
        length = offsets[1] - offsets[0]
        return 1, length, length, b""
    lengths = [b - a for a, b in pairwise(offsets)]
    first = offsets[0]
    packed = struct.pack(f"<{len(offsets)}q", *[offset - first for offset in offsets])
    return len(lengths), min(lengths), max(lengths), packed


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
    return Slicer(columns, offsets, start, header.packed_values)


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
