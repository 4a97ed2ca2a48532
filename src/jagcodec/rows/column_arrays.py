"""`ColumnArrays`: a column as numpy arrays, the same with and without torch."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy.typing as npt

from jagcodec.memory.arrays import IntArray
from jagcodec.rows.copy_bytes import array_of_view
from jagcodec.rows.views import RaggedView


class ColumnArrays(NamedTuple):
    """N rows of a column as arrays on the host.

    Example:
        >>> from jagcodec import encode_rows, open_wire
        >>> batch = open_wire(encode_rows({"ids": [[5], [6, 7]], "reward": [0.0, 1.0]}))
        >>> ids = batch.arrays("ids")
        >>> ids.values.tolist(), ids.row_splits.tolist(), [row.tolist() for row in ids.unbind()]
        ([5, 6, 7], [0, 1, 3], [[5], [6, 7]])
        >>> batch.arrays("reward").values.tolist()
        [0.0, 1.0]

    Attributes:
        values: (A..., total, B...) for a jagged column, its rows end to end; (N, ...) for any
            other. Dtypes that numpy lacks, such as bfloat16, are unsigned words of the same
            bits; the schema of the batch names them. Objects are an array of objects. Only read
            it: it may alias the message.
        row_splits: (N + 1,) int64, where each row begins along `ragged_dim`, and the end; None
            if the column is not jagged.
        ragged_dim: The dim of `values` along which rows are end to end; None if not jagged.
    """

    values: npt.NDArray[Any]
    row_splits: IntArray | None
    ragged_dim: int | None

    def unbind(self) -> list[Any]:
        """The rows, each a view of `values`: arrays, or what the array of objects holds."""
        if self.row_splits is None:
            return list(self.values)
        before = (slice(None),) * (self.ragged_dim or 0)
        bounds = itertools.pairwise(self.row_splits.tolist())
        return [self.values[(*before, slice(start, end))] for start, end in bounds]


def arrays_of_view(view: RaggedView) -> ColumnArrays:
    """The rows of a view on the host; their array is aliased if they are end to end."""
    return ColumnArrays(array_of_view(view), view.row_splits.offsets_array, view.ragged_dim - 1)


def rectangle_of_view(view: RaggedView) -> ColumnArrays:
    """Rows of one cell each as one array (N, ...)."""
    return ColumnArrays(array_of_view(view), None, None)
