"""Columns whose rows are arrays, tensors or None: cells on the wire, objects for readers.

The oracle is the list of rows itself.
"""

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    UnsupportedTypeError,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    encode_fields,
    encode_rows,
    join_columns,
    materialize,
    open_wire,
    plan_packing,
    select_rows,
    to_rows,
)
from jagcodec.columns.batch import storage_of_batch
from jagcodec.memory.arrays import NUMPY_BY_NAME, object_array
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES
from jagcodec.rows.non_tensor import stack_of_payloads
from jagcodec.train.describe import describe_message, differences, open_source, read_whole
from jagcodec.wire import spec
from jagcodec.wire.array_rows import array_rows as split_rows
from jagcodec.wire.many import joined as join
from jagcodec.wire.spec import Kind
from tests.helpers import Store, message
from tests.oracle import assert_same, is_same
from tests.strategies import array_rows, indices
from tests.wire import forge, spec_reader

pytestmark = pytest.mark.filterwarnings("ignore")

Rows = list[Any]


def ids_of(rows):
    return [[i, 7][: 1 + i % 2] for i in range(len(rows))]


def in_tensordict(leaf, rows):
    return TensorDict({"x": leaf, "n": torch.arange(len(rows))}, [len(rows)])


# What each makes of rows: options of `encode`, and what a message holds of them.
DOORS: dict[str, Any] = {
    "encode_rows": lambda rows, **o: encode_rows(
        [{"ids": ids, "x": row} for ids, row in zip(ids_of(rows), rows, strict=True)],
        dtypes={"x": object},
        **o,
    ),
    "encode_rows of a dict": lambda rows, **o: encode_rows(
        {"ids": ids_of(rows), "x": rows}, dtypes={"x": object}, **o
    ),
    "encode_fields, an array": lambda rows, **o: encode_fields(
        {"x": object_array(rows), "n": torch.arange(len(rows))}, token_aligned_fields=[], **o
    ),
    # Without None, a list of arrays may be cells.
    "encode_fields, a list": lambda rows, **o: encode_fields(
        {"x": [*rows] if any(row is None for row in rows) else object_array(rows)}, **o
    ),
    "stack": lambda rows, **o: encode(in_tensordict(stack_of_payloads(rows), rows), **o),
    "array in a TensorDict": lambda rows, **o: encode(
        in_tensordict(NonTensorData(object_array(rows), batch_size=[len(rows)]), rows), **o
    ),
    "list in a dict": lambda rows, **o: encode(BatchedDataDict({"x": rows, "n": rows}), **o),
    "array in a dict": lambda rows, **o: encode(BatchedDataDict({"x": object_array(rows)}), **o),
    "stack in a dict": lambda rows, **o: encode(
        BatchedDataDict({"x": stack_of_payloads(rows)}), **o
    ),
}
OPTIONS: list[dict[str, Any]] = [
    *({}, {"narrow": True}, {"elide": True}, {"narrow": True, "elide": True}),
    *({"checksum": True}, {"compress": "zstd"}),
]


def listed(column):
    """A column of objects, in any form, as a list."""
    if isinstance(column, NonTensorStack):
        column = column.tolist()
    return list(column.data if isinstance(column, NonTensorData) else column)


READERS: dict[str, Any] = {
    "decode": lambda frames: decode(frames)["x"],
    "decode, written to": lambda frames: decode([bytearray(frame) for frame in frames])["x"],
    "decode, copied": lambda frames: decode(frames, copy=True)["x"],
    "open": lambda frames: open_wire(frames)["x"],
    "open, fetched": lambda frames: open_wire(Store(frames))["x"],
    "to_tensordict": lambda frames: open_wire(frames).to_tensordict()["x"],
    "materialize": lambda frames: materialize(frames)["x"],
    "to_rows": lambda frames: [row["x"] for row in to_rows(frames)],
    "sent on": lambda frames: decode(open_wire(frames).to_frames())["x"],
    "sent on, elided": lambda frames: open_wire(encode(open_wire(frames), elide=True))["x"],
    "pickled": lambda frames: pickle.loads(pickle.dumps(open_wire(frames)))["x"],
    "joined": lambda frames: open_wire(
        join_columns([frames, {"y": torch.zeros(len(open_wire(frames)))}])
    )["x"],
    "concat_rows of one": lambda frames: concat_rows([frames])["x"],
}


def children_of(frames):
    """The column's node, without the nodes around it."""
    found = []

    def walk(node):
        if isinstance(node, list) and node and node[0] == Kind.ARRAY_ROWS:
            found.append(node)
        for part in node if isinstance(node, list) else ():
            walk(part)

    walk(schema_of(frames))
    return found


def schema_of(frames):
    return forge.Parts(bytes(frames[0])).schema


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=40)
@given(array_rows(), st.sampled_from(OPTIONS), st.data())
def test_rows_arrive_as_they_were_sent(door, rows, options, data):
    frames = message(DOORS[door](rows, **options))
    # Tensors over one storage, as those without cells may be.
    views = door == "list in a dict" and f"[{Kind.TENSOR_VIEWS:d}" in str(schema_of(frames))
    assert children_of(frames) or views
    spec_reader.read(frames)
    for name, read in READERS.items():
        assert_same(listed(read(frames)), rows, name)
    index, wanted = data.draw(indices(len(rows)))
    for source in (frames, Store(frames)):
        batch = open_wire(source).rows(index)
        assert_same(listed(batch["x"]), [rows[i] for i in wanted])
        if wanted:
            assert_same(listed(decode(batch.to_frames())["x"]), [rows[i] for i in wanted])
    twice = concat_rows([frames, frames])
    assert_same(listed(twice["x"]), rows + rows)
    back = open_wire(frames).schema["x"]
    assert back.dtype is None or views
    assert [*differences(*[read_whole(frames, "message") for _ in range(2)])] == []


@given(array_rows(4), st.sampled_from(OPTIONS))
def test_columns_beside_a_packed_one(rows, options):
    frames = DOORS["encode_rows"](rows, **options)
    batch: Any = open_wire(frames)
    packed = plan_packing(batch.row_lengths("ids")).pack(batch)
    assert_same(listed(packed["x"]), rows)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("tensors", [False, True])
def test_any_number_of_rows_needs_the_same_buffers(door, tensors):
    def made(n):
        rows: Rows = [None if i % 3 else np.full((i % 4, 2), i, np.float32) for i in range(n)]
        rows = [torch.from_numpy(row) if tensors and row is not None else row for row in rows]
        parts = forge.Parts(bytes(DOORS[door](rows)[0]))
        return parts.schema, len(parts.values), len(parts.numbers)

    assert made(5) == made(50) == made(200)


NEITHER: dict[str, Any] = {
    "None alone": lambda: [None, None],
    "dtypes": lambda: [np.ones(2), np.ones(2, "f4")],
    "ranks": lambda: [np.ones(2), np.ones((2, 1))],
    "arrays and tensors": lambda: [np.ones(2), torch.ones(2)],
    "texts": lambda: [np.ones(2), "a"],
    "another byte order": lambda: [np.ones(2, ">f4"), None],
    "a dtype of numpy alone": lambda: [np.ones(2, "<U1"), None],
    "unsigned": lambda: [np.ones(2, "u2"), None],
    "objects": lambda: [object_array([1]), None],
    "scalars": lambda: [np.float32(1), None],
    "parameters": lambda: [torch.nn.Parameter(torch.ones(2)), None],
    "sparse": lambda: [torch.ones(2).to_sparse(), None],
    "nested": lambda: [torch.nested.nested_tensor([torch.ones(2)]), None],
}


@pytest.mark.parametrize("name", NEITHER)
def test_other_rows_are_written_row_by_row(name):
    rows = NEITHER[name]()
    frames = encode(in_tensordict(NonTensorStack(*map(NonTensorData, rows)), rows))
    assert not children_of(frames)
    assert_same(listed(decode(frames)["x"]), listed(NonTensorStack(*map(NonTensorData, rows))))


@pytest.mark.parametrize("rows", [[np.ones(2), None], [torch.ones(2), None]], ids=str)
def test_a_list_that_is_not_a_column_stays_a_list_of_nodes(rows):
    for value in (rows, {"a": rows}, BatchedDataDict({"n": [0, 1]}, meta_info={"a": rows})):
        frames = encode(value)
        assert not children_of(frames)
        assert is_same(decode(frames), value)


def test_arrays_have_the_dtypes_that_numpy_shares_with_torch():
    assert {*NUMPY_BY_NAME} == spec.ARRAY_DTYPES == {*spec_reader.ARRAYS}
    assert {str(dtype) for dtype in NUMPY_DTYPES.values()} == spec.ARRAY_DTYPES


def test_a_masked_array_and_a_file_are_what_they_were(tmp_path):
    masked = np.ma.masked_array(np.ones(2), [True, False])
    with pytest.raises(UnsupportedTypeError, match=r"x\[0\]"):
        encode(in_tensordict(NonTensorStack(NonTensorData(masked), None), [0, 1]))
    file = np.memmap(tmp_path / "file", np.uint8, "w+", shape=(2,))
    frames = encode(in_tensordict(NonTensorStack(NonTensorData(file), None), [0, 1]))
    assert not children_of(frames)
    assert_same(listed(decode(frames)["x"])[0], np.asarray(file))


def test_tensors_without_values_are_named_with_their_row():
    for bad in (
        torch.ones(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
    ):
        rows = NonTensorStack(NonTensorData(torch.ones(2)), NonTensorData(bad))
        with pytest.raises(UnsupportedTypeError, match=r"x\[1\]"):
            encode(in_tensordict(rows, [0, 1]))


def test_dims_that_no_reader_accepts_are_refused_with_their_row():
    rows = [np.ones(1, "u1").reshape(1, 1)[:, :0], np.empty((0, 1 << 56), "u1")]
    with pytest.raises(UnsupportedTypeError, match="fewer than") as caught:
        encode(in_tensordict(NonTensorStack(*map(NonTensorData, rows)), rows))
    assert caught.value.path == "$.x[1]"


def test_gradients_and_conjugates_are_read():
    rows = [torch.ones(2, dtype=torch.complex64).mul(1j).conj(), None]
    assert_same(listed(decode(DOORS["stack"](rows))["x"])[0], rows[0].resolve_conj())
    rows = [torch.ones(2, requires_grad=True), None]
    assert_same(listed(decode(DOORS["stack"](rows))["x"])[0], torch.ones(2))


def test_what_is_taken_apart_does_not_change_with_its_rows():
    array, tensor = np.arange(6).reshape(2, 3), torch.arange(6)
    for rows, change in (
        ([array, None], lambda: setattr(array, "shape", (6,))),
        ([tensor, None], lambda: tensor.resize_(2)),
    ):
        found: Any = split_rows(rows)
        change()
        assert [*found.parts[0].shape] == found.dims[0, 1:].tolist()
        assert found.lengths == (6, 0)


def test_an_object_array_is_no_leaf_of_a_tensordict():
    class Foreign(torch.Tensor):
        pass

    td = TensorDict({"x": torch.ones(2).as_subclass(Foreign)}, [2])
    with pytest.raises(UnsupportedTypeError, match="as a leaf of a TensorDict"):
        encode(td, default=lambda value: object_array([np.ones(2), None]))


# --- memory ------------------------------------------------------------------------------------


def test_arrays_alias_a_message_that_may_be_written_to_and_tensors_are_pickled_alone():
    rows = [np.full((100, 100), i, np.uint8) if i % 2 else None for i in range(8)]
    frames = [bytearray(frame) for frame in message(DOORS["encode_rows"](rows))]
    for batch in (decode(frames), open_wire(frames)):
        found = listed(batch["x"])
        found[1][...] = 77
        assert (listed(decode(frames)["x"])[1] == 77).all()
        found[1][...] = 1
    for source in (list(map(bytes, frames)), Store(frames)):
        batch = open_wire(source)
        found = listed(batch["x"])
        found[1][...] = 77
        assert_same(listed(batch["x"]), rows)
    tensors = [None if row is None else torch.from_numpy(row) for row in rows]
    for batch in (decode(DOORS["stack"](tensors)), concat_rows([DOORS["stack"](tensors)] * 2)):
        one = listed(batch["x"])[1]
        assert one.untyped_storage().nbytes() == one.nbytes
        assert len(pickle.dumps(one)) < 2 * one.nbytes


def test_a_read_only_message_is_copied_once():
    rows = [np.zeros(50_000, np.uint8), np.zeros(50_000, np.uint8)]
    found = listed(decode(message(DOORS["stack"](rows)))["x"])
    starts = [row.__array_interface__["data"][0] for row in found]
    assert starts[1] - starts[0] == 50_000
    assert all(row.flags.writeable for row in found)


def test_a_device_gets_tensors_and_no_arrays(device):
    there = [torch.arange(4, dtype=torch.bfloat16).view(2, 2), None, torch.ones(0, 2).bfloat16()]
    frames = DOORS["stack"](there)
    for batch in (decode(frames, device=device), open_wire(frames, device=device).rows([0, 1, 2])):
        found = listed(batch["x"])
        assert found[0].device.type == torch.device(device).type
        assert_same([None if row is None else row.cpu() for row in found], there)
        assert found[0].untyped_storage().nbytes() == found[0].nbytes
    rows = [np.arange(4), None]
    for frames in (DOORS["stack"](rows), list(map(bytearray, message(DOORS["stack"](rows))))):
        found = listed(decode(frames, device=device)["x"])
        assert_same(found, rows)
        found[0][...] = 1  # memory of its own


def test_only_chosen_rows_are_fetched():
    rows = [np.full(5000 + i, i, np.int16) if i % 2 else None for i in range(40)]
    for narrow in (False, True):
        store = Store(encode_rows({"x": rows}, dtypes={"x": object}, narrow=narrow))
        batch = open_wire(store)
        before = store.fetched
        assert_same(listed(batch.rows([7, 8, 31])["x"]), [rows[7], None, rows[31]])
        size = 5019 if narrow else 10_038
        assert size * 2 <= store.fetched - before < 2.2 * size


# --- bytes -------------------------------------------------------------------------------------


def test_equal_images_are_sent_once_and_narrow_stays_narrow():
    image = np.random.default_rng(0).integers(0, 200, (40, 50, 3)).astype(np.int64)
    rows = [image.copy() if i % 4 == 0 else None for i in range(32)]
    sizes = {}
    for narrow in (False, True):
        for elide in (False, True):
            frames = encode_rows({"x": rows}, dtypes={"x": object}, narrow=narrow, elide=elide)
            assert_same(listed(decode(frames)["x"]), rows)
            sizes[narrow, elide] = sum(map(len, message(frames)))
            on = open_wire(frames)
            assert bool(storage_of_batch(on).narrow) == narrow
            again = encode(on, elide=elide)
            assert abs(sum(map(len, message(again))) - sizes[narrow, elide]) < 100
            assert_same(listed(decode(again)["x"]), rows)
            column = describe_message(open_source(frames, "message")).columns[0]
            assert (column.kind, column.dtype, column.shape) == (
                "object",
                "int64",
                (32, *[None] * 3),
            )
            assert ("narrow" in column.stored, "indirect" in column.stored) == (narrow, elide)
    assert sizes[False, True] < sizes[False, False] / 7
    assert sizes[True, False] < sizes[False, False] / 6
    assert sizes[True, True] < sizes[True, False] / 6


def test_many_narrow_rows_are_read_by_default():
    rows = [np.array(i % 2 == 0) for i in range(300_000)]
    found = open_wire(
        encode(object_array(rows), narrow=True)
        and encode_rows({"x": rows}, dtypes={"x": object}, narrow=True)
    )
    assert found.rows([5, 6])["x"].tolist() == [False, True]


def test_one_large_array_among_many_nones_is_compressed():
    """Arrays are not padded, so no rectangle of them is counted."""
    rows = [None] * 2000 + [np.zeros(1 << 20, np.uint8)]
    frames = encode_rows({"x": rows}, dtypes={"x": object}, compress="zstd")
    assert sum(map(len, message(frames))) < 10_000
    assert_same(listed(decode(frames)["x"]), rows)


@pytest.mark.parametrize("holder", [spec.IN_STACK, spec.IN_ARRAY, spec.IN_LIST])
def test_no_rows_are_read_as_no_objects(holder):
    f = forge.Draft()
    column = forge.arrays_in_rows(f, [], holder=holder)
    if holder == spec.IN_STACK:
        frames = f.message(forge.tensordict([0], {"x": column}))
        assert is_same(open_wire(frames).to_tensordict(), decode(frames))
    else:
        columns, meta = forge.map_of({"x": column}), forge.part_of({})
        state = forge.list_of(columns, meta)
        frames = f.message(forge.node("USER", "jagcodec.BatchedDataDict", children=[state]))
    assert listed(decode(frames)["x"]) == listed(open_wire(frames)["x"]) == []
    assert listed(concat_rows([frames] * 2)["x"]) == listed(materialize(frames)["x"]) == []


# --- joins -------------------------------------------------------------------------------------


def cells(rows):
    return DOORS["encode_rows"](rows)


ROWS: dict[str, Any] = {
    "None": lambda i: None,
    "array": lambda i: np.full((i % 3, 2), i, np.int32),
    "large": lambda i: np.full((i % 3 * 1000, 2), i, np.int32),
    "floats": lambda i: np.full((2, 1), i, np.float16),
    "flat": lambda i: np.full(3, i, np.int32),
    "tensor": lambda i: torch.full((2, i % 2), i),
    "text": lambda i: f"text {i}",
}


@given(st.data(), st.sampled_from(OPTIONS[:4]))
def test_messages_of_any_rows_are_joined(data, options):
    kinds = data.draw(st.lists(st.sampled_from([*ROWS]), min_size=1, max_size=3))
    parts = data.draw(
        st.lists(st.lists(st.sampled_from(kinds), min_size=1, max_size=3), min_size=1, max_size=8)
    )
    rows = [[ROWS[kind](i + k) for k, kind in enumerate(part)] for i, part in enumerate(parts)]
    messages = [DOORS["encode_rows"](part, **options) for part in rows]
    whole = [row for part in rows for row in part]
    joined = concat_rows(messages)
    assert_same(listed(joined["x"]), whole)
    assert_same(listed(materialize(messages)["x"]), whole)
    index, wanted = data.draw(indices(len(whole)))
    assert_same(listed(select_rows(joined, index)["x"]), [whole[i] for i in wanted])
    lazily = join.join_rows(messages, "test")
    assert_same(listed(lazily.rows(index)["x"]), [whole[i] for i in wanted])
    sent = open_wire(encode(lazily))
    assert_same(listed(sent["x"]), whole)
    assert {*storage_of_batch(sent).narrow} <= {*storage_of_batch(lazily).narrow}


@pytest.mark.parametrize("narrow", [False, True])
def test_messages_with_and_without_an_array_are_read_in_place(monkeypatch, narrow):
    rows = [np.full((i % 5, 3), i, np.int64) if i % 3 == 0 else None for i in range(40)]
    messages = [encode_rows({"x": [row]}, dtypes={"x": object}, narrow=narrow) for row in rows]
    messages += [encode_rows({"x": rows[:7]}, dtypes={"x": object}, narrow=narrow)]
    if not narrow:
        monkeypatch.setattr(join, "_open_one", None)
    assert_same(listed(materialize(messages)["x"]), rows + rows[:7])
    batch = join.join_rows(messages, "test")
    assert_same(listed(batch.rows([40, 3, 3, 1])["x"]), [rows[0], rows[3], rows[3], rows[1]])
    assert [*storage_of_batch(batch).narrow] == ([("x",)] if narrow else [])
    assert_same(listed(decode(encode(batch))["x"]), rows + rows[:7])


def test_an_error_of_a_join_names_message_column_and_row():
    def made(*dims, **changes):
        f = forge.Draft()
        return f.message(forge.batch(forge.arrays_in_rows(f, dims, **changes)))

    none = forge.Draft()
    none = none.message(forge.batch(forge.rows_of(none, None, None)))
    good, bad = made([1, 2], [0, 0]), made([1, 2], [1, 5], lengths=[2, 4])
    for messages in ([good, bad], [none, good, bad], [none, bad]):
        with pytest.raises(WireFormatError, match="message") as caught:
            materialize(messages)
        assert caught.value.path == f"message {len(messages) - 1}: $.a[1]"
    for read in (decode, lambda frames: open_wire(frames).rows([1])["a"]):
        with pytest.raises(WireFormatError) as caught:
            read(bad)
        assert caught.value.path == "$.a[1]"


def test_a_column_of_other_rows_than_its_batch_is_refused():
    f = forge.Draft()
    frames = f.message(forge.batch(forge.arrays_in_rows(f, [[1, 1], [0, 0], [0, 0]])))
    for read in (
        decode,
        lambda frames: open_wire(frames)["a"],
        lambda frames: materialize([frames, frames]),
    ):
        with pytest.raises(WireFormatError), warnings.catch_warnings():
            read(frames)


# --- what depends on no row --------------------------------------------------------------------


@pytest.mark.parametrize("others", [[None], [None, np.zeros(0, np.uint8)], [np.ones(3, np.uint8)]])
def test_a_message_of_several_rows_does_not_follow_their_memory(others):
    image = np.zeros(30_000, np.uint8)
    for door, encoded in DOORS.items():
        frames = encoded([image, *others])
        before = list(map(bytes, frames))
        image[:] += 1
        assert list(map(bytes, frames)) == before, door


def test_narrow_rows_in_messages_of_their_own_are_accepted():
    rows = object_array([np.zeros(0), *[None] * 150_000])
    batch = TensorDict({"x": NonTensorStack({"x": rows}, {"x": 1})}, [2])
    chosen: list[dict[str, Any]] = [{}, {"narrow": True}, {"narrow": True, "elide": True}]
    for options in chosen:
        found = listed(decode(encode(batch, **options))["x"])
        assert len(found[0]["x"]) == len(rows), options


def test_arrays_in_rows_count_as_a_container():
    def inside(value, levels):
        for _ in range(levels):
            value = [value]
        return value

    for levels in (97, 98, 99, 100, 101):
        arrays, strings = (
            object_array(rows) for rows in ([np.ones(2), None], [np.ones(2), "x", None])
        )
        outcomes = []
        for rows in (arrays, strings):
            try:
                encode(inside(rows, levels))
                outcomes.append("encoded")
            except UnsupportedTypeError as error:
                outcomes.append(error.reason)
        assert outcomes[0] == outcomes[1], levels
