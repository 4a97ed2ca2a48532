"""`Message`: an open message, with its checked header, cells and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec.errors import brief
from jagcodec.memory.arrays import (
    ByteArray,
    IntArray,
    address,
    array_bytes,
    for_torch,
)
from jagcodec.memory.blocks import new_block
from jagcodec.memory.extents import check_extent
from jagcodec.rows.chosen_rows import CHOSEN, ChosenRows, joined_rows
from jagcodec.rows.copy_bytes import array_of_cells, bytes_of_cells, gathered_bytes
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire import documents, spec
from jagcodec.wire.checks import bad, fail
from jagcodec.wire.dtypes import CELL_DTYPES, cell_dtype
from jagcodec.wire.frames import NO_BYTES
from jagcodec.wire.header import Header
from jagcodec.wire.leaf import CellPlace, Leaf, leaf_of
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, exceeded
from jagcodec.wire.schema import BUFFER, DOCUMENT_ROWS, GROUP, OFFSET, SIZE, STORAGE_CODE, Node
from jagcodec.wire.spec import EXPANSION, PLAIN, TORCH_ITEMSIZES, is_widened_on_read
from jagcodec.wire.stored.elided_rows import MOST_RANGES, rows_in_runs, runs_at
from jagcodec.wire.stored.narrow import widened

if TYPE_CHECKING:
    import torch


class Reading(NamedTuple):
    """How a message is read: the options of `decode`, and three more."""

    limits: Limits = DEFAULT_LIMITS
    copy: bool | None = None
    device: torch.device | None = None  # where tensors go; None leaves them where their cells are
    allow_pickle: bool = False
    # Copy and decompress each value separately, instead of each frame as a whole: few of them may
    # be read.
    value_by_value: bool = False
    verify: bool = True  # compare checksums of frames; that of the header always is compared
    file: str | None = None  # the name of the message's file, for errors

    def has_options(self) -> bool:
        """Whether a caller gave any of the options of `decode`."""
        limits, copy, device, allow_pickle, *_ = Reading()
        return (
            self.limits != limits
            or self.copy != copy
            or self.device != device
            or self.allow_pickle != allow_pickle
        )


class Budget:
    """Counts what one read takes of the limits. The message has no counts: threads share it."""

    __slots__ = ("containers_around", "objects", "repeated_bytes")

    def __init__(self, message: Message) -> None:
        self.containers_around: int = 0  # containers around the message that is being read
        self.objects: int = message.header.objects  # grows with each message in a row
        self.repeated_bytes: int = 0  # bytes of repeated documents that become objects

    def check_depth(self, message: Message, levels: int) -> None:
        """Refuse a value that is `levels` deep in the message, if that is too deep in all."""
        deepest = self.containers_around + levels
        if deepest > message.limits.depth:
            raise exceeded("depth", message.limits.depth, deepest, "levels")

    def count_objects(self, message: Message) -> None:
        """Count the objects of a message in a row."""
        self.objects += message.header.objects
        most = message.limits.objects
        if self.objects > most:
            raise exceeded("objects", most, self.objects, "objects of all rows together")

    def count_documents(self, message: Message, size: int) -> None:
        """Refuse elided documents that need more, as objects, than the limits allow."""
        self.repeated_bytes += size
        beyond = EXPANSION * (self.repeated_bytes - EXPANSION * message.header.total)
        if beyond > message.limits.expanded:
            what = f"bytes of repeated documents, {EXPANSION} for each, beyond as many per byte"
            raise exceeded("expanded", message.limits.expanded, beyond, what)


class Message:
    """An open message: its checked header and its buffers. Threads may share it.

    The header was checked, so every place in it is within a buffer. A read-only frame is copied
    whole when the first value in it is read. If the message is read value by value, each value is
    copied separately instead, because few of them may be read.
    """

    __slots__ = (
        "_elided_views",
        "_groups",
        "_owned",
        "_rectangle_splits",
        "_unread",
        "_widened",
        "allow_pickle",
        "away",
        "buffers",
        "device",
        "frames",
        "header",
        "in_memory",
        "limits",
        "numbers",
        "reading",
    )

    def __init__(
        self,
        header: Header,
        buffers: Sequence[Any],
        reading: Reading,
        frames: Sequence[Any] | None,
        in_memory: bool = True,
    ) -> None:
        self.header: Header = header
        self.numbers: list[int] = header.numbers
        # Each an array; if it is not in memory, a function (offset, size) -> bytes.
        self.buffers: Sequence[Any] = buffers
        self.in_memory: bool = in_memory  # whether reading a whole buffer costs nothing
        self.reading: Reading = reading
        self.limits: Limits = reading.limits
        self.device: torch.device | None = reading.device  # None: tensors stay on the CPU
        # The device if it is not the CPU. Tensors are copied there, so the host needs no copy.
        is_away = reading.device is not None and reading.device.type != "cpu"
        self.away: torch.device | None = reading.device if is_away else None
        self.allow_pickle: bool = reading.allow_pickle
        self.frames: Sequence[Any] | None = frames  # header first; None for a store
        # The documents of the header, with `_TAKEN` for each that a reader has. A reader pops this
        # list, takes one document, and puts the list back.
        self._unread: list[list[Any]] = [header.values] if header.values else []
        self._groups: dict[int | None, RowSplits] = {}
        self._rectangle_splits: dict[int, RowSplits] = {}  # of rectangles, by their number of rows
        self._owned: dict[int, ByteArray] = {}  # buffers that values may alias and write to
        self._widened: dict[CellPlace, ByteArray] = {}  # widened cells of runs
        # Elided columns in memory with all of their rows, by the first of their numbers.
        self._elided_views: dict[int, RaggedView] = {}

    def shape(self, node: Node) -> tuple[int, ...]:
        """The dims of a node, which are the last of its numbers."""
        return tuple(self.numbers[node.dims : node.end])

    def document(self, index: int) -> Any:
        """A document of the header, which the caller may change: no other reader gets it."""
        try:
            values = self._unread.pop()
        except IndexError:  # another thread has popped the list
            values = []
        if not values or values[index] is _TAKEN:
            values = documents.parsed(self.header.value_bytes, "values")
        value, values[index] = values[index], _TAKEN
        # Keep the other documents, so that reading every column unpacks the header only once.
        if not self._unread:
            self._unread.append(values)
        return value

    # Bytes

    def read(self, buffer: int, offset: int, size: int) -> ByteArray:
        """The bytes of a place. The caller must not write to them."""
        if not size:
            return NO_BYTES  # the buffer of an empty value need not exist
        whole = self.buffers[buffer]
        data: ByteArray = whole(offset, size) if callable(whole) else whole[offset : offset + size]
        return data

    def bytes_at(self, buffer: int, offset: int, size: int, alignment: int) -> Any:
        """The bytes of a place, flat and aligned; safe to write to unless `copy` is False."""
        if not size:
            return NO_BYTES
        data = self._owned.get(buffer)
        if data is None:
            data = self.buffers[buffer]
            whole, copy = type(data) is np.ndarray, self.reading.copy
            if whole and copy is None and data.flags.writeable:
                self._owned[buffer] = data
            elif self.reading.value_by_value or not whole:
                return writable(self.read(buffer, offset, size), copy, alignment)
            else:
                data = self._owned[buffer] = writable(data, copy)
        data = data[offset : offset + size]
        return copied(data) if alignment > 1 and address(data) % alignment else data

    def int64s_at(self, buffer: int, offset: int, count: int) -> IntArray:
        """A copy of integers: what was checked must not change with the message's memory."""
        return np.frombuffer(bytearray(self.read(buffer, offset, 8 * count)), dtype=np.int64)

    def elements(self, place: CellPlace, start: int, end: int) -> ByteArray:
        """The bytes of elements `start` to `end`, widened to their dtype; only read them."""
        buffer, offset, code, _, name = place
        if code == PLAIN or start == end:
            size = TORCH_ITEMSIZES[name]
            return self.read(buffer, offset + start * size, (end - start) * size)
        if code == spec.BITS:
            # Read whole bytes, and drop the bits before the first element.
            first = start // 8
            data = self.read(buffer, offset + first, (end + 7) // 8 - first)
            elements = widened(data, code, name, end - 8 * first)
            return elements[(start - 8 * first) * TORCH_ITEMSIZES[name] :]
        width, _ = spec.STORED_WIDTHS[code]
        data = self.read(buffer, offset + start * width, (end - start) * width)
        return widened(data, code, name, end - start)

    def all_elements(self, place: CellPlace) -> ByteArray:
        """All elements of a run, as wide as their dtype; narrow ones are widened once and kept."""
        cells = self._widened.get(place)
        if cells is None:
            cells = self.elements(place, 0, place.elements)
            if place.elements and is_widened_on_read(place.storage_code):
                self._widened[place] = cells
        return cells

    # Rows

    def row_splits(self, group: int) -> RowSplits:
        """The rows of a ragged group, which are read once and kept."""
        splits = self._groups.get(group)
        return splits or self._groups.setdefault(group, self._read_group(group))

    def _read_group(self, index: int) -> RowSplits:
        group = self.header.groups[index]
        if group.rows < 2:
            # Up to one row has no offsets: its length is min and max.
            return RowSplits.from_lengths(np.array([group.max] * group.rows, dtype=np.int64))
        offsets = self.int64s_at(group.buffer, group.offset, group.rows + 1)
        row_splits = RowSplits.from_offsets(offsets)
        if row_splits is None:
            expected, found = "offsets from 0 that never fall", offsets[:8].tolist()
        elif row_splits.min == group.min and row_splits.max == group.max:
            return row_splits
        else:
            expected = f"rows of {row_splits.min} to {row_splits.max} by the offsets"
            found = [group.min, group.max]
        detail = f"expected {expected}, found {brief(found)}"
        raise fail("bad_offsets", detail, path=f"$ (ragged group {index})")

    def splits(self, group: int | None, total: int) -> RowSplits:
        """The rows of a column with `total` cells, checked to end at its last cell.

        Without a group, each row is one cell, as in a rectangle.
        """
        if group is None:
            splits = self._rectangle_splits.get(total)
            return splits or self._rectangle_splits.setdefault(total, RowSplits.of_cells(total))
        splits = self.row_splits(group)
        if splits.total != total:
            detail = (
                f"expected ragged group {group} to end at cell {total} of the values, "
                f"found {splits.total}"
            )
            raise fail("bad_offsets", detail)
        return splits

    def leaf(self, node: Node) -> Leaf:
        """The `Leaf` of a TENSOR, a JAGGED or rows of documents."""
        leaf = leaf_of(node, self.numbers)
        if leaf is None:
            raise bad("a column whose rows can be read in place", f"a {node.kind.name}")
        return leaf

    def view(self, node: Node, chosen: ChosenRows | None = None) -> RaggedView:
        """A view of the rows of a TENSOR (one cell each), a JAGGED or documents, in place.

        The caller must not write to them. If the chosen rows are a range of neighbouring cells, the
        view is end to end.
        """
        i, numbers = node.number, self.numbers
        if numbers[i + STORAGE_CODE] != PLAIN or not (chosen is None or self.in_memory):
            return self._view_of_leaf(node, chosen)
        # The common case of `_view_of_leaf`, which this repeats because it takes 1 us, not 5: reads
        # of one message with small columns spend much of their time here.
        kind, dim, name, group = node.kind, 1, "uint8", None
        if kind is _JAGGED:
            (name, _, dim), group = node.fields, numbers[i + GROUP]
            shape = tuple(numbers[node.dims : node.end])
        elif kind is _TENSOR:
            name, shape = node.fields[0], tuple(numbers[node.dims : node.end])
        elif kind in DOCUMENT_ROWS:
            group, shape = numbers[i + GROUP], (numbers[i + SIZE],)
        else:
            return self._view_of_leaf(node, chosen)
        splits = self._groups.get(group)
        if splits is None or splits.total != shape[dim - 1]:
            splits = self.splits(group, shape[dim - 1])
        size, offset = math.prod(shape) * TORCH_ITEMSIZES[name], numbers[i + OFFSET]
        # The buffer of an empty value need not exist.
        data = self.buffers[numbers[i + BUFFER]] if size else NO_BYTES
        data = data(offset, size) if callable(data) else data[offset : offset + size]
        dtype = CELL_DTYPES.get(name) or cell_dtype(name)
        view = RaggedView(data, dtype, shape, dim, None, splits)
        return view if chosen is None else chosen.of_view(view)

    def _view_of_leaf(self, node: Node, chosen: ChosenRows | None) -> RaggedView:
        """The general case of `view`, for any storage of cells; `view` inlines the common one."""
        leaf = self.leaf(node)
        splits = self.splits(leaf.group, leaf.shape[leaf.ragged_dim - 1])
        if leaf.runs:
            return self._view_in_runs(node, leaf, splits, chosen)
        if chosen is None:
            return self._view_of_cells(leaf, splits, None)
        bounds = self._ranges_to_read(leaf, splits, chosen)
        if bounds is None:
            return chosen.of_view(self._view_of_cells(leaf, splits, None))
        return self._view_of_cells(leaf, chosen.among(splits)[0], bounds)

    def _view_of_cells(
        self, leaf: Leaf, splits: RowSplits, bounds: Sequence[tuple[int, int]] | None
    ) -> RaggedView:
        """A view of all rows of a leaf, or of the rows in some ranges of its cells, end to end."""
        place, shape, per_cell = leaf.place, leaf.shape, leaf.elements_per_cell
        if bounds is None:
            data = self.elements(place, 0, place.elements)
            return RaggedView(data, leaf.dtype, shape, leaf.ragged_dim, None, splits)
        extent = shape[leaf.ragged_dim - 1]
        parts = [
            self.elements(place, (k + a) * per_cell, (k + b) * per_cell)
            for k in range(0, leaf.outer * extent, extent or 1)
            for a, b in bounds
            if a < b
        ]
        data = parts[0] if len(parts) == 1 else np.concatenate([NO_BYTES, *parts])
        shape = leaf.shape_of(sum(b - a for a, b in bounds))
        return RaggedView(data, leaf.dtype, shape, leaf.ragged_dim, None, splits)

    def _ranges_to_read(
        self, leaf: Leaf, splits: RowSplits, chosen: ChosenRows
    ) -> list[tuple[int, int]] | None:
        """The ranges of cells to read for chosen rows, in their order; None to read all cells."""
        is_one_range = isinstance(chosen.index, range) and leaf.outer == 1
        ranges = joined_rows(chosen.index) if is_one_range or not self.in_memory else []
        if not is_one_range and (self.in_memory or leaf.outer * len(ranges) > MOST_RANGES):
            return None
        if splits.one_cell_each:
            return [(rows.start, rows.stop) for rows in ranges]
        offsets = splits.offsets_array
        return [(int(offsets[rows.start]), int(offsets[rows.stop])) for rows in ranges]

    def _view_in_runs(
        self, node: Node, leaf: Leaf, splits: RowSplits, chosen: ChosenRows | None
    ) -> RaggedView:
        """A view of all rows of an elided column, or of chosen ones."""
        if not self.in_memory:
            return rows_in_runs(self, leaf, splits, chosen)
        whole = self._elided_views.get(node.number)
        if whole is None or whole.dtype is not leaf.dtype:  # torch was imported since
            whole = self._elided_views[node.number] = rows_in_runs(self, leaf, splits, None)
        if chosen is None:
            return whole
        return whole.choose(chosen.at, chosen.among(whole.row_splits)[0])

    def is_narrow(self, node: Node) -> bool:
        """Whether elements of a TENSOR or JAGGED are stored in fewer bytes than their dtype has."""
        if self.numbers[node.number + STORAGE_CODE] == PLAIN:  # most columns
            return False
        leaf = self.leaf(node)
        places = runs_at(self, leaf) if leaf.runs else [leaf.place]
        return leaf.place.elements > 0 and any(
            is_widened_on_read(place.storage_code) for place in places
        )

    def is_elided(self, node: Node) -> bool:
        """Whether rows of a TENSOR, a JAGGED or documents share cells."""
        return self.numbers[node.number + STORAGE_CODE] != PLAIN and self.leaf(node).runs > 0

    def int64s_of_node(self, node: Node, chosen: ChosenRows | None = None) -> IntArray:
        """A copy of the cells of a TENSOR of int64s, or of its chosen rows.

        What was checked must not change with the message's memory.
        """
        view = self.view(node, chosen)
        return np.ndarray(view.values_shape, np.int64, bytes_of_cells(view).tobytes())


_JAGGED, _TENSOR = spec.Kind.JAGGED, spec.Kind.TENSOR

_TAKEN = object()
"""Stands in place of a document of the header that a reader has taken."""


def writable(data: ByteArray, copy: bool | None, alignment: int = 1) -> ByteArray:
    """Returns `data` or a copy.

    ``copy=True`` always copies, None copies read-only memory, False copies neither. Memory that
    does not have the `alignment` is always copied.
    """
    read_only = not data.flags.writeable
    if copy or (copy is None and read_only) or (alignment > 1 and address(data) % alignment):
        data = copied(data)
    return for_torch(data)  # read-only only with `copy=False`


def owned_bytes(
    message: Message, view: RaggedView, *, goes_to_device: bool = False
) -> ByteArray | None:
    """The cells of a view, in memory that a value may keep; None if they are not end to end.

    Cells that go to a device need no copy here.
    """
    if not view.is_end_to_end:
        return None
    memory: Any = view.memory
    data, itemsize = array_bytes(memory), view.dtype.itemsize
    if not len(data):  # a choice may repeat rows without bytes until their dims are too large
        check_extent(view.shape, itemsize, CHOSEN)
    return writable(data, False if goes_to_device else message.reading.copy, itemsize)


def owned_array(message: Message, view: RaggedView) -> npt.NDArray[Any]:
    """The cells of a view's rows, end to end, as an array that the caller may keep."""
    data = owned_bytes(message, view)
    return array_of_cells(gathered_bytes([view])[0] if data is None else data, view)


def copied(data: ByteArray) -> ByteArray:
    """New memory with the same bytes, at an address that suits every dtype."""
    copy: ByteArray = new_block(len(data)).data
    copy[:] = data
    return copy
