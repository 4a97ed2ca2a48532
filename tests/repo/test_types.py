"""What mypy makes of calls; `make check` asks pyright for the type of every public symbol."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jagcodec
from tests.helpers import ROOT

CALLS = ROOT / "tests" / "typing" / "calls.py"
pytestmark = pytest.mark.slow


def mypy(file):
    """What mypy says of a file, under the settings of the project."""
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", file],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(Path(jagcodec.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert not run.stderr
    return run.stdout.splitlines()


def refused(lines):
    """(line, code) of every error."""
    found = (re.fullmatch(r".*?\.py:(\d+): error: .*\[([a-z-]+)\]", line) for line in lines)
    return {(int(match[1]), match[2]) for match in found if match}


def test_calls_return_what_they_say_and_wrong_ones_are_refused():
    assert mypy(CALLS) == []


def test_every_wrong_call_is_refused_for_the_reason_that_it_names(tmp_path):
    """The same the other way round: without the comments each of them is an error."""
    text = CALLS.read_text()
    expected = {
        (number, code)
        for number, line in enumerate(text.splitlines(), 1)
        for match in [re.search(r"# type: ignore\[(.*)\]$", line)]
        if match
        for code in match[1].split(", ")
    }
    assert len(expected) > 30
    bare = tmp_path / "bare.py"
    bare.write_text(re.sub(r"  # type: ignore\[.*\]$", "", text, flags=re.MULTILINE))
    assert refused(mypy(bare)) == expected
