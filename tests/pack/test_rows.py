"""Rows to batches and messages, beside torch and numpy, row by row."""

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    UnsupportedTypeError,
    cells,
    decode,
    encode,
    encode_rows,
    open_wire,
    pack_rows,
)
from jagcodec.cells import python_cells
from jagcodec.errors import ArgumentKeyError, ArgumentTypeError
from jagcodec.types import FieldSchema


@pytest.fixture(params=["compiled", "python"], autouse=True)
def _both_halves(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(cells, "_active", python_cells)
    else:
        monkeypatch.setattr(cells, "_active", pytest.importorskip("jagcodec.cells._cells"))


def both(rows, **options):
    """The batch, which the message holds too, byte for byte."""
    batch = pack_rows(rows, **options)
    frames = encode_rows(rows, **options)
    assert [bytes(f) for f in frames] == [bytes(f) for f in encode(batch)]
    back = decode(frames)
    assert back.batch_size == batch.batch_size
    assert list(back.keys()) == list(batch.keys())
    return batch


def rows_of(column):
    return list(column.unbind())


def assert_rows(column, rows, dtype):
    assert column.is_nested
    assert column.dtype == dtype
    for found, row in zip(rows_of(column), rows, strict=True):
        expected = row if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=dtype)
        assert found.shape == expected.shape
        assert found.numpy().tobytes() == expected.to(dtype).numpy().tobytes()


# --- what goes in ------------------------------------------------------------------------------

NUMBERS = {
    torch.int64: st.integers(-(2**63), 2**63 - 1),
    torch.float32: st.floats(width=32),
    torch.bool: st.booleans(),
}


@st.composite
def columns(draw):
    """Names to (rows, dtype), equal or different in their lengths."""
    count = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    found = {}
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)):
        dtype = draw(st.sampled_from(list(NUMBERS)))
        sizes = lengths if draw(st.booleans()) else lengths[::-1]
        rows = [draw(st.lists(NUMBERS[dtype], min_size=n, max_size=n)) for n in sizes]
        if not any(sizes):
            rows[0] = [draw(NUMBERS[dtype])]
        found[name] = (rows, dtype)
    return count, found


FORMS = {
    "lists": lambda row, dtype: list(row),
    "tuples": lambda row, dtype: tuple(row),
    "arrays": lambda row, dtype: torch.tensor(row, dtype=dtype).numpy(),
    "tensors": lambda row, dtype: torch.tensor(row, dtype=dtype),
}


@settings(max_examples=60)
@given(columns(), st.sampled_from(list(FORMS)), st.booleans())
def test_rows_of_numbers_arrive_as_torch_would_make_them(given_columns, form, samples):
    count, given = given_columns
    made = {
        name: [FORMS[form](row, dtype) for row in rows] for name, (rows, dtype) in given.items()
    }
    rows = [{name: made[name][i] for name in made} for i in range(count)] if samples else made
    batch = both(rows)
    assert batch.batch_size == (count,)
    for name, (expected, dtype) in given.items():
        assert_rows(batch[name], expected, dtype)
    lengths = {name: list(map(len, given[name][0])) for name in given}
    same = [name for name in given if lengths[name] == next(iter(lengths.values()))]
    offsets = {id(batch[name].offsets()) for name in same}
    assert len(offsets) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(rows=st.lists(st.lists(st.floats(-60000, 60000), max_size=4), min_size=1, max_size=3))
def test_floats_are_rounded_as_torch_rounds(rows, dtype):
    column = pack_rows({"x": rows}, dtypes={"x": dtype})["x"]
    for found, row in zip(rows_of(column), rows, strict=True):
        assert torch.equal(found, torch.tensor(row, dtype=dtype))


def test_nan_and_infinities_are_kept():
    row = [float("nan"), float("inf"), -float("inf"), -0.0]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        (found,) = rows_of(both({"x": [row]}, dtypes={"x": dtype})["x"])
        assert found.isnan().tolist() == [True, False, False, False]
        assert found[1:].tolist() == row[1:]
        assert found[3].signbit()


def test_one_number_per_row_makes_a_rectangular_column():
    batch = both(
        [
            {
                "i": 1,
                "f": 0.5,
                "b": True,
                "n": np.float64(2),
                "s": np.int16(3),
                "t": torch.tensor(4),
            },
            {
                "i": 2,
                "f": 3,
                "b": False,
                "n": np.float64(3),
                "s": np.int16(4),
                "t": torch.tensor(5),
            },
        ]
    )
    dtypes = {name: column.dtype for name, column in batch.items()}
    assert dtypes == {
        "i": torch.int64,
        "f": torch.float32,
        "b": torch.bool,
        "n": torch.float64,
        "s": torch.int16,
        "t": torch.int64,
    }
    assert batch["f"].tolist() == [0.5, 3.0]
    assert all(column.shape == (2,) for column in batch.values())


def test_equal_lengths_are_jagged_unless_they_are_named():
    rows = {"a": [[1, 2], [3, 4]], "b": np.arange(12).reshape(2, 3, 2), "c": torch.ones(2, 3)}
    batch = both(rows, rectangular=["a", "b"])
    assert batch["a"].tolist() == [[1, 2], [3, 4]]
    assert torch.equal(batch["b"], torch.arange(12).view(2, 3, 2))
    assert batch["c"].is_nested
    assert all(column.is_nested for column in both(rows).values())


def test_cells_may_have_dims():
    layers = [np.arange(n * 6, dtype=np.int32).reshape(n, 2, 3) for n in (3, 0, 2)]
    column = both([{"experts": row} for row in layers])["experts"]
    assert_rows(column, [torch.from_numpy(row) for row in layers], torch.int32)
    lists = both({"x": [[[1, 2], [3, 4]], [], [[5, 6]]]})["x"]
    assert [row.tolist() for row in rows_of(lists)] == [[[1, 2], [3, 4]], [], [[5, 6]]]


def test_numbers_of_other_types_are_taken_exactly():
    batch = both(
        {
            "a": [[np.int64(5), 6, torch.tensor(7)]],
            "b": [[np.float32(0.1), 1]],
            "c": [array("d", [0.5])],
            "d": [array("i", [3])],
            "e": [np.arange(3, dtype=">i4")],
            "f": [np.arange(6)[::2]],
            "g": [torch.ones(3, dtype=torch.bfloat16, requires_grad=True)],
            "h": [np.arange(3, dtype=np.uint32)],
            "i": [range(2, 5)],
        }
    )
    assert batch["a"].values().tolist() == [5, 6, 7]
    assert batch["b"].values()[0] == np.float32(0.1)
    assert [batch[name].dtype for name in "cdefghi"] == [
        *(torch.float32, torch.int64, torch.int32, torch.int64, torch.bfloat16, torch.uint32),
        torch.int64,
    ]
    assert batch["f"].values().tolist() == [0, 2, 4]
    assert not batch["g"].requires_grad


def test_lists_and_arrays_in_one_column():
    assert both({"a": [np.array([1], dtype=np.int32), [2, 3]]})["a"].dtype == torch.int32
    column = both({"a": [[1], torch.tensor([2, 3]), np.array([4], dtype=np.int8)]})["a"]
    assert column.values().tolist() == [1, 2, 3, 4]
    with pytest.raises(ArgumentTypeError, match=r"'a'\), row 1"):
        pack_rows({"a": [[1], np.array([0.5])]})


def test_objects():
    samples: list[dict[str, Any]] = [
        {"text": "x", "chat": [{"role": "user"}], "tools": ["a"], "any": None},
        {"text": "", "chat": [], "tools": [], "any": {"x": [1, 2]}},
    ]
    batch = both(samples)
    for name in samples[0]:
        assert list(batch[name]) == [sample[name] for sample in samples]
    ragged = [[[1], [2, 3]], [[4]]]
    assert list(both({"x": ragged}, dtypes={"x": object})["x"]) == ragged


def test_dtypes_of_an_earlier_batch():
    first = [{"ids": [1, 2], "lp": [0.5, 0.25], "pix": [[1, 2]], "r": 0.5, "tag": "x"}]
    dtypes = {"ids": torch.int32, "lp": torch.float64, "pix": torch.uint8, "r": torch.bfloat16}
    schema = open_wire(encode_rows(first, dtypes=dtypes, rectangular=["pix"])).schema
    again = both([{"ids": [], "lp": [], "pix": [[3, 4]], "r": 1, "tag": "y"}], dtypes=schema)
    assert {name: again[name].dtype for name in dtypes} == dtypes
    assert again["pix"].shape == (1, 1, 2)
    none = both([], dtypes=schema)
    assert none.batch_size == (0,)
    assert none["ids"].is_nested
    assert none["ids"].shape[0] == 0
    assert none["pix"].shape == (0, 1, 2)
    assert open_wire(encode_rows([], dtypes=schema)).schema["lp"].kind == "jagged"


def test_arrays_take_other_cells_if_these_hold_them():
    rows = {"a": [np.array([1, 255])], "b": [torch.tensor([1.5, 2.0])], "c": [np.array([1, 2])]}
    dtypes = {"a": torch.uint8, "b": torch.float64, "c": torch.bfloat16}
    batch = both(rows, dtypes=dtypes)
    assert {name: column.dtype for name, column in batch.items()} == dtypes


def test_columns_own_their_memory():
    row = np.arange(5000)
    batch = pack_rows([{"a": row}])
    row[:] = 0
    assert batch["a"].values()[-1] == 4999


def test_options_are_those_of_encode():
    rows = [{"a": [1, 2, 3], "b": np.arange(3000)}, {"a": [4], "b": np.arange(2)}]
    options: dict[str, Any] = {"narrow": True, "checksum": True}
    same = [bytes(f) for f in encode(pack_rows(rows), **options)]
    assert [bytes(f) for f in encode_rows(rows, **options)] == same
    assert decode(encode_rows([{"a": {1, 2}, "b": 1j}]))["b"] == [1j]
    assert decode(encode_rows([{"a": ValueError("x")}], default=repr))["a"] == ["ValueError('x')"]


def test_meta_travels_beside_the_rows():
    rows = {"ids": [[1], [2, 3]]}
    meta = {"step": 3, "version": ("a", 1)}
    frames = encode_rows(rows, meta=meta)
    assert [bytes(f) for f in frames] == [bytes(f) for f in encode(pack_rows(rows), meta=meta)]
    assert open_wire(frames).meta == meta
    assert open_wire(encode_rows(rows)).meta == {}
    with pytest.raises(ArgumentTypeError, match="meta: expected a mapping"):
        encode_rows(rows, meta=[1])  # type: ignore[arg-type]


def test_a_mapping_of_many_kinds_of_columns():
    td = TensorDict({"x": torch.arange(4).view(2, 2), "tag": ["a", "b"]}, batch_size=[2])
    batch = both(td)
    assert [row.tolist() for row in rows_of(batch["x"])] == [[0, 1], [2, 3]]
    jagged = pack_rows({"x": [[1], [2, 3]]})
    assert [row.tolist() for row in rows_of(both(jagged)["x"])] == [[1], [2, 3]]
    objects = np.empty(2, dtype=object)
    objects[:] = ["a", ["b", 1]]
    assert list(both({"x": objects, "y": ("a", "b")})["x"]) == ["a", ["b", 1]]


# --- what does not -----------------------------------------------------------------------------

WRONG = [
    ({"ids": [[1], [2, 1 << 63]]}, {}, ArgumentError, r"'ids'\), row 1, cell 1: .*int64"),
    ({"ids": [[1], [2, 1 << 70]]}, {}, ArgumentError, r"'ids'\), row 1, cell 1: .*71 bits"),
    (
        {"ids": [[1], [-129]]},
        {"dtypes": {"ids": torch.int8}},
        ArgumentError,
        "row 1, cell 0: .*-129",
    ),
    (
        {"ids": [[1], [2, 0.5]]},
        {"dtypes": {"ids": torch.int64}},
        ArgumentTypeError,
        r"row 1, cell 1: .*integers.*0\.5.*float32",
    ),
    ({"ids": [[(1 << 24) + 1], [0.5]]}, {}, ArgumentError, "row 0, cell 0: .*float32.*16777217"),
    ({"ids": [(1 << 24) + 1, 0.5]}, {}, ArgumentError, "row 0: .*float32 holds exactly"),
    ({"ids": [[1], [0.5, True]]}, {}, ArgumentTypeError, "row 1, cell 1: .*True"),
    ({"ids": [True, 0.5]}, {}, ArgumentTypeError, r"row 1: .*bools.*0\.5"),
    ({"ids": [[1], [True]]}, {}, ArgumentTypeError, "row 1, cell 0: .*True"),
    ({"ids": [[True], [1]]}, {}, ArgumentTypeError, "row 1, cell 0: .*bools.*1"),
    ({"ids": [[0.5], [False]]}, {}, ArgumentTypeError, "row 1, cell 0: .*False"),
    ({"ids": [[1], [2, "x"]]}, {}, ArgumentTypeError, "row 1, cell 1: .*'x'.*object"),
    ({"ids": [[1], [None]]}, {}, ArgumentTypeError, "row 1, cell 0: .*None.*nan.*object"),
    ({"ids": [[1], [2, None]]}, {}, ArgumentTypeError, "row 1, cell 1: .*None"),
    ({"ids": [[1], None]}, {}, ArgumentTypeError, "row 1: .*None.*object"),
    ({"ids": [None, 1]}, {}, ArgumentTypeError, "row 0: .*None"),
    ({"ids": [[[1, 2]], [[3, None]]]}, {}, ArgumentTypeError, "row 1, cell 0: .*None"),
    ({"ids": [[[None, 2]], [[None, 3]]]}, {}, ArgumentTypeError, "row 0, cell 0: .*None"),
    ({"ids": [[None, [2]], [None, [3]]]}, {}, ArgumentTypeError, "row 0, cell 0: .*None"),
    ({"ids": [1, "x"]}, {}, ArgumentTypeError, "row 1: .*'x'"),
    ({"ids": ["x", 1]}, {}, ArgumentTypeError, "row 1: .*object"),
    ({"ids": [["x"], [1]]}, {}, ArgumentTypeError, "row 1: .*object"),
    ({"ids": [1, [2]]}, {}, ArgumentError, "'ids'"),
    (
        {"ids": [[0.5, (1 << 24) + 1]]},
        {},
        ArgumentError,
        "row 0, cell 1: .*exactly, found 16777217",
    ),
    ({"ids": [[0.5], [1e39]]}, {}, ArgumentError, r"row 1, cell 0: .*1e\+39"),
    (
        {"ids": [[1.0], [7e4]]},
        {"dtypes": {"ids": torch.float16}},
        ArgumentError,
        "row 1, cell 0: .*70000",
    ),
    (
        {"ids": [[1], [2049]]},
        {"dtypes": {"ids": torch.float16}},
        ArgumentError,
        "row 1, cell 0: .*exactly",
    ),
    ({"ids": [["x"]]}, {"dtypes": {"ids": torch.int64}}, ArgumentTypeError, "row 0: .*numbers"),
    ({"ids": [[1]]}, {"dtypes": {"ids": torch.complex64}}, ArgumentTypeError, "complex64"),
    ({"ids": [[[1, 2], [3]]]}, {}, ArgumentError, "row 0: .*object"),
    ({"ids": [[[1], 2]]}, {}, ArgumentError, "row 0: .*object"),
    ({"ids": [[], []]}, {}, ArgumentError, "'ids'.*dtypes="),
    ({"ids": [[1], [2, 3]]}, {"rectangular": ["ids"]}, ArgumentError, "row 1: .*rectangular"),
    ({"a": [[1]], "b": [[1, 2]]}, {"same_length": ["a", "b"]}, ArgumentError, r"'b'\), row 0"),
    ({"a": [[1]], "b": [1]}, {"same_length": ["a", "b"]}, ArgumentTypeError, "'b'"),
    ({"a": [[1]], "b": ["x"]}, {"same_length": ["a", "b"]}, ArgumentTypeError, "objects in 'b'"),
    ({"a": [[1]]}, {"same_length": ["a", "x"]}, ArgumentKeyError, "same_length.*'x'"),
    ({"a": [[1]]}, {"same_length": "a"}, ArgumentTypeError, "string"),
    ({"a": [[1]]}, {"rectangular": ["x"]}, ArgumentKeyError, "rectangular.*'x'"),
    ({"a": [[1]]}, {"rectangular": "a"}, ArgumentTypeError, "string"),
    ({"a": [[1]]}, {"dtypes": {"x": torch.int8}}, ArgumentKeyError, "dtypes.*'x'"),
    ({"a": [[1]]}, {"dtypes": {"a": "int8"}}, ArgumentTypeError, "'int8'"),
    ({"a": [[1]]}, {"dtypes": ["a"]}, ArgumentTypeError, "list"),
    ({"a": [[1]]}, {"dtypes": {"a": FieldSchema("tensordict", None, None)}}, ArgumentError, "'ten"),
    ({"a": [1], "b": [1, 2]}, {}, ArgumentError, r"'b'\): expected 1 rows like 'a', found 2"),
    ({"a": [np.zeros((2, 3)), np.zeros((2, 4))]}, {}, ArgumentError, "row 1: .*tokens, 3"),
    ({"a": [np.zeros(2), np.zeros(2, dtype="f4")]}, {}, ArgumentTypeError, "row 1: .*float32"),
    ({"a": [np.array([300])]}, {"dtypes": {"a": torch.uint8}}, ArgumentError, "cell 0: .*300"),
    (
        {"a": [torch.tensor([2**24 + 1])]},
        {"dtypes": {"a": torch.float32}},
        ArgumentError,
        "exactly",
    ),
    ({"a": [np.array([1e300])]}, {"dtypes": {"a": torch.float32}}, ArgumentError, "row 0"),
    ({"a": [np.array([True])]}, {"dtypes": {"a": torch.int8}}, ArgumentTypeError, "row 0"),
    ({"a": (x for x in [1])}, {}, ArgumentTypeError, "'a'.*generator"),
    ({"a": "text"}, {}, ArgumentTypeError, "'a'.*str"),
    ({"a": {1: 2}}, {}, ArgumentTypeError, "'a'.*dict"),
    ({1: [2]}, {}, ArgumentTypeError, "strings"),
    ({"a": []}, {}, ArgumentError, "'a'.*dtypes="),
    (({"a": 1} for _ in range(2)), {}, ArgumentTypeError, "generator.*list"),
    (iter([{"a": 1}]), {}, ArgumentTypeError, "list_iterator"),
    (5, {}, ArgumentTypeError, "int"),
    ([], {}, ArgumentError, "dtypes="),
    ([], {"dtypes": {"a": torch.int64}}, ArgumentError, "'a'.*FieldSchema"),
    ([{"a": 1}, 5], {}, ArgumentTypeError, "row 1"),
    ([{"a": 1}, {"b": 1}], {}, ArgumentKeyError, r"'a'\), row 1: .*without 'a'"),
    ([{"a": 1}, {"a": 1, "b": 1}], {}, ArgumentKeyError, r"'b'\), row 1: .*with 'b'"),
    ([{"a": 1, "b": 1}, {"a": 1}], {}, ArgumentKeyError, r"'b'\), row 1: .*without 'b'"),
    ([{1: 2}], {}, ArgumentTypeError, "strings"),
]


@pytest.mark.parametrize(("rows", "options", "error", "text"), WRONG)
@pytest.mark.parametrize("function", [pack_rows, encode_rows])
def test_bad_input_is_named(function, rows, options, error, text):
    if not hasattr(rows, "__len__") and not isinstance(rows, int):
        rows = iter(()) if "iterator" in text and "list_" not in text else rows
    with pytest.raises(error, match=text) as caught:
        function(rows, **options)
    assert isinstance(caught.value, jagcodec.JagcodecError)
    assert function.__name__ in str(caught.value)


def test_a_list_that_shrinks_while_it_is_read():
    class Shrinks:
        def __index__(self):
            row.clear()
            return 1

    row = [1, Shrinks(), 3, 4]
    if cells._active is python_cells:  # which reads a copy
        assert pack_rows({"a": [row]})["a"].values().tolist() == [1, 1, 3, 4]
    else:
        with pytest.raises(ArgumentError, match="'a'"):
            pack_rows({"a": [row]})


def test_the_mask_of_a_masked_array_is_not_dropped():
    rows = {"a": [np.ma.masked_array([1, 2], mask=[False, True])]}
    with pytest.raises(UnsupportedTypeError, match="MaskedArray"):
        encode_rows(rows)
    with pytest.raises(ArgumentTypeError, match="row 0: expected numbers"):
        encode_rows(rows, dtypes={"a": torch.int64})


def test_lists_in_any_value_come_back():
    value = {"a": [*range(100)], "b": ([0.5] * 64, {3: [True] * 70}), "c": [[*range(64)] * 2, "x"]}
    assert decode(encode(value)) == value
    mixed = [1, True, 2.0] * 30
    assert list(map(type, decode(encode(mixed)))) == list(map(type, mixed))


@pytest.mark.parametrize("lengths", [[1, 2], (1, 2), np.array([1, 2]), array("h", [1, 2])])
def test_lengths_may_be_lists_and_arrays(lengths):
    fields = {"a": torch.tensor([[1, 0], [2, 3]])}
    batch = jagcodec.pack_jagged_fields(fields, lengths=lengths)
    assert batch["a"].values().tolist() == [1, 2, 3]
    padded = jagcodec.materialize(batch, padding_side="left_right", prompt_lengths=[1, 1])
    assert padded["a"].tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        ([1, 2.0], TypeError),
        ([1, True], TypeError),
        ([1, None], TypeError),
        (np.array([1.0, 2]), TypeError),
        (np.array([True, True]), TypeError),
        ([1, -2], ValueError),
        ([1, 1 << 64], ValueError),
        (np.array([[1, 2]]), ValueError),
    ],
)
def test_lengths_that_are_none(lengths, error):
    with pytest.raises(error, match="lengths"):
        jagcodec.pack_jagged_fields({"a": torch.ones(2, 2)}, lengths=lengths)


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([[None, -0.5], [-1.0]], "row 0, cell 0"),
        ([[None], [-0.5]], "row 0, cell 0"),
        ([[None, -0.5], [None, -1.0]], "row 0, cell 0"),
        ([[None], [None, -1.0]], "row 0, cell 0"),
        ([(None, -0.5)], "row 0, cell 0"),
    ],
)
@pytest.mark.parametrize("function", [pack_rows, encode_rows])
def test_a_none_among_numbers_is_named(function, rows, where):
    """As engines give for the first token, which nothing predicts."""
    with pytest.raises(ArgumentTypeError, match=f"{where}: expected a number, found None"):
        function([{"logprobs": row} for row in rows])


def test_a_none_among_objects_is_an_object():
    rows: list[dict[str, Any]] = [
        {"a": None, "b": [None], "c": ["x", None, 1]},
        {"a": {}, "b": [], "c": []},
    ]
    batch = pack_rows(rows)
    assert [list(batch[name]) for name in "abc"] == [[row[name] for row in rows] for name in "abc"]


def test_a_float_after_ints_makes_the_column_float32():
    batch = both({"r": [0, 1, 0.5], "x": [[1, 2], [], [2.5]]})
    assert batch["r"].dtype == batch["x"].dtype == torch.float32
    assert batch["r"].tolist() == [0.0, 1.0, 0.5]
    assert batch["x"].values().tolist() == [1.0, 2.0, 2.5]
    assert both([{"x": [1, 0.5]}])["x"].values().tolist() == [1.0, 0.5]


def test_a_none_among_strings_is_not_the_fault():
    with pytest.raises(ArgumentTypeError, match="row 1: expected an object, as list in row 0"):
        pack_rows([{"words": ["a", None]}, {"words": [1, 2]}])
