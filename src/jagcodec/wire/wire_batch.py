"""`open_wire`, `WireBatch`: a batch that is read on demand."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, UnbatchedTensor

from jagcodec._arguments import check_name, known_names, unknown_name
from jagcodec.columns.column import (
    as_leaf,
    field_in_memory,
    has_host_cells,
    row_count,
    row_counts,
    view_in_memory,
)
from jagcodec.columns.fields import FieldSchema
from jagcodec.columns.join import LAZY_STACK, select_leaf
from jagcodec.columns.sizes import sizes_of
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    WireFormatError,
    describe,
)
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.buffers import WireSource
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.non_tensor import (
    TENSORDICT_TYPES,
    batch_of,
    is_leaf,
    is_non_tensor,
    is_numeric,
    leaf_of_rows,
    object_array,
    objects_of_leaf,
    stack_of_payloads,
)
from jagcodec.ragged.row_index import Chosen, choose_rows
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire.checks import bad, fail, inside
from jagcodec.wire.column_source import As, Column, ColumnSource
from jagcodec.wire.compress import prepare
from jagcodec.wire.decoder import (
    arrays,
    build,
    message_meta,
    objects,
    raw_documents,
    revived,
    rows_differ,
)
from jagcodec.wire.encoder import encode
from jagcodec.wire.files import file_path, note_file, noted_file, read_file
from jagcodec.wire.frames import Frame
from jagcodec.wire.leaf import (
    cells_of,
    columns_of_dict,
    field_of,
    offsets_of_packed,
    rows_of_node,
)
from jagcodec.wire.limits import Limits
from jagcodec.wire.lowered import Columns, Name, OpenBatch, with_closed
from jagcodec.wire.memory_fields import check_packed
from jagcodec.wire.message import Budget, ChosenRows, Message
from jagcodec.wire.opening import open_message, open_store, usable_reading
from jagcodec.wire.outside import pass_on
from jagcodec.wire.schema import GROUP, Node
from jagcodec.wire.slicing import Slicer, slicer_of
from jagcodec.wire.spec import BATCHED_DATA_DICT, IN_STACK, MAX_UNBACKED_ROWS, ORDERED_DICT, Kind
from jagcodec.wire.stacked import MessageInMemory

_JAGGED, _TENSOR = Kind.JAGGED, Kind.TENSOR


class WireBatch(OpenBatch):
    """A batch of columns over one message or several, and in memory; made by `open_wire`.

    `select` and `rows` choose without reading, and ``batch["ids"]`` reads one column: a tensor, an
    array of objects, or for a nested batch a `WireBatch`. `keys`, `items`, `values`, `get` and
    iteration are those of a dict, but ``len(batch)`` is N. It keeps its messages alive. A
    contiguous range of rows of one writable message aliases it; anything else is copied. `encode`
    accepts it.

    Whatever reads columns raises WireFormatError if one is malformed, and ArgumentError if those of
    several messages differ, or if one in memory got another number of rows after it was opened.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire
        >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
        >>> frames = encode_fields(columns, lengths=torch.tensor([3, 4, 3]))
        >>> batch = open_wire(frames).select(["ids"]).rows(slice(1, 3))
        >>> batch.fields, batch.batch_size
        (('ids',), torch.Size([2]))
        >>> [row.tolist() for row in batch["ids"].unbind()]
        [[4, 5, 6, 7], [8, 9, 10]]
    """

    __slots__ = ("__weakref__", "_columns", "chosen", "source")

    def __init__(
        self,
        source: ColumnSource,
        columns: Mapping[str, Column] | None = None,
        chosen: ChosenRows | None = None,
    ) -> None:
        """Use `open_wire`; without `columns`, all those of the source."""
        self.source: ColumnSource = source
        self.chosen: ChosenRows | None = chosen
        self._columns = columns

    @property
    def columns_by_name(self) -> Mapping[str, Column]:
        """The columns, and where they are read."""
        if self._columns is None:
            self._columns = self.source.columns()
        return self._columns

    def nodes(self) -> dict[str, Any]:
        """The columns of one message, by name, as their nodes; a new dict."""
        if self._columns is None:
            return dict(zip(self.source.names, self.source.handles, strict=True))
        return {name: handle for name, (_, handle) in self.columns_by_name.items()}

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(self.source.names if self._columns is None else self._columns)

    @property
    def batch_size(self) -> torch.Size:
        """(N, ...): N rows as chosen."""
        return torch.Size([len(self), *self.source.sizes[1:]])

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """Name to `FieldSchema`, from the headers alone, for the rows as chosen."""
        rows = len(self)
        return MappingProxyType(
            {
                name: source.schema(handle, rows)
                for name, (source, handle) in self.columns_by_name.items()
            }
        )

    @property
    def meta(self) -> dict[str, Any]:
        """Values of the whole batch: `meta` of `encode`, or what is next to the batch in
        a dict or a `BatchedDataDict`. Of rows of several messages what all of them agree on; of
        columns of several, what none contradicts. A new dict each time; no column is read.
        """
        return self.source.meta()

    @property
    def metas(self) -> list[dict[str, Any]]:
        """`meta` of each message, or of each batch that was joined, in their order."""
        return self.source.metas()

    def __len__(self) -> int:
        return self.source.sizes[0] if self.chosen is None else len(self.chosen)

    def __iter__(self) -> Iterator[str]:  # also what `in` asks
        return iter(self.fields)

    def __getitem__(self, name: str) -> Any:
        """Read one column; each call reads it again.

        Example:
            >>> from jagcodec import encode_rows, open_wire
            >>> batch = open_wire(encode_rows({"ids": [[5], [6, 7]], "uid": ["a", "b"]}))
            >>> batch["uid"], batch["ids"].values()
            (array(['a', 'b'], dtype=object), tensor([5, 6, 7]))

        Returns:
            Cells as a tensor: jagged, strided or sparse. Python objects as an array (N,) of the
            objects that were sent; an object of the whole batch fills N rows. Arrays of text, bytes
            or times as they are. A nested batch as a `WireBatch` of the same rows. Tensorclasses,
            lazy stacks and an `UnbatchedTensor` as `decode` returns them.

        Raises:
            ArgumentKeyError: There is no such column.
            ArgumentTypeError: `name` is not a string.
        """
        if not isinstance(name, str):
            found = describe(name)
            detail = f"expected the name of a column, found {found}; rows(index) chooses rows"
            raise ArgumentTypeError("bad_type", "WireBatch[name]", detail)
        return self._read_together({name: self._column_named(name, "__getitem__")}, As.VALUE)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """``batch[name]``; `default` if there is no such column.

        Example:
            >>> from jagcodec import encode_rows, open_wire
            >>> batch = open_wire(encode_rows({"reward": [0.5, 1.0]}))
            >>> batch.get("reward"), batch.get("advantages") is None
            (tensor([0.5000, 1.0000]), True)

        Raises:
            ArgumentTypeError: `name` is not a string.
        """
        check_name(name, "WireBatch.get(name)")
        return self[name] if name in self.columns_by_name else default

    def keys(self) -> tuple[str, ...]:
        """`fields`, as a dict calls them. Reads nothing."""
        return self.fields

    def items(self) -> Iterator[tuple[str, Any]]:
        """Each name with ``batch[name]``: an iterator, which reads a column when it comes to it.

        Example:
            >>> from jagcodec import encode_rows, open_wire
            >>> batch = open_wire(encode_rows({"reward": [0.5, 1.0], "uid": ["a", "b"]}))
            >>> for name, column in batch.items():
            ...     print(name, column.tolist())
            reward [0.5, 1.0]
            uid ['a', 'b']
        """
        return ((name, self[name]) for name in self.fields)

    def values(self) -> Iterator[Any]:
        """``batch[name]`` of each name, as `items` reads them."""
        return (self[name] for name in self.fields)

    def __repr__(self) -> str:
        return f"WireBatch(fields={list(self.fields)}, batch_size={list(self.batch_size)})"

    def select(self, names: Iterable[str]) -> WireBatch:
        """The columns of these names, in this order. Reads nothing.

        Raises:
            ArgumentKeyError: A name is not a column.
        """
        columns = self.columns_by_name
        listed = known_names(names, columns, "WireBatch.select")
        return WireBatch(self.source, {name: columns[name] for name in listed}, self.chosen)

    def rows(self, index: Any) -> WireBatch:
        """These rows, in this order; they may repeat. Reads nothing.

        Args:
            index: A slice, a range, integers (list, tensor, array; negative ones count from the
                end), N booleans, or one integer for a batch of one row.

        Raises:
            ArgumentIndexError: A row does not exist.
            ArgumentTypeError: `index` has another type.
        """
        return self.at(choose_rows(index, len(self), "WireBatch.rows(index)"))

    def at(self, chosen: Chosen) -> WireBatch:
        """As `rows`, for an index that was checked."""
        if self.chosen is not None:
            known = self.chosen.index
            if isinstance(chosen, range):
                chosen = known[chosen.start : chosen.stop]
            else:
                chosen = np.asarray(known, dtype=np.int64)[chosen]
        return WireBatch(self.source, self.columns_by_name, ChosenRows(chosen))

    def to_tensordict(self) -> TensorDict:
        """The chosen columns and rows as a TensorDict, as `decode` would make it.

        Raises:
            ArgumentError: Rows were chosen of a column whose rows torch cannot choose.
        """
        return self.tensordict_of(self.leaves())

    def leaves(self) -> dict[str, Any]:
        """Each column by name, as `to_tensordict` holds it."""
        return self._read_together(self.columns_by_name, As.LEAVES)

    def to_frames(self) -> list[Frame]:
        """The chosen columns and rows as a message, to send on.

        Example:
            >>> import torch
            >>> from jagcodec import decode, encode_fields, open_wire
            >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
            >>> batch = open_wire(encode_fields(columns, lengths=torch.tensor([3, 4, 3])))
            >>> decode(batch.rows([2]).select(["ids"]).to_frames())["ids"].values()
            tensor([ 8,  9, 10])

        Returns:
            If the batch is a whole message in memory, its frames. Otherwise new frames, as `encode`
            makes them of this batch; columns that are stored narrow stay narrow, and elided ones
            elided where that pays. A range of rows of plain columns is cut out, which is faster.
            Only read the frames: they may alias the messages.
        """
        frames = self.source.cut(self)
        return encode(self, allow_pickle=self.source.allow_pickle) if frames is None else frames

    def to_encode(self) -> Any:
        """The chosen columns and rows as input for `encode`; rows of documents are not read."""
        if len(self.source.sizes) > 1:
            return self.to_tensordict()
        return Columns(len(self), self._read_together(self.columns_by_name, As.ITEM))

    def narrow_names(self) -> list[Name]:
        """The columns that are stored in fewer bytes than their dtypes have, and so sent on.

        Those of a nested batch by all names on the way.
        """
        columns = self.columns_by_name.items()
        return [
            path for name, (source, handle) in columns for path in source.narrow_names(name, handle)
        ]

    def is_elided(self) -> bool:
        """Whether a column shares cells in its message, which are shared again where it pays."""
        return any(source.is_elided(handle) for source, handle in self.columns_by_name.values())

    def row_lengths(self, name: str) -> IntArray | None:
        """(N,) lengths of the chosen rows of a jagged column; None for any other column.

        Reads the offsets of its ragged group and nothing else.
        """
        source, handle = self._column_named(name, "row_lengths")
        return source.row_lengths(name, handle, self.chosen)

    def columns(self) -> list[tuple[str, Any]]:
        """Each column with its name, in the form from which a rectangle is cheapest.

        A jagged one is a `RaggedView` over the messages, an array stays one, and an object of the
        whole batch stays one; any other is what ``batch[name]`` gives. Views are only to be read.
        """
        return list(self._read_together(self.columns_by_name, As.VIEW).items())

    def _column_named(self, name: str, where: str) -> Column:
        columns = self.columns_by_name
        check_name(name, f"WireBatch.{where}(name)")
        if name not in columns:
            raise unknown_name(name, columns, f"WireBatch.{where}")
        return columns[name]

    def _read_together(self, columns: Mapping[str, Column], form: As) -> dict[str, Any]:
        """Read columns in one form, those of each source together."""
        handles: dict[ColumnSource, dict[str, Any]] = {}
        for name, (source, handle) in columns.items():
            handles.setdefault(source, {})[name] = handle
        found = [source.read(wanted, self.chosen, form) for source, wanted in handles.items()]
        if list(handles) == [self.source]:
            return found[0]
        each = {name: value for values in found for name, value in values.items()}
        return {name: self.source.shared(each[name], self.chosen) for name in columns}

    def tensordict_of(self, leaves: dict[str, Any]) -> TensorDict:
        """A TensorDict of the columns, which are passed as leaves."""
        source = self.source
        # Values of registered types decide what TensorDict's constructor makes of them.
        plain = all(
            getattr(handle, "kind", None) is not Kind.USER
            for _, handle in self.columns_by_name.values()
        )
        try:
            if plain and source.device is None and len(source.sizes) == 1:
                return batch_of(leaves, len(self))
            return TensorDict(leaves, batch_size=self.batch_size, device=source.device)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # tensordict raises all kinds
            pass_on(error)
            detail = f"expected columns of one batch, found {error!s:.200}"
            raise fail("bad_value", detail) from error

    # Pickled, as by a queue of multiprocessing: what was chosen, as a message

    def __reduce_ex__(self, protocol: Any) -> Any:
        frames = self.to_frames()
        if protocol >= 5:
            return open_wire, ([pickle.PickleBuffer(frame) for frame in frames],)
        return open_wire, ([bytes(frame) for frame in frames],)


# --- the columns of one message ----------------------------------------------------------------


class MessageColumns(ColumnSource):
    """The columns of a batch in one message, each known by its node."""

    __slots__ = ("_slicer", "beside", "message", "node", "whole")

    def __init__(
        self,
        message: Message,
        node: Node,
        sizes: list[int],
        beside: Sequence[tuple[str | None, Node]] = (),
        *,
        whole: bool = False,
    ) -> None:
        self.names: Sequence[str] = node.fields[-1]
        self.handles: Sequence[Node] = node.children
        self.sizes: Sequence[int] = sizes
        self.device: torch.device | None = message.device
        self.allow_pickle: bool = message.allow_pickle
        self.message: Message = message
        self.node: Node = node  # whose children are the columns
        # Nodes beside the batch, each with its name. A node without a name holds a mapping of
        # such values.
        self.beside: Sequence[tuple[str | None, Node]] = beside
        self.whole: bool = whole  # whether the batch is all of the message
        self._slicer: tuple[Mapping[str, Column], Slicer | None] | None = None

    def in_memory(self) -> MessageInMemory | None:
        """The message as `MessageInMemory`; None if a join cannot read its rows in place."""
        buffers, header = self.message.buffers, self.message.header
        if not self.message.in_memory or len(self.sizes) > 1 or self.device is not None:
            return None
        values = id(self) if self.beside else header.packed_values
        first, levels = header.schema.first_group, self.message.limits.depth
        return MessageInMemory(self.node, first, header.packed_numbers, values, buffers, levels)

    def meta(self) -> dict[str, Any]:
        message, meta = self.message, dict[str, Any]()
        budget = Budget(message)
        for name, node in self.beside:
            value = build(message, node, budget)
            if name is None and type(value) is not dict:
                raise bad("a mapping next to the columns", type(value).__name__)
            meta |= value if name is None else {name: value}
        return meta | message_meta(message)

    def schema(self, handle: Node, rows: int) -> FieldSchema:
        if handle.kind is Kind.VALUE:  # a column of a dict, without buffers
            is_batch = type(self.message.document(handle.value)) is dict
            return FieldSchema("tensordict" if is_batch else "object", None, None)
        return field_of(handle, self.message.numbers, rows)

    def row_lengths(self, name: str, handle: Node, chosen: ChosenRows | None) -> IntArray | None:
        if handle.kind is not _JAGGED and offsets_of_packed(handle) is None:
            return None
        lengths: IntArray = self.each({name: handle}, self._read_lengths, chosen)[name]
        return lengths

    def read(
        self, handles: Mapping[str, Node], chosen: ChosenRows | None, form: As
    ) -> dict[str, Any]:
        message = self.message
        if form is As.VIEW and message.header.compressed:
            with_rows = [node for each in handles.values() for node in cells_of(each)]
            wanted = {message.numbers[node.number] for node in with_rows}
            existing = range(len(message.buffers))  # an empty column needs no buffer
            prepare(message.buffers[i] for i in wanted if i in existing)
        return self.each(handles, self._read_column, chosen, form, Budget(message))

    def each(
        self, handles: Mapping[str, Node], read: Callable[..., Any], *options: Any
    ) -> dict[str, Any]:
        """Call `read` for each column; errors name the column."""
        found: dict[str, Any] = {}
        for name, node in handles.items():
            try:
                found[name] = read(node, *options)
            except WireFormatError as error:
                named = inside(error, name)
                if self.message.reading.file is not None:
                    note_file(named, self.message.reading.file)
                raise named from error
            except ArgumentError as error:  # of the caller's choice of rows
                path = f"{error.path}, column {name!r}"
                raise type(error)(error.reason, path, error.detail) from error
            except (JagcodecError, OSError, MemoryError):  # of the source, the machine
                raise
            except Exception as error:  # torch, numpy and tensordict raise all kinds
                pass_on(error)
                raise inside(bad(f"rows of {node.kind.name}", error), name) from error
        return found

    def narrow_names(self, name: str, handle: Node) -> list[Name]:
        batch = self._inner_batch(handle)
        if batch is not None:
            inner = zip(batch.fields[-1], batch.children, strict=True)
            return [(name, *rest) for each in inner for rest in self.narrow_names(*each)]
        cells = [node for node in cells_of(handle) if node.kind in (_TENSOR, _JAGGED)]
        return [(name,)] if any(map(self.message.is_narrow, cells)) else []

    def is_elided(self, handle: Node) -> bool:
        batch = self._inner_batch(handle)
        if batch is not None:
            return any(map(self.is_elided, batch.children))
        return any(map(self.message.is_elided, cells_of(handle)))

    def cut(self, batch: WireBatch) -> list[Frame] | None:
        frames, chosen = self.message.frames, batch.chosen
        if chosen is None and self.whole and frames and [*batch.fields] == self.names:
            return [array.data.toreadonly() for array in frames]
        index = range(self.sizes[0]) if chosen is None else chosen.index
        if not isinstance(index, range) or not index:
            return None
        # Keep the slicer: callers often cut many parts from one message.
        known, columns = self._slicer, batch.columns_by_name
        if known is None or known[0] is not columns:
            known = self._slicer = columns, self._slicer_of(batch)
        return None if known[1] is None else known[1].cut(index.start, index.stop)

    def _slicer_of(self, batch: WireBatch) -> Slicer | None:
        if not self.beside and self.in_memory() is not None:
            nodes = {name: column.handle for name, column in batch.columns_by_name.items()}
            with suppress(WireFormatError):  # which the reader of the column raises
                return slicer_of(self.message, nodes, self.sizes[0])
        return None

    # Of a node

    def _inner_batch(self, node: Node) -> Node | None:
        """The node with a nested batch's columns; else None. Only a dict may nest a dict."""
        if node.kind is Kind.TENSORDICT:
            return node
        return columns_of_dict(node) if self.node.kind is Kind.MAP else None

    def _read_lengths(self, node: Node, chosen: ChosenRows | None) -> IntArray:
        if node.kind is not _JAGGED:
            view = self._read_other(node, chosen, As.VIEW, Budget(self.message))
            lengths: IntArray = view.row_splits.lengths
            return lengths
        self._check_row_count(node)
        splits = self.message.row_splits(self.message.numbers[node.number + GROUP])
        return (splits if chosen is None else chosen.among(splits)[0]).lengths

    def _check_row_count(self, node: Node) -> None:
        """Check that a column with rows of cells has the rows of the batch."""
        numbers, groups = self.message.numbers, self.message.header.groups
        if node.kind is Kind.ARRAY_ROWS:
            sizes = [numbers[node.children[1].dims]]
        elif node.kind is _TENSOR:
            sizes = numbers[node.dims : node.end]
        else:
            # Batches of several dims have columns that are ragged in a later one.
            outer = node.fields[2] - 1 if node.kind is _JAGGED else 0
            sizes = [
                groups[numbers[node.number + GROUP]].rows,
                *numbers[node.dims : node.dims + outer],
            ]
        if sizes[: len(self.sizes)] != self.sizes:
            raise rows_differ(self.sizes, sizes)

    def _read_column(self, node: Node, chosen: ChosenRows | None, form: As, budget: Budget) -> Any:
        read = _READERS.get(node.kind)
        if read is not None:
            self._check_row_count(node)
            return read(self, node, chosen, form, budget)
        columns = self._inner_batch(node)
        if columns is None:
            return self._read_other(node, chosen, form, budget)
        return self._read_batch(columns, chosen, form, budget)

    def _read_jagged(self, node: Node, chosen: ChosenRows | None, form: As, budget: Budget) -> Any:
        message = self.message
        if form is not As.VIEW and form is not As.ITEM:
            return message.jagged(node, chosen)
        view = message.rows(node, chosen)
        if form is As.ITEM or message.away is None:
            return view
        cells = to_device(values_of(view), message.away)
        return end_to_end(cells, view.row_splits, view.ragged_dim)

    def _read_tensor(self, node: Node, chosen: ChosenRows | None, form: As, budget: Budget) -> Any:
        """A TENSOR; for `As.ITEM` an array in place where possible, which must only be read."""
        leaf = self.message.leaf(node) if form is As.ITEM else None
        if leaf is not None and leaf.dtype in NUMPY_DTYPES and not leaf.runs:
            data, shape = self.message.rectangle(leaf, chosen)
            return np.ndarray(shape, NUMPY_DTYPES[leaf.dtype], data)
        return self.message.tensor(node, chosen)

    def _read_objects(self, node: Node, chosen: ChosenRows | None, form: As, budget: Budget) -> Any:
        if form is As.ITEM:
            return raw_documents(self.message, node, budget, chosen)
        items = objects(self.message, node, budget, chosen)
        if form is As.VIEW or form is As.VALUE:
            return object_array(items)
        return stack_of_payloads(items) if chosen is None else leaf_of_rows(items)

    def _read_arrays(self, node: Node, chosen: ChosenRows | None, form: As, budget: Budget) -> Any:
        if node.fields[0] != IN_STACK and self.node.kind is not Kind.MAP:
            raise bad("a leaf of a TensorDict", "rows of another column")
        rows = arrays(self.message, node, chosen)
        if form is As.LEAVES:
            whole = chosen is None and node.fields[0] == IN_STACK
            return stack_of_payloads(rows) if whole else leaf_of_rows(rows)
        return rows if form is As.ITEM else object_array(rows)

    def _read_batch(self, node: Node, chosen: ChosenRows | None, form: As, budget: Budget) -> Any:
        """The batch whose columns are the children of a node."""
        inner = MessageColumns(self.message, node, _sizes_of(self.message, node, self.sizes))
        batch = WireBatch(inner, None, chosen)
        if form is As.VALUE or form is As.VIEW:
            return batch
        nodes = dict(zip(batch.fields, node.children, strict=True))
        return batch.tensordict_of(inner.each(nodes, inner._read_column, chosen, As.LEAVES, budget))

    def _read_other(self, node: Node, chosen: ChosenRows | None, form: As, budget: Budget) -> Any:
        """A column of any other kind."""
        column = build(self.message, node, budget)
        if self.node.kind is Kind.MAP and isinstance(column, _TYPES_IN_DICTS):
            rows = row_count(column, "$")
            if rows is not None and [rows] != self.sizes:
                raise rows_differ(self.sizes, [rows])
            pool = RowSplitsPool()
            check_packed(column, pool)
            again = lambda: build(self.message, node, Budget(self.message))  # noqa: E731
            return _in_form(column, chosen, form, self, "$", pool, again)
        if isinstance(column, UnbatchedTensor):
            return column
        if not is_leaf(column):
            found = type(column).__name__
            detail = f"expected a leaf of a TensorDict, found {found}; decode reads such a column"
            raise fail("bad_value", detail)
        nested = isinstance(column, torch.Tensor) and column.is_nested
        # Only the first dim of a strided nested tensor has one size.
        sizes, shape = (self.sizes[:1], [column.size(0)]) if nested else (self.sizes, column.shape)
        if [*shape[: len(sizes)]] != sizes:
            raise rows_differ(self.sizes, [*shape])
        if chosen is not None:
            column = select_leaf(column, chosen.index, RowSplitsPool(), _CHOSEN)
        return objects_of_leaf(column) if form is As.VALUE and is_non_tensor(column) else column


_READERS: dict[Kind, Callable[..., Any]] = {
    Kind.JAGGED: MessageColumns._read_jagged,
    Kind.TENSOR: MessageColumns._read_tensor,
    Kind.NON_TENSOR_ROWS: MessageColumns._read_objects,
    Kind.ARRAY_ROWS: MessageColumns._read_arrays,
}
"""The readers of columns that have rows of cells; `MessageColumns._read_other` reads all others."""

_CHOSEN = "WireBatch.rows(index)"


# --- columns in memory -------------------------------------------------------------------------


class MemoryColumns(ColumnSource):
    """Columns in memory: of a batch, or of a message in which a dict is one document.

    The handle of a column is the column. If no rows were chosen, it is returned itself, so
    gradients flow.
    """

    __slots__ = ("_meta", "_path", "_pool")

    def __init__(
        self,
        columns: Mapping[str, Any],
        sizes: Sequence[int],
        meta: Mapping[str, Any],
        around: ColumnSource | Message | None = None,
        path: str = "WireBatch",
    ) -> None:
        """`around` is the message or source that the columns are from; None for the caller's.

        `path` is the place of the batch, for errors.
        """
        self.names: Sequence[str] = tuple(columns)
        self.handles: Sequence[Any] = tuple(columns.values())
        self.sizes: Sequence[int] = [*sizes]
        self.device: torch.device | None = None if around is None else around.device
        self.allow_pickle: bool = around is not None and around.allow_pickle
        self._meta = meta
        self._path = path
        self._pool = RowSplitsPool()  # of all rows

    def meta(self) -> dict[str, Any]:
        return dict(self._meta)

    def schema(self, handle: Any, rows: int) -> FieldSchema:
        return field_in_memory(handle, rows)

    def row_lengths(self, name: str, handle: Any, chosen: ChosenRows | None) -> IntArray | None:
        self._check_rows(handle, name)
        view = view_in_memory(handle, self._pool, self._path_of(name), detach=True)
        if view is None:
            return None
        return view.row_splits.lengths if chosen is None else view.row_splits.lengths[chosen.at]

    def narrow_names(self, name: str, handle: Any) -> list[Name]:
        return []

    def is_elided(self, handle: Any) -> bool:
        return False

    def read(
        self, handles: Mapping[str, Any], chosen: ChosenRows | None, form: As
    ) -> dict[str, Any]:
        for name, column in handles.items():
            self._check_rows(column, name)
        taken: dict[str, Any] = {}
        if chosen is not None and (form is As.VALUE or form is As.LEAVES):
            flat = {
                name: handle for name, handle in handles.items() if not isinstance(handle, dict)
            }
            taken = select_leaf(flat, chosen.index, chosen.pool, _CHOSEN)  # in one copy
        found: dict[str, Any] = {}
        for name, column in handles.items():
            path = self._path_of(name)
            if name in taken:
                found[name] = _in_form(taken[name], None, form, self, path, RowSplitsPool())
            else:
                again = self._reader_of(name)
                found[name] = _in_form(column, chosen, form, self, path, self._pool, again)
        return found

    def _check_rows(self, column: Any, *names: str) -> None:
        """Check that a column, which the caller may have changed, has the rows of the batch."""
        sizes: Any = self.sizes
        packed = isinstance(column, PackedColumn)
        found = [len(column.cu_seqlens) - 1] if packed else sizes_of(column, sizes)
        if found != sizes:
            path = "".join([self._path, *(f"[{name!r}]" for name in names)])
            remedy = "open the batch again after a change of its columns"
            detail = f"expected batch size {sizes}, as when it was opened, found {found}; {remedy}"
            raise ArgumentError("row_mismatch", path, detail)
        if type(column) in TENSORDICT_TYPES:
            for name, leaf in column.items():
                self._check_rows(leaf, *names, name)

    def _reader_of(self, name: str) -> Callable[[], Any] | None:
        """A function that reads a column again from its message; None if the caller owns it."""
        return None

    def _path_of(self, name: str) -> str:
        return f"{self._path}[{name!r}]"


class DocumentColumns(MemoryColumns):
    """The columns of a message, or of a dict in one, that are documents.

    The caller owns what was read and may change it, so each read returns new objects.
    """

    __slots__ = ("_again", "_unread")

    def __init__(
        self,
        columns: Mapping[str, Any],
        sizes: Sequence[int],
        meta: Mapping[str, Any],
        around: ColumnSource | Message,
        again: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
        path: str = "WireBatch",
    ) -> None:
        """`again` reads the columns and `meta` once more."""
        super().__init__(columns, sizes, meta, around, path)
        self._again = again
        self._unread: dict[Any, Any] = {**columns, None: meta}  # no caller has these

    def meta(self) -> dict[str, Any]:
        return dict(self._take([None])[None])

    def read(
        self, handles: Mapping[str, Any], chosen: ChosenRows | None, form: As
    ) -> dict[str, Any]:
        return super().read(self._take(handles), chosen, form)

    def _take(self, names: Iterable[str | None]) -> dict[Any, Any]:
        """Columns by name, and `meta` by None, that no caller has, and no later call returns."""
        unread: dict[Any, Any] = self._unread
        taken = {name: unread.pop(name, _TAKEN) for name in names}
        if any(value is _TAKEN for value in taken.values()):
            columns, meta = self._again()
            # The others are kept: a reader of each column in turn unpacks the documents once.
            unread = {**columns, None: meta}
            taken = {name: unread.pop(name) for name in taken}
            self._unread = unread
        return taken

    def _reader_of(self, name: str) -> Callable[[], Any] | None:
        return lambda: self._again()[0][name]


_TAKEN = object()
"""In the place of a column that a caller has."""

_TYPES_IN_DICTS = (list, np.ndarray, dict, PackedColumn)
"""Types of columns that a dict may have, but not a TensorDict."""


def _in_form(
    column: Any,
    chosen: ChosenRows | None,
    form: As,
    source: ColumnSource,
    path: str,
    pool: RowSplitsPool,
    again: Callable[[], Any] | None = None,
) -> Any:
    """A column in memory in the form asked for; `pool` shares offsets between columns.

    `again` reads the column once more if it is from a message.
    """
    if isinstance(column, dict):
        batch = _nested(column, source.sizes[:1], chosen, source, path, again)
        return batch if form is As.VALUE or form is As.VIEW else batch.to_tensordict()
    as_leaf_or_value = form is As.VALUE or form is As.LEAVES
    # `encode` fetches tensors from devices, together.
    if not as_leaf_or_value and (form is As.VIEW or has_host_cells(column)):
        view = view_in_memory(column, pool, path, detach=form is As.ITEM)
        if view is not None:
            view = replace(view, row_splits=pool.unique(view.row_splits))
            return view if chosen is None else chosen.of_view(view)
    if chosen is not None:
        column = select_leaf(column, chosen.index, chosen.pool, _CHOSEN)
    if form is As.VALUE:
        return value_of(column, source, path)
    if isinstance(column, PackedColumn) or (
        form is As.LEAVES and isinstance(column, _TYPES_IN_DICTS)
    ):
        return _leaf_of(column, source, path)
    return object_array(column) if form is As.VIEW and isinstance(column, list) else column


def _columns_and_meta(batch: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The columns of a batch, and the values next to them if it is a dict."""
    return dict(batch.items()), getattr(batch, "meta_info", {})


def _nested(
    batch: Any,
    sizes: Sequence[int],
    chosen: ChosenRows | None,
    source: ColumnSource,
    path: str,
    again: Callable[[], Any] | None = None,
) -> WireBatch:
    """A batch in a batch in memory; `again` reads it once more if it is from a message."""
    columns, meta = _columns_and_meta(batch)
    inner = MemoryColumns(columns, sizes, meta, source, path)
    if again is not None:
        parts = lambda: _columns_and_meta(again())  # noqa: E731
        inner = DocumentColumns(columns, sizes, meta, source, parts, path)
    return WireBatch(inner, None, chosen)


def _leaf_of(column: Any, source: ColumnSource, path: str) -> Any:
    """A column of a dict as a leaf, on the device of its source."""
    leaf = as_leaf(column, 0, path)
    if isinstance(leaf, torch.Tensor) and source.device is not None:
        return to_device(leaf, source.device)
    return leaf


def value_of(column: Any, source: ColumnSource, path: str) -> Any:
    """A column in memory, or a `RaggedView`, as ``batch[name]`` gives it."""
    if isinstance(column, list):
        return object_array(column)
    if is_non_tensor(column):
        return objects_of_leaf(column)
    if isinstance(column, TENSORDICT_TYPES):
        return _nested(column, [*column.batch_size], None, source, path)
    if isinstance(column, np.ndarray) and not is_numeric(column):
        return column
    in_dict = isinstance(column, (RaggedView, *_TYPES_IN_DICTS))
    return _leaf_of(column, source, path) if in_dict else column


# --- opening -----------------------------------------------------------------------------------


def open_wire(
    source: WireSource | WireBatch | TensorDictBase | dict[str, Any],
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> WireBatch:
    """Open the message of a batch without reading its payload.

    A batch in memory gets the same methods: choose its columns and rows, and ask for row lengths.

    Args:
        source: Frames or a blob, as for `decode`; the path of a file, which is mapped as by
            `load`; a callable ``(offset, size) -> buffer`` over a blob, as RDMA and object stores
            give: it is asked for the preamble, the header, and the ranges that are wanted; or a
            TensorDict, a dict of columns or a `WireBatch`, for which the options are left out.
        copy: As for `decode`, but of each range that is read.
        device: As for `decode`.
        allow_pickle: As for `decode`.
        limits: As for `decode`; a callable is asked for no more than they allow.

    Returns:
        A `WireBatch` over the message, whose value must be a TensorDict of at least one batch
        dim, a `BatchedDataDict`, or a dict with one such TensorDict in it, the rest of which is
        `meta`. The checksum of the header is compared. Those of frames are not: that would read
        them all. A compressed frame is decompressed at its first use, and kept while the batch is
        open. Columns in memory are aliased, and gradients flow through them: to read one that got
        another number of rows since is an error.

    Raises:
        WireFormatError: The source is not such a message, a file goes on after it, or a callable
            returned too few bytes.
        ArgumentTypeError: `source` has another type.
        ArgumentError: There is no such device; the path is that of a directory, a pipe, a socket
            or a device; frames are compressed, and the library for that is not installed; an
            option is given for a batch in memory; or its columns differ in their number of rows,
            or its dims have names.
        OSError: The file cannot be read.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire, to_blob
        >>> columns = {"ids": torch.arange(12).view(3, 4)}
        >>> store = to_blob(encode_fields(columns, lengths=torch.tensor([3, 4, 3])))
        >>> batch = open_wire(lambda offset, size: store[offset : offset + size])
        >>> batch.schema["ids"]
        FieldSchema(kind='jagged', dtype=torch.int64, shape=(3, None))
    """
    where = "open_wire(source)"
    how = usable_reading(
        "open_wire", limits, copy, device, allow_pickle, by_range=True, verify=False
    )
    if type(source) not in _MESSAGE_TYPES and isinstance(source, (str, os.PathLike)):
        name = file_path(source, where, "decode accepts a message in memory")
        with noted_file(name):
            data = read_file(name, where, how.limits, mmap=True)
            return batch_of_message(open_message(data, where, how._replace(file=name)))
    if isinstance(source, (OpenBatch, TensorDictBase, dict)):
        if how.has_options():
            detail = (
                "expected a message, to which the options apply, found a batch in memory; "
                "leave all of them out"
            )
            raise ArgumentError("bad_option", where, detail)
        return open_memory(source, where)
    if callable(source):
        return batch_of_message(open_store(source, how))
    return batch_of_message(open_message(source, where, how))


def open_memory(batch: Any, where: str) -> WireBatch:
    """An open batch as a `WireBatch`."""
    if isinstance(batch, WireBatch):
        return batch
    if isinstance(batch, TensorDictBase):
        check_tensordict(batch, where)
        if any(name is not None for name in batch.names):  # which a message cannot hold either
            detail = f"expected dims without names, found {batch.names}; set td.names = None"
            raise ArgumentError("bad_shape", where, detail)
        sizes = [*batch.batch_size]
    else:
        batch = with_closed(batch) if type(batch) is dict else batch
        sizes = [row_counts(batch, where) or 0]
    return WireBatch(MemoryColumns(dict(batch.items()), sizes, getattr(batch, "meta_info", {})))


def check_tensordict(batch: TensorDictBase, where: str) -> None:
    """Check that a TensorDict has rows, and that all rows have the same columns."""
    if isinstance(batch, LazyStackedTensorDict):
        raise ArgumentTypeError("bad_type", where, LAZY_STACK)
    if not batch.batch_dims:
        detail = "expected batch size (N, ...), found no batch dim; set batch_size = [N]"
        raise ArgumentError("bad_shape", where, detail)


_MESSAGE_TYPES = (list, bytes, bytearray)
"""The types of most messages. Checking these first is faster than checking for a path."""


def open_whole(source: Any, path: str) -> WireBatch:
    """`open_wire` of frames or a blob that is read whole, and so with its checksums verified."""
    how = usable_reading(path, None, None, None, False, by_range=True)
    remedy = "send columns with encode_fields(columns, lengths=...), rows with encode_rows(rows)"
    return batch_of_message(open_message(source, path, how), remedy)


def batch_of_message(message: Message, remedy: str = "use decode") -> WireBatch:
    """The one batch of an open message, and what is next to it; `remedy` is for other messages."""
    root = message.header.schema.root
    found = batch_in(root)
    if found is not None:
        node, beside = found
        sizes = _sizes_of(message, node, [])
        return WireBatch(MessageColumns(message, node, sizes, beside, whole=True))
    state = _state_in_documents(message, root)
    if state is None:
        batches = sum(child.kind is Kind.TENSORDICT for child in root.children)
        other = f"a dict with {batches} of them" if root.kind is Kind.MAP else "another value"
        detail = (
            "expected the message of a TensorDict, of a BatchedDataDict, or of a dict with one "
            f"TensorDict, found one of {other}; {remedy}"
        )
        raise fail("bad_value", detail)
    columns, meta = state
    try:
        rows = row_counts(columns, "$") or 0
    except ArgumentError as error:
        raise fail("bad_rows", error.detail, path=error.path) from error
    again: Any = lambda: _state_in_documents(message, root)  # noqa: E731
    return WireBatch(DocumentColumns(columns, [rows], meta, message, again))


def _state_in_documents(message: Message, root: Node) -> tuple[Any, Any] | None:
    """The columns of a `BatchedDataDict` that need no buffers, and what its `meta` is."""
    state: Any = None
    if root.kind is Kind.VALUE:
        document = message.document(root.value)
        if type(document) is list and document[:2] == [Kind.USER, BATCHED_DATA_DICT]:
            state = revived(document[2:], 0, message.limits.depth, message.allow_pickle)[0]
    elif root.kind is Kind.USER and root.fields[0] == BATCHED_DATA_DICT:
        state = build(message, root.children[0])
    if state is None:
        return None
    if type(state) is not list or [*map(type, state)] != [dict, dict]:
        raise bad("columns and values next to them", type(state).__name__)
    columns, meta = state
    return columns, meta | message_meta(message)


def batch_in(root: Node) -> tuple[Node, list[tuple[str | None, Node]]] | None:
    """The node whose children are the columns of a batch, and the nodes next to it; else None."""
    if root.kind is Kind.TENSORDICT:
        return root, []
    if root.kind is Kind.USER and root.fields[0] == ORDERED_DICT:
        root = root.children[0]
    if root.kind is Kind.MAP:
        pairs = list(zip(root.fields[0], root.children, strict=True))
        found = [pair for pair in pairs if pair[1].kind is Kind.TENSORDICT]
        if len(found) == 1:
            return found[0][1], [pair for pair in pairs if pair is not found[0]]
    if root.kind is Kind.USER and root.fields[0] == BATCHED_DATA_DICT:
        state = root.children[0].children
        if len(state) == 2 and state[0].kind is Kind.MAP:
            return state[0], [(None, state[1])]
    return None


def _sizes_of(message: Message, node: Node, around: Sequence[int]) -> list[int]:
    """(N, ...) of a batch; `around` is the batch size of the one that it is in."""
    if node.kind is not Kind.MAP:
        sizes = message.numbers[node.dims : node.end]
        if not sizes or sizes[: len(around)] != around:
            raise rows_differ(around or ["N"], sizes)
        return sizes
    # A dict has the rows that its first column claims; reading checks each column again.
    claims = (rows_of_node(each, message.numbers, message.header.groups) for each in node.children)
    rows = next((rows for rows in claims if rows is not None), None)
    if rows is None:  # columns that are documents claim no rows in the header
        counts = (_built_rows(message, column) for column in node.children)
        rows = next((count for count in counts if count is not None), None)
    if rows is None:
        return [*around[:1]] or [0]
    # The same bound as for a TensorDict, which claims its rows in the header.
    if rows > max(MAX_UNBACKED_ROWS, sum(message.header.sizes)):
        raise bad(f"{MAX_UNBACKED_ROWS} rows at most, or a payload of as many bytes", rows)
    if around and [rows] != [*around[:1]]:
        raise rows_differ(around, [rows])
    return [rows]


def _built_rows(message: Message, column: Node) -> int | None:
    """Build a column and count its rows; None if any number of rows fits it."""
    try:
        return row_count(build(message, column), "$")
    except ArgumentError as error:
        raise fail("bad_value", error.detail) from error
