"""Whose memory a value is: what is shared, what is copied, how long it lives; and threads."""

import contextlib
import dataclasses
import gc
import io
import itertools
import mmap
import pickle
import re
import sys
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    Limits,
    WireBatch,
    WireFormatError,
    decode,
    dump,
    encode,
    open_wire,
    select_rows,
)
from jagcodec.columns.batch import to_send, views_of
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.train.batched_data_dict import BatchedDataDict
from jagcodec.train.describe import check_message
from jagcodec.types import FieldSchema, PackedColumn
from jagcodec.wire.spec import BATCHED_DATA_DICT, PACKED_COLUMN
from tests import helpers
from tests.helpers import Store, address, at_odd_address, message_in, nested, receive, size, trip
from tests.oracle import assert_same, rows_of
from tests.wire import forge
from tests.wire.readers import outcome, peak_of, refused
from tests.wire.values import REGISTERED, jagged, rich, views

BIG = 5000  # int64 cells: a buffer too large to share frame 1
IDS = torch.arange(12).view(3, 4)
LENGTHS = torch.tensor([3, 4, 2])


# --- encoding ----------------------------------------------------------------------------------


def test_large_contiguous_memory_is_sent_from_where_it_is():
    tensor, array = torch.arange(BIG), np.arange(BIG)
    values = torch.arange(2.0 * BIG)
    frames = encode([tensor, array, jagged(values, [0, BIG, 2 * BIG]), b"x" * BIG])
    places = [tensor.data_ptr(), address(array), values.data_ptr()]
    assert [address(frame) for frame in frames[2:5]] == places
    adjacent = list(torch.arange(200_000).split([100] * 2000))
    frames = encode(adjacent)
    assert address(frames[2]) == adjacent[0].data_ptr()
    assert [size([frame]) for frame in frames[1:]] == [0, 200_000 * 8, 2000 * 16]


def test_a_frame_keeps_its_tensor_alive_and_no_longer():
    tensor = torch.full((BIG,), 7)
    alive = weakref.ref(tensor.untyped_storage())
    frames = encode(tensor)
    del tensor
    assert decode(receive(frames)).tolist() == [7] * BIG
    del frames
    assert alive() is None or alive().nbytes() == 0


def test_bytes_are_sent_once_and_no_others():
    assert len(encode({str(i): torch.arange(10) for i in range(100)})) == 2
    storage = torch.zeros(1_000_000)
    assert size(encode(storage[10:20])) < 300
    assert size(encode(storage.view(1000, 1000)[3])) < 4300
    # Views of one storage are sent as one: the cells, and where each view starts and ends.
    adjacent = list(torch.arange(200_000).split([100] * 2000))
    assert size(encode(adjacent[::-1] + adjacent[:3])) == size(encode(adjacent)) + 3 * 16
    assert size(encode([row[:10] for row in torch.arange(100_000).view(1000, 100)])[1:]) == 96_000
    assert size(encode(views((0, 5000), (10, 20), (4000, 9000)))[1:]) <= 9000 * 8 + 3 * 16
    # A packed batch is its cells, and the offsets of all columns once.
    lengths = torch.randint(1, 768, (512,))
    fields = {f"c{i}": torch.ones(512, 1536) for i in range(6)}
    frames = encode(
        jagcodec.pack_jagged_fields(fields, lengths=lengths, token_aligned_fields=fields)
    )
    assert size(frames) <= 6 * 4 * int(lengths.sum()) + 8 * 513 + 1000
    assert len(frames) <= len(fields) + 3


# --- decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytearray, lambda b: np.frombuffer(bytearray(b), np.uint8)])
def test_values_alias_writable_frames(kind):
    frames = receive(encode([torch.arange(BIG), np.arange(BIG)]), kind)
    tensor, array = decode(frames)
    assert tensor.data_ptr() == address(frames[2])
    assert array.__array_interface__["data"][0] == address(frames[3])
    tensor[0] = 99
    assert np.frombuffer(frames[2], np.int64)[0] == 99
    for copied in (decode(frames, copy=True), jagcodec.MsgpackDecoder(copy=True).decode(frames)):
        assert copied[0].data_ptr() != address(frames[2])
    read_only = receive(frames, bytes)
    assert decode(read_only, copy=False)[0].data_ptr() == address(read_only[2])
    blob = jagcodec.to_blob(frames)
    assert 0 < decode(blob)[0].data_ptr() - address(blob) < len(blob)


def test_columns_alias_each_other_only_without_a_copy_in_between():
    """As docs/values.md says: large ones of what was encoded in this process, too."""
    column = torch.zeros(BIG, dtype=torch.int64)
    for elide in (False, True):
        frames = encode(
            TensorDict({"a": column, "b": column, "c": column.clone()}, [BIG]), elide=elide
        )
        for found in (decode(receive(frames)), decode(frames, copy=True)):
            found["a"][0] = 7
            assert [int(found[name][0]) for name in "abc"] == [7, 0, 0]
            assert int(column[0]) == 0
    decode(encode([column, torch.ones(1)]))[0][0] = 7
    assert int(column[0]) == 7


def test_a_write_never_reaches_a_file_or_read_only_frames(tmp_path):
    small = {str(i): torch.arange(4) for i in range(3)}
    value = {**small, "large": torch.arange(BIG)}
    path = tmp_path / "value.jag"
    dump(value, path, checksum=True)
    before = path.read_bytes()
    frames = receive(encode(value), bytes)
    sent = receive(frames)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for found in (jagcodec.load(path, mmap=True), decode(mapped), decode(frames)):
            assert_same(found, value)
            # They are copied at once.
            pointers = [found[name].data_ptr() for name in small]
            assert [b - a for a, b in itertools.pairwise(pointers)] == [64, 64]
            for tensor in found.values():
                tensor.fill_(-1)
            assert (path.read_bytes(), frames) == (before, sent)


def test_one_column_pickles_and_saves_as_one_column():
    td = trip(TensorDict({"a": torch.zeros(100_000), "b": torch.zeros(3), "c": torch.zeros(4)}, []))
    assert td["b"].untyped_storage().nbytes() == 12
    stream = io.BytesIO()
    torch.save(td["b"], stream)
    assert len(stream.getvalue()) < 5000
    assert len(pickle.dumps(td["b"])) < 1000
    back = trip({"rows": [*torch.arange(60).view(30, 2).split([7, 0, 20, 3])]})["rows"]
    assert len({view.untyped_storage().data_ptr() for view in back}) == 1


def test_columns_of_equal_rows_are_one_group_whatever_object_they_came_in():
    a, b = (jagged(torch.ones(5), np.array([0, 2, 5], width)) for width in (np.int64, np.int32))
    td = TensorDict({"a": a, "b": b}, [2])
    with pytest.raises(RuntimeError):
        td["a"] * td["b"]
    back = trip(td)
    assert (back["a"] * back["b"]).values().tolist() == [1.0] * 5
    assert back["a"].offsets().dtype == back["b"].offsets().dtype == torch.int64


def test_what_is_sent_once_comes_back_apart():
    values = torch.arange(1000).remainder(7)
    ids = nested([values[:300], values[300:]])
    td = TensorDict({"a": ids, "b": ids.clone(), "n": torch.rand(2, 500)}, batch_size=[2])
    td["m"] = td["n"].clone()
    rows = [{"pixels": torch.rand(60, 100)}] * 2 + [{"pixels": torch.ones(60, 100)} for _ in (0, 1)]
    frames = encode([td, NonTensorStack(*rows)], elide=True)
    back, items = decode(receive(frames))
    items = items.tolist()
    assert_same([back, items], [td, rows])
    back["a"].values().zero_()
    back["n"].zero_()
    assert_same([back["b"], back["m"]], [td["b"], td["m"]])
    # One object stays one; equal ones stay apart.
    assert (items[0] is items[1], items[2] is items[3]) == (True, False)
    items[2]["pixels"].zero_()
    assert_same(items[3], rows[3])
    # Also next to a tensor.
    few: list[Any] = [torch.ones(1), *([] for _ in range(41))]
    found = decode(encode(NonTensorStack(*few, few[-1]), elide=True)).tolist()
    assert found[1:] == [[]] * 42
    assert len({id(row) for row in found[1:42]}) == 41


def test_the_device_of_what_arrives():
    device: Any
    for device in ("foo", 3.5, "cuda:99"):
        with pytest.raises(ValueError, match=r"decode\(device\)"):
            decode(encode(1), device=device)
    assert trip(TensorDict({"a": torch.ones(2)}, [2]), device="cpu").device == torch.device("cpu")
    meta = trip(
        [torch.ones(2), jagcodec.stack_or_nest([torch.ones(1), torch.ones(2)])], device="meta"
    )
    assert [t.device.type for t in meta] == ["meta", "meta"]


# --- an open message ---------------------------------------------------------------------------


def large():
    """Three rows of two large columns, as a message."""
    fields = {"a": torch.arange(12_000).view(3, 4000), "b": torch.arange(12_000.0).view(3, 4000)}
    return jagcodec.encode_fields(fields, lengths=LENGTHS * 1000, token_aligned_fields=fields)


def test_contiguous_rows_alias_writable_memory():
    frames = receive(large())
    values = open_wire(frames).select(["b"]).rows(slice(1, 3)).to_tensordict()["b"].values()
    assert 0 < values.data_ptr() - address(frames[3]) < len(frames[3])
    assert len(pickle.dumps(values)) < 4 * 6000 + 1000
    apart = open_wire(receive(frames, bytes)).select(["b"]).rows(slice(1, 3))
    values = apart.to_tensordict()["b"].values()
    values.zero_()
    assert values.untyped_storage().nbytes() == 4 * 6000


def test_what_is_sent_on_is_neither_copied_nor_writable():
    frames = receive(large(), bytes)
    batch = open_wire(frames)
    sent, part = batch.to_frames(), batch.select(["b"]).to_frames()
    assert [address(frame) for frame in sent[2:]] == [address(frame) for frame in frames[2:]]
    assert all(memoryview(frame).readonly for frame in sent)
    assert (address(part[2]), len(part) < len(frames)) == (address(frames[3]), True)


def test_reading_again_takes_nothing_of_the_limits():
    images = NonTensorStack(*[NonTensorData({"px": torch.ones(3)}) for _ in range(8)])
    frames = encode(TensorDict({"img": images}, [8]))
    batch = open_wire(frames, limits=Limits(objects=36))
    for _ in range(100):
        assert len(batch["img"]) == len(batch.to_tensordict()["img"]) == 8
    less = open_wire(frames, limits=Limits(objects=35))
    refused(less.__getitem__, "img", "too_large", says="the limit 'objects'")


def test_an_open_message_keeps_nothing_of_what_was_chosen_or_built():
    stack = LazyStackedTensorDict(*[TensorDict({"x": torch.ones(i)}, []) for i in (1, 2, 2)])
    batch = open_wire(encode(TensorDict({"ids": nested(IDS), "s": stack}, [3])))

    def held():
        parts = [getattr(message_in(batch), name) for name in message_in(batch).__slots__]
        return sum(len(part) for part in parts if isinstance(part, (dict, list, set)))

    whole = held()
    for i in range(50):
        batch.select(["ids"]).rows(np.array([i % 3, 0])).to_tensordict()
        batch["s"]
    assert held() - whole <= 4  # rows of the group, and the column


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor


def test_user_code_never_writes_to_memory_that_is_only_to_be_read():
    jagcodec.register_type(
        *(Scaled, "tests.Scaled"),
        to_state=lambda value: value.x,
        from_state=lambda state: Scaled(state.mul_(0)),  # which changes what it is made of
    )
    batch = jagcodec.BatchedDataDict(
        ids=torch.arange(6000.0).view(3, 2000), v=[Scaled(torch.ones(3))] * 3
    )
    for value in (Scaled(torch.arange(5000.0)), {"ids": torch.ones(3000), "v": batch["v"]}, batch):
        frames = receive(encode(value), bytes)
        before = receive(frames)
        check_message(frames)
        if value is batch:
            open_wire(frames).rows([1, 0]).to_frames()
        assert frames == before


# --- how long memory lives ---------------------------------------------------------------------


@pytest.fixture
def received():
    """A message in arrays, and watches of them. What is freed, is freed by reference counts."""
    gc.collect()
    gc.disable()
    arrays = [np.frombuffer(frame, dtype=np.uint8).copy() for frame in receive(large())]
    yield arrays, [weakref.ref(array) for array in arrays]
    gc.enable()


def test_a_column_keeps_its_frame_alive_and_no_other(received):
    frames, alive = received
    td = decode(frames)
    frames.clear()
    assert alive[0]() is None
    ids = td["a"].values()
    del td
    assert [ref() is not None for ref in alive[2:]] == [True, False]
    assert ids[0] == 0
    del ids
    assert [ref() for ref in alive] == [None] * len(alive)


def test_an_open_message_keeps_its_memory_until_it_is_dropped(received):
    frames, alive = received
    part = open_wire(frames).select(["a"]).rows(slice(0, 1))
    frames.clear()
    assert alive[2]() is not None
    columns = jagcodec.materialize(part)
    del part
    assert alive[2]() is None
    assert columns["a"].shape == (1, 3000)


def test_a_refused_message_is_let_go(received):
    frames, alive = received
    frames[0][-10] ^= 0xFF
    with contextlib.suppress(ValueError):
        decode(frames)
    frames.clear()
    assert [ref() for ref in alive] == [None] * len(alive)


# In a process of its own, and by what it has now: a high-water mark stands where an earlier test or
# the import of torch has left it, and hides what leaks below it.
TRIPS = """
import gc
from jagcodec import decode, encode, materialize, to_blob
from tests.helpers import rollout
from tests.wire.readers import status

def resident(trips):
    for _ in range(trips):
        materialize(decode(to_blob(encode(rollout(), checksum=True))))
    gc.collect()
    return status("VmRSS")

print(-resident(1000) + resident(10_000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_memory_stays_flat():
    assert int(helpers.run_python(TRIPS, path=helpers.ROOT).stdout) < 4096 * 1024


def test_threads_read_one_message_at_once(in_threads):
    """Each gets documents of its own, the rows that it chose, and parts that it cut."""
    meta, payload = {"z": [complex(i, 1) for i in range(40)]}, {"a": [1, {"b": 2j}]}
    td = jagcodec.pack_jagged_fields({"ids": IDS, "more": IDS + 100}, lengths=LENGTHS)
    td["d"] = NonTensorData(payload, batch_size=[3])
    batch = open_wire(encode(td, meta=meta))
    chosen = [open_wire(encode(td)).rows([2, 0]) for _ in range(100)]

    def work():
        for rows in chosen:
            found = rows.to_tensordict()
            assert (found["ids"] * 0 + found["more"]).values().tolist() == [108, 109, 100, 101, 102]
            assert batch.meta == meta
            document = batch["d"][0]
            assert document == payload
            document["a"].append("mine")  # which nobody else sees
            for name, first in (("ids", 0), ("more", 100)):
                part = decode(batch.select([name]).rows(slice(1, 3)).to_frames())
                assert part.keys() == {name}
                assert part[name].values().tolist() == [first + cell for cell in range(4, 10)]

    in_threads(3, work)


def packed():
    """Four columns of 100 rows, of 0, 10, ... 990 cells each."""
    columns = {f"c{i}": torch.arange(100 * 1000).view(100, 1000) + i for i in range(4)}
    lengths = torch.arange(100) * 10
    return jagcodec.encode_fields(columns, lengths=lengths, token_aligned_fields=columns)


# --- what is fetched ---------------------------------------------------------------------------


def test_the_schema_comes_from_the_header_alone():
    frames = encode(rich())
    store = Store(frames)
    batch = open_wire(store)
    assert store.asked == [(0, 24), (24, memoryview(frames[0]).nbytes)]
    assert batch.schema["wide"] == FieldSchema("jagged", torch.int64, (3, 2, None))
    assert batch.schema["flag"] == FieldSchema("tensor", torch.bool, (3,))
    kinds = [batch.schema[n].kind for n in ("names", "note", "inner", "lazy", "sparse")]
    assert kinds == ["object", "object", "tensordict", "lazy_stack", "sparse_coo"]
    assert batch.rows([0]).schema["flag"].shape == (1,)
    assert len(store.asked) == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_source_is_asked_once_for_rectangles_that_are_sent_on(dtype):
    numbers = torch.arange(80).view(10, 8).repeat_interleave(40, 0)
    store = Store(encode(TensorDict({"x": numbers.to(dtype)}, [400]), elide=True))
    part = to_send(open_wire(store).rows([0, 5, 90]))
    assert_same(decode(encode(part))["x"], numbers[[0, 5, 90]].to(dtype))
    assert len(store.asked) == len(set(store.asked)) > 3


def test_an_open_batch_reads_as_a_mapping_does_and_no_column_before_its_turn():
    columns: dict[str, Any] = {"a": torch.arange(BIG), "text": ["x"] * BIG, "b": torch.ones(BIG)}
    store = Store(encode(jagcodec.BatchedDataDict(columns)))
    batch = open_wire(store)
    assert (batch.keys(), [*batch], "a" in batch, "c" in batch) == (
        ("a", "text", "b"),
        ["a", "text", "b"],
        True,
        False,
    )
    before = store.fetched
    items, values = batch.items(), batch.values()
    assert (batch.get("c"), batch.get("c", 7), store.fetched) == (None, 7, before)
    assert next(items)[0] == "a"
    assert before + 8 * BIG <= store.fetched < before + 9 * BIG
    assert torch.equal(next(values), columns["a"])
    assert [name for name, _ in items] == ["text", "b"]
    assert [type(column) for column in values] == [np.ndarray, torch.Tensor]
    assert dict(batch)["text"].tolist() == dict(batch.items())["text"].tolist() == columns["text"]
    with pytest.raises(ArgumentTypeError, match=r"get\(name\): expected the name of a column"):
        batch.get(0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentKeyError, match="expected one of 'a', 'text', 'b', found 'c'"):
        batch["c"]


def test_a_source_is_asked_for_offsets_and_the_cells_of_the_rows():
    store = Store(packed())
    batch = open_wire(store)
    store.asked.clear()
    part = batch.select(["c2"]).rows(slice(10, 12)).to_tensordict()
    assert rows_of(part["c2"]) == [list(range(10002, 10102)), list(range(11002, 11112))]
    assert [size for _, size in store.asked] == [8 * 101, 8 * (100 + 110)]
    store.asked.clear()
    part = batch.select(["c0", "c1"]).rows([3, 4, 90]).to_tensordict()
    assert [size for _, size in store.asked] == [8 * 70, 8 * 900] * 2
    assert (part["c0"] * part["c1"]).values().shape == (970,)


def test_of_a_mapped_file_only_the_chosen_ranges_are_touched(tmp_path):
    """Shown by bytes: everything else is damaged, and that changes nothing."""
    store = Store(packed())
    expected = open_wire(store).select(["c3"]).rows(slice(20, 30)).to_tensordict()
    keep = bytearray(len(store.blob))
    for offset, count in store.asked:
        keep[offset : offset + count] = store.blob[offset : offset + count]
    assert sum(map(bool, keep)) < len(store.blob) / 50
    path = tmp_path / "batch.jag"
    path.write_bytes(keep)
    part = open_wire(path).select(["c3"]).rows(slice(20, 30)).to_tensordict()
    assert_same(part, expected)


@pytest.mark.parametrize("narrow", [False, True])
def test_of_columns_that_repeat_the_cells_of_the_rows_are_fetched(narrow):
    td = helpers.rollouts(prompts=64, repeats=8)
    frames = encode(td, narrow=narrow, elide=True)

    def fetched(rows, name):
        store = Store(frames)
        batch = open_wire(store)
        store.asked.clear()
        assert_same(batch.rows(rows)[name], select_rows(td, list(rows))[name])
        return store.fetched

    cell = 2 if narrow else 8
    # Tables, offsets and indices are those of all rows.
    besides = 2 * 8 * 513 + 8 * 512 + 1000
    for rows in (range(16, 24), [16, 500, 17, 16], range(0)):
        asked, answers = (
            int(td[name].offsets().diff()[list(rows)].sum()) for name in ("prompts", "responses")
        )
        assert fetched(rows, "prompts") <= besides + cell * asked
        assert fetched(rows, "input_ids") <= 2 * besides + cell * (asked + answers) + 8 * 513


@pytest.mark.parametrize("choose", [slice(2, 5), [3, 1], slice(None)])
def test_rows_that_a_rectangle_only_claims_take_no_memory(choose):
    rows = 1 << 23
    batch = open_wire(encode(TensorDict({"x": torch.empty(rows, 0)}, [rows])))
    chosen = batch if choose == slice(None) else batch.rows(choose)

    def read():
        assert chosen["x"].shape == (len(chosen), 0)
        assert decode(chosen.select(["x"]).to_frames())["x"].shape == (len(chosen), 0)

    assert peak_of(read) < 1 << 20


# --- what is read ------------------------------------------------------------------------------


RAGGED = forge.jagged(dim=2, shape=[3, 4]), forge.int64s(0, 2, 4) + bytes(12)
TURN = forge.tensordict([2], {"tokens": forge.tensor(shape=[2])})
TURNS = forge.node("USER", "tests.wire.values.Turn", children=[TURN]), b"ab"
STRIDED = forge.strided_nested(3, 2, 1, (0, 16)), forge.int64s(1, 2) + b"abc"


@pytest.mark.parametrize(
    ("sizes", "column", "reason"),
    [
        ([2, 5], RAGGED, "bad_rows"),
        ([2, 3, 4], RAGGED, "bad_rows"),
        ([3], STRIDED, "bad_value"),
        ([3], TURNS, "bad_rows"),
        # tensordict would change the size of these to that of the batch around them
        ([1], (forge.tensordict([2], {}), b""), "bad_rows"),
        ([1, 3], (forge.tensordict([1, 4], {}), b""), "bad_rows"),
        ([1, 3], (forge.tensordict([1], {}), b""), "bad_rows"),
        ([1], (forge.payload("x", 2), b""), "bad_rows"),
        ([1, 3], (forge.payload("x", 1, 4), b""), "bad_rows"),
        ([1, 3], (forge.payload("x", 1), b""), "bad_rows"),
    ],
)
def test_columns_have_the_dims_of_their_batch(sizes, column, reason):
    leaf, payload = column
    groups = [[0, 0, 2, 2, 2]] * (column is RAGGED)
    frames = forge.message(forge.tensordict(sizes, {"x": leaf}), payload, groups=groups)
    # tensordict itself refuses these dims of tensors, when it gets all columns.
    refused(decode, frames, reason, "$" if reason == "bad_value" else "$.x")
    for read in (
        lambda batch: batch["x"],
        lambda batch: batch.to_tensordict(),
        lambda batch: batch.rows([sizes[0] - 1]).to_tensordict(),
    ):
        refused(read, open_wire(frames), "bad_rows", "$.x", says=re.escape(f"{sizes}"))


@pytest.mark.parametrize("at", range(0, 9))
def test_complex_cells_at_any_address_that_numpy_allows(at):
    """torch copies rows of complex128 by instructions that end the process 8 bytes off."""
    cells = np.arange(250).reshape(10, 25).astype(np.complex128)
    given = torch.from_numpy(at_odd_address(cells, at).view(np.complex128).reshape(10, 25))[:, 1:6]
    assert given.data_ptr() % 16 == at
    assert decode([at_odd_address(frame, at) for frame in encode([given])])[0].data_ptr() % 8 == 0
    assert_same(decode(encode(given)), torch.from_numpy(cells)[:, 1:6])

    batch = TensorDict(
        {"c": jagcodec.stack_or_nest([torch.from_numpy(cells[:n]) for n in (2, 5, 3)])}, [3]
    )
    opened = open_wire([at_odd_address(frame, at) for frame in encode(batch)])
    for rows in ([0, 1, 2], [1, 2], [2, 0]):
        for found in (opened.rows(rows).to_tensordict(), decode(opened.rows(rows).to_frames())):
            assert_same(found, select_rows(batch, rows))


def test_the_rows_of_a_dict_whose_first_column_is_a_list_of_views():
    opened = open_wire(encode(REGISTERED["batched_data_dict_of_views"]()))
    assert (len(opened), opened["r"].tolist()) == (3, [1, 1, 1])
    assert [len(row) for row in opened["x"].tolist()] == [3, 2, 5]


def test_a_packed_column_has_tensors_as_its_parts():
    parts: dict[str, Any] = {
        name: forge.tensor("int32", (3,)) for name in ("values", "position_ids", "cu_seqlens")
    }
    wrong = [{**parts, name: 3} for name in parts]
    wrong += [{other: parts[other] for other in parts if other != name} for name in parts]
    wrong += [{**parts, "cu_seqlens": forge.tensor("int32", shape)} for shape in ((), (1, 1))]
    for state in (parts, *wrong):
        column = forge.node("USER", PACKED_COLUMN, children=[forge.map_of(state)])
        columns = forge.map_of({"x": column, "y": forge.tensor(shape=(2,))})
        root = forge.node("USER", BATCHED_DATA_DICT, children=[forge.list_of(columns, 0)])
        opened = open_wire(forge.message(root, bytes(64)))
        assert opened.schema["x"].kind == ("jagged" if state is parts else "user")
        if state is not parts:
            refused(opened.__getitem__, "x", says="the state of 'jagcodec.PackedColumn'")


@pytest.mark.parametrize("wrap", [dict, OrderedDict])
@pytest.mark.parametrize(
    "read",
    [
        lambda batch: batch["x"],
        lambda batch: batch.rows([1])["x"],
        lambda batch: batch.row_lengths("x"),
        lambda batch: views_of(batch),
        lambda batch: batch.to_tensordict(),
        lambda batch: batch.rows([1]).to_tensordict(),
        lambda batch: batch.rows([1]).to_frames(),
        jagcodec.materialize,
        lambda batch: jagcodec.materialize([batch, batch]),
    ],
)
def test_offsets_that_do_not_fit_are_the_fault_of_the_caller_or_of_the_sender(read, wrap):
    tokens, offsets = torch.arange(10), torch.zeros(4, dtype=torch.int32)
    columns = wrap({"x": PackedColumn(tokens, offsets, 0, tokens), "y": torch.arange(3)})
    says = "expected values with one dim of 0 tokens by cu_seqlens, found shape"

    # The caller gives a batch in memory.
    with pytest.raises(ArgumentError, match=rf"\['x'\]: {says}"):
        read(open_wire(columns))

    # Its sender gives a batch in a message.
    refused(read, open_wire(encode(BatchedDataDict(columns))), says=rf"\$\.x: {says}")
    inner = open_wire(encode(BatchedDataDict({"n": columns})))
    refused(WireBatch.to_tensordict, inner, says=rf"\$\.n\.x: {says}")


def test_sources_that_return_too_little_or_anything_else():
    refused(open_wire, lambda offset, size: b"", says="24 bytes from the source, found 0")
    refused(open_wire, lambda offset, size: bytes(size), says="preamble")
    blob = jagcodec.to_blob(packed())[: 24 + 2000]
    with pytest.raises(WireFormatError, match=r"^\$\.c\d \(bytes "):
        open_wire(lambda offset, size: blob[offset : offset + size]).to_tensordict()


def test_forged_batches_cost_little():
    # a jagged column without a byte, and 2**40 runs of it
    wide = forge.jagged(dim=2, shape=[2**40, 0], offset=0)
    rows = forge.node("NON_TENSOR_ROWS", numbers=[0, 24, 0, 0, 976])
    many = forge.tensordict([2], {f"{i}": rows for i in range(500)})
    for frames in (
        forge.message(forge.batch(wide), bytes(24), groups=[[0, 0, 2, 0, 0]]),
        forge.message(many, bytes(1000), groups=[[0, 0, 2, 488, 488]]),
        forge.message(forge.tensordict([2**40, 0], {})),
    ):
        read = partial(outcome, lambda m: open_wire(m).rows(slice(None, None, -1)).to_tensordict())
        assert peak_of(read, frames) < 2_000_000
