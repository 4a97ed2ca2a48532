"""What tests of more than one folder use: one copy of each."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import decode, encode, open_wire, pack_jagged_fields, stack_or_nest, to_blob
from jagcodec.columns.batch import columns_in, source_in
from jagcodec.wire.read.message_source import MessageSource
from jagcodec.wire.read.node_columns import NodeColumn

ROOT = Path(__file__).parent.parent


def receive(frames, kind=bytearray):
    """The frames of a message copied, as a transport hands them to the other side."""
    return [kind(memoryview(frame)) for frame in frames]


def message(frames):
    """The bytes of a message, to compare."""
    return receive(frames, bytes)


def message_in(batch):
    """The open message that a batch reads its columns from."""
    source = source_in(batch)
    assert isinstance(source, MessageSource)
    return source.message


def node_of(batch, name):
    """The node of the message that a column of an open batch is."""
    column = columns_in(batch)[name]
    assert isinstance(column, NodeColumn)
    return column.node


def size(frames):
    """How many bytes a message has."""
    return sum(memoryview(frame).nbytes for frame in frames)


def address(buffer):
    """Where the bytes of a buffer begin in memory."""
    return np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]


def at_odd_address(frame, shift=1):
    """The bytes of a frame `shift` bytes after a multiple of 64."""
    data = memoryview(frame)
    memory = np.zeros(data.nbytes + 128, dtype=np.uint8)
    begin = -address(memory) % 64 + shift
    memory[begin : begin + data.nbytes] = np.frombuffer(data, dtype=np.uint8)
    return memory[begin : begin + data.nbytes]


def run_python(code, *arguments, status=0, cwd=None, path=None, **environment):
    """A new process that ran code, or a file, and ended with this status (None: any)."""
    command = ["-c", textwrap.dedent(code)] if isinstance(code, str) else [code]
    paths = os.pathsep.join(map(str, filter(None, [path, os.environ.get("PYTHONPATH")])))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *command, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert status in (None, run.returncode), run.stderr[-4000:]
    return run


class Store:
    """A blob at the other end of ``(offset, size) -> buffer``, which notes what it is asked for."""

    def __init__(self, frames):
        self.blob = bytes(to_blob(frames))
        self.asked = []

    def __call__(self, offset, size):
        self.asked.append((offset, size))
        return self.blob[offset : offset + size]

    @property
    def fetched(self):
        return sum(size for _, size in self.asked)


MESSAGES: dict[str, Any] = {
    "open": open_wire,
    "fetched": lambda frames: open_wire(Store(frames)),
    "frames": message,
    "tuple": tuple,
    "blob": to_blob,
}
"""Forms in which a message is read."""


def trip(value, **options):
    """A value sent and received."""
    return decode(receive(encode(value)), **options)


def rollout():
    """Three rows as a rollout worker sends them: per-token columns, per-row ones, and objects."""
    fields = {
        "ids": torch.arange(12).view(3, 4),
        "logprob": torch.rand(3, 4),
        "reward": torch.rand(3),
        "message": np.array(["a", {"b": (1, 2)}, None], dtype=object),
    }
    return pack_jagged_fields(
        fields, lengths=torch.tensor([2, 4, 0]), token_aligned_fields=["ids", "logprob"]
    )


def nested(rows, dtype=torch.int64):
    rows = [torch.as_tensor(np.asarray(row)).to(dtype) for row in rows]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


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


PAYLOADS = [{"role": "user", "id": 7}, None, "text", (1, 2.5), b"\xff" * 9, ["a", {"b": None}]]
LENGTHS = [3, 0, 5, 1, 2, 4]


def make_batch(cells_per_token=1, lengths=LENGTHS):
    """The same batch whenever it is asked for; with many cells per token its columns are large."""
    generator = torch.Generator().manual_seed(3)
    shape = (cells_per_token,) if cells_per_token > 1 else ()
    ids = [torch.randint(0, 1000, (n, *shape), generator=generator) for n in lengths]
    logprobs = [torch.randn(n, generator=generator) for n in lengths]
    experts = [torch.randint(0, 8, (n, 2), generator=generator) for n in lengths]
    rows = len(lengths)
    payloads = [PAYLOADS[i % len(PAYLOADS)] for i in range(rows)]
    return TensorDict(
        {
            "ids": stack_or_nest(ids, always_nest=True),
            "logprobs": stack_or_nest(logprobs, always_nest=True),
            "experts": stack_or_nest(experts, always_nest=True),
            "embedding": torch.randn(rows, 3, generator=generator),
            "reward": torch.arange(float(rows)),
            # A batch of tensordict 0.10 takes no stack without rows.
            **({"message": NonTensorStack(*payloads)} if rows else {}),
            "tag": NonTensorData("gsm8k", batch_size=[rows]),
        },
        batch_size=[rows],
    )
