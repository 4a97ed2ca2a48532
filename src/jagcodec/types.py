"""Types of arguments and results, for annotations."""

from __future__ import annotations

import importlib
from typing import Any

# As in `jagcodec` itself: what needs no tensor does not wait for torch. Type checkers read
# `types.pyi`.
_HOME_OF = {
    "ColumnArrays": "rows.column_arrays",
    "FieldSchema": "columns.batch",
    "Layout": "train.rectangles",
    "PackedColumn": "rows.varlen",
    "PaddingSide": "train.rectangles",
}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jagcodec.types' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jagcodec.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
