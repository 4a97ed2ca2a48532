"""Arrays in replies of inference engines: base64 as arrays, and expert ids in few bytes.

`jagcodec.integrations.json_arrays` and the readers of vLLM's and SGLang's replies share these.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import int_or_none, require_int
from jagcodec.errors import ArgumentError, brief
from jagcodec.memory.arrays import NUMPY_BY_NAME
from jagcodec.wire.spec import MAX_NDIM

# --- base64 ------------------------------------------------------------------------------------

MAX_BYTES = 1 << 30
"""Bytes of one array, unless the caller passes another bound."""

_BY_NAME = {**NUMPY_BY_NAME, **{name: np.dtype(name) for name in ("uint16", "uint32", "uint64")}}
_DTYPES = {key: dtype for name, dtype in _BY_NAME.items() for key in (name, dtype.str)}
_MAX_HEADER_BYTES = 1024  # numpy writes 118 for an array of three dims
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def decoded_base64(text: Any, max_bytes: int, path: str) -> bytes:
    """The bytes that a text in base64 holds; an error if there are more than `max_bytes`."""
    if not isinstance(text, (str, bytes)):
        detail = f"expected base64 in a string, found {brief(text)}"
        raise ArgumentError("bad_type", path, detail)
    _check_size(len(text) // 4 * 3 - 2, max_bytes, path)  # before anything is allocated
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        detail = f"expected base64, found {len(text)} characters that are not: {error!s:.100}"
        remedy = "; was the body cut on its way?"
        raise ArgumentError("bad_value", path, detail + remedy) from error
    _check_size(len(data), max_bytes, path)
    return data


def _check_size(size: int, max_bytes: int, path: str) -> None:
    """Raise an error for more than `max_bytes` bytes."""
    if size > max_bytes:
        detail = f"expected at most {max_bytes} bytes (max_bytes), found {size} in base64"
        raise ArgumentError("too_large", path, f"{detail}; if they are honest, raise max_bytes")


def dtype_named(name: Any, path: str) -> np.dtype[Any]:
    """The dtype of a name such as "int16" or "<i2"."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        expected = f"expected a dtype of numbers, such as {', '.join(map(repr, _BY_NAME))}"
        raise ArgumentError("bad_dtype", path, f"{expected}; found {brief(name)}")
    return dtype


def flat_array(data: bytes, dtype: np.dtype[Any], path: str) -> npt.NDArray[Any]:
    """Bytes as a read-only array of one dim over their memory."""
    if len(data) % dtype.itemsize:
        detail = f"expected a multiple of {dtype.itemsize} bytes ({dtype.name}), found {len(data)}"
        raise ArgumentError("bad_length", path, f"{detail}; was the body cut on its way?")
    return shaped_array(data, dtype, (len(data) // dtype.itemsize,), path)


def array_of_npy(data: bytes, path: str) -> npt.NDArray[Any]:
    """The array that `numpy.save` wrote, read-only over the memory of `data`; never a pickle."""
    file = io.BytesIO(data)
    try:
        read_header = _READ_HEADER[np.lib.format.read_magic(file)]
        shape, fortran, dtype = read_header(file, max_header_size=_MAX_HEADER_BYTES)
    except Exception as error:  # the header is an expression: its parser raises many types
        detail = "expected a .npy file of version 1 or 2, as numpy.save writes it, found "
        detail += f"{len(data)} bytes without its header: {type(error).__name__}: {error!s:.100}"
        raise ArgumentError("bad_value", path, detail) from error
    order: Literal["F", "C"] = "F" if fortran else "C"
    return shaped_array(data, dtype_named(dtype.str, path), shape, path, file.tell(), order)


def shaped_array(
    data: bytes,
    dtype: np.dtype[Any],
    shape: Sequence[Any],
    path: str,
    begin: int = 0,
    order: Literal["F", "C"] = "C",
) -> npt.NDArray[Any]:
    """The bytes from `begin` on as an array; they must be as many as its shape says."""
    sizes = [size for size in shape if type(size) is int and 0 <= size < 1 << 63]
    if len(sizes) != len(shape) or len(sizes) > MAX_NDIM:
        detail = f"expected a shape of at most {MAX_NDIM} sizes from 0 on, found {brief(shape)}"
        raise ArgumentError("bad_shape", path, detail)
    expected, size = math.prod(sizes) * dtype.itemsize, len(data) - begin
    if expected != size:
        detail = f"expected {expected} bytes of shape {brief(sizes)} and dtype {dtype.name}, found"
        raise ArgumentError("bad_length", path, f"{detail} {size}; was the body cut on its way?")
    try:
        array: npt.NDArray[Any] = np.ndarray(sizes, dtype, data, begin, order=order)
    except ValueError as error:  # there are no cells, but the other sizes overflow
        detail = f"expected a shape that numpy has, found {brief(sizes)}: {error!s:.100}"
        raise ArgumentError("bad_shape", path, detail) from error
    if dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise ArgumentError("bad_value", path, "expected bools, bytes of 0 or 1, found others")
    return array


# --- expert ids --------------------------------------------------------------------------------

_SMALLEST_FIRST = tuple(np.dtype(name) for name in ("uint8", "int8", "int16", "int32", "int64"))


class ExpertIds(NamedTuple):
    """The ids that may occur: those of all experts of a model, and the pad, if there is one."""

    experts: int
    pad: int | None

    def in_smallest(self, ids: npt.NDArray[Any], path: str) -> npt.NDArray[Any]:
        """The ids in the smallest dtype for all ids that may occur; an error for any other id."""
        pad = 0 if self.pad is None else self.pad
        low, high = min(pad, 0), max(pad, self.experts - 1)
        smallest = smallest_of(ids, low, high)
        self._check(ids, path)
        return smallest

    def _check(self, ids: npt.NDArray[Any], path: str) -> None:
        """Raise an error for an id that is neither of an expert nor the pad."""
        if not ids.size or (ids.min() >= 0 and ids.max() < self.experts):
            return
        outside = (ids < 0) | (ids >= self.experts)
        if self.pad is not None:
            outside &= ids != self.pad
        if outside.any():
            at = [int(i) for i in np.argwhere(outside)[0]]
            detail = f"expected ids of {self.experts} experts, found {ids[tuple(at)]} at {at}"
            raise ArgumentError("bad_value", path, detail)


def usable_expert_ids(experts: Any, pad: Any, where: str) -> ExpertIds | None:
    """The number of experts and the pad that a caller passed; None if it passed neither."""
    if experts is None and pad is None:
        return None
    count = require_int(experts, 1, f"{where}(experts)", "the number of experts")
    if pad is None:
        return ExpertIds(count, None)
    number, path = int_or_none(pad), f"{where}(pad)"
    if number is None:
        raise ArgumentError("bad_pad", path, f"expected an integer or None, found {brief(pad)}")
    if 0 <= number < count:
        detail = f"expected a pad that is not the id of an expert (0 to {count - 1})"
        raise ArgumentError("bad_pad", path, f"{detail}, found {number}; pass -1")
    return ExpertIds(count, number)


def smallest_of(ids: npt.NDArray[Any], low: int, high: int) -> npt.NDArray[Any]:
    """The ids in the first dtype that holds both numbers; unchanged if no dtype holds them."""
    for dtype in _SMALLEST_FIRST:
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return ids.astype(dtype, copy=False)
    return ids
