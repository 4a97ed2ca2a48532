"""Whole batches, small messages and rows, compared with other formats.

--part trips    whole batches: what padding costs in bytes and time, then every way to send them
--part small    messages of 1, 8 and 64 rows compared with pickle (`rows`)
--part rows     rows in, joined and out (`rows`)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import report, rows, trips
from benchmarks.machine import quieted
from benchmarks.shapes import SHAPES
from benchmarks.sides import SIDES, missing

PARTS = ("trips", "small", "rows")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    quieted()
    if os.getloadavg()[0] > 0.5:
        print("something else runs here: times will be worse than they are", file=sys.stderr)
    if given.write and (given.part or given.only):
        raise SystemExit("a record holds every part: leave out --part and --only")
    parts: dict[str, Any] = {
        "trips": lambda: [
            trips.measure(shape, _chosen(given.only, installed()), given.seconds or 10.0)
            for shape in given.shapes
        ],
        "small": lambda: rows.measure_small(given.seconds or 10.0),
        "rows": lambda: rows.measure_rows(
            given.seconds or 4.0, given.rows, _chosen(given.only, rows.PARTS)
        ),
    }
    chosen = [given.part] if given.part else PARTS
    return report.run("bench", lambda: {part: parts[part]() for part in chosen}, given)


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("bench", __doc__)
    parser.add_argument("--part", choices=PARTS, help="measure this part alone")
    parser.add_argument("--seconds", type=float, help="for each shape or part, about")
    parser.add_argument("--rows", type=int, default=rows.ROWS, help="of --part rows")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        help="of trips: 512x1536, 512x1536@0.5 (share of tokens), gsm8k:512",
    )
    if without := sorted(SIDES.keys() - set(installed())):
        print(f"left out, because their packages are missing: {without}", file=sys.stderr)
    parser.add_argument(
        "--only", nargs="+", choices=[*SIDES, *rows.PARTS], help="sides of trips, parts of rows"
    )
    return parser


def installed() -> list[str]:
    """The sides whose packages are installed."""
    return [name for name in SIDES if not missing(name)]


def _chosen(only: Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """Those of the names that `only` has; all of them, if it has none."""
    names = list(names)
    return [name for name in names if name in (only or ())] or names


if __name__ == "__main__":
    sys.exit(main())
