"""Batches as .npz, Arrow and safetensors: as others read them, and back bit for bit."""

import io
import json
import warnings
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import ArgumentError, ArgumentTypeError, encode, open_wire, stack_or_nest
from jagcodec.batch.exchange import (
    ARROW_DTYPES,
    NUMPY_DTYPES,
    SAFETENSORS_DTYPES,
    Columns,
    JaggedRows,
    batch_of_columns,
    columns_of_batch,
    format_of,
    from_arrow,
    from_npz,
    from_safetensors,
    to_arrow,
    to_npz,
    to_safetensors,
)
from jagcodec.testing import assert_same
from jagcodec.testing.strategies import tensors

TEXT = {"npz": (str,), "arrow": (str, bytes), "safetensors": ()}
DTYPES = {"npz": NUMPY_DTYPES, "arrow": ARROW_DTYPES, "safetensors": SAFETENSORS_DTYPES}
WAYS = {
    "npz": (to_npz, from_npz),
    "arrow": (to_arrow, from_arrow),
    "safetensors": (to_safetensors, from_safetensors),
}
LIBRARY = {"npz": "numpy", "arrow": "pyarrow", "safetensors": "safetensors"}


@pytest.fixture(params=[*WAYS])
def to(request):
    pytest.importorskip(LIBRARY[request.param])
    return request.param


@st.composite
def batches(draw, to):
    """A batch of the kinds that a format has."""
    rows = draw(st.integers(0, 4))
    names = draw(st.lists(st.text("ab.0", min_size=1, max_size=3), min_size=1, unique=True))
    columns = {}
    for name in names:
        kind = draw(st.sampled_from(["tensor", "jagged", *TEXT[to]]))
        dtype = getattr(torch, draw(st.sampled_from(sorted(DTYPES[to]))))
        inner = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
        if kind == "tensor":
            columns[name] = draw(tensors((rows, *inner), dtype))
        elif kind == "jagged":
            lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
            offsets = np.cumsum([0, *lengths], dtype=np.int64)
            columns[name] = JaggedRows(draw(tensors((sum(lengths), *inner), dtype)), offsets)
        else:
            text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
            item = text if kind is str else st.binary()
            columns[name] = draw(st.lists(item, min_size=rows, max_size=rows))
    scalars = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text("xy"))
    meta = draw(st.dictionaries(st.text("mn"), scalars, max_size=2))
    return batch_of_columns(Columns(rows, columns, {})), meta


@pytest.mark.parametrize("to", [*WAYS])
@given(data=st.data())
def test_round_trips_are_lossless(to, data):
    pytest.importorskip(LIBRARY[to])
    td, meta = data.draw(batches(to))
    write, read = WAYS[to]
    opened = open_wire(encode(td, meta=meta or None))
    found = read(write(columns_of_batch(opened)))
    assert_same(batch_of_columns(found), td)
    assert found.meta == meta


def small():
    return TensorDict(
        {
            "ids": stack_or_nest([torch.tensor([1, 2]), torch.tensor([3])]),
            "reward": torch.tensor([0.5, -1.0]),
            "image": torch.arange(8, dtype=torch.uint8).view(2, 2, 2),
            "tag": NonTensorStack("x", "ß"),
        },
        batch_size=[2],
    )


def columns(td, **meta):
    return columns_of_batch(open_wire(encode(td, meta=meta or None)))


def test_what_numpy_reads():
    with np.load(io.BytesIO(to_npz(columns(small(), step=3)))) as archive:
        assert archive.files == [
            *("ids.values", "ids.offsets", "reward", "image", "tag", "jagcodec"),
        ]
        assert archive["ids.values"].tolist() == [1, 2, 3]
        assert archive["ids.offsets"].tolist() == [0, 2, 3]
        assert archive["ids.offsets"].dtype == np.int64
        assert archive["image"].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert archive["tag"].tolist() == ["x", "ß"]
        assert json.loads(str(archive["jagcodec"]))["meta"] == {"step": 3}


def test_what_arrow_reads():
    pa = pytest.importorskip("pyarrow")
    table = pa.ipc.open_file(pa.BufferReader(to_arrow(columns(small())))).read_all()
    assert table.to_pydict() == {
        "ids": [[1, 2], [3]],
        "reward": [0.5, -1.0],
        "image": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        "tag": ["x", "ß"],
    }
    assert table.schema.field("ids").type == pa.large_list(pa.int64())


def test_what_safetensors_reads():
    library = pytest.importorskip("safetensors.torch")
    td = small().exclude("tag")
    td["half"] = torch.ones(2, dtype=torch.bfloat16)
    found = library.load(to_safetensors(columns(td)))
    assert found["ids.values"].tolist() == [1, 2, 3]
    assert found["ids.offsets"].tolist() == [0, 2, 3]
    assert found["half"].dtype == torch.bfloat16


def test_files_that_others_wrote():
    stream = io.BytesIO()
    arrays: dict[str, Any] = {
        "a": np.ones((2, 3), ">f4"),
        "x.values": np.arange(3),
        "x.offsets": [0, 1, 3],
    }
    np.savez_compressed(stream, **arrays)
    td = batch_of_columns(from_npz(stream.getvalue()))
    assert td["a"].dtype == torch.float32
    assert [row.tolist() for row in td["x"].unbind()] == [[0], [1, 2]]


def test_arrow_that_others_wrote():
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {
            "ids": pa.chunked_array([[[1, 2]], [[3], []]], pa.list_(pa.int32())),
            "text": ["a", "b", "c"],
            "flag": [True, False, True],
        }
    ).slice(1)
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    td = batch_of_columns(from_arrow(stream.getvalue()))
    assert [row.tolist() for row in td["ids"].unbind()] == [[3], []]
    assert td["ids"].dtype == torch.int32
    assert td["text"] == ["b", "c"]
    assert td["flag"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (torch.ones(2, dtype=torch.complex32), "complex32"),
        (NonTensorStack("a", 1), "objects"),
        (NonTensorData({"a": 1}, batch_size=[2]), "objects"),
        (TensorDict({"y": torch.ones(2)}, batch_size=[2]), "a batch in a batch"),
        (torch.ones(2).to_sparse(), "objects"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_a_format_cannot_say_is_refused_by_name(to, column, said):
    td = TensorDict({"fine": torch.ones(2), "odd": column}, batch_size=[2])
    with pytest.raises(ArgumentError, match="odd") as raised:
        WAYS[to][0](columns(td))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("format", "dtype"),
    [("npz", "bfloat16"), ("arrow", "bfloat16"), ("arrow", "complex64"), ("npz", "float8_e5m2")],
)
def test_dtypes_that_a_format_has_not_are_refused(format, dtype):  # noqa: A002
    pytest.importorskip(LIBRARY[format])
    td = TensorDict({"odd": torch.ones(2).to(getattr(torch, dtype))}, batch_size=[2])
    with pytest.raises(ArgumentError, match=f"column odd: .*{dtype}.*cast it"):
        WAYS[format][0](columns(td))


def test_meta_that_json_would_change_is_refused(to):
    td = small().exclude("tag")
    with pytest.raises(ArgumentError, match="meta"):
        WAYS[to][0](columns(td, pair=(1, 2)))


def test_names_that_mean_something_else_are_refused():
    td = TensorDict({"a.values": torch.ones(2)}, batch_size=[2])
    with pytest.raises(ArgumentError, match=r"a\.values.*rename"):
        to_npz(columns(td))


def test_text_that_numpy_would_cut_is_refused():
    td = TensorDict({"tag": NonTensorStack("x\0", "y")}, batch_size=[2])
    with pytest.raises(ArgumentError, match="ends in NUL"):
        to_npz(columns(td))


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"ARROW1", b"\xff" * 100])
def test_files_that_are_none(to, data):
    with pytest.raises(ArgumentTypeError, match="expected"):
        WAYS[to][1](data)


def test_columns_of_unequal_rows_are_refused():
    found = Columns(2, {"a": torch.ones(2), "b": torch.ones(3)}, {})
    with pytest.raises(ArgumentError, match="b: expected 2 rows"):
        batch_of_columns(found)
    for offsets in ([], [1, 2], [0, 3, 2]):
        rows = JaggedRows(torch.ones(3), np.array(offsets, dtype=np.int64))
        with pytest.raises(ArgumentError, match="expected offsets from 0"):
            batch_of_columns(Columns(2, {"a": rows}, {}))


def test_nulls_are_refused():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"a": [1, None]})
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ArgumentError, match=r"column a: .*a null at 1; fill it"):
        from_arrow(stream.getvalue())


def test_formats_are_known_by_their_endings():
    assert format_of("A.NPZ").name == ".npz"
    assert format_of("x.feather").name == "Arrow"
    assert format_of("batch.jag") is None


@pytest.mark.parametrize(
    ("to", "name"),
    [
        *((to, "a\ud800") for to in WAYS),
        ("npz", "a\0b"),
        ("npz", "a" * 70_000),
        ("safetensors", "__metadata__"),
    ],
)
def test_names_that_a_format_cannot_say_are_refused(to, name):
    pytest.importorskip(LIBRARY[to])
    td = TensorDict({name: torch.ones(2)}, batch_size=[2])
    with pytest.raises(ArgumentError, match="rename the column"):
        WAYS[to][0](columns(td))


def test_a_column_is_not_taken_for_another_of_a_similar_name():
    """`np.load` gives the array "a" for "a.npy"."""
    td = TensorDict({"a": torch.ones(2), "a.npy": torch.zeros(2)}, batch_size=[2])
    assert_same(batch_of_columns(from_npz(to_npz(columns(td)))), td)


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream


def test_npz_of_others_that_is_no_batch_is_refused():
    rows = {"a.values": np.ones(3), "a.offsets": np.array([0, 1, 3])}
    with pytest.raises(ArgumentTypeError, match="beside its values and offsets"):
        from_npz(npz(a=np.ones(2), **rows).getvalue())
    with pytest.raises(ArgumentTypeError, match="found 'one number'"):
        batch_of_columns(from_npz(npz(a=np.ones(2), b=np.array(5)).getvalue()))
    broken = np.array(["abc"])
    broken.view(np.uint32)[0] = 0x7FFFFFFF
    with pytest.raises(ArgumentTypeError, match=r"found .*codec can't decode"):
        from_npz(npz(a=broken).getvalue())
    for member in ("README.txt", "a.npy"):
        stream = npz(a=np.ones(2))
        with zipfile.ZipFile(stream, "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a name that is there twice
            archive.writestr(member, "text")
        with pytest.raises(ArgumentTypeError, match=member):
            from_npz(stream.getvalue())


def test_arrow_metadata_of_others_that_is_no_text_is_refused():
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"a": [1]}).replace_schema_metadata({b"jagcodec": b"\xff\xfe\x00"})
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ArgumentTypeError, match="the entry 'jagcodec'"):
        from_arrow(stream.getvalue())
