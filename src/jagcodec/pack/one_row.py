"""One row to a message, as producers send each when it is finished: at the price of its bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import plain_array
from jagcodec.pack.row_columns import ANYTHING, RowColumns
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import documents
from jagcodec.wire.dtypes import NUMPY_NAMES
from jagcodec.wire.lowered import InOrder
from jagcodec.wire.spec import Code

# Python's numbers as cells: the dtypes that they have where nobody says another.
_NUMBERS: dict[type, tuple[struct.Struct, tuple[Any, ...]]] = {
    bool: (struct.Struct("<?"), (Code.TENSOR, "bool", 1)),
    int: (struct.Struct("<q"), (Code.TENSOR, "int64", 1)),
    float: (struct.Struct("<f"), (Code.TENSOR, "float32", 1)),
}


def ordered_columns(
    row: Mapping[str, Any], where: str
) -> tuple[tuple[Any, ...], list[InOrder]] | None:
    """The schema and the columns of a message of one row; None where they are not that simple.

    Args:
        row: Name to a number, a text, an array, a tensor or a list of numbers.
        where: What to name in an error.

    Raises:
        ArgumentError: A number in a list does not fit its cells.
        ArgumentTypeError: Items of a list are of several types.
    """
    columns: list[InOrder] = []
    nodes: list[tuple[Any, ...]] = []
    for name, value in row.items():
        kind = type(value)
        number = _NUMBERS.get(kind)
        if number is not None:
            pack, node = number
            try:
                columns.append((memoryview(pack.pack(value)), None, (1,)))
            except (struct.error, OverflowError):
                return None  # to be refused
            nodes.append(node)
            continue
        if kind is str:
            packed = memoryview(documents.packer().pack(value))
            columns.append((packed, (0, len(packed)), (len(packed),)))
            nodes.append((Code.NON_TENSOR_ROWS,))
            continue
        if kind is list or kind is tuple:
            made = RowColumns(where, False).column(name, (value,), ANYTHING)
            value = made.memory if type(made) is RaggedView else None
        elif kind is torch.Tensor:
            value = plain_array(value)
        if type(value) is not np.ndarray:
            return None
        dtype, shape = NUMPY_NAMES.get(value.dtype), value.shape
        if dtype is None or not shape or not value.flags.c_contiguous:
            return None
        columns.append((value, (0, shape[0]), shape))
        nodes.append((Code.JAGGED, dtype, len(shape), 1))
    return (Code.TENSORDICT, 1, tuple(row), *nodes), columns
