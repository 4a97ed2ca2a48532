"""Where two messages differ: column, row and cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jagcodec.batch.compare import WHOLE, Difference, each_difference
from jagcodec.wire.decoder import build
from jagcodec.wire.frames import Reading
from jagcodec.wire.message import open_message
from jagcodec.wire.wire_batch import batch_in, open_whole


class Whole(NamedTuple):
    """All of a message, or some columns of it."""

    value: Any
    meta: dict[str, Any]
    is_batch: bool


def message_difference(
    left: Any, right: Any, *, columns: Sequence[str] | None = None
) -> Difference | None:
    """Where the values of two messages first differ, however they are stored."""
    a = read_whole(left, "message_difference(left)", columns)
    b = read_whole(right, "message_difference(right)", columns)
    return next(differences(a, b), None)


def read_whole(source: Any, path: str, columns: Sequence[str] | None = None) -> Whole:
    """What `message_difference` compares of a message; `path` is what errors call it."""
    if columns is not None:
        return Whole(open_whole(source, path).select(columns).to_tensordict(), {}, True)
    message = open_message(source, path, Reading(by_range=True))
    root = message.header.schema.root
    return Whole(build(message, root), message.meta(), batch_in(root) is not None)


def differences(a: Whole, b: Whole) -> Iterator[Difference]:
    """The first difference of each column: first of names, types and shapes, then of cells."""
    at = WHOLE if a.is_batch and b.is_batch else replace(WHOLE, column="$")
    pairs = ((a.value, b.value, at), (a.meta, b.meta, replace(WHOLE, column="meta")))
    known: set[str] = set()
    for cells in (False, True):
        for left, right, place in pairs:
            for found in each_difference(left, right, place, cells):
                part = found.column or found.what
                if part not in known:
                    known.add(part)
                    yield found
