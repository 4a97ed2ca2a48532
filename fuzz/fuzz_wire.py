#!/usr/bin/env python3
"""Fuzz the readers of the wire, guided by coverage: ``make fuzz``, ``make fuzz RUNS=10000000``.

Stops at the first input whose outcome is neither a value nor `WireFormatError`. With
``--keep-going DIRECTORY`` (the first argument) such inputs are collected there instead, one per
place in the code. All other arguments are libFuzzer's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
# Imported before and outside the instrumentation: only jagcodec's own branches guide the search.
import msgpack  # noqa: E402, F401
import numpy  # noqa: E402, F401
import tensordict  # noqa: E402, F401
import torch  # noqa: E402

torch.set_num_threads(1)
# The writer only checks what was read.
_NOT_READERS = [
    "jagcodec.wire.encoder",
    "jagcodec.wire.lowering",
    "jagcodec.wire.tensor_views",
    "jagcodec.pack.fields",
    "jagcodec.batch.tax",
]
with atheris.instrument_imports(include=["jagcodec"], exclude=_NOT_READERS):
    # With the modules of jagcodec that it needs: the package itself imports none.
    import target

# Address space on top of what the libraries take.
_MEMORY = 2 << 30


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    # The hard limit stays: processes that this one starts (-merge=1) set one of their own.
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


class _Collector:
    """Keeps one input for each place in the code that fails, and goes on."""

    def __init__(self, run: target.Target, directory: Path) -> None:
        self._run = run
        self._directory = directory
        self._seen: dict[str, int] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, data: bytes) -> None:
        try:
            self._run(data)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            places = [f for f in frames if "jagcodec" in f.filename] or frames
            text = str(error)[:40] if isinstance(error, target.BrokenPromiseError) else ""
            key = f"{type(error).__name__} {places[-1].name}:{places[-1].lineno} {text}"
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] == 1:
                name = hashlib.sha256(key.encode()).hexdigest()[:12]
                (self._directory / f"{name}.input").write_bytes(data)
                report = f"{key}\n\n{''.join(traceback.format_exception(error))}"
                (self._directory / f"{name}.txt").write_text(report)


def main() -> int:
    """Run libFuzzer over `target.Target`, and tell at the end how far the inputs got."""
    argv = sys.argv
    shared = mmap.mmap(-1, ctypes.sizeof(target.Counts))
    counts = target.Counts.from_buffer(shared)
    begin = time.monotonic()
    # libFuzzer ends its process without a word to Python, so another one tells.
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        figures = {name: getattr(counts, name) for name, _ in counts._fields_}
        print(json.dumps({**figures, "seconds": round(time.monotonic() - begin)}), flush=True)
        return os.waitstatus_to_exitcode(status) & 0xFF
    # A file in memory, under the name that every process's own files have.
    run = target.Target(f"/proc/self/fd/{os.memfd_create('message')}", counts)
    one_input: Callable[[bytes], None] = run
    if len(argv) > 2 and argv[1] == "--keep-going":
        one_input = _Collector(run, Path(argv[2]))
        argv = [argv[0], *argv[3:]]
    _limit_memory()
    atheris.Setup(argv, one_input)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
