"""Warnings of likely mistakes."""

from __future__ import annotations

import sys
import warnings

from jagcodec.errors import JagcodecWarning


def _warn(path: str, detail: str) -> None:
    """Warn at the line outside the library that called into it; Python does so once per line."""
    # The text must not vary from batch to batch: Python counts another text as another warning.
    level, frame = 2, sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith("jagcodec."):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{path}: {detail}", JagcodecWarning, stacklevel=level)


def warn_of_rectangle(path: str) -> None:
    """Warn of a column that was named, and cannot be packed."""
    detail = (
        "stays rectangular although you named it as per-token, because its rows or its width do "
        f"not fit the lengths or the mask. {MISSING_CELL}"
    )
    _warn(path, detail)


FEW_CELLS = 2
"""A rectangle that lacks so many cells of the longest row, or fewer, is likely to be per-token."""

MISSING_CELL = "If it lacks the first token, pad it: torch.nn.functional.pad(x, (1, 0)) for (N, S)"
"""What to do with log-probabilities of all tokens but the first."""


def warn_of_missing_cells(path: str) -> None:
    """Warn of a column without a name that is almost as wide as those that are packed."""
    detail = (
        "stays rectangular, because it is a few cells narrower than the longest row or the mask: "
        f"a per-token column has a cell for each token. {MISSING_CELL}. "
        "If it is not per-token, name the columns that are in token_aligned_fields"
    )
    _warn(path, detail)


def warn_of_swapped_dims(path: str, name: str) -> None:
    """Warn of a column that is padded in one dim, and whose tokens are in the next one."""
    detail = (
        "is padded in dim 1, although the rows of another column are as long as its dim 2. "
        "Are its rows (k, n), such as position ids of several kinds? Then write them with their "
        f"ragged dim: encode_rows(..., ragged_dims={{{name}: 2}}). If they are not, name the "
        "column in keep_jagged, or leave it out of token_aligned_fields"
    )
    _warn(path, detail)


def warn_of_leftovers(path: str) -> None:
    """Warn of integers that are packed, and do not look padded."""
    detail = (
        "cells after rows are left out, and they do not look like padding: the first and the last "
        "of a row differ. Did you pass prompt or response lengths for a column of both? "
        "Is it padded on the left? pack_jagged_fields and encode_fields accept mask= for that, "
        "and with strict=True they name the row"
    )
    _warn(path, detail)


def warn_of_width(path: str) -> None:
    """Warn of lengths that pack no column, although one is wider than the longest row."""
    detail = (
        "lengths pack no column: without names only those as wide as the longest row are packed. "
        "Name the per-token columns in token_aligned_fields"
    )
    _warn(path, detail)


def warn_of_objects(path: str, name: str) -> None:
    """Warn of rows that are lists of equal arrays, which become Python objects."""
    detail = (
        "rows are lists of arrays of one shape, which become Python objects: slower to send and "
        f"larger than cells. If each array is a token, pass dtypes={{{name}: their dtype}}, or "
        f"stack the rows with np.stack. If they are objects, pass dtypes={{{name}: object}}"
    )
    _warn(path, detail)
