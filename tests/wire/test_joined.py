"""Several messages as one batch: how they are read, refused, kept, and what they may cost."""

import itertools
import pickle
import re
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from benchmarks import shapes
from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    decode,
    encode,
    encode_rows,
    materialize,
    open_wire,
    to_blob,
)
from jagcodec.columns.batch import storage_of_batch, views_of
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError, JagcodecError, WireFormatError
from jagcodec.produce.fields import encode_fields, pack_jagged_fields
from jagcodec.produce.jagged_tensors import stack_or_nest
from jagcodec.testing import tensors
from jagcodec.train.rows import concat_rows, join_columns, select_rows, split_rows
from jagcodec.wire import spec
from jagcodec.wire.dtypes import CELL_DTYPES
from jagcodec.wire.read import tensor_values
from tests.helpers import MESSAGES, Store, make_batch, nested, receive
from tests.helpers import message as bytes_of
from tests.oracle import assert_same
from tests.strategies import torch_dtypes
from tests.wire.forge import jagged, map_of, message, tensor, tensordict
from tests.wire.readers import outcome, peak_of


def joined(batches, kind="frames"):
    return concat_rows([MESSAGES[kind](encode(batch)) for batch in batches])


LENGTHS = [3, 0, 5, 5, 1, 7, 2]
WHOLE = make_batch(lengths=LENGTHS).select("ids", "experts", "reward", "embedding", "message")
ROWS = split_rows(WHOLE, len(LENGTHS))
FRAMES = [bytes_of(encode(row)) for row in ROWS]


def expected(batches):
    """The batches put together in memory, column by column."""
    return concat_rows([decode(encode(batch)) for batch in batches])


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_join_is_used_like_one_open_message(kind):
    batch = joined(ROWS, kind)
    assert (len(batch), batch.fields) == (7, tuple(WHOLE.keys()))
    assert batch.batch_size == torch.Size([7])
    assert batch.row_lengths("ids").tolist() == LENGTHS
    assert batch.row_lengths("reward") is None
    assert batch.schema["experts"].shape == (7, None, 2)
    assert batch.schema["embedding"].shape == (7, 3)
    assert batch["ids"].offsets() is batch["experts"].offsets()
    for found in (batch, join_columns([batch]), batch.rows([0, 1])):
        assert type(found) is type(open_wire(FRAMES[0]))
        assert list(found) == list(found.keys()) == list(found.fields)
        assert "ids" in found
        assert "other" not in found
        with pytest.raises(ArgumentKeyError, match="other"):
            found["other"]
        with pytest.raises(ArgumentTypeError, match=r"rows\(index\) chooses rows"):
            found[0]  # type: ignore[index]


def test_a_message_is_not_read_until_it_is_asked():
    stores = [Store(encode(WHOLE)), Store(FRAMES[0])]
    batches = [open_wire(store) for store in stores]
    headers = sum(store.fetched for store in stores)
    batch = concat_rows([*split_rows(batches[0], 3), batches[1]]).rows([7, 0]).select(["ids"])
    assert (len(batch), batch.schema["ids"].dtype) == (2, torch.int64)
    assert sum(store.fetched for store in stores) == headers
    assert batch["ids"].values().tolist() == ROWS[0]["ids"].values().tolist() * 2
    assert sum(store.fetched for store in stores) < headers + 200


COLUMNS_THAT_DIFFER = {
    "float32": torch.zeros(2),
    "float64": torch.zeros(2, dtype=torch.float64),
    "cells of 3": torch.zeros(2, 3),
    "no rows": torch.zeros(0, 3),
    "jagged": nested([[1], [2, 3]]),
    "jagged float64": nested([[0.5], [2.0, 3.0]], dtype=torch.float64),
    "objects": NonTensorStack("a", {"b": 1}),
    "arrays": NonTensorStack(np.zeros(2), np.zeros(3)),
    "one object": NonTensorData("a", batch_size=[2]),
    "a batch inside": TensorDict({"x": torch.zeros(2)}, [2]),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_schema_refuses_what_cannot_be_joined_as_a_read_does(kind):
    """Messages 0, 1 and 3 have one column, and message 2 has another."""
    for (a, first), (b, other) in itertools.product(COLUMNS_THAT_DIFFER.items(), repeat=2):
        columns = [first, first, other, first]
        batch = joined([TensorDict({"c": x}, [len(x)]) for x in columns], kind)
        outcomes: list[Any] = []
        for read in (lambda batch: batch["c"], lambda batch: batch.schema):
            try:
                read(batch)
                outcomes.append(None)
            except (ArgumentError, ArgumentTypeError) as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1], (a, b)


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("rows", [[13, 7, 14], slice(6, 15), [7, 14]])
def test_errors_number_messages_as_the_join_does_if_rows_were_chosen(kind, rows):
    dtypes = [torch.float32] * 7 + [torch.float64]
    whole = joined([TensorDict({"c": torch.zeros(2, dtype=dtype)}, [2]) for dtype in dtypes], kind)
    with pytest.raises(ArgumentError) as caught:
        whole.rows(rows)["c"]
    assert caught.value.path == "concat_rows['c'] of batch 7"
    assert "like batch 3," in caught.value.detail


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("order", list(itertools.permutations([[3, 2], [4], [5], [2, 2]])))
def test_batches_of_other_dims_are_refused_in_any_order(kind, order):
    with pytest.raises(ArgumentError) as caught:
        joined([TensorDict({"x": torch.zeros(sizes)}, sizes) for sizes in order], kind)
    first = next(i for i, sizes in enumerate(order) if len(sizes) != len(order[0]))
    assert (caught.value.reason, caught.value.path) == (
        "bad_shape",
        f"concat_rows of batch {first}",
    )
    expected = f"expected the batch dims {order[0][1:]} after the first, found {order[first][1:]}"
    assert caught.value.detail == expected


def test_lists_of_frames_may_change_once_they_were_joined():
    messages = [bytes_of(encode(row, meta={"i": 1})) for row in ROWS]
    batch = concat_rows(messages)
    for frames in messages:
        frames.clear()
    messages.clear()
    assert batch.metas == [{"i": 1}] * len(ROWS)
    assert_same(batch.to_tensordict(), WHOLE)


def test_a_dtype_that_this_torch_has_not_is_for_who_reads_the_column(monkeypatch):
    batch = TensorDict({"a": torch.arange(2), "u": torch.zeros(2, dtype=torch.uint16)}, [2])
    frames = encode(batch)
    monkeypatch.delitem(CELL_DTYPES, "uint16")
    found = concat_rows([frames, frames])
    assert found.select(["a"])["a"].tolist() == [0, 1, 0, 1]
    with pytest.raises(WireFormatError, match="uint16"):
        found["u"]


def test_errors_of_a_small_message_name_the_column_whatever_the_options(monkeypatch):
    """Its columns are read in another way, if there are no options."""
    td = TensorDict({"ids": nested([[1], [2, 3]]), "w": torch.ones(2), "u": torch.arange(2)}, [2])
    frames = encode(td.update({"x": nested([[1], [2, 3]], torch.uint16)}))
    tried: list[tuple[str, dict[str, Any]]] = [("w", {}), ("ids", {"ids": 1}), ("x", {"x": 1})]
    for name, pads in tried:
        dtype = str(td[name].dtype).removeprefix("torch.")
        with monkeypatch.context() as patched:
            patched.delitem(CELL_DTYPES, dtype)
            errors: list[str] = []
            each: list[Any] = [{}, {"pad_to_multiple": 2}]
            for options in each:
                with pytest.raises(WireFormatError, match=dtype) as caught:
                    materialize(frames, pad_value_dict=pads, **options)
                errors.append(str(caught.value))
        assert errors[0] == errors[1]
        assert f"$.{'ids' if dtype == 'int64' else name}:" in errors[0]


@pytest.mark.parametrize("form", [list, lambda frames: [MESSAGES["blob"](frames)]])
def test_a_damaged_message_is_named(form):
    for at in (0, 3, 6):
        head, payload = bytes(form(FRAMES[at])[0]), bytes(form(FRAMES[at])[-1])
        for frame, data in ((-1, payload[:-1]), (-1, b""), (0, b"x" + head[1:]), (0, head[:40])):
            messages = [form(frames) for frames in FRAMES]
            messages[at][frame] = data
            with pytest.raises(WireFormatError, match=f"message {at}: "):
                materialize(messages)
    damaged = [receive(frames) for frames in FRAMES]
    for i, frames in enumerate(damaged):
        rows = TensorDict({"x": nested([[1, 2], [3] * i])}, [2])
        frames[:] = [bytearray(frame) for frame in encode(rows)]
    damaged[3][1][72:80] = (9).to_bytes(8, "little")  # after 5 cells: the offsets 0, 9, 5
    with pytest.raises(WireFormatError, match="message 3: "):
        concat_rows(damaged).row_lengths("x")
    summed = [receive(encode(row, checksum=True)) for row in ROWS]
    materialize(summed)
    summed[4][1][-1] ^= 1
    with pytest.raises(WireFormatError, match="message 4: frame 1: expected a CRC-32") as caught:
        materialize(summed)
    assert caught.value.reason == "bad_checksum"


WITH_MORE = ROWS[0].select("ids").set("all", NonTensorData("whole", batch_size=[1]))


@pytest.mark.parametrize(
    ("batch", "options", "bits"),
    [
        (ROWS[0], {}, range(8)),
        (expected(ROWS[2:6]), {}, (0, 5)),
        (WITH_MORE, {"meta": {"step": 3}}, range(8)),
        (ROWS[0], {"checksum": True, "narrow": True}, (0, 7)),
    ],
)
@pytest.mark.parametrize("form", [list, to_blob])
def test_every_bit_of_a_header_is_checked_as_in_one_message(batch, options, bits, form):
    """The check of many messages at once takes nothing that the check of one refuses."""
    frames, refused = bytes_of(encode(batch, **options)), 0
    whole = form(frames)
    # `open_wire` leaves checksums of frames to those who read them.
    read = decode if "checksum" in options else lambda frames: open_wire(frames).to_tensordict()
    for at, bit in itertools.product(range(len(frames[0])), bits):
        header = bytearray(frames[0])
        header[at] ^= 1 << bit
        damaged = form([bytes(header), *frames[1:]])
        alone = outcome(read, damaged)
        bad = isinstance(alone, WireFormatError)
        refused += bad
        for first in (damaged, whole):
            together = outcome(lambda m: concat_rows(m).to_tensordict(), [first, damaged])
            if bad:
                error = JagcodecError if first is whole else WireFormatError
                assert isinstance(together, error), (at, bit, together)
            elif first is damaged:
                assert_same(together, concat_rows([alone, alone]))
    assert refused > 20 * len(bits)


def test_headers_of_another_writer_are_read_as_well():
    """One that writes sizes in more bytes than they need."""
    messages = [list(frames) for frames in FRAMES]
    for frames in messages[1::2]:
        fields = msgpack.unpackb(frames[0])
        parts = {name: msgpack.packb(part) for name, part in fields.items()}
        for name in ("numbers", "values"):
            parts[name] = b"\xc6" + len(fields[name]).to_bytes(4, "big") + fields[name]
        named = [msgpack.packb(name) + part for name, part in parts.items()]
        frames[0] = frames[0][:1] + b"".join(named)
        assert msgpack.unpackb(frames[0]) == fields
    assert_same(concat_rows(messages).to_tensordict(), WHOLE)


def test_numbers_that_repeat_the_bytes_around_them():
    """Numbers that begin with the bytes that stand before them are found where they are."""
    for rows in (0, 1, 256, 1 << 16):
        batch = TensorDict({f"c{i}": torch.zeros(rows, 0) for i in range(5)}, [rows])
        assert_same(joined([batch] * 3).to_tensordict(), concat_rows([batch] * 3))


def test_dims_whose_product_is_no_number_are_refused_beside_one_of_zero():
    wide = {"a": tensor("uint8", (0, 2**62, 4))}
    rows = {"a": jagged(0, 1, (4, 0, 2**62)), "b": tensor("uint8", (1,))}
    two = message(tensordict([1], rows), bytes(64), groups=[(0, 0, 1, 4, 4)])
    for frames in (message(tensordict([0], wide)), two):
        with pytest.raises(WireFormatError):
            open_wire(frames)
        with pytest.raises(WireFormatError, match="message 0"):
            concat_rows([frames, frames])


def test_offsets_of_every_message_are_checked():
    batches = [expected(ROWS[:3]), expected(ROWS[3:])]
    for at, offsets in enumerate((np.array([0, 3, 3, 8]), np.array([0, 5, 6, 13, 15]))):
        listed = [receive(encode(batch)) for batch in batches]
        place = listed[at][1].index(offsets.tobytes())
        for k, wrong in itertools.product(range(len(offsets)), (-1, 1, 1 << 40, -(1 << 62))):
            forged = offsets.copy()
            forged[k] += wrong
            listed[at][1][place : place + forged.nbytes] = forged.tobytes()
            with pytest.raises(WireFormatError, match=f"message {at}"):
                materialize(listed)


def test_offsets_may_be_in_a_frame_of_their_own():
    rows = [[i] * (i % 3) for i in range(3000)]
    batches = [TensorDict({"x": nested(rows[n:] + [[n]])}, [3001 - n]) for n in (0, 1)]
    frames = [encode(batch) for batch in batches]
    assert len(frames[0]) > 2
    assert_same(concat_rows(frames).to_tensordict(), concat_rows(batches))


def test_meta_travels_next_to_the_columns():
    meta = {"step": 3, "version": ("a", 1), 5: {1, 2}, "big": 1 << 80}
    frames = encode(ROWS[0], meta=meta)
    batch = open_wire(frames)
    assert (batch.meta, batch.metas) == (meta, [meta])
    assert open_wire(batch.select(["ids"]).rows([0]).to_frames()).meta == meta
    assert_same(decode(frames), decode(FRAMES[0]))
    assert materialize(frames).meta_info == meta
    assert "step" not in materialize(frames, container=dict)
    for info in ({"a": None}, {}, None):
        frames = encode_fields({"x": torch.ones(2)}, lengths=None, meta=info)
        assert open_wire(frames).meta == (info or {})
    with pytest.raises(ArgumentTypeError, match="meta: expected a mapping"):
        encode(ROWS[0], meta=[1])  # type: ignore[call-overload]
    for value in (torch.ones(2), np.ones(2), b"x" * 100_000):
        with pytest.raises(JagcodecError, match="meta: expected values without tensors"):
            encode(ROWS[0], meta={"a": value})


def test_meta_of_a_join_is_what_all_agree_on_and_of_joined_columns_what_none_contradicts():
    texts = ("aa", "bb", "c", "", "bb", "aa", "dddd")
    metas: list[Any] = [{"step": 3, "uid": text} for text in texts]
    metas[1]["only"] = 1
    messages = [encode(row, meta=meta) for row, meta in zip(ROWS, metas, strict=True)]
    for batch in (concat_rows(messages), concat_rows(map(open_wire, messages))):
        assert (batch.meta, batch.metas) == ({"step": 3}, metas)
        assert open_wire(batch.to_frames()).meta == {"step": 3}
        assert batch.metas[0] is not batch.metas[5]
    assert materialize(messages).meta_info == {"step": 3}
    batch = concat_rows([*messages, FRAMES[0]])
    assert (batch.meta, batch.metas) == ({}, [*metas, {}])
    metas = [{"step": 3, "worker": 0}, {}, {"step": 3, "worker": 1, "scored": True}]
    batch = join_columns([encode(WHOLE, meta=meta) for meta in metas], replace=True)
    assert (batch.meta, batch.metas) == ({"step": 3, "scored": True}, metas)
    in_memory = [materialize(encode(WHOLE, meta=meta), layout="jagged") for meta in metas]
    assert join_columns(in_memory, replace=True).meta_info == batch.meta
    assert open_wire(encode(batch, meta={"step": 4})).meta == {"step": 4, "scored": True}
    data = BatchedDataDict(WHOLE.items(), meta_info={"step": 7, "seed": 1})
    opened = open_wire(encode(WHOLE, meta={"step": 7, "more": 2}))
    forms: list[Any] = [data, encode(WHOLE, meta={"step": 7, "seed": True}), opened]
    assert concat_rows(forms).meta_info == materialize(forms).meta_info == {"step": 7}
    assert join_columns(forms, replace=True).meta == {"step": 7, "more": 2}


def test_batches_in_values_are_opened():
    for value, meta in (
        ({"step": 3, "batch": WHOLE, "note": {"a": [1]}}, {"step": 3, "note": {"a": [1]}}),
        (BatchedDataDict(WHOLE.items(), meta_info={"t": 0.5}), {"t": 0.5}),
    ):
        frames = encode(value)
        batch, found = open_wire(frames), materialize(frames)
        assert batch.meta == found.meta_info == meta
        assert_same(batch.to_tensordict(), WHOLE)
        assert_same(dict(found), dict(materialize(WHOLE)))
    two = [encode({"batch": WHOLE, "step": i}) for i in range(2)]
    assert concat_rows(map(open_wire, two)).metas == [{"step": 0}, {"step": 1}]
    assert materialize(two)["ids"].shape == (14, 7)
    for other in ({"a": WHOLE, "b": WHOLE}, [WHOLE], {"step": 3}, [1], {"a": [1]}):
        with pytest.raises(WireFormatError, match="use decode"):
            open_wire(encode(other))
        for batches in ([FRAMES[0], encode(other)], [encode(other), FRAMES[0]]):
            for read in (concat_rows, materialize, lambda batches: join_columns(batches)):
                with pytest.raises(
                    WireFormatError, match=r"encode_fields\(.*encode_rows\("
                ) as caught:
                    read(batches)
                assert not re.search(r"decode|MAP|VALUE|LIST", str(caught.value))
    inner = {"p": WHOLE.select("reward"), "q": WHOLE.select("reward") + 100}
    outer = open_wire(encode(TensorDict(inner, [7])))
    found = concat_rows([outer["p"], outer["q"]]).to_tensordict()
    assert_same(found, concat_rows([*inner.values()]))


def test_a_batch_is_encoded_with_all_options_and_pickled_as_what_was_chosen():
    scores = TensorDict({"score": torch.arange(7)}, [7])
    one = open_wire(encode(WHOLE, meta={"step": 1}))
    both = join_columns([one, encode(scores, meta={"step": 1})])
    for batch in (one, concat_rows([one.rows([0, 1]), one]), both):
        assert open_wire(encode(batch, meta={"other": 2})).meta == {"step": 1, "other": 2}
        value = batch.to_tensordict()
        for options in ({"checksum": True}, {"narrow": True}, {"compress": "zstd"}):
            assert encode(batch, **options) == encode(value, **options, meta={"step": 1})
        part = batch.select(["ids", "message"]).rows([2, 0])
        for protocol in (2, 4, 5):
            data = pickle.dumps(part, protocol)
            assert len(data) < 2000
            assert_same(pickle.loads(data).to_tensordict(), part.to_tensordict())
    with pytest.raises(ArgumentKeyError, match="narrow"):
        encode(one, narrow=["no column"])


@pytest.mark.parametrize("kind", ["open", "fetched", "joined"])
def test_rows_of_a_narrow_message_are_sent_narrow(kind):
    ids = torch.arange(40).view(8, 5)
    td = pack_jagged_fields({"ids": ids, "score": ids.float()}, lengths=[5] * 8)
    td["inner"] = TensorDict({"ids": ids, "wide": ids * 1000}, [8])
    td["grid"] = ids * 1000
    frames = encode(td, narrow=["ids", ("inner", "ids")])
    batch = MESSAGES["open" if kind == "joined" else kind](frames)
    if kind == "joined":
        batch = concat_rows([batch.rows(slice(0, 3)), batch.rows(slice(3, 8))])
    part, rows = batch.rows([6, 1, 1]), select_rows(td, [6, 1, 1])
    sent = open_wire(part.to_frames())
    assert storage_of_batch(sent).narrow == [("ids",), ("inner", "ids")]
    assert_same(sent.to_tensordict(), rows)
    assert encode(part, narrow=["ids"]) == part.to_frames()
    every = storage_of_batch(open_wire(encode(part, narrow=True))).narrow
    assert every == [("ids",), ("inner", "ids"), ("inner", "wide"), ("grid",)]


def test_rows_that_are_chosen_of_an_elided_message_stay_elided_where_that_pays():
    ids = torch.randint(0, 1 << 62, (1, 4000)).repeat(6, 1)
    td = pack_jagged_fields({"ids": ids}, lengths=[4000] * 6)
    whole = open_wire(encode(td, elide=True))
    for rows in ([5, 0, 3], [2]):
        part = whole.rows(rows)
        joined = concat_rows([part, part])
        for batch, times in ((part, 1), (part.select(["ids"]), 1), (joined, 2)):
            for frames in (batch.to_frames(), encode(batch), encode(batch, elide=True)):
                assert 32_000 <= sum(map(len, map(bytes, frames))) < 32_000 * times + 1000
                assert_same(decode(frames), select_rows(td, rows * times))


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_that_share_cells_in_their_messages_share_them_in_a_join(narrow):
    """Of one run each, and of two: the cells of a prompt and those of a response."""

    def rollouts(seed):
        numbers = torch.Generator().manual_seed(seed)
        prompts = torch.randint(0, 50_000, (1, 700), generator=numbers).repeat(4, 1)
        responses = torch.randint(0, 50_000, (4, 90), generator=numbers)
        both = torch.cat([prompts, responses], 1)
        each = {"prompts": prompts, "responses": responses, "ids": both}
        return TensorDict({name: nested(column) for name, column in each.items()}, [4])

    batches = [rollouts(seed) for seed in range(3)]
    batch = concat_rows([open_wire(encode(b, elide=True, narrow=narrow)) for b in batches])
    for order in (slice(None), [11, 0, 0, 7]):
        part, rows = batch.rows(order), select_rows(expected(batches), order)
        for name, view in views_of(part).items():
            assert sum(len(buffer) for buffer in view.memory) < 3 * 5 * 800 * 8, name
        assert_same(part.to_tensordict(), rows)
        assert_same(dict(materialize(part)), dict(materialize(rows)))


@given(st.integers(2, 3), torch_dtypes(), st.data())
def test_rows_of_any_ragged_dim_are_joined_as_views(dim, dtype, data):
    """A nested tensor made of each message takes most of the time of a join."""
    lengths = st.lists(st.integers(0, 4), min_size=1, max_size=3)
    counts = data.draw(st.lists(lengths, min_size=2, max_size=4))
    before = (2, 3)[: dim - 1]
    shapes_of = [[(*before, n, 2) for n in lengths] for lengths in counts]
    each = [[data.draw(tensors(shape, dtype)) for shape in own] for own in shapes_of]
    rows = [*itertools.chain.from_iterable(each)]
    columns = [stack_or_nest(own, always_nest=True, ragged_dim=dim) for own in each]
    batches = [TensorDict({"x": column}, [len(column)]) for column in columns]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    for order in (range(len(rows)), chosen):
        part = joined(batches).rows(order)
        with mock.patch.object(tensor_values, "nested_tensor", side_effect=AssertionError):
            (view,) = views_of(part).values()
        expected_rows = [rows[i] for i in order]
        assert_same(part["x"], stack_or_nest(expected_rows, always_nest=True, ragged_dim=dim))
        assert view.row_splits.lengths.tolist() == [row.shape[dim - 1] for row in expected_rows]


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_joins_send_pickled_objects_on_unread(allow_pickle):
    frames = encode(TensorDict({"a": NonTensorStack(NonTensorData(slice))}, [1]), allow_pickle=True)
    opened = open_wire(frames, allow_pickle=allow_pickle)
    for batch in (concat_rows([opened, opened]), join_columns([opened])):
        sent = batch.to_frames()
        assert list(decode(sent, allow_pickle=True)["a"]) == [slice] * len(batch)
        with pytest.raises(WireFormatError, match="without pickle"):
            decode(sent)


# --- what messages may cost, whatever they claim -----------------------------------------------


def test_a_hundred_thousand_messages():
    frames = bytes_of(encode_fields({"ids": torch.arange(2).view(1, 2)}, lengths=[2]))
    found = materialize([frames] * 100_000)["ids"]
    assert found.shape == (100_000, 2)
    assert found[-1].tolist() == [0, 1]


def test_columns_of_very_many_dims_are_joined_one_by_one():
    deep = torch.arange(12).view(2, *[1] * 8, 2, 3)
    batch = TensorDict({"deep": deep, "flat": torch.ones(2)}, [2])
    assert_same(concat_rows([encode(batch)] * 3).to_tensordict(), concat_rows([batch] * 3))
    many = {f"c{i}": tensor("uint8", (), 0, i) for i in range(2000)}
    many["deep"] = tensor("uint8", (1,) * 64, 0, 2000)
    frames = message(map_of(many), bytes(2001))

    def refuse():
        with pytest.raises(JagcodecError):
            concat_rows([frames] * 16)

    assert peak_of(refuse) < 20 * 16 * len(bytes(frames[0]))


def test_rows_that_messages_claim_take_no_memory_for_each():
    rows = 1 << 22
    frames = encode(TensorDict({"x": NonTensorData(1, batch_size=[rows])}, [rows]))
    assert sum(map(len, frames)) < 200

    def join():
        batch = concat_rows([frames, frames])
        assert (len(batch), batch.rows([5, rows + 7])["x"].tolist()) == (2 * rows, [1, 1])
        assert batch.to_tensordict().batch_size == (2 * rows,)
        batch = concat_rows([open_wire(frames), open_wire(frames).rows([0]), open_wire(frames)])
        assert len(batch) == 2 * rows + 1
        assert batch.to_tensordict().get("x").data == 1
        assert batch.rows(slice(5, None)).to_tensordict().batch_size == (2 * rows - 4,)
        assert decode(batch.to_frames()).get("x").data == 1

    assert peak_of(join) < 1 << 20


def test_a_dict_of_columns_claims_no_more_rows_than_a_tensordict():
    def claims(rows):
        return encode(BatchedDataDict({"x": torch.empty(rows, 0), "y": torch.empty(rows, 0, 2)}))

    def join():
        batch = concat_rows([open_wire(claims(1 << 24)), open_wire(claims(1 << 24)).rows([3])])
        assert batch.to_tensordict()["y"].shape == ((1 << 24) + 1, 0, 2)
        assert batch["x"].shape == ((1 << 24) + 1, 0)

    assert peak_of(join) < 1 << 20
    with pytest.MonkeyPatch.context() as patch:  # for a writer that lacks the check
        patch.setattr(spec, "MAX_UNBACKED_ROWS", 1 << 28)
        frames = claims(1 << 28)
    with pytest.raises(WireFormatError, match="16777216 rows at most"):
        open_wire(frames)


def test_rows_of_all_batches_add_up_below_two_to_the_63():
    rows = 1 << 24
    batch = open_wire(encode(TensorDict({"x": NonTensorData(1, batch_size=[rows])}, [rows])))
    for _ in range(3):
        batch = concat_rows([batch.rows(slice(None))] * (1 << 12))
    assert len(batch) == 1 << 60
    assert len(concat_rows([batch.rows(slice(None))] * 7)) == 7 << 60
    with pytest.raises(ArgumentError, match=r"^concat_rows: expected dims .* fewer than 2\*\*63"):
        concat_rows([batch.rows(slice(None))] * 8)


@pytest.mark.parametrize("inside", [True, False])
def test_nested_batches_over_one_ragged_group_share_its_rows(inside):
    """Else memory grows with the number of columns times the number of rows."""
    rows = 4000
    none = torch.nested.nested_tensor_from_jagged(
        torch.zeros(0), torch.zeros(rows + 1, dtype=torch.int64), min_seqlen=0, max_seqlen=0
    )
    leaf = TensorDict({"x": none}, [rows]) if inside else none
    frames = bytes_of(encode(TensorDict({f"c{i}": leaf for i in range(200)}, [rows])))
    assert sum(map(len, frames)) < 60_000
    for read in (
        lambda: materialize([frames, frames], "jagged"),
        lambda: open_wire(frames).rows(slice(0, rows - 1)).to_tensordict(),
    ):
        found: list[Any] = []
        assert peak_of(lambda read=read, found=found: found.append(read())) < 3 << 20
        columns = [column["x"] if inside else column for column in found[0].values()]
        assert len({id(column.offsets()) for column in columns}) == 1


def test_cells_smaller_than_their_place_are_gathered():
    """Where a row begins takes 8 bytes; of columns with less, nothing is kept for each row."""
    rows, columns = 5000, 100
    mask = torch.ones(rows, 1, dtype=torch.bool)
    frames = encode_fields({f"m{i}": mask for i in range(columns)}, lengths=[1] * rows)
    batch = concat_rows([open_wire(frames), open_wire(frames)])
    for part in (batch, batch.rows(torch.arange(2 * rows).flip(0))):
        assert peak_of(lambda part=part: views_of(part)) < 4 << 20
        assert materialize(part)["m7"].sum() == 2 * rows


def test_what_was_chosen_of_a_join_is_not_kept():
    frames = encode_fields({"ids": torch.arange(14).view(2, 7)}, lengths=[3, 7])
    batch = concat_rows([open_wire(frames) for _ in range(4)])

    def choose(times):
        for i in range(times):
            materialize(batch.rows([i % 7, 0, 1, 2] * 50))

    choose(300)
    assert peak_of(choose, 300) < 60_000


def test_packing_and_padding_hold_the_result_once():
    batch = shapes.make_batch(shapes.lengths_of(shapes.DESIGN)[:512])

    def packed():
        return encode_fields(batch.columns, lengths=batch.lengths, token_aligned_fields=shapes.PADS)

    frames = packed()
    assert peak_of(packed) <= 1.1 * batch.valid_bytes + 2**18
    assert sum(memoryview(frame).nbytes for frame in frames) <= 1.01 * batch.valid_bytes + 8192
    padded = peak_of(lambda: materialize(frames, pad_value_dict=shapes.PADS))
    assert padded <= 1.1 * batch.padded_bytes + 2**18


def test_chosen_rows_of_equal_lengths_share_one_offsets_tensor():
    """Also those of columns whose other rows have other lengths."""
    frames = encode_rows({"a": [[1, 2], [3, 4, 5]], "b": [[1, 2], [3, 4, 5, 6]]})
    for batch in (open_wire(frames), concat_rows([frames, frames])):
        td = batch.rows([0]).to_tensordict()
        assert (td["a"] * td["b"]).values().tolist() == [1, 4]
