"""`Packer`, `ColumnBuffers`: columns into buffers of a packing plan, and values back into rows.

A `Packer` knows the rows of one plan. It finds the rows of a column, fills buffers with them, and
turns values of cells back into rows. `ColumnBuffers` packs all columns of a batch: it plans a
buffer for each, and fills all together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import (
    array_of,
    check_known,
    check_laid_out,
    check_names,
    check_new_name,
    items_of,
    mapping_of,
    name_set,
    named_item,
)
from jagcodec.columns.batch import Key
from jagcodec.columns.column import Array, ViewColumn, column_of
from jagcodec.columns.join import chosen_leaf
from jagcodec.columns.tensor_columns import Dense
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    brief,
    column_name,
    describe,
)
from jagcodec.forward.copy_pieces import BufferTask, Indices, fill_buffers
from jagcodec.forward.layout import PackLayout, Pieces
from jagcodec.memory.arrays import IntArray, torch_name
from jagcodec.memory.plain_types import check_rectangle
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import as_bytes, cat_bits, number_array, plain_array
from jagcodec.rows.copy_rows import owned_values
from jagcodec.rows.lengths import check_row_ends, read_rows
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
from jagcodec.wire.read.opened import are_several, each_column, is_batch, opened, row_count_of


def is_column(source: Any) -> bool:
    """Whether something is one column, and not a batch."""
    return column_of(source).cells() is not None


def tensor_on(numbers: npt.NDArray[Any], device: torch.device | None) -> torch.Tensor:
    """A tensor of new numbers on a device; None is the CPU."""
    made = torch.from_numpy(numbers)
    return made if device is None else to_device(made, device)


def read_plan_lengths(lengths: Any, path: str, pool: RowSplitsPool) -> RowSplits:
    """The row splits of lengths, or of a jagged tensor, whose offsets `pool` keeps."""
    if not is_jagged(lengths):
        return read_rows(lengths, path)
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
        return view.followed(torch.is_grad_enabled())

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
        expected, found = self.row_splits.lengths, self._row_lengths_of(view, path, remedy)
        if not np.array_equal(expected, found):
            row = int(np.argmax(expected != found))
            detail = f"expected the plan's length of {expected[row]}, found {found[row]}"
            if (found <= expected).all():
                detail += "; name it in align_end if it has only the last tokens of each row, "
                detail += "such as those of a response"
            raise ArgumentError("bad_length", f"{path}, row {row}", detail + remedy)
        return view.followed(torch.is_grad_enabled())

    def _row_lengths_of(self, view: RaggedView, path: str, remedy: str = "") -> IntArray:
        """The row lengths of a view with as many rows as the plan; an error for any other."""
        expected, found = self.row_splits.rows, view.row_splits.rows
        if expected != found:
            detail = f"expected the {expected} rows of the plan, found {found}"
            raise ArgumentError("row_mismatch", path, detail + remedy)
        return view.row_splits.lengths

    def buffer(
        self, view: RaggedView, pieces: Pieces, path: str, *, pad: Any, out: Any = None
    ) -> BufferTask:
        """A buffer for pieces of a view from `rows_of` or `rows_at_end`."""
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
        expected = f"a tensor, or a list of {layout.cp_size}"
        parts = items_of(values, path, expected) if by_rank else [values]
        if by_rank and len(parts) != layout.cp_size:
            detail = f"expected {layout.cp_size} parts, one per rank in order, found {len(parts)}"
            raise ArgumentError("bad_shape", path, detail)
        cells = layout.local_total if by_rank else layout.total
        places = [f"{path}[{i}]" if by_rank else path for i in range(len(parts))]
        parts = [_check_part(*part, cells) for part in zip(parts, places, strict=True)]
        for part, place in zip(parts, places, strict=True):
            if _dtype_shape_device(part) != _dtype_shape_device(parts[0]):
                detail = f"expected {describe(parts[0])} like the first, found {describe(part)}"
                raise ArgumentError("bad_shape", place, detail)
        view = _join_parts(parts, cells)
        lengths = None if last is None else splits.lengths
        pieces = layout.inverse(shift, by_rank=by_rank, last=lengths)
        buffer = BufferTask(view, pieces, _pad_cell_bits(pad, view, "PackPlan.unpack(pad)"), path)
        (unpacked,) = self.fill([buffer])
        return nested_tensor(unpacked, splits)

    def _read_last(self, last: Any) -> RowSplits:
        """The row splits of the cells that a caller wants at the end of each row."""
        path, rows = "PackPlan.unpack(last)", self.row_splits.rows
        wanted = read_plan_lengths(last, path, self.pool)
        if wanted.rows != rows:
            detail = f"expected {rows} lengths, one for each row, found {wanted.rows}"
            raise ArgumentError("row_mismatch", path, detail)
        check_row_ends(wanted.lengths, self.row_splits.lengths, path)
        return self.pool.unique(wanted)


def _detached_if_grad_is_off(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached if autograd is off."""
    return tensor if torch.is_grad_enabled() or not tensor.requires_grad else tensor.detach()


def _dtype_shape_device(part: torch.Tensor) -> Any:
    """What the parts of all ranks have in common."""
    return part.dtype, part.shape, part.device


def _check_part(part: Any, path: str, cells: int) -> torch.Tensor:
    """A part as (cells, ...): checked, and without a leading dim of 1."""
    check_rectangle(part, path)
    shape = tuple(part.shape)
    if shape[:2] == (1, cells):
        part = part[0]
    elif shape[:1] != (cells,):
        detail = f"expected ({cells}, ...) or (1, {cells}, ...) cells, found shape {shape}"
        raise ArgumentError("bad_shape", path, detail)
    return _detached_if_grad_is_off(part)


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


# --- all columns of a batch ---------------------------------------------------------------------


class ColumnBuffers:
    """The buffers of one call of `pack` for a batch: planned column by column, filled together."""

    def __init__(self, where: str, packer: Packer, pieces_of: Callable[[int], Pieces]) -> None:
        self._where: str = where
        self._packer: Packer = packer
        self._pieces_of = pieces_of  # takes the shift
        self._pads: dict[Any, Any] = {}
        self._out: dict[Any, Any] = {}
        self._aligned: frozenset[Any] = frozenset()
        self._kept: frozenset[Any] = frozenset()
        self._at_end: frozenset[Any] = frozenset()
        self._buffers: dict[Key, BufferTask] = {}
        # Columns of equal rows share their pieces, and so their index on a device.
        self._pieces_at_end: dict[tuple[int, int], tuple[RowSplits, Pieces]] = {}

    def read_options(
        self, pads: Any, aligned: Any, at_end: Any, kept: Any, out: Any = None
    ) -> None:
        """Check the options of `pack`, as callers pass them, and keep them."""
        self._pads = self._by_name(pads, "pad_value_dict", "pads")
        self._aligned = name_set(aligned, f"{self._where}(token_aligned_fields)")
        self._at_end = name_set(at_end, f"{self._where}(align_end)")
        self._kept = name_set(kept, f"{self._where}(keep_jagged)")
        self._out = self._by_name(out, "out", "tensors")
        both = self._at_end & self._kept
        if both:
            detail = f"expected other names than in keep_jagged, found {min(map(brief, both))} in "
            raise ArgumentError("conflict", f"{self._where}(align_end)", detail + "both")

    def _by_name(self, value: Any, name: str, what: str) -> dict[Any, Any]:
        """An option that is a dict with an entry for each column; empty for None."""
        expected = f"a dict of column names to {what}"
        return {} if value is None else mapping_of(value, f"{self._where}({name})", expected)

    def plan_columns(self, source: Any, labels_of: Any) -> dict[str, Any]:
        """The columns of a batch, with an unfilled buffer in place of each that is packed."""
        where = f"{self._where}(batch)"
        if are_several(source):
            detail = "expected one batch, found a list of them; concat_rows makes one"
            raise ArgumentTypeError("bad_type", where, detail)
        if (is_column(source) or isinstance(source, np.ndarray)) and not is_batch(source):
            detail = f"expected a batch, found {describe(source)}; put the column in a dict"
            raise ArgumentTypeError("bad_type", where, detail)
        batch, rows = opened(source, where), self._packer.row_splits.rows
        found = row_count_of(batch, where)
        if found != rows and [*batch.keys()]:
            detail = f"expected the {rows} rows of the plan, found {found}"
            raise ArgumentError("row_mismatch", where, detail)
        columns = each_column(batch, self._column, self._column, self._path, self._packer.pool)
        self._check_named(columns)
        self._add_labels(columns, labels_of)
        return columns

    def _path(self, key: Key) -> str:
        """The place that errors about this column name."""
        return f"{self._where}({column_name(key)})"

    def _column(self, leaf: torch.Tensor | RaggedView, key: Key) -> Any:
        """The buffer of a column that is packed; any other column unchanged."""
        if key in self._kept:
            return leaf
        if key in self._at_end:
            view = self._packer.rows_at_end(leaf, self._path(key))
        elif isinstance(leaf, RaggedView) or (leaf.is_nested and leaf.dim() > 1):  # ragged
            view = self._packer.rows_of(leaf, self._path(key), "; or name it in keep_jagged")
        elif key in self._aligned:
            view = self._packer.rows_of_rectangle(leaf, self._path(key))
        else:
            return leaf
        return self._buffer(view, key, self._pads.get(key, ...))

    def _buffer(self, view: RaggedView, key: Key, pad: Any, shift: int = 0) -> BufferTask:
        """A buffer for the rows of a column, which is filled with all others."""
        pieces, path, out = self._pieces(view, shift), self._path(key), named_item(self._out, key)
        made = self._buffers[key] = self._packer.buffer(view, pieces, path, pad=pad, out=out)
        return made

    def _pieces(self, view: RaggedView, shift: int) -> Pieces:
        """The pieces for a view whose rows are whole, or have only their last tokens."""
        whole, splits = self._pieces_of(shift), view.row_splits
        missing = self._packer.row_splits.lengths - splits.lengths
        if not missing.any():
            return whole
        key = id(splits), shift
        if key not in self._pieces_at_end:
            # Keep the splits alive, so that no other splits get their id.
            self._pieces_at_end[key] = splits, whole.of_row_ends(missing)
        return self._pieces_at_end[key][1]

    def _check_named(self, columns: Mapping[str, Any]) -> None:
        """Check that each column that the options name was packed."""
        for name in [name for name in columns if name in self._aligned - self._kept]:
            if name not in self._buffers:
                # The column is an array or a list: raise an error, instead of leaving it unpacked.
                self._packer.rows_of_rectangle(columns[name], self._path(name))
        unpacked = self._at_end - self._buffers.keys()
        if unpacked:
            found: dict[Any, Any] = {}
            _map_columns(dict(columns), lambda column, key: found.update({key: column}))
            check_known(unpacked, found, f"{self._where}(align_end)")
            # The column is an array, a list or a batch, and has no rows of cells.
            name = min(unpacked, key=brief)
            self._packer.rows_at_end(found[name], self._path(name))

    def _add_labels(self, columns: dict[str, Any], labels_of: Any) -> None:
        """Add columns of labels, which hold the next tokens of packed columns."""
        where = f"{self._where}(labels_of)"
        wanted = {} if labels_of is None else labels_of
        if isinstance(labels_of, (str, tuple)):
            wanted = {"labels": labels_of}
        wanted = mapping_of(wanted, where, "the name of a column, or a dict of names to names")
        check_names([*wanted, *wanted.values()], where)
        packed = dict(self._buffers)
        for name, key in wanted.items():
            check_laid_out(key, packed, "packed", where)
            remedy = f"pass labels_of={{'another name': {key!r}}}"
            check_new_name(name, columns, where, remedy)
            view = packed[key].view
            pad = self._pads[name] if name in self._pads else _label_pad(view, name, where)
            columns[name] = self._buffer(view, name, pad, shift=-1)

    def _fill(self) -> dict[int, torch.Tensor]:
        """Fill all buffers in one call of the kernel; return their tensors, by the id of each."""
        buffers = [*self._buffers.values()]
        return dict(zip(map(id, buffers), self._packer.fill(buffers), strict=True))

    def fill_columns(self, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns, with a tensor in place of each buffer."""
        filled = self._fill()

        def finish(column: Any, _: Key) -> Any:
            if type(column) is RaggedView:
                return self._packer.jagged_tensor(column)
            return filled.get(id(column), column)

        return _map_columns(columns, finish)

    def fill_steps(
        self, columns: dict[str, Any], rows: Sequence[IntArray], cells: Sequence[int]
    ) -> list[dict[str, Any]]:
        """The columns of each step, with tensors in place of buffers.

        Step i has ``rows[i]``, and ``cells[i]`` cells of each buffer.
        """
        filled, pool = self._fill(), self._packer.pool
        order = np.concatenate([*rows, np.empty(0, np.int64)])
        row_ranges = [range(start, end) for start, end in _ranges_of_sizes(map(len, rows))]
        cell_ranges = [*_ranges_of_sizes(cells)]

        def parts_of(column: Any, key: Key) -> Any:
            if id(column) in filled:
                tensor, dim = filled[id(column)], column.view.ragged_dim - 1
                return [tensor.narrow(dim, start, end - start) for start, end in cell_ranges]
            holder = column_of(column)
            if isinstance(holder, ViewColumn):
                lengths = column.row_splits.lengths
                views = [column.choose(r, RowSplits.from_lengths(lengths[r])) for r in rows]
                return [*map(self._packer.jagged_tensor, views)]
            chosen = chosen_leaf(column, order, pool, self._path(key))
            if isinstance(column_of(chosen), (Array, Dense)):
                return [chosen[part.start : part.stop] for part in row_ranges]
            return [chosen_leaf(chosen, part, pool, self._path(key)) for part in row_ranges]

        parts = _map_columns(columns, parts_of)

        def step(i: int) -> dict[str, Any]:
            return _map_columns(parts, lambda of_steps, _: of_steps[i])

        return [*map(step, range(len(rows)))]


_NO_LABEL = -100
"""The label that PyTorch's `cross_entropy` ignores."""


def _label_pad(view: RaggedView, name: str, where: str) -> Any:
    """The pad of a column of next tokens that `pad_value_dict` lacks; `...` means bits of 0."""
    integers = torch_name(view.dtype).startswith(("int", "uint"))
    if not integers:
        return ...  # a mask, or floats such as log-probabilities
    if name == "labels":
        return _NO_LABEL
    remedy = f"pass pad_value_dict={{{name!r}: 0}} for a mask, or {_NO_LABEL} for labels"
    detail = f"expected the pad of {name!r}, whose integers may be either, found none; {remedy}"
    raise ArgumentError("bad_pad", where, detail)


def _map_columns(
    columns: dict[str, Any], function: Callable[[Any, Key], Any], above: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The result of a function for each column and its key, inner batches included."""
    made = {}
    for name, column in columns.items():
        key = (*above, name) if above else name
        inner = type(column) is dict
        if inner:
            made[name] = _map_columns(column, function, (*above, name))
        else:
            made[name] = function(column, key)
    return made


def _ranges_of_sizes(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Where each of several ranges begins and ends, if they are end to end and have these sizes."""
    return pairwise(accumulate(sizes, initial=0))
