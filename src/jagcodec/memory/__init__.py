"""Bytes, and where they come from."""

import math
from collections.abc import Sequence

ALIGNMENT = 64
"""Buffers that share memory start at multiples of this: one cache line."""


def aligned(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return (size + ALIGNMENT - 1) & -ALIGNMENT


INT64_MAX = (1 << 63) - 1


def extent_of(dims: Sequence[int]) -> int:
    """The product of dims, where a dim of 0 counts as 1, so that it does not hide the others."""
    return math.prod(dim or 1 for dim in dims)
