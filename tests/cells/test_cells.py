"""Numbers to cells: the C and the Python half, beside numpy and beside each other."""

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jagcodec import cells
from jagcodec.cells import python_cells
from jagcodec.pack.cells import plain_number

HALVES = [python_cells]
try:
    from jagcodec.cells import _cells
except ImportError:
    pass
else:
    HALVES.append(_cells)

CODES = {
    **{code: np.dtype(code) for code in "bhiBHIfd"},
    **{"q": np.dtype("int64"), "Q": np.dtype("uint64"), "?": np.dtype("bool")},
}
PRECISION = {"f": 24, "d": 53}
LIST = 64

ints = (
    st.integers(-(2**70), 2**70) | st.integers(-300, 300) | st.integers(0, 70).map(lambda n: 1 << n)
)
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
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    out = np.zeros(int(lengths.sum()), dtype=CODES[code])
    precision = PRECISION.get(code, 0) if precision is None else precision
    return half.fill(rows, lengths, out, code, precision, convert), out


def holds(item, code):
    """Whether a cell holds an item, by arithmetic that has no bounds."""
    item = item.item() if isinstance(item, np.generic) else item
    if type(item) is bool:
        return code == "?"
    if type(item) is float:
        if code == "f" and math.isfinite(item):
            with np.errstate(over="ignore"):
                return bool(np.isfinite(np.float32(item)))
        return code in "fd"
    if type(item) is not int or code == "?":
        return False
    if code in "fd":
        if not item:
            return True
        bits = abs(item) // (abs(item) & -abs(item))
        return bits.bit_length() <= PRECISION[code]
    info = np.iinfo(CODES[code])
    return info.min <= item <= info.max


@pytest.mark.parametrize("half", HALVES)
@given(rows, st.sampled_from(sorted(CODES)))
def test_cells_hold_the_numbers_or_the_first_bad_one_is_said(half, rows, code):
    found, out = fill(half, rows, code)
    bad = [(i, j) for i, row in enumerate(rows) for j, x in enumerate(row) if not holds(x, code)]
    assert found == (bad[0] if bad else None)
    if not bad:
        with np.errstate(over="ignore"):
            expected = np.array([x for row in rows for x in row], dtype=object).astype(CODES[code])
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("half", HALVES)
def test_ints_in_floats_are_exact(half):
    assert fill(half, [[1 << 24, (1 << 24) + 2, 1 << 100]], "f")[0] is None
    assert fill(half, [[0.5, (1 << 24) + 1]], "f")[0] == (0, 1)
    assert fill(half, [[(1 << 53) + 1]], "d")[0] == (0, 0)
    assert fill(half, [[2048, 2049]], "f", 11)[0] == (0, 1)
    assert fill(half, [[1 << 200]], "f")[0] == (0, 0)
    assert fill(half, [[1 << 2000]], "d")[0] == (0, 0)


@pytest.mark.parametrize("half", HALVES)
def test_lists_that_change_while_they_are_read(half):
    class Shrinks:
        def __init__(self, victim):
            self.victim = victim

        def __index__(self):
            self.victim.clear()
            return 7

    row = [1, 2]
    row[1:1] = [Shrinks(row)]  # type: ignore[list-item]
    if half is python_cells:  # which reads a copy
        assert fill(half, [row], "q")[1].tolist() == [1, 7, 2]
    else:
        with pytest.raises((IndexError, ValueError)):
            fill(half, [row], "q")
    with pytest.raises(ValueError, match="length"):
        half.fill([[1, 2]], np.array([1]), np.empty(1, dtype=np.int64), "q", 0, None)


def test_without_a_conversion_other_items_are_not_numbers(monkeypatch):
    for half in HALVES:
        monkeypatch.setattr(cells, "_active", half)
        out = np.zeros(2, dtype=np.int64)
        assert cells.fill([[1], ["x"]], np.array([1, 1]), out, "q") == (1, 0)


def test_no_more_is_written_than_there_is_room_for():
    if python_cells is HALVES[-1]:
        pytest.skip("no compiler")
    out = np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match="length"):
        _cells.fill([[1, 2]], np.array([2]), out, "q", 0, None)
    for code in ("", "qq", "x", "é"):
        with pytest.raises(ValueError, match="code"):
            _cells.fill([[1]], np.array([1]), out, code, 0, None)
    with pytest.raises(TypeError, match="row 0"):
        _cells.fill([5], np.array([1]), out, "q", 0, None)  # type: ignore[list-item]
    frozen = np.zeros(1, dtype=np.int64)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="read-write"):
        _cells.fill([[1]], np.array([1]), frozen, "q", 0, None)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_items_raise_is_raised(half, error):
    class Raises:
        def __index__(self):
            raise error

    with pytest.raises(error):
        fill(half, [[1, Raises()]], "q")


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-129, 128), min_size=1)
    | st.lists(st.floats(), min_size=1)
    | st.lists(st.booleans(), min_size=1)
)
def test_lists_of_one_type_come_back(numbers):
    packed = [half.pack(numbers) for half in HALVES]
    assert packed == [packed[0]] * len(HALVES)
    back: Any = cells.unpack_numbers(*packed[0])
    assert list(map(type, back)) == list(map(type, numbers))
    assert struct.pack(f"{len(back)}d", *map(float, back)) == struct.pack(
        f"{len(back)}d", *map(float, numbers)
    )
    if type(numbers[0]) is int:
        assert back == numbers
        low, high = min(numbers), max(numbers)
        name = next(
            n
            for n in ("int8", "int16", "int32", "int64")
            if np.iinfo(n).min <= low and high <= np.iinfo(n).max
        )
        assert packed[0][0] == name


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [1, 2.0],
        [1, True],
        [True, 1],
        [2**63],
        [-(2**63) - 1],
        [np.float64(1)],
        ["a"],
        [1, None],
    ],
)
def test_other_lists_are_not_packed(half, numbers):
    assert half.pack(numbers) is None


@pytest.mark.parametrize(
    ("dtype", "data"), [("float32", b"1234"), ("int16", b"123"), ("bool", b"\0\2"), ("|O", b"")]
)
def test_bytes_that_no_list_has(dtype, data):
    assert cells.unpack_numbers(dtype, data) is None
