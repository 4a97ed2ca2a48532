"""``jagcodec tax``: what padding costs rows of given lengths."""

from __future__ import annotations

import argparse
import io
import json
from typing import Any

from jagcodec.cli.arguments import Commands, add_json, positive
from jagcodec.cli.files import display_name, naming, whole_file
from jagcodec.cli.text import json_text
from jagcodec.errors import ArgumentTypeError, brief
from jagcodec.wire.spec import BLOB_MAGIC


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tax",
        help="estimate what padding costs rows of given lengths",
        description="Estimate what padding costs a column of int64 tokens whose rows have these "
        "lengths. For a message, inspect shows it.",
    )
    parser.add_argument(
        "file",
        metavar="LENGTHS",
        help="tokens per row, as a JSON list or as .npy; - reads standard input",
    )
    parser.add_argument(
        "--width",
        metavar="S",
        type=positive,
        help="width of the rectangle; by default, the longest row",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from jagcodec.batch.tax import padding_tax

    with naming(options.file, "padding_tax(source)"):
        lengths = lengths_of(whole_file(options.file), display_name(options.file))
        report = padding_tax(lengths, padded_width=options.width)
    print(json_text(report.as_dict()) if options.json else report)
    return 0


def lengths_of(data: bytes, name: str) -> list[int]:
    """Lengths as .npy or as a JSON list.

    Raises:
        ArgumentTypeError: They are neither, or not whole numbers; `name` is that of the file.
    """
    lengths = _of_npy(data, name) if data.startswith(b"\x93NUMPY") else _of_json(data, name)
    for row, length in enumerate(lengths):
        if type(length) is not int:
            found = f"expected a whole number of tokens, found {brief(length)}"
            raise ArgumentTypeError("bad_type", f"{name}, row {row}", found)
    return lengths


def _of_json(data: bytes, name: str) -> list[Any]:
    if data.startswith(BLOB_MAGIC):
        detail = "expected lengths, found a message; use jagcodec inspect"
        raise ArgumentTypeError("bad_type", name, detail)
    try:
        lengths = json.loads(data)
    except (ValueError, RecursionError) as error:
        detail = f"expected a JSON list of whole numbers, or .npy; {error}"
        raise ArgumentTypeError("bad_type", name, detail) from error
    if type(lengths) is not list:
        detail = f"expected a JSON list of whole numbers, or .npy; found {brief(lengths)}"
        raise ArgumentTypeError("bad_type", name, detail)
    return lengths


def _of_npy(data: bytes, name: str) -> list[Any]:
    import numpy as np

    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except MemoryError:
        raise
    except Exception as error:  # numpy and what it reads headers with raise all kinds
        raise ArgumentTypeError("bad_type", name, f"expected a .npy of lengths; {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        detail = f"expected (N,) integers, found {array.dtype} of shape {array.shape}"
        raise ArgumentTypeError("bad_type", name, detail)
    lengths: list[Any] = array.tolist()
    return lengths
