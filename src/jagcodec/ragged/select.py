"""Rows of one leaf of a TensorDict, chosen: tensors of every layout, objects, nested batches.

What tensordict can do with them depends on its release (below 0.15 nothing with jagged leaves), so
nothing here asks it to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from jagcodec.memory.tensor_bytes import as_words, from_words, take_rows
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
from jagcodec.ragged.views import RaggedView, end_to_end


def select_leaf(leaf: Any, chosen: Chosen, pool: RowSplitsPool, path: str) -> Any:
    """These rows of a leaf, in this order.

    A range of a contiguous tensor is a slice of it, as torch makes them: it holds the tensor's
    storage, and stays right when that moves to shared memory. Everything else is copied once.
    Leaves of equal rows share the row splits in `pool`.
    """
    if isinstance(leaf, UnbatchedTensor):
        return unbatched_of(None, unbatched_parts(leaf)[1])
    if isinstance(leaf, torch.Tensor):
        return _select_tensor(leaf, chosen, pool, path)
    if is_non_tensor(leaf):
        return _select_objects(leaf, chosen)
    if is_tensorclass(leaf):
        fields, others = fields_of(leaf)
        return tensorclass_of(type(leaf), select_leaf(fields, chosen, pool, path), others)
    if isinstance(leaf, LazyStackedTensorDict):
        if leaf.stack_dim == 0:
            return lazy_stack_like([leaf.tensordicts[i] for i in chosen], leaf)
        members = [select_leaf(member, chosen, pool, path) for member in leaf.tensordicts]
        return lazy_stack_like(members, leaf)
    if isinstance(leaf, TensorDictBase):
        leaves = {
            name: select_leaf(inner, chosen, pool, f"{path}[{name!r}]")
            for name, inner in leaf.items()
        }
        return tensordict_like(leaves, len(chosen), leaf)
    raise ArgumentTypeError(
        "bad_type", path, f"expected a leaf of a TensorDict, found {type(leaf).__name__}"
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


def tensordict_like(leaves: Mapping[str, Any], rows: int, like: TensorDictBase) -> TensorDict:
    """A TensorDict of other rows, with the dim names and the device of `like`."""
    # tensordict 0.10 cannot be given names, not even None, where there is a NonTensorStack.
    names = like.names if any(name is not None for name in like.names) else None
    flat = not any(
        isinstance(leaf, TensorDictBase) or is_tensorclass(leaf) for leaf in leaves.values()
    )
    if flat and names is None and like.device is None and like.batch_dims == 1:
        return batch_of(dict(leaves), rows)
    return TensorDict(
        dict(leaves), batch_size=[rows, *like.batch_size[1:]], names=names, device=like.device
    )


def lazy_stack_like(members: list[Any], like: Any) -> Any:
    """A lazy stack of other members, along the dim of `like`."""
    if not members:
        raise ArgumentError(
            "bad_rows",
            "rows of a lazy stack",
            "expected at least one row, found none: a lazy stack of no rows has no columns",
        )
    return LazyStackedTensorDict(
        *members, stack_dim=like.stack_dim, stack_dim_name=like.names[like.stack_dim]
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


def without_rest(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage holds nothing else: itself, or a copy of what is a slice.

    Pickle takes whole storages. Gradients are let be: such a tensor is pickled only where it is a
    leaf of autograd, which a slice is not.
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


def _select_objects(leaf: Any, chosen: Chosen) -> Any:
    if not isinstance(leaf, NonTensorStack):
        rest = leaf.batch_size[1:]
        if not holds_rows(leaf):
            return type(leaf)(leaf.data, batch_size=[len(chosen), *rest])
        items = object_array([leaf.data[i] for i in chosen])
        return NonTensorData(items, batch_size=[len(chosen)])
    payloads = payloads_of_stack(leaf)
    if payloads is not None:
        return leaf_of_rows([payloads[i] for i in chosen])
    members = leaf.tensordicts
    if leaf.stack_dim == 0 and len(chosen):
        return NonTensorStack(*[members[i] for i in chosen], stack_dim=0)
    if leaf.stack_dim == 0:
        return NonTensorData(None, batch_size=[0, *leaf.batch_size[1:]])
    inner = [_select_objects(member, chosen) for member in members]
    return NonTensorStack(*inner, stack_dim=leaf.stack_dim)
