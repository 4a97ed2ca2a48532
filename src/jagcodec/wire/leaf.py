"""Columns as cells of a buffer: their place, and ranges of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.wire.dtypes import torch_dtype
from jagcodec.wire.frames import Buffers
from jagcodec.wire.narrow import widened
from jagcodec.wire.schema import DOCUMENT_ROWS, LEAVES, Node, runs_of
from jagcodec.wire.spec import BITS, BLOBS, PLAIN, STORED_WIDTHS, TORCH_DTYPES, Kind

MOST_RANGES = 4096
"""Ranges of one column that are fetched one by one; of more, the column is read whole."""


class CellPlace(NamedTuple):
    """The place of cells."""

    buffer: int
    offset: int
    stored: int  # as wide as their dtype, or narrow
    cells: int
    name: str  # of their dtype


class Leaf(NamedTuple):
    """A TENSOR, a JAGGED, or rows of documents: their bytes are uint8 cells.

    Attributes:
        place: Its cells, or the table of its runs.
        shape: (A..., M, B...): dims of the values, as those of a `RaggedView`.
        ragged_dim: As of a `RaggedView`; 1 of a rectangle too, whose rows are one cell each.
        group: The ragged group; None of a rectangle.
        runs: Of each row, if it is indirect; 0 if the rows are in its place.
        blobs: Whether each row is a message of its own.
    """

    place: CellPlace
    shape: tuple[int, ...]
    ragged_dim: int
    group: int | None
    runs: int
    blobs: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of its cells, as torch calls it."""
        return torch_dtype(self.place.name)

    @property
    def inner(self) -> int:
        """Numbers in one cell."""
        return math.prod(self.shape[self.ragged_dim :])

    @property
    def outer(self) -> int:
        """How many runs the rows form: 1 unless dims come before the ragged one."""
        return math.prod(self.shape[: self.ragged_dim - 1])

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell, as wide as its dtype."""
        return self.inner * TORCH_DTYPES[self.place.name]

    def shape_of(self, total: int) -> tuple[int, ...]:
        """The shape of values with so many cells along the ragged dim."""
        return (*self.shape[: self.ragged_dim - 1], total, *self.shape[self.ragged_dim :])


def leaf_of(node: Node, numbers: Sequence[int]) -> Leaf | None:
    """The leaf that a node is; None of a node of another kind."""
    kind, i = node.kind, node.number
    if kind not in LEAVES:
        return None
    name, ragged_dim = "uint8", 1
    group: int | None = None if kind is Kind.TENSOR else numbers[i + 3]
    shape = tuple(numbers[node.dims : node.end])
    if kind in DOCUMENT_ROWS:
        shape = (numbers[i + 4],)
    elif kind is Kind.JAGGED:
        name, _, ragged_dim = node.fields
    else:
        name = node.fields[0]
    buffer, offset, stored = numbers[i : i + 3]
    cells = math.prod(shape)
    # `stored` is ignored where there are no cells.
    runs = runs_of(kind, stored) if cells else 0
    blobs = kind in DOCUMENT_ROWS and bool(stored & BLOBS) and cells > 0
    place = CellPlace(buffer, offset, stored & ~BLOBS if blobs else stored, cells, name)
    return Leaf(place, shape, ragged_dim, group, runs, blobs)


def cell_range(buffers: Buffers, place: CellPlace, start: int, end: int) -> ByteArray:
    """The bytes of cells `start` to `end` of a place whose bounds were checked; read only."""
    buffer, offset, stored, _, name = place
    if stored == PLAIN or start == end:
        size = TORCH_DTYPES[name]
        return buffers.read(buffer, offset + start * size, (end - start) * size)
    if stored == BITS:
        # Bits are read by the byte, and those before the first cell thrown away.
        first = start // 8
        data = buffers.read(buffer, offset + first, (end + 7) // 8 - first)
        cells = widened(data, stored, name, end - 8 * first)
        return cells[(start - 8 * first) * TORCH_DTYPES[name] :]
    width, _ = STORED_WIDTHS[stored]
    data = buffers.read(buffer, offset + start * width, (end - start) * width)
    return widened(data, stored, name, end - start)
