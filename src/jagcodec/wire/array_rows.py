"""Rows that are arrays or tensors as cells end to end, and dims.

`array_rows` takes rows apart for the writer; `rows_of_arrays` makes rows for the reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.arrays import IntArray, tensor_type
from jagcodec.wire.checks import bad, elements_of, inside, is_oversized_empty
from jagcodec.wire.dtypes import NAME_OF_DTYPE, TORCH_NAME_OF_NUMPY
from jagcodec.wire.spec import MAX_BYTES, MAX_NDIM, TORCH_ITEMSIZES


class ArrayRows(NamedTuple):
    """N rows that are arrays of one dtype and number of dims, or all tensors; any may be None."""

    parts: Sequence[Any]  # the arrays or tensors, in order, without the rows that are None
    lengths: tuple[int, ...]  # elements of each row
    dims: IntArray  # (N, 1 + rank): 1 and the dims of an array; zeros for None
    dtype: str  # its name on the wire
    are_tensors: bool


# --- written -----------------------------------------------------------------------------------


def array_rows(rows: Sequence[Any]) -> ArrayRows | None:
    """The `ArrayRows` of rows; None if the rows are anything else, or all of them are None.

    Its parts are new views, so that other code cannot change their dims.
    """
    kinds = set(map(type, rows)) - {type(None)}
    if kinds == {np.ndarray}:
        parts: list[Any] = [row[...] for row in rows if row is not None]
        dtype = _common(part.dtype for part in parts)
        name = None if dtype is None else TORCH_NAME_OF_NUMPY.get(dtype)
    elif kinds == {tensor_type()}:
        from jagcodec.wire.tensor_views import has_dense_cells  # where tensors are, torch is

        tensors = [row for row in rows if row is not None]
        if not all(map(has_dense_cells, tensors)):
            return None
        parts = [tensor.detach() for tensor in tensors]
        dtype = _common(part.dtype for part in parts)
        name = None if dtype is None else NAME_OF_DTYPE[dtype]
    else:
        return None
    rank = _common(part.ndim for part in parts)
    if name is None or rank is None or rank > MAX_NDIM:
        return None
    shapes = [tuple(part.shape) for part in parts]
    sizes = list(map(math.prod, shapes))
    itemsize = TORCH_ITEMSIZES[name]
    # No reader accepts such rows. The caller then lowers row by row, and names the bad one.
    if sum(sizes) * itemsize >= MAX_BYTES or (
        0 in sizes and any(is_oversized_empty(shape, itemsize) for shape in shapes)
    ):
        return None
    sizes_left, dims_left = iter(sizes), iter([(1, *shape) for shape in shapes])
    lengths = tuple([0 if row is None else next(sizes_left) for row in rows])
    dims_of_none = (0,) * (1 + rank)
    dims = [dims_of_none if row is None else next(dims_left) for row in rows]
    are_tensors = kinds == {tensor_type()}
    return ArrayRows(parts, lengths, np.array(dims, dtype=np.int64), name, are_tensors)


def _common(values: Any) -> Any:
    """The value that all values are equal to; None if they differ."""
    first, *others = {*values}
    return None if others else first


# --- read --------------------------------------------------------------------------------------


MakeRow: TypeAlias = Callable[[int, int, list[int]], Any]
"""``make(start, end, dims)`` makes the array, or the tensor, of a range of elements."""


def array_maker(values: npt.NDArray[Any]) -> MakeRow:
    """A `MakeRow` whose arrays are views of `values`."""
    return lambda start, end, shape: values[start:end].reshape(shape)


def rows_of_arrays(
    make: MakeRow, itemsize: int, lengths: IntArray, dims: IntArray, rows: Sequence[int]
) -> list[Any]:
    """The arrays, tensors or None of rows, after a check of their dims; errors name `rows`."""
    _check_dims(dims, lengths, itemsize, rows)
    items: list[Any] = [None] * len(dims)
    ends = lengths.cumsum()
    exists = np.flatnonzero(dims[:, 0])
    shapes = dims[exists, 1:].tolist()
    places = zip(
        *(exists.tolist(), (ends - lengths)[exists].tolist(), ends[exists].tolist(), shapes),
        strict=True,
    )
    for i, start, end, shape in places:
        items[i] = make(start, end, shape)
    return items


def _check_dims(dims: IntArray, lengths: IntArray, itemsize: int, rows: Sequence[int]) -> None:
    """Raise an error for dims that do not fit the number of elements of their row."""
    exists, shapes = dims[:, 0], dims[:, 1:]
    # A float does not wrap around, but may be a little less than the product.
    extents = np.maximum(shapes, 1).prod(axis=1, dtype=np.float64) * itemsize
    for i in np.flatnonzero((extents >= MAX_BYTES / 2) | (dims < 0).any(axis=1)).tolist():
        try:
            elements_of(dims[i].tolist(), itemsize)
        except WireFormatError as error:
            raise inside(error, int(rows[i])) from error
    # The products are exact: those of large dims were computed above.
    wanted = shapes.prod(axis=1) * exists
    none = (exists == 0) & ~shapes.any(axis=1)
    good = (wanted == lengths) & ((exists == 1) | none)
    if not good.all():
        i = int(np.argmin(good))
        expected = f"a 1 and the dims of {lengths[i]} elements, or zeros and no element"
        raise inside(bad(expected, brief(dims[i].tolist())), int(rows[i]))
