"""`Lowering`: a value to a schema and items; reads no cell."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
)

from jagcodec import cells
from jagcodec.errors import JagcodecError, Reason, UnsupportedTypeError, WireFormatError, child_path
from jagcodec.memory.tensor_bytes import IntArray, as_bytes
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import NESTED_TENSOR, is_jagged, parts_of
from jagcodec.ragged.non_tensor import (
    LAZY_VIEW,
    LIST_TYPES,
    TENSORDICT_TYPES,
    fits_into,
    leaf_of_rows,
    payloads_of_stack,
    stack_dim_name,
    tensordict_of_view,
)
from jagcodec.ragged.row_index import joined_ranges
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire import documents
from jagcodec.wire.checks import check_distinct
from jagcodec.wire.documents import TAGS
from jagcodec.wire.dtypes import NUMPY_NAMES, TORCH_NAMES, cell_bytes, numpy_name
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.lowered import (
    ColumnDict,
    Columns,
    Documents,
    Lowered,
    Name,
    Tree,
    UnreadCells,
)
from jagcodec.wire.registry import registered_name, state_of
from jagcodec.wire.spec import (
    INLINE_BYTES,
    LEAVES,
    LONG_LIST,
    MAX_DEPTH,
    MAX_NDIM,
    MAX_STACKS,
    MAX_UNBACKED_ROWS,
    PLAIN,
    Code,
    Kind,
)

# What msgpack gives back as it was.
_NATIVE = frozenset((str, int, float, bool, type(None)))
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
        # The columns that are stored narrow, if some are named, and those that exist.
        self._narrow = None if isinstance(narrow, bool) else narrow
        self.columns: dict[Name, None] = {}
        # The column that is being lowered, and whether it is stored narrow.
        self._column: tuple[Name, bool] = (), narrow is True
        self._default = default
        self._defaults = 0
        self._packer: Any = None
        self._path: list[Any] = []
        self._stacks = 0
        self.items: list[Any] = []
        self.values: list[Any] = []
        self.unbacked: list[tuple[str, int]] = []
        # Tensors on devices, whose cells are fetched.
        self.on_devices: list[torch.Tensor] = []

    def finished(self, tree: Tree) -> Lowered:
        """All that was lowered, ready to be placed; a value that is one document has no `tree`."""
        try:
            values = self._pack()(self.values) if self.values else NO_VALUES
        except ValueError as error:
            raise self._refused("too_large", f"msgpack: {error}") from error
        return Lowered(tree, self.items, values, self.unbacked)

    def lower(self, value: Any) -> Tree:
        """The tree of a value; what it needs a place for is added to `items`."""
        kind = type(value)
        if kind in _NATIVE:
            return value
        handler = _HANDLERS.get(kind) or _handler(kind)
        if handler is None:
            return self._foreign(value)
        return handler(self, value)

    def _registered(self, value: Any) -> Tree:
        name = registered_name(type(value))
        try:
            state = state_of(value)
        except JagcodecError:
            raise
        except Exception as error:  # whatever the user's function raises
            why = f": its to_state raises {type(error).__name__}: {error}"
            raise self._refusal(value, why) from error
        state = self._child("state", state)
        if type(state) is tuple:
            return (Code.USER, name, state)
        return [TAGS[Kind.USER], name, state]

    def _foreign(self, value: Any, why: str = "") -> Tree:
        """The tree of the result of `default`; or of a pickle; or an error."""
        if self._default is not None:
            if len(self._path) + self._defaults >= MAX_DEPTH:
                expected = "expected values of default that can be encoded"
                raise self._refused("too_deep", f"{expected}, found none in {MAX_DEPTH} calls")
            new = self._default(value)
            if new is not value:
                self._defaults += 1
                tree = self.lower(new)
                self._defaults -= 1
                return tree
        if not self._allow_pickle:
            raise self._refusal(value, why)
        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:  # whatever a __reduce__ raises
            raise self._refusal(value, f"; pickle failed too: {error}") from error
        return [TAGS[Kind.PICKLE], data]

    def _child(self, key: Any, value: Any) -> Tree:
        if type(value) in _NATIVE or (
            # The messages of a batch: a dict of plain values is its own document.
            type(value) is dict
            and len(self._path) < MAX_DEPTH
            and _STRING.issuperset(map(type, value))
            and _NATIVE.issuperset(map(type, value.values()))
        ):
            return value
        self._path.append(key)
        if len(self._path) > MAX_DEPTH:
            raise self._refused(
                "too_deep", f"expected at most {MAX_DEPTH} nested containers, found more (a cycle?)"
            )
        lowered = self.lower(value)
        self._path.pop()
        return lowered

    def _children(self, keys: Iterable[Any], values: Iterable[Any]) -> tuple[list[Tree], bool]:
        """The trees of several values, and whether one is a node.

        If one is, the documents among the others are values of the message, in their order.
        """
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
        if _NATIVE.issuperset(map(type, values)):
            return list(values), False
        return self._children(range(len(values)), values)

    def _payload(self, key: Any, value: Any) -> Tree:
        """The tree of the only child of a node."""
        mark = len(self.values)
        tree = self._child(key, value)
        if type(tree) is tuple:
            return tree
        self.values.insert(mark, tree)
        return None

    def _pack(self) -> Callable[[Any], bytes]:
        if self._packer is None:
            self._packer = documents.packer()
        return self._packer.pack  # type: ignore[no-any-return]

    def _refused(self, reason: Reason, detail: str) -> UnsupportedTypeError:
        return UnsupportedTypeError(reason, self._where(), detail)

    def _where(self) -> str:
        path = "$"
        for key in self._path:
            path = child_path(path, key)
        return path

    def _refusal(self, value: Any, why: str = "") -> UnsupportedTypeError:
        cls = type(value)
        builtin = cls.__module__ == "builtins"
        name = cls.__qualname__ if builtin else f"{cls.__module__}.{cls.__qualname__}"
        if not why:
            why = _REMEDY_OF_BATCHES if isinstance(value, TensorDictBase) else _REMEDY
        return self._refused("unsupported_type", f"{name} cannot be encoded{why}")

    # Python

    def _list(self, values: list[Any]) -> Tree:
        if len(values) >= LONG_LIST and (packed := cells.pack(values)) is not None:
            return [TAGS[Kind.NUMBERS], *packed]
        if values and type(values[0]) is torch.Tensor:
            views = _views_of_one_storage(values)
            if views is not None:
                return self._views(*views)
        trees, nodes = self._items(values)
        return (Code.LIST, *trees) if nodes else trees

    def _tuple(self, value: tuple[Any, ...]) -> Tree:
        trees, nodes = self._items(value)
        return (Code.TUPLE, *trees) if nodes else [TAGS[Kind.TUPLE], *trees]

    def _dict(self, value: dict[Any, Any]) -> Tree:
        if not _STRING.issuperset(map(type, value)):
            return self._dict_of_any_keys(value)
        if _NATIVE.issuperset(map(type, value.values())):
            return value
        trees, nodes = self._children(value, value.values())
        if nodes:
            return (Code.MAP, tuple(value), *trees)
        return dict(zip(value, trees, strict=True))

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

    def _check_distinct(self, keys: Collection[Any]) -> None:
        try:
            check_distinct(list(keys), "keys")
        except WireFormatError as error:
            # What every reader rejects is rejected here, where the keys come from.
            raise self._refused(error.reason, error.detail) from error

    def _key(self, key: Any) -> Tree:
        """A dict key or set member: what is hashed by identity would lose its meaning."""
        self._check_key(key)
        if type(key) is bytes:
            return key
        # What `default` returns may be equal to another key, or not be one.
        self._default, default = None, self._default
        tree = self._child(key, key)
        self._default = default
        if type(tree) is tuple:
            raise self._refusal(key, " as a dict key or set member: it holds tensors or arrays")
        return tree

    def _check_key(self, key: Any) -> None:
        if isinstance(key, (torch.Tensor, TensorDictBase, NonTensorData)):
            raise self._refusal(key, " as a dict key or set member: it is hashed by identity")
        if isinstance(key, (tuple, frozenset)):
            for item in key:
                self._check_key(item)

    def _set(self, value: Any) -> Tree:
        self._check_distinct(value)
        members = [self._key(item) for item in value]
        # Sorted by encoded bytes: a set's own order follows the process's hash seed.
        members.sort(key=self._pack())
        return [TAGS[Kind.SET if isinstance(value, set) else Kind.FROZENSET], *members]

    def _bytes(self, value: bytes) -> Tree:
        if len(value) < INLINE_BYTES:
            return value
        self.items.append((memoryview(value), None, None, (len(value),)))
        return (Code.BYTES,)

    # Rows of objects

    def _rows(self, payloads: Iterable[Any]) -> None:
        """A document per row; if one needs buffers, each row is a message of its own."""
        pack = self._pack()
        rows: list[bytes | Lowered] = []
        outer = self.items, self.values, self.unbacked
        # Rows that are one object are lowered once, and kept, so that their id stays theirs.
        known: dict[int, tuple[Any, int]] = {}
        firsts: list[int] = []
        for i, payload in enumerate(payloads):
            if type(payload) in _NATIVE:
                firsts.append(i)
                rows.append(pack(payload))
                continue
            _, first = known.setdefault(id(payload), (payload, i))
            firsts.append(first)
            if first < i:
                rows.append(rows[first])
                continue
            self.items, self.values, self.unbacked = [], [], []
            tree = self._child(i, payload)
            try:
                if type(tree) is tuple:
                    rows.append(self.finished(tree))
                else:
                    rows.append(pack(tree))
            except ValueError as error:
                raise self._refused("too_large", f"msgpack: {error}") from error
        self.items, self.values, self.unbacked = outer
        self.items.append(Documents(_alike(rows, firsts)))

    # numpy

    def _array(self, array: np.ndarray[Any, Any]) -> Tree:
        dtype, shape = array.dtype, array.shape
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
            self.items.append(UnreadCells(parts, name, (), self._column[1], "jagged tensor"))
            return (Code.JAGGED, name, parts.values.dim(), parts.ragged_dim)
        if type(tensor) not in TENSOR_TYPES:
            raise self._refusal(tensor)
        if tensor.layout is torch.strided:
            return self._strided_nested(tensor) if tensor.is_nested else self._dense(tensor)
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.layout is torch.sparse_coo:
            self.items += shape
            parts_ = self._plain(tensor._indices()), self._dense(tensor._values())
            return (Code.SPARSE_COO, len(shape), int(tensor.is_coalesced()), *parts_)
        remedy = ".to_sparse_coo()" if "sparse" in str(tensor.layout) else ".to_dense()"
        raise self._refusal(tensor, f" with layout {tensor.layout}; call {remedy} first")

    def _torch_dtype(self, tensor: torch.Tensor) -> str:
        name = TORCH_NAMES.get(tensor.dtype)
        if name is None:
            raise self._refusal(tensor, f" with dtype {tensor.dtype}; dequantise it first")
        if tensor.is_meta:
            raise self._refusal(tensor, " from the meta device: it has no values")
        return name

    def _dense(self, tensor: torch.Tensor) -> Tree:
        name = self._torch_dtype(tensor)
        shape = tensor.shape
        rank = len(shape)
        if rank > MAX_NDIM:
            raise self._refusal(tensor, f" with {rank} dims: the limit is {MAX_NDIM}")
        if not tensor.is_cpu:
            self.on_devices.append(tensor)
        self.items.append(UnreadCells(tensor, name, tuple(shape), self._column[1]))
        return (Code.TENSOR, name, rank)

    def _plain(self, indices: torch.Tensor) -> Tree:
        """A tensor that is never stored narrow."""
        tree = self._dense(indices)
        self.items[-1] = UnreadCells(indices, None, (PLAIN, *indices.shape))
        return tree

    def _views(self, view: RaggedView, bounds: IntArray) -> Tree:
        memory: Any = view.memory
        shape = view.values_shape
        data = as_bytes(memory) if view.starts is None else view
        self.items.append((data, PLAIN, None, shape))
        base = (Code.TENSOR, TORCH_NAMES[view.dtype], len(shape))
        return (Code.TENSOR_VIEWS, base, self._integers(bounds))

    def _integers(self, rows: IntArray) -> Tree:
        """A TENSOR of rows of int64s, which is never stored narrow."""
        self.items.append((rows, PLAIN, None, rows.shape))
        return (Code.TENSOR, "int64", 2)

    def _strided_nested(self, tensor: torch.Tensor) -> Tree:
        name = self._torch_dtype(tensor)
        components = tensor.detach().unbind() if tensor.size(0) else ()
        if components and not components[0].is_cpu:
            self.on_devices += components
        rank = components[0].dim() if components else 0
        shapes = [component.shape for component in components]
        # Without dims a component has a 1 for its one cell: every component has bytes.
        sizes = np.array(shapes if rank else [[1]] * len(shapes), dtype=np.int64)
        cells = sum(component.numel() for component in components)
        self.items.append(UnreadCells(components, None, (PLAIN, cells)))
        rows = self._integers(sizes.reshape(len(shapes), rank or 1))
        return (Code.STRIDED_NESTED, rank, (Code.TENSOR, name, 1), rows)

    # tensordict

    def _columns(self, value: Columns) -> Tree:
        """The tree of a batch from its columns: that of the TensorDict they would make."""
        items = self.items
        items.append(value.rows)
        nodes: list[Tree] = []
        around, named = self._column, self._narrow is not None
        for name, column in value.columns.items():
            if named:
                self._enter(around, name)
            kind, narrow = type(column), self._column[1]
            if kind is RaggedView:
                dtype = TORCH_NAMES.get(column.dtype)
                if dtype is None or isinstance(column.memory, torch.Tensor):
                    self._path.append(name)
                    column, dtype = self._rows_of_tensor(column)
                    self._path.pop()
                items.append(UnreadCells(column, dtype, (), narrow))
                nodes.append((Code.JAGGED, dtype, len(column.shape), column.ragged_dim))
            elif kind is np.ndarray:
                dtype = NUMPY_NAMES[column.dtype]
                items.append(UnreadCells(column, dtype, column.shape, narrow))
                nodes.append((Code.TENSOR, dtype, column.ndim))
            elif kind is Documents:
                items.append(column)
                nodes.append((Code.NON_TENSOR_ROWS,))
            else:
                self._path.append(name)
                if kind is not list:
                    tensor = isinstance(column, torch.Tensor) and kind is not UnbatchedTensor
                    nodes.append(self._tensor(column) if tensor else self.lower(column))
                elif column:
                    self._rows(column)
                    nodes.append((Code.NON_TENSOR_ROWS,))
                else:
                    nodes.append(self.lower(leaf_of_rows(column)))
                self._path.pop()
        self._column = around
        return (Code.TENSORDICT, 1, tuple(value.columns), *nodes)

    def _column_dict(self, columns: ColumnDict) -> Tree:
        """The columns of a batch that is a dict."""
        if not _STRING.issuperset(map(type, columns)):
            return self._dict_of_any_keys(columns)
        around = self._column
        names = columns if self._narrow is None else self._entered(columns)
        trees, nodes = self._children(names, columns.values())
        self._column = around
        node = (Code.MAP, tuple(columns), *trees)
        return node if nodes else dict(zip(columns, trees, strict=True))

    def _enter(self, around: tuple[Name, bool], name: str) -> None:
        """Make `name`, a column of the batch `around`, the one that is lowered next."""
        narrow: Any = self._narrow
        names = (*around[0], name)
        self.columns[names] = None
        self._column = names, around[1] or names in narrow

    def _entered(self, names: Iterable[str]) -> Iterator[str]:
        around = self._column
        for name in names:
            self._enter(around, name)
            yield name

    def _rows_of_tensor(self, view: RaggedView) -> tuple[RaggedView, str]:
        """Rows of a rectangle that is not an array, and the name of their dtype."""
        memory: Any = view.memory
        name = self._torch_dtype(memory)
        if not memory.is_cpu:
            # Only rows leave the device.
            values = values_of(view)
            view = end_to_end(values, view.row_splits)
            self.on_devices.append(values)
        return view, name

    def _tensordict(self, td: TensorDictBase) -> Tree:
        self._batch_size(td)
        keys: list[str] = []
        nodes: list[Tree] = []
        around = self._column
        leaf: Any
        for key, leaf in td.items():
            if self._default is not None and not (type(leaf) in _HANDLERS or _handler(type(leaf))):
                leaf = self._default(leaf)  # here, so that its rows are checked
            if not fits_into(leaf, td):
                wanted, found = list(td.batch_size), list(leaf.batch_size)
                detail = f"expected batch size {wanted} in nested {key!r} too, found {found}"
                raise self._refused("row_mismatch", detail)
            if self._narrow is not None:
                self._enter(around, key)
            keys.append(key)
            node = self._child(key, leaf)
            if type(node) is not tuple or node[0] not in LEAVES:
                self._path.append(key)
                raise self._refusal(
                    leaf, " as a leaf of a TensorDict; make it a NonTensorData of the batch's size"
                )
            nodes.append(node)
        self._column = around
        return (Code.TENSORDICT, len(td.batch_size), tuple(keys), *nodes)

    def _lazy_view(self, view: Any) -> Tree:
        try:
            whole = tensordict_of_view(view)
        except RuntimeError as error:  # of a stack of rows with different shapes
            raise self._refusal(view, f": {error!s:.200}; encode what it is a view of") from error
        return self._tensordict(whole)

    def _lazy_stack(self, stack: LazyStackedTensorDict) -> Tree:
        if not stack.tensordicts and stack.batch_dims != 1:
            raise self._refusal(
                stack, " without members; encode TensorDict({}, batch_size=x.batch_size)"
            )
        self._check_unnamed(stack, [stack_dim_name(stack)])
        return (Code.LAZY_STACK, int(stack.stack_dim), *self._members_of(stack))

    def _members_of(self, stack: LazyStackedTensorDict) -> list[Tree]:
        if self._stacks == MAX_STACKS:
            detail = f"expected at most {MAX_STACKS} stacks in each other, found more"
            raise self._refused("too_deep", detail)
        self._stacks += 1
        members = [self._child(i, member) for i, member in enumerate(stack.tensordicts)]
        self._stacks -= 1
        return members

    def _non_tensor_data(self, data: NonTensorData) -> Tree:
        self._batch_size(data)
        return (Code.NON_TENSOR_DATA, len(data.batch_size), self._payload("data", data.data))

    def _non_tensor_stack(self, stack: NonTensorStack) -> Tree:
        self._check_unnamed(stack, [stack_dim_name(stack)])
        payloads = payloads_of_stack(stack)
        if payloads is not None:
            self._rows(payloads)
            return (Code.NON_TENSOR_ROWS,)
        if not stack.tensordicts:
            remedy = "encode NonTensorData(None, batch_size=x.batch_size)"
            raise self._refusal(stack, f" of several dims without members; {remedy}")
        members = self._members_of(stack)
        return (Code.NON_TENSOR_STACK, int(stack.stack_dim), *members)

    def _check_unnamed(self, td: Any, names: Sequence[str | None]) -> None:
        if any(name is not None for name in names):
            raise self._refusal(td, f" with dim names {list(names)}; set td.names = None")

    def _batch_size(self, td: Any) -> None:
        """The numbers of a batch size; its dims have no names."""
        batch_size: torch.Size = td.batch_size
        if batch_size:
            self._check_unnamed(td, td.names)
        if any(dim < 0 for dim in batch_size):
            raise self._refused(
                "bad_shape", f"expected a batch size from 0 on, found {list(batch_size)}"
            )
        if batch_size.numel() > MAX_UNBACKED_ROWS:
            self.unbacked.append((self._where(), batch_size.numel()))
        self.items += batch_size


_REMEDY = (
    "; convert it to a type of encode's list (dict(x), tuple(x), str(x), x.value), register its "
    "type with register_type (datetime, enums and others of the standard library: "
    "jagcodec.stdlib.register_stdlib_types), or pass allow_pickle=True on both sides"
)
_REMEDY_OF_BATCHES = (
    "; convert it with TensorDict(dict(x.items()), x.batch_size), or register its type"
)

TENSOR_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, MemoryMappedTensor))


def _alike(rows: Sequence[bytes | Lowered], firsts: Sequence[int]) -> list[bytes] | list[Lowered]:
    """All rows as documents; or as messages, if one is. Equal `firsts` are one object."""
    plain = [row for row in rows if isinstance(row, bytes)]
    if len(plain) == len(rows):
        return plain
    made = [
        Lowered(None, [], _ARRAY_OF_ONE + row) if isinstance(row, bytes) else row for row in rows
    ]
    return [made[first] for first in firsts]


_ARRAY_OF_ONE = b"\x91"  # what msgpack writes before the only item


_HANDLERS: dict[type, Callable[[Lowering, Any], Tree]] = {
    dict: Lowering._dict,
    tuple: Lowering._tuple,
    bytes: Lowering._bytes,
    set: Lowering._set,
    frozenset: Lowering._set,
    np.ndarray: Lowering._array,
    np.memmap: Lowering._array,
    Columns: Lowering._columns,
    ColumnDict: Lowering._column_dict,
    **dict.fromkeys(LIST_TYPES, Lowering._list),
    **dict.fromkeys((*TENSOR_TYPES, NESTED_TENSOR), Lowering._tensor),
    **dict.fromkeys(TENSORDICT_TYPES, Lowering._tensordict),
    LazyStackedTensorDict: Lowering._lazy_stack,
    NonTensorData: Lowering._non_tensor_data,
    NonTensorStack: Lowering._non_tensor_stack,
}

_BASES: tuple[tuple[type, Callable[[Lowering, Any], Tree]], ...] = (
    (torch.Tensor, Lowering._tensor),
    (np.generic, Lowering._scalar),
    (LAZY_VIEW, Lowering._lazy_view),
)


def _handler(kind: type) -> Callable[[Lowering, Any], Tree] | None:
    """The handler of a type that is not listed."""
    if registered_name(kind) is not None:
        return Lowering._registered
    return next((handler for base, handler in _BASES if issubclass(kind, base)), None)


def _views_of_one_storage(values: Sequence[Any]) -> tuple[RaggedView, IntArray] | None:
    """Plain tensors over one storage as a view of it without the gaps between them, and their
    (N, 2) starts and ends among its cells; None if they are not that.

    TransferQueue sends thousands of row views, which would be a frame each.
    """
    first = values[0]
    if len(values) < 2 or not _viewable(first):
        return None
    storage = first.untyped_storage().data_ptr()
    cell = tuple(first.shape[1:])
    for value in values:
        if (
            type(value) is not torch.Tensor
            or value.dtype != first.dtype
            or tuple(value.shape[1:]) != cell
            or not _viewable(value)
            or value.untyped_storage().data_ptr() != storage
        ):
            return None

    inner = first.shape[1:].numel()
    places = np.array([value.storage_offset() for value in values], dtype=np.int64)
    lengths = np.array([value.shape[0] for value in values], dtype=np.int64)
    # An empty view may be anywhere; put it where it makes no gap.
    places[lengths == 0] = places[lengths > 0].min() if lengths.any() else 0
    if ((places - places.min()) % inner).any():
        return None
    starts = (places - places.min()) // inner
    ends = starts + lengths

    firsts, lasts, moves = joined_ranges(starts, ends)
    span = first.as_strided((int(lasts[-1]) * inner,), (1,), int(places.min())).view(-1, *cell)
    pieces = None if len(firsts) == 1 else firsts
    row_splits = RowSplits.from_lengths(lasts - firsts)
    view = RaggedView(span, span.dtype, tuple(span.shape), 1, pieces, row_splits)
    return view, np.stack([starts + moves, ends + moves], axis=1)


def _viewable(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type == "cpu"
        and value.dim() > 0
        and value.shape[1:].numel() > 0
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )
