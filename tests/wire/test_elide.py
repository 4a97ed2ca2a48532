"""`elide`: what columns repeat is sent once, and comes back bit for bit."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from benchmarks.measure import functions_entered
from jagcodec import (
    Limits,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    encode_fields,
    materialize,
    open_wire,
    select_rows,
    to_blob,
)
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.wire import elide as eliding
from jagcodec.wire import header
from jagcodec.wire.indirect import runs_at
from jagcodec.wire.spec import NO_INDEX
from tests.helpers import message_in, nested, rollouts, size
from tests.oracle import assert_same
from tests.strategies import tensordicts, trees
from tests.wire.conftest import send_whatever_repeats_once
from tests.wire.test_spec_reader import assert_reads


def runs_of(frames, name):
    """Of each run of a column whether its rows begin "anywhere" or all at the "first" cell; None
    of a column that is sent as it is.
    """
    batch = open_wire(frames)
    leaf = message_in(batch).leaf(batch.by_name[name].key)
    if not leaf.runs:
        return None
    runs = runs_at(message_in(batch), leaf)
    return ["first" if run.index_buffer == NO_INDEX else "anywhere" for run in runs]


# --- what is found -----------------------------------------------------------------------------


RUNS = {
    "prompts": ["anywhere"],
    "responses": None,
    "input_ids": ["anywhere", "anywhere"],
    "attention_mask": ["first"],
    "position_ids": ["first"],
    "response_mask": ["first"],
    "loss_mask": ["first"],
    "advantages": ["anywhere", "anywhere"],
    "logprobs": None,
    "rewards": ["first"],
}


@pytest.mark.parametrize("narrow", [False, True])
def test_a_batch_of_rollouts_is_sent_once(narrow):
    td = rollouts()
    frames = encode(td, narrow=narrow, elide=True)
    assert {name: runs_of(frames, name) for name in RUNS} == RUNS
    assert_same(decode(frames), td)
    news = td["responses"].values().numel() + td["prompts"].values().numel() // 4
    floor = news * (2 if narrow else 8) + 2 * td["logprobs"].values().nbytes
    assert size(frames) < floor + 12_000
    assert_reads([bytes(memoryview(frame)) for frame in frames], td)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_positions_of_every_width_are_those_of_the_longest_row(dtype, eager):
    rows = [np.arange(0, 3 * n, 3) for n in (20, 1, 9, 0)]
    falling = nested([200 - row for row in rows], dtype)
    td = TensorDict({"up": nested(rows, dtype), "down": falling}, batch_size=[4])
    for narrow in (False, True):
        frames = encode(td, narrow=narrow, elide=True)
        assert (runs_of(frames, "up"), runs_of(frames, "down")) == (["first"], ["first"])
        assert_same(decode(frames), td)
        assert_reads([bytes(memoryview(frame)) for frame in frames], td)


@pytest.mark.parametrize("systems", [1, 3])
def test_rows_of_one_prompt_share_what_they_begin_with(systems):
    """Without a column of prompts; the questions share a system prompt, or one of several."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 9, 100) for _ in range(systems)]
    rows = []
    for i in range(15):
        question = rng.integers(0, 9, 150)
        for _ in range(4):
            rows.append(np.concatenate([prompts[i % systems], question, rng.integers(0, 9, 30)]))
    order = rng.permutation(60)
    td = TensorDict({"ids": nested([rows[i] for i in order])}, batch_size=[60])
    frames = encode(td, elide=True)
    assert runs_of(frames, "ids") == ["anywhere", "anywhere"]
    assert_same(decode(frames), td)
    assert_reads([bytes(memoryview(frame)) for frame in frames], td)
    # Fifteen questions, each with its system prompt, and sixty answers.
    assert size(frames) < 8 * (15 * 250 + 60 * 30) + 4000
    chosen = open_wire(frames).rows([7, 2, 7])
    assert_same(chosen.to_tensordict(), select_rows(td, [7, 2, 7]))


def test_steps_of_an_agent_are_sent_with_the_last_one():
    """Each step of an episode begins with all of the step before it; episodes share a prompt."""
    rng = np.random.default_rng(2)
    prompt, rows = rng.integers(0, 9, 200), []
    for _ in range(4):
        steps = [prompt, *(rng.integers(0, 9, 50) for _ in range(5))]
        rows += [np.concatenate(steps[: 2 + i]) for i in range(5)]
    td = TensorDict({"ids": nested(rows)}, batch_size=[20])
    frames = encode(td, elide=True)
    assert_same(decode(frames), td)
    assert size(frames) < 8 * 4 * 450 + 2000


@settings(max_examples=300)
@given(
    st.lists(
        st.lists(st.sampled_from([b"", b"a", b"ab" * 20, b"cd" * 70]), max_size=4), max_size=20
    )
)
def test_rows_begin_like_rows_that_begin_like_no_other(made):
    rows = [b"".join(row) for row in made]
    data = np.frombuffer(b"".join(rows), np.uint8)
    splits = RowSplits.from_lengths(np.array(list(map(len, rows)), dtype=np.int64))
    if not splits.total:
        return
    like, shared = (numbers.tolist() for numbers in eliding._beginnings(data, splits, 1))
    for row, other, cells in zip(rows, like, shared, strict=True):
        assert 0 <= cells <= len(row)
        assert rows[other][:cells] == row[:cells]
        assert shared[other] == 0
    for row, other, cells in zip(rows, like, shared, strict=True):
        if len(row) >= 20 and rows.count(row) > 1:  # one of them is kept, or all begin like one
            assert cells >= 20 or rows[other] == row


def test_the_head_and_the_tail_are_columns_of_their_own():
    td = rollouts().select("input_ids", "prompts", "responses")
    td = td.select("responses", "input_ids", "prompts")
    frames = encode(td, elide=True)
    assert runs_of(frames, "input_ids") == ["anywhere", "anywhere"]
    assert_same(decode(frames), td)
    both, parts = size(encode(td, elide=True)), size(encode(td.exclude("input_ids"), elide=True))
    assert both < parts + 1000


def test_columns_of_one_memory_are_sent_once_and_come_back_apart():
    values = torch.arange(1000).remainder(7)
    ids = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 300, 1000]))
    for twin in (ids, nested([values[:300], values[300:]])):
        td = TensorDict({"a": ids, "b": twin, "n": torch.rand(2, 500)}, batch_size=[2])
        td["m"] = td["n"].clone()
        frames = encode(td, elide=True)
        assert size(frames) < values.nbytes + td["n"].nbytes + 1500
        back = decode(frames)
        assert_same(back, td)
        back["a"].values().zero_()
        back["n"].zero_()
        assert_same(back["b"], td["b"])
        assert_same(back["m"], td["m"])


def test_rectangles_repeat_rows(eager):
    rows = torch.rand(4, 3, 50)
    index = [0, 0, 2, 1, 1, 1, 3, 0]
    value = {
        "rows": rows[index],
        "zeros": torch.zeros(8, 64, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(8, 0, 4),
    }
    td = TensorDict({name: value[name] for name in ("rows", "zeros", "none")}, batch_size=[8])
    for item in (value, td):
        frames = encode(item, elide=True)
        assert_same(decode(frames), item)
        assert_reads([bytes(memoryview(frame)) for frame in frames], item)
    batch = open_wire(encode(td, elide=True))
    assert_same(batch.rows([7, 2, 0])["rows"], td["rows"][[7, 2, 0]])
    assert_same(batch.rows(slice(3, 6))["zeros"], td["zeros"][3:6])


# --- objects -----------------------------------------------------------------------------------


def payloads(kind):
    """Eight rows of images, each of which stands twice, and the images themselves."""
    images = [torch.rand(60, 100) + i for i in range(4)]
    if kind == "one object":
        rows = [{"pixels": image, "grid": [1, 2]} for image in images]
        return [row for row in rows for _ in range(2)], images
    return [{"pixels": image.clone(), "grid": [1, 2]} for image in images for _ in (0, 1)], images


@pytest.mark.parametrize("kind", ["one object", "equal objects"])
def test_payloads_that_occur_more_than_once_are_sent_once(kind):
    rows, images = payloads(kind)
    stack = TensorDict({"mm": NonTensorStack(*rows)}, batch_size=[8])
    array = np.empty(8, dtype=object)
    array[:] = rows
    for value, column in (
        (stack, lambda x: x.get("mm").tolist()),
        ({"mm": array}, lambda x: x["mm"]),
    ):
        frames = encode(value, elide=True)
        assert size(frames) < 1.1 * sum(image.nbytes for image in images)
        found = list(column(decode(frames)))
        assert_same(found, rows)
        assert (found[0] is found[1]) == (kind == "one object")
        assert found[1] is not found[2]
        if kind != "one object":
            found[0]["pixels"].zero_()
            assert_same(found[1], rows[1])
        assert_reads([bytes(memoryview(frame)) for frame in frames], value)
    batch = open_wire(encode(stack, elide=True)).rows([3, 2, 0])
    assert_same(batch["mm"].tolist(), [rows[3], rows[2], rows[0]])
    again = decode(encode(batch, elide=True)).get("mm").tolist()
    assert_same(again, [rows[3], rows[2], rows[0]])
    assert_same(decode(batch.to_frames()).get("mm").tolist(), again)
    assert (again[0] is again[1]) == (kind == "one object")


def test_long_texts_are_sent_once_and_short_ones_as_they_are():
    texts = [chr(97 + i // 4) * 2000 for i in range(12)]
    td = TensorDict({"text": NonTensorStack(*texts)}, batch_size=[12])
    frames = encode(td, elide=True)
    assert size(frames) < 3 * 2000 + 600
    assert decode(frames).get("text").tolist() == texts
    short = TensorDict({"text": NonTensorStack(*"abcabc")}, batch_size=[6])
    assert encode(short, elide=True) == encode(short)


# --- sharing -----------------------------------------------------------------------------------


def test_rows_of_a_message_are_shared_until_a_rectangle_is_made():
    td = rollouts()
    frames = encode(td, narrow=True, elide=True)
    order = [5, 5, 0, 23, 5]
    batch = open_wire(frames).rows(order)
    expected = select_rows(td, order)
    assert_same(batch.to_tensordict(), expected)
    plain, made = materialize(expected), materialize(batch)
    for name in plain:
        assert torch.equal(plain[name], made[name])
    again = batch.to_frames()
    assert_same(decode(again), expected)
    assert size(again) < size(encode(expected)) / 2
    whole = open_wire(frames)
    assert isinstance(dict(whole.columns())["input_ids"].memory, tuple)


@pytest.mark.parametrize("narrow", [False, True])
def test_of_chosen_rows_nothing_else_is_fetched(narrow):
    td = rollouts(prompts=64, repeats=8)
    store = bytes(memoryview(to_blob(encode(td, narrow=narrow, elide=True))))
    batch = open_wire(lambda offset, size: store[offset : offset + size])
    whole = len(store)

    def fetched(rows, name):
        fetched = []

        def fetch(offset, size):
            fetched.append(size)
            return store[offset : offset + size]

        chosen = open_wire(fetch).rows(rows)
        opened = sum(fetched)
        assert_same(chosen[name], select_rows(td, list(rows))[name])
        return sum(fetched) - opened

    assert_same(batch.to_tensordict(), td)
    cell = 2 if narrow else 8
    for rows in (range(16, 24), [16, 500, 17, 16], range(0)):
        asked, answers = (
            int(td[name].offsets().diff()[list(rows)].sum()) for name in ("prompts", "responses")
        )
        # Tables, offsets and indices of all rows; of cells, those of the rows.
        besides = 2 * 8 * 513 + 8 * 512 + 1000
        assert fetched(rows, "prompts") <= besides + cell * asked
        assert fetched(rows, "input_ids") <= 2 * besides + cell * (asked + answers) + 8 * 513
    assert fetched(range(512), "input_ids") < whole


@pytest.mark.parametrize("kind", ["one object", "equal objects"])
def test_of_chosen_payloads_nothing_else_is_fetched(kind):
    rows, images = payloads(kind)
    td = TensorDict({"mm": NonTensorStack(*rows)}, batch_size=[8])
    store = bytes(memoryview(to_blob(encode(td, elide=True))))
    sizes = []

    def fetch(offset, size):
        sizes.append(size)
        return store[offset : offset + size]

    for chosen in ([3, 2, 3], [6]):
        sizes.clear()
        found = open_wire(fetch).rows(chosen)["mm"].tolist()
        assert_same(found, [rows[i] for i in chosen])
        assert sum(sizes) < images[0].nbytes + 8000
        assert (found[0] is found[-1]) == (kind == "one object" or len(chosen) == 1)


@pytest.mark.parametrize(
    "options", [{"narrow": True}, {"elide": True}, {"narrow": True, "elide": True}]
)
def test_messages_that_share_are_joined_as_they_are(options):
    batches = [rollouts(seed, prompts) for seed, prompts in ((0, 3), (1, 1), (2, 2))]
    messages = [encode(td, **options) for td in batches]
    plain = [encode(td) for td in batches]
    rows = [23, 0, 12, 12, 13, 5]
    for chosen in (slice(None), rows, slice(8, 20)):
        joined = materialize([open_wire(m) for m in messages], padding_side="left")
        wanted = materialize([open_wire(m) for m in plain], padding_side="left")
        for name in wanted:
            assert torch.equal(joined[name], wanted[name]), name
        ours, theirs = (concat_rows(m).rows(chosen) for m in (messages, plain))
        assert_same(ours.to_tensordict(), theirs.to_tensordict())
        assert_same(decode(ours.to_frames()), theirs.to_tensordict())
        assert [ours.row_lengths(name).tolist() for name in RUNS] == [
            theirs.row_lengths(name).tolist() for name in RUNS
        ]


def test_rectangles_are_written_over_used_memory_with_pads_around_runs():
    td = rollouts(prompts=2)
    frames = encode(td, elide=True)
    pads: dict[str, Any] = {"input_ids": 7, "logprobs": -1.0}
    first = materialize(frames, pad_value_dict=pads)
    for side in ("right", "left"):
        wanted = materialize(td, pad_value_dict=pads, padding_side=side)
        for tensor in first.values():
            tensor.fill_(3)
        again = materialize(frames, pad_value_dict=pads, padding_side=side, out=first)
        for name in wanted:
            assert torch.equal(again[name], wanted[name]), (side, name)


# --- what may be asked -------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.one_of(trees(), tensordicts()), st.booleans())
def test_any_value_comes_back(value, narrow):
    frames = encode(value, narrow=narrow, elide=True)
    assert_same(decode(frames), value)
    assert size(frames) <= size(encode(value, narrow=narrow))


@settings(max_examples=80)
@given(st.integers(0, 1 << 32), st.booleans())
def test_small_batches_with_repeats_of_every_kind_come_back(seed, narrow):
    rng = random.Random(seed)
    patch = pytest.MonkeyPatch()
    send_whatever_repeats_once(patch)
    patch.setattr(eliding, "_HEAD", 16)
    dtype = rng.choice([torch.int64, torch.int16, torch.bool, torch.float32, torch.uint8])
    rows = rng.randrange(1, 13)
    base = [[rng.randrange(2) for _ in range(rng.randrange(5))] for _ in range(3)]
    heads = [rng.choice(base) for _ in range(rows)]
    tails = [rng.choice(base) for _ in range(rows)]
    columns = {
        "heads": heads,
        "tails": tails,
        "both": [a + b for a, b in zip(heads, tails, strict=True)],
        "ones": [[1] * len(row) for row in heads],
        "rises": [list(range(i, i + len(row))) for i, row in enumerate(tails)],
        "trees": [rng.choice(base) * 2 + rng.choice(base) * 3 + row for row in tails],
    }
    names = rng.sample(list(columns), rng.randrange(1, 7))
    td = TensorDict({n: nested(columns[n], dtype) for n in names}, batch_size=[rows])
    try:
        frames = encode(td, narrow=narrow, elide=True)
    finally:
        patch.undo()
    assert_same(decode(frames), td)
    assert_reads([bytes(memoryview(frame)) for frame in frames], td)
    assert_same(
        open_wire(frames).rows([0, rows - 1, 0]).to_tensordict(), select_rows(td, [0, rows - 1, 0])
    )
    store = bytes(memoryview(to_blob(frames)))
    chosen = [rng.randrange(rows) for _ in range(rng.randrange(4))]
    part = open_wire(lambda offset, size: store[offset : offset + size]).rows(chosen)
    assert_same(part.to_tensordict(), select_rows(td, chosen))
    made, wanted = materialize(frames), materialize(td)
    for name in wanted:
        assert torch.equal(made[name], wanted[name])


def test_every_encoder_takes_it():
    lengths = torch.tensor([100, 300])
    fields = {"ids": torch.ones(2, 300, dtype=torch.int64)}
    frames = encode_fields(fields, lengths=lengths, elide=True)
    assert runs_of(frames, "ids") == ["first"]
    td = decode(frames)
    memory = bytearray(len(to_blob(encode(td, elide=True))))
    assert encode(td, out=memory, elide=True) == len(memory)
    assert bytes(memory) == bytes(to_blob(frames))


def constant(rows, each):
    """Rows of one cell, again and again."""
    values = torch.zeros(rows * each, dtype=torch.int64)
    offsets = torch.arange(0, rows * each + 1, each)
    column = torch.nested.nested_tensor_from_jagged(values, offsets)
    return TensorDict({"zeros": column}, batch_size=[rows])


def test_what_a_small_message_may_become_is_bounded():
    td = constant(1 << 10, 1 << 12)
    frames = encode(td, elide=True)
    assert size(frames) < 50_000
    assert_same(decode(frames), td)
    beyond = 8 * (1 << 22) + 32 * (1 << 10) + 64 * 8 * ((1 << 10) + 1) - 64 * size(frames)
    with pytest.raises(WireFormatError) as caught:
        decode(frames, limits=Limits(expanded=beyond - 1))
    assert (caught.value.reason, caught.value.path) == ("too_large", "header")
    assert_same(decode(frames, limits=Limits(expanded=beyond)), td)


def test_what_a_reader_would_not_take_is_sent_as_it_is(monkeypatch):
    """Of what the limits bound: many rows that are one large object, or one cell."""
    one = {"text": "x" * 5000}
    td = TensorDict({"mm": NonTensorStack(*[one] * 200)}, batch_size=[200])
    for value in (td, constant(1 << 10, 1 << 10)):
        assert size(encode(value, elide=True)) < 20_000
        with monkeypatch.context() as patch:
            patch.setattr(header, "DEFAULT_LIMITS", Limits(expanded=100))
            frames = encode(value, elide=True)
        assert frames == encode(value)
        assert_same(decode(frames), value)


def test_as_much_is_sent_once_as_a_reader_takes(monkeypatch):
    """Documents count for more than their bytes only beyond what a message is always given."""
    monkeypatch.setattr(header, "DEFAULT_LIMITS", Limits(expanded=0))
    image = torch.rand(60, 100)
    rows: list[Any] = [{"pixels": image.clone()} for _ in range(40)]
    td = TensorDict({"mm": NonTensorStack(*rows)}, batch_size=[40])
    frames = encode(td, elide=True)
    assert size(frames) < 2 * image.nbytes
    assert_same(decode(frames, limits=Limits(expanded=0)), td)


# --- rows that begin alike ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.int64])
@pytest.mark.parametrize("tail", [(), (3,)])
def test_rows_of_every_width_that_repeat_are_found(dtype, tail):
    rng = np.random.default_rng(7)
    kinds = [rng.integers(0, 100, (n, *tail)) for n in (0, 1, 3, 5, 200, 201)]
    rows = [kinds[i % 6] for i in range(48)]
    td = TensorDict({"a": nested(rows, dtype)}, batch_size=[48])
    frames = encode(td, elide=True)
    assert runs_of(frames, "a") == ["anywhere"]
    own = sum(kind.size for kind in kinds) * dtype.itemsize
    assert size(frames) < own + 1024
    assert_same(decode(frames), td)
    assert_reads([bytes(memoryview(frame)) for frame in frames], td)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tail", [(16,), (3, 5)])
def test_rows_of_a_rectangle_that_repeat_are_found(dtype, tail, eager):
    rng = np.random.default_rng(8)
    few = torch.as_tensor(rng.normal(size=(5, *tail)) * 50).abs().to(dtype)
    if dtype.is_floating_point:
        few[0], few[1], few[2] = 0.0, -0.0, float("nan")
    td = TensorDict({"a": few[torch.from_numpy(rng.integers(0, 5, 900))]}, batch_size=[900])
    frames = encode(td, elide=True)
    assert runs_of(frames, "a") == ["anywhere"]
    assert_same(decode(frames), td)


def test_rows_that_begin_otherwise_are_not_looked_at_one_by_one():
    def entered(rows):
        rng = np.random.default_rng(9)
        columns = {
            "ids": nested([rng.integers(0, 1 << 40, 8) for _ in range(rows)]),
            "rewards": torch.from_numpy(rng.integers(0, 1 << 40, rows) % 9),
        }
        td = TensorDict(columns, batch_size=[rows])
        package = Path(eliding.__file__).parents[1]
        return functions_entered(partial(encode, td, elide=True), package)

    one_by_one = 512 - 64
    assert entered(512) - entered(64) < one_by_one / 4


def test_equal_rows_beside_a_tensor_stay_apart_and_one_object_one():
    one: list[int] = []
    rows = [torch.ones(1), *([] for _ in range(40)), one, one]
    back = decode(encode(NonTensorStack(*rows), elide=True)).tolist()
    assert back[1:] == [[]] * 42
    assert len({id(row) for row in back[1:41]}) == 40
    assert all(row is not back[41] for row in back[1:41])
