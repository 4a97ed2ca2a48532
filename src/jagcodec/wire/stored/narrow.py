"""`narrow`: integers in the smallest width that holds them, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec.memory.arrays import ByteArray
from jagcodec.wire.spec import BITS, STORED_WIDTHS, narrow_code

_FEW_ELEMENTS = 256  # if there are more elements, a sample is checked first


def narrowed(data: ByteArray, dtype: str) -> tuple[int, ByteArray] | None:
    """Integers of a dtype as ``(storage code, bytes)``, or None if they need the full width."""
    # Read bools as bytes: a byte that is neither 0 nor 1 must arrive unchanged.
    elements = data.view("u1" if dtype == "bool" else dtype)
    itemsize = elements.dtype.itemsize
    code = _narrowest(elements)
    if code is None:
        return None
    if code == BITS:
        return BITS, np.packbits(elements != 0, bitorder="little")
    return code, _low_bytes(data, itemsize, STORED_WIDTHS[code][0])


def _narrowest(elements: npt.NDArray[Any]) -> int | None:
    """The storage code of the narrowest width that holds all elements.

    Returns None if only the dtype's own width does, or if there are no elements.
    """
    if not len(elements):
        return None
    sample = elements[:: -(-len(elements) // _FEW_ELEMENTS)]
    if len(sample) < len(elements) and _narrowest(sample) is None:
        return None  # the sample needs the full width, so all elements do
    low, high = int(elements.min()), int(elements.max())
    if low >= 0 and high <= 1:
        return BITS
    for width in range(1, min(5, elements.dtype.itemsize)):
        bits = 8 * width
        if low >= 0 and high < 1 << bits:
            return narrow_code(width, signed=False)
        if -(1 << bits - 1) <= low and high < 1 << bits - 1:
            return narrow_code(width, signed=True)
    return None


def _low_bytes(data: ByteArray, itemsize: int, width: int) -> ByteArray:
    # Little-endian two's complement: the low bytes are the narrower number.
    elements = data.view(f"<u{itemsize}")
    if width != 3:
        return elements.astype(f"<u{width}").view(np.uint8)
    whole = elements.astype("<u4", copy=False).view(np.uint8)
    low = np.empty((len(elements), 3), dtype=np.uint8)
    # Copy byte 0 of all elements, then byte 1, then byte 2: numpy takes twice the time to copy
    # three bytes of each element.
    for i in range(3):
        low[:, i] = whole[i::4]
    return low.reshape(-1)


def widened(data: ByteArray, code: int, dtype: str, count: int) -> ByteArray:
    """The bytes of `count` elements of `dtype`, which `narrowed` made `data` of."""
    if code == BITS:
        return np.unpackbits(data, count=count, bitorder="little").astype(dtype).view(np.uint8)
    width, signed = STORED_WIDTHS[code]
    if width != 3:
        return data.view(f"<{'i' if signed else 'u'}{width}").astype(dtype).view(np.uint8)
    whole = np.empty(count, dtype="<u4")
    if count:
        # Read four bytes for each element; the shifts remove the fourth.
        whole[:-1] = np.ndarray((count - 1,), "<u4", data, strides=(3,))
        whole[-1] = int.from_bytes(data[-3:].tobytes(), "little")
    whole <<= 8
    numbers = whole.view("<i4") if signed else whole
    numbers >>= 8
    return numbers.astype(dtype, copy=False).view(np.uint8)
