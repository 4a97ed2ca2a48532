"""Columns whose rows are made of parts: what they repeat lies in the message once.

A part says where cells lie, and how rows are made of them: end to end, each from a cell of its own
on, cells as often as counts say, or integers that rise by a step. It is read as a `RaggedView`, so
that rows which share cells share them until a rectangle or a tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.checks import expect, fail
from jagcodec.wire.frames import Payload
from jagcodec.wire.header import Header
from jagcodec.wire.leaf import MOST_RANGES, Leaf, Place, cell_range
from jagcodec.wire.schema import stored_size
from jagcodec.wire.spec import INTEGER_DTYPES, PART_NUMBERS, PLAIN, PartForm


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


class PickedRows(NamedTuple):
    """Some rows of a column.

    Attributes:
        rows: (R,) which.
        splits: They alone.
    """

    rows: IntArray
    splits: RowSplits


def table_of(source: Source, buffer: int, offset: int, count: int) -> list[Part]:
    """The table of `count` parts that lies at a place."""
    data = source.payload.read(buffer, offset, 8 * len(PART_NUMBERS) * count)
    # A copy: what was checked must not change with the message's memory.
    numbers = np.frombuffer(bytes(data), dtype=np.int64).reshape(count, len(PART_NUMBERS))
    return [Part(*part) for part in numbers.tolist()]


def view_of_parts(
    source: Source, leaf: Leaf, rows: RowSplits, picked: PickedRows | None = None
) -> RaggedView:
    """The rows of a column where their cells lie, in its message or beside it.

    Of some rows no cells are read but theirs, those of runs and ramps aside.

    Raises:
        WireFormatError: The parts are not those of these rows.
    """
    splits = rows if picked is None else picked.splits
    chosen = slice(None) if picked is None else picked.rows
    dtype, cell, inner = leaf.dtype, leaf.cell_bytes, leaf.shape[1:]
    shape = (splits.total, *inner)
    if not cell or not splits.total:
        return RaggedView(np.empty(0, np.uint8), dtype, shape, 1, None, splits)
    parts = table_of(source, leaf.place.buffer, leaf.place.offset, leaf.parts)
    if len(parts) == 1:
        if leaf.group is not None and parts[0].group != leaf.group:
            raise _other_rows(parts[0].group)
        memory, starts = _made(source, leaf, parts[0], rows, chosen)
        return RaggedView(memory, dtype, (len(memory) // cell, *inner), 1, starts, splits)
    memories: list[ByteArray] = []
    starts = np.empty((splits.rows, len(parts)), dtype=np.int64)
    runs = np.empty_like(starts)
    end = 0
    left = rows.lengths
    for k, part in enumerate(parts):
        own = source.row_splits(_group(source, part.group))
        if own.rows != rows.rows or (own.lengths > left).any():
            raise _other_rows(part.group)
        left = left - own.lengths
        memory, begins = _made(source, leaf, part, own, chosen)
        memories.append(memory)
        starts[:, k] = begins * cell + end
        runs[:, k] = own.lengths[chosen]
        end += len(memory)
    if left.any():
        raise _other_rows(parts[-1].group)
    return RaggedView(tuple(memories), dtype, shape, 1, starts, splits, runs)


def shares_objects(parts: list[Part]) -> bool:
    """Whether rows of documents that begin at one byte are one object."""
    return len(parts) == 1 and parts[0].form == PartForm.AT and parts[0].step != 0


def _made(
    source: Source, leaf: Leaf, part: Part, splits: RowSplits, chosen: slice | IntArray
) -> tuple[ByteArray, IntArray]:
    """Cells of a part, and where the chosen ones of its rows begin among them."""
    if part.form == PartForm.IN_ORDER:
        starts = _in_order(source, part, splits)
    elif part.form == PartForm.AT:
        starts = _at(source, leaf, part, splits)
    else:
        make = _FORMS.get(part.form)
        if make is None:
            raise fail("bad_record", f"expected a known form of parts, found {brief(part.form)}")
        memory, starts = make(source, leaf, part, splits)
        return memory, starts[chosen]
    place = _place(leaf, part)
    if isinstance(chosen, slice):
        return _read(source, place), starts
    return _ranges(source, place, starts[chosen], splits.lengths[chosen], part.cells)


def _ranges(
    source: Source, place: Place, starts: IntArray, lengths: IntArray, cells: int
) -> tuple[ByteArray, IntArray]:
    """The cells of some rows alone, and where each begins among these."""
    held = np.flatnonzero(lengths)
    if not len(held):
        return np.empty(0, dtype=np.uint8), np.zeros_like(starts)
    order = held[np.argsort(starts[held], kind="stable")]
    begins = starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    apart = np.append(True, begins[1:] > ends[:-1])  # rows may have cells in common
    firsts, lasts = begins[apart], ends[np.append(apart[1:], True)]
    if len(firsts) > MOST_RANGES:
        return _read(source, place), starts
    _check_place(source, place)
    each = place.cells // cells
    data = [
        cell_range(source.payload, place, each * a, each * b, keep=False)
        for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]
    among = RowSplits.from_lengths(lasts - firsts).starts
    which = np.searchsorted(firsts, starts, side="right") - 1
    moved = np.where(lengths > 0, starts - firsts[which] + among[which], 0)
    return np.concatenate(data), moved


def _in_order(source: Source, part: Part, splits: RowSplits) -> IntArray:
    expect(part.cells == splits.total, "bad_offsets", f"{splits.total} cells", part.cells)
    _index(source, part, 0)
    return splits.starts


def _at(source: Source, leaf: Leaf, part: Part, splits: RowSplits) -> IntArray:
    most = leaf.shape[0]  # of the column: its parts may have their cells in common
    expect(0 <= part.cells <= most, "out_of_bounds", f"at most {most} cells", part.cells)
    starts = _index(source, part, splits.rows)
    if not ((starts >= 0) & (starts <= part.cells - splits.lengths)).all():
        row = int(np.argmin((starts >= 0) & (starts <= part.cells - splits.lengths)))
        length = splits.lengths[row]
        raise fail(
            "out_of_bounds",
            f"expected row {row} of {length} within {part.cells} cells, found it at {starts[row]}",
        )
    return starts


def _repeated(
    source: Source, leaf: Leaf, part: Part, splits: RowSplits
) -> tuple[ByteArray, IntArray]:
    total = splits.total
    expect(0 <= part.cells <= total, "out_of_bounds", f"at most {total} cells", part.cells)
    cells = _words(_cells(source, leaf, part), leaf.cell_bytes)
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


def _ramp(source: Source, leaf: Leaf, part: Part, splits: RowSplits) -> tuple[ByteArray, IntArray]:
    name, cell = leaf.place.name, leaf.cell_bytes
    numbers = name in INTEGER_DTYPES and name != "bool" and leaf.inner == 1
    expect(numbers, "unknown_dtype", "integers, one per cell", name)
    wanted = part.cells in (1, splits.rows)
    expect(wanted, "bad_offsets", f"1 or {splits.rows} first cells", part.cells)
    _index(source, part, 0)
    firsts = _words(_cells(source, leaf, part), cell)
    # Unsigned, which wrap around as two's complement does.
    step = np.array(part.step & (1 << 8 * cell) - 1, dtype=firsts.dtype)
    if part.cells == 1:
        ramp = np.arange(splits.max, dtype=np.uint64).astype(firsts.dtype) * step + firsts[0]
        return _bytes(ramp), np.zeros(splits.rows, dtype=np.int64)
    ramp = np.arange(splits.total, dtype=np.uint64).astype(firsts.dtype) * step
    ramp += (firsts - splits.starts.astype(firsts.dtype) * step).repeat(splits.lengths)
    return _bytes(ramp), splits.starts


_Form: TypeAlias = Callable[[Source, Leaf, Part, RowSplits], tuple[ByteArray, IntArray]]
_FORMS: dict[int, _Form] = {
    int(PartForm.REPEATED): _repeated,
    int(PartForm.RAMP): _ramp,
}


def _group(source: Source, group: int) -> int:
    groups = len(source.header.groups)
    expect(0 <= group < groups, "bad_record", f"a ragged group below {groups}", group)
    return group


def _other_rows(group: int) -> WireFormatError:
    return fail("bad_offsets", f"expected parts of the rows, found others in ragged group {group}")


def _place(leaf: Leaf, part: Part) -> Place:
    cells = part.cells * leaf.inner
    return Place(part.buffer, part.offset, part.stored, cells, leaf.place.name)


def _cells(source: Source, leaf: Leaf, part: Part) -> ByteArray:
    """The cells of a part, as wide as their dtype."""
    return _read(source, _place(leaf, part))


def _index(source: Source, part: Part, count: int) -> IntArray:
    """The numbers beside the cells of a part, of which there are `count`."""
    expect(part.indices == count, "bad_offsets", f"{count} numbers", part.indices)
    place = Place(part.index_buffer, part.index_offset, part.index_stored, count, "int64")
    data = _all_cells(source, place)
    # A copy: what was checked must not change with the message's memory.
    return np.frombuffer(data.tobytes() if place.stored == PLAIN else data, dtype=np.int64)


def _read(source: Source, place: Place) -> ByteArray:
    """All cells of a place, made as wide as their dtype only once."""
    known = source.widened.get(place)
    if known is None:
        known = _all_cells(source, place)
        if place.stored != PLAIN:
            source.widened[place] = known
    return known


def _all_cells(source: Source, place: Place) -> ByteArray:
    if not place.cells:
        return np.empty(0, dtype=np.uint8)
    _check_place(source, place)
    return cell_range(source.payload, place, 0, place.cells, keep=False)


def _check_place(source: Source, place: Place) -> None:
    """Refuse a place of some cells that is not in the payload."""
    buffer, offset, stored, cells, name = place
    sizes = source.header.sizes
    size = stored_size(name, stored, cells)
    if not (0 <= buffer < len(sizes) and 0 <= offset <= sizes[buffer] - size):
        raise fail(
            "out_of_bounds",
            f"expected {size} bytes of a part in the payload, found buffer {brief(buffer)}, "
            f"offset {brief(offset)}",
        )


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
