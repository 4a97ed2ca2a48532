"""`cells_of_rows`: the rows of one column as cells, exactly or with an error.

Rows of `encode_rows` and chunks of a `RowBuilder` have this one rule. Most columns have rows of one
type, which a quick maker reads. The general rule follows: lists of numbers, arrays and tensors,
lists of arrays, and rows of several kinds.
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
    naming_column,
)
from jagcodec.memory.arrays import tensor_type
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
    DEFAULT_DTYPES,
    KIND_OF_TYPE,
    MOST_LEVELS,
    NUMBER_ROW,
    OBJECT_ROW,
    OBJECT_TYPES,
    OR_OBJECTS,
    SEQUENCE_ROW,
    STORED_DTYPES,
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
    rows: Sequence[Any], dtype: Any = None, *, copied: bool = True, dim: int = 0
) -> RowCells | list[Any]:
    """The cells of N rows (N is 1 or more), or a list of the rows if they are objects.

    With `copied`, the cells do not alias the rows. A row has its tokens along its dim `dim`. With a
    `dtype`, a row may be a list of arrays, one per token.
    """
    if dtype is object:
        return _objects(rows)
    make = _QUICK_MAKERS.get(type(rows[0]))
    if make is not None and (len(rows) == 1 or len(set(map(type, rows))) == 1):
        made = make(rows, copied, dim)
        is_wanted = dtype is None or (isinstance(made, RowCells) and made.dtype == dtype)
        if made is not None and is_wanted:
            return made
    if dtype is None:
        return _cells_or_objects(rows, None, copied, dim)
    return _cells_with_arrays(rows, dtype, copied, dim, MOST_LEVELS)


def _objects(rows: Sequence[Any]) -> list[Any]:
    """The objects of rows. A `NonTensorData` is among them only if tensordict was imported."""
    if "tensordict" not in sys.modules or _PLAIN_TYPES.issuperset(map(type, rows)):
        return list(rows)
    from jagcodec.rows.non_tensor import payloads_of_rows

    return payloads_of_rows(rows, "")


# --- quick makers for rows of one type ---------------------------------------------------------

_Made: TypeAlias = RowCells | list[Any] | None
"""What a quick maker returns; None leaves the rows to the general rule."""


def _quick_objects(rows: Sequence[Any], copied: bool, dim: int) -> _Made:
    return list(rows)


def _quick_numbers(rows: Sequence[Any], copied: bool, dim: int) -> _Made:
    made = cells_of_python((rows,))
    if made is not None:
        made.lengths = None  # each number is a row
    return made


def _quick_lists(rows: Sequence[Any], copied: bool, dim: int) -> _Made:
    if dim:
        return None
    first = rows[0][0] if rows[0] else None
    if type(first) is dict and {type(row[0]) for row in rows if row} == {dict}:
        return list(rows)  # such as messages
    return cells_of_python(rows)


def _quick_arrays(rows: Sequence[Any], copied: bool, dim: int) -> _Made:
    if len(rows) > 1:
        return join_quickly(rows, _ARRAY_ONLY, dim)
    (row,) = rows
    dtype = TORCH_NAME_OF_NUMPY.get(row.dtype)
    if copied or dtype is None or row.ndim <= dim or not row.flags.c_contiguous:
        return None
    return RowCells(row, (row.shape[dim],), dtype)


def _ready_cells(rows: Sequence[Any], copied: bool, dim: int) -> _Made:
    """The cells of the only row, which are ready: those of a `RowBuilder`."""
    (cells,) = rows
    return cells  # type: ignore[no-any-return]


_QUICK_MAKERS: dict[type, Callable[[Sequence[Any], bool, int], _Made]] = {
    **dict.fromkeys(OBJECT_TYPES, _quick_objects),
    **dict.fromkeys(PYTHON_TYPES, _quick_numbers),
    list: _quick_lists,
    tuple: _quick_lists,
    np.ndarray: _quick_arrays,
    RowCells: _ready_cells,
}


# --- the general rule --------------------------------------------------------------------------


def _cells_or_objects(
    rows: Sequence[Any], dtype: Any, copied: bool, dim: int
) -> RowCells | list[Any]:
    """The general rule of `cells_of_rows`, by which a list of arrays is an object."""
    types: set[Any] = set(map(type, rows))
    if types == {tensor_type()}:
        joined = join_quickly(rows, types, dim) if dtype is None and len(rows) > 1 else None
        if joined is not None:
            return joined
        # Read arrays: each attribute of a tensor costs more than making an array of it.
        arrays = cells_tensors().arrays_of_tensors(rows)
        rows, types = (rows, types) if arrays is None else (arrays, _ARRAY_ONLY)
    if types == _ARRAY_ONLY:
        dtypes = [TORCH_NAME_OF_NUMPY.get(row.dtype, "") for row in rows]
        if "" not in dtypes:
            return _cells_of_arrays(rows, rows, dtypes, dtype, copied, dim)
    kinds = _kinds_of(rows, types)
    if kinds == {NUMBER_ROW}:
        values, found = cells_of_numbers([rows], (len(rows),), dtype, None)
        return RowCells(values, None, found)
    if OBJECT_ROW in kinds:
        if dtype is not None or kinds - {OBJECT_ROW, BLANK_ROW}:
            raise mixed_kinds(rows, dtype)
        return _objects(rows)
    if kinds == {ARRAY_ROW}:
        dtypes = list(map(dtype_name, rows))
        return _cells_of_arrays(rows, list(map(readable_array, rows)), dtypes, dtype, copied, dim)
    kinds.discard(BLANK_ROW)
    if not kinds and dtype is None and any(map(len, rows)) and first_item(chain(*rows)) is None:
        return list(rows)  # rows of None alone are objects
    if kinds <= {SEQUENCE_ROW}:
        # Iterate: a subclass of list may report another length.
        rows = rows if types <= _LIST_OR_TUPLE else [list(iter(row)) for row in rows]
        if dim:
            return cells_of_deep_lists(rows, dtype, dim)
        return cells_of_lists(rows, dtype)
    return _cells_of_mixed_rows(rows, dtype, dim)


def _kinds_of(rows: Sequence[Any], types: Set[type]) -> set[str]:
    """The kinds of rows of these types; most columns need no call of `kind_of_row`."""
    if types <= _LIST_OR_TUPLE:
        first = rows[0] or next((row for row in rows if row), (None,))
        if type(first[0]) in DEFAULT_DTYPES:
            return {SEQUENCE_ROW}
        if {type(row[0]) for row in rows if row} in _ITEMS_OF_OBJECTS:
            return {OBJECT_ROW}
    if types <= KIND_OF_TYPE.keys():
        return {KIND_OF_TYPE[kind] for kind in types}
    return set(map(kind_of_row, rows))


def _cells_of_arrays(
    rows: Sequence[Any],
    parts: Sequence[Any],  # a `readable_array` of each row
    dtypes: Sequence[str],  # of the rows
    dtype: str | None,
    copied: bool,
    dim: int,
) -> RowCells:
    """The cells of arrays and tensors, which are joined and then cast together."""
    if dtype is not None and len(set(dtypes)) > 1:
        return _cells_of_mixed_rows(rows, dtype, dim)
    joined = join_arrays(parts, dtypes, copied, dim)
    return joined if dtype in (None, joined.dtype) else cast_cells(joined, dtype, dim)


# --- lists of arrays ---------------------------------------------------------------------------


def _cells_with_arrays(
    rows: Sequence[Any], dtype: str, copied: bool, dim: int, levels: int
) -> RowCells:
    """The cells of rows of which some may be lists of arrays, or lists of such lists."""
    made: Any
    try:
        made = _cells_or_objects(rows, dtype, copied, dim)
    except JagcodecError:  # look for such lists only here: they are rare
        if not (levels and any(map(_is_list_of_arrays, rows))):
            raise
        stacked = [
            _stacked(row, i, dtype, levels - 1) if _is_list_of_arrays(row) else row
            for i, row in enumerate(rows)
        ]
        made = _cells_or_objects(stacked, dtype, False, dim)
    return made  # type: ignore[no-any-return]


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


def _stacked(row: Any, i: int, dtype: str, levels: int) -> Any:
    """Row `i`, a list of arrays of one shape, as one array or tensor with these cells."""
    items: Any = items_of_list(row)
    joined = join_quickly(items, set(map(type, items)))
    if joined is not None:
        return _split_in_tokens(joined, f", row {i}")
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
        made = _cells_with_arrays(items, dtype, True, 0, levels)
    except JagcodecError as error:
        cell = error.path.partition(", row ")[2].partition(",")[0]
        place = f", row {i}, cell {cell}" if cell else f", row {i}"
        raise type(error)(error.reason, place, error.detail) from None
    return _split_in_tokens(made, f", row {i}")


def _split_in_tokens(made: RowCells, place: str) -> Any:
    """The cells of the tokens of a row, which have one length, with a dim of tokens in front."""
    values, lengths, dtype = made.data, made.lengths, made.dtype
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


def _cells_of_mixed_rows(rows: Sequence[Any], dtype: str | None, dim: int) -> RowCells:
    """Rows of several kinds or dtypes, cast one by one."""
    kinds = list(map(kind_of_row, rows))
    if dtype is None:
        dtype = dtype_of_rows(rows)
    first = next(i for i, kind in enumerate(kinds) if kind is not BLANK_ROW)
    model = _cells_of_row(rows[first], first, dtype, dim)
    # A row without tokens, whose other dims fit those of the first row.
    blank = model.data[(slice(None),) * (dim if model.lengths else 0) + (slice(0),)]
    parts = []
    for i, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        values = blank
        if kind is not BLANK_ROW or len(row):
            cells = _cells_of_row(row, i, model.dtype, dim)
            values = cells.data.reshape(()) if cells.lengths is None else cells.data
        # Lists without numbers do not show the dims after their tokens.
        is_blank = kind is BLANK_ROW and values.shape == blank.shape[: dim + 1]
        parts.append(blank if is_blank else values)
    return join_arrays(parts, [model.dtype] * len(parts), False, dim)


def _cells_of_row(row: Any, i: int, dtype: str | None, dim: int) -> RowCells:
    """The cells of one row, which errors call row `i`."""
    try:
        made: Any = _cells_or_objects([row], dtype, True, dim)
    except JagcodecError as error:
        place = f", row {i}{error.path.removeprefix(', row 0')}"
        raise type(error)(error.reason, place, error.detail) from None
    return made  # type: ignore[no-any-return]


# --- errors ------------------------------------------------------------------------------------


def error_at_column(
    error: JagcodecError, path: str, name: str, *, of_rows: bool = True
) -> JagcodecError:
    """The error of `cells_of_rows` at the `path` of its column; without `of_rows`, of a chunk."""
    place, detail = error.path, error.detail
    if not of_rows:
        place, detail = place.removeprefix(", row 0"), detail.removesuffix(OR_OBJECTS)
    return naming_column(type(error)(error.reason, path + place, detail), name)
