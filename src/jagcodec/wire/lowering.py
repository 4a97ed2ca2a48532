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
)

from jagcodec import cells
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
from jagcodec.memory.tensor_bytes import IntArray, as_bytes, has_memory
from jagcodec.ragged import non_tensor
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import NESTED_TENSOR, is_jagged, parts_of
from jagcodec.ragged.row_index import joined_ranges
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire import documents, spec
from jagcodec.wire.checks import check_distinct
from jagcodec.wire.documents import NATIVE, TAGS
from jagcodec.wire.dtypes import NUMPY_NAMES, TORCH_NAMES, cell_bytes, numpy_name
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.lowered import ColumnDict, Columns, Documents, Lowered, Name, Tree, UnreadCells
from jagcodec.wire.registry import registered_name, state_of
from jagcodec.wire.spec import PLAIN, Code, Kind

_STRING = frozenset((str,))


class Lowering:
    """The state of one walk over a value. No cell of a tensor is read."""

    def __init__(
        self,
        allow_pickle: bool,
        default: Callable[[Any], Any] | None = None,
        narrow: bool | frozenset[Name] = False,
    ) -> None:
        self._allow_pickle = allow_pickle
        # The names of the columns to store narrow (None: no names given), and all names found.
        self._narrow = None if isinstance(narrow, bool) else narrow
        self.columns: dict[Name, None] = {}
        # The column that is being lowered, and whether it is stored narrow.
        self._column: tuple[Name, bool] = (), narrow is True
        self._default = default
        self._defaults = 0
        self._path: list[Any] = []
        self._stacks = 0
        self.items: list[Any] = []
        self.values: list[Any] = []
        self.unbacked: list[tuple[str, int]] = []
        self.on_devices: list[torch.Tensor] = []  # whose cells are fetched

    def finished(self, tree: Tree) -> Lowered:
        """All that was lowered, ready to be placed; a value that is one document has no `tree`."""
        values = self._packed(self.values) if self.values else NO_VALUES
        return Lowered(tree, self.items, values, self.unbacked)

    def lower(self, value: Any) -> Tree:
        """The tree of a value; what it needs a place for is added to `items`."""
        kind = type(value)
        if kind in NATIVE:
            return value
        handler = _HANDLERS.get(kind) or _handler(kind)
        return self._foreign(value) if handler is None else handler(self, value)

    def _child(self, key: Any, value: Any) -> Tree:
        if type(value) in NATIVE or (
            # The messages of a batch: a dict of plain values is its own document.
            type(value) is dict
            and len(self._path) < spec.MAX_DEPTH
            and _STRING.issuperset(map(type, value))
            and NATIVE.issuperset(map(type, value.values()))
        ):
            return value
        self._path.append(key)
        if len(self._path) > spec.MAX_DEPTH:
            detail = f"expected at most {spec.MAX_DEPTH} nested containers, found more (a cycle?)"
            raise self._refused("too_deep", detail)
        lowered = self.lower(value)
        self._path.pop()
        return lowered

    def _children(self, keys: Iterable[Any], values: Iterable[Any]) -> tuple[list[Tree], bool]:
        """The trees of several values, and whether one is a node; then documents are values."""
        trees: list[Tree] = []
        nodes = False
        for key, value in zip(keys, values, strict=False):
            mark = len(self.values)
            tree = self._child(key, value)
            if nodes and type(tree) is not tuple:
                self.values.append(tree)
                tree = None
            elif type(tree) is tuple and not nodes:
                # The documents before the first node come before those in it.
                nodes = True
                self.values[mark:mark] = trees
                trees = [None] * len(trees)
            trees.append(tree)
        return trees, nodes

    def _items(self, values: Sequence[Any]) -> tuple[list[Tree], bool]:
        if NATIVE.issuperset(map(type, values)):
            return list(values), False
        return self._children(range(len(values)), values)

    @functools.cached_property
    def _pack(self) -> Callable[[Any], bytes]:
        return documents.packer().pack  # type: ignore[no-any-return]

    def _packed(self, document: Any) -> bytes:
        try:
            return self._pack(document)
        except ValueError as error:
            raise self._refused("too_large", f"msgpack: {error}") from error

    # Errors, and types that are not listed

    def _where(self) -> str:
        return functools.reduce(child_path, self._path, "$")

    def _refused(self, reason: Reason, detail: str) -> UnsupportedTypeError:
        return UnsupportedTypeError(reason, self._where(), detail)

    def _refusal(self, value: Any, why: str = "") -> UnsupportedTypeError:
        cls = type(value)
        builtin = cls.__module__ == "builtins"
        name = cls.__qualname__ if builtin else f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, (torch.Tensor, np.ndarray)):
            remedy = remedy_for(value)
            why = why or (f"; {remedy}, or register its type with register_type" if remedy else "")
        why = why or (_REMEDY_OF_BATCHES if isinstance(value, TensorDictBase) else _REMEDY)
        return self._refused("unsupported_type", f"{name} cannot be encoded{why}")

    def _registered(self, value: Any) -> Tree:
        name = registered_name(type(value))
        try:
            state = state_of(value)
        except JagcodecError:
            raise
        except Exception as error:  # whatever the user's function raises
            why = f": its to_state raises {type(error).__name__}: {error}"
            raise self._refusal(value, why) from error
        tree = self._child("state", state)
        return (Code.USER, name, tree) if type(tree) is tuple else [TAGS[Kind.USER], name, tree]

    def _foreign(self, value: Any, why: str = "") -> Tree:
        """The tree of the result of `default`; or of a pickle; or an error."""
        if self._default is not None:
            if len(self._path) + self._defaults >= spec.MAX_DEPTH:
                expected = "expected values of default that can be encoded"
                raise self._refused("too_deep", f"{expected}, found none in {spec.MAX_DEPTH} calls")
            new = result_of(self._default, (value,), "default")
            if new is not value:
                self._defaults += 1
                tree = self.lower(new)
                self._defaults -= 1
                return tree
        if not self._allow_pickle:
            raise self._refusal(value, why)
        try:
            return [TAGS[Kind.PICKLE], pickle.dumps(value, protocol=5)]
        except Exception as error:  # whatever a __reduce__ raises
            raise self._refusal(value, f"; pickle failed too: {error}") from error

    # Python

    def _list(self, values: list[Any]) -> Tree:
        if len(values) >= spec.LONG_LIST and (packed := cells.pack(values)) is not None:
            return [TAGS[Kind.NUMBERS], *packed]
        if len(values) > 1 and (views := _views_of_one_storage(values)) is not None:
            return self._views(*views)
        trees, nodes = self._items(values)
        return (Code.LIST, *trees) if nodes else trees

    def _tuple(self, value: tuple[Any, ...]) -> Tree:
        trees, nodes = self._items(value)
        return (Code.TUPLE, *trees) if nodes else [TAGS[Kind.TUPLE], *trees]

    def _dict(self, value: dict[Any, Any]) -> Tree:
        """A dict; the keys of a `ColumnDict` are names of columns."""
        if not _STRING.issuperset(map(type, value)):
            return self._dict_of_any_keys(value)
        around, names = self._column, iter(value)
        if type(value) is ColumnDict:
            names = self._entered(value)
        elif NATIVE.issuperset(map(type, value.values())):
            return value
        trees, nodes = self._children(names, value.values())
        self._column = around
        return (Code.MAP, tuple(value), *trees) if nodes else dict(zip(value, trees, strict=True))

    def _dict_of_any_keys(self, value: dict[Any, Any]) -> Tree:
        self._check_distinct(value)
        keys = [self._key(key) for key in value]
        mark = len(self.values)
        trees, nodes = self._children(value, value.values())
        if not nodes:
            pairs = zip(keys, trees, strict=True)
            return [TAGS[Kind.DICT], *(part for pair in pairs for part in pair)]
        self.values.insert(mark, keys)
        return (Code.DICT, None, *trees)

    def _set(self, value: Any) -> Tree:
        self._check_distinct(value)
        members = [self._key(item) for item in value]
        # Sorted by encoded bytes: a set's own order follows the process's hash seed.
        members.sort(key=self._pack)
        return [TAGS[Kind.SET if isinstance(value, set) else Kind.FROZENSET], *members]

    def _check_distinct(self, keys: Collection[Any]) -> None:
        try:
            check_distinct(list(keys), "keys")
        except WireFormatError as error:
            # What every reader rejects is rejected here, where the keys come from.
            raise self._refused(error.reason, error.detail) from error

    def _key(self, key: Any) -> Tree:
        if type(key) is bytes:
            return key
        # What `default` returns may be equal to another key, or not be one.
        self._default, default = None, self._default
        tree = self._child(key, key)
        self._default = default
        if type(tree) is tuple:
            why = " as a dict key or set member: tensors are hashed by identity"
            raise self._refusal(key, why)
        return tree

    def _bytes(self, value: bytes) -> Tree:
        if len(value) < spec.INLINE_BYTES:
            return value
        self.items.append((memoryview(value), None, None, (len(value),)))
        return (Code.BYTES,)

    # Rows of objects

    def _rows(self, payloads: Iterable[Any]) -> Tree:
        """A document per row; if one needs buffers, each row is a message of its own."""
        kept = list(payloads)  # so that the id of each stays its own
        packed = documents.packed_at_once(kept, spec.MAX_DEPTH - len(self._path))
        if packed is not None:
            self.items.append(Documents(packed))
            return (Code.NON_TENSOR_ROWS,)
        outer = self.items, self.values, self.unbacked
        # Rows that are one object are lowered once.
        keys = [~i if type(each) in NATIVE else id(each) for i, each in enumerate(kept)]
        made: dict[int, Any] = {}
        for i, key in enumerate(keys):
            if key < 0:
                made[key] = self._pack(kept[i])
            elif key not in made:
                self.items, self.values, self.unbacked = [], [], []
                tree = self._child(i, kept[i])
                made[key] = self.finished(tree) if type(tree) is tuple else self._packed(tree)
        self.items, self.values, self.unbacked = outer
        if Lowered in map(type, made.values()):
            for key, row in made.items():
                if type(row) is bytes:
                    made[key] = Lowered(None, [], _ARRAY_OF_ONE + row)
        self.items.append(Documents([made[key] for key in keys]))
        return (Code.NON_TENSOR_ROWS,)

    # numpy

    def _array(self, array: np.ndarray[Any, Any]) -> Tree:
        dtype, shape = array.dtype, array.shape
        self._check_dims(shape, dtype.itemsize)
        if dtype.kind == "O":
            self._rows(array.flat)
            self.items += shape
            return (Code.OBJECT_ARRAY, len(shape))
        name = numpy_name(dtype)
        if name is None:
            return self._without_dtype(array)
        self.items.append(UnreadCells(array, None, shape))
        return (Code.ARRAY, name, len(shape))

    def _scalar(self, value: np.generic) -> Tree:
        if not type(value).__module__.startswith("numpy"):
            raise self._refusal(value)
        name = numpy_name(value.dtype)
        if name is None:
            return self._without_dtype(value)
        return [TAGS[Kind.SCALAR], name, cell_bytes(np.asarray(value)).tobytes()]

    def _without_dtype(self, value: Any) -> Tree:
        """An array or a scalar of a dtype that messages do not have."""
        remedy = "make a dict of its fields" if value.dtype.names else "convert it with .astype"
        why = f" with dtype {value.dtype}; {remedy}, or pass allow_pickle=True on both sides"
        return self._foreign(value, why)

    # torch

    def _tensor(self, tensor: torch.Tensor) -> Tree:
        if is_jagged(tensor):
            parts = parts_of(tensor)
            name = self._torch_dtype(parts.values)
            if not parts.values.is_cpu:
                # Tensors with holes are compacted on their device: only rows leave it.
                holes = parts.lengths
                self.on_devices += (parts.offsets, parts.values if holes is None else holes)
            self._cells(parts, name)
            return (Code.JAGGED, name, parts.values.dim(), parts.ragged_dim)
        if type(tensor) not in TENSOR_TYPES:
            return self._foreign(tensor)
        if tensor.layout is torch.strided:
            return self._strided_nested(tensor) if tensor.is_nested else self._dense(tensor)
        tensor = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            shape = tuple(tensor.shape)
            self.items += shape
            indices = self._dense(tensor._indices(), stored=PLAIN)
            values = self._dense(tensor._values())
            return (Code.SPARSE_COO, len(shape), int(tensor.is_coalesced()), indices, values)
        remedy = ".to_sparse_coo()" if "sparse" in str(tensor.layout) else ".to_dense()"
        raise self._refusal(tensor, f" with layout {tensor.layout}; call {remedy} first")

    def _torch_dtype(self, tensor: torch.Tensor) -> str:
        """The wire's name of its dtype; an error for a tensor whose cells cannot be read."""
        name = TORCH_NAMES.get(tensor.dtype)
        if name is None:
            raise self._refusal(tensor, f" with dtype {tensor.dtype}; dequantise it first")
        try:
            readable = type(tensor) in TENSOR_TYPES and not tensor.is_meta and has_memory(tensor)
        except (RuntimeError, NotImplementedError):  # of a storage that is not there
            readable = False
        if not readable:
            raise self._refusal(tensor, f": {remedy_for(tensor)}")
        if not tensor.is_nested:
            self._check_dims(tensor.shape, tensor.itemsize)
        return name

    def _check_dims(self, dims: Sequence[int], itemsize: int) -> None:
        """Refuse dims next to one of 0 that no reader accepts."""
        if 0 in dims and extent_of(dims) * itemsize >= spec.MAX_BYTES:
            detail = f"expected dims next to 0 of fewer than {spec.MAX_BYTES} bytes, found "
            raise self._refused("too_large", f"{detail}{brief(list(dims))} of {itemsize} each")

    def _cells(self, source: Any, dtype: str, dims: tuple[int, ...] = ()) -> None:
        narrow = self._column[1] and dtype in spec.INTEGER_DTYPES
        self.items.append(UnreadCells(source, dtype, dims, narrow))

    def _dense(self, tensor: torch.Tensor, stored: int | None = None) -> Tree:
        """A TENSOR; with `stored`, one that is not stored in another way."""
        name, shape = self._torch_dtype(tensor), tuple(tensor.shape)
        rank = len(shape)
        if rank > spec.MAX_NDIM:
            raise self._refusal(tensor, f" with {rank} dims: the limit is {spec.MAX_NDIM}")
        if not tensor.is_cpu:
            self.on_devices.append(tensor)
        if stored is None:
            self._cells(tensor, name, shape)
        else:
            self.items.append(UnreadCells(tensor, None, (stored, *shape)))
        return (Code.TENSOR, name, rank)

    def _views(self, view: RaggedView, bounds: IntArray) -> Tree:
        memory: Any = view.memory
        data = as_bytes(memory) if view.starts is None else view
        self.items.append((data, PLAIN, None, view.values_shape))
        base = (Code.TENSOR, TORCH_NAMES[view.dtype], len(view.shape))
        return (Code.TENSOR_VIEWS, base, self._integers(bounds))

    def _integers(self, rows: IntArray) -> Tree:
        """A TENSOR of rows of int64s, which is never stored narrow."""
        self.items.append((rows, PLAIN, None, rows.shape))
        return (Code.TENSOR, "int64", 2)

    def _strided_nested(self, tensor: torch.Tensor) -> Tree:
        name = self._torch_dtype(tensor)
        with torch.no_grad():  # a `detach` of the whole would warn that it is a prototype
            components = tensor.unbind() if tensor.size(0) else ()
        if components and not components[0].is_cpu:
            self.on_devices += components
        rank = components[0].dim() if components else 0
        shapes = [component.shape for component in components]
        for shape in shapes:
            self._check_dims(shape, tensor.itemsize)
        # Without dims a component has a 1 for its one cell: every component has bytes.
        sizes = np.array(shapes if rank else [[1]] * len(shapes), dtype=np.int64)
        cells = sum(component.numel() for component in components)
        self.items.append(UnreadCells(components, None, (PLAIN, cells)))
        rows = self._integers(sizes.reshape(len(shapes), rank or 1))
        return (Code.STRIDED_NESTED, rank, (Code.TENSOR, name, 1), rows)

    # Columns

    def _entered(self, names: Iterable[str]) -> Iterator[str]:
        """The names of columns of a batch, each of which is the one that is lowered next."""
        around = self._column
        for name in names:
            if self._narrow is not None:
                path = (*around[0], name)
                self.columns[path] = None
                self._column = path, around[1] or path in self._narrow
            yield name
        self._column = around

    def _columns(self, value: Columns) -> Tree:
        """The tree of a batch from its columns: that of the TensorDict they would make."""
        self._rows_of_batch(value.rows)
        self.items.append(value.rows)
        nodes: list[Tree] = []
        for name in self._entered(value.columns):
            column = value.columns[name]
            self._path.append(name)
            nodes.append(_COLUMNS.get(type(column), Lowering.lower)(self, column))
            self._path.pop()
        return (Code.TENSORDICT, 1, tuple(value.columns), *nodes)

    def _view(self, view: RaggedView) -> Tree:
        memory, name = view.memory, TORCH_NAMES.get(view.dtype)
        if name is None or isinstance(memory, torch.Tensor):
            rows: Any = memory
            name = self._torch_dtype(rows)
            if not rows.is_cpu:
                values = values_of(view)  # only rows leave the device
                view = end_to_end(values, view.row_splits)
                self.on_devices.append(values)
        self._check_dims(view.values_shape, view.dtype.itemsize)
        self._cells(view, name)
        return (Code.JAGGED, name, len(view.shape), view.ragged_dim)

    def _rectangle(self, array: np.ndarray[Any, Any]) -> Tree:
        """An array as the tensor over its memory, or as TensorDicts hold it."""
        name = NUMPY_NAMES.get(array.dtype)
        if name is None:
            if non_tensor.is_numeric(array) and numpy_name(array.dtype) is None:
                return self._without_dtype(array)
            return self.lower(non_tensor.leaf_of_array(array))
        self._check_dims(array.shape, array.itemsize)
        self._cells(array, name, array.shape)
        return (Code.TENSOR, name, array.ndim)

    def _documents(self, rows: Documents) -> Tree:
        self.items.append(rows)
        return (Code.NON_TENSOR_ROWS,)

    def _objects(self, rows: list[Any]) -> Tree:
        return self._rows(rows) if rows else self.lower(non_tensor.leaf_of_rows(rows))

    # tensordict

    def _tensordict(self, td: TensorDictBase) -> Tree:
        self._batch_size(td)
        nodes: list[Tree] = []
        leaves: dict[str, Any] = dict(td.items())
        for key in self._entered(leaves):
            leaf = leaves[key]
            if self._default is not None and not (type(leaf) in _HANDLERS or _handler(type(leaf))):
                # Here, so that its rows are checked.
                leaf = result_of(self._default, (leaf,), "default")
            if not non_tensor.fits_into(leaf, td):
                wanted, found = list(td.batch_size), list(leaf.batch_size)
                detail = f"expected batch size {wanted} in nested {key!r} too, found {found}"
                raise self._refused("row_mismatch", detail)
            node = self._child(key, leaf)
            if type(node) is not tuple or node[0] not in spec.COLUMN_KINDS:
                self._path.append(key)
                remedy = "make it a NonTensorData of the batch's size"
                raise self._refusal(leaf, f" as a leaf of a TensorDict; {remedy}")
            nodes.append(node)
        return (Code.TENSORDICT, len(td.batch_size), tuple(leaves), *nodes)

    def _lazy_view(self, view: Any) -> Tree:
        try:
            whole = non_tensor.tensordict_of_view(view)
        except RuntimeError as error:  # of a stack of rows with different shapes
            raise self._refusal(view, f": {error!s:.200}; encode what it is a view of") from error
        return self._tensordict(whole)

    def _lazy_stack(self, stack: LazyStackedTensorDict) -> Tree:
        if not stack.tensordicts and stack.batch_dims != 1:
            remedy = "encode TensorDict({}, batch_size=x.batch_size)"
            raise self._refusal(stack, f" without members; {remedy}")
        return (Code.LAZY_STACK, int(stack.stack_dim), *self._members_of(stack))

    def _non_tensor_stack(self, stack: NonTensorStack) -> Tree:
        payloads = non_tensor.payloads_of_stack(stack)
        if payloads is not None:
            self._check_unnamed(stack, [non_tensor.stack_dim_name(stack)])
            return self._rows(payloads)
        if not stack.tensordicts:
            remedy = "encode NonTensorData(None, batch_size=x.batch_size)"
            raise self._refusal(stack, f" of several dims without members; {remedy}")
        return (Code.NON_TENSOR_STACK, int(stack.stack_dim), *self._members_of(stack))

    def _members_of(self, stack: LazyStackedTensorDict) -> list[Tree]:
        self._check_unnamed(stack, [non_tensor.stack_dim_name(stack)])
        if self._stacks == spec.MAX_STACKS:
            detail = f"expected at most {spec.MAX_STACKS} stacks in each other, found more"
            raise self._refused("too_deep", detail)
        self._stacks += 1
        members = [self._child(i, member) for i, member in enumerate(stack.tensordicts)]
        self._stacks -= 1
        return members

    def _non_tensor_data(self, data: NonTensorData) -> Tree:
        self._batch_size(data)
        mark = len(self.values)
        tree = self._child("data", data.data)
        if type(tree) is not tuple:
            self.values.insert(mark, tree)
            tree = None
        return (Code.NON_TENSOR_DATA, len(data.batch_size), tree)

    def _check_unnamed(self, td: Any, names: Sequence[str | None]) -> None:
        if any(name is not None for name in names):
            raise self._refusal(td, f" with dim names {list(names)}; set td.names = None")

    def _batch_size(self, td: Any) -> None:
        """The numbers of a batch size; its dims have no names."""
        batch_size: torch.Size = td.batch_size
        if batch_size:
            self._check_unnamed(td, td.names)
        if any(dim < 0 for dim in batch_size):
            detail = f"expected a batch size from 0 on, found {list(batch_size)}"
            raise self._refused("bad_shape", detail)
        self._rows_of_batch(extent_of(batch_size))
        self.items += batch_size

    def _rows_of_batch(self, rows: int) -> None:
        """Note rows for which a reader wants a byte each, if they are many."""
        if rows > spec.MAX_UNBACKED_ROWS:
            self.unbacked.append((self._where(), rows))


_REMEDY = (
    "; convert it to a type of encode's list (dict(x), tuple(x), str(x), x.value), register its "
    "type with register_type (datetime, enums and others of the standard library: "
    "jagcodec.stdlib.register_stdlib_types), or pass allow_pickle=True on both sides"
)
_REMEDY_OF_BATCHES = (
    "; convert it with TensorDict(dict(x.items()), x.batch_size), or register its type"
)

_Handler = Callable[[Lowering, Any], Tree]

_HANDLERS: dict[type, _Handler] = {
    dict: Lowering._dict,
    ColumnDict: Lowering._dict,
    tuple: Lowering._tuple,
    bytes: Lowering._bytes,
    set: Lowering._set,
    frozenset: Lowering._set,
    np.ndarray: Lowering._array,
    np.memmap: Lowering._array,
    Columns: Lowering._columns,
    **dict.fromkeys(non_tensor.LIST_TYPES, Lowering._list),
    **dict.fromkeys((*TENSOR_TYPES, NESTED_TENSOR), Lowering._tensor),
    **dict.fromkeys(non_tensor.TENSORDICT_TYPES, Lowering._tensordict),
    LazyStackedTensorDict: Lowering._lazy_stack,
    NonTensorData: Lowering._non_tensor_data,
    NonTensorStack: Lowering._non_tensor_stack,
}

_BASES: tuple[tuple[type, _Handler], ...] = (
    (torch.Tensor, Lowering._tensor),
    (np.generic, Lowering._scalar),
    (non_tensor.LAZY_VIEW, Lowering._lazy_view),
)

# Types that mean something else in `Columns`: there a list of objects is rows of documents.
_COLUMNS: dict[type, _Handler] = {
    RaggedView: Lowering._view,
    np.ndarray: Lowering._rectangle,
    Documents: Lowering._documents,
    list: Lowering._objects,
}


def _handler(kind: type) -> _Handler | None:
    if registered_name(kind) is not None:
        return Lowering._registered
    return next((handler for base, handler in _BASES if issubclass(kind, base)), None)


_ARRAY_OF_ONE = b"\x91"  # msgpack writes it before the only item


def _views_of_one_storage(values: Sequence[Any]) -> tuple[RaggedView, IntArray] | None:
    """Plain tensors over one storage: a view without gaps, and (N, 2) starts and ends in it."""
    # TransferQueue sends thousands of row views, which would be a frame each.
    common = _storage_and_cell(values[0])
    if common is None or any(_storage_and_cell(value) != common for value in values):
        return None

    first, (_, room, dtype, cell) = values[0], common
    inner = cell.numel()
    places = np.array([value.storage_offset() for value in values], dtype=np.int64)
    lengths = np.array([value.shape[0] for value in values], dtype=np.int64)
    # An empty view may be anywhere; put it where it makes no gap.
    places[lengths == 0] = places[lengths > 0].min() if lengths.any() else 0
    start = int(places.min())
    if ((places - start) % inner).any():
        return None
    # A storage may have been made smaller since; then the tensor that needs more is refused.
    if int((places + lengths * inner).max()) * dtype.itemsize > room:
        return None
    if inner * dtype.itemsize >= spec.MAX_BYTES:  # more than any view has
        return None
    starts = (places - start) // inner
    ends = starts + lengths

    firsts, lasts, moves = joined_ranges(starts, ends)
    span = first.as_strided((int(lasts[-1]) * inner,), (1,), start).view(-1, *cell)
    pieces = None if len(firsts) == 1 else firsts
    row_splits = RowSplits.from_lengths(lasts - firsts)
    view = RaggedView(span, span.dtype, tuple(span.shape), 1, pieces, row_splits)
    return view, np.stack([starts + moves, ends + moves], axis=1)


def _storage_and_cell(value: Any) -> tuple[int, int, torch.dtype, torch.Size] | None:
    """The storage of a plain tensor, by address and size, its dtype and the shape of a cell; None
    of other values.
    """
    if (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type == "cpu"
        and value.dtype in TORCH_NAMES
        and 0 < value.dim() <= spec.MAX_NDIM
        and value.shape[1:].numel() > 0
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
        and not value._is_zerotensor()
    ):
        # Storages over memory of somebody else may begin at one address and end at several.
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), value.dtype, value.shape[1:]
    return None
