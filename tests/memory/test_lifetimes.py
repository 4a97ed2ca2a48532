"""Received memory lives exactly as long as something looks at it, and nothing piles up."""

import contextlib
import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec import (
    decode,
    encode,
    encode_fields,
    materialize,
    open_wire,
)
from tests.helpers import receive
from tests.oracle import assert_same

LENGTHS = torch.tensor([2, 4, 3])
FIELDS = {
    "ids": torch.arange(3 * 4000).view(3, 4000),
    "logprob": torch.arange(3 * 4000.0).view(3, 4000),
}
LONG = torch.tensor([2000, 4000, 3000])


def received():
    """A message in arrays, which unlike bytearrays can be watched, and the watches."""
    frames = encode_fields(FIELDS, lengths=LONG, token_aligned_fields=FIELDS)
    arrays = [np.frombuffer(frame, dtype=np.uint8).copy() for frame in receive(frames)]
    return arrays, [weakref.ref(array) for array in arrays]


@pytest.fixture(autouse=True)
def no_collector():
    """What is freed here is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_column_keeps_its_frame_alive_and_no_other():
    frames, alive = received()
    td = decode(frames)
    del frames
    assert alive[0]() is None
    ids = td["ids"].values()
    del td
    assert [ref() is not None for ref in alive[2:]] == [True, False]
    assert ids[0] == 0
    del ids
    assert [ref() for ref in alive] == [None] * len(alive)


def test_an_open_message_keeps_its_memory_until_it_is_dropped():
    frames, alive = received()
    batch = open_wire(frames)
    del frames
    part = batch.select(["ids"]).rows(slice(0, 1))
    del batch
    assert alive[2]() is not None
    columns = materialize(part)
    del part
    assert alive[2]() is None
    assert columns["ids"].shape == (1, 2000)


def test_a_refused_message_is_let_go():
    frames, alive = received()
    frames[0][-10] ^= 0xFF
    with contextlib.suppress(ValueError):
        decode(frames)
    del frames
    assert [ref() for ref in alive] == [None] * len(alive)


def test_a_frame_of_the_sender_lives_no_longer_than_it():
    tensor = torch.arange(5000)
    alive = weakref.ref(tensor.untyped_storage())
    frames = encode(tensor)
    del tensor
    assert decode(frames)[7] == 7
    del frames
    assert alive() is None or alive().nbytes() == 0


# In a process of its own, and by what it has now: a high-water mark such as `ru_maxrss` stands
# where the largest test before, or the import of torch, has left it, and hides what leaks below it.
TRIPS = """
import gc, sys, torch
from pathlib import Path
from tensordict import NonTensorStack
from jagcodec import decode, encode, materialize, pack_jagged_fields, to_blob

lengths = torch.tensor([2, 4, 3])
fields = {"ids": torch.arange(12).view(3, 4), "logprob": torch.rand(3, 4)}
message = NonTensorStack("a", {"b": (1, 2)}, None)
leaked, trips, leak = [], int(sys.argv[1]), int(sys.argv[2])

def trip():
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=fields)
    td["message"] = message
    blob = to_blob(encode(td, checksum=True))
    materialize(decode(blob))
    leaked.append(bytearray(leak))

def resident():
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])

for _ in range(1000):
    trip()
before = resident()
for _ in range(trips):
    trip()
print(resident() - before)
"""


def grown(trips, leak):
    """How many KiB a process grows over so many trips that leak so many bytes each."""
    arguments = [sys.executable, "-c", TRIPS, str(trips), str(leak)]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return int(run.stdout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.slow
def test_memory_stays_flat_over_ten_thousand_trips():
    assert grown(trips=10_000, leak=0) < 4096


@linux
@pytest.mark.slow
def test_a_leak_would_be_found():
    assert grown(trips=2_000, leak=3_000) >= 4096


def test_threads_under_load_share_nothing():
    """Several threads over one encoder's worth of state each, and one registry, for many trips."""
    failures = []

    def work(seed):
        td = TensorDict(
            {
                "x": torch.full((4, 3000), seed),
                "s": NonTensorStack(*[f"{seed}-{i}" for i in "abcd"]),
            },
            [4],
        )
        frames = receive(encode(td, narrow=seed % 2 == 0))
        for _ in range(60):
            back = decode(frames, copy=True)
            try:
                assert_same(back, td)
                assert_same(open_wire(frames).rows([1]).to_tensordict()["x"], td["x"][1:2])
            except AssertionError as error:
                failures.append((seed, str(error)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
