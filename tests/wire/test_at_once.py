"""Messages of plain columns at once: what a walk makes of the same batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import concat_rows, encode, open_wire
from jagcodec.errors import JagcodecError
from jagcodec.ragged.non_tensor import batch_of
from jagcodec.wire import documents, native
from jagcodec.wire.at_once import message_at_once
from tests.helpers import message, nested
from tests.strategies import tensordicts

payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)
option_sets = st.sampled_from(
    [
        {},
        {"meta": {"step": 3}},
        {"meta": {"bad": torch.ones(1)}},
        {"checksum": True},
        {"compress": "zstd"},
        {"default": str},
        {"allow_pickle": True},
        {"narrow": True},
        {"elide": True},
    ]
)


def outcome(batch, options):
    try:
        return message(encode(batch, **options))
    except JagcodecError as error:
        return type(error), error.path, error.reason, error.detail


def walked(batch, options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jagcodec.wire.encoder.message_at_once", lambda *_: None)
        return outcome(batch, options)


def named(batch):
    batch.names = ["rows"]
    return batch


def stack(*payloads, dim=0):
    return NonTensorStack(*map(NonTensorData, payloads), stack_dim=dim)


def flipped(payloads):
    members: Any = [NonTensorData(payload) for payload in payloads]
    return torch.stack(members, -1)


holes = torch.nested.nested_tensor_from_jagged(
    torch.arange(6), torch.tensor([0, 2, 4]), lengths=torch.tensor([1, 2])
)
turned = torch.nested.nested_tensor_from_jagged(torch.arange(6).view(3, 2).T, torch.tensor([0, 2]))
inside = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([1, 4]))
outside = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([1, 9]))
odd_batches = [
    named(TensorDict({"x": torch.arange(2)}, [2])),
    TensorDict({"x": torch.ones(2, 3)}, [2, 3]),
    TensorDict({"x": holes}, [2]),
    TensorDict({"x": turned}, [1]),
    TensorDict({"x": inside}, [1]),
    TensorDict({"x": outside}, [1]),
    TensorDict({"x": nested([[1, 2], [3]], torch.bfloat16)}, [2]),
    TensorDict({"x": nested([[1, 2], [3]], torch.float32).requires_grad_()}, [2]),
    TensorDict({"x": torch.ones(2, 3).T}, [3]),
    TensorDict({"x": torch.ones(2).requires_grad_()}, [2]),
    TensorDict({"x": torch.tensor([1j]).conj()}, [1]),
    TensorDict({"x": torch._efficientzerotensor(2)}, [2]),
    TensorDict({"x": torch.empty(2, device="meta")}, [2]),
    TensorDict({"x": torch.zeros((2, 0, 1 << 57), dtype=torch.uint8)}, [2]),
    TensorDict({"x": torch.zeros((1,) * 40)}, [1]),
    TensorDict({"x": stack("a", "b")}, [2]),
    TensorDict({"x": flipped("ab")}, [2]),
    TensorDict({"x": stack({1: 2}, object())}, [2]),
    TensorDict({"x": NonTensorData(np.arange(2), batch_size=[2])}, [2]),
    batch_of({"x": stack("a", "b", "c")}, 2),
    batch_of({"x": stack("a"), "y": torch.arange(2)}, 2),
    batch_of({}, 3),
    batch_of({"x": stack("a")}, 1 << 40),
]


@given(tensordicts(payloads, lazy=False) | st.sampled_from(odd_batches), option_sets)
def test_a_batch_is_the_same_message_as_after_a_walk(batch, options):
    assert outcome(batch, options) == walked(batch, options)


@given(tensordicts(payloads, lazy=False), st.lists(st.integers(0, 5), max_size=4), option_sets)
def test_chosen_rows_of_joined_messages_are_the_same_message_as_after_a_walk(batch, rows, options):
    joined = concat_rows([encode(batch, elide=True), encode(batch)])
    if joined.fields and len(joined):
        joined = joined.rows([row % len(joined) for row in rows])
    assert outcome(joined, options) == walked(joined, options)


def test_plain_columns_need_no_walk(monkeypatch):
    monkeypatch.setattr("jagcodec.wire.encoder._walked", None)
    ids, words = nested([[1, 2], [3]]), stack({"a": [b"x", 1.5, None]}, "x")
    columns = {"ids": ids, "none": nested([[], []]), "wide": nested([np.ones((2, 3)), [[1] * 3]])}
    columns |= {"grid": torch.ones(2, 3), "empty": torch.ones(2, 0), "flag": torch.ones(2) > 0}
    batch = TensorDict({**columns, "words": words}, [2])
    frames = encode(batch, meta={"step": 3})
    joined = concat_rows([frames, encode(open_wire(frames).rows([0]))])
    for rows in ([0], [2], [2, 0, 0], slice(1, 3)):
        encode(joined.rows(rows))


def test_rows_that_are_one_object_or_have_the_same_offsets_are_found():
    ids, row = nested([[1, 2], [3]]), {"role": "user"}
    batch = TensorDict({"a": ids, "b": ids + 1, "c": stack(row, row), "d": stack(row, "x")}, [2])
    assert message_at_once(batch, []) is not None
    for options in ({}, {"elide": True}):
        assert outcome(batch, options) == walked(batch, options)


def test_rows_that_are_one_object_are_written_once(monkeypatch):
    one, pack = {"a": [1]}, documents.packer().pack
    written: list[Any] = []

    def packed(row):
        written.append(row)
        return pack(row)

    rows = [one, "x", one, {"a": [1]}, one, "x"]
    monkeypatch.setattr(native, "packer", lambda: SimpleNamespace(pack=packed))
    assert native.packed_at_once(rows, levels=9) == list(map(pack, rows))
    assert [*map(id, written)] == [id(rows[i]) for i in (0, 1, 3, 5)]
    assert native.first_same(rows) == [0, 1, 0, 3, 0, 5]
    assert native.first_same(rows[1:4]) is None
