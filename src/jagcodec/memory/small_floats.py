"""Floats that numpy lacks, without torch: float32 is rounded to them, and they become float32.

Arrays hold them as unsigned words.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_INFINITE = {"float16": 2.0**16 - 2.0**4, "bfloat16": 2.0**128 - 2.0**119}
"""Floats of this size or more become infinite. These dtypes have fewer bits than float32."""

_NAN = np.uint16(0x7FC0)


def rounded(floats: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """The cells of float16 or bfloat16 that are nearest to floats; of two, the even one."""
    if dtype == "float16":
        with np.errstate(all="ignore"):
            return floats.astype(np.float16)
    words = floats.view(np.uint32)
    # A carry goes from the half that is cut off into the other one, up to infinity.
    upper = (words + (0x7FFF + (words >> 16 & 1))) >> 16
    return np.where(np.isnan(floats), _NAN, upper.astype(np.uint16))


def numbers_of(cells: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Cells of a dtype as numbers that numpy has: small floats are widened, which is exact.

    TypeError for a dtype whose cells cannot be read as numbers.
    """
    if dtype == "float16":
        return cells.astype(np.float32)
    if dtype == "bfloat16":
        # With the dtype said: numpy 1 makes int64 of `cell << 16` if the array has no dims.
        return np.asarray(np.left_shift(cells, 16, dtype=np.uint32)).view(np.float32)
    if dtype in _FLOAT8 or dtype == _EXPONENTS:
        return np.asarray(_floats_by_code(dtype)[cells])
    if dtype == "complex32":
        halves = np.array(cells, order="C")[..., None].view(np.float16)
        return np.asarray(halves.astype(np.float32).view(np.complex64)[..., 0])
    if cells.dtype.name != dtype:
        raise TypeError(f"numpy has no dtype for cells of {dtype}")
    return cells


# The bits of the fraction, the bias of the exponent, and the codes of NaNs, by the OCP 8-bit
# floating point specification. The "fnuz" variants of Graphcore and AMD have one zero and one NaN.
_FLOAT8 = {
    "float8_e4m3fn": (3, 7, (0x7F, 0xFF)),
    "float8_e5m2": (2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    "float8_e4m3fnuz": (3, 8, (0x80,)),
    "float8_e5m2fnuz": (2, 16, (0x80,)),
}
_EXPONENTS = "float8_e8m0fnu"  # powers of two


@functools.cache
def _floats_by_code(dtype: str) -> npt.NDArray[np.float32]:
    """The float of each of the 256 codes of a dtype."""
    codes = np.arange(256)
    if dtype == _EXPONENTS:
        return np.where(codes == 255, np.nan, 2.0 ** (codes - 127)).astype(np.float32)
    bits, bias, not_numbers = _FLOAT8[dtype]
    exponents, fractions = (codes & 0x7F) >> bits, codes & ((1 << bits) - 1)
    small = fractions * 2.0 ** (1 - bias - bits)
    large = ((1 << bits) + fractions) * 2.0 ** (exponents - bias - bits)
    floats = np.where(exponents == 0, small, large)
    if dtype == "float8_e5m2":  # the only one of these with infinities
        floats[(codes & 0x7F) == 0x7C] = np.inf
    floats = np.where(codes < 128, floats, -floats)
    floats[list(not_numbers)] = np.nan
    return floats.astype(np.float32)
