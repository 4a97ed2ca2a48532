"""Columns of every kind: count their rows, put them together, move them.

Leaves of a TensorDict and columns of a `BatchedDataDict` alike. What tensordict can do with them
depends on its release (below 0.15 nothing with jagged leaves), so nothing here asks it to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from jagcodec.batch.compare import same_values
from jagcodec.errors import ArgumentError
from jagcodec.memory.tensor_bytes import as_words, from_words
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import is_non_tensor, leaf_of_rows
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.select import join_leaves, like, not_a_column
from jagcodec.ragged.varlen import PackedColumn, varlen_column, view_of_varlen
from jagcodec.ragged.views import end_to_end


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


def leaf_of_column(column: Any, path: str) -> Any:
    """A column of a dict as a leaf of a TensorDict."""
    if isinstance(column, PackedColumn):
        view = view_of_varlen(column, path)
        return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
    if isinstance(column, list) or (isinstance(column, np.ndarray) and column.dtype == object):
        return leaf_of_rows(list(column))
    if isinstance(column, np.ndarray):
        return torch.as_tensor(column)
    if isinstance(column, dict):
        leaves = {k: leaf_of_column(inner, f"{path}[{k!r}]") for k, inner in column.items()}
        return TensorDict(leaves, batch_size=[row_counts(column, path) or 0])
    return column


# --- moving ------------------------------------------------------------------------------------


def move_leaf(leaf: Any, device: torch.device, non_blocking: bool, pool: RowSplitsPool) -> Any:
    """A column with its tensors on `device`; itself where there is nothing to move."""
    if isinstance(leaf, PackedColumn):
        if leaf.values.device == device:
            return leaf
        view = view_of_varlen(leaf, "to")
        values = leaf.values.to(device, non_blocking=non_blocking)
        row_splits = pool.unique(view.row_splits)
        return varlen_column(end_to_end(values, row_splits, view.ragged_dim), "to")
    if isinstance(leaf, dict):
        moved = {k: move_leaf(v, device, non_blocking, pool) for k, v in leaf.items()}
        return like(leaf, moved, 0)
    if is_jagged(leaf) and leaf.device != device:
        view = view_of(leaf, "to", pool, detach=False)
        values = values_of(view).to(device, non_blocking=non_blocking)
        return nested_tensor(values, pool.unique(view.row_splits), view.ragged_dim)
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=non_blocking)
    return leaf


def without_rest(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage holds nothing else: itself, or a copy if it is a slice.

    Pickle writes whole storages. Tensors with gradients are left alone: only leaves of autograd
    are pickled, and a slice is not one.
    """
    if leaf.requires_grad or (leaf.is_nested and not is_jagged(leaf)):
        return leaf
    if is_jagged(leaf):
        view = view_of(leaf, "pickle")
        values = without_rest(values_of(view)) if view.starts is None else values_of(view)
        if values is view.memory:
            return leaf
        return nested_tensor(values, view.row_splits, view.ragged_dim)
    if leaf.layout is not torch.strided or leaf.untyped_storage().nbytes() <= leaf.nbytes:
        return leaf
    return from_words(as_words(leaf).clone(), leaf.dtype)
