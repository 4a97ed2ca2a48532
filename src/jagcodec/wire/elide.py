"""What a batch repeats is sent once: items whose rows become runs of cells that they share.

Everything that is found was compared cell by cell. Where to look is decided by a look at a few
cells, so that a batch without repeats costs little; and what would not make the message smaller
is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec import rowcopy
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.rowcopy import Copy
from jagcodec.wire.limits import Limits
from jagcodec.wire.lowered import Cells, EndToEnd, Packed, Run
from jagcodec.wire.narrow import narrow_bits
from jagcodec.wire.spec import (
    EXPANSION,
    MOST_RUNS,
    ROW_COST,
    RUN_NUMBERS,
    TORCH_DTYPES,
)

AnyArray: TypeAlias = npt.NDArray[Any]

TABLE = 8 * len(RUN_NUMBERS)
"""Bytes that a table has for each run."""

SLACK = 128
"""Bytes that one more buffer may take beyond its own: up to a multiple of 64, and its numbers."""

FEWEST = 256
"""Bytes of a column in which nothing is looked for."""

_LARGE = 1024  # bytes of a document from which on it is compared with others
_MOST_ALIKE = 16  # columns of one dtype whose rows are looked for in each other
_FEW_ROWS = 128  # of more rows, only some are looked at first
_FEW_CELLS = 4096  # of more cells, only some say in how many bits they are stored
_HEAD = 128  # bytes by which rows are told apart first
_MOST_SORTED = 32 << 20  # bytes of rows that are sorted, so as to find those that begin alike
_AT_ONCE = 1 << 20  # bytes that are put together to be compared, so that they stay in a cache


def elide(items: Sequence[Any]) -> list[Any]:
    """The items, with what columns and rows of documents repeat sent once.

    As they are if a reader would by default refuse to make so much of so little.
    """
    made: list[Any] = [_once(item) if type(item) is Packed else item for item in items]
    columns = {i: column for i, item in enumerate(items) if (column := _column_of(item))}
    for i, runs in zip(columns, _found(list(columns.values())), strict=True):
        if runs is not None:
            made[i] = made[i]._replace(runs=runs)
    return made if _is_taken(made) else list(items)


def _is_taken(items: Sequence[Any]) -> bool:
    """Whether a message of these items is within the limits that readers have by default."""
    expanded = documents = payload = 0
    for cells in {cells for item in items for cells in _cells_of(item)}:
        # A bit may be all that is stored of an int64.
        payload += len(cells.data) // EXPANSION if cells.narrow else len(cells.data)
    for item in items:
        if type(item) is EndToEnd and item.runs is not None:
            expanded += len(item.cells.data) + ROW_COST * item.runs[0].splits.rows * len(item.runs)
        elif type(item) is EndToEnd and item.cells.narrow:
            expanded += len(item.cells.data)
        elif type(item) is Packed and item.like is not None:
            sizes = list(map(_size, item.rows))
            own = sum(sizes[i] for i in set(item.like))
            payload += own
            total = sum(sizes)
            expanded += total + ROW_COST * len(sizes)
            documents += own if item.one_object else total
    free = EXPANSION * payload
    return max(expanded - free, EXPANSION * (documents - free)) <= Limits.expanded


def _cells_of(item: Any) -> list[Cells]:
    """The cells that a column is sent with."""
    if type(item) is not EndToEnd:
        return []
    return [item.cells] if item.runs is None else [run.cells for run in item.runs]


# --- documents ---------------------------------------------------------------------------------


def _once(documents: Packed) -> Packed:
    """Rows of documents with those that are one object, or else equal and large, sent once."""
    rows = documents.rows
    first: dict[Any, int] = {}
    like = [first.setdefault(id(row), i) for i, row in enumerate(rows)]
    one_object = len(first) < len(rows)
    if not one_object:
        first.clear()
        for i, row in enumerate(rows):
            if _size(row) >= _LARGE:
                other = first.setdefault(tuple((len(p), *_sample(p)) for p in row), i)
                if other != i and all(map(_equal_pieces, rows[other], row)):
                    like[i] = other
    saved = sum(_size(row) for i, row in enumerate(rows) if like[i] != i)
    # Offsets of all bytes take no more than these.
    if saved <= TABLE + 8 * len(rows) + 2 * SLACK:
        return documents
    return documents._replace(like=like, one_object=one_object)


def _size(row: Sequence[Any]) -> int:
    return sum(map(len, row))


def _sample(data: Any) -> tuple[bytes, bytes, bytes]:
    """A few bytes, which tell most buffers apart."""
    middle = len(data) // 2
    return bytes(data[:32]), bytes(data[middle : middle + 32]), bytes(data[-32:])


def _equal_pieces(a: Any, b: Any) -> bool:
    return _equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))


# --- columns -----------------------------------------------------------------------------------


class _Column(NamedTuple):
    """A column whose rows lie end to end.

    Attributes:
        cells: All of them.
        size: Bytes of one, 1 at least.
        splits: The rows, one object for equal ones; None of a rectangle, whose rows are one cell.
    """

    cells: Cells
    size: int
    splits: RowSplits | None

    @property
    def total(self) -> int:
        """How many cells there are."""
        return len(self.cells.data) // self.size

    def rows(self) -> RowSplits:
        """The rows, those of a rectangle too."""
        if self.splits is not None:
            return self.splits
        return RowSplits.from_lengths(np.ones(self.total, dtype=np.int64))


def _column_of(item: Any) -> _Column | None:
    """The column of an item in which something may repeat."""
    if type(item) is not EndToEnd or len(item.cells.data) < FEWEST:
        return None
    cells, splits, shape, ragged_dim, _ = item
    if splits is None:
        return _Column(cells, len(cells.data) // shape[0], None) if shape else None
    return _Column(cells, len(cells.data) // splits.total, splits) if ragged_dim == 1 else None


def _found(columns: Sequence[_Column]) -> list[list[Run] | None]:
    """For each column its runs, of cells that are sent once; None where that does not pay."""
    found: list[list[Run] | tuple[int, ...] | None] = []
    first: dict[Any, int] = {}
    alike: dict[Any, list[int]] = {}
    for i, (cells, size, splits) in enumerate(columns):
        like = alike.setdefault((cells.dtype, size), [])
        if splits is not None and len(like) < _MOST_ALIKE:
            like.append(i)
    looked: dict[Any, IntArray] = {}  # by the identity of the rows
    for i, column in enumerate(columns):
        same = _same_cells(columns, i, first)
        repeats = same is None and _may_repeat(column, looked)
        found.append(
            same
            or (_prefixes(column) if repeats else None)
            or _end_to_end(columns, i, alike[column.cells.dtype, column.size])
            or (_rows_alike(column) if repeats else None)
        )
    in_order: dict[int, Run] = {}

    def resolved(i: int) -> list[Run] | None:
        """The runs of a column, those of other columns in the place of these."""
        own = found[i]
        if not isinstance(own, tuple):
            return own
        runs = [run for k in own for run in resolved(k) or [all_of(k)]]
        return runs if len(runs) <= MOST_RUNS else None

    def all_of(i: int) -> Run:
        """All of a column that is sent as it is."""
        if i not in in_order:
            rows = columns[i].rows()
            in_order[i] = Run(rows, columns[i].cells, Cells.of_index(rows.starts))
        return in_order[i]

    return [resolved(i) for i in range(len(columns))]


def _may_repeat(column: _Column, looked: dict[Any, IntArray]) -> bool:
    """Whether some of a few rows begin with the same cell, as they do if enough rows repeat."""
    splits = column.splits
    key = "rectangle" if splits is None else "rows", column.total if splits is None else id(splits)
    if key not in looked:
        rows = column.total if splits is None else splits.rows
        few = np.arange(rows)
        if rows > _FEW_ROWS:
            # Neighbours, as repeats often are; so many that about four pairs are among them if
            # rows are in no order, but each is there twice.
            few = np.linspace(0, rows - 4, math.isqrt(rows // 2)).astype(np.int64)
            few = (few[:, None] + np.arange(4)).reshape(-1)
        looked[key] = few if splits is None else np.minimum(splits.starts[few], column.total - 1)
    firsts = _firsts(column.cells.data, column.size, looked[key])
    return len(set(firsts.tolist())) < len(firsts)


def _pays(column: _Column, saved: int, cost: int) -> bool:
    """Whether so many cells of a column take more bytes than that where they are sent."""
    name, bits = column.cells.dtype, 8 * column.size
    if column.cells.narrow and name is not None:
        numbers = column.cells.data.view(f"u{TORCH_DTYPES[name]}")
        few = np.ascontiguousarray(numbers[:: -(-len(numbers) // _FEW_CELLS)])
        # All of them take as many bits, or more.
        bits = column.size // TORCH_DTYPES[name] * narrow_bits(few.view(np.uint8), name)
    return saved * bits > 8 * cost


def _index_cost(starts: IntArray) -> int:
    """Bytes that a run takes with its index."""
    stored = Cells.of_index(starts).stored()
    return TABLE + len(stored[1]) + 2 * SLACK


# What is looked for


def _same_cells(
    columns: Sequence[_Column], i: int, first: dict[Any, int]
) -> tuple[int, ...] | None:
    """Another column, before it, with the same cells in the same rows."""
    column = columns[i]
    cells, size, splits = column
    other = first.setdefault((cells.dtype, size, id(splits), *_sample(cells.data)), i)
    if other == i or not _equal(columns[other].cells.data, cells.data):
        return None
    rows = column.total if splits is None else splits.rows
    return (other,) if _pays(column, column.total, TABLE + 8 * rows + 2 * SLACK) else None


def _prefixes(column: _Column) -> list[Run] | None:
    """Rows that all begin the longest of them: one value, positions."""
    cells, size, splits = column
    if splits is None or splits.rows < 2:
        return None
    start = int(splits.starts[splits.lengths.argmax()])
    longest = cells.data[start * size : (start + splits.max) * size]
    if not _holds(column, longest, np.zeros(splits.rows, dtype=np.int64)):
        return None
    if not _pays(column, splits.total - splits.max, TABLE + 2 * SLACK):
        return None
    return [Run(splits, cells.like(longest), None)]


def _end_to_end(columns: Sequence[_Column], i: int, alike: Sequence[int]) -> tuple[int, int] | None:
    """Two columns whose rows are the heads and the tails of a column's rows."""
    column, whole = columns[i], columns[i].splits
    if whole is None:
        return None
    data = column.cells.data
    for head in alike:
        if columns[head].total >= column.total:
            continue
        for tail in alike:
            if columns[head].total + columns[tail].total != column.total:
                continue
            first, last = columns[head].rows(), columns[tail].rows()
            if not first.rows == last.rows == whole.rows:
                continue
            if (first.lengths + last.lengths != whole.lengths).any():
                continue
            if not _holds(columns[head], data, whole.starts):
                continue
            if not _holds(columns[tail], data, whole.starts + first.lengths):
                continue
            cost = 2 * (TABLE + 8 * whole.rows) + 3 * SLACK
            return (head, tail) if _pays(column, column.total, cost) else None
    return None


def _holds(column: _Column, data: ByteArray, starts: IntArray) -> bool:
    """Whether the rows of a column are the cells of others that begin at `starts`."""
    splits, size, own = column.rows(), column.size, column.cells.data
    held = np.flatnonzero(splits.lengths)
    few = held[:: -(-len(held) // 16)]
    numbers, others = _words(own, size), _words(data, size)
    for at in (0, splits.lengths[few] - 1):
        if (numbers[splits.starts[few] + at] != others[starts[few] + at]).any():
            return False
    for rows in _chunks(splits, size):
        there = _gathered(data, starts[rows], splits.lengths[rows], size)
        a, b = splits.host[rows.start] * size, splits.host[rows.stop] * size
        if not _equal(own[a:b], there):
            return False
    return True


def _rows_alike(column: _Column) -> list[Run] | None:
    """Rows that are equal to others, or begin like them."""
    cells, size, _ = column
    splits = column.rows()
    if column.splits is None and size in (1, 2, 4, 8):
        distinct, places = np.unique(_words(cells.data, size), return_inverse=True)
        cost = _index_cost(places) + SLACK
        if not _pays(column, column.total - len(distinct), cost):
            return None
        return [Run(splits, cells.like(distinct.view(np.uint8)), Cells.of_index(places))]
    like, shared = _beginnings(cells.data, splits, size)
    equal = shared == splits.lengths
    partly = int(shared[~equal].sum())
    # Heads and rests are two runs, of rows of their own each.
    cost = 2 * (8 * (splits.rows + 1) + SLACK)
    in_two = partly > 0 and _pays(column, partly, cost + TABLE + 2 * SLACK)
    if not in_two:
        shared, cost = np.where(equal, shared, 0), 0
    like = np.where(shared > 0, like, np.arange(splits.rows))
    kept = like == np.arange(splits.rows)
    heads = np.where(kept & (not in_two), splits.lengths, shared)
    np.maximum.at(heads, like, shared)
    first = RowSplits.from_lengths(np.where(kept, heads, 0))
    index, rest = first.starts[like], RowSplits.from_lengths(splits.lengths - heads)
    cost += _index_cost(index) + SLACK + (_index_cost(rest.starts) if rest.total else 0)
    if not _pays(column, splits.total - first.total - rest.total, cost):
        return None
    made = cells.like(_gathered(cells.data, splits.starts, first.lengths, size))
    if not rest.total:
        return [Run(splits, made, Cells.of_index(index))]
    rests = cells.like(_gathered(cells.data, splits.starts + heads, rest.lengths, size))
    return [
        Run(RowSplits.from_lengths(heads), made, Cells.of_index(index)),
        Run(rest, rests, Cells.of_index(rest.starts)),
    ]


def _beginnings(data: ByteArray, splits: RowSplits, size: int) -> tuple[IntArray, IntArray]:
    """(N,) a row that each row begins like, which begins like no other; and by how many cells."""
    like, shared = np.arange(splits.rows), np.zeros(splits.rows, dtype=np.int64)
    order = _sorted_twins(data, splits, size)
    # Of sorted rows, two have in common what all neighbours between them have.
    after = _common(data, splits, size, np.array(order, dtype=np.int64)) if order else []
    kept, with_kept = -1, 0
    for row, before, behind in zip(order, [0, *after], [*after, 0], strict=False):
        with_kept = min(with_kept, before)
        if 8 * behind > 9 * with_kept:  # it has more in common with the rows that follow
            kept, with_kept = row, splits.total
        elif with_kept:
            like[row], shared[row] = kept, with_kept
    return like, shared


def _sorted_twins(data: ByteArray, splits: RowSplits, size: int) -> list[int]:
    """The rows that begin like others, sorted by their bytes, longer ones first."""
    firsts = _firsts(data, size, np.minimum(splits.starts, len(data) // size - 1))
    ordered = np.sort(firsts)
    again = np.isin(firsts, ordered[1:][ordered[1:] == ordered[:-1]]) & (splits.lengths > 0)
    bounds = (splits.host * size).tolist()

    def heads(rows: Sequence[int], most: int) -> dict[int, bytes]:
        view = data.data
        return {i: bytes(view[bounds[i] : min(bounds[i] + most, bounds[i + 1])]) for i in rows}

    counts: dict[bytes, int] = {}
    found = heads(np.flatnonzero(again).tolist(), _HEAD)
    for head in found.values():
        counts[head] = counts.get(head, 0) + 1
    several = [row for row, head in found.items() if counts[head] > 1]
    keys = heads(several, max(_HEAD, _MOST_SORTED // max(1, len(several))))
    return sorted(several, key=keys.__getitem__, reverse=True)


# Cells


def _words(data: ByteArray, size: int) -> AnyArray:
    """(cells,) numbers as wide as a cell, or (cells, k) where there are none so wide."""
    if size in (1, 2, 4, 8):
        return data.view(f"u{size}")
    return data.view("u8").reshape(-1, size // 8) if size % 8 == 0 else data.reshape(-1, size)


def _firsts(data: ByteArray, size: int, cells: IntArray) -> AnyArray:
    """A number for each of these cells; of large ones, of their first bytes."""
    words = _words(data, size)
    firsts: AnyArray = words[cells] if words.ndim == 1 else words[cells, 0]
    return firsts


def _equal(a: ByteArray, b: ByteArray) -> bool:
    """Whether all bytes are the same."""
    if len(a) != len(b):
        return False
    if a.__array_interface__["data"] == b.__array_interface__["data"]:
        return True
    for start in range(0, len(a), _AT_ONCE):
        one, other = a[start : start + _AT_ONCE], b[start : start + _AT_ONCE]
        if len(one) % 8 == 0:
            one, other = one.view("u8"), other.view("u8")
        if not (one == other).all():
            return False
    return True


def _common(data: ByteArray, splits: RowSplits, size: int, rows: IntArray) -> list[int]:
    """How many cells each of these rows has in common with the next, from its first cell on."""
    firsts, others = splits.starts[rows[:-1]], splits.starts[rows[1:]]
    most = np.minimum(splits.lengths[rows[:-1]], splits.lengths[rows[1:]])
    found = most.copy()
    left, done, step = np.flatnonzero(most), 0, 64
    while len(left):
        cells = np.minimum(most[left] - done, step)
        one, other = (
            _words(_gathered(data, starts[left] + done, cells, size), size)
            for starts in (firsts, others)
        )
        differ = one != other
        wrong = np.flatnonzero(differ if differ.ndim == 1 else differ.any(axis=1))
        ends = cells.cumsum()
        pairs, at = np.unique(np.searchsorted(ends, wrong, side="right"), return_index=True)
        found[left[pairs]] = done + wrong[at] - (ends - cells)[pairs]
        done += step
        ended = most[left] <= done
        ended[pairs] = True
        left = left[~ended]
        step = max(1, min(4 * step, _AT_ONCE // (size * max(1, len(left)))))
    shared: list[int] = found.tolist()
    return shared


def _chunks(splits: RowSplits, size: int) -> Iterator[slice]:
    """The rows, as many at once as are compared at once."""
    start, host = 0, splits.host
    while start < splits.rows:
        end = int(np.searchsorted(host, host[start] + _AT_ONCE // size, side="right")) - 1
        end = min(max(end, start + 1), splits.rows)
        yield slice(start, end)
        start = end


def _gathered(data: ByteArray, starts: IntArray, lengths: IntArray, size: int) -> ByteArray:
    """Rows of cells, end to end."""
    out = np.empty(int(lengths.sum()) * size, dtype=np.uint8)
    if len(out):
        rowcopy.copy_all([Copy(out, data, None, np.ascontiguousarray(starts), lengths, size)])
    return out
