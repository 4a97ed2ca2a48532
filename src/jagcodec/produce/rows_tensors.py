"""What `rows` and `given_rows` do with tensors and batches: imported when there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jagcodec.columns.held import DictBatch, Open, column_of, row_count
from jagcodec.columns.tensor_columns import Dense, Jagged, Packed, Payloads, StridedNested
from jagcodec.memory.plain_types import check_plain
from jagcodec.produce.cells_tensors import tensor_of_cells
from jagcodec.produce.tensordicts import leaf_of_column
from jagcodec.rows.nested import is_jagged, parts_of
from jagcodec.rows.non_tensor import is_nested_batch as is_nested_batch
from jagcodec.rows.views import RaggedView
from jagcodec.wire.items import RowCells
from jagcodec.wire.registry import name_for_sending
from jagcodec.wire.torch_dtypes import torch_dtype


def rows_of_column(column: Any, path: str) -> tuple[Any, int | None] | None:
    """The rows of a column, and its ragged dim if it is jagged; None for any other value.

    A batch stays one column, and is returned as a TensorDict.
    """
    if isinstance(column_of(column), (DictBatch, Open, Packed)):
        column = leaf_of_column(column, path)
    if is_nested_batch(column) and row_count(column, path) is not None:
        return column, None
    holder = column_of(column)
    if isinstance(column, torch.Tensor) and not isinstance(holder, Jagged):
        check_plain(column, path)
    if isinstance(holder, (Dense, StridedNested, Jagged)) and column.dim():
        dim = parts_of(column).ragged_dim if isinstance(holder, Jagged) else None
        has_rows = isinstance(holder, Dense) or column.size(0)
        return (list(column.detach().unbind(0)) if has_rows else []), dim
    if isinstance(holder, Payloads) and column.batch_dims:
        return holder.objects(), None
    return None


def check_tensors(rows: Sequence[Any], path: str) -> None:
    """Refuse rows that are tensors whose values cannot be read."""
    tensor_types = {kind for kind in set(map(type, rows)) if issubclass(kind, torch.Tensor)}
    for i, row in enumerate(rows if tensor_types else ()):
        if type(row) in tensor_types and not is_jagged(row) and name_for_sending(type(row)) is None:
            check_plain(row, f"{path}, row {i}")


def view_of_cells(made: RowCells) -> Any:
    """Cells of rows as an entry of `Columns`: a view if they have row splits, else the values."""
    values = tensor_of_cells(made.data, made.dtype)
    if made.splits is None:
        return values
    dtype, shape = torch_dtype(made.dtype), tuple(values.shape)
    return RaggedView(values, dtype, shape, made.ragged_dim, None, made.splits)
