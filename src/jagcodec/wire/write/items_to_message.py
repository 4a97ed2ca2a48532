"""Items to a message, in which some are stored narrow or elided."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jagcodec import kernels
from jagcodec.memory import ALIGNMENT
from jagcodec.memory.arrays import array_bytes
from jagcodec.memory.blocks import allocate_together
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, in_buffers
from jagcodec.wire.dtypes import DtypeName
from jagcodec.wire.frames import NO_BYTES, PendingMessage, blob_pieces, frames_of
from jagcodec.wire.header import header_start, is_accepted
from jagcodec.wire.items import Lowered, RowMessages, item_of_documents, item_of_view
from jagcodec.wire.spec import SMALL_BUFFER
from jagcodec.wire.stored.elide_cells import elide_cells
from jagcodec.wire.stored.elide_documents import elide_documents
from jagcodec.wire.stored.narrow import narrowed
from jagcodec.wire.write.place import MessageWriter


def message_of(lowered: Lowered, *, narrows: bool = False, elides: bool = False) -> PendingMessage:
    """The message of a lowered value, with columns stored narrow or elided if asked for.

    The message is written with all columns as they are if a smaller one would have too few bytes
    for its rows (`MAX_UNBACKED_ROWS`). It is written without `elides` if readers would reject it:
    repeats, and rows that are arrays, ask a reader for more memory than their bytes.
    """
    tree, items, values, unbacked, messages, needs_more_memory_to_read = lowered
    for rows in messages:
        write_rows(rows, narrows=narrows)
    if narrows or elides:
        small = _smaller(items, elides=elides)
        writer = MessageWriter()
        numbers = writer.place(small.items)
        if not writer.first_unbacked(unbacked):
            writer.read_from, writer.repeated_bytes = small.sources, small.repeated_bytes
            message = writer.finish(header_start(tree), numbers, values)
            needs_more = small.elided or needs_more_memory_to_read
            if not needs_more or is_accepted(message.header, message.repeated_bytes):
                return message
            if elides:
                return message_of(lowered._replace(messages=()), narrows=narrows)
    writer = MessageWriter()
    return writer.finish(header_start(tree), writer.place(items), values, unbacked)


def write_rows(messages: RowMessages, *, narrows: bool) -> None:
    """Write a message for each row, and make these the data of the rows' item."""
    pieces_of_row = {}
    for i, row in messages.rows.items():
        lowered = Lowered(None, [], _LIST_OF_ONE + row) if isinstance(row, bytes) else row
        pieces = blob_pieces(frames_of(message_of(lowered, narrows=narrows)))
        pieces_of_row[i] = _joined([*pieces, bytes(-sum(map(len, pieces)) % ALIGNMENT)])
    if all(len(pieces) == 1 for pieces in pieces_of_row.values()):
        joined = item_of_documents([pieces_of_row[i][0] for i in messages.places])
    else:
        joined = item_of_view(_rows_in_pieces(pieces_of_row, messages.places), None)
    item = messages.item
    item.data, item.dims, item.splits = joined.data, joined.dims, joined.splits


def _joined(pieces: Sequence[Any]) -> list[Any]:
    """The same bytes in fewer pieces: neighbouring small ones are joined, large ones are not."""
    fewer: list[Any] = []
    small: list[Any] = []
    for piece in pieces:
        if len(piece) < SMALL_BUFFER:
            small.append(piece)
            continue
        fewer += [b"".join(small), piece] if small else [piece]
        small = []
    return [*fewer, b"".join(small)] if small else fewer


def _rows_in_pieces(
    pieces_of_row: Mapping[int, Sequence[Any]], places: Sequence[int]
) -> RaggedView:
    """A view of rows that are each in several pieces; `places` has the key of each row."""
    most, end = max(map(len, pieces_of_row.values())), 0
    starts: dict[int, list[int]] = {}
    lengths: dict[int, list[int]] = {}
    for i, pieces in pieces_of_row.items():
        sizes = [*map(len, pieces)] + [0] * (most - len(pieces))
        starts[i] = [end + before for before in itertools.accumulate(sizes, initial=0)][:-1]
        lengths[i], end = sizes, end + sum(sizes)
    all_pieces = itertools.chain.from_iterable(pieces_of_row.values())
    buffers = [np.frombuffer(piece, np.uint8) for piece in all_pieces]
    runs = np.array([lengths[i] for i in places], dtype=np.int64)
    begins = np.array([starts[i] for i in places], dtype=np.int64)
    splits = RowSplits.from_lengths(runs.sum(axis=1))
    return in_buffers(buffers, DtypeName("uint8"), (), begins, splits, runs)


_LIST_OF_ONE = b"\x91"  # msgpack writes it before the only item


class _Smaller(NamedTuple):
    """The items of a message, stored in fewer bytes."""

    items: Sequence[Any]
    sources: Sequence[Any]  # the caller's memory that cells were copied from
    elided: bool  # whether a column has runs
    repeated_bytes: int  # bytes of repeated documents that a reader turns into objects


def _smaller(items: Sequence[Any], *, elides: bool) -> _Smaller:
    """Copies of items with narrow integers and, if asked for, runs; the given items stay."""
    copies = list(items)
    cells: list[Any] = []  # items of cells that may be stored in another way
    documents: list[Any] = []
    for i, item in enumerate(items):
        if type(item) is int:
            continue
        if item.narrow or (elides and item.dtype is not None):
            copies[i] = copy.copy(item)
            cells.append(copies[i])
        elif elides and item.splits is not None:
            copies[i] = copy.copy(item)
            documents.append(copies[i])
    sources = _put_end_to_end(cells)
    sources += [memory for column in documents for memory in _memories(column.data)]
    repeated_bytes = sum(map(elide_documents, documents))
    if elides:
        elide_cells([column for column in cells if column.ragged_dim == 1])
    _narrow([*cells, *documents])
    elided = any(column.runs is not None for column in (*cells, *documents))
    return _Smaller(copies, sources, elided, repeated_bytes)


def _put_end_to_end(columns: Sequence[Any]) -> list[Any]:
    """Make the data of columns flat bytes, and equal `splits` one object.

    Returns the memory that the columns had.
    """
    pool = RowSplitsPool()
    sources: list[Any] = []
    scattered = []
    for column in columns:
        if column.splits is not None:
            column.splits = pool.unique(column.splits)
        sources += _memories(column.data)
        if isinstance(column.data, RaggedView):
            scattered.append(column)
        else:
            column.data = array_bytes(np.asarray(column.data))
    sizes = [math.prod(column.dims) * column.data.dtype.itemsize for column in scattered]
    blocks = allocate_together(sizes)
    kernels.copy_all(
        [c.data.copy_task(block) for c, block in zip(scattered, blocks, strict=True) if len(block)]
    )
    for column, block in zip(scattered, blocks, strict=True):
        column.data = block
    return sources


def _memories(data: Any) -> Sequence[Any]:
    """The memory of an item's data."""
    return data.memories if isinstance(data, RaggedView) else [np.asarray(data)]


def _narrow(columns: Iterable[Any]) -> None:
    """Narrow the integers of columns, of the cells of runs, and of the indices of runs."""
    for column in columns:
        if column.runs is None and column.cells is None:
            _narrow_one(column)
            continue
        column.data = NO_BYTES
        for _, cells, index in column.runs or ():
            _narrow_one(cells)
            if index is not None:
                _narrow_one(index)
        if column.runs is None:
            _narrow_one(column.cells)
            column.storage_code = column.cells.storage_code


def _narrow_one(item: Any) -> None:
    if not item.narrow:
        return
    item.narrow = False  # narrow it once: several runs may have the same cells
    smaller = narrowed(item.data, item.dtype)
    if smaller is not None:
        item.storage_code, item.data = smaller
