"""Storage of a TransferQueue unit, and the messages between it and its clients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from transfer_queue.storage.simple_storage import StorageUnitData

from jagcodec._arguments import check_options
from jagcodec._version import __version__
from jagcodec.errors import ArgumentTypeError, TransportError, WireFormatError, brief
from jagcodec.memory.tensor_bytes import ByteArray, IntArray, array_bytes, as_bytes
from jagcodec.pack.tensors import stack_or_nest
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import nested_tensor
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.dtypes import DTYPES
from jagcodec.wire.encoder import Columns, encode
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits
from jagcodec.wire.lowered import Documents
from jagcodec.wire.wire_batch import WireBatch, open_wire

NAME = "SimpleStorage"
"""The backend's name: `transfer_queue.close` and the metrics compare with it."""

MESSAGE = f"jagcodec {__version__}"
"""The key of a message in the body of a request. Both sides must have the same version."""

APART = "apart"
"""In `meta` of a reply: names of columns that TransferQueue's own code makes of their values."""


# --- options -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """The configuration under ``backend.SimpleStorage.jagcodec``, as for `encode` and `decode`."""

    allow_pickle: bool = False
    narrow: bool = False
    limits: Limits = DEFAULT_LIMITS

    def encode(self, columns: Columns, meta: Mapping[str, Any] | None = None) -> list[Any]:
        """A message with these columns."""
        return encode(columns, narrow=self.narrow, allow_pickle=self.allow_pickle, meta=meta)

    def open(self, frames: Any) -> WireBatch:
        """The batch in a message."""
        return open_wire(frames, allow_pickle=self.allow_pickle, limits=self.limits)


def options_of(config: Mapping[str, Any]) -> StorageOptions:
    """The options in the configuration of the backend."""
    where = f"backend.{NAME}.jagcodec"
    given = config.get("jagcodec")
    values = _known({} if given is None else given, StorageOptions, where)
    for name in ("allow_pickle", "narrow"):
        if type(values.get(name, False)) is not bool:
            raise ArgumentTypeError(
                "bad_type",
                f"{where}.{name}",
                f"expected true or false, found {brief(values[name])}",
            )
    if "limits" in values:
        values["limits"] = Limits(**_known(values["limits"], Limits, f"{where}.limits"))
    return StorageOptions(**values)


def _known(given: Any, fields: Any, where: str) -> dict[str, Any]:
    """A mapping of the fields of a dataclass, as a dict."""
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            "bad_type", where, f"expected a mapping of options, found {type(given).__name__}"
        )
    check_options(given, [field.name for field in dataclasses.fields(fields)], where)
    return dict(given)


# --- messages ----------------------------------------------------------------------------------


def body_of(frames: Sequence[Any]) -> dict[str, Any]:
    """A message as TransferQueue's encoder sends it: each buffer as a frame, without a copy."""
    header, *buffers = frames
    return {MESSAGE: [bytes(header), *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]}


def content_of(body: Any, where: str) -> Any:
    """What a peer sent under `MESSAGE`, if it uses this version of this backend."""
    if isinstance(body, Mapping) and list(body) == [MESSAGE]:
        return body[MESSAGE]
    names = [name for name in body if isinstance(name, str)] if isinstance(body, Mapping) else []
    found = next(
        (name for name in names if name.startswith("jagcodec ")), "TransferQueue's own format"
    )
    raise TransportError(
        "peer_failed",
        where,
        f"expected a message of {MESSAGE}, found {found}; install jagcodec {__version__} in every "
        "environment of this queue, and import jagcodec.integrations.transfer_queue before "
        "transfer_queue.init",
    )


def values_of_leaf(leaf: Any) -> list[Any]:
    """The rows of a column as TransferQueue has them: tensors and objects."""
    if is_non_tensor(leaf):
        return rows_of_leaf(leaf, len(leaf))
    return list(leaf.unbind(0)) if isinstance(leaf, torch.Tensor | TensorDictBase) else list(leaf)


# --- rows in a storage unit --------------------------------------------------------------------


class _Cells(NamedTuple):
    """A column of tensors: where its rows are in contiguous memory."""

    memory: ByteArray
    kind: tuple[torch.dtype, tuple[int, ...], bool]  # dtype, inner dims, whether rows have no dim
    starts: IntArray  # (N,) in bytes
    lengths: IntArray  # (N,) in cells


class _Put:
    """A message that a storage unit received; freed with the last of its rows."""

    def __init__(self, batch: WireBatch) -> None:
        self.batch = batch

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Name to `_Cells`, to `Documents` that stay packed, or to a list of N values."""
        return {name: _stored(column) for name, column in self.batch.to_encode().columns.items()}


def _stored(column: Any) -> Any:
    """A column of a message in one of the forms of `_Put.columns`."""
    if type(column) is Documents:
        return column
    if type(column) is RaggedView:
        if column.ragged_dim > 1 or not column.cell_bytes:
            return values_of_leaf(
                nested_tensor(values_of(column), column.row_splits, column.ragged_dim)
            )
        memory: Any = column.memory
        data = as_bytes(memory) if isinstance(memory, torch.Tensor) else array_bytes(memory)
        kind = column.dtype, tuple(column.shape[1:]), False
        starts = column.row_starts() * column.cell_bytes
        return _Cells(data, kind, starts, column.row_splits.lengths)
    if type(column) is np.ndarray and column.size:
        return _rectangle(array_bytes(column), DTYPES[column.dtype.name], column.shape)
    if type(column) is torch.Tensor and is_rectangle(column) and column.numel():
        return _rectangle(as_bytes(column), column.dtype, tuple(column.shape))
    return values_of_leaf(column)


def _rectangle(memory: ByteArray, dtype: Any, shape: tuple[int, ...]) -> _Cells:
    rows, length, *inner = *shape, *([1] if len(shape) == 1 else [])
    starts = np.arange(rows) * (len(memory) // rows)
    return _Cells(memory, (dtype, tuple(inner), len(shape) == 1), starts, np.full(rows, length))


def is_rectangle(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


class _Row(NamedTuple):
    """A row of the queue, as a row of a message."""

    put: _Put
    row: int


class _Places(NamedTuple):
    """Where N rows are: row i is row `rows[i]` of ``puts[which[i]]``."""

    puts: list[_Put]
    which: list[int]
    rows: list[int]

    @classmethod
    def of(cls, rows: Sequence[_Row]) -> _Places:
        numbers: dict[int, int] = {}
        which = [numbers.setdefault(id(row.put), len(numbers)) for row in rows]
        puts = list({id(row.put): row.put for row in rows}.values())
        return cls(puts, which, [row.row for row in rows])

    def column(self, name: str) -> Any:
        """One column: a `RaggedView`; of rows without dims a tensor; `Documents`; else values."""
        columns = [put.columns[name] for put in self.puts]
        kinds = {column.kind if type(column) is _Cells else type(column) for column in columns}
        if len(kinds) == 1 and type(columns[0]) is _Cells:
            view = self._view(columns)
            return values_of(view) if columns[0].kind[2] else view
        if kinds == {Documents}:
            pairs = zip(self.which, self.rows, strict=True)
            return Documents([columns[which].rows[row] for which, row in pairs])
        return self.values(name)

    def _view(self, columns: list[_Cells]) -> RaggedView:
        """The rows in place, in several memories: starts count bytes, as if they were one."""
        bases = itertools.accumulate((len(column.memory) for column in columns), initial=0)
        firsts = [0, *itertools.accumulate(len(column.starts) for column in columns)]
        chosen = np.array(firsts)[self.which] + self.rows
        starts = np.concatenate([c.starts + base for c, base in zip(columns, bases, strict=False)])
        lengths = np.concatenate([column.lengths for column in columns])[chosen]
        splits = RowSplits.from_lengths(lengths)
        dtype, inner, _ = columns[0].kind
        memory = tuple(column.memory for column in columns)
        return RaggedView(memory, dtype, (splits.total, *inner), 1, starts[chosen], splits)

    def values(self, name: str) -> list[Any]:
        """One column as TransferQueue has it: a tensor or an object per row."""
        columns = [values_of_leaf(put.batch[name]) for put in self.puts]
        return [columns[which][row] for which, row in zip(self.which, self.rows, strict=True)]


class RowStorage(StorageUnitData):  # type: ignore[misc]
    """What a storage unit holds: `_Row`s where TransferQueue has tensors and objects."""

    def __init__(self, storage_size: int | None, options: StorageOptions) -> None:
        super().__init__(storage_size)
        self.options = options

    def put_data(self, field_data: Any, global_indexes: list[int]) -> None:
        """Keep a message."""
        batch = self.options.open(content_of(field_data, "put"))
        if len(batch) != len(global_indexes):
            raise WireFormatError(
                "bad_rows", "put", f"expected {len(global_indexes)} rows, found {len(batch)}"
            )
        put = _Put(batch)
        rows = [_Row(put, row) for row in range(len(batch))]
        super().put_data(dict.fromkeys(batch.fields, rows), global_indexes)

    def get_data(self, fields: Any, global_indexes: list[int]) -> dict[str, Any]:
        """A message with these columns of these rows."""
        columns: dict[str, Any] = {}
        places, known = None, None
        for name, rows in super().get_data(content_of(fields, "get"), global_indexes).items():
            if places is None or rows != known:  # columns of the same puts have the same places
                places, known = _Places.of(rows), rows
            columns[name] = places.column(name)
        apart = [name for name, column in columns.items() if _holds_tensors(column)]
        message = self.options.encode(
            Columns(len(global_indexes), columns), {APART: apart} if apart else None
        )
        return body_of(message)

    @classmethod
    def of_stock(cls, data: StorageUnitData, options: StorageOptions) -> RowStorage:
        """The rows of one of TransferQueue's own storage units."""
        storage = cls(None, options)
        for name, rows in data.field_data.items():
            columns = Columns(len(rows), {name: column_of(list(rows.values()))})
            storage.put_data(body_of(options.encode(columns)), list(rows))
        storage.storage_size, storage._active_keys = data.storage_size, set(data._active_keys)
        return storage

    def as_stock(self) -> StorageUnitData:
        """The same rows as TransferQueue's own storage units have them."""
        data = StorageUnitData(self.storage_size)
        data._active_keys = set(self._active_keys)
        for name, rows in self.field_data.items():
            values = _Places.of(list(rows.values())).values(name)
            # Copied: a pickled view brings all of its storage.
            values = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            data.field_data[name] = dict(zip(rows, values, strict=True))
        return data


def _holds_tensors(column: Any) -> bool:
    """Whether rows that differ in dtype, rank or inner dims came as a list of values."""
    return type(column) is list and any(
        isinstance(value, torch.Tensor | TensorDictBase) for value in column
    )


def column_of(values: Any) -> Any:
    """Values as one column, where their dtypes and inner dims allow it."""
    if not isinstance(values, list):
        return values
    kinds = {
        (row.dtype, row.dim(), row.shape[1:], row.layout) if type(row) is torch.Tensor else None
        for row in values
    }
    return stack_or_nest(values) if len(kinds) == 1 and None not in kinds else values
