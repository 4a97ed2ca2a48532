"""`sizes_of`: the batch size of a column as it is now, which its owner may have changed."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, UnbatchedTensor, is_tensorclass

from jagcodec._arguments import ARRAY_TYPES
from jagcodec.memory.plain_types import TENSOR_TYPES
from jagcodec.ragged.nested import NESTED_TENSOR, is_jagged, rows_in
from jagcodec.ragged.non_tensor import sizes_of_batch
from jagcodec.ragged.varlen import rows_in_packed
from jagcodec.ragged.views import RaggedView


def sizes_of(column: Any, sizes: list[int]) -> list[int]:
    """The sizes that a column has in place of those of its batch; these if any fit.

    Any sizes fit a dict: its columns are checked when they are read.
    """
    if not sizes:  # of a batch without dims
        return sizes
    if isinstance(column, list):
        return [list.__len__(column)]  # a subclass may report another length
    if type(column) not in _PLAIN:
        if isinstance(column, RaggedView):
            return [column.row_splits.rows]
        packed = rows_in_packed(column)
        if packed is not None:
            return [packed]
        if isinstance(column, (dict, UnbatchedTensor)):
            return sizes
        if isinstance(column, TensorDictBase) or is_tensorclass(column):
            return sizes_of_batch(column)[: len(sizes)]
    if is_jagged(column):  # whose shape takes longer to ask for
        return [rows_in(column), *(column.shape[1 : len(sizes)] if len(sizes) > 1 else ())]
    if isinstance(column, torch.Tensor) and column.is_nested:
        return [column.size(0), *sizes[1:]]  # only the first dim has one size
    return [*column.shape[: len(sizes)]]


_PLAIN = TENSOR_TYPES | ARRAY_TYPES | {NESTED_TENSOR}
"""The types of most columns: to ask about all others takes longer."""
