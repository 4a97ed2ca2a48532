"""Lists of tensors that are views of one storage, which a message has once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jagcodec.memory.arrays import IntArray
from jagcodec.memory.plain_types import remedy_for
from jagcodec.rows.chosen_rows import joined_ranges
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire import spec
from jagcodec.wire.torch_dtypes import TORCH_NAMES


def has_dense_cells(tensor: torch.Tensor) -> bool:
    """Whether the cells of a tensor can be read, and be sent."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and tensor.dtype in TORCH_NAMES and not remedy_for(tensor)


def views_of_one_storage(values: Sequence[Any]) -> tuple[RaggedView, IntArray] | None:
    """A view of the cells of plain tensors over one storage, and (N, 2) starts and ends in it.

    The view has no gaps between the tensors. Returns None for other values. TransferQueue sends
    thousands of views of rows, each of which would otherwise be a frame.
    """
    common = _storage_and_cell(values[0])
    if common is None or any(_storage_and_cell(value) != common for value in values):
        return None

    _, storage_size, dtype, cell = common
    inner = cell.numel()
    places = np.array([value.storage_offset() for value in values], dtype=np.int64)
    lengths = np.array([value.shape[0] for value in values], dtype=np.int64)
    # A tensor without cells may begin anywhere: move it to where it makes no gap.
    places[lengths == 0] = places[lengths > 0].min() if lengths.any() else 0
    start = int(places.min())
    if ((places - start) % inner).any():
        return None
    # Other code may have made the storage smaller. Lowered one by one, the right tensor is named.
    if int((places + lengths * inner).max()) * dtype.itemsize > storage_size:
        return None
    if inner * dtype.itemsize >= spec.MAX_BYTES:  # larger than any cell in memory
        return None
    starts = (places - start) // inner
    ends = starts + lengths

    firsts, lasts, moves = joined_ranges(starts, ends)
    span = values[0].as_strided((int(lasts[-1]) * inner,), (1,), start).view(-1, *cell)
    pieces = None if len(firsts) == 1 else firsts
    row_splits = RowSplits.from_lengths(lasts - firsts)
    view = RaggedView(span, span.dtype, tuple(span.shape), 1, pieces, row_splits)
    return view, np.stack([starts + moves, ends + moves], axis=1)


def _storage_and_cell(value: Any) -> tuple[int, int, torch.dtype, torch.Size] | None:
    """The address and size of a plain tensor's storage, its dtype, and the shape of a cell.

    Returns None if the value is anything else.
    """
    if (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and value.device.type == "cpu"
        and value.dtype in TORCH_NAMES
        and 0 < value.dim() <= spec.MAX_NDIM
        and value.shape[1:].numel() > 0
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
        and not value._is_zerotensor()
    ):
        # Storages over foreign memory may begin at one address and differ in size: compare both.
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes(), value.dtype, value.shape[1:]
    return None
