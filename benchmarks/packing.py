"""Plans of packed rows, compared with verl's own functions and with packing by hand.

    python -m benchmarks.packing [--only step loop] [--seconds 8]

    layout     a plan, and six columns of it for one rank (tp 2, cp 2), compared with verl's
               `preprocess_thd_engine`, which verl calls once for each column
    planner    8,192 rows in micro-batches for 64 ranks, compared with verl's Karmarkar-Karp
    step       the data path of one step over tcp in one process: rows are sent in messages and
               joined, advantages are added, and micro-batches are packed; compared with pickle
               and packing by hand
    loop       a user's step without its model: rows of another process, two ranks, results put
               back into rows (`benchmarks/loop.py`); compared with pickle and packing by hand
    response   a step in memory whose log-probabilities, mask and top-k are of the response alone
               (`align_end`, `last`), compared with columns that the producer made full length

verl's functions are those of the installed package. Megatron, which they ask for the sizes of its
groups, is replaced by those sizes. Every cell is compared once, outside the clock.
"""

from __future__ import annotations

import importlib.util
import logging
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

import jagcodec
from benchmarks import report
from benchmarks.loop import loop
from benchmarks.machine import quieted
from benchmarks.measure import check, summary, times

TP, CP, COLUMNS = 2, 2, 6
LAYOUTS = {
    "a plan and 6 columns, 8 rows": (8, 1024, 3072),
    "a plan and 6 columns, 64 rows": (64, 512, 1536),
}
PLANNED_ROWS = "8,192 rows for 64 ranks"
PLANNED = {PLANNED_ROWS: (8192, 64)}
MAX_TOKENS = 32_768
COST = (24_576, 1)  # of a row of n tokens: 24,576 n + n², as verl has it
# Rows, the shortest and the longest response, rows of a message, tokens of a micro-batch.
STEPS = {
    "a step of 512 rows": (512, 100, 3000, 8, 16_384),
    "a step of 64 rows": (64, 50, 110, 8, 1600),
}
LOOPS = {"a user's step of 512 rows": (512,), "a user's step of 64 rows": (64,)}
RESPONSES = {
    "response columns, 512 rows": (512, 100, 3000, 16_384),
    "response columns, 64 rows": (64, 50, 110, 1600),
}
PER_TOKEN = ["input_ids", "logprobs", "mask"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("packing", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="measure these parts alone")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each shape, about")
    options = parser.parse_args(arguments)
    if options.write and options.only:
        raise SystemExit("a record holds every part: leave out --only")
    quieted()

    def measured() -> dict[str, Any]:
        parts = {
            name: measure(*shape, options.seconds)
            for part in options.only or PARTS
            for measure, shapes in [PARTS[part]]
            for name, shape in shapes.items()
        }
        planned = parts.get(PLANNED_ROWS, {}).pop("planned", {})
        return {"parts": parts, "planned": planned}

    return report.run("packing", measured, options)


# --- layout ------------------------------------------------------------------------------------


def layout(rows: int, least: int, most: int, seconds: float) -> dict[str, Any]:
    """One rank's cells of six columns."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(least, most, rows)
    values = [torch.from_numpy(rng.integers(0, 150_000, lengths.sum())) for _ in range(COLUMNS)]
    splits = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    columns = {
        f"column {i}": torch.nested.nested_tensor_from_jagged(each, splits)
        for i, each in enumerate(values)
    }
    theirs = preprocess_thd_engine(cp_rank=1)

    def planned() -> dict[str, Any]:
        plan = jagcodec.plan_packing(lengths, row_multiple=2 * CP * TP, cp_size=CP)
        made: dict[str, Any] = plan.pack(columns, cp_rank=1)
        return made

    def by_verl() -> dict[str, torch.Tensor]:
        return {name: theirs(column)[0][0] for name, column in columns.items()}

    ours = planned()
    for name, column in by_verl().items():
        check(torch.equal(ours[name], column), f"{rows} rows, {name}")
    ms = times({"jagcodec": planned, "verl": by_verl}, seconds)
    return summary(ms, [("verl", "jagcodec")])


def preprocess_thd_engine(cp_rank: int) -> Callable[..., Any]:
    """verl's function, of a rank of tp 2 and cp 2, without what it logs for each row."""
    package = importlib.util.find_spec("verl")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("benchmarks.packing needs verl: make record installs it")
    path = Path(package.submodule_search_locations[0], "models", "mcore", "util.py")
    spec = importlib.util.spec_from_file_location("verl_mcore_util", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _megatron(cp_rank):
        spec.loader.exec_module(module)
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
    module.logger.setLevel(logging.ERROR)
    function: Callable[..., Any] = module.preprocess_thd_engine
    return function


@contextmanager
def _megatron(cp_rank: int) -> Iterator[None]:
    """In the place of Megatron: the sizes of its groups, and a class that keeps its arguments."""
    state: Any = types.ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_world_size = lambda: TP
    state.get_context_parallel_world_size = lambda: CP
    state.get_context_parallel_rank = lambda: cp_rank
    params: Any = types.ModuleType("megatron.core.packed_seq_params")
    params.PackedSeqParams = types.SimpleNamespace
    core: Any = types.ModuleType("megatron.core")
    core.parallel_state, core.packed_seq_params = state, params
    modules = {"megatron": types.ModuleType("megatron"), core.__name__: core}
    modules |= {state.__name__: state, params.__name__: params}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


# --- planner -----------------------------------------------------------------------------------


def planner(rows: int, ranks: int, seconds: float) -> dict[str, Any]:
    """Micro-batches of many rows; verl's function balances the rows over the ranks alone."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(1500), 0.8, rows).astype(np.int64) + 1, 16_384)
    costs = (COST[0] * lengths + COST[1] * lengths**2).tolist()

    def planned() -> Any:
        return jagcodec.plan_micro_batches(lengths, ranks, max_tokens=MAX_TOKENS, cost=COST)

    def by_verl() -> Any:
        return get_seqlen_balanced_partitions(costs, ranks, equal_size=False)

    batches = planned()
    check(np.array_equal(np.sort(batches.order), np.arange(rows)), "every row once")
    heaviest = max(lengths[part].sum() for rank in batches for part in rank)
    check(heaviest <= MAX_TOKENS, f"a micro-batch of {heaviest} tokens")
    ms = times({"jagcodec": planned, "verl": by_verl}, seconds)
    return {**summary(ms, [("verl", "jagcodec")]), "planned": batches.report()}


# --- step --------------------------------------------------------------------------------------


def step(
    rows: int, least: int, most: int, group: int, budget: int, seconds: float
) -> dict[str, Any]:
    """From rows to packed micro-batches."""
    samples = _samples(rows, least, most)
    groups = [samples[i : i + group] for i in range(0, rows, group)]
    context = zmq.Context()
    with context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as into:
        out.set_hwm(0)
        into.set_hwm(0)
        into.connect(f"tcp://127.0.0.1:{out.bind_to_random_port('tcp://127.0.0.1')}")

        def sent(messages: Sequence[Sequence[Any]]) -> list[Any]:
            for message in messages:
                out.send_multipart(message, copy=False)
            return [into.recv_multipart(copy=False) for _ in messages]

        def ours() -> list[dict[str, Any]]:
            messages = [jagcodec.encode_rows(rows, same_length=PER_TOKEN) for rows in groups]
            batch = jagcodec.concat_rows([jagcodec.open_wire(frames) for frames in sent(messages)])
            reward = batch["reward"]
            batch = jagcodec.join_columns([batch, {"advantages": reward - reward.mean()}])
            lengths = batch.row_lengths("input_ids")
            batches = jagcodec.plan_micro_batches(lengths, max_tokens=budget)
            return [
                {**columns, "cu_seqlens": plan.cu_seqlens, "positions": plan.position_ids()}
                for plan, columns in batches.pack(batch)
            ]

        def by_hand() -> list[dict[str, Any]]:
            messages = sent([[pickle.dumps(rows, 5)] for rows in groups])
            received = [row for frames in messages for row in pickle.loads(frames[0].buffer)]
            return _packed_by_hand(received, budget)

        _check_step(ours(), by_hand(), samples)
        ms = times({"jagcodec": ours, "by hand": by_hand}, seconds)
    return summary(ms, [("jagcodec", "by hand")])


def _samples(rows: int, least: int, most: int) -> list[dict[str, Any]]:
    """Rows as engines make them: arrays, a reward and a uid."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(rows):
        n = int(rng.integers(5, 60) + rng.integers(least, most))
        arrays = (rng.integers(0, 150_000, n), rng.random(n, np.float32), rng.random(n) < 0.5)
        row = dict(zip(PER_TOKEN, arrays, strict=True))
        samples.append({**row, "reward": float(rng.random()), "uid": f"u{i // 8}"})
    return samples


def _packed_by_hand(rows: Sequence[Mapping[str, Any]], budget: int) -> list[dict[str, Any]]:
    lengths = [len(row["input_ids"]) for row in rows]
    reward = torch.tensor([row["reward"] for row in rows])
    advantages = reward - reward.mean()
    made = []
    for part in jagcodec.plan_micro_batches(lengths, max_tokens=budget)[0]:
        columns: dict[str, Any] = {
            name: torch.from_numpy(np.concatenate([rows[i][name] for i in part]))
            for name in PER_TOKEN
        }
        own = [lengths[i] for i in part]
        columns["cu_seqlens"] = torch.tensor([0, *np.cumsum(own)], dtype=torch.int32)
        columns["positions"] = torch.cat([torch.arange(n) for n in own])
        columns["advantages"] = advantages[torch.from_numpy(part)]
        made.append(columns)
    return made


def _check_step(
    ours: Sequence[Mapping[str, Any]],
    by_hand: Sequence[Mapping[str, Any]],
    samples: Sequence[Any],
) -> None:
    check(len(ours) == len(by_hand), f"{len(ours)} and {len(by_hand)} micro-batches")
    for mine, other in zip(ours, by_hand, strict=True):
        for name, column in other.items():
            check(torch.equal(mine[name], column), f"column {name!r} of {len(samples)} rows")


# --- columns of the response -------------------------------------------------------------------

OF_RESPONSE = ["logprobs", "mask", "top"]


def response(rows: int, least: int, most: int, budget: int, seconds: float) -> dict[str, Any]:
    """From rows to packed micro-batches, and log-probabilities of the response back in rows."""
    rng = np.random.default_rng(0)
    short: list[dict[str, Any]] = []
    full: list[dict[str, Any]] = []
    for i in range(rows):
        prompt, n = int(rng.integers(5, 60)), int(rng.integers(least, most))
        own = {"input_ids": rng.integers(0, 150_000, prompt + n), "uid": f"u{i // 8}"}
        ends = rng.random(n, np.float32), rng.random(n) < 0.5, rng.random((n, 5), np.float32)
        parts = dict(zip(OF_RESPONSE, ends, strict=True))
        whole = {
            name: np.concatenate([np.zeros((prompt, *part.shape[1:]), part.dtype), part])
            for name, part in parts.items()
        }
        short.append({**own, **parts})
        full.append({**own, **whole})
    lengths = np.array([len(row["logprobs"]) for row in short])

    def trip(samples: Sequence[Mapping[str, Any]], at_end: Sequence[str] = ()) -> list[Any]:
        batch = jagcodec.open_wire(jagcodec.encode_rows(samples))
        tokens = batch.row_lengths("input_ids")
        assert tokens is not None  # the column is jagged
        batches = jagcodec.plan_micro_batches(tokens, max_tokens=budget)
        packed = batches.pack(batch, labels_of="input_ids", align_end=at_end)
        found = []
        for (plan, columns), step in zip(packed, batches[0], strict=True):
            last = lengths[step] if at_end else None
            found.append(plan.unpack(columns["logprobs"], last=last))
        return [*packed, batches.restore(found)]

    sides = {
        "of the response": lambda: trip(short, OF_RESPONSE),
        "full length": lambda: trip(full),
    }
    (*ours, ends_alone), (*others, wholes) = sides["of the response"](), sides["full length"]()
    for (_, mine), (_, other) in zip(ours, others, strict=True):
        for name in ("labels", *OF_RESPONSE):
            check(torch.equal(mine[name], other[name]), f"column {name!r}")
    for mine, other, n in zip(ends_alone.unbind(), wholes.unbind(), lengths.tolist(), strict=True):
        check(torch.equal(mine, other[-n:]), "log-probabilities in rows")
    return summary(times(sides, seconds), [("of the response", "full length")])


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], Mapping[str, Any]]] = {
    "layout": (layout, LAYOUTS),
    "planner": (planner, PLANNED),
    "step": (step, STEPS),
    "loop": (loop, LOOPS),
    "response": (response, RESPONSES),
}


if __name__ == "__main__":
    sys.exit(main())
