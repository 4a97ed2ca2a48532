"""The suite gives the same result every time, and hides no broken file."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT


def pytest_in(directory, *options, **environment):
    """The suite's settings on the tests of another directory."""
    configuration = ["--config-file", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *configuration, *plugins, *options, str(directory)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


DRAWS = """
import os, random
import torch
from hypothesis import given, strategies as st
if "FIRST" in os.environ:
    import benchmarks.bytes  # its source is full of numbers
drawn = open(os.environ["DRAWN"], "w")

@given(st.lists(st.integers() | st.text() | st.floats()), st.randoms(use_true_random=False))
def test_draw(value, numbers):
    print(value, numbers.random(), random.random(), torch.rand(1), file=drawn)
"""


@pytest.mark.slow
def test_every_run_draws_the_same_and_a_search_does_not(tmp_path):
    (tmp_path / "test_draws.py").write_text(DRAWS)
    runs = [
        ((), {"PYTHONHASHSEED": "1"}),
        ((), {"PYTHONHASHSEED": "2", "CI": "1", "FIRST": "1"}),
        (("--hypothesis-profile=search",), {"JAGCODEC_EXAMPLES": "150"}),
    ]
    drawn = []
    for i, (options, environment) in enumerate(runs):
        file = tmp_path / f"drawn{i}"
        run = pytest_in(tmp_path, *options, DRAWN=str(file), **environment)
        assert run.returncode == 0, run.stdout
        drawn.append(file.read_text().splitlines())
    assert len(drawn[0]) >= 100
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert len(drawn[2]) >= 150


FAILS = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_small(number):
    assert number < 1000
"""


def test_a_search_prints_how_to_run_its_example_again(tmp_path):
    (tmp_path / "test_fails.py").write_text(FAILS)
    run = pytest_in(tmp_path, "--hypothesis-profile=search")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "number=1000" in run.stdout
    assert "@reproduce_failure(" in run.stdout


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    run = pytest_in(tmp_path)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, run.stdout
    assert "No module named 'nothing_of_this_name'" in run.stdout


CHILD = """
import mmap, subprocess, sys
from jagcodec.memory import blocks

def test_child():
    code = "import sys; print(sys.flags.dev_mode, sys.warnoptions)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "False []\\n"
    assert blocks._keeps == hasattr(mmap, "MADV_FREE")
"""


def test_what_the_caller_set_for_python_reaches_no_test(tmp_path):
    (tmp_path / "test_child.py").write_text(CHILD)
    run = pytest_in(tmp_path, PYTHONWARNINGS="ignore", PYTHONDEVMODE="1", JAGCODEC_KEEP_BLOCKS="0")
    assert run.returncode == 0, run.stdout
