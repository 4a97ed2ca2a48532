"""A quick run compared with stored figures: ``python -m benchmarks.bench --part guard``.

Two kinds of figures are stored in `benchmarks/guard.json`, by stage and shape:

* `calls`: how many functions are called. Any difference is a change of the code, or of Python,
  torch or tensordict: stored figures of other versions are not compared.
* `ratios`: the time compared with one copy of the batch's valid bytes in the same process, the
  fastest of many rounds of both. A slow machine slows both, so the ratio moves less than either. A
  stage counts as slower only if it stays above the tolerance in three measurements.

``--write`` stores the figures found. A change that slows a stage must therefore change the stored
file, and is seen in review.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jagcodec
from benchmarks import machine
from benchmarks.measure import Calls, calls_of, in_turns
from benchmarks.shapes import DESIGN, PADS, SMALL, Batch, lengths_of, make_batch
from benchmarks.sides import valid_values

STORED = Path(__file__).with_name("guard.json")
TOLERANCE = 1.5  # of ratios
ATTEMPTS = 3

Figures = dict[str, dict[str, float]]  # by shape, by stage


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
    batches = {shape: make_batch(lengths_of(shape)) for shape in shapes}
    counted: Figures = {}
    timed: Figures = {}
    for shape, batch in batches.items():
        runs = stages(batch)
        counted[shape] = {name: calls_of(run) for name, run in runs.items()}
        timed[shape] = fastest(runs, batch, seconds)
        for _ in range(ATTEMPTS - 1):
            if write or slower(stored, {shape: timed[shape]}):
                again = fastest(runs, batch, seconds)
                timed[shape] = {name: min(again[name], ms) for name, ms in timed[shape].items()}
    if write:
        found = {"versions": counted_with(), "calls": counted, "ratios": timed}
        STORED.write_text(json.dumps(found, indent=1) + "\n")
        print(f"written: {STORED}")
        return 0
    worse = [*more_calls(stored, counted), *slower(stored, timed)]
    print("\n".join(worse) or "no stage calls more or is slower than stored")
    return 1 if worse else 0


def fastest(runs: Calls, batch: Batch, seconds: float) -> dict[str, float]:
    """The fastest time of each stage compared with the fastest copy of the valid bytes."""
    values = valid_values(batch)
    copies = [cells.copy() for cells in values]

    def copy() -> None:
        for cells, to in zip(values, copies, strict=True):
            np.copyto(to, cells)

    ms = in_turns({**runs, "copy": copy}, seconds)
    return {name: float(f"{min(ms[name]) / min(ms['copy']):.3g}") for name in runs}


def slower(stored: Mapping[str, Any], timed: Figures) -> list[str]:
    """Stages whose ratio is above the stored one by more than the tolerance."""
    return [
        f"SLOWER: {stage}, {shape}: {found:g} copies of the valid bytes, stored {before:g}"
        for shape, ratios in timed.items()
        for stage, found in ratios.items()
        if (before := stored["ratios"].get(shape, {}).get(stage)) and found > TOLERANCE * before
    ]


def more_calls(stored: Mapping[str, Any], counted: Figures) -> list[str]:
    """Stages that call more functions than stored; none if the versions differ."""
    if stored["versions"] != counted_with():
        return []
    return [
        f"MORE CALLS: {stage}, {shape}: {found:g}, stored {before:g}"
        for shape, calls in counted.items()
        for stage, found in calls.items()
        if (before := stored["calls"].get(shape, {}).get(stage)) and found > before
    ]


def counted_with() -> dict[str, str]:
    """Versions on which counts depend."""
    found = machine.versions()
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python} | {name: found[name] for name in ("torch", "tensordict", "numpy")}
