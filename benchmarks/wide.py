"""Some layers of a wide column: the bytes that a stage reads, and how long each way takes.

    python -m benchmarks.wide [--rows 48] [--tokens 1024] [--turns 7]

A column of routed experts, (tokens, 40, 8) int16 per row, is encoded with its tokens outermost, as
always, and with its layers outermost. From a file, read by ranges, a stage makes the rectangle of 5
of the 40 layers in each of several ways, all of them in turn in one run; every rectangle is
compared with the one that torch makes. Each time is the median of its turns, and its ratio to that
of the first way the median of the ratios within a turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from jagcodec import dump, encode_rows, materialize, open_wire, pack_rows

LAYERS, EXPERTS = 40, 8
WANTED = slice(10, 15)
NAME = "routed_experts"


class Source:
    """A file that is read by ranges, and how many bytes were asked for."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.read = 0

    def __call__(self, offset: int, size: int) -> bytes:
        """Some bytes of it."""
        self.read += size
        return os.pread(self._file, size, offset)


def make_rows(rows: int, tokens: int) -> list[torch.Tensor]:
    """Rows of up to `tokens` tokens, each with the experts of its layers."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(tokens // 8, tokens + 1, rows)
    return [
        torch.from_numpy(rng.integers(0, 128, (n, LAYERS, EXPERTS), dtype=np.int16))
        for n in lengths.tolist()
    ]


def rectangle_of(rows: list[torch.Tensor]) -> torch.Tensor:
    """What a stage wants, as torch makes it."""
    wanted = [row[:, WANTED] for row in rows]
    return torch.nn.utils.rnn.pad_sequence(wanted, batch_first=True, padding_value=-1)


def ways_of(by_token: Source, by_layer: Source) -> dict[str, tuple[Source, Callable[[], Any]]]:
    """Each way to that rectangle, and what it reads from."""
    pads = {NAME: -1}

    def all_of(source: Source) -> torch.Tensor:
        whole: torch.Tensor = materialize(open_wire(source), pad_value_dict=pads)[NAME]
        return whole[:, :, WANTED]

    def some_of(source: Source) -> torch.Tensor:
        batch = open_wire(source).inner({NAME: (1, WANTED)})
        some: torch.Tensor = materialize(batch, pad_value_dict=pads)[NAME]
        return some

    return {
        "by token, all layers": (by_token, lambda: all_of(by_token)),
        "by token, inner": (by_token, lambda: some_of(by_token)),
        "by layer, all layers": (by_layer, lambda: all_of(by_layer)),
        "by layer, inner": (by_layer, lambda: some_of(by_layer)),
    }


def measure(rows: list[torch.Tensor], turns: int) -> list[tuple[str, int, float, float]]:
    """For each way its name, bytes read, seconds, and seconds relative to the first way.

    Raises:
        ValueError: A way gave another rectangle.
    """
    wanted = rectangle_of(rows)
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for name, outermost in (("token", None), ("layer", {NAME: 1})):
            path = os.path.join(folder, name)
            dump(pack_rows({NAME: rows}), path, outermost=outermost)
            sources.append(Source(path))
        ways = ways_of(*sources)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        read: dict[str, int] = {}
        for turn in range(turns + 1):
            for name, (source, way) in ways.items():
                source.read = 0
                start = time.perf_counter()
                found = way()
                took = time.perf_counter() - start
                read[name] = source.read
                if not torch.equal(found, wanted):
                    raise ValueError(f"{name}: another rectangle")
                if turn:  # the first is for caches
                    seconds[name].append(took)
    first = next(iter(seconds.values()))
    return [
        (name, read[name], statistics.median(own), _ratio(own, first))
        for name, own in seconds.items()
    ]


def measure_encoding(rows: list[torch.Tensor], turns: int) -> list[tuple[str, int, float, float]]:
    """The same of writing a message, by how its cells lie."""
    options: dict[str, dict[str, Any]] = {
        "by token": {},
        "by layer": {"outermost": {NAME: 1}},
        "by token, narrow": {"narrow": {NAME: True}},
        "by layer, narrow": {"outermost": {NAME: 1}, "narrow": {NAME: True}},
    }
    seconds: dict[str, list[float]] = {name: [] for name in options}
    sizes: dict[str, int] = {}
    for turn in range(turns + 1):
        for name, option in options.items():
            start = time.perf_counter()
            frames = encode_rows({NAME: rows}, **option)
            took = time.perf_counter() - start
            sizes[name] = sum(memoryview(frame).nbytes for frame in frames)
            if turn:
                seconds[name].append(took)
    first = next(iter(seconds.values()))
    return [
        (name, sizes[name], statistics.median(own), _ratio(own, first))
        for name, own in seconds.items()
    ]


def _ratio(own: list[float], first: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, first, strict=True))


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    rows = make_rows(given.rows, given.tokens)
    cells = sum(row.nbytes for row in rows)
    print(machine())
    print(f"{given.rows} rows, {cells / 1e6:.1f} MB of cells, {given.turns} turns")
    for title, found in (
        ("writing", measure_encoding(rows, given.turns)),
        ("5 of 40 layers to a rectangle", measure(rows, given.turns)),
    ):
        print(f"{title:32} {'MB':>8} {'of cells':>8} {'ms':>8} {'of first':>8}")
        for name, size, took, ratio in found:
            print(
                f"  {name:30} {size / 1e6:8.2f} {size / cells:8.3f} {took * 1e3:8.1f} {ratio:8.2f}"
            )


if __name__ == "__main__":
    main()
