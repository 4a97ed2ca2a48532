"""Frames and blobs: the bytes of a message, in several buffers or in one.

A blob is a message in one buffer: a preamble of 24 bytes (magic, version, header size), the header,
and the frames of the payload, each at a multiple of 64 bytes, the bytes between them zero.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jagcodec._arguments import result_of
from jagcodec.errors import ArgumentError, ArgumentTypeError, WireFormatError, describe
from jagcodec.memory import aligned
from jagcodec.memory.arrays import ByteArray, are_disjoint, tensor_type
from jagcodec.memory.blocks import allocate_together
from jagcodec.memory.buffers import Target
from jagcodec.wire.checks import expect, fail
from jagcodec.wire.spec import BLOB_MAGIC, MAGIC, VERSION

Frame: TypeAlias = bytes | bytearray | memoryview

PREAMBLE = struct.Struct("<8sIIQ")
"""Magic, version, zero, header size."""

# Numbers and values are msgpack byte strings, which end at 4 GiB.
_MAX_HEADER = 1 << 33


def buffer_bytes(buffer: Any, path: str) -> ByteArray:
    """Any contiguous buffer, or a CPU tensor, as flat bytes that alias it."""
    try:
        if type(buffer) is not bytearray and type(buffer) is not bytes:
            if isinstance(buffer, tensor_type()):
                buffer = buffer.detach().numpy()
            try:
                view = memoryview(buffer)
            except TypeError:
                raise TypeError(f"{type(buffer).__name__}, which is not a buffer") from None
            if not view.nbytes:
                return NO_BYTES
            if not view.c_contiguous:
                raise TypeError("one with gaps")
            buffer = view.cast("B")
        return np.frombuffer(buffer, dtype=np.uint8)
    except (TypeError, ValueError, RuntimeError) as error:
        detail = f"expected a contiguous buffer, found {error}"
        raise WireFormatError("foreign", path, detail) from error


def frame_arrays(frames: Any, path: str) -> list[ByteArray]:
    """Frames, header first, or one blob, as arrays that alias them."""
    # The items of a list may come from a peer: if one is not a buffer, the message is bad. If any
    # other object is not a buffer, the caller is wrong.
    if type(frames) is not list and (
        not isinstance(frames, Sequence) or isinstance(frames, _NOT_FRAMES)
    ):
        try:
            return [buffer_bytes(frames, path)]
        except WireFormatError as error:
            raise _no_message(frames, path) from error
    if not frames:
        raise WireFormatError("no_message", "frames", "expected a header frame, found no frame")
    if type(frames[0]) is dict:  # no peer sends this: the caller passed rows
        raise _no_message(frames, path)
    return [
        # Sockets return most frames as these types.
        np.frombuffer(frame, BYTE)
        if type(frame) is bytearray or type(frame) is bytes
        else buffer_bytes(frame, f"frame {i}")
        for i, frame in enumerate(frames)
    ]


_NOT_FRAMES = (bytes, bytearray, memoryview, str, array.array)
"""Sequences that do not hold frames: they are one buffer, or, as text, not a message at all."""

BYTE = np.dtype(np.uint8)
NO_BYTES: ByteArray = np.empty(0, dtype=np.uint8)


def _no_message(found: Any, path: str) -> ArgumentTypeError:
    detail = (
        f"expected the frames of a message, or a blob, found {describe(found)}; encode makes them "
        "of a value, and encode_rows of rows; load and open_wire read files; a blob is contiguous, "
        "and on the CPU"
    )
    return ArgumentTypeError("bad_type", path, detail)


# --- reading -----------------------------------------------------------------------------------


def read_preamble(start: ByteArray) -> int:
    """The size of the header, from the first 24 bytes of a blob."""
    if len(start) < PREAMBLE.size:
        raise fail("foreign", f"expected {PREAMBLE.size} bytes, found {len(start)}", path=_HERE)
    magic, version, zero, size = PREAMBLE.unpack_from(start.data)
    if magic != BLOB_MAGIC:
        detail = f"expected {BLOB_MAGIC!r}, found {magic!r}; this is not a jagcodec blob"
        raise fail("foreign", detail, path=_HERE)
    if version != VERSION:
        detail = f"expected format version {VERSION}, found {version}; upgrade the older side"
        raise fail("unknown_version", detail, path=_HERE)
    expect(not zero, "bad_header", "0 at byte 12", zero, _HERE)
    expect(size <= _MAX_HEADER, "bad_header", "a header of at most 8 GiB", size, _HERE)
    return int(size)


_HERE = "preamble"


def is_blob(data: ByteArray) -> bool:
    """Whether one buffer is a blob rather than a header frame alone."""
    return data[: len(BLOB_MAGIC)].tobytes() == BLOB_MAGIC


# A header is a msgpack map (one byte) whose first key is the magic (one byte, and its text).
_FIRST_KEY = bytes([0xA0 | len(MAGIC)]) + MAGIC.encode()


def begins_message(data: Any) -> bool:
    """Whether the bytes of a buffer are a blob or a header frame, judged by their magic."""
    start = bytes(data[: 1 + len(_FIRST_KEY)])
    return start[1:] == _FIRST_KEY or start[: len(BLOB_MAGIC)] == BLOB_MAGIC


def frame_bounds(header_size: int, sizes: Sequence[int]) -> list[int]:
    """The start of each payload frame in a blob, and then the end of the blob: one number more."""
    starts = []
    end = PREAMBLE.size + header_size
    for size in sizes:
        start = aligned(end)
        starts.append(start)
        end = start + size
    return [*starts, end]


def header_of_blob(blob: ByteArray) -> ByteArray:
    """The header of a blob, aliasing it."""
    return _checked_prefix(blob, PREAMBLE.size + read_preamble(blob), "header")[PREAMBLE.size :]


def frames_of_blob(blob: ByteArray, header: ByteArray, sizes: Sequence[int]) -> list[ByteArray]:
    """The header and the frames of a blob, aliasing it. It may go on, as shared memory does."""
    *starts, end = frame_bounds(len(header), sizes)
    whole = _checked_prefix(blob, end, "payload")
    return [header, *(whole[at : at + size] for at, size in zip(starts, sizes, strict=True))]


def _checked_prefix(blob: ByteArray, size: int, path: str) -> ByteArray:
    """The first bytes of a blob, which may have more."""
    if len(blob) < size:
        detail = f"expected a blob of at least {size} bytes, found {len(blob)}"
        raise fail("frame_size", detail, path=path)
    return blob[:size]


# --- writing -----------------------------------------------------------------------------------


class ScatteredRows(NamedTuple):
    """Rows that must be copied into a buffer of a message."""

    buffer: int  # which one
    offset: int  # in the buffer
    size: int  # bytes of all rows
    view: Any  # a `RaggedView`


class PendingMessage:
    """A message, some of whose buffers may still have to be written.

    Only `MessageWriter` in `wire/write/place.py`, a subclass, has rows to write.
    """

    __slots__ = ("buffers", "header", "read_from", "repeated_bytes", "rows")

    def __init__(self, header: bytes, buffers: list[Any], read_from: Sequence[Any] = ()) -> None:
        self.header: bytes = header
        self.buffers: list[Any] = buffers  # each an array, or its size if it must be written
        self.repeated_bytes: int = 0  # bytes of repeated documents that become objects
        self.rows: list[ScatteredRows] = []  # to write
        self.read_from: Sequence[Any] = read_from  # the caller's memory that was copied already

    def write(self, targets: list[ByteArray]) -> None:
        """Nothing to write here; `MessageWriter` writes `rows` to the array of each buffer."""

    def sources(self) -> list[Any]:
        """The memory that the message is made from, without that which its buffers alias."""
        return [*self.read_from]


def frames_of(message: PendingMessage) -> list[Frame]:
    """The frames of a message: new ones in one allocation, which is freed with the last of them."""
    return [message.header, *[part.data for part in written_buffers(message)]]


def written_buffers(message: PendingMessage) -> list[ByteArray]:
    """The buffers of a message, after writing those that must be written."""
    buffers = message.buffers
    if not message.rows:
        return buffers
    blocks = iter(allocate_together([part for part in buffers if type(part) is int]))
    targets = [next(blocks) if type(part) is int else part for part in buffers]
    message.write(targets)
    return targets


def blob_size(message: PendingMessage) -> int:
    """Bytes of the blob of a message."""
    return frame_bounds(len(message.header), _buffer_sizes(message.buffers))[-1]


def _buffer_sizes(buffers: Sequence[ByteArray | int]) -> list[int]:
    return [part if isinstance(part, int) else len(part) for part in buffers]


def blob_pieces(frames: Sequence[Any]) -> list[Any]:
    """The blob of a message as buffers to be joined."""
    header, *payload = frames
    pieces = [PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, len(header)), header]
    end = PREAMBLE.size + len(header)
    for start, part in zip(
        frame_bounds(len(header), list(map(len, payload))), payload, strict=False
    ):
        pieces += (bytes(start - end), part)
        end = start + len(part)
    return pieces


def write_to(message: PendingMessage, out: Target, path: str) -> int:
    """Write a message as a blob to memory, or to that which a function returns.

    Returns the number of bytes written.
    """
    *starts, size = frame_bounds(len(message.header), _buffer_sizes(message.buffers))
    target = writable_bytes(result_of(out, (size,), path) if callable(out) else out, path)
    if len(target) < size:
        remedy = "" if callable(out) else "; pass a function, which is called with the size"
        detail = f"expected a buffer of at least {size} bytes, found {len(target)}{remedy}"
        raise ArgumentError("too_large", path, detail)
    first = PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, len(message.header)) + message.header
    parts: list[Any] = [np.frombuffer(first, dtype=np.uint8), *message.buffers]
    ready = [part for part in message.buffers if not isinstance(part, int)]
    if not are_disjoint([target[:size]], [*message.sources(), *ready]):
        detail = (
            "expected memory apart from what is encoded, found an overlap; "
            "write to memory that no tensor of the value uses"
        )
        raise ArgumentError("conflict", path, detail)
    targets: list[ByteArray] = []
    end = 0
    for part, begin, length in zip(parts, [0, *starts], _buffer_sizes(parts), strict=True):
        target[end:begin] = 0
        end = begin + length
        targets.append(target[begin:end])
        if not isinstance(part, int):
            target[begin:end] = part
    message.write(targets[1:])
    return size


def writable_bytes(buffer: Any, path: str) -> ByteArray:
    """The caller's memory as flat bytes; refuses memory that is read-only or has gaps."""
    try:
        array = buffer_bytes(buffer, path)
    except WireFormatError as error:
        raise ArgumentTypeError("bad_type", path, error.detail) from error
    if len(array) and not array.flags.writeable:
        detail = f"expected writable memory, found read-only {type(buffer).__name__}"
        raise ArgumentTypeError("bad_type", path, detail)
    return array
