"""Protocols for memory that callers pass in."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
import torch


class SupportsBuffer(Protocol):
    """Memory that memoryview accepts, as `collections.abc.Buffer` from Python 3.12 on."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsWritableBuffer(SupportsBuffer, Protocol):
    """Writable memory: not bytes."""

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


class HoldsBuffer(Protocol):
    """Memory whose type stubs name it alone: `zmq.Frame`."""

    @property
    def buffer(self) -> memoryview: ...


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
