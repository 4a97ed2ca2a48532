"""What a batch costs, counted and not timed, so that it is the same on every run.

`make guard` has the clock; here are calls, memory and frames.
"""

import json

import pytest
import torch

import jagcodec
from benchmarks.costs import calls, peak_bytes
from benchmarks.shapes import DESIGN, PADS, SMALL, make_batch
from benchmarks.stages import stages
from tests.helpers import ROOT

STORED = ROOT / "benchmarks" / "guard.json"
BATCHES = {case: make_batch(case.lengths()) for case in (SMALL, DESIGN)}
NAMES = list(stages(BATCHES[SMALL]))


@pytest.fixture(scope="module")
def counted():
    """Calls by shape and stage."""
    return {
        case: {name: calls(stage.run) for name, stage in stages(batch).items()}
        for case, batch in BATCHES.items()
    }


@pytest.mark.parametrize("stage", NAMES)
def test_no_call_per_row(counted, stage):
    """Eight times the rows, and as many calls but for a few that depend on sizes."""
    few, many = counted[SMALL][stage], counted[DESIGN][stage]
    assert many <= few + (DESIGN.rows - SMALL.rows) / 8


@pytest.mark.parametrize("stage", NAMES)
def test_calls_are_about_those_stored(counted, stage):
    """Far more than `benchmarks/guard.json` says is a slower stage: see `make guard`."""
    stored = json.loads(STORED.read_text())["calls"][str(DESIGN)]
    assert stage in stored, "a stage that is not stored: make guard ARGS=--write"
    assert counted[DESIGN][stage] <= 1.5 * stored[stage] + 20


def test_every_call_is_counted():
    rows = list(range(100))
    assert calls(lambda: [abs(row) for row in rows]) >= 100
    assert calls(lambda: None) <= 5


def test_packing_into_frames_holds_the_message_once():
    batch = BATCHES[DESIGN]

    def encode():
        return jagcodec.encode_fields(
            batch.columns, lengths=batch.lengths, token_aligned_fields=PADS
        )

    peak = peak_bytes(encode)
    assert peak <= 1.1 * batch.valid_bytes + 2**18
    # The rows are counted at all, unless they are in memory of torch's, which is not seen.
    assert peak >= 2**12


def test_materializing_holds_the_rectangles_once():
    batch = BATCHES[DESIGN]
    wire = jagcodec.open_wire(
        [
            bytearray(frame)
            for frame in jagcodec.encode_fields(
                batch.columns, lengths=batch.lengths, token_aligned_fields=PADS
            )
        ]
    )
    peak = peak_bytes(lambda: jagcodec.materialize(wire, pad_value_dict=PADS))
    assert peak <= 1.1 * batch.padded_bytes + 2**18


@pytest.mark.parametrize("columns", [1, 6])
def test_frames_and_bytes_of_a_packed_batch(columns):
    batch = BATCHES[DESIGN]
    chosen = dict(list(batch.columns.items())[:columns])
    frames = jagcodec.encode_fields(chosen, lengths=batch.lengths, token_aligned_fields=PADS)
    valid = batch.tokens * sum(column.itemsize for column in chosen.values())
    assert len(frames) <= columns + 3
    assert sum(memoryview(frame).nbytes for frame in frames) <= 1.01 * valid + 8192


def test_batches_are_what_they_say():
    for case, batch in BATCHES.items():
        assert batch.shape == (case.rows, case.width)
        assert batch.tokens / (case.rows * case.width) == pytest.approx(case.fill, rel=0.02)
        assert torch.equal(batch.lengths.max(), torch.tensor(case.width))
