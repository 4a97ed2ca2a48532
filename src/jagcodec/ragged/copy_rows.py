"""Rows of views copied end to end, or into rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec import rowcopy
from jagcodec.memory.arrays import ByteArray, IntArray, array_bytes, for_torch
from jagcodec.memory.blocks import allocate_together
from jagcodec.memory.extents import check_extent
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import (
    as_words,
    contiguous_bits,
    from_bytes,
    from_words,
    refill,
    same_width_dtype,
)
from jagcodec.ragged.views import RaggedView
from jagcodec.rowcopy import Copy, Pad

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
    views = list(views)
    by_kernel = [view.uses_row_kernel for view in views]
    sizes = [
        math.prod(view.values_shape) * view.dtype.itemsize if kernel else 0
        for view, kernel in zip(views, by_kernel, strict=True)
    ]
    values, copies = [], []
    indices = {} if indices is None else indices
    for view, kernel, data in zip(views, by_kernel, allocate_together(sizes), strict=True):
        if kernel:
            if len(data):
                copies.append(view.copy_task(data))
            else:
                check_extent(view.values_shape, view.dtype.itemsize, "rows")
            values.append(from_bytes(data, view.dtype, view.values_shape))
        else:
            rows = gather_by_torch(*_cells_and_runs(view, by_row=False), indices)
            values.append(rows.view(view.values_shape))
    rowcopy.copy_all(copies)
    return values


def uses_row_kernel(view: RaggedView) -> bool:
    """Whether the row kernel copies the rows: `RaggedView.uses_row_kernel`."""
    return view.uses_row_kernel


def _cells_and_runs(view: RaggedView, *, by_row: bool) -> tuple[torch.Tensor, IntArray, IntArray]:
    """The memory as (A * M, B...) cells, and starts and lengths of the runs in it."""
    memory: Any = view.memory
    values = memory.contiguous() if memory.requires_grad else contiguous_bits(memory)
    starts, lengths = view.row_runs(by_row=by_row)
    if not isinstance(starts, np.ndarray):
        starts = view.row_starts()
    cells = math.prod(view.shape[: view.ragged_dim])
    return values.reshape(cells, *view.shape[view.ragged_dim :]), starts, lengths


# --- into rectangles ---------------------------------------------------------------------------


def pad_tasks(
    view: RaggedView, out: ByteArray, width: int, left_pad: IntArray | None, pad_bits: bytes
) -> tuple[Pad, Copy | None]:
    """The tasks that fill a rectangle: rows and pads, then all runs but the last of each row."""
    memory: Any = view.memory
    splits = view.row_splits
    begins: Any
    in_one_run = view.ragged_dim == 1 and view.run_lengths is None
    if view.is_array and in_one_run:  # as most are
        begins = view.kernel_starts()
        cell = len(out) // (splits.rows * width)
        return Pad(out, memory, begins, splits.lengths, left_pad, width, cell, pad_bits), None
    cell = view.cell_bytes
    source: Any = view.source()
    if isinstance(source, np.ndarray):
        source = array_bytes(source)
    if view.run_lengths is None:
        runs, lengths = view.row_runs(by_row=True)
        begins = view.kernel_starts() if in_one_run else runs
        left_pad = _for_runs(left_pad, view)
        return Pad(out, source, begins, lengths, left_pad, width, cell, pad_bits), None
    before = view.run_lengths.cumsum(axis=1) - view.run_lengths
    if left_pad is not None:
        before += left_pad[:, None]
    # The last run of a row is written with the pads: what is before it counts as left pads, which
    # the copy of the other runs overwrites. So that copy comes after the pads.
    places = np.arange(len(before), dtype=np.int64)[:, None] * width + before
    run_starts = view.row_starts()
    starts, lengths, left = (
        np.ascontiguousarray(part[:, -1]) for part in (run_starts, view.run_lengths, before)
    )
    to, others, sizes = (
        np.ascontiguousarray(part[:, :-1]).reshape(-1)
        for part in (places, run_starts, view.run_lengths)
    )
    pad = Pad(out, source, starts, lengths, left, width, cell, pad_bits)
    return pad, Copy(out, source, to, others, sizes, cell)


def pad_into(
    out: torch.Tensor,
    view: RaggedView,
    left_pad: IntArray | None,
    pad_bits: bytes,
    indices: CellIndices,
    *,
    fresh: bool = False,
) -> torch.Tensor:
    """Fill a rectangle with torch, for devices and autograd. With `fresh`, `out` holds pads."""
    values, starts, lengths = _cells_and_runs(view, by_row=True)
    if not view.is_end_to_end or view.ragged_dim > 1:
        values = gather_by_torch(values, starts, lengths, indices)
    left_pad = _for_runs(left_pad, view)
    flat = out.view(len(lengths), out.shape[view.ragged_dim], *values.shape[1:])
    padded = pad_by_torch(values, lengths, flat, left_pad, pad_bits, indices, fresh)
    return padded.view(out.shape)


def _for_runs(left_pad: IntArray | None, view: RaggedView) -> IntArray | None:
    outer = math.prod(view.shape[: view.ragged_dim - 1])
    return left_pad if left_pad is None or outer == 1 else np.repeat(left_pad, outer)


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
    fresh: bool,  # whether every element of `out` holds the pad bits
) -> torch.Tensor:
    """Fill `out` (R, width, ...) with rows, which are end to end in `values`, and with pads.

    If autograd follows, return a new tensor.
    """
    rows, width = out.shape[:2]
    if not fresh:
        refill(out.detach(), pad_bits)
    starts = rowcopy.numbers(width, rows)
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
