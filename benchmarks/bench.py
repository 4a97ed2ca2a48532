"""The command: ``python -m benchmarks.bench``. What is measured, and how, the package says."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, memory, stages, trips
from benchmarks.bars import bars
from benchmarks.progress import progress
from benchmarks.shapes import DESIGN, FULL, LARGE, QUICK, SMALL, Case

PARTS = ("stages", "memory")  # beside the sides, what `--only` may name


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    names = [name for name in trips.SIDES if name in options.only]
    seconds = 5.0 if options.quick else 25.0
    report: dict[str, Any] = {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": machine.machine(),
        "versions": machine.versions(),
        "trips": [],
        "stages": [],
        "memory": {},
    }
    for what in ("machine", "versions"):
        print(", ".join(f"{name} {value}" for name, value in report[what].items()))
    _warn_of_load()
    if names:
        for case in options.shapes or (QUICK if options.quick else FULL):
            with progress(str(case)) as show:
                trip = trips.measure(case, names, seconds, show)
            report["trips"].append(trip)
            print("\n" + trip_text(trip), flush=True)
    if "stages" in options.only:
        for case in (SMALL, DESIGN) if options.quick else (SMALL, DESIGN, LARGE):
            with progress(f"stages, {case}") as show:
                found = stages.measure(case, seconds, show)
            report["stages"].append(found)
            print("\n" + stages_text(found), flush=True)
    if "memory" in options.only:
        case = DESIGN if options.quick else LARGE
        with progress(f"memory, {case}") as show:
            report["memory"] = memory.measure(case, names, show)
        print("\n" + memory_text(report["memory"]), flush=True)
    report["bars"] = bars(report)
    print("\n" + bars_text(report["bars"]))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten: {options.json}")
    if options.charts and report["trips"]:
        from benchmarks import charts

        print("written:", *charts.draw(report, options.charts))
    if names:
        print("verified: every column of every trip equals the input, bit for bit")
    return 0


def _parser() -> argparse.ArgumentParser:
    everything = (*trips.SIDES, *PARTS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three shapes, a minute or two")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--charts", type=Path, help="write PNG charts into this directory")
    parser.add_argument(
        "--only",
        type=_names(everything),
        default=everything,
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(everything)}",
    )
    parser.add_argument(
        "--shapes",
        type=_cases,
        metavar="SHAPES",
        help="comma-separated: 512x1536, 512x1536@0.5 (share of tokens), gsm8k:512",
    )
    return parser


def _names(known: Iterable[str]) -> Any:
    def names(text: str) -> tuple[str, ...]:
        wanted = tuple(text.split(","))
        unknown = set(wanted) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(f"not one of {', '.join(known)}: {unknown}")
        return wanted

    return names


def _cases(text: str) -> tuple[Case, ...]:
    try:
        return tuple(map(Case.parse, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected shapes such as 512x1536, 512x1536@0.5 or gsm8k:512, found {text!r}"
        ) from error


def _warn_of_load() -> None:
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"load {load:.1f}: something else runs here, and times will be worse than they are")


# --- text --------------------------------------------------------------------------------------


def trip_text(trip: Mapping[str, Any]) -> str:
    if "skipped" in trip:
        return f"{trip['case']}: skipped, {trip['skipped']}"
    rows = [
        [
            name,
            *(f"{side[key]:.2f}" for key in ("ms", "q1", "q3", "min")),
            f"{side['first']['ms']:.2f}",
            f"{trip['ratios'][f'{name}/fused']:.2f}" if f"{name}/fused" in trip["ratios"] else "",
            f"{trip['ratios'][f'{name}/floor']:.1f}" if f"{name}/floor" in trip["ratios"] else "",
            str(side["frames"]),
            f"{side['wire_bytes'] / 1e6:.3f}",
            f"{side['page_faults']:.0f}",
            "  ".join(f"{step} {ms:.2f}" for step, ms in side["steps"].items()),
        ]
        for name, side in trip["sides"].items()
    ]
    head = ["side", "ms", "q1", "q3", "min", "first", "/fused", "/floor"]
    head += ["frames", "MB", "faults", "steps"]
    title = (
        f"{trip['case']}: {trip['rows']} x {trip['width']}, {trip['fill']:.1%} full, "
        f"{trip['tokens']:,} tokens, {trip['valid_bytes'] / 1e6:.2f} MB valid, "
        f"{trip['padded_bytes'] / 1e6:.2f} MB padded, {trip['rounds']} rounds"
    )
    return f"{title}\n{table(head, rows)}"


def stages_text(found: Mapping[str, Any]) -> str:
    rows = [
        [name, f"{stage['ms']:.3f}", f"{stage['q1']:.3f}", f"{stage['q3']:.3f}"]
        + [f"{found['floors'][stage['floor']]['ms']:.3f} ({stage['floor']})"]
        + [f"{stage['share']:.0%}"]
        for name, stage in found["stages"].items()
    ]
    head = ["stage", "ms", "q1", "q3", "floor ms", "of its speed"]
    return f"stages alone, {found['case']}, {found['rounds']} rounds\n{table(head, rows)}"


def memory_text(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"memory: skipped, {found['skipped']}"
    rows = [
        [name, *(f"{side[key] / 1e6:.1f}" for key in ("input", "needed", "grown"))]
        + [f"{side['grown'] / side['needed']:.2f}"]
        for name, side in found["sides"].items()
    ]
    head = ["side", "input MB", "message + buffers + output MB", "peak grew by MB", "ratio"]
    return f"peak memory of one trip, {found['case']}\n{table(head, rows)}"


def bars_text(rows: Sequence[Mapping[str, Any]]) -> str:
    words = {True: "met", False: "NOT MET", None: "not measured"}
    cells = [
        [row["bar"], row["asked"], "" if row["measured"] is None else f"{row['measured']:.2f}"]
        + [row["where"], words[row["met"]]]
        for row in rows
    ]
    return table(["bar", "asked", "measured", "where", ""], cells)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the last as it comes, others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        first, *middle, last = (
            cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *middle, last]).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
