"""Rectangles: where rows go in them, and how those of a batch get memory and are filled.

`Placement` decides where rows go. `allocate_rectangles` and `fill_rectangles` then take all
rectangles of a call. The last section has errors that `materialize` raises, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from jagcodec._arguments import named_item
from jagcodec.columns.batch import Key
from jagcodec.errors import ArgumentError, column_name
from jagcodec.forward.layout import rounded_up
from jagcodec.kernels import Copy, Pad, copy_all, pad_all, rows_only
from jagcodec.memory.arrays import IntArray, are_disjoint
from jagcodec.memory.extents import check_extent
from jagcodec.memory.plain_types import check_not_followed, check_out, is_followed
from jagcodec.memory.tensor_blocks import Wanted, allocate
from jagcodec.memory.tensor_bytes import as_bytes, lacks_kernel
from jagcodec.rows.copy_rows import CellIndices, pad_into
from jagcodec.rows.lengths import check_row_ends
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.views import RaggedView
from jagcodec.wire.frames import writable_bytes
from jagcodec.wire.spec import MAX_UNBACKED_ROWS

Layout = Literal["padded", "jagged", "packed"]
"""What `materialize` makes of jagged columns: rectangles, the same columns, or `PackedColumn`s."""

PaddingSide = Literal["right", "left", "left_right"]
"""Where the pad cells of a rectangle's row are."""


@dataclass(slots=True)
class Rectangle(Wanted):
    """A padded column: its rows, where they go, and the pad around them."""

    key: Key
    view: RaggedView
    left_pad: IntArray | None
    width: int
    pad_bits: bytes


def path_of(key: Key) -> str:
    """The place that errors about a column name: ``materialize('name')``."""
    return f"materialize({column_name(key)})"


# --- where rows go -----------------------------------------------------------------------------


class RowPlaces(NamedTuple):
    """Where the rows of a column go in its rectangle."""

    left_pad: IntArray | None  # (N,) the first cell of each row; None if it is cell 0 everywhere
    width: int


class Placement(NamedTuple):
    """The options that decide where rows go, and how wide a padded column is."""

    pad_to_seqlen: int
    multiple: int
    sides: Mapping[Any, PaddingSide]  # by column
    side: PaddingSide  # of all other columns
    prompt_width: int

    def moves_rows(self) -> bool:
        """Whether these options may widen a rectangle of equally long rows, or move its rows."""
        return bool(self.pad_to_seqlen or self.multiple != 1 or self.side != "right" or self.sides)

    def place_rows(
        self, row_splits: RowSplits, key: Key, width: int, prompts: IntArray | None
    ) -> RowPlaces:
        """Where rows go. They must fit into `width`, unless that is 0.

        `prompts` are (N,) prompt tokens of each row, which only ``"left_right"`` needs. That side
        does not use `width`: its rows, with the pads of prompts, must fit into `pad_to_seqlen`.
        """
        side, lengths = self.sides.get(key, self.side), row_splits.lengths
        if side == "left_right":
            return self._place_around(prompts, lengths, key)
        check_width(row_splits, width, key)
        width = rounded_up(width or row_splits.max, self.multiple)
        return RowPlaces(width - lengths if side == "left" else None, width)

    def _place_around(self, prompts: IntArray | None, lengths: IntArray, key: Key) -> RowPlaces:
        """Places where all prompts end, and all responses begin, at one column of cells."""
        if prompts is None:
            detail = "expected prompt_lengths with padding_side='left_right', found None"
            raise ArgumentError("bad_option", "materialize(prompt_lengths)", detail)
        wrong = np.flatnonzero(prompts > lengths)
        if len(wrong):
            row = int(wrong[0])
            detail = (
                f"expected a prompt within its row of {lengths[row]}, found {prompts[row]} tokens"
            )
            raise ArgumentError("bad_length", f"{path_of(key)}, row {row}", detail)
        longest = int(prompts.max(initial=0))
        before = self.prompt_width or longest
        if longest > before:
            row = int(np.argmax(prompts))
            detail = f"expected prompts of at most prompt_width={before} tokens, found {longest}"
            raise ArgumentError("row_too_long", f"{path_of(key)}, row {row}", detail)
        left_pad = before - prompts
        ends = left_pad + lengths
        needed = max(int(ends.max(initial=0)), before)
        if self.pad_to_seqlen and needed > self.pad_to_seqlen:
            row = int(np.argmax(ends))
            raise _too_long(
                key, row, self.pad_to_seqlen, f"{ends[row]} with its prompt padded to {before}"
            )
        return RowPlaces(left_pad, rounded_up(self.pad_to_seqlen or needed, self.multiple))


def place_at_end(row_splits: RowSplits, whole: Rectangle, key: Key) -> RowPlaces:
    """Where rows go that hold the last tokens of the rows of `whole`."""
    whole_lengths, lengths = whole.view.row_splits.lengths, row_splits.lengths
    check_row_ends(lengths, whole_lengths, path_of(key))
    left_pad = whole_lengths - lengths
    if whole.left_pad is not None:
        left_pad += whole.left_pad
    return RowPlaces(left_pad if left_pad.any() else None, whole.width)


def check_width(row_splits: RowSplits, width: int, key: Key) -> None:
    """Refuse rows of more than `width` tokens; 0 is any width."""
    if width and row_splits.max > width:
        row = int(np.argmax(row_splits.lengths > width))
        raise _too_long(key, row, width, row_splits.lengths[row])


def _too_long(key: Key, row: int, width: int, tokens: Any) -> ArgumentError:
    detail = f"expected rows of at most pad_to_seqlen={width} tokens, found {tokens}; raise it"
    return ArgumentError("row_too_long", f"{path_of(key)}, row {row}", detail)


# --- memory ------------------------------------------------------------------------------------


def allocate_rectangles(rectangles: list[Rectangle], out: Any, pin_memory: bool) -> None:
    """Give each rectangle memory: new memory, or that of `out`, tensors by name or one buffer."""
    without_memory, path = rectangles, "materialize(out)"
    if isinstance(out, Mapping):
        without_memory = [
            rectangle for rectangle in rectangles if not _take_memory_of(out, rectangle, pin_memory)
        ]
        out = None
    elif out is not None:
        out = writable_bytes(out, path)
        if pin_memory:
            _check_page_locked(torch.from_numpy(out), path)
        for rectangle in without_memory:
            _refuse_followed(rectangle)
    for rectangle in without_memory:
        if 0 in rectangle.shape:  # an allocation of no bytes does not check the other sizes
            check_extent(rectangle.shape, rectangle.dtype.itemsize, path_of(rectangle.key))
    try:
        allocate(without_memory, out, pin_memory, path)
    except (MemoryError, ValueError, RuntimeError) as error:
        if isinstance(error, ArgumentError):
            raise
        largest = max(without_memory, key=lambda rectangle: math.prod(rectangle.shape))
        raise no_memory(largest.shape, largest.key, error) from error


def _take_memory_of(out: Any, rectangle: Rectangle, pin_memory: bool) -> bool:
    """Give a rectangle the tensor that `out` has for it; return whether there is one."""
    tensor = named_item(out, rectangle.key)
    if tensor is None:
        return False
    where = f"materialize(out)[{column_name(rectangle.key)}]"
    check_out(tensor, rectangle.shape, rectangle.dtype, rectangle.device, where)
    _refuse_followed(rectangle)
    if pin_memory and tensor.is_cpu:
        _check_page_locked(tensor, where)
    rectangle.tensor = tensor
    rectangle.data = as_bytes(tensor) if tensor.is_cpu else None
    rectangle.zeroed = False
    return True


def _check_page_locked(out: torch.Tensor, path: str) -> None:
    """Refuse memory that is not page-locked. An empty tensor has none."""
    if out.numel() and not out.is_pinned():
        detail = "expected page-locked memory with pin_memory=True, found other memory; pass what "
        detail += "materialize(pin_memory=True) returned, or leave out one of the two"
        raise ArgumentError("conflict", path, detail)


def _refuse_followed(rectangle: Rectangle) -> None:
    """Refuse rows that autograd follows: memory of the caller is overwritten later."""
    check_not_followed(rectangle.view.memory, f"materialize(out)[{column_name(rectangle.key)}]")


def fill_rectangles(rectangles: list[Rectangle], *, reused: bool) -> None:
    """Write rectangles that have memory; the kernel writes those on the CPU together."""
    by_torch: list[Rectangle] = []
    copies: list[Copy] = []
    pads: list[Pad] = []
    rest: list[Copy] = []  # for rows in runs, all runs of a row but the last
    for rectangle in rectangles:
        view, data = rectangle.view, rectangle.data
        if data is None or not view.uses_row_kernel:
            by_torch.append(rectangle)
        elif len(data):
            bits = rectangle.pad_bits
            task, others = view.pad_tasks(data, rectangle.width, rectangle.left_pad, bits)
            if _holds_pads(rectangle):
                copies.append(rows_only(task))
            else:
                pads.append(task)
            if others is not None:
                rest.append(others)
    if reused and not _are_disjoint(by_torch, [*copies, *pads], rest):
        detail = "expected separate memory for each column, apart from the batch, found an overlap"
        raise ArgumentError("conflict", "materialize(out)", detail)
    indices: CellIndices = {}
    for rectangle in by_torch:
        _fill_by_torch(rectangle, indices)
    if copies:
        copy_all(copies)
    pad_all(pads)
    if rest:
        copy_all(rest)


def _holds_pads(rectangle: Rectangle) -> bool:
    """Whether the memory of a rectangle holds the bits of its pads everywhere already."""
    return rectangle.zeroed and not any(rectangle.pad_bits)


def _fill_by_torch(rectangle: Rectangle, indices: CellIndices) -> None:
    """Write a rectangle that is on a device or that autograd follows."""
    view, bits = rectangle.view, rectangle.pad_bits
    holds_pads = _holds_pads(rectangle)
    try:
        rectangle.tensor = pad_into(
            rectangle.tensor, view, rectangle.left_pad, bits, indices, holds_pads=holds_pads
        )
    except RuntimeError as error:
        if not (lacks_kernel(error) and is_followed(view.memory)):
            raise
        detail = f"expected gradients that torch can pad, found {rectangle.dtype}; detach it"
        raise ArgumentError("bad_dtype", path_of(rectangle.key), detail) from error


def _are_disjoint(
    by_torch: Sequence[Rectangle], tasks: Sequence[Copy | Pad], rest: Sequence[Copy]
) -> bool:
    """Whether no target overlaps another buffer; targets of `rest` are among those of `tasks`."""
    parts = [part for task in (*tasks, *rest) for part in task.sources()]
    read = [part for part in parts if isinstance(part, np.ndarray)]
    read += [buffer for part in parts if isinstance(part, tuple) for buffer in part]
    read += [part for rectangle in by_torch for part in rectangle.view.memories]
    written = [rectangle.tensor for rectangle in by_torch]
    return are_disjoint([*written, *(task.dst for task in tasks)], read)


# --- errors ------------------------------------------------------------------------------------


def no_memory(shape: tuple[int, ...], key: Key, error: Exception) -> ArgumentError:
    """The error for a column that is too large for this machine, or for torch."""
    detail = (
        f"expected rectangles that fit in memory, found one of {shape} for {column_name(key)}: "
        f"{error!s:.200}"
    )
    return ArgumentError("too_large", "materialize", detail)


def check_unbacked(cells: int, cell_bytes: int, key: Key) -> None:
    """Refuse to make memory for many cells that a message may claim without bytes for them."""
    if not cell_bytes and cells > MAX_UNBACKED_ROWS:
        detail = f"expected at most {MAX_UNBACKED_ROWS} cells without bytes, found {cells}"
        raise ArgumentError("too_large", path_of(key), detail)
