"""Tables on the screen, records in docs/measured/, and the pages of README.md and docs/.

``python -m benchmarks.report`` writes every table of the pages from the records: the text between
``<!-- measured: NAME -->`` and ``<!-- end -->`` is replaced by the table of that name. A sentence
quotes one of its cells between ``<!-- cell: NAME | ROW | COLUMN -->`` and ``<!-- end -->``. So no
figure is copied by hand. The picture of the README is drawn from the same record.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.shapes import DESIGN, FIRST, FULL, SMALL, lengths_of

ROOT = machine.ROOT
DOCS = ROOT / "docs"
RECORDS = DOCS / "measured"
PLANES = ("ray", "DataProto", "torch.distributed", "TransferQueue", "MRoPE")
PROGRAMS = ("bench", "bytes", "experts", "planes", "packing", "verl_v1", "gpu")
KINDS = ("warm", "cold")  # trips: see `trips`
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
PICTURE = DOCS / "pictures" / "saving.svg"
NOT_MEASURED = "Not measured yet."
NO_GPU = "Not run yet: it needs a machine with a GPU."

_MARKED = re.compile(r"(<!-- measured: ([\w.-]+) -->\n).*?(<!-- end -->)", re.S)
_QUOTED = re.compile(r"(<!-- cell: ([^>]+) -->).*?(<!-- end -->)")

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


def run(
    program: str,
    measured: Callable[[], Mapping[str, Any]],
    options: argparse.Namespace,
    joined: Callable[[Report, Report], Report] | None = None,
) -> int:
    """Measure, print the tables, and write the figures where that is asked for.

    `joined` makes one record of an earlier one and this one, which measured some parts.
    """
    if options.write:
        machine.require_committed_source()
    made = {**machine.provenance(), **measured()}
    for name, text in TABLES[program](made).items():
        if text not in (NOT_MEASURED, NO_GPU):
            print(f"\n{name}\n\n{text}")
    if options.json:
        save(options.json, made)
    if options.write:
        kept = made if joined is None else joined(record(program), made)
        save(RECORDS / f"{program}.json", kept)
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
    """A page with its marked tables and the cells that it quotes replaced."""
    page = _MARKED.sub(lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}", page)
    return _QUOTED.sub(lambda found: f"{found[1]}{quoted(made, found[2])}{found[3]}", page)


def quoted(made: Mapping[str, str], place: str) -> str:
    """One cell of a table: `planes-ray | jagcodec | times as fast`, without marks such as bold.

    Any cells of the row may name it, if no other row has all of them. An empty cell stands for the
    one above it.
    """
    name, *wanted, column = place.split(" | ")
    lines = [line for line in made[name].splitlines() if line.startswith("|")]
    head, _, *rows = [_unmarked(line)[2:-2].split(" | ") for line in lines]
    found, above = [], head
    for cells in rows:
        above = [cell.strip() or before for cell, before in zip(cells, above, strict=True)]
        if {*wanted} <= {*above}:
            found.append(cells[head.index(column)].strip())
    if len(found) != 1:
        raise ValueError(f"{place}: expected one such row, found {len(found)}")
    return found[0]


def _unmarked(line: str) -> str:
    return line.replace("`", "").replace("**", "")


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
        "meeting": _meeting(report),
        "padding": _padding(trips),
        "peers": _peers(compared),
        "steps": _steps([trip for trip in trips if trip["shape"] == DESIGN]),
        "small": _parts({f"rows: {rows}": part for rows, part in small.get("rows", {}).items()}),
        "functions": _functions(small.get("functions", {})),
        "trajectories": _trajectories(report.get("rows", {})),
        "rows": _parts(report.get("rows", {})),
    }


def _machine(report: Report, known: Report | None = None) -> str:
    """When and where a record was made; without the machine and the versions of a `known` one."""
    if not report:
        return NOT_MEASURED
    found, versions = report["machine"], report["versions"]
    when = f"Measured {report['made'][:10]} at commit {report['commit'][:7]}"
    if known and _place(known) == _place(report):
        same = "on [this machine, with these versions](#the-machine)"
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
        [text, _mb(side["wire_bytes"]), f"{side['frames']:,}"]
        + [f"{_ms(side[kind]['ms'])} ms" for kind in KINDS]
        for trip in trips
        for name, text in _NAMED.items()
        if (side := trip["sides"].get(name))
    ]
    many = trips[0]["rows"] if trips else 0
    return table((f"{many} GSM8K rollouts, producer to trainer", "sent", "frames", *KINDS), rows)


def _meeting(report: Report) -> str:
    """What the table of the README says in a sentence: bytes, and where times meet."""
    trips = [trip for trip in report.get("trips", []) if trip["shape"] == FIRST]
    if not trips:
        return NOT_MEASURED
    fused, padded = (trips[0]["sides"][name] for name in ("fused", "pickle_oob"))
    found = [(kind, _break_even(fused, padded, kind)) for kind in KINDS]
    speeds = " and ".join(
        f"{_AT.get(speed, f'below {speed} GB/s')} {kind}" for kind, speed in found
    )
    return (
        f"Measured in memory on {report['machine']['cpus']} cores. Next to out-of-band pickle of "
        f"the padded columns, jagcodec sends {_saved(fused, padded['wire_bytes'])} fewer bytes, "
        f"and is faster through a transport {speeds}."
    )


_AT = {"always": "of any speed", "never": "of no speed"}


def _padding(trips: Sequence[Report]) -> str:
    """What padding costs: bytes and time of padded and of jagged columns, and where they meet."""
    rows = []
    for trip in trips:
        fused = trip["sides"].get("fused")
        padded = [trip["sides"].get(name) for name in ("pickle", "pickle_oob")]
        if fused and all(padded):
            rows.append(
                [*_shape(trip), _mb(trip["padded_bytes"]), _mb(fused["wire_bytes"])]
                + [_saved(fused, trip["padded_bytes"])]
                + [_both(side) for side in (*padded, fused)]
                + [" / ".join(_break_even(fused, padded[1], kind) for kind in KINDS)]
            )
    head = ("rows x width", "full", "padded", "jagged", "saved", "pickle: ms", "out of band: ms")
    return table((*head, "jagged: ms", "jagged is faster below: GB/s"), rows)


def _saved(ours: Report, padded: int) -> str:
    return f"{1 - ours['wire_bytes'] / padded:.0%}"


def _both(side: Report, least: Sequence[float] = (-1, -1)) -> str:
    """Milliseconds of a side, warm and cold; the least of all sides are bold."""
    pairs = zip((side[kind]["ms"] for kind in KINDS), least, strict=True)
    return " / ".join(f"**{_ms(ms)}**" if ms == best else _ms(ms) for ms, best in pairs)


def _least(trip: Report) -> list[float]:
    """The time of the fastest way, warm and cold."""
    ways = [side for name, side in trip["sides"].items() if name != "floor"]
    return [min(side[kind]["ms"] for side in ways) for kind in KINDS]


def _break_even(ours: Report, padded: Report, kind: str) -> str:
    """GB/s of the transport at which ours and padded out-of-band pickle need the same time."""
    saved = padded["wire_bytes"] - ours["wire_bytes"]
    slower = ours[kind]["ms"] - padded[kind]["ms"]
    if saved <= 0:
        return "never" if slower >= 0 else "always"
    return "always" if slower <= 0 else f"{saved / slower / 1e6:.1f}"


def _peers(trips: Sequence[Report]) -> str:
    """Megabytes sent and milliseconds, one line for each way to send a batch."""
    rows = []
    for name in dict.fromkeys(name for trip in trips for name in trip["sides"]):
        cells = [f"`{name}`"]
        for trip in trips:
            side = trip["sides"].get(name)
            cells += (
                ["", ""] if side is None else [_mb(side["wire_bytes"]), _both(side, _least(trip))]
            )
        rows.append(cells)
    heads = [f"{size}, {fill} full" for size, fill in map(_shape, trips)]
    return table(("way", *(text for head in heads for text in (f"{head}: sent", "ms"))), rows)


def _steps(trips: Sequence[Report]) -> str:
    rows = [
        [f"`{name}`, {kind}", _ms(found["ms"]), f"{_ms(found['q1'])} to {_ms(found['q3'])}"]
        + [", ".join(f"{step} {_ms(ms)}" for step, ms in found["steps"].items())]
        for trip in trips
        for name, side in trip["sides"].items()
        for kind, found in ((kind, side[kind]) for kind in KINDS)
    ]
    return table(("side", "median ms", "quartiles", "steps, medians in ms"), rows)


def _trajectories(parts: Mapping[str, Any]) -> str:
    """Messages of rows as an agent loop writes them, next to pickle."""
    if "trajectories" not in parts:
        return NOT_MEASURED
    ratios = parts["trajectories"]["ratios"]
    rows = []
    for size in (1, 8, 64):
        found = ratios[f"encode_rows of {size} / pickle of {size}"]
        around = f"{found['lowest']:.2f} to {found['highest']:.2f}"
        rows.append([str(size), f"{found['median']:.2f}", around])
    return table(("rows in a message", "`encode_rows` / `pickle.dumps`", "rounds"), rows)


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


def experts_tables(report: Report) -> dict[str, str]:
    ways = report.get("ways", {})
    rows = [
        [name, _size(way["bytes"]), f"{_ms(way['write'])} ms", f"{_ms(way['read'])} ms"]
        + [f"{way['ratio']['median']:.2f}"]
        + [f"{way['ratio']['lowest']:.2f} to {way['ratio']['highest']:.2f}"]
        for name, way in ways.items()
    ]
    head = ("way", "sent", "to write", "to read", "both / first line", "rounds")
    columns = [
        [name, _size(found["bytes"]), f"{_ms(found['write'])} ms", f"{_ms(found['all'])} ms"]
        + [_size(found["fetched"]), f"{_ms(found['stage'])} ms"]
        for name, found in report.get("columns", {}).items()
    ]
    columns_head = ("rows have", "sent", "to write", "to read all layers")
    return {
        "experts-machine": _machine(report, record("bench")),
        "experts": table(head, rows),
        "experts-columns": table((*columns_head, "a stage fetches", "to read them"), columns),
    }


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
    made["planes-images"] = _images(report.get("images", {}))
    for plane, its_head in report.get("heads", {}).items():
        made[f"planes-{plane}"] += f"\n\n{_machine(its_head, record('bench'))}"
    return made


def _images(cases: Report) -> str:
    """Rows with images through several planes: bytes, seconds, and ratios to the stock way."""
    rows = []
    for case, ways in cases.items():
        totals = [sum(found["ms"].values()) for found in ways.values()]
        for (way, found), total in zip(ways.items(), totals, strict=True):
            size = found["bytes"]
            by_step = size if isinstance(size, Mapping) else dict.fromkeys(found["ms"], size)
            sizes = [_size(by_step[step]) for step in found["ms"]]
            times = [f"{ms / 1e3:.2f} s" for ms in found["ms"].values()]
            rows.append([case, way, *sizes, *times, f"{total / totals[0]:.2f}"])
            case = ""
    head = ("rows", "way", "bytes put", "bytes got", "put", "get", "put and get / stock")
    return table(head, rows)


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


def packing_tables(report: Report) -> dict[str, str]:
    planned = report.get("planned", {})
    said = NOT_MEASURED
    if planned:
        said = (
            f"Of the {planned['rows']:,} rows, each of {planned['ranks']} ranks gets "
            f"{planned['micro_batches_per_rank']} micro-batches, of whose cells "
            f"{planned['fill']:.1%} are tokens. The heaviest rank costs "
            f"{planned['heaviest_rank'] - 1:.2%} more than the mean."
        )
    return {
        "packing-machine": _machine(report, record("bench")),
        "packing": _parts(report.get("parts", {})),
        "packing-planned": said,
    }


def gpu_tables(report: Report) -> dict[str, str]:
    """A table of all parts, and where they were measured; without a record, a sentence."""
    if not report:
        return {"gpu-machine": NO_GPU, "gpu": NOT_MEASURED}
    rows = []
    for found in report["shapes"].values():
        for name, part in found["parts"].items():
            place = f"{name}, {found['rows']} x {found['width']}"
            for way, ms in part["ms"].items():
                ratio = part["ratios"].get(f"{way} / floor")
                waits = part["waits"][way]
                rows.append(
                    [place, way, _ms(ms), f"{ratio['median']:.1f}" if ratio else ""]
                    + ["not counted" if waits is None else str(waits)]
                )
                place = ""
    head = ("part", "way", "median ms", "/ floor", "waits")
    where = f"{report['device']}. {_machine(report, record('bench'))}"
    return {"gpu-machine": where, "gpu": table(head, rows)}


TABLES = {
    "bench": bench_tables,
    "bytes": bytes_tables,
    "experts": experts_tables,
    "planes": planes_tables,
    "packing": packing_tables,
    "verl_v1": verl_v1_tables,
    "gpu": gpu_tables,
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
