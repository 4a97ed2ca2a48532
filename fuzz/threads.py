#!/usr/bin/env python3
"""The row kernel with many threads, for ThreadSanitizer: ``make sanitize``.

Tasks that are large enough for the kernel's own threads, of all three functions, from one thread of
Python and from several at once: over buffers of their own, and reading the same. What they write is
compared with what the kernel writes in one thread. Only the standard library, because everything
that is imported runs under the sanitizer, too.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from array import array
from itertools import accumulate
from typing import Any

ROWS, WIDTH = 601, 4099
THREADS = (2, 3, 8, 64)


def load(path: str) -> Any:
    """The extension module at a path, without the package that it belongs to."""
    spec = importlib.util.spec_from_file_location("_kernel", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(values: Any) -> array[int]:
    """As int64."""
    return array("q", values)


class Case:
    """Columns of one batch: some MiB of rows of very different lengths, many of them empty."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [rng.choice([0, 0, 1, rng.randrange(WIDTH), WIDTH]) for _ in range(ROWS)]
        ends = [*accumulate(lengths)]
        self.total = ends[-1]
        self.lengths = numbers(lengths)
        self.starts = numbers([0, *ends[:-1]])
        self.left = numbers(rng.randrange(WIDTH - length + 1) for length in lengths)
        self.cells = {cell: rng.randbytes(self.total * cell) for cell in (1, 4, 8)}

    def copies(self) -> tuple[list[Any], list[Any]]:
        """Tasks of `copy`: out of a rectangle, and end to end; and what they write."""
        outs: list[Any] = [bytearray(self.total * cell) for cell in self.cells]
        tasks: list[Any] = [
            (out, src, None, self.starts, self.lengths, cell)
            for out, (cell, src) in zip(outs, self.cells.items(), strict=True)
        ]
        rectangle = bytearray(ROWS * WIDTH * 4)
        tasks.append((rectangle, self.cells[4], WIDTH, None, self.lengths, 4))
        return tasks, [*outs, rectangle]

    def pads(self) -> tuple[list[Any], list[Any]]:
        """Tasks of `pad`, with pads on either side; and what they write."""
        outs = [bytearray(ROWS * WIDTH * cell) for cell in self.cells]
        tasks = [
            (out, src, self.starts, self.lengths, left, WIDTH, cell, bits)
            for out, (cell, src), left, bits in zip(
                outs,
                self.cells.items(),
                (None, self.left, None),
                (b"\7", b"ab", b"\0"),
                strict=True,
            )
        ]
        return tasks, outs

    def ends(self) -> tuple[list[Any], list[Any]]:
        """Tasks of `ends`; and what they write."""
        outs: list[Any] = []
        tasks = []
        for cell, src in self.cells.items():
            rows = self.total // WIDTH
            starts, lengths = numbers([-1] * rows), numbers([-1] * rows)
            outs += starts, lengths
            tasks.append((src, WIDTH, WIDTH, cell, starts, lengths))
        return tasks, outs


def run(kernel: Any, case: Case, threads: int) -> list[Any]:
    """What all three functions write."""
    written = []
    for function, make in (("copy", case.copies), ("pad", case.pads), ("ends", case.ends)):
        tasks, outs = make()
        getattr(kernel, function)(tasks, threads)
        written += outs
    return written


def main(path: str, rounds: int = 3) -> int:
    """Compare many threads with one."""
    kernel = load(path)
    failed: list[str] = []

    def compare(case: Case, expected: list[Any], threads: int) -> None:
        if run(kernel, case, threads) != expected:
            failed.append(f"{threads} threads write something else than one")

    for seed in range(rounds):
        case = Case(seed)
        expected = run(kernel, case, 1)
        for threads in THREADS:
            compare(case, expected, threads)
        # Several calls at a time, which read the same memory.
        callers = [
            threading.Thread(target=compare, args=(case, expected, threads)) for threads in THREADS
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    print(*failed or ["every number of threads writes the same"], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
