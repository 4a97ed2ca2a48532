"""``jagcodec diff``: where two messages first differ."""

from __future__ import annotations

import argparse

from jagcodec.cli.arguments import Commands, add_json, add_message, names
from jagcodec.cli.files import display_name, naming, read_message
from jagcodec.cli.text import json_text


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "diff",
        help="say where two messages first differ: column, row and cell",
        description="Say where the values of two messages first differ. Columns, batch sizes, "
        "dtypes, shapes and lengths of rows are compared first, then cells, bit for bit: a NaN "
        "equals the same NaN, and 0.0 is not -0.0. How messages are stored (narrow, elided, "
        "compressed, with checksums) makes no difference.",
        epilog="Exit status: 0 where they are the same, 1 where they differ, 2 for what cannot be "
        "read.",
    )
    add_message(parser, "left", metavar="A")
    add_message(parser, "right", metavar="B")
    parser.add_argument(
        "--columns", metavar="A,B", type=names, help="names of the only columns to compare"
    )
    add_json(parser)
    parser.set_defaults(run=run, fail=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.describe import open_message
    from jagcodec.batch.difference import difference_of

    if options.left == options.right == "-":
        options.fail("expected standard input once, found it twice")
    opened = []
    for file in (options.left, options.right):
        with naming(file):
            opened.append(open_message(read_message(file), display_name(file)))
    found = difference_of(opened[0], opened[1], options.columns)
    if options.json:
        print(
            json_text({"same": found is None, "first": None if found is None else found.as_dict()})
        )
    elif found is not None:
        print(f"{display_name(options.left)} {display_name(options.right)} differ: {found}")
    return 0 if found is None else 1
