"""`RaggedView`: the rows of a column, in a rectangle, a nested tensor or a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentError
from jagcodec.memory.tensor_bytes import (
    ByteArray,
    IntArray,
    array_bytes,
    contiguous_bits,
    plain_array,
    resolved,
)
from jagcodec.ragged.row_splits import RowSplits

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)  # which is made in half the time of a named tuple
class RaggedView:
    """N rows of a column in memory. Making one copies nothing."""

    # A tensor whose dims are `shape`; or contiguous CPU memory that holds such cells in row-major
    # order, an array of anything; or several buffers, each with some of the rows.
    memory: torch.Tensor | npt.NDArray[Any] | tuple[ByteArray, ...]
    dtype: torch.dtype  # of the cells
    shape: tuple[int, ...]  # (A..., M, B...): M cells along the ragged dim, in each of A runs
    ragged_dim: int  # of the column (N, A..., j, B...): dim ``ragged_dim - 1`` of `shape`
    # Where rows begin among the M cells: (N,) numbers, or a stride s, so that row i begins at
    # ``i * s``; None if the rows are end to end and fill M. In several buffers: (N,) bytes, as if
    # the buffers were end to end, and `ragged_dim` is 1.
    starts: IntArray | int | None
    row_splits: RowSplits
    # (N, K) if each row is K runs of cells that are apart: how long they are. `starts` are (N, K)
    # then, and `ragged_dim` is 1.
    runs: IntArray | None = None

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.memory.device if isinstance(self.memory, torch.Tensor) else _CPU

    @property
    def values_shape(self) -> tuple[int, ...]:
        """(A..., total, B...): of the rows, once they are end to end."""
        if self.starts is None:
            return self.shape
        dim = self.ragged_dim - 1
        return (*self.shape[:dim], self.row_splits.total, *self.shape[dim + 1 :])

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell (B...)."""
        return math.prod(self.shape[self.ragged_dim :]) * self.dtype.itemsize

    def row_starts(self) -> IntArray:
        """`starts` as (N,) numbers; (N, K) of rows in runs."""
        if self.starts is None:
            return self.row_splits.starts
        if isinstance(self.starts, int):
            return np.arange(self.row_splits.rows, dtype=np.int64) * self.starts
        return self.starts

    def choose(self, rows: slice | IntArray, row_splits: RowSplits) -> RaggedView:
        """Some of the rows, in any order, whose lengths are those of `row_splits`."""
        runs = None if self.runs is None else self.runs[rows]
        return replace(self, starts=self.row_starts()[rows], row_splits=row_splits, runs=runs)


class NestedParts(NamedTuple):
    """The parts of a nested tensor, unread."""

    values: torch.Tensor
    offsets: torch.Tensor  # (N + 1,), on the device of the values
    lengths: torch.Tensor | None  # (N,) if there are holes between the rows
    ragged_dim: int


def end_to_end(values: torch.Tensor, row_splits: RowSplits, ragged_dim: int = 1) -> RaggedView:
    """Rows that are end to end in a tensor, and fill it."""
    return RaggedView(values, values.dtype, tuple(values.shape), ragged_dim, None, row_splits)


def concat_views(views: Sequence[RaggedView]) -> RaggedView | None:
    """The rows of several views in all their memories; None if cells differ, or not on the host."""
    first = views[0]
    memories: list[ByteArray] = []
    starts, runs, end = [], [], 0
    most = max(1 if view.runs is None else view.runs.shape[1] for view in views)
    for view in views:
        memory, rows = view.memory, view.row_splits.rows
        alike = (view.dtype, view.shape[1:]) == (first.dtype, first.shape[1:])
        if isinstance(memory, torch.Tensor) or not alike or view.ragged_dim != 1:
            return None
        own = memory if isinstance(memory, tuple) else (array_bytes(memory),)
        unit = 1 if isinstance(memory, tuple) else view.cell_bytes
        lengths = view.row_splits.lengths[:, None] if view.runs is None else view.runs
        begins, held = np.zeros((2, rows, most), dtype=np.int64)
        begins[:, : lengths.shape[1]] = view.row_starts().reshape(lengths.shape) * unit + end
        held[:, : lengths.shape[1]] = lengths
        starts.append(begins)
        runs.append(held)
        memories += own
        end += sum(map(len, own))
    if not first.cell_bytes or sum(view.row_splits.total for view in views) >= 1 << 63:
        return None
    splits = RowSplits.from_lengths(np.concatenate([view.row_splits.lengths for view in views]))
    all_starts, all_runs = np.concatenate(starts), np.concatenate(runs)
    shape = (splits.total, *first.shape[1:])
    view = RaggedView(tuple(memories), first.dtype, shape, 1, all_starts, splits, all_runs)
    one_each = np.ascontiguousarray(all_starts[:, 0])
    return replace(view, starts=one_each, runs=None) if most == 1 else view


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
        return RaggedView(array, padded.dtype, shape, 1, width, row_splits)
    if not row_splits.total or not padded.numel():
        shape = (row_splits.total, *dims[2:])
        return RaggedView(padded.new_empty(shape), padded.dtype, shape, 1, None, row_splits)
    cells, stride = rows_in_place(padded)
    memory: Any = cells if cells.requires_grad else plain_array(cells)
    if memory is None:
        memory = cells
    return RaggedView(memory, padded.dtype, tuple(cells.shape), 1, stride, row_splits)


def full_rows(padded: torch.Tensor, row_splits: RowSplits) -> RaggedView:
    """A rectangle (N, S, ...) as N rows of S cells each, as `row_splits` has them too."""
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
