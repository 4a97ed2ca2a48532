"""The columns of a message as tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from jagcodec.memory.arrays import NUMPY_BY_NAME, array_bytes
from jagcodec.memory.extents import check_extent
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import from_bytes
from jagcodec.ragged.chosen_rows import ChosenRows
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import nested_tensor
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.leaf import CellPlace
from jagcodec.wire.message import Message, writable
from jagcodec.wire.schema import GROUP, STORED, Node
from jagcodec.wire.spec import INDIRECT, PLAIN
from jagcodec.wire.torch_dtypes import torch_dtype


def tensor_of_node(message: Message, node: Node, chosen: ChosenRows | None = None) -> torch.Tensor:
    """The cells of a TENSOR or a JAGGED, or of its chosen rows, in memory that may be kept."""
    device = message.device
    values = tensor_on_host(message, node, chosen, leaves=message.away is not None)
    return values if device is None else to_device(values, device)


def tensor_on_host(
    message: Message, node: Node, chosen: ChosenRows | None = None, *, leaves: bool = False
) -> torch.Tensor:
    """As `tensor`, on the host; if it `leaves` for a device, in memory that is only read."""
    numbers = message.numbers
    if chosen is None and numbers[node.number + STORED] <= INDIRECT:
        return _whole_tensor(message, node, tuple(numbers[node.dims : node.end]), leaves)
    view = message.view(node, chosen)
    values = owned_cells(message, view, leaves=leaves)
    return values_of(view) if values is None else values


def owned_cells(message: Message, view: RaggedView, *, leaves: bool = False) -> torch.Tensor | None:
    """Cells that are end to end, in memory that may be kept; None if they are elsewhere."""
    if not view.is_end_to_end:
        return None
    memory: Any = view.memory
    data, shape, itemsize = array_bytes(memory), view.shape, view.dtype.itemsize
    if not len(data):  # rows without bytes may be many, and be chosen again
        check_extent(shape, itemsize, "WireBatch.rows(index)")
    copy = False if leaves else message.reading.copy
    return from_bytes(writable(data, copy, itemsize), view.dtype, shape)


def jagged_of_node(message: Message, node: Node, chosen: ChosenRows | None = None) -> torch.Tensor:
    """A JAGGED column, or its chosen rows, as a nested tensor."""
    numbers, dim = message.numbers, node.fields[2]
    row_splits = message.splits(numbers[node.number + GROUP], numbers[node.dims + dim - 1])
    values = tensor_of_node(message, node, chosen)
    if chosen is not None:
        row_splits = chosen.among(row_splits)[0]
    return nested_tensor(values, row_splits, dim)


def _whole_tensor(
    message: Message, node: Node, shape: tuple[int, ...], leaves: bool
) -> torch.Tensor:
    numbers, name = message.numbers, node.fields[0]
    dtype = torch_dtype(name)
    buffer, offset, stored = numbers[node.number : node.number + GROUP]
    elements = math.prod(shape)
    # `stored` is ignored where there are no elements.
    if stored != PLAIN and elements:
        place = CellPlace(buffer, offset, stored, elements, name)
        return from_bytes(message.elements(place, 0, elements), dtype, shape)
    known = NUMPY_BY_NAME.get(name)
    # Numpy's flag `aligned`, which is read below, is ten times as fast as `address`.
    alignment = node.itemsize if known is None else 1
    size = elements * node.itemsize
    if leaves:
        data = writable(message.read(buffer, offset, size), False, alignment)
    else:
        data = message.bytes_at(buffer, offset, size, alignment)
    if known is None or not elements:
        return from_bytes(data, dtype, shape)
    array: Any = np.ndarray(shape, known, data)
    return torch.from_numpy(array if array.flags.aligned else array.copy())
