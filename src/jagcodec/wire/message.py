"""`Message`: an open message, with its checked header, cells and rows."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from jagcodec._arguments import usable_device
from jagcodec.errors import brief
from jagcodec.memory import aligned
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, from_bytes
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import nested_tensor
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import documents
from jagcodec.wire.checks import INT64_MAX, bad, fail, inside
from jagcodec.wire.compress import opened_buffers
from jagcodec.wire.dtypes import DTYPES, NAMED_ARRAYS, unknown_dtype
from jagcodec.wire.frames import (
    PREAMBLE,
    Buffers,
    Reading,
    blob_end,
    buffer_bytes,
    frame_arrays,
    frames_of_blob,
    header_of_blob,
    is_blob,
    read_preamble,
    starts_of,
    writable,
)
from jagcodec.wire.header import Header, check_crc, read_header
from jagcodec.wire.indirect import Source, view_of_runs
from jagcodec.wire.leaf import MOST_RANGES, CellPlace, Leaf, cell_range, leaf_of
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, exceeded, usable_limits
from jagcodec.wire.narrow import widened
from jagcodec.wire.records import revived
from jagcodec.wire.schema import Node, stored_size
from jagcodec.wire.spec import EXPANSION, INDIRECT, PLAIN, Kind

# --- opening -----------------------------------------------------------------------------------


def reading(
    where: str,
    limits: Any,
    copy: bool | None,
    device: Any,
    allow_pickle: bool,
    by_range: bool = False,
    verify: bool = True,
) -> Reading:
    """The options of a caller, checked."""
    if limits is not None or device is not None:
        limits = usable_limits(limits, f"{where}(limits)")
        device = usable_device(device, f"{where}(device)")
    return Reading(limits or DEFAULT_LIMITS, copy, device, allow_pickle, by_range, verify)


def open_message(source: Any, where: str, reading: Reading) -> Message:
    """Open frames, header first, or a blob; bytes after the end of a blob are not read."""
    frames: Sequence[Any] = frame_arrays(source, where)
    if len(frames) == 1 and is_blob(frames[0]):
        header, frames = _split(frames[0], reading.limits)
    else:
        header = read_header(frames[0].data, reading.limits)
    return open_frames(header, frames, reading)


def open_frames(header: Header, frames: Sequence[Any], reading: Reading) -> Message:
    """As `open_message`, of a header that was read and the frames, header first."""
    buffers: Sequence[Any] = frames[1:]
    sizes = [frame.nbytes for frame in buffers]
    if sizes != header.stored:
        check_sizes(header, sizes)
    if reading.verify and header.checksums is not None:
        check_frames(buffers, header.checksums)
    if not header.compressed:
        return Message(header, buffers, reading, frames)
    buffers = opened_buffers(header, buffers, lazily=reading.by_range)
    return Message(header, buffers, reading, frames, in_memory=not reading.by_range)


def open_store(source: Callable[[int, int], Any], reading: Reading) -> Message:
    """As `open_message`, of a blob that is read by ranges, ``(offset, size) -> buffer``."""

    def get(offset: int, size: int) -> ByteArray:
        path = f"bytes {offset} to {offset + size}"
        data = buffer_bytes(source(offset, size), path)
        if len(data) != size:
            detail = f"expected {size} bytes from the source, found {len(data)}"
            raise fail("frame_size", detail, path=path)
        return data

    size = read_preamble(get(0, PREAMBLE.size))
    if size > reading.limits.header:
        raise exceeded("header", reading.limits.header, size, "bytes", "preamble")
    header = read_header(get(PREAMBLE.size, size).data, reading.limits)
    buffers: Sequence[Any] = [
        lambda offset, size, start=start: get(start + offset, size)
        for start in starts_of(size, header.stored)[:-1]
    ]
    if header.compressed:
        buffers = opened_buffers(header, buffers, lazily=True)
    return Message(header, buffers, reading, None, in_memory=False)


def open_row(blob: ByteArray, outer: Message) -> Message:
    """A message that is a row of another."""
    if not is_blob(blob):
        raise bad("a message in each row", "something else")
    header, frames = _split(blob, outer.limits, in_row=True)
    end = blob_end(len(frames[0]), header.sizes)
    if len(blob) != aligned(end) or blob[end:].any():
        raise bad("a message, and zeros up to a multiple of 64", "other bytes after it")
    reading = Reading(outer.limits, False, outer.device, outer.allow_pickle)
    return open_frames(header, frames, reading)


def _split(
    blob: ByteArray, limits: Limits, *, in_row: bool = False
) -> tuple[Header, list[ByteArray]]:
    """The checked header of a message in one buffer, and its frames, header first."""
    frame = header_of_blob(blob)
    header = read_header(frame.data, limits, in_row=in_row)
    return header, frames_of_blob(blob, frame, header.stored)


def check_sizes(header: Header, sizes: Sequence[int]) -> None:
    """Check that the frames after the header are those that it announces."""
    if len(sizes) != len(header.stored):
        detail = f"expected {len(header.stored) + 1} frames, found {len(sizes) + 1}; frames were "
        raise fail("frame_count", detail + "lost, or are of several messages", path="frames")
    for i, (expected, found) in enumerate(zip(header.stored, sizes, strict=True)):
        if expected != found:
            detail = f"expected {expected} bytes, found {found}; it was cut, or changed places"
            raise fail("frame_size", detail, path=f"frame {i + 1}")


def check_frames(buffers: Sequence[Any], checksums: Sequence[int]) -> None:
    """Compare the checksums of the frames after the header."""
    for i, (buffer, checksum) in enumerate(zip(buffers, checksums, strict=True)):
        check_crc(zlib.crc32(buffer.data), checksum, f"frame {i + 1}")


# --- reading -----------------------------------------------------------------------------------


class Budget:
    """What one read of an open message has used of the limits.

    Each read makes one: an open message counts nothing, so that threads can share it.
    """

    __slots__ = ("depth", "documents", "objects")

    def __init__(self, message: Message) -> None:
        self.depth: int = 0  # containers around the value, those of outer messages included
        self.objects: int = message.header.objects  # and of the messages in rows that were read
        self.documents: int = 0  # bytes of repeated documents that become objects

    def enter(self, message: Message) -> None:
        """Go into a container, unless it is one too many."""
        self.depth += 1
        if self.depth > message.limits.depth:
            raise exceeded("depth", message.limits.depth, self.depth, "levels")

    def count_objects(self, message: Message) -> None:
        """Count those of a message in a row."""
        self.objects += message.header.objects
        most = message.limits.objects
        if self.objects > most:
            raise exceeded("objects", most, self.objects, "objects of all rows together")

    def count_documents(self, message: Message, size: int) -> None:
        """Reject indirect documents that need more, as objects, than the limits allow."""
        self.documents += size
        beyond = EXPANSION * (self.documents - EXPANSION * message.header.total)
        if beyond > message.limits.expanded:
            what = f"bytes of repeated documents, {EXPANSION} for each, beyond as many per byte"
            raise exceeded("expanded", message.limits.expanded, beyond, what)


_JAGGED, _TENSOR = Kind.JAGGED, Kind.TENSOR


class ChosenRows:
    """Rows chosen of a batch, found once in each ragged group for all of its columns."""

    __slots__ = ("_found", "_pool", "index")

    def __init__(self, index: Chosen) -> None:
        self.index: Chosen = index
        self._pool: RowSplitsPool | None = None
        # The splits of the group are kept, so that their id stays theirs.
        self._found: dict[int | None, tuple[RowSplits, IntArray, RowSplits | None]] = {}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def pool(self) -> RowSplitsPool:
        """Makes equal rows of columns one object, if they were not found here."""
        if self._pool is None:
            self._pool = RowSplitsPool()
        return self._pool

    @property
    def at(self) -> slice | IntArray:
        """An index for numpy."""
        index = self.index
        return slice(index.start, index.stop) if isinstance(index, range) else index

    def among(self, group: int | None, rows: RowSplits | None) -> tuple[RowSplits, IntArray]:
        """The rows alone, end to end, and (rows,) where they begin among all those of a group.

        Rows without a group are those of rectangles, one cell each.
        """
        # Of a ragged group the object, which columns of several messages do not share.
        key = None if group is None else id(rows)
        known = self._found.get(key)
        if known is None:
            if rows is None:
                ones = np.ones(len(self), dtype=np.int64)
                found = RowSplits.from_lengths(ones), np.asarray(self.index, dtype=np.int64)
            else:
                lengths = np.ascontiguousarray(rows.lengths[self.at])
                # Rows may repeat, and cells of no bytes may be many.
                if len(self) * rows.max > INT64_MAX and sum(lengths.tolist()) > INT64_MAX:
                    detail = f"expected fewer than 2**63 cells, found {len(self)} rows"
                    raise fail("bad_offsets", detail)
                found = RowSplits.from_lengths(lengths), rows.starts[self.at]
            # Columns of one batch have the same splits, whichever thread reads them.
            known = self._found.setdefault(key, (*found, rows))
        return known[:2]


class Message(Source):
    """An open message: its checked header and its buffers. Threads may share it."""

    __slots__ = (
        "_groups",
        "_unread",
        "_wholes",
        "allow_pickle",
        "device",
        "frames",
        "limits",
        "numbers",
    )

    def __init__(
        self,
        header: Header,
        buffers: Sequence[Any],
        reading: Reading,
        frames: Sequence[Any] | None,
        in_memory: bool = True,
    ) -> None:
        Buffers.__init__(self, buffers, reading, in_memory)
        self.header = header
        self.numbers: list[int] = header.numbers
        self.limits: Limits = reading.limits
        self.device: torch.device | None = reading.device  # None leaves tensors where cells are
        self.allow_pickle: bool = reading.allow_pickle
        self.frames: Sequence[Any] | None = frames  # header first; None if they are fetched
        self.widened: dict[CellPlace, ByteArray] = {}
        # The documents of the header, but for those that a reader has. The one that pops the list
        # owns it until it is put back.
        self._unread: list[list[Any]] = [header.values] if header.values else []
        self._groups: dict[int | None, RowSplits] = {}
        # Columns in memory with all of their rows, by the first of their numbers.
        self._wholes: dict[int, RaggedView] = {}

    def shape(self, node: Node) -> tuple[int, ...]:
        """The dims of a node, which are the last of its numbers."""
        return tuple(self.numbers[node.dims : node.end])

    def value(self, index: int, depth: int = 0) -> Any:
        """A document of the header, unshared, inside `depth` containers."""
        try:
            values = self._unread.pop()
        except IndexError:  # another thread has it at this moment
            values = self._unpacked()
        if values[index] is _TAKEN:
            values = self._unpacked()
        value, values[index] = values[index], _TAKEN
        # All others are kept: a reader of every column unpacks the header once, not once for each.
        if not self._unread:
            self._unread.append(values)
        if self.header.records:
            return revived(value, depth, self.limits.depth, self.allow_pickle)
        return value

    def _unpacked(self) -> list[Any]:
        values: list[Any] = documents.unpack(self.header.packed_values, "values")
        return values

    def meta(self) -> dict[str, Any]:
        """What `encode` was given as `meta`; empty where it was not."""
        index = self.header.schema.values
        if len(self.header.values) == index:
            return {}
        value = self.value(index)
        if type(value) is not dict:
            raise inside(bad("a mapping", type(value).__name__), "meta")
        return value

    # Rows

    def row_splits(self, group: int, chosen: ChosenRows | None = None) -> RowSplits:
        """The rows of a ragged group, or some of them; read once."""
        found = self._groups.get(group)
        if found is None:
            found = self._groups.setdefault(group, self._read_group(group))
        return found if chosen is None else chosen.among(group, found)[0]

    def _read_group(self, index: int) -> RowSplits:
        group = self.header.groups[index]
        path = f"$ (ragged group {index})"
        if group.rows < 2:
            # The shortest and the longest row are all.
            return RowSplits.from_lengths(np.array([group.max] * group.rows, dtype=np.int64))
        data = self.read(group.buffer, group.offset, 8 * (group.rows + 1))
        # A copy: offsets that were checked must not change with the message's memory.
        offsets = np.frombuffer(bytearray(data), dtype=np.int64)
        row_splits = RowSplits.from_offsets(offsets)
        if row_splits is None:
            found = brief(offsets[:8].tolist())
            detail = f"expected offsets from 0 that never fall, found {found}"
            raise fail("bad_offsets", detail, path=path)
        if (row_splits.min, row_splits.max) != (group.min, group.max):
            detail = f"expected rows of {row_splits.min} to {row_splits.max} by the offsets, found "
            detail += f"{group.min} to {group.max} in the header"
            raise fail("bad_offsets", detail, path=path)
        return row_splits

    def leaf(self, node: Node) -> Leaf:
        """The place of the cells of a TENSOR, a JAGGED or rows of documents."""
        leaf = leaf_of(node, self.numbers)
        if leaf is None:
            raise bad("a column whose rows can be read in place", f"a {node.kind.name}")
        return leaf

    def splits(self, leaf: Leaf) -> RowSplits:
        """All rows of a leaf, which end where its cells do."""
        total = leaf.shape[leaf.ragged_dim - 1]
        if leaf.group is None:
            found = RowSplits.from_lengths(np.ones(total, dtype=np.int64))
        else:
            found = self.row_splits(leaf.group)
        if found.total != total:
            detail = f"expected ragged group {leaf.group} to end at cell {total} of the values"
            raise fail("bad_offsets", f"{detail}, found {found.total}")
        return found

    def rows(self, node: Node, chosen: ChosenRows | None = None) -> RaggedView:
        """The rows of a TENSOR, a JAGGED or of documents in place; read only.

        The rows of a TENSOR are one cell each. Of a message that is fetched, no more than the
        chosen rows are asked for where that is possible.
        """
        i, numbers = node.number, self.numbers
        whole = self._wholes.get(i)
        if whole is None and node.kind is _JAGGED and numbers[i + 2] == PLAIN and self.in_memory:
            # Most columns, in as few steps as possible.
            buffer, offset, _, group, *shape = numbers[i : node.end]
            name, _, dim = node.fields
            dtype, splits = DTYPES[name], self._groups.get(group) or self.row_splits(group)
            if dtype is not None and splits.total == shape[dim - 1]:
                data = self.read(buffer, offset, math.prod(shape) * node.itemsize)
                whole = RaggedView(data, dtype, tuple(shape), dim, None, splits)
                self._wholes[i] = whole
        if whole is None:
            leaf = self.leaf(node)
            in_place = leaf.runs > 0 or leaf.place.stored == PLAIN or not leaf.place.cells
            rectangle = leaf.group is None and not leaf.runs
            if not (in_place and self.in_memory) or (rectangle and chosen is not None):
                return self.rows_of(leaf, chosen)
            whole = self._wholes[i] = self.rows_of(leaf, None)
        if chosen is None:
            return whole
        in_order = whole.starts is None
        if in_order and isinstance(chosen.index, range):
            return self.rows_of(self.leaf(node), chosen)
        own = None if node.kind is _TENSOR else numbers[i + 3]
        picked, starts = chosen.among(own, whole.row_splits)
        if in_order:
            return RaggedView(
                whole.memory, whole.dtype, whole.shape, whole.ragged_dim, starts, picked
            )
        return whole.choose(chosen.at, picked)

    def rows_of(self, leaf: Leaf, chosen: ChosenRows | None) -> RaggedView:
        """As `rows`, of a leaf; the view is not kept."""
        splits: Any = None  # of all rows of a rectangle only if they are asked for
        if chosen is None or leaf.group is not None or leaf.runs:
            splits = self.splits(leaf)
        picked, starts = (splits, None) if chosen is None else chosen.among(leaf.group, splits)
        if leaf.runs:
            some = None if chosen is None else (np.asarray(chosen.index, dtype=np.int64), picked)
            return view_of_runs(self, leaf, splits, some)
        data, total = self.cells_of_rows(leaf, splits, chosen)
        shape, starts = (leaf.shape, starts) if total is None else (leaf.shape_of(total), None)
        return RaggedView(data, leaf.dtype, shape, leaf.ragged_dim, starts, picked)

    def cells_of_rows(
        self, leaf: Leaf, splits: RowSplits | None, chosen: ChosenRows | None
    ) -> tuple[ByteArray, int | None]:
        """The cells of the chosen rows end to end, read only, and how many along the ragged dim."""
        # All cells, and None, where it is better to choose the rows from these.
        place, inner, in_memory = leaf.place, leaf.inner, self.in_memory
        extent = leaf.shape[leaf.ragged_dim - 1]
        if chosen is None:
            return cell_range(self, place, 0, place.cells), extent
        one = isinstance(chosen.index, range) and leaf.outer == 1
        ranges = joined_rows(chosen.index) if one or not in_memory else []
        if not one and (in_memory or leaf.outer * len(ranges) > MOST_RANGES):
            return cell_range(self, place, 0, place.cells), None
        host: Any = range(extent + 1) if splits is None else splits.host
        bounds = [(int(host[rows.start]), int(host[rows.stop])) for rows in ranges]
        parts = [
            cell_range(self, place, (k + a) * inner, (k + b) * inner)
            for k in range(0, leaf.outer * extent, extent or 1)
            for a, b in bounds
            if a < b
        ]
        data = parts[0] if len(parts) == 1 else np.concatenate([_NOTHING, *parts])
        return data, sum(b - a for a, b in bounds)

    # Tensors

    def tensor(self, node: Node, chosen: ChosenRows | None = None) -> torch.Tensor:
        """A TENSOR, or some of its rows."""
        numbers = self.numbers
        if chosen is None and numbers[node.number + 2] <= INDIRECT:
            values = self.cells(node, tuple(numbers[node.dims : node.end]))
        else:
            values = self._values(node, chosen)
        return values if self.device is None else values.to(self.device)

    def jagged(self, node: Node, chosen: ChosenRows | None = None) -> torch.Tensor:
        """A JAGGED column as a nested tensor, or some of its rows."""
        numbers, i = self.numbers, node.number
        row_splits = self._groups.get(numbers[i + 3]) or self.row_splits(numbers[i + 3])
        shape, dim = tuple(numbers[node.dims : node.end]), node.fields[2]
        if chosen is None and numbers[i + 2] <= INDIRECT and row_splits.total == shape[dim - 1]:
            values = self.cells(node, shape)
        else:
            values = self._values(node, chosen)
            if chosen is not None:
                row_splits = chosen.among(numbers[i + 3], row_splits)[0]
        if self.device is not None:
            values = values.to(self.device)
        return nested_tensor(values, row_splits, dim)

    def cells(self, node: Node, shape: tuple[int, ...]) -> torch.Tensor:
        """All the cells of a TENSOR or JAGGED."""
        i, numbers, name = node.number, self.numbers, node.fields[0]
        dtype = DTYPES[name]
        if dtype is None:
            raise unknown_dtype(name)
        buffer, offset, stored = numbers[i], numbers[i + 1], numbers[i + 2]
        cells = math.prod(shape)
        # `stored` is ignored where there are no cells.
        if stored != PLAIN and cells:
            narrow = self.read(buffer, offset, stored_size(name, stored, cells))
            return from_bytes(widened(narrow, stored, name, cells), dtype, shape)
        known = NAMED_ARRAYS.get(name)
        # Whether an array is aligned takes a tenth of the time of asking where it lies.
        alignment = node.itemsize if known is None else 1
        data = self.bytes_at(buffer, offset, cells * node.itemsize, alignment)
        if known is None or not cells:
            return from_bytes(data, dtype, shape)
        array: Any = np.ndarray(shape, known, data)
        return torch.from_numpy(array if array.flags.aligned else array.copy())

    def integers(self, node: Node) -> IntArray:
        """A TENSOR of int64s, which are as wide as that, on the host.

        A copy: what is checked must not change with the message's memory.
        """
        buffer, offset, _, *shape = self.numbers[node.number : node.end]
        data = self.read(buffer, offset, math.prod(shape) * node.itemsize)
        return np.frombuffer(bytearray(data), dtype=np.int64).reshape(shape)

    def _values(self, node: Node, chosen: ChosenRows | None) -> torch.Tensor:
        """The rows of a column end to end, in memory that may be kept."""
        leaf = self.leaf(node)
        if not leaf.runs:
            splits = None if leaf.group is None else self.splits(leaf)
            data, total = self.cells_of_rows(leaf, splits, chosen)
            if total is not None:
                kept = writable(data, self.reading.copy, leaf.dtype.itemsize)
                return from_bytes(kept, leaf.dtype, leaf.shape_of(total))
        return values_of(self.rows(node, chosen))


_NOTHING: ByteArray = np.empty(0, dtype=np.uint8)
_TAKEN = object()
"""In the place of a document of the header that a reader has."""


def joined_rows(rows: Chosen) -> list[range]:
    """Chosen rows as ranges, neighbours joined."""
    if isinstance(rows, range):
        return [rows]
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts = rows[np.append(0, breaks)]
    ends = rows[np.append(breaks, len(rows)) - 1] + 1
    return [range(a, b) for a, b in zip(firsts.tolist(), ends.tolist(), strict=True)]
