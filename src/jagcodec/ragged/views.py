"""Rectangles and the rows in them, where they lie: what every room that packs or pads is built on.

Nothing here is public, and little is checked: `layout` and the rooms above do that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec import rowcopy
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import (
    ByteArray,
    IntArray,
    Room,
    as_bytes,
    contiguous_bits,
    describe,
    from_bytes,
    plain_array,
    resolved,
    together,
)
from jagcodec.ragged.nested import Parts, Raggedness, RowSplits, splits_of_lengths
from jagcodec.rowcopy import Copy, Pad, Starts
from jagcodec.wire.frames import Unwritten

# --- jagged -> jagged --------------------------------------------------------------------------


def raggedness_of(parts: Parts, device: torch.device) -> Raggedness:
    """The raggedness of a jagged tensor: its own offsets where they fit, for their identity."""
    splits = splits_of_lengths(parts.lengths)
    if parts.compact and parts.offsets.device == device:
        splits = replace(splits, given=parts.offsets)
    return Raggedness(splits)


def compact_values(parts: Parts) -> torch.Tensor:
    """The values of a jagged tensor, contiguous and without holes; aliased where they are."""
    values = parts.values
    if parts.compact:
        return values if values.requires_grad else contiguous_bits(values)
    cells, outer, total = _as_cells(values, parts.ragged_dim)
    starts = (np.arange(outer)[:, None] * total + parts.starts).reshape(-1)
    packed = rowcopy.gather(cells, starts, np.tile(parts.lengths, outer))
    shape = list(values.shape)
    shape[parts.ragged_dim - 1] = int(parts.lengths.sum())
    return packed.view(shape)


# --- jagged -> padded --------------------------------------------------------------------------


def padded_shape(parts: Parts | WireCells, width: int) -> tuple[int, ...]:
    """The shape of a jagged column's rectangle: (N, ..., width, ...)."""
    dim, shape = parts.ragged_dim, parts.shape
    rows = len(parts.lengths)
    return (rows, width, *shape[1:]) if dim == 1 else (rows, *shape[: dim - 1], width, *shape[dim:])


def parts_of_rectangle(padded: torch.Tensor) -> Parts:
    """A rectangle (N, S, ...) as N rows of S cells each."""
    rows, width = padded.shape[:2]
    splits = splits_of_lengths(np.full(rows, width, dtype=np.int64))
    values = contiguous_bits(padded).view(rows * width, *padded.shape[2:])
    return Parts(values, splits.offsets, splits.starts, splits.lengths, 1, True)


def pad_into(
    out: torch.Tensor,
    parts: Parts,
    leads: IntArray | None,
    pattern: bytes,
    *,
    fresh: bool = False,
) -> torch.Tensor:
    """Write the rows of a jagged tensor and their pads into its rectangle, contiguous as it is.

    Row i begins at cell ``leads[i]`` of its rectangle, or at 0. `pattern` is the bits of one pad
    element; `fresh` says that `out` holds nothing else yet.
    """
    values, dim = parts.values, parts.ragged_dim
    if dim == 1:
        return rowcopy.pad(values, parts.starts, parts.lengths, out, leads, pattern, fresh=fresh)
    cells, outer, total = _as_cells(values, dim)
    starts, lengths, leads = _runs(parts.starts, parts.lengths, leads, outer, total)
    flat = out.view(len(starts), out.shape[dim], *cells.shape[1:])
    return rowcopy.pad(cells, starts, lengths, flat, leads, pattern, fresh=fresh).view(out.shape)


@dataclass(slots=True, eq=False)
class WireCells:
    """A jagged column as its values lie in a message: bytes to read, not to write to.

    Attributes:
        data: The bytes of the values, at any address.
        dtype: Of the values.
        shape: Of the values.
        ragged_dim: Of the column: the rows lie end to end in dim ``ragged_dim - 1``.
        splits: The rows.
    """

    data: ByteArray
    dtype: torch.dtype
    shape: tuple[int, ...]
    ragged_dim: int
    splits: RowSplits

    @property
    def lengths(self) -> IntArray:
        """(N,) lengths of the rows."""
        return self.splits.lengths

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return _CPU


_CPU = torch.device("cpu")


def pad_task(
    room: Room, cells: Parts | WireCells, leads: IntArray | None, pattern: bytes
) -> Pad | None:
    """`pad_into` as a task over bytes, of a message or of a tensor; None if it takes torch."""
    if room.data is None or not len(room.data):
        return None
    dim = cells.ragged_dim
    if isinstance(cells, WireCells):
        data, starts = cells.data, cells.splits.starts
    elif cells.values.requires_grad or not cells.values.is_cpu:
        return None
    else:
        data, starts = as_bytes(cells.values), cells.starts
    lengths = cells.lengths
    if dim > 1:
        outer = math.prod(cells.shape[: dim - 1])
        starts, lengths, leads = _runs(starts, lengths, leads, outer, cells.shape[dim - 1])
    size = math.prod(cells.shape[dim:]) * len(pattern)
    width = room.tensor.shape[dim]
    return Pad(room.data, data, starts, lengths, leads, width, size, pattern)


def _runs(
    starts: IntArray, lengths: IntArray, leads: IntArray | None, outer: int, total: int
) -> tuple[IntArray, IntArray, IntArray | None]:
    """Row i of a rectangle has `outer` runs; run a of it lies among those of all rows."""
    starts = (starts[:, None] + np.arange(outer) * total).reshape(-1)
    return starts, np.repeat(lengths, outer), None if leads is None else np.repeat(leads, outer)


# --- arguments ---------------------------------------------------------------------------------


def check_rectangle(value: Any, path: str) -> None:
    """Refuse what is no strided, non-nested tensor."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        raise ArgumentTypeError(
            "bad_type", path, f"expected a padded (strided) tensor, found {describe(value)}"
        )
    if value.is_quantized:
        raise ArgumentTypeError(
            "bad_dtype", path, f"expected a plain dtype, found {value.dtype}; dequantise it first"
        )


_LENGTH_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)


_LONGEST = np.iinfo(np.int64).max


def read_lengths(lengths: Any, path: str, *, rows: int | None = None) -> RowSplits:
    """Check (N,) lengths and sum them to row splits; the one place where they are read."""
    sent = plain_array(lengths)
    if sent is None:
        sent = _fetched_lengths(lengths, path)
    shape = sent.shape
    if len(shape) != 1 or (rows is not None and shape != (rows,)):
        expected = "(N,)" if rows is None else f"({rows},)"
        raise ArgumentError(
            "bad_shape", path, f"lengths shape {shape} != {expected}: expected one length per row"
        )
    kind = sent.dtype.kind
    if kind not in "iu":
        raise _bad_dtype(lengths, path)
    if kind == "u" and sent.itemsize == 8:
        # It alone may hold more than int64: what does reads as the largest length, and is too much.
        sent = np.minimum(sent, _LONGEST)
    host: IntArray = sent.astype(np.int64)
    splits = splits_of_lengths(host)
    if splits.min < 0:
        row = int(np.argmax(host < 0))
        raise ArgumentError(
            "bad_length", f"{path}, row {row}", f"expected a length of 0 or more, found {host[row]}"
        )
    if splits.max * len(host) > _LONGEST:
        raise ArgumentError(
            "bad_length", path, f"expected lengths that add up below 2**63, found {splits.max}"
        )
    return splits


def _fetched_lengths(lengths: Any, path: str) -> npt.NDArray[Any]:
    """Lengths that are no plain array: on a device, of a dtype that not every torch shares."""
    if not isinstance(lengths, torch.Tensor):
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected an (N,) tensor of lengths, found {describe(lengths)}; use torch.as_tensor",
        )
    if lengths.layout is not torch.strided or lengths.is_nested or lengths.is_meta:
        raise ArgumentTypeError(
            "bad_type", path, f"expected an (N,) tensor of lengths, found {describe(lengths)}"
        )
    if lengths.dtype not in _LENGTH_DTYPES:
        raise _bad_dtype(lengths, path)
    array: npt.NDArray[Any] = lengths.detach().cpu().numpy()
    return array


def _bad_dtype(lengths: torch.Tensor, path: str) -> ArgumentTypeError:
    return ArgumentTypeError("bad_dtype", path, f"expected integer lengths, found {lengths.dtype}")


# --- padded -> jagged --------------------------------------------------------------------------


@dataclass(eq=False)
class Strip(Unwritten):
    """The valid cells of a rectangle, where they lie: a column that is still to be packed.

    Attributes:
        source: (N, S, ...) or (M, ...), contiguous: M cells in either case.
        data: Their memory, where it is the CPU's and no gradient has to pass.
        starts: Where rows begin, of as many cells as `splits` says.
        splits: The rows.
        shape: Of the packed values: (total, ...).
        nbytes: Of the packed values.
    """

    source: torch.Tensor
    data: npt.NDArray[Any] | None
    starts: Starts
    splits: RowSplits
    shape: tuple[int, ...]
    nbytes: int

    def copy_to(self, out: ByteArray) -> Copy:
        """What puts the packed values into `nbytes` bytes of CPU memory, if there is `data`."""
        cell = self.nbytes // self.shape[0]
        data: Any = self.data
        return Copy(out, data, None, self.starts, self.splits.lengths, cell)


def packed(strips: Iterable[Strip]) -> list[Parts]:
    """Packed columns, copied: those in CPU memory into one block, freed with the last of them."""
    strips = list(strips)
    rooms = together([0 if strip.data is None else strip.nbytes for strip in strips])
    columns, copies = [], []
    for strip, room in zip(strips, rooms, strict=True):
        splits = strip.splits
        if strip.data is not None:
            if strip.nbytes:
                copies.append(strip.copy_to(room))
            values = from_bytes(room, strip.source.dtype, strip.shape)
        else:
            cells, starts = strip.source, rowcopy.numbers(strip.starts, splits.rows)
            if cells.dim() > len(strip.shape):
                cells = cells.flatten(0, 1)
            values = rowcopy.gather(cells, starts, splits.lengths)
        columns.append(Parts(values, splits.offsets, splits.starts, splits.lengths, 1, True))
    rowcopy.copy_all(copies)
    return columns


def strip(
    padded: torch.Tensor, splits: RowSplits, path: str, array: npt.NDArray[Any] | None = None
) -> Strip:
    """The valid cells of a rectangle (N, S, ...), `array` being its `plain_array` if it has one.

    Raises:
        ArgumentError: A row is longer than the rectangle is wide.
    """
    dims = padded.shape if array is None else array.shape
    width = dims[1]
    if splits.max > width:
        row = int(np.argmax(splits.lengths > width))
        raise ArgumentError(
            "bad_length",
            f"{path}, row {row}",
            f"expected a length of at most {width} (the padded width), found {splits.lengths[row]}",
        )
    shape = (splits.total, *dims[2:])
    cells = math.prod(shape)
    if array is not None and array.flags.c_contiguous:
        nbytes = cells * array.itemsize
        return Strip(padded, array, width, splits, shape, nbytes)
    if not cells:
        return Strip(padded.new_empty(shape), None, splits.starts, splits, shape, 0)
    source, stride = rows_in_place(padded)
    data = as_bytes(source) if source.is_cpu and not source.requires_grad else None
    return Strip(source, data, stride, splits, shape, cells * padded.itemsize)


def strip_or_rectangle(
    val: torch.Tensor,
    splits: RowSplits,
    path: str,
    exact_width: bool,
    array: npt.NDArray[Any] | None = None,
) -> Strip | torch.Tensor:
    """What to pack of a rectangle shaped as a per-token field; any other as it is; detached."""
    shape = val.shape if array is None else array.shape
    if len(shape) >= 2 and shape[0] == splits.rows:
        width = shape[1]
        if width == splits.max or (width > splits.max and not exact_width):
            return strip(val if array is not None else val.detach(), splits, path, array)
    return contiguous_bits(val)


def rows_in_place(padded: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A rectangle as (M, ...) cells in which row i begins at ``i * stride``.

    Slices such as ``wide[:, :S]`` and rows expanded from one are used where they lie.
    """
    padded = resolved(padded)
    inner = padded.shape[2:].numel()
    if not (padded[0].is_contiguous() and padded.stride(0) % inner == 0):
        padded = padded.contiguous() if padded.requires_grad else contiguous_bits(padded)
    stride = padded.stride(0) // inner
    cells = (padded.shape[0] - 1) * stride + padded.shape[1]
    flat = padded.as_strided((cells * inner,), (1,))
    return flat.view(cells, *padded.shape[2:]), stride


def _as_cells(values: torch.Tensor, ragged_dim: int) -> tuple[torch.Tensor, int, int]:
    """(A..., T, B...) -> (A * T, B...) cells, the number A of runs over the rows, and T."""
    values = values.contiguous() if values.requires_grad else contiguous_bits(values)
    outer = math.prod(values.shape[: ragged_dim - 1])
    total = values.shape[ragged_dim - 1]
    return values.view(outer * total, *values.shape[ragged_dim:]), outer, total
