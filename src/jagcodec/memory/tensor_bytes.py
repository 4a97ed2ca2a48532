"""Any tensor as bytes, and bytes as a tensor, whatever the dtype.

The layers above copy rows by their width in bytes and never ask what the bits mean. First come
tensors as they are in memory and their bits as integers (*words*), then tensors as arrays, and last
bytes as tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.memory.arrays import (
    IN_NUMPY,
    NUMPY_BY_NAME,
    ByteArray,
    array_bytes,
    stored_dtype,
    torch_name,
)
from jagcodec.memory.small_floats import numbers_of

# Integers of the same width. A strided tensor can be viewed as one of these without a copy. They
# compare as bits, and have the kernels, on every device, that torch's rarer dtypes lack.
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lacks_kernel(error: RuntimeError) -> bool:
    """Whether torch raised this because it has no kernel for a dtype or a layout.

    Newer versions of torch raise NotImplementedError, older ones a bare RuntimeError.
    """
    return isinstance(error, NotImplementedError) or "not implemented for" in str(error)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with lazy conjugation and negation carried out; aliased if it has neither."""
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage holds all cells of a tensor: `resize_` may have freed some, or all.

    Raises RuntimeError or NotImplementedError for a tensor that has no storage.
    """
    cells = tensor.numel()
    if not cells or tensor._is_zerotensor():
        return True
    if not (tensor.is_contiguous() or tensor.is_nested):
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        cells = 1 + sum((dim - 1) * stride for dim, stride in dims)
    end = (tensor.storage_offset() + cells) * tensor.itemsize
    storage = tensor.untyped_storage()
    return end <= storage.nbytes() and storage.data_ptr() != 0


def contiguous_bits(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` detached, contiguous and resolved; it aliases a tensor that already is."""
    tensor = resolved(tensor.detach())
    if tensor.is_contiguous():
        return tensor
    # Copy as integers: torch's own copy of complex128 can crash the process if the memory has only
    # the 8-byte alignment that numpy requires.
    return from_words(as_words(tensor).contiguous(), tensor.dtype)


def cat_bits(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """`torch.cat` of strided tensors of one dtype; it works for every dtype."""
    if tensors[0].dtype in NUMPY_DTYPES or any(tensor.requires_grad for tensor in tensors):
        return torch.cat(list(tensors), dim)
    return from_words(torch.cat(list(map(as_words, tensors)), dim), tensors[0].dtype)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of (...) cells as integers (..., k), aliased: one per cell, or two for 16 bytes."""
    tensor = resolved(tensor.detach())
    if tensor.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_WIDTHS[tensor.itemsize]).unsqueeze(-1)


def from_words(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `as_words`, for contiguous words; aliases them."""
    return words.view(dtype).squeeze(-1)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The cells of a strided tensor, not empty, as (nbytes,) uint8; aliased if contiguous."""
    flat = contiguous_bits(tensor)
    # `reshape` is not enough: it may keep a stride of a dim of size 1 that a view as bytes rejects.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


NUMPY_DTYPES = {getattr(torch, name): dtype for name, dtype in NUMPY_BY_NAME.items()}
"""The dtypes that numpy has under every supported torch."""

MOST_ARRAY_DIMS = 64 if int(np.__version__.split(".")[0]) > 1 else 32
"""The most dims of an array; a tensor has at most 64."""


def plain_array(tensor: Any) -> npt.NDArray[Any] | None:
    """A strided CPU tensor as an array over its memory; None if a view is not enough."""
    if type(tensor) is not torch.Tensor or tensor.dtype not in NUMPY_DTYPES:
        return None
    try:
        array: npt.NDArray[Any] = tensor.numpy()
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ):  # on a device; followed by autograd; dims 0 and 2**62
        return None
    # If the tensor's memory was freed, numpy allocates new memory with arbitrary contents.
    return None if array.flags.owndata and array.size else array


def array_in_storage(tensor: Any, *, or_empty: bool = False) -> npt.NDArray[Any] | None:
    """`plain_array` of a tensor whose cells are in order, and all in its storage.

    None for any other tensor and, without `or_empty`, for one without cells.
    """
    array = plain_array(tensor)
    if array is None or not (array.nbytes or or_empty) or not array.flags.c_contiguous:
        return None
    end = array.nbytes + tensor.storage_offset() * array.itemsize
    return array if end <= tensor.untyped_storage().nbytes() else None


def plain_arrays(tensors: Iterable[Any]) -> list[npt.NDArray[Any] | None]:
    """`plain_array` of each."""
    return list(map(plain_array, tensors))


def number_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A strided tensor as an array, aliased if possible; floats that numpy lacks are widened."""
    array = plain_array(tensor)
    if array is not None:
        return array
    host, name = resolved(tensor.detach().cpu()), torch_name(tensor.dtype)
    if name in IN_NUMPY:
        return host.numpy()
    words = as_bytes(host).view(stored_dtype(name, host.itemsize)).reshape(host.shape)
    return numbers_of(words, name)


def array_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array of numbers as a tensor, aliased if possible; TypeError if torch lacks the dtype."""
    # Torch warns about memory that is not writable, and supports neither foreign byte orders nor
    # negative strides.
    can_alias = array.flags.writeable and all(step >= 0 for step in array.strides)
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, native, None if can_alias else ("C", "O", "W")))


def as_bytes(tensor: torch.Tensor) -> ByteArray:
    """The cells of a strided tensor as flat uint8; a contiguous CPU tensor is aliased."""
    array = plain_array(tensor)
    if array is not None and array.flags.c_contiguous:
        return array_bytes(array)
    if tensor.numel() == 0:
        # numpy gives empty arrays stride 0, and a tensor with it cannot be viewed as bytes.
        return np.empty(0, dtype=np.uint8)
    flat: ByteArray = flat_bytes(tensor).cpu().numpy()
    return flat


def from_bytes(data: ByteArray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over `data`: flat, writable, aligned to the dtype and of the right size."""
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # from_numpy makes a storage of just these bytes, so pickling one column leaves out the others.
    numpy_dtype = NUMPY_DTYPES.get(dtype)
    if numpy_dtype is not None and len(shape) <= MOST_ARRAY_DIMS:
        return torch.from_numpy(np.ndarray(shape, numpy_dtype, data))
    return torch.from_numpy(data).view(dtype).view(shape)


def same_width_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same width that has every copy kernel."""
    return _WIDTHS.get(dtype.itemsize, torch.complex128)


def refill(tensor: torch.Tensor, pattern: bytes) -> torch.Tensor:
    """Write the bits `pattern` to every element of a tensor, without a wait for its device."""
    words = as_words(tensor)
    for i, word in enumerate(np.frombuffer(pattern, NUMPY_DTYPES[words.dtype]).tolist()):
        words[..., i].fill_(word)
    return tensor
