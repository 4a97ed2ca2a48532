"""Tensor memory as plain bytes and back, whatever the dtype. One room, so that every other one
can move rows by their bit width and never ask what the bits mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.blocks import Block, new_block

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


# Those that numpy has under every supported torch: what most columns are.
_NUMPY_DTYPES = {
    getattr(torch, name.removesuffix("_")): np.dtype(name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    )
}


def plain_array(tensor: object) -> npt.NDArray[Any] | None:
    """A strided CPU tensor as an array over its memory; None where it takes more than that.

    Such as gradients, lazy negation, a layout or a dtype that numpy has not. What torch is asked
    for is little: each of its attributes is far more work than one of an array.
    """
    if type(tensor) is not torch.Tensor or tensor.dtype not in _NUMPY_DTYPES or not tensor.is_cpu:
        return None
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):
        return None


def array_bytes(array: npt.NDArray[Any]) -> ByteArray:
    """A C-contiguous array of numbers as flat bytes that alias it."""
    return array.reshape(-1).view(np.uint8)


def address(data: npt.NDArray[Any]) -> int:
    """Where the first cell lies."""
    place: int = data.__array_interface__["data"][0]  # `data.ctypes` takes twice as long
    return place


def are_apart(targets: Iterable[npt.NDArray[Any]], sources: Iterable[npt.NDArray[Any]]) -> bool:
    """Whether memory that is to be written overlaps nothing that is to be read, nor each other."""
    spans = [(address(data), data.nbytes, True) for data in targets if data.nbytes]
    spans += [(address(data), data.nbytes, False) for data in sources if data.nbytes]
    written = read = 0  # where the furthest of them ends
    for start, size, is_target in sorted(spans):
        if start < written or (is_target and start < read):
            return False
        if is_target:
            written = max(written, start + size)
        else:
            read = max(read, start + size)
    return True


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """The cells of a strided tensor in order, as a flat uint8 array.

    A contiguous CPU tensor is aliased (the array keeps its storage alive); any other is copied.
    """
    array = plain_array(tensor)
    if array is not None and array.flags.c_contiguous:
        return array_bytes(array)
    if tensor.numel() == 0:
        # numpy gives empty arrays stride 0, and a tensor over one cannot be viewed as bytes.
        return np.empty(0, dtype=np.uint8)
    flat: ByteArray = flat_bytes(tensor).cpu().numpy()
    return flat


def from_bytes(data: ByteArray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the memory of `data`, with a storage of its own over just these bytes.

    `data` must be flat, writable, aligned to the dtype and of the right size.
    """
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # from_numpy makes a storage that begins and ends with the slice, so pickling one column
    # does not drag its neighbours along.
    known = _NUMPY_DTYPES.get(dtype)
    if known is not None:
        return torch.from_numpy(np.ndarray(shape, known, data))
    return torch.from_numpy(data).view(dtype).view(shape)


def same_width_ints(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that has every copy kernel."""
    return int_of_size(dtype.itemsize)


def int_of_size(size: int) -> torch.dtype:
    """The dtype that moves elements of so many bytes."""
    return _WIDTHS.get(size, torch.complex128)


_WORDS = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "i8"}
ALIGNMENT = 64


def refill(tensor: torch.Tensor, pattern: bytes) -> torch.Tensor:
    """Every element of a tensor with the bits `pattern`; on a device without a wait for it."""
    words = as_words(tensor)
    for i, word in enumerate(np.frombuffer(pattern, dtype=_WORDS[tensor.itemsize]).tolist()):
        words[..., i].fill_(word)
    return tensor


_CPU = torch.device("cpu")


@dataclass(slots=True)
class Blank:
    """A tensor that is wanted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)  # which is made in half the time of a named tuple
class Room:
    """Memory for a tensor; unless `zeroed`, it may hold anything.

    Attributes:
        tensor: Contiguous, over that memory.
        data: The same memory as bytes, where it is on the CPU.
        zeroed: Whether every byte is zero.
    """

    tensor: torch.Tensor
    data: ByteArray | None
    zeroed: bool


def together(sizes: Sequence[int]) -> list[ByteArray]:
    """New memory of these sizes, in one block that is freed with the last of them."""
    starts = _starts(sizes)
    block = new_block(starts[-1]).data
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where memory of these sizes begins, each at a multiple of 64, and where the last ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return starts


def allocate(
    blanks: Sequence[Blank], out: ByteArray | None = None, pin_memory: bool = False
) -> list[Room]:
    """Room for tensors: on the CPU in one allocation, each with a storage of its own over it.

    Fresh memory is the largest cost of a big rectangle, and one large block, in huge pages, costs
    a tenth of many smaller ones. It is freed with the last of them; see `jagcodec.blocks`.

    Args:
        blanks: The tensors that are wanted.
        out: Writable memory to lay them into, in place of new memory.
        pin_memory: Whether new memory is to be page-locked.

    Raises:
        ArgumentError: `out` is too small; the error says what is needed.
        RuntimeError: There is no accelerator to page-lock memory for.
    """
    # `type` is made anew each time it is asked for, and takes as long as the rest of this.
    on_host = [blank.device == _CPU or blank.device.type == "cpu" for blank in blanks]
    sizes = [
        math.prod(blank.shape) * blank.dtype.itemsize if here else 0
        for blank, here in zip(blanks, on_host, strict=True)
    ]
    starts = _starts(sizes)
    block, zeroed = _block(starts[-1], out, pin_memory)
    rooms = []
    for blank, here, start, size in zip(blanks, on_host, starts, sizes, strict=False):
        if here:
            cells = block[start : start + size]
            rooms.append(Room(from_bytes(cells, blank.dtype, blank.shape), cells, zeroed))
        else:
            words = torch.empty(
                blank.shape, dtype=same_width_ints(blank.dtype), device=blank.device
            )
            rooms.append(Room(words.view(blank.dtype), None, False))
    return rooms


def _block(size: int, out: ByteArray | None, pin_memory: bool) -> Block:
    """`size` bytes for rooms: of `out` at a multiple of 64."""
    if out is not None:
        start = -address(out) % ALIGNMENT
        if len(out) < start + size:
            raise ArgumentError(
                "too_large",
                "out",
                f"expected {size + ALIGNMENT} bytes to write to, found {len(out)}",
            )
        return Block(out[start : start + size], False)
    if pin_memory:
        return Block(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy(), False)
    return new_block(size)
