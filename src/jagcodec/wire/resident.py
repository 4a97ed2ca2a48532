"""Messages whose large buffers stay on their device: for transports that read device memory.

The header, the offsets and everything that is no tensor of that device are on the host, as in any
message. A kept tensor's cells are a frame of their own, a flat uint8 tensor where they lie; its
record in the header is the usual one, so such a message is an ordinary one once it is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import flat_bytes
from jagcodec.ragged.nested import Parts, note_rows
from jagcodec.ragged.views import compact_values
from jagcodec.wire import records
from jagcodec.wire.checks import brief
from jagcodec.wire.decoder import Decoding, torch_dtype
from jagcodec.wire.encoder import Encoding, Frame, written
from jagcodec.wire.header import read_header, read_tree
from jagcodec.wire.payload import FramePayload
from jagcodec.wire.spec import MAX_NDIM

ResidentFrame: TypeAlias = Frame | torch.Tensor


def encode_resident(
    obj: Any, device: torch.device, *, allow_pickle: bool = False
) -> list[ResidentFrame]:
    """As `encode`, but what dense and jagged tensors on `device` hold stays there.

    Returns:
        The header, then buffers: those of the host as from `encode`, and flat uint8 tensors on
        `device`, which alias the tensors of `obj` that are contiguous.

    Raises:
        UnsupportedTypeError: As `encode`.
    """
    walking = partial(_ResidentEncoding, allow_pickle=allow_pickle)
    first = walking(device)
    tree = first.value(obj)
    if not len(first.staging):
        return first.resident_frames(tree)
    first.staging.fetch()
    second = walking(device, fetched=first.staging)
    return second.resident_frames(second.value(obj))


def decode_resident(
    header: Any,
    buffers: Sequence[torch.Tensor],
    kept: Sequence[bool],
    *,
    device: torch.device | None = None,
    allow_pickle: bool = False,
) -> Any:
    """The value of a message, some of whose buffers are kept on a device.

    Args:
        header: The first frame.
        buffers: The others, flat uint8 tensors; they are aliased.
        kept: Which of them hold cells of tensors that stay where the buffer lies.
        device: Where all tensors go, as for `decode`; None leaves each where its buffer lies.
        allow_pickle: As for `decode`.

    Raises:
        WireFormatError: As `decode`.
    """
    read = read_header(header)
    sizes = [buffer.numel() for buffer in buffers]
    if sizes != list(read.buffers):
        raise WireFormatError(
            "frame_size",
            "frames",
            f"expected buffers of {brief(read.buffers)} bytes, found {brief(sizes)}",
        )
    empty = np.empty(0, dtype=np.uint8)
    pairs = list(zip(buffers, kept, strict=True))
    payload = FramePayload([empty if stays else buffer.numpy() for buffer, stays in pairs], None)
    resident = {i: buffer for i, (buffer, stays) in enumerate(pairs) if stays}
    decoding = _ResidentDecoding(read, payload, device, allow_pickle, resident)
    return read_tree(read, decoding.build)


class _ResidentEncoding(Encoding):
    """A walk that leaves the cells of one device's tensors where they are."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(**options)
        self._device = device

    def resident_frames(self, tree: Any) -> list[ResidentFrame]:
        """See `encode_resident`."""
        kept: list[ResidentFrame] = []
        # A tensor in the list of buffers has all that is asked of an array there: nbytes, data.
        kept += written(self.frames(tree))
        return kept

    def _keep(self, tensor: torch.Tensor) -> tuple[int, int]:
        # What holds no cells goes along: it tells the device that an empty tensor belongs on.
        nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        buffer: Any = flat_bytes(tensor) if tensor.numel() else nothing
        self._large.append(buffer)
        return (len(self._large), 0)

    def _stays(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def _dense(self, tensor: torch.Tensor) -> Any:
        if not self._stays(tensor) or tensor.dim() > MAX_NDIM:
            return super()._dense(tensor)
        name = self._torch_dtype(tensor)
        return self._record(records.Tensor(name, list(tensor.shape), *self._keep(tensor)))

    def _note_jagged(self, tensor: torch.Tensor) -> bool:
        # The offsets go into the header's frames; the values do not.
        inner: Any = tensor
        stays = self._stays(inner._values)
        return note_rows(tensor, self.staging) if stays else super()._note_jagged(tensor)

    def _parts(self, parts: Parts) -> records.Jagged:
        if not self._stays(parts.values):
            return super()._parts(parts)
        name = self._torch_dtype(parts.values)
        values = compact_values(parts)
        place = self._keep(values)
        group = self._group(parts)
        return records.Jagged(name, list(values.shape), *place, group, parts.ragged_dim)


class _ResidentDecoding(Decoding):
    """Records to values, over a message some of whose buffers are tensors."""

    def __init__(
        self,
        header: records.Header,
        payload: FramePayload,
        device: torch.device | None,
        allow_pickle: bool,
        resident: Mapping[int, torch.Tensor],
    ) -> None:
        super().__init__(header, payload, device, allow_pickle)
        self._resident = resident

    def _cells(self, record: records.Tensor | records.Jagged | records.TensorViews) -> torch.Tensor:
        buffer = self._resident.get(record.buffer)
        if buffer is None or isinstance(record.dtype, list):
            return super()._cells(record)
        dtype = torch_dtype(record.dtype)
        size = dtype.itemsize
        for extent in record.shape:
            size *= extent
        cells = buffer[record.offset : record.offset + size]
        return cells.view(dtype).view(tuple(record.shape))
