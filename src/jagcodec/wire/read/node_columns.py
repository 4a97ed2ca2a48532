"""The columns of one message, each a node of it, and which node of a message is its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from jagcodec._dependencies import half
from jagcodec.columns.batch import (
    AS_IT_IS,
    VALUES,
    As,
    Batch,
    CellRows,
    Column,
    FieldSchema,
    InPlace,
    OneObject,
    Read,
    Source,
    Stored,
    all_stored,
    chosen_in,
    closed_batch,
    columns_in,
    leaves_of,
    sent_inside,
)
from jagcodec.columns.column import (
    DictBatch,
    HeldColumn,
    column_of,
    row_count,
    row_counts,
)
from jagcodec.columns.join import chosen_leaf
from jagcodec.columns.memory import (
    BuiltSource,
    DocumentSource,
    MemoryColumn,
    chosen_in_place,
    leaf_in_memory,
    user_value_in_memory,
)
from jagcodec.columns.outside_errors import pass_on
from jagcodec.errors import ArgumentError, JagcodecError, WireFormatError, brief
from jagcodec.memory.arrays import ByteArray, IntArray, object_array, torch_name
from jagcodec.memory.extents import check_extent
from jagcodec.rows.chosen_rows import CHOSEN, ChosenRows
from jagcodec.rows.column_arrays import arrays_of_view
from jagcodec.rows.copy_bytes import array_of_view, bytes_of_cells
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, end_to_end
from jagcodec.wire.checks import bad, fail, inside
from jagcodec.wire.compress import prepare
from jagcodec.wire.files import note_file
from jagcodec.wire.frames import Frame
from jagcodec.wire.leaf import (
    cells_of,
    columns_of_dict,
    field_of,
    parts_of_packed,
)
from jagcodec.wire.many.stacked import MessageInMemory
from jagcodec.wire.read.batch_node import batch_in, sizes_of_node
from jagcodec.wire.read.decoder import (
    arrays,
    build,
    build_children,
    message_meta,
    objects,
    objects_in,
    revived,
    rows_differ,
)
from jagcodec.wire.read.message import Budget, Message
from jagcodec.wire.read.slicing import Slicer, slicer_of
from jagcodec.wire.schema import GROUP, STORED, Node
from jagcodec.wire.spec import (
    BATCHED_DATA_DICT,
    IN_STACK,
    PLAIN,
    Kind,
)
from jagcodec.wire.write.items import item_of_view

if TYPE_CHECKING:
    import torch

_JAGGED, _TENSOR = Kind.JAGGED, Kind.TENSOR


class MessageSource(Source):
    """One message, or a batch in it."""

    __slots__ = ("_slicer", "beside", "message", "node", "rows", "whole")

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
        self.sizes: Sequence[int] = sizes
        # N; None if the batch has more dims.
        self.rows: int | None = sizes[0] if len(sizes) == 1 else None
        self.device: torch.device | None = message.device
        self.allow_pickle: bool = message.allow_pickle
        self.message: Message = message
        self.node: Node = node  # its children are the columns
        # Nodes next to the batch, each with its name. A node without a name is a mapping of names
        # to such values.
        self.beside: Sequence[tuple[str | None, Node]] = beside
        self.whole: bool = whole  # whether the batch is all of the message
        self._slicer: tuple[Mapping[str, Column], Slicer | None] | None = None

    def columns(self) -> Mapping[str, Column]:
        pairs = zip(self.names, self.node.children, strict=True)
        if self.node.kind is Kind.MAP:
            return {name: _class_in_dict(node)(self, name, node) for name, node in pairs}
        kinds = _CLASSES
        return {name: kinds.get(node.kind, _OtherColumn)(self, name, node) for name, node in pairs}

    def prepare(self, how: Read) -> None:
        if not self.message.header.compressed:
            return
        columns = [x for x in how.columns.values() if isinstance(x, NodeColumn)]
        nodes = [node for x in columns if x.source is self for node in cells_of(x.node)]
        wanted = {self.message.numbers[node.number] for node in nodes}
        existing = range(len(self.message.buffers))  # an empty column needs no buffer
        prepare(self.message.buffers[i] for i in wanted if i in existing)

    def in_memory(self) -> MessageInMemory | None:
        """The message as `MessageInMemory`; None if a join cannot read its rows in place."""
        buffers, header = self.message.buffers, self.message.header
        if not self.message.in_memory or len(self.sizes) > 1 or self.device is not None:
            return None
        values = id(self) if self.beside else header.value_bytes
        first, levels = header.schema.first_group, self.message.limits.depth
        return MessageInMemory(self.node, first, header.number_bytes, values, buffers, levels)

    def meta(self) -> dict[str, Any]:
        message, meta = self.message, dict[str, Any]()
        budget = Budget(message) if self.beside else None
        for name, node in self.beside:
            value = build(message, node, budget)
            if name is None and type(value) is not dict:
                raise bad("a mapping next to the columns", type(value).__name__)
            meta |= value if name is None else {name: value}
        return meta | message_meta(message)

    def frames(self, batch: Batch) -> list[Frame] | None:
        found, chosen, columns = self.message.frames, chosen_in(batch), columns_in(batch)
        if chosen is None and self.whole and found and [*columns] == self.names:
            return [array.data.toreadonly() for array in found]
        index = range(self.sizes[0]) if chosen is None else chosen.index
        if not isinstance(index, range) or not index:
            return None
        # Keep the slicer: callers often cut many parts from one message.
        known = self._slicer
        if known is None or known[0] is not columns:
            known = self._slicer = columns, self._slicer_of(columns)
        return None if known[1] is None else known[1].cut(index.start, index.stop)

    def _slicer_of(self, columns: Mapping[str, Column]) -> Slicer | None:
        nodes = {x.name: x.node for x in columns.values() if isinstance(x, NodeColumn)}
        if len(nodes) == len(columns) and not self.beside and self.in_memory() is not None:
            with suppress(WireFormatError):  # the reader of the column gets the error
                return slicer_of(self.message, nodes, self.sizes[0])
        return None


def _budget(how: Read, message: Message) -> Budget:
    """The `Budget` of a message, which all columns of one read share."""
    found: Budget | None = how.known.get(message)
    if found is None:
        found = how.known[message] = Budget(message)
    return found


class NodeColumn(Column):
    """A column of a message: a node of it."""

    __slots__ = ("name", "node", "source")

    def __init__(self, source: MessageSource, name: str, node: Node) -> None:
        self.source: MessageSource = source
        self.name: str = name
        self.node: Node = node

    def field(self, rows: int) -> FieldSchema:
        return field_of(self.node, self.source.message.numbers, rows)

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        return None

    def user_value(self, value: Any, how: Read) -> Any:
        return value

    def stored(self) -> Stored:
        message, cells = self.source.message, cells_of(self.node)
        for node in cells:
            if message.numbers[node.number + STORED] != PLAIN:
                break
        else:  # most columns
            return AS_IT_IS
        narrow = [node.kind in (_TENSOR, _JAGGED) and message.is_narrow(node) for node in cells]
        return Stored([(self.name,)] * any(narrow), any(map(message.is_elided, cells)))

    def fault(self, error: Exception) -> Exception:
        if isinstance(error, WireFormatError):
            named = inside(error, self.name)
            if self.source.message.reading.file is not None:
                note_file(named, self.source.message.reading.file)
            return named
        if isinstance(error, ArgumentError):  # the caller's choice of rows is wrong
            path = f"{error.path}, column {self.name!r}"
            return type(error)(error.reason, path, error.detail)
        if isinstance(error, (JagcodecError, OSError, MemoryError)):  # the message is not at fault
            return error
        pass_on(error)  # torch, numpy and tensordict raise all kinds
        return inside(bad(f"rows of {self.node.kind.name}", error), self.name)

    def _check_rows(self, *found: int) -> None:
        """Refuse a column whose first dims are not the batch size."""
        sizes = self.source.sizes
        if [*found[: len(sizes)]] != sizes:
            raise rows_differ(sizes, [*found])

    def _in_place(self, view: RaggedView, make: Callable[[Any], Any]) -> InPlace:
        """A column that `make` makes of its rows once they are copied."""
        if 0 in view.shape:  # a choice may repeat rows without bytes until their dims are too large
            check_extent(view.values_shape, view.dtype.itemsize, CHOSEN)
        return InPlace(view, make)


class _JaggedColumn(NodeColumn):
    """A JAGGED."""

    __slots__ = ()

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        self._check()
        message = self.source.message
        splits = message.row_splits(message.numbers[self.node.number + GROUP])
        return (splits if chosen is None else chosen.among(splits)[0]).lengths

    def read(self, how: Read) -> Any:
        self._check()
        message, node, chosen = self.source.message, self.node, how.chosen
        if chosen is None and how.form is As.VALUE:
            return how.half.jagged_of_node(message, node)
        view = message.view(node, chosen)
        if how.form is As.HOST or (how.form is As.VIEW and message.away is None):
            return view
        values = how.half.owned_cells(message, view, leaves=message.away is not None)
        if values is not None:
            return self._made(values, view, how)
        of_cells = how.half.of_cells
        return self._in_place(view, lambda cells: self._made(of_cells(cells, view), view, how))

    def to_send(self, how: Read) -> Any:
        self._check()
        view = self.source.message.view(self.node, how.chosen)
        return item_of_view(view, self.node.fields[0])

    def leaf(self, value: Any, how: Read) -> Any:
        return value

    def _check(self) -> None:
        node, source = self.node, self.source
        numbers = source.message.numbers
        rows = source.message.header.groups[numbers[node.number + GROUP]].rows
        if rows != source.rows:
            _, _, dim = node.fields
            # Batches of several dims have columns that are ragged in a later one.
            self._check_rows(rows, *numbers[node.dims : node.dims + dim - 1])

    def _made(self, values: Any, view: RaggedView, how: Read) -> Any:
        """The jagged column of `values`, which are end to end."""
        if self.source.device is not None:
            values = how.half.to_device(values, self.source.device)
        if how.form is As.VIEW:
            return end_to_end(values, view.row_splits, view.ragged_dim)
        return how.half.jagged_of_values(values, view.row_splits, view.ragged_dim)


class _RectangleColumn(NodeColumn):
    """A TENSOR, each of whose rows is one cell."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        self._check()
        message, chosen = self.source.message, how.chosen
        if how.form is As.HOST:
            return CellRows(message.view(self.node, chosen))
        if chosen is None:
            return how.half.tensor_of_node(message, self.node)
        view = message.view(self.node, chosen)
        values = how.half.owned_cells(message, view, leaves=message.away is not None)
        if values is not None:
            return self._made(values, how)
        of_cells = how.half.of_cells
        return self._in_place(view, lambda cells: self._made(of_cells(cells, view), how))

    def to_send(self, how: Read) -> Any:
        self._check()
        view = self.source.message.view(self.node, how.chosen)
        return item_of_view(view, self.node.fields[0], ragged=False)

    def leaf(self, value: Any, how: Read) -> Any:
        return value

    def _check(self) -> None:
        node, sizes = self.node, self.source.sizes
        found = self.source.message.numbers[node.dims : node.end]
        if found[: len(sizes)] != sizes:
            raise rows_differ(sizes, found)

    def _made(self, values: Any, how: Read) -> Any:
        device = self.source.device
        return values if device is None else how.half.to_device(values, device)


class _DocumentColumn(NodeColumn):
    """A NON_TENSOR_ROWS: objects, each a document or a message of its own."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        self._check()
        message, node, chosen = self.source.message, self.node, how.chosen
        budget, view = _budget(how, message), message.view(node, chosen)
        if view.is_end_to_end or message.numbers[node.number + STORED] != PLAIN:
            return object_array(objects_in(message, node, budget, chosen, view))

        def made(cells: ByteArray) -> Any:
            return object_array(objects_in(message, node, budget, chosen, view, cells))

        return self._in_place(view, made)

    def to_send(self, how: Read) -> Any:
        """The documents in place; if rows are messages, or indirect, the objects in them."""
        self._check()
        message, node, chosen = self.source.message, self.node, how.chosen
        if message.numbers[node.number + STORED] == PLAIN:
            view = message.view(node, chosen)
            if view.row_splits.rows:
                return item_of_view(view, None)
        return objects(message, node, _budget(how, message), chosen)

    def leaf(self, value: Any, how: Read) -> Any:
        return half(*VALUES).leaf_of_objects(list(value), whole=how.chosen is None)

    def _check(self) -> None:
        message = self.source.message
        self._check_rows(message.header.groups[message.numbers[self.node.number + GROUP]].rows)


class _ArraysColumn(NodeColumn):
    """An ARRAY_ROWS: objects that are all arrays, or all tensors."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        return object_array(self.to_send(how))

    def to_send(self, how: Read) -> Any:
        self._check_rows(self.source.message.numbers[self.node.children[1].dims])
        if self.node.fields[0] != IN_STACK and self.source.node.kind is not Kind.MAP:
            raise bad("a leaf of a TensorDict", "rows of another column")
        return arrays(self.source.message, self.node, how.chosen)

    def leaf(self, value: Any, how: Read) -> Any:
        whole = how.chosen is None and self.node.fields[0] == IN_STACK
        return half(*VALUES).leaf_of_objects(list(value), whole=whole)


class _BatchColumn(NodeColumn):
    """A nested batch: a TENSORDICT, or a dict in a dict."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        message, inner = self.source.message, self._inner()
        sizes = sizes_of_node(message, inner, self.source.sizes)
        return how.batch_type(MessageSource(message, inner, sizes), None, how.chosen)

    def to_send(self, how: Read) -> Any:
        return sent_inside(self.read(how), how)

    def leaf(self, value: Any, how: Read) -> Any:
        return closed_batch(value, leaves_of(value, how))

    def stored(self) -> Stored:
        inner = MessageSource(self.source.message, self._inner(), []).columns()
        found = all_stored([column.stored() for column in inner.values()])
        return found._replace(narrow=[(self.name, *path) for path in found.narrow])

    def _inner(self) -> Node:
        """The node whose children are the columns."""
        return columns_of_dict(self.node) or self.node


class _OtherColumn(NodeColumn):
    """A column of any other kind, which is read whole."""

    __slots__ = ()

    @property
    def is_of_user(self) -> bool:  # type: ignore[override]
        return self.node.kind is Kind.USER

    def field(self, rows: int) -> FieldSchema:
        message, node = self.source.message, self.node
        if node.kind is Kind.VALUE:  # a column of a dict, without buffers
            is_batch = type(message.document(node.value)) is dict
            return FieldSchema("tensordict" if is_batch else "object", None, None)
        return field_of(node, message.numbers, rows)

    def read(self, how: Read) -> Any:
        column = self._built(how)
        return column.read(how) if isinstance(column, MemoryColumn) else column

    def to_send(self, how: Read) -> Any:
        column = self._built(how)
        return column.to_send(how) if isinstance(column, MemoryColumn) else column

    def leaf(self, value: Any, how: Read) -> Any:
        if isinstance(value, Batch):
            return closed_batch(value, leaves_of(value, how))
        return leaf_in_memory(value, self.source, "$")

    def user_value(self, value: Any, how: Read) -> Any:
        return user_value_in_memory(value, self.source, "$", how)

    def _built(self, how: Read) -> Any:
        """The column as a `MemoryColumn` if only a dict can hold it; else its chosen rows."""
        message = self.source.message
        column = build(message, self.node, _budget(how, message))
        in_dict = self.source.node.kind is Kind.MAP and column_of(column).is_in_dict
        return self._in_memory(column) if in_dict else self._chosen_leaf(column, how)

    def _in_memory(self, column: Any) -> MemoryColumn:
        """The column, which was built and is one that a dict holds."""
        source, message, node = self.source, self.source.message, self.node
        rows = row_count(column, "$")
        if rows is not None and [rows] != source.sizes:
            raise rows_differ(source.sizes, [rows])
        _check_packed(column, RowSplitsPool())
        again = lambda: build(message, node)  # noqa: E731
        return MemoryColumn(BuiltSource(source.sizes, source, again), None, column)

    def _chosen_leaf(self, column: Any, how: Read) -> Any:
        """The chosen rows of a column that a TensorDict can hold; an error for any other."""
        sizes: Any = self.source.sizes
        holder = column_of(column)
        if type(holder) is HeldColumn or holder.is_in_dict:
            name = type(column).__name__
            detail = f"expected a leaf of a TensorDict, found {name}; decode reads such a column"
            raise fail("bad_value", detail)
        found = holder.sizes(sizes)
        if found != sizes:
            raise rows_differ(sizes, found)
        if how.chosen is None or holder.row_count("$") is None:
            return column
        return chosen_leaf(column, how.chosen.index, RowSplitsPool(), CHOSEN)


class _PayloadColumn(_OtherColumn):
    """A NON_TENSOR_DATA: an object of the whole batch, or an array with one item per row."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        is_host = how.form is As.HOST or not how.half.HAS_LEAVES
        return self._one(how) if is_host else super().read(how)

    def to_send(self, how: Read) -> Any:
        return self._one(how)

    def user_value(self, value: Any, how: Read) -> Any:
        if isinstance(value, OneObject):
            return column_of(value).object_array()
        return super().user_value(value, how)

    def _one(self, how: Read) -> OneObject:
        message, chosen = self.source.message, how.chosen
        rows, *inner = message.shape(self.node)
        self._check_rows(rows, *inner)
        (payload,) = build_children(message, self.node, _budget(how, message))
        one = OneObject(payload, rows, tuple(inner))
        return one if chosen is None else chosen_in_place(one, chosen)


class _VarlenColumn(_OtherColumn):
    """A `PackedColumn`."""

    __slots__ = ()

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        return self._view(chosen).row_splits.lengths

    def read(self, how: Read) -> Any:
        if how.form is As.HOST:
            return self._view(how.chosen)
        if how.half.HAS_LEAVES:
            return super().read(how)
        return arrays_of_view(self._view(how.chosen))

    def to_send(self, how: Read) -> Any:
        view = self._view(how.chosen)
        return item_of_view(view, torch_name(view.dtype))

    def _view(self, chosen: ChosenRows | None) -> RaggedView:
        """A view of the chosen rows. Unlike `view_of_varlen`, it needs no torch."""
        message, parts = self.source.message, parts_of_packed(self.node) or []
        values, _, offsets = parts
        found = array_of_view(message.view(offsets)).astype(np.int64)
        splits = RowSplits.from_offsets(found)
        if splits is None:
            detail = f"expected cu_seqlens that never fall, found {brief(found.tolist())}"
            raise fail("bad_shape", detail)
        self._check_rows(splits.rows)
        whole = message.view(values)
        fits = [dim for dim in (0, 1) if whole.values_shape[dim : dim + 1] == (splits.total,)]
        if len(fits) != 1:
            detail = f"expected values with one dim of {splits.total} tokens by cu_seqlens, found "
            raise fail("bad_shape", f"{detail}shape {whole.values_shape}")
        data, dim = bytes_of_cells(whole), 1 + fits[0]
        view = RaggedView(data, whole.dtype, whole.values_shape, dim, None, splits)
        return view if chosen is None else chosen.of_view(view)


_CLASSES: dict[Kind, type[NodeColumn]] = {
    Kind.JAGGED: _JaggedColumn,
    Kind.TENSOR: _RectangleColumn,
    Kind.NON_TENSOR_ROWS: _DocumentColumn,
    Kind.ARRAY_ROWS: _ArraysColumn,
    Kind.TENSORDICT: _BatchColumn,
    Kind.NON_TENSOR_DATA: _PayloadColumn,
}
"""The class of a column by its kind; for other kinds it is `_OtherColumn`, or that of a dict."""


def _class_in_dict(node: Node) -> type[NodeColumn]:
    """The class of a column of a dict, where a dict is a batch."""
    if columns_of_dict(node) is not None:
        return _BatchColumn
    known = _OtherColumn if parts_of_packed(node) is None else _VarlenColumn
    return _CLASSES.get(node.kind, known)


def _check_packed(column: Any, pool: RowSplitsPool) -> None:
    """Refuse a packed column, or one in a dict, whose offsets do not fit its values."""
    holder = column_of(column)
    if isinstance(holder, DictBatch):
        for name, inner in column.items():
            try:
                _check_packed(inner, pool)
            except WireFormatError as error:
                raise inside(error, name) from error
    elif holder.is_packed:
        try:
            holder.view("$", pool, detach=False)
        except ArgumentError as error:
            raise fail(error.reason, error.detail) from error


# --- the batch of a message --------------------------------------------------------------------


def source_of_message(message: Message, remedy: str = "use decode") -> Source:
    """A source of the one batch of an open message; the error for other messages has `remedy`."""
    root = message.header.schema.root
    found = batch_in(root)
    if found is not None:
        node, beside = found
        return MessageSource(message, node, sizes_of_node(message, node, []), beside, whole=True)
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
    return DocumentSource(columns, [rows], meta, message, again)


def _state_in_documents(message: Message, root: Node) -> tuple[Any, Any] | None:
    """The columns and the `meta` of a `BatchedDataDict` without buffers; None for other values."""
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
