"""`concat_rows` and `join_columns`: several batches as one.

Making a join reads no payload. Jagged columns, rectangles and documents of messages
in memory are then read in place: one kernel call writes the rows of all messages to one rectangle.
Whatever else messages hold is read from each, and put together as `concat_rows` does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from jagcodec.batch.compare import agreed
from jagcodec.batch.leaves import concat_leaves
from jagcodec.batch.messages import Messages
from jagcodec.errors import (
    ArgumentError,
    WireFormatError,
)
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.copy_rows import gathered, values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import leaf_of_rows, object_array
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.select import same_fields
from jagcodec.ragged.views import RaggedView, concat_views
from jagcodec.wire import documents
from jagcodec.wire.checks import INT64_MAX, fail
from jagcodec.wire.leaf import FieldSchema
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.lowered import Documents
from jagcodec.wire.message import ChosenRows
from jagcodec.wire.spec import Kind
from jagcodec.wire.stacked import Frames, Stack, in_message, open_stacks, stacked
from jagcodec.wire.wire_batch import As, Column, ColumnSource, MessageColumns, WireBatch, open_whole

# --- rows one after the other ------------------------------------------------------------------


class JoinedRows(ColumnSource):
    """The rows of several batches, one batch after the other. A column is known by its name."""

    def __init__(
        self,
        names: Sequence[str],
        counts: Sequence[int],
        parts: list[Any],
        messages: Messages | None,
    ) -> None:
        """Batches of some `counts` of rows.

        Args:
            names: Of the columns.
            counts: As above.
            parts: A `WireBatch` for each; or its message, which is opened when it is needed.
            messages: What they are in; None if columns have to be read from each by itself.
        """
        rows = sum(counts)
        if rows > INT64_MAX:
            raise fail("bad_rows", f"expected fewer than 2**63 rows in all, found {rows}")
        if isinstance(parts[0], WireBatch):
            like = parts[0].source
            super().__init__(names, [rows, *like.sizes[1:]], like.device, like.allow_pickle)
        else:
            super().__init__(names, [rows], None, allow_pickle=False)
        self._counts = counts
        self._parts = parts
        self._messages = messages
        self._pool = RowSplitsPool()  # of all rows; chosen ones have their own

    def columns(self) -> Mapping[str, Column]:
        return {name: Column(self, name) for name in self.names}

    def parts(self) -> Iterator[WireBatch]:
        """All of the batches."""
        return map(self._part, range(len(self._parts)))

    def _part(self, index: int) -> WireBatch:
        part = self._parts[index]
        if not isinstance(part, WireBatch):
            part = self._parts[index] = open_one(index, part)
        return part

    def meta(self) -> dict[str, Any]:
        return agreed([self._meta(i) for i in dict.fromkeys(self._metas_from())])

    def metas(self) -> list[dict[str, Any]]:
        return [self._meta(i) for i in self._metas_from()]

    def _meta(self, index: int | None) -> dict[str, Any]:
        return {} if index is None else self._part(index).meta

    def _metas_from(self) -> list[int | None]:
        """For each batch, the index of the batch to read its `meta` from; None: it has none."""
        if self._messages is None:
            return list(range(len(self._parts)))
        first: dict[Any, int | None] = {None: None}
        return [first.setdefault(known, i) for i, known in enumerate(self._messages.metas)]

    def schema(self, key: str, rows: int) -> FieldSchema:
        kind, dtype, shape = self._part(0).select([key]).schema[key]
        return FieldSchema(kind, dtype, shape if shape is None else (rows, *shape[1:]))

    def row_lengths(self, name: str, key: str, chosen: ChosenRows | None) -> IntArray | None:
        kind, view = self._in_place(key)
        found = [part.row_lengths(key) for part in self.parts()] if view is None else []
        if view is not None and kind is Kind.JAGGED:
            found = [view.row_splits.lengths]
        known = [lengths for lengths in found if lengths is not None]
        if not known or len(known) < len(found):
            return None
        lengths = np.concatenate(known)
        return lengths if chosen is None else lengths[chosen.at]

    def narrow_names(self, name: str, key: str) -> list[tuple[str, ...]]:
        place = None if self._messages is None else self._messages.place(key)
        if place is not None:
            return [(name,)] if place.narrow else []
        each = [part.select([key]).narrow_names() for part in self.parts()]
        return list(dict.fromkeys(chain.from_iterable(each)))

    def read(self, keys: Mapping[str, str], chosen: ChosenRows | None, form: As) -> dict[str, Any]:
        leaves = form is As.LEAF or form is As.LEAVES
        columns: dict[str, Any] = {}
        copied: dict[str, tuple[Kind, RaggedView]] = {}
        for name in keys:
            kind, view = self._in_place(name, chosen)
            columns[name] = view
            if view is not None and (leaves or kind is not Kind.JAGGED):
                copied[name] = kind, view
        values = gathered(view for _, view in copied.values())
        for (name, (kind, view)), data in zip(copied.items(), values, strict=True):
            columns[name] = data
            if kind is Kind.JAGGED:
                columns[name] = nested_tensor(data, view.row_splits)
            elif kind is Kind.NON_TENSOR_ROWS:
                read = _unread if form is As.ITEM else _objects
                columns[name] = read(data, view.row_splits)
        apart = [name for name, column in columns.items() if column is None]
        if apart:
            columns |= self._apart(apart, chosen)
        if leaves:
            return {name: _leaf(column) for name, column in columns.items()}
        if form is As.ITEM:
            for name, column in columns.items():
                columns[name] = list(column) if isinstance(column, np.ndarray) else column
        return columns

    def _in_place(
        self, name: str, chosen: ChosenRows | None = None
    ) -> tuple[Kind, RaggedView | None]:
        """The rows of a column in place; also of a rectangle and of documents.

        None if they have to be read from each batch.
        """
        messages = self._messages
        view = None if messages is None else messages.view(name)
        if messages is None or view is None:
            return Kind.JAGGED, None
        row_splits, starts = view.row_splits, view.starts
        if chosen is not None:
            row_splits, starts = chosen.among(0, row_splits)
            if view.starts is not None:
                starts = view.row_starts()[chosen.at]
        row_splits = self._pool_of(chosen).unique(row_splits)
        if chosen is not None or row_splits is not view.row_splits:
            view = replace(view, starts=starts, row_splits=row_splits)
        return messages.kind(name), view

    def _pool_of(self, chosen: ChosenRows | None) -> RowSplitsPool:
        return self._pool if chosen is None else chosen.pool

    # Batch by batch

    def _apart(self, names: Sequence[str], chosen: ChosenRows | None) -> dict[str, Any]:
        """Columns that are read from each batch, in the form that `WireBatch.columns` has."""
        each: dict[str, list[Any]] = {name: [] for name in names}
        wanted, order = self._rows_of_parts(chosen)
        for i, rows in wanted:
            batch = self._part(i).select(names)
            with in_message(i):
                batch = batch if rows is None else batch.rows(rows)
                on_host = self.device is None
                columns = batch.columns() if on_host else [(n, batch[n]) for n in names]
                for name, column in columns:
                    nested = isinstance(column, WireBatch)
                    each[name].append(column.to_tensordict() if nested else column)
        pool = self._pool_of(chosen)
        return {name: _together(name, columns, order, pool) for name, columns in each.items()}

    def _rows_of_parts(
        self, chosen: ChosenRows | None
    ) -> tuple[list[tuple[int, Any]], IntArray | None]:
        """The batches that rows were chosen of, with these; and the order of all of these then."""
        if chosen is None:
            return [(i, None) for i in range(len(self._parts))], None
        if not len(chosen):
            return [(0, slice(0, 0))], None
        index, ends = chosen.index, np.cumsum(self._counts)
        begins = [0, *ends.tolist()]
        if isinstance(index, range):
            first, last = np.searchsorted(ends, (index.start, index.stop - 1), side="right")
            spans = [(i, begins[i]) for i in range(first, last + 1)]
            return [(i, slice(max(0, index.start - at), index.stop - at)) for i, at in spans], None
        part_of = np.searchsorted(ends, index, side="right")
        order = np.argsort(part_of, kind="stable")
        numbers, firsts = np.unique(part_of[order], return_index=True)
        rows = np.split(index[order], firsts[1:])
        wanted = [(i, own - begins[i]) for i, own in zip(numbers.tolist(), rows, strict=True)]
        in_order = bool((order[:-1] < order[1:]).all())
        return wanted, None if in_order else np.argsort(order)


def _objects(data: torch.Tensor, row_splits: RowSplits) -> Any:
    """(N,) objects of documents end to end; None if each is for the reader of its message."""
    raw = data.numpy().tobytes()
    if not documents.may_hold_records(raw):
        with suppress(WireFormatError):  # found again, in the message that it is of
            ends = row_splits.host[1:].tolist()
            return object_array(documents.unpack_rows(raw, ends, range(len(ends))))
    return None


def _unread(data: torch.Tensor, row_splits: RowSplits) -> Documents | list[Any]:
    """(N,) documents end to end, to be sent on."""
    raw = data.numpy().tobytes()
    bounds = pairwise(row_splits.host.tolist())
    return Documents([raw[start:end] for start, end in bounds]) if row_splits.rows else []


def _together(
    name: str, columns: Sequence[Any], order: IntArray | None, pool: RowSplitsPool
) -> Any:
    """A column of several batches, in the order of its rows that was asked for."""
    views = all(isinstance(column, RaggedView) for column in columns)
    view = concat_views(columns) if views else None
    if view is not None:  # of rows that share what they share in their messages
        if order is not None:
            view = view.choose(order, RowSplits.from_lengths(view.row_splits.lengths[order]))
        return replace(view, row_splits=pool.unique(view.row_splits))
    path = f"concat_rows[{name!r}]"
    objects = all(isinstance(column, np.ndarray) for column in columns)
    leaves = columns if objects else [_leaf(column) for column in columns]
    joined = concat_leaves(leaves, pool, path, order)
    return view_of(joined, path, pool) if is_jagged(joined) else joined


def _leaf(column: Any) -> Any:
    """A column, in the form that `WireBatch.columns` has, as a leaf of a TensorDict."""
    if isinstance(column, RaggedView):
        kept = isinstance(column.memory, torch.Tensor)
        values = values_of(column) if kept else gathered([column])[0]
        return nested_tensor(values, column.row_splits, column.ragged_dim)
    return leaf_of_rows(list(column)) if isinstance(column, np.ndarray) else column


# --- columns side by side ----------------------------------------------------------------------


class JoinedColumns(ColumnSource):
    """The columns of several batches of the same rows, each of which its own source reads."""

    def __init__(self, columns: Mapping[str, Column], batches: Sequence[WireBatch]) -> None:
        first = batches[0].source
        pickle = any(batch.source.allow_pickle for batch in batches)
        super().__init__(tuple(columns), first.sizes, first.device, pickle)
        self._columns = columns
        self._batches = batches
        self._pool = RowSplitsPool()

    def columns(self) -> Mapping[str, Column]:
        return self._columns

    def meta(self) -> dict[str, Any]:
        # The rows are the same: a message without a value does not speak against it.
        found: dict[str, Any] = {}
        for name in dict.fromkeys(chain.from_iterable(metas := self.metas())):
            found |= agreed([{name: meta[name]} for meta in metas if name in meta])
        return found

    def metas(self) -> list[dict[str, Any]]:
        return [batch.meta for batch in self._batches]

    def shared(self, column: Any, chosen: ChosenRows | None) -> Any:
        pool = self._pool if chosen is None else chosen.pool
        if is_jagged(column):
            view = view_of(column, "join_columns", pool)
            return nested_tensor(values_of(view), pool.unique(view.row_splits), view.ragged_dim)
        if isinstance(column, RaggedView):
            return replace(column, row_splits=pool.unique(column.row_splits))
        return column


# --- several messages --------------------------------------------------------------------------


def join_rows(sources: Iterable[Any], where: str) -> WireBatch:
    """The rows of several open batches, as chosen in each, or of messages that are opened together.

    Args:
        sources: A `WireBatch`, frames or a blob each.
        where: What errors call it.

    Raises:
        ArgumentKeyError: They do not have the same columns.
        ArgumentError: They differ in their batch dims after the first.
        WireFormatError: One is damaged, or not the message of a batch; the error names it.
    """
    parts: list[Any] = []
    for source in sources:
        joined = source.source if isinstance(source, WireBatch) and source.chosen is None else None
        if isinstance(joined, JoinedRows):
            parts += [part.select(source.fields) for part in joined.parts()]
        else:  # the caller may change a list of frames before a column is read
            parts.append(list(source) if isinstance(source, list) else source)
    stacks: list[Stack] = []
    frames: list[Sequence[ByteArray] | None] = [None] * len(parts)
    if not any(isinstance(part, WireBatch) for part in parts):
        stacks, frames = open_stacks(parts, where, DEFAULT_LIMITS)
    counts = np.zeros(len(parts), dtype=np.int64)
    fields: dict[int, Sequence[str]] = {}
    for stack in stacks:
        counts[stack.members] = stack.numbers[:, stack.node.dims]
        fields[int(stack.members[0])] = stack.node.fields[-1]
    inner: Sequence[int] = []
    opened: list[tuple[int, MessageColumns]] = []
    for i, part in enumerate(parts):
        if frames[i] is not None:
            continue
        if not isinstance(part, WireBatch):
            part = parts[i] = open_one(i, part)
        source, counts[i], fields[i] = part.source, len(part), part.fields
        inner = inner if i else source.sizes[1:]
        if source.sizes[1:] != inner:
            raise ArgumentError(
                "bad_shape",
                f"{where} of batch {i}",
                f"expected batch dims {list(inner)} after the first, like batch 0, "
                f"found {list(source.sizes[1:])}",
            )
        if isinstance(source, MessageColumns) and part.chosen is None:
            frames[i] = source.frames
            opened.append((i, source))
    names = same_fields(sorted(fields.items()), where)
    messages = None
    held = [each for each in frames if each is not None]
    if len(held) == len(parts):
        stacks += stacked((i, source.message.header, source.node) for i, source in opened)
        messages = Messages(counts, stacks, Frames.of(held))
        for i, source in opened:
            if source.beside:
                messages.metas[i] = i
    return WireBatch(JoinedRows(names, counts.tolist(), parts, messages))


def open_one(index: int, source: Any) -> WireBatch:
    """One of several messages, opened; an error names it."""
    with in_message(index):
        return open_whole(source, f"message {index}")


def side_by_side(batches: Sequence[WireBatch]) -> WireBatch:
    """The columns of batches of the same rows; of two with one name, the later one."""
    # Rows that were chosen of one are not those that will be chosen of the others.
    whole = [b if b.chosen is None else join_rows([b], "join_columns") for b in batches]
    columns = {name: column for batch in whole for name, column in batch.by_name.items()}
    return WireBatch(JoinedColumns(columns, whole))
