"""Messages whose large buffers stay on their device: for transports that read device memory.

A kept tensor's cells are a frame of their own, a flat uint8 tensor where they lie. What the header
says of it is the usual, so such a message is an ordinary one once it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from jagcodec.wire.compress import opened
from jagcodec.wire.decoder import build
from jagcodec.wire.encoder import pending
from jagcodec.wire.frames import Frame, frames_of
from jagcodec.wire.header import read_header
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits
from jagcodec.wire.message import Message, check_sizes

ResidentFrame: TypeAlias = Frame | torch.Tensor


def encode_resident(
    obj: Any,
    device: torch.device,
    *,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
) -> list[ResidentFrame]:
    """As `encode`, but what dense and jagged tensors on `device` hold stays there.

    Returns:
        The header, then buffers: those of the host as from `encode`, and flat uint8 tensors on
        `device`, which alias the tensors of `obj` that are contiguous.

    Raises:
        UnsupportedTypeError: As `encode`.
    """
    message = pending(obj, allow_pickle=allow_pickle, default=default, keep_on=device)
    return [*frames_of(message)]


def decode_resident(
    header: Any,
    buffers: Sequence[torch.Tensor],
    kept: Sequence[bool],
    *,
    device: torch.device | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> Any:
    """The value of a message, some of whose buffers are kept on a device.

    Args:
        header: The first frame.
        buffers: The others, flat uint8 tensors; they are aliased.
        kept: Which of them hold cells of tensors that stay where the buffer lies.
        device: Where all tensors go, as for `decode`; None leaves each where its buffer lies.
        allow_pickle: As for `decode`.
        limits: As for `decode`.

    Raises:
        WireFormatError: As `decode`; or something other than cells of a tensor, stored as wide as
            their dtype, lies in a kept buffer.
    """
    read = read_header(header, limits or DEFAULT_LIMITS)
    check_sizes(read, [buffer.numel() for buffer in buffers])
    pairs = zip(buffers, kept, strict=True)
    frames = [buffer if stays else buffer.numpy() for buffer, stays in pairs]
    message = Message(read, opened(read, frames, None), device, allow_pickle)
    return build(message, read.schema.root)
