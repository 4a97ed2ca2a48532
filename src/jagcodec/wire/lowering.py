"""`Lowering`: a value to a schema and items; reads no cell."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_tensorclass,
)

from jagcodec import cells as cell_kernel
from jagcodec._arguments import result_of
from jagcodec.errors import (
    JagcodecError,
    Reason,
    UnsupportedTypeError,
    WireFormatError,
    brief,
    child_path,
)
from jagcodec.memory import extent_of
from jagcodec.memory.plain_types import TENSOR_TYPES, remedy_for
from jagcodec.memory.tensor_bytes import IntArray, as_bytes
from jagcodec.ragged import non_tensor
from jagcodec.ragged.copy_rows import CellIndices, values_of
from jagcodec.ragged.nested import COLUMN_TYPES, NESTED_TENSOR, is_jagged, parts_of
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.sizes import sizes_of
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire import documents, spec
from jagcodec.wire.array_rows import array_rows, can_be_read
from jagcodec.wire.checks import check_distinct, is_oversized_empty
from jagcodec.wire.documents import TAGS
from jagcodec.wire.dtypes import TORCH_NAME_OF_NUMPY, TORCH_NAMES, bytes_in_order, numpy_name
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.lowered import (
    ColumnDict,
    Columns,
    Documents,
    Lowered,
    Name,
    OpenBatch,
    Tree,
    UnreadCells,
)
from jagcodec.wire.native import NATIVE, first_same, packed_at_once
from jagcodec.wire.registry import registered_name, state_of
from jagcodec.wire.spec import PLAIN, Code, Kind
from jagcodec.wire.tensor_views import views_of_one_storage

_STRING_TYPE = frozenset((str,))


class Lowering:
    """The state of one walk over a value. No cell of a tensor is read."""

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
        self._stacks = 0
        self.items: list[Any] = []
        self.values: list[Any] = []
        self.unbacked: list[tuple[str, int]] = []
        self.on_devices: list[torch.Tensor] = []  # whose cells are fetched
        self.has_array_rows: bool = False
        self._indices: CellIndices = {}  # of rows on devices

    def finished(self, tree: Tree) -> Lowered:
        """All that was lowered, ready to be placed; a value that is one document has no `tree`."""
        values = self._pack_document(self.values) if self.values else NO_VALUES
        return Lowered(tree, self.items, values, self.unbacked)

    def lower(self, value: Any) -> Tree:
        """The tree of a value; what it needs a place for is added to `items`."""
        kind = type(value)
        if kind in NATIVE:
            return value
        handler = _HANDLERS.get(kind) or _handler_of(kind)
        return self._lower_foreign(value) if handler is None else handler(self, value)

    def _lower_at(self, key: Any, value: Any) -> Tree:
        if type(value) in NATIVE or (
            # The messages of a batch: a dict of plain values is its own document.
            type(value) is dict
            and len(self._path) < spec.MAX_DEPTH
            and _STRING_TYPE.issuperset(map(type, value))
            and NATIVE.issuperset(map(type, value.values()))
        ):
            return value
        self._path.append(key)
        if len(self._path) > spec.MAX_DEPTH:
            detail = f"expected at most {spec.MAX_DEPTH} nested containers, found more (a cycle?)"
            raise self._error("too_deep", detail)
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
            tree = self._lower_at(key, value)
            if has_nodes and type(tree) is not tuple:
                self.values.append(tree)
                tree = None
            elif type(tree) is tuple and not has_nodes:
                # The documents before the first node come before those in it.
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
        return documents.packer().pack  # type: ignore[no-any-return]

    def _pack_document(self, document: Any) -> bytes:
        try:
            return self._msgpack(document)
        except ValueError as error:
            raise self._error("too_large", f"msgpack: {error}") from error

    # Errors, and types that are not listed

    def _where(self) -> str:
        return functools.reduce(child_path, self._path, "$")

    def _error(self, reason: Reason, detail: str) -> UnsupportedTypeError:
        return UnsupportedTypeError(reason, self._where(), detail)

    def _unsupported(self, value: Any, why: str = "") -> UnsupportedTypeError:
        cls = type(value)
        builtin = cls.__module__ == "builtins"
        name = cls.__qualname__ if builtin else f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, (torch.Tensor, np.ndarray)):
            remedy = remedy_for(value)
            why = why or (f"; {remedy}, or register its type with register_type" if remedy else "")
        why = why or (_REMEDY_OF_BATCHES if isinstance(value, TensorDictBase) else _REMEDY)
        return self._error("unsupported_type", f"{name} cannot be encoded{why}")

    def _lower_registered(self, value: Any) -> Tree:
        name = registered_name(type(value))
        try:
            state = state_of(value)
        except JagcodecError:
            raise
        except Exception as error:  # whatever the user's function raises
            why = f": its to_state raises {type(error).__name__}: {error}"
            raise self._unsupported(value, why) from error
        tree = self._lower_at("state", state)
        return (Code.USER, name, tree) if type(tree) is tuple else [TAGS[Kind.USER], name, tree]

    def _lower_foreign(self, value: Any, why: str = "") -> Tree:
        """The tree of the result of `default`; or of a pickle; or an error."""
        if self._default is not None:
            if len(self._path) + self._defaults >= spec.MAX_DEPTH:
                detail = (
                    "expected values of default that can be encoded, "
                    f"found none in {spec.MAX_DEPTH} calls"
                )
                raise self._error("too_deep", detail)
            new = result_of(self._default, (value,), "default")
            if new is not value:
                self._defaults += 1
                tree = self.lower(new)
                self._defaults -= 1
                return tree
        if not self._allow_pickle:
            raise self._unsupported(value, why)
        try:
            return [TAGS[Kind.PICKLE], pickle.dumps(value, protocol=5)]
        except Exception as error:  # whatever a __reduce__ raises
            raise self._unsupported(value, f"; pickle failed too: {error}") from error

    # Python

    def _lower_list(self, values: list[Any]) -> Tree:
        if len(values) >= spec.LONG_LIST and (packed := cell_kernel.pack(values)) is not None:
            return [TAGS[Kind.NUMBERS], *packed]
        if len(values) > 1 and (views := views_of_one_storage(values)) is not None:
            return self._lower_tensor_views(*views)
        trees, has_nodes = self._lower_items(values)
        return (Code.LIST, *trees) if has_nodes else trees

    def _lower_list_column(self, column: _ListColumn) -> Tree:
        """A list that is a column of a dict."""
        (rows,) = column
        if len(rows) < 2 or views_of_one_storage(rows) is None:
            tree = self._lower_array_rows(list(rows), spec.IN_LIST)
            if tree is not None:
                return tree
        return self._lower_list(rows)

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
            self._note_unbacked_rows(value.rows)
            names = self._each_column(value)
            lists = non_tensor.LIST_TYPES
            columns = [_ListColumn((x,)) if type(x) in lists else x for x in columns]
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
            # What every reader rejects is rejected here, where the keys come from.
            raise self._error(error.reason, error.detail) from error

    def _lower_key(self, key: Any) -> Tree:
        if type(key) is bytes:
            return key
        # What `default` returns may be equal to another key, or not be one.
        self._default, default = None, self._default
        tree = self._lower_at(key, key)
        self._default = default
        if type(tree) is tuple:
            why = " as a dict key or set member: tensors are hashed by identity"
            raise self._unsupported(key, why)
        return tree

    def _lower_bytes(self, value: bytes) -> Tree:
        if len(value) < spec.INLINE_BYTES:
            return value
        self.items.append((memoryview(value), None, None, (len(value),)))
        return (Code.BYTES,)

    # Rows of objects

    def _lower_array_rows(self, rows: Sequence[Any], holder: int) -> Tree | None:
        """Rows that are arrays or tensors of one dtype, or None; else None."""
        found = array_rows(rows)
        if found is None:
            return None
        self.has_array_rows = True
        parts, lengths, dims, name, tensors = found
        self.on_devices += parts if tensors else ()  # only those on a device are fetched
        narrow = self._column_is_narrow and name in spec.INTEGER_DTYPES
        splits = RowSplits.from_lengths(lengths)
        self.items.append(UnreadCells(parts, name, (), narrow, splits))
        self._append_cells(dims, "int64", dims.shape)
        children = (Code.JAGGED, name, 1, 1), (Code.TENSOR, "int64", 2)
        return (Code.ARRAY_ROWS, holder, int(tensors), *children)

    def _lower_payloads(self, payloads: Iterable[Any], holder: int | None) -> Tree:
        """A document per row; if one needs buffers, each row is a message of its own.

        With a `holder`, rows that are arrays or None are written end to end.
        """
        rows = list(payloads)  # keeps every row alive, so that no two have one id
        same = first_same(rows)
        packed = packed_at_once(rows, spec.MAX_DEPTH - len(self._path))
        if packed is not None:
            self.items.append(Documents(packed, same))
            return (Code.NON_TENSOR_ROWS,)
        arrays = None if holder is None else self._lower_array_rows(rows, holder)
        if arrays is not None:
            return arrays
        outer = self.items, self.values, self.unbacked
        places = same or range(len(rows))
        lowered: dict[int, Any] = {}  # rows that are one object are lowered once
        for i in dict.fromkeys(places):
            if type(rows[i]) in NATIVE:
                lowered[i] = self._pack_document(rows[i])
                continue
            # A row that needs buffers is a message of its own, with its own items and values.
            self.items, self.values, self.unbacked = [], [], []
            tree = self._lower_at(i, rows[i])
            is_node = type(tree) is tuple
            lowered[i] = self.finished(tree) if is_node else self._pack_document(tree)
        self.items, self.values, self.unbacked = outer
        if Lowered in map(type, lowered.values()):
            for i, document in lowered.items():
                if type(document) is bytes:
                    lowered[i] = Lowered(None, [], _LIST_OF_ONE + document)
        self.items.append(Documents([lowered[i] for i in places], same))
        return (Code.NON_TENSOR_ROWS,)

    # numpy

    def _lower_array(self, array: np.ndarray[Any, Any]) -> Tree:
        dtype, shape = array.dtype, array.shape
        self._check_dims(shape, dtype.itemsize)
        if dtype.kind == "O":
            tree = self._lower_payloads(array.flat, spec.IN_ARRAY if len(shape) == 1 else None)
            if tree[0] == Code.ARRAY_ROWS:
                return tree
            self.items += shape
            return (Code.OBJECT_ARRAY, len(shape))
        name = numpy_name(dtype)
        if name is None:
            return self._lower_unnamed_dtype(array)
        self.items.append(UnreadCells(array, None, shape))
        return (Code.ARRAY, name, len(shape))

    def _lower_scalar(self, value: np.generic) -> Tree:
        if not type(value).__module__.startswith("numpy"):
            raise self._unsupported(value)
        name = numpy_name(value.dtype)
        if name is None:
            return self._lower_unnamed_dtype(value)
        return [TAGS[Kind.SCALAR], name, bytes_in_order(np.asarray(value)).tobytes()]

    def _lower_unnamed_dtype(self, value: Any) -> Tree:
        """An array or a scalar of a dtype that messages do not have."""
        remedy = "make a dict of its fields" if value.dtype.names else "convert it with .astype"
        why = f" with dtype {value.dtype}; {remedy}, or pass allow_pickle=True on both sides"
        return self._lower_foreign(value, why)

    # torch

    def _lower_tensor(self, tensor: torch.Tensor) -> Tree:
        if is_jagged(tensor):
            parts = parts_of(tensor)
            name = self._readable_dtype(parts.values)
            if not parts.values.is_cpu:
                # Tensors with holes are compacted on their device: only rows leave it.
                holes = parts.lengths
                self.on_devices += (parts.offsets, parts.values if holes is None else holes)
            self._append_cells(parts, name)
            return (Code.JAGGED, name, parts.values.dim(), parts.ragged_dim)
        if type(tensor) not in TENSOR_TYPES:
            return self._lower_foreign(tensor)
        if tensor.layout is torch.strided:
            return (
                self._lower_strided_nested(tensor)
                if tensor.is_nested
                else self._lower_dense(tensor)
            )
        tensor = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            shape = tuple(tensor.shape)
            self.items += shape
            indices = self._lower_dense(tensor._indices(), stored=PLAIN)
            values = self._lower_dense(tensor._values())
            return (Code.SPARSE_COO, len(shape), int(tensor.is_coalesced()), indices, values)
        remedy = ".to_sparse_coo()" if "sparse" in str(tensor.layout) else ".to_dense()"
        raise self._unsupported(tensor, f" with layout {tensor.layout}; call {remedy} first")

    def _readable_dtype(self, tensor: torch.Tensor) -> str:
        """The wire's name of its dtype; an error for a tensor whose cells cannot be read."""
        name = TORCH_NAMES.get(tensor.dtype)
        if name is None:
            remedy = "dequantise it first" if tensor.is_quantized else "convert it with .to()"
            raise self._unsupported(tensor, f" with dtype {tensor.dtype}; {remedy}")
        if not can_be_read(tensor):
            raise self._unsupported(tensor, f": {remedy_for(tensor)}")
        if not tensor.is_nested:
            self._check_dims(tensor.shape, tensor.itemsize)
        return name

    def _check_dims(self, dims: Sequence[int], itemsize: int) -> None:
        """Refuse dims next to one of 0 that no reader accepts."""
        if is_oversized_empty(dims, itemsize):
            detail = (
                f"expected dims next to 0 of fewer than {spec.MAX_BYTES} bytes, "
                f"found {brief(list(dims))} of {itemsize} each"
            )
            raise self._error("too_large", detail)

    def _append_cells(self, source: Any, dtype: str, dims: tuple[int, ...] = ()) -> None:
        narrow = self._column_is_narrow and dtype in spec.INTEGER_DTYPES
        self.items.append(UnreadCells(source, dtype, dims, narrow))

    def _lower_dense(self, tensor: torch.Tensor, stored: int | None = None) -> Tree:
        """A TENSOR; with `stored`, one that is not stored in another way."""
        name, shape = self._readable_dtype(tensor), tuple(tensor.shape)
        rank = len(shape)
        if rank > spec.MAX_NDIM:
            raise self._unsupported(tensor, f" with {rank} dims: the limit is {spec.MAX_NDIM}")
        if not tensor.is_cpu:
            self.on_devices.append(tensor)
        if stored is None:
            self._append_cells(tensor, name, shape)
        else:
            self.items.append(UnreadCells(tensor, None, (stored, *shape)))
        return (Code.TENSOR, name, rank)

    def _lower_tensor_views(self, view: RaggedView, bounds: IntArray) -> Tree:
        memory: Any = view.memory
        data = as_bytes(memory) if view.starts is None else view
        self.items.append((data, PLAIN, None, view.values_shape))
        base = (Code.TENSOR, TORCH_NAMES[view.dtype], len(view.shape))
        return (Code.TENSOR_VIEWS, base, self._lower_int64s(bounds))

    def _lower_int64s(self, rows: IntArray) -> Tree:
        """A TENSOR of rows of int64s, which is never stored narrow."""
        self.items.append((rows, PLAIN, None, rows.shape))
        return (Code.TENSOR, "int64", 2)

    def _lower_strided_nested(self, tensor: torch.Tensor) -> Tree:
        name = self._readable_dtype(tensor)
        with torch.no_grad():  # a `detach` of the whole would warn that it is a prototype
            components = tensor.unbind() if tensor.size(0) else ()
        if components and not components[0].is_cpu:
            self.on_devices += components
        rank = components[0].dim() if components else 0
        shapes = [component.shape for component in components]
        for shape in shapes:
            self._check_dims(shape, tensor.itemsize)
        # Without dims a component has a 1 for its one element: every component has bytes.
        sizes = np.array(shapes if rank else [[1]] * len(shapes), dtype=np.int64)
        elements = sum(component.numel() for component in components)
        self.items.append(UnreadCells(components, None, (PLAIN, elements)))
        rows = self._lower_int64s(sizes.reshape(len(shapes), rank or 1))
        return (Code.STRIDED_NESTED, rank, (Code.TENSOR, name, 1), rows)

    # Columns

    def _each_column(self, names: Iterable[str]) -> Iterator[str]:
        """Yields each name after it has become that of the current column.

        The current column decides what `_append_cells` stores narrow. At the end, the column
        around the batch is the current one again.
        """
        outer, outer_is_narrow = self._column_name, self._column_is_narrow
        for name in names:
            if self._narrow is not None:
                path = self._column_name = (*outer, name)
                self.columns[path] = None
                self._column_is_narrow = outer_is_narrow or path in self._narrow
            yield name
        self._column_name, self._column_is_narrow = outer, outer_is_narrow

    def _lower_columns(self, value: Columns) -> Tree:
        """The tree of a batch from its columns: that of the TensorDict they would make."""
        self._note_unbacked_rows(value.rows)
        self.items.append(value.rows)
        nodes: list[Tree] = []
        for name in self._each_column(value.columns):
            column = value.columns[name]
            self._check_batch_size(column, [value.rows], name)
            self._path.append(name)
            nodes.append(_COLUMN_HANDLERS.get(type(column), Lowering.lower)(self, column))
            self._path.pop()
        return (Code.TENSORDICT, 1, tuple(value.columns), *nodes)

    def _check_batch_size(self, column: Any, sizes: list[int], name: str) -> None:
        """Refuse a column with other rows than its batch: the caller may have changed it."""
        nested = False
        if type(column) is RaggedView:
            found = [column.row_splits.rows]
        elif type(column) is Documents:
            found = [len(column.rows)]
        else:
            if type(column) not in _COLUMN_TYPES:
                nested = isinstance(column, TensorDictBase) or is_tensorclass(column)
                if not nested:
                    return
            found = sizes_of(column, sizes)
        if found != sizes:
            where = f"nested {name!r}" if nested else repr(name)
            detail = f"expected batch size {sizes} in {where} too, found {found}"
            raise self._error("row_mismatch", detail)

    def _lower_view(self, view: RaggedView) -> Tree:
        memory, name = view.memory, TORCH_NAMES.get(view.dtype)
        if name is None or isinstance(memory, torch.Tensor):
            rows: Any = memory
            name = self._readable_dtype(rows)
            if not rows.is_cpu:
                values = values_of(view, self._indices)  # only rows leave the device
                view = end_to_end(values, view.row_splits, view.ragged_dim)
                self.on_devices.append(values)
        self._check_dims(view.values_shape, view.dtype.itemsize)
        self._append_cells(view, name)
        return (Code.JAGGED, name, len(view.shape), view.ragged_dim)

    def _lower_rectangle(self, array: np.ndarray[Any, Any]) -> Tree:
        """An array as the tensor over its memory, or as TensorDicts hold it."""
        name = TORCH_NAME_OF_NUMPY.get(array.dtype)
        if name is None:
            if non_tensor.is_numeric(array) and numpy_name(array.dtype) is None:
                return self._lower_unnamed_dtype(array)
            return self.lower(non_tensor.leaf_of_array(array))
        self._check_dims(array.shape, array.itemsize)
        self._append_cells(array, name, array.shape)
        return (Code.TENSOR, name, array.ndim)

    def _lower_documents(self, rows: Documents) -> Tree:
        self.items.append(rows)
        return (Code.NON_TENSOR_ROWS,)

    def _lower_object_rows(self, rows: list[Any]) -> Tree:
        if not rows:
            return self.lower(non_tensor.leaf_of_rows(rows))
        return self._lower_payloads(rows, spec.IN_STACK)

    # tensordict

    def _lower_open_batch(self, batch: OpenBatch) -> Tree:
        return self.lower(batch.to_encode())

    def _lower_tensordict(self, td: TensorDictBase) -> Tree:
        self._append_batch_size(td)
        nodes: list[Tree] = []
        leaves: dict[str, Any] = dict(td.items())
        for key in self._each_column(leaves):
            leaf = leaves[key]
            if self._default is not None and not (
                type(leaf) in _HANDLERS or _handler_of(type(leaf))
            ):
                # Here, so that its rows are checked.
                leaf = result_of(self._default, (leaf,), "default")
            self._check_batch_size(leaf, [*td.batch_size], key)
            node = self._lower_at(key, leaf)
            if not _is_column(node):
                self._path.append(key)
                remedy = "make it a NonTensorData of the batch's size"
                raise self._unsupported(leaf, f" as a leaf of a TensorDict; {remedy}")
            nodes.append(node)
        return (Code.TENSORDICT, len(td.batch_size), tuple(leaves), *nodes)

    def _lower_lazy_view(self, view: Any) -> Tree:
        try:
            whole = non_tensor.tensordict_of_view(view)
        except RuntimeError as error:  # of a stack of rows with different shapes
            raise self._unsupported(
                view, f": {error!s:.200}; encode what it is a view of"
            ) from error
        return self._lower_tensordict(whole)

    def _lower_lazy_stack(self, stack: LazyStackedTensorDict) -> Tree:
        if not stack.tensordicts and stack.batch_dims != 1:
            remedy = "encode TensorDict({}, batch_size=x.batch_size)"
            raise self._unsupported(stack, f" without members; {remedy}")
        return (Code.LAZY_STACK, int(stack.stack_dim), *self._lower_members(stack))

    def _lower_non_tensor_stack(self, stack: NonTensorStack) -> Tree:
        payloads = non_tensor.payloads_of_stack(stack)
        if payloads is not None:
            self._check_unnamed(stack, [non_tensor.stack_dim_name(stack)])
            return self._lower_payloads(payloads, spec.IN_STACK)
        if not stack.tensordicts:
            remedy = "encode NonTensorData(None, batch_size=x.batch_size)"
            raise self._unsupported(stack, f" of several dims without members; {remedy}")
        return (Code.NON_TENSOR_STACK, int(stack.stack_dim), *self._lower_members(stack))

    def _lower_members(self, stack: LazyStackedTensorDict) -> list[Tree]:
        self._check_unnamed(stack, [non_tensor.stack_dim_name(stack)])
        if self._stacks == spec.MAX_STACKS:
            detail = f"expected at most {spec.MAX_STACKS} stacks in each other, found more"
            raise self._error("too_deep", detail)
        self._stacks += 1
        members = [self._lower_at(i, member) for i, member in enumerate(stack.tensordicts)]
        self._stacks -= 1
        return members

    def _lower_non_tensor_data(self, data: NonTensorData) -> Tree:
        if isinstance(data.data, OpenBatch):  # as tensordict takes it: all of it in each row
            raise self._unsupported(data.data, " in a TensorDict; put x.to_tensordict() there")
        self._append_batch_size(data)
        values_before = len(self.values)
        tree = self._lower_at("data", data.data)
        if type(tree) is not tuple:
            self.values.insert(values_before, tree)
            tree = None
        return (Code.NON_TENSOR_DATA, len(data.batch_size), tree)

    def _check_unnamed(self, td: Any, names: Sequence[str | None]) -> None:
        if any(name is not None for name in names):
            raise self._unsupported(td, f" with dim names {list(names)}; set td.names = None")

    def _append_batch_size(self, td: Any) -> None:
        """The numbers of a batch size; its dims have no names."""
        batch_size: torch.Size = td.batch_size
        if batch_size:
            self._check_unnamed(td, td.names)
        if any(dim < 0 for dim in batch_size):
            detail = f"expected a batch size from 0 on, found {list(batch_size)}"
            raise self._error("bad_shape", detail)
        self._note_unbacked_rows(extent_of(batch_size))
        self.items += batch_size

    def _note_unbacked_rows(self, rows: int) -> None:
        """Note rows above `MAX_UNBACKED_ROWS`.

        The writer refuses them unless the message has a byte for each.
        """
        if rows > spec.MAX_UNBACKED_ROWS:
            self.unbacked.append((self._where(), rows))


class _ListColumn(tuple[list[Any]]):
    """A list that is a column of a dict, and not a value in one."""

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
_REMEDY_OF_BATCHES = (
    "; convert it with TensorDict(dict(x.items()), x.batch_size), or register its type"
)

_COLUMN_TYPES = COLUMN_TYPES | {list}

_Handler = Callable[[Lowering, Any], Tree]

_HANDLERS: dict[type, _Handler] = {
    dict: Lowering._lower_dict,
    ColumnDict: Lowering._lower_dict,
    _ListColumn: Lowering._lower_list_column,
    tuple: Lowering._lower_tuple,
    bytes: Lowering._lower_bytes,
    set: Lowering._lower_set,
    frozenset: Lowering._lower_set,
    np.ndarray: Lowering._lower_array,
    np.memmap: Lowering._lower_array,
    Columns: Lowering._lower_columns,
    **dict.fromkeys(non_tensor.LIST_TYPES, Lowering._lower_list),
    **dict.fromkeys((*TENSOR_TYPES, NESTED_TENSOR), Lowering._lower_tensor),
    **dict.fromkeys(non_tensor.TENSORDICT_TYPES, Lowering._lower_tensordict),
    LazyStackedTensorDict: Lowering._lower_lazy_stack,
    NonTensorData: Lowering._lower_non_tensor_data,
    NonTensorStack: Lowering._lower_non_tensor_stack,
}

_HANDLERS_OF_BASES: tuple[tuple[type, _Handler], ...] = (
    (torch.Tensor, Lowering._lower_tensor),
    (np.generic, Lowering._lower_scalar),
    (non_tensor.LAZY_VIEW, Lowering._lower_lazy_view),
    (OpenBatch, Lowering._lower_open_batch),
)

# Types that mean something else in `Columns`: there a list of objects is rows of documents.
_COLUMN_HANDLERS: dict[type, _Handler] = {
    RaggedView: Lowering._lower_view,
    np.ndarray: Lowering._lower_rectangle,
    Documents: Lowering._lower_documents,
    list: Lowering._lower_object_rows,
}


def _handler_of(kind: type) -> _Handler | None:
    if registered_name(kind) is not None:
        return Lowering._lower_registered
    return next((handler for base, handler in _HANDLERS_OF_BASES if issubclass(kind, base)), None)


_LIST_OF_ONE = b"\x91"  # msgpack writes it before the only item
