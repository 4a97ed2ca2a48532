"""Trips: every side in a process of its own, all of them in turns, every result verified."""

from __future__ import annotations

import gc
import itertools
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import peers, sides
from benchmarks.shapes import TOKEN_BYTES, Batch, Case, make_batch
from benchmarks.sides import Floor, Side, receive

MAKERS: dict[str, Callable[[Batch], Side]] = {
    "fused": sides.fused,
    "reused": sides.reused,
    "composed": sides.composed,
    "rows": peers.rows,
    "pickle": peers.pickle5,
    "pickle_oob": peers.pickle5_out_of_band,
    "torch_save": peers.torch_save,
    "safetensors": peers.safetensors,
    "tensordict": peers.consolidated,
    "arrow": peers.arrow,
}
SIDES = (*MAKERS, "floor")
BASES = ("fused", "reused", "composed", "floor")  # the denominators of the ratios

WARMUPS = 3
ROUNDS = (11, 51)  # at least, at most
SIDE_MEMORY = 6 * 2**30  # what no side may need
COPIES = 6  # of the padded bytes: input, message, receive buffer, output, and what libraries add


@dataclass(frozen=True)
class Trip:
    """One trip of one side."""

    ms: dict[str, float]  # by step
    page_faults: int = 0
    frames: int = 0
    wire_bytes: int = 0

    @property
    def total(self) -> float:
        return sum(self.ms.values())


class Turn(NamedTuple):
    """Two trips of one side, one right after the other.

    Attributes:
        first: Of a process that was just woken up: its code and data have left the caches, and
            what its last trip freed may have gone back to the system, or to the host of a
            virtual machine.
        then: What counts.
    """

    first: Trip
    then: Trip


class Runner:
    """A side with its receive buffers."""

    def __init__(self, side: Side, batch: Batch) -> None:
        self._side = side
        self.batch = batch
        self._buffers: list[bytearray | bytes] = []

    def run(self) -> tuple[Trip, Mapping[str, torch.Tensor]]:
        """One trip and its rectangles. All that it makes lives on until the last step is timed."""
        names, ticks, alive = [], [time.perf_counter()], []

        def step(name: str, function: Callable[[Any], Any], value: Any) -> Any:
            made = function(value)
            names.append(name)
            ticks.append(time.perf_counter())
            alive.append(made)
            return made

        faults = _page_faults()
        value: Any = self.batch
        for name, function in self._side.send:
            value = step(name, function, value)
        frames = value
        value = step("copy", self._transport, frames)
        for name, function in self._side.receive:
            value = step(name, function, value)
        step("touch", _touch, value)
        faults = _page_faults() - faults
        ms = [1e3 * (end - start) for start, end in itertools.pairwise(ticks)]
        wire_bytes = sum(map(len, self._buffers))
        trip = Trip(dict(zip(names, ms, strict=True)), faults, len(frames), wire_bytes)
        return trip, value

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


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def difference(batch: Batch, rectangles: Mapping[str, torch.Tensor]) -> str:
    """The first column that is not the batch's, bit for bit; empty if all are."""
    if list(rectangles) != list(batch.columns):
        return f"columns {list(rectangles)}"
    for name, expected in batch.columns.items():
        found = rectangles[name]
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return f"column {name!r}, a {found.dtype} tensor of shape {tuple(found.shape)}"
        pieces = zip(_pieces(found), _pieces(expected), strict=True)
        if not all(np.array_equal(a, b) for a, b in pieces):
            return f"column {name!r}"
    return ""


def _pieces(tensor: torch.Tensor) -> list[npt.NDArray[Any]]:
    # Small ones and no torch, so that looking leaves neither a changed heap nor busy threads.
    flat = tensor.contiguous().view(torch.int32).numpy().reshape(-1)
    return np.array_split(flat, max(1, flat.nbytes // 2**18))


# --- rounds ------------------------------------------------------------------------------------


def measure(
    case: Case, names: Sequence[str], seconds: float, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Sides in turns over one batch, for about so many seconds.

    Returns:
        What goes into the JSON for this case; ``{"case", "skipped"}`` where it is too large.

    Raises:
        SystemExit: A side did not give back what was sent.
    """
    lengths = case.lengths()
    reason = too_large(case, len(lengths) * int(lengths.max()))
    if reason:
        return {"case": str(case), **asdict(case), "skipped": reason}
    with ExitStack() as stack:
        directory = stack.enter_context(shared_directory())
        batch = make_batch(lengths)
        batch.save(directory)
        rows, width = batch.shape
        found: dict[str, Any] = {"case": str(case), **asdict(case), "rows": rows, "width": width}
        found |= {"tokens": batch.tokens, "fill": batch.tokens / (rows * width)}
        found |= {"valid_bytes": batch.valid_bytes, "padded_bytes": batch.padded_bytes}
        del batch
        players = {name: stack.enter_context(_process(name, directory)) for name in names}
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        rounds, done, order = WARMUPS + ROUNDS[0], 0, random.Random(0)
        progress(done, rounds)
        while done < rounds:
            start = time.perf_counter()
            # Not in rotation: each would always come after the same one, and in the memory, whole
            # or in pieces, that this one gave back to the system.
            for name in order.sample(list(names), len(names)):
                turn = _ask(players[name], f"{name}, {case}")
                if done >= WARMUPS:
                    turns[name].append(turn)
            done += 1
            if done == WARMUPS:
                fitting = int(seconds / (time.perf_counter() - start))
                rounds = WARMUPS + max(ROUNDS[0], min(fitting, ROUNDS[1]))
            progress(done, rounds)
    found["rounds"] = rounds - WARMUPS
    first = {name: [turn.first for turn in turns[name]] for name in names}
    then = {name: [turn.then for turn in turns[name]] for name in names}
    found["sides"] = {
        name: {**_summary(then[name]), "first": spread([trip.total for trip in first[name]])}
        for name in names
    }
    found["ratios"] = _ratios(then)
    found["first_ratios"] = _ratios(first)
    return found


def _ratios(trips: Mapping[str, Sequence[Trip]]) -> dict[str, float]:
    """Of each side to each base, by ``side/base``: the median of those within a round."""
    return {
        f"{name}/{base}": statistics.median(
            a.total / b.total for a, b in zip(trips[name], trips[base], strict=True)
        )
        for base in BASES
        for name in trips
        if base in trips and name != base
    }


def too_large(case: Case, cells: int) -> str:
    """Why a case is left out; empty where it is not."""
    padded = TOKEN_BYTES * cells
    if COPIES * padded > SIDE_MEMORY:
        return (
            f"{padded / 2**30:.1f} GiB padded: a side may need {COPIES} times that, "
            f"more than {SIDE_MEMORY / 2**30:.0f} GiB"
        )
    available = available_memory()
    if available is not None and 2 * COPIES * padded > available:
        return (
            f"{padded / 2**30:.1f} GiB padded: all sides together may need {2 * COPIES} times "
            f"that, and {available / 2**30:.1f} GiB are free"
        )
    return ""


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":") for line in lines)
    return int(sizes["MemAvailable"].split()[0]) * 1024


def _summary(trips: Sequence[Trip]) -> dict[str, Any]:
    return {
        **spread([trip.total for trip in trips]),
        "steps": {name: statistics.median(trip.ms[name] for trip in trips) for name in trips[0].ms},
        "page_faults": statistics.median(trip.page_faults for trip in trips),
        "frames": trips[0].frames,
        "wire_bytes": trips[0].wire_bytes,
    }


def spread(ms: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and minimum."""
    quarters = statistics.quantiles(ms, n=4, method="inclusive")
    return {"ms": statistics.median(ms), "q1": quarters[0], "q3": quarters[2], "min": min(ms)}


# --- processes ---------------------------------------------------------------------------------


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A place for the batch that all sides map: in memory where there is one."""
    memory = Path("/dev/shm")
    free = shutil.disk_usage(memory).free if os.access(memory, os.W_OK) else 0
    with tempfile.TemporaryDirectory(dir=memory if free > SIDE_MEMORY else None) as name:
        yield Path(name)


def processes() -> Any:
    """Where new processes come from: one that has imported what all need and done nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.sides"])
    return context


@contextmanager
def _process(name: str, directory: Path) -> Iterator[Connection]:
    context = processes()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, name, directory), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join(timeout=30)


def _ask(connection: Connection, what: str) -> Turn:
    try:
        connection.send("run")
        answer = connection.recv()
    except EOFError as error:
        raise SystemExit(f"\n{what}: the process died; its error is above") from error
    if isinstance(answer, str):
        raise SystemExit(f"\nVERIFICATION FAILED: {what}: {answer}")
    turn: Turn = answer
    return turn


def _serve(connection: Connection, name: str, directory: Path) -> None:
    """A side's process: one turn for each message, until the other end closes."""
    quieted()
    batch = Batch.mapped(directory)
    trip = floor_trip(batch) if name == "floor" else _verified(Runner(MAKERS[name](batch), batch))
    # What lives now lives on; walking all of it before each trip would empty the caches.
    gc.collect()
    gc.freeze()
    try:
        while connection.recv():
            try:
                connection.send(Turn(trip(), trip()))
            except _DifferentError as wrong:
                connection.send(str(wrong))
    except EOFError:
        return


def quieted() -> None:
    """Silence torch's warning, once per process, that nested tensors are a prototype."""
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype")


class _DifferentError(Exception):
    """What was received is not what was sent."""


def _verified(runner: Runner) -> Callable[[], Trip]:
    def trip() -> Trip:
        gc.collect()
        gc.disable()
        made, rectangles = runner.run()
        gc.enable()
        wrong = difference(runner.batch, rectangles)
        if wrong:
            raise _DifferentError(wrong)
        return made

    return trip


def floor_trip(batch: Batch) -> Callable[[], Trip]:
    floor = Floor(batch)

    def trip() -> Trip:
        faults = _page_faults()
        start = time.perf_counter()
        floor.run()
        ms = 1e3 * (time.perf_counter() - start)
        return Trip({"floor": ms}, _page_faults() - faults, wire_bytes=batch.valid_bytes)

    return trip
