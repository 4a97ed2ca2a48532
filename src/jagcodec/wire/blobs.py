"""Messages in one buffer: for memory that the caller owns, for stores, and for files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from jagcodec.wire.decoder import decode
from jagcodec.wire.encoder import encode, pending
from jagcodec.wire.frames import (
    PendingMessage,
    blob_size,
    finished,
    read_file,
    writable_bytes,
    write_blob,
    write_file,
)
from jagcodec.wire.spec import ALIGNMENT


def _pending(obj: Any, options: dict[str, Any]) -> PendingMessage:
    """The message of a value under the options of `encode`."""
    known: Any = options
    return pending(obj, **known)


def to_blob(frames: Sequence[Any]) -> bytearray:
    """The frames of a message as one buffer, which `decode` and `open_wire` take in their place.

    Args:
        frames: As `encode` returns them, or as they were received.

    Returns:
        New memory: preamble, header, and every buffer at a multiple of 64 bytes.

    Example:
        >>> from jagcodec import decode, encode, to_blob
        >>> decode(to_blob(encode({"a": 1})))
        {'a': 1}
    """
    message = finished(frames)
    blob = bytearray(blob_size(message))
    write_blob(message, writable_bytes(blob, "to_blob"))
    return blob


def encoded_size(obj: Any, **options: Any) -> int:
    """Bytes of a value as a blob: exactly what `encode_into` writes under the same options.

    Args:
        obj: Anything that `encode` takes.
        options: `narrow`, `checksum`, `allow_pickle`, `default` of `encode`.

    Raises:
        UnsupportedTypeError: As `encode`.

    Example:
        >>> from jagcodec import encode, encoded_size, to_blob
        >>> encoded_size([1, 2]) == len(to_blob(encode([1, 2])))
        True
    """
    return blob_size(_pending(obj, options))


def encode_into(obj: Any, buffer: Any, **options: Any) -> int:
    """Write a value as a blob to the start of memory that the caller owns.

    Args:
        obj: Anything that `encode` takes.
        buffer: Writable and contiguous: bytearray, numpy array, shared memory, a CPU tensor
            (pinned or not). It may be larger than needed; what lies behind the blob is kept.
        options: `narrow`, `checksum`, `allow_pickle`, `default` of `encode`.

    Returns:
        Bytes written.

    Raises:
        ArgumentError: The buffer is too small, or overlaps a tensor; nothing was written.
        ArgumentTypeError: It is no buffer, read-only, or has gaps.
        UnsupportedTypeError: As `encode`; nothing was written.

    Example:
        >>> from jagcodec import decode, encode_into, encoded_size
        >>> memory = bytearray(encoded_size({"a": (1, 2)}))
        >>> encode_into({"a": (1, 2)}, memory) == len(memory)
        True
        >>> decode(memory)
        {'a': (1, 2)}
    """
    return write_blob(_pending(obj, options), writable_bytes(buffer, "encode_into(buffer)"))


def encode_batch_into(
    objs: Iterable[Any], allocate: Callable[[int], Any], **options: Any
) -> list[memoryview]:
    """Write many values, each as a blob, into one allocation: what key-value stores put.

    Args:
        objs: Values that `encode` takes.
        allocate: Called once with the bytes that all of them take; returns writable memory.
        options: `narrow`, `checksum`, `allow_pickle`, `default` of `encode`.

    Returns:
        One view per value into that memory, in order, each at a multiple of 64 bytes from its
        start. They keep it alive.

    Raises:
        ArgumentError: `allocate` returned less than it was asked for, or memory of a tensor.
        ArgumentTypeError: It returned no writable buffer.
        UnsupportedTypeError: As `encode`; nothing was written.

    Example:
        >>> from jagcodec import decode_batch, encode_batch_into
        >>> blobs = encode_batch_into([{"a": 1}, "two"], bytearray)
        >>> decode_batch(blobs)
        [{'a': 1}, 'two']
    """
    messages = [_pending(obj, options) for obj in objs]
    sizes = [blob_size(message) for message in messages]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    memory = writable_bytes(allocate(end), "encode_batch_into(allocate)")
    blobs = []
    for message, start, size in zip(messages, starts, sizes, strict=True):
        write_blob(message, memory[start:])
        blobs.append(memory[start : start + size].data)
    return blobs


def decode_batch(
    blobs: Iterable[Any],
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
) -> list[Any]:
    """The values of many blobs, in order; options and ownership as for `decode`.

    Raises:
        WireFormatError: As `decode`.

    Example:
        >>> from jagcodec import decode_batch, encode, to_blob
        >>> decode_batch([to_blob(encode(1)), to_blob(encode("two"))])
        [1, 'two']
    """
    return [decode(blob, copy=copy, device=device, allow_pickle=allow_pickle) for blob in blobs]


def dump(obj: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """Write a value to a file, whole or not at all: a crash leaves the old file, or none.

    Args:
        obj: Anything that `encode` takes.
        path: The file; its directory must exist and hold a second copy for a moment.
        options: `narrow`, `checksum`, `allow_pickle`, `default` of `encode`.

    Raises:
        UnsupportedTypeError: As `encode`.
        OSError: The file system says no; an old file is still there.

    Example:
        >>> import tempfile
        >>> from jagcodec import dump, load
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     dump({"step": 3}, f"{directory}/batch.jag")
        ...     load(f"{directory}/batch.jag")
        {'step': 3}
    """
    write_file(path, encode(obj, **options))


def load(
    path: str | os.PathLike[str],
    *,
    mmap: bool = False,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
) -> Any:
    """The value that `dump` wrote.

    Args:
        path: The file.
        mmap: Map the file instead of reading it: pages are read when they are looked at. The
            mapping is private: a write to a tensor stays in this process. The file must not be
            shortened while the value lives. `open_wire` reads parts of such a file.
        device: As for `decode`.
        allow_pickle: As for `decode`.

    Raises:
        WireFormatError: The file holds no whole message.
        OSError: It cannot be read.

    Example:
        See `dump`.
    """
    return decode(read_file(path, mmap=mmap), device=device, allow_pickle=allow_pickle)
