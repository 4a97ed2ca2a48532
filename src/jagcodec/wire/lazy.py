"""A batch that is still a message: its header is read, its buffers only where they are wanted."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from jagcodec.ragged.row_index import Chosen, choose_rows
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.select import select_leaf
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.checks import bad, inside
from jagcodec.wire.compress import prepare
from jagcodec.wire.decoder import build, objects, raw_documents, rows_differ
from jagcodec.wire.encoder import Columns, encode
from jagcodec.wire.field_schema import FieldSchema, field_of, rows_of_node, sizes_of
from jagcodec.wire.files import file_path, noted_file, read_file
from jagcodec.wire.frames import Frame
from jagcodec.wire.header import Header
from jagcodec.wire.leaf import cell_range
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits, usable_limits
from jagcodec.wire.message import Budget, ChosenRows, Message, open_message, open_store
from jagcodec.wire.registry import BATCHED_DATA_DICT
from jagcodec.wire.schema import Node
from jagcodec.wire.slicing import Slicer, slicer_of
from jagcodec.wire.spec import Kind


class WireBatch:
    """A batch of columns over a message; made by `open_wire`.

    It is a view: `select` and `rows` choose without reading, and what is chosen is read, column by
    column, when a tensor is asked for: ``batch["ids"]`` reads one, as `leaf` does, and names are
    asked for as of a dict (``"ids" in batch``, `keys`, iteration), while ``len(batch)`` is N. It
    keeps its message alive. A contiguous range of rows aliases a writable message; anything else
    is copied out of it.

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

    def __init__(
        self,
        message: Any,
        nodes: Any,
        batch_size: list[int],
        chosen: Any,
        frames: Sequence[ByteArray] | None = None,
        beside: Sequence[tuple[str | None, Node]] = (),
    ) -> None:
        """Use `open_wire`."""
        self._message: Message = message
        self._nodes: Mapping[str, Node] = nodes
        self._rows = batch_size
        self._chosen: Any = chosen
        self._frames = frames
        # What stands in the message beside the batch: by name, or a mapping without one.
        self._beside = beside

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(self._nodes)

    @property
    def batch_size(self) -> torch.Size:
        """(N, ...): N rows as chosen."""
        return torch.Size([len(self), *self._rows[1:]])

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        """Name to `FieldSchema`, from the header alone, for the rows as chosen."""
        return MappingProxyType({name: self._schema(name) for name in self._nodes})

    @property
    def meta(self) -> dict[str, Any]:
        """What belongs to the whole batch: `meta` of `encode`, or what stands beside the batch in
        a dict or a `BatchedDataDict`. A new dict each time; no column is read.

        Raises:
            WireFormatError: It is malformed.
        """
        message = self._message
        budget = Budget(message)
        meta: dict[str, Any] = {}
        for name, node in self._beside:
            value = build(message, node, budget)
            if name is None and type(value) is not dict:
                raise bad("a mapping beside the columns", type(value).__name__)
            meta.update(value if name is None else {name: value})
        meta.update(message.meta())
        return meta

    @property
    def metas(self) -> list[dict[str, Any]]:
        """`meta` of each message that the batch was put together from; here of one."""
        return [self.meta]

    def __len__(self) -> int:
        return self._rows[0] if self._chosen is None else len(self._chosen.index)

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
        """Names of the columns, in their order; `fields` under the name that dicts have for it."""
        return self.fields

    def __repr__(self) -> str:
        return f"WireBatch(fields={list(self.fields)}, batch_size={list(self.batch_size)})"

    def select(self, names: Iterable[str]) -> WireBatch:
        """The columns of these names, in this order. Reads nothing.

        Raises:
            ArgumentKeyError: A name is not a column.
        """
        listed = known_names(names, self._nodes, "WireBatch.select")
        nodes = {name: self._nodes[name] for name in listed}
        return self._chosen_of(nodes, self._chosen)

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
            known = self._chosen.index
            chosen = (
                known[chosen.start : chosen.stop]
                if isinstance(chosen, range)
                else np.asarray(known, dtype=np.int64)[chosen]
            )
        return self._chosen_of(self._nodes, ChosenRows(chosen))

    def _chosen_of(self, nodes: Mapping[str, Node], chosen: ChosenRows | None) -> WireBatch:
        batch = self._message, nodes, self._rows, chosen, None
        return WireBatch(*batch, self._beside)

    def to_tensordict(self) -> TensorDict:
        """The chosen columns and rows as a TensorDict, as `decode` would make it.

        Raises:
            WireFormatError: A field is malformed.
            ArgumentError: Rows were chosen of a column that has none to choose, such as CSR.
        """
        return self._tensordict(Budget(self._message))

    def _tensordict(self, budget: Budget) -> TensorDict:
        leaves = {name: self._value(name, node, budget) for name, node in self._nodes.items()}
        device = self._message.device
        # What the constructor of a TensorDict makes of values of other types is up to these.
        plain = all(node.kind is not Kind.USER for node in self._nodes.values())
        try:
            if plain and device is None and len(self._rows) == 1:
                return batch_of(leaves, len(self))
            return TensorDict(leaves, batch_size=self.batch_size, device=device)
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
        index = None if self._chosen is None else self._chosen.index
        if isinstance(index, range) and index:
            slicer = self._slicer()
            if slicer is not None:
                return slicer.cut(index.start, index.stop)
        value = self.to_encode()
        shared = any(message.is_indirect(node) for node in self._nodes.values())
        options: Any = {"allow_pickle": message.allow_pickle, "meta": self.meta or None}
        elide = isinstance(value, Columns) and (shared or value.repeats())
        return encode(value, elide=elide, **options)

    def to_encode(self) -> Any:
        """The chosen columns and rows as `encode` takes them: rows of documents are not read."""
        return self._raw_columns() if len(self._rows) == 1 else self.to_tensordict()

    def _slicer(self) -> Slicer | None:
        # Kept for the other parts of the message, of which there are often many.
        message = self._message
        known = message.slicer
        if known is None or known[0] is not self._nodes:
            slicer = None
            if self.in_place() is not None and not self._beside:
                with suppress(WireFormatError):  # which the reader of the column raises
                    slicer = slicer_of(message, self._nodes, self._rows[0])
            known = message.slicer = self._nodes, slicer
        found: Slicer | None = known[1]
        return found

    def _raw_columns(self) -> Columns:
        """The columns as `encode` takes them, rows of documents unread."""
        budget = Budget(self._message)
        columns: dict[str, Any] = {}
        for name, node in self._nodes.items():
            if node.kind is Kind.NON_TENSOR_ROWS:
                columns[name] = self._named(name, node, self._raw_documents, budget)
            elif node.kind is _JAGGED:
                columns[name] = self._named(name, node, self._rows_in_place, budget)
            elif node.kind is Kind.TENSOR:
                columns[name] = self._named(name, node, self._rectangle, budget)
            else:
                columns[name] = self._value(name, node, budget)
        return Columns(len(self), columns)

    def _rows_in_place(self, node: Node, budget: Budget | None = None) -> RaggedView:
        self._row_splits(node)
        return self._message.rows(node, self._chosen)

    def _rectangle(self, node: Node, budget: Budget) -> Any:
        """A TENSOR as an array where it lies, only to be read; as its leaf, if that is not one."""
        leaf, payload = self._message.leaf(node), self._message.payload
        index = range(len(self)) if self._chosen is None else self._chosen.index
        dtype = NUMPY_DTYPES.get(leaf.dtype)
        known = [*leaf.shape[:1]] == self._rows and not leaf.runs
        if known and dtype is not None and isinstance(index, range):
            bounds = index.start * leaf.inner, index.stop * leaf.inner
            data: Any = cell_range(payload, leaf.place, *bounds, keep=False)
            return np.ndarray((len(index), *leaf.shape[1:]), dtype, data)
        return self._leaf(node, budget)

    def _raw_documents(self, node: Node, budget: Budget) -> Any:
        self._check_documents(node)
        return raw_documents(self._message, node, budget, self._chosen)

    def leaf(self, name: str) -> Any:
        """One column as a tensor, a non-tensor leaf, or for a nested batch a `WireBatch`.

        Raises:
            ArgumentKeyError: There is no such column.
            WireFormatError: It is malformed.
        """
        return self._named(name, self._node(name, "leaf"), self._leaf, Budget(self._message))

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
        row_splits: RowSplits = self._named(name, node, self._row_splits)
        return row_splits.lengths

    # Reading

    def _node(self, name: str, where: str) -> Node:
        node = self._nodes.get(name)
        if node is None:
            raise unknown_name(name, self._nodes, f"WireBatch.{where}")
        return node

    def _named(self, name: str, node: Node, make: Callable[..., Any], *more: Any) -> Any:
        """What is made of a column; errors name it."""
        try:
            return make(node, *more)
        except WireFormatError as error:
            raise inside(error, name) from error
        except (JagcodecError, OSError, MemoryError):  # of the caller, the source, the machine
            raise
        except Exception as error:  # torch, numpy and tensordict raise all kinds
            raise inside(bad(f"rows of {node.kind.name}", error), name) from error

    def _value(self, name: str, node: Node, budget: Budget) -> Any:
        """A column as `leaf` makes it, but a nested batch as a TensorDict."""
        leaf = self._named(name, node, self._leaf, budget)
        return leaf._tensordict(budget) if isinstance(leaf, WireBatch) else leaf

    def _leaf(self, node: Node, budget: Budget) -> Any:
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
            return make(self._objects(node, budget))
        leaf = build(message, node, budget)
        if isinstance(leaf, UnbatchedTensor):
            return leaf
        if isinstance(leaf, list) or (isinstance(leaf, np.ndarray) and leaf.dtype == object):
            leaf = leaf_of_rows(list(leaf))  # a column of a dict
        if not is_leaf(leaf):
            raise WireFormatError("bad_value", "$", f"expected a leaf, found {type(leaf).__name__}")
        shape = sizes_of(leaf, len(self._rows))
        if shape != self._rows:
            raise rows_differ(self._rows, shape)
        if chosen is None:
            return leaf
        return select_leaf(leaf, chosen.index, RowSplitsPool(), "WireBatch.rows(index)")

    def _row_splits(self, node: Node) -> RowSplits:
        message, dims_before = self._message, node.fields[2] - 1
        group = message.numbers[node.number + 3]
        whole = message.row_splits(group)
        # Batches of several dims have columns that are ragged in a later one.
        outer = message.numbers[node.dims : node.dims + dims_before]
        sizes = [whole.rows, *outer][: len(self._rows)]
        if sizes != self._rows:
            raise rows_differ(self._rows, sizes)
        return whole if self._chosen is None else message.row_splits(group, self._chosen)

    def _objects(self, node: Node, budget: Budget) -> list[Any]:
        self._check_documents(node)
        return objects(self._message, node, budget, self._chosen)

    def _check_documents(self, node: Node) -> None:
        rows = self._message.row_splits(self._message.numbers[node.number + 3]).rows
        if [rows] != self._rows:
            raise rows_differ(self._rows, [rows])

    def _schema(self, name: str) -> FieldSchema:
        node = self._node(name, "schema")
        return field_of(self._message, node, len(self))

    # Pickled, as by a queue of multiprocessing: what was chosen, as a message

    def __reduce_ex__(self, protocol: Any) -> Any:
        frames = self.to_frames()
        if protocol >= 5:
            return _reopened, ([pickle.PickleBuffer(frame) for frame in frames],)
        return _reopened, ([bytes(frame) for frame in frames],)

    # For joins

    @property
    def device(self) -> torch.device | None:
        """Where tensors go; None leaves them where their cells are."""
        return self._message.device

    @property
    def allow_pickle(self) -> bool:
        """Whether pickled objects are unpickled, and pickled again where they are sent on."""
        return self._message.allow_pickle

    @property
    def has_more(self) -> bool:
        """Whether anything stands beside the batch in its message."""
        return bool(self._beside)

    def whole(self) -> WireBatch:
        """The same columns with all the rows of the message."""
        return self if self._chosen is None else self._chosen_of(self._nodes, None)

    def chosen_rows(self) -> Chosen | None:
        """Which rows of the message were chosen; None for all of them."""
        return None if self._chosen is None else self._chosen.index

    def in_place(self) -> tuple[Header, Mapping[str, Node], Sequence[ByteArray]] | None:
        """The header, the nodes of the columns and the frames, where columns may be read from them.

        None of a message that is not in memory, whose tensors go elsewhere, or whose batch has
        more dims than one.
        """
        message = self._message
        frames = message.payload.frames
        if frames is None or message.device or len(self._rows) != 1:
            return None
        return message.header, self._nodes, frames

    def columns(self) -> list[tuple[str, Any]]:
        """Each column with its name, in the form from which it takes least to make a rectangle.

        A jagged one is a `RaggedView` over the message, objects are an object array, and any
        other is what `leaf` gives. Views are only to be read.
        """
        message, budget = self._message, Budget(self._message)
        checked: set[int] = set()  # ragged groups that have as many rows as the batch
        if message.header.compressed:
            cells = [node for node in self._nodes.values() if node.kind in _WITH_CELLS]
            prepare(message.payload, {message.numbers[node.number] for node in cells})
        return [
            (name, self._named(name, node, self._column, budget, checked))
            for name, node in self._nodes.items()
        ]

    def _column(self, node: Node, budget: Budget, checked: set[int]) -> Any:
        if node.kind is _JAGGED:
            group = self._message.numbers[node.number + 3]
            if group not in checked or len(self._rows) > 1:
                self._row_splits(node)
                checked.add(group)
            return self._message.rows(node, self._chosen)
        if node.kind is Kind.NON_TENSOR_ROWS:
            return object_array(self._objects(node, budget))
        return self._leaf(node, budget)


def _reopened(frames: list[Any]) -> WireBatch:
    return open_wire(frames)


_JAGGED = Kind.JAGGED
_WITH_CELLS = (Kind.TENSOR, Kind.JAGGED, Kind.NON_TENSOR_ROWS)


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
    if isinstance(source, (str, os.PathLike)):
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
    root, frames = message.header.schema.root, message.frames
    if root.kind is Kind.TENSORDICT:
        return _view(message, root, [], None, frames)
    if root.kind is Kind.MAP:
        pairs = list(zip(root.fields[0], root.children, strict=True))
        found = [pair for pair in pairs if pair[1].kind is Kind.TENSORDICT]
        if len(found) == 1:
            batch = _view(message, found[0][1], [], None, frames)
            batch._beside = [pair for pair in pairs if pair is not found[0]]
            return batch
    if root.kind is Kind.USER and root.fields[0] == BATCHED_DATA_DICT:
        state = root.children[0]
        if len(state.children) == 2 and state.children[0].kind is Kind.MAP:
            columns, meta = state.children
            nodes = dict(zip(columns.fields[0], columns.children, strict=True))
            rows = _rows_of(message, columns.children)
            return WireBatch(message, nodes, [rows], None, frames, [(None, meta)])
    raise WireFormatError(
        "bad_value",
        "$",
        "expected the message of a TensorDict, of a BatchedDataDict, or of a dict that holds one "
        "TensorDict, found another; use decode",
    )


def _rows_of(message: Message, columns: Sequence[Node]) -> int:
    """The rows that columns of a dict say they have; each is looked at again when it is read."""
    for node in columns:
        rows = rows_of_node(message, node)
        if rows is not None:
            return rows
    raise bad("a column that has rows", f"{len(columns)} without")


def _view(
    message: Message,
    node: Node,
    around: list[int],
    chosen: ChosenRows | None,
    frames: Sequence[ByteArray] | None = None,
) -> WireBatch:
    """A TENSORDICT as a batch; `around` is the batch size of the one that it lies in."""
    batch_size = list(message.shape(node))
    if not batch_size or batch_size[: len(around)] != around:
        raise rows_differ(around or ["N"], batch_size)
    nodes = dict(zip(node.fields[1], node.children, strict=True))
    return WireBatch(message, nodes, batch_size, chosen, frames)
