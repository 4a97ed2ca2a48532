"""`Placing`: items to buffers, numbers, and rows to copy.

Of the phases of encoding (see `encoder`) this is the second and the third.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec import rowcopy
from jagcodec.errors import ArgumentError, UnsupportedTypeError
from jagcodec.memory.blocks import allocate_together
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, array_bytes, as_bytes
from jagcodec.ragged.copy_rows import copy_task, gathered, values_of
from jagcodec.ragged.nested import view_of_parts
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView
from jagcodec.rowcopy import Copy
from jagcodec.wire import numpy_dtypes
from jagcodec.wire.dtypes import NUMPY_NAMES, TORCH_NAMES
from jagcodec.wire.elide import elide
from jagcodec.wire.frames import Frame, PendingMessage, blob_pieces, frames_of
from jagcodec.wire.header import NO_VALUES, write_header
from jagcodec.wire.lowered import (
    Cells,
    Columns,
    Dense,
    Documents,
    EndToEnd,
    InOrder,
    Lowered,
    Packed,
    Ragged,
    Run,
)
from jagcodec.wire.spec import (
    ALIGNMENT,
    BLOBS,
    GAPS,
    INDIRECT,
    INTEGER_DTYPES,
    MAX_UNBACKED_ROWS,
    NO_INDEX,
    ONE_OBJECT,
    PLAIN,
    SMALL_BUFFER,
    Code,
)

Place: TypeAlias = tuple[int, int]
"""A buffer, and an offset in it."""

_NOWHERE: Place = (0, 0)
"""The place of values without bytes."""

_NO_COPIES = HostCopies()


class GrowingFrames:
    """The frames of a message as they fill: small buffers end to end in frame 1, then the large."""

    __slots__ = ("_parts", "_rows", "_size", "_small")

    def __init__(self) -> None:
        # The frames: bytes, or how many are still to be written.
        self._parts: list[Any] = [0]
        self._size = 0  # of frame 1
        # The contents of frame 1: the offset, and contiguous memory.
        self._small: list[tuple[int, Any]] = []
        # Rows to be copied: the frame, the offset in it, and their bytes.
        self._rows: list[tuple[int, int, int, RaggedView]] = []

    def put(self, data: Any) -> Place:
        """A place for contiguous memory."""
        size = data.nbytes
        if size >= SMALL_BUFFER:
            self._parts.append(array_bytes(data) if type(data) is np.ndarray else data)
            return len(self._parts) - 1, 0
        if not size:
            return _NOWHERE
        offset = (self._size + 63) & -ALIGNMENT
        self._size = offset + size
        self._small.append((offset, data))
        return 0, offset

    def reserve(self, view: RaggedView, size: int) -> Place:
        """A place for rows that are to be copied end to end, `size` bytes together."""
        if not size:
            return _NOWHERE
        if size >= SMALL_BUFFER:
            self._parts.append(size)
            at = len(self._parts) - 1, 0
        else:
            memory: Any = view.memory
            one = view.row_splits.rows == 1 and type(view.starts) is int
            if one and type(memory) is np.ndarray:
                return self.put(memory.reshape(-1)[: size // memory.itemsize])
            at = 0, (self._size + 63) & -ALIGNMENT
            self._size = at[1] + size
        self._rows.append((*at, size, view))
        return at

    def buffers(self) -> list[Any]:
        """The frames in their order: bytes, or how many are still to be written."""
        parts = self._parts
        if len(parts) == 1 and not self._size:
            parts.clear()
            return parts
        parts[0] = self._size
        if self._small and not any(row[0] == 0 for row in self._rows):
            # All of frame 1 is there: one pass, where `write` needs a call for each array.
            pieces: list[Any] = []
            end = 0
            for offset, data in self._small:
                pieces += (GAPS[offset - end], data)
                end = offset + data.nbytes
            parts[0] = np.frombuffer(bytearray().join(pieces), dtype=np.uint8)
            self._small = []
        return parts

    def write(self, memory: Sequence[ByteArray]) -> None:
        """Write the buffers that are still to be written, in their order."""
        fresh = iter(memory)
        targets = [next(fresh) if type(part) is int else None for part in self._parts]
        first: Any = targets[0] if targets else None
        if first is not None:
            first.fill(0)  # between the buffers
            for offset, data in self._small:
                first[offset : offset + data.nbytes] = np.frombuffer(data, np.uint8)
        copies = []
        for buffer, offset, size, view in self._rows:
            target: Any = targets[buffer]
            copies.append(copy_task(view, target[offset : offset + size]))
        rowcopy.copy_all(copies)

    def sources(self) -> list[np.ndarray[Any, Any]]:
        """The memory that `write` reads."""
        sources: list[Any] = [np.frombuffer(data, np.uint8) for _, data in self._small]
        for *_, view in self._rows:
            memory: Any = view.memory
            if isinstance(memory, tuple):
                sources += memory
            else:
                sources.append(as_bytes(memory) if isinstance(memory, torch.Tensor) else memory)
        return sources


class Placing:
    """The state of one walk over lowered items: the place of everything in the message."""

    def __init__(self, copies: HostCopies = _NO_COPIES) -> None:
        """`copies` are those of the tensors on devices."""
        self._copies = copies
        self._narrows = False
        self._pool = RowSplitsPool()
        self._frames = GrowingFrames()
        self._numbers: list[int] = []
        self._groups: list[tuple[int, ...]] = []
        # Ragged groups by the identity of their rows, which are kept, and by their offsets.
        self._group_of: dict[int, tuple[int, RowSplits]] = {}
        self._groups_by_offsets: dict[bytes, int] = {}
        self._documents = 0  # bytes of indirect ones that become objects
        # The places of cells that columns may share.
        self._shared: dict[Cells, tuple[int, int, int]] = {}

    def message(
        self,
        lowered: Lowered,
        *,
        narrows: bool = False,
        elides: bool = False,
    ) -> PendingMessage:
        """The message of a lowered value, some of whose items may be stored narrow, or elided."""
        items = lowered.items
        self._narrows = narrows  # also for messages in rows
        if narrows or elides:
            items = self._end_to_end(items, elides)
            items = elide(items) if elides else items
        self._place(items)
        frames = self._frames
        buffers = frames.buffers()
        sizes = [part if type(part) is int else part.nbytes for part in buffers]
        for path, rows in lowered.unbacked:
            if rows > sum(sizes):
                raise UnsupportedTypeError(
                    "too_large",
                    path,
                    f"expected at most {MAX_UNBACKED_ROWS} rows without data, found {rows}",
                )
        numbers, groups = self._numbers, self._groups
        try:
            header = write_header(lowered.schema, numbers, lowered.values, groups, sizes)
        except ValueError as error:
            raise UnsupportedTypeError("too_large", "$", f"msgpack: {error}") from error
        return PendingMessage(header, buffers, frames.write, frames.sources, self._documents)

    def _place(self, items: Sequence[Any]) -> None:
        numbers, frames = self._numbers, self._frames
        for item in items:
            kind = type(item)
            if kind is int:
                numbers.append(item)
            elif kind is RaggedView or kind is Ragged:
                view = item if kind is RaggedView else self._view(item)
                shape = view.shape if view.starts is None else view.values_shape
                if view.starts is None:
                    # Rows in order already are sent from where they are.
                    memory: Any = view.memory
                    at = frames.put(memory if type(memory) is np.ndarray else as_bytes(memory))
                else:
                    size = view.dtype.itemsize
                    for extent in shape:
                        size *= extent
                    at = frames.reserve(view, size)
                numbers += (*at, PLAIN, self._group(view.row_splits), *shape)
            elif kind is Dense:
                numbers += self._dense(item.source)
                if item.dtype is not None:
                    numbers.append(PLAIN)
            elif kind is EndToEnd:
                self._place_end_to_end(item)
            elif kind is Documents:
                self._place_documents(self._packed(item))
            elif kind is Packed:
                self._place_documents(item)
            else:
                numbers.append(int(item))  # a symbolic or numpy dim

    def _group(self, splits: RowSplits) -> int:
        """The ragged group of these rows, made or found."""
        known = self._group_of.get(id(splits))
        if known is not None:
            return known[0]
        offsets = splits.host.tobytes()
        group = self._groups_by_offsets.setdefault(offsets, len(self._groups))
        if group == len(self._groups):
            # Of fewer than two rows the shortest and the longest are all.
            at = self._frames.put(splits.host) if splits.rows > 1 else _NOWHERE
            self._groups.append((*at, splits.rows, splits.min, splits.max))
        self._group_of[id(splits)] = group, splits
        return group

    def _view(self, column: Ragged) -> RaggedView:
        """The rows of a jagged column, on the host."""
        source = column.source
        if type(source) is RaggedView:
            view = source
        else:
            parts: Any = source
            try:
                view = view_of_parts(parts, column.path, self._pool, self._copies)
            except ArgumentError as error:
                raise UnsupportedTypeError(error.reason, column.path, error.detail) from error
        memory: Any = view.memory
        if not isinstance(memory, torch.Tensor) or memory.is_cpu:
            return view
        return replace(view, memory=self._copies.of(memory))

    def _dense(self, source: Any) -> Place:
        """The place of the cells of an array, a tensor, a view's rows, or tensors end to end."""
        put = self._frames.put
        if isinstance(source, np.ndarray):
            plain = source.flags.c_contiguous and source.dtype.kind in "biufc"
            return put(source if plain else numpy_dtypes.cell_bytes(source))
        if isinstance(source, torch.Tensor):
            return put(as_bytes(self._copies.of(source)))
        if isinstance(source, RaggedView):
            return put(as_bytes(values_of(source)))
        parts = [as_bytes(self._copies.of(part)) for part in source]
        return put(np.concatenate(parts)) if parts else _NOWHERE

    # Rows of documents

    def _packed(self, documents: Documents) -> Packed:
        made: dict[int, list[Any]] = {}  # rows may be one object
        blobs = bool(documents.rows) and isinstance(documents.rows[0], Lowered)
        for row in documents.rows:
            if id(row) not in made:
                made[id(row)] = [row] if isinstance(row, bytes) else self._message_in_row(row)
        return Packed(blobs, [made[id(row)] for row in documents.rows])

    def _message_in_row(self, row: Lowered) -> list[Any]:
        message = Placing(self._copies).message(row, narrows=self._narrows)
        pieces = blob_pieces(frames_of(message))
        return [*pieces, bytes(-sum(map(len, pieces)) % ALIGNMENT)]

    def _place_documents(self, documents: Packed) -> None:
        data, starts, row_splits = _laid_out(documents)
        if documents.like is None:
            place, stored = self._frames.put(data), PLAIN
        else:
            runs = [Run(row_splits, Cells(data), Cells.of_index(starts))]
            self._documents += len(data) if documents.one_object else row_splits.total
            stored = ONE_OBJECT if documents.one_object else INDIRECT + 1
            place = self._place_table(runs, 1, ragged=True)
        stored += BLOBS if documents.blobs else 0
        self._numbers += (*place, stored, self._group(row_splits), row_splits.total)

    # Columns that are stored otherwise than they are

    def _end_to_end(self, items: Sequence[Any], elides: bool) -> list[Any]:
        """The items with the cells of such columns end to end: integers that are stored narrow, and
        all cells where repeats are looked for; and then with documents as bytes.
        """
        made = list(items)
        apart: dict[int, RaggedView] = {}
        for i, item in enumerate(items):
            kind = type(item)
            if kind is Documents and elides:
                made[i] = self._packed(item)
            if kind not in (RaggedView, Ragged, Dense):
                continue
            dtype = TORCH_NAMES[item.dtype] if kind is RaggedView else item.dtype
            narrow = kind is not RaggedView and item.narrow and dtype in INTEGER_DTYPES
            if dtype is None or not (elides or narrow):
                continue
            if kind is Dense:
                source: Any = item.source
                if type(source) is np.ndarray:
                    data = numpy_dtypes.cell_bytes(source)
                else:
                    data = as_bytes(self._copies.of(source))
                made[i] = EndToEnd(Cells(data, dtype, narrow), None, tuple(source.shape), 0)
                continue
            view: RaggedView = item if kind is RaggedView else self._view(item)
            data = _NOTHING
            if view.starts is not None:
                apart[i] = view
            else:
                memory: Any = view.memory
                own = isinstance(memory, torch.Tensor)
                data = as_bytes(memory) if own else array_bytes(memory)
            shape = self._pool.unique(view.row_splits), view.values_shape, view.ragged_dim
            made[i] = EndToEnd(Cells(data, dtype, narrow), *shape)
        for i, values in zip(apart, gathered(apart.values()), strict=True):
            made[i] = made[i]._replace(cells=made[i].cells.like(as_bytes(values)))
        return made

    def _place_end_to_end(self, item: EndToEnd) -> None:
        cells, splits, shape, _, runs = item
        if runs is None:
            self._numbers += self._place_shared(cells)
        else:
            size = len(cells.data) // shape[0]
            at = self._place_table(runs, size, ragged=splits is not None)
            self._numbers += (*at, INDIRECT + len(runs))
        if splits is not None:
            self._numbers += (self._group(splits), *shape)

    def _place_shared(self, cells: Cells) -> tuple[int, int, int]:
        """The place of cells that several columns may name."""
        known = self._shared.get(cells)
        if known is None:
            stored, data = cells.stored()
            known = self._shared[cells] = (*self._frames.put(data), stored)
        return known

    def _place_table(self, runs: Sequence[Run], size: int, *, ragged: bool) -> Place:
        """The place of a table, with what it names placed before it; a cell has `size` bytes."""
        table: list[int] = []
        for splits, cells, index in runs:
            at = self._place_shared(cells)
            starts = (NO_INDEX, 0, PLAIN) if index is None else self._place_shared(index)
            group = self._group(splits) if ragged else 0
            table += (group, *at, len(cells.data) // size, *starts)
        return self._frames.put(np.array(table, dtype=np.int64))


_NOTHING: ByteArray = np.empty(0, dtype=np.uint8)


def _laid_out(documents: Packed) -> tuple[ByteArray, IntArray, RowSplits]:
    """The bytes of rows of documents, where each begins, and how long they are."""
    pieces: list[Any] = []
    starts: list[int] = []
    ends: list[int] = []
    end = 0
    for i, row in enumerate(documents.rows):
        if documents.like is not None and documents.like[i] != i:
            starts.append(starts[documents.like[i]])
            ends.append(ends[documents.like[i]])
            continue
        starts.append(end)
        pieces += row
        end += sum(map(len, row))
        ends.append(end)
    begins = np.array(starts, dtype=np.int64)
    row_splits = RowSplits.from_lengths(np.array(ends, dtype=np.int64) - begins)
    return np.frombuffer(bytearray().join(pieces), dtype=np.uint8), begins, row_splits


def frames_in_order(tree: Any, rows: int, columns: Iterable[InOrder], values: bytes) -> list[Frame]:
    """The message of `rows` rows, one or more, of plain columns.

    The frames are those that `Placing` makes of the same columns. It makes no object for a column,
    so that a message of few rows costs little more than its bytes.

    Args:
        tree: The schema of a TensorDict with one batch dim.
        rows: How many.
        columns: In the order of the schema.
        values: The packed documents of the header.
    """
    numbers = [rows]
    groups: list[tuple[int, ...]] = []
    group_of: dict[tuple[int, int, bytes], int] = {}
    pieces: list[Any] = []
    large: list[Any] = []  # memory, or rows that are to be copied to new memory
    apart: list[tuple[int, int, int, tuple[Any, ...]]] = []
    end = 0
    data: Any
    for data, own, shape in columns:
        is_apart = type(data) is RaggedView
        size = _size_of(data, shape) if is_apart else data.nbytes
        buffer = at = 0
        if size >= SMALL_BUFFER:
            large.append(size if is_apart else memoryview(data).cast("B"))
            buffer = len(large)
        elif size:
            at = (end + 63) & -ALIGNMENT
            pieces += (GAPS[at - end], bytes(size) if is_apart else data)
            end = at + size
        if is_apart and size:
            starts, splits = data.starts, data.row_splits
            task = (data.memory, None, starts, splits.lengths, size // splits.total)
            apart.append((buffer, at, at + size, task))
        if own is None:
            numbers += (buffer, at, PLAIN, *shape)
            continue
        group = group_of.get(own)
        if group is None:
            group = group_of[own] = len(groups)
            low, high, offsets = own
            place = _NOWHERE
            if len(offsets) >= SMALL_BUFFER:
                large.append(memoryview(offsets))
                place = (len(large), 0)
            elif offsets:
                place = (0, (end + 63) & -ALIGNMENT)
                pieces += (GAPS[place[1] - end], offsets)
                end = place[1] + len(offsets)
            groups.append((*place, rows, low, high))
        numbers += (buffer, at, PLAIN, group, *shape)
    if large or end:
        large.insert(0, memoryview(bytearray().join(pieces)))
    if apart:
        fresh = iter(allocate_together([part for part in large if type(part) is int]))
        large = [next(fresh).data if type(part) is int else part for part in large]
        rowcopy.copy_all([Copy(large[k][a:b], *task) for k, a, b, task in apart])
    sizes = [buffer.nbytes for buffer in large]
    return [write_header(tree, numbers, values, groups, sizes), *large]


def _size_of(view: RaggedView, shape: tuple[int, ...]) -> int:
    size = view.dtype.itemsize
    for extent in shape:
        size *= extent
    return size


_PLAIN = frozenset((RaggedView, np.ndarray))


def frames_of_columns(columns: Columns) -> list[Frame] | None:
    """The message of rows of columns without options; None if a column is not plain."""
    rows = columns.rows
    if not (
        _PLAIN.issuperset(map(type, columns.columns.values())) and 0 < rows <= MAX_UNBACKED_ROWS
    ):
        return None
    nodes: list[Any] = []
    in_order: list[InOrder] = []
    splits: RowSplits | None = None
    for column in columns.columns.values():
        kind = type(column)
        if kind is RaggedView:
            memory, starts = column.memory, column.starts
            dtype = TORCH_NAMES.get(column.dtype)
            plain = type(memory) is np.ndarray and column.runs is None and column.ragged_dim == 1
            if not plain or dtype is None:
                return None
            if splits is not column.row_splits:
                splits = column.row_splits
                own = splits.min, splits.max, splits.host.tobytes() if rows > 1 else b""
            shape = (splits.total, *column.shape[1:])
            data = column
            if starts is None:
                data = memory
            elif rows == 1 and type(starts) is int:
                data = memory.reshape(-1)[: math.prod(shape)]
            in_order.append((data, own, shape))
            nodes.append((Code.JAGGED, dtype, len(shape), 1))
        elif column.flags.c_contiguous:
            shape = column.shape
            in_order.append((column, None, shape))
            nodes.append((Code.TENSOR, NUMPY_NAMES[column.dtype], len(shape)))
        else:
            return None
    tree = (Code.TENSORDICT, 1, tuple(columns.columns), *nodes)
    return frames_in_order(tree, rows, in_order, NO_VALUES)
