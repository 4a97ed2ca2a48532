"""Frames -> Python values. Every number of the header is checked before something is built.

A message is opened, and then its nodes are asked for: all of them by `decode`, the chosen columns
and rows by `open_wire` (see `lazy`).
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from jagcodec._arguments import usable_device
from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, from_bytes
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import nested_tensor, row_count
from jagcodec.ragged.non_tensor import batch_of, is_non_tensor, leaf_of_rows, object_array
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import documents, numpy_dtypes
from jagcodec.wire.checks import cells_of, check_distinct, expect
from jagcodec.wire.documents import Tag
from jagcodec.wire.frames import (
    FramePayload,
    Payload,
    blob_end,
    buffer_bytes,
    is_blob,
    read_preamble,
    split_blob,
)
from jagcodec.wire.header import Header, check_crc, read_header
from jagcodec.wire.narrow import widened
from jagcodec.wire.registry import restore
from jagcodec.wire.schema import (
    Node,
    child_step,
    has_object,
    inside,
    numpy_itemsize,
    stored_size,
)
from jagcodec.wire.spec import (
    BITS,
    MAX_DEPTH,
    MAX_STACKS,
    PLAIN,
    STORED_WIDTHS,
    TORCH_DTYPES,
    Kind,
)

T = TypeVar("T")
AnyArray: TypeAlias = npt.NDArray[Any]

_DTYPES: dict[str, torch.dtype | None] = {name: getattr(torch, name, None) for name in TORCH_DTYPES}

# Of every dtype that this torch has: a dtype itself can be encoded even where its tensors cannot.
_ALL_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def decode(
    frames: Any,
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
) -> Any:
    """The value that `encode` was given.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from jagcodec import decode, encode
        >>> td = TensorDict({"ids": torch.arange(6).view(2, 3), "tag": "gsm8k"}, batch_size=[2])
        >>> back = decode(encode(td))
        >>> back["ids"].tolist(), back["tag"]
        ([[0, 1, 2], [3, 4, 5]], 'gsm8k')

    Args:
        frames: The message's frames in order, each of the buffer protocol (bytes, bytearray,
            memoryview, numpy array, `zmq.Frame`) or a uint8 CPU tensor; at any address. Or a
            message in one buffer, as `to_blob` makes it.
        copy: None aliases writable frames and copies read-only ones, each once however many
            values lie in it: torch has no read-only tensors, and a write into read-only memory
            can kill the process. True copies every frame. False copies none: never write to
            what comes back if a frame was read-only.
        device: Where tensors go, and the `device` of TensorDicts. None: the CPU, and None.
        allow_pickle: Unpickle what an `encode` with the same option pickled. That runs whatever
            code the sender chose: only for peers that you trust with your process.

    Returns:
        The value. Tensors and arrays that alias a frame keep it alive, and each has a storage of
        its own over its bytes. Columns with equal row lengths share one offsets tensor, so
        ``td["a"] * td["b"]`` works. Values at an address that their dtype cannot live at are
        copied, whatever `copy` says.

    Raises:
        WireFormatError: The frames are not a whole message of this format and version. `.path`
            says where, `.reason` what.

    Nothing is unpickled unless you allow it, and no name in a message is ever looked up outside
    the tables of `docs/wire-format.md` and the types that you registered. Safe to call from
    several threads at once.
    """
    target = usable_device(device, "decode(device)")
    header, (_, *buffers) = open_frames(frames)
    if header.checksums is not None:
        check_frames(buffers, header.checksums)
    return Message(header, FramePayload(buffers, copy), target, allow_pickle).value()


class MsgpackDecoder:
    """`decode` as an object, where a framework wants one. Holds its options and no other state.

    Example:
        >>> from jagcodec import MsgpackDecoder, MsgpackEncoder
        >>> decoder = MsgpackDecoder(copy=True)
        >>> decoder.decode(MsgpackEncoder().encode({"a": 1}))
        {'a': 1}
    """

    def __init__(
        self,
        *,
        copy: bool | None = None,
        device: torch.device | str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._copy = copy
        self._device = device
        self._allow_pickle = allow_pickle

    def decode(self, frames: Any) -> Any:
        """See `decode`."""
        return decode(frames, copy=self._copy, device=self._device, allow_pickle=self._allow_pickle)


# --- opening -----------------------------------------------------------------------------------


def flat_frames(frames: Any) -> list[ByteArray]:
    """What holds a message as arrays that alias it: frames, header first, or one blob.

    Raises:
        WireFormatError: There is no message, or something in it is not a buffer.
    """
    one = isinstance(frames, (bytes, bytearray, memoryview, np.ndarray, torch.Tensor))
    if one or not isinstance(frames, Sequence):
        frames = [frames]
    if not frames:
        raise WireFormatError("no_message", "frames", "expected a header frame, found no frame")
    return [buffer_bytes(frame, f"frame {i}") for i, frame in enumerate(frames)]


def open_frames(frames: Any) -> tuple[Header, list[ByteArray]]:
    """The checked header of a message, and its frames, header first, aliased.

    Raises:
        WireFormatError: The message is cut, or its frames are not the header's.
    """
    arrays = flat_frames(frames)
    if len(arrays) == 1 and is_blob(arrays[0]):
        return open_blob(arrays[0])
    header = read_header(arrays[0].data)
    sizes = [len(array) for array in arrays[1:]]
    if sizes != header.sizes:
        check_sizes(header, sizes)
    return header, arrays


def open_blob(blob: ByteArray) -> tuple[Header, list[ByteArray]]:
    """As `open_frames`, of a message in one buffer; bytes behind its end are not looked at."""
    size = read_preamble(blob)
    header = read_header(split_blob(blob, size, ())[0].data)
    return header, split_blob(blob, size, header.sizes)


def check_sizes(header: Header, sizes: Sequence[int]) -> None:
    """See that the frames behind the header are those that it announces.

    Raises:
        WireFormatError: One is missing, or has another size; it is named.
    """
    if len(sizes) != len(header.sizes):
        raise WireFormatError(
            "frame_count",
            "frames",
            f"expected {len(header.sizes) + 1} frames, found {len(sizes) + 1}; "
            "frames were lost, or come from more than one message",
        )
    for i, (expected, found) in enumerate(zip(header.sizes, sizes, strict=True)):
        if expected != found:
            raise WireFormatError(
                "frame_size",
                f"frame {i + 1}",
                f"expected {expected} bytes, found {found}; it was cut, or frames changed places",
            )


def check_frames(buffers: Sequence[ByteArray], checksums: Sequence[int]) -> None:
    """Compare the checksums of the frames behind the header."""
    for i, (buffer, checksum) in enumerate(zip(buffers, checksums, strict=True)):
        check_crc(zlib.crc32(buffer), checksum, f"frame {i + 1}")


# --- values ------------------------------------------------------------------------------------


class Message:
    """An open message: its checked header, and a way to its buffers."""

    def __init__(
        self,
        header: Header,
        payload: Payload,
        device: torch.device | None,
        allow_pickle: bool,
        *,
        depth: int = 0,
        lazy: bool = False,
    ) -> None:
        self.header = header
        self.lazy = lazy  # whether a value may be asked for more than once
        self.payload = payload
        self.device = device
        self.allow_pickle = allow_pickle
        self.numbers = header.numbers
        self._depth = depth  # containers around what is built, those of outer messages included
        self._groups: list[RowSplits | None] = [None] * len(header.groups)
        # Rows chosen of a group, by the group and the identity of the choice, which is kept.
        self._chosen: dict[tuple[int, int], tuple[Chosen, RowSplits]] = {}
        # Levels of lazy stacks in what was built, with the value, so that its id stays its own.
        self._stacked: dict[int, tuple[int, Any]] = {}

    def value(self) -> Any:
        """The value of the whole message."""
        return self.build(self.header.schema.root)

    def build(self, node: Node) -> Any:
        """The value of one node.

        Raises:
            WireFormatError: Its parts do not fit together.
        """
        try:
            return _BUILDERS[node.kind](self, node)
        except (WireFormatError, MemoryError):
            raise
        except Exception as error:  # torch, numpy and tensordict raise all kinds
            raise _bad(f"a {node.kind.name}", error) from error

    def _children(self, node: Node) -> list[Any]:
        self._depth += 1
        if self._depth > MAX_DEPTH + 4:
            raise WireFormatError(
                "too_deep", "$", f"expected at most {MAX_DEPTH + 4} levels, found more"
            )
        values = []
        for i, child in enumerate(node.children):
            try:
                values.append(self.build(child))
            except WireFormatError as error:
                raise inside(error, child_step(node, i)) from error
        self._depth -= 1
        return values

    def shape(self, node: Node, skip: int) -> tuple[int, ...]:
        """The dims of a node, which stand behind `skip` other numbers."""
        first = node.number + skip
        rank: int = node.fields[_RANKS[node.kind]]
        return tuple(self.numbers[first : first + rank])

    # Values without buffers

    def _value(self, node: Node) -> Any:
        value = self.header.values[node.value]
        return self.revived(value, 0) if self.header.records or self.lazy else value

    def revived(self, value: Any, depth: int) -> Any:
        """A copy of a document in which records are what they stand for."""
        kind = type(value)
        if kind in _NATIVE:
            return value
        if kind is not list and kind is not dict:
            raise WireFormatError("unknown_kind", "$", f"expected a value, found a {kind.__name__}")
        if depth + self._depth > MAX_DEPTH:
            raise WireFormatError(
                "too_deep", "$", f"expected at most {MAX_DEPTH} levels, found more"
            )
        step: Any = None
        try:
            if kind is dict:
                items = {}
                for step, item in value.items():
                    items[step] = item if type(item) in _NATIVE else self.revived(item, depth + 1)
                return items
            tag = value[0].kind if value and type(value[0]) is Tag else None
            if tag in (Kind.SCALAR, Kind.STRING_ARRAY):
                return self._record(tag, value[1:])  # whose fields are plain
            parts = []
            for step, item in enumerate(value if tag is None else value[1:]):
                parts.append(item if type(item) in _NATIVE else self.revived(item, depth + 1))
        except WireFormatError as error:
            raise inside(error, step) from error
        return parts if tag is None else self._record(tag, parts)

    def _record(self, kind: Kind, fields: list[Any]) -> Any:
        names = documents.RECORDS[kind]
        if names[0] != "*items" and len(fields) != len(names):
            raise WireFormatError(
                "bad_record",
                "$",
                f"expected {len(names)} fields of {kind.name}, found {len(fields)}",
            )
        try:
            return _RECORDS[kind](self, *fields)
        except (WireFormatError, MemoryError):
            raise
        except Exception as error:
            raise _bad(f"a {kind.name}", error) from error

    def _user(self, node: Node) -> Any:
        (state,) = self._children(node)
        return restore(node.fields[0], state)

    def _dict(self, node: Node) -> dict[Any, Any]:
        keys, *items = self._children(node)
        if type(keys) is not list or node.children[0].kind is not Kind.VALUE:
            raise _bad("a list of keys", type(keys).__name__)
        return dict_of(keys, items)

    # numpy

    def _array(self, node: Node) -> AnyArray:
        dtype = _numpy_dtype(node.fields[0])
        shape = self.shape(node, 2)
        size = math.prod(shape) * dtype.itemsize
        alignment = math.gcd(dtype.alignment, 16)
        buffer, offset = self.numbers[node.number : node.number + 2]
        data = self.payload.bytes_at(buffer, offset, size, alignment)
        array: AnyArray = np.ndarray(shape, dtype=dtype, buffer=data)
        numpy_dtypes.check_text(array)
        return array

    def _field_array(self, node: Node) -> AnyArray:
        dtype = _numpy_dtype(node.fields[0])
        shape = self.shape(node, 0)
        names = dtype.names or ()
        columns = self._children(node)
        for name, column in zip(names, columns, strict=True):
            if not isinstance(column, np.ndarray) or column.shape[: len(shape)] != shape:
                raise _bad(f"an array of shape {shape} for field {name!r}", type(column).__name__)
        array = np.zeros(shape, dtype=dtype)
        for name, column in zip(names, columns, strict=True):
            if column.dtype != array[name].dtype or column.shape != array[name].shape:
                raise _bad(f"{array[name].dtype} for field {name!r}", column.dtype)
            array[name] = column
        return array

    def _scalar(self, node: Node) -> Any:
        (data,) = self._children(node)
        if not isinstance(data, np.ndarray) or data.shape != ():
            raise _bad("a 0-d array", type(data).__name__)
        return data[()]

    # Cells

    def tensor(self, node: Node, chosen: Chosen | None = None) -> torch.Tensor:
        """A TENSOR, or some of its rows."""
        i = node.number
        numbers = self.numbers
        shape = tuple(numbers[i + 3 : i + 3 + node.fields[1]])
        if chosen is None:
            values = self._cells(node, shape)
        else:
            values = self._rows_of_tensor(node, shape, chosen)
        return values if self.device is None else values.to(self.device)

    def _cells(self, node: Node, shape: tuple[int, ...]) -> torch.Tensor:
        """All the cells of a TENSOR, JAGGED or TENSOR_VIEWS."""
        name = node.fields[0]
        dtype = torch_dtype(name)
        i = node.number
        numbers = self.numbers
        buffer, offset = numbers[i], numbers[i + 1]
        if node.kind is not Kind.TENSOR_VIEWS and numbers[i + 2] != PLAIN:
            cells = math.prod(shape)
            size = stored_size(name, numbers[i + 2], cells)
            narrow = self.payload.read(buffer, offset, size)
            return from_bytes(widened(narrow, numbers[i + 2], name, cells), dtype, shape)
        size = node.itemsize
        for dim in shape:
            size *= dim
        kept = self.payload.on_device(buffer, offset, size)
        if kept is not None:
            return kept.view(dtype).view(shape)
        data = self.payload.bytes_at(buffer, offset, size, node.itemsize)
        return from_bytes(data, dtype, shape)

    def _cell_range(self, node: Node, start: int, end: int, *, keep: bool) -> ByteArray:
        """The bytes of cells `start` to `end` of a TENSOR or JAGGED, as wide as their dtype.

        With `keep`, memory that a tensor may alias; otherwise to be looked at only.
        """
        i = node.number
        buffer, offset, stored = self.numbers[i : i + 3]
        name = node.fields[0]
        if stored == PLAIN:
            size = node.itemsize
            place = (buffer, offset + start * size, (end - start) * size)
            return self.payload.bytes_at(*place, size) if keep else self.payload.read(*place)
        if stored == BITS:
            # Bits are read by the byte, and those before the first cell thrown away.
            first = start // 8
            data = self.payload.read(buffer, offset + first, (end + 7) // 8 - first)
            cells = widened(data, stored, name, end - 8 * first)
            return cells[(start - 8 * first) * node.itemsize :]
        width, _ = STORED_WIDTHS[stored]
        data = self.payload.read(buffer, offset + start * width, (end - start) * width)
        return widened(data, stored, name, end - start)

    def _rows_of_tensor(self, node: Node, shape: tuple[int, ...], chosen: Chosen) -> torch.Tensor:
        per_row = math.prod(shape[1:])
        wanted = (len(chosen), *shape[1:])
        dtype = torch_dtype(node.fields[0])
        if isinstance(chosen, range):
            bounds = chosen.start * per_row, chosen.stop * per_row
            return from_bytes(self._cell_range(node, *bounds, keep=True), dtype, wanted)
        if self.payload.in_memory:
            whole = self._cell_range(node, 0, shape[0] * per_row, keep=False)
            rows = whole.reshape(shape[0], per_row * node.itemsize)[chosen]
            return from_bytes(rows.reshape(-1), dtype, wanted)
        ranges = [(a * per_row, b * per_row) for a, b in joined_rows(chosen)]
        return from_bytes(self._joined(node, ranges), dtype, wanted)

    def _joined(self, node: Node, ranges: Iterable[tuple[int, int]]) -> ByteArray:
        """Ranges of cells that are fetched one by one, end to end."""
        parts = [self._cell_range(node, a, b, keep=False) for a, b in ranges if a < b]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)

    # Jagged columns

    def row_splits(self, group: int, chosen: Chosen | None = None) -> RowSplits:
        """The rows of a ragged group, or some of them; read once.

        Raises:
            WireFormatError: Its offsets are not offsets, or not those of its min and max.
        """
        found = self._groups[group]
        if found is None:
            found = self._groups[group] = self._read_group(group)
        if chosen is None:
            return found
        key = (group, id(chosen))
        known = self._chosen.get(key)
        if known is None:
            rows = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
            picked = RowSplits.from_lengths(np.ascontiguousarray(found.lengths[rows]))
            known = self._chosen[key] = (chosen, picked)
        return known[1]

    def _read_group(self, index: int) -> RowSplits:
        group = self.header.groups[index]
        path = f"$ (ragged group {index})"
        if group.rows < 2:
            # The shortest and the longest row say everything.
            return RowSplits.from_lengths(np.full(group.rows, group.max, dtype=np.int64))
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
        if chosen is None:
            row_splits, shape = self._rows_and_shape(node)
            values = self._cells(node, shape)
        else:
            view = self.view(node, chosen, keep=True)
            row_splits, values = view.row_splits, values_of(view)
        if self.device is not None:
            values = values.to(self.device)
        return nested_tensor(values, row_splits, node.fields[2])

    def _rows_and_shape(self, node: Node) -> tuple[RowSplits, tuple[int, ...]]:
        """The rows of a JAGGED column, and the shape of its values."""
        i = node.number
        group = self.numbers[i + 3]
        row_splits = self._groups[group] or self.row_splits(group)
        shape = tuple(self.numbers[i + 4 : i + 4 + node.fields[1]])
        total = shape[node.fields[2] - 1]
        if row_splits.total != total:
            raise WireFormatError(
                "bad_offsets",
                "$",
                f"expected the offsets of ragged group {group} to end at the {total} "
                f"cells of the values, found {row_splits.total}",
            )
        return row_splits, shape

    def view(self, node: Node, chosen: Chosen | None = None, *, keep: bool = False) -> RaggedView:
        """The rows of a JAGGED column where they lie in the message; or some of them.

        Its memory is only to be read, unless `keep` asks for memory that a tensor may alias.
        """
        row_splits, shape = self._rows_and_shape(node)
        name, _, dim = node.fields
        dtype = torch_dtype(name)
        if chosen is None:
            data = self._cell_range(node, 0, math.prod(shape), keep=keep)
            return RaggedView(data, dtype, shape, dim, None, row_splits)
        inner = math.prod(shape[dim:])
        outer = math.prod(shape[: dim - 1])
        extent = shape[dim - 1]
        picked = self.row_splits(self.numbers[node.number + 3], chosen)
        wanted = (*shape[: dim - 1], picked.total, *shape[dim:])
        host = row_splits.host
        if not math.prod(wanted):
            return RaggedView(np.empty(0, np.uint8), dtype, wanted, dim, None, picked)
        if isinstance(chosen, range) and outer == 1:
            bounds = int(host[chosen.start]) * inner, int(host[chosen.stop]) * inner
            data = self._cell_range(node, *bounds, keep=keep)
            return RaggedView(data, dtype, wanted, dim, None, picked)
        rows = np.asarray(chosen, dtype=np.int64)
        ranges = [] if self.payload.in_memory else joined_rows(rows)
        if self.payload.in_memory or outer * len(ranges) > _MOST_RANGES:
            data = self._cell_range(node, 0, outer * extent * inner, keep=False)
            return RaggedView(data, dtype, shape, dim, host[rows], picked)
        runs = [
            ((k + int(host[a])) * inner, (k + int(host[b])) * inner)
            for k in range(0, outer * extent, extent)
            for a, b in ranges
        ]
        return RaggedView(self._joined(node, runs), dtype, wanted, dim, None, picked)

    # Other tensors

    def _tensor_views(self, node: Node) -> list[torch.Tensor]:
        i = node.number
        views = self.numbers[i + 4]
        shape = self.shape(node, 5)
        data = self.payload.read(self.numbers[i + 2], self.numbers[i + 3], 16 * views)
        bounds = np.frombuffer(bytearray(data), dtype=np.int64).reshape(2, views)
        starts, ends = bounds
        if views and not ((starts >= 0) & (starts <= ends) & (ends <= shape[0])).all():
            row = int(np.argmin((starts >= 0) & (starts <= ends) & (ends <= shape[0])))
            raise WireFormatError(
                "out_of_bounds",
                f"$[{row}]",
                f"expected a range within {shape[0]}, found {brief(bounds[:, row].tolist())}",
            )
        base = self._cells(node, shape)
        base = base if self.device is None else base.to(self.device)
        return [base[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def _strided_nested(self, node: Node) -> torch.Tensor:
        i = node.number
        buffer, offset, cells, sizes_buffer, sizes_offset, components = self.numbers[i : i + 6]
        name, rank = node.fields
        dtype = torch_dtype(name)
        data = self.payload.read(sizes_buffer, sizes_offset, 8 * rank * components)
        shapes = np.frombuffer(bytearray(data), dtype=np.int64).reshape(components, rank).tolist()
        # In Python integers, which cannot overflow.
        counts = [math.prod(shape) for shape in shapes]
        if any(dim < 0 for shape in shapes for dim in shape) or sum(counts) != cells:
            raise WireFormatError(
                "bad_offsets",
                "$",
                f"expected component sizes that add up to {cells} cells, found {sum(counts)}",
            )
        values = from_bytes(
            self.payload.bytes_at(buffer, offset, cells * node.itemsize, node.itemsize),
            dtype,
            (cells,),
        )
        values = values if self.device is None else values.to(self.device)
        parts = torch.split(values, counts) if counts else ()
        return torch.nested.as_nested_tensor(
            [part.view(shape) for part, shape in zip(parts, shapes, strict=True)],
            dtype=dtype,
            device=values.device,
            layout=torch.strided,
        )

    def _sparse_coo(self, node: Node) -> torch.Tensor:
        shape = self.shape(node, 1)
        indices, values = self._dense_children(node)
        if indices.dtype != torch.int64:
            raise WireFormatError(
                "bad_sparse", "$", f"expected int64 indices, found {indices.dtype}"
            )
        try:
            # Copied: torch relies on indices, so what was checked must not change with the memory.
            own = indices.clone()
            tensor = torch.sparse_coo_tensor(
                own, values, shape, device=values.device, check_invariants=True
            )
            if not self.numbers[node.number]:
                return tensor
            # torch believes this flag, so see that the indices rise.
            if not _rising(own):
                raise ValueError("coalesced indices that do not rise")
            return tensor._coalesced_(True)
        except (RuntimeError, ValueError) as error:
            raise WireFormatError(
                "bad_sparse", "$", f"expected indices within {shape}, found {error!s:.200}"
            ) from error

    def _sparse_compressed(self, node: Node) -> torch.Tensor:
        compressed, plain, values = self._dense_children(node)
        layout = node.fields[0]
        try:
            return torch.sparse_compressed_tensor(
                compressed.clone(),
                plain.clone(),
                values,
                self.shape(node, 0),
                layout=getattr(torch, layout),
                device=compressed.device,
                check_invariants=True,
            )
        except RuntimeError as error:
            raise WireFormatError(
                "bad_sparse", "$", f"expected a {layout} tensor, found {error!s:.200}"
            ) from error

    def _dense_children(self, node: Node) -> list[torch.Tensor]:
        """The parts of a sparse tensor, the last of which are its values."""
        for child in node.children:
            if child.kind is not Kind.TENSOR:
                raise _bad("a dense tensor", child.kind.name)
        for child in node.children[:-1]:
            if self.numbers[child.number + 2] != PLAIN:
                raise _bad("indices as wide as their dtype", "narrow ones")
        return self._children(node)

    # tensordict

    def _tensordict(self, node: Node) -> TensorDict:
        size = list(self.shape(node, 0))
        _, names, keys = node.fields
        leaves: dict[str, Any] = {}
        fits = len(size) == 1 and names is None and self.device is None
        self._depth += 1
        for key, child in zip(keys, node.children, strict=True):
            try:
                leaf = leaves[key] = self.build(child)
                if child.kind is not Kind.TENSOR and child.kind is not Kind.JAGGED:
                    self._check_leaf(leaf, child, size)
                fits = fits and _rows(leaf) == size[0]
            except WireFormatError as error:
                raise inside(error, key) from error
        self._depth -= 1
        if fits:
            return batch_of(leaves, size[0])
        td = TensorDict(
            leaves,
            batch_size=torch.Size(size),
            names=names,
            device=self.device,
        )
        levels = self._levels(leaves.values())
        if levels:
            self._stacked[id(td)] = (levels, td)
        return td

    def _check_leaf(self, leaf: Any, node: Node, size: list[int]) -> None:
        if not (isinstance(leaf, (torch.Tensor, TensorDictBase)) or is_non_tensor(leaf)):
            raise _bad("a leaf", type(leaf).__name__)
        if node.kind in (Kind.TENSORDICT, Kind.NON_TENSOR_DATA):
            # tensordict would change the batch size of these rather than refuse them.
            found = list(leaf.batch_size)
            if found[: len(size)] != size:
                raise rows_differ(size, found)

    def _levels(self, members: Iterable[Any]) -> int:
        """How many lazy stacks are inside each other in these."""
        known = [self._stacked.get(id(member)) for member in members]
        return max((entry[0] for entry in known if entry is not None), default=0)

    def _stack(self, members: list[Any], make: Callable[[], T]) -> T:
        """A lazy stack, if it is not the one too many."""
        levels = 1 + self._levels(members)
        if levels > MAX_STACKS:
            raise WireFormatError(
                "too_deep", "$", f"expected at most {MAX_STACKS} stacks in each other, found more"
            )
        stack = make()
        self._stacked[id(stack)] = (levels, stack)
        return stack

    def _lazy_stack(self, node: Node) -> LazyStackedTensorDict:
        stack_dim, dim_name = node.fields
        members = self._children(node)
        if not all(isinstance(member, TensorDictBase) for member in members):
            raise _bad("TensorDicts to stack", "something else")
        options: Any = {"stack_dim": stack_dim, "stack_dim_name": dim_name}
        stack: LazyStackedTensorDict = self._stack(
            members, lambda: LazyStackedTensorDict(*members, **options)
        )
        # Members whose dim names differ are found only when one asks.
        if members and len(stack.names) != stack.batch_dims:
            raise _bad(f"{stack.batch_dims} dim names", stack.names)
        return stack

    def _non_tensor_data(self, node: Node) -> NonTensorData:
        (payload,) = self._children(node)
        return NonTensorData(payload, batch_size=torch.Size(self.shape(node, 0)))

    def _non_tensor_stack(self, node: Node) -> NonTensorStack:
        members = self._children(node)
        if not all(is_non_tensor(member) for member in members):
            raise _bad("non-tensor members to stack", "something else")
        return self._stack(members, lambda: NonTensorStack(*members, stack_dim=node.fields[0]))

    # Rows of objects

    def _object_array(self, node: Node) -> AnyArray:
        shape = self.shape(node, 4)
        items = self.objects(node)
        if len(items) != math.prod(shape):
            raise _bad(f"{math.prod(shape)} items", len(items))
        return object_array(items).reshape(shape)

    def objects(self, node: Node, chosen: Chosen | None = None) -> list[Any]:
        """The objects of NON_TENSOR_ROWS or OBJECT_ARRAY, or some of them."""
        buffer, offset, size, group = self.numbers[node.number : node.number + 4]
        row_splits = self.row_splits(group)
        if row_splits.total != size:
            raise WireFormatError(
                "bad_offsets",
                "$",
                f"expected documents that end at {size}, found {row_splits.total}",
            )
        if chosen is not None and not isinstance(chosen, range):
            return [
                item
                for a, b in joined_rows(chosen)
                for item in self._documents(buffer, offset, row_splits.host[a : b + 1])
            ]
        host = row_splits.host
        if chosen is not None:
            host = host[chosen.start : chosen.stop + 1]
        return self._documents(buffer, offset, host)

    def _documents(self, buffer: int, offset: int, bounds: IntArray) -> list[Any]:
        """The objects of rows next to each other, between these bounds."""
        if len(bounds) < 2:
            return []
        first = int(bounds[0])
        data = self.payload.read(buffer, offset + first, int(bounds[-1]) - first)
        bounds = bounds - first
        heads = data[np.minimum(bounds[:-1], len(data) - 1)] if len(data) else data
        # What begins like a message, or with zeros before one, and is too long to be a number.
        messages = ((heads == 0) | (heads == _BLOB_START)) & (bounds[1:] - bounds[:-1] > 1)
        if messages.any():
            place = buffer, offset + first
            pairs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), messages.tolist(), strict=True)
            return [
                self._message_at(*place, a, b, row) if is_message else self._document(data, a, b)
                for row, (a, b, is_message) in enumerate(pairs)
            ]
        # Small, most of them; copied, so that what is checked does not change with the memory.
        raw = data.tobytes()
        items = documents.unpack_rows(raw, bounds[1:].tolist())
        if not documents.may_hold_records(raw):
            return items
        return [self._revived_row(item, row) for row, item in enumerate(items)]

    def _document(self, data: ByteArray, start: int, end: int) -> Any:
        return self.revived(documents.unpack(data[start:end].tobytes()), 1)

    def _revived_row(self, item: Any, row: int) -> Any:
        try:
            return self.revived(item, 1)
        except WireFormatError as error:
            raise inside(error, row) from error

    def _message_at(self, buffer: int, offset: int, start: int, end: int, row: int) -> Any:
        """The value of a row that is a message of its own."""
        try:
            head = self.payload.read(buffer, offset + start, min(end - start, _MOST_ZEROS + 1))
            gap = int(np.argmax(head != 0))
            size = end - start - gap
            if head[gap] == 0 or not is_blob(
                self.payload.read(buffer, offset + start + gap, min(size, 8))
            ):
                raise _bad("a document, or a message behind fewer than 64 zeros", "neither")
            blob = self.payload.bytes_at(buffer, offset + start + gap, size, 1)
            header, frames = open_blob(blob)
            if blob_end(len(frames[0]), header.sizes) != len(blob):
                raise _bad("a message that ends with its row", "bytes behind it")
            if header.checksums is not None:
                check_frames(frames[1:], header.checksums)
            inner = FramePayload(frames[1:], copy=False)
            depth = self._depth + 1
            return Message(header, inner, self.device, self.allow_pickle, depth=depth).value()
        except WireFormatError as error:
            raise inside(error, row) from error


_MOST_RANGES = 4096
"""Ranges of one column that are fetched one by one; of more, the column is read whole."""

_MOST_ZEROS = 63
_BLOB_START = ord("j")

_RANKS = {
    Kind.ARRAY: 1,
    Kind.OBJECT_ARRAY: 0,
    Kind.FIELD_ARRAY: 1,
    Kind.TENSOR: 1,
    Kind.JAGGED: 1,
    Kind.SPARSE_COO: 0,
    Kind.SPARSE_COMPRESSED: 1,
    Kind.TENSOR_VIEWS: 1,
    Kind.TENSORDICT: 0,
    Kind.NON_TENSOR_DATA: 0,
}
"""Which field of a node is its rank."""

_NATIVE = frozenset((str, int, float, bool, bytes, type(None)))


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


def rows_differ(expected: Any, found: Any) -> WireFormatError:
    """The error of a column with other rows than its batch."""
    return WireFormatError("bad_rows", "$", f"expected batch size {expected}, found {brief(found)}")


def dict_of(keys: list[Any], items: Sequence[Any]) -> dict[Any, Any]:
    """A dict of keys that a stranger chose."""
    check_distinct(keys, "dict keys")
    value = dict(zip(keys, items, strict=True))
    if len(value) != len(keys):
        raise _bad("every dict key once", "some twice")
    return value


def _rows(leaf: Any) -> int | None:
    """Rows of a leaf that a TensorDict takes as it is; None of any other."""
    if type(leaf) is NonTensorStack:
        return len(leaf.tensordicts) if leaf.batch_dims == 1 else None
    return row_count(leaf)


def _bad(expected: str, found: Any) -> WireFormatError:
    # Foreign texts can be long: torch's dispatch tables, a stranger's own words.
    return WireFormatError("bad_value", "$", f"expected {expected}, found {found!s:.200}")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a checked name.

    Raises:
        WireFormatError: This torch has no such dtype.
    """
    dtype = _DTYPES[name]
    if dtype is None:
        raise _unknown_dtype(name)
    return dtype


def _unknown_dtype(name: str) -> WireFormatError:
    found = brief(name)
    return WireFormatError(
        "unknown_dtype", "$", f"expected a dtype of torch {torch.__version__}, found {found}"
    )


def _numpy_dtype(description: Any) -> np.dtype[Any]:
    try:
        return numpy_dtypes.restore(description)
    except (TypeError, ValueError) as error:
        raise WireFormatError(
            "unknown_dtype",
            "$",
            f"expected a dtype of numpy {np.__version__}, found {error!s:.200}",
        ) from error


def _rising(indices: torch.Tensor) -> bool:
    """Whether the columns of (dims, nnz) indices rise in lexicographic order, none twice."""
    if indices.shape[0] == 0:
        return indices.shape[1] <= 1
    steps = indices[:, 1:] - indices[:, :-1]
    open_steps = torch.ones(steps.shape[1], dtype=torch.bool, device=steps.device)
    for step in steps:
        if (open_steps & (step < 0)).any():
            return False
        open_steps &= step == 0
    return not open_steps.any()


# --- records -----------------------------------------------------------------------------------


def _big_int(_: Message, data: Any) -> int:
    expect(type(data) is bytes and data != b"", "bad_record", "bytes", data)
    return int.from_bytes(data, "little", signed=True)


def _complex(_: Message, real: Any, imag: Any) -> complex:
    expect(type(real) is type(imag) is float, "bad_record", "floats", [real, imag])
    return complex(real, imag)


def _members(_: Message, *items: Any) -> tuple[Any, ...]:
    check_distinct(items, "set members")
    if len(set(items)) != len(items):
        raise _bad("every set member once", "some twice")
    return items


def _dict_record(_: Message, *items: Any) -> dict[Any, Any]:
    expect(len(items) % 2 == 0, "bad_record", "keys and values in turn", len(items))
    return dict_of(list(items[::2]), items[1::2])


def _range(_: Message, *parts: Any) -> range:
    expect(all(type(part) is int for part in parts), "bad_record", "integers", list(parts))
    expect(parts[2] != 0, "bad_record", "a step other than 0", parts[2])
    return range(*parts)


def _string_array(
    _: Message, shape: Any, items: Any, coerce: Any, has_na: Any, na: Any
) -> AnyArray:
    cells = cells_of(shape)
    strings = type(items) is list and len(items) == cells
    expect(strings, "bad_record", f"{cells} strings", items)
    expect(type(coerce) is bool, "bad_record", "a bool", coerce)
    expect(type(has_na) is bool, "bad_record", "a bool", has_na)
    known = na is None or type(na) in (float, str)
    expect(known, "bad_record", "None, a float or a str for missing", na)
    for item in items:
        fits = type(item) is str or (item is None and has_na)
        expect(fits, "bad_record", "a string", item)
    dtypes: Any = getattr(np, "dtypes", None)
    if not hasattr(dtypes, "StringDType"):
        raise _bad("a numpy with StringDType (2.0 or newer)", np.__version__)
    options = {"na_object": na} if has_na else {}
    array = np.empty(cells, dtype=dtypes.StringDType(coerce=coerce, **options))
    for i, item in enumerate(items):
        array[i] = na if item is None else item
    return array.reshape(shape)


def _scalar_record(_: Message, dtype: Any, data: Any) -> Any:
    itemsize = numpy_itemsize(dtype)
    expect(not has_object(dtype), "unknown_dtype", "a dtype without objects", dtype)
    fits = type(data) is bytes and len(data) == itemsize
    expect(fits, "bad_record", f"{itemsize} bytes", data)
    own = np.frombuffer(bytearray(data), dtype=np.uint8)
    array: AnyArray = np.ndarray((), dtype=_numpy_dtype(dtype), buffer=own)
    numpy_dtypes.check_text(array)
    return array[()]


def _string_scalar(_: Message, value: Any) -> Any:
    expect(type(value) in (str, bytes), "bad_record", "a str or bytes", value)
    return np.str_(value) if isinstance(value, str) else np.bytes_(value)


def _size(_: Message, *dims: Any) -> torch.Size:
    for dim in dims:
        fits = type(dim) is int and -(1 << 63) <= dim < 1 << 63
        expect(fits, "bad_record", "a 64-bit int", dim)
    return torch.Size(dims)


def _dtype(_: Message, name: Any) -> torch.dtype:
    expect(type(name) is str, "unknown_dtype", "a dtype's name", name)
    dtype = _ALL_DTYPES.get(name)
    if dtype is None:
        raise _unknown_dtype(name)
    return dtype


def _device(_: Message, kind: Any, number: Any) -> torch.device:
    expect(type(kind) is str, "bad_record", "a device type", kind)
    fits = number is None or (type(number) is int and 0 <= number < 128)
    expect(fits, "bad_record", "a device number (0 to 127) or None", number)
    return torch.device(kind) if number is None else torch.device(kind, number)


def _user_record(_: Message, name: Any, state: Any) -> Any:
    expect(type(name) is str, "bad_record", "a type's name", name)
    return restore(name, state)


def _pickle(message: Message, data: Any) -> Any:
    expect(type(data) is bytes, "bad_record", "bytes", data)
    if not message.allow_pickle:
        raise WireFormatError(
            "pickle_refused",
            "$",
            "expected a message without pickle, found a pickled object; if you trust the "
            "sender with this process, pass allow_pickle=True on both sides",
        )
    try:
        return pickle.loads(data)  # noqa: S301
    except Exception as error:  # whatever unpickling may raise
        raise _bad("data that unpickles", f"{type(error).__name__}: {error}") from error


_RECORDS: dict[Kind, Callable[..., Any]] = {
    Kind.BIG_INT: _big_int,
    Kind.COMPLEX: _complex,
    Kind.TUPLE: lambda _, *items: items,
    Kind.SET: lambda message, *items: set(_members(message, *items)),
    Kind.FROZENSET: lambda message, *items: frozenset(_members(message, *items)),
    Kind.DICT: _dict_record,
    Kind.RANGE: _range,
    Kind.SLICE: lambda _, *parts: slice(*parts),
    Kind.STRING_ARRAY: _string_array,
    Kind.SCALAR: _scalar_record,
    Kind.STRING_SCALAR: _string_scalar,
    Kind.SIZE: _size,
    Kind.DTYPE: _dtype,
    Kind.DEVICE: _device,
    Kind.USER: _user_record,
    Kind.PICKLE: _pickle,
}

_BUILDERS: dict[Kind, Callable[[Message, Node], Any]] = {
    Kind.VALUE: Message._value,
    Kind.TUPLE: lambda message, node: tuple(message._children(node)),
    Kind.LIST: Message._children,
    Kind.MAP: lambda message, node: dict(zip(node.fields[0], message._children(node), strict=True)),
    Kind.DICT: Message._dict,
    Kind.SLICE: lambda message, node: slice(*message._children(node)),
    Kind.BYTES: lambda message, node: message.payload.read(
        *message.numbers[node.number : node.number + 3]
    ).tobytes(),
    Kind.ARRAY: Message._array,
    Kind.OBJECT_ARRAY: Message._object_array,
    Kind.FIELD_ARRAY: Message._field_array,
    Kind.SCALAR: Message._scalar,
    Kind.TENSOR: Message.tensor,
    Kind.JAGGED: Message.jagged,
    Kind.STRIDED_NESTED: Message._strided_nested,
    Kind.SPARSE_COO: Message._sparse_coo,
    Kind.SPARSE_COMPRESSED: Message._sparse_compressed,
    Kind.TENSOR_VIEWS: Message._tensor_views,
    Kind.TENSORDICT: Message._tensordict,
    Kind.LAZY_STACK: Message._lazy_stack,
    Kind.NON_TENSOR_DATA: Message._non_tensor_data,
    Kind.NON_TENSOR_ROWS: lambda message, node: leaf_of_rows(message.objects(node)),
    Kind.NON_TENSOR_STACK: Message._non_tensor_stack,
    Kind.USER: Message._user,
}
