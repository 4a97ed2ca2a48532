"""Where rows are in several messages, from headers and offsets; reads no cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, as_bytes
from jagcodec.ragged.copy_rows import gathered
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.dtypes import torch_dtype
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.narrow import widened
from jagcodec.wire.spec import BITS, INDIRECT, PLAIN, STORED_WIDTHS, Kind
from jagcodec.wire.stacked import Frames, Stack, StackedCells


class Place(NamedTuple):
    """The place of a column in each of several messages.

    Attributes:
        kind: TENSOR, JAGGED or NON_TENSOR_ROWS.
        name: The dtype of its cells; uint8 of documents.
        inner: Dims of a cell.
        start: (messages,) bytes before its first cell, as if all frames were end to end.
        cells: (messages,) how many it has; bytes of documents.
        group: (messages,) its ragged group; None of a rectangle.
        stored: (messages,) how its cells are stored.
        narrow: Whether some are not stored as they are.
    """

    kind: Kind
    name: str
    inner: tuple[int, ...]
    start: IntArray
    cells: IntArray
    group: IntArray | None
    stored: IntArray
    narrow: bool


class _Rows(NamedTuple):
    """The rows of columns: how long they are; (N,) at which cell of its message each begins; and
    (messages,) how many cells they have there.
    """

    splits: RowSplits
    begins: IntArray
    cells: IntArray


_FEW_ROWS = 8
"""Of each message, on average; the starts of so few need less memory than the messages."""


class Messages:
    """Several messages in memory, all rows of each.

    Attributes:
        metas: (messages,) by which equal `meta`s are known without being read; None: no meta.
    """

    def __init__(self, counts: IntArray, stacks: Sequence[Stack], frames: Frames) -> None:
        """Messages of (messages,) `counts` of rows."""
        self.metas: list[Any] = [None] * len(counts)
        self._counts = counts
        self._one_each = bool((counts == 1).all())
        self._firsts = counts.cumsum() - counts
        self._stacks = [
            (s, dict(zip(s.node.fields[-1], s.node.children, strict=True))) for s in stacks
        ]
        self._frames = frames
        for stack in stacks:
            for i, values in zip(stack.members.tolist(), stack.values, strict=True):
                if values != NO_VALUES:
                    self.metas[i] = id(stack.node), values
        self._places: dict[str, Place | None] = {}
        self._rows: dict[bytes | None, _Rows | None] = {}
        self._views: dict[str, RaggedView | None] = {}

    def _stacked(self, parts: Sequence[IntArray]) -> IntArray:
        """(messages, ...) from the arrays of each stack."""
        if len(parts) == 1:  # most often
            return parts[0]
        whole = np.concatenate(parts)
        whole[np.concatenate([stack.members for stack, _ in self._stacks])] = whole.copy()
        return whole

    def place(self, name: str) -> Place | None:
        """The place of a column; None if it must be read from each message.

        Because messages differ in the column, its rows are indirect, or it is of another kind.
        """
        if name not in self._places:
            with suppress(WireFormatError):  # a dtype that this torch has not: for who reads it
                self._places[name] = self._find(name)
        return self._places.setdefault(name, None)

    def kind(self, name: str) -> Kind:
        """Of a column that has a place."""
        place = self.place(name)
        return Kind.JAGGED if place is None else place.kind

    def _find(self, name: str) -> Place | None:
        form: tuple[Kind, str, tuple[int, ...]] | None = None
        found: list[StackedCells] = []
        for stack, columns in self._stacks:
            node = columns[name]
            if node.kind is Kind.NON_TENSOR_ROWS:
                dtype = "uint8"
            elif node.kind is Kind.TENSOR or (node.kind is Kind.JAGGED and node.fields[2] == 1):
                dtype = node.fields[0]
            else:
                return None
            cells = stack.cells(node)
            inner = tuple(cells.dims[0, 1:].tolist())
            own = node.kind, dtype, inner
            form = form or own
            if own != form or not cells.dims.shape[1]:
                return None
            if inner and (cells.dims[:, 1:] != inner).any():
                return None
            found.append(cells)
        if form is None:
            return None
        torch_dtype(form[1])
        buffers, offsets, hows, groups, dims = zip(*found, strict=True)
        held = self._stacked([each[:, 0] for each in dims])
        buffer, offset, how = map(self._stacked, (buffers, offsets, hows))
        if not held.all() or 0 in form[2]:  # empty columns may be anywhere
            some = (held > 0) & (math.prod(form[2]) > 0)
            buffer, offset, how = buffer * some, offset * some, how * some
        most = int(how.max(initial=PLAIN))
        if most >= INDIRECT:
            return None
        start = self._frames.starts[self._frames.first + buffer] + offset
        group = None if groups[0] is None else self._stacked(groups)
        return Place(*form, start, held, group, how, most > PLAIN)

    def _widened(self, place: Place, itemsize: int) -> tuple[tuple[ByteArray, ...], IntArray]:
        """Memory in which all cells are as wide as their dtype, widened together; `start` in it."""
        memory, end = [*self._frames.buffers], int(self._frames.starts[-1])
        starts = place.start.copy()
        for stored in np.unique(place.stored[place.stored != PLAIN]).tolist():
            members = np.flatnonzero(place.stored == stored)
            counts = place.cells[members] * math.prod(place.inner)
            sizes = (counts + 7) // 8 if stored == BITS else counts * STORED_WIDTHS[stored][0]
            if stored == BITS:  # of each message whole bytes
                counts = 8 * sizes
            rows, runs = self._frames.buffers, RowSplits.from_lengths(sizes)
            narrow = RaggedView(rows, torch.uint8, (runs.total,), 1, starts[members], runs)
            total = int(counts.sum())
            wide = widened(as_bytes(gathered([narrow])[0]), stored, place.name, total)
            starts[members] = end + (counts.cumsum() - counts) * itemsize
            memory.append(wide)
            end += len(wide)
        return tuple(memory), starts

    def view(self, name: str) -> RaggedView | None:
        """All rows of a column in place; those of a rectangle are one cell each.

        None if they have to be read from each message; or they are not the rows of their messages,
        or not sound: then the reader of one message reports it.
        """
        if name not in self._views:
            place = self.place(name)
            self._views[name] = None if place is None else self._view(place)
        return self._views[name]

    def _view(self, place: Place) -> RaggedView | None:
        dtype = torch_dtype(place.name)
        cell = math.prod(place.inner) * dtype.itemsize
        if place.group is None and not (cell and (place.cells == self._counts).all()):
            return None  # before anything is made for each of the rows, which nothing vouches for
        rows = self._rows_of(place.group)
        if rows is None or (rows.cells != place.cells).any():
            return None
        memory, start = self._frames.buffers, place.start
        if place.narrow:
            memory, start = self._widened(place, dtype.itemsize)
        splits = rows.splits
        shape = (splits.total, *place.inner)
        if splits.rows <= _FEW_ROWS * len(self._counts) or cell * splits.total >= 8 * splits.rows:
            starts = start
            if not self._one_each:
                starts = rows.begins * cell + np.repeat(start, self._counts)
            return RaggedView(memory, dtype, shape, 1, starts, splits)
        # Rows that need less memory than their starts.
        of_messages = RowSplits.from_lengths(rows.cells)
        data: Any = gathered([RaggedView(memory, dtype, shape, 1, start, of_messages)])[0]
        return RaggedView(as_bytes(data), dtype, shape, 1, None, splits)

    def _rows_of(self, group: IntArray | None) -> _Rows | None:
        """The rows in a ragged group of each message, or of rectangles; None if not sound."""
        key = None if group is None else group.tobytes()
        if key not in self._rows:
            rows = int(self._counts.sum())
            lengths = np.ones(rows, dtype=np.int64) if group is None else self._lengths(group)
            self._rows[key] = None if lengths is None else self._begun(lengths)
        return self._rows[key]

    def _begun(self, lengths: IntArray) -> _Rows | None:
        if len(lengths) * int(lengths.max(initial=0)) >= 1 << 62:
            return None  # cells of no bytes may be many
        splits = RowSplits.from_lengths(lengths)
        begins = splits.host[self._firsts]
        cells = splits.host[self._firsts + self._counts] - begins
        return _Rows(splits, splits.starts - np.repeat(begins, self._counts), cells)

    def _lengths(self, groups: IntArray) -> IntArray | None:
        """The lengths of the rows in a ragged group of each message; None if they are not sound."""
        found = [s.groups[np.arange(len(s.members)), groups[s.members]] for s, _ in self._stacks]
        buffer, offset, rows, low, high = self._stacked(found).T
        if (rows != self._counts).any():
            return None
        many = np.flatnonzero(rows > 1)
        if not len(many):
            return np.repeat(high, rows)
        frames = (self._frames.first[many] + buffer[many]).tolist()
        places = zip(frames, (rows[many] + 1).tolist(), offset[many].tolist(), strict=True)
        # A copy: offsets that were checked must not change with the messages' memory.
        buffers = self._frames.buffers
        offsets = np.concatenate(
            [np.frombuffer(buffers[i], np.int64, count, at) for i, count, at in places]
        )
        firsts = (rows[many] + 1).cumsum() - rows[many] - 1
        steps = np.delete(offsets[1:] - offsets[:-1], firsts[1:] - 1)
        begins = firsts - np.arange(len(many))
        if (
            offsets[firsts].any()
            or (offsets < 0).any()
            or (np.minimum.reduceat(steps, begins) != low[many]).any()
            or (np.maximum.reduceat(steps, begins) != high[many]).any()
        ):
            return None
        lengths = np.repeat(high, rows)
        lengths[np.repeat(rows > 1, rows)] = steps
        return lengths
