"""Trips: every side in its own process, all of them in turns, every result verified."""

from __future__ import annotations

import gc
import itertools
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import quieted
from benchmarks.measure import check, difference
from benchmarks.shapes import Batch, lengths_of, make_batch
from benchmarks.sides import SIDES, Side, receive

WARMUPS = 2  # rounds that do not count
ROUNDS = (5, 51)  # at least, at most


class Trip(NamedTuple):
    """One trip of one side."""

    ms: dict[str, float]  # by step
    frames: int
    wire_bytes: int

    @property
    def total(self) -> float:
        return sum(self.ms.values())


class Runner:
    """A side with its receive buffers."""

    def __init__(self, side: Side, batch: Batch) -> None:
        self._side = side
        self.batch = batch
        self._buffers: list[bytearray | bytes] = []

    def run(self) -> tuple[Trip, Mapping[str, torch.Tensor]]:
        """One trip and its rectangles. Everything it makes lives until the last step is timed."""
        names, ticks, alive = [], [time.perf_counter()], []

        def step(name: str, function: Callable[[Any], Any], value: Any) -> Any:
            made = function(value)
            names.append(name)
            ticks.append(time.perf_counter())
            alive.append(made)
            return made

        value: Any = self.batch
        for name, function in self._side.send:
            value = step(name, function, value)
        frames = value
        value = step("copy", self._transport, frames)
        for name, function in self._side.receive:
            value = step(name, function, value)
        step("touch", _touch, value)
        ms = [1e3 * (end - start) for start, end in itertools.pairwise(ticks)]
        wire_bytes = sum(map(len, self._buffers))
        return Trip(dict(zip(names, ms, strict=True)), len(frames), wire_bytes), value

    def verified(self) -> Trip:
        """The second of two trips, without garbage collection, compared with the input.

        The first one finds its code evicted from the caches by the other processes.

        Raises:
            SystemExit: The columns that came back differ from those that were sent.
        """
        for _ in range(2):
            gc.collect()
            gc.disable()
            trip, rectangles = self.run()
            gc.enable()
            check(not (wrong := difference(rectangles, self.batch.columns)), wrong)
        return trip

    def _transport(self, frames: Sequence[Any]) -> list[bytearray | bytes]:
        sizes = [memoryview(frame).nbytes for frame in frames]
        if sizes != list(map(len, self._buffers)):  # the first time
            self._buffers = [self._side.buffer(size) for size in sizes]
        for frame, buffer in zip(frames, self._buffers, strict=True):
            receive(frame, buffer)
        return self._buffers


def _touch(rectangles: Mapping[str, torch.Tensor]) -> None:
    for rectangle in rectangles.values():
        rectangle.view(torch.uint8).numpy().reshape(-1)[:: mmap.PAGESIZE].max()


def measure(shape: str, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Sides in turns over one batch, for about so many seconds.

    Raises:
        SystemExit: A side did not give back what was sent.
    """
    with ExitStack() as stack:
        batch = make_batch(lengths_of(shape))
        directory = stack.enter_context(shared_directory(batch))
        rows, width = batch.shape
        found: dict[str, Any] = {"shape": shape, "rows": rows, "width": width}
        found |= {"tokens": batch.tokens, "fill": batch.tokens / (rows * width)}
        found |= {"valid_bytes": batch.valid_bytes, "padded_bytes": batch.padded_bytes}
        del batch
        players = {name: stack.enter_context(_process(name, directory)) for name in names}
        trips: dict[str, list[Trip]] = {name: [] for name in names}
        rounds, done, order = WARMUPS + ROUNDS[0], 0, random.Random(0)
        start = time.perf_counter()
        while done < rounds:
            for name in order.sample(list(names), len(names)):
                trip = _ask(players[name], f"{name}, {shape}")
                if done >= WARMUPS:
                    trips[name].append(trip)
            done += 1
            if done == WARMUPS:
                fitting = int(seconds * WARMUPS / (time.perf_counter() - start))
                rounds = WARMUPS + max(ROUNDS[0], min(fitting, ROUNDS[1]))
    found["rounds"] = rounds - WARMUPS
    found["sides"] = {name: _summary(trips[name]) for name in names}
    return found


def _summary(trips: Sequence[Trip]) -> dict[str, Any]:
    totals = [trip.total for trip in trips]
    quarters = statistics.quantiles(totals, n=4, method="inclusive")
    return {
        **{"ms": statistics.median(totals), "q1": quarters[0], "q3": quarters[2]},
        "steps": {name: statistics.median(trip.ms[name] for trip in trips) for name in trips[0].ms},
        "frames": trips[0].frames,
        "wire_bytes": trips[0].wire_bytes,
    }


# --- processes ---------------------------------------------------------------------------------


@contextmanager
def shared_directory(batch: Batch) -> Iterator[Path]:
    """A directory with the batch for all sides to map: in memory, if it is large enough."""
    memory = Path("/dev/shm")
    free = shutil.disk_usage(memory).free if os.access(memory, os.W_OK) else 0
    within = memory if free > 2 * batch.padded_bytes else None
    with tempfile.TemporaryDirectory(dir=within) as name:
        batch.save(Path(name))
        yield Path(name)


@contextmanager
def _process(name: str, directory: Path) -> Iterator[Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.sides"])
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, name, directory), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(timeout=30)


def _ask(connection: Connection, what: str) -> Trip:
    try:
        connection.send("run")
        trip: Trip = connection.recv()
    except EOFError as error:
        raise SystemExit(f"\n{what}: the process ended; its error is above") from error
    return trip


def _serve(connection: Connection, name: str, directory: Path) -> None:
    """A side's process: one turn for each message, until the other end closes."""
    quieted()
    batch = Batch.mapped(directory)
    runner = Runner(SIDES[name](batch), batch)
    # Walking all of what lives now before each trip would empty the caches.
    gc.collect()
    gc.freeze()
    try:
        while connection.recv():
            connection.send(runner.verified())
    except EOFError:
        return
