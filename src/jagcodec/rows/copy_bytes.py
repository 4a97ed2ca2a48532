"""Rows of views on the host copied end to end, as bytes or as arrays: without torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec import kernels
from jagcodec.memory import aligned
from jagcodec.memory.arrays import ByteArray, array_bytes, stored_dtype, torch_name
from jagcodec.memory.blocks import new_block
from jagcodec.memory.extents import check_extent
from jagcodec.rows.views import RaggedView


def gathered_bytes(views: Sequence[RaggedView]) -> list[ByteArray]:
    """The rows of each view, copied end to end; one call copies all rows into one block."""
    places: list[tuple[int, int]] = []
    end = 0
    for view in views:
        shape, itemsize = view.values_shape, view.dtype.itemsize
        size = math.prod(shape) * itemsize
        if not size:
            check_extent(shape, itemsize, "rows")
        places.append((end, end + size))
        end += aligned(size)
    block = new_block(end).data
    parts = [block[start:stop] for start, stop in places]
    pairs = zip(views, parts, strict=True)
    kernels.copy_all([view.copy_task(data) for view, data in pairs if len(data)])
    return parts


def bytes_of_cells(view: RaggedView) -> ByteArray:
    """The cells of rows on the host, end to end, as bytes; aliased if they are end to end."""
    if view.is_end_to_end and view.is_array:
        memory: Any = view.memory
        return memory if memory.itemsize == 1 and memory.ndim == 1 else array_bytes(memory)
    (data,) = gathered_bytes([view])
    return data


def gathered_cells(views: Sequence[RaggedView]) -> list[Any]:
    """The rows of each view, copied end to end: bytes, or a tensor if torch must copy them.

    Torch copies rows on devices, and rows that autograd follows.
    """
    here = [view for view in views if view.uses_row_kernel]
    copies = iter(gathered_bytes(here))
    if len(here) == len(views):
        return list(copies)
    gathered: Any = importlib.import_module("jagcodec.rows.copy_rows").gathered_by_torch
    return [next(copies) if view.uses_row_kernel else gathered(view) for view in views]


def array_of_cells(data: ByteArray, view: RaggedView) -> npt.NDArray[Any]:
    """The cells of a view, which are end to end in these bytes, as an array over them."""
    dtype = stored_dtype(torch_name(view.dtype), view.dtype.itemsize)
    return np.ndarray(view.values_shape, dtype, data)


def array_of_view(view: RaggedView) -> npt.NDArray[Any]:
    """The cells of rows on the host, end to end, as an array; aliased if they are end to end."""
    return array_of_cells(bytes_of_cells(view), view)
