"""Packed columns that came in a message: their offsets are checked."""

from __future__ import annotations

from typing import Any

from jagcodec.errors import ArgumentError, WireFormatError
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen
from jagcodec.wire.checks import fail, inside


def check_packed(column: Any, pool: RowSplitsPool) -> None:
    """Check that offsets fit their values: those of a packed column, or of each in a dict."""
    if isinstance(column, dict):
        for name, inner in column.items():
            try:
                check_packed(inner, pool)
            except WireFormatError as error:
                raise inside(error, name) from error
    elif isinstance(column, PackedColumn):
        try:
            view_of_varlen(column, "$", pool)
        except ArgumentError as error:
            raise fail(error.reason, error.detail) from error
