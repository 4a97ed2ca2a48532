"""How long rows are that have numbers of their own: views of one tensor, and components."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.wire.checks import INT64_MAX, bad, cells_of
from jagcodec.wire.frames import Payload
from jagcodec.wire.schema import Node


def view_bounds(payload: Payload, numbers: Sequence[int], node: Node) -> IntArray:
    """(2, views) where each view of one tensor begins and ends in its first dim."""
    _, _, bounds_buffer, bounds_offset, views, rows, *_ = numbers[node.number : node.end]
    data = payload.read(bounds_buffer, bounds_offset, 16 * views)
    bounds = np.frombuffer(bytearray(data), dtype=np.int64).reshape(2, views)
    starts, ends = bounds
    good = (starts >= 0) & (starts <= ends) & (ends <= rows)
    if not good.all():
        row = int(np.argmin(good))
        raise WireFormatError(
            "out_of_bounds",
            f"$[{row}]",
            f"expected a range within {rows}, found {brief(bounds[:, row].tolist())}",
        )
    return bounds


def component_shapes(payload: Payload, numbers: Sequence[int], node: Node) -> IntArray:
    """(components, rank) of a strided nested tensor: the shape of each."""
    cells, sizes_buffer, sizes_offset, components = numbers[node.number + 2 : node.end]
    _, rank = node.fields
    data = payload.read(sizes_buffer, sizes_offset, 8 * (rank or 1) * components)
    shapes = np.frombuffer(bytearray(data), dtype=np.int64).reshape(components, rank or 1)
    if not rank:
        if (shapes != 1).any():
            raise bad("a 1 for each component without dims", "another number")
        shapes = shapes[:, :0]
    found = _cells_of_all(shapes, cells)
    if found != cells:
        raise WireFormatError(
            "bad_offsets", "$", f"expected component sizes of {cells} cells, found {found}"
        )
    return shapes


def _cells_of_all(shapes: IntArray, most: int) -> int:
    """The cells of components of (N, rank) shapes; of more than `most`, some number above it."""
    cells = np.ones(len(shapes), dtype=np.int64)
    wrong = (shapes < 0).any(axis=1)
    for dims in shapes.T:
        # Strides are products of the other dims even where one dim is 0.
        extents = np.maximum(dims, 1)
        wrong |= cells > INT64_MAX // extents
        cells *= extents
    if wrong.any():
        cells_of(shapes[np.argmax(wrong)].tolist())
    cells[(shapes == 0).any(axis=1)] = 0
    largest = int(cells.max(initial=0))
    if largest > most or len(cells) * most > INT64_MAX:  # whose sum might wrap around
        return largest if largest > most else sum(cells.tolist())
    return int(cells.sum())
