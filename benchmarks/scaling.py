"""What one core pays per byte, for the model in `benchmarks/scaling_model.py`.

``python -m benchmarks.scaling`` prints what it measured; with ``--write``, it stores that in
`benchmarks/scaling.json`, where the model reads it, and writes the tables of `docs/scaling.md`.
``--page`` writes the tables alone.

Everything is CPU time of processes that compute in one thread, so that other load on the machine
stretches it less than it would stretch the clock; medians of runs in memory that was written
before and is larger than the caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import zmq

import jagcodec
from benchmarks import pages
from benchmarks.machine import machine
from benchmarks.report import RECORD as BENCH
from benchmarks.scaling_model import (
    FORMS,
    GRPO,
    PARTS,
    RECORD,
    WIRE,
    Cluster,
    Costs,
    Workload,
    measured_costs,
    step_cost,
    wire_limit,
)
from benchmarks.shapes import LARGE, PADS, REAL_FILL, TOKEN_BYTES, Batch, Case, make_batch
from benchmarks.trips import processes, quieted
from jagcodec.data import rollout_table
from jagcodec.integrations.zmq import recv_frames, send_frames

PAGE = pages.DOCS / "scaling.md"

FULL = Case("lognormal", LARGE.rows, LARGE.width // 4, 1.0)  # as many tokens, and no padding
EMPTY = Case("lognormal", 8, 8, 1.0)  # a message, and next to nothing in it
RUNS, SECONDS = 15, 0.5  # at the least
MESSAGE = 64 << 20
MESSAGES = 24
TIMEOUT = 120.0


def measure() -> dict[str, Any]:
    """The record: seconds of one core."""
    context = processes()
    with context.Pool(1) as pool:
        codec = pool.apply(_codec)
    send, receive = _sockets(context)
    costs = Costs(**codec, send=send, receive=receive)
    rounded = {name: float(f"{cost:.3g}") for name, cost in dataclasses.asdict(costs).items()}
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "by": "python -m benchmarks.scaling --write",
        "machine": {**machine(), "torch_threads": 1},
        "costs": rounded,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store what is measured")
    parser.add_argument("--page", action="store_true", help="write the tables of the page alone")
    options = parser.parse_args(arguments)
    if not options.page:
        found = measure()
        for name, cost in found["costs"].items():
            print(f"{name:<10} {cost:.3g} s")
        if options.write:
            pages.record(RECORD, found)
    if options.write or options.page:
        pages.rewrite(PAGE, tables())
    return 0


# --- one core ----------------------------------------------------------------------------------


def _codec() -> dict[str, float]:
    quieted()
    torch.set_num_threads(1)
    pack_call, pad_call = _pack_and_pad(make_batch(EMPTY.lengths()))
    full = make_batch(FULL.lengths())
    pad_copy = (_pack_and_pad(full)[1] - pad_call) / full.valid_bytes
    del full
    batch = make_batch(LARGE.lengths())
    pack, pad = _pack_and_pad(batch)
    padding = batch.padded_bytes - batch.valid_bytes
    source = np.ones(batch.valid_bytes, dtype=np.uint8)
    target = np.empty_like(source)
    target.fill(0)
    return {
        "copy": _cpu(lambda: np.copyto(target, source)) / source.nbytes,
        "pack": (pack - pack_call) / batch.valid_bytes,
        "pack_call": pack_call,
        "pad_copy": pad_copy,
        "pad_fill": (pad - pad_call - pad_copy * batch.valid_bytes) / padding,
        "pad_call": pad_call,
    }


def _pack_and_pad(batch: Batch) -> tuple[float, float]:
    """Seconds to make a message in reused memory, and to pad it into reused rectangles."""
    named: dict[str, Any] = {"lengths": batch.lengths, "token_aligned_fields": PADS}
    message = bytearray(batch.valid_bytes + 8 * len(batch.lengths) + 8192)
    pack = _cpu(lambda: jagcodec.encode_fields(batch.columns, **named, out=message))
    pads: dict[str, Any] = {"pad_value_dict": PADS}
    pads["out"] = jagcodec.materialize(jagcodec.open_wire(message), **pads)
    pad = _cpu(lambda: jagcodec.materialize(jagcodec.open_wire(message), **pads))
    return pack, pad


def _cpu(run: Callable[[], Any]) -> float:
    """Median CPU seconds of this process; the first runs warm up."""
    found: list[float] = []
    start = time.process_time()
    while len(found) < RUNS + 2 or time.process_time() - start < SECONDS:
        before = time.process_time()
        run()
        found.append(time.process_time() - before)
    return statistics.median(found[2:])


# --- sockets -----------------------------------------------------------------------------------


def _sockets(context: Any) -> tuple[float, float]:
    """CPU seconds per byte of a process that sends, and of one that receives, over TCP."""
    here, there = context.Pipe()
    sender = context.Process(target=_send, args=(there,), daemon=True)
    sender.start()
    there.close()
    with zmq.Context() as sockets, sockets.socket(zmq.PULL) as socket:
        socket.connect(f"tcp://127.0.0.1:{here.recv()}")
        recv_frames(socket, timeout=TIMEOUT)  # the connection stands
        before = time.process_time()
        for _ in range(MESSAGES):
            recv_frames(socket, timeout=TIMEOUT)
        receive = time.process_time() - before
    send = here.recv()
    sender.join()
    return send / (MESSAGES * MESSAGE), receive / (MESSAGES * MESSAGE)


def _send(connection: Any) -> None:
    frames = jagcodec.encode(torch.ones(MESSAGE, dtype=torch.uint8))
    with zmq.Context() as sockets, sockets.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.SNDHWM, 2)
        connection.send(socket.bind_to_random_port("tcp://127.0.0.1"))
        send_frames(socket, frames, timeout=TIMEOUT).wait(TIMEOUT)
        before = time.process_time()
        trackers = [send_frames(socket, frames, timeout=TIMEOUT) for _ in range(MESSAGES)]
        trackers[-1].wait(TIMEOUT)
        connection.send(time.process_time() - before)


# --- the page ----------------------------------------------------------------------------------

JOB = Cluster(1024)
STORES = {
    name: dataclasses.replace(JOB, store_nodes=nodes, store_cores=cores)
    for name, nodes, cores in (
        ("one controller", 1, 1),
        ("8 nodes, 8 cores each", 8, 8),
        ("all 128 nodes, 8 cores each", 128, 8),
    )
}
SHOWN = STORES["8 nodes, 8 cores each"]
SPEEDS = (25, 100, 200, 400)
LONG = Workload(rows=16_384, width=32_768, fill=REAL_FILL)
NODE_MEMORY = 2 * 8 * 4800e6 * 8
"""Bytes per second of a node: two sockets of eight channels of DDR5-4800, as in a DGX H100. From
datasheets, not measured."""


def tables() -> dict[str, str]:
    """Name of a table to its Markdown."""
    tcp = measured_costs()
    return {
        "costs": _costs(tcp),
        "bytes": _bytes(),
        "tcp": _steps(tcp),
        "rdma": _steps(_without_sockets(tcp)),
        "parts": _parts(tcp),
        "limits": _limits(tcp),
        "siblings": _siblings(tcp),
        "memory": _memory(tcp),
        "held": _held(tcp),
    }


def _without_sockets(costs: Costs) -> Costs:
    """What RDMA between nodes and NVLink inside one make of it: no core moves bytes."""
    return dataclasses.replace(costs, send=0.0, receive=0.0)


def _real() -> Workload:
    """The GSM8K rollouts, as many of them as LONG has rows."""
    lengths = rollout_table().lengths
    width = int(lengths.max())
    return Workload(LONG.rows, width, float(lengths.mean()) / width)


def _costs(costs: Costs) -> str:
    text = {
        "copy": "memcpy, to compare with",
        "pack": "padded columns to a message, per byte of tokens",
        "pad_copy": "a message to rectangles, per byte of tokens",
        "pad_fill": "and per byte of padding",
        "send": "ZeroMQ over TCP, the sender",
        "receive": "the receiver",
        "pack_call": "a message, however small: packing",
        "pad_call": "and padding",
    }
    found = dataclasses.asdict(costs)
    rows = [
        [f"`{name}`", words]
        + (
            [f"{1e3 * found[name]:.2g} ms", ""]
            if name.endswith("_call")
            else [f"{1e9 * found[name]:.2g} ns a byte", f"{1e-9 / found[name]:.1f} GB/s"]
        )
        for name, words in text.items()
    ]
    machine_of = pages.read(RECORD)
    cpu, made = machine_of["machine"]["cpu"], machine_of["made"][:10]
    return (
        pages.table(("cost", "what", "one core takes", "that is"), rows)
        + f"\n\nMeasured {made} on one core of {cpu}, load at the start "
        + f"{machine_of['machine']['load']}."
    )


def _bytes() -> str:
    workloads = (_real(), LONG)
    rows = [
        [hop.name, "put" if hop.puts else "get", str(hop.cell_bytes)]
        + [
            f"{cells * hop.cell_bytes / 1e9:.2f}"
            for each in workloads
            for cells in (each.cells, each.tokens)
        ]
        for hop in GRPO
    ]
    token = sum(hop.cell_bytes for hop in GRPO)
    rows.append(
        ["all", "", str(token)]
        + [
            f"{cells * token / 1e9:.2f}"
            for each in workloads
            for cells in (each.cells, each.tokens)
        ]
    )
    head = [f"{each.rows:,} x {each.width:,}, {form} GB" for each in workloads for form in FORMS]
    return pages.table(("hop", "", "bytes per token", *head), rows)


def _steps(costs: Costs) -> str:
    rows = []
    for store, cluster in STORES.items():
        for gbit in SPEEDS:
            padded, packed = (step_cost(LONG, cluster, gbit, form, costs=costs) for form in FORMS)
            rows.append(
                [store, str(gbit), _s(padded.seconds), padded.bottleneck]
                + [_s(packed.seconds), packed.bottleneck, f"{padded.seconds / packed.seconds:.2f}"]
            )
    head = ("store", "Gb/s", "padded", "waits for", "packed", "waits for", "padded / packed")
    return pages.table(head, rows)


def _parts(costs: Costs) -> str:
    gbit = 100
    found = [
        (form, store, step_cost(LONG, cluster, gbit, form, costs=costs))
        for store, cluster in STORES.items()
        for form in FORMS
    ]
    rows = [[name, *(_s(cost.parts[name]) for _, _, cost in found)] for name in PARTS]
    head = (f"{gbit} Gb/s", *(f"{form}, {store}" for form, store, _ in found))
    return pages.table(head, rows)


def _limits(tcp: Costs) -> str:
    rows = []
    for name, costs in (("TCP", tcp), ("RDMA, NVLink", _without_sockets(tcp))):
        for store, cluster in STORES.items():
            cells = [name, store]
            for form in FORMS:
                limit = wire_limit(LONG, cluster, form, costs=costs)
                beyond = step_cost(LONG, cluster, 1.01 * limit, form, costs=costs)
                always = beyond.bottleneck == WIRE
                cells += ["never", ""] if always else [f"{limit:,.3g} Gb/s", beyond.bottleneck]
            rows.append(cells)
    head = ("moved by", "store", "padded: up to", "then", "packed: up to", "then")
    return pages.table(head, rows)


def _siblings(costs: Costs) -> str:
    rows = []
    for siblings in (1, 2, 8, 16):
        for alone in (False, True) if siblings > 1 else (False,):
            cluster = dataclasses.replace(SHOWN, tensor_parallel=siblings, siblings_fetch=alone)
            found = [step_cost(LONG, cluster, 100, form, costs=costs) for form in FORMS]
            who = "each fetches" if alone else "one fetches, and broadcasts"
            rows.append(
                [str(siblings), who if siblings > 1 else ""]
                + [cell for cost in found for cell in (f"{cost.moved / 1e9:.1f}", _s(cost.seconds))]
            )
    head = ("siblings", "", "padded GB", "padded", "packed GB", "packed")
    return pages.table(head, rows)


def _memory(costs: Costs) -> str:
    fill = LONG.fill
    cell = fill * costs.pad_copy + (1 - fill) * costs.pad_fill
    touched = (1 + fill) / cell  # bytes per second: rectangles written, tokens read
    cores = NODE_MEMORY / touched
    return (
        f"One core that pads touches {touched / 1e9:.0f} GB/s. A node with "
        f"{NODE_MEMORY / 1e9:.0f} GB/s of memory bandwidth (two sockets of eight channels of "
        "DDR5-4800, by datasheet) feeds "
        f"{cores:.0f} such cores, {cores / JOB.gpus_per_node:.0f} for each of {JOB.gpus_per_node} "
        "GPUs, if memory scaled to its datasheet."
    )


def _held(costs: Costs) -> str:
    """The model beside stages that `make bench` timed, two threads and all."""
    rows = []
    for found in pages.read(BENCH)["stages"]:
        batch = Case.parse(found["case"])
        tokens = float(batch.lengths().sum()) * TOKEN_BYTES
        padding = batch.rows * batch.width * TOKEN_BYTES - tokens
        pack = costs.pack_call + tokens * costs.pack
        pad = costs.pad_call + tokens * costs.pad_copy + padding * costs.pad_fill
        cells = [found["case"]]
        for stage, seconds in (("encode_fields, out=", pack), ("materialize, out=", pad)):
            timed = found["stages"][stage]
            cells += [
                _s(seconds),
                f"{_s(timed['ms'] / 1e3)}, at the least {_s(timed['min'] / 1e3)}",
            ]
        rows.append(cells)
    return pages.table(("batch", "packing", "by the clock", "padding", "by the clock"), rows)


def _s(seconds: float) -> str:
    return "" if not seconds else f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
