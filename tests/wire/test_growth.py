"""What messages may cost: work in proportion to their size, bounded memory, and what is kept.

Work is counted in operations, not by the clock.
"""

import gc
import random
import re
import sys
import tracemalloc
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

import jagcodec
from jagcodec import Limits, WireFormatError, decode, encode, open_wire
from jagcodec.train.describe import describe_message, differences, open_source, read_whole
from jagcodec.wire import header as headers
from jagcodec.wire import schema as schemas
from jagcodec.wire.documents import RECORDS
from jagcodec.wire.schema import FORMS
from tests.helpers import ROOT, nested, rollout, run_python
from tests.helpers import message as bytes_of
from tests.oracle import assert_same
from tests.wire import forge, spec_reader
from tests.wire.forge import Draft, jagged, map_of, message, node, record, run_of, squeezed, tensor
from tests.wire.grown import COLUMNS, DOCUMENTS, NODES, drawn, probing_keys, singles
from tests.wire.readers import cost, forget, operations, outcome, peak_of, readers_of, refused
from tests.wire.values import jagged as jagged_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        sys.implementation.name != "cpython" or sys.version_info >= (3, 13),
        reason="counts bytecode, of which Python 3.13 does not report all",
    ),
]
REPORTS = {
    "describe": lambda frames: describe_message(open_source(frames, "message")),
    "diff": lambda frames: [*differences(*[read_whole(frames, "message") for _ in range(2)])],
    "padding_tax": lambda frames: jagcodec.padding_tax(jagcodec.to_blob(frames)),
}
UNITS = 4
ALONE = singles()


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


# Several kinds in and next to each other; each of them is among those alone.
DRAWN = [pytest.param(drawn(seed), marks=pytest.mark.slow) for seed in range(40)]


@pytest.mark.parametrize("recipe", [*ALONE, *DRAWN], ids=lambda recipe: recipe.name)
def test_twice_as_much_more_is_twice_the_work(recipe):
    """From n to 2n, and from 2n to 4n: what does not depend on n falls out of the differences.

    A reader may go another way from some size on: after such a step the next doubling counts.
    """
    for name, reader in {**readers_of(recipe.batch), **REPORTS}.items():
        outcome(reader, recipe.make(UNITS))  # loads whatever is loaded on first use
        units, work = UNITS, []
        while len(work) < 3 or (not in_proportion(*work[-3:]) and len(work) < 6):
            work.append(counted(outcome, reader, recipe.make(units)))
            units *= 2
        assert in_proportion(*work[-3:]), f"{name}: {work} operations"


@pytest.mark.parametrize("reader", ["open_wire", "rows", "to_frames", "concat_rows", "several"])
def test_many_columns_are_read_in_proportion(reader):
    """A list of names or groups that is searched for each of them takes over at some size."""
    recipe = next(recipe for recipe in ALONE if recipe.name == "columns(jagged, own group)")
    read = readers_of(recipe.batch)[reader]
    outcome(read, recipe.make(UNITS))
    work = [counted(outcome, read, recipe.make(columns)) for columns in (100, 200, 400)]
    assert in_proportion(*work), f"{work} operations"


def in_proportion(small, twice, four_times):
    return four_times - twice <= 2.1 * (twice - small) + 150


def test_every_kind_is_among_the_messages():
    made = [str(make(Draft()).schema) for make in NODES.values()]
    assert {int(code) for text in made for code in re.findall(r"\[(\d+)", text)} >= {*FORMS}
    named = {name.split(",")[0] for name in DOCUMENTS}
    assert {kind.name for kind in RECORDS} - {"PICKLE"} <= named


def test_what_is_quadratic_is_noticed():
    def pairs(n):
        return sum(a < b for a in range(n) for b in range(n))

    def searched(n):
        names = [f"{i}" for i in range(n)]
        return [names.index(name) for name in names]

    def asked(n):
        found = []
        for i in range(n):
            if i not in found:
                found.append(i)

    for quadratic, units in ((pairs, UNITS), (searched, 100), (asked, 100)):
        assert counted(quadratic, 4 * units) > 10 * counted(quadratic, units)
    assert operations(lambda: None) < 10


@pytest.mark.parametrize("recipe", ALONE, ids=lambda recipe: recipe.name)
def test_memory_is_bounded_by_the_size_of_the_message(recipe):
    frames = recipe.make(200)
    outcome(decode, frames)
    assert peak_of(outcome, decode, frames) < 250 * sum(map(len, frames)) + 200_000


def test_integers_that_follow_each_other_through_the_table_are_refused():
    keys = probing_keys(5000)
    assert len({hash(key) for key in keys}) == len(keys) == 5000
    pairs = [part for key in keys for part in (key, None)]
    for root in (record("DICT", *pairs), node("DICT", children=[keys, *keys])):
        refused(decode, message(root), "bad_value", says="that do not collide")


@pytest.mark.parametrize(
    "keys",
    [
        *(range(5000), range(0, -5000, -1), [i * 0.1 for i in range(5000)]),
        *([i << 12 for i in range(5000)], [i << 56 for i in range(5000)]),
        [(i % 70) << 32 | i // 70 for i in range(5000)],
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


BASE = np.random.default_rng(0).integers(0, 1 << 40, 4000)


def batch_of(columns):
    return TensorDict({f"c{i}": nested(rows) for i, rows in enumerate(columns)}, [len(columns[0])])


def almost_equal(i):
    """A column that begins, ends and has in its middle what all others have."""
    row = np.full(64, 7)
    row[[9, 40]] = BASE[2 * i : 2 * i + 2] + i
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


# --- small messages that ask for much ----------------------------------------------------------


def one_row_of_bits(f: Draft, asked):
    size = asked // 65 - 8
    group = f.group([8 * size])
    return 1, jagged(group, 1, [8 * size], "int64", *f.put(bytes(size)), stored=1)


def one_row_of_documents(f: Draft, asked):
    """A list of the smallest objects, each of one byte."""
    size = asked // 65 - 8
    data = b"\xdd" + (size - 5).to_bytes(4, "big") + b"\x90" * (size - 5)
    return 1, forge.rows_node(size, *f.put(data), f.group([size]))


def rows_without_cells(kind, columns, f: Draft, asked):
    """Of several columns of one group the offsets are all 0."""
    rows = asked // 65 // 8 - 1
    return rows, *[COLUMNS[kind](f, 0, rows)] * columns


def indirect_tensor(wide, f: Draft, asked):
    """Rows that begin at the only cell, or at the first of many that are stored as bits."""
    rows = 256 if wide else (asked - 4096) // 34
    size = (asked - 64 * 1024) // (rows * 64 + 1) if wide else 1
    only = run_of(f.put(bytes(size)), [0] * rows, narrow=1, cells=1, stored=int(wide))
    dtype, inner = ("int64", [8 * size]) if wide else ("uint8", ())
    return rows, forge.column(f, "TENSOR", [only], [1] * rows, dtype, inner)


def indirect_rows(runs, columns, f: Draft, asked):
    """Rows that are all the same, of cells that are stored as bits."""
    rows = 30
    size = (asked - 64 * 1024) // (rows * runs * columns * 8 + 1) // 8
    each = 8 * size
    one = run_of(f.put(bytes(size)), rows=[each] * rows, cells=each, stored=1)
    column = forge.column(f, "JAGGED", [one] * runs, [runs * each] * rows, "int64")
    return rows, *[column] * columns


def indirect_documents(stored, columns, f: Draft, asked):
    """Rows of documents that share their bytes, and become an object each, or are one (129)."""
    rows, objects = (4, 1) if stored == 129 else (40, 40)
    size = asked // 64 // columns // objects - 10
    data = b"\xdd" + (size - 5).to_bytes(4, "big") + b"\x80" * (size - 5)
    made = forge.column(f, "NON_TENSOR_ROWS", [run_of(data)], [size] * rows, stored=stored)
    return rows, *[made] * columns


def arrays_in_rows(tensors, columns, f: Draft, asked):
    """Rows of no element, with dims of two bits, in columns that share them."""
    rows = (asked - 4096) // (520 + 530 * columns)
    group = f.shared_group([0] * rows)
    table, cells = f.put(bytes((rows + 3) // 4)), forge.jagged(group, 1, [0])
    dims = tensor("int64", (rows, 2), *table, stored=1)
    f.put(bytes((columns - 1) * (rows // 4 + 1)))  # each column claims its own bytes
    return rows, *[forge.array_rows(cells, dims, 0, tensors)] * columns


# How many rows, and columns of them.
WORST: dict[str, Any] = {
    **{"one row of bits": one_row_of_bits, "one row of documents": one_row_of_documents},
    "components": partial(rows_without_cells, "strided, no cells", 1),
    "rows without cells": partial(rows_without_cells, "jagged, empty rows", 8),
    "indirect documents": partial(indirect_documents, 65, 1),
    "columns of indirect documents": partial(indirect_documents, 65, 3),
    "rows that are one document": partial(indirect_documents, 129, 1),
    **{f"indirect tensor, {wide=}": partial(indirect_tensor, wide) for wide in (False, True)},
    **{f"indirect rows, {runs=}": partial(indirect_rows, runs, 1) for runs in (1, 4)},
    "columns of indirect rows": partial(indirect_rows, 1, 3),
    "arrays in rows": partial(arrays_in_rows, 0, 6),
    "tensors in rows": partial(arrays_in_rows, 1, 6),
}


def asking(name, asked):
    f = Draft()
    rows, *leaves = WORST[name](f, asked)
    columns = {f"c{i}": leaf for i, leaf in enumerate(leaves)}
    return f.message(forge.tensordict([rows], columns))


@pytest.mark.parametrize("name", [*WORST, "what elide writes"])
def test_the_limit_of_what_is_made(name):
    """It counts what is made, beyond 64 for each byte of the message, as the second reader does."""
    zeros = TensorDict({"zeros": nested([[0] * (1 << 12)] * (1 << 10))}, [1 << 10])
    frames = asking(name, 1 << 22) if name in WORST else bytes_of(encode(zeros, elide=True))
    if name in WORST and "indirect rows" not in name:  # of which rectangles would count too
        frames = squeezed(frames)
    counted = spec_reader.Reader(spec_reader.Header(frames[0]), frames[1:])
    least = 64 * sum(map(len, frames))
    beyond = max(counted.expanded - least, 64 * (counted.made - least))
    assert 0 < beyond < Limits().expanded
    for read in (
        lambda limits: decode(frames, limits=limits),
        lambda limits: open_wire(frames, limits=limits).to_tensordict(),
        lambda limits: open_wire(frames, limits=limits).rows(slice(2)).to_tensordict(),
    ):
        read(Limits(expanded=beyond))
        says = rf"Limits\(expanded={beyond}\)"
        refused(read, Limits(expanded=beyond - 1), "too_large", says=says)


MOST = 512 << 20
READERS = readers_of(batch=True)
# Of cells, of documents and of rows in several pieces. `test_the_limit_of_what_is_made` has all.
EVERYDAY = {"one row of bits", "one row of documents", "indirect rows, runs=4"}


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)
@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in WORST]
)
def test_a_message_below_1_kb_takes_less_than_512_mb(name):
    frames = squeezed(asking(name, Limits().expanded + 64 * 150))
    assert sum(map(len, frames)) < 1000
    # It asks for nearly as much as is allowed, so that a limit that counts less is noticed.
    refused(partial(decode, limits=Limits(expanded=Limits().expanded // 4)), frames, "too_large")
    for reader in ("decode", "open_wire", "materialize"):
        _, peak = cost(partial(READERS[reader], frames))
        assert peak < MOST, reader
    if name in ("one row of bits", "one row of documents", "components"):
        _, peak = cost(partial(READERS["concat_rows"], frames))
        assert peak < 2 * MOST


def test_rectangles_that_no_plain_message_could_ask_for_are_refused():
    """Those of all columns count in bytes: 2,001 rows of up to 2**17 cells of 4 and 3 x 4 bytes."""
    lengths = [1] * 2000 + [1 << 17]
    cells, offsets = torch.zeros(sum(lengths), 3), [0, *accumulate(lengths)]
    columns = {"a": jagged_of(cells[:, 0], offsets), "b": jagged_of(cells, offsets)}
    frames = squeezed(bytes_of(encode(TensorDict(columns, [len(lengths)]))))
    for read in READERS.values():
        refused(read, frames, "too_large", says=r"padded rows.*Limits")
    padded = 2001 * (1 << 17) * 4 * (1 + 3)
    assert len(decode(frames, limits=Limits(expanded=padded))["b"].offsets()) == 2002
    read = partial(decode, limits=Limits(expanded=padded - 1))
    refused(read, frames, "too_large", says=f"Limits.expanded={padded}.")


# --- what is kept of schemas -------------------------------------------------------------------


def named(i, width=40):
    """A message of a schema of its own."""
    return message(map_of({f"{i:0{width}}": tensor()}), b"x")


def said(found):
    """What an error says, without the names that torch gives ragged dims in turn."""
    if isinstance(found, WireFormatError):
        return found.reason, found.path, re.sub(r"\bj\d+", "j", found.detail)
    return [bytes(memoryview(frame)) for frame in encode(found)]


@given(st.integers(0))
def test_a_schema_that_is_known_changes_no_verdict(seed):
    frames = forge.damaged(bytes_of(encode(rollout())), random.Random(seed))
    forget()
    assert said(outcome(decode, frames)) == said(outcome(decode, frames))


def test_what_is_equal_in_python_is_not_equal_in_a_schema():
    """1, 1.0 and true are one dict key in Python; here only one of them is a number."""
    good, *bad = (message(node("ARRAY", "|u1", rank, numbers=[0, 0, 0])) for rank in (1, 1.0, True))
    forget()
    for _ in range(2):
        decode(good)
        for frames in bad:
            refused(decode, frames)
    members = [TensorDict({"a": torch.ones(1)}, [1]) for _ in range(2)]
    for dim in (True, 1):
        stack = LazyStackedTensorDict(*members, stack_dim=dim)
        assert decode(encode(stack)).batch_size == (1, 2)


no_bytes, no_cells = node("BYTES", numbers=[0, 0, 0]), tensor(shape=[0])


# What a stranger sends or an application writes: enough for twice the bound.
@pytest.mark.parametrize(
    ("count", "call"),
    [
        (schemas.MOST_SCHEMAS + 40, lambda i: decode(named(i))),
        (150, lambda i: decode(message(forge.list_of(*[no_bytes] * (500 + i))))),
        (150, lambda i: decode(message(map_of({f"{i}.{k}": no_cells for k in range(90)})))),
        (150, lambda i: encode({f"{i:01500}": torch.ones(1)})),
        (150, lambda i: (decode(named(i, 1 << 18)), decode(named(i)))),
    ],
)
def test_ever_new_schemas_take_no_more_than_the_bound(count, call):
    forget()
    call(0)
    tracemalloc.start()
    try:
        for i in range(1, count):
            call(i)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (
        0 < max(len(schemas._schema_of_bytes), len(headers._start_of_tree)) <= schemas.MOST_SCHEMAS
    )
    assert kept < schemas.MOST_SCHEMAS * schemas.LARGEST_KEPT + 500_000


def test_the_newest_schemas_are_kept():
    forget()
    for i in range(schemas.MOST_SCHEMAS + 1):
        decode(named(i))
    kept = [forge.packed(map_of({f"{i:040}": tensor()}).schema) for i in range(3)]
    assert [schema in schemas._schema_of_bytes for schema in kept] == [False, True, True]


def test_threads_share_the_table(in_threads):
    messages = [bytes_of(encode(rollout())), *(named(i) for i in range(300)), [forge.header(7)]]
    expected = [decode(frames) for frames in messages]

    def work(seed):
        order = np.random.default_rng(seed).permutation(len(messages))
        for i in [*order, *order]:
            assert_same(decode(messages[i]), expected[i])
            assert_same(decode(encode(expected[i], narrow=bool(i % 2))), expected[i])
            assert i or open_wire(messages[0]).rows([1])["reward"].equal(expected[0]["reward"][1:2])

    forget()
    in_threads(6, work, *((seed,) for seed in range(6)))
    assert len(schemas._schema_of_bytes) <= schemas.MOST_SCHEMAS


FORKED = """
import itertools, os, signal, sys, threading
from jagcodec import decode
from tests.wire.forge import map_of, message, tensor

sys.setswitchinterval(1e-6)
made = [message(map_of({f"{i:020}": tensor()}), b"x") for i in range(2100)]
running, statuses = True, []

def decode_new_schemas():
    for frames in itertools.cycle(made[:2000]):
        if not running:
            return
        decode(frames)

threads = [threading.Thread(target=decode_new_schemas) for _ in range(2)]
for thread in threads:
    thread.start()
for i in range(30):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for a lock, which its parent sees
        decode(made[2000 + i])
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
running = False
print(statuses)
"""


def test_a_child_reads_new_schemas_whatever_its_parent_did_when_it_forked():
    assert run_python(FORKED, path=ROOT).stdout.strip() == str([0] * 30)


def test_what_is_kept_does_not_depend_on_who_reads():
    """Neither on what is registered, nor on pickle, nor on a device."""
    frames = message(node("USER", "test_header.Late", children=[map_of({"x": tensor()})]), b"\7")
    forget()
    for _ in range(2):
        refused(decode, frames, "unknown_type")
    late: Any = type("Late", (), {})
    jagcodec.register_type(late, "test_header.Late", to_state=vars, from_state=dict)
    assert decode(frames)["x"].tolist() == [7]
    pickled = message(forge.list_of(record("PICKLE", b"\x80\x04K\x01."), tensor()), b"\7")
    for _ in range(2):
        assert decode(pickled, allow_pickle=True)[0] == 1
        assert outcome(decode, pickled).reason == "pickle_refused"
