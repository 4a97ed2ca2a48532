"""Comparing what arrived with what was padded: every cell, bit for bit.

numpy and the standard library only: nothing of the codec vouches for itself here. Every function
returns how many cells it compared, and raises `MismatchError` at the first that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec.errors import JagcodecError

AnyArray: TypeAlias = npt.NDArray[Any]


class MismatchError(JagcodecError):
    """Something arrived changed; `path` names the column and the row."""


def _mismatch(path: str, expected: object, found: object) -> MismatchError:
    return MismatchError("bad_value", path, f"expected {expected}, found {found}")


def check_columns(expected: Mapping[str, AnyArray], found: Mapping[str, Any]) -> dict[str, int]:
    """Compare all columns of a batch: names, order, dtypes, shapes, and every cell.

    Returns:
        Name to number of cells compared; a row of Python objects counts as one.

    Raises:
        MismatchError: Something differs.

    Example:
        >>> ids = np.array([[5, 6], [7, 8]])
        >>> check_columns({"ids": ids}, {"ids": ids.copy()})
        {'ids': 4}
        >>> check_columns({"ids": ids}, {"ids": np.array([[5, 6], [7, 9]])})
        Traceback (most recent call last):
        ...
        examples.grpo_demo.check.MismatchError: ids, row 1, token 1: expected 8 (0x8), found 9 (0x9)
    """
    if list(expected) != list(found):
        raise _mismatch("columns", ", ".join(expected), ", ".join(found) or "none")
    compared: dict[str, int] = {}
    for name, column in expected.items():
        check = _check_objects if column.dtype == object else _check_rectangle
        compared[name] = check(name, column, found[name])
    return compared


def check_rows(
    column: str, expected: list[AnyArray], values: AnyArray, lengths: AnyArray
) -> dict[str, int]:
    """Compare a jagged column, row i of which is the next ``lengths[i]`` of `values`.

    Returns and raises as `check_columns`.

    Example:
        >>> rows = [np.array([1, 2]), np.array([3])]
        >>> check_rows("ids", rows, np.array([1, 2, 3]), np.array([2, 1]))
        {'ids': 3}
    """
    wanted = [len(row) for row in expected]
    if lengths.tolist() != wanted:
        if len(lengths) != len(wanted):
            raise _mismatch(column, f"{len(wanted)} rows", f"{len(lengths)} rows")
        row = int(np.flatnonzero(lengths != wanted)[0])
        raise _mismatch(f"{column}, row {row}", f"{wanted[row]} tokens", f"{lengths[row]} tokens")
    ends = np.cumsum(wanted)

    def place(cell: int) -> str:
        row = int(np.searchsorted(ends, cell, side="right"))
        return f"{column}, row {row}, token {cell - int(ends[row]) + wanted[row]}"

    return {column: _check_cells(column, np.concatenate(expected), values, place)}


def _check_rectangle(column: str, expected: AnyArray, found: Any) -> int:
    def place(cell: int) -> str:
        row, *token = (int(i) for i in np.unravel_index(cell, expected.shape))
        return f"{column}, row {row}" + (f", token {token[0]}" if token else "")

    if not isinstance(found, np.ndarray):
        raise _mismatch(column, "an array", f"a {type(found).__name__}")
    return _check_cells(column, expected, found, place)


def _check_cells(
    column: str, expected: AnyArray, found: AnyArray, place: Callable[[int], str]
) -> int:
    for what in ("dtype", "shape"):
        if getattr(found, what) != getattr(expected, what):
            raise _mismatch(
                column, f"{what} {getattr(expected, what)}", f"{what} {getattr(found, what)}"
            )
    # As unsigned integers: NaN is no exception then, and -0.0 is not 0.0.
    bits = [
        np.ascontiguousarray(cells).view(f"u{cells.itemsize}").reshape(-1)
        for cells in (expected, found)
    ]
    differing = bits[0] != bits[1]
    if differing.any():
        cell = int(np.argmax(differing))
        shown = (
            f"{cells.reshape(-1)[cell]} ({int(words[cell]):#x})"
            for cells, words in zip((expected, found), bits, strict=True)
        )
        raise _mismatch(place(cell), *shown)
    return int(differing.size)


def _check_objects(column: str, expected: AnyArray, found: Any) -> int:
    if not isinstance(found, np.ndarray) or found.dtype != object:
        raise _mismatch(column, "an object array", f"a {type(found).__name__}")
    if found.shape != expected.shape:
        raise _mismatch(column, f"shape {expected.shape}", f"shape {found.shape}")
    for row, (wanted, item) in enumerate(zip(expected, found, strict=True)):
        _check_object(f"{column}, row {row}", "", wanted, item)
    return len(expected)


def _check_object(path: str, inside: str, expected: Any, found: Any) -> None:
    where = f"{path}, {inside}" if inside else path
    if type(found) is not type(expected):
        raise _mismatch(where, f"a {type(expected).__name__}", f"a {type(found).__name__}")
    if isinstance(expected, dict):
        if repr(list(found)) != repr(list(expected)):
            raise _mismatch(where, f"the keys {list(expected)}", list(found))
        for key, value in expected.items():
            _check_object(path, f"{inside}[{key!r}]", value, found[key])
    elif isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            raise _mismatch(where, f"{len(expected)} items", len(found))
        for i, (wanted, item) in enumerate(zip(expected, found, strict=True)):
            _check_object(path, f"{inside}[{i}]", wanted, item)
    elif repr(found) != repr(expected):
        # By repr, which is exact for every literal, and tells -0.0 from 0.0 but not nan from nan.
        raise _mismatch(where, f"{expected!r:.60}", f"{found!r:.60}")
