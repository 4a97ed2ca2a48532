"""Rollout workers, each a process, push batches over ZeroMQ to a trainer with one PULL socket.

Run it with ``python examples/zmq_pipeline.py``; it needs ``pip install '.[zmq]'``.
"""

from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import zmq

from jagcodec import encode_fields, materialize
from jagcodec.integrations.zmq import recv_frames, send_frames

WORKERS, BATCHES, ROWS, WIDTH = 2, 3, 64, 256
TIMEOUT = 60  # seconds: if a peer dies, the others raise instead of waiting forever


def rollouts(seed: int) -> dict[str, Any]:
    """A batch as an inference engine hands it out: padded rectangles and Python objects."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    past = torch.arange(WIDTH) >= lengths[:, None]
    ids = torch.randint(0, 1000, (ROWS, WIDTH), generator=generator).masked_fill(past, 0)
    messages = np.empty(ROWS, dtype=object)
    messages[:] = [{"role": "assistant", "seed": seed, "row": row} for row in range(ROWS)]
    return {
        "input_ids": ids,
        "logprobs": torch.randn(ROWS, WIDTH, generator=generator).masked_fill(past, 0.0),
        "lengths": lengths,
        "message": messages,
    }


def work(port: int, worker: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, 2)  # a slow trainer slows its workers down
        socket.connect(f"tcp://127.0.0.1:{port}")
        for number in range(BATCHES):
            fields = rollouts(worker * BATCHES + number)
            frames = encode_fields(
                fields, lengths=fields["lengths"], token_aligned_fields=["input_ids", "logprobs"]
            )
            send_frames(socket, frames, timeout=TIMEOUT)


def main() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        spawn = get_context("spawn")
        workers = [spawn.Process(target=work, args=(port, i), daemon=True) for i in range(WORKERS)]
        for process in workers:
            process.start()
        count = WORKERS * BATCHES
        messages = [recv_frames(socket, timeout=TIMEOUT).frames for _ in range(count)]
        for process in workers:
            process.join()

    batch = materialize(messages, pad_to_seqlen=WIDTH)  # one batch of all messages
    for begin in range(0, len(batch), ROWS):
        part = slice(begin, begin + ROWS)
        sent = rollouts(batch["message"][begin]["seed"])
        for name in ("input_ids", "logprobs", "lengths"):
            assert torch.equal(batch[name][part], sent[name]), name
        assert batch["message"][part].tolist() == sent["message"].tolist()
    print(f"{len(batch)} rows from {WORKERS} workers, all cells identical")


if __name__ == "__main__":
    main()
