"""What the project asks of itself, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import DESIGN, GROWN, LARGE, PADS, REAL_FILL, SMALL, Case

Trips = Mapping[str, Mapping[str, Any]]  # by case


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        what: In words.
        limit: The figure, at least or at most.
        at_least: Whether it is a lower bound.
        measured: The figure found; None where the run did not measure it.
        where: The case that decided it.
    """

    what: str
    limit: float
    at_least: bool
    measured: float | None
    where: str = ""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def row(self) -> dict[str, Any]:
        return {
            "bar": self.what,
            "asked": f"{'at least' if self.at_least else 'at most'} {self.limit:g}",
            "measured": self.measured,
            "where": self.where,
            "met": self.met,
        }


def bars(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every bar as a row: what, what is asked, what was measured, where, whether it is met."""
    trips = {trip["case"]: trip for trip in report["trips"] if "skipped" not in trip}
    found = [*_ratios(trips), *_wire(trips), *_growth(trips)]
    found += _kernels({each["case"]: each for each in report["stages"]})
    found += _memory(report["memory"])
    return [bar.row() for bar in found]


def _ratios(trips: Trips) -> Iterator[Bar]:
    asked = {
        "fused": ("fused trip, times as fast as the per-row loop", (20, 25, 5)),
        "composed": ("composed trip, likewise", (6, 12, 3)),
    }
    for side, (what, limits) in asked.items():
        for case, limit in zip((SMALL, DESIGN, LARGE), limits, strict=True):
            yield Bar(what, limit, True, _ratio(trips, case, f"rows/{side}"), str(case))
            first = _ratio(trips, case, f"rows/{side}", "first_ratios")
            yield Bar(f"{what}, first of a turn", limit, True, first, str(case))
    ratio = _ratio(trips, DESIGN, "reused/floor")
    yield Bar("fused trip, all buffers reused, over its floor", 3, False, ratio, str(DESIGN))
    # Long-tailed batches: the sweep over fill asks something else.
    tailed = {name: trip for name, trip in trips.items() if Case.parse(name).fill == REAL_FILL}
    pairs = [("fused", "safetensors"), ("fused", "pickle"), ("reused", "pickle_oob")]
    for ours, peer in pairs:
        ratios = {name: trip["ratios"].get(f"{peer}/{ours}") for name, trip in tailed.items()}
        what = f"{ours} trip, times as fast as padded {peer}, at the worst shape"
        yield _worst(what, 1, True, ratios)


def _wire(trips: Trips) -> Iterator[Bar]:
    sent = {name: trip for name, trip in trips.items() if "fused" in trip["sides"]}
    frames = {name: trip["sides"]["fused"]["frames"] for name, trip in sent.items()}
    yield _worst(f"frames of a batch of {len(PADS)} columns", len(PADS) + 3, False, frames)
    shares = {
        name: trip["sides"]["fused"]["wire_bytes"] / (1.01 * trip["valid_bytes"] + 8192)
        for name, trip in sent.items()
    }
    yield _worst("wire bytes over valid bytes + 1% + 8 KiB", 1, False, shares)


def _growth(trips: Trips) -> Iterator[Bar]:
    small, grown = trips.get(str(SMALL)), trips.get(str(GROWN))
    for side in ("fused", "reused", "composed"):
        measured = None
        if small and grown and side in small["sides"] and side in grown["sides"]:
            time = grown["sides"][side]["ms"] / small["sides"][side]["ms"]
            measured = time / (grown["tokens"] / small["tokens"])
        what = f"cost of the {side} trip per token, as tokens grow 64 times"
        yield Bar(what, 1, False, measured, f"{SMALL} to {GROWN}")


def _kernels(stages: Mapping[str, Mapping[str, Any]]) -> Iterator[Bar]:
    names = {"gather": "memcpy", "pad": "memset + memcpy"}
    for stage, floor in names.items():
        measured = None
        if str(DESIGN) in stages:
            measured = 1 / stages[str(DESIGN)]["stages"][stage]["share"]
        yield Bar(f"{stage} of one int64 column over {floor}", 2, False, measured, str(DESIGN))


def _memory(memory: Mapping[str, Any]) -> Iterator[Bar]:
    for side in ("fused", "composed"):
        measured = None
        if side in memory.get("sides", {}):
            measured = memory["sides"][side]["grown"] / memory["sides"][side]["needed"]
        what = f"peak memory of the {side} trip over message, receive buffers and output"
        yield Bar(what, 1.05, False, measured, memory.get("case", ""))


def _ratio(trips: Trips, case: Case, name: str, of: str = "ratios") -> float | None:
    ratio: float | None = trips[str(case)][of].get(name) if str(case) in trips else None
    return ratio


def _worst(what: str, limit: float, at_least: bool, found: Mapping[str, float | None]) -> Bar:
    measured = {name: value for name, value in found.items() if value is not None}
    if not measured:
        return Bar(what, limit, at_least, None)
    choose: Callable[..., str] = min if at_least else max
    where = choose(measured, key=lambda name: measured[name])
    return Bar(what, limit, at_least, measured[where], where)
