"""torch.distributed: real processes over gloo, and what happens when a rank does not play along."""

from __future__ import annotations

import os
import signal
import struct
import threading
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
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
    split_rows,
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
from jagcodec.integrations.torch_distributed import all_gather_rows, broadcast
from jagcodec.memory import blocks
from jagcodec.testing import jagged_batches
from jagcodec.wire.decoder import decode_resident
from jagcodec.wire.encoder import encode_resident
from jagcodec.wire.spec import MAGIC, VERSION
from tests.device import DEVICE, on_device, watch
from tests.helpers import message
from tests.oracle import assert_same, rows_of
from tests.strategies import trees

LONG = 120  # seconds, for what must come
RANKS = 3
WORKS = ["broadcast", "all_gather_rows"]

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


def do_gather_parts(rank, data):
    return packed(all_gather_rows(split_rows(unpacked(data), RANKS)[rank]))


@settings(max_examples=25)
@given(batch=jagged_batches(max_rows=7))
def test_parts_of_all_kinds_of_columns_come_together_again(world, batch):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    for whole in world(do_gather_parts, packed(td)):
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
    batch = BatchedDataDict(columns, meta_info={"step": 7})
    whole = all_gather_rows(split_rows(batch, RANKS)[rank])
    assert type(whole) is BatchedDataDict
    assert whole.meta_info == {"step": 7}
    return whole["name"], [row.tolist() for row in whole["x"].unbind()], whole["id"].tolist()


def test_dicts_of_columns_come_together(world):
    for names, rows, numbers in world(do_dicts):
        assert names == ["a", "b", "c", "d"]
        assert rows == [[1], [4] * 4, [2] * 2, [3] * 3]
        assert numbers == [0, 1, 2, 3]


def do_large(rank):
    value = {"x": torch.arange(3_000_000), "b": bytes(100_000)}
    return packed(broadcast(value if rank == 1 else None, 1)) == packed(value)


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
    whole = all_gather_rows(batch_of(*range(rank)), group)
    with pytest.raises(ArgumentError, match=r"one of \[1, 2\], found 0"):
        broadcast(batch, 0, group)
    return [len(listed(one)) for one in (found, whole)]


def test_src_is_a_global_rank_of_the_group(world):
    assert world(do_group) == [None, [3, 3], [3, 3]]


# --- what goes wrong ---------------------------------------------------------------------------


def is_well(world):
    """Ranks that raised together can go on together."""
    for data in world(do_broadcast, 0, packed("still here")):
        assert unpacked(data) == "still here"


def do_fail(rank, work):
    value = {"extra": [1, threading.Lock()]}
    if work == "broadcast":
        return broadcast(value if rank == 1 else None, 1)
    rows = {"x": [threading.Lock()]} if rank == 1 else {"x": [1]}
    return all_gather_rows(rows)


@pytest.mark.parametrize("work", WORKS)
def test_every_rank_learns_that_one_cannot_encode(world, work):
    outcomes = world.outcomes(do_fail, work)
    assert_all_raise(outcomes, [TransportError, UnsupportedTypeError, TransportError])
    for error in (outcomes[0], outcomes[2]):
        assert (error.reason, error.path) == ("peer_failed", f"{work}, rank 1")
        assert "UnsupportedTypeError: $." in error.detail
        assert "_thread.lock" in error.detail
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
        x = torch.zeros(1_000_000, dtype=torch.float64)
        if work == "all_gather_rows":
            return all_gather_rows({"x": x if rank == 1 else x[:0]})
        return broadcast({"x": x} if rank == 1 else None, 1)
    finally:
        blocks.new_block = original


@pytest.mark.parametrize("work", WORKS)
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
    return [one["x"].tolist() for one in found]


def test_a_default_device_changes_nothing(world):
    assert world(do_with_default_device) == [[[1, 1], [1] * 6]] * RANKS


def do_differ(rank, calls):
    name, src = calls[rank]
    if name == "all_gather_rows":
        return all_gather_rows({"x": [1]})
    return broadcast({"x": [1]} if rank == src else None, src)


@pytest.mark.parametrize(
    "calls",
    [
        [("broadcast", 0), ("broadcast", 1), ("broadcast", 0)],
        [("broadcast", 0), ("broadcast", 0), ("all_gather_rows", None)],
        [("all_gather_rows", None), ("broadcast", 1), ("broadcast", 2)],
    ],
)
def test_calls_that_differ_are_refused_on_every_rank(world, calls):
    outcomes = world.outcomes(do_differ, calls)
    assert_all_raise(outcomes, [ArgumentError] * RANKS)
    for error in outcomes:
        assert error.reason == "conflict"
        for rank, (name, src) in enumerate(calls):
            call = f"{name}()" if src is None else f"{name}(src={src})"
            assert f"{call} on rank {rank}" in error.detail
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


def do_numpy_rank(rank):
    """A rank as it comes out of an array."""
    return broadcast({"step": 3} if rank == 0 else None, np.int64(0))  # type: ignore[arg-type]


def test_src_may_be_an_integer_of_numpy(world):
    assert world(do_numpy_rank) == [{"step": 3}] * RANKS


def test_a_wrong_argument_on_one_rank_reaches_all(world):
    outcomes = world.outcomes(do_wrong_argument, 0, "nowhere")
    assert_all_raise(outcomes, [TransportError, TransportError, ArgumentError])
    is_well(world)


def do_rowless(rank):
    return all_gather_rows("text" if rank == 0 else {"x": [1]})  # type: ignore[arg-type]


def test_values_without_rows(world):
    assert_all_raise(world.outcomes(do_rowless), [ArgumentTypeError] * RANKS)
    is_well(world)


def do_differing_columns(rank):
    return all_gather_rows({"x": [1], **({"y": [2]} if rank else {})})


def test_columns_that_differ_are_refused_on_every_rank(world):
    assert_all_raise(world.outcomes(do_differing_columns), [ArgumentKeyError] * RANKS)
    is_well(world)


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
    return all_gather_rows(BatchedDataDict(x=torch.arange(300)), limits=few)


@pytest.mark.parametrize("work", WORKS)
def test_receivers_set_limits(world, work):
    sender, *receivers = world.outcomes(do_limits, work)
    for error in receivers:
        assert isinstance(error, WireFormatError)
        assert error.reason == "too_large"
        assert error.path == f"{work}, rank 0: header"
    # The sender learns it too.
    assert "100 bytes" in str(sender)
    is_well(world)


def do_stay_away(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    return broadcast("hello", 0, group) if rank == 0 else None


def test_a_rank_that_does_not_take_part_ends_in_a_time_out(world):
    error, *_ = world.outcomes(do_stay_away)
    assert_all_raise([error], [TransportTimeoutError])
    assert (error.reason, error.path) == ("timed_out", "broadcast")
    is_well(world)


def do_die(rank, work):
    if rank == 1:
        os._exit(7)
    return broadcast(None, 1) if work == "broadcast" else all_gather_rows({"x": [1]})


@pytest.mark.parametrize("work", WORKS)
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


def do_die_in_mid_message(rank, victim):
    """The victim is killed when the header of a message is through, and its buffers are not."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=10))
    value = {"x": torch.arange(4_000_000)}  # more than socket buffers hold
    exchange: Any = td_module._Exchange
    original = exchange._broadcast_bytes

    def broadcast_bytes(*arguments):
        original(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        exchange._broadcast_bytes = broadcast_bytes
    return broadcast(value if rank == 0 else None, 0, group)


@pytest.mark.parametrize(("victim", "waiting"), [(0, [1, 2]), (1, [0])])
def test_a_rank_killed_in_mid_message_is_an_error_where_it_is_awaited(tmp_path, victim, waiting):
    with started(tmp_path, RANKS) as world:
        outcomes = world.outcomes(do_die_in_mid_message, victim)
    assert outcomes[victim] is None
    for rank in waiting:
        error = outcomes[rank]
        assert isinstance(error, TransportError), error
        assert error.reason in ("no_peer", "timed_out")
        assert error.path == "broadcast"
        assert "make the group anew" in error.detail


def test_without_a_process_group():
    for call in (lambda: broadcast(1, 0), lambda: all_gather_rows({})):
        with pytest.raises(ArgumentError, match="init_process_group"):
            call()


def newer(frames):
    """A message as a later version of this library would write it."""
    header, *rest = frames
    header = bytearray(header)
    header[header.index(MAGIC.encode()) + len(MAGIC)] = VERSION + 1
    return [bytes(header), *rest]


def do_send_newer(rank, cells):
    """Rank 0 is ahead of the others, and what it sends does not fit into socket buffers."""
    module: Any = td_module
    original = module.encode_resident
    if rank == 0:
        module.encode_resident = lambda *arguments, **options: newer(
            original(*arguments, **options)
        )
    try:
        return broadcast({"x": torch.arange(cells)} if rank == 0 else None, 0)
    finally:
        module.encode_resident = original


@pytest.mark.parametrize("cells", [10, 2_000_000])
def test_a_version_that_a_receiver_does_not_know_leaves_the_group_usable(world, cells):
    sender, *receivers = world.outcomes(do_send_newer, cells)
    assert (sender.reason, sender.path) == ("peer_failed", "broadcast, rank 1")
    for error in receivers:
        assert isinstance(error, WireFormatError), error
        assert (error.reason, error.path) == ("unknown_version", "broadcast, rank 0: header")
    for error in (sender, *receivers):
        assert f"expected format version {VERSION}, found {VERSION + 1}" in error.detail
    is_well(world)


# --- a hostile rank ----------------------------------------------------------------------------

WHOLE = bytes(encode(1)[0])  # a header without buffers
LARGE = bytes(encode(torch.zeros(40_000))[0])
FORGED = {
    "nothing": (b"", 0),
    "a header that is cut": (WHOLE[:-1], 0),
    "another header": (b"hello", 0),
    "a buffer that the header does not have": (WHOLE + b"\0", 1),
    "a buffer too few": (LARGE, 0),
    "more flags than bytes": (WHOLE, len(WHOLE) + 1),
    "2**50 bytes": (LARGE.replace(struct.pack("<q", 160_000), struct.pack("<q", 1 << 50)), 1),
}


def do_forge(rank, meta, count):
    """Rank 0 sends this header, and says that so many buffers follow."""
    exchange: Any = td_module._Exchange
    original = exchange.message
    if rank == 0:
        forged = torch.tensor(list(meta), dtype=torch.uint8)
        exchange.message = lambda self, batch, default: td_module._Message(
            forged, [torch.empty(0, dtype=torch.uint8)] * count, "forged"
        )
    try:
        return broadcast(1 if rank == 0 else None, 0)
    finally:
        exchange.message = original


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_header_is_the_error_of_the_rank_that_sent_it(world, name):
    _, *receivers = world.outcomes(do_forge, *FORGED[name])
    for error in receivers:
        assert isinstance(error, (TransportError, WireFormatError)), error
        assert error.path.startswith("broadcast, rank 0")
    is_well(world)


def do_forge_numbers(rank, work, place, number):
    """Rank 1 announces another number, where ranks agree on what is to come."""
    line: Any = td_module._Exchange
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
    return [number if i == place else value for i, value in enumerate(row)]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(
    ("place", "number"),
    [(0, 99), (0, -1), (2, -1), (2, 1 << 40), (3, -1), (3, 1 << 55), (4, -1), (4, 1 << 40)],
)
def test_forged_numbers_are_an_error_on_every_rank(world, place, number, work):
    outcomes = world.outcomes(do_forge_numbers, work, place, number)
    assert_all_raise(outcomes, [TransportError] * RANKS)
    for error in outcomes:
        assert (error.reason, error.path) == ("peer_failed", f"{work}, rank 1")
    is_well(world)


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
    original = td_module._exchange
    td_module._exchange = lambda *arguments: original(*arguments)._replace(resident=device)
    try:
        yield
    finally:
        td_module._exchange = original


def do_all(rank, src, data):
    with staying(torch.device("cpu")):
        found = broadcast(unpacked(data) if rank == src else None, src)
        whole = all_gather_rows(split_rows(batch_of(1, 0, 5, 2), RANKS)[rank])
    return packed(found), packed(whole)


@settings(max_examples=25)
@given(value=trees(), src=st.integers(0, RANKS - 1))
def test_tensors_that_stay_on_their_device_arrive(world, value, src):
    for found, whole in world(do_all, src, packed(value)):
        assert_same(unpacked(found), value)
        assert_same(unpacked(whole), batch_of(1, 0, 5, 2))


def do_nccl(rank):
    place = torch.device("cuda", rank)
    batch = batch_of(3, 1, 2).to("cuda") if rank == 0 else None
    found = broadcast(batch, 0)
    whole = all_gather_rows(split_rows(found, dist.get_world_size())[rank])
    moved = broadcast(batch, 0, device="cpu")
    plain = broadcast(torch.arange(9) if rank == 0 else None, 0)
    for one in (found, whole):
        assert one["ids"].device == one["reward"].device == place
        assert (one["ids"] + one["logprobs"]).values().abs().sum() == 0
    assert moved["ids"].device.type == plain.device.type == "cpu"
    assert plain.tolist() == list(range(9))
    return listed(whole.cpu()), listed(found.cpu())


@pytest.mark.cuda
@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs CUDA and NCCL"
)
def test_nccl_keeps_device_tensors_on_the_device(tmp_path):
    with started(tmp_path, min(2, torch.cuda.device_count()), "nccl") as world:
        for whole, found in world(do_nccl):
            assert whole == found == listed(batch_of(3, 1, 2))
