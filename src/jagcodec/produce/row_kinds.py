"""What a row may be: its kind, and the errors for a wrong kind.

`kind_of_row` decides the kind. First come the kinds, then what decides a kind, then lists of
arrays, which are objects unless the caller names a dtype, then the errors.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from jagcodec._arguments import ARRAY_TYPES, array_remedy
from jagcodec._dependencies import module_with_torch
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief
from jagcodec.memory.arrays import tensor_type, torch_name
from jagcodec.produce.cell_dtypes import DEFAULT_DTYPES, NUMBER_DTYPES, TORCH_ARRAY_DTYPES
from jagcodec.wire.spec import MAX_NDIM

RowKind: TypeAlias = Literal["number", "sequence", "array", "object", "blank"]
"""What one row is. An enum would be slower: sets of kinds hash each kind."""

NUMBER_ROW: Final = "number"
SEQUENCE_ROW: Final = "sequence"  # a list of numbers, or of lists of them
ARRAY_ROW: Final = "array"  # an array or a tensor
OBJECT_ROW: Final = "object"
# A row that is empty or holds only None. It does not decide the kind of its column; its None is
# still refused among numbers.
BLANK_ROW: Final = "blank"

KIND_OF_TYPE: dict[type, RowKind] = {
    **dict.fromkeys(DEFAULT_DTYPES, NUMBER_ROW),
    **dict.fromkeys((str, bytes, dict, type(None)), OBJECT_ROW),
}
"""The kinds of rows that their type alone decides."""

OBJECT_TYPES = frozenset(type_ for type_, kind in KIND_OF_TYPE.items() if kind == OBJECT_ROW)
"""The types of rows that can only be objects."""


def dtypes_remedy(dtype: str, what: str = "other cells") -> str:
    """The remedy to pass a dtype."""
    return f"; for {what} pass dtypes={{...: torch.{dtype}}}{OR_OBJECTS}"


OR_OBJECTS = "; for a column of Python objects pass dtypes={...: object}"
"""The remedy that fits every column."""


def kind_of_row(row: Any) -> RowKind:
    """The kind of one row. The first item of a list decides."""
    kind = KIND_OF_TYPE.get(type(row))
    if kind is not None:
        return kind
    if isinstance(row, (list, tuple, range, array)):
        first = row
        for _ in range(MAX_NDIM):  # a list may contain itself
            first = first_item(first)
            if first is None:
                return BLANK_ROW
            if not isinstance(first, (list, tuple)):
                return _kind_of_list(row, first)
        return OBJECT_ROW
    if isinstance(row, (np.ndarray, np.generic)):
        is_plain = type(row) in ARRAY_TYPES or isinstance(row, np.generic)
        has_cells = is_plain and row.dtype.newbyteorder("=") in TORCH_ARRAY_DTYPES
    elif isinstance(row, tensor_type()):
        has_cells = cells_tensors().has_dense_cells(row)
    else:
        return NUMBER_ROW if isinstance(row, (int, float)) else OBJECT_ROW
    return ARRAY_ROW if has_cells else OBJECT_ROW


def are_objects(rows: Collection[Any]) -> bool:
    """Whether rows can only be Python objects. Without rows, they can."""
    if OBJECT_TYPES.issuperset(map(type, rows)):  # no need to read them
        return True
    kinds = set(map(kind_of_row, rows))
    return OBJECT_ROW in kinds and kinds <= {OBJECT_ROW, BLANK_ROW}


def _kind_of_list(row: Iterable[Any], first: Any) -> RowKind:
    """The kind of a list whose first item, or that of its first lists, is not a list."""
    if plain_number(first) is not None:
        return SEQUENCE_ROW
    # Arrays among numbers are a mistake in any order, not objects.
    return SEQUENCE_ROW if is_array(first) and _has_number_or_list([*iter(row)]) else OBJECT_ROW


def _has_number_or_list(items: Sequence[Any]) -> bool:
    """Whether an item is a number or a list; an array with dims is neither."""
    array_types = (np.ndarray, tensor_type())
    types = {each for each in set(map(type, items)) if not issubclass(each, array_types)}
    samples = _first_of_each_type(items, types)
    samples += [item for item in items if isinstance(item, array_types) and not item.ndim]
    return any(isinstance(x, (list, tuple)) or plain_number(x) is not None for x in samples)


def _first_of_each_type(items: Sequence[Any], types: Iterable[type]) -> list[Any]:
    """The first item of each of these types, all of which the items have."""
    return [next(item for item in items if type(item) is each) for each in types]


@cache
def cells_tensors() -> Any:
    """The module that reads tensors: imported when there is one, because it imports torch."""
    return module_with_torch("produce.cells_tensors", "")


def has_dtype(item: Any) -> bool:
    """Whether an item is an array, a tensor, or a numpy scalar."""
    return isinstance(item, (np.ndarray, np.generic, tensor_type()))


def dtype_name(item: Any) -> str:
    """The name of the dtype that a plain array, a plain tensor, or a numpy scalar has."""
    if isinstance(item, (np.ndarray, np.generic)):
        return item.dtype.name
    return torch_name(item.dtype)


def is_array(item: Any) -> bool:
    """Whether an item of a list holds numbers and is not one: an array, a tensor or a `range`."""
    if isinstance(item, (range, array)):
        return True
    return has_dtype(item) and kind_of_row(item) == ARRAY_ROW and plain_number(item) is None


MOST_LEVELS = 3
"""How many levels of lists are searched for arrays; a list may contain itself."""


def items_of_list(row: Any) -> Sequence[Any] | None:
    """The items of a list, a tuple, or an array of objects; None of anything else."""
    if isinstance(row, (list, tuple)):
        return row if type(row) in (list, tuple) else list(iter(row))
    is_objects = type(row) is np.ndarray and row.dtype == object and row.ndim > 0
    return row.tolist() if is_objects else None


def are_lists_of_equal_arrays(rows: Sequence[Any]) -> bool:
    """Whether rows are lists of arrays of one form, with two arrays or more in some row.

    The arrays may be in lists of equal lengths.
    """
    forms: set[Any] = set()
    longest = 0
    for row in rows:
        items = items_of_list(row)
        if items is None or (items and type(items[0]) in KIND_OF_TYPE):  # such as messages
            return False
        forms |= _forms(items, MOST_LEVELS)
        longest = max(longest, len(items))
        if None in forms or len(forms) > 1:
            return False
    return longest > 1


def _forms(items: Sequence[Any], levels: int) -> set[Any]:
    """The dtypes and shapes of arrays, with the lengths of lists of them; {None} for others."""
    types = set(map(type, items))
    samples = _first_of_each_type(items, types)
    if any(items_of_list(sample) is not None for sample in samples):
        return {_form_of_list(item, levels) for item in items}
    if not all(map(is_array, samples)):
        return {None}
    if types <= {range, array}:
        return {(getattr(item, "typecode", "range"), len(item)) for item in items}
    return {(getattr(item, "dtype", None), getattr(item, "shape", None)) for item in items}


def _form_of_list(item: Any, levels: int) -> Any:
    """The length of a list, and the form of its items; None if they have no common form."""
    items = items_of_list(item)
    forms = _forms(items, levels - 1) if items and levels else {None}
    return None if len(forms) > 1 or None in forms else (len(items or ()), *forms)


def plain_number(item: Any) -> Any:
    """The Python number that an item is, or holds; None if it is not a number."""
    if type(item) in DEFAULT_DTYPES:
        return item
    try:
        if has_dtype(item):
            if item.ndim or kind_of_row(item) == OBJECT_ROW:
                return None
            if isinstance(item, tensor_type()) and dtype_name(item) not in NUMBER_DTYPES:
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
    numbers = [i for i, kind in enumerate(kinds) if kind not in (OBJECT_ROW, BLANK_ROW)]
    first_object = kinds.index(OBJECT_ROW)
    first_number = numbers[0] if numbers else first_object
    place = f", row {first_object}"
    if rows[first_object] is None:
        if has_length(rows[first_number]):
            return without_a_row(place)
        types = {type(plain_number(rows[i])) for i in numbers} - {type(None)}
        return none_among_numbers(types if dtype is None else {dtype}, place)
    if dtype is not None or first_number < first_object:
        return wrong_kind("numbers", rows[first_object], place)
    expected = f"an object, as {type(rows[first_object]).__name__} in row {first_object}"
    return wrong_kind(expected, rows[first_number], f", row {first_number}")


def has_length(row: Any) -> bool:
    """Whether a row is a sequence, so that `[]` is an empty row of its column."""
    if has_dtype(row):
        return kind_of_row(row) == ARRAY_ROW and row.ndim > 0
    return isinstance(row, (list, tuple, range, array))


def without_a_row(place: str) -> ArgumentTypeError:
    """The error for None in place of a row that is a sequence."""
    detail = f"expected a row of numbers, found None; for a row without any, pass []{OR_OBJECTS}"
    return ArgumentTypeError("bad_type", place, detail)


def wrong_kind(expected: str, item: Any, place: str) -> ArgumentTypeError:
    """The error for an item of another kind."""
    detail = f"expected {expected}, found {described(item)}{OR_OBJECTS}"
    return ArgumentTypeError("bad_type", place, detail)


def none_among_numbers(types: Iterable[Any], place: str) -> ArgumentTypeError:
    """The error for None among numbers of these types, with a value to put in its place.

    A type is Python's, or the name of a dtype. With the value, the column keeps its dtype.
    """
    dtypes = {DEFAULT_DTYPES.get(number, number) for number in types}
    wanted, example = "a number", "0"
    if dtypes == {"bool"}:
        wanted, example = "a bool", "False"
    elif any("float" in dtype or "complex" in dtype for dtype in dtypes):
        example = "float('nan')"
    detail = f"expected {wanted}, found None; put {wanted} in its place, such as {example}"
    return ArgumentTypeError("bad_type", place, detail + OR_OBJECTS)


def list_among_numbers(item: Any, place: str) -> ArgumentError:
    """The error for a list where a number was expected."""
    detail = f"expected a number like the others, found {brief(item)}{OR_OBJECTS}"
    return ArgumentError("bad_shape", place, detail)


def described(item: Any) -> str:
    """A short description of a row or an item."""
    if isinstance(item, np.ndarray):
        remedy = array_remedy(item)
        return f"a {type(item).__name__}; {remedy}" if remedy else f"an array of dtype {item.dtype}"
    if isinstance(item, tensor_type()):
        return str(cells_tensors().described_tensor(item))
    return brief(item)
