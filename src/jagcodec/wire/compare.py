"""Finds where two values first differ, bit for bit, and which `meta` joins keep.

`first_difference` calls `compare`, which finds the function for the type of two values in the
table `_COMPARE`. For batches and dicts it is `compare_batches`, which returns the first result of
`each_difference`. That function walks batches inside, and calls `compare` for every other value.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import closed, source_in
from jagcodec.columns.held import (
    Array,
    CellsColumn,
    DictBatch,
    HeldColumn,
    ObjectList,
    OneObjectColumn,
    Open,
    ViewColumn,
    column_of,
)
from jagcodec.errors import brief, child_path, describe, shown
from jagcodec.memory.arrays import torch_name
from jagcodec.memory.small_floats import numbers_of
from jagcodec.rows.copy_bytes import array_of_view
from jagcodec.rows.views import RaggedView
from jagcodec.wire.dtypes import bytes_in_order
from jagcodec.wire.registry import name_for_sending, state_of


@dataclass(frozen=True)
class Difference:
    """The first difference of two values; `left` and `right` are shortened texts."""

    column: str = ""  # names joined with dots; a path with $ outside of batches
    row: int | None = None  # None where a whole column differs
    cell: tuple[int, ...] | None = None  # within its row: (token, ...)
    inside: str = ""  # the path in a row that holds an object
    what: str = ""  # "type", "dtype", "shape", "value" ...
    left: str = ""
    right: str = ""

    def __str__(self) -> str:
        name = shown(self.column, 60)
        place = [name if name.startswith("$") else f"column {name}"] if name else []
        place += [] if self.row is None else [f"row {brief(self.row)}"]
        place += [f"cell {list(self.cell)}"] if self.cell else []
        place += [shown(self.inside, 60)] if self.inside else []
        where = ", ".join(place) or "the whole"
        return f"{where}: {self.what} {self.left} and {self.right}"


WHOLE = Difference()

Comparison: TypeAlias = Callable[[Any, Any, Difference], Difference | None]


class BatchColumns(dict[str, Any]):
    """The columns of a batch of this size, read without torch."""

    def __init__(self, columns: Mapping[str, Any], batch_size: Sequence[int]) -> None:
        super().__init__(columns)
        self.batch_size: list[int] = [*batch_size]


def first_difference(left: Any, right: Any) -> Difference | None:
    """Where two values first differ, bit for bit."""
    return compare(left, right, WHOLE)


def same_values(left: Any, right: Any) -> bool:
    """Whether two values are the same, as for `first_difference`."""
    return compare(left, right, WHOLE) is None


def common_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The items that all mappings have, with the same value."""
    first, *others = metas or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(name in other and same_values(other[name], value) for other in others)
    }


def meta_without_conflicts(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The items of all mappings, except names for which two mappings have different values."""
    names = dict.fromkeys(name for meta in metas for name in meta)
    each = (common_meta([{name: meta[name]} for meta in metas if name in meta]) for name in names)
    return {name: value for meta in each for name, value in meta.items()}


# --- values ------------------------------------------------------------------------------------


def compare(a: Any, b: Any, at: Difference) -> Difference | None:
    """The first difference of two values, which are at a place; None if they are the same."""
    if a is b:
        return None
    left, right = column_of(a), column_of(b)
    if isinstance(left, Open) and isinstance(right, Open):
        in_columns = compare(closed(a), closed(b), at)
        return in_columns or compare(source_in(a).meta(), source_in(b).meta(), step(at, "meta"))
    if left.has_tensor and right.has_tensor:
        in_tensors: Difference | None = _comparisons_of_tensors().compare_tensors(a, b, at)
        return in_tensors
    in_place = isinstance(left, _IN_PLACE) and isinstance(right, _IN_PLACE)
    if type(a) is not type(b) and not in_place:
        return replace(at, what="type", left=type(a).__name__, right=type(b).__name__)
    compare_both = _comparison_of(left)
    if compare_both is not None:
        return compare_both(a, b, at)
    if isinstance(a, tuple):
        return compare_items(a, b, at)
    if isinstance(a, slice):
        return compare_items((a.start, a.stop, a.step), (b.start, b.stop, b.step), at)
    return None if _are_same(a, b) else value_difference(at, a, b)


def compare_batches(a: Any, b: Any, at: Difference) -> Difference | None:
    """The first difference of two batches or dicts."""
    return next(each_difference(a, b, at), None)


def _compare_arrays(a: Any, b: Any, at: Difference) -> Difference | None:
    difference = property_difference(at, "dtype", a.dtype, b.dtype)
    difference = difference or property_difference(at, "shape", a.shape, b.shape)
    if difference is None and (a.dtype.hasobject or a.dtype.kind == "T"):
        each_index = np.ndindex(a.shape)
        differences = (compare(a[i], b[i], step_to_cell(at, i)) for i in each_index)
        return next((each for each in differences if each is not None), None)
    return difference or compare_cells(a, b, at)


def each_difference(a: Any, b: Any, at: Difference) -> Iterator[Difference]:
    """Yields the first difference of two values; of batches or dicts, one for each column.

    If the names of columns differ, the first that it yields says so.
    """
    holder = column_of(a)
    leaves = holder.leaves()
    if type(a) is not type(b) or not (isinstance(holder, DictBatch) or leaves is not None):
        difference = compare(a, b, at)
        if difference is not None:
            yield difference
        return
    nested = False  # whether the keys name columns of a nested batch
    if leaves is not None or isinstance(a, BatchColumns):
        difference = property_difference(at, "batch size", a.batch_size, b.batch_size)
        if difference is not None:
            yield difference
        nested = at.column != "" and at.row is None
    # Use items: iterating over a TensorDict gives its rows.
    left, right = dict(a.items()), dict(b.items())
    if not same_values([*left], [*right]):
        # With its type, because 1 and True are different names, and equal.
        in_left, in_right = ({(type(key), key) for key in keys} for keys in (left, right))
        only_left = [key for key in left if (type(key), key) not in in_right]
        only_right = [key for key in right if (type(key), key) not in in_left]
        if only_left or only_right:
            first = f"{_names(only_left)} in the first"
            second = f"{_names(only_right)} in the second"
            yield replace(at, what="columns only", left=first, right=second)
        else:
            yield replace(at, what="order of columns", left=_names(left), right=_names(right))
        left = {key: left[key] for key in left if key in right}
        right = {key: right[key] for key in left}
    for (key, x), y in zip(left.items(), right.values(), strict=True):
        inner = replace(at, column=f"{at.column}.{key}") if nested else step(at, key)
        yield from each_difference(x, y, inner)
    if hasattr(a, "meta_info"):
        yield from each_difference(a.meta_info, b.meta_info, step(at, "meta_info"))


def property_difference(at: Difference, what: str, a: Any, b: Any) -> Difference | None:
    """The difference of one property of two values, such as the dtype; None if it is the same."""
    if a == b:
        return None
    left, right = (str(list(x) if type(x).__name__ == "Size" else x) for x in (a, b))
    return replace(at, what=what, left=left, right=right)


def step(at: Difference, key: Any) -> Difference:
    """The place of a part of a value, under a name or an index."""
    if at.column == "" and type(key) is str:
        return replace(at, column=key)
    of_column = at.column.startswith("$") and at.row is None  # the whole value is not a batch
    if at.row is None and type(key) is int and not at.inside and not of_column:
        return replace(at, row=key)
    above = at.column if of_column else at.inside or "$"
    path = f"{above}[{brief(key)}]" if type(key) is int else child_path(above, key)
    return replace(at, column=path) if of_column else replace(at, inside=path)


def step_to_cell(at: Difference, index: tuple[int, ...]) -> Difference:
    """The place of a cell of an array. Without a row so far, its first number is the row."""
    if at.row is None and not at.inside:
        return replace(at, row=index[0], cell=index[1:]) if index else at
    return replace(at, cell=index)


def _names(names: Collection[Any]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    first = (shown(x, 60) if type(x) is str else brief(x) for x in islice(names, 8))
    return (", ".join(first) or "none") + more


def compare_items(a: Sequence[Any], b: Sequence[Any], at: Difference) -> Difference | None:
    """The first difference of two lists."""
    if len(a) != len(b):
        return property_difference(at, "length", len(a), len(b))
    kinds = list(map(type, a))
    if _COMPARED.issuperset(kinds) and kinds == list(map(type, b)) and a == b:
        return None
    pairs = enumerate(zip(a, b, strict=True))
    differences = (compare(x, y, step(at, i)) for i, (x, y) in pairs)
    return next((each for each in differences if each is not None), None)


_COMPARED = frozenset((int, bool, str, bytes, type(None)))
"""Types whose values are the same if they are equal, and both of the type."""


def _are_same(a: Any, b: Any) -> bool:
    """Whether two values of one type, which hold no columns, are the same."""
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()
    try:
        # Compare states: equal values may still differ, such as the decimals 1.0 and 1.00.
        if name_for_sending(type(a)) is not None:
            return same_values(state_of(a), state_of(b))
        return bool(_exact_key(a) == _exact_key(b))
    except Exception:  # an __eq__ or a `to_state` may raise anything
        return False


def _exact_key(value: Any) -> Any:
    """A key that equals only the keys of the same value, bit for bit."""
    kind = type(value)
    if kind is float:
        return struct.pack("d", value)
    if kind is complex:
        return kind, _exact_key(value.real), _exact_key(value.imag)
    if kind in (set, frozenset):
        return kind, frozenset(map(_exact_key, value))
    if kind is tuple:
        return kind, tuple(map(_exact_key, value))
    return kind, value


# --- cells -------------------------------------------------------------------------------------


def _compare_in_place(a: Any, b: Any, at: Difference) -> Difference | None:
    """Compare rows of cells, each side a `RaggedView`, or the `CellRows` of a rectangle."""
    views: list[RaggedView] = [x if isinstance(x, RaggedView) else x.view for x in (a, b)]
    layouts = ("jagged" if isinstance(x, RaggedView) else "strided" for x in (a, b))
    difference = property_difference(at, "layout", *layouts) or property_difference(
        at, "dtype", *(torch_name(view.dtype) for view in views)
    )
    if difference is not None:
        return difference
    left, right = map(array_of_view, views)
    if isinstance(a, RaggedView):
        return compare_rows(views, at) or compare_jagged_cells(views, (left, right), at)
    difference = property_difference(at, "shape", [*left.shape], [*right.shape])
    return difference or compare_cells(left, right, at, torch_name(views[0].dtype))


def compare_rows(views: Sequence[RaggedView], at: Difference) -> Difference | None:
    """The first difference in the shapes, or the lengths of rows, of two jagged columns."""
    left, right = views
    dim = left.ragged_dim
    shapes: list[list[Any]] = [[view.row_splits.rows, *view.values_shape] for view in views]
    for shape in shapes:
        shape[dim] = "*"
    difference = property_difference(at, "ragged dim", dim, right.ragged_dim)
    difference = difference or property_difference(at, "shape", *shapes)
    if difference is not None:
        return difference
    lengths = left.row_splits.lengths, right.row_splits.lengths
    rows = np.flatnonzero(lengths[0] != lengths[1])
    if not len(rows):
        return None
    row = int(rows[0])
    return property_difference(
        replace(at, row=row), "tokens", *(int(each[row]) for each in lengths)
    )


def compare_jagged_cells(
    views: Sequence[RaggedView], values: Sequence[Any], at: Difference
) -> Difference | None:
    """The first difference in the cells of two jagged columns, whose rows are in these arrays."""
    # Move tokens to the first dim, so that the first difference is in the first row that differs.
    x, y = (np.moveaxis(each, views[0].ragged_dim - 1, 0) for each in values)
    return compare_cells(x, y, at, torch_name(views[0].dtype), views[0])


def compare_cells(
    a: Any, b: Any, at: Difference, dtype: str = "", rows: RaggedView | None = None
) -> Difference | None:
    """The first difference of two arrays of one shape, which may hold jagged `rows`.

    Arrays of unsigned words hold cells of a `dtype` that numpy lacks.
    """
    shape = a.shape
    x, y = bytes_in_order(a), bytes_in_order(b)
    differs = x != y
    if not differs.any():
        return None
    cell = np.unravel_index(int(differs.argmax()) // (len(x) // math.prod(shape)), shape)
    index = [*map(int, cell)]
    if rows is not None:
        token, dim = index.pop(0), rows.ragged_dim - 1
        row = int(np.searchsorted(rows.row_splits.offsets_array, token, side="right")) - 1
        index.insert(dim, token - int(rows.row_splits.offsets_array[row]))
        index.insert(0, row)
    return value_difference(step_to_cell(at, tuple(index)), a[cell], b[cell], dtype)


# --- the table ----------------------------------------------------------------------------------


def _compare_one_objects(a: Any, b: Any, at: Difference) -> Difference | None:
    return compare(a.data, b.data, replace(at, inside=at.inside or "$"))


_COMPARE: dict[type[HeldColumn], Comparison] = {
    DictBatch: compare_batches,
    ObjectList: compare_items,
    Array: _compare_arrays,
    ViewColumn: _compare_in_place,
    CellsColumn: _compare_in_place,
    OneObjectColumn: _compare_one_objects,
}
"""The function that compares two values of one type, by the class that holds them."""

_IN_PLACE = (ViewColumn, CellsColumn)


def add_comparisons(comparisons: Mapping[type[HeldColumn], Comparison]) -> None:
    """Add functions that compare values of more types."""
    _COMPARE.update(comparisons)


def _comparison_of(holder: HeldColumn) -> Comparison | None:
    """The function that compares two values of one type; None if they hold no columns."""
    kind = type(holder)
    if kind not in _COMPARE and kind is not HeldColumn and kind is not Open:
        _comparisons_of_tensors()
    return _COMPARE.get(kind)


def _comparisons_of_tensors() -> Any:
    """The module that compares tensors, which is imported when one turns up."""
    return module_with_torch("wire.compare_tensors", "differences")


# --- texts -------------------------------------------------------------------------------------


def value_difference(at: Difference, a: Any, b: Any, dtype: str = "") -> Difference:
    """The difference of two values; it shows their bits, too, if their texts are the same."""
    left, right = (_text_of_cell(x, dtype) if dtype else _text(x) for x in (a, b))
    if left == right and isinstance(a, (float, np.generic)):
        left, right = (f"{text} (bits {_bits(x)})".strip() for text, x in ((left, a), (right, b)))
    return replace(at, what="value", left=left, right=right)


def _bits(value: Any) -> str:
    return np.asarray(value).tobytes()[::-1].hex()


def _text_of_cell(cell: Any, dtype: str) -> str:
    """The text of the number in a cell; empty if Python has no number for it."""
    try:
        return repr(numbers_of(np.asarray(cell), dtype).item())
    except TypeError:
        return ""


_PRINTED = (complex, np.generic, range)


def _text(value: Any) -> str:
    if isinstance(value, (str, bytes)):
        return shown(repr(value[:1000]), 80)
    with suppress(ValueError):  # Python refuses to print very long ints
        if isinstance(value, (set, frozenset)):  # sort: the hash seed decides a set's order
            return shown(f"{{{', '.join(sorted(map(_text, value)))}}}", 80)
        if column_of(value).has_tensor:
            return describe(value)
        if isinstance(value, _PRINTED) or type(value).__module__ == "torch":
            return shown(repr(value)[:1000], 80)
    return brief(value)
