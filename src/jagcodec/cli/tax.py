"""``jagcodec tax``: what padding costs rows of given lengths."""

from __future__ import annotations

import argparse
import json

from jagcodec.cli.arguments import Commands, add_json, whole
from jagcodec.cli.files import display_name, naming, whole_file
from jagcodec.cli.text import json_text
from jagcodec.errors import ArgumentTypeError, brief
from jagcodec.wire.spec import BLOB_MAGIC


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tax",
        help="estimate what padding costs rows of given lengths",
        description="Estimate what padding costs a column of int64 tokens whose rows have these "
        "lengths. For a message, use inspect.",
    )
    parser.add_argument(
        "file",
        metavar="LENGTHS",
        help="tokens per row, as a JSON list; - reads standard input",
    )
    parser.add_argument(
        "--width",
        metavar="S",
        type=whole,
        help="width of the rectangle; by default, the longest row",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.tax import padding_tax

    with naming(options.file, "padding_tax(source)"):
        lengths = _lengths_in(whole_file(options.file), display_name(options.file))
        report = padding_tax(lengths, padded_width=options.width)
    print(json_text(report.as_dict()) if options.json else report)
    return 0


def _lengths_in(data: bytes, name: str) -> list[int]:
    """A JSON list of whole numbers; `name` is that of the file."""
    if data.startswith(BLOB_MAGIC):
        detail = "expected lengths, found a message; use jagcodec inspect"
        raise ArgumentTypeError("bad_type", name, detail)
    expected = "expected a JSON list of whole numbers"
    try:
        lengths = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArgumentTypeError("bad_type", name, f"{expected}; {error}") from error
    if type(lengths) is not list:
        raise ArgumentTypeError("bad_type", name, f"{expected}, found {brief(lengths)}")
    for row, length in enumerate(lengths):
        if type(length) is not int:
            detail = f"expected a whole number of tokens, found {brief(length)}"
            raise ArgumentTypeError("bad_type", f"{name}, row {row}", detail)
    return lengths
