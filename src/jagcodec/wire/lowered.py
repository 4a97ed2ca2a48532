"""What the phases of encoding hand on: a value whose schema is known, and what needs a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from jagcodec.ragged.views import NestedParts, RaggedView

REMEDY = (
    "; convert it to a type of encode's list (dict(x), tuple(x), str(x), x.value), register its "
    "type with register_type (datetime, enums and others of the standard library: "
    "register_stdlib_types), or pass allow_pickle=True on both sides"
)
"""What to do about a value that cannot be encoded."""

REMEDY_OF_BATCHES = (
    "; convert it with TensorDict(dict(x.items()), x.batch_size), or register its type"
)
"""What to do about a batch of another type."""


Narrow: TypeAlias = "bool | frozenset[int]"
"""What is stored narrow: all items of a message, none, or those of these indices."""


class Columns(NamedTuple):
    """N rows as `encode` takes them from `encode_fields`: what a TensorDict of them would say.

    Attributes:
        rows: N.
        columns: Name to a tensor, or the array over its memory; to a `RaggedView`; to a list of N
            objects, or the `Documents` of them; or to any other leaf of a TensorDict.
    """

    rows: int
    columns: Mapping[str, Any]

    def repeats(self) -> bool:
        """Whether columns are known to have rows that share their cells."""
        return any(
            type(column) is RaggedView and column.repeats() for column in self.columns.values()
        )


Tree: TypeAlias = Any
"""A tuple: a node of a schema. Anything else: a document, of a value that needs no buffers."""


class Dense(NamedTuple):
    """Cells that need a place: of a tensor, of an array, of tensors end to end, of a view's rows.

    Its numbers are buffer and offset; and how the cells are stored, where `dtype` names the torch
    dtype that they have.
    """

    source: torch.Tensor | np.ndarray[Any, Any] | Sequence[torch.Tensor] | RaggedView
    dtype: str | None


class Ragged(NamedTuple):
    """A jagged column: numbers of a Dense, the group, and the dims of its values.

    One that needs no more than to be copied, of rows in memory on the host, is a `RaggedView`.
    """

    source: RaggedView | NestedParts
    dtype: str
    path: str


class InnerFirst(NamedTuple):
    """A jagged column with an inner dim of its rows outermost.

    Attributes:
        dim: Which of the dims of a row lies outermost, from 1 on.
        view: The values (extent of `dim`, total, the rest), a tensor, whose ragged dim is 2.
    """

    dim: int
    view: RaggedView


class ColumnDict(dict[str, Any]):
    """The columns of a batch that is a dict, such as a `BatchedDataDict`."""


class OfColumns:
    """Who is asked about each column while a value is lowered: here one that changes none.

    Attributes:
        marks: What was noted on the way, of which the last is taken back with what was lowered.
    """

    marks: list[Any]

    def __init__(self) -> None:
        self.marks = []

    def columns(
        self, path: list[Any], items: list[Any], columns: Iterable[tuple[str, Any]]
    ) -> Iterable[tuple[str, Any]]:
        """All columns of the batch at `path`, as they are to be lowered, one after the other."""
        return columns

    def column(self, path: list[Any], items: list[Any], name: str, column: Any) -> Any:
        """A column that comes next in the batch at `path`, as it is to be lowered."""
        return column

    def end(self, path: list[Any], items: list[Any]) -> None:
        """The batch at `path` has no more columns."""


NO_COLUMNS = OfColumns()
"""Where nothing was said of single columns."""


class Documents(NamedTuple):
    """One document per row: its numbers are buffer, offset, size and group."""

    rows: Sequence[bytes | Lowered]


class Lowered(NamedTuple):
    """A value that is ready to be placed.

    Attributes:
        schema: Nested tuples; None for a value that is one document.
        items: In the order of the schema's walk: numbers, and what needs a place.
        values: The documents, in the same order.
        unbacked: Paths and numbers of rows that the payload has to vouch for.
    """

    schema: Any
    items: list[Any]
    values: list[Any]
    unbacked: list[tuple[str, int]]
