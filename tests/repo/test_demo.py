"""The demo runs, and finds a cell that arrived changed."""

import subprocess
import sys

import pytest

from examples import demo
from jagcodec import encode_fields, materialize
from tests.helpers import ROOT


def test_the_demo_compares_every_cell():
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    columns, lengths = demo.make_batch()
    # Six rectangles; sample_mask, input_lengths, rewards and message.
    cells = 6 * len(lengths) * int(lengths.max()) + 4 * len(lengths)
    assert f"All {cells:,} cells are identical." in run.stdout
    assert list(columns)[-1] == "message"


def test_a_changed_cell_is_found():
    sent, lengths = demo.make_batch(8)
    frames = encode_fields(sent, lengths=lengths, token_aligned_fields=demo.PER_TOKEN)
    found = materialize(frames, pad_value_dict={"input_ids": demo.PAD_ID})
    assert demo.compare(found, sent)
    found["message"][3]["tags"] = ["gsm8k"]
    with pytest.raises(ValueError, match="'message' arrived changed"):
        demo.compare(found, sent)
    found["input_ids"][7, 0] += 1
    with pytest.raises(ValueError, match="'input_ids' arrived changed"):
        demo.compare(found, sent)
