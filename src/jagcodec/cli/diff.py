"""``jagcodec diff``: where two messages differ."""

from __future__ import annotations

import argparse
from itertools import islice

from jagcodec.cli.arguments import Commands, add_columns, add_json, add_message
from jagcodec.cli.files import display_name, naming, read_message
from jagcodec.cli.text import json_text


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "diff",
        help="show where two messages differ: column, row and cell",
        description="Show where the values of two messages first differ. Columns, batch sizes, "
        "dtypes, shapes and lengths of rows are compared first, then cells, bit for bit: a NaN "
        "equals the same NaN, and 0.0 is not -0.0. How messages are stored (narrow, elided, "
        "compressed, with checksums) makes no difference.",
        epilog="Exit status: 0 where they are the same, 1 where they differ, 2 for what cannot be "
        "read.",
    )
    add_message(parser, "left", metavar="A")
    add_message(parser, "right", metavar="B")
    add_columns(parser, "compare")
    parser.add_argument(
        "--all", action="store_true", help="the first difference of every column, not of the first"
    )
    add_json(parser)
    parser.set_defaults(run=run, fail=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.describe import differences, read_whole

    if options.left == options.right == "-":
        options.fail("expected standard input once, found it twice")
    read = []
    for file in (options.left, options.right):
        with naming(file, "WireBatch.select"):
            read.append(read_whole(read_message(file), display_name(file), options.columns))
    found = list(islice(differences(*read), None if options.all else 1))
    if options.json:
        print(json_text({"same": not found, "differences": [vars(each) for each in found]}))
    for each in [] if options.json else found:
        print(f"{display_name(options.left)} {display_name(options.right)} differ: {each}")
    return 1 if found else 0
