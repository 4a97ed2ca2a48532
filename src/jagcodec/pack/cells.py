"""Rows of one column as cells, exactly or with an error: one rule for rows and chunks."""

from __future__ import annotations

import contextlib
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec import cells
from jagcodec._arguments import ARRAY_TYPES
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError, brief, describe
from jagcodec.memory.plain_types import TENSOR_TYPES, remedy_for, with_remedy
from jagcodec.memory.tensor_bytes import (
    NUMPY_DTYPES,
    cat_bits,
    contiguous_bits,
    number_array,
    plain_array,
    plain_arrays,
)
from jagcodec.ragged.nested import is_jagged
from jagcodec.ragged.non_tensor import payloads_of_rows
from jagcodec.wire.dtypes import TORCH_NAMES
from jagcodec.wire.spec import MAX_NDIM


class RowCells(NamedTuple):
    """The cells of N rows: end to end along the dim of their tokens, or one number per row."""

    values: Any  # an array of `PLAIN_DTYPES`, or a tensor of another dtype; contiguous
    lengths: tuple[int, ...] | None  # tokens per row; None if each row is one number

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of the cells."""
        dtype: torch.dtype = PLAIN_DTYPES.get(self.values.dtype, self.values.dtype)
        return dtype


def misfit(error: JagcodecError, path: str, *, of_rows: bool = True) -> JagcodecError:
    """The error of `cells_of_rows` at the `path` of its column; without `of_rows`, of a chunk."""
    place, detail = error.path, error.detail
    if not of_rows:
        place, detail = place.removeprefix(", row 0"), detail.removesuffix(_OR_OBJECTS)
    return type(error)(error.reason, path + place, detail)


_OR_OBJECTS = "; for a column of Python objects pass dtypes={...: object}"

# How `cells.fill` writes numbers of a dtype: code, stored dtype, and bits of precision. It writes
# float16 and bfloat16 as float32, because torch rounds Python's floats that way.
_CODES: dict[torch.dtype, tuple[str, np.dtype[Any], int]] = {
    getattr(torch, name): (code, np.dtype(name), 0)
    for code, name in zip(
        "?bhiqBHIQ",
        ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
        strict=True,
    )
} | {
    torch.bfloat16: ("f", np.dtype("f"), 8),
    torch.float16: ("f", np.dtype("f"), 11),
    torch.float32: ("f", np.dtype("f"), 24),
    torch.float64: ("d", np.dtype("d"), 53),
}
# Floats of this size or more become infinite in cells that are narrower than what C writes.
_LEAST_INFINITE = {torch.float16: 2.0**16 - 2.0**4, torch.bfloat16: 2.0**128 - 2.0**119}

_DEFAULTS = {bool: torch.bool, int: torch.int64, float: torch.float32}

PLAIN_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in NUMPY_DTYPES.items()}
"""The array dtypes that a column may have, each with torch's dtype for it."""

_IN_TORCH = PLAIN_DTYPES.keys() | set(
    map(np.dtype, ("uint16", "uint32", "uint64", "complex64", "complex128"))
)

# The dtypes of tensors whose cells can be read as Python numbers.
_NUMERIC = _CODES.keys() | {d for d in TORCH_NAMES if str(d).startswith("torch.float8_")}

# The kinds of rows. A row of kind "nothing", empty or of None alone, fits any other kind.
_NUMBER, _SEQUENCE, _NOTHING, _ARRAY, _OBJECT = "number", "sequence", "nothing", "array", "object"
_KINDS: dict[type, str] = {
    **dict.fromkeys(_DEFAULTS, _NUMBER),
    **dict.fromkeys((str, bytes, dict, type(None)), _OBJECT),
}
_DOCUMENTS: list[set[Any]] = [{dict}, {str}]  # lists of dicts, or of strings, are objects
_ARRAYS, _TENSORS, _SEQUENCES = {np.ndarray}, {torch.Tensor}, {list, tuple}


def cells_of_rows(
    rows: Sequence[Any], dtype: Any = None, *, copied: bool = True, dim: int = 0
) -> RowCells | list[Any]:
    """The cells of N rows (N is 1 or more), or a list of the rows if they are objects.

    With `copied`, the cells do not alias the rows. A row has its tokens along its dim `dim`.
    """
    if dtype is object:
        return payloads_of_rows(rows, "")
    types: set[Any] = set(map(type, rows))
    if dtype is None and not dim and len(rows) > 1 and len(types) == 1:
        joined = _joined_at_once(rows, types)
        if joined is not None:
            return joined
    if types == _TENSORS:
        # Read arrays: each attribute of a tensor costs more than making an array of it.
        arrays = plain_arrays(rows)
        if not any(plain is None for plain in arrays):
            rows, types = arrays, _ARRAYS
    # Most columns have rows of one kind: find it without reading every row.
    if types == _ARRAYS and PLAIN_DTYPES.keys() >= {row.dtype for row in rows}:
        return _joined(rows, copied, dim) if dtype is None else _of_arrays(rows, dtype, copied, dim)
    if types <= _SEQUENCES and type(next((row[0] for row in rows if row), None)) in _DEFAULTS:
        kinds = {_SEQUENCE}
    elif types <= _SEQUENCES and {type(row[0]) for row in rows if row} in _DOCUMENTS:
        kinds = {_OBJECT}
    elif types <= _KINDS.keys():
        kinds = {_KINDS[kind] for kind in types}
    else:
        kinds = set(map(_kind, rows))
    if kinds == {_NUMBER}:
        return RowCells(_filled([rows], (len(rows),), dtype, rows[0], None), None)
    if _OBJECT in kinds:
        if dtype is not None or kinds - {_OBJECT, _NOTHING}:
            raise _object_among_numbers(rows, dtype)
        return payloads_of_rows(rows, "")
    if kinds == {_ARRAY}:
        return _of_arrays(list(map(_readable, rows)), dtype, copied, dim)
    kinds.discard(_NOTHING)
    if not kinds and dtype is None and any(map(len, rows)) and _first(chain(*rows)) is None:
        return list(rows)  # all items are None
    if kinds <= {_SEQUENCE}:
        # Iterate: a subclass of list may report another length.
        rows = rows if types <= _SEQUENCES else [list(iter(row)) for row in rows]
        return _of_sequences(rows, dtype) if not dim else _of_turned(rows, dtype, dim)
    return _of_mixed(rows, dtype, dim)


def _joined_at_once(rows: Sequence[Any], types: Set[type]) -> RowCells | None:
    """Arrays, or tensors, of one dtype and cell shape, end to end; None for all other rows."""
    if types == _ARRAYS:
        dtypes, known = {row.dtype for row in rows}, PLAIN_DTYPES.keys()
        join: Callable[..., Any] = np.concatenate
    elif types == _TENSORS:
        dtypes, known = {row.dtype for row in rows}, NUMPY_DTYPES.keys()
        join = _tensors_end_to_end
    else:
        return None
    if len(dtypes) > 1 or not dtypes <= known:
        return None
    try:
        values = join(rows)
    except (ValueError, RuntimeError):
        return None
    if values is None or not values.flags.c_contiguous:
        return None
    lengths = map(len, rows) if types == _ARRAYS or values.ndim > 1 else map(_CELLS, rows)
    return RowCells(values, tuple(lengths))


_CELLS = torch.Tensor.numel  # the length of a 1-dim tensor, eight times as fast as `len`


def _has_cells_here(row: torch.Tensor) -> bool:
    return row.is_cpu and row.data_ptr() != 0


def _tensors_end_to_end(rows: Sequence[Any]) -> npt.NDArray[Any] | None:
    """CPU tensors as one array; None if cells may be missing."""
    # Torch would read memory that was freed, and leave out tensors of shape (0,).
    if not all(map(_has_cells_here, rows)):
        return None
    return plain_array(torch.cat(rows))  # type: ignore[arg-type]


def _kind(row: Any) -> str:
    known = _KINDS.get(type(row))
    if known is not None:
        return known
    if isinstance(row, (list, tuple, range, array)):
        first = row
        for _ in range(MAX_NDIM):  # a list may contain itself
            first = _first(first)
            if first is None:
                return _NOTHING
            if not isinstance(first, (list, tuple)):
                return _OBJECT if plain_number(first) is None else _SEQUENCE
        return _OBJECT
    if isinstance(row, (np.ndarray, np.generic)):
        plain = type(row) in ARRAY_TYPES or isinstance(row, np.generic)
        plain = plain and row.dtype.newbyteorder("=") in _IN_TORCH
    elif isinstance(row, torch.Tensor):
        plain = type(row) in TENSOR_TYPES and row.layout is torch.strided and not row.is_nested
        plain = plain and row.dtype in TORCH_NAMES and not remedy_for(row)
    else:
        return _NUMBER if isinstance(row, (int, float)) else _OBJECT
    return _ARRAY if plain else _OBJECT


def _first(row: Iterable[Any]) -> Any:
    """The first item that is not None: engines put None in place of the first number."""
    return next((item for item in row if item is not None), None)


def plain_number(item: Any) -> Any:
    """The Python number that an item is, or holds; None if it is not a number."""
    if type(item) in _DEFAULTS:
        return item
    try:
        if isinstance(item, (np.generic, np.ndarray, torch.Tensor)):
            if item.ndim or _kind(item) is _OBJECT:
                return None
            if isinstance(item, torch.Tensor) and item.dtype not in _NUMERIC:
                return None
            number = item.item()
            return number if type(number) in _DEFAULTS else None
        return float(item) if isinstance(item, float) else operator.index(item)
    except TypeError:
        return None


def _object_among_numbers(rows: Sequence[Any], dtype: Any) -> ArgumentTypeError:
    """The error for a row that is an object among numbers, or numbers among objects."""
    kinds = [_kind(row) for row in rows]
    first = kinds.index(_OBJECT)
    number = next((i for i, kind in enumerate(kinds) if kind not in (_OBJECT, _NOTHING)), first)
    if dtype is not None or number < first or rows[first] is None:
        return _other_kind("numbers", rows[first], f", row {first}")
    expected = f"an object, as {type(rows[first]).__name__} in row {first}"
    return _other_kind(expected, rows[number], f", row {number}")


def _other_kind(expected: str, item: Any, place: str) -> ArgumentTypeError:
    detail = f"expected {expected}, found {described(item)}"
    if item is None:
        other = "a bool" if expected == "bools" else "a number"
        detail = f"expected {other}, found None; put {other} in its place, such as "
        detail += "False" if expected == "bools" else "float('nan')"
    return ArgumentTypeError("bad_type", place, detail + _OR_OBJECTS)


def described(item: Any) -> str:
    """A short description of a row or an item."""
    if isinstance(item, (np.ndarray, torch.Tensor)) and not is_jagged(item):
        found = with_remedy(item)
        if found:
            return found
    if isinstance(item, np.ndarray):
        return f"an array of dtype {item.dtype}"
    return describe(item) if isinstance(item, torch.Tensor) else brief(item)


# --- numbers -----------------------------------------------------------------------------------


def _of_sequences(rows: Sequence[Any], dtype: torch.dtype | None) -> RowCells:
    """Lists and tuples of numbers, or of lists of equal lengths of numbers."""
    lengths = tuple(map(len, rows))
    first = _first(chain.from_iterable(rows))
    if not any(lengths):
        if dtype is None:
            detail = "expected a number in some row, found none; pass dtypes={...: their dtype}"
            raise ArgumentError("bad_dtype", "", detail)
        return RowCells(torch.empty(0, dtype=dtype), lengths)
    shape: tuple[int, ...] = ()
    flat = rows
    while isinstance(first, (list, tuple)):
        shape = (*shape, len(first))
        bad = _first_unequal(flat, shape[-1])
        if bad is not None:
            raise _unequal(rows, flat, shape, *bad, dtype)
        flat, first = [list(chain.from_iterable(row)) for row in flat], _first(first)
    cell = math.prod(shape)
    sizes = tuple(length * cell for length in lengths) if shape else lengths
    values = _filled(flat, sizes, dtype, first, cell)
    return RowCells(values.reshape(sum(lengths), *shape) if shape else values, lengths)


def _first_unequal(rows: Sequence[Any], size: int) -> tuple[int, int] | None:
    """The row and index of the first item that is not a list of this size; 0 fits no item."""
    for i, row in enumerate(rows):
        for j, item in enumerate(row):
            if not isinstance(item, (list, tuple)) or len(item) != size or not size:
                return i, j
    return None


def _unequal(
    rows: Sequence[Any],
    flat: Sequence[Any],  # the rows, flattened as far as their lists have equal lengths
    shape: tuple[int, ...],
    row: int,
    index: int,
    dtype: torch.dtype | None,
) -> JagcodecError:
    """The error for an item that is not a list like the others."""
    item, cell = flat[row][index], index // math.prod(shape[:-1])
    before = [*rows[:row], rows[row][:cell]]
    if any(map(len, before)):
        _of_sequences(before, dtype)  # raises if an earlier cell does not fit
    place = f", row {row}, cell {cell}"
    if item is None:
        return _other_kind("a number", None, place)
    detail = f"expected inner lists of length {shape[-1]}, found {brief(item)}"
    if row and index == 0 and _size_of_items(flat[row]):
        detail += _tokens_along(len(shape))
    return ArgumentError("bad_shape", place, detail + _OR_OBJECTS)


def _size_of_items(row: Sequence[Any]) -> int | None:
    """The length that all items of a row have as lists; None if they differ, or are not lists."""
    sizes = {len(item) if isinstance(item, (list, tuple)) else None for item in row}
    return sizes.pop() if len(sizes) == 1 else None


def _tokens_along(dim: int) -> str:
    return f"; if dim {dim} of a row is its tokens, pass ragged_dims={{...: {dim + 1}}}"


def _of_turned(rows: Sequence[Any], dtype: torch.dtype | None, dim: int) -> RowCells:
    """The cells of lists whose tokens are along their dim `dim`, which is not 0."""
    turned = [_turned(row, dim, i) for i, row in enumerate(rows)]
    outer: tuple[int, ...] = ()
    for i, row in enumerate(rows):
        found = _sizes_before(row, dim)
        if outer and found and found != outer:
            detail = f"expected shape {_with_tokens(outer)} like rows before, found {brief(row)}"
            raise ArgumentError("bad_shape", f", row {i}", detail)
        outer = found or outer
    made = _of_sequences(turned, dtype)
    values: Any = made.values
    if not len(values):
        values = values.reshape(*outer, 0)
    elif isinstance(values, torch.Tensor):
        values = contiguous_bits(values.movedim(0, dim))
    else:
        values = np.ascontiguousarray(np.moveaxis(values, 0, dim))
    return RowCells(values, made.lengths)


def _turned(row: Any, dim: int, i: int) -> Sequence[Any]:
    """Row `i`, nested lists, with its dim `dim` moved to the front."""
    if isinstance(row, (list, tuple)):
        items = [_turned(item, dim - 1, i) for item in row] if dim else row
        if not dim or len(set(map(len, items))) < 2:
            return list(map(list, zip(*items, strict=True))) if dim else row
    if row is None:
        raise _other_kind("a number", None, f", row {i}")
    detail = f"expected lists of one length, in which the tokens are, found {brief(row)}"
    raise ArgumentError("bad_shape", f", row {i}", detail)


def _sizes_before(row: Any, dim: int) -> tuple[int, ...]:
    """How many items nested lists have in each dim before `dim`; () for an empty list."""
    sizes = []
    for _ in range(dim if len(row) else 0):
        sizes.append(len(row))
        row = row[0] if len(row) else row
    return tuple(sizes)


def _with_tokens(outer: Sequence[int], inner: Sequence[int] = ()) -> str:
    """The shape of rows as text, with "tokens" for the dim that differs."""
    return f"({', '.join(map(str, (*outer, 'tokens', *inner)))})"


class _BadItem(NamedTuple):
    """The first item that is not a cell of a dtype."""

    row: int
    at: int  # its index in the row
    item: Any


def _filled(
    rows: Sequence[Sequence[Any]],
    sizes: tuple[int, ...],  # the lengths of the rows
    dtype: torch.dtype | None,
    first: Any,  # the number that decides the dtype if `dtype` is None
    cell: int | None,  # numbers per cell; None if `rows` is one list with a number per row
) -> Any:
    """The cells of lists and tuples of numbers, end to end."""
    wanted = dtype or _DEFAULTS.get(type(plain_number(first)), torch.float32)
    if wanted not in _CODES:
        detail = f"expected a dtype that Python's numbers can have, found {wanted}; pass tensors"
        raise ArgumentTypeError("bad_dtype", "", detail)
    try:
        values, bad = _written(rows, sizes, wanted)
    except (ValueError, IndexError) as error:  # another thread changes the rows
        raise ArgumentError("row_mismatch", "", str(error)) from error
    if bad is None:
        return _rounded(values, wanted)
    if dtype is None and wanted == torch.int64 and isinstance(plain_number(bad.item), float):
        return _filled(rows, sizes, torch.float32, first, cell)
    place = f", row {bad.row}, cell {bad.at // (cell or 1)}"
    raise _refused(bad.item, wanted, f", row {bad.at}" if cell is None else place)


def _written(
    rows: Sequence[Sequence[Any]], sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[npt.NDArray[Any], _BadItem | None]:
    """The cells that C writes for a dtype, and the first item that does not fit, if any."""
    code, stored, precision = _CODES[dtype]
    lengths = np.array(sizes, dtype=np.int64)
    values = np.empty(sum(sizes), dtype=stored)
    bad = cells.fill(rows, lengths, values, code, precision, plain_number)
    if dtype in _LEAST_INFINITE:
        # C has written the items before the bad one, but some may become infinite.
        before = len(values) if bad is None else int(lengths[: bad[0]].sum()) + bad[1]
        over = _first_overflow(values[:before], values[:before], dtype)
        if over is not None:
            row = int(np.searchsorted(np.cumsum(lengths), over, side="right"))
            bad = row, over - int(lengths[:row].sum())
    return values, None if bad is None else _BadItem(*bad, rows[bad[0]][bad[1]])


def _first_overflow(
    numbers: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: torch.dtype
) -> int | None:
    """The index of the first finite number whose cell is infinite; C writes `stored`."""
    fits = np.abs(stored) < _LEAST_INFINITE.get(dtype, math.inf)
    if fits.all():
        return None
    over = np.flatnonzero(np.isfinite(numbers) & ~fits)
    return int(over[0]) if len(over) else None


def _rounded(stored: npt.NDArray[Any], dtype: torch.dtype) -> Any:
    """The cells of a dtype, given what C writes for it."""
    if dtype in _LEAST_INFINITE:
        cells = torch.from_numpy(stored).to(dtype)
        return cells.numpy() if dtype in NUMPY_DTYPES else cells
    return stored if dtype in NUMPY_DTYPES else torch.from_numpy(stored)


def _refused(item: Any, dtype: torch.dtype, place: str) -> JagcodecError:
    """The error for a number, or another item, that is not a cell of a dtype."""
    number, wanted = plain_number(item), str(dtype).removeprefix("torch.")
    if dtype == torch.bool or isinstance(number, bool) or number is None:
        expected = "bools" if dtype == torch.bool else f"numbers (the column is {wanted})"
        return _other_kind(expected, item, place)
    remedy = _remedy(number, dtype)
    found = f"found {brief(number)}{remedy}"
    if isinstance(number, float) and not dtype.is_floating_point:
        detail = f"expected integers (the column is {wanted}), {found}"
        return ArgumentTypeError("bad_type", place, detail)
    exactly = "" if isinstance(number, float) else " exactly"
    detail = f"expected a number that {wanted} holds{exactly}, {found}"
    return ArgumentError("bad_dtype", place, detail)


def _remedy(number: float, dtype: torch.dtype) -> str:
    """The remedy for a number that the dtype of the column does not hold."""
    floats = dtype.is_floating_point or isinstance(number, float)
    for wider in (torch.float32, torch.float64) if floats else (torch.int64, torch.uint64):
        code, stored, precision = _CODES[wider]
        cell, one = np.empty(1, dtype=stored), np.ones(1, dtype=np.int64)
        if cells.fill([[number]], one, cell, code, precision, plain_number) is None:
            to_floats = isinstance(number, float) and not dtype.is_floating_point
            return _other_cells(wider, "floats" if to_floats else "other cells")
    return _OR_OBJECTS


def _other_cells(dtype: torch.dtype, what: str = "other cells") -> str:
    return f"; for {what} pass dtypes={{...: {dtype}}}{_OR_OBJECTS}"


# --- arrays and tensors ------------------------------------------------------------------------


def _readable(row: Any) -> Any:
    """An array of `PLAIN_DTYPES`, or a tensor of another dtype or device, with the same cells."""
    if isinstance(row, torch.Tensor):
        part = contiguous_bits(row.as_subclass(torch.Tensor))
        array = plain_array(part)
        return part if array is None else array
    array = np.asarray(row, dtype=row.dtype.newbyteorder("="))
    return array if array.dtype in PLAIN_DTYPES else torch.from_numpy(np.array(array))


def _of_arrays(parts: Sequence[Any], dtype: torch.dtype | None, copied: bool, dim: int) -> RowCells:
    """The cells of `_readable` rows, which are joined and then cast together."""
    if len(set(map(type, parts))) > 1:
        parts = [p if isinstance(p, torch.Tensor) else torch.from_numpy(np.array(p)) for p in parts]
    if dtype is not None and any(part.dtype != parts[0].dtype for part in parts):
        return _of_mixed(parts, dtype, dim)
    made = _joined(parts, copied, dim)
    return made if dtype in (None, made.dtype) else _cast(made, dtype, dim)


def _of_mixed(rows: Sequence[Any], dtype: torch.dtype | None, dim: int) -> RowCells:
    """Rows of several kinds or dtypes, cast one by one; the first with a number decides."""
    kinds = list(map(_kind, rows))
    first = next(i for i, kind in enumerate(kinds) if kind is not _NOTHING)
    made = _alone(rows[first], first, dtype, dim)
    # A row without tokens, whose other dims fit those of the first row.
    nothing = made.values[(slice(None),) * (dim if made.lengths else 0) + (slice(0),)]
    parts = []
    for i, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        values = nothing
        if kind is not _NOTHING or len(row):
            cells = _alone(row, i, made.dtype, dim)
            values = cells.values.reshape(()) if cells.lengths is None else cells.values
        # Lists without numbers do not show the dims after their tokens.
        is_nothing = kind is _NOTHING and values.shape == nothing.shape[: dim + 1]
        parts.append(nothing if is_nothing else values)
    return _of_arrays(parts, None, False, dim)


def _alone(row: Any, i: int, dtype: torch.dtype | None, dim: int) -> RowCells:
    try:
        made: Any = cells_of_rows([row], dtype, dim=dim)
    except JagcodecError as error:
        place = f", row {i}{error.path.removeprefix(', row 0')}"
        raise type(error)(error.reason, place, error.detail) from None
    return made  # type: ignore[no-any-return]


def _joined(parts: Sequence[Any], copied: bool, dim: int) -> RowCells:
    """Arrays, or tensors, of one dtype and cell shape, end to end along `dim`."""
    first = parts[0]
    is_array = type(first) is np.ndarray
    if not first.ndim:
        _check_same_cells(parts, dim)
        ones = None if is_array else [part.unsqueeze(0) for part in parts]
        return RowCells(np.array(parts) if ones is None else cat_bits(ones, 0), None)
    if first.ndim <= dim:
        detail = f"expected {dim + 1} dims or more, of which dim {dim} is the tokens, found shape "
        raise ArgumentError("bad_shape", ", row 0", f"{detail}{tuple(first.shape)}")
    values: Any = first
    if len(parts) > 1:
        values = _end_to_end(parts, dim)
    elif copied:
        values = first.copy() if is_array else cat_bits([first], 0)
    if is_array and not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    return RowCells(values, tuple([part.shape[dim] for part in parts]))


def _end_to_end(parts: Sequence[Any], dim: int) -> Any:
    is_array = type(parts[0]) is np.ndarray
    if is_array and len({part.dtype for part in parts}) == 1:
        # Numpy compares the shapes faster than the loop below.
        with contextlib.suppress(ValueError):
            return np.concatenate(parts, dim)
    _check_same_cells(parts, dim)
    return np.concatenate(parts, dim) if is_array else cat_bits(parts, dim)


def _check_same_cells(parts: Sequence[Any], dim: int) -> None:
    """Refuse rows that differ in dtype, in device, or in the shape of their cells."""
    first = parts[0]
    dtype, ndim, shape, outer = first.dtype, first.ndim, first.shape[dim + 1 :], first.shape[:dim]
    is_array = isinstance(first, np.ndarray)
    for i, part in enumerate(parts):
        if part.dtype != dtype:
            both = [PLAIN_DTYPES.get(x.dtype, x.dtype) for x in (first, part)]
            detail = f"expected {both[0]} like row 0, found {both[1]}{_one_dtype(*both)}"
            raise ArgumentTypeError("bad_dtype", f", row {i}", detail)
        found = part.shape
        if part.ndim != ndim or found[dim + 1 :] != shape or (dim and found[:dim] != outer):
            expected = _with_tokens(outer, shape) if ndim else "()"
            detail = f"expected shape {expected} like row 0, found {tuple(found)}"
            differs = [d for d in range(ndim) if part.ndim == ndim and found[d] != first.shape[d]]
            hint = _tokens_along(differs[0]) if len(differs) == 1 else ""
            raise ArgumentError("bad_shape", f", row {i}", detail + hint)
        if not is_array and part.device != first.device:
            detail = f"expected device {first.device} like row 0, found {part.device}"
            raise ArgumentError("bad_dtype", f", row {i}", f"{detail}; move it with .to()")


def _one_dtype(*both: torch.dtype) -> str:
    """The remedy for a column with rows of two dtypes."""
    if torch.bool in both or not _NUMERIC.issuperset(both):
        return f"; convert the rows{_OR_OBJECTS}"
    if any(dtype.is_floating_point for dtype in both):
        return _other_cells(torch.float64)
    signed = [dtype for dtype in both if not str(dtype).startswith("torch.uint")]
    return _other_cells(torch.int64 if signed or torch.uint64 not in both else torch.uint64)


def _cast(made: RowCells, dtype: torch.dtype, dim: int) -> RowCells:
    """The numbers as cells of another dtype, floats rounded; an error if one does not fit."""
    values, lengths = made
    if dtype not in _CODES or made.dtype not in _NUMERIC or torch.bool in (dtype, made.dtype):
        detail = f"expected {dtype}, found {made.dtype}; convert the rows{_OR_OBJECTS}"
        raise ArgumentTypeError("bad_dtype", ", row 0", detail)
    numbers = values if isinstance(values, np.ndarray) else number_array(values)
    cells = _cast_at_once(numbers, dtype)
    if cells is None:  # let the rule for lists name the first misfit
        if lengths is not None:
            numbers = np.moveaxis(numbers, dim, 0)
        flat, cell = numbers.reshape(-1).tolist(), math.prod(numbers.shape[1:])
        sizes = (len(flat),) if lengths is None else tuple(n * cell for n in lengths)
        ends = np.cumsum(sizes).tolist()
        rows = [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        cells = _filled(rows, sizes, dtype, 0, None if lengths is None else cell)
    if isinstance(values, torch.Tensor) and not values.is_cpu:
        cells = torch.as_tensor(cells, device=values.device)
    return RowCells(cells.reshape(values.shape), lengths)


def _cast_at_once(numbers: npt.NDArray[Any], dtype: torch.dtype) -> Any:
    """What the rule for lists makes of these numbers; None if one does not fit."""
    _, stored, precision = _CODES[dtype]
    with np.errstate(all="ignore"):
        cells = numbers.astype(stored)
    if not numbers.size:
        return _rounded(cells, dtype)
    if numbers.dtype.kind == "f":
        fits = stored.kind == "f" and _first_overflow(numbers, cells, dtype) is None
        return _rounded(cells, dtype) if fits else None
    low, high = -(1 << precision), 1 << precision  # all ints between these are exact floats
    if stored.kind != "f":
        low, high = np.iinfo(stored).min, np.iinfo(stored).max
    if low <= numbers.min().item() and numbers.max().item() <= high:
        return _rounded(cells, dtype)
    return _exact_floats(numbers, cells, dtype) if stored.kind == "f" else None


def _exact_floats(numbers: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: torch.dtype) -> Any:
    """Ints as cells of a float dtype; None if one is not exact."""
    cells = _rounded(stored, dtype)
    back, whole = number_array(torch.as_tensor(cells)), np.iinfo(numbers.dtype)
    # A float outside the range of the int dtype cannot be cast back, so it is not exact.
    in_range = whole.min <= back.min().item() and back.max().item() <= whole.max
    return cells if in_range and (back.astype(numbers.dtype) == numbers).all() else None
