"""numpy arrays on the wire: names of dtypes, and cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, array_bytes


def name_of(dtype: np.dtype[Any]) -> str | None:
    """Numpy's own name of a dtype; None for one that cannot be encoded.

    Those have fields, are long doubles, strings of variable width, or another package's.
    """
    if dtype.kind not in "biufcmMSUV" or dtype.char in "gG" or dtype.names is not None:
        return None
    known = np.dtype(dtype.str)
    # Types that other packages add (ml_dtypes) pass for void.
    # C has two names for a 64-bit integer, and numpy a type for each; they are one dtype.
    same = known.type is dtype.type or dtype.kind in "iu"
    return dtype.str if known == dtype and same else None


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of a checked name."""
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:
        raise WireFormatError(
            "unknown_dtype",
            "$",
            f"expected a dtype of numpy {np.__version__}, found {error!s:.200}",
        ) from error


def cell_bytes(array: np.ndarray[Any, Any]) -> ByteArray:
    """The cells of an array in order."""
    if array.nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return array_bytes(array if array.flags.c_contiguous else array.copy(order="C"))


def check_text(array: np.ndarray[Any, Any]) -> None:
    """Refuse code points that do not exist: numpy fails with a SystemError when it meets them."""
    if array.dtype.kind == "U" and array.nbytes:
        order = ">" if array.dtype.byteorder == ">" else "<"
        points = np.array(array, order="C").reshape(-1).view(f"{order}u4")
        if (points > 0x10FFFF).any():
            raise ValueError(f"{int(points.max()):#x}, which is not a code point")
