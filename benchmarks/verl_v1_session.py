"""One turn of `benchmarks.verl_v1` in its own process tree: Ray, TransferQueue, and all actors.

The actors call verl's own helpers. No model runs: its outputs are made of the tokens. Workers and
the driver compare every cell that they got, outside the clock.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import json
import random
import statistics
import sys
import time
import uuid
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
from jagcodec.testing import is_same

PRODUCERS, WORKERS, UNITS = 2, 4, 2
WARM_UP = 1  # rounds
TRAIN, NEMO = "train", "nemo"  # partitions
INFO = {"calculate_entropy": True, "compute_loss": False, "temperature": 1.0}
SESSIONS = 8  # trajectories of one prompt
PROMPT, TOTAL = (100, 400), (500, 3000)  # tokens, the fewest and the most
VOCABULARY = 152_000
GLOBAL_STEP = 7
NEMO_GET, NEMO_WRITE_BACK = "NeMo-RL, get", "NeMo-RL, write-back"

Row = dict[str, Any]


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


# --- the rows, and what every reader must find there ----------------------------------------------

# What the training workers compute in a phase: by column, the factor from a token to its value.
OUTPUTS = {
    "old_log_prob workers": {"log_probs": -1e-5, "entropy": 1e-5},
    "ref workers": {"log_probs": -2e-5},
    NEMO_WRITE_BACK: {"prev_logprobs": -1e-5},
}
# The columns that are read in a phase; in other phases, all of them.
SELECTED = {
    phase: names.split()
    for phase, names in {
        "old_log_prob driver": "entropy log_probs response_mask responses rollout_log_probs",
        "ref driver": "log_probs response_mask",
        "advantage driver": (
            "uid response_mask rm_scores rollout_log_probs old_log_probs ref_log_prob"
        ),
        "metrics driver": (
            "prompts responses response_mask advantages returns rm_scores num_turns"
        ),
        NEMO_GET: "input_ids input_lengths token_mask sample_mask generation_logprobs",
    }.items()
}


def uid_of(prompt: int) -> str:
    return str(uuid.UUID(int=prompt))


def key_of(number: int) -> str:
    """The key of a trajectory, as verl writes it: of the first output of a session."""
    prompt, session = divmod(number, SESSIONS)
    return f"{uid_of(prompt)}_{session}_0"


def number_of(key: str) -> int:
    uid, session, _ = key.split("_")
    return uuid.UUID(uid).int * SESSIONS + int(session)


@functools.cache
def trajectory(number: int) -> Row:
    """A text trajectory as verl's agent loops put it: 8 columns of tensors, 16 of objects."""
    prompt, session = divmod(number, SESSIONS)
    shared, own = random.Random(f"prompt {prompt}"), random.Random(f"trajectory {number}")
    prompts = _tokens(shared.randint(*PROMPT), prompt)
    responses = _tokens(own.randint(*TOTAL) - len(prompts), number)
    mask = torch.ones_like(responses)
    mask[len(mask) // 3 :][:20] = 0  # the answer of a tool
    score = own.random()
    scores = torch.zeros(len(responses))
    scores[-1] = score
    verdict = {"score": score, "acc": score > 0.5, "pred": str(number)}
    question = " ".join(str(shared.randrange(10**6)) for _ in range(60))
    seconds = {"generate_sequences": own.uniform(1, 30), "tool_calls": own.random()}
    return {
        "num_turns": own.randint(2, 6),
        "metrics": {**seconds, "compute_score": 0.01, "num_preempted": 0},
        "extra_fields": {
            **{"turn_scores": [], "tool_rewards": [], "reward_extra_info": verdict},
            **dict.fromkeys(["min_global_steps", "max_global_steps"], GLOBAL_STEP),
        },
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": responses * -3e-5,
        "rm_scores": scores,
        "raw_prompt": [
            {"role": "system", "content": "Think step by step."},
            {"role": "user", "content": question},
        ],
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"ground_truth": str(shared.randrange(1000)), "style": "rule"},
        "extra_info": {"answer": question[:120], "index": prompt, "split": "train"},
        "index": prompt,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        "uid": uid_of(prompt),
        "agent_name": "single_turn_agent",
        "global_steps": GLOBAL_STEP,
        "session_id": session,
        "loss_mask": mask,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses)),
        "multi_modal_inputs": {},
    }


def tag_of(row: Row) -> dict[str, Any]:
    """The tag that verl's agent loops put with a trajectory."""
    lengths = {"prompt_len": len(row["prompts"]), "response_len": len(row["responses"])}
    steps = dict.fromkeys(["global_steps", "min_global_steps", "max_global_steps"], GLOBAL_STEP)
    return {"status": "success", **lengths, "seq_len": sum(lengths.values()), **steps}


@functools.cache
def rollout(number: int) -> Row:
    """The same trajectory in the columns of NeMo-RL's data plane, the written-back one included."""
    row = trajectory(number)
    unseen = torch.zeros_like(row["prompts"])
    return {
        "input_ids": row["input_ids"],
        "generation_logprobs": torch.cat([unseen.float(), row["rollout_log_probs"]]),
        "token_mask": torch.cat([unseen, row["response_mask"]]),
        "input_lengths": torch.tensor(len(row["input_ids"])),
        "sample_mask": torch.tensor(1.0),
        "total_reward": row["rm_scores"][-1],
        "task_name": row["ability"],
        "extra_env_info": {**row["reward_model"], **row["extra_info"]},
        "content": row["raw_prompt"][1]["content"],
        **outputs(row["input_ids"], NEMO_WRITE_BACK),
    }


def outputs(ids: torch.Tensor, phase: str) -> dict[str, torch.Tensor]:
    """What a model returns in this phase: one float32 per token, which the token decides."""
    return {name: ids.float() * factor for name, factor in OUTPUTS[phase].items()}


def _of_response(row: Row, name: str) -> torch.Tensor:
    """The cells that predict the response: they begin one to its left."""
    cells: torch.Tensor = row[name]
    return cells[len(row["prompts"]) - 1 : -1]


# What the phases of a step write into a row that holds what all phases before have written.
WRITTEN: dict[str, Callable[[Row], Row]] = {
    "rollout": lambda row: {},
    "old_log_prob workers": lambda row: outputs(row["input_ids"], "old_log_prob workers"),
    "old_log_prob driver": lambda row: {
        "old_log_probs": _of_response(row, "log_probs"),
        "entropy": _of_response(row, "entropy"),
    },
    "ref workers": lambda row: outputs(row["input_ids"], "ref workers"),
    "ref driver": lambda row: {"ref_log_prob": _of_response(row, "log_probs")},
    "advantage driver": lambda row: dict.fromkeys(["advantages", "returns"], row["rm_scores"] * 2),
}


def expected(key: str, phase: str) -> Row:
    """What a reader in this phase must find in a row."""
    row = dict((rollout if phase.startswith("NeMo-RL") else trajectory)(number_of(key)))
    for earlier, written in WRITTEN.items():
        if earlier == phase or phase.startswith("NeMo-RL"):
            break
        row |= written(row)
    return {name: row[name] for name in SELECTED.get(phase, row)}


def compare(found: TensorDict, keys: Sequence[str], phase: str) -> int:
    """The number of cells of a batch that was read in this phase; an error if one is wrong."""
    rows = [expected(key, phase) for key in keys]
    if set(found.keys()) != set(rows[0]):
        raise ValueError(f"{phase}: expected {set(rows[0])}, found {set(found.keys())}")
    for name, first in rows[0].items():
        column, place = found.get(name), f"{phase}: column {name!r}"
        if _kind(column) != _kind_of_cells(first):
            raise ValueError(f"{place}: expected {_kind_of_cells(first)}, found {_kind(column)}")
        cells = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
        for key, row, cell in zip(keys, rows, cells, strict=True):
            if not is_same(cell, row[name]):
                raise ValueError(f"{place}: {key}: expected {row[name]!r}, found {cell!r}")
    return len(keys) * len(rows[0])


def _kind(column: Any) -> str:
    if isinstance(column, torch.Tensor):
        return f"{'nested' if column.is_nested else 'dense'} {column.layout}"
    return type(column).__name__


def _kind_of_cells(cell: Any) -> str:
    """The kind of column in which TransferQueue returns such cells."""
    if isinstance(cell, torch.Tensor):
        return "nested torch.jagged" if cell.dim() else "dense torch.strided"
    return "NonTensorStack"


def _tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
