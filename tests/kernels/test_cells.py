"""Numbers to cells: the C and the Python half, beside torch and beside each other."""

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import kernels
from jagcodec.kernels import python_cells
from jagcodec.produce.row_kinds import plain_number
from tests.oracle import bits, cell_of
from tests.strategies import whole_numbers

HALVES = [python_cells]
try:
    from jagcodec.kernels import _cells
except ImportError:
    pass
else:
    HALVES.append(_cells)

CODES = {
    **dict(zip("bhiq", (torch.int8, torch.int16, torch.int32, torch.int64), strict=True)),
    **dict(zip("BHIQ", (torch.uint8, torch.uint16, torch.uint32, torch.uint64), strict=True)),
    **{"f": torch.float32, "d": torch.float64, "?": torch.bool},
}
PRECISION = {"f": 24, "d": 53}

ints = whole_numbers() | st.integers(0, 200).map(lambda n: 1 << n)
floats = st.floats(width=64) | st.floats(width=32)
items = st.one_of(
    ints,
    floats,
    st.booleans(),
    st.none(),
    st.text(max_size=2),
    ints.filter(lambda n: abs(n) < 2**63).map(np.int64),
    floats.map(np.float64),
    st.floats(width=32).map(np.float32),
    st.booleans().map(np.bool_),
)
rows = st.one_of(
    *(
        st.lists(st.lists(item, max_size=6) | st.lists(item, max_size=6).map(tuple), max_size=5)
        for item in (ints, floats, st.booleans(), ints | floats, items)
    )
)


def fill(half, rows, code, precision=None, convert=plain_number):
    """The place of the first bad item, and the cells as a tensor."""
    precision = PRECISION.get(code, 0) if precision is None else precision
    before = tuple(map(len, rows))
    found, cells, lengths, bad = half.fill(rows, code, precision, convert)
    assert (found, lengths) == (code, before)
    out = torch.empty(sum(lengths), dtype=CODES[code])
    out.numpy().view(np.uint8)[:] = cells
    return bad, out


@pytest.mark.parametrize("half", HALVES)
@given(rows, st.sampled_from(sorted(CODES)))
def test_cells_hold_the_numbers_or_the_first_bad_one_is_said(half, rows, code):
    found, out = fill(half, rows, code)
    wanted = [
        [cell_of(x.item() if isinstance(x, np.generic) else x, CODES[code]) for x in row]
        for row in rows
    ]
    bad = [(i, j) for i, row in enumerate(wanted) for j, cell in enumerate(row) if cell is None]
    assert found == (bad[0] if bad else None)
    if not bad:
        assert bits(out) == [bits(cell) for row in wanted for cell in row if cell is not None]


@pytest.mark.parametrize("half", HALVES)
@given(rows, st.sampled_from(sorted(CODES)))
def test_without_convert_only_the_own_types_of_python_are_numbers(half, rows, code):
    """Not even their subclasses, such as float64, which has a dtype of its own."""
    found, out = fill(half, rows, code, convert=None)
    plain = [[x if type(x) in (bool, int, float) else None for x in row] for row in rows]
    assert found == fill(half, plain, code)[0]
    if found is None:
        assert bits(out) == bits(fill(half, plain, code)[1])


@pytest.mark.parametrize("half", HALVES)
@given(rows)
def test_the_first_number_chooses_among_three_codes(half, rows):
    """And a float among ints chooses again."""
    made = half.fill(rows, "?qf", 24, None)
    items = [item for row in rows for item in row]
    if not items or type(items[0]) not in (bool, int, float):
        assert made is None
        return
    code = {bool: "?", int: "q", float: "f"}[type(items[0])]
    bad, cells = fill(half, rows, code, convert=None)
    if code == "q" and bad is not None and type(rows[bad[0]][bad[1]]) is float:
        bad, cells = fill(half, rows, "f", convert=None)
        code = "f"
    assert (made[0], made[2], made[3]) == (code, tuple(map(len, rows)), bad)
    if bad is None:
        assert bytes(made[1]) == cells.numpy().tobytes()


@pytest.mark.parametrize("half", HALVES)
def test_ints_have_no_more_bits_than_the_precision(half):
    assert fill(half, [[2048, 4094]], "f", 11)[0] is None
    assert fill(half, [[2048, 2049]], "f", 11)[0] == (0, 1)
    assert fill(half, [[256, 258, 257]], "f", 8)[0] == (0, 2)
    assert fill(half, [[1 << 2000]], "d", 53)[0] == (0, 0)


@pytest.mark.parametrize("half", HALVES)
def test_items_that_raise_and_lists_that_change_while_they_are_read(half):
    class Raises:
        def __index__(self):
            raise error

    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            fill(half, [[1, Raises()]], "q")

    class Shrinks:
        def __index__(self):
            row.clear()
            return 7

    row = [1, Shrinks(), 2]
    if half is python_cells:  # which reads a copy
        assert fill(half, [row], "q")[1].tolist() == [1, 7, 2]
    else:
        with pytest.raises((IndexError, ValueError)):
            fill(half, [row], "q")
    with pytest.raises(TypeError, match="not callable"):
        half.fill([["a"]], "q", 0, 1)


@pytest.mark.parametrize("half", HALVES)
def test_what_is_not_rows_of_lists_or_not_a_code_is_refused(half):
    with pytest.raises(TypeError, match="row 1"):
        half.fill([[1], 5], "q", 0, plain_number)
    for code in ("", "qq", "x"):
        with pytest.raises(ValueError, match="code"):
            half.fill([[1]], code, 0, plain_number)


def test_a_row_that_changes_its_length_is_refused():
    if python_cells is HALVES[-1]:
        pytest.skip("no compiler")

    class Grows:
        def __index__(self):
            last.append(1)
            return 7

    last = [1]
    with pytest.raises(ValueError, match="row 1: its length changed"):
        _cells.fill([[Grows()], last], "q", 0, plain_number)


EDGES = [sign * (1 << bits) + more for bits in (7, 15, 31) for sign in (1, -1) for more in (-1, 0)]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1)
    | st.lists(st.sampled_from(EDGES), min_size=1, max_size=3)
    | st.lists(st.floats(), min_size=1)
    | st.lists(st.booleans(), min_size=1)
)
def test_lists_of_one_type_come_back(numbers):
    narrow = [half.narrow_list(numbers) for half in HALVES]
    assert narrow == [narrow[0]] * len(HALVES)
    back: Any = kernels.list_of_narrow(*narrow[0])
    assert list(map(type, back)) == list(map(type, numbers))
    as_floats = struct.pack(f"{len(back)}d", *map(float, back))
    assert as_floats == struct.pack(f"{len(back)}d", *map(float, numbers))
    if type(numbers[0]) is int:
        assert back == numbers
        names = ("int8", "int16", "int32", "int64")
        assert narrow[0][0] == next(
            name
            for name in names
            if all(cell_of(n, getattr(torch, name)) is not None for n in numbers)
        )


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "numbers", [[], [1, 2.0], [True, 1], [2**63], [-(2**63) - 1], [np.float64(1)], ["a"], [1, None]]
)
def test_other_lists_are_not_narrowed(half, numbers):
    assert half.narrow_list(numbers) is None


# --- what msgpack knows ------------------------------------------------------------------------


class Text(str):
    """A string that msgpack gives back as another type."""


native = st.none() | ints | floats | st.booleans() | st.text(max_size=2) | st.binary(max_size=5)
foreign = st.sampled_from([object(), Text("x"), (1,), 1j, {1}, np.float64(1)])
values = st.recursive(
    st.one_of(*[native] * 9, foreign),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", 1, Text("b"), None]), inner, max_size=2)
    ),
    max_leaves=12,
)


def is_known(value, levels, short_bytes, short_list):
    of_items = levels - 1, short_bytes, short_list
    if type(value) is bytes:
        return levels > 0 and len(value) < short_bytes
    if type(value) is list:
        numbers = value and type(value[0]) in (int, float, bool) and len(value) >= short_list
        return levels > 0 and not numbers and all(is_known(item, *of_items) for item in value)
    if type(value) is dict:
        names = all(type(key) is str for key in value)
        return levels > 0 and names and all(is_known(item, *of_items) for item in value.values())
    return value is None or type(value) in (str, int, float, bool)


def count_items(value):
    inner = value.values() if type(value) is dict else value if type(value) is list else ()
    return len(inner) + sum(map(count_items, inner))


@pytest.mark.parametrize("half", HALVES)
@given(st.lists(values, max_size=4), st.integers(0, 4), st.integers(1, 5), st.integers(1, 5))
def test_values_that_msgpack_knows_are_found(half, rows, levels, short_bytes, short_list):
    bounds = levels, short_bytes, short_list
    known = all(is_known(row, *bounds) for row in rows)
    most = sum(map(count_items, rows))
    assert half.is_native(rows, *bounds, most) == half.is_native((*rows,), *bounds, most) == known
    if known and most:
        assert not half.is_native(rows, *bounds, most - 1)


@pytest.mark.parametrize("half", HALVES)
def test_values_of_all_types_at_once_are_known(half):
    plain = ["", 1, 0.5, True, None]
    assert half.is_native(plain, 0, 1, 1, 0)
    assert half.is_native([*plain, b"", [], {}], 1, 1, 1, 0)
    assert not half.is_native([*plain, b""], 0, 1, 1, 0)


@pytest.mark.parametrize("half", HALVES)
def test_values_that_contain_themselves_are_not_known(half):
    loop: list[Any] = []
    loop += [loop, loop]
    names: dict[str, Any] = {}
    names["a"] = names
    for row in (loop, names, [names, loop]):
        assert not half.is_native([row], 100, 10, 10, 1 << 12)
    with pytest.raises(TypeError):
        half.is_native(5, 100, 10, 10, 10)
