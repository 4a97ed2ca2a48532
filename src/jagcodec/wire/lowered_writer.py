"""Writes a lowered value as a message.

It fetches cells from devices, and sends repeated cells once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jagcodec.errors import ArgumentError, UnsupportedTypeError
from jagcodec.memory import ALIGNMENT
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, array_bytes, as_bytes
from jagcodec.ragged.copy_rows import gathered, values_of
from jagcodec.ragged.nested import view_of_checked_parts
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView, end_to_end, in_buffers
from jagcodec.wire import spec
from jagcodec.wire.dtypes import bytes_in_order, torch_dtype
from jagcodec.wire.elide import elide, equal_documents
from jagcodec.wire.frames import NO_BYTES, PendingMessage, blob_pieces, frames_of
from jagcodec.wire.header import start_of
from jagcodec.wire.lowered import Cells, Documents, EndToEnd, Item, Lowered, Run, UnreadCells
from jagcodec.wire.place import MessageWriter
from jagcodec.wire.spec import PLAIN


class LoweredWriter(MessageWriter):
    """`MessageWriter` for whatever was lowered: tensors on any device, documents, shared cells."""

    def __init__(self, copies: HostCopies, *, narrows: bool = False, elides: bool = False) -> None:
        """`copies` are those of the tensors on devices."""
        super().__init__()
        self._copies = copies
        self._narrows, self._elides = narrows, elides
        self._pool = RowSplitsPool()
        # The cells that runs name, maybe several times. The places of cells; how they are stored.
        self._named: set[Cells] = set()
        self._places: dict[Cells, tuple[int, ...]] = {}
        self.elided: bool = False  # whether something is sent once that occurs several times

    def message_of(self, lowered: Lowered) -> PendingMessage:
        """The message of a lowered value.

        Its columns are narrow and elided only if there is still a byte for each row that needs one.
        """
        tree, items, values, unbacked = lowered
        shrinks = self._narrows or self._elides
        if shrinks:
            items = self._narrow_or_elide(items)
        numbers = self.place(self._items_to_place(items))
        if shrinks and self.first_unbacked(unbacked):
            return LoweredWriter(self._copies).message_of(lowered)
        self._places.clear()  # so that memory of cells goes back before rows are copied
        return self.finish(start_of(tree), numbers, values, unbacked)

    def _items_to_place(self, items: Iterable[Any]) -> Iterator[int | Item]:
        """The items as `place` has them; cells that runs may name are placed here."""
        for item in items:
            kind = type(item)
            if kind is int or kind is tuple:
                yield item
            elif kind is UnreadCells:
                yield self._item_of_column(item)
            elif kind is Documents:
                yield self._rows_of_documents(item)
            elif kind is EndToEnd:
                yield from self._numbers_of_column(item)
            else:
                yield int(item)  # a symbolic or numpy dim

    def _item_of_column(self, column: UnreadCells) -> Item:
        if column.row_splits is not None:
            return self._item_of_array_rows(column.source, column.dtype, column.row_splits)
        if not column.is_ragged:
            stored = None if column.dtype is None else PLAIN
            return self._host_bytes(column.source), stored, None, column.dims
        view = self._host_view(column)
        data = _memory_in_order(view) if view.starts is None else view
        return data, PLAIN, view.row_splits, view.values_shape

    def _item_of_array_rows(self, parts: Sequence[Any], name: Any, splits: RowSplits) -> Item:
        """The cells of rows that are arrays or tensors each, flat and end to end."""
        dtype = torch_dtype(name)
        cells = [data for data in map(self._host_cells, parts) if len(data)]
        view = in_buffers(cells, dtype, (), splits.starts * dtype.itemsize, splits)
        return view, PLAIN, splits, (splits.total,)

    def _host_cells(self, source: Any) -> ByteArray:
        """The cells of an array or a tensor, as flat bytes."""
        if isinstance(source, np.ndarray):
            return bytes_in_order(source)
        return as_bytes(self._copies.of(source))

    def _host_view(self, column: UnreadCells) -> Any:
        """The `RaggedView` of a jagged column, on the host."""
        view: Any = column.source
        if type(view) is not RaggedView:
            try:
                view = view_of_checked_parts(view, "jagged tensor", self._pool, self._copies)
            except ArgumentError as error:
                raise UnsupportedTypeError(error.reason, error.path, error.detail) from error
        if isinstance(view.memory, torch.Tensor) and not view.memory.is_cpu:
            if view.starts is not None:  # only rows leave the device
                view = end_to_end(values_of(view), view.row_splits, view.ragged_dim)
                self._copies.fetch([view.memory])
            view = replace(view, memory=self._copies.of(view.memory))
        return view

    def _host_bytes(self, source: Any) -> Any:
        """The cells of an array, a tensor, or tensors end to end."""
        if isinstance(source, np.ndarray):
            plain = source.flags.c_contiguous and source.dtype.kind in "biufc"
            return source if plain else bytes_in_order(source)
        if isinstance(source, torch.Tensor):
            return as_bytes(self._copies.of(source))
        parts = [as_bytes(self._copies.of(part)) for part in source]
        return np.concatenate(parts) if parts else NO_BYTES

    def _rows_of_documents(self, documents: Documents) -> Item:
        made: dict[int, list[Any]] = {}  # rows may be one object
        for row in documents.rows:
            if id(row) not in made:
                made[id(row)] = [row] if isinstance(row, bytes) else self._message_in_row(row)
        rows = [made[id(row)] for row in documents.rows]
        first_equal, one_object = None, False
        if self._elides:
            first_equal, one_object = equal_documents(rows, documents.first_same)
        data, starts, row_splits = _lay_out_documents(rows, first_equal)
        stored = PLAIN
        if first_equal is not None:
            objects = len(data) if one_object else row_splits.total
            self.indirect_bytes: int = self.indirect_bytes + objects
            stored = spec.ONE_OBJECT if one_object else spec.INDIRECT + 1
            data = self._place_table(
                [Run(row_splits, Cells(data), Cells.of_index(starts))], 1, True
            )
        if rows and isinstance(documents.rows[0], Lowered):
            stored += spec.BLOBS
        return data, stored, row_splits, (row_splits.total,)

    def _message_in_row(self, row: Lowered) -> list[Any]:
        message = LoweredWriter(self._copies, narrows=self._narrows).message_of(row)
        pieces = blob_pieces(frames_of(message))
        return [*pieces, bytes(-sum(map(len, pieces)) % ALIGNMENT)]

    # Columns that are stored narrow or elided

    def _narrow_or_elide(self, items: Sequence[Any]) -> list[Any]:
        """The items with the cells of columns to narrow, or to look for repeats in, end to end."""
        made = list(items)
        scattered: list[tuple[Cells, RaggedView]] = []
        searched: list[EndToEnd] = []
        sources: list[Any] = []
        rows: Any
        for i, item in enumerate(items):
            if type(item) is not UnreadCells or not (item.narrow or (self._elides and item.dtype)):
                continue
            data, _, rows, shape = self._item_of_column(item)
            sources += data.memories if type(data) is RaggedView else (data,)
            cells = Cells(NO_BYTES, item.dtype, item.narrow)
            splits = None if rows is None else self._pool.unique(rows)
            made[i] = column = EndToEnd(cells, splits, shape)
            if type(data) is RaggedView:
                scattered.append((cells, data))
            else:
                cells.data = array_bytes(data)
            if not item.is_ragged or item.source.ragged_dim == 1:
                searched.append(column)
        for (cells, _), values in zip(
            scattered, gathered(view for _, view in scattered), strict=True
        ):
            cells.data = as_bytes(values)
        self.read_from: Sequence[Any] = sources
        if self._elides:
            elide(searched)
            self._named = {run.cells for column in searched for run in column.runs or ()}
        return made

    def _numbers_of_column(self, column: EndToEnd) -> Iterator[int | Item]:
        cells, splits, shape, runs = column.cells, column.splits, column.shape, column.runs
        if runs is None and cells not in self._named:
            stored, data = cells.stored()
            yield data, stored, splits, shape
            return
        if runs is None:
            yield from self._place_cells(cells)
        else:
            table = self._place_table(runs, len(cells.data) // shape[0], splits is not None)
            yield from (*self._put(table), spec.INDIRECT + len(runs))
        if splits is not None:
            yield self._group(splits)
        yield from map(int, shape)

    def _place_cells(self, cells: Cells) -> tuple[int, ...]:
        """The place of cells, and how they are stored."""
        if cells not in self._places:
            stored, data = cells.stored()
            self._places[cells] = (*self._put(data), stored)
        return self._places[cells]

    def _place_table(self, runs: Sequence[Run], size: int, ragged: bool) -> ByteArray:
        """The table of runs, with what it names placed before it; a cell has `size` bytes."""
        self.elided = True
        table: list[int] = []
        for splits, cells, index in runs:
            at = self._place_cells(cells)
            starts = (spec.NO_INDEX, 0, PLAIN) if index is None else self._place_cells(index)
            group = self._group(splits) if ragged else 0
            table += (group, *at, len(cells.data) // size, *starts)
        return np.array(table, dtype=np.int64).view(np.uint8)


def _memory_in_order(view: RaggedView) -> Any:
    """The memory of rows that are end to end."""
    memory: Any = view.memory
    return as_bytes(memory) if isinstance(memory, torch.Tensor) else memory


def _lay_out_documents(
    rows: Sequence[list[Any]], first_equal: Sequence[int] | None
) -> tuple[ByteArray, IntArray, RowSplits]:
    """The bytes of rows of documents, and where each begins: with the row it is `first_equal`."""
    row_splits = RowSplits.from_lengths(np.array([sum(map(len, row)) for row in rows], np.int64))
    starts = row_splits.starts
    if first_equal is not None:
        sent = np.where(np.array(first_equal) == np.arange(len(rows)), row_splits.lengths, 0)
        starts = (np.cumsum(sent) - sent)[list(first_equal)]
        rows = [row for i, row in enumerate(rows) if first_equal[i] == i]
    pieces = itertools.chain.from_iterable(rows)
    return np.frombuffer(bytearray().join(pieces), dtype=np.uint8), starts, row_splits
