"""Columns of one message that the decoder builds whole, because rows cannot be read in place.

`BuiltColumn` has any kind of node without a class of its own. Without torch,
`PayloadColumn` reads one object, and `VarlenColumn` a view of its parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jagcodec.columns.batch import As, Batch, FieldSchema, OneObject, Read, closed_batch, leaves_of
from jagcodec.columns.held import DictBatch, HeldColumn, column_of, row_count
from jagcodec.columns.join import chosen_leaf
from jagcodec.columns.memory import (
    BuiltSource,
    MemoryColumn,
    chosen_in_place,
    leaf_in_memory,
    user_value_in_memory,
)
from jagcodec.errors import ArgumentError, WireFormatError, brief
from jagcodec.memory.arrays import IntArray, torch_name
from jagcodec.rows.chosen_rows import CHOSEN, ChosenRows
from jagcodec.rows.column_arrays import arrays_of_view
from jagcodec.rows.copy_bytes import array_of_view, bytes_of_cells
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView
from jagcodec.wire.checks import fail, inside
from jagcodec.wire.items import item_of_view
from jagcodec.wire.leaf import field_of, parts_of_packed
from jagcodec.wire.read.decoder import build, build_children, rows_differ
from jagcodec.wire.read.node_columns import NodeColumn, budget_of_read
from jagcodec.wire.spec import Kind


class BuiltColumn(NodeColumn):
    """A column that is built whole, and whose rows are chosen afterwards."""

    __slots__ = ()

    @property
    def is_of_user(self) -> bool:  # type: ignore[override]
        return self.node.kind is Kind.USER

    def field(self, rows: int) -> FieldSchema:
        message, node = self.source.message, self.node
        if node.kind is Kind.VALUE:  # a column of a dict, without buffers
            is_batch = type(message.document(node.value)) is dict
            return FieldSchema("tensordict" if is_batch else "object", None, None)
        return field_of(node, message.numbers, rows)

    def read(self, how: Read) -> Any:
        column = self._build(how)
        return column.read(how) if isinstance(column, MemoryColumn) else column

    def to_send(self, how: Read) -> Any:
        column = self._build(how)
        return column.to_send(how) if isinstance(column, MemoryColumn) else column

    def leaf(self, value: Any, how: Read) -> Any:
        if isinstance(value, Batch):
            return closed_batch(value, leaves_of(value, how))
        return leaf_in_memory(value, self.source, "$")

    def user_value(self, value: Any, how: Read) -> Any:
        return user_value_in_memory(value, self.source, "$", how)

    def _build(self, how: Read) -> Any:
        """The column as a `MemoryColumn` if only a dict can hold it; else its chosen rows."""
        message = self.source.message
        column = build(message, self.node, budget_of_read(how, message))
        in_dict = self.source.node.kind is Kind.MAP and column_of(column).needs_leaf_form
        return self._in_memory(column) if in_dict else self._rows_of_leaf(column, how)

    def _in_memory(self, column: Any) -> MemoryColumn:
        """The built column, which only a dict can hold, as a column in memory."""
        source, message, node = self.source, self.source.message, self.node
        rows = row_count(column, "$")
        if rows is not None and [rows] != source.sizes:
            raise rows_differ(source.sizes, [rows])
        _check_packed(column, RowSplitsPool())
        build_again = lambda: build(message, node)  # noqa: E731
        return MemoryColumn(BuiltSource(source.sizes, source, build_again), None, column)

    def _rows_of_leaf(self, column: Any, how: Read) -> Any:
        """The chosen rows of a column that a TensorDict can hold; an error for any other."""
        sizes: Any = self.source.sizes
        holder = column_of(column)
        if type(holder) is HeldColumn or holder.needs_leaf_form:
            name = type(column).__name__
            detail = f"expected a leaf of a TensorDict, found {name}; decode reads such a column"
            raise fail("bad_value", detail)
        dims = holder.sizes(sizes)
        if dims != sizes:
            raise rows_differ(sizes, dims)
        if how.chosen is None or holder.row_count("$") is None:
            return column
        return chosen_leaf(column, how.chosen.index, RowSplitsPool(), CHOSEN)


class PayloadColumn(BuiltColumn):
    """An object of the whole batch, or an array with one item per row: a NON_TENSOR_DATA."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        is_host = how.form is As.HOST or not how.value_module.HAS_LEAVES
        return self._object(how) if is_host else super().read(how)

    def to_send(self, how: Read) -> Any:
        return self._object(how)

    def user_value(self, value: Any, how: Read) -> Any:
        if isinstance(value, OneObject):
            return column_of(value).object_array()
        return super().user_value(value, how)

    def _object(self, how: Read) -> OneObject:
        """The object, for the chosen rows."""
        message, chosen = self.source.message, how.chosen
        rows, *inner = message.shape(self.node)
        self._check_rows(rows, *inner)
        (payload,) = build_children(message, self.node, budget_of_read(how, message))
        one = OneObject(payload, rows, tuple(inner))
        return one if chosen is None else chosen_in_place(one, chosen)


class VarlenColumn(BuiltColumn):
    """A `PackedColumn` (`rows/varlen.py`), whose parts are three nodes."""

    __slots__ = ()

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        return self._view(chosen).row_splits.lengths

    def read(self, how: Read) -> Any:
        if how.form is As.HOST:
            return self._view(how.chosen)
        if how.value_module.HAS_LEAVES:
            return super().read(how)
        return arrays_of_view(self._view(how.chosen))

    def to_send(self, how: Read) -> Any:
        view = self._view(how.chosen)
        return item_of_view(view, torch_name(view.dtype))

    def _view(self, chosen: ChosenRows | None) -> RaggedView:
        """A view of the chosen rows. Unlike `view_of_varlen`, it needs no torch."""
        message, parts = self.source.message, parts_of_packed(self.node) or []
        values, _, offsets = parts
        cu_seqlens = array_of_view(message.view(offsets)).astype(np.int64)
        splits = RowSplits.from_offsets(cu_seqlens)
        if splits is None:
            expected = "cu_seqlens, which are offsets from 0 that never fall"
            detail = f"expected {expected}, found {brief(cu_seqlens.tolist())}"
            raise fail("bad_shape", detail)
        self._check_rows(splits.rows)
        whole = message.view(values)
        fits = [dim for dim in (0, 1) if whole.values_shape[dim : dim + 1] == (splits.total,)]
        if len(fits) != 1:
            detail = f"expected values with one dim of {splits.total} tokens by cu_seqlens, found "
            raise fail("bad_shape", f"{detail}shape {whole.values_shape}")
        data, dim = bytes_of_cells(whole), 1 + fits[0]
        view = RaggedView(data, whole.dtype, whole.values_shape, dim, None, splits)
        return view if chosen is None else chosen.of_view(view)


def _check_packed(column: Any, pool: RowSplitsPool) -> None:
    """Refuse a packed column, or one in a dict, whose offsets do not fit its values."""
    holder = column_of(column)
    if isinstance(holder, DictBatch):
        for name, inner in column.items():
            try:
                _check_packed(inner, pool)
            except WireFormatError as error:
                raise inside(error, name) from error
    elif holder.is_packed:
        try:
            holder.view("$", pool, detach=False)
        except ArgumentError as error:
            raise fail(error.reason, error.detail) from error
