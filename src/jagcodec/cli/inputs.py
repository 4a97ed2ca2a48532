"""What commands share: exit statuses, arguments, text safe to print, and messages in files.

A file named ``-`` is standard input.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from jagcodec.errors import JagcodecError, shown
from jagcodec.wire.spec import BLOB_MAGIC

SUCCESS, DIFFERENCE, FAILURE = 0, 1, 2
"""Exit statuses. `DIFFERENCE` is that of ``diff`` for messages that differ, and of ``doctor`` for a
fault; `FAILURE` is for arguments, files or messages that are wrong.
"""


def whole(text: str) -> int:
    """The type, for `argparse`, of a number of rows or tokens."""
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, found {text!r}")
    return int(text)


_NUMBER = "(-?[0-9]{1,18})"
_ROW, _ROWS = re.compile(_NUMBER), re.compile(f"{_NUMBER}?:{_NUMBER}?(?::{_NUMBER}?)?")


def row_index(text: str) -> int | slice:
    """The number of a row, or a range of rows, as in Python's brackets."""
    if _ROW.fullmatch(text):
        return int(text)
    match = _ROWS.fullmatch(text)
    ends = [int(part) if part else None for part in match.groups()] if match else [0, 0, 0]
    if ends[2] == 0:
        expected = "expected a row N, or rows A:B or A:B:STEP as a slice of Python"
        raise argparse.ArgumentTypeError(f"{expected}, found {text!r}")
    return slice(*ends)


def names(text: str) -> list[str]:
    """Names with commas between them."""
    listed = [name for name in text.split(",") if name]
    if not listed:
        raise argparse.ArgumentTypeError("expected names with commas between them")
    return listed


def add_message(parser: argparse.ArgumentParser, name: str = "file", **more: Any) -> None:
    """Add the argument for a message in a file."""
    text = "a message as dump writes it; - reads standard input"
    parser.add_argument(name, **{"metavar": "FILE", "help": text, **more})


def add_columns(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the option for the only columns to read."""
    text = f"names of the only columns to {verb}"
    parser.add_argument("--columns", metavar="A,B", type=names, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


# --- text --------------------------------------------------------------------------------------


def name_text(name: str) -> str:
    """A name, which a stranger may have chosen, on one line."""
    return shown(name, 32)


def counted(number: int, one: str) -> str:
    """A number with a noun, such as "1 row" or "2 rows"."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def error_line(error: BaseException) -> str:
    """An error as one line for standard error."""
    return f"jagcodec: error: {shown(str(error), 1000)}"


def display_name(file: str) -> str:
    """The name of a file on one line; only what cannot be printed is changed."""
    return "standard input" if file == "-" else shown(file, 4096)  # the longest path on Linux


# --- files -------------------------------------------------------------------------------------


def read_message(file: str) -> Any:
    """The blob in a file, mapped if it can be; ``-`` is standard input."""
    from jagcodec.wire.files import check_end
    from jagcodec.wire.limits import DEFAULT_LIMITS

    data = read_bytes(file, only_blobs=True)
    if not isinstance(data, memoryview):
        check_end(data, len(data), DEFAULT_LIMITS)
    return data


def read_bytes(file: str, *, only_blobs: bool = False) -> Any:
    """The bytes of a file. A blob is mapped if it can be, and is then a view.

    With `only_blobs`, only the start of any other file is read, because it may never end.
    """
    if file == "-":
        return _read_stream(_standard_input(), only_blobs)
    with open(file, "rb") as stream:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        if regular and begins_blob(stream.peek(len(BLOB_MAGIC))):
            from jagcodec.wire.files import read_file
            from jagcodec.wire.limits import DEFAULT_LIMITS

            return memoryview(read_file(file, file, DEFAULT_LIMITS, mmap=True))
        return _read_stream(stream, only_blobs)  # a pipe can be read only once


def begins_blob(data: Any) -> bool:
    """Whether bytes are a message, or the beginning of one."""
    return bytes(data[: len(BLOB_MAGIC)]) == BLOB_MAGIC


def _read_stream(stream: BinaryIO, only_blobs: bool) -> bytes:
    """The bytes of a stream; with `only_blobs`, only the start if they are not a blob."""
    start = stream.read(64)
    return start + stream.read() if begins_blob(start) or not only_blobs else start


def _standard_input() -> BinaryIO:
    if sys.stdin is None:
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer


@contextmanager
def naming(file: str, *functions: str) -> Iterator[None]:
    """Name the file in errors: in place of these functions in their paths, or in front."""
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
