"""What a batch costs, counted and not timed, so that it is the same on every run."""

import tracemalloc
from typing import Any

import pytest

import jagcodec
from benchmarks.guard import stages
from benchmarks.measure import calls_of, collector_off
from benchmarks.shapes import DESIGN, PADS, lengths_of, make_batch

# Both too large for the shorter way that small batches go.
FEW, MANY = (make_batch(lengths_of(DESIGN)[:rows]) for rows in (384, 512))
NAMED: dict[str, Any] = {"lengths": MANY.lengths, "token_aligned_fields": PADS}


def test_no_stage_calls_a_function_per_row():
    few, many = ({n: calls_of(run) for n, run in stages(batch).items()} for batch in (FEW, MANY))
    most = (len(MANY.lengths) - len(FEW.lengths)) / 8
    assert {name: number for name, number in many.items() if number > few[name] + most} == {}


def peak_bytes(run):
    """The most memory that one run holds, of Python and of numpy."""
    run()
    with collector_off():
        tracemalloc.start()
        made = run()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    del made
    return peak


def test_packing_and_padding_hold_the_result_once():
    frames = jagcodec.encode_fields(MANY.columns, **NAMED)
    peak = peak_bytes(lambda: jagcodec.encode_fields(MANY.columns, **NAMED))
    assert peak <= 1.1 * MANY.valid_bytes + 2**18
    peak = peak_bytes(lambda: jagcodec.materialize(frames, pad_value_dict=PADS))
    assert peak <= 1.1 * MANY.padded_bytes + 2**18


@pytest.mark.parametrize("columns", [1, 6])
def test_frames_and_bytes_of_a_packed_batch(columns):
    chosen = dict(list(MANY.columns.items())[:columns])
    frames = jagcodec.encode_fields(chosen, **{**NAMED, "token_aligned_fields": list(chosen)})
    valid = MANY.tokens * sum(column.itemsize for column in chosen.values())
    assert len(frames) <= columns + 3
    assert sum(memoryview(frame).nbytes for frame in frames) <= 1.01 * valid + 8192
