"""Where the rows of columns lie in several messages, from headers and offsets; no cell is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec.errors import ArgumentKeyError, WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, as_bytes
from jagcodec.ragged.copy_rows import gathered
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.dtypes import torch_dtype
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.narrow import widened
from jagcodec.wire.spec import BITS, INDIRECT, PLAIN, STORED_WIDTHS, Kind
from jagcodec.wire.stacked import Frames, Stack


class Place(NamedTuple):
    """Where a column lies in each of several messages.

    Attributes:
        kind: TENSOR, JAGGED or NON_TENSOR_ROWS.
        name: The dtype of its cells; uint8 of documents.
        dtype: The same as torch calls it.
        inner: Dims of a cell.
        start: (messages,) bytes before its first cell, as if all frames lay end to end.
        cells: (messages,) how many it has; bytes of documents.
        group: (messages,) its ragged group; of a rectangle anything.
        stored: (messages,) how its cells are stored.
        narrow: Whether some are not stored as they are.
    """

    kind: Kind
    name: str
    dtype: torch.dtype
    inner: tuple[int, ...]
    start: IntArray
    cells: IntArray
    group: IntArray
    stored: IntArray
    narrow: bool

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell, as wide as its dtype."""
        return math.prod(self.inner) * self.dtype.itemsize


class _Rows(NamedTuple):
    """The rows of columns.

    Attributes:
        splits: How long they are.
        begins: (N,) where they begin in their messages, in cells.
        cells: (messages,) how many cells they have there.
    """

    splits: RowSplits
    begins: IntArray
    cells: IntArray


_FEW_ROWS = 8
"""Of each message, on average; to say where so few begin takes less memory than the messages do."""


class Messages:
    """Several messages in memory: where the rows of their columns lie, from headers and offsets.

    Attributes:
        counts: (messages,) rows of the batch in each.
        firsts: (messages,) rows of all messages before it.
        which: For each batch that is joined, the message that it is in.
        in_order: Whether the batches are all rows of the messages, one message after the other.
        metas: (messages,) by which equal `meta`s are known without being read; None: there is none.
    """

    def __init__(
        self,
        counts: IntArray,
        stacks: Sequence[Stack],
        frames: Frames,
        which: Sequence[int],
        *,
        in_order: bool = True,
        beside: bool = False,
    ) -> None:
        """`beside`: whether anything stands next to the batch in some of the messages."""
        self.which: Sequence[int] = which
        self.in_order: bool = in_order
        self.counts: IntArray = counts
        self.firsts: IntArray = counts.cumsum() - counts
        self.metas: list[Any] = list(range(len(counts)))
        self._stacks = [(stack, stack.columns) for stack in stacks]
        self._frames = frames
        if not beside:
            for stack in stacks:
                for i, values in zip(stack.members.tolist(), stack.values, strict=True):
                    self.metas[i] = None if values == NO_VALUES else (id(stack.node), values)
        # Where each frame begins if all lie end to end; one more, for messages without frames.
        self._bases = np.zeros(len(frames.sizes) + 1, dtype=np.int64)
        np.add.accumulate(frames.sizes, out=self._bases[1:])
        self._places: dict[str, Place | None] = {}
        self._rows: dict[bytes | None, _Rows | None] = {}
        self._views: dict[str, RaggedView | None] = {}

    def place(self, name: str) -> Place | None:
        """Where a column lies; None if it has to be read from each message.

        Because messages differ in the column, its rows are made of parts, or it is of another kind.
        """
        if name not in self._places:
            self._places[name] = self._find(name)
        return self._places[name]

    def _find(self, name: str) -> Place | None:
        form: tuple[Any, ...] | None = None
        start, cells, group, stored = np.empty((4, len(self.counts)), dtype=np.int64)
        for stack, columns in self._stacks:
            node, numbers = columns[name], stack.numbers
            i, dims = node.number, numbers[:, node.dims : node.end]
            dtype = "uint8"
            if node.kind is Kind.NON_TENSOR_ROWS:
                dims = numbers[:, i + 4 : i + 5]
            elif node.kind is Kind.TENSOR or (node.kind is Kind.JAGGED and node.fields[2] == 1):
                dtype = node.fields[0]
            else:
                return None
            own = (node.kind, dtype, tuple(dims[0, 1:].tolist()))
            form = form or own
            if own != form or not dims.shape[1] or (own[2] and (dims[:, 1:] != own[2]).any()):
                return None
            buffer, offset, how = numbers[:, i], numbers[:, i + 1], numbers[:, i + 2]
            if not dims.all():  # what is empty lies anywhere
                buffer, offset, how = (dims.all(axis=1) * each for each in (buffer, offset, how))
            # Most often there is one stack, of all messages.
            members = stack.members if len(self._stacks) > 1 else slice(None)
            start[members] = self._bases[self._frames.first[members] + buffer] + offset
            cells[members] = dims[:, 0]
            stored[members] = how
            if node.kind is not Kind.TENSOR:
                group[members] = numbers[:, i + 3]
        most = int(stored.max(initial=PLAIN))
        if form is None or most >= INDIRECT:
            return None
        kind, name, inner = form
        with suppress(WireFormatError):  # a dtype that this torch has not: for who reads it
            return Place(
                kind, name, torch_dtype(name), inner, start, cells, group, stored, most > PLAIN
            )
        return None

    def _widened(self, place: Place) -> tuple[tuple[ByteArray, ...], IntArray]:
        """Memory in which all cells are as wide as their dtype, widened together; `start` in it."""
        memory, starts, end = [*self._frames.buffers], place.start.copy(), int(self._bases[-1])
        itemsize = place.dtype.itemsize
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
        """All rows of a column where they lie; those of a rectangle are one cell each.

        None if they have to be read from each message; or they are not the rows of their messages,
        or not sound: then it is for the reader of one message to say so.
        """
        if name not in self._views:
            place = self.place(name)
            self._views[name] = None if place is None else self._view(place)
        return self._views[name]

    def _view(self, place: Place) -> RaggedView | None:
        rows, cell = self._rows_of(place), place.cell_bytes
        if rows is None or (rows.cells != place.cells).any():
            return None
        memory, start = self._frames.buffers, place.start
        if place.narrow:
            memory, start = self._widened(place)
        dtype, shape = place.dtype, (rows.splits.total, *place.inner)
        few = rows.splits.rows <= _FEW_ROWS * len(self.counts)
        if few or cell * rows.splits.total >= 8 * rows.splits.rows:
            starts = rows.begins * cell
            starts += np.repeat(start, self.counts)
            return RaggedView(memory, dtype, shape, 1, starts, rows.splits)
        # Rows that take less memory than to say where they begin.
        messages = RowSplits.from_lengths(rows.cells)
        data: Any = gathered([RaggedView(memory, dtype, shape, 1, start, messages)])[0]
        return RaggedView(as_bytes(data), dtype, shape, 1, None, rows.splits)

    def _rows_of(self, place: Place) -> _Rows | None:
        """The rows of a column, found once for all columns of the same ones."""
        key = None if place.kind is Kind.TENSOR else place.group.tobytes()
        if key is None and not (place.cell_bytes and (place.cells == self.counts).all()):
            return None  # before anything is made for each of the rows, which nothing vouches for
        if key not in self._rows:
            if key is None:
                lengths: IntArray | None = np.ones(int(self.counts.sum()), dtype=np.int64)
            else:
                lengths = self._lengths(place.group)
            self._rows[key] = None if lengths is None else self._found(lengths)
        return self._rows[key]

    def _found(self, lengths: IntArray) -> _Rows | None:
        if len(lengths) * int(lengths.max(initial=0)) >= 1 << 62:
            return None  # cells of no bytes may be many
        splits = RowSplits.from_lengths(lengths)
        ends = splits.host[self.firsts + self.counts]
        begins = splits.host[self.firsts]
        return _Rows(splits, splits.starts - np.repeat(begins, self.counts), ends - begins)

    def _lengths(self, groups: IntArray) -> IntArray | None:
        """The lengths of the rows in a ragged group of each message; None if they are not sound."""
        buffer, offset, rows, low, high = np.empty((5, len(self.counts)), dtype=np.int64)
        numbers = (buffer, offset, rows, low, high)
        for stack, _ in self._stacks:
            index = np.arange(len(stack.members)), groups[stack.members]
            for number, found in zip(numbers, stack.groups[index].T, strict=True):
                number[stack.members] = found
        if (rows != self.counts).any():
            return None
        lengths = np.repeat(high, rows)
        many = np.flatnonzero(rows > 1)
        if len(many):
            counts = rows[many] + 1
            frames = (self._frames.first[many] + buffer[many]).tolist()
            at = zip(frames, counts.tolist(), offset[many].tolist(), strict=True)
            # A copy: offsets that were checked must not change with the messages' memory.
            buffers = self._frames.buffers
            offsets = np.concatenate(
                [np.frombuffer(buffers[i], np.int64, held, start) for i, held, start in at]
            )
            firsts = counts.cumsum() - counts
            steps = offsets[1:] - offsets[:-1]
            of_rows = np.ones(len(steps), dtype=bool)
            of_rows[firsts[1:] - 1] = False
            steps = steps[of_rows]
            begins = firsts - np.arange(len(many))
            if (
                offsets[firsts].any()
                or (offsets < 0).any()
                or (np.minimum.reduceat(steps, begins) != low[many]).any()
                or (np.maximum.reduceat(steps, begins) != high[many]).any()
            ):
                return None
            lengths[np.repeat(rows > 1, rows)] = steps
        return lengths


def same_fields(batches: Iterable[tuple[int, Sequence[str]]], where: str) -> Sequence[str]:
    """The columns of the first batch, which all must have."""
    first: Sequence[str] | None = None
    for i, names in batches:
        if first is None or names == first:
            first = names
            continue
        for name in dict.fromkeys(first).keys() ^ dict.fromkeys(names).keys():
            raise ArgumentKeyError(
                "no_such_field",
                f"{where} of batch {i}",
                f"expected the columns of the first batch, found {name!r} "
                f"{'missing' if name in first else 'besides'}; select the ones that all have",
            )
    return first or ()
