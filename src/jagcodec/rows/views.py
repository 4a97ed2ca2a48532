"""`RaggedView`: the rows of a column, in a rectangle, a nested tensor or a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jagcodec.kernels.tasks import Copy, Pad, Starts
from jagcodec.memory import INT64_MAX
from jagcodec.memory.arrays import ByteArray, IntArray, array_bytes
from jagcodec.rows.row_splits import RowSplits

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)  # made in half the time that a named tuple takes
class RaggedView:
    """N rows of a column in memory. Making one copies nothing.

    Rows are in one of these forms, each of which has a constructor:

    | rows are | `starts` | `memory` | made by |
    |---|---|---|---|
    | end to end, and fill the M cells | None | one | `end_to_end` |
    | in a rectangle | s: row i starts at cell ``i * s`` | one | `rows_of_rectangle` |
    | anywhere, in any order | (N,) cells | one | `at_starts` |
    | anywhere in buffers | (N,) bytes, as if these were end to end | several | `in_buffers` |
    | K runs each, `run_lengths` long | (N, K), of cells or bytes | one or several | `in_runs` |

    In the last two, `ragged_dim` is 1. `choose` and `choose_at` make a view of some of the rows;
    `choose_at` is the faster one, for callers that know where rows end to end begin.

    The memory is read in one of these ways:

    | attribute | returns | for |
    |---|---|---|
    | `memory` | one tensor, one array, or several buffers | code that knows the form |
    | `memories` | a tuple of its parts, tensors included | checks of which memory is used |
    | `kernel_source` | an array or several buffers, without torch | tasks of the row kernel |
    | `host_buffers` | several buffers, also of one memory | code that joins buffers of many views |
    """

    # A tensor whose dims are `shape`; or contiguous CPU memory that holds such cells in row-major
    # order, an array of any dtype; or several buffers of bytes, each with some of the rows.
    memory: torch.Tensor | npt.NDArray[Any] | tuple[ByteArray, ...]
    dtype: Any  # of the cells: torch's, or a name with an `itemsize` if no reader needs torch's
    shape: tuple[int, ...]  # (A..., M, B...): M cells along the ragged dim, A times
    ragged_dim: int  # of the column (N, A..., j, B...): dim ``ragged_dim - 1`` of `shape`
    starts: IntArray | int | None
    row_splits: RowSplits
    run_lengths: IntArray | None = None

    @property
    def memories(self) -> tuple[Any, ...]:
        """`memory` as a tuple of its parts."""
        return self.memory if isinstance(self.memory, tuple) else (self.memory,)

    @property
    def is_end_to_end(self) -> bool:
        """Whether the rows fill the memory, one after the other."""
        return self.starts is None

    def to_write(self) -> tuple[Any, tuple[int, ...]]:
        """What a writer copies, and its dims: the memory if the rows fill it, else the view."""
        return (self.memory, self.shape) if self.starts is None else (self, self.values_shape)

    @property
    def is_tensor(self) -> bool:
        """Whether the memory is a tensor, and not an array or buffers on the host."""
        return not isinstance(self.memory, (np.ndarray, tuple))

    @property
    def is_array(self) -> bool:
        """Whether the memory is one array."""
        return type(self.memory) is np.ndarray

    @property
    def uses_row_kernel(self) -> bool:
        """Whether the row kernel copies the rows; torch does so on devices, and for autograd."""
        memory: Any = self.memory
        if type(memory) is np.ndarray or not self.is_tensor:
            return True
        return bool(memory.is_cpu and not memory.requires_grad)

    @property
    def device_name(self) -> str:
        """Where the memory is."""
        memory: Any = self.memory
        return str(memory.device) if self.is_tensor else "cpu"

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
        return math.prod(self.shape[self.ragged_dim :]) * int(self.dtype.itemsize)

    def row_starts(self) -> IntArray:
        """`starts` as (N,) numbers; (N, K) if rows are in runs."""
        if self.starts is None:
            return self.row_splits.starts
        if isinstance(self.starts, int):
            return np.arange(self.row_splits.rows, dtype=np.int64) * self.starts
        return self.starts

    def at_starts(self, starts: IntArray, row_splits: RowSplits | None = None) -> RaggedView:
        """A view of rows at other places of the same memory."""
        return replace(self, starts=starts, row_splits=row_splits or self.row_splits)

    def in_runs(self, starts: IntArray, run_lengths: IntArray) -> RaggedView:
        """A view of rows of K runs each in the same memory; both arrays are (N, K)."""
        return replace(self, starts=starts, run_lengths=run_lengths)

    def runs_by_row(self) -> tuple[Starts | None, IntArray]:
        """Where runs of cells begin, and their lengths: all runs of row 0 come first."""
        if self.run_lengths is not None or self.ragged_dim == 1:
            return self.runs_to_copy()  # both orders are the same
        starts = self._outer_starts(self.row_starts())
        return starts.T.reshape(-1), np.repeat(self.row_splits.lengths, len(starts))

    def runs_to_copy(self) -> tuple[Starts | None, IntArray]:
        """Where runs of cells begin, and their lengths, in the order of values end to end.

        Some empty runs are left out.
        """
        if self.run_lengths is not None:
            return self.row_starts().reshape(-1), self.run_lengths.reshape(-1)
        lengths = self.row_splits.lengths
        if self.ragged_dim == 1:
            return self.starts, lengths
        # Each row has a run for each index of the dims before its ragged one. Runs with cells take
        # memory in proportion to these; those of empty rows would be without bound.
        filled = lengths > 0
        starts = self._outer_starts(self.row_starts()[filled])
        return starts.reshape(-1), np.tile(lengths[filled], len(starts))

    def _outer_starts(self, row_starts: IntArray) -> IntArray:
        """(A, rows): where each run of these rows begins, one for each index of the dims A."""
        outer = math.prod(self.shape[: self.ragged_dim - 1])
        starts: IntArray = np.arange(outer)[:, None] * self.shape[self.ragged_dim - 1] + row_starts
        return starts

    def host_buffers(self) -> tuple[ByteArray, ...]:
        """The memory as buffers of bytes on the host; a contiguous one is aliased."""
        memory: Any = self.kernel_source()
        return memory if isinstance(memory, tuple) else (array_bytes(memory),)

    def kernel_source(self) -> Any:
        """The memory as the row kernel reads it: an array, or several buffers of bytes."""
        memory: Any = self.memory
        if not self.is_tensor:
            return memory
        from jagcodec.memory.tensor_bytes import as_bytes  # where there is a tensor, torch is here

        return as_bytes(memory)

    def with_grad(self, is_enabled: bool) -> RaggedView:
        """The view itself if gradients are enabled; otherwise one that autograd does not follow."""
        memory: Any = self.memory
        if is_enabled or not self.is_tensor or not memory.requires_grad:
            return self
        return replace(self, memory=memory.detach())

    def copy_task(self, out: ByteArray) -> Copy:
        """The task that copies the rows end to end into `out`, which just fits; on the CPU."""
        memory, splits = self.memory, self.row_splits
        in_one_run = self.ragged_dim == 1 and self.run_lengths is None
        if type(memory) is np.ndarray and in_one_run:  # most views
            cell_bytes = len(out) // (splits.total or 1)
            return Copy(out, memory, None, self.starts, splits.lengths, cell_bytes)
        return Copy(out, self.kernel_source(), None, *self.runs_to_copy(), self.cell_bytes)

    def pad_tasks(
        self, out: ByteArray, width: int, left_pad: IntArray | None, pad_bits: bytes
    ) -> tuple[Pad, Copy | None]:
        """The tasks that fill a rectangle on the CPU.

        The first writes rows and pads. The second writes all runs of a row except its last one;
        None if rows are in one run.
        """
        memory, splits, lengths = self.memory, self.row_splits, self.row_splits.lengths
        starts: Any = splits.starts if self.starts is None else self.starts
        in_one_run = self.ragged_dim == 1 and self.run_lengths is None
        if type(memory) is np.ndarray and in_one_run:  # most views
            cell = len(out) // (splits.rows * width)
            return Pad(out, memory, starts, lengths, left_pad, width, cell, pad_bits), None
        cell, source = self.cell_bytes, self.kernel_source()
        if isinstance(source, np.ndarray):
            source = array_bytes(source)
        if self.run_lengths is None:
            if not in_one_run:
                starts, lengths = self.runs_by_row()
            left_pad = self.for_runs(left_pad)
            return Pad(out, source, starts, lengths, left_pad, width, cell, pad_bits), None
        before = self.run_lengths.cumsum(axis=1) - self.run_lengths
        if left_pad is not None:
            before += left_pad[:, None]
        # The last run of a row is written with the pads: what is before it counts as left pads,
        # which the copy of the other runs overwrites. So that copy comes after the pads.
        places = np.arange(len(before), dtype=np.int64)[:, None] * width + before
        last, lengths, left = (
            np.ascontiguousarray(part[:, -1]) for part in (starts, self.run_lengths, before)
        )
        to, others, sizes = (
            np.ascontiguousarray(part[:, :-1]).reshape(-1)
            for part in (places, starts, self.run_lengths)
        )
        pad = Pad(out, source, last, lengths, left, width, cell, pad_bits)
        return pad, Copy(out, source, to, others, sizes, cell)

    def for_runs(self, left_pad: IntArray | None) -> IntArray | None:
        """A left pad for each run: a row has several if dims come before the ragged one."""
        outer = math.prod(self.shape[: self.ragged_dim - 1])
        return left_pad if left_pad is None or outer == 1 else np.repeat(left_pad, outer)

    def choose_at(self, index: Any, starts: IntArray | int, row_splits: RowSplits) -> RaggedView:
        """The rows at an index, a slice or numbers. A slice of rows end to end stays end to end.

        `starts` are the cells where the chosen rows begin if the rows of this view are end to end;
        for a slice, the cell of its first row alone. Callers have them already: `ChosenRows` finds
        them once for all columns. `choose` needs only row splits.
        """
        memory: Any = self.memory
        shape, dim, lengths = self.shape, self.ragged_dim, None
        if self.starts is None and dim == 1 and isinstance(starts, int):
            first, total, unit = starts, row_splits.total, 1
            shape = (total, *shape[1:])
            if type(memory) is np.ndarray:
                unit = math.prod(shape[1:]) * self.dtype.itemsize
                memory = array_bytes(memory) if memory.itemsize > 1 or memory.ndim > 1 else memory
            memory = memory[first * unit : (first + total) * unit]
            return RaggedView(
                memory, self.dtype, shape, ragged_dim=1, starts=None, row_splits=row_splits
            )
        if self.starts is not None or isinstance(starts, int):
            starts = self.row_starts()[index]
            if self.run_lengths is not None:
                lengths = self.run_lengths[index]
        return RaggedView(memory, self.dtype, shape, dim, starts, row_splits, lengths)

    def choose(self, rows: slice | IntArray, row_splits: RowSplits) -> RaggedView:
        """A view of some of the rows, in any order; `row_splits` has their lengths."""
        lengths = None if self.run_lengths is None else self.run_lengths[rows]
        starts = self.row_starts()[rows]
        return replace(self, starts=starts, row_splits=row_splits, run_lengths=lengths)


def end_to_end(values: torch.Tensor, row_splits: RowSplits, ragged_dim: int = 1) -> RaggedView:
    """Rows that are end to end in a tensor, and fill it."""
    shape = tuple(values.shape)
    return RaggedView(values, values.dtype, shape, ragged_dim, starts=None, row_splits=row_splits)


def in_buffers(
    buffers: Sequence[ByteArray],
    dtype: Any,
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
    # Rows with fewer runs than others get empty ones.
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
