"""`Packer`: columns into buffers of a packing plan, and values back into rows.

A `Packer` knows the rows of one plan. It finds the rows of a column, fills buffers with them, and
turns values of cells back into rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import (
    array_of,
    items_of,
)
from jagcodec.columns.held import column_of
from jagcodec.errors import (
    ArgumentError,
    describe,
)
from jagcodec.forward.copy_pieces import BufferTask, Indices, fill_buffers
from jagcodec.forward.layout import PackLayout, Pieces
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.plain_types import check_rectangle
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import as_bytes, cat_bits, number_array, plain_array
from jagcodec.rows.copy_rows import owned_values
from jagcodec.rows.lengths import check_row_ends, read_row_lengths
from jagcodec.rows.nested import (
    check_column,
    is_jagged,
    nested_tensor,
    view_of,
)
from jagcodec.rows.of_tensors import rows_of_rectangle
from jagcodec.rows.pad_values import pad_bits
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, end_to_end, in_buffers


def is_column(source: Any) -> bool:
    """Whether something is one column, and not a batch."""
    return column_of(source).cells() is not None


def tensor_on(numbers: npt.NDArray[Any], device: torch.device | None) -> torch.Tensor:
    """A tensor of new numbers on a device; None is the CPU."""
    tensor = torch.from_numpy(numbers)
    return tensor if device is None else to_device(tensor, device)


def read_plan_lengths(lengths: Any, path: str, pool: RowSplitsPool) -> RowSplits:
    """The row splits of lengths, or of a jagged tensor, whose offsets `pool` keeps."""
    if not is_jagged(lengths):
        return read_row_lengths(lengths, path)
    check_column(lengths, path)
    return view_of(lengths, path, pool).row_splits


class Packer:
    """Packs the columns of one plan. It keeps what columns share: row splits, and indices."""

    def __init__(self, row_splits: RowSplits, pool: RowSplitsPool | None = None) -> None:
        self.row_splits: RowSplits = row_splits
        self.pool: RowSplitsPool = pool or RowSplitsPool()  # knows offsets tensors
        self._indices: Indices = {}

    @classmethod
    def of_lengths(cls, lengths: IntArray) -> Packer:
        """A packer for rows of (N,) lengths."""
        return cls(RowSplits.from_lengths(lengths))

    def without_indices(self) -> Packer:
        """A packer of the same rows for other pieces: it has no indices yet."""
        return Packer(self.row_splits, self.pool)

    # Columns

    def jagged_tensor(self, column: Any) -> Any:
        """A column that is not packed: a view becomes a jagged tensor, and any other stays."""
        if not isinstance(column, RaggedView):
            return column
        row_splits = self.pool.unique(column.row_splits)
        return nested_tensor(owned_values(column), row_splits, column.ragged_dim)

    def rows_of(self, column: Any, path: str, remedy: str = "") -> RaggedView:
        """The rows of a column, which is jagged, a rectangle, or values end to end."""
        view = column_of(column).view_or_copy(path, self.pool)
        if view is not None:
            return self._require_plan_lengths(view, path, remedy)
        check_rectangle(column, path)
        splits, shape = self.row_splits, column.shape
        are_values = shape[:1] == (splits.total,)
        are_padded = len(shape) > 1 and shape[0] == splits.rows
        if are_padded and not (are_values and shape[1] < splits.max):
            if are_values:
                detail = f"expected a jagged tensor, because shape {tuple(shape)} may be a "
                detail += f"rectangle of {splits.rows} rows or {splits.total} values end to end"
                raise ArgumentError("bad_shape", path, detail)
            return self.rows_of_rectangle(column, path)
        if not are_values:
            detail = f"expected {splits.total} values end to end, or a rectangle of "
            detail += f"{splits.rows} rows, found shape {tuple(shape)}"
            raise ArgumentError("bad_shape", path, detail)
        return end_to_end(_detached_if_grad_is_off(column), self.row_splits)

    def rows_at_end(self, column: Any, path: str) -> RaggedView:
        """The rows of a ragged column that has the last tokens of each row of the plan, or all."""
        view = column_of(column).view_or_copy(path, self.pool)
        if view is None:
            detail = f"expected a jagged or packed column in align_end, found {describe(column)}; "
            detail += "if it is a rectangle, pack_jagged_fields makes it jagged"
            raise ArgumentError("bad_shape", path, detail)
        check_row_ends(self._row_lengths_of(view, path), self.row_splits.lengths, path)
        return view.with_grad(torch.is_grad_enabled())

    def rows_of_rectangle(self, column: Any, path: str) -> RaggedView:
        """The rows of a rectangle (N, S, ...)."""
        check_rectangle(column, path)
        if column.dim() < 2 or len(column) != self.row_splits.rows:
            detail = (
                f"expected a rectangle of {self.row_splits.rows} rows, found {describe(column)}"
            )
            raise ArgumentError("bad_shape", path, detail)
        cells = _detached_if_grad_is_off(column)
        return rows_of_rectangle(cells, self.row_splits, path, plain_array(cells))

    def _require_plan_lengths(self, view: RaggedView, path: str, remedy: str) -> RaggedView:
        """The view, if it has the row lengths of the plan; an error otherwise."""
        expected, lengths = self.row_splits.lengths, self._row_lengths_of(view, path, remedy)
        if not np.array_equal(expected, lengths):
            row = int(np.argmax(expected != lengths))
            detail = f"expected the plan's length of {expected[row]}, found {lengths[row]}"
            if (lengths <= expected).all():
                detail += "; name it in align_end if it has only the last tokens of each row, "
                detail += "such as those of a response"
            raise ArgumentError("bad_length", f"{path}, row {row}", detail + remedy)
        return view.with_grad(torch.is_grad_enabled())

    def _row_lengths_of(self, view: RaggedView, path: str, remedy: str = "") -> IntArray:
        """The row lengths of a view with as many rows as the plan; an error for any other."""
        expected, rows = self.row_splits.rows, view.row_splits.rows
        if expected != rows:
            detail = f"expected the {expected} rows of the plan, found {rows}"
            raise ArgumentError("row_mismatch", path, detail + remedy)
        return view.row_splits.lengths

    def buffer_task(
        self, view: RaggedView, pieces: Pieces, path: str, *, pad: Any, out: Any = None
    ) -> BufferTask:
        """The task to fill a buffer with pieces of a view of `rows_of` or `rows_at_end`."""
        return BufferTask(view, pieces, _pad_cell_bits(pad, view, f"{path}(pad)"), path, out)

    def fill(self, buffers: Sequence[BufferTask]) -> list[torch.Tensor]:
        """The filled buffers, see `copy_pieces.fill_buffers`."""
        return fill_buffers(buffers, self._indices)

    # The way back

    def unpack(
        self, layout: PackLayout, values: Any, shift: int, pad: Any, last: Any, path: str
    ) -> torch.Tensor:
        """Values of the cells of a layout as rows; they are one tensor, or a part for each rank."""
        splits = self.row_splits if last is None else self._read_last(last)
        by_rank = isinstance(values, (list, tuple))
        if by_rank:
            parts, cells = _read_parts(values, layout, path), layout.local_total
        else:
            parts, cells = [_read_part(values, path, layout.total)], layout.total
        view = _join_parts(parts, cells)
        lengths = None if last is None else splits.lengths
        pieces = layout.inverse(shift, by_rank=by_rank, last=lengths)
        buffer = BufferTask(view, pieces, _pad_cell_bits(pad, view, "PackPlan.unpack(pad)"), path)
        (token_values,) = self.fill([buffer])
        return nested_tensor(token_values, splits)

    def _read_last(self, last: Any) -> RowSplits:
        """The row splits of the cells that a caller wants at the end of each row."""
        path, rows = "PackPlan.unpack(last)", self.row_splits.rows
        last_splits = read_plan_lengths(last, path, self.pool)
        if last_splits.rows != rows:
            detail = f"expected {rows} lengths, one for each row, found {last_splits.rows}"
            raise ArgumentError("row_mismatch", path, detail)
        check_row_ends(last_splits.lengths, self.row_splits.lengths, path)
        return self.pool.unique(last_splits)


def _read_parts(values: Any, layout: PackLayout, path: str) -> list[torch.Tensor]:
    """The parts of all ranks, checked by themselves and against each other."""
    given = items_of(values, path, f"a tensor, or a list of {layout.cp_size}")
    if len(given) != layout.cp_size:
        detail = f"expected {layout.cp_size} parts, one per rank in order, found {len(given)}"
        raise ArgumentError("bad_shape", path, detail)
    cells = layout.local_total
    parts = [_read_part(part, f"{path}[{i}]", cells) for i, part in enumerate(given)]
    for i, part in enumerate(parts):
        if _dtype_shape_device(part) != _dtype_shape_device(parts[0]):
            detail = f"expected {describe(parts[0])} like the first, found {describe(part)}"
            raise ArgumentError("bad_shape", f"{path}[{i}]", detail)
    return parts


def _dtype_shape_device(part: torch.Tensor) -> Any:
    """What the parts of all ranks have in common."""
    return part.dtype, part.shape, part.device


def _read_part(part: Any, path: str, cells: int) -> torch.Tensor:
    """A part as (cells, ...): checked, and without a leading dim of 1."""
    check_rectangle(part, path)
    shape = tuple(part.shape)
    if shape[:2] == (1, cells):
        part = part[0]
    elif shape[:1] != (cells,):
        detail = f"expected ({cells}, ...) or (1, {cells}, ...) cells, found shape {shape}"
        raise ArgumentError("bad_shape", path, detail)
    return _detached_if_grad_is_off(part)


def _detached_if_grad_is_off(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached if autograd is off."""
    return tensor if torch.is_grad_enabled() or not tensor.requires_grad else tensor.detach()


def _join_parts(parts: Sequence[torch.Tensor], cells: int) -> RaggedView:
    """Parts as rows of `cells` cells each; in place if the row kernel copies them."""
    splits = RowSplits.from_lengths(np.full(len(parts), cells, np.int64))
    first = parts[0]
    if not first.is_cpu or any(part.requires_grad for part in parts):
        whole = first if len(parts) == 1 else cat_bits(parts, 0)
        return end_to_end(whole, splits)
    memory = tuple(map(as_bytes, parts))
    inner = first.shape[1:]
    starts = splits.starts * (inner.numel() * first.itemsize)
    return in_buffers(memory, first.dtype, inner, starts, splits)


def _pad_cell_bits(pad: Any, view: RaggedView, path: str) -> bytes:
    """The bits of one pad cell (B...), or of a number that it repeats; zeros for `...`.

    A number is not repeated here: a cell may be larger than the memory, and need no pad.
    """
    if pad is ...:  # the caller gave none, as for the other columns of `materialize`
        return bytes(view.dtype.itemsize)
    shape = view.shape[view.ragged_dim :]
    if isinstance(pad, (list, tuple, np.ndarray, torch.Tensor)):
        try:
            numbers = number_array(pad) if isinstance(pad, torch.Tensor) else array_of(pad)
        except (RuntimeError, TypeError, ValueError):  # no memory, or lists differ in length
            shape, numbers = (), np.empty(0)  # `pad_bits` names what it is
        if shape and numbers.shape == shape:
            each = numbers.reshape(-1).tolist()
            return b"".join(pad_bits(number, view.dtype, path) for number in each)
        if shape and numbers.size != 1:
            detail = f"expected a number or a value of shape {shape}, found shape {numbers.shape}"
            raise ArgumentError("bad_pad", path, detail)
        if isinstance(pad, (list, tuple)) and numbers.size == 1:
            pad = numbers.item()
    return pad_bits(pad, view.dtype, path)
