"""The command ``inspect``: the columns of a message, its rows and its bytes.

`_inspect` is the command. It prints one of three things: a message, some rows of it, or the list of
the steps of a record. Then come that list, the rows, and the lines about a message.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from jagcodec.cli.inputs import (
    FAILURE,
    SUCCESS,
    add_columns,
    add_json,
    add_message,
    counted,
    display_name,
    error_line,
    name_text,
    naming,
    read_message,
    row_index,
)
from jagcodec.errors import ArgumentIndexError, JagcodecError, WireFormatError, brief, shown

if TYPE_CHECKING:
    from jagcodec.train.describe import ColumnDescription, Entry, MessageDescription, RowLengths
    from jagcodec.train.tax import PaddingTax
    from jagcodec.wire.read.message import Message
    from jagcodec.wire.read.wire_batch import WireBatch


def add_inspect(parsers: Any) -> None:
    """Add the command."""
    parser = parsers.add_parser(
        "inspect",
        help="show what a message holds: columns, rows, bytes",
        description="Show what a message is made of: which options of encode would save bytes, "
        "the columns by size, and how long rows are. Checksums are compared. Of values whose types "
        "are not registered here, the bytes are counted. For a record, list the steps.",
    )
    add_message(parser, help="a message or the directory of a record; - reads standard input")
    text = (
        "print rows of a batch instead: one (7) or a range (10:20); --row=-5: prints the last five"
    )
    parser.add_argument("--row", metavar="N|A:B", type=row_index, help=text)
    add_columns(parser, "print")
    parser.add_argument("--all", action="store_true", help="with --row, print every cell")
    add_json(parser)
    parser.set_defaults(run=_inspect, fail=parser.error)


def _inspect(options: argparse.Namespace) -> int:
    """Print a message, some of its rows, or the steps of a record."""
    if options.all and options.row is None:
        options.fail("expected --row N with --all")
    if os.path.isdir(options.file):
        return _list_steps(options)
    name = display_name(options.file)
    with naming(options.file, "WireBatch.rows(index)"):
        # Open the file before importing torch, which takes a second: the file may not exist.
        source = read_message(options.file)
        from jagcodec.train.describe import chosen_entries, describe_message, open_source
        from jagcodec.train.tax import padding_tax

        message = open_source(source, name)
        entries = message.entries
        if options.columns is not None:
            entries = chosen_entries(message, options.columns)
        if options.row is not None:
            _print_rows(message.message, entries, options)
            return SUCCESS
        description = describe_message(message)
    tax, why_unknown = None, None
    if message.batch and description.rows is not None:
        try:
            tax = padding_tax(source, options=True)
        except JagcodecError as error:  # this process cannot measure it
            why_unknown = str(error)
    wanted = {entry.name for entry in entries}
    columns = [column for column in description.columns if column.name in wanted]
    inspection = _Inspection(name, description, columns, tax, why_unknown)
    if options.json:
        _print_json(inspection)
    else:
        _print_text(inspection)
    return SUCCESS


class _Inspection(NamedTuple):
    """What `inspect` prints about a message."""

    name: str  # of the file
    description: MessageDescription
    columns: list[ColumnDescription]  # those that were asked for
    tax: PaddingTax | None  # None if it was not measured
    tax_unknown: str | None  # why this process cannot measure the tax


def _print_json(inspection: _Inspection) -> None:
    name, description, columns, tax, tax_unknown = inspection
    document = {"file": name, **asdict(description), "columns": [*map(asdict, columns)]}
    document |= {"tax_unknown": tax_unknown, "tax": None if tax is None else tax.as_dict()}
    print(json.dumps(document, indent=2))


def _print_text(inspection: _Inspection) -> None:
    name, description, columns, tax, tax_unknown = inspection
    options = [word for word in ("narrow", "elide") if getattr(description, word)]
    print(_first_line(name, description, options))
    if tax is not None:
        print(*_tax_lines(tax, options), sep="\n")
    elif tax_unknown is not None:
        print(f"what options would save is unknown: {tax_unknown}")
    print(*_column_lines(description, columns), sep="\n")


def _list_steps(options: argparse.Namespace) -> int:
    """List the steps of a record, also those that cannot be read."""
    from jagcodec.record import RecordReader
    from jagcodec.train.tax import table
    from jagcodec.wire.read.wire_batch import open_wire

    if options.row is not None or options.columns is not None:
        options.fail("expected the file of a step with --row and --columns, found a directory")
    reader = RecordReader(options.file)
    steps: list[dict[str, Any]] = []
    status = SUCCESS
    for step in reader.steps:
        file = reader.file(step)
        line: dict[str, Any] = {"step": step, "rows": "?", "bytes": "?", "file": file}
        try:
            line["bytes"] = os.path.getsize(file)
            with naming(file):
                line["rows"] = len(open_wire(file))
        except (JagcodecError, OSError) as error:
            status = FAILURE
            line["error"] = str(error)
            print(error_line(error), file=sys.stderr)
        steps.append(line)
    if options.json:
        print(json.dumps({"record": options.file, "steps": steps}, indent=2))
        return status
    print(f"{display_name(options.file)}: a record of {counted(len(steps), 'step')}")
    head = ("step", "rows", "bytes", "file")
    lines = [[shown(str(line[name]), 4096) for name in head] for line in steps]
    print("\n".join(table(head, lines, right=(0, 1, 2))))
    return status


# --- rows --------------------------------------------------------------------------------------


def _print_rows(message: Message, entries: list[Entry], options: argparse.Namespace) -> None:
    """Print the rows that were asked for, one after the other, as text or as JSON."""
    from jagcodec.rows.chosen_rows import choose_rows
    from jagcodec.wire.read.wire_batch import batch_of_message

    batch, where = batch_of_message(message), "WireBatch.rows(index)"
    numbers = choose_rows(options.row, len(batch), where)
    if not len(numbers):
        detail = f"expected a range with some of {counted(len(batch), 'row')}, found none in it"
        raise ArgumentIndexError("no_such_row", where, detail)
    documents = []
    for i, row in enumerate(map(int, numbers)):
        cells = dict(_cells_of_row(batch.rows([row]), entries))
        if options.json:
            documents.append(_row_document(row, cells))
            continue
        if i > 0:
            print()
        print(*_row_lines(row, cells, options.all), sep="\n")
    if options.json:
        document = {"rows": documents} if isinstance(options.row, slice) else documents[0]
        print(json.dumps(document, indent=2))


def _cells_of_row(batch: WireBatch, entries: Iterable[Entry]) -> Iterator[tuple[str, Any]]:
    """The name of each column, with its value in a batch of one row, or the error of its type."""
    from jagcodec.train.describe import UNKNOWN, column_inside, in_entry
    from jagcodec.train.to_rows import rows_on_host

    for entry in entries:
        if not entry.keys:
            continue  # a value next to the columns, such as `meta_info`, which has no rows
        try:
            column = column_inside(batch, entry.keys)
            (cells,) = rows_on_host(column, "numbers", "to_rows")[0].values()
            yield entry.name, cells
        except WireFormatError as error:
            if error.reason not in UNKNOWN:
                raise in_entry(entry, error) from error
            yield entry.name, error


def _row_document(row: int, cells: dict[str, Any]) -> dict[str, Any]:
    """A row by column, for JSON."""
    columns = {
        name: {"unknown": str(value)} if isinstance(value, WireFormatError) else _json_value(value)
        for name, value in cells.items()
    }
    return {"row": row, "columns": columns}


def _row_lines(row: int, cells: dict[str, Any], every_cell: bool) -> Iterator[str]:
    """A row by column, as text, with every cell or shortened."""
    width = max((len(name_text(name)) for name in cells), default=0)
    yield f"row {row}"
    for name, value in cells.items():
        text = f"unknown: {value}"
        if not isinstance(value, WireFormatError):
            text = json.dumps(_json_value(value)) if every_cell else cells_text(value)
        yield f"{name_text(name):<{width}}  {text}"


def cells_text(value: Any) -> str:
    """A value of a row on one line, safe to print, and shortened as numpy does it."""
    import numpy as np

    array = _as_array(value)
    if not isinstance(array, np.ndarray) or array.dtype == object:
        return shown(json.dumps(_json_value(value), ensure_ascii=False), 240)
    if not array.ndim:
        return shown(str(array[()]), 400)
    with np.printoptions(threshold=16, edgeitems=4, linewidth=1 << 20):
        text = re.sub(r"\n\s*", " ", np.array2string(array))
    if array.dtype.kind not in "SU":  # numpy pads numbers; a text may have such spaces itself
        text = re.sub(" +", " ", text).replace("[ ", "[")
    return shown(text, 400)


def _as_array(value: Any) -> Any:
    """A tensor or a scalar of numpy as an array, of bytes if need be; any other value unchanged."""
    import numpy as np

    from jagcodec.columns.held import column_of

    if isinstance(value, np.generic):
        return np.asarray(value)
    if not column_of(value).has_tensor:
        return value
    from jagcodec.memory.tensor_bytes import as_bytes, number_array  # a tensor: torch is here

    if value.is_nested or str(value.layout) != "torch.strided":
        return value
    try:
        return number_array(value)
    except (TypeError, RuntimeError):
        return as_bytes(value)


def _json_value(value: Any) -> Any:
    """A value for JSON. Numbers that JSON does not have become text, as do other objects."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:  # Python may refuse to print more than 4,300 digits
        return value if value.bit_length() <= 14_000 else brief(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(float(value))
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _json_value(item) for key, item in value.items()}
    array = _as_array(value)
    if hasattr(array, "dtype") and array.dtype.kind in "biufc":
        from jagcodec.memory.extents import lists_of
        from jagcodec.wire.limits import DEFAULT_LIMITS

        if not array.size and lists_of(array.shape) > DEFAULT_LIMITS.objects:
            return repr(array)
        return _json_value(array.tolist())
    try:
        return repr(value)
    except ValueError:  # a number in it has too many digits
        return brief(value)


# --- a message ---------------------------------------------------------------------------------


def _first_line(name: str, description: MessageDescription, options_used: list[str]) -> str:
    """The value of a message, its rows, bytes and frames, and its options."""
    rows = "" if description.rows is None else f" of {counted(description.rows, 'row')}"
    options = ", ".join([*options_used, *([description.compress] if description.compress else [])])
    line = f"{name}: {name_text(description.value)}{rows}, {size_text(description.bytes)} in "
    line += counted(description.frames, "frame") + (f", with {options}" if options else "")
    return line + ("; checksums verified" if description.checksum else "; no checksums")


def _tax_lines(tax: PaddingTax, options_used: list[str]) -> list[str]:
    """Which options would save bytes, and what rectangles would need."""
    used = [f"{word}=True" for word in options_used if f"{word}=True" in tax.advice]
    lines = [tax.advice + (f" This message has {', '.join(used)}." if used else "")]
    padded = tax.total.padded_bytes
    if padded and tax.fill < 1:
        fill = f"{tax.fill:.1%} of the padded cells are tokens"
        lines.append(f"As rectangles the columns take {size_text(padded)}: {fill}.")
    return lines


def _column_lines(description: MessageDescription, columns: list[ColumnDescription]) -> list[str]:
    """The table of these columns, the names of `meta`, and the lengths of rows."""
    from jagcodec.train.tax import table

    marked = any(column.stored for column in columns)
    head = ("column", "kind", "dtype", "shape", *(("stored",) if marked else ()), "bytes", "share")
    rows: list[tuple[str, ...]] = []
    for column in sorted(columns, key=attrgetter("bytes"), reverse=True):
        names = name_text(column.name), name_text(column.kind), column.dtype or ""
        stored = (column.stored,) if marked else ()
        size = _bytes_text(column.bytes, description)
        rows.append((*names, _shape_text(column.shape), *stored, *size))
    if len(columns) == len(description.columns):
        blank = ("",) * (len(head) - 3)
        rows.append(("header and offsets", *blank, *_bytes_text(description.overhead, description)))
    lines = table(head, rows, right=(len(head) - 2, len(head) - 1))
    if description.meta is None:
        lines.append("meta: of a type that is not known here")
    elif description.meta:
        lines.append(f"meta: {', '.join(map(name_text, description.meta))}")
    listed = {column.rows for column in columns}
    return lines + [
        _lengths_text(rows) for i, rows in enumerate(description.rows_of) if i in listed
    ]


def _shape_text(shape: tuple[int | None, ...] | None) -> str:
    return "" if shape is None else f"[{', '.join('*' if d is None else str(d) for d in shape)}]"


def _bytes_text(size: int, description: MessageDescription) -> tuple[str, str]:
    """A number of bytes, and its share of the message."""
    return f"{size:,}", f"{size / (description.plain_bytes or 1):.1%}"


def size_text(size: int) -> str:
    """A number of bytes in the smallest unit in which it is below 10,000; at most in GB."""
    if size < 10_000:
        return f"{size:,} B"
    for unit, name in ((10**3, "kB"), (10**6, "MB")):
        number = round(size / unit, 1)
        if number < 10_000:
            return f"{number:,.1f} {name}"
    return f"{size / 10**9:,.1f} GB"


def _lengths_text(rows: RowLengths) -> str:
    """How long the rows of some columns are."""
    named = ", ".join(map(name_text, rows.columns[:6]))
    named += f" and {len(rows.columns) - 6} more" if len(rows.columns) > 6 else ""
    if not rows.rows:
        return f"rows of {named}: none"
    return (
        f"rows of {named}: {rows.min:,} to {rows.max:,} tokens, mean {rows.mean:,.1f}, "
        f"median {rows.median:,.1f}, {rows.tokens:,} in all"
    )
