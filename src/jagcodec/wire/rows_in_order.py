"""Messages of columns whose rows lie in order already: bytes, and numbers that say where they are.

No value is walked, so that a message of few rows costs little more than its bytes. The frames are
those that `encode` makes of the same rows; what is not that simple is left to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy.typing as npt

from jagcodec.wire.frames import Frame
from jagcodec.wire.header import write_header
from jagcodec.wire.spec import ALIGNMENT, GAPS, PLAIN, SMALL_BUFFER

Bytes: TypeAlias = memoryview | npt.NDArray[Any]
"""Contiguous memory, of which only the bytes count."""

OrderedColumn: TypeAlias = tuple[Bytes, tuple[int, ...] | None, tuple[int, ...] | None]
"""The bytes of a column; where its rows begin and end, in cells, from 0 on, or None of a rectangle;
and the dims of a cell, or None of documents."""


def frames_of_rows(
    tree: tuple[Any, ...], rows: int, columns: Iterable[OrderedColumn], values: bytes
) -> list[Frame]:
    """The frames of a message of `rows` rows, one at least.

    Args:
        tree: The schema: of a TensorDict with one batch dim.
        rows: How many.
        columns: In the order of the schema.
        values: The packed documents of the header.
    """
    numbers = [rows]
    groups: list[tuple[int, ...]] = []
    group_of: dict[tuple[int, ...], int] = {}
    pieces: list[Any] = []
    large: list[memoryview] = []
    end = 0
    for data, offsets, dims in columns:
        size = data.nbytes
        buffer = at = 0
        if size >= SMALL_BUFFER:
            large.append(memoryview(data).cast("B"))  # type: ignore[arg-type]
            buffer = len(large)
        elif size:
            at = (end + 63) & -ALIGNMENT
            pieces += (GAPS[at - end], data)
            end = at + size
        if offsets is None:
            numbers += (buffer, at, PLAIN, rows, *(dims or ()))
            continue
        group = group_of.get(offsets)
        if group is None:
            group = group_of[offsets] = len(groups)
            if rows == 1:  # its length says everything
                groups.append((0, 0, 1, offsets[1], offsets[1]))
            else:
                lengths = [b - a for a, b in pairwise(offsets)]
                packed = struct.pack(f"<{rows + 1}q", *offsets)
                if len(packed) >= SMALL_BUFFER:
                    large.append(memoryview(packed))
                    place = (len(large), 0)
                else:
                    place = (0, (end + 63) & -ALIGNMENT)
                    pieces += (GAPS[place[1] - end], packed)
                    end = place[1] + len(packed)
                groups.append((*place, rows, min(lengths), max(lengths)))
        if dims is None:
            numbers += (buffer, at, PLAIN, group, offsets[-1])
        else:
            numbers += (buffer, at, PLAIN, group, offsets[-1], *dims)
    if large or end:
        large.insert(0, memoryview(bytearray().join(pieces)))
    sizes = [buffer.nbytes for buffer in large]
    return [write_header(tree, numbers, values, groups, sizes, None), *large]
