"""`assign_rows`: rows to micro-batches, and these to ranks, all as numbers.

`Rules` has the arguments of `plan_micro_batches` that do not depend on the rows. `assign_rows`
reads the others, groups rows into loads, has `balance.spread` put these into micro-batches, and
returns an `Assignment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import (
    FOREIGN_ERRORS,
    array_of,
    check_option,
    items_of,
    require_int,
    result_of,
)
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.forward.balance import Bins, Capacity, FloatArray, Loads, first_fit, spread
from jagcodec.forward.layout import rounded_up
from jagcodec.memory.arrays import IntArray

Cost: TypeAlias = tuple[float, float] | Callable[[IntArray], Any] | None
"""What to balance: tokens; ``(a, b)`` for ``a * n + b * n**2``; or a function of (N,) lengths."""

Fill: TypeAlias = Literal["error", "repeat"]
"""What to do if there are fewer rows than micro-batches."""


_MOST_RANKS = 1 << 20
"""More than any cluster has. The bound is needed because a rank takes memory even without rows."""

_MOST_MICRO_BATCHES = 1 << 24


class Assignment(NamedTuple):
    """The rows of all micro-batches end to end: rank by rank, step by step."""

    order: IntArray  # (M,) rows, rising within a micro-batch
    bounds: IntArray  # (micro-batches + 1,) where each begins in `order`, and the end
    is_copy: npt.NDArray[np.bool_]  # (M,) whether each is a copy, which only fills a micro-batch
    cells: IntArray  # (micro-batches,) cells of each, after padding
    costs: FloatArray  # (micro-batches,)

    def in_order(self, numbers: IntArray) -> Assignment:
        """The same micro-batches, in the order of these numbers."""
        each = [slice(self.bounds[i], self.bounds[i + 1]) for i in numbers.tolist()]
        index = np.concatenate([np.arange(len(self.order))[rows] for rows in each] or [numbers])
        bounds = np.append(0, np.diff(self.bounds)[numbers].cumsum())
        order, is_copy = self.order[index], self.is_copy[index]
        return Assignment(order, bounds, is_copy, self.cells[numbers], self.costs[numbers])


@dataclass(frozen=True)
class Rules:
    """The arguments of `plan_micro_batches` that do not depend on the rows, and what they imply."""

    ranks: int = 1
    max_tokens: int | None = None
    row_multiple: int = 1
    total_multiple: int = 1
    rows_per_batch: int | None = None
    count: int | None = None
    count_multiple: int = 1
    fill: Fill = "error"
    least: int = 1  # the fewest micro-batches of each rank, if there are rows
    where: str = "plan_micro_batches"

    def __post_init__(self) -> None:
        limits = "max_tokens", "rows_per_batch", "count"
        set_limits = [name for name in limits if getattr(self, name) is not None]
        for name in ("ranks", "row_multiple", "total_multiple", "count_multiple", *set_limits):
            number = require_int(getattr(self, name), 1, f"{self.where}({name})")
            object.__setattr__(self, name, number)
        check_option(self.fill, get_args(Fill), f"{self.where}(fill)")
        if self.ranks > _MOST_RANKS:
            detail = f"expected at most {_MOST_RANKS} ranks, found {brief(self.ranks)}"
            raise ArgumentError("bad_option", f"{self.where}(ranks)", detail)
        if not set_limits:
            detail = f"expected at least one of {', '.join(limits)}, found none"
            raise ArgumentError("bad_option", self.where, detail)
        if self.max_tokens is not None and self.max_tokens < self.total_multiple:
            detail = f"expected {self.total_multiple} or more, because total_multiple pads every "
            detail += f"micro-batch to that, found {self.max_tokens}"
            raise ArgumentError("bad_option", f"{self.where}(max_tokens)", detail)

    def padded(self, lengths: IntArray) -> IntArray:
        """Cells of each row: its length rounded up to `row_multiple`."""
        longest = int(lengths.max(initial=0))
        if (longest + self.row_multiple) * len(lengths) + self.total_multiple >= 1 << 63:
            detail = (
                f"expected lengths that add up below 2**63 after padding, found a row of {longest}"
            )
            raise ArgumentError("bad_length", f"{self.where}(lengths)", detail)
        padded: IntArray = rounded_up(lengths, self.row_multiple)
        return padded

    def capacity(self, loads: Loads) -> Capacity:
        """The capacity of one micro-batch, whose total is rounded up to `total_multiple`."""
        cells, rows = sum(loads.cells), sum(loads.rows)
        if self.max_tokens is not None:
            cells = min(cells, self.max_tokens // self.total_multiple * self.total_multiple)
        return Capacity(cells, rows if self.rows_per_batch is None else self.rows_per_batch)

    def count_for(self, bin_count: int) -> int:
        """How many micro-batches each rank gets, if all rows fit into `bin_count` of them."""
        each = rounded_up(bin_count, self.ranks) // self.ranks
        needed: int = rounded_up(max(each, self.least if bin_count else 0), self.count_multiple)
        count = needed if self.count is None else self.count
        if count > _MOST_MICRO_BATCHES // self.ranks:
            detail = f"expected at most {_MOST_MICRO_BATCHES} micro-batches for all ranks, found "
            detail += f"{brief(count)} for each of {self.ranks}"
            raise ArgumentError("too_large", f"{self.where}(count)", detail)
        if self.count is None:
            return needed
        if self.count < needed or self.count % self.count_multiple:
            detail = f"expected {needed} or more micro-batches for each rank, "
            if self.count_multiple > 1:
                detail += f"a multiple of count_multiple={self.count_multiple}, "
            detail += f"found {self.count}"
            raise ArgumentError("bad_option", f"{self.where}(count)", detail)
        return self.count

    def rows_per_step(self, rows: int, count: int, grouped: bool) -> int | None:
        """Rows of every step but the last, if `rows_per_batch` alone decides them; None otherwise.

        `rows_per_batch` is only a maximum if:

        * tokens or groups decide, too;
        * there are more micro-batches than it needs; or
        * some rank would get no row for its last step.
        """
        rows_per_step = self.rows_per_batch
        if rows_per_step is None or self.max_tokens is not None or grouped:
            return None
        fewest = rounded_up(rows, self.ranks * rows_per_step) // (self.ranks * rows_per_step)
        if count == 0 or count != fewest:
            return None
        is_enough = rows >= self.loads_needed(count, rows_per_step) or self.fill == "repeat"
        return rows_per_step if is_enough else None

    def loads_needed(self, count: int, rows_per_step: int | None) -> int:
        """The fewest rows or groups for which no micro-batch is empty."""
        return self.ranks * ((rows_per_step or 1) * (count - 1) + 1) if count else 0

    def steps(
        self, capacity: Capacity, rows: int, count: int, rows_per_step: int | None
    ) -> list[list[Capacity]]:
        """The capacity of each step, by rank."""
        if rows_per_step is None:
            return [[capacity] * count] * self.ranks
        full = [capacity._replace(rows=rows_per_step, fewest_loads=rows_per_step)] * (count - 1)
        each, more = divmod(rows - self.ranks * rows_per_step * (count - 1), self.ranks)
        last = [each + (rank < more) for rank in range(self.ranks)]
        return [[*full, capacity._replace(rows=number, fewest_loads=number)] for number in last]


class RowsAndCopies(NamedTuple):
    """The rows of a batch, and copies of them that fill micro-batches; M in total."""

    number: IntArray  # (M,) the row that each is, or is a copy of
    cells: IntArray  # (M,) after padding
    cost: FloatArray  # (M,)
    load_of_row: IntArray  # (M,) the load of each: its group, or a load of this row alone

    def with_copies(self, row: int, copies: int) -> RowsAndCopies:
        """These rows, and so many copies of one row. The copies belong to no group."""
        index = np.append(np.arange(len(self.number)), np.full(copies, row))
        loads = np.append(self.load_of_row, self.load_of_row.max() + 1 + np.arange(copies))
        return RowsAndCopies(self.number[index], self.cells[index], self.cost[index], loads)

    def loads(self, rules: Rules) -> Loads:
        """The loads of these rows. Without `max_tokens`, they have 0 cells."""
        load_count = int(self.load_of_row.max(initial=-1)) + 1
        cells = np.zeros(load_count, dtype=np.int64)
        np.add.at(cells, self.load_of_row, self.cells if rules.max_tokens is not None else 0)
        rows = np.bincount(self.load_of_row, minlength=load_count)
        cost = np.bincount(self.load_of_row, self.cost, minlength=load_count)
        return Loads(cells.tolist(), rows.tolist(), cost.tolist())


def assign_rows(
    lengths: IntArray, rules: Rules, groups: Any = None, cost: Any = None
) -> Assignment:
    """Assign rows of these lengths to micro-batches that keep the rules."""
    ids, load_of_row = _read_groups(groups, len(lengths), f"{rules.where}(groups)")
    costs = _costs(cost, lengths, f"{rules.where}(cost)")
    rows = RowsAndCopies(np.arange(len(lengths)), rules.padded(lengths), costs, load_of_row)
    loads = rows.loads(rules)
    capacity = rules.capacity(loads)
    _check_each_fits(loads, capacity, rules, lengths, ids)
    packed = first_fit(loads, range(len(loads.rows)), capacity)
    count = rules.count_for(len(packed))
    rows_per_step = rules.rows_per_step(len(lengths), count, ids is not None)
    missing = rules.loads_needed(count, rows_per_step) - len(loads.rows)
    if missing > 0:
        _check_may_repeat(len(loads.rows), missing, rules, "row" if ids is None else "group")
        rows = rows.with_copies(int(lengths.argmin()), missing)
        loads = rows.loads(rules)
    by_rank = spread(loads, packed, rules.steps(capacity, len(rows.number), count, rows_per_step))
    number = _micro_batch_numbers(loads, by_rank, rules)[rows.load_of_row]  # of each row
    order = np.lexsort((rows.number, number))
    bounds = np.append(0, np.bincount(number).cumsum())
    cells = np.add.reduceat(rows.cells[order], bounds[:-1])
    sums = np.bincount(number, rows.cost, minlength=len(cells))  # adds row by row
    return Assignment(
        order=rows.number[order],
        bounds=bounds,
        is_copy=order >= len(lengths),
        cells=rounded_up(cells, rules.total_multiple),
        costs=sums.astype(np.float64),
    )


# --- groups and costs --------------------------------------------------------------------------


def _read_groups(groups: Any, rows: int, path: str) -> tuple[list[Any] | None, IntArray]:
    """The ids of groups, in the order of their first rows, and (N,) the group of each row."""
    if groups is None:
        return None, np.arange(rows)
    expected = "(N,) hashable ids, one for each row"
    with suppress(AttributeError, *FOREIGN_ERRORS):
        # A payload of tensordict wraps `data`. Recognise it by attributes, without an import.
        if hasattr(groups, "batch_size") and isinstance(groups.data, np.ndarray):
            groups = groups.data
    with suppress(AttributeError, *FOREIGN_ERRORS):
        groups = groups.tolist()  # an array or a tensor
    ids = items_of(groups, path, expected)
    numbers: dict[Any, int] = {}
    try:
        ids = [getattr(x, "data", x) if hasattr(x, "batch_size") else x for x in ids]
        # Tensors hash by identity: read their numbers, or each would be a group.
        ids = [each.item() if hasattr(each, "item") else each for each in ids]
        group_of_row = [numbers.setdefault(each, len(numbers)) for each in ids]
    except FOREIGN_ERRORS as error:
        detail = f"expected {expected}, found {describe(groups)}: {error!s:.200}"
        raise ArgumentTypeError("bad_type", path, detail) from error
    if len(ids) != rows:
        detail = f"expected one id for each of {rows} rows, found {len(ids)}"
        raise ArgumentError("row_mismatch", path, detail)
    return [*numbers], np.array(group_of_row, dtype=np.int64)


def _costs(cost: Any, lengths: IntArray, path: str) -> FloatArray:
    """(N,) costs of the rows."""
    if callable(cost):
        returned = result_of(cost, [lengths.copy()], path)
        costs = _real_numbers(returned, lengths.shape)
        if costs is None:
            detail = f"expected a function that returns ({len(lengths)},) numbers, found "
            with suppress(AttributeError, *FOREIGN_ERRORS):
                detail += f"{returned.shape} "
            detail += describe(returned)
            raise ArgumentError("bad_shape", path, detail)
    else:
        pair = _real_numbers((1, 0) if cost is None else cost, (2,))
        if pair is None or not ((pair >= 0) & (pair < np.inf)).all():
            detail = (
                "expected None, a pair of finite numbers of 0 or more, or a function, "
                f"found {brief(cost)}"
            )
            raise ArgumentError("bad_option", path, detail)
        tokens = lengths.astype(np.float64)
        with np.errstate(over="ignore"):
            costs = pair[0] * tokens + pair[1] * (tokens * tokens)
    is_bad = ~((costs >= 0) & (costs < 2.0**_COST_BITS))
    if is_bad.any():
        row = int(is_bad.argmax())
        detail = f"expected a cost of 0 or more, below 2**{_COST_BITS}, found {costs[row]}"
        raise ArgumentError("bad_option", f"{path}, row {row}", detail)
    return costs


_COST_BITS = 960
"""A cost is below 2**960, so that the costs of 2**63 rows add up to a finite number."""


def _real_numbers(value: Any, shape: tuple[int, ...]) -> FloatArray | None:
    """Real numbers of this shape; None for any other value."""
    try:
        array = array_of(value)
    except FOREIGN_ERRORS:  # on a device, or lists differ in length
        return None
    if array.dtype.kind not in "iuf" or array.shape != shape:
        return None
    return array.astype(np.float64)


# --- errors ------------------------------------------------------------------------------------


def _check_each_fits(
    loads: Loads, capacity: Capacity, rules: Rules, lengths: IntArray, ids: list[Any] | None
) -> None:
    """Refuse a row or a group that no micro-batch has space for."""
    for load, (cells, rows) in enumerate(zip(loads.cells, loads.rows, strict=True)):
        if cells <= capacity.cells and rows <= capacity.rows:
            continue
        path = f"{rules.where}(lengths), row {load}"  # without groups, load i is row i
        if ids is not None:
            path = f"{rules.where}(groups), group {brief(ids[load])}"
        if cells <= capacity.cells:
            detail = f"expected at most rows_per_batch={rules.rows_per_batch} rows, found {rows}"
            raise ArgumentError("bad_length", path, detail)
        total = rounded_up(cells, rules.total_multiple)
        detail = f"expected at most max_tokens={rules.max_tokens} tokens, found "
        if ids is None:
            length = int(lengths[load])
            detail += f"{length}, padded to {total}" if total != length else f"{length}"
        else:
            detail += f"{total} in {rows} rows after padding"
        raise ArgumentError("row_too_long", path, detail)


def _check_may_repeat(count: int, missing: int, rules: Rules, what: str) -> None:
    """Refuse too few rows, unless copies may fill micro-batches."""
    if rules.fill == "repeat" and count:
        return
    detail = f"expected {count + missing} {what}s or more, because no micro-batch may be empty, "
    detail += f"found {count}: {missing} missing"
    detail += "; pass fill='repeat' for copies of the shortest row" if count else ""
    argument = "lengths" if what == "row" else "groups"
    raise ArgumentError("row_mismatch", f"{rules.where}({argument})", detail)


# --- the result ---------------------------------------------------------------------------------


def _micro_batch_numbers(loads: Loads, by_rank: Sequence[Bins], rules: Rules) -> IntArray:
    """(loads,) the micro-batch of each; a rank's most expensive micro-batches come first.

    With `rows_per_batch`, micro-batches of fewer rows come after the others.
    """

    def place(members: list[int]) -> tuple[bool, float]:
        fewer = sum(loads.rows[load] for load in members) < (rules.rows_per_batch or 0)
        return fewer, -loads.cost_of(members)

    number = np.empty(len(loads.rows), dtype=np.int64)
    ordered = [members for bins in by_rank for members in sorted(bins, key=place)]
    for i, members in enumerate(ordered):
        number[members] = i
    return number
