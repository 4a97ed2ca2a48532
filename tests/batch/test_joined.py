"""Several messages as one batch: rows one after the other, and columns side by side."""

import pickle
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    JagcodecError,
    WireBatch,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    encode_fields,
    join_columns,
    materialize,
    open_wire,
    pack_jagged_fields,
    rowcopy,
    select_rows,
    split_rows,
    to_blob,
)
from jagcodec.batch.join import join_rows
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.testing import jagged_batches
from jagcodec.wire.dtypes import DTYPES
from tests.oracle import assert_same, rows_of
from tests.strategies import tensordicts
from tests.wire.forge import jagged, map_of, message, tensor, tensordict

KINDS = ["frames", "blobs", "opened", "fetched"]


def messages_of(batches, kind, **options):
    """Messages as `materialize` takes several of them."""
    listed = [encode(batch, **options) for batch in batches]
    if kind == "frames":
        return listed
    if kind == "blobs":
        return [[to_blob(frames)] for frames in listed]
    if kind == "opened":
        return list(map(open_wire, listed))
    blobs = list(map(to_blob, listed))
    return [open_wire(lambda a, n, blob=blob: blob[a : a + n]) for blob in blobs]  # type: ignore[misc]


def joined(batches, kind="frames", **options):
    messages = messages_of(batches, kind, **options)
    if isinstance(messages[0], WireBatch):
        return concat_rows(messages)
    return join_rows(messages, "test")


def row_of(i, length, *, offset=0):
    """A batch of one row whose cells say where they are from."""
    ids = torch.arange(length) + 1000 * i + offset
    return TensorDict(
        {
            "ids": torch.nested.nested_tensor([ids], layout=torch.jagged),
            "pairs": torch.nested.nested_tensor(
                [torch.stack([ids, -ids], 1).float()], layout=torch.jagged
            ),
            "reward": torch.tensor([float(i)]),
            "grid": torch.full((1, 2, 3), i, dtype=torch.int16),
            "text": NonTensorStack(NonTensorData(f"row {i}")),
        },
        [1],
    )


LENGTHS = [3, 0, 5, 5, 1, 7, 2]
ROWS = [row_of(i, length) for i, length in enumerate(LENGTHS)]


def expected(batches):
    """What `concat_rows` makes of the same batches in memory, one column at a time."""
    return concat_rows([decode(encode(batch)) for batch in batches])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("narrow", [False, True])
def test_messages_of_one_row_become_one_batch(kind, narrow):
    batch = joined(ROWS, kind, narrow=narrow)
    assert isinstance(batch, WireBatch)
    assert (len(batch), batch.fields) == (7, ("ids", "pairs", "reward", "grid", "text"))
    assert batch.batch_size == torch.Size([7])
    found = batch.to_tensordict()
    assert_same(found, expected(ROWS))
    assert [row.tolist() for row in found["ids"].unbind()] == [
        [1000 * i + j for j in range(length)] for i, length in enumerate(LENGTHS)
    ]
    assert found["ids"].offsets() is found["pairs"].offsets()
    assert batch.row_lengths("ids").tolist() == LENGTHS
    assert batch.row_lengths("reward") is None
    assert batch.schema["pairs"].shape == (7, None, 2)
    assert batch.schema["grid"].shape == (7, 2, 3)
    assert batch["text"].tolist() == [f"row {i}" for i in range(7)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rectangle_is_made_of_all_messages(kind):
    messages = messages_of(ROWS, kind)
    options: Any = {"pad_value_dict": {"ids": -1}, "pad_to_multiple": 4, "padding_side": "left"}
    whole = materialize(expected(ROWS), **options, attention_mask_of="ids")
    found = materialize(messages, **options, attention_mask_of="ids")
    assert list(found) == list(whole)
    for name in whole:
        assert_same(found[name], whole[name])
    assert found["ids"].shape == (7, 8)
    for layout in ("jagged", "packed"):
        assert_same(
            materialize(messages, layout)["pairs"], materialize(expected(ROWS), layout)["pairs"]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_chosen_across_messages(kind):
    whole = expected(ROWS)
    batch = joined(ROWS, kind)
    for index in ([6, 0, 6, 2], slice(2, 5), slice(6, 0, -2), [], [True] * 3 + [False] * 4, 3):
        part = batch.rows(index)
        assert isinstance(part, WireBatch)
        assert_same(part.to_tensordict(), select_rows(whole, index))
        again = part.select(["text", "ids"]).rows(slice(0, 1))
        assert again.fields == ("text", "ids")
        assert_same(
            again.to_tensordict(),
            select_rows(select_rows(whole, index).select("text", "ids"), slice(0, 1)),
        )
        assert_same(decode(part.to_frames()), select_rows(whole, index))
    for part in split_rows(batch, 3):
        assert isinstance(part, WireBatch)
    assert_same(concat_rows(split_rows(batch, 3)).to_tensordict(), whole)


def test_rows_that_were_chosen_before_the_join():
    parts = [open_wire(encode(expected(ROWS[:4]))), open_wire(encode(expected(ROWS[4:])))]
    batch = concat_rows([parts[0].rows([3, 1]), parts[1].rows(slice(1, 3)), parts[0].rows([])])
    assert_same(batch.to_tensordict(), select_rows(expected(ROWS), [3, 1, 5, 6]))
    assert_same(
        concat_rows([batch, batch.rows([0])])["ids"],
        select_rows(expected(ROWS), [3, 1, 5, 6, 3])["ids"],
    )


@settings(max_examples=60)
@given(st.lists(jagged_batches(), min_size=1, max_size=4), st.data())
def test_joins_are_those_of_the_batches(batches, data):
    names = set.intersection(*[set(batch.fields) for batch in batches])
    packed = [
        pack_jagged_fields(
            {name: batch.fields[name] for name in batch.fields if name in names},
            lengths=batch.lengths,
            token_aligned_fields=batch.per_token if hasattr(batch, "per_token") else None,
        )
        for batch in batches
    ]
    kind = data.draw(st.sampled_from(KINDS))
    try:
        whole = expected(packed)
    except ArgumentError as error:
        with pytest.raises(type(error)):
            joined(packed, kind).to_tensordict()
        return
    batch = joined(packed, kind)
    assert_same(batch.to_tensordict(), whole)
    rows = data.draw(st.lists(st.integers(0, max(len(batch) - 1, 0)), max_size=5))
    rows = rows if len(batch) else []
    assert_same(batch.rows(rows).to_tensordict(), select_rows(whole, rows))


@settings(max_examples=40)
@given(tensordicts(), st.integers(1, 3))
def test_every_kind_of_column_is_joined(td, times):
    if not td.batch_dims:
        return
    try:
        whole = expected([td] * times)
    except (ArgumentError, ArgumentTypeError) as error:
        with pytest.raises(type(error)):
            joined([td] * times, "opened").to_tensordict()
        return
    assert_same(joined([td] * times, "opened").to_tensordict(), whole)
    assert_same(joined([td] * times, "frames").to_tensordict(), whole)


def test_columns_that_are_stored_differently():
    """Schemas differ, or say the same in another order; some cells are narrow."""
    one = encode(ROWS[0])
    narrow = encode(ROWS[2], narrow=True)
    turned = encode(ROWS[3].select("text", "grid", "reward", "pairs", "ids"))
    with_meta = encode(ROWS[4], meta={"step": 4}, checksum=True)
    found = materialize([one, narrow, turned, with_meta])
    for name, column in materialize(expected([ROWS[i] for i in (0, 2, 3, 4)])).items():
        assert_same(found[name], column)


def test_a_ragged_dim_behind_others_and_rows_that_hold_messages():
    def batch(i):
        wide = torch.nested.nested_tensor(
            [torch.arange(2 * n).view(2, n) + i for n in (1, 3)], layout=torch.jagged
        ).contiguous()
        images = NonTensorStack(
            *[NonTensorData({"image": torch.full((40,), i + k)}) for k in (0, 5)]
        )
        return TensorDict({"wide": wide, "image": images}, [2])

    batches = [batch(i) for i in range(3)]
    for kind in KINDS:
        assert_same(joined(batches, kind).to_tensordict(), expected(batches))
        picked = joined(batches, kind).rows([5, 0, 3])
        assert_same(picked.to_tensordict(), select_rows(expected(batches), [5, 0, 3]))


def test_without_a_compiler():
    before = rowcopy.use_backend("numpy")
    try:
        assert_same(joined(ROWS).to_tensordict(), expected(ROWS))
        assert_same(
            materialize(messages_of(ROWS, "frames"))["pairs"], materialize(expected(ROWS))["pairs"]
        )
    finally:
        rowcopy.use_backend(before)


def test_memory_for_the_rectangles_is_used_again():
    messages = messages_of(ROWS, "frames")
    first = materialize(messages)
    second = materialize([encode(row_of(i, n, offset=7)) for i, n in enumerate(LENGTHS)], out=first)
    assert second["ids"].data_ptr() == first["ids"].data_ptr()
    assert second["ids"][0].tolist() == [7, 8, 9, 0, 0, 0, 0]
    buffers = [bytearray(frame) for frame in messages[0]]
    with pytest.raises(ArgumentError, match="overlap"):
        materialize([buffers, messages[1]], out=buffers[1])


def test_a_flat_list_of_buffers_is_one_message():
    frames = encode(expected(ROWS))
    assert_same(materialize(frames)["ids"], materialize(expected(ROWS))["ids"])
    assert_same(materialize(to_blob(frames))["ids"], materialize(expected(ROWS))["ids"])
    assert_same(materialize(tuple(frames))["ids"], materialize(expected(ROWS))["ids"])
    assert_same(materialize(open_wire(frames))["ids"], materialize(expected(ROWS))["ids"])
    mixed: list[Any] = [frames, open_wire(encode(ROWS[0]))]
    assert materialize(mixed)["ids"].shape == (8, 7)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_open_messages_are_pickled_as_what_was_chosen(protocol):
    batch = open_wire(encode(expected(ROWS), meta={"step": 1}))
    scores = open_wire(encode(TensorDict({"score": torch.arange(7)}, [7])))
    for opened in (batch, concat_rows([batch, batch.rows([0])]), join_columns([batch, scores])):
        part = opened.select(["ids", "text"]).rows([2, 0])
        data = pickle.dumps(part, protocol)
        assert len(data) < 2000
        back = pickle.loads(data)
        assert type(back) is WireBatch
        assert_same(back.to_tensordict(), part.to_tensordict())
        assert back.meta == part.meta


def test_a_message_by_its_path(tmp_path):
    path = tmp_path / "batch.jag"
    path.write_bytes(to_blob(encode(ROWS[0])))
    for name in (path, str(path)):
        assert_same(open_wire(name)["ids"], decode(encode(ROWS[0]))["ids"])
    with pytest.raises(FileNotFoundError):
        open_wire(tmp_path / "none")
    with pytest.raises(ArgumentError, match="a directory"):
        open_wire(tmp_path)


def test_messages_of_as_many_rows_in_all_as_messages():
    """Some have none, and some have several."""
    batches = [expected(ROWS[i:j]) for i, j in ((0, 2), (2, 5), (5, 6))]
    empty = select_rows(batches[0], [])
    parts = [batches[0], empty, batches[1], empty, empty, batches[2]]
    for kind in KINDS:
        assert_same(joined(parts, kind).to_tensordict(), expected(parts))
        assert_same(materialize(joined(parts, kind))["ids"], materialize(expected(parts))["ids"])


# What cannot be joined


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_differ_are_named(kind):
    def batch(**columns):
        return TensorDict({"a": torch.zeros(1), **columns}, [1])

    with pytest.raises(ArgumentKeyError, match=r"batch 1: .*'b' missing"):
        joined([batch(b=torch.zeros(1)), batch()], kind)
    with pytest.raises(ArgumentKeyError, match=r"batch 1: .*'b' in addition"):
        joined([batch(), batch(b=torch.zeros(1))], kind)
    for other in (torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2)):
        with pytest.raises(ArgumentError, match=r"concat_rows\['b'\] of batch 1"):
            joined([batch(b=torch.zeros(1)), batch(b=other)], kind).to_tensordict()
    ragged = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(ArgumentError, match=r"concat_rows\['b'\] of batch 1.*layout"):
        materialize(joined([batch(b=torch.zeros(1, 2)), batch(b=ragged)], kind))
    with pytest.raises(ArgumentError, match="batch dims"):
        joined([TensorDict({}, [1, 2]), TensorDict({}, [1, 3])], "opened")


def test_what_is_not_several_messages():
    with pytest.raises(ArgumentError, match="found none"):
        concat_rows([])
    with pytest.raises(ArgumentTypeError, match="expected a batch"):
        materialize([])
    for value in (None, "batch.jag", 3):
        with pytest.raises(ArgumentTypeError, match=r"materialize\(td\).*expected a batch"):
            materialize(value)  # type: ignore[arg-type]
    with pytest.raises(WireFormatError):
        materialize([b"abc", b"def"])


@pytest.mark.parametrize("kind", ["frames", "blobs"])
def test_a_damaged_message_is_named(kind):
    good = messages_of(ROWS, kind)
    for at in (0, 3, 6):
        for frame, damage in (
            (-1, lambda data: data[:-1]),
            (-1, lambda data: b""),
            (0, lambda data: b"x" + data[1:]),
            (0, lambda data: data[:40]),
        ):
            messages = list(good)
            messages[at] = list(good[at])
            messages[at][frame] = damage(bytes(good[at][frame]))
            with pytest.raises(WireFormatError, match=f"message {at}: "):
                materialize(messages)


def test_checksums_of_every_message_are_verified():
    messages = [[bytearray(f) for f in encode(row, checksum=True)] for row in ROWS]
    materialize(messages)
    messages[4][1][-1] ^= 1
    with pytest.raises(WireFormatError, match=r"message 4: frame 1: expected a CRC-32") as caught:
        materialize(messages)
    assert caught.value.reason == "bad_checksum"
    with pytest.raises(WireFormatError, match="CRC-32"):
        materialize(messages[4])


MANY_ROWS = expected(ROWS[2:6])
WITH_MORE = TensorDict(
    {"ids": row_of(1, 3)["ids"], "all": NonTensorData("whole", batch_size=[1])}, [1]
)


@pytest.mark.parametrize(
    ("batch", "options", "bits"),
    [
        (row_of(1, 3), {}, range(8)),
        (MANY_ROWS, {}, (0, 5)),
        (WITH_MORE, {"meta": {"step": 3}}, range(8)),
        (row_of(1, 3), {"checksum": True}, (0, 7)),
        (row_of(1, 3), {"narrow": True}, (0, 7)),
    ],
)
def test_every_bit_of_a_header_is_checked_as_in_one_message(batch, options, bits):
    """The check of many messages at once takes nothing that the check of one refuses."""
    frames = [bytes(frame) for frame in encode(batch, **options)]
    refused = 0
    for at in range(len(frames[0])):
        for bit in bits:
            header = bytearray(frames[0])
            header[at] ^= 1 << bit
            damaged = [bytes(header), *frames[1:]]

            def read(make):
                try:
                    return make()
                except JagcodecError as error:
                    return error

            def alone_read():
                # `open_wire` leaves checksums of frames to whoever reads them.
                if "checksum" in options:
                    return decode(damaged)  # noqa: B023
                return open_wire(damaged).to_tensordict()  # noqa: B023

            alone = read(alone_read)
            for first in (damaged, frames):
                together = read(
                    lambda: join_rows([first, damaged], "test").to_tensordict()  # noqa: B023
                )
                if isinstance(alone, WireFormatError):
                    assert isinstance(together, JagcodecError), (at, bit, together)
                    assert first is frames or isinstance(together, WireFormatError)
                elif first is damaged:
                    assert_same(together, concat_rows([alone, alone]))
            refused += isinstance(alone, WireFormatError)
    assert refused > 20 * len(bits)


def test_headers_of_many_forms_are_told_apart():
    """Of as many bytes each: names, dtypes, values, rows and writers that differ."""
    batches = []
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool):
        for rows in (1, 3):
            ids = torch.nested.nested_tensor(
                [torch.ones(4 + i) for i in range(rows)], layout=torch.jagged
            )
            other = torch.ones(rows, dtype=dtype)
            batches.append(TensorDict({"ids": ids, "other": other.long()}, [rows]))
            batches.append(TensorDict({"ids": ids, "other": other.to(dtype)}, [rows]))
    messages = [encode(batch) for batch in batches]
    wide = [batch for batch in batches if batch["other"].dtype == torch.int64]
    assert_same(
        join_rows([encode(batch) for batch in wide], "test").to_tensordict(), expected(wide)
    )
    lengths = join_rows(messages, "test").select(["ids"]).to_tensordict()["ids"]
    assert [len(row) for row in lengths.unbind()] == [
        4 + i for batch in batches for i in range(len(batch))
    ]
    with pytest.raises(ArgumentError, match="dtype"):
        join_rows(messages, "test").to_tensordict()


def test_headers_of_another_writer_are_read_as_well():
    """One that writes sizes in more bytes than they need."""
    messages = [[bytes(frame) for frame in encode(batch)] for batch in ROWS]
    for frames in messages[1::2]:
        fields = msgpack.unpackb(frames[0])
        key = msgpack.packb("numbers")
        at = frames[0].index(key) + len(key)
        numbers = fields["numbers"]
        short = len(msgpack.packb(numbers)) - len(numbers)
        sized = b"\xc6" + len(numbers).to_bytes(4, "big")
        frames[0] = frames[0][:at] + sized + frames[0][at + short :]
        values = b"\xc6" + len(fields["values"]).to_bytes(4, "big") + fields["values"]
        frames[0] = frames[0][: -2 - len(fields["values"])] + values
        assert msgpack.unpackb(frames[0]) == fields
    assert_same(join_rows(messages, "test").to_tensordict(), expected(ROWS))


def test_numbers_that_repeat_the_bytes_around_them():
    """Numbers that begin with the bytes that stand before them are found where they are."""
    for rows in (0, 1, 256, 1 << 16):
        batch = TensorDict({f"c{i}": torch.zeros(rows, 0) for i in range(5)}, [rows])
        frames = encode(batch)
        assert_same(join_rows([frames] * 3, "test").to_tensordict(), concat_rows([batch] * 3))


def test_dims_whose_product_is_no_number_are_refused_beside_one_of_zero():
    bytes_of = {"b": tensor("uint8", (1,))}
    wide = {"a": tensor("uint8", (0, 2**62, 4))}
    rows = {"a": jagged(0, 1, (4, 0, 2**62)), **bytes_of}
    for frames in (
        message(tensordict([0], wide)),
        message(tensordict([1], rows), bytes(64), groups=[(0, 0, 1, 4, 4)]),
    ):
        with pytest.raises(WireFormatError):
            open_wire(frames)
        with pytest.raises(WireFormatError, match="message 0"):
            join_rows([frames, frames], "test")


def test_columns_of_very_many_dims_are_joined_one_by_one():
    shape = (2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3)
    deep = torch.arange(12).view(shape)
    batch = TensorDict({"deep": deep, "flat": torch.ones(2)}, [2])
    found = join_rows([encode(batch)] * 3, "test").to_tensordict()
    assert_same(found, concat_rows([batch] * 3))
    many = {f"c{i}": tensor("uint8", (), 0, i) for i in range(2000)}
    many["deep"] = tensor("uint8", (1,) * 64, 0, 2000)
    frames = message(map_of(many), bytes(2001))
    tracemalloc.start()
    with pytest.raises(JagcodecError):
        join_rows([frames] * 16, "test")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 16 * len(bytes(frames[0]))


def test_a_dtype_that_this_torch_has_not_is_for_who_reads_the_column(monkeypatch):
    batch = TensorDict({"a": torch.arange(2), "u": torch.zeros(2, dtype=torch.uint16)}, [2])
    frames = encode(batch)
    monkeypatch.setitem(DTYPES, "uint16", None)
    found = join_rows([frames, frames], "test")
    assert found.select(["a"])["a"].tolist() == [0, 1, 0, 1]
    with pytest.raises(WireFormatError, match="uint16"):
        found["u"]


def test_batches_within_messages_of_one_schema_are_told_apart():
    def inner(first):
        return TensorDict({"ids": torch.arange(first, first + 3)}, [3])

    outer = open_wire(encode(TensorDict({"p": inner(0), "q": inner(100)}, [3])))
    found = concat_rows([outer.leaf("p"), outer.leaf("q")])
    assert found["ids"].tolist() == [0, 1, 2, 100, 101, 102]


def test_lists_of_frames_may_change_once_they_were_joined():
    messages = [[bytes(frame) for frame in encode(row, meta={"i": 1})] for row in ROWS]
    batch = join_rows(messages, "test")
    for frames in messages:
        frames.clear()
    messages.clear()
    assert batch.metas == [{"i": 1}] * len(ROWS)
    assert_same(batch.to_tensordict(), expected(ROWS))


def test_rows_of_offsets_are_checked():
    batches = [expected(ROWS[:3]), expected(ROWS[3:])]
    for at in range(2):
        listed = [[bytearray(f) for f in encode(batch)] for batch in batches]
        offsets = np.array([0, 3, 3, 8] if at == 0 else [0, 5, 6, 13, 15])
        place = bytes(listed[at][1]).index(offsets.tobytes())
        for k in range(len(offsets)):
            for wrong in (-1, 1, 1 << 40, -(1 << 62)):
                damaged = [[bytearray(f) for f in message] for message in listed]
                forged = offsets.copy()
                forged[k] += wrong
                damaged[at][1][place : place + forged.nbytes] = forged.tobytes()
                with pytest.raises(WireFormatError, match=f"message {at}"):
                    materialize(damaged)


def test_a_hundred_thousand_messages():
    frames = [
        bytes(frame)
        for frame in encode_fields({"ids": torch.arange(2).view(1, 2)}, lengths=torch.tensor([2]))
    ]
    batch = join_rows([frames] * 100_000, "test")
    assert len(batch) == 100_000
    found = materialize(batch)["ids"]
    assert found.shape == (100_000, 2)
    assert found[-1].tolist() == [0, 1]


# What belongs to the whole message


def test_meta_travels_beside_the_columns():
    meta = {"step": 3, "version": ("a", 1), 5: {1, 2}, "big": 1 << 80}
    frames = encode(ROWS[0], meta=meta)
    batch = open_wire(frames)
    assert batch.meta == meta
    assert batch.metas == [meta]
    assert batch.select(["ids"]).rows([0]).meta == meta
    assert open_wire(batch.select(["ids"]).to_frames()).meta == meta
    assert_same(decode(frames), decode(encode(ROWS[0])))
    found = materialize(frames)
    assert type(found) is BatchedDataDict
    assert found.meta_info == meta
    assert "step" not in materialize(frames, container=dict)
    assert open_wire(encode(ROWS[0])).meta == {}
    assert open_wire(encode(ROWS[0], meta={})).meta == {}
    assert open_wire(encode_fields({"x": torch.ones(2)}, lengths=None, meta={"a": None})).meta == {
        "a": None
    }


def test_meta_is_a_mapping_without_tensors():
    with pytest.raises(ArgumentTypeError, match="meta: expected a mapping"):
        encode(ROWS[0], meta=[1])  # type: ignore[call-overload]
    for value in (torch.ones(2), np.ones(2), b"x" * 100_000):
        with pytest.raises(ArgumentError.__mro__[1], match="meta: expected values without tensors"):
            encode(ROWS[0], meta={"a": value})


def test_meta_of_a_join_is_what_all_agree_on():
    messages = [
        encode(row, meta={"step": 3, "worker": i, **({"only": 1} if i else {})})
        for i, row in enumerate(ROWS[:3])
    ]
    batch = join_rows(messages, "test")
    assert batch.meta == {"step": 3}
    assert [meta["worker"] for meta in batch.metas] == [0, 1, 2]
    assert materialize(messages).meta_info == {"step": 3}
    assert open_wire(batch.to_frames()).meta == {"step": 3}
    assert concat_rows([open_wire(m) for m in messages]).meta == {"step": 3}
    assert join_rows([*messages, encode(ROWS[3])], "test").meta == {}


def test_metas_of_equal_and_other_sizes_stay_with_their_messages():
    metas = [{"uid": text} for text in ("aa", "bb", "c", "", "bb", "aa", "dddd")]
    messages = [encode(row, meta=meta) for row, meta in zip(ROWS, metas, strict=True)]
    batch = join_rows([*messages, encode(ROWS[0])], "test")
    assert batch.metas == [*metas, {}]
    assert batch.meta == {}
    first, *_, last = join_rows([messages[0], messages[1], messages[5]], "test").metas
    assert first == last
    assert first is not last
    assert join_rows([messages[0], messages[5]], "test").meta == {"uid": "aa"}


def test_batches_in_dicts_and_batched_data_dicts_are_opened():
    td = expected(ROWS)
    batch = open_wire(encode({"step": 3, "batch": td, "note": {"a": [1]}}))
    assert batch.meta == {"step": 3, "note": {"a": [1]}}
    assert_same(batch.to_tensordict(), decode(encode(td)))
    info = {"temperature": 0.5}
    columns = {"x": torch.arange(3), "o": ["a", {"b": 1}, None]}
    batch = open_wire(encode(BatchedDataDict(columns, meta_info=info)))
    assert (batch.meta, batch.fields, len(batch)) == (info, ("x", "o"), 3)
    found = materialize(encode(BatchedDataDict(columns, meta_info=info)))
    assert found["x"].tolist() == [0, 1, 2]
    assert found["o"].tolist() == columns["o"]
    assert found.meta_info == info
    two = [encode({"batch": td, "step": i}) for i in range(2)]
    assert concat_rows(map(open_wire, two)).metas == [{"step": 0}, {"step": 1}]
    assert materialize(two)["ids"].shape == (14, 7)
    for other in ({"a": td, "b": td}, [td], {"step": 3}, BatchedDataDict()):
        with pytest.raises(WireFormatError, match="use decode"):
            open_wire(encode(other))


def test_an_open_message_is_used_like_a_dict_of_columns():
    batch = open_wire(encode(ROWS[2]))
    for opened in (batch, concat_rows([batch, batch]), join_columns([batch])):
        assert list(opened) == list(opened.keys()) == list(opened.fields)
        assert "ids" in opened
        assert "other" not in opened
        assert rows_of(opened["ids"])[0] == [2000, 2001, 2002, 2003, 2004]
        with pytest.raises(ArgumentKeyError, match="other"):
            opened["other"]
        with pytest.raises(ArgumentTypeError, match=r"rows\(index\) chooses rows"):
            opened[0]  # type: ignore[index]
    assert len(batch) == 1


# Columns side by side


def test_columns_written_back_stand_beside_the_others():
    whole = expected(ROWS)
    logprobs = TensorDict({"logprobs": whole["ids"] * 0.5, "score": torch.arange(7.0)}, [7])
    metas = {"step": 1, "worker": 1}, {"step": 1, "worker": 2, "only": 3}
    messages = [encode(td, meta=meta) for td, meta in zip((whole, logprobs), metas, strict=True)]
    both = join_columns(messages)
    assert isinstance(both, WireBatch)
    assert both.fields == (*whole.keys(), "logprobs", "score")
    found = both.to_tensordict()
    assert_same(found.select(*whole.keys()), decode(encode(whole)))
    assert_same(found["logprobs"], decode(encode(logprobs))["logprobs"])
    (found["ids"] * found["logprobs"]).values()  # one offsets tensor
    assert both.meta == {"step": 1}
    assert both.metas == list(metas)
    assert both.schema["logprobs"].dtype is torch.float32
    part = both.select(["score", "ids", "logprobs"]).rows([5, 1])
    assert part["score"].tolist() == [5.0, 1.0]
    assert_same(part["logprobs"], select_rows(logprobs, [5, 1])["logprobs"])
    rectangles = materialize(both)
    assert_same(rectangles["logprobs"], materialize(logprobs)["logprobs"])
    assert_same(decode(both.to_frames()), found)
    halves = split_rows(both, 2)
    assert_same(concat_rows(halves).to_tensordict(), found)


def test_rows_joined_and_columns_joined():
    rows = [open_wire(encode(row)) for row in ROWS]
    scores = [open_wire(encode(TensorDict({"score": torch.tensor([i])}, [1]))) for i in range(7)]
    both = join_columns([concat_rows(rows), concat_rows(scores)])
    assert both["score"].tolist() == list(range(7))
    found = materialize(both)
    assert found["ids"].shape == (7, 7)
    assert type(concat_rows(rows)) is WireBatch


def test_columns_that_do_not_fit_are_refused():
    def batch(lengths, **columns):
        ragged = torch.nested.nested_tensor([torch.zeros(n) for n in lengths], layout=torch.jagged)
        return encode(TensorDict({"x": ragged, **columns}, [len(lengths)]))

    first = batch([1, 2])
    with pytest.raises(ArgumentError, match=r"batches\[1\]\)\['x'\]: expected a new name"):
        join_columns([first, batch([1, 2])])
    assert join_columns([first, batch([1, 2])], replace=True).fields == ("x",)
    other = encode(TensorDict({"y": decode(batch([1, 3]))["x"]}, [2]))
    with pytest.raises(ArgumentError, match=r"\['y'\], row 1: expected 2 tokens like 'x'.*found 3"):
        join_columns([first, other])
    with pytest.raises(ArgumentError, match="expected 2 rows, like the first batch, found 3"):
        join_columns([first, encode(TensorDict({"y": torch.zeros(3)}, [3]))])
    with pytest.raises(ArgumentError, match="found none"):
        join_columns([])
    for one in (first, open_wire(first), to_blob(first)):
        with pytest.raises(ArgumentTypeError, match="found one batch"):
            join_columns(one)
    with pytest.raises(WireFormatError, match="message 1: "):
        join_columns([first, [b"no message"]])


# Parts


@settings(max_examples=100)
@given(jagged_batches(), st.data())
def test_parts_are_the_messages_of_their_rows(batch, data):
    """Bytes that are cut out of a message are what `encode` makes of the same rows."""
    td = pack_jagged_fields(batch.fields, lengths=batch.lengths)
    opened = open_wire(encode(td))
    names = (
        data.draw(st.lists(st.sampled_from(opened.fields), unique=True)) if opened.fields else []
    )
    if names:
        opened, td = opened.select(names), td.select(*names)
    whole = decode(encode(td))
    start = data.draw(st.integers(0, len(opened)))
    stop = data.draw(st.integers(start, len(opened)))
    part = opened.rows(slice(start, stop))
    found = [bytes(frame) for frame in part.to_frames()]
    assert found == [bytes(frame) for frame in encode(select_rows(whole, slice(start, stop)))]


def test_parts_of_all_sizes_are_cut_out():
    many = [3, 0, 5, 5, 1, 5000, 2, 0, 4000, 5, 5]
    td = expected([row_of(i, length) for i, length in enumerate(many)])
    opened = open_wire(encode(td, meta={"step": 1}))
    for parts in (1, 2, 3, 11):
        for part, rows in zip(split_rows(opened, parts), split_rows(td, parts), strict=True):
            frames = part.to_frames()
            assert [bytes(f) for f in frames] == [bytes(f) for f in encode(rows, meta={"step": 1})]
            assert_same(decode(frames), decode(encode(rows)))


@pytest.mark.parametrize("name", ["uint8", "float16", "float64", "uint16", "int2", "bits8"])
def test_sparse_and_strided_nested_columns_of_every_dtype_are_joined(name):
    """The bits are those of uint8."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("not in this torch")
    size = dtype.itemsize
    words = torch.arange(1, 13, dtype=torch.uint8).view(2, 2, 3)
    for cells, indices, shape in (
        (words, torch.tensor([[0, 2]]), (3, 2, 3)),
        (words, torch.zeros(0, 2, dtype=torch.int64), (2, 3)),
    ):
        plain = torch.sparse_coo_tensor(indices, cells, shape, check_invariants=True)
        wide = cells.repeat_interleave(size, -1).view(dtype)
        leaf = torch.sparse_coo_tensor(indices, wide, shape, check_invariants=True)
        td = TensorDict({"a": leaf}, [shape[0]])
        if name in ("int2", "bits8") and not len(indices):  # which torch cannot fill
            with pytest.raises(ArgumentError, match=f"found torch[.]{name}; call"):
                joined([td, td, td], "opened").to_tensordict()
            continue
        found: Any = joined([td, td, td], "opened").to_tensordict()["a"]
        whole = torch.cat([plain, plain, plain])
        assert found.shape == whole.shape
        assert torch.equal(found._indices(), whole._indices())
        values = whole._values().repeat_interleave(size, -1)
        assert torch.equal(found._values().view(torch.uint8), values)
    if name not in ("int2", "bits8"):  # of which torch makes no nested tensors
        nested = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]).to(dtype)
        td = TensorDict({"a": nested}, [2])
        assert_same(joined([td, td], "opened")["a"].unbind(), nested.unbind() * 2)


def test_a_batch_of_many_rows_without_bytes_is_joined_without_memory():
    """As it is opened: 2**24 rows are one object."""
    td = TensorDict({"a": NonTensorData("x", batch_size=[1 << 24])}, [1 << 24])
    tracemalloc.start()
    batch = joined([td, td])
    picked = batch.rows([5, (1 << 24) + 7])
    assert picked["a"].data == "x"
    assert len(batch) == 1 << 25
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


def test_joins_of_pickled_objects_are_sent_on_if_they_are_allowed():
    td = TensorDict({"a": NonTensorStack(NonTensorData(slice))}, [1])
    frames = encode(td, allow_pickle=True)
    opened = open_wire(frames, allow_pickle=True)
    for batch in (concat_rows([opened, opened]), join_columns([opened])):
        back = decode(batch.to_frames(), allow_pickle=True)
        assert list(back["a"]) == [slice] * len(batch)
    with pytest.raises(WireFormatError, match="without pickle"):
        concat_rows([open_wire(frames)] * 2).to_frames()


def test_messages_that_claim_rows_take_no_memory_for_each():
    rows = 1 << 22
    claims = encode(TensorDict({"x": NonTensorData(1, batch_size=[rows])}, [rows]))
    assert sum(map(len, claims)) < 200
    tracemalloc.start()
    try:
        assert concat_rows([open_wire(claims)] * 4).to_tensordict().batch_size == (4 * rows,)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# Memory of what messages claim


def peak_of(work):
    """The most memory that Python and numpy held at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_chosen_rows_beside_claimed_rows_take_no_memory_for_each():
    rows = 1 << 22
    claims = encode(TensorDict({"x": NonTensorData(1, batch_size=[rows])}, [rows]))

    def join():
        batch = concat_rows([open_wire(claims), open_wire(claims).rows([0]), open_wire(claims)])
        assert len(batch) == 2 * rows + 1
        assert batch.to_tensordict().get("x").data == 1
        assert batch.rows(slice(5, None)).to_tensordict().batch_size == (2 * rows - 4,)
        assert decode(batch.to_frames()).get("x").data == 1

    assert peak_of(join) < 1 << 20


def test_a_dict_of_columns_claims_no_more_rows_than_a_tensordict():
    def claims(rows):
        return encode(BatchedDataDict({"x": torch.empty(rows, 0), "y": torch.empty(rows, 0, 2)}))

    def join():
        batches = [open_wire(claims(1 << 24)), open_wire(claims(1 << 24)).rows([3])]
        batch = concat_rows(batches)
        assert batch.to_tensordict()["y"].shape == ((1 << 24) + 1, 0, 2)
        assert batch["x"].shape == ((1 << 24) + 1, 0)

    assert peak_of(join) < 1 << 20
    with pytest.raises(WireFormatError, match="16777216 rows at most"):
        open_wire(claims(1 << 28))


def test_rows_of_all_batches_add_up_below_two_to_the_63():
    rows = 1 << 24
    batch = open_wire(encode(TensorDict({"x": NonTensorData(1, batch_size=[rows])}, [rows])))
    for _ in range(3):
        batch = concat_rows([batch.rows(slice(None))] * (1 << 12))
    assert len(batch) == 1 << 60
    with pytest.raises(WireFormatError, match=r"fewer than 2\*\*63 rows"):
        concat_rows([batch.rows(slice(None))] * 8)


def test_nested_batches_over_one_ragged_group_share_its_rows():
    """Else memory grows with the number of columns times the number of rows."""
    rows = 4000

    def claims(columns, *, inside):
        none = torch.nested.nested_tensor_from_jagged(
            torch.zeros(0), torch.zeros(rows + 1, dtype=torch.int64), min_seqlen=0, max_seqlen=0
        )
        leaf = TensorDict({"x": none}, [rows]) if inside else none
        batch = TensorDict({f"c{i}": leaf for i in range(columns)}, [rows])
        return [bytes(memoryview(frame)) for frame in encode(batch)]

    for inside in (True, False):
        frames = claims(200, inside=inside)
        assert sum(map(len, frames)) < 60_000
        found = []
        peak = peak_of(lambda: found.append(materialize([frames, frames], "jagged")))  # noqa: B023
        assert peak < 3 << 20
        columns = [column["x"] if inside else column for column in found[0].values()]
        assert len({id(column.offsets()) for column in columns}) == 1


def test_cells_smaller_than_their_place_are_gathered():
    """Where a row begins takes 8 bytes; of columns with less, nothing is kept for each row."""
    rows, columns = 5000, 100
    lengths = torch.ones(rows, dtype=torch.int64)
    mask = torch.ones(rows, 1, dtype=torch.bool)
    frames = encode_fields({f"m{i}": mask for i in range(columns)}, lengths=lengths)
    batch = concat_rows([open_wire(frames), open_wire(frames)])
    for part in (batch, batch.rows(torch.arange(2 * rows).flip(0))):
        assert peak_of(part.columns) < 4 << 20
        assert materialize(part)["m7"].sum() == 2 * rows


def test_what_was_chosen_of_a_join_is_not_kept():
    batch = concat_rows([open_wire(encode(row)) for row in ROWS])
    chosen = [batch.rows([i % 7, 0]) for i in range(300)]
    materialize(chosen[0])
    before = len(pickle.dumps(ROWS[0]))

    def read():
        for i in range(300):
            materialize(batch.rows([i % 7, 0, 1, 2] * 50))

    tracemalloc.start()
    try:
        read()
        first = tracemalloc.get_traced_memory()[0]
        read()
        assert tracemalloc.get_traced_memory()[0] - first < 100 * before
    finally:
        tracemalloc.stop()


# Options survive


@pytest.mark.parametrize("kind", ["opened", "fetched", "joined"])
def test_rows_of_a_narrow_message_are_sent_narrow(kind):
    ids = torch.arange(40).view(8, 5)
    inner = TensorDict({"ids": ids, "wide": ids * 1000}, [8])
    td = pack_jagged_fields({"ids": ids, "score": ids.float()}, lengths=[5] * 8)
    td["inner"], td["grid"] = inner, ids * 1000
    narrow: list[Any] = ["ids", ("inner", "ids")]
    batch = open_wire(encode(td, narrow=narrow))
    if kind == "fetched":
        blob = to_blob(encode(td, narrow=narrow))
        batch = open_wire(lambda a, n: blob[a : a + n])
    elif kind == "joined":
        batch = concat_rows([batch.rows(slice(0, 3)), batch.rows(slice(3, 8))])
    part = batch.rows([6, 1, 1])
    expected = select_rows(decode(encode(td)), [6, 1, 1])
    sent = open_wire(part.to_frames())
    assert sent.narrow_names() == [("ids",), ("inner", "ids")]
    assert_same(sent.to_tensordict(), expected)
    assert encode(part, narrow=["ids"], allow_pickle=True) == part.to_frames()
    every = open_wire(encode(part, narrow=True)).narrow_names()
    assert every == [("ids",), ("inner", "ids"), ("inner", "wide"), ("grid",)]
    assert sum(map(len, encode(part))) < sum(map(len, encode(expected)))


def test_a_batch_is_encoded_with_all_options():
    whole = expected(ROWS)
    one = open_wire(encode(whole, meta={"step": 1}))
    scores = open_wire(encode(TensorDict({"score": torch.arange(7)}, [7]), meta={"step": 1}))
    for batch in (
        one,
        concat_rows([one.rows([0, 1]), one]),
        join_columns([one, scores.rows([6] * 7)]),
    ):
        value = batch.to_tensordict()
        for options in (
            {},
            {"elide": True},
            {"checksum": True},
            {"narrow": True},
            {"compress": "zstd"},
        ):
            assert_same(decode(encode(batch, **options)), value)
        assert open_wire(encode(batch)).meta == {"step": 1}
        assert open_wire(encode(batch, meta={"other": 2})).meta == {"other": 2}
        assert encode(batch, checksum=True) == encode(value, checksum=True, meta={"step": 1})
    with pytest.raises(ArgumentKeyError, match="narrow"):
        encode(one, narrow=["no column"])
    assert_same(join_columns([one, scores.rows([6] * 7)]).rows([1])["score"], torch.tensor([6]))


def test_rows_of_an_elided_message_are_sent_whole_unless_asked_for():
    ids = torch.randint(0, 1 << 62, (1, 4000)).repeat(6, 1)
    td = pack_jagged_fields({"ids": ids}, lengths=[4000] * 6)
    batch = open_wire(encode(td, elide=True))
    part = batch.rows([5, 0, 3])
    for frames, size in ((part.to_frames(), 3 * 32_000), (encode(part, elide=True), 32_000)):
        assert size <= sum(map(len, map(bytes, frames))) < size + 1000
        assert_same(decode(frames), select_rows(td, [5, 0, 3]))


@pytest.mark.parametrize("narrow", [False, True])
def test_rows_that_share_cells_in_their_messages_share_them_in_a_join(narrow):
    """Of one run each, and of two: the cells of a prompt and those of a response."""

    def rollouts(seed):
        numbers = torch.Generator().manual_seed(seed)
        prompts = torch.randint(0, 50_000, (1, 700), generator=numbers).repeat(4, 1)
        responses = torch.randint(0, 50_000, (4, 90), generator=numbers)
        ids = torch.cat([prompts, responses], 1)
        each = {"prompts": prompts, "responses": responses, "ids": ids}
        leaves = {
            k: torch.nested.nested_tensor(list(v), layout=torch.jagged) for k, v in each.items()
        }
        return TensorDict(leaves, [4])

    batches = [rollouts(seed) for seed in range(3)]
    listed = [open_wire(encode(batch, elide=True, narrow=narrow)) for batch in batches]
    joined, whole = concat_rows(listed), expected(batches)
    for order in (slice(None), [11, 0, 0, 7]):
        part, rows = joined.rows(order), select_rows(whole, order)
        for name, view in part.columns():
            held = sum(len(buffer) for buffer in view.memory)
            assert held < 3 * 5 * 800 * 8, name
            assert_same(part[name], rows[name])
            assert_same(materialize(part)[name], materialize(rows)[name])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int16, torch.uint8])
def test_narrow_cells_of_many_messages_are_widened_together(dtype):
    """Stored in every width, and in none, in one join; also where messages are empty."""
    numbers = [[0, 1, 1], [200], [], [-3, 4], [70_000], [1 << 40, 5], [0] * 17, [-(1 << 62)], [2]]
    rows = [torch.tensor(row, dtype=torch.int64).to(dtype) for row in numbers]
    grids = [torch.full((1, 2), i, dtype=torch.int64) << 7 * (i % 8) for i in range(len(rows))]
    batches = [
        TensorDict(
            {
                "ids": torch.nested.nested_tensor([row], layout=torch.jagged),
                "pair": torch.nested.nested_tensor(
                    [torch.stack([row, row], 1)], layout=torch.jagged
                ),
                "grid": grid,
            },
            [1],
        )
        for row, grid in zip(rows, grids, strict=True)
    ]
    listed = [encode(batch, narrow=i != 4) for i, batch in enumerate(batches)]
    whole = expected(batches)
    for joined in (concat_rows(map(open_wire, listed)), join_rows(listed, "test")):
        assert_same(joined.to_tensordict(), whole)
        order = [8, 0, 5, 5, 2, 3]
        assert_same(joined.rows(order).to_tensordict(), select_rows(whole, order))
        for name, column in materialize(whole).items():
            assert_same(materialize(joined)[name], column)
