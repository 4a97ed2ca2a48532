"""Row indices: slices, integers and booleans become rows; ranges that meet are joined."""

from __future__ import annotations

from typing import Any

import numpy as np

from jagcodec._arguments import FOREIGN_ERRORS, host_array
from jagcodec.errors import ArgumentIndexError, ArgumentTypeError, brief
from jagcodec.memory.arrays import IntArray
from jagcodec.rows.row_splits import Chosen


def choose_rows(index: Any, rows: int, where: str) -> Chosen:
    """The rows that an index chooses, as numbers from 0 to ``rows - 1``."""
    if isinstance(index, range) and index.step == 1 and 0 <= index.start <= index.stop <= rows:
        return index
    if isinstance(index, slice):
        try:
            chosen = range(rows)[index]
        except FOREIGN_ERRORS as error:
            detail = f"expected a slice of integers, its step not 0, found {_slice_text(index)}"
            raise ArgumentTypeError("bad_type", where, detail) from error
        if chosen.step == 1:
            return range(chosen.start, max(chosen.start, chosen.stop))
        picked: IntArray = np.arange(rows)[index].copy()
        return picked
    array = host_array(index, where, f"a slice, integers, or {rows} booleans")
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.dtype == bool and array.shape == (rows,):
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu" or array.ndim > 1:
        detail = (
            f"expected a slice, integers, or {rows} booleans, "
            f"found {array.dtype} of shape {array.shape}"
        )
        raise ArgumentTypeError("bad_type", where, detail)
    if array.dtype == np.uint64:  # only uint64 has values that int64 lacks
        array = np.minimum(array, np.iinfo(np.int64).max)
    array = np.atleast_1d(array).astype(np.int64)
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low < -rows or high >= rows > 0 or (not rows and len(array)):
        wrong = array[(array < -rows) | (array >= rows)]
        detail = f"expected rows of 0 to {rows - 1}, found {wrong[0]}"
        raise ArgumentIndexError("no_such_row", where, detail)
    return np.where(array < 0, array + rows, array) if low < 0 else array


def _slice_text(index: slice) -> str:
    return ":".join(map(brief, (index.start, index.stop, index.step)))


def joined_ranges(starts: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Ranges that meet become one.

    Returns where they begin and end, and for each input how far it moves if the joined ranges are
    put end to end.
    """
    order = np.argsort(starts, kind="stable")
    begins, reach = starts[order], np.maximum.accumulate(ends[order])
    begins_new = np.append(True, begins[1:] > reach[:-1])
    firsts, lasts = begins[begins_new], reach[np.append(begins_new[1:], True)]
    sizes = lasts - firsts
    moves = sizes.cumsum() - sizes - firsts
    return firsts, lasts, moves[np.searchsorted(firsts, starts, side="right") - 1]


def joined_rows(rows: Chosen) -> list[range]:
    """Chosen rows as ranges; neighbouring rows share one."""
    if isinstance(rows, range):
        return [rows]
    parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
