"""`to_rows` as tensors, and the rows of columns that only torch can take apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch

from jagcodec.columns.held import Array, DictBatch, HeldColumn, ViewColumn, column_of
from jagcodec.columns.tensor_columns import (
    Dense,
    Jagged,
    Sparse,
    StridedNested,
    TensorClass,
    Unbatched,
)
from jagcodec.errors import ArgumentTypeError
from jagcodec.memory.extents import check_extent
from jagcodec.memory.plain_types import check_memory
from jagcodec.memory.tensor_bytes import array_tensor, lacks_kernel
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.non_tensor import fields_of, unbatched_parts
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.train.to_rows import rows_of_each
from jagcodec.wire.read.any_batch import columns_with_views, row_count_of


def rows_of_tensors(source: Any, rows: int, where: str) -> list[dict[str, Any]]:
    """The rows of an open batch; rows of tensors and of arrays of numbers are tensors."""
    return _RowMaker().samples(columns_with_views(source, where, kept=True), rows, where)


class _RowMaker:
    """Makes the rows of one batch, and of batches inside it."""

    def __init__(self) -> None:
        # Row lengths as lists, which torch needs, by the row splits.
        self._lengths: dict[RowSplits, list[int]] = {}

    def samples(self, columns: dict[str, Any], rows: int, path: str) -> list[dict[str, Any]]:
        """One dict per row."""
        if not columns:
            return [{} for _ in range(rows)]
        each = [
            self._rows_of_column(column, rows, f"{path}[{name!r}]")
            for name, column in columns.items()
        ]
        return rows_of_each(columns, each)

    def _rows_of_column(self, column: Any, rows: int, path: str) -> list[Any]:
        holder = column_of(column)
        if isinstance(holder, DictBatch):
            return self.samples(column, rows, path)
        if isinstance(holder, Unbatched):
            return [unbatched_parts(column)[1]] * rows
        return _ROWS_OF[type(holder)](self, column, path)

    def _rows_of_tensorclass(self, column: Any, path: str) -> list[Any]:
        fields, others = fields_of(column)
        columns = columns_with_views(fields, path, kept=True)
        inner = self.samples(columns, row_count_of(fields, path), path)
        return [{**row, **others} for row in inner]

    def _rows_of_view(self, view: RaggedView, path: str) -> list[Any]:
        row_splits, dim = view.row_splits, view.ragged_dim - 1
        if not row_splits.rows:
            return []
        values = values_of(view)
        check_extent(values.shape, values.itemsize, path)
        if row_splits not in self._lengths:
            self._lengths[row_splits] = row_splits.lengths.tolist()
        return list(torch.split_with_sizes(values, self._lengths[row_splits], dim))

    def _rows_of_tensor(self, column: torch.Tensor, path: str) -> list[Any]:
        if column.layout is torch.strided and not column.is_nested:
            check_extent(column.shape, column.itemsize, path)
        if column.layout in (torch.strided, torch.sparse_coo):
            return _unbound(column, path)
        raise _has_no_rows(column, path, "tensor")

    def _rows_of_array(self, column: npt.NDArray[Any], path: str) -> list[Any]:
        if column.dtype.kind not in "biufc":
            return list(column)  # such as strings, of which torch has no tensors
        try:
            return list(array_tensor(column).unbind())
        except TypeError as error:  # such as for a long double
            detail = f"expected a dtype that torch has, found {column.dtype}"
            raise ArgumentTypeError("bad_dtype", path, detail) from error


_ROWS_OF: dict[type[HeldColumn], Callable[[_RowMaker, Any, str], list[Any]]] = {
    **dict.fromkeys((Dense, Sparse, StridedNested, Jagged), _RowMaker._rows_of_tensor),
    ViewColumn: _RowMaker._rows_of_view,
    Array: _RowMaker._rows_of_array,
    TensorClass: _RowMaker._rows_of_tensorclass,
}
"""The rows of each kind of column that `columns_with_views` returns."""


def _unbound(column: torch.Tensor, path: str) -> list[torch.Tensor]:
    """The rows of a tensor, as views of it."""
    check_memory(column, path)
    try:
        return list(column.unbind(0))  # a MemoryMappedTensor requires the dim
    except RuntimeError as error:  # torch cannot unbind sparse tensors of most dtypes
        if not lacks_kernel(error):
            raise
        detail = f"expected rows that torch can take apart, found {column.dtype}"
        remedy = f"; convert the column, or call .to_dense(), of a {column.layout}"
        raise ArgumentTypeError("bad_dtype", path, detail + remedy) from error


def _has_no_rows(column: Any, path: str, form: str = "list") -> ArgumentTypeError:
    layout = getattr(column, "layout", type(column).__name__)
    remedy = "use as_='tensor'" if layout is torch.sparse_coo else "leave it out"
    detail = f"expected a column that has rows as_={form!r}, found a {layout}; {remedy}"
    return ArgumentTypeError("bad_type", path, detail)


# --- as arrays and lists -----------------------------------------------------------------------


def rows_of_others(
    column: Any, rows: int, path: str, of_view: Callable[[Any, str], Any]
) -> list[Any]:
    """The rows of a column without cells on the host; `of_view` makes the row of one tensor."""
    holder = column_of(column)
    if isinstance(holder, Unbatched):
        return [of_view(_cells_of(unbatched_parts(column)[1], path), path)] * rows
    if isinstance(holder, StridedNested):
        return [of_view(_cells_of(row, path), path) for row in column.unbind()]
    raise _has_no_rows(column, path)


def _cells_of(tensor: torch.Tensor, path: str) -> Any:
    """A tensor as the one row of a rectangle."""
    return column_of(tensor.unsqueeze(0)).on_host(path)
