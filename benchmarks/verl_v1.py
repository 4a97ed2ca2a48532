"""A training step of verl through TransferQueue: stock, and with jagcodec's storage backend.

    python -m benchmarks.verl_v1 [--turns 4] [--rounds 4] [--json FILE] [--python-path NAME=DIR]

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

One-row puts and tag puts, one after another, are no part of the step. A batch as NeMo-RL's data
plane makes it follows: one put of 512 rows, a get of named columns by each of four workers, and
one jagged column written back.

The ways take turns. A turn is a new process tree; its first round does not count. `jagcodec` is
stock with one more import in the driver, before `transfer_queue.init()`. ``--python-path NAME=DIR``
adds a way that does the same with DIR first on the path, such as src of another checkout. Every
value and type that is read is compared, outside the clock. If one differs or a process fails, the
command ends with exit status 1. Ratios are those of medians, to the first way.

Install verl with `--no-deps`, as `make test-integrations` does. verl pins tensordict 0.10: to
measure with that version, put the directory that holds it first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine, versions

ROOT = Path(__file__).parents[1]
MODULE = "jagcodec.integrations.transfer_queue"
SESSION = "from benchmarks.verl_v1_session import main; main()"
SECONDS = 600  # for a turn, at most
# Of the first way's time, by the name of a line, or by what follows its colon.
ASKED = {
    **{"step": 0.8, "step without rollout": 0.65, "fetch": 0.5, "get": 0.5, "put": 0.8},
    **{"write-back": 1.0, "one-row put": 1.0},
    **{"CPU of the step: all": 0.9, "CPU of the step: controller": 1.1},
}

Turn = dict[str, Any]
Lines = dict[str, dict[str, dict[str, float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    ways = {"stock": "", "jagcodec": "", **dict(options.python_path)}
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for number in range(options.turns):
        for way in ways if number % 2 == 0 else reversed(ways):
            start = time.perf_counter()
            turns[way].append(run(way, ways[way], options.prompts, options.rounds))
            print(f"{way}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    others = {name: importlib.metadata.version(name) for name in ("ray", "verl")}
    report = {
        "machine": machine(),
        "versions": versions() | others,
        "prompts": options.prompts,
        "rounds": options.turns * options.rounds,
        "lines": lines(turns),
        "turns": turns,
    }
    print(text(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verl_v1", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--turns", type=int, default=4, help="of each way")
    parser.add_argument("--rounds", type=int, default=4, help="of each turn, after its first")
    parser.add_argument("--prompts", type=int, default=32, help="each has eight trajectories")
    parser.add_argument(
        "--python-path",
        type=_way,
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="add a way",
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser


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


def lines(turns: Mapping[str, Sequence[Turn]]) -> Lines:
    """By line and way: the median round, the lowest, the highest, and the ratio of medians."""
    found: Lines = {}
    for way, done in turns.items():
        rounds = [each for turn in done for each in turn["rounds"]]
        for line in rounds[0]:
            ms = [each[line] for each in rounds]
            own = {"ms": statistics.median(ms), "lowest": min(ms), "highest": max(ms)}
            first = next(iter(found.setdefault(line, {way: own}).values()))
            # A process that did next to nothing has no tick of CPU.
            ratio = own["ms"] / first["ms"] if first["ms"] else 1.0
            found[line][way] = {**own, "ratio": ratio}
    return found


def text(report: Mapping[str, Any]) -> str:
    printed = [
        *(", ".join(f"{k} {v}" for k, v in report[of].items()) for of in ("machine", "versions")),
        f"{report['prompts']} prompts; ms, medians of {report['rounds']} rounds [lowest, highest]",
    ]
    for way, done in report["turns"].items():
        cells = sum(turn["cells"] for turn in done)
        printed.append(f"{way}: storage units are {done[0]['unit']}, {cells:,} cells compared")
    printed.append(" " * 36 + "".join(f"{way:>32}" for way in report["turns"]))
    for line, by_way in report["lines"].items():
        asked = ASKED.get(line, ASKED.get(line.rpartition(": ")[2]))
        row = f"{line:36}"
        for number, own in enumerate(by_way.values()):
            row += f"{own['ms']:8.1f} [{own['lowest']:.1f}, {own['highest']:.1f}]".rjust(32)
            row += f"  {own['ratio']:.2f}" if number else ""
            if number and asked:
                row += f", asked {asked:g}: {'met' if own['ratio'] <= asked else 'missed'}"
        printed.append(row)
    return "\n".join(printed)


if __name__ == "__main__":
    sys.exit(main())
