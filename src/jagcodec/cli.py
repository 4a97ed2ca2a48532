"""The command line: ``jagcodec demo`` and ``jagcodec tax``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jagcodec import scaling
from jagcodec._version import __version__
from jagcodec.batch.padding_tax import padding_tax
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit status: 0; 1 if the demo failed; 2 for arguments or files that are wrong.
        For arguments that do not parse, `SystemExit` is raised with 2.
    """
    options = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except (JagcodecError, ImportError, OSError) as error:
        print(f"jagcodec: error: {error}", file=sys.stderr)
        return int(options.failure)
    except KeyboardInterrupt:
        print("jagcodec: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jagcodec",
        description="The jagged wire codec for reinforcement-learning rollout batches.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="send real-sized batches between two processes, and check every cell",
        description="Pack and send GRPO batches of real lengths from a producer process to a "
        "trainer process, compare every cell with what was padded, and write a column back.",
    )
    demo.set_defaults(command=_demo, failure=1)

    tax = commands.add_parser(
        "tax",
        help="say what padding costs for given lengths",
        description="Say what one per-token column costs as a rectangle, and on this wire; and, "
        "with --gpus, what a step of so many would wait for: on paper, see docs/scaling.md.",
    )
    tax.add_argument(
        "--lengths",
        metavar="FILE",
        type=Path,
        help="a JSON list of tokens per row; by default, real GSM8K rollouts",
    )
    tax.add_argument(
        "--width",
        metavar="S",
        type=_positive,
        help="width of the rectangle; by default, the longest row",
    )
    tax.add_argument(
        "--bytes-per-token",
        metavar="B",
        type=_positive,
        default=8,
        help="size of one token's cell; by default 8, as of int64 ids",
    )
    job = tax.add_argument_group("a step of many GPUs, whose rows these are")
    job.add_argument("--gpus", metavar="G", type=_positive, help="how many, all in all")
    job.add_argument(
        "--gbit",
        metavar="B,B",
        type=_speeds,
        help="speeds of each node's link in Gb/s; by default 25,100,400",
    )
    job.add_argument(
        "--rows",
        metavar="N",
        type=_positive,
        help="rows of the step, of lengths such as these; by default, these",
    )
    job.add_argument(
        "--tensor-parallel",
        metavar="T",
        type=_positive,
        help="GPUs that compute on the same rows; by default 8",
    )
    job.add_argument(
        "--store-nodes",
        metavar="K",
        type=_positive,
        help="nodes that rows are put to and got from; 1 is a single controller; by default 8",
    )
    job.add_argument(
        "--store-cores",
        metavar="C",
        type=_positive,
        help="cores of each of them that serve sockets; by default 1",
    )
    tax.set_defaults(command=_tax, failure=2)
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def _speeds(text: str) -> list[float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise argparse.ArgumentTypeError(
            f"expected Gb/s above 0, with commas between them, found {text!r}"
        )
    return speeds


def _demo(options: argparse.Namespace) -> None:
    from jagcodec import demo

    print(demo.intro(), end="\n\n", flush=True)
    print(demo.run_demo())


def _tax(options: argparse.Namespace) -> None:
    if options.lengths is None:
        from jagcodec.demo.batch import rollout_table

        table = rollout_table()
        print(f"lengths: {table.source}; tokens by {table.tokenizer}")
        lengths = table.lengths.tolist()
    else:
        lengths = _read_lengths(options.lengths)
    tax = padding_tax(lengths, padded_width=options.width, bytes_per_token=options.bytes_per_token)
    step = _step(options, lengths, tax.fill)
    print(tax)
    if step:
        print(f"\n{step}")


def _step(options: argparse.Namespace, lengths: list[int], fill: float) -> str:
    """What a step of such lengths waits for, if GPUs were given."""
    names = {"tensor_parallel", "store_nodes", "store_cores"}
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.gpus is None:
        for name in (*given, *(n for n in ("gbit", "rows") if getattr(options, n) is not None)):
            raise ArgumentError(
                "bad_option",
                f"--{name.replace('_', '-')}",
                "expected --gpus beside it, found none; it says nothing about one column",
            )
        return ""
    workload = scaling.Workload(
        rows=options.rows or len(lengths),
        width=options.width or max(lengths, default=0),
        fill=fill,
    )
    cluster = scaling.Cluster(options.gpus, **given)
    return scaling.table(workload, cluster, options.gbit or [25.0, 100.0, 400.0])


def _read_lengths(path: Path) -> list[int]:
    try:
        lengths = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentTypeError(
            "bad_type", str(path), f"expected a JSON list of whole numbers; {error}"
        ) from error
    if not isinstance(lengths, list):
        raise ArgumentTypeError(
            "bad_type",
            str(path),
            f"expected a JSON list of whole numbers, found {json.dumps(lengths):.40}",
        )
    for row, length in enumerate(lengths):
        if type(length) is not int:
            raise ArgumentTypeError(
                "bad_type",
                f"{path}, row {row}",
                f"expected a whole number of tokens, found {json.dumps(length):.40}",
            )
    return lengths


if __name__ == "__main__":
    sys.exit(main())
