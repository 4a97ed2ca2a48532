"""The kernel without a compiler: one memcpy per row, over memoryviews.

This is the simplest way in Python that is never slow: numpy slices cost more per row, and an index
of cells costs eight bytes of memory traffic for each cell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jagcodec.kernels.tasks import Copy, Ends, Pad, Starts, numbers, rows_only
from jagcodec.memory.arrays import IntArray, array_bytes


def copy(tasks: Sequence[Copy], threads: int) -> None:
    """Run `Copy` tasks; `threads` has no effect here."""
    for dst, src, dst_starts, src_starts, lengths, cell_bytes in tasks:
        to = _start_numbers(dst_starts, lengths) * cell_bytes
        begins = _start_numbers(src_starts, lengths)
        sizes = lengths * cell_bytes
        if isinstance(src, tuple):  # starts count bytes
            buffers = [buffer.data for buffer in src] or [memoryview(b"")]
            ends = np.cumsum([*map(len, buffers)])
            buffer_of = np.minimum(np.searchsorted(ends, begins, side="right"), len(buffers) - 1)
            begins = begins - np.append(0, ends)[buffer_of]
            sources = [buffers[i] for i in buffer_of.tolist()]
        else:
            sources = [array_bytes(src).data] * len(lengths)
            begins = begins * cell_bytes
        target = np.frombuffer(dst, np.uint8).data
        rows = zip(sources, to.tolist(), begins.tolist(), sizes.tolist(), strict=True)
        for source, at, begin, size in rows:
            target[at : at + size] = source[begin : begin + size]


def pad(tasks: Sequence[Pad], threads: int) -> None:
    """Run `Pad` tasks; `threads` has no effect here."""
    for task in tasks:
        dst, bits = array_bytes(task[0]), task[-1]
        # Fill the whole rectangle with pads first. Slices for the pads of each row would cost more
        # than writing the other cells twice.
        if bits.count(bits[0]) == len(bits):
            dst.fill(bits[0])
        else:
            dst.view(f"V{len(bits)}")[...] = np.void(bits)
        copy([rows_only(Pad(*task))], threads)


def ends(tasks: Sequence[Ends], threads: int) -> None:
    """Run `Ends` tasks; `threads` has no effect here."""
    for src, stride, width, cell_bytes, starts, lengths in tasks:
        starts.fill(0)
        lengths.fill(0)
        rows = len(starts)
        if width == 1 or not rows:
            continue
        # Compare the widest words that fit: the time grows with the number of words.
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


def _start_numbers(starts: Starts | None, lengths: IntArray) -> IntArray:
    if starts is None:
        stops: IntArray = np.cumsum(lengths)
        return stops - lengths
    return numbers(starts, len(lengths))
