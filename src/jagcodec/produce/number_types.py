"""Which dtype a column of numbers has: the set of their types decides, in any order.

Python's numbers are weak and all others strong, as in NumPy's NEP 50: a numpy scalar, an array and
a tensor, of any number of dims, has a dtype of its own; a Python number takes that of the others.

| the numbers of a column | its dtype |
|---|---|
| Python's bools | bool |
| Python's ints | int64; one above its range is refused, but `dtypes=` may say uint64 |
| Python's floats, with or without ints | float32 |
| arrays, tensors and numpy scalars of one dtype, with or without Python's numbers | that dtype |
| a dtype of integers and Python's floats | refused |
| two dtypes | refused |
| bools and other numbers | refused |

Then each number must fit: ints are exact, finite floats stay finite, and Python's floats are
rounded to float32 but not to fewer bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError, brief
from jagcodec.memory.arrays import tensor_type
from jagcodec.memory.small_floats import LEAST_INFINITE, numbers_of, rounded
from jagcodec.produce.cell_dtypes import DEFAULT_DTYPES, NUMBER_DTYPES
from jagcodec.produce.row_kinds import (
    OBJECT_ROW,
    OR_OBJECTS,
    described,
    dtype_name,
    dtypes_remedy,
    has_dtype,
    kind_of_row,
    list_among_numbers,
    none_among_numbers,
    plain_number,
    wrong_kind,
)
from jagcodec.wire.spec import MAX_NDIM

# The type of a number is Python's bool, int or float, or the name of a dtype. `list` stands for a
# list among numbers, and `object` for anything else.
_BOOLS = {bool, "bool"}
PYTHON_TYPES: Set[Any] = frozenset(DEFAULT_DTYPES)
NARROW = LEAST_INFINITE.keys()  # fewer bits than the float32 of Python's floats


class LocatedItem(NamedTuple):
    """An item of a column, for an error."""

    place: str
    kind: Any  # its type, as above
    item: Any


Located = Iterable[LocatedItem]


def dtype_of_rows(rows: Sequence[Any]) -> str | None:
    """The dtype of rows of numbers, or an error; None without numbers."""
    types = types_of_rows(rows)
    return dtype_of_types(types, lambda: located_numbers(rows)) if types else None


def dtype_of_types(types: Set[Any], located: Callable[[], Located]) -> str:
    """The dtype of a column whose numbers have these types, or an error.

    `located` says where they are: read only for an error, and to find floats that would be rounded.
    """
    numbers = types - {object, list}
    dtypes = {kind for kind in numbers if isinstance(kind, str)}
    if types != numbers:
        raise _not_a_number(types, located())
    if len(dtypes) > 1:
        raise _conflict(dtypes, dtypes, located())
    if numbers & _BOOLS and numbers - _BOOLS:
        raise _conflict(numbers & _BOOLS, numbers - _BOOLS, located())
    if not dtypes:
        return DEFAULT_DTYPES[float if float in numbers else next(iter(numbers))]
    (dtype,) = dtypes
    if float in numbers and not ("float" in dtype or "complex" in dtype):
        raise _conflict(dtypes, {float}, located())
    if float in numbers and dtype in NARROW:
        floats = [(place, float(item)) for place, found, item in located() if found is float]
        values = np.array([number for _, number in floats], dtype=np.float64)
        check_floats(values, dtype, lambda i: floats[i][0])
    return dtype


def check_floats(floats: npt.NDArray[np.float64], dtype: str, place: Callable[[int], str]) -> None:
    """Refuse (n,) Python floats if one of them changes in the narrow dtype of other numbers."""
    with np.errstate(all="ignore"):
        cells = numbers_of(rounded(floats.astype(np.float32), dtype), dtype)
    changed = np.flatnonzero((cells != floats) & ~np.isnan(floats))
    if len(changed):
        raise _inexact_float(floats[changed[0]].item(), dtype, place(int(changed[0])))


# --- the types of numbers ----------------------------------------------------------------------


def types_of_rows(rows: Iterable[Any]) -> set[Any]:
    """The types of the numbers of rows: lists, arrays, and single numbers.

    A list among numbers is skipped: the functions that read the cells refuse it.
    """
    found: set[Any] = set()
    for row in rows:
        if not _is_list(row):
            found.add(type_of_number(row))
            continue
        kinds: set[Any] = set(map(type, row))
        found |= kinds if kinds <= PYTHON_TYPES else types_of_items(_leaves(row))
    return found - {list}


def types_of_items(items: Collection[Any]) -> set[Any]:
    """The types of the items of lists, where an array with dims is not a number."""
    found: set[Any] = set(map(type, items))
    if found <= PYTHON_TYPES:
        return found
    kinds, found = found, set()
    for kind in kinds:
        if issubclass(kind, (np.ndarray, tensor_type())):
            found |= {type_of_item(item) for item in items if type(item) is kind}
        else:
            found.add(type_of_number(next(item for item in items if type(item) is kind)))
    return found


def type_of_item(item: Any) -> Any:
    """`type_of_number` of an item of a list, where an array with dims is not a number."""
    is_deep = isinstance(item, (np.ndarray, tensor_type())) and item.ndim
    return object if is_deep else type_of_number(item)


def type_of_number(item: Any) -> Any:
    """The type of a number, or of the numbers of an array or a tensor."""
    if type(item) in DEFAULT_DTYPES:
        return type(item)
    if isinstance(item, (list, tuple)):
        return list
    if has_dtype(item):
        return object if kind_of_row(item) == OBJECT_ROW else dtype_name(item)
    number = plain_number(item)
    return object if number is None else type(number)


def located_numbers(rows: Sequence[Any]) -> Iterator[LocatedItem]:
    """The numbers of rows, with their places, for an error."""
    for i, row in enumerate(rows):
        if not _is_list(row):
            yield LocatedItem(f", row {i}", type_of_number(row), row)
            continue
        items = [(j, item) for j, cell in enumerate(row) for item in _leaves(cell)]
        for j, item in items:
            yield LocatedItem(f", row {i}, cell {j}", type_of_item(item), item)


def _is_list(row: Any) -> bool:
    return isinstance(row, (list, tuple, range, array))


def _leaves(row: Any) -> list[Any]:
    """The items of lists in each other, as deep as all of them are lists."""
    # Iterate: a subclass of list may report another length.
    level = list(iter(row)) if _is_list(row) else [row]
    for _ in range(MAX_NDIM):
        if not level or not all(isinstance(item, (list, tuple)) for item in level):
            break
        level = list(chain.from_iterable(level))
    return level


# --- errors ------------------------------------------------------------------------------------


def _inexact_float(number: float, dtype: str, place: str) -> ArgumentError:
    """The error for a Python float among numbers of a narrow dtype."""
    detail = (
        f"expected a float that {dtype} holds exactly, as other numbers are {dtype}, "
        f"found {brief(number)}; to round it pass dtypes={{...: torch.{dtype}}}{OR_OBJECTS}"
    )
    return ArgumentError("bad_dtype", place, detail)


def _not_a_number(types: Set[Any], located: Located) -> JagcodecError:
    """The error for an item that is not a number, or for a list among numbers."""
    fault = object if object in types else list
    before = None
    for place, found, item in located:
        if item is None:
            return none_among_numbers(types - {object, list}, place)
        if found is object and fault is object:
            return wrong_kind("bools" if before in _BOOLS else "numbers", item, place)
        if found is fault:
            return list_among_numbers(item, place)
        before = before or found
    # Another thread has changed the rows.
    return none_among_numbers(types - {object, list}, "")


def _conflict(these: Set[Any], those: Set[Any], located: Located) -> JagcodecError:
    """The error for the first number whose type does not go with one before it."""
    numbers = [number for number in located if number.kind in these | those]
    first, before, _ = numbers[0]
    others = (those if before in these else these) - {before}
    place, found, item = next(number for number in numbers if number.kind in others)
    if isinstance(before, str) and isinstance(found, str):
        return two_dtypes(before, found, first, place)
    if before in _BOOLS or found in _BOOLS:
        return wrong_kind("bools" if before in _BOOLS else "numbers", item, place)
    remedy = dtypes_remedy("float64", "floats")
    expected = "floats" if before is float else f"integers (others are {before})"
    detail = f"expected {expected}, found {described(item)}{remedy}"
    return ArgumentTypeError("bad_type", place, detail)


def two_dtypes(first: str, second: str, before: str, place: str) -> JagcodecError:
    """The error for a number of a second dtype at a place, after numbers of the first."""
    like = before.removeprefix(", ") if before and "cell" not in before else "those before"
    remedy = _two_dtypes_remedy(first, second)
    detail = f"expected torch.{first} like {like}, found torch.{second}{remedy}"
    return ArgumentTypeError("bad_dtype", place, detail)


def _two_dtypes_remedy(*both: str) -> str:
    """The remedy for a column with numbers of two dtypes."""
    if "bool" in both or not NUMBER_DTYPES.issuperset(both):
        return f"; convert the rows{OR_OBJECTS}"
    if any("float" in dtype for dtype in both):
        return dtypes_remedy("float64")
    signed = [dtype for dtype in both if not dtype.startswith("uint")]
    return dtypes_remedy("int64" if signed or "uint64" not in both else "uint64")
