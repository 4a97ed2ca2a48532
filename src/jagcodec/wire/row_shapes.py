"""Checks of the bounds of views, and of the shapes of components."""

from __future__ import annotations

import numpy as np

from jagcodec.errors import WireFormatError, brief
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.wire.checks import INT64_MAX, bad, cells_of


def checked_bounds(bounds: IntArray, rows: int) -> IntArray:
    """(views, 2) where each view of a tensor of so many rows begins and ends."""
    starts, ends = bounds.T
    good = (starts >= 0) & (starts <= ends) & (ends <= rows)
    if not good.all():
        row = int(np.argmin(good))
        raise WireFormatError(
            "out_of_bounds",
            f"$[{row}]",
            f"expected a range within {rows}, found {brief(bounds[row].tolist())}",
        )
    return bounds


def checked_shapes(shapes: IntArray, rank: int, cells: int) -> IntArray:
    """(components, rank) shapes, of so many cells in all; of rank 0 from a 1 for each."""
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
