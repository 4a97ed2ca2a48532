"""What a producer hands in: a dict of names to columns, checked, and made leaves of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from jagcodec._arguments import check_rectangle
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.ragged.copy_rows import gathered, values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor
from jagcodec.ragged.non_tensor import is_non_tensor, leaf_of_rows
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.views import RaggedView


def check_rows(column: Any, rows: int | None, like: str, path: str) -> int:
    """The number of rows of a column: `rows` where that is known, `like` saying from where.

    Raises:
        ArgumentError: It has another number of rows, or no rows at all.
        ArgumentTypeError: It is neither a tensor, nor an object array, nor a list of strings,
            bytes, dicts and None, nor payloads as a TensorDict holds them.
    """
    found = _rows(column, path)
    if rows is not None and found != rows:
        raise ArgumentError("row_mismatch", path, f"expected {rows} rows, {like}, found {found}")
    return found


_REMEDY = (
    "use torch.from_numpy for an array of numbers, stack_or_nest for a list of tensors, and for "
    "anything else an (N,) array: column = numpy.empty(N, dtype=object); column[i] = row i"
)


_OBJECTS = frozenset((str, bytes, dict, type(None)))
"""Of a list of these each item can only be the object of a row."""


def _rows(column: Any, path: str) -> int:
    plain = type(column) is torch.Tensor and column.layout is torch.strided
    if plain and column.dim() and not (column.is_nested or column.is_quantized):
        return int(column.shape[0])  # as most are
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        return len(column)
    if type(column) is list and all(type(row) in _OBJECTS for row in column):
        return len(column)
    if is_non_tensor(column) and column.batch_dims:
        return int(column.batch_size[0])
    if isinstance(column, torch.Tensor) and (
        is_jagged(column) or (column.layout is torch.strided and not column.is_nested)
    ):
        if column.is_quantized:
            check_rectangle(column, path)
        if column.dim() == 0:
            raise ArgumentError("bad_shape", path, "expected (N, ...), found a 0-d tensor")
        return int(column.shape[0])
    found = type(column).__name__
    if isinstance(column, np.ndarray):
        found = f"an array of dtype {column.dtype} and shape {column.shape}"
    elif is_non_tensor(column):
        found = f"a {found} without batch dims"
    elif isinstance(column, torch.Tensor):
        found = f"a {'nested' if column.is_nested else ''} tensor of layout {column.layout}"
    raise ArgumentTypeError(
        "bad_type",
        path,
        "expected a tensor, an (N,) object array, a list of N strings, bytes, dicts and None, or "
        "payloads as a TensorDict holds them, "
        f"found {found}; {_REMEDY}",
    )


def leaves_of(columns: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Checked columns to leaves: `RaggedView`s, lists of N objects, other tensors as they are.

    Rows that lie apart are copied, all of them into one block; rows that lie end to end are
    aliased. Columns of equal rows share one offsets tensor.
    """
    columns = list(columns)
    apart = [view for _, view in columns if isinstance(view, RaggedView) and not _is_whole(view)]
    copied = iter(gathered(apart))
    pool = RowSplitsPool()
    leaves: dict[str, Any] = {}
    for name, column in columns:
        if isinstance(column, RaggedView):
            values = values_of(column) if _is_whole(column) else next(copied)
            row_splits = pool.unique(column.row_splits)
            leaves[name] = nested_tensor(values, row_splits, column.ragged_dim)
        elif isinstance(column, list):
            leaves[name] = leaf_of_rows(column)
        else:
            leaves[name] = column
    return leaves


def _is_whole(view: RaggedView) -> bool:
    """Whether the rows lie end to end."""
    return view.starts is None
