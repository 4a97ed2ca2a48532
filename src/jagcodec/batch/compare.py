"""Where two values first differ, bit for bit: the only comparator; and which `meta` joins keep."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from jagcodec.columns.batch import closed, source_in
from jagcodec.columns.column import (
    Array,
    DictBatch,
    HeldColumn,
    LazyStack,
    ObjectList,
    Open,
    Payloads,
    TensorClass,
    TensorColumn,
    TensorDictBatch,
    Unbatched,
    column_of,
)
from jagcodec.errors import brief, child_path, describe, shown
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import as_bytes, as_words
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import fields_of, is_stack, unbatched_parts
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.dtypes import bytes_in_order
from jagcodec.wire.registry import registered_name, state_of


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


def first_difference(left: Any, right: Any) -> Difference | None:
    """Where two values first differ, bit for bit."""
    return compare(left, right, WHOLE)


def same_values(left: Any, right: Any) -> bool:
    """Whether two values are the same, as for `first_difference`."""
    return compare(left, right, WHOLE) is None


def agreed(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The items that all mappings have, with the same value."""
    first, *others = metas or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(name in other and same_values(other[name], value) for other in others)
    }


def uncontradicted(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The items of all mappings, except names for which two mappings have different values."""
    names = dict.fromkeys(name for meta in metas for name in meta)
    each = (agreed([{name: meta[name]} for meta in metas if name in meta]) for name in names)
    return {name: value for found in each for name, value in found.items()}


# --- values ------------------------------------------------------------------------------------


def compare(a: Any, b: Any, at: Difference) -> Difference | None:
    """The first difference at a place."""
    if a is b:
        return None
    left, right = column_of(a), column_of(b)
    if isinstance(left, Open) and isinstance(right, Open):
        found = compare(closed(a), closed(b), at)
        return found or compare(source_in(a).meta(), source_in(b).meta(), _step(at, "meta"))
    if isinstance(left, TensorColumn) and isinstance(right, TensorColumn):
        return _compare_tensors(a, b, at)
    both_unbatched = isinstance(left, Unbatched) and isinstance(right, Unbatched)
    if type(a) is not type(b) and not both_unbatched:
        return replace(at, what="type", left=type(a).__name__, right=type(b).__name__)
    compare_both = _COMPARE.get(type(left))
    if compare_both is not None:
        return compare_both(a, b, at)
    if isinstance(a, tuple):
        return _compare_items(a, b, at)
    if isinstance(a, slice):
        return _compare_items((a.start, a.stop, a.step), (b.start, b.stop, b.step), at)
    return None if _are_same(a, b) else _unlike(at, a, b)


def _compare_unbatched(a: Any, b: Any, at: Difference) -> Difference | None:
    (size, left), (other, right) = unbatched_parts(a), unbatched_parts(b)
    return _other(at, "batch size", size, other) or compare(left, right, at)


def _compare_payloads(a: Any, b: Any, at: Difference) -> Difference | None:
    found = _other(at, "batch size", a.batch_size, b.batch_size)
    if not is_stack(a):
        return found or compare(a.data, b.data, replace(at, inside=at.inside or "$"))
    if -1 in a.batch_size:  # it may have no list
        return _compare_stacks(a, b, at)
    return found or _compare_items(a.tolist(), b.tolist(), at)


def _compare_stacks(a: Any, b: Any, at: Difference) -> Difference | None:
    return (
        _other(at, "batch size", a.batch_size, b.batch_size)
        or _other(at, "stack dim", a.stack_dim, b.stack_dim)
        or _compare_items(a.tensordicts, b.tensordicts, at)
    )


def _compare_batches(a: Any, b: Any, at: Difference) -> Difference | None:
    return next(each_difference(a, b, at), None)


def _compare_tensorclasses(a: Any, b: Any, at: Difference) -> Difference | None:
    (left, others), (right, more) = fields_of(a), fields_of(b)
    return compare(left, right, at) or compare(others, more, at)


def _compare_arrays(a: Any, b: Any, at: Difference) -> Difference | None:
    found = _other(at, "dtype", a.dtype, b.dtype) or _other(at, "shape", a.shape, b.shape)
    if found is None and (a.dtype.hasobject or a.dtype.kind == "T"):
        pairs = (compare(a[i], b[i], _step(at, i)) for i in np.ndindex(a.shape))
        return next((each for each in pairs if each is not None), None)
    return found or _compare_cells(a, b, at)


def each_difference(a: Any, b: Any, at: Difference) -> Iterator[Difference]:
    """The first difference; for two batches or dicts, names, and the first in each column."""
    holder = column_of(a)
    batches = isinstance(holder, (DictBatch, TensorDictBatch)) and not isinstance(holder, LazyStack)
    if type(a) is not type(b) or not batches:
        found = compare(a, b, at)
        if found is not None:
            yield found
        return
    nested = False  # whether the keys are those of columns within a column
    if isinstance(holder, TensorDictBatch):
        found = _other(at, "batch size", a.batch_size, b.batch_size)
        if found is not None:
            yield found
        nested = at.column != "" and at.row is None
    # Use items: iterating over a TensorDict gives its rows.
    left, right = dict(a.items()), dict(b.items())
    if not same_values([*left], [*right]):
        alone = [key for key in left if key not in right], [key for key in right if key not in left]
        if any(alone):
            first, second = f"{_names(alone[0])} in the first", f"{_names(alone[1])} in the second"
            yield replace(at, what="columns only", left=first, right=second)
        else:
            yield replace(at, what="order of columns", left=_names(left), right=_names(right))
        left = {key: left[key] for key in left if key in right}
        right = {key: right[key] for key in left}
    for (key, x), y in zip(left.items(), right.values(), strict=True):
        inner = replace(at, column=f"{at.column}.{key}") if nested else _step(at, key)
        yield from each_difference(x, y, inner)
    if hasattr(a, "meta_info"):
        yield from each_difference(a.meta_info, b.meta_info, _step(at, "meta_info"))


def _other(at: Difference, what: str, a: Any, b: Any) -> Difference | None:
    if a == b:
        return None
    left, right = (str(list(x) if isinstance(x, torch.Size) else x) for x in (a, b))
    return replace(at, what=what, left=left, right=right)


def _step(at: Difference, key: Any) -> Difference:
    """A place further in: by a name, an index, or the index of a cell (after a row or not)."""
    if isinstance(key, tuple):
        if at.row is None and not at.inside:
            return replace(at, row=key[0], cell=key[1:]) if key else at
        return replace(at, cell=key)
    if at.column == "" and type(key) is str:
        return replace(at, column=key)
    of_column = at.column.startswith("$") and at.row is None  # the value is not a batch
    if at.row is None and type(key) is int and not at.inside and not of_column:
        return replace(at, row=key)
    above = at.column if of_column else at.inside or "$"
    path = f"{above}[{brief(key)}]" if type(key) is int else child_path(above, key)
    return replace(at, column=path) if of_column else replace(at, inside=path)


def _names(names: Collection[Any]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    first = (shown(x, 60) if type(x) is str else brief(x) for x in islice(names, 8))
    return (", ".join(first) or "none") + more


def _compare_items(a: Sequence[Any], b: Sequence[Any], at: Difference) -> Difference | None:
    if len(a) != len(b):
        return _other(at, "length", len(a), len(b))
    kinds = list(map(type, a))
    if _COMPARED.issuperset(kinds) and kinds == list(map(type, b)) and a == b:
        return None
    pairs = enumerate(zip(a, b, strict=True))
    found = (compare(x, y, _step(at, i)) for i, (x, y) in pairs)
    return next((each for each in found if each is not None), None)


_COMPARE: dict[type[HeldColumn], Callable[[Any, Any, Difference], Difference | None]] = {
    Unbatched: _compare_unbatched,
    Payloads: _compare_payloads,
    LazyStack: _compare_stacks,
    DictBatch: _compare_batches,
    TensorDictBatch: _compare_batches,
    TensorClass: _compare_tensorclasses,
    ObjectList: _compare_items,
    Array: _compare_arrays,
}
"""How two values of one type are compared, by what holds them."""

_COMPARED = frozenset((int, bool, str, bytes, type(None)))
"""Types of values that are the same if they are equal, and of one type."""


def _are_same(a: Any, b: Any) -> bool:
    """Whether two values of one type, which hold no columns, are the same."""
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()
    try:
        # Equal values may differ, such as the decimals 1.0 and 1.00: compare what is sent of them.
        if registered_name(type(a)) is not None:
            return same_values(state_of(a), state_of(b))
        return bool(_exact_key(a) == _exact_key(b))
    except Exception:  # an __eq__, or the way to a state, may raise anything
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


def _compare_tensors(a: torch.Tensor, b: torch.Tensor, at: Difference) -> Difference | None:
    found = _other(at, "layout", _layout_name(a), _layout_name(b)) or _other(
        at, "dtype", a.dtype, b.dtype
    )
    if found is not None:
        return found
    if is_jagged(a):
        return _compare_jagged(a, b, at)
    if a.is_nested:
        return _compare_items(a.unbind(), b.unbind(), at)
    found = _other(at, "shape", a.shape, b.shape)
    if found is not None:
        return found
    if a.layout is torch.strided and not (a.is_meta or b.is_meta or a.is_quantized):
        return _compare_cells(a, b, at)
    if a.layout is not torch.sparse_coo:  # `encode` rejects these; their cells are not compared
        return _unlike(at, a, b)
    found = _other(at, "coalesced", a.is_coalesced(), b.is_coalesced())
    for part in ("_indices", "_values"):
        x, y = (getattr(tensor, part)() for tensor in (a, b))
        found = found or _compare_tensors(x, y, _step(at, part.strip("_")))
    return found


def _layout_name(tensor: torch.Tensor) -> str:
    kind = "jagged" if is_jagged(tensor) else str(tensor.layout).removeprefix("torch.")
    return "nested" if tensor.is_nested and kind == "strided" else kind


def _compare_jagged(a: torch.Tensor, b: torch.Tensor, at: Difference) -> Difference | None:
    left, right = view_of(a, "left"), view_of(b, "right")
    dim = left.ragged_dim
    shapes: list[list[Any]] = [[view.row_splits.rows, *view.values_shape] for view in (left, right)]
    for shape in shapes:
        shape[dim] = "*"
    found = _other(at, "ragged dim", dim, right.ragged_dim) or _other(at, "shape", *shapes)
    if found is not None:
        return found
    lengths = left.row_splits.lengths, right.row_splits.lengths
    rows = np.flatnonzero(lengths[0] != lengths[1])
    if len(rows):
        row = int(rows[0])
        return _other(replace(at, row=row), "tokens", *(int(each[row]) for each in lengths))
    # Tokens first, so that the first difference is that of the first row.
    x, y = (values_of(view).movedim(dim - 1, 0) for view in (left, right))
    return _compare_cells(x, y, at, left)


def _compare_cells(
    a: Any, b: Any, at: Difference, rows: RaggedView | None = None
) -> Difference | None:
    """The first difference of two arrays or tensors of one shape, which may hold jagged `rows`."""
    is_tensor, shape = isinstance(a, torch.Tensor), tuple(a.shape)
    if is_tensor and torch.equal(as_words(a), as_words(to_device(b, a.device))):
        return None  # the comparison above needs no memory
    x, y = (as_bytes(each) if is_tensor else bytes_in_order(each) for each in (a, b))
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
    return _unlike(_step(at, tuple(index)), a[cell], b[cell])


# --- texts -------------------------------------------------------------------------------------


def _unlike(at: Difference, a: Any, b: Any) -> Difference:
    """The difference of two values, with their bits if their texts are the same."""
    left, right = _text(a), _text(b)
    if left == right and isinstance(a, (float, np.generic, torch.Tensor)):
        left, right = (f"{_text(x)} (bits {_bits_as_text(x)})".strip() for x in (a, b))
    return replace(at, what="value", left=left, right=right)


def _bits_as_text(value: Any) -> str:
    data = as_bytes(value) if isinstance(value, torch.Tensor) else np.asarray(value)
    return data.tobytes()[::-1].hex()


_PRINTED = (complex, np.generic, range, torch.dtype, torch.device)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.dim() or value.layout is not torch.strided or value.is_meta:
            return describe(value)
        try:
            return repr(value.item())
        except (RuntimeError, NotImplementedError):  # torch cannot print the dtype
            return ""
    if isinstance(value, (str, bytes)):
        return shown(repr(value[:1000]), 80)
    with suppress(ValueError):  # Python refuses to print very long ints
        if isinstance(value, (set, frozenset)):  # sort: the hash seed decides a set's order
            return shown(f"{{{', '.join(sorted(map(_text, value)))}}}", 80)
        if isinstance(value, _PRINTED):
            return shown(repr(value)[:1000], 80)
    return brief(value)
