"""What `kv_batch_put` and `kv_batch_get` take: stock TransferQueue, and over this wire.

    python -m benchmarks.transfer_queue_kv [--rounds 15] [--one-row]

512 rows of six jagged columns (9 MB), two SimpleStorage units, Ray on this machine. Each way runs
in processes of its own, in turn, twice; every get is compared with what was put, outside the clock.
With ``--one-row`` each row is put by a `kv_put` of its own, as an asynchronous producer does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.machine import machine, versions
from jagcodec import pack_jagged_fields, to_rows

ROWS, WIDTH, COLUMNS, WARM_UP = 512, 1200, 6, 4
ASKED = {"put": 1.0, "get": 0.5}  # with --one-row, against stock
HOOK = "jagcodec.integrations.transfer_queue.install"


def make_batch() -> TensorDict:
    """512 rows of 50 to 1,199 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, WIDTH, (ROWS,), generator=generator)
    columns = {
        "input_ids": torch.randint(0, 152_000, (ROWS, WIDTH), generator=generator),
        **{
            f"logprobs_{i}": torch.randn(ROWS, WIDTH, generator=generator)
            for i in range(COLUMNS - 1)
        },
    }
    return pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=list(columns))


def measure(way: str, rounds: int, one_row: bool) -> dict[str, list[float]]:
    """Milliseconds of each put and each get, in this process."""
    import ray
    import transfer_queue

    environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    if way == "jagcodec":
        from jagcodec.integrations.transfer_queue import install

        install()
        environment["worker_process_setup_hook"] = HOOK
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    transfer_queue.init()
    batch: Any = make_batch()
    rows = to_rows(batch)
    times: dict[str, list[float]] = {"put": [], "get": []}
    warm_up = 1 if one_row else WARM_UP
    for turn in range(warm_up + rounds):
        keys = [f"{turn}_{row}" for row in range(ROWS)]
        start = time.perf_counter()
        if one_row:
            for key, row in zip(keys, rows, strict=True):
                transfer_queue.kv_put(key=key, partition_id="bench", fields=row)
        else:
            transfer_queue.kv_batch_put(keys=keys, partition_id="bench", fields=batch)
        middle = time.perf_counter()
        found = transfer_queue.kv_batch_get(keys=keys, partition_id="bench")
        end = time.perf_counter()
        for name in batch.keys():  # noqa: SIM118, iterating over a TensorDict gives its rows
            pairs = zip(found[name].unbind(), rows, strict=True)
            if not all(torch.equal(each, row[name]) for each, row in pairs):
                raise SystemExit(f"{name}: what was read differs from what was put")
        transfer_queue.kv_clear(keys=keys, partition_id="bench")
        if turn >= warm_up:
            times["put"].append((middle - start) * 1e3)
            times["get"].append((end - middle) * 1e3)
    transfer_queue.close()
    ray.shutdown()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--way", choices=["stock", "jagcodec"], help="measure this one and no other"
    )
    parser.add_argument("--one-row", action="store_true", help="one put per row, one get of all")
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.rounds, options.one_row)))
        return

    times: dict[str, dict[str, list[float]]] = {
        way: {"put": [], "get": []} for way in ("stock", "jagcodec")
    }
    for way in [*times, *times]:
        command = [sys.executable, "-m", "benchmarks.transfer_queue_kv", "--way", way]
        run = subprocess.run(
            [*command, "--rounds", str(options.rounds), *["--one-row"] * options.one_row],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        )
        for verb, taken in json.loads(run.stdout.splitlines()[-1]).items():
            times[way][verb] += taken
    print(f"{ROWS} rows x {COLUMNS} jagged columns, medians of {2 * options.rounds} rounds")
    print({**machine(), **versions()})
    both = {
        way: statistics.median(map(sum, zip(taken["put"], taken["get"], strict=True)))
        for way, taken in times.items()
    }
    for way, taken in times.items():
        put, get = statistics.median(taken["put"]), statistics.median(taken["get"])
        print(
            f"{way:9} put {put:5.0f} ms  get {get:5.0f} ms  both {both[way]:5.0f} ms  "
            f"{both['stock'] / both[way]:4.1f}x as fast as stock"
        )
    if options.one_row:
        for verb, asked in ASKED.items():
            ours, stock = (statistics.median(times[way][verb]) for way in ("jagcodec", "stock"))
            verdict = "met" if ours <= asked * stock else "missed"
            print(f"{verb} / stock's {ours / stock:.3f}  asked {asked:g}: {verdict}")


if __name__ == "__main__":
    main()
