"""Row splits, computed once and shared; the only room that touches the insides of nested tensors.

PyTorch compares the raggedness of two jagged tensors by the *identity* of their offsets. So the
offsets object is made once per batch, here, and handed to every column that has those rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor, _store_val_in_tensor

from jagcodec.errors import ArgumentError
from jagcodec.memory.staging import Staging
from jagcodec.memory.tensor_bytes import IntArray, sent


@dataclass(eq=False)  # not frozen: that makes it in three times the time
class RowSplits:
    """Where each of N rows begins and ends in a run of cells. Nobody changes it.

    Attributes:
        host: (N + 1,) int64 offsets, starting at 0.
        lengths: (N,) int64, the differences.
        total: Cells of all rows.
        min: Length of the shortest row, 0 without rows.
        max: Length of the longest row, 0 without rows.
        given: The offsets tensor that these were read from, if its identity is to be kept.
    """

    host: IntArray
    lengths: IntArray
    total: int
    min: int
    max: int
    given: torch.Tensor | None = None

    @cached_property
    def offsets(self) -> torch.Tensor:
        """The offsets as a tensor, made when it is asked for; its identity is the raggedness."""
        return torch.from_numpy(self.host) if self.given is None else self.given

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> IntArray:
        return self.host[:-1]


def splits_of_lengths(lengths: IntArray) -> RowSplits:
    """Row splits from (N,) lengths, none of them negative; aliases them where they lie in order."""
    if not lengths.flags.c_contiguous:
        lengths = np.ascontiguousarray(lengths)
    host, low, high = _sums(lengths)
    return RowSplits(host, lengths, int(host[-1]), low, high)


def splits_of_offsets(host: IntArray) -> RowSplits | None:
    """Row splits over (N + 1,) offsets, aliased; None unless they start at 0 and never fall."""
    if not len(host):
        return None
    lengths, low, high, rising = _differences(host)
    if not rising or host[0]:
        return None
    return RowSplits(host, lengths, int(host[-1]), low, high)


def _sums(lengths: IntArray) -> tuple[IntArray, int, int]:
    """(N,) lengths to (N + 1,) offsets from 0 on, and the least and the greatest length.

    Sums past 2**63 wrap around; without lengths, both extremes are 0.
    """
    offsets: IntArray = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, *_extremes(lengths)


def _differences(offsets: IntArray) -> tuple[IntArray, int, int, bool]:
    """The inverse: lengths, extremes, and whether no offset is below the one before it.

    Otherwise the differences may have wrapped around.
    """
    lengths: IntArray = offsets[1:] - offsets[:-1]
    return lengths, *_extremes(lengths), bool((offsets[1:] >= offsets[:-1]).all())


def _extremes(numbers: IntArray) -> tuple[int, int]:
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)


def is_jagged(value: object) -> bool:
    """Whether `value` is a `torch.jagged` nested tensor."""
    # Not by its layout: every attribute of a nested tensor is dispatched, at 20 microseconds.
    return isinstance(value, NestedTensor)


def rows_of(leaf: object) -> int | None:
    """Rows of a dense or a jagged tensor; None of anything else."""
    if isinstance(leaf, NestedTensor):
        return int(leaf._offsets.shape[0]) - 1
    if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_nested:
        return leaf.shape[0] if leaf.dim() else None
    return None


class Raggedness:
    """Makes the jagged tensors of one batch, so that equal rows share one offsets object.

    Holds at most one copy of the offsets per device.
    """

    def __init__(self, splits: RowSplits) -> None:
        self.splits = splits
        self._offsets: dict[torch.device, torch.Tensor] = {}
        self._bounds: dict[str, Any] | None = None

    def jagged(self, values: torch.Tensor, ragged_dim: int = 1) -> torch.Tensor:
        """`values`, whose dim ``ragged_dim - 1`` holds all rows end to end, as a jagged tensor."""
        device = values.device
        offsets = self._offsets.get(device)
        if offsets is None:
            offsets = self.splits.offsets
            if offsets.device != device:
                offsets = sent(torch.from_numpy(self.splits.host), device)
            self._offsets[device] = offsets
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
        # What that call comes down to where no gradient has to pass; three times as fast, and
        # without the warning about fx tracing that torch 2.13 logs in every process.
        if self._bounds is None:
            self._bounds = {
                "min_seqlen": _store_val_in_tensor(self.splits.min),
                "max_seqlen": _store_val_in_tensor(self.splits.max),
            }
            # This marks the bounds as dynamic for torch.compile. Columns share them, so the next
            # ones are given theirs afterwards: marked once more, each would cost a quarter more.
            return NestedTensor(
                values, offsets, _metadata_cache=dict(self._bounds), _ragged_idx=ragged_dim
            )
        jagged: Any = NestedTensor(values, offsets, _ragged_idx=ragged_dim)
        jagged._metadata_cache = dict(self._bounds)
        return jagged  # type: ignore[no-any-return]


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


class ReadOffsets(NamedTuple):
    """Offsets that were read: they, on the host, and the lengths between them.

    `rising` says that none is below 0 or below the one before.
    """

    offsets: torch.Tensor  # kept, so that its id stays its own
    host: IntArray
    lengths: IntArray
    rising: bool


Seen: TypeAlias = dict[int, ReadOffsets]
"""Offsets that were read, by their id: those that columns share are read and checked once."""


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
    seen: Seen | None = None,
    staging: Staging | None = None,
) -> Parts:
    """The memory of a jagged tensor. One device sync, none for a CPU tensor.

    `detach` cuts the values off from autograd, which is far cheaper than to detach `jagged`.
    Offsets in `seen` are not read again, and others are added to it; it is empty at first.
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
    if staging is not None:
        values = staging.on_host(values)
    total = values.shape[ragged_dim - 1]
    if holes is None:
        read = None if seen is None else seen.get(id(offsets))
        if read is None:
            read = _read(offsets, staging)
            if seen is not None:
                seen[id(offsets)] = read
        host, lengths = read.host, read.lengths
        starts, end = host[:-1], int(host[-1])
        compact, sound = host[0] == 0 and end == total, read.rising and end <= total
    else:
        numbers = torch.cat(
            [
                _on_host(offsets, staging)[:-1].to(torch.int64),
                _on_host(holes, staging).to(torch.int64),
            ]
        )
        host = _host(numbers)
        starts, lengths = host[: len(holes)], host[len(holes) :]
        compact, sound = False, bool((host >= 0).all() and (lengths <= total - starts).all())
    if len(lengths) and not sound:
        raise ArgumentError(
            "bad_length",
            path,
            f"expected rows within the {total} cells of the values, "
            f"found offsets {_on_host(offsets, staging).tolist()!r:.80}",
        )
    return Parts(values, offsets, starts, lengths, ragged_dim, bool(compact))


def _read(offsets: torch.Tensor, staging: Staging | None) -> ReadOffsets:
    host = _host(_on_host(offsets, staging))
    lengths, _, _, rising = _differences(host)
    return ReadOffsets(offsets, host, lengths, rising and bool(host[0] >= 0))


def _on_host(tensor: torch.Tensor, staging: Staging | None) -> torch.Tensor:
    """What `staging` has fetched of a tensor; the tensor itself where it was not asked to."""
    return tensor if staging is None else staging.on_host(tensor)


def _host(numbers: torch.Tensor) -> IntArray:
    array = numbers.detach().cpu().numpy()
    return np.ascontiguousarray(array, dtype=np.int64)
