"""A node as a column: its description, its number of rows, and the place of its cells.

`field_of` describes a column. `rows_of_node` counts its rows. `leaf_of` finds its cells. Elided
columns are stored indirect: at their place is a table of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jagcodec.columns.batch import FieldSchema, packed_field
from jagcodec.wire.dtypes import cell_dtype
from jagcodec.wire.schema import (
    DOCUMENT_ROWS,
    GROUP,
    INTEGER_ROWS,
    ROW_KINDS,
    SIZE,
    Group,
    Node,
    runs_of,
)
from jagcodec.wire.spec import BATCHED_DATA_DICT, BLOBS, PACKED_COLUMN, PLAIN, TORCH_ITEMSIZES, Kind

_OBJECTS = (
    *(Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_ROWS, Kind.NON_TENSOR_STACK),
    Kind.ARRAY_ROWS,
)


def kind_of(node: Node) -> str:
    """The `kind` of a column in its `FieldSchema`."""
    return "object" if node.kind in _OBJECTS else node.kind.name.lower()


def field_of(node: Node, numbers: Sequence[int], rows: int) -> FieldSchema:
    """The description of a column of `rows` rows, from the header alone."""
    kind = node.kind
    if kind is not Kind.JAGGED and kind is not Kind.TENSOR:
        packed = parts_of_packed(node)
        if packed is not None:
            values, position_ids = [tuple(numbers[x.dims : x.end]) for x in packed[:2]]
            return packed_field(cell_dtype(packed[0].fields[0]), values, position_ids, rows)
        if columns_of_dict(node) is not None:
            return FieldSchema("tensordict", None, None)
        are_objects = kind is Kind.LIST or kind is Kind.OBJECT_ARRAY
        return FieldSchema("object" if are_objects else kind_of(node), None, None)
    dims: list[int | None] = [*numbers[node.dims : node.end]]
    if kind is Kind.JAGGED:
        dims[node.fields[2] - 1] = None
    else:
        del dims[:1]
    return FieldSchema(kind.name.lower(), cell_dtype(node.fields[0]), (rows, *dims))


def rows_of_node(node: Node, numbers: Sequence[int], groups: Sequence[Group]) -> int | None:
    """The number of rows of a column, from the header; None if the header does not give it.

    The header gives it for columns of cells and documents, for a list with buffers, and for a dict
    with such a column.
    """
    if node.kind in (Kind.JAGGED, Kind.NON_TENSOR_ROWS):
        return groups[numbers[node.number + GROUP]].rows
    if node.kind in INTEGER_ROWS:
        return numbers[node.children[1].dims]
    if node.kind is Kind.LIST:
        return len(node.children)
    inner = columns_of_dict(node)
    if inner is not None:
        each = (rows_of_node(child, numbers, groups) for child in inner.children)
        return next((rows for rows in each if rows is not None), None)
    packed = parts_of_packed(node)
    if packed is not None:
        offsets = packed[2]
        return numbers[offsets.dims] - 1 if numbers[offsets.dims] else None
    return numbers[node.dims] if node.end > node.dims else None


def cells_of(node: Node) -> Sequence[Node]:
    """The nodes of `ROW_KINDS` that hold the rows of a column; [] if no node does."""
    if node.kind is Kind.ARRAY_ROWS:
        return node.children
    return [node] if node.kind in ROW_KINDS else []


def columns_of_dict(node: Node) -> Node | None:
    """The MAP with the columns of a dict or a `BatchedDataDict` that is a column; else None."""
    if node.kind is Kind.USER and node.fields[0] == BATCHED_DATA_DICT:
        state = node.children[0].children
        node = state[0] if len(state) == 2 else node
    return node if node.kind is Kind.MAP else None


def parts_of_packed(node: Node) -> list[Node] | None:
    """Values, position ids and `cu_seqlens` of a `PackedColumn`; None if `node` is not one."""
    state = node.children[0] if node.kind is Kind.USER and node.children else None
    if state is None or node.fields[0] != PACKED_COLUMN or state.kind is not Kind.MAP:
        return None
    known = dict(zip(state.fields[0], state.children, strict=True))
    parts = [known.get(name) for name in ("values", "position_ids", "cu_seqlens")]
    fits = all(part is not None and part.kind is Kind.TENSOR for part in parts)
    return parts if fits and parts[2].fields[1] == 1 else None  # type: ignore[union-attr, return-value]


class CellPlace(NamedTuple):
    """The place of elements that are end to end."""

    buffer: int
    offset: int
    storage_code: int  # as wide as the dtype, or narrow
    elements: int  # how many
    dtype_name: str


class Leaf(NamedTuple):
    """A TENSOR, a JAGGED, or rows of documents, whose bytes count as uint8 cells."""

    place: CellPlace  # the place of its cells; of the table of its runs if it is elided
    shape: tuple[int, ...]  # (A..., M, B...): dims of the values, as in a `RaggedView`
    ragged_dim: int  # as in a `RaggedView`; 1 for a rectangle, too, each of whose rows is one cell
    group: int | None  # the ragged group; None for a rectangle
    runs: int  # the number of runs if it is elided, else 0
    blobs: bool  # whether each row is a message of its own

    @property
    def dtype(self) -> Any:
        return cell_dtype(self.place.dtype_name)

    @property
    def elements_per_cell(self) -> int:
        return math.prod(self.shape[self.ragged_dim :])

    @property
    def outer(self) -> int:
        """The number of pieces of each row: 1 unless dims come before the ragged one."""
        return math.prod(self.shape[: self.ragged_dim - 1])

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell at the full width of its elements."""
        return self.elements_per_cell * TORCH_ITEMSIZES[self.place.dtype_name]

    def shape_of(self, total: int) -> tuple[int, ...]:
        """The shape of values with `total` cells along the ragged dim."""
        return (*self.shape[: self.ragged_dim - 1], total, *self.shape[self.ragged_dim :])


def leaf_of(node: Node, numbers: Sequence[int]) -> Leaf | None:
    """The leaf of a TENSOR, a JAGGED or rows of documents; None for other nodes."""
    kind, i, shape = node.kind, node.number, tuple(numbers[node.dims : node.end])
    name, ragged_dim = "uint8", 1
    if kind is Kind.JAGGED:
        name, _, ragged_dim = node.fields
    elif kind is Kind.TENSOR:
        name = node.fields[0]
    elif kind in DOCUMENT_ROWS:
        shape = (numbers[i + SIZE],)
    else:
        return None
    buffer, offset, storage_code = numbers[i : i + GROUP]
    group = None if kind is Kind.TENSOR else numbers[i + GROUP]
    elements = math.prod(shape)
    # Ignore the storage code of a column without cells.
    runs = runs_of(kind, storage_code) if elements and storage_code != PLAIN else 0
    blobs = elements > 0 and bool(storage_code & BLOBS)  # `check_node` refuses it for tensors
    if blobs:
        storage_code &= ~BLOBS
    place = CellPlace(buffer, offset, storage_code, elements, name)
    return Leaf(place, shape, ragged_dim, group, runs, blobs)
