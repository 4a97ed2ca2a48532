"""The benchmark's sides run and are verified, so that it cannot rot; nothing is timed here."""

import pytest
import torch

from benchmarks import limits, trips
from benchmarks.bars import bars
from benchmarks.shapes import SMALL, Case, make_batch

EXTRAS = {"rows", "safetensors", "arrow"}  # need packages that only `make bench` installs
BATCH = make_batch(Case("lognormal", 16, 64).lengths())


@pytest.mark.parametrize("name", sorted(set(trips.MAKERS) - EXTRAS))
def test_a_side_brings_every_column_back_again_and_again(name):
    runner = trips.Runner(trips.MAKERS[name](BATCH), BATCH)
    for _ in range(2):
        trip, rectangles = runner.run()
        assert trips.difference(BATCH, rectangles) == ""
    assert trip.wire_bytes >= BATCH.valid_bytes
    assert trip.frames >= 1


def test_the_least_trip_changes_no_cell():
    batch = make_batch(SMALL.lengths())
    runner = trips.Runner(limits.least(batch), batch)
    for _ in range(2):
        assert trips.difference(batch, runner.run()[1]) == ""


def test_a_wrong_cell_is_found():
    columns = dict(BATCH.columns)
    assert trips.difference(BATCH, columns) == ""
    columns["advantages"] = columns["advantages"].clone()
    columns["advantages"][-1, -1] += 1
    assert trips.difference(BATCH, columns) == "column 'advantages'"
    columns["advantages"] = BATCH.columns["advantages"].double()
    assert "float64" in trips.difference(BATCH, columns)
    del columns["advantages"]
    assert trips.difference(BATCH, columns).startswith("columns")


def test_negative_zero_is_not_zero():
    columns = {name: column.clone() for name, column in BATCH.columns.items()}
    columns["advantages"][0, 0] = 0.0
    batch = trips.Batch(BATCH.lengths, columns)  # type: ignore[attr-defined]
    wrong = {**columns, "advantages": columns["advantages"].clone()}
    wrong["advantages"][0, 0] = -0.0
    assert torch.equal(wrong["advantages"], columns["advantages"])
    assert trips.difference(batch, wrong) == "column 'advantages'"


@pytest.mark.parametrize("text", ["512x1536", "512x1536@0.5", "gsm8k:64"])
def test_shapes_are_read_as_they_are_written(text):
    assert str(Case.parse(text)) == text


def test_what_was_not_measured_is_not_met():
    found = bars({"trips": [], "stages": [], "memory": {}})
    assert found
    assert {bar["met"] for bar in found} == {None}
