"""Batches that are no type of a caller's: `Columns`, and `OpenBatch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

Name: TypeAlias = tuple[str, ...]
"""A column: the names of the nested batches that it is in, and its own."""


class Columns(NamedTuple):
    """N rows, as a TensorDict of them would hold: what `encode_fields` passes to `encode`.

    A column is a tensor, or the array over its memory; a `RaggedView`; an `Item`; a list of N
    objects; or any other leaf of a TensorDict.
    """

    rows: int
    columns: Mapping[str, Any]


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
