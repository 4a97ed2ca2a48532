"""`read_lengths`, `read_row_lengths`: the row lengths that callers pass, also as tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import check_array, int_or_none
from jagcodec._dependencies import module_with_torch
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.arrays import IntArray, is_of_torch, tensor_type
from jagcodec.rows.row_splits import RowSplits

if TYPE_CHECKING:
    import torch


_LARGEST = np.iinfo(np.int64).max

Lengths: TypeAlias = Union["torch.Tensor", npt.NDArray[Any], Sequence[int]]
"""What callers may pass as lengths."""


def read_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of a caller's (N,) lengths. One device sync, none for a CPU tensor."""
    if isinstance(lengths, tensor_type()):
        lengths = _of_tensors(path).lengths_in_tensor(lengths, path)
    return RowSplits.from_lengths(length_array(lengths, path, rows=rows))


def read_row_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of lengths, or of a jagged tensor, whose offsets object is kept."""
    if is_of_torch(type(lengths)):
        splits: RowSplits | None = _of_tensors(path).rows_of_jagged(lengths, path, rows)
        if splits is not None:
            return splits
    return read_lengths(lengths, path, rows=rows)


def _of_tensors(path: str) -> Any:
    """The module that reads tensors, which imports torch."""
    return module_with_torch("rows.of_tensors", path)


def length_array(lengths: Any, path: str, *, rows: int | None = None) -> IntArray:
    """A caller's list, tuple or array-like of (N,) lengths as a new array.

    No length is negative, and they add up below 2**63. `read_lengths` reads tensors, too.
    """
    numbers = _integer_array(lengths, path)
    if numbers.ndim != 1 or (rows is not None and len(numbers) != rows):
        expected = "(N,)" if rows is None else f"({rows},)"
        detail = f"lengths shape {numbers.shape} != {expected}: expected one length per row"
        raise ArgumentError("bad_shape", path, detail)
    # Copy, so that lengths that were checked do not change with the caller's. Numbers that int64
    # does not hold become negative.
    copied = numbers.astype(np.int64)
    if not len(copied):
        return copied
    if copied.item(copied.argmin()) < 0:
        row = int(np.argmax(copied < 0))
        detail = f"expected a length of 0 or more, below 2**63, found {numbers[row]}"
        raise ArgumentError("bad_length", f"{path}, row {row}", detail)
    longest = copied.item(copied.argmax())
    if longest * len(copied) > _LARGEST:
        detail = f"expected lengths that add up below 2**63, found {longest}"
        raise ArgumentError("bad_length", path, detail)
    return copied


def _integer_array(lengths: Any, path: str) -> npt.NDArray[Any]:
    """Lengths as an array of integers, which may alias them."""
    if isinstance(lengths, (list, tuple, range)):
        return np.array([_length(item, f"{path}, row {i}") for i, item in enumerate(lengths)], int)
    if isinstance(lengths, np.ndarray):
        check_array(lengths, path)
    is_array = isinstance(lengths, (np.ndarray, array)) or hasattr(lengths, "__array__")
    try:
        numbers = np.asarray(lengths) if is_array else None
    except Exception:  # a foreign `__array__` may raise anything
        numbers = None
    if numbers is None:
        detail = (
            "expected (N,) lengths: a list, a tuple, an array or a strided tensor, "
            f"found {describe(lengths)}"
        )
        raise ArgumentTypeError("bad_type", path, detail)
    if numbers.dtype.kind not in "iu" and numbers.shape != (0,):  # `np.array([])` holds floats
        first = numbers.reshape(-1)[:1].tolist()
        where = f", {brief(first[0])} in row 0" if first else ""
        detail = f"expected integer lengths, found {numbers.dtype}{where}"
        raise ArgumentTypeError("bad_dtype", path, detail)
    return numbers


def _length(item: Any, path: str) -> int:
    """An integer of any type as an int; an error for any other value."""
    number = int_or_none(item)
    if number is None:
        detail = f"expected integer lengths, found {brief(item)}"
        raise ArgumentTypeError("bad_dtype", path, detail)
    if not -_LARGEST <= number <= _LARGEST:
        detail = f"expected a length of 0 or more, below 2**63, found {brief(number)}"
        raise ArgumentError("bad_length", path, detail)
    return number


def check_row_ends(ends: IntArray, lengths: IntArray, path: str) -> None:
    """Refuse ends of rows that are longer than their rows; both have (N,) lengths."""
    longer = ends > lengths
    if longer.any():
        row = int(longer.argmax())
        detail = f"expected at most the row's length of {lengths[row]}, found {ends[row]}"
        raise ArgumentError("bad_length", f"{path}, row {row}", detail)


def check_size(cells: int, path: str) -> None:
    """Refuse more cells than int32 offsets count."""
    if cells >= 1 << 31:
        detail = f"expected fewer than 2**31 cells, found {cells}; split the batch"
        raise ArgumentError("bad_length", path, detail)
