"""A message between ranks, as tensors of bytes: what is announced, and what then follows."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from jagcodec.errors import WireFormatError
from jagcodec.wire.decoder import decode, decode_resident
from jagcodec.wire.limits import Limits

_SIZE = struct.Struct("<Q")


class RankMessage(NamedTuple):
    """A message as tensors of bytes.

    Attributes:
        meta: On the CPU: the size of the header, the header, one flag per buffer (whether it
            stays on its device), and the sizes of the buffers. The header holds those sizes too,
            but even a receiver that cannot read the header must take the buffers out of the group,
            or the next call would receive them.
        header: The first frame, which lies in `meta`.
        kept: Which buffers stay on their device.
        buffers: The frames after the header.
        origin: The function that is running, and the rank that sends the message.
    """

    meta: torch.Tensor
    header: memoryview
    kept: list[bool]
    buffers: list[torch.Tensor]
    origin: str

    @property
    def size(self) -> int:
        return self.meta.numel()

    def value(self, device: torch.device | None, allow_pickle: bool, limits: Limits | None) -> Any:
        try:
            if any(self.kept):
                return decode_resident(
                    self.header,
                    self.buffers,
                    self.kept,
                    device=device,
                    allow_pickle=allow_pickle,
                    limits=limits,
                )
            frames: list[Any] = [self.header, *self.buffers]
            return decode(frames, device=device, allow_pickle=allow_pickle, limits=limits)
        except WireFormatError as error:
            path = f"{self.origin}: {error.path}"
            raise WireFormatError(error.reason, path, error.detail) from error


def packed_meta(header: Any, kept: bytes, sizes: Iterable[int]) -> bytearray:
    """The meta of a message: one flag and one size for each of its buffers."""
    return bytearray().join((_SIZE.pack(len(header)), header, kept, *map(_SIZE.pack, sizes)))


def read_meta(data: memoryview, origin: str) -> tuple[memoryview, list[bool], list[int]]:
    """The header, which buffers stay on their device, and the sizes of the buffers.

    Raises:
        WireFormatError: They do not make up the meta of a message.
    """
    header_size = _SIZE.unpack(data[: _SIZE.size])[0] if len(data) >= _SIZE.size else len(data)
    end = _SIZE.size + header_size
    count, rest = divmod(len(data) - end, 1 + _SIZE.size)
    if count < 0 or rest:
        raise WireFormatError(
            "bad_header",
            origin,
            f"expected a header and the sizes of its buffers, found {len(data)} bytes that are not",
        )
    sizes = [size for (size,) in _SIZE.iter_unpack(data[end + count :])]
    return data[_SIZE.size : end], [bool(flag) for flag in data[end : end + count]], sizes
