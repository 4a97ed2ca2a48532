"""Reads columns of one row for `RowBuilder.from_message`, where torch is not installed."""

from __future__ import annotations

from typing import Any

import numpy as np

from jagcodec._dependencies import check_torch
from jagcodec.columns.batch import As, Batch, CellRows, OneObject, views_of
from jagcodec.columns.held import column_of
from jagcodec.errors import ArgumentTypeError
from jagcodec.memory.arrays import IN_NUMPY
from jagcodec.rows.copy_bytes import array_of_cells, array_of_view, gathered_bytes
from jagcodec.rows.views import RaggedView
from jagcodec.wire.items import RowCells


def columns_of_row(batch: Batch, where: str) -> dict[str, Any]:
    """The columns of a batch of one row: a jagged one as `RowCells`, any other as its value."""
    row: dict[str, Any] = {}
    for name, found in views_of(batch, As.HOST).items():
        path = f"{where}({name!r})"
        if isinstance(found, RaggedView):
            cells = array_of_cells(gathered_bytes([found])[0], found)
            row[name] = RowCells(cells, (found.row_splits.total,), str(found.dtype))
            row[name].ragged_dim = found.ragged_dim
        elif isinstance(found, CellRows):
            if str(found.view.dtype) not in IN_NUMPY:  # a number of it would lose its bits
                check_torch(path)
            row[name] = array_of_view(found.view)[0].copy()
        elif isinstance(found, (OneObject, np.ndarray)):
            row[name] = column_of(found).object_array()[0]
        else:
            kind = type(found).__name__
            detail = f"expected cells or a payload, found {kind}; select the other columns"
            raise ArgumentTypeError("bad_type", path, detail)
    return row
