"""The demo: that it verifies, and that it can fail."""

from __future__ import annotations

import ast
import copy
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from examples import grpo_demo
from examples.grpo_demo import batch as batch_module
from examples.grpo_demo import check as check_module
from examples.grpo_demo import run
from examples.grpo_demo.__main__ import main
from examples.grpo_demo.batch import (
    LOGPROBS,
    PAD_ID,
    PER_TOKEN,
    VOCABULARY,
    group_advantages,
    load_reference,
    make_batch,
    save_reference,
)
from examples.grpo_demo.check import MismatchError, check_columns, check_rows
from examples.grpo_demo.producer import produce
from examples.grpo_demo.report import Consumed, Produced, settle
from examples.grpo_demo.run import run_demo
from examples.grpo_demo.trainer import consume
from jagcodec import JagcodecError, WireFormatError, decode, encode
from jagcodec.data import rollout_table

DEMO = Path(grpo_demo.__file__).parent
CHECKOUT = DEMO.parent.parent
TABLE = rollout_table()
ROWS = 16
FIRST_LENGTH = int(TABLE.lengths[0])

Frames = list[Any]
Tamper = Callable[[Frames], Frames]


# --- the real thing, in real processes ---------------------------------------------------------


def cells_owed(rows: int, batches: int) -> int:
    """By hand, from the table: what the last line must count."""
    total = 0
    for first in range(0, rows * batches, rows):
        part = slice(first, first + rows)
        rectangle = rows * int(TABLE.lengths[part].max())
        responses = int(TABLE.responses[part].sum())
        # Six rectangles; sample_mask, input_lengths, rewards and message; three response
        # slices and the advantages written back.
        total += 6 * rectangle + 4 * rows + 4 * responses
    return total


@pytest.mark.slow
def test_demo_verifies_every_cell() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "examples.grpo_demo"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=CHECKOUT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert f"verified: {cells_owed(512, 2):,} cells" in lines[-1]
    assert sum(TABLE.source in line for line in lines) == 1
    for column in (*PER_TOKEN, "sample_mask", "input_lengths", "rewards", "message"):
        assert re.search(rf"^{column} .*%$", done.stdout, re.MULTILINE), column
    for stage in ("pack", "encode", "send + receive", "decode", "materialize", "write back"):
        assert re.search(rf"^{re.escape(stage)} +\d+\.\d\d +\d+\.\d\d$", done.stdout, re.MULTILINE)
    # What crossed the socket is what the tax says a message costs.
    total = re.search(r"^total +[\d,]+ +([\d,]+)", done.stdout, re.MULTILINE)
    assert total is not None
    assert f"measured at the socket: {total[1]} bytes" in done.stdout


class Tampering:
    """A socket whose messages are tampered with before they are sent."""

    def __init__(self, socket: Any, tamper: Tamper) -> None:
        self._socket = socket
        self._tamper = tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_multipart(self, frames: Frames, copy: bool) -> None:
        self._socket.send_multipart(self._tamper(frames), copy=copy)


def rewritten(change: Callable[[Any], None]) -> Tamper:
    """The same message with a value changed."""

    def tamper(frames: Frames) -> Frames:
        message = decode(frames, copy=True)
        change(message)
        return encode(message)

    return tamper


def raise_last_logprob(td: Any) -> None:
    td["prev_logprobs"].values()[-1] += 1


def produce_wrongly(socket: Any, directory: Path, rows: int, batches: int) -> list[Produced]:
    tampering: Any = Tampering(socket, rewritten(raise_last_logprob))
    return produce(tampering, directory, rows, batches)


def die(socket: Any, directory: Path, batches: int) -> None:
    os._exit(7)


def hang(socket: Any, directory: Path, batches: int) -> None:
    socket.send(b"ready")
    time.sleep(600)


@pytest.mark.slow
def test_a_wrong_cell_ends_the_command_with_its_column_and_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(functools.partial(run_demo, rows=ROWS, producer=produce_wrongly)) == 1
    captured = capsys.readouterr()
    last = int(TABLE.lengths[ROWS - 1]) - 1
    assert captured.err.startswith(
        f"grpo_demo: error: prev_logprobs, row {ROWS - 1}, token {last}: expected "
    )
    assert captured.err.count("\n") == 1
    assert "verified" not in captured.out


def test_the_command_without_pyzmq_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert main() == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("grpo_demo: error: ")
    assert "pip install 'jagcodec[zmq]'" in captured.err
    assert "verified" not in captured.out


def test_the_command_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    assert main(interrupted) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(JagcodecError, match=r"trainer process.* found exit status 7"):
        run_demo(rows=ROWS, trainer=die)


@pytest.mark.slow
def test_a_process_may_end_a_while_after_it_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other work it does."""
    monkeypatch.setattr(run, "_GRACE", 0.0)
    assert run_demo(rows=ROWS, batches=1).cells


def test_a_process_that_hangs_runs_into_the_time_out() -> None:
    with pytest.raises(JagcodecError, match=r"process: expected .* found none"):
        run_demo(rows=ROWS, trainer=hang, timeout=5)


# --- the same exchange within this process -----------------------------------------------------


class Line:
    """One end of a socket: hands out the messages it is given, keeps those sent."""

    type = zmq.PAIR

    def __init__(self, receive: Callable[[], Frames]) -> None:
        self._receive = receive
        self._parts: list[zmq.Frame] = []
        self.sent: list[Frames] = []

    def send(self, data: bytes) -> None:
        pass

    def recv(self, copy: bool = True) -> Any:
        if copy:
            return b"ready"
        if not self._parts:
            self._parts = [zmq.Frame(frame) for frame in self._receive()]
        return self._parts.pop(0)

    def getsockopt(self, option: int) -> int:
        assert option == zmq.RCVMORE
        return bool(self._parts)

    def send_multipart(self, frames: Any, copy: bool) -> None:
        self.sent.append([bytes(frame) for frame in frames])


def same(frames: Frames) -> Frames:
    return frames


def exchange(
    directory: Path, there: Tamper = same, back: Tamper = same
) -> tuple[list[Produced], list[Consumed]]:
    """One batch there and its advantages back, each tampered with on the way."""
    consumed: list[Consumed] = []

    def trainer() -> Frames:
        message = there(line.sent[-1])
        other_end: Any = Line(lambda: message)
        consumed.extend(consume(other_end, directory, 1))
        return back(other_end.sent[-1])

    line: Any = Line(trainer)
    return produce(line, directory, ROWS, 1), consumed


def test_the_exchange_settles(tmp_path: Path) -> None:
    result = settle(*exchange(tmp_path))
    assert result.cells == cells_owed(ROWS, 1)
    assert sum(result.frame_sizes) == result.last.wire_bytes
    assert f"verified: {result.cells:,} cells" in str(result)


def set_cell(name: str, cell: int, value: float) -> Callable[[Any], None]:
    def change(td: Any) -> None:
        column = td[name].values() if td[name].is_nested else td[name]
        column[cell] = value

    return change


def drop(td: Any) -> None:
    del td["reference_logprobs"]


def retype(td: Any) -> None:
    td["sample_mask"] = td["sample_mask"].double()


def untuple(td: Any) -> None:
    td.get("message").tensordicts[2].data["tags"] = ["gsm8k"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_cell("input_ids", 0, -1), r"^input_ids, row 0, token 0: expected \d+ .* found -1 "),
        (set_cell("advantages", FIRST_LENGTH, 9), r"^advantages, row 1, token 0: .* found 9\.0 "),
        (set_cell("generation_logprobs", -1, 0.0), r"^generation_logprobs, row 15, token"),
        (set_cell("rewards", 3, 0.5), r"^rewards, row 3: expected 1\.0 .* found 0\.5 "),
        (set_cell("input_lengths", 7, 1), r"^input_lengths, row 7: expected "),
        (drop, r"^columns: expected input_ids, .* found "),
        (retype, r"^sample_mask: expected dtype float32, found dtype float64"),
        (untuple, r"^message, row 2, \['tags'\]: expected a tuple, found a list"),
    ],
)
def test_the_trainer_finds_what_is_wrong(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    with pytest.raises(MismatchError, match=said):
        exchange(tmp_path, there=rewritten(change))


def test_the_trainer_finds_every_flipped_payload_bit(tmp_path: Path) -> None:
    """Some flipped bits break the message, others a cell or a padding byte; none passes as equal
    with a cell that differs."""
    (produced, _) = exchange(tmp_path)
    line: Any = Line(lambda: [b""])
    with pytest.raises(WireFormatError):
        produce(line, tmp_path, ROWS, 1)
    frames = line.sent[0]
    owed = {**produced[0].owed}
    rng = np.random.default_rng(0)
    outcomes = {"found": 0, "padding": 0}
    for _ in range(200):
        which = int(rng.integers(1, len(frames)))
        position = int(rng.integers(0, len(frames[which])))
        flipped = bytearray(frames[which])
        flipped[position] ^= 1 << int(rng.integers(0, 8))
        message = [*frames[:which], bytes(flipped), *frames[which + 1 :]]
        other_end: Any = Line(lambda message=message: message)  # type: ignore[misc]
        try:
            (consumed,) = consume(other_end, tmp_path, 1)
        except (MismatchError, WireFormatError):
            outcomes["found"] += 1
        else:
            # Only alignment padding, which is no part of any value, may differ unseen.
            assert flipped[position] in (1 << bit for bit in range(8))
            assert frames[which][position] == 0
            assert all(owed[name] == cells for name, cells in consumed.compared.items())
            outcomes["padding"] += 1
    assert outcomes["found"] > 150


@pytest.mark.parametrize("there", [True, False])
def test_a_message_that_is_cut_is_refused(tmp_path: Path, there: bool) -> None:
    def cut(frames: Frames) -> Frames:
        return [*frames[:-1], frames[-1][:-1]]

    with pytest.raises(WireFormatError):
        exchange(tmp_path, **{"there" if there else "back": cut})


def test_the_producer_finds_what_is_wrong(tmp_path: Path) -> None:
    def change(advantages: Any) -> None:
        advantages.values()[int(TABLE.responses[:2].sum())] += 1

    with pytest.raises(MismatchError, match=r"^advantages written back, row 2, token 0: "):
        exchange(tmp_path, back=rewritten(change))

    def shorter(frames: Frames) -> Frames:
        rows = list(decode(frames).unbind())
        return encode(torch.nested.as_nested_tensor(rows[:-1], layout=torch.jagged))

    with pytest.raises(MismatchError, match=r"expected 16 rows, found 15 rows"):
        exchange(tmp_path, back=shorter)


def test_what_was_not_compared_is_not_verified(tmp_path: Path) -> None:
    produced, consumed = exchange(tmp_path)
    (trainer,) = consumed
    for name, cells in trainer.compared.items():
        less = {key: value for key, value in trainer.compared.items() if key != name}
        for compared in (less, {**less, name: cells - 1}):
            with pytest.raises(MismatchError, match=rf"^{name}: expected {cells} cells"):
                settle(produced, [replace(trainer, compared=compared)])
    with pytest.raises(MismatchError, match="written back"):
        settle([replace(produced[0], compared={})], consumed)
    with pytest.raises(MismatchError, match=r"^batches: expected 1"):
        settle(produced, [])
    with pytest.raises(MismatchError):
        settle([], [])


# --- the comparison ----------------------------------------------------------------------------


def objects(*items: Any) -> Any:
    array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array


NAN = np.array([0x7FC00000], dtype=np.uint32).view(np.float32)
OTHER_NAN = np.array([0x7FC00001], dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("expected", "found", "said"),
    [
        (np.array([0.0]), np.array([-0.0]), r"c, row 0: expected 0\.0 .* found -0\.0"),
        (NAN, OTHER_NAN, r"0x7fc00000.*0x7fc00001"),
        (np.array([1, 2]), np.array([1, 2], dtype=np.int32), "dtype int64, found dtype int32"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "shape"),
        (np.array([1]), [1], "expected an array, found a list"),
        (objects(1), np.array([1]), "expected an object array"),
        (objects(1, 2), objects(1), "shape"),
        (objects(1), objects(True), "row 0: expected a int, found a bool"),
        (objects((1,)), objects([1]), "expected a tuple, found a list"),
        (objects(None), objects({}), "expected a NoneType, found a dict"),
        (objects({"a": 1, "b": 2}), objects({"b": 2, "a": 1}), r"the keys \['a', 'b'\]"),
        (objects({1: 0}), objects({True: 0}), r"the keys \[1\], found \[True\]"),
        (objects(0, {"a": [1, (2,)]}), objects(0, {"a": [1, (3,)]}), r"row 1, \['a'\]\[1\]\[0\]"),
        (objects([1]), objects([1, 2]), "1 items, found 2"),
        (objects(0.0), objects(-0.0), "expected 0.0, found -0.0"),
        (objects("é"), objects("e"), "row 0"),
    ],
)
def test_columns_that_differ(expected: Any, found: Any, said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        check_columns({"c": expected}, {"c": found})


def test_columns_that_are_equal() -> None:
    columns = {
        "nan": NAN,
        "wide": np.arange(6).reshape(2, 3),
        "none": np.empty((0, 3), dtype=np.int8),
        "objects": objects({"a": (1, [b"x", None])}, float("nan")),
    }
    counted = {"nan": 1, "wide": 6, "none": 0, "objects": 2}
    assert check_columns(columns, copy.deepcopy(columns)) == counted
    with pytest.raises(MismatchError, match="columns"):
        check_columns(columns, dict(reversed(columns.items())))


def test_rows_that_differ() -> None:
    rows = [np.array([1, 2]), np.array([], dtype=np.int64), np.array([3])]
    values = np.array([1, 2, 3])
    assert check_rows("c", rows, values, np.array([2, 0, 1])) == {"c": 3}
    with pytest.raises(MismatchError, match=r"^c, row 2, token 0: expected 3 .* found 4"):
        check_rows("c", rows, np.array([1, 2, 4]), np.array([2, 0, 1]))
    with pytest.raises(MismatchError, match=r"^c, row 0, token 1: "):
        check_rows("c", rows, np.array([1, 0, 3]), np.array([2, 0, 1]))
    with pytest.raises(MismatchError, match=r"^c, row 1: expected 0 tokens, found 1 tokens"):
        check_rows("c", rows, values, np.array([2, 1, 0]))
    with pytest.raises(MismatchError, match=r"^c: expected 3 rows, found 2"):
        check_rows("c", rows, values, np.array([2, 1]))


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return imported | {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }


@pytest.mark.parametrize("module", [batch_module, check_module])
def test_the_reference_is_independent_of_the_codec(module: Any) -> None:
    imported = imports_of(Path(module.__file__))
    library = {name for name in imported if name.startswith("jagcodec")}
    assert "jagcodec.errors" in library
    assert library <= {"jagcodec.data", "jagcodec.errors"}
    assert not imported & {"torch", "tensordict"}


def test_the_demo_imports_only_what_is_public() -> None:
    paths = list(DEMO.glob("*.py"))
    library = {name for path in paths for name in imports_of(path) if name.startswith("jagcodec")}
    assert library == {
        "jagcodec",
        "jagcodec.data",
        "jagcodec.errors",
        "jagcodec.integrations.zmq",
    }


# --- the batches -------------------------------------------------------------------------------


def test_batches_have_the_lengths_and_rewards_of_the_table() -> None:
    assert len(TABLE.rewards) == 5276
    for number in range(2):
        batch = make_batch(TABLE, number, 512)
        part = slice(512 * number, 512 * (number + 1))
        columns = batch.columns
        lengths = columns["input_lengths"]
        assert np.array_equal(lengths, TABLE.lengths[part])
        assert np.array_equal(columns["rewards"], TABLE.rewards[part])
        assert np.array_equal(columns["token_mask"].sum(axis=1), TABLE.responses[part])
        for name in PER_TOKEN:
            assert columns[name].shape == (512, lengths.max())
        padding = np.arange(lengths.max()) >= lengths[:, None]
        assert (columns["input_ids"][padding] == PAD_ID).all()
        assert columns["input_ids"].max() < VOCABULARY
        for name in (*LOGPROBS, "advantages"):
            assert columns[name].dtype == np.float32
            assert not columns[name][padding].any()
            assert columns[name][~padding].any()


def test_advantages_are_normalised_by_group() -> None:
    rewards = np.array([1, 0, 0, 1, 1, 1, 1, 1], dtype=np.float32)
    advantages = group_advantages(rewards, 4)
    by_torch = torch.tensor([1.0, 0, 0, 1])
    by_torch = (by_torch - by_torch.mean()) / (by_torch.std() + 1e-6)
    assert np.allclose(advantages[:4], by_torch.numpy(), atol=1e-6)
    assert not advantages[4:].any()


@pytest.mark.parametrize(("number", "rows"), [(0, 0), (0, 6), (0, -4), (1000, 16)])
def test_batches_that_the_table_cannot_fill(number: int, rows: int) -> None:
    with pytest.raises(JagcodecError, match="expected groups of 4"):
        make_batch(TABLE, number, rows)


def test_the_reference_comes_back_as_it_was_written(tmp_path: Path) -> None:
    batch = make_batch(TABLE, 3, ROWS)
    save_reference(batch, tmp_path, 3)
    back = load_reference(tmp_path, 3)
    assert check_columns(batch.columns, back.columns)
    assert np.array_equal(batch.prompts, back.prompts)
    assert np.array_equal(batch.responses, back.responses)
