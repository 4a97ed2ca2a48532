"""Messages of one row, which are written without a walk: the bytes of those that are walked."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jagcodec import JagcodecError, decode, encode, encode_rows, open_wire, pack_rows

DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")

numbers = st.one_of(
    st.booleans(),
    st.integers(-(1 << 65), 1 << 65),
    st.floats(width=64),
    st.sampled_from([3.4028235e38, 3.5e38, -1e39, 2**63 - 1, -(2**63), 2**63, -0.0]),
)
cells = st.one_of(
    arrays.arrays(
        st.sampled_from([*map(np.dtype, (*DTYPES, "complex64")), np.dtype(">i4"), np.dtype("U2")]),
        arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    ),
    st.just(np.arange(12).reshape(3, 4).T),
    st.just(np.arange(2048, dtype=np.int64)),
    st.just(np.arange(20)[::2]),
    st.just(np.ma.masked_array([1, 2])),
)
tensors = st.sampled_from(
    [
        torch.arange(5),
        torch.arange(6.0).view(3, 2),
        torch.arange(6.0).view(3, 2).T,
        torch.ones(4, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.ones(2, requires_grad=True),
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        torch.empty(0),
    ]
)
texts = st.one_of(st.text(max_size=5), st.just("x" * 20_000), st.just("\ud800"))
lists = st.one_of(
    st.lists(numbers, max_size=4),
    st.lists(st.integers(0, 9), max_size=70).map(tuple),
    st.just([[1, 2], [3, 4]]),
    st.just([[1], [2, 3]]),
    st.just(["a", "b"]),
    st.just(list(range(3000))),
)
others = st.sampled_from([None, b"bytes", {"a": 1}, np.float32(3), np.int64(4), 1j])
samples = st.dictionaries(
    st.one_of(st.text(max_size=3), st.sampled_from("abcdef")),
    st.one_of(numbers, cells, tensors, texts, lists, others),
    max_size=6,
)
metas = st.one_of(st.none(), st.just({}), st.just({"step": 3}), st.just({"bad": torch.ones(1)}))


def outcome(make):
    try:
        return [bytes(frame) for frame in make()]
    except JagcodecError as error:
        return type(error), error.path, error.reason, error.detail


@given(samples, metas)
def test_the_message_is_that_of_a_walk(sample, meta):
    # With a choice of dtypes, of no column here, rows are packed and walked.
    walked = outcome(lambda: encode_rows([sample], dtypes={}, meta=meta))
    assert outcome(lambda: encode_rows([sample], meta=meta)) == walked


def test_it_is_the_message_of_the_packed_row():
    sample = {
        "ids": np.arange(3),
        "pairs": np.ones((3, 2), dtype=np.float32),
        "reward": 0.1,
        "count": 7,
        "done": True,
        "tag": "x",
        "tokens": [5, 6, 7],
        "mask": torch.tensor([True, False]),
    }
    frames = encode_rows([sample], meta={"step": 3})
    batch = encode(pack_rows([sample]), meta={"step": 3})
    assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in batch]
    assert open_wire(frames).meta == {"step": 3}
    assert decode(frames)["reward"].tolist() == [np.float32(0.1)]


@pytest.mark.parametrize("make", [np.arange, torch.arange])
def test_what_is_large_is_aliased_and_what_is_small_is_not(make):
    large, small = make(2048), make(2047)
    _, first, second = encode_rows([{"large": large, "small": small}])
    arrays = [np.frombuffer(frame, dtype=np.int64) for frame in (first, second)]
    assert not np.shares_memory(arrays[0], np.asarray(small))
    assert np.shares_memory(arrays[1], np.asarray(large))
