"""`read_lengths`, `read_rows`: the row lengths that callers pass, also as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.plain_types import LENGTH_DTYPES, check_plain
from jagcodec.memory.tensor_bytes import plain_array
from jagcodec.packing.lengths import length_array
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.varlen import is_packed

Lengths: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
"""What callers may pass as lengths."""


def read_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of a caller's (N,) lengths. One device sync, none for a CPU tensor."""
    if isinstance(lengths, torch.Tensor):
        lengths = _host_numbers(lengths, path)
    return RowSplits.from_lengths(length_array(lengths, path, rows=rows))


def _host_numbers(lengths: torch.Tensor, path: str) -> npt.NDArray[Any]:
    """A tensor of integers as an array, aliased if it is on the host."""
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


def read_rows(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of lengths, or of a jagged tensor, whose offsets object is kept."""
    if not is_jagged(lengths):
        if is_packed(lengths):
            detail = "expected (N,) lengths, found PackedColumn; pass its .cu_seqlens.diff()"
            raise ArgumentTypeError("bad_type", path, detail)
        return read_lengths(lengths, path, rows=rows)
    view = view_of(lengths, path)
    if view.ragged_dim != 1:
        raise ArgumentError("bad_shape", path, f"expected ragged dim 1, found {view.ragged_dim}")
    if rows is not None and view.row_splits.rows != rows:
        detail = f"expected {rows} rows, found {view.row_splits.rows}"
        raise ArgumentError("row_mismatch", path, detail)
    return view.row_splits
