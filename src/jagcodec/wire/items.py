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

    Attributes that few items need are defaults of the class, because each column of each message
    makes an item.
    """

    data: Any  # contiguous memory, or a `RaggedView` of scattered rows
    dims: tuple[int, ...]  # as sent: of the values (A..., total, B...), or of a rectangle
    splits: RowSplits | None  # the rows of the ragged group, if the node has one
    dtype: str | None  # of cells, which may be stored narrow or elided; None for other bytes
    ragged_dim: int
    storage_code: int | None = PLAIN  # None if the node has none
    # For rows of documents: the first row that is the same object as each; None if all differ.
    same: Sequence[int] | None = None
    narrow: bool = False  # whether to store elements in the fewest bytes that hold them
    runs: Sequence[Run] | None = None  # sent instead of the data
    cells: Item | None = None  # the data as an item, if runs of other columns name it
    is_elided: bool = False  # whether it has `runs` or `cells`

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
    """The cells of N rows of Python objects: tokens end to end, or one number per row.

    The caller sets `ragged_dim`, and `splits`, which columns of equal row lengths share.
    """

    def __init__(self, data: Any, lengths: tuple[int, ...] | None, dtype: str) -> None:
        # A contiguous array of the cells' bits; on a device a tensor.
        self.data = data
        self.dims: tuple[int, ...] = data.shape
        self.splits: RowSplits | None = None
        self.dtype: str = dtype
        self.ragged_dim = 1
        self.lengths: tuple[int, ...] | None = lengths  # tokens per row; None without a ragged dim


class Run(NamedTuple):
    """One piece of every row of an elided column; all pieces are in the same cells."""

    splits: RowSplits  # the pieces
    cells: Item  # its first dim is the number of cells
    starts: Item | None  # the cell at which each piece begins; None if all begin at cell 0


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
    item.storage_code = None
    return item


def item_of_view(view: Any, dtype: str | None, *, ragged: bool = True) -> Item:
    """The item of a view's rows; without `ragged`, the rows of a rectangle."""
    data, dims = view.to_write()
    return Item(data, dims, view.row_splits if ragged else None, dtype, view.ragged_dim)


def item_of_index(starts: IntArray) -> Item:
    """The item of an index of runs: the cells where rows begin."""
    item = Item(np.ascontiguousarray(starts).view(np.uint8), (len(starts),), None, "int64")
    item.narrow = True
    return item


# --- values between the steps of encoding --------------------------------------------------------


Tree: TypeAlias = Any
"""A tuple is a node of a schema. Anything else is a document: a value that needs no buffers."""


class Lowered(NamedTuple):
    """A value that is ready to be placed."""

    tree: Tree  # None if the value is one document
    items: list[Any]  # in the order of the tree's walk: an `Item` for data, or a number
    values: bytes  # the documents, in the same order
    # Paths with more rows than `MAX_UNBACKED_ROWS`, which need a byte of payload each.
    unbacked: Sequence[tuple[str, int]] = ()
    messages: Sequence[RowMessages] = ()  # to write first, in this order: one may contain another
    # Whether readers might reject a narrow message, because its many rows of arrays need memory.
    needs_more_memory_to_read: bool = False


class RowMessages(NamedTuple):
    """Rows of objects, each of which becomes a separate message because some need buffers."""

    item: Any  # `write_rows` gives it the messages as its data
    rows: Mapping[int, bytes | Lowered]  # a document or a lowered value for each distinct object
    places: Sequence[int]  # the key in `rows` of each row
