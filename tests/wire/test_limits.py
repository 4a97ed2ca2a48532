"""Limits of readers: what each counts, and that nothing past one is asked for."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from jagcodec import (
    ArgumentError,
    Limits,
    MsgpackDecoder,
    WireFormatError,
    decode,
    dump,
    encode,
    encode_fields,
    load,
    open_wire,
    to_blob,
)
from jagcodec.errors import ArgumentTypeError
from tests.wire.forge import (
    blob,
    int64s,
    list_of,
    message,
    message_of_rows,
    record,
    row_message,
    strided_nested,
    tensor,
    tensor_views,
    tensordict,
)
from tests.wire.readers import peak_of, refused

COLUMNS = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
FRAMES = encode_fields(COLUMNS, lengths=torch.tensor([2, 4, 3]))
SIZE = sum(map(len, FRAMES))


def sizes_of(frames):
    """The least limits that a message is read under."""
    least = {}
    for field in dataclasses.fields(Limits):
        low, high = -1, 1 << 20 if field.name != "depth" else 104
        while high - low > 1:
            middle = (low + high) // 2
            try:
                decode(frames, limits=Limits(**{field.name: middle}))
                high = middle
            except WireFormatError:
                low = middle
        least[field.name] = high
    return least


def test_what_each_limit_counts():
    nodes, groups, frames = 3, 1, 1
    assert sizes_of(FRAMES) == {
        "bytes": SIZE,
        "header": len(FRAMES[0]),
        "objects": nodes + groups + frames,
        "expanded": 0,
        "depth": 1,
    }


@pytest.mark.parametrize(
    ("frames", "objects", "depth"),
    [
        (message(1), 1, 0),
        (message(list_of(list_of(1), 2)), 4, 2),
        (message(record("TUPLE", record("TUPLE"))), 1, 1),
        (message_of_rows("a", "b", "c"), 1 + 1 + 1 + 3, 0),
        # Messages in rows: their nodes are objects, and lie inside the node of the rows.
        (message_of_rows("a", row_message(message(list_of(1, 2)))), 1 + 1 + 1 + 2 + 1 + 3, 2),
        (message(tensor_views(2),
                 int64s(0, 0, 1, 1) + b"\1"), 3 + 1 + 2, 1),
        (message(strided_nested(0, 2), int64s(0, 0)),
         3 + 1 + 2, 1),
        (message(tensordict([1], {"a": tensordict([1], {"x": tensor(), "y": tensor(shape=(1, 0))}),
                                  "b": tensor(shape=(1, 0)), "c": tensor(shape=(1, 0))}), b"\1"),
         7, 2),
    ],
)  # fmt: skip
def test_what_limits_count_of_other_messages(frames, objects, depth):
    least = sizes_of(frames)
    assert (least["objects"], least["depth"]) == (objects, depth)


def readers(tmp_path):
    dump({"a": torch.arange(5)}, path := tmp_path / "x.jag")
    blob_ = bytes(to_blob(FRAMES))
    return {
        "decode": lambda limits: decode(FRAMES, limits=limits),
        "decode of a blob": lambda limits: decode(blob_, limits=limits),
        "load": lambda limits: load(path, limits=limits),
        "load, mapped": lambda limits: load(path, mmap=True, limits=limits),
        "MsgpackDecoder": lambda limits: MsgpackDecoder(limits=limits).decode(FRAMES),
        "open_wire": lambda limits: open_wire(FRAMES, limits=limits),
        "open_wire of a source": lambda limits: open_wire(
            lambda offset, size: blob_[offset : offset + size], limits=limits
        ),
    }


@pytest.mark.parametrize("limit", ["bytes", "header", "objects", "depth"])
def test_every_reader_takes_limits(limit, tmp_path):
    for name, read in readers(tmp_path).items():
        read(None)
        read(Limits())
        with pytest.raises(WireFormatError) as caught:
            read(Limits(**{limit: 0}))
        error = caught.value
        assert error.reason == ("too_deep" if limit == "depth" else "too_large"), name
        assert f"the limit {limit!r}" in error.detail
        assert "expected at most 0" in error.detail
        assert f"pass limits=Limits({limit}=" in error.detail
        with pytest.raises(ArgumentTypeError, match="expected Limits"):
            read({"bytes": 5})


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    ("at", "forged", "size", "text"),
    [
        (0, b"not a blob, whatever its size" * 2, 1 << 40, "this is not a jagcodec blob"),
        (0, b"", 1 << 40, f"found {1 << 40}"),
        (16, (1 << 30).to_bytes(8, "little"), 2 << 30, "the limit 'header'"),
    ],
)
def test_a_file_is_measured_before_it_is_read(tmp_path, mmap, at, forged, size, text):
    path = tmp_path / "x.jag"
    dump({"a": torch.arange(5)}, path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(forged)
        file.truncate(size)  # a file of holes, larger than memory
    assert peak_of(refused, partial(load, mmap=mmap), path) < 1 << 20
    with pytest.raises(WireFormatError, match=text):
        load(path, mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_the_padding_of_a_blob_is_not_counted(tmp_path, mmap):
    path = tmp_path / "x.jag"
    dump({str(i): torch.arange(i) for i in range(50)}, path)
    size = sum(map(len, encode(load(path))))
    assert size < path.stat().st_size
    load(path, mmap=mmap, limits=Limits(bytes=size))
    with pytest.raises(WireFormatError, match="the limit 'bytes'"):
        load(path, mmap=mmap, limits=Limits(bytes=size - 1))


def test_limits_are_numbers_in_range():
    float_: Any = 1.5
    with pytest.raises(ArgumentError, match="0 or more"):
        Limits(bytes=-1)
    with pytest.raises(ArgumentError, match="0 to 104"):
        Limits(depth=105)
    with pytest.raises(ArgumentTypeError):
        Limits(header=float_)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Limits(), "bytes", 5)  # noqa: B010
    assert Limits() == Limits()


@pytest.mark.parametrize(
    ("frames", "limits"),
    [
        # 8 GiB of header on the word of 24 bytes, and a payload of 2^50 on that of a header
        ([b"x"], None),
        (message(tensordict([1], {"x": tensor(shape=(1, 2**50))}), sizes=[2**50]), None),
        (message(tensordict([1], {"x": tensor(shape=(1, 2**20))}), sizes=[2**20]),
         Limits(bytes=1000)),
    ],
)  # fmt: skip
def test_a_source_is_asked_for_no_more_than_the_limits(frames, limits):
    asked = []
    data = blob(frames, size=1 << 33) if frames == [b"x"] else blob(frames)

    def source(offset, size):
        asked.append(size)
        assert size <= (limits or Limits()).header
        return data[offset : offset + size].ljust(size, b"\0")

    with pytest.raises(WireFormatError) as caught:
        open_wire(source, limits=limits).to_tensordict()
    assert caught.value.reason == "too_large"
    assert sum(asked) < 1000


def test_the_defaults_hold_for_large_honest_batches():
    """16,384 rows, each with objects, as members of a stack, and as nodes of a list."""
    texts = TensorDict({"text": torch.zeros(16_384)}, batch_size=[16_384])
    for name in ("prompt", "answer"):
        texts[name] = ["x"] * 16_384
    assert decode(encode(texts)).batch_size == (16_384,)
    assert len(decode(encode([torch.ones(1) for _ in range(16_384)]))) == 16_384
    member = TensorDict({"ids": torch.ones(2)}, batch_size=[])
    stack = LazyStackedTensorDict(*[member] * 512, stack_dim=0)
    assert decode(encode(stack)).batch_size == (512,)
    # 2^28 tokens, 40 layers, 8 experts: 86 GB
    tokens = 16_384 * 16_384
    routes = message(tensordict([1], {"x": tensor(shape=(1, tokens, 320))}), sizes=[tokens * 320])
    data = blob(routes[:1])
    opened = open_wire(lambda offset, size: data[offset : offset + size])
    assert opened.schema["x"].shape == (1, tokens, 320)
