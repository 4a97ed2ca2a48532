"""Arguments that several commands have, and their types."""

from __future__ import annotations

import argparse
from typing import Any, TypeAlias

Commands: TypeAlias = Any
"""What `add_subparsers` returns, whose class is private."""


def whole(text: str) -> int:
    """A number of rows or tokens, as `argparse` wants its types."""
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
    text = "a message as dump writes it; - reads standard input"
    parser.add_argument(name, **{"metavar": "FILE", "help": text, **more})


def add_columns(parser: argparse.ArgumentParser, verb: str) -> None:
    """Let a command choose columns."""
    text = f"names of the only columns to {verb}"
    parser.add_argument("--columns", metavar="A,B", type=names, help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Let a command print JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
