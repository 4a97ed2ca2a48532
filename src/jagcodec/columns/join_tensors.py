"""Rows of tensors and of leaves of TensorDicts, chosen and joined: imported when there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData

from jagcodec.columns.batch import InPlace
from jagcodec.columns.held import HeldColumn, column_of
from jagcodec.columns.join import (
    CONVERT_REMEDY,
    PACK_REMEDY,
    RowJoiner,
    add_joins,
    as_buffers,
    check_columns,
    check_equal,
    indexer,
    make_column,
)
from jagcodec.columns.tensor_columns import (
    Dense,
    Jagged,
    LazyStack,
    Packed,
    Payloads,
    Sparse,
    StridedNested,
    TensorClass,
    TensorDictBatch,
    Unbatched,
)
from jagcodec.errors import ArgumentError, brief
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.plain_types import check_memory
from jagcodec.memory.tensor_bytes import array_in_storage, as_bytes, cat_bits
from jagcodec.rows import non_tensor
from jagcodec.rows.copy_rows import take_rows, values_of, values_of_cells
from jagcodec.rows.lengths import check_size
from jagcodec.rows.nested import nested_tensor, strided_nested, strided_parts
from jagcodec.rows.row_splits import Chosen, RowSplits, RowSplitsPool
from jagcodec.rows.varlen import varlen_column
from jagcodec.rows.views import RaggedView, end_to_end, in_buffers


def join_unbatched(joiner: RowJoiner, columns: Sequence[HeldColumn], path: str) -> Any:
    """An `UnbatchedTensor`, which all batches must have."""
    tensors = [non_tensor.unbatched_parts(column.value)[1] for column in columns]
    remedy = "make it a column with a row for each"
    return non_tensor.unbatched_of(
        None, joiner.require_same(tensors, "UnbatchedTensor", remedy, path)
    )


def join_payloads(joiner: RowJoiner, columns: Sequence[HeldColumn], path: str) -> Any:
    """One object again if all batches have the same; else an array or a stack, with one per row."""
    leaves = [column.value for column in columns]
    first = leaves[0]
    inner_sizes = [tuple(leaf.batch_size[1:]) for leaf in leaves]
    check_equal(inner_sizes, "batch dims after the first", path)
    arrays = [non_tensor.array_of_leaf(leaf) for leaf in leaves]
    if all(array is not None for array in arrays):
        joined = make_column(joiner.join_arrays([*map(column_of, arrays)], path))
        return NonTensorData(joined, batch_size=[len(joined), *inner_sizes[0]])
    none_is_stack = not any(map(non_tensor.is_stack, leaves))
    none_has_array = all(array is None for array in arrays)
    is_same = none_is_stack and none_has_array
    if len(leaves) > 1:
        is_same = is_same and all(joiner.same(first.data, leaf.data) for leaf in leaves)
    if is_same:
        sizes = [joiner.total_rows(leaves, path), *inner_sizes[0]]
        return type(first)(first.data, batch_size=sizes)
    if inner_sizes[0]:
        detail = "expected objects of one batch dim, found a stack of several; flatten the batch"
        raise ArgumentError("bad_option", path, detail)
    payloads = (column.objects() or () for column in columns)
    return non_tensor.leaf_of_rows(joiner.chosen_items(itertools.chain.from_iterable(payloads)))


def join_packed(joiner: RowJoiner, columns: Sequence[HeldColumn], path: str) -> Any:
    """`PackedColumn`s as one; or an `InPlace` of their rows."""
    views: list[Any] = [column.view(path, joiner.pool, detach=False) for column in columns]

    def wrap(values: torch.Tensor, row_splits: RowSplits, dim: int) -> Any:
        return varlen_column(end_to_end(values, row_splits, dim), path)

    return _plan_views(joiner, views, path, wrap, lambda splits: check_size(splits.total, path))


def join_tensors(joiner: RowJoiner, columns: Sequence[Any], path: str) -> Any:
    """Tensors of one layout, dtype, device and row shape as one; or an `InPlace` of their rows."""
    check_columns(columns, path)
    leaves = [column.value for column in columns]
    kind = type(columns[0])
    if len(columns) > 1:
        if kind is Sparse or any(type(column) is not kind for column in columns):
            check_equal([column.layout_name for column in columns], "layout", path, PACK_REMEDY)
        check_equal([leaf.dtype for leaf in leaves], "dtype", path, CONVERT_REMEDY)
        check_equal([leaf.device for leaf in leaves], "device", path)
    if kind is Jagged:
        views = [column.view(path, joiner.pool, detach=False) for column in columns]
        return _plan_views(joiner, views, path, nested_tensor)
    if kind is StridedNested:
        return _join_strided_nested(joiner, leaves, path)
    if len(columns) > 1:
        shapes = [leaf.shape[1:] for leaf in leaves]
        if shapes.count(shapes[0]) < len(shapes):
            check_equal([*map(tuple, shapes)], "row shape", path, PACK_REMEDY)
    if kind is Dense:
        return _join_dense(joiner, leaves, path)
    detail = (
        f"expected a column whose rows can be chosen and joined, found a {leaves[0].layout}; "
        "call .to_dense() or select the others"
    )
    raise ArgumentError("bad_option", path, detail)


def _join_dense(joiner: RowJoiner, leaves: Sequence[torch.Tensor], path: str) -> Any:
    """Strided tensors as one: a slice, an `InPlace` of rows on the host, or a copy by torch."""
    first, chosen = leaves[0], joiner.chosen
    rows = sum([leaf.shape[0] for leaf in leaves])
    joiner.check_extent(rows, first.shape[1:], first.itemsize, path)
    if len(leaves) == 1 and isinstance(chosen, range):
        return _slice_of(first, chosen, path)
    arrays = []
    for i, leaf in enumerate(leaves):
        arrays.append(array_in_storage(leaf))
        if arrays[i] is None:
            check_memory(leaf, f"{path} of batch {i}" if i else path)
            arrays[i] = _rows_in_order(leaf)
    if all(array is not None for array in arrays):
        view = _view_of_arrays(joiner, arrays, first)
        return InPlace(view, lambda cells: values_of_cells(cells, view))
    whole = first if joiner.only_chooses(leaves) else cat_bits(leaves, 0)
    if isinstance(chosen, range):
        return _slice_of(whole, chosen, path)
    return whole if chosen is None else take_rows(whole, chosen)


def _view_of_arrays(joiner: RowJoiner, arrays: Sequence[Any], like: torch.Tensor) -> RaggedView:
    """The wanted rows of arrays in order: each row is a cell."""
    inner, dtype = like.shape[1:], like.dtype
    cell = inner.numel() * dtype.itemsize
    if joiner.chosen is None:
        splits = RowSplits.from_counts(tuple(map(len, arrays)))
        return in_buffers(as_buffers(arrays), dtype, inner, splits.starts * cell, splits)
    rows, ones = joiner.rows_as_cells(joiner.chosen)
    if len(arrays) == 1:
        return RaggedView(arrays[0], dtype, (len(arrays[0]), *inner), 1, rows, ones)
    return in_buffers(as_buffers(arrays), dtype, inner, rows * cell, ones)


def _join_strided_nested(joiner: RowJoiner, leaves: Sequence[torch.Tensor], path: str) -> Any:
    """Nested tensors of torch's older layout as one: the cells of each row are copied as a run."""
    for leaf in leaves:
        check_memory(leaf, path)
    parts = [strided_parts(leaf) for leaf in leaves if leaf.size(0)]
    if not parts:
        return leaves[0]
    check_equal([shapes.shape[1] for _, shapes in parts], "number of dims", path)
    views = [
        end_to_end(values, RowSplits.from_lengths(shapes.prod(axis=1))) for values, shapes in parts
    ]
    shapes = np.concatenate([shapes for _, shapes in parts])
    if joiner.chosen is not None:
        shapes = shapes[indexer(joiner.chosen)]
    return _plan_views(joiner, views, path, lambda values, *_: strided_nested(values, shapes))


def _plan_views(
    joiner: RowJoiner,
    views: Sequence[RaggedView],
    path: str,
    wrap: Callable[[torch.Tensor, RowSplits, int], Any],
    check: Callable[[RowSplits], None] = lambda _: None,
) -> Any:
    """The wanted rows of views, end to end, in the column that `wrap` makes."""
    dim = views[0].ragged_dim
    if joiner.only_chooses(views):
        view = joiner.chosen_view(views[0], path)
        row_splits = view.row_splits
    else:
        joiner.check_joinable(views, path)
        row_splits = joiner.pool.joined([view.row_splits for view in views])
        may_share_buffers = views[0].cell_bytes > 0 and dim == 1
        if may_share_buffers and all(view.uses_row_kernel for view in views):
            if joiner.chosen is not None:
                row_splits = joiner.chosen_splits(row_splits, views[0], path)
            view = _in_buffers_of(views, joiner.chosen, row_splits)
        else:
            view = joiner.concat(views)
            if joiner.chosen is not None:
                view = joiner.chosen_view(view, path)
                row_splits = view.row_splits
    check(row_splits)
    if view.is_end_to_end:
        return wrap(values_of(view), row_splits, dim)
    return InPlace(view, lambda cells: wrap(values_of_cells(cells, view), row_splits, dim))


def join_tensorclasses(joiner: RowJoiner, columns: Sequence[HeldColumn], path: str) -> Any:
    """Tensorclasses as one: their columns are joined, their other fields must be the same."""
    leaves = [column.value for column in columns]
    check_equal([type(leaf).__name__ for leaf in leaves], "tensorclass", path)
    fields, others = zip(*map(non_tensor.fields_of, leaves), strict=True)
    remedy = "make such fields NonTensorStacks, with a value for each row"
    expected = f"{brief(others[0])} next to its tensors"
    other_fields = joiner.require_same(others, expected, remedy, path)
    return non_tensor.tensorclass_of(type(leaves[0]), joiner.join(fields, path), other_fields)


def concat(views: Sequence[RaggedView], pool: RowSplitsPool) -> RaggedView:
    """The rows of views, end to end, joined by torch."""
    dim = views[0].ragged_dim
    values = cat_bits([values_of(each) for each in views], dim - 1)
    return end_to_end(values, pool.joined([each.row_splits for each in views]), dim)


def _rows_in_order(tensor: torch.Tensor) -> Any:
    """An array over the rows of a tensor in order on the host, of any dtype; else None."""
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and not tensor.requires_grad
    if not plain or not tensor.is_contiguous() or not tensor.numel():
        return None
    return as_bytes(tensor).reshape(len(tensor), -1)


def _in_buffers_of(
    views: Sequence[RaggedView], chosen: Chosen | None, row_splits: RowSplits
) -> RaggedView:
    """The wanted rows of views of CPU cells, in the buffers of all of them.

    `row_splits` has the wanted rows. If all are wanted and end to end, each view is one run.
    """
    first = views[0]
    dtype, inner, cell = first.dtype, first.shape[1:], first.cell_bytes
    buffers = [view.host_buffers() for view in views]
    together = [*itertools.chain.from_iterable(buffers)]
    if chosen is None and all(view.is_end_to_end for view in views):
        runs = RowSplits.from_counts(tuple(view.row_splits.total for view in views))
        return in_buffers(together, dtype, inner, runs.starts * cell, runs)
    sizes = (sum(map(len, parts)) for parts in buffers)
    begins = itertools.accumulate(sizes, initial=0)
    # `begins` has one number more than there are views: the end.
    starts: IntArray = np.concatenate(
        [view.row_starts() * view.unit_bytes + begin for view, begin in zip(views, begins)]  # noqa: B905
    )
    wanted = starts if chosen is None else starts[indexer(chosen)]
    return in_buffers(together, dtype, inner, wanted, row_splits)


def _slice_of(tensor: torch.Tensor, chosen: range, path: str) -> torch.Tensor:
    """The chosen rows of a tensor, which alias it."""
    try:
        return tensor[chosen.start : chosen.stop]
    except RuntimeError:  # rare: the tensor may lack memory
        check_memory(tensor, path)
        raise


add_joins(
    {
        **dict.fromkeys((Dense, Sparse, StridedNested, Jagged), join_tensors),
        # A lazy stack is not joined: `join_batches` asks for its `inner_sizes`, which is an error.
        **dict.fromkeys((TensorDictBatch, LazyStack), RowJoiner.join_batches),
        Unbatched: join_unbatched,
        Packed: join_packed,
        Payloads: join_payloads,
        TensorClass: join_tensorclasses,
    }
)
