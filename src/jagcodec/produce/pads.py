"""Two checks of pads: whether cells that packing leaves out look like padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.plain_types import LENGTH_DTYPES
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import (
    as_words,
    number_array,
)
from jagcodec.produce.masks import Mask
from jagcodec.rows.row_splits import RowSplits

_MOST_ROWS_IN_A_LOOP = 16
"""For so many rows, a loop in Python is faster than numpy."""


def check_constant_pads(
    columns: Mapping[str, Any], row_splits: RowSplits, mask: Mask | None, where: str
) -> None:
    """Raise an error if each tensor (N, S, ...) of integers has cells outside its rows that differ.

    One column with equal cells is enough, and so are columns without integers. The rows are the
    cells of a `mask`, or else the first cells.
    """
    integers = {name: column for name, column in columns.items() if column.dtype in LENGTH_DTYPES}
    valid = np.arange(row_splits.max) < row_splits.lengths[:, None] if mask is None else mask.valid
    rows = [_row_of_other_pad(column, valid) for column in integers.values()]
    if rows and None not in rows:
        detail = (
            "expected one constant in all cells past row ends, in at least one column of integers, "
            "found others; did you pass prompt or response lengths for both?"
        )
        first = next(iter(integers))
        raise ArgumentError("bad_length", f"{where}({first!r}), row {rows[0]}", detail)


def _row_of_other_pad(column: torch.Tensor, valid: npt.NDArray[np.bool_]) -> int | None:
    """The first row with a pad that is not like the first pad of the column; None without one."""
    is_pad = np.ones(column.shape[:2], dtype=np.bool_)
    is_pad[:, : valid.shape[1]] = ~valid
    if not is_pad.any() or not column.numel():
        return None
    words = as_words(column).flatten(2)
    row, cell = divmod(int(is_pad.argmax()), is_pad.shape[1])
    differs = (words != words[row, cell]).any(2) & to_device(torch.from_numpy(is_pad), words.device)
    rows = np.flatnonzero(differs.any(1).cpu().numpy())
    return int(rows[0]) if len(rows) else None


def first_unpadded(columns: Mapping[str, Any], row_splits: RowSplits) -> str | None:
    """The first column of integers (N, S, ...) on the CPU; None if any such column looks padded.

    One that looks padded is enough: others, such as position ids, may go on past the ends of rows.
    A column is a tensor, or the array over its memory.
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
    if rows > _MOST_ROWS_IN_A_LOOP or array.ndim > 2:
        ends = array[np.arange(rows), np.minimum(lengths, last)]
        return bool((ends == array[:, last]).all())
    item, width = array.item, last + 1
    for row, length in enumerate(lengths.tolist()):  # faster than numpy for so few rows
        if length < last and item(row * width + length) != item(row * width + last):
            return False
    return True
