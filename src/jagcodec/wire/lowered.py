"""Values between the steps of encoding: `Columns`, `Lowered` and its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import NestedParts, RaggedView
from jagcodec.wire.narrow import narrowed
from jagcodec.wire.spec import PLAIN

Name: TypeAlias = tuple[str, ...]
"""A column: the names of the nested batches that it is in, and its own."""

Key: TypeAlias = str | tuple[str, ...]
"""A column in arguments: its name, or for one in a nested batch all names on the way."""


class Columns(NamedTuple):
    """N rows, as a TensorDict of them would hold: what `encode_fields` passes to `encode`.

    A column is a tensor, or the array over its memory; a `RaggedView`; a list of N objects, or the
    `Documents` of them; or any other leaf of a TensorDict.
    """

    rows: int
    columns: Mapping[str, Any]


class ColumnDict(dict[str, Any]):
    """The columns of a batch of `rows` rows that is a dict, such as a `BatchedDataDict`."""

    def __init__(self, columns: Mapping[str, Any], rows: int) -> None:
        super().__init__(columns)
        self.rows: int = rows


class OpenBatch:
    """A batch that is read when it is encoded: a `WireBatch`."""

    __slots__ = ()
    meta: Any  # what belongs to the whole batch

    def to_encode(self) -> Any:
        """The value to encode."""
        raise NotImplementedError

    def to_tensordict(self) -> Any:
        """The batch as a column of a dict holds it."""
        raise NotImplementedError

    def narrow_names(self) -> list[Name]:
        """The columns to store in as few bytes as hold them."""
        raise NotImplementedError


def closed(column: Any) -> Any:
    """A column in memory: an open batch is read, also where it is a column of a dict."""
    if isinstance(column, OpenBatch):
        return column.to_tensordict()
    return with_closed(column) if type(column) is dict else column


def with_closed(columns: dict[str, Any]) -> dict[str, Any]:
    """A dict of columns without open batches among them; the same dict if it has none."""
    pairs = [(name, column, closed(column)) for name, column in columns.items()]
    read = {name: found for name, column, found in pairs if found is not column}
    return {**columns, **read} if read else columns


Tree: TypeAlias = Any
"""A tuple: a node of a schema. Anything else: a document, of a value that needs no buffers."""

Rows: TypeAlias = RowSplits | tuple[int, int, int, bytes]
"""The rows of a column: their splits, or four values: the number of rows, the shortest length, the
longest length, and the bytes of the offsets (empty for fewer than two rows)."""

Item: TypeAlias = tuple[Any, int | None, Rows | None, tuple[int, ...]]
"""Data that needs a place, and the numbers around it:

1. contiguous memory, whose bytes are sent, or a `RaggedView` of scattered rows;
2. the storage code; None if the node has none;
3. the rows of the ragged group; None if the node has none;
4. the dims.

A plain tuple is fast to make, which counts for messages of one row."""


class UnreadCells(NamedTuple):
    """An `Item` of torch's cells before they are read: on any device, with or without gaps."""

    source: Any  # a tensor, several, an array, a `RaggedView` or `NestedParts`
    dtype: str | None  # torch's name; None if the cells are stored unchanged
    dims: tuple[int, ...] = ()  # of a rectangle
    narrow: bool = False  # whether they are integers that are stored narrow
    row_splits: RowSplits | None = None  # of rows that are the tensors or arrays of `source`

    @property
    def is_ragged(self) -> bool:
        """Whether it is a jagged column."""
        return type(self.source) is RaggedView or type(self.source) is NestedParts


class Documents(NamedTuple):
    """Rows, all of them documents or messages."""

    rows: Sequence[bytes] | Sequence[Lowered]
    first_same: Sequence[int] | None = None  # of each, the first row that is one object with it


@dataclass(eq=False, slots=True)
class Cells:
    """Cells end to end, which columns may share: equal only to themselves, as keys of a dict."""

    data: ByteArray
    dtype: str | None = None  # None if the bytes have no dtype
    narrow: bool = False  # whether they are integers that are stored narrow

    @classmethod
    def of_index(cls, starts: IntArray) -> Cells:
        """An index: the cells where rows begin."""
        return cls(np.ascontiguousarray(starts).view(np.uint8), "int64", narrow=True)

    def like(self, data: ByteArray) -> Cells:
        """Other cells of the same kind."""
        return Cells(data, self.dtype, self.narrow)

    def stored(self) -> tuple[int, ByteArray]:
        """The storage code of the cells, and their bytes."""
        found = narrowed(self.data, self.dtype) if self.narrow and self.dtype else None
        return found or (PLAIN, self.data)


class Run(NamedTuple):
    """A run of each row of a column."""

    splits: RowSplits
    cells: Cells
    starts: (
        Cells | None
    )  # an index: the cell where each begins; None if all begin at the first cell


@dataclass(eq=False, slots=True)
class EndToEnd:
    """A column whose cells are end to end, to be stored in another way."""

    cells: Cells
    splits: RowSplits | None  # None if it is a rectangle
    shape: tuple[int, ...]  # (A..., total, B...), or the dims of a rectangle
    runs: list[Run] | None = None  # sent instead of the cells if smaller; else None


class Lowered(NamedTuple):
    """A value that is ready to be placed."""

    tree: Tree  # None if the value is one document
    items: list[Any]  # in the order of the tree's walk: numbers, and what needs a place
    values: bytes  # the documents, in the same order, packed
    unbacked: Sequence[tuple[str, int]] = ()  # paths and numbers of rows without data so far
