"""A batch through a data plane, stock and with jagcodec: ``python -m benchmarks.planes``.

    ray                 `ray.put` and `ray.get` of six jagged columns, and a message per row
    DataProto           the same of verl's DataProto, 13 padded columns, lengths of GSM8K rollouts
    torch.distributed   a broadcast between two ranks over gloo
    TransferQueue       `kv_batch_put` and `kv_batch_get` of the jagged columns, two storage units
    MRoPE               the same with a column of position ids, rows (3, n)

The batch is 512 rows. The ways take turns. A round is one trip of a way; the first rounds of each
turn do not count (steady state). Each result is compared with the batch that was sent, bit for bit,
outside the clock. Times are medians. TransferQueue registers a backend when it starts, so there
each turn is its own process tree. Run this with the environment of the integrations
(.venv-integrations).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from benchmarks import report
from benchmarks.machine import quieted, ray_cluster, run_python
from benchmarks.measure import Step, check, in_turns, walk
from benchmarks.shapes import PADS, Batch, lengths_of, make_batch
from jagcodec import encode, open_wire, pack_jagged_fields, stack_or_nest
from jagcodec.data import rollout_table
from jagcodec.testing import is_same

TURNS, WARM_UP = 3, 3
METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"
BACKEND = "jagcodec.integrations.transfer_queue"

Turn = dict[str, Any]  # "rounds": milliseconds by step; "bytes": 0 if unknown


class Way(NamedTuple):
    """One way to move the batch."""

    steps: Sequence[Step]  # the first one gets None
    same: Callable[[Any], bool]  # whether the last result is the batch
    begin: Callable[[], Any] = lambda: None  # switches this way on
    end: Callable[[], Any] = lambda: None
    size: Callable[[], int] = int  # bytes that are stored or sent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("planes", __doc__)
    parser.add_argument("--only", nargs="+", choices=PLANES, default=list(PLANES))
    parser.add_argument("--rounds", type=int, default=15, help="of each way, in each turn")
    parser.add_argument("--shape", default="512x1536", help="see benchmarks/shapes.py")
    given = parser.parse_args(arguments)
    quieted()

    def measured() -> dict[str, Any]:
        planes = {}
        for name in given.only:
            turns = PLANES[name](given.shape, given.rounds)
            planes[name] = {way: medians(found) for way, found in turns.items()}
        return {"shape": given.shape, "planes": planes}

    return report.run("planes", measured, given)


def medians(turns: Sequence[Turn]) -> dict[str, Any]:
    """The median of each step over the rounds of all turns."""
    rounds = [ms for turn in turns for ms in turn["rounds"]]
    ms = {step: statistics.median(each[step] for each in rounds) for step in rounds[0]}
    return {"ms": ms, "bytes": turns[-1]["bytes"]}


def measure(
    ways: Mapping[str, Way], rounds: int, turns: int = TURNS, before: Callable[[], Any] = bool
) -> dict[str, list[Turn]]:
    """The turns of every way, whose results are checked; `before` is called before each round."""

    def turn(name: str) -> Turn:
        way, done = ways[name], []
        way.begin()
        for _ in range(WARM_UP + rounds):
            before()
            ms, value = walk(way.steps)
            check(way.same(value), f"{name}: the batch did not arrive as it was sent")
            done.append(ms)
        size = way.size()
        way.end()
        return {"rounds": done[WARM_UP:], "bytes": size}

    return in_turns({name: partial(turn, name) for name in ways}, rounds=turns, warm=0)


# --- batches -----------------------------------------------------------------------------------


def jagged(shape: str, messages: bool = True, positions: bool = False) -> TensorDict:
    """Six per-token columns as jagged ones, and a message and position ids (3, n) per row."""
    batch = make_batch(lengths_of(shape))
    td = pack_jagged_fields(batch.columns, lengths=batch.lengths, token_aligned_fields=PADS)
    if messages:
        rows = range(len(batch.lengths))
        said = ({"role": "user", "content": "word " * 40, "row": i} for i in rows)
        td["message"] = NonTensorStack(*said)
    if positions:
        ids = [torch.arange(n).repeat(3, 1) for n in batch.lengths.tolist()]
        td["position_ids"] = stack_or_nest(ids, always_nest=True, ragged_dim=2)
    return td


def data_proto(rows: int) -> Any:
    """A DataProto as a PPO step of verl holds it before its update, of made-up values."""
    from verl import DataProto

    table, prompt, response = rollout_table(), 512, 1024
    prompts = torch.from_numpy(table.prompts[:rows, None].clip(max=prompt))
    responses = torch.from_numpy(table.responses[:rows, None].clip(1, response))
    draw = torch.Generator().manual_seed(0)
    cells = torch.arange(prompt + response)
    valid = (cells >= prompt - prompts) & (cells < prompt + responses)
    in_response = valid[:, prompt:]
    ids = torch.randint(0, 151_000, valid.shape, generator=draw).masked_fill(~valid, 151_643)
    floats = (
        *("rollout_log_probs", "old_log_probs", "ref_log_prob", "token_level_scores"),
        *("token_level_rewards", "advantages", "returns"),
    )
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "response_mask": in_response.long(),
            "input_ids": ids,
            "attention_mask": valid.long(),
            "position_ids": (valid.long().cumsum(dim=1) - 1).clip(min=0),
            **{
                name: torch.randn(in_response.shape, generator=draw).masked_fill(~in_response, 0)
                for name in floats
            },
        },
        non_tensors={
            "uid": np.array([f"{row // 8:032x}" for row in range(len(ids))], dtype=object),
            "reward_model": np.array([{"ground_truth": str(row)} for row in range(len(ids))]),
        },
        meta_info={"temperature": 1.0, "global_token_num": valid.sum(dim=1).tolist()},
    )


# --- planes ------------------------------------------------------------------------------------


def through_ray(shape: str, rounds: int) -> dict[str, list[Turn]]:
    """A TensorDict, an open message, and bare arrays of the same bytes."""
    from jagcodec.integrations.ray import register, unregister

    batch = jagged(shape)
    wire = open_wire(encode(batch))
    arrays = {name: batch[name].values().numpy() for name in PADS}
    with ray_cluster():
        ways = {
            "stock": _put_and_get(batch, partial(is_same, batch)),
            "jagcodec": _put_and_get(batch, partial(is_same, batch), register, unregister),
            "jagcodec, WireBatch": _put_and_get(
                wire, lambda found: is_same(found.to_tensordict(), batch), register, unregister
            ),
            "bare numpy arrays": _put_and_get(arrays, partial(is_same, arrays)),
        }
        return measure(ways, rounds)


def through_data_proto(shape: str, rounds: int) -> dict[str, list[Turn]]:
    """verl's DataProto by verl's own methods, and by jagcodec's."""
    from jagcodec.integrations.ray import register, unregister

    data = data_proto(len(lengths_of(shape)))

    def same(found: Any) -> bool:
        return all(
            is_same(getattr(found, part), getattr(data, part))
            for part in ("batch", "non_tensor_batch", "meta_info")
        )

    put = partial(_put_and_get, data, same)
    with ray_cluster():
        ways = {
            "stock": put(),
            "stock, numpy": put(
                partial(os.environ.__setitem__, METHOD, "numpy"), partial(os.environ.pop, METHOD)
            ),
            "jagcodec": put(register, unregister),
            "jagcodec, narrow": put(partial(register, narrow=True), unregister),
        }
        return measure(ways, rounds)


def _put_and_get(value: Any, same: Callable[[Any], bool], *switches: Callable[[], Any]) -> Way:
    import ray
    from ray import cloudpickle

    def size() -> int:
        buffers: list[Any] = []
        stream = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return len(stream) + sum(memoryview(buffer).nbytes for buffer in buffers)

    steps = (("put", lambda _: ray.put(value)), ("get", partial(ray.get, timeout=60)))
    return Way(steps, same, *switches)._replace(size=size)


def through_torch_distributed(shape: str, rounds: int) -> dict[str, list[Turn]]:
    """A broadcast between two ranks over gloo; timed on the receiver, from a barrier on."""
    with tempfile.TemporaryDirectory() as directory:
        ranks = str(Path(directory) / "ranks")
        arguments = (ranks, shape, rounds)
        leader = get_context("spawn").Process(target=_rank, args=(0, *arguments), daemon=True)
        leader.start()
        times = _rank(1, *arguments)
        leader.join()
    return times


def _rank(rank: int, ranks: str, shape: str, rounds: int) -> dict[str, list[Turn]]:
    import torch.distributed as dist

    quieted()
    where: dict[str, Any] = {"init_method": f"file://{ranks}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **where)
    try:
        ways = _broadcasts(make_batch(lengths_of(shape)), leads=rank == 0)
        return measure(ways, rounds, turns=1, before=dist.barrier)
    finally:
        dist.destroy_process_group()


def _broadcasts(batch: Batch, leads: bool) -> dict[str, Way]:
    import torch.distributed as dist

    from jagcodec.integrations.torch_distributed import broadcast

    packed = pack_jagged_fields(batch.columns, lengths=batch.lengths, token_aligned_fields=PADS)
    padded = TensorDict(dict(batch.columns), batch_size=[len(batch.lengths)])

    def objects(value: Any) -> Any:
        holder = [value if leads else None]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def each(_: Any) -> TensorDict:
        # The receiver knows names, shapes and dtypes beforehand.
        found = {n: x if leads else torch.empty_like(x) for n, x in batch.columns.items()}
        for column in found.values():
            dist.broadcast(column, src=0)
        return TensorDict(found, batch_size=padded.batch_size)

    def way(call: Callable[[Any], Any], sent: TensorDict) -> Way:
        return Way((("broadcast", call),), partial(is_same, sent))

    return {
        "broadcast_object_list, jagged": way(lambda _: objects(packed), packed),
        "broadcast_object_list, padded": way(lambda _: objects(padded), padded),
        "broadcast of each padded column": way(each, padded),
        "jagcodec": way(lambda _: broadcast(packed if leads else None, 0), packed),
    }


def through_transfer_queue(
    shape: str, rounds: int, positions: bool = False
) -> dict[str, list[Turn]]:
    """Each way in its own process tree, twice."""
    code = "from benchmarks.planes import queue; queue()"
    given = shape, rounds, positions
    ways = {way: partial(run_python, code, way, *given) for way in ("stock", "jagcodec")}
    return in_turns(ways, rounds=2, warm=0)


def queue() -> None:
    """Put and get all rows, in this process; the turn as JSON on standard output."""
    import importlib

    import transfer_queue

    quieted()
    way, shape, rounds, positions = json.loads(sys.argv[1])
    if way == "jagcodec":
        importlib.import_module(BACKEND)
    batch = jagged(shape, False, positions)
    keys = [str(row) for row in range(len(batch))]
    rows: dict[str, Any] = {"keys": keys, "partition_id": "bench"}

    def same(found: Any) -> bool:
        same = all(is_same(found[name].unbind(), batch[name].unbind()) for name in batch.keys())  # noqa: SIM118
        transfer_queue.kv_clear(**rows)
        return same

    with ray_cluster():
        transfer_queue.init()
        steps = (
            ("put", lambda _: transfer_queue.kv_batch_put(**rows, fields=batch)),
            ("get", lambda _: transfer_queue.kv_batch_get(**rows)),
        )
        (turn,) = measure({way: Way(steps, same)}, rounds, turns=1)[way]
        transfer_queue.close()
    print(json.dumps(turn))


_THROUGH: tuple[Callable[[str, int], dict[str, list[Turn]]], ...] = (
    *(through_ray, through_data_proto, through_torch_distributed, through_transfer_queue),
    partial(through_transfer_queue, positions=True),
)
PLANES = dict(zip(report.PLANES, _THROUGH, strict=True))


if __name__ == "__main__":
    sys.exit(main())
