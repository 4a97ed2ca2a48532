"""Rows of views on the host copied end to end, as bytes: without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jagcodec import rowcopy
from jagcodec.memory import aligned
from jagcodec.memory.arrays import ByteArray, array_bytes
from jagcodec.memory.blocks import new_block
from jagcodec.memory.extents import check_extent
from jagcodec.ragged.views import RaggedView


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
    made = [block[start:stop] for start, stop in places]
    pairs = zip(views, made, strict=True)
    rowcopy.copy_all([view.copy_task(data) for view, data in pairs if len(data)])
    return made


def bytes_of_cells(view: RaggedView) -> ByteArray:
    """The cells of rows on the host, end to end, as bytes; aliased if they are end to end."""
    if view.is_end_to_end and view.is_array:
        memory: Any = view.memory
        return memory if memory.itemsize == 1 and memory.ndim == 1 else array_bytes(memory)
    (data,) = gathered_bytes([view])
    return data
