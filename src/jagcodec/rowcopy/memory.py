"""Row copies between tensors in CPU memory, as bytes, by whichever kernel is in use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.blocks import new_block
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, as_bytes, describe, from_bytes
from jagcodec.rowcopy.tasks import Copy, Kernel, Pad, Starts


def gather(
    kernel: Kernel,
    cells: torch.Tensor,
    starts: IntArray,
    lengths: IntArray,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `rowcopy.gather`."""
    size = cell_bytes(cells)
    total = int(lengths.sum())
    if out is None:
        data = new_block(total * size).data
        out = from_bytes(data, cells.dtype, (total, *cells.shape[1:]))
    else:
        data = _writable(out, total * size)
    if data.nbytes:
        copy_all(kernel, [Copy(data, as_bytes(cells), None, starts, lengths, size)])
    return out


def scatter(
    kernel: Kernel, values: torch.Tensor, lengths: IntArray, out: torch.Tensor, starts: IntArray
) -> torch.Tensor:
    """See `rowcopy.scatter`."""
    if values.numel():
        data = _writable(out, out.nbytes)
        copy = Copy(data, as_bytes(values), starts, None, lengths, cell_bytes(values))
        copy_all(kernel, [copy])
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
    size, width = cell_bytes(cells), out.shape[1]
    data = _writable(out, len(lengths) * width * size)
    if data.nbytes:
        task = Pad(data, as_bytes(cells), starts, lengths, leads, width, size, pattern)
        if fresh:
            copy_all(kernel, [cells_alone(task)])
        else:
            pad_all(kernel, [task])
    return out


def copy_all(kernel: Kernel, tasks: Sequence[Copy]) -> None:
    """See `rowcopy.copy_all`."""
    kernel.copy(tasks, torch.get_num_threads())


def pad_all(kernel: Kernel, tasks: Sequence[Pad]) -> None:
    """See `rowcopy.pad_all`."""
    kernel.pad(tasks, torch.get_num_threads())


def cells_alone(task: Pad) -> Copy:
    """A task for a rectangle that holds nothing but pads already."""
    to: Starts = task.width
    if task.leads is not None:
        to = np.arange(len(task.lengths), dtype=np.int64) * task.width + task.leads
    return Copy(task.dst, task.src, to, task.starts, task.lengths, task.cell_bytes)


def cell_bytes(cells: torch.Tensor) -> int:
    """Of what lies under one index of dim 0."""
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
