"""A dict of columns to a batch: what a producer calls at its write site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec.buffers import contiguous_bits
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.layout import pack_or_keep, read_lengths
from jagcodec.payloads import leaf_of_rows
from jagcodec.ragged import Raggedness, is_jagged, take_apart


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: torch.Tensor | None,
    token_aligned_fields: Iterable[str] | None = None,
) -> TensorDict:
    """Padded columns to a batch of jagged ones: the write site of a producer.

    Args:
        fields: Name to column: tensors (N, ...), jagged tensors of N rows, or object arrays (N,).
        lengths: (N,) valid tokens per row. None packs nothing and takes N from the columns.
        token_aligned_fields: Names of the per-token columns, packed as by `pack_per_token_field`
            (with its fallback); every other one stays rectangular. Names that are no column are
            ignored, so that one set of names serves every batch. None: each tensor is packed
            or not as `maybe_pack_jagged` guesses from its shape.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in their order and no device. Packed
        columns own their memory and share one raggedness, so ``td["a"] * td["b"]`` works; jagged
        columns with the same row lengths join it. Rectangular columns are detached and alias
        contiguous input. Object arrays become one payload per row (`NonTensorStack`), aliased.

    Raises:
        ArgumentError: A column has not N rows, `lengths` is not one-dimensional, or one of them
            is negative.
        ArgumentTypeError: A column is neither a tensor nor an object array (it is named), or
            lengths are no integers.

    Example:
        >>> import torch
        >>> from jagcodec import pack_jagged_fields
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "reward": torch.tensor([0.0, 1.0])},
        ...     lengths=torch.tensor([2, 3]),
        ...     token_aligned_fields=["ids"],
        ... )
        >>> td["ids"].values().tolist(), td["reward"].tolist()
        ([5, 6, 7, 8, 9], [0.0, 1.0])
    """
    where = "pack_jagged_fields"
    raggedness = None
    if lengths is not None:
        raggedness = Raggedness(read_lengths(lengths, f"{where}(lengths)"))
    if isinstance(token_aligned_fields, str):
        raise ArgumentTypeError(
            "bad_type",
            f"{where}(token_aligned_fields)",
            f"expected a set of names, found the string {token_aligned_fields!r}; put it in a list",
        )
    named = None if token_aligned_fields is None else frozenset(token_aligned_fields)

    rows = raggedness.splits.rows if raggedness else None
    leaves: dict[str, Any] = {}
    for name, column in fields.items():
        path = f"{where}({name!r})"
        found = _rows(column, path)
        if rows is None:
            rows = found
        if found != rows:
            raise ArgumentError(
                "row_mismatch", path, f"expected {rows} rows like the batch, found {found}"
            )
        if isinstance(column, np.ndarray):
            leaves[name] = leaf_of_rows(list(column))
        elif is_jagged(column):
            leaves[name] = _joined(column.detach(), raggedness, path)
        elif raggedness is None or (named is not None and name not in named):
            leaves[name] = contiguous_bits(column)
        else:
            leaves[name] = pack_or_keep(column, raggedness, path, exact_width=named is None)
    return TensorDict(leaves, batch_size=[rows or 0])


def _rows(column: Any, path: str) -> int:
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim > 0:
        return len(column)
    if isinstance(column, torch.Tensor) and (
        is_jagged(column) or (column.layout is torch.strided and not column.is_nested)
    ):
        if column.dim() == 0:
            raise ArgumentError("bad_shape", path, "expected (N, ...), found a 0-d tensor")
        return int(column.shape[0])
    found = type(column).__name__
    if isinstance(column, np.ndarray):
        found = f"an array of dtype {column.dtype} and shape {column.shape}"
    elif isinstance(column, torch.Tensor):
        found = f"a {column.layout} tensor"
    raise ArgumentTypeError(
        "bad_type",
        path,
        f"expected a tensor or an object array, found {found}; "
        "use torch.from_numpy for numbers, and an (N,) array of dtype object for anything else",
    )


def _joined(jagged: torch.Tensor, raggedness: Raggedness | None, path: str) -> torch.Tensor:
    """A jagged column under the batch's raggedness, if its rows are that long."""
    if raggedness is None:
        return jagged
    parts = take_apart(jagged, path)
    if parts.compact and np.array_equal(parts.lengths, raggedness.splits.lengths):
        return raggedness.jagged(parts.values, parts.ragged_dim)
    return jagged
