"""`cells_of_rows`: the rows of one column as cells, exactly or with an error.

Rows of `encode_rows` and chunks of a `RowBuilder` have this one rule. Most columns have rows of one
type, which a quick maker reads. The general rule follows, for rows of one kind; then lists of
arrays, which become arrays, and rows of several kinds, which are cast one by one. `cells_of_lists`
and `cells_of_arrays` make the cells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from jagcodec.errors import (
    ArgumentError,
    JagcodecError,
    with_name_in_remedy,
)
from jagcodec.memory.arrays import tensor_type
from jagcodec.produce.cell_dtypes import DEFAULT_DTYPES, STORED_DTYPES
from jagcodec.produce.cells_of_arrays import cast_cells, join_arrays, join_quickly, readable_array
from jagcodec.produce.cells_of_lists import cells_of_deep_lists, cells_of_lists, cells_of_numbers
from jagcodec.produce.number_types import (
    PYTHON_TYPES,
    dtype_of_rows,
)
from jagcodec.produce.numbers import cells_of_python
from jagcodec.produce.row_kinds import (
    ARRAY_ROW,
    BLANK_ROW,
    KIND_OF_TYPE,
    MOST_LEVELS,
    NUMBER_ROW,
    OBJECT_ROW,
    OBJECT_TYPES,
    OR_OBJECTS,
    SEQUENCE_ROW,
    RowKind,
    cells_tensors,
    dtype_name,
    first_item,
    has_dtype,
    is_array,
    items_of_list,
    kind_of_row,
    mixed_kinds,
    none_among_numbers,
)
from jagcodec.wire.dtypes import TORCH_NAME_OF_NUMPY
from jagcodec.wire.items import RowCells

_ITEMS_OF_OBJECTS: list[set[Any]] = [{dict}, {str}]  # lists of dicts, or of strings, are objects
_ARRAY_ONLY, _LIST_OR_TUPLE = {np.ndarray}, {list, tuple}
_PLAIN_TYPES = KIND_OF_TYPE.keys() | _LIST_OR_TUPLE | _ARRAY_ONLY


def cells_of_rows(
    rows: Sequence[Any], dtype: Any = None, *, copied: bool = True, token_dim: int = 0
) -> RowCells | list[Any]:
    """The cells of N rows (N is 1 or more), or a list of the rows if they are objects.

    With `copied`, the cells do not alias the rows. `token_dim` is the dim of a row along which its
    tokens are: one less than the ragged dim of the column. With a `dtype`, a row may be a list of
    arrays, one per token.
    """
    if dtype is object:
        return _objects(rows)
    make = _QUICK_MAKERS.get(type(rows[0]))
    if make is not None and (len(rows) == 1 or len(set(map(type, rows))) == 1):
        column = make(rows, copied, token_dim)
        is_wanted = dtype is None or (isinstance(column, RowCells) and column.dtype == dtype)
        if column is not None and is_wanted:
            return column
    if dtype is None:
        return _general_rule(rows, None, copied, token_dim)
    return _stack_lists_of_arrays(rows, dtype, copied, token_dim, MOST_LEVELS)


def _objects(rows: Sequence[Any]) -> list[Any]:
    """The objects of rows. A `NonTensorData` is among them only if tensordict was imported."""
    if "tensordict" not in sys.modules or _PLAIN_TYPES.issuperset(map(type, rows)):
        return list(rows)
    from jagcodec.rows.non_tensor import payloads_of_rows

    return payloads_of_rows(rows, "")


# --- quick makers for rows of one type ---------------------------------------------------------

_QuickColumn: TypeAlias = RowCells | list[Any] | None
"""What a quick maker returns; None leaves the rows to the general rule."""


def _quick_objects(rows: Sequence[Any], copied: bool, token_dim: int) -> _QuickColumn:
    return list(rows)


def _quick_numbers(rows: Sequence[Any], copied: bool, token_dim: int) -> _QuickColumn:
    cells = cells_of_python((rows,))
    if cells is not None:
        cells.lengths = None  # each number is a row
    return cells


def _quick_lists(rows: Sequence[Any], copied: bool, token_dim: int) -> _QuickColumn:
    if token_dim:
        return None
    first = rows[0][0] if rows[0] else None
    if type(first) is dict and {type(row[0]) for row in rows if row} == {dict}:
        return list(rows)  # such as messages
    return cells_of_python(rows)


def _quick_arrays(rows: Sequence[Any], copied: bool, token_dim: int) -> _QuickColumn:
    if len(rows) > 1:
        return join_quickly(rows, _ARRAY_ONLY, token_dim)
    (row,) = rows
    dtype = TORCH_NAME_OF_NUMPY.get(row.dtype)
    if copied or dtype is None or row.ndim <= token_dim or not row.flags.c_contiguous:
        return None
    return RowCells(row, (row.shape[token_dim],), dtype)


def _quick_cells(rows: Sequence[Any], copied: bool, token_dim: int) -> _QuickColumn:
    """The cells of the only row: a `RowBuilder` passes them."""
    (cells,) = rows
    return cells  # type: ignore[no-any-return]


_QUICK_MAKERS: dict[type, Callable[[Sequence[Any], bool, int], _QuickColumn]] = {
    **dict.fromkeys(OBJECT_TYPES, _quick_objects),
    **dict.fromkeys(PYTHON_TYPES, _quick_numbers),
    list: _quick_lists,
    tuple: _quick_lists,
    np.ndarray: _quick_arrays,
    RowCells: _quick_cells,
}


# --- the general rule --------------------------------------------------------------------------


def _general_rule(
    rows: Sequence[Any], dtype: Any, copied: bool, token_dim: int
) -> RowCells | list[Any]:
    """The general rule of `cells_of_rows`, by which a list of arrays is an object."""
    types: set[Any] = set(map(type, rows))
    if types == {tensor_type()}:
        if dtype is None and len(rows) > 1:
            joined = join_quickly(rows, types, token_dim)
            if joined is not None:
                return joined
        # Read arrays: each attribute of a tensor costs more than making an array of it.
        arrays = cells_tensors().arrays_of_tensors(rows)
        rows, types = (rows, types) if arrays is None else (arrays, _ARRAY_ONLY)
    if types == _ARRAY_ONLY:
        dtypes = [TORCH_NAME_OF_NUMPY.get(row.dtype, "") for row in rows]
        if "" not in dtypes:
            return _join_and_cast(rows, rows, dtypes, dtype, copied, token_dim)
    kinds = _kinds_of(rows, types)
    if kinds == {NUMBER_ROW}:
        values, cell_dtype = cells_of_numbers([rows], (len(rows),), dtype, None)
        return RowCells(values, None, cell_dtype)
    if OBJECT_ROW in kinds:
        if dtype is not None or kinds - {OBJECT_ROW, BLANK_ROW}:
            raise mixed_kinds(rows, dtype)
        return _objects(rows)
    if kinds == {ARRAY_ROW}:
        dtypes = list(map(dtype_name, rows))
        return _join_and_cast(
            rows, list(map(readable_array, rows)), dtypes, dtype, copied, token_dim
        )
    kinds.discard(BLANK_ROW)
    if not kinds and dtype is None and any(map(len, rows)) and first_item(chain(*rows)) is None:
        return list(rows)  # rows of None alone are objects
    if kinds <= {SEQUENCE_ROW}:
        # Iterate: a subclass of list may report another length.
        rows = rows if types <= _LIST_OR_TUPLE else [list(iter(row)) for row in rows]
        if token_dim:
            return cells_of_deep_lists(rows, dtype, token_dim)
        return cells_of_lists(rows, dtype)
    return _cast_each_row(rows, dtype, token_dim)


def _kinds_of(rows: Sequence[Any], types: Set[type]) -> set[RowKind]:
    """The kinds of rows of these types; most columns need no call of `kind_of_row`."""
    if types <= _LIST_OR_TUPLE:
        first = rows[0] or next((row for row in rows if row), (None,))
        if type(first[0]) in DEFAULT_DTYPES:
            return {SEQUENCE_ROW}
        if {type(row[0]) for row in rows if row} in _ITEMS_OF_OBJECTS:
            return {OBJECT_ROW}
    if types <= KIND_OF_TYPE.keys():
        return {KIND_OF_TYPE[row_type] for row_type in types}
    return set(map(kind_of_row, rows))


def _join_and_cast(
    rows: Sequence[Any],
    parts: Sequence[Any],  # a `readable_array` of each row
    dtypes: Sequence[str],  # of the rows
    dtype: str | None,
    copied: bool,
    token_dim: int,
) -> RowCells:
    """The cells of arrays and tensors: joined, then cast together if the caller names a dtype."""
    if dtype is not None and len(set(dtypes)) > 1:
        return _cast_each_row(rows, dtype, token_dim)
    joined = join_arrays(parts, dtypes, copied, token_dim)
    return joined if dtype in (None, joined.dtype) else cast_cells(joined, dtype, token_dim)


# --- lists of arrays ---------------------------------------------------------------------------


def _stack_lists_of_arrays(
    rows: Sequence[Any], dtype: str, copied: bool, token_dim: int, levels: int
) -> RowCells:
    """The cells of rows, of which lists of arrays, and lists of such lists, become arrays."""
    cells: Any
    try:
        cells = _general_rule(rows, dtype, copied, token_dim)
    except JagcodecError:  # look for such lists only here: they are rare
        if not (levels and any(map(_is_list_of_arrays, rows))):
            raise
        stacked = [
            _stack(row, i, dtype, levels - 1) if _is_list_of_arrays(row) else row
            for i, row in enumerate(rows)
        ]
        cells = _general_rule(stacked, dtype, False, token_dim)
    return cells  # type: ignore[no-any-return]


def _is_list_of_arrays(row: Any) -> bool:
    """Whether a row may be a list of arrays; pandas and pyarrow make arrays of objects."""
    for _ in range(MOST_LEVELS):
        items = items_of_list(row)
        if items is None:
            return False
        if type(row) is np.ndarray or any(map(is_array, items)):
            return True
        row = first_item(items)
    return False


def _stack(row: Any, i: int, dtype: str, levels: int) -> Any:
    """Row `i`, a list of arrays of one shape, as one array or tensor with these cells."""
    items: Any = items_of_list(row)
    joined = join_quickly(items, set(map(type, items)))
    if joined is not None:
        return _with_token_dim(joined, f", row {i}")
    if not any(is_array(item) or items_of_list(item) is not None for item in items):
        return items  # an array of objects that are numbers
    shapes = [tuple(x.shape) if has_dtype(x) else None for x in items]
    for j, shape in enumerate(shapes):
        if None not in (shape, shapes[0]) and shape != shapes[0]:
            detail = f"expected shape {shapes[0]} like cell 0, found {shape}{OR_OBJECTS}"
            raise ArgumentError("bad_shape", f", row {i}, cell {j}", detail)
    for j, item in enumerate(items):
        if item is None:  # a cell, not a row, which could be empty
            raise none_among_numbers({dtype}, f", row {i}, cell {j}")
    try:
        cells = _stack_lists_of_arrays(items, dtype, True, 0, levels)
    except JagcodecError as error:
        # What the error calls a row is a cell of row `i`.
        cell = _row_in(error.path)
        place = f", row {i}, cell {cell}" if cell else f", row {i}"
        raise type(error)(error.reason, place, error.detail) from None
    return _with_token_dim(cells, f", row {i}")


def _with_token_dim(cells: RowCells, place: str) -> Any:
    """The cells of the tokens of a row, which have one length, with a dim of tokens in front."""
    values, lengths, dtype = cells.data, cells.lengths, cells.dtype
    if STORED_DTYPES[dtype].name != dtype:  # or its words would be read as numbers
        values = cells_tensors().tensor_of(values, dtype)
    if lengths is None:
        return values
    for j, length in enumerate(lengths):
        if length != lengths[0]:
            detail = f"expected {lengths[0]} items like cell 0, found {length}{OR_OBJECTS}"
            raise ArgumentError("bad_shape", f"{place}, cell {j}", detail)
    shape = (len(lengths), lengths[0], *values.shape[1:])
    try:
        return values.reshape(shape)
    except (ValueError, RuntimeError) as error:  # without cells, a dim may be of any size
        detail = f"expected a shape that an array can have, found {shape}"
        raise ArgumentError("bad_shape", place, detail) from error


# --- rows of several kinds or dtypes -----------------------------------------------------------


def _cast_each_row(rows: Sequence[Any], dtype: str | None, token_dim: int) -> RowCells:
    """Rows of several kinds or dtypes, cast one by one."""
    kinds = list(map(kind_of_row, rows))
    if dtype is None:
        dtype = dtype_of_rows(rows)
    first = next(i for i, kind in enumerate(kinds) if kind != BLANK_ROW)
    model = _cast_row(rows[first], first, dtype, token_dim)
    # A row without tokens, whose other dims fit those of the first row.
    blank = model.data[(slice(None),) * (token_dim if model.lengths else 0) + (slice(0),)]
    parts = []
    for i, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        values = blank
        if kind != BLANK_ROW or len(row):
            cells = _cast_row(row, i, model.dtype, token_dim)
            values = cells.data.reshape(()) if cells.lengths is None else cells.data
        # Lists without numbers do not show the dims after their tokens.
        is_blank = kind == BLANK_ROW and values.shape == blank.shape[: token_dim + 1]
        parts.append(blank if is_blank else values)
    return join_arrays(parts, [model.dtype] * len(parts), False, token_dim)


def _cast_row(row: Any, i: int, dtype: str | None, token_dim: int) -> RowCells:
    """The cells of one row, which errors call row `i`."""
    try:
        cells: Any = _general_rule([row], dtype, True, token_dim)
    except JagcodecError as error:
        place = f", row {i}{_place_in_row_0(error.path)}"
        raise type(error)(error.reason, place, error.detail) from None
    return cells  # type: ignore[no-any-return]


# --- errors ------------------------------------------------------------------------------------


def error_at_column(
    error: JagcodecError, path: str, name: str, *, of_rows: bool = True
) -> JagcodecError:
    """The error of `cells_of_rows` at the `path` of its column; without `of_rows`, of a chunk."""
    place, detail = error.path, error.detail
    if not of_rows:
        place, detail = _place_in_row_0(place), detail.removesuffix(OR_OBJECTS)
    return with_name_in_remedy(type(error)(error.reason, path + place, detail), name)


def _row_in(place: str) -> str:
    """The row that a place names: "2" for ", row 2, cell 5"; empty if it names no row."""
    return place.partition(", row ")[2].partition(",")[0]


def _place_in_row_0(place: str) -> str:
    """What a place names inside row 0: ", cell 5" for ", row 0, cell 5"."""
    return place.removeprefix(", row 0")
