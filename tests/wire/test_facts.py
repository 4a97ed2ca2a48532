"""One test per fault that a peer was seen to have: it cannot happen here.

The numbers are those of the list of facts that the project started from.
"""

import io
import pickle

import numpy as np
import pytest
import torch
import zmq
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import decode, encode, materialize, pack_jagged_fields, stack_or_nest
from jagcodec.wire.spec import TORCH_DTYPES
from tests.helpers import size, trip
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import torch_dtypes  # noqa: F401

KNOWN = [getattr(torch, name) for name in TORCH_DTYPES if hasattr(torch, name)]


def test_1_no_payload_is_stripped():
    td = TensorDict(
        {
            "objects": np.array([{"a": 1}, None], dtype=object),
            "strings": ["x", "y"],
            "string": "hello",
            "stack": NonTensorStack({"t": (1, 2)}, torch.ones(2)),
        },
        batch_size=[2],
    )
    back = trip(td)
    assert_same(back, td)
    assert back["string"] == "hello"
    assert back.get("string").batch_size == (2,)
    assert_same(back.get("objects").data, td.get("objects").data)


def test_2_padding_goes_to_the_longest_row():
    # As users make them: no min, no max.
    values, offsets = torch.arange(9.0), torch.tensor([0, 3, 9])
    bare = torch.nested.nested_tensor_from_jagged(values, offsets)
    wide = torch.nested.nested_tensor_from_jagged(torch.ones(2, 9), offsets, jagged_dim=2)
    td = TensorDict({"bare": bare, "wide": wide}, [2])
    for batch in (td, trip(td)):
        columns = materialize(batch)
        assert columns["bare"].shape == (2, 6)
        assert columns["wide"].shape == (2, 2, 6)
        assert columns["wide"].sum() == 18
    assert torch.nested.to_padded_tensor(trip(td)["bare"], 0.0).shape == (2, 6)


@pytest.mark.parametrize("dtype", KNOWN, ids=str)
def test_4_every_dtype_packs_and_pads(dtype):
    cells = torch.arange(3 * 5 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        cells = cells & 1
    padded = cells.view(dtype).view(3, 5)
    td = pack_jagged_fields(
        {"x": padded}, lengths=torch.tensor([2, 0, 4]), token_aligned_fields=["x"]
    )
    columns = materialize(trip(td), pad_to_seqlen=5)
    expected = bits(padded)
    zero = [0, 0] if dtype.itemsize == 16 else 0
    for row, length in zip(expected, [2, 0, 4], strict=True):
        row[length:] = [zero] * (5 - length)
    assert bits(columns["x"]) == expected


def test_4_large_integer_pads_are_exact():
    td = TensorDict({"x": stack_or_nest([torch.tensor([1]), torch.tensor([1, 2])])}, [2])
    assert materialize(td, pad_value_dict={"x": 2**53 + 1})["x"][0, 1].item() == 2**53 + 1


def test_10_ragged_dim_and_shared_offsets_survive_and_nothing_grows():
    offsets = torch.tensor([0, 2, 5])
    make = torch.nested.nested_tensor_from_jagged
    td = TensorDict(
        {
            "positions": make(torch.ones(3, 5), offsets, jagged_dim=2),
            "a": make(torch.ones(5), offsets),
            "b": make(torch.ones(5), offsets),
            "names": NonTensorStack("x", "y"),
        },
        [2],
    )
    back, first = td, size(encode(td))
    for _ in range(5):
        back = trip(back)
        assert size(encode(back)) == first
    assert_same(back, td)
    (back["a"] * back["b"]).values()
    assert back.get("names").tolist() == ["x", "y"]


def test_11_equal_lengths_do_not_flip_the_layout():
    td = pack_jagged_fields({"x": torch.ones(2, 3)}, lengths=torch.tensor([3, 3]))
    back = trip(td)
    assert back["x"].layout is torch.jagged
    assert stack_or_nest(list(back["x"].unbind()), always_nest=True).layout is torch.jagged


def test_12_image_grids_are_not_widened_among_jagged_columns():
    td = pack_jagged_fields(
        {"ids": torch.ones(2, 5), "grid_thw": torch.ones(2, 3)},
        lengths=torch.tensor([4, 5]),
        token_aligned_fields=["ids"],
    )
    columns = materialize(trip(td), pad_to_seqlen=8, token_aligned_fields=())
    assert columns["grid_thw"].shape == (2, 3)
    assert columns["ids"].shape == (2, 8)


def test_13_a_row_view_sends_its_own_bytes():
    storage = torch.zeros(1_000_000)
    assert size(encode(storage[10:20])) < 300
    assert size(encode(storage.view(1000, 1000)[3])) < 4300


def test_14_one_column_pickles_as_one_column():
    td = trip(TensorDict({"big": torch.zeros(100_000), "small": torch.zeros(2)}, []))
    stream = io.BytesIO()
    torch.save(td["small"], stream)
    assert len(stream.getvalue()) < 5000
    assert len(pickle.dumps(td["small"])) < 1000


def test_14_zmq_frames_are_aliased_and_bytes_are_copied():
    frames = encode(torch.arange(5000))
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        port = a.bind_to_random_port("tcp://127.0.0.1")
        b.connect(f"tcp://127.0.0.1:{port}")
        a.send_multipart(frames, copy=False)
        received = b.recv_multipart(copy=False)
    tensor = decode(received)
    buffer = np.frombuffer(received[2], np.uint8)  # type: ignore[call-overload]
    assert tensor.data_ptr() == buffer.__array_interface__["data"][0]
    read_only = [bytes(frame) for frame in frames]
    decode(read_only).zero_()
    assert read_only[2] == bytes(frames[2])


def test_15_rows_made_by_narrow_arrive_without_holes():
    base = torch.arange(20.0).view(4, 5)
    starts, lengths = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 3, 1, 5])
    narrowed = torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged)
    assert narrowed.lengths() is not None  # type: ignore[attr-defined]
    td = TensorDict({"x": narrowed}, [4])
    back = trip(td)["x"]
    assert back.lengths() is None
    assert back.values().numel() == int(lengths.sum())
    assert rows_of(back) == [
        bits(row[s : s + n]) for row, s, n in zip(base, starts, lengths, strict=True)
    ]
    assert materialize(td)["x"].tolist() == materialize(TensorDict({"x": back}, [4]))["x"].tolist()


def test_stripped_rows_read_as_none():
    stack = NonTensorStack("x", NonTensorData(TensorDict({}, [])))
    columns = materialize(TensorDict({"m": stack}, [2]))
    assert columns["m"].tolist() == ["x", None]
