"""The schema of a batch: kind, dtype and shape of each column, from the header."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jagcodec.wire.dtypes import torch_dtype
from jagcodec.wire.message import Message
from jagcodec.wire.schema import INTEGER_ROWS, Node
from jagcodec.wire.spec import Kind


class FieldSchema(NamedTuple):
    """The kind, dtype and shape of one column, from the header.

    Attributes:
        kind: ``"jagged"``, ``"tensor"``, ``"object"``, ``"tensordict"``, or another kind of the
            wire in small letters.
        dtype: Of its cells; None without cells.
        shape: With None for the ragged dim; None if it is not a tensor.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None


def field_of(message: Message, node: Node, rows: int) -> FieldSchema:
    """The header's description of a column of `rows` rows."""
    kind = node.kind
    if kind in (Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_ROWS, Kind.NON_TENSOR_STACK):
        return FieldSchema("object", None, None)
    dims: list[int | None]
    if kind is Kind.JAGGED:
        dims, dtype = [*message.shape(node)], node.fields[0]
        dims[node.fields[2] - 1] = None
    elif kind is Kind.TENSOR:
        dims, dtype = [*message.shape(node)[1:]], node.fields[0]
    else:
        return FieldSchema(kind.name.lower(), None, None)
    shown = "tensor" if kind is Kind.TENSOR else "jagged"
    return FieldSchema(shown, torch_dtype(dtype), (rows, *dims))


def rows_of_node(message: Message, node: Node) -> int | None:
    """The number of rows that a column claims; None if it has no rows."""
    numbers, groups = message.numbers, message.header.groups
    if node.kind in (Kind.JAGGED, Kind.NON_TENSOR_ROWS):
        return groups[numbers[node.number + 3]].rows
    if node.kind in INTEGER_ROWS:
        return numbers[node.children[1].dims]
    return numbers[node.dims] if node.end > node.dims else None


def first_dims(leaf: Any, dims: int) -> list[int]:
    """The first dims of a leaf; of a strided nested tensor those in which its rows agree."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_nested:
        return list(leaf.shape[:dims])
    sizes: list[int] = []
    for dim in range(min(dims, leaf.dim())):
        try:
            sizes.append(leaf.size(dim))
        except RuntimeError:  # rows differ in it
            break
    return sizes
