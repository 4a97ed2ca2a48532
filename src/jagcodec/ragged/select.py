"""Rows of columns, counted, joined and chosen: tensors of every layout, objects, batches.

This module does not use tensordict to choose or join rows, because its releases differ: below 0.15,
it cannot choose or join rows of jagged leaves.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)

from jagcodec._arguments import mapping_of
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, brief
from jagcodec.memory.extents import check_extent, total_of
from jagcodec.memory.tensor_bytes import cat_bits
from jagcodec.ragged import non_tensor
from jagcodec.ragged.copy_rows import gathered, take_rows, values_of
from jagcodec.ragged.forms import like, like_column
from jagcodec.ragged.nested import (
    check_column,
    check_memory,
    is_jagged,
    nested_tensor,
    rows_in,
    strided_nested,
    strided_parts,
    view_of,
)
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, check_varlen, varlen_column, view_of_varlen
from jagcodec.ragged.views import RaggedView, end_to_end

LAZY_STACK = (
    "expected a TensorDict, found a lazy stack, whose rows may differ in keys and shapes; call "
    ".contiguous() on it, or make columns of its rows with stack_or_nest"
)


def row_count(column: Any, path: str) -> int | None:
    """N, for any column; None if any N fits, as for a dict without columns."""
    if isinstance(column, dict):
        return row_counts(column, path)
    if isinstance(column, list):
        return list.__len__(column)  # a subclass may report another length
    if isinstance(column, UnbatchedTensor):
        return None
    if is_jagged(column):
        return rows_in(column)
    sizes: Sequence[int] = ()
    check_column(column, path)
    if isinstance(column, torch.Tensor):
        sizes = (column.size(0),) if column.is_nested else column.shape
    elif isinstance(column, PackedColumn):
        check_varlen(column, path)
        sizes = (len(column.cu_seqlens) - 1,)
    elif isinstance(column, np.ndarray):
        sizes = column.shape
    elif isinstance(column, TensorDictBase) or is_tensorclass(column):  # or NonTensorData
        sizes = non_tensor.sizes_of_batch(column)
    if not sizes:
        raise not_a_column(column, path)
    return int(sizes[0])


def row_counts(columns: Mapping[str, Any], path: str) -> int | None:
    """N of a dict of columns, which must all have N rows; None if no column has rows."""
    rows: int | None = None
    if type(columns).items is not dict.items:  # a subclass may return other items
        columns = mapping_of(columns, path, "a dict of columns")
    for name, column in columns.items():
        found = row_count(column, f"{path}[{name!r}]")
        rows = found if rows is None else rows
        if found not in (None, rows):
            detail = f"expected {rows} rows like the columns before it, found {found}"
            raise ArgumentError("row_mismatch", f"{path}[{name!r}]", detail)
    return rows


def select_leaf(leaf: Any, chosen: Chosen, pool: RowSplitsPool, path: str) -> Any:
    """Chosen rows of a column or a batch. A range of a tensor is a slice; all else is copied."""
    return _RowJoiner(chosen, pool, operator.is_, 0).of([leaf], path)


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
    return _RowJoiner(chosen, pool, same, model).of(leaves, path)


def join_views(
    views: Sequence[RaggedView], chosen: Chosen | None, pool: RowSplitsPool, path: str
) -> RaggedView:
    """What `join_leaves` does, for rows in memory that must not be changed, such as a message's."""
    moved = [
        end_to_end(values, view.row_splits, view.ragged_dim)
        for values, view in zip(gathered(views), views, strict=True)
    ]
    return _RowJoiner(chosen, pool, operator.is_, 0)._join_views(moved, path)


class _RowJoiner(NamedTuple):
    """Chooses and joins rows: which rows are wanted, and how values of whole batches compare."""

    chosen: Chosen | None  # None means all rows
    pool: RowSplitsPool
    same: Callable[[Any, Any], bool]
    model: int  # the column, or batch, that others are made like

    def of(self, leaves: Sequence[Any], path: str) -> Any:
        kinds = list(map(_kind_of_column, leaves))
        kind = kinds[self.model]
        if any(other is not kind for other in kinds):
            leaves = [self._like_model(leaf, leaves, i, path) for i, leaf in enumerate(leaves)]
        if kind is None:
            raise not_a_column(leaves[0], path)
        return _JOIN_OF_KIND[kind](self, leaves, path)

    def _like_model(self, leaf: Any, leaves: Sequence[Any], i: int, path: str) -> Any:
        """A column in the form of the model, if that can hold the same; an error otherwise."""
        model = leaves[self.model]
        kind, wanted = _kind_of_column(leaf), _kind_of_column(model)
        if kind is wanted:
            return leaf
        if kind is None or wanted is None:
            raise not_a_column(leaf if kind is None else model, f"{path} of batch {i}")
        found: Any = like_column(leaf, model, path)
        if found is not None:
            return found
        other = leaves[0] if i else model
        found = f"{type(other).__name__} and {type(leaf).__name__}; convert one of them"
        detail = f"expected one kind of column in all batches, found {found}"
        raise ArgumentTypeError("bad_type", f"{path} of batch {i}", detail)

    def _is_one_column(self, leaves: Sequence[Any]) -> bool:
        """Whether rows are chosen from one column, so that nothing is joined."""
        return len(leaves) == 1 and self.chosen is not None

    def _check_extent(self, rows: int, cell: Sequence[int], itemsize: int, path: str) -> None:
        """Refuse a result whose sizes int64 cannot hold, before and after rows are chosen."""
        most = max(rows, 0 if self.chosen is None else len(self.chosen))
        check_extent((most, *cell), itemsize, path)

    def _pick_items(self, items: Iterable[Any]) -> list[Any]:
        listed = list(items)
        return listed if self.chosen is None else [listed[i] for i in self.chosen]

    def _join_lists(self, leaves: Sequence[list[Any]], path: str) -> list[Any]:
        return self._pick_items(itertools.chain.from_iterable(map(list.copy, leaves)))

    def _join_arrays(self, leaves: Sequence[Any], path: str) -> Any:
        _check_each(leaves, path)
        whole = leaves[0]
        if not self._is_one_column(leaves):
            # Arrays of texts may differ in length: the result has the longest.
            kinds = [
                x.dtype.kind if x.dtype.kind in "US" else x.dtype.newbyteorder("=") for x in leaves
            ]
            _check_equal(kinds, "dtype", path, _CONVERT)
            _check_equal([leaf.shape[1:] for leaf in leaves], "row shape", path)
            whole = max((leaves[self.model], *leaves), key=operator.attrgetter("dtype.itemsize"))
        self._check_extent(sum(map(len, leaves)), whole.shape[1:], whole.itemsize, path)
        if not self._is_one_column(leaves):
            whole = np.concatenate(leaves, dtype=whole.dtype)
        return whole if self.chosen is None else whole[_indexer(self.chosen)]

    def _join_unbatched(self, leaves: Sequence[Any], path: str) -> Any:
        tensors = [non_tensor.unbatched_parts(leaf)[1] for leaf in leaves]
        remedy = "make it a column with a row for each"
        return non_tensor.unbatched_of(
            None, self._require_same(tensors, "UnbatchedTensor", remedy, path)
        )

    def _join_packed(self, leaves: Sequence[PackedColumn], path: str) -> PackedColumn:
        views = [view_of_varlen(leaf, path, self.pool) for leaf in leaves]
        return varlen_column(self._join_views(views, path), path)

    def _join_views(self, views: Sequence[RaggedView], path: str) -> RaggedView:
        """The rows of several views, end to end."""
        view = views[0]
        if not self._is_one_column(views):
            _check_equal([each.dtype for each in views], "dtype", path, _CONVERT)
            _check_equal([each.device for each in views], "device", path)
            _check_equal([each.ragged_dim for each in views], "ragged dim", path, _RAGGED)
            dim = view.ragged_dim
            inner = [(*each.shape[: dim - 1], *each.shape[dim:]) for each in views]
            _check_equal(inner, "row shape", path, _RAGGED)
            total = sum(each.row_splits.total for each in views)
            check_extent((total, *inner[0]), view.dtype.itemsize, path)
            values = cat_bits([values_of(each) for each in views], dim - 1)
            row_splits = self.pool.joined([each.row_splits for each in views])
            view = end_to_end(values, row_splits, dim)
        return (
            view if self.chosen is None else _select_end_to_end(view, self.chosen, self.pool, path)
        )

    def _join_tensors(self, leaves: Sequence[torch.Tensor], path: str) -> torch.Tensor:
        first, chosen = leaves[0], self.chosen
        _check_each(leaves, path)
        if len(leaves) > 1:
            _check_equal([_layout_kind(leaf) for leaf in leaves], "layout", path, _PACK)
            _check_equal([leaf.dtype for leaf in leaves], "dtype", path, _CONVERT)
            _check_equal([leaf.device for leaf in leaves], "device", path)
        if is_jagged(first):
            views = [view_of(leaf, path, self.pool, detach=False) for leaf in leaves]
            view = self._join_views(views, path)
            return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
        if first.is_nested:
            return self._join_strided_nested(leaves, path)
        if len(leaves) > 1:
            _check_equal([tuple(leaf.shape[1:]) for leaf in leaves], "row shape", path, _PACK)
        if first.layout is torch.strided:
            self._check_extent(sum(map(len, leaves)), first.shape[1:], first.itemsize, path)
            if isinstance(chosen, range) and len(leaves) == 1:
                return _slice_of(first, chosen, path)
            for i, leaf in enumerate(leaves):
                check_memory(leaf, f"{path} of batch {i}" if i else path)
            whole = first if self._is_one_column(leaves) else cat_bits(leaves, 0)
            if isinstance(chosen, range):
                return _slice_of(whole, chosen, path)
            return whole if chosen is None else take_rows(whole, chosen)
        detail = (
            f"expected a column whose rows can be chosen and joined, found a {first.layout}; "
            "call .to_dense() or select the others"
        )
        raise ArgumentError("bad_option", path, detail)

    def _join_strided_nested(self, leaves: Sequence[torch.Tensor], path: str) -> torch.Tensor:
        for leaf in leaves:
            check_memory(leaf, path)
        parts = [strided_parts(leaf) for leaf in leaves if leaf.size(0)]
        if not parts:
            return leaves[0]
        _check_equal([shapes.shape[1] for _, shapes in parts], "number of dims", path)
        sizes = [shapes.prod(axis=1) for _, shapes in parts]
        views = [
            end_to_end(values, RowSplits.from_lengths(each))
            for (values, _), each in zip(parts, sizes, strict=True)
        ]
        shapes = np.concatenate([shapes for _, shapes in parts])
        if self.chosen is not None:
            shapes = shapes[_indexer(self.chosen)]
        return strided_nested(values_of(self._join_views(views, path)), shapes)

    def _join_objects(self, leaves: Sequence[Any], path: str) -> Any:
        first = leaves[0]
        rest = [tuple(leaf.batch_size[1:]) for leaf in leaves]
        _check_equal(rest, "batch dims after the first", path)
        arrays = [non_tensor.array_of_leaf(leaf) for leaf in leaves]
        if all(array is not None for array in arrays):
            joined = self._join_arrays(arrays, path)
            return NonTensorData(joined, batch_size=[len(joined), *rest[0]])
        stacks = [isinstance(leaf, NonTensorStack) for leaf in leaves]
        whole = not any(stacks) and all(array is None for array in arrays)
        if whole and (len(leaves) == 1 or all(self.same(first.data, x.data) for x in leaves)):
            return type(first)(first.data, batch_size=[self._total_rows(leaves, path), *rest[0]])
        if rest[0]:
            detail = (
                "expected objects of one batch dim, found a stack of several; flatten the batch"
            )
            raise ArgumentError("bad_option", path, detail)
        payloads = (non_tensor.rows_of_leaf(leaf, leaf.batch_size[0]) for leaf in leaves)
        items = self._pick_items(itertools.chain.from_iterable(payloads))
        return non_tensor.leaf_of_rows(items)

    def _join_tensorclasses(self, leaves: Sequence[Any], path: str) -> Any:
        _check_equal([type(leaf).__name__ for leaf in leaves], "tensorclass", path)
        fields, others = zip(*map(non_tensor.fields_of, leaves), strict=True)
        remedy = "make such fields NonTensorStacks, with a value for each row"
        rest = self._require_same(others, f"{brief(others[0])} next to its tensors", remedy, path)
        return non_tensor.tensorclass_of(type(leaves[0]), self.of(fields, path), rest)

    def _join_batches(self, leaves: Sequence[Any], path: str) -> Any:
        """Batches with the same columns: join each column, in the order of the first batch."""
        if any(isinstance(leaf, LazyStackedTensorDict) for leaf in leaves):
            raise ArgumentError("bad_option", path, LAZY_STACK)
        batches = [dict(leaf.items()) for leaf in leaves]
        model, rows = leaves[self.model], 0
        if not isinstance(model, dict):
            sizes = [() if isinstance(x, dict) else tuple(x.batch_size[1:]) for x in leaves]
            _check_equal(sizes, "batch dims after the first", path)
            rows = self._total_rows(leaves, path)
        names = require_same_names(enumerate(map(list, batches)), path)
        columns = self._choose_jagged(batches[0], path) if self._is_one_column(leaves) else {}
        for name in names:
            if name not in columns:
                leaf_path = f"{path}[{name!r}]"
                columns[name] = self.of([batch[name] for batch in batches], leaf_path)
        return like(model, {name: columns[name] for name in names}, rows)

    def _choose_jagged(self, columns: Mapping[str, Any], path: str) -> dict[str, Any]:
        """The chosen rows of the jagged columns of one batch, copied in one call."""
        views: dict[str, RaggedView] = {}
        for name, column in columns.items():
            if is_jagged(column):
                leaf_path = f"{path}[{name!r}]"
                view = view_of(column, leaf_path, self.pool, detach=False)
                views[name] = select_in_place(view, self.chosen, self.pool, leaf_path)
        scattered = {name: view for name, view in views.items() if view.starts is not None}
        values = dict(zip(scattered, gathered(scattered.values()), strict=True))
        found = {}
        for name, view in views.items():
            cells = values[name] if name in values else values_of(view)
            found[name] = nested_tensor(cells, view.row_splits, view.ragged_dim)
        return found

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


_JOIN_OF_KIND: dict[Any, Callable[[_RowJoiner, Sequence[Any], str], Any]] = {
    UnbatchedTensor: _RowJoiner._join_unbatched,
    torch.Tensor: _RowJoiner._join_tensors,
    dict: _RowJoiner._join_batches,
    np.ndarray: _RowJoiner._join_arrays,
    list: _RowJoiner._join_lists,
    PackedColumn: _RowJoiner._join_packed,
    TensorDictBase: _RowJoiner._join_batches,
    NonTensorData: _RowJoiner._join_objects,
    is_tensorclass: _RowJoiner._join_tensorclasses,
}
"""How rows of each kind of column are joined and chosen."""

_TYPES = tuple(kind for kind in _JOIN_OF_KIND if isinstance(kind, type))


def _kind_of_column(leaf: Any) -> Any:
    """The key of a column in `_JOIN_OF_KIND`; None if it is not a column."""
    if non_tensor.is_non_tensor(leaf):
        return NonTensorData
    known = next((kind for kind in _TYPES if isinstance(leaf, kind)), None)
    tensorclass = known in (None, TensorDictBase) and is_tensorclass(leaf)
    return is_tensorclass if tensorclass else known


def _indexer(chosen: Chosen) -> Any:
    return slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen


def _layout_kind(leaf: torch.Tensor) -> str:
    return "jagged" if is_jagged(leaf) else "nested" if leaf.is_nested else str(leaf.layout)


_PACK = "; pack per-token columns first: pack_jagged_fields(columns, lengths=...)"
_RAGGED = "; if tokens are along dim 2 of the column, pass ragged_dims={...: 2} to encode_rows"
_CONVERT = "; convert the column, or pass its dtype to encode_rows in every process (dtypes=)"


def _slice_of(tensor: torch.Tensor, chosen: range, path: str) -> torch.Tensor:
    try:
        return tensor[chosen.start : chosen.stop]
    except RuntimeError:  # rare: the tensor may lack memory
        check_memory(tensor, path)
        raise


def _check_each(leaves: Sequence[Any], path: str) -> None:
    for i, leaf in enumerate(leaves):
        check_column(leaf, f"{path} of batch {i}" if i else path)


def _check_equal(found: Sequence[Any], what: str, path: str, remedy: str = "") -> None:
    for i, value in enumerate(found):
        if value != found[0]:
            detail = f"expected {what} {found[0]} like batch 0, found {value}{remedy}"
            raise ArgumentError("bad_shape", f"{path} of batch {i}", detail)


def not_a_column(column: Any, path: str) -> ArgumentTypeError:
    """The error for a leaf without rows."""
    detail = "expected a column of N rows (a tensor, an array, a list, a PackedColumn, or a dict of"
    detail += f" columns), found {type(column).__name__}; put values of the batch into meta_info, "
    detail += "or meta= of encode"
    return ArgumentTypeError("bad_type", path, detail)


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


def _select_end_to_end(
    view: RaggedView, chosen: Chosen, pool: RowSplitsPool, path: str
) -> RaggedView:
    """Chosen rows of a jagged column, end to end; aliased or copied as `select_leaf` does it."""
    picked = select_in_place(view, chosen, pool, path)
    return end_to_end(values_of(picked), picked.row_splits, picked.ragged_dim)


def select_in_place(view: RaggedView, chosen: Any, pool: RowSplitsPool, path: str) -> RaggedView:
    """Chosen rows of a jagged column in place. A range that can be aliased becomes end to end."""
    rows, dim = _indexer(chosen), view.ragged_dim
    lengths = view.row_splits.lengths[rows]
    shape = (*view.shape[: dim - 1], total_of(lengths), *view.shape[dim:])
    check_extent(shape, view.dtype.itemsize, path)
    row_splits = pool.unique(RowSplits.from_lengths(lengths))
    memory = view.memory
    in_order = view.starts is None and view.ragged_dim == 1
    if in_order and isinstance(chosen, range) and isinstance(memory, torch.Tensor):
        first = int(view.row_splits.offsets_array[chosen.start])
        if memory.is_contiguous():
            return end_to_end(memory[first : first + row_splits.total], row_splits)
    return view.choose(rows, row_splits)
