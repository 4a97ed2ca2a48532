"""Rows to batches and messages, beside torch, row by row."""

import functools
import itertools
from collections import OrderedDict
from http import HTTPStatus
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    RowBuilder,
    concat_rows,
    decode,
    encode,
    encode_fields,
    encode_rows,
    open_wire,
    pack_rows,
    stack_or_nest,
    to_rows,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, JagcodecError
from jagcodec.kernels import missing_cells
from jagcodec.schema import check_schema
from jagcodec.testing import tensors
from jagcodec.types import FieldSchema
from tests.helpers import message
from tests.oracle import assert_same, bits, rows_of
from tests.strategies import arrays, lengths_in, trees, whole_numbers


def both(rows, **options):
    """The batch, which the message holds too, byte for byte."""
    batch = pack_rows(rows, **options)
    assert message(encode_rows(rows, **options)) == message(encode(batch))
    return batch


NUMBERS = {
    torch.int64: st.integers(-(2**63), 2**63 - 1),
    torch.float32: st.floats(width=32),
    torch.bool: st.booleans(),
}
FORMS = [torch.Tensor.tolist, lambda row: tuple(row.tolist()), torch.Tensor.numpy, torch.clone]


@st.composite
def columns(draw):
    """Names to rows, equal or different in their lengths."""
    lengths = draw(st.integers(1, 4).flatmap(lambda rows: lengths_in(5, rows)).filter(any))
    found = {}
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)):
        dtype = draw(st.sampled_from(list(NUMBERS)))
        sizes = draw(st.sampled_from([lengths, lengths[::-1]]))
        rows = [draw(st.lists(NUMBERS[dtype], min_size=n, max_size=n)) for n in sizes]
        found[name] = [torch.tensor(row, dtype=dtype) for row in rows]
    return found


@settings(max_examples=60)
@given(columns(), st.sampled_from(FORMS), st.booleans())
def test_rows_arrive_as_torch_would_make_them(given, form, samples):
    made = {name: list(map(form, rows)) for name, rows in given.items()}
    each = [dict(zip(made, row, strict=True)) for row in zip(*made.values(), strict=True)]
    batch = both(each if samples else made)
    assert batch.batch_size == (len(each),)
    assert list(batch.keys()) == list(given)
    offsets: dict[tuple[int, ...], Any] = {}
    for name, rows in given.items():
        column = batch[name]
        assert column.dtype == rows[0].dtype
        assert rows_of(column) == list(map(bits, rows))
        first = offsets.setdefault(tuple(map(len, rows)), column.offsets())
        assert column.offsets() is first


def test_equal_lengths_are_jagged_unless_they_are_named():
    rows = {"a": [[1, 2], [3, 4]], "b": np.arange(12).reshape(2, 3, 2), "c": torch.ones(2, 3)}
    batch = both(rows, rectangular=["a", "b"])
    assert batch["a"].tolist() == [[1, 2], [3, 4]]
    assert torch.equal(batch["b"], torch.arange(12).view(2, 3, 2))
    assert batch["c"].is_nested
    assert all(column.is_nested for column in both(rows).values())


def test_rows_of_a_dtype_that_torch_cannot_join_or_copy():
    dtype = vars(torch)["int1"]
    bits = torch.zeros(3, dtype=torch.uint8).view(dtype)
    for rows in ([bits[:0], bits], [bits[:2], bits], [bits], [bits[0], bits[1]]):
        assert both({"x": rows})["x"].dtype == dtype


def test_dtypes_of_an_earlier_batch():
    first = [{"ids": [1, 2], "lp": [0.5], "pix": [[1, 2]], "r": 0.5, "tag": "x", "e": [[1, 2]]}]
    dtypes = {"ids": torch.int32, "lp": torch.float64, "pix": torch.uint8, "r": torch.bfloat16}
    schema = open_wire(encode_rows(first, dtypes=dtypes, rectangular=["pix"])).schema
    later = [{"ids": [], "lp": [], "pix": [[3, 4]], "r": 1, "tag": ["y"], "e": []}]
    again = both(later, dtypes=schema)
    assert {name: again[name].dtype for name in dtypes} == dtypes
    assert again["pix"].shape == (1, 1, 2)
    assert again["e"].values().shape == (0, 2)
    assert list(again["tag"]) == [["y"]]
    none = both([], dtypes=schema)
    assert none.batch_size == (0,)
    assert [name for name in dtypes if none[name].is_nested] == ["ids", "lp"]
    assert none["pix"].shape == (0, 1, 2)
    assert none["e"].values().shape == (0, 2)
    assert both({"ids": []}, dtypes={"ids": schema["ids"]})["ids"].is_nested
    assert both({"pix": [[], []]}, dtypes={"pix": schema["pix"]})["pix"].shape == (2, 0, 2)
    with pytest.raises(ArgumentError, match=r"expected rows of shape \[\], .*, found \[None\]"):
        pack_rows({"r": [[]]}, dtypes={"r": schema["r"]})
    assert both([], dtypes=schema, rectangular=["e"])["e"].shape == (0, 0, 2)
    unknown = FieldSchema("jagged", torch.int64, (None, None, None))
    assert both({"x": [[[1, 2]]]}, dtypes={"x": unknown})["x"].values().shape == (1, 2)
    for rows in ([], [{"x": []}]):
        with pytest.raises(ArgumentError, match=r"'x'\): expected the size of each dim but"):
            pack_rows(rows, dtypes={"x": unknown})
    assert open_wire(encode_rows([], dtypes=schema)).schema["lp"].kind == "jagged"


@st.composite
def wide_rows(draw):
    """Tensors that differ in one dim, in which dim of the column, and their rows in other forms."""
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    inner = draw(st.lists(st.integers(1, 2), max_size=1))
    dtype = draw(st.sampled_from([torch.int64, torch.float32, torch.bool]))
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    rows = [draw(tensors((*outer, n, *inner), dtype)) for n in lengths]
    if dtype is torch.float32:  # one NaN is another in a list
        rows = [row.nan_to_num(0.5) for row in rows]
    form = st.sampled_from([torch.Tensor.tolist, torch.Tensor.numpy, torch.clone])
    if draw(st.booleans()):
        form = st.just(draw(form))
    return rows, len(outer) + 1, [draw(form)(row) for row in rows]


@given(wide_rows())
def test_a_named_dim_is_the_ragged_one_in_every_form_of_rows(drawn):
    tensors_, dim, rows = drawn
    expected = stack_or_nest(tensors_, always_nest=True, ragged_dim=dim)
    named: Any = {"ragged_dims": {"x": dim}}
    batch = both({"x": rows}, **named)
    assert_same(batch["x"], expected)
    frames = encode_rows({"x": rows}, **named)
    schema = open_wire(frames).schema
    assert schema["x"].shape == (
        len(rows),
        *expected.shape[1:dim],
        None,
        *expected.shape[dim + 1 :],
    )
    # One message per row: they join, and a schema says the dim, too.
    for form, options in ((tensors_, named), (rows, {"dtypes": schema})):
        alone = [encode_rows([{"x": row}], **options) for row in form]
        assert_same(decode(concat_rows(alone).to_frames()), decode(frames))
        for each, row in zip(alone, tensors_, strict=True):
            check_schema(each, schema)
            assert bits(to_rows(open_wire(each))[0]["x"]) == bits(row)
    known: Any = {"x": expected}
    assert_same(pack_rows(known)["x"], expected)  # whose dim is known


def grown(rows, dtypes):
    builder = RowBuilder(dtypes)
    for name, row in rows[0].items():
        (builder.append if dtypes[name].kind == "jagged" else builder.set)(**{name: row})
    return builder.to_frames()


SHAPES = [shape for ndim in range(4) for shape in itertools.product((1, 2), repeat=ndim)]
FIELDS = [
    *((("tensor", (None, *shape[1:])) if shape else ("tensor", ())) for shape in SHAPES),
    *(
        ("jagged", (*shape[:d], None, *shape[d + 1 :]))
        for shape in SHAPES
        for d in range(len(shape))
    ),
    *(("jagged", (None,) * ndim) for ndim in (2, 3)),
]


@pytest.mark.parametrize("form", [np.ndarray.tolist, np.array])
def test_rows_have_the_shape_that_their_field_schema_says(form):
    """All shapes, for rows, their chunks, and values; only the number of tokens is free."""
    for (kind, sizes), shape in itertools.product(dict.fromkeys(FIELDS), SHAPES):
        rows: Any = [{"x": form(np.ones(shape, dtype=np.float32))}]
        dtypes = {"x": FieldSchema(kind, torch.float32, (9, *sizes))}
        fits = len(sizes) == len(shape) and all(map(lambda a, b: a in (None, b), sizes, shape))
        # One number fills a token of a known shape.
        fills = not shape and kind == "jagged" and sizes.count(None) == 1
        for make in (pack_rows, encode_rows, grown):
            if fits or (fills and make is grown):
                check_schema(make(rows, dtypes=dtypes), dtypes)
                continue
            with pytest.raises(ArgumentError, match=r"'x'\)(, row 0)?: ") as caught:
                make(rows, dtypes=dtypes)
            assert caught.value.reason == "bad_shape", (sizes, shape, make)


def test_rows_without_tokens_have_the_shape_that_they_show():
    dtypes = {"x": FieldSchema("jagged", torch.float32, (9, None, 2))}
    for row, fits in (
        ([], True),
        (np.ones(0), True),
        (np.ones((0, 2)), True),
        (np.ones((0, 3)), 0),
    ):
        for make in (pack_rows, encode_rows, grown):
            if fits:
                check_schema(make([{"x": row}], dtypes=dtypes), dtypes)
                continue
            with pytest.raises(ArgumentError, match=r"shape \[None, 2\], as .*found \[None, 3\]"):
                make([{"x": row}], dtypes=dtypes)
    with pytest.raises(ArgumentError, match=r"\[None\], as .*found one number per row"):
        pack_rows({"x": [1.0]}, dtypes={"x": FieldSchema("jagged", None, (9, None))})
    with pytest.raises(ArgumentError, match=r"\[None\], as .*found Python objects"):
        pack_rows({"x": ["a"]}, dtypes={"x": FieldSchema("jagged", None, (9, None))})


def test_the_error_of_a_join_names_the_option_that_rows_lacked():
    frames = [encode_rows([{"x": row}]) for row in WIDE]
    with pytest.raises(ArgumentError, match=r"row shape \(5,\) .*\(7,\); .*ragged_dims=\{'x': 2\}"):
        concat_rows(frames)["x"]
    frames[0] = encode_rows([{"x": WIDE[0]}], ragged_dims={"x": 2})
    with pytest.raises(ArgumentError, match=r"ragged dim 2 .* found 1; .*ragged_dims=\{'x': 2\}"):
        concat_rows(frames)["x"]


def test_options_are_those_of_encode():
    assert decode(encode_rows([{"a": ValueError("x")}], default=repr))["a"] == ["ValueError('x')"]
    with pytest.raises(ArgumentTypeError, match="meta: expected a mapping"):
        encode_rows([{"a": 1}], meta=[1])  # type: ignore[arg-type]
    for call in (
        lambda options: encode_rows([{"a": 1}], **options),
        lambda options: encode_fields({"a": torch.ones(1)}, lengths=[1], **options),
    ):
        with pytest.raises(ArgumentKeyError, match=r"expected one of .*narrow, found 'narow'"):
            call({"narow": True})


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (torch.arange(4).view(2, 2), [[0, 1], [2, 3]]),
        (np.arange(12).reshape(2, 3, 2), np.arange(12).reshape(2, 3, 2).tolist()),
        (np.arange(2.0), [0.0, 1.0]),
        (pack_rows({"x": [[1], [2, 3]]})["x"], [[1], [2, 3]]),
        (TensorDict({"x": ["a", "b"]}, batch_size=[2]).get("x"), ["a", "b"]),
        (np.array(["a", {"b": 1}], dtype=object), ["a", {"b": 1}]),
        (("a", ""), ["a", ""]),
        ([[{"role": "user"}], []], [[{"role": "user"}], []]),
        ([[["a"]], [[]]], [[["a"]], [[]]]),
        ([[None], ["x", None, 1]], [[None], ["x", None, 1]]),
        ([[None], [None, None]], [[None], [None, None]]),
        ([NonTensorData("a"), NonTensorData({"b": 1})], ["a", {"b": 1}]),
        (range(3, 5), [3, 4]),
    ],
    ids=lambda column: type(column).__name__,
)
@pytest.mark.parametrize("form", [dict, lambda rows: TensorDict(rows, batch_size=[2])])
def test_what_a_column_may_be(column, expected, form):
    if form is not dict and isinstance(column, (list, tuple, range)):
        column = NonTensorStack(*column) if isinstance(column, list) else list(column)
    rows = [row["x"] for row in to_rows(both(form({"x": column})))]
    assert [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows] == expected


WIDE = [torch.ones(3, 5), torch.ones(3, 7)]
WIDE_FIELD = FieldSchema("jagged", torch.float32, (1, 3, None))
ODD_FIELDS: list[Any] = [
    *(("jagged", torch.int64, shape) for shape in (None, (1,), (1, 2), [1, None], (1, "2", None))),
    *(("jagged", torch.int64, (1, None, size, 2**9)) for size in (2**44, 2**62, 10**5000)),
    *(("tensor", dtype, (1,)) for dtype in ("int63", [torch.int64], torch.qint8)),
]
ONE_EACH = FieldSchema("tensor", torch.float32, (1,))
WRONG: list[tuple[Any, dict[str, Any], Any, str]] = [
    ({"x": [[None]]}, {"dtypes": {"x": torch.float32}}, ArgumentTypeError, "row 0, cell 0: .*None"),
    ({"x": [[1.0], [1e5]]}, {"dtypes": {"x": torch.float16}}, ArgumentError, "row 1, cell 0: .*16"),
    ({"x": [[], []]}, {}, ArgumentError, "'x'.*dtypes="),
    ({"x": [[1], [2, 3]]}, {"rectangular": ["x"]}, ArgumentError, "row 1: .*rectangular"),
    ({"a": [[1]], "b": [[1, 2]]}, {"same_length": ["a", "b"]}, ArgumentError, r"'b'\), row 0"),
    ({"a": [[1]], "b": [1]}, {"same_length": ["a", "b"]}, ArgumentTypeError, "'b'"),
    ({"a": [[1]], "b": ["x"]}, {"same_length": ["a", "b"]}, ArgumentTypeError, "objects in 'b'"),
    ({"a": [[1]]}, {"same_length": ["a", "x"]}, ArgumentKeyError, "same_length.*'x'"),
    ({"a": [[1]]}, {"same_length": "a"}, ArgumentTypeError, "string"),
    ({"a": [[1]]}, {"same_length": ["a", 3]}, ArgumentTypeError, "expected names, found 3"),
    ({"a": [[1]]}, {"rectangular": ["x"]}, ArgumentKeyError, "rectangular.*'x'"),
    ({"a": [[1]]}, {"dtypes": {"x": torch.int8}}, ArgumentKeyError, "dtypes.*'x'"),
    ({"a": [[1]]}, {"dtypes": {"a": "int9"}}, ArgumentTypeError, "'int9'"),
    ({"a": [[1]]}, {"dtypes": ["a"]}, ArgumentTypeError, "list"),
    ({"a": [[1]]}, {"dtypes": {"a": FieldSchema("tensordict", None, None)}}, ArgumentError, "'ten"),
    *(
        (
            {"a": [[1]]},
            {"dtypes": {"a": FieldSchema(*odd)}},
            ArgumentError,
            "'a'.: expected the sch",
        )
        for odd in ODD_FIELDS
    ),
    ({"a": [1], "b": [1, 2]}, {}, ArgumentError, r"'b'\): expected 1 rows like 'a', found 2"),
    ({"a": (x for x in [1])}, {}, ArgumentTypeError, "'a'.*generator"),
    ({"a": "text"}, {}, ArgumentTypeError, "'a'.*str"),
    ({"a": torch.tensor(1)}, {}, ArgumentTypeError, "'a'.*list, tuple, array or tensor"),
    ({"a": torch.eye(2).to_sparse()}, {}, ArgumentTypeError, "'a'.*list, tuple, array or tensor"),
    ({1: [2]}, {}, ArgumentTypeError, "strings"),
    ({"a": []}, {}, ArgumentError, "'a'.*dtypes="),
    ({"a": ["x", NonTensorStack("y", "z")]}, {}, ArgumentTypeError, "row 1: .*tolist"),
    (iter([{"a": 1}]), {}, ArgumentTypeError, "list_iterator.*into a list"),
    (5, {}, ArgumentTypeError, "int"),
    ([], {}, ArgumentError, "dtypes="),
    ([], {"dtypes": {"a": torch.int64}}, ArgumentError, "'a'.*FieldSchema"),
    ([{"a": 1}, 5], {}, ArgumentTypeError, "row 1"),
    ([5], {}, ArgumentTypeError, "row 0: expected a mapping"),
    ([{"a": 1}, {"b": 1}], {}, ArgumentKeyError, r"'a'\), row 1: .*without 'a'"),
    ([{"a": 1}, {"a": 1, "b": 1}], {}, ArgumentKeyError, r"'b'\), row 1: .*with 'b'"),
    ([{1: 2}], {}, ArgumentTypeError, "strings"),
    (
        {"a": WIDE},
        {},
        ArgumentError,
        r"row 1: .*\(tokens, 5\).*\(3, 7\); if dim 1 .*ragged_dims=.*2",
    ),
    ({"a": [row.tolist() for row in WIDE]}, {}, ArgumentError, r"cell 0: .*length 5.*ragged_dims="),
    (
        {"a": WIDE},
        {"ragged_dims": {"a": 3}},
        ArgumentError,
        "row 0: expected 3 dims .*dim 2 is the",
    ),
    (
        {"a": [[1, 2]]},
        {"ragged_dims": {"a": 2}},
        ArgumentError,
        "row 0: expected lists of one leng",
    ),
    (
        {"a": [[[1], [2, 3]]]},
        {"ragged_dims": {"a": 2}},
        ArgumentError,
        "row 0: .*lists of one leng",
    ),
    (
        {"a": [[[1], [2]], [[1]]]},
        {"ragged_dims": {"a": 2}},
        ArgumentError,
        r"row 1: .*\(2, tokens\)",
    ),
    (
        {"a": [[[1], [2]], [[]]]},
        {"ragged_dims": {"a": 2}},
        ArgumentError,
        r"row 1: .*\(2, tokens\)",
    ),
    ({"a": [[None, [2]]]}, {"ragged_dims": {"a": 2}}, ArgumentTypeError, "row 0: .*found None"),
    ({"a": [[[1], [2, "b"]]]}, {"ragged_dims": {"a": 2}}, ArgumentError, "row 0: expected lists"),
    ({"a": [[[1], ["b"]]]}, {"ragged_dims": {"a": 2}}, ArgumentTypeError, "row 0, cell 0: .*'b'"),
    ({"a": [1, 2]}, {"ragged_dims": {"a": 1}}, ArgumentTypeError, "as ragged_dims= .*one number"),
    ({"a": ["x", "y"]}, {"ragged_dims": {"a": 2}}, ArgumentTypeError, "as ragged_dims= .*objects"),
    ({"a": WIDE}, {"ragged_dims": {"b": 2}}, ArgumentKeyError, "ragged_dims.*'b'"),
    (
        {"a": WIDE},
        {"ragged_dims": [("a", 2)]},
        ArgumentTypeError,
        "dict of names to dims, found list",
    ),
    *(
        (
            {"a": WIDE},
            {"ragged_dims": {"a": dim}},
            ArgumentError,
            r"\(ragged_dims\)\['a'\]: .*(1 to 64|2\*\*63)",
        )
        for dim in (0, -1, 65, 10**5000, 1.0, "2", None, True, [2])
    ),
    (
        {"a": WIDE},
        {"ragged_dims": {"a": 2}, "rectangular": ["a"]},
        ArgumentError,
        "a jagged column",
    ),
    ({"a": [[]]}, {"ragged_dims": {"a": 2}, "dtypes": {"a": ONE_EACH}}, ArgumentError, "is not"),
    ({"a": WIDE}, {"ragged_dims": {"a": 1}, "dtypes": {"a": WIDE_FIELD}}, ArgumentError, "1 and 2"),
    (
        {"a": stack_or_nest(WIDE)},
        {"ragged_dims": {"a": 1}},
        ArgumentError,
        r"1 and 2 \(by the rows\)",
    ),
    (
        {"a": [[]]},
        {"ragged_dims": {"a": 2}, "dtypes": {"a": torch.int8}},
        ArgumentError,
        "FieldSchema",
    ),
]


@pytest.mark.parametrize(("rows", "options", "error", "text"), WRONG)
@pytest.mark.parametrize("function", [pack_rows, encode_rows])
def test_bad_input_is_named(function, rows, options, error, text):
    with pytest.raises(error, match=text) as caught:
        function(rows, **options)
    assert caught.value.path.startswith(function.__name__)


@pytest.mark.skipif(missing_cells() is not None, reason="the Python half reads a copy")
def test_a_list_that_shrinks_while_it_is_read():
    class Shrinks:
        def __index__(self):
            row.clear()
            return 1

    row = [1, Shrinks(), 3, 4]
    with pytest.raises(ArgumentError, match="'a'"):
        pack_rows({"a": [row]})


numbers = (
    st.booleans()
    | whole_numbers()
    | st.floats()
    | st.sampled_from([3.4028235e38, 3.5e38, -1e39, 2**63 - 1, -(2**63), 2**63, -0.0])
)
special: list[Any] = [
    *("x" * 20_000, [[1, 2], [3, 4]], [[1], [2, 3]], ["a", "b"], [*range(3000)], np.arange(2048)),
    *(np.arange(12).reshape(3, 4).T, np.arange(20)[::2], np.ma.masked_array([1, 2])),
    *(torch.arange(6.0).view(3, 2).T, torch.ones(2, requires_grad=True), {"a": 1}),
]
values = (
    numbers
    | st.lists(numbers, max_size=4)
    | st.lists(st.integers(0, 9), max_size=70).map(tuple)
    | st.sampled_from(special)
    | arrays()
    | trees(max_leaves=2)
)
samples = st.dictionaries(st.text(max_size=3) | st.sampled_from("abcdef"), values, max_size=6)
metas = st.sampled_from([None, {}, {"step": 3}, {"bad": torch.ones(1)}])


def outcome(make):
    try:
        return message(make())
    except JagcodecError as error:
        return type(error), error.path, error.reason, error.detail


def walked(make):
    """The outcome without the short ways: each value is looked at in Python, one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jagcodec.produce.given_rows._columns_of_dicts", lambda *_: None)
        patch.setattr("jagcodec.produce.cells.join_quickly", lambda *_: None)
        patch.setattr("jagcodec.wire.write.lowering_objects.written_at_once", lambda *_: None)
        return outcome(make)


same_lengths = st.sampled_from([(), [], "a", "ab", ["a", "b"], ["a", 3], [["a"]], {"a": "b"}])


@given(samples, metas, same_lengths)
def test_the_message_of_one_row_is_that_of_a_walk(sample, meta, same):
    def make():
        return encode_rows([sample], meta=meta, same_length=same)

    assert outcome(make) == walked(make)


columns_of_one_count = st.integers(0, 3).flatmap(
    lambda rows: st.dictionaries(
        st.text(max_size=3), st.lists(values, min_size=rows, max_size=rows), max_size=4
    )
)


@given(columns_of_one_count, st.booleans(), st.booleans(), metas, same_lengths)
def test_the_message_of_columns_is_that_of_a_walk(columns, as_tuples, cut, meta, same):
    given: dict[str, Any] = {
        name: tuple(column) if as_tuples else column for name, column in columns.items()
    }
    if cut and given:
        name = next(iter(given))
        given[name] = given[name][1:]

    def make():
        return encode_rows(given, meta=meta, same_length=same)

    assert outcome(make) == walked(make)


@given(samples, st.data(), metas, same_lengths)
def test_the_message_of_rows_is_that_of_a_walk(sample, data, meta, same):
    """Rows alike in most values, and some that are not."""
    rows = [sample]
    for _ in range(data.draw(st.integers(1, 3))):
        changed = data.draw(
            st.dictionaries(st.sampled_from([*sample] or ["x"]), values, max_size=2)
        )
        row = {**sample, **changed}
        rows.append(dict(reversed(row.items())) if data.draw(st.booleans()) else row)

    def make():
        return encode_rows(rows, meta=meta, same_length=same)

    assert outcome(make) == walked(make)


keys = st.sampled_from(["role", "content", "\ud800", "", 1, True, None, 0.5, float("nan"), b"k"])
odd_leaves = (
    trees(max_leaves=3)
    | st.sampled_from([2**64, -(2**63) - 1, b"x" * 4095, b"x" * 4096, "x" * 20_000, (1, "a")])
    | st.sampled_from([bytearray(b"x"), memoryview(b"x"), msgpack.ExtType(3, b"x")])
    | st.sampled_from([[*range(63)], [*range(64)], [0.5, *range(70)], ["x"] * 70, [None] * 64])
    | st.sampled_from([msgpack.Timestamp(1), HTTPStatus.OK, OrderedDict(a=1)])
    | st.sampled_from([torch.ones(2), [torch.ones(2)] * 2, np.float32(1), np.arange(3), object()])
)
plain_leaves = st.none() | st.booleans() | whole_numbers() | st.floats() | st.text(max_size=4)


def nested(leaves, names):
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=6,
    )


objects = nested(plain_leaves | st.binary(max_size=3), keys.filter(lambda key: type(key) is str))
objects |= nested(plain_leaves | odd_leaves, keys)


@settings(max_examples=60)
@given(st.lists(objects, min_size=1, max_size=4), st.data())
def test_objects_that_msgpack_packs_at_once_are_packed_as_in_a_walk(rows, data):
    """Some of them are one object, which `elide` finds."""
    rows = [data.draw(st.sampled_from(rows)) for _ in range(data.draw(st.integers(1, 5)))]
    for options in ({}, {"elide": True}, {"default": str}, {"allow_pickle": True}):
        for make in (
            lambda options=options: encode_rows({"x": rows}, dtypes={"x": object}, **options),
            lambda options=options: encode_rows([{"x": row} for row in rows], **options),
            lambda options=options: encode_fields({"x": [*map(str, rows)]}, **options),
        ):
            assert outcome(make) == walked(make)


def test_containers_in_each_other_are_counted_as_in_a_walk():
    def inside(value, levels, wrap):
        for _ in range(levels):
            value = wrap(value)
        return value

    for wrap in (lambda value: [value], lambda value: {"k": value}):
        for leaf in ("x", b"x", {}, {"k": 1}):
            for levels in (96, 97, 98, 99, 100):
                row = inside(leaf, levels, wrap)
                for rows in ([{"x": row}], [{"x": row}, {"x": row}], [{"x": inside(row, 2, wrap)}]):
                    make = functools.partial(encode_rows, rows)
                    assert outcome(make) == walked(make)
    itself: dict[str, Any] = {}
    itself["twice"] = [itself, itself]
    assert "too_deep" in outcome(lambda: encode_rows({"x": [itself]}))


alike = st.sampled_from(
    [
        np.arange(3),
        np.arange(0),
        np.arange(5.0)[::2],
        np.arange(6).reshape(2, 3),
        np.arange(6).reshape(3, 2).T,
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.zeros((0, 3), np.int64),
        np.zeros((2, 0), np.int64),
        np.empty((0, 1 << 57), np.uint8),
        np.array(7),
        np.arange(3, dtype=">i8"),
        np.arange(3, dtype=np.uint16),
        np.array([np.nan, 1], np.float32),
        np.array(["a"]),
        np.ma.masked_array([1, 2]),
    ]
)
tensors_alike = st.sampled_from(
    [
        torch.arange(3),
        torch.arange(0),
        torch.arange(6)[3:3],
        torch.arange(6).view(2, 3),
        torch.arange(6).view(3, 2).T,
        torch.zeros((0, 3), dtype=torch.int64),
        torch.zeros((2, 0), dtype=torch.int64),
        torch.tensor(7),
        torch.ones(2, requires_grad=True),
        torch.ones(2),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.uint16),
        torch.tensor([1 + 2j]).imag,
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(4).to_sparse(),
        torch.empty(2, device="meta", dtype=torch.int64),
        torch.nested.nested_tensor([torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        torch.nn.Parameter(torch.ones(2)),
        torch._efficientzerotensor(2),
    ]
)


@settings(max_examples=60)
@given(st.lists(alike, min_size=1, max_size=4) | st.lists(tensors_alike, min_size=1, max_size=4))
def test_rows_that_are_joined_at_once_are_those_of_the_rule(rows):
    for make in (
        lambda: encode_rows([{"x": row} for row in rows]),
        lambda: encode(pack_rows({"x": rows})),
        lambda: encode_rows({"x": rows, "y": rows}, same_length=["x", "y"]),
    ):
        assert outcome(make) == walked(make)


def test_memory_that_was_freed_is_not_read():
    row = torch.arange(3000)
    row.untyped_storage().resize_(0)
    for rows in ([row, row], [torch.arange(2), row]):
        make = functools.partial(encode_rows, {"x": rows})
        assert outcome(make) == walked(make)


@pytest.mark.parametrize("make", [np.arange, torch.arange])
def test_a_message_aliases_a_large_row_and_a_batch_owns_its_memory(make):
    large, small = make(2048), make(2047)
    _, first, second = encode_rows([{"large": large, "small": small}])
    found = [np.frombuffer(frame, dtype=np.int64) for frame in (first, second)]
    assert not np.shares_memory(found[0], np.asarray(small))
    assert np.shares_memory(found[1], np.asarray(large))
    batch = pack_rows([{"large": large}])
    large[:] = 0
    assert batch["large"].values()[-1] == 2047


def test_a_list_that_contains_itself_is_an_object_too_deep_for_a_message():
    loop: list[Any] = []
    loop.append(loop)
    assert pack_rows([{"x": loop}]).batch_size == (1,)
    several: list[list[dict[str, Any]]] = [
        [{"x": loop}],
        [{"x": loop}] * 3,
        [{"x": 1}, {"x": loop}],
    ]
    for rows in several:
        with pytest.raises(JagcodecError, match="x"):
            encode_rows(rows)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("as_nested", ["sparse", "csr", "nested", "jagged"])
def test_tensors_without_dense_storage_are_objects_or_refused(as_nested, count):
    """However many rows there are, and next to dense ones too."""
    parts = [torch.ones(2), torch.ones(3)]
    made: dict[str, Any] = {
        "sparse": lambda: torch.sparse_coo_tensor(torch.arange(3).repeat(2, 1), torch.ones(3)),
        "csr": lambda: torch.sparse_csr_tensor([0, 1, 2], [0, 1], torch.ones(2)),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
    }
    rows = [made[as_nested]() for _ in range(count)]
    alone: Any = outcome(lambda: encode_rows({"x": rows[:1]}))
    both: Any = outcome(lambda: encode_rows({"x": rows}))
    if isinstance(alone, tuple):
        assert both[0] is alone[0]
    else:
        assert len(decode(encode_rows({"x": rows}))["x"]) == count
    mixed: Any = outcome(lambda: encode_rows({"x": [*rows, torch.ones(3)]}))
    assert issubclass(mixed[0], JagcodecError)
