"""`RowSplits`: where the rows of a column start and end.

PyTorch compares the raggedness of two nested tensors by the *identity* of their offsets. So there
is one `RowSplits` for each set of rows in a batch, and it owns the offsets tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import IntArray

LENGTH_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""The dtypes that lengths and offsets may have."""


class RowSplits:
    """N rows, end to end in a run of cells. Immutable, so share it freely."""

    __slots__ = (
        "jagged_parts",
        "lengths",
        "max",
        "min",
        "offsets_array",
        "offsets_tensors",
        "rows",
        "starts",
        "total",
        "varlen_parts",
    )

    def __init__(self, offsets_array: IntArray, lengths: IntArray) -> None:
        """Use `from_lengths` or `from_offsets`."""
        self.offsets_array: IntArray = offsets_array  # (N + 1,), starting at 0
        # One object for all columns: the kernel checks an array that it knows only once.
        self.starts: IntArray = offsets_array[:-1]
        self.lengths: IntArray = lengths
        self.rows: int = len(lengths)
        self.total: int = offsets_array.item(-1)
        self.min: int = self.total  # the length of the shortest row, 0 without rows
        self.max: int = self.total  # the length of the longest row
        if self.rows > 1:
            # By index: numpy's own `min` takes four times as long for few rows.
            self.min = lengths.item(lengths.argmin())
            self.max = lengths.item(lengths.argmax())
        # What columns of these rows share, made when the first column needs it:
        self.offsets_tensors: dict[torch.device, torch.Tensor] = {}  # by `ragged.nested`
        self.jagged_parts: dict[Any, Any] = {}  # by `ragged.nested`: all but offsets and values
        self.varlen_parts: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def from_lengths(cls, lengths: IntArray) -> RowSplits:
        """Row splits of (N,) lengths, which are not negative; the lengths are aliased."""
        if len(lengths) == 1:  # For a message of one row, adding up takes three times as long.
            return cls(np.array((0, lengths.item()), np.int64), lengths)
        offsets: IntArray = np.zeros(len(lengths) + 1, np.int64)
        np.add.accumulate(lengths, out=offsets[1:])
        return cls(offsets, lengths)

    @classmethod
    def from_offsets(cls, offsets: IntArray) -> RowSplits | None:
        """Row splits of (N + 1,) offsets, aliased; None unless they start at 0 and never fall."""
        # Negative offsets are rejected first: the difference of two with unlike signs may wrap
        # around.
        if not len(offsets) or offsets.item(0) or offsets.argmin():
            return None
        row_splits = cls(offsets, offsets[1:] - offsets[:-1])
        return None if row_splits.min < 0 else row_splits


class RowSplitsPool:
    """Makes equal rows one object, for the columns of one batch: by identity, then by value."""

    def __init__(self) -> None:
        self._by_value: dict[bytes, RowSplits] = {}
        # The source is kept, so that no other object gets its id.
        self._by_source: dict[int, tuple[object, RowSplits]] = {}
        self._joined: dict[tuple[int, ...], tuple[Sequence[RowSplits], RowSplits]] = {}

    def unique(self, row_splits: RowSplits) -> RowSplits:
        """The one `RowSplits` of these rows: the first of its value."""
        known = self._by_source.get(id(row_splits))
        if known is not None:
            return known[1]
        one = self._by_value.setdefault(row_splits.offsets_array.tobytes(), row_splits)
        self._by_source[id(row_splits)] = (row_splits, one)
        return one

    def joined(self, parts: Sequence[RowSplits]) -> RowSplits:
        """The rows of all parts, one after the other; columns of the same parts share this."""
        key = tuple(map(id, parts))
        known = self._joined.get(key)
        if known is None:
            lengths = np.concatenate([part.lengths for part in parts])
            known = self._joined[key] = parts, self.unique(RowSplits.from_lengths(lengths))
        return known[1]

    def of_source(self, source: object) -> RowSplits | None:
        """The row splits that `remember` was given for an offsets tensor, if any."""
        known = self._by_source.get(id(source))
        return None if known is None else known[1]

    def remember(self, source: object, row_splits: RowSplits) -> None:
        """Keep the row splits of an offsets tensor, so that columns that share it read it once."""
        self._by_source[id(source)] = (source, row_splits)
