"""Rectangles without the constant ends of their rows, and back.

A row of a padded column begins with a run of one value, ends with one, or both: its left and right
padding. The two values may differ, and may differ from row to row (position ids are padded on the
right with each row's last position). Both runs are read from the bits of the row, so no mask is
needed and no value is lost: everything between the two runs is kept unchanged.

`trim_batch` and `untrim_batch` convert batches; `trim` and `untrim` convert their columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from jagcodec import kernels
from jagcodec.memory.arrays import IntArray, array_bytes
from jagcodec.memory.staging import HostCopies, to_device
from jagcodec.memory.tensor_blocks import Wanted, allocate
from jagcodec.memory.tensor_bytes import as_bytes, as_words, contiguous_bits, from_words
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.of_tensors import rows_in_place
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView

Words: TypeAlias = npt.NDArray[Any]

# If trimming saves less, it is faster to send the column unchanged.
_WORTHWHILE = 7 / 8
_FEWEST_BYTES = 4096  # of a column that is trimmed


def trim_batch(batch: TensorDict) -> dict[str, Any]:
    """The state of a batch to encode; its rectangles are trimmed where that saves an eighth."""
    rectangles = {name: leaf.detach() for name, leaf in batch.items() if _is_trimmable(leaf)}
    copies = HostCopies()  # so that a device is waited for once
    copies.fetch(rectangles.values())
    trimmed = {
        name: column
        for name, rectangle in rectangles.items()
        if (column := trim(copies.of(rectangle))).nbytes <= rectangle.nbytes * _WORTHWHILE
    }
    return {
        "batch": batch.exclude(*trimmed) if trimmed else batch,
        "order": list(batch.keys()),
        "trimmed": {name: column._asdict() for name, column in trimmed.items()},
    }


def _is_trimmable(leaf: Any) -> TypeGuard[torch.Tensor]:
    """Whether a leaf is a plain rectangle that is large enough to trim."""
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and not (leaf.is_nested or leaf.is_quantized or leaf.is_meta)
        and leaf.dim() > 1
        and leaf.nbytes >= _FEWEST_BYTES
    )


def untrim_batch(batch: Any, order: list[str], trimmed: Mapping[str, Any]) -> TensorDict:
    """The batch of a state of `trim_batch`, bit for bit and with its columns in their order."""
    if not isinstance(batch, TensorDict):
        raise ValueError(f"expected a TensorDict, found {type(batch).__name__}")
    if sorted(order) != sorted([*trimmed, *batch.keys()]):
        raise ValueError(f"expected every column once in the order, found {order!s:.200}")
    columns = untrim({name: Trimmed(**parts) for name, parts in trimmed.items()})
    leaves = {name: columns[name] if name in columns else batch.get(name) for name in order}
    return TensorDict(leaves, batch_size=batch.batch_size, device=batch.device)


class Trimmed(NamedTuple):
    """A rectangle (R, W, ...), whose row i is a left pad, ``lengths[i]`` cells, and a right pad."""

    shape: tuple[int, ...]  # R is the product of the dims before `dim`
    dim: int  # the dim of size W
    starts: npt.NDArray[Any]  # (R,) int32 or int64: where the cells of each row start
    lengths: npt.NDArray[Any]  # (R,)
    before: torch.Tensor  # (R, ...) left pads; (1, ...) if all have the same; (0, ...) if none has
    after: torch.Tensor
    cells: torch.Tensor  # (sum(lengths), ...) end to end; if `constant`, (R, ...), one of each row
    constant: bool  # whether all kept cells within each row are equal, as in a mask

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.lengths.nbytes + sum(t.nbytes for t in self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.before, self.after, self.cells


# --- trim --------------------------------------------------------------------------------------


def trim(column: torch.Tensor) -> Trimmed:
    """Trim a strided rectangle on the CPU along its widest dim after the first."""
    dim = 1 + int(np.argmax(column.shape[1:]))
    width = column.shape[dim]
    # Three forms of the same cells, as integers, because bits are compared: -0.0 differs from 0.0,
    # and a NaN equals itself. `words` has all dims, (R, W, ..., k). `cells` is the memory from the
    # first row to the end of the last, in which a row starts `stride` cells after the one before.
    # `grid` is an array (R, W, n).
    words = as_words(column)
    if dim > 1 or not words[0].is_contiguous():
        words = contiguous_bits(words).flatten(0, dim - 1)
    cells, stride = rows_in_place(words)
    grid = words.flatten(2).numpy()
    rows, cell_shape = len(grid), words.shape[2:]
    starts, lengths = kernels.ends(
        as_bytes(cells), stride, width, cell_shape.numel() * cells.itemsize, rows
    )
    firsts = np.arange(rows) * stride
    values = _cell_of_each_row(cells, firsts + starts, lengths)
    constant = values is not None
    if values is None:
        starts, lengths = _keep_single_pads(starts, lengths, width)
        values = _rows_as_words(cells, firsts + starts, lengths)
    left_pads = _pads(grid[:, 0], starts > 0)
    right_pads = _pads(grid[:, -1], starts + lengths < width)
    integer = np.int32 if width < 2**31 else np.int64
    return Trimmed(
        tuple(column.shape),
        dim,
        starts.astype(integer),
        lengths.astype(integer),
        before=_cells_of_words(left_pads, cell_shape, column.dtype),
        after=_cells_of_words(right_pads, cell_shape, column.dtype),
        cells=_cells_of_words(values, cell_shape, column.dtype),
        constant=constant,
    )


def _keep_single_pads(starts: IntArray, lengths: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """Starts and lengths of rows that keep pads of a single cell as cells.

    That costs less than a pad for each row.
    """
    ends = starts + lengths
    ends[(ends == width - 1) & (lengths > 0)] = width
    starts = np.where((starts == 1) & (lengths > 0), 0, starts)
    return starts, ends - starts


def _pads(pads: Words, is_padded: npt.NDArray[np.bool_]) -> Words:
    """The pad of each row, one pad if all padded rows share it, or none if no row is padded."""
    pads_in_use = pads[is_padded]
    all_equal = not len(pads_in_use) or bool((pads_in_use == pads_in_use[0]).all())
    return np.ascontiguousarray(pads_in_use[:1] if all_equal else pads)


def _rows_as_words(cells: torch.Tensor, starts: IntArray, lengths: IntArray) -> Words:
    """The cells of rows at these starts, end to end."""
    row_splits = RowSplits.from_lengths(lengths)
    view = RaggedView(cells, cells.dtype, tuple(cells.shape), 1, starts, row_splits)
    words: Words = values_of(view).flatten(1).numpy()
    return words


_FEW_ROWS = 8


def _cell_of_each_row(cells: torch.Tensor, starts: IntArray, lengths: IntArray) -> Words | None:
    """The cell of each row, if all kept cells within each row are equal; otherwise None."""
    if not lengths.any():
        return None
    for rows in (_FEW_ROWS, len(lengths)):  # a few rows first, because they rule out most columns
        counts = lengths[:rows]
        words = _rows_as_words(cells, starts[:rows], counts)
        if not len(words):
            continue
        first_of_each: Words = words[np.minimum(np.cumsum(counts) - counts, len(words) - 1)]
        if not (words == np.repeat(first_of_each, counts, axis=0)).all():
            return None
    return first_of_each


def _cells_of_words(words: Words, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Words as a tensor of cells of this shape, over the same memory."""
    if not words.size:  # numpy gives empty arrays strides that torch cannot view
        return torch.empty((len(words), *shape[:-1]), dtype=dtype)
    return from_words(torch.from_numpy(words).view(len(words), *shape), dtype)


# --- untrim ------------------------------------------------------------------------------------


def untrim(columns: Mapping[str, Trimmed]) -> dict[str, torch.Tensor]:
    """Rebuild the rectangles that were trimmed, bit for bit, in one allocation."""
    for name, trimmed in columns.items():
        _check_trimmed(trimmed, name)
    copies = HostCopies()  # so that a device is waited for once
    copies.fetch(tensor for trimmed in columns.values() for tensor in trimmed.tensors)
    cpu = torch.device("cpu")
    rectangles = {
        name: Wanted(trimmed.shape, trimmed.cells.dtype, cpu) for name, trimmed in columns.items()
    }
    allocate(rectangles.values())
    for name, rectangle in rectangles.items():
        if rectangle.tensor.numel():
            _fill(rectangle, columns[name], copies)
    return {
        name: to_device(rectangle.tensor, columns[name].cells.device)
        for name, rectangle in rectangles.items()
    }


class _PadSide(NamedTuple):
    """The left or the right pads of a rectangle."""

    pads: Words  # one for each row, or one for all
    counts: IntArray  # (R,) how many cells of each row have the pad
    starts: IntArray  # (R,) the first of these cells, in cells of the rectangle


def _fill(rectangle: Wanted, trimmed: Trimmed, copies: HostCopies) -> None:
    """Write the cells, with one pad everywhere else, and then the pads that differ from it."""
    rows, width = math.prod(trimmed.shape[: trimmed.dim]), trimmed.shape[trimmed.dim]
    starts, lengths = trimmed.starts.astype(np.int64), trimmed.lengths.astype(np.int64)
    before, after, cells = (as_words(copies.of(tensor)).numpy() for tensor in trimmed.tensors)
    if trimmed.constant:
        cells = _repeated(cells, lengths)
    size = math.prod(cells.shape[1:]) * cells.itemsize
    row_starts, ends = np.arange(rows) * width, starts + lengths
    sides = [
        _PadSide(before, starts, row_starts),
        _PadSide(after, width - ends, row_starts + ends),
    ]
    pad, cells_of_pad = np.zeros((1, cells.shape[-1]), cells.dtype), 0
    for side in sides:
        # Of the pads that all rows share, choose the pad of most cells.
        if len(side.pads) == 1 and side.counts.sum() > cells_of_pad:
            pad, cells_of_pad = side.pads.reshape(-1, cells.shape[-1])[:1], side.counts.sum()
    out, bits = as_bytes(rectangle.tensor), pad.tobytes()
    firsts, source = np.cumsum(lengths) - lengths, array_bytes(np.ascontiguousarray(cells))
    task = kernels.Pad(out, source, firsts, lengths, starts, width, size, bits)
    if rectangle.zeroed and not any(bits):
        kernels.copy_all([kernels.rows_only(task)])
    else:
        kernels.pad_all([task])
    for side in sides:
        if not (side.pads == pad).all():
            values = array_bytes(_repeated(side.pads, side.counts))
            kernels.copy_all([kernels.Copy(out, values, side.starts, None, side.counts, size)])


def _repeated(cells: Words, counts: IntArray) -> Words:
    """The cell of each row (or the one for all rows), repeated `counts` times, end to end."""
    # numpy repeats a cell in half the time that torch takes.
    return np.repeat(np.broadcast_to(cells, (len(counts), *cells.shape[1:])), counts, axis=0)


def _check_trimmed(trimmed: Trimmed, name: str) -> None:
    """Raise an error if the parts, which come from a message, do not make a rectangle."""
    shape, dim, starts, lengths = trimmed.shape, trimmed.dim, trimmed.starts, trimmed.lengths
    if not all(type(size) is int and size >= 0 for size in shape) or not 0 < dim < len(shape):
        raise ValueError(f"{name}: expected a shape and one of its dims, found {shape} and {dim}")
    rows, width, inner = math.prod(shape[:dim]), shape[dim], shape[dim + 1 :]
    for numbers in (starts, lengths):
        if numbers.dtype.kind != "i" or numbers.shape != (rows,) or (numbers < 0).any():
            raise ValueError(f"{name}: expected {rows} starts and lengths from 0 on")
    # A start and a length are never added up: the sum could overflow.
    if (starts > width).any() or (lengths > width - starts).any():
        raise ValueError(f"{name}: expected cells within the width {width}")
    total = rows if trimmed.constant else int(lengths.sum(dtype=np.int64))
    before, after, cells = trimmed.before, trimmed.after, trimmed.cells
    if tuple(cells.shape) != (total, *inner):
        raise ValueError(f"{name}: expected cells {(total, *inner)}, found {tuple(cells.shape)}")
    for pad, needed in ((before, starts > 0), (after, lengths < width - starts)):
        if pad.dtype != cells.dtype or tuple(pad.shape[1:]) != inner:
            raise ValueError(f"{name}: expected pads {inner} of {cells.dtype} like its cells")
        if len(pad) not in ({1, rows} if needed.any() else {0, 1, rows}):
            raise ValueError(f"{name}: expected one pad, or one for each row, found {len(pad)}")
