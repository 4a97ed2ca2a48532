"""Items spread over ranks and their micro-batches, so that the ranks have about the same cost.

There are two ways. Longest-processing-time-first comes first: items go in falling order of cost,
each to the rank with the lowest cost so far, and there to the micro-batch with the lowest cost.
If that leaves an item without a place, first-fit-decreasing packs all items as tightly as possible,
and whole micro-batches are spread over the ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count as counter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec.packing.lengths import IntArray

Bins: TypeAlias = list[list[int]]
"""The items of each of several parts."""


class Room(NamedTuple):
    """How many cells and rows fit into a part, and the fewest items that it needs."""

    cells: int
    rows: int
    items: int = 1


class Items(NamedTuple):
    """Rows that stay together, as lists, because loops read single numbers of them."""

    cells: list[int]
    rows: list[int]
    cost: list[float]

    def falling_cost(self, which: Iterable[int]) -> list[int]:
        """These items, the most expensive first."""
        return sorted(which, key=lambda item: -self.cost[item])

    def falling_size(self, which: Iterable[int]) -> list[int]:
        """These items, the largest first."""
        return sorted(which, key=lambda item: (-self.cells[item], -self.rows[item]))

    def cost_of(self, which: Iterable[int]) -> float:
        """The sum of the costs of these items."""
        return sum(self.cost[item] for item in which)


class NoRoomError(Exception):
    """An item found no part that it fits into. It never leaves this module."""


def spread(items: Items, packed: Bins, steps: Sequence[Sequence[Room]]) -> list[Bins]:
    """All items by rank and step, no step empty.

    Args:
        items: At least as many as there are steps of all ranks.
        packed: All of them by `first_fit`, in no more parts than there are steps of all ranks.
        steps: The room of each step, by rank.
    """
    try:
        by_rank = longest_first(items, range(len(items.cost)), [*map(_total_room, steps)])
        ranks = zip(by_rank, steps, strict=True)
        return [_into_steps(items, which, rooms) for which, rooms in ranks]
    except NoRoomError:
        return _spread_whole(items, packed, len(steps), len(steps[0]))


def _total_room(rooms: Sequence[Room]) -> Room:
    """The room that several parts have together."""
    cells, rows = sum(room.cells for room in rooms), sum(room.rows for room in rooms)
    return Room(cells, rows, sum(room.items for room in rooms))


def longest_first(items: Items, which: Iterable[int], rooms: Sequence[Room]) -> Bins:
    """Longest-processing-time-first, with caps.

    The most expensive item goes first. Each goes to the part with the lowest cost that has room for
    it; of equal parts, to the one with the fewest items. When only as many items are left as parts
    still need, each goes to a part that needs one.
    """
    order = items.falling_cost(which)
    heap = [(0.0, 0, part) for part in range(len(rooms))]
    bins: Bins = [[] for _ in rooms]
    cells, rows = [room.cells for room in rooms], [room.rows for room in rooms]
    needed = sum(room.items for room in rooms)
    for left, item in zip(range(len(order), 0, -1), order, strict=True):
        passed = []
        while heap:
            cost, items_there, part = heap[0]
            needs = items_there < rooms[part].items
            fits = items.cells[item] <= cells[part] and items.rows[item] <= rows[part]
            if fits and (needs or needed < left):
                break
            passed.append(heapq.heappop(heap))
        else:
            raise NoRoomError
        heapq.heapreplace(heap, (cost + items.cost[item], items_there + 1, part))
        for entry in passed:
            heapq.heappush(heap, entry)
        bins[part].append(item)
        cells[part] -= items.cells[item]
        rows[part] -= items.rows[item]
        needed -= needs
    return bins


def first_fit(items: Items, which: Iterable[int], room: Room) -> Bins:
    """First-fit-decreasing: the largest item goes first, each to the first part with room."""
    order = items.falling_size(which)
    cells, rows = np.full(len(order), room.cells), np.full(len(order), room.rows)
    bins: Bins = []
    for item in order:
        ahead = len(bins) + 1  # one more than there are: every item fits into a new part
        fits = (cells[:ahead] >= items.cells[item]) & (rows[:ahead] >= items.rows[item])
        first = int(fits.argmax())
        if first == len(bins):
            bins.append([])
        bins[first].append(item)
        cells[first] -= items.cells[item]
        rows[first] -= items.rows[item]
    return bins


def _into_steps(items: Items, which: Sequence[int], rooms: Sequence[Room]) -> Bins:
    """The items of one rank by step."""
    try:
        return longest_first(items, which, rooms)
    except NoRoomError:
        packed = first_fit(items, which, rooms[0])
        if len(packed) > len(rooms):
            raise
        return _split_bins(items, packed, len(rooms))


def _split_bins(items: Items, bins: Bins, count: int) -> Bins:
    """The items in `count` bins: the most expensive bin is halved until there are so many."""
    number = counter()
    heap = [(-items.cost_of(each), next(number), each) for each in bins]
    heapq.heapify(heap)
    single: Bins = []
    while len(heap) + len(single) < count:
        largest = items.falling_cost(heapq.heappop(heap)[-1])
        if len(largest) == 1:
            single.append(largest)
            continue
        for half in (largest[::2], largest[1::2]):
            heapq.heappush(heap, (-items.cost_of(half), next(number), half))
    return [*single, *(each for *_, each in heap)]


def _spread_whole(items: Items, packed: Bins, ranks: int, count: int) -> list[Bins]:
    """All items by rank and step, in whole bins of `packed`, `count` for each rank."""
    bins = _split_bins(items, packed, ranks * count)
    zeros = [0] * len(bins)
    whole = Items(zeros, zeros, [*map(items.cost_of, bins)])
    by_rank = longest_first(whole, range(len(bins)), [Room(0, 0, count)] * ranks)
    return [
        [bins[i] for i in numbers] for numbers in _swapped(np.array(whole.cost), np.array(by_rank))
    ]


def _swapped(cost: npt.NDArray[np.float64], by_rank: IntArray) -> list[list[int]]:
    """Bins by rank, (ranks, count), after swaps that make the most expensive rank cheaper."""
    loads = cost[by_rank].sum(axis=1)
    for _ in range(8 * len(loads)):
        heavy = int(loads.argmax())
        swaps = (_best_swap(cost, loads, by_rank, heavy, other) for other in np.argsort(loads))
        found = next(filter(None, swaps), None)
        if found is None:
            break
        mine, theirs = found
        less = cost[by_rank[mine]] - cost[by_rank[theirs]]
        by_rank[mine], by_rank[theirs] = by_rank[theirs], by_rank[mine]
        loads[heavy] -= less
        loads[theirs[0]] += less
    swapped: list[list[int]] = by_rank.tolist()
    return swapped


def _best_swap(
    cost: npt.NDArray[np.float64],
    loads: npt.NDArray[np.float64],
    by_rank: IntArray,
    heavy: int,
    other: int,
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The two bins whose swap makes the heavier rank lightest; None if no swap helps."""
    less = cost[by_rank[heavy]][:, None] - cost[by_rank[other]]
    heavier = np.maximum(loads[heavy] - less, loads[other] + less)
    i, j = divmod(int(heavier.argmin()), by_rank.shape[1])
    helps = heavier[i, j] < loads[heavy] * (1 - 1e-9)
    return ((heavy, i), (int(other), j)) if helps else None
