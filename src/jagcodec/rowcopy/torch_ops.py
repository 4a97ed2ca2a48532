"""Row copies by index, in torch ops: for accelerators, and for tensors that autograd follows.

No kernel per row and no synchronisation: every size is known on the host beforehand.
"""

from __future__ import annotations

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import IntArray, contiguous_bits, refill, same_width_ints
from jagcodec.rowcopy.tasks import numbers


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
    left_pad: IntArray | None,
    pad_bits: bytes,
    fresh: bool,
) -> torch.Tensor:
    """See `rowcopy.pad`."""
    rows, width = out.shape[:2]
    if not fresh:
        refill(out.detach(), pad_bits)
    out_starts = numbers(width, rows)
    if left_pad is not None:
        out_starts = out_starts + left_pad
    total = int(lengths.sum())
    end_to_end = total == len(cells) and np.array_equal(starts, np.cumsum(lengths) - lengths)
    values = cells if end_to_end else gather(cells, starts, lengths, None)
    flat = out.view(rows * width, *cells.shape[1:])
    return scatter(values, lengths, flat, out_starts).view(out.shape)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: torch has index kernels for them that some dtypes lack."""
    return tensor.view(same_width_ints(tensor.dtype))


def _cells(starts: IntArray, lengths: IntArray, device: torch.device) -> torch.Tensor:
    """(sum(lengths),) int64 on `device`: the cells of all rows, one row after the other."""
    total = int(lengths.sum())
    # Cell k of the result is `shift` further on in the source, a constant within each row.
    shift = starts - (np.cumsum(lengths) - lengths)
    both = torch.from_numpy(np.stack([shift, lengths])).to(device, non_blocking=True)
    shifts = torch.repeat_interleave(both[0], both[1], output_size=total)
    return torch.arange(total, device=device) + shifts
