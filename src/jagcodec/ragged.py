"""Row splits, computed once and shared; the only room that touches the insides of nested tensors.

PyTorch compares the raggedness of two jagged tensors by the *identity* of their offsets. So the
offsets object is made once per batch, here, and handed to every column that has those rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor, _store_val_in_tensor

from jagcodec.buffers import IntArray, sent
from jagcodec.errors import ArgumentError
from jagcodec.staging import Staging


@dataclass(frozen=True, eq=False)
class RowSplits:
    """Where each of N rows begins and ends in a run of cells.

    Attributes:
        offsets: (N + 1,) int64 on the CPU, starting at 0; its identity is the raggedness.
        host: The same numbers as a numpy array (shared memory).
        lengths: (N,) int64, the differences.
        min: Length of the shortest row, 0 without rows.
        max: Length of the longest row, 0 without rows.
    """

    offsets: torch.Tensor
    host: IntArray
    lengths: IntArray
    min: int
    max: int

    @property
    def rows(self) -> int:
        return len(self.host) - 1

    @property
    def total(self) -> int:
        return int(self.host[-1])

    @cached_property
    def _starts_by_stride(self) -> dict[int, IntArray]:
        return {}

    def row_starts(self, stride: int) -> IntArray:
        """(N,) int64: where rows begin that lie `stride` cells apart."""
        starts = self._starts_by_stride.get(stride)
        if starts is None:
            starts = self._starts_by_stride[stride] = np.arange(len(self.lengths)) * stride
        return starts

    @property
    def starts(self) -> IntArray:
        return self.host[:-1]


def splits_of_lengths(lengths: IntArray) -> RowSplits:
    """Row splits from (N,) lengths, none of them negative."""
    host = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=host[1:])
    return _splits(host, lengths)


def splits_of_offsets(host: IntArray) -> RowSplits:
    """Row splits over (N + 1,) offsets that start at 0 and never fall; aliases `host`."""
    return _splits(host, host[1:] - host[:-1])


def _splits(host: IntArray, lengths: IntArray) -> RowSplits:
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    return RowSplits(torch.from_numpy(host), host, lengths, low, high)


def is_jagged(value: object) -> bool:
    """Whether `value` is a `torch.jagged` nested tensor."""
    # Not by its layout: every attribute of a nested tensor is dispatched, at 20 microseconds.
    return isinstance(value, NestedTensor)


class Raggedness:
    """Makes the jagged tensors of one batch, so that equal rows share one offsets object.

    Holds at most one copy of the offsets per device.
    """

    def __init__(self, splits: RowSplits) -> None:
        self.splits = splits
        self._offsets = {splits.offsets.device: splits.offsets}
        self._bounds: dict[str, Any] | None = None

    def jagged(self, values: torch.Tensor, ragged_dim: int = 1) -> torch.Tensor:
        """`values`, whose dim ``ragged_dim - 1`` holds all rows end to end, as a jagged tensor."""
        device = values.device
        if device not in self._offsets:
            self._offsets[device] = sent(torch.from_numpy(self.splits.host), device)
        offsets = self._offsets[device]
        # The bounds are passed always: without them padding goes to the sum of all lengths
        # (pytorch/pytorch#159380).
        if values.requires_grad:
            return torch.nested.nested_tensor_from_jagged(
                values,
                offsets,
                jagged_dim=ragged_dim,
                min_seqlen=self.splits.min,
                max_seqlen=self.splits.max,
            )
        if self._bounds is None:
            self._bounds = {
                "min_seqlen": _store_val_in_tensor(self.splits.min),
                "max_seqlen": _store_val_in_tensor(self.splits.max),
            }
        # What that call comes down to where no gradient has to pass; three times as fast, and
        # without the warning about fx tracing that torch 2.13 logs in every process.
        return NestedTensor(
            values, offsets, _metadata_cache=dict(self._bounds), _ragged_idx=ragged_dim
        )


class RaggedGroups:
    """The raggedness of each set of row lengths in one batch: equal rows, one offsets object."""

    def __init__(self) -> None:
        self._by_rows: dict[bytes, Raggedness] = {}
        # By identity too, which is asked first; the array is kept, so that its id stays its own.
        self._by_array: dict[int, tuple[IntArray, Raggedness]] = {}

    def of_lengths(self, lengths: IntArray) -> Raggedness:
        """The one raggedness of rows as long as these."""
        seen = self._by_array.get(id(lengths))
        if seen is not None:
            return seen[1]
        rows = lengths.tobytes()
        if rows not in self._by_rows:
            self._by_rows[rows] = Raggedness(splits_of_lengths(lengths))
        self._by_array[id(lengths)] = (lengths, self._by_rows[rows])
        return self._by_rows[rows]


class Parts(NamedTuple):
    """A jagged tensor taken apart, as it lies in memory.

    Row i is the cells ``starts[i] : starts[i] + lengths[i]`` of dim ``ragged_dim - 1`` of
    `values`. `compact` says that the rows touch, in order, and fill that dim.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    starts: IntArray
    lengths: IntArray
    ragged_dim: int
    compact: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Of the values."""
        return self.values.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return tuple(self.values.shape)


def note_rows(jagged: torch.Tensor, staging: Staging) -> bool:
    """Ask for what `take_apart` reads of a jagged tensor; says whether it is to be brought."""
    inner: Any = jagged
    holes: torch.Tensor | None = inner._lengths
    noted = staging.note(inner._offsets)
    return (holes is not None and staging.note(holes)) or noted


def note_memory(jagged: torch.Tensor, staging: Staging) -> bool:
    """As `note_rows`, and ask for the values too, if there are no holes in them."""
    inner: Any = jagged
    values = inner._lengths is None and staging.note(inner._values)
    return note_rows(jagged, staging) or values


def take_apart(
    jagged: torch.Tensor,
    path: str,
    *,
    detach: bool = True,
    seen: dict[int, IntArray] | None = None,
    staging: Staging | None = None,
) -> Parts:
    """The memory of a jagged tensor. One device sync, none for a CPU tensor.

    `detach` cuts the values off from autograd, which is far cheaper than to detach `jagged`.
    `seen`, empty at first, makes offsets that several tensors of one batch share be read once.
    What `staging` has fetched is taken from there, without a sync; the offsets object stays.

    Raises:
        ArgumentError: Its offsets do not describe rows of its values; `path` says whose.
    """
    # Attributes, because each public accessor is a dispatched op of 5 to 25 microseconds.
    inner: Any = jagged
    values: torch.Tensor = inner._values.detach() if detach else inner._values
    offsets: torch.Tensor = inner._offsets
    holes: torch.Tensor | None = inner._lengths
    ragged_dim: int = inner._ragged_idx
    numbers = offsets
    if staging is not None:
        values, numbers = staging.on_host(values), staging.on_host(offsets)
        holes = None if holes is None else staging.on_host(holes)
    total = values.shape[ragged_dim - 1]
    if holes is None:
        host = None if seen is None else seen.get(id(offsets))
        if host is None:
            host = _host(numbers)
        if seen is not None:
            seen[id(offsets)] = host
        starts, lengths = host[:-1], np.diff(host)
    else:
        host = _host(torch.cat([numbers[:-1].to(torch.int64), holes.to(torch.int64)]))
        starts, lengths = host[: len(holes)], host[len(holes) :]
    compact = holes is None and host[0] == 0 and host[-1] == total
    if len(lengths) and (lengths.min() < 0 or starts.min() < 0 or (starts + lengths).max() > total):
        raise ArgumentError(
            "bad_length",
            path,
            f"expected rows within the {total} cells of the values, "
            f"found offsets {numbers.tolist()!r:.80}",
        )
    return Parts(values, offsets, starts, lengths, ragged_dim, bool(compact))


def _host(numbers: torch.Tensor) -> IntArray:
    array: IntArray = numbers.detach().cpu().numpy().astype(np.int64, copy=False)
    return array
