"""`read_mask`: which cells of the rows of a rectangle are valid, and in which runs they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import unknown_name
from jagcodec.columns.held import column_of
from jagcodec.columns.tensor_columns import Dense, Jagged
from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.plain_types import check_plain
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView, end_to_end


class Mask(NamedTuple):
    """The valid cells of N rows. Cells before them, after them and between them may be invalid.

    A row without holes is one run of valid cells. K is the number of runs in the row that has most.
    """

    valid: npt.NDArray[np.bool_]  # (N, S)
    row_splits: RowSplits  # of the valid cells
    # (N,) the first cell of each row; (N, K) of each run if a row has holes; None if all are 0.
    first_cells: IntArray | None
    run_lengths: IntArray | None  # (N, K), 0 for runs that a row lacks; None if no row has holes

    def rows_in(self, view: RaggedView) -> RaggedView:
        """The valid cells of a view whose rows begin at cell 0. Rows with holes are copied."""
        if self.first_cells is None or view.is_end_to_end:  # such a view has no cells here
            return view
        if self.run_lengths is None:
            return view.at_starts(view.row_starts() + self.first_cells)
        in_runs = view.in_runs(view.row_starts()[:, None] + self.first_cells, self.run_lengths)
        return end_to_end(values_of(in_runs), self.row_splits)


def read_mask(mask: Any, fields: Mapping[str, Any], where: str) -> Mask:
    """The mask that a caller passes: (N, S) cells, or the name of the column that has them.

    It waits once for the device of a tensor, and not at all for one on the CPU.
    """
    valid = _valid_cells(mask, fields, where)
    rows, width = valid.shape
    # With an invalid cell before and after each row, runs begin and end in turn, each in one row.
    walled = np.zeros((rows, width + 2), dtype=np.bool_)
    walled[:, 1:-1] = valid
    edges = np.flatnonzero(walled[:, 1:] != walled[:, :-1])
    row_of_run, starts = np.divmod(edges[::2], width + 1)
    counts = np.bincount(row_of_run, minlength=rows)
    most = max(1, int(counts.max(initial=0)))
    run_in_row = np.arange(len(starts)) - (np.cumsum(counts) - counts)[row_of_run]
    first_cells, run_lengths = np.zeros((2, rows, most), dtype=np.int64)
    first_cells[row_of_run, run_in_row] = starts
    run_lengths[row_of_run, run_in_row] = edges[1::2] - edges[::2]
    row_splits = RowSplits.from_lengths(run_lengths.sum(axis=1))
    if most > 1:
        return Mask(valid, row_splits, first_cells, run_lengths)
    return Mask(valid, row_splits, first_cells[:, 0] if first_cells.any() else None, None)


def _valid_cells(mask: Any, fields: Mapping[str, Any], where: str) -> npt.NDArray[np.bool_]:
    """(N, S): whether each cell is valid; an error for anything but booleans, or 0 and 1."""
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
