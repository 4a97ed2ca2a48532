"""Trips: every side in its own process, all of them in turns, every result verified.

A turn of a side is three trips in a row. As in a loop that binds each batch to one name, the result
of a trip lives while the next one runs, and is freed after it. So memory alternates between two
blocks.

    cold    the first trip of a turn, after a pass over 256 MB of other memory
    warm    the third: what the trips before it used is in the caches, as far as it fits
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.machine import quieted
from benchmarks.measure import Step, collector_off, cool, in_turns, same_columns, walk
from benchmarks.shapes import Batch, lengths_of, make_batch
from benchmarks.sides import SIDES, Side, receive

ROUNDS = 7  # at least, of each batch


class Trip(NamedTuple):
    """One trip of one side."""

    ms: dict[str, float]  # by step
    frames: int
    wire_bytes: int

    @property
    def total(self) -> float:
        return sum(self.ms.values())


class Turn(NamedTuple):
    """The trips of a turn that count."""

    warm: Trip
    cold: Trip


class Runner:
    """A side with its receive buffers, and the result of its last trip."""

    def __init__(self, side: Side, batch: Batch) -> None:
        self._side = side
        copy: Step = ("copy", self._copy)
        self._steps = (*side.send, copy, *side.receive, ("touch", _touch))
        self.batch = batch
        self._buffers: list[bytearray | bytes] = []
        self._rectangles: Mapping[str, torch.Tensor] = {}

    def turn(self) -> Turn:
        """Three trips, of which the first and the third count."""
        cold = self._verified(before=cool)
        self._verified()
        return Turn(self._verified(), cold)

    def _verified(self, before: Callable[[], object] = bool) -> Trip:
        """A trip without garbage collection, whose result is compared with the input."""
        gc.collect()
        before()
        with collector_off():
            ms, self._rectangles = walk(self._steps, self.batch)
        same_columns(self._rectangles, self.batch.columns, "a trip")
        return Trip(ms, len(self._buffers), sum(map(len, self._buffers)))

    def _copy(self, frames: Sequence[Any]) -> list[bytearray | bytes]:
        sizes = [memoryview(frame).nbytes for frame in frames]
        if sizes != list(map(len, self._buffers)):  # the first time
            self._buffers = [self._side.buffer(size) for size in sizes]
        for frame, buffer in zip(frames, self._buffers, strict=True):
            receive(frame, buffer)
        return self._buffers


def _touch(rectangles: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    for rectangle in rectangles.values():
        rectangle.view(torch.uint8).numpy().reshape(-1)[:: mmap.PAGESIZE].max()
    return rectangles


def measure(shape: str, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Sides in turns over one batch, for about so many seconds."""
    batch = make_batch(lengths_of(shape))
    rows, width = batch.shape
    found: dict[str, Any] = {"shape": shape, "rows": rows, "width": width}
    found |= {"tokens": batch.tokens, "fill": batch.tokens / (rows * width)}
    found |= {"valid_bytes": batch.valid_bytes, "padded_bytes": batch.padded_bytes}
    done = turns(batch, {name: (name, None) for name in names}, seconds)
    found["rounds"] = len(done[names[0]])
    found["sides"] = {name: _side(done[name]) for name in names}
    return found


def turns(
    batch: Batch, players: Mapping[str, tuple[str, Path | None]], seconds: float
) -> dict[str, list[Turn]]:
    """The turns of players: each a side, and where its library is if not here."""
    with ExitStack() as stack:
        directory = stack.enter_context(_shared_directory(batch))
        asks = {
            name: partial(
                ask, stack.enter_context(process(_serve, (side, directory), source)), "run", name
            )
            for name, (side, source) in players.items()
        }
        return in_turns(asks, seconds, rounds=ROUNDS)


def _side(done: Sequence[Turn]) -> dict[str, Any]:
    """What a side sends, and the times of its warm and of its cold trips."""
    first = done[0].warm
    found: dict[str, Any] = {"frames": first.frames, "wire_bytes": first.wire_bytes}
    kinds = zip(*done, strict=True)
    return found | dict(zip(Turn._fields, map(_summary, kinds), strict=True))


def _summary(trips: Sequence[Trip]) -> dict[str, Any]:
    totals = [trip.total for trip in trips]
    q1, median, q3 = statistics.quantiles(totals, n=4, method="inclusive")
    steps = {name: statistics.median(trip.ms[name] for trip in trips) for name in trips[0].ms}
    return {"ms": median, "q1": q1, "q3": q3, "steps": steps}


# --- processes ---------------------------------------------------------------------------------


@contextmanager
def _shared_directory(batch: Batch) -> Iterator[Path]:
    """A directory with the batch for all sides to map: in memory, if it is large enough."""
    memory = Path("/dev/shm")
    free = shutil.disk_usage(memory).free if os.access(memory, os.W_OK) else 0
    within = memory if free > 2 * batch.padded_bytes else None
    with tempfile.TemporaryDirectory(dir=within) as name:
        batch.save(Path(name))
        yield Path(name)


@contextmanager
def process(
    serve: Callable[..., None], arguments: tuple[Any, ...], source: Path | None = None
) -> Iterator[Connection]:
    """A process that calls ``serve(connection, *arguments)``; this end of the connection.

    `source` is where its library is, if not here.
    """
    context: Any = multiprocessing.get_context("spawn" if source else "forkserver")
    if not source:
        context.set_forkserver_preload(["benchmarks.sides"])
    here, there = context.Pipe()
    started = context.Process(target=serve, args=(there, *arguments), daemon=True)
    with library_in(source):
        started.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        started.join(timeout=30)


@contextmanager
def library_in(source: Path | None) -> Iterator[None]:
    """Processes that are spawned inside import the library from there."""
    if source:
        sys.path.insert(0, str(source))
    try:
        yield
    finally:
        if source:
            sys.path.remove(str(source))


def ask(connection: Connection, request: Any, what: str) -> Any:
    """The answer of a process; `what` names it in an error."""
    try:
        connection.send(request)
        return connection.recv()
    except (EOFError, BrokenPipeError) as error:
        raise SystemExit(f"\n{what}: the process ended; its error is above") from error


def _serve(connection: Connection, side: str, directory: Path) -> None:
    """A side's process: one turn for each message, until the other end closes."""
    quieted()
    batch = Batch.mapped(directory)
    runner = Runner(SIDES[side](batch), batch)
    # Walking all of what lives now before each trip would empty the caches.
    gc.collect()
    gc.freeze()
    try:
        while connection.recv():
            connection.send(runner.turn())
    except EOFError:
        return
