"""What needs a place in a message, placed: as buffers, numbers, and rows still to be copied.

Of the phases of encoding (see `encoder`) this is the second and the third.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jagcodec import rowcopy
from jagcodec.errors import ArgumentError, UnsupportedTypeError
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, array_bytes, as_bytes, flat_bytes
from jagcodec.ragged.copy_rows import copy_task, gathered, values_of
from jagcodec.ragged.nested import view_of_parts
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView
from jagcodec.rowcopy import Copy
from jagcodec.wire import documents, numpy_dtypes
from jagcodec.wire.dtypes import TORCH_NAMES
from jagcodec.wire.elide import elide
from jagcodec.wire.frames import PendingMessage, blob_pieces, frames_of, written
from jagcodec.wire.header import NO_VALUES, write_header
from jagcodec.wire.lowered import (
    Cells,
    Dense,
    Documents,
    EndToEnd,
    Lowered,
    Packed,
    Ragged,
    Run,
)
from jagcodec.wire.schema import Group
from jagcodec.wire.spec import (
    ALIGNMENT,
    GAPS,
    INDIRECT,
    INTEGER_DTYPES,
    MAX_UNBACKED_ROWS,
    NO_INDEX,
    ONE_OBJECT,
    PLAIN,
    SMALL_BUFFER,
)


def with_header(
    lowered: Lowered,
    numbers: list[int],
    groups: list[Group],
    buffers: list[Any],
    checksum: bool,
    write: Callable[[list[ByteArray]], None],
    sources: Callable[[], list[np.ndarray[Any, Any]]],
) -> PendingMessage:
    """The message of what was placed; see `PendingMessage`."""
    sizes = [part if type(part) is int else part.nbytes for part in buffers]
    payload = sum(sizes)
    for path, rows in lowered.unbacked:
        if rows > payload:
            raise UnsupportedTypeError(
                "too_large",
                path,
                f"expected at most {MAX_UNBACKED_ROWS} rows without data, found {rows}",
            )
    checksums = None
    if checksum:
        buffers = written(buffers, write)
        checksums = [zlib.crc32(part.data) for part in buffers]
        write, sources = nothing_left, list
    try:
        values = documents.packer().pack(lowered.values) if lowered.values else NO_VALUES
        header = write_header(lowered.schema, numbers, values, groups, sizes, checksums)
    except ValueError as error:
        raise UnsupportedTypeError("too_large", "$", f"msgpack: {error}") from error
    return PendingMessage(header, buffers, write, sources)


def nothing_left(memory: list[ByteArray]) -> None:
    """Writes what is left to be written of a message that is finished."""


class Placing:
    """The state of one walk over lowered items: where everything lies in the message."""

    def __init__(
        self,
        copies: HostCopies,
        keep_on: torch.device | None,
        *,
        elide: bool = False,
    ) -> None:
        self._copies_of = copies
        self._elide = elide
        self._keep_on = keep_on
        self._numbers: list[int] = []
        self._pool = RowSplitsPool()
        self._groups: list[Group] = []
        self._group_of: dict[int, int] = {}
        # Frame 1: how long it is so far, and what is to be written to it, by offset: contiguous.
        self._small_size = 0
        self._small: list[tuple[int, np.ndarray[Any, Any]]] = []
        # The same as bytes, where no rows are still to be copied to it.
        self._first: ByteArray | None = None
        # The other frames; an int is the size of one that is still to be written.
        self._large: list[Any] = []
        # Where cells lie that columns may share.
        self._shared: dict[Cells, tuple[int, int, int]] = {}
        # Rows to be copied: the frame, the offset in it, and their bytes.
        self._rows: list[tuple[int, int, int, RaggedView]] = []

    def message(self, lowered: Lowered, checksum: bool) -> PendingMessage:
        """The message of a lowered value."""
        self._place(lowered.items)
        buffers: list[Any] = []
        if self._small_size or self._large:
            if self._small and not (self._rows and self._rows_in_first()):
                self._first = self._joined()
            buffers = [self._small_size if self._first is None else self._first, *self._large]
        numbers, groups = self._numbers, self._groups
        return with_header(lowered, numbers, groups, buffers, checksum, self._fill, self._sources)

    def _place(self, items: list[Any]) -> None:
        if self._elide or any(type(item) in _NARROWABLE and item.narrow for item in items):
            items = self._end_to_end(items)
        if self._elide:
            items = elide(items)
        numbers, group_of = self._numbers, self._group_of
        for item in items:
            kind = type(item)
            if kind is int:
                numbers.append(item)
            elif kind is RaggedView or kind is Ragged:
                view = item if kind is RaggedView else self._view(item)
                row_splits, starts, shape = view.row_splits, view.starts, view.shape
                memory: Any = view.memory
                in_order = starts is None and type(memory) is np.ndarray
                if in_order:
                    size = memory.nbytes
                else:
                    if starts is not None:
                        dim = view.ragged_dim - 1
                        shape = (*shape[:dim], row_splits.total, *shape[dim + 1 :])
                    size = view.dtype.itemsize
                    for extent in shape:
                        size *= extent
                if self._keep_on is not None and view.device == self._keep_on:
                    numbers += (*self._keep(values_of(view)), PLAIN)
                elif size >= SMALL_BUFFER:
                    # Rows that lie in order already are sent from where they lie.
                    self._large.append(size if starts is not None else _bytes_of(view))
                    numbers += (len(self._large), 0, PLAIN)
                    if starts is not None:
                        self._rows.append((len(self._large), 0, size, view))
                elif size:
                    offset = (self._small_size + 63) & -ALIGNMENT
                    self._small_size = offset + size
                    if in_order:
                        self._small.append((offset, memory))
                    else:
                        self._rows.append((0, offset, size, view))
                    numbers += (0, offset, PLAIN)
                else:
                    numbers += (0, 0, PLAIN)
                group = group_of.get(id(row_splits))
                numbers.append(self._new_group(row_splits) if group is None else group)
                numbers += shape
            elif kind is Dense:
                self._place_cells(item)
            elif kind is EndToEnd:
                self._place_end_to_end(item)
            elif kind is Documents:
                self._place_documents(self._packed(item))
            elif kind is Packed:
                self._place_documents(item)
            else:
                numbers.append(int(item))  # a symbolic or numpy dim

    def _view(self, column: Ragged) -> RaggedView:
        """The rows of a jagged column, on the host but for a device that is to keep them."""
        source = column.source
        if type(source) is RaggedView:
            view = source
        else:
            parts: Any = source
            try:
                view = view_of_parts(parts, column.path, self._pool, self._copies_of)
            except ArgumentError as error:
                raise UnsupportedTypeError(error.reason, column.path, error.detail) from error
        memory: Any = view.memory
        on_host = not isinstance(memory, torch.Tensor) or memory.is_cpu
        if on_host or memory.device == self._keep_on:
            return view
        return replace(view, memory=self._copies_of.of(memory))

    def _new_group(self, row_splits: RowSplits) -> int:
        """The group of these rows, made or found."""
        one = self._pool.unique(row_splits)
        group = self._group_of.get(id(one))
        if group is None:
            group = len(self._groups)
            place = (0, 0)
            if one.rows > 1:  # of fewer rows the shortest and the longest say everything
                place = self._place_bytes(one.host.view(np.uint8))
            self._groups.append(Group(*place, one.rows, one.min, one.max))
            self._group_of[id(one)] = group
        self._group_of[id(row_splits)] = group
        return group

    def _place_cells(self, item: Dense) -> None:
        source, numbers = item.source, self._numbers
        if isinstance(source, torch.Tensor):
            if not source.is_cpu and source.device == self._keep_on:
                numbers += self._keep(source)
            else:
                numbers += self._place_bytes(as_bytes(self._copies_of.of(source)))
        elif isinstance(source, np.ndarray):
            plain = item.dtype is not None and source.flags.c_contiguous
            data = source.reshape(-1).view(np.uint8) if plain else None
            numbers += self._place_bytes(numpy_dtypes.cell_bytes(source) if data is None else data)
        elif isinstance(source, RaggedView):
            numbers += self._place_bytes(as_bytes(values_of(source)))
        else:
            parts = [as_bytes(self._copies_of.of(part)) for part in source]
            numbers += self._place_bytes(
                np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
            )
        if item.dtype is not None:
            numbers.append(PLAIN)

    def _packed(self, documents: Documents) -> Packed:
        made: dict[int, list[Any]] = {}  # rows may be one object
        for row in documents.rows:
            if id(row) not in made:
                made[id(row)] = [row] if isinstance(row, bytes) else self._message_in_row(row)
        return Packed([made[id(row)] for row in documents.rows])

    def _place_documents(self, documents: Packed) -> None:
        data, starts, row_splits = _laid_out(documents)
        if documents.like is None:
            place = (*self._place_bytes(data), PLAIN)
        else:
            runs = [Run(row_splits, Cells(data), Cells.of_index(starts))]
            stored = ONE_OBJECT if documents.one_object else INDIRECT + 1
            place = (*self._place_table(runs, 1, ragged=True), stored)
        self._numbers += (*place, self._new_group(row_splits), row_splits.total)

    def _message_in_row(self, row: Lowered) -> list[Any]:
        inner = Placing(self._copies_of, None)
        return blob_pieces(frames_of(inner.message(row, False)))

    # What columns share

    def _place_shared(self, cells: Cells) -> tuple[int, int, int]:
        """The place of cells that several columns may name."""
        known = self._shared.get(cells)
        if known is None:
            stored, data = cells.stored()
            known = self._shared[cells] = (*self._place_bytes(data), stored)
        return known

    def _place_table(self, runs: Sequence[Run], size: int, *, ragged: bool) -> tuple[int, int]:
        """The place of a table, with what it names placed before it; a cell takes `size` bytes."""
        table: list[int] = []
        for splits, cells, index in runs:
            place = self._place_shared(cells)
            starts = (NO_INDEX, 0, PLAIN) if index is None else self._place_shared(index)
            group = self._new_group(splits) if ragged else 0
            table += (group, *place, len(cells.data) // size, *starts)
        return self._place_bytes(np.array(table, dtype=np.int64).view(np.uint8))

    # Buffers

    def _place_bytes(self, data: ByteArray) -> tuple[int, int]:
        """A place for bytes that are there already."""
        size = data.nbytes
        if size == 0:
            return (0, 0)
        if size >= SMALL_BUFFER:
            self._large.append(data)
            return (len(self._large), 0)
        offset = self._small_size + -self._small_size % ALIGNMENT
        self._small_size = offset + size
        self._small.append((offset, data))
        return (0, offset)

    def _keep(self, tensor: torch.Tensor) -> tuple[int, int]:
        """A place for cells that stay on their device."""
        # Where there are none, too: it says which device an empty tensor belongs on.
        nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._large.append(flat_bytes(tensor) if tensor.numel() else nothing)
        return (len(self._large), 0)

    # Columns that may be stored otherwise than they are

    def _end_to_end(self, items: list[Any]) -> list[Any]:
        """The items with the cells of such columns end to end: integers that are stored narrow, and
        all cells where repeats are looked for; and then with documents as bytes.
        """
        made = list(items)
        apart: dict[int, RaggedView] = {}
        for i, item in enumerate(items):
            kind = type(item)
            if kind is Documents and self._elide:
                made[i] = self._packed(item)
            if kind not in (RaggedView, Ragged, Dense):
                continue
            dtype = TORCH_NAMES[item.dtype] if kind is RaggedView else item.dtype
            narrow = kind is not RaggedView and item.narrow and dtype in INTEGER_DTYPES
            if dtype is None or not (self._elide or narrow):
                continue
            if kind is Dense:
                source: Any = item.source
                if type(source) is np.ndarray:
                    data = numpy_dtypes.cell_bytes(source)
                elif source.is_cpu or source.device != self._keep_on:
                    data = as_bytes(self._copies_of.of(source))
                else:
                    continue
                made[i] = EndToEnd(Cells(data, dtype, narrow), None, tuple(source.shape), 0)
                continue
            view: RaggedView = item if kind is RaggedView else self._view(item)
            if self._keep_on is not None and view.device == self._keep_on:
                made[i] = view
                continue
            if view.starts is not None:
                apart[i] = view
            data = _NOTHING if i in apart else _bytes_of(view)
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
            place = self._place_table(runs, size, ragged=splits is not None)
            self._numbers += (*place, INDIRECT + len(runs))
        if splits is not None:
            self._numbers += (self._new_group(splits), *shape)

    # Copy

    def _fill(self, memory: Sequence[ByteArray]) -> None:
        """Write what was placed into memory for each buffer that is still to be written."""
        if not memory:
            return
        fresh = iter(memory)
        parts = (self._small_size if self._first is None else self._first, *self._large)
        targets = [next(fresh) if type(part) is int else None for part in parts]
        first: Any = targets[0]
        if first is not None:
            first.fill(0)  # between the buffers
            for offset, data in self._small:
                first[offset : offset + data.nbytes] = array_bytes(data)
        copies = []
        for buffer, offset, size, view in self._rows:
            target: Any = targets[buffer]
            target = target[offset : offset + size]
            if view.ragged_dim == 1 and type(view.memory) is np.ndarray:
                lengths = view.row_splits.lengths
                cell = size // view.row_splits.total
                copies.append(Copy(target, view.memory, None, view.starts, lengths, cell))
            else:
                copies.append(copy_task(view, target))
        rowcopy.copy_all(copies)

    def _rows_in_first(self) -> bool:
        return any(buffer == 0 for buffer, *_ in self._rows)

    def _joined(self) -> ByteArray:
        """Frame 1 of what is there already: one pass, where an array takes a call for each."""
        pieces: list[Any] = []
        end = 0
        for offset, data in self._small:
            pieces += (GAPS[offset - end], data)
            end = offset + data.nbytes
        return np.frombuffer(bytearray().join(pieces), dtype=np.uint8)

    def _sources(self) -> list[np.ndarray[Any, Any]]:
        """The memory that `_fill` reads."""
        sources: list[Any] = [data for _, data in self._small]
        for *_, view in self._rows:
            memory: Any = view.memory
            if isinstance(memory, tuple):
                sources += memory
            else:
                sources.append(as_bytes(memory) if isinstance(memory, torch.Tensor) else memory)
        return sources


_NARROWABLE = (Dense, Ragged)
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
        if len(row) > 1:
            # Zeros before a message, so that it lies at a multiple of 64.
            pieces.append(bytes(-end % ALIGNMENT))
            end += -end % ALIGNMENT
        pieces += row
        end += sum(map(len, row))
        ends.append(end)
    begins = np.array(starts, dtype=np.int64)
    row_splits = RowSplits.from_lengths(np.array(ends, dtype=np.int64) - begins)
    return np.frombuffer(bytearray().join(pieces), dtype=np.uint8), begins, row_splits


def _bytes_of(view: RaggedView) -> ByteArray:
    """The bytes of rows that lie end to end."""
    memory: Any = view.memory
    return as_bytes(memory) if isinstance(memory, torch.Tensor) else array_bytes(memory)
