"""Where two values first differ, bit for bit: the only comparator."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)
from tensordict.tensorclass import NonTensorDataBase

from jagcodec.errors import brief, child_path, describe, shown
from jagcodec.memory.tensor_bytes import ByteArray, as_bytes, as_words
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import fields_of, unbatched_parts
from jagcodec.wire.dtypes import cell_bytes
from jagcodec.wire.registry import registered_name, state_of


@dataclass(frozen=True)
class Difference:
    """The first difference of two values; `left` and `right` are shortened texts."""

    column: str  # names joined with dots; a path with $ outside of batches; empty for the whole
    row: int | None  # None where a whole column differs
    cell: tuple[int, ...] | None  # within its row: (token, ...)
    inside: str  # the path in a row that holds an object
    what: str  # "type", "dtype", "shape", "columns", "value" ...
    left: str
    right: str

    def __str__(self) -> str:
        name = shown(self.column, 60)
        place = [name if name.startswith("$") else f"column {name}"] if name else []
        place += [] if self.row is None else [f"row {brief(self.row)}"]
        place += [f"cell {list(self.cell)}"] if self.cell else []
        place += [shown(self.inside, 60)] if self.inside else []
        where = ", ".join(place) or "the whole"
        return f"{where}: {self.what} {self.left} and {self.right}"


WHOLE = Difference("", None, None, "", "", "", "")


def first_difference(left: Any, right: Any) -> Difference | None:
    """Where two values first differ, bit for bit: names, dtypes and shapes before cells.

    Holes, devices, memory maps and parameters make no difference. States are compared for values of
    registered types, and ``==`` for values of unknown types.
    """
    return compare(left, right, WHOLE, False) or compare(left, right, WHOLE, True)


def same_values(left: Any, right: Any) -> bool:
    """Whether two values are the same, as for `first_difference`."""
    return compare(left, right, WHOLE, True) is None


def agreed(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of several mappings have the same."""
    first, *others = metas or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(name in other and same_values(other[name], value) for other in others)
    }


def uncontradicted(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several mappings have, unless two of them have it with other values."""
    names = dict.fromkeys(name for meta in metas for name in meta)
    each = (agreed([{name: meta[name]} for meta in metas if name in meta]) for name in names)
    return {name: value for found in each for name, value in found.items()}


# --- values ------------------------------------------------------------------------------------


def compare(a: Any, b: Any, at: Difference, cells: bool) -> Difference | None:
    """The first difference at a place; without `cells` none of cells and objects in rows."""
    if a is b:
        return None
    if isinstance(a, UnbatchedTensor) and isinstance(b, UnbatchedTensor):
        (size, left), (other, right) = unbatched_parts(a), unbatched_parts(b)
        return _other(at, "batch size", size, other) or compare(left, right, at, cells)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors(a, b, at, cells)
    if type(a) is not type(b):
        return replace(at, what="type", left=type(a).__name__, right=type(b).__name__)
    if isinstance(a, (NonTensorStack, NonTensorDataBase)):
        found = _other(at, "batch size", a.batch_size, b.batch_size)
        if found is not None or not cells:
            return found
        if isinstance(a, NonTensorStack):
            return _items(a.tolist(), b.tolist(), at, cells)
        return compare(a.data, b.data, replace(at, inside=at.inside or "$"), cells)
    if isinstance(a, LazyStackedTensorDict):
        return (
            _other(at, "batch size", a.batch_size, b.batch_size)
            or _other(at, "stack dim", a.stack_dim, b.stack_dim)
            or _items(a.tensordicts, b.tensordicts, at, cells)
        )
    if isinstance(a, (dict, TensorDictBase)):
        return next(each_difference(a, b, at, cells), None)
    if is_tensorclass(a):
        (left, others), (right, more) = fields_of(a), fields_of(b)
        return compare(left, right, at, cells) or compare(others, more, at, cells)
    if isinstance(a, (list, tuple)):
        return _items(a, b, at, cells)
    if isinstance(a, slice):
        return _items((a.start, a.stop, a.step), (b.start, b.stop, b.step), at, cells)
    if isinstance(a, np.ndarray):
        return _arrays(a, b, at, cells)
    if not cells or _are_same(a, b):
        return None
    if registered_name(type(a)) is not None and same_values(state_of(a), state_of(b)):
        return None
    return replace(at, what="value", left=_text(a), right=_text(b))


def each_difference(a: Any, b: Any, at: Difference, cells: bool) -> Iterator[Difference]:
    """As `compare`; of two batches or dicts, their names and the first of each column."""
    batches = isinstance(a, (dict, TensorDictBase)) and not isinstance(a, LazyStackedTensorDict)
    if type(a) is not type(b) or not batches:
        found = compare(a, b, at, cells)
        if found is not None:
            yield found
        return
    nested = False  # whether the keys are those of columns within a column
    if isinstance(a, TensorDictBase):
        found = _other(at, "batch size", a.batch_size, b.batch_size)
        if found is not None:
            yield found
        nested = at.column != "" and at.row is None
    # By items, because a TensorDict iterates over its rows.
    left, right = dict(a.items()), dict(b.items())
    if not same_values([*left], [*right]):
        yield _columns_differ(at, [*left], [*right])
        left = {key: left[key] for key in left if key in right}
        right = {key: right[key] for key in left}
    for (key, x), y in zip(left.items(), right.values(), strict=True):
        inner = replace(at, column=f"{at.column}.{key}") if nested else _step(at, key)
        yield from each_difference(x, y, inner, cells)
    if hasattr(a, "meta_info"):
        yield from each_difference(a.meta_info, b.meta_info, _step(at, "meta_info"), cells)


def _other(at: Difference, what: str, a: Any, b: Any) -> Difference | None:
    if a == b:
        return None
    texts = [str(list(x) if isinstance(x, torch.Size) else x) for x in (a, b)]
    return replace(at, what=what, left=texts[0], right=texts[1])


def _step(at: Difference, key: Any) -> Difference:
    """A place one key or index further in: the column, then the row, then a path in the row."""
    if at.column == "" and type(key) is str:
        return replace(at, column=key)
    step = f"[{brief(key)}]" if type(key) is int else None
    if at.column.startswith("$") and at.row is None:  # of a value that is not a batch
        return replace(at, column=at.column + step if step else child_path(at.column, key))
    if at.row is None and step and not at.inside:
        return replace(at, row=key)
    inside = at.inside or "$"
    return replace(at, inside=inside + step if step else child_path(inside, key))


def _columns_differ(at: Difference, a: Sequence[Any], b: Sequence[Any]) -> Difference:
    """Names that one of two has alone, or their order."""
    known = set(a), set(b)
    alone = [[x for x in a if x not in known[1]], [x for x in b if x not in known[0]]]
    if not any(alone):
        return replace(at, what="order of columns", left=_names(a), right=_names(b))
    without = "without it" if sum(map(len, alone)) == 1 else "without them"
    texts = [f"with {_names(names)}" if names else without for names in alone]
    return replace(at, what="columns", left=texts[0], right=texts[1])


def _names(names: Sequence[Any]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(shown(x, 60) if type(x) is str else brief(x) for x in names[:8]) + more


def _items(a: Sequence[Any], b: Sequence[Any], at: Difference, cells: bool) -> Difference | None:
    if len(a) != len(b):
        return replace(at, what="length", left=str(len(a)), right=str(len(b)))
    kinds = list(map(type, a))
    if _COMPARED.issuperset(kinds) and kinds == list(map(type, b)) and (not cells or a == b):
        return None
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        found = compare(x, y, _step(at, i), cells)
        if found is not None:
            return found
    return None


_COMPARED = frozenset((int, bool, str, bytes, type(None)))
"""Types of values that are the same if they are equal, and of one type."""


def _are_same(a: Any, b: Any) -> bool:
    """Whether two values of one type, which hold no columns, are the same."""
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()
    try:
        return bool(_key(a) == _key(b))
    except Exception:  # whatever an __eq__ raises
        return False


def _key(value: Any) -> Any:
    """What equals only the key of the same value."""
    kind = type(value)
    if kind is float:
        return struct.pack("d", value)
    if kind is complex:
        return kind, _key(value.real), _key(value.imag)
    if kind in (set, frozenset):
        return kind, frozenset(map(_key, value))
    if kind is tuple:
        return kind, tuple(map(_key, value))
    return kind, value


# --- cells -------------------------------------------------------------------------------------


def _tensors(a: torch.Tensor, b: torch.Tensor, at: Difference, cells: bool) -> Difference | None:
    found = _other(at, "layout", _layout(a), _layout(b)) or _other(at, "dtype", a.dtype, b.dtype)
    if found is not None:
        return found
    if is_jagged(a):
        return _jagged(a, b, at, cells)
    if a.is_nested:
        return _items(a.unbind(), b.unbind(), at, cells)
    found = _other(at, "shape", a.shape, b.shape)
    if found is not None:
        return found
    if a.layout is torch.strided and not (a.is_meta or b.is_meta or a.is_quantized):
        if not cells or _same_bits(a, b):
            return None
        cell = _first_cell(as_bytes(a), as_bytes(b), tuple(a.shape))
        return None if cell is None else _at_cell(at, cell, *_cell_texts(a[cell], b[cell]))
    if a.layout is not torch.sparse_coo:  # `encode` rejects these; their cells are not compared
        return replace(at, what="value", left=describe(a), right=describe(b)) if cells else None
    found = _other(at, "coalesced", a.is_coalesced(), b.is_coalesced())
    for part in ("_indices", "_values"):
        x, y = (getattr(tensor, part)() for tensor in (a, b))
        found = found or _tensors(x, y, _step(at, part.strip("_")), cells)
    return found


def _layout(tensor: torch.Tensor) -> str:
    kind = "jagged" if is_jagged(tensor) else str(tensor.layout).removeprefix("torch.")
    return "nested" if tensor.is_nested and kind == "strided" else kind


def _jagged(a: torch.Tensor, b: torch.Tensor, at: Difference, cells: bool) -> Difference | None:
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
    if not cells:
        return None
    # Tokens first, so that the first difference is that of the first row.
    values = [values_of(view).movedim(dim - 1, 0) for view in (left, right)]
    if _same_bits(*values):
        return None
    cell = _first_cell(as_bytes(values[0]), as_bytes(values[1]), tuple(values[0].shape))
    if cell is None:
        return None
    row = int(np.searchsorted(left.row_splits.host, cell[0], side="right")) - 1
    index = list(cell[1:])
    index.insert(dim - 1, cell[0] - int(left.row_splits.host[row]))
    return _at_cell(at, (row, *index), *_cell_texts(*(x[cell] for x in values)))


def _arrays(a: Any, b: Any, at: Difference, cells: bool) -> Difference | None:
    found = _other(at, "dtype", a.dtype, b.dtype) or _other(at, "shape", a.shape, b.shape)
    if found is not None or not cells:
        return found
    if a.dtype.hasobject or a.dtype.kind == "T":
        differences = (compare(a[i], b[i], _at_cell(at, i), cells) for i in np.ndindex(a.shape))
        return next((each for each in differences if each is not None), None)
    cell = _first_cell(cell_bytes(a), cell_bytes(b), a.shape)
    return None if cell is None else _at_cell(at, cell, _text(a[cell]), _text(b[cell]))


def _at_cell(at: Difference, cell: tuple[int, ...], left: str = "", right: str = "") -> Difference:
    """The values of a cell of a column, whose first index is the row; or of an array in a row."""
    at = replace(at, what="value", left=left, right=right)
    if at.row is None and not at.inside:
        return replace(at, row=cell[0], cell=cell[1:]) if cell else at
    return replace(at, cell=cell)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors of one dtype and shape are the same, without memory for it."""
    return torch.equal(as_words(a), as_words(b.to(a.device)))


def _first_cell(a: ByteArray, b: ByteArray, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The index of the first cell that differs, in the bytes of two tensors of one shape."""
    differs = a != b
    if not differs.any():
        return None
    cell = int(differs.argmax()) // (len(a) // math.prod(shape))
    return tuple(map(int, np.unravel_index(cell, shape)))


def _cell_texts(*cells: torch.Tensor) -> list[str]:
    """Cells as people read them; with their bits where that shows no difference."""
    texts = []
    for cell in cells:
        try:
            texts.append(repr(cell.item()))
        except (RuntimeError, NotImplementedError):  # of dtypes that torch cannot print
            texts.append("")
    if texts[0] != texts[1]:
        return texts
    bits = [as_bytes(cell)[::-1].tobytes().hex() for cell in cells]
    return [f"{text} (bits {each})".strip() for text, each in zip(texts, bits, strict=True)]


_PRINTED = (complex, set, frozenset, np.generic, range, torch.dtype, torch.device)


def _text(value: Any) -> str:
    """A value in few words, with the bits of a float that is not a number."""
    if isinstance(value, float) and value != value:
        return f"nan (bits {struct.pack('>d', value).hex()})"
    if isinstance(value, (str, bytes)):
        return shown(repr(value[:1000]), 80)
    with suppress(ValueError):  # an int too long for Python
        if isinstance(value, _PRINTED):
            return shown(repr(value)[:1000], 80)
    return brief(value)
