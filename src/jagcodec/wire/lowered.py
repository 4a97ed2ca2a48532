"""Values between the steps of encoding: `Columns`, and `Lowered`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Name: TypeAlias = tuple[str, ...]
"""A column: the names of the nested batches that it is in, and its own."""

Key: TypeAlias = str | tuple[str, ...]
"""A column in arguments: its name, or for one in a nested batch all names on the way."""


class Columns(NamedTuple):
    """N rows, as a TensorDict of them would hold: what `encode_fields` passes to `encode`.

    A column is a tensor, or the array over its memory; a `RaggedView`; an `Item`; a list of N
    objects; or any other leaf of a TensorDict.
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

    def is_elided(self) -> bool:
        """Whether a column shares cells in its message, which are to be shared again."""
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


class Lowered(NamedTuple):
    """A value that is ready to be placed."""

    tree: Tree  # None if the value is one document
    items: list[Any]  # in the order of the tree's walk: numbers, and an `Item` for what has bytes
    values: bytes  # the documents, in the same order, packed
    unbacked: Sequence[tuple[str, int]] = ()  # paths and numbers of rows without data so far
    messages: Sequence[RowMessages] = ()  # that are items of it; those in others come first
    asks_for_more: bool = False  # than readers allow, if its rows had few bytes


class RowMessages(NamedTuple):
    """Rows of objects of which some need buffers: each becomes a message of its own."""

    item: Any  # gets their bytes
    rows: Mapping[int, bytes | Lowered]  # documents, and what was lowered
    places: Sequence[int]  # the key of each row: rows may be one object
