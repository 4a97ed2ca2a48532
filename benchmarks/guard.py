"""A quick run beside stored figures: ``python -m benchmarks.guard`` (`make guard`).

Two kinds of figures are stored in `benchmarks/guard.json`, by stage (of `stages`) and shape:

* `calls`: how many functions are called. Counted, so any difference is a change of the code (or of
  Python, torch or tensordict: stored figures of other versions are not compared).
* `ratios`: time over that of one copy of the batch's valid bytes in the same process, the fastest
  of many rounds of both. A slow machine slows both, so the ratio moves less than either; it still
  differs between machines, and a stage counts as slower only where it stays above the tolerance
  in three measurements.

Instruction counts would be steadier than ratios, but need a performance counter that most virtual
machines hide, or a simulator under which importing torch alone takes minutes; and they do not see
what this library mostly costs, which is memory.

``--write`` stores what was found. A change that slows a stage must therefore change the stored
file, and is seen in review.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, stages, trips
from benchmarks.bench import table
from benchmarks.costs import calls
from benchmarks.progress import progress
from benchmarks.shapes import DESIGN, SMALL, Batch, make_batch

STORED = Path(__file__).with_name("guard.json")
CASES = (SMALL, DESIGN)
TOLERANCE = 1.5  # of ratios
ATTEMPTS = 3
SECONDS = 4.0  # of each measurement

Figures = dict[str, dict[str, float]]  # by case, by stage


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store what is found")
    write = parser.parse_args(arguments).write
    trips.quieted()
    stored = {} if write or not STORED.exists() else json.loads(STORED.read_text())
    batches = {str(case): make_batch(case.lengths()) for case in CASES}
    counted = {name: count(batch) for name, batch in batches.items()}
    timed: Figures = {name: {} for name in batches}
    with progress("guard") as show:
        for attempt in range(1, ATTEMPTS + 1):
            for name, batch in batches.items():
                for stage, ratio in ratios(batch).items():
                    timed[name][stage] = min(ratio, timed[name].get(stage, ratio))
            show(attempt, ATTEMPTS)
            if stored and not slower(stored, timed):
                break
    if not stored:
        return _store(counted, timed)
    verdicts = [*more_calls(stored, counted), *slower(stored, timed)]
    print(text(stored, counted, timed))
    print("\n" + ("\n".join(verdicts) or "no stage is slower than stored"))
    if verdicts:
        print("meant so? python -m benchmarks.guard --write, and say why in the commit")
    return 1 if verdicts else 0


def count(batch: Batch) -> dict[str, float]:
    """Calls of each stage."""
    return {name: float(calls(stage.run)) for name, stage in stages.stages(batch).items()}


def ratios(batch: Batch) -> dict[str, float]:
    """The fastest time of each stage over the fastest copy of the valid bytes."""
    found = stages.timed(batch, SECONDS, lambda _done, _rounds: None)
    copy = found["floors"]["copy"]["min"]
    return {name: stage["min"] / copy for name, stage in found["stages"].items()}


def slower(stored: Mapping[str, Any], timed: Figures) -> list[str]:
    """Stages whose ratio is above the stored one by more than the tolerance."""
    return [
        f"SLOWER: {stage}, {case}: {ratio:.1f} copies of the valid bytes, stored {before:.1f}"
        for case, found in timed.items()
        for stage, ratio in found.items()
        if (before := stored["ratios"].get(case, {}).get(stage)) and ratio > TOLERANCE * before
    ]


def more_calls(stored: Mapping[str, Any], counted: Figures) -> list[str]:
    """Stages that call more functions than stored; none where the versions differ."""
    if stored["versions"] != counted_with():
        return []
    return [
        f"MORE CALLS: {stage}, {case}: {number:.0f}, stored {before:.0f}"
        for case, found in counted.items()
        for stage, number in found.items()
        if (before := stored["calls"].get(case, {}).get(stage)) and number > before
    ]


def counted_with() -> dict[str, str]:
    """Versions on which counts depend."""
    found = machine.versions()
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python} | {name: found[name] for name in ("torch", "tensordict", "numpy")}


def _store(counted: Figures, timed: Figures) -> int:
    figures = {
        "machine": machine.machine(),
        "versions": counted_with(),
        "calls": {
            case: {name: int(n) for name, n in found.items()} for case, found in counted.items()
        },
        "ratios": {
            case: {name: float(f"{ratio:.3g}") for name, ratio in found.items()}
            for case, found in timed.items()
        },
    }
    STORED.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"written: {STORED}")
    return 0


def text(stored: Mapping[str, Any], counted: Figures, timed: Figures) -> str:
    rows = [
        [f"{stage}, {case}"]
        + [_number(stored["calls"].get(case, {}).get(stage)), f"{counted[case][stage]:.0f}"]
        + [_number(stored["ratios"].get(case, {}).get(stage)), f"{ratio:.4g}"]
        for case, found in timed.items()
        for stage, ratio in found.items()
    ]
    return table(["stage", "calls stored", "now", "copies stored", "now"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
