"""Rows of views copied end to end, or into rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec import kernels
from jagcodec.kernels.tasks import Starts
from jagcodec.memory.arrays import IntArray, array_bytes, for_torch
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import (
    as_words,
    contiguous_bits,
    from_bytes,
    from_words,
    refill,
    same_width_dtype,
)
from jagcodec.rows.copy_bytes import gathered_bytes
from jagcodec.rows.views import RaggedView

CellIndices: TypeAlias = dict[tuple[bytes, bytes, torch.device], torch.Tensor]
"""Indices of the cells of rows by the starts and the lengths of rows, and by device."""

# --- end to end --------------------------------------------------------------------------------


def values_of(view: RaggedView, indices: CellIndices | None = None) -> torch.Tensor:
    """The rows end to end in a tensor (A..., total, B...); aliased if they are end to end.

    Calls for the columns of one batch can share `indices`.
    """
    if view.is_end_to_end:
        memory: Any = view.memory
        if view.is_tensor:
            cells: torch.Tensor = memory if memory.requires_grad else contiguous_bits(memory)
            return cells
        return from_bytes(for_torch(array_bytes(memory)), view.dtype, view.shape)
    (values,) = gathered([view], indices)
    return values


def owned_values(view: RaggedView) -> torch.Tensor:
    """What `values_of` returns, in memory that may be written to: never the memory of a message."""
    return values_of(view) if view.is_tensor else gathered([view])[0]


def gathered(views: Iterable[RaggedView], indices: CellIndices | None = None) -> list[torch.Tensor]:
    """The rows of each view, copied end to end; one call copies all CPU rows into one block."""
    views, indices = list(views), {} if indices is None else indices
    copies = iter(gathered_bytes([view for view in views if view.uses_row_kernel]))
    return [
        values_of_cells(next(copies), view)
        if view.uses_row_kernel
        else gathered_by_torch(view, indices)
        for view in views
    ]


def values_of_cells(cells: Any, view: RaggedView) -> torch.Tensor:
    """A copy of the rows of a view, as `gathered_cells` makes it, as a tensor over its memory."""
    if isinstance(cells, torch.Tensor):
        return cells
    return from_bytes(cells, view.dtype, view.values_shape)


def gathered_by_torch(view: RaggedView, indices: CellIndices | None = None) -> torch.Tensor:
    """The rows of a tensor, copied end to end on its device; gradients flow through them."""
    indices = {} if indices is None else indices
    rows = gather_by_torch(*_cells_and_runs(view, view.runs_to_copy()), indices)
    return rows.view(view.values_shape)


def _cells_and_runs(
    view: RaggedView, runs: tuple[Starts | None, IntArray]
) -> tuple[torch.Tensor, IntArray, IntArray]:
    """The memory as (A * M, B...) cells, and starts and lengths of these runs in it."""
    memory: Any = view.memory
    values = memory.contiguous() if memory.requires_grad else contiguous_bits(memory)
    starts, lengths = runs
    if not isinstance(starts, np.ndarray):
        starts = view.row_starts()
    cells = math.prod(view.shape[: view.ragged_dim])
    return values.reshape(cells, *view.shape[view.ragged_dim :]), starts, lengths


# --- into rectangles ---------------------------------------------------------------------------


def pad_into(
    out: torch.Tensor,
    view: RaggedView,
    left_pad: IntArray | None,
    pad_bits: bytes,
    indices: CellIndices,
    *,
    holds_pads: bool = False,
) -> torch.Tensor:
    """Fill a rectangle with torch, for devices and autograd.

    With `holds_pads`, every element of `out` holds the pad bits already.
    """
    values, starts, lengths = _cells_and_runs(view, view.runs_by_row())
    if not view.is_end_to_end or view.ragged_dim > 1:
        values = gather_by_torch(values, starts, lengths, indices)
    left_pad = view.for_runs(left_pad)
    flat = out.view(len(lengths), out.shape[view.ragged_dim], *values.shape[1:])
    padded = pad_by_torch(values, lengths, flat, left_pad, pad_bits, indices, holds_pads)
    return padded.view(out.shape)


# --- by torch: for accelerators, and for tensors that autograd follows ---------------------------
# One index copies all rows of a column: no kernel per row, and no wait, because the host knows
# every size. Columns whose rows are at the same places share it.


def gather_by_torch(
    cells: torch.Tensor, starts: IntArray, lengths: IntArray, indices: CellIndices
) -> torch.Tensor:
    """Rows ``cells[start : start + length]`` of (M, ...) cells, end to end."""
    index = _shared_index(starts, lengths, cells.device, indices)
    if cells.requires_grad:
        return cells.index_select(0, index)
    return _index_words(contiguous_bits(cells)).index_select(0, index).view(cells.dtype)


def take_rows(tensor: torch.Tensor, rows: IntArray) -> torch.Tensor:
    """``tensor[rows]`` of a strided tensor of any dtype; the result owns its memory."""
    index = to_device(torch.from_numpy(rows), tensor.device)
    if tensor.requires_grad:
        return tensor.index_select(0, index)
    return from_words(as_words(tensor).index_select(0, index), tensor.dtype)


def pad_by_torch(
    values: torch.Tensor,
    lengths: IntArray,
    out: torch.Tensor,
    left_pad: IntArray | None,
    pad_bits: bytes,
    indices: CellIndices,  # those of other columns
    holds_pads: bool,  # whether every element of `out` holds the pad bits already
) -> torch.Tensor:
    """Fill `out` (R, width, ...) with rows, which are end to end in `values`, and with pads.

    If autograd follows, return a new tensor.
    """
    rows, width = out.shape[:2]
    if not holds_pads:
        refill(out.detach(), pad_bits)
    starts = kernels.numbers(width, rows)
    if left_pad is not None:
        starts = starts + left_pad
    flat = out.view(rows * width, *values.shape[1:])
    index = _shared_index(starts, lengths, values.device, indices)
    if values.requires_grad:
        return flat.index_copy(0, index, values).view(out.shape)
    _index_words(flat.detach()).index_copy_(0, index, _index_words(contiguous_bits(values)))
    return out


def _index_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, for which torch has the index kernels that some dtypes lack."""
    return tensor.view(same_width_dtype(tensor.dtype))


def _shared_index(
    starts: IntArray, lengths: IntArray, device: torch.device, indices: CellIndices
) -> torch.Tensor:
    """The `cell_index` of these rows, which columns that share `indices` compute once."""
    key = starts.tobytes(), lengths.tobytes(), device
    if key not in indices:
        indices[key] = cell_index(starts, lengths, device)
    return indices[key]


def cell_index(starts: IntArray, lengths: IntArray, device: torch.device) -> torch.Tensor:
    """(sum(lengths),) int64 on `device`: the indices of the cells of all rows, row after row."""
    total = int(lengths.sum())
    # Number k is k + shift, where `shift` is constant within a row: the cell that goes to place k,
    # or in `pad_by_torch` the place to which cell k goes.
    shift = starts - (np.cumsum(lengths) - lengths)
    both = to_device(torch.from_numpy(np.stack([shift, lengths])), device)
    shifts = torch.repeat_interleave(both[0], both[1], output_size=total)
    return torch.arange(total, device=device) + shifts
