"""A quick run compared with stored figures: ``python -m benchmarks.bench --part guard``.

Two kinds of figures are stored in `benchmarks/guard.json`, by shape and stage:

* `functions`: how many functions of the library are called. It depends on the code alone.
* `ratios`: the time compared with one copy of the batch's valid bytes in the same process, the
  fastest of many rounds of both. A slow machine slows both, so the ratio moves less than either. A
  stage counts as slower only if it stays above the tolerance in three measurements.

``--write`` stores the figures found. A change that slows a stage must therefore change the stored
file, and is seen in review.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jagcodec
from benchmarks.measure import Calls, functions_entered, times
from benchmarks.shapes import DESIGN, PADS, SMALL, Batch, lengths_of, make_batch
from benchmarks.sides import valid_values

STORED = Path(__file__).with_name("guard.json")
PACKAGE = Path(jagcodec.__file__).parent
TOLERANCE = {"functions": 1.0, "ratios": 1.5}
ATTEMPTS = 3

Figures = Mapping[str, Mapping[str, Mapping[str, float]]]  # by kind, by shape, by stage


def stages(batch: Batch) -> dict[str, Any]:
    """Every stage over one batch, ready to be run again and again."""
    columns = batch.columns
    named: dict[str, Any] = {"lengths": batch.lengths, "token_aligned_fields": PADS}
    pads: dict[str, Any] = {"pad_value_dict": PADS}
    packed = jagcodec.pack_jagged_fields(columns, **named)
    frames = [bytearray(frame) for frame in jagcodec.encode_fields(columns, **named)]
    message = bytearray(sum(map(len, frames)) + 64 * len(frames) + 4096)
    decoded = jagcodec.decode(frames)
    output = jagcodec.materialize(decoded, **pads)
    return {
        "pack": lambda: jagcodec.pack_jagged_fields(columns, **named),
        "encode": lambda: jagcodec.encode(packed),
        "encode_fields": lambda: jagcodec.encode_fields(columns, **named),
        "encode_fields, out=": lambda: jagcodec.encode_fields(columns, **named, out=message),
        "decode": lambda: jagcodec.decode(frames),
        "open_wire": lambda: jagcodec.open_wire(frames),
        "materialize": lambda: jagcodec.materialize(decoded, **pads),
        "materialize, out=": lambda: jagcodec.materialize(decoded, **pads, out=output),
        "open_wire + materialize": lambda: jagcodec.materialize(jagcodec.open_wire(frames), **pads),
    }


def guard(seconds: float, write: bool = False, shapes: Sequence[str] = (SMALL, DESIGN)) -> int:
    """Compare with the stored figures, and print what is worse; the exit status."""
    stored = json.loads(STORED.read_text())
    found: dict[str, Any] = {"functions": {}, "ratios": {}}
    for shape in shapes:
        batch = make_batch(lengths_of(shape))
        runs = stages(batch)
        counted = {name: functions_entered(run, PACKAGE) for name, run in runs.items()}
        found["functions"][shape] = counted
        timed = fastest(runs, batch, seconds)
        for _ in range(ATTEMPTS - 1):
            if write or worse(stored, {"ratios": {shape: timed}}):
                again = fastest(runs, batch, seconds)
                timed = {name: min(again[name], ratio) for name, ratio in timed.items()}
        found["ratios"][shape] = timed
    if write:
        STORED.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written: {STORED}")
        return 0
    lines = worse(stored, found)
    print("\n".join(lines) or "no stage calls more or is slower than stored")
    return 1 if lines else 0


def fastest(runs: Calls, batch: Batch, seconds: float) -> dict[str, float]:
    """The fastest time of each stage compared with the fastest copy of the valid bytes."""
    values = valid_values(batch)
    copies = [cells.copy() for cells in values]

    def copy() -> None:
        for cells, to in zip(values, copies, strict=True):
            np.copyto(to, cells)

    ms = times({**runs, "copy": copy}, seconds)
    return {name: float(f"{min(ms[name]) / min(ms['copy']):.3g}") for name in runs}


def worse(stored: Figures, found: Figures) -> list[str]:
    """Stages whose figure is above the stored one by more than the tolerance."""
    return [
        f"WORSE: {kind}, {stage}, {shape}: {figure:g}, stored {before:g}"
        for kind, by_shape in found.items()
        for shape, by_stage in by_shape.items()
        for stage, figure in by_stage.items()
        if (before := stored[kind].get(shape, {}).get(stage)) and figure > TOLERANCE[kind] * before
    ]
