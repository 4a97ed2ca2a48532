"""Messages in files and on standard input, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from jagcodec.errors import JagcodecError, shown
from jagcodec.wire.spec import BLOB_MAGIC


def display_name(file: str) -> str:
    """What a file is called, on one line."""
    return "standard input" if file == "-" else shown(file, _LONGEST_FILE)


_LONGEST_FILE = 4096
"""Bytes of a path on Linux, so that only what cannot be printed is changed."""


def head_and_rest(file: str, *, only_message: bool = False) -> tuple[bytes, bool]:
    """The bytes of a file; or only its first, and True, of a message that can be mapped.

    With `only_message` little more is read of what is no message, which may never end.

    Raises:
        OSError: It cannot be read.
    """
    if file == "-":
        if sys.stdin is None:
            raise OSError(errno.EBADF, "standard input is closed")
        return _read(sys.stdin.buffer, only_message), False
    with open(file, "rb") as stream:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        if regular and stream.peek(len(BLOB_MAGIC)).startswith(BLOB_MAGIC):
            return BLOB_MAGIC, True
        # A pipe can be read but once.
        return _read(stream, only_message), False


def _read(stream: BinaryIO, only_message: bool) -> bytes:
    start = stream.read(64)
    if only_message and not start.startswith(BLOB_MAGIC):
        return start
    return start + stream.read()


def read_message(file: str) -> Any:
    """The blob in a file, mapped if it can be; ``-`` is standard input.

    Raises:
        WireFormatError: It is no blob, or larger than one may be.
        OSError: It cannot be read.
    """
    import numpy as np

    from jagcodec.wire.files import read_file
    from jagcodec.wire.frames import read_preamble
    from jagcodec.wire.limits import DEFAULT_LIMITS

    data, mapped = head_and_rest(file, only_message=True)
    if mapped:
        return memoryview(read_file(file, file, DEFAULT_LIMITS, mmap=True))
    read_preamble(np.frombuffer(data, dtype=np.uint8))
    return data


@contextmanager
def naming(file: str, *functions: str) -> Iterator[None]:
    """Put the name of a file in front of what errors say of it.

    Args:
        file: The name.
        functions: Paths that stand for the file in errors, such as ``tax_report(source)``.
    """
    try:
        yield
    except JagcodecError as error:
        name = display_name(file)
        path = error.path
        for function in functions:
            path = path.replace(function, name)
        if name not in path:
            path = f"{name}, {path}"
        raise type(error)(error.reason, path, error.detail) from error
