"""Tables on the screen, records in docs/measured/, and the pages of README.md and docs/.

``python -m benchmarks.report`` writes every table of the pages from the records: the text between
``<!-- measured: NAME -->`` and ``<!-- end -->`` is replaced by the table of that name. So no figure
is copied by hand. The picture of the README is drawn from the same record.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.shapes import DESIGN, FIRST, FULL, SMALL, lengths_of

ROOT = machine.ROOT
DOCS = ROOT / "docs"
RECORDS = DOCS / "measured"
PLANES = ("ray", "DataProto", "torch.distributed", "TransferQueue")
PROGRAMS = ("bench", "bytes", "planes", "verl_v1")
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
PICTURE = DOCS / "pictures" / "saving.svg"
NOT_MEASURED = "Not measured yet."

_MARKED = re.compile(r"(<!-- measured: ([\w.-]+) -->\n).*?(<!-- end -->)", re.S)

Report = Mapping[str, Any]


def parser(program: str, doc: str | None) -> argparse.ArgumentParser:
    """With the options that every program has."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}", description=(doc or "").splitlines()[0]
    )
    made.add_argument("--json", type=Path, help="write every figure to this file")
    made.add_argument(
        "--write", action="store_true", help="write the record, and the pages from it"
    )
    return made


def finish(program: str, found: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Print the tables of a run, and write its figures where that is asked for."""
    if options.write:
        machine.require_committed_source()
    made = {**machine.provenance(), **found}
    for name, text in TABLES[program](made).items():
        if text != NOT_MEASURED:
            print(f"\n{name}\n\n{text}")
    if options.json:
        save(options.json, made)
    if options.write:
        save(RECORDS / f"{program}.json", made)
        write_pages()
    return 0


def save(path: Path, found: Mapping[str, Any]) -> None:
    """As JSON, a line for each part."""
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in found.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {path}")


def record(program: str) -> dict[str, Any]:
    """The record of a program; empty if there is none."""
    path = RECORDS / f"{program}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def rewritten(page: str, made: Mapping[str, str]) -> str:
    """A page with its marked tables replaced."""
    return _MARKED.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", page)


def all_tables() -> dict[str, str]:
    """Every table of every record, by its name."""
    made: dict[str, str] = {}
    for program in PROGRAMS:
        made |= TABLES[program](record(program))
    return made


def write_pages() -> None:
    made = all_tables()
    for page in PAGES:
        page.write_text(rewritten(page.read_text(), made))
    PICTURE.write_text(picture(record("bench")))


# --- tables of bench ---------------------------------------------------------------------------


def bench_tables(report: Report) -> dict[str, str]:
    trips, small = report.get("trips", []), report.get("small", {})
    compared = [t for t in trips if t["shape"] in (SMALL, FIRST, DESIGN, FULL)]
    return {
        "machine": _machine(report),
        "figures": _figures([trip for trip in trips if trip["shape"] == FIRST]),
        "padding": _padding(trips),
        "peers": _peers(compared),
        "steps": _steps([trip for trip in trips if trip["shape"] == DESIGN]),
        "small": _parts({f"rows: {rows}": part for rows, part in small.get("rows", {}).items()}),
        "functions": _functions(small.get("functions", {})),
        "rows": _parts(report.get("rows", {})),
    }


def _machine(report: Report, known: Report | None = None) -> str:
    """When and where a record was made; without the machine and the versions of a `known` one."""
    if not report:
        return NOT_MEASURED
    found, versions = report["machine"], report["versions"]
    when = f"Measured {report['made'][:10]} at commit {report['commit'][:7]}"
    if known and _place(known) == _place(report):
        same = "on [this machine, with these versions](performance.md#measured)"
        return f"{when} {same}, load at the start {found['load']}."
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{when} on {found['cpus']} cores "
        f"of {found['cpu']}, torch threads {found['torch_threads']}, transparent huge pages "
        f"{found['transparent_huge_pages']}, row kernel {found['row_kernel']}, load at the start "
        f"{found['load']}; {found['system']}, Python {found['python']}; {packages}."
    )


def _place(report: Report) -> Report:
    return {**report["machine"], "load": None, "versions": report["versions"]}


_NAMED = {
    "fused": "**jagcodec**",
    "rows": "row by row, TransferQueue's encoder",
    "pickle": "padded, pickle",
    "pickle_oob": "padded, pickle 5 out of band",
}


def _figures(trips: Sequence[Report]) -> str:
    """The batch of the README: jagcodec and three named rivals."""
    rows = [
        [text, _mb(side["wire_bytes"]), f"{side['frames']:,}", f"{_ms(side['ms'])} ms"]
        for trip in trips
        for name, text in _NAMED.items()
        if (side := trip["sides"].get(name))
    ]
    many = trips[0]["rows"] if trips else 0
    return table((f"{many} GSM8K rollouts, producer to trainer", "sent", "frames", "time"), rows)


def _padding(trips: Sequence[Report]) -> str:
    """What padding costs: bytes and time of padded and of jagged columns, and where they meet."""
    rows = []
    for trip in trips:
        fused = trip["sides"].get("fused")
        padded = [trip["sides"].get(name) for name in ("pickle", "pickle_oob")]
        if fused and all(padded):
            rows.append(
                [*_shape(trip), _mb(trip["padded_bytes"]), _mb(fused["wire_bytes"])]
                + [f"{1 - fused['wire_bytes'] / trip['padded_bytes']:.0%}"]
                + [f"{_ms(side['ms'])} ms" for side in (*padded, fused)]
                + [_break_even(fused, padded[1])]
            )
    head = ("rows x width", "full", "padded", "jagged", "saved", "padded, pickle")
    return table((*head, "padded, out of band", "jagged", "jagged is faster"), rows)


def _break_even(ours: Report, padded: Report) -> str:
    """The transport at which ours and padded out-of-band pickle need the same time."""
    saved = padded["wire_bytes"] - ours["wire_bytes"]
    slower = ours["ms"] - padded["ms"]
    if saved <= 0:
        return "never" if slower >= 0 else "always"
    return "always" if slower <= 0 else f"below {saved / slower / 1e6:.1f} GB/s"


def _peers(trips: Sequence[Report]) -> str:
    """Megabytes sent and milliseconds, one line for each way to send a batch."""
    rows = []
    for name in dict.fromkeys(name for trip in trips for name in trip["sides"]):
        cells = [f"`{name}`"]
        for trip in trips:
            side = trip["sides"].get(name)
            cells += (
                ["", ""] if side is None else [_mb(side["wire_bytes"]), f"{_ms(side['ms'])} ms"]
            )
        rows.append(cells)
    heads = [f"{size}, {fill} full" for size, fill in map(_shape, trips)]
    return table(("way", *(text for head in heads for text in (f"{head}: sent", "time"))), rows)


def _steps(trips: Sequence[Report]) -> str:
    rows = [
        [f"`{name}`", _ms(side["ms"]), f"{_ms(side['q1'])} to {_ms(side['q3'])}"]
        + [", ".join(f"{step} {_ms(ms)}" for step, ms in side["steps"].items())]
        for trip in trips
        for name, side in trip["sides"].items()
    ]
    return table(("side", "median ms", "quartiles", "steps, medians in ms"), rows)


def _parts(parts: Mapping[str, Report]) -> str:
    """Parts of `benchmarks.rows`: times of all sides, and ratios between some of them."""
    rows = []
    for name, part in parts.items():
        times = ", ".join(f"{side} {_ms(ms)}" for side, ms in part["ms"].items())
        for line, found in part["ratios"].items():
            spread = f"{found['lowest']:.2f} to {found['highest']:.2f}"
            rows.append([name, times, line, f"{found['median']:.2f}", spread])
            name = times = ""
    return table(("part", "medians in ms", "ratio", "median", "rounds"), rows)


def _functions(found: Mapping[str, int]) -> str:
    rows = [[f"`{name}`", str(count)] for name, count in found.items()]
    return table(("call, 64 rows", "functions of the library entered"), rows)


def _shape(trip: Report) -> list[str]:
    source = ", GSM8K" if trip["shape"].startswith("gsm8k") else ""
    return [f"{trip['rows']} x {trip['width']}{source}", f"{trip['fill']:.1%}"]


# --- tables of bytes ---------------------------------------------------------------------------


def bytes_tables(report: Report) -> dict[str, str]:
    return {
        "bytes-machine": _machine(report, record("bench")),
        "bytes": _options(report.get("batches", {})),
    }


def _options(batches: Mapping[str, Any]) -> str:
    steps = ("write", "decode", "materialize")
    rows = []
    for batch, found in batches.items():
        plain = found["options"]["none"]["bytes"]
        for name, own in found["options"].items():
            cells = [batch, _code(name), _size(own["bytes"]), f"{own['bytes'] / plain:.3f}"]
            for step in steps:
                compared = own.get(f"{step} / narrow")
                cells += [f"{_ms(own[step])} ms", "" if compared is None else f"{compared:.2f}"]
            rows.append(
                cells + [_speed(own.get(f"pays below, {x}", "")) for x in ("none", "narrow")]
            )
            batch = ""
    head = ["batch", "options", "sent", "of none"]
    head += [text for step in steps for text in (f"to {step}", "/ narrow")]
    return table((*head, "pays below, none", "pays below, narrow"), rows)


def _code(option: str) -> str:
    return option if option == "none" else f"`{option}`"


def _speed(gbits: float | str | None) -> str:
    if gbits is None:
        return "any"
    return gbits if isinstance(gbits, str) else f"{gbits:.1f}" if gbits else "never"


# --- tables of planes and verl_v1 --------------------------------------------------------------


def planes_tables(report: Report) -> dict[str, str]:
    """One table for each plane, so that each can be on its own page."""
    made = {"planes-machine": _machine(report, record("bench"))}
    for plane in PLANES:
        ways = report.get("planes", {}).get(plane, {})
        totals = [sum(found["ms"].values()) for found in ways.values()]
        rows = [
            [way, ", ".join(f"{step} {_ms(ms)}" for step, ms in found["ms"].items())]
            + [f"{_ms(total)} ms", f"{totals[0] / total:.1f}"]
            + ([_mb(found["bytes"])] if found["bytes"] else [])
            for (way, found), total in zip(ways.items(), totals, strict=True)
        ]
        head = ["way", "steps, medians in ms", "together", "times as fast", "bytes"]
        made[f"planes-{plane}"] = table(head[: len(rows[0]) if rows else None], rows)
    return made


def verl_v1_tables(report: Report) -> dict[str, str]:
    lines = report.get("lines", {})
    ways = list(next(iter(lines.values()))) if lines else []
    rows = [
        [line]
        + [f"{_ms(by_way[way]['median'])} ms" for way in ways]
        + [f"{by_way[way]['ratio']:.2f}" for way in ways[1:]]
        for line, by_way in lines.items()
    ]
    head = ("", *ways, *(f"{way} / {ways[0]}" for way in ways[1:]))
    return {"verl-v1-machine": _machine(report, record("bench")), "verl-v1": table(head, rows)}


TABLES = {
    "bench": bench_tables,
    "bytes": bytes_tables,
    "planes": planes_tables,
    "verl_v1": verl_v1_tables,
}

# --- the picture of the README -----------------------------------------------------------------

SCALE, GAP, TOP = 0.4, 36, 30  # pixels per token of a row; between the two figures; above them
TOKENS, PADDING = "#4c78a8", "#dcdcdc"


def picture(report: Report) -> str:
    """SVG: each row of the batch as a bar in its rectangle, and the same tokens without padding.

    Both areas have one scale, a pixel wide for each row.
    """
    (trip,) = (trip for trip in report["trips"] if trip["shape"] == FIRST)
    lengths = lengths_of(FIRST)
    rows, width = len(lengths), int(lengths.max())
    bottom = TOP + round(width * SCALE)
    bars = "".join(f"V{bottom - n * SCALE:.4g}h1" for n in lengths.tolist())
    packed = round(rows * lengths.sum() / (rows * width))
    left = rows + GAP
    sent, padded = _mb(trip["sides"]["fused"]["wire_bytes"]), _mb(trip["padded_bytes"])
    across, height = left + packed + 12, bottom + 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {height}" '
            f'width="{across}" height="{height}" role="img">',
            "<style>text{font:19px sans-serif;fill:#666}</style>",
            f'<text x="0" y="18">{rows} rows, padded to the longest: {padded}</text>',
            f'<rect x="0" y="{TOP}" width="{rows}" height="{bottom - TOP}" fill="{PADDING}"/>',
            f'<path d="M0 {bottom}{bars}V{bottom}z" fill="{TOKENS}"/>',
            f'<text x="{left}" y="18">jagcodec: {sent}</text>',
            f'<rect x="{left}" y="{TOP}" width="{packed}" height="{bottom - TOP}" '
            f'fill="{TOKENS}"/>',
            "</svg>",
            "",
        ]
    )


# --- text --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; a sentence if there are no rows."""
    if not rows:
        return NOT_MEASURED
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.2g}" if ms < 1 else f"{ms:.1f}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


def _size(size: int) -> str:
    unit, name = next(x for x in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if size >= x[0])
    return f"{size / unit:.3g} {name}"


if __name__ == "__main__":
    write_pages()
