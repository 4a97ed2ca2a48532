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
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    Reason,
    brief,
    describe,
)
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, contiguous_bits, plain_array, plain_arrays
from jagcodec.wire.dtypes import TORCH_NAMES


class Rows(NamedTuple):
    """The cells of N rows.

    Attributes:
        values: An array, or a tensor if numpy does not have the dtype; contiguous. (total, ...)
            with all rows end to end, or (N,) if each row is one number.
        lengths: How long the rows are; None if each is one number.
    """

    values: Any
    lengths: tuple[int, ...] | None


class MisfitError(Exception):
    """Rows that do not become cells. The caller knows the column's name, and makes an error of it.

    Attributes:
        row: Which row; None if it is the column as a whole.
    """

    def __init__(
        self,
        kind: type[JagcodecError],
        reason: Reason,
        detail: str,
        remedy: tuple[str, str] | None = None,
        *,
        row: int | None = None,
        cell: int | None = None,
    ) -> None:
        """`remedy` is which columns need a choice of dtype, and which dtype."""
        super().__init__(kind, reason, detail, remedy, cell)
        self.row: int | None = row

    def error(self, path: str, name: str, *, of_rows: bool = True) -> JagcodecError:
        """The error for a column at `path`; with `of_rows` False, for a chunk of one row."""
        kind, reason, detail, remedy, cell = self.args
        if of_rows and self.row is not None:
            path += f", row {self.row}"
        if cell is not None:
            path += f", cell {cell}"
        if remedy is not None and (of_rows or remedy is not _OBJECTS):
            purpose, dtype = remedy
            detail += f"; for {purpose} pass dtypes={{{name!r}: {dtype}}}"
        made: JagcodecError = kind(reason, path, detail)
        return made


_OBJECTS = ("a column of Python objects", "object")
_OTHER_CELLS = ("other cells", "...")

# How C writes numbers as cells of a dtype, for `cells.fill`: code, stored dtype, and bits
# of precision. float16 and bfloat16 by way of float32, as torch rounds Python's floats.
_CODES: dict[torch.dtype, tuple[str, np.dtype[Any], int]] = {
    getattr(torch, name): (code, np.dtype(stored), precision)
    for name, code, stored, precision in (
        ("bool", "?", "bool", 0),
        ("int8", "b", "int8", 0),
        ("int16", "h", "int16", 0),
        ("int32", "i", "int32", 0),
        ("int64", "q", "int64", 0),
        ("uint8", "B", "uint8", 0),
        ("uint16", "H", "uint16", 0),
        ("uint32", "I", "uint32", 0),
        ("uint64", "Q", "uint64", 0),
        ("bfloat16", "f", "float32", 8),
        ("float16", "f", "float32", 11),
        ("float32", "f", "float32", 24),
        ("float64", "d", "float64", 53),
    )
}
_DEFAULTS = {bool: torch.bool, int: torch.int64, float: torch.float32}

PLAIN_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in NUMPY_DTYPES.items()}
"""The dtypes of arrays that a column may be, and torch's for them."""

_IN_TORCH = PLAIN_DTYPES | {
    np.dtype(name): getattr(torch, name)
    for name in ("uint16", "uint32", "uint64", "complex64", "complex128")
}

# What a row is: a sequence that holds nothing, or None alone, is as the others are.
_NUMBER, _SEQUENCE, _NOTHING, _ARRAY, _OBJECT = "number", "sequence", "nothing", "array", "object"
_ARRAYS, _TENSORS, _SEQUENCES = {np.ndarray}, {torch.Tensor}, {list, tuple}
_PLAIN_OBJECTS = {str, bytes, dict, type(None)}


def cells_of_rows(rows: Sequence[Any], dtype: Any = None, *, own: bool = True) -> Rows | list[Any]:
    """The cells of N rows, of which there is one at least; or the rows as a list, of objects.

    Args:
        rows: Numbers, sequences of numbers, arrays or tensors; or objects.
        dtype: Of the cells; `object` for a column of objects; None for that of the rows: ints
            become int64, or float32 if a float follows, floats float32 and bools bool. Arrays and
            tensors keep their dtype.
        own: Copy where the cells would alias a row.

    Raises:
        MisfitError: Rows do not fit together, or a number does not fit its cell.
    """
    if dtype is object:
        return list(rows)
    types: set[Any] = set(map(type, rows))
    if types == _TENSORS:
        # Each attribute of a tensor costs more than making an array of it.
        arrays = plain_arrays(rows)
        if not any(plain is None for plain in arrays):
            rows, types = arrays, _ARRAYS
    # Most columns are of one kind, which shows without reading every row.
    if types == _ARRAYS and dtype is None and PLAIN_DTYPES.keys() >= {row.dtype for row in rows}:
        return _of_arrays(rows, own)
    if types <= _DEFAULTS.keys():
        return _of_numbers(rows, dtype)
    if types <= _SEQUENCES and type(next((row[0] for row in rows if row), None)) in _DEFAULTS:
        return _of_sequences(rows, dtype)
    if types <= _PLAIN_OBJECTS and dtype is None:
        return list(rows)
    kinds = [_kind(row) for row in rows]
    found = set(kinds) - {_NOTHING}
    if _OBJECT in found:
        return _of_objects(rows, kinds, dtype)
    if found == {_SEQUENCE} or not (found or any(map(len, rows))):
        return _of_sequences([_listed(row) for row in rows], dtype)
    if not found:
        return list(rows)
    if set(kinds) == {_NUMBER}:
        return _of_numbers(rows, dtype)
    return _of_arrays(_as_arrays(rows, kinds, dtype), own)


def _kind(row: Any) -> str:
    if isinstance(row, (list, tuple, range, array)):
        first = _first(row)
        if isinstance(first, (list, tuple)):
            return _OBJECT if _kind(first) is _OBJECT else _SEQUENCE
        if first is None:
            return _NOTHING
        return _OBJECT if plain_number(first) is None else _SEQUENCE
    if isinstance(row, (np.ndarray, np.generic)):
        plain = not isinstance(row, np.ma.MaskedArray)  # whose mask would be lost
        return _ARRAY if plain and row.dtype.newbyteorder("=") in _IN_TORCH else _OBJECT
    if isinstance(row, torch.Tensor):
        plain = row.layout is torch.strided and not row.is_nested and not row.is_meta
        return _ARRAY if plain and row.dtype in TORCH_NAMES else _OBJECT
    return _NUMBER if isinstance(row, (int, float)) else _OBJECT


def _first(row: Iterable[Any]) -> Any:
    """The first item that is not None, which engines put in the place of the first number."""
    return next((item for item in row if item is not None), None)


def _listed(row: Sequence[Any]) -> Sequence[Any]:
    return row if isinstance(row, (list, tuple)) else list(row)


def plain_number(item: Any) -> Any:
    """The Python number that an item is, or holds; None if it is not a number."""
    if type(item) in _DEFAULTS:
        return item
    if type(item) in _PLAIN_OBJECTS:
        return None
    try:
        if isinstance(item, (np.generic, np.ndarray, torch.Tensor)):
            number = None if item.ndim or _kind(item) is _OBJECT else item.item()
            return number if type(number) in _DEFAULTS else None
        return float(item) if isinstance(item, float) else operator.index(item)
    except TypeError:
        return None


# --- objects -----------------------------------------------------------------------------------


def _of_objects(rows: Sequence[Any], kinds: list[str], dtype: Any) -> list[Any]:
    """A column of objects, in which no row may be numbers."""
    objects = [i for i, kind in enumerate(kinds) if kind is _OBJECT]
    numbers = [i for i, kind in enumerate(kinds) if kind not in (_OBJECT, _NOTHING)]
    if dtype is None and not numbers:
        return list(rows)
    odd = objects[0]
    if all(rows[i] is None for i in objects):
        raise _none(odd, None)
    if dtype is not None or numbers[0] < odd:
        raise _other_kind("numbers", rows[odd], odd, None)
    expected = f"an object, as {type(rows[odd]).__name__} in row {odd}"
    raise _other_kind(expected, rows[numbers[0]], numbers[0], None)


def _none(row: int, cell: int | None) -> MisfitError:
    detail = "expected a number, found None; put a number in its place, such as float('nan')"
    return MisfitError(ArgumentTypeError, "bad_type", detail, _OBJECTS, row=row, cell=cell)


def _other_kind(expected: str, item: Any, row: int, cell: int | None) -> MisfitError:
    detail = f"expected {expected}, found {described(item)}"
    return MisfitError(ArgumentTypeError, "bad_type", detail, _OBJECTS, row=row, cell=cell)


def described(item: Any) -> str:
    """What a row or an item is, in a few words."""
    if isinstance(item, (bool, int, float, str, type(None))):
        return brief(item)
    if isinstance(item, np.ndarray):
        return f"an array of dtype {item.dtype}"
    if isinstance(item, (list, tuple)) and item:
        return f"a {type(item).__name__} that begins with {brief(item[0])}"
    return describe(item)


# --- numbers -----------------------------------------------------------------------------------


def _of_numbers(rows: Sequence[Any], dtype: torch.dtype | None) -> Rows:
    return Rows(_filled([rows], (len(rows),), dtype, rows[0], None), None)


def _of_sequences(rows: Sequence[Any], dtype: torch.dtype | None) -> Rows:
    """Lists and tuples of numbers, or of lists of equal lengths of numbers."""
    lengths = tuple(map(len, rows))
    first = _first(chain.from_iterable(rows))
    if not any(lengths):
        if dtype is None:
            detail = "expected a number in one of the rows, found only empty ones"
            raise MisfitError(ArgumentError, "bad_dtype", detail, ("empty rows", "torch.int64"))
        return Rows(torch.empty(0, dtype=dtype), lengths)
    shape: tuple[int, ...] = ()
    while isinstance(first, (list, tuple)):
        _check_equal(rows, size := len(first))
        rows = [list(chain.from_iterable(row)) for row in rows]
        shape, first = (*shape, size), _first(first)
    cell = math.prod(shape)
    sizes = tuple(length * cell for length in lengths) if shape else lengths
    values = _filled(rows, sizes, dtype, first, cell)
    return Rows(values.reshape(sum(lengths), *shape) if shape else values, lengths)


def _check_equal(rows: Sequence[Any], size: int) -> None:
    for i, row in enumerate(rows):
        for j, item in enumerate(row):
            if item is None:
                raise _none(i, j)
            if not isinstance(item, (list, tuple)) or len(item) != size or not size:
                detail = f"expected lists of {size} in a row, found {brief(item)}"
                remedy = ("lists of any length", "object")
                raise MisfitError(ArgumentError, "bad_shape", detail, remedy, row=i)


def _filled(
    rows: Sequence[Sequence[Any]],
    sizes: tuple[int, ...],
    dtype: torch.dtype | None,
    first: Any,
    cell: int | None,
) -> Any:
    """The cells of numbers, end to end.

    Args:
        rows: Lists or tuples.
        sizes: How long each of them is.
        dtype: Of the cells; None for the one that the numbers imply.
        first: The first number.
        cell: How many numbers a cell has; None if `rows` is one list with a number per row.
    """
    wanted = dtype or _DEFAULTS[type(plain_number(first))]
    if wanted not in _CODES:
        detail = f"expected a dtype that Python's numbers can have, found {wanted}; pass tensors"
        raise MisfitError(ArgumentTypeError, "bad_dtype", detail)
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
            return values
        item = rows[bad[0]][bad[1]]
    except (ValueError, IndexError) as error:  # rows that another thread changes
        raise MisfitError(ArgumentError, "row_mismatch", str(error)) from error
    if dtype is None and wanted == torch.int64 and isinstance(plain_number(item), float):
        return _filled(rows, sizes, torch.float32, first, cell)
    place = (bad[1], None) if cell is None else (bad[0], bad[1] // (cell or 1))
    raise _refused(item, wanted, *place)


def _refused(item: Any, dtype: torch.dtype, row: int, cell: int | None) -> MisfitError:
    """Why a number, or something else, is not a cell of a dtype."""
    number, wanted = plain_number(item), str(dtype).removeprefix("torch.")
    if item is None:
        return _none(row, cell)
    if dtype == torch.bool or isinstance(number, bool) or number is None:
        expected = "bools" if dtype == torch.bool else f"numbers (the column is {wanted})"
        return _other_kind(expected, item, row, cell)
    if isinstance(number, float) and not dtype.is_floating_point:
        kind: type[JagcodecError] = ArgumentTypeError
        detail, remedy = f"expected integers (the column is {wanted})", ("floats", "torch.float32")
        reason: Reason = "bad_type"
    else:
        exactly = "" if isinstance(number, float) else " exactly"
        kind, reason, remedy = ArgumentError, "bad_dtype", _OTHER_CELLS
        detail = f"expected a number that {wanted} holds{exactly}"
    detail += f", found {brief(number)}"
    return MisfitError(kind, reason, detail, remedy, row=row, cell=cell)


# --- arrays and tensors ------------------------------------------------------------------------


def _of_arrays(parts: Sequence[Any], own: bool) -> Rows:
    """Arrays, or tensors, one per row."""
    first = parts[0]
    if len(parts) > 1:
        _check_alike(parts)
    is_array = type(first) is np.ndarray
    if not first.ndim:
        return Rows(np.array(parts) if is_array else torch.stack(list(parts)), None)
    lengths = tuple(map(len, parts))
    values: Any
    if len(parts) > 1:
        values = np.concatenate(parts) if is_array else torch.cat(list(parts))
    elif own:
        values = first.copy() if is_array else first.clone()
    else:
        values = first
    if is_array and not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    return Rows(values, lengths)


def _check_alike(parts: Sequence[Any]) -> None:
    first = parts[0]
    dtype, ndim, shape = first.dtype, first.ndim, first.shape[1:]
    for i, part in enumerate(parts):
        if part.dtype != dtype:
            detail = f"expected {dtype} like row 0, found {part.dtype}"
            raise MisfitError(ArgumentTypeError, "bad_dtype", detail, _OTHER_CELLS, row=i)
        if part.ndim != ndim or part.shape[1:] != shape:
            expected = ", ".join(map(str, ("tokens", *shape) if ndim else ()))
            detail = f"expected shape ({expected}) like row 0, found {tuple(part.shape)}"
            raise MisfitError(ArgumentError, "bad_shape", detail, row=i)


def _as_arrays(rows: Sequence[Any], kinds: list[str], dtype: torch.dtype | None) -> list[Any]:
    """Each row as an array, or as a tensor if one of them has to be one.

    If rows are of several kinds, the first that has a dtype decides for all of them.
    """
    if dtype is None and set(kinds) != {_ARRAY}:
        first = next(i for i, kind in enumerate(kinds) if kind is not _NOTHING)
        dtype = torch_dtype_of(_as_array(rows[first], first, None))
    parts = [_as_array(row, i, dtype) for i, row in enumerate(rows)]
    if len(set(map(type, parts))) > 1:
        return [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in parts]
    return parts


def _as_array(row: Any, i: int, dtype: torch.dtype | None) -> Any:
    try:
        if isinstance(row, torch.Tensor):
            part = contiguous_bits(row.as_subclass(torch.Tensor))
        elif isinstance(row, (np.ndarray, np.generic)):
            part = torch.from_numpy(np.array(row, dtype=row.dtype.newbyteorder("=")))
        else:
            made: Any = cells_of_rows([row], dtype)
            part = torch.as_tensor(made.values if made.lengths is not None else made.values[0])
        part = part if dtype is None else _cast(part, dtype)
    except MisfitError as misfit:
        misfit.row = i
        raise
    plain = plain_array(part)
    return part if plain is None else plain


def torch_dtype_of(part: Any) -> torch.dtype:
    found: torch.dtype = part.dtype if isinstance(part, torch.Tensor) else _IN_TORCH[part.dtype]
    return found


def _cast(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with cells of another dtype, which hold the same numbers; floats are rounded.

    Raises:
        MisfitError: They do not.
    """
    found = part.dtype
    if found == dtype:
        return part
    if dtype not in _CODES or found.is_complex or torch.bool in (found, dtype):
        detail = f"expected {dtype}, found {found}"
        raise MisfitError(ArgumentTypeError, "bad_dtype", detail, _OTHER_CELLS)
    if found.is_floating_point and dtype.is_floating_point:
        made = part.to(dtype)
        if not (made.isinf() & part.isfinite()).any():
            return made
    numbers = part.reshape(-1).tolist()
    cell = math.prod(part.shape[1:]) if part.ndim else None
    values = _filled([numbers], (len(numbers),), dtype, 0, cell)
    return torch.as_tensor(values, device=part.device).reshape(part.shape)
