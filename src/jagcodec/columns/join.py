"""Rows of columns and batches in memory, chosen and joined: cells are copied once, in one call.

Cells on the host become views. Their rows are chosen in place, those of several columns in the
buffers of all of them, and one call copies the rows of all columns of a batch. Torch copies cells
on devices, and those that autograd follows.

Tensordict does not choose or join rows here, because its releases differ: below 0.15, it cannot
choose or join rows of jagged leaves.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData

from jagcodec.columns.batch import InPlace
from jagcodec.columns.column import (
    Array,
    Dense,
    DictBatch,
    HeldColumn,
    InnerBatch,
    Jagged,
    LazyStack,
    ObjectList,
    Packed,
    Payloads,
    Sparse,
    StridedNested,
    TensorClass,
    TensorDictBatch,
    Unbatched,
    column_of,
    like,
    not_a_column,
    row_count,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, brief
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.extents import check_extent, total_of
from jagcodec.memory.plain_types import check_memory
from jagcodec.memory.tensor_bytes import array_in_storage, as_bytes, cat_bits
from jagcodec.packing.lengths import check_size
from jagcodec.ragged import non_tensor
from jagcodec.ragged.copy_rows import gathered, take_rows, values_of
from jagcodec.ragged.nested import COLUMN_TYPES, nested_tensor, strided_nested, strided_parts
from jagcodec.ragged.of_tensors import device_of
from jagcodec.ragged.row_splits import Chosen, RowSplits, RowSplitsPool
from jagcodec.ragged.varlen import varlen_column
from jagcodec.ragged.views import RaggedView, concat_views, end_to_end, in_buffers

LAZY_STACK = (
    "expected a TensorDict, found a lazy stack, whose rows may differ in keys and shapes; call "
    ".contiguous() on it, or make columns of its rows with stack_or_nest"
)


def select_leaf(leaf: Any, chosen: Chosen, pool: RowSplitsPool, path: str) -> Any:
    """Chosen rows of a column or a batch. A range of a tensor is a slice; all else is copied."""
    return _RowJoiner(chosen, pool, operator.is_, 0).joined([leaf], path)


def plan_rows(leaf: Any, chosen: Chosen, pool: RowSplitsPool, path: str) -> Any:
    """What `select_leaf` returns; or `InPlace`, so that several columns are copied together."""
    return _RowJoiner(chosen, pool, operator.is_, 0).plan([leaf], path)


def join_leaves(
    leaves: Sequence[Any],
    chosen: Chosen | None,
    pool: RowSplitsPool,
    path: str,
    same: Callable[[Any, Any], bool],
    model: int = 0,
) -> Any:
    """The rows of several columns joined, or those `chosen`, in the form of the one at `model`.

    `same` compares values that belong to whole batches.
    """
    return _RowJoiner(chosen, pool, same, model).joined(leaves, path)


def join_views(
    views: Sequence[RaggedView], chosen: Chosen | None, pool: RowSplitsPool, path: str
) -> RaggedView:
    """What `join_leaves` does, for rows in memory that must not be changed, such as a message's."""
    joiner = _RowJoiner(chosen, pool, operator.is_, 0)
    joiner.check_alike(views, path)
    whole = views[0] if len(views) == 1 else concat_views(views)
    if whole is None:
        moved = [end_to_end(x, v.row_splits, v.ragged_dim) for x, v in _copies(views)]
        whole = joiner.concat(moved, path)
    row_splits = pool.unique(whole.row_splits)
    if chosen is not None:
        whole = joiner.in_place(whole, path)
        row_splits = whole.row_splits
    if whole.is_end_to_end and whole.is_tensor and len(views) > 1:
        return whole
    return end_to_end(gathered([whole])[0], row_splits, whole.ragged_dim)


def _copies(views: Sequence[RaggedView]) -> Iterable[tuple[torch.Tensor, RaggedView]]:
    return zip(gathered(views), views, strict=True)


def require_same_names(batches: Iterable[tuple[int, Sequence[str]]], where: str) -> Sequence[str]:
    """The names of the columns of the first batch; an error if another batch differs."""
    first: Sequence[str] | None = None
    for i, names in batches:
        if first is None or names == first:
            first = names
            continue
        # Keep the order of the columns: the hash seed decides the order of a set.
        known, these = dict.fromkeys(first), dict.fromkeys(names)
        different = [(name, "missing") for name in known if name not in these]
        different += [(name, "in addition") for name in these if name not in known]
        for name, how in different:
            found = f"found {brief(name)} {how}; select the others"
            detail = f"expected the columns of batch 0, {found}"
            raise ArgumentKeyError("no_such_field", f"{where} of batch {i}", detail)
    return first or ()


class _RowJoiner:
    """Chooses and joins rows: which rows are wanted, and how values of whole batches compare."""

    def __init__(
        self,
        chosen: Chosen | None,  # None means all rows
        pool: RowSplitsPool,
        same: Callable[[Any, Any], bool],
        model: int,  # the column, or batch, that others are made like
    ) -> None:
        self.chosen = chosen
        self.pool = pool
        self.same = same
        self.model = model
        # The chosen rows of row splits, by the id of these, which are kept.
        self._picked: dict[int, tuple[RowSplits, RowSplits]] = {}
        self._cells: tuple[IntArray, RowSplits] | None = None

    def joined(self, leaves: Sequence[Any], path: str) -> Any:
        """The rows of one column, or batch, of each leaf."""
        made = self.plan(leaves, path)
        return made.make(gathered([made.view])[0]) if type(made) is InPlace else made

    def plan(self, leaves: Sequence[Any], path: str) -> Any:
        """The joined column, or what it waits for."""
        columns = [column_of(leaf) for leaf in leaves]
        family = columns[self.model].family
        if any(column.family is not family for column in columns):
            columns = [self._like_model(each, columns, i, path) for i, each in enumerate(columns)]
        if columns[0].family is None:
            raise not_a_column(leaves[0], path)
        return _JOIN_OF_KIND[type(columns[0])](self, columns, path)

    def _like_model(
        self, column: HeldColumn, columns: Sequence[HeldColumn], i: int, path: str
    ) -> HeldColumn:
        """A column in the form of the model, if that can hold the same; an error otherwise."""
        model = columns[self.model]
        if column.family is model.family:
            return column
        if column.family is None or model.family is None:
            lacks_rows = column if column.family is None else model
            raise not_a_column(lacks_rows.value, f"{path} of batch {i}")
        found = model.converted(column, path)
        if found is not None:
            return column_of(found)
        other = (columns[0] if i else model).value
        names = f"{type(other).__name__} and {type(column.value).__name__}; convert one of them"
        detail = f"expected one kind of column in all batches, found {names}"
        raise ArgumentTypeError("bad_type", f"{path} of batch {i}", detail)

    def _is_one_column(self, columns: Sequence[Any]) -> bool:
        """Whether rows are chosen from one column, so that nothing is joined."""
        return len(columns) == 1 and self.chosen is not None

    def _check_extent(self, rows: int, cell: Sequence[int], itemsize: int, path: str) -> None:
        """Refuse a result whose sizes int64 cannot hold, before and after rows are chosen."""
        most = max(rows, 0 if self.chosen is None else len(self.chosen))
        check_extent((most, *cell), itemsize, path)

    # Objects

    def _pick_items(self, items: Iterable[Any]) -> list[Any]:
        listed = list(items)
        return listed if self.chosen is None else [listed[i] for i in self.chosen]

    def join_lists(self, columns: Sequence[HeldColumn], path: str) -> list[Any]:
        return self._pick_items(itertools.chain.from_iterable(list.copy(x.value) for x in columns))

    def join_arrays(self, columns: Sequence[HeldColumn], path: str) -> Any:
        _check_each(columns, path)
        return self._join_checked_arrays([column.value for column in columns], path)

    def _join_checked_arrays(self, leaves: Sequence[Any], path: str) -> Any:
        whole, one = leaves[0], self._is_one_column(leaves)
        if not one:
            # Arrays of texts may differ in length: the result has the longest.
            kinds = [
                x.dtype.kind if x.dtype.kind in "US" else x.dtype.newbyteorder("=") for x in leaves
            ]
            _check_equal(kinds, "dtype", path, _CONVERT)
            _check_equal([leaf.shape[1:] for leaf in leaves], "row shape", path)
            whole = max((leaves[self.model], *leaves), key=operator.attrgetter("dtype.itemsize"))
        self._check_extent(sum(map(len, leaves)), whole.shape[1:], whole.itemsize, path)
        if one:
            return whole[_indexer(self.chosen)]
        if self.chosen is None:
            return np.concatenate(leaves, dtype=whole.dtype)
        return self._plan_rows_of_arrays(leaves, whole)

    def _plan_rows_of_arrays(self, leaves: Sequence[Any], like_array: Any) -> Any:
        """The chosen rows of several arrays."""
        dtype, inner, chosen = like_array.dtype, like_array.shape[1:], self.chosen
        plain = not dtype.hasobject and all(
            leaf.dtype == dtype and leaf.flags.c_contiguous and leaf.nbytes for leaf in leaves
        )
        if not plain or chosen is None:
            return np.concatenate(leaves, dtype=dtype)[_indexer(chosen)]
        rows, ones = self._rows_as_cells(chosen)
        cell = like_array.itemsize * math.prod(inner)
        view = in_buffers(_as_buffers(leaves), torch.uint8, (cell,), rows * cell, ones)
        sizes = (len(rows), *inner)
        return InPlace(view, lambda cells: cells.numpy().reshape(-1).view(dtype).reshape(sizes))

    def join_unbatched(self, columns: Sequence[HeldColumn], path: str) -> Any:
        tensors = [non_tensor.unbatched_parts(column.value)[1] for column in columns]
        remedy = "make it a column with a row for each"
        return non_tensor.unbatched_of(
            None, self._require_same(tensors, "UnbatchedTensor", remedy, path)
        )

    def join_payloads(self, columns: Sequence[HeldColumn], path: str) -> Any:
        leaves = [column.value for column in columns]
        first = leaves[0]
        rest = [tuple(leaf.batch_size[1:]) for leaf in leaves]
        _check_equal(rest, "batch dims after the first", path)
        arrays = [non_tensor.array_of_leaf(leaf) for leaf in leaves]
        if all(array is not None for array in arrays):
            joined = _filled({"": self.join_arrays([*map(column_of, arrays)], path)})[""]
            return NonTensorData(joined, batch_size=[len(joined), *rest[0]])
        whole = not any(map(non_tensor.is_stack, leaves)) and all(x is None for x in arrays)
        if whole and (len(leaves) == 1 or all(self.same(first.data, x.data) for x in leaves)):
            return type(first)(first.data, batch_size=[self._total_rows(leaves, path), *rest[0]])
        if rest[0]:
            detail = (
                "expected objects of one batch dim, found a stack of several; flatten the batch"
            )
            raise ArgumentError("bad_option", path, detail)
        payloads = (column.objects() or () for column in columns)
        return non_tensor.leaf_of_rows(self._pick_items(itertools.chain.from_iterable(payloads)))

    # Cells

    def join_packed(self, columns: Sequence[HeldColumn], path: str) -> Any:
        views: list[Any] = [column.view(path, self.pool, detach=False) for column in columns]

        def wrap(values: torch.Tensor, row_splits: RowSplits, dim: int) -> Any:
            return varlen_column(end_to_end(values, row_splits, dim), path)

        return self._plan_views(views, path, wrap, lambda splits: check_size(splits.total, path))

    def join_tensors(self, columns: Sequence[Any], path: str) -> Any:
        _check_each(columns, path)
        leaves = [column.value for column in columns]
        kind = type(columns[0])
        if len(columns) > 1:
            if kind is Sparse or any(type(column) is not kind for column in columns):
                _check_equal([column.layout_name for column in columns], "layout", path, _PACK)
            _check_equal([leaf.dtype for leaf in leaves], "dtype", path, _CONVERT)
            _check_equal([leaf.device for leaf in leaves], "device", path)
        if kind is Jagged:
            views = [column.view(path, self.pool, detach=False) for column in columns]
            return self._plan_views(views, path, nested_tensor)
        if kind is StridedNested:
            return self._join_strided_nested(leaves, path)
        if len(columns) > 1:
            shapes = [leaf.shape[1:] for leaf in leaves]
            if shapes.count(shapes[0]) < len(shapes):
                _check_equal([*map(tuple, shapes)], "row shape", path, _PACK)
        if kind is Dense:
            return self._join_dense(leaves, path)
        detail = (
            f"expected a column whose rows can be chosen and joined, found a {leaves[0].layout}; "
            "call .to_dense() or select the others"
        )
        raise ArgumentError("bad_option", path, detail)

    def _join_dense(self, leaves: Sequence[torch.Tensor], path: str) -> Any:
        first, chosen = leaves[0], self.chosen
        rows = sum([leaf.shape[0] for leaf in leaves])
        self._check_extent(rows, first.shape[1:], first.itemsize, path)
        if len(leaves) == 1 and isinstance(chosen, range):
            return _slice_of(first, chosen, path)
        arrays = []
        for i, leaf in enumerate(leaves):
            arrays.append(array_in_storage(leaf))
            if arrays[i] is None:
                check_memory(leaf, f"{path} of batch {i}" if i else path)
                arrays[i] = _rows_in_order(leaf)
        if all(array is not None for array in arrays):
            return InPlace(self._view_of_arrays(arrays, first), _unwrapped)
        whole = first if self._is_one_column(leaves) else cat_bits(leaves, 0)
        if isinstance(chosen, range):
            return _slice_of(whole, chosen, path)
        return whole if chosen is None else take_rows(whole, chosen)

    def _view_of_arrays(self, arrays: Sequence[Any], like_tensor: torch.Tensor) -> RaggedView:
        """The wanted rows of arrays in order: each row is a cell."""
        inner, dtype = like_tensor.shape[1:], like_tensor.dtype
        cell = inner.numel() * dtype.itemsize
        if self.chosen is None:
            splits = RowSplits.from_counts(tuple(map(len, arrays)))
            return in_buffers(_as_buffers(arrays), dtype, inner, splits.starts * cell, splits)
        rows, ones = self._rows_as_cells(self.chosen)
        if len(arrays) == 1:
            return RaggedView(arrays[0], dtype, (len(arrays[0]), *inner), 1, rows, ones)
        return in_buffers(_as_buffers(arrays), dtype, inner, rows * cell, ones)

    def _rows_as_cells(self, chosen: Chosen) -> tuple[IntArray, RowSplits]:
        """The numbers of the chosen rows, and their row splits if each row is one cell."""
        if self._cells is None:
            rows = np.arange(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
            self._cells = rows, RowSplits.from_lengths(np.ones(len(rows), np.int64))
        return self._cells

    def _join_strided_nested(self, leaves: Sequence[torch.Tensor], path: str) -> Any:
        for leaf in leaves:
            check_memory(leaf, path)
        parts = [strided_parts(leaf) for leaf in leaves if leaf.size(0)]
        if not parts:
            return leaves[0]
        _check_equal([shapes.shape[1] for _, shapes in parts], "number of dims", path)
        views = [
            end_to_end(values, RowSplits.from_lengths(shapes.prod(axis=1)))
            for values, shapes in parts
        ]
        shapes = np.concatenate([shapes for _, shapes in parts])
        if self.chosen is not None:
            shapes = shapes[_indexer(self.chosen)]
        return self._plan_views(views, path, lambda values, *_: strided_nested(values, shapes))

    # Views

    def _plan_views(
        self,
        views: Sequence[RaggedView],
        path: str,
        wrap: Callable[[torch.Tensor, RowSplits, int], Any],
        check: Callable[[RowSplits], None] = lambda _: None,
    ) -> Any:
        """The wanted rows of views, end to end, as `wrap` makes a column of them."""
        dim = views[0].ragged_dim
        if self._is_one_column(views):
            view = self.in_place(views[0], path)
            row_splits = view.row_splits
        else:
            self.check_alike(views, path)
            row_splits = self.pool.joined([view.row_splits for view in views])
            inner = views[0].cell_bytes > 0 and dim == 1
            if inner and all(view.uses_row_kernel for view in views):
                if self.chosen is not None:
                    row_splits = self.picked(row_splits, views[0], path)
                view = _in_buffers_of(views, self.chosen, row_splits)
            else:
                view = self.concat(views, path)
                if self.chosen is not None:
                    view = self.in_place(view, path)
                    row_splits = view.row_splits
        check(row_splits)
        if view.is_end_to_end:
            return wrap(values_of(view), row_splits, dim)
        return InPlace(view, lambda values: wrap(values, row_splits, dim))

    def check_alike(self, views: Sequence[RaggedView], path: str) -> None:
        """Refuse views whose rows cannot be joined."""
        view = views[0]
        _check_equal([each.dtype for each in views], "dtype", path, _CONVERT)
        _check_equal([device_of(each) for each in views], "device", path)
        _check_equal([each.ragged_dim for each in views], "ragged dim", path, _RAGGED)
        dim = view.ragged_dim
        inner = [(*each.shape[: dim - 1], *each.shape[dim:]) for each in views]
        _check_equal(inner, "row shape", path, _RAGGED)
        total = sum(each.row_splits.total for each in views)
        check_extent((total, *inner[0]), view.dtype.itemsize, path)

    def concat(self, views: Sequence[RaggedView], path: str) -> RaggedView:
        """The rows of views of tensors, end to end, joined by torch."""
        dim = views[0].ragged_dim
        values = cat_bits([values_of(each) for each in views], dim - 1)
        return end_to_end(values, self.pool.joined([each.row_splits for each in views]), dim)

    def picked(self, row_splits: RowSplits, view: RaggedView, path: str) -> RowSplits:
        """The row splits of the chosen rows of a view, or of views like it."""
        known = self._picked.get(id(row_splits))
        dim = view.ragged_dim
        if known is None:
            lengths = row_splits.lengths[_indexer(self.chosen)]
            shape = (*view.shape[: dim - 1], total_of(lengths), *view.shape[dim:])
            check_extent(shape, view.dtype.itemsize, path)
            found = self.pool.unique(RowSplits.from_lengths(lengths))
            self._picked[id(row_splits)] = row_splits, found
            return found
        shape = (*view.shape[: dim - 1], known[1].total, *view.shape[dim:])
        check_extent(shape, view.dtype.itemsize, path)
        return known[1]

    def in_place(self, view: RaggedView, path: str) -> RaggedView:
        """The chosen rows of a view in place. A range that can be aliased becomes end to end."""
        row_splits, chosen = self.picked(view.row_splits, view, path), self.chosen
        memory: Any = view.memory
        if isinstance(chosen, range) and view.is_end_to_end and view.ragged_dim == 1:
            first = int(view.row_splits.offsets_array[chosen.start])
            if view.is_tensor and memory.is_contiguous():
                return end_to_end(memory[first : first + row_splits.total], row_splits)
        rows: Any = _indexer(chosen)
        return view.choose(rows, row_splits)

    # Batches

    def join_tensorclasses(self, columns: Sequence[HeldColumn], path: str) -> Any:
        leaves = [column.value for column in columns]
        _check_equal([type(leaf).__name__ for leaf in leaves], "tensorclass", path)
        fields, others = zip(*map(non_tensor.fields_of, leaves), strict=True)
        remedy = "make such fields NonTensorStacks, with a value for each row"
        rest = self._require_same(others, f"{brief(others[0])} next to its tensors", remedy, path)
        return non_tensor.tensorclass_of(type(leaves[0]), self.joined(fields, path), rest)

    def join_batches(self, columns: Sequence[InnerBatch], path: str) -> Any:
        """Batches with the same columns: join each column, in the order of the first batch."""
        if any(isinstance(column, LazyStack) for column in columns):
            raise ArgumentError("bad_option", path, LAZY_STACK)
        batches = [dict(column.items()) for column in columns]
        model, rows = columns[self.model], 0
        if not isinstance(model, DictBatch):
            sizes = [
                () if isinstance(x, DictBatch) else tuple(x.value.batch_size[1:]) for x in columns
            ]
            _check_equal(sizes, "batch dims after the first", path)
            rows = self._total_rows([column.value for column in columns], path)
        names = require_same_names(enumerate(map(list, batches)), path)
        planned: dict[str, Any] = dict.fromkeys(names)
        jagged: set[str] = set()
        if self._is_one_column(columns):  # faults of jagged columns are found first
            jagged = {n for n in names if isinstance(column_of(batches[0][n]), Jagged)}
        for name in (*(n for n in names if n in jagged), *(n for n in names if n not in jagged)):
            leaf_path = f"{path}[{name!r}]"
            planned[name] = self.plan([batch[name] for batch in batches], leaf_path)
        return like(model.value, _filled(planned), rows)

    def _total_rows(self, leaves: Sequence[Any], path: str) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        rows = sum(row_count(leaf, "") or 0 for leaf in leaves)
        check_extent([rows], 1, path)
        return rows

    def _require_same(self, values: Sequence[Any], expected: str, remedy: str, path: str) -> Any:
        """The value of whole batches, which all must have the same; an error otherwise."""
        for i, value in enumerate(values[1:], 1):
            if not self.same(values[0], value):
                detail = f"expected {expected} for all rows, as in batch 0, found another; {remedy}"
                raise ArgumentError("conflict", f"{path} of batch {i}", detail)
        return values[0]


_Join: TypeAlias = Callable[[_RowJoiner, Sequence[Any], str], Any]

_JOIN_OF_KIND: dict[type[HeldColumn], _Join] = {
    **dict.fromkeys((Dense, Sparse, StridedNested, Jagged), _RowJoiner.join_tensors),
    **dict.fromkeys((DictBatch, TensorDictBatch, LazyStack), _RowJoiner.join_batches),
    Unbatched: _RowJoiner.join_unbatched,
    Array: _RowJoiner.join_arrays,
    ObjectList: _RowJoiner.join_lists,
    Packed: _RowJoiner.join_packed,
    Payloads: _RowJoiner.join_payloads,
    TensorClass: _RowJoiner.join_tensorclasses,
}
"""How rows of each kind of column are joined and chosen."""


def _filled(planned: dict[str, Any]) -> dict[str, Any]:
    """Planned columns, with one copy of the rows of all that wait for it."""
    waiting = {name: made for name, made in planned.items() if type(made) is InPlace}
    if waiting:
        values = gathered(made.view for made in waiting.values())
        for (name, made), cells in zip(waiting.items(), values, strict=True):
            planned[name] = made.make(cells)
    return planned


def _unwrapped(values: torch.Tensor) -> torch.Tensor:
    return values


def _rows_in_order(tensor: torch.Tensor) -> Any:
    """Rows on the host, of a dtype that numpy lacks, as an array of them; None for others."""
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.requires_grad
    if not plain or not tensor.is_contiguous() or not tensor.numel():
        return None
    return as_bytes(tensor).reshape(len(tensor), -1)


def _as_buffers(arrays: Iterable[Any]) -> list[Any]:
    return [array.reshape(-1).view(np.uint8) for array in arrays]


def _in_buffers_of(
    views: Sequence[RaggedView], chosen: Chosen | None, row_splits: RowSplits
) -> RaggedView:
    """The wanted rows of views of CPU cells, in the buffers of all of them.

    `row_splits` has the wanted rows. If all are wanted and end to end, each view is one run.
    """
    first = views[0]
    dtype, inner, cell = first.dtype, first.shape[1:], first.cell_bytes
    buffers = [view.host_bytes() for view in views]
    together = [*itertools.chain.from_iterable(buffers)]
    if chosen is None and all(view.is_end_to_end for view in views):
        runs = RowSplits.from_counts(tuple(view.row_splits.total for view in views))
        return in_buffers(together, dtype, inner, runs.starts * cell, runs)
    sizes = (sum(map(len, parts)) for parts in buffers)
    begins = itertools.accumulate(sizes, initial=0)
    starts: IntArray = np.concatenate(
        [view.row_starts() * view.unit_bytes + begin for view, begin in zip(views, begins)]  # noqa: B905
    )
    wanted = starts if chosen is None else starts[_indexer(chosen)]
    return in_buffers(together, dtype, inner, wanted, row_splits)


def _indexer(chosen: Any) -> Any:
    return slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen


_PACK = "; pack per-token columns first: pack_jagged_fields(columns, lengths=...)"
_RAGGED = "; if tokens are along dim 2 of the column, pass ragged_dims={...: 2} to encode_rows"
_CONVERT = "; convert the column, or pass its dtype to encode_rows in every process (dtypes=)"


def _slice_of(tensor: torch.Tensor, chosen: range, path: str) -> torch.Tensor:
    try:
        return tensor[chosen.start : chosen.stop]
    except RuntimeError:  # rare: the tensor may lack memory
        check_memory(tensor, path)
        raise


def _check_each(columns: Sequence[HeldColumn], path: str) -> None:
    for i, column in enumerate(columns):
        if type(column.value) not in COLUMN_TYPES:
            column.check(f"{path} of batch {i}" if i else path)


def _check_equal(found: Sequence[Any], what: str, path: str, remedy: str = "") -> None:
    if found.count(found[0]) == len(found):
        return
    for i, value in enumerate(found):
        if value != found[0]:
            detail = f"expected {what} {found[0]} like batch 0, found {value}{remedy}"
            raise ArgumentError("bad_shape", f"{path} of batch {i}", detail)
