"""An open message: its checked header, and the cells and rows that its buffers hold."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, from_bytes
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import nested_tensor
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import documents
from jagcodec.wire.checks import INT64_MAX, inside
from jagcodec.wire.frames import (
    PREAMBLE,
    Fetch,
    Payload,
    buffer_bytes,
    frame_arrays,
    is_blob,
    read_preamble,
    split_blob,
    starts_of,
)
from jagcodec.wire.header import Header, check_crc, read_header
from jagcodec.wire.limits import Limits, exceeded
from jagcodec.wire.narrow import widened
from jagcodec.wire.parts import Part, PickedRows, Rows, table_of, view_of_parts
from jagcodec.wire.records import bad, revived, unknown_dtype
from jagcodec.wire.schema import DOCUMENT_ROWS, OF_PARTS, Node, stored_size
from jagcodec.wire.spec import (
    DOCUMENT_COST,
    EXPANSION,
    PARTS,
    PLAIN,
    TORCH_DTYPES,
    Kind,
)
from jagcodec.wire.stored_cells import MOST_RANGES, Place, cell_range

# --- opening -----------------------------------------------------------------------------------


def open_frames(frames: Any, path: str, limits: Limits) -> tuple[Header, list[ByteArray]]:
    """The checked header of a message, and its frames, header first, aliased.

    Raises:
        ArgumentTypeError: It is neither a buffer nor a list of them.
        WireFormatError: The message is cut, or its frames are not the header's.
    """
    arrays = frame_arrays(frames, path)
    if len(arrays) == 1 and is_blob(arrays[0]):
        return open_blob(arrays[0], limits)
    header = read_header(arrays[0].data, limits)
    sizes = [len(array) for array in arrays[1:]]
    if sizes != header.stored:
        check_sizes(header, sizes)
    return header, arrays


def open_blob(
    blob: ByteArray, limits: Limits, *, in_row: bool = False, repeated: bool = False
) -> tuple[Header, list[ByteArray]]:
    """As `open_frames`, of a message in one buffer; bytes behind its end are not looked at."""
    size = read_preamble(blob)
    frame = split_blob(blob, size, ())[0].data
    header = read_header(frame, limits, in_row=in_row, repeated=repeated)
    return header, split_blob(blob, size, header.stored)


def open_store(source: Callable[[int, int], Any], limits: Limits) -> tuple[Header, Fetch]:
    """As `open_frames`, of a blob that is read by ranges, ``(offset, size) -> buffer``."""

    def get(offset: int, size: int) -> ByteArray:
        data = buffer_bytes(source(offset, size), f"bytes {offset} to {offset + size}")
        if len(data) != size:
            raise WireFormatError(
                "frame_size",
                f"bytes {offset} to {offset + size}",
                f"expected {size} bytes from the source, found {len(data)}",
            )
        return data

    size = read_preamble(get(0, PREAMBLE.size))
    if size > limits.header:
        raise exceeded("header", limits.header, size, "bytes", "preamble")
    header = read_header(get(PREAMBLE.size, size).data, limits)
    starts = starts_of(size, header.stored)
    return header, lambda buffer, offset, size: get(starts[buffer] + offset, size)


def check_sizes(header: Header, sizes: Sequence[int]) -> None:
    """See that the frames behind the header are those that it announces.

    Raises:
        WireFormatError: One is missing, or has another size; it is named.
    """
    if len(sizes) != len(header.stored):
        raise WireFormatError(
            "frame_count",
            "frames",
            f"expected {len(header.stored) + 1} frames, found {len(sizes) + 1}; "
            "frames were lost, or come from more than one message",
        )
    for i, (expected, found) in enumerate(zip(header.stored, sizes, strict=True)):
        if expected != found:
            raise WireFormatError(
                "frame_size",
                f"frame {i + 1}",
                f"expected {expected} bytes, found {found}; it was cut, or frames changed places",
            )


def check_frames(buffers: Sequence[ByteArray], checksums: Sequence[int]) -> None:
    """Compare the checksums of the frames behind the header."""
    for i, (buffer, checksum) in enumerate(zip(buffers, checksums, strict=True)):
        check_crc(zlib.crc32(buffer.data), checksum, f"frame {i + 1}")


# --- an open message ---------------------------------------------------------------------------


class _Choice(NamedTuple):
    """Rows chosen of a ragged group.

    Attributes:
        chosen: Which; kept, so that its id stays its own.
        row_splits: They alone, end to end.
        starts: (rows,) where they begin among all.
    """

    chosen: Chosen
    row_splits: RowSplits
    starts: IntArray


class Message:
    """An open message: its checked header, and a way to its buffers.

    Attributes:
        header: What the message says of itself.
        numbers: Those of the header.
        payload: Its buffers.
        device: Where tensors go; None leaves them where their cells are.
        allow_pickle: Whether pickled objects are unpickled.
        limits: What its reader takes.
        outermost: The message in whose rows this one lies, if it does.
        objects: How many objects it asks for, those of messages in its rows included.
        repeated: Whether it lies in a row that is made of parts, or in a message in such a row.
        depth: Containers around what is being built, those of outer messages included.
        stacked: Levels of lazy stacks in what was built, by its id, with the value, so that its id
            stays its own.
    """

    def __init__(
        self,
        header: Header,
        payload: Payload,
        device: torch.device | None,
        allow_pickle: bool,
        *,
        depth: int = 0,
        outermost: Message | None = None,
        repeated: bool = False,
    ) -> None:
        self.header: Header = header
        self.limits: Limits = header.limits
        self.objects: int = header.objects
        self.outermost: Message | None = outermost
        self.repeated: bool = repeated
        self.numbers: list[int] = header.numbers
        self.payload: Payload = payload
        self.device: torch.device | None = device
        self.allow_pickle: bool = allow_pickle
        self.depth: int = depth
        self.stacked: dict[int, tuple[int, Any]] = {}
        self._groups: list[RowSplits | None] = [None] * len(header.groups)
        # The documents of the header, and which of them somebody has already.
        self._values = header.values
        self._given: set[int] = set()
        # What cuts rows out of it, with the columns that it is for (see `slicing`).
        self.slicer: tuple[Any, Any] | None = None
        # Columns where they lie, by the first of their numbers.
        self._views: dict[int, RaggedView] = {}
        # Cells of parts that were stored narrow.
        self.widened: dict[Place, ByteArray] = {}
        # Bytes of documents in rows of parts that become objects, by the first of their numbers.
        self._made: dict[int, int] = {}
        self._made_in_all = 0
        # Rows chosen of a group, by the group and the identity of the choice.
        self._chosen: dict[tuple[int, int], _Choice] = {}

    def to_read(self) -> Message:
        """The same message for someone who never writes to what comes out of it."""
        same = Message(self.header, self.payload.to_read(), None, self.allow_pickle)
        same._groups = self._groups
        return same

    def check_depth(self) -> None:
        """Refuse to go deeper than the limits allow."""
        if self.depth > self.limits.depth:
            raise exceeded("depth", self.limits.depth, self.depth, "levels")

    def shape(self, node: Node) -> tuple[int, ...]:
        """The dims of a node, which are the last of its numbers."""
        return tuple(self.numbers[node.dims : node.end])

    def document(self, index: int) -> Any:
        """A document of the header, a new object each time."""
        if index in self._given:
            self._values = documents.unpack(self.header.packed_values, "values")
            self._given.clear()
        self._given.add(index)
        return self._values[index]

    def meta(self) -> dict[str, Any]:
        """What `encode` was given as `meta`; empty where it was not."""
        header = self.header
        if len(header.values) == header.schema.values:
            return {}
        value = self.document(header.schema.values)
        if header.records:
            value = revived(value, 0, self.limits.depth, self.allow_pickle)
        if type(value) is not dict:
            raise inside(bad("a mapping", type(value).__name__), "meta")
        return value

    # Cells

    def tensor(self, node: Node, chosen: Chosen | None = None) -> torch.Tensor:
        """A TENSOR, or some of its rows."""
        shape = tuple(self.numbers[node.dims : node.end])
        if self.is_made_of_parts(node):
            values = values_of(self.view(node, chosen))
        elif chosen is None:
            values = self.cells(node, shape)
        else:
            values = self._rows_of_tensor(node, shape, chosen)
        return values if self.device is None else values.to(self.device)

    def cells(self, node: Node, shape: tuple[int, ...]) -> torch.Tensor:
        """All the cells of a TENSOR, JAGGED or TENSOR_VIEWS."""
        i, numbers, name = node.number, self.numbers, node.fields[0]
        dtype = _DTYPES[name]
        if dtype is None:
            raise unknown_dtype(name)
        buffer, offset, stored = numbers[i], numbers[i + 1], numbers[i + 2]
        cells = math.prod(shape)
        # How no cells are stored means nothing.
        if stored != PLAIN and cells and node.kind is not Kind.TENSOR_VIEWS:
            narrow = self.payload.read(buffer, offset, stored_size(name, stored, cells))
            return from_bytes(widened(narrow, stored, name, cells), dtype, shape)
        data = self.payload.bytes_at(buffer, offset, cells * node.itemsize, node.itemsize)
        if type(data) is torch.Tensor:  # on a device
            return data.view(dtype).view(shape)
        return from_bytes(data, dtype, shape)

    def cell_range(self, node: Node, start: int, end: int, *, keep: bool) -> ByteArray:
        """The bytes of cells `start` to `end` of a TENSOR or JAGGED, as wide as their dtype.

        With `keep`, memory that a tensor may alias; otherwise to be looked at only.
        """
        buffer, offset, stored = self.numbers[node.number : node.number + 3]
        place = Place(buffer, offset, stored, end, node.fields[0])
        return cell_range(self.payload, place, start, end, keep=keep)

    def _rows_of_tensor(self, node: Node, shape: tuple[int, ...], chosen: Chosen) -> torch.Tensor:
        per_row = math.prod(shape[1:])
        wanted = (len(chosen), *shape[1:])
        dtype = torch_dtype(node.fields[0])
        if isinstance(chosen, range):
            bounds = chosen.start * per_row, chosen.stop * per_row
            return from_bytes(self.cell_range(node, *bounds, keep=True), dtype, wanted)
        if self.payload.in_memory:
            whole = self.cell_range(node, 0, shape[0] * per_row, keep=False)
            rows = whole.reshape(shape[0], per_row * node.itemsize)[chosen]
            return from_bytes(rows.reshape(-1), dtype, wanted)
        ranges = [(a * per_row, b * per_row) for a, b in joined_rows(chosen)]
        return from_bytes(self._joined(node, ranges), dtype, wanted)

    def _joined(self, node: Node, ranges: Iterable[tuple[int, int]]) -> ByteArray:
        """Ranges of cells that are fetched one by one, end to end."""
        parts = [self.cell_range(node, a, b, keep=False) for a, b in ranges if a < b]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)

    # Rows

    def row_splits(self, group: int, chosen: Chosen | None = None) -> RowSplits:
        """The rows of a ragged group, or some of them; read once.

        Raises:
            WireFormatError: Its offsets are not offsets, or not those of its min and max.
        """
        found = self._groups[group]
        if found is None:
            found = self._groups[group] = self._read_group(group)
        return found if chosen is None else self._choose(group, chosen).row_splits

    def _choose(self, group: int, chosen: Chosen) -> _Choice:
        """Rows chosen of a ragged group; found once for all its columns."""
        key = (group, id(chosen))
        known = self._chosen.get(key)
        if known is None:
            found = self.row_splits(group)
            rows = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
            lengths = np.ascontiguousarray(found.lengths[rows])
            # Rows may repeat, and cells of no bytes may be many.
            if len(chosen) * found.max > INT64_MAX and sum(lengths.tolist()) > INT64_MAX:
                raise WireFormatError(
                    "bad_offsets", "$", f"expected fewer than 2**63 cells, found {len(chosen)} rows"
                )
            known = _Choice(chosen, RowSplits.from_lengths(lengths), found.starts[rows])
            self._chosen[key] = known
        return known

    def _read_group(self, index: int) -> RowSplits:
        group = self.header.groups[index]
        path = f"$ (ragged group {index})"
        if group.rows < 2:
            # The shortest and the longest row say everything.
            return RowSplits.from_lengths(np.array([group.max] * group.rows, dtype=np.int64))
        data = self.payload.read(group.buffer, group.offset, 8 * (group.rows + 1))
        # A copy: offsets that were checked must not change with the message's memory.
        offsets = np.frombuffer(bytearray(data), dtype=np.int64)
        row_splits = RowSplits.from_offsets(offsets)
        if row_splits is None:
            raise WireFormatError(
                "bad_offsets",
                path,
                f"expected offsets from 0 that never fall, found {brief(offsets[:8].tolist())}",
            )
        if (row_splits.min, row_splits.max) != (group.min, group.max):
            raise WireFormatError(
                "bad_offsets",
                path,
                f"expected rows of {row_splits.min} to {row_splits.max} as the offsets say, "
                f"found {group.min} to {group.max} in the header",
            )
        return row_splits

    def jagged(self, node: Node, chosen: Chosen | None = None) -> torch.Tensor:
        """A JAGGED column as a nested tensor, or some of its rows."""
        numbers, i = self.numbers, node.number
        if self.is_made_of_parts(node):
            view = self.view(node, chosen)
            row_splits, values = view.row_splits, values_of(view)
        elif chosen is None:
            group = numbers[i + 3]
            row_splits = self._groups[group] or self.row_splits(group)
            shape = tuple(numbers[node.dims : node.end])
            if row_splits.total != shape[node.fields[2] - 1]:
                raise other_total(group, shape[node.fields[2] - 1], row_splits.total)
            values = self.cells(node, shape)
        else:
            view = self.view(node, chosen, keep=True)
            row_splits, values = view.row_splits, values_of(view)
        if self.device is not None:
            values = values.to(self.device)
        return nested_tensor(values, row_splits, node.fields[2])

    def view(self, node: Node, chosen: Chosen | None = None, *, keep: bool = False) -> RaggedView:
        """The rows of a column where they lie in the message; or some of them.

        Of a JAGGED column, or of any that is made of parts. Its memory is only to be read, unless
        `keep` asks for memory that a tensor may alias.
        """
        numbers, i = self.numbers, node.number
        if self.is_made_of_parts(node):
            return self._view_of_parts(node, chosen)
        in_place = numbers[i + 2] == PLAIN and not keep and self.payload.in_memory
        if in_place and (chosen is None or type(chosen) is not range):
            whole = self._views.get(i)
            if whole is None:
                whole = self._views[i] = self._whole(node, keep=False)
            if chosen is None:
                return whole
            if len(whole.memory):
                rows = self._choose(numbers[i + 3], chosen)
                dtype, shape, dim = whole.dtype, whole.shape, whole.ragged_dim
                return RaggedView(whole.memory, dtype, shape, dim, rows.starts, rows.row_splits)
        return self._whole(node, keep) if chosen is None else self._part(node, chosen, keep)

    def _view_of_parts(self, node: Node, chosen: Chosen | None) -> RaggedView:
        i = node.number
        whole = self._views.get(i)
        if chosen is None:
            if whole is None:
                whole = self._views[i] = view_of_parts(self, self._rows(node), self.parts(node))
            return whole
        if node.kind is Kind.TENSOR:
            splits = _single_cells(len(chosen))
        else:
            splits = self._choose(self.numbers[i + 3], chosen).row_splits
        if whole is None and not self.payload.in_memory:
            picked = PickedRows(np.asarray(chosen, dtype=np.int64), splits)
            return view_of_parts(self, self._rows(node), self.parts(node), picked)
        rows = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
        return self._view_of_parts(node, None).choose(rows, splits)

    def is_made_of_parts(self, node: Node) -> bool:
        """Whether a table of parts lies at the place of a column; how nothing is stored means
        nothing.
        """
        numbers, i = self.numbers, node.number
        if node.kind not in OF_PARTS or numbers[i + 2] <= PARTS:
            return False
        if node.kind in DOCUMENT_ROWS:
            return numbers[i + 4] > 0
        return 0 not in numbers[node.dims : node.end]

    def parts(self, node: Node) -> list[Part]:
        """The parts that a column is made of."""
        buffer, offset, stored = self.numbers[node.number : node.number + 3]
        return table_of(self, buffer, offset, stored)

    def count_documents(self, node: Node, size: int) -> None:
        """Refuse documents of parts that take more, as objects, than the limits allow."""
        self._made_in_all += size - self._made.get(node.number, 0)
        self._made[node.number] = size
        beyond = DOCUMENT_COST * (self._made_in_all - EXPANSION * self.header.total)
        if beyond > self.limits.expanded and self.outermost is None:
            what = (
                f"bytes of repeated documents beyond {EXPANSION} for each byte of the message, "
                f"{DOCUMENT_COST} for each"
            )
            raise exceeded("expanded", self.limits.expanded, beyond, what)

    def _rows(self, node: Node) -> Rows:
        """What the rows of a column are."""
        shape = self.shape(node)
        if node.kind is Kind.TENSOR:
            name = node.fields[0]
            return Rows(name, torch_dtype(name), shape[1:], _single_cells(shape[0]), None)
        group = self.numbers[node.number + 3]
        splits = self.row_splits(group)
        if node.kind is Kind.JAGGED:
            name, total, inner = node.fields[0], shape[0], shape[1:]
        else:
            name, total, inner = "uint8", self.numbers[node.number + 4], ()
        if splits.total != total:
            raise other_total(group, total, splits.total)
        return Rows(name, torch_dtype(name), inner, splits, group)

    def _whole(self, node: Node, keep: bool) -> RaggedView:
        """All rows of a JAGGED column."""
        numbers, i = self.numbers, node.number
        row_splits, shape = self.row_splits(numbers[i + 3]), self.shape(node)
        name, _, dim = node.fields
        if row_splits.total != shape[dim - 1]:
            raise other_total(numbers[i + 3], shape[dim - 1], row_splits.total)
        dtype = torch_dtype(name)
        data = self.cell_range(node, 0, math.prod(shape), keep=keep)
        return RaggedView(data, dtype, shape, dim, None, row_splits)

    def _part(self, node: Node, chosen: Chosen, keep: bool) -> RaggedView:
        """Some rows of a JAGGED column, no more than they being read where that is possible."""
        group, shape = self.numbers[node.number + 3], self.shape(node)
        name, _, dim = node.fields
        row_splits, dtype = self.row_splits(group), torch_dtype(name)
        if row_splits.total != shape[dim - 1]:
            raise other_total(group, shape[dim - 1], row_splits.total)
        outer, extent, inner = math.prod(shape[: dim - 1]), shape[dim - 1], math.prod(shape[dim:])
        picked, starts = self._choose(group, chosen)[1:]
        wanted = (*shape[: dim - 1], picked.total, *shape[dim:])
        host = row_splits.host
        if not math.prod(wanted):
            return RaggedView(np.empty(0, np.uint8), dtype, wanted, dim, None, picked)
        if isinstance(chosen, range) and outer == 1:
            bounds = int(host[chosen.start]) * inner, int(host[chosen.stop]) * inner
            data = self.cell_range(node, *bounds, keep=keep)
            return RaggedView(data, dtype, wanted, dim, None, picked)
        ranges = [] if self.payload.in_memory else joined_rows(np.asarray(chosen, dtype=np.int64))
        if self.payload.in_memory or outer * len(ranges) > MOST_RANGES:
            data = self.cell_range(node, 0, outer * extent * inner, keep=False)
            return RaggedView(data, dtype, shape, dim, starts, picked)
        runs = [
            ((k + int(host[a])) * inner, (k + int(host[b])) * inner)
            for k in range(0, outer * extent, extent)
            for a, b in ranges
        ]
        return RaggedView(self._joined(node, runs), dtype, wanted, dim, None, picked)


def _single_cells(rows: int) -> RowSplits:
    return RowSplits.from_lengths(np.ones(rows, dtype=np.int64))


def other_total(group: int, cells: int, found: int) -> WireFormatError:
    return WireFormatError(
        "bad_offsets",
        "$",
        f"expected the offsets of ragged group {group} to end at the {cells} cells of the values, "
        f"found {found}",
    )


class RowRange(NamedTuple):
    """Rows ``start : stop`` of a message."""

    start: int
    stop: int


def joined_rows(rows: Chosen) -> list[RowRange]:
    """Chosen rows as ranges, neighbours joined."""
    if isinstance(rows, range):
        return [RowRange(rows.start, rows.stop)]
    if not len(rows):
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts = rows[np.append(0, breaks)]
    ends = rows[np.append(breaks, len(rows)) - 1] + 1
    return [RowRange(a, b) for a, b in zip(firsts.tolist(), ends.tolist(), strict=True)]


_DTYPES: dict[str, torch.dtype | None] = {name: getattr(torch, name, None) for name in TORCH_DTYPES}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a checked name.

    Raises:
        WireFormatError: This torch has no such dtype.
    """
    dtype = _DTYPES[name]
    if dtype is None:
        raise unknown_dtype(name)
    return dtype
