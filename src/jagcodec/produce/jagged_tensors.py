"""One tensor: padded to jagged, and responses out of rows.

The public ones keep the names and meanings of NeMo-RL's ``nemo_rl.data_plane.codec``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import flag_of, items_of, whole_number
from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, ArgumentTypeError, Reason, describe
from jagcodec.memory.plain_types import LENGTH_DTYPES, TENSOR_TYPES, check_plain, check_rectangle
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import (
    NUMPY_DTYPES,
    cat_bits,
    contiguous_bits,
    number_array,
    plain_array,
)
from jagcodec.produce.warnings import warn_of_leftovers, warn_of_rectangle
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.lengths import Lengths, read_rows
from jagcodec.rows.nested import (
    NestedParts,
    check_jagged,
    is_jagged,
    nested_tensor,
    parts_of,
    view_of_parts,
)
from jagcodec.rows.of_tensors import rows_of_rectangle
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.varlen import PackedColumn, check_varlen, refuse_packed, view_of_varlen
from jagcodec.rows.views import RaggedView

_PADDED = "a padded (strided) tensor"

# --- padded -> jagged --------------------------------------------------------------------------


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
    row_splits = read_rows(lengths, f"{where}(lengths)", rows=padded.shape[0])
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
    row_splits, path = read_rows(lengths, f"{where}(lengths)"), f"{where}(val)"
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
    """(N, S, ...) -> jagged. Checks the lengths against S, and nothing else."""
    view = rows_of_rectangle(padded, row_splits, path, plain_array(padded))
    return nested_tensor(values_of(view), row_splits)


_FEW_ROWS = 16


def first_unpadded(columns: Mapping[str, Any], row_splits: RowSplits) -> str | None:
    """The first column of integers (N, S, ...) on the CPU, if not one of them looks padded.

    One that does is enough: others, such as position ids, may go on past the ends of rows.
    """
    first = None
    for name, column in columns.items():
        array = column
        if type(column) is not np.ndarray:
            if not column.is_cpu or column.dtype not in LENGTH_DTYPES:
                continue
            array = number_array(column)
        if array.dtype.kind in "iu":
            if _is_padded(array, row_splits):
                return None
            first = name if first is None else first
    return first


def _is_padded(array: npt.NDArray[Any], row_splits: RowSplits) -> bool:
    """Whether the first cell after each row is also the last cell of its rectangle's row."""
    lengths, rows, last = row_splits.lengths, row_splits.rows, array.shape[1] - 1
    if row_splits.min >= last or not array.size:
        return True
    if rows > _FEW_ROWS or array.ndim > 2:
        ends = array[np.arange(rows), np.minimum(lengths, last)]
        return bool((ends == array[:, last]).all())
    item, width = array.item, last + 1
    for row, length in enumerate(lengths.tolist()):  # faster than numpy for so few rows
        if length < last and item(row * width + length) != item(row * width + last):
            return False
    return True


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
    always_nest = flag_of(always_nest, f"{where}(always_nest)")
    if ragged_dim is not None:
        ragged_dim = whole_number(ragged_dim, 0, f"{where}(ragged_dim)")
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


# --- jagged -> jagged --------------------------------------------------------------------------


@untraced
def response_from_nested(
    full: torch.Tensor | PackedColumn, response_mask: torch.Tensor | PackedColumn
) -> torch.Tensor:
    """Each row's response, shifted left by one token.

    The model's output at position i (a logprob, a value) predicts token i + 1. So the outputs for
    a response of r tokens at the end of a row of n are ``row[n - r - 1 : n - 1]``. The name and
    the convention are verl's (``verl.workers.utils.padding``).

    Example:
        >>> import torch
        >>> from jagcodec import response_from_nested, stack_or_nest
        >>> full = stack_or_nest([torch.arange(4.0), torch.arange(10.0, 13.0)])
        >>> mask = stack_or_nest([torch.ones(3), torch.ones(1)])
        >>> [row.tolist() for row in response_from_nested(full, mask).unbind()]
        [[0.0, 1.0, 2.0], [11.0]]
        >>> turns = stack_or_nest([torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1])])
        >>> [row.tolist() for row in response_from_nested(full, turns).unbind()]
        [[0.0, 2.0], [11.0]]

    Args:
        full: Jagged (N, j, ...) or a `PackedColumn`: one value per token of prompt + response.
        response_mask: Jagged (N, k). Its row lengths are the response lengths, whatever its cells
            hold. If all its rows are as long as those of `full`, as a `RowBuilder` makes them, it
            is a mask of whole rows: the responses are the tokens for which it is True, or 1.

    Returns:
        Jagged (N, k, ...), with the dtype and device of `full`, and the offsets object of
        `response_mask` (if that has no holes), so that the two can be multiplied. For a mask of
        whole rows, (N, number of True, ...). Its values own their memory. Gradients flow through
        it.

    Raises:
        ArgumentError: Numbers of rows differ. Or a response is longer than its row, or begins with
            the row's first token, which no position predicted; the error names the row. Or a mask
            of whole rows is not (N, j) of 0 and 1.
        ArgumentTypeError: An argument is neither jagged nor packed.
    """
    where = "response_from_nested"
    copies = HostCopies()  # so that a device is waited for once
    view, mask = _views_of(full, response_mask, where, copies)
    if view.ragged_dim != 1 or mask.ragged_dim != 1:
        detail = f"expected ragged dim 1, found {view.ragged_dim} and {mask.ragged_dim}"
        raise ArgumentError("bad_shape", f"{where}(full, response_mask)", detail)
    lengths, responses = view.row_splits.lengths, mask.row_splits.lengths
    if len(lengths) != len(responses):
        detail = f"expected {len(lengths)} rows like full, found {len(responses)}"
        raise ArgumentError("row_mismatch", f"{where}(response_mask)", detail)
    prompts = lengths - responses
    if not prompts.any() and responses.any():
        return _cells_before_true(view, mask, f"{where}(response_mask)", copies)
    # An empty response asks for nothing, so its row may be empty.
    for row in np.flatnonzero((prompts <= 0) & (responses > 0)).tolist():
        n, r = lengths[row], responses[row]
        if r > n:
            detail = f"expected a response within its row of {n} tokens, found {r}"
            raise ArgumentError("bad_length", f"{where}(response_mask), row {row}", detail)
        what = f"the {r} response tokens in a row of {n}"
        raise _without_prompt(what, f"{where}(full), row {row}")
    starts = np.where(responses > 0, view.row_starts() + prompts - 1, 0)
    return nested_tensor(values_of(view.moved(starts, mask.row_splits)), mask.row_splits)


def _views_of(
    full: Any, response_mask: Any, where: str, copies: HostCopies
) -> tuple[RaggedView, RaggedView]:
    """The rows of both; a mask that may be of whole rows is copied to the host, too."""
    given = {f"{where}(full)": full, f"{where}(response_mask)": response_mask}
    for path, value in given.items():
        if isinstance(value, PackedColumn):
            check_varlen(value, path)
        elif is_jagged(value):
            check_jagged(value, path)
        else:
            if isinstance(value, torch.Tensor):
                check_plain(value, path)
            detail = f"expected a jagged tensor, found {describe(value)}{_as_jagged(value)}"
            raise ArgumentTypeError("bad_type", path, detail)
    both: list[Any] = [parts_of(x, detach=False) if is_jagged(x) else x for x in given.values()]
    numbers = [part.cu_seqlens for part in both if isinstance(part, PackedColumn)]
    jagged = [part for part in both if isinstance(part, NestedParts)]
    numbers += [n for part in jagged for n in (part.offsets, part.lengths) if n is not None]
    cells, masks = (part.values.detach() for part in both)
    copies.fetch([*numbers, masks] if masks.shape == cells.shape[:1] else numbers)
    pool = RowSplitsPool()
    view, mask = (
        (view_of_parts if isinstance(part, NestedParts) else view_of_varlen)(
            part, path, pool, copies
        )
        for part, path in zip(both, given, strict=True)
    )
    return view, mask


def _as_jagged(value: Any) -> str:
    """How rows in another form become a jagged tensor."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.dim():
        return ""
    if value.is_nested:
        return "; use stack_or_nest(x.unbind(), always_nest=True)"
    if value.dim() == 1:
        return "; values of a packed column p are p._replace(values=x)"
    return "; use to_nested_by_length"


def _without_prompt(what: str, path: str) -> ArgumentError:
    """The error for a response that has no token before it."""
    detail = (
        f"expected a prompt before {what}, found none; no position predicts the first: keep at "
        "least a begin-of-sequence token, which a mask of whole rows leaves out"
    )
    return ArgumentError("empty_prompt", path, detail)


def _cells_before_true(
    view: RaggedView, mask: RaggedView, path: str, copies: HostCopies
) -> torch.Tensor:
    """For each cell where a mask of the same rows is True, the cell before it."""
    splits, on_device = mask.row_splits, values_of(mask).detach()
    copies.fetch([on_device])
    cells = number_array(copies.of(on_device))
    if cells.ndim != 1:
        detail = (
            "expected a mask (N, j), because its rows are as long as those of full, "
            f"found {cells.ndim + 1} dims"
        )
        raise ArgumentError("bad_shape", path, detail)
    is_chosen = cells == 1
    wrong = np.flatnonzero(~is_chosen & (cells != 0))
    firsts = np.flatnonzero(splits.lengths)
    firsts = firsts[is_chosen[splits.starts[firsts]]]
    if len(wrong):
        row = int(np.searchsorted(splits.offsets_array, wrong[0], side="right")) - 1
        place = f"{path}, row {row}, cell {wrong[0] - splits.offsets_array[row]}"
        detail = (
            "expected 0 or 1, because the rows are as long as those of full, "
            f"found {cells[wrong[0]]}"
        )
        raise ArgumentError("bad_option", place, detail)
    if len(firsts):
        raise _without_prompt("the first token, which is True", f"{path}, row {firsts[0]}")
    edges = np.flatnonzero(np.diff(is_chosen, prepend=False, append=False))
    # No run of True is in two rows, because the first cell of each row is False.
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    rows = np.searchsorted(splits.offsets_array, starts, side="right") - 1
    before = view.row_starts()[rows] + starts - splits.starts[rows] - 1
    runs = view.moved(before, RowSplits.from_lengths(lengths))
    counts = np.zeros(splits.rows, dtype=np.int64)
    np.add.at(counts, rows, lengths)
    return nested_tensor(values_of(runs), RowSplits.from_lengths(counts))
