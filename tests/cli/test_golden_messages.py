"""Every golden message is described, verified and compared: no kind of value stops a command."""

import json
import subprocess
import sys

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from jagcodec import WireFormatError, cli, encode, to_blob
from jagcodec.wire.description import check_message, describe_message
from tests.wire import corpus
from tests.wire.test_golden import NAMES, load, message_of


def golden(name):
    return message_of(load(f"{name}.json"))


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
def test_every_golden_message_is_described(name, run, stored):
    path = stored(name)
    status, out, err = run("inspect", path)
    assert (status, err) == (0, "")
    assert f"{path.stat().st_size:,} B in" in out
    status, out, err = run("inspect", path, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["bytes"] == path.stat().st_size
    assert found["checksum"] == ("checksum" in load(f"{name}.json")["options"])
    entries = found["columns"] + found["beside"]
    # All bytes belong to a column, or to none.
    assert sum(entry["bytes"] for entry in entries) + found["overhead"] == found["plain_bytes"]
    assert found["overhead"] > 0
    for entry in entries:
        if entry["rows"] is not None:
            rows = found["rows_of"][entry["rows"]]
            assert entry["name"] in rows["columns"]
            assert sum(count for *_, count in rows["histogram"]) == rows["rows"]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("lazy_stack", ("a", "list", "int64", (2, None), 24, 1, 16)),
        ("tensor_views", ("$", "tensor_views", "int16", (3, None, 2), 60, 0, 8)),
        ("strided_nested", ("$", "strided_nested", "float32", (2, None, None), 48, 0, 8)),
    ],
)
def test_rows_that_are_tensors_of_their_own_are_columns(name, column):
    """Which column, which row, how many bytes: where rows are not in one jagged tensor too."""
    (found,) = describe_message(golden(name)).columns
    place = found.largest_row, found.largest_row_bytes
    assert (found.name, found.kind, found.dtype, found.shape, found.bytes, *place) == column


def test_lists_of_tensors_have_a_dtype_and_a_shape():
    ids, wide = torch.ones(2, 3), torch.ones(4, 3)
    values = {"alike": [ids, ids + 1], "long": [ids, wide], "mixed": [ids, ids.int(), 1], "no": []}
    columns = {c.name: c for c in describe_message(encode(values)).columns}
    assert (columns["$.alike"].dtype, columns["$.alike"].shape) == ("float32", (2, 2, 3))
    assert (columns["$.long"].shape, columns["$.long"].largest_row) == ((2, None, 3), 1)
    assert (columns["$.mixed"].dtype, columns["$.mixed"].shape) == (None, None)
    assert columns["$.mixed"].bytes == 24 + 24 + 1


def test_stacks_whose_rows_have_other_columns_are_described_as_one_value():
    rows = [TensorDict({name: torch.ones(2)}, []) for name in "ab"]
    for stack in (
        LazyStackedTensorDict(*rows, stack_dim=0),
        LazyStackedTensorDict(*(TensorDict({}, [3]) for _ in rows), stack_dim=1),
    ):
        (found,) = describe_message(encode(stack)).columns
        assert (found.name, found.kind) == ("$", "lazy_stack")


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_message_is_sound(name, run, stored):
    status, out, err = run("verify", stored(name))
    assert (status, err) == (0, "")
    assert ("not read" in out) == (name == "pickle")
    status, out, err = run("verify", stored(name), "--json")
    assert status == 0
    assert json.loads(out)[0]["sound"]


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_message_is_the_same_as_itself_and_as_no_other(name, run, stored):
    path = stored(name)
    assert run("diff", path, path) == (0, "", "")
    other = "small_batch" if name != "small_batch" else "rollout"
    status, out, err = run("diff", stored(other), path)
    if name == "pickle":  # whose value cannot be looked at
        assert status == 2
        assert "pickle" in err
        return
    assert (status, err) == (1, "")
    assert out.count("\n") == 1
    status, out, _ = run("diff", stored(other), path, "--json")
    assert status == 1
    assert json.loads(out)["same"] is False


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_every_golden_message(name, run, stored):
    status, out, err = run("inspect", stored(name), "--row", "0")
    if status == 2:  # there is no row 0 in a value without rows
        assert "expected no row, for there is none, found 0" in err
        return
    assert (status, err) == (0, "")
    assert out.startswith("row 0\n")
    status, out, _ = run("inspect", stored(name), "--row", "0", "--json")
    assert status == 0
    assert json.loads(out)["row"] == 0


@pytest.mark.parametrize("name", [*corpus.GOOD])
def test_good_messages_are_described_and_sound(name):
    message = message_of(load("good.json")[name])
    found = describe_message(message)
    assert sum(c.bytes for c in (*found.columns, *found.beside)) + found.overhead > 0
    assert check_message(message)[1] == {}


@pytest.mark.parametrize("name", [*corpus.BAD])
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


def test_types_that_are_not_registered_are_named_and_the_rest_described(stored):
    """In a process of its own: here the type is known."""
    path, other = stored("user"), stored("rollout")
    code = """
import sys
from jagcodec.cli import main
path, other = sys.argv[1:]
for command in (["inspect", path, "--row", "0"], ["verify", path, other], ["diff", path, path]):
    assert main(command) == 0, command
"""
    command = [sys.executable, "-c", code, str(path), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "unknown: " in done.stdout
    assert "golden.Point" in done.stdout
    assert "2 values of types that are not known here" in done.stdout
