"""Replays what the fuzzer found, without the fuzzer: see `fuzz/target.py`."""

import importlib
import subprocess
import sys
import tracemalloc

import pytest

from jagcodec import WireFormatError, decode
from tests.helpers import ROOT

FUZZ = ROOT / "fuzz"
CORPUS = sorted(path for path in (FUZZ / "corpus").iterdir() if path.is_file())

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer reads /proc"),
    # A message may name any dim and value; what torch and numpy think of them is no fault.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def target():
    sys.path.insert(0, str(FUZZ))
    try:
        return importlib.import_module("target")
    finally:
        sys.path.remove(str(FUZZ))


def test_every_input_gives_a_value_or_the_error(target, tmp_path):
    assert 100 <= len(CORPUS) <= 500
    run = target.Target(tmp_path / "blob")
    for path in CORPUS:
        try:
            run(path.read_bytes())
        except Exception as error:
            pytest.fail(f"python fuzz/target.py {path.relative_to(FUZZ.parent)}: {error!r}")
    # The replay means something only as long as the inputs reach what they reached when found.
    assert run.counts.past_header > len(CORPUS) / 2
    assert run.counts.values > len(CORPUS) / 8


def test_memory_is_in_proportion_to_the_message(target, tmp_path):
    run = target.Target(tmp_path / "blob")
    for path in CORPUS:
        message, reader, _ = run.message(target.Script(path.read_bytes()))
        whole = isinstance(message, (bytes, bytearray))
        size = len(message) if whole else sum(map(len, message))
        tracemalloc.start()
        try:
            reader(message)
        except WireFormatError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= 64 * size + (1 << 20), path


def test_every_seed_is_a_message(target):
    refused = []
    for seed in target.SEEDS:
        try:
            target.touch(decode(seed.frames))
        except WireFormatError as error:
            refused.append(error.reason)
    assert refused == ["pickle_refused"]


def broken(frames):
    raise KeyError("not a WireFormatError")


def test_the_target_notices_another_error(target, tmp_path, monkeypatch):
    run = target.Target(tmp_path / "blob")
    monkeypatch.setattr(target, "decode", broken)
    with pytest.raises(KeyError):
        run(b"\0\0\0")
    with pytest.raises(target.BrokenPromiseError, match="says nothing"):
        target._check_error(WireFormatError("no such reason", "$", "x"))  # type: ignore[arg-type]


def test_the_target_notices_readers_that_differ(target, tmp_path, monkeypatch):
    run = target.Target(tmp_path / "blob")
    at = next(i for i, s in enumerate(target.SEEDS) if "reward" in str(s.draft.root))
    # A seed as it is, decoded and looked at closely.
    script = bytes([0, 224, at, 0])
    run(script)
    assert run.counts.values == 1

    class Other:
        def to_tensordict(self):
            return {}

    monkeypatch.setattr(target, "open_wire", lambda source: Other())
    with pytest.raises(target.BrokenPromiseError, match="read different values"):
        run(script)


def test_the_target_notices_memory(tmp_path):
    # In a process of its own: peaks of other tests would hide this one.
    code = (
        "import sys, target; run = target.Target(sys.argv[1]);"
        "target.decode = lambda frames: bytearray(target.MEMORY_BOUND * 4); run(b'\\0\\0\\0')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "blob"], cwd=FUZZ, capture_output=True, text=True
    )
    assert "MiB for an input of 3 bytes" in found.stderr
