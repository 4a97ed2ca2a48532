"""Packed columns that came in a message: their offsets are checked."""

from __future__ import annotations

from typing import Any

from jagcodec.columns.column import DictBatch, Packed, column_of
from jagcodec.errors import ArgumentError, WireFormatError
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.wire.checks import fail, inside


def check_packed(column: Any, pool: RowSplitsPool) -> None:
    """Check that offsets fit their values: those of a packed column, or of each in a dict."""
    holder = column_of(column)
    if isinstance(holder, DictBatch):
        for name, inner in column.items():
            try:
                check_packed(inner, pool)
            except WireFormatError as error:
                raise inside(error, name) from error
    elif isinstance(holder, Packed):
        try:
            holder.view("$", pool, detach=False)
        except ArgumentError as error:
            raise fail(error.reason, error.detail) from error
