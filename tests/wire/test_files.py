# mypy: disable-error-code="arg-type, list-item"
"""Messages in one buffer, in memory of the caller's, and in files; and what is not a message."""

import array
import os
import signal
import socket
import stat
import struct
import traceback
from contextlib import chdir, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from tensordict import TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    WireBatch,
    WireFormatError,
    decode,
    dump,
    encode,
    load,
    open_wire,
    to_blob,
)
from jagcodec.errors import ArgumentTypeError
from tests.helpers import nested, run_python
from tests.oracle import assert_same
from tests.wire.readers import peak_of, refused

VALUE: Any = {"a": torch.arange(5000), "b": [1, "x"], "c": torch.arange(3), "d": torch.ones(7000)}
BATCH = TensorDict({"a": torch.ones(2)}, [2])

# --- buffers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        *(bytes, bytearray, memoryview, zmq.Frame),
        lambda data: memoryview(array.array("B", data)),
        lambda data: np.frombuffer(data, np.uint8),
        lambda data: torch.frombuffer(bytearray(data) + b"\0", dtype=torch.uint8)[: len(data)],
        lambda data: array.array("B", data),
    ],
)
def test_any_buffer_is_a_frame_and_a_blob(kind):
    frames = [kind(bytes(frame)) for frame in encode(VALUE)]
    assert_same(decode(frames), VALUE)
    assert_same(decode(tuple(frames)), VALUE)
    assert_same(decode(kind(bytes(to_blob(encode(VALUE))))), VALUE)


def test_any_writable_memory_of_that_size_will_do():
    expected = to_blob(encode(VALUE, narrow=True))
    size, made = len(expected), []

    def allocate(asked):
        made.append(bytearray(asked))
        return made[-1]

    for memory in (
        *(bytearray(size), memoryview(bytearray(size)), np.zeros((size + 7) // 8, np.float64)),
        torch.zeros(size, dtype=torch.uint8),
        allocate,
    ):
        assert encode(VALUE, out=memory, narrow=True) == size
        assert_same(decode(made[0] if memory is allocate else memory), VALUE)
    assert made == [expected]


@pytest.mark.parametrize(
    ("memory", "error", "text"),
    [
        (bytearray(100), ValueError, "at least .* found 100; pass a function"),
        (bytearray(len(to_blob(encode(VALUE))) - 1), ValueError, "at least"),
        (bytes(10**6), TypeError, "read-only bytes"),
        (np.zeros((1000, 1000), np.uint8)[:, ::2], TypeError, "gaps"),
        (3, TypeError, "buffer"),
        (lambda size: bytearray(10), ArgumentError, r"encode\(out\): .*at least .* found 10$"),
        (bytes, ArgumentTypeError, r"encode\(out\): .*read-only bytes"),
    ],
)
def test_memory_that_will_not_do(memory, error, text):
    with pytest.raises(error, match=text):
        encode(VALUE, out=memory)
    if isinstance(memory, bytearray):
        assert not any(memory)


@pytest.mark.parametrize("begin", [16_000, 19_999, 24_999, 25_000])
def test_memory_of_a_tensor_is_never_written_over(begin):
    """Neither its own place nor another's: what was not yet encoded would be lost."""
    memory = np.arange(60_000) % 251
    before = memory.copy()
    a = torch.from_numpy(memory[20_000:25_000])
    columns = {"a": a.view(5, 1000), "b": torch.ones(5, 1000)}
    of_columns: Any = {"lengths": [900] * 5, "token_aligned_fields": columns}
    encoders: Any = (
        partial(encode, {"a": a, "b": torch.arange(3000)}),
        partial(jagcodec.encode_fields, columns, **of_columns),
    )
    for send in encoders:
        if begin < 25_000:
            with pytest.raises(ArgumentError, match="apart from what is encoded"):
                send(out=memory[begin:])
            assert np.array_equal(memory, before)
        else:
            assert send(out=memory[begin:]) == len(to_blob(send()))
            assert np.array_equal(memory[:begin], before[:begin])


# --- what is not a message ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NoneType; encode makes them"),
        ("x.jag", "str; .*; load and open_wire read files"),
        (Path("x.jag"), "PosixPath; .*; load and open_wire read files"),
        (BATCH, "TensorDict; encode makes them"),
        ({"a": 1}, "dict; encode makes them"),
        (open_wire(encode(BATCH)), "WireBatch; encode makes them"),
        (np.zeros((4, 4), np.uint8)[:, ::2], "ndarray; .*; a blob is contiguous"),
        (torch.ones(4, 4)[:, ::2], r"a \(4, 2\) tensor .*; a blob is contiguous"),
        (torch.ones(4, device="meta"), "tensor .* on meta; .* on the CPU"),
    ],
)
def test_what_is_not_a_message_at_all_is_the_caller_s_mistake(value, text):
    calls: Any = {"decode(frames)": decode, "to_blob(frames)": to_blob}
    if not isinstance(value, (str, Path, dict, TensorDict, WireBatch)):  # files, open batches
        calls["open_wire(source)"] = open_wire
    for path, call in calls.items():
        with pytest.raises(ArgumentTypeError, match=text) as caught:
            call(value)
        assert caught.value.path == path
    with pytest.raises(ArgumentTypeError, match=text):
        jagcodec.MsgpackDecoder().decode(value)


@pytest.mark.parametrize(
    "data",
    [
        *(["x"], [None], [b"\x84", 3], [encode(1)], [BATCH], (Path(),), b"", torch.zeros(9)),
        [np.ones((4, 4))[:, ::2]],
    ],
)
def test_wrong_bytes_and_wrong_items_are_a_bad_message(data):
    for call in (decode, open_wire):
        refused(call, data, "foreign")


# --- files -------------------------------------------------------------------------------------

READS = [load, partial(load, mmap=True), open_wire]


@pytest.fixture
def path(tmp_path):
    """That of a file of "old", at most, which is the only one in its folder."""
    dump("old", path := tmp_path / "value.jag")
    return path


def test_a_dump_replaces_whole_files(path):
    held = load(path, mmap=True)
    with pytest.raises(TypeError):
        dump([torch.ones(5), object()], path)
    assert load(path) == "old"
    # The process dies while the bytes are written: at the first write beyond its allowance.
    code = """
    import resource, signal, sys, torch, jagcodec
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    jagcodec.dump(torch.ones(1_000_000), sys.argv[1])
    """
    # Without bytecode: Python would cut off a module's, too, and keep it.
    run_python(code, str(path), status=-signal.SIGXFSZ, PYTHONDONTWRITEBYTECODE="1")
    assert load(path) == "old"
    left = os.listdir(path.parent)
    dump("new", path)
    assert (load(path), held) == ("new", "old")
    assert os.listdir(path.parent) == left


@pytest.mark.parametrize("read", READS)
def test_files_that_are_not_messages(path, read):
    def says_the_file(read, cut):
        with pytest.raises(WireFormatError) as raised:
            read(path)
        text = "".join(traceback.format_exception(raised.value))
        assert f"in the file {str(path)!r}" in text
        assert ("if it was cut short" in text) == cut

    cut = to_blob(encode(TensorDict({"x": torch.arange(3000)}, [3000])))[:-1]
    for content in (b"", b"jag", b"jagcodec", b"PK\3\4 something else entirely", cut):
        path.write_bytes(content)
        says_the_file(read, cut=True)
    blob = to_blob(encode(TensorDict({"ids": nested([[1] * 3, [1] * 5])}, [2])))
    path.write_bytes(blob.replace(struct.pack("<3q", 0, 3, 8), struct.pack("<3q", 0, 9, 8)))
    says_the_file(lambda path: open_wire(path)["ids"], cut=False)
    with pytest.raises(FileNotFoundError):
        read(path.parent / "absent")


def meanwhile(monkeypatch, name, change):
    """Calls this once a function of `os` was called."""
    real = getattr(os, name)

    def call(*args, **options):
        result = real(*args, **options)
        change(result)
        return result

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("left", [0, 10, 1000, 39_000])
def test_a_file_that_shrinks_while_it_is_read_is_an_error(path, monkeypatch, left, mmap):
    dump(torch.full((5000,), 7), path)
    meanwhile(monkeypatch, "fstat", lambda status: os.truncate(path, left))
    # Of fewer than 24 bytes not even the preamble is there.
    reason = "foreign" if left < 24 else "frame_size"
    says = f"found {left}; it was shortened while it was read" if left > 24 else ""
    refused(partial(load, mmap=mmap), path, reason, says=says)


@pytest.mark.parametrize("options", [{}, {"compress": "zstd", "checksum": True}])
@pytest.mark.parametrize("value", [None, BATCH, {"td": BATCH, "more": torch.arange(9000)}])
def test_a_file_ends_with_its_message(path, value, options):
    """What follows would be lost. Memory may go on: shared memory comes in pages."""
    blob = bytes(to_blob(encode(value, **options)))
    for more in (b"\0", bytes(-len(blob) % 4096 + 1), b"x", blob, bytes(to_blob(encode(1)))):
        path.write_bytes(blob + more)
        says = f"{len(blob)} bytes, found {len(blob + more)}; write each .*its own file.*by ranges"
        for read in READS:
            refused(read, path, "frame_count", "file", says)
        assert_same(decode(blob + more), value)
    path.write_bytes(bytes(to_blob(encode(1))) + blob)
    first = len(to_blob(encode(1)))
    assert_same(decode(path.read_bytes()[first:]), value)
    path.write_bytes(blob)
    assert_same(load(path), value)


def test_a_file_that_goes_on_takes_no_memory(path):
    dump(VALUE, path)
    os.truncate(path, 1 << 30)
    for read in READS:
        assert peak_of(refused, read, path, "frame_count") < 1 << 20


def test_a_file_that_becomes_a_pipe_is_not_waited_for(path, monkeypatch):
    os.mkfifo(fifo := path.parent / "fifo")
    meanwhile(monkeypatch, "stat", lambda status: os.replace(fifo, path))
    with pytest.raises(ArgumentError, match="found a pipe"):
        load(path)


@pytest.mark.parametrize("call", [load, partial(load, mmap=True), partial(dump, 1)])
def test_pipes_and_devices_are_refused_at_once(tmp_path, call):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    # A socket's path has 107 bytes at most, which that of the directory may exceed.
    with chdir(tmp_path), socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    unusual = {
        str(tmp_path / "fifo"): "a pipe",
        tmp_path / "link": "a pipe",
        tmp_path / "folder": "a directory",
        str(tmp_path / "socket"): "a pipe, a socket",
        Path("/dev/zero"): "a pipe, a socket or a device",
        "/dev/null": "a pipe, a socket or a device",
    }
    for path, found in unusual.items():
        with pytest.raises(ArgumentError, match=rf"\(path\): .*regular file, found {found}"):
            call(path)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "link", "socket"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: load("a\0b"), ArgumentError, r"load\(path\): expected a path without NUL"),
        (lambda: dump(1, "a\0b"), ArgumentError, r"dump\(path\): expected a path without NUL"),
        (lambda: load(None), ArgumentTypeError, r"load\(path\): .* found NoneType"),
        (lambda: load(True), ArgumentTypeError, r"os\.PathLike, found bool"),  # not a descriptor
        (lambda: dump(1, 1), ArgumentTypeError, r"os\.PathLike, found int"),
        (lambda: load(to_blob(encode(1))), ArgumentTypeError, "bytearray; decode accepts"),
        (lambda: dump("x.jag", VALUE), ArgumentTypeError, r"found dict; .*dump\(obj, path\)"),
        (lambda: load("x.jag", device="no"), ArgumentError, r"load\(device\)"),
        (lambda: dump(1, "/absent/x"), FileNotFoundError, "'/absent/x'"),
        # rows and blobs in the place of something else
        (lambda: decode([{"ids": [1, 2]}]), ArgumentTypeError, "and encode_rows of rows"),
        (lambda: open_wire([{"ids": [1, 2]}]), ArgumentTypeError, "and encode_rows of rows"),
        (lambda: jagcodec.materialize([{"x": [1], "y": 1.0}]), TypeError, r"\['y'\].*found float"),
        (lambda: to_blob(to_blob(encode(1))), ArgumentError, "found a blob"),
        (lambda: to_blob([to_blob(encode(1))]), ArgumentError, "found a blob"),
        (lambda: dump(encode(1), "x"), ArgumentTypeError, r"dump\(obj\): .*open_wire\(frames\)"),
    ],
)
def test_paths_and_values_in_the_wrong_place_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_any_path_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    as_bytes: Any = type("AsBytes", (), {"__fspath__": lambda self: os.fsencode(tmp_path / "z")})
    # As long as names may be: the temporary file next to it has to be there too.
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    for path in ("x", Path("y"), as_bytes(), "n" * longest, "\udcff"):
        dump(VALUE, path)
        assert_same(load(path), VALUE)
    assert len(os.listdir(tmp_path)) == 5


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666, 0o755])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_a_dump_keeps_the_mode_of_the_file_that_it_replaces(path, mode, umask, monkeypatch):
    """And at no moment can others read what they could not read before."""
    path.chmod(mode)
    modes: list[int] = []
    meanwhile(monkeypatch, "open", lambda fd: modes.append(stat.S_IMODE(os.fstat(fd).st_mode)))
    before = os.umask(umask)
    try:
        dump("other", path)
        dump("new", path.parent / "new.jag")
    finally:
        os.umask(before)
    assert load(path) == "other"
    assert not modes[0] & 0o077 & ~mode
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE((path.parent / "new.jag").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize(
    ("name", "of_folder"),
    [*((name, False) for name in ("fsync", "replace", "fchmod")), ("open", True), ("fsync", True)],
)
def test_a_dump_that_fails_leaves_no_trace(path, monkeypatch, name, of_folder):
    """And what fails after the file took its place, at its folder, is not raised."""
    real = getattr(os, name)

    def refuse(what, *args):
        if os.path.isdir(what) == of_folder:
            raise OSError(28, "no space for the test")
        return real(what, *args)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, refuse)
        with nullcontext() if of_folder else pytest.raises(OSError, match="no space"):
            dump("new", path)
    found = "new" if of_folder else "old"
    assert (load(path), os.listdir(path.parent)) == (found, ["value.jag"])
