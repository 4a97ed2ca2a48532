"""What a batch costs in memory, counted and not timed, so that it is the same on every run."""

import tracemalloc

import jagcodec
from benchmarks.measure import collector_off
from benchmarks.shapes import DESIGN, PADS, lengths_of, make_batch


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
    batch = make_batch(lengths_of(DESIGN)[:512])

    def packed():
        return jagcodec.encode_fields(
            batch.columns, lengths=batch.lengths, token_aligned_fields=PADS
        )

    frames = packed()
    assert peak_bytes(packed) <= 1.1 * batch.valid_bytes + 2**18
    assert sum(memoryview(frame).nbytes for frame in frames) <= 1.01 * batch.valid_bytes + 8192
    padded = peak_bytes(lambda: jagcodec.materialize(frames, pad_value_dict=PADS))
    assert padded <= 1.1 * batch.padded_bytes + 2**18
