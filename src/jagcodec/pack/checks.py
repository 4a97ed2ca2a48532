"""Likely mistakes of producers: a warning, or an error with `strict=True`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, JagcodecWarning
from jagcodec.memory.tensor_bytes import as_words, to_device
from jagcodec.ragged.row_splits import RowSplits


def warn(path: str, detail: str) -> None:
    """Warn at the line outside the library that called into it; Python does so once per line.

    The text must not vary from batch to batch, because Python counts another text as another
    warning.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{path}: {detail}", JagcodecWarning, stacklevel=level)


def _is_ours(module: Any) -> bool:
    return isinstance(module, str) and (module == "jagcodec" or module.startswith("jagcodec."))


def warn_of_rectangle(path: str) -> None:
    """Warn of a column that was named, and cannot be packed."""
    warn(
        path,
        "stays rectangular although you named it as per-token, because its rows or its width do "
        "not fit the lengths or the mask",
    )


def refuse_rectangle(
    shape: tuple[int, ...], expected: tuple[Any, Any] | None, path: str
) -> ArgumentError:
    """The error for a column that was named, and is not (rows, width, ...) as `expected`."""
    if expected is None:
        return ArgumentError(
            "bad_option", path, "expected lengths or a mask to pack it by, found neither"
        )
    detail = (
        f"expected a per-token column ({expected[0]}, {expected[1]}, ...), found shape {shape}; if "
        "it does not hold one value per token, leave it out of token_aligned_fields"
    )
    return ArgumentError("bad_shape", path, detail)


def look_after_rows(array: npt.NDArray[Any] | None, row_splits: RowSplits, path: str) -> bool:
    """Warn if a rectangle that is packed does not look padded.

    Returns whether it says so, as only integers on the CPU do: its `plain_array` holds some.
    """
    if array is None or array.dtype.kind not in "iu":
        return False
    if _differ_after_rows(array, row_splits):
        warn(
            path,
            "cells after rows are left out, and they do not look like padding: the first and the "
            "last of a row differ. Did you pass prompt or response lengths for a column of both? "
            "strict=True names the row",
        )
    return True


def _differ_after_rows(array: npt.NDArray[Any], row_splits: RowSplits) -> bool:
    """Whether the first cell after a row of an array (N, S, ...) and the last of its width differ.

    No other cells are read.
    """
    rows, width = row_splits.rows, array.shape[1]
    last = width - 1
    if row_splits.min >= last or not array.size:
        return False
    if rows <= _FEW_ROWS and array.ndim == 2:  # for which numpy would take longer
        item = array.item
        for i, length in enumerate(row_splits.lengths.tolist()):
            if length < last and item(i * width + length) != item(i * width + last):
                return True
        return False
    after = np.minimum(row_splits.lengths, last)
    return bool((array[np.arange(rows), after] != array[:, last]).any())


_FEW_ROWS = 16


def check_pads(columns: list[tuple[str, torch.Tensor]], valid: npt.NDArray[np.bool_]) -> None:
    """Refuse a batch if no column has the same bits in all cells that are not valid.

    Args:
        columns: Path and rectangle (N, S, ...) of each per-token column of integers.
        valid: (N, S) or narrower: which cells are packed; further cells are not.

    Raises:
        ArgumentError: There are columns, and in each of them such cells differ. It names the first
            column, and its first row with another cell.
    """
    uneven = [(path, row) for path, column in columns for row in [_uneven_row(column, valid)]]
    if uneven and all(row is not None for _, row in uneven):
        path, row = uneven[0]
        detail = (
            "expected one constant in all cells past row ends, in at least one column of "
            "integers, found others; did you pass prompt or response lengths for a column of both?"
        )
        raise ArgumentError("bad_length", f"{path}, row {row}", detail)


def _uneven_row(column: torch.Tensor, valid: npt.NDArray[np.bool_]) -> int | None:
    """The first row with a cell that is not valid, and not like the first such cell."""
    is_pad = np.ones(column.shape[:2], dtype=np.bool_)
    is_pad[:, : valid.shape[1]] = ~valid
    if not is_pad.any() or not column.numel():
        return None
    words = as_words(column).flatten(2)
    row, cell = divmod(int(is_pad.argmax()), is_pad.shape[1])
    differs = (words != words[row, cell]).any(2) & to_device(torch.from_numpy(is_pad), words.device)
    rows = np.flatnonzero(differs.any(1).cpu().numpy())
    return int(rows[0]) if len(rows) else None
