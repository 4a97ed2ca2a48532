"""`FieldSchema`: the kind, dtype and shape of a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class FieldSchema(NamedTuple):
    """The kind, dtype and shape of one column, from the header.

    Attributes:
        kind: ``"jagged"`` (also of a `PackedColumn`), ``"tensor"``, ``"object"`` (also of a list
            and of an array of objects), ``"tensordict"`` (also of a dict), or another kind of the
            wire in small letters.
        dtype: Of its cells; None if it has no cells. Functions that take a schema also take the
            name of a dtype here, such as "bfloat16".
        shape: With None for the ragged dim; None if it is not a tensor.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None


def sizes_fit(wanted: Sequence[int | None], found: Sequence[int | None]) -> bool:
    """Whether a shape is the wanted one, in which None is any size."""
    same = [size in (None, other) for size, other in zip(wanted, found, strict=False)]
    return len(wanted) == len(found) and all(same)


def packed_field(
    dtype: Any, values: tuple[int, ...], position_ids: tuple[int, ...], rows: int
) -> FieldSchema:
    """The description of a `PackedColumn`, whose parts have these shapes."""
    dim = 0 if values[:1] == position_ids else 1
    return FieldSchema("jagged", dtype, (rows, *values[:dim], None, *values[dim + 1 :]))
