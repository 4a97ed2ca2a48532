"""The last cells of each row of the ragged columns of a batch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from jagcodec.packing.lengths import IntArray
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.forms import like
from jagcodec.ragged.nested import check_column, is_jagged, nested_tensor, view_of, view_of_strided
from jagcodec.ragged.non_tensor import is_non_tensor
from jagcodec.ragged.packer import check_last
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, varlen_column, view_of_varlen
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire.lowered import with_closed
from jagcodec.wire.wire_batch import MemoryColumns, WireBatch


def last_cells(restored: Any, last: IntArray, where: str) -> Any:
    """The last cells of each row of a column, or of the ragged columns of a batch."""
    return _Trimmer(RowSplits.from_lengths(last)).of(restored, where)


class _Trimmer:
    """Takes so many cells from the end of each row; the columns of a batch share the offsets."""

    def __init__(self, wanted: RowSplits) -> None:
        self._wanted = wanted
        self._pool = RowSplitsPool()

    def of(self, column: Any, path: str) -> Any:
        """The last cells of rows of a jagged or packed column; any other column unchanged."""
        if is_non_tensor(column):
            return column
        if isinstance(column, (dict, TensorDictBase, WireBatch)):
            names = [*column.keys()]
            columns = {name: self.of(column[name], f"{path}[{name!r}]") for name in names}
            if isinstance(column, WireBatch):
                sizes, columns = [*column.batch_size], with_closed(columns)
                return WireBatch(MemoryColumns(columns, sizes, column.meta))
            return like(column, columns, self._wanted.rows)
        if isinstance(column, PackedColumn):
            view = self._trimmed(view_of_varlen(column, path, self._pool), path)
            return varlen_column(view, path)
        if not (isinstance(column, torch.Tensor) and column.is_nested and column.dim() > 1):
            return column
        check_column(column, path)
        if is_jagged(column):
            whole = view_of(column, path, self._pool, detach=False)
        else:
            whole = view_of_strided(column, path)
        view = self._trimmed(whole, path)
        return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)

    def _trimmed(self, view: RaggedView, path: str) -> RaggedView:
        found, wanted = view.row_splits.lengths, self._wanted.lengths
        check_last(wanted, found, path)
        ends = view.moved(view.row_starts() + found - wanted, self._wanted)
        return end_to_end(values_of(ends), self._wanted, view.ragged_dim)
