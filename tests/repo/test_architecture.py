"""What docs/architecture.md names exists where the page says."""

import ast
import functools
import re
import runpy

import pytest

from tests.helpers import ROOT

TEXT = (ROOT / "docs/architecture.md").read_text()
PROSE, _, TABLE = TEXT.partition("<!-- generated: modules -->")
SOURCE = ROOT / "src/jagcodec"
FILE = r"`((?:[\w.]+/)*\w+\.(?:py|c|md|toml))`"
# `file`: `name`, `name`   and   `name`, `name` in `file`   and   `name` (`file`)
CLAIMS = [
    (file, name)
    for pattern, first in (
        (rf"{FILE}: ((?:`\w+`(?:, )?)+)", True),
        (rf"((?:`\w+`(?:, )?)+)(?: in | \(){FILE}", False),
    )
    for found in re.finditer(pattern, PROSE)
    for file, names in [found.groups() if first else found.groups()[::-1]]
    for name in re.findall(r"`(\w+)`", names)
]


def path_of(name):
    below = SOURCE / name
    return below if below.exists() else ROOT / name


@functools.cache
def defined_in(path):
    """Names of functions, classes, methods and assignments of a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("name", sorted(set(re.findall(FILE, PROSE))))
def test_files_exist(name):
    assert path_of(name).exists()


def test_the_claims_are_found():
    assert len(CLAIMS) > 50
    assert ("wire/spec.py", "TORCH_DTYPES") in CLAIMS
    assert ("wire/header.py", "read_header") in CLAIMS


@pytest.mark.parametrize(("file", "name"), sorted(set(CLAIMS)))
def test_names_are_defined_in_their_files(file, name):
    assert name in defined_in(path_of(file))


def test_every_other_identifier_is_in_the_source():
    """Words in backticks outside the generated table."""
    prose = re.sub(r"```.*?```", "", PROSE, flags=re.S)
    words = set(re.findall(r"`(\w+)`", prose))
    source = " ".join(path.read_text() for path in SOURCE.rglob("*.py"))
    known = set(re.findall(r"\w+", source)) | defined_in(ROOT / "tests/repo/test_house.py")
    assert words - known == set()


def test_the_table_of_modules_is_that_of_the_docstrings():
    names = runpy.run_path(str(ROOT / "docs/modules.py"))
    assert names["rewritten"](TEXT) == TEXT, "run: python docs/modules.py"


def test_the_table_has_every_module():
    listed = set(re.findall(r"^\| (?:\*\*)?`([\w./]+)`", TABLE, re.M))
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
    private = {"__init__.py", "__main__.py", "_version.py"}
    expected = {name for name in files if "__init__" not in name and not name.startswith("cli/")}
    assert {name for name in listed if name.endswith(".py")} == expected - private
