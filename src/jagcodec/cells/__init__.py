"""Python's numbers to cells, and back: ints, floats and bools in lists, with nothing lost.

One pass over the items, in C where the extension of this package was built (``"compiled"``), else
by the standard library. ``JAGCODEC_ROWCOPY=numpy``, which does without the compiled row kernel,
does without this extension too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jagcodec.cells import python_cells
from jagcodec.memory.tensor_bytes import IntArray

__all__ = ["PACKED", "fill", "missing", "pack", "unpack"]

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
    precision: int = 0,
    convert: Callable[[Any], Any] | None = None,
) -> tuple[int, int] | None:
    """Write the numbers of all rows, end to end, as cells.

    Bools go to cells of bools alone. Other cells hold an int exactly, or it is refused; floats are
    rounded to the nearest, and refused where a finite one would become infinite.

    Args:
        rows: Lists or tuples.
        lengths: How long each of them is.
        out: A writable buffer of as many cells.
        code: What the cells are, as in `array`: one of ``bBhHiIqQfd``, or ``?`` for bools.
        precision: Of floats: how many bits an int may take from its first 1 to its last.
        convert: Makes an int, float or bool of an item that is none of them, or anything else if
            it cannot.

    Returns:
        None, or the row and the index of the first item that is not a number or does not fit.

    Raises:
        ValueError: A row is not as long as was said.

    Example:
        >>> import numpy as np
        >>> from jagcodec.cells import fill
        >>> out = np.empty(3, dtype=np.int32)
        >>> fill([[5, 6], (7,)], np.array([2, 1]), out, "i")
        >>> out.tolist()
        [5, 6, 7]
        >>> fill([[5, 6], (1 << 31,)], np.array([2, 1]), out, "i")
        (1, 0)
    """
    found: tuple[int, int] | None = _active.fill(rows, lengths, out, code, precision, convert)
    return found


def pack(numbers: list[Any]) -> tuple[str, bytes] | None:
    r"""The numbers of a list as little-endian bytes, and the name of the dtype that they take.

    Ints take the smallest of int8 to int64 that holds all of them, floats float64, bools a byte.

    Returns:
        None unless all items are of one type: exactly int (of 64 bits at most), float or bool.

    Example:
        >>> from jagcodec.cells import pack
        >>> pack([1, -2, 300])
        ('int16', b'\x01\x00\xfe\xff,\x01')
        >>> pack([1, 2.0])
    """
    packed: tuple[str, bytes] | None = _active.pack(numbers)
    return packed


PACKED = {name: np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64", "float64")}
"""The dtypes that `pack` names."""


def unpack(dtype: str, data: bytes) -> list[Any] | None:
    r"""The list that `pack` was given, or None if these are not such bytes.

    Example:
        >>> from jagcodec.cells import unpack
        >>> unpack("int16", b"\x01\x00\xfe\xff,\x01")
        [1, -2, 300]
    """
    known = PACKED.get(dtype)
    if known is None or len(data) % known.itemsize:
        return None
    if dtype == "bool" and data.translate(None, b"\0\1"):
        return None
    numbers: list[Any] = np.frombuffer(data, known).tolist()
    return numbers
