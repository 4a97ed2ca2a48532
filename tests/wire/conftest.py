"""Fixtures of the tests of messages."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jagcodec.wire import compress
from jagcodec.wire.stored import elide_cells, repeats


@pytest.fixture
def eager(monkeypatch):
    """`elide` sends what it finds once, and every frame is compressed, whether it pays or not."""
    monkeypatch.setattr(elide_cells, "LEAST_SEARCHED", 1)
    monkeypatch.setattr(repeats, "RUN_COST", -(1 << 20))
    monkeypatch.setattr(compress, "_SMALLEST", 1)
    monkeypatch.setattr(compress, "_pays", lambda *args: True)


@pytest.fixture
def in_threads():
    """Runs a function in several threads at once, and raises what one of them raises."""

    def run(count, work, *arguments):
        gate = threading.Barrier(count)

        def gated(argument):
            gate.wait()
            work(*argument)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(gated, arguments or [()] * count))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield run
    sys.setswitchinterval(interval)
