"""float16 and bfloat16 without torch: float32 is rounded to them, and they become float32 again.

Arrays hold bfloat16 as unsigned words, because numpy does not have it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_INFINITE = {"float16": 2.0**16 - 2.0**4, "bfloat16": 2.0**128 - 2.0**119}
"""Floats of this size or more become infinite. These dtypes have fewer bits than float32."""

_NAN = np.uint16(0x7FC0)


def rounded(floats: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """The cells of one of these dtypes that are nearest to floats; of two, the even one."""
    if dtype == "float16":
        with np.errstate(all="ignore"):
            return floats.astype(np.float16)
    words = floats.view(np.uint32)
    # A carry goes from the half that is cut off into the other one, up to infinity.
    upper = (words + (0x7FFF + (words >> 16 & 1))) >> 16
    return np.where(np.isnan(floats), _NAN, upper.astype(np.uint16))


def as_float32(cells: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Cells of one of these dtypes as float32, which is exact."""
    if dtype == "float16":
        return cells.astype(np.float32)
    return (cells.astype(np.uint32) << 16).view(np.float32)
