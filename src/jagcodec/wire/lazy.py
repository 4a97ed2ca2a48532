"""A batch that is still a message: its header is read, its buffers only where they are wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from jagcodec.batch.leaves import Sharing, select_leaf
from jagcodec.errors import ArgumentKeyError, WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, from_bytes
from jagcodec.ragged.nested import Parts, Raggedness, RowSplits, splits_of_lengths
from jagcodec.ragged.non_tensor import is_non_tensor
from jagcodec.ragged.row_index import choose_rows
from jagcodec.ragged.views import WireCells, compact_values
from jagcodec.wire import records
from jagcodec.wire.checks import brief
from jagcodec.wire.decoder import (
    Decoding,
    flat_frames,
    read_splits,
    receive,
    torch_dtype,
    usable_device,
)
from jagcodec.wire.dtypes import numpy_itemsize, torch_size
from jagcodec.wire.encoder import Frame, encode
from jagcodec.wire.frames import PREAMBLE, buffer_bytes, read_preamble, starts_of
from jagcodec.wire.header import (
    child_path,
    outline,
    read_extension,
    read_header,
    read_record,
)
from jagcodec.wire.narrow import widened
from jagcodec.wire.payload import Fetch, RangePayload
from jagcodec.wire.spec import Kind

Ranges: TypeAlias = list[tuple[int, int]]
"""Half-open ranges of cells or rows, in the order in which they are wanted."""


_RANGES = 4096
"""Ranges of one column that are read one by one."""

_OBJECTS = (records.NonTensorData, records.NonTensorRows, records.NonTensorStack)


class FieldSchema(NamedTuple):
    """What the header says of one field.

    Attributes:
        kind: ``"jagged"``, ``"tensor"``, ``"object"``, ``"tensordict"``, or another kind of the
            wire in small letters.
        dtype: Of its cells; None where there are none.
        shape: With None for the ragged dim; None where it is no tensor.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None


class WireBatch:
    """A batch of columns over a message; made by `open_wire`.

    It is a view: `select` and `rows` choose without reading, and what is chosen is read, field by
    field, when a tensor is asked for. It keeps its message alive. A contiguous range of rows
    aliases a writable message; anything else is copied out of it.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire
        >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
        >>> frames = encode_fields(columns, lengths=torch.tensor([2, 4, 3]))
        >>> batch = open_wire(frames).select(["ids"]).rows(slice(1, 3))
        >>> batch.fields, batch.batch_size
        (('ids',), torch.Size([2]))
        >>> [row.tolist() for row in batch.to_tensordict()["ids"].unbind()]
        [[4, 5, 6, 7], [8, 9, 10]]
    """

    def __init__(
        self,
        message: _Message,
        leaves: Mapping[str, Any],
        batch_size: list[int],
        names: list[str | None] | None,
        chosen: range | IntArray | None,
        frames: list[ByteArray] | None = None,
    ) -> None:
        """Use `open_wire`."""
        self._message = message
        self._leaves = leaves
        self._sent = batch_size
        self._names = names
        self._chosen = chosen
        self._frames = frames
        self._ragged: dict[int, Raggedness] = {}

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(self._leaves)

    @property
    def batch_size(self) -> torch.Size:
        """(N, ...): N rows as chosen."""
        rows = self._sent[0] if self._chosen is None else len(self._chosen)
        return torch.Size([rows, *self._sent[1:]])

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """Name to `FieldSchema`, from the header alone, for the rows as chosen."""
        return MappingProxyType({name: self._schema(name) for name in self._leaves})

    def __len__(self) -> int:
        return int(self.batch_size[0])

    def __repr__(self) -> str:
        return f"WireBatch(fields={list(self.fields)}, batch_size={list(self.batch_size)})"

    def select(self, names: Iterable[str]) -> WireBatch:
        """The columns of these names, in this order. Reads nothing.

        Raises:
            ArgumentKeyError: A name is no column.
        """
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            self._leaf(name, "select")
        leaves = {name: self._leaves[name] for name in names}
        return WireBatch(self._message, leaves, self._sent, self._names, self._chosen)

    def rows(self, index: Any) -> WireBatch:
        """These rows, in this order; they may repeat. Reads nothing.

        Args:
            index: A slice, or integers (list, tensor, array; negative ones count from the end),
                or N booleans, or one integer for a batch of one row.

        Raises:
            ArgumentIndexError: A row does not exist.
            ArgumentTypeError: `index` is none of these.
        """
        chosen = choose_rows(index, len(self), "WireBatch.rows(index)")
        if self._chosen is not None:
            chosen = (
                self._chosen[chosen.start : chosen.stop]
                if isinstance(chosen, range)
                else (np.asarray(self._chosen, dtype=np.int64)[chosen])
            )
        return WireBatch(self._message, self._leaves, self._sent, self._names, chosen)

    def to_tensordict(self) -> TensorDict:
        """The chosen columns and rows as a TensorDict, as `decode` would make it.

        Raises:
            WireFormatError: A field is malformed.
            ArgumentError: Rows were chosen of a column that has none to choose, such as CSR.
        """
        leaves = {}
        for name in self._leaves:
            leaf = self.leaf(name)
            leaves[name] = leaf.to_tensordict() if isinstance(leaf, WireBatch) else leaf
        names: Any = self._names
        try:
            return TensorDict(leaves, batch_size=self.batch_size, names=names, device=self._device)
        except Exception as error:  # tensordict raises all kinds
            raise WireFormatError(
                "bad_value", "$", f"expected columns of one batch, found {error!s:.200}"
            ) from error

    def to_frames(self) -> list[Frame]:
        """The chosen columns and rows as a message, to send on.

        Returns:
            All columns and rows of a batch opened from frames or a blob: the frames of that
            message. Any choice of them, or a batch over a callable: new frames, as `encode` makes
            them. Both are only to be read: they alias the message wherever that needs no copy.

        Raises:
            WireFormatError: A field is malformed.
            UnsupportedTypeError: As `encode`.

        Example:
            >>> import torch
            >>> from jagcodec import decode, encode_fields, open_wire
            >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
            >>> batch = open_wire(encode_fields(columns, lengths=torch.tensor([2, 4, 3])))
            >>> decode(batch.rows([2]).select(["ids"]).to_frames())["ids"].values()
            tensor([ 8,  9, 10])
        """
        if self._frames is not None:
            return [array.data.toreadonly() for array in self._frames]
        message = self._message.to_read()
        batch = WireBatch(message, self._leaves, self._sent, self._names, self._chosen)
        return encode(batch.to_tensordict(), allow_pickle=message.allow_pickle)

    def leaf(self, name: str) -> Any:
        """One column as a tensor, a non-tensor leaf, or for a nested batch a `WireBatch`.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
        """
        column = self.column(name)
        if not isinstance(column, Parts):
            return column
        shared = next(r for r in self._ragged.values() if r.splits.offsets is column.offsets)
        return shared.jagged(column.values, column.ragged_dim)

    def row_lengths(self, name: str) -> IntArray | None:
        """(N,) lengths of the chosen rows of a jagged column; None for any other column.

        Reads the offsets of its ragged group and nothing else.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
        """
        leaf = self._leaf(name, "row_lengths")
        if not isinstance(leaf, records.Jagged):
            return None
        return self._raggedness(leaf.group).splits.lengths

    def column(self, name: str) -> Any:
        """As `leaf`, but a jagged column in its `Parts`: no nested tensor is made."""
        leaf = self._leaf(name, "column")
        try:
            return self._read(leaf)
        except WireFormatError as error:
            raise _of_column(name, error) from error

    def cells(self, name: str) -> WireCells | None:
        """A jagged column as it lies in the message; None where it has to be put together first.

        That is a column stored narrow, one whose rows were chosen and do not lie end to end, one
        for another device, and one that is not jagged.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
        """
        record = self._leaves.get(name)
        if type(record) is not records.Jagged:
            self._leaf(name, "cells")
            return None
        message = self._message
        if type(record.dtype) is not str or self._chosen is not None or message.device is not None:
            return None
        try:
            splits = self._splits_of(record)
            dtype = torch_dtype(record.dtype)
            size = math.prod(record.shape) * dtype.itemsize
            data = message.payload.read(record.buffer, record.offset, size)
        except WireFormatError as error:
            raise _of_column(name, error) from error
        return WireCells(data, dtype, tuple(record.shape), record.ragged_dim, splits)

    # Reading

    @property
    def _device(self) -> torch.device | None:
        return self._message.device

    def _leaf(self, name: str, where: str) -> Any:
        leaf = self._leaves.get(name)
        if leaf is None:
            raise ArgumentKeyError(
                "no_such_field",
                f"WireBatch.{where}({name!r})",
                f"expected one of {list(self._leaves)}, found {name!r}",
            )
        return leaf

    def _schema(self, name: str) -> FieldSchema:
        record = leaf = self._leaf(name, "schema")
        if isinstance(leaf, msgpack.ExtType):
            record = read_record(self._message.header, leaf)
        if isinstance(record, records.Jagged):
            shape: list[int | None] = [len(self), *record.shape]
            shape[record.ragged_dim] = None
            return FieldSchema("jagged", torch_dtype(record.dtype), tuple(shape))
        if isinstance(record, records.Tensor):
            shape = [len(self), *record.shape[1:]]
            return FieldSchema("tensor", torch_dtype(record.dtype), tuple(shape))
        if isinstance(
            record, (records.NonTensorData, records.NonTensorRows, records.NonTensorStack)
        ):
            return FieldSchema("object", None, None)
        return FieldSchema(Kind(leaf.code).name.lower(), None, None)

    def _read(self, sent: Any) -> Any:
        message = self._message
        if isinstance(sent, records.Tensor):
            return self._tensor(sent)
        if isinstance(sent, records.Jagged):
            return self._jagged(sent)
        if sent.code == Kind.TENSORDICT:
            batch, names = _read_batch(message.header, sent)
            return _view(message, batch, names, self._sent[0], self._chosen)
        leaf = read_extension(message.header, sent, message.decoding().build)
        if not isinstance(leaf, torch.Tensor | LazyStackedTensorDict) and not is_non_tensor(leaf):
            raise WireFormatError("bad_value", "$", f"expected a leaf, found {type(leaf).__name__}")
        # A strided nested tensor has no shape to ask for.
        shape = [leaf.size(0)] if _is_nested(leaf) else list(leaf.shape[: len(self._sent)])
        if shape != self._sent:
            raise _rows_differ(self._sent, shape)
        if self._chosen is None:
            return leaf
        return select_leaf(leaf, self._chosen, Sharing(), "WireBatch.rows(index)")

    def _tensor(self, record: records.Tensor) -> torch.Tensor:
        if record.shape[: len(self._sent)] != self._sent:
            raise _rows_differ(self._sent, record.shape)
        if self._chosen is None:
            return self._moved(self._whole(record))
        per_row = math.prod(record.shape[1:])
        firsts, ends = self._row_ranges()
        ranges = list(zip((firsts * per_row).tolist(), (ends * per_row).tolist(), strict=True))
        shape = (len(self), *record.shape[1:])
        return self._moved(self._cells(record, ranges, shape))

    def _jagged(self, record: records.Jagged) -> Parts:
        chosen, sent = self._splits_of(record), self._message.splits(record.group)
        total = sent.total
        dim = record.ragged_dim
        if self._chosen is None:
            values = self._moved(self._whole(record))
            return Parts(values, chosen.offsets, chosen.starts, chosen.lengths, dim, True)
        outer = math.prod(record.shape[: record.ragged_dim - 1])
        inner = math.prod(record.shape[record.ragged_dim :])
        firsts, ends = self._row_ranges()
        shape = list(record.shape)
        shape[record.ragged_dim - 1] = chosen.total
        if not math.prod(record.shape):
            ranges = []
        elif outer * len(firsts) <= _RANGES:
            rows = list(zip(sent.host[firsts].tolist(), sent.host[ends].tolist(), strict=True))
            starts = range(0, outer * total, total)
            ranges = [((k + a) * inner, (k + b) * inner) for k in starts for a, b in rows]
        else:
            # So many runs that to read the column whole is less work than to name them all.
            return self._picked(record, sent, chosen)
        values = self._moved(self._cells(record, ranges, tuple(shape)))
        return Parts(values, chosen.offsets, chosen.starts, chosen.lengths, record.ragged_dim, True)

    def _raggedness(self, group: int) -> Raggedness:
        """That of the chosen rows of a ragged group."""
        if group not in self._ragged:
            splits = self._message.splits(group)
            if splits.rows != self._sent[0] or len(self._sent) != 1:
                raise _rows_differ(self._sent, [splits.rows])
            if self._chosen is not None:
                splits = splits_of_lengths(splits.lengths[_indices(self._chosen)])
            self._ragged[group] = Raggedness(splits)
        return self._ragged[group]

    def _splits_of(self, record: records.Jagged) -> RowSplits:
        """The chosen rows of a column, if its values are as long as all of them."""
        # Columns of one group come here one after the other, and find it without a call.
        known = self._ragged.get(record.group) or self._raggedness(record.group)
        splits = known.splits
        sent = splits if self._chosen is None else self._message.splits(record.group)
        total = record.shape[record.ragged_dim - 1]
        if sent.total != total:
            raise WireFormatError(
                "bad_offsets", "$", f"expected offsets that end at {total}, found {sent.total}"
            )
        return splits

    def _picked(self, record: records.Jagged, sent: RowSplits, chosen: RowSplits) -> Parts:
        """The chosen rows of a column that is read whole."""
        whole = self._cells(record, [(0, math.prod(record.shape))], tuple(record.shape))
        rows = np.arange(sent.rows) if self._chosen is None else np.asarray(self._chosen)
        starts, lengths = sent.starts[rows], sent.lengths[rows]
        loose = Parts(whole, sent.offsets, starts, lengths, record.ragged_dim, False)
        values = self._moved(compact_values(loose))
        return Parts(values, chosen.offsets, chosen.starts, chosen.lengths, record.ragged_dim, True)

    def _row_ranges(self) -> tuple[IntArray, IntArray]:
        """The chosen rows of the message as ranges, neighbours joined: firsts and ends."""
        rows = self._chosen
        if rows is None or isinstance(rows, range):
            start, stop = (0, self._sent[0]) if rows is None else (rows.start, rows.stop)
            return np.array([start]), np.array([stop])
        if not len(rows):
            return rows, rows
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        return rows[np.append(0, breaks)], rows[np.append(breaks, len(rows)) - 1] + 1

    def _cells(
        self, record: records.Tensor | records.Jagged, ranges: Ranges, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """These ranges of a record's cells, end to end."""
        dtype = torch_dtype(record.dtype)
        ranges = _joined(ranges)
        if len(ranges) == 1 and isinstance(record.dtype, str):
            (a, b), size = ranges[0], dtype.itemsize
            place = (record.buffer, record.offset + a * size, (b - a) * size)
            data = self._message.payload.bytes_at(*place, size)
        else:
            parts = [self._range(record, a, b) for a, b in ranges]
            data = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
        return from_bytes(data, dtype, shape)

    def _whole(self, record: records.Tensor | records.Jagged) -> torch.Tensor:
        """All of a record's cells."""
        shape, dtype = tuple(record.shape), torch_dtype(record.dtype)
        cells = math.prod(shape)
        if isinstance(record.dtype, str):
            place = (record.buffer, record.offset, cells * dtype.itemsize)
            return from_bytes(self._message.payload.bytes_at(*place, dtype.itemsize), dtype, shape)
        return from_bytes(self._range(record, 0, cells), dtype, shape)

    def _range(self, record: records.Tensor | records.Jagged, a: int, b: int) -> ByteArray:
        """The bytes of cells a to b, at their full width."""
        payload, dtype = self._message.payload, record.dtype
        if isinstance(dtype, str):
            size = torch_size(dtype, 1)
            return payload.read(record.buffer, record.offset + a * size, (b - a) * size)
        name, stored = dtype
        if stored == "bits":
            # Bits are read by the byte, and those before cell a thrown away.
            first = a // 8
            data = payload.read(record.buffer, record.offset + first, (b + 7) // 8 - first)
            cells = widened(data, stored, name, b - 8 * first)
            return cells[(a - 8 * first) * torch_size(name, 1) :]
        width = torch_size(dtype, 1)
        data = payload.read(record.buffer, record.offset + a * width, (b - a) * width)
        return widened(data, stored, name, b - a)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None else tensor.to(self._device)


def _payload_size(record: Any) -> int:
    """Bytes of the payload that a record itself stands for."""
    if isinstance(record, (records.Tensor, records.Jagged, records.TensorViews)):
        return torch_size(record.dtype, math.prod(record.shape))
    if isinstance(record, records.Bytes):
        return record.size
    if isinstance(record, records.Array):
        return math.prod(record.shape) * numpy_itemsize(record.dtype)
    return 0


class _Message:
    """An open message: its header, and a way to its buffers."""

    def __init__(
        self,
        header: records.Header,
        fetch: Fetch,
        copy: bool | None,
        device: torch.device | None,
        allow_pickle: bool,
    ) -> None:
        self.header = header
        self.payload = RangePayload(fetch, copy)
        self._fetch = fetch
        self.device = device
        self.allow_pickle = allow_pickle
        self._splits: dict[int, RowSplits] = {}

    def check_overlaps(self, leaves: Mapping[str, Any], held: int) -> None:
        """Check every leaf; and that they do not all lie over the same bytes.

        They are copied one by one, however often a message may name a place. The records among
        them are checked, and stand for `held` bytes.
        """
        total = held

        def measure(record: Any) -> Any:
            nonlocal total
            total += _payload_size(record)
            return record

        for name, leaf in leaves.items():
            if type(leaf) is msgpack.ExtType:
                try:
                    read_extension(self.header, leaf, measure)
                except WireFormatError as error:
                    raise _of_column(name, error) from error
        if total > sum(self.header.buffers):
            raise WireFormatError(
                "out_of_bounds",
                "$",
                f"expected values that do not overlap, found {total} bytes of them over a "
                f"payload of {sum(self.header.buffers)}",
            )

    def decoding(self) -> Decoding:
        """A decoder for one leaf that is read whole."""
        return Decoding(self.header, self.payload, self.device, self.allow_pickle)

    def to_read(self) -> _Message:
        """The same message for who never writes to its values: no copies, on the CPU."""
        return _Message(self.header, self._fetch, False, None, self.allow_pickle)

    def splits(self, group: int) -> RowSplits:
        """The row splits of a ragged group, read once."""
        if group not in self._splits:
            self._splits[group] = read_splits(self.header, self.payload, group)
        return self._splits[group]


def open_wire(
    source: Any,
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
) -> WireBatch:
    """Open the message of a batch without reading its payload.

    Args:
        source: Frames or a blob, as `decode` takes them (a mapped file among them); or a callable
            ``(offset, size) -> buffer`` over a blob, as RDMA and object stores give: it is asked
            for the preamble, for the header, and then for just the ranges that are wanted.
        copy: As for `decode`, but of each range that is read.
        device: As for `decode`.
        allow_pickle: As for `decode`.

    Returns:
        A `WireBatch` over the message, whose value must be a TensorDict of at least one batch
        dim. Checksums of buffers are not verified: that would read them all.

    Raises:
        WireFormatError: The source is no such message, or a callable returned too few bytes.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire, to_blob
        >>> columns = {"ids": torch.arange(12).view(3, 4)}
        >>> store = to_blob(encode_fields(columns, lengths=torch.tensor([2, 4, 3])))
        >>> batch = open_wire(lambda offset, size: store[offset : offset + size])
        >>> batch.schema["ids"]
        FieldSchema(kind='jagged', dtype=torch.int64, shape=(3, None))
    """
    target = usable_device(device, "open_wire(device)")
    frames = None if callable(source) else flat_frames(source)
    header, fetch = _fetched(source) if frames is None else _received(frames)
    message = _Message(header, fetch, copy, target, allow_pickle)
    if header.batch is not None:
        batch, names, held = header.batch, None, header.held
    else:
        root = outline(header)
        if type(root) is not msgpack.ExtType or root.code != Kind.TENSORDICT:
            raise WireFormatError(
                "bad_value", "$", "expected the message of a TensorDict, found another; use decode"
            )
        batch, names = _read_batch(header, root)
        held = sum(map(_payload_size, batch.leaves.values()))
    message.check_overlaps(batch.leaves, held)
    return _view(message, batch, names, None, None, frames)


def _received(frames: list[ByteArray]) -> tuple[records.Header, Fetch]:
    header, payload = receive(frames)
    return header, lambda buffer, offset, size: payload[buffer][offset : offset + size]


def _fetched(source: Callable[[int, int], Any]) -> tuple[records.Header, Fetch]:
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
    header = read_header(get(PREAMBLE.size, size).data)
    starts = starts_of(size, header.buffers)
    return header, lambda buffer, offset, size: get(starts[buffer] + offset, size)


def _read_batch(
    header: records.Header, extension: msgpack.ExtType
) -> tuple[records.Batch, list[str | None] | None]:
    """The batch that an extension stands for, and its dim names."""
    record = read_record(header, extension)
    leaves = dict(zip(record.items[::2], record.items[1::2], strict=True))
    for name, leaf in leaves.items():
        if type(leaf) is not msgpack.ExtType:
            raise WireFormatError("bad_value", f"$.{name}", f"expected a leaf, found {brief(leaf)}")
        if leaf.code in (Kind.TENSOR, Kind.JAGGED):
            # Most leaves, read here once; any other stays an extension until it is asked for.
            try:
                leaves[name] = read_record(header, leaf)
            except WireFormatError as error:
                raise _of_column(name, error) from error
    return records.Batch(record.batch_size, leaves), record.names


def _view(
    message: _Message,
    batch: records.Batch,
    names: list[str | None] | None,
    rows: int | None,
    chosen: range | IntArray | None,
    frames: list[ByteArray] | None = None,
) -> WireBatch:
    if not batch.batch_size or rows not in (None, batch.batch_size[0]):
        raise _rows_differ([rows or "N"], batch.batch_size)
    return WireBatch(message, batch.leaves, batch.batch_size, names, chosen, frames)


def _of_column(name: str, error: WireFormatError) -> WireFormatError:
    """An error in a column, with the way there."""
    inside = error.path.removeprefix("$") if error.path.startswith("$") else f" ({error.path})"
    return WireFormatError(error.reason, f"{child_path('$', name)}{inside}", error.detail)


def _rows_differ(expected: Any, found: Any) -> WireFormatError:
    return WireFormatError("bad_rows", "$", f"expected batch size {expected}, found {found}")


# --- rows --------------------------------------------------------------------------------------


def _indices(chosen: range | IntArray) -> Any:
    return slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen


def _joined(ranges: Ranges) -> Ranges:
    """The same cells in as few ranges as can be."""
    joined: Ranges = []
    for a, b in ranges:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif a < b:
            joined.append((a, b))
    return joined


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_nested
