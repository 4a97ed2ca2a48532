"""Rectangles without the constant ends of their rows, and back.

A row of a padded column begins with a run of one value, ends with one, or both: its left and right
padding. The two values may differ, and may differ from row to row (position ids are padded on the
right with each row's last position). Both runs are read from the bits of the row, so no mask is
needed and no value is lost: of each run one cell is kept, and everything between the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from jagcodec import rowcopy
from jagcodec.memory.blocks import Wanted, allocate
from jagcodec.memory.tensor_bytes import as_bytes, as_words, contiguous_bits
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView, rows_in_place


def trimmed_batch(batch: TensorDict) -> dict[str, Any]:
    """A batch whose rectangles are trimmed if that saves an eighth, as a state to be encoded."""
    trimmed = {
        name: column
        for name, leaf in batch.items()
        if _is_rectangle(leaf)
        and (column := trim(leaf.detach().cpu())).nbytes <= leaf.nbytes * _WORTHWHILE
    }
    return {
        "batch": batch.exclude(*trimmed) if trimmed else batch,
        "order": list(batch.keys()),
        "trimmed": {name: column._asdict() for name, column in trimmed.items()},
    }


# If trimming saves less, it is faster to send the column unchanged.
_WORTHWHILE = 7 / 8
_SMALL = 4096


def _is_rectangle(leaf: Any) -> TypeGuard[torch.Tensor]:
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and not (leaf.is_nested or leaf.is_quantized or leaf.is_meta)
        and leaf.dim() > 1
        and leaf.nbytes >= _SMALL
    )


def padded_batch(batch: Any, order: list[str], trimmed: Mapping[str, Any]) -> TensorDict:
    """The batch of a state of `trimmed_batch`, bit for bit and with its columns in their order.

    Raises:
        ValueError: The parts do not fit together.
        MemoryError: The rectangles do not fit in memory. They may be far larger than the message.
    """
    if not isinstance(batch, TensorDict):
        raise ValueError(f"expected a TensorDict, found {type(batch).__name__}")
    if sorted(order) != sorted([*trimmed, *batch.keys()]):
        raise ValueError(f"expected every column once in the order, found {order!s:.200}")
    if not trimmed:
        return batch
    columns = untrimmed({name: Trimmed(**parts) for name, parts in trimmed.items()})
    leaves = {name: columns[name] if name in columns else batch.get(name) for name in order}
    return TensorDict(leaves, batch_size=batch.batch_size, device=batch.device)


class Trimmed(NamedTuple):
    """A rectangle of R rows of W cells, where R is the product of the dims before `dim`.

    Row i is its first kept cell ``starts[i]`` times, then its ``lengths[i]`` kept cells, then the
    last of them again up to W.

    Attributes:
        shape: The shape of the rectangle.
        dim: The dim of size W.
        starts: (R,) where the kept cells of each row start.
        lengths: (R,) the number of cells kept in each row, 1 or more.
        cells: (sum(lengths), ...) the kept cells, end to end.
    """

    shape: tuple[int, ...]
    dim: int
    starts: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    cells: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.lengths.nbytes + self.cells.nbytes


def trim(column: torch.Tensor) -> Trimmed:
    """Trim a rectangle of any content.

    Args:
        column: (N, ..., W, ...) strided, not empty, on the CPU. W is the widest dim after the
            first.

    Returns:
        A `Trimmed` that owns its memory. Cells are compared by their bits, so -0.0 differs from
        0.0, and a NaN equals itself.
    """
    dim = 1 + int(np.argmax(column.shape[1:]))
    width = column.shape[dim]
    rows = column if dim == 1 else contiguous_bits(column).flatten(0, dim - 1)
    cells, stride = rows_in_place(rows)
    starts, lengths = rowcopy.ends(cells, stride, width, len(rows))
    # One cell of each end is kept; a row of equal cells has a single end.
    lengths = np.where(starts > 0, lengths + 2, 1)
    starts = np.maximum(starts - 1, 0)
    splits = RowSplits.from_lengths(lengths)
    shape, firsts = (splits.total, *cells.shape[1:]), np.arange(len(rows)) * stride
    kept = values_of(RaggedView(cells, cells.dtype, shape, 1, firsts + starts, splits))
    integer = np.int32 if width < 2**31 else np.int64
    return Trimmed(tuple(column.shape), dim, starts.astype(integer), lengths.astype(integer), kept)


def untrimmed(columns: Mapping[str, Trimmed]) -> dict[str, torch.Tensor]:
    """Rebuild the rectangles that were trimmed, bit for bit.

    Returns:
        Contiguous columns in one allocation, which is freed with the last of them. Columns whose
        cells are on another device are moved there.

    Raises:
        ValueError: The parts of a column are inconsistent, so they did not come from `trim`.
        MemoryError: The rectangles do not fit in memory.
    """
    for name, trimmed in columns.items():
        _check(trimmed, name)
    cpu = torch.device("cpu")
    rectangles = {
        name: Wanted(trimmed.shape, trimmed.cells.dtype, cpu) for name, trimmed in columns.items()
    }
    allocate(rectangles.values())
    for name, rectangle in rectangles.items():
        _fill(rectangle, columns[name])
    return {
        name: rectangle.tensor.to(columns[name].cells.device)
        for name, rectangle in rectangles.items()
    }


def _fill(rectangle: Wanted, trimmed: Trimmed) -> None:
    if not rectangle.tensor.numel():
        return
    starts, lengths = trimmed.starts.astype(np.int64), trimmed.lengths.astype(np.int64)
    rows, width = len(starts), trimmed.shape[trimmed.dim]
    cells = as_words(trimmed.cells.cpu()).flatten(1).numpy()
    ends = np.cumsum(lengths)
    firsts, lasts = cells[ends - lengths], cells[ends - 1]
    if lasts.any() or not rectangle.zeroed:
        as_words(rectangle.tensor).view(rows, width, -1).numpy()[:] = lasts[:, None]
    left = np.where((firsts != lasts).any(axis=1), starts, 0)
    row_starts = np.arange(rows) * width
    for part, to, counts in (
        (np.repeat(firsts, left, axis=0), row_starts, left),
        (cells, row_starts + starts, lengths),
    ):
        cell_bytes = cells.itemsize * cells.shape[1]
        rowcopy.copy_all(
            [rowcopy.Copy(as_bytes(rectangle.tensor), part, to, None, counts, cell_bytes)]
        )


def _check(trimmed: Trimmed, name: str) -> None:
    shape, dim, starts, lengths, cells = trimmed
    if not all(type(size) is int and size >= 0 for size in shape) or not 0 < dim < len(shape):
        raise ValueError(f"{name}: expected a shape and one of its dims, found {shape} and {dim}")
    rows, width, inner = math.prod(shape[:dim]), shape[dim], shape[dim + 1 :]
    if any(numbers.dtype.kind != "i" or numbers.shape != (rows,) for numbers in (starts, lengths)):
        raise ValueError(f"{name}: expected {rows} starts and lengths")
    # A start and a length are never added up: the sum could overflow.
    if (starts < 0).any() or (starts > width).any() or (lengths > width - starts).any():
        raise ValueError(f"{name}: expected cells within the width {width}")
    total = int(lengths.sum(dtype=np.int64))
    if (lengths < 1).any() or tuple(cells.shape) != (total, *inner):
        raise ValueError(
            f"{name}: expected rows of 1 cell or more, {(total, *inner)} together, found "
            f"{tuple(cells.shape)}"
        )
