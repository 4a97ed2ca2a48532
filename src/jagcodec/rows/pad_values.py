"""Pad values as bits of any dtype, or an error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe

# The one dtype that has no zero: its bits 0 are 2**-127.
_WITHOUT_ZERO: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)


def pad_bits(value: Any, dtype: torch.dtype, path: str) -> bytes:
    """The bits of one pad cell, for a number or one cell of a tensor or an array; or an error."""
    bits = bits_of(value, dtype)
    if bits is not None:
        return bits
    if _number_in(value) is None:
        detail = f"expected a number to pad with, found {describe(value)}"
        raise ArgumentTypeError("bad_pad", path, detail)
    remedy = "; it has no zero: its smallest value is 2.0**-127" if dtype is _WITHOUT_ZERO else ""
    found = describe(value) if isinstance(value, torch.Tensor) else brief(value)
    detail = f"expected a pad that {dtype} holds, found {found}{remedy}"
    raise ArgumentError("bad_pad", path, detail)


def bits_of(value: Any, dtype: torch.dtype) -> bytes | None:
    """The bits of one pad cell; None where `pad_bits` raises."""
    number = value if type(value) in (int, float) else _number_in(value)
    if number is None:
        return None
    if not number and dtype is not _WITHOUT_ZERO and _is_unsigned(number):
        return bytes(dtype.itemsize)
    return (_other_bits if isinstance(number, complex) else _kept_bits)(number, dtype)


def _is_unsigned(zero: Any) -> bool:
    """Whether a zero has no minus sign, in its imaginary part neither."""
    return math.copysign(1.0, zero.real) > 0 and math.copysign(1.0, zero.imag) > 0


def _number_in(value: Any) -> Any:
    """A number, or the only cell of a tensor or an array; None for any other value."""
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # it has several cells, or no memory
            return None
    return value if isinstance(value, (bool, int, float, complex)) else None


def _other_bits(number: Any, dtype: torch.dtype) -> bytes | None:
    """The bits of a number that need not be all 0; None if the dtype does not hold it."""
    try:
        if dtype.is_floating_point or dtype.is_complex:
            cell = torch.tensor(number, dtype=dtype)
            rounded = cell.to(torch.complex128).item()
            exact = complex(number)
            pairs = ((exact.real, rounded.real), (exact.imag, rounded.imag))
            fits = rounded == number if isinstance(number, int) else _all_round(pairs, dtype)
            return bytes(cell.reshape(1).view(torch.uint8).tolist()) if fits else None
        whole = int(number)
        limits = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None
    if whole != number or not limits[0] <= whole <= limits[1]:
        return None
    return bytes(whole.to_bytes(dtype.itemsize, "little", signed=whole < 0))


# A training run pads with the same few numbers throughout, and computing the bits of a float takes
# longer than filling a small rectangle. Equal keys have equal bits: -0.0 is a key, 0.0 never is.
_kept_bits = lru_cache(maxsize=256, typed=True)(_other_bits)


def _all_round(pairs: Iterable[tuple[float, float]], dtype: torch.dtype) -> bool:
    """Whether a dtype holds numbers to its precision: none became infinite, NaN or zero."""
    # Dtypes without infinity clamp larger numbers.
    infinity = torch.tensor(math.inf, dtype=dtype).to(torch.complex128).item().real
    limit = math.inf if math.isinf(infinity) else torch.finfo(dtype).max
    for exact, rounded in pairs:
        if math.isnan(exact) or exact == 0 or math.isinf(exact):
            fits = rounded == exact or (math.isnan(rounded) and math.isnan(exact))
        else:
            fits = rounded != 0 and (rounded > 0) == (exact > 0) and abs(exact) <= limit
            fits = fits and math.isfinite(rounded)
        if not fits:
            return False
    return True
