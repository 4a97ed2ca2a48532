"""Large blocks of memory, kept for the next batch (docs/performance.md).

`new_block` and `allocate_together` give memory out. `release` unmaps all kept blocks.

The system zeroes fresh memory page by page, which needs several times as long as the rows. So a
block that nothing refers to is kept for the next batch of about that size. It is marked with
``MADV_FREE``: the system may take its pages when it needs them. With ``JAGCODEC_KEEP_BLOCKS=0``, no
block is kept. Smaller memory comes from the C library, and so does all memory on systems without
``MADV_FREE``.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from jagcodec.errors import ArgumentError
from jagcodec.memory import aligned
from jagcodec.memory.arrays import ByteArray

# The C library keeps smaller memory well enough. It may take larger memory anew, page by page.
_MIN_KEPT_BYTES = (128 << 10) + 1
_MAX_KEPT_BYTES = 4 << 30

# Blocks of this size or more get huge pages, and are marked `MADV_FREE` while they are kept. One of
# each size is kept.
_MIN_LARGE_BYTES = 4 << 20

# How many bytes of smaller blocks are kept, for each size.
_MAX_SMALL_BYTES = 16 << 20

# Each block needs a mapping, and a process may have 65,530. If this many blocks or more are in use,
# small ones come from the C library.
_MAX_LOANS = 1024

# The C library takes memory of this size or more (glibc's upper bound) from the system, zeroed.
_MIN_SYSTEM_BYTES = 32 << 20

# Kept blocks by size. Each access is one operation, so no thread or finalizer can come between.
_spares: dict[int, list[mmap.mmap]] = {1 << bits: [] for bits in range(18, 33)}


class Block(NamedTuple):
    """New memory, flat and writable, at a multiple of 16 bytes."""

    data: ByteArray
    zeroed: bool  # whether every byte is; otherwise it may hold anything


def new_block(size: int) -> Block:
    """`size` bytes that belong to the holder of the array, or of a view of it."""
    if not (_keeps_blocks and _MIN_KEPT_BYTES <= size <= _MAX_KEPT_BYTES):
        return _block_of_c_library(size)
    # Round the size up, so that the next batch can use the block, too. Pages that are never
    # touched need no memory.
    room = 1 << (size - 1).bit_length()
    mapped = _take_spare(room)
    zeroed = mapped is None
    if mapped is None:
        if room < _MIN_LARGE_BYTES and len(_loans) >= _MAX_LOANS:
            return _block_of_c_library(size)
        try:
            mapped = _map_pages(room)
        except OSError:  # the process has a limit on addresses
            return _block_of_c_library(size)
    whole = np.frombuffer(mapped, dtype=np.uint8)
    # Every view refers to `whole`, so `whole` is freed with the last of them.
    loan = _Loan(whole, _return_block)
    loan.mapped, loan.room = mapped, room
    _loans[id(loan)] = loan
    return Block(whole[:size], zeroed)


def release() -> None:
    """Give the blocks that nothing refers to back to the system now.

    Example:
        >>> from jagcodec.memory import blocks
        >>> blocks.release()
    """
    _collect()
    for spares in _spares.values():
        spares.clear()


def _block_of_c_library(size: int) -> Block:
    """A block that is not kept."""
    zeroed = size >= _MIN_SYSTEM_BYTES
    make = np.zeros if zeroed else np.empty
    try:
        return Block(make(size, dtype=np.uint8), zeroed)
    except MemoryError:
        # Kept blocks count towards the limits on addresses and on memory: try again without them.
        release()
        return Block(make(size, dtype=np.uint8), zeroed)


def _take_spare(room: int) -> mmap.mmap | None:
    """A kept block of this size, if there is one."""
    spares = _spares[room]
    if not spares and room >= _MIN_LARGE_BYTES:
        _collect()
    try:
        return spares.pop()
    except IndexError:  # the list is empty, or another thread took the block
        return None


def _map_pages(room: int) -> mmap.mmap:
    """New pages, zeroed by the system; huge ones for a large block, if the kernel has them."""
    mapped = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if room >= _MIN_LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may lack huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class _Loan(weakref.ref[ByteArray]):
    """A weak reference to a block in use."""

    __slots__ = ("mapped", "room")
    mapped: mmap.mmap
    room: int


# Loans by id. A loan that is missing here was returned.
_loans: dict[int, _Loan] = {}


def _return_block(loan: _Loan) -> None:
    """Keep the block of a loan for the next batch, once."""
    # Ctrl-C may interrupt any two steps, and weakref callbacks swallow it. If it comes before the
    # first step, the block waits for `_collect`; if it comes later, the block is unmapped.
    if _loans.pop(id(loan), None) is None:
        return
    spares = _spares[loan.room]
    is_large = loan.room >= _MIN_LARGE_BYTES
    if len(spares) >= (1 if is_large else _MAX_SMALL_BYTES // loan.room):
        return
    try:
        if is_large:
            loan.mapped.madvise(mmap.MADV_FREE)
    except OSError:
        return  # the system cannot take back locked memory: let the block be unmapped
    spares.append(loan.mapped)


def _collect() -> None:
    """Return the blocks that went out of use, but whose return was interrupted."""
    for loan in list(_loans.values()):
        if loan() is None:
            _return_block(loan)


def _flag_of_environment(text: str) -> bool:
    """Whether the value of `JAGCODEC_KEEP_BLOCKS` asks to keep blocks, as an empty one does."""
    if text not in ("", "0", "1"):
        detail = f"expected 0 or 1, found {text!r}"
        raise ArgumentError("bad_option", "JAGCODEC_KEEP_BLOCKS", detail)
    return text != "0"


_keeps_blocks = hasattr(mmap, "MADV_FREE") and _flag_of_environment(
    os.environ.get("JAGCODEC_KEEP_BLOCKS", "")
)


def allocate_together(sizes: Sequence[int]) -> list[ByteArray]:
    """New memory of each of these sizes, in one block that is freed with the last of them."""
    parts, start = [], 0
    block = new_block(sum(map(aligned, sizes))).data
    for size in sizes:
        parts.append(block[start : start + size])
        start += aligned(size)
    return parts
