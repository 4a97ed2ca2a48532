"""Single steps of jagcodec, each beside the copies of memory that it stands for."""

from __future__ import annotations

import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import jagcodec
from benchmarks.costs import collector_off
from benchmarks.shapes import PADS, Batch, Case, make_batch
from benchmarks.sides import REUSES_OUTPUT, valid_values
from benchmarks.trips import processes, quieted, spread
from jagcodec import rowcopy

ROUNDS = (7, 201)  # at least, at most
SHORT_MS, SHORT_RUNS = 1.0, 5
COLUMN = "input_ids"  # of the row kernels


@dataclass(frozen=True)
class Stage:
    """A step ready to be run again and again.

    Attributes:
        run: Runs it; what it returns is freed outside the clock.
        floor: The copy that stands beside it: of the valid bytes (``"copy"``), that and a fill
            of the rectangles (``"pad"``), or either for one column (``"gather"``, ``"scatter"``).
    """

    run: Callable[[], Any]
    floor: str


def stages(batch: Batch) -> dict[str, Stage]:
    """Every stage over one batch."""
    columns, lengths = batch.columns, batch.lengths
    named: dict[str, Any] = {"lengths": lengths, "token_aligned_fields": PADS}
    packed = jagcodec.pack_jagged_fields(columns, **named)
    frames = [bytearray(frame) for frame in jagcodec.encode_fields(columns, **named)]
    message = bytearray(sum(map(len, frames)) + 64 * len(frames) + 4096)
    decoded = jagcodec.decode(frames)
    pads: dict[str, Any] = {"pad_value_dict": PADS}
    found = {
        "pack": Stage(lambda: jagcodec.pack_jagged_fields(columns, **named), "copy"),
        "encode": Stage(lambda: jagcodec.encode(packed), "copy"),
        "encode_fields": Stage(lambda: jagcodec.encode_fields(columns, **named), "copy"),
        "encode_fields, out=": Stage(
            lambda: jagcodec.encode_fields(columns, **named, out=message), "copy"
        ),
        "decode": Stage(lambda: jagcodec.decode(frames), "copy"),
        "open_wire": Stage(lambda: jagcodec.open_wire(frames), "copy"),
        "materialize": Stage(lambda: jagcodec.materialize(decoded, **pads), "pad"),
        "open_wire + materialize": Stage(
            lambda: jagcodec.materialize(jagcodec.open_wire(frames), **pads), "pad"
        ),
        "gather": Stage(_gather(batch), "gather"),
        "pad": Stage(_pad(batch), "scatter"),
    }
    if REUSES_OUTPUT:
        output = jagcodec.materialize(decoded, **pads)
        again = {**pads, "out": output}
        found["materialize, out="] = Stage(lambda: jagcodec.materialize(decoded, **again), "pad")
    return found


def _gather(batch: Batch) -> Callable[[], Any]:
    """The row kernel, one column, padded to packed; into warm memory where it takes some."""
    rows, width = batch.shape
    cells = batch.columns[COLUMN].reshape(rows * width)
    starts, lengths = np.arange(rows) * width, batch.lengths.numpy()
    options: dict[str, Any] = {}
    if "out" in inspect.signature(rowcopy.gather).parameters:
        options["out"] = rowcopy.gather(cells, starts, lengths)
    return lambda: rowcopy.gather(cells, starts, lengths, **options)


def _pad(batch: Batch) -> Callable[[], Any]:
    """The row kernel, one column, packed to padded, in warm memory."""
    rows, width = batch.shape
    cells = batch.columns[COLUMN].reshape(rows * width)
    starts, lengths = np.arange(rows) * width, batch.lengths.numpy()
    values = rowcopy.gather(cells, starts, lengths)
    rectangle = torch.empty_like(cells)
    in_one_pass = getattr(rowcopy, "pad", None)
    if in_one_pass is not None:
        begins = np.cumsum(lengths) - lengths
        out, pattern = rectangle.view(rows, width), np.int64(PADS[COLUMN]).tobytes()
        return lambda: in_one_pass(values, begins, lengths, out, None, pattern)
    fill = rectangle.numpy()

    def run() -> None:
        fill.fill(PADS[COLUMN])
        rowcopy.scatter(values, lengths, rectangle, starts)

    return run


def floors(batch: Batch) -> dict[str, Callable[[], Any]]:
    """The copies that stages stand beside, in warm memory."""
    values = valid_values(batch)
    copies = [cells.copy() for cells in values]
    pads = list(PADS.values())
    rectangles = [
        np.full(batch.shape, pad, cells.dtype) for cells, pad in zip(values, pads, strict=True)
    ]
    every = range(len(values))
    one = (list(PADS).index(COLUMN),)

    def copy(columns: Iterable[int]) -> None:
        for i in columns:
            np.copyto(copies[i], values[i])

    def pad(columns: Iterable[int]) -> None:
        for i in columns:
            rectangles[i].fill(pads[i])
        copy(columns)

    return {
        "copy": partial(copy, every),
        "pad": partial(pad, every),
        "gather": partial(copy, one),
        "scatter": partial(pad, one),
    }


def measure(case: Case, seconds: float, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Stages and floors in turns, in a process of their own, for about so many seconds."""
    context = processes()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, case, seconds), daemon=True)
    process.start()
    there.close()
    try:
        while isinstance(found := here.recv(), tuple):
            progress(*found)
    except EOFError as error:
        raise SystemExit(f"\nstages, {case}: the process died; its error is above") from error
    process.join()
    answer: dict[str, Any] = found
    return answer


def _serve(connection: Any, case: Case, seconds: float) -> None:
    quieted()
    batch = make_batch(case.lengths())

    def progress(done: int, rounds: int) -> None:
        connection.send((done, rounds))

    connection.send({"case": str(case), **timed(batch, seconds, progress)})


def timed(batch: Batch, seconds: float, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Milliseconds of every stage and floor, and the share of the floor's speed."""
    chosen, copies = stages(batch), floors(batch)
    runs = {name: stage.run for name, stage in chosen.items()}
    runs |= {f"floor: {name}": run for name, run in copies.items()}
    ms: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    rounds, done = ROUNDS[0], 0
    with collector_off():
        while done < rounds:
            for name, run in runs.items():
                ms[name].append(_time(run))
            done += 1
            if done == 2:  # the first has warmed everything up
                took = (time.perf_counter() - start) / 2
                rounds = max(ROUNDS[0], min(int(seconds / took), ROUNDS[1]))
                ms = {name: [] for name in runs}
            progress(done, rounds)
    spreads = {name: spread(found) for name, found in ms.items()}
    return {
        "rounds": rounds - 2,
        "stages": {
            name: {**spreads[name], "floor": stage.floor}
            | {"share": spreads[f"floor: {stage.floor}"]["ms"] / spreads[name]["ms"]}
            for name, stage in chosen.items()
        },
        "floors": {name: spreads[f"floor: {name}"] for name in copies},
    }


def _time(run: Callable[[], Any]) -> float:
    """Milliseconds of a run after others, so that every stage finds its own memory and code warm.

    Of a short one, the median of several: one interrupt is longer than it.
    """
    took = _once(run)
    runs = SHORT_RUNS if took < SHORT_MS else 1
    return statistics.median(_once(run) for _ in range(runs))


def _once(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    made = run()
    ms = 1e3 * (time.perf_counter() - start)
    del made
    return ms
