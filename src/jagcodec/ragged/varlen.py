"""A jagged column as input for varlen attention."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.staging import HostCopies, to_device
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import host_numbers
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView, end_to_end


class PackedColumn(NamedTuple):
    """A jagged column as input for varlen attention, such as flash-attention's.

    Attributes:
        values: (total, ...): the rows end to end; the column's own memory. Of a column of ragged
            dim 2, such as MRoPE position ids, (A, total, ...).
        cu_seqlens: (N + 1,) int32: where each row begins, and the end.
        max_seqlen: Length of the longest row.
        position_ids: (total,) int64: 0, 1, ... within each row.

    Columns with equal rows share the last three.
    """

    values: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    position_ids: torch.Tensor


def varlen_column(view: RaggedView, path: str) -> PackedColumn:
    """The rows of a view as a varlen column; those of one `RowSplits` share all but the values."""
    row_splits = view.row_splits
    if row_splits.total > np.iinfo(np.int32).max:
        detail = f"expected fewer than 2**31 tokens, found {row_splits.total}; split the batch"
        raise ArgumentError("bad_length", path, detail)
    values = values_of(view)
    cu_seqlens, position_ids = _places(row_splits, values.device)
    return PackedColumn(values, cu_seqlens, row_splits.max, position_ids)


def _places(row_splits: RowSplits, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(N + 1,) int32 `cu_seqlens` and (total,) int64 positions within each row; made once."""
    key = "varlen", device
    found: tuple[torch.Tensor, torch.Tensor] | None = row_splits.made.get(key)
    if found is None:
        positions = np.arange(row_splits.total) - np.repeat(row_splits.starts, row_splits.lengths)
        made = torch.from_numpy(row_splits.host.astype(np.int32)), torch.from_numpy(positions)
        both = to_device(made[0], device), to_device(made[1], device)
        found = row_splits.made.setdefault(key, both)
    return found


def view_of_varlen(
    column: PackedColumn,
    path: str,
    pool: RowSplitsPool | None = None,
    copies: HostCopies | None = None,
) -> RaggedView:
    """The rows of a varlen column. Columns that share `cu_seqlens` read them once."""
    row_splits = None if pool is None else pool.of_source(column.cu_seqlens)
    if row_splits is None:
        offsets = host_numbers(column.cu_seqlens, copies)
        row_splits = RowSplits.from_offsets(offsets) if column.cu_seqlens.dim() == 1 else None
        if row_splits is None:
            detail = f"expected (N + 1,) cu_seqlens that never fall, found {offsets.tolist()!r:.80}"
            raise ArgumentError("bad_shape", path, detail)
        if pool is not None:
            pool.remember(column.cu_seqlens, row_splits)
    fits = [dim for dim in (0, 1) if column.values.shape[dim : dim + 1] == (row_splits.total,)]
    if len(fits) != 1:
        detail = f"expected values with one dim of {row_splits.total} tokens by cu_seqlens, found "
        raise ArgumentError("bad_shape", path, f"{detail}shape {tuple(column.values.shape)}")
    return end_to_end(column.values, row_splits, 1 + fits[0])
