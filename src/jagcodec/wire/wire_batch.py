"""A batch that is still in messages: headers are read, buffers only where they are wanted."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, UnbatchedTensor

from jagcodec._arguments import known_names, unknown_name, usable_device
from jagcodec.errors import ArgumentTypeError, JagcodecError, WireFormatError, describe
from jagcodec.memory.buffers import WireSource
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, ByteArray, IntArray
from jagcodec.ragged.non_tensor import (
    batch_of,
    is_leaf,
    leaf_of_rows,
    object_array,
    stack_of_payloads,
)
from jagcodec.ragged.row_index import choose_rows
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.select import select_leaf
from jagcodec.wire.checks import bad, fail, inside
from jagcodec.wire.compress import prepare
from jagcodec.wire.decoder import build, objects, raw_documents, rows_differ
from jagcodec.wire.encoder import encode
from jagcodec.wire.field_schema import FieldSchema, field_of, rows_of_node, sizes_of
from jagcodec.wire.files import file_path, noted_file, read_file
from jagcodec.wire.frames import Frame
from jagcodec.wire.indirect import runs_at
from jagcodec.wire.leaf import cell_range
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, usable_limits
from jagcodec.wire.lowered import Columns, OpenBatch
from jagcodec.wire.message import Budget, ChosenRows, Message, open_message, open_store
from jagcodec.wire.registry import BATCHED_DATA_DICT
from jagcodec.wire.schema import LEAVES, Node
from jagcodec.wire.slicing import slicer_of
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind

_JAGGED, _TENSOR = Kind.JAGGED, Kind.TENSOR

Keys = Mapping[str, Any]
"""Names of columns, and by what their `ColumnSource` knows them."""


@dataclass(slots=True, eq=False)
class ColumnSource:
    """What reads the columns of a batch: from one message, or from several (`batch/join.py`).

    Of the arguments, `keys` are the columns that are wanted, and `chosen` the rows of them; None
    for all.

    Attributes:
        names: Of all columns.
        sizes: (N, ...): the batch size, of all rows.
        device: Where tensors go; None leaves them where their cells are.
        allow_pickle: Whether pickled objects are unpickled, and pickled again to be sent on.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    device: torch.device | None
    allow_pickle: bool

    @property
    def columns(self) -> Keys:
        """All columns."""
        raise NotImplementedError

    def meta(self) -> dict[str, Any]:
        """See `WireBatch.meta`."""
        raise NotImplementedError

    def metas(self) -> list[dict[str, Any]]:
        """See `WireBatch.metas`."""
        return [self.meta()]

    def schema(self, name: str, key: Any, rows: int) -> FieldSchema:
        """What headers say of a column, for `rows` chosen rows."""
        raise NotImplementedError

    def row_lengths(self, name: str, key: Any, chosen: ChosenRows | None) -> IntArray | None:
        """See `WireBatch.row_lengths`."""
        raise NotImplementedError

    def leaf(self, name: str, key: Any, chosen: ChosenRows | None) -> Any:
        """See `WireBatch.leaf`."""
        return self.leaves({name: key}, chosen)[name]

    def leaves(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """Columns as leaves of one TensorDict."""
        raise NotImplementedError

    def views(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `WireBatch.columns`."""
        raise NotImplementedError

    def to_encode(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """Columns as `Columns` has them; rows of documents are not read if that is possible."""
        raise NotImplementedError

    def narrow_names(self, keys: Keys) -> list[tuple[str, ...]]:
        """The columns that are stored in fewer bytes than their dtypes have, also in batches."""
        raise NotImplementedError


class WireBatch(OpenBatch):
    """A batch of columns over one message or several; made by `open_wire`.

    It is a view: `select` and `rows` choose without reading, and what is chosen is read, column by
    column, when a tensor is asked for: ``batch["ids"]`` reads one, as `leaf` does, and names are
    asked for as of a dict (``"ids" in batch``, `keys`, iteration), while ``len(batch)`` is N. It
    keeps its messages alive. A contiguous range of rows of one writable message aliases it;
    anything else is copied. `encode` accepts it, with all of its options.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, open_wire
        >>> columns = {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}
        >>> frames = encode_fields(columns, lengths=torch.tensor([3, 4, 3]))
        >>> batch = open_wire(frames).select(["ids"]).rows(slice(1, 3))
        >>> batch.fields, batch.batch_size
        (('ids',), torch.Size([2]))
        >>> [row.tolist() for row in batch["ids"].unbind()]
        [[4, 5, 6, 7], [8, 9, 10]]
    """

    __slots__ = ("__weakref__", "_keys", "chosen", "source")

    def __init__(
        self, source: ColumnSource, keys: Keys | None = None, chosen: ChosenRows | None = None
    ) -> None:
        """Use `open_wire`. No `keys`: all columns of the source."""
        self.source: ColumnSource = source
        self.chosen: ChosenRows | None = chosen
        self._keys = keys

    @property
    def column_keys(self) -> Keys:
        """The columns, and by what their source knows them."""
        return self.source.columns if self._keys is None else self._keys

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(self.source.names if self._keys is None else self._keys)

    @property
    def batch_size(self) -> torch.Size:
        """(N, ...): N rows as chosen."""
        return torch.Size([len(self), *self.source.sizes[1:]])

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """Name to `FieldSchema`, from the headers alone, for the rows as chosen."""
        rows, schema = len(self), self.source.schema
        return MappingProxyType(
            {name: schema(name, k, rows) for name, k in self.column_keys.items()}
        )

    @property
    def meta(self) -> dict[str, Any]:
        """What belongs to the whole batch: `meta` of `encode`, or what stands beside the batch in
        a dict or a `BatchedDataDict`. Of several messages what all of them agree on. A new dict
        each time; no column is read.

        Raises:
            WireFormatError: It is malformed.
        """
        return self.source.meta()

    @property
    def metas(self) -> list[dict[str, Any]]:
        """`meta` of each message, or of each batch that was joined, in their order."""
        return self.source.metas()

    def __len__(self) -> int:
        return self.source.sizes[0] if self.chosen is None else len(self.chosen)

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __getitem__(self, name: str) -> Any:
        if not isinstance(name, str):
            raise ArgumentTypeError(
                "bad_type",
                "WireBatch[name]",
                f"expected the name of a column, found {describe(name)}; rows(index) chooses rows",
            )
        return self.leaf(name)

    def keys(self) -> tuple[str, ...]:
        """`fields`, under the name that dicts have for it."""
        return self.fields

    def __repr__(self) -> str:
        return f"WireBatch(fields={list(self.fields)}, batch_size={list(self.batch_size)})"

    def select(self, names: Iterable[str]) -> WireBatch:
        """The columns of these names, in this order. Reads nothing.

        Raises:
            ArgumentKeyError: A name is not a column.
        """
        columns = self.column_keys
        listed = known_names(names, columns, "WireBatch.select")
        return WireBatch(self.source, {name: columns[name] for name in listed}, self.chosen)

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
        if self.chosen is not None:
            known = self.chosen.index
            chosen = (
                known[chosen.start : chosen.stop]
                if isinstance(chosen, range)
                else np.asarray(known, dtype=np.int64)[chosen]
            )
        return WireBatch(self.source, self._keys, ChosenRows(chosen))

    def to_tensordict(self) -> TensorDict:
        """The chosen columns and rows as a TensorDict, as `decode` would make it.

        Raises:
            WireFormatError: A field is malformed.
            ArgumentError: Rows were chosen of a column whose rows torch cannot choose; or
                columns of several messages differ.
        """
        leaves = self.source.leaves(self.column_keys, self.chosen)
        return _tensordict(self, leaves)

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
            message. Any choice of them, several messages, or a batch over a callable: new frames,
            as `encode` makes them of this batch, which accepts options. Columns that are stored
            narrow stay narrow. Both are only to be read: they alias the messages wherever that
            needs no copy.

        Raises:
            WireFormatError: A field is malformed.
            UnsupportedTypeError: As `encode`.
        """
        source, frames = self.source, None
        if isinstance(source, MessageColumns):
            frames = source.cut(self.column_keys, self.chosen)
        return encode(self, allow_pickle=source.allow_pickle) if frames is None else frames

    def to_encode(self) -> Any:
        """The chosen columns and rows as `encode` takes them: rows of documents are not read."""
        if len(self.source.sizes) > 1:
            return self.to_tensordict()
        return Columns(len(self), self.source.to_encode(self.column_keys, self.chosen))

    def narrow_names(self) -> list[tuple[str, ...]]:
        """The columns that are stored in fewer bytes than their dtypes have, and so sent on.

        Those of a nested batch by all names on the way.
        """
        return self.source.narrow_names(self.column_keys)

    def leaf(self, name: str) -> Any:
        """One column as a tensor, a non-tensor leaf, or for a nested batch a `WireBatch`.

        Of several messages, a nested batch is a TensorDict.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
            ArgumentError: Columns of several messages differ.
        """
        return self.source.leaf(name, self._key(name, "leaf"), self.chosen)

    def row_lengths(self, name: str) -> IntArray | None:
        """(N,) lengths of the chosen rows of a jagged column; None for any other column.

        Reads the offsets of its ragged group and nothing else.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
        """
        return self.source.row_lengths(name, self._key(name, "row_lengths"), self.chosen)

    def columns(self) -> list[tuple[str, Any]]:
        """Each column with its name, in the form from which it takes least to make a rectangle.

        A jagged one is a `RaggedView` over the messages, objects are an object array, and any
        other is what `leaf` gives. Views are only to be read.
        """
        return list(self.source.views(self.column_keys, self.chosen).items())

    def _key(self, name: str, where: str) -> Any:
        columns = self.column_keys
        if name not in columns:
            raise unknown_name(name, columns, f"WireBatch.{where}")
        return columns[name]

    # Pickled, as by a queue of multiprocessing: what was chosen, as a message

    def __reduce_ex__(self, protocol: Any) -> Any:
        frames = self.to_frames()
        if protocol >= 5:
            return open_wire, ([pickle.PickleBuffer(frame) for frame in frames],)
        return open_wire, ([bytes(frame) for frame in frames],)


def _tensordict(batch: WireBatch, leaves: dict[str, Any]) -> TensorDict:
    device = batch.source.device
    # What the constructor of a TensorDict makes of values of other types is up to these.
    plain = all(getattr(key, "kind", None) is not Kind.USER for key in batch.column_keys.values())
    try:
        if plain and device is None and len(batch.source.sizes) == 1:
            return batch_of(leaves, len(batch))
        return TensorDict(leaves, batch_size=batch.batch_size, device=device)
    except Exception as error:  # tensordict raises all kinds
        raise fail("bad_value", f"expected columns of one batch, found {error!s:.200}") from error


# --- the columns of one message ----------------------------------------------------------------


class MessageColumns(ColumnSource):
    """The columns of a batch in one message: see `ColumnSource`.

    Attributes:
        message: The open message.
        node: The one whose children are the columns.
        beside: What is in the message next to the batch: by name, or a mapping without one.
        whole: Whether the batch is all of the message.
    """

    __slots__ = ("_columns", "beside", "message", "node", "whole")

    def __init__(
        self,
        message: Message,
        node: Node,
        sizes: list[int],
        beside: Sequence[tuple[str | None, Node]] = (),
        *,
        whole: bool = False,
    ) -> None:
        super().__init__(node.fields[-1], sizes, message.device, message.allow_pickle)
        self.message: Message = message
        self.node: Node = node
        self.beside: Sequence[tuple[str | None, Node]] = beside
        self.whole: bool = whole
        self._columns: Mapping[str, Node] | None = None

    @property
    def columns(self) -> Mapping[str, Node]:
        """Names and nodes."""
        if self._columns is None:
            self._columns = dict(zip(self.names, self.node.children, strict=True))
        return self._columns

    def meta(self) -> dict[str, Any]:
        """See `ColumnSource`."""
        message = self.message
        if not self.beside:
            return message.meta()
        budget = Budget(message)
        meta: dict[str, Any] = {}
        for name, node in self.beside:
            value = build(message, node, budget)
            if name is None and type(value) is not dict:
                raise bad("a mapping beside the columns", type(value).__name__)
            meta.update(value if name is None else {name: value})
        meta.update(message.meta())
        return meta

    def schema(self, name: str, key: Node, rows: int) -> FieldSchema:
        """See `ColumnSource`."""
        return field_of(self.message, key, rows)

    def row_lengths(self, name: str, key: Node, chosen: ChosenRows | None) -> IntArray | None:
        """See `ColumnSource`."""
        if key.kind is not _JAGGED:
            return None
        lengths: IntArray = self._each({name: key}, self._lengths, chosen)[name]
        return lengths

    def leaf(self, name: str, key: Node, chosen: ChosenRows | None) -> Any:
        """See `ColumnSource`."""
        return self._each({name: key}, self._leaf, chosen)[name]

    def leaves(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        return self._each(keys, self._whole_leaf, chosen)

    def views(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        message = self.message
        if message.header.compressed:
            stored = [node for node in keys.values() if node.kind in LEAVES]
            prepare(message.payload, {message.numbers[node.number] for node in stored})
        return self._each(keys, self._view, chosen)

    def to_encode(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        return self._each(keys, self._to_encode, chosen)

    def _each(
        self,
        keys: Mapping[str, Node],
        read: Callable[..., Any],
        chosen: ChosenRows | None,
        budget: Budget | None = None,
    ) -> dict[str, Any]:
        """What is read of each column; errors name it."""
        budget = budget or Budget(self.message)
        found: dict[str, Any] = {}
        for name, node in keys.items():
            try:
                found[name] = read(node, chosen, budget)
            except WireFormatError as error:
                raise inside(error, name) from error
            except (JagcodecError, OSError, MemoryError):  # of the caller, the source, the machine
                raise
            except Exception as error:  # torch, numpy and tensordict raise all kinds
                raise inside(bad(f"rows of {node.kind.name}", error), name) from error
        return found

    def narrow_names(self, keys: Keys) -> list[tuple[str, ...]]:
        """See `ColumnSource`."""
        names: list[tuple[str, ...]] = []
        for name, node in keys.items():
            if node.kind is Kind.TENSORDICT:
                inner = dict(zip(node.fields[-1], node.children, strict=True))
                names += [(name, *rest) for rest in self.narrow_names(inner)]
            elif node.kind in (_TENSOR, _JAGGED) and self._is_narrow(node):
                names.append((name,))
        return names

    def cut(self, keys: Keys, chosen: ChosenRows | None) -> list[Frame] | None:
        """See `ColumnSource`."""
        message = self.message
        if chosen is None and self.whole and keys is self._columns and message.frames is not None:
            return [array.data.toreadonly() for array in message.frames]
        index = range(self.sizes[0]) if chosen is None else chosen.index
        if not isinstance(index, range) or not index:
            return None
        # Kept for the other parts of the message, of which there are often many.
        known = message.slicer
        if known is None or known[0] is not keys:
            known = message.slicer = keys, None
            if not self.beside and self.frames is not None:
                with suppress(WireFormatError):  # which the reader of the column raises
                    known = message.slicer = keys, slicer_of(message, keys, self.sizes[0])
        return None if known[1] is None else known[1].cut(index.start, index.stop)

    @property
    def frames(self) -> Sequence[ByteArray] | None:
        """The buffers in which rows of columns lie; None unless for tensors on the host."""
        flat = len(self.sizes) == 1 and self.device is None
        return self.message.payload.frames if flat else None

    # Of a node

    def _lengths(self, node: Node, chosen: ChosenRows | None, budget: Budget) -> IntArray:
        self._check_rows(node)
        return self.message.row_splits(self.message.numbers[node.number + 3], chosen).lengths

    def _leaf(self, node: Node, chosen: ChosenRows | None, budget: Budget) -> Any:
        kind, message = node.kind, self.message
        if kind is _TENSOR or kind is _JAGGED:
            self._check_rows(node)
            return (message.tensor if kind is _TENSOR else message.jagged)(node, chosen)
        if kind is Kind.TENSORDICT:
            return WireBatch(_batch_in(message, node, self.sizes), None, chosen)
        if kind is Kind.NON_TENSOR_ROWS:
            make = stack_of_payloads if chosen is None else leaf_of_rows
            return make(self._objects(node, chosen, budget))
        leaf = build(message, node, budget)
        if isinstance(leaf, UnbatchedTensor):
            return leaf
        if isinstance(leaf, list) or (isinstance(leaf, np.ndarray) and leaf.dtype == object):
            leaf = leaf_of_rows(list(leaf))  # a column of a dict
        if not is_leaf(leaf):
            raise fail("bad_value", f"expected a leaf, found {type(leaf).__name__}")
        shape = sizes_of(leaf, len(self.sizes))
        if shape != self.sizes:
            raise rows_differ(self.sizes, shape)
        if chosen is None:
            return leaf
        return select_leaf(leaf, chosen.index, RowSplitsPool(), "WireBatch.rows(index)")

    def _is_narrow(self, node: Node) -> bool:
        leaf = self.message.leaf(node)
        places = runs_at(self.message, leaf) if leaf.runs else [leaf.place]
        return leaf.place.cells > 0 and any(place.stored != PLAIN for place in places)

    def _check_rows(self, node: Node) -> None:
        """See that a TENSOR, a JAGGED or rows of documents have the rows of the batch."""
        numbers, groups = self.message.numbers, self.message.header.groups
        if node.kind is _TENSOR:
            sizes = numbers[node.dims : node.end][: len(self.sizes)]
        else:
            sizes = [groups[numbers[node.number + 3]].rows]
            if node.kind is _JAGGED and len(self.sizes) > 1:
                # Batches of several dims have columns that are ragged in a later one.
                outer = numbers[node.dims : node.dims + node.fields[2] - 1]
                sizes = [*sizes, *outer][: len(self.sizes)]
        if sizes != self.sizes:
            raise rows_differ(self.sizes, sizes)

    def _whole_leaf(self, node: Node, chosen: ChosenRows | None, budget: Budget) -> Any:
        """A leaf of a TensorDict, which a nested batch is, too."""
        leaf = self._leaf(node, chosen, budget)
        if isinstance(leaf, WireBatch):
            inner: Any = leaf.source
            return _tensordict(leaf, inner._each(inner.columns, inner._whole_leaf, chosen, budget))
        return leaf

    def _view(self, node: Node, chosen: ChosenRows | None, budget: Budget) -> Any:
        """A column as `WireBatch.columns` has it."""
        kind = node.kind
        if kind is _JAGGED:
            self._check_rows(node)
            return self.message.rows(node, chosen)
        if kind is Kind.NON_TENSOR_ROWS:
            return object_array(self._objects(node, chosen, budget))
        return self._leaf(node, chosen, budget)

    def _to_encode(self, node: Node, chosen: ChosenRows | None, budget: Budget) -> Any:
        """A column as `encode` takes it."""
        kind = node.kind
        if kind is _JAGGED:
            return self._view(node, chosen, budget)
        if kind is _TENSOR:
            return self._rectangle(node, chosen, budget)
        if kind is Kind.NON_TENSOR_ROWS:
            self._check_rows(node)
            return raw_documents(self.message, node, budget, chosen)
        return self._whole_leaf(node, chosen, budget)

    def _objects(self, node: Node, chosen: ChosenRows | None, budget: Budget) -> list[Any]:
        self._check_rows(node)
        return objects(self.message, node, budget, chosen)

    def _rectangle(self, node: Node, chosen: ChosenRows | None, budget: Budget) -> Any:
        """A TENSOR as an array where it lies, only to be read; as its leaf, if that is not one."""
        leaf, payload = self.message.leaf(node), self.message.payload
        index = range(self.sizes[0]) if chosen is None else chosen.index
        dtype = NUMPY_DTYPES.get(leaf.dtype)
        known = [*leaf.shape[:1]] == self.sizes and not leaf.runs
        if known and dtype is not None and isinstance(index, range):
            bounds = index.start * leaf.inner, index.stop * leaf.inner
            data: Any = cell_range(payload, leaf.place, *bounds, keep=False)
            return np.ndarray((len(index), *leaf.shape[1:]), dtype, data)
        return self._leaf(node, chosen, budget)


# --- opening -----------------------------------------------------------------------------------


def open_wire(
    source: WireSource,
    *,
    copy: bool | None = None,
    device: torch.device | str | None = None,
    allow_pickle: bool = False,
    limits: Limits | None = None,
) -> WireBatch:
    """Open the message of a batch without reading its payload.

    Args:
        source: Frames or a blob, as `decode` takes them; the path of a file, which is mapped as
            by `load`; or a callable ``(offset, size) -> buffer`` over a blob, as RDMA and object
            stores give: it is asked for the preamble, for the header, and then for just the
            ranges that are wanted.
        copy: As for `decode`, but of each range that is read.
        device: As for `decode`.
        allow_pickle: As for `decode`.
        limits: As for `decode`; a callable is asked for no more than they allow.

    Returns:
        A `WireBatch` over the message, whose value must be a TensorDict of at least one batch
        dim, a `BatchedDataDict`, or a dict with one such TensorDict in it, the rest of which is
        `meta`. Checksums of buffers are not verified: that would read them all. A compressed frame
        is decompressed whole when something in it is first asked for, and kept while the batch is
        open; a callable is asked for all of such a frame.

    Raises:
        WireFormatError: The source is no such message, or a callable returned too few bytes.
        ArgumentTypeError: `source` is none of these.
        ArgumentError: There is no such device; the path is that of a directory, a pipe, a socket
            or a device; or frames are compressed, and the library for that is not installed.
        OSError: The file cannot be read.

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
    how: Any = {"copy": copy, "device": target, "allow_pickle": allow_pickle}
    if type(source) is not list and isinstance(source, (str, os.PathLike)):
        name = file_path(source, "open_wire(source)", "decode takes a message in memory")
        with noted_file(name):
            mapped = read_file(name, "open_wire(source)", taken, mmap=True)
            return open_wire(mapped, limits=taken, **how)
    if callable(source):
        return batch_of_message(open_store(source, taken, **how))
    message = open_message(source, "open_wire(source)", taken, by_range=True, verify=False, **how)
    return batch_of_message(message)


def open_whole(source: Any, path: str) -> WireBatch:
    """`open_wire` of frames or a blob that is read whole, and so with its checksums verified."""
    return batch_of_message(open_message(source, path, by_range=True))


def batch_of_message(message: Message) -> WireBatch:
    """The batch of an open message: its value, or the one batch in a dict; and what is beside it.

    Raises:
        WireFormatError: There is none, or there are several.
    """
    root = message.header.schema.root
    if root.kind is Kind.TENSORDICT:
        return WireBatch(_batch_in(message, root, [], whole=True))
    if root.kind is Kind.MAP:
        pairs = list(zip(root.fields[0], root.children, strict=True))
        found = [pair for pair in pairs if pair[1].kind is Kind.TENSORDICT]
        if len(found) == 1:
            beside = [pair for pair in pairs if pair is not found[0]]
            return WireBatch(_batch_in(message, found[0][1], [], beside, whole=True))
    if root.kind is Kind.USER and root.fields[0] == BATCHED_DATA_DICT:
        state = root.children[0]
        if len(state.children) == 2 and state.children[0].kind is Kind.MAP:
            columns, meta = state.children
            rows = _rows_of(message, columns.children)
            return WireBatch(MessageColumns(message, columns, [rows], [(None, meta)], whole=True))
    expected = "the message of a TensorDict, of a BatchedDataDict, or of a dict with one TensorDict"
    raise fail("bad_value", f"expected {expected}, found another; use decode")


def _rows_of(message: Message, columns: Sequence[Node]) -> int:
    """The rows that columns of a dict say they have; each is looked at again when it is read."""
    for node in columns:
        rows = rows_of_node(message, node)
        if rows is not None:
            # As for a TensorDict, which says how many rows it has.
            if rows > max(MAX_UNBACKED_ROWS, sum(message.header.sizes)):
                raise bad(f"{MAX_UNBACKED_ROWS} rows at most, or a payload of as many bytes", rows)
            return rows
    raise bad("a column that has rows", f"{len(columns)} without")


def _batch_in(
    message: Message,
    node: Node,
    around: Sequence[int],
    beside: Sequence[tuple[str | None, Node]] = (),
    *,
    whole: bool = False,
) -> MessageColumns:
    """A TENSORDICT as a batch; `around` is the batch size of the one that it lies in."""
    sizes = message.numbers[node.dims : node.end]
    if not sizes or sizes[: len(around)] != around:
        raise rows_differ(around or ["N"], sizes)
    return MessageColumns(message, node, sizes, beside, whole=whole)
