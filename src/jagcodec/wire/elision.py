"""What columns repeat, found: rows and prefixes of rows, runs of one cell, ramps, other columns.

Everything that is found was compared cell by cell. Where to look is decided by a look at a few
cells, so that a batch without repeats costs little; and what would not make the message smaller
is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jagcodec import rowcopy
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.rowcopy import Copy
from jagcodec.wire import cell_columns
from jagcodec.wire.cell_columns import (
    TABLE,
    Cells,
    Column,
    FoundPart,
    Parts,
    differ,
    equal,
    index_size,
    row_chunks,
    word_bytes,
    words,
)
from jagcodec.wire.narrow import narrow_bits
from jagcodec.wire.rows_alike import (
    Beginnings,
    Looked,
    beginnings,
    beginnings_of_groups,
    looked_at,
)
from jagcodec.wire.spec import INTEGER_DTYPES, MOST_PARTS, TORCH_DTYPES, PartForm

Found: TypeAlias = "Parts | tuple[int, ...] | None"

_FEWEST = 256
"""Bytes of a column in which nothing is looked for."""

_MOST_ALIKE = 16
"""Columns of one dtype whose rows are looked for in each other."""

_NEIGHBOURS = 128
"""Cells that are compared with the next one before all of a column are."""

_ITEMSIZES = {name: TORCH_DTYPES[name] for name in INTEGER_DTYPES}


def elided(columns: Sequence[Column], groups: IntArray | None) -> list[Parts | None]:
    """For each column the parts that it can be made of; None for one that is sent as it is.

    Args:
        columns: In the order of the message.
        groups: (N,) numbers: rows are compared with those of the same number only; None for all.
    """
    search = _Search(columns)
    search.each(search.same_cells)
    search.each(search.runs)
    search.each(search.ramp)
    search.each(search.end_to_end)
    search.each(lambda i: search.rows(i, groups))
    return [search.parts_of(i) for i in range(len(columns))]


class _Search:
    """The columns of one message, and what was found of them.

    Attributes:
        columns: Those of the message, and behind them such as are only parts of others.
        found: For each what it is made of: parts, or the numbers of the columns whose rows its own
            rows are, end to end. Nothing of a column of which nothing was found.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = list(columns)
        self.found: list[Found] = [None] * len(columns)
        self._widths: dict[Cells, int] = {}
        self._looked: dict[int, Looked] = {}  # by the identity of the rows
        # The first column with cells that begin and end like these, and columns of one dtype.
        self._known: dict[Any, int] = {}
        self._alike: dict[Any, list[int]] = {}
        for i, (cells, size, _, dense) in enumerate(columns):
            like = self._alike.setdefault((cells.dtype, size), [])
            if not dense and len(cells.data) >= _FEWEST and len(like) < _MOST_ALIKE:
                like.append(i)

    def each(self, look: Callable[[int], Found]) -> None:
        """Look at every column of which nothing was found yet."""
        i = 0
        while i < len(self.columns):  # which may become more
            if self.found[i] is None and len(self.columns[i].cells.data) >= _FEWEST:
                self.found[i] = look(i)
            i += 1

    def parts_of(self, i: int) -> Parts | None:
        """The parts of a column; None if nothing, or too much, was found."""
        found = self.found[i]
        if found is None or isinstance(found, list):
            return found
        parts = [part for k in found for part in self.parts_of(k) or [self._in_order(k)]]
        return parts if len(parts) <= MOST_PARTS else None

    def _in_order(self, i: int) -> FoundPart:
        """All of a column, as it is."""
        cells, _, splits, _ = self.columns[i]
        return FoundPart(PartForm.IN_ORDER, splits, cells, splits.total)

    # What it costs

    def _pays(self, column: Column, cells: int, cost: int) -> bool:
        """Whether these many cells of a column take more bytes than that where they are sent."""
        data, dtype = column.cells.data, column.cells.dtype
        if not column.cells.narrow or dtype is None:
            return cells * column.size > cost
        # At least a bit for each; how many it is takes a look at all of them.
        cells *= column.size // _ITEMSIZES[dtype]
        if cells // 8 > cost:
            return True
        width = self._widths.get(column.cells)
        if width is None:
            width = self._widths[column.cells] = narrow_bits(data, dtype)
        return cells * width // 8 > cost

    def _looked_at(self, splits: RowSplits) -> Looked:
        """The rows of a column that are looked at first."""
        looked = self._looked.get(id(splits))
        if looked is None:
            looked = self._looked[id(splits)] = looked_at(splits)
        return looked

    def _most(self, cells: Cells, index: IntArray | None) -> int:
        """Bytes that cells and an index take at most."""
        stored = cells.narrowed()
        size = len(cells.data if stored is None else stored[1]) + cell_columns.SLACK
        return size if index is None else size + index_size(index) + cell_columns.SLACK

    # What is looked for

    def same_cells(self, i: int) -> tuple[int, ...] | None:
        """Another column, before it, with the same cells in the same rows."""
        cells, size, splits, dense = self.columns[i]
        data = cells.data
        middle = len(data) // 2
        sample = bytes(data[:32]), bytes(data[middle : middle + 32]), bytes(data[-32:])
        key = (cells.dtype, size, id(splits), dense, *sample)
        other = self._known.setdefault(key, i)
        if other == i or not self._pays(self.columns[i], splits.total, TABLE + cell_columns.SLACK):
            return None
        return (other,) if equal(self.columns[other].cells.data, data) else None

    def runs(self, i: int) -> Parts | None:
        """Cells that follow each other and are equal."""
        column = self.columns[i]
        cells, size, splits, _ = column
        numbers = words(cells.data, size)
        count = splits.total
        if count < 2:
            return None
        # Some neighbours: of noise nearly all differ.
        every = -(-count // _NEIGHBOURS)
        changed = differ(numbers[1::every], numbers[:-1:every], 1)
        if 8 * np.count_nonzero(changed) > len(changed):
            return None
        changes = np.flatnonzero(differ(numbers[1:], numbers[:-1], 1)) + 1
        if not self._pays(column, count, len(changes)):
            return None
        starts = np.concatenate([[0], changes])
        values = cells.of(word_bytes(numbers[starts]))
        counts = None if len(starts) == 1 else np.diff(starts, append=count)
        if not self._pays(column, count, self._most(values, counts) + TABLE):
            return None
        return [FoundPart(PartForm.REPEATED, splits, values, len(starts), counts)]

    def ramp(self, i: int) -> Parts | None:
        """Integers that rise, or fall, by one step in all rows."""
        column = self.columns[i]
        cells, size, splits, dense = column
        name = cells.dtype
        if dense or name not in INTEGER_DTYPES or name == "bool" or size != _ITEMSIZES[name]:
            return None
        numbers = words(cells.data, size)
        looked = self._looked_at(splits)
        steps = numbers[looked.second] - numbers[looked.first]
        if splits.min < 2:
            steps = steps[looked.second > looked.first]
        step = steps[0] if len(steps) else 0
        if not step or np.count_nonzero(steps != step):
            return None
        starts, lengths = splits.starts, splits.lengths
        other = numbers[1:] - numbers[:-1] != step
        # Between rows there may be any step.
        between = starts[(lengths > 0) & (starts > 0)] - 1
        if np.count_nonzero(other) != np.count_nonzero(other[between]):
            return None
        firsts = numbers[np.minimum(starts, splits.total - 1)]
        held = firsts[lengths > 0]
        firsts = held[:1] if (held == held[0]).all() else firsts
        made = cells.of(word_bytes(firsts.copy()))
        if not self._pays(column, splits.total, self._most(made, None) + TABLE):
            return None
        signed = int(step) - (1 << 8 * size if int(step) >> 8 * size - 1 else 0)
        return [FoundPart(PartForm.RAMP, splits, made, len(firsts), None, signed)]

    def end_to_end(self, i: int) -> tuple[int, ...] | None:
        """Rows that are those of two other columns, or that begin or end with those of one."""
        column = self.columns[i]
        if column.dense:
            return None
        alike = self._alike.setdefault((column.cells.dtype, column.size), [])
        others = [k for k in alike if k != i and self._is_inside(k, column)]
        for head in others:
            first = self.columns[head].splits.lengths
            for tail in others:
                rest = column.splits.lengths - self.columns[tail].splits.lengths
                wanted = (first == rest).all()
                if wanted and self._begins(column, head) and self._ends(column, tail):
                    return (head, tail)
        for other in others:
            inner = self.columns[other]
            # Its rest is a column of its own, whose rows take offsets.
            cost = 8 * (column.splits.rows + 1) + 2 * TABLE + 3 * cell_columns.SLACK
            if not self._pays(inner, inner.splits.total, cost):
                continue
            for begins in (True, False):
                if self._begins(column, other) if begins else self._ends(column, other):
                    self._add_rest(column, inner.splits.lengths, behind=begins)
                    rest_of = len(self.columns) - 1
                    return (other, rest_of) if begins else (rest_of, other)
        return None

    def _is_inside(self, k: int, column: Column) -> bool:
        """Whether the rows of another column are long enough to be looked for in those of one."""
        splits, whole = self.columns[k].splits, column.splits
        return (
            splits.rows == whole.rows
            and 0 < splits.total < whole.total
            and bool((splits.lengths <= whole.lengths).all())
        )

    def _begins(self, column: Column, other: int) -> bool:
        """Whether the rows of a column begin with those of another."""
        return self._holds(column, other, column.splits.starts)

    def _ends(self, column: Column, other: int) -> bool:
        """Whether the rows of a column end with those of another."""
        return self._holds(
            column, other, column.splits.host[1:] - self.columns[other].splits.lengths
        )

    def _holds(self, column: Column, other: int, starts: IntArray) -> bool:
        """Whether the rows of another column lie at these cells of a column."""
        inner = self.columns[other]
        splits, size = inner.splits, column.size
        held = np.flatnonzero(splits.lengths)
        few = held[:: -(-len(held) // 16)]
        numbers, own = words(column.cells.data, size), words(inner.cells.data, size)
        for at in (np.zeros(len(few), np.int64), splits.lengths[few] - 1):
            if differ(numbers[starts[few] + at], own[splits.starts[few] + at], 1).any():
                return False
        for rows in row_chunks(splits, size):
            a, b = splits.host[rows.start] * size, splits.host[rows.stop] * size
            there = _gathered(column.cells.data, starts[rows], splits.lengths[rows], size)
            if not equal(there, inner.cells.data[a:b]):
                return False
        return True

    def _add_rest(self, column: Column, inner: IntArray, *, behind: bool) -> None:
        """Add the column of what rows have behind, or before, what another column has of them."""
        cells, size, splits, _ = column
        rest = splits.lengths - inner
        starts = splits.starts + inner if behind else splits.starts
        data = _gathered(cells.data, starts, rest, size)
        own = Column(cells.of(data), size, RowSplits.from_lengths(rest), False)
        self.columns.append(own)
        self.found.append(None)

    def rows(self, i: int, groups: IntArray | None) -> Parts | None:
        """Rows that other rows begin with, or that are equal to others."""
        column = self.columns[i]
        cells, size, splits, _ = column
        if splits.rows < 2:
            return None
        if groups is not None and len(groups) == splits.rows:
            found = beginnings_of_groups(column, groups)
        else:
            made = beginnings(column, self._looked_at(splits))
            if made is None:
                return None
            found = made
        outer, behind_outer, inner, behind_inner = self._worth_it(column, found)
        rest = RowSplits.from_lengths(splits.lengths - behind_inner)
        prefixes = [
            (own, np.where(own > 0, rest.starts[of], 0))
            for of, own in ((outer, behind_outer), (inner, behind_inner - behind_outer))
            if own.any()
        ]
        whole = behind_inner == splits.lengths
        # Rows that repeat whole need no second part.
        in_one = len(prefixes) == 1 and bool((whole | (behind_inner == 0)).all())
        if in_one:
            prefixes = [(splits.lengths, np.where(whole, prefixes[0][1], rest.starts))]
        cost = (
            TABLE
            + cell_columns.SLACK
            + sum(index_size(index) + cell_columns.SLACK for _, index in prefixes)
        )
        if not in_one:  # each with its offsets
            cost += len(prefixes) * TABLE + (len(prefixes) + 1) * (
                8 * (splits.rows + 1) + cell_columns.SLACK
            )
        if not self._pays(column, splits.total - rest.total, cost):
            return None
        at = splits.starts + behind_inner
        kept = cells.of(_gathered(cells.data, at, rest.lengths, size))
        if in_one:
            return [FoundPart(PartForm.AT, splits, kept, rest.total, prefixes[0][1])]
        return [
            *(
                FoundPart(PartForm.AT, RowSplits.from_lengths(own), kept, rest.total, index)
                for own, index in prefixes
            ),
            FoundPart(PartForm.IN_ORDER, rest, kept, rest.total),
        ]

    def _worth_it(self, column: Column, found: Beginnings) -> Beginnings:
        """What rows begin with, as far as it is worth a part of its own: its table and offsets."""
        outer, behind_outer, inner, behind_inner = found
        splits = column.splits
        cost = 2 * (8 * (splits.rows + 1) + cell_columns.SLACK) + TABLE
        if not self._pays(column, int(behind_outer.sum()), cost):
            behind_inner = np.where(inner == np.arange(splits.rows), 0, behind_inner)
            behind_outer = np.zeros_like(behind_outer)
        whole = behind_inner == splits.lengths
        if not self._pays(column, int((behind_inner - behind_outer)[~whole].sum()), cost):
            behind_inner = np.where(whole, behind_inner, behind_outer)
        return Beginnings(outer, behind_outer, inner, behind_inner)


def _gathered(data: ByteArray, starts: IntArray, lengths: IntArray, size: int) -> ByteArray:
    """Rows of cells, end to end."""
    out = np.empty(int(lengths.sum()) * size, dtype=np.uint8)
    if len(out):
        rowcopy.copy_all([Copy(out, data, None, np.ascontiguousarray(starts), lengths, size)])
    return out
