"""Views of the rows of tensors: rectangles, slices of them, and the parts of nested tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.plain_types import LENGTH_DTYPES, check_plain
from jagcodec.memory.tensor_bytes import contiguous_bits, plain_array, resolved
from jagcodec.rows.nested import is_jagged, view_of
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.varlen import is_packed
from jagcodec.rows.views import RaggedView, end_to_end

_CPU = torch.device("cpu")


def device_of(view: RaggedView) -> torch.device:
    """Where the memory of a view is."""
    memory: Any = view.memory
    return _CPU if type(memory) is np.ndarray or not view.is_tensor else memory.device


def rows_of_rectangle(
    padded: torch.Tensor,
    row_splits: RowSplits,
    path: str,
    array: npt.NDArray[Any] | None = None,
) -> RaggedView:
    """The valid cells of a rectangle (N, S, ...), of which `array` may be the `plain_array`."""
    dims = padded.shape if array is None else array.shape
    width = dims[1]
    if row_splits.max > width:
        row = int(np.argmax(row_splits.lengths > width))
        detail = f"expected a length of at most {width} (the padded width), "
        detail += f"found {row_splits.lengths[row]}"
        raise ArgumentError("bad_length", f"{path}, row {row}", detail)
    if array is not None and array.flags.c_contiguous:
        shape = (dims[0] * width, *dims[2:])
        return RaggedView(array, padded.dtype, shape, 1, starts=width, row_splits=row_splits)
    if not row_splits.total or not padded.numel():
        shape = (row_splits.total, *dims[2:])
        return end_to_end(padded.new_empty(shape), row_splits)
    cells, stride = rows_in_place(padded)
    memory: Any = cells if cells.requires_grad else plain_array(cells)
    if memory is None:
        memory = cells
    shape = tuple(cells.shape)
    return RaggedView(memory, padded.dtype, shape, 1, starts=stride, row_splits=row_splits)


def full_rows(padded: torch.Tensor, row_splits: RowSplits) -> RaggedView:
    """A rectangle (N, S, ...) as N rows; `row_splits` must describe the same N rows of S cells."""
    cells = padded.contiguous() if padded.requires_grad else contiguous_bits(padded)
    rows, width = padded.shape[:2]
    return end_to_end(cells.view(rows * width, *padded.shape[2:]), row_splits)


def rows_in_place(padded: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A rectangle, or a slice of one, as (M, ...) cells in which row i begins at ``i * stride``."""
    padded = resolved(padded)
    inner = padded.shape[2:].numel()
    if not (padded[0].is_contiguous() and padded.stride(0) % inner == 0):
        padded = padded.contiguous() if padded.requires_grad else contiguous_bits(padded)
    stride = padded.stride(0) // inner
    cells = (padded.shape[0] - 1) * stride + padded.shape[1]
    flat = padded.as_strided((cells * inner,), (1,))
    return flat.view(cells, *padded.shape[2:]), stride


def lengths_in_tensor(lengths: torch.Tensor, path: str) -> npt.NDArray[Any]:
    """A tensor of (N,) integers as an array, aliased if it is on the host."""
    if lengths.layout is not torch.strided or lengths.is_nested:
        detail = f"expected (N,) lengths in a strided tensor, found {describe(lengths)}"
        raise ArgumentTypeError("bad_type", path, detail)
    integers = lengths.dtype in LENGTH_DTYPES
    array = plain_array(lengths) if integers else None
    if array is not None:
        return array
    check_plain(lengths, path)
    if not integers:
        detail = f"expected integer lengths, found {lengths.dtype}"
        raise ArgumentTypeError("bad_dtype", path, detail)
    copy: npt.NDArray[Any] = lengths.detach().cpu().numpy()
    return copy


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
