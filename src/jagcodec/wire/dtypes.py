"""Names of numpy's dtypes on the wire, and bytes of its arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jagcodec.errors import brief
from jagcodec.memory.arrays import NUMPY_BY_NAME, ByteArray, array_bytes, torch_name
from jagcodec.wire.checks import fail
from jagcodec.wire.spec import TORCH_ITEMSIZES

TORCH_NAME_OF_NUMPY = {dtype: name for name, dtype in NUMPY_BY_NAME.items()}
"""The wire's names of those dtypes of numpy that torch has, too."""


class DtypeName(str):
    """The name of a dtype, which stands for torch's dtype while torch is not imported."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return TORCH_ITEMSIZES[self]


def name_of_dtype(dtype: Any) -> str | None:
    """The wire's name of a caller's dtype; None if messages do not have it.

    A caller passes a dtype of torch or of numpy, a scalar type of numpy, or a name.
    """
    if isinstance(dtype, str):
        return str(dtype) if dtype in TORCH_ITEMSIZES else None
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        dtype = np.dtype(dtype)
    if isinstance(dtype, np.dtype):
        name = dtype.name if dtype.isnative else ""
    else:
        name = torch_name(dtype) if is_torch_dtype(dtype) else ""
    return name if name in TORCH_ITEMSIZES else None


def is_torch_dtype(dtype: Any) -> bool:
    """Whether something is a dtype of torch, without an import of it."""
    return isinstance(dtype, getattr(sys.modules.get("torch"), "dtype", ()))


class _Names(dict[Any, Any]):
    """`name_of_dtype` of each dtype that was asked for; faster than a call."""

    def __missing__(self, dtype: Any) -> str | None:
        name = self[dtype] = name_of_dtype(dtype)
        return name


NAME_OF_DTYPE = _Names()
"""The wire's name of a dtype, or None: by torch's dtypes and by names."""

CELL_DTYPES: dict[str, Any] = {name: DtypeName(name) for name in TORCH_ITEMSIZES}
"""Dtypes by name: until `torch_dtypes` is imported names, then those that this torch has."""


def cell_dtype(name: str) -> Any:
    """The dtype of a checked name: torch's where torch is used, else a `DtypeName`."""
    dtype = CELL_DTYPES.get(name)
    if dtype is None:
        version = sys.modules["torch"].__version__
        detail = f"expected a dtype of torch {version}, found {brief(name)}"
        raise fail("unknown_dtype", detail)
    return dtype


_KINDS = "biufcmMSUV"  # bool, int, uint, float, complex, timedelta, datetime, bytes, str, void
_LONG_DOUBLES = "gG"  # real and complex; their bytes differ from machine to machine


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Numpy's own name of a dtype, such as "<f4".

    None for fields, long doubles and dtypes of other packages.
    """
    if dtype.kind not in _KINDS or dtype.char in _LONG_DOUBLES or dtype.names is not None:
        return None
    known = np.dtype(dtype.str)
    # The string of a type that another package adds (ml_dtypes) reads as void: compare the types.
    # But C has two names for a 64-bit integer, and numpy has a type for each: they are one dtype.
    same = known.type is dtype.type or dtype.kind in "iu"
    return dtype.str if known == dtype and same else None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a checked name."""
    try:
        return np.dtype(name)
    except (TypeError, ValueError) as error:
        detail = f"expected a dtype of numpy {np.__version__}, found {error!s:.200}"
        raise fail("unknown_dtype", detail) from error


def bytes_in_order(array: np.ndarray[Any, Any]) -> ByteArray:
    """The bytes of an array's elements, in C order."""
    if array.nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return array_bytes(array if array.flags.c_contiguous else array.copy(order="C"))


def check_text(array: np.ndarray[Any, Any]) -> None:
    """Refuse text with code points that do not exist: numpy would raise a SystemError later."""
    if array.dtype.kind == "U" and array.nbytes:
        order = ">" if array.dtype.byteorder == ">" else "<"
        points = np.array(array, order="C").reshape(-1).view(f"{order}u4")
        if (points > 0x10FFFF).any():
            raise ValueError(f"{int(points.max()):#x}, which is not a code point")
