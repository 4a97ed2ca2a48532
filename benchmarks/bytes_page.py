"""The tables of docs/bytes.md, written from one run of `benchmarks.bytes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import pages

PAGE = pages.DOCS / "bytes.md"
RECORD = pages.DOCS / "measured" / "bytes.json"
SPEEDS = (0.1, 0.2, 0.4, 0.7, 1, 1.5, 2, 3, 4, 7, 10, 12, 25, 100)  # of links, in Gbit/s


def rewrite() -> None:
    """Write the tables of the page from the record."""
    pages.rewrite(PAGE, tables(pages.read(RECORD)))


def tables(report: Mapping[str, Any]) -> dict[str, str]:
    """Name of a table to its Markdown."""
    batches = report["batches"]
    images = {name: found for name, found in batches.items() if name.startswith("images")}
    levels = batches.get("levels")
    others = {k: v for k, v in batches.items() if k not in images and k != "levels"}
    missing = "Not measured in this run."
    return {
        "bytes-machine": _machine(report),
        "bytes": _options(others) if others else missing,
        "images": _images(images) if images else missing,
        "levels": _levels(levels["options"]) if levels else missing,
        "links": _links(levels["options"]) if levels else missing,
        "bytes-bars": _bars(report["bars"]),
    }


def milliseconds(option: Mapping[str, float], gbits: float, *, overlap: bool) -> float:
    """What a message takes that is written, sent and decoded, or one of many that overlap."""
    sent = 8 * option["bytes"] / gbits / 1e6
    parts = (option["write"], sent, option["decode"])
    return max(parts) if overlap else sum(parts)


def _machine(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v != "not installed")
    return (
        f"`{report['command']}`, measured {report['made'][:10]} on {machine['cpus']} cores of "
        f"{machine['cpu']}, torch threads {machine['torch_threads']}, load at the start "
        f"{machine['load']}; Python {machine['python']}; {packages}."
    )


def _options(batches: Mapping[str, Any]) -> str:
    head = ["batch", "options", "sent", "of none"]
    for step in ("write", "decode", "materialize"):
        head += [f"to {step}", "/ narrow"]
    head += ["pays below, of none", "pays below, of narrow"]
    rows = []
    for batch, found in batches.items():
        plain = found["options"].get("none", {}).get("bytes")
        for name, own in found["options"].items():
            cells = [batch, _name(name), _size(own["bytes"]), _share(own["bytes"], plain)]
            batch = ""
            for step in ("write", "decode", "materialize"):
                ratio = own.get(f"{step} / narrow")
                cells += [_ms(own[step]), "" if ratio is None else f"{ratio:.2f}"]
            cells += [_speed(own, name, other) for other in ("none", "narrow")]
            rows.append(cells)
    return pages.table(head, rows)


def _images(batches: Mapping[str, Any]) -> str:
    head = ("batch", "options", "sent", "of one copy", "to write", "to decode", "to materialize")
    rows = [
        [batch, _name(name), _size(own["bytes"]), _share(own["bytes"], found["once"])]
        + [_ms(own[step]) for step in ("write", "decode", "materialize")]
        + [_speed(own, name, "none")]
        for batch, found in batches.items()
        for name, own in found["options"].items()
    ]
    return pages.table((*head, "pays below, of none"), rows)


def _levels(options: Mapping[str, Any]) -> str:
    head = ("options", "sent", "of none", "to write", "to decode")
    plain = options.get("none", {}).get("bytes")
    rows = [
        [_name(name), _size(own["bytes"]), _share(own["bytes"], plain)]
        + [_ms(own["write"]), _ms(own["decode"])]
        + [_speed(own, name, other) for other in ("none", "narrow")]
        for name, own in options.items()
    ]
    return pages.table((*head, "pays below, of none", "pays below, of narrow"), rows)


def _links(options: Mapping[str, Any]) -> str:
    rows = []
    for gbits in SPEEDS:
        cells = [f"{gbits:g}"]
        for overlap in (False, True):
            times = {n: milliseconds(own, gbits, overlap=overlap) for n, own in options.items()}
            best = min(times, key=lambda name: times[name])
            cells += [_name(best), _ms(times[best])]
        rows.append(cells)
    head = ("Gbit/s", "one after the other", "time", "overlapping", "time of each")
    return pages.table(head, rows)


def _bars(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            bar["what"],
            f"{bar['asked']:.2f}",
            f"{bar['found']:.2f}",
            "met" if bar["met"] else "missed",
        ]
        for bar in found
    ]
    return pages.table(("bar", "at most", "found", ""), rows)


def _name(option: str) -> str:
    return option if option == "none" else f"`{option}`"


def _size(size: int) -> str:
    unit, name = next(x for x in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if size >= x[0])
    return f"{size / unit:.3g} {name}"


def _share(size: int, of: int | None) -> str:
    return f"{size / of:.3f}" if of else ""


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _speed(own: Mapping[str, Any], name: str, other: str) -> str:
    """The speed of a link, in Gbit/s, below which an option pays beside another."""
    key = f"break-even decode / {other}"
    if key not in own or name == other or name == "none":
        return ""
    speed = own[key]
    return "any" if speed is None else f"{speed:.1f}" if speed else "never"
