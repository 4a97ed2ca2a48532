"""`ChosenRows`: rows chosen of a batch, found once for all of its columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jagcodec.memory import INT64_MAX
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.extents import check_extent, total_of
from jagcodec.rows.row_splits import Chosen, RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView

if TYPE_CHECKING:
    import torch


class ChosenRows:
    """Rows chosen of a batch, found once among equal rows for all of its columns."""

    __slots__ = ("_cells", "_found", "at", "index", "pool")

    def __init__(self, index: Chosen) -> None:
        self.index: Chosen = index
        # The same for numpy.
        self.at: Any = slice(index.start, index.stop) if isinstance(index, range) else index
        self.pool: RowSplitsPool = RowSplitsPool()  # for equal rows that were not found here
        # The splits of all rows are kept, so that their id stays theirs.
        self._found: dict[int, tuple[RowSplits, IntArray | int, RowSplits]] = {}
        self._cells: tuple[RowSplits, IntArray | int] | None = None  # if each row is one cell

    def __len__(self) -> int:
        return len(self.index)

    @property
    def rows(self) -> Iterable[int]:
        """The chosen rows, for a loop over them."""
        return self.index if isinstance(self.index, range) else self.index.tolist()

    def among(self, rows: RowSplits) -> tuple[RowSplits, IntArray | int]:
        """The splits of the chosen rows, and the cell where each begins; of a range the first."""
        key = id(rows)
        known = self._found.get(key)
        if known is None:
            # Columns of one batch have the same splits, whichever thread reads them.
            known = self._found.setdefault(key, (*self._rows_of(rows), rows))
        return known[:2]

    def _rows_of(self, rows: RowSplits) -> tuple[RowSplits, IntArray | int]:
        if rows.one_cell_each:
            return self._rows_as_cells()
        index = self.index
        lengths = np.ascontiguousarray(rows.lengths[self.at])
        # Rows may repeat, and cells without bytes cost nothing, so the sum may not fit.
        if len(lengths) * rows.max > INT64_MAX:
            check_extent([total_of(lengths)], 1, "WireBatch.rows(index)")
        splits = self.pool.unique(RowSplits.from_lengths(lengths))
        if isinstance(index, range):
            return splits, rows.starts.item(index.start) if index else 0
        return splits, rows.starts[index]

    def _rows_as_cells(self) -> tuple[RowSplits, IntArray | int]:
        """What `among` gives of rows of one cell each, however many there are."""
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
        return view.pick(self.at, starts, splits)
