"""Messages of few rows beside pickle: ``python -m benchmarks.small``.

    python -m benchmarks.small [--rows 1,8,64] [--rounds 15] [--turns 200] [--pairs] [--json FILE]

Rows of about 300 tokens in seven columns: six per-token columns and a reward per row. Every side
begins with padded tensors in memory and ends with padded tensors:

    fused       encode_fields, copy, materialize(open_wire(frames))
    decoded     encode_fields, copy, materialize(decode(frames))
    pickle      pickle of the numpy arrays with their memory out of band (protocol 5), copy, loads,
                torch.from_numpy
    encode      encode_fields alone
    in band     pickle.dumps(protocol=5) of the arrays alone: one bytes object

The copy stands for the transport: the header of a message becomes `bytes`, every other frame a new
`bytearray`. The head of the pickle and its buffers are treated in the same way.

One process; all sides take turns, one call each, in an order drawn anew for every turn: each finds
in the caches what the others left, as in a program that does something between two messages. With
``--pairs`` only the two sides of a ratio take turns, which favours the one of less code. What a
call makes is freed inside the clock, and garbage is collected whenever Python does so by itself,
because a program that sends small messages in a loop pays for both. A round is so many turns; its
ratio is that of the medians, and the ratio printed is the median of the rounds, with the lowest
and highest beside it. Results are compared bit for bit with the input before every round, outside
the clock.

Also printed, because no clock is needed: bytes of each header, and how many named functions of
the library one call enters.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import jagcodec
from benchmarks.costs import functions_entered
from benchmarks.machine import machine, versions
from benchmarks.shapes import PADS, Batch, make_small_batch
from benchmarks.trips import difference, quieted

Columns = Mapping[str, torch.Tensor]

ROWS = (1, 8, 64)
WARM_UP = 50  # turns
ZEROS = dict.fromkeys(PADS, 0)  # what `materialize` pads with unless it is asked for others

RATIOS = {
    "fused": ("fused", "pickle"),
    "decoded": ("decoded", "pickle"),
    "encode": ("encode", "in band"),
}
ASKED = {"fused": {1: 2.2, 8: 2.2, 64: 2.4}, "decoded": {1: 4.0}, "encode": {1: 1.7}}
HEADER_ASKED = {1: 768}
FUNCTIONS_ASKED = {"encode_fields": 40, "decode": 60, "open_wire + materialize": 80}
FUNCTION_ROWS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    quieted()
    report: dict[str, Any] = {"machine": machine(), "versions": versions(), "trips": []}
    for what in ("machine", "versions"):
        print(", ".join(f"{name} {value}" for name, value in report[what].items()))
    if os.getloadavg()[0] > 0.5:
        print("something else runs here: look at the lowest ratios too")
    print()
    for rows in options.rows:
        batch = make_small_batch(rows, pads=ZEROS)
        found = measure(batch, options.rounds, options.turns, options.pairs)
        report["trips"].append(found)
        print(text(found), flush=True)
    report["functions"] = functions(make_small_batch(FUNCTION_ROWS, pads=ZEROS))
    print(functions_text(report["functions"]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", type=_numbers, default=ROWS, help="comma-separated: 1,8,64")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=200, help="calls of each side in a round")
    parser.add_argument("--pairs", action="store_true", help="turns of two sides, not of all")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


# --- sides -------------------------------------------------------------------------------------


def sides(batch: Batch) -> dict[str, Callable[[], Any]]:
    """What is timed, each ready to be called."""
    columns, lengths = batch.columns, batch.lengths

    def encode() -> Sequence[Any]:
        return jagcodec.encode_fields(columns, lengths=lengths, token_aligned_fields=PADS)

    def fused() -> Columns:
        return jagcodec.materialize(jagcodec.open_wire(copied(encode())))

    def decoded() -> Columns:
        return jagcodec.materialize(jagcodec.decode(copied(encode())))

    def pickled() -> Columns:
        arrays = {name: column.numpy() for name, column in columns.items()}
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
        received = copied([head, *buffers])
        loaded = pickle.loads(received[0], buffers=received[1:])
        return {name: torch.from_numpy(array) for name, array in loaded.items()}

    def in_band() -> bytes:
        return pickle.dumps({name: column.numpy() for name, column in columns.items()}, protocol=5)

    return {
        "fused": fused,
        "decoded": decoded,
        "pickle": pickled,
        "encode": encode,
        "in band": in_band,
    }


def copied(frames: Sequence[Any]) -> list[bytes | bytearray]:
    """The transport: one copy of each frame."""
    head, *rest = frames
    return [bytes(head), *map(bytearray, rest)]


def verify(batch: Batch, calls: Mapping[str, Callable[[], Any]]) -> None:
    """Every side gives back the columns of the batch, bit for bit.

    Raises:
        SystemExit: One does not.
    """
    results = {name: calls[name]() for name in ("fused", "decoded", "pickle")}
    results["encode"] = jagcodec.materialize(jagcodec.open_wire(calls["encode"]()))
    arrays = pickle.loads(calls["in band"]())
    results["in band"] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for name, columns in results.items():
        wrong = difference(batch, columns)
        if wrong:
            raise SystemExit(f"VERIFICATION FAILED: {name}, {len(batch.lengths)} rows: {wrong}")


# --- measuring ---------------------------------------------------------------------------------


def measure(batch: Batch, rounds: int, turns: int, pairs: bool = False) -> dict[str, Any]:
    """Microseconds and ratios of all sides over one batch, and the bytes of its header."""
    calls = sides(batch)
    order = random.Random(0)
    groups = list(RATIOS.values()) if pairs else [tuple(calls)]
    us: dict[str, list[float]] = {name: [] for name in calls}
    ratios: dict[str, list[float]] = {name: [] for name in RATIOS}
    for group in groups:
        sharing = {name: calls[name] for name in group}
        timed(sharing, WARM_UP, order)
        for _ in range(rounds):
            verify(batch, calls)
            found = timed(sharing, turns, order)
            medians = {name: statistics.median(each) for name, each in found.items()}
            for name, median in medians.items():
                us[name].append(median)
            for name, (ours, theirs) in RATIOS.items():
                if ours in medians and theirs in medians:
                    ratios[name].append(medians[ours] / medians[theirs])
    rows = len(batch.lengths)
    return {
        "rows": rows,
        "tokens": batch.tokens,
        "rounds": rounds,
        "turns": turns,
        "pairs": pairs,
        "us": {name: statistics.median(each) for name, each in us.items()},
        "ratios": {
            name: {
                "median": statistics.median(each),
                "lowest": min(each),
                "highest": max(each),
                "asked": ASKED[name].get(rows),
            }
            for name, each in ratios.items()
        },
        "header_bytes": len(bytes(calls["encode"]()[0])),
        "header_asked": HEADER_ASKED.get(rows),
    }


def timed(
    calls: Mapping[str, Callable[[], Any]], turns: int, order: random.Random
) -> dict[str, list[float]]:
    """Microseconds of every call, in turns of one call of each side."""
    us: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for _ in range(turns):
        order.shuffle(names)
        for name in names:
            call = calls[name]
            start = time.perf_counter()
            call()
            us[name].append(1e6 * (time.perf_counter() - start))
    return us


def functions(batch: Batch) -> dict[str, dict[str, int]]:
    """Named functions of the library that one call enters."""
    package = Path(jagcodec.__file__).parent
    calls = sides(batch)
    frames = copied(calls["encode"]())
    runs: dict[str, Callable[[], Any]] = {
        "encode_fields": calls["encode"],
        "decode": lambda: jagcodec.decode(frames),
        "open_wire + materialize": lambda: jagcodec.materialize(jagcodec.open_wire(frames)),
    }
    return {
        name: {"entered": functions_entered(run, package), "asked": FUNCTIONS_ASKED[name]}
        for name, run in runs.items()
    }


# --- text --------------------------------------------------------------------------------------


def text(found: Mapping[str, Any]) -> str:
    """One batch: microseconds of each side, ratios beside what is asked."""
    times = ", ".join(f"{name} {us:.0f}" for name, us in found["us"].items())
    lines = [f"{found['rows']} rows, {found['tokens']:,} tokens, microseconds: {times}"]
    for name, ratio in found["ratios"].items():
        ours, theirs = RATIOS[name]
        spread = f"{ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"
        lines.append(f"  {f'{ours} / {theirs}':24}{spread:26}{_asked(ratio)}")
    bytes_found = {"median": found["header_bytes"], "asked": found["header_asked"]}
    lines.append(f"  {'header bytes':24}{found['header_bytes']:<26}{_asked(bytes_found)}")
    return "\n".join(lines) + "\n"


def functions_text(found: Mapping[str, Mapping[str, int]]) -> str:
    """Functions entered beside what is asked."""
    lines = [f"named functions of the library entered, {FUNCTION_ROWS} rows:"]
    for name, each in found.items():
        verdict = _asked({"median": each["entered"], "asked": each["asked"]})
        lines.append(f"  {name:24}{each['entered']:<26}{verdict}")
    return "\n".join(lines)


def _asked(figure: Mapping[str, Any]) -> str:
    if figure["asked"] is None:
        return ""
    return (
        f"asked {figure['asked']:g}: {'met' if figure['median'] <= figure['asked'] else 'missed'}"
    )


if __name__ == "__main__":
    sys.exit(main())
