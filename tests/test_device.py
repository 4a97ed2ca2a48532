"""The device that the suite brings: what it has in common with a GPU."""

import gc
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import given

from jagcodec.testing import tensors
from tests import device
from tests.device import DEVICE, watch
from tests.helpers import ROOT
from tests.oracle import bits

pytestmark = pytest.mark.usefixtures("own_device")


@given(tensors())
def test_tensors_go_there_and_come_back(original):
    there = original.to(DEVICE)
    assert there.device == DEVICE
    assert (there.shape, there.dtype) == (original.shape, original.dtype)
    assert bits(there.cpu()) == bits(original)


def test_it_computes():
    there = torch.arange(6, device=DEVICE).view(2, 3)
    assert torch.arange(3.0, device=DEVICE).add_(1).sum().item() == 6
    assert not there.t().is_contiguous()
    assert there.t().contiguous().cpu().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert there[there > 2].cpu().tolist() == [3, 4, 5]
    assert torch.cat([there, there]).device == DEVICE
    assert there[1:].untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    nested = torch.nested.nested_tensor_from_jagged(
        there.flatten(), torch.tensor([0, 2, 6], device=DEVICE)
    )
    assert [row.cpu().tolist() for row in nested.unbind()] == [[0, 1], [2, 3, 4, 5]]


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


def test_its_memory_is_let_go():
    gc.collect()
    before = len(device._memory)
    there = torch.ones(1000, device=DEVICE)
    view = there[1:]
    assert len(device._memory) > before
    del there
    assert view.sum().item() == 999
    del view
    assert len(device._memory) == len(device._managed) == before
