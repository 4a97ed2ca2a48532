"""The command line: ``jagcodec tax`` and ``jagcodec doctor``."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jagcodec._version import __version__
from jagcodec.errors import ArgumentTypeError, JagcodecError, brief
from jagcodec.wire.spec import BLOB_MAGIC

# What needs torch is imported by the commands that need it, so that --help need not wait.
if TYPE_CHECKING:
    from jagcodec.batch.tax_report import TaxReport


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit status: 0, 1 if `doctor` finds that the library cannot be imported, 2 for
        arguments or files that are wrong, or 130 if interrupted.
        For arguments that do not parse, `SystemExit` is raised with 2.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command == "doctor":
        return _doctor(options)
    if options.file is not None and options.lengths is not None:
        parser.error("expected FILE or --lengths, found both")
    try:
        _tax(options)
    except (JagcodecError, OSError) as error:
        print(f"jagcodec: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jagcodec: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jagcodec",
        description="The jagged wire codec for reinforcement-learning rollout batches.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command", required=True)
    installed = commands.add_parser(
        "doctor",
        help="say what is installed here, and what copies rows",
        description="Say which versions are installed, which kernel copies rows and with how many "
        "threads, and which extras are here.",
    )
    installed.add_argument("--json", action="store_true", help="print JSON instead of text")
    tax = commands.add_parser(
        "tax",
        help="say what padding, repeats and wide cells cost",
        description="Say what a batch costs as rectangles and under each option of encode; or, "
        "without FILE, what padding costs one per-token column.",
    )
    tax.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="a message as dump writes it, or tokens per row as JSON, JSON lines, text or .npy; "
        "- reads standard input",
    )
    add_lengths_options(tax)
    tax.add_argument("--json", action="store_true", help="print JSON instead of a table")
    tax.add_argument(
        "--bytes-per-token",
        metavar="B",
        type=positive,
        default=8,
        help="size of one token's cell; by default 8, as of int64 ids",
    )
    return parser


def add_lengths_options(parser: argparse.ArgumentParser) -> None:
    """Let a command ask for the lengths of rows, and for the width that they are padded to."""
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        type=Path,
        help="a JSON list of tokens per row; by default, real GSM8K rollouts",
    )
    parser.add_argument(
        "--width",
        metavar="S",
        type=positive,
        help="width of the rectangle; by default, the longest row",
    )


def positive(text: str) -> int:
    """A number above 0, as `argparse` wants its types."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def read_lengths(path: Path | None, notes: TextIO | None = None) -> list[int]:
    """The lengths in a file; without one, those of `rollout_table`, whose source is printed.

    Raises:
        ArgumentTypeError: The file is not a JSON list of whole numbers.
        OSError: The file cannot be read.
    """
    if path is None:
        from jagcodec.data import rollout_table

        table = rollout_table()
        print(f"lengths: {table.source}; tokens by {table.tokenizer}", file=notes)
        return [int(length) for length in table.lengths]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentTypeError(
            "bad_type", str(path), f"expected a JSON list of whole numbers; {error}"
        ) from error
    return checked_lengths(_parsed(text, str(path)), str(path))


def checked_lengths(lengths: Any, where: str) -> list[int]:
    """What a JSON text says, if it is a list of whole numbers."""
    if not isinstance(lengths, list):
        raise ArgumentTypeError(
            "bad_type",
            where,
            f"expected a JSON list of whole numbers, found {json.dumps(lengths):.40}",
        )
    for row, length in enumerate(lengths):
        if type(length) is not int:
            raise ArgumentTypeError(
                "bad_type",
                f"{where}, row {row}",
                f"expected a whole number of tokens, found {json.dumps(length):.40}",
            )
    return lengths


def _doctor(options: argparse.Namespace) -> int:
    from jagcodec.doctor import doctor

    report = doctor()
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    return 0 if report.problem is None else 1


def _tax(options: argparse.Namespace) -> None:
    from jagcodec.batch.padding_tax import padding_tax
    from jagcodec.batch.tax_report import tax_report

    how: Any = {"padded_width": options.width, "bytes_per_token": options.bytes_per_token}
    if options.file is not None:
        report = _report(options.file, how)
    elif options.json:
        report = tax_report(read_lengths(options.lengths, sys.stderr), **how)
    else:
        print(padding_tax(read_lengths(options.lengths), **how))
        return
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)


def _report(file: str, how: Mapping[str, Any]) -> TaxReport:
    """The report of a message or of lengths, told apart by how the file begins."""
    from jagcodec.batch.tax_report import tax_report

    if file == "-":
        name, data = "standard input", sys.stdin.buffer.read()
    else:
        name = file
        with Path(file).open("rb") as stream:
            data = stream.read(len(BLOB_MAGIC))
            # A message is mapped, and not read; a pipe can be read but once.
            if data != BLOB_MAGIC or not stream.seekable():
                data += stream.read()
    try:
        if data.startswith(BLOB_MAGIC):
            return tax_report(file if data == BLOB_MAGIC and file != "-" else data, **how)
        return tax_report(_lengths_of(data, name), **how)
    except JagcodecError as error:
        path = error.path.replace("tax_report(source)", name)
        raise type(error)(
            error.reason, path if name in path else f"{name}, {path}", error.detail
        ) from error


def _lengths_of(data: bytes, name: str) -> list[int]:
    """Lengths as .npy, as a JSON list, or line by line as numbers or as JSON lists of them."""
    if data.startswith(_NPY):
        return _of_npy(data, name)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentTypeError(
            "bad_type",
            name,
            f"expected a message or lengths as JSON, JSON lines, text or .npy; {error}",
        ) from error
    if text.lstrip()[:1] in ("{", '"'):
        return checked_lengths(_parsed(text, name), name)
    try:
        return checked_lengths(json.loads(text), name)
    except (ValueError, RecursionError) as error:
        if isinstance(error, JagcodecError):
            raise
    lengths: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        if line.lstrip().startswith(("[", "{")):
            lengths += checked_lengths(_parsed(line, where), where)
            continue
        for word in line.replace(",", " ").split():
            digits = word.removeprefix("-")
            if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
                raise ArgumentTypeError(
                    "bad_type", where, f"expected a whole number of tokens, found {brief(word)}"
                )
            lengths.append(int(word))
    if not lengths:
        raise ArgumentTypeError(
            "bad_type", name, "expected a message or lengths, found nothing; [] is no row"
        )
    return lengths


_NPY = b"\x93NUMPY"


def _of_npy(data: bytes, name: str) -> list[int]:
    import numpy as np

    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ArgumentTypeError("bad_type", name, f"expected a .npy of lengths; {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentTypeError(
            "bad_type",
            name,
            f"expected (N,) integers, found {array.dtype} of shape {array.shape}",
        )
    lengths: list[int] = array.tolist()
    return lengths


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentTypeError(
            "bad_type", where, f"expected a JSON list of whole numbers; {error}"
        ) from error
