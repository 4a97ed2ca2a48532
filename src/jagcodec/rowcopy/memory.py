"""Row copies between tensors in CPU memory, as bytes, by whichever kernel is in use."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from jagcodec.blocks import new_block
from jagcodec.buffers import ByteArray, IntArray, as_bytes, describe, from_bytes
from jagcodec.errors import ArgumentError


class Kernel(Protocol):
    """The loops over rows. `jagcodec.rowcopy.plain` is one, the compiled module another.

    Buffers are bytes and apart from each other; starts, lengths, leads and width count cells of
    `cell_bytes` (1 or more) bytes.
    """

    def copy(
        self,
        dst: ByteArray,
        src: ByteArray,
        dst_starts: IntArray | None,
        src_starts: IntArray | None,
        lengths: IntArray,
        cell_bytes: int,
        threads: int,
        /,
    ) -> None:
        """Copy each row from its source to its target start; None: rows lie end to end."""

    def pad(
        self,
        dst: ByteArray,
        src: ByteArray,
        starts: IntArray,
        lengths: IntArray,
        leads: IntArray | None,
        width: int,
        cell_bytes: int,
        pattern: bytes,
        threads: int,
        /,
    ) -> None:
        """Write every row of a rectangle: leads[i] (None: 0) pads, its cells, pads to `width`."""


def gather(
    kernel: Kernel,
    cells: torch.Tensor,
    starts: IntArray,
    lengths: IntArray,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `rowcopy.gather`."""
    size = _cell_bytes(cells)
    total = int(lengths.sum())
    if out is None:
        data = new_block(total * size).data
        out = from_bytes(data, cells.dtype, (total, *cells.shape[1:]))
    else:
        data = _writable(out, total * size)
    if data.nbytes:
        kernel.copy(data, as_bytes(cells), None, starts, lengths, size, torch.get_num_threads())
    return out


def scatter(
    kernel: Kernel, values: torch.Tensor, lengths: IntArray, out: torch.Tensor, starts: IntArray
) -> torch.Tensor:
    """See `rowcopy.scatter`."""
    if values.numel():
        data = _writable(out, out.nbytes)
        size, threads = _cell_bytes(values), torch.get_num_threads()
        kernel.copy(data, as_bytes(values), starts, None, lengths, size, threads)
    return out


def pad(
    kernel: Kernel,
    cells: torch.Tensor,
    starts: IntArray,
    lengths: IntArray,
    out: torch.Tensor,
    leads: IntArray | None,
    pattern: bytes,
    fresh: bool,
) -> torch.Tensor:
    """See `rowcopy.pad`."""
    size, width = _cell_bytes(cells), out.shape[1]
    data = _writable(out, len(lengths) * width * size)
    if data.nbytes:
        source = as_bytes(cells)
        pad_bytes(kernel, source, starts, lengths, data, leads, width, size, pattern, fresh)
    return out


def pad_bytes(
    kernel: Kernel,
    source: ByteArray,
    starts: IntArray,
    lengths: IntArray,
    out: ByteArray,
    leads: IntArray | None,
    width: int,
    cell_bytes: int,
    pattern: bytes,
    fresh: bool,
) -> None:
    """See `rowcopy.pad_bytes`."""
    threads = torch.get_num_threads()
    if fresh:
        firsts = np.arange(len(lengths), dtype=np.int64) * width
        to = firsts if leads is None else firsts + leads
        kernel.copy(out, source, to, starts, lengths, cell_bytes, threads)
    else:
        kernel.pad(out, source, starts, lengths, leads, width, cell_bytes, pattern, threads)


def _cell_bytes(cells: torch.Tensor) -> int:
    return cells.shape[1:].numel() * cells.itemsize


def _writable(out: torch.Tensor, size: int) -> ByteArray:
    """The memory of `out` itself; never a copy, in which the rows would be lost."""
    if (
        not out.is_cpu
        or not out.is_contiguous()
        or out.is_conj()
        or out.is_neg()
        or out.nbytes != size
    ):
        raise ArgumentError(
            "bad_shape",
            "rowcopy(out)",
            f"expected contiguous CPU memory of {size} bytes, found {describe(out)}, "
            f"strides {out.stride()}, of {out.nbytes} bytes",
        )
    return as_bytes(out)
