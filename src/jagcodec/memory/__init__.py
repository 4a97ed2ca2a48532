"""Bytes, and where they come from."""

import math
from collections.abc import Sequence
from typing import Any

from jagcodec.errors import ArgumentError, brief

ALIGNMENT = 64
"""Buffers that share memory start at multiples of this: one cache line."""


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT


INT64_MAX = (1 << 63) - 1


def extent_of(dims: Sequence[int]) -> int:
    """The product of dims, where a dim of 0 counts as 1, so that it does not hide the others."""
    return math.prod(dim or 1 for dim in dims)


def total_of(lengths: Any) -> int:
    """The exact sum of (N,) lengths, none below 0; numpy's own sum may wrap around."""
    if len(lengths) * int(lengths.max(initial=0)) <= INT64_MAX:
        return int(lengths.sum())
    return sum(lengths.tolist())


def check_extent(shape: Sequence[int], itemsize: int, path: str) -> None:
    """Refuse a tensor whose sizes and strides int64 cannot hold, though it may have no cells."""
    if extent_of(shape) * itemsize > INT64_MAX:
        found = f"found {brief(list(shape))} with {itemsize} bytes per cell"
        detail = f"expected dims other than 0 of fewer than 2**63 bytes, {found}; take fewer rows"
        raise ArgumentError("too_large", path, detail)
