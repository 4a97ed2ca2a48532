"""The fast path of `encode_rows`: rows of arrays, numbers, strings and chats in one pass.

None means that `pack/rows.py` must make the message, or raise an error.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec._arguments import named_columns
from jagcodec.errors import JagcodecError
from jagcodec.memory.tensor_bytes import plain_array
from jagcodec.pack.cell_dtypes import DEFAULT_DTYPES, FILL_CODES
from jagcodec.pack.cells import RowCells, cells_of_rows, error_at_column, joined_quickly
from jagcodec.pack.row_kinds import KIND_OF_TYPE, OBJECT_ROW
from jagcodec.wire.at_once import (
    frames_of_items,
    item_of_documents,
    packed_values,
    rows_of_lengths,
)
from jagcodec.wire.checks import is_oversized_empty
from jagcodec.wire.dtypes import TORCH_NAME_OF_NUMPY, TORCH_NAMES
from jagcodec.wire.encoder import values_of_meta
from jagcodec.wire.frames import Frame
from jagcodec.wire.header import start_of
from jagcodec.wire.lowered import Item, Rows
from jagcodec.wire.native import packed_at_once
from jagcodec.wire.spec import MAX_DEPTH, MAX_UNBACKED_ROWS, PLAIN, Code

NO_NAMES: tuple[str, ...] = ()
"""The default of options that are names, known by identity: a caller's iterable is read once."""

# How each of Python's number types becomes a cell, and the node of its column.
_NUMBERS: dict[type, tuple[str, tuple[Any, ...]]] = {
    kind: (FILL_CODES[dtype][0], (Code.TENSOR, TORCH_NAMES[dtype], 1))
    for kind, dtype in DEFAULT_DTYPES.items()
}
_LISTS = {list, tuple}
_OBJECTS = {kind for kind, row in KIND_OF_TYPE.items() if row == OBJECT_ROW}

_Made: TypeAlias = tuple[Item, tuple[Any, ...]] | None
"""The item and the node of a column; None if it needs `_checked_columns` (`pack.rows`)."""


def frames_of_plain_rows(
    rows: list[Any] | dict[Any, Any], same_length: Any, where: str, meta: Any
) -> list[Frame] | None:
    """The message of rows, which may be given by column.

    None if the rows, or `same_length`, need `_checked_columns`.
    """
    if isinstance(rows, dict):
        columns = _columns_of_lists(named_columns(rows, f"{where}(rows)"))
    else:
        columns = columns_of_dicts(rows, f"{where}(rows), row 0")
    if not columns:
        return None
    count = len(next(iter(columns.values())))
    if not 0 < count <= MAX_UNBACKED_ROWS:
        return None
    items: list[int | Item] = [count]
    nodes: list[tuple[Any, ...]] = []
    lengths: dict[str, Rows | None] = {}
    groups: dict[tuple[int, ...], Rows] = {}
    for name, column in columns.items():
        try:
            made = _of_column(column, groups)
        except JagcodecError as error:
            raise error_at_column(error, f"{where}({name!r})") from None
        if made is None:
            return None
        item, node = made
        items.append(item)
        nodes.append(node)
        if node[0] is Code.JAGGED:
            lengths[name] = item[2]
    if same_length is not NO_NAMES and not are_known_equal(same_length, lengths):
        return None  # an error may follow
    start = start_of((Code.TENSORDICT, 1, tuple(columns), *nodes))
    return frames_of_items(start, items, packed_values(values_of_meta(meta)))


def _of_column(column: Sequence[Any], groups: dict[tuple[int, ...], Rows]) -> _Made:
    kinds = set(map(type, column))
    if len(kinds) == 1:
        kind = type(column[0])
        if kind is np.ndarray or kind is torch.Tensor:
            return _of_arrays(column, kinds, groups)
        if kind in _NUMBERS:
            return _of_numbers(column, *_NUMBERS[kind])
    if not kinds <= _OBJECTS:
        made = cells_of_rows(column, copied=False)
        if type(made) is RowCells:
            return _of_cells(*made, groups)
        column = made
    packed = packed_at_once(column, MAX_DEPTH - 1)
    return None if packed is None else (item_of_documents(packed), (Code.NON_TENSOR_ROWS,))


def _of_arrays(
    column: Sequence[Any], kinds: set[Any], groups: dict[tuple[int, ...], Rows]
) -> _Made:
    """Arrays, or tensors. Those of several rows are joined; that of a single row is aliased."""
    if len(column) > 1:
        joined = joined_quickly(column, kinds)
        return None if joined is None else _of_cells(*joined, groups)
    array = column[0] if np.ndarray in kinds else plain_array(column[0])
    return None if array is None or not array.ndim else _of_cells(array, array.shape[:1], groups)


def _of_numbers(column: Sequence[Any], code: str, node: tuple[Any, ...]) -> _Made:
    """One cell per row, of numbers of one type."""
    try:
        cells = struct.pack(f"<{len(column)}{code}", *column)
    except (struct.error, OverflowError):
        return None  # an error follows
    return (memoryview(cells), PLAIN, None, (len(column),)), node


def _of_cells(
    values: Any, lengths: tuple[int, ...] | None, groups: dict[tuple[int, ...], Rows]
) -> _Made:
    """The item of `RowCells`. Columns of equal row lengths share one of the `groups`."""
    dtype, shape = TORCH_NAME_OF_NUMPY.get(values.dtype), values.shape
    if dtype is None or type(values) is not np.ndarray or not values.flags.c_contiguous:
        return None
    if not values.size and is_oversized_empty(shape, values.itemsize):
        return None  # an error follows
    if lengths is None:
        return (values, PLAIN, None, shape), (Code.TENSOR, dtype, len(shape))
    rows = groups.get(lengths)
    if rows is None:
        rows = groups[lengths] = rows_of_lengths(lengths)
    return (values, PLAIN, rows, shape), (Code.JAGGED, dtype, len(shape), 1)


def columns_of_dicts(rows: Sequence[Any], path: str) -> dict[str, tuple[Any, ...]] | None:
    """The columns, if all rows are dicts with the same names in one order; otherwise None."""
    if set(map(type, rows)) != {dict}:
        return None
    names = named_columns(rows[0], path)
    if len(rows) == 1:  # five times as fast as below
        return {name: (value,) for name, value in names.items()}
    if set(map(tuple, rows)) != {tuple(names)}:
        return None
    try:
        return dict(zip(names, zip(*map(dict.values, rows), strict=True), strict=True))
    except (RuntimeError, ValueError):  # another thread changes a row
        return None


def _columns_of_lists(columns: Mapping[str, Any]) -> dict[str, tuple[Any, ...]] | None:
    """The rows of each column, if all columns are lists with as many rows; otherwise None."""
    if not _LISTS.issuperset(map(type, columns.values())):
        return None
    # Copies, because another thread may change a list.
    found = {name: tuple(column) for name, column in columns.items()}
    return found if len(set(map(len, found.values()))) == 1 else None


def are_known_equal(names: Any, lengths: Mapping[str, Any]) -> bool:
    """Whether columns have equal lengths; False if one has none, or if names need a check."""
    if type(names) is not list and type(names) is not tuple:
        return False
    if not _STRING.issuperset(map(type, names)):
        return False
    found = set(map(lengths.get, names))
    return len(found) == 1 and None not in found


_STRING = frozenset((str,))
