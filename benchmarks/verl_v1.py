"""A training step of verl through TransferQueue: stock, and with jagcodec's storage backend.

    python -m benchmarks.verl_v1 [--turns 4] [--rounds 4] [--python-path NAME=DIR]

The step makes the calls that verl 0.9.1's trainer V1 makes of TransferQueue in a step of GRPO, with
verl's own helpers and between processes as verl starts them: the driver, TransferQueue's controller
and two SimpleStorage units, two agent loop workers, four training workers. No model runs.

    submit       put a tag for each of 32 prompts
    rollout      put 256 trajectories of 500 to 3,000 tokens one by one, all at once: 24 columns, 16
                 of them objects; put a tag before and after the eight of a prompt
    sample       list all keys, clear the prompts
    ... workers  each worker asks twice for the meta of 64 rows, gets all columns (fetch), writes
                 jagged columns back and asks for the keys (write-back); means of the workers
    ... driver   get some columns, compute, put jagged columns
    clear        clear all rows

One-row puts and tag puts, one after another, are not part of the step. A batch as NeMo-RL's data
plane makes it follows: one put of 512 rows, a get of named columns by each of four workers, and
one jagged column written back.

The ways take turns. A turn is a new process tree; its first round does not count. `jagcodec` is
stock with one more import in the driver, before `transfer_queue.init()`. ``--python-path NAME=DIR``
adds a way that does the same with DIR first on the path, such as src of another checkout. Every
value and type that is read is compared, outside the clock. If one differs or a process fails, the
command ends with exit status 1. Ratios are those of medians, to the first way.

verl pins tensordict 0.10: to measure with that version, put the directory that holds it first on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.machine import ROOT
from benchmarks.measure import spread

MODULE = "jagcodec.integrations.transfer_queue"
SESSION = "from benchmarks.verl_v1_session import main; main()"
SECONDS = 600  # for a turn, at most

Turn = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("verl_v1", __doc__)
    parser.add_argument("--turns", type=int, default=4, help="of each way")
    parser.add_argument("--rounds", type=int, default=4, help="of each turn, after its first")
    parser.add_argument("--prompts", type=int, default=32, help="each has eight trajectories")
    added: dict[str, Any] = {"type": _way, "action": "append", "default": [], "metavar": "NAME=DIR"}
    parser.add_argument("--python-path", **added, help="add a way")
    options = parser.parse_args(arguments)
    ways = {"stock": "", "jagcodec": "", **dict(options.python_path)}
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for number in range(options.turns):
        for way in ways if number % 2 == 0 else reversed(ways):
            start = time.perf_counter()
            turns[way].append(run(way, ways[way], options.prompts, options.rounds))
            print(f"{way}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return report.finish(
        "verl_v1",
        {
            "prompts": options.prompts,
            "rounds": options.turns * options.rounds,
            "cells": {way: sum(turn["cells"] for turn in done) for way, done in turns.items()},
            "unit": {way: done[0]["unit"] for way, done in turns.items()},
            "lines": lines(turns),
        },
        options,
    )


def _way(text: str) -> tuple[str, str]:
    name, _, directory = text.partition("=")
    if not (name and directory and Path(directory).is_dir()):
        raise argparse.ArgumentTypeError(f"expected NAME=DIR, found {text!r}")
    return name, directory


def run(way: str, directory: str, prompts: int, rounds: int) -> Turn:
    """One turn of a way, in a new process tree.

    Raises:
        SystemExit: It failed; its own error is on stderr.
    """
    asked = {"module": MODULE if way != "stock" else "", "prompts": prompts, "rounds": rounds}
    paths = filter(None, [directory, str(ROOT), os.environ.get("PYTHONPATH")])
    changed = {"PYTHONPATH": os.pathsep.join(paths), "TQ_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", SESSION, json.dumps(asked)],
            env={**os.environ, **changed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=SECONDS,
        )
    except subprocess.SubprocessError as error:
        raise SystemExit(f"{way}: {error}") from None
    found: Turn = json.loads(done.stdout.splitlines()[-1])
    return found


def lines(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, dict[str, float]]]:
    """By line and way: the median round, the lowest, the highest, and the ratio of medians."""
    rounds = {
        way: [each for turn in done for each in turn["rounds"]] for way, done in turns.items()
    }
    first = next(iter(rounds))
    found = {}
    for line in rounds[first][0]:
        own = {way: spread([each[line] for each in some]) for way, some in rounds.items()}
        base = own[first]["median"]
        # A process that did next to nothing has no tick of CPU.
        found[line] = {
            way: {**each, "ratio": each["median"] / base if base else 1.0}
            for way, each in own.items()
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
