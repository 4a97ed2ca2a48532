"""Columns of one message whose rows can be read in place, each a node of it.

`NodeColumn` is the base of all columns of a message. Each class after it is named after the rows of
one kind of node. `wire/read/built_columns.py` has the columns that must be built first, and
`wire/read/message_source.py` chooses the class of each node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jagcodec._dependencies import with_or_without_torch
from jagcodec.columns.batch import (
    PLAIN_STORAGE,
    VALUES,
    As,
    CellRows,
    Column,
    FieldSchema,
    InPlace,
    Read,
    Source,
    Storage,
)
from jagcodec.columns.outside_errors import pass_on
from jagcodec.errors import ArgumentError, JagcodecError, WireFormatError
from jagcodec.memory.arrays import ByteArray, IntArray, object_array
from jagcodec.memory.extents import check_extent
from jagcodec.rows.chosen_rows import CHOSEN, ChosenRows
from jagcodec.rows.views import RaggedView, end_to_end
from jagcodec.wire.checks import bad, inside
from jagcodec.wire.files import note_file
from jagcodec.wire.items import item_of_view
from jagcodec.wire.leaf import cells_of, field_of
from jagcodec.wire.read.decoder import read_arrays, read_objects, read_objects_of_view, rows_differ
from jagcodec.wire.read.message import Budget, Message
from jagcodec.wire.schema import GROUP, STORAGE_CODE, Node
from jagcodec.wire.spec import IN_STACK, PLAIN, Kind

_JAGGED, _TENSOR = Kind.JAGGED, Kind.TENSOR


class NodeSource(Source):
    """A batch in a message: a node of it, whose children are the columns."""

    __slots__ = ("message", "node", "rows")
    message: Message
    node: Node
    rows: int | None  # N; None if the batch has more dims


def budget_of_read(how: Read, message: Message) -> Budget:
    """The `Budget` of a message, which all columns of one read share."""
    budget: Budget | None = how.known.get(message)
    if budget is None:
        budget = how.known[message] = Budget(message)
    return budget


class NodeColumn(Column):
    """A column of a message: a node of it, of any kind."""

    __slots__ = ("name", "node", "source")

    def __init__(self, source: NodeSource, name: str, node: Node) -> None:
        self.source: NodeSource = source
        self.name: str = name
        self.node: Node = node

    def field(self, rows: int) -> FieldSchema:
        return field_of(self.node, self.source.message.numbers, rows)

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        return None

    def leaf(self, value: Any, how: Read) -> Any:
        return value

    def storage(self) -> Storage:
        message, cells = self.source.message, cells_of(self.node)
        for node in cells:
            if message.numbers[node.number + STORAGE_CODE] != PLAIN:
                break
        else:  # most columns
            return PLAIN_STORAGE
        narrow = [node.kind in (_TENSOR, _JAGGED) and message.is_narrow(node) for node in cells]
        return Storage([(self.name,)] * any(narrow), any(map(message.is_elided, cells)))

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

    def _check_rows(self, *dims: int) -> None:
        """Refuse a column whose first dims are not the batch size."""
        sizes = self.source.sizes
        if [*dims[: len(sizes)]] != sizes:
            raise rows_differ(sizes, [*dims])

    def _in_place(self, view: RaggedView, make: Callable[[Any], Any]) -> InPlace:
        """The rows of `view`, of which `make` makes the column once they are copied."""
        if 0 in view.shape:  # a choice may repeat rows without bytes until their dims are too large
            check_extent(view.values_shape, view.dtype.itemsize, CHOSEN)
        return InPlace(view, make)


class JaggedColumn(NodeColumn):
    """A column of rows that differ in length: a JAGGED."""

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
            return how.value_module.jagged_of_node(message, node)
        view = message.view(node, chosen)
        if how.form is As.HOST or (how.form is As.VIEW and message.away is None):
            return view
        values = how.value_module.owned_cells(
            message, view, goes_to_device=message.away is not None
        )
        if values is not None:
            return self._column_of(values, view, how)
        values_from_cells = how.value_module.values_from_cells
        return self._in_place(
            view, lambda cells: self._column_of(values_from_cells(cells, view), view, how)
        )

    def to_send(self, how: Read) -> Any:
        self._check()
        view = self.source.message.view(self.node, how.chosen)
        return item_of_view(view, self.node.fields[0])

    def _check(self) -> None:
        node, source = self.node, self.source
        numbers = source.message.numbers
        rows = source.message.header.groups[numbers[node.number + GROUP]].rows
        if rows != source.rows:
            _, _, dim = node.fields
            # Batches of several dims have columns that are ragged in a later one.
            self._check_rows(rows, *numbers[node.dims : node.dims + dim - 1])

    def _column_of(self, values: Any, view: RaggedView, how: Read) -> Any:
        """The jagged column of `values`, which are end to end."""
        if self.source.device is not None:
            values = how.value_module.to_device(values, self.source.device)
        if how.form is As.VIEW:
            return end_to_end(values, view.row_splits, view.ragged_dim)
        return how.value_module.jagged_of_values(values, view.row_splits, view.ragged_dim)


class RectangleColumn(NodeColumn):
    """A column whose rows are one cell each: a TENSOR."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        self._check()
        message, chosen = self.source.message, how.chosen
        if how.form is As.HOST:
            return CellRows(message.view(self.node, chosen))
        if chosen is None:
            return how.value_module.tensor_of_node(message, self.node)
        view = message.view(self.node, chosen)
        values = how.value_module.owned_cells(
            message, view, goes_to_device=message.away is not None
        )
        if values is not None:
            return self._column_of(values, how)
        values_from_cells = how.value_module.values_from_cells
        return self._in_place(
            view, lambda cells: self._column_of(values_from_cells(cells, view), how)
        )

    def to_send(self, how: Read) -> Any:
        self._check()
        view = self.source.message.view(self.node, how.chosen)
        return item_of_view(view, self.node.fields[0], ragged=False)

    def _check(self) -> None:
        node, sizes = self.node, self.source.sizes
        dims = self.source.message.numbers[node.dims : node.end]
        if dims[: len(sizes)] != sizes:
            raise rows_differ(sizes, dims)

    def _column_of(self, values: Any, how: Read) -> Any:
        """The column of `values`, which are end to end."""
        device = self.source.device
        return values if device is None else how.value_module.to_device(values, device)


class DocumentColumn(NodeColumn):
    """A column of objects, each a document or a message: a NON_TENSOR_ROWS."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        self._check()
        message, node, chosen = self.source.message, self.node, how.chosen
        budget, view = budget_of_read(how, message), message.view(node, chosen)
        if view.is_end_to_end or message.numbers[node.number + STORAGE_CODE] != PLAIN:
            return object_array(read_objects_of_view(message, node, budget, chosen, view))

        def make(cells: ByteArray) -> Any:
            return object_array(read_objects_of_view(message, node, budget, chosen, view, cells))

        return self._in_place(view, make)

    def to_send(self, how: Read) -> Any:
        """The documents in place; if rows are messages, or elided, the objects in them."""
        self._check()
        message, node, chosen = self.source.message, self.node, how.chosen
        if message.numbers[node.number + STORAGE_CODE] == PLAIN:
            view = message.view(node, chosen)
            if view.row_splits.rows:
                return item_of_view(view, None)
        return read_objects(message, node, budget_of_read(how, message), chosen)

    def leaf(self, value: Any, how: Read) -> Any:
        return with_or_without_torch(*VALUES).leaf_of_objects(list(value), whole=how.chosen is None)

    def _check(self) -> None:
        message = self.source.message
        self._check_rows(message.header.groups[message.numbers[self.node.number + GROUP]].rows)


class ArraysColumn(NodeColumn):
    """A column of objects that are all arrays, or all tensors: an ARRAY_ROWS."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        return object_array(self.to_send(how))

    def to_send(self, how: Read) -> Any:
        self._check_rows(self.source.message.numbers[self.node.children[1].dims])
        if self.node.fields[0] != IN_STACK and self.source.node.kind is not Kind.MAP:
            raise bad("a leaf of a TensorDict", "rows of another column")
        return read_arrays(self.source.message, self.node, how.chosen)

    def leaf(self, value: Any, how: Read) -> Any:
        whole = how.chosen is None and self.node.fields[0] == IN_STACK
        return with_or_without_torch(*VALUES).leaf_of_objects(list(value), whole=whole)
