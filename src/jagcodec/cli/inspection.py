"""``jagcodec inspect``: the columns of a message, its rows and its bytes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jagcodec.cli.arguments import Commands, add_json, add_message, names, row_number
from jagcodec.cli.files import display_name, naming, read_message
from jagcodec.cli.text import cells_json, cells_text, counted, json_text, name_text, table
from jagcodec.errors import WireFormatError

if TYPE_CHECKING:
    from jagcodec.batch.describe import ColumnDescription, Entry, MessageDescription, RowLengths
    from jagcodec.batch.tax_report import TaxReport
    from jagcodec.wire.message import Message


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "inspect",
        help="say what a message is made of: columns, rows, bytes",
        description="Say what a message is made of: the schema, bytes and share of each column, "
        "how long rows are, and what padding, repeats and wide cells cost. Checksums are compared. "
        "A type that is not registered here is named, and the rest described.",
    )
    add_message(parser)
    parser.add_argument(
        "--row", metavar="N", type=row_number, help="print one row of a batch instead"
    )
    parser.add_argument(
        "--columns", metavar="A,B", type=names, help="names of the only columns to look at"
    )
    parser.add_argument(
        "--no-taxes",
        action="store_true",
        help="read no cells: taxes are measured by encoding the batch under each option",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.describe import chosen_entries, describe, open_message

    name = display_name(options.file)
    with naming(options.file, "WireBatch.rows(index)"):
        source = read_message(options.file)
        found = open_message(source, name)
        entries = chosen_entries(found, options.columns)
        if options.row is not None:
            cells = dict(_row_of(found.message, entries, options.row))
            _print_row(options.row, cells, options.json)
            return 0
        description = describe(found)
    wanted = None if options.columns is None else {entry.name for entry in entries}
    report, unknown = None, None
    if not options.no_taxes and found.batch and description.rows is not None:
        report, unknown = _taxes(source)
    if options.json:
        document = description.as_dict()
        if wanted is not None:
            for part in ("columns", "beside"):
                document[part] = [c for c in document[part] if c["name"] in wanted]
        document["taxes"] = None if report is None else report.as_dict()
        document["taxes_unknown"] = unknown
        print(json_text({"file": name, **document}))
    else:
        print("\n".join(_lines(name, description, wanted, report, unknown)))
    return 0


def _taxes(source: Any) -> tuple[TaxReport | None, str | None]:
    """What options would save; or why this process cannot say it."""
    from jagcodec.batch.tax_report import tax_report
    from jagcodec.errors import JagcodecError

    try:
        return tax_report(source, compress=None), None
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
            yield entry.name, to_rows(batch, name)[0]
        except WireFormatError as error:
            if error.reason not in UNKNOWN:
                raise in_entry(entry, error) from error
            yield entry.name, error


def _print_row(row: int, cells: dict[str, Any], as_json: bool) -> None:
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
        text = f"unknown: {value}" if unknown else cells_text(value)
        print(f"{name_text(name):<{width}}  {text}")


def _lines(
    name: str,
    found: MessageDescription,
    wanted: set[str] | None,
    report: TaxReport | None,
    unknown: str | None,
) -> list[str]:
    what = name_text(found.value)
    if found.rows is not None:
        what += f" of {counted(found.rows, 'row')}"
    stored = [word for word in ("narrow", "elide") if getattr(found, word)]
    stored += [found.compress] if found.compress else []
    lines = [
        f"{name}: {what}, {found.bytes:,} B in {counted(found.frames, 'frame')}"
        + (f", with {', '.join(stored)}" if stored else "")
        + ("; checksums verified" if found.checksum else "; no checksums")
    ]
    if found.compress:
        lines[0] += f"; {found.plain_bytes:,} B before {found.compress}"
    if found.behind:
        lines.append(f"{found.behind:,} B past its end, which no reader uses")
    columns = [c for c in (*found.columns, *found.beside) if wanted is None or c.name in wanted]
    head = ("column", "kind", "dtype", "shape", "stored", "bytes", "share")
    rows = [_row(column) for column in columns]
    total = found.plain_bytes or 1
    if wanted is None:
        share = f"{found.overhead / total:.1%}"
        rows.append(("header and offsets", "", "", "", "", f"{found.overhead:,}", share))
    lines += table(head, rows, right=(5, 6))
    if found.meta is None:
        lines.append("meta: of a type that is not known here")
    elif found.meta:
        lines.append(f"meta: {', '.join(map(name_text, found.meta))}")
    for rows_of in found.rows_of:
        if wanted is None or wanted.intersection(rows_of.columns):
            lines.append(_lengths(rows_of))
    if report is not None:
        lines += _tax_lines(report)
    elif unknown is not None:
        lines.append(f"taxes: unknown: {unknown}")
    return lines


def _row(column: ColumnDescription) -> tuple[str, ...]:
    shape = ""
    if column.shape is not None:
        shape = f"[{', '.join('*' if dim is None else str(dim) for dim in column.shape)}]"
    return (
        *(name_text(column.name), name_text(column.kind), column.dtype or "", shape),
        *(column.stored, f"{column.bytes:,}", f"{column.share:.1%}"),
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


def _tax_lines(report: TaxReport) -> Sequence[str]:
    def share(tax: int | None, of: int) -> str:
        return "unknown" if tax is None else f"{tax / of if of else 0:.1%}"

    return [
        f"taxes: padding {share(report.padding_bytes, report.padded_bytes)} of "
        f"{report.padded_bytes:,} B as rectangles; of {report.jagged_bytes:,} B without options "
        f"repeats {share(report.repeats_bytes, report.jagged_bytes)}, "
        f"width {share(report.width_bytes, report.jagged_bytes)}",
        report.advice,
    ]
