"""Files, written whole or not at all, and opened without a wait."""

from __future__ import annotations

import mmap as mmap_module
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from jagcodec.errors import ArgumentError, ArgumentTypeError, WireFormatError, brief
from jagcodec.wire.checks import fail
from jagcodec.wire.frames import PREAMBLE, blob_pieces, frame_bounds, read_preamble
from jagcodec.wire.header import read_header
from jagcodec.wire.limits import Limits, check_blob_size, exceeded


def file_path(path: Any, where: str, remedy: str) -> str:
    """The path of a file, which need not exist. Refuses a descriptor: `open` would close it."""
    expected = f"expected a str or os.PathLike, found {type(path).__name__}; {remedy}"
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError("bad_type", where, expected)
    try:
        name = os.fsdecode(path)
        os.fsencode(name)
    except TypeError as error:  # `__fspath__` returned neither text nor bytes
        raise ArgumentTypeError("bad_type", where, expected) from error
    except UnicodeError as error:
        detail = f"expected a path that the file system can encode, found {brief(path)}"
        raise ArgumentError("bad_option", where, detail) from error
    if "\0" in name:
        detail = f"expected a path without NUL, found {brief(name)}"
        raise ArgumentError("bad_option", where, detail)
    return name


def _regular(status: os.stat_result, where: str) -> os.stat_result:
    """Refuse what is not a regular file: opening it could wait, and reading it never end."""
    if not stat.S_ISREG(status.st_mode):
        found = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise ArgumentError("bad_option", where, f"expected a regular file, found {found}")
    return status


def write_file(path: str, frames: Sequence[Any], where: str) -> None:
    """Write frames as a blob to a file, whole or not at all."""
    write_whole(path, blob_pieces([memoryview(frame) for frame in frames]), where)


def write_whole(path: str, pieces: Iterable[Any], where: str) -> None:
    """Write buffers to a file end to end, whole or not at all."""
    # Write a temporary file next to `path`, wait until it is on the disk, then rename it: a crash
    # at any moment leaves the old file, or no file. A killed process may leave the temporary file.
    mode = None
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(_regular(os.stat(path), where).st_mode) & 0o777
    directory, _ = os.path.split(path)
    # Give it a short name: file systems limit the length.
    temporary = os.path.join(directory, f".{secrets.token_hex(8)}.part")
    # Do not use `tempfile`: its files are for their owner alone, whatever the umask.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o666 if mode is None else mode)
    except OSError as error:
        error.filename = path  # name the file that the caller knows
        raise
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)  # the umask may have removed permissions
            file.writelines(pieces)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    # The file exists, even if the directory cannot be synchronised.
    with suppress(OSError):
        opened = os.open(directory or os.curdir, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextmanager
def noted_file(path: str) -> Iterator[None]:
    """Name the file in tracebacks of bad messages."""
    try:
        yield
    except WireFormatError as error:
        note_file(error, path)
        raise


def note_file(error: WireFormatError, path: str) -> None:
    """Name the file in the traceback of an error."""
    cut = "; if it was cut short, fetch it again" if error.reason in _OF_CUT_FILES else ""
    error.add_note(f"in the file {path!r}{cut}")


_OF_CUT_FILES = ("foreign", "bad_header", "frame_size")


def read_file(path: str, where: str, limits: Limits, *, mmap: bool) -> Any:
    """The bytes of a file: a bytearray, or with `mmap` a private mapping.

    Writes to a private mapping never reach the file.
    """
    # Check the file type before opening: a device may treat open() as a command. Open with
    # O_NONBLOCK: if the path has since become a pipe, open() must not wait for a writer.
    _regular(os.stat(path), where)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        size = _regular(os.fstat(file.fileno()), where).st_size
        # Check the header before memory is allocated for the rest: a stranger may have chosen the
        # size.
        start = file.read(min(size, PREAMBLE.size))
        header = read_preamble(np.frombuffer(start, np.uint8))
        if header > limits.header:
            raise exceeded("header", limits.header, header, "bytes", "preamble")
        check_blob_size(size, limits, "file")
        start += file.read(min(header, size - len(start)))
        check_end(start, size, limits)
        if mmap:
            with suppress(ValueError):  # raised if the file has become smaller since
                return mmap_module.mmap(file.fileno(), size, access=mmap_module.ACCESS_COPY)
            found = os.fstat(file.fileno()).st_size
        else:
            data = bytearray(size)
            data[: len(start)] = start
            found = len(start) + file.readinto(memoryview(data)[len(start) :])
            if found == size:
                return data
    detail = f"expected {size} bytes, found {found}; it was shortened while it was read"
    raise fail("frame_size", detail, path="file")


def check_end(start: bytes, size: int, limits: Limits) -> None:
    """Refuse a file of `size` bytes that goes on after its message; `start` holds the header.

    A buffer may go on, because shared memory comes in pages. But a program that writes two messages
    to one file would lose the second without this error.
    """
    header = read_preamble(np.frombuffer(start, np.uint8))
    data = start[PREAMBLE.size : PREAMBLE.size + header]
    if len(data) < header:
        return  # The file is cut short, which is found when the message is opened.
    end = frame_bounds(header, read_header(data, limits).sent_sizes)[-1]
    if size > end:
        detail = (
            f"expected a file of one message, {end} bytes, found {size}; write each message to its "
            "own file (dump, RecordWriter), or read one of several by ranges: pass a function "
            "(offset, size) to open_wire"
        )
        raise fail("frame_count", detail, path="file")
