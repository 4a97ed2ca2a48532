"""Storage of a TransferQueue unit, and the messages between it and its clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase
from transfer_queue.storage.simple_storage import StorageUnitData

from jagcodec import concat_rows
from jagcodec._arguments import check_options
from jagcodec._version import __version__
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    TransportError,
    WireFormatError,
    brief,
)
from jagcodec.pack.tensors import stack_or_nest
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.encoder import Columns, encode
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS, Limits
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

    def open(self, frames: Any, limits: Limits | None = None) -> WireBatch:
        """The batch in a message."""
        return open_wire(frames, allow_pickle=self.allow_pickle, limits=limits or self.limits)


def options_of(config: Mapping[str, Any]) -> StorageOptions:
    """The options in the configuration of the backend."""
    where = f"backend.{NAME}.jagcodec"
    values = _known(config.get("jagcodec"), StorageOptions, where)
    for name in ("allow_pickle", "narrow"):
        if type(values.get(name, False)) is not bool:
            found = f"expected true or false, found {brief(values[name])}"
            raise ArgumentTypeError("bad_type", f"{where}.{name}", found)
    if "limits" in values:
        values["limits"] = Limits(**_known(values["limits"], Limits, f"{where}.limits"))
    return StorageOptions(**values)


def _known(given: Any, fields: Any, where: str) -> dict[str, Any]:
    """A mapping of the fields of a dataclass, as a dict."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        found = f"expected a mapping of options, found {type(given).__name__}"
        raise ArgumentTypeError("bad_type", where, found)
    check_options(given, [field.name for field in dataclasses.fields(fields)], where)
    return dict(given)


# --- messages ----------------------------------------------------------------------------------


def body_of(frames: Sequence[Any]) -> dict[str, Any]:
    """A message as TransferQueue's encoder sends it: each buffer as a frame, without a copy."""
    header, *buffers = frames
    return {MESSAGE: [bytes(header), *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]}


def content_of(body: Any, where: str) -> Any:
    """What a peer sent under `MESSAGE`, if it uses this version of this backend."""
    names = list(body) if isinstance(body, Mapping) else []
    if names == [MESSAGE]:
        return body[MESSAGE]
    ours = [name for name in names if str(name).startswith("jagcodec ")]
    found = ours[0] if ours else "TransferQueue's own format"
    raise TransportError(
        "peer_failed",
        where,
        f"expected a message of {MESSAGE}, found {found}; install jagcodec {__version__} in every "
        "environment of this queue, and import jagcodec.integrations.transfer_queue before "
        "transfer_queue.init",
    )


# --- columns -----------------------------------------------------------------------------------


def sendable(data: Any) -> Columns:
    """The columns of a put: rows of tensors as jagged ones where they are equal in all but length.

    TransferQueue nests rows of tensors, so a rectangle comes back jagged too.
    """
    splits: dict[int, RowSplits] = {}
    rows = len(data)

    def column(leaf: Any) -> Any:
        if isinstance(leaf, NonTensorData):
            return column_of(_dealt(leaf.data, rows))
        if is_non_tensor(leaf):
            return leaf
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            return values_of_leaf(leaf)
        if is_jagged(leaf):
            view = view_of(leaf, "put")
            return view if view.ragged_dim == 1 else values_of_leaf(leaf)
        if leaf.is_nested or leaf.layout is not torch.strided:
            return values_of_leaf(leaf)
        if leaf.dim() == 1:
            return leaf
        length, cells = leaf.shape[1], leaf.detach().cpu().flatten(0, 1).contiguous()
        if length not in splits:
            splits[length] = RowSplits.from_lengths(np.full(rows, length))
        return RaggedView(cells, cells.dtype, cells.shape, 1, None, splits[length])

    return Columns(rows, {name: column(leaf) for name, leaf in data.items()})


def _dealt(payload: Any, rows: int) -> list[Any]:
    """One item per row of a payload of that many items; any other one belongs to every row."""
    items = isinstance(payload, torch.Tensor | np.ndarray) and len(payload.shape) > 0
    deal = (items or type(payload) is list) and len(payload) == rows
    return list(payload) if deal else [payload] * rows


def values_of_leaf(leaf: Any) -> list[Any]:
    """The rows of a column as TransferQueue has them: tensors and objects."""
    if is_non_tensor(leaf):
        return rows_of_leaf(leaf, len(leaf))
    return list(leaf.unbind(0)) if isinstance(leaf, torch.Tensor | TensorDictBase) else list(leaf)


def column_of(values: list[Any]) -> Any:
    """Values as one column, where their dtypes and inner dims allow it."""
    kinds = {
        (row.dtype, row.dim(), row.shape[1:], row.layout) if type(row) is torch.Tensor else None
        for row in values
    }
    return stack_or_nest(values) if len(kinds) == 1 and None not in kinds else values


def rows_of(
    batches: Sequence[WireBatch],
    index: Sequence[int],
    names: Iterable[str],
    read: Callable[[WireBatch], Iterable[tuple[str, Any]]],
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """These rows of several messages: the columns that can be read as one, and values of others.

    Rows of others differ in dtype, rank or inner dims: TransferQueue's own code joins them.
    """
    names = tuple(names)
    parts = [batch if batch.fields == names else batch.select(names) for batch in batches]
    whole = (concat_rows(parts) if len(parts) > 1 else parts[0]).rows(index)
    try:
        return dict(read(whole)), {}
    except (ArgumentError, ArgumentTypeError):
        if len(names) > 1:
            each = [rows_of(batches, index, [name], read) for name in names]
            columns = {name: column for found, _ in each for name, column in found.items()}
            return columns, {name: rows for _, found in each for name, rows in found.items()}
    return {}, {names[0]: values_of_rows(batches, index, names[0])}


def values_of_rows(batches: Sequence[WireBatch], index: Sequence[int], name: str) -> list[Any]:
    """Rows of one column as TransferQueue has them."""
    values = [value for batch in batches for value in values_of_leaf(batch[name])]
    return [values[row] for row in index]


# --- rows in a storage unit --------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of the queue, as a row of a message, which is freed with the last of its rows."""

    batch: WireBatch
    row: int


def _places(rows: Sequence[_Row]) -> tuple[list[WireBatch], list[int]]:
    """The messages of some rows, and the rows of these end to end."""
    firsts: dict[WireBatch, int] = {}
    end = 0
    for batch, _ in rows:
        if batch not in firsts:
            firsts[batch] = end
            end += len(batch)
    return list(firsts), [firsts[batch] + row for batch, row in rows]


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
        rows = [_Row(batch, row) for row in range(len(batch))]
        super().put_data(dict.fromkeys(batch.fields, rows), global_indexes)

    def get_data(self, fields: Any, global_indexes: list[int]) -> dict[str, Any]:
        """A message with these columns of these rows."""
        found = super().get_data(content_of(fields, "get"), global_indexes)
        groups: dict[tuple[int, ...], list[str]] = {}  # of columns in the same messages
        for name, rows in found.items():
            groups.setdefault(tuple(map(id, rows)), []).append(name)
        columns: dict[str, Any] = {}
        scattered: list[str] = []
        for names in groups.values():
            batches, index = _places(found[names[0]])
            one, other = rows_of(batches, index, names, lambda b: b.to_encode().columns.items())
            columns |= one | other
            if len(batches) > max(1, len(index) // 4):
                scattered += list(one)
        apart = [name for name, column in columns.items() if _holds_tensors(column)]
        batch = Columns(len(global_indexes), {name: columns[name] for name in found})
        frames = self.options.encode(batch, {APART: apart} if apart else None)
        if scattered:  # from now on this message holds the rows, so the next get is faster
            kept = self.options.open(frames, NO_LIMITS)
            rows = [_Row(kept, row) for row in range(len(kept))]
            for name in set(scattered).difference(apart):
                self.field_data[name].update(zip(global_indexes, rows, strict=True))
        return body_of(frames)

    # Checkpoints have TransferQueue's format: a queue without jagcodec can load them.

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
            values = values_of_rows(*_places(list(rows.values())), name)
            # Copied: a pickled view brings all of its storage.
            values = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            data.field_data[name] = dict(zip(rows, values, strict=True))
        return data


def _holds_tensors(column: Any) -> bool:
    """Whether a column is a list of values with tensors among them."""
    return type(column) is list and any(
        isinstance(value, torch.Tensor | TensorDictBase) for value in column
    )
