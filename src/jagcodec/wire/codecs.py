"""What the blocks of a compressed message are compressed with, and the libraries that do it.

A codec is asked for when a message needs it, so that whoever compresses nothing needs no library.
"""

from __future__ import annotations

import functools
import importlib
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from jagcodec.errors import ArgumentError, WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.wire.checks import fail
from jagcodec.wire.spec import MAX_BLOCK, MAX_WINDOW

T = TypeVar("T")
R = TypeVar("R")

Compress: TypeAlias = Callable[[ByteArray], bytes]
"""The bytes of a block -> what is sent of them, which may be more."""

Decompress: TypeAlias = Callable[[ByteArray, int], bytes]
"""(what was sent of a block, its size) -> its bytes, never more of them than that."""


class Codec(NamedTuple):
    """A way to compress.

    Attributes:
        compressor: Makes a `Compress` of a level; one per thread at a time.
        decompressor: Makes a `Decompress`; one per thread at a time.
        damaged: What its library raises of bytes that it did not write.
    """

    compressor: Callable[[int], Compress]
    decompressor: Callable[[], Decompress]
    damaged: tuple[type[Exception], ...]


@functools.cache
def codec_of(name: str) -> Codec:
    """A codec by its name on the wire.

    Raises:
        ArgumentError: Its library is not installed; the error says how to get it.
    """
    return _CODECS[name]()


def inflated(decompress: Decompress, codec: Codec, data: ByteArray, size: int, path: str) -> bytes:
    """A block of `size` bytes.

    Raises:
        WireFormatError: `data` is not the whole of such a block, or more than it.
    """
    try:
        block = decompress(data, size)
    except codec.damaged as error:
        raise _not_whole(size, f"{error!s:.200}", path) from error
    except WireFormatError as error:
        raise WireFormatError(error.reason, path, error.detail) from error
    if len(block) != size:
        raise _not_whole(size, f"one of {len(block)}", path)
    return block


def _not_whole(size: int, found: str, path: str) -> WireFormatError:
    expected = f"expected a compressed block of {size} bytes"
    return WireFormatError("bad_value", path, f"{expected}, found {found}; it was cut or damaged")


def run_all(
    work: Callable[[], Callable[[T], R]], tasks: list[T], size: int, threads: int
) -> list[R]:
    """What each task gives, in order; in several threads where that is worth it.

    Args:
        work: Makes what does a task: once per thread.
        tasks: What to do.
        size: How many bytes all of them are of.
        threads: How many threads at most; 0 for as many as torch uses.
    """
    threads = min(threads or torch.get_num_threads(), len(tasks), 1 + size // _WORTH_A_THREAD)
    if threads < 2:
        one = work()
        return [one(task) for task in tasks]

    def several(first: int) -> list[R]:
        one = work()
        return [one(task) for task in tasks[first::threads]]

    # Threads of this call alone: those of a pool that is kept are gone in a process that forked.
    results: list[Any] = [None] * len(tasks)
    with ThreadPoolExecutor(threads) as pool:
        for first, done in enumerate(pool.map(several, range(threads))):
            results[first::threads] = done
    return results


_WORTH_A_THREAD = 1 << 19
"""Bytes that take some ten times as long to compress as a thread takes to start."""


# --- zstd --------------------------------------------------------------------------------------


def _zstd() -> Codec:
    try:
        library: Any = importlib.import_module("compression.zstd")
    except ImportError:
        return _zstandard()

    def decompressor() -> Decompress:
        option = library.DecompressionParameter.window_log_max
        most = {option: MAX_BLOCK.bit_length() - 1}

        def decompress(data: ByteArray, size: int) -> bytes:
            _check_zstd(data, size)
            reader = library.ZstdDecompressor(options=most)
            block: bytes = reader.decompress(data, max_length=size)
            # What is left may be the end alone.
            more = b"" if reader.eof else reader.decompress(b"", max_length=1)
            if more or not reader.eof or reader.unused_data:
                raise fail("bad_value", f"expected one frame of {size} bytes, found another end")
            return block

        return decompress

    return Codec(
        lambda level: lambda data: library.compress(data, level),
        decompressor,
        (library.ZstdError,),
    )


def _zstandard() -> Codec:
    library = _library("zstandard", "zstd")

    def decompressor() -> Decompress:
        reader = library.ZstdDecompressor(max_window_size=MAX_BLOCK)

        def decompress(data: ByteArray, size: int) -> bytes:
            _check_zstd(data, size)
            block: bytes = reader.decompress(data, max_output_size=size, allow_extra_data=False)
            return block

        return decompress

    return Codec(
        lambda level: library.ZstdCompressor(level=level).compress,
        decompressor,
        (library.ZstdError,),
    )


_ZSTD_MAGIC = 0xFD2FB528


def _check_zstd(data: ByteArray, size: int) -> None:
    """See what the frame header of a block says before any memory is taken on its word.

    RFC 8878, section 3.1.1.1.

    Raises:
        WireFormatError: It is no frame of zstd, names a dictionary, needs too large a window, or
            is of another size.
    """
    start = data[:18].tobytes()
    magic, flags = struct.unpack_from("<IB", start) if len(start) >= 5 else (0, 0)
    if magic != _ZSTD_MAGIC:
        raise fail("bad_value", f"expected a frame of zstd, found {start[:4]!r}")
    if flags & 0b1011:  # of a dictionary, and one that is reserved
        raise fail("bad_value", "expected a frame of zstd without a dictionary, found one with it")
    one_segment = bool(flags & 0b100000)
    width = (int(one_segment), 2, 4, 8)[flags >> 6]
    at = 5
    if not one_segment:
        window = start[at] if len(start) > at else 0
        at += 1
        base = 1 << (10 + (window >> 3))
        base += base // 8 * (window & 7)
        if base > MAX_WINDOW:
            raise fail("bad_value", f"expected a window of at most {MAX_WINDOW}, found {base}")
    if width:
        found = int.from_bytes(start[at : at + width], "little") + (256 if width == 2 else 0)
        if len(start) < at + width or found != size:
            raise fail("bad_value", f"expected a frame of {size} bytes, found one of {found}")


# --- lz4 ---------------------------------------------------------------------------------------


def _lz4() -> Codec:
    library = _library("lz4.block", "lz4")
    # Known to read zeros, and not what lies in its memory, where a forged block refers to itself.
    if _library("lz4", "lz4").library_version_number() < _SAFE_LZ4:
        raise ArgumentError(
            "bad_option",
            "compress='lz4'",
            f"expected LZ4 {_SAFE_LZ4} or newer, found one that strangers' messages should not "
            "reach; pip install --upgrade lz4",
        )

    def compressor(level: int) -> Compress:
        def compress(data: ByteArray) -> bytes:
            block: bytes = library.compress(
                data, mode="fast", acceleration=max(1, -level), store_size=False
            )
            return block

        return compress

    def decompressor() -> Decompress:
        return lambda data, size: library.decompress(data, uncompressed_size=size)

    return Codec(compressor, decompressor, (library.LZ4BlockError,))


_SAFE_LZ4 = 10904
"""Its number for 1.9.4."""

_CODECS: dict[str, Callable[[], Codec]] = {"zstd": _zstd, "lz4": _lz4}


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ArgumentError(
            "bad_option",
            f"compress={extra!r}",
            f"expected the package {package}, which messages compressed with it need on both "
            f"sides, found none; pip install 'jagcodec[{extra}]'",
        ) from error
