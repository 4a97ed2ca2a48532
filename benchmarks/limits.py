"""How little a trip of few rows can take in Python: ``python -m benchmarks.limits``.

    python -m benchmarks.limits [--shapes 64x512,gsm8k:64] [--rounds 300]

The fused trip of `sides`; the least that a trip of this kind can be, one loop over the columns on
either side around the row kernels, with no checks, no other type of column and a header that
nothing but it can read; and two padded formats. The second is no codec: it says what is left to
gain where Python makes a tensor per column. One process; the sides take turns of two trips, of
which the second counts; every result is compared with the input, outside the clock. Medians.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import msgpack
import numpy as np
import torch

from benchmarks import peers, sides
from benchmarks.machine import machine, versions
from benchmarks.shapes import PADS, Batch, Case, make_batch
from benchmarks.sides import Side
from benchmarks.trips import Runner, difference, quieted
from jagcodec import BatchedDataDict, rowcopy
from jagcodec.rowcopy import Copy, Pad

WARM_UP = 30


def least(batch: Batch) -> Side:
    """Six columns there and back, and nothing else: neither what it is given nor what it gets."""

    def encode(_: Any) -> list[Any]:
        lengths = batch.lengths.numpy()
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        width = int(lengths.max(initial=0))
        total, size, columns, places = int(offsets[-1]), 0, [], []
        for name, column in batch.columns.items():
            cells = column.numpy()
            columns.append([name, cells.dtype.str])
            places.append((cells, size, total * cells.itemsize))
            size += -(-total * cells.itemsize // 64) * 64
        block = np.empty(size, dtype=np.uint8)
        frames, tasks = [], []
        for cells, start, nbytes in places:
            room = block[start : start + nbytes]
            frames.append(room.data)
            tasks.append(Copy(room, cells, None, cells.shape[1], lengths, cells.itemsize))
        rowcopy.copy_all(tasks)
        return [msgpack.packb([len(lengths), width, columns]), offsets.data, *frames]

    def decode(received: list[Any]) -> BatchedDataDict:
        rows, width, columns = msgpack.unpackb(received[0])
        offsets = np.frombuffer(received[1], dtype=np.int64)
        lengths = np.diff(offsets)
        starts, size, places = offsets[:-1], 0, []
        for (name, code), frame in zip(columns, received[2:], strict=True):
            dtype = np.dtype(code)
            places.append((name, dtype, frame, size))
            size += -(-rows * width * dtype.itemsize // 64) * 64
        block = np.empty(size, dtype=np.uint8)
        rectangles, tasks = {}, []
        for name, dtype, frame, start in places:
            room = block[start : start + rows * width * dtype.itemsize]
            rectangles[name] = torch.from_numpy(np.ndarray((rows, width), dtype, room))
            source = np.frombuffer(frame, dtype=np.uint8)
            pad = dtype.type(PADS[name]).tobytes()
            tasks.append(Pad(room, source, starts, lengths, None, width, dtype.itemsize, pad))
        rowcopy.pad_all(tasks)
        return BatchedDataDict(rectangles)

    return Side(send=(("encode", encode),), receive=(("decode", decode),))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="64x512,gsm8k:64")
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    quieted()
    print({**machine(), **versions()})
    makers = {
        "fused": sides.fused,
        "least Python": least,
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
