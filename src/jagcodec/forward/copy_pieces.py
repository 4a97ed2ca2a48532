"""`fill_buffers`: fills buffers with pieces of a column's rows, and with pads between them.

On the CPU, the row kernel fills all buffers in one call. For devices and autograd, torch fills each
with one index, which columns of one layout share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec.errors import ArgumentError
from jagcodec.forward.layout import Pieces, remembered
from jagcodec.kernels import Copy, copy_all
from jagcodec.memory.arrays import ByteArray, IntArray, are_disjoint
from jagcodec.memory.blocks import allocate_together
from jagcodec.memory.plain_types import check_not_followed, check_out
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import as_bytes, as_words, from_bytes, from_words, lacks_kernel
from jagcodec.rows.copy_rows import cell_index, values_of
from jagcodec.rows.of_tensors import device_of
from jagcodec.rows.views import RaggedView, end_to_end

Indices: TypeAlias = dict[Any, tuple[torch.Tensor, torch.Tensor | None]]
"""Indices on devices, with a mask of the tokens if there are pads; later columns reuse them."""


@dataclass(slots=True, eq=False)
class BufferTask:
    """A buffer to fill with pieces of the rows of a view."""

    view: RaggedView
    pieces: Pieces
    pad: bytes  # the bits of a pad cell, or of a number that it repeats
    path: str  # the place that errors name
    out: torch.Tensor | None = None  # the memory for it, if the caller has some

    @property
    def shape(self) -> tuple[int, ...]:
        """(A..., total, B...): the shape of the view, with the buffer's cells as the ragged dim."""
        shape, dim = self.view.shape, self.view.ragged_dim
        return (*shape[: dim - 1], self.pieces.total, *shape[dim:])


def fill_buffers(buffers: Sequence[BufferTask], indices: Indices) -> list[torch.Tensor]:
    """The filled buffers as tensors; new ones on the CPU share one block."""
    _check_outs(buffers)
    here = [buffer for buffer in buffers if buffer.view.uses_row_kernel]
    sizes = [0 if b.out is not None else math.prod(b.shape) * b.view.dtype.itemsize for b in here]
    try:
        blocks = allocate_together(sizes)
    except (MemoryError, OverflowError, ValueError) as error:
        largest = here[sizes.index(max(sizes))]
        detail = f"expected buffers that fit in memory, found one of shape {largest.shape}"
        raise ArgumentError("too_large", largest.path, detail) from error
    tensors: dict[BufferTask, torch.Tensor] = {}
    targets: list[ByteArray] = []
    for buffer, data in zip(here, blocks, strict=True):
        out = buffer.out
        tensors[buffer] = from_bytes(data, buffer.view.dtype, buffer.shape) if out is None else out
        targets.append(data if out is None else as_bytes(out))
    try:
        copies = _copies(here, targets)
    except MemoryError as error:
        largest = max(here, key=lambda buffer: buffer.view.cell_bytes)
        detail = f"expected pads that fit in memory, found cells of {largest.view.cell_bytes} bytes"
        raise ArgumentError("too_large", largest.path, detail) from error
    copy_all(copies)
    return [tensors[b] if b in tensors else _by_index(b, indices) for b in buffers]


# --- by the row kernel -------------------------------------------------------------------------


def _copies(buffers: Sequence[BufferTask], targets: Sequence[ByteArray]) -> list[Copy]:
    """Copies of all pieces. Pads come from a block of pad cells, the last source of each copy."""
    block, pad_starts = _pad_block(buffers)
    # Columns of a join share their many buffers: share the tuple, so the kernel reads it once.
    sources_by_memory: dict[int, tuple[tuple[ByteArray, ...], int]] = {}
    copies = []
    for buffer, data in zip(buffers, targets, strict=True):
        memory = buffer.view.memory
        if id(memory) not in sources_by_memory:
            parts = buffer.view.host_buffers()
            sources_by_memory[id(memory)] = (*parts, block), sum(map(len, parts))
        sources, end = sources_by_memory[id(memory)]
        if len(data):
            starts, lengths = _source_runs(buffer, end + pad_starts[buffer.pad])
            copies.append(Copy(data, sources, None, starts, lengths, buffer.view.cell_bytes))
    return copies


def _pad_block(buffers: Sequence[BufferTask]) -> tuple[ByteArray, dict[bytes, int]]:
    """Memory with the longest run of each pad, and where in it each pad begins."""
    longest: dict[bytes, int] = {}
    for buffer in buffers:
        sizes = buffer.pieces.length[buffer.pieces.is_pad]
        run_bytes = int(sizes.max(initial=0)) * buffer.view.cell_bytes
        longest[buffer.pad] = max(longest.get(buffer.pad, 0), run_bytes)
    pads, pad_starts = bytearray(), dict[bytes, int]()
    for pad, size in longest.items():
        pad_starts[pad] = len(pads)
        pads += pad * (size // len(pad))
    return np.array(pads, np.uint8), pad_starts


def _source_runs(buffer: BufferTask, pad_start: int) -> tuple[IntArray, IntArray]:
    """Where runs of cells begin, in bytes, and their lengths, in the order of the buffer."""
    view, pieces = buffer.view, buffer.pieces
    cell = view.cell_bytes
    firsts = _and_tail(view.row_starts())[pieces.row] * view.unit_bytes
    if view.run_lengths is None:
        is_pad, lengths = pieces.is_pad, pieces.length
        starts = firsts + pieces.source * cell
    else:
        # A piece may have cells of several runs of its row. Pads count as one run.
        of_row = _and_tail(view.run_lengths)[pieces.row]
        ends = of_row.cumsum(axis=1)
        begins = ends - of_row
        low = np.maximum(begins, pieces.source[:, None])
        high = np.minimum(ends, (pieces.source + pieces.length)[:, None])
        sizes = np.maximum(high - low, 0)
        sizes[pieces.is_pad] = 0
        sizes[pieces.is_pad, 0] = pieces.length[pieces.is_pad]
        has_cells = sizes > 0
        starts, lengths = (firsts + (low - begins) * cell)[has_cells], sizes[has_cells]
        is_pad = np.broadcast_to(pieces.is_pad[:, None], sizes.shape)[has_cells]
    if view.ragged_dim > 1:
        outer = math.prod(view.shape[: view.ragged_dim - 1])
        starts = starts + np.arange(outer)[:, None] * (view.shape[view.ragged_dim - 1] * cell)
        lengths = np.tile(lengths, outer)
    return np.where(is_pad, pad_start, starts).reshape(-1), lengths


def _and_tail(numbers: IntArray) -> IntArray:
    """The (N, ...) numbers of rows, and zeros for row N, to which a separate tail belongs."""
    return np.concatenate([numbers, np.zeros_like(numbers, shape=(1, *numbers.shape[1:]))])


# --- by torch ----------------------------------------------------------------------------------


def _by_index(buffer: BufferTask, indices: Indices) -> torch.Tensor:
    """Fill a buffer that is on a device or that autograd follows, without a wait."""
    view, dim = buffer.view, buffer.view.ragged_dim - 1
    if isinstance(view.starts, np.ndarray):  # columns cannot share the index of scattered rows
        view = end_to_end(values_of(view), view.row_splits, view.ragged_dim)
    cells: Any = view.memory
    follow = cells.requires_grad
    cells = cells if follow else as_words(cells)
    if not cells.shape[dim]:  # index 0 needs a cell; pads replace it
        one = cells.new_zeros((*cells.shape[:dim], 1, *cells.shape[dim + 1 :]))
        cells = torch.cat([cells, one], dim)
    index, mask = _gather_index(view, buffer.pieces, indices)
    out = None if buffer.out is None else as_words(buffer.out)
    try:
        filled = torch.index_select(cells, dim, index, out=out)
        if mask is not None:
            pad = _pad_cell(buffer, indices, as_is=follow)
            mask = mask.view(-1, *[1] * (filled.dim() - dim - 1))
            filled = torch.where(mask, filled, pad, out=None if follow else filled)
    except RuntimeError as error:
        if not lacks_kernel(error):
            raise
        detail = f"expected gradients that torch can index, found {view.dtype}; detach it"
        raise ArgumentError("bad_dtype", buffer.path, detail) from error
    if buffer.out is not None:
        return buffer.out
    return filled if follow else from_words(filled, view.dtype)


def _gather_index(
    view: RaggedView, pieces: Pieces, indices: Indices
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The view's cell for each cell of a buffer, and a mask of the cells that are not pads."""

    def make() -> tuple[torch.Tensor, torch.Tensor | None]:
        begins = pieces.begins(view.row_starts())
        begins[pieces.is_pad] = _NO_CELL
        index = cell_index(begins, pieces.length, device_of(view))
        mask = index >= 0 if pieces.is_pad.any() else None
        return index if mask is None else index.clamp_min(0), mask

    return remembered(indices, (pieces, view.starts, device_of(view)), make)


_NO_CELL = -1 << 62
"""Where a piece of pads begins: none of its cells gets an index of 0 or more."""


def _pad_cell(buffer: BufferTask, indices: Indices, *, as_is: bool) -> torch.Tensor:
    """A pad cell (B...), or a number that it repeats, on the device of a view.

    Its dtype is that of the view if `as_is`, and words of the same width otherwise.
    """
    view = buffer.view
    shape = view.shape[view.ragged_dim :]

    def make() -> tuple[torch.Tensor, None]:
        pad = np.frombuffer(bytearray(buffer.pad), np.uint8)
        repeats = len(buffer.pad) < view.cell_bytes
        cell = from_bytes(pad, view.dtype, () if repeats else shape)
        return to_device(cell if as_is else as_words(cell), device_of(view)), None

    key = "pad", buffer.pad, view.dtype, shape, device_of(view), as_is
    return remembered(indices, key, make)[0]


# --- the caller's memory -----------------------------------------------------------------------


def _check_outs(buffers: Sequence[BufferTask]) -> None:
    """Refuse memory that does not fit, that autograd needs, or that overlaps other memory."""
    outs = [buffer for buffer in buffers if buffer.out is not None]
    if not outs:  # skip the spans below: a join has many parts
        return
    for buffer in outs:
        view, path = buffer.view, f"{buffer.path}(out)"
        check_out(buffer.out, buffer.shape, view.dtype, device_of(view), path)
        check_not_followed(view.memory, path)
    sources = [part for buffer in buffers for part in buffer.view.memories]
    if not are_disjoint([buffer.out for buffer in outs], sources):
        detail = (
            "expected separate memory for each buffer, apart from the columns, found an overlap"
        )
        raise ArgumentError("conflict", f"{outs[0].path}(out)", detail)
