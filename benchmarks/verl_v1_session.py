"""One turn of `benchmarks.verl_v1` in its own process tree: Ray, TransferQueue, and all actors.

The actors call verl's own helpers. No model runs: its outputs are made of the tokens. Workers and
the driver compare every cell that they got, outside the clock.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import tensordict
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.transferqueue_utils import tqbridge
from verl.workers.utils.padding import response_from_nested, response_to_nested

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
ONE_BY_ONE = 32  # puts of a row, and of a tag
TRAIN, OTHER, NEMO = "train", "one by one", "nemo"  # partitions
INFO = {"calculate_entropy": True, "compute_loss": False, "temperature": 1.0}


def main() -> None:
    """Run the turn that the first argument describes in JSON, and print what it found in JSON."""
    asked = json.loads(sys.argv[1])
    if asked["module"]:
        importlib.import_module(asked["module"])
    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    ray.init(address="local", num_cpus=4, **options)
    try:
        found = Driver(asked["prompts"]).run(asked["rounds"])
    finally:
        tq.close()
        ray.shutdown()
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
        puts = [asyncio.create_task(_put_row(TRAIN, row)) for row in self._puts[prompt]]
        seconds = await asyncio.gather(*puts)
        await tq.async_kv_put(key=uid, partition_id=TRAIN, tag={"status": "finished"})
        return seconds

    async def one_by_one(self) -> dict[str, tuple[float, float]]:
        """By key, the seconds of a put of its row and of its tag, one after another."""
        found = {}
        for row in [row for puts in self._puts.values() for row in puts][:ONE_BY_ONE]:
            (key,) = row["keys"]
            seconds = await _put_row(OTHER, row)
            start = time.perf_counter()
            await tq.async_kv_put(key=key, partition_id=OTHER, tag={"status": "seen"})
            found[key] = seconds, time.perf_counter() - start
        return found


async def _put_row(partition: str, row: dict[str, Any]) -> float:
    start = time.perf_counter()
    await tq.async_kv_batch_put(partition_id=partition, **row)
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
    """Milliseconds of the phases of a round, and of the CPU in them by kind of process."""

    def __init__(self, processes: dict[str, list[int]]) -> None:
        self._processes = processes
        self._cpu = dict.fromkeys(processes, 0.0)
        self.total = 0.0
        self.ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._cpu_now()
        with self.part(name):
            yield
        self.total += self.ms[name]
        for kind, now in self._cpu_now().items():
            self._cpu[kind] += now - before[kind]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.ms[name] = 0.0  # stands before its own parts
        start = time.perf_counter()
        yield
        self.ms[name] = (time.perf_counter() - start) * 1e3

    def note(self, name: str, seconds: Sequence[float]) -> None:
        self.ms[name] = statistics.mean(seconds) * 1e3

    def cpu(self, what: str) -> dict[str, float]:
        return {
            **{f"{what}: {kind}": ms for kind, ms in self._cpu.items()},
            f"{what}: all": sum(self._cpu.values()),
        }

    def _cpu_now(self) -> dict[str, float]:
        return {kind: sum(map(_cpu_ms, pids)) for kind, pids in self._processes.items()}


def _cpu_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


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
        actors = {
            "producers": self._producers,
            "workers": self._workers,
            "controller": [ray.get_actor("TransferQueueController", namespace="transfer_queue")],
            "storage": [ray.get_actor(f"TransferQueueStorageUnit#{i}") for i in range(UNITS)],
        }

        def identity(actor: Any) -> tuple[int, str, str | None]:
            return os.getpid(), type(actor).__name__, tensordict.__version__

        self._processes = {"driver": [os.getpid()]}
        for kind, some in actors.items():
            found = ray.get([actor.__ray_call__.remote(identity) for actor in some])
            pids, classes, versions = zip(*found, strict=True)
            if set(versions) != {tensordict.__version__}:
                raise RuntimeError(f"{kind}: expected the driver's tensordict, found {versions}")
            self._processes[kind] = list(pids)
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
        return what(Clock(self._processes))

    def _step(self, clock: Clock) -> dict[str, float]:
        """A step of verl, and then puts one by one."""
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
        self._one_by_one(clock)
        sums = {"step": clock.total, "step without rollout": clock.total - clock.ms["rollout"]}
        return {**sums, **clock.ms, **clock.cpu("CPU of the step")}

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

    def _one_by_one(self, clock: Clock) -> None:
        waits = ray.get(self._producers[0].one_by_one.remote())
        clock.note("one-row put", [put for put, _ in waits.values()])
        clock.note("tag put", [put for _, put in waits.values()])
        keys = list(waits)
        tags = {key: tag_of(trajectory(number_of(key))) | {"status": "seen"} for key in keys}
        _check_tags(tq.kv_list()[OTHER], tags)
        self._cells += compare(tq.kv_batch_get(keys=keys, partition_id=OTHER), keys, "rollout")
        tq.kv_clear(keys=keys, partition_id=OTHER)

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
        return {**sums, **clock.ms, **clock.cpu("CPU of NeMo-RL's batch")}


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
