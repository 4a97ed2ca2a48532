"""A batch that is still a message: its header is read, its buffers only where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, UnbatchedTensor

from jagcodec._arguments import known_names, unknown_name, usable_device
from jagcodec.errors import JagcodecError, WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.non_tensor import (
    batch_of,
    is_leaf,
    leaf_of_rows,
    object_array,
    stack_of_payloads,
)
from jagcodec.ragged.row_index import Chosen, choose_rows
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.select import select_leaf
from jagcodec.wire.decoder import build, objects, rows_differ
from jagcodec.wire.encoder import encode
from jagcodec.wire.frames import (
    PREAMBLE,
    Fetch,
    Frame,
    FramePayload,
    RangePayload,
    buffer_bytes,
    read_preamble,
    starts_of,
)
from jagcodec.wire.header import Header, read_header
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, exceeded, usable_limits
from jagcodec.wire.message import Message, open_frames, torch_dtype
from jagcodec.wire.records import bad
from jagcodec.wire.schema import Node, inside
from jagcodec.wire.spec import Kind


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
        >>> frames = encode_fields(columns, lengths=torch.tensor([3, 4, 3]))
        >>> batch = open_wire(frames).select(["ids"]).rows(slice(1, 3))
        >>> batch.fields, batch.batch_size
        (('ids',), torch.Size([2]))
        >>> [row.tolist() for row in batch.to_tensordict()["ids"].unbind()]
        [[4, 5, 6, 7], [8, 9, 10]]
    """

    def __init__(
        self,
        message: Any,
        nodes: Any,
        batch_size: list[int],
        names: list[str | None] | None,
        chosen: range | IntArray | None,
        frames: list[ByteArray] | None = None,
    ) -> None:
        """Use `open_wire`."""
        self._message: Message = message
        self._nodes: Mapping[str, Node] = nodes
        self._rows = batch_size
        self._names = names
        self._chosen = chosen
        self._frames = frames

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(self._nodes)

    @property
    def batch_size(self) -> torch.Size:
        """(N, ...): N rows as chosen."""
        rows = self._rows[0] if self._chosen is None else len(self._chosen)
        return torch.Size([rows, *self._rows[1:]])

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """Name to `FieldSchema`, from the header alone, for the rows as chosen."""
        return MappingProxyType({name: self._schema(name) for name in self._nodes})

    def __len__(self) -> int:
        return int(self.batch_size[0])

    def __repr__(self) -> str:
        return f"WireBatch(fields={list(self.fields)}, batch_size={list(self.batch_size)})"

    def select(self, names: Iterable[str]) -> WireBatch:
        """The columns of these names, in this order. Reads nothing.

        Raises:
            ArgumentKeyError: A name is not a column.
        """
        listed = known_names(names, self._nodes, "WireBatch.select")
        nodes = {name: self._nodes[name] for name in listed}
        return WireBatch(self._message, nodes, self._rows, self._names, self._chosen)

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
        return WireBatch(self._message, self._nodes, self._rows, self._names, chosen)

    def to_tensordict(self) -> TensorDict:
        """The chosen columns and rows as a TensorDict, as `decode` would make it.

        Raises:
            WireFormatError: A field is malformed.
            ArgumentError: Rows were chosen of a column that has none to choose, such as CSR.
        """
        leaves = {}
        for name in self._nodes:
            leaf = self.leaf(name)
            leaves[name] = leaf.to_tensordict() if isinstance(leaf, WireBatch) else leaf
        names: Any = self._names
        try:
            # A batch without dim names takes those of the batches in it, which `batch_of` does not.
            kinds = {node.kind for node in self._nodes.values()}
            flat = kinds.isdisjoint((Kind.TENSORDICT, Kind.LAZY_STACK, Kind.USER))
            if flat and names is None and self._message.device is None and len(self._rows) == 1:
                return batch_of(leaves, len(self))
            device = self._message.device
            return TensorDict(leaves, batch_size=self.batch_size, names=names, device=device)
        except Exception as error:  # tensordict raises all kinds
            raise WireFormatError(
                "bad_value", "$", f"expected columns of one batch, found {error!s:.200}"
            ) from error

    def to_frames(self) -> list[Frame]:
        """The chosen columns and rows as a message, to send on.

        Example:
            >>> import torch
            >>> from jagcodec import decode, encode_fields, open_wire
            >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
            >>> batch = open_wire(encode_fields(columns, lengths=torch.tensor([3, 4, 3])))
            >>> decode(batch.rows([2]).select(["ids"]).to_frames())["ids"].values()
            tensor([ 8,  9, 10])

        Returns:
            All columns and rows of a batch opened from frames or a blob: the frames of that
            message. Any choice of them, or a batch over a callable: new frames, as `encode` makes
            them. Both are only to be read: they alias the message wherever that needs no copy.

        Raises:
            WireFormatError: A field is malformed.
            UnsupportedTypeError: As `encode`.
        """
        if self._frames is not None:
            return [array.data.toreadonly() for array in self._frames]
        message = self._message
        readable = Message(message.header, message.payload.to_read(), None, message.allow_pickle)
        batch = WireBatch(readable, self._nodes, self._rows, self._names, self._chosen)
        return encode(batch.to_tensordict(), allow_pickle=message.allow_pickle)

    def leaf(self, name: str) -> Any:
        """One column as a tensor, a non-tensor leaf, or for a nested batch a `WireBatch`.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
        """
        return self._read(name, self._leaf)

    def row_lengths(self, name: str) -> IntArray | None:
        """(N,) lengths of the chosen rows of a jagged column; None for any other column.

        Reads the offsets of its ragged group and nothing else.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
        """
        node = self._node(name, "row_lengths")
        if node.kind is not Kind.JAGGED:
            return None
        row_splits: RowSplits = self._read(name, self._row_splits)
        return row_splits.lengths

    # Reading

    def _node(self, name: str, where: str) -> Node:
        node = self._nodes.get(name)
        if node is None:
            raise unknown_name(name, self._nodes, f"WireBatch.{where}")
        return node

    def _read(self, name: str, read: Callable[[Node], Any]) -> Any:
        node = self._node(name, "leaf")
        try:
            return read(node)
        except WireFormatError as error:
            raise _of_column(name, node, error) from error
        except _NOT_THE_MESSAGES:
            raise
        except Exception as error:  # torch, numpy and tensordict raise all kinds
            raise _of_column(name, node, error) from error

    def _leaf(self, node: Node) -> Any:
        kind, message, chosen = node.kind, self._message, self._chosen
        if kind is Kind.TENSOR:
            dims = message.numbers[node.dims : node.end][: len(self._rows)]
            if dims != self._rows:
                raise rows_differ(self._rows, dims)
            return message.tensor(node, chosen)
        if kind is Kind.JAGGED:
            self._row_splits(node)
            return message.jagged(node, chosen)
        if kind is Kind.TENSORDICT:
            return _view(message, node, self._rows, chosen)
        if kind is Kind.NON_TENSOR_ROWS:
            make = stack_of_payloads if chosen is None else leaf_of_rows
            return make(self._objects(node))
        leaf = build(message, node)
        if isinstance(leaf, UnbatchedTensor):
            return leaf
        if not is_leaf(leaf):
            raise WireFormatError("bad_value", "$", f"expected a leaf, found {type(leaf).__name__}")
        # A strided nested tensor has no shape to ask for.
        nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
        shape = [leaf.size(0)] if nested else list(leaf.shape[: len(self._rows)])
        if shape != self._rows:
            raise rows_differ(self._rows, shape)
        if chosen is None:
            return leaf
        return select_leaf(leaf, chosen, RowSplitsPool(), "WireBatch.rows(index)")

    def _row_splits(self, node: Node) -> RowSplits:
        message = self._message
        group = message.numbers[node.number + 3]
        whole = message.row_splits(group)
        if whole.rows != self._rows[0] or len(self._rows) != 1:
            raise rows_differ(self._rows, [whole.rows])
        return whole if self._chosen is None else message.row_splits(group, self._chosen)

    def _objects(self, node: Node) -> list[Any]:
        message = self._message
        rows = message.row_splits(message.numbers[node.number + 3]).rows
        if [rows] != self._rows:
            raise rows_differ(self._rows, [rows])
        return objects(message, node, self._chosen)

    def _schema(self, name: str) -> FieldSchema:
        node = self._node(name, "schema")
        message = self._message
        if node.kind is Kind.JAGGED:
            dims: list[int | None] = [len(self), *message.shape(node)]
            dims[node.fields[2]] = None
            return FieldSchema("jagged", torch_dtype(node.fields[0]), tuple(dims))
        if node.kind is Kind.TENSOR:
            shape = (len(self), *message.shape(node)[1:])
            return FieldSchema("tensor", torch_dtype(node.fields[0]), shape)
        if node.kind in (Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_ROWS, Kind.NON_TENSOR_STACK):
            return FieldSchema("object", None, None)
        return FieldSchema(node.kind.name.lower(), None, None)


_JAGGED = Kind.JAGGED

# Errors of the caller, of the source of the bytes, and of the machine.
_NOT_THE_MESSAGES = (JagcodecError, OSError, MemoryError)


def _of_column(name: str, node: Node, error: Exception) -> WireFormatError:
    """The error of a column that could not be read."""
    if not isinstance(error, WireFormatError):
        error = bad(f"rows of {node.kind.name}", error)
    return inside(error, name)


def columns_of(batch: WireBatch) -> list[tuple[str, Any]]:
    """Each column of a batch in the form from which it takes least to make a rectangle.

    A jagged one is a `RaggedView` over the message, objects are an object array, and any other is
    what `WireBatch.leaf` gives. Views are only to be read.
    """
    message, chosen = batch._message, batch._chosen
    rows = batch._rows[0] if chosen is None else len(chosen)
    flat = len(batch._rows) == 1
    columns: list[tuple[str, Any]] = []
    for name, node in batch._nodes.items():
        try:
            if node.kind is _JAGGED:
                if chosen is not None or not flat:
                    batch._row_splits(node)
                column: Any = message.view(node, chosen)
                if column.row_splits.rows != rows:
                    raise rows_differ(batch._rows, [column.row_splits.rows])
            elif node.kind is Kind.NON_TENSOR_ROWS:
                column = object_array(batch._objects(node))
            else:
                column = batch._leaf(node)
        except WireFormatError as error:
            raise _of_column(name, node, error) from error
        except _NOT_THE_MESSAGES:
            raise
        except Exception as error:
            raise _of_column(name, node, error) from error
        columns.append((name, column))
    return columns


def open_wire(
    source: Any,
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> WireBatch:
    """Open the message of a batch without reading its payload.

    Args:
        source: Frames or a blob, as `decode` takes them (a mapped file among them); or a callable
            ``(offset, size) -> buffer`` over a blob, as RDMA and object stores give: it is asked
            for the preamble, for the header, and then for just the ranges that are wanted.
        copy: As for `decode`, but of each range that is read.
        device: As for `decode`.
        allow_pickle: As for `decode`.
        limits: As for `decode`; a callable is asked for no more than they allow.

    Returns:
        A `WireBatch` over the message, whose value must be a TensorDict of at least one batch
        dim. Checksums of buffers are not verified: that would read them all.

    Raises:
        WireFormatError: The source is no such message, or a callable returned too few bytes.
        ArgumentTypeError: `source` is none of these; for a path, map the file or `load` it.
        ArgumentError: There is no such device.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire, to_blob
        >>> columns = {"ids": torch.arange(12).view(3, 4)}
        >>> store = to_blob(encode_fields(columns, lengths=torch.tensor([3, 4, 3])))
        >>> batch = open_wire(lambda offset, size: store[offset : offset + size])
        >>> batch.schema["ids"]
        FieldSchema(kind='jagged', dtype=torch.int64, shape=(3, None))
    """
    target = None if device is None else usable_device(device, "open_wire(device)")
    taken = DEFAULT_LIMITS if limits is None else usable_limits(limits, "open_wire(limits)")
    frames: list[ByteArray] | None = None
    if callable(source):
        header, fetch = _fetched(source, taken)
        payload: Any = RangePayload(fetch, copy)
    else:
        header, frames = open_frames(source, "open_wire(source)", taken)
        payload = FramePayload(frames[1:], copy, by_range=True)
    message = Message(header, payload, target, allow_pickle)
    root = header.schema.root
    if root.kind is not Kind.TENSORDICT:
        raise WireFormatError(
            "bad_value", "$", "expected the message of a TensorDict, found another; use decode"
        )
    return _view(message, root, [], None, frames)


def _fetched(source: Callable[[int, int], Any], limits: Limits) -> tuple[Header, Fetch]:
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
    starts = starts_of(size, header.sizes)
    return header, lambda buffer, offset, size: get(starts[buffer] + offset, size)


def _view(
    message: Message,
    node: Node,
    around: list[int],
    chosen: Chosen | None,
    frames: list[ByteArray] | None = None,
) -> WireBatch:
    """A TENSORDICT as a batch; `around` is the batch size of the one that it lies in."""
    batch_size = list(message.shape(node))
    if not batch_size or batch_size[: len(around)] != around:
        raise rows_differ(around or ["N"], batch_size)
    _, names, keys = node.fields
    nodes = dict(zip(keys, node.children, strict=True))
    return WireBatch(message, nodes, batch_size, names, chosen, frames)
