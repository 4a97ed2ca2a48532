"""Types of arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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


class TokenColumn(NamedTuple):
    """A per-token column: its name, and what its dtype is called."""

    name: str
    dtype: str


SHORT_DTYPES = {
    "bf16": "bfloat16",
    **{f"f{8 * size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"{code}{8 * size}": f"{kind}{8 * size}" for code, kind in (("i", "int"), ("u", "uint"))
       for size in (1, 2, 4, 8)},
}  # fmt: skip
"""Short names of dtypes, as they are said."""


def token_columns(text: str) -> list[TokenColumn]:
    """Columns as ``ids:int64,logprobs:bf16``."""
    from jagcodec.wire.spec import TORCH_DTYPES

    found: dict[str, TokenColumn] = {}
    for part in text.split(","):
        name, _, dtype = part.rpartition(":")
        dtype = SHORT_DTYPES.get(dtype, dtype)
        if not name or dtype not in TORCH_DTYPES or name in found:
            raise argparse.ArgumentTypeError(
                f"expected NAME:DTYPE,... with each name once, such as ids:int64,logprobs:bf16, "
                f"found {part!r}"
            )
        found[name] = TokenColumn(name, dtype)
    return list(found.values())


def add_message(parser: argparse.ArgumentParser, name: str = "file", **more: Any) -> None:
    """Let a command take a message."""
    metavar = more.pop("metavar", "FILE")
    parser.add_argument(
        name, metavar=metavar, help="a message as dump writes it; - reads standard input", **more
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Let a command print JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Let a command draw a chart."""
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw a chart, as PNG, SVG or PDF by the name of the file; takes matplotlib",
    )
