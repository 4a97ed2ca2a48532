"""`RowSplits`: where the rows of a column start and end.

PyTorch compares the raggedness of two nested tensors by the *identity* of their offsets. So there
is one `RowSplits` for each set of rows in a batch, and it owns the offsets tensors.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.tensor_bytes import IntArray, to_device

Lengths: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
"""What callers may hand in where lengths are asked for."""


class RowSplits:
    """N rows, end to end in a run of cells. Immutable, so share it freely.

    Attributes:
        host: (N + 1,) int64 offsets, starting at 0.
        lengths: (N,) int64, the differences.
        rows: N.
        total: Cells of all rows.
        min: Length of the shortest row, 0 without rows.
        max: Length of the longest row, 0 without rows.
        starts: (N,) the offsets without the last.
        tensors: The offsets as tensors, by device, which `jagcodec.ragged.nested` makes.
        bounds: `min` and `max` as nested tensors keep them, for `jagcodec.ragged.nested`.
        like: What nested tensors of equal shapes have in common, likewise.
    """

    __slots__ = (
        *("_varlen", "bounds", "host", "lengths", "like", "max", "min", "rows"),
        *("starts", "tensors", "total"),
    )

    def __init__(self, host: IntArray, lengths: IntArray, low: int, high: int) -> None:
        """Use `from_lengths` or `from_offsets`."""
        self.host: IntArray = host
        # Made once: the kernel checks the same array only once for all columns.
        self.starts: IntArray = host[:-1]
        self.lengths: IntArray = lengths
        self.rows: int = len(lengths)
        self.total: int = int(host[-1])
        self.min: int = low
        self.max: int = high
        self.bounds: dict[str, Any] | None = None
        self.like: dict[Any, dict[str, Any]] = {}
        self.tensors: dict[torch.device, torch.Tensor] = {}
        self._varlen: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] | None = None

    @classmethod
    def from_lengths(cls, lengths: IntArray) -> RowSplits:
        """Row splits of (N,) lengths, none of them negative; the lengths are aliased."""
        if len(lengths) == 1:  # a message of one row: numpy would take five times as long
            length = int(lengths[0])
            return cls(np.array((0, length), dtype=np.int64), lengths, length, length)
        host: IntArray = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.add.accumulate(lengths, out=host[1:])
        return cls(host, lengths, *_extremes(lengths))

    @classmethod
    def from_offsets(cls, host: IntArray) -> RowSplits | None:
        """Row splits of (N + 1,) offsets, aliased; None unless they start at 0 and never fall."""
        if not len(host) or host[0]:
            return None
        if len(host) <= _FEW:
            numbers = host.tolist()
            few = list(map(operator.sub, numbers[1:], numbers))
            low, high = min(few, default=0), max(few, default=0)
            return None if low < 0 else cls(host, np.array(few, dtype=np.int64), low, high)
        lengths: IntArray = host[1:] - host[:-1]
        low, high = _extremes(lengths)
        # Of numbers below 0, too, because their differences may wrap around.
        if low < 0 or _extremes(host)[0] < 0:
            return None
        return cls(host, lengths, low, high)

    def with_offsets(self, offsets: torch.Tensor) -> RowSplits:
        """The same rows with an offsets tensor that exists already, whose identity is kept."""
        same = RowSplits(self.host, self.lengths, self.min, self.max)
        same.bounds = self.bounds
        same.tensors = {offsets.device: offsets}
        return same

    def varlen(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(N + 1,) int32 ``cu_seqlens`` and (total,) int64 positions within each row."""
        if self._varlen is None:
            self._varlen = {}
        found = self._varlen.get(device)
        if found is None:
            positions = np.arange(self.total) - np.repeat(self.host[:-1], self.lengths)
            made = torch.from_numpy(self.host.astype(np.int32)), torch.from_numpy(positions)
            both = to_device(made[0], device), to_device(made[1], device)
            found = self._varlen.setdefault(device, both)
        return found


_FEW = 64
"""Numbers that Python looks at in less time than numpy."""


def _extremes(lengths: IntArray) -> tuple[int, int]:
    if len(lengths) > _FEW:
        return int(np.minimum.reduce(lengths)), int(np.maximum.reduce(lengths))
    few = lengths.tolist()
    return min(few, default=0), max(few, default=0)


def read_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of a caller's (N,) lengths: the one place where they are read and summed."""
    numbers = _length_numbers(lengths, path, rows)
    row_splits = RowSplits.from_lengths(numbers)
    if row_splits.min < 0:
        row = int(np.argmax(numbers < 0))
        raise ArgumentError(
            "bad_length",
            f"{path}, row {row}",
            f"expected a length of 0 or more, found {numbers[row]}",
        )
    if row_splits.max * row_splits.rows >= 1 << 63:
        raise ArgumentError(
            "bad_length",
            path,
            f"expected lengths that add up below 2**63, found {row_splits.max}",
        )
    return row_splits


_INT64 = torch.int64
_LARGEST = np.iinfo(np.int64).max
LENGTH_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""The dtypes that lengths may have."""


def _length_numbers(lengths: Any, path: str, rows: int | None) -> IntArray:
    """(N,) lengths as int64 on the host, copied; one device sync, none for a CPU tensor."""
    if type(lengths) is torch.Tensor and lengths.dtype is _INT64 and lengths.is_cpu:
        array = lengths.numpy()
    else:
        array = _fetched_lengths(lengths, path)
    if array.ndim != 1 or (rows is not None and len(array) != rows):
        expected = "(N,)" if rows is None else f"({rows},)"
        raise ArgumentError(
            "bad_shape",
            path,
            f"lengths shape {array.shape} != {expected}: expected one length per row",
        )
    if array.dtype.kind == "u" and array.itemsize == 8:
        # It alone may hold more than int64: what does reads as the largest length, and is too much.
        array = np.minimum(array, _LARGEST)
    # Copied: what was checked must not change with the caller's lengths.
    numbers: IntArray = array.astype(np.int64)
    return numbers


def _fetched_lengths(lengths: Any, path: str) -> npt.NDArray[Any]:
    if isinstance(lengths, (list, tuple)):
        return np.array([_length(item, f"{path}, row {i}") for i, item in enumerate(lengths)], int)
    if isinstance(lengths, (np.ndarray, array)):
        lengths = np.asarray(lengths)
        integers = lengths.dtype.kind in "iu"
    elif not isinstance(lengths, torch.Tensor):
        expected = "expected (N,) lengths: a tensor, an array, a list or a tuple"
        raise ArgumentTypeError("bad_type", path, f"{expected}, found {describe(lengths)}")
    elif lengths.layout is not torch.strided or lengths.is_nested or lengths.is_meta:
        expected = "expected an (N,) tensor of lengths"
        raise ArgumentTypeError("bad_type", path, f"{expected}, found {describe(lengths)}")
    else:
        integers = lengths.dtype in LENGTH_DTYPES
    if not integers:
        expected = "expected integer lengths"
        raise ArgumentTypeError("bad_dtype", path, f"{expected}, found {lengths.dtype}")
    on_host = isinstance(lengths, np.ndarray)
    fetched: npt.NDArray[Any] = lengths if on_host else lengths.detach().cpu().numpy()
    return fetched


def _length(item: Any, path: str) -> int:
    """One integer of any type, as an int."""
    number = item
    if type(item) is not int:
        if isinstance(item, bool) or "bool" in str(getattr(item, "dtype", "")):
            number = None
        try:
            number = operator.index(number)
        except TypeError:
            found = brief(item) if isinstance(item, (bool, float, str)) else describe(item)
            expected = "expected integer lengths"
            raise ArgumentTypeError("bad_dtype", path, f"{expected}, found {found}") from None
    if not -_LARGEST <= number <= _LARGEST:
        expected = f"expected a length from 0 to {_LARGEST}"
        raise ArgumentError("bad_length", path, f"{expected}, found {brief(number)}")
    return int(number)


class RowSplitsPool:
    """Makes equal rows one object, for the columns of one batch.

    Rows are looked up by the identity of their source first, and by value second.
    """

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
