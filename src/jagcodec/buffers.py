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


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """The cells of a strided tensor in order, as a flat uint8 array.

    A contiguous CPU tensor is aliased (the array keeps its storage alive); any other is copied.
    """
    if tensor.numel() == 0:
        # numpy gives empty arrays stride 0, and a tensor over one cannot be viewed as bytes.
        return np.empty(0, dtype=np.uint8)
    flat = contiguous_bits(tensor)
    # Not reshape: a dim of size 1 may keep a stride that no view as bytes allows.
    flat = flat.as_strided((flat.numel(),), (1,))
    if flat.device.type != "cpu":
        flat = flat.cpu()
    array: ByteArray = flat.view(torch.uint8).numpy()
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


def same_width_ints(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that has every copy kernel."""
    return _WIDTHS.get(dtype.itemsize, torch.complex128)


_ALIGNMENT = 64


class Blank(NamedTuple):
    """A tensor that is wanted; unless `zeroed`, it may hold anything."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zeroed: bool


def allocate(blanks: Sequence[Blank]) -> list[torch.Tensor]:
    """New tensors; those on the CPU in one allocation, each with a storage of its own over it.

    Fresh memory is the largest cost of a big rectangle, and one large block of numpy's, which
    asks for huge pages, costs a tenth of many smaller ones. It is freed with the last of them.
    """
    sizes = [
        math.prod(blank.shape) * blank.dtype.itemsize if blank.device.type == "cpu" else 0
        for blank in blanks
    ]
    starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    block = np.zeros(starts[-1], dtype=np.uint8)
    tensors = []
    for blank, start, size in zip(blanks, starts, sizes, strict=False):
        if blank.device.type == "cpu":
            tensors.append(from_bytes(block[start : start + size], blank.dtype, blank.shape))
        else:
            new = torch.zeros if blank.zeroed else torch.empty
            words = new(blank.shape, dtype=same_width_ints(blank.dtype), device=blank.device)
            tensors.append(words.view(blank.dtype))
    return tensors
