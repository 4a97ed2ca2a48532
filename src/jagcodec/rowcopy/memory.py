"""Row copies in CPU memory: one memcpy per row, over memoryviews."""

from __future__ import annotations

import numpy as np
import torch

from jagcodec.buffers import IntArray, as_bytes, from_bytes


def gather(cells: torch.Tensor, starts: IntArray, lengths: IntArray) -> torch.Tensor:
    """See `rowcopy.gather`."""
    size = _cell_bytes(cells)
    source = as_bytes(cells).data
    begins = (starts * size).tolist()
    ends = ((starts + lengths) * size).tolist()
    # join allocates once and copies once; a bytearray, because tensors must be writable.
    rows = bytearray().join([source[a:b] for a, b in zip(begins, ends, strict=True)])
    data = np.frombuffer(rows, dtype=np.uint8)
    return from_bytes(data, cells.dtype, (int(lengths.sum()), *cells.shape[1:]))


def scatter(
    values: torch.Tensor, lengths: IntArray, out: torch.Tensor, starts: IntArray
) -> torch.Tensor:
    """See `rowcopy.scatter`; `out` must be contiguous."""
    size = _cell_bytes(values)
    source, target = as_bytes(values).data, as_bytes(out).data
    ends = np.cumsum(lengths) * size
    sizes = lengths * size
    begins = (ends - sizes).tolist()
    to = (starts * size).tolist()
    for a, b, at, n in zip(begins, ends.tolist(), to, sizes.tolist(), strict=True):
        target[at : at + n] = source[a:b]
    return out


def _cell_bytes(cells: torch.Tensor) -> int:
    return cells.shape[1:].numel() * cells.itemsize
