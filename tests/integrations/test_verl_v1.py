"""The benchmark of verl's training step, small, on a real Ray and TransferQueue."""

import json

import pytest
from tensordict import TensorDict

from jagcodec import stack_or_nest

pytest.importorskip("verl", reason="verl is not installed: see docs/verl.md")
pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")

from benchmarks import verl_v1
from benchmarks import verl_v1_session as session
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


def test_a_cell_that_differs_ends_the_run():
    phase, keys = "old_log_prob driver", [session.key_of(number) for number in range(2)]
    rows = [session.expected(key, phase) for key in keys]
    columns = {name: stack_or_nest([row[name] for row in rows]) for name in rows[0]}
    found = TensorDict(columns, [2])
    assert session.compare(found, keys, phase) == 2 * len(columns)
    found["response_mask"].values()[-1] += 1
    with pytest.raises(ValueError, match=f"{phase}: column 'response_mask': {keys[1]}: expected "):
        session.compare(found, keys, phase)
    with pytest.raises(SystemExit, match="status 1"):
        run_python("raise ValueError")
