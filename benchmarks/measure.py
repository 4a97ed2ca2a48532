"""The clock of all benchmarks, and what is verified and counted outside of it."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

Calls = Mapping[str, Callable[[], Any]]
Columns = Mapping[str, torch.Tensor]
Ratio = tuple[str, str]  # the time of the first side is compared with that of the second
Step = tuple[str, Callable[[Any], Any]]
"""A name, and a function that takes the value of the step before and gives that of the next."""


def in_turns(calls: Calls, seconds: float = 0, rounds: int = 3, warm: int = 1) -> dict[str, Any]:
    """What the calls of each side return, round by round, after some rounds that do not count.

    In a round, every side is called once, in an order drawn anew. There are at least `rounds`
    rounds, and more until so many seconds have passed.
    """
    order, names = random.Random(0), list(calls)
    found: dict[str, list[Any]] = {name: [] for name in calls}
    for call in [*calls.values()] * warm:
        call()
    end = time.perf_counter() + seconds
    while len(found[names[0]]) < rounds or time.perf_counter() < end:
        for name in order.sample(names, len(names)):
            found[name].append(calls[name]())
    return found


def times(
    calls: Calls, seconds: float, rounds: int = 3, before: Callable[[], object] = bool
) -> dict[str, list[float]]:
    """Milliseconds of each side, round by round. What a call makes is freed inside the clock.

    `before` is called before each call, outside the clock.
    """
    timed = {name: partial(_timed, call, before) for name, call in calls.items()}
    return in_turns(timed, seconds, rounds)


def _timed(call: Callable[[], Any], before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def cool() -> None:
    """Read and write 256 MB of other memory, so that the caches hold little else."""
    other = _other_memory()
    np.add(other, 1, out=other)


@cache
def _other_memory() -> Any:
    return np.zeros(256_000_000 // 8, dtype=np.int64)


def walk(steps: Iterable[Step], value: Any = None) -> tuple[dict[str, float], Any]:
    """Milliseconds of each step, and the last value; all values live until the last is there."""
    ms, alive = {}, [value]
    for name, step in steps:
        start = time.perf_counter()
        alive.append(step(alive[-1]))
        ms[name] = 1e3 * (time.perf_counter() - start)
    return ms, alive[-1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and the lowest and the highest value."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The ratios within each round, because the clock of a shared machine drifts."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def summary(ms: Mapping[str, Sequence[float]], ratios: Sequence[Ratio]) -> dict[str, Any]:
    """Medians of all sides, and the ratios between some of them."""
    return {
        "rounds": len(next(iter(ms.values()))),
        "ms": {name: statistics.median(each) for name, each in ms.items()},
        "ratios": {
            f"{ours} / {theirs}": spread(ratio(ms[ours], ms[theirs])) for ours, theirs in ratios
        },
    }


# --- verifying ---------------------------------------------------------------------------------


def check(holds: bool, what: str) -> None:
    """Make sure that a result is right."""
    if not holds:
        raise SystemExit(f"VERIFICATION FAILED: {what}")


def same_columns(found: Columns, expected: Columns, what: str) -> None:
    """Make sure that columns are the same in dtype, shape and every bit."""
    check(list(found.keys()) == list(expected.keys()), f"{what}: columns {list(found.keys())}")
    for name, column in expected.items():
        mine = found[name]
        alike = mine.dtype == column.dtype and mine.shape == column.shape
        check(alike, f"{what}: column {name!r}, a {mine.dtype} tensor of {tuple(mine.shape)}")
        pairs = zip(_pieces(mine), _pieces(column), strict=True)
        check(all(np.array_equal(a, b) for a, b in pairs), f"{what}: column {name!r}")


def _pieces(tensor: torch.Tensor) -> list[Any]:
    # Small pieces and no torch, so that comparing leaves neither a changed heap nor busy threads.
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.array_split(flat, max(1, flat.nbytes // 2**18))


def copied(frames: Sequence[Any]) -> list[Any]:
    """The transport: one copy of each frame."""
    head, *rest = frames
    return [bytes(head), *map(bytearray, rest)]


# --- counting ----------------------------------------------------------------------------------


def functions_entered(run: Callable[[], Any], package: Path) -> int:
    """Calls of named Python functions whose source is in `package`, during one run.

    Comprehensions, lambdas and module bodies do not count. A generator counts each time that it is
    resumed.
    """
    count = 0

    def profile(frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        code = frame.f_code
        named = event == "call" and not code.co_name.startswith("<")
        count += named and Path(code.co_filename).is_relative_to(package)

    run()  # what the first run imports and caches does not count
    with collector_off():
        sys.setprofile(profile)
        try:
            made = run()
        finally:
            sys.setprofile(None)
    del made
    return count


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
