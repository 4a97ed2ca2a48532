"""The row copies of one int64 column, by every backend, beside a memcpy of the same bytes.

    gather   padded rows -> rows end to end              floor: one memcpy of the valid bytes
    pad      rows end to end -> the padded rectangle,    floor: one memset of the rectangle and
             pads of 0 (memset) or of 151643 (words)            one memcpy of the valid bytes
    fresh    the same into memory that holds the         floor: one memcpy of the valid bytes
             pads already

All memory was written before ("warm"), so that no page is new. memcpy and memset are numpy's
`copyto` and `fill`, in one thread. The players take turns, so that a slow moment of the machine
hits all of them; times are medians, and ratios the medians of each run over the floor's next to it.
"best" is the fastest run over the floor's fastest, which a busy machine disturbs less. Every result
is compared with one made by plain slices, after the clock stopped.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from jagcodec import rowcopy
from jagcodec.memory.tensor_bytes import IntArray

SHAPES = ((512, 1536), (1024, 8192), (16384, 512))
FILL = 0.275  # of the rectangle, as of the GSM8K rollouts
PAD = 151643
SEED = 0
WARM_UP = 3  # runs that are not counted

T = TypeVar("T")


def log_normal_lengths(rows: int, width: int) -> IntArray:
    """(rows,) lengths of 1 to `width` that fill `FILL` of the rectangle, long-tailed."""
    spread = np.exp(0.6 * np.random.default_rng(SEED).standard_normal(rows))
    low, high = 0.0, float(width)
    while high - low > 1e-6:
        scale = (low + high) / 2
        lengths = np.clip(scale * spread, 1, width).astype(np.int64)
        low, high = (scale, high) if lengths.mean() < FILL * width else (low, scale)
    return lengths


class Column:
    """One column in both layouts, and the memory that is written over and over."""

    def __init__(self, rows: int, width: int) -> None:
        self.lengths = log_normal_lengths(rows, width)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.places = np.arange(rows, dtype=np.int64) * width
        numbers = np.random.default_rng(SEED).integers(0, PAD, (rows, width))
        self.padded = torch.from_numpy(numbers)
        valid = np.arange(width) < self.lengths[:, None]
        self.values = torch.from_numpy(numbers[valid])
        self.rectangles = {pad: torch.from_numpy(np.where(valid, numbers, pad)) for pad in (0, PAD)}
        # numpy's memory, which asks for huge pages, on both sides.
        self.gathered = torch.from_numpy(np.full(len(self.values), -1))
        self.outs = {
            name: torch.from_numpy(np.full((rows, width), before))
            for name, before in (("pad 0", -1), (f"pad {PAD}", -1), ("fresh", 0))
        }
        self.floors = np.full((rows, width), -1), np.full(len(self.values), -1)

    def tasks(self) -> dict[str, Callable[[], torch.Tensor]]:
        """What is timed, by the backend in use."""
        cells = self.padded.view(-1)

        def pad(name: str, number: int, fresh: bool) -> Callable[[], torch.Tensor]:
            pattern = number.to_bytes(8, "little")
            args = (self.values, self.starts, self.lengths, self.outs[name], None, pattern)
            return lambda: rowcopy.pad(*args, fresh=fresh)

        return {
            "gather": lambda: rowcopy.gather(cells, self.places, self.lengths, self.gathered),
            "pad 0": pad("pad 0", 0, False),
            f"pad {PAD}": pad(f"pad {PAD}", PAD, False),
            "fresh": pad("fresh", 0, True),
        }

    def floor(self, task: str) -> None:
        """The same bytes by memcpy and memset."""
        rectangle, values = self.floors
        if task.startswith("pad"):
            rectangle.fill(0)
        np.copyto(values, self.values.numpy())

    def check(self, task: str, result: torch.Tensor) -> None:
        expected = (
            self.values if task == "gather" else self.rectangles[PAD if task == f"pad {PAD}" else 0]
        )
        if not torch.equal(result, expected):
            raise SystemExit(f"{task}: wrong result")


def clocked(function: Callable[[], T]) -> tuple[float, T]:
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description="The row copies beside memcpy.")
    parser.add_argument("--runs", type=int, default=60, help="timed runs of each (default 60)")
    parser.add_argument("--threads", type=int, help="at most; default as torch chose")
    parser.add_argument("--backends", nargs="+", help="default: compiled, if built, and numpy")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if rowcopy.backend().missing is not None:
        print(f"no compiled backend: {rowcopy.backend().missing}")
    every: list[rowcopy.Name] = ["compiled", "numpy"]
    backends = [name for name in every if name in (options.backends or _installed())]
    print(f"{torch.get_num_threads()} threads at most, medians of {options.runs} runs in turn")
    print(f"{'rows x width':14}{'task':12}{'floor us':>10}", end="")
    print(*(f"{name + ' us':>13}{'ratio':>7}{'best':>6}" for name in backends), sep="")
    for rows, width in SHAPES:
        column = Column(rows, width)
        times: dict[tuple[str, str], list[float]] = {}
        tasks = column.tasks()
        for _ in range(options.runs + WARM_UP):
            for task, copy in tasks.items():
                floor, _ = clocked(partial(column.floor, task))
                times.setdefault((task, "floor"), []).append(floor)
                for name in backends:
                    rowcopy.use_backend(name)
                    seconds, result = clocked(copy)
                    times.setdefault((task, name), []).append(seconds)
                    column.check(task, result)
        for task in column.tasks():
            floors = times[task, "floor"][WARM_UP:]
            line = f"{rows} x {width:<{11 - len(str(rows))}}{task:12}{_us(floors):>10}"
            for name in backends:
                seconds_of = times[task, name][WARM_UP:]
                ratios = [a / b for a, b in zip(seconds_of, floors, strict=True)]
                line += f"{_us(seconds_of):>13}{statistics.median(ratios):>7.2f}"
                line += f"{min(seconds_of) / min(floors):>6.2f}"
            print(line, flush=True)


def _installed() -> list[str]:
    return ["numpy"] if rowcopy.backend().missing else ["compiled", "numpy"]


def _us(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:,.0f}"


if __name__ == "__main__":
    main()
