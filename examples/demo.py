"""A GRPO batch of real rollout lengths from one process to another, every cell compared.

Run it from a checkout with ``make demo``, or ``python -m examples.demo``, which needs
``pip install '.[zmq]'``. The lengths and rewards are those of 512 real GSM8K rollouts, which come
with the library; all other values are made up.
"""

from __future__ import annotations

from multiprocessing import get_context
from time import perf_counter
from typing import Any

import numpy as np
import torch
import zmq

from jagcodec import encode_fields, materialize, padding_tax
from jagcodec.data import rollout_table
from jagcodec.integrations.zmq import recv_frames, send_frames
from jagcodec.testing import assert_same

ROWS = 512
VOCABULARY, PAD_ID = 152_000, 151_643
LOGPROBS = ("generation_logprobs", "prev_logprobs", "reference_logprobs")
PER_TOKEN = ("input_ids", "token_mask", *LOGPROBS, "advantages")
"""The columns with one value per token; the others have one per row."""
WORDS = ("so", "she", "has", "12", "eggs", "for", "$3", "which", "makes", "€36", "=", "in all\n")
TIMEOUT = 60  # seconds: if the producer dies, the trainer raises instead of waiting forever

Columns = dict[str, Any]


def make_batch(rows: int = ROWS) -> tuple[Columns, torch.Tensor]:
    """Padded columns as a framework holds them, and the (N,) lengths of their rows.

    The same arguments give the same batch in any process.
    """
    table = rollout_table()
    prompts, responses, rewards = (
        torch.from_numpy(column[:rows])
        for column in (table.prompts, table.responses, table.rewards)
    )
    lengths = prompts + responses
    cell = torch.arange(int(lengths.max()))
    in_row = cell < lengths[:, None]
    in_response = in_row & (cell >= prompts[:, None])
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, in_row.shape, generator=numbers)
    logprobs = {name: -torch.rand(in_row.shape, generator=numbers) for name in LOGPROBS}
    # GRPO: each reward, normalized within the rollouts of its prompt.
    groups = rewards.view(-1, table.group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    advantages = (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).view(-1)
    columns = {
        "input_ids": ids.masked_fill(~in_row, PAD_ID),
        "token_mask": in_response.int(),
        **{name: column.masked_fill(~in_row, 0.0) for name, column in logprobs.items()},
        "advantages": advantages[:, None].expand(in_row.shape).masked_fill(~in_response, 0.0),
        # A group with equal rewards teaches nothing and is masked out.
        "sample_mask": (advantages != 0).float(),
        "input_lengths": lengths,
        "rewards": rewards,
        "message": messages(responses.tolist(), rewards.tolist()),
    }
    return columns, lengths


def messages(responses: list[int], rewards: list[float]) -> Any:
    """A dict per row, with tuples and bytes, which JSON would not bring back."""
    numbers = np.random.default_rng(0)
    found = np.empty(len(responses), dtype=object)
    for row, (words, reward) in enumerate(zip(responses, rewards, strict=True)):
        drawn = numbers.integers(0, len(WORDS), words).tolist()
        found[row] = {
            "role": "assistant",
            "content": " ".join(WORDS[word] for word in drawn),
            "row": row,
            "tags": ("gsm8k", "correct") if reward else ("gsm8k",),
            "tool_calls": [(row, b"\x00\xff", True), None] if row % 5 == 0 else [],
        }
    return found


def produce(port: int) -> None:
    """The rollout worker: packs its padded columns, and sends them."""
    columns, lengths = make_batch()
    frames = encode_fields(columns, lengths=lengths, token_aligned_fields=PER_TOKEN)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        send_frames(socket, frames, timeout=TIMEOUT)


def main() -> None:
    """The trainer: receives the batch, pads it again and compares it with the one sent."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        producer = get_context("spawn").Process(target=produce, args=(port,), daemon=True)
        producer.start()
        frames = recv_frames(socket, timeout=TIMEOUT).frames
        producer.join()
    start = perf_counter()
    batch = materialize(frames, pad_value_dict={"input_ids": PAD_ID})
    seconds = perf_counter() - start
    sent, lengths = make_batch()
    assert_same(dict(batch), sent)
    cells = sum(column.numel() if name != "message" else ROWS for name, column in sent.items())
    print(padding_tax(sent, lengths=lengths, token_aligned_fields=PER_TOKEN))
    print(
        f"\n{ROWS} rows came from another process in {len(frames)} frames of "
        f"{sum(map(len, frames)):,} bytes and were padded in {1e3 * seconds:.1f} ms.\n"
        f"All {cells:,} cells are identical."
    )


if __name__ == "__main__":
    main()
