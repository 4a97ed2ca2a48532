"""Replays what the fuzzer found, without the fuzzer: see `fuzz/target.py`."""

import importlib
import random
import re
import sys
import types
import zipfile
from unittest.mock import Mock

import pytest

from jagcodec import WireFormatError
from tests.helpers import ROOT, run_python
from tests.wire.readers import outcome, peak_of
from tests.wire.test_golden import kept, message_of

FUZZ = ROOT / "fuzz"
with zipfile.ZipFile(FUZZ / "corpus.zip") as archive:
    CORPUS = {name: archive.read(name) for name in archive.namelist()}

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
    run = target.Target(tmp_path / "blob")
    for name, data in CORPUS.items():
        try:
            run(data)
        except Exception as error:
            pytest.fail(f"{name} of fuzz/corpus.zip: {error!r}")
        message, reader, _ = run.message(data)
        assert peak_of(outcome, reader, message) <= 64 * len(data) + (1 << 20), name
    # The replay means something only as long as the inputs reach what they reached when found.
    assert len(CORPUS) > 300
    assert run.counts.past_header > len(CORPUS) / 2
    assert run.counts.values > len(CORPUS) / 4


def test_an_input_is_its_frames_and_is_mutated_to_others(target):
    rng, others = random.Random(0), set()
    for data in CORPUS.values():
        how, frames = target.frames_of(data)
        assert target.input_of(how, frames) == data
        for _ in range(3):
            seed = rng.randrange(1 << 32)
            others.add(target.mutated(data, 20_000, seed, lambda data, most: data[:-1]))
    assert len(others - {*CORPUS.values()}) > 2 * len(CORPUS)
    assert max(map(len, others)) <= 20_000


def test_the_target_notices_what_it_looks_for(target, tmp_path, monkeypatch):
    run = target.Target(tmp_path / "blob")
    looked_at_closely = target.input_of(224, message_of(kept("rollout")))
    run(looked_at_closely)
    assert (run.counts.inputs, run.counts.values) == (1, 1)
    other = types.SimpleNamespace(to_tensordict=dict)
    monkeypatch.setattr(target, "open_wire", lambda source: other)
    with pytest.raises(target.BrokenPromiseError, match="read different values"):
        run(looked_at_closely)

    monkeypatch.setattr(target, "decode", Mock(side_effect=KeyError("not a WireFormatError")))
    with pytest.raises(KeyError):
        run(b"\0\0\0")
    with pytest.raises(target.BrokenPromiseError, match="says nothing"):
        target._check_error(WireFormatError("no such reason", "$", "x"))  # type: ignore[arg-type]
    error = WireFormatError("bad_value", "$", "x")
    error.__cause__ = WireFormatError("bad_value", "$", "y")
    error.__cause__.__cause__ = error
    with pytest.raises(target.BrokenPromiseError, match="causes itself"):
        target._check_error(error)


def test_the_target_notices_memory(tmp_path):
    # In a process of its own: peaks of other tests would hide this one.
    code = (
        "import sys, target; run = target.Target(sys.argv[1]);"
        "target.decode = lambda frames: bytearray(target.MEMORY_BOUND * 4); run(b'\\0\\0\\0')"
    )
    found = run_python(code, tmp_path / "blob", cwd=FUZZ, status=1)
    assert re.search(r"BrokenPromiseError: \d+ MiB for an input of 3 bytes", found.stderr)
