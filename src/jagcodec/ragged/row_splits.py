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


class RowSplits:
    """N rows, end to end in a run of cells. Immutable, so share it freely."""

    __slots__ = ("host", "lengths", "made", "max", "min", "rows", "starts", "tensors", "total")

    def __init__(self, host: IntArray, lengths: IntArray) -> None:
        """Use `from_lengths` or `from_offsets`."""
        self.host: IntArray = host  # (N + 1,) offsets, starting at 0
        # Made once: the kernel checks the same array only once for all columns.
        self.starts: IntArray = host[:-1]
        self.lengths: IntArray = lengths
        self.rows: int = len(lengths)
        self.total: int = host.item(-1)
        self.min: int = self.total  # the length of the shortest row, 0 without rows
        self.max: int = self.total  # and of the longest
        if self.rows > 1:
            # By index: numpy's own `min` takes four times as long for few rows.
            self.min = lengths.item(lengths.argmin())
            self.max = lengths.item(lengths.argmax())
        self.tensors: dict[torch.device, torch.Tensor] = {}  # the offsets, by `ragged.nested`
        self.made: dict[Any, Any] = {}  # what columns of these rows share besides

    @classmethod
    def from_lengths(cls, lengths: IntArray) -> RowSplits:
        """Row splits of (N,) lengths, none of them negative; the lengths are aliased."""
        if len(lengths) == 1:  # a message of one row: to add up takes three times as long
            return cls(np.array((0, lengths.item()), np.int64), lengths)
        host: IntArray = np.zeros(len(lengths) + 1, np.int64)
        np.add.accumulate(lengths, out=host[1:])
        return cls(host, lengths)

    @classmethod
    def from_offsets(cls, host: IntArray) -> RowSplits | None:
        """Row splits of (N + 1,) offsets, aliased; None unless they start at 0 and never fall."""
        # None may be below 0: the difference of two offsets of unlike signs may wrap around.
        if not len(host) or host.item(0) or host.argmin():
            return None
        row_splits = cls(host, host[1:] - host[:-1])
        return None if row_splits.min < 0 else row_splits


class RowSplitsPool:
    """Makes equal rows one object, for the columns of one batch: by identity, then by value."""

    def __init__(self) -> None:
        self._by_value: dict[bytes, RowSplits] = {}
        # The source is kept, so that its id stays its own.
        self._by_source: dict[int, tuple[object, RowSplits]] = {}
        self._joined: dict[tuple[int, ...], tuple[Sequence[RowSplits], RowSplits]] = {}

    def unique(self, row_splits: RowSplits) -> RowSplits:
        """The one `RowSplits` of these rows: the first that was asked about."""
        known = self._by_source.get(id(row_splits))
        if known is not None:
            return known[1]
        one = self._by_value.setdefault(row_splits.host.tobytes(), row_splits)
        self._by_source[id(row_splits)] = (row_splits, one)
        return one

    def joined(self, parts: Sequence[RowSplits]) -> RowSplits:
        """The rows of several, one after the other: made once for all columns of the same ones."""
        key = tuple(map(id, parts))
        known = self._joined.get(key)
        if known is None:
            lengths = np.concatenate([part.lengths for part in parts])
            known = self._joined[key] = parts, self.unique(RowSplits.from_lengths(lengths))
        return known[1]

    def of_source(self, source: object) -> RowSplits | None:
        """What was `remember`ed of an offsets tensor."""
        known = self._by_source.get(id(source))
        return None if known is None else known[1]

    def remember(self, source: object, row_splits: RowSplits) -> None:
        """Columns that share an offsets tensor have it read once."""
        self._by_source[id(source)] = (source, row_splits)
