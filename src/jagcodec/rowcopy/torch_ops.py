"""Row copies by index, in torch ops: for accelerators, and for tensors that autograd follows.

No kernel per row and no synchronisation: every size is known on the host beforehand.
"""

from __future__ import annotations

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import IntArray, contiguous_bits, refill, same_width_ints
from jagcodec.rowcopy.tasks import numbers


def gather(cells: torch.Tensor, starts: IntArray, lengths: IntArray) -> torch.Tensor:
    """Rows ``cells[start : start + length]`` of (M, ...) cells, end to end."""
    index = _cells(starts, lengths, cells.device)
    if cells.requires_grad:
        return cells.index_select(0, index)
    return _words(contiguous_bits(cells)).index_select(0, index).view(cells.dtype)


def pad(
    cells: torch.Tensor,
    starts: IntArray,
    lengths: IntArray,
    out: torch.Tensor,
    left_pad: IntArray | None,
    pad_bits: bytes,
    fresh: bool,
) -> torch.Tensor:
    """Write rows ``cells[start : start + length]`` and their pads to `out`, (R, width, ...).

    `out` is contiguous, of the dtype of `cells` and apart from its memory; it may be `fresh`, with
    the pad bits in every element. A row has ``left_pad`` pad cells before it, and the rest after
    it. Returns `out`; if autograd follows it, a new tensor.
    """
    rows, width = out.shape[:2]
    if not fresh:
        refill(out.detach(), pad_bits)
    out_starts = numbers(width, rows)
    if left_pad is not None:
        out_starts = out_starts + left_pad
    total = int(lengths.sum())
    end_to_end = total == len(cells) and np.array_equal(starts, np.cumsum(lengths) - lengths)
    values = cells if end_to_end else gather(cells, starts, lengths)
    flat = out.view(rows * width, *cells.shape[1:])
    index = _cells(out_starts, lengths, values.device)
    if values.requires_grad:
        return flat.index_copy(0, index, values).view(out.shape)
    _words(flat.detach()).index_copy_(0, index, _words(contiguous_bits(values)))
    return out


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
