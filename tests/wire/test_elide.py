"""`elide`: what columns repeat is sent once, and comes back bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from benchmarks.costs import functions_entered
from jagcodec import (
    decode,
    encode,
    open_wire,
)
from jagcodec.testing import assert_same
from jagcodec.wire import elision
from jagcodec.wire.spec import PARTS, PartForm
from tests.wire.test_spec_reader import assert_reads


def size(frames):
    return sum(memoryview(frame).nbytes for frame in frames)


def nested(rows, dtype=torch.int64):
    rows = [torch.as_tensor(np.asarray(row)).to(dtype) for row in rows]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.fixture
def eager(monkeypatch):
    """Whatever is found is sent as parts, whether it pays or not."""
    monkeypatch.setattr(elision, "_FEWEST", 1)
    monkeypatch.setattr(elision, "_SLACK", -(1 << 20))


def forms_of(frames, name):
    """The forms of the parts of a column; None of one that is sent as it is."""
    batch = open_wire(frames)
    node, message = batch._nodes[name], batch._message
    if message.numbers[node.number + 2] <= PARTS:
        return None
    return [PartForm(part.form).name for part in message.parts(node)]


# --- what is found -----------------------------------------------------------------------------


def rollouts(seed=0, prompts=6, repeats=4, dtype=torch.int64):
    """A batch as verl makes it: each prompt several times, and columns that say the same thing."""
    rng = np.random.default_rng(seed)
    asked = [rng.integers(0, 1000, rng.integers(40, 90)) for _ in range(prompts)]
    asked = [prompt for prompt in asked for _ in range(repeats)]
    answers = [rng.integers(0, 1000, rng.integers(30, 200)) for _ in asked]
    both = [np.concatenate(pair) for pair in zip(asked, answers, strict=True)]
    ones = [np.ones(len(row)) for row in answers]
    columns = {
        "prompts": nested(asked, dtype),
        "responses": nested(answers, dtype),
        "input_ids": nested(both, dtype),
        "attention_mask": nested([np.ones(len(row)) for row in both]),
        "position_ids": nested([np.arange(len(row)) for row in both]),
        "response_mask": nested(ones),
        "loss_mask": nested(ones),
        "advantages": nested(
            [np.repeat([0, i], [len(asked[i]), len(answer)]) for i, answer in enumerate(answers)],
            torch.float32,
        ),
        "logprobs": nested([rng.normal(size=len(row)) for row in answers], torch.float32),
        "rewards": nested([np.zeros(len(row)) for row in answers], torch.float32),
    }
    return TensorDict(columns, batch_size=[len(asked)])


FORMS = {
    "prompts": ["AT"],
    "responses": None,
    "input_ids": ["AT", "IN_ORDER"],
    "attention_mask": ["REPEATED"],
    "position_ids": ["RAMP"],
    "response_mask": ["REPEATED"],
    "loss_mask": ["REPEATED"],
    "advantages": ["REPEATED"],
    "logprobs": None,
    "rewards": ["REPEATED"],
}


@pytest.mark.parametrize("narrow", [False, True])
def test_a_batch_of_rollouts_is_sent_once(narrow):
    td = rollouts()
    frames = encode(td, narrow=narrow, elide=True)
    assert {name: forms_of(frames, name) for name in FORMS} == FORMS
    assert_same(decode(frames), td)
    news = td["responses"].values().numel() + td["prompts"].values().numel() // 4
    floor = news * (2 if narrow else 8) + td["logprobs"].values().nbytes
    assert size(frames) < floor + 12_000
    assert_reads([bytes(memoryview(frame)) for frame in frames], td)


# --- rows that begin alike ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.int64])
@pytest.mark.parametrize("tail", [(), (3,)])
@pytest.mark.parametrize("grouped", [False, True])
def test_rows_of_every_width_that_repeat_are_found(dtype, tail, grouped):
    rng = np.random.default_rng(7)
    kinds = [rng.integers(0, 100, (n, *tail)) for n in (0, 1, 3, 5, 200, 201)]
    rows = [kinds[i % 6] for i in range(48)]
    td = TensorDict({"a": nested(rows, dtype)}, batch_size=[48])
    groups = [i % 6 for i in range(48)] if grouped else None
    frames = encode(td, elide=True, groups=groups)
    assert forms_of(frames, "a") == ["AT"]
    own = sum(kind.size for kind in kinds) * dtype.itemsize
    assert size(frames) < own + 1024
    assert_same(decode(frames), td)
    assert_reads([bytes(memoryview(frame)) for frame in frames], td)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tail", [(), (3,)])
def test_cells_of_a_rectangle_that_repeat_are_found(dtype, tail, eager):
    rng = np.random.default_rng(8)
    few = torch.as_tensor(rng.normal(size=(5, *tail)) * 50).abs().to(dtype)
    if dtype.is_floating_point:
        few[0], few[1], few[2] = 0.0, -0.0, float("nan")
    td = TensorDict({"a": few[torch.from_numpy(rng.integers(0, 5, 900))]}, batch_size=[900])
    frames = encode(td, elide=True)
    assert forms_of(frames, "a") == ["AT"]
    assert_same(decode(frames), td)


def test_rows_that_begin_otherwise_are_not_looked_at_one_by_one():
    def entered(rows):
        rng = np.random.default_rng(9)
        columns = {
            "ids": nested([rng.integers(0, 1 << 40, 8) for _ in range(rows)]),
            "rewards": torch.from_numpy(rng.integers(0, 1 << 40, rows) % 9),
        }
        td = TensorDict(columns, batch_size=[rows])
        package = Path(elision.__file__).parents[1]
        return [
            functions_entered(partial(encode, td, elide=True, groups=groups), package)
            for groups in (None, [row // 8 for row in range(rows)])
        ]

    one_by_one = 512 - 64
    assert all(b - a < one_by_one / 4 for a, b in zip(entered(64), entered(512), strict=True))
