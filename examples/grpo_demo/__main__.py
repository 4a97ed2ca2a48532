"""``python -m examples.grpo_demo``, from a checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable

from examples.grpo_demo.report import DemoResult
from examples.grpo_demo.run import intro, run_demo
from jagcodec import JagcodecError


def main(run: Callable[[], DemoResult] = run_demo) -> int:
    """Say what is about to run, run it, and print what it measured.

    Args:
        run: The exchange.

    Returns:
        The exit status: 0, 1 if the demo failed, or 130 if interrupted.
    """
    print(intro(), end="\n\n", flush=True)
    try:
        print(run())
    except (JagcodecError, ImportError, OSError) as error:
        print(f"grpo_demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("grpo_demo: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
