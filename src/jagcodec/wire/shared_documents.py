"""What rows of documents repeat, found: whole rows, and large frames of the messages in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jagcodec.ragged.row_splits import RowSplits
from jagcodec.wire import cell_columns
from jagcodec.wire.cell_columns import TABLE, Cells, FoundPart, Parts, equal
from jagcodec.wire.spec import MOST_PARTS, PartForm

_LARGE = 1024
"""Bytes of a document from which on it is compared with others."""


class SharedDocuments(NamedTuple):
    """Rows of documents that are sent once.

    Attributes:
        like: For each row the first that has the same bytes; itself of most.
        one_object: Whether such rows are one object, and not just equal.
    """

    like: list[int]
    one_object: bool


def same_documents(rows: Sequence[Sequence[Any]]) -> SharedDocuments | None:
    """Which rows of documents, each given as pieces of bytes, repeat others.

    None if it does not pay to say so. Pieces in one list are those of one object.
    """
    first: dict[Any, int] = {}
    like = [first.setdefault(id(row), i) for i, row in enumerate(rows)]
    one_object = len(first) < len(rows)
    if not one_object:
        first.clear()
        for i, row in enumerate(rows):
            if sum(map(len, row)) >= _LARGE:
                other = first.setdefault(_sample(row), i)
                if other != i and _same_pieces(rows[other], row):
                    like[i] = other
    saved = sum(sum(map(len, row)) for i, row in enumerate(rows) if like[i] != i)
    # Offsets of all bytes take no more than these.
    if saved <= TABLE + 8 * len(rows) + 2 * cell_columns.SLACK:
        return None
    return SharedDocuments(like, one_object)


def parts_of_frames(rows: Sequence[Sequence[Any]]) -> Parts | None:
    """Rows of documents whose messages hold the same large frames, such as the pixels of a prompt.

    None if it does not pay to send these once. A row is given as its bytes, or as the pieces that
    `blob_pieces` makes of a message: two before its frames, and two for each.
    """
    most = max((len(row) - _BEFORE_LARGE) // 2 for row in rows)
    if not 0 < most < MOST_PARTS:
        return None
    heads: list[Any] = []
    lengths = np.zeros((len(rows), most + 1), dtype=np.int64)
    starts = np.zeros((len(rows), most), dtype=np.int64)
    kept: list[list[Any]] = [[] for _ in range(most)]
    ends = [0] * most
    known: dict[Any, tuple[Any, int]] = {}
    for i, row in enumerate(rows):
        # Up to the first large frame, with the zeros before it.
        heads += row[: _BEFORE_LARGE + 1]
        lengths[i, 0] = sum(map(len, row[: _BEFORE_LARGE + 1]))
        for k in range((len(row) - _BEFORE_LARGE) // 2):
            at = _BEFORE_LARGE + 1 + 2 * k
            frame, gap = row[at : at + 2] if at + 1 < len(row) else (row[at], b"")
            key = k, len(gap), _sample((frame,))
            other, start = known.get(key, (None, 0))
            if other is None or not _same_pieces((other,), (frame,)):
                start = ends[k]
                known[key] = frame, start
                kept[k] += (frame, gap)
                ends[k] += len(frame) + len(gap)
            starts[i, k] = start
            lengths[i, k + 1] = len(frame) + len(gap)
    cost = (most + 1) * (TABLE + 16 * (len(rows) + 1) + 2 * cell_columns.SLACK)
    if int(lengths[:, 1:].sum()) - sum(ends) <= cost:
        return None
    data = [np.frombuffer(bytearray().join(pieces), np.uint8) for pieces in (heads, *kept)]
    splits = [RowSplits.from_lengths(np.ascontiguousarray(own)) for own in lengths.T]
    return [
        FoundPart(PartForm.IN_ORDER, splits[0], Cells(data[0]), len(data[0])),
        *(
            FoundPart(PartForm.AT, own, Cells(cells), len(cells), np.ascontiguousarray(index))
            for own, cells, index in zip(splits[1:], data[1:], starts.T, strict=True)
        ),
    ]


_BEFORE_LARGE = 4
"""Pieces of a message in one buffer before its large frames, and the zeros before these: preamble,
header, zeros, and the frame of all small buffers."""


def _sample(row: Sequence[Any]) -> tuple[Any, ...]:
    """What tells most rows apart: of each piece its size, and some of its bytes."""
    return tuple(
        (len(piece), bytes(piece[:32]), bytes(piece[len(piece) // 2 :][:32]), bytes(piece[-32:]))
        for piece in row
    )


def _same_pieces(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(
        equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
        for one, other in zip(a, b, strict=True)
    )
