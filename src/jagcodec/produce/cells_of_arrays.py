"""Arrays and tensors as cells: joined end to end, then cast together.

`join_quickly` joins most columns, and `join_arrays` all others, or raises an error. `cells` calls
them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
)
from jagcodec.memory.arrays import tensor_type
from jagcodec.produce.cell_dtypes import FILL_CODES, NUMBER_DTYPES
from jagcodec.produce.number_types import (
    two_dtypes,
)
from jagcodec.produce.numbers import cast_array, cell_numbers, fill_cells
from jagcodec.produce.row_kinds import OR_OBJECTS, cells_tensors
from jagcodec.wire.dtypes import TORCH_NAME_OF_NUMPY
from jagcodec.wire.items import RowCells

_ARRAY_ONLY = {np.ndarray}


def join_quickly(rows: Sequence[Any], types: Set[type], token_dim: int = 0) -> RowCells | None:
    """Arrays, or tensors, of one dtype and cell shape, end to end; None if the rows differ."""
    if types != _ARRAY_ONLY:
        if types != {tensor_type()} or token_dim:
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
        values = np.concatenate(rows, token_dim)
    except ValueError:
        return None
    if not values.flags.c_contiguous:
        return None
    lengths = tuple([row.shape[token_dim] for row in rows] if token_dim else map(len, rows))
    return RowCells(values, lengths, dtype)


def readable_array(row: Any) -> Any:
    """An array of `STORED_DTYPES`, or a tensor that is on a device, with the same cells."""
    if isinstance(row, tensor_type()):
        return cells_tensors().array_of_tensor(row)
    array = np.asarray(row, dtype=row.dtype.newbyteorder("="))
    return array if array.dtype in TORCH_NAME_OF_NUMPY else np.array(array)


def join_arrays(
    parts: Sequence[Any], dtypes: Sequence[str], copied: bool, token_dim: int
) -> RowCells:
    """Arrays, or tensors, of one dtype and cell shape, end to end along `token_dim`."""
    if len(parts) > 1 and len(set(map(type, parts))) > 1:
        parts = list(map(cells_tensors().tensor_of, parts, dtypes))
    first = parts[0]
    is_array = type(first) is np.ndarray
    if not first.ndim:
        _check_same_cells(parts, dtypes, token_dim)
        return RowCells(np.array(parts) if is_array else _join_parts(parts, 0), None, dtypes[0])
    if first.ndim <= token_dim:
        detail = (
            f"expected {token_dim + 1} dims or more, of which dim {token_dim} is the tokens, "
            f"found shape {tuple(first.shape)}"
        )
        raise ArgumentError("bad_shape", ", row 0", detail)
    values: Any = first
    if len(parts) > 1:
        values = _join_checked(parts, dtypes, token_dim)
    elif copied:
        values = first.copy() if is_array else _join_parts(parts, 0)
    if is_array and not values.flags.c_contiguous:
        values = np.ascontiguousarray(values)
    return RowCells(values, tuple([part.shape[token_dim] for part in parts]), dtypes[0])


def _join_checked(parts: Sequence[Any], dtypes: Sequence[str], token_dim: int) -> Any:
    """Parts end to end along their token dim; an error if their cells differ."""
    if type(parts[0]) is np.ndarray and len(set(dtypes)) == 1:
        # Numpy compares the shapes faster than the loop below.
        with contextlib.suppress(ValueError):
            return np.concatenate(parts, token_dim)
    _check_same_cells(parts, dtypes, token_dim)
    return _join_parts(parts, token_dim)


def _join_parts(parts: Sequence[Any], token_dim: int) -> Any:
    """Arrays, or tensors, end to end along a dim."""
    if type(parts[0]) is np.ndarray:
        return np.concatenate(parts, token_dim)
    return cells_tensors().joined_tensors(parts, token_dim)


def cast_cells(joined: RowCells, dtype: str, token_dim: int) -> RowCells:
    """The numbers as cells of another dtype, floats rounded; an error if one does not fit."""
    values, lengths, old_dtype = joined.data, joined.lengths, joined.dtype
    are_numbers = dtype in FILL_CODES and old_dtype in NUMBER_DTYPES
    if not are_numbers or "bool" in (dtype, old_dtype):
        detail = f"expected torch.{dtype}, found torch.{old_dtype}; convert the rows{OR_OBJECTS}"
        raise ArgumentTypeError("bad_dtype", ", row 0", detail)
    numbers = cell_numbers(values, old_dtype)
    cells: Any = cast_array(numbers, dtype)
    if cells is None:  # let the rule for lists name the first misfit
        if lengths is not None:
            numbers = np.moveaxis(numbers, token_dim, 0)
        flat, cell = numbers.reshape(-1).tolist(), math.prod(numbers.shape[1:])
        sizes = (len(flat),) if lengths is None else tuple(n * cell for n in lengths)
        ends = np.cumsum(sizes).tolist()
        rows = [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        cells = fill_cells(rows, sizes, dtype, None if lengths is None else cell)
    if not isinstance(values, np.ndarray):
        cells = cells_tensors().on_device_of(cells, dtype, values)
    return RowCells(cells.reshape(values.shape), lengths, dtype)


def _check_same_cells(parts: Sequence[Any], dtypes: Sequence[str], token_dim: int) -> None:
    """Refuse rows that differ in dtype, in device, or in the shape of their cells."""
    first = parts[0]
    ndim, shape, outer = first.ndim, first.shape[token_dim + 1 :], first.shape[:token_dim]
    is_array = isinstance(first, np.ndarray)
    for i, dtype in enumerate(dtypes):  # before shapes: a column has one dtype in any order of rows
        if dtype != dtypes[0]:
            raise two_dtypes(dtypes[0], dtype, ", row 0", f", row {i}")
    for i, part in enumerate(parts):
        part_shape = part.shape
        if (
            part.ndim != ndim
            or part_shape[token_dim + 1 :] != shape
            or (token_dim and part_shape[:token_dim] != outer)
        ):
            expected = ragged_shape_text(outer, shape) if ndim else "()"
            detail = f"expected shape {expected} like row 0, found {tuple(part_shape)}"
            differs = [
                d for d in range(ndim) if part.ndim == ndim and part_shape[d] != first.shape[d]
            ]
            hint = ragged_dim_remedy(differs[0]) if len(differs) == 1 else ""
            raise ArgumentError("bad_shape", f", row {i}", detail + hint + OR_OBJECTS)
        if not is_array and part.device != first.device:
            detail = (
                f"expected device {first.device} like row 0, found {part.device}; "
                "move it with .to()"
            )
            raise ArgumentError("bad_dtype", f", row {i}", detail)


def ragged_dim_remedy(token_dim: int) -> str:
    """The remedy to say that the tokens of rows are along this dim of a row."""
    return f"; if dim {token_dim} of a row is its tokens, pass ragged_dims={{...: {token_dim + 1}}}"


def ragged_shape_text(outer: Sequence[int], inner: Sequence[int] = ()) -> str:
    """The shape of rows as text, with "tokens" for the dim that differs."""
    return f"({', '.join(map(str, (*outer, 'tokens', *inner)))})"
