"""Large blocks of new memory, kept for the next batch once the last one is done with them.

Memory that is fresh from the system is written page by page as it is handed out and zeroed, which
takes several times as long as the rows do; where the machine is a virtual one whose host takes free
memory back, twenty times. So a block is not unmapped when nothing refers to it any more but handed
to the system with ``MADV_FREE``: it may take the pages whenever it wants memory, before it kills
anything, and as long as it does not, the next batch of about that size writes to them again.

At most one block is kept for each power of two of bytes from 4 MiB to 4 GiB, 8 GiB in all. Tools
that read RSS count it until the system takes it; what Kubernetes calls the working set does not,
and goes on to leave it out while it is in use again (docs/performance.md). Of smaller blocks, from
256 KiB on, 16 MiB of each size are kept as the C library keeps memory, for the micro-batches of the
next step. `release` gives all of them back at once, and ``JAGCODEC_KEEP_BLOCKS=0`` keeps none.
Smaller memory is the C library's; where the system has no ``MADV_FREE`` all of it is.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.tensor_bytes import ByteArray, address, from_bytes, same_width_ints

# What is smaller the C library keeps well enough; from here on it may give memory back to the
# system and take it anew, page by page, for every batch.
_SMALLEST_KEPT = (128 << 10) + 1
_LARGEST_KEPT = 4 << 30

# From here on blocks are worth huge pages, and lending to the system while nobody holds them.
_LARGE = 4 << 20

# Of smaller blocks, so much is kept of each size.
_KEPT_SMALL = 16 << 20

# A block may take a mapping of its own, of which a process has 65,530 for everything: whoever holds
# so many gets no more small ones.
_MOST_LOANS = 1024

# From here on the C library's memory always is the system's, which gives it zeroed; what is smaller
# may have been in use before, and to zero it would be work done twice. (glibc's upper bound.)
_FRESH_FROM_THE_SYSTEM = 32 << 20

# By their sizes. Only single operations that no thread and no finalizer can come between.
_kept: dict[int, list[mmap.mmap]] = {1 << bits: [] for bits in range(18, 33)}


class Block(NamedTuple):
    """New memory.

    Attributes:
        data: Flat and writable, at a multiple of 16 bytes.
        zeroed: Whether every byte is zero; otherwise it may hold anything.
    """

    data: ByteArray
    zeroed: bool


def new_block(size: int) -> Block:
    """`size` bytes that belong to whoever holds the array, or a view of it.

    Raises:
        MemoryError: There is not so much.
    """
    if not (_keeps and _SMALLEST_KEPT <= size <= _LARGEST_KEPT):
        return _unkept(size)
    # Of a size that the next batch can use too. What lies behind `size` is not touched: it takes
    # no memory, or stays lent to the system.
    room = 1 << (size - 1).bit_length()
    mapped = _let_go(room)
    zeroed = mapped is None
    if mapped is None:
        if room < _LARGE and len(_loans) >= _MOST_LOANS:
            return _unkept(size)
        try:
            mapped = _mapped(room)
        except OSError:  # a limit on addresses, which numpy stays below or tells of
            return _unkept(size)
    whole = np.frombuffer(mapped, dtype=np.uint8)
    # numpy has views refer to `whole`, whatever they are views of; so it goes with the last.
    loan = _Loan(whole, _returned)
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
    for kept in _kept.values():
        kept.clear()


def _unkept(size: int) -> Block:
    """Memory of the C library, which does with it what it likes when it is let go."""
    zeroed = size >= _FRESH_FROM_THE_SYSTEM
    make = np.zeros if zeroed else np.empty
    try:
        return Block(make(size, dtype=np.uint8), zeroed)
    except MemoryError:
        # What is lent to the system still counts as addresses, and as memory that was promised.
        release()
        return Block(make(size, dtype=np.uint8), zeroed)


def _let_go(room: int) -> mmap.mmap | None:
    """A block of a size that nobody holds any more."""
    kept = _kept[room]
    if not kept and room >= _LARGE:
        _collect()
    try:
        return kept.pop()
    except IndexError:  # there is none, or another thread has it
        return None


def _mapped(room: int) -> mmap.mmap:
    mapped = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if room >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # from a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class _Loan(weakref.ref[ByteArray]):
    """A block that someone holds, as a reference that tells when nobody does any more."""

    __slots__ = ("mapped", "room")
    mapped: mmap.mmap
    room: int


# By their ids. A loan that is not in here has been returned; what it lent is nobody's, or kept.
_loans: dict[int, _Loan] = {}


def _returned(loan: _Loan) -> None:
    """Keep the block of a loan, once.

    Ctrl-C may come between any two steps, and is lost then: before the first, the block waits for
    `_collect`; after it, it is unmapped.
    """
    if _loans.pop(id(loan), None) is None:
        return
    kept = _kept[loan.room]
    most = 1 if loan.room >= _LARGE else _KEPT_SMALL // loan.room
    if len(kept) >= most:
        return
    try:
        if loan.room >= _LARGE:
            loan.mapped.madvise(mmap.MADV_FREE)
    except OSError:
        return  # locked memory, which cannot be taken back: unmapped
    kept.append(loan.mapped)


def _collect() -> None:
    """Keep the blocks that nobody holds, and whose return was interrupted."""
    for loan in list(_loans.values()):
        if loan() is None:
            _returned(loan)


def _wanted(text: str) -> bool:
    if text not in ("", "0", "1"):
        raise ArgumentError(
            "bad_option", "JAGCODEC_KEEP_BLOCKS", f"expected 0 or 1, found {text!r}"
        )
    return text != "0"


_keeps = hasattr(mmap, "MADV_FREE") and _wanted(os.environ.get("JAGCODEC_KEEP_BLOCKS", ""))

# --- several tensors in one block --------------------------------------------------------------

_ALIGNMENT = 64  # a cache line
_CPU = torch.device("cpu")


def allocate_together(sizes: Sequence[int]) -> list[ByteArray]:
    """New memory of each of these sizes, in one block that is freed with the last of them."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += (size + _ALIGNMENT - 1) & -_ALIGNMENT
    block = new_block(end).data
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@dataclass(slots=True)
class Wanted:
    """A tensor that needs memory, and the memory that `allocate` gives it.

    Attributes:
        shape, dtype, device: Of the tensor.
        tensor: Contiguous, over its memory.
        data: The same memory as bytes, where it is on the CPU.
        zeroed: Whether every byte is zero; otherwise it may hold anything.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor = field(init=False)
    data: ByteArray | None = field(init=False)
    zeroed: bool = field(init=False)


def allocate(
    wanted: Iterable[Wanted], out: ByteArray | None = None, pin_memory: bool = False
) -> None:
    """Memory for tensors: on the CPU in one block, each with a storage of its own over its part.

    Fresh memory is the largest cost of a big rectangle, and one large block, in huge pages, costs
    a tenth of many smaller ones. It is freed with the last of the tensors.

    Args:
        wanted: The tensors; their memory is set.
        out: Writable memory to use in place of new memory.
        pin_memory: Whether new memory is page-locked.

    Raises:
        ArgumentError: `out` is too small; the error says what is needed.
        RuntimeError: There is no accelerator to page-lock memory for.
    """
    on_host: list[tuple[Wanted, int, int]] = []
    end = 0
    for one in wanted:
        # `type` is made anew each time it is asked for, and takes as long as the rest of this.
        if one.device == _CPU or one.device.type == "cpu":
            size = one.dtype.itemsize
            for extent in one.shape:
                size *= extent
            on_host.append((one, end, end + size))
            end += (size + _ALIGNMENT - 1) & -_ALIGNMENT
        else:
            words = torch.empty(one.shape, dtype=same_width_ints(one.dtype), device=one.device)
            one.tensor, one.data, one.zeroed = words.view(one.dtype), None, False
    block, zeroed = _block(end, out, pin_memory)
    for one, start, stop in on_host:
        one.data = data = block[start:stop]
        one.tensor = from_bytes(data, one.dtype, one.shape)
        one.zeroed = zeroed


def _block(size: int, out: ByteArray | None, pin_memory: bool) -> Block:
    """`size` bytes at a multiple of 64, of `out` or new."""
    if out is not None:
        start = -address(out) % _ALIGNMENT
        if len(out) < start + size:
            raise ArgumentError(
                "too_large",
                "out",
                f"expected {size + _ALIGNMENT} bytes to write to, found {len(out)}",
            )
        return Block(out[start : start + size], False)
    if pin_memory:
        return Block(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy(), False)
    return new_block(size)
