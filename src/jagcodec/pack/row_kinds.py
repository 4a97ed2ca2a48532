"""The kinds of rows (numbers, lists, arrays, objects), and the errors for a wrong kind."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from jagcodec._arguments import ARRAY_TYPES
from jagcodec.errors import ArgumentTypeError, brief, describe
from jagcodec.memory.plain_types import TENSOR_TYPES, remedy_for, with_remedy
from jagcodec.pack.cell_dtypes import DEFAULT_DTYPES, NUMBER_DTYPES, TORCH_ARRAY_DTYPES
from jagcodec.ragged.nested import is_jagged
from jagcodec.wire.dtypes import TORCH_NAMES
from jagcodec.wire.spec import MAX_NDIM

# A blank row is empty or holds only None. It fits any other kind.
NUMBER_ROW, SEQUENCE_ROW, ARRAY_ROW, OBJECT_ROW = "number", "sequence", "array", "object"
BLANK_ROW = "blank"
KIND_OF_TYPE: dict[type, str] = {
    **dict.fromkeys(DEFAULT_DTYPES, NUMBER_ROW),
    **dict.fromkeys((str, bytes, dict, type(None)), OBJECT_ROW),
}
"""The kinds of rows that their type alone decides."""

OR_OBJECTS = "; for a column of Python objects pass dtypes={...: object}"
"""The remedy that every column has."""


def kind_of_row(row: Any) -> str:
    """The kind of one row, whose first item decides if it is a list."""
    known = KIND_OF_TYPE.get(type(row))
    if known is not None:
        return known
    if isinstance(row, (list, tuple, range, array)):
        first = row
        for _ in range(MAX_NDIM):  # a list may contain itself
            first = first_item(first)
            if first is None:
                return BLANK_ROW
            if not isinstance(first, (list, tuple)):
                return OBJECT_ROW if plain_number(first) is None else SEQUENCE_ROW
        return OBJECT_ROW
    if isinstance(row, (np.ndarray, np.generic)):
        plain = type(row) in ARRAY_TYPES or isinstance(row, np.generic)
        plain = plain and row.dtype.newbyteorder("=") in TORCH_ARRAY_DTYPES
    elif isinstance(row, torch.Tensor):
        plain = type(row) in TENSOR_TYPES and row.layout is torch.strided and not row.is_nested
        plain = plain and row.dtype in TORCH_NAMES and not remedy_for(row)
    else:
        return NUMBER_ROW if isinstance(row, (int, float)) else OBJECT_ROW
    return ARRAY_ROW if plain else OBJECT_ROW


def plain_number(item: Any) -> Any:
    """The Python number that an item is, or holds; None if it is not a number."""
    if type(item) in DEFAULT_DTYPES:
        return item
    try:
        if isinstance(item, (np.generic, np.ndarray, torch.Tensor)):
            if item.ndim or kind_of_row(item) is OBJECT_ROW:
                return None
            if isinstance(item, torch.Tensor) and item.dtype not in NUMBER_DTYPES:
                return None
            number = item.item()
            return number if type(number) in DEFAULT_DTYPES else None
        return float(item) if isinstance(item, float) else operator.index(item)
    except TypeError:
        return None


def first_item(row: Iterable[Any]) -> Any:
    """The first item that is not None: engines put None in place of the first number."""
    return next((item for item in row if item is not None), None)


# --- errors ------------------------------------------------------------------------------------


def mixed_kinds(rows: Sequence[Any], dtype: Any) -> ArgumentTypeError:
    """The error for a row that is an object among numbers, or numbers among objects."""
    kinds = [kind_of_row(row) for row in rows]
    first = kinds.index(OBJECT_ROW)
    number = next((i for i, kind in enumerate(kinds) if kind not in (OBJECT_ROW, BLANK_ROW)), first)
    if dtype is not None or number < first or rows[first] is None:
        return wrong_kind("numbers", rows[first], f", row {first}")
    expected = f"an object, as {type(rows[first]).__name__} in row {first}"
    return wrong_kind(expected, rows[number], f", row {number}")


def wrong_kind(expected: str, item: Any, place: str) -> ArgumentTypeError:
    detail = f"expected {expected}, found {described(item)}"
    if item is None:
        other = "a bool" if expected == "bools" else "a number"
        example = "False" if expected == "bools" else "float('nan')"
        detail = f"expected {other}, found None; put {other} in its place, such as {example}"
    return ArgumentTypeError("bad_type", place, detail + OR_OBJECTS)


def described(item: Any) -> str:
    """A short description of a row or an item."""
    if isinstance(item, (np.ndarray, torch.Tensor)) and not is_jagged(item):
        found = with_remedy(item)
        if found:
            return found
    if isinstance(item, np.ndarray):
        return f"an array of dtype {item.dtype}"
    return describe(item) if isinstance(item, torch.Tensor) else brief(item)
