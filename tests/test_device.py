"""The device that the suite brings notices what tests ask it."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.device import DEVICE, watch
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("own_device")


def test_copies_and_waits_are_counted():
    there = torch.arange(10, device=DEVICE)
    with watch() as traffic:
        there[:4].clone().add_(1)
    assert (traffic.fetched, traffic.waits) == ([], 0)
    with watch() as traffic:
        there[:4].cpu()
        there.tolist()
    assert (traffic.fetched, traffic.waits) == ([32, 80], 2)
    with watch() as traffic:
        there.sum().item()
        there.nonzero()
        torch.equal(there, there)
    assert (traffic.fetched, traffic.waits) == ([], 3)


def test_a_copy_that_was_not_waited_for_is_not_there():
    there = torch.arange(1, 4, device=DEVICE)
    here = torch.zeros(3, dtype=torch.int64)
    with watch() as traffic:
        here.copy_(there, non_blocking=True)
        there.add_(10)
        assert here.tolist() == [0, 0, 0]
        torch.get_device_module(DEVICE).current_stream(DEVICE).synchronize()
        assert here.tolist() == [1, 2, 3]
    assert (traffic.fetched, traffic.waits) == ([24], 1)


def test_the_host_cannot_read_its_memory():
    code = (
        "import ctypes, torch; from tests.device import DEVICE, install; install();"
        "ctypes.string_at(torch.ones(3, device=DEVICE).data_ptr(), 4)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ})
    assert run.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
