"""Faults that the fuzzer or a search by hand found in the readers, one test for each.

Those that a message shows by itself are among the `cases/`.
"""

from typing import Any

import msgpack
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from jagcodec import ArgumentError, decode, encode, materialize, open_wire, to_blob
from jagcodec.errors import TransportError
from jagcodec.wire.message import Message
from tests.wire.forge import (
    int64s,
    jagged,
    message,
    node,
    packed,
    row_message,
    rows_node,
    sparse_coo,
    tensor,
    tensordict,
)
from tests.wire.readers import opened, peak_of, refused


def test_rows_of_sparse_tensors_are_refused():
    """torch makes them of cells from which it has no kernel that picks."""
    column = sparse_coo(tensor("int64", (1, 2)), tensor("bits4x2", (2,), offset=16), 1, shape=[2])
    frames = message(tensordict([2], {"a": column}), int64s(0, 1) + b"\5\6")
    assert open_wire(frames).to_tensordict()["a"].dtype == torch.bits4x2
    with pytest.raises(ArgumentError, match=r"found a torch\.sparse_coo; call"):
        open_wire(frames).rows([1]).to_tensordict()


def test_rows_that_repeat_do_not_count_past_2_to_the_63():
    """A row of cells without bytes may be as long as it likes, but not three of them."""
    row = 1 << 62
    column = jagged(dtype="int64", shape=[row, 0], offset=0)
    frames = message(tensordict([1], {"a": column}), groups=[[0, 0, 1, row, row]])
    assert open_wire(frames).rows([0]).to_tensordict()["a"].values().shape == (row, 0)
    for rows in (2, 3, 4):
        chosen = open_wire(frames).rows([0] * rows)
        error = refused(type(chosen).to_tensordict, chosen)
        assert (error.reason, error.path) == ("bad_offsets", "$.a")


def test_a_version_is_read_in_little_memory():
    start = b"\x84" + packed("jagcodec")
    for rest in (b"", b"\xcd\x01", packed(2), b"\xdd\xff\xff\xff\xff" * 4):
        assert peak_of(refused, decode, [start + rest]) < 1 << 17


def test_messages_inside_each_other_are_not_copied_at_every_level():
    size = 1 << 20
    frames = message(node("BYTES", numbers=[0, 0, size]), bytes(size))
    for _ in range(50):
        row = row_message(frames)
        frames = message(
            rows_node(len(row), stored=256), row, groups=[[0, 0, 1, len(row), len(row)]]
        )
    assert peak_of(decode, frames) < 4 * size


def test_rows_that_tensordict_refuses_are_refused():
    """tensordict takes a payload out of what it is in, and a stack has more than one."""
    stack = message(rows_node(2), b"\1\2" + bytes(6) + int64s(0, 1, 2), groups=[[0, 8, 2, 1, 1]])
    row = row_message(stack)
    column = rows_node(len(row), stored=256)
    groups = [[0, 0, 1, len(row), len(row)]]
    frames = message(tensordict([1], {"a": column}), row, groups=groups)
    assert refused(decode, frames).reason == "bad_value"
    for read in (opened, lambda frames: open_wire(frames).rows([0])["a"]):
        error = refused(read, frames)
        assert (error.reason, error.path) == ("bad_value", "$.a")


def test_a_promise_of_rising_indices_is_checked_on_those_that_are_used(monkeypatch):
    """Somebody writes to the message's memory while torch looks at the indices."""
    column = torch.eye(3).to_sparse().coalesce()
    frames = [bytearray(frame) for frame in encode(column)]
    make = torch.sparse_coo_tensor

    def scribbled(*args, **kwargs):
        made = make(*args, **kwargs)
        frames[1][:24] = bytes(24)
        return made

    monkeypatch.setattr(torch, "sparse_coo_tensor", scribbled)
    found = decode(frames)
    assert found.is_coalesced()
    assert found._indices().tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("views", [True, False])
def test_bounds_and_shapes_are_checked_as_they_are_used(monkeypatch, views):
    """Somebody writes to the message's memory once they were read."""
    rows = torch.arange(6.0).view(3, 2)
    parts = [rows[:1], rows[1:]]
    value: Any = parts if views else torch.nested.nested_tensor(parts)
    frames = [bytearray(frame) for frame in encode(value)]
    integers = Message.integers

    def scribbled(*args):
        found = integers(*args)
        frames[1][64:] = b"\x7f" * len(frames[1][64:])
        return found

    monkeypatch.setattr(Message, "integers", scribbled)
    assert [part.tolist() for part in decode(frames)] == [[[0, 1]], [[2, 3], [4, 5]]]
    assert frames[1][-1] == 0x7F


def test_deep_documents_are_read_alike_by_both_readers():
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    payload = NonTensorData(None, batch_size=[1])
    frames = [bytes(frame) for frame in encode(TensorDict({"a": payload}, [1]))]
    packed = msgpack.packb([deep])
    frames[0] = frames[0].replace(
        b"\xa6values\xc4\x02\x91\xc0", b"\xa6values\xc5" + len(packed).to_bytes(2, "big") + packed
    )
    whole = decode(frames)
    batch = open_wire(frames)
    for part in (batch.to_tensordict(), batch.to_tensordict()):
        assert part.get("a").data == whole.get("a").data
        assert part.get("a").data is not whole.get("a").data
    assert batch["a"].data is not batch["a"].data


@pytest.mark.parametrize("failure", [TransportError("no_peer", "store", "gone"), OSError("cut")])
def test_what_a_source_raises_is_not_blamed_on_the_message(failure):
    whole = to_blob(encode(TensorDict({"a": torch.arange(9000)}, [9000])))
    failing = False

    def source(offset, size):
        if failing:
            raise failure
        return whole[offset : offset + size]

    batch = open_wire(source)
    failing = True
    with pytest.raises(type(failure)) as caught:
        batch.to_tensordict()
    assert caught.value is failure


def test_a_tensor_of_no_cells_and_a_huge_dim_is_packed():
    huge = torch.empty(2, 1, 0, dtype=torch.int64).expand(2, 2**60, 0)
    td = decode(encode(TensorDict({"a": huge}, [2])))
    assert td["a"].shape == materialize(td)["a"].shape == (2, 2**60, 0)
