"""Row lengths that callers pass as tensors."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.plain_types import LENGTH_DTYPES, check_plain
from jagcodec.memory.tensor_bytes import plain_array
from jagcodec.rows.nested import is_jagged, view_of
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.varlen import is_packed


def lengths_in_tensor(lengths: torch.Tensor, path: str) -> npt.NDArray[Any]:
    """A tensor of (N,) integers as an array, aliased if it is on the host."""
    if lengths.layout is not torch.strided or lengths.is_nested:
        detail = f"expected (N,) lengths in a strided tensor, found {describe(lengths)}"
        raise ArgumentTypeError("bad_type", path, detail)
    integers = lengths.dtype in LENGTH_DTYPES
    found = plain_array(lengths) if integers else None
    if found is not None:
        return found
    check_plain(lengths, path)
    if not integers:
        detail = f"expected integer lengths, found {lengths.dtype}"
        raise ArgumentTypeError("bad_dtype", path, detail)
    array: npt.NDArray[Any] = lengths.detach().cpu().numpy()
    return array


def rows_of_jagged(lengths: Any, path: str, rows: int | None) -> RowSplits | None:
    """The row splits of a jagged tensor; None for anything else."""
    if is_packed(lengths):
        detail = "expected (N,) lengths, found PackedColumn; pass its .cu_seqlens.diff()"
        raise ArgumentTypeError("bad_type", path, detail)
    if not is_jagged(lengths):
        return None
    view = view_of(lengths, path)
    if view.ragged_dim != 1:
        raise ArgumentError("bad_shape", path, f"expected ragged dim 1, found {view.ragged_dim}")
    if rows is not None and view.row_splits.rows != rows:
        detail = f"expected {rows} rows, found {view.row_splits.rows}"
        raise ArgumentError("row_mismatch", path, detail)
    return view.row_splits
