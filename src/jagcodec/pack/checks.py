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


def _warn(path: str, detail: str) -> None:
    """Warn at the line outside the library that called into it; Python does so once per line.

    The text must not vary from batch to batch, because Python counts another text as another
    warning.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(
        "jagcodec."
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{path}: {detail}", JagcodecWarning, stacklevel=level)


def warn_of_rectangle(path: str) -> None:
    """Warn of a column that was named, and cannot be packed."""
    detail = "stays rectangular although you named it as per-token, because its rows or its width "
    _warn(path, detail + "do not fit the lengths or the mask")


def refused_rectangle(
    shape: tuple[int, ...], expected: tuple[Any, Any] | None, path: str
) -> ArgumentError:
    """The error for a column that was named, and is not (rows, width, ...) as `expected`."""
    if expected is None:
        detail = "expected lengths or a mask to pack it by, found neither"
        return ArgumentError("bad_option", path, detail)
    detail = f"expected a per-token column ({expected[0]}, {expected[1]}, ...), found shape {shape}"
    detail += "; if it does not hold one value per token, leave it out of token_aligned_fields"
    return ArgumentError("bad_shape", path, detail)


def warn_of_leftovers(array: npt.NDArray[Any], row_splits: RowSplits, path: str) -> None:
    """Warn if integers (N, S, ...) that are packed do not look padded; reads two cells per row."""
    rows, last = row_splits.rows, array.shape[1] - 1
    if row_splits.min >= last or not array.size:
        return
    if rows <= _FEW_ROWS and array.ndim == 2:  # for which numpy would take longer
        item, width = array.item, last + 1
        differ = any(
            length < last and item(i * width + length) != item(i * width + last)
            for i, length in enumerate(row_splits.lengths.tolist())
        )
    else:
        after = np.minimum(row_splits.lengths, last)
        differ = bool((array[np.arange(rows), after] != array[:, last]).any())
    if differ:
        detail = "cells after rows are left out, and they do not look like padding: the first and "
        detail += "the last of a row differ. Did you pass prompt or response lengths for a column "
        _warn(path, detail + "of both? strict=True names the row")


_FEW_ROWS = 16


def check_pads(columns: list[tuple[str, torch.Tensor]], valid: npt.NDArray[np.bool_]) -> None:
    """Refuse integers (N, S, ...) if in each column the cells that are not `valid` differ.

    `valid` may be narrower than the columns; further cells are not packed. The error names the
    first column, and its first row with another cell.
    """
    rows = [_uneven_row(column, valid) for _, column in columns]
    if None not in rows:
        detail = "expected one constant in all cells past row ends, in at least one column of "
        detail += "integers, found others; did you pass prompt or response lengths for a column "
        raise ArgumentError("bad_length", f"{columns[0][0]}, row {rows[0]}", detail + "of both?")


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
