"""Functions that make one jagged tensor: of a rectangle (N, S, ...), or of N rows.

They keep the names and the meanings of NeMo-RL's ``nemo_rl.data_plane.codec``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jagcodec._arguments import items_of, require_flag, require_int
from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, Reason
from jagcodec.memory.plain_types import TENSOR_TYPES, check_rectangle
from jagcodec.memory.tensor_bytes import (
    NUMPY_DTYPES,
    cat_bits,
    contiguous_bits,
    plain_array,
)
from jagcodec.produce.pads import first_unpadded
from jagcodec.produce.warnings import warn_of_leftovers, warn_of_rectangle
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.lengths import Lengths, read_row_lengths
from jagcodec.rows.nested import (
    is_jagged,
    nested_tensor,
)
from jagcodec.rows.of_tensors import rows_of_rectangle
from jagcodec.rows.row_splits import RowSplits
from jagcodec.rows.varlen import refuse_packed

_PADDED = "a padded (strided) tensor"

# --- of a rectangle ----------------------------------------------------------------------------


@untraced
def to_nested_by_length(padded: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Strip the padding of one rectangle: row i becomes ``padded[i, :lengths[i]]``.

    Example:
        >>> import torch
        >>> from jagcodec import to_nested_by_length
        >>> rows = to_nested_by_length(torch.tensor([[5, 6, 0], [7, 8, 9]]), [2, 3])
        >>> [row.tolist() for row in rows.unbind()]
        [[5, 6], [7, 8, 9]]

    Args:
        padded: (N, S, ...), any dtype, strides and device.
        lengths: (N,) integers, 0 to S: a tensor (its device is waited for once), an array, a list
            or a tuple. Or a jagged tensor (N, j), such as a response mask, for its row lengths.

    Returns:
        A `torch.jagged` nested tensor (N, j, ...) on the device of `padded`, with `min_seqlen` and
        `max_seqlen` set. It owns its memory, and gradients flow through it. It shares the offsets
        object of jagged `lengths` without holes, so that the two can be multiplied.

    Raises:
        ArgumentError: `padded` has fewer than two dims, `lengths` is not (N,), or a length is not
            0 to S (the row is named).
        ArgumentTypeError: `padded` is not a strided tensor, or lengths are not integers.
    """
    where = "to_nested_by_length"
    refuse_packed(padded, f"{where}(padded)", _PADDED)
    check_rectangle(padded, f"{where}(padded)")
    if padded.dim() < 2:
        detail = (
            f"expects (N, S, ...), found shape {tuple(padded.shape)}; values end to end are rows "
            "with torch.nested.nested_tensor_from_jagged(values, offsets)"
        )
        raise ArgumentError("bad_shape", f"{where}(padded)", detail)
    row_splits = read_row_lengths(lengths, f"{where}(lengths)", rows=padded.shape[0])
    return _jagged_of_rectangle(padded, row_splits, f"{where}(padded)")


@untraced
def maybe_pack_jagged(val: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Pack `val` if its shape looks per-token: ``val.shape[:2] == (N, max(lengths))``.

    This is a guess: it also packs other features of this shape, and leaves out a per-token field
    with more padding. `pack_per_token_field` does not guess.

    Example:
        >>> import torch
        >>> from jagcodec import maybe_pack_jagged
        >>> [maybe_pack_jagged(torch.ones(2, width), [1, 3]).is_nested for width in (3, 4)]
        [True, False]

    Args:
        val: Any strided tensor; a jagged one is returned detached.
        lengths: As for `to_nested_by_length`, but of any size.

    Returns:
        A jagged tensor as from `to_nested_by_length`, detached; else `val` detached and
        contiguous, in the same memory if it was contiguous. Warns (`JagcodecWarning`) if `val` is
        packed, holds integers on the CPU, and the first and the last cell after a row differ.

    Raises:
        ArgumentError: `lengths` is not (N,), or one is negative.
        ArgumentTypeError: `val` is not a strided tensor, or lengths are not integers.
    """
    return _jagged_or_kept(val, lengths, "maybe_pack_jagged", exact_width=True)


@untraced
def pack_per_token_field(val: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Pack a field that is known to be per-token, however far it is padded.

    Example:
        >>> import torch
        >>> from jagcodec import pack_per_token_field
        >>> pack_per_token_field(torch.ones(2, 8), [1, 3]).values().shape
        torch.Size([4])
        >>> pack_per_token_field(torch.ones(2), [1, 3]).shape
        torch.Size([2])

    Args:
        val: (N, S, ...) with S at least the longest length. A jagged one is returned detached.
        lengths: As for `maybe_pack_jagged`.

    Returns:
        A jagged tensor as from `to_nested_by_length`, detached; or `val` detached and contiguous
        if it does not have N rows, has fewer than two dims, or S is below the longest length.
        Warns (`JagcodecWarning`) if a `val` of two dims or more is not packed, and when
        `maybe_pack_jagged` warns. It raises the same errors.
    """
    return _jagged_or_kept(val, lengths, "pack_per_token_field", exact_width=False)


def _jagged_or_kept(val: Any, lengths: Lengths, where: str, *, exact_width: bool) -> torch.Tensor:
    """A rectangle whose shape fits the lengths as a jagged tensor; any other one contiguous."""
    row_splits, path = read_row_lengths(lengths, f"{where}(lengths)"), f"{where}(val)"
    if is_jagged(val):
        detached: torch.Tensor = val.detach()
        return detached
    refuse_packed(val, path, _PADDED)
    check_rectangle(val, path)
    widest = row_splits.max if exact_width else sys.maxsize
    fits = val.dim() > 1 and len(val) == row_splits.rows
    if fits and row_splits.max <= val.shape[1] <= widest:
        if first_unpadded({path: val}, row_splits) is not None:
            warn_of_leftovers(path)
        return _jagged_of_rectangle(val.detach(), row_splits, path)
    if val.dim() > 1 and not exact_width:
        warn_of_rectangle(path)
    return contiguous_bits(val)


def _jagged_of_rectangle(padded: torch.Tensor, row_splits: RowSplits, path: str) -> torch.Tensor:
    """The valid cells of a rectangle as a jagged tensor; an error if a length is above S."""
    view = rows_of_rectangle(padded, row_splits, path, plain_array(padded))
    return nested_tensor(values_of(view), row_splits)


# --- of rows -----------------------------------------------------------------------------------


@untraced
def stack_or_nest(
    tensors: Sequence[torch.Tensor], *, always_nest: bool = False, ragged_dim: int | None = None
) -> torch.Tensor:
    """Make one tensor of rows: stacked if all shapes are equal, jagged if one dim differs.

    Example:
        >>> import torch
        >>> from jagcodec import stack_or_nest
        >>> stack_or_nest([torch.ones(2), torch.ones(2)]).shape
        torch.Size([2, 2])
        >>> stack_or_nest([torch.ones(2), torch.ones(3)]).is_nested
        True

    Args:
        tensors: One tensor per row, of one dtype, device and number of dims.
        always_nest: Nest equal shapes too, for trainers that expect one layout
            (verl-project/verl#6407, #7661).
        ragged_dim: The ragged dim of the result, 1 being the first of a row: 2 for rows (3, n) of
            MRoPE position ids. None means the dim that differs, or 1.

    Returns:
        (N, ...) stacked, or a jagged tensor; ``torch.empty(0)`` for no tensors. It owns its memory,
        and gradients flow through it.

    Raises:
        ArgumentError: Shapes differ in more than one dim, in another dim than `ragged_dim`, or in
            their number of dims; dtypes or devices differ; or `always_nest` is given 0-d tensors.
        ArgumentTypeError: An item is not a strided tensor.
    """
    where = "stack_or_nest"
    always_nest = require_flag(always_nest, f"{where}(always_nest)")
    if ragged_dim is not None:
        ragged_dim = require_int(ragged_dim, 0, f"{where}(ragged_dim)")
    refuse_packed(tensors, f"{where}(tensors)", "a list of tensors")
    tensors = items_of(tensors, f"{where}(tensors)", "a list of tensors")
    if not tensors:
        return torch.empty(0)
    for i, tensor in enumerate(tensors):
        refuse_packed(tensor, f"{where}(tensors[{i}])", _PADDED)
        if type(tensor) not in TENSOR_TYPES or tensor.device == tensors[0].device:
            check_rectangle(tensor, f"{where}(tensors[{i}])")
        for what in ("dtype", "device", "ndim"):
            expected, found = getattr(tensors[0], what), getattr(tensor, what)
            if expected != found:
                detail = f"expected {what} {expected} like tensors[0], found {found}"
                reason: Reason = "bad_shape" if what == "ndim" else "bad_dtype"
                raise ArgumentError(reason, f"{where}(tensors[{i}])", detail)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    differing = [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(differing) > 1:
        detail = f"expected rows that differ in one dim, found dims {differing} differing"
        raise ArgumentError("bad_shape", f"{where}(tensors)", detail)
    dim = differing[0] if differing else None
    if dim is None and not always_nest:
        plain = tensors[0].dtype in NUMPY_DTYPES
        return torch.stack(tensors) if plain else cat_bits([row[None] for row in tensors], 0)
    if ragged_dim is not None:
        if dim not in (None, ragged_dim - 1) or not 1 <= ragged_dim <= len(shapes[0]):
            detail = f"expected rows that differ in dim {ragged_dim - 1}, found {shapes!r:.80}"
            raise ArgumentError("bad_shape", f"{where}(ragged_dim)", detail)
        dim = ragged_dim - 1
    dim = dim or 0
    if not shapes[0]:
        detail = "expected rows of at least one dim to nest, found 0-d tensors; stack them"
        raise ArgumentError("bad_shape", f"{where}(tensors)", detail)
    lengths = np.array([shape[dim] for shape in shapes], dtype=np.int64)
    return nested_tensor(cat_bits(tensors, dim), RowSplits.from_lengths(lengths), dim + 1)
