"""Frames <-> one buffer, for shared memory, RDMA stores and files.

A blob is a preamble of 24 bytes (magic, version, header size), the header, and the frames of the
payload, each at a multiple of 64 bytes, the bytes between them zero.
"""

from __future__ import annotations

import itertools
import mmap as mmap_module
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, are_apart
from jagcodec.rowcopy import Copy, copy_all
from jagcodec.wire.spec import ALIGNMENT, BLOB_MAGIC, VERSION

PREAMBLE = struct.Struct("<8sIIQ")
"""Magic, version, zero, header size."""

# msgpack's extensions, and so the value tree, end at 4 GiB.
_MAX_HEADER = 1 << 33


class Unwritten:
    """Rows in CPU memory that are still to be put together, straight where they are wanted.

    Attributes:
        nbytes: Of the rows.
    """

    nbytes: int

    def copy_to(self, out: ByteArray) -> Copy:
        """What puts them into `out`, memory that is just as large."""
        raise NotImplementedError


def buffer_bytes(buffer: Any, path: str) -> ByteArray:
    """Any contiguous buffer, or a CPU tensor, as flat bytes that alias it.

    Raises:
        WireFormatError: It is no contiguous buffer.
    """
    array: ByteArray
    try:
        if type(buffer) is bytearray or type(buffer) is bytes:
            array = np.frombuffer(buffer, dtype=np.uint8)
            return array
        if isinstance(buffer, torch.Tensor):
            buffer = buffer.detach().numpy()
        try:
            view = memoryview(buffer)
        except TypeError:
            raise TypeError(f"{type(buffer).__name__}, which is no buffer") from None
        if not view.nbytes:
            return np.empty(0, dtype=np.uint8)
        if not view.c_contiguous:
            raise TypeError("one with gaps")
        array = np.frombuffer(view.cast("B"), dtype=np.uint8)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WireFormatError(
            "foreign", path, f"expected a contiguous buffer, found {error}"
        ) from error
    return array


# --- reading -----------------------------------------------------------------------------------


def read_preamble(start: ByteArray) -> int:
    """The header size that the first 24 bytes of a blob give.

    Raises:
        WireFormatError: They are no preamble of this version.
    """
    if len(start) < PREAMBLE.size:
        raise WireFormatError(
            "foreign", "preamble", f"expected {PREAMBLE.size} bytes, found {len(start)}"
        )
    magic, version, zero, size = PREAMBLE.unpack(start[: PREAMBLE.size].tobytes())
    if magic != BLOB_MAGIC:
        raise WireFormatError(
            "foreign",
            "preamble",
            f"expected {BLOB_MAGIC!r}, found {magic!r}; this is no jagcodec blob",
        )
    if version != VERSION:
        raise WireFormatError(
            "unknown_version",
            "preamble",
            f"expected format version {VERSION}, found {version}; upgrade the side that is behind",
        )
    if zero:
        raise WireFormatError("bad_header", "preamble", f"expected 0 at byte 12, found {zero}")
    if size > _MAX_HEADER:
        raise WireFormatError(
            "bad_header", "preamble", f"expected a header below {_MAX_HEADER} bytes, found {size}"
        )
    return int(size)


def is_blob(data: ByteArray) -> bool:
    """Whether one buffer is a blob rather than a header frame alone."""
    return data[: len(BLOB_MAGIC)].tobytes() == BLOB_MAGIC


def starts_of(header_size: int, sizes: Sequence[int]) -> list[int]:
    """Where the frames of the payload begin in a blob, and where the last of them ends."""
    starts = []
    end = PREAMBLE.size + header_size
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return [*starts, end]


def split_blob(blob: ByteArray, sizes_of: Callable[[memoryview], Sequence[int]]) -> list[ByteArray]:
    """The frames of a blob, aliasing it. `sizes_of` reads the buffer sizes out of a header.

    Bytes behind the end are not looked at: shared memory comes in whole pages.

    Raises:
        WireFormatError: It is cut.
    """
    header_size = read_preamble(blob)
    _whole(blob, PREAMBLE.size + header_size, "header")
    header = blob[PREAMBLE.size : PREAMBLE.size + header_size]
    sizes = sizes_of(header.data)
    *starts, end = starts_of(header_size, sizes)
    _whole(blob, end, "payload")
    return [header, *(blob[a : a + n] for a, n in zip(starts, sizes, strict=True))]


def _whole(blob: ByteArray, size: int, path: str) -> None:
    if len(blob) < size:
        raise WireFormatError(
            "frame_size", path, f"expected a blob of at least {size} bytes, found {len(blob)}"
        )


# --- writing -----------------------------------------------------------------------------------


def blob_size(frames: Sequence[Any]) -> int:
    """Bytes of the blob that these frames make."""
    header, *payload = [part.nbytes for part in map(_part, frames)]
    return starts_of(header, payload)[-1]


def write_blob(frames: Sequence[Any], target: ByteArray) -> int:
    """Write frames as a blob to the start of `target`; every byte up to the end is written.

    Frames that are `Unwritten` are written to their place there, and nowhere before.

    Returns:
        Bytes written.

    Raises:
        ArgumentError: `target` is too small, or overlaps a frame; nothing was written.
    """
    header, *payload = parts = list(map(_part, frames))
    *starts, size = starts_of(header.nbytes, [part.nbytes for part in payload])
    if len(target) < size:
        raise ArgumentError(
            "too_large",
            "buffer",
            f"expected a buffer of at least {size} bytes, found {len(target)}; "
            "encoded_size tells the size beforehand",
        )
    preamble = PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, header.nbytes)
    parts.insert(0, np.frombuffer(preamble, dtype=np.uint8))
    begins = [0, PREAMBLE.size, *starts]
    ends = [begin + part.nbytes for begin, part in zip(begins, parts, strict=True)]
    copies, kept = [], []
    for begin, end, part in zip(begins, ends, parts, strict=True):
        if isinstance(part, Unwritten):
            copies.append(part.copy_to(target[begin:end]))
        else:
            kept.append((target[begin:end], part))
    sources = [*(copy.src for copy in copies), *(part for _, part in kept)]
    if not are_apart([target[:size]], sources):
        raise ArgumentError(
            "conflict",
            "buffer",
            "expected memory apart from what is encoded, found an overlap; write to memory that "
            "no tensor of the value lies in",
        )
    for room, part in kept:
        room[:] = part
    copy_all(copies)
    for end, begin in zip(ends, itertools.islice(begins, 1, None), strict=False):
        target[end:begin] = 0
    return size


def writable_bytes(buffer: Any, path: str) -> ByteArray:
    """Memory of the caller's to write to.

    Raises:
        ArgumentTypeError: It is no contiguous buffer, or read-only.
    """
    try:
        array = buffer_bytes(buffer, path)
    except WireFormatError as error:
        raise ArgumentTypeError("bad_type", path, error.detail) from error
    if len(array) and not array.flags.writeable:
        raise ArgumentTypeError(
            "bad_type", path, f"expected writable memory, found read-only {type(buffer).__name__}"
        )
    return array


def _part(frame: Any) -> ByteArray | Unwritten:
    return frame if isinstance(frame, Unwritten) else buffer_bytes(frame, "frame")


# --- files -------------------------------------------------------------------------------------


def write_file(path: str | os.PathLike[str], frames: Sequence[Any]) -> None:
    """Write frames as a blob to a file, whole or not at all.

    The blob goes to a temporary file beside `path`, to the disk, and then takes its name: a crash
    at any moment leaves the old file, or none.
    """
    target = Path(path)
    # Not tempfile's: its files are for their owner alone, whatever the umask says.
    name = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(name, "xb") as file:
            _write(file, frames)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def _write(file: BinaryIO, frames: Sequence[Any]) -> None:
    header, *payload = [buffer_bytes(frame, f"frame {i}") for i, frame in enumerate(frames)]
    *starts, _ = starts_of(len(header), [len(part) for part in payload])
    end = file.write(PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, len(header)))
    for begin, part in zip([PREAMBLE.size, *starts], [header, *payload], strict=True):
        end += file.write(bytes(begin - end))
        end += file.write(part.data)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: str | os.PathLike[str], *, mmap: bool) -> Any:
    """The bytes of a file: a private mapping, writes to which never reach it, or a bytearray."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if mmap and size:
            return mmap_module.mmap(file.fileno(), size, access=mmap_module.ACCESS_COPY)
        data = bytearray(size)
        file.readinto(data)
        return data
