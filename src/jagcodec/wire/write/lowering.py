"""`Lowering`: a value to a schema and items, by one table of types."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jagcodec import kernels
from jagcodec._arguments import array_remedy, result_of
from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import Batch, CellRows, ColumnDict, Columns, Name, OneObject, to_send
from jagcodec.columns.column import column_of
from jagcodec.errors import (
    JagcodecError,
    Reason,
    UnsupportedTypeError,
    WireFormatError,
    brief,
    child_path,
)
from jagcodec.memory import extent_of
from jagcodec.memory.arrays import ByteArray, IntArray, is_of_torch, tensor_type
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, in_buffers
from jagcodec.wire import documents, spec
from jagcodec.wire.array_rows import array_rows
from jagcodec.wire.checks import check_distinct, is_oversized_empty
from jagcodec.wire.documents import TAGS
from jagcodec.wire.dtypes import (
    NAME_OF_DTYPE,
    TORCH_NAME_OF_NUMPY,
    DtypeName,
    bytes_in_order,
    numpy_name,
)
from jagcodec.wire.frames import NO_BYTES
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.native import NATIVE, first_same, written_at_once
from jagcodec.wire.registry import registered_name, state_of
from jagcodec.wire.spec import PLAIN, Code, Kind
from jagcodec.wire.write.items import (
    Item,
    Lowered,
    RowMessages,
    Tree,
    item_of_bytes,
    item_of_documents,
)

_STRING_TYPE = frozenset((str,))
_MOST_ARRAY_ROWS = DEFAULT_LIMITS.expanded // (spec.EXPANSION * spec.ARRAY_COST)
"""With more rows that are arrays, a narrow message may ask for more memory than readers allow."""


class Lowering:
    """One walk over a value, which makes the tree of its schema, items and documents.

    Cells on devices are read at the end, in `finished`.
    """

    def __init__(
        self,
        allow_pickle: bool,
        default: Callable[[Any], Any] | None = None,
        narrow: bool | frozenset[Name] = False,
    ) -> None:
        self._allow_pickle = allow_pickle
        # The names of the columns to store narrow (None if none are given), and all names found.
        self._narrow = None if isinstance(narrow, bool) else narrow
        self.columns: dict[Name, None] = {}
        # The column that is being lowered.
        self._column_name: Name = ()
        self._column_is_narrow: bool = narrow is True
        self._default = default
        self._defaults = 0
        self._path: list[Any] = []
        self.stacks = 0
        self.items: list[Any] = []
        self.values: list[Any] = []
        self.unbacked: list[tuple[str, int]] = []
        self._array_rows = 0  # how many rows are arrays or None
        self.on_devices: list[Any] = []  # tensors whose cells `_fetch` gets, with one wait
        self.indices: dict[Any, Any] = {}  # cell indices on devices, which columns share
        # Functions that give items their data. `_fetch` calls them in this order after the wait.
        self.unread: list[Callable[[Any], None]] = []
        self.messages: list[RowMessages] = []

    @functools.cached_property
    def pool(self) -> RowSplitsPool:
        return RowSplitsPool()

    def finished(self, tree: Tree, values: Sequence[Any] = ()) -> Lowered:
        """Everything that was lowered, ready to be placed; `values` are added as documents."""
        if type(tree) is not tuple:  # the whole value is one document
            self.values.append(tree)
            tree = None
        self.values += values
        lowered = self._lowered(tree, self.messages)
        self._fetch()
        return lowered

    def _fetch(self) -> None:
        """Wait for the devices once, then give the items their cells."""
        if self.unread:
            _of_tensors().fetch(self.on_devices, self.unread)

    def items_of(self, batch: Columns) -> dict[str, Item]:
        """The columns of a batch that are one item, with the batch's rows.

        Columns of `messages` get their data from `write_rows`, which the caller must call.
        """
        found: dict[str, Any] = {}
        items = self.items
        for name, column in batch.columns.items():
            first = len(items)
            self.lower_each_column({name: column}, [batch.rows], _COLUMN_HANDLERS)
            if len(items) == first + 1:
                found[name] = items[first]
        self._fetch()
        return {name: item for name, item in found.items() if _has_rows(item, batch.rows)}

    def _lowered(self, tree: Tree, messages: Sequence[RowMessages] = ()) -> Lowered:
        values = self._document_of(self.values) if self.values else NO_VALUES
        asks = self._array_rows > _MOST_ARRAY_ROWS
        return Lowered(tree, self.items, values, self.unbacked, messages, asks)

    def lower(self, value: Any) -> Tree:
        """The tree of a value. Its data is added to `items`."""
        kind = type(value)
        if kind in NATIVE:
            return value
        handler = _HANDLERS.get(kind) or _handler_of(kind)
        return self.lower_foreign(value) if handler is None else handler(self, value)

    def lower_at(self, key: Any, value: Any) -> Tree:
        """The tree of the value under a key, which errors name."""
        if type(value) in NATIVE or (
            # Fast for chat messages, which are dicts of plain values: such a dict is a document.
            type(value) is dict
            and len(self._path) < spec.MAX_DEPTH
            and _STRING_TYPE.issuperset(map(type, value))
            and NATIVE.issuperset(map(type, value.values()))
        ):
            return value
        self._path.append(key)
        if len(self._path) > spec.MAX_DEPTH:
            raise self._too_deep()
        lowered = self.lower(value)
        self._path.pop()
        return lowered

    def _lower_each(self, keys: Iterable[Any], values: Iterable[Any]) -> tuple[list[Tree], bool]:
        """Lower several values; return their trees, and whether any is a node.

        If one is, documents go to `self.values`, with None in their place.
        """
        trees: list[Tree] = []
        has_nodes = False
        for key, value in zip(keys, values, strict=False):
            values_before = len(self.values)
            tree = self.lower_at(key, value)
            if has_nodes and type(tree) is not tuple:
                self.values.append(tree)
                tree = None
            elif type(tree) is tuple and not has_nodes:
                # This is the first node. Documents are stored in the order of the walk, so those
                # of the earlier trees go before the ones that this node has just added.
                has_nodes = True
                self.values[values_before:values_before] = trees
                trees = [None] * len(trees)
            trees.append(tree)
        return trees, has_nodes

    def _lower_items(self, values: Sequence[Any]) -> tuple[list[Tree], bool]:
        if NATIVE.issuperset(map(type, values)):
            return list(values), False
        return self._lower_each(range(len(values)), values)

    @functools.cached_property
    def _msgpack(self) -> Callable[[Any], bytes]:
        return documents.writer().pack  # type: ignore[no-any-return]

    def _document_of(self, document: Any) -> bytes:
        try:
            return self._msgpack(document)
        except ValueError as error:
            raise self.error("too_large", f"msgpack: {error}") from error

    # Errors, and types that are not listed

    def where(self) -> str:
        return functools.reduce(child_path, self._path, "$")

    def error(self, reason: Reason, detail: str) -> UnsupportedTypeError:
        return UnsupportedTypeError(reason, self.where(), detail)

    def _too_deep(self) -> UnsupportedTypeError:
        detail = f"expected at most {spec.MAX_DEPTH} nested containers, found more (a cycle?)"
        return self.error("too_deep", detail)

    def unsupported(self, value: Any, why: str = "") -> UnsupportedTypeError:
        cls = type(value)
        builtin = cls.__module__ == "builtins"
        name = cls.__qualname__ if builtin else f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, np.ndarray):
            remedy = array_remedy(value)
            why = why or (f"; {remedy}, or register its type with register_type" if remedy else "")
        elif not why and is_of_torch(cls):
            why = _of_tensors().remedy_of(value)
        why = why or _REMEDY
        return self.error("unsupported_type", f"{name} cannot be encoded{why}")

    def _lower_registered(self, value: Any) -> Tree:
        name = registered_name(type(value))
        try:
            state = state_of(value)
        except JagcodecError:
            raise
        except Exception as error:  # the user's function may raise anything
            why = f": its to_state raises {type(error).__name__}: {error}"
            raise self.unsupported(value, why) from error
        tree = self.lower_at("state", state)
        return (Code.USER, name, tree) if type(tree) is tuple else [TAGS[Kind.USER], name, tree]

    def lower_foreign(self, value: Any, why: str = "") -> Tree:
        """The tree of the value that `default` returns, or of a pickle; raises if neither works."""
        if self._default is not None:
            if len(self._path) + self._defaults >= spec.MAX_DEPTH:
                detail = (
                    "expected values of default that can be encoded, "
                    f"found none in {spec.MAX_DEPTH} calls"
                )
                raise self.error("too_deep", detail)
            new = result_of(self._default, (value,), "default")
            if new is not value:
                self._defaults += 1
                tree = self.lower(new)
                self._defaults -= 1
                return tree
        if not self._allow_pickle:
            raise self.unsupported(value, why)
        try:
            return [TAGS[Kind.PICKLE], pickle.dumps(value, protocol=5)]
        except Exception as error:  # a __reduce__ may raise anything
            raise self.unsupported(value, f"; pickle failed too: {error}") from error

    # Python

    def lower_list(self, values: list[Any]) -> Tree:
        if len(values) >= spec.LONG_LIST and (narrow := kernels.narrow_list(values)) is not None:
            return [TAGS[Kind.NUMBERS], *narrow]
        if len(values) > 1 and type(values[0]) is tensor_type():
            views = _of_tensors().lower_views_of_one_storage(self, values)
            if views is not None:
                return views
        trees, has_nodes = self._lower_items(values)
        return (Code.LIST, *trees) if has_nodes else trees

    def _lower_list_column(self, column: _ListColumn) -> Tree:
        """A list that is a column of a dict."""
        (rows,) = column
        are_tensors = len(rows) > 1 and type(rows[0]) is tensor_type()
        if not (are_tensors and _of_tensors().are_views_of_one_storage(rows)):
            tree = self._lower_array_rows(list(rows), spec.IN_LIST)
            if tree is not None:
                return tree
        return self.lower_list(rows)

    def _lower_tuple(self, value: tuple[Any, ...]) -> Tree:
        trees, has_nodes = self._lower_items(value)
        return (Code.TUPLE, *trees) if has_nodes else [TAGS[Kind.TUPLE], *trees]

    def _lower_dict(self, value: dict[Any, Any]) -> Tree:
        """A dict; the keys of a `ColumnDict` are names of columns."""
        if not _STRING_TYPE.issuperset(map(type, value)):
            return self._lower_dict_of_any_keys(value)
        names: Iterable[str] = value
        columns: Iterable[Any] = value.values()
        if type(value) is ColumnDict:
            self.note_unbacked_rows(value.rows)
            if self._narrow is not None:
                names = self._each_named(value, self._narrow)
            columns = [_ListColumn((x,)) if type(x) in _LIST_TYPES else x for x in columns]
        elif NATIVE.issuperset(map(type, value.values())):
            return value
        trees, has_nodes = self._lower_each(names, columns)
        return (
            (Code.MAP, tuple(value), *trees) if has_nodes else dict(zip(value, trees, strict=True))
        )

    def _lower_dict_of_any_keys(self, value: dict[Any, Any]) -> Tree:
        self._check_keys(value)
        keys = [self._lower_key(key) for key in value]
        values_before = len(self.values)
        trees, has_nodes = self._lower_each(value, value.values())
        if not has_nodes:
            pairs = zip(keys, trees, strict=True)
            return [TAGS[Kind.DICT], *(part for pair in pairs for part in pair)]
        self.values.insert(values_before, keys)
        return (Code.DICT, None, *trees)

    def _lower_set(self, value: Any) -> Tree:
        self._check_keys(value)
        members = [self._lower_key(item) for item in value]
        # Sorted by encoded bytes: a set's own order follows the process's hash seed.
        members.sort(key=self._msgpack)
        return [TAGS[Kind.SET if isinstance(value, set) else Kind.FROZENSET], *members]

    def _check_keys(self, keys: Collection[Any]) -> None:
        try:
            check_distinct(list(keys), "keys")
        except WireFormatError as error:
            # Every reader would reject these keys; here the error reaches who passed them.
            raise self.error(error.reason, error.detail) from error

    def _lower_key(self, key: Any) -> Tree:
        if type(key) is bytes:
            return key
        # Do not call `default`: its result might equal another key, or not be hashable.
        self._default, default = None, self._default
        tree = self.lower_at(key, key)
        self._default = default
        if type(tree) is tuple:
            why = " as a dict key or set member: tensors are hashed by identity"
            raise self.unsupported(key, why)
        return tree

    def _lower_bytes(self, value: bytes) -> Tree:
        if len(value) < spec.INLINE_BYTES:
            return value
        self.items.append(item_of_bytes(memoryview(value), (len(value),)))
        return (Code.BYTES,)

    # Rows of objects

    def _lower_array_rows(self, rows: Sequence[Any], holder: int) -> Tree | None:
        """The tree of rows that are each None, or an array or tensor of one dtype; else None."""
        found = array_rows(rows)
        if found is None or len(self._path) >= spec.MAX_DEPTH:  # the walk explains the depth
            return None
        self._array_rows += len(rows)
        parts, lengths, dims, dtype, tensors = found
        splits = RowSplits.from_counts(lengths)
        item = Item(None, (splits.total,), splits, dtype)
        cells = (
            _of_tensors().bytes_of_tensors(self, item, parts)
            if tensors
            else map(bytes_in_order, parts)
        )
        if cells is not None:
            item.data = _rows_in_place([data for data in cells if len(data)], dtype, splits)
        children = self.add(item), self.add(Item(dims, dims.shape, None, "int64"))
        return (Code.ARRAY_ROWS, holder, int(tensors), *children)

    def lower_payloads(self, payloads: Iterable[Any], holder: int | None) -> Tree:
        """The tree of rows of objects: a document per row, or a message per row.

        Rows become messages if one of them needs buffers. With a `holder`, rows that are all arrays
        or None become cells end to end instead.
        """
        # A list keeps all rows alive, so that no two have the same id.
        rows = payloads if type(payloads) is list else list(payloads)
        written = written_at_once(rows, spec.MAX_DEPTH - len(self._path))
        if written is not None:
            rows_as_bytes, same = written
            self.items.append(item_of_documents(rows_as_bytes, same))
            return _OF_DOCUMENTS
        arrays = None if holder is None else self._lower_array_rows(rows, holder)
        if arrays is not None:
            return arrays
        same = first_same(rows)
        places = same or range(len(rows))
        # Lower each object once, even if it is in several rows.
        lowered: dict[int, Any] = {i: self._lower_row(i, rows[i]) for i in dict.fromkeys(places)}
        if Lowered not in map(type, lowered.values()):
            self.items.append(item_of_documents([lowered[i] for i in places], same))
            return _OF_DOCUMENTS
        item = item_of_documents([b""] * len(rows), same)
        item.stored = PLAIN + spec.BLOBS
        self.items.append(item)
        self.messages.append(RowMessages(item, lowered, places))
        return _OF_DOCUMENTS

    def _lower_row(self, i: int, row: Any) -> bytes | Lowered:
        """The document of a row, or if it needs buffers a lowered value, for a separate message."""
        if type(row) in NATIVE:
            return self._document_of(row)
        # Lower the row into lists of its own, then continue with those of the outer message.
        outer = self.items, self.values, self.unbacked, self._array_rows
        self.items, self.values, self.unbacked, self._array_rows = [], [], [], 0
        tree = self.lower_at(i, row)
        made = self._lowered(tree) if type(tree) is tuple else self._document_of(tree)
        self.items, self.values, self.unbacked, self._array_rows = outer
        return made

    # numpy

    def _lower_array(self, array: np.ndarray[Any, Any]) -> Tree:
        dtype, shape = array.dtype, array.shape
        self.check_dims(shape, dtype.itemsize)
        if dtype.kind == "O":
            tree = self.lower_payloads(array.flat, spec.IN_ARRAY if len(shape) == 1 else None)
            if tree[0] == Code.ARRAY_ROWS:
                return tree
            self.items += shape
            return (Code.OBJECT_ARRAY, len(shape))
        name = numpy_name(dtype)
        if name is None:
            return self._lower_unnamed_dtype(array)
        plain = array.flags.c_contiguous and dtype.kind in "biufc"
        data = array if plain else bytes_in_order(array)
        self.items.append(item_of_bytes(data, shape))
        return (Code.ARRAY, name, len(shape))

    def _lower_scalar(self, value: np.generic) -> Tree:
        if not type(value).__module__.startswith("numpy"):
            raise self.unsupported(value)
        name = numpy_name(value.dtype)
        if name is None:
            return self._lower_unnamed_dtype(value)
        return [TAGS[Kind.SCALAR], name, bytes_in_order(np.asarray(value)).tobytes()]

    def _lower_unnamed_dtype(self, value: Any) -> Tree:
        """The tree of an array or a scalar whose dtype messages do not have, or an error."""
        remedy = "make a dict of its fields" if value.dtype.names else "convert it with .astype"
        why = f" with dtype {value.dtype}; {remedy}, or pass allow_pickle=True on both sides"
        return self.lower_foreign(value, why)

    # Cells

    def add(self, item: Item) -> Tree:
        """Add the item of a column of cells or documents, and return its node."""
        self.items.append(item)
        dtype, dims = item.dtype, item.dims
        if dtype is None:
            return _OF_DOCUMENTS
        item.narrow = self._column_is_narrow and dtype in spec.INTEGER_DTYPES
        if 0 in dims:
            self.check_dims(dims, spec.TORCH_ITEMSIZES[dtype])
        if item.splits is None:
            return (Code.TENSOR, dtype, len(dims))
        return (Code.JAGGED, dtype, len(dims), item.ragged_dim)

    def check_dims(self, dims: Sequence[int], itemsize: int) -> None:
        """Refuse dims next to one of 0 that no reader accepts."""
        if is_oversized_empty(dims, itemsize):
            detail = (
                f"expected dims next to 0 of fewer than {spec.MAX_BYTES} bytes, "
                f"found {brief(list(dims))} of {itemsize} each"
            )
            raise self.error("too_large", detail)

    def lower_cells(self, array: np.ndarray[Any, Any], dtype: str) -> Tree:
        """The node of an array whose dtype torch has: it arrives as a tensor."""
        self.check_rank(array)
        data = array if array.flags.c_contiguous else bytes_in_order(array)
        return self.add(Item(data, array.shape, None, dtype))

    def check_rank(self, cells: Any) -> None:
        """Refuse an array or a tensor of more dims than messages have."""
        if cells.ndim > spec.MAX_NDIM:
            found = f" with {cells.ndim} dims: the limit is {spec.MAX_NDIM}"
            raise self.unsupported(cells, found)

    def _lower_cell_rows(self, rows: CellRows) -> Tree:
        """The node of rows of an array, which stay in place and arrive as a tensor."""
        view: Any = rows.view
        self.check_rank(view.memory)
        return self.add(Item(view, view.values_shape, None, NAME_OF_DTYPE[view.dtype]))

    def lower_view(self, view: RaggedView) -> Tree:
        """The node of the rows of a view. Rows scattered in the host's memory stay in place."""
        if view.is_tensor:
            return _of_tensors().lower_rows_of_tensor(self, view)
        return self.add_rows(view, view.memory, NAME_OF_DTYPE[view.dtype])

    def add_rows(self, view: RaggedView, array: Any, dtype: str) -> Tree:
        """The node of the rows of a view of `array`, which is in the host's memory."""
        starts, splits, dims = view.starts, view.row_splits, view.values_shape
        data: Any = view
        if view.is_end_to_end:
            data = array if _is_in_order(array) else bytes_in_order(array)
        elif splits.rows == 1 and type(starts) is int and _is_in_order(array):
            # A padded rectangle of one row: the row is the first cells of its memory.
            size = math.prod(dims)
            data = array if array.size == size else array.reshape(-1)[:size]
        return self.add(Item(data, dims, splits, dtype, view.ragged_dim))

    def lower_int64s(self, rows: IntArray) -> Tree:
        """The TENSOR of rows of int64s, which is never stored narrow."""
        self.items.append(Item(rows, rows.shape))
        return (Code.TENSOR, "int64", 2)

    # Columns

    def _each_named(self, names: Iterable[str], narrow: frozenset[Name]) -> Iterator[str]:
        """Make each name that of the current column, then yield it.

        The name of the current column decides what is stored narrow.
        """
        outer, outer_is_narrow = self._column_name, self._column_is_narrow
        for name in names:
            path = self._column_name = (*outer, name)
            self.columns[path] = None
            self._column_is_narrow = outer_is_narrow or path in narrow
            yield name
        # After the last column, the one that holds the batch is the current one again.
        self._column_name, self._column_is_narrow = outer, outer_is_narrow

    def _lower_columns(self, value: Columns) -> Tree:
        """The tree of `Columns`: it is that of a TensorDict of them."""
        sizes = [value.rows, *value.inner_sizes]
        self.note_unbacked_rows(extent_of(sizes))
        self.items += sizes
        nodes = self.lower_each_column(value.columns, sizes, _COLUMN_HANDLERS)
        return (Code.TENSORDICT, len(sizes), tuple(value.columns), *nodes)

    def lower_each_column(
        self, columns: Mapping[str, Any], sizes: list[int], handlers: Mapping[type, Handler]
    ) -> list[Tree]:
        """The node of each column of a batch of batch size `sizes`."""
        if len(self._path) >= spec.MAX_DEPTH and columns:
            raise self._too_deep()
        nodes: list[Tree] = []
        rows, items, path = sizes[0] if len(sizes) == 1 else None, self.items, self._path
        names: Iterable[str] = columns
        if self._narrow is not None:
            names = self._each_named(columns, self._narrow)
        for name in names:
            column = columns[name]
            if isinstance(column, Item):  # the maker of the item checked its rows
                nodes.append(self.add(column))
                continue
            lower = handlers.get(type(column))
            first = len(items)
            path.append(name)
            node = self._lower_leaf(column, sizes, name) if lower is None else lower(self, column)
            path.pop()
            if lower and not (len(items) > first and _has_rows(items[first], rows)):
                self._check_batch_size(column, sizes, name)
            nodes.append(node)
        return nodes

    def _lower_leaf(self, leaf: Any, sizes: list[int], name: str) -> Tree:
        """The node of a column whose type has no handler for columns."""
        if self._default is not None and not (type(leaf) in _HANDLERS or _handler_of(type(leaf))):
            # Call `default` here, so that `_check_batch_size` checks the rows of its result.
            leaf = result_of(self._default, (leaf,), "default")
        self._check_batch_size(leaf, sizes, name)
        node = self.lower(leaf)
        if not _is_column(node):
            remedy = "make it a NonTensorData of the batch's size"
            raise self.unsupported(leaf, f" as a leaf of a TensorDict; {remedy}")
        return node

    def _check_batch_size(self, column: Any, sizes: list[int], name: str) -> None:
        """Refuse a column that does not have its batch's rows: the caller may have changed it."""
        holder = column_of(column)
        found = holder.sizes(sizes)
        if found != sizes and sizes:
            if self._path[-1:] == [name]:
                self._path.pop()  # the error is about the batch
            where = f"nested {name!r}" if holder.is_batch else repr(name)
            detail = f"expected batch size {sizes} in {where} too, found {found}"
            raise self.error("row_mismatch", detail)

    def _lower_rectangle(self, array: np.ndarray[Any, Any]) -> Tree:
        """The node of an array: a tensor if torch has its dtype, else a leaf of objects."""
        name = TORCH_NAME_OF_NUMPY.get(array.dtype)
        if name is not None:
            return self.lower_cells(array, name)
        if array.dtype.kind in "biufc":
            native = array.dtype.newbyteorder("=")
            if native.name not in spec.TORCH_ITEMSIZES:
                return self._lower_unnamed_dtype(array)
            return self.lower_cells(array.astype(native, copy=False), native.name)
        if array.dtype == object and array.ndim == 1:
            return self._lower_object_rows(list(array))
        return self._lower_array_leaf(array)

    def _lower_object_rows(self, rows: list[Any]) -> Tree:
        if not rows:
            return self._lower_array_leaf(np.empty(0, dtype=object))
        return self.lower_payloads(rows, spec.IN_STACK)

    def _lower_array_leaf(self, array: np.ndarray[Any, Any]) -> Tree:
        """The node of an array with one item per row, as in a leaf of a TensorDict."""
        self.note_unbacked_rows(len(array))
        self.items.append(len(array))
        return (Code.NON_TENSOR_DATA, 1, self.lower_at("data", array))

    def _lower_one_object(self, one: OneObject) -> Tree:
        sizes = [one.rows, *one.inner_sizes]
        self.note_unbacked_rows(extent_of(sizes))
        self.items += sizes
        return self.lower_payload(one.data, len(sizes))

    def lower_payload(self, data: Any, dims: int) -> Tree:
        """The node of one object of a whole batch of `dims` dims; the caller added their sizes."""
        values_before = len(self.values)
        tree = self.lower_at("data", data)
        if type(tree) is not tuple:
            self.values.insert(values_before, tree)
            tree = None
        return (Code.NON_TENSOR_DATA, dims, tree)

    def _lower_open_batch(self, batch: Batch) -> Tree:
        return self.lower(to_send(batch))

    def note_unbacked_rows(self, rows: int) -> None:
        """Note rows above `MAX_UNBACKED_ROWS`.

        The writer refuses them unless the message has a byte for each.
        """
        if rows > spec.MAX_UNBACKED_ROWS:
            self.unbacked.append((self.where(), rows))


class _ListColumn(tuple[list[Any]]):
    """Marks a list as a column of a dict, rather than a value in one."""

    __slots__ = ()


def _is_column(node: Tree) -> bool:
    """Whether a TensorDict may have such a node as a leaf."""
    if type(node) is not tuple or node[0] not in spec.COLUMN_KINDS:
        return False
    return bool(node[0] != Code.ARRAY_ROWS or node[1] == spec.IN_STACK)


_REMEDY = (
    "; convert it to a type of encode's list (dict(x), tuple(x), str(x), x.value), register its "
    "type with register_type (datetime, enums and others of the standard library: "
    "jagcodec.stdlib.register_stdlib_types), or pass allow_pickle=True on both sides"
)
_LIST_TYPES: set[type] = {list}

Handler = Callable[[Lowering, Any], Tree]

_HANDLERS: dict[type, Handler] = {
    dict: Lowering._lower_dict,
    ColumnDict: Lowering._lower_dict,
    _ListColumn: Lowering._lower_list_column,
    list: Lowering.lower_list,
    tuple: Lowering._lower_tuple,
    bytes: Lowering._lower_bytes,
    set: Lowering._lower_set,
    frozenset: Lowering._lower_set,
    np.ndarray: Lowering._lower_array,
    np.memmap: Lowering._lower_array,
    Columns: Lowering._lower_columns,
}

_HANDLERS_OF_BASES: list[tuple[type, Handler]] = [
    (np.generic, Lowering._lower_scalar),
    (Batch, Lowering._lower_open_batch),
]

# For columns of `Columns`: there a list has one object per row, and an array is a tensor.
_COLUMN_HANDLERS: dict[type, Handler] = {
    RaggedView: Lowering.lower_view,
    CellRows: Lowering._lower_cell_rows,
    OneObject: Lowering._lower_one_object,
    np.ndarray: Lowering._lower_rectangle,
    list: Lowering._lower_object_rows,
}


def add_handlers(
    handlers: Mapping[type, Handler],
    *,
    columns: Mapping[type, Handler],
    bases: Iterable[tuple[type, Handler]],
    lists: Iterable[type],
) -> None:
    """Add handlers of more types: for values, for columns, for subclasses, and for lists."""
    _HANDLERS.update(handlers)
    _HANDLERS.update(dict.fromkeys(lists, Lowering.lower_list))
    _LIST_TYPES.update(lists)
    _COLUMN_HANDLERS.update(columns)
    _HANDLERS_OF_BASES.extend(bases)


@functools.cache
def _of_tensors() -> Any:
    """The module that lowers tensors: imported when there is one, because it imports torch."""
    return module_with_torch("wire.write.lowering_tensors", "encode")


def _rows_in_place(cells: Sequence[ByteArray], dtype: str, splits: RowSplits) -> Any:
    """Data for an item of rows, each of which is one array of `cells`; empty rows have none."""
    if not cells:
        return NO_BYTES
    if splits.rows == 1:
        return cells[0]
    starts = splits.starts * spec.TORCH_ITEMSIZES[dtype]
    return in_buffers(cells, DtypeName(dtype), (), starts, splits)


def _is_in_order(memory: Any) -> bool:
    return isinstance(memory, np.ndarray) and memory.flags.c_contiguous


def _has_rows(item: Any, rows: int | None) -> bool:
    """Whether the first item of a column shows that the column has `rows` rows."""
    if type(item) is not Item:
        return False
    if item.splits is not None:
        return item.splits.rows == rows
    return item.dtype is not None and len(item.dims) > 0 and item.dims[0] == rows


def _handler_of(kind: type) -> Handler | None:
    """The handler of a type that `_HANDLERS` may lack; None if no type above it has one."""
    if is_of_torch(kind):  # the import adds the types of torch and tensordict
        _of_tensors()
    found = _HANDLERS.get(kind)
    if found is not None:
        return found
    if registered_name(kind) is not None:
        return Lowering._lower_registered
    return next((handler for base, handler in _HANDLERS_OF_BASES if issubclass(kind, base)), None)


_OF_DOCUMENTS = (Code.NON_TENSOR_ROWS,)
