"""Tensor memory as plain bytes and back, whatever the dtype. One room, so that every other one
can move rows by their bit width and never ask what the bits mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError

ByteArray: TypeAlias = npt.NDArray[np.uint8]
IntArray: TypeAlias = npt.NDArray[np.int64]

# Same-width integers: viewing a strided tensor as one of these needs no copy, and they have the
# copy kernels that torch's sub-byte and bits dtypes lack.
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with lazy conjugation and negation carried out; itself where there is none."""
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def describe(value: Any) -> str:
    """What a value is, in a few words for an error."""
    if isinstance(value, torch.Tensor):
        kind = "nested" if value.is_nested else f"{tuple(value.shape)}"
        return f"a {kind} tensor of layout {value.layout} on {value.device}"
    return type(value).__name__


def contiguous_bits(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` detached, contiguous, lazy conjugation and negation done, dtype kept.

    Returns the same memory where it already is all of that.
    """
    tensor = resolved(tensor.detach())
    if tensor.is_contiguous():
        return tensor
    width = _WIDTHS.get(tensor.itemsize)
    if width is None:  # complex128, which copies like any other
        return tensor.contiguous()
    return tensor.view(width).contiguous().view(tensor.dtype)


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in pageable CPU memory, on `device`."""
    # From such memory CUDA has read everything when this returns, without a wait for the device.
    return numbers.to(device, non_blocking=device.type == "cuda")


def take_rows(tensor: torch.Tensor, rows: IntArray) -> torch.Tensor:
    """``tensor[rows]`` of a strided tensor, for every dtype; the result owns its memory."""
    index = sent(torch.from_numpy(rows), tensor.device)
    if tensor.requires_grad:
        return tensor.index_select(0, index)
    return from_words(as_words(tensor).index_select(0, index), tensor.dtype)


def cat_bits(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """`torch.cat` of strided tensors of one dtype, for every dtype."""
    if any(tensor.requires_grad for tensor in tensors):
        return torch.cat(list(tensors), dim)
    return from_words(torch.cat(list(map(as_words, tensors)), dim), tensors[0].dtype)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of (...) cells as integers (..., k): one as wide as a cell, or two of 16 bytes.

    Aliases `tensor`, whatever its strides. Integers have the kernels, on every device, that
    other dtypes lack, and compare as bits.
    """
    tensor = resolved(tensor.detach())
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_WIDTHS[tensor.itemsize]).unsqueeze(-1)


def from_words(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `as_words`, for contiguous words; aliases them."""
    return words.view(dtype).squeeze(-1)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The cells of a strided tensor with any, in order: (nbytes,) uint8 where the tensor lies.

    A contiguous tensor is aliased, any other is copied.
    """
    flat = contiguous_bits(tensor)
    # Not reshape: a dim of size 1 may keep a stride that no view as bytes allows.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """The cells of a strided tensor in order, as a flat uint8 array.

    A contiguous CPU tensor is aliased (the array keeps its storage alive); any other is copied.
    """
    if tensor.numel() == 0:
        # numpy gives empty arrays stride 0, and a tensor over one cannot be viewed as bytes.
        return np.empty(0, dtype=np.uint8)
    array: ByteArray = flat_bytes(tensor).cpu().numpy()
    return array


def from_bytes(data: ByteArray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the memory of `data`, with a storage of its own over just these bytes.

    `data` must be flat, writable, aligned to the dtype and of the right size.
    """
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    # from_numpy makes a storage that begins and ends with the slice, so pickling one column
    # does not drag its neighbours along.
    return torch.from_numpy(data).view(dtype).view(shape)


_FILL_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
ALIGNMENT = 64


class Blank(NamedTuple):
    """A tensor that is wanted: every cell with the bits `pattern` (`dtype.itemsize` bytes)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pattern: bytes
    device: torch.device


def allocate(
    blanks: Sequence[Blank], out: ByteArray | None = None, pin_memory: bool = False
) -> list[torch.Tensor]:
    """New tensors; those on the CPU in one allocation, each with a storage of its own over it.

    Fresh memory is the largest cost of a big rectangle, and one large block of numpy's, which
    asks for huge pages, costs a tenth of many smaller ones. It is freed with the last of them.

    Args:
        blanks: The tensors that are wanted.
        out: Writable memory to lay them into, in place of new memory.
        pin_memory: Whether new memory is to be page-locked.

    Raises:
        ArgumentError: `out` is too small; the error says what is needed.
        RuntimeError: There is no accelerator to page-lock memory for.
    """
    sizes = [
        math.prod(blank.shape) * blank.dtype.itemsize if blank.device.type == "cpu" else 0
        for blank in blanks
    ]
    starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
    block = _block(starts[-1], out, pin_memory)
    tensors = []
    for blank, start, size in zip(blanks, starts, sizes, strict=False):
        if blank.device.type != "cpu":
            tensors.append(_filled_on_device(blank))
            continue
        cells = block[start : start + size]
        tensor = from_bytes(cells, blank.dtype, blank.shape)
        zeroed = out is None and not pin_memory
        tensors.append(
            tensor if zeroed and not any(blank.pattern) else refill(tensor, blank.pattern)
        )
    return tensors


def _block(size: int, out: ByteArray | None, pin_memory: bool) -> ByteArray:
    """`size` bytes at a multiple of 64; new ones, unless page-locked, are zero."""
    if out is not None:
        start = -out.ctypes.data % ALIGNMENT
        if len(out) < start + size:
            raise ArgumentError(
                "too_large",
                "out",
                f"expected {size + ALIGNMENT} bytes to write to, found {len(out)}",
            )
        return out[start : start + size]
    if pin_memory:
        pinned: ByteArray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    return np.zeros(size, dtype=np.uint8)


def refill(tensor: torch.Tensor, pattern: bytes) -> torch.Tensor:
    """Every cell of a contiguous tensor with the bits `pattern`."""
    if tensor.device.type != "cpu":
        width = _WIDTHS.get(tensor.itemsize)
        cells = tensor if width is None else tensor.view(width)
        word = sent(torch.frombuffer(bytearray(pattern), dtype=cells.dtype), tensor.device)
        cells.copy_(word.expand(tensor.shape))
    elif tensor.numel():
        fill_dtype = _FILL_DTYPES[tensor.itemsize]
        as_bytes(tensor).view(fill_dtype)[...] = np.frombuffer(pattern, dtype=fill_dtype)[0]
    return tensor


def _filled_on_device(blank: Blank) -> torch.Tensor:
    width = _WIDTHS.get(blank.dtype.itemsize, torch.complex128)
    word = sent(torch.frombuffer(bytearray(blank.pattern), dtype=width), blank.device)
    return word.expand(blank.shape).contiguous().view(blank.dtype)
