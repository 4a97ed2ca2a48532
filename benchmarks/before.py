"""An earlier version of the library beside this one, in one run: ``python -m benchmarks.before``.

    python -m benchmarks.before [--revision ac26b34] [--shapes 512x1536,small:8] [--json FILE]

The revision is taken from the git history, this version from the working tree. Both are copied to
a temporary directory and compiled there in the same way, with the packages of the environment that
runs this command; neither the working tree nor the environment is changed. The revision must
have the public functions that the trips of `benchmarks.sides` and `benchmarks.before_values` call.

For every shape, each version is a process of its own, new for that shape. Both map the same batch
and take turns, in an order drawn anew for each round: the trips are ``fused`` (encode_fields, one
copy of every frame, materialize, before it open_wire where a version needs that), ``reused`` (the
same with open_wire, a message buffer and an output that are reused) and ``composed``
(pack_jagged_fields, encode, copy, decode, materialize). A turn is several trips, more of them the
shorter they are; the first one is dropped, because the other process has had the caches, and the
median of the rest counts. The last one is compared bit for bit with the input. Garbage is
collected before a turn and not in it.

The ratio is the time of this version over that of the earlier one: the median of the ratios
within each round, with quartiles. A trip counts as slower where its ratio is above 1 + margin in
all of three measurements (a second and a third are only made then). Shapes are small:N (N rows of
about 300 tokens with a reward per row) and those of `benchmarks.bench`; without ``--shapes``, the
former of 1, 8 and 64 rows and all of the latter from 512 rows on. What memory does not suffice for
is skipped, and the output says so.

Values are compared first: digests of batches and trees of every kind after a trip through either
version, then, for each shape, of every materialized column and of the decoded TensorDict.

The exit status is 1 where this version is slower or a value differs.
"""

from __future__ import annotations

import argparse
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.before_worker import MAKERS
from benchmarks.machine import machine, versions
from benchmarks.shapes import FULL, Case, make_batch, make_small_batch
from benchmarks.trips import quieted, shared_directory, spread, too_large

ROOT = Path(__file__).parents[1]
REVISION = "ac26b34"
BUILT_FROM = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
VERSIONS = ("old", "new")

SMALL = "small:"
SHAPES = (*(f"{SMALL}{rows}" for rows in (1, 8, 64)), *(str(c) for c in FULL if c.rows >= 512))

MARGIN = 0.1
ATTEMPTS = 3
SECONDS = 20.0  # of each shape
ROUNDS = (11, 101)  # at least, at most
TURN_MS = 15.0
CALLS = (3, 25)  # in a turn, at least, at most


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    quieted()
    report: dict[str, Any] = {
        "revision": options.revision,
        "margin": options.margin,
        "machine": machine(),
        "versions": versions(),
        "shapes": [],
    }
    for what in ("machine", "versions"):
        print(", ".join(f"{name} {value}" for name, value in report[what].items()))
    if os.getloadavg()[0] > 0.5:
        print("something else runs here, and ratios will scatter")
    with tempfile.TemporaryDirectory() as name:
        sources = {version: Path(name) / version for version in VERSIONS}
        take_revision(options.revision, sources["old"])
        take_working_tree(sources["new"])
        for source in sources.values():
            build(source)
        report["different"] = different_values(sources)
        print(text_of_values(report["different"]), flush=True)
        for shape in options.shapes:
            found = compare(shape, sources, options)
            report["shapes"].append(found)
            print(text(found, options.margin), flush=True)
    verdicts = failures(report)
    print("\n" + ("\n".join(verdicts) or f"no trip is slower by more than {options.margin:.0%}"))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if verdicts else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.before", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--revision", default=REVISION, help=f"of git, {REVISION} by default")
    parser.add_argument("--shapes", type=_shapes, default=SHAPES, metavar="SHAPES")
    parser.add_argument("--margin", type=float, default=MARGIN, help="0.1: up to a tenth slower")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each shape, about")
    parser.add_argument("--rounds", type=int, default=ROUNDS[0], help="for each shape, at least")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser


def _shapes(text: str) -> tuple[str, ...]:
    shapes = tuple(text.split(","))
    for shape in shapes:
        try:
            small_rows(shape) or Case.parse(shape)
        except ValueError as error:
            raise argparse.ArgumentTypeError(
                f"expected shapes such as small:8, 512x1536 or gsm8k:512, found {shape!r}"
            ) from error
    return shapes


def small_rows(shape: str) -> int:
    """The rows of ``small:8``; 0 for shapes of another kind."""
    return int(shape.removeprefix(SMALL)) if shape.startswith(SMALL) else 0


# --- the two versions --------------------------------------------------------------------------


def take_revision(revision: str, to: Path) -> None:
    """What the library is built from, out of the git history.

    Raises:
        SystemExit: This is no git checkout, or it lacks the revision.
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
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, to / name, ignore=ignored)
        else:
            shutil.copy(path, to / name)


def build(source: Path) -> None:
    """Compile the extensions beside their sources.

    Raises:
        SystemExit: One of them was not compiled. The build itself takes them as optional.
    """
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    missing = [
        str(path.relative_to(source))
        for path in source.rglob("src/**/*.c")
        if not [*path.parent.glob(f"{path.stem}.*so")]
    ]
    if built.returncode or missing:
        what = f"not compiled: {', '.join(missing)}" if missing else "not built"
        raise SystemExit(f"{source.name}: {what}\n{built.stdout}\n{built.stderr}")


class Version:
    """The other end of a `before_worker`."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer of the worker's method of that name."""
        self.post(what, *arguments)
        return self.answer()

    def post(self, what: str, *arguments: Any) -> None:
        """Let the worker begin; `answer` waits for what it says.

        Raises:
            SystemExit: The process died.
        """
        questions = self._process.stdin
        assert questions is not None
        try:
            questions.write(json.dumps({"ask": what, "arguments": arguments}) + "\n")
            questions.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def answer(self) -> Any:
        """The answer to the last `post`.

        Raises:
            SystemExit: The process died.
        """
        answers = self._process.stdout
        assert answers is not None
        line = answers.readline()
        if not line:
            raise self._died()
        return json.loads(line)

    def _died(self) -> SystemExit:
        return SystemExit(f"{self.name}: the process died; its error is above")


@contextmanager
def running(sources: Mapping[str, Path]) -> Iterator[list[Version]]:
    """Processes that have imported the libraries built in these directories.

    Raises:
        SystemExit: One has imported another library.
    """
    with ExitStack() as stack:
        both = [Version(name, stack.enter_context(_started(src))) for name, src in sources.items()]
        for each, imported in _both(both, "version").items():
            if not Path(imported).is_relative_to(sources[each]):
                raise SystemExit(f"{each}: imported {imported}, expected {sources[each]}/src")
        yield both  # on leaving, their pipes are closed, and so they end


def _started(source: Path) -> subprocess.Popen[str]:
    paths = [str(source / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.before_worker"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _both(both: Sequence[Version], what: str, *arguments: Any) -> dict[str, Any]:
    """The answers of all to one question, on which they work at the same time."""
    for each in both:
        each.post(what, *arguments)
    return {each.name: each.answer() for each in both}


# --- comparing ---------------------------------------------------------------------------------


def different_values(sources: Mapping[str, Path]) -> dict[str, Any]:
    """How many values were compared, and the names of those that differ."""
    with running(sources) as both:
        found = _both(both, "values")
    errors = [name for name, digest in found["new"].items() if ":" in digest]
    return {
        "compared": len(found["new"]),
        "errors": len(errors),
        "names": differing(found["old"], found["new"]),
    }


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The names under which two mappings do not hold the same."""
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def compare(shape: str, sources: Mapping[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Both versions over one batch; measured again while it seems slower.

    Returns:
        What goes into the JSON; ``{"shape", "skipped"}`` where it is too large.
    """
    rows = small_rows(shape)
    if not rows:
        lengths = Case.parse(shape).lengths()
        reason = too_large(Case.parse(shape), len(lengths) * int(lengths.max()))
        if reason:
            return {"shape": shape, "skipped": reason}
    batch = make_small_batch(rows) if rows else make_batch(lengths)
    attempts: list[dict[str, Any]] = []
    with shared_directory() as directory:
        batch.save(directory)
        tokens = batch.tokens
        del batch
        while not attempts or (len(attempts) < ATTEMPTS and slower(best(attempts), options.margin)):
            attempts.append(measure(directory, sources, options.seconds, options.rounds))
    names = sorted({name for attempt in attempts for name in attempt["different"]})
    return {
        "shape": shape,
        "tokens": tokens,
        "attempts": len(attempts),
        "different": names,
        "trips": best(attempts),
    }


def best(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each trip, the attempt of the lowest ratio."""
    return {
        side: min((each["trips"][side] for each in attempts), key=lambda trip: trip["ratio"])
        for side in MAKERS
    }


def slower(trips: Mapping[str, Mapping[str, float]], margin: float) -> list[str]:
    """The trips that take longer than before by more than the margin."""
    return [side for side, trip in trips.items() if trip["ratio"] > 1 + margin]


def measure(
    directory: Path, sources: Mapping[str, Path], seconds: float, least_rounds: int
) -> dict[str, Any]:
    """Milliseconds of both versions over the batch in a directory, and what they differ in.

    Raises:
        SystemExit: A trip did not give back what was put in.
    """
    with running(sources) as both:
        _both(both, "open", str(directory))
        digests = _both(both, "digests")
        calls = {side: _calls(both, side) for side in MAKERS}
        ms: dict[str, dict[str, list[float]]] = {side: {"old": [], "new": []} for side in MAKERS}
        order, start, done = random.Random(0), time.perf_counter(), 0
        while done < least_rounds or (done < ROUNDS[1] and time.perf_counter() - start < seconds):
            for side in order.sample(list(MAKERS), len(MAKERS)):
                for each in order.sample(both, len(both)):
                    ms[side][each.name].append(_turn(each, side, calls[side]))
            done += 1
    return {
        "different": differing(digests["old"], digests["new"]),
        "trips": {side: _summary(found) for side, found in ms.items()},
    }


def _calls(both: Sequence[Version], side: str) -> int:
    """How many trips make a turn: by a first turn of each version, which also warms them up."""
    shortest = min(_turn(each, side, CALLS[0]) for each in both)
    return max(CALLS[0], min(int(TURN_MS / shortest), CALLS[1]))


def _turn(each: Version, side: str, calls: int) -> float:
    answer: dict[str, Any] = each.ask("turn", side, calls)
    if answer["wrong"]:
        raise SystemExit(f"VERIFICATION FAILED: {each.name}, {side}: {answer['wrong']}")
    ms: list[float] = answer["ms"][1:]
    return statistics.median(ms)


def _summary(ms: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ratios = [new / old for new, old in zip(ms["new"], ms["old"], strict=True)]
    found = spread(ratios)
    return {
        "old_ms": statistics.median(ms["old"]),
        "new_ms": statistics.median(ms["new"]),
        "ratio": found["ms"],
        "q1": found["q1"],
        "q3": found["q3"],
        "rounds": len(ratios),
    }


# --- text --------------------------------------------------------------------------------------


def failures(report: Mapping[str, Any]) -> list[str]:
    """A line for each trip that is slower and for each value that differs."""
    lines = [f"DIFFERENT: {name}" for name in report["different"]["names"]]
    for found in report["shapes"]:
        if "skipped" in found:
            continue
        lines += [f"DIFFERENT: {found['shape']}: {name}" for name in found["different"]]
        for side in slower(found["trips"], report["margin"]):
            ratio = found["trips"][side]["ratio"]
            lines.append(f"SLOWER: {found['shape']}, {side}: {ratio:.2f} times the time of before")
    return lines


def text_of_values(found: Mapping[str, Any]) -> str:
    return (
        f"{found['compared']} values compared, {found['errors']} of them errors: "
        f"{len(found['names'])} differ\n\n"
        f"{'shape':16}{'trip':10}{'old ms':>10}{'new ms':>10}{'new/old':>9}  quartiles"
    )


def text(found: Mapping[str, Any], margin: float) -> str:
    """A line for each trip of one shape."""
    if "skipped" in found:
        return f"{found['shape']:16}skipped: {found['skipped']}"
    late = slower(found["trips"], margin)
    return "\n".join(
        f"{found['shape']:16}{side:10}{trip['old_ms']:10.3f}{trip['new_ms']:10.3f}"
        f"{trip['ratio']:9.2f}  {trip['q1']:.2f} to {trip['q3']:.2f}"
        f"{'  SLOWER' if side in late else ''}"
        for side, trip in found["trips"].items()
    )


if __name__ == "__main__":
    sys.exit(main())
