"""Where the bytes of a message come from, and whether they may be written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from jagcodec.memory.blocks import new_block
from jagcodec.memory.tensor_bytes import ByteArray, address

Fetch = Callable[[int, int, int], ByteArray]
"""(buffer, offset, size) -> those bytes, aliased or new."""


class Payload(Protocol):
    """The buffers of a message. The header vouches for every place that is asked for."""

    def bytes_at(self, buffer: int, offset: int, size: int, alignment: int) -> ByteArray:
        """`size` bytes, flat, aligned, and writable without harm to anyone."""
        ...

    def read(self, buffer: int, offset: int, size: int) -> ByteArray:
        """`size` bytes to look at, as they came."""
        ...


class FramePayload:
    """Whole frames. A read-only one is copied at the first value in it, once for all of them."""

    def __init__(self, arrays: list[ByteArray], copy: bool | None) -> None:
        self._arrays = arrays
        self._copy = copy
        self._owned: list[ByteArray | None] = [None] * len(arrays)
        self._realigned: dict[tuple[int, int], ByteArray] = {}

    def bytes_at(self, buffer: int, offset: int, size: int, alignment: int) -> ByteArray:
        """See `Payload`."""
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        owned = self._owned[buffer]
        if owned is None:
            owned = self._owned[buffer] = writable(self._arrays[buffer], self._copy)
        if not (address(owned) + offset) % alignment:
            return owned[offset : offset + size]
        # The whole buffer, moved once for all values that lie so: views may overlap in it.
        key = (buffer, offset % _WIDEST)
        moved = self._realigned.get(key)
        if moved is None:
            room = new_block(len(owned) + 2 * _WIDEST).data
            shift = -(address(room) + offset) % _WIDEST
            moved = self._realigned[key] = room[shift : shift + len(owned)]
            moved[:] = owned
        return moved[offset : offset + size]

    def read(self, buffer: int, offset: int, size: int) -> ByteArray:
        """See `Payload`."""
        return self._arrays[buffer][offset : offset + size] if size else np.empty(0, np.uint8)


class RangePayload:
    """Ranges that are fetched as they are asked for. A read-only range is copied by itself."""

    def __init__(self, fetch: Fetch, copy: bool | None) -> None:
        self._fetch = fetch
        self._copy = copy

    def bytes_at(self, buffer: int, offset: int, size: int, alignment: int) -> ByteArray:
        """See `Payload`."""
        data = writable(self.read(buffer, offset, size), self._copy)
        return _copied(data) if address(data) % alignment else data

    def read(self, buffer: int, offset: int, size: int) -> ByteArray:
        """See `Payload`."""
        return self._fetch(buffer, offset, size) if size else np.empty(0, dtype=np.uint8)


def writable(data: ByteArray, copy: bool | None) -> ByteArray:
    """`data`, or a copy if it is read-only (`copy` None) or always (True); never (False)."""
    read_only = not data.flags.writeable
    if copy or (copy is None and read_only):
        data = _copied(data)
    elif read_only:
        data = np.asarray(_Writable(data), dtype=np.uint8)
    return data


def _copied(data: ByteArray) -> ByteArray:
    copy: ByteArray = new_block(len(data)).data
    copy[:] = data
    return copy


_WIDEST = 16
"""The widest alignment of any dtype."""


class _Writable:
    """Read-only memory that numpy is told it may write: for `copy=False` alone."""

    def __init__(self, array: ByteArray) -> None:
        self._keep_alive = array
        self.__array_interface__ = {
            "data": (address(array), False),
            "shape": array.shape,
            "typestr": "|u1",
            "version": 3,
        }
