#!/usr/bin/env python3
"""Read messages that grow: ``python fuzz/grow.py --seconds 60``.

Each seed names a recipe (`tests/wire/grown.py`), which makes messages of n and 4n units. Every
reader gets both, and an input fails if

* anything but a value or one of the library's errors comes out,
* reading 4n takes over 6.4 times the processor time of n, and 8n over 6.4 times that of 2n,
* memory grows that much faster than the message, or passes `MOST_PER_BYTE` of SECURITY.md's table.

It looks at the clock, so it is no part of `make test`, which counts operations instead
(`tests/wire/test_growth.py`). One seed again: ``--seed 7 --inputs 1``, with the
same ``--size``.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from resident import MOST_PER_BYTE, Read, cost

from tests.wire.grown import Recipe, grown, singles
from tests.wire.growth import outcome, readers_of

# Four times the message may take so many times as much: caches and allocators are not linear.
MOST_GROWTH = 4 * 1.6
# Below these nothing is compared: a tenth of a second, and what an allocator keeps.
FLOOR_SECONDS = 0.1
FLOOR_BYTES = 24 << 20
# Address space on top of what the libraries take.
MEMORY = 8 << 30


def _seconds(read: Read) -> float:
    """The best of three."""
    return min(cost(read)[0] for _ in range(3))


def _reading(reader: Callable[[list[bytes]], Any], frames: list[bytes]) -> Read:
    return lambda: outcome(reader, frames)


def faults(recipe: Recipe, units: int, counts: Counter[str]) -> list[str]:
    """What readers do with messages of this recipe that they should not."""
    small, large = recipe.make(units // 4), recipe.make(units)
    size = sum(map(len, large))
    counts["bytes"] += size
    found = []
    for name, reader in readers_of(recipe.batch).items():
        try:
            seconds, memory = cost(_reading(reader, large))
            less_seconds, less_memory = cost(_reading(reader, small))
            counts["readings"] += 2
            counts["values"] += not isinstance(outcome(reader, small), Exception)
            if memory > MOST_PER_BYTE * size + FLOOR_BYTES:
                found.append(f"{name}: {memory >> 20} MiB, {memory // size} bytes per byte")
            if memory > MOST_GROWTH * less_memory + FLOOR_BYTES:
                again = [cost(_reading(reader, frames))[1] for frames in (small, large)]
                if again[1] > MOST_GROWTH * again[0] + FLOOR_BYTES:
                    found.append(f"{name}: {again[0] >> 20} MiB, then {again[1] >> 20}")
            if seconds > MOST_GROWTH * less_seconds + FLOOR_SECONDS:
                counts["confirmed or not"] += 1
                slow = _slow(recipe, units, reader)
                if slow:
                    found.append(f"{name}: {slow}")
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-3:])
            found.append(f"{name}: {type(error).__name__}: {error!s:.300}\n{text}")
    return found


def _slow(recipe: Recipe, units: int, reader: Callable[[list[bytes]], Any]) -> str | None:
    """The times of n, 2n, 4n and 8n, if they grow faster than the messages."""
    sizes = [units // 4, units // 2, units, 2 * units]
    times = [_seconds(_reading(reader, recipe.make(n))) for n in sizes]
    grows = all(b > MOST_GROWTH * a for a, b in zip(times, times[2:], strict=False))
    return " / ".join(f"{t:.3f}" for t in times) + f" s at {sizes} units" if grows else None


def _recipes(args: argparse.Namespace) -> Iterator[tuple[str, Recipe]]:
    alone = [("alone", recipe) for recipe in singles()] if args.each else []
    seeds = range(args.seed, sys.maxsize, args.step)
    drawn = ((f"--seed {seed}", grown(seed)) for seed in seeds)
    return islice(chain(alone, drawn), args.inputs)


def main() -> int:
    """Grow recipes until the time or the inputs are used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="to go on for")
    parser.add_argument("--inputs", type=int, default=sys.maxsize, help="how many seeds")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first; or the time")
    parser.add_argument("--step", type=int, default=1, help="from seed to seed")
    parser.add_argument("--size", type=int, default=200_000, help="bytes of a message of 4n")
    parser.add_argument("--each", action="store_true", help="every kind by itself first")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))

    # What the libraries made stays: looking through it again takes a quarter of a second each time.
    gc.collect()
    gc.freeze()
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name, recipe in _recipes(args):
            if time.monotonic() - begin > args.seconds:
                break
            counts["inputs"] += 1
            for fault in faults(recipe, recipe.of_size(args.size), counts):
                counts["faults"] += 1
                print(f"{name} {recipe.name}\n    {fault}", flush=True)
    except KeyboardInterrupt:
        pass
    print(json.dumps({**counts, "seconds": round(time.monotonic() - begin)}), flush=True)
    return 1 if counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
