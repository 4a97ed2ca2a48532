"""`Lowering` of values of Python and numpy: lists, tuples, dicts, sets, bytes, arrays, scalars."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from jagcodec import kernels
from jagcodec.columns.batch import ColumnDict
from jagcodec.errors import WireFormatError
from jagcodec.memory.arrays import tensor_type
from jagcodec.wire import spec
from jagcodec.wire.checks import check_distinct
from jagcodec.wire.documents import TAGS
from jagcodec.wire.dtypes import bytes_in_order, numpy_name
from jagcodec.wire.items import Tree, item_of_bytes
from jagcodec.wire.native import NATIVE
from jagcodec.wire.spec import Code, Kind
from jagcodec.wire.write.lowering_objects import lower_array_rows, lower_objects
from jagcodec.wire.write.walk import STRING_TYPE, ValueWalk, lowering_of_tensors

LIST_TYPES: set[type] = {list}
"""Types that are lowered as lists; `lowering_tensors` adds types of tensordict."""

# --- containers ----------------------------------------------------------------------------------


def lower_list(walk: ValueWalk, values: list[Any]) -> Tree:
    """The tree of a list.

    A long list of numbers becomes one record, and a list of views of one storage one node.
    """
    if len(values) >= spec.LONG_LIST and (narrow := kernels.narrow_list(values)) is not None:
        return [TAGS[Kind.NUMBERS], *narrow]
    if len(values) > 1 and type(values[0]) is tensor_type():
        views = lowering_of_tensors().lower_views_of_one_storage(walk, values)
        if views is not None:
            return views
    trees, has_nodes = walk.lower_items(values)
    return (Code.LIST, *trees) if has_nodes else trees


class ListColumn(tuple[list[Any]]):
    """Marks a list as a column of a dict, rather than a value in one."""

    __slots__ = ()


def lower_list_column(walk: ValueWalk, column: ListColumn) -> Tree:
    """The tree of a list that is a column of a dict. Rows of arrays become cells end to end."""
    (rows,) = column
    are_tensors = len(rows) > 1 and type(rows[0]) is tensor_type()
    if not (are_tensors and lowering_of_tensors().are_views_of_one_storage(rows)):
        tree = lower_array_rows(walk, list(rows), spec.IN_LIST)
        if tree is not None:
            return tree
    return lower_list(walk, rows)


def lower_tuple(walk: ValueWalk, value: tuple[Any, ...]) -> Tree:
    """The tree of a tuple: a node if a value in it is one, else a record."""
    trees, has_nodes = walk.lower_items(value)
    return (Code.TUPLE, *trees) if has_nodes else [TAGS[Kind.TUPLE], *trees]


def lower_dict(walk: ValueWalk, value: dict[Any, Any]) -> Tree:
    """The tree of a dict. The keys of a `ColumnDict` are names of columns."""
    if not STRING_TYPE.issuperset(map(type, value)):
        return _lower_dict_of_any_keys(walk, value)
    names: Iterable[str] = value
    columns: Iterable[Any] = value.values()
    if type(value) is ColumnDict:
        walk.note_unbacked_rows(value.rows)
        if walk.narrow_names is not None:
            names = walk.enter_columns(value)
        columns = [ListColumn((x,)) if type(x) in LIST_TYPES else x for x in columns]
    elif NATIVE.issuperset(map(type, value.values())):
        return value
    trees, has_nodes = walk.lower_each(names, columns)
    return (Code.MAP, tuple(value), *trees) if has_nodes else dict(zip(value, trees, strict=True))


def _lower_dict_of_any_keys(walk: ValueWalk, value: dict[Any, Any]) -> Tree:
    _check_keys(walk, value)
    keys = [_lower_key(walk, key) for key in value]
    values_before = len(walk.values)
    trees, has_nodes = walk.lower_each(value, value.values())
    if not has_nodes:
        pairs = zip(keys, trees, strict=True)
        return [TAGS[Kind.DICT], *(part for pair in pairs for part in pair)]
    walk.store_before(values_before, [keys])
    return (Code.DICT, None, *trees)


def lower_set(walk: ValueWalk, value: Any) -> Tree:
    """The record of a set or a frozenset."""
    _check_keys(walk, value)
    members = [_lower_key(walk, item) for item in value]
    # Sorted by encoded bytes: a set's own order follows the process's hash seed.
    members.sort(key=walk.msgpack)
    return [TAGS[Kind.SET if isinstance(value, set) else Kind.FROZENSET], *members]


def _check_keys(walk: ValueWalk, keys: Collection[Any]) -> None:
    """Raise an error for dict keys or set members that readers would not accept."""
    try:
        check_distinct(list(keys), "keys")
    except WireFormatError as error:
        # Every reader would reject these keys; here the error reaches the caller who passed them.
        raise walk.error(error.reason, error.detail) from error


def _lower_key(walk: ValueWalk, key: Any) -> Tree:
    """The document of a dict key or a set member."""
    if type(key) is bytes:
        return key
    # Do not call `default`: its result might equal another key, or not be hashable.
    walk.default, default = None, walk.default
    tree = walk.lower_at(key, key)
    walk.default = default
    if type(tree) is tuple:
        why = " as a dict key or set member: tensors are hashed by identity"
        raise walk.unsupported(key, why)
    return tree


# --- bytes, arrays and scalars -------------------------------------------------------------------


def lower_bytes(walk: ValueWalk, value: bytes) -> Tree:
    """The tree of bytes: a document if they are few."""
    if len(value) < spec.INLINE_BYTES:
        return value
    walk.items.append(item_of_bytes(memoryview(value), (len(value),)))
    return (Code.BYTES,)


def lower_array(walk: ValueWalk, array: np.ndarray[Any, Any]) -> Tree:
    """The node of an array, which arrives as an array."""
    dtype, shape = array.dtype, array.shape
    walk.check_dims(shape, dtype.itemsize)
    if dtype.kind == "O":
        tree = lower_objects(walk, array.flat, spec.IN_ARRAY if len(shape) == 1 else None)
        if tree[0] == Code.ARRAY_ROWS:
            return tree
        walk.items += shape
        return (Code.OBJECT_ARRAY, len(shape))
    name = numpy_name(dtype)
    if name is None:
        return lower_foreign_dtype(walk, array)
    is_in_order = array.flags.c_contiguous and dtype.kind in "biufc"
    data = array if is_in_order else bytes_in_order(array)
    walk.items.append(item_of_bytes(data, shape))
    return (Code.ARRAY, name, len(shape))


def lower_scalar(walk: ValueWalk, value: np.generic) -> Tree:
    """The record of a scalar of numpy."""
    if not type(value).__module__.startswith("numpy"):
        raise walk.unsupported(value)
    name = numpy_name(value.dtype)
    if name is None:
        return lower_foreign_dtype(walk, value)
    return [TAGS[Kind.SCALAR], name, bytes_in_order(np.asarray(value)).tobytes()]


def lower_foreign_dtype(walk: ValueWalk, value: Any) -> Tree:
    """The tree of an array or a scalar whose dtype messages do not have: a pickle, or an error."""
    remedy = "make a dict of its fields" if value.dtype.names else "convert it with .astype"
    why = f" with dtype {value.dtype}; {remedy}, or pass allow_pickle=True on both sides"
    return walk.lower_foreign(value, why)
