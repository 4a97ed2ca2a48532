"""The rows of columns of every kind: counted, and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from jagcodec.batch.compare import same_values
from jagcodec.errors import ArgumentError
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import is_non_tensor
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.select import join_leaves, not_a_column
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen


def row_count(column: Any, path: str) -> int | None:
    """N, for any column; None for a dict without columns, which has any number of rows."""
    if isinstance(column, torch.Tensor):
        if column.is_nested or column.dim():
            return int(column.size(0))
    elif isinstance(column, PackedColumn):
        return len(column.cu_seqlens) - 1
    elif isinstance(column, TensorDictBase) or is_non_tensor(column):
        if len(column.batch_size):
            return int(column.batch_size[0])
    elif isinstance(column, np.ndarray):
        if column.ndim:
            return len(column)
    elif isinstance(column, list):
        return len(column)
    elif isinstance(column, dict):
        return row_counts(column, path)
    raise not_a_column(column, path)


def row_counts(columns: Mapping[str, Any], path: str) -> int | None:
    """N of a dict of columns, which must all have as many rows; None if it is empty."""
    rows: int | None = None
    for name, column in columns.items():
        found = row_count(column, f"{path}[{name!r}]")
        rows = found if rows is None else rows
        if found not in (None, rows):
            detail = f"expected {rows} rows like the columns before it, found {found}"
            raise ArgumentError("row_mismatch", f"{path}[{name!r}]", detail)
    return rows


def lengths_of_columns(columns: Any, path: str) -> dict[str, Any]:
    """(N,) row lengths of the jagged and packed ones among columns."""
    pool, found = RowSplitsPool(), {}
    for name, column in columns.items():
        if isinstance(column, PackedColumn):
            found[name] = view_of_varlen(column, f"{path}[{name!r}]").row_splits.lengths
        elif is_jagged(column):
            found[name] = view_of(column, f"{path}[{name!r}]", pool).row_splits.lengths
    return found


def concat_leaves(
    leaves: Sequence[Any], pool: RowSplitsPool, path: str, chosen: Chosen | None = None
) -> Any:
    """`join_leaves`; what belongs to whole batches is the same if it is bit for bit."""
    return join_leaves(leaves, chosen, pool, path, same_values)
