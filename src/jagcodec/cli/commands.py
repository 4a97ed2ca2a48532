"""The commands ``diff``, ``verify``, ``export``, ``tax`` and ``doctor``.

The function that adds a command's parser stands before the command; ``export`` is last.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from itertools import islice
from typing import Any

from jagcodec.cli.inputs import (
    DIFFERENCE,
    FAILURE,
    SUCCESS,
    add_columns,
    add_json,
    add_message,
    begins_blob,
    counted,
    display_name,
    error_line,
    name_text,
    naming,
    read_bytes,
    read_message,
    whole,
)
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError, brief


def add_commands(parsers: Any) -> None:
    """Add these commands."""
    for add in (_add_diff, _add_verify, _add_export, _add_tax, _add_doctor):
        add(parsers)


def _add_diff(parsers: Any) -> None:
    parser = parsers.add_parser(
        "diff",
        help="show where two messages differ: column, row and cell",
        description="Show where the values of two messages first differ, bit for bit: a NaN equals "
        "the same NaN, and 0.0 is not -0.0. How messages are stored (narrow, elided, compressed, "
        "with checksums) makes no difference.",
    )
    add_message(parser, "left", metavar="A")
    add_message(parser, "right", metavar="B")
    add_columns(parser, "compare")
    text = "show the first difference in every column; by default, stop at the first one"
    parser.add_argument("--all", action="store_true", help=text)
    add_json(parser)
    parser.set_defaults(run=_diff, fail=parser.error)


def _diff(options: argparse.Namespace) -> int:
    """Print where two messages differ; 1 if they do."""
    if options.left == options.right == "-":
        options.fail("expected standard input once, found it twice")
    files = options.left, options.right
    sources, values = [], []
    for file in files:
        with naming(file):
            sources.append(read_message(file))
    from jagcodec.train.describe import differences, read_whole

    for file, source in zip(files, sources, strict=True):
        with naming(file, "WireBatch.select"):
            values.append(read_whole(source, display_name(file), options.columns))
    listed = list(islice(differences(*values), None if options.all else 1))
    if options.json:
        document = {"same": not listed, "differences": [vars(difference) for difference in listed]}
        print(json.dumps(document, indent=2))
    else:
        left, right = map(display_name, files)
        for difference in listed:
            print(f"{left} {right} differ: {difference}")
    return DIFFERENCE if listed else SUCCESS


def _add_verify(parsers: Any) -> None:
    parser = parsers.add_parser(
        "verify",
        help="check whether messages are sound",
        description="Read messages whole, as decode does, with their checksums: header, offsets, "
        "blocks, objects. Values of types that are not registered here are read up to these.",
    )
    add_message(parser, "files", nargs="+")
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    """Print for each message whether it is sound; 2 if one is not."""
    status = SUCCESS
    for file in options.files:
        try:
            with naming(file, "check_message(source)"):
                source = read_message(file)
                from jagcodec.train.describe import check_message

                message, unknown = check_message(source)
        except (JagcodecError, OSError) as error:
            status = FAILURE
            print(error_line(error), file=sys.stderr)
            continue
        checksums = message.message.header.checksums is not None
        text = "checksums verified" if checksums else "no checksums"
        print(f"{display_name(file)}: sound, {message.bytes:,} B, {text}")
        for why in unknown.values():
            print(f"  not read: {why}")
    return status


def _add_doctor(parsers: Any) -> None:
    parser = parsers.add_parser(
        "doctor",
        help="show what is installed here, and what copies rows",
        description="Show which versions are installed, which kernel copies rows and with how many "
        "threads, and which frameworks are here.",
    )
    parser.set_defaults(run=_doctor)


def _doctor(_: argparse.Namespace) -> int:
    """Print what is installed; 1 if the library cannot be imported."""
    from jagcodec.doctor import doctor, report_lines

    report = doctor()
    print("\n".join(report_lines(report)))
    return SUCCESS if report["problem"] is None else DIFFERENCE


def _add_tax(parsers: Any) -> None:
    parser = parsers.add_parser(
        "tax",
        help="estimate what padding costs rows of given lengths, and what packing would",
        description="Estimate what padding costs a column of int64 tokens whose rows have these "
        "lengths. With --max-tokens, show the micro-batches of packed rows as well. For the bytes "
        "of a message, use inspect.",
    )
    text = "tokens per row, as a JSON list, or a message; - reads standard input"
    parser.add_argument("file", metavar="LENGTHS", help=text)
    text = "the column of a message whose row lengths count, if they differ"
    parser.add_argument("--column", metavar="NAME", help=text)
    text = "width of the rectangle; by default, the longest row"
    parser.add_argument("--width", metavar="S", type=whole, help=text)
    text = "the most tokens of one micro-batch, pads included"
    parser.add_argument("--max-tokens", metavar="N", type=whole, help=text)
    for name, letter, text in (
        ("--ranks", "R", "number of data-parallel ranks"),
        ("--row-multiple", "M", "pad each row to a multiple of this"),
        ("--total-multiple", "M", "pad each micro-batch to a multiple of this"),
    ):
        parser.add_argument(name, metavar=letter, type=whole, help=f"{text}; by default, 1")
    add_json(parser)
    parser.set_defaults(run=_tax, fail=parser.error)


def _tax(options: argparse.Namespace) -> int:
    """Print what padding costs rows of these lengths, and what packing would."""
    from jagcodec.train.tax import tax_of_lengths

    names = "ranks", "row_multiple", "total_multiple"
    values = {name: getattr(options, name) for name in names}
    plan_options = {name: value for name, value in values.items() if value is not None}
    if plan_options and options.max_tokens is None:
        options.fail("expected --max-tokens N with --ranks, --row-multiple and --total-multiple")
    with naming(options.file, "padding_tax(source)", "plan_micro_batches(lengths)"):
        lengths = _read_lengths(read_bytes(options.file), options)
        tax = tax_of_lengths(lengths, options.width, "padding_tax(source)")
        packing = None
        if options.max_tokens is not None:
            from jagcodec.forward.micro_batches import plan_micro_batches

            plan = plan_micro_batches(lengths, max_tokens=options.max_tokens, **plan_options)
            packing = plan.report()
    if options.json:
        document = tax.as_dict() if packing is None else {**tax.as_dict(), "packing": packing}
        print(json.dumps(document, indent=2))
        return SUCCESS
    print(tax)
    if packing is not None:
        print(*_packing_lines(packing, options.max_tokens), sep="\n")
    return SUCCESS


def _read_lengths(data: Any, options: argparse.Namespace) -> Any:
    """The (N,) row lengths in a JSON list, or of the columns of a message."""
    from jagcodec.rows.lengths import length_array

    name = display_name(options.file)
    if begins_blob(data):
        return _lengths_of_message(data, name, options.column)
    if options.column is not None:
        options.fail("expected a message with --column, found other bytes")
    try:
        lengths = json.loads(data)
        if type(lengths) is not list:
            raise ValueError(f"found {brief(lengths)}")
    except (ValueError, RecursionError) as error:
        detail = f"expected a JSON list of whole numbers, or a message; {error}"
        raise ArgumentTypeError("bad_type", name, detail) from error
    return length_array(lengths, "padding_tax(source)")


def _lengths_of_message(data: Any, name: str, column: str | None) -> Any:
    """The row lengths that the columns of a message share, or that one column has."""
    from jagcodec.rows.row_splits import RowSplitsPool
    from jagcodec.wire.read.any_batch import common_lengths, row_lengths_of
    from jagcodec.wire.read.wire_batch import open_whole

    batch = open_whole(data, name)
    if column is not None:
        batch = batch.select([column])
    lengths = row_lengths_of(batch, name, RowSplitsPool())
    return common_lengths(lengths, name, "choose one with --column NAME")


def _packing_lines(report: dict[str, Any], max_tokens: int) -> list[str]:
    """The report of a packing plan as a table with a title."""
    from jagcodec.train.tax import table

    head = ("ranks", "micro-batches of each", "fill", "heaviest rank", "heaviest micro-batch")
    cells = [
        f"{report['ranks']:,}",
        f"{report['micro_batches_per_rank']:,}",
        f"{report['fill']:.1%}",
        f"+{report['heaviest_rank'] - 1:.1%}",
        f"+{report['heaviest_micro_batch'] - 1:.1%}",
    ]
    title = f"packed, at most {max_tokens:,} tokens in a micro-batch; the heaviest, over the mean:"
    return ["", title, *table(head, [cells], right=range(5))]


# --- export ------------------------------------------------------------------------------------


def _add_export(parsers: Any) -> None:
    parser = parsers.add_parser(
        "export",
        help="write a message as .parquet, .arrow or .jsonl, for pandas, polars, duckdb",
        description="Write the columns of a batch as .parquet, .arrow (IPC) or .jsonl, by the "
        "ending of OUT. The file is written whole or not at all; what is not in it is named on "
        "standard error.",
    )
    add_message(parser)
    parser.add_argument("target", metavar="OUT", help="the file to write; an old one is replaced")
    add_columns(parser, "export")
    parser.set_defaults(run=_export, fail=parser.error)


_ENDINGS = (".parquet", ".arrow", ".jsonl")


def _export(options: argparse.Namespace) -> int:
    """Write the columns of a message to a file, and print what the file has and lacks."""
    ending = os.path.splitext(options.target)[1].lower()
    if ending not in _ENDINGS:
        name = display_name(options.target)
        options.fail(f"expected OUT with an ending of {', '.join(_ENDINGS)}, found {name}")
    with naming(options.file, "to_arrow(batch)"):
        source = read_message(options.file)
        from jagcodec.train.describe import names_of_meta
        from jagcodec.wire.files import file_path, write_whole
        from jagcodec.wire.read.wire_batch import open_whole

        batch = open_whole(source, display_name(options.file))
        left_out = names_of_meta(lambda: batch.meta)  # None if its types are not known here
        if options.columns is not None:
            batch = batch.select(options.columns)
        data = _json_lines(batch) if ending == ".jsonl" else _arrow_file(batch, ending)
    target = file_path(options.target, "OUT", "a file to write")
    with naming(options.target):
        write_whole(target, [data], target)
    rows, columns = counted(len(batch), "row"), counted(len(batch.fields), "column")
    print(f"{display_name(options.target)}: {rows}, {columns}")
    if left_out is None or left_out:
        unknown = "meta of a type that is not known here"
        listed = unknown if left_out is None else ", ".join(map(name_text, left_out))
        reason = "because it belongs to the whole batch"
        print(f"jagcodec: left out, {reason}: {listed}", file=sys.stderr)
    return SUCCESS


def _arrow_file(batch: Any, ending: str) -> bytes:
    """The bytes of a Parquet or an Arrow file of the columns."""
    from jagcodec.integrations.arrow import to_arrow

    table, stream = to_arrow(batch), io.BytesIO()  # `to_arrow` names pyarrow if it is missing
    import pyarrow.ipc
    import pyarrow.parquet

    if ending == ".parquet":
        if not table.schema.names and len(table):
            rows = counted(len(table), "row")
            detail = f"expected a column, found none: Parquet cannot hold {rows} without one; "
            raise ArgumentError("bad_shape", "OUT", f"{detail}write .arrow or .jsonl")
        try:
            pyarrow.parquet.write_table(table, stream)
        except pyarrow.ArrowException as error:  # Parquet has no form for some column
            detail = f"expected columns that Parquet can hold, found others: {error!s:.200}; "
            detail += "write .arrow or .jsonl, or name the other columns with --columns"
            raise ArgumentError("bad_type", "OUT", detail) from error
    else:
        with pyarrow.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
    return stream.getvalue()


_LEAVE_OUT_OR_TRY_PARQUET = (
    "leave the column out with --columns, or try .parquet, which has NaN, bytes and times"
)


def _json_lines(batch: Any) -> bytes:
    """The rows as lines of JSON."""
    columns = [_json_column(batch, name) for name in batch.fields]
    rows = zip(*columns, strict=True) if columns else [()] * len(batch)
    return "".join(f"{{{', '.join(row)}}}\n" for row in rows).encode()


def _json_column(batch: Any, name: str) -> list[str]:
    """The name and the value of each row, as JSON."""
    from jagcodec.train.json_text import json_text
    from jagcodec.train.to_rows import to_rows

    path = f"column {brief(name)}"
    key = json_text(name, path, "rename the column, or leave it out with --columns")
    try:
        rows = to_rows(batch, [name], as_="list")
    except ArgumentError as error:
        if error.reason != "too_large":
            raise
        detail = "expected a column that JSON lines can hold, found one of too many empty lists"
        raise ArgumentError("too_large", path, f"{detail}; {_LEAVE_OUT_OR_TRY_PARQUET}") from error
    except ArgumentTypeError as error:  # Python has no numbers for its layout or dtype
        path += error.path.removeprefix(f"to_rows[{name!r}]")
        detail = "expected a column that JSON lines can hold, found one whose rows are not numbers"
        raise ArgumentError("bad_type", path, f"{detail}; {_LEAVE_OUT_OR_TRY_PARQUET}") from error
    return [
        f"{key}: {json_text(cells[name], f'{path}, row {i}', _LEAVE_OUT_OR_TRY_PARQUET)}"
        for i, cells in enumerate(rows)
    ]
