"""`first_unpadded`: whether columns look padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec.memory.plain_types import LENGTH_DTYPES
from jagcodec.memory.tensor_bytes import number_array
from jagcodec.rows.row_splits import RowSplits

_FEW_ROWS = 16


def first_unpadded(columns: Mapping[str, Any], row_splits: RowSplits) -> str | None:
    """The first column of integers (N, S, ...) on the CPU, if not one of them looks padded.

    One is enough: others, such as position ids, may go on past the ends of rows.
    """
    first = None
    for name, column in columns.items():
        array = column
        if type(column) is not np.ndarray:
            if not column.is_cpu or column.dtype not in LENGTH_DTYPES:
                continue
            array = number_array(column)
        if array.dtype.kind in "iu":
            if _is_padded(array, row_splits):
                return None
            first = name if first is None else first
    return first


def _is_padded(array: npt.NDArray[Any], row_splits: RowSplits) -> bool:
    """Whether the first cell after each row is also the last cell of its rectangle's row."""
    lengths, rows, last = row_splits.lengths, row_splits.rows, array.shape[1] - 1
    if row_splits.min >= last or not array.size:
        return True
    if rows > _FEW_ROWS or array.ndim > 2:
        ends = array[np.arange(rows), np.minimum(lengths, last)]
        return bool((ends == array[:, last]).all())
    item, width = array.item, last + 1
    for row, length in enumerate(lengths.tolist()):  # faster than numpy for so few rows
        if length < last and item(row * width + length) != item(row * width + last):
            return False
    return True
