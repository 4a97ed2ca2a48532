"""Frames that are stored compressed, each as one frame of zstd, for links slower than memory.

Places and sizes in a message are those of its frames before they are compressed, so only this file
and the header know of it. The library is imported when a message needs it.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from jagcodec.errors import ArgumentError, WireFormatError, brief
from jagcodec.memory.blocks import new_block
from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.wire.checks import fail
from jagcodec.wire.frames import (
    Fetch,
    FramePayload,
    Payload,
    PendingMessage,
    RangePayload,
    blob_end,
    written,
)
from jagcodec.wire.header import Header, read_header, with_checksums, with_stored_sizes
from jagcodec.wire.spec import MAX_WINDOW

T = TypeVar("T")

Compress: TypeAlias = Literal["zstd"] | tuple[Literal["zstd"], int] | None
"""What encoders accept as `compress`."""

LEVELS = range(-7, 20)
"""Levels of zstd whose windows every reader accepts."""

_SMALLEST = 4096  # bytes of a frame that is worth compressing
_WORTH_A_THREAD = 1 << 19  # bytes that take some ten times as long as a thread takes to start


def usable_level(compress: Any) -> int:
    """The level of a caller's choice."""
    codec, level = compress if type(compress) is tuple and len(compress) == 2 else (compress, 1)
    if isinstance(codec, str) and codec == "zstd" and type(level) is int and level in LEVELS:
        return level
    raise ArgumentError(
        "bad_option",
        "compress",
        f"expected None, 'zstd' or ('zstd', level) with a level from {LEVELS[0]} to {LEVELS[-1]}, "
        f"found {brief(compress)}; compress='zstd' suits most messages",
    )


# --- writing -----------------------------------------------------------------------------------


def compressed(message: PendingMessage, level: int, checksum: bool) -> PendingMessage:
    """A message without checksums, with its large frames compressed where that saves bytes."""
    compress = library().compress
    frames = written(message.buffers, message.write)
    large = {i: len(frame) for i, frame in enumerate(frames) if len(frame) >= _SMALLEST}
    sent = list(frames)
    for i, small in _in_threads(lambda i: compress(frames[i], level), large).items():
        if len(small) < len(frames[i]):
            sent[i] = np.frombuffer(small, dtype=np.uint8)
    header = with_stored_sizes(message.header, [len(frame) for frame in sent])
    if not _is_worth_it(header, sent, message.header, frames):
        header, sent = message.header, frames
    if checksum:
        header = with_checksums(header, [zlib.crc32(frame.data) for frame in sent])
    return PendingMessage(header, [*sent], lambda memory: None, list)


def _is_worth_it(
    header: bytes, sent: Sequence[ByteArray], plain: bytes, frames: Sequence[ByteArray]
) -> bool:
    """Whether a message is smaller than the plain one, and default limits accept it."""
    stored, sizes = (list(map(len, one)) for one in (sent, frames))
    saved = len(plain) + sum(sizes) - len(header) - sum(stored)
    if saved < 64 or blob_end(len(header), stored) > blob_end(len(plain), sizes):
        return False
    try:
        read_header(header)
    except WireFormatError:
        return False
    return True


def _in_threads(work: Callable[[int], T], sizes: Mapping[int, int]) -> dict[int, T]:
    """What `work` returns for each frame, by its index; several threads start with the largest."""
    order = sorted(sizes, key=sizes.__getitem__, reverse=True)
    most = 1 + sum(sizes.values()) // _WORTH_A_THREAD
    threads = min(torch.get_num_threads(), len(order), most)
    if threads < 2:
        return {i: work(i) for i in order}
    # Threads of this call alone: those of a pool that is kept are gone in a process that forked.
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(order, pool.map(work, order), strict=True))


# --- reading -----------------------------------------------------------------------------------


def opened(
    header: Header, frames: Sequence[Any], copy: bool | None, *, by_range: bool = False
) -> FramePayload:
    """The buffers of a message in memory; `by_range` decompresses each frame at its first use."""
    if not header.compressed:
        return FramePayload(frames, copy, by_range=by_range)
    if not by_range:
        return FramePayload(opened_frames(header, frames), copy)
    return _LazyPayload(_Frames(header, frames.__getitem__), copy)


def opened_frames(header: Header, frames: Sequence[Any]) -> list[Any]:
    """The frames of a message before they were compressed. What is decompressed is new memory."""
    library()
    sizes = {i: size for i, size in enumerate(header.sizes) if header.stored[i] < size}
    found = _in_threads(lambda i: _decompressed(frames[i], sizes[i], i), sizes)
    return [found.get(i, frame) for i, frame in enumerate(frames)]


def opened_ranges(header: Header, fetch: Fetch, copy: bool | None) -> RangePayload:
    """As `opened`, of a message whose buffers are fetched: a compressed frame is fetched whole."""
    if not header.compressed:
        return RangePayload(fetch, copy)
    frames = _Frames(header, lambda i: fetch(i, 0, header.stored[i]))

    def fetch_inside(buffer: int, offset: int, size: int) -> ByteArray:
        if header.stored[buffer] == header.sizes[buffer]:
            return fetch(buffer, offset, size)
        data: ByteArray = frames[buffer][offset : offset + size]
        return data

    return RangePayload(fetch_inside, copy)


def prepare(payload: Payload, buffers: Iterable[int]) -> None:
    """Decompress buffers in several threads; an error is left to the reader of its column."""
    if isinstance(payload, _LazyPayload):
        with suppress(WireFormatError):
            payload.inside.prepare(buffers)


class _Frames(Sequence[Any]):
    """The frames of a message, each decompressed once, when it is first asked for: read-only."""

    def __init__(self, header: Header, stored: Callable[[int], Any]) -> None:
        library()
        self._header = header
        self._stored = stored
        self._known: dict[int, ByteArray] = {}

    def __len__(self) -> int:
        return len(self._header.sizes)

    def __getitem__(self, index: Any) -> Any:
        size = self._header.sizes[index]
        if self._header.stored[index] == size:
            return self._stored(index)
        known = self._known.get(index)
        if known is None:
            # Two threads may both come here: without a lock, none is held while a process forks.
            found = _decompressed(self._stored(index), size, index)
            found.flags.writeable = False  # it is read more than once
            known = self._known.setdefault(index, found)
        return known

    def prepare(self, indices: Iterable[int]) -> None:
        """Decompress frames now."""
        sizes = self._header.sizes
        _in_threads(self.__getitem__, {i: sizes[i] for i in indices if i < len(sizes)})


class _LazyPayload(FramePayload):
    """Frames in memory that are decompressed when they are asked for."""

    def __init__(self, frames: _Frames, copy: bool | None) -> None:
        super().__init__(frames, copy, by_range=True)
        self.inside: _Frames = frames

    @property
    def frames(self) -> None:
        """None: to look at all of them would be to decompress them."""
        return


def _decompressed(data: Any, size: int, index: int) -> ByteArray:
    """A frame of `size` bytes in new memory, from what is stored of it."""
    path = f"frame {index + 1}"
    if type(data) is not np.ndarray:
        raise fail("bad_value", "expected bytes on the host, found a frame on a device", path=path)
    zstd = library()
    _check_zstd(data, size, path)
    frame: ByteArray = new_block(size).data
    try:
        whole = zstd.decompress(data, frame)
    except zstd.error as error:
        raise _not_whole(size, f"{error!s:.200}", path) from error
    if not whole:
        raise _not_whole(size, "one of another size", path)
    return frame


def _not_whole(size: int, found: str, path: str) -> WireFormatError:
    expected = f"expected a zstd frame of {size} bytes"
    return fail("bad_value", f"{expected}, found {found}; it was cut or damaged", path=path)


_MAGIC = b"\x28\xb5\x2f\xfd"
_RUN = 1


def _check_zstd(data: ByteArray, size: int, path: str) -> None:
    """Check what a zstd frame says of itself, before any memory is allocated for its content.

    RFC 8878, section 3.1.1.
    """
    start = data[:18].tobytes()
    if start[:4] != _MAGIC or len(start) < 6:
        raise _not_whole(size, f"{start[:4]!r}", path)
    flags = start[4]
    if flags & 0b1011:  # of a dictionary, and one that is reserved
        raise fail("bad_value", "expected zstd without a dictionary, found one", path=path)
    at = 5
    one_segment = flags & 0b100000
    if not one_segment:
        base = 1 << (10 + (start[at] >> 3))
        window = base + base // 8 * (start[at] & 7)
        if window > MAX_WINDOW:
            expected = f"expected a window of at most {MAX_WINDOW}"
            raise fail("bad_value", f"{expected}, found {window}", path=path)
        at += 1
    width = (1 if one_segment else 0, 2, 4, 8)[flags >> 6]
    found = int.from_bytes(start[at : at + width], "little") + (256 if width == 2 else 0)
    if not width or found != size:
        raise _not_whole(size, f"one of {found if width else 'unknown'} bytes", path)
    at += width
    # The blocks: a library may stop at the last byte of the content, before the end of the frame.
    blocks, last = data.data, 0
    while not last and at + 3 <= len(blocks):
        block = int.from_bytes(blocks[at : at + 3], "little")
        last = block & 1
        at += 3 + (1 if block >> 1 & 3 == _RUN else block >> 3)
    at += 4 if flags & 0b100 else 0  # the checksum
    if not last or at != len(blocks):
        raise _not_whole(size, f"one that ends at byte {at} of {len(blocks)}", path)


# --- the library -------------------------------------------------------------------------------


class Zstd(NamedTuple):
    """A library for zstd."""

    # (bytes, level) -> one frame, which gives the size of its content
    compress: Callable[[ByteArray, int], bytes]
    # (frame, memory) -> whether the content fills the memory; it allocates no more than a window
    decompress: Callable[[ByteArray, ByteArray], bool]
    error: type[Exception]  # which `decompress` raises for damaged bytes


@functools.cache
def library() -> Zstd:
    """The one of the standard library, from Python 3.14 on, or the package zstandard."""
    try:
        return _of_standard_library(importlib.import_module("compression.zstd"))
    except ImportError:
        pass
    try:
        return _of_package(importlib.import_module("zstandard"))
    except ImportError as error:
        raise ArgumentError(
            "bad_option",
            "compress='zstd'",
            "expected the package zstandard, which both sides of a compressed message need, found "
            "none; pip install 'jagcodec[zstd]'",
        ) from error


def _of_package(library: Any) -> Zstd:
    def compress(data: ByteArray, level: int) -> bytes:
        frame: bytes = library.ZstdCompressor(level=level).compress(data)
        return frame

    def decompress(data: ByteArray, target: ByteArray) -> bool:
        source = library.ZstdDecompressor(max_window_size=MAX_WINDOW)
        reader = source.stream_reader(data, read_across_frames=False)
        return reader.readinto(target) == len(target) and not reader.read(1)

    return Zstd(compress, decompress, library.ZstdError)


def _of_standard_library(library: Any) -> Zstd:
    log_max = library.DecompressionParameter.window_log_max
    largest = log_max.bounds()[1]

    def decompress(data: ByteArray, target: ByteArray) -> bool:
        # A single segment may be larger than a window.
        log = min(max(MAX_WINDOW, len(target)).bit_length(), largest)
        reader = library.ZstdDecompressor(options={log_max: log})
        frame = reader.decompress(data, max_length=len(target))
        if len(frame) != len(target):
            return False
        target[:] = np.frombuffer(frame, dtype=np.uint8)
        # The end of the frame may be all that is left.
        return bool(reader.eof or (not reader.decompress(b"", max_length=1) and reader.eof))

    return Zstd(library.compress, decompress, library.ZstdError)
