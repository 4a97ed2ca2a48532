"""`plan_micro_batches`, `MicroBatches`: rows in micro-batches, and results back in order.

A plan imports neither torch nor tensordict. `restore` and `pack` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import ODD, integer_of, items_of
from jagcodec.errors import ArgumentError, ArgumentIndexError, brief
from jagcodec.packing.lengths import IntArray, length_array
from jagcodec.packing.micro_batches import Assignment, Cost, Fill, Rules, assign_rows

if TYPE_CHECKING:
    from jagcodec.ragged.lengths import Lengths


def plan_micro_batches(
    lengths: Lengths,
    ranks: int = 1,
    *,
    max_tokens: int | None = None,
    row_multiple: int = 1,
    total_multiple: int = 1,
    rows_per_batch: int | None = None,
    count: int | None = None,
    count_multiple: int = 1,
    groups: Any = None,
    cost: Cost = None,
    fill: Fill = "error",
) -> MicroBatches:
    """Which rows share a micro-batch: the same number on every rank, none of them too large.

    Example:
        >>> from jagcodec import plan_micro_batches
        >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
        >>> [[rows.tolist() for rows in steps] for steps in batches]
        [[[5], [3, 4]], [[0], [1, 2]]]

    Args:
        lengths: (N,) tokens per row: a list, an array, a tensor, or a jagged tensor, whose row
            lengths count.
        ranks: How many data-parallel ranks there are.
        max_tokens: The most cells of a micro-batch, its pads included.
        row_multiple: Every row is padded to a multiple of this, as by `plan_packing`.
        total_multiple: The total of a micro-batch is padded to a multiple of this.
        rows_per_batch: Rows of a micro-batch; the last step may hold fewer. With `max_tokens` or
            `groups`, or if there are more micro-batches than it needs, the most rows of one.
        count: Micro-batches of each rank, exactly, such as the maximum over several nodes.
        count_multiple: Their number is a multiple of this, as virtual pipeline stages need.
        groups: (N,) hashable ids: rows of one group stay in one micro-batch.
        cost: What ranks should have the same sum of: tokens (None), ``a * n + b * n**2`` of rows of
            n tokens (a pair), or what a function of the (N,) lengths returns, (N,) numbers.
        fill: If there are fewer rows (or groups) than micro-batches: "error", or "repeat" for
            copies of the shortest row, one in each micro-batch that would be empty.

    Returns:
        A `MicroBatches`. It has as few micro-batches as first-fit-decreasing needs. Rows go to
        ranks, most expensive first, each to the one with the lowest sum. Where that leaves no
        room under the caps, they are packed by first-fit-decreasing instead. The result depends on
        the arguments alone, so every rank may compute its own.

    Raises:
        ArgumentError: A row or a group exceeds a cap alone (it is named); `count` is too small or
            not a multiple; there are too few rows; none of `max_tokens`, `rows_per_batch` and
            `count` is given; or a length, a cost or a number is out of range.
        ArgumentTypeError: Lengths are not integers, or ids are not hashable.
    """
    rules = Rules(
        ranks=ranks,
        max_tokens=max_tokens,
        row_multiple=row_multiple,
        total_multiple=total_multiple,
        rows_per_batch=rows_per_batch,
        count=count,
        count_multiple=count_multiple,
        fill=fill,
    )
    tokens = _lengths(lengths, "plan_micro_batches(lengths)")
    return MicroBatches(tokens, rules, assign_rows(tokens, rules, groups, cost))


def _lengths(lengths: Any, path: str) -> IntArray:
    """(N,) row lengths; only a tensor needs torch to be read."""
    if not hasattr(lengths, "is_nested"):
        return length_array(lengths, path)
    from jagcodec.ragged.lengths import read_rows

    return read_rows(lengths, path).lengths


class MicroBatches(Sequence[list[IntArray]]):
    """The rows of each micro-batch; made by `plan_micro_batches`.

    ``batches[rank][step]`` are the rows of one, (rows,) int64 and rising. Each rank has the same
    number of them, the most expensive ones first. ``len(batches)`` is the number of ranks.

    Attributes:
        order: (M,) int64 rows of all micro-batches end to end: rank by rank, step by step. M > N if
            there are copies.
        inverse: (N,) int64: where each row is in `order`, and not a copy of it.

    Example:
        >>> import torch
        >>> from jagcodec import plan_micro_batches
        >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
        >>> results = [torch.from_numpy(rows) * 10 for steps in batches for rows in steps]
        >>> batches.restore(results).tolist()
        [0, 10, 20, 30, 40, 50]
    """

    def __init__(self, lengths: IntArray, rules: Rules, assignment: Assignment) -> None:
        """Use `plan_micro_batches`."""
        self._lengths, self._rules, self._assignment = lengths, rules, assignment
        self.order: IntArray = assignment.order
        self._count = len(assignment.costs) // rules.ranks  # of each rank
        each = [assignment.order[rows] for rows in self._places(0, rules.ranks)]
        starts = range(0, rules.ranks * max(self._count, 1), max(self._count, 1))
        self._steps = [each[start : start + self._count] for start in starts]
        self.inverse: IntArray = self._rising(0, rules.ranks)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, rank: int) -> list[IntArray]: ...

    @overload
    def __getitem__(self, rank: slice) -> list[list[IntArray]]: ...

    def __getitem__(self, rank: Any) -> Any:
        index = rank if isinstance(rank, slice) else integer_of(rank)
        try:
            return self._steps[index]  # type: ignore[index]
        except (IndexError, *ODD):
            raise _outside("MicroBatches", "rank", rank, len(self)) from None

    def __repr__(self) -> str:
        rows, ranks = len(self._lengths), len(self)
        return f"MicroBatches(rows={rows}, ranks={ranks}, micro_batches_per_rank={self._count})"

    def is_repeat(self, rank: int, step: int) -> npt.NDArray[np.bool_]:
        """(rows,) bool: which rows of a micro-batch are copies, so that their loss is masked."""
        where = "MicroBatches.is_repeat"
        rank = self._checked_rank(rank, where)
        known = integer_of(step)
        if known is None or not 0 <= known < self._count:
            raise _outside(where, "step", step, self._count)
        return self._assignment.is_copy[self._places(rank, rank + 1)[known]]

    def restore(self, results: Iterable[Any], rank: int | None = None) -> Any:
        """The results of all micro-batches in the order of the rows; copies are dropped.

        Example:
            >>> from jagcodec import plan_micro_batches
            >>> batches = plan_micro_batches([3, 1, 2], ranks=2, rows_per_batch=1, fill="repeat")
            >>> [[rows.tolist() for rows in steps] for steps in batches]
            [[[0], [1]], [[2], [1]]]
            >>> batches.restore([["a"], ["copy"], ["c"], ["b"]])
            ['a', 'b', 'c']
            >>> batches.restore([["c"], ["b"]], rank=1)
            ['b', 'c']

        Args:
            results: A batch or a column for each micro-batch, in the order of `order`: batches of
                any form; or tensors, jagged tensors, arrays, or lists with an item for each row.
            rank: Only the results of this rank.

        Returns:
            A batch or a column of the same kind, as from `concat_rows`: rows 0 to N - 1, or those
            of the rank, rising.

        Raises:
            ArgumentError: There are not as many results as micro-batches, or one has another number
                of rows than its micro-batch (it is named).
            ArgumentTypeError: A result is neither a batch nor a column, or their kinds differ.
        """
        where = "MicroBatches.restore"
        if rank is not None:
            rank = self._checked_rank(rank, where)
        first, last = (0, len(self)) if rank is None else (rank, rank + 1)
        sizes = [places.stop - places.start for places in self._places(first, last)]
        listed = items_of(results, f"{where}(results)", "a list of batches or columns")
        if len(listed) != len(sizes) or not sizes:
            detail = f"expected {len(sizes)} results, one for each micro-batch, found {len(listed)}"
            raise ArgumentError("row_mismatch", f"{where}(results)", detail)
        return _put_back(listed, sizes, self._rising(first, last), where)

    def report(self) -> dict[str, int | float]:
        """What the plan comes to.

        Example:
            >>> from jagcodec import plan_micro_batches
            >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], 2, max_tokens=8, row_multiple=2)
            >>> batches.report()["micro_batches_per_rank"], round(batches.report()["fill"], 2)
            (2, 0.88)

        Returns:
            Numbers by name: rows, copies, tokens, ranks, micro_batches, micro_batches_per_rank;
            cells, which are tokens and pads; fill, the share of cells that are tokens of rows;
            and the cost of the heaviest rank and of the heaviest micro-batch, over the mean.
        """
        tokens, cells = int(self._lengths.sum()), int(self._assignment.cells.sum())
        costs = self._assignment.costs
        return {
            "rows": len(self._lengths),
            "copies": len(self.order) - len(self._lengths),
            "tokens": tokens,
            "ranks": len(self),
            "micro_batches": len(costs),
            "micro_batches_per_rank": self._count,
            "cells": cells,
            "fill": tokens / cells if cells else 1.0,
            "heaviest_rank": _over_mean(costs.reshape(len(self), self._count).sum(axis=1)),
            "heaviest_micro_batch": _over_mean(costs),
        }

    def _places(self, first: int, last: int) -> list[slice]:
        """Where the micro-batches of these ranks are in `order`."""
        bounds = self._assignment.bounds[first * self._count : last * self._count + 1]
        return [slice(start, end) for start, end in pairwise(bounds.tolist())]

    def _rising(self, first: int, last: int) -> IntArray:
        """Where rows, rising, are among those of these ranks; copies are left out."""
        bounds = self._assignment.bounds
        own = slice(bounds[first * self._count], bounds[last * self._count])
        rows = np.flatnonzero(~self._assignment.is_copy[own])
        return rows[np.argsort(self.order[own][rows])]

    def _checked_rank(self, rank: Any, where: str) -> int:
        known = integer_of(rank)
        if known is None or not 0 <= known < len(self):
            raise _outside(where, "rank", rank, len(self))
        return known


def _put_back(results: list[Any], sizes: list[int], index: IntArray, where: str) -> Any:
    """Batches or columns of these numbers of rows, joined; then the rows of an index of these."""
    from jagcodec.batch.columns import concat_in_memory, is_batch, is_encoded, opened, row_count_of
    from jagcodec.batch.join import join_rows
    from jagcodec.ragged.row_splits import RowSplitsPool
    from jagcodec.ragged.select import select_leaf

    columns = not is_batch(results[0])
    batches = []
    for i, (result, size) in enumerate(zip(results, sizes, strict=True)):
        path = f"{where}(results[{i}])"
        batches.append(opened({"result": result} if columns else result, path))
        found = row_count_of(batches[i], path)
        if found != size:
            detail = f"expected {size} rows, like its micro-batch, found {found}"
            raise ArgumentError("row_mismatch", path, detail)
    if all(map(is_encoded, batches)):
        return join_rows(batches, where).at(index)
    restored = select_leaf(concat_in_memory(batches, where), index, RowSplitsPool(), where)
    return restored["result"] if columns else restored


def _outside(where: str, what: str, found: Any, many: int) -> ArgumentIndexError:
    detail = f"expected a {what} of 0 to {many - 1}, found {brief(found)}"
    return ArgumentIndexError("bad_option", f"{where}({what})", detail)


def _over_mean(costs: npt.NDArray[np.float64]) -> float:
    total = float(costs.sum())
    return float(costs.max()) * len(costs) / total if total else 1.0
