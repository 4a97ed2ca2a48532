"""`elide_cells`: columns whose rows repeat other cells become runs of shared cells.

`elide_cells` asks each `_SearchedColumn` for runs in four forms, the fastest search first:

* the runs of another column that is equal;
* one run, the longest row, if each other row is its beginning;
* the runs of two other columns, if each row consists of a row of each;
* runs of whole rows or of heads that rows share.

Whatever is found was compared cell by cell. A sample of cells decides where to search, so that a
batch without repeats costs little. A column stays as it is if the message would not get smaller.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jagcodec.memory.arrays import AnyArray, ByteArray, IntArray
from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.items import Item, Run, item_of_index
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

LEAST_SEARCHED = 256  # columns of fewer bytes are not searched
_MOST_CANDIDATES = 16  # how many columns of one dtype are compared in pairs with a third
_MOST_UNSAMPLED_ROWS = 128  # in a column of more rows, the heads of a sample are compared first
_SAMPLED_ELEMENTS = 4096  # at most so many elements are narrowed to find their stored width
_LEAST_HEAD = 24  # bytes that a row costs in indices: rows that share fewer do not pay
_FIRST_COMPARED = 128  # how many bytes of rows are compared before more of them
_MOST_SORTED = 32 << 20  # how many bytes of rows are sorted to find those with equal heads


def elide_cells(items: Sequence[Item]) -> None:
    """Make each column that repeats cells elided, if that pays: its runs are sent once.

    The cells of each column must be end to end, and columns of equal row lengths must have the
    same `RowSplits` object.
    """
    searched = [_SearchedColumn(item) for item in items if _may_gain(item)]
    candidates = _Candidates(searched)
    bounds_of_sample: dict[RowSplits, tuple[IntArray, IntArray]] = {}
    first_with_sample: dict[Any, _SearchedColumn] = {}
    # Start with the columns of few cells: larger columns may consist of them.
    for column in sorted(searched, key=lambda column: column.splits.total):
        splits = column.splits
        if splits not in bounds_of_sample:
            rows = _sampled_rows(splits.rows)
            offsets = splits.offsets_array
            bounds_of_sample[splits] = offsets[rows], offsets[rows + 1]
        heads_repeat = column.heads_repeat(*bounds_of_sample[splits])
        sample = (column.cell_type, column.item.splits, sample_of(column.data))
        other = first_with_sample.setdefault(sample, column)
        runs = (
            column.runs_of_equal_column(other)
            or (column.run_of_longest_row() if heads_repeat else None)
            or column.runs_of_two_columns(candidates)
            or (column.runs_of_shared_heads() if heads_repeat else None)
        )
        if runs and len(runs) <= MOST_RUNS:
            set_runs(column.item, runs)
            column.item.storage_code = INDIRECT + len(runs)


def _may_gain(item: Item) -> bool:
    """Whether runs could save bytes of this item."""
    size, shape = len(item.data), item.dims
    ragged = item.splits is not None
    # The run of a rectangle has an index of 8 bytes per row.
    return size >= LEAST_SEARCHED and (ragged or (len(shape) > 0 and size > 8 * shape[0]))


def _sampled_rows(rows: int) -> IntArray:
    """The numbers of some of N rows. If enough rows repeat to matter, some of these do."""
    if rows <= _MOST_UNSAMPLED_ROWS:
        return np.arange(rows)
    # Repeats are often neighbours, so take groups of four rows. There are enough groups to expect
    # about four pairs if each row occurs twice, in random order.
    groups = math.isqrt(rows // 2)
    sample = np.arange(4 * groups)
    return sample + sample // 4 * ((rows - 4 * groups) // (groups - 1))


class _SearchedColumn:
    """A column in which `elide_cells` searches for repeats."""

    def __init__(self, item: Item) -> None:
        self.item, self.data = item, item.data
        total, self.ragged = item.dims[0], item.splits is not None
        self.cell_bytes = len(self.data) // total
        self.cell_type = item.dtype, self.cell_bytes
        # The rows of a rectangle are one cell each.
        self.splits = item.splits or RowSplits.from_lengths(np.ones(total, dtype=np.int64))
        self.words = _cell_words(self.data, self.cell_bytes)
        self._whole: Run | None = None

    def share_runs(self) -> list[Run]:
        """The runs of this column, for another one; a column without runs becomes one run."""
        if self.item.runs is not None:
            return [*self.item.runs]
        if self._whole is None:  # one object, so that its index is placed once
            self.item.cells, self.item.is_elided = self._cells(self.data), True
            index = item_of_index(self.splits.starts)
            self._whole = Run(self.splits, self.item.cells, index)
        return [self._whole]

    def saves_bytes(self, saved: int, indices: int) -> bool:
        """Whether leaving out `saved` cells saves more bytes than runs with `indices` cost."""
        dtype, saved_bytes = self.item.dtype, saved * self.cell_bytes
        if self.item.narrow and dtype is not None:
            numbers = self.data.view(f"u{TORCH_ITEMSIZES[dtype]}")
            sample = np.ascontiguousarray(numbers[:: -(-len(numbers) // _SAMPLED_ELEMENTS)]).view(
                np.uint8
            )
            # All elements together need at least the bits per element that the sample needs.
            smaller = narrowed(sample, dtype)
            saved_bytes = saved_bytes * len(smaller[1] if smaller else sample) // len(sample)
        return saved_bytes > cost_of_runs(indices, self.splits.rows)

    def heads_repeat(self, starts: IntArray, ends: IntArray) -> bool:
        """Whether two of the sampled rows, from `starts` to `ends`, begin with the same bytes."""
        words, size, view = self.words, self.cell_bytes, self.data.data
        first_cells = np.minimum(starts, self.splits.total - 1)
        first_words = words.take(first_cells) if words.ndim == 1 else words[first_cells, 0]
        if len(set(first_words.tolist())) == len(first_words):
            return False
        # Compare more bytes: flags and small numbers are often equal, and a few equal bytes do not
        # pay for an index.
        heads_end = np.minimum(ends * size, starts * size + _LEAST_HEAD).tolist()
        bounds = zip((starts * size).tolist(), heads_end, strict=True)
        heads = sorted(bytes(view[start:end]) for start, end in bounds if start < end)
        return any(other.startswith(head) for head, other in itertools.pairwise(heads))

    def runs_of_equal_column(self, other: _SearchedColumn) -> list[Run] | None:
        """The runs of `other`, which has the same row lengths, if it has the same cells, too."""
        equal = other is not self and equal_bytes(other.data, self.data)
        saves = equal and self.saves_bytes(self.splits.total, indices=1)
        return other.share_runs() if saves else None

    def run_of_longest_row(self) -> list[Run] | None:
        """One run, if each other row is the beginning of the longest row, as in positions."""
        splits = self.splits
        if not self.ragged or splits.rows < 2:
            return None
        start = int(splits.starts[splits.lengths.argmax()]) * self.cell_bytes
        longest = self.data[start : start + splits.max * self.cell_bytes]
        if not self.occurs_in(longest, np.zeros(splits.rows, dtype=np.int64)):
            return None
        saves = self.saves_bytes(splits.total - splits.max, indices=0)
        return [Run(splits, self._cells(longest), None)] if saves else None

    def runs_of_two_columns(self, candidates: _Candidates) -> list[Run] | None:
        """The runs of two other columns, if each row is a row of one and then a row of the other.

        An example is a column of prompts and responses next to one of each.
        """
        whole = self.splits
        for head, tail in candidates.pairs_for(self):
            first, last = head.splits, tail.splits
            if (
                first.rows == last.rows == whole.rows
                and (first.lengths + last.lengths == whole.lengths).all()
                and head.occurs_in(self.data, whole.starts)
                and tail.occurs_in(self.data, whole.starts + first.lengths)
            ):
                saves = self.saves_bytes(whole.total, indices=2)
                return [*head.share_runs(), *tail.share_runs()] if saves else None
        return None

    def occurs_in(self, data: ByteArray, starts: IntArray) -> bool:
        """Whether `data` has the cells of each row, from the row's cell in `starts` on."""
        splits, size = self.splits, self.cell_bytes
        # First compare the first and the last cell of up to 16 rows.
        filled = np.flatnonzero(splits.lengths)
        sample, others = filled[:: -(-len(filled) // 16)], _cell_words(data, size)
        for at in (0, splits.lengths[sample] - 1):
            if (self.words[splits.starts[sample] + at] != others[starts[sample] + at]).any():
                return False
        step = max(1, splits.rows * 8 * NUMBERS_AT_ONCE // len(self.data))
        for first in range(0, splits.rows, step):
            some = slice(first, first + step)
            cells = copy_of_rows(data, starts[some], splits.lengths[some], size)
            begin = int(splits.offsets_array[first]) * size
            if not equal_bytes(self.data[begin : begin + len(cells)], cells):
                return False
        return True

    def runs_of_shared_heads(self) -> list[Run] | None:
        """Runs for rows that share all of their cells, or a head of them."""
        splits = self.splits
        taken_from, shared = self._shared_heads()
        equal = shared == splits.lengths
        # There are two forms. If sharing heads pays, each row is a head, which other rows share,
        # and a rest that it stores itself: two runs. If not, only equal rows share cells: one run.
        sharing_heads_saves = self.saves_bytes(int(shared[~equal].sum()), indices=3)
        if not sharing_heads_saves:
            shared = np.where(equal, shared, 0)
        taken_from = np.where(shared > 0, taken_from, np.arange(splits.rows))
        kept = taken_from == np.arange(splits.rows)
        # The head of a row that is kept must be as long as the longest that is taken from it.
        heads = shared.copy() if sharing_heads_saves else np.where(kept, splits.lengths, shared)
        np.maximum.at(heads, taken_from, shared)
        first = RowSplits.from_lengths(np.where(kept, heads, 0))
        rest = RowSplits.from_lengths(splits.lengths - heads)
        saved = splits.total - first.total - rest.total
        if not self.saves_bytes(saved, indices=4 if rest.total else 1):
            return None
        kept_heads = self._cells_of_rows(splits.starts, first)
        head_index = item_of_index(first.starts[taken_from])
        if not rest.total:
            return [Run(splits, kept_heads, head_index)]
        rest_cells = self._cells_of_rows(splits.starts + heads, rest)
        return [
            Run(RowSplits.from_lengths(heads), kept_heads, head_index),
            Run(rest, rest_cells, item_of_index(rest.starts)),
        ]

    def _cells_of_rows(self, starts: IntArray, splits: RowSplits) -> Item:
        """The item of a copy of rows that begin at these cells, and have these lengths."""
        return self._cells(copy_of_rows(self.data, starts, splits.lengths, self.cell_bytes))

    def _cells(self, data: ByteArray) -> Item:
        """The item of some cells of the column, `data`."""
        count = len(data) // self.cell_bytes
        cells = Item(data, (count,), None, self.item.dtype)
        cells.narrow = self.item.narrow
        return cells

    def _shared_heads(self) -> tuple[IntArray, IntArray]:
        """Two (N,) arrays: the row from which each row takes its head, and the head's cells.

        A row that takes no cells from another names itself, with 0 cells.
        """
        splits = self.splits
        taken_from, shared = np.arange(splits.rows), np.zeros(splits.rows, dtype=np.int64)
        order, host = self._rows_with_equal_heads(), splits.offsets_array.tolist()
        rows = [self.words[host[i] : host[i + 1]] for i in order]
        # Rows are sorted, so two of them share the cells that all neighbours between them share.
        # `kept` is the row that later rows take their heads from, and `with_kept` how many cells a
        # row shares with it. For the rows abx, abcdeg and abcdef, `with_next` is [2, 5]: the first
        # is kept, as is the second, which shares 5 with the next row but 2 with the first; the
        # third takes 5 cells from the second.
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
        """The rows with whose first bytes another row begins, too, in descending order of bytes.

        So a row comes before the rows that are its beginning.
        """
        bounds, view = (self.splits.offsets_array * self.cell_bytes).tolist(), self.data.data

        def heads(rows: Sequence[int], most: int) -> dict[int, bytes]:
            return {i: bytes(view[bounds[i] : min(bounds[i] + most, bounds[i + 1])]) for i in rows}

        head_of_row = heads(np.flatnonzero(self.splits.lengths).tolist(), _FIRST_COMPARED)
        counts = Counter(head_of_row.values())
        rows = [row for row, head in head_of_row.items() if counts[head] > 1]
        keys = heads(rows, max(_FIRST_COMPARED, _MOST_SORTED // max(1, len(rows))))
        return sorted(rows, key=keys.__getitem__, reverse=True)


class _Candidates:
    """Ragged columns that may be a part of another."""

    def __init__(self, columns: Sequence[_SearchedColumn]) -> None:
        # By the type of their cells, then by how many cells they have.
        self._of_type: dict[Any, dict[int, list[_SearchedColumn]]] = {}
        for column in columns:
            by_total = self._of_type.setdefault(column.cell_type, {})
            if column.ragged and sum(map(len, by_total.values())) < _MOST_CANDIDATES:
                by_total.setdefault(column.splits.total, []).append(column)

    def pairs_for(
        self, whole: _SearchedColumn
    ) -> Iterator[tuple[_SearchedColumn, _SearchedColumn]]:
        """The pairs of candidates that have as many cells together as a ragged column."""
        by_total = self._of_type[whole.cell_type] if whole.ragged else {}
        for total, heads in by_total.items():
            yield from itertools.product(heads, by_total.get(whole.splits.total - total, ()))


def _common_cells(one: AnyArray, other: AnyArray) -> int:
    """How many cells two rows share from the start."""
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    if differ.ndim > 1:
        differ = differ.any(axis=1)
    first = int(differ.argmax())
    return first if differ[first] else most


def _cell_words(data: ByteArray, size: int) -> AnyArray:
    """The cells as (cells,) integers of the same width, or as (cells, k) words or bytes."""
    if size in (1, 2, 4, 8):
        return data.view(f"u{size}")
    return data.view("u8").reshape(-1, size // 8) if size % 8 == 0 else data.reshape(-1, size)
