"""Reads columns of one row for `RowBuilder.from_message`, where torch is installed."""

from __future__ import annotations

from typing import Any

from jagcodec.columns.batch import Batch, views_of
from jagcodec.columns.held import Array, ViewColumn, column_of
from jagcodec.columns.tensor_columns import Dense, Payloads
from jagcodec.errors import ArgumentTypeError
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.produce.cells_tensors import array_of_tensor
from jagcodec.rows.copy_rows import gathered
from jagcodec.rows.non_tensor import is_nested_batch as is_nested_batch
from jagcodec.wire.items import RowCells
from jagcodec.wire.torch_dtypes import TORCH_NAMES


def columns_of_row(batch: Batch, where: str) -> dict[str, Any]:
    """The columns of a batch of one row: a jagged one as `RowCells`, any other as its value."""
    row: dict[str, Any] = {}
    for name, leaf in views_of(batch).items():
        holder = column_of(leaf)
        if isinstance(holder, ViewColumn):
            (cells,), lengths = gathered([leaf]), (leaf.row_splits.total,)
            row[name] = RowCells(array_of_tensor(cells), lengths, TORCH_NAMES[leaf.dtype])
            row[name].ragged_dim = leaf.ragged_dim
        elif isinstance(holder, Dense):
            row[name] = contiguous_bits(leaf).clone()[0]
        elif isinstance(holder, Payloads):
            row[name] = holder.objects()[0]  # type: ignore[index]
        elif isinstance(holder, Array):
            row[name] = leaf[0]
        else:
            found = type(leaf).__name__
            detail = f"expected a tensor or a payload, found {found}; select the other columns"
            raise ArgumentTypeError("bad_type", f"{where}({name!r})", detail)
    return row
