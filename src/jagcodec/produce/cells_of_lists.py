"""Lists of numbers, or of lists of equal lengths of numbers, as cells.

`cells_of_lists` is for lists whose tokens are their items; `cells_of_deep_lists` for lists whose
tokens are along a later dim. `cells` calls them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    brief,
)
from jagcodec.memory.arrays import tensor_type
from jagcodec.produce.cell_dtypes import FILL_CODES, STORED_DTYPES
from jagcodec.produce.cells_of_arrays import ragged_dim_remedy, ragged_shape_text, readable_array
from jagcodec.produce.number_types import (
    LocatedItem,
    dtype_of_types,
    type_of_item,
    types_of_items,
)
from jagcodec.produce.numbers import cells_of_python, fill_cells, place_of
from jagcodec.produce.row_kinds import OR_OBJECTS, first_item, is_array, wrong_kind
from jagcodec.wire.items import RowCells


def cells_of_lists(rows: Sequence[Any], dtype: str | None) -> RowCells:
    """Lists and tuples of numbers, or of lists of equal lengths of numbers."""
    lengths = tuple(map(len, rows))
    first = first_item(chain.from_iterable(rows))
    if not any(lengths):
        if dtype is None:
            detail = "expected a number in some row, found none; pass dtypes={...: their dtype}"
            raise ArgumentError("bad_dtype", "", detail)
        return RowCells(np.empty(0, dtype=STORED_DTYPES[dtype]), lengths, dtype)
    shape: tuple[int, ...] = ()
    flat = rows
    while isinstance(first, (list, tuple)):
        shape = (*shape, len(first))
        place = _first_unequal_item(flat, shape[-1])
        if place is not None:
            raise _unequal_lists(rows, flat, shape, *place, dtype)
        flat, first = [list(chain.from_iterable(row)) for row in flat], first_item(first)
    cell = math.prod(shape)
    sizes = tuple(length * cell for length in lengths) if shape else lengths
    values, cell_dtype = cells_of_numbers(flat, sizes, dtype, cell)
    if shape:
        values = values.reshape(sum(lengths), *shape)
    return RowCells(values, lengths, cell_dtype)


def cells_of_numbers(
    rows: Sequence[Sequence[Any]], sizes: tuple[int, ...], dtype: str | None, cell: int | None
) -> tuple[Any, str]:
    """`fill_cells`, and the dtype: that of the numbers if none is given."""
    if dtype is None:
        cells = cells_of_python(rows)
        if cells is not None and cells.lengths == sizes:
            return cells.data, cells.dtype
        located = (
            LocatedItem(place_of(i, at, cell), type_of_item(item), item)
            for i, row in enumerate(rows)
            for at, item in enumerate(row)
        )
        types = types_of_items(list(chain.from_iterable(rows)))
        dtype = dtype_of_types(types, lambda: located)
    if dtype not in FILL_CODES:
        items = list(chain.from_iterable(rows))
        if set(map(type_of_item, items)) == {dtype}:  # such as float8
            on_host = [x.cpu() if isinstance(x, tensor_type()) else x for x in items]
            return np.stack([readable_array(item) for item in on_host]), dtype
    return fill_cells(rows, sizes, dtype, cell), dtype


def _first_unequal_item(rows: Sequence[Any], size: int) -> tuple[int, int] | None:
    """The row and index of the first item that is not a list of this size; 0 fits no item."""
    for i, row in enumerate(rows):
        for j, item in enumerate(row):
            if not isinstance(item, (list, tuple)) or len(item) != size or not size:
                return i, j
    return None


def _unequal_lists(
    rows: Sequence[Any],
    flat: Sequence[Any],  # the rows, flattened as far as their lists have equal lengths
    shape: tuple[int, ...],
    row: int,
    index: int,
    dtype: str | None,
) -> JagcodecError:
    """The error for an item that is not a list like the others; or raises that of a cell before."""
    item, cell = flat[row][index], index // math.prod(shape[:-1])
    before = [*rows[:row], rows[row][:cell]]
    if any(map(len, before)):
        cells_of_lists(before, dtype)  # raises if an earlier cell does not fit
    place = f", row {row}, cell {cell}"
    if is_array(item):
        return wrong_kind("a number", item, place)
    detail = f"expected inner lists of length {shape[-1]}, found {brief(item)}"
    if item is None:
        return ArgumentTypeError("bad_type", place, detail + OR_OBJECTS)
    if row and index == 0 and _length_of_items(flat[row]):
        detail += ragged_dim_remedy(len(shape))
    return ArgumentError("bad_shape", place, detail + OR_OBJECTS)


def _length_of_items(row: Sequence[Any]) -> int | None:
    """The length that all items of a row have as lists; None if they differ, or are not lists."""
    sizes = {len(item) if isinstance(item, (list, tuple)) else None for item in row}
    return sizes.pop() if len(sizes) == 1 else None


# --- with tokens along a later dim -------------------------------------------------------------


def cells_of_deep_lists(rows: Sequence[Any], dtype: str | None, token_dim: int) -> RowCells:
    """The cells of lists whose tokens are along their dim `token_dim`, which is not 0."""
    transposed = [_transposed(row, token_dim, i) for i, row in enumerate(rows)]
    outer: tuple[int, ...] = ()
    for i, row in enumerate(rows):
        lengths = _lengths_before_dim(row, token_dim)
        if outer and lengths and lengths != outer:
            detail = (
                f"expected shape {ragged_shape_text(outer)} like rows before, found {brief(row)}"
            )
            raise ArgumentError("bad_shape", f", row {i}", detail)
        outer = lengths or outer
    cells = cells_of_lists(transposed, dtype)
    values = cells.data
    if not len(values):
        values = values.reshape(*outer, 0)
    else:
        values = np.ascontiguousarray(np.moveaxis(values, 0, token_dim))
    return RowCells(values, cells.lengths, cells.dtype)


def _transposed(row: Any, token_dim: int, i: int) -> Sequence[Any]:
    """Row `i`, or a list in it, as nested lists with the dim of tokens moved to the front.

    `token_dim` counts from the dim of `row`.
    """
    if isinstance(row, (list, tuple)):
        if not token_dim:
            return row
        items = [_transposed(item, token_dim - 1, i) for item in row]
        if len(set(map(len, items))) < 2:
            return list(map(list, zip(*items, strict=True)))
    detail = f"expected lists of one length, in which the tokens are, found {brief(row)}"
    if row is None:
        raise ArgumentTypeError("bad_type", f", row {i}", detail + OR_OBJECTS)
    raise ArgumentError("bad_shape", f", row {i}", detail)


def _lengths_before_dim(row: Any, token_dim: int) -> tuple[int, ...]:
    """How many items nested lists have in each dim before `token_dim`; () for an empty list."""
    sizes = []
    for _ in range(token_dim if len(row) else 0):
        sizes.append(len(row))
        row = row[0] if len(row) else row
    return tuple(sizes)
