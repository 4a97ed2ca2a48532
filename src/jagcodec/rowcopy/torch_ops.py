"""Row copies by index, in torch ops: for accelerators, and wherever autograd looks on.

No kernel per row and no synchronisation: every size is known on the host beforehand.
"""

from __future__ import annotations

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import (
    IntArray,
    array_bytes,
    contiguous_bits,
    from_bytes,
    int_of_size,
    refill,
    same_width_ints,
)
from jagcodec.rowcopy.tasks import Copy, Pad, numbers


def gather(
    cells: torch.Tensor, starts: IntArray, lengths: IntArray, out: torch.Tensor | None
) -> torch.Tensor:
    """See `rowcopy.gather`."""
    index = _cells(starts, lengths, cells.device)
    if cells.requires_grad:
        rows = cells.index_select(0, index)
        return rows if out is None else out.copy_(rows)
    words = _words(contiguous_bits(cells))
    if out is None:
        return words.index_select(0, index).view(cells.dtype)
    # `out` may be of another dtype, such as bytes.
    target = out.detach().view(-1).view(words.dtype).view(len(index), *cells.shape[1:])
    torch.index_select(words, 0, index, out=target)
    return out


def scatter(
    values: torch.Tensor, lengths: IntArray, out: torch.Tensor, starts: IntArray
) -> torch.Tensor:
    """See `rowcopy.scatter`."""
    index = _cells(starts, lengths, values.device)
    if values.requires_grad:
        return out.index_copy(0, index, values)
    _words(out.detach()).index_copy_(0, index, _words(contiguous_bits(values)))
    return out


def pad(
    cells: torch.Tensor,
    starts: IntArray,
    lengths: IntArray,
    out: torch.Tensor,
    leads: IntArray | None,
    pattern: bytes,
    fresh: bool,
) -> torch.Tensor:
    """See `rowcopy.pad`."""
    rows, width = out.shape[:2]
    if not fresh:
        refill(out.detach(), pattern)
    to = np.arange(rows, dtype=np.int64) * width
    if leads is not None:
        to = to + leads
    total = int(lengths.sum())
    end_to_end = total == len(cells) and np.array_equal(starts, np.cumsum(lengths) - lengths)
    values = cells if end_to_end else gather(cells, starts, lengths, None)
    flat = out.view(rows * width, *cells.shape[1:])
    return scatter(values, lengths, flat, to).view(out.shape)


def copy(task: Copy) -> None:
    """One task of `rowcopy.copy_all`."""
    if not task.dst.nbytes or not task.lengths.any():
        return
    lengths = task.lengths
    end_to_end = np.cumsum(lengths) - lengths
    src_starts, dst_starts = (
        end_to_end if starts is None else numbers(starts, len(lengths))
        for starts in (task.src_starts, task.dst_starts)
    )
    source, target = (
        from_bytes(data, torch.uint8, (len(data) // task.cell_bytes, task.cell_bytes))
        # torch has no tensors of read-only memory
        for data in (array_bytes(task.src).copy(), task.dst)
    )
    scatter(gather(source, src_starts, lengths, None), lengths, target, dst_starts)


def pad_bytes(task: Pad) -> None:
    """One task of `rowcopy.pad_all`."""
    if not task.dst.nbytes:
        return
    words = int_of_size(len(task.pattern))
    rows, elements = len(task.lengths), task.cell_bytes // len(task.pattern)
    shape = (len(task.src) // task.cell_bytes, elements)
    cells = from_bytes(task.src.copy(), words, shape)
    out = from_bytes(task.dst, words, (rows, task.width, elements))
    pad(cells, numbers(task.starts, rows), task.lengths, out, task.leads, task.pattern, False)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: they have the kernels that some dtypes lack."""
    return tensor.view(same_width_ints(tensor.dtype))


def _cells(starts: IntArray, lengths: IntArray, device: torch.device) -> torch.Tensor:
    """(sum(lengths),) int64 on `device`: the cells of all rows, one row after the other."""
    total = int(lengths.sum())
    # Cell k of the result lies `shift` further on in the source, a constant within each row.
    shift = starts - (np.cumsum(lengths) - lengths)
    both = torch.from_numpy(np.stack([shift, lengths])).to(device, non_blocking=True)
    shifts = torch.repeat_interleave(both[0], both[1], output_size=total)
    return torch.arange(total, device=device) + shifts
