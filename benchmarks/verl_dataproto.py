"""What `ray.put` and `ray.get` of a verl DataProto take: stock, and by this wire; and its bytes.

    python -m benchmarks.verl_dataproto [--rows 512] [--rounds 10]

One process, Ray on this machine, the batch that a PPO step of verl holds before its update, 512 and
1024 wide as in verl's GSM8K examples: once with the lengths of real GSM8K rollouts, once with long
ones (uniform from half of each width to all of it). The ways take turns, three blocks of rounds
each; a block's first rounds are not counted (steady state). Each value is compared with what was
put, bit for bit, outside the clock. Medians are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from ray import cloudpickle
from verl import DataProto

from benchmarks.machine import machine, versions
from jagcodec.data import rollout_table
from jagcodec.integrations.ray import unregister
from jagcodec.integrations.verl import install

PROMPT, RESPONSE = 512, 1024
PAD, VOCABULARY = 151_643, 151_000
BLOCKS, WARM_UP = 3, 3
METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def make_batch(prompts: npt.NDArray[Any], responses: npt.NDArray[Any]) -> DataProto:
    """What verl's agent loop, workers and trainer put together, of made-up values."""
    rows = len(prompts)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.from_numpy(prompts)[:, None], torch.from_numpy(responses)[:, None]
    cells = torch.arange(PROMPT + RESPONSE)
    valid = (cells >= PROMPT - lengths[0]) & (cells < PROMPT + lengths[1])
    in_response = valid[:, PROMPT:]
    ids = torch.randint(0, VOCABULARY, valid.shape, generator=draw).where(valid, torch.tensor(PAD))
    score = torch.zeros(in_response.shape)
    score[torch.arange(rows), lengths[1][:, 0] - 1] = torch.arange(rows) % 3 / 2
    advantages = torch.randn((rows, 1), generator=draw) * in_response

    def logprobs() -> torch.Tensor:
        drawn = -torch.rand(in_response.shape, generator=draw)
        return drawn.where(in_response, torch.tensor(0.0))

    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :PROMPT],
            "responses": ids[:, PROMPT:],
            "response_mask": in_response.long(),
            "input_ids": ids,
            "attention_mask": valid.long(),
            "position_ids": (valid.long().cumsum(dim=1) - 1).clip(min=0),
            "rollout_log_probs": logprobs(),
            "old_log_probs": logprobs(),
            "ref_log_prob": logprobs(),
            "token_level_scores": score,
            "token_level_rewards": score.clone(),
            "advantages": advantages,
            "returns": advantages.clone(),
        },
        non_tensors={
            "uid": np.array([f"{row // 8:032x}" for row in range(rows)], dtype=object),
            "reward_model": np.array([{"ground_truth": str(row)} for row in range(rows)]),
        },
        meta_info={"temperature": 1.0, "global_token_num": valid.sum(dim=1).tolist()},
    )


def same(found: DataProto, sent: DataProto) -> bool:
    """Whether the received batch equals the one that was sent, bit for bit."""
    return (
        list(found.batch.keys()) == list(sent.batch.keys())
        and all(
            found.batch[name].dtype == column.dtype
            and np.array_equal(found.batch[name].numpy().view("u1"), column.numpy().view("u1"))
            for name, column in sent.batch.contiguous().items()
        )
        and all(
            found.non_tensor_batch[name].tolist() == array.tolist()
            for name, array in sent.non_tensor_batch.items()
        )
        and found.meta_info == sent.meta_info
    )


def stock_numpy() -> None:
    os.environ[METHOD] = "numpy"


WAYS: dict[str, Callable[[], None]] = {
    "stock": lambda: None,
    "stock, numpy": stock_numpy,
    "jagcodec": install,
    "jagcodec, narrow": partial(install, narrow=True),
}


def stored_bytes(data: DataProto) -> int:
    buffers: list[Any] = []
    stream = cloudpickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(memoryview(buffer).nbytes for buffer in buffers)


def timed(data: DataProto) -> tuple[float, float]:
    """Milliseconds of one put and of one get."""
    start = time.perf_counter()
    reference = ray.put(data)
    middle = time.perf_counter()
    found = ray.get(reference, timeout=60)
    end = time.perf_counter()
    if not same(found, data):
        raise SystemExit("what was read differs from what was put")
    return (middle - start) * 1e3, (end - middle) * 1e3


def measure(name: str, data: DataProto, rounds: int) -> None:
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    sizes = {}
    for _ in range(BLOCKS):
        for way, begin in WAYS.items():
            begin()
            sizes[way] = stored_bytes(data)
            times[way] += [timed(data) for _ in range(WARM_UP + rounds)][WARM_UP:]
            unregister()
            os.environ.pop(METHOD, None)
    fill = data.batch["attention_mask"].float().mean().item()
    print(f"{name}: {len(data)} rows, {fill:.1%} of the cells are tokens")
    totals = {way: statistics.median(map(sum, taken)) for way, taken in times.items()}
    for way, taken in times.items():
        put, get = (statistics.median(part) for part in zip(*taken, strict=True))
        print(
            f"  {way:17} {sizes[way] / 1e6:6.2f} MB  put {put:6.1f} ms  get {get:6.1f} ms"
            f"  both {totals[way]:6.1f} ms  {totals['stock'] / totals[way]:5.1f}x as fast as stock"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    print({**machine(), **versions(), "ray": ray.__version__})
    table = rollout_table()
    rows = slice(0, args.rows)
    real = make_batch(table.prompts[rows].clip(max=PROMPT), table.responses[rows].clip(1, RESPONSE))
    measure("GSM8K", real, args.rounds)
    draw = np.random.default_rng(0)
    long = [draw.integers(width // 2, width + 1, args.rows) for width in (PROMPT, RESPONSE)]
    measure("long", make_batch(*long), args.rounds)
    ray.shutdown()


if __name__ == "__main__":
    main()
