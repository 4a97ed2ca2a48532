"""The tables of README.md and of pages in docs/, written from the JSON of a run.

``python -m benchmarks.report [JSON]``: whatever stands between ``<!-- measured: NAME -->`` and
``<!-- end -->`` is replaced by the table of that name, so no figure is copied by hand. The picture
of the README is drawn from it too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "measured" / "bench.json"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "comparison.md",
)
PICTURE = ROOT / "docs" / "pictures" / "saving.svg"

FIRST = "gsm8k:512"  # of real lengths: the batch of the README
_COMPARED = ("64x512", FIRST, "512x1536", "512x1536@1")  # the last of them has no padding
_MARKED = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Name of a table to its Markdown."""
    trips = [trip for trip in report["trips"] if "skipped" not in trip]
    made = {
        "machine": _machine(report),
        "figures": _figures([trip for trip in trips if trip["case"] == FIRST]),
        "peers": _peers([trip for trip in trips if trip["case"] in _COMPARED]),
        "trips": _trips(trips),
        "first": _first(trips),
        "steps": _steps([trip for trip in trips if trip["case"] == "512x1536"]),
        "skipped": _skipped(report["trips"]),
        "wire": _wire(trips),
        "break-even": _break_even(trips),
        "stages": _stages(report["stages"]),
        "memory": _memory(report["memory"]),
        "bars": _bars(report["bars"]),
    }
    return {name: text or "Not measured in this run." for name, text in made.items()}


def rewritten(page: str, made: Mapping[str, str]) -> str:
    """A page with its marked tables replaced.

    Raises:
        KeyError: A marker names no table.
    """
    return _MARKED.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", page)


def trip_of(report: Mapping[str, Any], case: str) -> Mapping[str, Any]:
    """What was measured of one batch.

    Raises:
        KeyError: The run left it out.
    """
    trips = {trip["case"]: trip for trip in report["trips"] if "skipped" not in trip}
    found: Mapping[str, Any] = trips[case]
    return found


def main(arguments: Sequence[str]) -> int:
    from benchmarks.saving import picture

    report = json.loads(Path(arguments[0] if arguments else RECORD).read_text())
    made = tables(report)
    PICTURE.write_text(picture(report))
    for path in PAGES:
        path.write_text(rewritten(path.read_text(), made))
        print(f"written: {path}")
    return 0


# --- the tables --------------------------------------------------------------------------------


def _machine(report: Mapping[str, Any]) -> str:
    machine, versions = report["machine"], report["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"Measured {report['made'][:10]} on {machine['cpus']} cores of {machine['cpu']}, "
        f"torch threads {machine['torch_threads']}, transparent huge pages "
        f"{machine['transparent_huge_pages']}, row kernel {machine['row_kernel']}, load at the "
        f"start {machine['load']}; {machine['system']}, Python {machine['python']}; "
        f"{packages}."
    )


def _figures(trips: Sequence[Mapping[str, Any]]) -> str:
    """Three figures of one batch: jagcodec, what it replaces, and how they compare."""
    if not trips:
        return ""
    (trip,) = trips
    fused, rows = trip["sides"]["fused"], trip["sides"]["rows"]
    padded, sent = trip["padded_bytes"], fused["wire_bytes"]
    saved, fewer = f"{1 - sent / padded:.1%} less", f"{rows['frames'] / fused['frames']:.0f} times"
    ours, theirs = _side(trip, "fused"), _side(trip, "rows")
    return _table(
        (f"{trip['rows']} GSM8K rows, {trip['fill']:.1%} full", "jagcodec", "instead of", ""),
        [
            ["bytes sent", f"{sent / 1e6:.2f} MB", f"{padded / 1e6:.2f} MB, padded", saved],
            ["pack, copy, pad", ours, f"{theirs}, row by row", _times(trip, "rows/fused")],
            ["frames", f"{fused['frames']}", f"{rows['frames']:,}, row by row", f"{fewer} fewer"],
        ],
    )


def _peers(trips: Sequence[Mapping[str, Any]]) -> str:
    """Megabytes sent and milliseconds, one line for each way to send a batch."""
    names = list(dict.fromkeys(name for trip in trips for name in trip["sides"]))
    rows = []
    for name in names:
        cells = [f"`{name}`"]
        for trip in trips:
            side = trip["sides"].get(name)
            cells.append("" if side is None else f"{side['wire_bytes'] / 1e6:.2f}")
            cells.append(_side(trip, name))
        rows.append(cells)
    shapes = [f"{_shape(trip)}, {trip['fill']:.1%} full" for trip in trips]
    return _table(("way", *(head for shape in shapes for head in (f"{shape}: MB", "time"))), rows)


def _trips(trips: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for trip in trips for name in trip["sides"]))
    rows = [
        [_shape(trip), f"{trip['fill']:.1%}", f"{trip['tokens']:,}"]
        + [_side(trip, name) for name in names]
        for trip in trips
    ]
    return _table(("rows x width", "full", "tokens", *(f"`{name}`" for name in names)), rows)


def _first(trips: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for trip in trips for name in trip["sides"]))
    rows = [
        [_shape(trip), f"{trip['fill']:.1%}"]
        + [
            _ms(trip["sides"][name]["first"]["ms"]) if name in trip["sides"] else ""
            for name in names
        ]
        for trip in trips
    ]
    return _table(("rows x width", "full", *(f"`{name}`" for name in names)), rows)


def _steps(trips: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [f"`{name}`", _ms(side["ms"]), f"{_ms(side['q1'])} to {_ms(side['q3'])}"]
        + [", ".join(f"{step} {_ms(ms)}" for step, ms in side["steps"].items())]
        for trip in trips
        for name, side in trip["sides"].items()
    ]
    return _table(("side", "median", "quartiles", "steps, medians in ms"), rows)


def _skipped(trips: Sequence[Mapping[str, Any]]) -> str:
    rows = [[trip["case"], trip["skipped"]] for trip in trips if "skipped" in trip]
    return _table(("left out", "why"), rows)


def _wire(trips: Sequence[Mapping[str, Any]]) -> str:
    names = [n for n in ("fused", "rows", "arrow", "pickle") if all(n in t["sides"] for t in trips)]
    rows = [
        [_shape(trip), f"{trip['fill']:.1%}", f"{trip['valid_bytes'] / 1e6:.2f}"]
        + [
            f"{side['wire_bytes'] / 1e6:.2f} in {side['frames']:,}"
            for side in (trip["sides"][name] for name in names)
        ]
        for trip in trips
    ]
    head = ("rows x width", "full", "valid MB", *(f"`{name}`, MB in frames" for name in names))
    return _table(head, rows)


def _break_even(trips: Sequence[Mapping[str, Any]]) -> str:
    """The transport at which ours and padded out-of-band pickle take equally long."""
    rows = []
    for trip in trips:
        sides = trip["sides"]
        if not {"fused", "reused", "pickle_oob"} <= set(sides):
            continue
        peer = sides["pickle_oob"]
        cells = [_shape(trip), f"{trip['fill']:.1%}"]
        for name in ("fused", "reused"):
            saved = peer["wire_bytes"] - sides[name]["wire_bytes"]
            slower = sides[name]["ms"] - peer["ms"]
            if saved <= 0:
                cells.append("never" if slower >= 0 else "always")
            else:
                cells.append("always" if slower <= 0 else f"below {saved / slower / 1e6:.1f} GB/s")
        rows.append(cells)
    return _table(("rows x width", "full", "`fused` ahead", "`reused` ahead"), rows)


def _stages(found: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for each in found for name in each["stages"]))
    rows = []
    for name in names:
        cells = [name]
        for each in found:
            stage = each["stages"].get(name)
            cells.append("" if stage is None else f"{_ms(stage['ms'])} ({stage['share']:.0%})")
        rows.append(cells)
    return _table(("stage", *(each["case"] for each in found)), rows)


def _memory(found: Mapping[str, Any]) -> str:
    rows = [
        [f"`{name}`"]
        + [f"{side[key] / 1e6:.0f}" for key in ("input", "needed", "grown")]
        + [f"{side['grown'] / side['needed']:.2f}"]
        for name, side in found.get("sides", {}).items()
    ]
    head = (f"side, {found.get('case')}", "input MB", "message + receive buffers + output MB")
    return _table((*head, "peak grew by MB", "ratio"), rows)


def _bars(found: Sequence[Mapping[str, Any]]) -> str:
    words = {True: "met", False: "not met", None: "not measured"}
    rows = [
        [bar["bar"], bar["asked"]]
        + ["" if bar["measured"] is None else f"{bar['measured']:.2f}", bar["where"]]
        + [words[bar["met"]]]
        for bar in found
    ]
    return _table(("bar", "asked", "measured", "where", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _shape(trip: Mapping[str, Any]) -> str:
    source = ", GSM8K" if trip["source"] == "gsm8k" else ""
    return f"{trip['rows']} x {trip['width']}{source}"


def _side(trip: Mapping[str, Any], name: str) -> str:
    return f"{_ms(trip['sides'][name]['ms'])} ms" if name in trip["sides"] else ""


def _times(trip: Mapping[str, Any], name: str) -> str:
    return f"{trip['ratios'][name]:.1f}x as fast" if name in trip["ratios"] else ""


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.2g}" if ms < 1 else f"{ms:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
