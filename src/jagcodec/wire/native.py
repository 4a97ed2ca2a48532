"""Values of msgpack's own types: rows of them are written at once, and need no work when read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jagcodec.kernels import is_native
from jagcodec.wire.documents import writer
from jagcodec.wire.spec import INLINE_BYTES, LONG_LIST

NATIVE = frozenset((str, int, float, bool, type(None)))
"""Types whose values msgpack reads as equal values of the same type."""

_MOST_ITEMS = 1 << 20  # so that a list that contains itself several times ends soon


def written_at_once(
    rows: Sequence[Any], levels: int
) -> tuple[list[bytes], Sequence[int] | None] | None:
    """The documents of rows, as msgpack writes them, and the result of `first_same`.

    Returns None if a row may need more than msgpack, or nests containers deeper than `levels`.
    """
    write = writer().pack
    try:
        if NATIVE.issuperset(map(type, rows)):
            return list(map(write, rows)), None
        if not is_native(rows, levels, INLINE_BYTES, LONG_LIST, _MOST_ITEMS):
            return None
        same = first_same(rows)
        if same is None:
            return list(map(write, rows)), None
        documents: list[bytes] = []
        for i, first in enumerate(same):
            documents.append(documents[first] if first < i else write(rows[i]))
        return documents, same
    except (TypeError, ValueError, RuntimeError):  # too large, or changed by another thread
        return None


def first_same(rows: Sequence[Any]) -> list[int] | None:
    """For each row, the index of the first row that is the same object; None if all differ.

    A string or a number counts as a different object in each row: Python may share equal ones.
    """
    if len(set(map(id, rows))) == len(rows):
        return None
    first: dict[int, int] = {}
    return [
        i if type(row) in NATIVE else first.setdefault(id(row), i) for i, row in enumerate(rows)
    ]


def are_values(items: Sequence[Any], levels: int) -> bool:
    """Whether unpacked documents have no records and nest at most `levels` deep.

    They are then values already. If the answer is False, `with_records_resolved` in `decoder`
    decides: it makes values of records, and raises an error for documents that are too deep.
    """
    return is_native(items, levels, sys.maxsize, sys.maxsize, sys.maxsize)
