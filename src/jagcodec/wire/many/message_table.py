"""`MessageTable`: where the rows of a column are in many messages that are in memory.

It finds them by arithmetic on the numbers of all headers at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jagcodec.errors import WireFormatError
from jagcodec.memory import INT64_MAX, extent_of
from jagcodec.memory.arrays import ByteArray, IntArray
from jagcodec.rows.copy_bytes import gathered_bytes
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire.dtypes import DtypeName, cell_dtype
from jagcodec.wire.many.stacked import Stack
from jagcodec.wire.schema import GROUP, GROUP_NUMBERS, Node, size_at_code
from jagcodec.wire.spec import (
    BITS,
    IN_STACK,
    INDIRECT,
    TORCH_ITEMSIZES,
    Kind,
    is_widened_on_read,
)
from jagcodec.wire.stored.narrow import widened


class ColumnInPlace(NamedTuple):
    """A view of the rows of a column in several messages; a row of a rectangle is one cell."""

    kind: Kind
    dtype: str
    narrow: bool  # whether at least one message stores narrow cells
    view: RaggedView
    levels: int  # how deep documents may nest containers
    dims: RaggedView | None = None  # for rows that are arrays: their dims; `view` has their cells
    tensors: bool = False  # whether rows that are arrays are tensors


class _CellsInMessages(NamedTuple):
    """The places of a column's cells in several messages."""

    kind: Kind
    dtype: str
    inner: tuple[int, ...]  # the dims after the first, which are the same in all messages
    start: IntArray  # (messages,) the first byte, counted as if all frames were end to end
    storage_codes: IntArray  # (messages,)
    cell_counts: IntArray  # (messages,) the number of cells, which is the first dim
    group: IntArray | None  # (messages,) the ragged group; None for rectangles

    @property
    def size(self) -> int:
        """Bytes of one cell with its inner dims."""
        return math.prod(self.inner) * TORCH_ITEMSIZES[self.dtype]


class _GroupRows(NamedTuple):
    """The rows of a ragged group of each message, or of rectangles."""

    splits: RowSplits
    begins: IntArray  # (N,) the cell at which each row begins, counted within its message
    cells: IntArray  # (messages,) the number of cells of all rows of a message


_IN_GROUP = np.arange(GROUP_NUMBERS)

_SMALL_MESSAGE_ROWS = 8
"""With at most this many rows per message on average, starts take less memory than messages."""


class MessageTable:
    """All rows of several messages in memory, one after the other, read together."""

    def __init__(
        self, row_counts: IntArray, stacks: Sequence[Stack], buffers: Sequence[Sequence[ByteArray]]
    ) -> None:
        """`row_counts` has the rows of each message, and `buffers` the frames after its header."""
        self.stacks = stacks
        self._row_counts = row_counts
        self._first_rows = row_counts.cumsum() - row_counts
        # Puts numbers that are stack by stack into the order of the messages.
        self._order: Any = slice(None)
        if len(stacks) > 1:
            self._order = np.argsort(np.concatenate([stack.members for stack in stacks]))
        self._buffers: tuple[ByteArray, ...] = tuple(chain.from_iterable(buffers))
        self._first_buffers = _starts_of(buffers)
        self._starts = _starts_of(self._buffers)
        # The columns of each stack by name: searching a list of many names is slow.
        self._nodes = [
            dict(zip(stack.node.fields[-1], stack.node.children, strict=True)) for stack in stacks
        ]
        self._columns: dict[str, ColumnInPlace | None] = {}
        self._rows: dict[bytes, _GroupRows | None] = {}

    def column(self, name: str) -> ColumnInPlace | None:
        """The rows of a column in place; None if messages must be read one by one.

        They must if its form differs between messages, if it is elided, or if one message may have
        a fault: reading that message alone names the fault.
        """
        if name not in self._columns:
            self._columns[name] = None
            with suppress(WireFormatError):  # raised if this torch lacks the dtype
                self._columns[name] = self._column_in_place(name)
        column = self._columns[name]
        if column and column.view.dtype is not cell_dtype(column.dtype):  # torch was imported since
            view = replace(column.view, dtype=cell_dtype(column.dtype))
            column = self._columns[name] = column._replace(view=view)
        return column

    def tables_by_form(self, name: str) -> list[TableOfForm]:
        """A table for each form that a column of objects has in the messages.

        The list is empty if all messages have one form, or if the column is not one of objects.
        """
        by_form: dict[Any, list[Stack]] = {}
        for stack, nodes in zip(self.stacks, self._nodes, strict=True):
            by_form.setdefault(_form_of_objects(nodes[name]), []).append(stack)
        if None in by_form or len(by_form) < 2:
            return []
        tables = []
        for same_form in by_form.values():
            members = np.sort(np.concatenate([stack.members for stack in same_form]))
            stacks = [s._replace(members=np.searchsorted(members, s.members)) for s in same_form]
            bounds = zip(
                self._first_buffers[members], self._first_buffers[members + 1], strict=True
            )
            buffers = [self._buffers[start:end] for start, end in bounds]
            row_counts = self._row_counts[members]
            first_rows = row_counts.cumsum() - row_counts  # among the rows of these messages
            shifts = (self._first_rows[members] - first_rows).repeat(row_counts)
            rows = np.arange(row_counts.sum()) + shifts
            tables.append(TableOfForm(members, rows, MessageTable(row_counts, stacks, buffers)))
        return tables

    def examples(self, name: str) -> list[int]:
        """Messages among which each dtype and row shape of a column occurs, from headers alone.

        If one message of a stack differs from the first of the stack, it takes both.
        """
        examples = []
        for stack, nodes in zip(self.stacks, self._nodes, strict=True):
            node = nodes[name]
            examples.append(int(stack.members[0]))
            dims = stack.numbers[:, node.dims : node.end].copy()
            if node.kind in (Kind.TENSOR, Kind.JAGGED):
                dims[:, node.fields[2] - 1 if node.kind is Kind.JAGGED else 0] = 0  # not of a row
                others = np.flatnonzero((dims != dims[0]).any(axis=1))
                examples += stack.members[others[:1]].tolist()
        return sorted(examples)

    def _column_in_place(self, name: str) -> ColumnInPlace | None:
        nodes = [by_name[name] for by_name in self._nodes]
        if nodes[0].kind is not Kind.ARRAY_ROWS:
            return self._rows_in_place(nodes)
        if any(
            node.kind is not Kind.ARRAY_ROWS or node.fields != nodes[0].fields for node in nodes
        ):
            return None
        holder, tensors = nodes[0].fields
        values, dims = (self._rows_in_place([node.children[i] for node in nodes]) for i in (0, 1))
        if values is None or dims is None or holder != IN_STACK:
            return None
        narrow, view = values.narrow or dims.narrow, dims.view
        return values._replace(
            kind=Kind.ARRAY_ROWS, narrow=narrow, dims=view, tensors=bool(tensors)
        )

    def _rows_in_place(self, nodes: Sequence[Node]) -> ColumnInPlace | None:
        """The rows of a column, or of one child of it; `nodes` has its node in each stack."""
        cells = self._cells_of(nodes)
        if cells is None or not self._are_bounded(cells):
            return None
        rows = self._group_rows(cells.group)
        if rows is None or (rows.cells != cells.cell_counts).any():
            return None
        narrow = bool(is_widened_on_read(cells.storage_codes).any())
        levels = min(s.levels - node.depth for s, node in zip(self.stacks, nodes, strict=True))
        view = self._view_of_all(cells, rows, narrow)
        return ColumnInPlace(cells.kind, cells.dtype, narrow, view, levels)

    def _cells_of(self, nodes: Sequence[Node]) -> _CellsInMessages | None:
        """The places of a column's cells; None if the column's form differs between messages."""
        form, *others = {_in_place_form(node) for node in nodes}
        if form is None or others:
            return None
        kind, dtype = form[:2]
        numbers = self._in_order(
            stack.numbers[:, node.number : node.end]
            for stack, node in zip(self.stacks, nodes, strict=True)
        )
        buffer, offset, codes = numbers[:, :GROUP].T
        group = None if kind is Kind.TENSOR else numbers[:, GROUP]
        dims = numbers[:, GROUP if group is None else GROUP + 1 :]
        cell_counts, inner = dims[:, 0], tuple(dims[0, 1:].tolist())
        if (dims[:, 1:] != inner).any():
            return None
        filled = (cell_counts > 0) & (math.prod(inner) > 0)
        if not filled.all():  # ignore the place of a column without cells, which may be anywhere
            buffer, offset, codes = buffer * filled, offset * filled, codes * filled
        start = self._starts[self._first_buffers[:-1] + buffer] + offset
        return _CellsInMessages(kind, dtype, inner, start, codes, cell_counts, group)

    def _are_bounded(self, cells: _CellsInMessages) -> bool:
        """Whether the bytes of the messages limit the memory that a view of the column needs."""
        size = cells.size
        if not size:
            whole = extent_of(cells.inner) * TORCH_ITEMSIZES[cells.dtype]
            # If there are more cells, read each message: the error then names the column.
            if sum(cells.cell_counts.tolist()) * whole > INT64_MAX:
                return False
        if cells.group is None and not (size and (cells.cell_counts == self._row_counts).all()):
            return False
        return int(cells.storage_codes.max()) < INDIRECT  # elided columns are read one by one

    def _view_of_all(self, cells: _CellsInMessages, rows: _GroupRows, narrow: bool) -> RaggedView:
        """The rows of a column in all messages."""
        memory, start, size = self._buffers, cells.start, cells.size
        if narrow:
            memory, start = self._widened(cells)
        dtype, shape = cell_dtype(cells.dtype), (rows.splits.total, *cells.inner)
        is_small = rows.splits.rows <= _SMALL_MESSAGE_ROWS * len(self._row_counts)
        if is_small or size * rows.splits.total >= 8 * rows.splits.rows:
            starts = rows.begins * size + start.repeat(self._row_counts)
            return RaggedView(memory, dtype, shape, 1, starts, rows.splits)
        # Copy small rows: the copy takes less memory than an array of starts.
        of_messages = RowSplits.from_lengths(rows.cells)
        data = gathered_bytes([RaggedView(memory, dtype, shape, 1, start, of_messages)])[0]
        return RaggedView(data, dtype, shape, 1, None, rows.splits)

    def _in_order(self, numbers: Iterable[IntArray]) -> IntArray:
        """The numbers of all messages in the order of the messages, from those of each stack."""
        each = list(numbers)
        return each[0] if len(each) == 1 else np.concatenate(each)[self._order]

    def _widened(self, column: _CellsInMessages) -> tuple[tuple[ByteArray, ...], IntArray]:
        """The buffers with widened cells after them, and where each message's cells start."""
        memory, end, starts = [*self._buffers], int(self._starts[-1]), column.start.copy()
        elements = column.cell_counts * math.prod(column.inner)
        is_narrow = is_widened_on_read(column.storage_codes)
        for code in np.unique(column.storage_codes[is_narrow]).tolist():
            members = np.flatnonzero(column.storage_codes == code)
            counts = elements[members]
            sizes = (counts * size_at_code(column.dtype, code, 8) + 7) // 8
            if code == BITS:  # widen whole bytes: the bits of a message end at a byte
                counts = 8 * sizes
            runs = RowSplits.from_lengths(sizes)
            dtype = DtypeName("uint8")
            narrow = RaggedView(self._buffers, dtype, (runs.total,), 1, starts[members], runs)
            data = gathered_bytes([narrow])[0]
            wide = widened(data, code, column.dtype, int(counts.sum()))
            starts[members] = end + (counts.cumsum() - counts) * TORCH_ITEMSIZES[column.dtype]
            memory.append(wide)
            end += len(wide)
        return tuple(memory), starts

    def _group_rows(self, group: IntArray | None) -> _GroupRows | None:
        """The rows of a ragged group of each message, or of rectangles; None if unsound."""
        key = b"" if group is None else group.tobytes()
        if key not in self._rows:
            self._rows[key] = None
            total = int(self._row_counts.sum())
            lengths = np.ones(total, np.int64) if group is None else self._group_lengths(group)
            # There may be very many cells if they have no bytes: their sum must not wrap around.
            if lengths is not None and total * int(lengths.max(initial=0)) < 1 << 62:
                splits = RowSplits.from_lengths(lengths)
                offsets = splits.offsets_array
                message_starts = offsets[self._first_rows]
                cells = offsets[self._first_rows + self._row_counts] - message_starts
                begins = splits.starts - message_starts.repeat(self._row_counts)
                self._rows[key] = _GroupRows(splits, begins, cells)
        return self._rows[key]

    def _group_lengths(self, group: IntArray) -> IntArray | None:
        """The row lengths of a ragged group of each message; None if they are unsound."""
        # First, the numbers of the group in each header. A message of up to one row has no offsets:
        # the length of its row is min and max.
        numbers = self._in_order(
            stack.numbers[
                np.arange(len(stack.members))[:, None],
                stack.first_group + GROUP_NUMBERS * group[stack.members, None] + _IN_GROUP,
            ]
            for stack in self.stacks
        )
        buffer, offset, rows, low, high = numbers.T
        if (rows != self._row_counts).any():
            return None
        lengths = np.repeat(high, rows)
        many = np.flatnonzero(rows > 1)
        if not len(many):
            return lengths
        # Then the offsets of all other messages, end to end.
        offset_counts = rows[many] + 1
        buffers = self._first_buffers[many] + buffer[many]
        places = zip(buffers.tolist(), offset[many].tolist(), offset_counts.tolist(), strict=True)
        # Copy: offsets that were checked must not change with the messages' memory.
        offsets = np.concatenate(
            [np.frombuffer(self._buffers[i], np.int64, count, at) for i, at, count in places]
        )
        # Last, the row lengths, which are checked. Between the last offset of a message and the
        # first of the next there is no row: delete these differences.
        first_offset = offset_counts.cumsum() - offset_counts
        row_lengths = np.delete(offsets[1:] - offsets[:-1], first_offset[1:] - 1)
        first_row = first_offset - np.arange(len(many))
        if (
            offsets[first_offset].any()
            or (offsets < 0).any()
            or (np.minimum.reduceat(row_lengths, first_row) != low[many]).any()
            or (np.maximum.reduceat(row_lengths, first_row) != high[many]).any()
        ):
            return None
        lengths[np.repeat(rows > 1, rows)] = row_lengths
        return lengths


class TableOfForm(NamedTuple):
    """The messages in which a column of objects has one form."""

    members: IntArray  # the indices of these messages among those of the table around
    rows: IntArray  # the indices of their rows among those of the table around
    table: MessageTable


def _starts_of(parts: Sequence[Sized]) -> IntArray:
    """Where each part begins if all are put end to end, and where the last one ends."""
    starts = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=starts[1:])
    return starts


def _in_place_form(node: Node) -> tuple[Kind, str, int] | None:
    """The kind, the dtype and the count of numbers of a node whose rows can be read in place.

    Two such columns are read together if these are equal. Returns None for other nodes.
    """
    kind, fields = node.kind, node.fields
    if kind is Kind.NON_TENSOR_ROWS:
        dtype = "uint8"
    elif (kind is Kind.TENSOR and fields[1]) or (kind is Kind.JAGGED and fields[2] == 1):
        dtype = fields[0]
    else:
        return None
    return kind, dtype, node.end - node.number


def _form_of_objects(node: Node) -> tuple[Any, ...] | None:
    """What columns of objects must have in common to be read together; None for other columns."""
    if node.kind is Kind.NON_TENSOR_ROWS:
        return (node.kind,)
    if node.kind is Kind.ARRAY_ROWS and node.fields[0] == IN_STACK:
        return (node.kind, node.fields[1], node.children[0].fields[0])
    return None
