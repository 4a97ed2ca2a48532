"""One definition per name, and a caller for each public one."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import jagcodec
from tests.helpers import ROOT

SOURCE = Path(jagcodec.__file__).parent

# Functions that several modules of one package have, because they are one interface.
INTERFACES = {
    "rowcopy": {"gather", "scatter", "pad", "ends"},  # row kernels
    "cells": {"fill", "pack"},
    "cli": {"add_to", "run"},  # commands
    "integrations": {"rows_of", "reducers"},  # engines; what Ray writes
}

# These keep the names and the meanings of NeMo-RL's codec, which calls them.
OF_NEMO_RL = {
    *("to_nested_by_length", "maybe_pack_jagged", "pack_per_token_field", "stack_or_nest"),
    *("response_from_nested", "unwrap_wire_stripped_payload", "pack_jagged_fields", "materialize"),
}


def homes(definitions):
    """Where each name is defined, if it is defined more than once."""
    found = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE)
        for name in definitions(ast.parse(path.read_text())):
            one = name in INTERFACES.get(module.parts[0], ())
            found[name].add(module.parts[0] if one else str(module))
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def classes(tree):
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def public_functions(tree):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, functions)}
    return {name for name in names if not name.startswith("_")}


def test_no_two_classes_have_the_same_name():
    assert homes(classes) == {}


def test_no_two_public_functions_have_the_same_name():
    assert homes(public_functions) == {}


def code_of_callers():
    """The integrations, the commands, the examples, and the blocks of the docs that are run."""
    for folder in (SOURCE / "integrations", SOURCE / "cli", ROOT / "examples"):
        yield from (path.read_text() for path in folder.rglob("*.py"))
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        yield from re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


def names_used(code):
    """What is imported from the library, and attributes of ``jagcodec`` itself."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "jagcodec":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jagcodec":
            yield node.attr


def test_every_public_name_has_a_caller_outside_the_library():
    used = {name for code in code_of_callers() for name in names_used(code)}
    public = {*vars(jagcodec)["__all__"]} - {"__version__"}
    assert public - OF_NEMO_RL - used == set()
