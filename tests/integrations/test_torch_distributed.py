"""torch.distributed: real processes over gloo, and what happens when a rank does not play along."""

import os
import re
import signal
import struct
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import jagcodec
from jagcodec import BatchedDataDict, Limits, WireFormatError, encode, materialize, split_rows
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, TransportError
from jagcodec.integrations import torch_distributed as td_module
from jagcodec.integrations.torch_distributed import all_gather_rows, broadcast
from jagcodec.memory.blocks import new_block
from jagcodec.testing import jagged_batches
from jagcodec.wire.spec import MAGIC, VERSION
from tests.helpers import LENGTHS, make_batch
from tests.integrations.conftest import process
from tests.oracle import assert_same
from tests.strategies import tensordicts, trees

NEWER, Q = bytes([VERSION + 1]), struct.Struct("<q")
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


def do_send_a_message_as_it_is(rank):
    """Narrow, elided, compressed, with checksums: nothing is decoded, encoded or sent twice."""
    columns = {"ids": torch.arange(20_000) % 7, "same": torch.arange(20_000) % 7}
    frames = encode(TensorDict(columns, [20_000]), narrow=True, elide=True, checksum=True)
    for sent in (frames, jagcodec.to_blob(frames), jagcodec.open_wire(frames)):
        with (
            patch.object(dist, "broadcast", side_effect=dist.broadcast) as calls,
            patch.object(td_module, "encode", side_effect=AssertionError),
            patch.object(td_module, "build", side_effect=AssertionError),
        ):
            found = broadcast(sent if rank == 0 else None, 0)
        blob = bytes(jagcodec.to_blob(frames))
        assert [call.args[0].nbytes for call in calls.call_args_list] == [len(blob)]
        assert bytes(jagcodec.to_blob(found.to_frames())) == blob
        assert_same(found.to_tensordict(), TensorDict(columns, [20_000]))


def do_write_to_what_was_sent(rank):
    """The result is not changed by it, nor it by the result."""
    td = TensorDict({"x": torch.arange(5000)}, [5000])
    blob = jagcodec.to_blob(encode(td))
    for sent in (blob, jagcodec.open_wire(blob), jagcodec.open_wire(td)):
        td["x"].copy_(torch.arange(5000))
        found, before = broadcast(sent if rank == 0 else None, 0), bytes(blob)
        td["x"].zero_()
        assert found["x"].tolist() == list(range(5000))
        found["x"].zero_()
        assert bytes(blob) == before


def do_get_what_replaces_an_object(rank):
    value = {"kind": threading.Thread}
    found = broadcast(value if rank == 0 else None, 0, default=repr)
    assert found == {"kind": repr(threading.Thread)}


WHAT_RANKS_DO = [do_say_where_tensors_go, do_one_transfer_without_padding]
WHAT_RANKS_DO += [do_name_a_global_rank_of_a_group, do_send_a_message_as_it_is]
WHAT_RANKS_DO += [do_write_to_what_was_sent, do_get_what_replaces_an_object]


@pytest.mark.parametrize("work", WHAT_RANKS_DO)
def test_every_rank_finds_what_it_expects(world, work):
    assert world.outcomes(work) == [None] * RANKS
    assert_usable(world)


# --- kind in, kind out -------------------------------------------------------------------------


def opened(td, **meta):
    return jagcodec.open_wire(encode(td, meta=meta))


# What is sent of the rows of a TensorDict: a value and, if it is not a message, its type.
KINDS: dict[str, Any] = {
    "a TensorDict": (lambda td, **_: td, TensorDict),
    "a dict": (lambda td, **_: dict(td.exclude("tag").items()), dict),
    "a BatchedDataDict": (
        lambda td, **meta: BatchedDataDict(dict(td.exclude("tag").items()), meta_info=meta),
        BatchedDataDict,
    ),
    "an open message": opened,
    "an open message of a BatchedDataDict": lambda td, **meta: jagcodec.open_wire(
        encode(BatchedDataDict(dict(td.items()), meta_info=meta))
    ),
    "an open message of a dict": lambda td, **meta: jagcodec.open_wire(encode(meta | {"td": td})),
    "chosen rows": lambda td, **meta: opened(td, **meta).rows(range(len(td))),
    "rows in another order": lambda td, **meta: opened(
        jagcodec.select_rows(td, list(range(len(td)))[::-1]), **meta
    ).rows(list(range(len(td)))[::-1]),
    "chosen columns": lambda td, **meta: opened(
        td.clone().update({"more": torch.ones(len(td))}), **meta
    ).select(list(td.keys())),
    "joined rows": lambda td, **meta: jagcodec.concat_rows(
        [opened(part, of=i, **meta) for i, part in enumerate(split_rows(td, 2))]
    ),
    "columns side by side": lambda td, **meta: jagcodec.join_columns(
        [opened(td.select(*list(td.keys())[:2])), opened(td.exclude(*list(td.keys())[:2]), **meta)]
    ),
    "an open BatchedDataDict": lambda td, **meta: jagcodec.open_wire(
        BatchedDataDict(dict(td.items()), meta_info=meta)
    ),
    "frames": lambda td, **meta: encode(td, meta=meta),
    "a tuple of frames": lambda td, **meta: tuple(encode(td, meta=meta)),
    "fewer bytes": lambda td, **meta: encode(td, meta=meta, narrow=True, elide=True, checksum=True),
    "frames of tensors": lambda td, **meta: [
        torch.frombuffer(bytearray(frame), dtype=torch.uint8) for frame in encode(td, meta=meta)
    ],
    "frames of a BatchedDataDict": lambda td, **meta: encode(
        BatchedDataDict(dict(td.items()), meta_info=meta)
    ),
    "a blob": lambda td, **meta: jagcodec.to_blob(encode(td, meta=meta)),
    "a blob in a list": lambda td, **meta: [bytes(jagcodec.to_blob(encode(td, meta=meta)))],
    "a blob in larger memory": lambda td, **meta: np.frombuffer(
        jagcodec.to_blob(encode(td, meta=meta)) + b"more", np.uint8
    ),
}


def kind_of(name):
    kind = KINDS[name]
    return kind if isinstance(kind, tuple) else (kind, jagcodec.WireBatch)


def content_of(batch):
    """The rows of a batch as a TensorDict, and what belongs to the whole of it."""
    if isinstance(batch, jagcodec.WireBatch):
        return batch.to_tensordict(), batch.meta
    return batch, getattr(batch, "meta_info", {})


def do_get_a_kind(rank, name, rows, device):
    make, kind = kind_of(name)
    batch = make_batch(lengths=LENGTHS[:rows])
    value, meta = make(batch, step=7, more=[1, None]), {"step": 7, "more": [1, None]}
    source = RANKS - 1
    found = broadcast(value if rank == source else None, source, device=device)
    td, found_meta = content_of(found)
    assert type(found) is kind
    assert_same(td, batch if kind is jagcodec.WireBatch else value)
    assert found_meta == (meta if kind not in (TensorDict, dict) else {})
    if kind is jagcodec.WireBatch:
        assert found.fields == tuple(batch.keys())
        assert found.batch_size == batch.batch_size


def do_gather_a_kind(rank, name, rows):
    make, kind = kind_of(name)
    parts = split_rows(make_batch(lengths=LENGTHS[:rows]), RANKS)
    values = [make(part, step=7, rank=i) for i, part in enumerate(parts)]
    found = all_gather_rows(values[rank])
    td, meta = content_of(found)
    assert type(found) is kind
    whole = jagcodec.concat_rows(parts if kind is jagcodec.WireBatch else values)
    assert_same(td, whole)
    assert meta == ({"step": 7} if kind not in (TensorDict, dict) else {})
    if kind is jagcodec.WireBatch:
        assert [each["rank"] for each in found.metas] == list(range(RANKS))


@pytest.mark.parametrize("rows", [6, 1, 0])
@pytest.mark.parametrize("name", KINDS)
def test_what_one_rank_gets_every_rank_gets(world, name, rows):
    """The same kind, columns, rows and meta, on the rank that sends, too."""
    for device in (None, "cpu"):
        assert world.outcomes(do_get_a_kind, name, rows, device) == [None] * RANKS
    assert world.outcomes(do_gather_a_kind, name, rows) == [None] * RANKS
    assert_usable(world)


def do_open_and_send(rank, work, sent, how, meta):
    """A message of these rows is sent in one of three ways; what each rank gets, as frames."""
    batch = jagcodec.open_wire(encode(unpacked(sent[rank]), meta=meta))
    rows = batch.rows(range(len(batch)))
    value: Any = {"open": batch, "frames": batch.to_frames(), "rows": rows}[how]
    found = work(value) if work is all_gather_rows else broadcast(None if rank else value, 0)
    assert type(found) is jagcodec.WireBatch
    return packed(found.to_tensordict()), found.meta


@settings(max_examples=25)
@given(
    batch=jagged_batches(max_rows=7),
    work=st.sampled_from(WORKS),
    how=st.sampled_from(["open", "frames", "rows"]),
    meta=st.dictionaries(st.text(max_size=3), st.integers() | st.text() | st.none(), max_size=3),
)
def test_open_batches_of_all_kinds_of_columns_arrive_with_their_meta(world, batch, work, how, meta):
    td = jagcodec.pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    sent = [td] * RANKS if work is broadcast else split_rows(td, RANKS)
    parts = [packed(part) for part in sent]
    for found, found_meta in world.outcomes(do_open_and_send, work, parts, how, meta):
        assert_same(unpacked(found), td)
        assert_same(found_meta, meta)


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
    for error in world.call(broadcast, **sent, allow_pickle=[True, False, True]):
        assert (type(error), error.reason, error.path) == (ArgumentError, "conflict", "broadcast")
        assert "broadcast(src=0, allow_pickle=True) on rank 0, broadcast(src=0) on rank 1" in (
            error.detail
        )
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


IDS = jagcodec.stack_or_nest([torch.arange(2)], always_nest=True)
DIFFERENT: dict[
    str, tuple[Any, str]
] = {  # columns or a batch on the last rank, and what all ranks hear
    "a column missing": ({}, "found 'x' missing"),
    "a column in addition": ({"x": torch.ones(1, 2), "y": torch.ones(1)}, "found 'y' in addition"),
    "a dtype": ({"x": torch.ones(1, 2, dtype=torch.int64)}, "torch.float32 like rank 0"),
    "a dtype, and no rows": ({"x": torch.ones(0, 2, dtype=torch.int64)}, "torch.float32 like rank"),
    "a row shape": ({"x": torch.ones(1, 3)}, "row shape"),
    "a layout": ({"x": IDS.float()}, "layout"),
    "objects": ({"x": NonTensorStack("a")}, "'x'"),
    "a kind": (BatchedDataDict(x=torch.ones(1, 2)), "found BatchedDataDict"),
}


def error_of(work, *arguments, **options):
    """What a call raised, with all that a caller sees of it."""
    with pytest.raises(jagcodec.JagcodecError) as caught:
        work(*arguments, **options)
    error = caught.value
    return type(error).__name__, error.reason, error.path, error.detail


def do_disagree(rank, name, wrap):
    columns, _ = DIFFERENT[name]
    batch: Any = TensorDict({"x": torch.ones(2, 2)}, [2])
    if rank == RANKS - 1:
        rows = len(next(iter(columns.values()), [0]))
        batch = columns if type(columns) is BatchedDataDict else TensorDict(columns, [rows])
    if wrap and type(batch) is TensorDict:
        batch = jagcodec.open_wire(encode(batch)) if wrap == "open" else encode(batch)
    return error_of(all_gather_rows, batch)


@pytest.mark.parametrize("wrap", [None, "open", "frames"])
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_batches_raise_one_error_that_names_column_and_rank(world, name, wrap):
    first, *others = world.outcomes(do_disagree, name, wrap)
    assert others == [first] * (RANKS - 1)
    kind, _, path, detail = first
    assert kind.startswith("Argument")
    assert path.startswith(f"all_gather_rows, rank {RANKS - 1}")
    assert DIFFERENT[name][1] in f"{path}: {detail}"
    assert_usable(world)


def do_join_any_batches(rank, messages):
    try:
        found = all_gather_rows(jagcodec.open_wire(messages[rank]))
    except jagcodec.JagcodecError as error:
        return type(error), error.path, error.detail
    return packed(found.to_tensordict())  # which must not fail


@settings(max_examples=40)
@given(st.lists(tensordicts(), min_size=RANKS, max_size=RANKS), st.booleans())
def test_open_batches_that_cannot_be_joined_are_refused_before_a_column_is_read(world, tds, same):
    tds = [tds[0]] * RANKS if same else tds
    messages = [jagcodec.to_blob(encode(td)) for td in tds]
    try:
        batches = [jagcodec.open_wire(each) for each in messages]
        expected = jagcodec.concat_rows(batches).to_tensordict()
    except jagcodec.JagcodecError:
        expected = None
    first, *others = world.outcomes(do_join_any_batches, messages)
    assert others == [first] * (RANKS - 1)
    assert isinstance(first, bytes) is (expected is not None)
    if expected is not None:
        assert_same(unpacked(first), expected)


def do_disagree_in_a_group(rank):
    """The ranks are those of the job, whatever their places in the group are."""
    group = dist.new_group([0, 2], timeout=timedelta(seconds=60))
    if rank != 1:
        batch = opened(TensorDict({"x": torch.ones(1, 1 + rank)}, [1]))
        found = error_of(all_gather_rows, batch, group)
        assert found[2] == "all_gather_rows, rank 2: concat_rows['x']"
        assert "like rank 0" in found[3]


def test_ranks_of_a_group_are_named_by_their_ranks_in_the_job(world):
    assert world.outcomes(do_disagree_in_a_group) == [None] * RANKS
    assert_usable(world)


FRAMES = [bytes(frame) for frame in encode(make_batch(cells_per_token=2000), checksum=True)]
MALFORMED: dict[str, tuple[Any, str]] = {
    "a frame that is cut": ([*FRAMES[:-1], FRAMES[-1][:-1]], "frame_size"),
    "a frame that is too long": ([*FRAMES[:-1], FRAMES[-1] + b"\0"], "frame_size"),
    "a frame too few": (FRAMES[:-1], "frame_count"),
    "a frame too many": ([*FRAMES, b""], "frame_count"),
    "a frame with other bytes": ([*FRAMES[:-1], bytes(len(FRAMES[-1]))], "bad_checksum"),
    "a frame that is not a buffer": ([*FRAMES[:-1], None], "foreign"),
    "a header that is cut": ([FRAMES[0][:-1], *FRAMES[1:]], "bad_header"),
    "the magic alone": (b"jagcodec", "foreign"),
    "a blob that is cut": (jagcodec.to_blob(FRAMES)[:-1], "frame_size"),
    "a later version": ([FRAMES[0][:10] + NEWER + FRAMES[0][11:], *FRAMES[1:]], "unknown_version"),
    "another value": (encode({"step": 3}), "bad_value"),
    "two batches": (encode([make_batch()] * 2), "bad_value"),
}


def do_send_a_bad_message(rank, name):
    sent = MALFORMED[name][0]
    gathered = error_of(all_gather_rows, sent if rank == 1 else encode(make_batch()))
    return error_of(broadcast, sent if rank == 1 else None, 1), gathered


@pytest.mark.parametrize("name", MALFORMED)
def test_a_bad_message_is_the_same_error_on_every_rank(world, name):
    first, *others = world.outcomes(do_send_a_bad_message, name)
    assert others == [first] * (RANKS - 1)
    for work, (kind, reason, path, _) in zip(WORKS, first, strict=True):
        assert (kind, reason) == ("WireFormatError", MALFORMED[name][1])
        assert path.startswith(f"{work.__name__}, rank 1: ")
    assert_usable(world)


def do_lack_what_a_batch_needs(rank):
    """One rank alone cannot make its result; after that no rank may wait for it."""
    failing = patch.object(td_module, "build", side_effect=OverflowError("no memory"))
    with failing if rank == 1 else nullcontext(), pytest.raises(Exception, match="no memory"):
        broadcast({"a": 1} if rank == 0 else None, 0)


def test_a_rank_that_cannot_make_its_result_is_an_error_on_every_rank(world):
    assert world.outcomes(do_lack_what_a_batch_needs) == [None] * RANKS
    assert_usable(world)


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
    assert (sender.args, type(sender)) == (receivers[0].args, WireFormatError)
    assert_usable(world)


@pytest.mark.parametrize("work", WORKS)
def test_padding_of_blobs_is_not_in_the_limit(world, work):
    """As for `decode`, a message may have as many bytes as the limit says."""
    batch = {"x": torch.arange(300), "y": torch.ones(300, 3, dtype=torch.uint8)}
    size = sum(map(len, encode(batch)))
    for found in world.call(work, **arguments(work, [batch] * RANKS, 0), limits=Limits(bytes=size)):
        assert sorted(found) == ["x", "y"]
    limits = Limits(bytes=size - 1)
    for error in world.call(work, **arguments(work, [batch] * RANKS, 0), limits=limits):
        assert (type(error), error.reason) == (WireFormatError, "too_large")
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
    with patch.object(td_module._Exchange, "encode", lambda *_: forged):
        return broadcast(1 if rank == 0 else None, 0)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_message_is_an_error_that_names_its_sender(world, name):
    blob, reason = FORGED[name]
    for error in refused(world.outcomes(do_forge, blob), world, *[WireFormatError] * RANKS):
        assert error.reason == reason
        assert error.path.startswith("broadcast, rank 0: ")


def do_forge_numbers(place, number, rank, *call):
    """Rank 1 announces another number, where ranks agree on what is to come."""

    def forged(self, row, gather=td_module._Exchange._gather_records):
        start = 8 * place
        forged = row[:start] + Q.pack(number) + row[start + 8 :]
        return gather(self, forged if rank == 1 else row)

    with patch.object(td_module._Exchange, "_gather_records", forged):
        return do_call(rank, *call)


# The function, the bytes of the message, words about a failure, and whether it becomes a batch.
FORGED_NUMBERS = [(0, 2), (0, -1), (2, -1), (3, -1), (2, 1 << 55), (128, 2), (128, -1)]


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(("place", "number"), FORGED_NUMBERS)
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
    part = split_rows(found, dist.get_world_size())[rank]
    whole = all_gather_rows(part, device="cuda")
    joined = all_gather_rows(encode(part, meta={"step": 7}), device="cuda")
    opened = broadcast(encode(batch, meta={"step": 7}) if rank == 0 else None, 0, device="cuda")
    assert joined.meta == opened.meta == {"step": 7}
    for each in (whole, joined, opened):
        assert each["ids"].device == torch.device("cuda", rank)
    for each in (found, whole, joined.to_tensordict(), opened.to_tensordict()):
        assert_same(each, batch)


def do_messages_on_the_device(rank):
    """As over NCCL, which refuses two ranks on one GPU; gloo takes tensors of the GPU, too."""
    batch = make_batch()
    with patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        found = broadcast(batch if rank == 0 else None, 0)
        there = broadcast(batch if rank == 0 else None, 0, device="cuda")
        part = split_rows(found, dist.get_world_size())[rank]
        whole = all_gather_rows(part, device="cuda")
        joined = all_gather_rows(encode(part, meta={"step": 7}), device="cuda")
        opened = broadcast(encode(batch, meta={"step": 7}) if rank == 0 else None, 0)
    assert joined.meta == opened.meta == {"step": 7}
    for each in (whole, there, joined):
        assert each["ids"].device == torch.device("cuda", 0)
    for each in (found, there, whole, joined.to_tensordict(), opened.to_tensordict()):
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
