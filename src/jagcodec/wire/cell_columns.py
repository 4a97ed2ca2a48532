"""Columns as cells that lie end to end, and the parts that they can be made of instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.wire.narrow import narrowed
from jagcodec.wire.spec import PART_NUMBERS, PartForm

AnyArray: TypeAlias = npt.NDArray[Any]

TABLE = 8 * len(PART_NUMBERS)
"""Bytes of the table of a column, for each part."""

SLACK = 128
"""Bytes that one more buffer may take beyond its own: up to a multiple of 64, and its numbers."""


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Cells end to end, which columns may share: equal only to themselves, as keys of a dict.

    Attributes:
        data: Their bytes.
        dtype: What the wire calls their dtype; None of bytes that mean nothing.
        narrow: Whether they are integers that are stored narrow.
    """

    data: ByteArray
    dtype: str | None = None
    narrow: bool = False

    def of(self, data: ByteArray) -> Cells:
        """Other cells of the same kind."""
        return Cells(data, self.dtype, self.narrow)

    def narrowed(self) -> tuple[int, ByteArray] | None:
        """How they are stored, and their bytes, if that is not as they are."""
        return narrowed(self.data, self.dtype) if self.narrow and self.dtype else None


class Column(NamedTuple):
    """A column whose rows lie end to end.

    Attributes:
        cells: All of them.
        size: Bytes of one, 1 at least.
        splits: The rows, one object for equal ones; of a rectangle, of one cell each.
        dense: Whether it is a rectangle.
    """

    cells: Cells
    size: int
    splits: RowSplits
    dense: bool


class FoundPart(NamedTuple):
    """A part of a column.

    Attributes:
        form: How its rows are made.
        splits: How long they are.
        cells: What they are made of.
        number: How many cells.
        indices: The numbers beside the cells.
        step: Of a ramp; 1 where rows of documents that share their bytes are one object.
    """

    form: PartForm
    splits: RowSplits
    cells: Cells
    number: int
    indices: IntArray | None = None
    step: int = 0


Parts: TypeAlias = list[FoundPart]

_AT_ONCE = 1 << 20
"""Bytes that are put together to be compared, so that they stay in a cache."""


def index_size(index: IntArray) -> int:
    """Bytes that an index takes in a message."""
    stored = narrowed(index.view(np.uint8), "int64")
    return index.nbytes if stored is None else len(stored[1])


def words(data: ByteArray, size: int) -> AnyArray:
    """(cells,) numbers as wide as a cell, or (cells, k) where there are none so wide."""
    if size in (1, 2, 4, 8):
        return data.view(f"u{size}")
    return data.view("u8").reshape(-1, size // 8) if size % 8 == 0 else data.reshape(-1, size)


def word_bytes(cells: AnyArray) -> ByteArray:
    """The bytes of such numbers."""
    flat: ByteArray = np.ascontiguousarray(cells).reshape(-1).view(np.uint8)
    return flat


def differ(a: AnyArray, b: AnyArray, dims: int) -> npt.NDArray[np.bool_]:
    """Which cells differ; `dims` of the arrays are not within a cell."""
    found: npt.NDArray[np.bool_] = np.not_equal(a, b)
    if found.ndim > dims:
        found = np.logical_or.reduce(found, axis=-1)
    return found


def equal(a: ByteArray, b: ByteArray) -> bool:
    """Whether all bytes are the same."""
    if len(a) != len(b):
        return False
    if a.__array_interface__["data"] == b.__array_interface__["data"]:
        return True
    for start in range(0, len(a), _AT_ONCE):
        one, other = a[start : start + _AT_ONCE], b[start : start + _AT_ONCE]
        if len(one) % 8 == 0:
            one, other = one.view("u8"), other.view("u8")
        if not (one == other).all():
            return False
    return True


def common(column: Column, a: int, b: int) -> int:
    """Bytes that two rows of a column begin with, both of them."""
    host, size, data = column.splits.host, column.size, column.cells.data
    at, to = int(host[a]) * size, int(host[b]) * size
    most = min(int(host[a + 1]) * size - at, int(host[b + 1]) * size - to)
    done, step = 0, 4096
    while done < most:
        end = min(done + step, most)
        one, other = data[at + done : at + end], data[to + done : to + end]
        if not equal(one, other):
            return done + int((one != other).argmax())
        done, step = end, min(8 * step, _AT_ONCE)
    return most


def row_chunks(splits: RowSplits, size: int) -> Iterator[slice]:
    """The rows, as many at once as are compared at once."""
    start, host = 0, splits.host
    while start < splits.rows:
        end = int(np.searchsorted(host, host[start] + _AT_ONCE // size, side="right")) - 1
        end = min(max(end, start + 1), splits.rows)
        yield slice(start, end)
        start = end
