"""`MessageWriter`: items to buffers, numbers and a header; then it copies rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jagcodec import rowcopy
from jagcodec.errors import UnsupportedTypeError
from jagcodec.memory import ALIGNMENT, aligned
from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.ragged.copy_rows import copy_task
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import spec
from jagcodec.wire.frames import BYTE, PendingMessage
from jagcodec.wire.header import write_header
from jagcodec.wire.lowered import Rows

_GAPS = tuple(map(bytes, range(ALIGNMENT)))  # `_GAPS[n]` is n zero bytes


class MessageWriter(PendingMessage):
    """A message while its items are placed: small buffers end to end in frame 1, then the large."""

    __slots__ = ("_group_of", "_groups", "_size", "_small")

    def __init__(self) -> None:
        super().__init__(b"", [0])  # a header when it is finished
        self._size = 0  # of frame 1
        self._small: list[Any] = []  # the contents of frame 1, zeros for rows to be copied
        self._groups: list[tuple[int, ...]] = []
        self._group_of: dict[Rows, int] = {}

    def place(self, items: Iterable[Any]) -> list[int]:
        """The numbers of items; those with bytes get a place."""
        numbers: list[int] = []
        buffers, small, group_of = self.buffers, self._small, self._group_of
        for item in items:
            if type(item) is int:
                numbers.append(item)
                continue
            data, stored, rows, dims = item
            scattered = type(data) is RaggedView
            size = math.prod(dims) * data.dtype.itemsize if scattered else data.nbytes
            buffer = offset = 0  # an item without bytes has no place
            if size >= spec.SMALL_BUFFER:
                buffer = len(buffers)
                buffers.append(size if scattered else np.frombuffer(data, np.uint8))
            elif size:
                end = self._size
                offset = aligned(end)
                small.append(_GAPS[offset - end])
                small.append(bytes(size) if scattered else data)
                self._size = offset + size
            if scattered and size:
                self.rows.append((buffer, offset, size, data))
            if rows is None:
                numbers += (buffer, offset) if stored is None else (buffer, offset, stored)
            else:
                group = group_of.get(rows)
                numbers += (buffer, offset, stored, self._group(rows) if group is None else group)
            numbers += dims
        return numbers

    def _put(self, data: Any) -> list[int]:
        """The place of contiguous memory: a buffer, and the offset in it."""
        return self.place([(data, None, None, ())])

    def _group(self, rows: Rows) -> int:
        """The ragged group of these rows, made or found."""
        key: Any = rows
        if isinstance(rows, RowSplits):
            # Fewer than two rows need no offsets: min and max describe them.
            offsets = rows.offsets_array.tobytes() if rows.rows > 1 else b""
            key = rows.rows, rows.min, rows.max, offsets
        group = self._group_of.get(key)
        if group is None:
            group = self._group_of[key] = len(self._groups)
            count, low, high, offsets = key
            place = self._put(memoryview(offsets)) if offsets else (0, 0)
            self._groups.append((*place, count, low, high))
        self._group_of[rows] = group
        return group

    def first_unbacked(self, unbacked: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
        """The first of these paths and numbers of rows that are more than the bytes placed."""
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
        return self

    def write(self, targets: list[ByteArray]) -> None:
        copies = []
        for buffer, start, size, view in self.rows:
            copies.append(copy_task(view, targets[buffer][start : start + size]))
        rowcopy.copy_all(copies)

    def sources(self) -> list[Any]:
        copied = [part for part in self._small if type(part) is np.ndarray]
        rows = [part for *_, view in self.rows for part in view.memories]
        return [*self.read_from, *copied, *rows]
