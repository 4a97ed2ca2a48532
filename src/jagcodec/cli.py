"""The command line: ``jagcodec demo`` and ``jagcodec tax``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jagcodec._version import __version__
from jagcodec.errors import ArgumentTypeError, JagcodecError
from jagcodec.tax import padding_tax


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
        description="Say what one per-token column costs as a rectangle, and on this wire.",
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
    tax.set_defaults(command=_tax, failure=2)
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


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
    print(padding_tax(lengths, padded_width=options.width, bytes_per_token=options.bytes_per_token))


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
