"""Lists of Python numbers to cells and back, with nothing lost; and which values msgpack knows.

One pass over the items: in C, or by the standard library if the extension of this package was not
built. ``JAGCODEC_ROWCOPY=numpy`` turns this extension off too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jagcodec.cells import python_cells

__all__ = ["PACKED", "fill", "is_native", "missing", "pack", "unpack_numbers"]

_active: Any = python_cells
_missing: str | None = "JAGCODEC_ROWCOPY=numpy"
if os.environ.get("JAGCODEC_ROWCOPY") != "numpy":
    try:
        _active, _missing = importlib.import_module("jagcodec.cells._cells"), None
    except ImportError as _error:
        _missing = str(_error)

fill: Callable[..., Any] = _active.fill
is_native: Callable[[Sequence[Any], int, int, int, int], bool] = _active.is_native
pack: Callable[[list[Any]], tuple[str, bytes] | None] = _active.pack


def missing() -> str | None:
    """Why the compiled extension is not in use; None if it is."""
    return _missing


PACKED = {name: np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64", "float64")}
"""The dtypes that `pack` names."""


def unpack_numbers(dtype: str, data: bytes) -> list[Any] | None:
    """The list that `pack` was given, or None if these are not such bytes."""
    known = PACKED[dtype]
    if len(data) % known.itemsize or (dtype == "bool" and data.translate(None, b"\0\1")):
        return None
    numbers: list[Any] = np.frombuffer(data, known).tolist()
    return numbers
