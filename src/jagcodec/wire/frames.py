"""Frames: what a message is sent as, in one buffer or several; where its bytes come from.

A blob is a message in one buffer: a preamble of 24 bytes (magic, version, header size), the header,
and the frames of the payload, each at a multiple of 64 bytes, the bytes between them zero.
"""

from __future__ import annotations

import mmap as mmap_module
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, WireFormatError, brief, describe
from jagcodec.memory.blocks import allocate_together, new_block
from jagcodec.memory.tensor_bytes import ByteArray, address, are_apart, borrowed
from jagcodec.wire.limits import Limits, exceeded
from jagcodec.wire.spec import ALIGNMENT, BLOB_MAGIC, VERSION

Frame: TypeAlias = bytes | bytearray | memoryview

PREAMBLE = struct.Struct("<8sIIQ")
"""Magic, version, zero, header size."""

# Numbers and values are msgpack byte strings, which end at 4 GiB.
_MAX_HEADER = 1 << 33


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


def frame_arrays(frames: Any, path: str) -> list[ByteArray]:
    """What holds a message as arrays that alias it: frames, header first, or one blob.

    An item of a list may be what a peer sent, one object may not: what is no buffer is a bad
    message there, and a mistake here.

    Raises:
        ArgumentTypeError: It is neither a buffer nor a list of them.
        WireFormatError: There is no frame, or one of several is not a buffer.
    """
    if type(frames) is not list:
        one = isinstance(frames, (bytes, bytearray, memoryview, np.ndarray, torch.Tensor, str))
        if one or not isinstance(frames, Sequence):
            return [_one_buffer(frames, path)]
    if not frames:
        raise WireFormatError("no_message", "frames", "expected a header frame, found no frame")
    if type(frames[0]) is dict:  # which no peer sends
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected the frames of a message, or a blob, found {describe(frames)}; "
            "pack_rows makes a batch of rows, and encode_rows a message",
        )
    return [
        # Most of them, as sockets hand them over.
        np.frombuffer(frame, _BYTE)
        if type(frame) is bytearray or type(frame) is bytes
        else buffer_bytes(frame, f"frame {i}")
        for i, frame in enumerate(frames)
    ]


_BYTE = np.dtype(np.uint8)


def _one_buffer(buffer: Any, path: str) -> ByteArray:
    try:
        return buffer_bytes(buffer, path)
    except WireFormatError as error:
        found = describe(buffer)
        if isinstance(buffer, (str, os.PathLike)):
            remedy = "load(path) reads a file, and open_wire takes a path"
        elif isinstance(buffer, (torch.Tensor, np.ndarray, memoryview)):
            remedy = "a blob is contiguous, and on the CPU: copy it there first"
        elif buffer is None:
            remedy = "pass what encode returned, or what was received"
        elif hasattr(buffer, "to_frames"):
            remedy = "its to_frames() makes them"
        elif callable(buffer):
            remedy = "open_wire reads from a callable"
        else:
            remedy = "encode makes them of a value"
        expected = "expected the frames of a message, or a blob"
        raise ArgumentTypeError("bad_type", path, f"{expected}, found {found}; {remedy}") from error


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


def blob_end(header_size: int, sizes: Sequence[int]) -> int:
    """Bytes of a blob."""
    return starts_of(header_size, sizes)[-1]


def split_blob(blob: ByteArray, header_size: int, sizes: Sequence[int]) -> list[ByteArray]:
    """The header of a blob and frames of these sizes behind it, aliasing it.

    Bytes behind the end are not looked at: shared memory comes in whole pages.

    Raises:
        WireFormatError: It is cut.
    """
    _whole(blob, PREAMBLE.size + header_size, "header")
    header = blob[PREAMBLE.size : PREAMBLE.size + header_size]
    *starts, end = starts_of(header_size, sizes)
    _whole(blob, end, "payload")
    return [header, *(blob[a : a + n] for a, n in zip(starts, sizes, strict=True))]


def _whole(blob: ByteArray, size: int, path: str) -> None:
    if len(blob) < size:
        raise WireFormatError(
            "frame_size", path, f"expected a blob of at least {size} bytes, found {len(blob)}"
        )


# --- writing -----------------------------------------------------------------------------------


class PendingMessage(NamedTuple):
    """A message, some of whose buffers are still to be written, straight where they are wanted.

    Attributes:
        header: The first frame.
        buffers: The others: bytes, or how many of them there will be.
        write: Fills memory for each buffer that is only a number yet, all of them in one call.
        sources: The memory that `write` reads.
    """

    header: bytes
    buffers: list[ByteArray | int]
    write: Callable[[list[ByteArray]], None]
    sources: Callable[[], list[np.ndarray[Any, Any]]]


def frames_of(message: PendingMessage) -> list[Frame]:
    """The frames of a message: new ones in one allocation, which is freed with the last of them."""
    return [message.header, *[part.data for part in written(message.buffers, message.write)]]


def written(
    buffers: list[ByteArray | int], write: Callable[[list[ByteArray]], None]
) -> list[ByteArray]:
    """Buffers of which nothing is left to be written; see `PendingMessage`."""
    if int not in map(type, buffers):
        return buffers  # type: ignore[return-value]
    sizes = [part for part in buffers if isinstance(part, int)]
    memory = allocate_together(sizes)
    write(memory)
    fresh = iter(memory)
    return [next(fresh) if isinstance(part, int) else part for part in buffers]


def finished(frames: Sequence[Any], path: str) -> PendingMessage:
    """Frames as a message of which nothing is left to be written."""
    header, *buffers = frame_arrays(frames, path)
    return PendingMessage(header.tobytes(), list(buffers), lambda memory: None, list)


def blob_size(message: PendingMessage) -> int:
    """Bytes of the blob of a message."""
    return blob_end(len(message.header), _sizes(message.buffers))


def _sizes(buffers: Sequence[ByteArray | int]) -> list[int]:
    return [part if isinstance(part, int) else len(part) for part in buffers]


def blob_pieces(frames: Sequence[Any]) -> list[Any]:
    """The blob of a message as buffers to be joined."""
    header, *payload = frames
    pieces = [PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, len(header)), header]
    end = PREAMBLE.size + len(header)
    for start, part in zip(starts_of(len(header), list(map(len, payload))), payload, strict=False):
        pieces += (bytes(start - end), part)
        end = start + len(part)
    return pieces


def write_blob(message: PendingMessage, target: ByteArray) -> int:
    """Write a message as a blob to the start of `target`; every byte up to the end is written.

    Returns:
        Bytes written.

    Raises:
        ArgumentError: `target` is too small, or overlaps what is read; nothing was written.
    """
    *starts, size = starts_of(len(message.header), _sizes(message.buffers))
    if len(target) < size:
        raise ArgumentError(
            "too_large",
            "buffer",
            f"expected a buffer of at least {size} bytes, found {len(target)}; "
            "encoded_size gives the size beforehand",
        )
    preamble = PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, len(message.header))
    parts: list[Any] = [_flat(preamble), _flat(message.header), *message.buffers]
    begins = [0, PREAMBLE.size, *starts]
    sizes = [PREAMBLE.size, len(message.header), *_sizes(message.buffers)]
    ready = [part for part in parts[2:] if not isinstance(part, int)]
    if not are_apart([target[:size]], [*message.sources(), *ready]):
        raise ArgumentError(
            "conflict",
            "buffer",
            "expected memory apart from what is encoded, found an overlap; write to memory that "
            "no tensor of the value lies in",
        )
    rest: list[ByteArray] = []
    end = 0
    for part, begin, length in zip(parts, begins, sizes, strict=True):
        target[end:begin] = 0
        end = begin + length
        if isinstance(part, int):
            rest.append(target[begin:end])
        else:
            target[begin:end] = part
    message.write(rest)
    return size


def _flat(data: bytes) -> ByteArray:
    return np.frombuffer(data, dtype=np.uint8)


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


# --- files -------------------------------------------------------------------------------------


def file_path(path: Any, where: str, remedy: str) -> str:
    """The name of a file, which there need not be.

    Raises:
        ArgumentTypeError: It is not a path. Not a descriptor either: to open one closes it.
        ArgumentError: It has a NUL, which no name of a file has.
    """
    name: Any = None
    if isinstance(path, (str, os.PathLike)):
        name = os.fspath(path)
    if not isinstance(name, (str, bytes)):
        raise ArgumentTypeError(
            "bad_type",
            where,
            f"expected a str or os.PathLike, found {type(path).__name__}; {remedy}",
        )
    name = os.fsdecode(name)
    if "\0" in name:
        found = brief(name)
        raise ArgumentError("bad_option", where, f"expected a path without NUL, found {found}")
    return str(name)


def _regular(status: os.stat_result, where: str) -> os.stat_result:
    """Refuse what waits, never ends, or does something when it is opened."""
    if not stat.S_ISREG(status.st_mode):
        kinds = (
            (stat.S_ISDIR, "a directory"),
            (stat.S_ISFIFO, "a pipe"),
            (stat.S_ISSOCK, "a socket"),
            (stat.S_ISCHR, "a device"),
            (stat.S_ISBLK, "a device"),
        )
        found = next((text for is_it, text in kinds if is_it(status.st_mode)), "something else")
        raise ArgumentError("bad_option", where, f"expected a regular file, found {found}")
    return status


def write_file(path: str, frames: Sequence[Any], where: str) -> None:
    """Write frames as a blob to a file, whole or not at all."""
    write_whole(path, blob_pieces([memoryview(frame) for frame in frames]), where)


def write_whole(path: str, pieces: Iterable[Any], where: str) -> None:
    """Write buffers to a file end to end, whole or not at all.

    They go to a temporary file beside `path`, to the disk, and then take its name: a crash at any
    moment leaves the old file, or none.
    """
    mode = None
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(_regular(os.stat(path), where).st_mode) & 0o777
    directory, _ = os.path.split(path)
    # Of its own length, whatever that of the file's name: file systems limit it.
    name = os.path.join(directory, f".{secrets.token_hex(8)}.part")
    replace_file(name, path, pieces, mode)
    # The file is there, whether or not the directory can be opened and synchronised.
    with suppress(OSError):
        sync_directory(directory or os.curdir)


def replace_file(temporary: str, path: str, pieces: Iterable[Any], mode: int | None = None) -> None:
    """Write bytes to a new file and to the disk, and then give it the name `path`.

    What fails leaves no temporary file behind; a process that is killed may.
    """
    # Not tempfile's: its files are for their owner alone, whatever the umask says.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)  # which the umask may have narrowed
            _write(file, pieces)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _write(file: BinaryIO, pieces: Iterable[Any]) -> None:
    for piece in pieces:
        file.write(piece)


def sync_directory(directory: str) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def noted_file(path: str) -> Iterator[None]:
    """Let tracebacks of bad messages name the file that they were in."""
    try:
        yield
    except WireFormatError as error:
        error.add_note(f"in the file {path!r}; if it was cut short, get it from its writer again")
        raise


def read_file(path: str, where: str, limits: Limits, *, mmap: bool) -> Any:
    """The bytes of a file: a private mapping, writes to which never reach it, or a bytearray.

    Raises:
        ArgumentError: It is not a regular file.
        WireFormatError: It holds no blob, is larger than a blob may be, or was shortened while it
            was read.
    """
    # Looked at before it is opened, which a device may take for a command, and opened without
    # waiting, in case it has become a pipe since.
    _regular(os.stat(path), where)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        size = _regular(os.fstat(file.fileno()), where).st_size
        # Before there is memory for the rest, of which anyone can claim any amount.
        start = file.read(min(size, PREAMBLE.size))
        header = read_preamble(_flat(start))
        if header > limits.header:
            raise exceeded("header", limits.header, header, "bytes", "preamble")
        # Between its header and its frames a blob has less than 64 bytes each of padding.
        if size > limits.bytes + ALIGNMENT * (limits.objects + 1):
            raise exceeded("bytes", limits.bytes, size, "bytes of header and frames", "file")
        if mmap:
            try:
                return mmap_module.mmap(file.fileno(), size, access=mmap_module.ACCESS_COPY)
            except ValueError as error:  # the file has become smaller
                raise _shortened(size, os.fstat(file.fileno()).st_size) from error
        data = bytearray(size)
        data[: len(start)] = start
        found = len(start) + file.readinto(memoryview(data)[len(start) :])
        if found != size:
            raise _shortened(size, found)
        return data


def _shortened(size: int, found: int) -> WireFormatError:
    return WireFormatError(
        "frame_size",
        "file",
        f"expected {size} bytes, as there were when it was opened, found {found}; it was shortened "
        "while it was read",
    )


# --- where bytes come from ---------------------------------------------------------------------

Fetch: TypeAlias = Callable[[int, int, int], ByteArray]
"""(buffer, offset, size) -> those bytes, aliased or new."""

_NOTHING: ByteArray = np.empty(0, dtype=np.uint8)


class Payload(Protocol):
    """The buffers of a message. The header vouches for every place that is asked for.

    Attributes:
        in_memory: Whether whole buffers can be looked at without a cost.
        frames: The buffers as arrays; None where they are not all in the memory of the host.
    """

    in_memory: bool

    @property
    def frames(self) -> Sequence[ByteArray] | None:
        """See above."""
        ...

    def bytes_at(self, buffer: int, offset: int, size: int, alignment: int) -> Any:
        """`size` bytes, flat, aligned, and writable without harm to anyone.

        An array; or, where the buffer is on a device, a uint8 tensor there.
        """
        ...

    def read(self, buffer: int, offset: int, size: int) -> ByteArray:
        """`size` bytes to look at, as they came."""
        ...


class FramePayload:
    """Frames in memory.

    A read-only frame is copied at the first value in it, once for all of them; with `by_range`
    each value is copied by itself, because few of them may be asked for.
    """

    in_memory = True

    def __init__(self, frames: Sequence[Any], copy: bool | None, *, by_range: bool = False) -> None:
        # Arrays; and flat uint8 tensors, where a frame is on a device.
        self._frames = frames
        self._copy = copy
        self._by_range = by_range
        # Memory that may be kept, and where it begins.
        self._owned: dict[int, tuple[ByteArray, int]] = {}

    @property
    def frames(self) -> Sequence[ByteArray] | None:
        """See `Payload`."""
        on_host = all(type(frame) is np.ndarray for frame in self._frames)
        return self._frames if on_host else None

    def bytes_at(self, buffer: int, offset: int, size: int, alignment: int) -> Any:
        """See `Payload`."""
        known = self._owned.get(buffer)
        if known is None:
            if buffer >= len(self._frames):
                return _NOTHING  # where there is nothing to read there need not be a buffer
            frame = self._frames[buffer]
            if type(frame) is not np.ndarray:
                return frame[offset : offset + size]
            if size == 0:
                return _NOTHING
            if self._copy is not None or not frame.flags.writeable:
                if self._by_range:
                    data = writable(frame[offset : offset + size], self._copy)
                    return copied(data) if address(data) % alignment else data
                frame = writable(frame, self._copy)
            known = self._owned[buffer] = frame, frame.__array_interface__["data"][0]
        data = known[0][offset : offset + size]
        return copied(data) if (known[1] + offset) % alignment else data

    def read(self, buffer: int, offset: int, size: int) -> ByteArray:
        """See `Payload`."""
        if not size:
            return _NOTHING
        frame = self._frames[buffer]
        if type(frame) is not np.ndarray:
            raise WireFormatError(
                "bad_value",
                f"frame {buffer + 1}",
                f"expected bytes on the host, found a frame on {frame.device}, where only cells "
                "of tensors may be",
            )
        data: ByteArray = frame[offset : offset + size]
        return data


class RangePayload:
    """Ranges that are fetched as they are asked for. A read-only range is copied by itself."""

    in_memory = False
    frames = None

    def __init__(self, fetch: Fetch, copy: bool | None) -> None:
        self._fetch = fetch
        self._copy = copy

    def bytes_at(self, buffer: int, offset: int, size: int, alignment: int) -> ByteArray:
        """See `Payload`."""
        data = writable(self.read(buffer, offset, size), self._copy)
        return copied(data) if address(data) % alignment else data

    def read(self, buffer: int, offset: int, size: int) -> ByteArray:
        """See `Payload`."""
        return self._fetch(buffer, offset, size) if size else _NOTHING


def writable(data: ByteArray, copy: bool | None) -> ByteArray:
    """`data`, or a copy if it is read-only (`copy` None) or always (True); never (False)."""
    read_only = not data.flags.writeable
    if copy or (copy is None and read_only):
        data = copied(data)
    elif read_only:
        # numpy is told that it may write this memory: for `copy=False` alone.
        data = borrowed(address(data), len(data), data)
    return data


def copied(data: ByteArray) -> ByteArray:
    """New memory with the same bytes, at an address that suits every dtype."""
    copy: ByteArray = new_block(len(data)).data
    copy[:] = data
    return copy
