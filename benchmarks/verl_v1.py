"""A training step of verl through TransferQueue: stock, and with jagcodec's storage backend.

    python -m benchmarks.verl_v1 [--turns 4] [--rounds 4]

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

A batch as NeMo-RL's data plane makes it follows: one put of 512 rows, a get of named columns by
each of four workers, and one jagged column written back.

The ways take turns. A turn is a new process tree; its first round does not count. `jagcodec` is
stock with one more import in the driver, before `transfer_queue.init()`. Every value and type that
is read is compared, outside the clock. If one differs or a process fails, the command ends with
exit status 1. Ratios are those of medians, to the first way.

verl pins tensordict 0.10: to measure with that version, put the directory that holds it first on
PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import report
from benchmarks.machine import run_python
from benchmarks.measure import in_turns, spread

WAYS = {"stock": "", "jagcodec": "jagcodec.integrations.transfer_queue"}
SESSION = "from benchmarks.verl_v1_session import main; main()"

Turn = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser("verl_v1", __doc__)
    parser.add_argument("--turns", type=int, default=4, help="of each way")
    parser.add_argument("--rounds", type=int, default=4, help="of each turn, after its first")
    parser.add_argument("--prompts", type=int, default=32, help="each has eight trajectories")
    options = parser.parse_args(arguments)
    sized = options.prompts, options.rounds
    runs = {way: partial(run_python, SESSION, module, *sized) for way, module in WAYS.items()}

    def measured() -> dict[str, Any]:
        turns = in_turns(runs, rounds=options.turns, warm=0)
        return {
            "prompts": options.prompts,
            "rounds": options.turns * options.rounds,
            "cells": {way: sum(turn["cells"] for turn in done) for way, done in turns.items()},
            "unit": {way: done[0]["unit"] for way, done in turns.items()},
            "lines": lines(turns),
        }

    return report.run("verl_v1", measured, options)


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
        found[line] = {way: {**each, "ratio": each["median"] / base} for way, each in own.items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
