"""What ``batch[name]`` returns where torch is not installed: arrays in place of tensors.

`columns.tensor_columns` has the same functions.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from jagcodec.rows.column_arrays import ColumnArrays, arrays_of_view
from jagcodec.rows.copy_bytes import array_of_view
from jagcodec.rows.views import RaggedView


def user_value_of_view(view: RaggedView) -> ColumnArrays:
    """The rows of a view as an array and their row splits, in memory that may be written to."""
    return arrays_of_view(view)


def user_value_of_rectangle(view: RaggedView) -> npt.NDArray[Any]:
    """Rows of one cell each as an array."""
    return array_of_view(view)


def user_value_of_numbers(array: npt.NDArray[Any], path: str) -> npt.NDArray[Any]:
    """An array of numbers, unchanged."""
    return array
