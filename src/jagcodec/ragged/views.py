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
from jagcodec.memory import INT64_MAX
from jagcodec.memory.arrays import ByteArray, IntArray, array_bytes
from jagcodec.memory.tensor_bytes import as_bytes, contiguous_bits, plain_array, resolved
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.rowcopy.tasks import Copy, Starts

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)  # is made in half the time of a named tuple
class RaggedView:
    """N rows of a column in memory. Making one copies nothing.

    Rows are in one of these forms, each of which has a constructor:

    | rows are | `starts` | `memory` | made by |
    |---|---|---|---|
    | end to end, and fill the M cells | None | one | `end_to_end` |
    | in a rectangle | s: row i starts at cell ``i * s`` | one | `rows_of_rectangle` |
    | anywhere, in any order | (N,) cells | one | `moved`, `choose` |
    | anywhere in buffers | (N,) bytes, as if these were end to end | several | `in_buffers` |
    | K runs each, `run_lengths` long | (N, K), of cells or bytes | one or several | `in_runs` |

    In the last two, `ragged_dim` is 1.
    """

    # A tensor whose dims are `shape`; or contiguous CPU memory that holds such cells in row-major
    # order, an array of any dtype; or several buffers of bytes, each with some of the rows.
    memory: torch.Tensor | npt.NDArray[Any] | tuple[ByteArray, ...]
    dtype: torch.dtype  # of the cells
    shape: tuple[int, ...]  # (A..., M, B...): M cells along the ragged dim, A times
    ragged_dim: int  # of the column (N, A..., j, B...): dim ``ragged_dim - 1`` of `shape`
    starts: IntArray | int | None
    row_splits: RowSplits
    run_lengths: IntArray | None = None

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.memory.device if isinstance(self.memory, torch.Tensor) else _CPU

    @property
    def memories(self) -> tuple[Any, ...]:
        """`memory` as a tuple of its parts."""
        return self.memory if isinstance(self.memory, tuple) else (self.memory,)

    @property
    def is_end_to_end(self) -> bool:
        """Whether the rows fill the memory, one after the other."""
        return self.starts is None

    @property
    def is_tensor(self) -> bool:
        """Whether the memory is a tensor, and not an array or buffers on the host."""
        return isinstance(self.memory, torch.Tensor)

    @property
    def is_array(self) -> bool:
        """Whether the memory is one array."""
        return type(self.memory) is np.ndarray

    @property
    def uses_row_kernel(self) -> bool:
        """Whether the row kernel copies rows. Torch does on devices, and where autograd follows."""
        memory = self.memory
        return not isinstance(memory, torch.Tensor) or (memory.is_cpu and not memory.requires_grad)

    @property
    def unit_bytes(self) -> int:
        """Bytes of the unit of `starts`: a cell in one memory, a byte in several."""
        return 1 if isinstance(self.memory, tuple) else self.cell_bytes

    @property
    def values_shape(self) -> tuple[int, ...]:
        """(A..., total, B...): the shape of the values once the rows are end to end."""
        if self.starts is None:
            return self.shape
        dim = self.ragged_dim - 1
        return (*self.shape[:dim], self.row_splits.total, *self.shape[dim + 1 :])

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell (B...)."""
        return math.prod(self.shape[self.ragged_dim :]) * self.dtype.itemsize

    def row_starts(self) -> IntArray:
        """`starts` as (N,) numbers; (N, K) if rows are in runs."""
        if self.starts is None:
            return self.row_splits.starts
        if isinstance(self.starts, int):
            return np.arange(self.row_splits.rows, dtype=np.int64) * self.starts
        return self.starts

    def moved(self, starts: IntArray, row_splits: RowSplits | None = None) -> RaggedView:
        """A view of rows at other places of the same memory."""
        return replace(self, starts=starts, row_splits=row_splits or self.row_splits)

    def in_runs(self, starts: IntArray, run_lengths: IntArray) -> RaggedView:
        """A view of rows of K runs each in the same memory; both arrays are (N, K)."""
        return replace(self, starts=starts, run_lengths=run_lengths)

    def row_runs(self, *, by_row: bool) -> tuple[Starts | None, IntArray]:
        """Where runs of cells begin, and their lengths; `by_row`, all runs of row 0 come first."""
        if self.run_lengths is not None:
            return self.row_starts().reshape(-1), self.run_lengths.reshape(-1)
        lengths = self.row_splits.lengths
        if self.ragged_dim == 1:
            return self.starts, lengths
        outer = math.prod(self.shape[: self.ragged_dim - 1])
        starts = np.arange(outer)[:, None] * self.shape[self.ragged_dim - 1] + self.row_starts()
        if by_row:
            return starts.T.reshape(-1), np.repeat(lengths, outer)
        return starts.reshape(-1), np.tile(lengths, outer)

    def host_bytes(self) -> tuple[ByteArray, ...]:
        """The memory as buffers of bytes on the host; a contiguous one is aliased."""
        memory = self.memory
        if isinstance(memory, tuple):
            return memory
        return (as_bytes(memory) if isinstance(memory, torch.Tensor) else array_bytes(memory),)

    def source(self) -> Any:
        """The memory as the row kernel reads it: an array, or several buffers of bytes."""
        memory = self.memory
        return as_bytes(memory) if isinstance(memory, torch.Tensor) else memory

    def kernel_starts(self) -> Starts:
        """`starts` as the row kernel takes them: a stride, or (N,) numbers."""
        return self.row_splits.starts if self.starts is None else self.starts

    def followed(self, is_wanted: bool) -> RaggedView:
        """The view itself if gradients are wanted; else of memory that autograd does not follow."""
        memory = self.memory
        if is_wanted or not isinstance(memory, torch.Tensor) or not memory.requires_grad:
            return self
        return replace(self, memory=memory.detach())

    def copy_task(self, out: ByteArray) -> Copy:
        """The task that copies the rows end to end into `out`, which just fits; on the CPU."""
        memory, splits = self.memory, self.row_splits
        in_one_run = self.ragged_dim == 1 and self.run_lengths is None
        if type(memory) is np.ndarray and in_one_run:  # as most are
            cell_bytes = len(out) // (splits.total or 1)
            return Copy(out, memory, None, self.starts, splits.lengths, cell_bytes)
        return Copy(out, self.source(), None, *self.row_runs(by_row=False), self.cell_bytes)

    def part(self, first: int, row_splits: RowSplits) -> RaggedView:
        """Rows that are end to end from a cell on, of rows that are; `ragged_dim` is 1."""
        memory: Any = self.memory
        total, inner = row_splits.total, self.shape[1:]
        if type(memory) is np.ndarray:
            cell = math.prod(inner) * self.dtype.itemsize
            if memory.itemsize > 1 or memory.ndim > 1:
                memory = array_bytes(memory)
            memory = memory[first * cell : (first + total) * cell]
        else:
            memory = memory[first : first + total]
        return RaggedView(memory, self.dtype, (total, *inner), 1, None, row_splits)

    def choose(self, rows: slice | IntArray, row_splits: RowSplits) -> RaggedView:
        """A view of some of the rows, in any order; `row_splits` has their lengths."""
        lengths = None if self.run_lengths is None else self.run_lengths[rows]
        starts = self.row_starts()[rows]
        return replace(self, starts=starts, row_splits=row_splits, run_lengths=lengths)


class NestedParts(NamedTuple):
    """The parts of a nested tensor, unread."""

    values: torch.Tensor
    offsets: torch.Tensor  # (N + 1,), on the device of the values
    lengths: torch.Tensor | None  # (N,) if there are holes between the rows
    ragged_dim: int


def end_to_end(values: torch.Tensor, row_splits: RowSplits, ragged_dim: int = 1) -> RaggedView:
    """Rows that are end to end in a tensor, and fill it."""
    return RaggedView(values, values.dtype, tuple(values.shape), ragged_dim, None, row_splits)


def in_buffers(
    buffers: Sequence[ByteArray],
    dtype: torch.dtype,
    inner: Sequence[int],
    starts: IntArray,
    row_splits: RowSplits,
    run_lengths: IntArray | None = None,
) -> RaggedView:
    """Rows of cells of shape `inner` in several buffers of bytes; `starts` count bytes."""
    shape = (row_splits.total, *inner)
    return RaggedView(tuple(buffers), dtype, shape, 1, starts, row_splits, run_lengths)


def concat_views(views: Sequence[RaggedView]) -> RaggedView | None:
    """The rows of several views as one, in place.

    None if a view cannot be joined so: its memory is a tensor, its ragged dim is not 1, its cells
    differ from those of the first view in dtype or shape, or have no bytes, or all views together
    have more than 2**63 - 1 cells.
    """
    first = views[0]
    if not all(_may_follow(view, first) for view in views) or not first.cell_bytes:
        return None
    if sum(view.row_splits.total for view in views) > INT64_MAX:
        return None
    buffers: list[ByteArray] = []
    starts, run_lengths, end = [], [], 0
    most = max(1 if view.run_lengths is None else view.run_lengths.shape[1] for view in views)
    for view in views:
        memory: Any = view.memory
        lengths = view.run_lengths
        if lengths is None:
            lengths = view.row_splits.lengths[:, None]
        unit = view.unit_bytes
        begins, sizes = np.zeros((2, view.row_splits.rows, most), dtype=np.int64)
        begins[:, : lengths.shape[1]] = view.row_starts().reshape(lengths.shape) * unit + end
        sizes[:, : lengths.shape[1]] = lengths
        starts.append(begins)
        run_lengths.append(sizes)
        count = len(buffers)
        buffers += memory if isinstance(memory, tuple) else (array_bytes(memory),)
        end += sum(map(len, buffers[count:]))
    splits = RowSplits.from_lengths(np.concatenate([view.row_splits.lengths for view in views]))
    inner, all_starts = first.shape[1:], np.concatenate(starts)
    if most == 1:
        return in_buffers(
            buffers, first.dtype, inner, np.ascontiguousarray(all_starts[:, 0]), splits
        )
    all_lengths = np.concatenate(run_lengths)
    return in_buffers(buffers, first.dtype, inner, all_starts, splits, all_lengths)


def _may_follow(view: RaggedView, first: RaggedView) -> bool:
    """Whether the rows of one view can follow those of another in a joined view."""
    same = (view.dtype, view.shape[1:]) == (first.dtype, first.shape[1:])
    return same and view.ragged_dim == 1 and not view.is_tensor


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
