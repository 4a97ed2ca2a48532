"""The picture of the README: what a padded batch of the record holds, and what is sent of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.report import FIRST, trip_of
from benchmarks.shapes import Case

SCALE, GAP, TOP = 0.4, 36, 30  # pixels per token of a row; between the two figures; above them
TOKENS, PADDING = "#4c78a8", "#dcdcdc"


def picture(report: Mapping[str, Any]) -> str:
    """SVG: each row of the batch as a bar in its rectangle, and the same tokens without padding.

    Both areas are to one scale, a pixel wide for each row. The bytes are those of the record, and
    the lengths those of the batch it was made with.
    """
    trip = trip_of(report, FIRST)
    lengths = Case.parse(FIRST).lengths()
    rows, width = len(lengths), int(lengths.max())
    bottom = TOP + round(width * SCALE)
    bars = "".join(f"V{bottom - n * SCALE:.4g}h1" for n in lengths.tolist())
    packed = round(rows * lengths.sum() / (rows * width))
    left = rows + GAP
    sent = trip["sides"]["fused"]["wire_bytes"] / 1e6
    padded = trip["padded_bytes"] / 1e6
    across, height = left + packed + 12, bottom + 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {height}" '
            f'width="{across}" height="{height}" role="img">',
            "<style>text{font:19px sans-serif;fill:#666}</style>",
            f'<text x="0" y="18">{rows} rows, padded to the longest: {padded:.2f} MB</text>',
            f'<rect x="0" y="{TOP}" width="{rows}" height="{bottom - TOP}" fill="{PADDING}"/>',
            f'<path d="M0 {bottom}{bars}V{bottom}z" fill="{TOKENS}"/>',
            f'<text x="{left}" y="18">jagcodec: {sent:.2f} MB</text>',
            f'<rect x="{left}" y="{TOP}" width="{packed}" height="{bottom - TOP}" '
            f'fill="{TOKENS}"/>',
            "</svg>",
            "",
        ]
    )
