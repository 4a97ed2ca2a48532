"""Types of arguments and results, for annotations."""

from __future__ import annotations

from jagcodec.batch.packed import PackPlan
from jagcodec.batch.rectangles import Layout, PaddingSide
from jagcodec.ragged.varlen import PackedColumn
from jagcodec.wire.leaf import FieldSchema

__all__ = ["FieldSchema", "Layout", "PackPlan", "PackedColumn", "PaddingSide"]
