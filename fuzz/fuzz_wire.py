#!/usr/bin/env python3
"""Fuzz the readers of the wire, guided by coverage: ``make fuzz``, ``make fuzz RUNS=10000000``.

Stops at the first input whose outcome is neither a value nor `WireFormatError`. All arguments are
libFuzzer's; with ``-ignore_crashes=1 -fork=2`` it collects such inputs and goes on.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import resource
import sys
import time
import warnings
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
    "jagcodec.wire.write.encoder",
    "jagcodec.wire.write.lowering",
    "jagcodec.wire.write.lowering_columns",
    "jagcodec.wire.write.lowering_objects",
    "jagcodec.wire.write.lowering_values",
    "jagcodec.wire.write.walk",
    "jagcodec.produce.fields",
    "jagcodec.train.tax",
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


def _mutated(data: bytes, most: int, seed: int) -> bytes:
    return target.mutated(data, most, seed, atheris.Mutate)


def main() -> int:
    """Run libFuzzer over `target.Target`, and tell at the end how far the inputs got."""
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
    _limit_memory()
    atheris.Setup(sys.argv, run, custom_mutator=_mutated)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
