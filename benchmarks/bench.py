"""Whole batches, small messages and rows, compared with other formats.

--part trips    whole batches: what padding costs in bytes and time, then every way to send them
--part small    messages of 1, 8 and 64 rows compared with pickle (`rows`)
--part rows     rows in, joined and out (`rows`)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import report, rows, trips
from benchmarks.machine import quieted
from benchmarks.shapes import SHAPES, lengths_of
from benchmarks.sides import SIDES, missing

PARTS = ("trips", "small", "rows")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    quieted()
    if os.getloadavg()[0] > 0.5:
        print("something else runs here: times will be worse than they are", file=sys.stderr)
    if given.part and given.write:
        raise SystemExit("a record holds every part: leave out --part")
    found: dict[str, Any] = {}
    if given.part in ("trips", None):
        found["trips"] = [
            trips.measure(shape, given.only, given.seconds or 10.0) for shape in given.shapes
        ]
    if given.part in ("small", None):
        found["small"] = rows.measure_small(given.seconds or 10.0)
    if given.part in ("rows", None):
        found["rows"] = rows.measure_rows(given.seconds or 4.0, given.rows)
    return report.finish("bench", found, given)


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("bench", __doc__)
    parser.add_argument("--part", choices=PARTS, help="measure this part alone")
    parser.add_argument("--seconds", type=float, help="for each shape or part, about")
    parser.add_argument("--rows", type=int, default=rows.ROWS, help="of --part rows")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        default=SHAPES,
        help="of trips: 512x1536, 512x1536@0.5 (share of tokens), gsm8k:512",
    )
    installed = [name for name in SIDES if not missing(name)]
    for name in SIDES:
        if package := missing(name):
            print(f"{name} is left out: {package} is not installed", file=sys.stderr)
    parser.add_argument("--only", nargs="+", choices=SIDES, default=installed, help="of trips")
    return parser


def _shape(text: str) -> str:
    try:
        lengths_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a shape such as 512x1536, found {text!r}"
        ) from error
    return text


if __name__ == "__main__":
    sys.exit(main())
