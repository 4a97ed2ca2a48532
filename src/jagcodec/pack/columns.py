"""Columns that a worker wrote back, merged into its batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from jagcodec._arguments import check_fields, check_rectangle, name_set
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, describe
from jagcodec.memory.tensor_bytes import plain_array
from jagcodec.pack.checks import look_after_rows
from jagcodec.pack.fields import check_rows
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import leaf_of_rows
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import rows_of_rectangle


def merge_columns(
    batch: TensorDictBase,
    columns: Mapping[str, Any],
    *,
    like: str | tuple[str, ...] | None = None,
    token_aligned_fields: Iterable[str] = (),
    replace: bool = False,
) -> TensorDict:
    """A batch with columns that a worker wrote back, each checked against the batch.

    Example:
        >>> import torch
        >>> from jagcodec import merge_columns, pack_jagged_fields, stack_or_nest
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=torch.tensor([2, 3])
        ... )
        >>> values = stack_or_nest([torch.ones(2), torch.ones(3)])
        >>> merged = merge_columns(td, {"values": values, "reward": torch.tensor([0.5, 1.0])})
        >>> (td["ids"] * merged["values"]).values().tolist()
        [5.0, 6.0, 7.0, 8.0, 9.0]
        >>> padded = {"scores": torch.tensor([[1, 2, 0], [3, 4, 5]])}
        >>> merged = merge_columns(td, padded, token_aligned_fields=["scores"])
        >>> merged["scores"].values().tolist()
        [1, 2, 3, 4, 5]

    Args:
        batch: TensorDict of batch size (N,).
        columns: Name to column, as for `pack_jagged_fields`: jagged tensors of N rows, tensors
            (N, ...), object arrays (N,), lists of N strings, or payloads with N rows.
        like: Name of the batch's jagged column whose row lengths every jagged one of `columns`
            must have; a tuple of names for one in a nested TensorDict. None: those of any jagged
            column of the batch, nested ones included. In a batch without jagged columns only
            the number of rows can be checked.
        token_aligned_fields: Names of those of `columns` that have one value per token. A padded
            one (N, S, ...) of them is packed by the row lengths of the batch, which its rows
            begin with. Names that are not among `columns` are ignored.
        replace: Let columns take the place of those of the same name.

    Returns:
        A new TensorDict with the batch's leaves (the same objects), names and device, then the
        new columns in their order. A jagged one has the offsets object of the batch's column
        that it was checked against, so that ``batch["a"] * merged["b"]`` works; where several
        have its row lengths, the first. Values are aliased where they are contiguous and on the
        batch's device, and gradients flow through them. Object arrays become one payload per row.

    Raises:
        ArgumentError: A column does not have N rows, its row lengths are not the batch's (the row
            is named), its name is taken, or `batch` does not have one batch dim. A padded column
            of `token_aligned_fields` is narrower than a row, or the batch's jagged columns differ
            in their row lengths and `like` does not say which to take.
        ArgumentKeyError: `like` is not a column of the batch.
        ArgumentTypeError: A column is none of the above, `like` is not jagged, or an argument
            is of another type.
    """
    where = "merge_columns"
    if not isinstance(batch, TensorDictBase) or isinstance(batch, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type", f"{where}(batch)", f"expected a TensorDict, found {type(batch).__name__}"
        )
    if len(batch.batch_size) != 1:
        raise ArgumentError(
            "bad_shape",
            f"{where}(batch)",
            f"expected batch size (N,), found {tuple(batch.batch_size)}",
        )
    if isinstance(columns, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type", f"{where}(columns)", "expected a dict of columns, found a lazy stack"
        )
    check_fields(columns, f"{where}(columns)")
    rows = batch.batch_size[0]
    pool = RowSplitsPool()
    known = _row_splits_of(batch, like, pool, where)
    per_token = name_set(token_aligned_fields, f"{where}(token_aligned_fields)")
    leaves: dict[str, Any] = dict(batch.items())
    for name, column in columns.items():
        path = f"{where}({name!r})"
        if name in leaves and not replace:
            raise ArgumentError(
                "conflict",
                path,
                "expected a new name, found a column of it in the batch; pass replace=True",
            )
        check_rows(column, rows, "like the batch", path)
        if isinstance(column, (np.ndarray, list)):
            leaves[name] = leaf_of_rows(list(column))
        elif is_jagged(column):
            view = view_of(column, path, pool, detach=False)
            row_splits = pool.unique(view.row_splits)
            if known:
                _check_known(row_splits, known, path)
            values = values_of(view)
            if batch.device is not None:
                values = values.to(batch.device)
            leaves[name] = nested_tensor(values, row_splits, view.ragged_dim)
        elif name in per_token and isinstance(column, torch.Tensor) and column.dim() > 1:
            check_rectangle(column, path)
            row_splits = _the_one(known, path)
            view = rows_of_rectangle(column, row_splits, path)
            array = plain_array(column)
            if array is not None and array.dtype.kind in "iu":
                look_after_rows(array, row_splits, path)
            values = values_of(view)
            if batch.device is not None:
                values = values.to(batch.device)
            leaves[name] = nested_tensor(values, row_splits)
        else:
            leaves[name] = column
    names = batch.names if any(name is not None for name in batch.names) else None
    return TensorDict(leaves, batch_size=[rows], names=names, device=batch.device)


def _the_one(known: Mapping[str, RowSplits], path: str) -> RowSplits:
    """The rows by which a padded column is packed."""
    if len(known) == 1:
        return next(iter(known.values()))
    raise ArgumentError(
        "bad_length",
        path,
        "expected a batch whose jagged columns have the same row lengths, found "
        + (f"{len(known)} different ones; say which with like=" if known else "none in it"),
    )


def _row_splits_of(
    batch: TensorDictBase, like: str | tuple[str, ...] | None, pool: RowSplitsPool, where: str
) -> dict[str, RowSplits]:
    """The rows that written-back columns may have, by the name of a column that has them."""
    jagged = dict(_jagged_columns(batch, ()))
    if like is not None:
        key = (like,) if isinstance(like, str) else like
        if not isinstance(key, tuple) or key not in batch.keys(include_nested=True):
            raise ArgumentKeyError(
                "no_such_field",
                f"{where}(like)",
                f"expected a column of the batch, found {like!r}",
            )
        if key not in jagged:
            raise ArgumentTypeError(
                "bad_type",
                f"{where}(like)",
                f"expected a jagged column, found {describe(batch.get(key))} in {like!r}",
            )
        jagged = {key: jagged[key]}
    known: dict[str, RowSplits] = {}
    for key, column in jagged.items():
        name = ".".join(key)
        row_splits = pool.unique(view_of(column, f"{where}({name!r})", pool).row_splits)
        if not any(row_splits is other for other in known.values()):
            known[name] = row_splits
    return known


def _jagged_columns(
    batch: TensorDictBase, above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    leaf: Any
    for name, leaf in batch.items():
        if is_jagged(leaf):
            yield (*above, name), leaf
        elif isinstance(leaf, TensorDict):
            yield from _jagged_columns(leaf, (*above, name))


def _check_known(row_splits: RowSplits, known: Mapping[str, RowSplits], path: str) -> None:
    """Refuse rows that no column of the batch has, and name the first that differs."""
    if any(row_splits is other for other in known.values()):
        return
    name, expected = next(iter(known.items()))
    row = int(np.flatnonzero(row_splits.lengths != expected.lengths)[0])
    others = f", nor like any of {len(known) - 1} other lengths" if len(known) > 1 else ""
    raise ArgumentError(
        "bad_length",
        f"{path}, row {row}",
        f"expected {expected.lengths[row]} tokens like {name!r}, "
        f"found {row_splits.lengths[row]}{others}",
    )
