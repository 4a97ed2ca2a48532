"""`PackedColumn`: rows end to end, as varlen attention takes them.

`packed` is this library's word for such a column; `varlen` is the word of attention kernels.
Pickles name this module, so it keeps its name.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.plain_types import LENGTH_DTYPES, check_memory, check_plain
from jagcodec.memory.staging import HostCopies, host_numbers, to_device
from jagcodec.rows.copy_rows import cell_index, values_of
from jagcodec.rows.lengths import check_size
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, end_to_end


class PackedColumn(NamedTuple):
    """A jagged column as input for varlen attention, such as flash-attention's.

    Attributes:
        values: (total, ...): the rows end to end; the column's own memory. For a column of ragged
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


def is_packed(value: object) -> bool:
    """Whether a value is a packed column."""
    return isinstance(value, PackedColumn)


def rows_in_packed(column: object) -> int | None:
    """N of a packed column; None for anything else."""
    return len(column.cu_seqlens) - 1 if isinstance(column, PackedColumn) else None


def refuse_packed(value: object, path: str, expected: str) -> None:
    """Refuse a packed column where something else is expected; the error says how to convert it."""
    if isinstance(value, PackedColumn):
        check_varlen(value, path)
        dim = "" if value.values.shape[:1] == value.position_ids.shape else ", jagged_dim=2"
        detail = f"expected {expected}, found PackedColumn x; a jagged tensor of it is "
        detail += f"torch.nested.nested_tensor_from_jagged(x.values, x.cu_seqlens.long(){dim})"
        raise ArgumentTypeError("bad_type", path, detail)


def varlen_column(view: RaggedView, path: str) -> PackedColumn:
    """The rows of a view as a packed column. Views of one `RowSplits` share all but the values."""
    row_splits = view.row_splits
    check_size(row_splits.total, path)
    values = values_of(view)
    cu_seqlens, position_ids = _offsets_and_positions(row_splits, values.device)
    return PackedColumn(values, cu_seqlens, row_splits.max, position_ids)


def check_varlen(column: PackedColumn, path: str) -> None:
    """Refuse a packed column whose parts are not tensors.

    Also refuse one whose `cu_seqlens` cannot be offsets by shape and dtype; they are not read.
    """
    for name in ("values", "cu_seqlens", "position_ids"):
        part = getattr(column, name)
        if not isinstance(part, torch.Tensor):
            detail = f"expected a tensor, found {describe(part)}"
            raise ArgumentTypeError("bad_type", f"{path}.{name}", detail)
        check_memory(part, f"{path}.{name}")
    places = column.cu_seqlens
    if places.dim() != 1 or not len(places) or places.dtype not in LENGTH_DTYPES:
        detail = f"expected (N + 1,) offsets from 0 that never fall, found {describe(places)}"
        raise ArgumentError("bad_shape", f"{path}.cu_seqlens", detail)


def _offsets_and_positions(
    row_splits: RowSplits, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N + 1,) int32 `cu_seqlens` and (total,) int64 positions in rows; made once per device."""
    parts: tuple[torch.Tensor, torch.Tensor] | None = row_splits.varlen_parts.get(device)
    if parts is None:
        starts, lengths = row_splits.starts, row_splits.lengths
        if device.type == "cpu":
            positions = torch.from_numpy(np.arange(row_splits.total) - starts.repeat(lengths))
        else:  # the cells of rows that all begin at cell 0
            positions = cell_index(np.zeros_like(starts), lengths, device)
        cu_seqlens = torch.from_numpy(row_splits.offsets_array.astype(np.int32))
        both = to_device(cu_seqlens, device), positions
        parts = row_splits.varlen_parts.setdefault(device, both)
    return parts


def view_of_varlen(
    column: PackedColumn,
    path: str,
    pool: RowSplitsPool | None = None,
    copies: HostCopies | None = None,
) -> RaggedView:
    """The rows of a packed column. Columns that share `cu_seqlens` read them once."""
    row_splits = None if pool is None else pool.of_source(column.cu_seqlens)
    if row_splits is None:
        check_varlen(column, path)
        if column.cu_seqlens.is_meta:
            check_plain(column.cu_seqlens, f"{path}.cu_seqlens")
        offsets = host_numbers(column.cu_seqlens, copies)
        row_splits = RowSplits.from_offsets(offsets)
        if row_splits is None:
            expected = "(N + 1,) cu_seqlens, which are offsets from 0 that never fall"
            detail = f"expected {expected}, found {offsets.tolist()!r:.80}"
            raise ArgumentError("bad_shape", path, detail)
        if pool is not None:
            pool.remember(column.cu_seqlens, row_splits)
    shape = tuple(column.values.shape)
    fits = [dim for dim in (0, 1) if shape[dim : dim + 1] == (row_splits.total,)]
    if len(fits) != 1:
        detail = f"expected values with one dim of {row_splits.total} tokens by cu_seqlens, found "
        detail += f"shape {shape}" + ("; keep such a column jagged" if fits else "")
        raise ArgumentError("bad_shape", path, detail)
    return end_to_end(column.values, row_splits, 1 + fits[0])
