"""`ValueWalk`: a walk over a value, which handlers of its types share.

It has the place of the walk, what the handlers found, the checks that they share, and errors.
`Lowering` adds the table of types.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from jagcodec._arguments import array_remedy
from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import Name
from jagcodec.errors import Reason, UnsupportedTypeError, brief, child_path
from jagcodec.memory.arrays import is_of_torch
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.wire import documents, spec
from jagcodec.wire.checks import is_oversized_empty
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.items import Item, Lowered, RowMessages, Tree
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.native import NATIVE
from jagcodec.wire.spec import Code

STRING_TYPE = frozenset((str,))

OF_DOCUMENTS = (Code.NON_TENSOR_ROWS,)
"""The node of rows of objects that are documents, or messages."""

_MOST_ARRAY_ROWS = DEFAULT_LIMITS.expanded // (spec.EXPANSION * spec.ARRAY_COST)
"""With more rows that are arrays, a narrow message may ask for more memory than readers allow."""


class ValueWalk(ABC):
    """One walk over a value: it knows where it is, and collects what it finds.

    A *tree* is a node of the schema, or a document. The functions that make the tree of a value,
    its *handlers*, call `lower` or `lower_at` for each value in it, and add bytes to `items`.
    """

    def __init__(
        self,
        allow_pickle: bool,
        default: Callable[[Any], Any] | None = None,
        narrow: bool | frozenset[Name] = False,
    ) -> None:
        # Options.
        self._allow_pickle = allow_pickle
        self.default: Callable[[Any], Any] | None = default
        # None if the caller gave no names.
        self.narrow_names: frozenset[Name] | None = None if isinstance(narrow, bool) else narrow

        # Where the walk is.
        self.path: list[Any] = []  # the keys on the way to the current value
        self._column_name: Name = ()
        self._column_is_narrow: bool = narrow is True
        self.stacks: int = 0  # how many stacks of TensorDicts contain the current value
        self._defaults = 0  # how many results of `default` contain the current value

        # What it has found; `Lowered` describes the first four.
        self.items: list[Any] = []  # each an `Item`, or a number of a node, such as a dim
        self.values: list[Any] = []  # documents that are next to nodes
        self.unbacked: list[tuple[str, int]] = []
        self.messages: list[RowMessages] = []
        self.columns: dict[Name, None] = {}  # the names of all columns, if `narrow` has names
        self.array_rows: int = 0  # how many rows are arrays or None

        # Cells on devices, which `fetch` gets at the end.
        self.on_devices: list[Any] = []  # tensors
        self.indices: dict[Any, Any] = {}  # cell indices on devices, which columns share
        # Functions that give items their data, in the order of the calls.
        self.unread: list[Callable[[Any], None]] = []

    @functools.cached_property
    def pool(self) -> RowSplitsPool:
        """The row splits of jagged tensors. Equal ones are one object."""
        return RowSplitsPool()

    # --- the values in a value ---

    @abstractmethod
    def lower(self, value: Any) -> Tree:
        """The tree of a value. Its data is added to `items`."""

    @abstractmethod
    def lower_foreign(self, value: Any, why: str = "") -> Tree:
        """The tree of the value that `default` returns, or of a pickle; raises if neither works."""

    @abstractmethod
    def apply_default(self, value: Any) -> Any:
        """The value, or what `default` returns for it if its type has no handler."""

    def lower_at(self, key: Any, value: Any) -> Tree:
        """The tree of the value under a key, which errors name."""
        if type(value) in NATIVE or (
            # Fast for chat messages, which are dicts of plain values: such a dict is a document.
            type(value) is dict
            and len(self.path) < spec.MAX_DEPTH
            and STRING_TYPE.issuperset(map(type, value))
            and NATIVE.issuperset(map(type, value.values()))
        ):
            return value
        self.path.append(key)
        if len(self.path) > spec.MAX_DEPTH:
            raise self.too_deep()
        lowered = self.lower(value)
        self.path.pop()
        return lowered

    def lower_each(self, keys: Iterable[Any], values: Iterable[Any]) -> tuple[list[Tree], bool]:
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
            elif type(tree) is tuple and not has_nodes:  # this is the first node
                has_nodes = True
                self.store_before(values_before, trees)
                trees = [None] * len(trees)
            trees.append(tree)
        return trees, has_nodes

    def store_before(self, values_before: int, documents: Iterable[Any]) -> None:
        """Store documents ahead of those added since there were `values_before` of them.

        Readers expect documents in the order of the walk, and a node stores the documents in it
        before the caller knows that it is a node.
        """
        self.values[values_before:values_before] = documents

    def lower_items(self, values: Sequence[Any]) -> tuple[list[Tree], bool]:
        """Do what `lower_each` does, for the items of a list or a tuple."""
        if NATIVE.issuperset(map(type, values)):
            return list(values), False
        return self.lower_each(range(len(values)), values)

    def lower_row(self, i: int, row: Any) -> bytes | Lowered:
        """The document of row `i`; if the row needs buffers, a lowered value for its message."""
        if type(row) in NATIVE:
            return self.document_of(row)
        # Lower the row into its own lists, then continue with the lists of the outer message.
        outer = self.items, self.values, self.unbacked, self.array_rows
        self.items, self.values, self.unbacked, self.array_rows = [], [], [], 0
        tree = self.lower_at(i, row)
        lowered = self._collect(tree) if type(tree) is tuple else self.document_of(tree)
        self.items, self.values, self.unbacked, self.array_rows = outer
        return lowered

    # --- what handlers find ---

    def add(self, item: Item) -> Tree:
        """Add the item of a column of cells or documents, and return its node."""
        self.items.append(item)
        dtype, dims = item.dtype, item.dims
        if dtype is None:
            return OF_DOCUMENTS
        item.narrow = self._column_is_narrow and dtype in spec.INTEGER_DTYPES
        if 0 in dims:
            self.check_dims(dims, spec.TORCH_ITEMSIZES[dtype])
        if item.splits is None:
            return (Code.TENSOR, dtype, len(dims))
        return (Code.JAGGED, dtype, len(dims), item.ragged_dim)

    def check_dims(self, dims: Sequence[int], itemsize: int) -> None:
        """Raise an error for dims that no reader accepts next to a dim of 0."""
        if is_oversized_empty(dims, itemsize):
            detail = (
                f"expected dims next to 0 of fewer than {spec.MAX_BYTES} bytes, "
                f"found {brief(list(dims))} of {itemsize} each"
            )
            raise self.error("too_large", detail)

    def check_rank(self, cells: Any) -> None:
        """Raise an error for an array or a tensor with more dims than messages have."""
        if cells.ndim > spec.MAX_NDIM:
            why = f" with {cells.ndim} dims: the limit is {spec.MAX_NDIM}"
            raise self.unsupported(cells, why)

    def note_unbacked_rows(self, rows: int) -> None:
        """Note the current value if it has more rows than `MAX_UNBACKED_ROWS`.

        The writer raises an error unless the message has a byte for each row.
        """
        if rows > spec.MAX_UNBACKED_ROWS:
            self.unbacked.append((self.where(), rows))

    def enter_columns(self, names: Iterable[str]) -> Iterator[str]:
        """Yield each name; as a side effect, make its column the current one until the next name.

        The name of the current column decides whether its integers are stored narrow. Call this if
        `narrow` has names. At the end, the column that holds the batch is the current one again, so
        consume all names.
        """
        narrow = self.narrow_names or frozenset()
        outer, outer_is_narrow = self._column_name, self._column_is_narrow
        for name in names:
            path = self._column_name = (*outer, name)
            self.columns[path] = None
            self._column_is_narrow = outer_is_narrow or path in narrow
            yield name
        self._column_name, self._column_is_narrow = outer, outer_is_narrow

    def document_of(self, document: Any) -> bytes:
        """The bytes of a document."""
        try:
            return self.msgpack(document)
        except ValueError as error:
            raise self.error("too_large", f"msgpack: {error}") from error

    @functools.cached_property
    def msgpack(self) -> Callable[[Any], bytes]:
        """The function that writes a document."""
        return documents.writer().pack  # type: ignore[no-any-return]

    # --- the result ---

    def finish(self, tree: Tree, values: Sequence[Any] = ()) -> Lowered:
        """Everything that was lowered, ready to be placed; `values` are documents to add."""
        if type(tree) is not tuple:  # the whole value is one document
            self.values.append(tree)
            tree = None
        self.values += values
        lowered = self._collect(tree, self.messages)
        self.fetch()
        return lowered

    def _collect(self, tree: Tree, messages: Sequence[RowMessages] = ()) -> Lowered:
        """The items and documents of a tree, which the walk has found."""
        values = self.document_of(self.values) if self.values else NO_VALUES
        needs_more = self.array_rows > _MOST_ARRAY_ROWS
        return Lowered(tree, self.items, values, self.unbacked, messages, needs_more)

    def fetch(self) -> None:
        """Wait for the devices once, then give the items their cells."""
        if self.unread:
            lowering_of_tensors().fetch(self.on_devices, self.unread)

    # --- errors ---

    def where(self) -> str:
        """The path of the current value, for errors."""
        return functools.reduce(child_path, self.path, "$")

    def error(self, reason: Reason, detail: str) -> UnsupportedTypeError:
        """An error at the current value."""
        return UnsupportedTypeError(reason, self.where(), detail)

    def too_deep(self) -> UnsupportedTypeError:
        """The error for a value that more than `MAX_DEPTH` containers contain."""
        detail = f"expected at most {spec.MAX_DEPTH} nested containers, found more (a cycle?)"
        return self.error("too_deep", detail)

    def unsupported(self, value: Any, why: str = "") -> UnsupportedTypeError:
        """The error for a value that cannot be encoded.

        `why` follows "cannot be encoded" in its text. Without it, a remedy does.
        """
        cls = type(value)
        builtin = cls.__module__ == "builtins"
        name = cls.__qualname__ if builtin else f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, np.ndarray):
            remedy = array_remedy(value)
            why = why or (f"; {remedy}, or register its type with register_type" if remedy else "")
        elif not why and is_of_torch(cls):
            why = lowering_of_tensors().remedy_of(value)
        why = why or _REMEDY
        return self.error("unsupported_type", f"{name} cannot be encoded{why}")


Handler: TypeAlias = Callable[[ValueWalk, Any], Tree]
"""A function that makes the tree of a value of one type."""

_REMEDY = (
    "; convert it to a type of encode's list (dict(x), tuple(x), str(x), x.value), register its "
    "type with register_type (datetime, enums and others of the standard library: "
    "jagcodec.stdlib.register_stdlib_types), or pass allow_pickle=True on both sides"
)


@functools.cache
def lowering_of_tensors() -> Any:
    """The module that lowers tensors: imported when there is one, because it imports torch."""
    return module_with_torch("wire.write.lowering_tensors", "encode")
