"""`source_of_message`: the batch of a message, as the source of its columns.

`source_of_message`, at the end, finds the batch of a whole message. `MessageSource` has the columns
of one node, and `_CLASSES` their classes; joins read it as a `MessageInMemory`. A `_BatchColumn` is
a batch inside a batch, which has a `MessageSource`, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from jagcodec.columns.batch import (
    Batch,
    Column,
    Read,
    Source,
    Storage,
    chosen_in,
    closed_batch,
    columns_in,
    combined_storage,
    leaves_of,
    to_send_inside,
)
from jagcodec.columns.held import common_row_count
from jagcodec.columns.memory import DocumentSource
from jagcodec.errors import ArgumentError, WireFormatError
from jagcodec.memory.arrays import ByteArray
from jagcodec.wire.checks import bad, fail
from jagcodec.wire.compress import decompress_ahead
from jagcodec.wire.frames import Frame
from jagcodec.wire.leaf import cells_of, columns_of_dict, parts_of_packed
from jagcodec.wire.read.batch_node import batch_in, sizes_of_node, state_in_documents
from jagcodec.wire.read.built_columns import BuiltColumn, PayloadColumn, VarlenColumn
from jagcodec.wire.read.decoder import build, message_meta
from jagcodec.wire.read.message import Budget, Message
from jagcodec.wire.read.node_columns import (
    ArraysColumn,
    DocumentColumn,
    JaggedColumn,
    NodeColumn,
    NodeSource,
    RectangleColumn,
)
from jagcodec.wire.read.slicing import Slicer, slicer_of
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import Kind

if TYPE_CHECKING:
    import torch


class MessageInMemory(NamedTuple):
    """A sound message with its frames in memory."""

    node: Node  # the batch; its last field names the columns, which are its children
    first_group: int  # the index of the first number of a ragged group
    numbers: bytes  # the numbers of its header
    # The bytes of the documents in its header. If two messages have one node and equal `values`,
    # they have equal `meta`.
    values: Any
    buffers: Sequence[ByteArray]  # the frames after the header
    levels: int  # the limit of depth with which it was opened


class MessageSource(NodeSource):
    """The batch of one message, or a batch inside that batch."""

    __slots__ = ("_slicer", "beside", "whole")

    def __init__(
        self,
        message: Message,
        node: Node,
        sizes: list[int],
        beside: Sequence[tuple[str | None, Node]] = (),
        *,
        whole: bool = False,
    ) -> None:
        """`beside` has the nodes next to the batch, as `BatchNode` describes them."""
        self.names: Sequence[str] = node.fields[-1]
        self.sizes: Sequence[int] = sizes
        self.rows: int | None = sizes[0] if len(sizes) == 1 else None
        self.device: torch.device | None = message.device
        self.allow_pickle: bool = message.allow_pickle
        self.message: Message = message
        self.node: Node = node
        self.beside: Sequence[tuple[str | None, Node]] = beside
        self.whole: bool = whole  # whether the batch is all of the message
        self._slicer: tuple[Mapping[str, Column], Slicer | None] | None = None

    def columns(self) -> Mapping[str, Column]:
        pairs = zip(self.names, self.node.children, strict=True)
        if self.node.kind is Kind.MAP:
            return {name: _class_in_dict(node)(self, name, node) for name, node in pairs}
        kinds = _CLASSES
        return {name: kinds.get(node.kind, BuiltColumn)(self, name, node) for name, node in pairs}

    def decompress_ahead(self, how: Read) -> None:
        if not self.message.header.compressed:
            return
        columns = [x for x in how.columns.values() if isinstance(x, NodeColumn)]
        nodes = [node for x in columns if x.source is self for node in cells_of(x.node)]
        wanted = {self.message.numbers[node.number] for node in nodes}
        existing = range(len(self.message.buffers))  # an empty column needs no buffer
        decompress_ahead(self.message.buffers[i] for i in wanted if i in existing)

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
        _, slicer = known
        return None if slicer is None else slicer.cut(index.start, index.stop)

    def _slicer_of(self, columns: Mapping[str, Column]) -> Slicer | None:
        nodes = {x.name: x.node for x in columns.values() if isinstance(x, NodeColumn)}
        if len(nodes) == len(columns) and not self.beside and self.in_memory() is not None:
            with suppress(WireFormatError):  # the reader of the column gets the error
                return slicer_of(self.message, nodes, self.sizes[0])
        return None


class _BatchColumn(NodeColumn):
    """A nested batch: a TENSORDICT, or a dict in a dict."""

    __slots__ = ()

    def read(self, how: Read) -> Any:
        message, inner = self.source.message, self._inner()
        sizes = sizes_of_node(message, inner, self.source.sizes)
        return how.batch_type(MessageSource(message, inner, sizes), None, how.chosen)

    def to_send(self, how: Read) -> Any:
        return to_send_inside(self.read(how), how)

    def leaf(self, value: Any, how: Read) -> Any:
        return closed_batch(value, leaves_of(value, how))

    def storage(self) -> Storage:
        inner = MessageSource(self.source.message, self._inner(), []).columns()
        found = combined_storage([column.storage() for column in inner.values()])
        return found._replace(narrow=[(self.name, *path) for path in found.narrow])

    def _inner(self) -> Node:
        """The node whose children are the columns."""
        return columns_of_dict(self.node) or self.node


_CLASSES: dict[Kind, type[NodeColumn]] = {
    Kind.JAGGED: JaggedColumn,
    Kind.TENSOR: RectangleColumn,
    Kind.NON_TENSOR_ROWS: DocumentColumn,
    Kind.ARRAY_ROWS: ArraysColumn,
    Kind.TENSORDICT: _BatchColumn,
    Kind.NON_TENSOR_DATA: PayloadColumn,
}
"""The class of a column by the kind of its node; `BuiltColumn` has the other kinds."""


def _class_in_dict(node: Node) -> type[NodeColumn]:
    """The class of a column of a dict, where a dict is a batch."""
    if columns_of_dict(node) is not None:
        return _BatchColumn
    known = BuiltColumn if parts_of_packed(node) is None else VarlenColumn
    return _CLASSES.get(node.kind, known)


def source_of_message(message: Message, remedy: str = "use decode") -> Source:
    """The source of the one batch of an open message; errors for other messages have `remedy`."""
    root = message.header.schema.root
    found = batch_in(root)
    if found is not None:
        sizes = sizes_of_node(message, found.node, [])
        return MessageSource(message, found.node, sizes, found.beside, whole=True)
    state = state_in_documents(message, root)
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
        rows = common_row_count(columns, "$") or 0
    except ArgumentError as error:
        raise fail("bad_rows", error.detail, path=error.path) from error
    read_again: Any = lambda: state_in_documents(message, root)  # noqa: E731
    return DocumentSource(columns, [rows], meta, message, read_again)
