"""Lists of tensors that are views of one storage, merged into one buffer.

What TransferQueue sends as thousands of row views is one range of memory, or a few. Sent view by
view each would be a frame; sent as a storage, padding and neighbours would be sent too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.row_index import joined_ranges
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView


class Merged(NamedTuple):
    """Views as ranges of the cells that `view` has, end to end: (views, 2) starts and ends."""

    view: RaggedView
    bounds: IntArray


def merge(values: Sequence[Any]) -> Merged | None:
    """Plain tensors over one storage as ranges of one tensor, or None if they are not that.

    The storage is aliased; gaps between the tensors are left out, so that only what is viewed is
    sent.
    """
    first = values[0]
    if len(values) < 2 or not _viewable(first):
        return None
    storage = first.untyped_storage().data_ptr()
    cell = tuple(first.shape[1:])
    for value in values:
        if (
            type(value) is not torch.Tensor
            or value.dtype != first.dtype
            or tuple(value.shape[1:]) != cell
            or not _viewable(value)
            or value.untyped_storage().data_ptr() != storage
        ):
            return None

    inner = first.shape[1:].numel()
    places = np.array([value.storage_offset() for value in values], dtype=np.int64)
    lengths = np.array([value.shape[0] for value in values], dtype=np.int64)
    # An empty view may be anywhere; put it where it makes no gap.
    places[lengths == 0] = places[lengths > 0].min() if lengths.any() else 0
    if ((places - places.min()) % inner).any():
        return None
    starts = (places - places.min()) // inner
    ends = starts + lengths

    firsts, lasts, moves = joined_ranges(starts, ends)
    span = first.as_strided((int(lasts[-1]) * inner,), (1,), int(places.min())).view(-1, *cell)
    pieces = None if len(firsts) == 1 else firsts
    row_splits = RowSplits.from_lengths(lasts - firsts)
    view = RaggedView(span, span.dtype, tuple(span.shape), 1, pieces, row_splits)
    return Merged(view, np.stack([starts + moves, ends + moves], axis=1))


def _viewable(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type == "cpu"
        and value.dim() > 0
        and value.shape[1:].numel() > 0
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )
