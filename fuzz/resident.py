"""What reading a message costs: seconds, and resident memory at its peak (Linux)."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jagcodec.memory import blocks
from tests.wire.growth import forget

# Resident memory for each byte of a message: the largest in the table of SECURITY.md, and some.
MOST_PER_BYTE = 700
# A single reading that takes longer ends the run, and says where it was.
HANGS = 300

_libc = ctypes.CDLL(None)
Read = Callable[[], Any]


def _status(name: str) -> int:
    """A figure of this process in bytes: VmRSS, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def cost(read: Read) -> tuple[float, int]:
    """Seconds of this thread, and bytes by which memory grew at its peak."""
    forget()
    gc.collect()
    blocks.release()
    _libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    gc.disable()
    faulthandler.dump_traceback_later(HANGS, exit=True)
    try:
        begin = time.thread_time()
        value = read()
        seconds = time.thread_time() - begin
    finally:
        faulthandler.cancel_dump_traceback_later()
        gc.enable()
    peak = _status("VmHWM")
    del value
    return seconds, max(0, peak - before)
