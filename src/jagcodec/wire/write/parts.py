"""`parts_to_send`: parts of one batch for `encode`, whose values are lowered once for all parts.

Objects are written as documents, and cells are fetched from devices, for the whole batch. `encode`
then reads the rows of each part where they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from jagcodec.columns.batch import Batch, Column, Columns, Read, to_send
from jagcodec.columns.memory import MemorySource
from jagcodec.rows.chosen_rows import ChosenRows
from jagcodec.rows.row_splits import Chosen, RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire.items import Item, item_of_view
from jagcodec.wire.torch_dtypes import torch_dtype
from jagcodec.wire.write.items_to_message import write_rows
from jagcodec.wire.write.lowering import Lowering
from jagcodec.wire.write.lowering_columns import items_of_columns


def parts_to_send(
    batch: Columns, parts: Iterable[Chosen], *, narrow: bool, allow_pickle: bool
) -> list[Any]:
    """The rows of each part as a value for `encode`, which must get the same options.

    Args:
        batch: The columns of all rows.
        parts: The rows of each part.
        narrow: The option of `encode`.
        allow_pickle: The option of `encode`.

    Raises:
        UnsupportedTypeError: A value cannot be encoded. The error names its row of the batch.
    """
    lowering = Lowering(allow_pickle, narrow=narrow)
    items = items_of_columns(lowering, batch)
    for rows in lowering.messages:
        write_rows(rows, narrows=narrow)
    source = MemorySource(batch.columns, [batch.rows], {})
    one_each = RowSplits.of_cells(batch.rows)
    columns: dict[str, Column] = {**source.columns()}
    columns |= {name: _ItemColumn(item, one_each) for name, item in items.items()}
    return [to_send(Batch(source, columns, ChosenRows(rows))) for rows in parts]


class _ItemColumn(Column):
    """A column that was lowered to an item, and can only be sent."""

    __slots__ = ("_array", "_item", "_view")

    def __init__(self, item: Item, one_each: RowSplits) -> None:
        self._item = item
        data, dtype = item.data, item.dtype
        # If each row is one number, copying the rows at once is faster than noting their places.
        is_array = type(data) is np.ndarray and item.splits is None
        self._array = data if is_array and len(item.dims) == 1 and data.shape == item.dims else None
        if not isinstance(data, RaggedView):
            memory = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data
            cells = torch.uint8 if dtype is None else torch_dtype(dtype)
            splits = item.splits or one_each
            data = RaggedView(memory, cells, item.dims, item.ragged_dim, None, splits)
        self._view: RaggedView = data

    def to_send(self, how: Read) -> Any:
        item, chosen = self._item, how.chosen
        if chosen is None:
            return item
        if item.dtype is None and not len(chosen):
            return []  # a list without objects
        if self._array is not None:
            return Item(self._array[chosen.at], (len(chosen),), None, item.dtype)
        part = item_of_view(chosen.of_view(self._view), item.dtype, ragged=item.splits is not None)
        part.storage_code = item.storage_code
        if item.same is not None:
            first: dict[int, int] = {}  # the first chosen row of each object
            part.same = [first.setdefault(item.same[row], i) for i, row in enumerate(chosen.rows)]
        return part
