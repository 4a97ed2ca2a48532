"""Every benchmark and the demo run and compare their batches, so that they cannot rot."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import (
    before,
    before_values,
    bench,
    experts,
    gpu,
    measure,
    operations,
    packing,
    planes,
    report,
    rows,
)
from benchmarks import bytes as saved
from benchmarks.loop import loop
from benchmarks.shapes import lengths_of, make_batch
from benchmarks.sides import SIDES, missing
from benchmarks.trips import Runner
from jagcodec.memory import blocks
from tests.device import KIND, install
from tests.helpers import ROOT

BATCH, LARGE = (make_batch(lengths_of(shape)) for shape in ("16x64", "512x458"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SIDES if not missing(name)])
def test_a_side_brings_every_column_back(name):
    for trip in Runner(SIDES[name](BATCH), BATCH).turn():
        assert trip.wire_bytes >= BATCH.valid_bytes
        assert trip.frames >= 1


def test_trips_in_a_loop_take_no_new_memory(monkeypatch):
    runner = Runner(SIDES["fused"](LARGE), LARGE)
    runner.turn()
    taken, new = [], blocks._map_pages
    monkeypatch.setattr(blocks, "_map_pages", lambda size: taken.append(size) or new(size))
    runner.turn()
    assert taken == []


@pytest.mark.slow
def test_bench_and_planes(tmp_path):
    file = tmp_path / "bench.json"
    few = ["--shapes", "16x64", "gsm8k:8", "--only", "fused", "pickle", "pickle_oob"]
    assert bench.main(["--part", "trips", *few, "--seconds=0.01", f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert [trip["shape"] for trip in found["trips"]] == ["16x64", "gsm8k:8"]
    assert planes.main(["--only=torch.distributed", "--rounds=1", "--shape=16x64"]) == 0


def test_a_run_of_some_planes_keeps_the_others_and_has_its_own_head():
    head = dict.fromkeys(("made", "command", "commit", "src", "machine", "versions"), "old")
    way = {"stock": {"ms": {"put": 1.0, "get": 2.0}, "bytes": {"put": 10, "get": 20}}}
    first = {**head, "planes": {"ray": way, "MRoPE": way}, "images": {}}
    new = {**dict.fromkeys(head, "new"), "planes": {"ray": {}}, "images": {"case": way}}
    found = planes.with_earlier(["ray", "images"], first, new)
    assert (found["commit"], found["planes"]) == ("old", {"ray": {}, "MRoPE": way})
    assert found["images"] == {"case": way}
    assert {name: each["commit"] for name, each in found["heads"].items()} == {
        "ray": "new",
        "images": "new",
    }
    assert "| case | stock | 10 B | 20 B | 0.00 s | 0.00 s | 1.00 |" in report._images(
        found["images"]
    )


def test_small_messages_and_rows():
    small = rows.measure_small(0, rows=[2])
    assert {*small["rows"], *rows.measure_rows(0, rows=16)} == {"2, warm", "2, cold", *rows.PARTS}


def test_bench_measures_one_part_of_rows(tmp_path):
    file = tmp_path / "bench.json"
    few = ["--rows=4", "--only=join", "--seconds=0.01", f"--json={file}"]
    assert bench.main(["--part=rows", *few]) == 0
    assert list(json.loads(file.read_text())["rows"]) == ["join"]


def test_steps_by_jagcodec_and_by_hand_make_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(packing.PARTS, "step", (packing.step, {"step": (16, 20, 30, 8, 500)}))
    monkeypatch.setitem(packing.PARTS, "loop", (loop, {"loop": (20,)}))
    file = tmp_path / "packing.json"
    assert packing.main(["--only", "step", "loop", "--seconds=0", f"--json={file}"]) == 0
    for part in json.loads(file.read_text())["parts"].values():
        assert [*part["ms"]] == ["jagcodec", "by hand"]


@pytest.mark.parametrize("name", [name for name in operations.MAKERS if "put" not in name])
def test_an_operation_makes_the_same_each_time(name):
    """`put` needs TransferQueue: see tests/integrations/test_transfer_queue_rows.py."""
    operation = operations.MAKERS[name](3)
    digests = {before_values.outcome(lambda: operation.seen(operation.call())) for _ in range(2)}
    assert len(digests) == 1
    assert len(digests.pop()) == 64  # and no error


@pytest.mark.slow
def test_before_measures_operations_of_two_versions(monkeypatch, capsys):
    monkeypatch.setattr(before, "ROUNDS", 1)
    sources = dict.fromkeys(("old", "new"), ROOT / "src")
    assert before.measure_operations(["dicts:2"], sources, seconds=0) == []
    assert "| dicts:2 / materialize:2 |" in capsys.readouterr().out


def test_bytes(tmp_path):
    file = tmp_path / "bytes.json"
    assert saved.main(["--seconds=0", "--images=2", "--shrink=64", f"--json={file}"]) == 0
    batches = json.loads(file.read_text())["batches"]
    options = batches["verl"]["options"]
    assert options["narrow, elide"]["bytes"] < options["none"]["bytes"] / 5


def test_experts(tmp_path):
    file = tmp_path / "experts.json"
    assert experts.main(["--rows=2", "--tokens=64", "--rounds=1", f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    small, *_ = found["ways"].values()
    assert small["bytes"] < found["ways"]["pickle, int32"]["bytes"] / 3
    one, stages, layers = (columns["fetched"] for columns in found["columns"].values())
    assert max(stages, layers) < one / 3


@pytest.mark.parametrize("device", ["cpu", KIND])
def test_gpu(tmp_path, device):
    install()
    file = tmp_path / "gpu.json"
    few = ["--shapes", "16x64", "--seconds=0", f"--json={file}"]
    assert gpu.main([f"--device={device}", *few]) == 0
    parts = json.loads(file.read_text())["shapes"]["16x64"]["parts"]
    assert [(part, list(found["ms"])[-1]) for part, found in parts.items()] == [
        (part, "floor") for part in ("send", "receive", "pad", "pack")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the tests of CUDA")
def test_make_gpu_says_in_one_line_what_is_missing(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    for python, wheels, expected in (
        (sys.executable, "", "sees no GPU"),
        (sys.executable, tmp_path, f"expected wheels in {tmp_path}, found none"),
        (bare, "", "lacks torch, numpy, msgpack, tensordict"),
    ):
        command = [ROOT / ".ci" / "gpu", python, wheels]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
        assert expected in run.stderr


def test_a_result_that_differs_ends_the_run():
    columns = {name: column.clone() for name, column in BATCH.columns.items()}
    measure.same_columns(columns, BATCH.columns, "a trip")
    columns["advantages"][columns["advantages"] == 0] = torch.tensor(-0.0)
    with pytest.raises(SystemExit, match="VERIFICATION FAILED: a trip: column"):
        measure.same_columns(columns, BATCH.columns, "a trip")


@pytest.mark.slow
def test_the_demo_compares_every_cell():
    command = [sys.executable, "-W", "error", "-m", "examples.demo"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "cells are identical." in run.stdout
