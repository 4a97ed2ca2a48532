"""A range of the rows of a message as another message, cut from its bytes.

No value is built: what is together in a message is together in a part of it, so that a part is
bytes cut out, and numbers for their new places. The frames are those that `encode` makes of
the same rows. What is not that simple is left to `encode`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from jagcodec.wire.frames import Frame
from jagcodec.wire.leaf import leaf_of
from jagcodec.wire.lowered import Item
from jagcodec.wire.message import Message
from jagcodec.wire.place import frames_of_items
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind


class _Column(NamedTuple):
    """A column whose rows are end to end."""

    data: memoryview
    cell: int  # bytes of one cell, or of a row of a rectangle
    offsets: list[int] | None  # where rows begin, in cells; None of a rectangle
    dims: tuple[int, ...]  # of a cell; () of documents


class Slicer(NamedTuple):
    """The columns of one message, from which parts are cut out."""

    columns: list[_Column]
    tree: tuple[Any, ...]
    values: bytes

    def cut(self, start: int, stop: int) -> list[Frame]:
        """The frames of rows `start` to `stop`, of which there are some."""
        items: list[int | Item] = [stop - start]
        known: dict[int, tuple[int, int, int, bytes]] = {}  # columns share their offsets
        for data, cell, offsets, dims in self.columns:
            if offsets is None:
                cut = data[start * cell : stop * cell]
                items.append((cut, PLAIN, None, (stop - start, *dims)))
                continue
            first, last = offsets[start], offsets[stop]
            own = known.get(id(offsets))
            if own is None:
                own = known[id(offsets)] = _rows_of(offsets[start : stop + 1])
            cut = data[first * cell : last * cell]
            items.append((cut, PLAIN, own, (last - first, *dims)))
        return frames_of_items(self.tree, items, self.values)


def _rows_of(offsets: list[int]) -> tuple[int, int, int, bytes]:
    """The rows between offsets, as an `Item` has them."""
    if len(offsets) == 2:
        length = offsets[1] - offsets[0]
        return 1, length, length, b""
    lengths = [b - a for a, b in pairwise(offsets)]
    first = offsets[0]
    packed = struct.pack(f"<{len(offsets)}q", *[offset - first for offset in offsets])
    return len(lengths), min(lengths), max(lengths), packed


def slicer_of(message: Message, nodes: Mapping[str, Node], rows: int) -> Slicer | None:
    """What cuts rows out of these columns of a message in memory; None where that is not simple."""
    header = message.header
    if rows > MAX_UNBACKED_ROWS or header.schema.values:
        return None
    offsets: dict[int, list[int]] = {}
    columns: list[_Column] = []
    for node in nodes.values():
        column = _column(message, node, rows, offsets)
        if column is None:
            return None
        columns.append(column)
    nodes_of = [(int(node.kind), *node.fields) for node in nodes.values()]
    tree = (int(Kind.TENSORDICT), 1, tuple(nodes), *nodes_of)
    return Slicer(columns, tree, header.packed_values)


def _column(
    message: Message, node: Node, rows: int, offsets: dict[int, list[int]]
) -> _Column | None:
    """A column from which rows can be cut out; None of any other."""
    leaf = leaf_of(node, message.numbers)
    if leaf is None or not leaf.shape or leaf.ragged_dim > 1 or leaf.place.stored != PLAIN:
        return None
    if leaf.blobs:  # some may be documents in a part of the rows
        return None
    known, total = None, leaf.shape[0]
    if leaf.group is not None:
        splits = message.splits(leaf)
        known, total = offsets.setdefault(leaf.group, splits.host.tolist()), splits.total
    if rows != (total if known is None else len(known) - 1):
        return None
    data = message.read(*leaf.place[:2], total * leaf.cell_bytes)
    return _Column(data.data, leaf.cell_bytes, known, leaf.shape[1:])
