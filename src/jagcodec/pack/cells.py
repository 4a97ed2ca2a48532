"""Rows of one column as cells: numbers exactly, or refused. One rule for rows and for chunks."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, contiguous_bits, plain_arrays
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
    """Rows that do not become cells; whoever knows the column's name makes an error of it.

    Attributes:
        row: Which row; None if it is the column as a whole.
        cell: Which cell of the row, if that is known.
        found: The item that does not fit, if it is one item.
    """

    def __init__(
        self,
        kind: type[JagcodecError],
        reason: Reason,
        detail: str,
        option: tuple[str, str] | None = None,
        *,
        row: int | None = None,
        cell: int | None = None,
        found: Any = None,
    ) -> None:
        """`option` is the remedy: which columns need a choice of dtype, and which dtype."""
        super().__init__(detail)
        self._error: tuple[type[JagcodecError], Reason, str] = kind, reason, detail
        self._option = option
        self.row: int | None = row
        self.cell: int | None = cell
        self.found: Any = found

    def error(self, path: str, name: str, *, of_rows: bool = True) -> JagcodecError:
        """The error for a column at `path`; with `of_rows` False, for a chunk of one row."""
        kind, reason, detail = self._error
        if of_rows and self.row is not None:
            path += f", row {self.row}"
        if self.cell is not None:
            path += f", cell {self.cell}"
        if self._option is not None and (of_rows or self._option is not _OBJECTS):
            purpose, dtype = self._option
            detail += f"; for {purpose} pass dtypes={{{name!r}: {dtype}}}"
        return kind(reason, path, detail)


_OBJECTS = ("a column of Python objects", "object")
_OTHER_CELLS = ("other cells", "...")

# How C writes numbers as cells of a dtype, as `cells.fill` takes it: code, stored dtype, and bits
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

_PLAIN = {dtype: torch_dtype for torch_dtype, dtype in NUMPY_DTYPES.items()}
_IN_TORCH = _PLAIN | {
    np.dtype(name): getattr(torch, name)
    for name in ("uint16", "uint32", "uint64", "complex64", "complex128")
}

# What a row is.
_NUMBER, _SEQUENCE, _EMPTY, _ARRAY, _OBJECT = "number", "sequence", "empty", "array", "object"
_ARRAYS, _TENSORS, _SEQUENCES = {np.ndarray}, {torch.Tensor}, {list, tuple}
_PLAIN_OBJECTS = {str, bytes, dict, type(None)}


def cells_of(rows: Sequence[Any], dtype: Any = None, *, own: bool = True) -> Rows | list[Any]:
    """The cells of N rows, of which there is one at least; or the rows as a list, of objects.

    Args:
        rows: Numbers, sequences of numbers, arrays or tensors; or objects.
        dtype: Of the cells; `object` for a column of objects; None for what the rows say: ints
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
        # Each attribute of a tensor takes longer than making an array of it.
        arrays = plain_arrays(rows)
        if not any(plain is None for plain in arrays):
            rows, types = arrays, _ARRAYS
    if types == _ARRAYS and dtype is None and _PLAIN.keys() >= {row.dtype for row in rows}:
        return _of_arrays(rows, own)
    if types <= _DEFAULTS.keys():
        return Rows(_filled([rows], (len(rows),), dtype, rows[0], None), None)
    if types <= _SEQUENCES and _is_number(next((row[0] for row in rows if row), None)):
        return _of_sequences(rows, dtype)
    if types <= _PLAIN_OBJECTS and dtype is None:
        return list(rows)
    kinds = [_kind(row) for row in rows]
    found = set(kinds) - {_EMPTY}
    if _OBJECT in found:
        return _of_objects(rows, kinds, dtype)
    if found <= {_SEQUENCE}:
        return _of_sequences([_listed(row) for row in rows], dtype)
    if found == {_NUMBER} and _EMPTY not in kinds:
        return Rows(_filled([rows], (len(rows),), dtype, rows[0], None), None)
    return _of_arrays(_parts(rows, kinds, dtype), own)


def _kind(row: Any) -> str:
    if isinstance(row, (list, tuple, range, array)):
        if not len(row):
            return _EMPTY
        first = row[0]
        if isinstance(first, (list, tuple)):
            return _OBJECT if _kind(first) is _OBJECT else _SEQUENCE
        return _SEQUENCE if _is_number(first) else _OBJECT
    if isinstance(row, (np.ndarray, np.generic)):
        plain = not isinstance(row, np.ma.MaskedArray)  # whose mask would be lost
        return _ARRAY if plain and row.dtype.newbyteorder("=") in _IN_TORCH else _OBJECT
    if isinstance(row, torch.Tensor):
        plain = row.layout is torch.strided and not row.is_nested and not row.is_meta
        return _ARRAY if plain and row.dtype in TORCH_NAMES else _OBJECT
    return _NUMBER if isinstance(row, (int, float)) else _OBJECT


def _is_number(item: Any) -> bool:
    if type(item) in _PLAIN_OBJECTS:
        return False
    if isinstance(item, (int, float, np.bool_, np.integer, np.floating)):
        return True
    return isinstance(item, (np.ndarray, torch.Tensor)) and not item.ndim and _kind(item) is _ARRAY


def plain_number(item: Any) -> Any:
    """The Python number that an item stands for; None if it is not a number."""
    if isinstance(item, np.generic) or (
        isinstance(item, (np.ndarray, torch.Tensor)) and not item.ndim
    ):
        return item.item()
    try:
        return operator.index(item)
    except TypeError:
        return None


def _listed(row: Any) -> Sequence[Any]:
    return row if isinstance(row, (list, tuple)) else list(row)


# --- objects -----------------------------------------------------------------------------------


def _of_objects(rows: Sequence[Any], kinds: list[str], dtype: Any) -> list[Any]:
    """A column of objects, in which no row may be numbers."""
    objects = [i for i, kind in enumerate(kinds) if kind is _OBJECT]
    for i in objects:
        gap = _gap(rows[i])
        if gap is not None:
            raise _none(i, gap)
    numbers = [i for i, kind in enumerate(kinds) if kind not in (_OBJECT, _EMPTY)]
    if dtype is None and not numbers:
        return list(rows)
    if all(map(_is_none, (rows[i] for i in objects))):
        raise _none(objects[0], None if rows[objects[0]] is None else 0)
    if dtype is not None or kinds[0] is not _OBJECT:
        raise _other_kind("numbers", rows[objects[0]], objects[0], None)
    expected = f"an object, as {type(rows[0]).__name__} in row 0"
    raise _other_kind(expected, rows[numbers[0]], numbers[0], None)


def _gap(row: Any) -> int | None:
    """Where a list of numbers has None, as engines give for the first token."""
    if not isinstance(row, (list, tuple)):
        return None
    types = set(map(type, row))
    if types <= _SEQUENCES:
        return next((i for i, part in enumerate(row) if _gap(part) is not None), None)
    if type(None) not in types:
        return None
    others = [item for item in row if item is not None]
    if others and all(_is_number(item) or _kind(item) is _SEQUENCE for item in others):
        return next(i for i, item in enumerate(row) if item is None)
    return None


def _is_none(row: Any) -> bool:
    return row is None or (isinstance(row, (list, tuple)) and all(item is None for item in row))


def _none(row: int, cell: int | None) -> MisfitError:
    detail = "expected a number, found None; put a number in its place, such as float('nan')"
    return MisfitError(ArgumentTypeError, "bad_type", detail, _OBJECTS, row=row, cell=cell)


def _other_kind(expected: str, item: Any, row: int | None, cell: int | None) -> MisfitError:
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


def _of_sequences(rows: Sequence[Any], dtype: torch.dtype | None) -> Rows:
    """Lists and tuples of numbers, or of lists of equal lengths of numbers."""
    lengths = tuple(map(len, rows))
    first = next((row[0] for row in rows if row), None)
    if first is None:
        if dtype is None:
            detail = "expected a number in one of the rows, found only empty ones"
            raise MisfitError(ArgumentError, "bad_dtype", detail, ("empty rows", "torch.int64"))
        values = torch.empty(0, dtype=dtype)
        return Rows(values.numpy() if dtype in NUMPY_DTYPES else values, lengths)
    shape: tuple[int, ...] = ()
    while isinstance(first, (list, tuple)):
        _check_equal(rows, size := len(first))
        rows = [list(chain.from_iterable(row)) for row in rows]
        shape, first = (*shape, size), first[0]
    cell = math.prod(shape)
    sizes = tuple(length * cell for length in lengths) if shape else lengths
    values = _filled(rows, sizes, dtype, first, cell)
    return Rows(values.reshape(sum(lengths), *shape) if shape else values, lengths)


def _check_equal(rows: Sequence[Any], size: int) -> None:
    for i, row in enumerate(rows):
        for item in row:
            if not isinstance(item, (list, tuple)) or len(item) != size or not size:
                detail = f"expected lists of {size} in a row, found {brief(item)}"
                option = ("lists of any length", "object")
                raise MisfitError(ArgumentError, "bad_shape", detail, option, row=i)


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
        dtype: Of the cells; None for the one that the numbers say.
        first: The first number.
        cell: How many numbers a cell has; None if `rows` is one list with a number per row.
    """
    wanted = dtype or _default(first)
    if wanted not in _CODES:
        detail = f"expected a dtype that Python's numbers can have, found {wanted}; pass tensors"
        raise MisfitError(ArgumentTypeError, "bad_dtype", detail)
    code, stored, precision = _CODES[wanted]
    values = np.empty(sum(sizes), dtype=stored)
    lengths = np.array(sizes, dtype=np.int64)
    try:
        bad = cells.fill(rows, lengths, values, code, precision, plain_number)
        item = None if bad is None else rows[bad[0]][bad[1]]
    except (ValueError, IndexError) as error:  # rows that another thread changes
        raise MisfitError(ArgumentError, "row_mismatch", str(error)) from error
    if bad is None:
        if stored.itemsize == wanted.itemsize:
            return values
        rounded = torch.from_numpy(values).to(wanted)
        over = np.flatnonzero(rounded.isinf().numpy() & np.isfinite(values))
        if not len(over):
            return rounded.numpy() if wanted in NUMPY_DTYPES else rounded
        row = int(np.searchsorted(np.cumsum(lengths), over[0], side="right"))
        bad = row, int(over[0] - lengths[:row].sum())
        item = rows[bad[0]][bad[1]]
    if dtype is None and wanted == torch.int64 and isinstance(_number(item), float):
        return _filled(rows, sizes, torch.float32, first, cell)
    place = (bad[1], None) if cell is None else (bad[0], bad[1] // (cell or 1))
    raise _refused(item, wanted, *place)


def _default(number: Any) -> torch.dtype:
    """The dtype of a column that begins with a number."""
    known = _DEFAULTS.get(type(number))
    if known is None:
        plain = _number(number)
        known = next(_DEFAULTS[kind] for kind in (bool, int, float) if isinstance(plain, kind))
    return known


def _number(item: Any) -> Any:
    return item if isinstance(item, (int, float)) else plain_number(item)


def _refused(item: Any, dtype: torch.dtype, row: int | None, cell: int | None) -> MisfitError:
    """Why a number, or something else, is not a cell of a dtype."""
    number, wanted = _number(item), str(dtype).removeprefix("torch.")
    if item is None and row is not None:
        return _none(row, cell)
    if dtype == torch.bool or isinstance(number, bool) or not isinstance(number, (int, float)):
        expected = "bools" if dtype == torch.bool else f"numbers (the column is {wanted})"
        return _other_kind(expected, item, row, cell)
    if isinstance(number, float) and not dtype.is_floating_point:
        detail = f"expected integers (the column is {wanted}), found {number!r}"
        option = ("floats", "torch.float32")
        return MisfitError(
            ArgumentTypeError, "bad_type", detail, option, row=row, cell=cell, found=number
        )
    exactly = "" if isinstance(number, float) else " exactly"
    detail = f"expected a number that {wanted} holds{exactly}, found {brief(number)}"
    return MisfitError(ArgumentError, "bad_dtype", detail, _OTHER_CELLS, row=row, cell=cell)


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


def _parts(rows: Sequence[Any], kinds: list[str], dtype: torch.dtype | None) -> list[Any]:
    """Each row as an array, or as a tensor if one of them has to be one.

    If rows are of several kinds, the first that says a dtype decides for all of them.
    """
    decides = dtype is None and set(kinds) != {_ARRAY}
    order = sorted(range(len(rows)), key=lambda i: kinds[i] is _EMPTY)
    parts: dict[int, Any] = {}
    for i in order:
        try:
            part = _part(rows[i], kinds[i], dtype)
        except MisfitError as misfit:
            misfit.row = i
            raise
        parts[i] = part
        if decides and dtype is None:
            dtype = torch_dtype_of(part)
    found = [parts[i] for i in range(len(rows))]
    if len(set(map(type, found))) > 1:
        return [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in found]
    return found


def _part(row: Any, kind: str, dtype: torch.dtype | None) -> Any:
    if kind is not _ARRAY:
        made: Any = cells_of([row], dtype)
        part = made.values if made.lengths is not None else made.values[0]
    else:
        part = contiguous_bits(row.as_subclass(torch.Tensor)) if _is_tensor(row) else row
    if _is_tensor(part):
        (plain,) = plain_arrays([part])
        part = part if plain is None else plain
    else:
        part = np.asarray(part, dtype=part.dtype.newbyteorder("="))
        if part.dtype not in _PLAIN:
            part = torch.from_numpy(np.array(part))
    return part if dtype is None else cast(part, dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def torch_dtype_of(part: Any) -> torch.dtype:
    found: torch.dtype = part.dtype if _is_tensor(part) else _IN_TORCH[part.dtype]
    return found


def cast(part: Any, dtype: torch.dtype) -> Any:
    """An array or a tensor with cells of another dtype, which hold the same numbers.

    Raises:
        MisfitError: They do not. Ints must be exact; fractions are rounded.
    """
    found = torch_dtype_of(part)
    if found == dtype:
        return part
    if dtype not in _CODES or found.is_complex or torch.bool in (found, dtype):
        detail = f"expected {dtype}, found {found}"
        raise MisfitError(ArgumentTypeError, "bad_dtype", detail, _OTHER_CELLS)
    tensor = part if _is_tensor(part) else torch.from_numpy(np.array(part))
    wrong = _misfits(tensor, dtype).reshape(-1)
    if wrong.any():
        raise _refused(tensor.reshape(-1)[int(np.argmax(wrong))].item(), dtype, None, None)
    made = tensor.to(dtype)
    return made.numpy() if dtype in NUMPY_DTYPES and made.is_cpu else made


def _misfits(tensor: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[np.bool_]:
    """Which real numbers a dtype does not hold."""
    if tensor.dtype.is_floating_point:
        if not dtype.is_floating_point:
            return np.ones(tuple(tensor.shape), dtype=np.bool_)
        return np.asarray((tensor.to(dtype).isinf() & tensor.isfinite()).cpu())
    ints: npt.NDArray[Any] = tensor.cpu().numpy()
    low, high = np.iinfo(ints.dtype).min, np.iinfo(ints.dtype).max
    if dtype.is_floating_point:
        wide = tensor.to(dtype).double().cpu().numpy()
        inside = (wide >= low) & (wide < float(high) + 1)
        return np.asarray(~inside | (np.where(inside, wide, 0).astype(ints.dtype) != ints))
    info = torch.iinfo(dtype)
    return np.asarray((ints > min(info.max, high)) | (ints < max(info.min, low)))
