"""`MessageWriter`, the only one: items to buffers, numbers and a header; then it copies rows."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec import rowcopy
from jagcodec.errors import ArgumentError, UnsupportedTypeError
from jagcodec.memory import ALIGNMENT, extent_of
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, array_bytes, as_bytes
from jagcodec.ragged.copy_rows import copy_task, gathered, values_of
from jagcodec.ragged.nested import view_of_readable
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire import documents, spec
from jagcodec.wire.dtypes import NUMPY_NAMES, TORCH_NAMES, cell_bytes
from jagcodec.wire.elide import elide, equal_documents
from jagcodec.wire.frames import BYTE, NO_BYTES, Frame, PendingMessage, blob_pieces, frames_of
from jagcodec.wire.header import start_of, write_header
from jagcodec.wire.lowered import (
    Cells,
    Columns,
    Documents,
    EndToEnd,
    Item,
    Lowered,
    Rows,
    Run,
    UnreadCells,
)
from jagcodec.wire.spec import PLAIN, Code


class MessageWriter(PendingMessage):
    """A message while its items are placed: small buffers end to end in frame 1, then the large."""

    __slots__ = ("_group_of", "_groups", "_size", "_small")

    def __init__(self) -> None:
        super().__init__(b"", [0])  # a header when it is finished
        self._size = 0  # of frame 1
        self._small: list[Any] = []  # the contents of frame 1, zeros for rows to be copied
        self._groups: list[tuple[int, ...]] = []
        self._group_of: dict[Rows, int] = {}

    def place(self, items: Iterable[Any]) -> list[int]:
        """The numbers of items; those with bytes get a place."""
        numbers: list[int] = []
        buffers, small, group_of = self.buffers, self._small, self._group_of
        for item in items:
            if type(item) is int:
                numbers.append(item)
                continue
            data, stored, rows, dims = item
            scattered = type(data) is RaggedView
            size = math.prod(dims) * data.dtype.itemsize if scattered else data.nbytes
            buffer = offset = 0  # if there are no bytes, too
            if size >= spec.SMALL_BUFFER:
                buffer = len(buffers)
                buffers.append(size if scattered else np.frombuffer(data, np.uint8))
            elif size:
                end = self._size
                offset = (end + 63) & -ALIGNMENT
                small.append(_GAPS[offset - end])
                small.append(bytes(size) if scattered else data)
                self._size = offset + size
            if scattered and size:
                self.rows.append((buffer, offset, size, data))
            if rows is None:
                numbers += (buffer, offset) if stored is None else (buffer, offset, stored)
            else:
                group = group_of.get(rows)
                numbers += (buffer, offset, stored, self._group(rows) if group is None else group)
            numbers += dims
        return numbers

    def _put(self, data: Any) -> list[int]:
        """The place of contiguous memory: a buffer, and the offset in it."""
        return self.place([(data, None, None, ())])

    def _group(self, rows: Rows) -> int:
        """The ragged group of these rows, made or found."""
        key: Any = rows
        if isinstance(rows, RowSplits):
            # Fewer than two rows need no offsets: min and max describe them.
            offsets = rows.offsets_array.tobytes() if rows.rows > 1 else b""
            key = rows.rows, rows.min, rows.max, offsets
        group = self._group_of.get(key)
        if group is None:
            group = self._group_of[key] = len(self._groups)
            count, low, high, offsets = key
            place = self._put(memoryview(offsets)) if offsets else (0, 0)
            self._groups.append((*place, count, low, high))
        self._group_of[rows] = group
        return group

    def finish(
        self,
        start: bytes,
        numbers: list[int],
        values: bytes,
        unbacked: Sequence[tuple[str, int]] = (),
    ) -> PendingMessage:
        """The message, once everything is placed."""
        buffers = self.buffers
        if self._size:
            buffers[0] = np.frombuffer(bytearray().join(self._small), BYTE)
        else:
            buffers[:1] = [] if len(buffers) == 1 else [np.empty(0, np.uint8)]
        sizes = [part if type(part) is int else part.nbytes for part in buffers]
        for path, rows in unbacked:
            if rows > sum(sizes):
                expected = (
                    f"expected at most {spec.MAX_UNBACKED_ROWS} rows without data, found {rows}"
                )
                raise UnsupportedTypeError("too_large", path, expected)
        self.header: bytes = write_header(start, numbers, values, self._groups, sizes)
        return self

    def write(self, targets: list[ByteArray]) -> None:
        copies = []
        for buffer, start, size, view in self.rows:
            copies.append(copy_task(view, targets[buffer][start : start + size]))
        rowcopy.copy_all(copies)

    def sources(self) -> list[np.ndarray[Any, Any]]:
        sources: list[Any] = []
        for *_, view in self.rows:
            memory: Any = view.memory
            if isinstance(memory, tuple):
                sources += memory
            else:
                sources.append(as_bytes(memory) if isinstance(memory, torch.Tensor) else memory)
        return sources


class LoweredWriter(MessageWriter):
    """`MessageWriter` for whatever was lowered: tensors on any device, documents, shared cells."""

    def __init__(self, copies: HostCopies, *, narrows: bool = False, elides: bool = False) -> None:
        """`copies` are those of the tensors on devices."""
        super().__init__()
        self._copies = copies
        self._narrows, self._elides = narrows, elides
        self._pool = RowSplitsPool()
        # Cells that runs name, maybe several times; where they are, and how they are stored.
        self._named: set[Cells] = set()
        self._places: dict[Cells, tuple[int, ...]] = {}
        self.elided: bool = False  # whether something is sent once that occurs several times

    def all_of(self, lowered: Lowered) -> PendingMessage:
        """The message of a lowered value."""
        tree, items, values, unbacked = lowered
        if self._narrows or self._elides:
            items = self._end_to_end(items)
        numbers = self.place(self._plain(items))
        self._places.clear()  # so that memory of cells goes back before rows are copied
        return self.finish(start_of(tree), numbers, values, unbacked)

    def _plain(self, items: Iterable[Any]) -> Iterator[int | Item]:
        """The items as `place` has them; cells that runs may name are placed here."""
        for item in items:
            kind = type(item)
            if kind is int or kind is tuple:
                yield item
            elif kind is UnreadCells:
                yield self._column(item)
            elif kind is Documents:
                yield self._rows_of_documents(item)
            elif kind is EndToEnd:
                yield from self._stored(item)
            else:
                yield int(item)  # a symbolic or numpy dim

    def _column(self, column: UnreadCells) -> Item:
        if not column.is_ragged:
            stored = None if column.dtype is None else PLAIN
            return self._bytes(column.source), stored, None, column.dims
        view = self._view(column)
        data = _in_order(view) if view.starts is None else view
        return data, PLAIN, view.row_splits, view.values_shape

    def _view(self, column: UnreadCells) -> Any:
        """The `RaggedView` of a jagged column, on the host."""
        view: Any = column.source
        if type(view) is not RaggedView:
            try:
                view = view_of_readable(view, "jagged tensor", self._pool, self._copies)
            except ArgumentError as error:
                raise UnsupportedTypeError(error.reason, error.path, error.detail) from error
        if isinstance(view.memory, torch.Tensor) and not view.memory.is_cpu:
            if view.starts is not None:  # only rows leave the device
                view = end_to_end(values_of(view), view.row_splits, view.ragged_dim)
                self._copies.fetch([view.memory])
            view = replace(view, memory=self._copies.of(view.memory))
        return view

    def _bytes(self, source: Any) -> Any:
        """The cells of an array, a tensor, or tensors end to end."""
        if isinstance(source, np.ndarray):
            plain = source.flags.c_contiguous and source.dtype.kind in "biufc"
            return source if plain else cell_bytes(source)
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
        like, one_object = equal_documents(rows) if self._elides else (None, False)
        data, starts, row_splits = _laid_out(rows, like)
        stored = PLAIN
        if like is not None:
            more = len(data) if one_object else row_splits.total
            self.documents: int = self.documents + more
            stored = spec.ONE_OBJECT if one_object else spec.INDIRECT + 1
            data = self._table([Run(row_splits, Cells(data), Cells.of_index(starts))], 1, True)
        if rows and isinstance(documents.rows[0], Lowered):
            stored += spec.BLOBS
        return data, stored, row_splits, (row_splits.total,)

    def _message_in_row(self, row: Lowered) -> list[Any]:
        message = LoweredWriter(self._copies, narrows=self._narrows).all_of(row)
        pieces = blob_pieces(frames_of(message))
        return [*pieces, bytes(-sum(map(len, pieces)) % ALIGNMENT)]

    # Columns that are stored otherwise than they are

    def _end_to_end(self, items: Sequence[Any]) -> list[Any]:
        """The items with the cells of columns to narrow, or to look for repeats in, end to end."""
        made = list(items)
        scattered: list[tuple[Cells, RaggedView]] = []
        searched: list[EndToEnd] = []
        rows: Any
        for i, item in enumerate(items):
            if type(item) is not UnreadCells or not (item.narrow or (self._elides and item.dtype)):
                continue
            data, _, rows, shape = self._column(item)
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
        if self._elides:
            elide(searched)
            self._named = {run.cells for column in searched for run in column.runs or ()}
        return made

    def _stored(self, column: EndToEnd) -> Iterator[int | Item]:
        cells, splits, shape, runs = column.cells, column.splits, column.shape, column.runs
        if runs is None and cells not in self._named:
            stored, data = cells.stored()
            yield data, stored, splits, shape
            return
        if runs is None:
            yield from self._placed(cells)
        else:
            table = self._table(runs, len(cells.data) // shape[0], splits is not None)
            yield from (*self._put(table), spec.INDIRECT + len(runs))
        if splits is not None:
            yield self._group(splits)
        yield from map(int, shape)

    def _placed(self, cells: Cells) -> tuple[int, ...]:
        """The place of cells, and how they are stored."""
        if cells not in self._places:
            stored, data = cells.stored()
            self._places[cells] = (*self._put(data), stored)
        return self._places[cells]

    def _table(self, runs: Sequence[Run], size: int, ragged: bool) -> ByteArray:
        """The table of runs, with what it names placed before it; a cell has `size` bytes."""
        self.elided = True
        table: list[int] = []
        for splits, cells, index in runs:
            at = self._placed(cells)
            starts = (spec.NO_INDEX, 0, PLAIN) if index is None else self._placed(index)
            group = self._group(splits) if ragged else 0
            table += (group, *at, len(cells.data) // size, *starts)
        return np.array(table, dtype=np.int64).view(np.uint8)


_GAPS = tuple(map(bytes, range(ALIGNMENT)))  # those between small buffers, by size


def _in_order(view: RaggedView) -> Any:
    """The memory of rows that are end to end."""
    memory: Any = view.memory
    return as_bytes(memory) if isinstance(memory, torch.Tensor) else memory


def _laid_out(
    rows: Sequence[list[Any]], like: Sequence[int] | None
) -> tuple[ByteArray, IntArray, RowSplits]:
    """The bytes of rows of documents, and where each begins: with the row it is `like`."""
    row_splits = RowSplits.from_lengths(np.array([sum(map(len, row)) for row in rows], np.int64))
    starts = row_splits.starts
    if like is not None:
        sent = np.where(np.array(like) == np.arange(len(rows)), row_splits.lengths, 0)
        starts = (np.cumsum(sent) - sent)[list(like)]
        rows = [row for i, row in enumerate(rows) if like[i] == i]
    pieces = itertools.chain.from_iterable(rows)
    return np.frombuffer(bytearray().join(pieces), dtype=np.uint8), starts, row_splits


# --- without options ---------------------------------------------------------------------------


def frames_of_items(start: bytes, items: Iterable[int | Item], values: bytes) -> list[Frame]:
    """The message of the start of its header, its plain items, and the packed documents."""
    writer = MessageWriter()
    return frames_of(writer.finish(start, writer.place(items), values))


def is_wide(dims: Sequence[int], itemsize: int) -> bool:
    """Whether `Lowering` rejects these dims of a column without cells."""
    return extent_of(dims) * itemsize >= spec.MAX_BYTES


def items_of_columns(columns: Columns) -> tuple[bytes, list[int | Item]] | None:
    """The start of the header and the items of columns; None if a column needs a walk."""
    rows = columns.rows
    if rows > spec.MAX_UNBACKED_ROWS:
        return None
    nodes: list[Any] = []
    items: list[int | Item] = [rows]
    for column in columns.columns.values():
        made = _MAKERS.get(type(column), _needs_walk)(column)
        if made is None:
            return None
        items.append(made[0])
        nodes.append(made[1])
    return start_of((Code.TENSORDICT, 1, tuple(columns.columns), *nodes)), items


_Made: TypeAlias = tuple[Item, tuple[Any, ...]] | None
"""The item and the node of a column; None if it needs a walk."""


def _needs_walk(column: Any) -> _Made:
    return None


def _of_view(view: RaggedView) -> _Made:
    splits, memory, starts = view.row_splits, view.memory, view.starts
    dtype = TORCH_NAMES.get(view.dtype)
    if dtype is None or type(memory) is not np.ndarray or view.ragged_dim > 1:
        return None
    if not memory.size and is_wide(view.shape, view.dtype.itemsize):
        return None
    shape = (splits.total, *view.shape[1:])
    data: Any = view
    if starts is None:
        data = memory
    elif splits.rows == 1 and type(starts) is int:
        size = math.prod(shape)
        data = memory if memory.size == size else memory.reshape(-1)[:size]
    return (data, PLAIN, splits, shape), (Code.JAGGED, dtype, len(shape), 1)


def _of_array(data: np.ndarray[Any, Any]) -> _Made:
    if not data.flags.c_contiguous or (not data.size and is_wide(data.shape, data.itemsize)):
        return None
    return (data, PLAIN, None, data.shape), (Code.TENSOR, NUMPY_NAMES[data.dtype], data.ndim)


def _of_objects(rows: list[Any]) -> _Made:
    packed = documents.packed_at_once(rows, spec.MAX_DEPTH - 1) if rows else None
    return None if packed is None else (item_of_documents(packed), (Code.NON_TENSOR_ROWS,))


def item_of_documents(rows: Sequence[bytes]) -> Item:
    """The item of a column of objects, one document in each row."""
    if len(rows) == 1:  # most messages
        size = len(rows[0])
        return memoryview(rows[0]), PLAIN, (1, size, size, b""), (size,)
    data = bytearray().join(rows)
    size = len(data)
    return memoryview(data), PLAIN, rows_of_lengths(tuple(map(len, rows))), (size,)


def rows_of_lengths(lengths: tuple[int, ...]) -> Rows:
    """Rows of these lengths, two or more, which are end to end."""
    offsets = array("q", itertools.accumulate(lengths, initial=0))
    return len(lengths), min(lengths), max(lengths), offsets.tobytes()


_MAKERS: dict[type, Callable[[Any], _Made]] = {
    RaggedView: _of_view,
    np.ndarray: _of_array,
    list: _of_objects,
}
