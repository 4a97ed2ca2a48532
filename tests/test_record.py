"""Records: whole steps or none, whenever their writer is killed."""

import itertools
import os
import signal
import threading
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import BatchedDataDict, dump, encode, load, open_wire, pack_rows
from jagcodec.errors import ArgumentError, ArgumentTypeError, UnsupportedTypeError
from jagcodec.record import RecordReader, RecordWriter
from jagcodec.wire.frames import blob_pieces
from tests.helpers import ROOT, make_batch, run_python


def batch(step):
    """A batch that says of which step it is, in every cell."""
    return pack_rows([{"ids": [step] * n, "reward": float(step)} for n in (9000, 0, 3)])


def step_of(td):
    (step,) = set(td["ids"].values().tolist())
    assert td["reward"].tolist() == [step] * 3
    return step


def path_of(directory, step):
    return directory / f"step-{step:010d}.jag"


def record(directory, steps=range(3), **options):
    with RecordWriter(directory, **options) as writer:
        for step in steps:
            writer.write(step, batch(step), meta={"step": step})
    return RecordReader(directory)


def test_files_are_those_of_dump_for_every_form_of_a_batch_and_every_option(tmp_path):
    td = make_batch()
    opened = open_wire(encode(td, narrow=True, meta={"model": 3}))
    forms: list[tuple[Any, dict[str, Any]]] = [
        (td, {"narrow": True, "elide": True, "compress": "zstd", "meta": {"a": 1}}),
        (opened, {"checksum": False}),
        (opened.rows(slice(0, 6)), {"meta": {"model": 4}}),
        ({"batch": td, "step": 4}, {}),
        (BatchedDataDict({"x": torch.ones(6, 2)}, meta_info={"a": 1}), {}),
    ]
    with RecordWriter(tmp_path) as writer:
        for step, (form, options) in enumerate(forms):
            writer.write(step, form, **options)
            dump(form, tmp_path / "dumped", **{"checksum": True, **options})
            assert path_of(tmp_path, step).read_bytes() == (tmp_path / "dumped").read_bytes()


def test_steps_are_the_files_with_their_names_and_an_open_batch_outlives_its_file(tmp_path):
    reader = record(tmp_path, [42, 2**63 - 1])
    path = path_of(tmp_path, 42)
    assert reader.file(42) == str(path)
    for name in ("step-3.jag", "step-00000000003.jag", "x.jag", "step-0000000004.jag.tmp"):
        (tmp_path / name).write_bytes(b"")
    assert reader.steps == (42, 2**63 - 1)
    opened = open_wire(path)
    path.unlink()
    assert step_of(opened.to_tensordict()) == 42


KEEP = st.none() | st.integers(1, 3)
DOINGS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 12)),
    st.tuples(st.just("rewind"), st.integers(0, 12)),
    st.tuples(st.just("reopen"), KEEP),
)


@settings(max_examples=60)
@given(KEEP, st.lists(DOINGS, max_size=12))
def test_steps_rise_and_the_newest_are_kept(tmp_path_factory, keep, doings):
    directory = tmp_path_factory.mktemp("record")
    writer, reader = RecordWriter(directory, keep=keep), RecordReader(directory)
    steps: list[int] = []
    for what, number in doings:
        if what == "reopen":
            writer.close()
            keep, writer = number, RecordWriter(directory, keep=number)
        elif what == "rewind":
            writer.rewind(number)
            steps = [step for step in steps if step < number]
        elif steps and number <= steps[-1]:
            text = f"above {steps[-1]}.*found {number}; rewind"
            with pytest.raises(ArgumentError, match=text) as caught:
                writer.write(number, batch(99))
            assert caught.value.reason == "conflict"
        else:
            writer.write(np.int64(number), batch(number))  # type: ignore[arg-type]
            steps = [*steps, number][-(keep or 99) :]
        assert reader.steps == tuple(steps)
    writer.close()
    assert [step_of(load(reader.file(step))) for step in steps] == steps
    for look in (load, open_wire):
        with pytest.raises(FileNotFoundError, match="step-0000000013"):
            look(reader.file(13))


def test_a_record_stays_where_it_is_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    """Another directory may have a record of this name, whose lock this writer does not hold."""
    for folder in ("here", "there"):
        (tmp_path / folder / "steps").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with RecordWriter("steps") as writer:
        reader = RecordReader("steps")
        monkeypatch.chdir(tmp_path / "there")
        writer.write(0, batch(0))
        assert reader.steps == (0,)
    assert os.listdir("steps") == []


def test_steps_are_deleted_in_an_order_that_leaves_no_gap_and_keeps_the_newest(
    tmp_path, monkeypatch
):
    events = []

    def noted(real, *args):
        real(*args)
        events.append((real.__name__, *sorted(path.name for path in tmp_path.glob("step-*"))))

    one, two, three = (path_of(tmp_path, step).name for step in (1, 2, 3))
    record(tmp_path, [1])
    for real in (os.fsync, os.replace, os.unlink):
        monkeypatch.setattr(os, real.__name__, partial(noted, real))
    with RecordWriter(tmp_path, keep=1) as writer:
        writer.write(2, batch(2))
    # First the file, under another name, then the directory.
    assert events[:2] == [("fsync", one), ("replace", one, two)]
    assert events[2:] == [("fsync", one, two), ("unlink", two)]
    events.clear()
    with RecordWriter(tmp_path) as writer:
        writer.write(3, batch(3))
        writer.rewind(0)
    assert events[3:] == [("unlink", two), ("unlink",)]
    assert events[2] == ("fsync", two, three)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_write_that_fails_deletes_no_step_and_leaves_nothing(tmp_path, monkeypatch, name):
    record(tmp_path, [1], keep=1)
    monkeypatch.setattr(os, name, Mock(side_effect=OSError(28, "no space for the test")))
    with RecordWriter(tmp_path, keep=1) as writer, pytest.raises(OSError, match="no space"):
        writer.write(2, batch(2))
    assert sorted(os.listdir(tmp_path)) == ["lock", "step-0000000001.jag"]


def test_a_record_has_one_writer(tmp_path):
    writer = RecordWriter(tmp_path)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="expected a record that no writer has") as caught:
            RecordWriter(tmp_path)
        assert caught.value.reason == "busy"
    code = "import sys; from jagcodec.record import RecordWriter; RecordWriter(sys.argv[1])"
    said = run_python(code, tmp_path, status=1).stderr
    assert "expected a record that no writer has open" in said
    writer.write(1, batch(1))
    writer.close()
    writer.close()
    for write in (lambda: writer.write(2, batch(2)), lambda: writer.rewind(0)):
        with pytest.raises(ArgumentError, match="found a closed one"):
            write()
    with pytest.warns(ResourceWarning, match="lock"):
        RecordWriter(tmp_path)  # forgotten at once
    assert record(tmp_path, [2]).steps == (1, 2)


def killed_at_call(directory, number):
    """Write steps 2 and 3, and kill this process before its `number`-th system call."""
    made = itertools.count()

    def counted(real, *arguments, **options):
        if next(made) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    for name in ("open", "fsync", "replace", "unlink", "close", "listdir"):
        setattr(os, name, partial(counted, getattr(os, name)))
    pieces = partial(counted, bytes)
    patch("jagcodec.wire.files.blob_pieces", lambda x: map(pieces, blob_pieces(x))).start()
    record(directory, (2, 3), keep=2)


def forked(work, *arguments):
    """How a process ends that is forked from this one."""
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            work(*arguments)
            code = 0
        os._exit(code)
    return os.waitpid(child, 0)[1]


def write_in_processes(directory):
    """Writers are killed at every call that they make, each in a directory of its own."""
    torch.set_num_threads(1)
    for number in itertools.count():
        record(f"{directory}/{number}", (0, 1), keep=2)
        status = forked(killed_at_call, f"{directory}/{number}", number)
        if not os.WIFSIGNALED(status):
            assert status == 0, status
            break

    # A process that is forked from a writer's cannot write, and does not let go of the record.
    with RecordWriter(f"{directory}/forked") as writer:

        def work():
            with pytest.raises(ArgumentError, match="forked"):
                writer.write(0, batch(0))
            writer.close()

        assert forked(work) == 0
        with pytest.raises(ArgumentError, match="no writer has open"):
            RecordWriter(f"{directory}/forked")
        writer.write(0, batch(0))


def test_a_writer_killed_at_any_call_loses_the_open_step_at_most(tmp_path):
    code = "import sys; from tests import test_record; test_record.write_in_processes(sys.argv[1])"
    run_python(code, tmp_path, cwd=ROOT)
    places = len(os.listdir(tmp_path)) - 1
    assert places > 20
    seen, leftovers = [], 0
    for place in range(places):
        directory = tmp_path / str(place)
        reader = RecordReader(directory)
        # One after another, and never fewer than are kept.
        assert reader.steps in {(0, 1), (0, 1, 2), (1, 2), (1, 2, 3), (2, 3)}
        for step in reader.steps:
            opened = open_wire(reader.file(step))
            assert opened.meta == {"step": step}
            assert step_of(opened.to_tensordict()) == step
        seen.append(reader.steps[-1])
        leftovers += any(name.endswith(".part") for name in os.listdir(directory))
        # The lock went with its process, and the next writer goes on, and cleans up.
        assert record(directory, [4], keep=2).steps == (seen[-1], 4)
        assert len(os.listdir(directory)) == 3
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3}
    assert leftovers > 5


def test_readers_read_while_steps_are_written_and_deleted(tmp_path):
    reader = RecordReader(tmp_path)
    thread = threading.Thread(target=record, args=(tmp_path, range(60)), kwargs={"keep": 2})
    thread.start()
    while thread.is_alive():
        steps = reader.steps
        assert steps == tuple(range(steps[0], steps[-1] + 1)) if steps else True
        for step in steps:
            with suppress(FileNotFoundError):
                assert step_of(load(reader.file(step))) == step
                opened = open_wire(reader.file(step))
                assert opened.rows([2])["ids"].values().tolist() == [step] * 3
    thread.join()
    assert reader.steps == (58, 59)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((-1, batch(0)), {}, ArgumentError, r"write\(step\): expected 0 or more"),
        ((2**63, batch(0)), {}, ArgumentError, r"write\(step\): expected less than 2\*\*63"),
        ((0, {"x": torch.ones(2)}), {}, ArgumentTypeError, "expected a TensorDict .* found dict"),
        ((0, TensorDict({}, [])), {}, ArgumentTypeError, "expected a TensorDict with a batch dim"),
        ((0, encode([1])), {}, ArgumentTypeError, "found the frames of a message; pass open_wire"),
        ((0, b"blob"), {}, ArgumentTypeError, r"\(open_wire\), found bytes"),
        ((0, batch(0)), {"meta": [1]}, ArgumentTypeError, "meta"),
        ((0, batch(0)), {"meta": {"own": print}}, UnsupportedTypeError, "builtin"),
    ],
)
def test_what_cannot_be_written(tmp_path, arguments, options, error, text):
    with RecordWriter(tmp_path) as writer:
        with pytest.raises(error, match=text):
            writer.write(*arguments, **options)
        assert os.listdir(tmp_path) == ["lock"]
        writer.write(0, batch(0), meta={"own": print}, allow_pickle=True)


def test_what_is_not_a_record(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    keep: Any
    for keep, text in ((0, "found 0"), (-(10**5000), "an int of 16610 bits")):
        with pytest.raises(ArgumentError, match=rf"RecordWriter\(keep\): .*1 or more.*{text}"):
            RecordWriter(tmp_path, keep=keep)
    for open_record in (RecordWriter, RecordReader):
        with pytest.raises(ArgumentTypeError, match=rf"{open_record.__name__}\(directory\)"):
            open_record(3)  # type: ignore[arg-type]
        with pytest.raises(NotADirectoryError):
            open_record(tmp_path / "file")
        for nowhere in (tmp_path / "no" / "parent", ""):
            with pytest.raises(FileNotFoundError):
                open_record(nowhere)
    reader: Any = record(tmp_path / "record", [0])
    for step in ("0", 1 << 63, 10**300, 10**5000):  # some would be names that no file can have
        expected = "less than 2" if isinstance(step, int) else "0 or more"
        with pytest.raises(ArgumentError, match=rf"file\(step\): expected {expected}"):
            reader.file(step)


def test_directories_under_names_of_the_record_stop_no_other_step(tmp_path):
    names = [".step-0000000002.part", ".0123456789abcdef.part", "step-0000000000.jag"]
    for name in names:
        (tmp_path / name).mkdir()
    with RecordWriter(tmp_path, keep=1) as writer:
        with pytest.raises(ArgumentError, match="regular file"):
            writer.write(0, batch(0))
        for step in (2, 3):
            writer.write(step, make_batch())
    assert RecordReader(tmp_path).steps == (3,)
    assert all((tmp_path / name).is_dir() for name in names)
