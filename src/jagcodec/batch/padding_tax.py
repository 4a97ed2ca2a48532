"""What padding costs: the padding tax of a batch, per field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.pack.fields import pack_jagged_fields
from jagcodec.ragged.copy_rows import padded_shape
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import is_non_tensor
from jagcodec.ragged.row_splits import Lengths, RowSplitsPool, read_lengths
from jagcodec.wire.encoder import encode


@dataclass(frozen=True)
class FieldTax:
    """One column, in bytes.

    Attributes:
        name: The column; names of nested columns are joined with dots.
        layout: ``"jagged"``, ``"rectangular"`` or ``"object"``: how it is sent.
        padded_bytes: Its size as a rectangle.
        wire_bytes: Its size in a message.
    """

    name: str
    layout: str
    padded_bytes: int
    wire_bytes: int

    @property
    def saved_bytes(self) -> int:
        return self.padded_bytes - self.wire_bytes

    @property
    def saved_percent(self) -> float:
        return 100 * self.saved_bytes / self.padded_bytes if self.padded_bytes else 0.0


@dataclass(frozen=True)
class PaddingTax:
    """A batch, in bytes. `str()` of it is a table.

    Attributes:
        rows: N.
        fill: Share of the padded cells that are tokens, 0 to 1; 1 where nothing is jagged.
        fields: One `FieldTax` per column.
        overhead_bytes: What the message adds to its columns: header, row offsets, alignment.
    """

    rows: int
    fill: float
    fields: tuple[FieldTax, ...]
    overhead_bytes: int

    @property
    def padded_bytes(self) -> int:
        return sum(field.padded_bytes for field in self.fields)

    @property
    def wire_bytes(self) -> int:
        return sum(field.wire_bytes for field in self.fields) + self.overhead_bytes

    @property
    def saved_bytes(self) -> int:
        return self.padded_bytes - self.wire_bytes

    @property
    def saved_percent(self) -> float:
        return 100 * self.saved_bytes / self.padded_bytes if self.padded_bytes else 0.0

    def __str__(self) -> str:
        width = max([len("header and offsets"), *(len(field.name) for field in self.fields)])
        head = (
            f"{'column':<{width}}  {'layout':<11}  {'padded B':>13}  {'wire B':>13}  {'saved':>7}"
        )

        def line(name: str, layout: str, padded: int, wire: int, saved: float | None) -> str:
            share = "" if saved is None else f"{saved:6.1f}%"
            return f"{name:<{width}}  {layout:<11}  {padded:>13,}  {wire:>13,}  {share:>7}"

        return "\n".join(
            [
                f"{self.rows} rows, {self.fill:.1%} of the padded cells are tokens",
                head,
                *(
                    line(f.name, f.layout, f.padded_bytes, f.wire_bytes, f.saved_percent)
                    for f in self.fields
                ),
                line("header and offsets", "", 0, self.overhead_bytes, None),
                line("total", "", self.padded_bytes, self.wire_bytes, self.saved_percent),
            ]
        )


def padding_tax(
    source: TensorDictBase | Mapping[str, Any] | torch.Tensor | Iterable[int],
    *,
    lengths: Lengths | None = None,
    token_aligned_fields: Iterable[str] | None = None,
    padded_width: int | None = None,
    bytes_per_token: int = 8,
) -> PaddingTax:
    """What a batch costs as rectangles, and what it costs on this wire.

    Args:
        source: One of three. A batch as `pack_jagged_fields` makes it. Padded columns, with
            `lengths` and `token_aligned_fields` as there. Or bare lengths, (N,) integers: then
            the tax of one per-token column of `bytes_per_token` (int64 ids by default).
        lengths: Of padded columns: (N,) valid tokens per row.
        token_aligned_fields: Of padded columns: names of the per-token ones.
        padded_width: Width S of the rectangles; by default the longest row, or of padded columns
            their own, so that a batch measures less tax than the wider columns it came from.
        bytes_per_token: Of bare lengths: the size of one token's cell.

    Returns:
        Rows, fill, and padded, wire and saved bytes per field and in all. Of a batch, the wire
        bytes are those of the message that `encode` makes of it; of bare lengths, the column's
        cells and its row offsets, without a header.

    Raises:
        ArgumentError: A row is longer than `padded_width`, or as from `pack_jagged_fields`.
        ArgumentTypeError: As from `pack_jagged_fields`.

    Example:
        >>> from jagcodec import padding_tax
        >>> tax = padding_tax([1, 2, 9])
        >>> tax.rows, tax.padded_bytes, tax.wire_bytes, round(tax.fill, 2)
        (3, 216, 128, 0.44)
    """
    if isinstance(source, TensorDictBase):
        return _of_batch(source, {}, padded_width)
    if isinstance(source, Mapping):
        td, padded = packed_columns(source, lengths, token_aligned_fields, "padding_tax")
        return _of_batch(td, {} if padded_width else padded, padded_width)
    return tax_of_lengths(source, padded_width, bytes_per_token, "padding_tax")


def packed_columns(
    source: Mapping[str, Any],
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None,
    where: str,
) -> tuple[TensorDictBase, dict[tuple[str, ...], int]]:
    """Padded columns as a batch, and the bytes of each as it was; `where` names the function."""
    if lengths is None:
        raise ArgumentError(
            "bad_option",
            f"{where}(lengths)",
            "expected the lengths of padded columns, found None; without them nothing is "
            "known to be padding",
        )
    td = pack_jagged_fields(source, lengths=lengths, token_aligned_fields=token_aligned_fields)
    padded: dict[tuple[str, ...], int] = {
        (name,): column.numel() * column.itemsize
        for name, column in source.items()
        if isinstance(column, torch.Tensor) and not is_jagged(column)
    }
    return td, padded


def tax_of_lengths(
    source: torch.Tensor | Iterable[int],
    padded_width: int | None,
    bytes_per_token: int,
    function: str,
) -> PaddingTax:
    """The tax of one per-token column of these lengths; `function` is named in errors."""
    where = f"{function}(source)"
    try:
        tensor = torch.as_tensor(source if isinstance(source, torch.Tensor) else list(source))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(
            "bad_type", where, f"expected a batch, columns or lengths, found {error}"
        ) from error
    if not tensor.numel():
        tensor = tensor.to(torch.int64)
    if (
        isinstance(bytes_per_token, bool)
        or not isinstance(bytes_per_token, int)
        or (bytes_per_token < 1)
    ):
        raise ArgumentError(
            "bad_option",
            f"{function}(bytes_per_token)",
            f"expected 1 or more, found {bytes_per_token!r}",
        )
    row_splits = read_lengths(tensor, where)
    total = row_splits.total
    width = checked_width(row_splits.max, padded_width, where, function)
    cells = row_splits.rows * width
    field = FieldTax("tokens", "jagged", cells * bytes_per_token, total * bytes_per_token)
    fill = total / cells if cells else 1.0
    return PaddingTax(row_splits.rows, fill, (field,), row_splits.host.nbytes)


def _of_batch(
    td: TensorDictBase, padded: Mapping[tuple[str, ...], int], width: int | None
) -> PaddingTax:
    if not td.batch_dims:
        raise ArgumentError(
            "bad_shape", "padding_tax(source)", "expected batch size (N, ...), found no batch dim"
        )
    fields: list[FieldTax] = []
    valid = cells = 0
    pool = RowSplitsPool()
    for key, leaf in _leaves(td, ()):
        name = ".".join(key)
        if is_non_tensor(leaf):
            size = _size(encode({name: leaf})) - _size(encode({name: None})) + 1
            fields.append(FieldTax(name, "object", size, size))
        elif is_jagged(leaf):
            path = f"padding_tax({name!r})"
            view = view_of(leaf, path, pool)
            shape = padded_shape(
                view, checked_width(view.row_splits.max, width, path, "padding_tax")
            )
            rectangle = padded.get(key, math.prod(shape) * view.dtype.itemsize)
            size = math.prod(view.values_shape) * view.dtype.itemsize
            fields.append(FieldTax(name, "jagged", rectangle, size))
            valid += size
            cells += rectangle
        else:
            size = leaf.numel() * leaf.itemsize
            fields.append(FieldTax(name, "rectangular", size, size))

    overhead = _size(encode(td)) - sum(field.wire_bytes for field in fields)
    return PaddingTax(td.batch_size[0], valid / cells if cells else 1.0, tuple(fields), overhead)


def _leaves(td: TensorDictBase, above: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    if isinstance(td, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type",
            f"padding_tax({'.'.join(above) or 'source'!r})",
            "expected a TensorDict, found a lazy stack; call .contiguous() on it",
        )
    for name, leaf in td.items():
        key = (*above, name)
        if isinstance(leaf, TensorDictBase) and not is_non_tensor(leaf):
            yield from _leaves(leaf, key)
        else:
            yield key, leaf


def checked_width(longest: int, width: int | None, path: str, function: str) -> int:
    """The width of rectangles that hold a longest row; `function` is named in errors."""
    if width is None:
        return longest
    if isinstance(width, bool) or not isinstance(width, int):
        raise ArgumentTypeError(
            "bad_type", f"{function}(padded_width)", f"expected a width, found {width!r}"
        )
    if longest > width:
        raise ArgumentError(
            "row_too_long", path, f"expected rows of at most {width} tokens, found {longest}"
        )
    return width


def _size(frames: Iterable[Any]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)
