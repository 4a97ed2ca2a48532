"""Peak memory of a trip: how far the process grows beyond its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import Case, make_batch
from benchmarks.trips import MAKERS, Runner, processes, quieted

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_TINY = Case("lognormal", 8, 64)


def measure(
    case: Case, names: Sequence[str], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Bytes by which one trip of each side raises the peak of a fresh process.

    `needed` is what a trip cannot do without: the message, the receive buffers and the output.
    """
    if not _CLEAR.exists():
        return {"case": str(case), "skipped": "needs /proc, which Linux has"}
    sides: dict[str, Any] = {}
    names = [name for name in names if name in MAKERS]
    for name in names:
        context = processes()
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, name, case), daemon=True)
        process.start()
        there.close()
        sides[name] = here.recv()
        process.join()
        progress(len(sides), len(names))
    return {"case": str(case), "sides": sides}


def _serve(connection: Any, name: str, case: Case) -> None:
    quieted()
    tiny = make_batch(_TINY.lengths())
    Runner(MAKERS[name](tiny), tiny).run()  # imports and first times are not the trip's
    batch = make_batch(case.lengths())
    runner = Runner(MAKERS[name](batch), batch)
    _CLEAR.write_text("5")  # the peak begins anew
    before = _peak()
    trip, rectangles = runner.run()
    grown = _peak() - before
    needed = 2 * trip.wire_bytes + sum(rectangle.nbytes for rectangle in rectangles.values())
    connection.send({"input": batch.padded_bytes, "needed": needed, "grown": grown})


def _peak() -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024
