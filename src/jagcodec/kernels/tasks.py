"""Tasks of a kernel: one for each column; one call runs those of all columns of a batch.

A kernel reads the fields of a task by position, so their order is part of its interface.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

ByteArray: TypeAlias = npt.NDArray[np.uint8]
IntArray: TypeAlias = npt.NDArray[np.int64]

Starts: TypeAlias = IntArray | int
"""Where rows begin, in cells: (N,) numbers; or a stride s, if row i begins at ``i * s``."""


def numbers(starts: Starts, rows: int) -> IntArray:
    """Starts as an array of numbers."""
    return np.arange(rows, dtype=np.int64) * starts if isinstance(starts, int) else starts


SourceMemory: TypeAlias = npt.NDArray[Any] | tuple[ByteArray, ...]
"""The memory of an array, or several buffers of bytes. Starts in several buffers are (N,) numbers
that count *bytes*, as if the buffers were end to end. Each row is in one of them."""


class Copy(NamedTuple):
    """Copy each row from its source start to its target start.

    Buffers are contiguous bytes, except for the source, which may be an array of any dtype: only
    its memory counts. No target may overlap any other buffer. Starts and lengths count cells of
    `cell_bytes` (1 or more) bytes. If starts are None, the rows are end to end and fill the buffer.
    """

    dst: ByteArray
    src: SourceMemory
    dst_starts: Starts | None
    src_starts: Starts | None
    lengths: IntArray
    cell_bytes: int

    def sources(self) -> tuple[Any, ...]:
        """What the kernel reads: memory and arrays of numbers."""
        return self.src, self.dst_starts, self.src_starts, self.lengths


class Pad(NamedTuple):
    """Write every row of a rectangle: left_pad[i] pad cells, its own cells, pad cells to `width`.

    The fields are as in `Copy`, but every buffer is bytes; `left_pad` and `width` also count cells.
    If `left_pad` is None, no row has left pads. A pad cell repeats `pad_bits`, which are 1 to 16
    bytes.
    """

    dst: ByteArray
    src: SourceMemory
    starts: Starts
    lengths: IntArray
    left_pad: IntArray | None
    width: int
    cell_bytes: int
    pad_bits: bytes

    def sources(self) -> tuple[Any, ...]:
        """What the kernel reads: memory and arrays of numbers."""
        return self.src, self.starts, self.lengths, self.left_pad


def rows_only(task: Pad) -> Copy:
    """The task that is left if the rectangle already holds the pad bits everywhere."""
    dst_starts: Starts = task.width
    if task.left_pad is not None:
        dst_starts = numbers(task.width, len(task.lengths)) + task.left_pad
    return Copy(task.dst, task.src, dst_starts, task.starts, task.lengths, task.cell_bytes)


class Ends(NamedTuple):
    """Measure the constant ends of the rows of a rectangle.

    Row i is `width` cells (1 or more) from cell ``i * stride`` of `src` on. ``starts[i]`` is set to
    how many equal cells the row begins with, ``lengths[i]`` to how many there are from there to the
    equal cells that it ends with; both are 0 if all cells are equal.
    """

    src: ByteArray
    stride: int
    width: int
    cell_bytes: int
    starts: IntArray
    lengths: IntArray
