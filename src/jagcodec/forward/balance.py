"""Spreads items over ranks and their micro-batches, so that all ranks have about the same cost.

Ranks that plan for themselves must get equal plans, whatever their CPU, numpy or Python. So sorts
are stable, and no sum of floats depends on the order or the width in which a CPU adds them: `fsum`
rounds once, and other sums add number by number.

There are three ways, and each is tried when the one before leaves an item without a place.
Longest-processing-time-first: items go in falling order of cost, each to the rank with the lowest
cost so far, and there to the micro-batch with the lowest cost. Then first-fit within a rank, in
place of the micro-batch with the lowest cost (`_into_steps`). At last, first-fit-decreasing packs
all items as tightly as possible, and whole micro-batches are spread over the ranks.
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
        return fsum(self.cost[item] for item in which)


class NoRoomError(Exception):
    """No part has room for an item. This error never leaves the module."""


def spread(items: Items, packed: Bins, steps: Sequence[Sequence[Room]]) -> list[Bins]:
    """All items by rank and step, no step empty.

    Args:
        items: At least as many as there are steps of all ranks.
        packed: All of them by `first_fit`, in no more parts than there are steps of all ranks.
        steps: The room of each step, by rank.
    """
    if not packed:
        return [[] for _ in steps]
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
    parts = _CheapestPart(rooms)
    bins: Bins = [[] for _ in rooms]
    needed = sum(room.items for room in rooms)
    for left, item in zip(range(len(order), 0, -1), order, strict=True):
        cells, rows = items.cells[item], items.rows[item]
        entry = parts.take(cells, rows, only_needy=needed == left)
        _, items_there, part = entry
        needed -= items_there < rooms[part].items
        parts.put(entry, items.cost[item], cells, rows)
        bins[part].append(item)
    return bins


HeapEntry: TypeAlias = tuple[float, int, int]
"""By what parts are compared: the cost, how many items are there, and the number of the part."""


class _CheapestPart:
    """Parts that are being filled. It finds the cheapest part with enough room.

    A part that has no room for an item is set aside by its free cells or rows. Later items pass
    over it until one fits, so an item does not try all full parts.
    """

    def __init__(self, rooms: Sequence[Room]) -> None:
        self._rooms = rooms
        self._cells = [room.cells for room in rooms]  # the free ones of each part
        self._rows = [room.rows for room in rooms]
        self._heap: list[HeapEntry] = [(0.0, 0, part) for part in range(len(rooms))]
        self._aside_by_cells = _CheapestOfSize(max(self._cells, default=0))
        self._aside_by_rows = _CheapestOfSize(max(self._rows, default=0))

    def take(self, cells: int, rows: int, *, only_needy: bool) -> HeapEntry:
        """Take out the cheapest part that has room for an item of so many cells and rows.

        With `only_needy`, it must lack items. This stays so for all later items, and parts that
        lack none are dropped.
        """
        while True:
            entry = self._cheapest(cells, rows)
            part = entry[-1]
            if only_needy and entry[1] >= self._rooms[part].items:
                continue
            if self._cells[part] < cells:
                self._aside_by_cells.add(self._cells[part], entry)
            elif self._rows[part] < rows:
                self._aside_by_rows.add(self._rows[part], entry)
            else:
                return entry

    def put(self, entry: HeapEntry, cost: float, cells: int, rows: int) -> None:
        """Put a part back that got one more item, which has this cost and size."""
        before, items_there, part = entry
        self._cells[part] -= cells
        self._rows[part] -= rows
        heapq.heappush(self._heap, (before + cost, items_there + 1, part))

    def _cheapest(self, cells: int, rows: int) -> HeapEntry:
        """Take out the cheapest of all parts that may have room."""
        best, place = self._heap[0] if self._heap else None, None
        for aside, size in ((self._aside_by_cells, cells), (self._aside_by_rows, rows)):
            entry = aside.cheapest(size) if aside.parts else None
            if entry is not None and (best is None or entry < best):
                best, place = entry, aside
        if best is None:
            raise NoRoomError
        return heapq.heappop(self._heap) if place is None else place.take(best)


class _CheapestOfSize:
    """Parts by size. It finds the cheapest part of at least some size in logarithmic time.

    Every block of 2**k sizes, aligned, has a heap of its parts. Parts that were taken leave a heap
    when they come to its top.
    """

    def __init__(self, largest: int) -> None:
        self.parts: dict[int, HeapEntry] = {}
        self._levels = range((largest + 1).bit_length() + 1)
        self._heaps: dict[tuple[int, int], list[HeapEntry]] = {}

    def add(self, size: int, entry: HeapEntry) -> None:
        self.parts[entry[-1]] = entry
        for level in self._levels:
            heap = self._heaps.setdefault((level, (size + 1) >> level), [])
            heapq.heappush(heap, entry)

    def take(self, entry: HeapEntry) -> HeapEntry:
        return self.parts.pop(entry[-1])

    def cheapest(self, size: int) -> HeapEntry | None:
        """The cheapest part of at least this size."""
        found: HeapEntry | None = None
        block = size + 1
        for level in self._levels:
            if block & 1:  # the blocks to its right have only larger sizes
                top = self._top(level, block)
                found = top if found is None or (top is not None and top < found) else found
                block += 1
            block >>= 1
        return found

    def _top(self, level: int, block: int) -> HeapEntry | None:
        heap = self._heaps.get((level, block), [])
        while heap and self.parts.get(heap[0][-1]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None


def first_fit(items: Items, which: Iterable[int], room: Room) -> Bins:
    """First-fit-decreasing: the largest item goes first, each to the first part with room."""
    order = items.falling_size(which)
    # The tree searches for room of one kind: cells if they limit a part, rows otherwise. There are
    # as many parts as items, so every item fits into a new part.
    by_cells = room.cells < sum(items.cells)
    parts = _FirstPart(len(order), room.cells if by_cells else room.rows)
    rows = [room.rows] * (len(order) if by_cells else 0)
    fewest = min(items.rows, default=0)
    bins: Bins = []
    for item in order:
        size = items.cells[item] if by_cells else items.rows[item]
        first = parts.first(size, 0)
        while by_cells and rows[first] < items.rows[item]:
            first = parts.first(size, first + 1)
        if first == len(bins):
            bins.append([])
        bins[first].append(item)
        if by_cells:
            rows[first] -= items.rows[item]
            size = size if rows[first] >= fewest else room.cells + 1  # close the part: no item fits
        parts.fill(first, size)
    return bins


class _FirstPart:
    """Parts in a row. It finds the first part with enough room in logarithmic time.

    They are the leaves of a binary tree, in which node i has the children 2 * i and 2 * i + 1. Each
    node has the largest room of the parts below it.
    """

    def __init__(self, count: int, room: int) -> None:
        self._leaves = 1 << max(count - 1, 0).bit_length()
        self._room = [room] * (2 * self._leaves)

    def first(self, size: int, start: int) -> int:
        """The first part at or after `start` that has room for this size; there must be one."""
        room, leaves = self._room, self._leaves
        node = start + leaves if start else 1
        while room[node] < size:  # go up, and to the next part on the right
            while node & 1:
                node >>= 1
            node += 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        return node - leaves

    def fill(self, part: int, size: int) -> None:
        """Take this size off the room of a part."""
        room = self._room
        node = part + self._leaves
        left = room[node] = room[node] - size
        while node > 1:
            other = room[node ^ 1]
            left = other if other > left else left
            node >>= 1
            if room[node] == left:
                break
            room[node] = left


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


# A few swaps for each rank come close to the best; more take longer than the step would gain.
_SWAPS_PER_RANK = 8
_CHEAPER = 1 - 1e-9  # sums of floats that differ by less may be the same cost


def _swapped(cost: FloatArray, by_rank: IntArray) -> list[list[int]]:
    """Bins by rank, (ranks, count), after swaps that make the most expensive rank cheaper."""
    loads = np.array([fsum(costs) for costs in cost[by_rank].tolist()])
    for _ in range(_SWAPS_PER_RANK * len(loads)):
        heavy = int(loads.argmax())
        lightest_first = np.argsort(loads, kind="stable").tolist()
        swaps = (_best_swap(cost, loads, by_rank, heavy, other) for other in lightest_first)
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
    cost: FloatArray, loads: FloatArray, by_rank: IntArray, heavy: int, other: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The two bins whose swap makes the heavier rank lightest; None if no swap helps."""
    mine = cost[by_rank[heavy]]
    theirs, place = np.unique(cost[by_rank[other]], return_index=True)
    # Both ranks would cost the same after a swap for a bin of `even`. Of the other's bins, try the
    # next cheaper and the next more expensive one: all others leave one rank heavier.
    even = mine - (loads[heavy] - loads[other]) / 2
    above = np.searchsorted(theirs, even)
    near = np.stack([above - 1, above], axis=1).clip(0, len(theirs) - 1)
    less = mine[:, None] - theirs[near]
    heavier = np.maximum(loads[heavy] - less, loads[other] + less)
    i = int(heavier.min(axis=1).argmin())
    best = heavier[i].min()
    j = int(place[near[i, heavier[i] == best]].min())
    return ((heavy, i), (other, j)) if best < loads[heavy] * _CHEAPER else None
