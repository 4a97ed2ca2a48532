"""What a call costs that no clock shows: counted, and so the same on every run."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def calls(run: Callable[[], Any]) -> int:
    """Calls of Python functions and of built-in ones during one run, those of torch included.

    The same for the same code on the same versions of Python, torch and tensordict. Loops inside
    compiled code are one call, so a loop over rows in Python shows, and one in C does not.
    """
    count = 0

    def profile(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()  # what the first run imports and caches is not counted
    with collector_off():
        sys.setprofile(profile)
        try:
            made = run()
        finally:
            sys.setprofile(None)
    del made
    return count - 1  # of setprofile itself


def functions_entered(run: Callable[[], Any], package: Path) -> int:
    """Calls of named Python functions whose source lies under `package`, during one run.

    Comprehensions, lambdas and module bodies do not count. A generator counts each time that it is
    resumed.
    """
    count = 0

    def profile(frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        code = frame.f_code
        named = not code.co_name.startswith("<")
        count += event == "call" and named and Path(code.co_filename).is_relative_to(package)

    run()  # what the first run imports and caches is not counted
    with collector_off():
        sys.setprofile(profile)
        try:
            made = run()
        finally:
            sys.setprofile(None)
    del made
    return count


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most memory that one run holds at once beyond what was held before.

    Of Python and of numpy. The allocator of torch is not seen.
    """
    run()
    with collector_off():
        tracemalloc.start()
        try:
            made = run()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    del made
    return peak


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
