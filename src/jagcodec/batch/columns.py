"""The columns of a batch in any form: the only place that asks which kind of batch it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from jagcodec.batch.leaves import row_counts
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen
from jagcodec.wire.lowered import Columns
from jagcodec.wire.wire_batch import WireBatch, open_whole


def columns_of(source: Any, where: str) -> Columns:
    """The columns of a batch.

    Args:
        source: A TensorDict, a dict of columns, a `BatchedDataDict`, a `WireBatch`, frames, or
            a blob.
        where: What errors call it.

    Returns:
        N rows, and each column as a `RaggedView` if it is jagged, as a list of N objects, as
        `Columns` if it is a batch, and otherwise unchanged. No cell is copied.

    Raises:
        ArgumentTypeError: `source` is not a batch, or it is a lazy stack.
        ArgumentError: It has no batch dim, or its columns differ in their number of rows.
        WireFormatError: A message is malformed.
    """
    return _columns(source, where, RowSplitsPool())


def opened(source: Any, where: str) -> Any:
    """A batch in memory unchanged; a message as a `WireBatch`, of which nothing was read yet."""
    return source if isinstance(source, _BATCHES) else open_whole(source, where)


_BATCHES = (dict, TensorDictBase, WireBatch)


def _columns(source: Any, where: str, pool: RowSplitsPool) -> Columns:
    if isinstance(source, Columns):
        return source
    source = opened(source, where)
    if isinstance(source, WireBatch):
        pairs, rows = source.columns(), len(source)
    elif isinstance(source, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type",
            where,
            "expected a TensorDict, found a lazy stack, whose rows may differ in keys and shapes; "
            "call .contiguous() on it",
        )
    elif isinstance(source, TensorDictBase):
        if not source.batch_dims:
            raise ArgumentError(
                "bad_shape",
                where,
                "expected batch size (N, ...), found no batch dim; set batch_size = [N]",
            )
        pairs, rows = list(source.items()), int(source.batch_size[0])
    else:
        pairs, rows = list(source.items()), row_counts(source, where) or 0
    return Columns(
        rows, {name: _column(leaf, rows, f"{where}[{name!r}]", pool) for name, leaf in pairs}
    )


def _column(leaf: Any, rows: int, path: str, pool: RowSplitsPool) -> Any:
    if isinstance(leaf, torch.Tensor):
        return view_of(leaf, path, pool) if is_jagged(leaf) else leaf
    if isinstance(leaf, PackedColumn):
        return view_of_varlen(leaf, path)
    if is_non_tensor(leaf):
        return list(rows_of_leaf(leaf, rows))
    if isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.ndim == 1:
        return list(leaf)
    if isinstance(leaf, _BATCHES):
        return _columns(leaf, path, pool)
    return leaf
