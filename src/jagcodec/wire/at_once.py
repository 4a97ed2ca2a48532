"""Writes the message of a batch in one pass. Most batches need no `Lowering`.

A column needs no walk if its cells are contiguous host memory, if its rows are scattered in such
memory (in the buffers of messages, too), or if msgpack alone can write its objects.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from jagcodec.errors import JagcodecError, UnsupportedTypeError
from jagcodec.memory.tensor_bytes import plain_array
from jagcodec.ragged import non_tensor
from jagcodec.ragged.nested import NESTED_TENSOR, parts_of, view_over_array
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import documents, spec
from jagcodec.wire.checks import is_oversized_empty
from jagcodec.wire.dtypes import TORCH_NAME_OF_NUMPY, TORCH_NAMES
from jagcodec.wire.frames import Frame, PendingMessage, frames_of
from jagcodec.wire.header import NO_VALUES, start_of
from jagcodec.wire.lowered import Columns, Documents, Item, Lowered, Rows
from jagcodec.wire.native import packed_at_once
from jagcodec.wire.place import MessageWriter
from jagcodec.wire.spec import PLAIN, Code


def frames_of_items(start: bytes, items: Iterable[int | Item], packed_values: bytes) -> list[Frame]:
    """The message of the start of its header, its plain items, and the packed documents."""
    return frames_of(_message_of_items(start, items, packed_values))


def _message_of_items(
    start: bytes, items: Iterable[int | Item], packed_values: bytes
) -> PendingMessage:
    writer = MessageWriter()
    return writer.finish(start, writer.place(items), packed_values)


def message_at_once(batch: Any, values: list[Any]) -> PendingMessage | None:
    """The message of `Columns` or a TensorDict of N rows; None if a walk must make it.

    `values` are the documents after its own, such as its `meta`.
    """
    columns = _columns_of(batch)
    if columns is None or columns.rows > spec.MAX_UNBACKED_ROWS:
        return None
    if not set(map(type, columns.columns.values())) <= _MAKERS.keys():
        return None
    pool = RowSplitsPool()
    items: list[Any] = [columns.rows]
    nodes: list[Any] = []
    for column in columns.columns.values():
        made = _MAKERS[type(column)](column, columns.rows, pool)
        if made is None:
            return None
        items.append(made[0])
        nodes.append(made[1])
    start = start_of((Code.TENSORDICT, 1, tuple(columns.columns), *nodes))
    return _message_of_items(start, items, packed_values(values))


def _columns_of(batch: Any) -> Columns | None:
    """The columns of `Columns`, or of a TensorDict with one dim without a name; else None."""
    if type(batch) is TensorDict and batch.batch_dims == 1 and batch.names == [None]:
        return Columns(batch.batch_size[0], dict(batch.items()))
    return batch if type(batch) is Columns else None


def packed_values(values: list[Any]) -> bytes:
    """The documents of a message, as its header has them."""
    try:
        return documents.packer().pack(values) if values else NO_VALUES
    except ValueError as error:
        raise UnsupportedTypeError("too_large", "meta", f"msgpack: {error}") from error


# --- objects -----------------------------------------------------------------------------------


def _of_objects(objects: list[Any], rows: int, pool: RowSplitsPool) -> _Made:
    fits = objects and len(objects) == rows
    packed = packed_at_once(objects, spec.MAX_DEPTH - 1) if fits else None
    return None if packed is None else (item_of_documents(packed), (Code.NON_TENSOR_ROWS,))


def _of_documents(column: Documents, rows: int, pool: RowSplitsPool) -> _Made:
    packed: Any = column.rows
    if not packed or len(packed) != rows or type(packed[0]) is Lowered:
        return None
    return item_of_documents(packed), (Code.NON_TENSOR_ROWS,)


def _of_stack(stack: NonTensorStack, rows: int, pool: RowSplitsPool) -> _Made:
    if stack.batch_size != (rows,) or non_tensor.stack_dim_name(stack) is not None:
        return None  # a stack can be longer than its batch: `append` does not ask
    payloads = non_tensor.payloads_of_stack(stack)
    return None if payloads is None else _of_objects(payloads, rows, pool)


def item_of_documents(rows: Sequence[bytes]) -> Item:
    """The item of a column of objects, one document in each row."""
    if len(rows) == 1:  # most messages
        data: Any = rows[0]
        size = len(data)
        return memoryview(data), PLAIN, (1, size, size, b""), (size,)
    data = bytearray().join(rows)
    return memoryview(data), PLAIN, rows_of_lengths(tuple(map(len, rows))), (len(data),)


def rows_of_lengths(lengths: tuple[int, ...]) -> Rows:
    """Rows of these lengths, one or more, which are end to end."""
    if len(lengths) == 1:
        return 1, *lengths, *lengths, b""
    offsets = array("q", itertools.accumulate(lengths, initial=0))
    return len(lengths), min(lengths), max(lengths), offsets.tobytes()


# --- cells -------------------------------------------------------------------------------------

_Made: TypeAlias = tuple[Item, tuple[Any, ...]] | None
"""The item and the node of a column; None if it needs a walk, which also refuses other rows."""


def _of_view(view: RaggedView, rows: int, pool: RowSplitsPool) -> _Made:
    splits, starts = view.row_splits, view.starts
    memory: Any = view.memory
    dtype = TORCH_NAMES.get(view.dtype)
    if starts is None and isinstance(memory, torch.Tensor):
        memory = plain_array(memory)
    in_order = memory.flags.c_contiguous if type(memory) is np.ndarray else type(memory) is tuple
    if dtype is None or not in_order or view.ragged_dim > 1 or splits.rows != rows:
        return None
    shape = (splits.total, *view.shape[1:])
    size = math.prod(shape)
    if not size and is_oversized_empty(shape, view.dtype.itemsize):
        return None
    data: Any = view
    if starts is None:
        data = memory
    elif splits.rows == 1 and type(starts) is int:
        data = memory if memory.size == size else memory.reshape(-1)[:size]
    return (data, PLAIN, splits, shape), (Code.JAGGED, dtype, len(shape), 1)


def _of_jagged(jagged: torch.Tensor, rows: int, pool: RowSplitsPool) -> _Made:
    if not parts_of(jagged).offsets.is_cpu:  # to read them would wait for the device
        return None
    try:
        return _of_view(view_over_array(jagged, "jagged tensor", pool), rows, pool)
    except JagcodecError:  # the walk explains it
        return None


def _of_tensor(tensor: torch.Tensor, rows: int, pool: RowSplitsPool) -> _Made:
    array = plain_array(tensor)
    return None if array is None or array.ndim > spec.MAX_NDIM else _of_array(array, rows, pool)


def _of_array(data: np.ndarray[Any, Any], rows: int, pool: RowSplitsPool) -> _Made:
    dtype = TORCH_NAME_OF_NUMPY.get(data.dtype)
    if dtype is None or not data.flags.c_contiguous or data.shape[:1] != (rows,):
        return None
    if not data.size and is_oversized_empty(data.shape, data.itemsize):
        return None
    return (data, PLAIN, None, data.shape), (Code.TENSOR, dtype, data.ndim)


_MAKERS: dict[type, Callable[[Any, int, RowSplitsPool], _Made]] = {
    RaggedView: _of_view,
    np.ndarray: _of_array,
    torch.Tensor: _of_tensor,
    NESTED_TENSOR: _of_jagged,
    list: _of_objects,
    NonTensorStack: _of_stack,
    Documents: _of_documents,
}
