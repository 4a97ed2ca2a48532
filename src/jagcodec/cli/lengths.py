"""Lengths of rows, as they lie in files of all kinds."""

from __future__ import annotations

import argparse
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from jagcodec.cli.arguments import positive
from jagcodec.errors import ArgumentTypeError, brief


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
    """What a JSON text says, if it is a list of whole numbers, or a table of rollouts."""
    if isinstance(lengths, dict) and {"columns", "rows"} <= lengths.keys():
        return _of_table(lengths, where)
    if not isinstance(lengths, list):
        raise ArgumentTypeError(
            "bad_type",
            where,
            f"expected a JSON list of whole numbers, found {json.dumps(lengths):.40}",
        )
    for row, length in enumerate(lengths):
        _check_whole(length, f"{where}, row {row}")
    return lengths


def _check_whole(length: Any, where: str) -> None:
    if type(length) is not int:
        raise ArgumentTypeError(
            "bad_type", where, f"expected a whole number of tokens, found {json.dumps(length):.40}"
        )


def _of_table(table: dict[str, Any], where: str) -> list[int]:
    """The lengths in a table of rollouts, as the package brings one with it."""
    wanted = ("prompt_tokens", "response_tokens")
    columns, rows = table["columns"], table["rows"]
    if (
        not isinstance(columns, list)
        or not isinstance(rows, list)
        or not any(name in columns for name in wanted)
    ):
        raise ArgumentTypeError(
            "bad_type",
            where,
            f"expected a table of rows with the columns {' and '.join(wanted)}, found "
            f"{json.dumps(columns):.80}",
        )
    places = [columns.index(name) for name in wanted if name in columns]
    for row, cells in enumerate(rows):
        if not isinstance(cells, list) or len(cells) != len(columns):
            raise ArgumentTypeError(
                "bad_type",
                f"{where}, row {row}",
                f"expected {len(columns)} numbers, found {json.dumps(cells):.40}",
            )
        for place in places:
            _check_whole(cells[place], f"{where}, row {row}")
    return [sum(cells[place] for place in places) for cells in rows]


def lengths_of(data: bytes, name: str) -> list[int]:
    """Lengths as .npy, as JSON, or line by line as numbers or as JSON lists of them."""
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
    with suppress(ValueError, RecursionError):
        whole = json.loads(text)
        if type(whole) is not int:  # which is a line of one number
            return checked_lengths(whole, name)
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
    except MemoryError:
        raise
    except Exception as error:  # numpy and what it reads headers with raise all kinds
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
