"""The house: its rules, one test each, which anyone can recite."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import jagcodec

SOURCE = Path(jagcodec.__file__).parent

# From the ground up: each may import those before it.
LAYERS = (
    *("_version", "data", "errors", "_arguments", "memory", "rowcopy", "cells", "ragged"),
    *("wire", "pack"),
    *("stdlib", "batch", "types", "schema", "record"),
    *("testing", "integrations", "doctor", "cli", "__main__"),
)


@functools.cache
def trees():
    """Each module below the front door, by its name within the package: its syntax tree."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    del found["__init__"]
    return found


def imported(tree):
    """(full dotted name, import node) of every import in a module, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


@functools.cache
def arrows():
    """Which modules of the package each module imports."""
    found = {}
    for name, tree in trees().items():
        inner = {full.removeprefix("jagcodec.") for full, _ in imported(tree) if _is_ours(full)}
        found[name] = {_module(full) for full in inner} - {name, None}
    return found


def _is_ours(full):
    return full.split(".")[0] == "jagcodec"


def _module(full):
    """The module that a name is, or is in; None for a name of the front door."""
    while full and full not in trees():
        full = full.rpartition(".")[0]
    return full or None


def test_packages_import_downwards_only():
    for name, others in arrows().items():
        for other in others:
            layer, below = (LAYERS.index(module.split(".")[0]) for module in (name, other))
            assert below <= layer, f"{name} imports {other}, which is above it"


def test_no_two_files_import_each_other_by_any_way():
    assert from_the_ground_up()


def from_the_ground_up():
    """Every module after those that it imports; an error that names the circle if there is one."""
    return list(graphlib.TopologicalSorter(arrows()).static_order())


def test_the_longest_chain_of_imports_has_ten_files_or_fewer():
    """Of the library, on which the command line is built."""
    chains: dict[str, tuple[str, ...]] = {}
    for name in from_the_ground_up():
        below = [chains[other] for other in arrows()[name]]
        chains[name] = (name, *max(below, key=len, default=()))
    above = ("cli", "__main__")
    longest = max((c for c in chains.values() if c[0].split(".")[0] not in above), key=len)
    assert len(longest) <= 10, " -> ".join(longest)


def test_no_file_has_more_than_seven_hundred_lines():
    sizes = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {str(path): size for path, size in sizes.items() if size > 700} == {}


def test_integrations_are_imported_by_nothing_in_the_library():
    """The command line is built on the library."""
    for name, others in arrows().items():
        if not name.startswith(("integrations", "cli")):
            assert not {other for other in others if other.startswith("integrations")}, name


def test_private_torch_is_in_ragged_nested_alone_and_private_tensordict_in_non_tensor():
    private = {"torch": "ragged.nested", "tensordict": "ragged.non_tensor"}
    for name, tree in trees().items():
        dotted = {full for full, _ in imported(tree)}
        dotted |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for library, home in private.items():
            found = {x for x in dotted if re.match(rf"{library}(\.\w+)*\._[a-z]\w*", x)}
            assert name == home or not found, f"{name} uses {found}"


def test_the_header_needs_neither_torch_nor_numpy():
    code = "import jagcodec.wire.spec, jagcodec.wire.schema, jagcodec.wire.header"
    assert loaded_by(code, "torch", "numpy", "tensordict") == []


def test_extras_are_imported_only_when_asked_for():
    extras = (*("zmq", "ray", "transfer_queue", "verl", "PIL", "hypothesis", "zstandard"),)
    rooms = ("jagcodec.cli", "jagcodec.testing", "jagcodec.integrations")
    assert loaded_by("from jagcodec import *", *extras, *rooms) == []
    assert loaded_by("import jagcodec.integrations, jagcodec.cli", *extras) == []


def loaded_by(statement, *names):
    code = f"{statement}\nimport sys; print([n for n in {names!r} if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return ast.literal_eval(run.stdout)


def test_imports_are_absolute_and_errors_import_nothing_of_the_package():
    for name, tree in trees().items():
        relative = [n for _, n in imported(tree) if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, f"{name}: relative import"
    assert arrows()["errors"] == set()
