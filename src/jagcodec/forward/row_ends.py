"""The last cells of each row of the ragged columns of a batch."""

from __future__ import annotations

from typing import Any

from jagcodec.columns.batch import with_closed
from jagcodec.columns.held import DictBatch, Open, column_of, with_columns
from jagcodec.columns.memory import MemorySource
from jagcodec.columns.tensor_columns import TensorColumn, TensorDictBatch
from jagcodec.memory.arrays import IntArray
from jagcodec.rows.lengths import check_row_ends
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.wire.read.wire_batch import WireBatch


def last_cells(restored: Any, last: IntArray, where: str) -> Any:
    """The last cells of each row of a column, or of the ragged columns of a batch."""
    return _Trimmer(RowSplits.from_lengths(last)).of(restored, where)


class _Trimmer:
    """Takes the wanted cells from the end of each row; the columns of a batch share the offsets."""

    def __init__(self, last: RowSplits) -> None:
        self._last = last
        self._pool = RowSplitsPool()

    def of(self, column: Any, path: str) -> Any:
        """The last cells of rows of a jagged or packed column; any other column unchanged."""
        holder = column_of(column)
        if isinstance(holder, (DictBatch, TensorDictBatch, Open)):
            names = [*column.keys()]
            columns = {name: self.of(column[name], f"{path}[{name!r}]") for name in names}
            if isinstance(holder, Open):
                sizes, columns = [*column.batch_size], with_closed(columns)
                return WireBatch(MemorySource(columns, sizes, column.meta))
            return with_columns(column, columns, self._last.rows)
        if isinstance(holder, TensorColumn) and column.dim() < 2:  # rows without cells
            return column
        whole = holder.view_or_copy(path, self._pool)
        if whole is None:
            return column
        lengths, last = whole.row_splits.lengths, self._last.lengths
        check_row_ends(last, lengths, path)
        ends = whole.at_starts(whole.row_starts() + lengths - last, self._last)
        return holder.from_view(ends, path)
