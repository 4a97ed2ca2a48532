"""Values between the steps of encoding: `Columns`, and `Lowered`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Key: TypeAlias = str | tuple[str, ...]
"""A column in arguments: its name, or for one in a nested batch all names on the way."""


class ColumnDict(dict[str, Any]):
    """The columns of a batch of `rows` rows that is a dict, such as a `BatchedDataDict`."""

    def __init__(self, columns: Mapping[str, Any], rows: int) -> None:
        super().__init__(columns)
        self.rows: int = rows


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
