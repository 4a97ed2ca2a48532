"""`_cells.c` in Python: slower, with the same results."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np


def fill(
    rows: Sequence[Sequence[Any]],
    codes: str,
    precision: int,
    convert: Callable[[Any], Any] | None,
) -> tuple[str, bytearray, tuple[int, ...], tuple[int, int] | None] | None:
    """The numbers of rows, lists or tuples, end to end as cells of a code of `array`, or ``?``.

    `codes` is one code; or three, for bools, ints and floats. Then the type of the first number
    chooses one, and a float among ints chooses the third. Then the result is None if there is no
    number, or if the first item is not exactly a bool, an int or a float.

    Returns the code, the cells, the lengths of the rows, and None, or the row and the index of the
    first item that is not a number or does not fit; the numbers before it are written.
    Only bools go to cells of bools, and ints must be exact (in a float with `precision` bits).
    Floats are rounded to the nearest; a finite one must stay finite. `convert` makes a number of
    an item of another type, or None; without `convert`, only Python's own int, float and bool are
    numbers, and a subclass is not. ValueError: a row changes its length while it is read.
    """
    own_rows = tuple(rows)
    for i, row in enumerate(own_rows):
        if not isinstance(row, (list, tuple)):
            raise TypeError(f"row {i}: expected a list or a tuple")
    items = [tuple(row) for row in own_rows]
    lengths = tuple(map(len, items))
    code = codes
    if len(codes) == len(_OWN):
        first = next(chain.from_iterable(items), None)
        if type(first) not in _OWN:
            return None
        code = codes[_OWN.index(type(first))]
    if len(code) != 1 or code not in "bhiqBHIQfd?":
        raise ValueError("expected a code of cells, or three")
    cells, bad = _cells_of_rows(items, code, precision, convert)
    if bad is not None and code == codes[1:2] and type(items[bad[0]][bad[1]]) is float:
        code = codes[2]
        cells, bad = _cells_of_rows(items, code, precision, convert)
    return code, cells, lengths, bad


_OWN = (bool, int, float)


def _cells_of_rows(
    rows: Sequence[tuple[Any, ...]],
    code: str,
    precision: int,
    convert: Callable[[Any], Any] | None,
) -> tuple[bytearray, tuple[int, int] | None]:
    """The cells of all rows, and the place of the first item that cannot be one."""
    data = bytearray()
    for i, items in enumerate(rows):
        cells = _at_once(items, code)
        if cells is None:
            cells = _one_by_one(items, code, precision, convert)
        data += memoryview(cells).cast("B")
        if len(cells) < len(items):
            size = sum(map(len, rows)) * cells.itemsize
            return data + bytes(size - len(data)), (i, len(cells))
    return data, None


_TYPES = {"f": float, "d": float, "?": bool}


def _at_once(items: tuple[Any, ...], code: str) -> array[Any] | None:
    """The cells of items that are all of the most common type; None if they are not."""
    if set(map(type, items)) - {_TYPES.get(code, int)}:
        return None
    try:
        cells = array(code.replace("?", "b"), items)
    except OverflowError:
        return None
    # A cell may be infinite although its number is finite.
    return None if code == "f" and np.isinf(np.frombuffer(cells, np.float32)).any() else cells


def _one_by_one(
    items: tuple[Any, ...], code: str, precision: int, convert: Callable[[Any], Any] | None
) -> array[Any]:
    """The cells of the items before the first that cannot be one."""
    cells: array[Any] = array(code.replace("?", "b"))
    for item in items:
        number = item
        if convert is None:
            number = item if type(item) in _NUMBERS else None
        elif not isinstance(item, (int, float)):
            number = convert(item)
        cell = _cell(number, code, precision)
        if cell is None:
            break
        cells.append(cell)
    return cells


def _cell(item: Any, code: str, precision: int) -> float | int | None:
    """The cell of one item, or None if it cannot be one."""
    if isinstance(item, bool):
        return item if code == "?" else None
    if isinstance(item, float):
        return _float(float.__float__(item), code) if code in "fd" else None
    if not isinstance(item, int) or code == "?":
        return None
    number = int.__int__(item)
    try:
        return _exactly(number, code, precision) if code in "fd" else array(code, (number,))[0]
    except OverflowError:
        return None


def _float(number: float, code: str) -> float | None:
    rounded = array(code, (number,))[0]
    return None if math.isinf(rounded) and not math.isinf(number) else number


def _exactly(number: int, code: str, precision: int) -> float | None:
    cell = float(number)
    scaled = math.ldexp(math.frexp(cell)[0], precision)
    return _float(cell, code) if int(cell) == number and scaled == math.floor(scaled) else None


def narrow_list(numbers: list[Any]) -> tuple[str, bytes] | None:
    """The numbers of a list as little-endian bytes, and the name of their dtype in `PACKED`.

    None unless all items are of one type: exactly int (of 64 bits at most), float or bool.
    """
    items = tuple(numbers)
    kinds = set(map(type, items))
    if kinds == {float}:
        return "float64", array("d", items).tobytes()
    if kinds == {bool}:
        return "bool", array("b", items).tobytes()
    if kinds != {int}:
        return None
    low, high = min(items), max(items)
    for name, code, bits in _WIDTHS:
        if -(1 << bits - 1) <= low and high < 1 << bits - 1:
            return name, array(code, items).tobytes()
    return None


_WIDTHS = (("int8", "b", 8), ("int16", "h", 16), ("int32", "i", 32), ("int64", "q", 64))


_NATIVE = frozenset((str, int, float, bool, type(None)))
_NUMBERS = frozenset((int, float, bool))
_STRING = frozenset((str,))
_KNOWN = _NATIVE | {bytes, list, dict}


def is_native(
    rows: Sequence[Any], levels: int, short_bytes: int, short_list: int, most_items: int
) -> bool:
    """Whether msgpack writes each of these values by itself, and reads it back as it was.

    They are strings, numbers, None, bytes, and lists and dicts of such, at most `levels` in each
    other, where bytes count as one; keys are strings. Bytes are shorter than `short_bytes`, and
    lists that begin with a number than `short_list`. There are at most `most_items` items.
    """
    # Look at all values of one level together: a function call for each would take longer.
    level: Sequence[Any] = rows
    while True:
        kinds = set(map(type, level))
        if kinds <= _NATIVE:
            return True
        if not levels or not kinds <= _KNOWN:
            return False
        levels -= 1
        if bytes in kinds and any(type(x) is bytes and len(x) >= short_bytes for x in level):
            return False
        lists = [item for item in level if type(item) is list]
        dicts = [item for item in level if type(item) is dict]
        if not _STRING.issuperset(map(type, chain.from_iterable(dicts))):
            return False
        if any(len(each) >= short_list and type(each[0]) in _NUMBERS for each in lists):
            return False
        most_items -= sum(map(len, lists)) + sum(map(len, dicts))
        if most_items < 0:
            return False
        level = list(chain(*lists, *map(dict.values, dicts)))
