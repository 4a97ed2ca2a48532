"""Frame 0: what its schema depends on, and what is kept of schemas."""

import contextlib
import dataclasses
import gc
import random
import re
import subprocess
import sys
import tracemalloc

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from jagcodec import WireFormatError, decode, encode, open_wire, register_type
from jagcodec.wire import header as headers
from jagcodec.wire import schema as schemas
from tests.helpers import make_batch, rollout
from tests.helpers import message as bytes_of
from tests.oracle import assert_same
from tests.wire.forge import (
    damaged,
    header,
    list_of,
    map_of,
    message,
    node,
    packed,
    record,
    tensor,
)
from tests.wire.readers import outcome, refused


def schema_of(frames):
    return msgpack.unpackb(bytes(frames[0]))["schema"].data


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"step": 1, "x": torch.ones(2)}, {"step": 10**30, "x": torch.ones(70_000)}),
        ([torch.eye(3).to_sparse()], [torch.zeros(5, 9).to_sparse()]),
        ([np.ones((2, 3)), b"x" * 5000], [np.ones((0, 9)), b"y" * 90_000]),
        ((1, 2.0, torch.ones(1)), ({"a": "b"}, None, torch.zeros(0))),
        (make_batch(), make_batch(lengths=[9, 3, 0])),
    ],
)
def test_values_of_the_same_kinds_have_the_same_schema(one, two):
    same = schema_of(encode(one))
    assert same == schema_of(encode(two))
    assert same == schema_of(encode(two, narrow=True, checksum=True))


# --- what is kept of schemas -------------------------------------------------------------------


@contextlib.contextmanager
def fresh_tables():
    """Tables of schemas that nothing is in yet, in place of the process's own."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (schemas, headers):
            patch.setattr(module, "_known", {})
        patch.setattr(headers, "_starts", {})
        yield schemas._known


def named(i, width=40):
    """A message of a schema of its own."""
    return message(map_of({f"{i:0{width}}": tensor()}), b"x")


def said(found):
    """What an error says, without the names that torch gives ragged dims in turn."""
    if isinstance(found, WireFormatError):
        return found.reason, found.path, re.sub(r"\bj\d+", "j", found.detail)
    return [bytes(memoryview(frame)) for frame in encode(found)]


@given(st.integers(0))
def test_a_schema_that_is_known_changes_no_verdict(seed):
    frames = damaged(bytes_of(encode(rollout())), random.Random(seed))
    with fresh_tables():
        assert said(outcome(decode, frames)) == said(outcome(decode, frames))


@pytest.mark.parametrize("other", [True, 1.0])
def test_what_is_equal_in_python_is_not_equal_in_a_schema(other):
    """1, 1.0 and true are one dict key in Python; here only one of them is a number."""
    good, bad = (message(node("ARRAY", "|u1", rank, numbers=[0, 0, 0])) for rank in (1, other))
    with fresh_tables():
        for _ in range(2):
            decode(good)
            refused(decode, bad)
        members = [TensorDict({"a": torch.ones(1)}, [1]) for _ in range(2)]
        for dim in (True, 1):
            stack = LazyStackedTensorDict(*members, stack_dim=dim)
            assert decode(encode(stack)).batch_size == (1, 2)


no_bytes, no_cells = node("BYTES", numbers=[0, 0, 0]), tensor(shape=[0])


# What a stranger sends or an application writes: enough for twice the bound.
@pytest.mark.parametrize(
    ("count", "call"),
    [
        (schemas.MOST_SCHEMAS + 40, lambda i: decode(named(i))),
        (150, lambda i: decode(message(list_of(*[no_bytes] * (500 + i))))),
        (150, lambda i: decode(message(map_of({f"{i}.{k}": no_cells for k in range(90)})))),
        (150, lambda i: encode({f"{i:01500}": torch.ones(1)})),
    ],
)
def test_ever_new_schemas_take_no_more_than_the_bound(count, call):
    with fresh_tables() as table:
        kept = kept_by(call, count)
        assert 0 < max(len(table), len(headers._known)) <= schemas.MOST_SCHEMAS
    assert kept < schemas.MOST_SCHEMAS * schemas.LARGEST_KEPT + 500_000


def kept_by(call, count):
    """Memory that is still taken after calls with 0, 1 and so on."""
    call(0)
    tracemalloc.start()
    try:
        for i in range(1, count):
            call(i)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_which_schemas_are_kept():
    """The newest; neither a huge one nor one that was refused."""
    value = {"a" * schemas.LARGEST_KEPT: torch.ones(1)}
    with fresh_tables() as table:
        for i in range(schemas.MOST_SCHEMAS + 1):
            decode(named(i))
        kept = [packed(map_of({f"{i:040}": tensor()}).schema) for i in range(3)]
        assert [schema in table for schema in kept] == [False, True, True]
    with fresh_tables() as table:
        assert_same(decode(encode(value)), value)
        for schema in ([99], [48, "float33", 1], [48], b"\xc1", [26, [26, [26, [99]]]]):
            refused(decode, message(1, schema=schema))
        assert len(table) == len(headers._known) == 0


def test_threads_share_the_table(in_threads):
    messages = [bytes_of(encode(rollout())), *(named(i) for i in range(300)), [header(7)]]
    expected = [decode(frames) for frames in messages]

    def work(seed):
        order = np.random.default_rng(seed).permutation(len(messages))
        for i in [*order, *order]:
            assert_same(decode(messages[i]), expected[i])
            assert_same(decode(encode(expected[i], narrow=bool(i % 2))), expected[i])
            assert i or open_wire(messages[0]).rows([1])["reward"].equal(expected[0]["reward"][1:2])

    with fresh_tables() as table:
        in_threads(6, work, *((seed,) for seed in range(6)))
        assert len(table) <= schemas.MOST_SCHEMAS


FORKED = """
import itertools, os, signal, sys, threading
from jagcodec import decode
from tests.wire.forge import map_of, message, tensor

sys.setswitchinterval(1e-6)
made = [message(map_of({f"{i:020}": tensor()}), b"x") for i in range(2100)]
running, statuses = True, []

def decode_new_schemas():
    for frames in itertools.cycle(made[:2000]):
        if not running:
            return
        decode(frames)

threads = [threading.Thread(target=decode_new_schemas) for _ in range(2)]
for thread in threads:
    thread.start()
for i in range(30):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for a lock, which its parent sees
        decode(made[2000 + i])
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
running = False
print(statuses)
"""


def test_a_child_reads_new_schemas_whatever_its_parent_did_when_it_forked():
    run = [sys.executable, "-c", FORKED]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, str([0] * 30)), done.stderr


@dataclasses.dataclass
class Late:
    """A type that is registered only in the middle of a test."""

    x: torch.Tensor


def test_what_is_kept_does_not_depend_on_who_reads():
    """Neither on what is registered, nor on pickle, nor on a device."""
    frames = message(node("USER", "test_header.Late", children=[map_of({"x": tensor()})]), b"\7")
    with fresh_tables():
        assert refused(decode, frames).reason == refused(decode, frames).reason == "unknown_type"
        register_type(Late, name="test_header.Late")
        assert decode(frames).x.tolist() == [7]
        pickled = message(list_of(record("PICKLE", b"\x80\x04K\x01."), tensor()), b"\7")
        for _ in range(2):
            assert decode(pickled, allow_pickle=True)[0] == 1
            assert outcome(decode, pickled).reason == "pickle_refused"
