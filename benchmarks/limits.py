"""What a trip of few rows would take if its header cost nothing: ``python -m benchmarks.limits``.

    python -m benchmarks.limits [--shapes 64x512,gsm8k:64] [--rounds 300]

The fused trip of `sides`, the same with a header that was made, read and checked beforehand, and
the padded formats that are ahead at 64 rows. The second sends one batch over and over, and is no
codec: it says how much there is to gain. One process; the sides take turns of two trips, of which
the second counts; every result is compared with the input, outside the clock. Medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import jagcodec
from benchmarks import peers, sides
from benchmarks.machine import machine, versions
from benchmarks.shapes import PADS, Batch, Case, make_batch
from benchmarks.sides import Side
from benchmarks.trips import Runner, difference, quieted
from jagcodec import columns

WARM_UP = 30


def header_for_nothing(batch: Batch) -> Side:
    """The fused trip over a header, offsets included, that is there already."""
    options: dict[str, Any] = {"lengths": batch.lengths, "token_aligned_fields": PADS}
    head = jagcodec.encode_fields(batch.columns, **options)[:2]
    opened: dict[str, Any] = {}

    class Columns:
        """In place of an encoding: what it would put behind the header."""

        def batch(self, rows: int, planned: list[tuple[str, Any]]) -> list[Any]:
            return [column for _, column in planned]

    def message(walk: Callable[[Any], list[Any]], **_: Any) -> list[Any]:
        return [*head, *walk(Columns())]

    def encode(_: Any) -> Any:
        with mock.patch.object(columns, "message", message):
            return jagcodec.encode_fields(batch.columns, **options)

    def open_wire(received: list[Any]) -> Any:
        if not opened:  # the receive buffers are the same ones each time
            wire = jagcodec.open_wire(received)
            cells = {name: wire.cells(name) for name in wire.fields}
            mock.patch.object(wire, "cells", cells.__getitem__).start()
            opened["wire"] = wire
        return opened["wire"]

    return Side(
        send=(("encode_fields", encode),),
        receive=(
            ("open_wire", open_wire),
            ("materialize", lambda wire: jagcodec.materialize(wire, pad_value_dict=PADS)),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="64x512,gsm8k:64")
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    quieted()
    print({**machine(), **versions()})
    makers = {
        "fused": sides.fused,
        "fused, header for nothing": header_for_nothing,
        "pickle": peers.pickle5,
        "safetensors": peers.safetensors,
    }
    for case in map(Case.parse, arguments.shapes.split(",")):
        batch = make_batch(case.lengths())
        runners = {name: Runner(make(batch), batch) for name, make in makers.items()}
        times: dict[str, list[float]] = {name: [] for name in makers}
        for done in range(WARM_UP + arguments.rounds):
            for name, runner in runners.items():
                runner.run()
                trip, rectangles = runner.run()
                if difference(batch, rectangles):
                    raise SystemExit(f"{name}, {case}: {difference(batch, rectangles)}")
                if done >= WARM_UP:
                    times[name].append(trip.total)
        for name, taken in times.items():
            print(f"{case!s:10} {name:26} {statistics.median(taken):.2f} ms")


if __name__ == "__main__":
    main()
