"""Where every cell of a forward pass comes from: the numbers of a packing plan.

A *row* is one sample, and a *cell* is the place of one token. A *padded row* is a row's tokens and
then pads, up to a multiple; padded rows are end to end in one buffer. The *tail* is the cells that
the buffer's total needs beyond them: they lengthen the last row, or are a row of their own without
tokens. For context parallelism, each padded row or the whole buffer is cut into equal *chunks*.
Each *rank* holds some of the chunks, end to end in a buffer of its own. What a rank holds is
written as *pieces*, which are runs of one row's tokens or of pads, in the order of its buffer.

Only `PaddedRows` knows tails, chunks and ranks. Indices, masks and positions follow from pieces. So
does the way back, whose pieces take the buffers of the ranks as rows.

`PackLayout` is the layout of one buffer. `layout_arguments.py` makes layouts, and padded rows of
several buffers, for the arguments of a caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import require_int
from jagcodec.errors import ArgumentError, brief
from jagcodec.memory.arrays import IntArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]

CpLayout = Literal["zigzag", "zigzag_buffer", "contiguous"]
"""Which chunks a rank of context parallelism holds."""

Tail = Literal["last_row", "own_row"]
"""Where the cells go that a total needs beyond the padded rows."""


PAD_RUN = 256
"""The most pads of one piece, so that a short run of pads is enough to copy any piece from."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """K runs of cells that fill a buffer, end to end and in order. No run is empty.

    Attributes:
        row: (K,) the row that each belongs to, pads included. A separate tail is row N.
        source: (K,) the cell of its row that each begins with; for pads, the cell that would be
            there.
        length: (K,) how many cells each has; pads have at most `PAD_RUN`.
        is_pad: (K,) whether each consists of pads.
        destination: (K,) where each begins in the buffer.
        total: The cells of the buffer.
    """

    row: IntArray
    source: IntArray
    length: IntArray
    is_pad: BoolArray
    destination: IntArray
    total: int

    @classmethod
    def of(cls, row: IntArray, source: IntArray, length: IntArray, is_pad: BoolArray) -> Pieces:
        """Pieces made of runs: empty ones are left out, and long runs of pads become several."""
        times = np.where(is_pad, -(-length // PAD_RUN), length > 0)
        row, source, length = (numbers.repeat(times) for numbers in (row, source, length))
        is_pad = is_pad.repeat(times)
        if len(times) and times.item(times.argmax()) > 1:
            before = PAD_RUN * (np.arange(len(row)) - (times.cumsum() - times).repeat(times))
            source = source + before
            length = np.where(is_pad, np.minimum(length - before, PAD_RUN), length)
        ends = length.cumsum()
        return cls(row, source, length, is_pad, ends - length, ends.item(-1) if len(ends) else 0)

    def cells(self, starts: IntArray) -> IntArray:
        """(total,) indices of cells of a column, if piece i begins at its cell ``starts[i]``."""
        cells = np.arange(self.total)
        cells += np.repeat(starts - self.destination, self.length)
        return cells

    def of_row_ends(self, missing: IntArray) -> Pieces:
        """The pieces for a column that lacks the first `missing` (N,) tokens of each row.

        Its first cell is at that token. Pads take the place of the tokens that it lacks.
        """
        missing = np.append(missing, 0)[self.row]  # a separate tail lacks none
        pads = np.where(self.is_pad, self.length, np.clip(missing - self.source, 0, self.length))
        source = self.source - missing
        # Each piece becomes pads, which may be none, and tokens, which may be none.
        sources = np.stack([source, source + pads], axis=1)
        lengths = np.stack([pads, self.length - pads], axis=1)
        is_pad = np.tile([True, False], len(pads))
        return Pieces.of(self.row.repeat(2), sources.reshape(-1), lengths.reshape(-1), is_pad)

    def begins(self, row_starts: IntArray) -> IntArray:
        """(K,) the cell of a column at which each begins, if rows begin at `row_starts`."""
        # Append a start for row N, to which a separate tail belongs.
        first_cells: IntArray = np.append(row_starts, 0)[self.row] + self.source
        return first_cells

    def mask(self) -> BoolArray:
        """(total,) whether each cell holds a token."""
        return np.repeat(~self.is_pad, self.length)


class _Stretches(NamedTuple):
    """S stretches of padded rows, each of which may be empty, in the order of a buffer."""

    row: IntArray  # (S,) the padded row of each
    first: IntArray  # (S,) the cell of its row that each begins with
    size: IntArray  # (S,) cells of each


@dataclass(frozen=True, eq=False, slots=True)
class PaddedRows:
    """R padded rows end to end, in one buffer or several, from which pieces are cut.

    Attributes:
        number: (R,) the row of a column that each is; a separate tail has a number that no column
            has.
        lengths: (R,) tokens of each.
        padded: (R,) cells of each.
        bounds: (B + 1,) where the padded rows of each buffer begin and end.
        has_tail: (B,) whether the last padded row of a buffer is a separate tail.
        cp_size: The number of ranks that share each buffer.
        cp_layout: How the ranks share it.
    """

    number: IntArray
    lengths: IntArray
    padded: IntArray
    bounds: IntArray
    has_tail: BoolArray
    cp_size: int
    cp_layout: CpLayout

    def layout(self, buffer: int) -> PackLayout:
        """The layout of one buffer, as if there were no others."""
        start, end = self.bounds[buffer], self.bounds[buffer + 1]
        lengths = self.lengths[start : end - self.has_tail[buffer]]
        return PackLayout(lengths, self.padded[start:end], self.cp_size, self.cp_layout)

    def layouts(self, rank: int | None) -> list[PackLayout]:
        """The layout of each buffer, as if there were no others.

        All pieces of this rank are made at once, and then cut into those of each buffer.
        """
        layouts = [self.layout(buffer) for buffer in range(len(self.has_tail))]
        whole = self._padded_row_pieces(rank, 0)
        sizes = [each.total if rank is None else each.local_total for each in layouts]
        cells = np.cumsum([0, *sizes])  # where the cells of each buffer begin
        # No piece is in two buffers, so each buffer has a range of the pieces.
        bounds = np.searchsorted(whole.destination, cells).tolist()
        for i, each in enumerate(layouts):
            part = slice(bounds[i], bounds[i + 1])
            each.keep_pieces(
                rank,
                Pieces(
                    whole.row[part] - self.bounds[i],
                    whole.source[part],
                    whole.length[part],
                    whole.is_pad[part],
                    whole.destination[part] - cells[i],
                    sizes[i],
                ),
            )
        return layouts

    def pieces(self, rank: int | None, shift: int) -> Pieces:
        """The pieces that a rank holds of all buffers, end to end; None means the whole buffers."""
        pieces = self._padded_row_pieces(rank, shift)
        return replace(pieces, row=self.number[pieces.row])

    def _padded_row_pieces(self, rank: int | None, shift: int) -> Pieces:
        """What `pieces` returns, but with indices of padded rows instead of row numbers."""
        row, first, size = self._stretches(None if self.cp_size == 1 else rank)
        # Each stretch consists of pads, the cells that have a token, and pads.
        low = np.clip(max(shift, 0), first, first + size)
        high = np.clip(self.lengths[row] + min(shift, 0), low, first + size)
        edges = np.stack([first, low, high, first + size], axis=1)
        source = edges[:, :-1].reshape(-1) - shift
        length = np.diff(edges).reshape(-1)
        is_pad = np.tile([True, False, True], len(row))
        return Pieces.of(np.repeat(row, 3), source, length, is_pad)

    def _stretches(self, rank: int | None) -> _Stretches:
        """The stretches that a rank holds, in its order.

        With 2 ranks, each padded row (or the whole buffer) is 4 chunks in a zig-zag: rank 0 holds
        chunks 0 and 3, rank 1 holds chunks 1 and 2. In causal attention the work for a chunk grows
        with its place in the row, so an early and a late chunk together cost each rank the same.
        """
        padded = self.padded
        rows = np.arange(len(padded))
        if rank is None:
            return _Stretches(rows, np.zeros_like(padded), padded)
        chunks = 2 * self.cp_size
        if self.cp_layout == "zigzag":
            chunk = padded // chunks  # cells of a chunk of each row
            first = np.stack([rank * chunk, (chunks - 1 - rank) * chunk], axis=1)
            return _Stretches(np.repeat(rows, 2), first.reshape(-1), np.repeat(chunk, 2))
        mine = [rank]
        if self.cp_layout == "zigzag_buffer":
            mine = [rank, chunks - 1 - rank]
        # The chunks are of the whole buffer, and may begin or end within a row. Find the part of
        # each padded row that is in them: cells `low` to `high` of the row, often none.
        ends = np.append(0, padded.cumsum())
        buffer = np.repeat(np.arange(len(self.has_tail)), np.diff(self.bounds))
        totals = np.diff(ends[self.bounds])
        size = (totals // (self.cp_size * len(mine)))[buffer]  # cells of a chunk
        start = ends[:-1] - ends[self.bounds[:-1]][buffer]  # where each row begins in its buffer
        low = np.clip([chunk * size - start for chunk in mine], 0, padded)
        high = np.clip([(chunk + 1) * size - start for chunk in mine], 0, padded)
        # So far all rows come for one chunk, then all for the next. Sort them by buffer.
        order = np.argsort(np.tile(buffer, len(mine)), kind="stable")
        row = np.tile(rows, len(mine))
        return _Stretches(row[order], low.reshape(-1)[order], (high - low).reshape(-1)[order])


class PackLayout:
    """Rows of tokens in one buffer of padded rows, and in the buffers of ranks. Immutable.

    Attributes:
        rows: N.
        lengths: (N,) tokens of each row.
        padded_lengths: (N,) cells of each row: its tokens and pads, and for the last row also the
            tail if ``tail="last_row"``.
        cp_size: The number of ranks that share the buffer.
        cp_layout: How the ranks share it.
        starts: (N,) where each row begins without pads; (N + 1,) with a separate tail, which is
            one more row.
        cu_seqlens: `starts` and the end, as int32.
        cu_seqlens_padded: The same with pads. The same object if nothing is padded.
        max_seqlen: The longest row.
        max_seqlen_padded: The longest padded row; or the tail, if it is separate and longer.
        total: The cells of the whole buffer.
        local_total: The cells of a rank: ``total / cp_size``.
    """

    rows: int
    lengths: IntArray
    padded_lengths: IntArray
    cp_size: int
    cp_layout: CpLayout
    starts: IntArray
    cu_seqlens: npt.NDArray[np.int32]
    cu_seqlens_padded: npt.NDArray[np.int32]
    max_seqlen: int
    max_seqlen_padded: int
    total: int
    local_total: int

    def __init__(
        self, lengths: IntArray, padded: IntArray, cp_size: int, cp_layout: CpLayout
    ) -> None:
        """Use `plan_layout`. For a separate tail, `padded` has one number more than `lengths`."""
        self.rows = len(lengths)
        self.lengths, self.padded_lengths = lengths, padded[: self.rows]
        self.cp_size, self.cp_layout = cp_size, cp_layout
        has_tail = len(padded) > self.rows
        with_tail = np.append(lengths, 0) if has_tail else lengths
        bounds, tails = np.array([0, len(padded)]), np.array([has_tail])
        number = np.arange(len(padded))
        self._rows = PaddedRows(number, with_tail, padded, bounds, tails, cp_size, cp_layout)
        self.starts, self.cu_seqlens = _starts_and_offsets(with_tail)
        _, self.cu_seqlens_padded = _starts_and_offsets(padded)
        if np.array_equal(with_tail, padded):
            # Use one object: Transformer Engine takes two objects for two different layouts.
            self.cu_seqlens_padded = self.cu_seqlens
        self.max_seqlen = lengths.max(initial=0).item()
        self.max_seqlen_padded = padded.max(initial=0).item()
        self.total = self.cu_seqlens_padded.item(-1)
        self.local_total = self.total // cp_size
        self._pieces_by_rank: dict[tuple[int | None, int], Pieces] = {}
        self._inverses: dict[tuple[bool, int], Pieces] = {}

    def __reduce__(self) -> Any:  # without the pieces
        return PackLayout, (self.lengths, self._rows.padded, self.cp_size, self.cp_layout)

    def read_rank(self, rank: Any, path: str) -> int | None:
        """The rank that a caller passed, see `rank_of`."""
        return rank_of(rank, self.cp_size, path)

    def read_shift(self, shift: Any, path: str) -> int:
        """A shift that a caller passed, limited to the size of the whole buffer."""
        number = require_int(shift, -(1 << 62), path, "an integer")
        return max(-self.total, min(number, self.total))

    def pieces(self, rank: int | None = None, shift: int = 0) -> Pieces:
        """The pieces of a rank, or of the whole buffer: cell j of a row has its token j - shift.

        Pads stay pads, whatever the shift.
        """
        if self.cp_size == 1:
            rank = None  # the one rank holds the whole buffer
        return remembered(
            self._pieces_by_rank, (rank, shift), lambda: self._rows.pieces(rank, shift)
        )

    def keep_pieces(self, rank: int | None, pieces: Pieces) -> None:
        """Keep the pieces of a rank, which were made for several buffers at once."""
        self._pieces_by_rank[None if self.cp_size == 1 else rank, 0] = pieces

    def inverse(self, shift: int = 0, *, by_rank: bool, last: IntArray | None = None) -> Pieces:
        """The pieces that make rows of values of all cells, or only the `last` (N,) of each row.

        Token j of a row gets the value of cell j - shift, or a pad if the row has no such token.
        The `row` of a piece is the rank whose buffer it is read from; without `by_rank`, it is 0,
        for the whole buffer.
        """
        pieces = remembered(
            self._inverses, (by_rank, shift), lambda: self._inverse(shift, by_rank=by_rank)
        )
        if last is None:
            return pieces
        # Each piece is within one row, and none is empty: it is in the last of the rows that begin
        # at or before it. Rows without tokens begin where the next row does, and come before it.
        row = np.searchsorted(self.starts[: self.rows], pieces.destination, side="right") - 1
        first = self.starts[row] + (self.lengths - last)[row]
        cut = np.clip(first - pieces.destination, 0, pieces.length)
        return Pieces.of(pieces.row, pieces.source + cut, pieces.length - cut, pieces.is_pad)

    def _inverse(self, shift: int, *, by_rank: bool) -> Pieces:
        """What `inverse` remembers: the pieces of whole rows."""
        # A shift leaves tokens at one end of each row without a value: they become pads.
        pad_counts = np.minimum(abs(shift), self.lengths)
        starts = self.starts[: self.rows] + (shift < 0) * (self.lengths - pad_counts)
        zeros = np.zeros_like(pad_counts)
        # The target, row, source and length of each piece: pads first, then buffer by buffer.
        parts = [np.stack([starts, zeros, zeros, pad_counts])]
        for buffer in range(self.cp_size if by_rank else 1):
            pieces = self.pieces(buffer if by_rank else None, -shift)
            targets = self.starts[pieces.row] + pieces.source
            row = np.full_like(targets, buffer)
            part = np.stack([targets, row, pieces.destination, pieces.length])
            parts.append(part[:, ~pieces.is_pad])
        joined = np.concatenate(parts, axis=1)
        order = np.argsort(joined[0], kind="stable")
        row, source, length = joined[1:, order]
        return Pieces.of(row, source, length, order < len(pad_counts))

    def position_ids(self, rank: int | None, *, through_pads: bool) -> IntArray:
        """0, 1, ... in each row. Pads continue if `through_pads`; otherwise they are 0."""
        pieces = self.pieces(rank)
        positions = pieces.cells(pieces.source)
        return positions if through_pads or not pieces.is_pad.any() else positions * pieces.mask()


_MOST_REMEMBERED = 16

K = TypeVar("K")
V = TypeVar("V")


def remembered(values: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """The value of a key, which is made if `values` lacks it.

    Only the newest values are kept: thousands of shifts or ranks of one plan would fill the memory.
    """
    value = values.get(key)
    if value is None:
        value = make()
        while len(values) >= _MOST_REMEMBERED:
            values.pop(next(iter(values)), None)
        values[key] = value
    return value


def _starts_and_offsets(lengths: IntArray) -> tuple[IntArray, npt.NDArray[np.int32]]:
    """Where rows of these lengths begin, and the (R + 1,) int32 offsets with the end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets[:-1], offsets.astype(np.int32)


def rank_of(rank: Any, cp_size: int, path: str) -> int | None:
    """A rank of context parallelism that a caller passed; None is the whole buffer."""
    if rank is None:
        return None
    number = require_int(rank, 0, path, f"a rank of 0 to {cp_size - 1}, or None")
    if number >= cp_size:
        detail = f"expected a rank of 0 to {cp_size - 1}, or None, found {brief(rank)}"
        raise ArgumentError("bad_option", path, detail)
    return number


def rounded_up(number: Any, multiple: int) -> Any:
    """A number, or each number of an array, rounded up to a multiple."""
    return -(-number // multiple) * multiple
