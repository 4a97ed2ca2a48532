"""Tables of the dtypes that cells have: how their numbers are written, stored and read."""

from __future__ import annotations

from typing import Any

import numpy as np

from jagcodec.memory.arrays import IN_NUMPY, stored_dtype
from jagcodec.wire.spec import TORCH_ITEMSIZES

# How `kernels.fill` writes numbers of a dtype: code, stored dtype, and bits of precision. It writes
# float16 and bfloat16 as float32, because torch rounds Python's floats that way.
FILL_CODES: dict[str, tuple[str, np.dtype[Any], int]] = {
    name: (code, np.dtype(name), 0)
    for code, name in zip(
        "?bhiqBHIQ",
        ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
        strict=True,
    )
} | {
    "bfloat16": ("f", np.dtype("f"), 8),
    "float16": ("f", np.dtype("f"), 11),
    "float32": ("f", np.dtype("f"), 24),
    "float64": ("d", np.dtype("d"), 53),
}

DEFAULT_DTYPES: dict[type, str] = {bool: "bool", int: "int64", float: "float32"}
"""The dtypes of columns whose numbers are all of one Python type."""

STORED_DTYPES: dict[str, np.dtype[Any]] = {
    name: stored_dtype(name, size) for name, size in TORCH_ITEMSIZES.items()
}
"""The dtypes of arrays of cells: numpy's own, or unsigned words of the same size."""

TORCH_ARRAY_DTYPES = set(IN_NUMPY.values())
"""All array dtypes that torch has."""

# The dtypes whose cells can be read as Python numbers.
NUMBER_DTYPES = FILL_CODES.keys() | {d for d in TORCH_ITEMSIZES if d.startswith("float8_")}
