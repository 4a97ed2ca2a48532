"""A batch through a data plane, stock and with jagcodec: ``python -m benchmarks.planes``.

    ray                 `ray.put` and `ray.get` of six jagged columns, and a message per row
    DataProto           the same of verl's DataProto, 13 padded columns, lengths of GSM8K rollouts
    torch.distributed   a broadcast between two ranks over gloo
    TransferQueue       `kv_batch_put` and `kv_batch_get` of the jagged columns, two storage units
    MRoPE               the same with a column of position ids, rows (3, n)
    images              64 rows of 16 prompts, each with its prompt's image, as a DataProto through
                        Ray and through TransferQueue; and 64 rows that each have another image

The batch of the others is 512 rows. The ways take turns. A round is one trip of a way; the first
rounds of each turn do not count (steady state). Each result is compared with the batch that was
sent, bit for bit, outside the clock. Times are medians. TransferQueue registers a backend when it
starts, and Ray reads its variable when it is imported, so there each turn is its own process tree.
Run this with the environment of the integrations (.venv-integrations).
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

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
ZERO_COPY = "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"
BACKEND = "jagcodec.integrations.transfer_queue"
ENCODE, ELIDE = "JAGCODEC_ENCODE", "elide"
PER_PROMPT, PATCHES, PATCH = 4, (600, 1_250), 1_176  # responses; patches of an image; their floats

Turn = dict[str, Any]  # "rounds": milliseconds by step; "bytes": 0 if unknown, or by step


class Way(NamedTuple):
    """One way to move the batch."""

    steps: Sequence[Step]  # the first one gets None
    same: Callable[[Any], bool]  # whether the last result is the batch
    begin: Callable[[], Any] = lambda: None  # switches this way on
    end: Callable[[], Any] = lambda: None
    size: Callable[[], Any] = int  # bytes that are stored or sent, together or by step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("planes", __doc__)
    names = [*PLANES, "images"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=15, help="of each way, in each turn")
    parser.add_argument("--shape", default="512x1536", help="see benchmarks/shapes.py")
    parser.add_argument("--image-rows", type=int, default=64, help="each of 2.8 to 5.9 MB")
    given = parser.parse_args(arguments)
    quieted()

    def measured() -> dict[str, Any]:
        turns = {x: PLANES[x](given.shape, given.rounds) for x in given.only if x in PLANES}
        of_images = {}
        if "images" in given.only:
            rounds = -(-given.rounds // 5)  # each takes many times as long
            of_images = through_planes_with_images(given.image_rows, rounds)
        return {
            "shape": given.shape,
            "planes": all_medians(turns),
            "image_rows": given.image_rows,
            "images": all_medians(of_images),
        }

    part = partial(with_earlier, given.only) if {*given.only} != {*names} else None
    return report.run("planes", measured, given, part)


def with_earlier(only: Sequence[str], earlier: Mapping[str, Any], made: Any) -> dict[str, Any]:
    """A record that keeps the planes that a run left out; those of the run get their own head."""
    found: dict[str, Any] = {**made, **earlier}
    for part in ("planes", "images"):
        found[part] = {**earlier.get(part, {}), **made[part]}
    head = {
        name: made[name] for name in ("made", "command", "commit", "src", "machine", "versions")
    }
    return {**found, "heads": {**earlier.get("heads", {}), **dict.fromkeys(only, head)}}


def all_medians(turns: Mapping[str, Mapping[str, Sequence[Turn]]]) -> dict[str, Any]:
    return {
        plane: {way: medians(found) for way, found in ways.items()} for plane, ways in turns.items()
    }


def medians(turns: Sequence[Turn]) -> dict[str, Any]:
    """The median of each step over the rounds of all turns."""
    rounds = [ms for turn in turns for ms in turn["rounds"]]
    ms = {step: statistics.median(each[step] for each in rounds) for step in rounds[0]}
    return {"ms": ms, "bytes": turns[-1]["bytes"]}


def measure(
    ways: Mapping[str, Way | Callable[[], Turn]],
    rounds: int,
    turns: int = TURNS,
    before: Callable[[], Any] = bool,
    warm_up: int = WARM_UP,
) -> dict[str, list[Turn]]:
    """The turns of every way, whose results are checked; `before` is called before each round.

    A way that needs a process tree of its own is a function that returns its turn.
    """

    def turn(name: str, way: Way) -> Turn:
        done = []
        way.begin()
        for _ in range(warm_up + rounds):
            before()
            ms, value = walk(way.steps)
            check(way.same(value), f"{name}: the batch did not arrive as it was sent")
            done.append(ms)
            del value
        size = way.size()
        way.end()
        return {"rounds": done[warm_up:], "bytes": size}

    calls = {
        name: partial(turn, name, way) if isinstance(way, Way) else way
        for name, way in ways.items()
    }
    return in_turns(calls, rounds=turns, warm=0)


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


def images(rows: int, per_prompt: int) -> list[dict[str, torch.Tensor]]:
    """`multi_modal_inputs` of rows, of which so many have one image.

    Each row has tensors of its own, as verl's agent loops make them.
    """
    draw = torch.Generator().manual_seed(1)
    prompts = -(-rows // PER_PROMPT)
    sizes = np.random.default_rng(1).integers(*PATCHES, prompts, endpoint=True).tolist()
    found: list[dict[str, torch.Tensor]] = []
    for row in range(rows):
        patches = sizes[row // PER_PROMPT]
        if row % per_prompt == 0:
            pixels = torch.randn(patches, PATCH, generator=draw)
        grid = torch.tensor([[1, patches // 2, 2]])
        found.append({"pixel_values": pixels.clone(), "image_grid_thw": grid})
    return found


# --- planes ------------------------------------------------------------------------------------


def through_ray(shape: str, rounds: int) -> dict[str, list[Turn]]:
    """A TensorDict, an open message, and bare arrays of the same bytes."""
    from jagcodec.integrations.ray import register, unregister

    batch = jagged(shape)
    wire = open_wire(encode(batch))
    arrays = {name: batch[name].values().numpy() for name in PADS}
    with ray_cluster():
        ways: dict[str, Way | Callable[[], Turn]] = {
            "stock": _put_and_get(batch, partial(is_same, batch)),
            f"stock, {ZERO_COPY}=1": partial(run_python, _ZERO_COPY, shape, rounds),
            "jagcodec": _put_and_get(batch, partial(is_same, batch), register, unregister),
            "jagcodec, WireBatch": _put_and_get(
                wire, lambda found: is_same(found.to_tensordict(), batch), register, unregister
            ),
            "bare numpy arrays": _put_and_get(arrays, partial(is_same, arrays)),
        }
        return measure(ways, rounds)


# Ray reads the variable when it is imported.
_ZERO_COPY = f"""
import os
os.environ["{ZERO_COPY}"] = "1"
from benchmarks.planes import with_zero_copy
with_zero_copy()
"""


def with_zero_copy() -> None:
    """Put and get the TensorDict by Ray's own means, in this process; the turn as JSON."""
    quieted()
    shape, rounds = json.loads(sys.argv[1])
    batch = jagged(shape)
    with ray_cluster():
        ways = {"zero copy": _put_and_get(batch, partial(is_same, batch))}
        (turn,) = measure(ways, rounds, turns=1)["zero copy"]
    print(json.dumps(turn))


def through_data_proto(shape: str, rounds: int) -> dict[str, list[Turn]]:
    """verl's DataProto by verl's own methods, and by jagcodec's."""
    from jagcodec.integrations.ray import register, unregister

    data = data_proto(len(lengths_of(shape)))
    put = partial(_put_and_get, data, partial(_is_same_proto, data))
    with ray_cluster():
        ways = {
            "stock": put(),
            "stock, numpy": put(*_WITH_NUMPY),
            "jagcodec": put(register, unregister),
            "jagcodec, narrow": put(partial(register, narrow=True), unregister),
        }
        return measure(ways, rounds)


_WITH_NUMPY = partial(os.environ.__setitem__, METHOD, "numpy"), partial(os.environ.pop, METHOD)


def _is_same_proto(data: Any, found: Any) -> bool:
    return all(
        is_same(getattr(found, part), getattr(data, part))
        for part in ("batch", "non_tensor_batch", "meta_info")
    )


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
    way, shape, rounds, positions = json.loads(sys.argv[1])
    batch = jagged(shape, False, positions)
    with transfer_queue_of(way):
        (turn,) = measure({way: _queued(batch)}, rounds, turns=1)[way]
    print(json.dumps(turn))


@contextmanager
def transfer_queue_of(way: str) -> Iterator[None]:
    """TransferQueue on Ray, with two storage units of its own, or of jagcodec with its options."""
    import transfer_queue

    quieted()
    name, _, options = way.partition(", ")
    if name == "jagcodec":
        os.environ[ENCODE] = options
        importlib.import_module(BACKEND)
    with ray_cluster():
        transfer_queue.init()
        yield
        transfer_queue.close()


def _queued(batch: TensorDict, puts: int = 1) -> Way:
    """Put the rows of a batch in so many puts, and get them in one."""
    import transfer_queue

    keys = [str(row) for row in range(len(batch))]
    rows: dict[str, Any] = {"keys": keys, "partition_id": "bench"}
    each = len(keys) // puts

    def put(_: Any) -> None:
        for at in range(0, len(keys), each):
            some = slice(at, at + each)
            part = batch if puts == 1 else batch[some]
            transfer_queue.kv_batch_put(keys=keys[some], partition_id="bench", fields=part)

    def get(_: Any) -> Any:
        return transfer_queue.kv_batch_get(**rows)

    def same(found: Any) -> bool:
        names: list[Any] = list(batch.keys())
        same = all(is_same(_rows_of(found, name), _rows_of(batch, name)) for name in names)
        transfer_queue.kv_clear(**rows)
        return same

    return Way((("put", put), ("get", get)), same)


def _rows_of(batch: TensorDict, name: str) -> Any:
    column = batch.get(name)
    return column.unbind() if isinstance(column, torch.Tensor) else column.tolist()


# --- images ------------------------------------------------------------------------------------


def through_planes_with_images(rows: int, rounds: int) -> dict[str, dict[str, list[Turn]]]:
    """The turns of each way, for each plane and batch."""
    found = {
        f"Ray, DataProto, {_said(each)}": images_through_ray(rows, rounds, each)
        for each in (PER_PROMPT, 1)
    }
    code = "from benchmarks.planes import queue_of_images; queue_of_images()"
    ways = {
        way: partial(run_python, code, way, rows, rounds)
        for way in ("stock", "jagcodec", f"jagcodec, {ELIDE}")
    }
    by_way = in_turns(ways, rounds=2, warm=0)
    for case in by_way["stock"][0]:
        found[case] = {way: [turn[case] for turn in turns] for way, turns in by_way.items()}
    return found


def _said(per_prompt: int) -> str:
    return f"{per_prompt} rows per image" if per_prompt > 1 else "an image per row"


def images_through_ray(rows: int, rounds: int, per_prompt: int) -> dict[str, list[Turn]]:
    """A DataProto with images, as verl sends it to its workers."""
    from jagcodec.integrations.ray import register, unregister

    data = data_proto(rows)
    data.non_tensor_batch["multi_modal_inputs"] = np.array(images(rows, per_prompt), dtype=object)
    put = partial(_put_and_get, data, partial(_is_same_proto, data))
    with ray_cluster():
        ways = {
            "stock": put(),
            "stock, numpy": put(*_WITH_NUMPY),
            "jagcodec": put(register, unregister),
            f"jagcodec, {ELIDE}": put(partial(register, elide=True), unregister),
        }
        return measure(ways, rounds, warm_up=1)


def queue_of_images() -> None:
    """Put and get rows with images, in this process; the turn of each case as JSON."""
    way, rows, rounds = json.loads(sys.argv[1])
    turns = {}
    with transfer_queue_of(way):
        for per_prompt, puts in ((PER_PROMPT, 1), (PER_PROMPT, rows), (1, 1)):
            batch = jagged(f"{rows}x1536", False)
            batch["multi_modal_inputs"] = NonTensorStack(*images(rows, per_prompt))
            trip = _queued(batch, puts)
            trip = trip._replace(size=partial(_bytes_of_steps, trip))
            said = "one put" if puts == 1 else "a put per row"
            case = f"TransferQueue, {said}, {_said(per_prompt)}"
            (turns[case],) = measure({case: trip}, rounds, turns=1, warm_up=1)[case]
    print(json.dumps(turns))


def _bytes_of_steps(way: Way) -> dict[str, int]:
    """The bytes of all messages that this process sends and receives in each step."""
    from transfer_queue.utils.zmq_utils import ZMQMessage

    sizes: list[int] = []
    serialize, deserialize = ZMQMessage.serialize, ZMQMessage.deserialize

    def size_of(frames: Sequence[Any]) -> int:
        return sum(memoryview(frame).nbytes for frame in frames)

    def sent(message: Any) -> Any:
        frames = serialize(message)
        sizes[-1] += size_of(frames)
        return frames

    def received(frames: Any) -> Any:
        sizes[-1] += size_of(frames)
        return deserialize(frames)

    value = None
    with (
        mock.patch.object(ZMQMessage, "serialize", sent),
        mock.patch.object(ZMQMessage, "deserialize", received),
    ):
        for _, step in way.steps:
            sizes.append(0)
            value = step(value)
    check(way.same(value), "the batch did not arrive as it was sent")
    return {name: size for (name, _), size in zip(way.steps, sizes, strict=True)}


_THROUGH: tuple[Callable[[str, int], dict[str, list[Turn]]], ...] = (
    *(through_ray, through_data_proto, through_torch_distributed, through_transfer_queue),
    partial(through_transfer_queue, positions=True),
)
PLANES = dict(zip(report.PLANES, _THROUGH, strict=True))


if __name__ == "__main__":
    sys.exit(main())
