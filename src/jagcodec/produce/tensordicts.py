"""Columns in the form that a TensorDict holds: one leaf, or the TensorDict of a batch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from jagcodec.columns.batch import Columns, closed
from jagcodec.columns.held import Array, as_leaf, column_of, row_count
from jagcodec.columns.tensor_columns import Dense, Sparse
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.rows.copy_rows import gathered, values_of
from jagcodec.rows.nested import nested_tensor
from jagcodec.rows.non_tensor import (
    batch_of,
    is_nested_batch,
)
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.views import RaggedView


def leaf_of_column(column: Any, path: str) -> Any:
    """One column of a dict, in the form that a TensorDict holds. An open batch is read."""
    column = closed(column)
    return as_leaf(column, row_count(column, path) or 0, path)


def tensordict_of(columns: Columns, where: str) -> TensorDict:
    """The TensorDict of checked columns. Rows that are not end to end are copied into one block."""
    pool = RowSplitsPool()
    leaves = dict(columns.columns)
    holders = {name: column_of(leaf) for name, leaf in leaves.items()}
    views: dict[str, RaggedView] = {}
    for name, column in holders.items():
        view = column.view(f"{where}({name!r})", pool, detach=True)
        if view is not None:
            views[name] = view
    scattered = [name for name, view in views.items() if not view.is_end_to_end]
    copied = dict(zip(scattered, gathered(views[name] for name in scattered), strict=True))
    for name, column in holders.items():
        if name in views:
            view = views[name]
            values = copied[name] if name in copied else values_of(view)
            leaves[name] = nested_tensor(values, pool.unique(view.row_splits), view.ragged_dim)
        elif isinstance(column, (Array, Dense, Sparse)):
            leaves[name] = contiguous_bits(torch.as_tensor(leaves[name]))
        else:
            leaves[name] = column.leaf(columns.rows, where)
    if any(map(is_nested_batch, leaves.values())):
        return TensorDict(leaves, batch_size=[columns.rows])
    return batch_of(leaves, columns.rows)
