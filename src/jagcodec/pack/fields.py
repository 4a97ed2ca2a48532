"""What a producer hands in: a dict of names to columns, checked, and made leaves of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.ragged.nested import Parts, RaggedGroups, is_jagged
from jagcodec.ragged.non_tensor import leaf_of_rows
from jagcodec.ragged.views import Strip, check_rectangle, compact_values, packed

_STRING = frozenset((str,))


def check_fields(fields: Any, path: str) -> None:
    """Refuse what is no dict of names to columns."""
    if type(fields) is dict and _STRING.issuperset(map(type, fields)):
        return
    if not isinstance(fields, Mapping) or not all(
        # By items, because a TensorDict iterates over its rows.
        isinstance(name, str)
        for name, _ in fields.items()
    ):
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected a dict of names to columns, found {type(fields).__name__}"
            + (" with keys that are no strings" if isinstance(fields, Mapping) else ""),
        )


def field_names(names: Any, path: str) -> frozenset[Any]:
    """The names that an argument holds.

    Raises:
        ArgumentTypeError: It is a single string, or nothing that holds names.
    """
    if isinstance(names, str):
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected a set of names, found the string {names!r}; put it in a list",
        )
    try:
        return frozenset(names)
    except TypeError as error:
        raise ArgumentTypeError(
            "bad_type", path, f"expected a set of names, found {error}"
        ) from error


def check_rows(column: Any, rows: int | None, like: str, path: str) -> int:
    """The number of rows of a column: `rows` where that is known, `like` saying from where.

    Raises:
        ArgumentError: It has another number of rows, or no rows at all.
        ArgumentTypeError: It is neither a tensor nor an object array.
    """
    found = _rows(column, path)
    if rows is not None and found != rows:
        raise ArgumentError("row_mismatch", path, f"expected {rows} rows, {like}, found {found}")
    return found


_REMEDY = (
    "use torch.from_numpy for an array of numbers, stack_or_nest for a list of tensors, and for "
    "anything else an (N,) array: column = numpy.empty(N, dtype=object); column[i] = row i"
)


def _rows(column: Any, path: str) -> int:
    plain = type(column) is torch.Tensor and column.layout is torch.strided
    if plain and column.dim() and not (column.is_nested or column.is_quantized):
        return int(column.shape[0])  # as most are
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        return len(column)
    if isinstance(column, torch.Tensor) and (
        is_jagged(column) or (column.layout is torch.strided and not column.is_nested)
    ):
        if column.is_quantized:
            check_rectangle(column, path)
        if column.dim() == 0:
            raise ArgumentError("bad_shape", path, "expected (N, ...), found a 0-d tensor")
        return int(column.shape[0])
    found = type(column).__name__
    if isinstance(column, np.ndarray):
        found = f"an array of dtype {column.dtype} and shape {column.shape}"
    elif isinstance(column, torch.Tensor):
        found = f"a {'nested' if column.is_nested else ''} tensor of layout {column.layout}"
    raise ArgumentTypeError(
        "bad_type",
        path,
        f"expected a tensor or an (N,) object array, found {found}; {_REMEDY}",
    )


def leaves_of(columns: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Checked columns to leaves: lists of N objects, jagged `Parts` or `Strip`s, other tensors."""
    # Equal rows are one raggedness, whether a column was packed here or came in jagged.
    groups = RaggedGroups()
    leaves: dict[str, Any] = {}
    columns = list(columns)
    parts = iter(packed(column for _, column in columns if isinstance(column, Strip)))
    for name, column in columns:
        if isinstance(column, Strip):
            copied = next(parts)
            leaves[name] = groups.of_lengths(copied.lengths).jagged(copied.values)
        elif isinstance(column, list):
            leaves[name] = leaf_of_rows(column)
        elif isinstance(column, Parts):
            raggedness = groups.of_lengths(column.lengths)
            leaves[name] = raggedness.jagged(compact_values(column), column.ragged_dim)
        else:
            leaves[name] = column
    return leaves
