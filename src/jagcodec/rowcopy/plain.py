"""The kernel without a compiler: one memcpy per row, over memoryviews.

Of what Python offers this is the simplest that is never bad: numpy slices cost more per row, and
an index of cells costs eight bytes of memory traffic for each cell.
"""

from __future__ import annotations

import numpy as np

from jagcodec.buffers import ByteArray, IntArray


def copy(
    dst: ByteArray,
    src: ByteArray,
    dst_starts: IntArray | None,
    src_starts: IntArray | None,
    lengths: IntArray,
    cell_bytes: int,
    threads: int,
) -> None:
    """See `Kernel`; `threads` is of no use here."""
    ends = np.cumsum(lengths)
    to = (ends - lengths if dst_starts is None else dst_starts) * cell_bytes
    begins = (ends - lengths if src_starts is None else src_starts) * cell_bytes
    sizes = lengths * cell_bytes
    source, target = src.data, dst.data
    for at, a, n in zip(to.tolist(), begins.tolist(), sizes.tolist(), strict=True):
        target[at : at + n] = source[a : a + n]


def pad(
    dst: ByteArray,
    src: ByteArray,
    starts: IntArray,
    lengths: IntArray,
    leads: IntArray | None,
    width: int,
    cell_bytes: int,
    pattern: bytes,
    threads: int,
) -> None:
    """See `Kernel`; `threads` is of no use here."""
    # All of it first: for each row's pads a slice more would cost more than the cells between.
    if pattern.count(pattern[0]) == len(pattern):
        dst.fill(pattern[0])
    else:
        dst.view(f"V{len(pattern)}")[...] = np.void(pattern)
    firsts = np.arange(len(lengths)) * width
    copy(dst, src, firsts if leads is None else firsts + leads, starts, lengths, cell_bytes, 1)
