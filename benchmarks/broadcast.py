"""What a broadcast of a batch between two ranks takes: by this wire, and by torch's own means.

    python -m benchmarks.broadcast [--rounds 15]

gloo, two processes of this machine: 512 rows in six per-token columns (`shapes.DESIGN`). Every way
ends with the columns that the receiver computes on: jagged ones, or the padded ones as they were.
The ways take turns; a round is timed on the receiver, from a barrier on, and what came is compared
outside the clock. Medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from benchmarks.machine import machine, versions
from benchmarks.shapes import DESIGN, PADS, Batch, make_batch
from jagcodec import pack_jagged_fields
from jagcodec.integrations.torch_distributed import broadcast

LEADER, RECEIVER = 0, 1
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    batch = make_batch(DESIGN.lengths())
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "ranks")
        context = get_context("spawn")
        leader = context.Process(target=run, args=(LEADER, path, rounds), daemon=True)
        leader.start()
        times = run(RECEIVER, path, rounds)
        leader.join()
    padded = sum(column.nbytes for column in batch.columns.values())
    tokens = int(batch.lengths.sum())
    valid = sum(tokens * column.itemsize for column in batch.columns.values())
    print(
        f"{padded / 1e6:.1f} MB padded, {valid / 1e6:.1f} MB of tokens, medians of {rounds} rounds"
    )
    print({**machine(), **versions()})
    ours = statistics.median(times["jagcodec"])
    for name, taken in times.items():
        took = statistics.median(taken)
        print(f"{name:44} {took * 1e3:6.1f} ms  {took / ours:5.2f}x as long")


def run(rank: int, path: str, rounds: int) -> dict[str, list[float]]:
    """All rounds of one rank, and its times."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        batch = make_batch(DESIGN.lengths())
        ways = _ways(batch, rank == LEADER)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for done in range(WARM_UP + rounds):
            for name, (way, check) in ways.items():
                dist.barrier()
                start = time.perf_counter()
                found = way()
                took = time.perf_counter() - start
                if not check(found):
                    raise SystemExit(f"{name}: the batch did not arrive as it was sent")
                if done >= WARM_UP:
                    times[name].append(took)
        return times
    finally:
        dist.destroy_process_group()


def _ways(batch: Batch, leads: bool) -> dict[str, tuple[Callable[[], Any], Callable[[Any], bool]]]:
    packed = pack_jagged_fields(batch.columns, lengths=batch.lengths, token_aligned_fields=PADS)

    def same(found: Any) -> bool:
        return all(torch.equal(found[name].values(), packed[name].values()) for name in PADS)

    def same_padded(found: Any) -> bool:
        return all(torch.equal(found[name], column) for name, column in batch.columns.items())

    def objects(value: Any) -> Any:
        holder = [value if leads else None]
        dist.broadcast_object_list(holder, src=LEADER)
        return holder[0]

    def each() -> dict[str, torch.Tensor]:
        # The receiver knows names, shapes and dtypes beforehand.
        found = {
            name: column if leads else torch.empty_like(column)
            for name, column in batch.columns.items()
        }
        for column in found.values():
            dist.broadcast(column, src=LEADER)
        return found

    padded = TensorDict(dict(batch.columns), batch_size=[len(batch.lengths)])
    return {
        "jagcodec": (lambda: broadcast(packed if leads else None, LEADER), same),
        "broadcast_object_list of the jagged batch": (lambda: objects(packed), same),
        "broadcast_object_list of padded columns": (lambda: objects(padded), same_padded),
        "dist.broadcast of each padded column": (each, same_padded),
    }


if __name__ == "__main__":
    main()
