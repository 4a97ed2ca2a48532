"""Types of arguments that several commands have."""

from __future__ import annotations

import argparse
from typing import Any, TypeAlias

Commands: TypeAlias = Any
"""What `add_subparsers` returns, whose class is private."""


def positive(text: str) -> int:
    """A number above 0, as `argparse` wants its types."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def row_number(text: str) -> int:
    """The number of a row, from 0 on."""
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, found {text!r}")
    return int(text)


def names(text: str) -> list[str]:
    """Names with commas between them."""
    listed = [name for name in text.split(",") if name]
    if not listed:
        raise argparse.ArgumentTypeError("expected names with commas between them, found none")
    return listed


def add_message(parser: argparse.ArgumentParser, name: str = "file", **more: Any) -> None:
    """Let a command accept a message."""
    metavar = more.pop("metavar", "FILE")
    parser.add_argument(
        name, metavar=metavar, help="a message as dump writes it; - reads standard input", **more
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Let a command print JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
