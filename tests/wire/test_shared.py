"""One open message for many readers: by several threads, any number of times, and only read."""

import dataclasses
import hashlib
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    Limits,
    WireFormatError,
    decode,
    encode,
    encode_fields,
    open_wire,
    register_type,
)
from jagcodec.batch.describe import check_message
from tests.helpers import message_in

IDS = torch.arange(12).view(3, 4)
LENGTHS = torch.tensor([3, 4, 2])


def in_threads(count, work):
    """What `work` raised in some of `count` threads that run it at once."""
    failed = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return failed


def test_threads_get_documents_of_their_own():
    meta = {"z": [complex(i, 1) for i in range(40)], "t": (1, (2, 3))}
    payload = {"a": [1, {"b": 2j}]}
    frames = encode(
        TensorDict({"x": torch.ones(2), "d": NonTensorData(payload, batch_size=[2])}, [2]),
        meta=meta,
    )
    batch = open_wire(frames)

    def work():
        for _ in range(150):
            assert batch.meta == meta
            found = batch["d"].data
            assert found == payload
            found["a"].append("mine")  # which nobody else sees

    assert in_threads(3, work) == []


def test_threads_share_the_rows_of_columns_that_they_read_at_once():
    columns = {"ids": IDS, "more": IDS.float()}
    for _ in range(20):
        chosen = open_wire(encode_fields(columns, lengths=LENGTHS)).rows([2, 0])

        def work(chosen=chosen):
            td = chosen.to_tensordict()
            assert (td["ids"] * td["more"]).values().tolist() == [64, 81, 0, 1, 4]

        assert in_threads(3, work) == []


def test_reading_again_takes_nothing_of_the_limits():
    images = NonTensorStack(*[NonTensorData({"px": torch.ones(3)}) for _ in range(8)])
    frames = encode(TensorDict({"img": images}, [8]))
    batch = open_wire(frames, limits=Limits(objects=36))
    for _ in range(100):
        assert len(batch["img"]) == 8
        assert len(batch.to_tensordict()["img"]) == 8
    with pytest.raises(WireFormatError, match="the limit 'objects'"):
        open_wire(frames, limits=Limits(objects=35))["img"]


def test_an_open_message_keeps_nothing_of_what_was_chosen_or_built():
    stack = LazyStackedTensorDict(*[TensorDict({"x": torch.ones(i)}, []) for i in (1, 2)])
    batch = open_wire(encode(TensorDict({"ids": nested(IDS), "s": stack_of_rows(stack)}, [3])))
    whole = held_by(message_in(batch))
    for i in range(50):
        batch.rows(np.array([i % 3, 0])).to_tensordict()
        batch.leaf("s")
    assert held_by(message_in(batch)) - whole <= 4  # rows of the group, and the column


def nested(padded):
    return torch.nested.nested_tensor(list(padded), layout=torch.jagged)


def stack_of_rows(stack):
    return LazyStackedTensorDict(stack[0], stack[1], stack[1])


def held_by(message):
    """How many things the containers of an open message hold."""
    held = [getattr(message, name) for name in message.__slots__]
    return sum(len(item) for item in held if isinstance(item, (dict, list, set)))


@dataclasses.dataclass
class Scaled:
    """A value that changes what it is made of."""

    x: torch.Tensor


def scaled_from(state):
    state.mul_(0)
    return Scaled(state)


def test_user_code_never_writes_to_memory_that_is_only_to_be_read():
    register_type(Scaled, "tests.Scaled", to_state=lambda v: v.x, from_state=scaled_from)
    leaf = BatchedDataDict(ids=torch.arange(6000.0).view(3, 2000), v=[Scaled(torch.ones(3))] * 3)
    for value in (Scaled(torch.arange(5000.0)), {"ids": torch.ones(3000), "v": leaf["v"]}, leaf):
        frames = [bytes(frame) for frame in encode(value)]
        before = [hashlib.sha1(frame).digest() for frame in frames]
        check_message(frames)
        if value is leaf:
            open_wire(frames).rows([1, 0]).to_frames()
        assert [hashlib.sha1(frame).digest() for frame in frames] == before


def test_what_is_sent_on_is_not_copied_though_it_is_only_to_be_read():
    wide = torch.arange(30_000).view(3, 10_000)
    frames = [bytes(frame) for frame in encode(TensorDict({"x": wide, "y": wide + 1}, [3]))]
    part = open_wire(frames).select(["y"]).to_frames()
    assert np.shares_memory(np.frombuffer(part[2], np.uint8), np.frombuffer(frames[3], np.uint8))
    assert decode(part)["y"].equal(wide + 1)


@pytest.mark.parametrize("choose", [slice(2, 5), [3, 1], slice(None)])
def test_rows_that_a_rectangle_only_claims_take_no_memory(choose):
    rows = 1 << 23
    batch = open_wire(encode(TensorDict({"x": torch.empty(rows, 0)}, [rows])))
    chosen = batch if choose == slice(None) else batch.rows(choose)
    tracemalloc.start()
    try:
        assert chosen["x"].shape == (len(chosen), 0)
        assert decode(chosen.select(["x"]).to_frames())["x"].shape == (len(chosen), 0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_parts_of_other_columns_are_cut_from_one_message_at_once():
    batch = open_wire(encode_fields({"a": IDS, "b": IDS + 100}, lengths=LENGTHS))

    def work():
        for name in ("a", "b") * 40:
            part = decode(batch.select([name]).rows(slice(1, 3)).to_frames())
            assert part.keys() == {name}
            assert part[name].values().tolist() == [
                cell + (0 if name == "a" else 100) for cell in (4, 5, 6, 7, 8, 9)
            ]

    assert in_threads(3, work) == []


def test_the_rows_of_a_dict_whose_first_column_is_a_list_of_views():
    cells = torch.arange(10)
    batch = BatchedDataDict(x=[cells[0:3], cells[3:5], cells[5:10]], r=torch.ones(3))
    opened = open_wire(encode(batch))
    assert len(opened) == 3
    assert opened["r"].tolist() == [1, 1, 1]
    assert [len(row) for row in opened["x"].tolist()] == [3, 2, 5]
