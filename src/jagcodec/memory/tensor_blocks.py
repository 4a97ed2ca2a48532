"""Memory for several tensors at once: one block for those on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory import ALIGNMENT, aligned
from jagcodec.memory.arrays import ByteArray, address
from jagcodec.memory.blocks import Block, new_block
from jagcodec.memory.tensor_bytes import as_bytes, from_bytes, same_width_dtype

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Wanted:
    """A tensor that needs memory, and the memory that `allocate` gives it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor = field(init=False)
    data: ByteArray | None = field(init=False)  # the same memory, if it is on the CPU
    zeroed: bool = field(init=False)  # whether every byte is; otherwise it may hold anything


def allocate(
    wanted: Iterable[Wanted],
    out: ByteArray | None = None,
    pin_memory: bool = False,
    path: str = "out",
) -> None:
    """Give tensors memory.

    Those on the CPU share one block, of `out` or new, which is freed with the last of them.
    A page-locked tensor has its own memory, see `_page_locked`. `path` is what errors call `out`.
    """
    # Fresh memory is the largest cost of a big rectangle, and one large block, in huge pages, costs
    # a tenth of many smaller ones.
    on_host: list[tuple[Wanted, int, int]] = []
    end = 0
    for one in wanted:
        # `device.type` makes a new object, which takes as long as the rest of this loop.
        if one.device == _CPU or one.device.type == "cpu":
            if pin_memory and out is None:
                _page_locked(one)
                continue
            size = one.dtype.itemsize
            for extent in one.shape:
                size *= extent
            on_host.append((one, end, end + size))
            end += aligned(size)
        else:
            words = torch.empty(one.shape, dtype=same_width_dtype(one.dtype), device=one.device)
            one.tensor, one.data, one.zeroed = words.view(one.dtype), None, False
    block, zeroed = new_block(end) if out is None else _block_of(out, end, path)
    for one, start, stop in on_host:
        one.data = data = block[start:stop]
        one.tensor = from_bytes(data, one.dtype, one.shape)
        one.zeroed = zeroed


def _page_locked(one: Wanted) -> None:
    """Give a tensor its own page-locked memory, which torch allocates.

    Torch reuses such memory when the copies from it are done. It only knows of copies from tensors
    that it made, so it may overwrite a tensor over a part of a block while a device reads it.
    """
    words = torch.empty(one.shape, dtype=same_width_dtype(one.dtype), pin_memory=True)
    one.tensor, one.data, one.zeroed = words.view(one.dtype), as_bytes(words), False


def _block_of(out: ByteArray, size: int, path: str) -> Block:
    """`size` bytes of `out`, at a multiple of 64."""
    start = -address(out) % ALIGNMENT
    if len(out) < start + size:
        detail = f"expected {size + ALIGNMENT} bytes to write to, found {len(out)}"
        raise ArgumentError("too_large", path, detail)
    return Block(out[start : start + size], False)
