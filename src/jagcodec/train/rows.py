"""Row algebra: choose, repeat, split and join rows of batches in any form.

`select_rows`, `repeat_rows` and `split_rows` take rows of one batch. `concat_rows` and
`join_columns` make one batch of several: its rows end to end, or its columns side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Union, Unpack, overload

import numpy as np

from jagcodec._arguments import host_array, require_flag, require_int
from jagcodec._compiling import untraced
from jagcodec.columns.held import as_leaf, column_of, read_offsets, with_columns
from jagcodec.columns.join import chosen_leaf
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.forward.assignment import Rules, assign_rows
from jagcodec.memory import INT64_MAX
from jagcodec.memory.arrays import IntArray, tensor_type
from jagcodec.memory.buffers import MessageLike
from jagcodec.rows.chosen_rows import choose_rows
from jagcodec.rows.lengths import Lengths, read_row_lengths
from jagcodec.rows.row_splits import Chosen, RowSplitsPool
from jagcodec.wire.compare import meta_without_conflicts
from jagcodec.wire.many.joined import join_rows
from jagcodec.wire.many.side_by_side import common_sizes, sharing, side_by_side
from jagcodec.wire.read.any_batch import (
    B,
    common_lengths,
    concat_in_memory,
    is_encoded,
    opened,
    opened_each,
    require_list,
    row_count_of,
    row_lengths_of,
    with_meta,
)
from jagcodec.wire.read.wire_batch import WireBatch, open_memory, rows_at

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase


@overload
def select_rows(batch: B, index: Any) -> B: ...


@overload
def select_rows(batch: MessageLike, index: Any) -> WireBatch: ...


@untraced
def select_rows(batch: Any, index: Any) -> Any:
    """These rows of a batch, in this order.

    Args:
        batch: A TensorDict of batch size (N, ...), a `WireBatch`, a `BatchedDataDict`, or a dict
            of columns of any kind: tensors, nested tensors, `PackedColumn`s, payloads, arrays,
            lists, batches. Or the frames or the blob of one.
        index: A slice, a range, integers (list, tensor, array; negative ones count from the end;
            they may repeat), N booleans, or one integer for a batch of one row.

    Returns:
        A batch of the same kind; for a message, a `WireBatch` that has read nothing yet. Columns
        of equal row lengths share one offsets tensor, and gradients flow through them. A
        slice or a range of step 1 aliases tensors, arrays, and contiguous values of jagged columns;
        anything else is copied, all jagged columns in one call. A payload of the whole batch stays
        one.

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
    source, rows = _open_with_rows(batch, where)
    return _choose_from(source, choose_rows(index, rows, f"{where}(index)"), where)


Times = Union[int, Sequence[int], "torch.Tensor"]


@overload
def repeat_rows(batch: B, times: Times, *, interleave: bool = ...) -> B: ...


@overload
def repeat_rows(batch: MessageLike, times: Times, *, interleave: bool = ...) -> WireBatch: ...


@untraced
def repeat_rows(batch: Any, times: Times, *, interleave: bool = True) -> Any:
    """Every row several times: one prompt per sample of its group.

    Args:
        batch: As for `select_rows`, which also describes the result.
        times: How often each row comes, 0 or more: one number, or one per row (N,).
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
    source, rows = _open_with_rows(batch, where)
    interleave = require_flag(interleave, f"{where}(interleave)")
    counts = _read_times(times, rows, f"{where}(times)", may_differ=interleave)
    all_rows = np.arange(rows)
    try:
        chosen = np.repeat(all_rows, counts) if interleave else np.tile(all_rows, int(counts))
    except (MemoryError, ValueError) as error:
        detail = f"expected rows whose numbers fit in memory, found {brief(times)} times {rows}"
        raise ArgumentError("too_large", f"{where}(times)", detail) from error
    return _choose_from(source, chosen, where)


def _read_times(times: Any, rows: int, path: str, *, may_differ: bool) -> IntArray:
    """How often rows are repeated: one number, or if they `may_differ`, one for each row."""
    expected = "an integer, or one per row" if may_differ else "an integer"
    counts = host_array(times, path, expected)
    if not counts.size and counts.ndim == 1:
        counts = counts.astype(np.int64)  # numpy makes floats of []
    if counts.dtype.kind not in "iu" or counts.ndim > 1 or (counts.ndim and not may_differ):
        raise ArgumentTypeError(
            "bad_type", path, f"expected {expected}, found {_shown_numbers(times)}"
        )
    if counts.ndim and len(counts) != rows:
        detail = f"expected {rows} numbers, one per row, found {len(counts)}"
        raise ArgumentError("row_mismatch", path, detail)
    if counts.size and counts.min() < 0:
        raise _bad_option(path, f"expected 0 or more, found {int(counts.min())}")
    if counts.size and counts.max() > INT64_MAX:
        raise _bad_option(path, f"expected less than 2**63, found {int(counts.max())}")
    return counts.astype(np.int64)


def _shown_numbers(value: Any) -> str:
    """Numbers that a caller passed, in a few words."""
    return describe(value) if isinstance(value, tensor_type()) else brief(value)


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


@untraced
def split_rows(
    batch: Any,
    parts: int | None = None,
    *,
    sizes: Sequence[int] | None = None,
    max_tokens: int | None = None,
    lengths: Lengths | None = None,
) -> list[Any]:
    """Split a batch into parts: equal ones, ones of given sizes, or ones within a token budget.

    Args:
        batch: As for `select_rows`.
        parts: How many contiguous parts, as equal as possible, longer ones first. With
            `max_tokens`, at least so many parts, for ranks that must all take the same number of
            steps.
        sizes: Rows of each part, contiguous and in order; they must add up to N.
        max_tokens: The most tokens of a part. `plan_micro_batches` decides which rows go where;
            each part keeps them in the order of the batch.
        lengths: (N,) tokens per row for `max_tokens`, or a jagged tensor, whose row lengths count;
            None means the row lengths that all jagged (or packed) columns have.

    Returns:
        Batches of the same kind, each as from `select_rows`.

    Raises:
        ArgumentError: More or less than one way to split is given; sizes do not add up; a row is
            longer than `max_tokens` (it is named); or jagged columns have different row lengths,
            and `lengths` is None.
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
    source, rows = _open_with_rows(batch, where)
    # With `max_tokens`, `parts` is the fewest parts, and not a way to split.
    ways = (parts if max_tokens is None else None, sizes, max_tokens)
    way_count = sum(way is not None for way in ways)
    if way_count != 1 or (max_tokens is None and lengths is not None):
        detail = "expected one of parts, sizes and max_tokens, and lengths only with max_tokens"
        raise _bad_option(where, detail)
    index: Sequence[Chosen]
    pool = RowSplitsPool()
    if max_tokens is not None:
        path = f"{where}(lengths)"
        if lengths is None:
            by_column = row_lengths_of(source, f"{where}(batch)", pool)
            tokens = common_lengths(by_column, path, "pass lengths")
        else:
            tokens = read_row_lengths(lengths, path, rows=rows).lengths
        index = _split_within(tokens, parts, max_tokens, where)
    else:
        if sizes is None:
            part_sizes = _equal_sizes(rows, require_int(parts, 1, f"{where}(parts)"), where)
        else:
            part_sizes = _read_sizes(sizes, rows, where)
        bounds = [0, *np.cumsum(part_sizes).tolist()]
        index = [range(start, end) for start, end in itertools.pairwise(bounds)]
    return [_choose_from(source, part, where, pool) for part in index]


def _split_within(
    tokens: IntArray, parts: int | None, max_tokens: int, where: str
) -> list[IntArray]:
    """The rows of each part, none of which exceeds `max_tokens`."""
    least = 1 if parts is None else require_int(parts, 1, f"{where}(parts)")
    if parts is not None and least > len(tokens):
        detail = f"expected at most {len(tokens)} parts, one per row, found {least}"
        raise _bad_option(f"{where}(parts)", detail)
    assignment = assign_rows(tokens, Rules(max_tokens=max_tokens, least=least, where=where))
    bounds = itertools.pairwise(assignment.bounds)
    return [assignment.order[start:end] for start, end in bounds]


def _equal_sizes(rows: int, parts: int, where: str) -> IntArray:
    """How many rows each part has, longer parts first."""
    size, longer_parts = divmod(rows, parts)
    try:
        sizes = np.full(parts, size, dtype=np.int64)
    except (MemoryError, ValueError, OverflowError) as error:
        detail = f"expected parts whose numbers fit in memory, found {brief(parts)}"
        raise ArgumentError("too_large", f"{where}(parts)", detail) from error
    sizes[:longer_parts] += 1
    return sizes


def _read_sizes(sizes: Any, rows: int, where: str) -> IntArray:
    """The sizes that a caller passed; an error unless they add up to all rows."""
    path, expected = f"{where}(sizes)", f"row counts that add up to {rows}"
    array = host_array(sizes, path, expected)
    array = array.astype(np.int64) if array.size == 0 else array
    plain = array.ndim == 1 and array.dtype.kind in "iu"
    # Reject sizes above the number of rows first, so that the sum does not wrap around.
    if not plain or (array < 0).any() or (array > rows).any() or array.sum() != rows:
        raise _bad_option(path, f"expected {expected}, found {_shown_numbers(sizes)}")
    return array.astype(np.int64)


def _bad_option(path: str, detail: str) -> ArgumentError:
    return ArgumentError("bad_option", path, detail)


def _open_with_rows(batch: Any, where: str) -> tuple[Any, int]:
    """The open batch, and its number of rows."""
    source = opened(batch, f"{where}(batch)")
    return source, row_count_of(source, f"{where}(batch)")


def _choose_from(batch: Any, chosen: Chosen, where: str, pool: RowSplitsPool | None = None) -> Any:
    """The chosen rows of an open batch, as a batch of the same kind."""
    if isinstance(batch, WireBatch):
        return rows_at(batch, chosen)
    pool = pool or RowSplitsPool()
    read_offsets([batch], pool)
    return chosen_leaf(batch, chosen, pool, f"{where}(batch)")


# --- joined ------------------------------------------------------------------------------------


@overload
def concat_rows(batches: Iterable[B]) -> B: ...


@overload
def concat_rows(batches: Iterable[MessageLike]) -> WireBatch: ...


@untraced
def concat_rows(batches: Iterable[Any]) -> Any:
    """The rows of several batches, one batch after the other.

    Args:
        batches: At least one, each as for `select_rows`, with the same columns in any order.

    Returns:
        A `WireBatch` over all of them if all are encoded: nothing is read or copied until a column
        is asked for. Otherwise a batch in the form of the first that is not, into which every
        column is copied once: objects in lists, arrays or leaves, numbers in arrays or tensors,
        jagged and packed columns have the form that they have in that batch. Columns of equal row
        lengths share one offsets tensor. A payload of the whole batch stays one if all batches have
        the same, bit for bit, and becomes one payload per row if not. `meta` of a `WireBatch` and
        ``meta_info`` of a `BatchedDataDict` have the values that all batches agree on. A TensorDict
        or a dict has no place for them, so it loses the `meta` of messages.

    Raises:
        ArgumentError: There is no batch, or a column differs between batches in layout, dtype,
            device or the shape of a row (nothing is promoted or guessed). A `WireBatch` raises it
            when the column, or its `schema`, is read.
        ArgumentKeyError: A batch lacks a column of another; both are named.
        ArgumentTypeError: Batches or columns differ in kind.
        WireFormatError: A message is malformed; the error names it.

    Example:
        >>> from jagcodec import concat_rows, pack_rows
        >>> both = concat_rows([pack_rows({"ids": [[5, 6], [7]]}), pack_rows({"ids": [[8, 9]]})])
        >>> [row.tolist() for row in both["ids"].unbind()]
        [[5, 6], [7], [8, 9]]
    """
    where = "concat_rows"
    parts = require_list(batches, f"{where}(batches)")
    are_encoded = all(map(is_encoded, parts))
    return join_rows(parts, where) if are_encoded else concat_in_memory(parts, where)


@untraced
def join_columns(batches: Iterable[Any], *, replace: bool = False) -> Any:
    """Put batches of the same rows side by side, such as a batch and what a worker wrote back.

    Args:
        batches: At least one, each as for `select_rows`. Pack padded columns first, by the row
            lengths of the batch: ``pack_jagged_fields(columns, lengths=td["ids"])``.
        replace: Let columns of later batches take the place of those of the same name.

    Returns:
        A `WireBatch` over all of them if one is encoded: only the row lengths of jagged columns are
        read, columns in memory stay where they are, and all are read as a message's are: a list as
        an array of objects. Otherwise a batch of the kind of the first, on its device. Columns in
        memory are aliased; jagged ones of equal row lengths share one offsets tensor, so that
        ``both["a"] * both["b"]`` works. Gradients flow through them, unless they are sent on. It
        has the batch dims that all batches have; a dict has one. Its `meta` has the values that no
        batch contradicts.

    Raises:
        ArgumentError: There is no batch, batches differ in their number of rows, a jagged column
            has row lengths that no column of the first batch has (the row is named), or two
            batches have a column of the same name.
        ArgumentTypeError: `batches` is one batch, or a value in it is not a batch.
        WireFormatError: A message is malformed; the error names it.

    Example:
        >>> import torch
        >>> from jagcodec import encode_fields, join_columns, materialize
        >>> lengths = torch.tensor([2, 3])
        >>> rollout = encode_fields({"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=lengths)
        >>> scores = encode_fields({"logprobs": torch.ones(2, 3)}, lengths=lengths)
        >>> both = join_columns([rollout, scores])
        >>> both.fields, materialize(both)["logprobs"].tolist()
        (('ids', 'logprobs'), [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    """
    where = "join_columns"
    replace = require_flag(replace, f"{where}(replace)")
    sources = opened_each(require_list(batches, f"{where}(batches)"), where)
    pool, columns = RowSplitsPool(), dict[str, Any]()
    in_memory = [batch for batch in sources if not isinstance(batch, WireBatch)]
    read_offsets(in_memory, pool)
    _check_side_by_side(sources, replace, where, pool)
    if len(in_memory) < len(sources):
        # Register the offsets of columns in memory, so that columns of messages share them.
        for name, leaf in itertools.chain.from_iterable(batch.items() for batch in in_memory):
            view = column_of(leaf).jagged_view(f"{where}[{name!r}]", pool)
            if view is not None:
                pool.unique(view.row_splits)
        each = [open_memory(b, f"{where}(batches[{i}])") for i, b in enumerate(sources)]
        return side_by_side(each, where, pool)
    model_batch = sources[0]
    rows, is_dict = row_count_of(model_batch, where), isinstance(model_batch, dict)
    if not is_dict:
        model_batch = _with_common_sizes(model_batch, sources)
    for batch in sources:
        for name, leaf in batch.items():
            columns[name] = leaf if is_dict else as_leaf(leaf, rows, f"{where}[{name!r}]")
    device = getattr(model_batch, "device", None)
    if device is not None:
        from jagcodec.columns.devices import moved  # only a batch of torch has a device

        columns = moved(columns, device, pool, lambda key: f"{where}[{'.'.join(key)!r}]")
    columns = {name: sharing(leaf, pool, f"{where}[{name!r}]") for name, leaf in columns.items()}
    return with_meta(with_columns(model_batch, columns, rows), sources, meta_without_conflicts)


def _with_common_sizes(td: TensorDictBase, batches: Sequence[Any]) -> TensorDictBase:
    """A TensorDict like this one, with the batch dims that all batches have."""
    dims = (getattr(batch, "batch_size", td.batch_size[:1]) for batch in batches)
    sizes = common_sizes(dims)
    if [*td.batch_size] == sizes:
        return td
    model = td.empty()
    model.batch_size = type(td.batch_size)(sizes)
    return model


def _check_side_by_side(
    batches: Sequence[Any], replace: bool, where: str, pool: RowSplitsPool
) -> None:
    """Refuse batches whose rows cannot stand side by side, or that have a name twice."""
    first = batches[0]
    rows = row_count_of(first, where)
    lengths_in_first = row_lengths_of(first, f"{where}(batches[0])", pool)
    names: set[str] = set()
    for i, batch in enumerate(batches):
        path = f"{where}(batches[{i}])"
        batch_rows = row_count_of(batch, path)
        if batch_rows != rows:
            detail = f"expected {rows} rows, like the first batch, found {batch_rows}"
            raise ArgumentError("row_mismatch", path, detail)
        for name in [name for name in batch.keys() if name in names and not replace]:  # noqa: SIM118
            detail = "expected a new name, found one of an earlier batch; pass replace=True"
            raise ArgumentError("conflict", f"{path}[{name!r}]", detail)
        names.update(batch.keys())
        if not i or not lengths_in_first:
            continue
        for name, lengths in row_lengths_of(batch, path, pool).items():
            if not any(np.array_equal(lengths, other) for other in lengths_in_first.values()):
                of_first, expected = next(iter(lengths_in_first.items()))
                row = int(np.flatnonzero(lengths != expected)[0])
                detail = f"expected {expected[row]} tokens like {of_first!r} of the first batch, "
                detail += f"found {lengths[row]}"
                raise ArgumentError("bad_length", f"{path}[{name!r}], row {row}", detail)
