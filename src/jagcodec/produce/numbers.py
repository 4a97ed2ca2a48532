"""Python's numbers, and arrays of them, as cells of a dtype: exactly, or with an error.

`fill_cells` writes lists in a dtype that is known, `cells_of_python` in the one that the numbers
get, and `cast_array` casts the numbers of an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec import kernels
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError, brief
from jagcodec.memory.small_floats import LEAST_INFINITE, numbers_of, rounded
from jagcodec.produce.cell_dtypes import DEFAULT_DTYPES, FILL_CODES
from jagcodec.produce.row_kinds import (
    OR_OBJECTS,
    cells_tensors,
    dtypes_remedy,
    list_among_numbers,
    none_among_numbers,
    plain_number,
    wrong_kind,
)
from jagcodec.wire.items import RowCells


def fill_cells(
    rows: Sequence[Sequence[Any]],
    sizes: tuple[int, ...],  # the lengths of the rows
    dtype: str,
    cell: int | None,  # numbers per cell; None if `rows` is one list with a number per row
) -> npt.NDArray[Any]:
    """The cells of lists and tuples of numbers, end to end."""
    if dtype not in FILL_CODES:
        detail = f"expected a dtype that Python's numbers can have, found torch.{dtype}"
        raise ArgumentTypeError("bad_dtype", "", f"{detail}; pass tensors")
    code, stored, precision = FILL_CODES[dtype]
    _, cells, lengths, bad = _filled(rows, code, precision, plain_number)
    if lengths != sizes:  # another thread changes the rows, or `len` of one is wrong
        raise ArgumentError("row_mismatch", "", "expected rows that keep their lengths")
    values = np.frombuffer(cells, stored)
    if dtype in LEAST_INFINITE:
        # C has written the items before the bad one, but some may become infinite.
        before = len(values) if bad is None else sum(lengths[: bad[0]]) + bad[1]
        over = _first_overflow(values[:before], values[:before], dtype)
        if over is not None:
            row = int(np.searchsorted(np.cumsum(lengths), over, side="right"))
            bad = row, over - sum(lengths[:row])
    if bad is None:
        return _as_dtype(values, dtype)
    row, at = bad
    try:
        item = rows[row][at]
    except IndexError as error:  # another thread changes the rows
        raise ArgumentError("row_mismatch", "", str(error)) from error
    raise _misfit_number(item, dtype, place_of(row, at, cell))


def place_of(row: int, at: int, cell: int | None) -> str:
    """The place of the number at an index of a row; `cell` is that of `fill_cells`."""
    return f", row {at}" if cell is None else f", row {row}, cell {at // (cell or 1)}"


_DTYPES_OF_CODES = {FILL_CODES[dtype][0]: dtype for dtype in DEFAULT_DTYPES.values()}
_CODES = "".join(_DTYPES_OF_CODES)
_STORED = {code: FILL_CODES[dtype][1] for code, dtype in _DTYPES_OF_CODES.items()}
_PRECISION = FILL_CODES[DEFAULT_DTYPES[float]][2]


def cells_of_python(rows: Sequence[Sequence[Any]]) -> RowCells | None:
    """The cells of rows of Python's own numbers, in the dtype that they get.

    None if there is no number, if an item is not one, or if one does not fit.
    """
    found = _filled(rows, _CODES, _PRECISION, None)
    if found is None or found[3] is not None:
        return None
    code, cells, lengths, _ = found
    return RowCells(np.frombuffer(cells, _STORED[code]), lengths, _DTYPES_OF_CODES[code])


def _filled(
    rows: Sequence[Sequence[Any]],
    codes: str,
    precision: int,
    convert: Callable[[Any], Any] | None,
) -> Any:
    """`kernels.fill`, with the errors of this library."""
    try:
        return kernels.fill(rows, codes, precision, convert)
    except (ValueError, IndexError) as error:  # another thread changes the rows
        raise ArgumentError("row_mismatch", "", str(error)) from error
    except MemoryError as error:
        found = sum(map(len, rows))
        detail = f"expected cells that fit into memory, found {found}: {error!s:.200}"
        raise ArgumentError("too_large", "", detail) from error


def _first_overflow(numbers: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: str) -> int | None:
    """The index of the first finite number whose cell is infinite; `stored` has what C wrote."""
    fits = np.abs(stored) < LEAST_INFINITE.get(dtype, math.inf)
    if fits.all():
        return None
    over = np.flatnonzero(np.isfinite(numbers) & ~fits)
    return int(over[0]) if len(over) else None


def _as_dtype(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The cells of a dtype, given what C writes for it."""
    return rounded(stored, dtype) if dtype in LEAST_INFINITE else stored


def cell_numbers(cells: Any, dtype: str) -> npt.NDArray[Any]:
    """The numbers in cells of a dtype, an array of `STORED_DTYPES` or a tensor."""
    if isinstance(cells, np.ndarray):
        return numbers_of(cells, dtype)
    numbers: npt.NDArray[Any] = cells_tensors().numbers_of_tensor(cells, dtype)
    return numbers


# --- arrays ------------------------------------------------------------------------------------


def cast_array(numbers: npt.NDArray[Any], dtype: str) -> Any:
    """Numbers as cells of a dtype, by the rule for lists; None if one does not fit."""
    _, stored, precision = FILL_CODES[dtype]
    with np.errstate(all="ignore"):
        cells = numbers.astype(stored)
    if not numbers.size:
        return _as_dtype(cells, dtype)
    if numbers.dtype.kind == "f":
        fits = stored.kind == "f" and _first_overflow(numbers, cells, dtype) is None
        return _as_dtype(cells, dtype) if fits else None
    low, high = -(1 << precision), 1 << precision  # all ints between these are exact floats
    if stored.kind != "f":
        low, high = np.iinfo(stored).min, np.iinfo(stored).max
    if low <= numbers.min().item() and numbers.max().item() <= high:
        return _as_dtype(cells, dtype)
    return _exact_floats(numbers, cells, dtype) if stored.kind == "f" else None


def _exact_floats(numbers: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: str) -> Any:
    """Ints as cells of a float dtype; None if one is not exact."""
    cells = _as_dtype(stored, dtype)
    back, whole = cell_numbers(cells, dtype), np.iinfo(numbers.dtype)
    # A float outside the range of the int dtype cannot be cast back, so it is not exact.
    in_range = whole.min <= back.min().item() and back.max().item() <= whole.max
    return cells if in_range and (back.astype(numbers.dtype) == numbers).all() else None


# --- errors ------------------------------------------------------------------------------------


def _misfit_number(item: Any, dtype: str, place: str) -> JagcodecError:
    """The error for a number, or another item, that is not a cell of a dtype."""
    if isinstance(item, (list, tuple)):
        return list_among_numbers(item, place)
    if item is None:
        return none_among_numbers({dtype}, place)
    number = plain_number(item)
    if dtype == "bool" or isinstance(number, bool) or number is None:
        expected = "bools" if dtype == "bool" else f"numbers (the column is {dtype})"
        return wrong_kind(expected, item, place)
    remedy = _wider_dtype_remedy(number, dtype)
    found = f"found {brief(number)}{remedy}"
    if isinstance(number, float) and "float" not in dtype:
        detail = f"expected integers (the column is {dtype}), {found}"
        return ArgumentTypeError("bad_type", place, detail)
    exactly = "" if isinstance(number, float) else " exactly"
    detail = f"expected a number that {dtype} holds{exactly}, {found}"
    return ArgumentError("bad_dtype", place, detail)


def _wider_dtype_remedy(number: float, dtype: str) -> str:
    """The remedy for a number that the dtype of the column does not hold."""
    floats = "float" in dtype or isinstance(number, float)
    for wider in ("float32", "float64") if floats else ("int64", "uint64"):
        code, _, precision = FILL_CODES[wider]
        _, _, _, bad = kernels.fill([[number]], code, precision, plain_number)
        if bad is None:
            to_floats = isinstance(number, float) and "float" not in dtype
            return dtypes_remedy(wider, "floats" if to_floats else "other cells")
    return OR_OBJECTS
