"""The work of reading grows no faster than the message: counted in operations, not by the clock."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from jagcodec import Limits, decode, encode
from jagcodec.wire.documents import RECORDS
from jagcodec.wire.schema import FORMS
from tests.helpers import nested
from tests.oracle import assert_same
from tests.wire.forge import (
    Draft,
    message,
    node,
    record,
)
from tests.wire.grown import DOCUMENTS, NODES, drawn, probing_keys, singles
from tests.wire.readers import forget, operations, outcome, peak_of, readers_of, refused

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts bytecode"),
]

UNITS = 4
ALONE = singles()
DRAWN = [drawn(seed) for seed in range(40)]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of torch that wait for each other take most of the time of nested tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def counted(call, *arguments):
    """The operations of a call that finds nothing known."""
    forget()
    return operations(lambda: call(*arguments))


@pytest.mark.parametrize("recipe", [*ALONE, *DRAWN], ids=lambda recipe: recipe.name)
def test_twice_as_much_more_is_twice_the_work(recipe):
    """From n to 2n, and from 2n to 4n: what does not depend on n falls out of the differences.

    A reader may go another way from some size on: after such a step the next doubling counts.
    """
    for name, reader in readers_of(recipe.batch).items():
        outcome(reader, recipe.make(UNITS))  # loads whatever is loaded on first use
        units, work = UNITS, []
        while len(work) < 3 or (not in_proportion(*work[-3:]) and len(work) < 6):
            work.append(counted(outcome, reader, recipe.make(units)))
            units *= 2
        assert in_proportion(*work[-3:]), f"{name}: {work} operations"


def in_proportion(small, twice, four_times):
    return four_times - twice <= 2.1 * (twice - small) + 150


def test_every_kind_is_among_the_messages():
    roots = [make(Draft()).schema for make in NODES.values()]
    assert {kind for root in roots if root for kind in kinds_below(root)} >= {*FORMS}
    named = {name.split(",")[0] for name in DOCUMENTS}
    assert {kind.name for kind in RECORDS} - {"PICKLE"} <= named


def kinds_below(schema):
    yield schema[0]
    for child in schema[1:]:
        if isinstance(child, list) and child:
            yield from kinds_below(child)


def test_what_is_quadratic_is_noticed():
    def quadratic(n):
        return sum(a < b for a in range(n) for b in range(n))

    assert counted(quadratic, 4 * UNITS) > 10 * counted(quadratic, UNITS)
    assert operations(lambda: None) < 10


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ALONE, ids=lambda recipe: recipe.name)
def test_memory_is_bounded_by_the_size_of_the_message(recipe):
    frames = recipe.make(200)
    outcome(decode, frames)
    assert peak_of(outcome, decode, frames) < 250 * sum(map(len, frames)) + 200_000


# --- keys --------------------------------------------------------------------------------------


def test_integers_that_follow_each_other_through_the_table_are_refused():
    keys = probing_keys(5000)
    assert len({hash(key) for key in keys}) == len(keys) == 5000
    pairs = [part for key in keys for part in (key, None)]
    for root in (
        record("DICT", *pairs),
        node("DICT", children=[keys, *keys]),
    ):
        error = refused(decode, message(root))
        assert error.reason == "bad_value"
        assert "that do not collide" in error.detail


@pytest.mark.parametrize(
    "keys",
    [
        range(5000),
        range(0, -5000, -1),
        [i << 12 for i in range(5000)],
        [i << 56 for i in range(5000)],
        [(i % 70) << 32 | i // 70 for i in range(5000)],
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


# --- what is written: the search for what repeats ----------------------------------------------


def many_columns(n):
    """Columns that begin, end and have in their middle what all others have."""
    rng = np.random.default_rng(0)
    columns = {}
    for i in range(n):
        row = np.full(64, 7)
        row[[9, 40]] = rng.integers(0, 1 << 40, 2) + i
        columns[f"c{i}"] = nested([row[:30], row[30:]])
    return TensorDict(columns, batch_size=[2])


def repeated_columns(n):
    """Three different columns, over and over."""
    columns = {f"c{i}": nested([[i % 3] * 20, [i % 3] * 30]) for i in range(n)}
    return TensorDict(columns, batch_size=[2])


def long_prefixes(rows):
    """Rows that share all but their last cell."""
    base = np.random.default_rng(0).integers(0, 1 << 40, 2000)
    return TensorDict({"a": nested([[*base, i] for i in range(rows)])}, batch_size=[rows])


def ladder(rows):
    """Rows each of which begins with the one before it."""
    base = np.random.default_rng(0).integers(0, 1 << 40, rows)
    return TensorDict({"a": nested([base[: i + 1] for i in range(rows)])}, batch_size=[rows])


@pytest.mark.parametrize(
    ("make", "n"),
    [
        (many_columns, 50),
        (repeated_columns, 50),
        (long_prefixes, 50),
        (ladder, 50),
    ],
)
def test_the_search_takes_work_in_proportion(make, n):
    value = make(4 * n)
    frames = encode(value, elide=True)
    assert_same(decode(frames, limits=Limits(expanded=1 << 40)), value)
    less, more = (counted(partial(encode, made, elide=True)) for made in (make(n), value))
    # A ladder has four times as many rows and sixteen times as many cells.
    assert more < 1.5 * (16 if make is ladder else 4) * less
