"""Hostile indirect columns, and hostile values for `elide`: forged tables, bombs, collisions.

`corpus_indirect.py` holds one message for every way in which a table may be good or bad; here each
number of tables takes many values, and all readers must come to one verdict.
"""

import itertools
import random
import re
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from jagcodec import Limits, WireFormatError, decode, encode, materialize, open_wire
from jagcodec.errors import REASONS, JagcodecError
from jagcodec.wire.header import read_header
from jagcodec.wire.schema import LEAVES, runs_of
from jagcodec.wire.spec import MOST_RUNS, RUN_NUMBERS
from tests.helpers import message_in, nested, rollouts, size
from tests.oracle import assert_same
from tests.strategies import tensordicts, trees
from tests.wire import corpus_indirect, spec_reader
from tests.wire.corpus_indirect import batch_of, column, documents_of, in_a_row, run_of
from tests.wire.forge import (
    int64s,
    jagged,
    list_of,
    message,
    rows_node,
    run,
    table,
    tensor,
    tensordict,
)
from tests.wire.growth import BATCH_READERS, forget, operations, outcome
from tests.wire.many import Forge
from tests.wire.test_spec_reader import neutral, plain, verdicts

pytestmark = pytest.mark.filterwarnings("ignore")


# --- what all readers say ------------------------------------------------------------------------


def refused(read, frames):
    """Why a reader refuses a message; None if it reads it."""
    found = outcome(read, frames)
    if not isinstance(found, WireFormatError):
        return None
    assert found.reason in REASONS
    assert found.path
    assert found.detail
    return found


def leaf_by_leaf(frames):
    batch = open_wire(frames)
    for name in batch.fields:
        batch.leaf(name)


def rows_of(frames):
    batch = open_wire(frames)
    rows = len(batch)
    for chosen in (slice(0, rows), [*range(rows - 1, -1, -1), 0], [True] * rows):
        batch.rows(chosen).to_tensordict()


READERS = {**BATCH_READERS, "leaf": leaf_by_leaf, "all rows": rows_of}


def check(frames, *, batch):
    """One verdict of both readers, with equal values, and of all ways to read a batch."""
    first, second, why = verdicts(frames)
    assert first == second, why
    if not batch:
        return
    for name, read in READERS.items():
        if first is None and name in ("rows", "to_frames"):
            continue  # a row that is not read may be bad
        made = outcome(read, frames)
        read_by_it = not isinstance(made, JagcodecError)
        assert read_by_it == (first is not None), (name, made)
        assert read_by_it or isinstance(made, WireFormatError), (name, made)


def test_a_run_has_no_more_cells_than_its_rows():
    frames = corpus_indirect.BAD["indirect_more_cells_in_a_run"][-1]
    assert refused(decode, frames).reason == "out_of_bounds"
    check(frames, batch=True)


IN_BATCHES = {
    name: entry[-1]
    for name, entry in [*corpus_indirect.GOOD.items(), *corpus_indirect.BAD.items()]
    if refused(lambda frames: open_wire(frames).fields, entry[-1]) is None
}


@pytest.mark.parametrize("name", IN_BATCHES)
def test_all_readers_come_to_one_verdict(name):
    check(IN_BATCHES[name], batch=True)


@pytest.mark.parametrize("name", corpus_indirect.BAD)
def test_an_error_says_where(name):
    frames = corpus_indirect.BAD[name][-1]
    error = refused(decode, frames)
    assert error is not None
    assert error.path.startswith("$") or error.path == "header"
    if name in IN_BATCHES:
        assert re.match(r"\$\.a|\$\[0\]|header", error.path), error.path
        assert refused(leaf_by_leaf, frames).reason == error.reason


# --- every number of a table ---------------------------------------------------------------------

TEXT = corpus_indirect.TEXT


def sample(kind, index):
    """A message of a kind, of one run with an index or without."""
    if kind in ("NON_TENSOR_ROWS", "OBJECT_ARRAY"):
        made = run_of(TEXT, [0, 0] if index else None, narrow=17)
        return documents_of(made, lengths=[5, 5], kind=kind, stored=129 if index else 65)
    lengths = [1, 1, 1] if kind == "TENSOR" else [2, 0, 3]
    made = run_of(bytes(range(6)), [0] * 3 if index else None, narrow=34)
    return batch_of(kind, made, lengths=lengths, dtype="int16")


def several():
    """A column of several runs."""
    runs = [
        run_of(bytes(range(6)), [0, 2], rows=[2, 1]),
        run_of(bytes(range(8)), [0, 2], rows=[2, 2], narrow=17),
        run_of(bytes(range(6)), rows=[0, 3]),
    ]
    return batch_of("JAGGED", *runs, lengths=[4, 6], dtype="int16")


def table_at(frames):
    """Where the table of the only column lies in frame 1, and how many numbers it has."""
    ((_, offset, size),) = tables_of(read_header(frames[0]))
    return offset, size // 8


def tables_of(header):
    """The place and the size of each table."""
    found = []
    for node in header.schema.nodes:
        buffer, offset, stored = [*header.numbers[node.number : node.number + 3], 0, 0, 0][:3]
        if node.kind in LEAVES and runs_of(node.kind, stored):
            found.append((buffer, offset, 8 * len(RUN_NUMBERS) * runs_of(node.kind, stored)))
    return found


VALUES = (
    *(-1, -2, -8, -(2**63), -(2**63) + 1, 0, 1, 2, 3, 4, 5, 8, 16, 17, 18, 24, 33, 40, 63, 64, 65),
    *(72, 73, 127, 2**31, 2**32, 2**53, 2**60, 2**61, 2**62, 2**63 - 8, 2**63 - 1),
)

SAMPLES = {
    f"{kind}, {'index' if index else 'at first'}": (kind, index)
    for kind in ("TENSOR", "JAGGED", "NON_TENSOR_ROWS", "OBJECT_ARRAY")
    for index in (True, False)
    if index or kind != "TENSOR"
}


@pytest.mark.parametrize("name", [*SAMPLES, "several"])
def test_every_number_of_a_table(name):
    """Both readers say the same of any number in its place."""
    frames = several() if name == "several" else sample(*SAMPLES[name])
    assert verdicts(frames)[0] is not None
    start, count = table_at(frames)
    read = 0
    for at, value in itertools.product(range(count), VALUES):
        payload = bytearray(frames[1])
        payload[start + 8 * at : start + 8 * at + 8] = int64s(value)
        changed = [frames[0], bytes(payload)]
        first, second, why = verdicts(changed)
        assert first == second, (at, value, why)
        read += first is not None
        if "OBJECT" not in name and value in (-1, 1, 65, 2**63 - 1, -(2**63)):
            check(changed, batch=True)
    assert 0 < read < count * len(VALUES)


@pytest.mark.parametrize("name", [*SAMPLES, "several"])
def test_every_number_of_an_indirect_node(name):
    """Its place, how it is stored, its group, its size and its dims."""
    frames = several() if name == "several" else sample(*SAMPLES[name])
    header = read_header(frames[0])
    packed = int64s(*header.numbers)
    assert frames[0].count(packed) == 1
    last = header.schema.numbers + 2 + 5 * len(header.groups)
    for at, value in itertools.product(range(last), (*VALUES, 66, 67, 71, 128, 129, 130)):
        numbers = [*header.numbers]
        numbers[at] = value
        changed = [frames[0].replace(packed, int64s(*numbers)), frames[1]]
        first, second, why = verdicts(changed)
        assert first == second, (at, value, why)


def elided_messages():
    """Real messages: what is in them, and the options that they were written with."""
    small = rollouts(prompts=2, repeats=3)
    objects = {"text": "x" * 600, "more": [1, 2]}
    equal = [{"text": "y" * 1500} for _ in range(3)]
    stacked = TensorDict(
        {"one": NonTensorStack(*[objects] * 3), "equal": NonTensorStack(*equal)}, batch_size=[3]
    )
    dense = TensorDict({"zeros": torch.zeros(4, 60), "rows": torch.arange(50).repeat(4, 1)}, [4])
    return [
        (small, {}),
        (small, {"narrow": True}),
        (stacked, {}),
        (dense, {}),
    ]


@pytest.mark.parametrize("which", range(4))
def test_every_bit_of_real_tables(which):
    value, options = elided_messages()[which]
    frames = [bytes(memoryview(frame)) for frame in encode(value, elide=True, **options)]
    header = read_header(frames[0])
    before = verdicts(frames)[0]
    assert before is not None
    tables = tables_of(header)
    assert tables
    rng = random.Random(which)
    for buffer, offset, length in tables:
        bits = range(8 * length)
        # All bits of the low bytes, where sound numbers differ, and some of the others.
        low = [bit for bit in bits if bit // 8 % 8 < 2]
        for bit in [*rng.sample(low, min(len(low), 120)), *rng.sample(bits, 40)]:
            payload = bytearray(frames[1 + buffer])
            payload[offset + bit // 8] ^= 1 << bit % 8
            changed = [*frames]
            changed[1 + buffer] = bytes(payload)
            first, second, why = verdicts(changed)
            assert first == second, (buffer, offset, bit, why)


# --- bombs ---------------------------------------------------------------------------------------


def rows_made(rows, each, columns=1, spare=0):
    """Columns that take much more than their message: the same cells in all rows."""
    f = Forge()
    cells = f.put(bytes(each))
    group = f.shared_group([each] * rows)
    leaves = {}
    for i in range(columns):
        buffer, offset = f.put(table(run(each, cells, group=group)))
        leaves[f"c{i}"] = jagged(group, 1, [rows * each], "uint8", buffer, offset, 65)
    f.put(bytes(spare))
    return f.message(tensordict([rows], leaves))


def peak_of(read, frames):
    """Python's and numpy's memory at its peak, and the error if there was one."""
    tracemalloc.start()
    try:
        error = refused(read, frames)
        return tracemalloc.get_traced_memory()[1], error
    finally:
        tracemalloc.stop()


def claimed(kind, lengths, dims, dtype="uint8"):
    """A column of one cell that claims to be this large."""
    f = Forge()
    group = f.group(lengths)
    place = f.put(table(run(1, (0, 0), group=group, index=(0, 0), narrow=1)))
    if kind == "TENSOR":
        made = tensor(dtype, dims, place[0], place[1], 65)
    elif kind == "JAGGED":
        made = jagged(group, 1, dims, dtype, place[0], place[1], 65)
    else:
        made = rows_node(dims[0], place[0], place[1], group, 129)
    return f.message(made)


BOMBS = {
    "one row of a terabyte": lambda: claimed("JAGGED", [1 << 40], [1 << 40]),
    "one row of 2^62": lambda: claimed("JAGGED", [1 << 62], [1 << 62]),
    "one row of 2^60 int64": lambda: claimed("JAGGED", [1 << 59], [1 << 59], "int64"),
    "a tensor of few rows": lambda: claimed("TENSOR", [1], [2, 1 << 50]),
    "documents": lambda: claimed("NON_TENSOR_ROWS", [1 << 40], [1 << 40]),
    "a thousand columns": lambda: rows_made(200, 1 << 14, columns=1000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name):
    frames = BOMBS[name]()
    assert sum(map(len, frames)) < 500_000
    for read in (decode, lambda frames: open_wire(frames)):
        peak, error = peak_of(read, frames)
        assert error is not None
        assert error.reason == "too_large"
        assert "limits=Limits(expanded=" in error.detail
        assert peak < 100 * sum(map(len, frames)) + (1 << 20)
    with pytest.raises(spec_reader.RefusedError):
        spec_reader.read(frames)


def test_no_row_of_a_tensor_is_made_that_has_no_bytes():
    for rows in (1 << 50, 1 << 24, 10_000):
        frames = claimed("TENSOR", [1], [rows])
        peak, error = peak_of(decode, frames)
        assert error is not None
        assert peak < 1 << 20


def test_small_messages_become_little():
    """What a row may share is sent, and each row takes bytes of its own."""
    most = rows_made(50, 400)
    assert sum(map(len, most)) < 1100
    assert decode(most)["c0"].values().nbytes == 20_000
    f = Forge()
    index, cells = f.put(bytes(375)), f.put(bytes(250))
    place = f.put(table(run(1, cells, stored=1, index=index, narrow=1)))
    frames = f.message(tensor("int64", [3000, 2000], place[0], place[1], 65))
    assert sum(map(len, frames)) < 1000
    assert decode(frames).nbytes == 48_000_000


def test_the_limit_of_what_is_made():
    """It counts cells, rows and offsets, beyond 64 for each byte of the message."""
    frames = rows_made(400, 1 << 10, columns=9)
    total = sum(map(len, frames))
    beyond = 9 * 400 * ((1 << 10) + 32) + 64 * 8 * 401 - 64 * total
    assert beyond > 0
    decode(frames, limits=Limits(expanded=beyond))
    with pytest.raises(WireFormatError, match=rf"Limits\(expanded={beyond}\)") as caught:
        decode(frames, limits=Limits(expanded=beyond - 1))
    assert caught.value.reason == "too_large"
    fits = rows_made(400, 1 << 10, columns=9, spare=beyond // 64 + 1)
    decode(fits, limits=Limits(expanded=0))


def test_documents_count_more():
    """Objects take more than their bytes; of rows that are one object, one is made."""
    row = b"\x92" + b"\xdc\x04\x00" + b"\x90" * (1 << 10) + b"\xc0"
    for stored, objects in ((65, 16), (129, 1)):
        frames = documents_of(run_of(row), lengths=[len(row)] * 1000, stored=stored)
        total = sum(map(len, frames))
        beyond = 64 * (1000 * len(row) - 64 * total) if objects > 1 else 0
        most = max(beyond, 1000 * (len(row) + 32) + 64 * 8 * 1001 - 64 * total)
        if objects > 1:
            for read in (decode, leaf_by_leaf, rows_of):
                with pytest.raises(WireFormatError, match=f"expanded={beyond}") as caught:
                    limited(read, frames, beyond - 1)
                assert caught.value.reason == "too_large"
            assert beyond < Limits().expanded
        else:
            items = decode(frames, limits=Limits(expanded=most)).get("a").tolist()
            assert all(item is items[0] for item in items)


def limited(read, frames, expanded):
    if read is decode:
        return decode(frames, limits=Limits(expanded=expanded))
    batch = open_wire(frames, limits=Limits(expanded=expanded))
    return batch.leaf("a") if read is leaf_by_leaf else batch.rows([0, 1]).to_tensordict()


def test_documents_of_several_columns_count_together():
    row = b"\xdc\x01\x00" + b"\x90" * (1 << 8)
    f = Forge()
    leaves = {
        f"c{i}": column(f, "NON_TENSOR_ROWS", [run_of(row)], [len(row)] * 400) for i in range(3)
    }
    frames = f.message(tensordict([400], leaves))
    beyond = 64 * (3 * 400 * len(row) - 64 * sum(map(len, frames)))
    assert beyond > 0
    assert refused(lambda m: decode(m, limits=Limits(expanded=beyond)), frames) is None
    error = refused(lambda m: decode(m, limits=Limits(expanded=beyond - 1)), frames)
    assert error is not None
    assert error.reason == "too_large"


def test_what_repeats_does_not_repeat_at_every_level():
    """The billion laughs: 60 rows, each of which is a message of 60 rows, and so on."""
    frames = message(tensor("int64", [800], 0, 0, 1), bytes(100))
    for level in range(6):
        frames = in_a_row(frames, rows=60)
        peak, error = peak_of(decode, frames)
        assert peak < 10 << 20
        assert (error is None) == (level == 0)
        first, second, why = verdicts(frames)
        assert first == second, why


def indices_at_many_places(columns):
    """Columns of one byte per cell, whose indices are bits at other places."""
    f = Forge()
    rows = 1 << 14
    bits = f.put(bytes(rows // 8 + columns))
    data = f.put(bytes(1))
    group = f.shared_group([1] * rows)
    leaves = {}
    for i in range(columns):
        index = (bits[0], bits[1] + i)
        place = f.put(table(run(1, data, group=group, index=index, narrow=1)))
        leaves[f"c{i}"] = jagged(group, 1, [rows], "uint8", place[0], place[1], 65)
    return f.message(tensordict([rows], leaves))


def test_indices_count():
    """They take eight bytes where a cell may take one."""
    few, many = (peak_of(decode, indices_at_many_places(n))[0] for n in (10, 110))
    assert many - few < 100 * (8 + 1 + 1) * (1 << 14)


def over_one_table(columns, rows, cells=1):
    """Columns over one table: rows without cells but the last."""
    f = Forge()
    group = f.shared_group([0] * (rows - 1) + [cells])
    index = f.put(bytes((rows + 7) // 8))
    data = f.put(bytes(cells))
    place = f.put(table(run(cells, data, group=group, index=index, narrow=1)))
    f.put(bytes(64 * columns))
    leaf = jagged(group, 1, [cells], "uint8", place[0], place[1], 65)
    return f.message(tensordict([rows], {f"c{i}": leaf for i in range(columns)}))


def test_thousands_of_columns_over_one_table():
    td = decode(over_one_table(2000, 100))
    assert len(td.keys()) == 2000
    offsets = {td.get(name).offsets().data_ptr() for name in ("c0", "c1", "c1999")}
    assert len(offsets) == 1
    assert_in_proportion(lambda n: partial(decode, over_one_table(n, 100)), 100)


def test_rows_without_cells_count():
    """Thousands of columns of rows without cells take time; so they count as bytes."""
    frames = over_one_table(3000, 1 << 16)
    total = sum(map(len, frames))
    error = refused(decode, frames)
    assert error is not None
    assert error.reason == "too_large"
    assert 64 * total + (1 << 30) < 3000 * 8 * (1 << 16)


# --- memory that somebody writes to --------------------------------------------------------------


def test_columns_that_share_cells_are_apart_once_they_are_read():
    frames = [bytearray(frame) for frame in corpus_indirect.GOOD["indirect_shared"][-1]]
    td = decode(frames)
    before = {name: td.get(name).values().clone() for name in "abc"}
    td["d"].fill_(99)
    td.get("a").values().fill_(77)
    assert td.get("b").values().equal(before["b"])
    assert td.get("c").values().equal(before["c"])


def test_tables_and_indices_are_copied_before_they_are_checked(monkeypatch):
    """Another process may write to a message while it is read."""
    frames = [bytearray(frame) for frame in corpus_indirect.GOOD["indirect_anywhere"][-1]]
    batch = open_wire(frames)
    view = message_in(batch).rows(batch.by_name["a"].key)
    frames[1][:] = b"\xff" * len(frames[1])
    assert view.row_starts().tolist() == [1, 1]
    assert batch.leaf("a").values().shape == (5,)


# --- what is written -----------------------------------------------------------------------------

SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@settings(max_examples=150, suppress_health_check=SLOW, deadline=None)
@given(trees() | tensordicts(trees(max_leaves=3)), st.booleans())
def test_any_value_comes_back(eager, value, narrow):
    frames = [bytes(memoryview(frame)) for frame in encode(value, elide=True, narrow=narrow)]
    assert_same(decode(frames), value)
    assert plain(spec_reader.read(frames)) == plain(neutral(value))
    assert frames == [bytes(memoryview(f)) for f in encode(value, elide=True, narrow=narrow)]


CELLS = st.sampled_from([[0, 0, 0, 0], [1, 2, 3, 4], [5, 5, 9, 9], [0, 1, 0, 1], [7, 6, 5, 4]])


@st.composite
def repeating(draw):
    """Batches whose columns and rows are often those of others."""
    rows = draw(st.integers(1, 6))
    dtypes = st.sampled_from([torch.int64, torch.uint8, torch.float32, torch.bool, torch.int16])
    kept: list = []
    columns = {}
    for i in range(draw(st.integers(1, 6))):
        kind = draw(st.integers(0, 5))
        if kind == 0 and kept:
            made = draw(st.sampled_from(kept))
        elif kind == 1 and kept:
            one, other = draw(st.sampled_from(kept)), draw(st.sampled_from(kept))
            made = [a + b for a, b in zip(one, other, strict=True)]
        else:
            pool = [draw(CELLS) * draw(st.integers(0, 3)) for _ in range(draw(st.integers(1, 3)))]
            made = [
                draw(st.sampled_from(pool)) + draw(CELLS) * draw(st.integers(0, 1))
                for _ in range(rows)
            ]
        kept.append(made)
        dtype = draw(dtypes)
        if draw(st.integers(0, 4)) == 0:
            columns[f"c{i}"] = torch.tensor([[*row, 0][:1] * 3 for row in made]).to(dtype)
        elif draw(st.integers(0, 6)) == 0:
            objects = [{"row": row} for row in kept[0]]
            columns[f"c{i}"] = NonTensorStack(
                *[draw(st.sampled_from(objects)) for _ in range(rows)]
            )
        else:
            columns[f"c{i}"] = nested(made, dtype)
    return TensorDict(columns, batch_size=[rows])


@settings(max_examples=200, suppress_health_check=SLOW, deadline=None)
@given(repeating(), st.booleans())
def test_any_batch_that_repeats_comes_back(eager, td, narrow):
    frames = [bytes(memoryview(frame)) for frame in encode(td, elide=True, narrow=narrow)]
    assert_same(decode(frames), td)
    assert plain(spec_reader.read(frames)) == plain(neutral(td))
    batch = open_wire(frames)
    assert_same(batch.to_tensordict(), td)
    backwards = [*range(len(td) - 1, -1, -1)]
    assert_same(
        batch.rows(backwards).to_tensordict(),
        decode(open_wire(encode(td)).rows(backwards).to_frames()),
    )
    padded, expected = materialize(batch), materialize(open_wire(encode(td)))
    for name, column_ in expected.items():
        if isinstance(column_, torch.Tensor):
            assert torch.equal(padded[name], column_), name


@settings(max_examples=100, suppress_health_check=SLOW, deadline=None)
@given(trees() | tensordicts(trees(max_leaves=3)) | repeating(), st.booleans())
def test_never_more_bytes_than_without(value, narrow):
    assert size(encode(value, elide=True, narrow=narrow)) <= size(encode(value, narrow=narrow))


# Collisions


def rows_that_differ_at(at, length=4000, rows=8):
    """Rows that are equal but for one cell."""
    base = np.random.default_rng(0).integers(0, 1 << 40, length)
    made = [base.copy() for _ in range(rows)]
    for i, row in enumerate(made):
        row[at] = i
    return made


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 511, 512, 1999, 2000, 2001, 3984, 3998, 3999])
def test_rows_that_are_equal_but_for_one_cell(at, narrow):
    made = rows_that_differ_at(at)
    td = TensorDict({"a": nested(made)}, batch_size=[8])
    assert_same(decode(encode(td, elide=True, narrow=narrow)), td)
    columns = {f"c{i}": nested([row[:2000], row[2000:]]) for i, row in enumerate(made)}
    td = TensorDict(columns, batch_size=[2])
    assert_same(decode(encode(td, elide=True, narrow=narrow)), td)
    dense = TensorDict(
        {f"c{i}": torch.tensor(row) for i, row in enumerate(made)}, batch_size=[4000]
    )
    assert_same(decode(encode(dense, elide=True, narrow=narrow)), dense)


@pytest.mark.parametrize("at", [0, 31, 32, 33, 2000, 2031, 2032, 3967, 3968, 3999])
def test_documents_that_are_equal_but_for_one_byte(at):
    texts = []
    for i in range(6):
        text = bytearray(b"x" * 4000)
        text[at] = 97 + i % 3
        texts.append(text.decode())
    arrays = [torch.tensor(list(text.encode()), dtype=torch.uint8) for text in texts]
    for objects in (texts, [{"text": text} for text in texts], arrays):
        td = TensorDict({"a": NonTensorStack(*objects)}, batch_size=[6])
        frames = encode(td, elide=True)
        assert_same(decode(frames), td)


def test_cells_of_equal_bits_only():
    """-0.0 equals 0.0, and NaN equals nothing, but bits are what is compared."""
    zeros = torch.zeros(6, 100)
    zeros[3] = -0.0
    nans = torch.full((6, 100), float("nan"))
    bools = torch.ones(600, dtype=torch.uint8)
    bools[300:] = 2
    td = TensorDict(
        {"z": zeros, "n": nans, "b": bools.view(torch.bool).view(6, 100)}, batch_size=[6]
    )
    frames = encode(td, elide=True)
    back = decode(frames)
    assert back["z"].view(torch.int32).equal(zeros.view(torch.int32))
    assert back["b"].view(torch.uint8).equal(td["b"].view(torch.uint8))
    assert size(frames) < 3000


# Work, counted in operations of Python code: not by the clock


def assert_in_proportion(make, n, most=4):
    """Four times as much is at most so many times the work, and a half."""
    make(n)()  # loads whatever is loaded on first use
    work = []
    for units in (n, 4 * n):
        call = make(units)
        forget()
        work.append(operations(call))
    assert work[1] < 1.5 * most * work[0], work


def many_columns(n):
    """Columns that begin, end and have in their middle what all others have."""
    rng = np.random.default_rng(0)
    columns = {}
    for i in range(n):
        row = np.full(64, 7)
        row[[9, 40]] = rng.integers(0, 1 << 40, 2) + i
        columns[f"c{i}"] = nested([row[:30], row[30:]])
    return TensorDict(columns, batch_size=[2])


def longer_and_shorter(n):
    """Columns whose rows could be those of others and more, and are not."""
    rng = np.random.default_rng(0)
    columns = {f"c{i}": nested([rng.integers(0, 1 << 40, 40 + i % 5)]) for i in range(n)}
    return TensorDict(columns, batch_size=[1])


def repeated_columns(n):
    """Three different columns, over and over."""
    columns = {f"c{i}": nested([[i % 3] * 20, [i % 3] * 30]) for i in range(n)}
    return TensorDict(columns, batch_size=[2])


def long_prefixes(rows, length):
    """Rows that share all but their last cell."""
    base = np.random.default_rng(0).integers(0, 1 << 40, length)
    return TensorDict({"a": nested([[*base, i] for i in range(rows)])}, batch_size=[rows])


def ladder(rows):
    """Rows each of which begins with the one before it."""
    base = np.random.default_rng(0).integers(0, 1 << 40, rows)
    return TensorDict({"a": nested([base[: i + 1] for i in range(rows)])}, batch_size=[rows])


def short_rows(rows):
    cells = np.random.default_rng(0).integers(0, 3, (rows, 2))
    lengths = np.random.default_rng(1).integers(0, 3, rows)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    values = torch.tensor(cells.reshape(-1)[: int(offsets[-1])])
    made = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
    return TensorDict({"a": made}, batch_size=[rows])


def one_row(cells):
    values = torch.arange(cells) % 97 * (torch.arange(cells) % 89)
    return TensorDict({"a": nested([values]), "b": nested([values.flip(0)])}, batch_size=[1])


SEARCHES = {
    "many columns": (many_columns, 50),
    "longer and shorter": (longer_and_shorter, 50),
    "columns that repeat": (repeated_columns, 50),
    "long prefixes": (lambda n: long_prefixes(n, 2000), 50),
    "ladder": (ladder, 50),
    "short rows": (short_rows, 2_500),
    "one row": (one_row, 25_000),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_the_search_takes_work_in_proportion(name):
    make, n = SEARCHES[name]
    value = make(4 * n)
    frames = encode(value, elide=True)
    assert_same(decode(frames, limits=Limits(expanded=1 << 40)), value)
    # A ladder has four times as many rows and sixteen times as many cells.
    most = 16 if name == "ladder" else 4
    assert_in_proportion(lambda n: partial(encode, make(n), elide=True), n, most)


def test_a_list_of_lone_tensors(eager):
    value = [torch.zeros(50), torch.zeros(50), torch.tensor(3.0), torch.zeros(0, 3), torch.ones(1)]
    assert_same(decode(encode(value, elide=True)), value)
    frames = encode(list(map(torch.clone, value)), elide=True)
    assert [bytes(memoryview(f)) for f in frames] == [
        bytes(memoryview(f)) for f in encode(value, elide=True)
    ]


def test_no_more_runs_are_written_than_readers_take():
    """Each column is the one before it and one more."""
    rng = np.random.default_rng(0)
    ends = [rng.integers(0, 1 << 40, (2, 200)) for _ in range(9)]
    columns = {"end0": nested(ends[0])}
    for i in range(1, len(ends)):
        columns[f"end{i}"] = nested(ends[i])
        columns[f"all{i}"] = nested(np.concatenate(ends[: i + 1], axis=1))
    td = TensorDict(columns, batch_size=[2])
    frames = encode(td, elide=True)
    header = read_header(bytes(frames[0]))
    found = [size // (8 * len(RUN_NUMBERS)) for *_, size in tables_of(header)]
    assert max(found) == MOST_RUNS
    assert len(found) == len(ends) - 2  # one of them is sent as it is
    assert_same(decode(frames), td)


def test_tables_in_frames_of_their_own():
    """Of a list of tensors, as of columns."""
    f = Forge(apart=True)
    made = column(f, "TENSOR", [run_of(b"\1\2", [1, 0])], [1, 1])
    frames = f.message(list_of(made, made), bytes(64))
    first, second, why = verdicts(frames)
    assert first is not None
    assert first == second, why
