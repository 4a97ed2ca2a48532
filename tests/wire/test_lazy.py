"""Reading part of a message: the same values, and no byte more than it takes."""

import mmap
import pickle
import re
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    WireFormatError,
    decode,
    dump,
    encode,
    encode_fields,
    materialize,
    open_wire,
    pack_jagged_fields,
    stack_or_nest,
    to_blob,
)
from jagcodec._arguments import known_names
from jagcodec.errors import ArgumentKeyError
from jagcodec.testing import jagged_batches
from jagcodec.types import FieldSchema
from tests.helpers import receive
from tests.oracle import assert_same, bits, rows_of
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


class Store:
    """A blob behind ``(offset, size) -> buffer``, which remembers what it was asked for."""

    def __init__(self, blob):
        self.blob = bytes(blob)
        self.asked = []

    def __call__(self, offset, size):
        self.asked.append((offset, size))
        return self.blob[offset : offset + size]

    @property
    def fetched(self):
        return sum(size for _, size in self.asked)


def sources(frames):
    blob = to_blob(frames)
    return [
        receive(frames),
        receive(frames, bytes),
        blob,
        Store(blob),
    ]


def expected_rows(leaf, rows):
    """Chosen rows of a leaf, by the list-of-rows model."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        every = rows_of(leaf)
        return [every[i] for i in rows]
    if isinstance(leaf, torch.Tensor):
        every = bits(leaf)
        return [every[i] for i in rows]
    items = leaf.tolist() if isinstance(leaf, NonTensorStack) else list(leaf.data)
    # As texts: a NaN is not equal to itself.
    return [(type(items[i]), repr(items[i])) for i in rows]


@st.composite
def choices(draw, rows):
    """(index, the rows it means)"""
    kind = draw(st.sampled_from(["slice", "list", "mask", "tensor", "array"]))
    if kind == "slice":
        bound = st.none() | st.integers(-rows - 1, rows + 1)
        index = slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, -1])))
        return index, list(range(rows))[index]
    if kind == "mask":
        mask = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        return torch.tensor(mask, dtype=torch.bool), [i for i in range(rows) if mask[i]]
    wanted = st.lists(st.integers(-rows, rows - 1), max_size=6) if rows else st.just([])
    index = draw(wanted)
    meant = [i % rows for i in index]
    if kind == "tensor":
        return torch.tensor(index, dtype=torch.int64), meant
    return (np.array(index, dtype=np.int32) if kind == "array" else index), meant


@given(jagged_batches(), st.booleans(), st.data())
def test_chosen_fields_and_rows_are_the_same_values(batch, narrow, data):
    frames = encode_fields(
        batch.fields,
        lengths=batch.lengths,
        token_aligned_fields=batch.token_aligned_fields,
        narrow=narrow,
    )
    whole = decode(frames)
    rows = len(batch.lengths)
    names = data.draw(st.lists(st.sampled_from(sorted(batch.fields) or [""]), unique=True))
    names = [name for name in names if name]
    first, meant = data.draw(choices(rows))
    second, again = data.draw(choices(len(meant)))
    meant = [meant[i] for i in again]
    for source in sources(frames):
        assert_same(open_wire(source).to_tensordict(), whole)
        part = open_wire(source).rows(first).select(names).rows(second)
        assert part.fields == tuple(names)
        assert part.batch_size == (len(meant),)
        assert len(part) == len(meant)
        td = part.to_tensordict()
        assert list(td.keys()) == names
        for name in names:
            leaf = whole.get(name)
            got = td.get(name)
            assert expected_rows(got, list(range(len(meant)))) == expected_rows(leaf, meant)
            if isinstance(leaf, torch.Tensor):
                assert got.dtype == leaf.dtype
                assert got.layout == leaf.layout


@given(jagged_batches(), st.integers(0, 9))
def test_materialize_takes_it(batch, wider):
    frames = encode_fields(
        batch.fields,
        lengths=batch.lengths,
        token_aligned_fields=batch.token_aligned_fields,
    )
    width = max([wider, *batch.lengths.tolist()])
    for layout in ("padded", "packed", "jagged"):
        straight = materialize(open_wire(frames), layout, pad_to_seqlen=width)
        around = materialize(decode(frames), layout, pad_to_seqlen=width)
        assert_columns(straight, around)


def assert_columns(actual, expected):
    assert list(actual) == list(expected)
    for name, column in expected.items():
        if isinstance(column, tuple):
            assert_same(tuple(actual[name]), tuple(column))
        elif isinstance(column, dict):
            assert_columns(actual[name], column)
        else:
            assert_same(actual[name], column)


def rich():
    inner = TensorDict({"x": stack_or_nest([torch.ones(n) for n in (1, 2, 3)])}, [3])
    lazy = [TensorDict({"v": torch.ones(i)}, []) for i in range(3)]
    strided = [torch.ones(n) for n in (1, 2, 3)]
    return TensorDict(
        {
            "wide": stack_or_nest([torch.arange(2 * n).view(2, n) for n in (1, 3, 2)]),
            "inner": inner,
            "names": NonTensorStack("a", {"b": (1,)}, None),
            "objects": np.array(["x", ["y"], 3], dtype=object),
            "note": "for all",
            "lazy": LazyStackedTensorDict(*lazy, stack_dim=0),
            "strided": torch.nested.nested_tensor(strided, layout=torch.strided),
            "sparse": torch.eye(3).to_sparse(),
            "flag": torch.tensor([True, False, True]),
        },
        [3],
    )


def test_leaves_of_every_kind():
    td = rich()
    for narrow in (False, True):
        batch = open_wire(encode(td, narrow=narrow))
        assert_same(batch.to_tensordict(), td)
        part = batch.rows([2, 0]).to_tensordict()
        assert rows_of(part["wide"]) == [rows_of(td["wide"])[i] for i in (2, 0)]
        assert rows_of(part["inner", "x"]) == [rows_of(td["inner", "x"])[i] for i in (2, 0)]
        assert part.get("names").tolist() == [None, "a"]
        assert part.get("objects").data.tolist() == [3, "x"]
        assert part["note"] == "for all"
        assert part.get("note").batch_size == (2,)
        assert part.get("lazy").tensordicts[0]["v"].tolist() == [1, 1]
        assert [t.tolist() for t in part["strided"].unbind()] == [[1, 1, 1], [1]]
        assert part["sparse"].to_dense().tolist() == [[0, 0, 1], [1, 0, 0]]
        assert part["flag"].tolist() == [True, True]


def test_the_schema_comes_from_the_header_alone():
    store = Store(to_blob(encode(rich())))
    batch = open_wire(store)
    opened = store.fetched
    assert batch.schema["wide"] == FieldSchema("jagged", torch.int64, (3, 2, None))
    assert batch.schema["flag"] == FieldSchema("tensor", torch.bool, (3,))
    assert [batch.schema[n].kind for n in ("names", "note", "inner", "lazy", "sparse")] == [
        "object",
        "object",
        "tensordict",
        "lazy_stack",
        "sparse_coo",
    ]
    assert batch.rows([0]).schema["flag"].shape == (1,)
    assert store.fetched == opened
    assert len(store.asked) == 2


def columns(rows=100, width=1000):
    return {f"c{i}": torch.arange(rows * width).view(rows, width) + i for i in range(4)}


def packed(**options):
    lengths = torch.arange(100) * 10
    fields = columns()
    return encode_fields(fields, lengths=lengths, token_aligned_fields=fields, **options)


def test_a_store_is_asked_for_the_header_and_the_ranges_alone():
    frames = packed()
    store = Store(to_blob(frames))
    batch = open_wire(store)
    header = memoryview(frames[0]).nbytes
    assert store.asked == [(0, 24), (24, header)]
    store.asked.clear()
    part = batch.select(["c2"]).rows(slice(10, 12)).to_tensordict()
    assert rows_of(part["c2"]) == [list(range(10002, 10102)), list(range(11002, 11112))]
    offsets, values = store.asked
    assert offsets[1] == 8 * 101
    assert values[1] == 8 * (100 + 110)
    store.asked.clear()
    batch.select(["c0", "c1"]).rows([3, 4, 90]).to_tensordict()
    assert [size for _, size in store.asked] == [8 * 70, 8 * 900] * 2


def test_a_mapped_file_is_touched_only_where_it_is_read(tmp_path):
    """Proved by bytes: everything but the chosen ranges is damaged, and nobody notices."""
    path = tmp_path / "batch.jag"
    dump(decode(packed()), path)
    blob = bytearray(path.read_bytes())
    store = Store(blob)
    expected = open_wire(store).select(["c3"]).rows(slice(20, 30)).to_tensordict()
    keep = bytearray(len(blob))
    for offset, size in store.asked:
        keep[offset : offset + size] = blob[offset : offset + size]
    assert sum(map(bool, keep)) < len(blob) / 50
    path.write_bytes(keep)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        part = open_wire(mapped).select(["c3"]).rows(slice(20, 30)).to_tensordict()
        assert_same(part, expected)
        del part


def test_contiguous_rows_alias_writable_memory():
    frames = receive(packed())
    part = open_wire(frames).select(["c1"]).rows(slice(50, 60)).to_tensordict()
    begin = np.frombuffer(frames[3], np.uint8).__array_interface__["data"][0]
    inside = part["c1"].values().data_ptr() - begin
    assert 0 < inside < len(frames[3])
    assert len(pickle.dumps(part["c1"].values())) < 8 * 5450 + 1000
    apart = open_wire([bytes(frame) for frame in frames]).select(["c1"]).rows(slice(50, 60))
    values = apart.to_tensordict()["c1"].values()
    values.zero_()
    assert values.untyped_storage().nbytes() == values.numel() * 8


def test_columns_of_one_raggedness_still_multiply():
    part = open_wire(packed()).rows([5, 1, 5]).to_tensordict()
    assert (part["c0"] * part["c3"]).values().shape == (50 + 10 + 50,)


def test_a_batch_of_the_whole_payload_reads_like_decode():
    td = pack_jagged_fields({"a": torch.ones(0, 3)}, lengths=torch.zeros(0, dtype=torch.int64))
    assert_same(open_wire(encode(td)).to_tensordict(), td)
    wide = TensorDict({"x": torch.ones(2, 3)}, [2, 3])
    assert_same(open_wire(encode(wide)).to_tensordict(), wide)
    assert open_wire(encode(wide)).rows([1]).to_tensordict().batch_size == (1, 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda b: b.select(["x"]), KeyError, "c0"),
        (lambda b: b.leaf("x"), KeyError, "'x'"),
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


def test_messages_that_are_no_batch():
    for value in (1, {"a": torch.ones(1)}, [TensorDict({}, [1])], TensorDict({}, [])):
        with pytest.raises(WireFormatError):
            open_wire(encode(value))
    with pytest.raises(WireFormatError, match="expected 24 bytes from the source, found 0"):
        open_wire(lambda offset, size: b"")
    with pytest.raises(WireFormatError, match="preamble"):
        open_wire(lambda offset, size: bytes(size))
    blob = to_blob(packed())
    cut = open_wire(lambda offset, size: blob[: 24 + 2000][offset : offset + size])
    with pytest.raises(WireFormatError, match=r"^\$\.c\d \(bytes "):
        cut.to_tensordict()


def test_damaged_fields_are_named():
    td = TensorDict({"a": torch.ones(2), "b": NonTensorData("x", batch_size=[2])}, [2])
    frames = receive(encode(td))
    at = frames[0].index(b"float32")
    frames[0][at : at + 7] = b"float33"
    with pytest.raises(WireFormatError, match=r"^\$\.a: .*float33"):
        open_wire(frames)


@pytest.mark.parametrize(
    "frames",
    [
        # a jagged column without a byte, and 2**40 runs of it
        message(
            tensordict([2], {"x": jagged(dim=2, shape=[2**40, 0], offset=0)}),
            bytes(24),
            groups=[[0, 0, 2, 0, 0]],
        ),
        # one row of 2**40 tokens without a byte
        message(
            tensordict([1], {"x": jagged(shape=[2**40, 0], offset=0)}),
            groups=[[0, 0, 1, 2**40, 2**40]],
        ),
        # many columns over the same bytes
        message(
            tensordict([2], {f"{i}": tensor(shape=[2, 500]) for i in range(500)}), bytes(1000)
        ),
        message(
            tensordict([2], {f"{i}": tensor("int64", [2, 4000], stored=1) for i in range(500)}),
            bytes(1000),
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
    tracemalloc.start()
    try:
        open_wire(frames).rows(slice(None, None, -1)).to_tensordict()
    except WireFormatError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2_000_000


def test_batches_nest_only_so_deep():
    part = tensordict([2], {})
    for _ in range(300):
        part = tensordict([2], {"x": part})
    with pytest.raises(WireFormatError, match="levels"):
        open_wire(message(part))


def test_how_no_cells_are_stored_means_nothing():
    part = tensordict([2], {"x": tensor("float32", [2, 0], stored=99)})
    for rows in (slice(None), slice(0, 1), [1, 0], []):
        assert open_wire(message(part)).rows(rows).to_tensordict()["x"].shape[1:] == (0,)


def test_errors_in_chosen_rows_name_the_row_of_the_message():
    inner = row_message(message(map_of({"x": tensor()}), b"\7"))
    written = forged_rows("a", record("BIG_INT", b""), inner, "b")
    column = node("NON_TENSOR_ROWS", numbers=[0, 0, written.stored, 0, len(written.data)])
    frames = message(tensordict([4], {"x": column}), written.payload, groups=[written.group])
    for rows, path in (([1], "$.x[1]"), ([3, 1], "$.x[1]"), (slice(1, 3), "$.x[1]")):
        with pytest.raises(WireFormatError) as caught:
            open_wire(frames).rows(rows).to_tensordict()
        assert caught.value.path == path
    items = open_wire(frames).rows([3, 2, 0]).leaf("x").tolist()
    assert [items[0], items[1]["x"].tolist(), items[2]] == ["b", [7], "a"]


def test_a_nested_tensor_of_other_rows_is_refused():
    strided = strided_nested(3, 2, 1, (0, 16))
    payload = int64s(1, 2) + b"abc"
    frames = message(tensordict([2], {"x": strided}), payload)
    assert [len(row) for row in open_wire(frames).leaf("x").unbind()] == [1, 2]
    frames = message(tensordict([3], {"x": strided}), payload)
    for read in (lambda b: b.to_tensordict(), lambda b: b.rows([2]).to_tensordict()):
        with pytest.raises(WireFormatError):
            read(open_wire(frames))


def test_a_column_of_very_many_runs_is_read_whole():
    rows = [torch.arange(5000 * n).view(5000, n) for n in (1, 2, 3)]
    td = TensorDict({"x": stack_or_nest(rows)}, [3])
    part = open_wire(encode(td)).rows([2, 0]).to_tensordict()
    assert [bits(row) for row in part["x"].unbind()] == [bits(rows[2]), bits(rows[0])]


@pytest.mark.parametrize("form", ["frames", "blob", "blob with more behind it", "callable"])
@given(fields=jagged_batches(), data=st.data())
def test_what_is_chosen_goes_on_as_a_message(form, fields, data):
    frames = encode_fields(
        fields.fields, lengths=fields.lengths, token_aligned_fields=fields.token_aligned_fields
    )
    batch = decode(frames)
    blob = to_blob(frames)
    source = {
        "frames": frames,
        "blob": blob,
        "blob with more behind it": blob + b"secret",
        "callable": lambda offset, size: blob[offset : offset + size],
    }[form]
    opened = open_wire(source)  # type: ignore[arg-type]
    assert_same(decode(opened.to_frames()), batch)
    index, _ = data.draw(choices(len(opened)))
    chosen = opened.rows(index)
    assert_same(open_wire(chosen.to_frames()).to_tensordict(), chosen.to_tensordict())
    assert not any(b"secret" in bytes(frame) for frame in opened.to_frames())


def test_a_whole_batch_goes_on_without_a_copy_and_read_only():
    frames = packed()
    batch = open_wire(frames)
    sent = batch.to_frames()
    for found, expected in zip(sent, frames, strict=True):
        assert np.shares_memory(np.frombuffer(found, "u1"), np.frombuffer(expected, "u1"))
    assert all(memoryview(frame).readonly for frame in sent)
    assert len(batch.select(["c0"]).to_frames()) < len(frames)


def test_pickled_columns_go_on_only_where_they_may_be_read():
    td = TensorDict({"path": NonTensorData(pickle.PickleError, batch_size=[2])}, batch_size=[2])
    frames = encode(td, allow_pickle=True)
    with pytest.raises(WireFormatError, match="pickle"):
        open_wire(frames).rows([0]).to_frames()
    again = open_wire(frames, allow_pickle=True).rows([0]).to_frames()
    assert decode(again, allow_pickle=True)["path"] is pickle.PickleError


def test_a_column_is_chosen_without_a_look_at_all_others():
    """Joins ask for each column by itself, of messages that may have very many."""

    class Counted(dict):
        looked = 0

        def __iter__(self):
            Counted.looked += 1
            return super().__iter__()

    columns = Counted({f"c{i}": i for i in range(9)})
    assert known_names(["c3"], columns, "select") == ["c3"]
    assert Counted.looked == 0
    with pytest.raises(ArgumentKeyError):
        known_names(["d"], columns, "select")


@pytest.mark.parametrize("options", [{}, {"narrow": True, "elide": True}])
def test_a_batch_of_two_dims_has_columns_that_are_ragged_behind_them(options):
    rows = [torch.arange(2 * n).view(2, 1, n) for n in (3, 1, 0)]
    ragged = torch.nested.nested_tensor_from_jagged(
        torch.cat(rows, dim=2), torch.tensor([0, 3, 4, 4]), jagged_dim=3
    )
    td = TensorDict({"x": ragged, "y": torch.arange(6).view(3, 2)}, [3, 2])
    frames = encode(td, **options)
    batch = open_wire(frames)
    assert_same(batch.to_tensordict(), decode(frames))
    assert_same(batch.to_tensordict(), td)
    assert batch.schema["x"].shape == (3, 2, 1, None)
    picked = torch.nested.nested_tensor_from_jagged(
        torch.cat([rows[2], rows[0]], dim=2), torch.tensor([0, 0, 3]), jagged_dim=3
    )
    assert_same(batch.rows([2, 0])["x"], picked)
    made, wanted = materialize(batch), materialize(td)
    assert torch.equal(made["x"], wanted["x"])
    assert made["x"].shape == (3, 2, 1, 3)
    # Dims that are not those of the batch, and more dims than there are before the ragged one.
    payload = np.array([0, 2, 4]).tobytes() + bytes(12)
    for sizes, found in (([2, 3], None), ([2, 5], [2, 3]), ([2, 3, 4], [2, 3])):
        column = jagged(dim=2, shape=[3, 4])
        frames = message(tensordict(sizes, {"x": column}), payload, groups=[[0, 0, 2, 2, 2]])
        if found is None:
            assert_same(open_wire(frames)["x"], decode(frames)["x"])
            continue
        for read in (lambda f: open_wire(f)["x"], decode):
            with pytest.raises(WireFormatError, match=re.escape(f"{sizes}")):
                read(frames)


@pytest.mark.parametrize("at", [0, 8])
def test_complex_cells_at_any_address_that_numpy_allows(at):
    """torch copies rows of complex128 by instructions that end the process 8 bytes beside one."""
    memory = np.zeros(8192, dtype=np.uint8)
    first = -memory.ctypes.data % 16 + at
    cells = memory[first : first + 4000].view(np.complex128).reshape(10, 25)
    cells += np.arange(250).reshape(10, 25)
    given = torch.from_numpy(cells)[:, 1:6]
    assert given.data_ptr() % 16 == at
    assert_same(decode(encode(given)), torch.arange(250.0).view(10, 25)[:, 1:6].to(given.dtype))

    batch = TensorDict({"c": stack_or_nest([torch.from_numpy(cells[:n]) for n in (2, 5, 3)])}, [3])
    header, frame = encode(batch)
    there = np.zeros(len(frame) + 32, dtype=np.uint8)
    start = -there.ctypes.data % 16 + at
    there[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
    opened = open_wire([header, there[start : start + len(frame)]])
    for rows in ([0, 1, 2], [1, 2], [2, 0]):
        for found in (opened.rows(rows).to_tensordict(), decode(opened.rows(rows).to_frames())):
            for row, cells in zip(rows, found["c"].unbind(), strict=True):
                assert_same(cells, batch["c"].unbind()[row])
