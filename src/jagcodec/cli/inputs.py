"""What commands share: arguments, messages in files and on standard input, and words."""

from __future__ import annotations

import argparse
import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from jagcodec.errors import JagcodecError, shown
from jagcodec.wire.spec import BLOB_MAGIC


def whole(text: str) -> int:
    """A number of rows or tokens, as `argparse` wants its types."""
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, found {text!r}")
    return int(text)


def names(text: str) -> list[str]:
    """Names with commas between them."""
    listed = [name for name in text.split(",") if name]
    if not listed:
        raise argparse.ArgumentTypeError("expected names with commas between them")
    return listed


def add_message(parser: argparse.ArgumentParser, name: str = "file", **more: Any) -> None:
    text = "a message as dump writes it; - reads standard input"
    parser.add_argument(name, **{"metavar": "FILE", "help": text, **more})


def add_columns(parser: argparse.ArgumentParser, verb: str) -> None:
    text = f"names of the only columns to {verb}"
    parser.add_argument("--columns", metavar="A,B", type=names, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


# --- files -------------------------------------------------------------------------------------


def name_text(name: str) -> str:
    """A name that a stranger may have chosen, on one line."""
    return shown(name, 32)


def counted(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def error_line(error: BaseException) -> str:
    return f"jagcodec: error: {shown(str(error), 1000)}"


def display_name(file: str) -> str:
    """The name of a file on one line; only what cannot be printed is changed."""
    return "standard input" if file == "-" else shown(file, 4096)  # the longest path on Linux


def whole_file(file: str) -> bytes:
    """The bytes of a file; ``-`` is standard input."""
    if file == "-":
        return _standard_input().read()
    with open(file, "rb") as stream:
        return stream.read()


def read_message(file: str) -> Any:
    """The blob in a file, mapped if it can be; ``-`` is standard input."""
    from jagcodec.wire.files import check_end, read_file
    from jagcodec.wire.limits import DEFAULT_LIMITS

    if file == "-":
        data = _start_or_all(_standard_input())
    else:
        with open(file, "rb") as stream:
            regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            if regular and stream.peek(len(BLOB_MAGIC)).startswith(BLOB_MAGIC):
                return memoryview(read_file(file, file, DEFAULT_LIMITS, mmap=True))
            data = _start_or_all(stream)  # of a pipe, which can be read but once
    check_end(data, len(data), DEFAULT_LIMITS)
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
