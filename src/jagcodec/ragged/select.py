"""Rows of one column, chosen: tensors of every layout, objects, batches.

What tensordict can do with them depends on its release (below 0.15 nothing with jagged leaves), so
nothing here asks it to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import take_rows
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import (
    is_jagged,
    nested_tensor,
    strided_nested,
    strided_parts,
    view_of,
)
from jagcodec.ragged.non_tensor import (
    batch_of,
    fields_of,
    holds_rows,
    is_non_tensor,
    leaf_of_rows,
    object_array,
    payloads_of_stack,
    tensorclass_of,
    unbatched_of,
    unbatched_parts,
)
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, varlen_column, view_of_varlen
from jagcodec.ragged.views import RaggedView, end_to_end


def select_leaf(leaf: Any, chosen: Chosen, pool: RowSplitsPool, path: str) -> Any:
    """These rows of a column, or of a batch of any open form but a message, in this order.

    A range of a contiguous tensor is a slice of it, as torch makes them: it holds the tensor's
    storage, and stays right when that moves to shared memory. Everything else is copied once.
    Leaves of equal rows share the row splits in `pool`.

    Raises:
        ArgumentError: Its rows cannot be chosen (CSR and other compressed layouts).
        ArgumentTypeError: It is not a column.
    """
    if isinstance(leaf, PackedColumn):
        return varlen_column(select_view(view_of_varlen(leaf, path), chosen, pool), path)
    if isinstance(leaf, UnbatchedTensor):
        return unbatched_of(None, unbatched_parts(leaf)[1])
    if isinstance(leaf, torch.Tensor):
        return _select_tensor(leaf, chosen, pool, path)
    if isinstance(leaf, np.ndarray):
        return leaf[chosen.start : chosen.stop] if isinstance(chosen, range) else leaf[chosen]
    if isinstance(leaf, list):
        return [leaf[i] for i in chosen]
    if is_non_tensor(leaf) and not isinstance(leaf, NonTensorStack):
        if holds_rows(leaf):
            return NonTensorData(
                object_array([leaf.data[i] for i in chosen]), batch_size=[len(chosen)]
            )
        return type(leaf)(leaf.data, batch_size=[len(chosen), *leaf.batch_size[1:]])
    if isinstance(leaf, LazyStackedTensorDict):
        payloads = payloads_of_stack(leaf) if isinstance(leaf, NonTensorStack) else None
        if payloads is not None:
            return leaf_of_rows([payloads[i] for i in chosen])
        members = members_of_stack(leaf, path)
        return stack_like([members[i] for i in chosen], leaf)
    if is_tensorclass(leaf):
        fields, others = fields_of(leaf)
        return tensorclass_of(type(leaf), select_leaf(fields, chosen, pool, path), others)
    if isinstance(leaf, (dict, TensorDictBase)):
        columns = {
            name: select_leaf(inner, chosen, pool, f"{path}[{name!r}]")
            for name, inner in leaf.items()
        }
        return like(leaf, columns, len(chosen))
    raise not_a_column(leaf, path)


def not_a_column(column: Any, path: str) -> ArgumentTypeError:
    """The error for a leaf without rows."""
    return ArgumentTypeError(
        "bad_type",
        path,
        f"expected a column of N rows (a tensor, an array, a list, a PackedColumn, or a dict of "
        f"columns), found {type(column).__name__}; values of the whole batch go into meta_info, "
        "and rows through pack_rows or encode_rows",
    )


def select_view(view: RaggedView, chosen: Chosen, pool: RowSplitsPool) -> RaggedView:
    """These rows of a jagged column, end to end: aliased or copied as by `select_leaf`."""
    rows = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
    row_splits = pool.unique(RowSplits.from_lengths(view.row_splits.lengths[rows]))
    memory = view.memory
    if (
        isinstance(chosen, range)
        and isinstance(memory, torch.Tensor)
        and view.starts is None
        and view.ragged_dim == 1
        and memory.is_contiguous()
    ):
        first = int(view.row_splits.host[chosen.start])
        return end_to_end(memory[first : first + row_splits.total], row_splits)
    values = values_of(view.choose(rows, row_splits))
    return end_to_end(values, row_splits, view.ragged_dim)


def like(batch: Any, columns: dict[str, Any], rows: int) -> Any:
    """A batch of the same kind as a TensorDict or a dict, of other columns.

    A TensorDict has the dim names and the device of `batch`; a `BatchedDataDict` its `meta_info`.
    """
    if isinstance(batch, dict):
        make: Callable[[dict[str, Any]], dict[str, Any]] = getattr(batch, "with_columns", dict)
        return make(columns)
    # tensordict 0.10 cannot be given names, not even None, where there is a NonTensorStack.
    names = batch.names if any(name is not None for name in batch.names) else None
    flat = not any(
        isinstance(leaf, TensorDictBase) or is_tensorclass(leaf) for leaf in columns.values()
    )
    if flat and names is None and batch.device is None and batch.batch_dims == 1:
        return batch_of(columns, rows)
    sizes = [rows, *batch.batch_size[1:]]
    return TensorDict(columns, batch_size=sizes, names=names, device=batch.device)


def members_of_stack(stack: LazyStackedTensorDict, path: str) -> list[Any]:
    """The rows of a lazy stack, which may be a `NonTensorStack`."""
    if stack.stack_dim:
        raise ArgumentError(
            "bad_option",
            path,
            f"expected a stack along the rows, found one along dim {stack.stack_dim}; call "
            ".contiguous() on it",
        )
    return stack.tensordicts


def stack_like(members: Sequence[Any], stack: Any) -> Any:
    """A lazy stack of other rows."""
    if members:
        return type(stack)(*members, stack_dim=0)
    if isinstance(stack, NonTensorStack):
        return NonTensorData(None, batch_size=[0, *stack.batch_size[1:]])
    raise ArgumentError(
        "bad_rows",
        "rows of a lazy stack",
        "expected at least one row, found none: a lazy stack of no rows has no columns",
    )


def _select_tensor(
    leaf: torch.Tensor, chosen: Chosen, pool: RowSplitsPool, path: str
) -> torch.Tensor:
    if is_jagged(leaf):
        view = select_view(view_of(leaf, path, pool, detach=False), chosen, pool)
        return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
    if leaf.is_nested:
        parts = strided_parts(leaf)
        if parts is not None:
            cells, shapes = parts
            view = end_to_end(cells, RowSplits.from_lengths(shapes.prod(axis=1)))
            rows = np.asarray(chosen, dtype=np.int64)
            return strided_nested(values_of(select_view(view, chosen, pool)), shapes[rows])
        members = leaf.unbind()
        return torch.nested.as_nested_tensor(
            [members[i] for i in chosen],
            dtype=leaf.dtype,
            device=leaf.device,
            layout=torch.strided,
        )
    if leaf.layout is torch.sparse_coo:
        index = torch.as_tensor(np.asarray(chosen, dtype=np.int64), device=leaf.device)
        return sparse_rows(lambda: leaf.index_select(0, index), leaf.dtype, path)
    if leaf.layout is not torch.strided:
        raise ArgumentError(
            "bad_option",
            path,
            f"expected columns whose rows can be chosen, found a {leaf.layout}; select the others",
        )
    if isinstance(chosen, range):
        return leaf[chosen.start : chosen.stop]
    return take_rows(leaf, chosen)


def sparse_rows(make: Callable[[], torch.Tensor], dtype: torch.dtype, path: str) -> torch.Tensor:
    """The rows of COO tensors that torch chooses or joins."""
    try:
        return make()
    except RuntimeError as error:
        raise ArgumentError(
            "bad_option",
            path,
            f"expected a sparse column of a dtype that torch {torch.__version__} supports, found "
            f"{dtype}; call .to_dense() or select the other columns",
        ) from error
