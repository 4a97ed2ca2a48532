"""Signs that a batch is not what its producer believes: warned of, or refused if strict."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, JagcodecWarning
from jagcodec.memory.tensor_bytes import as_words, plain_array
from jagcodec.ragged.row_splits import RowSplits


def warn(path: str, detail: str) -> None:
    """Warn at the line outside the library that called into it; Python does so once per line.

    The text must not vary from batch to batch, because Python takes another text for another
    warning.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{path}: {detail}", JagcodecWarning, stacklevel=level)


def _is_ours(module: Any) -> bool:
    return isinstance(module, str) and (module == "jagcodec" or module.startswith("jagcodec."))


# --- columns that were named, and stay as they are ---------------------------------------------


def stays_rectangular(
    shape: tuple[int, ...], row_splits: RowSplits | None, path: str, strict: bool
) -> None:
    """Warn of a per-token rectangle that cannot be packed, or refuse it.

    Raises:
        ArgumentError: With `strict`.
    """
    if strict:
        rows, longest = ("N", "the longest row") if row_splits is None else _bounds(row_splits)
        found = f"found shape {shape}" + ("" if row_splits else " without lengths")
        raise ArgumentError(
            "bad_shape",
            path,
            f"expected a per-token column ({rows}, {longest} or more, ...), {found}; leave it out "
            "of token_aligned_fields if it is none",
        )
    if row_splits is not None:
        warn(
            path,
            "stays rectangular although it was said to be per-token, because it has other rows "
            "than the lengths, or is narrower than the longest of them",
        )


def _bounds(row_splits: RowSplits) -> tuple[int, int]:
    return row_splits.rows, row_splits.max


_MULTIPLES = (8, 16, 32, 64, 128)


def is_rounded_up(width: int, longest: int) -> bool:
    """Whether a width is the longest row, rounded up as sequence parallelism and kernels want."""
    return width > longest > 0 and any(width == -(-longest // m) * m for m in _MULTIPLES)


def warn_of_width(path: str) -> None:
    """Warn that a guess by shape packed nothing, although a width looks like that of tokens."""
    warn(
        path,
        "not packed, because its width is not the longest row; but it is the longest row rounded "
        "up. If it holds one value per token, say so: token_aligned_fields, pack_per_token_field",
    )


# --- cells behind rows -------------------------------------------------------------------------


def differ_after_rows(array: npt.NDArray[Any], row_splits: RowSplits) -> bool:
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


def warn_of_pads(path: str) -> None:
    """Warn of cells behind rows that differ."""
    warn(
        path,
        "cells after rows are left out, and they do not look like padding: the first and the "
        "last of a row differ. Are these the lengths of prompts or of responses, for a column of "
        "both? strict=True names the row",
    )


def look_behind_rows(padded: torch.Tensor, row_splits: RowSplits, path: str, strict: bool) -> None:
    """What is to be done about the cells behind the rows of a rectangle that is packed.

    Raises:
        ArgumentError: With `strict`, as from `check_pads`.
    """
    if strict:
        check_pads(padded, row_splits, path)
        return
    array = plain_array(padded)
    if array is not None and array.dtype.kind in "iu" and differ_after_rows(array, row_splits):
        warn_of_pads(path)


def check_pads(padded: torch.Tensor, row_splits: RowSplits, path: str) -> None:
    """Refuse a rectangle whose cells behind rows are not all the same, bit for bit.

    Raises:
        ArgumentError: They are not; the first such row is named.
    """
    width = padded.shape[1]
    if row_splits.min >= width or not padded.numel():
        return
    words = as_words(padded).flatten(2)
    lengths = torch.from_numpy(row_splits.lengths).to(padded.device)
    is_pad = torch.arange(width, device=padded.device) >= lengths[:, None]
    pad_row = int(np.argmax(row_splits.lengths < width))
    pad = words[pad_row, int(row_splits.lengths[pad_row])]
    differs = ((words != pad).any(2) & is_pad).any(1)
    if not differs.any():
        return
    row = int(differs.to(torch.uint8).argmax())
    raise ArgumentError(
        "bad_length",
        f"{path}, row {row}",
        f"expected one constant in all cells behind the rows, found others behind cell "
        f"{row_splits.lengths[row]} of {width}; are these the lengths of prompts or of responses, "
        "for a column of both?",
    )
