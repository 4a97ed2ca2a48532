"""`ChosenRows`: rows chosen of a batch, found once for all of its columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from jagcodec.memory import INT64_MAX
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.extents import check_extent, total_of
from jagcodec.ragged.row_splits import Chosen, RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView


class ChosenRows:
    """Rows chosen of a batch, found once among equal rows for all of its columns."""

    __slots__ = ("_found", "at", "index", "pool")

    def __init__(self, index: Chosen) -> None:
        self.index: Chosen = index
        # The same for numpy.
        self.at: Any = slice(index.start, index.stop) if isinstance(index, range) else index
        self.pool: RowSplitsPool = RowSplitsPool()  # for equal rows that were not found here
        # The splits of all rows are kept, so that their id stays theirs.
        self._found: dict[int, tuple[RowSplits, IntArray, RowSplits]] = {}

    def __len__(self) -> int:
        return len(self.index)

    def among(self, rows: RowSplits) -> tuple[RowSplits, IntArray]:
        """The splits of the chosen rows, and the cell where each begins."""
        key = id(rows)
        known = self._found.get(key)
        if known is None:
            # Columns of one batch have the same splits, whichever thread reads them.
            known = self._found.setdefault(key, (*self._rows_of(rows), rows))
        return known[:2]

    def _rows_of(self, rows: RowSplits) -> tuple[RowSplits, IntArray]:
        if rows.one_cell_each:
            starts = np.asarray(self.index, dtype=np.int64)
            return RowSplits.of_cells(len(starts)), starts
        at = self.at
        lengths = np.ascontiguousarray(rows.lengths[at])
        # Rows may repeat, and cells without bytes cost nothing, so the sum may not fit.
        if len(lengths) * rows.max > INT64_MAX:
            check_extent([total_of(lengths)], 1, "WireBatch.rows(index)")
        return self.pool.unique(RowSplits.from_lengths(lengths)), rows.starts[at]

    def of_view(self, view: RaggedView) -> RaggedView:
        """The chosen rows of a column in place; a range of rows that are end to end stays so."""
        splits, starts = self.among(view.row_splits)
        return view.pick(self.at, starts, splits)
