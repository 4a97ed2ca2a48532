"""Wide per-token columns: narrow by name, an inner dim outermost, and cells of inner dims alone."""

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from jagcodec import (
    ArgumentError,
    ArgumentIndexError,
    ArgumentKeyError,
    ArgumentTypeError,
    BatchedDataDict,
    MsgpackEncoder,
    RowBuilder,
    UnsupportedTypeError,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    encode_fields,
    encode_into,
    encode_rows,
    encoded_size,
    join_columns,
    materialize,
    open_wire,
    stack_or_nest,
    to_blob,
)
from jagcodec.ragged.inner_dims import in_memory
from jagcodec.testing import assert_same, bits
from jagcodec.wire.header import read_header
from jagcodec.wire.spec import PLAIN, Kind
from tests.helpers import message, receive
from tests.wire import spec_reader

DTYPES = [torch.int16, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex128]


@st.composite
def wide_rows(draw):
    """Rows (tokens, B...) of random bits, as arrays of cells of one dtype."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=5))
    inner = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    high = 2 if dtype is torch.bool else draw(st.sampled_from([2, 256]))
    shapes = [(n, *inner, dtype.itemsize) for n in lengths]
    cells = [seed.integers(0, high, shape, dtype=np.uint8) for shape in shapes]
    return [tensor_of(row, dtype) for row in cells], inner, dtype


def tensor_of(data, dtype):
    """Bytes (..., itemsize) as a tensor (...)."""
    if not data.size:
        return torch.empty(data.shape[:-1], dtype=dtype)
    return torch.from_numpy(np.ascontiguousarray(data)).view(dtype).squeeze(-1)


def nested(rows, inner=(), dtype=torch.int64):
    """Rows as a nested tensor, also where there are none."""
    values = torch.cat([*rows, torch.empty(0, *inner, dtype=dtype)])
    ends = np.cumsum([0, *(len(row) for row in rows)])
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(ends))


def batch_of(rows, inner, dtype):
    ids = [torch.arange(len(row)) for row in rows]
    columns = {"wide": nested(rows, inner, dtype), "ids": nested(ids)}
    return TensorDict(columns, batch_size=[len(rows)])


def assert_rows(column, rows):
    found = rows_of(column)
    assert [row.shape for row in found] == [row.shape for row in rows]
    assert [bits(row) for row in found] == [bits(row) for row in rows]


def rows_of(column):
    offsets = column.offsets().tolist()
    values = column.values()
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def columns_of(frames):
    """The nodes of a batch's columns by name, and the numbers of the message."""
    header = read_header(frames[0])
    root = header.schema.root
    return dict(zip(root.fields[2], root.children, strict=True)), header.numbers


def stored(frames, name):
    node, numbers = columns_of(frames)[0][name], columns_of(frames)[1]
    while node.kind is Kind.INNER_FIRST:
        (node,) = node.children
    return numbers[node.number + 2]


def counted(blob):
    """A source of ranges, and the sizes that it was asked for."""
    asked: list[int] = []

    def source(offset, size):
        asked.append(size)
        return blob[offset : offset + size]

    return source, asked


# --- an inner dim outermost --------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(wide_rows(), st.data())
def test_what_comes_back_is_what_was_encoded_and_lies_in_the_order_that_was_asked_for(wide, data):
    rows, inner, dtype = wide
    dim = data.draw(st.integers(1, len(inner)))
    narrow = data.draw(st.sampled_from([False, True, {"wide": True}, {"ids": True}]))
    batch = batch_of(rows, inner, dtype)
    frames = encode(
        batch, outermost={"wide": dim}, narrow=narrow, checksum=data.draw(st.booleans())
    )
    for sent in (frames, receive(frames, bytes), to_blob(frames)):
        back = decode(sent)
        assert_same(back, batch)
        assert_rows(back["wide"], rows)
        assert back["wide"].values().is_contiguous()
        back["ids"] * 2 + back["ids"]
    if rows:
        assert back["wide"].offsets() is back["ids"].offsets()

    # The reader that knows the page alone sees the column as it was.
    neutral = spec_reader.read(receive(frames, bytes))[3]["wide"]
    assert neutral[:2] == ("JAGGED", str(dtype).removeprefix("torch."))
    assert [shape for shape, _ in neutral[4]] == [tuple(row.shape) for row in rows]
    cells = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows if row.numel()]
    assert b"".join(data for _, data in neutral[4]) == b"".join(cells)

    # And its bytes lie as numpy moves them.
    node, numbers = columns_of(frames)[0]["wide"], columns_of(frames)[1]
    (child,) = node.children
    buffer, offset, how = numbers[child.number : child.number + 3]
    values = batch["wide"].values()
    if values.numel() and how == PLAIN:
        whole = values.unsqueeze(-1).view(torch.uint8).numpy()
        expected = np.moveaxis(whole, dim, 0).tobytes()
        frame = bytes(memoryview(frames[1 + buffer]))
        assert frame[offset : offset + len(expected)] == expected


@settings(max_examples=100, deadline=None)
@given(wide_rows(), st.data())
def test_cells_of_inner_dims_are_those_that_numpy_chooses(wide, data):
    rows, inner, dtype = wide
    batch = batch_of(rows, inner, dtype)
    outermost = data.draw(st.sampled_from([{}, *({"wide": d} for d in range(1, len(inner) + 1))]))
    frames = encode(batch, outermost=outermost, narrow=data.draw(st.booleans()))
    blob = bytes(to_blob(frames))
    source = data.draw(st.sampled_from([frames, blob, lambda at, size: blob[at : at + size]]))
    opened = open_wire(source)
    expected = [np.arange(row.numel()).reshape(row.shape) for row in rows]  # which cells
    chosen = list(range(len(rows)))
    for _ in range(data.draw(st.integers(1, 3))):
        if chosen and data.draw(st.booleans()):
            picked = data.draw(
                st.lists(st.integers(-len(chosen), len(chosen) - 1), max_size=5)
                | st.just(slice(1, None))
            )
            opened = opened.rows(picked)
            index = np.arange(len(chosen))[picked if picked != [] else slice(0, 0)]
            chosen = [chosen[i] for i in index]
            expected = [expected[i] for i in index]
            continue
        shape = opened.schema["wide"].shape
        assert shape is not None
        dim = data.draw(st.integers(1, len(inner)))
        extent: Any = shape[dim + 1]
        picked = data.draw(
            st.slices(extent)
            | (st.lists(st.integers(-extent, extent - 1), max_size=4) if extent else st.just([]))
        )
        index = np.arange(extent)[picked if picked != [] else slice(0, 0)]
        opened = opened.inner({"wide": (dim, picked)})
        expected = [cells.take(index, axis=dim) for cells in expected]
    wanted = [
        rows[i].reshape(-1)[torch.from_numpy(cells)]
        for i, cells in zip(chosen, expected, strict=True)
    ]
    assert_rows(opened["wide"], wanted)
    if wanted:
        assert opened.schema["wide"].shape == (len(wanted), None, *wanted[0].shape[1:])
    assert opened.row_lengths("wide").tolist() == [len(row) for row in wanted]
    assert_rows(opened.to_tensordict()["wide"], wanted)
    assert_rows(decode(opened.to_frames())["wide"], wanted)
    assert_rows(pickle.loads(pickle.dumps(opened))["wide"], wanted)
    padded = materialize(opened)["wide"]
    for i, row in enumerate(wanted):
        assert bits(padded[i, : len(row)]) == bits(row)
    sent: Any = opened.select(["wide"]).to_frames()
    kinds = {node.kind for node in columns_of(sent)[0].values()}
    if wanted:
        assert kinds == {Kind.INNER_FIRST if outermost else Kind.JAGGED}


def test_only_the_layers_that_are_wanted_are_read():
    rng = np.random.default_rng(0)
    lengths = [300, 0, 150, 50]
    rows = [torch.from_numpy(rng.integers(0, 256, (n, 40, 8), dtype=np.int16)) for n in lengths]
    batch = batch_of(rows, (40, 8), torch.int16)
    column = sum(row.nbytes for row in rows)
    for narrow, whole in ((False, column), (True, column // 2)):
        frames = encode(batch, outermost={"wide": 1}, narrow=narrow)
        blob = bytes(to_blob(frames))
        spare = 24 + len(bytes(frames[0])) + 8 * (len(rows) + 1)

        source, asked = counted(blob)
        layers = [3, 9, 10, -1, 20]
        opened = open_wire(source).inner({"wide": (1, layers)})
        assert_rows(opened["wide"], [row[:, layers] for row in rows])
        assert sum(asked) <= whole // 8 + spare

        source, asked = counted(blob)
        opened = open_wire(source).inner({"wide": (1, slice(5, 10))}).rows([2, 3])
        materialize(opened.select(["wide"]))
        assert sum(asked) <= whole // 8 * 200 // 500 + spare

        # Next to each other they are one range.
        source, asked = counted(blob)
        assert len(open_wire(source).inner({"wide": (1, slice(5, 10))})["wide"]) == 4
        assert len(asked) == 4  # preamble, header, offsets, cells


def test_rows_too_many_to_fetch_one_by_one():
    rows = [torch.full((2, 40, 1), i) for i in range(300)]
    blob = bytes(to_blob(encode(batch_of(rows, (40, 1), torch.int64), outermost={"wide": 1})))
    source, asked = counted(blob)
    chosen = list(range(299, -1, -2))
    opened = open_wire(source).rows(chosen).inner({"wide": (1, [1, 5])})
    assert_rows(opened["wide"], [rows[i][:, [1, 5]] for i in chosen])
    source, asked = counted(blob)
    opened = open_wire(source).rows(chosen)
    assert_rows(opened["wide"], [rows[i] for i in chosen])
    assert len(asked) < 10


def test_every_way_to_encode_takes_it():
    rows = [torch.randint(0, 99, (n, 4, 2)) for n in (3, 1)]
    batch = TensorDict({"wide": stack_or_nest(rows, always_nest=True)}, batch_size=[2])
    options: Any = {"outermost": {"wide": 1}, "narrow": {"wide": True}}
    expected = message(encode(batch, **options))
    assert message(MsgpackEncoder(**options).encode(batch)) == expected
    assert message(encode_rows({"wide": rows}, **options)) == expected
    padded = torch.full((2, 3, 4, 2), 7)
    padded[0], padded[1, :1] = rows
    for rectangle in (padded, torch.stack([padded, padded], -1)[..., 0]):
        fields = encode_fields({"wide": rectangle}, lengths=[3, 1], **options)
        assert message(fields) == expected
    memory = bytearray(encoded_size(batch, **options))
    encode_into(batch, memory, **options)
    assert bytes(memory) == bytes(to_blob(encode(batch, **options)))
    row = RowBuilder()
    row.append(wide=rows[0])
    one = TensorDict({"wide": stack_or_nest(rows[:1], always_nest=True)}, batch_size=[1])
    assert message(row.to_frames(**options)) == message(encode(one, **options))
    # Of one row, too, which has a shorter way.
    assert message(encode_rows([{"wide": rows[0]}], **options)) == message(encode(one, **options))


def test_long_rows_of_a_rectangle_and_with_holes():
    lengths = [700, 3, 512]
    padded = torch.randint(0, 1000, (3, 700, 4, 2), dtype=torch.int32)
    frames = encode_fields({"wide": padded}, lengths=lengths, outermost={"wide": 2})
    assert_rows(decode(frames)["wide"], [padded[i, :n] for i, n in enumerate(lengths)])
    starts = torch.tensor([1, 700, 1400, 2100])
    holes = torch.nested.nested_tensor_from_jagged(
        padded.view(2100, 4, 2), starts, torch.tensor(lengths)
    )
    back = decode(encode(TensorDict({"wide": holes}, [3]), outermost={"wide": 1}))["wide"]
    flat = padded.view(2100, 4, 2)
    rows = [flat[s : s + n] for s, n in zip([1, 700, 1400], lengths, strict=True)]
    assert_rows(back, rows)


def test_columns_that_are_not_jagged_are_let_be():
    batch = TensorDict({"a": torch.ones(2, 3, 4), "b": NonTensorStack("x", "y")}, [2])
    outermost = {"a": 1, "b": 1, ("b",): 2}
    assert message(encode(batch, outermost=outermost)) == message(encode(batch))


@pytest.mark.parametrize("option", ["narrow", "outermost"])
def test_names_of_no_column_are_refused(option):
    batch = TensorDict(
        {"a": torch.ones(2, 3, 4), "inner": TensorDict({"b": torch.ones(2)}, [2])}, [2]
    )
    value = True if option == "narrow" else 1
    for sent in (batch, BatchedDataDict(batch.to_dict()), {"batch": batch}):
        for name in ("c", "b", ("a", "b"), ("c",)):
            options: Any = {option: {name: value}}
            with pytest.raises(ArgumentKeyError) as raised:
                encode(sent, **options)
            assert raised.value.path.startswith(f"{option}(")
    options = {option: {"x": value}}
    with pytest.raises(ArgumentKeyError, match="expected one of 'a', 'inner'"):
        encode(batch, **options)
    with pytest.raises(ArgumentKeyError, match="found 'x'"):
        encode_fields({"a": torch.ones(1, 3)}, lengths=[3], **options)
    with pytest.raises(ArgumentKeyError, match="found 'x'"):
        encode_rows([{"a": [1, 2]}], **options)
    # One encoder sends batches, and what has no columns.
    command = {"stop": True, "steps": [1, 2]}
    assert decode(encode(command, **options)) == command


def dict_batch(rows):
    wide: Any = nested(rows, (4, 2), torch.int64)
    inner = BatchedDataDict({"wide": wide, "b": torch.arange(len(rows))})
    beside = TensorDict({"wide": wide}, [len(rows)])
    columns = {"wide": wide, "inner": inner, "td": beside, "tag": list("abc")[: len(rows)]}
    return BatchedDataDict({**columns, "b": torch.arange(len(rows))}, meta_info={"wide": 3})


@pytest.mark.parametrize("lengths", [[], [0], [3, 1], [300, 0, 2]])
def test_columns_of_a_batched_data_dict_are_named_as_any(lengths):
    rows = [torch.randint(0, 99, (n, 4, 2)) for n in lengths]
    batch = dict_batch(rows)
    plain = encode(batch)
    assert message(encode(batch, narrow={"wide": False, "b": False})) == message(plain)
    every = {"b", "inner.b", "inner.wide", "td.wide", "wide"}
    if not sum(lengths):
        every = {"b", "inner.b"} if lengths else set()
    for narrow, names in (
        ({"wide": True}, {"wide"}),
        ({("inner", "wide"): True, "b": True}, {"inner.wide", "b"}),
        ({"inner": True}, {"inner.wide", "inner.b"}),
        ({"inner": True, ("inner", "b"): False, ("td", "wide"): True}, {"inner.wide", "td.wide"}),
    ):
        for outermost, moved in (
            ({}, set()),
            ({"wide": 1}, {"wide"}),
            ({("inner", "wide"): 2, ("td", "wide"): 1}, {"inner.wide", "td.wide"}),
        ):
            frames = encode(batch, narrow=narrow, outermost=outermost)
            back = decode(frames)
            assert back.meta_info == {"wide": 3}
            assert_same(back, batch)
            nodes, numbers = dict_nodes(frames)
            assert {name for name, node in nodes.items() if node.kind is Kind.INNER_FIRST} == moved
            found = {name for name in every if stored_as(nodes[name], numbers) != PLAIN}
            assert found == names & every
            assert_rows(open_wire(frames)["wide"], rows)


def dict_nodes(frames):
    """The nodes of a BatchedDataDict's tensors, by their names."""
    header = read_header(frames[0])

    def nodes_of(node, above):
        if node.kind is Kind.USER:
            (node,) = node.children
            node = node.children[0]
        names = node.fields[0 if node.kind is Kind.MAP else 2]
        for name, child in zip(names, node.children, strict=True):
            if child.kind in (Kind.USER, Kind.TENSORDICT):
                yield from nodes_of(child, f"{above}{name}.")
            else:
                yield f"{above}{name}", child

    return dict(nodes_of(header.schema.root, "")), header.numbers


def stored_as(node, numbers):
    while node.kind is Kind.INNER_FIRST:
        (node,) = node.children
    return numbers[node.number + 2]


def test_only_the_layers_that_are_wanted_are_read_of_a_batched_data_dict():
    rows = [torch.randint(0, 256, (n, 40, 8), dtype=torch.int16) for n in (300, 150)]
    wide: Any = nested(rows, (40, 8), torch.int16)
    frames = encode(BatchedDataDict({"wide": wide}), outermost={"wide": 1})
    source, asked = counted(bytes(to_blob(frames)))
    picked = open_wire(source).inner({"wide": (1, slice(5, 10))})
    assert_rows(picked["wide"], [row[:, 5:10] for row in rows])
    assert sum(asked) <= sum(row.nbytes for row in rows) // 8 + len(bytes(frames[0])) + 48


def test_members_of_a_lazy_stack_in_a_batch_are_called_by_their_names():
    member = TensorDict({"wide": torch.arange(3)}, [])
    stack = LazyStackedTensorDict(member, member.clone(), stack_dim=0)
    batch = TensorDict({"stack": stack, "wide": torch.arange(2)}, [2])
    frames = encode(batch, narrow={("stack", "wide"): True})
    header = read_header(frames[0])
    assert_same(decode(frames), batch)
    kinds = [
        header.numbers[n.number + 2] != PLAIN for n in header.schema.nodes if n.kind is Kind.TENSOR
    ]
    assert kinds == [True, True, False]


def test_nested_batches_batches_in_dicts_and_lazy_stacks():
    rows = [torch.randint(0, 99, (n, 4, 2)) for n in (3, 1)]
    inner = TensorDict({"wide": nested(rows, (4, 2))}, [2])
    batch = TensorDict({"inner": inner, "wide": nested(rows, (4, 2))}, [2])
    frames = encode({"batch": batch, "more": [inner]}, outermost={("inner", "wide"): 1})
    outer, more = read_header(frames[0]).schema.root.children
    of_inner, of_outer = outer.children
    assert of_inner.children[0].kind is Kind.INNER_FIRST
    assert of_outer.kind is Kind.JAGGED
    assert more.children[0].children[0].kind is Kind.JAGGED
    frames = encode({"batch": batch, "more": [inner]}, outermost={"wide": 1})
    outer, more = read_header(frames[0]).schema.root.children
    assert more.children[0].children[0].kind is Kind.INNER_FIRST
    assert outer.children[0].children[0].kind is Kind.JAGGED
    back = decode(frames)
    assert_same(back["batch"], batch)
    assert_same(back["more"][0], inner)


def test_gradients_are_not_sent():
    wide = nested([torch.ones(2, 3), torch.ones(1, 3)], (3,), torch.float32).requires_grad_()
    back = decode(encode(TensorDict({"wide": wide}, [2]), outermost={"wide": 1}))
    assert_rows(back["wide"], [torch.ones(2, 3), torch.ones(1, 3)])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"outermost": 3}, ArgumentTypeError, "outermost: expected None, or a mapping"),
        ({"outermost": {"wide": "1"}}, ArgumentTypeError, "expected an integer, found"),
        ({"outermost": {"wide": True}}, ArgumentTypeError, "expected an integer, found"),
        ({"outermost": {3: 1}}, ArgumentTypeError, "expected names of columns"),
        ({"outermost": {"wide": 0}}, ArgumentError, "from 1 on"),
        ({"outermost": {"wide": 3}}, ArgumentError, "found rows of (tokens, 4, 2)"),
        ({"outermost": {"flat": 1}}, ArgumentError, "with an inner dim 1"),
        ({"outermost": {"deep": 2}}, ArgumentError, "ragged in another dim"),
        ({"narrow": 3}, ArgumentTypeError, "narrow: expected True, False, or a mapping"),
        ({"narrow": None}, ArgumentTypeError, "narrow: expected True, False, or a mapping"),
        ({"narrow": {"wide": 1}}, ArgumentTypeError, "expected a bool, found"),
        ({"narrow": {("wide", 1): True}}, ArgumentTypeError, "expected names of columns"),
    ],
)
def test_wrong_options(options, error, text):
    rows = [torch.ones(2, 4, 2)]
    deep = torch.nested.nested_tensor_from_jagged(
        torch.ones(4, 3, 2), torch.tensor([0, 3]), jagged_dim=2
    )
    columns = {"wide": nested(rows, (4, 2)), "flat": nested([torch.ones(2)]), "deep": deep}
    batch = TensorDict(columns, batch_size=[1])
    with pytest.raises(error) as raised:
        encode(batch, **options)
    assert text in str(raised.value)


def test_what_cannot_be_encoded_is_refused_as_ever():
    meta = nested([torch.ones(2, 3)], (3,), torch.float32).to("meta")
    with pytest.raises(UnsupportedTypeError, match="meta"):
        encode(TensorDict({"wide": meta}, [1]), outermost={"wide": 1})


# --- narrow by name ----------------------------------------------------------------------------


def test_columns_that_are_named_are_narrow_and_no_others():
    ids = nested([torch.arange(3), torch.arange(2)])
    batch = TensorDict(
        {
            "a": ids,
            "b": torch.arange(2),
            "rows": NonTensorStack(torch.arange(3), torch.arange(2)),
            "inner": TensorDict({"a": ids, "b": torch.arange(2)}, [2]),
        },
        [2],
    )
    value = {"batch": batch, "beside": torch.arange(9)}

    def narrow_ones(narrow):
        frames = encode(value, narrow=narrow)
        assert_same(decode(frames), value)
        header = read_header(frames[0])
        outer, beside = header.schema.root.children
        found = dict(zip(outer.fields[2], outer.children, strict=True))
        inner = dict(zip(("c", "d"), found.pop("inner").children, strict=True))
        rows = found.pop("rows")
        nodes = {**found, **inner, "e": beside}
        names = {n for n, node in nodes.items() if header.numbers[node.number + 2] != PLAIN}
        size = header.numbers[rows.number + 4]
        return "".join(sorted(names)), size

    wide = narrow_ones(False)[1]
    small = narrow_ones(True)[1]
    assert small < wide
    assert narrow_ones({}) == ("", wide)
    assert narrow_ones(True) == ("abcde", small)
    assert narrow_ones({"a": True}) == ("a", wide)
    assert narrow_ones({"a": False, "b": True}) == ("b", wide)
    assert narrow_ones({"rows": True}) == ("", small)
    assert narrow_ones({("inner", "a"): True}) == ("c", wide)
    assert narrow_ones({"inner": True}) == ("cd", wide)
    assert narrow_ones({"inner": True, ("inner", "a"): False, ("b",): True}) == ("bd", wide)


@pytest.mark.parametrize("name", ["a", "b"])
def test_fields_and_rows_are_narrow_by_name(name):
    columns = {"a": torch.arange(6).view(2, 3), "b": torch.arange(2)}
    for frames in (
        encode_fields(columns, lengths=[3, 2], narrow={name: True}),
        encode_rows({"a": [[0, 1, 2], [3, 4]], "b": [0, 1]}, narrow={name: True}),
        encode_rows([{"a": [0, 1, 2], "b": 1}], narrow={name: True}),
    ):
        assert {n for n in columns if stored(frames, n) != PLAIN} == {name}


def test_a_value_that_default_replaces_leaves_no_mark():
    class Refused:
        pass

    first = TensorDict({"a": torch.arange(9)}, [])
    value = {"x": [first, Refused()], "y": torch.arange(9)}
    frames = encode(value, narrow={"a": True}, default=lambda _: torch.arange(9))
    header = read_header(frames[0])
    kinds = [header.numbers[n.number + 2] != PLAIN for n in header.schema.nodes if n.end - n.dims]
    assert kinds == [True, False, False]


# --- cells of inner dims -----------------------------------------------------------------------


def opened():
    rows = [torch.arange(n * 6).view(n, 3, 2) for n in (2, 1)]
    batch = TensorDict(
        {"wide": nested(rows, (3, 2)), "ids": nested([torch.arange(2), torch.arange(1)])}, [2]
    )
    batch["dense"] = torch.arange(24).view(2, 3, 4)
    batch["tag"] = NonTensorStack("x", "y")
    return open_wire(encode(batch, outermost={"wide": 1}))


@pytest.mark.parametrize(
    ("cells", "error", "text"),
    [
        ({"no": (1, [0])}, ArgumentKeyError, "WireBatch.inner('no'): expected one of 'wide'"),
        ({"wide": (0, [0])}, ArgumentError, "expected one of the inner dims 1, 2, found dim 0"),
        ({"wide": (3, [0])}, ArgumentError, "found dim 3"),
        ({"wide": (-1, [0])}, ArgumentError, "found dim -1"),
        ({"ids": (1, [0])}, ArgumentError, "expected a column with inner dims, found dim 1"),
        ({"tag": (1, [0])}, ArgumentError, "found dim 1 of a object column"),
        ({"dense": (0, [0])}, ArgumentError, "expected one of the inner dims 1, found dim 0"),
        ({"wide": (1, [3])}, ArgumentIndexError, "of dim 1: expected cells of 0 to 2, found 3"),
        ({"wide": (1, -4)}, ArgumentIndexError, "found -4"),
        ({"wide": (1, "x")}, ArgumentTypeError, "of dim 1: expected a slice"),
        ({"wide": (1, [0.5])}, ArgumentTypeError, "of dim 1: expected a slice"),
        ({"wide": 1}, ArgumentTypeError, "expected a pair"),
        ({"wide": ("1", [0])}, ArgumentTypeError, "expected a pair"),
        (["wide"], ArgumentTypeError, "expected a mapping"),
    ],
)
def test_cells_that_are_not_there(cells, error, text):
    batch = opened()
    for source in (batch, concat_rows([batch, batch]), join_columns([batch])):
        with pytest.raises(error) as raised:
            source.inner(cells)
        assert text in str(raised.value)


def test_one_layer_keeps_its_dim_and_booleans_choose():
    batch = opened()
    assert batch.inner({"wide": (1, 2)})["wide"].values().tolist() == [
        [[4, 5]],
        [[10, 11]],
        [[4, 5]],
    ]
    mask = torch.tensor([True, False, True])
    assert batch.inner({"wide": (1, mask)}).schema["wide"].shape == (2, None, 2, 2)
    dense = batch.inner({"dense": (1, [3, 0])})
    assert dense["dense"].tolist() == [[[3, 0], [7, 4], [11, 8]], [[15, 12], [19, 16], [23, 20]]]
    assert dense.schema["dense"].shape == (2, 3, 2)
    assert dense.batch_size == (2,)
    assert dense["tag"].tolist() == ["x", "y"]
    assert batch.schema["wide"].shape == (2, None, 3, 2)  # as it was


def test_nothing_that_comes_out_aliases_what_was_only_to_be_read():
    rows = [torch.arange(12, dtype=torch.int16).view(2, 1, 6)]
    batch = TensorDict({"wide": nested(rows, (1, 6), torch.int16)}, [1])
    frames = receive(encode(batch, outermost={"wide": 1}), bytearray)
    before = message(frames)
    whole = open_wire(frames, copy=True)
    for column in (
        whole["wide"].values(),
        whole.inner({"wide": (1, [0])})["wide"].values(),
        materialize(whole)["wide"],
        materialize(whole, layout="jagged")["wide"].values(),
        materialize(whole.inner({"wide": (2, slice(0, 6))}), layout="jagged")["wide"].values(),
    ):
        column += 1
    assert message(frames) == before


def test_damaged_rows_are_named():
    frames = receive(encode(opened().to_tensordict(), outermost={"wide": 1}), bytearray)
    numbers = read_header(frames[0]).numbers
    header = read_header(frames[0])
    group = header.groups[0]
    assert numbers
    frames[1 + group.buffer][group.offset : group.offset + 8] = b"\1" + bytes(7)
    for read in (decode, lambda f: open_wire(f)["wide"], materialize):
        with pytest.raises(WireFormatError) as raised:
            read(frames)
        assert raised.value.reason == "bad_offsets"


# --- several messages --------------------------------------------------------------------------


def test_joined_messages():
    lengths = ([300, 5], [0, 40, 7])
    parts = [[torch.randint(0, 99, (n, 6, 4), dtype=torch.int16) for n in ns] for ns in lengths]
    rows = [*parts[0], *parts[1]]
    sent = [
        encode(batch_of(part, (6, 4), torch.int16), outermost=outermost)
        for part, outermost in zip(parts, ({"wide": 1}, {"wide": 2}), strict=True)
    ]
    for frames in (sent, [sent[0], encode(batch_of(parts[1], (6, 4), torch.int16))]):
        joined = concat_rows([open_wire(message) for message in frames])
        assert joined.schema["wide"].shape == (5, None, 6, 4)
        assert_rows(joined["wide"], rows)
        assert joined.row_lengths("wide").tolist() == [300, 5, 0, 40, 7]
        padded = materialize(frames, pad_value_dict={"wide": -1})["wide"]
        for i, row in enumerate(rows):
            assert torch.equal(padded[i, : len(row)], row)
            assert (padded[i, len(row) :] == -1).all()
        few = joined.inner({"wide": (1, [5, 0])}).rows([3, 0])
        assert few.schema["wide"].shape == (2, None, 2, 4)
        wanted = [rows[i][:, [5, 0]] for i in (3, 0)]
        assert_rows(few["wide"], wanted)
        assert_rows(
            few.inner({"wide": (1, [1])}).select(["wide"])["wide"], [r[:, 1:] for r in wanted]
        )
        assert_rows(decode(few.to_frames())["wide"], wanted)
        assert few["ids"].values().tolist() == [*range(40), *range(300)]
    first, second = (open_wire(encode(batch_of(p, (6, 4), torch.int16))) for p in (parts[0],) * 2)
    beside = join_columns([first.select(["ids"]), second.select(["wide"])])
    few = beside.inner({"wide": (2, slice(1, 3))}).rows(slice(0, 1))
    assert_rows(few["wide"], [parts[0][0][:, :, 1:3]])


def test_joins_sent_on_keep_the_order_of_cells():
    lengths = ([300, 0, 5], [150, 45])
    parts: Any = [
        [torch.randint(0, 99, (n, 40, 8), dtype=torch.int16) for n in ns] for ns in lengths
    ]
    rows = [*parts[0], *parts[1]]
    first, second = (
        open_wire(encode(batch_of(part, (40, 8), torch.int16), outermost={"wide": 1}))
        for part in parts
    )
    other = open_wire(encode(batch_of(parts[1], (40, 8), torch.int16), outermost={"wide": 2}))
    plain = open_wire(encode(batch_of(parts[1], (40, 8), torch.int16)))
    joined = concat_rows([first, second])
    index = [4, 0, 0, 2]
    layers = slice(5, 10)
    for batch, wanted in (
        (joined, rows),
        (joined.rows(index), [rows[i] for i in index]),
        (concat_rows([first, other]).rows([2, 0]), [rows[2], rows[0]]),
        (join_columns([first.select(["ids"]), first.select(["wide"])]), parts[0]),
        (join_columns([joined.select(["ids"]), joined.select(["wide"])]), rows),
    ):
        sent = batch.to_frames()
        assert columns_of(sent)[0]["wide"].kind is Kind.INNER_FIRST
        assert columns_of(sent)[0]["wide"].fields == [1]
        assert_rows(decode(sent)["wide"], wanted)
        source, asked = counted(bytes(to_blob(sent)))
        stage = open_wire(source).inner({"wide": (1, layers)})
        assert_rows(stage["wide"], [row[:, layers] for row in wanted])
        assert sum(asked) <= sum(row.nbytes for row in wanted) // 8 + 32 + len(bytes(sent[0])) + 48
        few = batch.inner({"wide": (1, [3, 1])})
        assert_rows(decode(few.to_frames())["wide"], [row[:, [3, 1]] for row in wanted])
        assert columns_of(few.to_frames())[0]["wide"].kind is Kind.INNER_FIRST
    for batch in (concat_rows([first, other]), concat_rows([first, plain])):
        sent = batch.to_frames()
        assert columns_of(sent)[0]["wide"].kind is Kind.JAGGED
        assert_rows(decode(sent)["wide"], rows)
    none = joined.rows([]).to_frames()
    assert len(open_wire(none)) == 0


def test_only_the_layers_that_are_wanted_are_read_of_each_message_of_a_join():
    parts: Any = [
        [torch.randint(0, 99, (n, 40, 8), dtype=torch.int16) for n in ns]
        for ns in ([300, 150], [50, 400])
    ]
    sent = [encode(batch_of(p, (40, 8), torch.int16), outermost={"wide": 1}) for p in parts]
    for index in (None, [3, 0, 1], [1]):
        sources = [counted(bytes(to_blob(frames))) for frames in sent]
        joined = concat_rows([open_wire(source) for source, _ in sources])
        stage = joined.inner({"wide": (1, slice(5, 10))})
        chosen = [*range(4)] if index is None else index
        if index is not None:
            stage = stage.rows(index)
        rows = [*parts[0], *parts[1]]
        assert_rows(stage["wide"], [rows[i][:, 5:10] for i in chosen])
        for k, (_, asked) in enumerate(sources):
            wanted = sum(rows[i].nbytes for i in set(chosen) if i // 2 == k)
            assert sum(asked) <= wanted // 8 + len(bytes(sent[k][0])) + 48


def test_messages_that_differ_in_layers():
    sent = [
        open_wire(encode(batch_of([torch.ones(2, n, 2)], (n, 2), torch.float32))) for n in (4, 3)
    ]
    joined = concat_rows(sent)
    both = joined.inner({"wide": (1, [0, 2])})
    assert_rows(both["wide"], [torch.ones(2, 2, 2)] * 2)
    with pytest.raises(ArgumentIndexError) as raised:
        joined.inner({"wide": (1, [3])})["wide"]
    assert "message 1" in str(raised.value)


def test_the_message_of_a_batched_data_dict_opens_and_is_chosen_from():
    batch = BatchedDataDict({"wide": nested([torch.arange(6).view(1, 3, 2)], (3, 2))})
    frames = encode(batch)
    assert_rows(open_wire(frames).inner({"wide": (1, [2])})["wide"], [torch.tensor([[[4, 5]]])])


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
    header, frame = encode(batch, outermost={"c": 1})
    there = np.zeros(len(frame) + 32, dtype=np.uint8)
    start = -there.ctypes.data % 16 + at
    there[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
    assert in_memory(there[start : start + 160], torch.complex128, (10,)).data_ptr() % 16 == 0
    for frames in ([header, there[start : start + len(frame)]], [header, frame]):
        opened = open_wire(frames)
        for rows in ([0, 1, 2], [1, 2], [2, 0]):
            expected = batch["c"].unbind()
            for found in (
                opened.rows(rows).to_tensordict(),
                decode(opened.rows(rows).to_frames()),
                decode(opened.inner({"c": (1, range(25))}).rows(rows).to_frames()),
            ):
                for row, tensor in zip(rows, found["c"].unbind(), strict=True):
                    assert_same(tensor, expected[row])
