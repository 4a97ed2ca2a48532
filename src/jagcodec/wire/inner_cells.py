"""What `WireBatch.inner` takes: cells along inner dims of columns, checked and composed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec._arguments import known_names
from jagcodec.errors import (
    ArgumentError,
    ArgumentIndexError,
    ArgumentTypeError,
    brief,
    describe,
)
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.inner_dims import pick
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.row_index import Chosen, choose_rows
from jagcodec.ragged.row_splits import RowSplitsPool

_WHERE = "WireBatch.inner"

Picked: TypeAlias = "Mapping[int, Chosen]"
"""Cells chosen along inner dims of a column, by the dim."""

NO_CELLS: Mapping[str, Picked] = {}
"""Of columns of which all cells are wanted."""


def listed_names(cells: Any, columns: Iterable[str]) -> list[str]:
    """The columns that an argument names.

    Raises:
        ArgumentKeyError: One of them is not a column.
        ArgumentTypeError: It is not a mapping.
    """
    if not isinstance(cells, Mapping):
        raise ArgumentTypeError(
            "bad_type",
            f"{_WHERE}(cells)",
            "expected a mapping of names of columns to (dim, which cells along it), found "
            f"{describe(cells)}",
        )
    return known_names(cells, columns, _WHERE)


def picked_cells(
    cells: Mapping[str, Any], schemas: Mapping[str, Any]
) -> dict[str, tuple[int, Chosen]]:
    """The dim and the chosen cells of each column, whose `FieldSchema`s are these.

    Raises:
        ArgumentError: A column has no such dim that is the same in all rows.
        ArgumentIndexError: There is no such cell.
        ArgumentTypeError: It is no pair, or the index is of no such type.
    """
    return {name: _picked(name, cells[name], schema) for name, schema in schemas.items()}


def _picked(name: str, pair: Any, schema: Any) -> tuple[int, Chosen]:
    where = f"{_WHERE}({brief(name)})"
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or type(pair[0]) is not int:
        raise ArgumentTypeError(
            "bad_type",
            where,
            "expected a pair of a dim and which cells along it, such as (1, slice(0, 4)), found "
            f"{describe(pair)}",
        )
    dim, index = pair
    # Those of one row; dim 0 is its tokens.
    dims = () if schema.shape is None else schema.shape[1:]
    inner = [at for at, extent in enumerate(dims) if at > 0 and extent is not None]
    if dim not in inner:
        listed = ", ".join(map(str, inner))
        expected = f"one of the inner dims {listed}" if inner else "a column with inner dims"
        shown = f"a {schema.kind} column" + (f" of rows {dims}" if dims else "")
        raise ArgumentError("bad_shape", where, f"expected {expected}, found dim {dim} of {shown}")
    extent = dims[dim]
    try:
        return dim, choose_rows(index, extent, where)
    except ArgumentIndexError as error:
        raise ArgumentIndexError(
            error.reason, where, f"of dim {dim}: {error.detail.replace('rows', 'cells')}"
        ) from error
    except ArgumentTypeError as error:
        raise ArgumentTypeError(error.reason, where, f"of dim {dim}: {error.detail}") from error


def then_picked(picked: Picked, dim: int, chosen: Chosen) -> dict[int, Chosen]:
    """Cells chosen of those that were chosen before."""
    known = picked.get(dim)
    if known is None:
        composed = chosen
    elif isinstance(chosen, range):
        composed = known[chosen.start : chosen.stop]
    else:
        composed = np.asarray(known, dtype=np.int64)[chosen]
    return {**picked, dim: composed}


def as_index(chosen: Chosen) -> Any:
    """Chosen cells as `WireBatch.inner` takes them."""
    return slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen


def pick_of_leaf(leaf: torch.Tensor, picked: Picked | None) -> torch.Tensor:
    """A tensor or a nested one with only the chosen cells of inner dims, in memory of its own."""
    if not picked:
        return leaf
    if not is_jagged(leaf):
        for dim, chosen in picked.items():
            leaf = pick(leaf, dim + 1, chosen)
        return contiguous_bits(leaf)
    view = view_of(leaf, _WHERE, RowSplitsPool())
    values = values_of(view)
    for dim, chosen in picked.items():
        values = pick(values, dim, chosen)
    return nested_tensor(contiguous_bits(values), view.row_splits, view.ragged_dim)
