"""The demo runs, and finds a cell that arrived changed."""

import subprocess
import sys

import pytest

from examples import demo
from jagcodec import encode_fields, materialize
from tests.helpers import ROOT


def test_the_demo_compares_every_cell():
    command = [sys.executable, "-W", "error", "-m", "examples.demo"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "cells are identical." in run.stdout
    sent, lengths = demo.make_batch(8)
    frames = encode_fields(sent, lengths=lengths, token_aligned_fields=demo.PER_TOKEN)
    found = materialize(frames, pad_value_dict={"input_ids": demo.PAD_ID})
    assert demo.compare(found, sent)
    found["input_ids"][7, 0] += 1
    with pytest.raises(ValueError, match="'input_ids' arrived changed"):
        demo.compare(found, sent)
