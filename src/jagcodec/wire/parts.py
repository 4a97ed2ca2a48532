"""Columns whose rows are made of parts: what they repeat lies in the message once.

A part says where cells lie, and how rows are made of them: end to end, each from a cell of its own
on, cells as often as counts say, or integers that rise by a step. It is read as a `RaggedView`, so
that rows which share cells share them until a rectangle or a tensor is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.checks import expect, fail
from jagcodec.wire.frames import Payload
from jagcodec.wire.header import Header
from jagcodec.wire.narrow import widened
from jagcodec.wire.schema import stored_size
from jagcodec.wire.spec import INTEGER_DTYPES, PART_NUMBERS, PARTS, PLAIN, PartForm

Place: TypeAlias = tuple[int, int, int, int, str]
"""Buffer, offset, how cells are stored, how many of a dtype there are, and which dtype."""


class Source(Protocol):
    """The open message that a column lies in.

    Attributes:
        header: What the message says of itself.
        payload: Its buffers.
        widened: Cells that were stored narrow, as wide as their dtype.
    """

    header: Header
    payload: Payload
    widened: dict[Place, ByteArray]

    def row_splits(self, group: int, /) -> RowSplits:
        """The rows of a ragged group."""
        ...


class Part(NamedTuple):
    """The numbers of a part, in the order of `PART_NUMBERS`."""

    form: int
    group: int
    buffer: int
    offset: int
    stored: int
    cells: int
    index_buffer: int
    index_offset: int
    index_stored: int
    indices: int
    step: int


class Rows(NamedTuple):
    """What the rows of a column are, whatever they are made of.

    Attributes:
        name: The dtype of their cells.
        dtype: The same as torch calls it.
        inner: Dims of a cell.
        splits: The rows.
        group: Their ragged group; None of a tensor, whose rows are one cell each.
    """

    name: str
    dtype: torch.dtype
    inner: tuple[int, ...]
    splits: RowSplits
    group: int | None


def table_of(source: Source, buffer: int, offset: int, stored: int) -> list[Part]:
    """The parts of a column that is stored as `stored` at a place."""
    count = stored - PARTS
    data = source.payload.read(buffer, offset, 8 * len(PART_NUMBERS) * count)
    # A copy: what was checked must not change with the message's memory.
    numbers = np.frombuffer(bytes(data), dtype=np.int64).reshape(count, len(PART_NUMBERS))
    return [Part(*part) for part in numbers.tolist()]


def view_of_parts(source: Source, rows: Rows, parts: list[Part]) -> RaggedView:
    """The rows of a column where their cells lie, in its message or beside it.

    Raises:
        WireFormatError: The parts are not those of these rows.
    """
    splits, inner = rows.splits, rows.inner
    cell = math.prod(inner) * rows.dtype.itemsize
    if not cell or not splits.total:
        shape = (splits.total, *inner)
        return RaggedView(np.empty(0, np.uint8), rows.dtype, shape, 1, None, splits)
    if len(parts) == 1:
        if rows.group is not None and parts[0].group != rows.group:
            raise _other_rows(parts[0].group)
        memory, starts = _made(source, rows, parts[0], splits, cell)
        shape = (len(memory) // cell, *inner)
        return RaggedView(memory, rows.dtype, shape, 1, starts, splits)
    memories: list[ByteArray] = []
    starts = np.empty((splits.rows, len(parts)), dtype=np.int64)
    runs = np.empty_like(starts)
    end = 0
    left = splits.lengths
    for k, part in enumerate(parts):
        own = source.row_splits(_group(source, part.group))
        if own.rows != splits.rows or (own.lengths > left).any():
            raise _other_rows(part.group)
        left = left - own.lengths
        memory, begins = _made(source, rows, part, own, cell)
        memories.append(memory)
        starts[:, k] = begins * cell + end
        runs[:, k] = own.lengths
        end += len(memory)
    if left.any():
        raise _other_rows(parts[-1].group)
    shape = (splits.total, *inner)
    return RaggedView(tuple(memories), rows.dtype, shape, 1, starts, splits, runs)


def shares_objects(parts: list[Part]) -> bool:
    """Whether rows of documents that begin at one byte are one object."""
    return len(parts) == 1 and parts[0].form == PartForm.AT and parts[0].step != 0


def _made(
    source: Source, rows: Rows, part: Part, splits: RowSplits, cell: int
) -> tuple[ByteArray, IntArray]:
    """The cells of a part, and where its rows begin among them."""
    make = _FORMS.get(part.form)
    if make is None:
        raise fail("bad_record", f"expected a known form of parts, found {brief(part.form)}")
    return make(source, rows, part, splits, cell)


def _in_order(
    source: Source, rows: Rows, part: Part, splits: RowSplits, cell: int
) -> tuple[ByteArray, IntArray]:
    expect(part.cells == splits.total, "bad_offsets", f"{splits.total} cells", part.cells)
    _index(source, part, 0)
    return _cells(source, rows, part, cell), splits.starts


def _at(
    source: Source, rows: Rows, part: Part, splits: RowSplits, cell: int
) -> tuple[ByteArray, IntArray]:
    most = rows.splits.total  # of the column: its parts may have their cells in common
    expect(0 <= part.cells <= most, "out_of_bounds", f"at most {most} cells", part.cells)
    starts = _index(source, part, splits.rows)
    if not ((starts >= 0) & (starts <= part.cells - splits.lengths)).all():
        row = int(np.argmin((starts >= 0) & (starts <= part.cells - splits.lengths)))
        length = splits.lengths[row]
        raise fail(
            "out_of_bounds",
            f"expected row {row} of {length} within {part.cells} cells, found it at {starts[row]}",
        )
    return _cells(source, rows, part, cell), starts


def _repeated(
    source: Source, rows: Rows, part: Part, splits: RowSplits, cell: int
) -> tuple[ByteArray, IntArray]:
    total, most = splits.total, rows.splits.total
    expect(0 <= part.cells <= most, "out_of_bounds", f"at most {most} cells", part.cells)
    cells = _words(_cells(source, rows, part, cell), cell)
    if part.cells == 1 and not part.indices:
        # One row of it, as long as the longest, in which all rows begin at the same cell.
        return _bytes(cells.repeat(splits.max)), np.zeros(splits.rows, dtype=np.int64)
    counts = _index(source, part, part.cells)
    ends = counts.cumsum()
    # Of counts up to the total, the first sum that is too large cannot have wrapped around.
    sound = (counts >= 0) & (counts <= total) & (ends >= 0) & (ends <= total)
    if not sound.all() or (int(ends[-1]) if len(ends) else 0) != total:
        raise fail("bad_offsets", f"expected counts of {total} cells, found others")
    return _bytes(cells.repeat(counts)), splits.starts


def _ramp(
    source: Source, rows: Rows, part: Part, splits: RowSplits, cell: int
) -> tuple[ByteArray, IntArray]:
    numbers = rows.name in INTEGER_DTYPES and rows.name != "bool" and cell == rows.dtype.itemsize
    expect(numbers, "unknown_dtype", "integers, one per cell", rows.name)
    wanted = part.cells in (1, splits.rows)
    expect(wanted, "bad_offsets", f"1 or {splits.rows} first cells", part.cells)
    _index(source, part, 0)
    firsts = _words(_cells(source, rows, part, cell), cell)
    # Unsigned, which wrap around as two's complement does.
    step = np.array(part.step & (1 << 8 * cell) - 1, dtype=firsts.dtype)
    if part.cells == 1:
        ramp = np.arange(splits.max, dtype=np.uint64).astype(firsts.dtype) * step + firsts[0]
        return _bytes(ramp), np.zeros(splits.rows, dtype=np.int64)
    ramp = np.arange(splits.total, dtype=np.uint64).astype(firsts.dtype) * step
    ramp += (firsts - splits.starts.astype(firsts.dtype) * step).repeat(splits.lengths)
    return _bytes(ramp), splits.starts


_Form: TypeAlias = Callable[[Source, Rows, Part, RowSplits, int], tuple[ByteArray, IntArray]]
_FORMS: dict[int, _Form] = {
    int(PartForm.IN_ORDER): _in_order,
    int(PartForm.AT): _at,
    int(PartForm.REPEATED): _repeated,
    int(PartForm.RAMP): _ramp,
}


def _group(source: Source, group: int) -> int:
    groups = len(source.header.groups)
    expect(0 <= group < groups, "bad_record", f"a ragged group below {groups}", group)
    return group


def _other_rows(group: int) -> WireFormatError:
    return fail("bad_offsets", f"expected parts of the rows, found others in ragged group {group}")


def _cells(source: Source, rows: Rows, part: Part, cell: int) -> ByteArray:
    """The cells of a part, as wide as their dtype."""
    each = cell // rows.dtype.itemsize
    place = (part.buffer, part.offset, part.stored, part.cells * each, rows.name)
    return _read(source, place)


def _index(source: Source, part: Part, count: int) -> IntArray:
    """The numbers beside the cells of a part, of which there are `count`."""
    expect(part.indices == count, "bad_offsets", f"{count} numbers", part.indices)
    place = (part.index_buffer, part.index_offset, part.index_stored, count, "int64")
    data, stored = _stored(source, place)
    # A copy: what was checked must not change with the message's memory.
    own: Any = data.tobytes() if stored == PLAIN else widened(data, stored, "int64", count)
    return np.frombuffer(own, dtype=np.int64)


def _read(source: Source, place: Place) -> ByteArray:
    """Cells at a place that nobody has checked yet, as wide as their dtype."""
    known = source.widened.get(place)
    if known is None:
        _, _, _, cells, name = place
        known, stored = _stored(source, place)
        if stored != PLAIN:
            known = source.widened[place] = widened(known, stored, name, cells)
    return known


def _stored(source: Source, place: Place) -> tuple[ByteArray, int]:
    """Cells at a place that nobody has checked yet as they lie there, and how they are stored."""
    buffer, offset, stored, cells, name = place
    if not cells:
        return np.empty(0, dtype=np.uint8), PLAIN
    sizes = source.header.sizes
    size = stored_size(name, stored, cells)
    if not (0 <= buffer < len(sizes) and 0 <= offset <= sizes[buffer] - size):
        raise fail(
            "out_of_bounds",
            f"expected {size} bytes of a part in the payload, found buffer {brief(buffer)}, "
            f"offset {brief(offset)}",
        )
    return source.payload.read(buffer, offset, size), stored


def _words(data: ByteArray, cell: int) -> Any:
    """Cells as numbers of their width, or as bytes that numpy does not look into."""
    if cell in (1, 2, 4, 8):
        if data.ctypes.data % cell:
            data = data.copy()
        return data.view(f"u{cell}")
    return data.view(f"V{cell}")


def _bytes(cells: Any) -> ByteArray:
    data: ByteArray = cells.view(np.uint8)
    return data
