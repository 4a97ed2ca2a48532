"""The rows of columns of every kind: counted, joined, repeated, and in parts of equal work."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from jagcodec._arguments import whole_number
from jagcodec.batch.compare import same_values
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import IntArray
from jagcodec.ragged.nested import is_jagged, view_of
from jagcodec.ragged.non_tensor import is_non_tensor
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import Lengths, RowSplitsPool, read_lengths
from jagcodec.ragged.select import join_leaves, not_a_column
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen


def row_count(column: Any, path: str) -> int | None:
    """N, for any column; None for a dict without columns, which has any number of rows."""
    if isinstance(column, torch.Tensor):
        if column.is_nested or column.dim():
            return int(column.size(0))
    elif isinstance(column, PackedColumn):
        return len(column.cu_seqlens) - 1
    elif isinstance(column, TensorDictBase) or is_non_tensor(column):
        if len(column.batch_size):
            return int(column.batch_size[0])
    elif isinstance(column, np.ndarray):
        if column.ndim:
            return len(column)
    elif isinstance(column, list):
        return len(column)
    elif isinstance(column, dict):
        return row_counts(column, path)
    raise not_a_column(column, path)


def row_counts(columns: Mapping[str, Any], path: str) -> int | None:
    """N of a dict of columns, which must all have as many rows; None if it is empty."""
    rows: int | None = None
    for name, column in columns.items():
        found = row_count(column, f"{path}[{name!r}]")
        rows = found if rows is None else rows
        if found not in (None, rows):
            detail = f"expected {rows} rows like the columns before it, found {found}"
            raise ArgumentError("row_mismatch", f"{path}[{name!r}]", detail)
    return rows


def lengths_of_columns(columns: Any, path: str) -> dict[str, Any]:
    """(N,) row lengths of the jagged and packed ones among columns."""
    pool, found = RowSplitsPool(), {}
    for name, column in columns.items():
        if isinstance(column, PackedColumn):
            found[name] = view_of_varlen(column, f"{path}[{name!r}]").row_splits.lengths
        elif is_jagged(column):
            found[name] = view_of(column, f"{path}[{name!r}]", pool).row_splits.lengths
    return found


def concat_leaves(
    leaves: Sequence[Any], pool: RowSplitsPool, path: str, chosen: Chosen | None = None
) -> Any:
    """`join_leaves`; what belongs to whole batches is the same if it is bit for bit."""
    return join_leaves(leaves, chosen, pool, path, same_values)


# --- which rows --------------------------------------------------------------------------------


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
        the rule finds. Equal lengths give equal parts on every rank.

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


def repeated_rows(rows: int, times: Any, interleave: bool) -> IntArray:
    """The rows of `repeat_rows`."""
    path = "repeat_rows(times)"
    counts = np.asarray(times.cpu() if isinstance(times, torch.Tensor) else times)
    if counts.dtype.kind not in "iu" or counts.ndim > 1 or (counts.ndim and not interleave):
        expected = "an integer, or one per row" if interleave else "an integer"
        raise ArgumentTypeError("bad_type", path, f"expected {expected}, found {times!r:.80}")
    if counts.ndim and len(counts) != rows:
        detail = f"expected {rows} numbers, one per row, found {len(counts)}"
        raise ArgumentError("row_mismatch", path, detail)
    if counts.size and counts.min() < 0:
        raise _bad(path, f"expected 0 or more, found {int(counts.min())}")
    every = np.arange(rows)
    return np.repeat(every, counts) if interleave else np.tile(every, int(counts))


def parts_of_rows(
    rows: int,
    parts: int | None,
    sizes: Sequence[int] | None,
    max_tokens: int | None,
    lengths: Lengths | None,
    known: Callable[[], Mapping[str, IntArray]],
) -> Sequence[Chosen]:
    """The rows of each part of `split_rows`; `known`: row lengths by the names of columns."""
    where = "split_rows"
    way = parts if max_tokens is None else max_tokens
    if (way is None) == (sizes is None) or (max_tokens is None and lengths is not None):
        detail = "expected one of parts, sizes and max_tokens (to which parts may be added), and "
        raise _bad(where, detail + "lengths only with max_tokens")
    if max_tokens is not None:
        if lengths is None:
            tokens = _common_lengths(known(), f"{where}(lengths)")
        else:
            tokens = read_lengths(lengths, f"{where}(lengths)", rows=rows).lengths
        return _balanced(tokens, parts, max_tokens, where)
    if sizes is None:
        count = whole_number(parts, 1, f"{where}(parts)")
        fewer, longer = divmod(rows, count)
        sizes = [fewer + 1] * longer + [fewer] * (count - longer)
    ends = [0, *np.cumsum(_sizes(sizes, rows, where)).tolist()]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _balanced(
    tokens: IntArray, parts: int | None, max_tokens: int | None, where: str
) -> list[IntArray]:
    """`balance_rows` of lengths that were read."""
    if parts is None and max_tokens is None:
        raise _bad(where, "expected parts, max_tokens, or both, found neither")
    count = 1 if parts is None else whole_number(parts, 1, f"{where}(parts)")
    if max_tokens is not None:
        budget = whole_number(max_tokens, 1, f"{where}(max_tokens)")
        if len(tokens) and tokens.max() > budget:
            row = int(np.argmax(tokens > budget))
            detail = f"expected rows of at most max_tokens={budget} tokens, found {tokens[row]}; "
            detail += "raise max_tokens or shorten the row"
            raise ArgumentError("row_too_long", f"{where}(lengths), row {row}", detail)
        count = max(count, -(-int(tokens.sum()) // budget), 1)
    if count > len(tokens):
        if not len(tokens) and parts is None:
            return []
        detail = f"expected at most {len(tokens)} parts, one per row, found {count}"
        raise _bad(f"{where}(parts)", detail)
    while True:
        rows, heaviest = _longest_first(tokens, count)
        if max_tokens is None or heaviest <= budget:
            return rows
        # Ever larger steps: to try each number costs too much where parts hold few rows.
        count = min(count + 1 + count // 64, len(tokens))


def _common_lengths(known: Mapping[str, IntArray], path: str) -> IntArray:
    """The row lengths that all ragged columns of a batch have."""
    if not known:
        raise _bad(path, "expected lengths or a jagged column, found neither")
    (first, lengths), *others = known.items()
    for name, found in others:
        if not np.array_equal(found, lengths):
            detail = f"expected lengths, for the rows of {first!r} and {name!r} differ; pass the "
            raise _bad(path, detail + "ones that count")
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
        detail = f"expected row counts that add up to {rows}, found {sizes!r:.80}"
        raise _bad(f"{where}(sizes)", detail)
    return array.astype(np.int64)


def _bad(path: str, detail: str) -> ArgumentError:
    return ArgumentError("bad_option", path, detail)
