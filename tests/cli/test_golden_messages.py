"""Every golden message is described, verified and compared: no kind of value stops a command."""

import json
import subprocess
import sys

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec import WireFormatError, cli, dump, encode, to_blob
from jagcodec.batch.describe import check_message, describe_message, open_source
from jagcodec.cli.text import size_text
from tests.wire import cases
from tests.wire.test_golden import NAMES, Point, kept, load, message_of


def golden(name):
    return message_of(kept(name))


def described(source):
    return describe_message(open_source(source, "message"))


@pytest.fixture
def run(capsys):
    """(arguments) -> exit status, standard output, standard error."""

    def run(*arguments):
        status = cli.main([*map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def stored(tmp_path):
    """(name) -> the file of a golden message."""

    def stored(name):
        path = tmp_path / f"{name}.jag"
        path.write_bytes(to_blob(golden(name)))
        return path

    return stored


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_message_is_described_and_sound(name, run, stored):
    path = stored(name)
    status, out, err = run("inspect", path)
    assert (status, err) == (0, "")
    assert f"{size_text(path.stat().st_size)} in" in out
    status, out, err = run("inspect", path, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["bytes"] == path.stat().st_size
    assert found["checksum"] == ("checksum" in kept(name)["options"])
    entries = found["columns"]
    # All bytes belong to a column, or to none.
    assert sum(entry["bytes"] for entry in entries) + found["overhead"] == found["plain_bytes"]
    assert found["overhead"] > 0
    for entry in entries:
        if entry["rows"] is not None:
            assert entry["name"] in found["rows_of"][entry["rows"]]["columns"]
    status, out, err = run("verify", path)
    assert (status, err) == (0, "")
    assert ("not read" in out) == (name == "pickle")
    status, out, err = run("verify", path, "--json")
    assert (status, json.loads(out)[0]["sound"]) == (0, True)


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_message_is_the_same_as_itself_and_as_no_other(name, run, stored):
    path = stored(name)
    other = stored("small_batch" if name != "small_batch" else "rollout")
    if name == "pickle":  # whose value cannot be looked at
        for left in (path, other):
            status, out, err = run("diff", left, path)
            assert (status, out) == (2, "")
            assert "pickle" in err
        return
    assert run("diff", path, path) == (0, "", "")
    status, out, err = run("diff", other, path)
    assert (status, out.count("\n"), err) == (1, 1, "")
    status, out, _ = run("diff", other, path, "--json")
    assert (status, json.loads(out)["same"]) == (1, False)
    status, out, err = run("inspect", path, "--row", "0")
    if status == 2:  # a value that is not a batch of rows
        assert "expected the message of a TensorDict" in err or "expected batch size" in err
        return
    assert (status, out[:6], err) == (0, "row 0\n", "")
    status, out, _ = run("inspect", path, "--row", "0", "--json")
    assert (status, json.loads(out)["row"]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("lazy_stack", ("$", "lazy_stack", None, None, 24)),
        ("tensor_views", ("$", "tensor_views", "int16", (3, None, 2), 60)),
        ("strided_nested", ("$", "strided_nested", "float32", None, 48)),
    ],
)
def test_rows_that_are_separate_tensors_are_one_value(name, column):
    (found,) = described(golden(name)).columns
    assert (found.name, found.kind, found.dtype, found.shape, found.bytes) == column


def test_the_bytes_of_a_list_are_those_of_its_items():
    ids = torch.ones(2, 3)
    (found,) = described(encode({"mixed": [ids, ids.int(), 1]})).columns
    assert (found.name, found.kind, found.bytes) == ("$.mixed", "list", 24 + 24 + 1)


@pytest.mark.parametrize("name", [*cases.GOOD])
def test_good_messages_are_described_and_sound(name):
    message = message_of(load("good.json")[name])
    found = described(message)
    assert sum(c.bytes for c in found.columns) + found.overhead > 0
    assert check_message(message)[1] == {}


@pytest.mark.parametrize("name", [*cases.BAD])
def test_bad_messages_are_not_sound_for_the_reason_that_decode_gives(name):
    entry = load("bad.json")[name]
    message = message_of(entry)
    if entry["reason"] in ("unknown_type", "pickle_refused"):
        # What this process does not know says nothing of the message.
        assert check_message(message)[1]
        return
    with pytest.raises(WireFormatError) as raised:
        check_message(message)
    assert raised.value.reason == entry["reason"]


def test_messages_with_the_same_values_stored_otherwise_are_the_same(run, stored):
    assert run("diff", stored("rollout"), stored("rollout_narrow")) == (0, "", "")


def test_types_that_are_not_registered_are_named_and_the_rest_described(stored, tmp_path):
    """In another process, because this one knows the type."""
    path, other, batch = stored("user"), stored("rollout"), tmp_path / "batch.jag"
    points = NonTensorStack(Point(1, 2), Point(3, 4))
    dump(TensorDict({"ids": torch.arange(2), "points": points}, [2]), batch)
    code = """
import sys
from jagcodec.cli import main
path, other, batch = sys.argv[1:]
for command in (
    ["inspect", path],
    ["inspect", batch, "--row", "1"],
    ["inspect", batch, "--row", "1", "--json"],
    ["verify", path, other],
    ["diff", batch, batch, "--columns", "ids"],
):
    assert main(command) == 0, command
assert main(["diff", batch, batch]) == 2
"""
    command = [sys.executable, "-c", code, str(path), str(other), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ids     1\npoints  unknown: " in done.stdout
    assert '"unknown": "' in done.stdout
    assert "golden.Point" in done.stdout
    assert "2 values of types that are not known here" in done.stdout
    assert "points" in done.stderr
