"""`cells_of_rows`: the rows of one column as cells, exactly or with an error.

Rows of `encode_rows` and chunks of a `RowBuilder` have this one rule. Most columns have rows of one
type, which a quick maker reads. The general rule follows: lists of numbers, arrays and tensors,
lists of arrays, and rows of several kinds.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    brief,
    naming_column,
)
from jagcodec.memory.arrays import tensor_type
from jagcodec.produce.number_types import (
    PYTHON_TYPES,
    LocatedItem,
    dtype_of_rows,
    dtype_of_types,
    two_dtypes,
    type_of_item,
    types_of_items,
)
from jagcodec.produce.numbers import cast_array, cell_numbers, cells_of_python, fill_cells, place_of
from jagcodec.produce.row_kinds import (
    ARRAY_ROW,
    BLANK_ROW,
    DEFAULT_DTYPES,
    FILL_CODES,
    KIND_OF_TYPE,
    MOST_LEVELS,
    NUMBER_DTYPES,
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
    wrong_kind,
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
        return joined_quickly(rows, _ARRAY_ONLY, dim)
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


def joined_quickly(rows: Sequence[Any], types: Set[type], dim: int = 0) -> RowCells | None:
    """Arrays, or tensors, of one dtype and cell shape, end to end; None if the rows differ."""
    if types != _ARRAY_ONLY:
        if types != {tensor_type()} or dim:
            return None
        joined = cells_tensors().joined_at_once(rows)
        if joined is None:
            return None
        values, lengths = joined
        return RowCells(values, lengths, TORCH_NAME_OF_NUMPY[values.dtype])
    dtypes = {row.dtype for row in rows}
    dtype = TORCH_NAME_OF_NUMPY.get(rows[0].dtype)
    if len(dtypes) > 1 or dtype is None:
        return None
    try:
        values = np.concatenate(rows, dim)
    except ValueError:
        return None
    if not values.flags.c_contiguous:
        return None
    lengths = tuple([row.shape[dim] for row in rows] if dim else map(len, rows))
    return RowCells(values, lengths, dtype)


# --- the general rule --------------------------------------------------------------------------


def _cells_or_objects(
    rows: Sequence[Any], dtype: Any, copied: bool, dim: int
) -> RowCells | list[Any]:
    """The general rule of `cells_of_rows`, by which a list of arrays is an object."""
    types: set[Any] = set(map(type, rows))
    if types == {tensor_type()}:
        joined = joined_quickly(rows, types, dim) if dtype is None and len(rows) > 1 else None
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
        values, found = _cells_of_numbers([rows], (len(rows),), dtype, None)
        return RowCells(values, None, found)
    if OBJECT_ROW in kinds:
        if dtype is not None or kinds - {OBJECT_ROW, BLANK_ROW}:
            raise mixed_kinds(rows, dtype)
        return _objects(rows)
    if kinds == {ARRAY_ROW}:
        dtypes = list(map(dtype_name, rows))
        return _cells_of_arrays(rows, list(map(_readable_array, rows)), dtypes, dtype, copied, dim)
    kinds.discard(BLANK_ROW)
    if not kinds and dtype is None and any(map(len, rows)) and first_item(chain(*rows)) is None:
        return list(rows)  # rows of None alone are objects
    if kinds <= {SEQUENCE_ROW}:
        # Iterate: a subclass of list may report another length.
        rows = rows if types <= _LIST_OR_TUPLE else [list(iter(row)) for row in rows]
        if dim:
            return _cells_of_deep_lists(rows, dtype, dim)
        return _cells_of_lists(rows, dtype)
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


# --- lists of numbers --------------------------------------------------------------------------


def _cells_of_lists(rows: Sequence[Any], dtype: str | None) -> RowCells:
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
        bad = _first_unequal_item(flat, shape[-1])
        if bad is not None:
            raise _unequal_lists(rows, flat, shape, *bad, dtype)
        flat, first = [list(chain.from_iterable(row)) for row in flat], first_item(first)
    cell = math.prod(shape)
    sizes = tuple(length * cell for length in lengths) if shape else lengths
    values, found = _cells_of_numbers(flat, sizes, dtype, cell)
    return RowCells(values.reshape(sum(lengths), *shape) if shape else values, lengths, found)


def _cells_of_numbers(
    rows: Sequence[Sequence[Any]], sizes: tuple[int, ...], dtype: str | None, cell: int | None
) -> tuple[Any, str]:
    """`fill_cells`, and the dtype: that of the numbers if none is given."""
    if dtype is None:
        made = cells_of_python(rows)
        if made is not None and made.lengths == sizes:
            return made.data, made.dtype
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
            return np.stack([_readable_array(item) for item in on_host]), dtype
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
    """The error for an item that is not a list like the others."""
    item, cell = flat[row][index], index // math.prod(shape[:-1])
    before = [*rows[:row], rows[row][:cell]]
    if any(map(len, before)):
        _cells_of_lists(before, dtype)  # raises if an earlier cell does not fit
    place = f", row {row}, cell {cell}"
    if is_array(item):
        return wrong_kind("a number", item, place)
    detail = f"expected inner lists of length {shape[-1]}, found {brief(item)}"
    if item is None:
        return ArgumentTypeError("bad_type", place, detail + OR_OBJECTS)
    if row and index == 0 and _length_of_items(flat[row]):
        detail += _ragged_dim_remedy(len(shape))
    return ArgumentError("bad_shape", place, detail + OR_OBJECTS)


def _length_of_items(row: Sequence[Any]) -> int | None:
    """The length that all items of a row have as lists; None if they differ, or are not lists."""
    sizes = {len(item) if isinstance(item, (list, tuple)) else None for item in row}
    return sizes.pop() if len(sizes) == 1 else None


# --- lists of numbers, with tokens along a later dim -------------------------------------------


def _cells_of_deep_lists(rows: Sequence[Any], dtype: str | None, dim: int) -> RowCells:
    """The cells of lists whose tokens are along their dim `dim`, which is not 0."""
    transposed = [_transposed(row, dim, i) for i, row in enumerate(rows)]
    outer: tuple[int, ...] = ()
    for i, row in enumerate(rows):
        found = _lengths_before_dim(row, dim)
        if outer and found and found != outer:
            detail = (
                f"expected shape {_ragged_shape_text(outer)} like rows before, found {brief(row)}"
            )
            raise ArgumentError("bad_shape", f", row {i}", detail)
        outer = found or outer
    made = _cells_of_lists(transposed, dtype)
    values = made.data
    if not len(values):
        values = values.reshape(*outer, 0)
    else:
        values = np.ascontiguousarray(np.moveaxis(values, 0, dim))
    return RowCells(values, made.lengths, made.dtype)


def _transposed(row: Any, dim: int, i: int) -> Sequence[Any]:
    """Row `i`, nested lists, with its dim `dim` moved to the front."""
    if isinstance(row, (list, tuple)):
        items = [_transposed(item, dim - 1, i) for item in row] if dim else row
        if not dim or len(set(map(len, items))) < 2:
            return list(map(list, zip(*items, strict=True))) if dim else row
    detail = f"expected lists of one length, in which the tokens are, found {brief(row)}"
    if row is None:
        raise ArgumentTypeError("bad_type", f", row {i}", detail + OR_OBJECTS)
    raise ArgumentError("bad_shape", f", row {i}", detail)


def _lengths_before_dim(row: Any, dim: int) -> tuple[int, ...]:
    """How many items nested lists have in each dim before `dim`; () for an empty list."""
    sizes = []
    for _ in range(dim if len(row) else 0):
        sizes.append(len(row))
        row = row[0] if len(row) else row
    return tuple(sizes)


# --- arrays and tensors ------------------------------------------------------------------------


def _cells_of_arrays(
    rows: Sequence[Any],
    parts: Sequence[Any],  # a `_readable_array` of each row
    dtypes: Sequence[str],  # of the rows
    dtype: str | None,
    copied: bool,
    dim: int,
) -> RowCells:
    """The cells of arrays and tensors, which are joined and then cast together."""
    if dtype is not None and len(set(dtypes)) > 1:
        return _cells_of_mixed_rows(rows, dtype, dim)
    joined = _joined_cells(parts, dtypes, copied, dim)
    return joined if dtype in (None, joined.dtype) else _cast_cells(joined, dtype, dim)


def _readable_array(row: Any) -> Any:
    """An array of `STORED_DTYPES`, or a tensor that is on a device, with the same cells."""
    if isinstance(row, tensor_type()):
        return cells_tensors().array_of_tensor(row)
    array = np.asarray(row, dtype=row.dtype.newbyteorder("="))
    return array if array.dtype in TORCH_NAME_OF_NUMPY else np.array(array)


def _joined_cells(parts: Sequence[Any], dtypes: Sequence[str], copied: bool, dim: int) -> RowCells:
    """Arrays, or tensors, of one dtype and cell shape, end to end along `dim`."""
    if len(parts) > 1 and len(set(map(type, parts))) > 1:
        parts = list(map(cells_tensors().tensor_of, parts, dtypes))
    first = parts[0]
    is_array = type(first) is np.ndarray
    if not first.ndim:
        _check_same_cells(parts, dtypes, dim)
        return RowCells(np.array(parts) if is_array else _joined(parts, 0), None, dtypes[0])
    if first.ndim <= dim:
        detail = (
            f"expected {dim + 1} dims or more, of which dim {dim} is the tokens, "
            f"found shape {tuple(first.shape)}"
        )
        raise ArgumentError("bad_shape", ", row 0", detail)
    values: Any = first
    if len(parts) > 1:
        values = _concatenated(parts, dtypes, dim)
    elif copied:
        values = first.copy() if is_array else _joined(parts, 0)
    if is_array and not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    return RowCells(values, tuple([part.shape[dim] for part in parts]), dtypes[0])


def _concatenated(parts: Sequence[Any], dtypes: Sequence[str], dim: int) -> Any:
    """Parts end to end along a dim; an error if their cells differ."""
    if type(parts[0]) is np.ndarray and len(set(dtypes)) == 1:
        # Numpy compares the shapes faster than the loop below.
        with contextlib.suppress(ValueError):
            return np.concatenate(parts, dim)
    _check_same_cells(parts, dtypes, dim)
    return _joined(parts, dim)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    """Arrays, or tensors, end to end along a dim."""
    if type(parts[0]) is np.ndarray:
        return np.concatenate(parts, dim)
    return cells_tensors().joined_tensors(parts, dim)


def _cast_cells(found: RowCells, dtype: str, dim: int) -> RowCells:
    """The numbers as cells of another dtype, floats rounded; an error if one does not fit."""
    values, lengths, before = found.data, found.lengths, found.dtype
    are_numbers = dtype in FILL_CODES and before in NUMBER_DTYPES
    if not are_numbers or "bool" in (dtype, before):
        detail = f"expected torch.{dtype}, found torch.{before}; convert the rows{OR_OBJECTS}"
        raise ArgumentTypeError("bad_dtype", ", row 0", detail)
    numbers = cell_numbers(values, before)
    cells: Any = cast_array(numbers, dtype)
    if cells is None:  # let the rule for lists name the first misfit
        if lengths is not None:
            numbers = np.moveaxis(numbers, dim, 0)
        flat, cell = numbers.reshape(-1).tolist(), math.prod(numbers.shape[1:])
        sizes = (len(flat),) if lengths is None else tuple(n * cell for n in lengths)
        ends = np.cumsum(sizes).tolist()
        rows = [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        cells = fill_cells(rows, sizes, dtype, None if lengths is None else cell)
    if not isinstance(values, np.ndarray):
        cells = cells_tensors().on_device_of(cells, dtype, values)
    return RowCells(cells.reshape(values.shape), lengths, dtype)


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
    joined = joined_quickly(items, set(map(type, items)))
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
    return _joined_cells(parts, [model.dtype] * len(parts), False, dim)


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


def _check_same_cells(parts: Sequence[Any], dtypes: Sequence[str], dim: int) -> None:
    """Refuse rows that differ in dtype, in device, or in the shape of their cells."""
    first = parts[0]
    ndim, shape, outer = first.ndim, first.shape[dim + 1 :], first.shape[:dim]
    is_array = isinstance(first, np.ndarray)
    for i, dtype in enumerate(dtypes):  # before shapes: a column has one dtype in any order of rows
        if dtype != dtypes[0]:
            raise two_dtypes(dtypes[0], dtype, ", row 0", f", row {i}")
    for i, part in enumerate(parts):
        found = part.shape
        if part.ndim != ndim or found[dim + 1 :] != shape or (dim and found[:dim] != outer):
            expected = _ragged_shape_text(outer, shape) if ndim else "()"
            detail = f"expected shape {expected} like row 0, found {tuple(found)}"
            differs = [d for d in range(ndim) if part.ndim == ndim and found[d] != first.shape[d]]
            hint = _ragged_dim_remedy(differs[0]) if len(differs) == 1 else ""
            raise ArgumentError("bad_shape", f", row {i}", detail + hint + OR_OBJECTS)
        if not is_array and part.device != first.device:
            detail = (
                f"expected device {first.device} like row 0, found {part.device}; "
                "move it with .to()"
            )
            raise ArgumentError("bad_dtype", f", row {i}", detail)


def _ragged_dim_remedy(dim: int) -> str:
    return f"; if dim {dim} of a row is its tokens, pass ragged_dims={{...: {dim + 1}}}"


def _ragged_shape_text(outer: Sequence[int], inner: Sequence[int] = ()) -> str:
    """The shape of rows as text, with "tokens" for the dim that differs."""
    return f"({', '.join(map(str, (*outer, 'tokens', *inner)))})"
