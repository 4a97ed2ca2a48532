"""`Item`: data that waits for a place in a frame, and the numbers around it.

A column becomes an item, and its item the node of a schema. Dtypes are names here, as they are on
the wire, so that rows of Python's numbers become a message without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jagcodec.ragged.row_splits import RowSplits
from jagcodec.wire.spec import PLAIN, Code


@dataclass(slots=True, eq=False)
class Item:
    """Data that needs a place, equal only to itself.

    A column of cells has a `dtype`; of documents, and of other bytes, it is None.
    """

    data: Any  # contiguous memory, or rows that are scattered: a `RaggedView`
    dims: tuple[int, ...]  # as they are sent: of values (A..., total, B...), or of a rectangle
    splits: RowSplits | None = None  # the rows of the ragged group, if the node has one
    dtype: str | None = None  # whose elements may be stored narrow, and rows elided
    stored: int | None = PLAIN  # the storage code; None if the node has none
    ragged_dim: int = 1
    # Of documents: the first row that is one object with each; None if no two are.
    same: Sequence[int] | None = None
    narrow: bool = False  # whether elements are stored in as few bytes as hold them
    runs: Sequence[Run] | None = None  # are sent instead of the data
    shared: bool = False  # whether runs name the data, which is placed once


class Run(NamedTuple):
    """A run of each row of an elided column."""

    splits: RowSplits
    cells: Item  # its first dim is how many there are
    starts: Item | None  # the cell where each begins; None if all begin at the first cell


def node_of(item: Item) -> tuple[Any, ...]:
    """The node of a column in a schema."""
    if item.dtype is None:
        return (Code.NON_TENSOR_ROWS,)
    if item.splits is None:
        return (Code.TENSOR, item.dtype, len(item.dims))
    return (Code.JAGGED, item.dtype, len(item.dims), item.ragged_dim)


def item_of_documents(documents: Sequence[bytes], same: Sequence[int] | None = None) -> Item:
    """The item of a column of objects, one document in each row."""
    one = len(documents) == 1  # most messages
    data = memoryview(documents[0] if one else bytearray().join(documents))
    splits = RowSplits.from_counts(tuple(map(len, documents)))
    return Item(data, (len(data),), splits, same=same)


def item_of_message(data: Any, dims: tuple[int, ...], splits: RowSplits | None) -> Item:
    """The item of rows that are sent on as a message has them."""
    return Item(data, dims, splits)


def item_of_cells(values: Any, splits: RowSplits | None, dtype: str, ragged_dim: int = 1) -> Item:
    """The item of cells end to end; without `splits`, each row is one index of dim 0."""
    return Item(values, values.shape, splits, dtype, ragged_dim=ragged_dim)
