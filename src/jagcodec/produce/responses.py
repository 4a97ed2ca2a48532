"""`response_from_nested`: the responses in rows of prompt and response."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, ArgumentTypeError, describe
from jagcodec.memory.plain_types import check_plain
from jagcodec.memory.staging import HostCopies
from jagcodec.memory.tensor_bytes import (
    number_array,
)
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.nested import (
    NestedParts,
    check_jagged,
    is_jagged,
    nested_tensor,
    parts_of,
    view_of_parts,
)
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.varlen import PackedColumn, check_varlen, view_of_varlen
from jagcodec.rows.views import RaggedView


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
    return nested_tensor(values_of(view.at_starts(starts, mask.row_splits)), mask.row_splits)


def _views_of(
    full: Any, response_mask: Any, where: str, copies: HostCopies
) -> tuple[RaggedView, RaggedView]:
    """Views of both. A mask that may be of whole rows is copied to the host, too."""
    given = {f"{where}(full)": full, f"{where}(response_mask)": response_mask}
    for path, value in given.items():
        if isinstance(value, PackedColumn):
            check_varlen(value, path)
        elif is_jagged(value):
            check_jagged(value, path)
        else:
            if isinstance(value, torch.Tensor):
                check_plain(value, path)
            detail = f"expected a jagged tensor, found {describe(value)}{_jagged_remedy(value)}"
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


def _jagged_remedy(value: Any) -> str:
    """The remedy for rows in another form: how they become a jagged tensor."""
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
    """The cell before each cell for which a mask of the same rows is True."""
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
    runs = view.at_starts(before, RowSplits.from_lengths(lengths))
    counts = np.zeros(splits.rows, dtype=np.int64)
    np.add.at(counts, rows, lengths)
    return nested_tensor(values_of(runs), RowSplits.from_lengths(counts))
