"""Tensor memory as plain bytes and back, whatever the dtype. One room, so that every other one
can move rows by their bit width and never ask what the bits mean.
"""

from __future__ import annotations

import math
from typing import TypeAlias

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
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


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


_FILL_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def filled(
    shape: tuple[int, ...], dtype: torch.dtype, pattern: bytes, device: torch.device
) -> torch.Tensor:
    """A new tensor whose every cell has the bits `pattern` (`dtype.itemsize` bytes)."""
    if device.type != "cpu":
        width = _WIDTHS.get(dtype.itemsize, torch.complex128)
        word = torch.frombuffer(bytearray(pattern), dtype=width).to(device)
        return word.expand(shape).contiguous().view(dtype)
    # numpy memory rather than torch's: numpy asks the kernel for huge pages.
    fill_dtype = np.dtype(_FILL_DTYPES[dtype.itemsize])
    if not any(pattern):
        cells = np.zeros(math.prod(shape), dtype=fill_dtype)
    else:
        cells = np.full(math.prod(shape), np.frombuffer(pattern, dtype=fill_dtype)[0])
    return from_bytes(cells.view(np.uint8), dtype, shape)
