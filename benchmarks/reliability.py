"""Many producers, one consumer, for minutes: is every batch accounted for, and is memory flat?

``python -m benchmarks.reliability --producers 64 --seconds 150`` (`make soak`). Producers are
processes of their own. Each draws batches of jagged columns and Python objects, numbers them, and
sends them over TCP by `jagcodec.integrations.zmq`. Queues are bounded and the consumer is slower
than all of them together, so most sends find no room, time out, and are tried again. Now and then
the consumer stops altogether. It checks of every batch who sent it, that none is missing, twice or
out of turn, and a CRC-32 that the producer computed of its rows before the codec saw them.

``--json FILE`` writes the record; ``--write`` writes it to docs/measured/, and from there into the
tables of docs/reliability.md. The exit status is 1 if a batch was lost or damaged.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from benchmarks import pages
from benchmarks.machine import machine, versions
from benchmarks.trips import quieted
from jagcodec import TransportTimeoutError, pack_jagged_fields
from jagcodec.integrations.zmq import recv, send

RECORD = pages.DOCS / "measured" / "reliability.json"
PAGE = pages.DOCS / "reliability.md"

FAULTS = ("lost", "duplicated", "out_of_turn", "damaged")
WAIT = 0.25  # seconds that a producer waits for room before it counts a time-out
SILENCE = 60.0  # seconds without any message after which producers are taken for dead
SAMPLE = 0.5  # seconds between two looks at memory


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
    """

    producers: int = 64
    seconds: float = 150.0
    high_water: int = 2
    rows: int = 64
    width: int = 1024
    pause: float = 1.0
    pause_every: float = 10.0


def soak(plan: Plan) -> dict[str, Any]:
    """Run it.

    Returns:
        The plan, what came, what did not, and how memory went.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.trips", "jagcodec.integrations.zmq"])
    with zmq.Context() as sockets, sockets.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.RCVHWM, plan.high_water)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        processes = [
            context.Process(target=_produce, args=(plan, number, port), daemon=True)
            for number in range(plan.producers)
        ]
        for process in processes:
            process.start()
        try:
            ledger = _consume(plan, socket)
        finally:
            for process in processes:
                process.join(SILENCE)
                process.kill()
                process.join()
        ended = [str(process.exitcode) for process in processes]
    return {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "pyzmq": zmq.pyzmq_version(),
        **ledger.report(plan),
        "exit_codes": {code: ended.count(code) for code in sorted(set(ended))},
    }


def faults(report: Mapping[str, Any]) -> int:
    """Batches that are lost, doubled, out of turn or damaged, and producers that did not finish."""
    unfinished: int = report["plan"]["producers"] - report["finished"]
    wrong: int = sum(report[name] for name in FAULTS)
    return unfinished + wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("--producers", type=int, default=Plan.producers)
    parser.add_argument("--seconds", type=float, default=Plan.seconds)
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--write", action="store_true", help="into docs/measured/ and its page")
    parser.add_argument("--page", action="store_true", help="write the tables of the page alone")
    options = parser.parse_args(arguments)
    if options.page:
        pages.rewrite(PAGE, tables(pages.read(RECORD)))
        return 0
    quieted()
    report = soak(Plan(producers=options.producers, seconds=options.seconds))
    for text in tables(report).values():
        print(text, end="\n\n")
    if options.json:
        pages.record(options.json, report)
    if options.write:
        pages.record(RECORD, report)
        pages.rewrite(PAGE, tables(report))
    return 1 if faults(report) else 0


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


def _produce(plan: Plan, number: int, port: int) -> None:
    quieted()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the consumer ends the run
    torch.set_num_threads(1)
    timeouts = sequence = tokens = 0
    memory = Memory()
    end = time.monotonic() + plan.seconds
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, plan.high_water)
        socket.connect(f"tcp://127.0.0.1:{port}")
        while time.monotonic() < end:
            message, size = make_message(plan, number, sequence)
            timeouts += _sent(socket, message)
            sequence, tokens = sequence + 1, tokens + size
            memory.look()
        last = {"producer": number, "sent": sequence, "tokens": tokens, "timeouts": timeouts}
        _sent(socket, {**last, "memory": memory.samples})
    # Closing waits until the queue is empty: LINGER is without limit.


def _sent(socket: zmq.Socket[Any], message: Any) -> int:
    """Send it, however long that takes; returns how often there was no room in time."""
    timeouts = 0
    while True:
        try:
            send(socket, message, timeout=WAIT)
        except TransportTimeoutError:
            timeouts += 1
        else:
            return timeouts


# --- the consumer ------------------------------------------------------------------------------


@dataclass
class Memory:
    """Resident bytes of this process, every so often."""

    samples: list[tuple[float, int]] = field(default_factory=list)

    def look(self) -> None:
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


def _consume(plan: Plan, socket: zmq.Socket[Any]) -> Ledger:
    torch.set_num_threads(1)
    ledger = Ledger()
    start = pause = time.monotonic()
    while len(ledger.ends) < plan.producers:
        try:
            ledger.note(recv(socket, timeout=SILENCE))
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
    """Resident bytes of this process, as Linux tells."""
    pages_of = int(Path("/proc/self/statm").read_text().split()[1])
    return pages_of * os.sysconf("SC_PAGE_SIZE")


# --- the page ----------------------------------------------------------------------------------


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Name of a table to its Markdown."""
    return {"soak": _account(report), "soak-memory": _memory(report), "soak-machine": _made(report)}


def _account(report: Mapping[str, Any]) -> str:
    least, most = report["batches_of_one_producer"]
    rows = [
        ["producers, of which finished", f"{report['plan']['producers']}, {report['finished']}"],
        ["seconds", f"{report['seconds']:.0f}"],
        ["batches sent, as the producers count", f"{report['sent']:,}"],
        ["batches received", f"{report['batches']:,}"],
        ["of one producer, at least and at most", f"{least:,} to {most:,}"],
        ["rows, tokens received", f"{report['rows']:,}, {report['tokens']:,}"],
        ["tokens sent", f"{report['tokens_sent']:,}"],
        ["sends that found no room in time, and were tried again", f"{report['timeouts']:,}"],
        *([name.replace("_", " "), f"{report[name]:,}"] for name in FAULTS),
    ]
    return pages.table(("", "found"), rows)


def _memory(report: Mapping[str, Any]) -> str:
    rows = []
    for name in ("consumer", "producer"):
        found = report[f"{name}_memory"]
        if found:
            rows.append(
                [f"{name}, {found['processes']:.0f} process{'es' * (found['processes'] > 1)}"]
                + [f"{found[key] / 1e6:.0f}" for key in ("first", "last")]
                + [f"{found[key] / 1e6:+.1f}" for key in ("median_grown", "most_grown")]
                + [f"{found['peak'] / 1e6:.0f}"]
            )
    head = ("resident MB", "second quarter", "last quarter", "grown", "the most grown", "peak")
    return pages.table(head, rows)


def _made(report: Mapping[str, Any]) -> str:
    found, plan = report["machine"], report["plan"]
    return (
        f"Made {report['made'][:10]} by {plan['producers']} producers in {plan['seconds']:.0f} s "
        f"on {found['cpus']} cores of {found['cpu']}, load at the end {found['load']}; high-water "
        f"marks of {plan['high_water']}, batches of up to {plan['rows']} rows of up to "
        f"{plan['width']:,} tokens; the consumer stopped for {plan['pause']:g} s every "
        f"{plan['pause_every']:g} s. Python {found['python']}, jagcodec "
        f"{report['versions']['jagcodec']}, torch {report['versions']['torch']}, pyzmq "
        f"{report['pyzmq']}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
