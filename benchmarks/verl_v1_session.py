"""One turn of `benchmarks.verl_v1` in its own process tree: Ray, TransferQueue, and all actors.

The actors call verl's own helpers. No model runs: its outputs are made of the tokens. Workers and
the driver compare every cell that they got, outside the clock.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import tensordict
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.transferqueue_utils import tqbridge
from verl.workers.utils.padding import response_from_nested, response_to_nested

from benchmarks.machine import ray_cluster
from benchmarks.verl_v1_rows import (
    GLOBAL_STEP,
    NEMO_GET,
    NEMO_WRITE_BACK,
    OUTPUTS,
    SELECTED,
    SESSIONS,
    compare,
    key_of,
    number_of,
    outputs,
    rollout,
    tag_of,
    trajectory,
    uid_of,
)

PRODUCERS, WORKERS, UNITS = 2, 4, 2
WARM_UP = 1  # rounds
TRAIN, NEMO = "train", "nemo"  # partitions
INFO = {"calculate_entropy": True, "compute_loss": False, "temperature": 1.0}


def main() -> None:
    """Run the turn that the first argument describes in JSON, and print what it found in JSON."""
    module, prompts, rounds = json.loads(sys.argv[1])
    if module:
        importlib.import_module(module)
    with ray_cluster():
        try:
            found = Driver(prompts).run(rounds)
        finally:
            tq.close()
    print(json.dumps(found))


class Producer:
    """An agent loop worker of verl, for some of the prompts."""

    def __init__(self, prompts: Sequence[int]) -> None:
        tq.init()
        self._prompts = prompts
        self._puts: dict[int, list[dict[str, Any]]] = {}

    async def prepare(self) -> None:
        """Make the arguments of every put, outside the clock."""
        for prompt in self._prompts:
            numbers = range(prompt * SESSIONS, (prompt + 1) * SESSIONS)
            self._puts[prompt] = [
                {
                    "keys": [key_of(number)],
                    "fields": list_of_dict_to_tensordict([trajectory(number)]),
                    "tags": [tag_of(trajectory(number))],
                }
                for number in numbers
            ]
        _settle()

    async def generate(self) -> list[float]:
        """Put every trajectory by itself, all at once; the seconds of each put."""
        found = await asyncio.gather(*map(self._finish, self._prompts))
        return [seconds for some in found for seconds in some]

    async def _finish(self, prompt: int) -> list[float]:
        uid = uid_of(prompt)
        await tq.async_kv_put(key=uid, partition_id=TRAIN, tag={"status": "running"})
        puts = [asyncio.create_task(_put_row(row)) for row in self._puts[prompt]]
        seconds = await asyncio.gather(*puts)
        await tq.async_kv_put(key=uid, partition_id=TRAIN, tag={"status": "finished"})
        return seconds


async def _put_row(row: dict[str, Any]) -> float:
    start = time.perf_counter()
    await tq.async_kv_batch_put(partition_id=TRAIN, **row)
    return time.perf_counter() - start


class Worker:
    """A training worker. verl's bridge gets the batch of a call and puts what the call returns."""

    def __init__(self) -> None:
        tq.init()
        self._bridged = tqbridge()(self._compute)
        self._data = TensorDict()
        self._arrived = self._computed = 0.0

    def run(self, phase: str, batch: Any) -> tuple[float, float]:
        """The seconds until the data is here, and those of the write-back."""
        start = time.perf_counter()
        self._bridged(phase, batch)
        return self._arrived - start, time.perf_counter() - self._computed

    def _compute(self, phase: str, data: TensorDict) -> TensorDict | None:
        self._arrived, self._data = time.perf_counter(), data
        output = self._output(phase) if phase in OUTPUTS else None
        self._computed = time.perf_counter()
        return output

    def _output(self, phase: str) -> TensorDict:
        ids = self._data["input_ids"]
        columns = {
            name: torch.nested.nested_tensor_from_jagged(values, ids.offsets())
            for name, values in outputs(ids.values(), phase).items()
        }
        return TensorDict(columns, batch_size=[len(self._data)])

    def get_named(self, keys: list[str]) -> None:
        """What a worker of NeMo-RL does before it computes."""
        names = SELECTED[NEMO_GET]
        self._data = tq.kv_batch_get(keys=keys, partition_id=NEMO, select_fields=names)

    def write_back(self, keys: list[str]) -> None:
        """What it does afterwards."""
        fields = self._output(NEMO_WRITE_BACK)
        tq.kv_batch_put(keys=keys, partition_id=NEMO, fields=fields, tags=[{} for _ in keys])

    def settle(self) -> None:
        _settle()

    def check(self, keys: list[str], phase: str) -> int:
        """Compare the last batch, without what the bridge has added."""
        data, self._data = self._data.exclude(*INFO), TensorDict()
        return compare(data, keys, phase)


def _settle() -> None:
    """Collect garbage. What is alive now is not searched again, so rounds pay for their own."""
    gc.collect()
    gc.freeze()


class Clock:
    """Milliseconds of the phases of a round."""

    def __init__(self) -> None:
        self.total = 0.0
        self.ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.part(name):
            yield
        self.total += self.ms[name]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.ms[name] = 0.0  # stands before its own parts
        start = time.perf_counter()
        yield
        self.ms[name] = (time.perf_counter() - start) * 1e3

    def note(self, name: str, seconds: Sequence[float]) -> None:
        self.ms[name] = statistics.mean(seconds) * 1e3


class Driver:
    """The trainer: it starts the other processes and times the rounds."""

    def __init__(self, prompts: int) -> None:
        tq.init()
        self._uids = [uid_of(prompt) for prompt in range(prompts)]
        self._keys = [key_of(number) for number in range(prompts * SESSIONS)]
        self._rollouts = [rollout(number) for number in range(2 * prompts * SESSIONS)]
        self._cells = 0
        producer, worker = (ray.remote(kind).options(num_cpus=0) for kind in (Producer, Worker))
        self._producers = [producer.remote(range(i, prompts, PRODUCERS)) for i in range(PRODUCERS)]
        self._workers = [worker.remote() for _ in range(WORKERS)]

        def identity(actor: Any) -> tuple[str, str | None]:
            return type(actor).__name__, tensordict.__version__

        units = [ray.get_actor(f"TransferQueueStorageUnit#{i}") for i in range(UNITS)]
        actors = [*units, *self._producers, *self._workers]
        found = ray.get([actor.__ray_call__.remote(identity) for actor in actors])
        classes, versions = zip(*found, strict=True)
        if set(versions) != {tensordict.__version__}:
            raise RuntimeError(f"expected the driver's tensordict, found {versions}")
        self._unit = classes[0]

    def run(self, rounds: int) -> dict[str, Any]:
        """The lines of each round after the warm-up, in milliseconds."""
        steps = [self._round(self._step) for _ in range(WARM_UP + rounds)][WARM_UP:]
        batches = [self._round(self._batch) for _ in range(WARM_UP + rounds)][WARM_UP:]
        found = [step | batch for step, batch in zip(steps, batches, strict=True)]
        return {"rounds": found, "cells": self._cells, "unit": self._unit}

    def _round(self, what: Callable[[Clock], dict[str, float]]) -> dict[str, float]:
        ray.get([worker.settle.remote() for worker in self._workers])
        _settle()
        return what(Clock())

    def _step(self, clock: Clock) -> dict[str, float]:
        """A step of verl."""
        ray.get([producer.prepare.remote() for producer in self._producers])
        with clock.phase("submit"):
            tag = {"is_prompt": True, "status": "pending", "global_steps": GLOBAL_STEP}
            tags = [dict(tag) for _ in self._uids]
            tq.kv_batch_put(keys=self._uids, partition_id=TRAIN, tags=tags)
        with clock.phase("rollout"):
            waits = ray.get([producer.generate.remote() for producer in self._producers])
        clock.note("rollout: each put", [seconds for some in waits for seconds in some])
        batch = self._sample(clock)
        self._on_workers("old_log_prob workers", batch, clock)
        batch = self._on_driver("old_log_prob driver", batch, clock)
        self._on_workers("ref workers", batch, clock)
        self._on_driver("ref driver", batch, clock)
        batch = self._on_driver("advantage driver", batch, clock)
        self._on_workers("update workers", batch, clock)
        self._on_driver("metrics driver", batch, clock)
        with clock.phase("clear"):
            tq.kv_clear(keys=batch.keys, partition_id=TRAIN)
        sums = {"step": clock.total, "step without rollout": clock.total - clock.ms["rollout"]}
        return sums | clock.ms

    def _sample(self, clock: Clock) -> Any:
        """All trajectories, dealt to the workers so that each gets about as many tokens."""
        with clock.phase("sample"):
            tags = tq.kv_list()[TRAIN]
            prompts = [key for key, tag in tags.items() if tag.get("is_prompt")]
            tq.kv_clear(keys=prompts, partition_id=TRAIN)
        finished = {"is_prompt": True, "status": "finished", "global_steps": GLOBAL_STEP}
        own = {key: tag_of(trajectory(number_of(key))) for key in self._keys}
        _check_tags(tags, dict.fromkeys(self._uids, finished) | own)
        ordered = sorted(self._keys, key=lambda key: (tags[key]["seq_len"], key))
        keys = [key for rank in range(WORKERS) for key in ordered[rank::WORKERS]]
        return tq.KVBatchMeta(keys=keys, tags=[tags[key] for key in keys], partition_id=TRAIN)

    def _on_workers(self, phase: str, batch: Any, clock: Clock) -> None:
        batch.extra_info.update(INFO)
        parts = list(zip(self._workers, batch.chunk(WORKERS), strict=True))
        with clock.phase(phase):
            waits = ray.get([worker.run.remote(phase, part) for worker, part in parts])
        clock.note(f"{phase}: fetch", [fetch for fetch, _ in waits])
        if phase in OUTPUTS:
            clock.note(f"{phase}: write-back", [write for _, write in waits])
        self._cells += sum(ray.get([each.check.remote(part.keys, phase) for each, part in parts]))

    def _on_driver(self, phase: str, batch: Any, clock: Clock) -> Any:
        """Get some columns, put what verl's trainer makes of them; the batch as it is then."""
        keys, names = batch.keys, SELECTED[phase]
        with clock.phase(phase):
            with clock.part(f"{phase}: get"):
                data = tq.kv_batch_get(keys=keys, partition_id=TRAIN, select_fields=names)
            found = data.copy()
            fields = _made_of(data, phase)
            if fields:
                with clock.part(f"{phase}: put"):
                    made = TensorDict(fields, batch_size=len(keys))
                    batch = tq.kv_batch_put(keys=keys, partition_id=TRAIN, fields=made)
        self._cells += compare(found, keys, phase)
        return batch

    def _batch(self, clock: Clock) -> dict[str, float]:
        """A batch of NeMo-RL: one put, named columns by shard, one column written back."""
        keys = [key_of(number) for number in range(len(self._rollouts))]
        fields = list_of_dict_to_tensordict(self._rollouts).exclude(*OUTPUTS[NEMO_WRITE_BACK])
        tags = [{"input_lengths": int(row["input_lengths"])} for row in self._rollouts]
        shards = [(worker, keys[i::WORKERS]) for i, worker in enumerate(self._workers)]
        with clock.phase("NeMo-RL, put"):
            tq.kv_batch_put(keys=keys, partition_id=NEMO, fields=fields, tags=tags)
        with clock.phase(NEMO_GET):
            ray.get([worker.get_named.remote(shard) for worker, shard in shards])
        sums = {"NeMo-RL, put and get": clock.total}
        with clock.phase(NEMO_WRITE_BACK):
            ray.get([worker.write_back.remote(shard) for worker, shard in shards])
        checks = [worker.check.remote(shard, NEMO_GET) for worker, shard in shards]
        self._cells += sum(ray.get(checks))
        found = tq.kv_batch_get(keys=keys, partition_id=NEMO)
        self._cells += compare(found, keys, NEMO_WRITE_BACK)
        tq.kv_clear(keys=keys, partition_id=NEMO)
        return sums | clock.ms


def _made_of(data: TensorDict, phase: str) -> dict[str, torch.Tensor]:
    """The columns that verl's trainer makes in this phase; it pads those it got for itself."""
    mask, made = data["response_mask"], {}
    if phase == "old_log_prob driver":
        for name, source in {"old_log_probs": "log_probs", "entropy": "entropy"}.items():
            made[name] = data[name] = response_from_nested(data.pop(source), mask)
    if phase == "ref driver":
        return {"ref_log_prob": response_from_nested(data["log_probs"], mask)}
    padded = data.to_padded_tensor()
    if phase == "advantage driver":
        advantages = padded["rm_scores"] * 2
        made = {name: response_to_nested(advantages, mask) for name in ("advantages", "returns")}
    return made


def _check_tags(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in found.keys() | expected.keys():
        if found.get(key) != expected.get(key):
            raise ValueError(f"tag of {key}: expected {expected.get(key)}, found {found.get(key)}")
