"""torch.distributed: real processes over gloo, and what happens when a rank does not play along."""

import os
import re
import signal
import struct
import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jagcodec
from jagcodec import BatchedDataDict, Limits, WireFormatError, encode, materialize, split_rows
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, TransportError
from jagcodec.integrations import torch_distributed as td_module
from jagcodec.integrations.torch_distributed import all_gather_rows, broadcast
from jagcodec.memory.blocks import new_block
from jagcodec.testing import jagged_batches
from jagcodec.wire.spec import MAGIC, VERSION
from tests.helpers import make_batch
from tests.integrations.conftest import process
from tests.oracle import assert_same
from tests.strategies import trees

LONG = 120  # seconds, for what must come
RANKS = 3
WORKS = [broadcast, all_gather_rows]


def serve(pipe, rank, ranks, path, backend):
    """A rank: does what it is told, until it is told nothing more."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = {"init_method": f"file://{path}", "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, **where, timeout=timedelta(seconds=60))
    while True:
        work, arguments = pipe.recv()
        try:
            pipe.send(work(rank, *arguments))
        except Exception as error:
            pipe.send(error)


class World:
    """Ranks in processes of their own, and the pipes to them."""

    def __init__(self, pipes):
        self._pipes = pipes

    def outcomes(self, work, *arguments):
        """What `work(rank, *arguments)` returned or raised on each rank; None if the rank died."""
        for pipe in self._pipes:
            pipe.send((work, arguments))
        found = []
        for pipe in self._pipes:
            assert pipe.poll(LONG), "a rank hangs"
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append(None)
        return found

    def call(self, work, values, through=None, **options):
        """What a function returned or raised on each rank; lists are of one thing per rank."""
        call = through or do_call
        found = self.outcomes(call, work, [packed(value) for value in values], options)
        return [unpacked(each) if isinstance(each, bytes) else each for each in found]


@contextmanager
def started(directory, ranks, backend="gloo"):
    with ExitStack() as stack:
        sides = [process(serve, rank, ranks, directory / "store", backend) for rank in range(ranks)]
        yield World([stack.enter_context(side)[1] for side in sides])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with started(tmp_path_factory.mktemp("store"), RANKS) as world:
        yield world


def packed(value):
    """A value on its way through the pipe to a rank: without torch's shared memory."""
    return bytes(jagcodec.to_blob(encode(value, allow_pickle=True)))


def unpacked(data):
    return jagcodec.decode(data, copy=True, allow_pickle=True)


def do_call(rank, work, values, options):
    value = unpacked(values[rank])
    options = {name: x[rank] if type(x) is list else x for name, x in options.items()}
    work = work[rank] if type(work) is list else work
    found = work(value, **options)
    assert work is not broadcast or value is None or found is value
    return packed(found)


def alone(value, src):
    """The arguments of a `broadcast` from this rank."""
    return {"values": [value if rank == src else None for rank in range(RANKS)], "src": src}


def arguments(work, values, src):
    """Those of a call in which each rank sends its value, or only `src` does."""
    return alone(values[src], src) if work is broadcast else {"values": values}


def refused(outcomes, world, *kinds):
    """The errors of all ranks, after which the group can be used."""
    assert [type(outcome) for outcome in outcomes] == [*kinds], outcomes
    assert_usable(world)
    return outcomes


def assert_usable(world):
    assert world.call(broadcast, **alone("still here", 0)) == ["still here"] * RANKS


LARGER_THAN_SOCKET_BUFFERS = {"x": torch.arange(3_000_000), "b": bytes(100_000)}


@settings(max_examples=30)
@given(value=trees(), src=st.integers(0, RANKS - 1))
@example(value=LARGER_THAN_SOCKET_BUFFERS, src=np.int64(1))
def test_every_rank_gets_the_value(world, value, src):
    for found in world.call(broadcast, **alone(value, src)):
        assert_same(found, value)


def do_send_an_open_message(rank):
    opened = jagcodec.open_wire(encode(make_batch()))
    found = broadcast(opened if rank == 0 else None, 0)
    assert_same(found if rank else found.to_tensordict(), make_batch())
    whole = all_gather_rows(opened.rows([rank]))
    assert_same(whole, jagcodec.concat_rows(split_rows(make_batch(), 6)[:RANKS]))


def do_say_where_tensors_go(rank):
    batch = make_batch()
    with torch.device("meta"):  # a default device changes nothing
        found = broadcast(batch if rank == 0 else None, 0, device="meta" if rank else "cpu")
        whole = all_gather_rows({"x": torch.ones(1, device="cpu")})
    assert_same(whole, {"x": torch.ones(RANKS)})
    found = [found[name].device for name in ("ids", "reward")]
    assert_same(found, [torch.device("meta" if rank else "cpu")] * 2)


def do_one_transfer_without_padding(rank):
    ids = jagcodec.stack_or_nest([torch.arange(1)] * 63 + [torch.arange(5000)])
    batch = {"ids": ids, "logprobs": -ids}
    with patch.object(dist, "broadcast", side_effect=dist.broadcast) as sent:
        broadcast(batch if rank == 0 else None, 0)
    sizes = [call.args[0].nbytes for call in sent.call_args_list]
    assert_same(sizes, [len(packed(batch))])


def do_name_a_global_rank_of_a_group(rank):
    group = dist.new_group([1, 2], timeout=timedelta(seconds=60))
    if rank == 0:
        with pytest.raises(ArgumentError, match=r"^broadcast\(group\): .* without rank 0"):
            broadcast(None, 1, group)
        return
    assert_same(broadcast([1, 2] if rank == 2 else None, 2, group), [1, 2])
    assert_same(all_gather_rows({"x": [rank] * rank}, group), {"x": [1, 2, 2]})
    with pytest.raises(ArgumentError, match=r"one of \[1, 2\], found 0"):
        broadcast(None, 0, group)


WHAT_RANKS_DO = [do_send_an_open_message, do_say_where_tensors_go]
WHAT_RANKS_DO += [do_one_transfer_without_padding, do_name_a_global_rank_of_a_group]


@pytest.mark.parametrize("work", WHAT_RANKS_DO)
def test_every_rank_finds_what_it_expects(world, work):
    assert world.outcomes(work) == [None] * RANKS
    assert_usable(world)


@settings(max_examples=25)
@given(batch=jagged_batches(max_rows=7))
def test_parts_of_all_kinds_of_columns_come_together_again(world, batch):
    td = jagcodec.pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    for sent in (td, BatchedDataDict(materialize(td, layout="jagged"), meta_info={"step": 7})):
        for whole in world.call(all_gather_rows, split_rows(sent, RANKS)):
            assert type(whole) is type(sent)
            assert_same(whole, sent)


def test_pickles_and_replacements_travel_only_if_both_sides_say_so(world):
    value = {"kind": [threading.Thread]}
    sent = alone(value, 0)
    assert world.call(broadcast, **sent, allow_pickle=True) == [value] * RANKS
    _, error, accepted = world.call(broadcast, **sent, allow_pickle=[True, False, True])
    assert (error.reason, error.path[:17]) == ("pickle_refused", "broadcast, rank 0")
    assert accepted == value
    found = world.call(all_gather_rows, [value] * RANKS, default=repr)
    assert found == [{"kind": [repr(threading.Thread)] * RANKS}] * RANKS


@pytest.mark.parametrize("call", [lambda: broadcast(1, 0), lambda: all_gather_rows({})])
def test_without_a_process_group(call):
    with pytest.raises(ArgumentError, match="init_process_group"):
        call()


ROWS, THREADS = {"x": [1]}, {"x": [threading.Thread]}
ON_ALL, OF_A_PEER = [ArgumentError] * RANKS, [TransportError, ArgumentError, TransportError]
OF_A_TYPE = [ArgumentTypeError] * RANKS
OF_A_VALUE = [TransportError, jagcodec.UnsupportedTypeError, TransportError]
SRC = r"'broadcast\(src\)'"
REFUSED = [
    *((broadcast, {**alone(1, 0), "src": x}, ON_ALL, SRC) for x in (9, -1, True, 0.0, None)),
    (broadcast, {**alone(1, 0), "group": "no group"}, OF_A_TYPE, r"'broadcast\(group\)'"),
    (broadcast, {**alone(1, 0), "limits": 0}, OF_A_TYPE, r"broadcast\(limits\)'"),
    (all_gather_rows, {"values": ["text", ROWS, ROWS]}, OF_A_TYPE, ""),
    (all_gather_rows, {"values": [ROWS | {"y": [2]}, ROWS, ROWS]}, [ArgumentKeyError] * RANKS, ""),
    # Of one rank, whose error reaches all.
    (broadcast, {**alone(1, 0), "device": [None, "nowhere", None]}, OF_A_PEER, "device"),
    (
        *(broadcast, {"values": [{"from": 0}, {"from": 1}, None], "src": 0}, OF_A_PEER),
        "'(conflict|peer_failed)'.*expected None on every rank but src=0, found dict on rank 1",
    ),
    *(
        (work, arguments(work, [ROWS, THREADS, ROWS], 1), OF_A_VALUE, r"\$\.x\[0\]'?[:,] ")
        for work in WORKS
    ),
]


@pytest.mark.parametrize(("work", "call", "kinds", "said"), REFUSED)
def test_what_is_refused_on_one_rank_is_an_error_on_every_one(world, work, call, kinds, said):
    for error in refused(world.call(work, **call), world, *kinds):
        assert re.search(said, repr(error))
        if type(error) is TransportError:
            assert (error.reason, error.path) == ("peer_failed", f"{work.__name__}, rank 1")


@pytest.mark.parametrize("calls", [[0, 1, 0], [0, 0, None], [None, 1, 2]])
def test_calls_that_differ_are_refused_on_every_rank(world, calls):
    """A `broadcast` from some rank, or `all_gather_rows`."""
    works = [all_gather_rows if src is None else partial(broadcast, src=src) for src in calls]
    batch = {"x": [1]}
    values = [batch if src in (None, rank) else None for rank, src in enumerate(calls)]
    for error in refused(world.call(works, values), world, *[ArgumentError] * RANKS):
        assert error.reason == "conflict"
        for rank, src in enumerate(calls):
            call = "all_gather_rows()" if src is None else f"broadcast(src={src})"
            assert f"{call} on rank {rank}" in error.detail


def do_no_memory(rank, work, values, options):
    def scarce(size):
        if size > 8_000_000 and rank == 2:
            raise MemoryError("no 8 MB left")
        return new_block(size)

    with patch.object(td_module, "new_block", scarce):
        return do_call(rank, work, values, options)


@pytest.mark.parametrize("work", WORKS)
def test_every_rank_learns_that_one_has_no_memory(world, work):
    x = torch.zeros(1_000_000, dtype=torch.float64)
    sent = arguments(work, [{"x": x[:0]}, {"x": x}, {"x": x[:0]}], 1)
    errors = world.call(work, **sent, through=do_no_memory)
    for error in refused(errors, world, *[TransportError] * RANKS):
        assert error.reason == "peer_failed"
        assert "no 8 MB left" in error.detail
    # The rank without memory names the one that sends what does not fit.
    assert [error.path[-6:] for error in errors] == ["rank 2", "rank 2", "rank 1"]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("limits", [Limits(bytes=100), Limits(header=100)], ids=str)
def test_receivers_set_limits(world, work, limits):
    batch = {"x" * 100: torch.arange(300)}
    sender, *receivers = world.call(work, **arguments(work, [batch] * RANKS, 0), limits=limits)
    for error in receivers:
        assert isinstance(error, WireFormatError)
        assert (error.reason, error.path) == ("too_large", f"{work.__name__}, rank 0: header")
    assert "at most 100 bytes" in str(sender)  # the sender learns it too
    assert_usable(world)


def do_stay_away(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    return broadcast("hello", 0, group) if rank == 0 else None


def test_a_rank_that_does_not_take_part_ends_in_a_time_out(world):
    error, *_ = world.outcomes(do_stay_away)
    assert type(error) is jagcodec.errors.TransportTimeoutError
    assert (error.reason, error.path) == ("timed_out", "broadcast")
    assert_usable(world)


def do_die(rank, victim, step):
    """Killed when it takes part, or when all have agreed and nothing of the message is sent."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=10))
    value = {"x": torch.arange(4_000_000)}  # more than socket buffers hold
    if rank == victim:
        setattr(td_module._Exchange, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return broadcast(value if rank == 0 else None, 0, group)


@pytest.mark.parametrize(
    ("victim", "step", "waiting"),
    [(1, "_agree", [0, 2]), (0, "_broadcast", [1, 2]), (1, "_broadcast", [0])],
)
def test_a_rank_that_is_killed_is_an_error_where_it_is_awaited(tmp_path, victim, step, waiting):
    with started(tmp_path, RANKS) as world:
        outcomes = world.outcomes(do_die, victim, step)
    assert outcomes[victim] is None
    for rank in waiting:
        error = outcomes[rank]
        assert isinstance(error, TransportError), error
        assert error.reason in ("no_peer", "timed_out")
        assert error.path == "broadcast"
        assert "make the group anew" in error.detail


LARGE = packed(torch.zeros(40_000))
AT = LARGE.index(MAGIC.encode(), 8) + len(MAGIC)  # of the version
NEWER, Q = bytes([VERSION + 1]), struct.Struct("<q")
FORGED = {
    "nothing": (b"", "foreign"),
    "a blob that is cut": (LARGE[:-1], "frame_size"),
    "something else": (b"hello", "foreign"),
    "2**50 bytes": (LARGE.replace(*map(Q.pack, (160_000, 1 << 50))), "too_large"),
    "a later version": (LARGE[:AT] + NEWER + LARGE[AT + 1 :], "unknown_version"),
}


def do_forge(rank, blob):
    """Rank 0, the only one that encodes, sends this instead of its message."""
    forged = torch.tensor(list(blob), dtype=torch.uint8)
    with patch.object(td_module._Exchange, "encoded", lambda *_: forged):
        return broadcast(1 if rank == 0 else None, 0)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_message_is_an_error_that_names_its_sender(world, name):
    blob, reason = FORGED[name]
    for error in refused(world.outcomes(do_forge, blob), world, *[WireFormatError] * RANKS):
        assert error.reason == reason
        assert error.path.startswith("broadcast, rank 0: ")


def do_forge_numbers(place, number, rank, *call):
    """Rank 1 announces another number, where ranks agree on what is to come."""

    def forged(self, row, exchanged=td_module._Exchange._exchanged):
        start = 8 * place
        forged = row[:start] + Q.pack(number) + row[start + 8 :]
        return exchanged(self, forged if rank == 1 else row)

    with patch.object(td_module._Exchange, "_exchanged", forged):
        return do_call(rank, *call)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(("place", "number"), [(0, 2), (0, -1), (2, -1), (3, -1), (2, 1 << 55)])
def test_forged_numbers_are_an_error_on_every_rank(world, place, number, work):
    """And no memory is allocated for a size of 2**55."""
    sent = arguments(work, [{"x": [rank]} for rank in range(RANKS)], 1)
    outcomes = world.call(work, **sent, through=partial(do_forge_numbers, place, number))
    for error in outcomes:
        assert isinstance(error, (TransportError, WireFormatError)), error
        if number == 1 << 55:
            assert f"found {number}" in error.detail
        else:
            assert (error.reason, error.path) == ("peer_failed", f"{work.__name__}, rank 1")
    assert_usable(world)


def do_nccl(rank):
    batch = make_batch()
    found = broadcast(batch.to("cuda") if rank == 0 else None, 0, device="cpu")
    whole = all_gather_rows(split_rows(found, dist.get_world_size())[rank], device="cuda")
    assert whole["ids"].device == torch.device("cuda", rank)
    for each in (found, whole):
        assert_same(each, batch)


def do_messages_on_the_device(rank):
    """As over NCCL, which refuses two ranks on one GPU; gloo takes tensors of the GPU, too."""
    batch = make_batch()
    with patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        found = broadcast(batch if rank == 0 else None, 0)
        there = broadcast(batch if rank == 0 else None, 0, device="cuda")
        whole = all_gather_rows(split_rows(found, dist.get_world_size())[rank], device="cuda")
    assert whole["ids"].device == there["ids"].device == torch.device("cuda", 0)
    for each in (found, there, whole):
        assert_same(each, batch)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_messages_go_through_the_device_of_the_group(tmp_path):
    with started(tmp_path, 2, "gloo") as world:
        assert not any(world.outcomes(do_messages_on_the_device))


@pytest.mark.cuda
@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs CUDA and NCCL"
)
def test_nccl_carries_messages(tmp_path):
    with started(tmp_path, min(2, torch.cuda.device_count()), "nccl") as world:
        assert not any(world.outcomes(do_nccl))
