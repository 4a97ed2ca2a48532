"""``jagcodec verify``: whether messages are sound."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jagcodec.cli.arguments import Commands, add_json, add_message
from jagcodec.cli.files import display_name, naming, read_message
from jagcodec.cli.text import counted, error_line, json_text
from jagcodec.errors import JagcodecError


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify",
        help="check whether messages are sound",
        description="Read messages whole, as decode does, with their checksums: header, offsets, "
        "blocks, objects. Values of types that are not registered here are read up to these.",
        epilog="Exit status: 0 where all are sound, 2 where one is not, or cannot be read.",
    )
    add_message(parser, "files", nargs="+")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.describe import check_message, has_checksums

    reports: list[dict[str, Any]] = []
    for file in options.files:
        name = display_name(file)
        report: dict[str, Any] = {"file": name, "sound": False}
        reports.append(report)
        try:
            with naming(file, "check_message(source)"):
                found, unknown = check_message(read_message(file))
        except (JagcodecError, OSError) as error:
            print(error_line(error), file=sys.stderr)
            report |= {"reason": getattr(error, "reason", "unreadable"), "why": str(error)}
            continue
        checksums = has_checksums(found.message)
        report |= {"sound": True, "bytes": found.bytes, "checksums": checksums, "not_read": unknown}
        if not options.json:
            text = "checksums verified" if checksums else "no checksums"
            print(f"{name}: sound, {found.bytes:,} B, {text}")
            for why in unknown.values():
                print(f"  not read: {why}")
            if unknown:
                print(f"  {counted(len(unknown), 'value')} of types that are not known here")
    if options.json:
        print(json_text(reports))
    return 0 if all(report["sound"] for report in reports) else 2
