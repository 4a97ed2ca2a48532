"""`read_lengths`, `read_rows`: the row lengths that callers pass, also as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy.typing as npt

from jagcodec._dependencies import module_with_torch
from jagcodec.memory.arrays import is_of_torch, tensor_type
from jagcodec.rows.length_array import length_array
from jagcodec.rows.row_splits import RowSplits

if TYPE_CHECKING:
    import torch

Lengths: TypeAlias = Union["torch.Tensor", npt.NDArray[Any], Sequence[int]]
"""What callers may pass as lengths."""


def read_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of a caller's (N,) lengths. One device sync, none for a CPU tensor."""
    if isinstance(lengths, tensor_type()):
        lengths = _of_tensors(path).lengths_in_tensor(lengths, path)
    return RowSplits.from_lengths(length_array(lengths, path, rows=rows))


def read_rows(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """The row splits of lengths, or of a jagged tensor, whose offsets object is kept."""
    if is_of_torch(type(lengths)):
        splits: RowSplits | None = _of_tensors(path).rows_of_jagged(lengths, path, rows)
        if splits is not None:
            return splits
    return read_lengths(lengths, path, rows=rows)


def _of_tensors(path: str) -> Any:
    """The module that reads tensors, which imports torch."""
    return module_with_torch("rows.tensor_lengths", path)
