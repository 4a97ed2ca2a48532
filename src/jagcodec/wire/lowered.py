"""Values between the steps of encoding: `Columns`, `Lowered` and its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import NestedParts, RaggedView
from jagcodec.wire.narrow import narrowed
from jagcodec.wire.spec import PLAIN

REMEDY = (
    "; convert it to a type of encode's list (dict(x), tuple(x), str(x), x.value), register its "
    "type with register_type (datetime, enums and others of the standard library: "
    "jagcodec.stdlib.register_stdlib_types), or pass allow_pickle=True on both sides"
)
"""What to do about a value that cannot be encoded."""

REMEDY_OF_BATCHES = (
    "; convert it with TensorDict(dict(x.items()), x.batch_size), or register its type"
)
"""What to do about a batch of another type."""


class Columns(NamedTuple):
    """N rows, as a TensorDict of them would hold: what `encode_fields` passes to `encode`.

    Attributes:
        rows: N.
        columns: Name to a tensor, or the array over its memory; to a `RaggedView`; to a list of N
            objects, or the `Documents` of them; or to any other leaf of a TensorDict.
    """

    rows: int
    columns: Mapping[str, Any]


Name: TypeAlias = tuple[str, ...]
"""A column: the names of the nested batches that it is in, and its own."""


class OpenBatch:
    """A batch that is read when it is encoded: a `WireBatch`."""

    __slots__ = ()

    @property
    def meta(self) -> dict[str, Any]:
        """What belongs to the whole batch."""
        raise NotImplementedError

    def to_encode(self) -> Any:
        """The value to encode."""
        raise NotImplementedError

    def narrow_names(self) -> list[tuple[str, ...]]:
        """The columns to store in as few bytes as hold them."""
        raise NotImplementedError


Tree: TypeAlias = Any
"""A tuple: a node of a schema. Anything else: a document, of a value that needs no buffers."""


class Dense(NamedTuple):
    """Cells that need a place: of a tensor, of an array, of tensors end to end, of a view's rows.

    Its numbers are buffer and offset; and how the cells are stored, where `dtype` names the torch
    dtype that they have. With `narrow`, integers are stored in as few bytes as hold them.
    """

    source: torch.Tensor | np.ndarray[Any, Any] | Sequence[torch.Tensor] | RaggedView
    dtype: str | None
    narrow: bool = False


class Ragged(NamedTuple):
    """A jagged column: numbers of a Dense, the group, and the dims of its values.

    One that needs no more than to be copied, of rows in memory on the host, is a `RaggedView`.
    """

    source: RaggedView | NestedParts
    dtype: str
    path: str
    narrow: bool = False


class ColumnDict(dict[str, Any]):
    """The columns of a batch that is a dict, such as a `BatchedDataDict`."""


InOrder: TypeAlias = tuple[
    "memoryview | np.ndarray[Any, Any] | RaggedView",
    "tuple[int, int, bytes] | None",
    "tuple[int, ...]",
]
"""A plain column: contiguous memory in which its rows are end to end, and of which only the bytes
count, or rows of an array that are apart; its shortest and its longest row, and of several rows the
offsets once they are end to end, or None of a rectangle; and the dims of its values, or how many
bytes of documents there are. A plain tuple, because a message of one row takes little else."""


class Documents(NamedTuple):
    """Rows, all of them documents or messages.

    The numbers are buffer, offset, how they are stored, group and size.
    """

    rows: Sequence[bytes] | Sequence[Lowered]


class Packed(NamedTuple):
    """`Documents` as bytes.

    Attributes:
        blobs: Whether each row is a message of its own.
        rows: The buffers of each; of a row that is a message of its own, several.
        like: For each row the first that has the same bytes, where some are sent once.
        one_object: Whether such rows are one object, and not just equal.
    """

    blobs: bool
    rows: list[list[Any]]
    like: list[int] | None = None
    one_object: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Cells end to end, which columns may share: equal only to themselves, as keys of a dict.

    Attributes:
        data: Their bytes.
        dtype: What the wire calls their dtype; None of bytes that mean nothing.
        narrow: Whether they are integers that are stored narrow.
    """

    data: ByteArray
    dtype: str | None = None
    narrow: bool = False

    @classmethod
    def of_index(cls, starts: IntArray) -> Cells:
        """Where rows begin."""
        return cls(np.ascontiguousarray(starts).view(np.uint8), "int64", narrow=True)

    def like(self, data: ByteArray) -> Cells:
        """Other cells of the same kind."""
        return Cells(data, self.dtype, self.narrow)

    def stored(self) -> tuple[int, ByteArray]:
        """How they are stored, and their bytes."""
        found = narrowed(self.data, self.dtype) if self.narrow and self.dtype else None
        return found or (PLAIN, self.data)


class Run(NamedTuple):
    """A run of each row of a column.

    Attributes:
        splits: How long they are.
        cells: Their place.
        starts: At which cell each begins, an index; None: all of them at the first.
    """

    splits: RowSplits
    cells: Cells
    starts: Cells | None


class EndToEnd(NamedTuple):
    """A column whose cells are end to end, to be stored in another way.

    Attributes:
        cells: All of them.
        splits: Its rows; None of a rectangle.
        shape: (A..., total, B...), or the dims of a rectangle.
        ragged_dim: As of a `RaggedView`; 0 of a rectangle.
        runs: What its rows are sent as instead, if that is less.
    """

    cells: Cells
    splits: RowSplits | None
    shape: tuple[int, ...]
    ragged_dim: int
    runs: list[Run] | None = None


class Lowered(NamedTuple):
    """A value that is ready to be placed.

    Attributes:
        schema: Nested tuples; None for a value that is one document.
        items: In the order of the schema's walk: numbers, and what needs a place.
        values: The documents, in the same order, packed.
        unbacked: Paths and numbers of rows that the payload has to vouch for.
    """

    schema: Any
    items: list[Any]
    values: bytes
    unbacked: Sequence[tuple[str, int]] = ()


def refusal_of(value: Any, why: str) -> str:
    """The text of an error for a value that cannot be encoded."""
    cls = type(value)
    builtin = cls.__module__ == "builtins"
    name = cls.__qualname__ if builtin else f"{cls.__module__}.{cls.__qualname__}"
    if not why:
        why = REMEDY_OF_BATCHES if isinstance(value, TensorDictBase) else REMEDY
    return f"{name} cannot be encoded{why}"
