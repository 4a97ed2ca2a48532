"""The kernel without a compiler: one memcpy per row, over memoryviews.

Of what Python offers this is the simplest that is never bad: numpy slices cost more per row, and
an index of cells costs eight bytes of memory traffic for each cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jagcodec.memory.tensor_bytes import ByteArray, IntArray, array_bytes
from jagcodec.rowcopy.tasks import Copy, Ends, Pad, Starts, numbers


def copy(tasks: Sequence[Copy], threads: int) -> None:
    """See `Kernel`; `threads` is of no use here."""
    for dst, src, dst_starts, src_starts, lengths, cell_bytes in tasks:
        _copy(dst, array_bytes(src), dst_starts, src_starts, lengths, cell_bytes)


def pad(tasks: Sequence[Pad], threads: int) -> None:
    """See `Kernel`; `threads` is of no use here."""
    for dst, src, starts, lengths, leads, width, cell_bytes, pattern in tasks:
        # All of it first: for each row's pads a slice more would cost more than the cells between.
        if pattern.count(pattern[0]) == len(pattern):
            dst.fill(pattern[0])
        else:
            dst.view(f"V{len(pattern)}")[...] = np.void(pattern)
        firsts = np.arange(len(lengths)) * width
        _copy(dst, src, firsts if leads is None else firsts + leads, starts, lengths, cell_bytes)


def ends(tasks: Sequence[Ends], threads: int) -> None:
    """See `Kernel`; `threads` is of no use here."""
    for src, stride, width, cell_bytes, starts, lengths in tasks:
        starts.fill(0)
        lengths.fill(0)
        rows = len(starts)
        if width == 1 or not rows:
            continue
        # As wide words as can be: comparing takes as long as there are words.
        size = next(size for size in (8, 4, 2, 1) if cell_bytes % size == 0)
        count = cell_bytes // size
        grid = np.lib.stride_tricks.as_strided(
            src, (rows, width * cell_bytes), (stride * cell_bytes, 1), writeable=False
        ).view(f"i{size}")
        # The first run ends, and the last one begins, where a cell is unlike the one before.
        changes = grid[:, count:] != grid[:, :-count]
        first = changes.argmax(axis=1)
        varied = changes[np.arange(rows), first]
        starts[varied] = (first // count + 1)[varied]
        stops = width - 1 - changes[:, ::-1].argmax(axis=1) // count
        lengths[varied] = (stops - starts)[varied]


def sums(lengths: IntArray, offsets: IntArray) -> tuple[int, int]:
    """See `Kernel`."""
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return _extremes(lengths)


def differences(offsets: IntArray, lengths: IntArray) -> tuple[int, int, bool]:
    """See `Kernel`."""
    np.subtract(offsets[1:], offsets[:-1], out=lengths)
    return (*_extremes(lengths), bool((offsets[1:] >= offsets[:-1]).all()))


def _extremes(numbers: IntArray) -> tuple[int, int]:
    return (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)


def _copy(
    dst: ByteArray,
    src: ByteArray,
    dst_starts: Starts | None,
    src_starts: Starts | None,
    lengths: IntArray,
    cell_bytes: int,
) -> None:
    to = _numbers(dst_starts, lengths) * cell_bytes
    begins = _numbers(src_starts, lengths) * cell_bytes
    sizes = lengths * cell_bytes
    source, target = src.data, dst.data
    for at, a, n in zip(to.tolist(), begins.tolist(), sizes.tolist(), strict=True):
        target[at : at + n] = source[a : a + n]


def _numbers(starts: Starts | None, lengths: IntArray) -> IntArray:
    if starts is None:
        ends: IntArray = np.cumsum(lengths)
        return ends - lengths
    return numbers(starts, len(lengths))
