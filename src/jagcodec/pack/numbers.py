"""Python's numbers, and arrays of them, as cells of a dtype: exactly, or with an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from jagcodec import cells as cell_kernel
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError, brief
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, number_array
from jagcodec.pack.cell_dtypes import DEFAULT_DTYPES, FILL_CODES, LEAST_INFINITE
from jagcodec.pack.row_kinds import (
    OR_OBJECTS,
    dtypes_remedy,
    list_among_numbers,
    plain_number,
    wrong_kind,
)


class _BadItem(NamedTuple):
    """The first item that is not a cell of a dtype."""

    row: int
    at: int  # its index in the row
    item: Any


def fill_cells(
    rows: Sequence[Sequence[Any]],
    sizes: tuple[int, ...],  # the lengths of the rows
    dtype: torch.dtype,
    cell: int | None,  # numbers per cell; None if `rows` is one list with a number per row
) -> Any:
    """The cells of lists and tuples of numbers, end to end."""
    if dtype not in FILL_CODES:
        detail = f"expected a dtype that Python's numbers can have, found {dtype}; pass tensors"
        raise ArgumentTypeError("bad_dtype", "", detail)
    values, bad = _written_by_kernel(rows, sizes, dtype, plain_number)
    if bad is None:
        return _as_dtype(values, dtype)
    raise _misfit_number(bad.item, dtype, place_of(bad.row, bad.at, cell))


def place_of(row: int, at: int, cell: int | None) -> str:
    """The place of the number at an index of a row; `cell` is that of `fill_cells`."""
    return f", row {at}" if cell is None else f", row {row}, cell {at // (cell or 1)}"


def cells_of_python(rows: Sequence[Sequence[Any]], sizes: tuple[int, ...], first: Any) -> Any:
    """The cells of rows of Python's own numbers; None if there are others, or one does not fit."""
    dtype = DEFAULT_DTYPES.get(type(first))
    if dtype is None:
        return None
    values, bad = _written_by_kernel(rows, sizes, dtype, None)
    if bad is not None and dtype == torch.int64 and type(bad.item) is float:
        dtype = torch.float32
        values, bad = _written_by_kernel(rows, sizes, dtype, None)
    return _as_dtype(values, dtype) if bad is None else None


def _written_by_kernel(
    rows: Sequence[Sequence[Any]],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    convert: Callable[[Any], Any] | None,
) -> tuple[npt.NDArray[Any], _BadItem | None]:
    """The cells that C writes for a dtype, and the first item that does not fit, if any."""
    code, stored, precision = FILL_CODES[dtype]
    lengths = np.array(sizes, dtype=np.int64)
    try:
        values = np.empty(sum(sizes), dtype=stored)
        bad = cell_kernel.fill(rows, lengths, values, code, precision, convert)
        if dtype in LEAST_INFINITE:
            # C has written the items before the bad one, but some may become infinite.
            before = len(values) if bad is None else int(lengths[: bad[0]].sum()) + bad[1]
            over = _first_overflow(values[:before], values[:before], dtype)
            if over is not None:
                row = int(np.searchsorted(np.cumsum(lengths), over, side="right"))
                bad = row, over - int(lengths[:row].sum())
        return values, None if bad is None else _BadItem(*bad, rows[bad[0]][bad[1]])
    except (ValueError, IndexError) as error:  # another thread changes the rows, or a length lies
        raise ArgumentError("row_mismatch", "", str(error)) from error
    except MemoryError as error:
        detail = f"expected cells that fit into memory, found {sum(sizes)}: {error!s:.200}"
        raise ArgumentError("too_large", "", detail) from error


def _first_overflow(
    numbers: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: torch.dtype
) -> int | None:
    """The index of the first finite number whose cell is infinite; C writes `stored`."""
    fits = np.abs(stored) < LEAST_INFINITE.get(dtype, math.inf)
    if fits.all():
        return None
    over = np.flatnonzero(np.isfinite(numbers) & ~fits)
    return int(over[0]) if len(over) else None


def _as_dtype(stored: npt.NDArray[Any], dtype: torch.dtype) -> Any:
    """The cells of a dtype, given what C writes for it."""
    if dtype in LEAST_INFINITE:
        cells = torch.from_numpy(stored).to(dtype)
        return cells.numpy() if dtype in NUMPY_DTYPES else cells
    return stored if dtype in NUMPY_DTYPES else torch.from_numpy(stored)


# --- arrays ------------------------------------------------------------------------------------


def cast_array(numbers: npt.NDArray[Any], dtype: torch.dtype) -> Any:
    """What the rule for lists makes of these numbers; None if one does not fit."""
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


def _exact_floats(numbers: npt.NDArray[Any], stored: npt.NDArray[Any], dtype: torch.dtype) -> Any:
    """Ints as cells of a float dtype; None if one is not exact."""
    cells = _as_dtype(stored, dtype)
    back, whole = number_array(torch.as_tensor(cells)), np.iinfo(numbers.dtype)
    # A float outside the range of the int dtype cannot be cast back, so it is not exact.
    in_range = whole.min <= back.min().item() and back.max().item() <= whole.max
    return cells if in_range and (back.astype(numbers.dtype) == numbers).all() else None


# --- errors ------------------------------------------------------------------------------------


def _misfit_number(item: Any, dtype: torch.dtype, place: str) -> JagcodecError:
    """The error for a number, or another item, that is not a cell of a dtype."""
    if isinstance(item, (list, tuple)):
        return list_among_numbers(item, place)
    number, wanted = plain_number(item), str(dtype).removeprefix("torch.")
    if dtype == torch.bool or isinstance(number, bool) or number is None:
        expected = "bools" if dtype == torch.bool else f"numbers (the column is {wanted})"
        return wrong_kind(expected, item, place)
    remedy = _wider_dtype_remedy(number, dtype)
    found = f"found {brief(number)}{remedy}"
    if isinstance(number, float) and not dtype.is_floating_point:
        detail = f"expected integers (the column is {wanted}), {found}"
        return ArgumentTypeError("bad_type", place, detail)
    exactly = "" if isinstance(number, float) else " exactly"
    detail = f"expected a number that {wanted} holds{exactly}, {found}"
    return ArgumentError("bad_dtype", place, detail)


def _wider_dtype_remedy(number: float, dtype: torch.dtype) -> str:
    """The remedy for a number that the dtype of the column does not hold."""
    floats = dtype.is_floating_point or isinstance(number, float)
    for wider in (torch.float32, torch.float64) if floats else (torch.int64, torch.uint64):
        code, stored, precision = FILL_CODES[wider]
        cell, one = np.empty(1, dtype=stored), np.ones(1, dtype=np.int64)
        if cell_kernel.fill([[number]], one, cell, code, precision, plain_number) is None:
            to_floats = isinstance(number, float) and not dtype.is_floating_point
            return dtypes_remedy(wider, "floats" if to_floats else "other cells")
    return OR_OBJECTS
