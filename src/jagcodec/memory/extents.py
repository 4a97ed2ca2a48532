"""How large dims may be, including those next to a dim of 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jagcodec.errors import ArgumentError, brief
from jagcodec.memory import INT64_MAX, extent_of


def total_of(lengths: Any) -> int:
    """The exact sum of (N,) lengths, none below 0; numpy's own sum may wrap around."""
    if len(lengths) * int(lengths.max(initial=0)) <= INT64_MAX:
        return int(lengths.sum())
    return sum(lengths.tolist())


def lists_of(shape: Sequence[int]) -> int:
    """How many lists are inside the list that an array of this shape becomes."""
    return sum(math.prod(shape[:dims]) for dims in range(1, len(shape)))


def check_extent(shape: Sequence[int], itemsize: int, path: str) -> None:
    """Refuse a tensor whose sizes and strides int64 cannot hold, though it may have no cells."""
    if extent_of(shape) * itemsize > INT64_MAX:
        detail = f"expected dims other than 0 of fewer than 2**63 bytes, found {brief(list(shape))}"
        detail += f" with {itemsize} bytes per cell; take fewer rows"
        raise ArgumentError("too_large", path, detail)


class ListBudget:
    """How many lists arrays may still become, beyond those that their cells pay for.

    Without cells, an array of a few bytes may be any number of lists.
    """

    def __init__(self, most: int) -> None:
        self.most: int = most
        self._left = most

    def claim(self, lists: int, cells: int, dims: int, path: str) -> None:
        """Refuse an array of so many cells and dims that would become too many lists."""
        self._left -= max(0, lists - cells * dims)
        if self._left < 0:
            detail = f"expected at most {self.most} lists without numbers in them"
            remedy = "use as_='array' or 'tensor'"
            raise ArgumentError("too_large", path, f"{detail}, found {lists}; {remedy}")
