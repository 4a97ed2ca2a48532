"""The dtypes of the wire: how many bytes a cell takes. Plain Python: no torch, no numpy."""

from __future__ import annotations

import re
from typing import Any

from jagcodec.wire.checks import brief, cells_of, count, expect, fail, list_of
from jagcodec.wire.spec import INTEGER_DTYPES, MAX_DEPTH, TORCH_DTYPES

_NUMPY_DTYPE = re.compile(
    r"(?P<bool>\|b1)|\|[iu]1|[<>][iu](?:2|4|8)|[<>]f(?:2|4|8)|[<>]c(?:8|16)"
    r"|[<>][mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|[SV]\d{1,10}|[<>]U\d{1,10}"
)
# long double has one name in numpy and two formats in the world
_LONG_DOUBLES = {"float80": 16, "complex160": 32, "float128": 16, "complex256": 32}


def numpy_itemsize(dtype: Any, depth: int = 0) -> int:
    """Bytes per element of a numpy dtype as the wire describes it.

    A string is numpy's own (``<f4``, ``|S8``, ``<M8[ns]``) or a long double's name;
    ``["sub", dtype, shape]`` and ``["struct", itemsize, aligned, [[name, title, offset, dtype]]]``
    nest. ``|O`` counts as a pointer: it occurs only in the fields of a FIELD_ARRAY.

    Raises:
        WireFormatError: The description is none of these.
    """
    if type(dtype) is str:
        if dtype in _LONG_DOUBLES:
            return _LONG_DOUBLES[dtype]
        if dtype == "|O":
            return 8
        if _NUMPY_DTYPE.fullmatch(dtype) is None:
            raise fail("unknown_dtype", f"expected a numpy dtype, found {brief(dtype)}")
        digits = re.match(r"\d+", dtype[2:])
        size = int(digits.group()) if digits else 0
        return size * 4 if dtype[1] == "U" else size
    expect(depth <= MAX_DEPTH, "too_deep", "a shallower dtype", "more levels")
    if type(dtype) is list and len(dtype) == 3 and dtype[0] == "sub":
        return cells_of(dtype[2]) * numpy_itemsize(dtype[1], depth + 1)
    if type(dtype) is list and len(dtype) == 4 and dtype[0] == "struct":
        _, itemsize, aligned, fields = dtype
        itemsize = count(itemsize, "an item size")
        expect(type(aligned) is bool, "bad_record", "a bool", aligned)
        for field in list_of(fields, "fields"):
            expect(type(field) is list and len(field) == 4, "bad_record", "a field", field)
            name, title, offset, inner = field
            expect(type(name) is str, "bad_record", "a field name", name)
            expect(title is None or type(title) is str, "bad_record", "a field title", title)
            end = count(offset, "a field offset") + numpy_itemsize(inner, depth + 1)
            expect(end <= itemsize, "out_of_bounds", f"a field within {itemsize} bytes", end)
        return itemsize
    raise fail("unknown_dtype", f"expected a numpy dtype, found {brief(dtype)}")


def torch_size(dtype: Any, cells: int) -> int:
    """Bytes that `cells` cells of a torch dtype take as the wire describes it.

    A string is the dtype's name. ``[name, stored]`` says that the cells of an integer dtype are
    stored narrower: ``bits`` (one bit each, the lowest first), or ``u1`` to ``u7`` and ``i1`` to
    ``i7``, little-endian integers of so many bytes without and with a sign.

    Raises:
        WireFormatError: The description is neither.
    """
    name, stored = dtype if type(dtype) is list and len(dtype) == 2 else (dtype, None)
    itemsize = TORCH_DTYPES.get(name) if type(name) is str else None
    if itemsize is None or name == stored:
        raise fail("unknown_dtype", f"expected a torch dtype of the table, found {brief(dtype)}")
    if type(dtype) is str:
        return cells * itemsize
    if name in INTEGER_DTYPES and type(stored) is str:
        if stored == "bits":
            return (cells + 7) // 8
        signs = "u" if name.startswith(("u", "b")) else "ui"
        if re.fullmatch(f"[{signs}][1-7]", stored) and int(stored[1]) < itemsize:
            return cells * int(stored[1])
    raise fail("unknown_dtype", f"expected narrower integers, found {brief(dtype)}")


def has_object(dtype: Any) -> bool:
    """Whether a (checked) numpy dtype description holds Python objects."""
    if type(dtype) is str:
        return dtype == "|O"
    if dtype[0] == "sub":
        return has_object(dtype[1])
    return any(has_object(field[3]) for field in dtype[3])
