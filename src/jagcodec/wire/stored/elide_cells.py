"""`elide_cells`: rows and columns that repeat others become runs of shared cells.

Everything that is found was compared cell by cell. A sample of cells decides where to look, so that
a batch without repeats costs little. A column stays as it is if the message would not get smaller.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jagcodec.memory.arrays import AnyArray, ByteArray, IntArray
from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.spec import INDIRECT, MOST_RUNS, TORCH_ITEMSIZES
from jagcodec.wire.stored.narrow import narrowed
from jagcodec.wire.stored.repeats import (
    NUMBERS_AT_ONCE,
    copy_of_rows,
    cost_of_runs,
    equal_bytes,
    sample_of,
    set_runs,
)
from jagcodec.wire.write.items import Item, Run, item_of_index

LEAST_SEARCHED = 256  # columns of fewer bytes are not searched
_MOST_CANDIDATES = 16  # columns of one dtype whose rows are looked for in each other
_FEW_ROWS = 128  # if there are more rows, a sample is compared first
_FEW_ELEMENTS = 4096  # if there are more elements, a sample decides their stored width
_LEAST_SHARED = 24  # bytes of a row's share in the indices of rows that begin like others
_HEAD = 128  # compare so many first bytes of rows before more of them
_MOST_SORTED = 32 << 20  # bytes of rows that are sorted to find those that start the same


def elide_cells(columns: Sequence[Item]) -> None:
    """Give each column that repeats cells runs, which are sent once, if that pays.

    The caller has put the cells of each column end to end. Columns of equal row lengths must have
    the same `RowSplits` object.
    """
    searched = [_Searched(column) for column in columns if _may_gain(column)]
    by_kind: dict[Any, dict[int, list[_Searched]]] = defaultdict(lambda: defaultdict(list))
    for one in searched:
        by_total = by_kind[one.kind]
        if one.ragged and sum(map(len, by_total.values())) < _MOST_CANDIDATES:
            by_total[one.splits.total].append(one)
    sample: dict[RowSplits, tuple[IntArray, IntArray]] = {}
    first: dict[Any, _Searched] = {}
    # Start with the columns of few cells: larger columns may consist of them.
    for one in sorted(searched, key=lambda one: one.splits.total):
        splits = one.splits
        if splits not in sample:
            rows = _sampled_rows(splits.rows)
            sample[splits] = splits.offsets_array[rows], splits.offsets_array[rows + 1]
        repeats = one.beginnings_repeat(*sample[splits])
        other = first.setdefault((one.kind, one.column.splits, sample_of(one.data)), one)
        runs = (
            one.runs_of_equal_column(other)
            or (one.prefixes() if repeats else None)
            or one.as_two_columns(by_kind[one.kind])
            or (one.runs_of_shared_beginnings() if repeats else None)
        )
        if runs and len(runs) <= MOST_RUNS:
            set_runs(one.column, runs)
            one.column.stored = INDIRECT + len(runs)


def _may_gain(column: Item) -> bool:
    """Whether runs could save bytes of this column."""
    size, shape = len(column.data), column.dims
    ragged = column.splits is not None
    # The run of a rectangle has an index of 8 bytes per row.
    return size >= LEAST_SEARCHED and (ragged or (len(shape) > 0 and size > 8 * shape[0]))


def _sampled_rows(rows: int) -> IntArray:
    """The numbers of some of N rows. If enough rows repeat to matter, some of these do."""
    if rows <= _FEW_ROWS:
        return np.arange(rows)
    # Repeats are often neighbours, so take groups of four rows. There are enough groups to expect
    # about four pairs if each row occurs twice, in random order.
    groups = math.isqrt(rows // 2)
    sample = np.arange(4 * groups)
    return sample + sample // 4 * ((rows - 4 * groups) // (groups - 1))


class _Searched:
    """A column in which repeats are looked for."""

    def __init__(self, column: Item) -> None:
        self.column, self.data = column, column.data
        total, self.ragged = column.dims[0], column.splits is not None
        self.size = len(self.data) // total  # bytes of a cell
        self.kind = column.dtype, self.size
        # The rows of a rectangle are one cell each.
        self.splits = column.splits or RowSplits.from_lengths(np.ones(total, dtype=np.int64))
        self.words = _cell_words(self.data, self.size)
        self._whole: Run | None = None

    def runs(self) -> list[Run]:
        """The runs of this column, made once."""
        if self.column.runs is not None:
            return [*self.column.runs]
        if self._whole is None:  # one object, so that its index is placed once
            self.column.cells, self.column.indirect = self._cells(self.data), True
            index = item_of_index(self.splits.starts)
            self._whole = Run(self.splits, self.column.cells, index)
        return [self._whole]

    def pays(self, saved: int, indices: int) -> bool:
        """Whether leaving out `saved` cells saves more bytes than the runs and `indices` cost."""
        dtype, taken = self.column.dtype, saved * self.size
        if self.column.narrow and dtype is not None:
            numbers = self.data.view(f"u{TORCH_ITEMSIZES[dtype]}")
            sample = np.ascontiguousarray(numbers[:: -(-len(numbers) // _FEW_ELEMENTS)]).view(
                np.uint8
            )
            # All elements together need at least the bits per element that the sample needs.
            found = narrowed(sample, dtype)
            taken = taken * len(found[1] if found else sample) // len(sample)
        return taken > cost_of_runs(indices, self.splits.rows)

    def beginnings_repeat(self, starts: IntArray, ends: IntArray) -> bool:
        """Whether two of the sampled rows, from `starts` to `ends`, begin with the same bytes."""
        words, size, view = self.words, self.size, self.data.data
        firsts = np.minimum(starts, self.splits.total - 1)
        sample = words.take(firsts) if words.ndim == 1 else words[firsts, 0]
        if len(set(sample.tolist())) == len(sample):
            return False
        # Compare more bytes: flags and small numbers are often equal, and a few equal bytes do not
        # pay for an index.
        heads_end = np.minimum(ends * size, starts * size + _LEAST_SHARED).tolist()
        bounds = zip((starts * size).tolist(), heads_end, strict=True)
        heads = sorted(bytes(view[start:end]) for start, end in bounds if start < end)
        return any(other.startswith(head) for head, other in itertools.pairwise(heads))

    def runs_of_equal_column(self, other: _Searched) -> list[Run] | None:
        """The runs of `other`, which has the same row lengths, if it has the same cells, too."""
        equal = other is not self and equal_bytes(other.data, self.data)
        return other.runs() if equal and self.pays(self.splits.total, indices=1) else None

    def prefixes(self) -> list[Run] | None:
        """One run, if the longest row begins with each other row, as positions do."""
        splits = self.splits
        if not self.ragged or splits.rows < 2:
            return None
        start = int(splits.starts[splits.lengths.argmax()]) * self.size
        longest = self.data[start : start + splits.max * self.size]
        if not self.occur_at(longest, np.zeros(splits.rows, dtype=np.int64)):
            return None
        pays = self.pays(splits.total - splits.max, indices=0)
        return [Run(splits, self._cells(longest), None)] if pays else None

    def as_two_columns(self, by_total: Mapping[int, Sequence[_Searched]]) -> list[Run] | None:
        """The runs of two other columns, if each row here is a row of one, then a row of the other.

        An example is a column of prompts and responses next to one of each.
        """
        whole = self.splits
        pairs = [
            itertools.product(heads, by_total[whole.total - total])
            for total, heads in by_total.items()
            if self.ragged and whole.total - total in by_total
        ]
        for head, tail in itertools.chain(*pairs):
            first, last = head.splits, tail.splits
            if (
                first.rows == last.rows == whole.rows
                and (first.lengths + last.lengths == whole.lengths).all()
                and head.occur_at(self.data, whole.starts)
                and tail.occur_at(self.data, whole.starts + first.lengths)
            ):
                pays = self.pays(whole.total, indices=2)
                return [*head.runs(), *tail.runs()] if pays else None
        return None

    def occur_at(self, data: ByteArray, starts: IntArray) -> bool:
        """Whether each row runs_of_equal_column the cells of `data` from its start on."""
        splits, size = self.splits, self.size
        # First compare the first and the last cell of up to 16 rows.
        filled = np.flatnonzero(splits.lengths)
        sample, others = filled[:: -(-len(filled) // 16)], _cell_words(data, size)
        for at in (0, splits.lengths[sample] - 1):
            if (self.words[splits.starts[sample] + at] != others[starts[sample] + at]).any():
                return False
        step = max(1, splits.rows * 8 * NUMBERS_AT_ONCE // len(self.data))
        for first in range(0, splits.rows, step):
            some = slice(first, first + step)
            there = copy_of_rows(data, starts[some], splits.lengths[some], size)
            begin = int(splits.offsets_array[first]) * size
            if not equal_bytes(self.data[begin : begin + len(there)], there):
                return False
        return True

    def runs_of_shared_beginnings(self) -> list[Run] | None:
        """Runs for rows that share all of their cells, or their first cells."""
        splits = self.splits
        taken_from, shared = self._beginnings()
        equal = shared == splits.lengths
        # There are two forms. If sharing heads pays, each row is a head, which other rows share,
        # and a rest that it stores itself: two runs. If not, only equal rows share cells: one run.
        heads_pay = self.pays(int(shared[~equal].sum()), indices=3)
        if not heads_pay:
            shared = np.where(equal, shared, 0)
        taken_from = np.where(shared > 0, taken_from, np.arange(splits.rows))
        kept = taken_from == np.arange(splits.rows)
        # The head of a row that is kept must be as long as the longest that is taken from it.
        heads = shared.copy() if heads_pay else np.where(kept, splits.lengths, shared)
        np.maximum.at(heads, taken_from, shared)
        first = RowSplits.from_lengths(np.where(kept, heads, 0))
        rest = RowSplits.from_lengths(splits.lengths - heads)
        if not self.pays(splits.total - first.total - rest.total, indices=4 if rest.total else 1):
            return None
        made = self._gathered_rows(splits.starts, first), item_of_index(first.starts[taken_from])
        if not rest.total:
            return [Run(splits, *made)]
        rests = self._gathered_rows(splits.starts + heads, rest), item_of_index(rest.starts)
        return [Run(RowSplits.from_lengths(heads), *made), Run(rest, *rests)]

    def _gathered_rows(self, starts: IntArray, splits: RowSplits) -> Item:
        return self._cells(copy_of_rows(self.data, starts, splits.lengths, self.size))

    def _cells(self, data: ByteArray) -> Item:
        """The item of some cells of the column, `data`."""
        count = len(data) // self.size
        cells = Item(data, (count,), None, self.column.dtype)
        cells.narrow = self.column.narrow
        return cells

    def _beginnings(self) -> tuple[IntArray, IntArray]:
        """Two (N,) arrays: the row from which each row takes its first cells, and how many.

        A row that takes no cells from another names itself, with 0 cells.
        """
        splits = self.splits
        taken_from, shared = np.arange(splits.rows), np.zeros(splits.rows, dtype=np.int64)
        order, host = self._rows_with_equal_heads(), splits.offsets_array.tolist()
        rows = [self.words[host[i] : host[i + 1]] for i in order]
        # Rows are sorted, so two of them share the cells that all neighbours between them share.
        with_next = list(itertools.starmap(_common_cells, itertools.pairwise(rows)))
        kept, with_kept = -1, 0
        for row, before, after in zip(order, [0, *with_next], [*with_next, 0], strict=False):
            with_kept = min(with_kept, before)
            # Keep this row, too, if it shares over an eighth more with the rows that follow than
            # with the kept row. It then stores all of its head. A smaller gain does not pay for
            # that: rows of one prompt often agree by chance on a few tokens after it.
            if 8 * after > 9 * with_kept:
                kept, with_kept = row, splits.total
            elif with_kept:
                taken_from[row], shared[row] = kept, with_kept
        return taken_from, shared

    def _rows_with_equal_heads(self) -> list[int]:
        """The rows whose first bytes another row has, too, in descending order of their bytes.

        So a row comes before the rows that are its beginning.
        """
        bounds, view = (self.splits.offsets_array * self.size).tolist(), self.data.data

        def heads(rows: Sequence[int], most: int) -> dict[int, bytes]:
            return {i: bytes(view[bounds[i] : min(bounds[i] + most, bounds[i + 1])]) for i in rows}

        found = heads(np.flatnonzero(self.splits.lengths).tolist(), _HEAD)
        among = Counter(found.values())
        several = [row for row, head in found.items() if among[head] > 1]
        keys = heads(several, max(_HEAD, _MOST_SORTED // max(1, len(several))))
        return sorted(several, key=keys.__getitem__, reverse=True)


def _common_cells(one: AnyArray, other: AnyArray) -> int:
    """How many cells two rows share from the start."""
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    if differ.ndim > 1:
        differ = differ.any(axis=1)
    wrong = int(differ.argmax())
    return wrong if differ[wrong] else most


def _cell_words(data: ByteArray, size: int) -> AnyArray:
    """(cells,) integers as wide as a cell, or (cells, k) words or bytes."""
    if size in (1, 2, 4, 8):
        return data.view(f"u{size}")
    return data.view("u8").reshape(-1, size // 8) if size % 8 == 0 else data.reshape(-1, size)
