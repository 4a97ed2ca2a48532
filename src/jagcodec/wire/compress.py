"""Compressed frames, each one frame of zstd.

Places and sizes in a message are those of its frames before they are compressed, so only this file
and the header know of it. The library is imported when a message needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from jagcodec.errors import ArgumentError, WireFormatError, brief
from jagcodec.kernels import thread_count
from jagcodec.memory.arrays import ByteArray, address, borrowed
from jagcodec.wire.checks import expect, fail
from jagcodec.wire.frames import PendingMessage, blob_size, written_buffers
from jagcodec.wire.header import Header, with_sent_sizes
from jagcodec.wire.spec import MAX_WINDOW

K = TypeVar("K")
T = TypeVar("T")

Compress: TypeAlias = Literal["zstd"] | tuple[Literal["zstd"], int] | None
"""The values that encoders accept as `compress`."""

LEVELS = range(-7, 20)  # those whose windows every reader accepts
_SMALLEST = 4096  # bytes of a frame that is worth compressing
_WORTH_A_THREAD = 1 << 19  # bytes; they take about ten times as long as starting a thread
_SINGLE_SEGMENT = 0b100000  # a flag of a frame whose content is its window


def usable_level(compress: Any) -> int:
    """The level of a caller's choice."""
    codec, level = compress if type(compress) is tuple and len(compress) == 2 else (compress, 1)
    if isinstance(codec, str) and codec == "zstd" and type(level) is int and level in LEVELS:
        return level
    detail = (
        f"expected None, 'zstd' or ('zstd', level) with a level from {LEVELS[0]} to {LEVELS[-1]}, "
        f"found {brief(compress)}; compress='zstd' suits most messages"
    )
    raise ArgumentError("bad_option", "compress", detail)


def zstandard() -> Any:
    """The package zstandard."""
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        detail = "expected the package zstandard, found none; pip install 'zstandard>=0.22'"
        raise ArgumentError("bad_option", "compress='zstd'", detail) from error


def compressed(
    message: PendingMessage, level: int, is_accepted: Callable[[bytes, int], bool]
) -> PendingMessage:
    """A message without checksums, with its large frames compressed where that saves bytes.

    `is_accepted` is given the header, and the bytes of its repeated documents. It returns whether
    readers accept the message by default.
    """
    library = zstandard()
    frames = written_buffers(message)
    large = {i: len(frame) for i, frame in enumerate(frames) if len(frame) >= _SMALLEST}
    compress = lambda i: library.ZstdCompressor(level=level).compress(frames[i])  # noqa: E731
    sent = list(frames)
    try:
        smaller_frames = _in_threads(compress, large)
    except library.ZstdError as error:  # at these levels, zstd fails only for lack of memory
        detail = f"expected memory to compress {sum(large.values())} bytes, found {error!s:.200}; "
        raise ArgumentError("too_large", "compress", f"{detail}use a lower level") from error
    for i, small in smaller_frames.items():
        if len(small) < len(frames[i]):
            sent[i] = np.frombuffer(small, dtype=np.uint8)
    sources = message.sources()
    plain = PendingMessage(message.header, [*frames], sources)
    header = with_sent_sizes(message.header, [len(frame) for frame in sent])
    smaller = PendingMessage(header, [*sent], [*sources, *frames])
    accepted = is_accepted(header, message.repeated_bytes)
    return smaller if _pays(smaller, plain, accepted) else plain


def _pays(smaller: PendingMessage, plain: PendingMessage, accepted: bool) -> bool:
    """Whether to send `smaller`: readers accept it, and it is smaller as frames and as a blob."""
    one, other = (len(each.header) + sum(map(len, each.buffers)) for each in (smaller, plain))
    return accepted and other - one >= 64 and blob_size(smaller) <= blob_size(plain)


def _in_threads(work: Callable[[K], T], sizes: Mapping[K, int]) -> dict[K, T]:
    """Call `work` for each key, the largest first, in several threads if that pays."""
    order = sorted(sizes, key=sizes.__getitem__, reverse=True)
    most = 1 + sum(sizes.values()) // _WORTH_A_THREAD
    threads = min(thread_count(), len(order), most)
    if threads < 2:
        return {key: work(key) for key in order}
    # Start threads for this call alone: a process that forks has no threads of a kept pool.
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(order, pool.map(work, order), strict=True))


# --- reading -----------------------------------------------------------------------------------


def decompressed_buffers(header: Header, buffers: Sequence[Any], *, lazily: bool) -> Sequence[Any]:
    """The buffers of a message, decompressed into new memory: if `lazily`, at first use."""
    zstandard()
    replaced: dict[int, Any] = {
        i: Compressed(buffers[i], sent_size, size, i)
        for i, (sent_size, size) in enumerate(zip(header.sent_sizes, header.sizes, strict=True))
        if sent_size < size
    }
    if not lazily:
        wholes = _in_threads(Compressed.whole, {one: one.size for one in replaced.values()})
        # Nothing else refers to these bytes, so they may be written to.
        for i, one in replaced.items():
            replaced[i] = borrowed(address(wholes[one]), one.size, wholes[one])
    return [replaced.get(i, buffer) for i, buffer in enumerate(buffers)]


class Compressed:
    """Read-only ranges of a compressed frame, which is decompressed whole at its first use."""

    __slots__ = ("_data", "_index", "_known", "_sent_size", "size")

    def __init__(self, data: Any, sent_size: int, size: int, index: int) -> None:
        self._data = data  # `sent_size` bytes, or a function of an offset and a size
        self._sent_size = sent_size
        self.size: int = size  # before it was compressed
        self._index = index
        self._known: ByteArray | None = None

    def __call__(self, offset: int, size: int) -> ByteArray:
        return self.whole()[offset : offset + size]

    def whole(self) -> ByteArray:
        """The bytes of the whole frame."""
        if self._known is None:
            # Use no lock: a fork would copy a held one. If two threads come here, both decompress.
            data = self._data(0, self._sent_size) if callable(self._data) else self._data
            # A copy: what was checked must not change with the message's memory.
            self._known = _decompressed(data.tobytes(), self.size, f"frame {self._index + 1}")
        return self._known


def decompress_ahead(buffers: Iterable[Any]) -> None:
    """Decompress buffers in several threads. The reader of a damaged one gets its error."""
    sizes = {each: each.size for each in buffers if isinstance(each, Compressed)}
    with suppress(WireFormatError):
        _in_threads(Compressed.whole, sizes)


def _decompressed(sent: bytes, size: int, path: str) -> ByteArray:
    """A frame of `size` bytes in new memory, read-only."""
    zstd = zstandard()
    try:
        head = zstd.get_frame_parameters(sent)
        if sent[:4] != zstd.FRAME_HEADER or head.content_size != size:
            start = f"{sent[:4]!r} and a size of {head.content_size}"
            detail = f"expected a zstd frame of {size} bytes, found {start}"
            raise fail("bad_value", detail, path=path)
        expect(not head.dict_id, "bad_value", "zstd without a dictionary", head.dict_id, path)
        near = bool(sent[4] & _SINGLE_SEGMENT) or head.window_size <= MAX_WINDOW
        expect(near, "bad_value", f"a window of at most {MAX_WINDOW}", head.window_size, path)
        # The decompressor needs no more memory than the content and a window.
        library = zstd.ZstdDecompressor(max_window_size=MAX_WINDOW)
        return np.frombuffer(library.decompress(sent, allow_extra_data=False), dtype=np.uint8)
    except zstd.ZstdError as error:
        if "Allocation error" in str(error):  # the message itself may be sound
            raise MemoryError(f"{size} bytes of {path}: {error}") from error
        detail = (
            f"expected a zstd frame of {size} bytes, found {error!s:.200}; it was cut or damaged"
        )
        raise fail("bad_value", detail, path=path) from error
