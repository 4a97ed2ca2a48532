"""What messages may cost: work in proportion to their size, and bounded memory.

Work is counted in operations, not by the clock.
"""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from jagcodec import ArgumentError, Limits, WireFormatError, decode, encode, materialize
from jagcodec.wire.documents import RECORDS
from jagcodec.wire.schema import FORMS
from tests.helpers import nested
from tests.oracle import assert_same
from tests.wire.forge import (
    Draft,
    int64s,
    jagged,
    message,
    node,
    record,
    rows_node,
    run,
    strided_nested,
    table,
    tensor,
    tensordict,
    zstd,
)
from tests.wire.grown import DOCUMENTS, NODES, drawn, probing_keys, singles
from tests.wire.readers import cost, forget, operations, outcome, peak_of, readers_of, refused

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
    for root in (record("DICT", *pairs), node("DICT", children=[keys, *keys])):
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


RNG = np.random.default_rng(0)
BASE = RNG.integers(0, 1 << 40, 4000)


def batch_of(columns):
    return TensorDict({f"c{i}": nested(rows) for i, rows in enumerate(columns)}, [len(columns[0])])


def almost_equal(i):
    """A column that begins, ends and has in its middle what all others have."""
    row = np.full(64, 7)
    row[[9, 40]] = RNG.integers(0, 1 << 40, 2) + i
    return [row[:30], row[30:]]


SEARCHED = {
    "many columns": lambda n: batch_of([almost_equal(i) for i in range(n)]),
    "columns over and over": lambda n: batch_of([[[i % 3] * 20, [i % 3] * 30] for i in range(n)]),
    "rows that share all but their last cell": lambda n: batch_of(
        [[[*BASE[:2000], i] for i in range(n)]]
    ),
    "rows that begin with the one before": lambda n: batch_of([[BASE[: i + 1] for i in range(n)]]),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_the_search_takes_work_in_proportion(name):
    less, value = SEARCHED[name](50), SEARCHED[name](200)
    frames = encode(value, elide=True)
    assert_same(decode(frames, limits=Limits(expanded=1 << 40)), value)
    small, large = (counted(partial(encode, made, elide=True)) for made in (less, value))
    # Four times as many rows, each as long as its number, are sixteen times as many cells.
    assert large < 1.5 * (16 if name.endswith("before") else 4) * small


# --- small messages that ask for as much as default limits allow ------------------------------

_BLOCK = 1 << 17
_BLOCKS = 180  # of one byte each, which take four bytes, so that the message is below 1 kB
_ASKED = Limits().expanded + 64 * 150


def frame(size, *start, byte=b"\0"):
    """A zstd frame of some bytes, then one byte again and again."""
    head = b"".join(start)
    size = min(size, _BLOCKS * _BLOCK)
    left = size - len(head)
    runs = [(byte, _BLOCK)] * (left // _BLOCK) + [(byte, left % _BLOCK)] * (left % _BLOCK > 0)
    return size, zstd(*[head] * bool(head), *runs, size=size)


def batch(rows, columns, *frames, groups=()):
    """The message of a batch; a frame is bytes, or a size and what is stored of it."""
    pairs = [pair if type(pair) is tuple else (len(pair), pair) for pair in frames]
    sizes, sent = [size for size, _ in pairs], [data for _, data in pairs]
    return message(
        tensordict([rows], columns), *sent, sizes=sizes, stored=[*map(len, sent)], groups=groups
    )


def one_frame():
    size, data = frame(_ASKED)
    return batch(size, {"a": tensor(shape=[size])}, (size, data))


def bits():
    """One jagged row of cells that are stored as bits."""
    size, data = frame(_ASKED // 65)
    cells = 8 * size
    column = jagged(0, 1, [cells], "int64", 0, 0, 1)
    return batch(1, {"a": column}, (size, data), groups=[[0, 0, 1, cells, cells]])


def documents():
    """One row: a list of the smallest objects, each of one byte."""
    size, data = frame(_ASKED // 65, b"\xdd", (_ASKED // 65 - 5).to_bytes(4, "big"), byte=b"\x90")
    return batch(1, {"a": rows_node(size)}, (size, data), groups=[[0, 0, 1, size, size]])


def components():
    size, data = frame(_ASKED // 65 // 8 * 8)
    count = size // 8
    nested = strided_nested(0, count)
    return batch(count, {"a": nested}, (size, data))


def rows_without_cells():
    """Rows of several columns of one group, whose offsets are all 0."""
    size, data = frame(_ASKED // 65 // 8 * 8)
    rows = size // 8 - 1
    leaves = {f"c{i}": jagged(0, 1, [0], "int64", 0, 0) for i in range(8)}
    return batch(rows, leaves, (size, data), groups=[[0, 0, rows, 0, 0]])


def rows_of_an_indirect_tensor():
    """Each is one byte, and begins at the first: its index is a bit."""
    rows = (_ASKED - 4096) // 34
    size, data = frame(rows // 8 + 1)
    rows = min(rows, 8 * size)
    head = table(run(1, (1, 0), index=(1, 0), narrow=1))
    return batch(rows, {"a": tensor("uint8", [rows], 0, 0, 65)}, head, (size, data))


def wide_rows_of_an_indirect_tensor():
    rows = 256
    size, data = frame((_ASKED - 64 * 1024) // (rows * 64 + 1))
    head = table(run(1, (1, 0), stored=1, index=(1, 0), narrow=1))
    column = tensor("int64", [rows, 8 * size], 0, 0, 65)
    return batch(rows, {"a": column}, head, (size, data))


def indirect_rows(runs):
    """Rows that are all the same, of cells that are stored as bits."""
    rows = 30
    each = (_ASKED - 64 * 1024) // (rows * runs * 8 + 1) // 8 * 8
    size, data = frame(each // 8)
    each = 8 * size
    lengths = int64s(*(i * runs * each for i in range(rows + 1)))
    parts = int64s(*(i * each for i in range(rows + 1)))
    head = table(*[run(each, (1, 0), group=int(runs > 1), stored=1) for _ in range(runs)])
    groups = [[0, 0, rows, runs * each, runs * each]]
    frames = [lengths + parts + head] if runs > 1 else [lengths + head]
    groups += [[0, len(lengths), rows, each, each]] * (runs > 1)
    offset = len(frames[0]) - len(head)
    column = jagged(0, 1, [runs * rows * each], "int64", 0, offset, 64 + runs)
    return batch(rows, {"a": column}, *frames, (size, data), groups=groups)


def indirect_documents():
    """Rows of documents that share their bytes, and become an object each."""
    rows = 40
    most = 64 * 400 + Limits().expanded // 64
    each = most // rows
    size, data = frame(each, b"\xdd", (each - 5).to_bytes(4, "big"), byte=b"\x80")
    offsets = int64s(*(i * size for i in range(rows + 1)))
    head = table(run(size, (1, 0)))
    column = rows_node(rows * size, 0, len(offsets), 0, 65)
    return batch(
        rows, {"a": column}, offsets + head, (size, data), groups=[[0, 0, rows, size, size]]
    )


WORST = {
    "one frame": one_frame,
    "bits": bits,
    "documents": documents,
    "components": components,
    "rows without cells": rows_without_cells,
    "indirect tensor, many rows": rows_of_an_indirect_tensor,
    "indirect tensor, wide rows": wide_rows_of_an_indirect_tensor,
    "indirect rows": lambda: indirect_rows(1),
    "indirect rows, 4 runs": lambda: indirect_rows(4),
    "indirect documents": indirect_documents,
}


MOST = 512 << 20
READERS = readers_of(batch=True)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)
@pytest.mark.parametrize("name", WORST)
def test_a_message_below_1_kb_takes_less_than_512_mb(name):
    frames = WORST[name]()
    assert sum(map(len, frames)) < 1000
    # It asks for nearly as much as is allowed, so that a limit that counts less is noticed.
    with pytest.raises(WireFormatError) as caught:
        decode(frames, limits=Limits(expanded=Limits().expanded // 4))
    assert caught.value.reason == "too_large"
    for reader in ("decode", "open_wire", "materialize"):
        _, peak = cost(partial(READERS[reader], frames))
        assert peak < MOST, reader
    if name in ("bits", "documents", "components"):
        _, peak = cost(partial(READERS["concat_rows"], frames))
        assert peak < 2 * MOST


def one_long_row():
    """Compressed offsets of 131,071 rows, of which the last has all 2**20 cells."""
    blocks = [(b"\0", 1 << 17)] * 8
    offsets = (1 << 20) + 8, zstd(*blocks, int64s(1 << 20), size=(1 << 20) + 8)
    cells = 1 << 20, zstd(*blocks, size=1 << 20)
    column = jagged(0, 1, [1 << 20], "uint8", 1, 0)
    return batch(1 << 17, {"a": column}, offsets, cells, groups=[[0, 0, 1 << 17, 0, 1 << 20]])


def test_a_rectangle_that_no_plain_message_could_ask_for_is_refused():
    frames = one_long_row()
    assert sum(map(len, frames)) < 1000
    for read in READERS.values():
        with pytest.raises(WireFormatError, match=r"padded rows.*Limits") as caught:
            read(frames)
        assert caught.value.reason == "too_large"
    assert len(decode(frames, limits=Limits(expanded=1 << 38))["a"].offsets()) == (1 << 17) + 1


def test_rectangles_of_all_columns_count_in_bytes():
    """Here 2,000 rows of one cell each and one of 2**17, of 1 byte and of 3 x 8 bytes."""
    rows, longest = 2001, 1 << 17
    total = rows - 1 + longest
    offsets = int64s(*range(rows), total)
    cells = total, zstd((b"\0", longest), (b"\0", rows - 1), size=total)
    wide = 24 * total, zstd(*[(b"\0", longest)] * 24, (b"\0", 24 * (rows - 1)), size=24 * total)
    columns = {
        "a": jagged(0, 1, [total], "uint8", 1, 0),
        "b": jagged(0, 1, [total, 3], "int64", 2, 0),
    }
    frames = batch(rows, columns, offsets, cells, wide, groups=[[0, 0, rows, 1, longest]])
    padded = rows * longest * (1 + 3 * 8)
    assert len(decode(frames, limits=Limits(expanded=padded))["b"].offsets()) == rows + 1
    with pytest.raises(WireFormatError, match=f"Limits.expanded={padded}.") as caught:
        decode(frames, limits=Limits(expanded=padded - 1))
    assert caught.value.reason == "too_large"


def test_shapes_of_rows_without_cells_are_not_padded():
    rows = [torch.zeros(1 << 16, 0), torch.zeros(0, 1 << 16)]
    td = TensorDict({"a": torch.nested.nested_tensor(rows)}, [2])
    with pytest.raises(ArgumentError, match=r"'a'.*found 48 bytes.*keep_jagged"):
        materialize(encode(td))
    assert materialize(encode(td), keep_jagged=["a"])["a"].size(0) == 2
