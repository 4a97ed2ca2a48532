"""Numbers to cells: one rule for rows, for messages and for a row that grows."""

import itertools
import re
import sys
from array import array
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from jagcodec import RowBuilder, decode, encode_rows, kernels, pack_rows, stack_or_nest
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError
from jagcodec.wire.torch_dtypes import TORCH_NAMES
from tests.oracle import assert_same, bits, cell_of
from tests.strategies import whole_numbers


def packed(chunk, dtypes):
    return pack_rows({"x": [chunk]}, dtypes=dtypes)["x"].values()


def second(chunk, dtypes):
    """After a row of the same dtype, of which the cells are taken off again."""
    dtype = (dtypes or {}).get("x") or packed(chunk, None).dtype
    first = torch.zeros(1, *np.shape(chunk)[1:], dtype=dtype)
    return pack_rows([{"x": first}, {"x": chunk}], dtypes=dtypes)["x"].values()[1:]


def sent(chunk, dtypes):
    return decode(encode_rows([{"x": chunk}], dtypes=dtypes))["x"].values()


def grown(chunk, dtypes):
    row = RowBuilder(dtypes)
    for each in (chunk, []):  # the second says nothing
        row.append(x=each)
    cells = row.to_row()["x"]
    name = str(cells.dtype).removeprefix("torch.")
    assert isinstance(cells, np.ndarray) == (name in np.sctypeDict)
    return torch.as_tensor(cells)


def resumed(chunk, dtypes):
    """Appended to a row that begins with the same chunk, and has been sent."""
    row = RowBuilder(dtypes)
    row.append(x=chunk)
    row = RowBuilder.from_message(row.to_frames())
    row.append(x=chunk)
    cells = torch.as_tensor(row.to_row()["x"])
    assert bits(cells[: len(chunk)]) == bits(cells[len(chunk) :])
    return cells[: len(chunk)]


WAYS = [packed, second, sent, grown, resumed]
NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64"
DTYPES = [getattr(torch, name) for name in NAMES.split()]

ints = whole_numbers()
floats = st.floats() | st.floats(width=32) | st.sampled_from([65504.0, 65519.0, 65520.0, 3.5e38])
numbers = st.one_of(ints, floats, st.booleans(), ints | floats, ints | st.booleans())


def dtype_of(chunk):
    """The dtype that a list of numbers has if the caller names none."""
    if isinstance(chunk[0], bool):
        return torch.bool
    return torch.float32 if any(type(n) is float for n in chunk) else torch.int64


def first_misfit(chunk, dtype, is_given):
    """The index of the first number that does not fit; a bool among others does not, before all."""
    kinds = [isinstance(number, bool) for number in chunk]
    if not is_given and len(set(kinds)) > 1:
        return kinds.index(not kinds[0])
    cells = [cell_of(n, dtype) for n in chunk]
    return cells.index(None) if None in cells else None


@pytest.mark.parametrize("way", [packed, sent, grown])
@given(
    numbers.flatmap(lambda n: st.lists(st.just(n) | numbers, min_size=1, max_size=4)),
    st.none() | st.sampled_from(DTYPES),
    st.sampled_from([list, tuple, lambda chunk: [np.asarray(n)[()] for n in chunk]]),
)
@example([1, 2**70, True], None, list)
@example([2**63, 0.5], None, list)
@example([1, 2**63, 0.5], None, list)
@example([2**63 + 1, 0.5], None, list)
@example([1, True, 0.5], None, list)
def test_numbers_become_the_nearest_cells_or_the_first_misfit_is_named(way, chunk, dtype, form):
    if dtype is None or not all(-(2**63) <= n < 2**63 for n in chunk):
        form = list if form is not tuple else tuple  # numpy's numbers have a dtype, or do not exist
    wanted = dtype or dtype_of(chunk)
    cells = [cell_of(n, wanted) for n in chunk]
    misfit = first_misfit(chunk, wanted, dtype is not None)
    if misfit is not None:
        with pytest.raises(JagcodecError, match=rf"cell {misfit}: expected"):
            way(form(chunk), dtype and {"x": dtype})
    else:
        found = way(form(chunk), dtype and {"x": dtype})
        assert found.dtype == wanted
        assert bits(found) == [bits(cell) for cell in cells if cell is not None]


@pytest.mark.parametrize("pack", [pack_rows, lambda rows: decode(encode_rows(rows))])
@given(st.lists(st.lists(ints | floats, min_size=1, max_size=3), min_size=1, max_size=3))
@example([[2**63], [0.5]])
@example([[1], [2**63], [1, 0.5]])
def test_a_float_anywhere_in_a_column_of_ints_makes_it_float32(pack, rows):
    """Wherever the float is: in the row of an int beyond int64, in a later row, one per row."""
    for column in (rows, list(itertools.chain(*rows)), [[[n, n] for n in row] for row in rows]):
        items = list(itertools.chain(*rows))
        wanted = dtype_of(items)
        if None in [cell_of(n, wanted) for n in items]:
            with pytest.raises(JagcodecError):
                pack([{"x": row} for row in column])
        else:
            assert pack([{"x": row} for row in column])["x"].dtype == wanted


@given(st.lists(st.lists(ints | floats, min_size=1, max_size=3), min_size=1, max_size=3))
@example([[1], [2**63, 0.5]])
@example([[2**63, 0.5], [2**63]])
def test_a_row_that_grows_has_the_dtype_of_all_its_chunks_or_refuses_one(chunks):
    """A chunk is read as if no float came after it: an int beyond int64 is refused."""
    row, read = RowBuilder(), []
    for chunk in chunks:
        wanted = dtype_of([*read, *chunk])
        if None in [cell_of(n, wanted) for n in (*read, *chunk)]:
            with pytest.raises(JagcodecError):
                row.append(x=chunk)
        else:
            row.append(x=chunk)
            read += chunk
            assert row.to_row()["x"].dtype == str(wanted).removeprefix("torch.")


def error_of(rows, dtype):
    try:
        pack_rows({"x": rows}, dtypes={"x": dtype})
    except JagcodecError as error:
        return type(error), error.reason, error.path, error.detail
    return None


uneven = st.one_of(
    numbers.map(lambda n: [n, n]), st.lists(numbers | st.none(), max_size=3), st.none() | numbers
)


@given(
    st.lists(numbers, min_size=1, max_size=5) | st.lists(uneven, min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 2),
)
@example([65536, False], torch.float16, 0)
@example([3.4e38, 0.0, 257], torch.bfloat16, 1)
@example([[65536.0, 1.0], [2.0]], torch.float16, 0)
@example([[[1, 2]], [[3, None]], [[4]], [5]], torch.int8, 0)
def test_the_named_cell_is_the_first_with_which_a_row_cannot_be_packed(row, dtype, depth):
    """Whatever is wrong: too large once it is rounded, inexact, of another kind or shape."""
    for _ in range(depth):
        row = [[item, item] for item in row]
    found = [error_of([row[: n + 1]], dtype) for n in range(len(row))]
    bad = [n for n, error in enumerate(found) if error is not None]
    assert {error[2] for error in found if error} == {
        f"pack_rows('x'), row 0, cell {n}" for n in bad[:1]
    }
    assert bad == [*range(len(row))][bad[0] if bad else len(row) :]


REMEDY = re.compile(r"pass dtypes=\{'x': (?:torch\.)?(\w+)\}")


def remedies_of(rows, dtypes):
    """What the error of these rows says to pass as a dtype, if there is an error."""
    try:
        pack_rows({"x": rows}, dtypes=dtypes)
    except JagcodecError as error:
        found = REMEDY.findall(error.detail)
        return error, [object if name == "object" else getattr(torch, name) for name in found]
    return None, []


scalars = numbers | st.sampled_from([2**63, 2**64 - 1, 2**64, 2**70, -(2**63) - 1, 1e39, None])
choices = st.none() | st.sampled_from(DTYPES)


@given(st.lists(st.lists(scalars, max_size=3), min_size=1, max_size=3), choices)
@example([[2**70]], None)
@example([[1, 2**64]], torch.uint64)
@example([[-1]], torch.uint8)
@example([[1e300]], torch.int64)
@example([[True, None]], None)
def test_the_remedies_of_an_error_help(rows, dtype):
    error, remedies = remedies_of(rows, dtype and {"x": dtype})
    if error is None or "in some row, found none" in error.detail:
        return
    assert remedies[-1] is object
    assert remedies_of(rows, {"x": object}) == (None, [])
    row, cell = map(int, re.findall(r"\d+", error.path))
    for other in remedies[:-1]:
        assert remedies_of([[rows[row][cell]]], {"x": other}) == (None, [])


def test_what_takes_the_place_of_none_fits():
    nan = r"float\('nan'\)", float("nan")
    for first, text, place in ((True, "False", False), (1, "0", 0), (0.5, *nan)):
        with pytest.raises(ArgumentTypeError, match=f"in its place, such as {text};"):
            pack_rows({"x": [[first, None]]})
        pack_rows({"x": [[first, place]]})


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS8 = [dtype for dtype in TORCH_NAMES if str(dtype).startswith("torch.float8_")]
corners = st.sampled_from(
    [65519.99, 65520.0, 3.3895e38, 3.3962e38, 3.4028235677973366e38, 1e-45, 2.0**-133, -0.0]
    + [float("nan"), float("inf"), -float("inf"), 2.0**64, 2.0**63, 257.0]
)


def typed(numbers, dtype, is_array):
    """Those of the numbers that fit, as an array or a tensor."""
    if dtype in (torch.bfloat16, *FLOATS8):
        return typed(numbers, torch.float32, False).to(dtype)
    fit = [number for number in numbers if cell_of(number, dtype) is not None]
    made = np.array(fit, dtype=str(dtype).removeprefix("torch."))
    return made if is_array else torch.from_numpy(made)


@st.composite
def typed_rows(draw):
    """Arrays and tensors with cells of one shape, of one dtype or two."""
    dtypes = draw(st.lists(st.sampled_from([*DTYPES[1:], *FLOATS8]), min_size=1, max_size=2))
    chunks = st.lists(st.lists(ints | floats | corners, max_size=4), min_size=1, max_size=4)
    pick, inner = st.sampled_from(dtypes), draw(st.sampled_from([(), (1,), (1, 1)]))
    rows = [typed(chunk, draw(pick), draw(st.booleans())) for chunk in draw(chunks)]
    return [row.reshape(len(row), *inner) for row in rows]


@given(typed_rows())
def test_the_remedies_of_arrays_of_two_dtypes_help(rows):
    error, remedies = remedies_of(rows, None)
    if error is None:
        return
    *others, last = remedies
    assert last is object
    for other in others:
        again, _ = remedies_of(rows, {"x": other})
        assert again is None or "cell" in again.path
    assert remedies_of(rows, {"x": last}) == (None, [])


@given(typed_rows(), st.sampled_from(DTYPES[1:]))
def test_arrays_are_cast_as_lists_are(rows, dtype):
    listed = [row.tolist() for row in rows]
    assert error_of(rows, dtype) == error_of(listed, dtype)
    if error_of(rows, dtype) is None:
        made, expected = (pack_rows({"x": x}, dtypes={"x": dtype})["x"] for x in (rows, listed))
        assert made.dtype == expected.dtype == dtype
        assert made.offsets().tolist() == expected.offsets().tolist()
        cells, others = made.values().reshape(-1), expected.values().reshape(-1)
        if dtype in FLOATS:  # one NaN is another NaN in a list
            cells, others = (x.masked_fill(x.isnan(), float("nan")) for x in (cells, others))
        assert bits(cells) == bits(others)


def test_arrays_that_fit_are_never_read_number_by_number(monkeypatch):
    monkeypatch.setattr(kernels, "fill", None)
    for source, wanted in itertools.product([*DTYPES[1:], *FLOATS8], DTYPES[1:]):
        if source.is_floating_point and not wanted.is_floating_point:
            continue
        for size in (0, 3):
            rows = [typed([1.0, 0.0, 2.0] if source in FLOATS else [1, 0, 2], source, False)[:size]]
            assert error_of(rows, wanted) is None
            assert error_of([*rows, typed([], torch.int8, True)], wanted) is None
    large = [np.array([2**24 + 2, -(2**31)]), np.array([2**63 + 2**40], dtype=np.uint64)]
    assert error_of(large, torch.float32) is None
    assert error_of([np.array([2048 + 2, 65504 - 31 * 32])], torch.float16) is None


def test_arrays_of_every_dtype_are_cast_or_refused():
    for source, wanted in itertools.product(TORCH_NAMES, [*DTYPES, torch.complex64, *FLOATS8]):
        cells = torch.zeros(2 * source.itemsize, dtype=torch.uint8).view(source)
        taken = FLOATS if source in (*FLOATS, *FLOATS8) else DTYPES[1:]
        is_taken = source == wanted or (source in (*DTYPES[1:], *FLOATS8) and wanted in taken)
        for rows in ([cells], [[cells[0]], [cells[1]]]):
            error = error_of(rows, wanted)
            assert error is None or error[0] is ArgumentTypeError
            assert (error is None) == is_taken or rows[0] is not cells, (source, wanted)


TAKEN = [
    (None, range(2), "int64"),
    (None, [np.float32(0.1)], "float32"),
    (None, [[1, 2], [3, 4]], "int64"),
    (None, [[[1.5], [2]], [[3], [4]]], "float32"),
    (None, array("Q", [1, 2]), "int64"),
    (None, np.array([1, 2], dtype=">i2"), "int16"),
    (None, np.array([1, 2], dtype=np.uint32), "uint32"),
    (None, np.array([1j, 2]), "complex128"),
    (None, [np.int8(1), torch.tensor(2, dtype=torch.int8)], "int8"),
    (None, [np.int8(1), 2], "int8"),
    (None, [0.5, np.float64(0.1)], "float64"),
    (torch.int64, [np.int8(1), torch.tensor(2)], "int64"),
    (None, np.arange(12)[::2], "int64"),
    (None, np.arange(12).reshape(2, 2, 3), "int64"),
    (None, torch.arange(6).view(2, 3).t(), "int64"),
    (None, torch.ones(3, dtype=torch.bfloat16, requires_grad=True), "bfloat16"),
    (torch.float16, np.array([-np.inf]), "float16"),
    (torch.uint8, np.array([0, 255]), "uint8"),
    (torch.uint64, np.array([0, 5]), "uint64"),
    (torch.int64, np.array([5], dtype=np.uint64), "int64"),
    (torch.bfloat16, np.array([1, 2]), "bfloat16"),
    (torch.float32, torch.tensor([1.5], dtype=torch.bfloat16), "float32"),
    (torch.complex64, torch.tensor([1j]), "complex64"),
    (torch.float8_e5m2, torch.tensor([1, 0.5]).to(torch.float8_e5m2), "float8_e5m2"),
]


@pytest.mark.parametrize(("dtype", "chunk", "found"), TAKEN, ids=lambda x: f"{x!r:.30}")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_chunk_may_be(way, dtype, chunk, found):
    cells = way(chunk, dtype and {"x": dtype})
    assert str(cells.dtype) == f"torch.{found}"
    assert cells.tolist() == [item.tolist() if hasattr(item, "tolist") else item for item in chunk]
    assert not cells.requires_grad


REFUSED: list[tuple[Any, Any, Any, str]] = [
    (torch.int64, [1, 2.0], ArgumentTypeError, r"cell 1: .*integers .*found 2\.0; for floats pass"),
    (torch.bool, [True, 1], ArgumentTypeError, "cell 1: expected bools, found 1(;|$)"),
    (torch.bool, np.array([1]), ArgumentTypeError, "expected torch.bool, found torch.int64"),
    (torch.int64, [1, True], ArgumentTypeError, "cell 1: expected numbers.*found True(;|$)"),
    (torch.float32, np.array([1j]), ArgumentTypeError, "complex128"),
    (torch.float32, np.array([1e300]), ArgumentError, r"found 1e\+300"),
    (torch.float16, np.array([70000]), ArgumentError, "found 70000"),
    (torch.float16, [0.5, 2049], ArgumentError, "cell 1: .*float16 holds exactly, found 2049"),
    (torch.int8, np.array([-129]), ArgumentError, "cell 0: .*found -129"),
    (torch.uint8, np.array([[1, 2], [3, 300]]), ArgumentError, "cell 1: .*found 300"),
    (torch.int64, np.array([2**63], dtype=np.uint64), ArgumentError, "found 922"),
    (torch.int64, [2**64], ArgumentError, "an int of 65 bits"),
    (torch.float32, torch.tensor([2**24 + 1]), ArgumentError, "exactly, found 16777217"),
    (torch.complex64, np.array([1.0]), ArgumentTypeError, "found torch.float64; convert the rows"),
    (torch.float8_e4m3fn, [16], ArgumentTypeError, "float8_e4m3fn; pass tensors"),
    (torch.complex64, [1], ArgumentTypeError, "complex64; pass tensors"),
    (None, [1, {2}], ArgumentTypeError, "cell 1: .*found set"),
    (None, [1, None], ArgumentTypeError, "cell 1: expected a number, found None.*such as 0"),
    (None, [None, -0.5], ArgumentTypeError, "cell 0: expected a number, found None.*nan"),
    (None, [[1, 2], None], ArgumentTypeError, "cell 1: expected .*found None"),
    (None, [[1, 2], [3, None]], ArgumentTypeError, "cell 1: .*None"),
    (None, [[None, 2]], ArgumentTypeError, "cell 0: .*None"),
    (None, [[1], [1, 2]], ArgumentError, r"expected inner lists of length 1, found \[1, 2\]"),
    (None, [[1], 2], ArgumentError, "expected inner lists of length 1, found 2"),
    (None, array("Q", [2**63]), ArgumentError, "cell 0: .*found 922"),
]


@pytest.mark.parametrize(("dtype", "chunk", "error", "match"), REFUSED)
@pytest.mark.parametrize("way", [packed, second, sent, grown])
def test_what_does_not_fit_is_named(way, dtype, chunk, error, match):
    if way is second and dtype is None:  # the first row would decide
        way = packed
    with pytest.raises(error, match=match) as raised:
        way(chunk, dtype and {"x": dtype})
    row = {grown: "", second: "(, row 1)?"}.get(way, "(, row 0)?")
    assert re.fullmatch(rf"[A-Za-z_.]+\('x'\){row}(, cell \d)?", raised.value.path)


TEXT = array("u" if sys.version_info < (3, 13) else "w", "ab")
OBJECTS = [
    *("text", ["a"], None, {1, 2}, b"ab", iter([1]), TEXT, [{}], {}),
    *([torch.ones(1)], np.array(["a"]), np.array([None]), np.ones(1, dtype=np.longdouble)),
    torch.eye(2).to_sparse(),
    stack_or_nest([torch.ones(1), torch.ones(2)]),
    np.ma.masked_array([1, 2], mask=[False, True]),
]


@pytest.mark.parametrize("chunk", OBJECTS, ids=lambda chunk: f"{type(chunk).__name__}")
def test_what_is_not_numbers_is_an_object_of_rows_and_not_a_chunk(chunk):
    (found,) = pack_rows({"x": [chunk]}).get("x").tolist()
    assert found is chunk
    with pytest.raises(ArgumentTypeError, match=r"^RowBuilder.append\('x'\): expected numbers"):
        RowBuilder().append(x=chunk)
    with pytest.raises(ArgumentTypeError, match=r"row 0(, cell 0)?: expected"):
        pack_rows({"x": [chunk]}, dtypes={"x": torch.int64})


def test_chunks_of_a_column_are_of_one_dtype():
    cases: list[tuple[list[Any], Any, Any, Any]] = [
        ([[0, 1], [0.5], 2], True, np.float32, [0.0, 1.0, 0.5, 2.0]),
        ([[], [0.5]], "a", np.float32, [0.5]),
        ([np.array([1])], [0.5], np.int64, [1]),
        ([[2**24 + 1]], [0.5], np.int64, [2**24 + 1]),
        ([[1]], [True], np.int64, [1]),
        ([[0.5], [1]], np.array([1j]), np.float32, [0.5, 1.0]),
        ([[1], np.array([2], dtype=np.int32)], [2**31], np.int32, [1, 2]),
        ([[1], np.array([0.5]), [1e39]], np.array([1]), np.float64, [1.0, 0.5, 1e39]),
        ([[0.1], np.array([0.5])], torch.ones(1), np.float64, [0.1, 0.5]),
        ([[0.1], np.array([0.5], dtype=np.float32)], np.ones(1), np.float32, None),
        ([[0.5], np.array([2], dtype=np.float16)], [0.1], np.float16, [0.5, 2.0]),
        ([[0.1], []], np.array([2], dtype=np.float16), np.float32, None),
        ([np.array([1]), [2]], np.array([3], dtype=np.int8), np.int64, [1, 2]),
    ]
    for chunks, refused, dtype, expected in cases:
        row = RowBuilder()
        for chunk in chunks:
            row.append(x=chunk)
        for _ in range(2):
            with pytest.raises((ArgumentError, ArgumentTypeError), match=r"append\('x'\)"):
                row.append(x=refused)
            found = row.to_row()["x"]
            values = np.concatenate(chunks).astype(dtype).tolist() if expected is None else expected
            assert (found.dtype, found.tolist()) == (dtype, values)


ROWS: list[tuple[Any, Any, Any]] = [
    ([0, 1, 0.5], torch.float32, [0.0, 1.0, 0.5]),
    ([True, False], torch.bool, [True, False]),
    ([np.float64(2), np.float64(3)], torch.float64, [2, 3]),
    ([np.int16(3), np.int16(4)], torch.int16, [3, 4]),
    ([torch.tensor(4), torch.tensor(5)], torch.int64, [4, 5]),
    ([[1, 2], [], [2.5]], torch.float32, [1.0, 2.0, 2.5]),
    ([np.array([1], dtype=np.int32), [2, 3]], torch.int32, [1, 2, 3]),
    ([[1], torch.tensor([2, 3]), np.array([4])], torch.int64, [1, 2, 3, 4]),
    ([[1], np.array([0.5])], torch.float64, [1.0, 0.5]),
    ([[1], torch.tensor([2, 3]), np.array([4], dtype=np.int8)], ArgumentTypeError, "2: .*int8"),
    ([[], torch.tensor([2.0])], torch.float32, [2.0]),
    ([torch.ones(1, dtype=torch.bfloat16), [2]], torch.bfloat16, [1, 2]),
    ([[], np.ones((2, 1)), []], torch.float64, [[1.0], [1.0]]),
    ([np.uint16(3), torch.tensor(4, dtype=torch.uint16)], torch.uint16, [3, 4]),
    ([np.float32(1), [2]], ArgumentError, "1: expected shape"),
    ([[2**24 + 1], [0.5]], ArgumentError, "0, cell 0: .*float32 holds exactly, found 16777217"),
    ([2**24 + 1, 0.5], ArgumentError, "0: .*float32 holds exactly, found 16777217"),
    ([[0.5], np.array([1])], ArgumentTypeError, "1: expected floats.*for floats pass"),
    ([torch.ones(1), torch.ones(1).double()], ArgumentTypeError, "1: .*float64"),
    ([np.zeros((2, 3)), np.zeros((2, 4))], ArgumentError, "1: .*tokens, 3"),
    ([[1], [2, 1 << 63]], ArgumentError, "1, cell 1: .*int64"),
    ([0, 1 << 63], ArgumentError, "1: .*int64"),
    ([[1], [2, "x"]], ArgumentTypeError, "1, cell 1: .*'x'.*object"),
    ([True, 0.5], ArgumentTypeError, r"1: .*bools.*0\.5"),
    ([[None, [2]], [None, [3]]], ArgumentTypeError, "0, cell 0: .*None"),
    ([[[None, 1], [2, 3]]], ArgumentTypeError, "0, cell 0: .*None"),
    ([[1], None], ArgumentTypeError, "1: .*None.*object"),
    ([None, 1], ArgumentTypeError, "0: .*None"),
    ([1, "x"], ArgumentTypeError, "1: .*'x'"),
    (["x", 1], ArgumentTypeError, "1: .*an object, as str in row 0"),
    ([["x"], [1]], ArgumentTypeError, "1: .*object"),
    ([["a", None], [1, 2]], ArgumentTypeError, r"1: .* as list in row 0, found \[1, 2\]"),
    ([1, [2]], ArgumentError, "1: expected shape"),
]


@pytest.mark.parametrize(("rows", "dtype", "expected"), ROWS)
def test_rows_of_a_column_are_of_one_dtype(rows, dtype, expected):
    if not isinstance(dtype, torch.dtype):
        for pack in (pack_rows, encode_rows):
            with pytest.raises(dtype, match=rf"^{pack.__name__}\('x'\), row {expected}"):
                pack({"x": rows})
        return
    column = pack_rows({"x": rows})["x"]
    cells = column.values() if column.is_nested else column
    assert (cells.dtype, cells.tolist()) == (dtype, expected)
    assert column.is_nested == (np.ndim(rows[-1]) > 0)
    assert_same(decode(encode_rows({"x": rows}))["x"], column)


def test_rows_stay_on_their_device_which_must_be_one(device):
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    for dtype in (torch.int64, torch.int8, torch.bfloat16, torch.float64):
        there = pack_rows({"x": [row.to(device) for row in rows]}, dtypes={"x": dtype})["x"]
        assert (there.device, there.dtype) == (device, dtype)
        assert there.values().tolist() == [1, 2, 3]
    for first, second in ((rows[0], rows[1].to(device)), (rows[0].to(device), rows[1].numpy())):
        for dtypes in (None, {"x": torch.int64}):
            with pytest.raises(ArgumentError, match=r"'x'\), row 1: expected device \w+(:0)? like"):
                pack_rows({"x": [first, second]}, dtypes=dtypes)


def test_memory_that_lacks_for_cells_is_no_foreign_error(monkeypatch):
    monkeypatch.setattr(kernels, "fill", mock.Mock(side_effect=MemoryError("unable to allocate")))
    for pack in (pack_rows, encode_rows):
        with pytest.raises(ArgumentError, match=r"'x'.*memory, found 3: unable") as caught:
            pack({"x": [[1, 2], [3]]})
        assert caught.value.reason == "too_large"
