"""The benchmark of verl's training step, small, on a real Ray and TransferQueue."""

import json
import os

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/verl.md")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

from benchmarks import verl_v1
from benchmarks.machine import run_python

pytestmark = pytest.mark.cluster

# In a round of two prompts, 16 rows: what the workers get, what the driver gets, and 32 rows of
# NeMo-RL, got by shard and as a whole.
CELLS = 16 * (24 + 27 + 30) + 16 * (5 + 2 + 6 + 7) + 32 * (5 + 10)
ROUNDS = 2  # one of them to warm up


def test_every_cell_of_both_ways_is_compared(tmp_path, capsys):
    file = tmp_path / "verl.json"
    assert verl_v1.main(["--prompts=2", "--rounds=1", "--turns=1", f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    assert report["cells"] == {"stock": ROUNDS * CELLS, "jagcodec": ROUNDS * CELLS}
    assert report["unit"]["stock"] == "SimpleStorageUnit"
    lines = report["lines"]
    step = {name: by_way["stock"]["median"] for name, by_way in lines.items() if ":" not in name}
    assert step.pop("step") == pytest.approx(
        sum(ms for name, ms in step.items() if name.endswith((" workers", " driver")))
        + sum(step[name] for name in ("submit", "rollout", "sample", "clear"))
    )
    assert all(by_way["stock"]["median"] > 0 for by_way in lines.values())
    assert "NeMo-RL, put and get" in capsys.readouterr().out


WRONG = """
import transfer_queue

stock = transfer_queue.kv_batch_get

def wrong(**arguments):
    data = stock(**arguments)
    data["response_mask"].values()[-1] += 1
    return data

transfer_queue.kv_batch_get = wrong
"""


def test_a_cell_that_differs_ends_the_run(tmp_path, monkeypatch, capfd):
    """A turn whose driver imports a module of this code."""
    (tmp_path / "backend.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SystemExit, match="status 1"):
        run_python(verl_v1.SESSION, "backend", 2, 1)
    assert "old_log_prob driver: column 'response_mask'" in capfd.readouterr().err
