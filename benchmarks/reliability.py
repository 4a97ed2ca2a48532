"""Are batches accounted for, and is memory flat, when many producers run for minutes?

``python -m benchmarks.reliability --producers 64 --seconds 150`` (`make soak`) runs `soaks.soak`
so long, and `soaks.kills` a third as long. ``--json FILE`` writes the record; ``--write`` writes
it to docs/measured/, and from there into the tables of docs/reliability.md. The exit status is 1
if a batch was lost or damaged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import zmq

from benchmarks import pages
from benchmarks.machine import machine, versions
from benchmarks.soaks import FAULTS, Plan, faults, kills, soak
from benchmarks.trips import quieted

RECORD = pages.DOCS / "measured" / "reliability.json"
PAGE = pages.DOCS / "reliability.md"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("--producers", type=int, default=Plan.producers)
    parser.add_argument("--seconds", type=float, default=Plan.seconds)
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--write", action="store_true", help="into docs/measured/ and its page")
    parser.add_argument("--page", action="store_true", help="write the tables of the page alone")
    options = parser.parse_args(arguments)
    if options.page:
        pages.rewrite(PAGE, tables(pages.read(RECORD)))
        return 0
    quieted()
    found: dict[str, Any] = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {**versions(), "pyzmq": zmq.pyzmq_version()},
        "soak": soak(Plan(options.producers, options.seconds)),
        "kills": kills(Plan(options.producers, options.seconds / 3)),
    }
    for text in tables(found).values():
        print(text, end="\n\n")
    if options.json:
        pages.record(options.json, found)
    if options.write:
        pages.record(RECORD, found)
        pages.rewrite(PAGE, tables(found))
    return 1 if any(faults(found[name]) for name in ("soak", "kills")) else 0


# --- the page ----------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Name of a table to its Markdown."""
    return {"soak": _account(found), "soak-memory": _memory(found), "soak-machine": _made(found)}


def _account(found: Mapping[str, Any]) -> str:
    runs = [found[name] for name in ("soak", "kills")]
    words = {
        "seconds": "seconds",
        "finished": "producers that finished",
        "kills": "producers killed",
        "sent": "batches sent, as the producers count",
        "batches": "batches received",
        "rows": "rows received",
        "tokens_sent": "tokens sent, as the producers count",
        "tokens": "tokens received",
        "timeouts": "sends that timed out, or were not answered in time, and were retried",
        "again": "batches received twice, and recognised as such",
        "unanswered": "batches whose producer had gone before the answer",
        **{name: name.replace("_", " ") for name in FAULTS},
    }
    rows = [
        [text, *(f"{run[name]:,.0f}" if name in run else "" for run in runs)]
        for name, text in words.items()
    ]
    return pages.table(("", "pushed", "acknowledged, producers killed"), rows)


def _memory(found: Mapping[str, Any]) -> str:
    rows = []
    for run, text in (("soak", "pushed"), ("kills", "acknowledged")):
        for name in ("consumer", "producer"):
            trend = found[run][f"{name}_memory"]
            if trend:
                rows.append(
                    [f"{text}: {name}s, {trend['processes']:.0f}"]
                    + [f"{trend[key] / 1e6:.0f}" for key in ("first", "last")]
                    + [f"{trend[key] / 1e6:+.1f}" for key in ("median_grown", "most_grown")]
                    + [f"{trend['peak'] / 1e6:.0f}"]
                )
    head = (
        *("resident MB", "second quarter", "last quarter"),
        *("median growth", "largest growth", "peak"),
    )
    return pages.table(head, rows)


def _made(found: Mapping[str, Any]) -> str:
    machine_of, plan = found["machine"], found["soak"]["plan"]
    packages = ", ".join(
        f"{name} {found['versions'][name]}" for name in ("jagcodec", "torch", "pyzmq")
    )
    return (
        f"Measured {found['made'][:10]} with {plan['producers']} producers, "
        f"{plan['seconds']:.0f} s and {found['kills']['plan']['seconds']:.0f} s on "
        f"{machine_of['cpus']} cores of "
        f"{machine_of['cpu']}, load at the start {machine_of['load']}; high-water marks of "
        f"{plan['high_water']}, batches of up to {plan['rows']} rows of up to {plan['width']:,} "
        f"tokens; in the first run, the consumer stopped for {plan['pause']:g} s every "
        f"{plan['pause_every']:g} s. Python {machine_of['python']}, {packages}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
