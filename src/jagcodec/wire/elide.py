"""`elide`: rows and columns that repeat others become runs of shared cells.

Everything that is found was compared cell by cell. A sample of cells decides where to look, so that
a batch without repeats costs little. A column stays as it is if the message would not get smaller.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec import rowcopy
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.rowcopy import Copy
from jagcodec.wire.lowered import Cells, EndToEnd, Run
from jagcodec.wire.spec import MOST_RUNS, RUN_NUMBERS, TORCH_DTYPES

AnyArray: TypeAlias = npt.NDArray[Any]

TABLE = 8 * len(RUN_NUMBERS)
"""Bytes that a table has for each run."""

SLACK = 128
"""Bytes that one more buffer may need beyond its own: up to a multiple of 64, and its numbers."""

FEWEST = 256
"""Bytes of a column in which nothing is looked for."""

_LARGE = 1024  # bytes of a document from which on it is compared with others
_MOST_ALIKE = 16  # columns of one dtype whose rows are looked for in each other
_FEW_ROWS = 128  # of more rows, only some are compared first
_FEW_CELLS = 4096  # of more cells, only some decide in how many bits they are stored
_HEAD = 128  # bytes by which rows are told apart first
_MOST_SORTED = 32 << 20  # bytes of rows that are sorted to find those that start the same
_AT_ONCE = 1 << 20  # bytes that are put together to be compared, so that they stay in a cache


# --- documents ---------------------------------------------------------------------------------


def equal_documents(rows: Sequence[Sequence[Any]]) -> tuple[list[int] | None, bool]:
    """For each row of documents the first that is the same, if some are sent once: those that are
    one object, or else equal and large. And whether they are one object.
    """
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
    pays = saved > TABLE + 8 * len(rows) + 2 * SLACK
    return (like, one_object) if pays else (None, False)


def _size(row: Sequence[Any]) -> int:
    return sum(map(len, row))


def _sample(data: Any) -> tuple[bytes, bytes, bytes]:
    """A few bytes, which tell most buffers apart."""
    middle = len(data) // 2
    return bytes(data[:32]), bytes(data[middle : middle + 32]), bytes(data[-32:])


def _equal_pieces(a: Any, b: Any) -> bool:
    return _equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))


# --- columns -----------------------------------------------------------------------------------


def elide(columns: Sequence[EndToEnd]) -> list[EndToEnd]:
    """The columns, with runs of cells that are sent once where that pays."""
    made = list(columns)
    looked = [i for i, column in enumerate(columns) if _is_looked_at(column)]
    for i, runs in zip(looked, _found([columns[i] for i in looked]), strict=True):
        made[i] = columns[i]._replace(runs=runs)
    return made


def _is_looked_at(column: EndToEnd) -> bool:
    """Whether something may repeat in a column."""
    known = column.splits is None or column.ragged_dim == 1
    return known and len(column.cells.data) >= FEWEST and len(column.shape) > 0


def _cell(column: EndToEnd) -> int:
    """Bytes of a cell, 1 at least."""
    return len(column.cells.data) // column.shape[0]


def _rows(column: EndToEnd) -> RowSplits:
    """The rows; those of a rectangle are one cell each."""
    if column.splits is not None:
        return column.splits
    return RowSplits.from_lengths(np.ones(column.shape[0], dtype=np.int64))


def _found(columns: Sequence[EndToEnd]) -> list[list[Run] | None]:
    """For each column its runs, of cells that are sent once; None where that does not pay."""
    found: list[list[Run] | tuple[int, ...] | None] = []
    first: dict[Any, int] = {}
    alike: dict[Any, list[int]] = {}
    for i, column in enumerate(columns):
        like = alike.setdefault((column.cells.dtype, _cell(column)), [])
        if column.splits is not None and len(like) < _MOST_ALIKE:
            like.append(i)
    looked: dict[Any, IntArray] = {}  # by the identity of the rows
    for i, column in enumerate(columns):
        same = _same_cells(columns, i, first)
        repeats = same is None and _may_repeat(column, looked)
        found.append(
            same
            or (_prefixes(column) if repeats else None)
            or _end_to_end(columns, i, alike[column.cells.dtype, _cell(column)])
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
            rows = _rows(columns[i])
            in_order[i] = Run(rows, columns[i].cells, Cells.of_index(rows.starts))
        return in_order[i]

    return [resolved(i) for i in range(len(columns))]


def _may_repeat(column: EndToEnd, looked: dict[Any, IntArray]) -> bool:
    """Whether some of a few rows begin with the same cell, as they do if enough rows repeat."""
    splits, total = column.splits, column.shape[0]
    key = ("rectangle", total) if splits is None else ("rows", id(splits))
    if key not in looked:
        rows = total if splits is None else splits.rows
        few = np.arange(rows)
        if rows > _FEW_ROWS:
            # Neighbours, as repeats often are; so many that about four pairs are among them if
            # rows are in no order, but each is there twice.
            few = np.linspace(0, rows - 4, math.isqrt(rows // 2)).astype(np.int64)
            few = (few[:, None] + np.arange(4)).reshape(-1)
        looked[key] = few if splits is None else np.minimum(splits.starts[few], total - 1)
    firsts = _firsts(column.cells.data, _cell(column), looked[key])
    return len(set(firsts.tolist())) < len(firsts)


def _pays(column: EndToEnd, saved: int, cost: int) -> bool:
    """Whether that many cells of a column need more bytes than `cost` when they are sent."""
    cells, taken = column.cells, saved * _cell(column)
    if cells.narrow and cells.dtype is not None:
        numbers = cells.data.view(f"u{TORCH_DTYPES[cells.dtype]}")
        few = np.ascontiguousarray(numbers[:: -(-len(numbers) // _FEW_CELLS)]).view(np.uint8)
        # All of them take as many bits each, or more.
        taken = taken * len(cells.like(few).stored()[1]) // len(few)
    return taken > cost


def _index_cost(starts: IntArray) -> int:
    """Bytes of a run with its index."""
    return TABLE + len(Cells.of_index(starts).stored()[1]) + 2 * SLACK


# What is looked for


def _same_cells(
    columns: Sequence[EndToEnd], i: int, first: dict[Any, int]
) -> tuple[int, ...] | None:
    """Another column, before it, with the same cells in the same rows."""
    column = columns[i]
    cells, splits, *_ = column
    key = cells.dtype, _cell(column), id(splits), *_sample(cells.data)
    other = first.setdefault(key, i)
    if other == i or not _equal(columns[other].cells.data, cells.data):
        return None
    cost = TABLE + 8 * _rows(column).rows + 2 * SLACK
    return (other,) if _pays(column, column.shape[0], cost) else None


def _prefixes(column: EndToEnd) -> list[Run] | None:
    """Rows that all begin the longest of them: one value, positions."""
    cells, splits, *_ = column
    if splits is None or splits.rows < 2:
        return None
    size, start = _cell(column), int(splits.starts[splits.lengths.argmax()])
    longest = cells.data[start * size : (start + splits.max) * size]
    if not _holds(column, longest, np.zeros(splits.rows, dtype=np.int64)):
        return None
    if not _pays(column, splits.total - splits.max, TABLE + 2 * SLACK):
        return None
    return [Run(splits, cells.like(longest), None)]


def _end_to_end(
    columns: Sequence[EndToEnd], i: int, alike: Sequence[int]
) -> tuple[int, int] | None:
    """Two columns whose rows are the heads and the tails of a column's rows."""
    column, whole = columns[i], columns[i].splits
    if whole is None:
        return None
    data = column.cells.data
    for head, tail in itertools.product(alike, repeat=2):
        first, last = _rows(columns[head]), _rows(columns[tail])
        if first.total + last.total != whole.total or not (first.total and last.total):
            continue
        if not first.rows == last.rows == whole.rows:
            continue
        if (
            (first.lengths + last.lengths == whole.lengths).all()
            and _holds(columns[head], data, whole.starts)
            and _holds(columns[tail], data, whole.starts + first.lengths)
        ):
            cost = 2 * (TABLE + 8 * whole.rows) + 3 * SLACK
            return (head, tail) if _pays(column, whole.total, cost) else None
    return None


def _holds(column: EndToEnd, data: ByteArray, starts: IntArray) -> bool:
    """Whether the rows of a column are the cells of others that begin at `starts`."""
    splits, size, own = _rows(column), _cell(column), column.cells.data
    held = np.flatnonzero(splits.lengths)
    few = held[:: -(-len(held) // 16)]
    numbers, others = _words(own, size), _words(data, size)
    for at in (0, splits.lengths[few] - 1):
        if (numbers[splits.starts[few] + at] != others[starts[few] + at]).any():
            return False
    first, host = 0, splits.host
    while first < splits.rows:
        # As many rows as stay in a cache, but one at least.
        end = int(np.searchsorted(host, host[first] + _AT_ONCE // size, side="right")) - 1
        end = min(max(end, first + 1), splits.rows)
        there = _gathered(data, starts[first:end], splits.lengths[first:end], size)
        if not _equal(own[host[first] * size : host[end] * size], there):
            return False
        first = end
    return True


def _rows_alike(column: EndToEnd) -> list[Run] | None:
    """Rows that are equal to others, or begin like them."""
    cells, size, splits = column.cells, _cell(column), _rows(column)
    if column.splits is None and size <= 8:
        return None  # an index could take as much
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
    words, lengths = _words(data, size), splits.lengths.tolist()
    rows = [words[a : a + n] for a, n in ((int(splits.host[i]), lengths[i]) for i in order)]
    # Of sorted rows, two have in common what all neighbours between them have.
    after = list(itertools.starmap(_common, itertools.pairwise(rows)))
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
    _, which, counts = np.unique(firsts, return_inverse=True, return_counts=True)
    again = np.flatnonzero((counts[which] > 1) & (splits.lengths > 0)).tolist()
    bounds = (splits.host * size).tolist()

    def heads(rows: Sequence[int], most: int) -> dict[int, bytes]:
        view = data.data
        return {i: bytes(view[bounds[i] : min(bounds[i] + most, bounds[i + 1])]) for i in rows}

    found = heads(again, _HEAD)
    among = Counter(found.values())
    several = [row for row, head in found.items() if among[head] > 1]
    keys = heads(several, max(_HEAD, _MOST_SORTED // max(1, len(several))))
    return sorted(several, key=keys.__getitem__, reverse=True)


def _common(one: AnyArray, other: AnyArray) -> int:
    """How many cells two rows have in common, from the first on."""
    most, done, step = min(len(one), len(other)), 0, 256
    while done < most:
        end = min(done + step, most)
        differ = one[done:end] != other[done:end]
        wrong = np.flatnonzero(differ if differ.ndim == 1 else differ.any(axis=1))
        if len(wrong):
            return done + int(wrong[0])
        done, step = end, 4 * step
    return most


# Cells


def _words(data: ByteArray, size: int) -> AnyArray:
    """(cells,) numbers as wide as a cell, or (cells, k) if no integer is as wide."""
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


def _gathered(data: ByteArray, starts: IntArray, lengths: IntArray, size: int) -> ByteArray:
    """Rows of cells, end to end."""
    out = np.empty(int(lengths.sum()) * size, dtype=np.uint8)
    if len(out):
        rowcopy.copy_all([Copy(out, data, None, np.ascontiguousarray(starts), lengths, size)])
    return out
