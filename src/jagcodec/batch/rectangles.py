"""The rectangles of a batch: allocated together and filled together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from jagcodec.errors import ArgumentError, WireFormatError, describe
from jagcodec.memory.blocks import Wanted, allocate, new_block
from jagcodec.memory.tensor_bytes import IntArray, are_apart, as_bytes
from jagcodec.ragged.copy_rows import pad_into, pad_task, pad_tasks_of_runs
from jagcodec.ragged.pad_values import pad_bits
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.rowcopy import Copy, Pad, copy_all, pad_all, rows_only
from jagcodec.wire.dtypes import NAMED_ARRAYS, torch_dtype
from jagcodec.wire.frames import writable_bytes
from jagcodec.wire.message import ChosenRows, Message
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import PLAIN, Kind

Key: TypeAlias = str | tuple[str, ...]
"""What a column is called in arguments: its name, or inside a nested one all of them."""


@dataclass(slots=True)
class Rectangle(Wanted):
    """A padded column: its rows, where they go, and what is around them."""

    key: Key
    view: RaggedView
    left_pad: IntArray | None
    width: int
    pad_bits: bytes


def path_of(key: Key) -> str:
    """Where an error about a column is: ``materialize('name')``."""
    return f"materialize({_shown(key)})"


def _shown(key: Key) -> str:
    return repr(key if isinstance(key, str) else ".".join(key))


def allocate_rectangles(rectangles: list[Rectangle], out: Any, pin_memory: bool) -> None:
    """Give each rectangle memory: new, or of `out`, tensors by name or one buffer.

    Raises:
        ArgumentError: `out` does not fit, or the rectangles do not fit in memory.
    """
    wanted = rectangles
    if isinstance(out, Mapping):
        wanted = [rectangle for rectangle in wanted if not _given(rectangle, out)]
        out = None
    elif out is not None:
        out = writable_bytes(out, "materialize(out)")
        for rectangle in wanted:
            _check_reusable(rectangle)
    try:
        allocate(wanted, out, pin_memory)
    except (MemoryError, ValueError, RuntimeError) as error:
        if isinstance(error, ArgumentError):
            raise
        largest = max(wanted, key=lambda rectangle: math.prod(rectangle.shape))
        raise ArgumentError(
            "too_large",
            "materialize",
            f"expected rectangles that fit in memory, found one of {largest.shape} for "
            f"{_shown(largest.key)}: {error!s:.200}",
        ) from error


def _given(rectangle: Rectangle, out: Any) -> bool:
    """Whether `out` has a tensor for a rectangle, which then gets it."""
    found = out
    names = (rectangle.key,) if isinstance(rectangle.key, str) else rectangle.key
    for name in names:
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    fits = (
        isinstance(found, torch.Tensor)
        and (tuple(found.shape), found.dtype) == (rectangle.shape, rectangle.dtype)
        and found.device == rectangle.device
        and found.layout is torch.strided
        and found.is_contiguous()
        and not found.requires_grad
    )
    if not fits:
        shown = f"{found.dtype} " if isinstance(found, torch.Tensor) else ""
        raise ArgumentError(
            "bad_shape",
            f"materialize(out)[{_shown(rectangle.key)}]",
            f"expected a contiguous {rectangle.dtype} tensor {rectangle.shape} on "
            f"{rectangle.device} that needs no gradient, found {shown}{describe(found)}; leave "
            "the column out, or pass one buffer for all",
        )
    _check_reusable(rectangle)
    rectangle.tensor = found
    rectangle.data = as_bytes(found) if found.is_cpu else None
    rectangle.zeroed = False
    return True


def _check_reusable(rectangle: Rectangle) -> None:
    """Refuse to write what autograd follows over memory that an earlier step may still need."""
    if _needs_gradient(rectangle.view):
        raise ArgumentError(
            "conflict",
            f"materialize(out)[{_shown(rectangle.key)}]",
            "expected a column that autograd does not follow, found one that needs a gradient; "
            "leave the memory of its rectangle to torch, or call materialize under torch.no_grad()",
        )


def _needs_gradient(view: RaggedView) -> bool:
    return isinstance(view.memory, torch.Tensor) and view.memory.requires_grad


def fill_rectangles(rectangles: list[Rectangle], *, reused: bool) -> None:
    """Write rectangles that have memory; those on the CPU in one call."""
    copies: list[Copy] = []
    pads: list[Pad] = []
    rest: list[Copy] = []  # of rows in runs, after the last of each
    for rectangle in rectangles:
        view, left_pad, bits = rectangle.view, rectangle.left_pad, rectangle.pad_bits
        data = rectangle.data
        width = rectangle.width
        fresh = rectangle.zeroed and not any(bits)
        task: Pad | None = None
        if data is None:
            pass
        elif view.runs is not None and len(data):
            task, others = pad_tasks_of_runs(view, data, width, left_pad, bits)
            rest.append(others)
        elif view.ragged_dim == 1 and type(view.memory) is np.ndarray:
            # Most of them: rows of a message, in place.
            row_splits = view.row_splits
            if len(data):
                cell = len(data) // (row_splits.rows * width)
                starts = row_splits.starts if view.starts is None else view.starts
                lengths = row_splits.lengths
                task = Pad(data, view.memory, starts, lengths, left_pad, width, cell, bits)
        else:
            task = pad_task(view, data, width, left_pad, bits)
        if task is not None:
            if fresh:
                copies.append(rows_only(task))
            else:
                pads.append(task)
        elif isinstance(view.memory, torch.Tensor):
            _fill_by_torch(rectangle, fresh)
    if reused and not _are_apart([*copies, *pads], rest):
        raise ArgumentError(
            "conflict",
            "materialize(out)",
            "expected separate memory for each column, apart from the batch, found an overlap",
        )
    if copies:
        copy_all(copies)
    if pads:
        pad_all(pads)
    if rest:
        copy_all(rest)


def _fill_by_torch(rectangle: Rectangle, fresh: bool) -> None:
    view, left_pad, bits = rectangle.view, rectangle.left_pad, rectangle.pad_bits
    try:
        rectangle.tensor = pad_into(rectangle.tensor, view, left_pad, bits, fresh=fresh)
    except NotImplementedError as error:
        if not _needs_gradient(view):
            raise
        raise ArgumentError(
            "bad_dtype",
            path_of(rectangle.key),
            f"expected a dtype whose gradients torch can pad, found {rectangle.dtype}; detach the "
            "column, or call materialize under torch.no_grad()",
        ) from error


def _are_apart(tasks: Sequence[Copy | Pad], rest: Sequence[Copy]) -> bool:
    """Whether no target overlaps another buffer; targets of `rest` are among those of `tasks`."""
    parts = [part for task in (*tasks, *rest) for part in task[1:]]
    read = [part for part in parts if isinstance(part, np.ndarray)]
    read += [buffer for part in parts if isinstance(part, tuple) for buffer in part]
    return are_apart([task.dst for task in tasks], read)


# --- of one message ----------------------------------------------------------------------------

_SMALL = 4 << 20
"""Bytes of a rectangle; larger ones need longer to write than Python needs to plan them."""

_JAGGED, _TENSOR = Kind.JAGGED, Kind.TENSOR
_ZEROS = {size: bytes(size) for size in (1, 2, 4, 8)}


def padded_columns(
    message: Message,
    rows: int,
    keys: Mapping[str, Node],
    chosen: ChosenRows | None,
    pads: Mapping[Any, Any],
) -> dict[str, torch.Tensor] | None:
    """Columns of a small message, padded on the right in two short loops; None if one is not plain.

    Planning such a message costs more than copying it. The reader of a column reports its faults.
    """
    frames, numbers = message.arrays, message.numbers
    for node in keys.values():
        if node.kind is not _JAGGED and node.kind is not _TENSOR:
            return None
    if frames is None or not rows:
        return None
    columns: dict[str, Any] = {}
    jagged: list[Any] = []
    end, group = 0, -1
    splits: RowSplits | None = None
    for name, node in keys.items():
        i, kind = node.number, node.kind
        dims = numbers[node.dims : node.end]
        if kind is _TENSOR and dims[:1] == [rows]:
            columns[name] = message.tensor(node, chosen)
            continue
        if kind is not _JAGGED or numbers[i + 2] != PLAIN or node.fields[2] != 1:
            return None
        if splits is None or group != numbers[i + 3]:
            group = numbers[i + 3]
            try:
                splits = message.row_splits(group)
                picked, starts = splits, splits.starts
                if chosen is not None:
                    picked, starts = chosen.among(group, splits)
            except WireFormatError:
                return None
            if splits.rows != rows:
                return None
        dtype = NAMED_ARRAYS.get(node.fields[0])
        cell = size = node.itemsize
        for extent in dims[1:]:
            size *= extent
        shape = picked.rows, picked.max, *dims[1:]
        held = shape[0] * shape[1] * size
        if dtype is None or dims[0] != splits.total or not 0 < held <= _SMALL:
            return None
        bits = _ZEROS[cell]
        if name in pads:
            bits = pad_bits(pads[name], torch_dtype(node.fields[0]), path_of(name))
        at = numbers[i + 1]
        data = frames[numbers[i]][at : at + dims[0] * size]
        jagged.append((name, end, shape, dtype, data, starts, picked.lengths, size, bits))
        columns[name] = None
        end += (held + 63) & -64
    block = new_block(end).data
    tasks: list[Any] = []
    for name, start, shape, dtype, data, starts, lengths, size, bits in jagged:
        array = np.ndarray(shape, dtype, block, start)
        columns[name] = torch.from_numpy(array)
        tasks.append((array, data, starts, lengths, None, shape[1], size, bits))
    pad_all(tasks)
    return columns
