"""Values of a message that are tensors, or hold them: the half of the decoder that needs torch.

Functions that `array_values` has, too, make arrays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensordict
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec.columns.outside_errors import pass_on
from jagcodec.errors import WireFormatError
from jagcodec.memory.arrays import NUMPY_BY_NAME, IntArray
from jagcodec.memory.staging import (
    to_device as to_device,  # columns call it as `value_module.to_device`
)
from jagcodec.memory.tensor_bytes import (
    MOST_ARRAY_DIMS,
    as_bytes,
    as_words,
    from_bytes,
    from_words,
)
from jagcodec.rows.chosen_rows import ChosenRows
from jagcodec.rows.copy_rows import values_of, values_of_cells
from jagcodec.rows.nested import nested_tensor, strided_nested
from jagcodec.rows.non_tensor import (
    batch_of,
    is_leaf,
    is_non_tensor,
    leaf_of_rows,
    stack_of_payloads,
)
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire.array_rows import MakeRow
from jagcodec.wire.checks import bad, elements_of, expect, fail, inside
from jagcodec.wire.leaf import CellPlace
from jagcodec.wire.read.decoder import build, build_children, read_int64s, rows_differ
from jagcodec.wire.read.message import Budget, Message, owned_bytes, writable
from jagcodec.wire.schema import GROUP, STORAGE_CODE, Node
from jagcodec.wire.spec import INDIRECT, MAX_BYTES, PLAIN, Kind
from jagcodec.wire.torch_dtypes import torch_dtype

Size: TypeAlias = torch.Size
"""The type of batch sizes."""

HAS_LEAVES = True
"""Whether there are leaves of TensorDicts."""

# --- cells -------------------------------------------------------------------------------------


def tensor_of_node(message: Message, node: Node, chosen: ChosenRows | None = None) -> torch.Tensor:
    """The cells of a TENSOR or a JAGGED, or of its chosen rows, as a tensor that may be kept."""
    device = message.device
    values = tensor_on_host(message, node, chosen, goes_to_device=message.away is not None)
    return values if device is None else to_device(values, device)


def tensor_on_host(
    message: Message, node: Node, chosen: ChosenRows | None = None, *, goes_to_device: bool = False
) -> torch.Tensor:
    """As `tensor_of_node`, on the host; a tensor that `goes_to_device` must only be read."""
    numbers = message.numbers
    if chosen is None and numbers[node.number + STORAGE_CODE] <= INDIRECT:
        return _whole_tensor(message, node, tuple(numbers[node.dims : node.end]), goes_to_device)
    view = message.view(node, chosen)
    values = owned_cells(message, view, goes_to_device=goes_to_device)
    return values_of(view) if values is None else values


def owned_cells(
    message: Message, view: RaggedView, *, goes_to_device: bool = False
) -> torch.Tensor | None:
    """The cells of a view, as a tensor that may be kept; None if they are not end to end."""
    data = owned_bytes(message, view, goes_to_device=goes_to_device)
    return None if data is None else from_bytes(data, view.dtype, view.shape)


def jagged_of_node(message: Message, node: Node, chosen: ChosenRows | None = None) -> torch.Tensor:
    """A JAGGED column, or its chosen rows, as a nested tensor."""
    numbers, dim = message.numbers, node.fields[2]
    row_splits = message.splits(numbers[node.number + GROUP], numbers[node.dims + dim - 1])
    values = tensor_of_node(message, node, chosen)
    if chosen is not None:
        row_splits = chosen.among(row_splits)[0]
    return nested_tensor(values, row_splits, dim)


def _whole_tensor(
    message: Message, node: Node, shape: tuple[int, ...], goes_to_device: bool
) -> torch.Tensor:
    numbers, name = message.numbers, node.fields[0]
    dtype = torch_dtype(name)
    buffer, offset, storage_code = numbers[node.number : node.number + GROUP]
    elements = math.prod(shape)
    # Ignore the storage code if there are no elements.
    if storage_code != PLAIN and elements:
        place = CellPlace(buffer, offset, storage_code, elements, name)
        return from_bytes(message.elements(place, 0, elements), dtype, shape)
    numpy_name = NUMPY_BY_NAME.get(name) if len(shape) <= MOST_ARRAY_DIMS else None
    # `bytes_at` need not align what numpy knows: the flag `aligned` below is ten times as fast.
    alignment = node.itemsize if numpy_name is None else 1
    size = elements * node.itemsize
    if goes_to_device:
        data = writable(message.read(buffer, offset, size), False, alignment)
    else:
        data = message.bytes_at(buffer, offset, size, alignment)
    if numpy_name is None or not elements:
        return from_bytes(data, dtype, shape)
    array: Any = np.ndarray(shape, numpy_name, data)
    return torch.from_numpy(array if array.flags.aligned else array.copy())


def values_from_cells(cells: Any, view: RaggedView) -> torch.Tensor:
    """`cells`, which `gathered_cells` copied from the rows of a view, as a tensor."""
    return values_of_cells(cells, view)


def jagged_of_values(values: torch.Tensor, row_splits: RowSplits, dim: int) -> torch.Tensor:
    """The jagged column of `values`, whose rows are end to end."""
    return nested_tensor(values, row_splits, dim)


# --- rows of objects ---------------------------------------------------------------------------


def column_of_objects(items: list[Any]) -> NonTensorStack:
    """The leaf of a TensorDict that holds these objects."""
    return stack_of_payloads(items)


def leaf_of_objects(items: list[Any], *, whole: bool) -> Any:
    """The leaf of a TensorDict that holds the objects of all rows, or of chosen ones.

    If a whole column has no rows, it is a stack, as `decode` makes it.
    """
    return (stack_of_payloads if whole else leaf_of_rows)(items)


def is_payload(item: Any) -> bool:
    """Whether tensordict would store an object unchanged."""
    return not is_non_tensor(item)


def maker_of_rows(message: Message, cells: Node, chosen: ChosenRows | None) -> MakeRow:
    """A function that makes the tensor of a row, with a storage that is only its own bytes.

    On the host the tensors alias the cells; on a device they are copies.
    """
    return _tensor_maker(tensor_of_node(message, cells, chosen))


def rows_of_cells(cells: Any, view: RaggedView) -> MakeRow:
    """As `maker_of_rows`, for `cells`, a copy of the rows of a view."""
    return _tensor_maker(values_of_cells(cells, view))


def _tensor_maker(values: torch.Tensor) -> MakeRow:
    """A `MakeRow` whose tensors have storages of their own."""
    itemsize, dtype = values.itemsize, values.dtype
    if values.is_cpu:
        data = as_bytes(values)
        return lambda start, end, shape: from_bytes(
            data[start * itemsize : end * itemsize], dtype, tuple(shape)
        )
    words = as_words(values)
    return lambda start, end, shape: from_words(words[start:end].clone(), dtype).view(shape)


# --- other tensors -----------------------------------------------------------------------------


def _build_strided_nested(message: Message, node: Node, budget: Budget) -> torch.Tensor:
    values, sizes = node.children
    (rank,) = node.fields
    stored = read_int64s(message, sizes)
    shapes = _checked_shapes(stored, rank, message.numbers[values.dims], values.itemsize)
    return strided_nested(tensor_of_node(message, values), shapes)


def _checked_shapes(shapes: IntArray, rank: int, elements: int, itemsize: int) -> IntArray:
    """Check the shapes against the number of elements; return them as (components, rank).

    Components of rank 0 have a 1 each in `shapes`.
    """
    if not rank:
        if (shapes != 1).any():
            raise bad("a 1 for each component without dims", "another number")
        shapes = shapes[:, :0]
    # A float does not wrap around, but may be a little less than the product.
    extents = np.maximum(shapes, 1).prod(axis=1, dtype=np.float64) * itemsize
    for shape in shapes[(extents >= MAX_BYTES / 2) | (shapes < 0).any(axis=1)].tolist():
        elements_of(shape, itemsize)
    sizes = shapes.prod(axis=1)
    total = sizes.sum(dtype=np.float64)
    cells = int(sizes.sum()) if total < 1 << 62 else sum(sizes.tolist())
    expect(cells == elements, "bad_offsets", f"component sizes of {elements} cells", cells)
    return shapes


def _build_sparse_coo(message: Message, node: Node, budget: Budget) -> torch.Tensor:
    shape = message.shape(node)
    for child in node.children:
        expect(child.kind is Kind.TENSOR, "bad_value", "a dense tensor", child.kind.name)
    storage_code = message.numbers[node.children[0].number + STORAGE_CODE]
    expect(storage_code == PLAIN, "bad_value", "indices as wide as their dtype", storage_code)
    indices, values = build_children(message, node, budget)
    if indices.dtype != torch.int64:
        raise fail("bad_sparse", f"expected int64 indices, found {indices.dtype}")
    invariants: Any = torch.sparse.check_sparse_tensor_invariants
    if not invariants.is_enabled():
        # Torch 2.11 warns of `check_invariants` unless somebody enabled or disabled the checks.
        invariants.disable()
    try:
        # A copy: torch relies on indices, so what was checked must not change with the memory.
        copy = indices.clone()
        tensor = torch.sparse_coo_tensor(
            copy, values, shape, device=values.device, check_invariants=True
        )
        if not node.fields[1]:
            # torch marks tensors of at most one cell as coalesced; restore the sender's flag.
            return tensor._coalesced_(False)
        # torch believes this flag, so check that the indices rise.
        if not _indices_rise(copy):
            raise ValueError("coalesced indices that do not rise")
        return tensor._coalesced_(True)
    except (RuntimeError, ValueError) as error:
        pass_on(error)
        detail = f"expected indices within {shape}, found {error!s:.200}"
        raise fail("bad_sparse", detail) from error


def _indices_rise(indices: torch.Tensor) -> bool:
    """Whether the columns of (dims, nnz) indices rise in lexicographic order, without repeats."""
    if 0 in indices.shape:
        return indices.shape[1] <= 1
    in_order: torch.Tensor = torch.unique(indices, dim=1)
    return torch.equal(indices, in_order)


# --- what a TensorDict holds --------------------------------------------------------------------

_TENSOR, _JAGGED = Kind.TENSOR, Kind.JAGGED


def _build_tensordict(message: Message, node: Node, budget: Budget) -> TensorDict:
    numbers = message.numbers
    rank, keys = node.fields
    size = numbers[node.dims : node.end]
    leaves: dict[str, Any] = {}
    # If a TensorDict would accept every leaf unchanged, `batch_of` skips its checks.
    fits = rank == 1 and message.device is None
    for key, child in zip(keys, node.children, strict=True):
        try:
            if child.kind is _JAGGED:
                rows = message.header.groups[numbers[child.number + GROUP]].rows
                dims = [rows, *numbers[child.dims : child.end]]
                _check_sizes(dims[: child.fields[2]], size)  # the dims before the ragged one
                leaves[key] = jagged_of_node(message, child)
            elif child.kind is _TENSOR:
                _check_sizes(numbers[child.dims : child.end], size)
                leaves[key] = tensor_of_node(message, child)
            else:
                leaf = leaves[key] = build(message, child, budget)
                _check_leaf(leaf, child, size)
                stacked = type(leaf) is NonTensorStack and leaf.batch_dims == 1
                fits = fits and stacked and len(leaf.tensordicts) == size[0]
        except WireFormatError as error:
            raise inside(error, key) from error
    if fits:
        return batch_of(leaves, size[0])
    return TensorDict(leaves, batch_size=torch.Size(size), device=message.device)


def _check_sizes(dims: list[int], size: list[int]) -> None:
    outer = dims[: len(size)]
    if outer != size:
        raise rows_differ(size, outer)


def _check_leaf(leaf: Any, node: Node, size: list[int]) -> None:
    if not is_leaf(leaf):
        raise bad("a leaf", type(leaf).__name__)
    of_user = node.kind is Kind.USER and not isinstance(
        leaf, (torch.Tensor, tensordict.UnbatchedTensor)
    )
    if of_user or node.kind in (Kind.TENSORDICT, Kind.NON_TENSOR_DATA):
        # tensordict would change the batch size of such a leaf instead of rejecting it.
        dims = list(leaf.batch_size)
        if dims[: len(size)] != size:
            raise rows_differ(size, dims)


def _build_stack(
    message: Message, node: Node, budget: Budget
) -> LazyStackedTensorDict | NonTensorStack:
    members = build_children(message, node, budget)
    batches = node.kind is Kind.LAZY_STACK
    for member in members:
        is_batch = is_leaf(member) and not isinstance(member, torch.Tensor)
        if not (is_batch if batches else is_non_tensor(member)):
            raise bad(f"members of a {node.kind.name}", type(member).__name__)
    stack_dim, dims = node.fields[0], members[0].batch_dims if members else 0
    if stack_dim > dims:  # tensordict 0.10 accepts one more
        raise bad(f"a stack dim of 0 to {dims}", stack_dim)
    make = LazyStackedTensorDict if batches else NonTensorStack
    return make(*members, stack_dim=stack_dim)


def _build_non_tensor_data(message: Message, node: Node, budget: Budget) -> NonTensorData:
    (payload,) = build_children(message, node, budget)
    return NonTensorData(payload, batch_size=torch.Size(message.shape(node)))


BUILDERS: dict[Kind, Callable[[Message, Node, Budget], Any]] = {
    Kind.TENSOR: lambda message, node, budget: tensor_of_node(message, node),
    Kind.JAGGED: lambda message, node, budget: jagged_of_node(message, node),
    Kind.STRIDED_NESTED: _build_strided_nested,
    Kind.SPARSE_COO: _build_sparse_coo,
    Kind.TENSORDICT: _build_tensordict,
    Kind.LAZY_STACK: _build_stack,
    Kind.NON_TENSOR_DATA: _build_non_tensor_data,
    Kind.NON_TENSOR_STACK: _build_stack,
}
"""What makes the value of a node, by its kind."""
