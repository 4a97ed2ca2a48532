"""Packing written out in plain Python lists: the oracle of everything that packs.

Nothing here calls the code under test, or numpy. A row is a list of tokens; a buffer is a list of
cells, and None is a pad.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class WrittenOut:
    """The buffers, as they must be."""

    rows: list[list[Any]]
    padded: list[int]  # the length of each padded row; the last is a tail of its own, if there is
    cp_size: int
    cp_layout: str

    def buffer(self, shift=0):
        """The whole buffer."""
        cells = []
        rows = self.rows + [[]] * (len(self.padded) - len(self.rows))
        for row, size in zip(rows, self.padded, strict=True):
            for j in range(size):
                token = j - shift
                cells.append(row[token] if j < len(row) and 0 <= token < len(row) else None)
        return cells

    def positions(self, *, through_pads):
        """The position of every cell of the whole buffer."""
        cells = []
        rows = self.rows + [[]] * (len(self.padded) - len(self.rows))
        for row, size in zip(rows, self.padded, strict=True):
            cells += [j if through_pads or j < len(row) else 0 for j in range(size)]
        return cells

    def held(self, cells, rank):
        """What a rank holds of a whole buffer."""
        if rank is None or self.cp_size == 1:
            return cells
        if self.cp_layout == "contiguous":
            size = len(cells) // self.cp_size
            return cells[rank * size : (rank + 1) * size]
        padded, at = [], 0
        for size in self.padded if self.cp_layout == "zigzag" else [len(cells)]:
            padded.append(cells[at : at + size])
            at += size
        mine = []
        for row in padded:
            size = len(row) // (2 * self.cp_size)
            chunks = [row[i * size : (i + 1) * size] for i in range(2 * self.cp_size)]
            mine += chunks[rank] + chunks[2 * self.cp_size - 1 - rank]
        return mine

    def unpacked(self, computed, shift=0):
        """Rows of what was computed for each cell of the whole buffer; None where there is none."""
        rows, at = [], 0
        for row, size in zip(self.rows, self.padded, strict=False):
            cells = computed[at : at + size]
            tokens = range(len(row))
            rows.append([cells[j - shift] if j - shift in tokens else None for j in tokens])
            at += size
        return rows


def written_out(
    rows,
    row_multiple=1,
    total_multiple=1,
    total=None,
    min_total=0,
    tail=None,
    cp_size=1,
    cp_layout="zigzag",
):
    """The buffers of rows, or None where the arguments do not divide."""
    padded = []
    for row in rows:
        size = len(row)
        while size % row_multiple:
            size += 1
        padded.append(size)
    whole = sum(padded)
    if total is None:
        total = max(whole, min_total)
        while total % total_multiple:
            total += 1
    if total > whole and tail == "last_row":
        padded[-1] += total - whole
    elif total > whole:
        padded.append(total - whole)
    sizes, chunks = [total], cp_size
    if cp_layout == "zigzag":
        sizes = padded
    if cp_layout != "contiguous":
        chunks *= 2
    if cp_size > 1 and any(size % chunks for size in sizes):
        return None
    return WrittenOut(rows, padded, cp_size, cp_layout)


def multiple_of(cp_size, cp_layout):
    """The number of chunks of a padded row or of the buffer."""
    if cp_size == 1:
        return 1
    return cp_size if cp_layout == "contiguous" else 2 * cp_size
