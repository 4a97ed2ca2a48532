"""Many producer processes, one consumer, and an account of every batch.

A producer draws batches of jagged columns and Python objects and numbers them; the consumer checks
that none is missing, twice or out of turn, and a CRC-32 of its rows that was computed before the
codec saw them. `soak` sends by PUSH and PULL; `kills` has every batch acknowledged, and kills
producers all the while.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import statistics
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from benchmarks.trips import quieted
from jagcodec import decode, encode, pack_jagged_fields
from jagcodec.errors import TransportError, TransportTimeoutError
from jagcodec.integrations.zmq import recv_frames, send_frames

FAULTS = ("lost", "duplicated", "out_of_turn", "damaged")
WAIT = 0.25  # seconds that a producer waits to send before it counts a time-out
ANSWER = 10.0  # seconds that it waits for an acknowledgement before it sends again
SILENCE = 60.0  # seconds without any message after which producers are taken for dead
SAMPLE = 0.5  # seconds between two looks at memory
HOST = "tcp://127.0.0.1"
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        producers: Processes that send.
        seconds: How long they do.
        high_water: Messages that either side of a connection holds.
        rows: At most, of a batch.
        width: Longest row.
        pause: Seconds that the consumer stops, every `pause_every` seconds.
        pause_every: See `pause`.
        kill_every: Of `kills`: seconds between two of them.
    """

    producers: int = 64
    seconds: float = 150.0
    high_water: int = 2
    rows: int = 64
    width: int = 1024
    pause: float = 1.0
    pause_every: float = 10.0
    kill_every: float = 0.5


def soak(plan: Plan) -> dict[str, Any]:
    """Producers push with bounded queues, and wait while a queue is full.

    Returns:
        The plan, what came, what did not, and how memory went.
    """
    with _bound(plan, zmq.PULL) as (socket, port), _Producers() as producers:
        for number in range(plan.producers):
            producers.start(number, _push, plan, number, port)
        ledger = _pull(plan, socket)
        codes = producers.ended()
    return {**ledger.report(plan), "exit_codes": codes}


def kills(plan: Plan) -> dict[str, Any]:
    """Producers wait for an acknowledgement of each batch; one after another is killed by SIGKILL.

    The successor of a killed one asks which batch is next, and goes on there.

    Returns:
        As `soak`; `kills` of them, `again` batches that came a second time, or whose successor
        makes them a second time, because the killed one did not live to see the answer, and
        `unanswered` ones, because it was not there.
    """
    with _bound(plan, zmq.ROUTER) as (socket, port), _Producers() as producers:
        starts = {n: (n, _offer, plan, n, port) for n in range(plan.producers)}
        for arguments in starts.values():
            producers.start(*arguments)
        ledger, counts = Ledger(), dict.fromkeys(("kills", "again", "unanswered"), 0)
        turns = random.Random(0)
        heard: dict[int, Any] = {}  # the clock runs once all of them are there
        start = killed = time.monotonic()
        while len(ledger.ends) < plan.producers:
            try:
                envelope, frames = recv_frames(socket, timeout=SILENCE)
            except TransportTimeoutError:
                break  # the report says who did not finish
            message = decode(frames)
            if not speaks(heard, message, envelope):
                counts["again"] += 1
                continue
            if "sent" in message or message.get("sequence", -1) >= ledger.next_of(message):
                ledger.note(message)
            elif "sequence" in message:
                counts["again"] += 1  # else it asks which one is next
            now = time.monotonic()
            if len(heard) < plan.producers:
                start = killed = now
            over = now > start + plan.seconds
            try:
                answer = {"next": ledger.next_of(message), "over": over}
                send_frames(socket, encode(answer), envelope=envelope, timeout=WAIT)
            except TransportError:
                counts["unanswered"] += 1
            if killed + plan.kill_every < now and not over:
                victim = turns.randrange(plan.producers)
                producers.kill(victim)
                producers.start(*starts[victim])
                counts["kills"] += 1
                killed = now
            ledger.memory.look()
        ledger.seconds = time.monotonic() - start
        codes = producers.ended()
    report = {**ledger.report(plan), **counts, "exit_codes": codes}
    del report["tokens_sent"]  # nobody counted those of the dead
    return report


def speaks(heard: dict[int, Any], message: Mapping[str, Any], envelope: Any) -> bool:
    """Whether a message is of the last process of its producer, which asks before it sends.

    What a killed one left on the way may arrive once its successor was told which batch is next.
    """
    number = message["producer"]
    if "sequence" not in message and "sent" not in message:
        heard[number] = envelope
    return bool(heard.get(number) == envelope)


def faults(report: Mapping[str, Any]) -> int:
    """Batches that are lost, doubled, out of turn or damaged, and producers that did not finish."""
    unfinished: int = report["plan"]["producers"] - report["finished"]
    wrong: int = sum(report[name] for name in FAULTS)
    return unfinished + wrong


@contextmanager
def _bound(plan: Plan, kind: int) -> Iterator[tuple[zmq.Socket[Any], int]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.RCVHWM, plan.high_water)
        socket.setsockopt(zmq.LINGER, 0)
        yield socket, socket.bind_to_random_port(HOST)


class _Producers:
    """Processes; whatever happens, they end with the run."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.trips", "jagcodec.integrations.zmq"])
        self._processes: dict[int, Any] = {}
        self._codes: list[str] = []

    def __enter__(self) -> _Producers:
        return self

    def start(self, number: int, work: Any, *arguments: Any) -> None:
        process = self._context.Process(target=work, args=arguments, daemon=True)
        process.start()
        self._processes[number] = process

    def kill(self, number: int) -> None:
        process = self._processes.pop(number)
        process.kill()
        process.join()
        self._codes.append(str(process.exitcode))

    def ended(self) -> dict[str, int]:
        """How often processes ended with which exit code; a time-out for those that do not end."""
        for process in self._processes.values():
            process.join(SILENCE)
            self._codes.append(str(process.exitcode))
        return {code: self._codes.count(code) for code in sorted(set(self._codes))}

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()


# --- batches -----------------------------------------------------------------------------------


def make_message(plan: Plan, producer: int, sequence: int) -> tuple[dict[str, Any], int]:
    """A message to send, and its tokens. Its checksum is of rows that no codec has seen."""
    rng = np.random.default_rng([producer, sequence])
    count = int(rng.integers(0, plan.rows + 1))
    rows = [rng.integers(0, 152_000, int(n)) for n in rng.integers(0, plan.width + 1, count)]
    texts = [f"{producer}/{sequence}/{i}" if i % 3 else None for i in range(count)]
    crc = 0
    for row in rows:
        crc = zlib.crc32(row.tobytes(), zlib.crc32(str(len(row)).encode(), crc))
    crc = zlib.crc32(repr(texts).encode(), crc)

    ids = torch.zeros(count, max(map(len, rows), default=0), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
    messages = np.empty(count, dtype=object)
    messages[:] = texts
    td = pack_jagged_fields(
        {"ids": ids, "logprobs": -ids.float(), "message": messages},
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int64),
        token_aligned_fields=["ids", "logprobs"],
    )
    return {"producer": producer, "sequence": sequence, "crc": crc, "batch": td}, sum(
        map(len, rows)
    )


def _intact(message: Mapping[str, Any]) -> bool:
    td = message["batch"]
    ids, logprobs = td["ids"], td["logprobs"]
    values, offsets = ids.values().numpy(), ids.offsets().tolist()
    crc = 0
    for start, end in itertools.pairwise(offsets):
        crc = zlib.crc32(values[start:end].tobytes(), zlib.crc32(str(end - start).encode(), crc))
    crc = zlib.crc32(repr(list(td.get("message").tolist())).encode(), crc)
    negated = torch.equal(logprobs.values(), -ids.values().float())
    return negated and crc == message["crc"]


# --- producers ---------------------------------------------------------------------------------


def _prepare() -> None:
    quieted()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the consumer ends the run
    torch.set_num_threads(1)


def _push(plan: Plan, number: int, port: int) -> None:
    _prepare()
    timeouts = sequence = tokens = 0
    memory = Memory()
    end = time.monotonic() + plan.seconds
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, plan.high_water)
        socket.connect(f"{HOST}:{port}")
        while time.monotonic() < end:
            message, size = make_message(plan, number, sequence)
            timeouts += _sent(socket, message)
            sequence, tokens = sequence + 1, tokens + size
            memory.look()
        last = {"producer": number, "sent": sequence, "tokens": tokens, "timeouts": timeouts}
        _sent(socket, {**last, "memory": memory.samples})
    # Closing waits until the queue is empty: LINGER is without limit.


def _sent(socket: zmq.Socket[Any], message: Any) -> int:
    """Send it, however long that takes; returns how often a send timed out."""
    frames = encode(message)
    timeouts = 0
    while True:
        try:
            send_frames(socket, frames, timeout=WAIT)
        except TransportTimeoutError:
            timeouts += 1
        else:
            return timeouts


def _offer(plan: Plan, number: int, port: int) -> None:
    _prepare()
    me = {"producer": number}
    tokens = 0
    memory = Memory()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.SNDHWM, plan.high_water)
        socket.connect(f"{HOST}:{port}")
        sequence, over, timeouts = _answered(socket, me, at_least=0)
        while not over:
            message, size = make_message(plan, number, sequence)
            sequence, over, late = _answered(socket, message, at_least=sequence + 1)
            timeouts, tokens = timeouts + late, tokens + size
            memory.look()
        last = {"sent": sequence, "tokens": tokens, "timeouts": timeouts}
        _answered(socket, {**me, **last, "memory": memory.samples}, at_least=0)


def _received(socket: zmq.Socket[Any], timeout: float) -> Any:
    return decode(recv_frames(socket, timeout=timeout).frames)


def _answered(socket: zmq.Socket[Any], message: Any, at_least: int) -> tuple[int, bool, int]:
    """Send it until it is answered.

    Returns:
        Which batch is next, whether the run is over, and how often no answer came in time.
    """
    frames = encode(message)
    timeouts = 0
    while True:
        try:
            send_frames(socket, frames, timeout=ANSWER)
            while (answer := _received(socket, ANSWER))["next"] < at_least:
                pass  # it is to an earlier try
        except TransportTimeoutError:
            timeouts += 1
        else:
            return answer["next"], answer["over"], timeouts


# --- the consumer ------------------------------------------------------------------------------


@dataclass
class Memory:
    """Resident bytes of this process, every so often."""

    samples: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> None:
        if not _STATM.exists():
            return  # nothing is known of memory where there is no /proc
        now = time.monotonic()
        if not self.samples or now - self.samples[-1][0] >= SAMPLE:
            self.samples.append((now, _resident()))


@dataclass
class Ledger:
    """Who sent what, as the consumer saw it."""

    memory: Memory = field(default_factory=Memory)
    seen: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    tokens: int = 0
    rows: int = 0
    damaged: int = 0
    seconds: float = 0.0

    def note(self, message: Mapping[str, Any]) -> None:
        if "sent" in message:
            self.ends[message["producer"]] = dict(message)
            return
        self.seen.setdefault(message["producer"], []).append(message["sequence"])
        self.damaged += not _intact(message)
        self.rows += len(message["batch"])
        self.tokens += int(message["batch"]["ids"].values().numel())

    def next_of(self, message: Mapping[str, Any]) -> int:
        """Which batch of its producer is the next one."""
        seen = self.seen.get(message["producer"])
        return seen[-1] + 1 if seen else 0

    def report(self, plan: Plan) -> dict[str, Any]:
        sent = {number: end["sent"] for number, end in self.ends.items()}
        lost = sum(len(set(range(n)) - set(self.seen.get(p, ()))) for p, n in sent.items())
        counts = [len(found) for found in self.seen.values()] or [0]
        return {
            "plan": asdict(plan),
            "seconds": round(self.seconds, 1),
            "finished": len(self.ends),
            "sent": sum(sent.values()),
            "batches": sum(counts),
            "batches_of_one_producer": [min(counts), max(counts)],
            "rows": self.rows,
            "tokens": self.tokens,
            "tokens_sent": sum(end["tokens"] for end in self.ends.values()),
            "timeouts": sum(end["timeouts"] for end in self.ends.values()),
            "lost": lost,
            "duplicated": sum(len(found) - len(set(found)) for found in self.seen.values()),
            "out_of_turn": sum(
                later <= earlier
                for found in self.seen.values()
                for earlier, later in itertools.pairwise(found)
            ),
            "damaged": self.damaged,
            "consumer_memory": _trend([self.memory.samples]),
            "producer_memory": _trend([end["memory"] for end in self.ends.values()]),
        }


def _pull(plan: Plan, socket: zmq.Socket[Any]) -> Ledger:
    ledger = Ledger()
    start = pause = time.monotonic()
    while len(ledger.ends) < plan.producers:
        try:
            ledger.note(_received(socket, SILENCE))
        except TransportTimeoutError:
            break  # the report says who did not finish
        ledger.memory.look()
        if time.monotonic() - pause > plan.pause_every:
            time.sleep(plan.pause)
            pause = time.monotonic()
    ledger.seconds = time.monotonic() - start
    return ledger


def _trend(processes: Iterable[Sequence[tuple[float, int]]]) -> dict[str, float]:
    """Resident bytes of processes, each once it has warmed up, and at its end; medians.

    `first` is of each process's second quarter, `last` of its last one; of many processes, the
    median of those, and of the growth the largest.
    """
    firsts, lasts, peaks = [], [], []
    for samples in processes:
        sizes = [size for _, size in samples]
        quarter = len(sizes) // 4
        if not quarter:
            continue
        firsts.append(statistics.median(sizes[quarter : 2 * quarter]))
        lasts.append(statistics.median(sizes[-quarter:]))
        peaks.append(max(sizes))
    if not firsts:
        return {}
    growth = [last - first for first, last in zip(firsts, lasts, strict=True)]
    return {
        "processes": len(firsts),
        "first": statistics.median(firsts),
        "last": statistics.median(lasts),
        "most_grown": max(growth),
        "median_grown": statistics.median(growth),
        "peak": max(peaks),
    }


def _resident() -> int:
    """Resident bytes of this process."""
    pages = int(_STATM.read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
