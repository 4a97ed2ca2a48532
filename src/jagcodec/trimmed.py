"""Rectangles without the constant ends of their rows, and back to the very same rectangles.

A row of a padded column begins with a run of one value, or ends with one, or both: left and right
pads, which need not be the same value, nor the same in every row (the right pads of position ids
are each row's last position). What a row begins and ends with is read from the row itself, so that
no mask is needed and nothing is guessed: whatever lies between the two runs is kept as it is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from jagcodec import rowcopy
from jagcodec.buffers import Blank, IntArray, allocate, as_words, contiguous_bits, from_words
from jagcodec.rectangles import rows_in_place

Words: TypeAlias = npt.NDArray[Any]


class Trimmed(NamedTuple):
    """A rectangle of R rows of W cells, where R is the product of the dims before `dim`.

    Row i is its pad before, ``starts[i]`` times, then ``lengths[i]`` cells, then its pad after.

    Attributes:
        shape: Of the rectangle.
        dim: Which of its dims is W.
        starts: (R,) int32 where the cells of each row start (int64 from W = 2^31 on).
        lengths: (R,) how many there are.
        before: (R, ...) the pad before the cells of each row; (1, ...) of all; (0, ...) if no row
            has one.
        after: The same after them.
        cells: (sum(lengths), ...) end to end; or (R, ...), if `constant`, one for each row.
        constant: Whether the cells within each row are all the same, as those of a mask are.
    """

    shape: tuple[int, ...]
    dim: int
    starts: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    before: torch.Tensor
    after: torch.Tensor
    cells: torch.Tensor
    constant: bool

    @property
    def nbytes(self) -> int:
        tensors = (self.before, self.after, self.cells)
        return self.starts.nbytes + self.lengths.nbytes + sum(t.nbytes for t in tensors)


def trim(column: torch.Tensor) -> Trimmed:
    """A rectangle trimmed, whatever is in it.

    Args:
        column: (N, ..., W, ...) strided, with cells, on the CPU. W is its widest dim after the
            first.

    Returns:
        Memory of its own. Bits are compared, so -0.0 is not 0.0, and a NaN equals itself.
    """
    dim = 1 + int(np.argmax(column.shape[1:]))
    width = column.shape[dim]
    words = as_words(column)
    if dim > 1 or not words[0].is_contiguous():
        words = contiguous_bits(words).flatten(0, dim - 1)
    cells, stride = rows_in_place(words)
    grid = words.flatten(2).numpy()
    starts, lengths = _between(grid)
    kept = rowcopy.gather(cells, np.arange(len(grid)) * stride + starts, lengths)
    one_each = _one_each(kept.flatten(1).numpy(), lengths)
    if one_each is not None:
        kept = torch.from_numpy(one_each)
    parts = (
        torch.from_numpy(_pads(grid[:, 0], starts > 0)),
        torch.from_numpy(_pads(grid[:, -1], starts + lengths < width)),
        kept,
    )
    before, after, kept = (
        from_words(part.view(len(part), *words.shape[2:]), column.dtype) for part in parts
    )
    integer = np.int32 if width < 2**31 else np.int64
    return Trimmed(
        tuple(column.shape),
        dim,
        starts.astype(integer),
        lengths.astype(integer),
        before,
        after,
        kept,
        one_each is not None,
    )


def _between(grid: Words) -> tuple[IntArray, IntArray]:
    """Where the cells between the first and the last run of each row start, and how many."""
    rows, width = grid.shape[:2]
    if width == 1:
        return np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    words = _widest(grid)
    count = words.shape[2]
    flat = words.reshape(rows, -1)
    # The first run ends, and the last one begins, where a cell is unlike the one before.
    changes = flat[:, count:] != flat[:, :-count]
    first = changes.argmax(axis=1)
    starts = first // count + 1
    ends = width - 1 - changes[:, ::-1].argmax(axis=1) // count
    varied = changes[np.arange(rows), first]
    # A run of one cell is no pad: as a cell it costs less than a pad for every row.
    starts[starts == 1] = 0
    ends[ends == width - 1] = width
    # A row of one value is all pad after.
    return np.where(varied, starts, 0), np.where(varied, ends - starts, 0)


def _widest(grid: Words) -> Words:
    """The same cells as few words: comparing takes as long as there are words."""
    size = grid.shape[2] * grid.itemsize
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)
    return grid.view(f"i{width}")


def _pads(pads: Words, padded: npt.NDArray[np.bool_]) -> Words:
    """The pad of every row; one, if all that are padded have the same; none, if none is."""
    wanted = pads[padded]
    alike = not len(wanted) or bool((wanted == wanted[0]).all())
    return np.ascontiguousarray(wanted[:1] if alike else pads)


def _one_each(cells: Words, lengths: IntArray) -> Words | None:
    """One cell for each row, if those within each row are all the same."""
    if not len(cells):
        return None
    one_each: Words = cells[np.minimum(np.cumsum(lengths) - lengths, len(cells) - 1)]
    for rows in (_FEW_ROWS, len(lengths)):  # most columns are told by their first rows
        expected = np.repeat(one_each[:rows], lengths[:rows], axis=0)
        if not (cells[: len(expected)] == expected).all():
            return None
    return one_each


_FEW_ROWS = 8


def restore(trimmed: Trimmed) -> torch.Tensor:
    """The rectangle that was trimmed, bit for bit.

    Returns:
        Contiguous memory of its own, on the device of the cells.

    Raises:
        ValueError: The parts contradict each other: they are not from `trim`.
        MemoryError: The rectangle does not fit in memory.
    """
    _check(trimmed)
    shape, dim, cells = trimmed.shape, trimmed.dim, trimmed.cells
    rows, width = math.prod(shape[:dim]), shape[dim]
    starts, lengths = trimmed.starts.astype(np.int64), trimmed.lengths.astype(np.int64)
    kept = as_words(cells.cpu())
    before, after = (as_words(pad.cpu()).numpy() for pad in (trimmed.before, trimmed.after))
    pattern = None if trimmed.constant else _one_pattern(before, after)
    if pattern is not None:
        [room] = allocate([Blank((rows, width, *kept.shape[1:-1]), cells.dtype, _CPU)])
        firsts = np.cumsum(lengths) - lengths
        source = from_words(kept, cells.dtype)
        out = rowcopy.pad(
            source,
            firsts,
            lengths,
            room.tensor,
            starts,
            pattern,
            fresh=room.zeroed and not any(pattern),
        )
        return out.view(shape).to(cells.device)
    rest = width - starts - lengths
    if trimmed.constant:
        runs = [(before, starts), (kept.numpy(), lengths), (after, rest)]
    else:  # the cells are written over what is repeated too often
        runs = [(before, starts), (after, width - starts)]
    words = torch.from_numpy(_repeated(runs, rows))
    if not trimmed.constant:
        rowcopy.scatter(kept, lengths, words, np.arange(rows) * width + starts)
    return from_words(words, cells.dtype).view(shape).to(cells.device)


_CPU = torch.device("cpu")


def _one_pattern(before: Words, after: Words) -> bytes | None:
    """The bits of the one element that all pads are made of; None if there are several."""
    elements = np.concatenate([pad.reshape(-1, pad.shape[-1]) for pad in (before, after)])
    if not len(elements):
        return bytes(elements.itemsize * elements.shape[1])
    return elements[0].tobytes() if (elements == elements[0]).all() else None


def _repeated(runs: list[tuple[Words, IntArray]], rows: int) -> Words:
    """Row after row, the cell of each run as often as it says."""
    each = [np.broadcast_to(cell if len(cell) else 0, (rows, *cell.shape[1:])) for cell, _ in runs]
    counts = np.stack([count for _, count in runs], axis=1)
    cells = np.stack(each, axis=1)
    return np.repeat(cells.reshape(-1, *cells.shape[2:]), counts.reshape(-1), axis=0)


def _check(trimmed: Trimmed) -> None:
    shape, dim, starts, lengths = trimmed.shape, trimmed.dim, trimmed.starts, trimmed.lengths
    if not all(type(size) is int and size >= 0 for size in shape) or not 0 < dim < len(shape):
        raise ValueError(f"expected a shape and one of its dims, found {shape} and {dim}")
    rows, width, inner = math.prod(shape[:dim]), shape[dim], shape[dim + 1 :]
    for numbers in (starts, lengths):
        if numbers.dtype.kind != "i" or numbers.shape != (rows,) or (numbers < 0).any():
            raise ValueError(f"expected {rows} starts and lengths from 0 on")
    # No sum of a start and a length, which could overflow.
    if (starts > width).any() or (lengths > width - starts).any():
        raise ValueError(f"expected cells within the width {width}")
    total = rows if trimmed.constant else int(lengths.sum(dtype=np.int64))
    if trimmed.cells.shape != (total, *inner):
        raise ValueError(f"expected cells {(total, *inner)}, found {tuple(trimmed.cells.shape)}")
    padded = {"before": (starts > 0).any(), "after": (starts + lengths < width).any()}
    for name, needed in padded.items():
        pad = getattr(trimmed, name)
        if pad.dtype != trimmed.cells.dtype or pad.shape[1:] != inner:
            raise ValueError(f"expected pads like the cells {name} them")
        if len(pad) not in ({1, rows} if needed else {0, 1, rows}):
            raise ValueError(f"expected a pad {name} the cells of all rows, or of each")
