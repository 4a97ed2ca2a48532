"""`ChosenRows`: rows chosen of a batch, found once for all of its columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import FOREIGN_ERRORS, host_array
from jagcodec.errors import ArgumentIndexError, ArgumentTypeError, brief
from jagcodec.memory import INT64_MAX
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.extents import check_extent, total_of
from jagcodec.rows.row_splits import Chosen, RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView

if TYPE_CHECKING:
    import torch

CHOSEN = "WireBatch.rows(index)"
"""The place of errors about chosen rows, which are found when their columns are read."""


class ChosenRows:
    """Rows chosen of a batch, found once among equal rows for all of its columns."""

    __slots__ = ("_by_rows", "_cells", "at", "index", "pool")

    def __init__(self, index: Chosen) -> None:
        self.index: Chosen = index
        # What numpy indexes with for these rows.
        self.at: Any = slice(index.start, index.stop) if isinstance(index, range) else index
        self.pool: RowSplitsPool = RowSplitsPool()  # one `RowSplits` for equal chosen rows
        # The splits of all rows are kept, so that their id stays theirs.
        self._by_rows: dict[int, tuple[RowSplits, IntArray | int, RowSplits]] = {}
        self._cells: tuple[RowSplits, IntArray | int] | None = None  # if each row is one cell

    def __len__(self) -> int:
        return len(self.index)

    @property
    def rows(self) -> Iterable[int]:
        """The chosen rows, for a loop over them."""
        return self.index if isinstance(self.index, range) else self.index.tolist()

    def among(self, rows: RowSplits) -> tuple[RowSplits, IntArray | int]:
        """The splits of the chosen rows, and the cell where each begins; of a range, the first."""
        key = id(rows)
        entry = self._by_rows.get(key)
        if entry is None:
            # Columns of one batch have the same splits, whichever thread reads them.
            entry = self._by_rows.setdefault(key, (*self._rows_of(rows), rows))
        return entry[:2]

    def _rows_of(self, rows: RowSplits) -> tuple[RowSplits, IntArray | int]:
        if rows.one_cell_each:
            return self._rows_as_cells()
        index = self.index
        lengths = np.ascontiguousarray(rows.lengths[self.at])
        # Rows may repeat, and cells without bytes cost nothing, so the sum may not fit.
        if len(lengths) * rows.max > INT64_MAX:
            check_extent([total_of(lengths)], 1, CHOSEN)
        splits = self.pool.unique(RowSplits.from_lengths(lengths))
        if isinstance(index, range):
            return splits, rows.starts.item(index.start) if index else 0
        return splits, rows.starts[index]

    def _rows_as_cells(self) -> tuple[RowSplits, IntArray | int]:
        """What `among` returns if each row is one cell."""
        if self._cells is None:
            index = self.index
            starts = index.start if isinstance(index, range) else index
            self._cells = RowSplits.of_cells(len(index)), starts
        return self._cells

    def of_array(self, array: npt.NDArray[Any], dtype: torch.dtype) -> RaggedView:
        """The chosen rows of an array in place, each as one cell; they are not a range."""
        splits, starts = self._rows_as_cells()
        return RaggedView(array, dtype, array.shape, 1, starts, splits)

    def of_view(self, view: RaggedView) -> RaggedView:
        """The chosen rows of a column in place; a range of rows that are end to end stays so."""
        splits, starts = self.among(view.row_splits)
        return view.choose_at(self.at, starts, splits)


def choose_rows(index: Any, rows: int, where: str) -> Chosen:
    """The rows that an index chooses, as numbers from 0 to ``rows - 1``."""
    if isinstance(index, range) and index.step == 1 and 0 <= index.start <= index.stop <= rows:
        return index
    if isinstance(index, slice):
        try:
            chosen = range(rows)[index]
        except FOREIGN_ERRORS as error:
            detail = f"expected a slice of integers, its step not 0, found {_slice_text(index)}"
            raise ArgumentTypeError("bad_type", where, detail) from error
        if chosen.step == 1:
            return range(chosen.start, max(chosen.start, chosen.stop))
        picked: IntArray = np.arange(rows)[index].copy()
        return picked
    array = host_array(index, where, f"a slice, integers, or {rows} booleans")
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.dtype == bool and array.shape == (rows,):
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu" or array.ndim > 1:
        detail = (
            f"expected a slice, integers, or {rows} booleans, "
            f"found {array.dtype} of shape {array.shape}"
        )
        raise ArgumentTypeError("bad_type", where, detail)
    if array.dtype == np.uint64:  # only uint64 has values that int64 lacks
        array = np.minimum(array, np.iinfo(np.int64).max)
    array = np.atleast_1d(array).astype(np.int64)
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low < -rows or high >= rows > 0 or (not rows and len(array)):
        wrong = array[(array < -rows) | (array >= rows)]
        expected = f"rows of 0 to {rows - 1}" if rows else "no rows of a batch without rows"
        detail = f"expected {expected}, found {wrong[0]}"
        raise ArgumentIndexError("no_such_row", where, detail)
    return np.where(array < 0, array + rows, array) if low < 0 else array


def _slice_text(index: slice) -> str:
    return ":".join(map(brief, (index.start, index.stop, index.step)))


def joined_ranges(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Ranges that meet become one.

    Returns where they begin and end, and for each input how far it moves if the joined ranges are
    put end to end.
    """
    order = np.argsort(starts, kind="stable")
    begins, reach = starts[order], np.maximum.accumulate(ends[order])
    begins_new = np.append(True, begins[1:] > reach[:-1])
    firsts, lasts = begins[begins_new], reach[np.append(begins_new[1:], True)]
    sizes = lasts - firsts
    moves = sizes.cumsum() - sizes - firsts
    return firsts, lasts, moves[np.searchsorted(firsts, starts, side="right") - 1]


def joined_rows(rows: Chosen) -> list[range]:
    """Chosen rows as ranges; neighbouring rows share one."""
    if isinstance(rows, range):
        return [rows]
    parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
