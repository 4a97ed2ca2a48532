"""What padding costs rows, in bytes: `PaddingTax`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jagcodec.errors import ArgumentError, shown
from jagcodec.rows.length_array import IntArray

OVERHEAD = "header and offsets"

WORTH = 0.05
"""The share of a message that an option must save to be worth it."""

_FORMS = ("padded", "wire", "narrow", "elide", "both")


@dataclass(frozen=True)
class ColumnTax:
    """One column, in bytes; None if they were not measured.

    Cells that columns share count for the first.
    """

    name: str  # names of nested columns are joined with dots
    layout: str  # "jagged", "rectangular", "object" or "other": how it is sent
    padded_bytes: int  # as a rectangle
    wire_bytes: int  # in a message without options
    narrow_bytes: int | None = None  # with narrow
    elide_bytes: int | None = None  # with elide
    both_bytes: int | None = None

    @property
    def saved_percent(self) -> float:
        """How much smaller it is in a message than as a rectangle."""
        saved = self.padded_bytes - self.wire_bytes
        return 100 * saved / self.padded_bytes if self.padded_bytes else 0.0


@dataclass(frozen=True)
class PaddingTax:
    """A batch, in bytes. `str()` of it is a table."""

    rows: int
    fill: float  # share of the padded cells that are tokens, 0 to 1; 1 if nothing is jagged
    columns: tuple[ColumnTax, ...]
    overhead: ColumnTax  # what a message adds to its columns: header, offsets, gaps, `meta`

    @property
    def total(self) -> ColumnTax:
        """The sums over all columns and the overhead."""
        parts = (*self.columns, self.overhead)
        sizes = [[getattr(part, f"{form}_bytes") for part in parts] for form in _FORMS]
        sums: list[Any] = [None if None in column else sum(column) for column in sizes]
        return ColumnTax("total", "", *sums)

    @property
    def advice(self) -> str:
        """One sentence: the fewest options of `encode` that save most. Empty if not measured."""
        total = self.total
        sizes = {
            "narrow=True": total.narrow_bytes,
            "elide=True": total.elide_bytes,
            "narrow=True, elide=True": total.both_bytes,
        }
        known = {name: size for name, size in sizes.items() if size is not None}
        if not known or not total.wire_bytes:
            return ""
        near = min(known.values()) + WORTH * total.wire_bytes
        good = [name for name, size in known.items() if size <= near]
        name = min(good, key=lambda name: (len(name), known[name]))
        saved = 1 - known[name] / total.wire_bytes
        if saved < WORTH:
            return f"No option of encode saves {WORTH:.0%} of the bytes."
        return f"encode(..., {name}) saves {saved:.0%} of the bytes."

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "total": asdict(self.total), "advice": self.advice}

    def __str__(self) -> str:
        forms = [form for form in _FORMS if getattr(self.overhead, f"{form}_bytes") is not None]
        rows = []
        for part in (*self.columns, self.overhead, self.total):
            cells = [f"{getattr(part, f'{form}_bytes'):,}" for form in forms]
            saved = "" if part is self.overhead else f"{part.saved_percent:.1f}%"
            rows.append((shown(part.name, 32), part.layout, *cells, saved))
        head = ("column", "layout", *(f"{form} B" for form in forms), "saved")
        lines = [f"{self.rows} rows, {self.fill:.1%} of the padded cells are tokens"]
        lines += table(head, rows, right=range(2, len(head)))
        return "\n".join([*lines, self.advice] if self.advice else lines)


def tax_of_lengths(lengths: IntArray, padded_width: int | None, path: str) -> PaddingTax:
    """The tax of one column of int64 tokens, without a header."""
    rows, tokens = len(lengths), int(lengths.sum())
    cells = rows * rectangle_width(int(lengths.max(initial=0)), padded_width, path)
    column = ColumnTax("tokens", "jagged", 8 * cells, 8 * tokens)
    overhead = ColumnTax(OVERHEAD, "", 0, 8 * (rows + 1))
    return PaddingTax(rows, tokens / cells if cells else 1.0, (column,), overhead)


def rectangle_width(longest: int, padded_width: int | None, path: str) -> int:
    """The width of a rectangle of rows, of which this is the longest."""
    if padded_width is not None and longest > padded_width:
        detail = f"expected rows of at most {padded_width} tokens, found {longest}"
        raise ArgumentError("row_too_long", path, detail)
    return longest if padded_width is None else padded_width


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Lines of cells in columns as wide as they must be; those of `right` are numbers."""
    widths = [max(map(len, cells)) for cells in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
