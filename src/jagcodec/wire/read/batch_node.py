"""Which node of a message is its batch, and how many rows it has.

`batch_in` finds the node, `sizes_of_node` its batch size. A `BatchedDataDict` without buffers has
no such node: `state_in_documents` reads it. Whether a node in the batch has N rows is asked when it
is read as a column (`node_columns.py`, `built_columns.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jagcodec.columns.held import row_count
from jagcodec.errors import ArgumentError
from jagcodec.wire.checks import bad, fail
from jagcodec.wire.leaf import rows_of_node
from jagcodec.wire.read.decoder import build, message_meta, rows_differ, with_records_resolved
from jagcodec.wire.read.message import Message
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import BATCHED_DATA_DICT, MAX_UNBACKED_ROWS, ORDERED_DICT, Kind


class BatchNode(NamedTuple):
    """The node of a batch in a message, and the nodes next to it."""

    node: Node  # its children are the columns
    # The nodes next to the batch, each with its name. A node without a name is a mapping of names
    # to such values.
    beside: list[tuple[str | None, Node]]


def batch_in(root: Node) -> BatchNode | None:
    """The batch of a message with this root; None if it has none, or several."""
    if root.kind is Kind.TENSORDICT:
        return BatchNode(root, [])
    if root.kind is Kind.USER and root.fields[0] == ORDERED_DICT:
        root = root.children[0]
    if root.kind is Kind.MAP:
        pairs = list(zip(root.fields[0], root.children, strict=True))
        found = [pair for pair in pairs if pair[1].kind is Kind.TENSORDICT]
        if len(found) == 1:
            return BatchNode(found[0][1], [pair for pair in pairs if pair is not found[0]])
    if root.kind is Kind.USER and root.fields[0] == BATCHED_DATA_DICT:
        state = root.children[0].children
        if len(state) == 2 and state[0].kind is Kind.MAP:
            return BatchNode(state[0], [(None, state[1])])
    return None


def sizes_of_node(message: Message, node: Node, around: Sequence[int]) -> list[int]:
    """The batch size (N, ...) of a node; `around` is that of the batch around it, or []."""
    if node.kind is not Kind.MAP:
        sizes = message.numbers[node.dims : node.end]
        if not sizes or sizes[: len(around)] != around:
            raise rows_differ(around or ["N"], sizes)
        return sizes
    # Take the rows that the first column of a dict claims. Reading checks each column again.
    claims = (rows_of_node(each, message.numbers, message.header.groups) for each in node.children)
    rows = next((rows for rows in claims if rows is not None), None)
    if rows is None:  # the header gives no rows for columns that are documents: build them
        counts = (_built_rows(message, column) for column in node.children)
        rows = next((count for count in counts if count is not None), None)
    if rows is None:
        return [*around[:1]] or [0]
    # `check_node` has the same bound for the rows of a TensorDict, which are in the header.
    if rows > max(MAX_UNBACKED_ROWS, sum(message.header.sizes)):
        raise bad(f"{MAX_UNBACKED_ROWS} rows at most, or a payload of as many bytes", rows)
    if around and [rows] != [*around[:1]]:
        raise rows_differ(around, [rows])
    return [rows]


def _built_rows(message: Message, column: Node) -> int | None:
    """Build a column and count its rows; None if a batch of any number of rows may have it."""
    try:
        return row_count(build(message, column), "$")
    except ArgumentError as error:
        raise fail("bad_value", error.detail) from error


def state_in_documents(message: Message, root: Node) -> tuple[Any, Any] | None:
    """The columns and the `meta` of a `BatchedDataDict` without buffers; None for other values."""
    state: Any = None
    if root.kind is Kind.VALUE:
        document = message.document(root.value)
        if type(document) is list and document[:2] == [Kind.USER, BATCHED_DATA_DICT]:
            state = with_records_resolved(
                document[2:], 0, message.limits.depth, message.allow_pickle
            )[0]
    elif root.kind is Kind.USER and root.fields[0] == BATCHED_DATA_DICT:
        state = build(message, root.children[0])
    if state is None:
        return None
    if type(state) is not list or [*map(type, state)] != [dict, dict]:
        raise bad("columns and values next to them", type(state).__name__)
    columns, meta = state
    return columns, meta | message_meta(message)
