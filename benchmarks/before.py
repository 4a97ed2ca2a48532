"""An earlier revision of the library compared with the working tree.

    python -m benchmarks.before [--revision HEAD~1] [--shapes 512x1536 small:8] [--seconds 20]
    python -m benchmarks.before --only select_rows:64 dicts:8 [--seconds 4]

The revision comes from the git history and is compiled in a temporary directory. The working tree
is used as it was built. Both have the packages of the environment that runs this command.

The trips are the sides `fused`, `reused` and `composed` of both versions, all in turns (`trips`);
each trip warm and cold; small:8 is a batch of 8 rows of about 300 tokens with a reward per row. The
ratio is the time of the working tree over that of the revision: the median, lowest and highest
ratio of all rounds.

Operations, such as `select_rows` of 64 rows, follow (`operations`). A figure is the median of the
calls of about 30 ms. Some operations are also compared with another one of the same version, such
as `materialize` of a message with a column of dicts with one without it. With --only, operations
are measured alone.

Values are compared first: digests of batches and trees of every kind after a trip through either
version (`before_values`), and the result of each operation. The exit status is 1 if a value
differs.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import before_values, operations, report, trips
from benchmarks.machine import ROOT, quieted
from benchmarks.measure import check, in_turns, ratio, spread
from benchmarks.shapes import DESIGN, LARGE, SMALL, lengths_of, make_batch, make_small_batch

REVISION = "HEAD"
BUILT_FROM = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TRIPS = ("fused", "reused", "composed")
SHAPES = ("small:1", "small:8", "small:64", SMALL, DESIGN, LARGE)
HEAD = ("old ms", "new ms", "new / old", "rounds")
ROUNDS = 7  # at least, of each operation


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--revision", default=REVISION, help=f"of git, {REVISION} by default")
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--seconds", type=float, help="for each shape or operation, about")
    parser.add_argument(
        "--only",
        nargs="+",
        type=_operation,
        metavar="NAME:ROWS",
        help=f"measure only these operations: {', '.join(operations.MAKERS)}",
    )
    options = parser.parse_args(arguments)
    quieted()
    with tempfile.TemporaryDirectory() as name:
        sources = {"old": built(options.revision, Path(name)), "new": ROOT / "src"}
        different = [] if options.only else different_values(sources)
        shapes = [] if options.only else options.shapes
        rows = [row for x in shapes for row in measure(x, sources, options.seconds or 20.0)]
        if rows:
            print(report.table(("shape", "trip", *HEAD), rows))
        names = options.only or operations.NAMES
        different += measure_operations(names, sources, options.seconds or 4.0)
    return 1 if different else 0


def _operation(text: str) -> str:
    name, _, rows = text.partition(":")
    if name not in operations.MAKERS or not rows.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a name as in dicts:8, found {text!r}")
    return text


def different_values(sources: Mapping[str, Path]) -> list[str]:
    """The names of values that the versions read differently."""
    digests = [digests_of(source) for source in sources.values()]
    names = {**digests[0], **digests[1]}
    different = [name for name in names if len({each.get(name) for each in digests}) > 1]
    print(f"{len(names)} values compared, {len(different)} differ", *different, sep="\n")
    return different


def built(revision: str, to: Path) -> Path:
    """A revision with its extensions compiled next to their sources; where the package is."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "--", *BUILT_FROM]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"revision {revision}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(to, filter="data")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "JAGCODEC_REQUIRE_COMPILED": "1"}
    run = subprocess.run(command, cwd=to, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{revision}: not built\n{run.stdout}\n{run.stderr}")
    return to / "src"


def digests_of(source: Path) -> dict[str, str]:
    """Digests of values of every kind, made by the library that was built there."""
    with trips.library_in(source), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        imported, found = pool.submit(before_values.digests).result()
    check(Path(imported).is_relative_to(source), f"{source}: imported {imported}")
    return found


def measure(shape: str, sources: Mapping[str, Path], seconds: float) -> list[list[str]]:
    """A line for each trip: milliseconds and ratios of both versions over one batch."""
    rows = shape.removeprefix("small:")
    batch = make_small_batch(int(rows)) if rows != shape else make_batch(lengths_of(shape))
    players: dict[str, Any] = {
        f"{version} {trip}": (trip, source) for version, source in sources.items() for trip in TRIPS
    }
    turns = trips.turns(batch, players, seconds)
    lines = []
    for trip, kind in itertools.product(TRIPS, trips.Turn._fields):
        old, new = (
            [getattr(turn, kind).total for turn in turns[f"{version} {trip}"]]
            for version in ("old", "new")
        )
        lines.append([shape, f"{trip}, {kind}", *_compared(old, new)])
    return lines


def _compared(old: Sequence[float], new: Sequence[float]) -> list[str]:
    found = spread(ratio(new, old))
    medians = [f"{statistics.median(each):.3f}" for each in (old, new)]
    return [
        *medians,
        f"{found['median']:.2f}",
        f"{found['lowest']:.2f} to {found['highest']:.2f}",
    ]


def measure_operations(
    names: Sequence[str], sources: Mapping[str, Path], seconds: float
) -> list[str]:
    """Print the time of each operation in both versions; those whose results differ."""
    lines, ratios, different = [], [], []
    with ExitStack() as stack:
        started = {
            version: stack.enter_context(trips.process(operations.serve, (source,), source))
            for version, source in sources.items()
        }
        for name in names:
            other = operations.compared_with(name)
            asks = {
                f"{version} {each}": partial(trips.ask, started[version], each, f"{version} {each}")
                for version in sources
                for each in filter(None, (name, other))
            }
            turns = in_turns(asks, seconds, ROUNDS)
            ms = {player: [time for time, _ in each] for player, each in turns.items()}
            old, new = (f"{version} {name}" for version in sources)
            lines.append([name, *_compared(ms[old], ms[new])])
            if turns[old][0][1] != turns[new][0][1]:
                different.append(name)
            if other:
                within = [(ms[f"{x} {name}"], ms[f"{x} {other}"]) for x in sources]
                medians = [f"{statistics.median(ratio(*pair)):.2f}" for pair in within]
                ratios.append([f"{name} / {other}", *medians])
    print(f"\n{len(lines)} operations compared, {len(different)} differ", *different, sep="\n")
    print(report.table(("operation", *HEAD), lines))
    if ratios:
        print("", report.table(("ratio", "old", "new"), ratios), sep="\n")
    return different


if __name__ == "__main__":
    sys.exit(main())
