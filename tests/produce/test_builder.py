"""A row that grows."""

import copy
import pickle
import threading
import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tensordict import NonTensorData

from jagcodec import RowBuilder, decode, encode, encode_rows, open_wire, pack_jagged_fields
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    UnsupportedTypeError,
    WireFormatError,
)
from jagcodec.types import FieldSchema
from tests.helpers import message, receive, rollout


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


COPIES = [copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row))]


class Growing(RuleBasedStateMachine):
    """A builder next to three lists."""

    def __init__(self):
        super().__init__()
        self.row = RowBuilder({"x": torch.float64})
        self.expected = {"x": [], "ids": [], "cell": []}
        self.taken = []

    @rule(n=st.integers(0, 300) | st.just(3000), start=st.integers(-5, 5), as_array=st.booleans())
    def append(self, n, start, as_array):
        ids = list(range(start, start + n))
        cells = [[i, i + 1] for i in ids]
        self.row.append(x=0.5, ids=np.array(ids, dtype=np.int64) if as_array else ids, cell=cells)
        for name, chunk in (("x", [0.5] * n), ("ids", ids), ("cell", cells)):
            self.expected[name] += chunk

    @rule(times=st.integers(0, 2))
    def append_numbers(self, times):
        """One number is one token, or as many as the others have."""
        for _ in range(times if self.expected["x"] else 0):
            self.row.append(x=1, ids=7, cell=-1)
            self.row.append(x=torch.tensor(2.5), ids=[8, 9], cell=np.int64(-2))
            self.row.append()
            self.expected["x"] += [1.0, 2.5, 2.5]
            self.expected["ids"] += [7, 8, 9]
            self.expected["cell"] += [[-1, -1], [-2, -2], [-2, -2]]

    @rule(share=st.floats(0, 1), n=st.integers(0, 40), in_place=st.booleans())
    def append_from(self, share, n, in_place):
        """All columns go on from a token of theirs, or two of them do and one is as it was."""
        at = int(share * len(self.row))
        n = len(self.row) - at if in_place else n
        start, cells = {"ids": at, "cell": at}, np.arange(2 * n).reshape(n, 2)
        more = {} if in_place else {"x": torch.arange(n) * 0.5}
        if not self.expected["x"]:
            return
        start |= dict.fromkeys(more, at)
        self.row.append(start, ids=[3] * n, cell=cells, **more)
        for name, chunk in (("ids", [3] * n), ("cell", cells.tolist()), ("x", more.get("x"))):
            if chunk is not None:
                chunk = chunk if isinstance(chunk, list) else chunk.tolist()
                self.expected[name] = self.expected[name][:at] + chunk

    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        n = int(share * len(self.row))
        self.row.truncate(n)
        self.expected = {name: tokens[:n] for name, tokens in self.expected.items()}

    @rule()
    def refused(self):
        for pair in ({"ids": [1]}, {"x": [1.0], "ids": [1, 2], "cell": [[1, 2]]}, {"x": ["a"]}):
            for start in (None, {"new": 0, **dict.fromkeys(pair, 0)}):
                with pytest.raises((ArgumentError, ArgumentTypeError)):
                    self.row.append(start, **pair, new=[1])

    @rule(how=st.sampled_from(COPIES))
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
        self.row.to_row()["x"][:] = 9.0  # which is the caller's own
        del self.taken[:-3]

    @invariant()
    def same(self):
        assert len(self.row) == len(self.expected["x"])
        for row, frames, expected in [(self.row.to_row(), None, self.expected), *self.taken]:
            found = {name: cells.tolist() for name, cells in row.items() if len(cells)}
            assert found == {name: cells for name, cells in expected.items() if cells}
            if frames is not None and expected["x"]:
                td = decode(frames)
                assert {k: td[k].values().tolist() for k in expected} == expected


def test_a_row_that_was_cut_to_nothing_keeps_the_shape_of_its_tokens():
    row = RowBuilder()
    row.append(h=np.ones((2, 3)))
    row.truncate(0)
    for each in (row, copy.copy(row), pickle.loads(pickle.dumps(row))):
        assert each.to_row()["h"].shape == (0, 3)
        with pytest.raises(ArgumentError, match=r"shape \(3,\) like those before, found \(4,\)"):
            each.append(h=np.ones((1, 4)))
        each.append(h=np.ones((1, 3)))
        assert each.to_row()["h"].shape == (1, 3)


CHUNKS = st.lists(st.integers(0, 255), max_size=6)
MADE: dict[str, Any] = {
    "list": list,
    "array": lambda ids: np.array(ids, np.uint8),
    "view": lambda ids: np.array([ids, ids], np.int32).T[:, 1],
    "tensor": lambda ids: torch.tensor(ids, dtype=torch.int16),
}


@given(st.data())
def test_chunks_from_a_token_on_are_slices_of_lists(data):
    """Two columns of their own lengths, of which one has its tokens along another dim."""
    schema = FieldSchema("jagged", torch.uint8, (1, 2, None))
    row = RowBuilder({"ids": torch.uint8, "axes": schema, "n": torch.int64}, same_length=["n"])
    expected: dict[str, list[int]] = {"ids": [], "axes": []}
    for i in range(data.draw(st.integers(1, 6))):
        start, chunks = {}, {}
        for name, before in expected.items():
            at = data.draw(st.none() | st.integers(0, len(before)))
            start |= {} if at is None else {name: at}
            ids = data.draw(CHUNKS)
            expected[name] = before[:at] + ids
            made = MADE[data.draw(st.sampled_from([*MADE]))](ids)
            chunks[name] = made if name == "ids" else [made, made] if ids else []
        row.append(start, n=[i], **chunks)
        snapshot = row.to_row()
        if data.draw(st.booleans()):
            row = RowBuilder.from_message(row.to_frames(), same_length=["n"])
    assert snapshot["ids"].tolist() == expected["ids"]
    assert snapshot["axes"].tolist() == [expected["axes"]] * 2
    assert snapshot["ids"].dtype == np.uint8


def experts(*ids):
    return [[i, i] for i in ids]


def test_a_start_that_no_chunk_has_is_refused():
    row = RowBuilder({"experts": "uint8", "start": "int64"}, same_length=["start"])
    row.append(start=[1, 2, 3], experts=experts(4, 5))
    row.set(reward=1.0)
    more: dict[str, Any] = {"start": [7], "experts": experts(8)}
    for start, chunks, error, path, detail in (
        ({"experts": 3}, more, ArgumentError, "['experts']", "at most 2, where .* found 3; append"),
        ({"experts": -1}, more, ArgumentError, "['experts']", "expected 0 to 2, found -1"),
        ({"experts": 1.0}, more, ArgumentError, "['experts']", "expected 0 to 2, found 1.0"),
        ({"experts": True}, more, ArgumentError, "['experts']", "expected 0 to 2, found True"),
        ({"experts": None}, more, ArgumentError, "['experts']", "expected 0 to 2, found None"),
        ({"new": 1}, {"new": [1]}, ArgumentError, "['new']", "at most 0, where .* found 1"),
        ({"new": 0}, more, ArgumentKeyError, "('new')", "of 'start', 'experts', found 'new'"),
        ({"experts": 0}, {"start": [7]}, ArgumentKeyError, "('experts')", "one of 'start', found"),
        ({"reward": 0}, more, ArgumentKeyError, "('reward')", "found 'reward'"),
        ({5: 0}, more, ArgumentKeyError, "(5)", "found 5"),
        ({"experts": 1}, {"experts": 9}, ArgumentError, "['experts']", "token 1 on, .* one"),
        ([7], {"experts": experts(8)}, ArgumentTypeError, "", "a dict of names .*, found list"),
        (1, {"experts": experts(8)}, ArgumentTypeError, "", "found int"),
    ):
        for _ in range(2):
            with pytest.raises(error, match=detail) as raised:
                row.append(start, **chunks)  # type: ignore[arg-type]
            assert raised.value.path == f"RowBuilder.append(start){path}"
            assert listed(row) == {"experts": experts(4, 5), "start": [1, 2, 3], "reward": 1.0}
    with pytest.raises(ArgumentError, match=r"\('reward'\).*set once"):
        row.append({"reward": 0}, reward=[1])
    index: Any = np.int64(1)
    row.append({"start": index}, start=[], experts=[])  # a column of any name
    assert listed(row)["start"] == [1]


def test_one_number_fills_what_a_chunk_from_a_token_on_adds():
    row = RowBuilder()
    row.append(ids=[1, 2, 3], mask=True)
    row.append({"ids": 2}, ids=[7, 8, 9], mask=False)
    assert listed(row) == {"ids": [1, 2, 7, 8, 9], "mask": [True] * 3 + [False] * 2}
    with pytest.raises(ArgumentError, match=r"\('ids'\): expected more tokens, found -4; one num"):
        row.append({"ids": 0}, ids=[1], mask=False)
    assert len(row) == 5


def test_a_column_that_is_replaced_keeps_its_dtype_and_the_shape_of_its_tokens():
    row = RowBuilder()
    row.append(x=np.ones((2, 3), np.int16))
    row.append({"x": 0}, x=[])
    assert row.to_row()["x"].shape == (0, 3)
    with pytest.raises(ArgumentError, match=r"shape \(3,\) like those before, found \(2,\)"):
        row.append({"x": 0}, x=[[1, 2]])
    row.append({"x": 0}, x=[[1, 2, 3]])
    assert (listed(row), row.to_row()["x"].dtype) == ({"x": [[1, 2, 3]]}, np.int16)


def test_a_chunk_from_a_token_on_takes_memory_for_itself_alone():
    """Of a row in one piece and in many; what is cut off is freed."""
    schema = FieldSchema("jagged", torch.uint8, (1, 2, None))
    row = RowBuilder({"ids": torch.uint8, "axes": schema})
    tracemalloc.start()
    try:
        row.append(ids=np.zeros(1 << 20, np.uint8), axes=np.zeros((2, 1 << 20), np.uint8))
        whole, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for i in range(100):
            start = dict.fromkeys(("ids", "axes"), len(row) - i % 3)
            row.append(start, ids=[1, 2], axes=[[1, 2], [3, 4]])
        assert tracemalloc.get_traced_memory()[1] < whole + (1 << 18)
        row.append(dict.fromkeys(start, 9), ids=[], axes=[])
        assert tracemalloc.get_traced_memory()[0] < 1 << 18
    finally:
        tracemalloc.stop()
    assert len(pickle.dumps(row)) < 2000


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
ONE = {"input_ids": [1], "logprobs": 0.5, "loss_mask": True}


def test_a_refused_call_changes_nothing():
    for call, arguments, match in (
        ("append", {"input_ids": [1]}, r"\('input_ids'\).*expected 5 .* 'logprobs', found 6"),
        ("append", ONE | {"logprobs": [0.5, 0.5]}, "expected 1 more tokens like 'input_ids'"),
        ("append", ONE | {"new": [1]}, r"\('new'\).*found 1"),
        ("append", ONE | {"logprobs": [0.5], "loss_mask": []}, r"\('loss_mask'\).*found 5"),
        ("append", ONE | {"input_ids": [[1]]}, r"\('input_ids'\).*shape \(\) .*found \(1,\)"),
        ("append", ONE | {"reward": [1]}, "'reward'.*set once"),
        ("set", {"other": 1, "input_ids": [1]}, r"set\('input_ids'\)"),
        *(("truncate", {"tokens": tokens}, "truncate") for tokens in (-1, 6, 2.5, "2", None)),
    ):
        row = grown()
        for _ in range(2):
            with pytest.raises(ArgumentError, match=match):
                getattr(row, call)(**arguments)  # type: ignore[arg-type]
            assert (listed(row), len(row)) == (FULL, 5)
        found = [column.dtype for column in row.to_row().values() if hasattr(column, "dtype")]
        assert found == [np.float32, np.int64, np.bool_]
        assert repr(row).startswith("RowBuilder(tokens=5, columns=['logprobs', 'input_ids'")


def test_only_some_columns_or_none_must_be_as_long_as_each_other():
    row = RowBuilder(same_length=["response", "mask"])
    row.append(prompt=[1, 2, 3], image=np.zeros((4, 2)))
    assert len(row) == 0
    row.append(response=[4, 5], mask=1)
    assert len(row) == 2
    with pytest.raises(ArgumentError, match="'response'"):
        row.append(mask=1)
    row.truncate(1)
    row.append(response=[6, 7], mask=0, prompt=0)
    lengths = {name: len(column) for name, column in row.to_row().items()}
    assert lengths == {"prompt": 5, "image": 4, "response": 3, "mask": 3}
    row = RowBuilder(same_length=())
    row.append(a=[1, 2, 3], b=[1])
    assert len(row) == 3
    row.truncate(2)
    assert listed(row) == {"a": [1, 2], "b": [1]}
    with pytest.raises(ArgumentError, match="one number instead of a list"):
        row.append(a=[1, 2], b=[1], c=0)


def test_numbers_alone_are_one_token_and_empty_chunks_say_nothing():
    row = RowBuilder()
    assert row  # a row without tokens is a row
    row.append(ids=7, mask=True)
    row.append(ids=[], mask=np.bool_(False))
    assert listed(row) == {"ids": [7], "mask": [True]}
    row = RowBuilder({"y": torch.int32})
    row.append(x=[], y=[])
    found = row.to_row()
    assert (listed(row), len(row)) == ({"y": [], "x": []}, 0)
    assert (found["x"].dtype, found["y"].dtype) == (np.float32, np.int32)
    assert decode(row.to_frames())["x"].shape[0] == 1
    row.append(x=array("d"), y=range(0))
    row.append(x=[[1, 2]], y=[[3, 4]])
    row.append(x=(), y=np.empty((0, 2), dtype=np.int32))
    assert listed(row) == {"y": [[3, 4]], "x": [[1, 2]]}


def test_values_are_those_set_last():
    row = grown()
    row.set(reward=1)
    assert listed(row) == FULL | {"reward": 1}
    row.set(lock=threading.Lock())
    with pytest.raises(UnsupportedTypeError, match="lock"):
        row.to_frames()
    row.set(lock=2**70)
    with pytest.raises(ArgumentError, match=r"'lock'\), row 0: .*71 bits"):
        row.to_frames()


def test_dtypes_decide_what_values_become():
    row = RowBuilder({"big": object, "tools": object, "ids": torch.int32, "unset": object})
    row.set(big=2**70, tools=[])
    row.append(ids=[1])
    td = decode(row.to_frames())
    assert (td["big"], td["tools"]) == ([2**70], [[]])
    like = RowBuilder(open_wire(encode(rollout())).schema)
    like.append(ids=[1], logprob=[0.5])
    like.set(reward=1)
    dtypes = {name: column.dtype for name, column in decode(like.to_frames()).items()}
    assert dtypes == {"ids": torch.int64, "logprob": torch.float32, "reward": torch.float32}


def test_a_message_is_that_of_the_row():
    row = grown()
    row.set(routed=[3, 1], tools=["a"], embedding=np.ones(2, dtype=np.float16), big=7, odd=object)
    row.set(version={"step": 3}, flag=True)
    for options in ({"allow_pickle": True, "checksum": True}, {"default": repr, "narrow": True}):
        frames = row.to_frames(meta={"step": 3}, **options)
        assert message(frames) == message(encode_rows([row.to_row()], meta={"step": 3}, **options))
        assert open_wire(frames, allow_pickle=True).meta == {"step": 3}
    again = RowBuilder.from_message(receive(frames, bytes), same_length=())
    assert open_wire(again.to_frames()).meta == {}


def test_resumed_rows_send_what_was_sent():
    columns = {
        "ids": torch.arange(8).view(2, 4),
        "reward": torch.tensor([0.5, 1.5], dtype=torch.float64),
        "embedding": torch.ones(2, 3),
        "brain": torch.ones(2, 3, dtype=torch.bfloat16),
        "text": ["a", "b"],
        "big": [None, {"n": 2**70}],
    }
    td = pack_jagged_fields(columns, lengths=[2, 4], token_aligned_fields=["ids"])
    one = open_wire(encode(td)).rows([1])
    row = RowBuilder.from_message(one, same_length=["ids"])
    assert len(row) == 4
    td["whole"] = NonTensorData("gsm8k", batch_size=[2])
    whole = RowBuilder.from_message(open_wire(encode(td)).rows([1]), same_length=["ids"])
    assert decode(whole.to_frames())["whole"] == ["gsm8k"]
    assert message(row.to_frames()) == message(one.to_frames())
    row.append(ids=[9])
    row.set(embedding=torch.ones(2))
    assert decode(row.to_frames())["embedding"].shape == (1, 2)
    assert listed(row)["ids"] == [4, 5, 6, 7, 9]


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
    nested = pack_jagged_fields({"x": torch.ones(1)})
    nested["inner"] = nested.clone()
    with pytest.raises(ArgumentTypeError, match="'inner'"):
        RowBuilder.from_message(encode(nested))


def test_tokens_along_another_dim():
    """As MRoPE's position ids are: (3, n) per chunk."""
    axes = torch.arange(15).view(3, 5)
    sample = {"ids": [1, 2, 3, 4, 5], "position_ids": axes}
    frames = encode_rows([sample], ragged_dims={"position_ids": 2})
    schema = open_wire(frames).schema
    row = RowBuilder(schema)
    empty = decode(row.to_frames())["position_ids"]
    assert (empty.values().shape, empty._ragged_idx) == ((3, 0), 2)
    row.append(ids=[1, 2], position_ids=axes[:, :2].tolist())
    row.append(ids=[3, 4, 5, 6], position_ids=np.arange(12).reshape(3, 4))
    row.truncate(2)
    row = RowBuilder.from_message(row.to_frames())
    row.append(ids=[3, 4, 5], position_ids=axes[:, 2:].numpy())
    assert message(row.to_frames()) == message(frames)
    assert open_wire(row.to_frames()).schema == schema
    row.append(ids=[6, 7], position_ids=9)
    assert row.to_row()["position_ids"].tolist() == [[*line, 9, 9] for line in axes.tolist()]
    assert len(pickle.loads(pickle.dumps(row))) == 7
    for chunk, match in (
        ([[1], [2]], r"expected tokens of shape \(3,\) like those before, found \(2,\)"),
        ([1, 2], "expected lists of one length"),
        (np.ones(2, dtype=np.int64), "expected 2 dims or more, of which dim 1 is the tokens"),
        ([[1, 2]] * 3, "'position_ids'.* expected 8 tokens in all"),
    ):
        with pytest.raises(ArgumentError, match=match):
            row.append(ids=[1], position_ids=chunk)
    with pytest.raises(ArgumentError, match=r"\['x'\].*the size of each dim but the ragged one"):
        RowBuilder({"x": FieldSchema("jagged", torch.int64, (1, 3, None, None))})
    row = RowBuilder({"x": FieldSchema("jagged", torch.int64, (1, None, None))})
    row.append(x=[[1, 2]])
    assert row.to_row()["x"].tolist() == [[1, 2]]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), st.integers(0, 3), st.integers(-9, 9) | st.floats(-2, 2)),
        st.tuples(st.just("chunk"), st.integers(0, 3), st.integers(0, 99)),
        st.tuples(st.just("from"), st.integers(0, 3), st.integers(0, 99)),
        st.tuples(st.just("cut"), st.integers(0, 5), st.none()),
        st.tuples(st.just("copy"), st.sampled_from(COPIES), st.none()),
    ),
    max_size=7,
)


@given(STEPS, st.integers(1, 3), st.lists(st.integers(0, 3), min_size=2, max_size=3), st.data())
def test_a_number_fills_tokens_of_a_shape_that_a_later_chunk_shows(steps, dim, cell, data):
    """The oracle is a list of tokens, each a number or an array, and numpy's broadcasting."""
    dim = min(dim, len(cell) + 1)
    options = {"ragged_dims": {"x": dim}} if dim > 1 or data.draw(st.booleans()) else {}
    row, tokens, shown = RowBuilder({"x": torch.float64}, **options), [], False
    for step, n, value in steps:
        cells = [np.full(cell, value, np.float64) + i for i in range(n if step != "copy" else 0)]
        chunk = np.stack(cells, dim - 1) if cells else []
        if step == "fill":
            row.append(ids=[0] * n, x=value)
            tokens += [value] * n
        elif step == "chunk":
            row.append(ids=[0] * n, x=chunk)
            tokens += cells
        elif step == "from":
            at = min(1, len(tokens))
            row.append({"ids": at, "x": at}, ids=[0] * n, x=chunk)
            tokens[at:] = cells
        elif step == "cut":
            row.truncate(min(n, len(tokens)))
            del tokens[n:]
        else:
            row = n(row)
        shown = shown or (step in ("chunk", "from") and n > 0)
        if shown and data.draw(st.booleans()):
            row = RowBuilder.from_message(row.to_frames())
    found = row.to_row()["x"]
    whole = [np.broadcast_to(token, cell) for token in tokens] if shown else tokens
    if not tokens:
        assert found.size == 0
        return
    assert np.array_equal(found, np.stack(whole, dim - 1 if shown else 0))
    if shown or dim == 1:
        assert open_wire(row.to_frames()).arrays("x").values.shape == found.shape
        return
    with pytest.raises(ArgumentError, match=r"to_frames\('x'\): .*dtypes=\{'x': a FieldSchema\}"):
        row.to_frames()


def test_a_number_that_filled_a_prompt_keeps_its_dtype_and_a_list_its_shape():
    row = RowBuilder()
    row.append(ids=[1, 2, 3], top=0)
    row.append(ids=[4], top=np.ones((1, 5), np.float32))
    assert row.to_row()["top"].dtype == np.float32
    assert row.to_row()["top"].sum(axis=1).tolist() == [0, 0, 0, 5]
    row = RowBuilder(same_length=())
    row.append(ids=[1, 2], top=[0.0, 0.0])
    resumed = RowBuilder.from_message(row.to_frames())
    for grown_row in (row, resumed):
        with pytest.raises(ArgumentError, match=r"of shape \(\) .*dtypes=\{'top': a FieldSchema\}"):
            grown_row.append(top=np.ones((1, 5), np.float32))
        assert grown_row.to_row()["top"].tolist() == [0.0, 0.0]


def test_ragged_dims_are_those_of_encode_rows():
    experts = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    row = RowBuilder(ragged_dims={"experts": 2, "image": 2, "later": 1})
    row.append(ids=[1, 2, 3], experts=experts)
    row.set(image=np.ones((3, 5)))
    sample = {"ids": [1, 2, 3], "experts": experts, "image": np.ones((3, 5))}
    frames = encode_rows([sample], ragged_dims={"experts": 2, "image": 2})
    assert message(row.to_frames()) == message(frames)
    for dims, dtypes, match in (
        ({"x": 0}, {}, r"RowBuilder\(ragged_dims\)\['x'\]: expected a dim"),
        ({"x": 65}, {}, r"RowBuilder\(ragged_dims\)\['x'\]: expected a dim"),
        ({"x": 2}, {"x": object}, "expected a jagged column"),
        ({"x": 2}, {"x": FieldSchema("tensor", torch.int8, (1,))}, "expected a jagged column"),
        ({"x": 1}, {"x": FieldSchema("jagged", torch.int8, (1, 3, None))}, "found 1 and 2"),
    ):
        with pytest.raises(ArgumentError, match=match):
            RowBuilder(dtypes, ragged_dims=dims)
    for other in ([("x", 2)], {1: 2}, 2):
        with pytest.raises(ArgumentTypeError, match="a dict of names to dims"):
            RowBuilder(ragged_dims=other)  # type: ignore[arg-type]
    agreed = RowBuilder({"x": open_wire(frames).schema["experts"]}, ragged_dims={"x": 2})
    agreed.append(x=experts)
    assert agreed.to_row()["x"].tolist() == experts.tolist()


def test_bad_options():
    for arguments, options, match in (
        (([],), {}, "dict of names to dtypes, found list"),
        (({"x": np.str_},), {}, "a dtype whose cells can be encoded .*, object or"),
        (({5: torch.int64},), {}, "names that are strings, found 5"),
        (({"x": torch.qint8},), {}, r"\['x'\].*qint8"),
        ((), {"same_length": "ids"}, "put it in a list"),
    ):
        with pytest.raises(ArgumentTypeError, match=match):
            RowBuilder(*arguments, **options)  # type: ignore[arg-type]


def test_a_pickle_has_the_cells_that_are_kept_and_no_more():
    row = RowBuilder()
    for i in range(4096):
        row.append(x=i, y=torch.tensor([i], dtype=torch.bfloat16))
    assert len(pickle.dumps(row)) < 4096 * 10 + 2000
    row.truncate(8)
    assert len(pickle.dumps(row)) < 2000
