"""Rows of one column as cells, exactly or with an error: one rule for rows and chunks."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec import cells
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError, brief, describe
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, cat_bits, contiguous_bits, plain_arrays
from jagcodec.ragged.non_tensor import payloads_of_rows
from jagcodec.wire.dtypes import TORCH_NAMES


class RowCells(NamedTuple):
    """The cells of N rows: end to end, or one number per row."""

    values: Any  # an array of `PLAIN_DTYPES`, or a tensor of another dtype; contiguous
    lengths: tuple[int, ...] | None  # None if each row is one number

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of the cells."""
        dtype: torch.dtype = PLAIN_DTYPES.get(self.values.dtype, self.values.dtype)
        return dtype


def misfit(error: JagcodecError, path: str, *, of_rows: bool = True) -> JagcodecError:
    """An error of `cells_of_rows` for a column at `path`; without `of_rows` for one chunk."""
    place, detail = error.path, error.detail
    if not of_rows:
        place, detail = place.removeprefix(", row 0"), detail.removesuffix(_OBJECTS)
    return type(error)(error.reason, path + place, detail)


_OBJECTS = "; for a column of Python objects pass dtypes={...: object}"
_OTHER_DTYPE = "; for other cells pass dtypes={...: their dtype}"

# How C writes numbers as cells of a dtype, for `cells.fill`: code, stored dtype, and bits
# of precision. float16 and bfloat16 by way of float32, as torch rounds Python's floats.
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
_DEFAULTS = {bool: torch.bool, int: torch.int64, float: torch.float32}

PLAIN_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in NUMPY_DTYPES.items()}
"""The dtypes of arrays that a column may be, and torch's for them."""

_IN_TORCH = PLAIN_DTYPES.keys() | set(
    map(np.dtype, ("uint16", "uint32", "uint64", "complex64", "complex128"))
)

# The kinds of rows. One without a number, empty or with None alone, is of the others' kind.
_NUMBER, _SEQUENCE, _NOTHING, _ARRAY, _OBJECT = "number", "sequence", "nothing", "array", "object"
_KINDS: dict[type, str] = {
    **dict.fromkeys(_DEFAULTS, _NUMBER),
    **dict.fromkeys((str, bytes, dict, type(None)), _OBJECT),
}
_ARRAYS, _TENSORS, _SEQUENCES = {np.ndarray}, {torch.Tensor}, {list, tuple}


def cells_of_rows(
    rows: Sequence[Any], dtype: Any = None, *, own: bool = True
) -> RowCells | list[Any]:
    """The cells of N rows, one or more, or the rows as a list, of objects; `own`: not aliased."""
    if dtype is object:
        return payloads_of_rows(rows, "")
    types: set[Any] = set(map(type, rows))
    if types == _TENSORS:
        # Each attribute of a tensor costs more than making an array of it.
        arrays = plain_arrays(rows)
        if not any(plain is None for plain in arrays):
            rows, types = arrays, _ARRAYS
    # Most columns are of one kind, which shows without reading every row.
    if types == _ARRAYS and dtype is None and PLAIN_DTYPES.keys() >= {row.dtype for row in rows}:
        return _of_arrays(rows, own)
    if types <= _SEQUENCES and type(next((row[0] for row in rows if row), None)) in _DEFAULTS:
        kinds = {_SEQUENCE}
    elif types <= _KINDS.keys():
        kinds = {_KINDS[kind] for kind in types}
    else:
        kinds = set(map(_kind, rows))
    if kinds == {_NUMBER}:
        return RowCells(_filled([rows], (len(rows),), dtype, rows[0], None), None)
    if _OBJECT in kinds:
        if dtype is not None or kinds - {_OBJECT, _NOTHING}:
            raise _odd_row(rows, dtype)
        return payloads_of_rows(rows, "")
    kinds.discard(_NOTHING)
    if not kinds and dtype is None and any(map(len, rows)):
        return list(rows)  # of None
    if kinds <= {_SEQUENCE}:
        return _of_sequences(rows if types <= _SEQUENCES else list(map(list, rows)), dtype)
    return _of_arrays(_as_arrays(rows, dtype), own)


def _kind(row: Any) -> str:
    known = _KINDS.get(type(row))
    if known is not None:
        return known
    if isinstance(row, (list, tuple, range, array)):
        first = _first(row)
        if first is None:
            return _NOTHING
        if isinstance(first, (list, tuple)):
            return _OBJECT if _kind(first) is _OBJECT else _SEQUENCE
        return _OBJECT if plain_number(first) is None else _SEQUENCE
    if isinstance(row, (np.ndarray, np.generic)):
        plain = not isinstance(row, np.ma.MaskedArray)  # whose mask would be lost
        plain = plain and row.dtype.newbyteorder("=") in _IN_TORCH
    elif isinstance(row, torch.Tensor):
        plain = row.layout is torch.strided and not row.is_nested and not row.is_meta
        plain = plain and row.dtype in TORCH_NAMES
    else:
        return _NUMBER if isinstance(row, (int, float)) else _OBJECT
    return _ARRAY if plain else _OBJECT


def _first(row: Iterable[Any]) -> Any:
    """The first item that is not None, which engines put in the place of the first number."""
    return next((item for item in row if item is not None), None)


def plain_number(item: Any) -> Any:
    """The Python number that an item is, or holds; None if it is not a number."""
    if type(item) in _DEFAULTS:
        return item
    try:
        if isinstance(item, (np.generic, np.ndarray, torch.Tensor)):
            number = None if item.ndim or _kind(item) is _OBJECT else item.item()
            return number if type(number) in _DEFAULTS else None
        return float(item) if isinstance(item, float) else operator.index(item)
    except TypeError:
        return None


def _odd_row(rows: Sequence[Any], dtype: Any) -> ArgumentTypeError:
    """The error of a row that is an object among numbers, or the other way round."""
    kinds = [_kind(row) for row in rows]
    odd = kinds.index(_OBJECT)
    number = next((i for i, kind in enumerate(kinds) if kind not in (_OBJECT, _NOTHING)), odd)
    if dtype is not None or number < odd or rows[odd] is None:
        return _other_kind("numbers", rows[odd], f", row {odd}")
    expected = f"an object, as {type(rows[odd]).__name__} in row {odd}"
    return _other_kind(expected, rows[number], f", row {number}")


def _other_kind(expected: str, item: Any, place: str) -> ArgumentTypeError:
    detail = f"expected {expected}, found {described(item)}"
    if item is None:
        detail = "expected a number, found None; put a number in its place, such as float('nan')"
    return ArgumentTypeError("bad_type", place, detail + _OBJECTS)


def described(item: Any) -> str:
    """What a row or an item is, in a few words."""
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
    while isinstance(first, (list, tuple)):
        _check_equal(rows, size := len(first))
        rows = [list(chain.from_iterable(row)) for row in rows]
        shape, first = (*shape, size), _first(first)
    cell = math.prod(shape)
    sizes = tuple(length * cell for length in lengths) if shape else lengths
    values = _filled(rows, sizes, dtype, first, cell)
    return RowCells(values.reshape(sum(lengths), *shape) if shape else values, lengths)


def _check_equal(rows: Sequence[Any], size: int) -> None:
    """Refuse rows of lists that are not all of one length."""
    for i, row in enumerate(rows):
        for j, item in enumerate(row):
            if item is None:
                raise _other_kind("a number", None, f", row {i}, cell {j}")
            if not isinstance(item, (list, tuple)) or len(item) != size or not size:
                detail = f"expected inner lists of length {size}, found {brief(item)}"
                raise ArgumentError("bad_shape", f", row {i}", detail + _OBJECTS)


def _filled(
    rows: Sequence[Sequence[Any]],
    sizes: tuple[int, ...],  # of the rows
    dtype: torch.dtype | None,
    first: Any,  # the number that decides the dtype, if that is None
    cell: int | None,  # numbers per cell; None if `rows` is one list with a number per row
) -> Any:
    """The cells of lists and tuples of numbers, end to end."""
    wanted = dtype or _DEFAULTS.get(type(plain_number(first)), torch.float32)
    if wanted not in _CODES:
        detail = f"expected a dtype that Python's numbers can have, found {wanted}; pass tensors"
        raise ArgumentTypeError("bad_dtype", "", detail)
    code, stored, precision = _CODES[wanted]
    values = np.empty(sum(sizes), dtype=stored)
    lengths = np.array(sizes, dtype=np.int64)
    try:
        bad = cells.fill(rows, lengths, values, code, precision, plain_number)
        if bad is None and stored.itemsize != wanted.itemsize:
            rounded = torch.from_numpy(values).to(wanted)
            over = np.flatnonzero(rounded.isinf().numpy() & np.isfinite(values))
            if not len(over):
                return rounded.numpy() if wanted in NUMPY_DTYPES else rounded
            row = int(np.searchsorted(np.cumsum(lengths), over[0], side="right"))
            bad = row, int(over[0] - lengths[:row].sum())
        if bad is None:
            return values if wanted in NUMPY_DTYPES else torch.from_numpy(values)
        item = rows[bad[0]][bad[1]]
    except (ValueError, IndexError) as error:  # rows that another thread changes
        raise ArgumentError("row_mismatch", "", str(error)) from error
    if dtype is None and wanted == torch.int64 and isinstance(plain_number(item), float):
        return _filled(rows, sizes, torch.float32, first, cell)
    row, at = bad
    place = f", row {at}" if cell is None else f", row {row}, cell {at // (cell or 1)}"
    raise _refused(item, wanted, place)


def _refused(item: Any, dtype: torch.dtype, place: str) -> JagcodecError:
    """Why a number, or something else, is not a cell of a dtype."""
    number, wanted = plain_number(item), str(dtype).removeprefix("torch.")
    if dtype == torch.bool or isinstance(number, bool) or number is None:
        expected = "bools" if dtype == torch.bool else f"numbers (the column is {wanted})"
        return _other_kind(expected, item, place)
    found = f"found {brief(number)}"
    if isinstance(number, float) and not dtype.is_floating_point:
        detail = f"expected integers (the column is {wanted}), {found}; "
        detail += "for floats pass dtypes={...: torch.float32}"
        return ArgumentTypeError("bad_type", place, detail)
    exactly = "" if isinstance(number, float) else " exactly"
    detail = f"expected a number that {wanted} holds{exactly}, {found}{_OTHER_DTYPE}"
    return ArgumentError("bad_dtype", place, detail)


# --- arrays and tensors ------------------------------------------------------------------------


def _of_arrays(parts: Sequence[Any], own: bool) -> RowCells:
    """Arrays, or tensors, one per row."""
    first = parts[0]
    if len(parts) > 1:
        _check_same_cells(parts)
    is_array = type(first) is np.ndarray
    if not first.ndim:
        ones = None if is_array else [part.unsqueeze(0) for part in parts]
        return RowCells(np.array(parts) if ones is None else cat_bits(ones, 0), None)
    lengths = tuple(map(len, parts))
    values: Any = first
    if len(parts) > 1:
        values = np.concatenate(parts) if is_array else cat_bits(parts, 0)
    elif own:
        values = first.copy() if is_array else cat_bits([first], 0)
    if is_array and not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    return RowCells(values, lengths)


def _check_same_cells(parts: Sequence[Any]) -> None:
    """Refuse rows that differ in dtype or in the shape of their cells."""
    first = parts[0]
    dtype, ndim, shape = first.dtype, first.ndim, first.shape[1:]
    for i, part in enumerate(parts):
        if part.dtype != dtype:
            detail = f"expected {dtype} like row 0, found {part.dtype}{_OTHER_DTYPE}"
            raise ArgumentTypeError("bad_dtype", f", row {i}", detail)
        if part.ndim != ndim or part.shape[1:] != shape:
            expected = ", ".join(map(str, ("tokens", *shape) if ndim else ()))
            detail = f"expected shape ({expected}) like row 0, found {tuple(part.shape)}"
            raise ArgumentError("bad_shape", f", row {i}", detail)


def _as_arrays(rows: Sequence[Any], dtype: torch.dtype | None) -> Sequence[Any]:
    """Rows as arrays, or as tensors if numpy lacks a dtype; of mixed kinds, the first decides."""
    kinds = [_kind(row) for row in rows]
    if dtype is None and set(kinds) != {_ARRAY}:
        first = next(i for i, kind in enumerate(kinds) if kind is not _NOTHING)
        dtype = _as_tensor(rows[first], first, None).dtype
    parts = [_as_tensor(row, i, dtype) for i, row in enumerate(rows)]
    arrays = plain_arrays(parts)
    return parts if any(array is None for array in arrays) else arrays


def _as_tensor(row: Any, i: int, dtype: torch.dtype | None) -> torch.Tensor:
    try:
        if isinstance(row, torch.Tensor):
            part = contiguous_bits(row.as_subclass(torch.Tensor))
        elif isinstance(row, (np.ndarray, np.generic)):
            part = torch.from_numpy(np.array(row, dtype=row.dtype.newbyteorder("=")))
        else:
            made: Any = cells_of_rows([row], dtype)
            part = torch.as_tensor(made.values if made.lengths is not None else made.values[0])
        return part if dtype in (None, part.dtype) else _cast(part, dtype)
    except JagcodecError as error:
        raise misfit(error, f", row {i}", of_rows=False) from None


def _cast(part: torch.Tensor, dtype: Any) -> torch.Tensor:
    """The same numbers as cells of another dtype, or an error; floats are rounded."""
    found = part.dtype
    if dtype not in _CODES or found.is_complex or torch.bool in (found, dtype):
        detail = f"expected {dtype}, found {found}{_OTHER_DTYPE}"
        raise ArgumentTypeError("bad_dtype", "", detail)
    if found.is_floating_point and dtype.is_floating_point:
        made = part.to(dtype)
        if not (made.isinf() & part.isfinite()).any():
            return made
    numbers = part.reshape(-1).tolist()
    cell = math.prod(part.shape[1:]) if part.ndim else None
    values = _filled([numbers], (len(numbers),), dtype, 0, cell)
    return torch.as_tensor(values, device=part.device).reshape(part.shape)
