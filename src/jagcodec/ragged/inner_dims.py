"""The dims inside of rows: one of them moved outermost and back, and cells of one chosen.

A row of a jagged column (N, j, B...) has tokens as its dim 0, and inner dims from 1 on, which are
the dims of the column's values (total, B...) too. Everything here moves cells by their bits, in
elements as wide as the cells behind the dims that change places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import (
    ByteArray,
    IntArray,
    address,
    array_bytes,
    as_bytes,
    as_words,
    borrowed,
    from_bytes,
    from_words,
    int_of_size,
    resolved,
    to_device,
)
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView

_CHUNK = 128 * 1024
"""Bytes that are moved at a time where reading is what jumps: they fit a cache."""

_LONG_ROW = 16 * 1024
"""Bytes of an average row from which rows are worth a call of torch each."""


# --- one dim outermost, and back ---------------------------------------------------------------


def moved_first(view: RaggedView, dim: int) -> torch.Tensor:
    """The rows end to end with an inner dim before them: (extent of `dim`, total, the rest).

    Example:
        >>> import numpy as np, torch
        >>> from jagcodec.ragged.inner_dims import moved_first
        >>> from jagcodec.ragged.row_splits import RowSplits
        >>> from jagcodec.ragged.views import end_to_end
        >>> splits = RowSplits.from_lengths(np.array([1, 1]))
        >>> rows = end_to_end(torch.tensor([[1, 2], [3, 4]]), splits)
        >>> moved_first(rows, 1).tolist()
        [[1, 3], [2, 4]]

    Args:
        view: Rows (j, B...) whose ragged dim is 1.
        dim: Which of their dims, from 1 on.
    """
    splits = view.row_splits
    shape = (view.shape[dim], splits.total, *view.shape[1:dim], *view.shape[dim + 1 :])
    apart = view.starts is not None and not isinstance(view.memory, tuple)
    if apart and _are_long(view):
        source = memory_of(view).detach()
        starts: Any = view.row_starts().tolist()
    else:
        source = values_of(view)
        starts = None
    source = source.movedim(dim, 0)
    out = torch.empty(shape, dtype=view.dtype, device=source.device)
    if not out.numel():
        return out
    wide_out, wide = _wide(out, source, 2)
    if starts is not None:
        ends = splits.host.tolist()
        for start, a, b in zip(starts, ends[:-1], ends[1:], strict=True):
            wide_out[:, a:b] = wide[:, start : start + b - a]
        return out
    step = max(1, _CHUNK // (out.nbytes // splits.total)) if out.is_cpu else splits.total
    for a in range(0, splits.total, step):
        wide_out[:, a : a + step] = wide[:, a : a + step]
    return out


def moved_back(values: torch.Tensor, dim: int) -> torch.Tensor:
    """(extent of `dim`, total, the rest) as (total, ...) with that dim in its place, in memory of
    its own: the inverse of `moved_first`.
    """
    source = values.movedim(0, dim)
    out = torch.empty(source.shape, dtype=values.dtype, device=values.device)
    if out.numel():
        wide_out, wide = _wide(out, source, 0)
        wide_out[...] = wide
    return out


def rows_back(values: torch.Tensor, dim: int, row_splits: RowSplits) -> RaggedView:
    """The rows in `values`, (extent of `dim`, total, the rest), as they were: nothing is copied.

    The memory of what comes back is only to be read.
    """
    source = values.movedim(0, dim)
    return _only_read(source, row_splits, 1)


def _only_read(values: torch.Tensor, row_splits: RowSplits, ragged_dim: int) -> RaggedView:
    """Rows end to end in memory that is someone else's."""
    memory: Any = values
    if values.is_contiguous() and values.is_cpu and not values.requires_grad:
        memory = as_bytes(values)  # of which everybody takes a copy
    return RaggedView(memory, values.dtype, tuple(values.shape), ragged_dim, None, row_splits)


def in_memory(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over bytes that is only to be read, whoever else may write to them."""
    if address(data) % dtype.itemsize:  # torch reads 16 bytes at once of complex128
        data = data.copy()
    elif not data.flags.writeable:  # which torch has no word for
        data = borrowed(address(data), data.nbytes, data)
    return from_bytes(data, dtype, shape)


def memory_of(view: RaggedView) -> torch.Tensor:
    """The memory of a view, which is one, as a tensor of its shape that is only to be read."""
    memory: Any = view.memory
    if isinstance(memory, torch.Tensor):
        return memory
    return in_memory(array_bytes(memory), view.dtype, view.shape)


def _are_long(view: RaggedView) -> bool:
    splits = view.row_splits
    return splits.rows > 0 and view.cell_bytes * splits.total >= _LONG_ROW * splits.rows


def _wide(a: torch.Tensor, b: torch.Tensor, kept: int) -> tuple[Any, Any]:
    """Two tensors with the same dims behind the first as fewer, wider elements: the last dims, as
    far as both lie in order, but not the first `kept`, are one of elements of up to 16 bytes.

    On the CPU they are arrays. Copies of a few rows each are what numpy takes no threads for, as
    torch does, whose threads wait for each other at every one, and long where cores are shared.
    """
    a, b = resolved(a.detach()), resolved(b.detach())
    pair = [t.view(int_of_size(t.itemsize)).unsqueeze(-1) for t in (a, b)]
    while pair[0].dim() > kept + 1 and all(_in_order(t) for t in pair):
        pair = [t.flatten(-2) for t in pair]
    size = pair[0].itemsize
    for width in (16, 8, 4, 2):
        if width > size and all(_fits(t, width) for t in pair):
            pair = [t.view(int_of_size(width)) for t in pair]
            break
    if a.is_cpu and b.is_cpu:
        return pair[0].numpy(), pair[1].numpy()
    return pair[0], pair[1]


def _in_order(tensor: torch.Tensor) -> bool:
    """Whether the last two dims of a tensor, the last of which lies in order, do so."""
    extent = tensor.shape[-1]
    return tensor.stride(-1) == 1 and tensor.stride(-2) == extent and tensor.shape[-2] > 0


def _fits(tensor: torch.Tensor, width: int) -> bool:
    """Whether the last dim of a tensor can be viewed as elements of `width` bytes."""
    size = tensor.itemsize
    places = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(place * size % width == 0 for place in places)


# --- cells of one dim --------------------------------------------------------------------------


def pick(values: torch.Tensor, dim: int, chosen: Chosen) -> torch.Tensor:
    """Some of the cells along a dim: a view of a range of them, a copy of any others."""
    if isinstance(chosen, range):
        return values.narrow(dim, chosen.start, len(chosen))
    index = to_device(torch.from_numpy(chosen), values.device)
    if values.requires_grad:
        return values.index_select(dim, index)
    return from_words(as_words(values).index_select(dim, index), values.dtype)


def pick_of_view(view: RaggedView, picked: Mapping[int, Chosen]) -> RaggedView:
    """The same rows with only the chosen cells of inner dims; its memory is only to be read."""
    whole = view.starts is None and not isinstance(view.memory, tuple)
    values = memory_of(view) if whole else values_of(view)
    for dim, chosen in picked.items():
        values = pick(values, dim, chosen)
    return _only_read(values, view.row_splits, view.ragged_dim)


# --- apart -------------------------------------------------------------------------------------


def lies_apart(view: RaggedView) -> bool:
    """Whether the cells of a view on the CPU lie end to end in no order, as those do that were
    moved or picked, so that its rows are to be padded by `pad_rows`.
    """
    memory: Any = view.memory
    return (
        isinstance(memory, torch.Tensor)
        and memory.is_cpu
        and not memory.requires_grad
        and view.starts is None
        and view.ragged_dim == 1
        and not memory.is_contiguous()
        and _are_long(view)
    )


def span_of(view: RaggedView) -> ByteArray:
    """The bytes from the first to the last cell of a view that `lies_apart`."""
    memory: Any = view.memory
    pairs = zip(memory.shape, memory.stride(), strict=True)
    cells = 1 + sum((extent - 1) * stride for extent, stride in pairs)
    return borrowed(memory.data_ptr(), cells * memory.itemsize, memory)


def pad_rows(
    out: torch.Tensor,
    view: RaggedView,
    left_pad: IntArray | None,
    pad_bits: bytes,
    *,
    fresh: bool = False,
) -> None:
    """Write the rows of a view that `lies_apart` to its rectangle, each in one go.

    Args:
        out: (N, width, B...), contiguous.
        view: The rows.
        left_pad: (N,) the first cell of each row; None: cell 0.
        pad_bits: Of one pad element.
        fresh: Whether `out` holds pads everywhere already.
    """
    if not fresh:
        words = as_words(out).numpy()
        pad = np.frombuffer(pad_bits, dtype=words.dtype)
        ends = view.row_splits.lengths + (0 if left_pad is None else left_pad)
        for i, end in enumerate(ends.tolist()):
            words[i, end:] = pad
            if left_pad is not None:
                words[i, : int(left_pad[i])] = pad
    memory: Any = view.memory
    rows = out.shape[0]
    # All rows of the rectangle as if it were values, so that both have equal strides.
    like = out.view(rows * out.shape[1], *out.shape[2:])
    splits = view.row_splits
    firsts = np.arange(rows, dtype=np.int64) * out.shape[1]
    if left_pad is not None:
        firsts = firsts + left_pad
    flat, source = _wide(like, memory, 1)
    starts, lengths = splits.starts.tolist(), splits.lengths.tolist()
    for first, start, length in zip(firsts.tolist(), starts, lengths, strict=True):
        if length:
            flat[first : first + length] = source[start : start + length]
