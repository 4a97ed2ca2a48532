"""What a kernel is asked to do: one task for each column, all columns of a batch in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec.memory.tensor_bytes import ByteArray, IntArray

AnyArray: TypeAlias = npt.NDArray[Any]

Starts: TypeAlias = IntArray | int
"""Where rows begin, in cells: (N,) numbers, or a stride, of which row i begins at the i-fold."""


def numbers(starts: Starts, rows: int) -> IntArray:
    """Starts as numbers."""
    return np.arange(rows, dtype=np.int64) * starts if isinstance(starts, int) else starts


class Copy(NamedTuple):
    """Copy each row from its source to its target start.

    Buffers are contiguous bytes, but for the source, which may be an array of anything: what lies
    in memory counts. Targets are apart from all others. Starts and lengths count cells of
    `cell_bytes` (1 or more) bytes. Starts of None: the rows lie end to end and fill the buffer.
    """

    dst: ByteArray
    src: AnyArray
    dst_starts: Starts | None
    src_starts: Starts | None
    lengths: IntArray
    cell_bytes: int


class Pad(NamedTuple):
    """Write every row of a rectangle: leads[i] (None: 0) pads, its cells, pads to `width`.

    As for `Copy`, but all of it bytes; leads and width count cells too. A pad cell is `pattern`,
    over and over.
    """

    dst: ByteArray
    src: ByteArray
    starts: Starts
    lengths: IntArray
    leads: IntArray | None
    width: int
    cell_bytes: int
    pattern: bytes


class Ends(NamedTuple):
    """Measure the constant ends of the rows of a rectangle.

    Row i is `width` cells (1 or more) from cell ``i * stride`` of `src` on. ``starts[i]`` becomes
    how many equal cells it begins with, ``lengths[i]`` how many there are from there to the equal
    cells that it ends with; both 0 where all are equal.
    """

    src: ByteArray
    stride: int
    width: int
    cell_bytes: int
    starts: IntArray
    lengths: IntArray


class Kernel(Protocol):
    """The loops over rows. `jagcodec.rowcopy.numpy_kernel` is one, the compiled module another."""

    def copy(self, tasks: Sequence[Copy], threads: int, /) -> None:
        """Do these in up to so many threads."""

    def pad(self, tasks: Sequence[Pad], threads: int, /) -> None:
        """Do these in up to so many threads."""

    def ends(self, tasks: Sequence[Ends], threads: int, /) -> None:
        """Do these in up to so many threads."""

    def sums(self, lengths: IntArray, offsets: IntArray, /) -> tuple[int, int]:
        """See `rowcopy.sums`; `offsets` are written."""

    def differences(self, offsets: IntArray, lengths: IntArray, /) -> tuple[int, int, bool]:
        """See `rowcopy.differences`; `lengths` are written."""


class Unwritten:
    """Rows in CPU memory that are still to be put together, straight where they are wanted.

    Attributes:
        nbytes: Of the rows.
    """

    nbytes: int

    def copy_to(self, out: ByteArray) -> Copy:
        """What puts them into `out`, memory that is just as large."""
        raise NotImplementedError
