"""``jagcodec tax``: what padding, repeats and wide cells cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jagcodec.cli.arguments import (
    Commands,
    TokenColumn,
    add_json,
    add_plot,
    positive,
    token_columns,
)
from jagcodec.cli.files import display_name, head_and_rest, naming
from jagcodec.cli.lengths import add_lengths_options, lengths_of, read_lengths
from jagcodec.cli.text import json_text, name_text
from jagcodec.errors import ArgumentError
from jagcodec.wire.spec import BLOB_MAGIC, TORCH_DTYPES

if TYPE_CHECKING:
    from jagcodec.batch.tax_report import TaxReport


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tax",
        help="say what padding, repeats and wide cells cost",
        description="Say what a batch costs as rectangles and under each option of encode; or, "
        "without FILE, what padding costs one per-token column.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="a message as dump writes it, or tokens per row as JSON, JSON lines, text, .npy or a "
        "table of rollouts; - reads standard input",
    )
    add_lengths_options(parser)
    parser.add_argument(
        "--columns",
        metavar="NAME:DTYPE,...",
        type=token_columns,
        help="per-token columns of these rows, such as ids:int64,logprobs:bf16",
    )
    parser.add_argument(
        "--bytes-per-token",
        metavar="B",
        type=positive,
        default=8,
        help="without --columns: size of one token's cell; by default 8, as of int64 ids",
    )
    add_json(parser)
    add_plot(parser)
    parser.set_defaults(run=run, fail=parser.error)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.padding_tax import padding_tax
    from jagcodec.batch.tax_report import tax_report

    if options.file is not None and options.lengths is not None:
        options.fail("expected FILE or --lengths, found both")
    if options.plot is not None:
        from jagcodec.cli.charts import check_plot

        check_plot(options.plot)
    how: Any = {"padded_width": options.width, "bytes_per_token": options.bytes_per_token}
    if options.file is not None:
        report = _report(options.file, how, options.columns)
    elif options.json or options.columns or options.plot:
        lengths = read_lengths(options.lengths, sys.stderr)
        report = (
            _of_columns(lengths, how, options.columns)
            if options.columns
            else tax_report(lengths, **how)
        )
    else:
        print(padding_tax(read_lengths(options.lengths), **how))
        return 0
    if options.plot is not None:
        _plot(options, report)
    print(json_text(report.as_dict()) if options.json else report)
    return 0


def _report(file: str, how: Mapping[str, Any], columns: Sequence[TokenColumn] | None) -> TaxReport:
    """The report of a message or of lengths, told apart by how the file begins."""
    from jagcodec.batch.tax_report import tax_report

    data, mapped = head_and_rest(file)
    with naming(file, "tax_report(source)"):
        if not data.startswith(BLOB_MAGIC):
            lengths = lengths_of(data, display_name(file))
            return _of_columns(lengths, how, columns) if columns else tax_report(lengths, **how)
        if columns:
            raise ArgumentError(
                "bad_option",
                "--columns",
                "expected lengths of rows, found a message, which has columns of its own",
            )
        return tax_report(file if mapped else data, **how)


def _of_columns(
    lengths: Sequence[int], how: Mapping[str, Any], columns: Sequence[TokenColumn]
) -> TaxReport:
    """The report of per-token columns of these dtypes, of which only the padding is known."""
    from dataclasses import replace

    from jagcodec.batch.tax_report import tax_report

    reports = [
        tax_report(lengths, **{**how, "bytes_per_token": TORCH_DTYPES[column.dtype]})
        for column in columns
    ]
    taxes = tuple(
        replace(report.columns[0], name=column.name)
        for report, column in zip(reports, columns, strict=True)
    )
    return replace(reports[0], columns=taxes)


def _plot(options: argparse.Namespace, report: TaxReport) -> None:
    from jagcodec.cli.charts import grouped_bars

    forms = {
        "padded": "padded",
        "jagged": "jagged",
        "narrow": "narrow=True",
        "elide": "elide=True",
        "both": "both",
    }
    series = {
        label: [getattr(column, f"{form}_bytes") for column in report.columns]
        for form, label in forms.items()
    }
    known = {label: sizes for label, sizes in series.items() if None not in sizes}
    groups = [name_text(column.name) for column in report.columns]
    grouped_bars(options.plot, f"{report.rows:,} rows: bytes by column", "bytes", groups, known)
