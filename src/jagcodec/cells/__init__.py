"""Lists of Python numbers to cells and back, with nothing lost.

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
from jagcodec.memory.tensor_bytes import IntArray

__all__ = ["PACKED", "fill", "missing", "pack", "unpack_numbers"]

_active: Any = python_cells
_missing: str | None = "JAGCODEC_ROWCOPY=numpy"
if os.environ.get("JAGCODEC_ROWCOPY") != "numpy":
    try:
        _active, _missing = importlib.import_module("jagcodec.cells._cells"), None
    except ImportError as _error:
        _missing = str(_error)


def missing() -> str | None:
    """Why the compiled extension is not in use; None if it is."""
    return _missing


def fill(
    rows: Sequence[Sequence[Any]],
    lengths: IntArray,
    out: Any,
    code: str,
    precision: int,
    convert: Callable[[Any], Any],
) -> tuple[int, int] | None:
    """Write the numbers of all rows end to end to `out`, as cells of a code of `array`, or ``?``.

    Returns None, or the row and the index of the first item that is not a number or does not fit:
    only bools go to cells of bools, and ints must be exact (in a float with `precision` bits).
    Floats are rounded to the nearest; a finite one must stay finite. `convert` makes a number of
    an item of another type, or None. ValueError: a row does not have its length.
    """
    found: tuple[int, int] | None = _active.fill(rows, lengths, out, code, precision, convert)
    return found


def pack(numbers: list[Any]) -> tuple[str, bytes] | None:
    """The numbers of a list as little-endian bytes, and the name of their dtype in `PACKED`.

    None unless all items are of one type: exactly int (of 64 bits at most), float or bool.
    """
    packed: tuple[str, bytes] | None = _active.pack(numbers)
    return packed


PACKED = {name: np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64", "float64")}
"""The dtypes that `pack` names."""


def unpack_numbers(dtype: str, data: bytes) -> list[Any] | None:
    """The list that `pack` was given, or None if these are not such bytes."""
    known = PACKED.get(dtype)
    if known is None or len(data) % known.itemsize:
        return None
    if dtype == "bool" and data.translate(None, b"\0\1"):
        return None
    numbers: list[Any] = np.frombuffer(data, known).tolist()
    return numbers
