"""The dtype of a column follows from the set of its numbers' types, whichever comes first."""

import itertools
import warnings
from array import array
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from jagcodec import RowBuilder, decode, encode_rows, kernels, pack_rows
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError, JagcodecWarning
from jagcodec.kernels import python_cells
from tests.oracle import assert_same, bits, cell_of

KERNELS = {"compiled": kernels.fill, "python": python_cells.fill}


class Float(float):
    """A float of the user, as weak as Python's."""


PYTHON: list[Any] = [True, 0, 1, 3, 2**11 + 1, 2**24 + 1, 2**53 + 1, 2**63, 2**70]
PYTHON += [0.5, 0.1, 1e39, float("nan"), float("inf"), 65520.0, Float(0.25)]
TYPED: list[Any] = [
    np.bool_(True),
    np.int8(3),
    np.int64(2**24 + 1),
    np.uint64(2**63),
    np.array(7, np.int32),
]
TYPED += [np.float16(0.1), np.float32(0.1), np.float64(0.1), np.float64(1e300), np.array(0.1)]
TYPED += [torch.tensor(5), torch.tensor(0.1), torch.tensor(0.1, dtype=torch.bfloat16)]
TYPED += [torch.tensor(True), np.array(3, dtype=">i2")]
numbers = st.sampled_from(PYTHON) | st.sampled_from(TYPED) | st.sampled_from([None, 1, 0.5])
columns = st.lists(numbers, min_size=1, max_size=4).filter(
    lambda items: not all(item is None for item in items)  # which are objects
)

TYPE, KIND, VALUE = [
    (ArgumentTypeError, "bad_dtype"),
    (ArgumentTypeError, "bad_type"),
    (ArgumentError, "bad_dtype"),
]


def dtype_of(item):
    """The dtype of a number; None for one of Python's."""
    if isinstance(item, (np.generic, np.ndarray)):
        return getattr(torch, item.dtype.name)
    return getattr(item, "dtype", None)


def dtype_or_refusal(items):
    """What numpy's rule for promotion says, where only a number that does not change may lose."""
    if None in [item if dtype_of(item) is None else 0 for item in items]:
        return KIND
    dtypes = {dtype_of(item) for item in items} - {None}
    kinds = {int if type(item) is int else bool if type(item) is bool else float
             for item in items if dtype_of(item) is None}  # fmt: skip
    if len(dtypes) > 1:
        return TYPE
    has_bool = bool in kinds or torch.bool in dtypes
    if has_bool and (kinds - {bool} or dtypes - {torch.bool}):
        return KIND
    if not dtypes:
        return torch.bool if has_bool else torch.float32 if float in kinds else torch.int64
    (dtype,) = dtypes
    name = "float16" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
    before = np.empty(1, dtype=name)
    return dtype if {np.result_type(before, kind(1)) for kind in kinds} <= {before.dtype} else KIND


def bits_of(cells):
    """The bits, where one NaN is as good as another."""
    is_float = cells.is_floating_point()
    return bits(cells.masked_fill(cells.isnan(), float("nan")) if is_float else cells)


def expected(items):
    """The dtype and the bits of the cells, or the refusal."""
    dtype = dtype_or_refusal(items)
    if isinstance(dtype, tuple):
        return dtype
    found = []
    for item in items:
        number = item if dtype_of(item) is None else item.item()
        number = float(number) if isinstance(number, Float) else number
        cell = cell_of(number, dtype)
        narrow = dtype in (torch.float16, torch.bfloat16) and dtype_of(item) is None
        if cell is None or (narrow and number == number and cell.item() != number):
            return VALUE
        found.append(bits_of(cell))
    return dtype, found


def outcome(make, flat=lambda cells: cells):
    try:
        cells = make()
    except JagcodecError as error:
        return type(error), error.reason
    return cells.dtype, bits_of(flat(cells))


def values_of(column):
    return column.values() if column.is_nested else column


PACKERS = {
    "pack_rows": lambda rows: pack_rows({"x": rows})["x"],
    "encode_rows": lambda rows: decode(encode_rows({"x": rows}))["x"],
    "of dicts": lambda rows: decode(encode_rows([{"x": row, "y": 1} for row in rows]))["x"],
    "with an option": lambda rows: decode(encode_rows({"x": rows}, narrow=True))["x"],
}
# Each way to write a column of these numbers in this order, and the way back.
FORMS = {
    "one per row": (lambda items: items, lambda c: c),
    "in one row": (lambda items: [items], lambda c: c),
    "in one tuple": (lambda items: [tuple(items)], lambda c: c),
    "in a row each": (lambda items: [[item] for item in items], lambda c: c),
    "after empty rows": (lambda items: [[], [], items, []], lambda c: c),
    "nested": (lambda items: [[[item, item] for item in items]], lambda c: c[:, 1]),
    "nested in rows": (lambda items: [[[[item]]] for item in items], lambda c: c[:, 0, 0]),
    "typed ones as arrays": (
        lambda items: [[item] if dtype_of(item) is None else item.reshape(1) for item in items],
        lambda c: c,
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
@given(columns, st.sampled_from(sorted(FORMS)), st.sampled_from(sorted(PACKERS)))
@example([0.1, np.float64(0.2)], None, None)
@example([1, 0.5], None, None)
@example([np.int64(1), 0.5], None, None)
@example([0.1, np.float16(0.5)], None, None)
@example([1, None, 2**70, True], None, None)
@example([1, 2**24 + 1, np.float64(1)], None, None)
@example([2**63, np.uint64(1)], None, None)
def test_a_column_is_the_same_whichever_number_comes_first(kernel, items, form, packer):
    forms = [FORMS[form]] if form else FORMS.values()
    packers = [PACKERS[packer]] if packer else PACKERS.values()
    with mock.patch.object(kernels, "fill", KERNELS[kernel]):
        for order in itertools.permutations(items):
            for (rows, flat), pack in itertools.product(forms, packers):
                given_rows = rows([*order])
                column = outcome(lambda p=pack, r=given_rows: values_of(p(r)), flat)
                assert column == expected(order), order


@pytest.mark.parametrize("kernel", KERNELS)
@given(columns, st.booleans())
@example([0.1, np.float64(0.2)], False)
@example([1, np.int8(3)], False)
@example([0.1, np.float16(0.5)], True)
@example([0.5, np.float16(0.5), 0.1], True)
def test_a_growing_row_is_what_its_numbers_are_in_one_row(kernel, items, in_lists):
    """In every order, unless some of its chunks cannot be a row by themselves."""
    with mock.patch.object(kernels, "fill", KERNELS[kernel]):
        for order in itertools.permutations(items):
            row = RowBuilder()
            for n, item in enumerate(order, start=1):
                wanted = expected(order[:n])
                before = row.to_row()
                if isinstance(wanted[0], torch.dtype):
                    row.append(x=[item] if in_lists else item)
                    found = torch.as_tensor(row.to_row()["x"])
                    assert (found.dtype, bits_of(found)) == wanted
                    continue
                with pytest.raises(wanted[0]) as raised:
                    row.append(x=[item] if in_lists else item)
                assert raised.value.reason == wanted[1]
                assert_same(row.to_row(), before)
                break


LISTS = [[1, 2], [0.5], [np.float64(0.1)], [np.float32(0.5), 0.1], [], [2**24 + 1], [True], [None]]
ARRAYS = [np.array([0.1]), np.array([1, 2]), torch.tensor([0.5]), np.array([], dtype=np.float32)]
some_rows = (
    st.sampled_from(LISTS) | st.sampled_from(ARRAYS) | st.sampled_from([range(3), array("d")])
)


@given(
    st.lists(some_rows, min_size=1, max_size=4).filter(
        lambda rows: any(not isinstance(row, list) or row not in ([], [None]) for row in rows)
    ),
    st.sampled_from(sorted(PACKERS)),
)
@example([[1], np.array([0.5])], "pack_rows")
@example([[1], torch.tensor([2, 3]), np.array([4], dtype=np.int8)], "pack_rows")
@example([[0.5], np.array([], dtype=np.int64)], "pack_rows")
def test_rows_are_the_same_in_any_order(rows, packer):
    """Of lists, arrays and ranges: an array counts with its dtype, also if it is empty."""
    found = set()
    for order in itertools.permutations(range(len(rows))):
        result = outcome(lambda o=order: values_of(PACKERS[packer]([rows[i] for i in o])))
        cells = result[1]
        if isinstance(result[0], torch.dtype):
            ends = [*itertools.accumulate(len(rows[i]) for i in order)]
            pairs = zip(order, itertools.pairwise([0, *ends]), strict=True)
            cells = tuple(tuple(cells[a:b]) for _, (a, b) in sorted(pairs))
        found.add((result[0], cells))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("rows", "detail"),
    [
        (
            [np.int64(1), 0.5],
            r"row 1: expected integers \(others are int64\), found 0.5; for",
        ),
        (
            [0.5, np.int64(1)],
            r"row 1: expected floats, found int64; for floats pass",
        ),
        (
            [[np.int8(1), np.int64(1)]],
            "row 0, cell 1: expected torch.int8 like those before",
        ),
        ([[0.5], [np.float16(0.5), 0.1]], "cell 1: expected a float that float16 holds exactly, "),
        ([[1], [np.bool_(True)]], "row 1, cell 0: expected numbers, found bool"),
        ([[1, [2]]], r"row 0, cell 1: expected a number like the others, found \[2\]"),
        ([[0.5, torch.ones(2)]], r"row 0, cell 1: expected numbers, found a \(2,\) tensor"),
        ([[torch.ones(2), 0.5]], r"row 0, cell 0: expected numbers, found a \(2,\) tensor"),
        ([[torch.ones(2), [1, 2]]], r"row 0, cell 0: expected numbers, found a \(2,\) tensor"),
        ([[[1, 2], torch.ones(2)]], r"row 0, cell 1: expected a number, found a \(2,\) tensor"),
    ],
)
def test_a_refusal_names_the_number_and_the_remedy(rows, detail):
    with pytest.raises(JagcodecError, match=detail):
        pack_rows({"x": rows})


def test_a_dtype_of_tensors_alone():
    """Python's numbers cannot have it, and tensors without dims can."""
    one = torch.ones(1).to(torch.float8_e5m2)
    rows: list[Any]
    for rows in ([[one[0], one[0]]], [[one[0]], one]):
        assert pack_rows({"x": rows})["x"].values().dtype == torch.float8_e5m2
    for items in itertools.permutations([one[0], 0.5, 1]):
        for rows in ([*items], [items]):
            with pytest.raises(ArgumentTypeError, match="pass tensors"):
                pack_rows({"x": rows})


def test_a_resumed_row_has_the_dtype_of_its_message():
    row = RowBuilder()
    row.append(x=np.array([0.5], dtype=np.float16))
    with pytest.raises(ArgumentError, match="holds exactly"):
        row.append(x=[0.1])
    resumed = RowBuilder.from_message(row.to_frames())
    resumed.append(x=[0.1])
    assert resumed.to_row()["x"].tolist() == np.array([0.5, 0.1], dtype=np.float16).tolist()


# --- lists of arrays, one per token --------------------------------------------------------------


def objects(row):
    found = np.empty(len(row), dtype=object)
    found[:] = row
    return found


TOKENS: dict[str, Any] = {
    "arrays": lambda cell: np.array(cell, dtype=np.int32),
    "tensors": torch.tensor,
    "ranges": lambda cell: range(cell[0], cell[-1] + 1),
    "standard arrays": lambda cell: array("q", cell),
}
ROWS = [[[1, 2], [3, 4], [5, 6]], [], [[7, 8]], [[0, 1], [2, 3]]]
CELLS = [cell for row in ROWS for cell in row]


def warnings_of(rows, dtypes=None):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        column: Any = pack_rows({"x": rows}, dtypes=dtypes)["x"]
        frames = encode_rows({"x": rows}, dtypes=dtypes, default=list)
    assert len(found) in (0, 2)
    if dtypes and object not in dtypes.values():
        again: Any = decode(frames)["x"]
        assert again.offsets().tolist() == column.offsets().tolist()
        assert bits(again.values()) == bits(column.values())
    return column, [str(each.message) for each in found if each.category is JagcodecWarning]


@pytest.mark.parametrize("kind", [list, tuple, objects])
@pytest.mark.parametrize("token", TOKENS)
def test_lists_of_equal_arrays_are_cells_if_dtypes_says_so(token, kind):
    rows = [kind([TOKENS[token](cell) for cell in row]) for row in ROWS]
    for dtype in (torch.float32, torch.int64, torch.int8, torch.bfloat16):
        for order in itertools.permutations(range(4)):
            column, found = warnings_of([rows[i] for i in order], {"x": dtype})
            assert (column.values().dtype, found) == (dtype, [])
            assert [row.tolist() for row in column.unbind()] == [
                ROWS[i] or torch.empty(0, 2).tolist() for i in order
            ]
    row = RowBuilder({"x": torch.int16})
    for each in rows:
        row.append(x=each if len(each) else [])
    assert row.to_row()["x"].tolist() == CELLS


@pytest.mark.parametrize("kind", [list, tuple, objects])
@pytest.mark.parametrize("token", TOKENS)
def test_lists_of_equal_arrays_are_objects_with_a_warning(token, kind):
    rows = [kind([TOKENS[token](cell) for cell in row]) for row in ROWS]
    for order in itertools.permutations(rows):
        column, found = warnings_of(order)
        assert not isinstance(column, torch.Tensor)
        assert len(found) == 2
        assert found[0].startswith("pack_rows('x'): rows are lists of arrays of one shape")
        assert "pass dtypes={'x': their dtype}, or stack the rows with np.stack" in found[0]
        assert warnings_of(order, {"x": object})[1] == []


def test_the_warning_comes_once_per_line():
    rows = {"x": [[np.ones(2), np.ones(2)]]}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            encode_rows(rows)
        encode_rows(rows)
    assert [each.filename for each in found] == [__file__] * 2


IMAGES = [np.ones((3, 2)), np.ones((3, 4)), torch.ones(3, 2), np.ones((3, 2), dtype=np.float32)]


@given(
    st.lists(
        st.none() | st.just("x") | st.lists(st.sampled_from([*IMAGES, None]), max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_other_objects_do_not_warn(rows):
    items = [item for row in rows for item in (row if isinstance(row, list) else [None])]
    forms = {(getattr(i, "dtype", 0), getattr(i, "shape", 0)) for i in items}
    equal = len(forms) == 1 and forms != {(0, 0)}
    longest = max(len(row) if isinstance(row, list) else 0 for row in rows)
    if not any(rows):
        rows = [*rows, "x"]  # at least one row shows that they are objects
        equal = False
    for order in itertools.permutations(rows):
        assert len(warnings_of(order)[1]) == (2 if equal and longest > 1 else 0)


@pytest.mark.parametrize(
    ("row", "error", "place"),
    [
        ([np.ones(2), np.ones(3)], ArgumentError, r"cell 1: expected 2 items like cell 0, found 3"),
        ([range(2), range(3)], ArgumentError, r"cell 1: expected 2 items like cell 0, found 3"),
        ([np.ones(2), [1, 2, 3]], ArgumentError, r"cell 1: expected 2 items like cell 0, found 3"),
        ([np.ones(2), np.array([1e300, 0])], ArgumentError, r"cell 1: .*found 1e\+300"),
        ([np.ones(2), None], ArgumentTypeError, "cell 1: expected a number, found None"),
        ([np.ones(2), "x"], ArgumentTypeError, "cell 1: expected numbers, found 'x'"),
        ([np.ones(2), 1.0], ArgumentError, r"cell 1: expected shape"),
    ],
)
def test_a_list_of_arrays_that_are_no_cells_is_refused_in_any_order(row, error, place):
    for rows in itertools.permutations([[np.ones(2)], row, [], [[1, 2]]]):
        with pytest.raises(error, match=rf"^pack_rows\('x'\), row {rows.index(row)}, {place}"):
            pack_rows({"x": rows}, dtypes={"x": torch.float32})
    for items in itertools.permutations(row):
        with pytest.raises(error):
            pack_rows({"x": [[*items]]}, dtypes={"x": torch.float32})


def test_rows_beside_lists_of_arrays():
    """Arrays and nested lists; and tokens along a later dim, arrays of layers, lists that loop."""
    whole = [[np.array([1.0, 2.0]), [3, 4]], np.array([[5, 6]]), [[7, 8]], (), [[9, 10], range(2)]]
    wanted = [[[1, 2], [3, 4]], [[5, 6]], [[7, 8]], [], [[9, 10], [0, 1]]]
    for order in itertools.permutations(range(5)):
        rows = pack_rows({"x": [whole[i] for i in order]}, dtypes={"x": torch.float64})["x"]
        assert [row.tolist() for row in rows.unbind()] == [wanted[i] for i in order]
    mrope = [[np.arange(n)] * 3 for n in (2, 4)]
    column = pack_rows({"x": mrope}, dtypes={"x": torch.int64}, ragged_dims={"x": 2})["x"]
    assert [row.tolist() for row in column.unbind()] == [[[0, 1]] * 3, [[0, 1, 2, 3]] * 3]
    layers = [objects([objects([np.array([1, 2], dtype=np.uint8)] * 3)] * n) for n in (2, 1)]
    column, _ = warnings_of(layers, {"x": torch.uint8})
    assert [tuple(row.shape) for row in column.unbind()] == [(2, 3, 2), (1, 3, 2)]
    assert len(warnings_of(layers)[1]) == 2
    loop: list[Any] = [np.ones(2)]
    loop += [loop, loop]
    with pytest.raises(JagcodecError):
        pack_rows({"x": [loop]}, dtypes={"x": torch.float32})


def test_cells_of_arrays_own_their_memory():
    token = np.zeros((1 << 15,), dtype=np.float32)
    frames = encode_rows({"x": [[token]]}, dtypes={"x": torch.float32})
    token[:] = 1
    assert not decode(frames)["x"].values().any()
