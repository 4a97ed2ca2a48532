"""`ColumnBuffers`: the columns of a batch into buffers of a packing plan, all together.

`plan_columns` plans a buffer for each column that is packed. `fill_columns` or `fill_steps` then
fills all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from jagcodec._arguments import (
    check_known,
    check_laid_out,
    check_names,
    check_new_name,
    key_of,
    mapping_of,
    name_set,
    named_item,
    values_by_key,
)
from jagcodec.columns.batch import Key
from jagcodec.columns.held import Array, ViewColumn, column_of
from jagcodec.columns.join import chosen_leaf
from jagcodec.columns.tensor_columns import Dense
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    brief,
    column_name,
    describe,
)
from jagcodec.forward.copy_pieces import BufferTask
from jagcodec.forward.layout import Pieces
from jagcodec.forward.packer import Packer, is_column
from jagcodec.memory.arrays import IntArray, torch_name
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire.read.any_batch import are_several, each_column, is_batch, opened, row_count_of


class ColumnBuffers:
    """The buffers of one call of `pack` for a batch: planned column by column, filled together."""

    def __init__(
        self,
        where: str,
        packer: Packer,
        make_pieces: Callable[[int], Pieces],
        *,
        pads: Any,
        token_aligned: Any,
        align_end: Any,
        keep_jagged: Any,
        out: Any = None,
    ) -> None:
        """The last five are options of `pack`, as callers pass them; they are checked here."""
        self._where: str = where
        self._packer: Packer = packer
        self._make_pieces = make_pieces  # takes the shift
        self._buffers: dict[Key, BufferTask] = {}
        # Columns of equal rows share their pieces, and so their index on a device.
        self._pieces_by_rows: dict[tuple[int, int], tuple[RowSplits, Pieces]] = {}
        self._pads: dict[Any, Any] = values_by_key(
            self._read_mapping(pads, "pad_value_dict", "pads"), f"{where}(pad_value_dict)"
        )
        self._token_aligned: frozenset[Any] = name_set(
            token_aligned, f"{where}(token_aligned_fields)"
        )
        self._align_end: frozenset[Any] = name_set(align_end, f"{where}(align_end)")
        self._keep_jagged: frozenset[Any] = name_set(keep_jagged, f"{where}(keep_jagged)")
        self._out: dict[Any, Any] = self._read_mapping(out, "out", "tensors")
        both = self._align_end & self._keep_jagged
        if both:
            detail = f"expected other names than in keep_jagged, found {min(map(brief, both))} in "
            raise ArgumentError("conflict", f"{where}(align_end)", detail + "both")

    def _read_mapping(self, value: Any, name: str, what: str) -> dict[Any, Any]:
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
        batch_rows = row_count_of(batch, where)
        if batch_rows != rows and [*batch.keys()]:
            detail = f"expected the {rows} rows of the plan, found {batch_rows}"
            raise ArgumentError("row_mismatch", where, detail)
        columns = each_column(
            batch, self._plan_column, self._plan_column, self._path_of, self._packer.pool
        )
        self._check_named(columns)
        self._add_labels(columns, labels_of)
        return columns

    def _path_of(self, key: Key) -> str:
        """The place that errors about this column name."""
        return f"{self._where}({column_name(key)})"

    def _plan_column(self, leaf: torch.Tensor | RaggedView, key: Key) -> Any:
        """The buffer of a column that is packed; any other column unchanged."""
        if key in self._keep_jagged:
            return leaf
        if key in self._align_end:
            view = self._packer.rows_at_end(leaf, self._path_of(key))
        elif isinstance(leaf, RaggedView) or (leaf.is_nested and leaf.dim() > 1):  # ragged
            view = self._packer.rows_of(leaf, self._path_of(key), "; or name it in keep_jagged")
        elif key in self._token_aligned:
            view = self._packer.rows_of_rectangle(leaf, self._path_of(key))
        else:
            return leaf
        return self._plan_buffer(view, key, self._pads.get(key, ...))

    def _plan_buffer(self, view: RaggedView, key: Key, pad: Any, shift: int = 0) -> BufferTask:
        """A buffer for the rows of a column, which is filled with all others."""
        pieces, path = self._find_pieces(view, shift), self._path_of(key)
        out = named_item(self._out, key)
        task = self._packer.buffer_task(view, pieces, path, pad=pad, out=out)
        self._buffers[key] = task
        return task

    def _find_pieces(self, view: RaggedView, shift: int) -> Pieces:
        """The pieces for a view whose rows are whole, or have only their last tokens."""
        whole, splits = self._make_pieces(shift), view.row_splits
        missing = self._packer.row_splits.lengths - splits.lengths
        if not missing.any():
            return whole
        key = id(splits), shift
        if key not in self._pieces_by_rows:
            # Keep the splits alive, so that no other splits get their id.
            self._pieces_by_rows[key] = splits, whole.of_row_ends(missing)
        return self._pieces_by_rows[key][1]

    def _check_named(self, columns: Mapping[str, Any]) -> None:
        """Raise an error for a column that the options name if it was not packed."""
        left_out = self._token_aligned - self._keep_jagged - self._buffers.keys()
        for key, column in _each_key(columns) if left_out else ():
            if key in left_out:
                # The column is an array, a list or a batch: raise an error, instead of leaving it
                # unpacked.
                self._packer.rows_of_rectangle(column, self._path_of(key))
        left_out = self._align_end - self._buffers.keys()
        if left_out:
            by_key = {key: each for key, each in _each_key(columns) if type(each) is not dict}
            check_known(left_out, by_key, f"{self._where}(align_end)")
            # The column is an array or a list, and has no rows of cells.
            first = min(left_out, key=brief)
            self._packer.rows_at_end(by_key[first], self._path_of(first))

    def _add_labels(self, columns: dict[str, Any], labels_of: Any) -> None:
        """Add columns of labels, which hold the next tokens of packed columns."""
        where = f"{self._where}(labels_of)"
        names = {} if labels_of is None else labels_of
        if isinstance(labels_of, (str, tuple)):
            names = {"labels": labels_of}
        names = mapping_of(names, where, "the name of a column, or a dict of names to names")
        check_names([*names, *names.values()], where)
        packed = dict(self._buffers)
        for name, named in values_by_key(names, where).items():
            key = key_of(named)
            check_laid_out(key, packed, "packed", where)
            remedy = f"pass labels_of={{'another name': {key!r}}}"
            check_new_name(name, columns, where, remedy)
            view = packed[key].view
            pad = self._pads[name] if name in self._pads else _label_pad(view, name, where)
            columns[name] = self._plan_buffer(view, name, pad, shift=-1)

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

        def cut_column(column: Any, key: Key) -> Any:
            if id(column) in filled:
                tensor, dim = filled[id(column)], column.view.ragged_dim - 1
                return [tensor.narrow(dim, start, end - start) for start, end in cell_ranges]
            holder = column_of(column)
            if isinstance(holder, ViewColumn):
                lengths = column.row_splits.lengths
                views = [column.choose(r, RowSplits.from_lengths(lengths[r])) for r in rows]
                return [*map(self._packer.jagged_tensor, views)]
            chosen = chosen_leaf(column, order, pool, self._path_of(key))
            if isinstance(column_of(chosen), (Array, Dense)):
                return [chosen[part.start : part.stop] for part in row_ranges]
            return [chosen_leaf(chosen, part, pool, self._path_of(key)) for part in row_ranges]

        parts = _map_columns(columns, cut_column)

        def columns_of_step(i: int) -> dict[str, Any]:
            return _map_columns(parts, lambda of_steps, _: of_steps[i])

        return [*map(columns_of_step, range(len(rows)))]


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
    results: dict[str, Any] = {}
    for name, column in columns.items():
        path = (*above, name)
        if type(column) is dict:
            results[name] = _map_columns(column, function, path)
        else:
            results[name] = function(column, path if above else name)
    return results


def _each_key(columns: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[Key, Any]]:
    """Each column with its key: inner batches, and their columns, too."""
    for name, column in columns.items():
        path = (*above, name)
        yield (path if above else name), column
        if type(column) is dict:
            yield from _each_key(column, path)


def _ranges_of_sizes(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Where each of several ranges begins and ends, if they are end to end and have these sizes."""
    return pairwise(accumulate(sizes, initial=0))
