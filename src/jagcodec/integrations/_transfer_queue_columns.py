"""Columns as TransferQueue holds them, and as messages have them: what both sides of it convert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from jagcodec import concat_rows
from jagcodec.columns.batch import closed
from jagcodec.columns.column import column_of
from jagcodec.columns.of_tensors import (
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
from jagcodec.wire.write.encoder import Columns


def sendable(data: Any) -> Columns:
    """The columns of a put; rectangles become jagged, because TransferQueue nests their rows."""
    splits: dict[int, RowSplits] = {}
    rows, pool = len(data), RowSplitsPool()

    def column(name: str, leaf: Any) -> Any:
        holder = column_of(leaf)
        if isinstance(holder, Payloads):
            if is_stack(leaf):
                objects = holder.own_objects()
                return leaf if objects is None else objects
            values = _dealt(leaf.data, rows)
            return _column_of(values, [1] * len(values))
        view = holder.view(f"put({name!r})", pool, detach=True)
        if view is not None:
            return view
        if not isinstance(holder, Dense):
            return _values_of_leaf(leaf)
        if leaf.dim() == 1:
            return leaf
        length, cells = leaf.shape[1], contiguous_bits(leaf.detach().cpu()).flatten(0, 1)
        if length not in splits:
            splits[length] = RowSplits.from_lengths(np.full(rows, length))
        return RaggedView(cells, cells.dtype, cells.shape, 1, None, splits[length])

    return Columns(rows, {name: column(name, leaf) for name, leaf in data.items()})


def _dealt(payload: Any, rows: int) -> list[Any]:
    """The items of a payload with one for each row; any other payload is repeated for every row."""
    items = isinstance(payload, torch.Tensor | np.ndarray) and len(payload.shape) > 0
    deal = (items or type(payload) is list) and len(payload) == rows
    return list(payload) if deal else [payload] * rows


def _values_of_leaf(leaf: Any) -> list[Any]:
    """The rows of a column as TransferQueue holds them: tensors and objects."""
    holder = column_of(leaf)
    if isinstance(holder, Payloads):
        return rows_of_leaf(leaf, len(leaf))
    has_parts = isinstance(holder, (TensorColumn, TensorDictBatch, Unbatched))
    return list(leaf.unbind(0)) if has_parts else list(leaf)


def _column_of(values: list[Any], ragged_dims: Iterable[int]) -> Any:
    """Values as one column, nested as TransferQueue nests them; a list if that is not possible.

    `ragged_dims` are those of the columns that the values come from, and 1 for rectangles. If all
    shapes are equal, a ragged dim other than 1 decides; TransferQueue would use dim 1.
    """
    if not all(type(value) is torch.Tensor for value in values):
        return values
    known = set(ragged_dims) - {1}
    for dim in (*known, None) if len(known) == 1 else (None,):
        with suppress(ArgumentError, ArgumentTypeError):  # their dtypes or shapes do not fit
            return stack_or_nest(values, always_nest=values[0].dim() > 0, ragged_dim=dim)
    return values


def _chosen(batches: Sequence[WireBatch], index: Sequence[int], names: Iterable[str]) -> WireBatch:
    """These rows and columns of several messages, as one open batch."""
    names = tuple(names)
    parts = [batch if batch.fields == names else batch.select(names) for batch in batches]
    return (concat_rows(parts) if len(parts) > 1 else parts[0]).rows(index)


def _rows_of(
    batches: Sequence[WireBatch],
    index: Sequence[int],
    whole: WireBatch,
    read: Callable[[WireBatch], Iterable[tuple[str, Any]]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of `whole`, which are rows of `batches`: in one piece, or value by value."""
    with suppress(ArgumentError, ArgumentTypeError):  # some column differs between batches
        return dict(read(whole)), {}
    columns: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name in whole.fields:
        try:
            columns |= read(whole.select([name]))
        except (ArgumentError, ArgumentTypeError):
            others[name] = _column_of(*_values_of_rows(batches, index, name))
    return columns, others


def _values_of_rows(
    batches: Sequence[WireBatch], index: Sequence[int], name: str
) -> tuple[list[Any], list[int]]:
    """Rows of one column as TransferQueue holds them, and for each the ragged dim of its column."""
    values: list[Any] = []
    ragged_dims: list[int] = []
    for batch in batches:
        leaf = closed(batch[name])
        dim = parts_of(leaf).ragged_dim if isinstance(column_of(leaf), Jagged) else 1
        values += _values_of_leaf(leaf)
        ragged_dims += [dim] * len(batch)
    return [values[row] for row in index], [ragged_dims[row] for row in index]


def field_schema(data: Any) -> dict[str, dict[str, Any]]:
    """What TransferQueue's `extract_field_schema` returns, read from columns instead of rows."""
    schema: dict[str, dict[str, Any]] = {}
    for name, leaf in data.items():
        holder = column_of(leaf)
        tensor, nested = holder.cells() is not None, isinstance(holder, (Jagged, StridedNested))
        field = {"dtype": leaf.dtype if tensor else None, "shape": None, "is_nested": nested}
        schema[name] = {**field, "is_non_tensor": not tensor}
        view = holder.view(f"put({name!r})", RowSplitsPool(), detach=True)
        if isinstance(holder, StridedNested):
            schema.update(extract_field_schema(data.select(name)))
        elif view is not None:
            before, after = view.shape[: view.ragged_dim - 1], view.shape[view.ragged_dim :]
            shapes = [(*before, length, *after) for length in view.row_splits.lengths.tolist()]
            schema[name] |= {"shape": torch.Size(shapes[0]), "per_sample_shapes": shapes}
        elif tensor:
            schema[name]["shape"] = leaf.shape[1:] or torch.Size((1,))
    return schema
