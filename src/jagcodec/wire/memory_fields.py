"""Columns in memory, described and viewed as those of a message are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, UnbatchedTensor

from jagcodec.errors import ArgumentError, WireFormatError
from jagcodec.ragged.nested import is_jagged, parts_of, view_of
from jagcodec.ragged.non_tensor import is_non_tensor
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.checks import fail, inside
from jagcodec.wire.leaf import FieldSchema, packed_field
from jagcodec.wire.spec import Kind


def has_host_cells(column: Any) -> bool:
    """Whether a column has its cells in a CPU tensor."""
    cells = column.values if isinstance(column, PackedColumn) else column
    return isinstance(cells, torch.Tensor) and cells.is_cpu


def view_in_memory(
    column: Any, pool: RowSplitsPool, path: str, *, detach: bool
) -> RaggedView | None:
    """The rows of a jagged or packed column in memory; None for any other column."""
    if is_jagged(column):
        return view_of(column, path, pool, detach=detach)
    if not isinstance(column, PackedColumn):
        return None
    if detach:
        column = column._replace(values=column.values.detach())
    return view_of_varlen(column, path, pool)


def check_packed(column: Any, pool: RowSplitsPool) -> None:
    """Check that offsets fit their values: those of a packed column, or of each in a dict."""
    if isinstance(column, dict):
        for name, inner in column.items():
            try:
                check_packed(inner, pool)
            except WireFormatError as error:
                raise inside(error, name) from error
    elif isinstance(column, PackedColumn):
        try:
            view_of_varlen(column, "$", pool)
        except ArgumentError as error:
            raise fail(error.reason, error.detail) from error


def field_in_memory(column: Any, rows: int) -> FieldSchema:
    """The description of a column in memory, as the header of its message would give it."""
    if isinstance(column, torch.Tensor) and not isinstance(column, UnbatchedTensor):
        if is_jagged(column):
            values, _, _, dim = parts_of(column)
            inner: list[int | None] = [*values.shape]
            inner[dim - 1] = None
            return FieldSchema("jagged", column.dtype, (rows, *inner))
        if column.layout is torch.strided and not column.is_nested:
            return FieldSchema("tensor", column.dtype, (rows, *column.shape[1:]))
        kind = Kind.STRIDED_NESTED if column.is_nested else Kind.SPARSE_COO
        return FieldSchema(kind.name.lower(), None, None)
    if isinstance(column, PackedColumn):
        values, ids = column.values, column.position_ids
        return packed_field(values.dtype, tuple(values.shape), tuple(ids.shape), rows)
    is_array = isinstance(column, np.ndarray)
    if is_non_tensor(column) or isinstance(column, list) or (is_array and column.dtype == object):
        return FieldSchema("object", None, None)
    kind = Kind.TENSORDICT if isinstance(column, (dict, TensorDictBase)) else Kind.USER
    return FieldSchema((Kind.ARRAY if is_array else kind).name.lower(), None, None)
