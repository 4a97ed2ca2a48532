"""An earlier revision of the library compared with the working tree.

    python -m benchmarks.before [--revision 22b43f3] [--shapes 512x1536 small:8] [--seconds 20]

The revision comes from the git history. Both are copied to a temporary directory and compiled there
in the same way, with the packages of the environment that runs this command; neither the working
tree nor the environment is changed.

For every shape, each version is its own process, new for that shape. Both map the same batch and
take turns, in an order drawn anew for each round. The trips are the sides `fused`, `reused` and
`composed`; small:8 is a batch of 8 rows of about 300 tokens with a reward per row. A turn is five
trips, and the median of the last four counts: the other process has emptied the caches for the
first. The last one is compared bit for bit with the input. The ratio is the time of this version
over that of the earlier one: the median, lowest and highest ratio of all rounds.

Values are compared first: digests of batches and trees of every kind after a trip through either
version (`before_values`). The exit status is 1 if a value differs.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import jagcodec
from benchmarks import before_values, report
from benchmarks.machine import ROOT, quieted
from benchmarks.measure import check, difference, ratio, spread
from benchmarks.shapes import DESIGN, LARGE, SMALL, Batch, lengths_of, make_batch, make_small_batch
from benchmarks.sides import SIDES
from benchmarks.trips import Runner, shared_directory

REVISION = "22b43f3"
BUILT_FROM = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TRIPS = ("fused", "reused", "composed")
SHAPES = ("small:1", "small:8", "small:64", SMALL, DESIGN, LARGE)
CALLS = 5  # in a turn
ROUNDS = 5  # at least

Ms = dict[str, dict[str, list[float]]]  # by trip, by version


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--revision", default=REVISION, help=f"of git, {REVISION} by default")
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each shape, about")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args(arguments)
    quieted()
    with tempfile.TemporaryDirectory() as name:
        sources = {version: Path(name) / version for version in ("old", "new")}
        take_revision(options.revision, sources["old"])
        take_working_tree(sources["new"])
        for source in sources.values():
            build(source)
        found = compare_values(sources)
        print(f"{found['compared']} values compared, {len(found['different'])} differ")
        print("\n".join(found["different"]))
        found["shapes"] = {
            shape: measure(shape, sources, options.seconds) for shape in options.shapes
        }
    head = ("shape", "trip", "old ms", "new ms", "new / old", "rounds")
    print(report.table(head, [row for item in found["shapes"].items() for row in _lines(*item)]))
    if options.json:
        report.save(options.json, found)
    return 1 if found["different"] else 0


# --- the two versions --------------------------------------------------------------------------


def take_revision(revision: str, to: Path) -> None:
    """The files that the library is built from, out of the git history.

    Raises:
        SystemExit: This is not a git checkout, or it lacks the revision.
    """
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "--", *BUILT_FROM]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"revision {revision}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(to, filter="data")


def take_working_tree(to: Path) -> None:
    """The same out of the working tree, without what was compiled there."""
    to.mkdir()
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in BUILT_FROM:
        copy: Any = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, to / name, **({"ignore": ignored} if (ROOT / name).is_dir() else {}))


def build(source: Path) -> None:
    """Compile the extensions next to their sources.

    Raises:
        SystemExit: The build failed.
    """
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = {**os.environ, "JAGCODEC_REQUIRE_COMPILED": "1"}
    run = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{source.name}: not built\n{run.stdout}\n{run.stderr}")


class Version:
    """The other end of a `Worker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer of the worker's method of that name.

        Raises:
            SystemExit: The process ended.
        """
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(json.dumps({"ask": what, "arguments": arguments}) + "\n")
        questions.flush()
        line = answers.readline()
        if not line:
            raise SystemExit("a version's process ended; its error is above")
        return json.loads(line)


@contextmanager
def running(sources: Mapping[str, Path]) -> Iterator[dict[str, Version]]:
    """Processes that have imported the libraries built in these directories."""
    with ExitStack() as stack:
        both = {name: Version(stack.enter_context(_started(src))) for name, src in sources.items()}
        for name, each in both.items():
            imported = each.ask("version")
            check(Path(imported).is_relative_to(sources[name]), f"{name}: imported {imported}")
        yield both  # on leaving, their pipes are closed, and so they end


def _started(source: Path) -> subprocess.Popen[str]:
    paths = [str(source / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-c", "from benchmarks.before import serve; serve()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# --- comparing ---------------------------------------------------------------------------------


def compare_values(sources: Mapping[str, Path]) -> dict[str, Any]:
    """How many values were compared, and the names of those that differ."""
    with running(sources) as both:
        old, new = (each.ask("values") for each in both.values())
    different = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {"compared": len(new), "different": different}


def measure(shape: str, sources: Mapping[str, Path], seconds: float) -> dict[str, Any]:
    """Milliseconds and ratios of both versions over one batch."""
    rows = shape.removeprefix("small:")
    batch = make_small_batch(int(rows)) if rows != shape else make_batch(lengths_of(shape))
    ms: Ms = {trip: {name: [] for name in sources} for trip in TRIPS}
    with shared_directory(batch) as directory, running(sources) as both:
        del batch
        for each in both.values():
            each.ask("open", str(directory))
        order, end = random.Random(0), perf_counter() + seconds
        while len(ms[TRIPS[0]]["old"]) < ROUNDS or perf_counter() < end:
            for trip in order.sample(TRIPS, len(TRIPS)):
                for name in order.sample(list(both), len(both)):
                    ms[trip][name].append(both[name].ask("turn", trip))
    return {
        trip: {
            **{name: statistics.median(each) for name, each in found.items()},
            "ratio": spread(ratio(found["new"], found["old"])),
        }
        for trip, found in ms.items()
    }


def _lines(shape: str, trips: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            shape,
            trip,
            f"{found['old']:.3f}",
            f"{found['new']:.3f}",
            f"{found['ratio']['median']:.2f}",
        ]
        + [f"{found['ratio']['lowest']:.2f} to {found['ratio']['highest']:.2f}"]
        for trip, found in trips.items()
    ]


# --- in the process of a version ---------------------------------------------------------------


class Worker:
    """Answers questions about one version, which is the first one on PYTHONPATH."""

    def __init__(self) -> None:
        self._runners: dict[str, Runner] = {}

    def version(self) -> str:
        """The file that was imported."""
        return jagcodec.__file__

    def values(self) -> dict[str, str]:
        """Digests of values of every kind."""
        return before_values.digests()

    def open(self, directory: str) -> None:
        """Map the batch in a directory and prepare a runner for each trip."""
        batch = Batch.mapped(Path(directory))
        self._runners = {trip: Runner(SIDES[trip](batch), batch) for trip in TRIPS}
        # Walking all of what lives now before each turn would empty the caches.
        gc.collect()
        gc.freeze()

    def turn(self, trip: str) -> float:
        """The median of some trips, one right after the other; the last one is verified."""
        runner, ms, rectangles = self._runners[trip], [], None
        gc.collect()
        gc.disable()
        for _ in range(CALLS):
            rectangles = None  # freed before the next trip, as a consumer would
            found, rectangles = runner.run()
            ms.append(found.total)
        gc.enable()
        assert rectangles is not None
        wrong = difference(rectangles, runner.batch.columns)
        check(not wrong, f"{trip}: {wrong}")
        return statistics.median(ms[1:])


def serve() -> None:
    """Answer lines of JSON on standard input until it ends; prints go to standard error."""
    quieted()
    answers: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker()
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(worker, question["ask"])(*question["arguments"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main())
