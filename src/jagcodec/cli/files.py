"""Messages in files and on standard input."""

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
    """What a file is called, on one line; only what cannot be printed is changed."""
    return "standard input" if file == "-" else shown(file, 4096)  # the longest path on Linux


def whole_file(file: str) -> bytes:
    """The bytes of a file; ``-`` is standard input."""
    if file == "-":
        return _standard_input().read()
    with open(file, "rb") as stream:
        return stream.read()


def read_message(file: str) -> Any:
    """The blob in a file, mapped if it can be; ``-`` is standard input."""
    import numpy as np

    from jagcodec.wire.files import read_file
    from jagcodec.wire.frames import read_preamble
    from jagcodec.wire.limits import DEFAULT_LIMITS

    if file == "-":
        data = _start_or_all(_standard_input())
    else:
        with open(file, "rb") as stream:
            regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            if regular and stream.peek(len(BLOB_MAGIC)).startswith(BLOB_MAGIC):
                return memoryview(read_file(file, file, DEFAULT_LIMITS, mmap=True))
            data = _start_or_all(stream)  # of a pipe, which can be read but once
    read_preamble(np.frombuffer(data, dtype=np.uint8))
    return data


def _start_or_all(stream: BinaryIO) -> bytes:
    """A blob; only the start of anything else, which may never end."""
    start = stream.read(64)
    return start + stream.read() if start.startswith(BLOB_MAGIC) else start


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer


@contextmanager
def naming(file: str, *functions: str) -> Iterator[None]:
    """Put the name of a file in front of errors, or where their paths name these functions."""
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
