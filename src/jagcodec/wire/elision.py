"""What columns repeat, found: rows and prefixes of rows, runs of one cell, ramps, other columns.

Everything that is found was compared cell by cell. Where to look is decided by a look at a few
cells, so that a batch without repeats costs little; and what would not make the message smaller
is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec import rowcopy
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.rowcopy import Copy
from jagcodec.wire.narrow import narrow_bits, narrowed
from jagcodec.wire.spec import INTEGER_DTYPES, MOST_PARTS, PART_NUMBERS, TORCH_DTYPES, PartForm

AnyArray: TypeAlias = npt.NDArray[Any]


class Cells(NamedTuple):
    """Cells end to end, which columns may share; known by the identity of `data`.

    Attributes:
        data: Their bytes.
        dtype: What the wire calls their dtype; None of bytes that mean nothing.
        narrow: Whether they are integers that are stored narrow.
    """

    data: ByteArray
    dtype: str | None = None
    narrow: bool = False

    def narrowed(self) -> tuple[int, ByteArray] | None:
        """How they are stored, and their bytes, if that is not as they are."""
        return narrowed(self.data, self.dtype) if self.narrow and self.dtype else None


class Column(NamedTuple):
    """A column whose rows lie end to end.

    Attributes:
        cells: All of them.
        size: Bytes of one, 1 at least.
        splits: The rows, one object for equal ones; of a rectangle, of one cell each.
        dense: Whether it is a rectangle.
    """

    cells: Cells
    size: int
    splits: RowSplits
    dense: bool


class FoundPart(NamedTuple):
    """A part of a column.

    Attributes:
        form: How its rows are made.
        splits: How long they are.
        cells: What they are made of.
        number: How many cells.
        indices: The numbers beside the cells.
        step: Of a ramp; 1 where rows of documents that share their bytes are one object.
    """

    form: PartForm
    splits: RowSplits
    cells: Cells
    number: int
    indices: IntArray | None = None
    step: int = 0


Parts: TypeAlias = list[FoundPart]

_TABLE = 8 * len(PART_NUMBERS)
"""Bytes of the table of a column, for each part."""

_SLACK = 128
"""Bytes that one more buffer may take beyond its own: up to a multiple of 64, and its numbers."""

_FEWEST = 256
"""Bytes of a column in which nothing is looked for."""

_MOST_ALIKE = 16
"""Columns of one dtype whose rows are looked for in each other."""

_AT_ONCE = 1 << 20
"""Bytes that are put together to be compared, so that they stay in a cache."""


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
    made = map(search.parts_of, range(len(columns)))
    return [
        None if parts[0].cells is column.cells and parts[0].form == PartForm.IN_ORDER else parts
        for column, parts in zip(columns, made, strict=False)
    ]


class _Search:
    """The columns of one message, and what was found of them.

    Attributes:
        columns: Those of the message, and behind them such as are only parts of others.
        found: For each what it is made of: parts, or the numbers of the columns whose rows its own
            rows are, end to end. Nothing of a column of which nothing was found.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = list(columns)
        self.found: list[Parts | tuple[int, ...] | None] = [None] * len(columns)
        self._widths: dict[int, int] = {}
        self._near: dict[int, IntArray] = {}
        # The first column with cells that begin and end like these, and columns of one dtype.
        self._known: dict[Any, int] = {}
        self._alike: dict[Any, list[int]] = {}
        for i, (cells, size, _, dense) in enumerate(columns):
            like = self._alike.setdefault((cells.dtype, size), [])
            if not dense and len(cells.data) >= _FEWEST and len(like) < _MOST_ALIKE:
                like.append(i)

    def each(self, look: Any) -> None:
        """Look at every column of which nothing was found yet."""
        i = 0
        while i < len(self.columns):  # which may become more
            if self.found[i] is None and len(self.columns[i].cells.data) >= _FEWEST:
                self.found[i] = look(i)
            i += 1

    def parts_of(self, i: int) -> Parts:
        """The parts of a column; one in order if nothing, or too much, was found."""
        found, (cells, _, splits, _) = self.found[i], self.columns[i]
        if isinstance(found, list):
            return found
        parts = [part for other in found or () for part in self.parts_of(other)]
        if 0 < len(parts) <= MOST_PARTS:
            return parts
        return [FoundPart(PartForm.IN_ORDER, splits, cells, splits.total)]

    # What it costs

    def _pays(self, column: Column, cells: int, cost: int) -> bool:
        """Whether these many cells of a column take more bytes than that where they are sent."""
        data, dtype, narrow = column.cells
        if not narrow or dtype is None:
            return cells * column.size > cost
        # At least a bit for each; how many it is takes a look at all of them.
        cells *= column.size // _ITEMSIZES[dtype]
        if cells // 8 > cost:
            return True
        width = self._widths.get(id(data))
        if width is None:
            width = self._widths[id(data)] = narrow_bits(data, dtype)
        return cells * width // 8 > cost

    def _most(self, cells: Cells, index: IntArray | None) -> int:
        """Bytes that cells and an index take at most."""
        stored = cells.narrowed()
        size = len(cells.data if stored is None else stored[1]) + _SLACK
        return size if index is None else size + index_size(index) + _SLACK

    # What is looked for

    def same_cells(self, i: int) -> tuple[int, ...] | None:
        """Another column, before it, with the same cells in the same rows."""
        cells, size, splits, dense = self.columns[i]
        data = cells.data
        middle = len(data) // 2
        sample = bytes(data[:32]), bytes(data[middle : middle + 32]), bytes(data[-32:])
        key = (cells.dtype, size, id(splits), dense, *sample)
        other = self._known.setdefault(key, i)
        if other == i or not self._pays(self.columns[i], splits.total, _TABLE + _SLACK):
            return None
        return (other,) if _equal(self.columns[other].cells.data, data) else None

    def runs(self, i: int) -> Parts | None:
        """Cells that follow each other and are equal."""
        column = self.columns[i]
        cells, size, splits, _ = column
        words = _words(cells.data, size)
        count = splits.total
        if count < 2:
            return None
        # Windows of neighbours: of noise nearly all differ.
        near = words[self._windows(count)]
        if 8 * np.count_nonzero(_differ(near[:, 1:], near[:, :-1], 2)) > near.shape[0] * (
            near.shape[1] - 1
        ):
            return None
        changes = np.flatnonzero(_differ(words[1:], words[:-1], 1)) + 1
        if not self._pays(column, count, len(changes)):
            return None
        starts = np.concatenate([[0], changes])
        values = cells._replace(data=_bytes(words[starts]))
        counts = None if len(starts) == 1 else np.diff(starts, append=count)
        if not self._pays(column, count, self._most(values, counts) + _TABLE):
            return None
        return [FoundPart(PartForm.REPEATED, splits, values, len(starts), counts)]

    def _windows(self, count: int) -> IntArray:
        """Some places of neighbours among this many cells."""
        found = self._near.get(count)
        if found is None:
            width = min(16, count - 1)
            first = np.arange(32) * (count - 1 - width) // 31
            found = self._near[count] = first[:, None] + np.arange(width + 1)
        return found

    def ramp(self, i: int) -> Parts | None:
        """Integers that rise, or fall, by one step in all rows."""
        column = self.columns[i]
        cells, size, splits, dense = column
        name = cells.dtype
        if dense or name not in INTEGER_DTYPES or name == "bool" or size != _ITEMSIZES[name]:
            return None
        numbers = _words(cells.data, size)
        starts, lengths = splits.starts, splits.lengths
        long = np.flatnonzero(lengths > 1)
        if not len(long):
            return None
        few = starts[long[:: -(-len(long) // 4)]]
        steps = numbers[few + 1] - numbers[few]
        step = steps[0]
        if not step or (steps != step).any():
            return None
        other = numbers[1:] - numbers[:-1] != step
        # Between rows there may be any step.
        between = starts[(lengths > 0) & (starts > 0)] - 1
        if np.count_nonzero(other) != np.count_nonzero(other[between]):
            return None
        firsts = numbers[np.minimum(starts, splits.total - 1)]
        held = firsts[lengths > 0]
        firsts = held[:1] if (held == held[0]).all() else firsts
        made = cells._replace(data=_bytes(firsts.copy()))
        if not self._pays(column, splits.total, self._most(made, None) + _TABLE):
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
            cost = 8 * (column.splits.rows + 1) + 2 * _TABLE + 3 * _SLACK
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
        words, own = _words(column.cells.data, size), _words(inner.cells.data, size)
        for at in (np.zeros(len(few), np.int64), splits.lengths[few] - 1):
            if _differ(words[starts[few] + at], own[splits.starts[few] + at], 1).any():
                return False
        for rows in _chunks(splits, size):
            a, b = splits.host[rows.start] * size, splits.host[rows.stop] * size
            there = _gathered(column.cells.data, starts[rows], splits.lengths[rows], size)
            if not _equal(there, inner.cells.data[a:b]):
                return False
        return True

    def _add_rest(self, column: Column, inner: IntArray, *, behind: bool) -> None:
        """Add the column of what rows have behind, or before, what another column has of them."""
        cells, size, splits, _ = column
        rest = splits.lengths - inner
        data = _gathered(cells.data, splits.starts + inner if behind else splits.starts, rest, size)
        own = Column(cells._replace(data=data), size, RowSplits.from_lengths(rest), False)
        self.columns.append(own)
        self.found.append(None)

    def rows(self, i: int, groups: IntArray | None) -> Parts | None:
        """Rows that other rows begin with, or that are equal to others."""
        column = self.columns[i]
        cells, size, splits, _ = column
        if splits.rows < 2:
            return None
        if groups is not None and len(groups) == splits.rows:
            like = _first_of_each(groups)
            firsts, shared = _firsts(column), np.zeros(splits.rows, dtype=np.int64)
            alike = (firsts == firsts[like]) & (like != np.arange(splits.rows))
            for row in np.flatnonzero(alike).tolist():
                shared[row] = _common(column, row, int(like[row]))
        else:
            found = _alike(column)
            if found is None:
                return None
            like, shared = found
        lengths = splits.lengths
        shared = np.where(like == np.arange(splits.rows), 0, shared // size)
        whole = (shared == lengths) & (shared > 0)
        # Rows that repeat whole need no second part; prefixes have to be worth it.
        prefixes = int(shared[~whole].sum())
        cost = 2 * (8 * (splits.rows + 1) + _SLACK) + _TABLE
        if not self._pays(column, prefixes, cost):
            shared = np.where(whole, shared, 0)
        rest = RowSplits.from_lengths(lengths - shared)
        index = np.where(shared > 0, rest.starts[like], 0)
        in_one = ((shared == 0) | whole).all()
        if in_one:
            index = np.where(shared > 0, rest.starts[like], rest.starts)
        cost = _TABLE + index_size(index) + 2 * _SLACK + (0 if in_one else cost)
        if not self._pays(column, splits.total - rest.total, cost):
            return None
        data = _gathered(cells.data, splits.starts + shared, rest.lengths, size)
        kept = cells._replace(data=data)
        if in_one:
            return [FoundPart(PartForm.AT, splits, kept, rest.total, index)]
        prefix = RowSplits.from_lengths(shared)
        return [
            FoundPart(PartForm.AT, prefix, kept, rest.total, index),
            FoundPart(PartForm.IN_ORDER, rest, kept, rest.total),
        ]


_ITEMSIZES = {name: TORCH_DTYPES[name] for name in INTEGER_DTYPES}


# --- rows that begin alike ---------------------------------------------------------------------

_HEAD = 128
"""Bytes by which rows are told apart first."""

_FEW_ROWS = 128
"""How many of many rows are looked at first."""

_BLOCKS = (np.arange(_FEW_ROWS // 4) + np.random.default_rng(0).random(_FEW_ROWS // 4) / 2) / (
    _FEW_ROWS // 4
)
"""Where they lie, four together, as shares of all rows: in each share of as many, in its first
half, so that none is looked at twice."""

_ODD = 0x9E3779B1
"""What numbers are multiplied with before others are added, so that few sums are equal."""

_MOST_SORTED = 32 << 20
"""Bytes of rows that are sorted, so as to find those that begin alike."""


def _alike(column: Column) -> tuple[IntArray, IntArray] | None:
    """For each row one that it begins like, and how many bytes they share; None of no such rows.

    A row that others are like is like itself.
    """
    size, splits = column.size, column.splits
    # Of noise nearly all rows begin otherwise than all others, which is seen without a loop. Of
    # many rows, if enough of them repeat to matter, some of a few do.
    many = splits.rows > 2 * _FEW_ROWS
    if many and not len(_repeated(_firsts(column, _some_rows(splits.rows)))):
        return None
    firsts = _firsts(column)
    again = _repeated(firsts)
    if not len(again):
        return None
    if column.dense and size <= 8:  # which is all there is of a row
        like = _first_of_each(firsts)
        return like, np.full(splits.rows, size, dtype=np.int64)
    data = column.cells.data.data
    bounds = (splits.host * size).tolist()
    heads = {
        row: bytes(data[bounds[row] : min(bounds[row] + _HEAD, bounds[row + 1])])
        for row in np.flatnonzero(np.isin(firsts, again)).tolist()
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
    order = sorted(several, key=keys.__getitem__)
    # Of sorted rows, two have in common what all neighbours between them have.
    common = [0, *(_common(column, a, b) for a, b in pairwise(order)), 0]
    like, shared = np.arange(splits.rows), np.zeros(splits.rows, dtype=np.int64)
    first, held = order[0], 0
    for k, row in enumerate(order):
        held = min(held, common[k])
        # A row that the next one shares much more with is kept whole for it.
        if common[k + 1] > 2 * held or k == 0:
            first, held = row, common[k + 1]
            continue
        like[row], shared[row] = first, held
        held = min(held, common[k + 1])
    return like, shared


def _firsts(column: Column, some: Any = slice(None)) -> AnyArray:
    """A number for each of some rows, of its first bytes: rows that begin alike have the same."""
    size, splits = column.size, column.splits
    data = column.cells.data
    starts, lengths = splits.starts[some], splits.lengths[some]
    firsts: AnyArray
    if size in (4, 8) or (column.dense and size in (1, 2)):
        words = _words(data, size)
        if column.dense:
            firsts = words[some]
            return firsts
        # Of two cells: one number more or less of a vocabulary is soon found twice by chance.
        last = splits.total - 1
        second = words[np.minimum(starts + (lengths > 1), last)]
        firsts = words[np.minimum(starts, last)] * words.dtype.type(_ODD) + second
        return firsts
    # Up to eight bytes; zeros behind a row that has fewer.
    at, within = (starts * size)[:, None], np.arange(8)
    inside = within < (lengths * size)[:, None]
    first = np.where(inside, data[np.where(inside, at + within, 0)], 0)
    firsts = first.astype(np.uint8).view(np.uint64)[:, 0]
    return firsts


def _repeated(firsts: AnyArray) -> AnyArray:
    """Those that occur more than once."""
    ordered = np.sort(firsts)
    again: AnyArray = ordered[1:][ordered[1:] == ordered[:-1]]
    return again


def _some_rows(rows: int) -> IntArray:
    """A few of many rows, the same each time: neighbours, as repeats often are, from anywhere."""
    first = (_BLOCKS * rows).astype(np.int64)
    return (first[:, None] + np.arange(4)).reshape(-1)


def _first_of_each(groups: AnyArray) -> IntArray:
    """(N,) the first row of the group that each row is of."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rows: IntArray = first[inverse]
    return rows


def _common(column: Column, a: int, b: int) -> int:
    """Bytes that two rows begin with, both of them."""
    host, size, data = column.splits.host, column.size, column.cells.data
    at, to = int(host[a]) * size, int(host[b]) * size
    most = min(int(host[a + 1]) * size - at, int(host[b + 1]) * size - to)
    done, step = 0, 4096
    while done < most:
        end = min(done + step, most)
        one, other = data[at + done : at + end], data[to + done : to + end]
        if not _equal(one, other):
            return done + int((one != other).argmax())
        done, step = end, min(8 * step, _AT_ONCE)
    return most


# --- rows of documents -------------------------------------------------------------------------

_LARGE = 1024
"""Bytes of a document from which on it is compared with others."""


class SharedDocuments(NamedTuple):
    """Rows of documents that are sent once.

    Attributes:
        like: For each row the first that has the same bytes; itself of most.
        one_object: Whether such rows are one object, and not just equal.
    """

    like: list[int]
    one_object: bool


def same_documents(rows: Sequence[Sequence[Any]]) -> SharedDocuments | None:
    """Which rows of documents, each given as pieces of bytes, repeat others.

    None if it does not pay to say so. Pieces in one list are those of one object.
    """
    first: dict[Any, int] = {}
    like = [first.setdefault(id(row), i) for i, row in enumerate(rows)]
    one_object = len(first) < len(rows)
    if not one_object:
        first.clear()
        for i, row in enumerate(rows):
            if sum(map(len, row)) >= _LARGE:
                other = first.setdefault(_sample(row), i)
                if other != i and _same_pieces(rows[other], row):
                    like[i] = other
    saved = sum(sum(map(len, row)) for i, row in enumerate(rows) if like[i] != i)
    # Offsets of all bytes take no more than these.
    if saved <= _TABLE + 8 * len(rows) + 2 * _SLACK:
        return None
    return SharedDocuments(like, one_object)


def parts_of_frames(rows: Sequence[Sequence[Any]]) -> Parts | None:
    """Rows of documents whose messages hold the same large frames, such as the pixels of a prompt.

    None if it does not pay to send these once. A row is given as its bytes, or as the pieces that
    `blob_pieces` makes of a message: two before its frames, and two for each.
    """
    most = max((len(row) - _BEFORE_LARGE) // 2 for row in rows)
    if not 0 < most < MOST_PARTS:
        return None
    heads: list[Any] = []
    lengths = np.zeros((len(rows), most + 1), dtype=np.int64)
    starts = np.zeros((len(rows), most), dtype=np.int64)
    kept: list[list[Any]] = [[] for _ in range(most)]
    ends = [0] * most
    known: dict[Any, tuple[Any, int]] = {}
    for i, row in enumerate(rows):
        # Up to the first large frame, with the zeros before it.
        heads += row[: _BEFORE_LARGE + 1]
        lengths[i, 0] = sum(map(len, row[: _BEFORE_LARGE + 1]))
        for k in range((len(row) - _BEFORE_LARGE) // 2):
            at = _BEFORE_LARGE + 1 + 2 * k
            frame, gap = row[at : at + 2] if at + 1 < len(row) else (row[at], b"")
            key = k, len(gap), _sample((frame,))
            other, start = known.get(key, (None, 0))
            if other is None or not _same_pieces((other,), (frame,)):
                start = ends[k]
                known[key] = frame, start
                kept[k] += (frame, gap)
                ends[k] += len(frame) + len(gap)
            starts[i, k] = start
            lengths[i, k + 1] = len(frame) + len(gap)
    cost = (most + 1) * (_TABLE + 16 * (len(rows) + 1) + 2 * _SLACK)
    if int(lengths[:, 1:].sum()) - sum(ends) <= cost:
        return None
    data = [np.frombuffer(bytearray().join(pieces), np.uint8) for pieces in (heads, *kept)]
    splits = [RowSplits.from_lengths(np.ascontiguousarray(own)) for own in lengths.T]
    return [
        FoundPart(PartForm.IN_ORDER, splits[0], Cells(data[0]), len(data[0])),
        *(
            FoundPart(PartForm.AT, own, Cells(cells), len(cells), np.ascontiguousarray(index))
            for own, cells, index in zip(splits[1:], data[1:], starts.T, strict=True)
        ),
    ]


_BEFORE_LARGE = 4
"""Pieces of a message in one buffer before its large frames, and the zeros before these: preamble,
header, zeros, and the frame of all small buffers."""


def _sample(row: Sequence[Any]) -> tuple[Any, ...]:
    """What tells most rows apart: of each piece its size, and some of its bytes."""
    return tuple(
        (len(piece), bytes(piece[:32]), bytes(piece[len(piece) // 2 :][:32]), bytes(piece[-32:]))
        for piece in row
    )


def _same_pieces(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(
        _equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
        for one, other in zip(a, b, strict=True)
    )


# --- cells -------------------------------------------------------------------------------------


def index_size(index: IntArray) -> int:
    """Bytes that an index takes in a message."""
    stored = narrowed(index.view(np.uint8), "int64")
    return index.nbytes if stored is None else len(stored[1])


def _words(data: ByteArray, size: int) -> AnyArray:
    """(cells,) numbers as wide as a cell, or (cells, k) where there are none so wide."""
    if size in (1, 2, 4, 8):
        return data.view(f"u{size}")
    return data.view("u8").reshape(-1, size // 8) if size % 8 == 0 else data.reshape(-1, size)


def _bytes(words: AnyArray) -> ByteArray:
    flat: ByteArray = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
    return flat


def _differ(a: AnyArray, b: AnyArray, dims: int) -> npt.NDArray[np.bool_]:
    """Which cells differ; `dims` of the arrays are not within a cell."""
    differ: npt.NDArray[np.bool_] = np.not_equal(a, b)
    if differ.ndim > dims:
        differ = np.logical_or.reduce(differ, axis=-1)
    return differ


def _equal(a: ByteArray, b: ByteArray) -> bool:
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
