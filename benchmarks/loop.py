"""The data path of a user's training step without its model.

A producer process sends rows over tcp, 16 in a message. The trainer joins them, adds advantages and
packs micro-batches for two ranks, twice: tokens and labels for log-probabilities, which are put
back into rows; then all columns for a loss, which is put back, too. Columns of the response are put
at the ends of the rows. Both ranks are packed here, one after the other; simple arithmetic stands
in for the model. Next to it is the same path with pickle, and packing by hand.

`python -m benchmarks.packing --only loop` measures it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

import jagcodec
from benchmarks.machine import quieted
from benchmarks.measure import check, summary, times
from benchmarks.rows import TRAJECTORY_OPTIONS, make_trajectories
from benchmarks.trips import process

RANKS, MOST_CELLS, ROWS_OF_A_MESSAGE = 2, 2048, 16
OF_RESPONSE = ("logprobs", "top_ids", "top_logprobs", "loss_mask")
LEARNED = ("input_ids", *OF_RESPONSE, "experts", "image", "advantages", "old")
HOST = "tcp://127.0.0.1"

Packed = dict[str, Any]  # the columns of a micro-batch


class Step(NamedTuple):
    """What a step makes."""

    micro_batches: list[Packed]  # rank by rank
    losses: Sequence[torch.Tensor]  # of each row, one for each token


def loop(rows: int, seconds: float) -> dict[str, Any]:
    """Both ways in turns; the micro-batches and losses of both are compared first."""
    with zmq.Context() as context, context.socket(zmq.PULL) as into:
        into.set_hwm(0)
        into.rcvtimeo = 60_000
        address = f"{HOST}:{into.bind_to_random_port(HOST)}"
        with process(_produce, (rows, address)) as producer:

            def step(way: str) -> Step:
                producer.send(way)
                received = range(0, rows, ROWS_OF_A_MESSAGE)
                return WAYS[way][1]([into.recv_multipart(copy=False) for _ in received])

            calls = {way: partial(step, way) for way in WAYS}
            _same_step(*(call() for call in calls.values()))
            ms = times(calls, seconds)
    return summary(ms, [("jagcodec", "by hand")])


def _produce(connection: Connection, rows: int, address: str) -> None:
    """Send all rows for each way that is asked for, until the other end closes."""
    quieted()
    samples = make_trajectories(rows)
    groups = [samples[i : i + ROWS_OF_A_MESSAGE] for i in range(0, rows, ROWS_OF_A_MESSAGE)]
    with zmq.Context() as context, context.socket(zmq.PUSH) as out:
        out.set_hwm(0)
        out.connect(address)
        try:
            while True:
                encode = WAYS[connection.recv()][0]
                for group in groups:
                    out.send_multipart(encode(group), copy=False)
        except EOFError:
            return


# --- both ways ---------------------------------------------------------------------------------


def _advantages(reward: torch.Tensor, uids: Sequence[str]) -> torch.Tensor:
    """(N,) rewards less the mean of their group."""
    _, index = np.unique(uids, return_inverse=True)
    group = torch.from_numpy(index)
    sums = torch.zeros(int(group.max()) + 1).index_add(0, group, reward)
    return reward - (sums / torch.bincount(group))[group]


def _logprobs(columns: Packed) -> torch.Tensor:
    """(T,) in place of a model: what each cell says about the next token."""
    said: torch.Tensor = (columns["input_ids"] * 31 + columns["labels"]) % 1009
    return -said.float() / 100


def _loss(columns: Packed, tokens: Any) -> torch.Tensor:
    """(T,) losses; `tokens` has the length of each row."""
    advantages = columns["advantages"].repeat_interleave(torch.as_tensor(tokens))
    weight = (columns["old"] - columns["logprobs"]).exp().clamp(max=2.0)
    losses: torch.Tensor = -advantages * weight * columns["loss_mask"]
    return losses


# --- jagcodec ----------------------------------------------------------------------------------


def encoded(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    return jagcodec.encode_rows(rows, **TRAJECTORY_OPTIONS)


def by_jagcodec(messages: Iterable[Any]) -> Step:
    batch = jagcodec.concat_rows([jagcodec.open_wire(frames) for frames in messages])
    advantages = _advantages(batch["reward"], batch["uid"].tolist())
    lengths = batch.row_lengths("input_ids")
    assert lengths is not None  # the column is jagged
    batches = jagcodec.plan_micro_batches(lengths, RANKS, max_tokens=MOST_CELLS)
    tokens = batch.select(["input_ids"])
    old = [
        plan.unpack(_logprobs(columns), shift=1)
        for rank in range(RANKS)
        for plan, columns in batches.pack(tokens, rank, labels_of="input_ids")
    ]
    more = {"advantages": advantages, "old": batches.restore(old)}
    learned = jagcodec.join_columns([batch, more]).select(LEARNED)
    made, losses = [], []
    for rank in range(RANKS):
        packed = batches.pack(learned, rank, labels_of="input_ids", align_end=OF_RESPONSE)
        for plan, columns in packed:
            losses.append(plan.unpack(_loss(columns, plan.padded_lengths)))
            made.append({**columns, "cu_seqlens": plan.cu_seqlens, "at": plan.position_ids()})
    return Step(made, batches.restore(losses).unbind())


# --- by hand -----------------------------------------------------------------------------------


def pickled(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [pickle.dumps(rows, protocol=5)]


def by_hand(messages: Iterable[Any]) -> Step:
    samples = [row for frames in messages for row in pickle.loads(frames[0].buffer)]
    reward = torch.tensor([row["reward"] for row in samples])
    advantages = _advantages(reward, [row["uid"] for row in samples])
    rows: list[dict[str, Any]] = [
        {name: torch.as_tensor(row[name]) for name in ("input_ids", *OF_RESPONSE, "experts")}
        for row in samples
    ]
    lengths = [len(row["input_ids"]) for row in rows]
    batches = jagcodec.plan_micro_batches(lengths, RANKS, max_tokens=MOST_CELLS)
    parts = [part.tolist() for rank in batches for part in rank]
    for part in parts:
        said = torch.split(_logprobs(_tokens(rows, part)), [lengths[i] for i in part])
        for i, values in zip(part, said, strict=True):
            rows[i]["old"] = torch.cat([values.new_zeros(1), values[:-1]])
    made = []
    losses = [reward] * len(rows)  # each is replaced
    for part in parts:
        own = [lengths[i] for i in part]
        columns = {
            **_tokens(rows, part),
            **{name: torch.cat(list(_at_ends(rows, part, name))) for name in OF_RESPONSE},
            "experts": torch.cat([rows[i]["experts"] for i in part], dim=1),
            "image": [samples[i]["image"] for i in part],
            "advantages": advantages[part],
            "old": torch.cat([rows[i]["old"] for i in part]),
            "cu_seqlens": torch.tensor([0, *np.cumsum(own)], dtype=torch.int32),
            "at": torch.cat([torch.arange(n) for n in own]),
        }
        made.append(columns)
        for i, values in zip(part, torch.split(_loss(columns, own), own), strict=True):
            losses[i] = values
    return Step(made, losses)


def _tokens(rows: Sequence[Packed], part: Sequence[int]) -> Packed:
    """Tokens end to end, and as labels the next token of the same row."""
    ids, last = [rows[i]["input_ids"] for i in part], torch.tensor([-100])
    labels = [cells for row in ids for cells in (row[1:], last)]
    return {"input_ids": torch.cat(ids), "labels": torch.cat(labels)}


def _at_ends(rows: Sequence[Packed], part: Sequence[int], name: str) -> Iterator[torch.Tensor]:
    """Cells of responses, each after zeros for its prompt."""
    for i in part:
        cells = rows[i][name]
        yield cells.new_zeros((len(rows[i]["input_ids"]) - len(cells), *cells.shape[1:]))
        yield cells


WAYS: dict[str, tuple[Callable[..., list[Any]], Callable[..., Step]]] = {
    "jagcodec": (encoded, by_jagcodec),
    "by hand": (pickled, by_hand),
}

# --- verifying ---------------------------------------------------------------------------------


def _same_step(ours: Step, by_hand: Step) -> None:
    check(len(ours.micro_batches) == len(by_hand.micro_batches), "micro-batches")
    for mine, other in zip(ours.micro_batches, by_hand.micro_batches, strict=True):
        check(mine.keys() == other.keys(), f"columns {list(mine)} and {list(other)}")
        for name, column in other.items():
            check(_same(mine[name], column), f"column {name!r} of a micro-batch")
    pairs = zip(ours.losses, by_hand.losses, strict=True)
    check(all(torch.equal(mine, other) for mine, other in pairs), "losses in rows")


def _same(mine: Any, other: Any) -> bool:
    if torch.is_tensor(other):
        return mine.dtype == other.dtype and torch.equal(mine, other)
    pairs = zip(mine, other, strict=True)
    return all(a is b or np.array_equal(a, b) for a, b in pairs)
