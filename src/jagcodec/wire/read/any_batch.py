"""Finds out which kind of batch a value is, and which columns it has.

`opened` comes first: it opens a batch in any form. Next come the questions whether a value is one
batch, several or a message; then the rows, schema, meta and row lengths of an open batch. Last come
`concat_in_memory`, which joins the rows of batches in any form, and `each_column` and
`columns_with_views`, which walk the columns of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

import numpy as np

from jagcodec._arguments import items_of
from jagcodec.columns.batch import FieldSchema, Key, values_of_batch, views_of, with_closed
from jagcodec.columns.held import (
    column_of,
    common_row_count,
    field_in_memory,
    read_offsets,
    with_columns,
)
from jagcodec.columns.join import join_leaves
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    WireFormatError,
    brief,
    describe,
)
from jagcodec.memory.arrays import ByteArray, IntArray
from jagcodec.memory.buffers import MessageLike
from jagcodec.rows.row_splits import Chosen, RowSplitsPool
from jagcodec.rows.views import RaggedView
from jagcodec.wire.checks import in_message
from jagcodec.wire.compare import common_meta, same_values
from jagcodec.wire.frames import begins_message, buffer_bytes, is_blob
from jagcodec.wire.read.wire_batch import WireBatch, check_batch, open_whole

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDictBase

OpenBatch: TypeAlias = Union["TensorDictBase", WireBatch, dict[str, Any]]
"""A batch that is open: a TensorDict, a `WireBatch`, a `BatchedDataDict`, or a dict of columns."""

AnyBatch: TypeAlias = OpenBatch | MessageLike
"""A batch in any form: an open one, or its frames or its blob."""

B = TypeVar("B", bound="TensorDictBase | WireBatch | dict[str, Any]")


def opened(source: Any, where: str) -> Any:
    """The batch that a value is: one in memory as it is, a message as a `WireBatch`.

    It reads no column, unless one of a dict is a `WireBatch`.
    """
    if column_of(source).has_columns:
        check_batch(source, where)
        return with_closed(source) if type(source) is dict else source
    if _is_one_message(source):
        return open_whole(source, where)
    detail = "expected a batch (a TensorDict, a dict of columns, a WireBatch, the frames of a "
    detail += f"message, or a blob), or for several a list of these, found {describe(source)}"
    raise ArgumentTypeError("bad_type", where, detail)


def require_list(batches: Iterable[Any], where: str) -> list[Any]:
    """The batches of a list, in any form; refuses a single batch, and an empty list."""
    one = column_of(batches).has_columns or bytes_of(batches) is not None
    listed = [] if one else items_of(batches, where, "a list of batches")
    if one or (listed and not are_several(listed)):
        raise ArgumentTypeError("bad_type", where, "expected a list of batches, found one batch")
    if not listed:
        raise ArgumentError("bad_option", where, "expected batches, found none")
    return listed


def are_several(source: Any) -> bool:
    """Whether a list holds batches, such as blobs, rather than the frames of one message."""
    if not isinstance(source, (list, tuple)) or not source:
        return False
    first = bytes_of(source[0])
    return first is None or is_blob(first)


def _is_one_message(source: Any) -> bool:
    if isinstance(source, (list, tuple)):
        one_blob = len(source) == 1 and bytes_of(source[0]) is not None
        return bool(source) and (one_blob or not are_several(source))
    return bytes_of(source) is not None


def bytes_of(value: Any) -> ByteArray | None:
    """The bytes of a buffer; None for any other value."""
    try:
        return buffer_bytes(value, "")
    except WireFormatError:
        return None


def is_batch(value: Any) -> bool:
    """Whether a value is a batch in any form, rather than a column."""
    holder = column_of(value)
    if holder.is_packed:  # it is a tuple, so the next line would look for frames in it
        return False
    return holder.has_columns or is_message(value)


def is_message(value: Any) -> bool:
    """Whether a value is the frames of a message, or a blob."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    data = bytes_of(first)  # A column of numbers also has bytes, so look for the magic.
    return data is not None and begins_message(data)


def is_encoded(batch: Any) -> bool:
    """Whether a batch is a message, open or not."""
    return isinstance(batch, (WireBatch, list, tuple)) or bytes_of(batch) is not None


def row_count_of(batch: Any, where: str) -> int:
    """N, the number of rows of an open batch."""
    if isinstance(batch, WireBatch):
        return len(batch)
    if isinstance(batch, dict):
        return common_row_count(batch, where) or 0
    return int(batch.batch_size[0])


def schema_of(source: Any, where: str) -> Mapping[str, FieldSchema]:
    """The descriptions of the columns of a batch in any form."""
    batch = opened(source, where)
    if isinstance(batch, WireBatch):
        return batch.schema
    rows = row_count_of(batch, where)
    return {name: field_in_memory(column, rows) for name, column in batch.items()}


def meta_of(batch: Any) -> dict[str, Any]:
    """The values that belong to the whole of an open batch."""
    meta: dict[str, Any] = (
        batch.meta if isinstance(batch, WireBatch) else getattr(batch, "meta_info", {})
    )
    return meta


def row_lengths_of(batch: Any, path: str, pool: RowSplitsPool) -> dict[str, IntArray]:
    """(N,) row lengths of each jagged or packed column of an open batch."""
    if isinstance(batch, WireBatch):
        each = ((name, batch.row_lengths(name)) for name in batch.fields)
        return {name: lengths for name, lengths in each if lengths is not None}
    row_lengths = {}
    for name, column in batch.items():
        view = column_of(column).view(f"{path}[{name!r}]", pool, detach=True)
        if view is not None:
            row_lengths[name] = view.row_splits.lengths
    return row_lengths


def common_lengths(row_lengths: Mapping[str, IntArray], path: str, remedy: str) -> IntArray:
    """The row lengths that all columns share, from the `row_lengths_of` a batch."""
    if not row_lengths:
        detail = f"expected a jagged column, which has row lengths, found none; {remedy}"
        raise ArgumentError("bad_option", path, detail)
    (first, lengths), *others = row_lengths.items()
    for name, these in others:
        if not np.array_equal(these, lengths):
            detail = (
                "expected columns of equal row lengths, "
                f"but those of {brief(first)} and {brief(name)} differ; {remedy}"
            )
            raise ArgumentError("bad_option", path, detail)
    return lengths


# --- all rows, and all columns --------------------------------------------------------------------


def concat_in_memory(batches: Sequence[Any], where: str, chosen: Chosen | None = None) -> Any:
    """All rows of batches in any form, or the `chosen` ones, as one batch in memory.

    The rows are copied once. The result is of the kind of the first batch that is not encoded.
    """
    open_ones = opened_each(batches, where)
    model = next((i for i, b in enumerate(open_ones) if not isinstance(b, WireBatch)), 0)
    model_batch = open_ones[model]
    whole, pool = [in_memory(batch, model_batch) for batch in open_ones], RowSplitsPool()
    read_offsets(whole, pool)
    joined = join_leaves(whole, chosen, pool, where, same_values, model)
    return with_meta(joined, open_ones, common_meta)


def opened_each(batches: Sequence[Any], where: str) -> list[Any]:
    """The batches as `opened` returns them; an error names the batch by its index."""
    open_ones = []
    for i, batch in enumerate(batches):
        path = f"{where}(batches[{i}])"
        try:
            open_ones.append(opened(batch, path))
        except WireFormatError as error:
            raise in_message(error, i) from error
        row_count_of(open_ones[i], path)  # this checks that columns of a dict have equal rows
    return open_ones


def in_memory(batch: Any, like_batch: Any) -> Any:
    """An open batch; a `WireBatch` as a batch in memory of the kind of `like_batch`."""
    if not isinstance(batch, WireBatch):
        return batch
    td = batch.to_tensordict()
    if isinstance(like_batch, dict):
        return with_columns(like_batch, dict(td.items()), len(batch))
    return td


def with_meta(
    joined: Any, batches: Sequence[Any], rule: Callable[[Sequence[Any]], dict[str, Any]]
) -> Any:
    """A joined batch in memory, whose `meta_info`, if any, `rule` makes of those of `batches`."""
    if hasattr(joined, "meta_info"):
        joined.meta_info = rule([meta_of(batch) for batch in batches])
    return joined


def each_column(
    batch: Any,
    of_view: Callable[[RaggedView, Key], Any],
    of_tensor: Callable[[torch.Tensor, Key], Any],
    path_of: Callable[[Key], str],
    pool: RowSplitsPool,
    *,
    kept: bool = False,
    above: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The columns of an open batch by name, as `of_view` and `of_tensor` return them.

    It calls `of_view` with each `RaggedView`, and `of_tensor` with each other tensor. Objects
    become arrays of one object per row, and nested batches become dicts. With `kept`, the caller
    may keep the memory of columns of messages. `path_of` names a column in errors. `above` has the
    names of the batches around this one.
    """
    columns: dict[str, Any] = {}
    if isinstance(batch, WireBatch):
        batch = values_of_batch(batch) if kept else views_of(batch)
    elif not above:
        read_offsets([batch], pool)
    for name, leaf in batch.items():
        key, kind = (*above, name) if above else name, type(leaf)
        if kind is RaggedView:
            columns[name] = of_view(leaf, key)
            continue
        holder, path = column_of(leaf), path_of(key)
        holder.check(path)
        if holder.has_tensor:
            columns[name] = of_tensor(leaf, key)
        elif holder.has_columns:
            # A nested function that calls itself would need no `above`, but would be a reference
            # cycle, which keeps the batch.
            inner, names = opened(leaf, path), (*above, name)
            columns[name] = each_column(
                inner, of_view, of_tensor, path_of, pool, kept=kept, above=names
            )
        else:
            view = holder.view(path, pool, detach=False)
            columns[name] = holder.object_array() if view is None else of_view(view, key)
    return columns


def columns_with_views(batch: Any, where: str, *, kept: bool = False) -> dict[str, Any]:
    """The columns of an open batch as `each_column` returns them, with jagged ones as views."""
    pool = RowSplitsPool()

    def path_of(key: Key) -> str:
        names = (key,) if isinstance(key, str) else key
        return where + "".join(f"[{name!r}]" for name in names)

    def in_place(tensor: torch.Tensor, key: Key) -> Any:
        view = column_of(tensor).view(path_of(key), pool, detach=False)
        return tensor if view is None else view

    return each_column(batch, lambda view, _: view, in_place, path_of, pool, kept=kept)
