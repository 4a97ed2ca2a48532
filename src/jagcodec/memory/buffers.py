"""What callers hand in as memory, as type checkers know it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
import torch


class SupportsBuffer(Protocol):
    """What memoryview takes: bytes, bytearray, mmap, `array`. From Python 3.12 on it has a name."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """The memory."""
        ...


class SupportsWritableBuffer(SupportsBuffer, Protocol):
    """The same, of memory that is written to: all of these but bytes."""

    def __setitem__(self, index: Any, value: Any, /) -> None:
        """Write to it."""
        ...


class HoldsBuffer(Protocol):
    """What memoryview takes, though its stubs name its memory alone: `zmq.Frame`."""

    @property
    def buffer(self) -> memoryview:
        """The memory."""
        ...


Buffer: TypeAlias = SupportsBuffer | HoldsBuffer | npt.NDArray[Any] | torch.Tensor
"""Contiguous memory: of the buffer protocol, or a CPU tensor."""

WritableBuffer: TypeAlias = SupportsWritableBuffer | npt.NDArray[Any] | torch.Tensor
"""The same, to be written to."""

Target: TypeAlias = WritableBuffer | Callable[[int], WritableBuffer]
"""Such memory, or what is called with the bytes that are needed and returns it."""

MessageLike: TypeAlias = Buffer | Sequence[Buffer]
"""A message: one buffer that is a blob, or its frames in order, header first."""

StrPath: TypeAlias = str | os.PathLike[str]
"""The path of a file."""

WireSource: TypeAlias = MessageLike | StrPath | Callable[[int, int], Buffer]
"""Where `open_wire` reads: a message, a file, or ``(offset, size) -> buffer`` over a blob."""
