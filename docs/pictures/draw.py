"""Draws the pictures of docs/rows.md from what the library returns: python docs/pictures/draw.py"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import torch

from jagcodec import materialize, pack_jagged_fields

CELL, GAP, LINE = 26, 3, 46
COLOURS = {"prompt": "#4c78a8", "response": "#f58518", "pad": "#e4e4e4", "plain": "#72b7b2"}

LENGTHS = torch.tensor([3, 6, 4])
PROMPTS = torch.tensor([2, 3, 1])
IDS = torch.tensor([[11, 12, 13, 0, 0, 0], [21, 22, 23, 24, 25, 26], [31, 32, 33, 34, 0, 0]])
# For each token id, the part of its row that it belongs to.
PARTS = {
    int(token): "prompt" if i < prompt else "response"
    for row, prompt in zip(IDS, PROMPTS, strict=True)
    for i, token in enumerate(row)
    if token
}

Cell = tuple[str, str]  # text, colour
Grid = Sequence[Sequence[Cell]]


def token(number: int) -> Cell:
    """A token id as a cell; 0 is padding."""
    return (str(number), PARTS[number]) if number else ("", "pad")


def drawing(figures: Sequence[tuple[str, Grid]]) -> str:
    """Grids of cells under their captions, as SVG."""
    shapes, top, widest = [], 0, 0
    for caption, grid in figures:
        shapes.append(f'<text x="0" y="{top + 14}">{html.escape(caption)}</text>')
        top += 24
        for row in grid:
            for i, (text, colour) in enumerate(row):
                x = i * (CELL + GAP)
                fill = COLOURS[colour]
                shapes.append(
                    f'<rect x="{x}" y="{top}" width="{CELL}" height="{CELL}" fill="{fill}"/>'
                )
                if text:
                    shapes.append(
                        f'<text class="c" x="{x + CELL // 2}" y="{top + 17}">{text}</text>'
                    )
            widest = max(widest, len(row) * (CELL + GAP), 8 * len(caption))
            top += CELL + GAP
        top += LINE - CELL - GAP
    style = "text{font:13px sans-serif;fill:#666}.c{fill:#111;text-anchor:middle;font-size:12px}"
    size = f'width="{widest}" height="{top}" viewBox="0 0 {widest} {top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{style}</style>", *shapes, "</svg>", ""])


def numbers(values: Sequence[int]) -> Grid:
    """One row of plain numbers."""
    return [[(str(int(value)), "plain") for value in values]]


def rectangle(tensor: torch.Tensor) -> Grid:
    """The cells of a padded column."""
    return [[token(int(cell)) for cell in row] for row in tensor]


def pictures() -> dict[str, str]:
    """Name of each picture to its SVG."""
    td = pack_jagged_fields({"ids": IDS}, lengths=LENGTHS)
    ids = td["ids"]
    packed = materialize(td, "packed")["ids"]
    sides = {
        "right": materialize(td, pad_to_seqlen=7),
        "left": materialize(td, pad_to_seqlen=7, padding_side="left"),
        "left_right": materialize(td, padding_side="left_right", prompt_lengths=PROMPTS),
    }
    return {
        "jagged.svg": drawing(
            [
                ("a padded column (3, 6): 13 of 18 cells are tokens", rectangle(IDS)),
                ("the same rows, jagged: values", [[token(int(cell)) for cell in ids.values()]]),
                ("offsets, shared by all columns with these row lengths", numbers(ids.offsets())),
            ]
        ),
        "sides.svg": drawing(
            [(f'padding_side="{side}"', rectangle(batch["ids"])) for side, batch in sides.items()]
        ),
        "packed.svg": drawing(
            [
                ("values", [[token(int(cell)) for cell in packed.values]]),
                ("cu_seqlens (int32), max_seqlen = 6", numbers(packed.cu_seqlens)),
                ("position_ids", numbers(packed.position_ids)),
            ]
        ),
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        (Path(__file__).parent / name).write_text(svg)
