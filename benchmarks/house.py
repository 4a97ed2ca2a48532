"""How large the library is and how deep its imports go: ``python -m benchmarks.house``.

    python -m benchmarks.house [--source DIRECTORY] [--json FILE]

Lines are those of every ``.py`` and ``.c`` file under the source directory, blank ones included.
An import chain is a list of files of which each imports the next as it is loaded: imports inside
functions and under ``TYPE_CHECKING`` do not count, and ``jagcodec/__init__.py``, which re-exports
everything, is not part of a chain. Two chains are printed: the longest one of the engine, that is
without what stands on top of it (`TOPS`), and the longest one of all.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = "jagcodec"
SOURCE = Path(__file__).parents[1] / "src"
TOPS = ("integrations", "testing", "demo", "cli", "__main__")
ASKED = {"python": 11_600, "c": 700, "chain": 10}

Imports = Mapping[str, set[str]]  # by module, the modules it imports as it is loaded


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.house", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--source", type=Path, default=SOURCE, help="another src/ than this one's")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    found = measure(options.source)
    print(text(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(source: Path) -> dict[str, Any]:
    """Lines and chains of the package under a source directory."""
    files = modules(source)
    graph = imports(files)
    tops = tuple(f"{PACKAGE}.{top}" for top in TOPS)
    engine = {
        module: {each for each in below if not each.startswith(tops)}
        for module, below in graph.items()
        if not module.startswith(tops)
    }
    chains = {"engine_chain": longest_chain(engine), "chain": longest_chain(graph)}
    return {
        "lines": {"python": lines(source, "*.py"), "c": lines(source, "*.c")},
        "files": {"python": len([*source.rglob("*.py")]), "c": len([*source.rglob("*.c")])},
        **{
            what: [str(files[module].relative_to(source / PACKAGE)) for module in chain]
            for what, chain in chains.items()
        },
        "asked": ASKED,
    }


def lines(source: Path, pattern: str) -> int:
    """Lines of all files of this name."""
    return sum(path.read_bytes().count(b"\n") for path in source.rglob(pattern))


def modules(source: Path) -> dict[str, Path]:
    """The files of the package, by the full names of their modules."""
    return {module_name(path, source): path for path in (source / PACKAGE).rglob("*.py")}


def imports(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """What each module imports as it is loaded, by the full names of modules."""
    graph = {}
    for module, path in files.items():
        loaded = set(_imported(ast.parse(path.read_text(encoding="utf-8")), files))
        graph[module] = loaded - {module, PACKAGE}
    graph.pop(PACKAGE, None)
    return graph


def module_name(path: Path, source: Path) -> str:
    """`jagcodec.wire` of ``jagcodec/wire/__init__.py``, `jagcodec.errors` of its file."""
    name = ".".join(path.relative_to(source).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _imported(node: ast.AST, files: Mapping[str, Path]) -> Iterator[str]:
    """Modules among `files` that a syntax tree imports as it is loaded."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            base = child.module or ""
            for alias in child.names:
                inner = f"{base}.{alias.name}"
                yield from {inner if inner in files else base} & files.keys()
        elif isinstance(child, ast.Import):
            yield from {alias.name for alias in child.names} & files.keys()
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not typing_only:
                yield from _imported(child, files)


def longest_chain(graph: Imports) -> list[str]:
    """The longest path through the graph, from the top down; of equal ones the first by name.

    Raises:
        ValueError: The imports form a cycle, so that there is no longest path.
    """
    known: dict[str, list[str]] = {}

    def chain(module: str, above: tuple[str, ...]) -> list[str]:
        if module in above:
            raise ValueError(f"import cycle: {' > '.join((*above, module))}")
        if module not in known:
            below = [chain(each, (*above, module)) for each in sorted(graph[module])]
            known[module] = [module, *max(below, key=len, default=[])]
        return known[module]

    return max((chain(module, ()) for module in sorted(graph)), key=len, default=[])


def text(found: Mapping[str, Any]) -> str:
    """Figures beside what is asked, and the chains file by file."""
    asked = found["asked"]
    rows = [
        ("lines of Python", f"{found['lines']['python']:,}", f"about {asked['python']:,}"),
        ("lines of C", f"{found['lines']['c']:,}", f"about {asked['c']:,}"),
        ("files of Python", found["files"]["python"], ""),
        ("longest import chain of the engine", len(found["engine_chain"]), asked["chain"]),
        ("the same with what stands on top", len(found["chain"]), ""),
    ]
    head = f"{'':36}{'found':>10}{'asked':>16}"
    table = [f"{what:36}{number:>10}{bar!s:>16}" for what, number, bar in rows]
    chains = [
        f"\n{title}:\n  " + "\n  > ".join(found[key])
        for title, key in (("engine", "engine_chain"), ("everything", "chain"))
    ]
    return "\n".join([head, *table, *chains])


if __name__ == "__main__":
    sys.exit(main())
