"""How many small faults in `src` the tests notice.

``python -m tests.mutants draw`` draws mutants of four packages, always the same of the same source,
and writes them to a file. ``run`` applies one after the other to a copy of `src`, runs the tests of
its package until one fails, and appends the verdict to a file, so that it can go on after a break::

    python -m tests.mutants draw
    python -m tests.mutants run --suite . --verdicts build/mutants-now.jsonl

`--suite` is a checkout whose tests run against this checkout's source: of an older commit, to
compare two suites on one source.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("wire", "ragged", "pack", "batch")
DRAWN = ROOT / "tests" / "mutants.json"
COUNT = 120
SEED = 20
SECONDS = 90

# Packages whose tests are in the folder of another one.
TESTS_OF = {"ragged": ("rowcopy", "pack", "batch")}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


def changed(node: ast.AST) -> ast.AST | None:
    """A node with one fault in it; None if this kind of node is left alone."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        return ast.Compare(node.left, ops, node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + 1)
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


def mutants_of(path: Path) -> list[dict[str, Any]]:
    """Every mutant of a file: where it is, the source there, and what takes its place."""
    text = path.read_text()
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    data, found = text.encode(), []
    for node in nodes_that_run(ast.parse(text)):
        fault = changed(node)
        if fault is not None and isinstance(node, ast.expr):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(ast.fix_missing_locations(fault))
            old = data[start:end].decode()
            place = {"file": str(path.relative_to(ROOT)), "line": node.lineno, "start": start}
            found.append({**place, "old": old, "new": f"({new})"})
    return found


def draw() -> None:
    """Write the mutants to `DRAWN`, as many of each package as its share of the source."""
    everything = [
        mutant
        for package in PACKAGES
        for path in sorted((ROOT / "src" / "jagcodec" / package).glob("*.py"))
        for mutant in mutants_of(path)
    ]
    drawn = random.Random(SEED).sample(everything, COUNT)
    DRAWN.write_text("[\n" + ",\n".join(map(json.dumps, drawn)) + "\n]\n")
    print(f"{COUNT} of {len(everything)} mutants: {DRAWN.relative_to(ROOT)}")


def verdict_of(mutant: dict[str, Any], suite: Path, source: Path) -> str:
    """``killed``, ``gave up`` after `SECONDS`, or ``survived``."""
    path = source / Path(mutant["file"]).relative_to("src")
    data = path.read_bytes()
    old, start = mutant["old"].encode(), mutant["start"]
    if data[start : start + len(old)] != old:
        raise SystemExit(f"{mutant['file']} has changed since the mutants were drawn: draw again")
    package = path.parent.name
    folders = [f"tests/{name}" for name in TESTS_OF.get(package, (package,))]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", *folders]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    path.write_bytes(data[:start] + mutant["new"].encode() + data[start + len(old) :])
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"],
            cwd=suite,
            env=environment,
            timeout=SECONDS,
            capture_output=True,
        )
    except subprocess.TimeoutExpired:
        return "gave up"
    finally:
        path.write_bytes(data)
    return "killed" if done.returncode else "survived"


def run(suite: Path, verdicts: Path) -> None:
    """Try each mutant that has no verdict yet, and print how many the tests noticed."""
    mutants = json.loads(DRAWN.read_text())
    verdicts.parent.mkdir(parents=True, exist_ok=True)
    lines = verdicts.read_text().splitlines() if verdicts.exists() else []
    found = {one["mutant"]: one["verdict"] for one in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for i, mutant in enumerate(mutants):
            if i in found:
                continue
            found[i] = verdict_of(mutant, suite, source)
            with verdicts.open("a") as file:
                file.write(json.dumps({"mutant": i, "verdict": found[i], **mutant}) + "\n")
            print(f"{i} {found[i]}: {mutant['file']}:{mutant['line']}", flush=True)
    print(dict(Counter(found.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw", help="write the mutants of this source to a file")
    runs = commands.add_parser("run", help="try them")
    runs.add_argument("--suite", type=Path, default=ROOT, help="the checkout whose tests run")
    runs.add_argument("--verdicts", type=Path, required=True, help="the file to append to")
    options = parser.parse_args()
    if options.command == "draw":
        draw()
    else:
        run(options.suite.resolve(), options.verdicts)


if __name__ == "__main__":
    main()
