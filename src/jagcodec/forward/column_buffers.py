"""`ColumnBuffers`: the packed columns of a batch, planned column by column and filled together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from jagcodec._arguments import check_known, check_names, mapping_of, name_set, named_item
from jagcodec.errors import ArgumentError, ArgumentKeyError, brief, column_name
from jagcodec.forward.layout import Pieces
from jagcodec.rows.lengths import IntArray

if TYPE_CHECKING:
    import torch

    from jagcodec.columns.batch import Key
    from jagcodec.forward.copy_pieces import BufferTask
    from jagcodec.forward.packer import Packer
    from jagcodec.rows.row_splits import RowSplits
    from jagcodec.rows.views import RaggedView


class ColumnBuffers:
    """The buffers of one call of `pack` for a batch: planned column by column, filled together."""

    def __init__(self, where: str, packer: Packer, pieces_of: Callable[[int], Pieces]) -> None:
        self.where: str = where
        self.packer: Packer = packer
        self.pieces_of = pieces_of  # takes the shift
        self.pads: dict[Any, Any] = {}
        self.out: dict[Any, Any] = {}
        self.aligned: frozenset[Any] = frozenset()
        self.kept: frozenset[Any] = frozenset()
        self.at_end: frozenset[Any] = frozenset()
        self.buffers: dict[Key, BufferTask] = {}
        # Columns of equal rows share their pieces, and so their index on a device.
        self._pieces_at_end: dict[tuple[int, int], tuple[RowSplits, Pieces]] = {}

    def read_options(
        self, pads: Any, aligned: Any, at_end: Any, kept: Any, out: Any = None
    ) -> None:
        """Check the options of `pack`, as callers pass them, and keep them."""
        self.pads = self.by_name(pads, "pad_value_dict", "pads")
        self.aligned = name_set(aligned, f"{self.where}(token_aligned_fields)")
        self.at_end = name_set(at_end, f"{self.where}(align_end)")
        self.kept = name_set(kept, f"{self.where}(keep_jagged)")
        self.out = self.by_name(out, "out", "tensors")
        both = self.at_end & self.kept
        if both:
            detail = f"expected other names than in keep_jagged, found {min(map(brief, both))} in "
            raise ArgumentError("conflict", f"{self.where}(align_end)", detail + "both")

    def by_name(self, value: Any, name: str, what: str) -> dict[Any, Any]:
        """An option that is a dict with an entry for each column; empty for None."""
        expected = f"a dict of column names to {what}"
        return {} if value is None else mapping_of(value, f"{self.where}({name})", expected)

    def path(self, key: Key) -> str:
        """Where an error about this column says it is."""
        return f"{self.where}({column_name(key)})"

    def column(self, leaf: torch.Tensor | RaggedView, key: Key) -> Any:
        """The buffer of a column that is packed; any other column unchanged."""
        if key in self.kept:
            return leaf
        if key in self.at_end:
            view = self.packer.rows_at_end(leaf, self.path(key))
        elif self.packer.is_ragged(leaf):
            view = self.packer.rows_of(leaf, self.path(key), "; or name it in keep_jagged")
        elif key in self.aligned:
            view = self.packer.rows_of_rectangle(leaf, self.path(key))
        else:
            return leaf
        return self.buffer(view, key, self.pads.get(key, ...))

    def buffer(self, view: RaggedView, key: Key, pad: Any, shift: int = 0) -> BufferTask:
        pieces, path, out = self._pieces(view, shift), self.path(key), named_item(self.out, key)
        made = self.buffers[key] = self.packer.buffer(view, pieces, path, pad=pad, out=out)
        return made

    def _pieces(self, view: RaggedView, shift: int) -> Pieces:
        """The pieces for rows of a view that are whole, or that have the last tokens of each."""
        whole, splits = self.pieces_of(shift), view.row_splits
        missing = self.packer.row_splits.lengths - splits.lengths
        if not missing.any():
            return whole
        key = id(splits), shift
        if key not in self._pieces_at_end:  # the splits are kept, so that no others get their id
            self._pieces_at_end[key] = splits, whole.of_row_ends(missing)
        return self._pieces_at_end[key][1]

    def check_packed(self, columns: Mapping[str, Any]) -> None:
        """Check that each column that the options name was packed."""
        for name in [name for name in columns if name in self.aligned - self.kept]:
            if name not in self.buffers:
                # It is an array or a list: raise an error, instead of silently not packing it.
                self.packer.rows_of_rectangle(columns[name], self.path(name))
        unpacked = self.at_end - self.buffers.keys()
        if unpacked:
            found: dict[Any, Any] = {}
            _map_columns(dict(columns), lambda column, key: found.update({key: column}))
            check_known(unpacked, found, f"{self.where}(align_end)")
            # It is an array, a list or a batch, which has no rows of cells.
            name = min(unpacked, key=brief)
            self.packer.rows_at_end(found[name], self.path(name))

    def add_labels(self, columns: dict[str, Any], labels_of: Any) -> None:
        """Add columns of labels, which hold the next tokens of packed columns."""
        where = f"{self.where}(labels_of)"
        wanted = {} if labels_of is None else labels_of
        if isinstance(labels_of, (str, tuple)):
            wanted = {"labels": labels_of}
        wanted = mapping_of(wanted, where, "the name of a column, or a dict of names to names")
        check_names([*wanted, *wanted.values()], where)
        packed = dict(self.buffers)
        for name, key in wanted.items():
            if key not in packed:
                detail = (
                    f"expected a column that is packed, one of {[*packed]!r:.200}, "
                    f"found {brief(key)}"
                )
                raise ArgumentKeyError("no_such_field", where, detail)
            if name in columns:
                detail = (
                    f"expected no column {name!r}, found one; "
                    f"pass labels_of={{'another name': {key!r}}}"
                )
                raise ArgumentError("conflict", where, detail)
            view = packed[key].view
            pad = self.pads[name] if name in self.pads else _pad_of_next(view, name, where)
            columns[name] = self.buffer(view, name, pad, shift=-1)

    def filled(self) -> dict[int, torch.Tensor]:
        """The buffers as tensors, by the id of each; one call of the kernel fills them all."""
        buffers = [*self.buffers.values()]
        return dict(zip(map(id, buffers), self.packer.fill(buffers), strict=True))

    def whole(self, columns: dict[str, Any]) -> dict[str, Any]:
        """The columns of `batch`, with tensors in place of buffers."""
        from jagcodec.rows.views import RaggedView

        filled = self.filled()

        def column_of(column: Any, _: Key) -> Any:
            kept = type(column) is RaggedView
            return self.packer.kept(column) if kept else filled.get(id(column), column)

        return _map_columns(columns, column_of)

    def steps(
        self, columns: dict[str, Any], rows: Sequence[IntArray], cells: Sequence[int]
    ) -> list[dict[str, Any]]:
        """The columns of each step, which has these rows, and so many cells of each buffer."""
        from jagcodec.columns.column import Array, ViewColumn, column_of
        from jagcodec.columns.join import chosen_leaf
        from jagcodec.columns.of_tensors import Dense
        from jagcodec.rows.row_splits import RowSplits

        filled, pool = self.filled(), self.packer.pool
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
                return [*map(self.packer.kept, views)]
            chosen = chosen_leaf(column, order, pool, self.path(key))
            if isinstance(column_of(chosen), (Array, Dense)):
                return [chosen[part.start : part.stop] for part in row_ranges]
            return [chosen_leaf(chosen, part, pool, self.path(key)) for part in row_ranges]

        parts = _map_columns(columns, parts_of)

        def step(i: int) -> dict[str, Any]:
            return _map_columns(parts, lambda of_steps, _: of_steps[i])

        return [*map(step, range(len(rows)))]


_NO_LABEL = -100
"""The label that PyTorch's `cross_entropy` ignores."""


def _pad_of_next(view: RaggedView, name: str, where: str) -> Any:
    """The pad of a column of next tokens if `pad_value_dict` has none; `...` is bits of 0."""
    integers = str(view.dtype).removeprefix("torch.").startswith(("int", "uint"))
    if not integers:
        return ...  # a mask, or floats such as log-probabilities
    if name == "labels":
        return _NO_LABEL
    remedy = f"pass pad_value_dict={{{name!r}: 0}} for a mask, or {_NO_LABEL} for labels"
    detail = f"expected the pad of {name!r}, whose integers may be either, found none; {remedy}"
    raise ArgumentError("bad_pad", where, detail)


def _map_columns(
    columns: dict[str, Any], of: Callable[[Any, Key], Any], above: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The result of a function for each column and its key, inner batches included."""
    made = {}
    for name, column in columns.items():
        key = (*above, name) if above else name
        inner = type(column) is dict
        made[name] = _map_columns(column, of, (*above, name)) if inner else of(column, key)
    return made


def _ranges_of_sizes(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Where ranges of these sizes begin and end, if they are end to end."""
    return pairwise(accumulate(sizes, initial=0))
