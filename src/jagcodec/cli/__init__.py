"""The command line, whose commands import what they need when they run.

`main` runs one command. The commands are in `inspection` and `commands`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence

from jagcodec._version import __version__
from jagcodec.cli import commands, inspection
from jagcodec.cli.inputs import FAILURE, SUCCESS, error_line
from jagcodec.errors import JagcodecError

INTERRUPTED, CLOSED_PIPE = 130, 141
"""The exit status that shells report after SIGINT or SIGPIPE."""

_MAY_RAISE = ("strict", "surrogateescape", "surrogatepass")
"""Error handlers of a stream that raise for a character which its encoding lacks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    # Escape what a terminal cannot print, because names of columns and files are any text. Python
    # does so on standard error. In the locales C and POSIX, standard output has "surrogateescape".
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _MAY_RAISE:
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:  # None if the process started with it closed
                sys.stdout.flush()
    except BrokenPipeError:
        _close_quietly()
        return CLOSED_PIPE
    except (JagcodecError, OSError) as error:
        print(error_line(error), file=sys.stderr)
        return FAILURE
    except MemoryError:
        print("jagcodec: error: there is not enough memory for it", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        print("jagcodec: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command, and return its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not hasattr(options, "run"):
        parser.print_help()
        return SUCCESS
    with warnings.catch_warnings():
        # Torch warns about kinds of tensors that a message holds.
        warnings.simplefilter("ignore", UserWarning)
        status: int = options.run(options)
    return status


def _close_quietly() -> None:
    """Send standard output nowhere: at exit, Python would fail to write to the closed pipe."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream in memory has none
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="jagcodec",
        description="The jagged wire codec for reinforcement-learning rollout batches.",
        epilog="Exit status: 0; 1 where diff finds a difference, or doctor a fault; 2 for "
        "arguments, files or messages that are wrong; 130 if interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(metavar="command")
    inspection.add_inspect(parsers)
    commands.add_commands(parsers)
    return parser
