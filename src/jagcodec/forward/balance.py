"""Spreads loads over ranks and their micro-batches, so that all ranks have about the same cost.

Ranks that plan for themselves must get equal plans, whatever their CPU, numpy or Python. So sorts
are stable, and no sum of floats depends on the order or the width in which a CPU adds them: `fsum`
rounds once, and other sums add number by number.

There are three ways, and each is tried when the one before leaves a load without a place.
Longest-processing-time-first: loads go in falling order of cost, each to the rank with the lowest
cost so far, and there to the micro-batch with the lowest cost. Then first-fit within a rank
(`_spread_over_steps`), in place of the micro-batch with the lowest cost. At last,
first-fit-decreasing packs all loads as tightly as possible, and whole micro-batches are spread over
the ranks.

A load is rows that stay together: a group, or a row alone. A bin is what loads are put into: a rank
or a micro-batch. `spread` comes first, then the three ways in this order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count as counter
from math import fsum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec.memory.arrays import IntArray

FloatArray: TypeAlias = npt.NDArray[np.float64]

Bins: TypeAlias = list[list[int]]
"""The loads of each of several bins."""


class Capacity(NamedTuple):
    """How many cells and rows fit into a bin, and how few loads it may have."""

    cells: int
    rows: int
    fewest_loads: int = 1


class Loads(NamedTuple):
    """L loads, which are rows that stay together. Lists, because loops read single numbers."""

    cells: list[int]  # (L,) cells of each
    rows: list[int]  # (L,) rows of each
    cost: list[float]  # (L,)

    def falling_cost(self, which: Iterable[int]) -> list[int]:
        """These loads, the most expensive first."""
        return sorted(which, key=lambda load: -self.cost[load])

    def falling_size(self, which: Iterable[int]) -> list[int]:
        """These loads, the largest first."""
        return sorted(which, key=lambda load: (-self.cells[load], -self.rows[load]))

    def cost_of(self, which: Iterable[int]) -> float:
        """The sum of the costs of these loads."""
        return fsum(self.cost[load] for load in which)


class NoSpaceError(Exception):
    """No bin has space for a load. This error never leaves the module."""


def spread(loads: Loads, packed: Bins, steps: Sequence[Sequence[Capacity]]) -> list[Bins]:
    """Put all loads into bins, one for each step of each rank. No bin stays empty.

    Args:
        loads: At least as many as there are steps of all ranks.
        packed: All of them by `first_fit`, in no more bins than there are steps of all ranks.
        steps: The capacity of each step, by rank.

    Returns:
        The bins of each rank.
    """
    if not packed:
        return [[] for _ in steps]
    try:
        by_rank = _longest_first(loads, range(len(loads.cost)), [*map(_total_capacity, steps)])
        ranks = zip(by_rank, steps, strict=True)
        return [_spread_over_steps(loads, which, capacities) for which, capacities in ranks]
    except NoSpaceError:
        return _spread_whole(loads, packed, len(steps), len(steps[0]))


def _total_capacity(capacities: Sequence[Capacity]) -> Capacity:
    """The capacity that several bins have together."""
    return Capacity(
        sum(capacity.cells for capacity in capacities),
        sum(capacity.rows for capacity in capacities),
        sum(capacity.fewest_loads for capacity in capacities),
    )


def _longest_first(loads: Loads, which: Iterable[int], capacities: Sequence[Capacity]) -> Bins:
    """Longest-processing-time-first, with caps.

    The most expensive load goes first. Each goes to the bin with the lowest cost that has space for
    it; of equal bins, to the one with the fewest loads. As soon as only as many loads are left as
    bins still need, each goes to a bin that needs one.
    """
    order = loads.falling_cost(which)
    open_bins = _BinsByCost(capacities)
    bins: Bins = [[] for _ in capacities]
    needed = sum(capacity.fewest_loads for capacity in capacities)
    for left, load in zip(range(len(order), 0, -1), order, strict=True):
        cells, rows = loads.cells[load], loads.rows[load]
        entry = open_bins.take(cells, rows, only_needy=needed == left)
        _, load_count, index = entry
        needed -= load_count < capacities[index].fewest_loads
        open_bins.put(entry, loads.cost[load], cells, rows)
        bins[index].append(load)
    return bins


HeapEntry: TypeAlias = tuple[float, int, int]
"""What orders bins: ``(cost, load_count, index)`` of a bin. A named tuple takes longer to make."""


class _BinsByCost:
    """Finds the cheapest open bin with enough space.

    A bin that has no space for a load is set aside by its free cells or rows. Later loads pass
    over it until one fits, so a load does not try all full bins.
    """

    def __init__(self, capacities: Sequence[Capacity]) -> None:
        self._capacities = capacities
        self._cells = [capacity.cells for capacity in capacities]  # the free ones of each bin
        self._rows = [capacity.rows for capacity in capacities]
        self._heap: list[HeapEntry] = [(0.0, 0, index) for index in range(len(capacities))]
        self._aside_by_cells = _CheapestOfSize(max(self._cells, default=0))
        self._aside_by_rows = _CheapestOfSize(max(self._rows, default=0))

    def take(self, cells: int, rows: int, *, only_needy: bool) -> HeapEntry:
        """Take out the cheapest bin that has space for a load of so many cells and rows.

        With `only_needy`, it must lack loads. This stays so for all later loads, and bins that
        lack none are dropped.
        """
        while True:
            entry = self._cheapest(cells, rows)
            _, load_count, index = entry
            if only_needy and load_count >= self._capacities[index].fewest_loads:
                continue
            if self._cells[index] < cells:
                self._aside_by_cells.add(self._cells[index], entry)
            elif self._rows[index] < rows:
                self._aside_by_rows.add(self._rows[index], entry)
            else:
                return entry

    def put(self, entry: HeapEntry, cost: float, cells: int, rows: int) -> None:
        """Put a bin back that got one more load, which has this cost and size."""
        before, load_count, index = entry
        self._cells[index] -= cells
        self._rows[index] -= rows
        heapq.heappush(self._heap, (before + cost, load_count + 1, index))

    def _cheapest(self, cells: int, rows: int) -> HeapEntry:
        """Take out the cheapest of all bins that may have space."""
        best, place = self._heap[0] if self._heap else None, None
        for aside, size in ((self._aside_by_cells, cells), (self._aside_by_rows, rows)):
            entry = aside.cheapest(size) if aside.entries else None
            if entry is not None and (best is None or entry < best):
                best, place = entry, aside
        if best is None:
            raise NoSpaceError
        return heapq.heappop(self._heap) if place is None else place.take(best)


class _CheapestOfSize:
    """Finds the cheapest bin of at least some size, in logarithmic time.

    Every block of 2**k sizes, aligned, has a heap of its bins. Bins that were taken leave a heap
    when they come to its top.
    """

    def __init__(self, largest: int) -> None:
        self.entries: dict[int, HeapEntry] = {}
        self._levels = range((largest + 1).bit_length() + 1)
        self._heaps: dict[tuple[int, int], list[HeapEntry]] = {}

    def add(self, size: int, entry: HeapEntry) -> None:
        _, _, index = entry
        self.entries[index] = entry
        for level in self._levels:
            heap = self._heaps.setdefault((level, (size + 1) >> level), [])
            heapq.heappush(heap, entry)

    def take(self, entry: HeapEntry) -> HeapEntry:
        _, _, index = entry
        return self.entries.pop(index)

    def cheapest(self, size: int) -> HeapEntry | None:
        """The cheapest bin of at least this size."""
        cheapest: HeapEntry | None = None
        block = size + 1
        # At each level, all sizes from the start of `block` on still count. The parent of an odd
        # block has smaller sizes, too: search this block alone, and go on at the block after it.
        # So the searched blocks together hold each size of at least `size` exactly once.
        for level in self._levels:
            if block & 1:
                top = self._top(level, block)
                if cheapest is None or (top is not None and top < cheapest):
                    cheapest = top
                block += 1
            block >>= 1
        return cheapest

    def _top(self, level: int, block: int) -> HeapEntry | None:
        heap = self._heaps.get((level, block), [])
        while heap:
            top = heap[0]
            _, _, index = top
            if self.entries.get(index) is top:
                return top
            heapq.heappop(heap)  # the bin was taken
        return None


def first_fit(loads: Loads, which: Iterable[int], capacity: Capacity) -> Bins:
    """First-fit-decreasing: the largest load goes first, each to the first bin with space."""
    order = loads.falling_size(which)
    # The tree searches by one size: cells if they limit a bin, rows otherwise. It has as many
    # bins as there are loads, so every load fits into a new bin.
    by_cells = capacity.cells < sum(loads.cells)
    open_bins = _BinsInOrder(len(order), capacity.cells if by_cells else capacity.rows)
    rows = [capacity.rows] * (len(order) if by_cells else 0)
    fewest = min(loads.rows, default=0)
    bins: Bins = []
    for load in order:
        size = loads.cells[load] if by_cells else loads.rows[load]
        first = open_bins.first(size, 0)
        while by_cells and rows[first] < loads.rows[load]:
            first = open_bins.first(size, first + 1)
        if first == len(bins):
            bins.append([])
        bins[first].append(load)
        if by_cells:
            rows[first] -= loads.rows[load]
            if rows[first] < fewest:  # no load fits: close the bin
                size = capacity.cells + 1
        open_bins.fill(first, size)
    return bins


class _BinsInOrder:
    """Finds the first bin with enough space, in logarithmic time.

    The bins are the leaves of a binary tree, in which node i has the children 2 * i and 2 * i + 1.
    Each node has the largest free space of the bins below it.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self._leaves = 1 << max(count - 1, 0).bit_length()
        self._space = [capacity] * (2 * self._leaves)

    def first(self, size: int, start: int) -> int:
        """The first bin at or after `start` that has space for this size; there must be one."""
        space, leaves = self._space, self._leaves
        node = start + leaves if start else 1
        while space[node] < size:  # go up, and to the next bin on the right
            while node & 1:
                node >>= 1
            node += 1
        while node < leaves:
            node *= 2
            if space[node] < size:
                node += 1
        return node - leaves

    def fill(self, index: int, size: int) -> None:
        """Take this size off the free space of a bin."""
        space = self._space
        node = index + self._leaves
        left = space[node] = space[node] - size
        while node > 1:
            other = space[node ^ 1]
            left = other if other > left else left
            node >>= 1
            if space[node] == left:
                break
            space[node] = left


def _spread_over_steps(loads: Loads, which: Sequence[int], capacities: Sequence[Capacity]) -> Bins:
    """The loads of one rank by step. NoSpaceError if no way gives each load a place."""
    try:
        return _longest_first(loads, which, capacities)
    except NoSpaceError:
        packed = first_fit(loads, which, capacities[0])
        if len(packed) > len(capacities):
            raise
        return _split_bins(loads, packed, len(capacities))


def _split_bins(loads: Loads, bins: Bins, count: int) -> Bins:
    """The loads in `count` bins: the most expensive bin is halved until there are so many."""
    number = counter()  # of equal costs, the older bin comes first
    heap = [(-loads.cost_of(each), next(number), each) for each in bins]
    heapq.heapify(heap)
    single: Bins = []
    while len(heap) + len(single) < count:
        largest = loads.falling_cost(heapq.heappop(heap)[-1])
        if len(largest) == 1:
            single.append(largest)
            continue
        for half in (largest[::2], largest[1::2]):
            heapq.heappush(heap, (-loads.cost_of(half), next(number), half))
    return [*single, *(each for *_, each in heap)]


def _spread_whole(loads: Loads, packed: Bins, ranks: int, count: int) -> list[Bins]:
    """All loads by rank and step, in whole bins of `packed`, `count` for each rank."""
    bins = _split_bins(loads, packed, ranks * count)
    zeros = [0] * len(bins)
    whole = Loads(zeros, zeros, [*map(loads.cost_of, bins)])
    by_rank = _longest_first(whole, range(len(bins)), [Capacity(0, 0, count)] * ranks)
    swapped = _swap_bins(np.array(whole.cost), np.array(by_rank))
    return [[bins[i] for i in numbers] for numbers in swapped]


# A few swaps for each rank come close to the best; more take longer than the step would gain.
_SWAPS_PER_RANK = 8
_CHEAPER = 1 - 1e-9  # sums of floats that differ by less may be the same cost


def _swap_bins(cost: FloatArray, by_rank: IntArray) -> list[list[int]]:
    """Swap bins between ranks, (ranks, count), while that makes the most expensive rank cheaper."""
    rank_costs = np.array([fsum(costs) for costs in cost[by_rank].tolist()])
    for _ in range(_SWAPS_PER_RANK * len(rank_costs)):
        heavy = int(rank_costs.argmax())
        lightest_first = np.argsort(rank_costs, kind="stable").tolist()
        swaps = (_best_swap(cost, rank_costs, by_rank, heavy, other) for other in lightest_first)
        swap = next(filter(None, swaps), None)
        if swap is None:
            break
        mine, theirs = swap
        less = cost[by_rank[mine]] - cost[by_rank[theirs]]
        by_rank[mine], by_rank[theirs] = by_rank[theirs], by_rank[mine]
        rank_costs[heavy] -= less
        rank_costs[theirs[0]] += less
    bins_by_rank: list[list[int]] = by_rank.tolist()
    return bins_by_rank


def _best_swap(
    cost: FloatArray, rank_costs: FloatArray, by_rank: IntArray, heavy: int, other: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The two bins whose swap makes the heavier rank lightest; None if no swap helps."""
    mine = cost[by_rank[heavy]]
    theirs, place = np.unique(cost[by_rank[other]], return_index=True)
    # Both ranks would cost the same after a swap for a bin of `even`. Of the other's bins, try the
    # next cheaper and the next more expensive one: all others leave one rank heavier.
    even = mine - (rank_costs[heavy] - rank_costs[other]) / 2
    above = np.searchsorted(theirs, even)
    near = np.stack([above - 1, above], axis=1).clip(0, len(theirs) - 1)
    less = mine[:, None] - theirs[near]
    heavier = np.maximum(rank_costs[heavy] - less, rank_costs[other] + less)
    i = int(heavier.min(axis=1).argmin())
    best = heavier[i].min()
    j = int(place[near[i, heavier[i] == best]].min())
    return ((heavy, i), (other, j)) if best < rank_costs[heavy] * _CHEAPER else None
