"""`plan_micro_batches`, `MicroBatches`: micro-batches of every rank, packed and put back.

`assignment.py` decides which rows share a micro-batch. Torch is imported when a batch is packed, or
results are put back, so a controller without it can plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from math import fsum
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import FOREIGN_ERRORS, int_or_none, items_of, require_int
from jagcodec._compiling import untraced
from jagcodec._dependencies import check_torch
from jagcodec.errors import ArgumentError, ArgumentIndexError, brief
from jagcodec.forward.assignment import Assignment, Cost, Fill, Rules, assign_rows
from jagcodec.forward.layout import CpLayout, Tail, rank_of
from jagcodec.forward.layout_arguments import BufferRows, PackOptions, plan_buffers
from jagcodec.forward.plan import PackPlan, lengths_and_packer
from jagcodec.memory.arrays import IntArray

if TYPE_CHECKING:
    from jagcodec.forward.packer import Packer
    from jagcodec.rows.lengths import Lengths
    from jagcodec.wire.read.any_batch import AnyBatch


@untraced
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
    """Group rows into micro-batches of limited size, the same number for every rank.

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
        rows_per_batch: The rows of a micro-batch; the last step may hold fewer. It is only the most
            rows that a micro-batch may hold with `max_tokens` or `groups`, if there are more
            micro-batches than it needs, or if too few rows are left for the last step of each rank
            (``fill="repeat"`` adds copies then).
        count: Micro-batches of each rank, exactly, such as the maximum over several nodes.
        count_multiple: Their number is a multiple of this, as virtual pipeline stages need.
        groups: (N,) hashable ids: rows of one group stay in one micro-batch.
        cost: What to balance over the ranks. None balances tokens; a pair (a, b) balances the cost
            ``a * n + b * n**2`` of rows of n tokens; a function takes the (N,) lengths and returns
            (N,) costs, the same ones on every rank.
        fill: If there are too few rows (or groups): "error", or "repeat" for copies of the shortest
            row, one in each micro-batch that would be empty.

    Returns:
        A `MicroBatches`. It has as few micro-batches as first-fit-decreasing needs. Rows go to
        ranks, most expensive first, each to the one with the lowest sum. Where that leaves a row
        without a place under the caps, they are packed by first-fit-decreasing instead. The result
        depends on the arguments alone, whatever the CPU, numpy or Python, so every rank may compute
        its own.

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
    tokens, packer = lengths_and_packer(lengths, "plan_micro_batches(lengths)")
    return MicroBatches(tokens, rules, assign_rows(tokens, rules, groups, cost), packer)


@untraced
class MicroBatches(Sequence[tuple[IntArray, ...]]):
    """The rows of each micro-batch; made by `plan_micro_batches`.

    ``batches[rank][step]`` has the rows of one micro-batch, (rows,) int64 and rising. Each rank has
    the same number of steps, the most expensive first; with `rows_per_batch`, steps of fewer rows
    come after the others. `in_order` gives a plan with another order. ``len(batches)`` is the
    number of ranks. These arrays, `order` and `inverse` are copies: writing to one changes neither
    the others nor the plan.

    Attributes:
        order: (M,) int64 rows of all micro-batches end to end: rank by rank, step by step. M > N if
            there are copies.
        inverse: (N,) int64: the place of each row in `order`, and never that of a copy.

    Example:
        >>> import torch
        >>> from jagcodec import plan_micro_batches
        >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
        >>> results = [torch.from_numpy(rows) * 10 for steps in batches for rows in steps]
        >>> batches.restore(results).tolist()
        [0, 10, 20, 30, 40, 50]
    """

    def __init__(
        self,
        lengths: IntArray,
        rules: Rules,
        assignment: Assignment,
        packer: Packer | None = None,
    ) -> None:
        """Use `plan_micro_batches`."""
        self._lengths, self._rules, self._assignment = lengths, rules, assignment
        self._packer = packer
        self.order: IntArray = assignment.order.copy()
        self._count = len(assignment.costs) // rules.ranks  # micro-batches of each rank
        each = [assignment.order[places].copy() for places in self._slices_in_order(0, rules.ranks)]
        n = self._count
        self._steps = tuple(tuple(each[rank * n : (rank + 1) * n]) for rank in range(rules.ranks))
        self.inverse: IntArray = self._places_by_row(0, rules.ranks)

    def __reduce__(self) -> Any:
        return MicroBatches, (self._lengths, self._rules, self._assignment)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, rank: int) -> tuple[IntArray, ...]: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[tuple[IntArray, ...], ...]: ...

    def __getitem__(self, rank: Any) -> Any:
        index = rank if isinstance(rank, slice) else int_or_none(rank)
        try:
            return self._steps[index]  # type: ignore[index]
        except (IndexError, *FOREIGN_ERRORS):
            raise _outside("MicroBatches", "rank", rank, len(self)) from None

    def __repr__(self) -> str:
        rows, ranks = len(self._lengths), len(self)
        return f"MicroBatches(rows={rows}, ranks={ranks}, micro_batches_per_rank={self._count})"

    def is_repeat(self, rank: int, step: int) -> npt.NDArray[np.bool_]:
        """(rows,) bool: which rows of a micro-batch are copies. Mask their loss."""
        where = "MicroBatches.is_repeat"
        rank = self._read_rank(rank, where)
        number = int_or_none(step)
        if number is None or not 0 <= number < self._count:
            raise _outside(where, "step", step, self._count)
        return self._assignment.is_copy[self._slices_in_order(rank, rank + 1)[number]].copy()

    def pack(
        self,
        batch: AnyBatch,
        rank: int = 0,
        *,
        total: int | None = None,
        tail: Tail | None = None,
        cp_rank: int | None = None,
        cp_size: int = 1,
        cp_layout: CpLayout = "zigzag",
        pad_value_dict: Mapping[Any, Any] | None = None,
        labels_of: str | Mapping[str, Any] | None = None,
        token_aligned_fields: Iterable[str] = (),
        align_end: Iterable[str] = (),
        keep_jagged: Iterable[str] = (),
    ) -> list[tuple[PackPlan, dict[str, Any]]]:
        """Lay out every micro-batch of a rank for the forward pass, all in one copy.

        Example:
            >>> from jagcodec import pack_rows, plan_micro_batches
            >>> batch = pack_rows({"ids": [[5, 6, 7], [8], [9, 9]], "reward": [0.5, 1.0, 2.0]})
            >>> batches = plan_micro_batches(batch["ids"], max_tokens=4, row_multiple=2)
            >>> for plan, columns in batches.pack(batch, labels_of="ids"):
            ...     print(plan.cu_seqlens_padded.tolist(), columns["ids"].tolist())
            [0, 4] [5, 6, 7, 0]
            [0, 2, 4] [8, 0, 9, 9]

        Args:
            batch: All N rows, in any form: an open message, a join of hundreds, a dict of columns.
            rank: Which data-parallel rank.
            total: Every micro-batch has exactly so many cells, as pipelines need. It takes the
                place of `total_multiple`.
            tail: Where the cells go that a total needs beyond the rows, as for `plan_packing`;
                required with `total` and `total_multiple`.
            cp_rank: As for `PackPlan.pack`.
            cp_size: As for `plan_packing`.
            cp_layout: As for `plan_packing`.
            pad_value_dict: As for `PackPlan.pack`.
            labels_of: As for `PackPlan.pack`.
            token_aligned_fields: As for `PackPlan.pack`.
            align_end: As for `PackPlan.pack`. All N rows are checked, whatever the rank, so every
                rank raises the same error.
            keep_jagged: As for `PackPlan.pack`.

        Returns:
            For each step the plan of its rows, with the multiples of `plan_micro_batches`, and what
            ``plan.pack(select_rows(batch, rows), ...)`` returns. The packed columns of the steps
            are slices of one block; those of a column with a gradient share one graph, so call
            ``backward`` once, on their sum.

        Raises:
            ArgumentError: `plan_packing` or `PackPlan.pack` would raise it; the error names the
                micro-batch. Or the batch has another number of rows.
            ArgumentIndexError: There is no such rank.
            ArgumentTypeError: `batch` is not a batch.
            WireFormatError: A message is malformed.
        """
        where = "MicroBatches.pack"
        rank = self._read_rank(rank, where)
        slices = self._slices_in_order(rank, rank + 1)
        steps = [self._assignment.order[places] for places in slices]
        order = np.concatenate([*steps, np.empty(0, np.int64)])
        bounds = np.cumsum([0, *map(len, steps)])
        options = PackOptions(
            row_multiple=self._rules.row_multiple,
            total_multiple=self._rules.total_multiple if total is None else 1,
            total=total,
            tail=tail,
            cp_size=cp_size,
            cp_layout=cp_layout,
        )
        layout = plan_buffers(
            BufferRows(self._lengths[order], order, bounds, len(self._lengths)),
            options,
            where,
            made_by="plan_micro_batches",
            each="micro-batch",
        )
        rank_in_cp = rank_of(cp_rank, layout.cp_size, f"{where}(cp_rank)")
        check_torch(where)
        from jagcodec.forward.column_buffers import ColumnBuffers

        buffers = ColumnBuffers(
            where,
            self._packer_without_indices(),
            cache(partial(layout.pieces, rank_in_cp)),
            pads=pad_value_dict,
            token_aligned=token_aligned_fields,
            align_end=align_end,
            keep_jagged=keep_jagged,
        )
        columns = buffers.plan_columns(batch, labels_of)
        plans = [PackPlan(each) for each in layout.layouts(rank_in_cp)]
        cells = [plan.total if rank_in_cp is None else plan.local_total for plan in plans]
        return [*zip(plans, buffers.fill_steps(columns, steps, cells), strict=True)]

    def _packer_without_indices(self) -> Packer:
        """A packer of all rows, which knows the offsets of earlier calls."""
        from jagcodec.forward.packer import Packer

        if self._packer is None:
            self._packer = Packer.of_lengths(self._lengths)
        return self._packer.without_indices()

    def rows(self, rank: int) -> IntArray:
        """The rows of a rank, rising and without copies: the rows of ``restore(results, rank)``.

        Example:
            >>> import torch
            >>> from jagcodec import join_columns, open_wire, pack_rows, plan_micro_batches
            >>> batch = pack_rows({"ids": [[1] * n for n in [5, 1, 4, 2, 3, 6]]})
            >>> batches = plan_micro_batches(batch["ids"], ranks=2, max_tokens=8)
            >>> batches.rows(1).tolist()
            [0, 1, 2]
            >>> values = [torch.from_numpy(rows) * 10 for rows in batches[1]]
            >>> mine = open_wire(batch).rows(batches.rows(1))
            >>> join_columns([mine, {"value": batches.restore(values, 1)}])["value"].tolist()
            [0, 10, 20]

        Returns:
            A new (rows,) int64 array.

        Raises:
            ArgumentIndexError: There is no such rank.
        """
        rank = self._read_rank(rank, "MicroBatches.rows")
        first = self._assignment.bounds[rank * self._count]
        rows: IntArray = self._assignment.order[first + self._places_by_row(rank, rank + 1)]
        return rows

    def in_order(self, rank: int, order: Sequence[int] | IntArray) -> MicroBatches:
        """The same plan with the steps of one rank in another order.

        Example:
            >>> from jagcodec import plan_micro_batches
            >>> batches = plan_micro_batches([5, 1, 4, 2, 3, 6], ranks=2, max_tokens=8)
            >>> cheapest_first = batches.in_order(0, [1, 0])
            >>> [rows.tolist() for rows in batches[0]], [r.tolist() for r in cheapest_first[0]]
            ([[5], [3, 4]], [[3, 4], [5]])

        Args:
            rank: Whose steps.
            order: (steps,) the step that each becomes: every number of 0 to steps - 1 once.

        Returns:
            A new plan. Its `pack` and `restore` have the steps in the new order.

        Raises:
            ArgumentIndexError: There is no such rank.
            ArgumentError: `order` lacks a step, or names one twice.
            ArgumentTypeError: `order` does not hold integers.
        """
        where = "MicroBatches.in_order"
        rank = self._read_rank(rank, where)
        expected = f"each step of 0 to {self._count - 1} once" if self._count else "no steps"
        steps = [
            require_int(step, 0, f"{where}(order)[{i}]", "the index of a step")
            for i, step in enumerate(items_of(order, f"{where}(order)", expected))
        ]
        if sorted(steps) != [*range(self._count)]:
            detail = f"expected {expected}, found {brief(steps)}"
            raise ArgumentError("bad_option", f"{where}(order)", detail)
        numbers = np.arange(len(self._assignment.costs))
        first = rank * self._count
        numbers[first : first + self._count] = first + np.array(steps, np.int64)
        assignment = self._assignment.in_order(numbers)
        return MicroBatches(self._lengths, self._rules, assignment, self._packer)

    def restore(
        self, results: Iterable[Any], rank: int | None = None, *, last: Lengths | None = None
    ) -> Any:
        """Put the results of all micro-batches into the order of the rows, and drop copies.

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
            rank: Only the results of this rank; `rows` names their rows.
            last: (N,) how many cells at the end of each row of the batch are wanted, such as those
                of the response; or a jagged tensor, whose row lengths count. Jagged and packed
                columns keep these; other columns are returned as without it.

        Returns:
            A batch or a column of the same kind, as from `concat_rows`: rows 0 to N - 1, or the
            rows of the rank, rising. Gradients flow to results in memory: torch copies the columns
            that autograd follows, as `RaggedView.uses_row_kernel` decides.

        Raises:
            ArgumentError: There are not as many results as micro-batches, one has another number of
                rows than its micro-batch (it is named), or `last` has another number of rows than
                the batch, or is longer than a row of a column (both are named). Or the plan has no
                rows, for which `pack` returns no step: there is no result to take a kind from.
            ArgumentTypeError: A result is neither a batch nor a column, their kinds differ, or
                `last` does not hold integers.
        """
        where = "MicroBatches.restore"
        if rank is not None:
            rank = self._read_rank(rank, where)
        first, end = (0, len(self)) if rank is None else (rank, rank + 1)
        sizes = [places.stop - places.start for places in self._slices_in_order(first, end)]
        parts = items_of(results, f"{where}(results)", "a list of batches or columns")
        if not parts and not sizes:
            detail = "expected results, found none: the plan has no rows, and without a result "
            detail += "nothing says whether to return a batch or a column"
            raise ArgumentError("row_mismatch", f"{where}(results)", detail)
        if len(parts) != len(sizes):
            detail = f"expected {len(sizes)} results, one for each micro-batch, found {len(parts)}"
            raise ArgumentError("row_mismatch", f"{where}(results)", detail)
        restored = _put_back(parts, sizes, self._places_by_row(first, end), where)
        if last is None:
            return restored
        from jagcodec.forward.row_ends import last_cells

        lengths = self._read_last(last, f"{where}(last)")
        return last_cells(restored, lengths if rank is None else lengths[self.rows(rank)], where)

    def _read_last(self, last: Any, path: str) -> IntArray:
        """The argument `last` of `restore` as (N,) lengths."""
        lengths = lengths_and_packer(last, path)[0]
        if len(lengths) != len(self._lengths):
            detail = f"expected {len(self._lengths)} lengths, one for each row of the batch, "
            raise ArgumentError("row_mismatch", path, detail + f"found {len(lengths)}")
        return lengths

    def report(self) -> dict[str, int | float]:
        """The sizes of the plan, and how well it is balanced.

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
            "heaviest_rank": _over_mean([*map(fsum, costs.reshape(len(self), -1).tolist())]),
            "heaviest_micro_batch": _over_mean(costs.tolist()),
        }

    def _slices_in_order(self, first: int, end: int) -> list[slice]:
        """Where the micro-batches of ranks `first` to ``end - 1`` are in `order`."""
        bounds = self._assignment.bounds[first * self._count : end * self._count + 1]
        return [slice(start, stop) for start, stop in pairwise(bounds.tolist())]

    def _places_by_row(self, first: int, end: int) -> IntArray:
        """The places of the rows of these ranks, in rising order of the rows; without copies.

        They count from the first place of rank `first`; the last rank is ``end - 1``.
        """
        bounds = self._assignment.bounds
        places = slice(bounds[first * self._count], bounds[end * self._count])
        originals = np.flatnonzero(~self._assignment.is_copy[places])
        return originals[np.argsort(self._assignment.order[places][originals], kind="stable")]

    def _read_rank(self, rank: Any, where: str) -> int:
        """A data-parallel rank that a caller passed; an error if no rank has this number."""
        number = int_or_none(rank)
        if number is None or not 0 <= number < len(self):
            raise _outside(where, "rank", rank, len(self))
        return number


def _put_back(results: list[Any], sizes: list[int], index: IntArray, where: str) -> Any:
    """Join batches or columns of ``sizes[i]`` rows each, and choose the rows of `index`."""
    check_torch(where)
    from jagcodec.wire.read.any_batch import is_batch

    put_back = _put_back_batches if is_batch(results[0]) else _put_back_columns
    return put_back(results, sizes, index, where)


def _put_back_batches(results: list[Any], sizes: list[int], index: IntArray, where: str) -> Any:
    from jagcodec.wire.many.joined import join_rows
    from jagcodec.wire.read.any_batch import concat_in_memory, is_encoded, opened, row_count_of
    from jagcodec.wire.read.wire_batch import rows_at

    batches = []
    for i, (result, size) in enumerate(zip(results, sizes, strict=True)):
        path = f"{where}(results[{i}])"
        batches.append(opened(result, path))
        _check_rows(row_count_of(batches[i], path), size, path)
    if all(map(is_encoded, batches)):
        return rows_at(join_rows(batches, where), index)
    return concat_in_memory(batches, where, index)


def _put_back_columns(columns: list[Any], sizes: list[int], index: IntArray, where: str) -> Any:
    from jagcodec.columns.held import read_offsets, row_count
    from jagcodec.columns.join import join_leaves
    from jagcodec.rows.row_splits import RowSplitsPool
    from jagcodec.wire.compare import same_values

    for i, (column, size) in enumerate(zip(columns, sizes, strict=True)):
        path = f"{where}(results[{i}])"
        _check_rows(row_count(column, path) or 0, size, path)
    pool = RowSplitsPool()
    read_offsets(columns, pool)
    return join_leaves(columns, index, pool, f"{where}(results)", same_values)


def _check_rows(rows: int, size: int, path: str) -> None:
    """Refuse a result that has another number of rows than its micro-batch."""
    if rows != size:
        detail = f"expected {size} rows, like its micro-batch, found {rows}"
        raise ArgumentError("row_mismatch", path, detail)


def _outside(where: str, what: str, value: Any, count: int) -> ArgumentIndexError:
    """The error for a number that is not that of a rank or a step."""
    expected = f"a {what} of 0 to {count - 1}" if count else f"no {what}, as the plan has no rows"
    detail = f"expected {expected}, found {brief(value)}"
    return ArgumentIndexError("bad_option", f"{where}({what})", detail)


def _over_mean(costs: Sequence[float]) -> float:
    """The highest cost over the mean of all; 1 if all are 0."""
    total = fsum(costs)
    return max(costs) * len(costs) / total if total else 1.0
