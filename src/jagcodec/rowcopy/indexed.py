"""Row copies by index, in torch ops: for accelerators, and wherever autograd looks on.

No kernel per row and no synchronisation: every size is known on the host beforehand.
"""

from __future__ import annotations

import numpy as np
import torch

from jagcodec.buffers import IntArray


def gather(cells: torch.Tensor, starts: IntArray, lengths: IntArray) -> torch.Tensor:
    """See `rowcopy.gather`."""
    return cells.index_select(0, _cells(starts, lengths, cells.device))


def scatter(
    values: torch.Tensor, lengths: IntArray, out: torch.Tensor, starts: IntArray
) -> torch.Tensor:
    """See `rowcopy.scatter`."""
    return out.index_copy(0, _cells(starts, lengths, values.device), values)


def _cells(starts: IntArray, lengths: IntArray, device: torch.device) -> torch.Tensor:
    """(sum(lengths),) int64 on `device`: the cells of all rows, one row after the other."""
    total = int(lengths.sum())
    # Cell k of the result lies `shift` further on in the source, a constant within each row.
    shift = starts - (np.cumsum(lengths) - lengths)
    both = torch.from_numpy(np.stack([shift, lengths])).to(device, non_blocking=True)
    shifts = torch.repeat_interleave(both[0], both[1], output_size=total)
    return torch.arange(total, device=device) + shifts
