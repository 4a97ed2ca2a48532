"""Which dtypes cells have: those of Python's numbers, of arrays, and of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import NUMPY_DTYPES
from jagcodec.wire.torch_dtypes import TORCH_NAMES

# How `cells.fill` writes numbers of a dtype: code, stored dtype, and bits of precision. It writes
# float16 and bfloat16 as float32, because torch rounds Python's floats that way.
FILL_CODES: dict[torch.dtype, tuple[str, np.dtype[Any], int]] = {
    getattr(torch, name): (code, np.dtype(name), 0)
    for code, name in zip(
        "?bhiqBHIQ",
        ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
        strict=True,
    )
} | {
    torch.bfloat16: ("f", np.dtype("f"), 8),
    torch.float16: ("f", np.dtype("f"), 11),
    torch.float32: ("f", np.dtype("f"), 24),
    torch.float64: ("d", np.dtype("d"), 53),
}
# Floats of this size or more become infinite in cells that are narrower than what C writes.
LEAST_INFINITE = {torch.float16: 2.0**16 - 2.0**4, torch.bfloat16: 2.0**128 - 2.0**119}

DEFAULT_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}
"""The dtypes of columns whose numbers are all of one Python type."""

PLAIN_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in NUMPY_DTYPES.items()}
"""The array dtypes that a column may have, each with torch's dtype for it."""

TORCH_ARRAY_DTYPES = PLAIN_DTYPES.keys() | set(
    map(np.dtype, ("uint16", "uint32", "uint64", "complex64", "complex128"))
)
"""All array dtypes that torch has."""

# The dtypes of tensors whose cells can be read as Python numbers.
NUMBER_DTYPES = FILL_CODES.keys() | {d for d in TORCH_NAMES if str(d).startswith("torch.float8_")}
