"""What `cells` does with tensors: imported when there is one, because it imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import numpy.typing as npt
import torch

from jagcodec.errors import describe
from jagcodec.memory.arrays import NUMPY_BY_NAME, array_bytes, for_torch
from jagcodec.memory.plain_types import TENSOR_TYPES, remedy_for, with_remedy
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import (
    NUMPY_DTYPES,
    as_bytes,
    cat_bits,
    contiguous_bits,
    from_bytes,
    number_array,
    plain_array,
    plain_arrays,
)
from jagcodec.produce.cell_dtypes import STORED_DTYPES
from jagcodec.wire.tensor_views import has_dense_cells as has_dense_cells
from jagcodec.wire.torch_dtypes import TORCH_NAMES, torch_dtype


def described_tensor(tensor: torch.Tensor) -> str:
    """A short description of a tensor, with a remedy if its values cannot be read."""
    remedy = "" if tensor.layout is torch.jagged else with_remedy(tensor)
    return remedy or describe(tensor)


# --- to arrays ---------------------------------------------------------------------------------


def array_of_tensor(tensor: torch.Tensor) -> Any:
    """An array of `STORED_DTYPES` with the cells of a tensor, aliased if it is contiguous.

    A tensor if it is on a device, or has dims that an array cannot have.
    """
    part = contiguous_bits(tensor.as_subclass(torch.Tensor))
    array = plain_array(part)
    if array is None and part.is_cpu:
        with suppress(ValueError):  # dims 0 and 2**62
            return as_bytes(part).view(STORED_DTYPES[TORCH_NAMES[part.dtype]]).reshape(part.shape)
    return part if array is None else array


def on_host(tensor: Any) -> Any:
    """A tensor on the host, detached. A tensor that cannot be read is returned unchanged."""
    plain = type(tensor) in TENSOR_TYPES and not remedy_for(tensor)
    return tensor.detach().cpu() if plain else tensor


def arrays_of_tensors(tensors: Sequence[Any]) -> list[npt.NDArray[Any]] | None:
    """Tensors as arrays over their memory; None if one needs a copy."""
    arrays = plain_arrays(tensors)
    return None if type(None) in set(map(type, arrays)) else arrays  # type: ignore[return-value]


def joined_at_once(tensors: Sequence[Any]) -> tuple[npt.NDArray[Any], tuple[int, ...]] | None:
    """CPU tensors of one dtype and cell shape as one array, and their lengths.

    None if they differ, or if cells may be missing.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    strided = {tensor.layout for tensor in tensors} == {torch.strided}
    if len(dtypes) > 1 or not dtypes <= NUMPY_DTYPES.keys() or not strided:
        return None
    # Torch would read memory that was freed, and leave out tensors of shape (0,): both are at 0.
    if not (all(map(_IS_ON_CPU, tensors)) and all(map(torch.Tensor.data_ptr, tensors))):
        return None
    try:
        array = plain_array(torch.cat(tensors))  # type: ignore[arg-type]
    except (ValueError, RuntimeError):
        return None
    if array is None or not array.flags.c_contiguous:
        return None
    # `numel` is eight times as fast as `len`.
    length_of = torch.Tensor.numel if array.ndim == 1 else len
    return array, tuple(map(length_of, tensors))


_IS_ON_CPU = attrgetter("is_cpu")


def numbers_of_tensor(cells: Any, dtype: str) -> npt.NDArray[Any]:
    """The numbers in cells of a dtype, which may be an array of `STORED_DTYPES`."""
    return number_array(tensor_of(cells, dtype))


# --- to tensors --------------------------------------------------------------------------------


def tensor_of(cells: Any, dtype: str) -> torch.Tensor:
    """Cells as a tensor, aliased if possible; a tensor unchanged."""
    if isinstance(cells, torch.Tensor):
        return cells
    if dtype in NUMPY_BY_NAME:
        return torch.as_tensor(cells)
    return from_bytes(for_torch(array_bytes(cells)), torch_dtype(dtype), cells.shape)


def tensor_of_cells(cells: Any, dtype: str) -> Any:
    """Cells as an array, if numpy has the dtype under every torch; else as a tensor."""
    return cells if dtype in NUMPY_BY_NAME else tensor_of(cells, dtype)


def joined_tensors(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Tensors end to end along a dim; those without dims become the cells of one."""
    if not parts[0].ndim:
        parts = [part.unsqueeze(0) for part in parts]
    return cat_bits(parts, dim)


def on_device_of(cells: Any, dtype: str, tensor: torch.Tensor) -> torch.Tensor:
    """Cells as a tensor on the device of another one."""
    return to_device(tensor_of(cells, dtype), tensor.device)
