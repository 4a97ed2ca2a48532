"""A leader fetches a batch and broadcasts it to its tensor-parallel peers, over gloo.

Run it with ``python examples/torch_distributed_broadcast.py``, which starts two ranks itself,
or with ``torchrun --nproc-per-node 2 examples/torch_distributed_broadcast.py``.
"""

import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jagcodec import decode, encode, materialize, pack_jagged_fields, split_rows
from jagcodec.integrations.torch_distributed import all_gather_rows, broadcast

ROWS, WIDTH = 64, 128
LEADER = 0


def fetch() -> Sequence[Any]:
    """The message that a data plane would return."""
    lengths = torch.arange(ROWS) + 1
    messages = np.empty(ROWS, dtype=object)
    messages[:] = [{"row": row} for row in range(ROWS)]
    fields = {"input_ids": torch.arange(ROWS)[:, None].expand(ROWS, WIDTH), "message": messages}
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=["input_ids"])
    return encode(td)


def work() -> None:
    rank = dist.get_rank()
    # Tensor parallelism: every rank computes on the same rows, and one of them fetches.
    td = broadcast(decode(fetch()) if rank == LEADER else None, src=LEADER)
    batch = materialize(td, pad_value_dict={"input_ids": -1}, pad_to_seqlen=WIDTH)
    assert batch["input_ids"].shape == (ROWS, WIDTH)
    assert (batch["input_ids"] >= 0).sum(1).tolist() == list(range(1, ROWS + 1))
    assert [message["row"] for message in batch["message"]] == list(range(ROWS))

    # Data parallelism: each rank computes on its own rows, and all ranks get the results.
    part = split_rows(td, dist.get_world_size())[rank]
    part["score"] = torch.stack([row.double().mean() for row in part["input_ids"].unbind()])
    scored = all_gather_rows(part)
    assert scored["score"].tolist() == list(range(ROWS))
    if rank == LEADER:
        print(f"every rank has the {ROWS} rows, and the scores that {dist.get_world_size()} made")


def start(rank: int, ranks: int, path: str) -> None:
    options: dict[str, Any] = (
        {"init_method": f"file://{path}", "rank": rank, "world_size": ranks} if path else {}
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **options)
    try:
        work()
        dist.barrier()  # with torch 2.6, who leaves after another rank may wait forever
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started this rank
        start(-1, -1, "")
    else:
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(start, (2, f"{directory}/store"), nprocs=2)  # type: ignore[attr-defined]
