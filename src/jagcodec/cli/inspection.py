"""``jagcodec inspect``: the columns of a message, its rows and its bytes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jagcodec.cli.arguments import Commands, add_json, names, row_number
from jagcodec.cli.files import display_name, naming, read_message
from jagcodec.cli.text import (
    cells_json,
    cells_text,
    counted,
    error_line,
    json_text,
    name_text,
    size_text,
    table,
)
from jagcodec.errors import JagcodecError, WireFormatError

if TYPE_CHECKING:
    from jagcodec.batch.describe import ColumnDescription, Entry, MessageDescription, RowLengths
    from jagcodec.batch.tax import PaddingTax
    from jagcodec.wire.message import Message


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "inspect",
        help="show what a message holds: columns, rows, bytes",
        description="Say what a message is made of: which options of encode would save bytes, the "
        "columns by size, and how long rows are. Checksums are compared. A type that is not "
        "registered here is named, and the rest described. Of a record, list the steps.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a message as dump writes it, or the directory of a record; - reads standard input",
    )
    parser.add_argument(
        "--row", metavar="N", type=row_number, help="print one row of a batch instead"
    )
    parser.add_argument("--columns", metavar="A,B", type=names, help="print these columns only")
    parser.add_argument("--all", action="store_true", help="with --row, print every cell")
    parser.add_argument(
        "--no-taxes", action="store_true", help="read no cells: do not measure options of encode"
    )
    add_json(parser)
    parser.set_defaults(run=run, fail=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.describe import chosen_entries, description_of, open_source

    if options.all and options.row is None:
        options.fail("expected --row N with --all")
    if os.path.isdir(options.file):
        return _record(options)
    name = display_name(options.file)
    with naming(options.file, "WireBatch.rows(index)"):
        source = read_message(options.file)
        found = open_source(source, name)
        entries = found.entries
        if options.columns is not None:
            entries = chosen_entries(found, options.columns)
        if options.row is not None:
            cells = dict(_row_of(found.message, entries, options.row))
            _print_row(options.row, cells, options.json, options.all)
            return 0
        description = description_of(found)
    tax, unknown = None, None
    if not options.no_taxes and found.batch and description.rows is not None:
        tax, unknown = _tax(source)
    if options.columns is not None:
        wanted = {entry.name for entry in entries}
        chosen = tuple(c for c in description.columns if c.name in wanted)
        description = replace(description, columns=chosen)
    if options.json:
        document = {"file": name, **description.as_dict(), "tax_unknown": unknown}
        print(json_text({**document, "tax": None if tax is None else tax.as_dict()}))
    else:
        print("\n".join(_lines(name, description, tax, unknown, options.columns is None)))
    return 0


def _record(options: argparse.Namespace) -> int:
    """The steps of a record, and the file of each; steps that cannot be read on standard error."""
    from jagcodec.record import RecordReader
    from jagcodec.wire.wire_batch import open_wire

    if options.row is not None or options.columns is not None:
        options.fail("expected the file of a step with --row and --columns, found a directory")
    reader = RecordReader(options.file)
    steps: list[dict[str, Any]] = []
    status = 0
    for step in reader.steps:
        file = reader.file(step)
        found: dict[str, Any] = {"step": step, "rows": None, "bytes": None, "file": file}
        try:
            found["bytes"] = os.path.getsize(file)
            with naming(file):
                found["rows"] = len(open_wire(file))
        except (JagcodecError, OSError) as error:
            status = 2
            found["error"] = str(error)
            print(error_line(error), file=sys.stderr)
        steps.append(found)
    name = display_name(options.file)
    if options.json:
        print(json_text({"record": name, "steps": steps}))
        return status
    print(f"{name}: a record of {counted(len(steps), 'step')}")
    rows = [
        (str(x["step"]), *map(_number, (x["rows"], x["bytes"])), display_name(x["file"]))
        for x in steps
    ]
    print("\n".join(table(("step", "rows", "bytes", "file"), rows, right=(0, 1, 2))))
    return status


def _number(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _tax(source: Any) -> tuple[PaddingTax | None, str | None]:
    """What options would save; or why this process cannot measure it."""
    from jagcodec.batch.tax import padding_tax

    try:
        return padding_tax(source, options=True), None
    except JagcodecError as error:
        return None, str(error)


def _row_of(message: Message, entries: Iterable[Entry], row: int) -> Iterator[tuple[str, Any]]:
    """The name and the value of each column in one row; or the error of an unknown type."""
    from jagcodec.batch.describe import UNKNOWN, in_entry
    from jagcodec.batch.to_rows import to_rows
    from jagcodec.wire.wire_batch import batch_of_message

    whole = batch_of_message(message).rows([row])
    for entry in entries:
        *above, name = entry.keys or (entry.name,)
        try:
            batch = whole
            for key in above:
                batch = batch.leaf(key)
            yield entry.name, to_rows(batch, [name])[0][name]
        except WireFormatError as error:
            if error.reason not in UNKNOWN:
                raise in_entry(entry, error) from error
            yield entry.name, error


def _print_row(row: int, cells: dict[str, Any], as_json: bool, whole: bool) -> None:
    if as_json:
        columns = {
            name: {"unknown": str(value)}
            if isinstance(value, WireFormatError)
            else cells_json(value)
            for name, value in cells.items()
        }
        print(json_text({"row": row, "columns": columns}))
        return
    print(f"row {row}")
    width = max((len(name_text(name)) for name in cells), default=0)
    for name, value in cells.items():
        unknown = isinstance(value, WireFormatError)
        text = f"unknown: {value}" if unknown else cells_text(value, whole)
        print(f"{name_text(name):<{width}}  {text}")


def _lines(
    name: str,
    found: MessageDescription,
    tax: PaddingTax | None,
    unknown: str | None,
    whole: bool,
) -> list[str]:
    what = name_text(found.value)
    if found.rows is not None:
        what += f" of {counted(found.rows, 'row')}"
    stored = [word for word in ("narrow", "elide") if getattr(found, word)]
    stored += [found.compress] if found.compress else []
    lines = [
        f"{name}: {what}, {size_text(found.bytes)} in {counted(found.frames, 'frame')}"
        + (f", with {', '.join(stored)}" if stored else "")
        + ("; checksums verified" if found.checksum else "; no checksums")
    ]
    if found.compress:
        lines[0] += f"; {size_text(found.plain_bytes)} before {found.compress}"
    if found.behind:
        lines.append(f"{found.behind:,} B past its end, which no reader uses")
    if tax is not None:
        lines += _tax_lines(tax, stored)
    elif unknown is not None:
        lines.append(f"what options would save is unknown: {unknown}")
    columns = sorted(found.columns, key=lambda column: -column.bytes)
    marked = any(column.stored for column in columns)
    head = ("column", "kind", "dtype", "shape", *(("stored",) if marked else ()), "bytes", "share")
    rows = [_row(column, marked) for column in columns]
    total = found.plain_bytes or 1
    if whole:
        share = f"{found.overhead / total:.1%}"
        blank = ("",) * (len(head) - 3)
        rows.append(("header and offsets", *blank, f"{found.overhead:,}", share))
    lines += table(head, rows, right=(len(head) - 2, len(head) - 1))
    if found.meta is None:
        lines.append("meta: of a type that is not known here")
    elif found.meta:
        lines.append(f"meta: {', '.join(map(name_text, found.meta))}")
    shown_rows = {column.rows for column in columns}
    lines += [_lengths(rows) for i, rows in enumerate(found.rows_of) if i in shown_rows]
    return lines


def _row(column: ColumnDescription, marked: bool) -> tuple[str, ...]:
    shape = ""
    if column.shape is not None:
        shape = f"[{', '.join('*' if dim is None else str(dim) for dim in column.shape)}]"
    return (
        *(name_text(column.name), name_text(column.kind), column.dtype or "", shape),
        *((column.stored,) if marked else ()),
        *(f"{column.bytes:,}", f"{column.share:.1%}"),
    )


def _lengths(rows: RowLengths) -> str:
    numbers = rows.as_dict()
    named = ", ".join(map(name_text, rows.columns[:6]))
    named += f" and {len(rows.columns) - 6} more" if len(rows.columns) > 6 else ""
    if not numbers["rows"]:
        return f"rows of {named}: none"
    return (
        f"rows of {named}: {numbers['min']:,} to {numbers['max']:,} tokens, "
        f"mean {numbers['mean']:,.1f}, median {numbers['median']:,.1f}, "
        f"{numbers['tokens']:,} in all"
    )


def _tax_lines(tax: PaddingTax, stored: list[str]) -> list[str]:
    used = [f"{word}=True" for word in stored if f"{word}=True" in tax.advice]
    lines = [tax.advice + (f" This message has {', '.join(used)}." if used else "")]
    padded = tax.total.padded_bytes
    if padded and tax.fill < 1:
        fill = f"{tax.fill:.1%} of the padded cells are tokens"
        lines.append(f"As rectangles the columns take {size_text(padded)}: {fill}.")
    return lines
