"""Records: whole steps or none, whenever their writer is killed; read by range, and verified."""

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    Limits,
    UnsupportedTypeError,
    WireFormatError,
    dump,
    encode,
    load,
    open_wire,
    pack_rows,
)
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.record import RecordReader, RecordWriter
from tests.helpers import make_batch
from tests.oracle import assert_same
from tests.strategies import tensordicts


def batch(step):
    """A batch that says of which step it is, in every cell."""
    return pack_rows([{"ids": [step] * n, "reward": float(step)} for n in (1, 0, 3)])


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


# --- what is written is what is read -----------------------------------------------------------


@settings(max_examples=20)
@given(tensordicts())
def test_any_batch_comes_back(tmp_path_factory, td):
    directory = tmp_path_factory.mktemp("record")
    with RecordWriter(directory) as writer:
        writer.write(0, td)
    reader = RecordReader(directory)
    assert_same(reader.read(0), td)
    assert_same(reader.open(0).to_tensordict(), td)
    shutil.rmtree(directory)


def test_every_form_of_a_batch(tmp_path):
    td = make_batch()
    opened = open_wire(encode(td, narrow=True, meta={"model": 3}))
    forms = {
        "td": td,
        "open": opened,
        "rows": opened.rows(slice(0, 6)),
        "beside": {"batch": td, "step": 4},
        "dict": BatchedDataDict({"x": torch.ones(6, 2)}, meta_info={"a": 1}),
    }
    with RecordWriter(tmp_path) as writer:
        for step, form in enumerate(forms.values()):
            writer.write(step, form)
        writer.write(9, opened, meta={"model": 4})
    reader = RecordReader(tmp_path)
    assert_same(reader.read(0), td)
    for step in (1, 2, 9):
        assert_same(reader.read(step), td)
        assert reader.open(step).meta == {"model": 4 if step == 9 else 3}
    assert_same(reader.read(3), forms["beside"])
    assert reader.open(3).meta == {"step": 4}
    assert reader.read(4)["x"].tolist() == torch.ones(6, 2).tolist()
    assert reader.open(4).meta == {"a": 1}


def test_the_file_of_a_step_is_what_dump_writes(tmp_path):
    reader = record(tmp_path, [42])
    dump(batch(42), tmp_path / "dumped", checksum=True, meta={"step": 42})
    path = path_of(tmp_path, 42)
    assert path.read_bytes() == (tmp_path / "dumped").read_bytes()
    assert step_of(load(path)) == 42
    assert step_of(open_wire(path).to_tensordict()) == 42
    assert reader.open(42).meta == {"step": 42}
    assert sorted(os.listdir(tmp_path)) == ["dumped", "lock", "step-0000000042.jag"]


def test_steps_are_the_files_of_that_name(tmp_path):
    reader = record(tmp_path / "new", [3, 10, 2**63 - 1])
    assert reader.steps == (3, 10, 2**63 - 1)
    for name in ("step-3.jag", "step-00000000003.jag", "x.jag", "step-0000000004.jag.tmp"):
        (tmp_path / "new" / name).write_bytes(b"")
    assert reader.steps == (3, 10, 2**63 - 1)


def test_only_what_is_asked_for_is_read(tmp_path):
    """Proved by bytes: all others are damaged, and no reader that does not want them notices."""
    rows = [{f"c{i}": list(range(10 * n, 11 * n)) for i in range(4)} for n in range(100)]
    with RecordWriter(tmp_path) as writer:
        writer.write(0, pack_rows(rows))
    path = path_of(tmp_path, 0)
    data = path.read_bytes()
    asked = []

    def fetch(offset, size):
        asked.append((offset, size))
        return data[offset : offset + size]

    expected = open_wire(fetch).select(["c3"]).rows(slice(20, 30)).to_tensordict()
    keep = bytearray(len(data))
    for offset, size in asked:
        keep[offset : offset + size] = data[offset : offset + size]
    assert sum(map(bool, keep)) < len(data) / 10
    path.write_bytes(keep)
    reader = RecordReader(tmp_path)
    assert_same(reader.open(0).select(["c3"]).rows(slice(20, 30)).to_tensordict(), expected)
    with pytest.raises(WireFormatError) as caught:
        reader.read(0)
    assert caught.value.reason == "bad_checksum"


def test_options_of_encode(tmp_path):
    td = pack_rows([{"ids": list(range(1000))}, {"ids": list(range(1000))}])
    with RecordWriter(tmp_path) as writer:
        writer.write(0, td)
        writer.write(1, td, narrow=True, elide=True, meta={"run": "a"})
    sizes = [path_of(tmp_path, step).stat().st_size for step in (0, 1)]
    assert sizes[1] < sizes[0] / 4
    reader = RecordReader(tmp_path)
    assert_same(reader.read(1), td)
    assert reader.open(1).meta == {"run": "a"}
    # `open` compares the checksum of the header.
    data = bytearray(path_of(tmp_path, 1).read_bytes())
    data[data.index(b"ids")] = ord("x")
    path_of(tmp_path, 1).write_bytes(data)
    with pytest.raises(WireFormatError, match="step 1: header") as caught:
        reader.open(1)
    assert caught.value.reason == "bad_checksum"


def test_what_is_read_is_the_caller_s(tmp_path):
    reader = record(tmp_path)
    before = path_of(tmp_path, 1).read_bytes()
    td, opened = reader.read(1), reader.open(1)
    td["reward"].fill_(9)
    opened["reward"].fill_(9)
    assert path_of(tmp_path, 1).read_bytes() == before
    assert step_of(reader.read(1)) == 1


# --- which steps there are ---------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path):
    reader = record(tmp_path, range(7), keep=3)
    assert reader.steps == (4, 5, 6)
    assert [step_of(reader.read(step)) for step in reader.steps] == [4, 5, 6]
    # Fewer, or all, from the next writer's first step on.
    with RecordWriter(tmp_path, keep=1) as writer:
        assert reader.steps == (4, 5, 6)
        writer.write(7, batch(7))
        assert reader.steps == (7,)
    assert record(tmp_path, range(8, 12)).steps == (7, 8, 9, 10, 11)


def test_steps_rise_and_none_is_replaced(tmp_path):
    reader = record(tmp_path, [5])
    before = path_of(tmp_path, 5).read_bytes()
    with RecordWriter(tmp_path) as writer:
        for step in (5, 4, 0):
            with pytest.raises(ArgumentError, match=f"above 5.*found {step}; rewind") as caught:
                writer.write(step, batch(0))
            assert caught.value.reason == "conflict"
        writer.write(np.int64(6), batch(6))  # type: ignore[arg-type]
    assert reader.steps == (5, 6)
    assert path_of(tmp_path, 5).read_bytes() == before


def test_a_run_that_goes_on_from_a_checkpoint_rewinds(tmp_path):
    reader = record(tmp_path, range(10), keep=5)
    with RecordWriter(tmp_path, keep=5) as writer:
        writer.rewind(7)
        assert reader.steps == (5, 6)
        writer.write(7, batch(70))
        writer.rewind(100)
        assert reader.steps == (5, 6, 7)
        assert step_of(reader.read(7)) == 70
        writer.rewind(0)
        assert reader.steps == ()


def test_a_step_that_is_not_there(tmp_path):
    reader = record(tmp_path, range(5), keep=2)
    for look in (reader.read, reader.open):
        with pytest.raises(ArgumentKeyError, match="expected one of 2 from 3 to 4, found 1") as e:
            look(1)
        assert e.value.reason == "no_such_key"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentKeyError, match="expected a step, found 1"):
        RecordReader(tmp_path / "empty").read(1)


@pytest.mark.parametrize("step", [1 << 63, 10**300, 10**5000], ids=int.bit_length)
def test_a_number_that_no_step_has(tmp_path, step):
    """Some would be names that no file can have."""
    with pytest.raises(ArgumentError, match=r"read\(step\): expected less than 2\*\*63"):
        record(tmp_path, [0]).read(step)


def test_a_record_stays_where_it_is_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    """Another directory may have a record of this name, whose lock this writer does not hold."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "steps").mkdir(parents=True)
    monkeypatch.chdir(here)
    with RecordWriter("steps") as writer:
        reader = RecordReader("steps")
        monkeypatch.chdir(there)
        writer.write(0, batch(0))
        assert reader.steps == (0,)
    assert os.listdir(there / "steps") == []


def test_what_is_open_stays_when_its_step_is_deleted(tmp_path):
    reader = record(tmp_path, range(2), keep=2)
    opened, whole = reader.open(0), reader.read(0)
    record(tmp_path, range(2, 9), keep=2)
    assert 0 not in reader.steps
    assert step_of(opened.to_tensordict()) == 0
    assert step_of(whole) == 0


# --- durable, and one writer -------------------------------------------------------------------


def part_of(path):
    """The name of a file; of one that is being written, its ending."""
    name = os.path.basename(path)
    return ".part" if re.fullmatch(r"\.[0-9a-f]{16}\.part", name) else name


def test_nothing_is_deleted_before_what_is_newer_is_on_the_disk(tmp_path, monkeypatch):
    events: list[tuple[str, ...]] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def note_fsync(descriptor):
        fsync(descriptor)
        there = [".", *os.listdir(tmp_path)]
        synced = os.fstat(descriptor)
        (name,) = (x for x in there if os.path.samestat(os.stat(tmp_path / x), synced))
        events.append(("sync", part_of(name)))

    def note_replace(old, new):
        replace(old, new)
        events.append(("rename", part_of(old), part_of(new)))

    def note_unlink(path):
        unlink(path)
        events.append(("delete", os.path.basename(path)))

    with RecordWriter(tmp_path, keep=1) as writer:
        writer.write(1, batch(1))
        monkeypatch.setattr(os, "fsync", note_fsync)
        monkeypatch.setattr(os, "replace", note_replace)
        monkeypatch.setattr(os, "unlink", note_unlink)
        writer.write(2, batch(2))
    assert events == [
        ("sync", ".part"),
        ("rename", ".part", "step-0000000002.jag"),
        ("sync", "."),
        ("delete", "step-0000000001.jag"),
    ]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_write_that_fails_deletes_no_step_and_leaves_nothing(tmp_path, monkeypatch, name):
    reader = record(tmp_path, [1], keep=1)

    def refuse(*args):
        raise OSError(28, "no space for the test")

    with RecordWriter(tmp_path, keep=1) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refuse)
            with pytest.raises(OSError, match="no space"):
                writer.write(2, batch(2))
        assert sorted(os.listdir(tmp_path)) == ["lock", "step-0000000001.jag"]
        writer.write(2, batch(2))
    assert reader.steps == (2,)


def test_a_record_has_one_writer(tmp_path):
    writer = RecordWriter(tmp_path)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="expected a record that no writer has") as caught:
            RecordWriter(tmp_path)
        assert caught.value.reason == "busy"
    code = "import sys; from jagcodec.record import RecordWriter; RecordWriter(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "expected a record that no writer has open" in run.stderr
    writer.write(1, batch(1))
    writer.close()
    writer.close()
    with pytest.raises(ArgumentError, match="found a closed one"):
        writer.write(2, batch(2))
    with pytest.raises(ArgumentError, match="found a closed one"):
        writer.rewind(0)
    assert record(tmp_path, [2]).steps == (1, 2)


def test_a_writer_that_is_forgotten_lets_go(tmp_path):
    writer: RecordWriter | None = RecordWriter(tmp_path)
    assert writer is not None
    with pytest.warns(ResourceWarning, match="lock"):
        writer = None
    gc.collect()
    RecordWriter(tmp_path).close()


# --- killed ------------------------------------------------------------------------------------

# Forks writers that kill themselves before their n-th call of the system, for every n there is.
KILLED_AT_EVERY_CALL = """
import os, signal, sys, torch
torch.set_num_threads(1)
from jagcodec import ArgumentError, pack_rows
from jagcodec.record import RecordWriter
from jagcodec.wire import files

directory, batch = sys.argv[1], pack_rows([{"ids": list(range(9000))}, {"ids": []}])


def write(place, calls):
    # Steps 0 and 1 are there. Kills this process before call number `calls`; else says how many.
    made = 0

    def counted(real):
        def call(*args, **options):
            nonlocal made
            if made == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            made += 1
            return real(*args, **options)

        return call

    for name in ("open", "fsync", "replace", "unlink", "close", "listdir"):
        setattr(os, name, counted(getattr(os, name)))
    pieces = files.blob_pieces
    files.blob_pieces = lambda frames: map(counted(bytes), pieces(frames))
    with RecordWriter(place, keep=2) as writer:
        writer.write(2, batch, meta={"n": 2})
        writer.write(3, batch, meta={"n": 3})
    return made


def forked(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


places = 0
while True:
    place = f"{directory}/{places}"
    with RecordWriter(place, keep=2) as writer:
        for step in (0, 1):
            writer.write(step, batch, meta={"n": step})
    places += 1
    status = forked(lambda: write(place, places - 1) and 0)
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0, status
        break

# A process that is forked from a writer's cannot write, and does not let go of the record.
with RecordWriter(f"{directory}/forked") as writer:

    def work():
        try:
            writer.write(0, batch)
        except ArgumentError as error:
            writer.close()
            return 7 if "forked" in str(error) else 8

    assert os.WEXITSTATUS(forked(work)) == 7
    try:
        RecordWriter(f"{directory}/forked")
        raise SystemExit("the record has two writers")
    except ArgumentError:
        writer.write(0, batch)
print(places)
"""


def test_a_writer_killed_at_any_call_loses_the_open_step_at_most(tmp_path):
    command = [sys.executable, "-c", KILLED_AT_EVERY_CALL, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    places = int(run.stdout)
    assert places > 20
    seen, leftovers = [], 0
    for place in range(places):
        directory = tmp_path / str(place)
        reader = RecordReader(directory)
        # One after another, and never fewer than are kept.
        assert reader.steps in {(0, 1), (0, 1, 2), (1, 2), (1, 2, 3), (2, 3)}
        for step in reader.steps:
            assert reader.open(step).meta == {"n": step}
            assert reader.read(step)["ids"].values().tolist() == list(range(9000))
        seen.append(reader.steps[-1])
        leftovers += any(name.endswith(".part") for name in os.listdir(directory))
        # The lock went with its process, and the next writer goes on, and cleans up.
        assert record(directory, [4], keep=2).steps == (seen[-1], 4)
        assert len(os.listdir(directory)) == 3
    assert seen == sorted(seen)
    assert set(seen) == {1, 2, 3}
    assert leftovers > 5


WRITES_FOR_EVER = """
import itertools, sys
from jagcodec import pack_rows
from jagcodec.record import RecordWriter

with RecordWriter(sys.argv[1], keep=int(sys.argv[3])) as writer:
    for step in itertools.count(int(sys.argv[2])):
        ids = [[step] * n for n in (40_000, 0, 3)]
        writer.write(step, pack_rows([{"ids": row, "reward": float(step)} for row in ids]))
        print(step, flush=True)
"""


def written(directory, first, keep):
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(directory), str(first), str(keep)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_a_killed_writer_every_step_that_it_had_written_is_there(tmp_path):
    """A process that says which step it wrote, killed at moments that nobody chose."""
    chance, first = random.Random(3), 0
    for _ in range(2):
        with written(tmp_path, first, keep=50) as process:
            for _ in range(chance.randrange(1, 30)):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            said = [int(line) for line in process.stdout.read().split()]
        reader = RecordReader(tmp_path)
        last = reader.steps[-1]
        # The step that was being written may be whole, though its writer could not say so.
        assert not said or said[-1] <= last <= said[-1] + 1
        assert reader.steps == tuple(range(reader.steps[0], last + 1))
        assert len(reader.steps) <= 51
        for step in reader.steps:
            assert step_of(reader.read(step)) == step
        first = last + 1


def test_readers_read_while_steps_are_written_and_deleted(tmp_path):
    (tmp_path / "record").mkdir()
    reader = RecordReader(tmp_path / "record")
    reads = gone = 0
    with written(tmp_path / "record", 0, keep=2) as process:
        process.stdout.readline()
        while reads < 100 or not gone:
            steps = reader.steps
            assert steps == tuple(range(steps[0], steps[-1] + 1))
            for step in (steps[0], steps[-1]):
                try:
                    assert step_of(reader.read(step)) == step
                    opened = reader.open(step)
                    assert opened.rows([2])["ids"].values().tolist() == [step] * 3
                    reads += 1
                except ArgumentKeyError:
                    gone += 1
        process.kill()


# --- damage ------------------------------------------------------------------------------------


def test_damage_of_a_step_is_found_and_the_step_named(tmp_path):
    reader = record(tmp_path, [0])
    path = path_of(tmp_path, 0)
    data = path.read_bytes()
    for place in range(24, len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert_same(reader.read(0), batch(0))  # a gap between frames
        except WireFormatError as error:
            assert str(error).startswith("step 0: ")  # noqa: PT017
    for end in range(len(data)):
        path.write_bytes(data[:end])
        for look in (reader.read, reader.open):
            with pytest.raises(WireFormatError, match="step 0: "):
                look(0)


def test_limits_hold_for_every_step(tmp_path):
    record(tmp_path, [0])
    reader = RecordReader(tmp_path, limits=Limits(objects=1))
    for look in (reader.open, reader.read):
        with pytest.raises(WireFormatError) as caught:
            look(0)
        assert caught.value.reason == "too_large"


def test_readers_unpickle_nothing(tmp_path):
    td = TensorDict({"x": torch.ones(1)}, [1]).set_non_tensor("own", print)
    with RecordWriter(tmp_path) as writer:
        with pytest.raises(UnsupportedTypeError):
            writer.write(0, td)
        writer.write(0, td, allow_pickle=True)
    with pytest.raises(WireFormatError) as caught:
        RecordReader(tmp_path).read(0)
    assert caught.value.reason == "pickle_refused"


# --- mistakes of the caller --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((-1, batch(0)), {}, ArgumentError, r"write\(step\): expected 0 or more"),
        (("1", batch(0)), {}, ArgumentError, r"write\(step\): expected 0 or more"),
        ((2**63, batch(0)), {}, ArgumentError, r"write\(step\): expected less than 2\*\*63"),
        ((0, {"x": torch.ones(2)}), {}, ArgumentTypeError, "expected a TensorDict .* found dict;"),
        ((0, None), {}, ArgumentTypeError, "found NoneType; pack_rows"),
        ((0, TensorDict({}, [])), {}, ArgumentTypeError, "expected a TensorDict with a batch dim"),
        ((0, encode([1])), {}, ArgumentTypeError, "found list; .* open_wire opens a message"),
        ((0, b"blob"), {}, ArgumentTypeError, "found bytes; .* open_wire opens a message"),
        ((0, batch(0)), {"meta": [1]}, ArgumentTypeError, "meta"),
    ],
)
def test_what_cannot_be_written(tmp_path, arguments, options, error, text):
    with RecordWriter(tmp_path) as writer:
        with pytest.raises(error, match=text):
            writer.write(*arguments, **options)
        assert os.listdir(tmp_path) == ["lock"]
        writer.write(0, batch(0))


def test_what_is_no_record(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArgumentTypeError, match=r"RecordWriter\(directory\)"):
        RecordWriter(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"RecordWriter\(keep\): expected 1 or more"):
        RecordWriter(tmp_path, keep=0)
    with pytest.raises(NotADirectoryError):
        RecordWriter(tmp_path / "file")
    for nowhere in (tmp_path / "no" / "parent", ""):
        with pytest.raises(FileNotFoundError):
            RecordWriter(nowhere)
    with pytest.raises(NotADirectoryError):
        RecordReader(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        RecordReader(tmp_path / "none")
    with pytest.raises(ArgumentTypeError, match=r"RecordReader\(limits\)"):
        RecordReader(tmp_path, limits=3)  # type: ignore[arg-type]
    reader = record(tmp_path / "record", [0])
    with pytest.raises(ArgumentError, match=r"RecordReader.read\(device\)"):
        reader.read(0, device="nowhere")
    with pytest.raises(ArgumentError, match=r"RecordReader.read\(step\): expected 0 or more"):
        reader.read("0")


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


def test_a_number_of_many_digits_is_named_by_its_size(tmp_path):
    with pytest.raises(ArgumentError, match="an int of 16610 bits"):
        RecordWriter(tmp_path, keep=-(10**5000))
