"""What a batch costs on a link, and why: the taxes of padding, of repeats, and of width."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from jagcodec.batch.describe import ColumnDescription, MessageDescription, describe, open_message
from jagcodec.batch.padding_tax import checked_width, packed_columns, tax_of_lengths
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.ragged.row_splits import Lengths
from jagcodec.wire.compress import Compress, compressed, library, usable_level
from jagcodec.wire.decoder import decode
from jagcodec.wire.encoder import encode
from jagcodec.wire.frames import finished, frames_of
from jagcodec.wire.spec import BLOB_MAGIC, TORCH_DTYPES
from jagcodec.wire.wire_batch import WireBatch, open_wire

WORTH = 0.05
"""The share of a message that an option must save to be worth it."""


@dataclass(frozen=True)
class Taxes:
    """A column of a batch, or all of it, in bytes under each option.

    Attributes:
        name: The column; names of nested columns are joined with dots.
        layout: ``"jagged"``, ``"rectangular"``, ``"object"`` or ``"other"``: how it is sent; empty
            of what is no column.
        padded_bytes: Its size as a rectangle; of what has none, its size as it is sent.
        jagged_bytes: Its size in a message without options.
        narrow_bytes: With `narrow`. This and those below are None of bare lengths.
        elide_bytes: With `elide`. Cells that columns share are counted at the first that names
            them, with the tables and indices that say how a column is made of them.
        both_bytes: With both.
    """

    name: str
    layout: str
    padded_bytes: int
    jagged_bytes: int
    narrow_bytes: int | None = None
    elide_bytes: int | None = None
    both_bytes: int | None = None

    @property
    def padding_bytes(self) -> int:
        """The tax of padding: what the rectangle takes beyond the rows."""
        return self.padded_bytes - self.jagged_bytes

    @property
    def repeats_bytes(self) -> int | None:
        """The tax of repeats: what `elide` saves.

        Below 0 where a table comes on top of cells that other columns share, counted at this one.
        """
        return None if self.elide_bytes is None else self.jagged_bytes - self.elide_bytes

    @property
    def width_bytes(self) -> int | None:
        """The tax of width: what `narrow` saves besides `elide`."""
        if self.elide_bytes is None or self.both_bytes is None:
            return None
        return self.elide_bytes - self.both_bytes

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "name": self.name,
            "layout": self.layout,
            **{f"{name}_bytes": getattr(self, f"{name}_bytes") for name in (*_FORMS, *_TAXES)},
        }


_FORMS = ("padded", "jagged", "narrow", "elide", "both")
_TAXES = ("padding", "repeats", "width")


@dataclass(frozen=True)
class MessageNow:
    """A message that was measured, as it is.

    Attributes:
        message_bytes: Its size: of a blob or a file with the preamble and the gaps between frames.
        narrow: Whether cells of it are stored narrow.
        elide: Whether what columns repeat is in it once.
        compress: ``"zstd"`` if frames are compressed, otherwise None.
        checksum: Whether it has checksums.
    """

    message_bytes: int
    narrow: bool
    elide: bool
    compress: str | None
    checksum: bool

    def __str__(self) -> str:
        named = [name for name in ("narrow", "elide", "checksum") if getattr(self, name)]
        named += [self.compress] if self.compress else []
        return f"the message takes {self.message_bytes:,} B now, with {_listed(named) or 'none'}"


@dataclass(frozen=True)
class TaxReport:
    """A batch in bytes, as a rectangle and under the options of `encode`. `str()` is a table.

    Attributes:
        rows: N.
        fill: Share of the padded cells that are tokens, 0 to 1; 1 where nothing is jagged.
        columns: One `Taxes` per column.
        overhead: What a message adds to its columns: header, offsets of rows, alignment, and
            what belongs to no column. A rectangle has none, so its `padded_bytes` are 0.
        compress: ``"zstd"`` if `compressed_bytes` were asked for, otherwise None.
        compressed_bytes: The whole message with `narrow`, `elide` and `compress`; None where the
            library is not installed, and of bare lengths.
        message: What a message that was measured is now; None of anything else.
    """

    rows: int
    fill: float
    columns: tuple[Taxes, ...]
    overhead: Taxes
    compress: str | None
    compressed_bytes: int | None
    message: MessageNow | None

    @property
    def _whole(self) -> Taxes:
        parts = (*self.columns, self.overhead)
        padded, jagged = (
            sum(getattr(part, f"{form}_bytes") for part in parts) for form in _FORMS[:2]
        )
        rest = (_sum(getattr(part, f"{form}_bytes") for part in parts) for form in _FORMS[2:])
        return Taxes("", "", padded, jagged, *rest)

    @property
    def padded_bytes(self) -> int:
        """All columns as rectangles."""
        return self._whole.padded_bytes

    @property
    def jagged_bytes(self) -> int:
        """The message without options."""
        return self._whole.jagged_bytes

    @property
    def narrow_bytes(self) -> int | None:
        """The message with `narrow`."""
        return self._whole.narrow_bytes

    @property
    def elide_bytes(self) -> int | None:
        """The message with `elide`."""
        return self._whole.elide_bytes

    @property
    def both_bytes(self) -> int | None:
        """The message with `narrow` and `elide`."""
        return self._whole.both_bytes

    @property
    def padding_bytes(self) -> int:
        """The tax of padding, of all columns; the overhead of the message is no part of it."""
        return sum(column.padding_bytes for column in self.columns)

    @property
    def repeats_bytes(self) -> int | None:
        """The tax of repeats: what `elide` saves of the message."""
        return self._whole.repeats_bytes

    @property
    def width_bytes(self) -> int | None:
        """The tax of width: what `narrow` saves besides."""
        return self._whole.width_bytes

    @property
    def advice(self) -> str:
        """One sentence: which options are worth it, those that save a twentieth or more."""
        return _advice(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON: names to numbers, strings, None, lists and dicts."""
        now = self.message
        sizes = {f"{name}_bytes": getattr(self, f"{name}_bytes") for name in (*_FORMS, *_TAXES)}
        return {
            "rows": self.rows,
            "fill": self.fill,
            **sizes,
            "compress": self.compress,
            "compressed_bytes": self.compressed_bytes,
            "message": None if now is None else vars(now).copy(),
            "columns": [column.as_dict() for column in self.columns],
            "overhead": self.overhead.as_dict(),
            "advice": self.advice,
        }

    def __str__(self) -> str:
        return _table(self)


def tax_report(
    source: Any,
    *,
    lengths: Lengths | None = None,
    token_aligned_fields: Iterable[str] | None = None,
    padded_width: int | None = None,
    bytes_per_token: int = 8,
    compress: Compress = "zstd",
) -> TaxReport:
    """What a batch costs as rectangles and under each option of `encode`, column by column.

    The batch is encoded once for each option, and nothing of it is changed; `padding_tax` takes
    less time where padding is all that is asked about.

    Example:
        >>> import torch
        >>> from jagcodec import tax_report
        >>> ids = torch.arange(600).view(2, 300)
        >>> report = tax_report({"ids": ids}, lengths=[100, 300], compress=None)
        >>> column = report.columns[0]
        >>> column.padded_bytes, column.jagged_bytes, column.narrow_bytes
        (4800, 3200, 800)
        >>> report.padding_bytes
        1600

    Args:
        source: A batch as `pack_jagged_fields` makes it; padded columns, with `lengths` and
            `token_aligned_fields` as there; a message of a batch, as frames, a blob, a `WireBatch`
            or the path of a file; or bare lengths, (N,) integers: then of one per-token column of
            `bytes_per_token`, of which only the padding is known.
        lengths: Of padded columns: (N,) valid tokens per row.
        token_aligned_fields: Of padded columns: names of the per-token ones.
        padded_width: Width S of the rectangles; by default the longest row of each column, or of
            padded columns their own.
        bytes_per_token: Of bare lengths: the size of one token's cell.
        compress: How the last form is compressed, as for `encode`; None: not at all.

    Returns:
        A `TaxReport`. Its sizes are those of the frames that `encode` makes under each option. A
        message is measured as it is, and as `encode` would make it of the same batch without
        checksums.

    Raises:
        ArgumentError: A row is longer than `padded_width`; `compress` is not as for `encode`; or
            as from `pack_jagged_fields`.
        ArgumentTypeError: `source` or an option is of another type.
        UnsupportedTypeError: As from `encode`.
        WireFormatError: The message is malformed, or not that of a batch.
        OSError: The file cannot be read.
    """
    level = None if compress is None else usable_level(compress)
    _check_width(padded_width)
    if _is_message(source):
        return _of_message(source, padded_width, level)
    if isinstance(source, TensorDictBase):
        return _of_batch(source, {}, padded_width, level)
    if isinstance(source, Mapping):
        td, padded = packed_columns(source, lengths, token_aligned_fields, _HERE)
        return _of_batch(td, {} if padded_width is not None else padded, padded_width, level)
    tax = tax_of_lengths(source, padded_width, bytes_per_token, _HERE)
    (field,) = tax.fields
    column = Taxes(field.name, field.layout, field.padded_bytes, field.wire_bytes)
    overhead = Taxes(_OVERHEAD, "", 0, tax.overhead_bytes)
    codec = None if level is None else "zstd"
    return TaxReport(tax.rows, tax.fill, (column,), overhead, codec, None, None)


_HERE, _SOURCE = "tax_report", "tax_report(source)"
_OVERHEAD = "header and offsets"


def _check_width(width: Any) -> None:
    """Refuse what is no width before anything is encoded."""
    if type(width) is int and width < 0:
        raise ArgumentError(
            "bad_option",
            f"{_HERE}(padded_width)",
            f"expected 0 or more, found {width}; None takes the longest row",
        )
    checked_width(0, width, _SOURCE, _HERE)


# --- what is measured --------------------------------------------------------------------------


def _is_message(source: Any) -> bool:
    """Whether it is a message, and not the lengths of rows."""
    if isinstance(source, (WireBatch, str, os.PathLike, bytes, bytearray, memoryview)):
        return True
    if isinstance(source, (torch.Tensor, np.ndarray)):
        # A blob may be an array of bytes; no lengths begin like one.
        start = source.reshape(-1)[: len(BLOB_MAGIC)]
        return (
            source.dtype in (torch.uint8, np.dtype(np.uint8))
            and bytes(start.tolist()) == BLOB_MAGIC
        )
    if isinstance(source, Sequence) and len(source):
        return isinstance(source[0], (bytes, bytearray, memoryview))
    return False


def _of_message(source: Any, width: int | None, level: int | None) -> TaxReport:
    opened = source if isinstance(source, WireBatch) else open_wire(source)
    frames = opened.to_frames()
    now = describe(open_message(frames, _SOURCE))
    total = now.bytes
    if isinstance(source, (str, os.PathLike)):
        total = os.stat(source).st_size
    elif opened is not source:
        total = open_message(source, _SOURCE).bytes
    # A join, or what was chosen of a message, is a message of its own now.
    batch = open_wire(frames, allow_pickle=opened.source.allow_pickle)
    origin: Any = batch.source
    options: dict[str, Any] = {"allow_pickle": origin.allow_pickle}
    if origin.beside:
        value = decode(frames, **options)
    else:
        value, options["meta"] = batch.to_encode(), batch.meta or None
    message = MessageNow(total, now.narrow, now.elide, now.compress, now.checksum)
    return _measured(value, options, {}, width, level, len(batch), message)


def _of_batch(
    td: TensorDictBase,
    padded: Mapping[tuple[str, ...], int],
    width: int | None,
    level: int | None,
) -> TaxReport:
    if not td.batch_dims:
        raise ArgumentError(
            "bad_shape",
            _SOURCE,
            "expected batch size (N, ...), found no batch dim; set td.batch_size = [N]",
        )
    if isinstance(td, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type",
            _SOURCE,
            "expected a TensorDict, found a lazy stack; call .contiguous() on it",
        )
    return _measured(td, {}, padded, width, level, td.batch_size[0], None)


def _measured(
    value: Any,
    options: Mapping[str, Any],
    padded: Mapping[tuple[str, ...], int],
    width: int | None,
    level: int | None,
    rows: int,
    message: MessageNow | None,
) -> TaxReport:
    """The report of a value that `encode` takes with these options."""
    sizes: list[MessageDescription] = []
    smallest: Any = None
    for narrow, elide in ((False, False), (True, False), (False, True), (True, True)):
        smallest = encode(value, narrow=narrow, elide=elide, **options)
        sizes.append(describe(open_message(smallest, _SOURCE)))
    columns: list[Taxes] = []
    valid = cells = 0
    for parts in zip(*(size.columns for size in sizes), strict=True):
        plain: ColumnDescription = parts[0]
        name = ".".join(plain.keys)
        rectangle = plain.bytes
        if plain.rows is not None:
            lengths = sizes[0].rows_of[plain.rows].lengths
            token = _token_bytes(plain)
            longest = int(lengths.max(initial=0))
            wide = checked_width(longest, width, f"{_HERE}({name!r})", _HERE)
            rectangle = padded.get(plain.keys, len(lengths) * wide * token)
            valid += int(lengths.sum()) * token
            cells += rectangle
        layout = _LAYOUTS.get(plain.kind, "other")
        columns.append(Taxes(name, layout, rectangle, *(part.bytes for part in parts)))
    rest = [size.bytes - sum(column.bytes for column in size.columns) for size in sizes]
    overhead = Taxes(_OVERHEAD, "", 0, *rest)
    fill = valid / cells if cells else 1.0
    codec, packed = (None, None) if level is None else ("zstd", _compressed_size(smallest, level))
    return TaxReport(rows, fill, tuple(columns), overhead, codec, packed, message)


_LAYOUTS = {
    "jagged": "jagged",
    **dict.fromkeys(("tensor", "array"), "rectangular"),
    **dict.fromkeys(("object", "object_array", "list", "value"), "object"),
}


def _token_bytes(column: ColumnDescription) -> int:
    """Bytes of one token of a jagged column, as wide as its dtype."""
    dims = [dim for dim in (column.shape or ())[1:] if dim is not None]
    return math.prod(dims) * TORCH_DTYPES[column.dtype or ""]


def _compressed_size(frames: Any, level: int) -> int | None:
    """Bytes of a message once it is compressed; None without the library for that."""
    try:
        library()
    except ArgumentError:
        return None
    sent = frames_of(compressed(finished(frames, _SOURCE), level, False))
    return sum(memoryview(frame).nbytes for frame in sent)


def _sum(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


# --- what people read --------------------------------------------------------------------------


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _advice(report: TaxReport) -> str:
    plain, both = report.jagged_bytes, report.both_bytes
    if both is None or report.narrow_bytes is None or report.elide_bytes is None:
        return "A batch or a message says what narrow, elide and compress would save."
    # The fewest options that come near the least.
    least = min(plain, report.narrow_bytes, report.elide_bytes, both) + WORTH * plain
    single = [("narrow=True", report.narrow_bytes), ("elide=True", report.elide_bytes)]
    single.sort(key=lambda option: option[1])
    if plain <= least:
        named, size = "", plain
    elif single[0][1] <= least:
        named, size = single[0]
    else:
        named, size = "narrow=True with elide=True", both
    now = report.message
    used = now is not None and all(
        getattr(now, word) for word in ("narrow", "elide") if word in named
    )
    verdict = "Used already" if used else "Worth it"
    packed = report.compressed_bytes
    if packed is None or size - packed < WORTH * plain:
        if not named:
            return f"No option is worth it: none saves {WORTH:.0%} of the bytes."
        return f"{verdict}: {named} saves {1 - size / plain:.0%} of the bytes."
    last = f"compress={report.compress!r} with both: {1 - packed / plain:.0%}"
    if not named:
        return f"Worth it on slow links alone: {last}."
    return f"{verdict}: {named} saves {1 - size / plain:.0%}; on slow links {last}."


def _table(report: TaxReport) -> str:
    parts = (*report.columns, report.overhead)
    totals: list[int | None] = [getattr(report, f"{name}_bytes") for name in _FORMS]
    most = max(size or 0 for size in totals)
    divisor, unit = next(
        (d, u)
        for d, u in ((1, "B"), (1_000, "kB"), (1_000_000, "MB"), (1_000_000_000, "GB"))
        if most // d < 1_000_000_000 or u == "GB"
    )
    width = min(max(len(_OVERHEAD), *(len(part.name) for part in parts)), 20)

    def line(name: str, layout: str, sizes: Iterable[object]) -> str:
        shown = name if len(name) <= width else f"{name[: width - 3]}..."
        cells = (f"{size:>13}" for size in sizes)
        return f"{_printable(shown):<{width}}  {layout:<11}{''.join(cells)}".rstrip()

    def numbers(sizes: Iterable[int | None]) -> list[str]:
        return ["-" if size is None else f"{round(size / divisor):,}" for size in sizes]

    def share(tax: int | None, of: int) -> str:
        return "unknown" if tax is None else f"{tax / of if of else 0:.1%}"

    rows = f"{report.rows} row{'' if report.rows == 1 else 's'}"
    lines = [f"{rows}, {report.fill:.1%} of the padded cells are tokens"]
    if report.message is not None:
        lines.append(str(report.message))
    lines.append(line("column", "layout", [f"{name} {unit}" for name in _FORMS]))
    lines += [
        line(part.name, part.layout, numbers(getattr(part, f"{name}_bytes") for name in _FORMS))
        for part in parts
    ]
    lines.append(line("total", "", numbers(totals)))
    lines.append(
        f"taxes: padding {share(report.padding_bytes, report.padded_bytes)} of the rectangles, "
        f"repeats {share(report.repeats_bytes, report.jagged_bytes)} and "
        f"width {share(report.width_bytes, report.jagged_bytes)} of the rows"
    )
    if report.compressed_bytes is not None:
        lines.append(f"both and {report.compress}: {report.compressed_bytes:,} B")
    return "\n".join([*lines, report.advice])


def _printable(text: str) -> str:
    """A name that a stranger may have chosen, on one line."""
    return "".join(c if c.isprintable() else "?" for c in text)
