"""Every benchmark runs on a tiny batch and verifies it, so that it cannot rot; nothing is timed."""

import json
import subprocess

import pytest
import torch

from benchmarks import before, bench, guard, measure, planes, rows
from benchmarks import bytes as saved
from benchmarks.shapes import lengths_of, make_batch
from benchmarks.sides import SIDES, missing
from benchmarks.trips import Runner
from tests.helpers import ROOT

BATCH = make_batch(lengths_of("16x64"))


@pytest.mark.parametrize("name", [name for name in SIDES if not missing(name)])
def test_a_side_brings_every_column_back(name):
    trip = Runner(SIDES[name](BATCH), BATCH).verified()
    assert trip.wire_bytes >= BATCH.valid_bytes
    assert trip.frames >= 1


@pytest.mark.slow
def test_bench(tmp_path, capsys):
    file = tmp_path / "bench.json"
    few = ["--shapes", "16x64", "gsm8k:8", "--only", "fused", "pickle", "pickle_oob"]
    assert bench.main(["--part", "trips", *few, "--seconds=0.01", f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert [trip["shape"] for trip in found["trips"]] == ["16x64", "gsm8k:8"]
    assert "jagged is faster" in capsys.readouterr().out


def test_small_messages_and_rows():
    small = rows.measure_small(0, rows=[2])
    assert all(count > 0 for count in small["functions"].values())
    parts = {**small["rows"], **rows.measure_rows(0, rows=16)}
    assert set(parts) == {"2", *rows.PARTS}
    ratios = [ratio for part in parts.values() for ratio in part["ratios"].values()]
    assert all(0 < each["lowest"] <= each["median"] <= each["highest"] for each in ratios)


def test_the_guard_finds_what_is_worse(capsys):
    assert guard.guard(0, shapes=["16x64"]) == 0  # nothing is stored of it
    stored = {"versions": guard.counted_with(), "calls": {"x": {"pack": 7}}}
    assert guard.more_calls(stored, {"x": {"pack": 8.0}}) == ["MORE CALLS: pack, x: 8, stored 7"]
    assert guard.more_calls(stored, {"x": {"pack": 7.0}}) == []
    times = {"ratios": {"x": {"pack": 2.0}}}
    assert guard.slower(times, {"x": {"pack": 3.1}})
    assert not guard.slower(times, {"x": {"pack": 2.9}})


def test_bytes(tmp_path):
    file = tmp_path / "bytes.json"
    assert saved.main(["--seconds=0", "--images=2", "--shrink=64", f"--json={file}"]) == 0
    found = json.loads(file.read_text())["batches"]
    sizes = {
        batch: {option: own["bytes"] for option, own in each["options"].items()}
        for batch, each in found.items()
    }
    assert sizes["verl"]["narrow, elide"] < sizes["verl"]["none"] / 5
    for kind in ("jagged", "one", "equal"):
        assert sizes[f"images, {kind}"]["elide"] < sizes[f"images, {kind}"]["none"] / 4
    for batch in ("noise, 512 x 1536", "noise, 8 x 64", "noise, wide ids"):
        assert sizes[batch]["narrow, elide"] == sizes[batch]["narrow"]


@pytest.mark.slow
def test_planes():
    assert planes.main(["--only=torch.distributed", "--rounds=1", "--shape=16x64"]) == 0


@pytest.mark.slow
def test_a_revision_runs_next_to_the_working_tree(tmp_path):
    inside = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True)
    if inside.returncode:
        pytest.skip("not a git checkout")
    file = tmp_path / "before.json"
    asked = ["--revision=HEAD", "--shapes=small:1", "--seconds=0", f"--json={file}"]
    assert before.main(asked) == 0
    assert json.loads(file.read_text())["compared"] > 500


@pytest.mark.parametrize("change", ["bit", "dtype", "missing"])
def test_a_result_that_differs_ends_the_run(change):
    columns = {name: column.clone() for name, column in BATCH.columns.items()}
    measure.same_columns(columns, BATCH.columns, "a trip")
    if change == "bit":
        columns["advantages"][columns["advantages"] == 0] = -0.0
    elif change == "dtype":
        columns["advantages"] = columns["advantages"].to(torch.float64)
    else:
        del columns["advantages"]
    with pytest.raises(SystemExit, match="VERIFICATION FAILED: a trip: column"):
        measure.same_columns(columns, BATCH.columns, "a trip")
