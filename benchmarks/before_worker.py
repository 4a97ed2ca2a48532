"""One version of the library at work: the process that `benchmarks.before` starts for each.

Which version, ``PYTHONPATH`` says. Questions and answers are lines of JSON on standard input and
output; whatever else is printed goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jagcodec
from benchmarks import before_values, sides
from benchmarks.shapes import PADS, Batch
from benchmarks.sides import Side
from benchmarks.trips import Runner, difference, quieted

MAKERS: dict[str, Callable[[Batch], Side]] = {
    "fused": sides.fused,
    "reused": sides.reused,
    "composed": sides.composed,
}


class Worker:
    """Answers questions about one version; one batch at a time."""

    def __init__(self) -> None:
        self._runners: dict[str, Runner] = {}

    def version(self) -> str:
        """The file that was imported, for the asker to see that it is the one meant."""
        return jagcodec.__file__

    def open(self, directory: str) -> None:
        """Map the batch in a directory and prepare a runner for each side."""
        batch = Batch.mapped(Path(directory))
        self._runners = {name: Runner(make(batch), batch) for name, make in MAKERS.items()}
        # What lives now lives on; walking all of it before each turn would empty the caches.
        gc.collect()
        gc.freeze()

    def turn(self, side: str, calls: int) -> dict[str, Any]:
        """Milliseconds of so many trips, one right after the other; the last one is verified."""
        runner = self._runners[side]
        ms: list[float] = []
        rectangles: Any = None
        gc.collect()
        gc.disable()
        for _ in range(calls):
            rectangles = None  # freed before the next trip, as a consumer would
            trip, rectangles = runner.run()
            ms.append(trip.total)
        gc.enable()
        return {"ms": ms, "wrong": difference(runner.batch, rectangles)}

    def digests(self) -> dict[str, str]:
        """Digests of every column that each side brings, and of the decoded TensorDict."""
        found = {}
        for name, runner in self._runners.items():
            _, rectangles = runner.run()
            for column, rectangle in rectangles.items():
                found[f"{name}, {column}"] = before_values.digest(rectangle)
        batch = next(iter(self._runners.values())).batch
        frames = jagcodec.encode_fields(
            batch.columns, lengths=batch.lengths, token_aligned_fields=PADS
        )
        found["decode"] = before_values.digest(jagcodec.decode(frames))
        return found

    def values(self) -> dict[str, str]:
        """Digests of values of every kind, which need no batch."""
        return before_values.digests()


def serve(questions: TextIO, answers: TextIO) -> None:
    """Answer until the other end closes."""
    worker = Worker()
    for line in questions:
        question = json.loads(line)
        answer = getattr(worker, question["ask"])(*question["arguments"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    quieted()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as to_asker:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin, to_asker)
