"""How many small faults in `src` the tests notice.

    python -m tests.mutants LOG

draws mutants of the rooms of the source, always the same of the same source, and applies one after
the other to a copy of `src`. For each it runs the everyday tests of that room until one fails, and
appends the verdict to the file LOG: started again, it goes on after the last of them. ``--files``
draws from some files alone. ``--suite`` is another checkout whose tests run against this
checkout's source, to compare two suites. ``--slow`` asks the tests marked slow, too, of a mutant
that the everyday tests do not notice.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 900  # for the tests of one mutant; those of `wire` take minutes
TESTS = {
    **{name: [name] for name in ("kernels", "wire", "produce", "forward")},
    **{f"wire/{name}": ["wire"] for name in ("stored", "write", "read", "many")},
    "train": ["train", "columns", "wire/test_joined.py"],
    "columns": ["columns", "train", "wire"],
    "rows": ["rows", "columns", "train", "forward", "produce"],
    "memory": ["memory", "columns", "train", "wire"],
}
"""Of each room, the folders and files whose tests run it."""

SOURCE = ROOT / "src/jagcodec"
EVERYDAY = "not slow and not cluster and not cuda"
SLOW = "slow and not cluster and not cuda"

OTHER: dict[type[ast.AST], Any] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult},
}


def changed(node: ast.AST) -> ast.AST | None:
    """A node with one fault in it; None if this kind of node is left alone."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        ops = [OTHER[type(node.ops[0])](), *node.ops[1:]]
        return ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(OTHER[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        return ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(not node.value if type(node.value) is bool else node.value + 1)
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    return None


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of annotations, f-strings and the arguments of exceptions."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Raise)):
                yield child
                yield from nodes_that_run(child)


class Mutant(NamedTuple):
    file: Path
    line: int
    start: int  # in bytes
    old: str
    new: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    text = path.read_text()
    ends = accumulate(len(line.encode()) for line in text.splitlines(keepends=True))
    lines = [0, *ends]
    for node in nodes_that_run(ast.parse(text)):
        fault = changed(node)
        if fault is not None and isinstance(node, ast.expr):
            start = lines[node.lineno - 1] + node.col_offset
            old = ast.get_source_segment(text, node) or ""
            made = ast.unparse(ast.fix_missing_locations(fault))
            yield Mutant(path, node.lineno, start, old, f"({made})")


def verdict_of(mutant: Mutant, suite: Path, source: Path, slow: bool) -> str:
    """Whether the tests notice a mutant: ``killed``, ``late`` (it may hang), or ``survived``.

    ``slow``: only tests marked slow notice it.
    """
    path = source / mutant.file.relative_to(ROOT / "src")
    data = path.read_bytes()
    end = mutant.start + len(mutant.old.encode())
    path.write_bytes(data[: mutant.start] + mutant.new.encode() + data[end:])
    room = str(mutant.file.parent.relative_to(SOURCE))
    tests = [f"tests/{place}" for place in TESTS[room]]
    try:
        if fail(EVERYDAY, tests, suite, source):
            return "killed"
        return "slow" if slow and fail(SLOW, tests, suite, source) else "survived"
    except subprocess.TimeoutExpired:
        return "late"
    finally:
        path.write_bytes(data)


NONE_CHOSEN = 5
"""The status of pytest where no test has these marks."""


def fail(marks: str, tests: list[str], suite: Path, source: Path) -> bool:
    """Whether one of these tests of `suite`, with these marks, fails with this source."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=suite, env=environment, timeout=SECONDS, capture_output=True)
    return done.returncode not in (0, NONE_CHOSEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path, help="the file of verdicts")
    parser.add_argument("--files", type=Path, nargs="+", help="of src/, instead of whole folders")
    parser.add_argument("--count", type=int, default=120, help="of mutants")
    parser.add_argument("--suite", type=Path, default=ROOT, help="the checkout whose tests run")
    parser.add_argument("--slow", action="store_true", help="ask the slow tests, too")
    options = parser.parse_args()
    folders = [SOURCE / name for name in TESTS]
    files = options.files or sorted(file for folder in folders for file in folder.glob("*.py"))
    mutants = [mutant for file in files for mutant in mutants_of(file.resolve())]
    known = options.log.read_text() if options.log.exists() else ""
    with tempfile.TemporaryDirectory() as folder, options.log.open("a") as log:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in random.Random(0).sample(mutants, min(options.count, len(mutants))):
            place = f"{mutant.file.parent.name}/{mutant.file.name}:{mutant.line}"
            words = " ".join(f"{place}: {mutant.old} -> {mutant.new}".split())
            if words not in known:
                verdict = verdict_of(mutant, options.suite, source, options.slow)
                print(f"{verdict} {words}", file=log, flush=True)
    print(dict(Counter(line.split()[0] for line in options.log.read_text().splitlines())))


if __name__ == "__main__":
    main()
