"""torch.distributed: real processes over gloo, and what happens when a rank does not play along."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    Limits,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    materialize,
    open_wire,
    pack_jagged_fields,
    select_rows,
    stack_or_nest,
    to_blob,
)
from jagcodec.errors import (
    ArgumentKeyError,
    ArgumentTypeError,
    TransportError,
    TransportTimeoutError,
)
from jagcodec.integrations import torch_distributed as td_module
from jagcodec.integrations._rank_message import read_meta
from jagcodec.integrations.torch_distributed import (
    all_gather_rows,
    broadcast,
    recv,
    scatter_rows,
    send,
)
from jagcodec.memory import blocks
from jagcodec.testing import jagged_batches
from jagcodec.wire.decoder import decode_resident
from jagcodec.wire.encoder import encode_resident
from jagcodec.wire.spec import MAGIC, VERSION
from tests.device import DEVICE, on_device, watch
from tests.helpers import ROOT, message
from tests.oracle import assert_same, rows_of
from tests.strategies import trees

LONG = 120  # seconds, for what must come
RANKS = 3

# --- processes ---------------------------------------------------------------------------------


def serve(pipe, rank, ranks, path, backend):
    """A rank: runs what it is told to, until it is told nothing more."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    while (order := pipe.recv()) is not None:
        work, arguments = order
        try:
            pipe.send((True, work(rank, *arguments)))
        except Exception as error:
            pipe.send((False, error))
    dist.destroy_process_group()


class World:
    """Ranks in processes of their own."""

    def __init__(self, directory, ranks, backend="gloo"):
        # New processes come from one that has imported torch and done nothing with it.
        server = get_context("forkserver")
        server.set_forkserver_preload(["jagcodec.integrations.torch_distributed"])
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            pipe, far_end = server.Pipe()
            arguments = (far_end, rank, ranks, directory / "store", backend)
            process = server.Process(target=serve, args=arguments, daemon=True)
            process.start()
            far_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def outcomes(self, work, *arguments):
        """What `work(rank, *arguments)` returned or raised on each rank; None if the rank died."""
        for pipe in self._pipes:
            pipe.send((work, arguments))
        found = []
        for pipe in self._pipes:
            assert pipe.poll(LONG), "a rank hangs"
            try:
                found.append(pipe.recv()[1])
            except EOFError:
                found.append(None)
        return found

    def __call__(self, work, *arguments):
        """What it returned on each rank, none of which raised."""
        found = self.outcomes(work, *arguments)
        for outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
        return found

    def end(self):
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            process.close()
            pipe.close()


@contextmanager
def started(directory, ranks, backend="gloo"):
    world = World(directory, ranks, backend)
    try:
        yield world
    finally:
        world.end()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with started(tmp_path_factory.mktemp("store"), RANKS) as world:
        yield world


def packed(value):
    """A value on its way through the pipe to a rank: without torch's shared memory."""
    return bytes(to_blob(encode(value)))


def unpacked(data):
    return decode(data, copy=True)


def assert_all_raise(outcomes, kinds):
    assert [type(outcome) for outcome in outcomes] == kinds, outcomes


# --- broadcast ---------------------------------------------------------------------------------


def do_broadcast(rank, src, data, options=()):
    value = unpacked(data) if rank == src else None
    found = broadcast(value, src, **dict(options))
    if rank == src and not options:
        assert found is value
    return packed(found)


@settings(max_examples=30)
@given(value=trees(), src=st.integers(0, RANKS - 1))
def test_every_rank_gets_the_value(world, value, src):
    for data in world(do_broadcast, src, packed(value)):
        assert_same(unpacked(data), value)


def batch_of(*lengths, first=0):
    """A batch of every kind of column, row i telling that it is row ``first + i``."""
    rows = torch.arange(first, first + len(lengths))
    messages = np.empty(len(lengths), dtype=object)
    for i, row in enumerate(rows.tolist()):
        messages[i] = {"row": row, "tags": ("a", None)}
    ids = 100 * rows[:, None] + torch.arange(max(lengths, default=0))
    fields = {"ids": ids, "logprobs": -ids.float(), "reward": rows.double(), "message": messages}
    return pack_jagged_fields(
        fields,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        token_aligned_fields=["ids", "logprobs"],
    )


def listed(batch):
    """The rows of such a batch, in plain lists."""
    columns = materialize(batch)  # for the objects alone
    rows = zip(rows_of(batch["ids"]), batch["reward"].tolist(), columns["message"], strict=True)
    return [{"ids": ids, "reward": reward, "message": message} for ids, reward, message in rows]


def test_a_broadcast_batch_keeps_objects_and_shared_rows(world):
    for data in world(do_broadcast, 1, packed(batch_of(3, 0, 5))):
        batch = unpacked(data)
        assert torch.equal((batch["ids"] + batch["logprobs"]).values(), torch.zeros(8))
        assert batch.get("message").tolist()[2] == {"row": 2, "tags": ("a", None)}


def do_broadcast_open_message(rank):
    found = broadcast(open_wire(encode(batch_of(2, 1))) if rank == 0 else None, 0)
    return packed(found.to_tensordict() if rank == 0 else found)


def test_an_open_message_is_read_and_sent(world):
    for data in world(do_broadcast_open_message):
        assert_same(unpacked(data), batch_of(2, 1))


def do_devices(rank):
    found = broadcast(batch_of(2, 3) if rank == 0 else None, 0, device="meta" if rank else None)
    return [str(found[name].device) for name in ("ids", "reward")]


def test_each_rank_says_where_tensors_go(world):
    assert world(do_devices) == [["cpu"] * 2, ["meta"] * 2, ["meta"] * 2]


def do_count(rank):
    """Bytes and calls of `broadcast` collectives, beside those of the message."""
    counted = []
    original = dist.broadcast

    def counting(tensor, *arguments, **options):
        counted.append(tensor.numel() * tensor.itemsize)
        return original(tensor, *arguments, **options)

    batch = batch_of(*[1] * 63, 5000)
    dist.broadcast = counting
    try:
        broadcast(batch if rank == 0 else None, 0)
    finally:
        dist.broadcast = original
    return sum(counted), len(counted), [len(memoryview(frame)) for frame in encode(batch)]


def test_nothing_is_padded_and_transfers_are_few(world):
    for total, calls, frames in world(do_count):
        assert sum(frames) <= total <= sum(frames) + 64
        assert calls == len(frames) <= 5
        # 63 rows of one token and one of 5000: as a rectangle, 40 times as much.
        assert total < 2 * 12 * 5063


# --- rows --------------------------------------------------------------------------------------


def do_scatter_and_gather(rank, src, data):
    part = scatter_rows(unpacked(data) if rank == src else None, src)
    return packed(part), packed(all_gather_rows(part))


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 6), max_size=8), src=st.integers(0, RANKS - 1))
def test_rows_are_shared_out_in_order_and_come_together_again(world, lengths, src):
    batch = batch_of(*lengths)
    outcomes = world(do_scatter_and_gather, src, packed(batch))
    parts = [listed(unpacked(part)) for part, _ in outcomes]
    sizes = [len(part) for part in parts]
    assert [row for part in parts for row in part] == listed(batch)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for _, whole in outcomes:
        assert_same(unpacked(whole), batch)


@settings(max_examples=15)
@given(batch=jagged_batches(max_rows=7))
def test_all_kinds_of_columns_are_shared_out(world, batch):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    for _, whole in world(do_scatter_and_gather, 0, packed(td)):
        assert_same(unpacked(whole), td)


def do_gather(rank, counts):
    first = sum(counts[:rank])
    batch = batch_of(*range(1, counts[rank] + 1), first=first)
    whole = all_gather_rows(open_wire(encode(batch)) if rank == 1 else batch)
    assert (whole["ids"] + whole["logprobs"]).values().abs().sum() == 0
    return packed(whole)


@pytest.mark.parametrize("counts", [(2, 3, 1), (0, 2, 0), (0, 0, 0)])
def test_rows_of_all_ranks_in_rank_order(world, counts):
    for data in world(do_gather, counts):
        rows = listed(unpacked(data))
        assert [row["reward"] for row in rows] == list(range(sum(counts)))
        assert [row["message"]["row"] for row in rows] == list(range(sum(counts)))
        expected = [n for count in counts for n in range(1, count + 1)]
        assert [len(row["ids"]) for row in rows] == expected


def do_dicts(rank):
    x = stack_or_nest([torch.full((n,), n) for n in (1, 4, 2, 3)])
    columns = {"x": x, "name": ["a", "b", "c", "d"], "id": np.arange(4)}
    batch = BatchedDataDict(columns, meta_info={"step": 7}) if rank == 2 else None
    part = scatter_rows(batch, 2)
    assert type(part) is BatchedDataDict
    assert part.meta_info == {"step": 7}
    whole = all_gather_rows(part)
    return part["name"], [row.tolist() for row in whole["x"].unbind()], whole["id"].tolist()


def test_dicts_of_columns_are_shared_out(world):
    outcomes = world(do_dicts)
    assert [part for part, _, _ in outcomes] == [["a", "b"], ["c"], ["d"]]
    for _, rows, numbers in outcomes:
        assert rows == [[1], [4] * 4, [2] * 2, [3] * 3]
        assert numbers == [0, 1, 2, 3]


# --- from one rank to another ------------------------------------------------------------------


def do_send(rank, data):
    if rank == 0:
        value = unpacked(data)
        for dst in (2, 1):
            send(value, dst)
            send({"to": dst}, dst)
        return None
    value = recv(0)
    assert recv(0, device="cpu") == {"to": rank}
    return packed(value)


@settings(max_examples=15)
@given(value=trees())
def test_one_rank_sends_to_another(world, value):
    nothing, *found = world(do_send, packed(value))
    assert nothing is None
    for data in found:
        assert_same(unpacked(data), value)


def do_large(rank):
    value = {"x": torch.arange(3_000_000), "b": bytes(100_000)}
    if rank == 1:
        send(value, 0)
    return rank != 0 or packed(recv(1)) == packed(value)


def test_messages_larger_than_socket_buffers(world):
    assert world(do_large) == [True] * RANKS


# --- groups ------------------------------------------------------------------------------------


def do_group(rank):
    group = dist.new_group([1, 2], timeout=timedelta(seconds=60))
    if rank == 0:
        with pytest.raises(ArgumentError, match=r"^broadcast\(group\): .* without rank 0"):
            broadcast(None, 1, group)
        return None
    batch = batch_of(1, 2, 3) if rank == 2 else None
    found = broadcast(batch, 2, group)
    part = scatter_rows(batch, 2, group)
    whole = all_gather_rows(part, group)
    with pytest.raises(ArgumentError, match=r"one of \[1, 2\], found 0"):
        broadcast(batch, 0, group)
    if rank == 2:
        send(part, 1, group)
        other = part
    else:
        other = recv(2, group)
    return [len(listed(one)) for one in (found, part, whole, other)]


def test_src_is_a_global_rank_of_the_group(world):
    assert world(do_group) == [None, [3, 2, 3, 1], [3, 1, 3, 1]]


# --- what goes wrong ---------------------------------------------------------------------------


def is_well(world):
    """Ranks that raised together can go on together."""
    for data in world(do_broadcast, 0, packed("still here")):
        assert unpacked(data) == "still here"


def do_fail(rank, work):
    value = {"extra": [1, threading.Lock()]}
    if work == "broadcast":
        return broadcast(value if rank == 1 else None, 1)
    if work == "scatter_rows":
        rows = {"x": [1, 2, threading.Lock()]}
        return scatter_rows(rows if rank == 1 else None, 1)
    rows = {"x": [threading.Lock()]} if rank == 1 else {"x": [1]}
    return all_gather_rows(rows)


@pytest.mark.parametrize("work", ["broadcast", "scatter_rows", "all_gather_rows"])
def test_every_rank_learns_that_one_cannot_encode(world, work):
    outcomes = world.outcomes(do_fail, work)
    assert_all_raise(outcomes, [TransportError, UnsupportedTypeError, TransportError])
    for error in (outcomes[0], outcomes[2]):
        assert (error.reason, error.path) == ("peer_failed", f"{work}, rank 1")
        assert "UnsupportedTypeError: $." in error.detail
        assert "_thread.lock" in error.detail
    is_well(world)


def do_fail_to_send(rank):
    if rank == 0:
        send(threading.Lock(), 1)
    return recv(0) if rank == 1 else None


def test_a_receiver_learns_that_the_sender_failed(world):
    sender, receiver, _ = world.outcomes(do_fail_to_send)
    assert_all_raise([sender, receiver], [UnsupportedTypeError, TransportError])
    assert (receiver.reason, receiver.path) == ("peer_failed", "recv, rank 0")
    is_well(world)


def do_no_memory(rank, work):
    original = blocks.new_block

    def scarce(size):
        if size == 8_000_000:
            raise MemoryError("no 8 MB left")
        return original(size)

    if rank == 2:
        blocks.new_block = scarce
    try:
        x = torch.zeros(1_000_000 * (RANKS if work == "scatter_rows" else 1), dtype=torch.float64)
        if work == "all_gather_rows":
            return all_gather_rows({"x": x if rank == 1 else x[:0]})
        call = {"broadcast": broadcast, "scatter_rows": scatter_rows}[work]
        return call({"x": x} if rank == 1 else None, 1)
    finally:
        blocks.new_block = original


@pytest.mark.parametrize("work", ["broadcast", "scatter_rows", "all_gather_rows"])
def test_every_rank_learns_that_one_has_no_memory(world, work):
    outcomes = world.outcomes(do_no_memory, work)
    assert_all_raise(outcomes, [TransportError] * 3)
    for error in outcomes:
        assert error.reason == "peer_failed"
        assert "no 8 MB left" in error.detail
    for error in outcomes[:2]:
        assert error.path == f"{work}, rank 2"
    # It names the rank that sends what does not fit.
    assert outcomes[2].path == f"{work}, rank 1"
    is_well(world)


def do_with_default_device(rank):
    with torch.device("meta"):
        found = [broadcast({"x": torch.ones(2, device="cpu")} if rank == 0 else None, 0)]
        found.append(all_gather_rows({"x": torch.ones(2, device="cpu")}))
        if rank == 0:
            send(found[0], 1)
        if rank == 1:
            found.append(recv(0))
    return [one["x"].tolist() for one in found]


def test_a_default_device_changes_nothing(world):
    first, second, third = world(do_with_default_device)
    assert first == third == [[1, 1], [1] * 6]
    assert second == [[1, 1], [1] * 6, [1, 1]]


def do_differ(rank, calls):
    name, src = calls[rank]
    if name == "all_gather_rows":
        return all_gather_rows({"x": [1]})
    call = {"broadcast": broadcast, "scatter_rows": scatter_rows}[name]
    return call({"x": [1]} if rank == src else None, src)


@pytest.mark.parametrize(
    "calls",
    [
        [("broadcast", 0), ("broadcast", 1), ("broadcast", 0)],
        [("broadcast", 0), ("broadcast", 0), ("scatter_rows", 0)],
        [("all_gather_rows", 0), ("scatter_rows", 0), ("broadcast", 2)],
    ],
)
def test_calls_that_differ_are_refused_on_every_rank(world, calls):
    outcomes = world.outcomes(do_differ, calls)
    assert_all_raise(outcomes, [ArgumentError] * RANKS)
    for error in outcomes:
        assert error.reason == "conflict"
        for rank, (name, src) in enumerate(calls):
            assert f"{name}(src={src}) on rank {rank}" in error.detail
    is_well(world)


def do_two_sources(rank):
    return broadcast({"from": rank} if rank < 2 else None, 0)


def test_a_batch_on_another_rank_than_src_is_refused(world):
    outcomes = world.outcomes(do_two_sources)
    assert_all_raise(outcomes, [TransportError, ArgumentError, TransportError])
    assert outcomes[1].reason == "conflict"
    assert "expected None on every rank but src=0, found dict on rank 1" in outcomes[1].detail
    is_well(world)


def do_wrong_argument(rank, src, device):
    return broadcast(None, src, device=device if rank == 2 else None)


@pytest.mark.parametrize("src", [7, -1, True, None, "0", 0.0, 1 << 70])
def test_sources_that_are_no_rank(world, src):
    outcomes = world.outcomes(do_wrong_argument, src, None)
    assert_all_raise(outcomes, [ArgumentError] * RANKS)
    assert outcomes[0].path == "broadcast(src)"


def do_numpy_ranks(rank):
    """Ranks as they come out of arrays."""
    found = broadcast({"step": 3} if rank == 0 else None, np.int64(0))  # type: ignore[arg-type]
    if rank == 1:
        send({"to": 0}, np.int64(0))  # type: ignore[arg-type]
    return recv(np.int64(1)) if rank == 0 else found  # type: ignore[arg-type]


def test_ranks_may_be_integers_of_numpy(world):
    assert world(do_numpy_ranks) == [{"to": 0}, {"step": 3}, {"step": 3}]


def test_a_wrong_argument_on_one_rank_reaches_all(world):
    outcomes = world.outcomes(do_wrong_argument, 0, "nowhere")
    assert_all_raise(outcomes, [TransportError, TransportError, ArgumentError])
    is_well(world)


def do_rowless(rank, work):
    if work == "scatter_rows":
        return scatter_rows("text" if rank == 0 else None, 0)  # type: ignore[arg-type]
    return all_gather_rows("text" if rank == 0 else {"x": [1]})  # type: ignore[arg-type]


@pytest.mark.parametrize("work", ["scatter_rows", "all_gather_rows"])
def test_values_without_rows(world, work):
    first, *others = world.outcomes(do_rowless, work)
    assert isinstance(first, TypeError)
    assert_all_raise(others, [TransportError] * 2)
    is_well(world)


def do_differing_columns(rank):
    return all_gather_rows({"x": [1], **({"y": [2]} if rank else {})})


def test_columns_that_differ_are_refused_on_every_rank(world):
    assert_all_raise(world.outcomes(do_differing_columns), [ArgumentKeyError] * RANKS)
    is_well(world)


def do_peers(rank):
    for call, name in ((lambda peer: send(1, peer), "dst"), (recv, "src")):
        for peer in (rank, 9, None, True, float((rank + 1) % RANKS)):
            with pytest.raises(ArgumentError, match=rf"{name}\): expected the global rank"):
                call(peer)  # type: ignore[arg-type]


def test_peers_that_are_no_other_rank(world):
    world(do_peers)


def do_pickle(rank, allowed):
    value = {"kind": threading.Thread} if rank == 0 else None
    return broadcast(value, 0, allow_pickle=allowed[rank])


def test_pickles_travel_only_if_both_sides_say_so(world):
    assert world(do_pickle, [True] * 3) == [{"kind": threading.Thread}] * 3
    outcomes = world.outcomes(do_pickle, [False] * 3)
    assert_all_raise(outcomes, [UnsupportedTypeError, TransportError, TransportError])
    _, refused, accepted = world.outcomes(do_pickle, [True, False, True])
    assert isinstance(refused, WireFormatError)
    assert accepted == {"kind": threading.Thread}


def do_default(rank):
    return broadcast({"kind": slice} if rank == 0 else None, 0, default=repr)


def test_what_cannot_be_encoded_is_replaced(world):
    # On the sender it is the object that was passed.
    assert world(do_default)[1:] == [{"kind": repr(slice)}] * 2


def do_limits(rank, work):
    few = Limits(bytes=100)
    if work == "broadcast":
        return broadcast("x" * 200 if rank == 0 else None, 0, limits=few)
    if work == "recv":
        return send("x" * 200, 1) if rank == 0 else recv(0, limits=few) if rank == 1 else None
    batch = BatchedDataDict(x=torch.arange(300))
    if work == "scatter_rows":
        return scatter_rows(batch if rank == 0 else None, 0, limits=few)
    return all_gather_rows(batch, limits=few)


@pytest.mark.parametrize("work", ["broadcast", "recv", "scatter_rows", "all_gather_rows"])
def test_receivers_take_limits(world, work):
    for outcome in world.outcomes(do_limits, work)[1 : 2 if work == "recv" else 3]:
        assert isinstance(outcome, WireFormatError)
        assert outcome.reason == "too_large"
        assert outcome.path.startswith(f"{work}, rank 0: ")


def do_stay_away(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    return broadcast("hello", 0, group) if rank == 0 else None


def test_a_rank_that_does_not_take_part_ends_in_a_time_out(world):
    error, *_ = world.outcomes(do_stay_away)
    assert_all_raise([error], [TransportTimeoutError])
    assert (error.reason, error.path) == ("timed_out", "broadcast")
    is_well(world)


def do_stay_away_from_one(rank, work):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank == 0 and work == "send":
        return send(torch.zeros(5_000_000), 1, group)
    return recv(1, group) if rank == 0 else None


@pytest.mark.parametrize("work", ["send", "recv"])
def test_a_peer_that_does_not_take_part_ends_in_a_time_out(world, work):
    error, *_ = world.outcomes(do_stay_away_from_one, work)
    assert_all_raise([error], [TransportTimeoutError])
    assert (error.reason, error.path) == ("timed_out", work)
    is_well(world)


def do_die(rank, work):
    if rank == 1:
        os._exit(7)
    if work == "send":
        for _ in range(100):  # the first ones may still fit into the socket's buffers
            send(torch.zeros(5_000_000), 1)
    return {"broadcast": broadcast, "recv": lambda _, src: recv(src)}[work](None, 1)


@pytest.mark.parametrize("work", ["broadcast", "recv", "send"])
def test_a_rank_that_dies_is_an_error(tmp_path, work):
    with started(tmp_path, 2) as world:
        world(do_broadcast, 0, packed(1))
        error, died = world.outcomes(do_die, work)
        assert died is None
        assert isinstance(error, TransportError)
        assert error.path == work


def do_no_group(rank):
    with pytest.raises(ArgumentError, match=r"^broadcast\(group\): expected a process group"):
        broadcast(1, rank, "no group")  # type: ignore[arg-type]


def test_a_group_that_is_not_valid(world):
    world(do_no_group)


def do_die_in_mid_message(rank, work, victim):
    """The victim is killed when the header of a message is through, and its buffers are not."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=10))
    value = {"x": torch.arange(4_000_000)}  # more than socket buffers hold
    original = td_module._Line._broadcast_tensor, td_module._Line.receive_tensor

    def broadcast_tensor(line, place, size, data):
        came = original[0](line, place, size, data)
        os.kill(os.getpid(), signal.SIGKILL)
        return came

    def receive_tensor(line, src, size):
        came = original[1](line, src, size)
        if size > 16:  # the header, not what says how large it is
            os.kill(os.getpid(), signal.SIGKILL)
        return came

    def isend(*arguments, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        td_module._Line._broadcast_tensor = broadcast_tensor  # type: ignore[method-assign]
        td_module._Line.receive_tensor = receive_tensor  # type: ignore[method-assign]
        if work == "send":
            td_module.dist = SimpleNamespace(**{**vars(dist), "isend": isend})  # type: ignore[assignment, attr-defined]
    if work == "broadcast":
        return broadcast(value if rank == 0 else None, 0, group)
    if work == "scatter_rows":
        return scatter_rows(value if rank == 0 else None, 0, group)
    return send(value, 1, group) if rank == 0 else recv(0, group) if rank == 1 else None


@pytest.mark.parametrize(
    ("work", "victim", "waiting"),
    [
        ("broadcast", 0, [1, 2]),
        ("broadcast", 1, [0]),
        ("scatter_rows", 1, [0]),
        ("send", 0, [1]),
        ("send", 1, [0]),
    ],
)
def test_a_rank_killed_in_mid_message_is_an_error_where_it_is_awaited(
    tmp_path, work, victim, waiting
):
    with started(tmp_path, RANKS) as world:
        outcomes = world.outcomes(do_die_in_mid_message, work, victim)
    assert outcomes[victim] is None
    for rank in waiting:
        error = outcomes[rank]
        assert isinstance(error, TransportError), error
        assert error.reason in ("no_peer", "timed_out")
        assert error.path == {0: work, 1: "recv" if work == "send" else work}.get(rank, work)
        assert "make the group anew" in error.detail


def test_without_a_process_group():
    for call in (
        lambda: broadcast(1, 0),
        lambda: scatter_rows({}, 0),
        lambda: all_gather_rows({}),
        lambda: send(1, 0),
        lambda: recv(0),
    ):
        with pytest.raises(ArgumentError, match="init_process_group"):
            call()


def newer(frames):
    """A message as a later version of this library would write it."""
    header, *rest = frames
    header = bytearray(header)
    header[header.index(MAGIC.encode()) + len(MAGIC)] = VERSION + 1
    return [bytes(header), *rest]


def do_send_newer(rank, work, cells):
    """Rank 0 is ahead of the others, and what it sends does not fit into socket buffers."""
    original = td_module.encode  # type: ignore[attr-defined]
    value = {"x": torch.arange(cells)}
    if rank == 0:
        td_module.encode = lambda *arguments, **options: newer(original(*arguments, **options))  # type: ignore[attr-defined]
    try:
        if work == "broadcast":
            return broadcast(value if rank == 0 else None, 0) is value
        if work == "scatter_rows":
            return len(scatter_rows(value if rank == 0 else None, 0)["x"])
        return send(value, 1) if rank == 0 else recv(0) if rank == 1 else None
    finally:
        td_module.encode = original  # type: ignore[attr-defined]


@pytest.mark.parametrize("cells", [10, 2_000_000])
@pytest.mark.parametrize("work", ["broadcast", "scatter_rows", "send"])
def test_a_version_that_a_receiver_does_not_know_leaves_the_group_usable(world, work, cells):
    first, *others = world.outcomes(do_send_newer, work, cells)
    assert first == {"broadcast": True, "scatter_rows": -(-cells // RANKS), "send": None}[work]
    for error in others[:1] if work == "send" else others:
        assert isinstance(error, WireFormatError), error
        assert error.reason == "unknown_version"
        assert f"expected format version {VERSION}, found {VERSION + 1}" in error.detail
    is_well(world)
    if work == "send":  # what was sent is not found by the next call
        assert world(do_send, packed("next"))[1:] == [packed("next")] * 2


# --- a hostile rank ----------------------------------------------------------------------------

SIZE = struct.Struct("<Q")
WHOLE = encode(1)[0]  # a header without buffers
FORGED_METAS = {
    "nothing": b"",
    "a cut size": b"1234567",
    "a header that is longer than all": SIZE.pack(1 << 40),
    "a header of 2**64 - 1": SIZE.pack((1 << 64) - 1) + bytes(90),
    "half a size": SIZE.pack(len(WHOLE)) + bytes(WHOLE) + b"\0" + bytes(7),
    "2**50 bytes": SIZE.pack(len(WHOLE)) + bytes(WHOLE) + b"\0" + SIZE.pack(1 << 50),
    "2**64 - 1 bytes": SIZE.pack(len(WHOLE)) + bytes(WHOLE) + b"\0" + SIZE.pack((1 << 64) - 1),
    "2**64 bytes in two": SIZE.pack(len(WHOLE)) + bytes(WHOLE) + b"\0\0" + SIZE.pack(1 << 63) * 2,
    "another header": SIZE.pack(5) + b"hello",
}


def do_forge_meta(rank, work, meta):
    """Rank 0 sends this before the buffers of its message, of which there are none."""
    module: Any = td_module
    original = module.packed_meta
    if rank == 0:
        module.packed_meta = lambda *arguments: bytearray(meta)
    try:
        if work == "send":
            return send(1, 1) if rank == 0 else recv(0) if rank == 1 else None
        if work == "scatter_rows":
            return scatter_rows({"x": []} if rank == 0 else None, 0)
        return broadcast(1 if rank == 0 else None, 0)
    finally:
        module.packed_meta = original


@pytest.mark.parametrize("work", ["broadcast", "scatter_rows", "send"])
@pytest.mark.parametrize("name", FORGED_METAS)
def test_a_forged_meta_is_the_error_of_the_rank_that_sent_it(world, name, work):
    outcomes = world.outcomes(do_forge_meta, work, FORGED_METAS[name])
    for error in outcomes[1:2] if work == "send" else outcomes[1:]:
        assert isinstance(error, (TransportError, WireFormatError)), error
        path = {"send": "recv, rank 0"}.get(work, f"{work}, rank 0")
        assert error.path.startswith(path)
    is_well(world)


@given(st.binary(max_size=40) | st.binary(max_size=20).map(lambda data: SIZE.pack(9) + data))
def test_any_meta_is_read_or_refused(data):
    try:
        header, kept, sizes = read_meta(memoryview(data), "here")
    except WireFormatError:
        return
    assert len(kept) == len(sizes)
    flags = bytes(data[8 + len(header) : 8 + len(header) + len(kept)])
    assert kept == [flag != 0 for flag in flags]
    whole = SIZE.pack(len(header)) + header + flags + b"".join(map(SIZE.pack, sizes))
    assert whole == data


def do_forge_numbers(rank, work, place, number):
    """Rank 1 announces another number, where ranks agree on what is to come."""
    line: Any = td_module._Line
    original = line._exchanged
    if rank == 1:
        line._exchanged = lambda self, row: original(self, replaced(row, place, number))
    try:
        if work == "all_gather_rows":
            return all_gather_rows({"x": [rank]})
        return broadcast(1 if rank == 1 else None, 1)
    finally:
        line._exchanged = original


def replaced(row, place, number):
    # From place 3 on are the sizes of what it has for each rank.
    return [number if i == place or i > place == 3 else value for i, value in enumerate(row)]


@pytest.mark.parametrize("work", ["broadcast", "all_gather_rows"])
@pytest.mark.parametrize(
    ("place", "number"),
    [(0, 99), (0, -1), (2, -1), (2, 1 << 40), (3, -1), (3, -(1 << 63)), (3, 1 << 55)],
)
def test_forged_numbers_are_an_error_on_every_rank(world, place, number, work):
    outcomes = world.outcomes(do_forge_numbers, work, place, number)
    assert_all_raise(outcomes, [TransportError] * RANKS)
    for error in outcomes:
        assert (error.reason, error.path) == ("peer_failed", f"{work}, rank 1")
    is_well(world)


def do_send_numbers(rank, status, size):
    if rank == 0:
        return dist.send(torch.tensor([status, size]).view(torch.uint8), 1)
    return recv(0) if rank == 1 else None


@pytest.mark.parametrize(
    ("status", "size"),
    [(0, -1), (0, 1 << 55), (1, -1), (1, 4097), (2, 1), (-1, 0), (0, 1 << 62), (1, 1 << 62)],
)
def test_forged_numbers_from_one_rank_to_another(world, status, size):
    _, error, _ = world.outcomes(do_send_numbers, status, size)
    assert isinstance(error, TransportError), error
    assert (error.reason, error.path) == ("peer_failed", "recv, rank 0")
    is_well(world)


def test_errors_of_a_message_name_the_rank_and_errors_of_rows_the_function(world):
    _, *others = world.outcomes(do_send_newer, "broadcast", 10)
    assert {error.path for error in others} == {"broadcast, rank 0: header"}
    outcomes = world.outcomes(do_rowless, "scatter_rows")
    assert [error.path for error in outcomes if isinstance(error, ArgumentTypeError)] == [
        "scatter_rows(batch)"
    ]


# --- tensors that stay on their device ---------------------------------------------------------
# The path of NCCL, on the device of the test suite.


@pytest.mark.usefixtures("own_device")
def test_cells_stay_where_they_lie_and_offsets_do_not():
    batch = batch_of(3, 0, 5)
    there = on_device(batch)
    with watch() as traffic:
        header, *frames = encode_resident(there, DEVICE)
    assert traffic.fetched == [there[name].offsets().nbytes for name in ("ids", "logprobs")]
    assert traffic.waits == 1
    kept = [isinstance(frame, torch.Tensor) for frame in frames]
    places = {frame.data_ptr() for frame in frames if isinstance(frame, torch.Tensor)}
    tensors = [there["ids"].values(), there["logprobs"].values(), there["reward"]]
    assert places == {tensor.data_ptr() for tensor in tensors}
    assert kept == [False, True, True, True]
    buffers: Any = [torch.frombuffer(bytearray(f), dtype=torch.uint8) for f in frames[:1]]
    buffers += frames[1:]
    with watch() as traffic:
        back = decode_resident(header, buffers, kept, device=DEVICE)
    assert traffic.fetched == []
    assert back["ids"].device == DEVICE
    assert back["ids"].values().data_ptr() == tensors[0].data_ptr()
    assert_same(on_device(back, torch.device("cpu")), batch)
    assert message(encode_resident(batch, DEVICE)) == message(encode(batch))
    with pytest.raises(WireFormatError, match="expected 24 bytes, found 23"):
        decode_resident(header, [*buffers[:-1], buffers[-1][:-1]], kept)


@given(value=trees(max_leaves=6), narrow=st.booleans(), keep=st.randoms(use_true_random=False))
def test_whatever_is_called_kept_is_the_value_or_refused(value, narrow, keep):
    """A rank chooses the flags: of a kept buffer only cells as wide as their dtype are read."""
    header, *frames = encode(value, narrow=narrow)
    buffers = [torch.frombuffer(bytearray(frame), dtype=torch.uint8) for frame in frames]
    kept = [keep.random() < 0.7 for _ in buffers]
    try:
        back = decode_resident(header, buffers, kept)
    except WireFormatError:
        return
    assert_same(back, value)


@pytest.mark.parametrize("narrow", [torch.arange(90), torch.ones(9000, dtype=torch.bool)])
def test_a_narrow_buffer_that_is_called_kept_is_refused(narrow):
    column = torch.nested.nested_tensor_from_jagged(narrow, torch.tensor([0, 40, len(narrow)]))
    td = TensorDict({"x": column}, [2])
    for value in (narrow, [narrow, narrow.clone()], {"x": narrow.view(2, -1)}, td):
        header, *frames = encode(value, narrow=True)
        assert sum(map(len, frames)) < 3000
        buffers = [torch.frombuffer(bytearray(frame), dtype=torch.uint8) for frame in frames]
        with pytest.raises(WireFormatError, match="expected bytes on the host"):
            decode_resident(header, buffers, [True] * len(buffers))
        assert_same(decode_resident(header, buffers, [False] * len(buffers)), value)


@pytest.mark.usefixtures("own_device")
def test_empty_tensors_arrive_on_the_device_too():
    batch = on_device(batch_of(3, 0, 5))
    empty = {
        "no rows": select_rows(batch, []),
        "empty rows": select_rows(batch, [1]),
        "mixed": on_device({"some": torch.ones(2), "none": torch.ones(0, 4, dtype=torch.bfloat16)}),
    }
    for value in empty.values():
        header, *frames = encode_resident(value, DEVICE)
        kept = [isinstance(frame, torch.Tensor) for frame in frames]
        buffers: Any = [
            frame if stays else torch.tensor(list(frame), dtype=torch.uint8)
            for frame, stays in zip(frames, kept, strict=True)
        ]
        back = decode_resident(header, buffers, kept, device=DEVICE)
        tensors = {k: v for k, v in value.items() if isinstance(v, torch.Tensor)}
        assert tensors
        for name, tensor in tensors.items():
            assert back[name].device == DEVICE
            assert back[name].dtype == tensor.dtype
            assert back[name].is_nested == tensor.is_nested
            assert back[name].is_nested or back[name].shape == tensor.shape


@contextmanager
def staying(device):
    original = td_module._line
    td_module._line = lambda *arguments: original(*arguments)._replace(resident=device)
    try:
        yield
    finally:
        td_module._line = original


def do_all(rank, src, data):
    with staying(torch.device("cpu")):
        value = unpacked(data) if rank == src else None
        found = broadcast(value, src)
        batch = batch_of(1, 0, 5, 2) if rank == src else None
        whole = all_gather_rows(scatter_rows(batch, src))
        if rank == src:
            send(value, (src + 1) % RANKS)
        again = recv(src) if rank == (src + 1) % RANKS else found
    return packed(found), packed(whole), packed(again)


@settings(max_examples=25)
@given(value=trees(), src=st.integers(0, RANKS - 1))
def test_tensors_that_stay_on_their_device_arrive(world, value, src):
    for found, whole, again in world(do_all, src, packed(value)):
        assert_same(unpacked(found), value)
        assert_same(unpacked(again), value)
        assert_same(unpacked(whole), batch_of(1, 0, 5, 2))


def do_nccl(rank):
    place = torch.device("cuda", rank)
    batch = batch_of(3, 1, 2).to("cuda") if rank == 0 else None
    found = broadcast(batch, 0)
    part = scatter_rows(batch, 0)
    whole = all_gather_rows(part)
    moved = broadcast(batch, 0, device="cpu")
    plain = broadcast(torch.arange(9) if rank == 0 else None, 0)
    for one in (found, part, whole):
        assert one["ids"].device == one["reward"].device == place
        assert (one["ids"] + one["logprobs"]).values().abs().sum() == 0
    assert moved["ids"].device.type == plain.device.type == "cpu"
    assert plain.tolist() == list(range(9))
    if rank == 0 and dist.get_world_size() > 1:
        send(batch, 1)
    if rank == 1:
        assert recv(0)["ids"].device == place
    return listed(whole.cpu()), listed(found.cpu())


@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs CUDA and NCCL"
)
def test_nccl_keeps_device_tensors_on_the_device(tmp_path):
    with started(tmp_path, min(2, torch.cuda.device_count()), "nccl") as world:
        for whole, found in world(do_nccl):
            assert whole == found == listed(batch_of(3, 1, 2))


# --- the package -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_runs():
    path = ROOT / "examples/torch_distributed_broadcast.py"
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "every rank has the 64 rows" in done.stdout
