"""Protocols for memory that callers pass in."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

import numpy.typing as npt

if TYPE_CHECKING:
    import torch


class SupportsBuffer(Protocol):
    """Memory that memoryview accepts: what Python 3.12 calls `collections.abc.Buffer`."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsWritableBuffer(SupportsBuffer, Protocol):
    """Writable memory, such as a bytearray; bytes are not writable."""

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


class HoldsBuffer(Protocol):
    """An object whose type stubs show its memory only as an attribute: `zmq.Frame`."""

    @property
    def buffer(self) -> memoryview: ...


Buffer: TypeAlias = Union[SupportsBuffer, HoldsBuffer, npt.NDArray[Any], "torch.Tensor"]
"""Contiguous memory: an object with the buffer protocol, or a CPU tensor."""

WritableBuffer: TypeAlias = Union[SupportsWritableBuffer, npt.NDArray[Any], "torch.Tensor"]
"""Contiguous memory that may be written to."""

Target: TypeAlias = WritableBuffer | Callable[[int], WritableBuffer]
"""Writable memory, or a function that takes the number of bytes needed and returns such memory."""

MessageLike: TypeAlias = Buffer | Sequence[Buffer]
"""A message: one buffer that is a blob, or its frames in order, header first."""

StrPath: TypeAlias = str | os.PathLike[str]
"""The path of a file."""

WireSource: TypeAlias = MessageLike | StrPath | Callable[[int, int], Buffer]
"""Where `open_wire` reads: a message, a file, or ``(offset, size) -> buffer`` over a blob."""
