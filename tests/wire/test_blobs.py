"""Messages in one buffer, in memory of the caller's, and in files."""

import array
import os
import socket
import stat
import subprocess
import sys
import traceback
import tracemalloc
from contextlib import chdir
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    WireFormatError,
    decode,
    dump,
    encode,
    encode_fields,
    load,
    open_wire,
    pack_jagged_fields,
    to_blob,
)
from jagcodec.errors import ArgumentTypeError
from jagcodec.testing import jagged_batches
from tests.helpers import message
from tests.oracle import assert_same
from tests.strategies import trees

VALUE: Any = {"a": torch.arange(5000), "b": [1, "x"], "c": torch.arange(3), "d": torch.ones(7000)}


@given(trees(max_leaves=4))
def test_a_blob_is_a_message(value):
    blob = to_blob(encode(value))
    assert_same(decode(blob), value)
    assert_same(decode(bytes(blob)), value)
    memory = np.full(len(blob) + 5, 0xAA, dtype=np.uint8)
    assert encode(value, out=memory) == len(blob)
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
    memory = make(len(to_blob(encode(VALUE, narrow=True))))
    encode(VALUE, out=memory, narrow=True)
    assert_same(decode(memory), VALUE)


def test_a_function_is_called_once_with_the_size():
    asked = []

    def allocate(size):
        asked.append(bytearray(size))
        return asked[-1]

    assert encode(VALUE, out=allocate) == len(asked[0])
    assert len(asked) == 1
    assert asked[0] == to_blob(encode(VALUE))
    with pytest.raises(ArgumentError, match=r"at least .* found 10") as caught:
        encode(VALUE, out=lambda size: bytearray(10))
    assert caught.value.reason == "too_large"
    with pytest.raises(ArgumentTypeError, match=r"encode\(out\): .*read-only bytes"):
        encode(VALUE, out=bytes)  # type: ignore[arg-type]


def test_shared_memory_between_processes():
    memory = shared_memory.SharedMemory(create=True, size=len(to_blob(encode(VALUE))))
    try:
        encode(VALUE, out=memory.buf)
        code = (
            "import sys, jagcodec; from multiprocessing import shared_memory, resource_tracker;"
            f"m = shared_memory.SharedMemory({memory.name!r});"
            "v = jagcodec.decode(m.buf, copy=True); print(int(v['a'].sum()), v['b']);"
            "resource_tracker.unregister(m._name, 'shared_memory'); m.close()"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.stdout.split("\n")[0] == f"{int(VALUE['a'].sum())} [1, 'x']", run.stderr
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize(
    ("memory", "error", "text"),
    [
        (bytearray(100), ValueError, "at least .* found 100; pass a function"),
        (bytes(10**6), TypeError, "read-only bytes"),
        (np.zeros((1000, 1000), np.uint8)[:, ::2], TypeError, "gaps"),
        (3, TypeError, "buffer"),
    ],
)
def test_memory_that_will_not_do(memory, error, text):
    with pytest.raises(error, match=text):
        encode(VALUE, out=memory)
    if isinstance(memory, bytearray):
        assert not any(memory)


def test_memory_of_a_tensor_is_never_written_over():
    """Neither its own place nor another's: what was not yet encoded would be lost."""
    memory = np.arange(40_000) % 251
    tensors = {"a": torch.from_numpy(memory[20_000:25_000]), "b": torch.arange(3000)}
    before = memory.copy()
    for room in (memory[13_000:], memory[19_999:], memory[24_999:]):
        with pytest.raises(ArgumentError, match="apart from what is encoded"):
            encode(tensors, out=room)
        assert np.array_equal(memory, before)
    assert encode(tensors, out=memory[25_000:]) == len(to_blob(encode(tensors)))
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
    memory = bytearray(
        len(to_blob(encode(pack_jagged_fields(batch.fields, **options), narrow=True)))
    )
    assert encode_fields(batch.fields, out=memory, narrow=True, **options) == len(memory)
    assert_same(decode(memory), decode(composed))


# Cut, foreign, newer


def test_a_blob_cut_anywhere_is_refused():
    blob = to_blob(encode([torch.arange(3), torch.arange(2100), "x"]))
    for end in [*range(200), *range(200, len(blob), 997), len(blob) - 1]:
        with pytest.raises(WireFormatError):
            decode(blob[:end])


@pytest.mark.parametrize("read", [load, partial(load, mmap=True), open_wire])
def test_tracebacks_name_the_file(read, tmp_path):
    path = tmp_path / "cut.jag"
    batch = TensorDict({"x": torch.arange(3000)}, batch_size=[3000])
    path.write_bytes(to_blob(encode(batch))[:-1])
    with pytest.raises(WireFormatError) as raised:
        read(path)
    assert f"in the file {str(path)!r}" in "".join(traceback.format_exception(raised.value))


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
    assert path.stat().st_size == len(to_blob(encode(value)))
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
    with pytest.raises(FileNotFoundError) as caught:
        dump(1, tmp_path / "absent" / "x")
    assert caught.value.filename == str(tmp_path / "absent" / "x")
    assert jagcodec.load is load


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("left", [0, 10, 1000, 39_000])
def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path, monkeypatch, left, mmap):
    path = tmp_path / "value.jag"
    dump(torch.full((5000,), 7), path)
    look = os.fstat

    def look_and_cut(descriptor):
        status = look(descriptor)
        os.truncate(path, left)
        return status

    monkeypatch.setattr(os, "fstat", look_and_cut)
    with pytest.raises(WireFormatError) as caught:
        load(path, mmap=mmap)
    # Of fewer than 24 bytes not even the preamble is there.
    assert caught.value.reason == ("foreign" if left < 24 else "frame_size")
    if left > 24:
        assert f"found {left}; it was shortened while it was read" in caught.value.detail


def test_a_file_that_grows_while_it_is_read_is_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "value.jag"
    dump(VALUE, path)
    look = os.fstat

    def look_and_append(descriptor):
        status = look(descriptor)
        with open(path, "ab") as file:
            file.write(b"more")
        return status

    monkeypatch.setattr(os, "fstat", look_and_append)
    assert_same(load(path), VALUE)
    assert_same(load(path, mmap=True), VALUE)
    path.write_bytes(b"jag")
    with pytest.raises(WireFormatError, match="expected 24 bytes"):
        load(path)


@pytest.mark.parametrize("mmap", [False, True])
def test_memory_is_taken_for_files_that_begin_well_alone(tmp_path, mmap):
    path = tmp_path / "foreign"
    with open(path, "wb") as file:
        file.write(b"not a blob, whatever its size" * 2)
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(WireFormatError, match="this is not a jagcodec blob"):
            load(path, mmap=mmap)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def unusual_files(directory):
    """What opens like a file, and is not one, with the word for it."""
    os.mkfifo(directory / "fifo")
    (directory / "folder").mkdir()
    (directory / "link").symlink_to(directory / "fifo")
    # A socket's path has 107 bytes at most, which that of the directory may exceed.
    with chdir(directory), socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    return {
        str(directory / "fifo"): "a pipe",
        directory / "link": "a pipe",
        directory / "folder": "a directory",
        str(directory / "socket"): "a pipe, a socket",
        "/dev/null": "a pipe, a socket or a device",
        Path("/dev/zero"): "a pipe, a socket or a device",
    }


@pytest.mark.parametrize("call", [load, partial(load, mmap=True), partial(dump, 1)])
def test_files_that_are_no_files_are_refused_at_once(tmp_path, call):
    for path, found in unusual_files(tmp_path).items():
        with pytest.raises(ArgumentError, match=rf"\(path\): .*regular file, found {found}"):
            call(path)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "link", "socket"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    path, fifo = tmp_path / "value.jag", tmp_path / "fifo"
    dump(1, path)
    os.mkfifo(fifo)
    look = os.stat

    def look_and_swap(name, **options):
        status = look(name, **options)
        os.replace(fifo, path)
        return status

    monkeypatch.setattr(os, "stat", look_and_swap)
    with pytest.raises(ArgumentError, match="found a pipe"):
        load(path)


def test_a_descriptor_is_neither_taken_nor_closed(tmp_path):
    path = tmp_path / "value.jag"
    dump("kept", path)
    calls: tuple[Any, ...] = (load, partial(dump, 1))
    with open(path, "rb") as file:
        for call in calls:
            for number in (file.fileno(), True):
                with pytest.raises(ArgumentTypeError, match=r"os\.PathLike, found (int|bool)"):
                    call(number)
        assert file.read(8) == b"jagcodec"


NOTHING: Any = None
BLOB: Any = to_blob(encode(1))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: load("a\0b"), ArgumentError, r"load\(path\): expected a path without NUL"),
        (lambda: dump(1, "a\0b"), ArgumentError, r"dump\(path\): expected a path without NUL"),
        (lambda: load(NOTHING), ArgumentTypeError, r"load\(path\): .* found NoneType"),
        (lambda: load(BLOB), ArgumentTypeError, "bytearray; decode accepts"),
        (lambda: dump("x.jag", VALUE), ArgumentTypeError, r"found dict; .*dump\(obj, path\)"),
        (lambda: load("x.jag", device="no"), ArgumentError, r"load\(device\)"),
        (
            lambda: dump(encode(1), "x.jag"),
            ArgumentTypeError,
            r"dump\(obj\): .*open_wire\(frames\)",
        ),
    ],
)
def test_paths_that_are_no_paths(call, error, text):
    with pytest.raises(error, match=text):
        call()


class AsBytes(os.PathLike):
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return os.fsencode(self.path)


def test_any_path_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # As long as names may be: the temporary file beside it has to be there too.
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    for path in ("x", Path("y"), AsBytes(tmp_path / "z"), "n" * longest, "\udcff"):
        dump(VALUE, path)
        assert_same(load(path), VALUE)
    assert len(os.listdir(tmp_path)) == 5


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666, 0o755])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_a_dump_keeps_the_mode_of_what_it_replaces(tmp_path, mode, umask):
    path, new = tmp_path / "value.jag", tmp_path / "new.jag"
    dump("old", path)
    path.chmod(mode)
    before = os.umask(umask)
    try:
        dump("other", path)
        dump("new", new)
    finally:
        os.umask(before)
    assert load(path) == "other"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE(new.stat().st_mode) == 0o666 & ~umask


def test_no_moment_of_a_dump_is_readable_for_others(tmp_path, monkeypatch):
    path = tmp_path / "value.jag"
    dump("old", path)
    path.chmod(0o600)
    modes = []
    opened = os.open

    def open_and_look(name, *args, **options):
        descriptor = opened(name, *args, **options)
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", open_and_look)
    dump("secret", path)
    assert modes[0] == 0o600


@pytest.mark.parametrize("name", ["open", "fsync"])
def test_after_the_file_took_its_place_nothing_is_raised(tmp_path, monkeypatch, name):
    path = tmp_path / "value.jag"
    dump("old", path)
    real = getattr(os, name)

    def refuse(what, *args):
        folder = what == str(tmp_path) if name == "open" else stat.S_ISDIR(os.fstat(what).st_mode)
        if folder:
            raise PermissionError(13, "refused for the test")
        return real(what, *args)

    monkeypatch.setattr(os, name, refuse)
    dump("new", path)
    assert load(path) == "new"


def test_a_dump_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "value.jag"
    dump("old", path)

    def refuse(*args):
        raise OSError(28, "no space for the test")

    for name in ("fsync", "replace", "fchmod"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refuse)
            with pytest.raises(OSError, match="no space"):
                dump("new", path)
        assert (load(path), os.listdir(tmp_path)) == ("old", ["value.jag"])


def test_every_buffer_holds_a_message():
    """An `array` is a sequence of numbers, too, and a memoryview one of bytes."""
    blob = bytes(to_blob(encode(VALUE)))
    for made in (array.array("B", blob), np.frombuffer(blob, np.uint8)):
        assert_same(decode(made), VALUE)
        assert_same(decode(memoryview(made)), VALUE)  # type: ignore[arg-type]
    frames = [array.array("B", bytes(frame)) for frame in encode(VALUE)]
    assert_same(decode(frames), VALUE)
    assert_same(decode(tuple(frames)), VALUE)


# Mistakes of the caller


BATCH = TensorDict({"a": torch.ones(2)}, [2])
NOT_MESSAGES = [
    (None, "NoneType; encode makes them"),
    ("x.jag", "str; .*; load and open_wire read files"),
    ("", "str; .*; load and open_wire read files"),
    (Path("x.jag"), "PosixPath; .*; load and open_wire read files"),
    (BATCH, "TensorDict; encode makes them"),
    ({"a": 1}, "dict; encode makes them"),
    (3, "int; encode makes them"),
    (jagcodec.open_wire(encode(BATCH)), "WireBatch; encode makes them"),
    (np.zeros((4, 4), np.uint8)[:, ::2], "ndarray; .*; a blob is contiguous"),
    (torch.ones(4, 4)[:, ::2], r"a \(4, 2\) tensor .*; a blob is contiguous"),
    (torch.ones(4, device="meta"), "tensor .* on meta; .* on the CPU"),
]


@pytest.mark.parametrize(("value", "text"), NOT_MESSAGES)
def test_what_is_no_message_at_all_is_the_caller_s_mistake(value, text):
    calls: dict[str, Any] = {
        "decode(frames)": decode,
        "open_wire(source)": jagcodec.open_wire,
        "to_blob(frames)": to_blob,
        "decode(frames) ": jagcodec.MsgpackDecoder().decode,
    }
    if isinstance(value, (str, Path)):
        del calls["open_wire(source)"]  # which reads a file
    for path, call in calls.items():
        with pytest.raises(ArgumentTypeError, match=text) as caught:
            call(value)
        assert caught.value.path == path.strip()


@pytest.mark.parametrize(
    "frames", [[], ["x"], [None], [b"\x84", 3], [encode(1)], [BATCH], (Path(),)]
)
def test_items_of_a_list_may_be_a_peer_s(frames):
    for call in (decode, jagcodec.open_wire, to_blob):
        with pytest.raises(WireFormatError):
            call(frames)


def test_wrong_bytes_are_a_bad_message():
    for data in (b"", b"hello", bytes(64), np.zeros(9, np.uint8), torch.zeros(9), memoryview(b"x")):
        for call in (decode, jagcodec.open_wire):
            with pytest.raises(WireFormatError):
                call(data)


def test_a_blob_is_not_made_a_blob_again():
    blob = to_blob(encode(1))
    for already in (blob, [blob]):
        with pytest.raises(ArgumentError, match="found a blob"):
            to_blob(already)  # type: ignore[arg-type]
