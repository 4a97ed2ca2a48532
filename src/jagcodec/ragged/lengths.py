"""Row lengths that callers pass, tensors included, as `RowSplits`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from jagcodec.errors import ArgumentTypeError, describe
from jagcodec.packing.lengths import length_array
from jagcodec.ragged.row_splits import RowSplits

Lengths: TypeAlias = torch.Tensor | npt.NDArray[Any] | Sequence[int]
"""What callers may hand in where lengths are asked for."""

LENGTH_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)
"""The dtypes that lengths may have."""


def read_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of a caller's (N,) lengths. One device sync, none for a CPU tensor."""
    if isinstance(lengths, torch.Tensor):
        lengths = _host_numbers(lengths, path)
    return RowSplits.from_lengths(length_array(lengths, path, rows=rows))


def _host_numbers(lengths: torch.Tensor, path: str) -> npt.NDArray[Any]:
    """A tensor of integers as an array, aliased if it is on the host."""
    if lengths.layout is not torch.strided or lengths.is_nested or lengths.is_meta:
        detail = f"expected (N,) lengths in a strided tensor, found {describe(lengths)}"
        raise ArgumentTypeError("bad_type", path, detail)
    if lengths.dtype not in LENGTH_DTYPES:
        detail = f"expected integer lengths, found {lengths.dtype}"
        raise ArgumentTypeError("bad_dtype", path, detail)
    array: npt.NDArray[Any] = (lengths if lengths.is_cpu else lengths.cpu()).numpy()
    return array
