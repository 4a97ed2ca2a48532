"""Rows where a mask is True: padded on both sides, or with holes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import unknown_name
from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView, end_to_end


class Mask(NamedTuple):
    """The valid cells of N rows of S cells."""

    valid: npt.NDArray[np.bool_]  # (N, S) where they are
    row_splits: RowSplits  # how many each row has
    first: IntArray | None  # (N,) the first in each row; None if it is cell 0 in every row
    # (N, K) how long each of the K runs is that a row consists of, if one has holes; `first` is
    # (N, K) then.
    runs: IntArray | None

    def rows(self, view: RaggedView) -> RaggedView:
        """The rows of the mask in a view whose rows begin at cell 0. Copies rows with holes."""
        if self.first is None or view.starts is None:  # None: it has no cells
            return view
        if self.runs is None:
            return replace(view, starts=view.row_starts() + self.first)
        starts = view.row_starts()[:, None] + self.first
        in_runs = replace(view, starts=starts, runs=self.runs)
        return end_to_end(values_of(in_runs), self.row_splits)


def read_mask(mask: Any, fields: Mapping[str, Any], where: str) -> Mask:
    """A mask (N, S), or the column of this name; one device sync, none for a CPU tensor."""
    path = f"{where}(mask)"
    if isinstance(mask, str):
        if mask not in fields:
            raise unknown_name(mask, fields, path)
        mask, path = fields[mask], f"{where}({mask!r})"
    expected = "expected an (N, S) mask of booleans, or of integers 0 and 1, found"
    if isinstance(mask, torch.Tensor) and mask.layout is torch.strided and not mask.is_nested:
        try:
            mask = mask.detach().cpu().numpy()
        except TypeError:  # numpy does not have the dtype
            raise ArgumentTypeError("bad_dtype", path, f"{expected} {mask.dtype}") from None
    if not isinstance(mask, np.ndarray):
        raise ArgumentTypeError("bad_type", path, f"{expected} {describe(mask)}")
    if mask.dtype.kind not in "biu":
        raise ArgumentTypeError("bad_dtype", path, f"{expected} {mask.dtype}; pass mask.bool()")
    if mask.ndim != 2:
        raise ArgumentError("bad_shape", path, f"{expected} shape {mask.shape}")
    valid: npt.NDArray[np.bool_] = mask != 0
    if mask.dtype.kind != "b":
        wrong = np.argwhere(valid & (mask != 1))
        if len(wrong):
            row, cell = wrong[0].tolist()
            found = mask[row, cell]
            raise ArgumentError("bad_option", f"{path}, row {row}", f"{expected} {found}")
    return _mask_of(valid)


def _mask_of(valid: npt.NDArray[np.bool_]) -> Mask:
    rows, width = valid.shape
    # Between walls of False runs begin and end in turn, each in one row.
    walled = np.zeros((rows, width + 2), dtype=np.bool_)
    walled[:, 1:-1] = valid
    edges = np.flatnonzero(walled[:, 1:] != walled[:, :-1])
    row, starts = np.divmod(edges[::2], width + 1)
    lengths = edges[1::2] - edges[::2]
    counts = np.bincount(row, minlength=rows)
    most = int(counts.max(initial=0))
    if most <= 1:
        first, totals = np.zeros((2, rows), dtype=np.int64)
        first[row], totals[row] = starts, lengths
        return Mask(valid, RowSplits.from_lengths(totals), first if first.any() else None, None)
    of_row = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    first, runs = np.zeros((2, rows, most), dtype=np.int64)
    first[row, of_row], runs[row, of_row] = starts, lengths
    return Mask(valid, RowSplits.from_lengths(runs.sum(axis=1)), first, runs)
