"""`read_lengths`, `read_rows`: the row lengths that callers pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import integer_of
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory import INT64_MAX
from jagcodec.memory.plain_types import check_plain
from jagcodec.memory.tensor_bytes import plain_array
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.varlen import PackedColumn

Lengths: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
"""What callers may hand in where lengths are asked for."""


LENGTH_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""The dtypes that lengths may have."""


def read_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of a caller's (N,) lengths. One device sync, none for a CPU tensor."""
    found = _length_array(lengths, path)
    if found.ndim != 1 or (rows is not None and len(found) != rows):
        expected = "(N,)" if rows is None else f"({rows},)"
        detail = f"lengths shape {found.shape} != {expected}: expected one length per row"
        raise ArgumentError("bad_shape", path, detail)
    # Copied: what was checked must not change with the caller's lengths. More than int64 holds
    # becomes a number below 0.
    row_splits = RowSplits.from_lengths(found.astype(np.int64))
    if row_splits.min < 0:
        row = int(np.argmax(row_splits.lengths < 0))
        detail = f"expected a length of 0 or more, below 2**63, found {found[row]}"
        raise ArgumentError("bad_length", f"{path}, row {row}", detail)
    if row_splits.max * row_splits.rows > INT64_MAX:
        detail = f"expected lengths that add up below 2**63, found {row_splits.max}"
        raise ArgumentError("bad_length", path, detail)
    return row_splits


def _length_array(lengths: Any, path: str) -> npt.NDArray[Any]:
    """A caller's lengths as an array of integers, aliased if they are one on the host."""
    if isinstance(lengths, (list, tuple)):
        return np.array([_length(item, f"{path}, row {i}") for i, item in enumerate(lengths)], int)
    if isinstance(lengths, torch.Tensor):
        plain = lengths.layout is torch.strided and not lengths.is_nested
        integers = lengths.dtype in LENGTH_DTYPES
    else:
        plain = isinstance(lengths, (np.ndarray, array))
        lengths = np.asarray(lengths) if isinstance(lengths, array) else lengths
        integers = plain and lengths.dtype.kind in "iu"
    if not plain:
        detail = "expected (N,) lengths: a strided tensor, an array, a list or a tuple"
        raise ArgumentTypeError("bad_type", path, f"{detail}, found {describe(lengths)}")
    found = plain_array(lengths) if integers else None
    if found is not None:
        return found
    check_plain(lengths, path)
    if not integers:
        detail = f"expected integer lengths, found {lengths.dtype}"
        raise ArgumentTypeError("bad_dtype", path, detail)
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.detach().cpu().numpy()
    integer_array: npt.NDArray[Any] = lengths
    return integer_array


def _length(item: Any, path: str) -> int:
    """One integer of any type, as an int."""
    number = item
    if type(item) is not int:
        number = integer_of(item)
        if number is None:
            detail = f"expected integer lengths, found {brief(item)}"
            raise ArgumentTypeError("bad_dtype", path, detail)
    if not -INT64_MAX <= number <= INT64_MAX:
        detail = f"expected a length of 0 or more, below 2**63, found {brief(number)}"
        raise ArgumentError("bad_length", path, detail)
    return int(number)


def read_rows(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """As `read_lengths`; a jagged tensor has its row lengths read, and its offsets object kept."""
    if not is_jagged(lengths):
        if isinstance(lengths, PackedColumn):
            detail = "expected (N,) lengths, found PackedColumn; pass its .cu_seqlens.diff()"
            raise ArgumentTypeError("bad_type", path, detail)
        return read_lengths(lengths, path, rows=rows)
    view = view_of(lengths, path)
    if view.ragged_dim != 1:
        raise ArgumentError("bad_shape", path, f"expected ragged dim 1, found {view.ragged_dim}")
    if rows is not None and view.row_splits.rows != rows:
        detail = f"expected {rows} rows, found {view.row_splits.rows}"
        raise ArgumentError("row_mismatch", path, detail)
    return view.row_splits
