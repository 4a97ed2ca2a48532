"""The command line: ``jagcodec tax``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jagcodec._version import __version__
from jagcodec.batch.padding_tax import padding_tax
from jagcodec.data import rollout_table
from jagcodec.errors import ArgumentTypeError, JagcodecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit status: 0, 2 for arguments or files that are wrong, or 130 if interrupted.
        For arguments that do not parse, `SystemExit` is raised with 2.
    """
    options = _parser().parse_args(argv)
    try:
        _tax(options)
    except (JagcodecError, OSError) as error:
        print(f"jagcodec: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jagcodec: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jagcodec",
        description="The jagged wire codec for reinforcement-learning rollout batches.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    tax = commands.add_parser(
        "tax",
        help="say what padding costs for given lengths",
        description="Say what one per-token column costs as a rectangle, and on this wire.",
    )
    add_lengths_options(tax)
    tax.add_argument(
        "--bytes-per-token",
        metavar="B",
        type=positive,
        default=8,
        help="size of one token's cell; by default 8, as of int64 ids",
    )
    return parser


def add_lengths_options(parser: argparse.ArgumentParser) -> None:
    """Let a command ask for the lengths of rows, and for the width that they are padded to."""
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        type=Path,
        help="a JSON list of tokens per row; by default, real GSM8K rollouts",
    )
    parser.add_argument(
        "--width",
        metavar="S",
        type=positive,
        help="width of the rectangle; by default, the longest row",
    )


def positive(text: str) -> int:
    """A number above 0, as `argparse` wants its types."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def read_lengths(path: Path | None) -> list[int]:
    """The lengths in a file; without one, those of `rollout_table`, whose source is printed.

    Raises:
        ArgumentTypeError: The file is not a JSON list of whole numbers.
        OSError: The file cannot be read.
    """
    if path is None:
        table = rollout_table()
        print(f"lengths: {table.source}; tokens by {table.tokenizer}")
        return [int(length) for length in table.lengths]
    try:
        lengths = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentTypeError(
            "bad_type", str(path), f"expected a JSON list of whole numbers; {error}"
        ) from error
    if not isinstance(lengths, list):
        raise ArgumentTypeError(
            "bad_type",
            str(path),
            f"expected a JSON list of whole numbers, found {json.dumps(lengths):.40}",
        )
    for row, length in enumerate(lengths):
        if type(length) is not int:
            raise ArgumentTypeError(
                "bad_type",
                f"{path}, row {row}",
                f"expected a whole number of tokens, found {json.dumps(length):.40}",
            )
    return lengths


def _tax(options: argparse.Namespace) -> None:
    lengths = read_lengths(options.lengths)
    print(padding_tax(lengths, padded_width=options.width, bytes_per_token=options.bytes_per_token))
