"""Row algebra: choose, repeat, split and join batches, whatever form they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec.batch.columns import (
    B,
    concat_in_memory,
    in_memory,
    is_encoded,
    opened,
    opened_each,
    row_count_of,
    row_lengths_of,
    several,
    with_meta,
)
from jagcodec.batch.compare import uncontradicted
from jagcodec.batch.join import join_rows, side_by_side
from jagcodec.batch.leaves import parts_of_rows, repeated_rows, row_counts
from jagcodec.errors import ArgumentError
from jagcodec.memory.buffers import MessageLike
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, parts_of, view_of
from jagcodec.ragged.non_tensor import leaf_of_rows
from jagcodec.ragged.row_index import Chosen, choose_rows
from jagcodec.ragged.row_splits import Lengths, RowSplitsPool
from jagcodec.ragged.select import like, select_leaf
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen
from jagcodec.wire.wire_batch import WireBatch


@overload
def select_rows(batch: B, index: Any) -> B: ...


@overload
def select_rows(batch: MessageLike, index: Any) -> WireBatch: ...


def select_rows(batch: Any, index: Any) -> Any:
    """These rows of a batch, in this order.

    Args:
        batch: A TensorDict of batch size (N, ...), a `WireBatch`, a `BatchedDataDict`, or a dict
            of columns of any kind: tensors, nested tensors, `PackedColumn`s, payloads, arrays,
            lists, batches. Or the frames or the blob of one.
        index: A slice, a range, integers (list, tensor, array; negative ones count from the end;
            they may repeat), N booleans, or one integer for a batch of one row.

    Returns:
        A batch of the same kind; of a message a `WireBatch`, of which nothing is read yet.
        Columns of equal row lengths share one offsets tensor, and gradients flow through them. A
        slice or a range of step 1 aliases contiguous CPU columns; anything else is one copy per
        column. A payload of the whole batch stays one.

    Raises:
        ArgumentIndexError: A row does not exist.
        ArgumentTypeError: `batch` has no rows to choose, or `index` has another type.
        ArgumentError: A column is sparse, a lazy stack, or a stack of objects of several dims.

    The name and the order of arguments follow `torch.index_select`.

    Example:
        >>> import torch
        >>> from jagcodec import pack_jagged_fields, select_rows
        >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9], [3, 0, 0]])
        >>> td = pack_jagged_fields({"ids": ids}, lengths=torch.tensor([2, 3, 1]))
        >>> [row.tolist() for row in select_rows(td, [2, 0, 2])["ids"].unbind()]
        [[3], [5, 6], [3]]
    """
    where = "select_rows"
    source, rows = _opened(batch, where)
    return _chosen(source, choose_rows(index, rows, f"{where}(index)"), where)


Times = int | Sequence[int] | torch.Tensor


@overload
def repeat_rows(batch: B, times: Times, *, interleave: bool = ...) -> B: ...


@overload
def repeat_rows(batch: MessageLike, times: Times, *, interleave: bool = ...) -> WireBatch: ...


def repeat_rows(batch: Any, times: Times, *, interleave: bool = True) -> Any:
    """Every row several times: one prompt per sample of its group.

    Args:
        batch: As for `select_rows`, which also says what is returned.
        times: How often, 0 or more; one number, or one per row (N,).
        interleave: True keeps the copies of a row together (0, 0, 1, 1, as GRPO's groups are);
            False repeats the whole batch (0, 1, 0, 1), for one number only.

    Raises:
        ArgumentError: A number is negative, or there are not N of them.
        ArgumentTypeError: `times` is neither an integer nor integers.

    The meaning of `interleave` is that of ``verl.DataProto.repeat``.

    Example:
        >>> import torch
        >>> from jagcodec import BatchedDataDict, repeat_rows
        >>> repeat_rows(BatchedDataDict(prompt=torch.tensor([7, 8])), 2)["prompt"].tolist()
        [7, 7, 8, 8]
    """
    where = "repeat_rows"
    source, rows = _opened(batch, where)
    return _chosen(source, repeated_rows(rows, times, interleave), where)


class _SplitOptions(TypedDict, total=False):
    """Options of `split_rows`."""

    sizes: Sequence[int] | None
    max_tokens: int | None
    lengths: Lengths | None


@overload
def split_rows(batch: B, parts: int | None = ..., **options: Unpack[_SplitOptions]) -> list[B]: ...


@overload
def split_rows(
    batch: MessageLike, parts: int | None = ..., **options: Unpack[_SplitOptions]
) -> list[WireBatch]: ...


def split_rows(
    batch: Any,
    parts: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    max_tokens: int | None = None,
    lengths: Lengths | None = None,
) -> list[Any]:
    """A batch in parts: equal ones, ones of these sizes, or ones within a token budget.

    Args:
        batch: As for `select_rows`.
        parts: How many contiguous parts, as equal as can be, longer ones first.
            With `max_tokens`: how many at least, for ranks that must all take as many steps.
        sizes: Rows of each part, contiguous and in order; they must add up to N.
        max_tokens: The most tokens of a part. `balance_rows` decides which rows go where; each
            part keeps them in the order of the batch.
        lengths: (N,) tokens per row for `max_tokens`; None means the row lengths that all jagged
            (or packed) columns have.

    Returns:
        Batches of the same kind, each as from `select_rows`.

    Raises:
        ArgumentError: Not one way to split was given; sizes do not add up; a row is longer than
            `max_tokens` (it is named); or jagged columns have different row lengths, and
            `lengths` is None.
        ArgumentTypeError: `batch` has no rows.

    Example:
        >>> import torch
        >>> from jagcodec import BatchedDataDict, split_rows
        >>> batch = BatchedDataDict(x=torch.arange(5))
        >>> [part["x"].tolist() for part in split_rows(batch, 2)]
        [[0, 1, 2], [3, 4]]
        >>> [p["x"].tolist() for p in split_rows(batch, max_tokens=8, lengths=[5, 1, 4, 2, 3])]
        [[0, 1, 3], [2, 4]]
    """
    where = "split_rows"
    source, rows = _opened(batch, where)
    known = lambda: row_lengths_of(source, f"{where}(batch)")  # noqa: E731
    index = parts_of_rows(rows, parts, sizes, max_tokens, lengths, known)
    return [_chosen(source, part, where) for part in index]


def _opened(batch: Any, where: str) -> tuple[Any, int]:
    """An open batch, and N."""
    source = opened(batch, f"{where}(batch)")
    return source, row_count_of(source, f"{where}(batch)")


def _chosen(batch: Any, chosen: Chosen, where: str) -> Any:
    """These rows of an open batch."""
    if isinstance(batch, WireBatch):
        index: Any = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
        return batch.rows(index)
    return select_leaf(batch, chosen, RowSplitsPool(), f"{where}(batch)")


# --- joined ------------------------------------------------------------------------------------


@overload
def concat_rows(batches: Iterable[B]) -> B: ...


@overload
def concat_rows(batches: Iterable[MessageLike]) -> WireBatch: ...


def concat_rows(batches: Iterable[Any]) -> Any:
    """The rows of several batches, one batch after the other.

    Args:
        batches: At least one, each as for `select_rows`, with the same columns in any order.

    Returns:
        A `WireBatch` over all of them if all are encoded: nothing is read or copied until a column
        is asked for. Otherwise a batch of the kind of the first that is not, into which every
        column is copied once. Columns of equal row lengths share one offsets tensor. A payload of
        the whole batch stays one if all batches have the same, bit for bit, and becomes one
        payload per row if not. ``meta_info`` is what all of them agree on.

    Raises:
        ArgumentError: There is no batch, or a column differs between batches in layout, dtype,
            device or the shape of a row (nothing is promoted or guessed).
        ArgumentKeyError: A batch lacks a column of another; both are named.
        ArgumentTypeError: Batches or columns are not of one kind.
        WireFormatError: A message is malformed; the error names it.

    Example:
        >>> from jagcodec import concat_rows, pack_rows
        >>> both = concat_rows([pack_rows({"ids": [[5, 6], [7]]}), pack_rows({"ids": [[8, 9]]})])
        >>> [row.tolist() for row in both["ids"].unbind()]
        [[5, 6], [7], [8, 9]]
    """
    where = "concat_rows"
    listed = several(batches, f"{where}(batches)")
    encoded = all(map(is_encoded, listed))
    return join_rows(listed, where) if encoded else concat_in_memory(listed, where)


def join_columns(batches: Iterable[Any], *, replace: bool = False) -> Any:
    """Batches with other columns of the same rows, side by side: what a worker wrote back.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, join_columns, materialize
        >>> lengths = torch.tensor([2, 3])
        >>> rollout = encode_fields({"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=lengths)
        >>> scores = encode_fields({"logprobs": torch.ones(2, 3)}, lengths=lengths)
        >>> both = join_columns([rollout, scores])
        >>> both.fields, materialize(both)["logprobs"].tolist()
        (('ids', 'logprobs'), [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])

    Args:
        batches: At least one, each as for `select_rows`. Pack padded columns first, by the row
            lengths of the batch: ``pack_jagged_fields(columns, lengths=td["ids"])``.
        replace: Let columns of later batches take the place of those of the same name.

    Returns:
        A `WireBatch` over all of them if all are encoded: only the row lengths of jagged columns
        are read. Otherwise a batch of the kind of the first that is not, on its device. Its columns
        are aliased; jagged ones of equal row lengths share one offsets tensor, so that
        ``both["a"] * both["b"]`` works, and gradients flow through them. Its `meta` is what none of
        them contradicts.

    Raises:
        ArgumentError: There is no batch, they differ in their number of rows, a jagged column
            has row lengths that none of the first batch has (the row is named), or two have a
            column of the same name.
        ArgumentTypeError: `batches` is one batch, or a value in it is not a batch.
        WireFormatError: A message is malformed; the error names it.
    """
    where = "join_columns"
    open_ones = opened_each(several(batches, f"{where}(batches)"), where)
    _check_side_by_side(open_ones, replace, where)
    if all(isinstance(batch, WireBatch) for batch in open_ones):
        return side_by_side(open_ones)
    kind = next(batch for batch in open_ones if not isinstance(batch, WireBatch))
    pool, columns = RowSplitsPool(), {}
    for batch in open_ones:
        for name, leaf in in_memory(batch, kind).items():
            path = f"{where}[{name!r}]"
            column = leaf if isinstance(kind, dict) else _leaf_of_column(leaf, path)
            columns[name] = _sharing(column, pool, getattr(kind, "device", None), path)
    joined = like(kind, columns, row_count_of(kind, where))
    return with_meta(joined, open_ones, uncontradicted)


def _sharing(leaf: Any, pool: RowSplitsPool, device: torch.device | None, path: str) -> Any:
    """A column; a jagged one on `device`, with the offsets of its row lengths in the pool."""
    if not is_jagged(leaf):
        return leaf
    view = view_of(leaf, path, pool, detach=False)
    row_splits = pool.unique(view.row_splits)
    shared = row_splits.tensors.get(leaf.device) is parts_of(leaf).offsets
    if shared and view.starts is None and device in (None, leaf.device):
        return leaf
    values = values_of(view)
    if device is not None:
        values = values.to(device)
    return nested_tensor(values, row_splits, view.ragged_dim)


def _check_side_by_side(batches: Sequence[Any], replace: bool, where: str) -> None:
    first = batches[0]
    rows, known = row_count_of(first, where), row_lengths_of(first, f"{where}(batches[0])")
    names: set[str] = set()
    for i, batch in enumerate(batches):
        path = f"{where}(batches[{i}])"
        found = row_count_of(batch, path)
        if found != rows:
            detail = f"expected {rows} rows, like the first batch, found {found}"
            raise ArgumentError("row_mismatch", path, detail)
        for name in names.intersection(batch.keys()) if not replace else ():
            detail = "expected a new name, found a column of it in an earlier batch; pass "
            detail += "replace=True, or select the others"
            raise ArgumentError("conflict", f"{path}[{name!r}]", detail)
        names.update(batch.keys())
        for name, lengths in row_lengths_of(batch, path).items() if i and known else ():
            if not any(np.array_equal(lengths, other) for other in known.values()):
                of_first, expected = next(iter(known.items()))
                row = int(np.flatnonzero(lengths != expected)[0])
                detail = f"expected {expected[row]} tokens like {of_first!r} of the first batch, "
                detail += f"found {lengths[row]}"
                raise ArgumentError("bad_length", f"{path}[{name!r}], row {row}", detail)


def _leaf_of_column(column: Any, path: str) -> Any:
    """A column of a dict as a leaf of a TensorDict."""
    if isinstance(column, PackedColumn):
        view = view_of_varlen(column, path)
        return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
    if isinstance(column, list) or (isinstance(column, np.ndarray) and column.dtype == object):
        return leaf_of_rows(list(column))
    if isinstance(column, np.ndarray):
        return torch.as_tensor(column)
    if isinstance(column, dict):
        leaves = {k: _leaf_of_column(inner, f"{path}[{k!r}]") for k, inner in column.items()}
        return TensorDict(leaves, batch_size=[row_counts(column, path) or 0])
    return column
