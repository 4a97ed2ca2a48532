"""Which rows of a column begin like others: those of one prompt, or of one system prompt."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.wire.cell_columns import AnyArray, Column, common, words
from jagcodec.wire.spec import INTEGER_DTYPES

_HEAD = 128
"""Bytes by which rows are told apart first."""

_FEW_ROWS = 128
"""Of more rows, only some are looked at first."""

_GOLDEN = 0.6180339887
"""Multiples of it are spread evenly between whole numbers."""

_ODD = 0x9E3779B1
"""What numbers are multiplied with before others are added, so that few sums are equal."""

_MOST_SORTED = 32 << 20
"""Bytes of rows that are sorted, so as to find those that begin alike."""

_MUCH_MORE = 4
"""How many times more the next rows share with a row than it has in common with one before it, so
that it is kept whole."""


class Beginnings(NamedTuple):
    """What each of N rows begins with that is sent with another row.

    First come cells of the row `outer`, then cells of the row `inner`, which begins with the same
    ones of the same `outer`. Nothing of a row that is `inner` or `outer` of others is sent with
    another row but for what it has of its own `outer`.

    Attributes:
        outer: (N,) the row, such as the first of all with one system prompt.
        behind_outer: (N,) how many cells they have in common; 0 if none are looked up in it.
        inner: (N,) the row, such as the first of all with one question.
        behind_inner: (N,) up to which cell they are the same; `behind_outer` if none are looked up.
    """

    outer: IntArray
    behind_outer: IntArray
    inner: IntArray
    behind_inner: IntArray


class Looked(NamedTuple):
    """The rows that are looked at first, all of them or a few of many.

    Attributes:
        rows: Which ones.
        first: Where the first cell of each lies.
        second: Where the second one does, or the first again if there is none.
    """

    rows: slice | IntArray
    first: IntArray
    second: IntArray


def looked_at(splits: RowSplits, *, all_rows: bool = False) -> Looked:
    """The rows that are looked at first, the same ones each time."""
    rows: slice | IntArray = slice(None)
    if not all_rows and splits.rows > _FEW_ROWS:
        rows = _few_of(splits.rows)
    first, lengths = splits.starts[rows], splits.lengths[rows]
    if splits.min > 1:
        return Looked(rows, first, first + 1)
    last = splits.total - 1  # where there may be empty rows at the end
    return Looked(rows, np.minimum(first, last), np.minimum(first + (lengths > 1), last))


@lru_cache(8)
def _few_of(rows: int) -> IntArray:
    """Neighbours, as repeats often are, from places all over many rows.

    If rows are in no order, but each is there twice, the square of how many are looked at over all
    rows says how many pairs are found: about four.
    """
    blocks = math.isqrt(rows // 2)
    places = np.arange(blocks)
    # Each in the first half of a share of its own, so that no row is looked at twice.
    first = ((places + places * _GOLDEN % 1 / 2) * (rows / blocks)).astype(np.int64)
    few: IntArray = (first[:, None] + np.arange(4)).reshape(-1)
    return few


def beginnings(column: Column, looked: Looked) -> Beginnings | None:
    """What the rows of a column begin with, if any begin alike."""
    size, splits = column.size, column.splits
    # Of noise nearly all rows begin otherwise than all others, which is seen without a loop. Of
    # many rows, if enough of them repeat to matter, some of a few do.
    firsts = _firsts(column, looked)
    if _all_differ(firsts):
        return None
    if not isinstance(looked.rows, slice):
        firsts = _firsts(column, looked_at(splits, all_rows=True))
    if column.dense and size <= 8:  # which is all there is of a row
        return _of_one(_first_of_each(firsts), np.ones(splits.rows, dtype=np.int64))
    data = column.cells.data.data
    bounds = (splits.host * size).tolist()
    heads = {
        row: bytes(data[bounds[row] : min(bounds[row] + _HEAD, bounds[row + 1])])
        for row in np.flatnonzero(np.isin(firsts, _repeated(firsts))).tolist()
    }
    counts: dict[bytes, int] = {}
    for head in heads.values():
        counts[head] = counts.get(head, 0) + 1
    several = [row for row, head in heads.items() if counts[head] > 1 and head]
    if not several:
        return None
    most = max(_HEAD, _MOST_SORTED // len(several))
    keys = {
        row: bytes(data[bounds[row] : min(bounds[row] + most, bounds[row + 1])]) for row in several
    }
    # From the last, so that of rows which go on where others end the longest comes first.
    return _of_sorted(column, sorted(several, key=keys.__getitem__, reverse=True))


def beginnings_of_groups(column: Column, groups: IntArray) -> Beginnings:
    """What the rows of a column begin with of the first row of their group."""
    size, splits = column.size, column.splits
    like = _first_of_each(groups)
    firsts = _firsts(column, looked_at(splits, all_rows=True))
    shared = np.zeros(splits.rows, dtype=np.int64)
    alike = (firsts == firsts[like]) & (like != np.arange(splits.rows))
    for row in np.flatnonzero(alike).tolist():
        shared[row] = common(column, row, int(like[row])) // size
    return _of_one(like, shared)


def _of_one(like: IntArray, shared: IntArray) -> Beginnings:
    """Rows that are looked up in one row each, and those rows kept whole."""
    own = np.arange(len(like))
    return Beginnings(own, np.zeros_like(shared), like, np.where(like == own, 0, shared))


def _of_sorted(column: Column, order: list[int]) -> Beginnings:
    """What rows begin with that were sorted by their bytes."""
    size, rows = column.size, column.splits.rows
    outer, inner = np.arange(rows), np.arange(rows)
    behind_outer, behind_inner = np.zeros((2, rows), dtype=np.int64)
    # Of sorted rows, two have in common what all neighbours between them have.
    shared = [0, *(common(column, a, b) // size for a, b in pairwise(order)), 0]
    # The row kept whole, and the one kept but for what it begins with of that one, if any; and
    # how many cells this row has in common with each.
    whole, kept = order[0], -1
    with_whole = with_kept = 0
    for k, row in enumerate(order):
        next_shares = shared[k + 1]
        with_whole, with_kept = min(with_whole, shared[k]), min(with_kept, shared[k])
        if kept >= 0 and with_kept <= behind_outer[kept]:
            kept = -1
        if kept >= 0 and next_shares <= 2 * with_kept:
            outer[row], behind_outer[row] = whole, behind_outer[kept]
            inner[row], behind_inner[row] = kept, with_kept
        elif next_shares > _MUCH_MORE * with_whole:
            whole, kept, with_whole = row, -1, next_shares
        elif next_shares > with_whole:
            outer[row], behind_outer[row] = whole, with_whole
            behind_inner[row] = with_whole
            kept, with_kept = row, next_shares
        else:
            inner[row], behind_inner[row] = whole, with_whole
    return Beginnings(outer, behind_outer, inner, behind_inner)


def _firsts(column: Column, looked: Looked) -> AnyArray:
    """A number for each row, of its first bytes: rows that begin alike have the same."""
    size, splits = column.size, column.splits
    data = column.cells.data
    firsts: AnyArray
    if size in (4, 8) or (column.dense and size in (1, 2)):
        cells = words(data, size)
        if column.dense:
            firsts = cells[looked.rows]
            return firsts
        firsts = cells[looked.first]
        if column.cells.dtype not in INTEGER_DTYPES:
            return firsts
        # Of two cells: one number more or less of a vocabulary is soon found twice by chance.
        firsts = firsts * cells.dtype.type(_ODD) + cells[looked.second]
        return firsts
    # Up to eight bytes; zeros behind a row that has fewer.
    starts, lengths = splits.starts[looked.rows], splits.lengths[looked.rows]
    at, within = (starts * size)[:, None], np.arange(8)
    inside = within < (lengths * size)[:, None]
    first = np.where(inside, data[np.where(inside, at + within, 0)], 0)
    firsts = first.astype(np.uint8).view(np.uint64)[:, 0]
    return firsts


def _all_differ(firsts: AnyArray) -> bool:
    if len(firsts) <= _FEW_ROWS:  # where numpy's calls take longer
        return len(set(firsts.tolist())) == len(firsts)
    return not len(_repeated(firsts))


def _repeated(firsts: AnyArray) -> AnyArray:
    """Those that occur more than once."""
    ordered = np.sort(firsts)
    again: AnyArray = ordered[1:][ordered[1:] == ordered[:-1]]
    return again


def _first_of_each(groups: AnyArray) -> IntArray:
    """(N,) the first row of the group that each row is of."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rows: IntArray = first[inverse]
    return rows
