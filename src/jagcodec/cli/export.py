"""``jagcodec export``: a message as Parquet, Arrow or JSON lines, for other tools."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from typing import Any

from jagcodec.cli.arguments import Commands, add_columns, add_message
from jagcodec.cli.files import display_name, naming, read_message
from jagcodec.cli.text import counted, name_text
from jagcodec.errors import ArgumentError, brief, shown

ENDINGS = (".parquet", ".arrow", ".jsonl")


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="write a message as .parquet, .arrow or .jsonl, for pandas, polars, duckdb",
        description="Write the columns of a batch as .parquet, .arrow (IPC) or .jsonl, by the "
        "ending of OUT. Jagged columns become lists, one per row. The file is written whole or not "
        "at all; what is not in it is named on standard error. There is no way back.",
    )
    add_message(parser)
    parser.add_argument("target", metavar="OUT", help="the file to write; an old one is replaced")
    add_columns(parser, "export")
    parser.set_defaults(run=run, fail=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.describe import names_of_meta
    from jagcodec.wire.files import file_path, write_whole
    from jagcodec.wire.wire_batch import open_whole

    ending = os.path.splitext(options.target)[1].lower()
    if ending not in ENDINGS:
        found = display_name(options.target)
        options.fail(f"expected OUT with an ending of {', '.join(ENDINGS)}, found {found}")
    with naming(options.file, "to_arrow(batch)"):
        batch = open_whole(read_message(options.file), display_name(options.file))
        left = names_of_meta(lambda: batch.meta)
        if options.columns is not None:
            batch = batch.select(options.columns)
        data = _json_lines(batch) if ending == ".jsonl" else _arrow_file(batch, ending)
    where = file_path(options.target, "OUT", "a file to write")
    with naming(options.target):
        write_whole(where, [data], where)
    rows, columns = counted(len(batch), "row"), counted(len(batch.fields), "column")
    print(f"{display_name(options.target)}: {rows}, {columns}")
    if left != ():
        unknown = "meta of a type that is not known here"
        listed = unknown if left is None else ", ".join(map(name_text, left))
        reason = "because it belongs to the whole batch"
        print(f"jagcodec: left out, {reason}: {listed}", file=sys.stderr)
    return 0


def _arrow_file(batch: Any, ending: str) -> bytes:
    from jagcodec.integrations.arrow import to_arrow

    table, stream = to_arrow(batch), io.BytesIO()  # which names the extra if it is missing
    import pyarrow.ipc
    import pyarrow.parquet

    if ending == ".parquet":
        pyarrow.parquet.write_table(table, stream)
    else:
        with pyarrow.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
    return stream.getvalue()


def _json_lines(batch: Any) -> bytes:
    """One JSON object per row."""
    from jagcodec.batch.to_rows import to_rows

    columns = {name: [row[name] for row in to_rows(batch, [name], "list")] for name in batch.fields}
    return "".join(_line(columns, row) for row in range(len(batch))).encode()


def _line(columns: dict[str, list[Any]], row: int) -> str:
    cells = []
    for name, values in columns.items():
        try:
            cells.append(f"{json.dumps(name)}: {json.dumps(values[row])}")
        except (TypeError, ValueError, RecursionError) as error:
            detail = (
                f"expected a value that JSON has, found {shown(str(error), 120)}; leave the column "
                "out with --columns"
            )
            raise ArgumentError("bad_type", f"column {brief(name)}, row {row}", detail) from error
    return f"{{{', '.join(cells)}}}\n"
