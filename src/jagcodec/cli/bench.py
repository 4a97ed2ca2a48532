"""``jagcodec bench``: your own lengths, by jagcodec and by padded formats."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jagcodec.cli.arguments import (
    Commands,
    TokenColumn,
    add_json,
    add_plot,
    positive,
    token_columns,
)
from jagcodec.cli.files import display_name, head_and_rest, naming, read_message
from jagcodec.cli.lengths import lengths_of
from jagcodec.cli.text import counted, json_text, table
from jagcodec.errors import ArgumentError
from jagcodec.wire.spec import BLOB_MAGIC

if TYPE_CHECKING:
    from jagcodec.cli.trips import Trip

DEFAULT_COLUMNS = (
    TokenColumn("input_ids", "int64"),
    TokenColumn("token_mask", "int64"),
    TokenColumn("logprobs", "float32"),
    TokenColumn("advantages", "float32"),
)


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        help="time your own lengths against padded formats, on this machine",
        description="Send made-up cells of your own lengths by jagcodec, and as rectangles by "
        "pickle, safetensors and Arrow where these are installed: written, copied once, and read "
        "back to rectangles. All ways take turns in every round, results are compared bit for bit, "
        "and times are medians.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="tokens per row, as tax takes them, or a message, whose longest column counts; by "
        "default 512 rows of real GSM8K rollouts; - reads standard input",
    )
    parser.add_argument(
        "--columns",
        metavar="NAME:DTYPE,...",
        type=token_columns,
        default=list(DEFAULT_COLUMNS),
        help="per-token columns to send; by default two of int64 and two of float32",
    )
    parser.add_argument(
        "--width", metavar="S", type=positive, help="width of the rectangle; by default, the "
        "longest row",
    )  # fmt: skip
    parser.add_argument("--rounds", metavar="N", type=positive, default=9, help="rounds; 9")
    add_json(parser)
    add_plot(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.plot is not None:
        from jagcodec.cli.charts import check_plot

        check_plot(options.plot)
    from jagcodec.cli.trips import make_columns, timed_trips, ways_of

    lengths = _lengths(options.file)
    longest = max(lengths, default=0)
    width = longest if options.width is None else options.width
    name = "the lengths" if options.file is None else display_name(options.file)
    if min(lengths, default=0) < 0 or not longest:
        raise ArgumentError("bad_length", name, "expected rows of tokens, found none")
    if longest > width:
        detail = f"expected rows of at most {width} tokens, found {longest}"
        raise ArgumentError("row_too_long", name, detail)
    columns = make_columns(lengths, width, options.columns)
    ways = ways_of(columns, lengths, width)
    trips = timed_trips(ways, columns, options.rounds, _progress)
    about = {
        "rows": len(lengths),
        "tokens": sum(lengths),
        "width": width,
        "fill": sum(lengths) / (len(lengths) * width),
        "columns": {column.name: column.dtype for column in options.columns},
        "rounds": options.rounds,
    }
    if options.json:
        print(json_text({**about, "ways": [trip.as_dict() for trip in trips]}))
    else:
        print("\n".join(_lines(about, trips)))
    if options.plot is not None:
        from jagcodec.cli.charts import grouped_bars

        title = f"{len(lengths):,} rows, {about['fill']:.0%} of the cells are tokens"
        parts = ("write", "copy", "read", "whole")
        series = {part: [1e3 * getattr(trip, part) for trip in trips] for part in parts}
        grouped_bars(options.plot, title, "milliseconds", [trip.way for trip in trips], series)
    return 0


def _lengths(file: str | None) -> list[int]:
    if file is None:
        from jagcodec.data import rollout_table

        return [int(length) for length in rollout_table().lengths[:512]]
    data, mapped = head_and_rest(file)
    with naming(file):
        if not data.startswith(BLOB_MAGIC):
            return lengths_of(data, display_name(file))
        from jagcodec.batch.describe import describe_message

        found = describe_message(read_message(file) if mapped else data)
    if not found.rows_of:
        name = display_name(file)
        raise ArgumentError("bad_shape", name, "expected a jagged column, found none")
    longest = max(found.rows_of, key=lambda rows: int(rows.lengths.sum()))
    return [int(length) for length in longest.lengths]


def _progress(rounds: Iterable[int]) -> Iterable[int]:
    """The rounds, with a bar on a terminal where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return rounds
    bar: Iterable[int] = tqdm(
        rounds, desc="rounds", unit="round", leave=False, disable=not sys.stderr.isatty()
    )
    return bar


def _lines(about: dict[str, Any], trips: list[Trip]) -> list[str]:
    rows, tokens = counted(about["rows"], "row"), f"{about['tokens']:,} tokens"
    first = (
        f"{rows} of {tokens}, width {about['width']:,}, {about['fill']:.1%} full; "
        f"{counted(len(about['columns']), 'column')}, {counted(about['rounds'], 'round')}, medians"
    )
    own = trips[0].whole
    head = ("way", "bytes", "write ms", "copy ms", "read ms", "whole ms", "of jagcodec's")
    cells = [
        (
            trip.way,
            f"{trip.bytes:,}",
            *(f"{1e3 * part:.2f}" for part in (trip.write, trip.copy, trip.read, trip.whole)),
            f"{trip.whole / own:.2f}x",
        )
        for trip in trips
    ]
    return [first, *table(head, cells, right=(1, 2, 3, 4, 5, 6)), "results are equal bit for bit"]
