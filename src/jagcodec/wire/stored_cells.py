"""Ranges of cells of a message, as wide as their dtype however they are stored."""

from __future__ import annotations

from typing import NamedTuple

from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.wire.frames import Payload
from jagcodec.wire.narrow import widened
from jagcodec.wire.spec import BITS, PLAIN, STORED_WIDTHS, TORCH_DTYPES

MOST_RANGES = 4096
"""Ranges of one column that are fetched one by one; of more, the column is read whole."""


class Place(NamedTuple):
    """Where cells lie.

    Attributes:
        buffer: In which buffer of the message.
        offset: From which of its bytes on.
        stored: How: as they are, or narrow.
        cells: How many numbers there are.
        name: Their dtype.
    """

    buffer: int
    offset: int
    stored: int
    cells: int
    name: str


def cell_range(payload: Payload, place: Place, start: int, end: int, *, keep: bool) -> ByteArray:
    """The bytes of cells `start` to `end` of a place whose bounds were checked.

    With `keep`, memory that a tensor may alias; otherwise to be looked at only.
    """
    buffer, offset, stored, _, name = place
    size = TORCH_DTYPES[name]
    if stored == PLAIN or start == end:
        at, length = offset + start * size, (end - start) * size
        place_of = (buffer, at, length)
        plain: ByteArray = payload.bytes_at(*place_of, size) if keep else payload.read(*place_of)
        return plain
    if stored == BITS:
        # Bits are read by the byte, and those before the first cell thrown away.
        first = start // 8
        data = payload.read(buffer, offset + first, (end + 7) // 8 - first)
        cells = widened(data, stored, name, end - 8 * first)
        return cells[(start - 8 * first) * size :]
    width, _ = STORED_WIDTHS[stored]
    data = payload.read(buffer, offset + start * width, (end - start) * width)
    return widened(data, stored, name, end - start)
