"""`elide_documents`: equal documents of a column become one run, and each is sent once.

`elide_documents` finds, for each row, the first row with the same document (`_first_equal`), and
copies the distinct documents (`_end_to_end`). A column stays as it is if the message would not get
smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jagcodec import kernels
from jagcodec.memory.arrays import ByteArray, IntArray, array_bytes
from jagcodec.memory.blocks import allocate_together
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire.items import Item, Run, item_of_index
from jagcodec.wire.spec import INDIRECT, ONE_OBJECT
from jagcodec.wire.stored.repeats import (
    copy_of_rows,
    cost_of_runs,
    equal_bytes,
    sample_of,
    set_runs,
)

_LEAST_COMPARED = 1024  # bytes of a document from which on its bytes are compared with others


def elide_documents(column: Item) -> int:
    """Send equal documents of a column once, if that pays.

    Returns how many bytes of documents a reader turns into objects; 0 if the column stays as it is.
    """
    splits: Any = column.splits
    repeats = _first_equal(_pieces_of_rows(column), column.same)
    if repeats is None:
        return 0
    first, are_one_object = repeats
    kept = np.array(first) == np.arange(len(first))
    sent = np.where(kept, splits.lengths, 0)
    starts = (np.cumsum(sent) - sent)[first]
    distinct = _end_to_end(column, np.flatnonzero(kept))
    set_runs(column, [Run(splits, Item(distinct, (len(distinct),)), item_of_index(starts))])
    code = ONE_OBJECT if are_one_object else INDIRECT + 1
    column.storage_code = code + (column.storage_code or 0)
    return len(distinct) if are_one_object else int(splits.total)


def _pieces_of_rows(column: Item) -> list[list[ByteArray]]:
    """The bytes of each document, as pieces that alias the column's memory."""
    data: Any = column.data
    splits: Any = column.splits
    if not isinstance(data, RaggedView):
        flat = array_bytes(np.asarray(data))
        return [[flat[a:b]] for a, b in itertools.pairwise(splits.offsets_array.tolist())]
    buffers = data.host_buffers()
    begins = np.cumsum([0, *map(len, buffers)])
    starts = data.row_starts().reshape(splits.rows, -1)
    lengths = splits.lengths[:, None] if data.run_lengths is None else data.run_lengths
    pieces: list[list[ByteArray]] = []
    which = np.searchsorted(begins, starts, side="right") - 1
    for row in zip(which.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        places = [place for place in zip(*row, strict=True) if place[2]]
        within = ((buffers[k], start - int(begins[k]), size) for k, start, size in places)
        pieces.append([buffer[at : at + size] for buffer, at, size in within])
    return pieces


def _end_to_end(column: Item, rows: IntArray) -> ByteArray:
    """A copy of the documents in these rows, end to end."""
    data: Any = column.data
    splits: Any = column.splits
    lengths = splits.lengths[rows]
    if not isinstance(data, RaggedView):
        return copy_of_rows(array_bytes(np.asarray(data)), splits.starts[rows], lengths, 1)
    (out,) = allocate_together([int(lengths.sum())])
    if len(out):
        chosen = data.choose(rows, RowSplits.from_lengths(lengths))
        kernels.copy_all([chosen.copy_task(out)])
    return out


class _Repeats(NamedTuple):
    """Which rows have one document."""

    first: Sequence[int]  # for each row, the first row with the same document
    are_one_object: bool  # whether such rows are one object; otherwise their bytes are equal


def _first_equal(
    rows: Sequence[Sequence[ByteArray]], first_same: Sequence[int] | None
) -> _Repeats | None:
    """The rows that repeat a document; None if repeats do not pay.

    `first_same` has, for each row, the first row that is the same object; None if all differ.
    """
    sizes = [sum(map(len, row)) for row in rows]
    if first_same is not None and _repeats_save_bytes(first_same, sizes):
        return _Repeats(first_same, are_one_object=True)
    first: dict[Any, int] = {}
    first_equal = list(range(len(rows)))
    for i in (i for i, size in enumerate(sizes) if size >= _LEAST_COMPARED):
        # Equal rows have equal pieces: sizes decide what a piece is.
        sample = tuple((len(piece), sample_of(piece)) for piece in rows[i])
        other = first.setdefault(sample, i)
        if all(map(equal_bytes, rows[other], rows[i])):
            first_equal[i] = other
    saves = _repeats_save_bytes(first_equal, sizes)
    return _Repeats(first_equal, are_one_object=False) if saves else None


def _repeats_save_bytes(first: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether sending each row's `first` row only saves more bytes than the run costs."""
    saved = sum(size for i, size in enumerate(sizes) if first[i] != i)
    return saved > cost_of_runs(1, len(sizes))
