"""`MessageWriter`: makes buffers, numbers and a header of items, then copies scattered rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jagcodec import kernels
from jagcodec.errors import UnsupportedTypeError
from jagcodec.memory import ALIGNMENT, aligned
from jagcodec.memory.arrays import ByteArray
from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire import spec
from jagcodec.wire.frames import BYTE, PendingMessage, ScatteredRows
from jagcodec.wire.header import write_header
from jagcodec.wire.items import item_of_bytes
from jagcodec.wire.spec import SMALL_BUFFER

_GAPS = tuple(map(bytes, range(ALIGNMENT)))  # `_GAPS[n]` is n zero bytes
_CONTIGUOUS = (np.ndarray, memoryview)


class MessageWriter(PendingMessage):
    """A message whose items get a place: small ones in frame 1, others in frames of their own.

    Call `place`, then `finish`. `frames_of` or `write_to` then call `write`.
    """

    __slots__ = ("_group_of", "_groups", "_places", "_size", "_small")

    def __init__(self) -> None:
        super().__init__(b"", [0])  # `finish` writes the header, and frame 1
        self._size = 0  # bytes of frame 1 so far
        # The parts of frame 1, with zeros in the places to which `write` copies rows.
        self._small: list[Any] = []
        self._groups: list[tuple[int, ...]] = []
        # The index of a ragged group, by its `RowSplits` object, and by its numbers and offsets.
        self._group_of: dict[Any, int] = {}
        # For cells and indices that several runs name: buffer, offset and storage code.
        self._places: dict[Any, tuple[int, ...]] = {}

    def place(self, items: Iterable[Any]) -> list[int]:
        """Give each `Item` a place; returns the numbers of the header for all items.

        An item that is an int is such a number already.
        """
        numbers: list[int] = []
        small, group_of = self._small, self._group_of
        for item in items:
            if type(item) is int:
                numbers.append(item)
                continue
            data, splits = item.data, item.splits
            if item.is_elided:
                numbers += self._put_elided(item)
            elif isinstance(data, _CONTIGUOUS) and 0 < (size := data.nbytes) < SMALL_BUFFER:
                end = self._size
                offset = -end % ALIGNMENT + end
                small += (_GAPS[offset - end], data)
                self._size = offset + size
                numbers += (0, offset)
            else:
                numbers += self._put_other(data, item.dims)
            if splits is not None:
                group = group_of.get(splits)
                group = self._group(splits) if group is None else group
                numbers += (item.storage_code, group, *item.dims)
            elif item.storage_code is None:
                numbers += item.dims
            else:
                numbers += (item.storage_code, *item.dims)
        return numbers

    def _put_other(self, data: Any, dims: tuple[int, ...]) -> tuple[int, int]:
        """Place data that is large, empty, or scattered."""
        scattered = not isinstance(data, _CONTIGUOUS)
        size = math.prod(dims) * data.dtype.itemsize if scattered else data.nbytes
        buffer = offset = 0  # an item without bytes has no place
        if size >= SMALL_BUFFER:
            buffer = len(self.buffers)
            self.buffers.append(size if scattered else np.frombuffer(data, np.uint8))
        elif size:
            offset = aligned(self._size)
            self._small += (_GAPS[offset - self._size], bytes(size))
            self._size = offset + size
        if scattered and size:
            self.rows.append(ScatteredRows(buffer, offset, size, data))
        return buffer, offset

    def _put(self, data: Any) -> list[int]:
        """Place contiguous memory; returns its buffer, and the offset in it."""
        return self.place([item_of_bytes(data)])

    def _put_elided(self, item: Any) -> Sequence[int]:
        """Place an item that has runs, or whose cells the runs of another item name."""
        return self._put_once(item.cells)[:2] if item.runs is None else self._put_table(item)

    def _put_once(self, item: Any) -> tuple[int, ...]:
        """Place cells or an index of a run once; returns the place and the storage code."""
        place = self._places.get(item)
        if place is None:
            place = self._places[item] = (*self._put(item.data), item.storage_code)
        return place

    def _put_table(self, item: Any) -> list[int]:
        """Place the cells and indices of an item's runs, then the table that names them."""
        table: list[int] = []
        for splits, cells, index in item.runs:
            at = self._put_once(cells)
            starts = (spec.NO_INDEX, 0, spec.PLAIN) if index is None else self._put_once(index)
            group = 0 if item.splits is None else self._group(splits)
            table += (group, *at, cells.dims[0], *starts)
        return self._put(np.array(table, dtype=np.int64).view(np.uint8))

    def _group(self, splits: RowSplits) -> int:
        """The index of the ragged group of these rows; a new group if no equal one exists."""
        # Fewer than two rows need no offsets: min and max describe them.
        offsets = splits.offsets_array.tobytes() if splits.rows > 1 else b""
        numbers = splits.rows, splits.min, splits.max
        key = (*numbers, offsets)
        group = self._group_of.get(key)
        if group is None:
            group = self._group_of[key] = len(self._groups)
            place = self._put(memoryview(offsets)) if offsets else (0, 0)
            self._groups.append((*place, *numbers))
        self._group_of[splits] = group
        return group

    def first_unbacked(self, unbacked: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
        """The first path in `unbacked` whose number of rows exceeds the bytes placed so far."""
        if not unbacked:
            return None
        large = (part if type(part) is int else part.nbytes for part in self.buffers[1:])
        placed = self._size + sum(large)
        return next((each for each in unbacked if each[1] > placed), None)

    def finish(
        self,
        start: bytes,
        numbers: list[int],
        values: bytes,
        unbacked: Sequence[tuple[str, int]] = (),
    ) -> PendingMessage:
        """The message, once everything is placed."""
        lacking = self.first_unbacked(unbacked)
        if lacking:
            path, rows = lacking
            detail = (
                f"expected at most {spec.MAX_UNBACKED_ROWS} rows without data, found {rows}; "
                "send them in several messages, see split_rows"
            )
            raise UnsupportedTypeError("too_large", path, detail)
        buffers = self.buffers
        if self._size:
            buffers[0] = np.frombuffer(bytearray().join(self._small), BYTE)
        else:
            buffers[:1] = [] if len(buffers) == 1 else [np.empty(0, np.uint8)]
        sizes = [part if type(part) is int else part.nbytes for part in buffers]
        self.header: bytes = write_header(start, numbers, values, self._groups, sizes)
        self._places.clear()  # free the memory of cells before rows are copied
        return self

    def write(self, targets: list[ByteArray]) -> None:
        """Copy scattered rows to their places in the memory of each buffer."""
        copies = []
        for buffer, start, size, view in self.rows:
            copies.append(view.copy_task(targets[buffer][start : start + size]))
        kernels.copy_all(copies)

    def sources(self) -> list[Any]:
        """The memory that cells were, or will be, copied from."""
        copied = [part for part in self._small if isinstance(part, np.ndarray)]
        rows = [part for scattered in self.rows for part in scattered.view.memories]
        return [*self.read_from, *copied, *rows]
