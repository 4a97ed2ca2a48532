"""Messages in one buffer, in memory of the caller's, and in files."""

import os
import subprocess
import sys
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import jagcodec
from jagcodec import (
    ArgumentError,
    WireFormatError,
    decode,
    decode_batch,
    dump,
    encode,
    encode_batch_into,
    encode_fields,
    encode_into,
    encoded_size,
    load,
    pack_jagged_fields,
    to_blob,
)
from jagcodec.testing import assert_same, jagged_batches, trees
from tests.helpers import message

VALUE = {"a": torch.arange(5000), "b": [1, "x"], "c": torch.arange(3), "d": torch.ones(7000)}


@given(trees(max_leaves=4))
def test_a_blob_is_a_message(value):
    blob = to_blob(encode(value))
    assert len(blob) == encoded_size(value)
    assert_same(decode(blob), value)
    assert_same(decode(bytes(blob)), value)
    memory = np.full(len(blob) + 5, 0xAA, dtype=np.uint8)
    assert encode_into(value, memory) == len(blob)
    assert memory[: len(blob)].tobytes() == blob
    assert memory[len(blob) :].tolist() == [0xAA] * 5
    assert_same(decode(memory), value)


def test_every_buffer_lies_at_a_multiple_of_64():
    blob = np.frombuffer(to_blob(encode(VALUE)), dtype=np.uint8)
    value = decode(blob)
    begin = blob.__array_interface__["data"][0]
    offsets = [value[name].data_ptr() - begin for name in "acd"]
    assert [offset % 64 for offset in offsets] == [0, 0, 0]
    assert all(0 < offset < len(blob) for offset in offsets)
    assert bytes(blob[:12]) == b"jagcodec\x01\0\0\0"


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda n: memoryview(bytearray(n)),
        lambda n: np.zeros(n, np.uint8),
        lambda n: np.zeros((n + 7) // 8, np.float64),
        lambda n: torch.zeros(n, dtype=torch.uint8),
    ],
)
def test_any_writable_memory_will_do(make):
    memory = make(encoded_size(VALUE, narrow=True))
    encode_into(VALUE, memory, narrow=True)
    assert_same(decode(memory), VALUE)


def test_shared_memory_between_processes():
    memory = shared_memory.SharedMemory(create=True, size=encoded_size(VALUE))
    try:
        encode_into(VALUE, memory.buf)
        code = (
            "import sys, jagcodec; from multiprocessing import shared_memory, resource_tracker;"
            f"m = shared_memory.SharedMemory({memory.name!r});"
            "v = jagcodec.decode(m.buf, copy=True); print(int(v['a'].sum()), v['b']);"
            "resource_tracker.unregister(m._name, 'shared_memory'); m.close()"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.stdout.split("\n")[0] == f"{int(VALUE['a'].sum())} [1, 'x']", run.stderr  # type: ignore[attr-defined]
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize(
    ("memory", "error", "text"),
    [
        (bytearray(100), ValueError, "at least .* found 100; encoded_size"),
        (bytes(10**6), TypeError, "read-only bytes"),
        (np.zeros((1000, 1000), np.uint8)[:, ::2], TypeError, "gaps"),
        (3, TypeError, "buffer"),
    ],
)
def test_memory_that_will_not_do(memory, error, text):
    with pytest.raises(error, match=text):
        encode_into(VALUE, memory)
    if isinstance(memory, bytearray):
        assert not any(memory)


def test_memory_of_a_tensor_is_never_written_over():
    """Neither its own place nor another's: what was not yet encoded would be lost."""
    memory = np.arange(40_000) % 251
    tensors = {"a": torch.from_numpy(memory[20_000:25_000]), "b": torch.arange(3000)}
    before = memory.copy()
    for room in (memory[13_000:], memory[19_999:], memory[24_999:]):
        with pytest.raises(ArgumentError, match="apart from what is encoded"):
            encode_into(tensors, room)
        assert np.array_equal(memory, before)
    assert encode_into(tensors, memory[25_000:]) == encoded_size(tensors)
    assert np.array_equal(memory[:25_000], before[:25_000])


@pytest.mark.parametrize("begin", [0, 30_000, 99_000])
def test_columns_are_never_packed_over_each_other(begin):
    memory = np.arange(100_000) % 251
    columns = {"a": torch.from_numpy(memory[:40_000]).view(10, -1), "b": torch.ones(10, 4000)}
    lengths = torch.full((10,), 3000)
    before = memory.copy()
    options: dict[str, Any] = {"lengths": lengths, "token_aligned_fields": columns}
    if begin < 40_000:
        with pytest.raises(ArgumentError, match="apart from what is encoded"):
            encode_fields(columns, out=memory[begin:], **options)
        assert np.array_equal(memory, before)
    else:
        encode_fields(columns, out=np.empty_like(memory), **options)


@given(jagged_batches())
def test_fused_columns_are_the_same_bytes(batch):
    options = {"lengths": batch.lengths, "token_aligned_fields": batch.token_aligned_fields}
    composed = encode(pack_jagged_fields(batch.fields, **options))
    fused = encode_fields(batch.fields, **options)
    assert message(fused) == message(composed)
    memory = bytearray(encoded_size(pack_jagged_fields(batch.fields, **options), narrow=True))
    assert encode_fields(batch.fields, out=memory, narrow=True, **options) == len(memory)
    assert_same(decode(memory), decode(composed))


def test_many_values_one_allocation():
    values = [VALUE, "text", torch.arange(9), None]
    asked = []

    def allocate(size):
        asked.append(size)
        return bytearray(size)

    blobs = encode_batch_into(values, allocate)
    assert len(asked) == 1
    assert len(blobs) == len(values)
    assert len({blob.obj.__array_interface__["data"][0] for blob in blobs}) == len(values)  # type: ignore[attr-defined]
    assert_same(decode_batch(blobs), values)
    assert_same(decode_batch([bytes(blob) for blob in blobs]), values)
    assert encode_batch_into([], bytearray) == []
    with pytest.raises(ValueError, match="at least"):
        encode_batch_into(values, lambda size: bytearray(10))


# Cut, foreign, newer


def test_a_blob_cut_anywhere_is_refused():
    blob = to_blob(encode([torch.arange(3), torch.arange(2100), "x"]))
    for end in [*range(200), *range(200, len(blob), 997), len(blob) - 1]:
        with pytest.raises(WireFormatError):
            decode(blob[:end])


@pytest.mark.parametrize(
    ("at", "new", "reason"),
    [
        (0, b"J", "foreign"),
        (8, b"\2", "unknown_version"),
        (12, b"\1", "bad_header"),
        (16, b"\xff", "frame_size"),
        (23, b"\xff", "bad_header"),
        (16, b"\0\0", "foreign"),
    ],
)
def test_forged_preambles(at, new, reason):
    blob = to_blob(encode([1, 2]))
    blob[at : at + len(new)] = new
    with pytest.raises(WireFormatError) as caught:
        decode(blob)
    assert caught.value.reason == reason


# Files


@given(trees(max_leaves=3))
def test_files_hold_any_value(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("files") / "value.jag"
    dump(value, path)
    assert path.stat().st_size == encoded_size(value)
    assert_same(load(path), value)
    assert_same(load(path, mmap=True), value)


def test_a_mapped_file_is_aliased_but_never_written(tmp_path):
    path = tmp_path / "value.jag"
    dump(VALUE, str(path), checksum=True)
    before = path.read_bytes()
    value = load(path, mmap=True)
    value["a"].zero_()
    value["c"].zero_()
    assert path.read_bytes() == before
    assert_same(load(path), VALUE)


def test_a_dump_replaces_whole_files(tmp_path):
    path = tmp_path / "value.jag"
    dump("old", path)
    held = load(path, mmap=True)
    with pytest.raises(TypeError):
        dump([torch.ones(5), object()], path)
    assert load(path) == "old"
    dump("new", path)
    assert (load(path), held) == ("new", "old")
    assert os.listdir(tmp_path) == ["value.jag"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_crash_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "value.jag"
    dump("old", path)
    # The process dies while the bytes are written: at the first write beyond its allowance.
    code = (
        "import resource, signal, sys, torch, jagcodec;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL);"
        "jagcodec.dump(torch.ones(1_000_000), sys.argv[1])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True)
    assert run.returncode != 0
    assert load(path) == "old"


def test_files_that_are_not_valid(tmp_path):
    path = tmp_path / "x"
    for content in (b"", b"jag", b"jagcodec", b"PK\3\4 something else entirely"):
        path.write_bytes(content)
        for mmap in (False, True):
            with pytest.raises(WireFormatError):
                load(path, mmap=mmap)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        dump(1, tmp_path / "absent" / "x")
    assert jagcodec.load is load
