"""Expert ids in the smallest dtype: one rule for `smallest_ids` and for readers of replies."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import integer_of, whole_number
from jagcodec.errors import ArgumentError, brief

_SMALLEST_FIRST = tuple(np.dtype(name) for name in ("uint8", "int8", "int16", "int32", "int64"))


class KnownIds(NamedTuple):
    """The ids that may occur: those of all experts of a model, and the pad, if there is one."""

    experts: int
    pad: int | None

    def in_smallest(self, ids: npt.NDArray[Any], path: str) -> npt.NDArray[Any]:
        """The ids in the smallest dtype for all ids that may occur; an error for any other id."""
        pad = 0 if self.pad is None else self.pad
        low, high = min(pad, 0), max(pad, self.experts - 1)
        found = smallest_of(ids, low, high)
        self._check(ids, path)
        return found

    def _check(self, ids: npt.NDArray[Any], path: str) -> None:
        if not ids.size or (ids.min() >= 0 and ids.max() < self.experts):
            return
        outside = (ids < 0) | (ids >= self.experts)
        if self.pad is not None:
            outside &= ids != self.pad
        if outside.any():
            at = [int(i) for i in np.argwhere(outside)[0]]
            detail = f"expected ids of {self.experts} experts, found {ids[tuple(at)]} at {at}"
            raise ArgumentError("bad_value", path, detail)


def known_ids(experts: Any, pad: Any, where: str) -> KnownIds | None:
    """What a caller said about expert ids; None if it said nothing."""
    if experts is None and pad is None:
        return None
    count = whole_number(experts, 1, f"{where}(experts)", "the number of experts")
    if pad is None:
        return KnownIds(count, None)
    number, path = integer_of(pad), f"{where}(pad)"
    if number is None:
        raise ArgumentError("bad_pad", path, f"expected an integer or None, found {brief(pad)}")
    if 0 <= number < count:
        detail = f"expected a pad that is not the id of an expert (0 to {count - 1})"
        raise ArgumentError("bad_pad", path, f"{detail}, found {number}; pass -1")
    return KnownIds(count, number)


def smallest_of(ids: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[Any]:
    """The ids in the first dtype that holds both numbers; unchanged if none of them does."""
    for dtype in _SMALLEST_FIRST:
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return ids.astype(dtype, copy=False)
    return ids
