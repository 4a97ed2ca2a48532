"""Indirect columns: a table gives the place of their rows in the message.

Each row is one run of cells or several, one after the other. The table is read as a `RaggedView`,
so that rows which share cells share them until a rectangle or a tensor is made.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_index import joined_ranges
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.checks import expect, fail
from jagcodec.wire.frames import Buffers
from jagcodec.wire.header import Header
from jagcodec.wire.leaf import MOST_RANGES, CellPlace, Leaf, cell_range
from jagcodec.wire.schema import stored_size
from jagcodec.wire.spec import NO_INDEX, PLAIN, RUN_NUMBERS


class Source(Buffers):
    """What this needs of an open message."""

    __slots__ = ("header", "widened")

    header: Header
    widened: dict[CellPlace, ByteArray]  # cells that were stored narrow, as wide as their dtype

    def row_splits(self, group: int) -> RowSplits:
        """The rows of a ragged group."""
        raise NotImplementedError


class RunNumbers(NamedTuple):
    """The numbers of a run, in the order of `RUN_NUMBERS`."""

    group: int
    buffer: int
    offset: int
    stored: int
    cells: int
    index_buffer: int
    index_offset: int
    index_stored: int


def runs_at(source: Source, leaf: Leaf) -> list[RunNumbers]:
    """The table at the place of an indirect column."""
    size = 8 * len(RUN_NUMBERS) * leaf.runs
    # A copy: what was checked must not change with the message's memory.
    data = source.read(leaf.place.buffer, leaf.place.offset, size).tobytes()
    numbers = np.frombuffer(data, dtype=np.int64).reshape(leaf.runs, len(RUN_NUMBERS))
    return [RunNumbers(*run) for run in numbers.tolist()]


def view_of_runs(
    source: Source, leaf: Leaf, rows: RowSplits, picked: tuple[IntArray, RowSplits] | None = None
) -> RaggedView:
    """The rows of an indirect column in place.

    Of rows that are `picked`, given with their own splits, only the cells are read.
    """
    chosen, splits = (slice(None), rows) if picked is None else picked
    cell, inner = leaf.cell_bytes, leaf.shape[1:]
    runs = runs_at(source, leaf)
    memories: list[ByteArray] = []
    starts = np.empty((splits.rows, len(runs)), dtype=np.int64)
    lengths = np.empty_like(starts)
    left = rows.lengths
    for k, run in enumerate(runs):
        own = rows if leaf.group is None else _rows_of(source, leaf, run)
        if own.rows != rows.rows or (own.lengths > left).any():
            raise _other_rows(run)
        left = left - own.lengths
        lengths[:, k] = own.lengths[chosen]
        begins = _starts(source, leaf, run, own)
        place = _place(source, run[1:4], run.cells * leaf.inner, leaf.place.name)
        if isinstance(chosen, slice):
            memory, starts[:, k] = _read(source, place), begins
        else:
            memory, starts[:, k] = _ranges(source, place, begins[chosen], lengths[:, k], run.cells)
        memories.append(memory)
    if left.any():
        raise _other_rows(runs[-1])
    if len(runs) == 1:
        shape = (len(memories[0]) // cell, *inner)
        return RaggedView(memories[0], leaf.dtype, shape, 1, starts[:, 0].copy(), splits)
    starts *= cell
    starts += np.cumsum([0, *map(len, memories[:-1])])
    shape = (splits.total, *inner)
    return RaggedView(tuple(memories), leaf.dtype, shape, 1, starts, splits, lengths)


def _rows_of(source: Source, leaf: Leaf, run: RunNumbers) -> RowSplits:
    """The rows of a run of a column that has a group."""
    if leaf.runs == 1 and run.group != leaf.group:
        raise _other_rows(run)
    groups = len(source.header.groups)
    expect(0 <= run.group < groups, "bad_record", f"a ragged group below {groups}", run.group)
    return source.row_splits(run.group)


def _other_rows(run: RunNumbers) -> WireFormatError:
    text = f"expected runs of the column's rows, found others in ragged group {run.group}"
    return fail("bad_offsets", text)


def _starts(source: Source, leaf: Leaf, run: RunNumbers, splits: RowSplits) -> IntArray:
    """At which of its cells each row of a run begins."""
    most = splits.total
    expect(0 <= run.cells <= most, "out_of_bounds", f"at most {most} cells", run.cells)
    if run.index_buffer == NO_INDEX:
        expect(leaf.group is not None, "bad_record", "an index for each row of a tensor", "none")
        starts = np.zeros(splits.rows, dtype=np.int64)
    else:
        place = _place(source, run[5:8], splits.rows, "int64")
        # A copy: what was checked must not change with the message's memory.
        data = cell_range(source, place, 0, splits.rows).tobytes()
        starts = np.frombuffer(data, dtype=np.int64)
    inside = (starts >= 0) & (starts <= run.cells - splits.lengths)
    if not inside.all():
        row = int(np.argmin(inside))
        expected = f"expected row {row} of {splits.lengths[row]} within {run.cells} cells"
        raise fail("out_of_bounds", f"{expected}, found it at {starts[row]}")
    return starts


def _place(source: Source, place: tuple[int, ...], cells: int, name: str) -> CellPlace:
    """A place of some cells that a table names, which is in the payload."""
    buffer, offset, stored = place
    sizes = source.header.sizes
    size = stored_size(name, stored, cells)
    inside = 0 <= buffer < len(sizes) and 0 <= offset <= sizes[buffer] - size
    if cells and not inside:
        found = f"found buffer {brief(buffer)}, offset {brief(offset)}"
        expected = f"expected {size} bytes of a run in the payload"
        raise fail("out_of_bounds", f"{expected}, {found}")
    return CellPlace(buffer, offset, stored, cells, name)


def _read(source: Source, place: CellPlace) -> ByteArray:
    """All cells of a place, made as wide as their dtype only once."""
    known = source.widened.get(place)
    if known is None:
        known = cell_range(source, place, 0, place.cells)
        if place.cells and place.stored != PLAIN:
            source.widened[place] = known
    return known


def _ranges(
    source: Source, place: CellPlace, starts: IntArray, lengths: IntArray, cells: int
) -> tuple[ByteArray, IntArray]:
    """The cells of some rows alone, and where each begins among these."""
    held = np.flatnonzero(lengths)
    if not len(held):
        return np.empty(0, dtype=np.uint8), np.zeros_like(starts)
    begins = starts[held]
    firsts, lasts, moves = joined_ranges(begins, begins + lengths[held])
    if len(firsts) > MOST_RANGES:
        return _read(source, place), starts
    each = place.cells // cells
    bounds = zip(firsts.tolist(), lasts.tolist(), strict=True)
    data = [cell_range(source, place, each * a, each * b) for a, b in bounds]
    moved = np.zeros_like(starts)
    moved[held] = begins + moves
    return np.concatenate(data), moved
