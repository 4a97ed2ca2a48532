"""`RowSplits`: where the rows of a column start and end.

PyTorch compares the raggedness of two nested tensors by the *identity* of their offsets. So there
is one `RowSplits` for each set of rows in a batch, and it owns the offsets tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from jagcodec.memory.arrays import IntArray

Chosen: TypeAlias = range | IntArray
"""Rows that were chosen. A range is contiguous: its step is 1."""


class RowSplits:
    """N rows, end to end in a run of cells. Immutable, so share it freely.

    It is made of the lengths or the offsets of the rows. Any other attribute is computed when it
    is first read: the writer of one row needs no array.
    """

    rows: int
    one_cell_each: bool = False  # whether `of_cells` made it
    _counts: tuple[int, ...] | None  # the lengths, or None if they came as an array
    lengths: IntArray  # (N,)
    offsets_array: IntArray  # (N + 1,), starting at 0
    starts: IntArray  # one object for all columns: the kernel checks an array that it knows once
    total: int
    min: int  # the length of the shortest row, 0 without rows
    max: int  # the length of the longest row

    # What columns of these rows share, made when the first column needs it:
    offsets_tensors: dict[Any, Any]  # by device, of `rows.nested`
    jagged_parts: dict[Any, Any]  # by `rows.nested`: all but offsets and values
    varlen_parts: dict[Any, Any]  # by device, of `rows.varlen`

    def __init__(self, rows: int) -> None:
        """Use `from_lengths`, `from_counts` or `from_offsets`."""
        self.rows = rows

    @classmethod
    def from_lengths(cls, lengths: IntArray) -> RowSplits:
        """Row splits of (N,) lengths, which are not negative; the lengths are aliased."""
        splits = cls(len(lengths))
        splits._counts = None
        splits.lengths = lengths
        if len(lengths) == 1:
            splits.total = splits.min = splits.max = lengths.item()
        return splits

    @classmethod
    def from_counts(cls, counts: tuple[int, ...]) -> RowSplits:
        """Row splits of N lengths, which are not negative."""
        splits = cls(len(counts))
        splits._counts = counts
        if len(counts) == 1:  # most messages
            splits.total = splits.min = splits.max = counts[0]
        else:
            splits.total = sum(counts)
            splits.min, splits.max = (min(counts), max(counts)) if counts else (0, 0)
        return splits

    @classmethod
    def of_cells(cls, rows: int) -> RowSplits:
        """Row splits of N rows of one cell each: those of a tensor (N, ...)."""
        splits = cls(rows)
        splits._counts = None
        splits.one_cell_each = True
        splits.total = rows
        splits.min = splits.max = min(rows, 1)
        return splits

    @classmethod
    def from_offsets(cls, offsets: IntArray) -> RowSplits | None:
        """Row splits of (N + 1,) offsets, aliased; None unless they start at 0 and never fall."""
        # Negative offsets are rejected first: the difference of two with unlike signs may wrap
        # around.
        if not len(offsets) or offsets.item(0) or offsets.argmin():
            return None
        splits = cls(len(offsets) - 1)
        splits._counts = None
        splits.offsets_array = offsets
        splits.starts, splits.total = offsets[:-1], offsets.item(-1)
        splits.lengths = offsets[1:] - splits.starts
        return None if splits.min < 0 else splits

    def __getattr__(self, name: str) -> Any:
        """Compute an attribute that is read for the first time; later reads do not get here."""
        make = _MAKERS.get(name)
        if make is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Whichever of several threads is first makes it for all of them.
        return self.__dict__.setdefault(name, make(self))

    def _make_lengths(self) -> IntArray:
        if self.one_cell_each:
            return np.ones(self.rows, dtype=np.int64)
        return np.array(self._counts, dtype=np.int64)

    def _make_offsets(self) -> IntArray:
        if self.one_cell_each:
            return np.arange(self.rows + 1, dtype=np.int64)
        if self._counts is not None:
            return np.frombuffer(array("q", accumulate(self._counts, initial=0)), np.int64)
        offsets: IntArray = np.zeros(self.rows + 1, np.int64)
        np.add.accumulate(self.lengths, out=offsets[1:])
        return offsets

    # By `argmin` and `argmax`: for few rows, `min` and `max` of numpy take four times as long.

    def _make_min(self) -> int:
        return self.lengths.item(self.lengths.argmin()) if self.rows > 1 else self.total

    def _make_max(self) -> int:
        return self.lengths.item(self.lengths.argmax()) if self.rows > 1 else self.total


_MAKERS: dict[str, Callable[[RowSplits], Any]] = {
    "lengths": RowSplits._make_lengths,
    "offsets_array": RowSplits._make_offsets,
    "starts": lambda splits: splits.offsets_array[:-1],
    "total": lambda splits: splits.offsets_array.item(-1),
    "min": RowSplits._make_min,
    "max": RowSplits._make_max,
    "offsets_tensors": lambda _: {},
    "jagged_parts": lambda _: {},
    "varlen_parts": lambda _: {},
}


class RowSplitsPool:
    """Makes equal rows one object, for the columns of one batch: by identity, then by value."""

    def __init__(self) -> None:
        self._by_value: dict[bytes, RowSplits] = {}
        # The source is kept, so that no other object gets its id.
        self._by_source: dict[int, tuple[object, RowSplits]] = {}
        self._joined: dict[tuple[int, ...], tuple[Sequence[RowSplits], RowSplits]] = {}

    def unique(self, row_splits: RowSplits) -> RowSplits:
        """The one `RowSplits` of these rows: the first of its value."""
        entry = self._by_source.get(id(row_splits))
        if entry is not None:
            return entry[1]
        one = self._by_value.setdefault(row_splits.offsets_array.tobytes(), row_splits)
        self._by_source[id(row_splits)] = (row_splits, one)
        return one

    def joined(self, parts: Sequence[RowSplits]) -> RowSplits:
        """The rows of all parts, one after the other; columns of the same parts share them."""
        key = tuple(map(id, parts))
        entry = self._joined.get(key)
        if entry is None:
            lengths = np.concatenate([part.lengths for part in parts])
            entry = self._joined[key] = parts, self.unique(RowSplits.from_lengths(lengths))
        return entry[1]

    def of_source(self, source: object) -> RowSplits | None:
        """The row splits that `remember` was given for an offsets tensor, if any."""
        entry = self._by_source.get(id(source))
        return None if entry is None else entry[1]

    def remember(self, source: object, row_splits: RowSplits) -> None:
        """Keep the row splits of an offsets tensor, so that columns that share it read it once."""
        self._by_source[id(source)] = (source, row_splits)
