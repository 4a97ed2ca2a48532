"""The suite gives the same result every time, and hides no broken file."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.fixture
def run(tmp_path):
    """The suite's settings on a file of tests."""
    configuration = ["--config-file", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider"]

    def run(code, *options, **environment):
        (tmp_path / "test_it.py").write_text(code)
        return subprocess.run(
            [sys.executable, "-m", "pytest", *configuration, *plugins, *options, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )

    return run


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
def test_every_run_draws_the_same_and_a_search_does_not(run, tmp_path):
    runs = [
        ((), {"PYTHONHASHSEED": "1"}),
        ((), {"PYTHONHASHSEED": "2", "CI": "1", "FIRST": "1"}),
        (("--hypothesis-profile=search",), {"JAGCODEC_EXAMPLES": "150"}),
    ]
    drawn = []
    for i, (options, environment) in enumerate(runs):
        file = tmp_path / f"drawn{i}"
        done = run(DRAWS, *options, DRAWN=str(file), **environment)
        assert done.returncode == 0, done.stdout
        drawn.append(file.read_text().splitlines())
    assert len(drawn[0]) >= 100
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert len(drawn[2]) >= 150


def test_a_file_that_cannot_be_imported_is_an_error(run):
    done = run("import nothing_of_this_name\n")
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "No module named 'nothing_of_this_name'" in done.stdout


CHILD = """
import mmap, subprocess, sys
from jagcodec.memory import blocks

def test_child():
    code = "import sys; print(sys.flags.dev_mode, sys.warnoptions)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "False []\\n"
    assert blocks._keeps == hasattr(mmap, "MADV_FREE")
"""


def test_what_the_caller_set_for_python_reaches_no_test(run):
    done = run(CHILD, PYTHONWARNINGS="ignore", PYTHONDEVMODE="1", JAGCODEC_KEEP_BLOCKS="0")
    assert done.returncode == 0, done.stdout
