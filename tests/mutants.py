"""How many small faults in some files of `src` the tests notice.

    python -m tests.mutants src/jagcodec/batch/join.py --tests tests/batch/test_joined.py

draws mutants of the files, always the same of the same source, applies one after the other to a
copy of `src`, and runs the tests until one fails. ``--suite`` is another checkout whose tests run
against this checkout's source, to compare two suites.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 200

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
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    for node in nodes_that_run(ast.parse(text)):
        fault = changed(node)
        if fault is not None and isinstance(node, ast.expr):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            old = text.encode()[start:end].decode()
            made = ast.unparse(ast.fix_missing_locations(fault))
            yield Mutant(path, node.lineno, start, old, f"({made})")


def verdict_of(mutant: Mutant, tests: Sequence[str], suite: Path, source: Path) -> str:
    """``killed``, ``gave up`` after `SECONDS`, or ``survived``."""
    path = source / mutant.file.relative_to(ROOT / "src")
    data = path.read_bytes()
    end = mutant.start + len(mutant.old.encode())
    path.write_bytes(data[: mutant.start] + mutant.new.encode() + data[end:])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=suite, env=environment, timeout=SECONDS, capture_output=True
        )
    except subprocess.TimeoutExpired:
        return "gave up"
    finally:
        path.write_bytes(data)
    return "killed" if done.returncode else "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="of src/, whose mutants are tried")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders")
    parser.add_argument("--count", type=int, default=25, help="of mutants")
    parser.add_argument("--suite", type=Path, default=ROOT, help="the checkout whose tests run")
    options = parser.parse_args()
    mutants = [mutant for file in options.files for mutant in mutants_of(file.resolve())]
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in random.Random(0).sample(mutants, min(options.count, len(mutants))):
            verdict = verdict_of(mutant, options.tests, options.suite, source)
            verdicts[verdict] += 1
            place = f"{mutant.file.name}:{mutant.line}"
            print(f"{verdict}: {place}: {mutant.old} -> {mutant.new}", flush=True)
    print(dict(verdicts))


if __name__ == "__main__":
    main()
