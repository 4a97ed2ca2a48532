"""Rows in, beside what producers use today: ``python -m benchmarks.rows [--rounds 9]``.

    lists       a column of 677 thousand tokens in 512 lists: encode_rows, encode, and
                msgspec.msgpack.encode of the same lists (without msgspec: msgpack.packb)
    one row     512 messages of one row, six numpy columns of 100 to 500 tokens and a reward:
                encode_rows of each, and pickle.dumps(protocol=5) of each
    tensors     slime's dict of lists of 1-D tensors, 256 rows, both ways: decode(encode_rows(...)),
                decode(encode(...)), and pickle

One process; in a round every side is called once, in an order drawn anew, and what it makes is
freed inside the clock. A ratio is the median of the rounds' ratios, with the lowest and highest
beside it. Results are compared with the input once, outside the clock.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

import jagcodec
from benchmarks.machine import machine, versions
from benchmarks.trips import quieted

try:
    import msgspec
except ImportError:
    pack_lists: Callable[[Any], bytes] = msgpack.packb
    PACKER = "msgpack"
else:
    pack_lists = msgspec.msgpack.encode
    PACKER = "msgspec"

TOKENS = 677_000
ASKED = {
    f"encode_rows / {PACKER}": 1.0,
    "one row / pickle": 1.3,
    "tensors / pickle": 0.05,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args(arguments)
    quieted()
    for about in (machine(), versions()):
        print(", ".join(f"{name} {value}" for name, value in about.items()))
    if os.getloadavg()[0] > 0.5:
        print("something else runs here: look at the lowest ratios too")
    report = {}
    for part in (lists, one_row, tensors):
        calls, pairs = part()
        report.update(measured(calls, pairs, options.rounds))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


Part = tuple[dict[str, Callable[[], Any]], dict[str, tuple[str, str]]]


def lists() -> Part:
    """A column of lists."""
    numbers = random.Random(0)
    rows = [
        [numbers.randrange(151_936) for _ in range(numbers.randrange(900, 1_745))]
        for _ in range(512)
    ]
    column = jagcodec.decode(jagcodec.encode_rows({"ids": rows}))["ids"]
    check([row.tolist() for row in column.unbind()] == rows, "encode_rows of lists")
    check(jagcodec.decode(jagcodec.encode(rows)) == rows, "encode of lists")
    calls: dict[str, Callable[[], Any]] = {
        "encode_rows": lambda: jagcodec.encode_rows({"ids": rows}),
        "encode": lambda: jagcodec.encode(rows),
        PACKER: lambda: pack_lists(rows),
    }
    return calls, {f"{name} / {PACKER}": (name, PACKER) for name in ("encode_rows", "encode")}


def one_row() -> Part:
    """512 messages of one row each."""
    numbers = np.random.default_rng(0)
    samples = []
    for tokens in numbers.integers(100, 501, 512).tolist():
        sample: dict[str, Any] = {
            "input_ids": numbers.integers(0, 151_936, tokens),
            "loss_mask": np.ones(tokens, dtype=np.int64),
            "position_ids": np.arange(tokens),
        }
        for name in ("logprobs", "ref_logprobs", "advantages"):
            sample[name] = numbers.random(tokens, dtype=np.float32)
        samples.append({**sample, "reward": 0.5})
    for sample in samples:
        (back,) = (jagcodec.decode(jagcodec.encode_rows([sample])),)
        same = all(
            np.array_equal(back[name].values().numpy(), value)
            for name, value in sample.items()
            if name != "reward"
        )
        check(same and back["reward"].tolist() == [0.5], "encode_rows of one row")
    calls: dict[str, Callable[[], Any]] = {
        "one row": lambda: [jagcodec.encode_rows([sample]) for sample in samples],
        "pickle": lambda: [pickle.dumps(sample, protocol=5) for sample in samples],
    }
    return calls, {"one row / pickle": ("one row", "pickle")}


def tensors() -> Part:
    """A dict of lists of tensors."""
    numbers = random.Random(0)
    lengths = [numbers.randrange(100, 1_500) for _ in range(256)]
    rows: dict[str, list[torch.Tensor]] = {
        "tokens": [torch.randint(0, 151_936, (tokens,)) for tokens in lengths],
        "loss_masks": [torch.ones(tokens, dtype=torch.int32) for tokens in lengths],
    }
    for name in ("log_probs", "ref_log_probs", "advantages", "returns"):
        rows[name] = [torch.rand(tokens) for tokens in lengths]
    frames = jagcodec.encode_rows(rows)
    check(len(frames) == len(rows) + 2, f"{len(frames)} frames of {len(rows)} columns")
    back = jagcodec.decode(frames)
    for name, column in rows.items():
        pairs = zip(back[name].unbind(), column, strict=True)
        check(all(torch.equal(found, row) for found, row in pairs), "encode_rows of tensors")
    calls: dict[str, Callable[[], Any]] = {
        "tensors": lambda: jagcodec.decode(jagcodec.encode_rows(rows)),
        "tensors, encode": lambda: jagcodec.decode(jagcodec.encode(rows)),
        "pickle": lambda: pickle.loads(pickle.dumps(rows, protocol=5)),
    }
    ratios = {f"{name} / pickle": (name, "pickle") for name in ("tensors", "tensors, encode")}
    return calls, ratios


def check(holds: bool, what: str) -> None:
    """See that a result is right.

    Raises:
        SystemExit: It is not.
    """
    if not holds:
        raise SystemExit(f"VERIFICATION FAILED: {what}")


def measured(
    calls: dict[str, Callable[[], Any]], pairs: dict[str, tuple[str, str]], rounds: int
) -> dict[str, dict[str, float]]:
    """The ratios of pairs of calls, printed."""
    order = random.Random(0)
    names = list(calls)
    ms: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            calls[name]()
            if turn:  # the first warms up
                ms[name].append(1e3 * (time.perf_counter() - start))
    print("\n" + ", ".join(f"{name} {statistics.median(each):.1f} ms" for name, each in ms.items()))
    report = {}
    for name, (ours, theirs) in pairs.items():
        each = [a / b for a, b in zip(ms[ours], ms[theirs], strict=True)]
        median = statistics.median(each)
        asked = ASKED.get(name)
        verdict = (
            "" if asked is None else f"asked {asked}: {'met' if median <= asked else 'missed'}"
        )
        print(f"  {name:26}{median:.3f} ({min(each):.3f} to {max(each):.3f})   {verdict}")
        report[name] = {"median": median, "lowest": min(each), "highest": max(each)}
    return report


if __name__ == "__main__":
    sys.exit(main())
