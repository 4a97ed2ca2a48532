"""The demo runs, and finds a cell that arrived changed."""

import subprocess
import sys

import pytest

from examples import demo
from jagcodec import materialize
from tests.helpers import ROOT


def test_the_demo_compares_every_cell():
    command = [sys.executable, "-W", "error", "-m", "examples.demo"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "cells are identical." in run.stdout


def test_a_cell_that_arrived_changed_is_found(monkeypatch):
    def damaged(frames, **options):
        batch = materialize(frames, **options)
        batch["input_ids"][7, 0] += 1
        return batch

    monkeypatch.setattr(demo, "materialize", damaged)
    with pytest.raises(AssertionError, match="input_ids"):
        demo.main()
