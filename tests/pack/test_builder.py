"""A row that grows."""

import array
import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jagcodec import (
    ArgumentError,
    RowBuilder,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    encode_rows,
    materialize,
    open_wire,
    pack_jagged_fields,
    stack_or_nest,
    to_rows,
)
from jagcodec.errors import ArgumentTypeError
from tests.helpers import receive, rollout


def grown():
    row = RowBuilder({"logprobs": torch.float32})
    row.append(input_ids=[5, 6, 7], logprobs=0.0, loss_mask=False)
    row.append(input_ids=[8, 9], logprobs=[-0.5, -0.25], loss_mask=True)
    row.set(reward=0.5, answer="42")
    return row


def listed(row):
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.to_row().items()}


FULL = {
    "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25],
    "input_ids": [5, 6, 7, 8, 9],
    "loss_mask": [False, False, False, True, True],
    "reward": 0.5,
    "answer": "42",
}


def test_a_row_of_two_turns():
    row = grown()
    assert len(row) == 5
    assert listed(row) == FULL
    assert {
        k: v.dtype for k, v in row.to_row().items() if k in ("logprobs", "input_ids", "loss_mask")
    } == {
        "logprobs": np.float32,
        "input_ids": np.int64,
        "loss_mask": np.bool_,
    }
    assert repr(row).startswith("RowBuilder(tokens=5, columns=['logprobs', 'input_ids'")


class Growing(RuleBasedStateMachine):
    """A builder beside three lists."""

    def __init__(self):
        super().__init__()
        self.row = RowBuilder({"x": torch.float64})
        self.expected = {"x": [], "ids": [], "cell": []}
        self.taken = []

    @rule(n=st.integers(0, 300), start=st.integers(-5, 5), as_array=st.booleans())
    def append(self, n, start, as_array):
        ids = list(range(start, start + n))
        cells = [[i, i + 1] for i in ids]
        self.row.append(x=0.5, ids=np.array(ids, dtype=np.int64) if as_array else ids, cell=cells)
        for name, chunk in (("x", [0.5] * n), ("ids", ids), ("cell", cells)):
            self.expected[name] += chunk

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        n = int(share * len(self.row))
        self.row.truncate(n)
        self.expected = {name: tokens[:n] for name, tokens in self.expected.items()}

    @rule(
        pair=st.sampled_from(
            [{"ids": [1]}, {"x": [1.0], "ids": [1, 2], "cell": [[1, 2]]}, {"x": ["a"]}]
        )
    )
    def refused(self, pair):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            self.row.append(**pair)

    @rule(
        how=st.sampled_from([copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row))])
    )
    def copied(self, how):
        before, self.row = self.row, how(self.row)
        before.append(x=9.0, ids=9, cell=[[9, 9]])

    @rule()
    def resumed(self):
        if len(self.row):
            self.row = RowBuilder.from_message(receive(self.row.to_frames()))

    @rule()
    def snapshot(self):
        self.taken.append((self.row.to_row(), self.row.to_frames(), copy.deepcopy(self.expected)))
        del self.taken[:-3]

    @invariant()
    def same(self):
        assert len(self.row) == len(self.expected["x"])
        for row, frames, expected in [(self.row.to_row(), None, self.expected), *self.taken]:
            assert {k: row[k].tolist() for k in row if len(row[k])} == {
                k: v for k, v in expected.items() if v
            }
            if frames is not None and expected["x"]:
                td = decode(frames)
                assert {k: td[k].values().tolist() for k in expected} == expected


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


@pytest.mark.parametrize(
    ("chunk", "dtype"),
    [
        ([1, 2], "int64"),
        ((1, 2), "int64"),
        ([1, 2.5], "float32"),
        ([True, False], "bool"),
        ([1.5, 2], "float32"),
        (range(2), "int64"),
        ([np.float64(0.5), 1], "float32"),
        ([np.int8(1), np.int8(2)], "int64"),
        (array.array("i", [1, 2]), "int64"),
        (array.array("Q", [1, 2]), "int64"),
        (array.array("d", [0.5]), "float32"),
        (np.array([1, 2], dtype=">i2"), "int16"),
        (np.array([1, 2], dtype=np.uint64), "uint64"),
        (np.array([1j, 2]), "complex128"),
        (np.ones((2, 3), dtype=np.float16), "float16"),
        (torch.ones(2, 3), "float32"),
        (torch.ones(2, requires_grad=True), "float32"),
        (torch.arange(6).view(2, 3).t(), "int64"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "float32"),
        ([[1, 2], [3, 4]], "int64"),
        ([[[1.5], [2]], [[3], [4]]], "float32"),
    ],
)
def test_what_a_chunk_may_be(chunk, dtype):
    row = RowBuilder()
    row.append(x=chunk)
    found = row.to_row()["x"]
    assert found.dtype == np.dtype(dtype)
    parts = [x.tolist() if hasattr(x, "tolist") else x for x in chunk]
    assert found.tolist() == parts
    assert len(row) == len(chunk)
    row.append(x=chunk)
    assert row.to_row()["x"].tolist() == parts * 2


@pytest.mark.parametrize(
    ("dtype", "chunk", "found"),
    [
        (torch.bool, [False, True], [False, True]),
        (torch.float32, [1, 2.5], [1, 2.5]),
        (torch.float32, [0.1], [np.float32(0.1)]),
        (torch.float32, [2**70, 0.5, np.inf], [2.0**70, 0.5, np.inf]),
        (torch.float16, [0.5, 65504], [0.5, 65504]),
        (torch.float16, np.array([-np.inf]), [-np.inf]),
        (torch.int8, [-128, 127], [-128, 127]),
        (torch.uint64, [2**64 - 1], [2**64 - 1]),
        (torch.uint64, np.array([0, 5]), [0, 5]),
        (torch.int64, np.array([5], dtype=np.uint64), [5]),
        (torch.int64, [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        (torch.float64, [2**60], [2.0**60]),
        (torch.complex64, torch.tensor([1j]), [1j]),
        (torch.bfloat16, [1, 0.5, 256], [1, 0.5, 256]),
        (torch.float8_e5m2, torch.tensor([1, 0.5]).to(torch.float8_e5m2), [1, 0.5]),
        (torch.bfloat16, torch.tensor([1.0], dtype=torch.bfloat16), [1]),
        (torch.float32, torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
    ],
)
def test_numbers_become_cells_of_the_dtype(dtype, chunk, found):
    row = RowBuilder({"x": dtype})
    row.append(x=chunk)
    cells = row.to_row()["x"]
    assert torch.as_tensor(cells).dtype == dtype
    assert cells.tolist() == found
    back = to_rows(row.to_frames())[0]["x"]
    assert back.dtype == dtype
    assert back.tolist() == found
    again = RowBuilder.from_message(row.to_frames())
    again.append(x=chunk)
    assert again.to_row()["x"].tolist() == found * 2


def test_nan_and_infinities_are_kept():
    row = RowBuilder()
    row.append(x=[float("nan"), float("inf"), -0.0])
    assert str(row.to_row()["x"].tolist()) == "[nan, inf, -0.0]"


@pytest.mark.parametrize(
    ("dtype", "chunk", "error", "match"),
    [
        (
            torch.int64,
            [1, 2.0],
            ArgumentTypeError,
            r"expected integers \(the column is int64\), found 2.0; for floats pass dtypes=",
        ),
        (torch.int64, 0.5, ArgumentTypeError, "dtypes="),
        (torch.bool, [0.0], ArgumentTypeError, r"cell 0: expected bools, found 0\.0"),
        (torch.float32, [1j], ArgumentTypeError, "list that begins with complex"),
        (torch.float32, np.array([1j]), ArgumentTypeError, "complex128"),
        (torch.bool, [True, 1], ArgumentTypeError, "cell 1: expected bools, found 1$"),
        (torch.bool, np.array([1]), ArgumentTypeError, "expected torch.bool, found torch.int64"),
        (torch.int64, [1, True], ArgumentTypeError, "cell 1: expected numbers.*found True$"),
        (torch.int32, np.array([True]), ArgumentTypeError, "found torch.bool"),
        (torch.float32, [1e300], ArgumentError, r"cell 0: .*float32 holds, found 1e\+300"),
        (None, [0.5, 1e39], ArgumentError, r"cell 1: .*float32 holds, found 1e\+39"),
        (torch.float16, np.array([1e9]), ArgumentError, "float16 holds, found 1000000000"),
        (torch.int8, [0, 128], ArgumentError, "int8 holds exactly, found 128"),
        (torch.int8, np.array([-129]), ArgumentError, "found -129"),
        (torch.uint8, [-1], ArgumentError, "found -1"),
        (torch.uint64, [-1], ArgumentError, "found -1"),
        (torch.int64, [2**63], ArgumentError, "found 9223372036854775808"),
        (torch.int64, np.array([2**63], dtype=np.uint64), ArgumentError, "found 922"),
        (torch.int64, [2**64], ArgumentError, "an int of 65 bits"),
        (torch.uint64, [2**63, -1], ArgumentError, "found"),
        (None, [2**63], ArgumentError, "int64 holds exactly"),
        (None, [2**70 + 1, 0.5], ArgumentError, "found an int of 71 bits"),
        (None, [2**24 + 1, 0.5], ArgumentError, "float32 holds exactly, found 16777217"),
        (torch.float32, [2**24 + 1], ArgumentError, "float32 holds exactly, found 16777217"),
        (torch.float32, [2**24 + 1, 0.5], ArgumentError, "found 16777217"),
        (torch.float64, [2**53 + 1], ArgumentError, "found 9007199254740993"),
        (torch.float64, [2**53 + 1, 0.5], ArgumentError, "found 9007199254740993"),
        (torch.float16, np.array([70000]), ArgumentError, "found 70000"),
        (torch.float16, [0.5, 70000], ArgumentError, "found 70000"),
        (torch.bfloat16, [257], ArgumentError, "found 257"),
        (torch.float8_e4m3fn, [16], ArgumentTypeError, "float8_e4m3fn; pass tensors"),
        (torch.complex64, [1], ArgumentTypeError, "complex64; pass tensors"),
        (None, "text", ArgumentTypeError, "found 'text'"),
        (None, ["a"], ArgumentTypeError, r"\('x'\): .*a list that begins with 'a'"),
        (None, [1, "a"], ArgumentTypeError, "cell 1: .*found 'a'"),
        (None, [1, None], ArgumentTypeError, "cell 1: expected a number, found None"),
        (None, [None, 1], ArgumentTypeError, "cell 0: expected a number, found None"),
        (None, None, ArgumentTypeError, "found None"),
        (None, (i for i in (1, 2)), ArgumentTypeError, "generator"),
        (None, {1, 2}, ArgumentTypeError, "set"),
        (None, b"ab", ArgumentTypeError, "bytes"),
        (None, array.array("u", "ab"), ArgumentTypeError, "found array"),
        (None, array.array("Q", [2**63]), ArgumentError, "found 922"),
        (None, [[1], [1, 2]], ArgumentError, r"expected lists of 1 .*found \[1, 2\]"),
        (None, [[1], 2], ArgumentError, "expected lists of 1 .*found 2"),
        (None, [torch.ones(1)], ArgumentTypeError, "list that begins with Tensor"),
        (None, np.array(["a"]), ArgumentTypeError, "dtype <U1"),
        (None, np.array([None]), ArgumentTypeError, "dtype object"),
        (None, np.ones(1, dtype=np.longdouble), ArgumentTypeError, "dtype"),
        (None, stack_or_nest([torch.ones(1), torch.ones(2)]), ArgumentTypeError, "nested"),
        (None, torch.eye(2).to_sparse(), ArgumentTypeError, "sparse"),
        (None, torch.ones(2, device="meta"), ArgumentTypeError, "meta"),
    ],
)
def test_what_is_refused_changes_nothing(dtype, chunk, error, match):
    row = RowBuilder(None if dtype is None else {"x": dtype}, same_length=())
    row.append(a=[1])
    for _ in range(2):
        with pytest.raises(error, match=match) as raised:
            row.append(a=[2], x=chunk, b=[3])
        assert raised.value.path.startswith("RowBuilder.append('x')")
        assert row.to_row()["a"].tolist() == [1]
        assert "b" not in row.to_row()
        assert not len(row.to_row().get("x", ()))


def test_columns_must_be_as_long_as_each_other():
    row = grown()
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"input_ids": [1]},
            r"append\('input_ids'\).*expected 5 tokens in all like 'logprobs', found 6",
        ),
        (
            {"input_ids": [1], "logprobs": [0.5, 0.5], "loss_mask": True},
            "expected 1 tokens like 'input_ids'",
        ),
        ({"input_ids": [1], "logprobs": 0.5, "loss_mask": True, "new": [1]}, r"\('new'\).*found 1"),
        ({"input_ids": [1], "logprobs": [0.5], "loss_mask": []}, r"\('loss_mask'\).*found 5"),
    ]
    for chunk, match in refused:
        with pytest.raises(ArgumentError, match=match):
            row.append(**chunk)
        assert listed(row) == FULL
    first = RowBuilder({"a": torch.int64, "b": torch.int64})
    with pytest.raises(ArgumentError, match=r"\('b'\).*expected 1 tokens in all like 'a', found 0"):
        first.append(a=[1])


def test_some_columns_must_be_as_long_as_each_other():
    row = RowBuilder(same_length=["response", "mask"])
    row.append(prompt=[1, 2, 3], image=np.zeros((4, 2)))
    row.append(response=[4, 5], mask=1)
    assert len(row) == 2
    with pytest.raises(ArgumentError, match="'response'"):
        row.append(mask=1)
    row.truncate(1)
    assert {k: len(v) for k, v in row.to_row().items()} == {
        "prompt": 3,
        "image": 4,
        "response": 1,
        "mask": 1,
    }
    row.append(response=[6, 7], mask=0, prompt=0)
    assert listed(row)["prompt"] == [1, 2, 3, 0, 0]
    free = RowBuilder(same_length=())
    free.append(a=[1, 2, 3], b=[1])
    assert len(free) == 3
    free.truncate(2)
    assert {k: len(v) for k, v in free.to_row().items()} == {"a": 2, "b": 1}
    with pytest.raises(ArgumentError, match="a number can fill"):
        free.append(a=[1, 2], b=[1], c=0)


def test_numbers_fill():
    row = RowBuilder()
    row.append(ids=7, mask=True)  # one token
    row.append(ids=[1, 2], mask=torch.tensor(False))
    row.append(ids=[], mask=np.bool_(True))
    row.append()
    assert listed(row) == {"ids": [7, 1, 2], "mask": [True, False, False]}
    row = RowBuilder()
    row.append(routed=[[1, 2], [3, 4]], ids=[1, 2])
    row.append(routed=-1, ids=[3])
    row.append(routed=[], ids=[])
    assert listed(row)["routed"] == [[1, 2], [3, 4], [-1, -1]]
    with pytest.raises(ArgumentError, match=r"shape \(2,\).*found \(3,\)"):
        row.append(routed=[[1, 2, 3]], ids=[3])


def test_empty_chunks_say_nothing():
    row = RowBuilder({"y": torch.int32})
    row.append(x=[], y=[])
    assert [listed(row), len(row), row.to_row()["y"].dtype] == [{"y": [], "x": []}, 0, np.int32]
    assert decode(row.to_frames())["x"].shape[0] == 1
    row.append(x=array.array("d"), y=range(0))
    row.append(x=[[1, 2]], y=[[3, 4]])
    row.append(x=[], y=[])
    assert listed(row) == {"y": [[3, 4]], "x": [[1, 2]]}


def test_values():
    row = grown()
    row.set(reward=1, version={"step": 3}, emb=np.ones(2, dtype=np.float16), flag=True)
    td = decode(receive(row.to_frames()))
    assert td["reward"].tolist() == [1]
    assert td["reward"].dtype == torch.int64
    assert td["flag"].dtype == torch.bool
    assert td["version"] == [{"step": 3}]
    assert td["emb"].values().dtype == torch.float16
    assert materialize(open_wire(row.to_frames()))["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    with pytest.raises(ArgumentError, match=r"set\('input_ids'\)"):
        row.set(other=1, input_ids=[1])
    assert "other" not in row.to_row()
    with pytest.raises(ArgumentError, match=r"append\('reward'\).*set once"):
        row.append(reward=[1], input_ids=[1], logprobs=0.0, loss_mask=0)
    row.set(lock=threading.Lock())
    with pytest.raises(UnsupportedTypeError, match="lock"):
        row.to_frames()
    row.set(lock=2**70)
    with pytest.raises(ArgumentError, match=r"'lock'\), row 0: .*71 bits"):
        row.to_frames()


def test_dtypes_say_what_values_become():
    row = RowBuilder({"big": object, "tools": object, "ids": torch.int32})
    row.set(big=2**70, tools=[])
    row.append(ids=[1])
    td = decode(row.to_frames())
    assert td["big"] == [2**70]
    assert td["tools"] == [[]]
    again = RowBuilder.from_message(row.to_frames())
    assert [bytes(f) for f in again.to_frames()] == [bytes(f) for f in row.to_frames()]
    like = RowBuilder(open_wire(encode(rollout())).schema)
    like.append(ids=[1], logprob=[0.5])
    like.set(reward=1)
    assert decode(like.to_frames())["reward"].dtype == torch.float32


def test_frames_take_the_options_of_encode():
    row = grown()
    row.set(odd=object)
    assert len(decode(row.to_frames(allow_pickle=True, checksum=True), allow_pickle=True)) == 1
    assert decode(row.to_frames(default=repr))["odd"] == [repr(object)]
    narrow = RowBuilder()
    narrow.append(x=np.arange(5000) % 100)
    sizes = [sum(memoryview(f).nbytes for f in narrow.to_frames(narrow=n)) for n in (False, True)]
    assert sizes[1] * 4 < sizes[0]


def test_meta_is_that_of_one_message():
    row = grown()
    frames = row.to_frames(meta={"step": 3})
    assert open_wire(frames).meta == {"step": 3}
    assert open_wire(row.to_frames()).meta == {}
    assert open_wire(RowBuilder.from_message(frames).to_frames()).meta == {}


def test_a_large_snapshot_is_not_changed_by_what_follows():
    row = RowBuilder()
    row.append(x=np.arange(10_000))
    frames, before = row.to_frames(), row.to_row()
    row.truncate(0)
    row.append(x=np.zeros(10_000, dtype=np.int64))
    assert decode(frames)["x"].values().tolist() == before["x"].tolist() == list(range(10_000))
    before["x"][:] = 5
    assert row.to_row()["x"].max() == 0


def test_resumed_rows_send_what_was_sent():
    td = pack_jagged_fields(
        {
            "ids": torch.arange(8).view(2, 4),
            "reward": torch.tensor([0.5, 1.5], dtype=torch.float64),
            "embedding": torch.ones(2, 3),
            "text": ["a", "b"],
        },
        lengths=torch.tensor([2, 4]),
        token_aligned_fields=["ids"],
    )
    row = RowBuilder.from_message(open_wire(encode(td)).rows([1]))
    again = decode(row.to_frames())
    assert again["reward"].dtype == torch.float64
    assert again["embedding"].shape == (1, 3)
    assert again["text"] == ["b"]
    row.append(ids=[9])
    row.set(embedding=torch.ones(2))
    assert decode(row.to_frames())["embedding"].shape == (1, 2)
    assert listed(row)["ids"] == [4, 5, 6, 7, 9]
    same = RowBuilder.from_message(row.to_frames(), same_length=["ids"])
    assert len(same) == 5


def test_messages_that_cannot_be_resumed():
    with pytest.raises(ArgumentError, match=r"one row.*rows\(\[i\]\)"):
        RowBuilder.from_message(encode(rollout()))
    free = RowBuilder(same_length=())
    free.append(a=[1], b=[1, 2])
    with pytest.raises(ArgumentError, match=r"\('b'\).*same_length"):
        RowBuilder.from_message(free.to_frames())
    assert len(RowBuilder.from_message(free.to_frames(), same_length=())) == 2
    with pytest.raises(WireFormatError):
        RowBuilder.from_message(b"nothing")
    wide = stack_or_nest([torch.ones(3, 2)], always_nest=True, ragged_dim=2)
    with pytest.raises(ArgumentError, match="ragged dim 2"):
        RowBuilder.from_message(encode(pack_jagged_fields({"x": wide}, lengths=None)))
    nested = pack_jagged_fields({"x": torch.ones(1)}, lengths=None)
    nested["inner"] = nested.clone()
    with pytest.raises(ArgumentTypeError, match="'inner'"):
        RowBuilder.from_message(encode(nested))


def test_dtypes_of_an_earlier_batch():
    row = RowBuilder(open_wire(encode(rollout())).schema)
    row.append(ids=[1], logprob=[0.5])
    row.set(reward=1.0)
    assert {k: v.dtype for k, v in list(row.to_row().items())[:2]} == {
        "ids": np.int64,
        "logprob": np.float32,
    }


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        (([("x", torch.int64)],), {}, ArgumentTypeError, "dict of names to dtypes, found list"),
        (({"x": np.int64},), {}, ArgumentTypeError, "a torch dtype, object or"),
        (({5: torch.int64},), {}, ArgumentTypeError, "a name"),
        (({"x": torch.qint8},), {}, ArgumentTypeError, r"\['x'\].*qint8"),
        ((), {"same_length": "ids"}, ArgumentTypeError, "put it in a list"),
    ],
)
def test_bad_options(arguments, options, error, match):
    with pytest.raises(error, match=match):
        RowBuilder(*arguments, **options)


@pytest.mark.parametrize("tokens", [-1, 6, 2.5, "2", None])
def test_bad_truncation(tokens):
    row = grown()
    with pytest.raises(ArgumentError, match="truncate"):
        row.truncate(tokens)
    assert listed(row) == FULL
    row.truncate(5)
    row.truncate(0)
    assert len(row) == 0
    assert row  # a row without tokens is a row


def test_a_pickle_has_the_cells_that_are_kept_and_no_more():
    row = RowBuilder()
    for i in range(4096):
        row.append(x=i, y=torch.tensor([i], dtype=torch.bfloat16))
    assert len(pickle.dumps(row)) < 4096 * 10 + 2000
    row.truncate(8)
    assert len(pickle.dumps(row)) < 2000


def test_a_float_after_ints_makes_a_column_float32():
    row = RowBuilder()
    row.append(reward=[0, 1], ids=[1, 2])
    row.append(reward=[0.5], ids=np.array([3]))
    row.append(reward=2, ids=[4])
    assert listed(row) == {"reward": [0.0, 1.0, 0.5, 2.0], "ids": [1, 2, 3, 4]}
    assert row.to_row()["reward"].dtype == np.float32
    chosen = [np.array([1]), [2**24 + 1]]  # by an array; or an int that float32 rounds
    for first in chosen:
        row = RowBuilder()
        row.append(x=first)
        with pytest.raises((ArgumentError, ArgumentTypeError), match="append"):
            row.append(x=[0.5])
        assert row.to_row()["x"].dtype == np.int64


def test_a_message_is_that_of_the_row():
    row = grown()
    row.set(routed=[3, 1], tools=["a"], embedding=np.ones(2), big=7)
    frames = row.to_frames(meta={"step": 3})
    same = encode_rows([row.to_row()], meta={"step": 3})
    assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in same]
    assert decode(frames)["routed"].is_nested


@given(
    st.lists(st.integers(-(2**70), 2**70) | st.integers(-300, 300), min_size=1, max_size=3),
    st.sampled_from(
        [
            "bool",
            "int8",
            "uint8",
            "int32",
            "uint32",
            "int64",
            "uint64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
        ]
    ),
)
def test_ints_are_exact_or_refused(ints, name):
    dtype = getattr(torch, name)
    row = RowBuilder({"x": dtype})
    if name.startswith(("int", "uint")):
        info = torch.iinfo(dtype)
        fits = all(info.min <= i <= info.max for i in ints)
    elif name == "bool":
        fits = False
    else:
        bits = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}[name]
        fits = all(
            (i == 0 or abs(i).bit_length() - (i & -i).bit_length() < bits)
            and (name != "float16" or abs(i) <= 65504)
            for i in ints
        )
    try:
        row.append(x=ints)
    except (ArgumentError, ArgumentTypeError):
        assert not fits
    else:
        assert fits
        assert row.to_row()["x"].tolist() == ints
