"""Reading part of a message: no byte more is fetched than the chosen rows and columns take."""

import mmap
import tracemalloc

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    WireFormatError,
    concat_rows,
    decode,
    dump,
    encode,
    encode_fields,
    materialize,
    open_wire,
    select_rows,
    stack_or_nest,
    to_blob,
)
from jagcodec.types import FieldSchema
from tests.helpers import Store, at_odd_address, rollouts
from tests.oracle import assert_same, rows_of
from tests.wire.forge import (
    int64s,
    jagged,
    map_of,
    message,
    node,
    record,
    row_message,
    strided_nested,
    tensor,
    tensordict,
)
from tests.wire.forge import rows_of as forged_rows
from tests.wire.readers import outcome, peak_of, refused
from tests.wire.values import rich


def packed(**options):
    """Four columns of 100 rows, of 0, 10, ... 990 cells each."""
    columns = {f"c{i}": torch.arange(100 * 1000).view(100, 1000) + i for i in range(4)}
    lengths = torch.arange(100) * 10
    return encode_fields(columns, lengths=lengths, token_aligned_fields=columns, **options)


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
    frames = packed()
    store = Store(frames)
    expected = open_wire(store).select(["c3"]).rows(slice(20, 30)).to_tensordict()
    keep = bytearray(len(store.blob))
    for offset, size in store.asked:
        keep[offset : offset + size] = store.blob[offset : offset + size]
    assert sum(map(bool, keep)) < len(store.blob) / 50
    path = tmp_path / "batch.jag"
    dump(decode(frames), path)
    path.write_bytes(keep)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        part = open_wire(mapped).select(["c3"]).rows(slice(20, 30)).to_tensordict()
        assert_same(part, expected)
        del part


@pytest.mark.parametrize("narrow", [False, True])
def test_of_columns_that_repeat_the_cells_of_the_rows_are_fetched(narrow):
    td = rollouts(prompts=64, repeats=8)
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


@pytest.mark.parametrize("one_object", [True, False])
def test_of_payloads_those_of_the_rows_are_fetched(one_object):
    images = [{"pixels": torch.rand(60, 100) + i} for i in range(4)]
    rows = [{"pixels": image["pixels"].clone()} for image in images for _ in (0, 1)]
    rows = [image for image in images for _ in (0, 1)] if one_object else rows
    td = TensorDict({"mm": NonTensorStack(*rows)}, batch_size=[8])
    for chosen in ([3, 2, 3], [6]):
        store = Store(encode(td, elide=True))
        found = open_wire(store).rows(chosen)["mm"].tolist()
        assert_same(found, [rows[i] for i in chosen])
        assert store.fetched < images[0]["pixels"].nbytes + 8000
        assert (found[0] is found[-1]) == (one_object or len(chosen) == 1)


@pytest.mark.parametrize("choose", [slice(2, 5), [3, 1], slice(None)])
def test_rows_that_a_rectangle_only_claims_take_no_memory(choose):
    rows = 1 << 23
    batch = open_wire(encode(TensorDict({"x": torch.empty(rows, 0)}, [rows])))
    chosen = batch if choose == slice(None) else batch.rows(choose)
    tracemalloc.start()
    try:
        assert chosen["x"].shape == (len(chosen), 0)
        assert decode(chosen.select(["x"]).to_frames())["x"].shape == (len(chosen), 0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- what is read ------------------------------------------------------------------------------


RAGGED = jagged(dim=2, shape=[3, 4])
OFFSETS = int64s(0, 2, 4) + bytes(12)
STRIDED = strided_nested(3, 2, 1, (0, 16))
SHAPES = int64s(1, 2) + b"abc"


def payload_of(*sizes):
    return node("NON_TENSOR_DATA", len(sizes), numbers=sizes, children=["x"])


@pytest.mark.parametrize(
    ("sizes", "leaf", "payload", "reason"),
    [
        ([2, 3], RAGGED, OFFSETS, None),
        ([2, 5], RAGGED, OFFSETS, "bad_value"),
        ([2, 3, 4], RAGGED, OFFSETS, "bad_value"),
        ([2], STRIDED, SHAPES, None),
        ([3], STRIDED, SHAPES, "bad_value"),
        # tensordict would change the size of these to that of the batch around them
        ([1], tensordict([2], {}), b"", "bad_rows"),
        ([1, 3], tensordict([1, 4], {}), b"", "bad_rows"),
        ([1, 3], tensordict([1], {}), b"", "bad_rows"),
        ([1], payload_of(2), b"", "bad_rows"),
        ([1, 3], payload_of(1, 4), b"", "bad_rows"),
        ([1, 3], payload_of(1), b"", "bad_rows"),
    ],
)
def test_columns_have_the_dims_of_their_batch(sizes, leaf, payload, reason):
    frames = message(
        tensordict(sizes, {"x": leaf}), payload, groups=[[0, 0, 2, 2, 2]] * (leaf is RAGGED)
    )
    if reason is None:
        assert_same(open_wire(frames)["x"], decode(frames)["x"])
        return
    whole = refused(decode, frames)
    # tensordict itself refuses these dims of tensors, when it gets all columns.
    assert (whole.reason, whole.path) == (reason, "$" if reason == "bad_value" else "$.x")
    for read in (
        lambda batch: batch["x"],
        lambda batch: batch.to_tensordict(),
        lambda batch: batch.rows([sizes[0] - 1]).to_tensordict(),
    ):
        error = refused(read, open_wire(frames))
        assert (error.reason, error.path) == ("bad_rows", "$.x")
        assert f"{sizes}" in error.detail


@pytest.mark.parametrize("at", [0, 8])
def test_complex_cells_at_any_address_that_numpy_allows(at):
    """torch copies rows of complex128 by instructions that end the process 8 bytes off."""
    cells = np.arange(250).reshape(10, 25).astype(np.complex128)
    given = torch.from_numpy(at_odd_address(cells, at).view(np.complex128).reshape(10, 25))[:, 1:6]
    assert given.data_ptr() % 16 == at
    assert_same(decode(encode(given)), torch.from_numpy(cells)[:, 1:6])

    batch = TensorDict({"c": stack_or_nest([torch.from_numpy(cells[:n]) for n in (2, 5, 3)])}, [3])
    opened = open_wire([at_odd_address(frame, at) for frame in encode(batch)])
    for rows in ([0, 1, 2], [1, 2], [2, 0]):
        for found in (opened.rows(rows).to_tensordict(), decode(opened.rows(rows).to_frames())):
            assert_same(found, select_rows(batch, rows))


@pytest.mark.parametrize(
    "options", [{"narrow": True}, {"elide": True, "narrow": True}, {"compress": "zstd"}]
)
def test_messages_that_share_or_are_compressed_are_joined_with_others(options):
    batches = [rollouts(seed, prompts) for seed, prompts in ((0, 3), (1, 1), (2, 2))]
    plain = [encode(td) for td in batches]
    messages = [encode(batches[0], **options), plain[1], [to_blob(encode(batches[2], **options))]]
    for chosen in (slice(None), [23, 0, 12, 12, 13, 5], slice(8, 20)):
        ours, theirs = (concat_rows(m).rows(chosen) for m in (messages, plain))
        assert_same(ours.to_tensordict(), theirs.to_tensordict())
        assert_same(decode(ours.to_frames()), theirs.to_tensordict())
        for name in ours.fields:
            assert ours.row_lengths(name).tolist() == theirs.row_lengths(name).tolist()
    for name, column in materialize(plain).items():
        assert_same(materialize(messages)[name], column)


def test_the_rows_of_a_dict_whose_first_column_is_a_list_of_views():
    cells = torch.arange(10)
    opened = open_wire(
        encode(BatchedDataDict(x=[cells[0:3], cells[3:5], cells[5:10]], r=torch.ones(3)))
    )
    assert len(opened) == 3
    assert opened["r"].tolist() == [1, 1, 1]
    assert [len(row) for row in opened["x"].tolist()] == [3, 2, 5]


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda b: b.select(["x"]), KeyError, "c0"),
        (lambda b: b["x"], KeyError, "'x'"),
        (lambda b: b.rows([100]), IndexError, "0 to 99, found 100"),
        (lambda b: b.rows(-101), IndexError, "-101"),
        (lambda b: b.rows([0.5]), TypeError, "float64"),
        (lambda b: b.rows("x"), TypeError, "slice"),
        (lambda b: b.rows(torch.ones(3, dtype=torch.bool)), TypeError, "100 booleans"),
    ],
)
def test_bad_choices(call, error, text):
    with pytest.raises(error, match=text):
        call(open_wire(packed()))


@pytest.mark.parametrize(
    "value", [1, {"a": torch.ones(1)}, [TensorDict({}, [1])], TensorDict({}, [])]
)
def test_values_that_are_not_batches_cannot_be_opened(value):
    with pytest.raises(WireFormatError):
        open_wire(encode(value))


def test_sources_that_return_too_little_or_anything_else():
    with pytest.raises(WireFormatError, match="expected 24 bytes from the source, found 0"):
        open_wire(lambda offset, size: b"")
    with pytest.raises(WireFormatError, match="preamble"):
        open_wire(lambda offset, size: bytes(size))
    blob = to_blob(packed())[: 24 + 2000]
    with pytest.raises(WireFormatError, match=r"^\$\.c\d \(bytes "):
        open_wire(lambda offset, size: blob[offset : offset + size]).to_tensordict()


@pytest.mark.parametrize(
    "frames",
    [
        # a jagged column without a byte, and 2**40 runs of it
        message(
            tensordict([2], {"x": jagged(dim=2, shape=[2**40, 0], offset=0)}),
            bytes(24),
            groups=[[0, 0, 2, 0, 0]],
        ),
        message(
            tensordict(
                [2],
                {f"{i}": node("NON_TENSOR_ROWS", numbers=[0, 24, 0, 0, 976]) for i in range(500)},
            ),
            bytes(1000),
            groups=[[0, 0, 2, 488, 488]],
        ),
        message(tensordict([2**40, 0], {})),
    ],
)  # fmt: skip
def test_forged_batches_cost_little(frames):
    def read(frames):
        open_wire(frames).rows(slice(None, None, -1)).to_tensordict()

    assert peak_of(outcome, read, frames) < 2_000_000


def test_errors_in_chosen_rows_name_the_row_of_the_message():
    inner = row_message(message(map_of({"x": tensor()}), b"\7"))
    written = forged_rows("a", record("BIG_INT", b""), inner, "b")
    column = node("NON_TENSOR_ROWS", numbers=[0, 0, written.stored, 0, len(written.data)])
    frames = message(tensordict([4], {"x": column}), written.payload, groups=[written.group])
    for rows in ([1], [3, 1], slice(1, 3)):
        with pytest.raises(WireFormatError) as caught:
            open_wire(frames).rows(rows).to_tensordict()
        assert caught.value.path == "$.x[1]"
    items = open_wire(frames).rows([3, 2, 0])["x"].tolist()
    assert [items[0], items[1]["x"].tolist(), items[2]] == ["b", [7], "a"]
