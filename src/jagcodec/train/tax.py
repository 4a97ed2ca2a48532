"""`padding_tax`: bytes of a batch as rectangles, as a message, and with each option."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jagcodec._arguments import int_or_none, require_flag, require_int
from jagcodec._compiling import untraced
from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import to_send
from jagcodec.columns.held import column_of
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe, shown
from jagcodec.memory.arrays import IntArray, tensor_type
from jagcodec.rows.lengths import Lengths, read_lengths
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.train.describe import describe_message, open_source
from jagcodec.wire.frames import is_blob
from jagcodec.wire.read.any_batch import bytes_of, opened
from jagcodec.wire.read.wire_batch import WireBatch, open_memory
from jagcodec.wire.spec import TORCH_ITEMSIZES
from jagcodec.wire.write.encoder import encode


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
        options: Measure `narrow` and `elide` of `encode` too. This encodes the batch four times
            instead of once, also if it is a message.

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
        if int_or_none(padded_width) is None:
            detail = f"expected a width, found {brief(padded_width)}"
            raise ArgumentTypeError("bad_type", "padding_tax(padded_width)", detail)
        padded_width = require_int(padded_width, 0, "padding_tax(padded_width)")
    options = require_flag(options, "padding_tax(options)")
    if isinstance(source, Mapping) and lengths is not None:
        pack = module_with_torch("produce.fields", _SOURCE).pack_jagged_fields
        td = pack(source, lengths=lengths, token_aligned_fields=token_aligned_fields)
        padded_bytes = _bytes_of_padded(source) if padded_width is None else {}
        return _measure(td, padded_width, options, known_padded_bytes=padded_bytes)
    for name, option in (("lengths", lengths), ("token_aligned_fields", token_aligned_fields)):
        if option is not None:
            detail = f"expected padded columns and their lengths with {name}, found "
            raise ArgumentError("bad_option", f"padding_tax({name})", detail + describe(source))
    if not _is_open(source) and not _may_be_message(source):
        return tax_of_lengths(_read_row_lengths(source), padded_width, _SOURCE)
    batch = opened(source, _SOURCE)
    if isinstance(batch, WireBatch):
        return _measure(to_send(batch), padded_width, options, meta=batch.meta or None)
    is_tensordict = column_of(batch).leaves() is not None
    value = batch if is_tensordict else to_send(open_memory(batch, _SOURCE))
    return _measure(value, padded_width, options)


_SOURCE = "padding_tax(source)"


# --- what the source is ------------------------------------------------------------------------


def _is_open(source: Any) -> bool:
    """Whether it is a batch, and neither a message nor the lengths of rows."""
    holder = column_of(source)
    return holder.has_columns or holder.objects_to_send() is not None


def _may_be_message(source: Any) -> bool:
    """Whether it is a message, and not the lengths of rows."""
    if isinstance(source, (list, tuple)):
        # Numbers of numpy and torch are buffers too, but have no dims.
        start = source[0] if source else 0
        return getattr(start, "ndim", 1) > 0 and bytes_of(start) is not None
    if isinstance(source, (bytes, bytearray, memoryview)):
        return True
    data = bytes_of(source)  # a blob may be an array of bytes; no lengths begin like one
    return data is not None and is_blob(data)


def _read_row_lengths(source: Any) -> IntArray:
    """The (N,) lengths in a source; an error if it does not hold lengths, or holds batches."""
    first = source[0] if isinstance(source, (list, tuple)) and source else None
    if _is_open(first) or isinstance(first, list) or _may_be_message(first):
        detail = "expected one batch, found a list of them; concat_rows makes one"
        raise ArgumentTypeError("bad_type", _SOURCE, detail)
    if not isinstance(source, (list, tuple, np.ndarray, tensor_type())):
        detail = f"expected a batch, columns or lengths, found {describe(source)}"
        raise ArgumentTypeError("bad_type", _SOURCE, detail)
    return read_lengths(source, _SOURCE).lengths


def _bytes_of_padded(source: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of each column that is a tensor, and not jagged already."""
    holders = {name: column_of(column) for name, column in source.items()}
    return {
        name: holder.value.numel() * holder.value.itemsize
        for name, holder in holders.items()
        if holder.has_tensor and holder.jagged_view(_SOURCE, RowSplitsPool()) is None
    }


# --- the report --------------------------------------------------------------------------------

_OVERHEAD = "header and offsets"

_WORTH = 0.05
"""The share of a message that an option must save to be advised."""


@dataclass(frozen=True)
class ColumnTax:
    """One column, in bytes; None for those that were not measured.

    Cells that columns share count for the first of them.
    """

    name: str  # names of nested columns are joined with dots
    layout: str  # "jagged", "rectangular", "object" or "other": how it is sent
    padded_bytes: int  # as a rectangle
    wire_bytes: int  # in a message without options
    narrow_bytes: int | None = None  # with narrow
    elide_bytes: int | None = None  # with elide
    both_bytes: int | None = None  # with both

    @property
    def saved_percent(self) -> float:
        """How much smaller it is in a message than as a rectangle."""
        saved = self.padded_bytes - self.wire_bytes
        return 100 * saved / self.padded_bytes if self.padded_bytes else 0.0


def _bytes_of_forms(part: ColumnTax) -> dict[str, int | None]:
    """The bytes of a column in each form, in the order of the fields of `ColumnTax`."""
    return {
        "padded": part.padded_bytes,
        "wire": part.wire_bytes,
        "narrow": part.narrow_bytes,
        "elide": part.elide_bytes,
        "both": part.both_bytes,
    }


@dataclass(frozen=True)
class PaddingTax:
    """A batch, in bytes. `str()` of it is a table."""

    rows: int
    fill: float  # share of the padded bytes that are tokens, 0 to 1; 1 if nothing is jagged
    columns: tuple[ColumnTax, ...]
    overhead: ColumnTax  # what a message adds to its columns: header, offsets, gaps, `meta`

    @property
    def total(self) -> ColumnTax:
        """The sums over all columns and the overhead."""
        parts = [_bytes_of_forms(part).values() for part in (*self.columns, self.overhead)]
        sizes: Any = zip(*parts, strict=True)  # of each form, the bytes of all parts
        sums: list[Any] = [None if None in of_form else sum(of_form) for of_form in sizes]
        return ColumnTax("total", "", *sums)

    @property
    def advice(self) -> str:
        """One sentence: the fewest options of `encode` that save most. Empty if not measured."""
        total = self.total
        sizes = {
            ("narrow=True",): total.narrow_bytes,
            ("elide=True",): total.elide_bytes,
            ("narrow=True", "elide=True"): total.both_bytes,
        }
        measured = {options: size for options, size in sizes.items() if size is not None}
        if not measured or not total.wire_bytes:
            return ""
        near = min(measured.values()) + _WORTH * total.wire_bytes
        good = [options for options, size in measured.items() if size <= near]
        best = min(good, key=lambda options: (len(options), measured[options]))
        saved = 1 - measured[best] / total.wire_bytes
        if saved < _WORTH:
            return f"No option of encode saves {_WORTH:.0%} of the bytes."
        return f"encode(..., {', '.join(best)}) saves {saved:.0%} of the bytes."

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "total": asdict(self.total), "advice": self.advice}

    def __str__(self) -> str:
        sizes = _bytes_of_forms(self.overhead)
        forms = [form for form, size in sizes.items() if size is not None]
        rows = []
        for part in (*self.columns, self.overhead, self.total):
            sizes = _bytes_of_forms(part)
            cells = [f"{sizes[form]:,}" for form in forms]
            saved = "" if part is self.overhead else f"{part.saved_percent:.1f}%"
            rows.append((shown(part.name, 32), part.layout, *cells, saved))
        head = ("column", "layout", *(f"{form} B" for form in forms), "saved")
        lines = [f"{self.rows} rows, {self.fill:.1%} of the padded cells are tokens"]
        lines += table(head, rows, right=range(2, len(head)))
        return "\n".join([*lines, self.advice] if self.advice else lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Lines of text in aligned columns; the columns of `right`, such as numbers, end aligned."""
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


# --- measuring ---------------------------------------------------------------------------------

_LAYOUT_OF_KIND = {
    "jagged": "jagged",
    **dict.fromkeys(("tensor", "array"), "rectangular"),
    **dict.fromkeys(("object", "object_array", "list", "value"), "object"),
}


def tax_of_lengths(lengths: IntArray, padded_width: int | None, path: str) -> PaddingTax:
    """The report of one column of int64 tokens in rows of these lengths, without a header."""
    rows, tokens = len(lengths), int(lengths.sum())
    cells = rows * _rectangle_width(int(lengths.max(initial=0)), padded_width, path)
    column = ColumnTax("tokens", "jagged", 8 * cells, 8 * tokens)
    overhead = ColumnTax(_OVERHEAD, "", 0, 8 * (rows + 1))
    return PaddingTax(rows, tokens / cells if cells else 1.0, (column,), overhead)


def _measure(
    value: Any,
    padded_width: int | None,
    options: bool,
    *,
    known_padded_bytes: Mapping[str, int] | None = None,
    meta: Any = None,
) -> PaddingTax:
    """The report of a value that `encode` accepts.

    `known_padded_bytes` has the bytes of columns that were padded before they became this value.
    """
    ways = [(False, False)]  # narrow and elide, in the order of the fields of `ColumnTax`
    if options:
        ways += [(True, False), (False, True), (True, True)]
    frames = [encode(value, narrow=narrow, elide=elide, meta=meta) for narrow, elide in ways]
    messages = [describe_message(open_source(each, "padding_tax")) for each in frames]
    plain = messages[0]
    columns: list[ColumnTax] = []
    token_bytes = padded_bytes = 0
    for parts in zip(*(message.columns for message in messages), strict=True):
        column = parts[0]
        padded_size = column.bytes
        if column.rows is not None:
            rows = plain.rows_of[column.rows]
            dims = [dim for dim in (column.shape or ())[1:] if dim is not None]
            bytes_per_token = math.prod(dims) * TORCH_ITEMSIZES[column.dtype or ""]
            width = _rectangle_width(rows.max, padded_width, f"padding_tax({column.name!r})")
            by_width = rows.rows * width * bytes_per_token
            padded_size = (known_padded_bytes or {}).get(column.name, by_width)
            token_bytes += rows.tokens * bytes_per_token
            padded_bytes += padded_size
        layout = _LAYOUT_OF_KIND.get(column.kind, "other")
        columns.append(ColumnTax(column.name, layout, padded_size, *(part.bytes for part in parts)))
    overhead = ColumnTax(_OVERHEAD, "", 0, *(message.overhead for message in messages))
    fill = token_bytes / padded_bytes if padded_bytes else 1.0
    return PaddingTax(plain.rows or 0, fill, tuple(columns), overhead)


def _rectangle_width(longest: int, padded_width: int | None, path: str) -> int:
    """The width of the rectangle of rows, which are up to `longest` tokens long."""
    if padded_width is not None and longest > padded_width:
        detail = f"expected rows of at most {padded_width} tokens, found {longest}"
        raise ArgumentError("row_too_long", path, detail)
    return longest if padded_width is None else padded_width
