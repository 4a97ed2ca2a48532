"""The rows that a storage unit of TransferQueue keeps, each in the message that it came in.

`RowStorage` replaces TransferQueue's own storage: it keeps the messages of puts, makes those of
gets, and converts its rows to TransferQueue's form and back for checkpoints. `_reply_to`
(`transfer_queue.py`) calls it, and puts its results into replies. The form of values in a
checkpoint is last.

Rows are kept per column: `field_data` maps the name of a column and the global index of a row to a
`_StoredRow`. A put of some columns of a row leaves its other columns in their messages, and a
second put of a column overwrites the row there. TransferQueue's own `put_data` and `get_data`,
which are called through ``super()``, write and read `field_data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from jagcodec.columns.batch import (
    PLAIN_STORAGE,
    Columns,
    Storage,
    combined_storage,
    storage_of_batch,
    to_send,
)
from jagcodec.integrations._transfer_queue_columns import (
    column_of_values,
    columns_of_rows,
    rows_of_messages,
    values_of_rows,
)
from jagcodec.integrations._transfer_queue_messages import (
    WITH_TENSORS,
    StorageOptions,
    body_of,
    content_of,
)
from jagcodec.integrations._transfer_queue_version import StorageUnitData
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, same_width_dtype
from jagcodec.wire.limits import NO_LIMITS
from jagcodec.wire.read.wire_batch import WireBatch

# With fewer rows than this in each message, a get takes longer for the messages than for the rows:
# then the unit keeps the joined rows for the next get.
_FEWEST_ROWS_PER_MESSAGE = 4


class _StoredRow(NamedTuple):
    """One column's row: the message, and the row in it, that it was last written from.

    The message is freed with the last of its rows.
    """

    batch: WireBatch
    row: int


def _messages_and_places(rows: Sequence[_StoredRow]) -> tuple[list[WireBatch], list[int]]:
    """The messages that hold some rows, and the place of each row if these messages are joined."""
    firsts: dict[WireBatch, int] = {}  # the place of the first row of each message
    end = 0
    for batch, _ in rows:
        if batch not in firsts:
            firsts[batch] = end
            end += len(batch)
    return list(firsts), [firsts[batch] + row for batch, row in rows]


class RowStorage(StorageUnitData):  # type: ignore[misc]
    """The rows of a storage unit: `_StoredRow`s where TransferQueue has tensors and objects."""

    def __init__(self, storage_size: int | None, options: StorageOptions) -> None:
        super().__init__(storage_size)
        self.options = options

    def put_data(self, field_data: Any, global_indexes: list[int]) -> None:
        """Keep a message; its rows overwrite earlier ones with their global indexes."""
        self._keep(self.options.open_sent(field_data, len(global_indexes), "put"), global_indexes)

    def store(self, global_indexes: list[int], field_data: Any, data_parser: None) -> None:
        """`put_data`, called as a `PayloadTransfer` calls it."""
        self.put_data(field_data, global_indexes)

    def _keep(self, batch: WireBatch, global_indexes: list[int]) -> None:
        """Keep a row of the message at each global index, in each column of the message.

        The method of TransferQueue overwrites the row that a column had there.
        """
        rows = [_StoredRow(batch, row) for row in range(len(batch))]
        super().put_data(dict.fromkeys(batch.fields, rows), global_indexes)

    def get_data(self, fields: Any, global_indexes: list[int]) -> dict[str, Any]:
        """A message with these columns of these rows, as the body of a reply.

        Raises:
            TransportError: The request came from another version, or from another backend.
            ValueError, KeyError: A column or a row is not here, as TransferQueue's method says.
            UnsupportedTypeError: A row has a pickled object, and `allow_pickle` is false.
        """
        stored = super().get_data(content_of(fields, "get"), global_indexes)
        groups: dict[tuple[int, ...], list[str]] = {}  # columns whose rows are in the same messages
        for name, rows in stored.items():
            groups.setdefault(tuple(map(id, rows)), []).append(name)
        columns: dict[str, Any] = {}
        scattered: list[str] = []
        how = PLAIN_STORAGE
        for names in groups.values():
            batches, index = _messages_and_places(stored[names[0]])
            whole = rows_of_messages(batches, index, names)
            in_one_piece, others = columns_of_rows(
                batches, index, whole, lambda batch: to_send(batch).columns.items()
            )
            columns |= in_one_piece | others
            how = combined_storage([how, self._how_to_send(whole, len(batches))])
            if len(batches) > max(1, len(index) // _FEWEST_ROWS_PER_MESSAGE):
                scattered += list(in_one_piece)
        with_tensors = [name for name, column in columns.items() if _holds_tensors(column)]
        batch = Columns(len(global_indexes), {name: columns[name] for name in stored})
        meta = {WITH_TENSORS: with_tensors} if with_tensors else None
        frames = self.options.encode_again(batch, how, meta)
        joined = {name: columns[name] for name in scattered if name not in with_tensors}
        if joined:
            if len(joined) < len(columns):
                # Do not keep the reply itself: the unit would hold its other columns twice.
                frames_to_keep = self.options.encode_again(batch._replace(columns=joined), how)
            else:
                frames_to_keep = frames
            self._replace_rows(global_indexes, joined, frames_to_keep)
        return body_of(frames)

    def _how_to_send(self, rows: WireBatch, messages: int) -> Storage:
        """How to send rows that came in so many messages.

        `encode` looks for repeats if the columns came elided, or the rows came in several messages.
        In the rows of one message, the client has looked for them already.
        """
        how = storage_of_batch(rows)
        elided = how.elided or (self.options.elide and messages > 1)
        return how if elided == how.elided else how._replace(elided=elided)

    def _replace_rows(
        self, global_indexes: list[int], joined: Iterable[str], frames: list[Any]
    ) -> None:
        """Keep one message in place of the messages that had these rows: the next get is faster."""
        batch = self.options.open(frames, NO_LIMITS)
        rows = [_StoredRow(batch, row) for row in range(len(batch))]
        for name in joined:
            self.field_data[name].update(zip(global_indexes, rows, strict=True))

    # Checkpoints have TransferQueue's format: a queue without jagcodec can load them.

    @classmethod
    def from_stock(cls, data: StorageUnitData, options: StorageOptions) -> RowStorage:
        """The rows of one of TransferQueue's own storage units."""
        storage = cls(None, options)
        for name, rows in data.field_data.items():
            storage.field_data[name] = dict.fromkeys(rows)  # in their order; there may be none
            groups: dict[Any, list[int]] = {}
            for key, row in rows.items():
                groups.setdefault(_column_key(row), []).append(key)
            for keys in groups.values():
                values = [rows[key] for key in keys]
                column = column_of_values(values, map(_ragged_dim_of, values))
                frames = options.encode(Columns(len(keys), {name: column}))
                storage._keep(options.open(frames, NO_LIMITS), keys)
        storage.storage_size, storage._active_keys = data.storage_size, set(data._active_keys)
        return storage

    def without_values(self) -> StorageUnitData:
        """One of TransferQueue's own storage units, with the same row numbers and nothing else."""
        data = StorageUnitData(self.storage_size)
        data._active_keys = set(self._active_keys)
        return data

    def as_stock(self) -> StorageUnitData:
        """One of TransferQueue's own storage units with the same rows, for a checkpoint."""
        data = self.without_values()
        for name, rows in self.field_data.items():
            values = map(
                _checkpoint_value, *values_of_rows(*_messages_and_places(list(rows.values())), name)
            )
            data.field_data[name] = dict(zip(rows, values, strict=True))
        return data


RAGGED_DIM = "jagcodec_ragged_dim"  # an attribute of a saved tensor, which TransferQueue ignores


def _checkpoint_value(value: Any, ragged_dim: int) -> Any:
    """A value in the form that a checkpoint can hold."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is torch.strided and value.dtype not in _DTYPES_THAT_PICKLE:
        return _SavedTensor(value)
    value = value.clone()  # a pickled view brings all of its storage
    if ragged_dim > 1:
        setattr(value, RAGGED_DIM, ragged_dim)
    return value


_DTYPES_THAT_PICKLE = {*NUMPY_DTYPES, torch.bfloat16, torch.complex64, torch.complex128}


class _SavedTensor:
    """Pickles a tensor as integers of its width, because torch cannot read what it writes of it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._words = value.view(same_width_dtype(value.dtype)).clone()
        self._dtype = value.dtype

    def __reduce__(self) -> Any:
        return torch.Tensor.view, (self._words, self._dtype)


def _ragged_dim_of(value: Any) -> int:
    """The ragged dim of the column that a value of a checkpoint was in."""
    return getattr(value, RAGGED_DIM, 1)


def _column_key(value: Any) -> Any:
    """A key of a value in a checkpoint: values with equal keys can be one column of a message."""
    if type(value) is not torch.Tensor:
        return None
    shape, dim = list(value.shape), _ragged_dim_of(value)
    return value.dtype, value.layout, dim, (*shape[: dim - 1], *shape[dim:]), len(shape)


def _holds_tensors(column: Any) -> bool:
    """Whether a column is a list of values with tensors among them."""
    return type(column) is list and any(
        isinstance(value, torch.Tensor | TensorDictBase) for value in column
    )
