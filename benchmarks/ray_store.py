"""What `ray.put` and `ray.get` of a batch take: stock, by this wire, and for bare arrays.

    python -m benchmarks.ray_store [--rounds 15]

One process, Ray on this machine, a jagged TensorDict of eight per-token columns (10 MB) and 512
messages. The ways take turns, three blocks of rounds each; a block's first rounds are not counted
(steady state). Each value is compared with what was put, outside the clock. Medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks.machine import machine, versions
from jagcodec import encode, open_wire, pack_jagged_fields
from jagcodec.integrations.ray import register, unregister

ROWS, WIDTH, COLUMNS = 512, 1000, 8
BLOCKS, WARM_UP = 3, 5


def make_batch() -> TensorDict:
    """512 rows of 50 to 999 tokens, and a message each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, WIDTH, (ROWS,), generator=generator)
    columns = {
        "input_ids": torch.randint(0, 152_000, (ROWS, WIDTH), generator=generator),
        **{
            f"logprobs_{i}": torch.randn(ROWS, WIDTH, generator=generator)
            for i in range(COLUMNS - 1)
        },
    }
    batch = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=list(columns))
    messages = [{"role": "user", "content": "word " * 40, "row": i} for i in range(ROWS)]
    batch["message"] = NonTensorStack(*messages)
    return batch


def same(found: Any, sent: Any) -> bool:
    """Whether the received batch equals the one that was sent."""
    jagged = [name for name, leaf in sent.items() if isinstance(leaf, torch.Tensor)]
    return all(
        torch.equal(found[name].values(), sent[name].values())
        and torch.equal(found[name].offsets(), sent[name].offsets())
        for name in jagged
    ) and list(found["message"]) == list(sent["message"])


def timed(value: Any, check: Callable[[Any], bool]) -> tuple[float, float]:
    """Milliseconds of one put and of one get."""
    start = time.perf_counter()
    reference = ray.put(value)
    middle = time.perf_counter()
    found = ray.get(reference, timeout=60)
    end = time.perf_counter()
    if not check(found):
        raise SystemExit("what was read differs from what was put")
    return (middle - start) * 1e3, (end - middle) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

    batch = make_batch()
    columns: dict[str, Any] = dict(batch.items())
    arrays = {name: columns[name].values().numpy() for name in columns if name != "message"}
    wire = open_wire(encode(batch))
    ways: dict[str, tuple[Any, Callable[[Any], bool]]] = {
        "stock": (batch, lambda found: same(found, batch)),
        "jagcodec": (batch, lambda found: same(found, batch)),
        "jagcodec, WireBatch": (wire, lambda found: same(found.to_tensordict(), batch)),
        "bare numpy arrays": (
            arrays,
            lambda found: all(np.array_equal(found[name], arrays[name]) for name in arrays),
        ),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(BLOCKS):
        for name, (value, check) in ways.items():
            if name.startswith("jagcodec"):
                register()
            taken = [timed(value, check) for _ in range(WARM_UP + rounds)]
            times[name] += taken[WARM_UP:]
            unregister()
    ray.shutdown()

    size = sum(array.nbytes for array in arrays.values()) / 1e6
    print(f"{size:.1f} MB of jagged columns, {ROWS} messages, medians of {BLOCKS * rounds} rounds")
    print({**machine(), **versions(), "ray": ray.__version__})
    totals = {
        name: statistics.median(put + get for put, get in taken) for name, taken in times.items()
    }
    for name, taken in times.items():
        put, get = (statistics.median(part) for part in zip(*taken, strict=True))
        factor = totals["stock"] / totals[name]
        print(
            f"{name:20} put {put:5.1f} ms  get {get:5.1f} ms  both {totals[name]:5.1f} ms"
            f"  {factor:4.1f}x as fast as stock"
        )


if __name__ == "__main__":
    main()
