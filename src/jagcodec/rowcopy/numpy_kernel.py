"""The kernel without a compiler: one memcpy per row, over memoryviews.

Of the ways that Python offers, this is the simplest that is never slow: numpy slices cost more per
row, and an index of cells costs eight bytes of memory traffic for each cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jagcodec.memory.tensor_bytes import ByteArray, IntArray, array_bytes
from jagcodec.rowcopy.tasks import Copy, Ends, Pad, Source, Starts, numbers

_NOTHING = np.empty(0, dtype=np.uint8)


def copy(tasks: Sequence[Copy], threads: int) -> None:
    """See `Kernel`; `threads` has no effect here."""
    for dst, src, dst_starts, src_starts, lengths, cell_bytes in tasks:
        _copy(dst, src, dst_starts, src_starts, lengths, cell_bytes)


def pad(tasks: Sequence[Pad], threads: int) -> None:
    """See `Kernel`; `threads` has no effect here."""
    for dst, src, starts, lengths, left_pad, width, cell_bytes, pad_bits in tasks:
        dst = array_bytes(dst)
        # The whole rectangle first: a slice more for each row's pads costs more than writing the
        # cells between them twice.
        if pad_bits.count(pad_bits[0]) == len(pad_bits):
            dst.fill(pad_bits[0])
        else:
            dst.view(f"V{len(pad_bits)}")[...] = np.void(pad_bits)
        firsts = numbers(width, len(lengths))
        dst_starts = firsts if left_pad is None else firsts + left_pad
        _copy(dst, src, dst_starts, starts, lengths, cell_bytes)


def ends(tasks: Sequence[Ends], threads: int) -> None:
    """See `Kernel`; `threads` has no effect here."""
    for src, stride, width, cell_bytes, starts, lengths in tasks:
        starts.fill(0)
        lengths.fill(0)
        rows = len(starts)
        if width == 1 or not rows:
            continue
        # The widest words that fit: the time of a comparison grows with the number of words.
        size = next(size for size in (8, 4, 2, 1) if cell_bytes % size == 0)
        count = cell_bytes // size
        grid = np.lib.stride_tricks.as_strided(
            src, (rows, width * cell_bytes), (stride * cell_bytes, 1), writeable=False
        ).view(f"i{size}")
        # The first run ends, and the last one begins, where a cell differs from the one before.
        changes = grid[:, count:] != grid[:, :-count]
        first = changes.argmax(axis=1)
        varied = changes[np.arange(rows), first]
        starts[varied] = (first // count + 1)[varied]
        stops = width - 1 - changes[:, ::-1].argmax(axis=1) // count
        lengths[varied] = (stops - starts)[varied]


def _copy(
    dst: ByteArray,
    src: Source,
    dst_starts: Starts | None,
    src_starts: Starts | None,
    lengths: IntArray,
    cell_bytes: int,
) -> None:
    to = _numbers(dst_starts, lengths) * cell_bytes
    begins = _numbers(src_starts, lengths)
    sizes = lengths * cell_bytes
    if isinstance(src, tuple):  # where starts count bytes
        source = (np.concatenate(src) if src else _NOTHING).data
    else:
        source = array_bytes(src).data
        begins = begins * cell_bytes
    target = np.frombuffer(dst, np.uint8).data
    for at, begin, size in zip(to.tolist(), begins.tolist(), sizes.tolist(), strict=True):
        target[at : at + size] = source[begin : begin + size]


def _numbers(starts: Starts | None, lengths: IntArray) -> IntArray:
    if starts is None:
        stops: IntArray = np.cumsum(lengths)
        return stops - lengths
    return numbers(starts, len(lengths))
