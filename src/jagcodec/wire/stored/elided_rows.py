"""Reads elided columns: rows whose cells are in runs that rows share.

`Message` calls this module for the few columns that are elided, and knows only whether they are.
The storage code of an elided column is above `INDIRECT`: it has a table of runs at the place of its
cells.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from jagcodec.memory.arrays import ByteArray, IntArray
from jagcodec.rows.chosen_rows import ChosenRows, joined_ranges
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView, in_buffers
from jagcodec.wire import spec
from jagcodec.wire.checks import expect, fail
from jagcodec.wire.frames import NO_BYTES
from jagcodec.wire.header import Header
from jagcodec.wire.leaf import CellPlace, Leaf
from jagcodec.wire.schema import size_at_code

MOST_RANGES = 4096
"""The most ranges of one column that are fetched one by one; for more, it is read whole."""


class CellReader(Protocol):
    """What runs are read from: a `Message`."""

    header: Header

    def int64s_at(self, buffer: int, offset: int, count: int) -> IntArray: ...

    def row_splits(self, group: int) -> RowSplits: ...

    def elements(self, place: CellPlace, start: int, end: int) -> ByteArray: ...

    def all_elements(self, place: CellPlace) -> ByteArray: ...


class RunNumbers(NamedTuple):
    """The numbers of a run, in the order of `RUN_NUMBERS`."""

    group: int
    buffer: int
    offset: int
    storage_code: int
    cells: int
    index_buffer: int
    index_offset: int
    index_storage_code: int


def runs_at(message: CellReader, leaf: Leaf) -> list[RunNumbers]:
    """The table of runs, which an elided column has at the place of its cells."""
    width = len(spec.RUN_NUMBERS)
    numbers = message.int64s_at(leaf.place.buffer, leaf.place.offset, width * leaf.runs)
    return [RunNumbers(*run) for run in numbers.reshape(leaf.runs, width).tolist()]


def rows_in_runs(
    message: CellReader, leaf: Leaf, rows: RowSplits, chosen: ChosenRows | None
) -> RaggedView:
    """A view of the rows of an elided column, which share cells in memory.

    With `chosen`, it reads only the cells of these rows.
    """
    at, splits = (slice(None), rows) if chosen is None else (chosen.at, chosen.among(rows)[0])
    cell_bytes, cell_shape = leaf.cell_bytes, leaf.shape[1:]
    runs = runs_at(message, leaf)
    memories: list[ByteArray] = []
    # (N, runs): the cell in each memory at which each row begins, and how many cells it has there.
    firsts = np.empty((splits.rows, len(runs)), dtype=np.int64)
    lengths = np.empty_like(firsts)
    unclaimed = rows.lengths  # cells of each row that no run has had so far
    for k, run in enumerate(runs):
        run_rows = rows if leaf.group is None else _rows_of_run(message, leaf, run)
        fits = run_rows.rows == rows.rows and not (run_rows.lengths > unclaimed).any()
        expect(fits, "bad_offsets", _EXPECTED_RUNS, run.group)
        unclaimed = unclaimed - run_rows.lengths
        lengths[:, k] = run_rows.lengths[at]
        starts = _starts(message, leaf, run, run_rows)
        elements, name = run.cells * leaf.elements_per_cell, leaf.place.dtype_name
        place = CellPlace(run.buffer, run.offset, run.storage_code, elements, name)
        _check_place(message, place)
        if chosen is None:
            memory, firsts[:, k] = message.all_elements(place), starts
        else:
            memory, firsts[:, k] = _fetched(message, place, starts[at], lengths[:, k], run.cells)
        memories.append(memory)
    expect(not unclaimed.any(), "bad_offsets", _EXPECTED_RUNS, runs[-1].group)
    if len(runs) == 1:
        shape = (len(memories[0]) // cell_bytes, *cell_shape)
        return RaggedView(memories[0], leaf.dtype, shape, 1, firsts[:, 0].copy(), splits)
    # `in_buffers` counts starts in bytes, as if all buffers were end to end.
    firsts *= cell_bytes
    firsts += np.cumsum([0, *map(len, memories[:-1])])
    return in_buffers(memories, leaf.dtype, cell_shape, firsts, splits, lengths)


def _rows_of_run(message: CellReader, leaf: Leaf, run: RunNumbers) -> RowSplits:
    """The rows of a run, if its column has a ragged group."""
    expect(leaf.runs > 1 or run.group == leaf.group, "bad_offsets", _EXPECTED_RUNS, run.group)
    groups = len(message.header.groups)
    expect(0 <= run.group < groups, "bad_record", f"a ragged group below {groups}", run.group)
    return message.row_splits(run.group)


_EXPECTED_RUNS = "runs of the column's rows, in their ragged group"


def _starts(message: CellReader, leaf: Leaf, run: RunNumbers, splits: RowSplits) -> IntArray:
    """The cell of the run at which each row begins; checked to be within the run."""
    most = splits.total
    expect(0 <= run.cells <= most, "out_of_bounds", f"at most {most} cells", run.cells)
    if run.index_buffer == spec.NO_INDEX:
        expect(leaf.group is not None, "bad_record", "an index for each row of a tensor", "none")
        starts = np.zeros(splits.rows, dtype=np.int64)
    else:
        index = run.index_buffer, run.index_offset, run.index_storage_code
        place = CellPlace(*index, splits.rows, "int64")
        _check_place(message, place)
        # A copy: what was checked must not change with the message's memory.
        data = message.elements(place, 0, splits.rows).tobytes()
        starts = np.frombuffer(data, dtype=np.int64)
    is_inside = (starts >= 0) & (starts <= run.cells - splits.lengths)
    if not is_inside.all():
        row = int(np.argmin(is_inside))
        detail = (
            f"expected row {row}, of {splits.lengths[row]} cells, within {run.cells} of its run, "
            f"found it at cell {starts[row]}"
        )
        raise fail("out_of_bounds", detail)
    return starts


def _check_place(message: CellReader, place: CellPlace) -> None:
    """Refuse a place that a table of runs names, if it is not within the payload."""
    sizes = message.header.sizes
    size = size_at_code(place.dtype_name, place.storage_code, place.elements)
    is_inside = 0 <= place.buffer < len(sizes) and 0 <= place.offset <= sizes[place.buffer] - size
    expected = f"a buffer and an offset with {size} bytes of a run"
    found = [place.buffer, place.offset]
    expect(is_inside or not place.elements, "out_of_bounds", expected, found)


def _fetched(
    message: CellReader, place: CellPlace, starts: IntArray, lengths: IntArray, cells: int
) -> tuple[ByteArray, IntArray]:
    """Read the cells of these rows in ranges; returns them, and where each row begins in them.

    `cells` is how many cells the whole place has.
    """
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return NO_BYTES, np.zeros_like(starts)
    begins = starts[filled]
    firsts, lasts, moves = joined_ranges(begins, begins + lengths[filled])
    if len(firsts) > MOST_RANGES:
        return message.all_elements(place), starts
    per_cell = place.elements // cells
    bounds = zip(firsts.tolist(), lasts.tolist(), strict=True)
    data = [message.elements(place, per_cell * a, per_cell * b) for a, b in bounds]
    moved = np.zeros_like(starts)
    moved[filled] = begins + moves
    return np.concatenate(data), moved
