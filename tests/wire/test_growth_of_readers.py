"""What grows with a message grows no faster than it: calls counted at n and at 4n."""

import gc
import sys
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jagcodec import (
    WireFormatError,
    concat_rows,
    decode,
    encode,
    open_wire,
)
from jagcodec.wire import checks
from jagcodec.wire import message as messages
from jagcodec.wire.spec import MOST_PROBES
from tests.wire.forge import (
    array,
    int64s,
    jagged,
    list_of,
    message,
    node,
    record,
    tensor,
    tensordict,
)


def calls_of(read):
    """How many functions, of Python and of C, a call enters."""
    entered = 0

    def count(frame, event, arg):
        nonlocal entered
        entered += event in ("call", "c_call")

    gc.collect()
    sys.setprofile(count)
    try:
        read()
    finally:
        sys.setprofile(None)
    return entered


def grows_evenly(measure, n):
    few, many = measure(n), measure(4 * n)
    assert many < 5 * few, (few, many)


def many_groups(n):
    columns = {f"c{i}": jagged(group=i, shape=[2 + i % 2], offset=0) for i in range(n)}
    groups = [[0, 0, 1, 2 + i % 2, 2 + i % 2] for i in range(n)]
    return message(tensordict([1], columns), bytes(4 * n), groups=groups)


@pytest.mark.parametrize(
    "read",
    [
        decode,
        lambda frames: open_wire(frames).to_tensordict(),
        lambda frames: open_wire(frames).rows([0, 0]).to_tensordict(),
        lambda frames: concat_rows([open_wire(frames)] * 2),
    ],
)
def test_one_group_per_column(read):
    read(many_groups(10))
    grows_evenly(lambda n: calls_of(lambda: read(many_groups(n))), 50)


def objects_beside_empty_frames(n):
    columns = {f"c{i}": node("NON_TENSOR_ROWS", numbers=[0, 0, 0, 0, 1]) for i in range(n)}
    return message(tensordict([1], columns), b"\1" * n, *[b""] * n, groups=[[0, 0, 1, 1, 1]])


def wide_payloads_beside_empty_frames(n):
    part = node("NON_TENSOR_DATA", 1, numbers=[(1 << 24) + 1], children=["x"])
    return message(list_of(*[part] * n), bytes((1 << 24) + 1), *[b""] * n)


@pytest.mark.parametrize(
    "make",
    [
        objects_beside_empty_frames,
        wide_payloads_beside_empty_frames,
    ],
)
def test_values_beside_empty_frames(make, monkeypatch):
    """Nothing is added up over all frames for each of the values."""
    steps: Counter[str] = Counter()

    class Sizes(list):
        def __iter__(self):
            steps["passes"] += 1
            return super().__iter__()

    original: Any = vars(messages)["read_header"]

    def counting(*args, **kwargs):
        header = original(*args, **kwargs)
        return header._replace(sizes=Sizes(header.sizes))

    decode(make(2))
    grows_evenly(lambda n: calls_of(lambda: decode(make(n))), 50)
    monkeypatch.setattr(messages, "read_header", counting)
    decode(make(200))
    assert steps["passes"] < 10


def test_text_over_text_is_refused():
    # As arrays of their own: what values claim together is no more than there is.
    over = list_of(*[array("<U100")] * 2)
    with pytest.raises(WireFormatError, match="do not overlap"):
        decode(message(over, bytes(400)))


# Keys


def walk(key, taken, size):
    """Where a dict of `size` places puts a key, and the steps to it: CPython's way."""
    place, perturb, steps = key % size, key, 1
    while taken[place]:
        perturb >>= 5
        place = (5 * place + perturb + 1) % size
        steps += 1
    return place, steps


def chasing(size):
    """Integers of distinct hashes, most of which walk far through a dict, and all their steps."""
    taken = bytearray(size)
    keys, place = [], 1
    for _ in range(size // 3):
        keys.append(place)
        taken[place] = 1
        place = (5 * place + 1) % size
    total, high = len(keys), 0
    while len(keys) < size * 2 // 3 - 1:
        high += 1
        key = keys[high % 8] + high * size
        place, steps = walk(key, taken, size)
        if steps > size // 20:
            keys.append(key)
            taken[place] = 1
            total += steps
    return keys, total


def test_integers_that_follow_each_other_through_the_table_are_refused():
    keys, steps = chasing(1 << 12)
    assert len({hash(key) for key in keys}) == len(keys)
    assert steps > 2 * MOST_PROBES * len(keys)
    pairs = [part for key in keys for part in (key, None)]
    cells = [tensor(shape=[0])] * len(keys)
    for root in (record("DICT", *pairs), node("DICT", children=[keys, *cells])):
        with pytest.raises(WireFormatError, match="that do not collide") as caught:
            decode(message(root))
        assert caught.value.reason == "bad_value"


@pytest.mark.parametrize(
    "keys",
    [
        range(5000),
        range(0, -5000, -1),
        [i << 12 for i in range(5000)],
        [i << 32 for i in range(5000)],
        [i << 56 for i in range(5000)],
        [(i % 70) << 32 | i // 70 for i in range(5000)],
        [i / 1024 for i in range(5000)],
        [i * 0.1 for i in range(5000)],
        [1_700_000_000_000_000_000 + i * 1_000_000 for i in range(5000)],
        np.random.default_rng(0).permutation(10_000)[:6000].tolist(),
        np.random.default_rng(0).integers(1 << 62, size=5000).tolist(),
        [(i, j) for i in range(70) for j in range(70)],
        [f"{i}" for i in range(5000)] + [5],
    ],
)
def test_keys_that_people_use_are_read(keys):
    assert decode(encode(dict.fromkeys(keys))) == dict.fromkeys(keys)
    assert decode(encode(set(keys))) == set(keys)


def test_the_check_of_keys_takes_a_few_steps_for_each():
    """In Python's own steps, whatever the keys; those that collide are given up early."""
    in_sets = [*range(1 << 10), *((i + 1) << 12 for i in range(1 << 10))]
    for keys in (chasing(1 << 12)[0], in_sets):
        for run in (1, 10):
            lines = 0

            def count(frame, event, arg):
                nonlocal lines
                lines += event == "line"
                return count

            sys.settrace(count)
            try:
                checks._spread(keys, (1 << 12) - 1, run)
            finally:
                sys.settrace(None)
            assert lines < 10 * MOST_PROBES * len(keys)


# Rows


def nested_batches(n, rows):
    inner = tensordict([rows], {"x": jagged(shape=[0], offset=0, stored=0)})
    return message(
        tensordict([rows], {f"c{i}": inner for i in range(n)}),
        int64s(*[0] * (rows + 1)),
        groups=[[0, 0, rows, 0, 0]],
    )


def test_rows_of_nested_batches_over_one_group_are_chosen_once():
    def peak(n):
        batch = open_wire(nested_batches(n, 100 * n))
        tracemalloc.start()
        chosen: Any = batch.rows(slice(0, 100 * n - 1)).to_tensordict()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        offsets = {id(inner["x"].offsets()) for inner in chosen.values()}
        assert len(offsets) == 1
        return peak

    peak(2)
    grows_evenly(peak, 20)
