"""`padding_tax`: bytes of a batch as rectangles, as a message, and with each option."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jagcodec._arguments import flag_of, integer_of, whole_number
from jagcodec._compiling import untraced
from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import to_send
from jagcodec.columns.column import column_of
from jagcodec.errors import ArgumentTypeError, brief, describe
from jagcodec.forward.tax import (
    OVERHEAD,
    ColumnTax,
    PaddingTax,
    rectangle_width,
    tax_of_lengths,
)
from jagcodec.memory.arrays import tensor_type
from jagcodec.rows.lengths import Lengths, read_lengths
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.train.describe import describe_message, open_source
from jagcodec.wire.encoder import encode
from jagcodec.wire.frames import is_blob
from jagcodec.wire.opened import bytes_of, opened
from jagcodec.wire.spec import TORCH_ITEMSIZES
from jagcodec.wire.wire_batch import WireBatch, open_memory


@untraced
def padding_tax(
    source: Any,
    *,
    lengths: Lengths | None = None,
    token_aligned_fields: Iterable[str] | None = None,
    padded_width: int | None = None,
    options: bool = False,
) -> PaddingTax:
    """Compare the bytes of a batch as rectangles with its bytes in a message.

    Example:
        >>> import torch
        >>> from jagcodec import padding_tax
        >>> ids = torch.arange(600).view(2, 300)
        >>> tax = padding_tax({"ids": ids}, lengths=[100, 300], options=True)
        >>> column = tax.columns[0]
        >>> column.padded_bytes, column.wire_bytes, column.narrow_bytes, round(tax.fill, 2)
        (4800, 3200, 800, 0.67)

    Args:
        source: A batch in any form. Or padded columns, with `lengths` and `token_aligned_fields`.
            Or bare lengths, (N,) integers, which stand for one column of int64 tokens.
        lengths: For padded columns, as for `pack_jagged_fields`.
        token_aligned_fields: For padded columns, as for `pack_jagged_fields`.
        padded_width: Width S of the rectangles. By default it is the longest row, or the width that
            padded columns have. So a packed batch shows less tax than the wider columns that it
            came from.
        options: Measure `narrow` and `elide` of `encode` too: the batch is encoded once for each.

    Returns:
        Rows, fill, and the bytes of each column. Wire bytes are the bytes in the message that
        `encode` makes of the batch without options. For bare lengths, they are the column's cells
        and its row offsets, without a header.

    Raises:
        ArgumentError: A row is longer than `padded_width`, or `pack_jagged_fields` raises it.
        ArgumentTypeError: `source` has another type, or `encode` raises it.
        WireFormatError: A message is malformed.
    """
    if padded_width is not None:
        if integer_of(padded_width) is None:
            detail = f"expected a width, found {brief(padded_width)}"
            raise ArgumentTypeError("bad_type", "padding_tax(padded_width)", detail)
        padded_width = whole_number(padded_width, 0, "padding_tax(padded_width)")
    options = flag_of(options, "padding_tax(options)")
    if isinstance(source, Mapping) and lengths is not None:
        names = token_aligned_fields
        pack = module_with_torch("produce.fields", _SOURCE).pack_jagged_fields
        td = pack(source, lengths=lengths, token_aligned_fields=names)
        holders = {name: column_of(column) for name, column in source.items()}
        padded = {
            name: holder.value.numel() * holder.value.itemsize
            for name, holder in holders.items()
            if holder.has_tensor and holder.jagged_view(_SOURCE, RowSplitsPool()) is None
        }
        return _measured(td, padded_width, options, padded if padded_width is None else {})
    if not _is_open(source) and not _may_be_message(source):
        several = isinstance(source, (list, tuple)) and source
        if several and (_may_be_batch(source[0]) or _may_be_message(source[0])):
            detail = "expected one batch, found a list of them; concat_rows makes one"
            raise ArgumentTypeError("bad_type", _SOURCE, detail)
        return _of_lengths(source, padded_width)
    batch = opened(source, _SOURCE)
    if isinstance(batch, WireBatch):
        return _measured(to_send(batch), padded_width, options, {}, batch.meta or None)
    is_tensordict = column_of(batch).leaves() is not None
    value = batch if is_tensordict else to_send(open_memory(batch, _SOURCE))
    return _measured(value, padded_width, options, {})


_SOURCE = "padding_tax(source)"
_LAYOUT_OF_KIND = {
    "jagged": "jagged",
    **dict.fromkeys(("tensor", "array"), "rectangular"),
    **dict.fromkeys(("object", "object_array", "list", "value"), "object"),
}


def _is_open(source: Any) -> bool:
    """Whether it is a batch, and neither a message nor the lengths of rows."""
    holder = column_of(source)
    return holder.has_columns or holder.own_objects() is not None


def _may_be_batch(item: Any) -> bool:
    """Whether an item of a list is a batch, open or in frames."""
    return _is_open(item) or isinstance(item, list)


def _may_be_message(source: Any) -> bool:
    """Whether it is a message, and not the lengths of rows."""
    if isinstance(source, (list, tuple)):  # numbers of numpy and torch are buffers too
        start = source[0] if source else 0
        return getattr(start, "ndim", 1) > 0 and bytes_of(start) is not None
    if isinstance(source, (bytes, bytearray, memoryview)):
        return True
    data = bytes_of(source)  # a blob may be an array of bytes; no lengths begin like one
    return data is not None and is_blob(data)


def _of_lengths(source: Any, padded_width: int | None) -> PaddingTax:
    if not isinstance(source, (list, tuple, np.ndarray, tensor_type())):
        detail = f"expected a batch, columns or lengths, found {describe(source)}"
        raise ArgumentTypeError("bad_type", _SOURCE, detail)
    return tax_of_lengths(read_lengths(source, _SOURCE).lengths, padded_width, _SOURCE)


def _measured(
    value: Any,
    padded_width: int | None,
    options: bool,
    padded: Mapping[str, int],  # bytes of columns that were padded
    meta: Any = None,
) -> PaddingTax:
    """The report of a value that `encode` accepts."""
    switches = [(False, False), *((True, False), (False, True), (True, True))[: 3 * options]]
    frames = [encode(value, narrow=narrow, elide=elide, meta=meta) for narrow, elide in switches]
    messages = [describe_message(open_source(each, "padding_tax")) for each in frames]
    plain = messages[0]
    columns: list[ColumnTax] = []
    valid = cells = 0
    for parts in zip(*(message.columns for message in messages), strict=True):
        column = parts[0]
        rectangle = column.bytes
        if column.rows is not None:
            rows = plain.rows_of[column.rows]
            dims = [dim for dim in (column.shape or ())[1:] if dim is not None]
            token = math.prod(dims) * TORCH_ITEMSIZES[column.dtype or ""]
            width = rectangle_width(rows.max, padded_width, f"padding_tax({column.name!r})")
            rectangle = padded.get(column.name, rows.rows * width * token)
            valid += rows.tokens * token
            cells += rectangle
        layout = _LAYOUT_OF_KIND.get(column.kind, "other")
        columns.append(ColumnTax(column.name, layout, rectangle, *(part.bytes for part in parts)))
    overhead = ColumnTax(OVERHEAD, "", 0, *(message.overhead for message in messages))
    return PaddingTax(plain.rows or 0, valid / cells if cells else 1.0, tuple(columns), overhead)
