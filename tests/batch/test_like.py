"""Columns whose rows cover only the beginning of their tokens: laid out like the tokens."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    concat_rows,
    encode,
    join_columns,
    materialize,
    open_wire,
    stack_or_nest,
)
from jagcodec.testing import bits

LIKE = {"experts": "ids"}


def batch_of(lengths, shorter, inner=(3, 2)):
    rng = np.random.default_rng(len(lengths))
    experts = [torch.from_numpy(rng.integers(1, 99, (n, *inner))) for n in shorter]
    ids = [torch.arange(1, n + 1) for n in lengths]
    columns = {
        "experts": stack_or_nest(experts, always_nest=True),
        "ids": stack_or_nest(ids, always_nest=True),
    }
    return TensorDict(columns, batch_size=[len(lengths)]), experts


def expected(experts, starts, width, pad):
    out = np.full((len(experts), width, 3, 2), pad)
    covered = np.zeros((len(experts), width), bool)
    for i, (row, start) in enumerate(zip(experts, starts, strict=True)):
        out[i, start : start + len(row)] = row
        covered[i, start : start + len(row)] = True
    return out.tolist(), covered.tolist()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5), st.data())
def test_rows_begin_where_the_others_begin_and_pads_come_behind(sizes, data):
    lengths = [max(pair) for pair in sizes]
    batch, experts = batch_of(lengths, [min(pair) for pair in sizes])
    side = data.draw(st.sampled_from(["right", "left", "left_right"]))
    width = data.draw(st.sampled_from([0, 9]))
    options = {"padding_side": side, "pad_to_seqlen": width, "like": LIKE}
    prompts = [data.draw(st.integers(0, n)) for n in lengths]
    held = width or max(lengths)
    starts = [0] * len(lengths)
    if side == "left":
        starts = [held - n for n in lengths]
    elif side == "left_right":
        if width:
            options["pad_to_seqlen"] = 20
        options["prompt_lengths"] = prompts
        starts = [max(prompts) - n for n in prompts]
        needed = max(a + n for a, n in zip(starts, lengths, strict=True))
        held = 20 if width else max(needed, max(prompts))
    frames = encode(batch, narrow=data.draw(st.booleans()))
    for source in (batch, frames, [frames], open_wire(frames).rows(slice(None))):
        found = materialize(
            source,
            pad_value_dict={"experts": -1},
            attention_mask_of={"ids": "tokens", "experts": "captured"},
            **options,
        )
        assert list(found)[:2] == ["experts", "ids"]
        cells, covered = expected(experts, starts, held, -1)
        assert found["experts"].tolist() == cells
        assert found["captured"].tolist() == covered
        _, tokens = expected([torch.ones(n, 3, 2) for n in lengths], starts, held, 0)
        assert found["tokens"].tolist() == tokens
        assert found["ids"].shape == found["captured"].shape


def test_the_others_are_left_as_they_are():
    batch, _ = batch_of([4, 2], [3, 0])
    plain = materialize(batch)
    like: dict[Any, str] = {**LIKE, "none": "ids", ("a", "b"): "nobody"}
    found = materialize(batch, like=like)
    assert bits(found["ids"]) == bits(plain["ids"])
    assert plain["experts"].shape == (2, 3, 3, 2)
    assert found["experts"].shape == (2, 4, 3, 2)
    assert not found["experts"][1].any()


def test_rectangles_take_either_part():
    batch, experts = batch_of([4, 2], [2, 2])
    batch["experts"] = torch.stack(experts)  # as readers do whose rows are equally long
    found = materialize(batch, like=LIKE, padding_side="left", pad_value_dict={"experts": 7})
    assert found["experts"].tolist() == expected(experts, [0, 2], 4, 7)[0]
    batch, experts = batch_of([3, 3], [2, 0])
    batch["ids"] = torch.ones(2, 3)
    found = materialize(batch, like=LIKE, attention_mask_of="experts")
    assert found["experts"].tolist() == expected(experts, [0, 0], 3, 0)[0]
    assert found["attention_mask"].tolist() == [[True, True, False], [False] * 3]


def test_long_rows_go_straight_to_their_rectangle_and_into_memory_that_is_reused():
    lengths = [900, 400, 1000]
    rng = np.random.default_rng(3)
    rows = [torch.from_numpy(rng.integers(0, 99, (n - 1, 6, 8), dtype=np.int16)) for n in lengths]
    columns = {
        "ids": stack_or_nest([torch.arange(n) for n in lengths], always_nest=True),
        "experts": stack_or_nest(rows, always_nest=True),
    }
    frames = encode(TensorDict(columns, [3]))
    memory = torch.full((800_000,), 7, dtype=torch.uint8)
    for out in (None, memory, memory):
        for pad in (0, -1):
            found = materialize(
                frames, pad_value_dict={"experts": pad}, padding_side="left", like=LIKE, out=out
            )["experts"]
            for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
                start = 1000 - n
                assert torch.equal(found[i, start : start + n - 1], row)
                assert (found[i, :start] == pad).all()
                assert (found[i, start + n - 1 :] == pad).all()
    size = memoryview(frames[-1]).nbytes
    memory[-size:] = torch.frombuffer(bytearray(frames[-1]), dtype=torch.uint8)
    sent = [*frames[:-1], memory[-size:]]
    assert materialize(sent, like=LIKE, out=memory[:-size]) is not None
    with pytest.raises(ArgumentError, match="overlap"):
        materialize(sent, like=LIKE, out=memory[-size - 200_000 :])


def test_nested_batches():
    inner, experts = batch_of([3, 1], [2, 1])
    batch = TensorDict({"inner": inner, "ids": inner["ids"]}, [2])
    found = materialize(batch, like={("inner", "experts"): ("inner", "ids")})
    assert found["inner"]["experts"].tolist() == expected(experts, [0, 0], 3, 0)[0]
    found = materialize(batch, like={("inner", "experts"): "ids"}, pad_to_seqlen=5)
    assert found["inner"]["experts"].tolist() == expected(experts, [0, 0], 5, 0)[0]


def test_several_messages():
    batch, experts = batch_of([3, 1], [2, 1])
    frames = encode(batch)
    joined = concat_rows([open_wire(frames), open_wire(frames)])
    found = materialize(joined, like=LIKE, pad_value_dict={"experts": -1})["experts"]
    assert found.tolist() == expected(experts * 2, [0] * 4, 3, -1)[0]


def test_gradients_pass():
    experts = torch.ones(3, 2, requires_grad=True)
    columns = {
        "ids": stack_or_nest([torch.arange(2), torch.arange(3)], always_nest=True),
        "experts": torch.nested.nested_tensor_from_jagged(experts, torch.tensor([0, 1, 3])),
    }
    materialize(TensorDict(columns, [2]), like=LIKE)["experts"].sum().backward()
    assert experts.grad is not None
    assert experts.grad.tolist() == [[1, 1]] * 3


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"like": {"ids": "experts"}}, ArgumentError, "row 0: expected at most the 2 cells of"),
        ({"like": {"experts": "none"}}, ArgumentKeyError, "materialize(like['experts'])"),
        ({"like": {"experts": "tag"}}, ArgumentKeyError, "column that is padded"),
        ({"like": {"tag": "ids"}}, ArgumentTypeError, "expected rows to be like others"),
        ({"like": {"experts": "ids", "ids": "x"}}, ArgumentError, "not itself like another"),
        ({"like": 3}, ArgumentTypeError, "expected a mapping"),
        ({"like": LIKE, "keep_jagged": ["ids"]}, ArgumentKeyError, "column that is padded"),
        ({"like": LIKE, "layout": "jagged"}, ArgumentError, "requires layout='padded'"),
        ({"like": {"none": "ids"}, "strict": True}, ArgumentKeyError, "materialize(like)"),
        ({"attention_mask_of": 3}, ArgumentTypeError, "name of a column, or a mapping"),
        ({"attention_mask_of": {"ids": 3}}, ArgumentTypeError, "name of a column, or a mapping"),
        ({"attention_mask_of": {"ids": "m", "experts": "m"}}, ArgumentError, "name for each mask"),
        ({"attention_mask_of": {"ids": "tag"}}, ArgumentError, "expected no column 'tag'"),
        ({"attention_mask_of": {"no": "m"}}, ArgumentKeyError, "attention_mask_of='no'"),
    ],
)
def test_wrong_options(options, error, text):
    batch, _ = batch_of([3, 1], [2, 1])
    batch["tag"] = NonTensorStack("x", "y")
    with pytest.raises(error) as raised:
        materialize(batch, **options)
    assert text in str(raised.value)


def test_an_empty_batch():
    batch, _ = batch_of([1], [0])
    frames = encode(batch)
    assert materialize(open_wire(frames).rows([]), like=LIKE)["experts"].shape == (0, 0, 3, 2)
    assert materialize(frames, like=LIKE)["experts"].tolist() == [[[[0, 0]] * 3]]


# --- joins of columns --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4), st.data())
def test_columns_that_cover_the_beginnings_of_their_tokens_are_put_beside_them(pairs, data):
    lengths = [n + more for n, more in pairs]
    batch, experts = batch_of(lengths, [n for n, _ in pairs])
    of_tokens, of_beginnings = (
        open_wire(encode(batch.select(name))) for name in ("ids", "experts")
    )
    order = [of_tokens, of_beginnings]
    if data.draw(st.booleans()):
        order.reverse()
    both = join_columns(order, like=LIKE)
    assert set(both.fields) == {"ids", "experts"}
    for joined, rows in ((both, experts), (both.rows([-1, 0]), [experts[-1], experts[0]])):
        found = materialize(joined, like=LIKE, pad_value_dict={"experts": -1})
        assert found["experts"].shape[:2] == found["ids"].shape
        for i, row in enumerate(rows):
            assert torch.equal(found["experts"][i, : len(row)], row)
            assert (found["experts"][i, len(row) :] == -1).all()
    if any(more for _, more in pairs):
        row = next(i for i, (_, more) in enumerate(pairs) if more)
        with pytest.raises(ArgumentError) as raised:
            join_columns(order)
        assert raised.value.path.endswith(f"row {row}")


def test_a_third_message_is_still_compared_with_the_tokens():
    batch, _ = batch_of([3, 4], [2, 4])
    first = open_wire(encode(batch))
    other = {"logprobs": stack_or_nest([torch.ones(2), torch.ones(4)], always_nest=True)}
    short = open_wire(encode(TensorDict(other, [2])))
    with pytest.raises(ArgumentError) as raised:
        join_columns([first, short], like=LIKE)
    assert raised.value.path == "join_columns(batches[1])['logprobs'], row 0"
    assert raised.value.detail.startswith("expected 3 tokens like 'ids'")
    assert join_columns([first, short], like={**LIKE, "logprobs": "ids"}).fields[-1] == "logprobs"


@pytest.mark.parametrize(
    ("like", "error", "text"),
    [
        (["experts"], ArgumentTypeError, "join_columns(like): expected a mapping"),
        ({"experts": "no"}, ArgumentKeyError, "join_columns(like)('no'): expected one of"),
        ({"no": "ids"}, ArgumentKeyError, "join_columns(like)('no'): expected one of"),
        ({"experts": "tag"}, ArgumentTypeError, "expected jagged columns, found 'tag'"),
        ({"experts": "ids", "ids": "tag"}, ArgumentError, "not itself like another, found 'ids'"),
        (LIKE, ArgumentError, "join_columns('experts'), row 1: expected at most the 2 cells of"),
    ],
)
def test_joins_of_what_is_no_beginning(like, error, text):
    batch, _ = batch_of([3, 2], [2, 3])
    batch["tag"] = NonTensorStack("x", "y")
    first, second = (open_wire(encode(batch.select(*n))) for n in (("ids", "tag"), ("experts",)))
    with pytest.raises(error) as raised:
        join_columns([first, second], like=like)
    assert text in str(raised.value)
