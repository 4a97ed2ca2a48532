"""Values that msgpack knows: written at once, and recognised when they were read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jagcodec.cells import is_native
from jagcodec.wire.documents import packer
from jagcodec.wire.spec import INLINE_BYTES, LONG_LIST

NATIVE = frozenset((str, int, float, bool, type(None)))
"""The types that msgpack gives back as they were."""

_MOST_ITEMS = 1 << 20  # so that a list that contains itself several times ends soon


def packed_at_once(rows: Sequence[Any], levels: int) -> list[bytes] | None:
    """The documents of rows as msgpack writes them; None if a walk must write them.

    `levels` is how many containers may be in each other.
    """
    pack = packer().pack
    try:
        if NATIVE.issuperset(map(type, rows)):
            return list(map(pack, rows))
        if not is_native(rows, levels, INLINE_BYTES, LONG_LIST, _MOST_ITEMS):
            return None
        if len(set(map(id, rows))) == len(rows):
            return list(map(pack, rows))
        # Rows that are one object are packed once.
        made = {id(row): pack(row) for row in rows if type(row) not in NATIVE}
        return [pack(row) if type(row) in NATIVE else made[id(row)] for row in rows]
    except (TypeError, ValueError, RuntimeError):  # too large, or changed by another thread
        return None


def are_values(items: Sequence[Any], levels: int) -> bool:
    """Whether unpacked documents are values as they are: no records, and at most so many levels.

    False is not certain: `revived` in `decoder` finds out, and names what is wrong.
    """
    return is_native(items, levels, sys.maxsize, sys.maxsize, sys.maxsize)
