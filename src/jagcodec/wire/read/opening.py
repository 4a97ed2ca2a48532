"""Opens messages from frames, a blob, ranges of a store, or a row of another message."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from jagcodec._arguments import require_flag, result_of
from jagcodec._dependencies import module_with_torch
from jagcodec.memory import aligned
from jagcodec.memory.arrays import ByteArray
from jagcodec.wire.checks import bad, expect
from jagcodec.wire.compress import decompressed_buffers
from jagcodec.wire.frames import (
    PREAMBLE,
    buffer_bytes,
    frame_arrays,
    frame_bounds,
    frames_of_blob,
    header_of_blob,
    is_blob,
    read_preamble,
)
from jagcodec.wire.header import Header, check_crc, read_header
from jagcodec.wire.limits import Limits, exceeded, usable_limits
from jagcodec.wire.read.message import Message, Reading


def usable_reading(
    where: str,
    limits: Any,
    copy: bool | None,
    device: Any,
    allow_pickle: bool,
    value_by_value: bool = False,
    verify: bool = True,
) -> Reading:
    """Check a caller's options, and return them as a `Reading`."""
    if limits is None and device is None and copy is None and allow_pickle is False:
        return _WITHOUT_OPTIONS[value_by_value, verify]
    limits = usable_limits(limits, f"{where}(limits)")
    if device is not None:
        types = module_with_torch("memory.plain_types", f"{where}(device)")
        device = types.usable_device(device, f"{where}(device)")
    copy = None if copy is None else require_flag(copy, f"{where}(copy)")
    allow_pickle = require_flag(allow_pickle, f"{where}(allow_pickle)")
    return Reading(limits, copy, device, allow_pickle, value_by_value, verify)


_WITHOUT_OPTIONS = {
    (value_by_value, verify): Reading(value_by_value=value_by_value, verify=verify)
    for value_by_value in (False, True)
    for verify in (False, True)
}
"""The readings of callers that give no options, by `value_by_value` and `verify`."""


def open_message(source: Any, where: str, reading: Reading) -> Message:
    """Open frames, header first, or a blob, and ignore bytes after the end of a blob."""
    frames: Sequence[Any] = frame_arrays(source, where)
    if len(frames) == 1 and is_blob(frames[0]):
        header, frames = _split_blob(frames[0], reading.limits)
    else:
        header = read_header(frames[0].data, reading.limits)
    return open_frames(header, frames, reading)


def open_frames(header: Header, frames: Sequence[Any], reading: Reading) -> Message:
    """Open a message whose header was read; `frames` has the header first."""
    buffers: Sequence[Any] = frames[1:]
    sizes = [frame.nbytes for frame in buffers]
    if sizes != header.sent_sizes:
        one, other = len(header.sent_sizes) + 1, len(sizes) + 1
        expect(one == other, "frame_count", f"{one} frames of one message", other, "frames")
        for i, (size, found) in enumerate(zip(header.sent_sizes, sizes, strict=True)):
            expected = f"{size} bytes (the frame may be cut, or in another place)"
            expect(size == found, "frame_size", expected, found, f"frame {i + 1}")
    if reading.verify and header.checksums is not None:
        for i, (buffer, checksum) in enumerate(zip(buffers, header.checksums, strict=True)):
            check_crc(zlib.crc32(buffer.data), checksum, f"frame {i + 1}")
    if not header.compressed:
        return Message(header, buffers, reading, frames)
    buffers = decompressed_buffers(header, buffers, lazily=reading.value_by_value)
    return Message(header, buffers, reading, frames, in_memory=not reading.value_by_value)


def open_store(source: Callable[[int, int], Any], reading: Reading) -> Message:
    """Open a blob that is read by ranges, ``(offset, size) -> buffer``."""

    def get(offset: int, size: int) -> ByteArray:
        path = f"bytes {offset} to {offset + size}"
        data = buffer_bytes(result_of(source, (offset, size), "open_wire(source)"), path)
        whole = len(data) == size
        expect(whole, "frame_size", f"{size} bytes from the source", len(data), path)
        return data

    size = read_preamble(get(0, PREAMBLE.size))
    if size > reading.limits.header:
        raise exceeded("header", reading.limits.header, size, "bytes", "preamble")
    header = read_header(get(PREAMBLE.size, size).data, reading.limits)
    buffers: Sequence[Any] = [
        lambda offset, size, start=start: get(start + offset, size)
        for start in frame_bounds(size, header.sent_sizes)[:-1]
    ]
    if header.compressed:
        buffers = decompressed_buffers(header, buffers, lazily=True)
    return Message(header, buffers, reading, None, in_memory=False)


def open_row(blob: ByteArray, outer: Message) -> Message:
    """A message that is a row of another."""
    if not is_blob(blob):
        raise bad("a message in each row", "something else")
    header, frames = _split_blob(blob, outer.limits, in_row=True)
    end = frame_bounds(len(frames[0]), header.sizes)[-1]
    if len(blob) != aligned(end) or blob[end:].any():
        raise bad("a message, and zeros up to a multiple of 64", "other bytes after it")
    reading = Reading(outer.limits, False, outer.device, outer.allow_pickle)
    return open_frames(header, frames, reading)


def _split_blob(
    blob: ByteArray, limits: Limits, *, in_row: bool = False
) -> tuple[Header, list[ByteArray]]:
    """The checked header of a message in one buffer, and its frames, header first."""
    frame = header_of_blob(blob)
    header = read_header(frame.data, limits, in_row=in_row)
    return header, frames_of_blob(blob, frame, header.sent_sizes)
