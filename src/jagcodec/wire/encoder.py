"""Python values -> frames. No pickle, and no copy of anything large that lies in order.

Encoding has four phases, and data is handed from one to the next:

    lower   a value -> a schema, and what needs a place; no cell is read (`lowering`)
    place   what needs a place -> buffers, numbers; device memory is fetched here, all of it at once
    copy    rows -> buffers, one allocation and one kernel call
    write   schema, numbers, values -> the header's bytes
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from jagcodec import rowcopy
from jagcodec.errors import ArgumentError, ArgumentTypeError, UnsupportedTypeError, describe
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import ByteArray, array_bytes, as_bytes, flat_bytes
from jagcodec.ragged.copy_rows import copy_task, gathered, values_of
from jagcodec.ragged.nested import view_of_parts
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import NestedParts, RaggedView, end_to_end
from jagcodec.rowcopy import Copy
from jagcodec.wire import documents, numpy_dtypes
from jagcodec.wire.by_column import Narrow, by_column
from jagcodec.wire.frames import Frame, PendingMessage, blob_pieces, frames_of, written
from jagcodec.wire.header import NO_VALUES, write_header
from jagcodec.wire.lowered import TORCH_NAMES, Columns, Dense, Documents, Lowered, Ragged
from jagcodec.wire.lowering import Lowering
from jagcodec.wire.narrow import narrowed
from jagcodec.wire.schema import Group
from jagcodec.wire.spec import (
    ALIGNMENT,
    INTEGER_DTYPES,
    MAX_UNBACKED_ROWS,
    PLAIN,
    SMALL_BUFFER,
)

__all__ = ["Columns", "MsgpackEncoder", "encode", "pending"]


def encode(
    obj: Any,
    *,
    narrow: bool | Mapping[Any, bool] = False,
    outermost: Mapping[Any, int] | None = None,
    checksum: bool = False,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    meta: Mapping[Any, Any] | None = None,
) -> list[Frame]:
    """A value as a message: the header frame, then raw buffers.

    Example:
        >>> import torch
        >>> from jagcodec import decode, encode
        >>> frames = encode({"step": 3, "ids": torch.arange(4)})
        >>> decode(frames)
        {'step': 3, 'ids': tensor([0, 1, 2, 3])}

    Args:
        obj: Any tree of dict, list, tuple, set, frozenset, None, bool, int, float, complex, str,
            bytes, range, slice, numpy arrays and scalars of every dtype, tensors of every layout
            and every dtype but the quantised, `torch.Size`, `torch.dtype`, `torch.device`,
            TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack, MetaData and
            UnbatchedTensor, and of types registered with `register_type` (dataclasses,
            tensorclasses, ...) or `register_stdlib_types` (`OrderedDict`, `datetime`, ...).
        narrow: Store integer tensors in the fewest bytes per cell that hold their values, and
            those of 0 and 1 as bits; `decode` restores dtype and values exactly. Costs two
            looks at each of them here and a copy there. True is for all of them; a mapping of
            names to True or False for the columns of TensorDicts that it names, those of a nested
            one by a tuple of names, and for none of the rest. Names that are no column are ignored.
        outermost: Name of a jagged column of a TensorDict, as for `narrow`, to the inner dim of its
            rows that lies outermost in the message: ``{"routed_experts": 1}`` for rows of (tokens,
            layers, k) puts each layer into one range of bytes, so that who wants some of the
            layers reads no others (`WireBatch.inner`). `decode` returns the column as it was.
            Costs a copy of it on either side. Columns that are not jagged stay as they are.
        checksum: Add a CRC-32 of the header and of every buffer, which `decode` verifies.
        allow_pickle: Pickle objects outside this set instead of refusing them. `decode` must be
            given the same option; only for peers that you trust with your process.
        default: A function, as json, msgspec and orjson take one. It is called with each value
            that cannot be encoded, and returns one that can be encoded in its place, or raises.
            What it returns is looked at like any other value. If it returns the value itself,
            that is pickled or refused as without it. It is not asked about dict keys and set
            members.
        meta: What belongs to the whole message, such as the step and the version of the model: a
            mapping of values without tensors and arrays. It is read as `meta` of a `WireBatch`,
            and no part of what `decode` returns.

    Returns:
        Frames of the buffer protocol: `bytes` first, then flat memoryviews, ready for
        ``send_multipart(frames, copy=False)``. Memory that already lies contiguous on the CPU is
        aliased, not copied, and kept alive by its frame: write to it only after the frames are
        sent. The same holds for ``tensor.share_memory_()``, which putting the tensor on a queue of
        torch.multiprocessing calls, because it moves the memory away from under the frame.
        Buffers below 16 KiB are copied into frame 1. Tensors on other devices are copied to one
        block, for CUDA of pinned memory, which lives as long as one of its frames; the device is
        waited for once (a jagged one with holes is compacted on its device first).

    Example of `default`:
        >>> decode(encode([ValueError("no reward")], default=repr))
        ["ValueError('no reward')"]

    Raises:
        ArgumentError: `outermost` names a dim that the rows of a column do not have.
        ArgumentTypeError: `narrow`, `outermost` or `meta` is of another type.
        UnsupportedTypeError: An object outside this set, named with its path:
            ``$.extra[3].lock: _thread.lock ...``; or containers nested past 100 levels.

    `decode` returns the same value: types, dtypes, shapes, layouts, bits and dict order. These are
    not kept: gradients and `requires_grad` (a Parameter arrives as a plain tensor), devices
    (tensors arrive on the CPU), holes in jagged tensors (they arrive compacted), memory-mapped
    files (their contents arrive), locks of TensorDicts, and metadata of numpy dtypes.

    Safe to call from several threads at once.
    """
    message = pending(
        obj,
        narrow=narrow,
        outermost=outermost,
        checksum=checksum,
        allow_pickle=allow_pickle,
        default=default,
        meta=meta,
    )
    return frames_of(message)


def pending(
    obj: Any,
    *,
    narrow: bool | Mapping[Any, bool] = False,
    outermost: Mapping[Any, int] | None = None,
    checksum: bool = False,
    allow_pickle: bool = False,
    default: Callable[[Any], Any] | None = None,
    meta: Mapping[Any, Any] | None = None,
    keep_on: torch.device | None = None,
) -> PendingMessage:
    """The message of a value, up to the copying: its rows are still to be written somewhere.

    With `keep_on`, the cells of dense and jagged tensors on that device stay there: such a buffer
    is a flat uint8 tensor. The header and everything else are on the host, as in any message.
    """
    every, named = by_column(narrow, outermost)
    lowering = Lowering(allow_pickle, default, named)
    tree = lowering.lower(obj)
    if type(tree) is not tuple:
        lowering.values.append(tree)
        tree = None
    if meta is not None:
        lowering.values.append(meta_document(meta, allow_pickle, default))
    lowered = Lowered(tree, lowering.items, lowering.values, lowering.unbacked)
    if not lowering.items:  # nothing needs a place, as in the messages that control a data plane
        return _with_header(lowered, [], [], [], checksum, _nothing, list)
    copies = HostCopies()
    if lowering.on_devices or lowering.off_devices:
        leaving = [tensor for tensor in lowering.on_devices if tensor.device != keep_on]
        copies.fetch([*leaving, *lowering.off_devices])
        lowered = lowered._replace(items=_compacted(lowered.items, copies, keep_on))
    stored = every if named is None else every or named.narrow_items(lowered.items, lowering.items)
    return _Placing(copies, stored, keep_on).message(lowered, checksum)


def meta_document(meta: Any, allow_pickle: bool, default: Callable[[Any], Any] | None) -> Any:
    """The document of what belongs to the whole message."""
    if not isinstance(meta, Mapping):
        raise ArgumentTypeError(
            "bad_type", "meta", f"expected a mapping of names to values, found {describe(meta)}"
        )
    document = Lowering(allow_pickle, default).lower(dict(meta))
    if type(document) is tuple:
        raise UnsupportedTypeError(
            "unsupported_type",
            "meta",
            "expected values without tensors, arrays and long bytes, found one; make it a column, "
            "or a value of its own beside the batch: encode({'batch': batch, 'more': value})",
        )
    return document


def _compacted(items: list[Any], copies: HostCopies, keep_on: torch.device | None) -> list[Any]:
    """The items with every jagged column of a device that has holes compacted there, and fetched.

    Together, and so with one more wait for the device.
    """
    pool = RowSplitsPool()
    views: dict[int, RaggedView] = {}
    for i, item in enumerate(items):
        if type(item) is Ragged and type(item.source) is NestedParts:
            values = item.source.values
            if item.source.lengths is not None and not values.is_cpu:
                view = view_of_parts(item.source, item.path, pool, copies)
                views[i] = end_to_end(values_of(view), view.row_splits, view.ragged_dim)
    compacted: Any = [view.memory for view in views.values() if view.device != keep_on]
    copies.fetch(compacted)
    return [item._replace(source=views[i]) if i in views else item for i, item in enumerate(items)]


class MsgpackEncoder:
    """`encode` as an object, where a framework wants one. Holds its options and no other state.

    Example:
        >>> from jagcodec import MsgpackDecoder, MsgpackEncoder
        >>> MsgpackDecoder().decode(MsgpackEncoder().encode([1, (2, 3)]))
        [1, (2, 3)]
    """

    def __init__(
        self,
        *,
        narrow: bool | Mapping[Any, bool] = False,
        outermost: Mapping[Any, int] | None = None,
        checksum: bool = False,
        allow_pickle: bool = False,
        default: Callable[[Any], Any] | None = None,
    ) -> None:
        by_column(narrow, outermost)
        self._narrow = narrow
        self._outermost = outermost
        self._checksum = checksum
        self._allow_pickle = allow_pickle
        self._default = default

    def encode(self, obj: Any) -> list[Frame]:
        """See `encode`."""
        return encode(
            obj,
            narrow=self._narrow,
            outermost=self._outermost,
            checksum=self._checksum,
            allow_pickle=self._allow_pickle,
            default=self._default,
        )


# --- place, copy, write ------------------------------------------------------------------------


def _with_header(
    lowered: Lowered,
    numbers: list[int],
    groups: list[Group],
    buffers: list[Any],
    checksum: bool,
    write: Callable[[list[ByteArray]], None],
    sources: Callable[[], list[np.ndarray[Any, Any]]],
) -> PendingMessage:
    """The message of what was placed; see `PendingMessage`."""
    sizes = [part if type(part) is int else part.nbytes for part in buffers]
    payload = sum(sizes)
    for path, rows in lowered.unbacked:
        if rows > payload:
            raise UnsupportedTypeError(
                "too_large",
                path,
                f"expected at most {MAX_UNBACKED_ROWS} rows without data, found {rows}",
            )
    checksums = None
    if checksum:
        buffers = written(buffers, write)
        checksums = [zlib.crc32(part.data) for part in buffers]
        write, sources = _nothing, list
    try:
        values = documents.packer().pack(lowered.values) if lowered.values else NO_VALUES
        header = write_header(lowered.schema, numbers, values, groups, sizes, checksums)
    except ValueError as error:
        raise UnsupportedTypeError("too_large", "$", f"msgpack: {error}") from error
    return PendingMessage(header, buffers, write, sources)


def _nothing(memory: list[ByteArray]) -> None:
    """Writes what is left to be written of a message that is finished."""


# Between two buffers of frame 1.
_GAPS = tuple(map(bytes, range(ALIGNMENT)))


class _Placing:
    """The state of one walk over lowered items: where everything lies in the message."""

    def __init__(self, copies: HostCopies, narrow: Narrow, keep_on: torch.device | None) -> None:
        self._copies_of = copies
        self._narrow = narrow
        self._keep_on = keep_on
        self._numbers: list[int] = []
        self._pool = RowSplitsPool()
        self._groups: list[Group] = []
        self._group_of: dict[int, int] = {}
        # Frame 1: how long it is so far, and what is to be written to it, by offset: contiguous.
        self._small_size = 0
        self._small: list[tuple[int, np.ndarray[Any, Any]]] = []
        # The same as bytes, where no rows are still to be copied to it.
        self._first: ByteArray | None = None
        # The other frames; an int is the size of one that is still to be written.
        self._large: list[Any] = []
        # Rows to be copied: the frame, the offset in it, and their bytes.
        self._rows: list[tuple[int, int, int, RaggedView]] = []

    def message(self, lowered: Lowered, checksum: bool) -> PendingMessage:
        """The message of a lowered value."""
        self._place(lowered.items)
        buffers: list[Any] = []
        if self._small_size or self._large:
            if self._small and not (self._rows and self._rows_in_first()):
                self._first = self._joined()
            buffers = [self._small_size if self._first is None else self._first, *self._large]
        numbers, groups = self._numbers, self._groups
        return _with_header(lowered, numbers, groups, buffers, checksum, self._fill, self._sources)

    def _place(self, items: list[Any]) -> None:
        narrow = self._narrowed(items) if self._narrow else {}
        numbers, group_of = self._numbers, self._group_of
        for i, item in enumerate(items):
            kind = type(item)
            if kind is int:
                numbers.append(item)
            elif kind is RaggedView or kind is Ragged:
                view = item if kind is RaggedView else self._view(item)
                row_splits, starts, shape = view.row_splits, view.starts, view.shape
                memory: Any = view.memory
                in_order = starts is None and type(memory) is np.ndarray
                if in_order:
                    size = memory.nbytes
                else:
                    if starts is not None:
                        dim = view.ragged_dim - 1
                        shape = (*shape[:dim], row_splits.total, *shape[dim + 1 :])
                    size = view.dtype.itemsize
                    for extent in shape:
                        size *= extent
                if i in narrow:
                    stored, data = narrow[i]
                    numbers += (*self._place_bytes(data), stored)
                elif self._keep_on is not None and view.device == self._keep_on:
                    numbers += (*self._keep(values_of(view)), PLAIN)
                elif size >= SMALL_BUFFER:
                    # Rows that lie in order already are sent from where they lie.
                    self._large.append(size if starts is not None else _bytes_of(view))
                    numbers += (len(self._large), 0, PLAIN)
                    if starts is not None:
                        self._rows.append((len(self._large), 0, size, view))
                elif size:
                    offset = (self._small_size + 63) & -ALIGNMENT
                    self._small_size = offset + size
                    if in_order:
                        self._small.append((offset, memory))
                    else:
                        self._rows.append((0, offset, size, view))
                    numbers += (0, offset, PLAIN)
                else:
                    numbers += (0, 0, PLAIN)
                group = group_of.get(id(row_splits))
                numbers.append(self._new_group(row_splits) if group is None else group)
                numbers += shape
            elif kind is Dense:
                self._place_cells(item, narrow.get(i))
            elif kind is Documents:
                self._place_documents(item.rows, self._is_narrow(i))
            else:
                numbers.append(int(item))  # a symbolic or numpy dim

    def _view(self, column: Ragged) -> RaggedView:
        """The rows of a jagged column, on the host but for a device that is to keep them."""
        source = column.source
        if type(source) is RaggedView:
            view = source
        else:
            parts: Any = source
            try:
                view = view_of_parts(parts, column.path, self._pool, self._copies_of)
            except ArgumentError as error:
                raise UnsupportedTypeError(error.reason, column.path, error.detail) from error
        memory: Any = view.memory
        if memory.is_cpu or memory.device == self._keep_on:
            return view
        return replace(view, memory=self._copies_of.of(memory))

    def _new_group(self, row_splits: RowSplits) -> int:
        """The group of these rows, made or found."""
        one = self._pool.unique(row_splits)
        group = self._group_of.get(id(one))
        if group is None:
            group = len(self._groups)
            place = (0, 0)
            if one.rows > 1:  # of fewer rows the shortest and the longest say everything
                place = self._place_bytes(one.host.view(np.uint8))
            self._groups.append(Group(*place, one.rows, one.min, one.max))
            self._group_of[id(one)] = group
        self._group_of[id(row_splits)] = group
        return group

    def _place_cells(self, item: Dense, narrow: tuple[int, ByteArray] | None) -> None:
        source, numbers = item.source, self._numbers
        if narrow is not None:
            numbers += (*self._place_bytes(narrow[1]), narrow[0])
            return
        if isinstance(source, torch.Tensor):
            if not source.is_cpu and source.device == self._keep_on:
                numbers += self._keep(source)
            else:
                numbers += self._place_bytes(as_bytes(self._copies_of.of(source)))
        elif isinstance(source, np.ndarray):
            plain = item.dtype is not None and source.flags.c_contiguous
            data = source.reshape(-1).view(np.uint8) if plain else None
            numbers += self._place_bytes(numpy_dtypes.cell_bytes(source) if data is None else data)
        elif isinstance(source, RaggedView):
            numbers += self._place_bytes(as_bytes(values_of(source)))
        else:
            parts = [as_bytes(self._copies_of.of(part)) for part in source]
            numbers += self._place_bytes(
                np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
            )
        if item.dtype is not None:
            numbers.append(PLAIN)

    def _is_narrow(self, item: int) -> bool:
        """Whether the item of this index is stored narrow, if it can be."""
        narrow = self._narrow
        return narrow if isinstance(narrow, bool) else item in narrow

    def _place_documents(self, rows: Sequence[bytes | Lowered], narrow: bool) -> None:
        pieces: list[Any] = []
        lengths: list[int] = []
        end = 0
        for row in rows:
            begin = end
            if isinstance(row, bytes):
                pieces.append(row)
                end += len(row)
            else:
                # Zeros before the message, so that it lies at a multiple of 64.
                gap = -end % ALIGNMENT
                inner = _Placing(self._copies_of, narrow, None)
                blob = blob_pieces(frames_of(inner.message(row, False)))
                pieces += (bytes(gap), *blob)
                end += gap + sum(map(len, blob))
            lengths.append(end - begin)
        data = np.frombuffer(bytearray().join(pieces), dtype=np.uint8)
        row_splits = RowSplits.from_lengths(np.array(lengths, dtype=np.int64))
        self._numbers += (*self._place_bytes(data), end, self._new_group(row_splits))

    # Buffers

    def _place_bytes(self, data: ByteArray) -> tuple[int, int]:
        """A place for bytes that are there already."""
        size = data.nbytes
        if size == 0:
            return (0, 0)
        if size >= SMALL_BUFFER:
            self._large.append(data)
            return (len(self._large), 0)
        offset = self._small_size + -self._small_size % ALIGNMENT
        self._small_size = offset + size
        self._small.append((offset, data))
        return (0, offset)

    def _keep(self, tensor: torch.Tensor) -> tuple[int, int]:
        """A place for cells that stay on their device."""
        # Where there are none, too: it says which device an empty tensor belongs on.
        nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._large.append(flat_bytes(tensor) if tensor.numel() else nothing)
        return (len(self._large), 0)

    def _narrowed(self, items: list[Any]) -> dict[int, tuple[int, ByteArray]]:
        """The integer columns that can be stored narrow; packed together where they have to be."""
        found: dict[int, ByteArray] = {}
        loose: dict[int, RaggedView] = {}
        dtypes: dict[int, str] = {}
        for i, item in enumerate(items):
            kind = type(item)
            if kind not in (RaggedView, Ragged, Dense) or not self._is_narrow(i):
                continue
            dtype = TORCH_NAMES[item.dtype] if kind is RaggedView else item.dtype
            if dtype not in INTEGER_DTYPES:
                continue
            dtypes[i] = dtype
            if kind is Dense:
                source: Any = item.source
                if type(source) is np.ndarray:
                    found[i] = numpy_dtypes.cell_bytes(source)
                elif source.is_cpu or source.device != self._keep_on:
                    found[i] = as_bytes(self._copies_of.of(source))
                continue
            view: RaggedView = item if kind is RaggedView else self._view(item)
            if self._keep_on is not None and view.device == self._keep_on:
                continue
            if view.starts is None:
                found[i] = _bytes_of(view)
            else:
                loose[i] = view
        for i, values in zip(loose, gathered(loose.values()), strict=True):
            found[i] = as_bytes(values)
        narrow = {i: narrowed(data, dtypes[i]) for i, data in found.items()}
        return {i: stored for i, stored in narrow.items() if stored is not None}

    # Copy

    def _fill(self, memory: Sequence[ByteArray]) -> None:
        """Write what was placed into memory for each buffer that is still to be written."""
        if not memory:
            return
        fresh = iter(memory)
        parts = (self._small_size if self._first is None else self._first, *self._large)
        targets = [next(fresh) if type(part) is int else None for part in parts]
        first: Any = targets[0]
        if first is not None:
            first.fill(0)  # between the buffers
            for offset, data in self._small:
                first[offset : offset + data.nbytes] = array_bytes(data)
        copies = []
        for buffer, offset, size, view in self._rows:
            target: Any = targets[buffer]
            target = target[offset : offset + size]
            if view.ragged_dim == 1 and type(view.memory) is np.ndarray:
                lengths = view.row_splits.lengths
                cell = size // view.row_splits.total
                copies.append(Copy(target, view.memory, None, view.starts, lengths, cell))
            else:
                copies.append(copy_task(view, target))
        rowcopy.copy_all(copies)

    def _rows_in_first(self) -> bool:
        return any(buffer == 0 for buffer, *_ in self._rows)

    def _joined(self) -> ByteArray:
        """Frame 1 of what is there already: one pass, where an array takes a call for each."""
        pieces: list[Any] = []
        end = 0
        for offset, data in self._small:
            pieces += (_GAPS[offset - end], data)
            end = offset + data.nbytes
        return np.frombuffer(bytearray().join(pieces), dtype=np.uint8)

    def _sources(self) -> list[np.ndarray[Any, Any]]:
        """The memory that `_fill` reads."""
        sources: list[Any] = [data for _, data in self._small]
        for *_, view in self._rows:
            memory: Any = view.memory
            if isinstance(memory, tuple):
                sources += memory
            else:
                sources.append(as_bytes(memory) if isinstance(memory, torch.Tensor) else memory)
        return sources


def _bytes_of(view: RaggedView) -> ByteArray:
    """The bytes of rows that lie end to end."""
    memory: Any = view.memory
    return as_bytes(memory) if isinstance(memory, torch.Tensor) else array_bytes(memory)
