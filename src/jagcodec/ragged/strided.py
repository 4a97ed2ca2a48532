"""Strided nested tensors: rows of any shapes."""

from __future__ import annotations

import math

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import IntArray, cat_bits, refill
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView, end_to_end


class StridedRows:
    """The rows of a strided nested tensor (N, r...), which may be ragged in any of their dims."""

    def __init__(self, nested: torch.Tensor) -> None:
        self.rows: list[torch.Tensor] = list(nested.unbind())
        shapes = np.array([row.shape for row in self.rows], dtype=np.int64)
        differs = (shapes != shapes[:1]).any(axis=0)
        self.dims: list[int] = [1 + int(dim) for dim in np.flatnonzero(differs)]  # by row
        # The one in which a row is long or short: the only one that differs, or else 1.
        self.ragged_dim: int = self.dims[0] if len(self.dims) == 1 else 1
        lengths: IntArray = shapes[:, self.ragged_dim - 1].copy()
        self.row_splits: RowSplits = RowSplits.from_lengths(lengths)
        self._widest: list[int] = shapes.max(axis=0).tolist()

    @property
    def padded_cells(self) -> int:
        """Cells of the rows once each is as large as the largest in every dim."""
        return len(self.rows) * math.prod(self._widest)

    def view(self, pad_bits: bytes) -> RaggedView:
        """The rows end to end along the ragged dim, padded on the right in every other one."""
        rows = self.rows
        if len(self.dims) > 1:
            rows = [self._widened(row, pad_bits) for row in rows]
        return end_to_end(cat_bits(rows, self.ragged_dim - 1), self.row_splits, self.ragged_dim)

    def _widened(self, row: torch.Tensor, pad_bits: bytes) -> torch.Tensor:
        shape = [len(row), *self._widest[1:]]
        widened = refill(torch.empty(shape, dtype=row.dtype, device=row.device), pad_bits)
        inner = tuple(slice(extent) for extent in row.shape)
        widened[inner] = row  # which autograd follows
        return widened
