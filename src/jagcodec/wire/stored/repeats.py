"""What `elide_cells` and `elide_documents` share: the cost of runs, comparisons and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jagcodec import kernels
from jagcodec.kernels import Copy
from jagcodec.memory.arrays import ByteArray, IntArray, address
from jagcodec.wire.items import Item, Run
from jagcodec.wire.spec import RUN_NUMBERS

RUN_COST = 8 * len(RUN_NUMBERS) + 2 * 128
"""Bytes of a run: its numbers, and two more buffers, each at a multiple of 64 and with a place."""

NUMBERS_AT_ONCE = 1 << 17
"""How many numbers are compared at a time, so that they stay in a cache."""


def cost_of_runs(indices: int, rows: int) -> int:
    """The bytes that runs cost, of which so many have an index of `rows` rows.

    A column has one run at least. An index takes up to 8 bytes per row.
    """
    return max(1, indices) * RUN_COST + indices * 8 * rows


def set_runs(column: Item, runs: Sequence[Run]) -> None:
    """Make a column elided: these runs have all of its cells."""
    column.runs, column.is_elided = runs, True


def sample_of(data: Any) -> bytes:
    """A few bytes of a buffer, by which most buffers differ."""
    return bytes(data[:: len(data) // 96 | 1])  # an odd step: not always the same byte of a cell


def equal_bytes(a: ByteArray, b: ByteArray) -> bool:
    """Whether two buffers have the same bytes."""
    if len(a) != len(b) or address(a) == address(b):
        return len(a) == len(b)
    if len(a) % 8 == 0:
        a, b = a.view("u8"), b.view("u8")
    pieces = (
        (a[i : i + NUMBERS_AT_ONCE], b[i : i + NUMBERS_AT_ONCE])
        for i in range(0, len(a), NUMBERS_AT_ONCE)
    )
    return all(np.array_equal(one, other) for one, other in pieces)


def copy_of_rows(data: ByteArray, starts: IntArray, lengths: IntArray, size: int) -> ByteArray:
    """A copy of rows of cells of `data`, end to end."""
    out = np.empty(int(lengths.sum()) * size, dtype=np.uint8)
    if len(out):
        kernels.copy_all([Copy(out, data, None, np.ascontiguousarray(starts), lengths, size)])
    return out
