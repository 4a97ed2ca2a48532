"""Every benchmark and the demo run and compare their batches, so that they cannot rot."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import bench, measure, planes, rows
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
def test_bench_and_planes(tmp_path):
    file = tmp_path / "bench.json"
    few = ["--shapes", "16x64", "gsm8k:8", "--only", "fused", "pickle", "pickle_oob"]
    assert bench.main(["--part", "trips", *few, "--seconds=0.01", f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert [trip["shape"] for trip in found["trips"]] == ["16x64", "gsm8k:8"]
    assert planes.main(["--only=torch.distributed", "--rounds=1", "--shape=16x64"]) == 0


def test_small_messages_and_rows():
    small = rows.measure_small(0, rows=[2])
    assert {*small["rows"], *rows.measure_rows(0, rows=16)} == {"2", *rows.PARTS}


def test_bytes(tmp_path):
    file = tmp_path / "bytes.json"
    assert saved.main(["--seconds=0", "--images=2", "--shrink=64", f"--json={file}"]) == 0
    batches = json.loads(file.read_text())["batches"]
    options = batches["verl"]["options"]
    assert options["narrow, elide"]["bytes"] < options["none"]["bytes"] / 5


def test_a_result_that_differs_ends_the_run():
    columns = {name: column.clone() for name, column in BATCH.columns.items()}
    measure.same_columns(columns, BATCH.columns, "a trip")
    columns["advantages"][columns["advantages"] == 0] = torch.tensor(-0.0)
    with pytest.raises(SystemExit, match="VERIFICATION FAILED: a trip: column"):
        measure.same_columns(columns, BATCH.columns, "a trip")


def test_the_demo_compares_every_cell():
    command = [sys.executable, "-W", "error", "-m", "examples.demo"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "cells are identical." in run.stdout
