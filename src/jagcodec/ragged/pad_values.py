"""Pad values as bits: exact for every dtype, or an error."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError


def pad_bits(value: Any, dtype: torch.dtype, path: str) -> bytes:
    """The bits of one pad cell; exact, or an error.

    Zero is all bits 0 in every dtype, those without arithmetic (``int4``, ``bits8``) included.

    Raises:
        ArgumentError: `dtype` cannot hold `value`; `path` says whose pad it is.
    """
    if type(value) in (int, float):
        if value == 0 and math.copysign(1.0, value) > 0:
            return bytes(dtype.itemsize)
        bits = _bits_of_number(value, dtype)
    else:
        scalar = value
        if isinstance(value, (torch.Tensor, np.generic, np.ndarray)) and np.size(value) == 1:
            scalar = value.item()
        if not isinstance(scalar, (bool, int, float, complex)):
            raise ArgumentTypeError(
                "bad_pad", path, f"expected a number to pad with, found {type(value).__name__}"
            )
        bits = _bits(scalar, dtype)
    if bits is None:
        raise ArgumentError("bad_pad", path, f"expected a pad that {dtype} holds, found {value!r}")
    return bits


def _bits(scalar: Any, dtype: torch.dtype) -> bytes | None:
    """Those of a number; None if the dtype does not hold it."""
    if scalar == 0 and math.copysign(1.0, complex(scalar).real) > 0:
        return bytes(dtype.itemsize)
    if dtype.is_floating_point or dtype.is_complex:
        try:
            cell = torch.tensor(scalar, dtype=dtype)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            return None
        held = cell.to(torch.complex128).item()
        # A fraction is rounded as ever; a whole number, such as a token id, must be kept.
        whole_number = not isinstance(scalar, complex) and scalar % 1 == 0
        if (held != scalar) if whole_number else (abs(held) == math.inf != abs(scalar)):
            return None
        return bytes(cell.reshape(1).view(torch.uint8).tolist())
    try:
        whole = int(scalar)
        limits = (0, 1) if dtype == torch.bool else _int_limits(dtype)
    except (TypeError, ValueError, OverflowError):
        return None
    if whole != scalar or not limits[0] <= whole <= limits[1]:
        return None
    return bytes(whole.to_bytes(dtype.itemsize, "little", signed=whole < 0))


# A run pads with the same few numbers from its first batch to its last, and to make the bits of a
# float takes longer than to fill a small rectangle. Equal keys have equal bits: the positive zero
# never comes here, so that the negative one has none.
_bits_of_number = lru_cache(maxsize=256, typed=True)(_bits)


@cache
def _int_limits(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)
