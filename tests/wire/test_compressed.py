"""Compressed frames: every value and every part of them comes back, and no frame is believed."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    Limits,
    WireFormatError,
    decode,
    encode,
    encode_rows,
    materialize,
    open_wire,
)
from jagcodec.wire import compress, header
from tests.helpers import Store, message, receive, size
from tests.oracle import assert_same
from tests.wire import forge, spec_reader
from tests.wire.cases import BAD
from tests.wire.readers import refused


def is_compressed(frames):
    return header.read_header(frames[0]).compressed


def batch(rows=40, tokens=900):
    """Jagged columns that are large, and compress well or not at all."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, tokens, (rows,), generator=generator).tolist()
    return TensorDict(
        {
            "ids": _nest([torch.arange(n) // 7 for n in lengths]),
            "noise": _nest([torch.randint(1 << 62, (n,), generator=generator) for n in lengths]),
            "mask": _nest([torch.ones(n, dtype=torch.bool) for n in lengths]),
            "reward": torch.arange(float(rows)),
        },
        batch_size=[rows],
    )


def _nest(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


# --- values ------------------------------------------------------------------------------------


def test_each_frame_is_one_of_zstd_or_as_it_is():
    value = batch()
    plain, frames = encode(value), encode(value, compress="zstd")
    read = header.read_header(frames[0])
    assert read.sizes == [len(frame) for frame in plain[1:]]
    assert read.stored == [len(frame) for frame in frames[1:]]
    kinds = set()
    for whole, sent in zip(plain[1:], frames[1:], strict=True):
        kinds.add(len(sent) < len(whole))
        if len(sent) < len(whole):
            sent = zstandard.ZstdDecompressor().decompress(bytes(sent))
        assert bytes(sent) == bytes(whole)
    assert kinds == {True, False}
    assert message(open_wire(frames).to_frames()) == message(frames)


def test_what_does_not_shrink_is_sent_as_it_is():
    generator = np.random.default_rng(1)
    for value in (7, [1, 2, 3], generator.bytes(100_000), torch.ones(900), {"a": torch.ones(3)}):
        for checksum in (False, True):
            plain = encode(value, checksum=checksum)
            assert message(encode(value, compress="zstd", checksum=checksum)) == message(plain)
    # Frames that do not shrink are sent as they are, and so are small ones.
    noise = torch.frombuffer(bytearray(generator.bytes(40_000)), dtype=torch.int64)
    zeros = torch.zeros(5000)
    frames = encode([noise, zeros, torch.zeros(8)], compress="zstd")
    assert [len(frame) for frame in frames[1:3]] == [32, 40_000]
    assert len(frames[3]) < 100
    assert frames[2].obj is not None
    assert np.shares_memory(np.asarray(frames[2]), noise.numpy())


def test_equal_values_give_equal_bytes(monkeypatch):
    frames = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        frames.append(message(encode(batch(rows=200), compress="zstd")))
    assert is_compressed(frames[0])
    assert frames[0] == frames[1] == frames[2]


# --- parts -------------------------------------------------------------------------------------


def counted(monkeypatch):
    """The sizes of frames as they are decompressed."""
    done: list[int] = []
    decompressed = compress._decompressed

    def counting(data, size, index):
        done.append(size)
        return decompressed(data, size, index)

    monkeypatch.setattr(compress, "_decompressed", counting)
    return done


def test_a_range_takes_compressed_frames_whole_and_others_by_range(monkeypatch):
    done = counted(monkeypatch)
    value = batch(rows=400)
    frames = encode(value, compress="zstd")
    store = Store(frames)
    opened = open_wire(store)
    assert (store.fetched, done) == (24 + len(frames[0]), [])
    store.asked.clear()
    row = opened.rows([200])["noise"]  # as it is, but for the offsets
    assert_same(row.values(), value["noise"][200])
    read = header.read_header(frames[0])
    offsets = read.stored[read.groups[0].buffer]
    assert store.fetched == offsets + 8 * len(value["noise"][200])
    store.asked.clear()
    assert_same(opened.rows([3])["ids"].values(), value["ids"][3])
    assert store.fetched in read.stored
    # Frames that were fetched are known.
    store.asked.clear()
    for i in range(10):
        assert_same(opened.rows([i])["ids"].values(), value["ids"][i])
    assert store.fetched == 0
    assert len(done) == 2


@pytest.mark.parametrize("source", [lambda frames: frames, Store])
def test_what_was_read_twice_is_not_shared(source):
    """Frames are kept, and what is handed out may be written to."""
    frames = encode({"a": TensorDict({"x": torch.zeros(4, 2000)}, [4])}, compress="zstd")
    opened = open_wire(source(frames))
    first = opened.rows([3])["x"]
    first += 1
    assert opened.rows([3])["x"].sum() == 0
    assert opened.rows([2, 3])["x"].sum() == 0


def test_frames_in_memory_are_decompressed_only_if_asked_for(monkeypatch):
    done = counted(monkeypatch)
    expected = batch(rows=400)
    frames = encode(expected, compress="zstd")
    opened = open_wire(frames)
    assert done == []
    assert_same(opened.rows([7])["ids"].values(), expected["ids"][7])
    assert len(done) == 2  # its own, and that of the offsets
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda i: opened.rows([i])["ids"].values(), range(8)))
    for i, row in enumerate(rows):
        assert_same(row, expected["ids"][i])
    assert len(done) == 2
    assert_same(opened.to_tensordict(), expected)
    read = header.read_header(frames[0])
    less = [size for sent, size in zip(read.stored, read.sizes, strict=True) if sent < size]
    assert sorted(done) == sorted(less)


def test_frames_are_shared_by_threads(monkeypatch):
    monkeypatch.setattr(compress, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    done = counted(monkeypatch)
    value = batch(rows=200)
    frames = encode(value, compress="zstd")
    for read in (decode, materialize, lambda frames: materialize(open_wire(frames))):
        done.clear()
        read(frames)
        assert done
    assert_same(decode(frames), value)
    damaged = receive(frames)
    damaged[2] = bytearray(len(damaged[2]))
    with pytest.raises(WireFormatError, match=r"frame 2: expected"):
        decode(damaged)
    with pytest.raises(WireFormatError, match=r"\(frame 2\): expected") as caught:
        materialize(open_wire(damaged))
    assert caught.value.path.startswith("$.")


@pytest.mark.parametrize("copy", [None, True, False])
def test_what_comes_out_belongs_to_the_caller(copy):
    value = [torch.zeros(5000), torch.from_numpy(np.random.default_rng(0).random(5000))]
    frames = receive(encode(value, compress="zstd"), bytes if copy is None else bytearray)
    before = message(frames)
    first, second = decode(frames, copy=copy)
    first += 1
    if copy is not False:
        second += 1
        assert message(frames) == before
    assert_same(decode(frames, copy=True)[0], value[0])


# --- arguments ---------------------------------------------------------------------------------


ENCODE: Any = encode
ENCODE_ROWS: Any = encode_rows


@pytest.mark.parametrize(
    "how",
    [
        *("gzip", "lz4", "", True, False, 3, b"zstd", ["zstd", 3], {"zstd": 3}),
        *(("zstd",), ("lz4", 1), ("zstd", 20), ("zstd", -8), ("zstd", 1.0), ("zstd", True)),
        ("zstd", 3, 4),
    ],
)
def test_other_choices_are_refused(how):
    for call in (lambda: ENCODE(1, compress=how), lambda: ENCODE_ROWS([{"a": 1}], compress=how)):
        with pytest.raises(ArgumentError, match=r"level from -7 to 19, found .*compress='zstd'"):
            call()


def test_a_library_that_is_missing_is_named_with_the_remedy(monkeypatch):
    value = {"zeros": torch.zeros(50_000)}
    frames = encode(value, compress="zstd")
    fields = encode(TensorDict({"zeros": torch.zeros(50, 1000)}, [50]), compress="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for call in (
        lambda: encode(value, compress="zstd"),
        lambda: decode(frames),
        lambda: open_wire(fields),
        lambda: open_wire(Store(fields)),
        lambda: materialize([fields, fields]),
    ):
        with pytest.raises(ArgumentError, match=r"pip install 'zstandard>=0\.22'"):
            call()
    # What is wrong with a message is said all the same, and before.
    with pytest.raises(WireFormatError):
        decode(BAD["compressed_to_more"].message)
    assert_same(decode(encode(value)), value)


# --- hostile messages --------------------------------------------------------------------------

FORGED = [name for name in BAD if name.startswith("zstd_")]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_frame_is_refused_by_the_range_that_needs_it(name):
    forged = forge.compressed(forge.batch(forge.tensor(shape=[2, 50])), [100], BAD[name].message[1])
    for source in (forged, Store(forged)):
        error = refused(lambda source: open_wire(source)["a"], source)
        assert (error.reason, error.path) == ("bad_value", "$.a (frame 1)")


DOCUMENTS = (1 << 26) + (1 << 17)
HUGE = {
    "frames": (forge.tensor(shape=[1 << 31]), [1 << 31], forge.SEVENS, {}),
    "many frames": (forge.tensor(shape=[1 << 20]), [1 << 20] * 1100, forge.SEVENS, {}),
    "bits": (forge.tensor("int64", [1 << 27], stored=1), [1 << 24], forge.zeros(1 << 24), {}),
    "bits in rows": (
        forge.jagged(dtype="int64", shape=[1 << 27], offset=0, stored=1),
        [1 << 24],
        forge.zeros(1 << 24),
        {"groups": [[0, 0, 1, 1 << 27, 1 << 27]]},
    ),
    "documents": (
        forge.node("NON_TENSOR_ROWS", numbers=[0, 0, 0, 0, DOCUMENTS]),
        [DOCUMENTS],
        forge.zeros(DOCUMENTS),
        {"groups": [[0, 0, 1, DOCUMENTS, DOCUMENTS]]},
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_a_message_claims_is_checked_before_memory_is_taken(name, monkeypatch):
    """Whatever it is that takes more: frames, narrow cells or objects."""

    def none(data, size, index):
        raise AssertionError(f"{size} bytes")

    monkeypatch.setattr(compress, "_decompressed", none)
    root, sizes, sent, changes = HUGE[name]
    frames = forge.compressed(root, sizes, *[sent] * len(sizes), **changes)
    for read in (decode, lambda frames: materialize([frames, frames])):
        with pytest.raises(WireFormatError, match=r"limits=Limits\(expanded=") as caught:
            read(frames)
        assert caught.value.reason == "too_large"
    with pytest.raises(spec_reader.RefusedError, match="too much"):
        spec_reader.read(frames)


def test_a_frame_that_changes_after_it_was_checked_is_the_one_that_was_checked(monkeypatch):
    """As memory may that another process shares."""
    frames = receive(forge.of_sevens(forge.SEVENS))
    expected = decode(forge.of_sevens(forge.SEVENS))
    check = zstandard.get_frame_parameters

    def exchanged(data):
        found = check(data)
        other = forge.zstd(b"", size=1 << 40, width=8)
        frames[1][:] = other[: len(frames[1])].ljust(len(frames[1]), b"\1")
        return found

    monkeypatch.setattr(zstandard, "get_frame_parameters", exchanged)
    assert_same(decode(frames), expected)
    assert frames[1][:4] == zstandard.FRAME_HEADER
    with pytest.raises(WireFormatError):
        decode(frames)


def test_a_writer_makes_no_bombs(monkeypatch):
    """A message that default limits refuse is sent as it is."""
    value = torch.zeros(1 << 20, dtype=torch.uint8)
    beyond = (1 << 20) - 64 * size(encode(value, compress="zstd"))
    for limit, compresses in ((beyond, True), (beyond - 1, False)):
        limits = Limits(expanded=limit)
        monkeypatch.setattr(header, "DEFAULT_LIMITS", limits)
        frames = encode(value, compress="zstd")
        assert is_compressed(frames) is compresses
        assert_same(decode(frames, limits=limits), value)
