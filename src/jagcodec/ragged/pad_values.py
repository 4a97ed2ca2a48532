"""Pad values as bits: of every dtype, or an error."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, describe

# The one dtype that has no zero: its bits 0 are 2**-127.
_WITHOUT_ZERO: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)


def pad_bits(value: Any, dtype: torch.dtype, path: str) -> bytes:
    """The bits of one pad cell.

    Integers are exact. Fractions are rounded as `torch.tensor` rounds them, though never to
    infinity or to zero, which means something else than the number that was given. Zero is all
    bits 0 in every dtype that has it, those without arithmetic (``int4``, ``bits8``) included.

    Args:
        value: A number, or a tensor or an array of one cell.
        dtype: Of the column.
        path: Whose pad it is.

    Raises:
        ArgumentError: `dtype` cannot hold `value`.
        ArgumentTypeError: `value` is no number.
    """
    if type(value) in (int, float):
        if value == 0 and math.copysign(1.0, value) > 0 and dtype is not _WITHOUT_ZERO:
            return bytes(dtype.itemsize)
        bits = _bits_of_number(value, dtype)
    else:
        bits = _bits(_number(value, path), dtype)
    if bits is None:
        remedy = (
            "; it has no zero: its smallest value is 2.0**-127" if dtype is _WITHOUT_ZERO else ""
        )
        raise ArgumentError(
            "bad_pad", path, f"expected a pad that {dtype} holds, found {value!r:.80}{remedy}"
        )
    return bits


def _number(value: Any, path: str) -> bool | int | float | complex:
    """The number that is given, or that is the one cell of what is given."""
    number = value
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)):
        try:
            number = value.item()
        except (RuntimeError, ValueError):  # several cells; no memory
            number = None
    if not isinstance(number, (bool, int, float, complex)):
        raise ArgumentTypeError(
            "bad_pad", path, f"expected a number to pad with, found {describe(value)}"
        )
    return number


def _bits(scalar: Any, dtype: torch.dtype) -> bytes | None:
    """Those of a number; None if the dtype does not hold it."""
    if scalar == 0 and math.copysign(1.0, complex(scalar).real) > 0 and dtype is not _WITHOUT_ZERO:
        return bytes(dtype.itemsize)
    if dtype.is_floating_point or dtype.is_complex:
        try:
            cell = torch.tensor(scalar, dtype=dtype)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            return None
        held = cell.to(torch.complex128).item()
        if isinstance(scalar, int):
            fits = held == scalar
        else:
            given, limit = complex(scalar), _limit(dtype)
            fits = _rounds(given.real, held.real, limit) and _rounds(given.imag, held.imag, limit)
        return bytes(cell.reshape(1).view(torch.uint8).tolist()) if fits else None
    try:
        whole = int(scalar)
        limits = (0, 1) if dtype == torch.bool else _int_limits(dtype)
    except (TypeError, ValueError, OverflowError):
        return None
    if whole != scalar or not limits[0] <= whole <= limits[1]:
        return None
    return bytes(whole.to_bytes(dtype.itemsize, "little", signed=whole < 0))


def _rounds(given: float, held: float, limit: float) -> bool:
    """Whether `held` is `given` to the precision of a dtype, and of the same sort."""
    if math.isnan(given):
        return math.isnan(held)
    if given == 0 or math.isinf(given):
        return held == given
    same_sign = held > 0 if given > 0 else held < 0
    return same_sign and math.isfinite(held) and abs(given) <= limit


@cache
def _limit(dtype: torch.dtype) -> float:
    """What is larger is not rounded but cut off: by dtypes without infinity, in some versions."""
    infinity = torch.tensor(math.inf, dtype=dtype).to(torch.complex128).item().real
    return math.inf if math.isinf(infinity) else float(torch.finfo(dtype).max)


# A run pads with the same few numbers from its first batch to its last, and to make the bits of a
# float takes longer than to fill a small rectangle. Equal keys have equal bits: the positive zero
# never comes here, so that the negative one has none.
_bits_of_number = lru_cache(maxsize=256, typed=True)(_bits)


@cache
def _int_limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)
