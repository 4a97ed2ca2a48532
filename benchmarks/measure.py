"""Sides of a comparison in turns, and what is verified and counted outside the clock."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

Calls = Mapping[str, Callable[[], Any]]
Columns = Mapping[str, torch.Tensor]
Ratio = tuple[str, str]  # the time of the first side is compared with that of the second


def in_turns(
    calls: Calls, seconds: float, rounds: int = 3, turns: int = 1
) -> dict[str, list[float]]:
    """Milliseconds of each side, round by round.

    In a round, every side is called `turns` times, one call of each at a time in an order drawn
    anew, and the median counts. What a call makes is freed inside the clock. There are at least
    `rounds` rounds, and more until so many seconds have passed.
    """
    order = random.Random(0)
    names = list(calls)
    ms: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # warms up
    end = time.perf_counter() + seconds
    while len(ms[names[0]]) < rounds or time.perf_counter() < end:
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(turns):
            order.shuffle(names)
            for name in names:
                start = time.perf_counter()
                calls[name]()
                taken[name].append(1e3 * (time.perf_counter() - start))
        for name, each in taken.items():
            ms[name].append(statistics.median(each))
    return ms


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
    """Make sure that a result is right.

    Raises:
        SystemExit: It is wrong.
    """
    if not holds:
        raise SystemExit(f"VERIFICATION FAILED: {what}")


def difference(found: Columns, expected: Columns) -> str:
    """The first column that differs in dtype, shape or any bit; empty if none does."""
    if list(found.keys()) != list(expected.keys()):
        return f"columns {list(found.keys())}"
    for name, column in expected.items():
        mine = found[name]
        if mine.dtype != column.dtype or mine.shape != column.shape:
            return f"column {name!r}, a {mine.dtype} tensor of shape {tuple(mine.shape)}"
        pairs = zip(_pieces(mine), _pieces(column), strict=True)
        if not all(np.array_equal(a, b) for a, b in pairs):
            return f"column {name!r}"
    return ""


def same_columns(found: Columns, expected: Columns, what: str) -> None:
    """Make sure that columns are the same, bit for bit."""
    wrong = difference(found, expected)
    check(not wrong, f"{what}: {wrong}")


def _pieces(tensor: torch.Tensor) -> list[Any]:
    # Small pieces and no torch, so that comparing leaves neither a changed heap nor busy threads.
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.array_split(flat, max(1, flat.nbytes // 2**18))


def copied(frames: Sequence[Any]) -> list[Any]:
    """The transport: one copy of each frame."""
    head, *rest = frames
    return [bytes(head), *map(bytearray, rest)]


# --- counting ----------------------------------------------------------------------------------


def calls_of(run: Callable[[], Any]) -> int:
    """Calls of functions, in Python and built in, during one run; those of torch count too.

    The count is the same for the same code on the same versions of Python, torch and tensordict. A
    loop inside compiled code is one call, so a loop over rows in Python shows, and one in C does
    not.
    """
    return _profiled(run, lambda frame, event: event in ("call", "c_call")) - 1  # of setprofile


def functions_entered(run: Callable[[], Any], package: Path) -> int:
    """Calls of named Python functions whose source is in `package`, during one run.

    Comprehensions, lambdas and module bodies do not count. A generator counts each time that it is
    resumed.
    """

    def entered(frame: Any, event: str) -> bool:
        code = frame.f_code
        named = event == "call" and not code.co_name.startswith("<")
        return named and Path(code.co_filename).is_relative_to(package)

    return _profiled(run, entered)


def _profiled(run: Callable[[], Any], counts: Callable[[Any, str], bool]) -> int:
    count = 0

    def profile(frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += counts(frame, event)

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
