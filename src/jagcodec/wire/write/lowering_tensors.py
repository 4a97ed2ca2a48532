"""`Lowering` of tensors and TensorDicts: imported when there is one, because it imports torch.

The first part has tensors, the second TensorDicts; the tables of their types are at the end.
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
    TensorDictBase,
)

from jagcodec.columns.batch import Batch
from jagcodec.errors import ArgumentError, UnsupportedTypeError
from jagcodec.memory import extent_of
from jagcodec.memory.arrays import ByteArray
from jagcodec.memory.plain_types import TENSOR_TYPES, remedy_for
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import array_in_storage, as_bytes, plain_array
from jagcodec.rows import non_tensor
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.nested import (
    NESTED_TENSOR,
    NestedParts,
    parts_of,
    view_of_parts_unchecked,
)
from jagcodec.rows.views import RaggedView
from jagcodec.wire import registry_tensors as registry_tensors  # registers types
from jagcodec.wire import spec
from jagcodec.wire.dtypes import TORCH_NAME_OF_NUMPY
from jagcodec.wire.frames import NO_BYTES
from jagcodec.wire.items import Item, Tree
from jagcodec.wire.spec import Code
from jagcodec.wire.tensor_views import views_of_one_storage
from jagcodec.wire.torch_dtypes import TORCH_NAMES
from jagcodec.wire.write.lowering import add_handlers
from jagcodec.wire.write.lowering_columns import (
    lower_cells,
    lower_each_column,
    lower_int64s,
    lower_rows_of_array,
    lower_shared_object,
    lower_view,
)
from jagcodec.wire.write.lowering_objects import lower_objects
from jagcodec.wire.write.walk import Handler, ValueWalk

# --- tensors -----------------------------------------------------------------------------------


def bytes_of_tensors(
    walk: ValueWalk, item: Item, tensors: Sequence[torch.Tensor]
) -> list[ByteArray] | None:
    """The bytes of tensors; None if one is on a device. Then the item gets them after the walk."""
    if all(tensor.is_cpu for tensor in tensors):
        return list(map(as_bytes, tensors))
    _read_later(walk, item, *tensors)
    return None


def _read_later(walk: ValueWalk, item: Item, *tensors: torch.Tensor) -> None:
    """After the wait for the devices, give an item the cells of tensors, end to end."""
    walk.on_devices += tensors

    def read(copies: HostCopies) -> None:
        parts = [as_bytes(copies.of(tensor)) for tensor in tensors]
        item.data = parts[0] if len(parts) == 1 else np.concatenate([NO_BYTES, *parts])

    walk.unread.append(read)


def fetch(tensors: Sequence[torch.Tensor], unread: Sequence[Callable[[HostCopies], None]]) -> None:
    """Wait for the devices of tensors once, then give the items their cells."""
    copies = HostCopies()
    copies.fetch(tensors)
    for read in unread:
        read(copies)


def lower_rows_of_tensor(walk: ValueWalk, view: RaggedView) -> Tree:
    """The node of the rows of a view of a tensor."""
    memory: Any = view.memory
    dtype, array = TORCH_NAMES.get(view.dtype), plain_array(memory)
    if dtype is None or array is None:
        dtype = _readable_dtype(walk, memory)
        if not memory.is_cpu:
            return _lower_rows_on_device(walk, view, dtype)
        array = as_bytes(memory) if view.is_end_to_end else memory
    return lower_rows_of_array(walk, view, array, dtype)


def remedy_of(value: Any) -> str:
    """What to do with a tensor or a TensorDict that cannot be encoded; empty for other values."""
    if isinstance(value, torch.Tensor):
        remedy = remedy_for(value)
        return f"; {remedy}, or register its type with register_type" if remedy else ""
    return _REMEDY_OF_BATCHES if isinstance(value, TensorDictBase) else ""


_REMEDY_OF_BATCHES = (
    "; convert it with TensorDict(dict(x.items()), x.batch_size), or register its type"
)


def _lower_rows_on_device(walk: ValueWalk, view: RaggedView, dtype: str) -> Tree:
    """The node of the rows of a view of a tensor on a device, which are read after the walk."""
    values = values_of(view, walk.indices)  # so that only the rows leave the device
    item = Item(None, view.values_shape, view.row_splits, dtype, view.ragged_dim)
    _read_later(walk, item, values)
    return walk.add(item)


def _lower_tensor(walk: ValueWalk, tensor: torch.Tensor) -> Tree:
    """The node of a tensor that is not jagged."""
    array = array_in_storage(tensor, or_empty=True)
    if array is not None:  # most tensors
        return lower_cells(walk, array, TORCH_NAME_OF_NUMPY[array.dtype])
    if type(tensor) not in TENSOR_TYPES:
        return walk.lower_foreign(tensor)
    if tensor.layout is torch.strided:
        return (
            _lower_strided_nested(walk, tensor) if tensor.is_nested else _lower_dense(walk, tensor)
        )
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        shape = tuple(tensor.shape)
        walk.items += shape
        indices = _lower_dense(walk, tensor._indices(), unchanged=True)
        values = _lower_tensor(walk, tensor._values())
        return (Code.SPARSE_COO, len(shape), int(tensor.is_coalesced()), indices, values)
    remedy = ".to_sparse_coo()" if "sparse" in str(tensor.layout) else ".to_dense()"
    raise walk.unsupported(tensor, f" with layout {tensor.layout}; call {remedy} first")


def _readable_dtype(walk: ValueWalk, tensor: torch.Tensor) -> str:
    """The wire's name of a tensor's dtype; raises if its cells cannot be read."""
    name = TORCH_NAMES.get(tensor.dtype)
    if name is None:
        remedy = "dequantise it first" if tensor.is_quantized else "convert it with .to()"
        raise walk.unsupported(tensor, f" with dtype {tensor.dtype}; {remedy}")
    remedy = remedy_for(tensor)
    if remedy:
        raise walk.unsupported(tensor, f": {remedy}")
    if not tensor.is_nested:
        walk.check_dims(tensor.shape, tensor.itemsize)
    return name


def _lower_dense(walk: ValueWalk, tensor: torch.Tensor, *, unchanged: bool = False) -> Tree:
    """The TENSOR of a tensor. An `unchanged` tensor is never stored narrow or elided."""
    dtype, dims = _readable_dtype(walk, tensor), tuple(tensor.shape)
    walk.check_rank(tensor)
    item = Item(None, dims, None, None if unchanged else dtype)
    if tensor.is_cpu:
        item.data = as_bytes(tensor)
    else:
        _read_later(walk, item, tensor)
    if not unchanged:
        return walk.add(item)
    walk.items.append(item)
    return (Code.TENSOR, dtype, len(dims))


def _lower_jagged(walk: ValueWalk, jagged: torch.Tensor) -> Tree:
    """The JAGGED of a jagged tensor."""
    parts = parts_of(jagged)
    dtype = TORCH_NAMES.get(parts.values.dtype)
    array = array_in_storage(parts.values, or_empty=True)
    if array is None:
        dtype = _readable_dtype(walk, parts.values)
    if not (parts.offsets.is_cpu and parts.values.is_cpu):
        return _lower_jagged_on_device(walk, parts, dtype)
    view = _view_of(walk, parts)
    if array is None or not view.is_end_to_end:
        return lower_view(walk, view)
    splits, dim = view.row_splits, parts.ragged_dim
    return walk.add(Item(array, array.shape, splits, dtype, dim))


def _lower_jagged_on_device(walk: ValueWalk, parts: NestedParts, dtype: str | None) -> Tree:
    """The JAGGED of a tensor on a device, which is read later.

    If it has holes, only its rows leave the device.
    """
    where, holes = walk.where(), parts.lengths
    item = Item(None, tuple(parts.values.shape), None, dtype, parts.ragged_dim)
    walk.on_devices += (parts.offsets, parts.values if holes is None else holes)

    def read(copies: HostCopies) -> None:
        view = _view_of(walk, parts, where, copies)
        values = values_of(view)
        copies.fetch([values])  # fetched before now if there are no holes
        item.data, item.dims = as_bytes(copies.of(values)), view.values_shape
        item.splits = view.row_splits

    walk.unread.append(read)
    walk.add(item)  # the node that it returns is a TENSOR, because row splits are read later
    return (Code.JAGGED, dtype, len(item.dims), item.ragged_dim)


def _view_of(
    walk: ValueWalk, parts: NestedParts, where: str | None = None, copies: HostCopies | None = None
) -> RaggedView:
    """The rows of a jagged tensor; an error names `where`, by default the place of the walk."""
    try:
        return view_of_parts_unchecked(parts, "", walk.pool, copies)
    except ArgumentError as error:
        path = (where or walk.where()) + error.path
        raise UnsupportedTypeError(error.reason, path, error.detail) from error


def are_views_of_one_storage(values: Sequence[Any]) -> bool:
    """Whether all values are views of one storage, which a message has once."""
    return views_of_one_storage(values) is not None


def lower_views_of_one_storage(walk: ValueWalk, values: Sequence[Any]) -> Tree | None:
    """The node of a list of views of one storage; None for any other list."""
    view_and_bounds = views_of_one_storage(values)
    if view_and_bounds is None:
        return None
    view, bounds = view_and_bounds
    memory: Any = view.memory
    data = as_bytes(memory) if view.is_end_to_end else view
    walk.items.append(Item(data, view.values_shape))
    base = (Code.TENSOR, TORCH_NAMES[view.dtype], len(view.shape))
    return (Code.TENSOR_VIEWS, base, lower_int64s(walk, bounds))


def _lower_strided_nested(walk: ValueWalk, tensor: torch.Tensor) -> Tree:
    """The STRIDED_NESTED of a nested tensor that is not jagged."""
    name = _readable_dtype(walk, tensor)
    with torch.no_grad():  # not `tensor.detach()`: torch warns that nested ones are a prototype
        components = tensor.unbind() if tensor.size(0) else ()
    rank = components[0].dim() if components else 0
    shapes = [component.shape for component in components]
    for shape in shapes:
        walk.check_dims(shape, tensor.itemsize)
    # A component without dims gets a 1 for its one element, so that every component has bytes.
    sizes = np.array(shapes if rank else [[1]] * len(shapes), dtype=np.int64)
    elements = sum(component.numel() for component in components)
    item = Item(NO_BYTES, (elements,))
    _read_later(walk, item, *components)
    walk.items.append(item)
    rows = lower_int64s(walk, sizes.reshape(len(shapes), rank or 1))
    return (Code.STRIDED_NESTED, rank, (Code.TENSOR, name, 1), rows)


# --- TensorDicts -------------------------------------------------------------------------------


def _lower_tensordict(walk: ValueWalk, td: TensorDictBase) -> Tree:
    """The TENSORDICT of a TensorDict."""
    _append_batch_size(walk, td)
    leaves: dict[str, Any] = dict(td.items())
    nodes = lower_each_column(walk, leaves, [*td.batch_size], _LEAF_HANDLERS)
    return (Code.TENSORDICT, len(td.batch_size), tuple(leaves), *nodes)


def _lower_lazy_view(walk: ValueWalk, lazy: Any) -> Tree:
    """The TENSORDICT of a view of a lazy stack, which is a TensorDict, too."""
    try:
        td = non_tensor.tensordict_of_view(lazy)
    except RuntimeError as error:  # the view is of a stack of rows with different shapes
        raise walk.unsupported(lazy, f": {error!s:.200}; encode what it is a view of") from error
    return _lower_tensordict(walk, td)


def _lower_lazy_stack(walk: ValueWalk, stack: LazyStackedTensorDict) -> Tree:
    """The LAZY_STACK of a stack of TensorDicts."""
    if not stack.tensordicts and stack.batch_dims != 1:
        remedy = "encode TensorDict({}, batch_size=x.batch_size)"
        raise walk.unsupported(stack, f" without members; {remedy}")
    return (Code.LAZY_STACK, int(stack.stack_dim), *_lower_members(walk, stack))


def _lower_non_tensor_stack(walk: ValueWalk, stack: NonTensorStack) -> Tree:
    """The node of a stack of objects: rows of objects if it has one dim."""
    payloads = non_tensor.payloads_of_stack(stack)
    if payloads is not None:
        _check_unnamed(walk, stack, [non_tensor.stack_dim_name(stack)])
        return lower_objects(walk, payloads, spec.IN_STACK)
    if not stack.tensordicts:
        remedy = "encode NonTensorData(None, batch_size=x.batch_size)"
        raise walk.unsupported(stack, f" of several dims without members; {remedy}")
    return (Code.NON_TENSOR_STACK, int(stack.stack_dim), *_lower_members(walk, stack))


def _lower_members(walk: ValueWalk, stack: LazyStackedTensorDict) -> list[Tree]:
    """The node of each member of a stack."""
    _check_unnamed(walk, stack, [non_tensor.stack_dim_name(stack)])
    if walk.stacks == spec.MAX_STACKS:
        detail = f"expected at most {spec.MAX_STACKS} stacks in each other, found more"
        raise walk.error("too_deep", detail)
    walk.stacks += 1
    members = [walk.lower_at(i, member) for i, member in enumerate(stack.tensordicts)]
    walk.stacks -= 1
    return members


def _lower_non_tensor_data(walk: ValueWalk, data: NonTensorData) -> Tree:
    """The NON_TENSOR_DATA of one object for all rows."""
    if isinstance(data.data, Batch):  # tensordict would put all of it into each row
        raise walk.unsupported(data.data, " in a TensorDict; put x.to_tensordict() there")
    _append_batch_size(walk, data)
    return lower_shared_object(walk, data.data, len(data.batch_size))


def _check_unnamed(walk: ValueWalk, td: Any, names: Sequence[str | None]) -> None:
    """Raise an error if dims of a TensorDict have names, which messages do not have."""
    if any(name is not None for name in names):
        raise walk.unsupported(td, f" with dim names {list(names)}; set td.names = None")


def _append_batch_size(walk: ValueWalk, td: Any) -> None:
    """Add the numbers of a batch size. Raise an error if its dims have names."""
    batch_size: torch.Size = td.batch_size
    if batch_size:
        _check_unnamed(walk, td, td.names)
    if any(dim < 0 for dim in batch_size):
        detail = f"expected a batch size from 0 on, found {list(batch_size)}"
        raise walk.error("bad_shape", detail)
    walk.note_unbacked_rows(extent_of(batch_size))
    walk.items += map(int, batch_size)  # `int` makes a number of a symbolic dim


# --- tables of types ---------------------------------------------------------------------------


# Most leaves of a TensorDict become one item, which shows that the leaf has the rows of the batch.
_LEAF_HANDLERS: dict[type, Handler] = {
    NESTED_TENSOR: _lower_jagged,
    **dict.fromkeys(TENSOR_TYPES, _lower_tensor),
    NonTensorStack: _lower_non_tensor_stack,
}

_HANDLERS: dict[type, Handler] = {
    **_LEAF_HANDLERS,
    **dict.fromkeys(non_tensor.TENSORDICT_TYPES, _lower_tensordict),
    LazyStackedTensorDict: _lower_lazy_stack,
    NonTensorData: _lower_non_tensor_data,
}

add_handlers(
    _HANDLERS,
    columns=_LEAF_HANDLERS,
    bases=((torch.Tensor, _lower_tensor), (non_tensor.LAZY_VIEW, _lower_lazy_view)),
    lists=non_tensor.LIST_TYPES,
)
