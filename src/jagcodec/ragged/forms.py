"""Columns in other forms of the same rows: as leaves of a TensorDict, or like other columns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensorclass

from jagcodec.errors import ArgumentTypeError
from jagcodec.memory.tensor_bytes import resolved
from jagcodec.ragged.copy_rows import owned_values
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import (
    array_of_leaf,
    batch_of,
    is_non_tensor,
    is_numeric,
    leaf_of_array,
    leaf_of_rows,
    object_array,
    rows_of_leaf,
)
from jagcodec.ragged.varlen import PackedColumn, varlen_column, view_of_varlen
from jagcodec.ragged.views import RaggedView


def as_leaf(column: Any, rows: int, path: str) -> Any:
    """A column of a dict, or a `RaggedView`, as a TensorDict of these rows would hold it."""
    if isinstance(column, PackedColumn):
        column = view_of_varlen(column, path)
    if isinstance(column, RaggedView):
        return nested_tensor(owned_values(column), column.row_splits, column.ragged_dim)
    if isinstance(column, list):
        return leaf_of_rows(column)
    if isinstance(column, np.ndarray):
        try:
            return leaf_of_array(column)
        except TypeError as error:  # torch lacks a dtype of numbers
            detail = f"expected a dtype that torch has, found {column.dtype}; convert it by .astype"
            raise ArgumentTypeError("bad_dtype", path, detail) from error
    if isinstance(column, dict):
        names = column.items()
        leaves = {name: as_leaf(inner, rows, f"{path}[{name!r}]") for name, inner in names}
        return TensorDict(leaves, batch_size=[rows])
    return column


def like_column(column: Any, model: Any, path: str) -> Any:
    """A column in the form of another; None if that form does not hold such rows.

    Nothing is converted: numbers of an array are those of a tensor, objects are objects in a list,
    an array or a leaf, and the rows of a packed column are those of a jagged one.
    """
    if is_non_tensor(model):
        return _like_objects(column, model)
    if isinstance(model, list):
        return _rows_as_list(column)
    if isinstance(model, np.ndarray):
        return _like_array(column, model)
    if isinstance(model, PackedColumn):
        jagged = is_jagged(column)
        return varlen_column(view_of(column, path, detach=False), path) if jagged else None
    if isinstance(model, torch.Tensor):
        packed = isinstance(column, PackedColumn)
        numbers = isinstance(column, np.ndarray) and is_numeric(column)
        return as_leaf(column, 0, path) if packed or numbers else None
    batches = (dict, TensorDictBase)
    are_batches = isinstance(model, batches) and isinstance(column, batches)
    return column if are_batches and not is_non_tensor(column) else None


def _rows_as_list(column: Any) -> list[Any] | None:
    if is_non_tensor(column):
        return rows_of_leaf(column, column.batch_size[0])
    objects = isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1
    return list(column) if objects else None


def _like_objects(column: Any, model: Any) -> Any:
    if isinstance(column, list):
        return leaf_of_rows(column)
    if not isinstance(column, np.ndarray) or is_numeric(column):
        return None
    kept = array_of_leaf(model) is not None
    return NonTensorData(column, batch_size=[len(column)]) if kept else leaf_of_array(column)


def _like_array(column: Any, model: Any) -> Any:
    if isinstance(column, torch.Tensor):
        plain = column.layout is torch.strided and column.is_cpu and not column.requires_grad
        with suppress(TypeError, RuntimeError):  # numpy lacks the dtype, or it is nested
            return resolved(column).numpy() if plain and is_numeric(model) else None
        return None
    array = array_of_leaf(column)
    if array is None and model.dtype == object and model.ndim == 1:
        items = column if isinstance(column, list) else _rows_as_list(column)
        return None if items is None else object_array(items)
    return array


def like(batch: Any, columns: dict[str, Any], rows: int) -> Any:
    """A batch of other columns, like a TensorDict (dim names, device) or a dict (`meta_info`)."""
    if isinstance(batch, dict):
        make: Callable[[dict[str, Any]], dict[str, Any]] = getattr(batch, "with_columns", dict)
        return make(columns)
    # tensordict 0.10 rejects names, even None, if a leaf is a NonTensorStack.
    names = batch.names if any(name is not None for name in batch.names) else None
    flat = not any(
        isinstance(leaf, TensorDictBase) or is_tensorclass(leaf) for leaf in columns.values()
    )
    if flat and names is None and batch.device is None and batch.batch_dims == 1:
        return batch_of(columns, rows)
    sizes = [rows, *batch.batch_size[1:]]
    return TensorDict(columns, batch_size=sizes, names=names, device=batch.device)
