"""A jagged column as variable-length attention takes it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.tensor_bytes import sent
from jagcodec.ragged.nested import Parts, RowSplits, splits_of_offsets


class PackedColumn(NamedTuple):
    """A jagged column as variable-length attention takes it (flash-attention's ``varlen``).

    Attributes:
        values: (total, ...): the rows end to end; the column's own memory. Of a column of ragged
            dim 2, such as MRoPE position ids, (A, total, ...).
        cu_seqlens: (N + 1,) int32: where each row begins, and the end.
        max_seqlen: Length of the longest row.
        position_ids: (total,) int64: 0, 1, ... within each row.

    Columns of one raggedness share the last three.
    """

    values: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor


class Packing:
    """Makes the packed columns of one batch: those of equal rows share all but their values."""

    def __init__(self) -> None:
        self._shared: dict[tuple[bytes, torch.device], tuple[torch.Tensor, int, torch.Tensor]] = {}

    def column(self, values: torch.Tensor, splits: RowSplits, path: str) -> PackedColumn:
        """Rows that lie end to end in `values`, packed.

        Raises:
            ArgumentError: There are 2^31 tokens or more, too many for int32 `cu_seqlens`.
        """
        key = (splits.host.tobytes(), values.device)
        if key not in self._shared:
            self._shared[key] = _shared_by(splits, values.device, path)
        return PackedColumn(values, *self._shared[key])


def _shared_by(
    splits: RowSplits, device: torch.device, path: str
) -> tuple[torch.Tensor, int, torch.Tensor]:
    if splits.total > np.iinfo(np.int32).max:
        raise ArgumentError(
            "bad_length",
            path,
            f"expected fewer than 2**31 tokens for int32 cu_seqlens, found {splits.total}; "
            "split the batch",
        )
    cu_seqlens = torch.from_numpy(splits.host.astype(np.int32))
    positions = np.arange(splits.total) - np.repeat(splits.starts, splits.lengths)
    return sent(cu_seqlens, device), splits.max, sent(torch.from_numpy(positions), device)


def parts_of_packed(column: PackedColumn, path: str) -> Parts:
    """The rows of a packed column. One device sync.

    Raises:
        ArgumentError: Its parts do not fit together, or do not tell which dim is ragged.
    """
    offsets = column.cu_seqlens.detach().cpu().numpy().astype(np.int64)
    splits = splits_of_offsets(offsets) if offsets.ndim == 1 else None
    if splits is None:
        raise ArgumentError(
            "bad_shape",
            path,
            "expected (N + 1,) cu_seqlens from 0 that never fall, "
            f"found {offsets.reshape(-1)[:8].tolist()} of shape {offsets.shape}",
        )
    fits = [dim for dim in (0, 1) if column.values.shape[dim : dim + 1] == (splits.total,)]
    if len(fits) != 1:
        raise ArgumentError(
            "bad_shape",
            path,
            f"expected values with one dim of {splits.total} tokens as cu_seqlens say, found shape "
            f"{tuple(column.values.shape)}; choose rows before materialize(layout='packed')",
        )
    return Parts(column.values, splits.offsets, splits.starts, splits.lengths, 1 + fits[0], True)
