"""Columns of every kind: count their rows, put them together, move them.

Leaves of a TensorDict and columns of a `BatchedDataDict` alike. What tensordict can do with them
depends on its release (below 0.15 nothing with jagged leaves), so nothing here asks it to.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)

from jagcodec.batch.compare import same_values
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, brief
from jagcodec.memory.tensor_bytes import as_words, cat_bits, from_words
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import (
    is_jagged,
    nested_tensor,
    strided_nested,
    strided_parts,
    view_of,
)
from jagcodec.ragged.non_tensor import (
    fields_of,
    holds_rows,
    is_non_tensor,
    leaf_of_rows,
    object_array,
    rows_of_leaf,
    tensorclass_of,
    unbatched_of,
    unbatched_parts,
)
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.select import like, members_of_stack, not_a_column, sparse_rows, stack_like
from jagcodec.ragged.varlen import PackedColumn, varlen_column, view_of_varlen
from jagcodec.ragged.views import RaggedView, end_to_end


def row_count(column: Any, path: str) -> int | None:
    """N, for any column; None for a dict without columns, which has any number of rows.

    Raises:
        ArgumentTypeError: It is not a column.
    """
    if isinstance(column, torch.Tensor):
        if column.is_nested or column.dim():
            return int(column.size(0))
    elif isinstance(column, PackedColumn):
        return len(column.cu_seqlens) - 1
    elif isinstance(column, TensorDictBase) or is_non_tensor(column):
        if len(column.batch_size):
            return int(column.batch_size[0])
    elif isinstance(column, np.ndarray):
        if column.ndim:
            return len(column)
    elif isinstance(column, list):
        return len(column)
    elif isinstance(column, dict):
        return row_counts(column, path)
    raise not_a_column(column, path)


def row_counts(columns: Mapping[str, Any], path: str) -> int | None:
    """N of a dict of columns; None if it is empty.

    Raises:
        ArgumentError: They have not all as many rows.
        ArgumentTypeError: One is not a column.
    """
    rows: int | None = None
    for name, column in columns.items():
        found = row_count(column, f"{path}[{name!r}]")
        rows = found if rows is None else rows
        if found not in (None, rows):
            raise ArgumentError(
                "row_mismatch",
                f"{path}[{name!r}]",
                f"expected {rows} rows like the columns before it, found {found}",
            )
    return rows


def lengths_of_columns(columns: Any, path: str) -> dict[str, Any]:
    """(N,) row lengths of the jagged and packed ones among columns."""
    pool, found = RowSplitsPool(), {}
    for name, column in columns.items():
        if isinstance(column, PackedColumn):
            found[name] = view_of_varlen(column, f"{path}[{name!r}]").row_splits.lengths
        elif is_jagged(column):
            found[name] = view_of(column, f"{path}[{name!r}]", pool).row_splits.lengths
    return found


# --- putting together --------------------------------------------------------------------------


def concat_leaves(leaves: Sequence[Any], pool: RowSplitsPool, path: str) -> Any:
    """The rows of one column of several batches, one batch after the other. Copied once.

    Raises:
        ArgumentError: They differ in dtype, device, layout or the shape of a row, or their rows
            cannot be put together.
        ArgumentKeyError: Nested batches do not have the same columns.
        ArgumentTypeError: They are not one kind of column.
    """
    first = leaves[0]
    if all(isinstance(leaf, PackedColumn) for leaf in leaves):
        views = [view_of_varlen(leaf, path) for leaf in leaves]
        return varlen_column(_concat_views(views, pool, path), path)
    if all(isinstance(leaf, UnbatchedTensor) for leaf in leaves):
        return _the_same(leaves, path)
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return _concat_tensors(leaves, pool, path)
    if all(is_tensorclass(leaf) and not is_non_tensor(leaf) for leaf in leaves):
        return _concat_tensorclasses(leaves, pool, path)
    if all(is_non_tensor(leaf) for leaf in leaves):
        return _concat_objects(leaves, path)
    if all(isinstance(leaf, LazyStackedTensorDict) for leaf in leaves):
        members = [member for leaf in leaves for member in members_of_stack(leaf, path)]
        return stack_like(members, first)
    if all(_is_plain_tensordict(leaf) for leaf in leaves):
        sizes = [tuple(leaf.batch_size[1:]) for leaf in leaves]
        _check_equal(sizes, "batch dims after the first", path)
        joined = concat_columns([dict(leaf.items()) for leaf in leaves], pool, path)
        return like(first, joined, sum(leaf.batch_size[0] for leaf in leaves))
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        _check_equal([leaf.dtype for leaf in leaves], "dtype", path)
        _check_equal([leaf.shape[1:] for leaf in leaves], "row shape", path)
        return np.concatenate(leaves)
    if all(isinstance(leaf, list) for leaf in leaves):
        return list(itertools.chain.from_iterable(leaves))
    if all(isinstance(leaf, dict) for leaf in leaves):
        return like(first, concat_columns(leaves, pool, path), 0)
    kinds = [type(leaf).__name__ for leaf in leaves]
    odd = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
    raise ArgumentTypeError(
        "bad_type",
        f"{path} of batch {odd}",
        f"expected one kind of column in all batches, found {kinds[0]} and {kinds[odd]}",
    )


def _the_same(leaves: Sequence[Any], path: str) -> Any:
    """A tensor that belongs to the whole batch, of batches that have the same."""
    first, *others = (unbatched_parts(leaf)[1] for leaf in leaves)
    for i, other in enumerate(others):
        if not same_values(first, other):
            raise ArgumentError(
                "conflict",
                f"{path} of batch {i + 1}",
                "expected the same UnbatchedTensor, which belongs to all rows, as in batch 0, "
                "found another; make it a column with a row for each",
            )
    return unbatched_of(None, first)


def _concat_tensorclasses(leaves: Sequence[Any], pool: RowSplitsPool, path: str) -> Any:
    _check_equal([type(leaf).__name__ for leaf in leaves], "tensorclass", path)
    parts = [fields_of(leaf) for leaf in leaves]
    fields = concat_leaves([fields for fields, _ in parts], pool, path)
    others = parts[0][1]
    for i, (_, found) in enumerate(parts):
        if not same_values(others, found):
            raise ArgumentError(
                "conflict",
                f"{path} of batch {i}",
                f"expected {brief(others)} next to its tensors, as in batch 0, found "
                f"{brief(found)}; make such fields NonTensorStacks, with a value for each row",
            )
    return tensorclass_of(type(leaves[0]), fields, others)


def concat_columns(
    batches: Sequence[Mapping[str, Any]], pool: RowSplitsPool, path: str
) -> dict[str, Any]:
    """Dicts of columns, each column put together; in the order of the first.

    Raises:
        ArgumentKeyError: They have not all the same columns; the batch and the column are named.
    """
    names = batches[0].keys()
    for i, batch in enumerate(batches):
        for name in names ^ batch.keys():
            raise ArgumentKeyError(
                "no_such_field",
                f"{path} of batch {i}",
                f"expected the columns of the first batch, found {name!r} "
                f"{'missing' if name in names else 'in addition'}; select those that all have",
            )
    return {
        name: concat_leaves([batch[name] for batch in batches], pool, f"{path}[{name!r}]")
        for name in names
    }


def _concat_tensors(leaves: Sequence[torch.Tensor], pool: RowSplitsPool, path: str) -> torch.Tensor:
    _check_equal([_layout(leaf) for leaf in leaves], "layout", path, _PACK)
    _check_equal([leaf.dtype for leaf in leaves], "dtype", path)
    _check_equal([leaf.device for leaf in leaves], "device", path)
    first = leaves[0]
    if is_jagged(first):
        views = [view_of(leaf, path, pool, detach=False) for leaf in leaves]
        joined = _concat_views(views, pool, path)
        return nested_tensor(values_of(joined), joined.row_splits, joined.ragged_dim)
    if first.is_nested:
        parts = [strided_parts(leaf) for leaf in leaves]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts) and len({shapes.shape[1] for _, shapes in known}) == 1:
            cells = cat_bits([cells for cells, _ in known], 0)
            return strided_nested(cells, np.concatenate([shapes for _, shapes in known]))
        members = [member for leaf in leaves for member in leaf.unbind()]
        _check_equal([member.dim() for member in members], "number of dims", path)
        return torch.nested.as_nested_tensor(
            members, dtype=first.dtype, device=first.device, layout=torch.strided
        )
    _check_equal([tuple(leaf.shape[1:]) for leaf in leaves], "row shape", path, _PACK)
    if first.layout is torch.strided:
        return cat_bits(leaves, 0)
    if first.layout is torch.sparse_coo:
        _check_equal([leaf.sparse_dim() for leaf in leaves], "number of sparse dims", path)
        return sparse_rows(lambda: torch.cat(list(leaves)), first.dtype, path)
    raise ArgumentError(
        "bad_option", path, f"expected columns whose rows can be joined, found a {first.layout}"
    )


_PACK = "; pack a column the same way in every batch: pack_per_token_field, always_nest=True"


def _layout(leaf: torch.Tensor) -> str:
    return "jagged" if is_jagged(leaf) else "nested" if leaf.is_nested else str(leaf.layout)


def _concat_views(views: Sequence[RaggedView], pool: RowSplitsPool, path: str) -> RaggedView:
    _check_equal([view.ragged_dim for view in views], "ragged dim", path)
    dim = views[0].ragged_dim
    _check_equal([(*view.shape[: dim - 1], *view.shape[dim:]) for view in views], "row shape", path)
    values = cat_bits([values_of(view) for view in views], dim - 1)
    return end_to_end(values, pool.joined([view.row_splits for view in views]), dim)


def _concat_objects(leaves: Sequence[Any], path: str) -> Any:
    rest = [tuple(leaf.batch_size[1:]) for leaf in leaves]
    _check_equal(rest, "batch dims after the first", path)
    payloads = [
        leaf.data for leaf in leaves if isinstance(leaf, NonTensorData) and not holds_rows(leaf)
    ]
    if len(payloads) == len(leaves) and all(same_values(payloads[0], x) for x in payloads):
        rows = sum(leaf.batch_size[0] for leaf in leaves)
        return NonTensorData(payloads[0], batch_size=[rows, *rest[0]])
    if rest[0] and all(isinstance(leaf, NonTensorStack) for leaf in leaves):
        return stack_like(
            [member for leaf in leaves for member in members_of_stack(leaf, path)], leaves[0]
        )
    if rest[0]:
        raise ArgumentError(
            "bad_option",
            path,
            "expected objects of one batch dim, found some of several that differ; "
            "flatten the batch, or select the other columns",
        )
    items = [item for leaf in leaves for item in rows_of_leaf(leaf, leaf.batch_size[0])]
    if all(map(holds_rows, leaves)):
        return NonTensorData(object_array(items), batch_size=[len(items)])
    return leaf_of_rows(items)


def _check_equal(found: Sequence[Any], what: str, path: str, remedy: str = "") -> None:
    for i, value in enumerate(found):
        if value != found[0]:
            raise ArgumentError(
                "bad_shape",
                f"{path} of batch {i}",
                f"expected {what} {found[0]} like batch 0, found {value}{remedy}",
            )


def _is_plain_tensordict(leaf: Any) -> bool:
    return isinstance(leaf, TensorDictBase) and not isinstance(leaf, LazyStackedTensorDict)


def leaf_of_column(column: Any, path: str) -> Any:
    """A column of a dict as a leaf of a TensorDict."""
    if isinstance(column, PackedColumn):
        view = view_of_varlen(column, path)
        return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
    if isinstance(column, list) or (isinstance(column, np.ndarray) and column.dtype == object):
        return leaf_of_rows(list(column))
    if isinstance(column, np.ndarray):
        return torch.as_tensor(column)
    if isinstance(column, dict):
        leaves = {
            name: leaf_of_column(inner, f"{path}[{name!r}]") for name, inner in column.items()
        }
        return TensorDict(leaves, batch_size=[row_counts(column, path) or 0])
    return column


# --- moving ------------------------------------------------------------------------------------


def move_leaf(leaf: Any, device: torch.device, non_blocking: bool, pool: RowSplitsPool) -> Any:
    """A column with its tensors on `device`; itself where there is nothing to move."""
    if isinstance(leaf, PackedColumn):
        if leaf.values.device == device:
            return leaf
        view = view_of_varlen(leaf, "to")
        values = leaf.values.to(device, non_blocking=non_blocking)
        row_splits = pool.unique(view.row_splits)
        return varlen_column(end_to_end(values, row_splits, view.ragged_dim), "to")
    if isinstance(leaf, dict):
        moved = {k: move_leaf(v, device, non_blocking, pool) for k, v in leaf.items()}
        return like(leaf, moved, 0)
    if is_jagged(leaf) and leaf.device != device:
        view = view_of(leaf, "to", pool, detach=False)
        values = values_of(view).to(device, non_blocking=non_blocking)
        return nested_tensor(values, pool.unique(view.row_splits), view.ragged_dim)
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=non_blocking)
    return leaf


def without_rest(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage holds nothing else: itself, or a copy if it is a slice.

    Pickle writes whole storages. Tensors with gradients are left alone: only leaves of autograd
    are pickled, and a slice is not one.
    """
    if leaf.requires_grad or (leaf.is_nested and not is_jagged(leaf)):
        return leaf
    if is_jagged(leaf):
        view = view_of(leaf, "pickle")
        values = without_rest(values_of(view)) if view.starts is None else values_of(view)
        if values is view.memory:
            return leaf
        return nested_tensor(values, view.row_splits, view.ragged_dim)
    if leaf.layout is not torch.strided or leaf.untyped_storage().nbytes() <= leaf.nbytes:
        return leaf
    return from_words(as_words(leaf).clone(), leaf.dtype)
