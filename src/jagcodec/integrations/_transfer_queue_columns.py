"""Columns in the form of TransferQueue, and in that of messages.

A put calls `columns_to_send` and `field_schema`. A get calls `rows_of_messages` and
`columns_of_rows`, or `values_of_rows` and `column_of_values` for a column that cannot stay in one
piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from jagcodec import concat_rows
from jagcodec.columns.batch import Columns, closed
from jagcodec.columns.held import column_of
from jagcodec.columns.tensor_columns import (
    Dense,
    Jagged,
    Payloads,
    StridedNested,
    TensorColumn,
    TensorDictBatch,
    Unbatched,
)
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.integrations._transfer_queue_version import extract_field_schema
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.produce.jagged_tensors import stack_or_nest
from jagcodec.rows.nested import parts_of
from jagcodec.rows.non_tensor import is_stack, rows_of_leaf
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView
from jagcodec.wire.read.wire_batch import WireBatch


def columns_to_send(data: Any) -> Columns:
    """The columns of a put; rectangles become jagged, because TransferQueue nests their rows."""
    splits: dict[int, RowSplits] = {}
    rows, pool = len(data), RowSplitsPool()

    def column(name: str, leaf: Any) -> Any:
        holder = column_of(leaf)
        if isinstance(holder, Payloads):
            if is_stack(leaf):
                objects = holder.objects_to_send()
                return leaf if objects is None else objects
            values = _payload_of_each_row(leaf.data, rows)
            return column_of_values(values, [1] * len(values))
        view = holder.view(f"put({name!r})", pool, detach=True)
        if view is not None:
            return view
        if not isinstance(holder, Dense):
            return _values_of_column(leaf)
        if leaf.dim() == 1:
            return leaf
        length, cells = leaf.shape[1], contiguous_bits(leaf.detach()).flatten(0, 1)
        if length not in splits:
            splits[length] = RowSplits.from_lengths(np.full(rows, length))
        return RaggedView(cells, cells.dtype, cells.shape, 1, None, splits[length])

    return Columns(rows, {name: column(name, leaf) for name, leaf in data.items()})


def _payload_of_each_row(payload: Any, rows: int) -> list[Any]:
    """The items of a payload with one for each row; any other payload, repeated for every row."""
    has_items = isinstance(payload, torch.Tensor | np.ndarray) and len(payload.shape) > 0
    one_each = (has_items or type(payload) is list) and len(payload) == rows
    return list(payload) if one_each else [payload] * rows


def field_schema(data: Any) -> dict[str, dict[str, Any]]:
    """What TransferQueue's `extract_field_schema` returns, read from columns instead of rows."""
    schema: dict[str, dict[str, Any]] = {}
    for name, leaf in data.items():
        holder = column_of(leaf)
        is_tensor = holder.cells() is not None
        schema[name] = {
            "dtype": leaf.dtype if is_tensor else None,
            "shape": None,
            "is_nested": isinstance(holder, (Jagged, StridedNested)),
            "is_non_tensor": not is_tensor,
        }
        view = holder.view(f"put({name!r})", RowSplitsPool(), detach=True)
        if isinstance(holder, StridedNested):
            schema.update(extract_field_schema(data.select(name)))
        elif view is not None:
            before, after = view.shape[: view.ragged_dim - 1], view.shape[view.ragged_dim :]
            shapes = [(*before, length, *after) for length in view.row_splits.lengths.tolist()]
            schema[name] |= {"shape": torch.Size(shapes[0]), "per_sample_shapes": shapes}
        elif is_tensor:
            schema[name]["shape"] = leaf.shape[1:] or torch.Size((1,))
    return schema


def rows_of_messages(
    batches: Sequence[WireBatch], index: Sequence[int], names: Iterable[str]
) -> WireBatch:
    """These rows and columns of several messages, as one open batch."""
    names = tuple(names)
    parts = [batch if batch.fields == names else batch.select(names) for batch in batches]
    return (concat_rows(parts) if len(parts) > 1 else parts[0]).rows(index)


def columns_of_rows(
    batches: Sequence[WireBatch],
    index: Sequence[int],
    whole: WireBatch,
    read: Callable[[WireBatch], Iterable[tuple[str, Any]]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of `whole`, which are rows of `batches`: first those in one piece, then others.

    The others, which `read` cannot join, are made of their values.
    """
    with suppress(ArgumentError, ArgumentTypeError):  # some column differs between batches
        return dict(read(whole)), {}
    columns: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name in whole.fields:
        try:
            columns |= read(whole.select([name]))
        except (ArgumentError, ArgumentTypeError):
            others[name] = column_of_values(*values_of_rows(batches, index, name))
    return columns, others


def values_of_rows(
    batches: Sequence[WireBatch], index: Sequence[int], name: str
) -> tuple[list[Any], list[int]]:
    """Rows of one column as TransferQueue has them, and for each the ragged dim of its column."""
    values: list[Any] = []
    ragged_dims: list[int] = []
    for batch in batches:
        leaf = closed(batch[name])
        dim = parts_of(leaf).ragged_dim if isinstance(column_of(leaf), Jagged) else 1
        values += _values_of_column(leaf)
        ragged_dims += [dim] * len(batch)
    return [values[row] for row in index], [ragged_dims[row] for row in index]


def _values_of_column(leaf: Any) -> list[Any]:
    """The rows of a column as TransferQueue has them: tensors and objects."""
    holder = column_of(leaf)
    if isinstance(holder, Payloads):
        return rows_of_leaf(leaf, len(leaf))
    has_parts = isinstance(holder, (TensorColumn, TensorDictBatch, Unbatched))
    return list(leaf.unbind(0)) if has_parts else list(leaf)


def column_of_values(values: list[Any], ragged_dims: Iterable[int]) -> Any:
    """Values as one column, nested as TransferQueue nests them; a list if that is not possible.

    `ragged_dims` are the ragged dims of the columns that the values come from, and 1 for
    rectangles. If all shapes are equal, a ragged dim other than 1 decides; TransferQueue would use
    dim 1.
    """
    if not all(type(value) is torch.Tensor for value in values):
        return values
    other_dims = set(ragged_dims) - {1}
    for dim in (*other_dims, None) if len(other_dims) == 1 else (None,):
        with suppress(ArgumentError, ArgumentTypeError):  # their dtypes or shapes do not fit
            return stack_or_nest(values, always_nest=values[0].dim() > 0, ragged_dim=dim)
    return values
