"""`plan_layout`, `plan_buffers`: layouts of buffers for the arguments of a caller.

`plan_layout` serves `plan_packing`, and `plan_buffers` serves micro-batches. They check arguments,
pad rows, place tails, and refuse buffers that the ranks cannot share. `_Totals` decides how many
cells a buffer has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from jagcodec._arguments import check_option, require_int
from jagcodec.errors import ArgumentError
from jagcodec.forward.layout import CpLayout, PackLayout, PaddedRows, Tail, rounded_up
from jagcodec.memory.arrays import IntArray
from jagcodec.rows.lengths import check_size


@dataclass(frozen=True)
class PackOptions:
    """The options of `plan_packing`, as callers pass them."""

    row_multiple: Any = 1
    total_multiple: Any = 1
    total: Any = None
    min_total: Any = 0
    tail: Any = None
    cp_size: Any = 1
    cp_layout: Any = "zigzag"


def plan_layout(lengths: IntArray, options: PackOptions, where: str) -> PackLayout:
    """The layout of rows of (N,) lengths, which are not negative; see `plan_packing`."""
    rows = len(lengths)
    all_rows = BufferRows(lengths, np.arange(rows), np.array([0, rows]), rows)
    return plan_buffers(all_rows, options, where).layout(0)


class BufferRows(NamedTuple):
    """M rows of a column, end to end: those of buffer 0, then those of the next, to B buffers."""

    lengths: IntArray  # (M,) tokens of each
    number: IntArray  # (M,) the row of the column that each is
    bounds: IntArray  # (B + 1,) where the rows of each buffer begin and end
    column_rows: int  # how many rows the column has


def plan_buffers(
    rows: BufferRows,
    options: PackOptions,
    where: str,
    *,
    made_by: str | None = None,
    each: str | None = None,
) -> PaddedRows:
    """The padded rows of each buffer, and its tail.

    The caller passed lengths and multiples to the function `made_by`, so errors about them name it;
    None means `where`. With `each`, errors name the buffer: ``{each} {number}``.
    """
    made_by = made_by or where
    multiple = require_int(options.row_multiple, 1, f"{made_by}(row_multiple)")
    cp_size = require_int(options.cp_size, 1, f"{where}(cp_size)")
    cp_layout = options.cp_layout
    if cp_size >= 1 << 31:
        detail = f"expected fewer than 2**31 ranks, found {cp_size}"
        raise ArgumentError("bad_option", f"{where}(cp_size)", detail)
    check_option(cp_layout, get_args(CpLayout), f"{where}(cp_layout)")
    padded = _pad_lengths(rows.lengths, rows.bounds, multiple, made_by)
    totals = _Totals(options, where, made_by)
    places = [f", {each} {i}" if each else "" for i in range(len(rows.bounds) - 1)]
    cells = _sums(padded, rows.bounds)
    counts = zip(cells.tolist(), places, strict=True)
    surplus = np.array([totals.of(count, place) for count, place in counts], np.int64) - cells
    padded_rows = _place_tails(
        PaddedRows(
            rows.number,
            rows.lengths,
            padded,
            rows.bounds,
            np.zeros(len(places), dtype=bool),
            cp_size,
            cp_layout,
        ),
        surplus,
        options.tail,
        rows.column_rows,
        [f"{where}(tail){place}" for place in places],
    )
    _check_chunks(padded_rows, multiple, totals, made_by, places)
    return padded_rows


def _place_tails(
    rows: PaddedRows, surplus: IntArray, tail: Tail | None, tail_number: int, paths: Sequence[str]
) -> PaddedRows:
    """The padded rows with a tail of `surplus` (B,) cells in each buffer that needs one.

    `tail_number` is the number of a separate tail. Errors about a buffer have its path.
    """
    has_tail = surplus > 0
    if not has_tail.any():
        return rows
    padded, ends = rows.padded.copy(), rows.bounds[1:]
    if tail == "last_row":
        for i in np.flatnonzero(has_tail & (np.diff(rows.bounds) == 0)).tolist():
            detail = f"expected 'own_row' for {surplus[i]} cells without rows, found 'last_row'"
            raise ArgumentError("bad_option", paths[i], detail)
        padded[ends[has_tail] - 1] += surplus[has_tail]
        return replace(rows, padded=padded)
    at = ends[has_tail]
    return replace(
        rows,
        number=np.insert(rows.number, at, tail_number),
        lengths=np.insert(rows.lengths, at, 0),
        padded=np.insert(padded, at, surplus[has_tail]),
        bounds=rows.bounds + np.append(0, has_tail.cumsum()),
        has_tail=has_tail,
    )


def _check_chunks(
    rows: PaddedRows, multiple: int, totals: _Totals, made_by: str, places: Sequence[str]
) -> None:
    """Refuse padded rows, or buffers, that cannot be cut into equal chunks for the ranks."""
    cp_size, cp_layout = rows.cp_size, rows.cp_layout
    if cp_size == 1:
        return
    unit = cp_size if cp_layout == "contiguous" else 2 * cp_size
    if cp_layout == "zigzag":
        for row in np.flatnonzero(rows.padded % unit).tolist():
            if rounded_up(rows.lengths.item(row), multiple) % unit == 0:
                continue  # it is uneven only because of the tail: an error of the total, below
            detail = f"expected padded rows of {unit} equal chunks, found {rows.padded[row]} cells"
            detail += f"; pass row_multiple={math.lcm(multiple, unit)}"
            path = f"{made_by}(row_multiple), row {rows.number[row]}"
            raise ArgumentError("bad_option", path, detail)
    cells = _sums(rows.padded, rows.bounds)
    for i in np.flatnonzero(cells % unit).tolist():
        path, remedy = totals.divided_by(unit, int(cells[i]))
        detail = f"expected a total of {unit} equal chunks for cp_size={cp_size} and "
        detail += f"cp_layout={cp_layout!r}, found {cells[i]} cells; pass {remedy}"
        raise ArgumentError("bad_option", path + places[i], detail)


def _sums(numbers: IntArray, bounds: IntArray) -> IntArray:
    """(B,) sums of the numbers between bounds."""
    sums: IntArray = np.diff(np.append(0, numbers.cumsum())[bounds])
    return sums


class _Totals:
    """The arguments of `plan_packing` that decide how many cells a buffer has."""

    def __init__(self, options: PackOptions, where: str, made_by: str) -> None:
        total, tail = options.total, options.tail
        self.path, self.multiple_path = f"{where}(total)", f"{made_by}(total_multiple)"
        self.multiple = require_int(options.total_multiple, 1, self.multiple_path)
        self.least = require_int(options.min_total, 0, f"{where}(min_total)")
        self.exact = None if total is None else require_int(total, 0, self.path)
        self.tail = tail
        is_given = {"total_multiple": self.multiple != 1, "min_total": self.least != 0}
        for name in (name for name in is_given if is_given[name] and total is not None):
            detail = f"expected total or {name}, found both; leave one out"
            raise ArgumentError("bad_option", self.path, detail)
        if tail is not None:
            check_option(tail, get_args(Tail), f"{where}(tail)")
        elif total is not None or any(is_given.values()):
            detail = "expected 'last_row' or 'own_row', which decides where the cells go that the "
            detail += "total needs beyond the rows, found None"
            raise ArgumentError("bad_option", f"{where}(tail)", detail)

    def of(self, cells: int, place: str) -> int:
        """The total of a buffer whose padded rows have so many cells; errors name its place."""
        total = self.exact
        if total is None:
            total = int(rounded_up(max(cells, self.least), self.multiple))
        if total < cells:
            detail = f"expected {cells} cells or more, which the padded rows have, found {total}; "
            detail += f"raise it by {cells - total}"
            raise ArgumentError("bad_option", self.path + place, detail)
        check_size(total, self.path + place)
        return total

    def divided_by(self, unit: int, total: int) -> tuple[str, str]:
        """The argument that makes the total a multiple of `unit`: its place, and what to pass."""
        if self.exact is not None:
            return self.path, f"total={rounded_up(total, unit)}"
        and_tail = "" if self.tail else " and a tail"
        return (
            self.multiple_path,
            f"total_multiple={math.lcm(self.multiple, unit)}{and_tail}",
        )


def _pad_lengths(lengths: IntArray, bounds: IntArray, multiple: int, where: str) -> IntArray:
    """The lengths, rounded up to the multiple."""
    if lengths.any():  # without tokens, any multiple fits
        most = int(_sums(lengths, bounds).max())
        check_size(max(most, multiple), f"{where}(lengths)")
    padded: IntArray = rounded_up(lengths, min(multiple, 1 << 31))
    return padded
