"""Masks: which cells of the rows of a rectangle are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import (
    unknown_name,
)
from jagcodec.columns.column import column_of
from jagcodec.columns.of_tensors import Dense, Jagged
from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.plain_types import check_plain
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView, end_to_end


class Mask(NamedTuple):
    """The valid cells of N rows: padded on both sides, or with holes."""

    valid: npt.NDArray[np.bool_]  # (N, S)
    row_splits: RowSplits  # how many each row has
    first: IntArray | None  # (N,) the first in each row; None if it is cell 0 in every row
    # (N, K) how long each of the K runs of a row is, if one has holes; `first` is (N, K) then.
    run_lengths: IntArray | None

    def rows(self, view: RaggedView) -> RaggedView:
        """The rows of the mask in a view whose rows begin at cell 0. Rows with holes are copied."""
        if self.first is None or view.is_end_to_end:  # no starts: there are no cells
            return view
        if self.run_lengths is None:
            return view.moved(view.row_starts() + self.first)
        in_runs = view.in_runs(view.row_starts()[:, None] + self.first, self.run_lengths)
        return end_to_end(values_of(in_runs), self.row_splits)


def valid_cells(mask: Any, fields: Mapping[str, Any], where: str) -> npt.NDArray[np.bool_]:
    """A mask (N, S), or the column of this name; one device sync, none for a CPU tensor."""
    path = f"{where}(mask)"
    if isinstance(mask, str):
        if mask not in fields:
            raise unknown_name(mask, fields, path)
        mask, path = fields[mask], f"{where}({mask!r})"
    expected = "expected an (N, S) mask of booleans, or of integers 0 and 1, found"
    remedy = "; pass mask != 0"
    holder = column_of(mask)
    if isinstance(mask, (torch.Tensor, np.ndarray)) and not isinstance(holder, Jagged):
        check_plain(mask, path)
    if isinstance(holder, Dense):
        try:
            mask = mask.detach().cpu().numpy()
        except (TypeError, RuntimeError):  # numpy does not have the dtype
            detail = f"{expected} {mask.dtype}{remedy}"
            raise ArgumentTypeError("bad_dtype", path, detail) from None
    if not isinstance(mask, np.ndarray):
        raise ArgumentTypeError("bad_type", path, f"{expected} {describe(mask)}")
    if mask.dtype.kind not in "biu":
        raise ArgumentTypeError("bad_dtype", path, f"{expected} {mask.dtype}{remedy}")
    if mask.ndim != 2:
        raise ArgumentError("bad_shape", path, f"{expected} shape {mask.shape}")
    valid: npt.NDArray[np.bool_] = mask != 0
    wrong = [] if mask.dtype.kind == "b" else np.argwhere(valid & (mask != 1)).tolist()
    if wrong:
        row, cell = wrong[0]
        raise ArgumentError("bad_option", f"{path}, row {row}", f"{expected} {mask[row, cell]}")
    return valid


def mask_of(valid: npt.NDArray[np.bool_]) -> Mask:
    """The mask of these valid cells, with the runs of each row."""
    rows, width = valid.shape
    # With a False cell before and after each row, runs begin and end in turn, each in one row.
    walled = np.zeros((rows, width + 2), dtype=np.bool_)
    walled[:, 1:-1] = valid
    edges = np.flatnonzero(walled[:, 1:] != walled[:, :-1])
    row, starts = np.divmod(edges[::2], width + 1)
    lengths = edges[1::2] - edges[::2]
    counts = np.bincount(row, minlength=rows)
    most = max(1, int(counts.max(initial=0)))
    of_row = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    first, runs = np.zeros((2, rows, most), dtype=np.int64)
    first[row, of_row], runs[row, of_row] = starts, lengths
    row_splits = RowSplits.from_lengths(runs.sum(axis=1))
    if most > 1:
        return Mask(valid, row_splits, first, runs)
    return Mask(valid, row_splits, first[:, 0] if first.any() else None, None)
