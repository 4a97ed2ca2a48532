"""`Lowering` of batches and their columns: each column becomes the node of a leaf of a TensorDict.

`lower_each_column` makes the nodes, also for TensorDicts. It finds the type of a column in
`COLUMN_HANDLERS`, at the end of this file. If the type is not there, the column is lowered as any
other value, and must become the node of a column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jagcodec.columns.batch import Batch, CellRows, Columns, OneObject, to_send
from jagcodec.columns.held import column_of
from jagcodec.memory import extent_of
from jagcodec.memory.arrays import IntArray
from jagcodec.rows.views import RaggedView
from jagcodec.wire import spec
from jagcodec.wire.dtypes import NAME_OF_DTYPE, TORCH_NAME_OF_NUMPY, bytes_in_order
from jagcodec.wire.items import Item, Tree
from jagcodec.wire.spec import Code
from jagcodec.wire.write.lowering_objects import lower_objects
from jagcodec.wire.write.lowering_values import lower_foreign_dtype
from jagcodec.wire.write.walk import Handler, ValueWalk, lowering_of_tensors


def lower_open_batch(walk: ValueWalk, batch: Batch) -> Tree:
    """The tree of an open batch: that of its columns."""
    return walk.lower(to_send(batch))


def lower_columns(walk: ValueWalk, value: Columns) -> Tree:
    """The node of `Columns`, which is the node of a TensorDict of these columns."""
    sizes = [value.rows, *value.inner_sizes]
    walk.note_unbacked_rows(extent_of(sizes))
    walk.items += sizes
    nodes = lower_each_column(walk, value.columns, sizes, COLUMN_HANDLERS)
    return (Code.TENSORDICT, len(sizes), tuple(value.columns), *nodes)


def lower_each_column(
    walk: ValueWalk, columns: Mapping[str, Any], sizes: list[int], handlers: Mapping[type, Handler]
) -> list[Tree]:
    """The node of each column of a batch of batch size `sizes`.

    Raises an error for a column with other rows. The first item of most columns shows their rows.
    """
    if len(walk.path) >= spec.MAX_DEPTH and columns:
        raise walk.too_deep()
    nodes: list[Tree] = []
    rows = sizes[0] if len(sizes) == 1 else None
    items, path = walk.items, walk.path
    names: Iterable[str] = columns
    if walk.narrow_names is not None:
        names = walk.enter_columns(columns)
    for name in names:
        column = columns[name]
        if isinstance(column, Item):  # the maker of the item checked its rows
            nodes.append(walk.add(column))
            continue
        lower = handlers.get(type(column))
        first = len(items)
        path.append(name)
        node = _lower_leaf(walk, column, sizes, name) if lower is None else lower(walk, column)
        path.pop()
        if lower and not (len(items) > first and _has_rows(items[first], rows)):
            _check_batch_size(walk, column, sizes, name)
        nodes.append(node)
    return nodes


def _has_rows(item: Any, rows: int | None) -> bool:
    """Whether the first item of a column shows that the column has `rows` rows."""
    if type(item) is not Item:
        return False
    if item.splits is not None:
        return item.splits.rows == rows
    if item.data is None:  # on a device: the first dim may be that of tokens
        return False
    return item.dtype is not None and len(item.dims) > 0 and item.dims[0] == rows


def _lower_leaf(walk: ValueWalk, leaf: Any, sizes: list[int], name: str) -> Tree:
    """The node of a column whose type has no handler for columns."""
    if walk.default is not None:
        # Call it here, so that `_check_batch_size` checks the rows of its result.
        leaf = walk.apply_default(leaf)
    _check_batch_size(walk, leaf, sizes, name)
    node = walk.lower(leaf)
    if not _is_column(node):
        remedy = "make it a NonTensorData of the batch's size"
        raise walk.unsupported(leaf, f" as a leaf of a TensorDict; {remedy}")
    return node


def _is_column(node: Tree) -> bool:
    """Whether a TensorDict may have such a node as a leaf."""
    if type(node) is not tuple or node[0] not in spec.COLUMN_KINDS:
        return False
    return bool(node[0] != Code.ARRAY_ROWS or node[1] == spec.IN_STACK)


def _check_batch_size(walk: ValueWalk, column: Any, sizes: list[int], name: str) -> None:
    """Raise an error for a column without the rows of its batch, which the caller may change."""
    holder = column_of(column)
    column_sizes = holder.sizes(sizes)
    if column_sizes != sizes and sizes:
        if walk.path[-1:] == [name]:
            walk.path.pop()  # the error is about the batch
        where = f"nested {name!r}" if holder.is_batch else repr(name)
        detail = f"expected batch size {sizes} in {where} too, found {column_sizes}"
        raise walk.error("row_mismatch", detail)


def items_of_columns(walk: ValueWalk, batch: Columns) -> dict[str, Item]:
    """Lower the columns of a batch, and return the items of those that are one item with its rows.

    For `walk.messages`, the caller must call `write_rows`, which gives data to their items.
    """
    single: dict[str, Any] = {}  # the items of columns that are one item
    items = walk.items
    for name, column in batch.columns.items():
        first = len(items)
        lower_each_column(walk, {name: column}, [batch.rows], COLUMN_HANDLERS)
        if len(items) == first + 1:
            single[name] = items[first]
    walk.fetch()
    return {name: item for name, item in single.items() if _has_rows(item, batch.rows)}


# --- columns of numbers ---------------------------------------------------------------------------


def lower_view(walk: ValueWalk, view: RaggedView) -> Tree:
    """The node of the rows of a view. Rows scattered in the host's memory stay in place."""
    if view.is_tensor:
        return lowering_of_tensors().lower_rows_of_tensor(walk, view)
    return lower_rows_of_array(walk, view, view.memory, NAME_OF_DTYPE[view.dtype])


def lower_rows_of_array(walk: ValueWalk, view: RaggedView, array: Any, dtype: str) -> Tree:
    """The node of the rows of a view of `array`, which is in the host's memory."""
    starts, splits, dims = view.starts, view.row_splits, view.values_shape
    data: Any = view
    if view.is_end_to_end:
        data = array if _is_in_order(array) else bytes_in_order(array)
    elif splits.rows == 1 and type(starts) is int and _is_in_order(array):
        # A padded rectangle of one row: the row is the first cells of its memory.
        size = math.prod(dims)
        data = array if array.size == size else array.reshape(-1)[:size]
    return walk.add(Item(data, dims, splits, dtype, view.ragged_dim))


def _is_in_order(memory: Any) -> bool:
    """Whether the memory of a view is a contiguous array."""
    return isinstance(memory, np.ndarray) and memory.flags.c_contiguous


def _lower_cell_rows(walk: ValueWalk, rows: CellRows) -> Tree:
    """The node of rows of an array, which stay in place and arrive as a tensor."""
    view: Any = rows.view
    walk.check_rank(view.memory)
    return walk.add(Item(view, view.values_shape, None, NAME_OF_DTYPE[view.dtype]))


def lower_cells(walk: ValueWalk, array: np.ndarray[Any, Any], dtype: str) -> Tree:
    """The node of an array whose dtype torch has: it arrives as a tensor."""
    walk.check_rank(array)
    data = array if array.flags.c_contiguous else bytes_in_order(array)
    return walk.add(Item(data, array.shape, None, dtype))


def lower_int64s(walk: ValueWalk, rows: IntArray) -> Tree:
    """The TENSOR of rows of int64s, which is never stored narrow."""
    walk.items.append(Item(rows, rows.shape))
    return (Code.TENSOR, "int64", 2)


def _lower_array_column(walk: ValueWalk, array: np.ndarray[Any, Any]) -> Tree:
    """The node of an array: a tensor if torch has its dtype, else a leaf of objects."""
    name = TORCH_NAME_OF_NUMPY.get(array.dtype)
    if name is not None:
        return lower_cells(walk, array, name)
    if array.dtype.kind in "biufc":
        native = array.dtype.newbyteorder("=")
        if native.name not in spec.TORCH_ITEMSIZES:
            return lower_foreign_dtype(walk, array)
        return lower_cells(walk, array.astype(native, copy=False), native.name)
    if array.dtype == object and array.ndim == 1:
        return _lower_list_of_objects(walk, list(array))
    return _lower_array_leaf(walk, array)


# --- columns of objects ---------------------------------------------------------------------------


def _lower_list_of_objects(walk: ValueWalk, rows: list[Any]) -> Tree:
    """The node of a list with one object per row."""
    if not rows:
        return _lower_array_leaf(walk, np.empty(0, dtype=object))
    return lower_objects(walk, rows, spec.IN_STACK)


def _lower_array_leaf(walk: ValueWalk, array: np.ndarray[Any, Any]) -> Tree:
    """The node of an array of objects or texts, as in a leaf of a TensorDict."""
    walk.note_unbacked_rows(len(array))
    walk.items.append(len(array))
    return (Code.NON_TENSOR_DATA, 1, walk.lower_at("data", array))


def _lower_one_object(walk: ValueWalk, one: OneObject) -> Tree:
    """The node of a `OneObject`."""
    sizes = [one.rows, *one.inner_sizes]
    walk.note_unbacked_rows(extent_of(sizes))
    walk.items += sizes
    return lower_shared_object(walk, one.data, len(sizes))


def lower_shared_object(walk: ValueWalk, data: Any, dims: int) -> Tree:
    """The node of one object for a whole batch of `dims` dims. The caller added their sizes."""
    values_before = len(walk.values)
    tree = walk.lower_at("data", data)
    if type(tree) is not tuple:
        walk.store_before(values_before, [tree])
        tree = None
    return (Code.NON_TENSOR_DATA, dims, tree)


# In `Columns` a list has one object per row, and an array is a tensor.
COLUMN_HANDLERS: dict[type, Handler] = {
    RaggedView: lower_view,
    CellRows: _lower_cell_rows,
    OneObject: _lower_one_object,
    np.ndarray: _lower_array_column,
    list: _lower_list_of_objects,
}
