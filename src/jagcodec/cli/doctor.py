"""``jagcodec doctor``: what is installed here, and what copies rows."""

from __future__ import annotations

import argparse

from jagcodec.cli.arguments import Commands, add_json
from jagcodec.cli.text import json_text


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="show what is installed here, and what copies rows",
        description="Say which versions are installed, which kernel copies rows and with how many "
        "threads, and which frameworks are here.",
        epilog="Exit status: 0; 1 where the library cannot be imported.",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.doctor import doctor, report_lines

    report = doctor()
    print(json_text(report) if options.json else "\n".join(report_lines(report)))
    return 0 if report["problem"] is None else 1
