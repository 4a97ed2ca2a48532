"""Row algebra: choose, repeat, split and concatenate the rows of a batch.

One set of functions for TensorDicts (with jagged leaves, on every supported tensordict), for
`WireBatch`es, and for dicts of columns such as `BatchedDataDict`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from jagcodec._arguments import whole_number
from jagcodec.batch.compare import agreed
from jagcodec.batch.leaves import concat_leaves, row_counts, select_leaf
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.row_index import choose_rows
from jagcodec.ragged.row_splits import Lengths, RowSplitsPool, read_lengths
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen


class HasRows(Protocol):
    """A batch that chooses its rows itself, as a `WireBatch` does without reading them."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns."""
        ...

    def __len__(self) -> int:
        """N."""
        ...

    def rows(self, index: Any) -> Any:
        """These rows, as a batch of the same kind."""
        ...

    def row_lengths(self, name: str) -> IntArray | None:
        """(N,) lengths of the rows of a jagged column; None for any other column."""
        ...

    def to_tensordict(self) -> TensorDict:
        """All columns and rows."""
        ...


Batch: TypeAlias = "TensorDictBase | HasRows | dict[str, Any]"
"""What has rows: a TensorDict, an open message, or a dict of columns of one number of rows."""

B = TypeVar("B", bound=Batch)


def select_rows(batch: B, index: Any) -> B:
    """These rows of a batch, in this order.

    Args:
        batch: A TensorDict of batch size (N, ...), a `WireBatch`, a `BatchedDataDict`, or a dict
            of columns. Columns may be jagged (any ragged dim, holes, offsets of any integer
            width), rectangular, sparse (COO), packed, non-tensor, nested, numpy arrays or lists.
        index: A slice, integers (list, tensor, array; negative ones count from the end; they
            may repeat), N booleans, or one integer for a batch of one row.

    Returns:
        A batch of the same kind; `batch` is untouched. Columns of equal row lengths share one
        offsets tensor. A contiguous range (a slice of step 1) of contiguous CPU columns aliases
        them as torch's own slices do, which pickle sends with all that they are slices of
        (`encode` and a pickled `BatchedDataDict` do not); anything else is one copy per column.
        Gradients flow through it. Of a `WireBatch` nothing is read yet. A payload that belongs
        to the whole batch still does.

    Raises:
        ArgumentIndexError: A row does not exist.
        ArgumentTypeError: `batch` has no rows to choose, or `index` is none of these.
        ArgumentError: A column's layout has no rows to choose (CSR and its kin).

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
    table = _table(batch, f"{where}(batch)")
    selected: B = _chosen(table, choose_rows(index, len(table), f"{where}(index)"))
    return selected


def repeat_rows(
    batch: B, times: int | Sequence[int] | torch.Tensor, *, interleave: bool = True
) -> B:
    """Every row several times: one prompt per sample of its group.

    Args:
        batch: As for `select_rows`.
        times: How often, 0 or more; one number, or one per row (N,).
        interleave: True keeps the copies of a row together (0, 0, 1, 1, as GRPO's groups are);
            False repeats the whole batch (0, 1, 0, 1), which takes one number.

    Returns:
        A batch of the same kind, as from `select_rows`.

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
    table = _table(batch, f"{where}(batch)")
    rows = len(table)
    counts = np.asarray(times.cpu() if isinstance(times, torch.Tensor) else times)
    if counts.dtype.kind not in "iu" or counts.ndim > 1 or (counts.ndim and not interleave):
        raise ArgumentTypeError(
            "bad_type",
            f"{where}(times)",
            f"expected an integer{', or one per row,' if interleave else ''} found {times!r:.80}",
        )
    if counts.ndim and len(counts) != rows:
        raise ArgumentError(
            "row_mismatch",
            f"{where}(times)",
            f"expected {rows} numbers, one per row, found {len(counts)}",
        )
    if counts.size and counts.min() < 0:
        raise ArgumentError(
            "bad_option", f"{where}(times)", f"expected 0 or more, found {int(counts.min())}"
        )
    every = np.arange(rows)
    index = np.repeat(every, counts) if interleave else np.tile(every, int(counts))
    repeated: B = _chosen(table, index)
    return repeated


def split_rows(
    batch: B,
    parts: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    max_tokens: int | None = None,
    lengths: Lengths | None = None,
) -> list[B]:
    """A batch in parts: equal ones, ones of these sizes, or ones within a token budget.

    Args:
        batch: As for `select_rows`.
        parts: How many contiguous parts, in order; as equal as can be, longer ones first, empty
            ones last where there are fewer rows. With `max_tokens`: how many at least, as ranks
            that must all take as many steps need.
        sizes: Rows of each part, contiguous and in order; they must add up to N.
        max_tokens: No part has more tokens than this; parts are balanced by tokens, not
            contiguous, each in the order of the batch. `balance_rows` says which rows go where.
        lengths: (N,) tokens per row for `max_tokens`; None takes the row lengths that all jagged
            (or packed) columns have.

    Returns:
        Batches of the same kind, each as from `select_rows`.

    Raises:
        ArgumentError: Not one way to split was given; sizes do not add up; a row is longer than
            `max_tokens` (it is named); or jagged columns have different row lengths and
            `lengths` does not say which count.
        ArgumentTypeError: `batch` has no rows.

    Example:
        >>> import torch
        >>> from jagcodec import BatchedDataDict, split_rows
        >>> batch = BatchedDataDict(x=torch.arange(5))
        >>> [part["x"].tolist() for part in split_rows(batch, 2)]
        [[0, 1, 2], [3, 4]]
        >>> lengths = torch.tensor([5, 1, 4, 2, 3])
        >>> [p["x"].tolist() for p in split_rows(batch, max_tokens=8, lengths=lengths)]
        [[0, 1, 3], [2, 4]]
    """
    where = "split_rows"
    table = _table(batch, f"{where}(batch)")
    rows = len(table)
    if max_tokens is not None:
        if sizes is not None:
            raise _one_way(where)
        if lengths is None:
            tokens = _row_lengths(table, where)
        else:
            tokens = read_lengths(lengths, f"{where}(lengths)", rows=rows).lengths
        return [_chosen(table, part) for part in _balanced(tokens, parts, max_tokens, where)]
    if (parts is None) == (sizes is None) or lengths is not None:
        raise _one_way(where)
    if sizes is None:
        count = whole_number(parts, 1, f"{where}(parts)")
        fewer, longer = divmod(rows, count)
        sizes = [fewer + 1] * longer + [fewer] * (count - longer)
    ends = [0, *np.cumsum(_sizes(sizes, rows, where)).tolist()]
    return [_chosen(table, range(start, end)) for start, end in itertools.pairwise(ends)]


def balance_rows(
    lengths: Lengths,
    parts: int | None = None,
    *,
    max_tokens: int | None = None,
) -> list[IntArray]:
    """Which rows go into which part, so that parts have about as many tokens each.

    Args:
        lengths: (N,) tokens per row.
        parts: How many parts; with `max_tokens`, how many at least. None: as few as the budget
            allows.
        max_tokens: The most tokens of one part.

    Returns:
        Per part its rows, (rows,) int64 and rising; no part is empty. Longest rows first, each
        to the part that has the fewest tokens (Graham's LPT rule: at worst a third above the
        best). With `max_tokens` the number of parts is within a few percent of the fewest that
        the rule finds. Deterministic: equal lengths give equal parts on every rank.

    Raises:
        ArgumentError: Neither `parts` nor `max_tokens` is given, a row is longer than
            `max_tokens` (it is named), there are more parts than rows, or a length is negative.
        ArgumentTypeError: Lengths are not integers.

    To undo a split, choose by the inverse: ``select_rows(concat_rows(results),
    numpy.argsort(numpy.concatenate(parts)))``. What verl calls ``rearrange_micro_batches``.

    Example:
        >>> from jagcodec import balance_rows
        >>> [part.tolist() for part in balance_rows([5, 1, 4, 2, 3], max_tokens=8)]
        [[0, 1, 3], [2, 4]]
    """
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.from_numpy(np.array(lengths, dtype=None if len(lengths) else np.int64))
    where = "balance_rows"
    return _balanced(read_lengths(lengths, f"{where}(lengths)").lengths, parts, max_tokens, where)


def _balanced(
    tokens: IntArray, parts: int | None, max_tokens: int | None, where: str
) -> list[IntArray]:
    """`balance_rows` of lengths that were read."""
    if parts is None and max_tokens is None:
        raise ArgumentError(
            "bad_option", where, "expected parts, max_tokens, or both, found neither"
        )
    count = 1 if parts is None else whole_number(parts, 1, f"{where}(parts)")
    if max_tokens is not None:
        budget = whole_number(max_tokens, 1, f"{where}(max_tokens)")
        if len(tokens) and tokens.max() > budget:
            row = int(np.argmax(tokens > budget))
            raise ArgumentError(
                "row_too_long",
                f"{where}(lengths), row {row}",
                f"expected rows of at most max_tokens={budget} tokens, found {tokens[row]}; "
                "raise max_tokens or shorten the row",
            )
        count = max(count, -(-int(tokens.sum()) // budget), 1)
    if count > len(tokens):
        if not len(tokens) and parts is None:
            return []
        raise ArgumentError(
            "bad_option",
            f"{where}(parts)",
            f"expected at most {len(tokens)} parts, one per row, found {count}",
        )
    while True:
        rows, heaviest = _longest_first(tokens, count)
        if max_tokens is None or heaviest <= budget:
            return rows
        # Ever larger steps: to try each number costs too much where parts hold few rows.
        count = min(count + 1 + count // 64, len(tokens))


def concat_batches(batches: Iterable[Any], where: str) -> Any:
    """`concat_rows` of batches that are not all open messages."""
    if isinstance(batches, (TensorDictBase, dict)) or _chooses_rows(batches):
        raise ArgumentTypeError(
            "bad_type", f"{where}(batches)", "expected a list of batches, found one batch"
        )
    listed: list[Any] = list(batches)
    if not listed:
        raise ArgumentError("bad_option", f"{where}(batches)", "expected batches, found none")
    for i, batch in enumerate(listed):
        _table(batch, f"{where}(batches[{i}])")  # refuses what has no rows
    whole = [batch.to_tensordict() if _chooses_rows(batch) else batch for batch in listed]
    joined: Any = concat_leaves(whole, RowSplitsPool(), where)
    if any(hasattr(batch, "meta_info") for batch in listed):
        joined.meta_info = agreed([getattr(batch, "meta_info", {}) for batch in listed])
    return joined


class _Table:
    """A TensorDict or a dict of columns as a batch that chooses its rows."""

    def __init__(self, batch: Any, rows: int, path: str) -> None:
        self._batch = batch
        self._rows = rows
        self._path = path
        self._pool = RowSplitsPool()

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self._batch.keys())

    def __len__(self) -> int:
        return self._rows

    def rows(self, index: Any) -> Any:
        chosen = choose_rows(index, self._rows, self._path)
        return select_leaf(self._batch, chosen, RowSplitsPool(), self._path)

    def row_lengths(self, name: str) -> IntArray | None:
        path = f"{self._path}[{name!r}]"
        if isinstance(self._batch, LazyStackedTensorDict):
            return None  # its members have columns, which may not stack; it has none of its own
        column = self._batch.get(name)
        if isinstance(column, PackedColumn):
            return view_of_varlen(column, path).row_splits.lengths
        return view_of(column, path, self._pool).row_splits.lengths if is_jagged(column) else None

    def to_tensordict(self) -> Any:
        return self._batch


def _table(batch: Any, path: str) -> HasRows:
    """A batch of any kind as one that chooses its rows.

    Raises:
        ArgumentError: It has no batch dim, or its columns differ in their number of rows.
        ArgumentTypeError: It is not a batch.
    """
    if _chooses_rows(batch):
        return batch
    if isinstance(batch, TensorDictBase):
        if len(batch.batch_size):
            return _Table(batch, int(batch.batch_size[0]), path)
        raise ArgumentError("bad_shape", path, "expected batch size (N, ...), found no batch dim")
    if isinstance(batch, dict):
        return _Table(batch, row_counts(batch, path) or 0, path)
    raise ArgumentTypeError(
        "bad_type",
        path,
        f"expected a TensorDict, a WireBatch or a dict of columns, found {type(batch).__name__}",
    )


def _chooses_rows(batch: Any) -> TypeGuard[HasRows]:
    return hasattr(batch, "row_lengths")


def _chosen(table: HasRows, chosen: range | IntArray) -> Any:
    return table.rows(slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen)


def _row_lengths(table: HasRows, where: str) -> IntArray:
    """The row lengths that all ragged columns of a batch have."""
    lengths: IntArray | None = None
    first = ""
    for name in table.fields:
        found = table.row_lengths(name)
        if found is None:
            continue
        if lengths is None:
            lengths, first = found, name
        elif not np.array_equal(found, lengths):
            raise ArgumentError(
                "bad_option",
                f"{where}(lengths)",
                f"expected lengths, for the rows of {first!r} and {name!r} differ; pass the "
                "ones that count",
            )
    if lengths is None:
        raise ArgumentError(
            "bad_option",
            f"{where}(lengths)",
            f"expected lengths or a jagged column, found neither among {list(table.fields)!r:.200}",
        )
    return lengths


def _longest_first(tokens: IntArray, count: int) -> tuple[list[IntArray], int]:
    """Rows by part, and the tokens of the heaviest part."""
    parts: list[list[int]] = [[] for _ in range(count)]
    # Lightest first; among equally light ones that of fewest rows, so that none stays empty: as one
    # number each, tokens above rows above the part.
    heap = list(range(count))
    one_row, one_token = 1 << 32, 1 << 64
    sizes = tokens.tolist()
    for row in np.argsort(-tokens, kind="stable").tolist():
        light = heap[0]
        parts[light % one_row].append(row)
        heapq.heapreplace(heap, light + sizes[row] * one_token + one_row)
    return [np.sort(np.array(part, dtype=np.int64)) for part in parts], max(heap) // one_token


def _sizes(sizes: Any, rows: int, where: str) -> IntArray:
    array = np.asarray(sizes.cpu() if isinstance(sizes, torch.Tensor) else sizes)
    array = array.astype(np.int64) if array.size == 0 else array
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any() or array.sum() != rows:
        raise ArgumentError(
            "bad_option",
            f"{where}(sizes)",
            f"expected row counts that add up to {rows}, found {sizes!r:.80}",
        )
    return array.astype(np.int64)


def _one_way(where: str) -> ArgumentError:
    return ArgumentError(
        "bad_option",
        where,
        "expected one of parts, sizes and max_tokens (to which parts may be added), and lengths "
        "only with max_tokens",
    )
