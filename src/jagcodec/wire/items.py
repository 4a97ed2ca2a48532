"""`Item`: data that waits for a place in a frame, and the numbers around it.

A column becomes an item, and its item the node of a schema. Dtypes are names here, as they are on
the wire, so that rows of Python's numbers become a message without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jagcodec.memory.arrays import IntArray
from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.spec import PLAIN


class Item:
    """Data that needs a place, equal only to itself.

    A column of cells has a `dtype`; of documents, and of other bytes, it is None. What few items
    need has a default of the class, because an item is made for each column of each message.
    """

    data: Any  # contiguous memory, or rows that are scattered: a `RaggedView`
    dims: tuple[int, ...]  # as they are sent: of values (A..., total, B...), or of a rectangle
    splits: RowSplits | None  # the rows of the ragged group, if the node has one
    dtype: str | None  # whose elements may be stored narrow, and rows elided
    ragged_dim: int
    stored: int | None = PLAIN  # the storage code; None if the node has none
    # Of documents: the first row that is one object with each; None if no two are.
    same: Sequence[int] | None = None
    narrow: bool = False  # whether elements are stored in as few bytes as hold them
    runs: Sequence[Run] | None = None  # are sent instead of the data
    cells: Item | None = None  # its data as the runs of other columns name them, placed once
    indirect: bool = False  # whether it has one of these

    def __init__(
        self,
        data: Any,
        dims: tuple[int, ...],
        splits: RowSplits | None = None,
        dtype: str | None = None,
        ragged_dim: int = 1,
    ) -> None:
        self.data = data
        self.dims = dims
        self.splits = splits
        self.dtype = dtype
        self.ragged_dim = ragged_dim


class RowCells(Item):
    """The cells of N rows of Python: end to end along their tokens, or one number per row.

    The caller sets `splits`, which columns of equal lengths share, and `ragged_dim`.
    """

    def __init__(self, data: Any, lengths: tuple[int, ...] | None, dtype: str) -> None:
        # An array of the bits of the cells, contiguous; or a tensor if it is on a device.
        self.data = data
        self.dims: tuple[int, ...] = data.shape
        self.splits: RowSplits | None = None
        self.dtype: str = dtype
        self.ragged_dim = 1
        self.lengths: tuple[int, ...] | None = lengths  # tokens per row; None without a ragged dim


class Run(NamedTuple):
    """A run of each row of an elided column."""

    splits: RowSplits
    cells: Item  # its first dim is how many there are
    starts: Item | None  # the cell where each begins; None if all begin at the first cell


def item_of_documents(documents: Sequence[bytes], same: Sequence[int] | None = None) -> Item:
    """The item of a column of objects, one document in each row."""
    one = len(documents) == 1  # most messages
    data = memoryview(documents[0] if one else bytearray().join(documents))
    item = Item(data, (len(data),), RowSplits.from_counts(tuple(map(len, documents))))
    if same is not None:
        item.same = same
    return item


def item_of_bytes(data: Any, dims: tuple[int, ...] = ()) -> Item:
    """The item of bytes that are stored in one way only."""
    item = Item(data, dims)
    item.stored = None
    return item


def item_of_cells(data: Any, dims: tuple[int, ...], splits: RowSplits | None) -> Item:
    """The item of cells, or of documents, that are cut out of a message."""
    return Item(data, dims, splits)


def item_of_view(view: Any, dtype: str | None, *, ragged: bool = True) -> Item:
    """The item of rows that are sent on as messages have them; without `ragged` of a rectangle."""
    data, dims = view.to_write()
    return Item(data, dims, view.row_splits if ragged else None, dtype, view.ragged_dim)


def item_of_index(starts: IntArray) -> Item:
    """The item of an index of runs: the cells where rows begin."""
    item = Item(np.ascontiguousarray(starts).view(np.uint8), (len(starts),), None, "int64")
    item.narrow = True
    return item


# --- values between the steps of encoding --------------------------------------------------------


Tree: TypeAlias = Any
"""A tuple: a node of a schema. Anything else: a document, of a value that needs no buffers."""


class Lowered(NamedTuple):
    """A value that is ready to be placed."""

    tree: Tree  # None if the value is one document
    items: list[Any]  # in the order of the tree's walk: numbers, and an `Item` for what has bytes
    values: bytes  # the documents, in the same order
    unbacked: Sequence[tuple[str, int]] = ()  # paths and numbers of rows without data so far
    messages: Sequence[RowMessages] = ()  # that are items of it; those in others come first
    asks_for_more: bool = False  # than readers allow, if its rows had few bytes


class RowMessages(NamedTuple):
    """Rows of objects of which some need buffers: each becomes a message of its own."""

    item: Any  # gets their bytes
    rows: Mapping[int, bytes | Lowered]  # documents, and what was lowered
    places: Sequence[int]  # the key of each row: rows may be one object
