"""`ColumnSource`: what a `WireBatch` reads its columns from, and in which forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from jagcodec.columns.fields import FieldSchema
from jagcodec.memory.arrays import IntArray
from jagcodec.wire.frames import Frame
from jagcodec.wire.lowered import Name
from jagcodec.wire.message import ChosenRows


class As(Enum):
    """The forms in which columns are read."""

    VALUE = "as batch[name]: objects in an array, a batch in a batch as a WireBatch, else a leaf"
    LEAVES = "leaves of one TensorDict; a batch in a batch as a TensorDict"
    VIEW = "see WireBatch.columns"
    ITEM = "as Columns has it; rows of documents are not read where that is possible"


class Column(NamedTuple):
    """A column of a batch: what reads it, and by what handle (a node, a name or a column)."""

    source: ColumnSource
    handle: Any


@dataclass(slots=True, eq=False)
class ColumnSource:
    """The source of a batch: a message, columns in memory, or several such (`batch/join.py`)."""

    names: Sequence[str]  # of all columns
    handles: Sequence[Any]  # by which they are read
    sizes: Sequence[int]  # (N, ...): the batch size, of all rows
    device: torch.device | None  # where tensors go; None leaves them where their cells are
    allow_pickle: bool  # whether pickled objects are unpickled, and pickled again to be sent on

    def columns(self) -> Mapping[str, Column]:
        """All columns, by name; not kept here, because each keeps its source."""
        pairs = zip(self.names, self.handles, strict=True)
        return {name: Column(self, handle) for name, handle in pairs}

    def meta(self) -> dict[str, Any]:
        raise NotImplementedError

    def metas(self) -> list[dict[str, Any]]:
        return [self.meta()]

    def schema(self, handle: Any, rows: int) -> FieldSchema:
        """The description of a column with `rows` chosen rows."""
        raise NotImplementedError

    def row_lengths(self, name: str, handle: Any, chosen: ChosenRows | None) -> IntArray | None:
        raise NotImplementedError

    def read(
        self, handles: Mapping[str, Any], chosen: ChosenRows | None, form: As
    ) -> dict[str, Any]:
        """Columns of its own, by name; `chosen` are their rows, None for all."""
        raise NotImplementedError

    def narrow_names(self, name: str, handle: Any) -> list[Name]:
        """The paths of the narrow columns: this one, or those inside it if it is a batch."""
        raise NotImplementedError

    def is_elided(self, handle: Any) -> bool:
        """Whether the column, or one in it, shares cells in its message."""
        raise NotImplementedError

    def shared(self, column: Any, chosen: ChosenRows | None) -> Any:
        """A column from another source, with the offsets that this source shares for equal rows."""
        raise NotImplementedError

    def cut(self, batch: Any) -> list[Frame] | None:
        """The frames of a `WireBatch`, taken from its message's; None if columns must be read."""
        return None
