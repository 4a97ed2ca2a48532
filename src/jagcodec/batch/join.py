"""Several open batches as one: their rows one after the other, or their columns side by side.

A join is made without a look at any payload. Jagged columns, rectangles and documents of messages
in memory are then read in place: one kernel call writes the rows of all messages to one rectangle.
Whatever else messages hold is read from each, and put together as `concat_rows` does it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from jagcodec.batch.compare import agreed
from jagcodec.batch.leaves import concat_leaves
from jagcodec.batch.messages import Messages, same_fields
from jagcodec.errors import (
    ArgumentError,
    WireFormatError,
)
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.copy_rows import gathered, values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import leaf_of_rows, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.select import select_leaf
from jagcodec.ragged.views import RaggedView, concat_views
from jagcodec.wire import documents
from jagcodec.wire.checks import INT64_MAX, fail
from jagcodec.wire.field_schema import FieldSchema
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.message import ChosenRows
from jagcodec.wire.spec import Kind
from jagcodec.wire.stacked import Frames, in_message, open_messages, stacked
from jagcodec.wire.wire_batch import ColumnSource, Keys, MessageColumns, WireBatch, open_whole

# --- rows one after the other ------------------------------------------------------------------


class JoinedRows(ColumnSource):
    """The rows of several batches, one batch after the other: a `ColumnSource`."""

    def __init__(
        self,
        names: Sequence[str],
        counts: Sequence[int],
        open_part: Callable[[int], WireBatch],
        find_messages: Callable[[], Messages | None],
        like: ColumnSource | None = None,
    ) -> None:
        """Batches of some `counts` of rows, which `open_part` opens one by one.

        Args:
            names: Of the columns.
            counts: As above.
            open_part: Returns the batch of an index.
            find_messages: Returns the messages that the batches are in; None if columns have to be
                read from each batch by itself.
            like: Batch dims after the first, and where tensors go.
        """
        rows = sum(counts)
        if rows > INT64_MAX:
            raise fail("bad_rows", f"expected fewer than 2**63 rows in all, found {rows}")
        if like is None:
            super().__init__(names, [rows], None, allow_pickle=False)
        else:
            sizes = [rows, *like.sizes[1:]]
            super().__init__(names, sizes, like.device, like.allow_pickle)
        self._counts = counts
        self._open_part = open_part
        self._find_messages = find_messages
        self._parts: dict[int, WireBatch] = {}
        self._pool = RowSplitsPool()  # of all rows; chosen ones have their own
        self._last: tuple[ChosenRows | None, ChosenRows] | None = None

    @property
    def columns(self) -> Keys:
        """See `ColumnSource`."""
        return dict.fromkeys(self.names)

    @cached_property
    def _messages(self) -> Messages | None:
        return self._find_messages()

    def _part(self, index: int) -> WireBatch:
        """One of the batches."""
        part = self._parts.get(index)
        if part is None:
            with in_message(index):
                part = self._parts.setdefault(index, self._open_part(index))
        return part

    def parts(self) -> list[WireBatch]:
        """All of the batches."""
        return [self._part(i) for i in range(len(self._counts))]

    def meta(self) -> dict[str, Any]:
        """See `ColumnSource`."""
        return agreed([self._meta(i) for i in dict.fromkeys(self._metas_from())])

    def metas(self) -> list[dict[str, Any]]:
        """See `ColumnSource`."""
        return [self._meta(i) for i in self._metas_from()]

    def _meta(self, index: int | None) -> dict[str, Any]:
        return {} if index is None else self._part(index).meta

    def _metas_from(self) -> list[int | None]:
        """For each batch, the index of the batch to read its `meta` from; None: it has none."""
        messages = self._messages
        if messages is None:
            return list(range(len(self._counts)))
        first: dict[Any, int | None] = {None: None}
        metas = messages.metas
        return [first.setdefault(metas[message], i) for i, message in enumerate(messages.which)]

    def schema(self, name: str, key: Any, rows: int) -> FieldSchema:
        """See `ColumnSource`."""
        kind, dtype, shape = self._part(0).select([name]).schema[name]
        return FieldSchema(kind, dtype, shape if shape is None else (rows, *shape[1:]))

    def row_lengths(self, name: str, key: Any, chosen: ChosenRows | None) -> IntArray | None:
        """See `ColumnSource`."""
        if self.schema(name, key, 0).kind != "jagged":
            return None
        lengths: IntArray = self.views({name: key}, chosen)[name].row_splits.lengths
        return lengths

    def leaves(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        leaves = {}
        for name, view, values in self._read(keys, chosen, views=False):
            if view is None:
                leaves[name] = self._leaf_apart(name, chosen)
            elif self._kind(name) is Kind.NON_TENSOR_ROWS:
                leaves[name] = self._objects(name, view, values, chosen)
            elif self._kind(name) is Kind.TENSOR:
                leaves[name] = values
            else:
                leaves[name] = nested_tensor(values, view.row_splits)
        return leaves

    def views(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        columns: dict[str, Any] = {}
        for name, view, values in self._read(keys, chosen, views=True):
            column: Any = view if values is None else values
            if view is None:
                column = self._leaf_apart(name, chosen)
                if is_jagged(column):
                    column = view_of(column, name, self._pool_of(chosen))
            elif self._kind(name) is Kind.NON_TENSOR_ROWS:
                column = self._objects(name, view, values, chosen)
                column = rows_of_leaf(column, view.row_splits.rows)
            columns[name] = column
        return columns

    def to_encode(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        return {
            name: list(column) if isinstance(column, np.ndarray) else column
            for name, column in self.views(keys, chosen).items()
        }

    def narrow_names(self, keys: Keys) -> list[tuple[str, ...]]:
        """See `ColumnSource`."""
        messages = self._messages
        names: dict[tuple[str, ...], None] = {}
        for name in keys:
            place = None if messages is None else messages.place(name)
            if place is None:
                for i in range(len(self._counts)):
                    names |= dict.fromkeys(self._part(i).select([name]).narrow_names())
            elif place.narrow:
                names[name,] = None
        return list(names)

    def _read(
        self, keys: Keys, chosen: ChosenRows | None, *, views: bool
    ) -> Iterator[tuple[str, RaggedView | None, Any]]:
        """Each column as its rows in place, and these copied end to end, all of them together.

        With `views` the rows of jagged columns are not copied.
        """
        found = {name: self._view(name, chosen) for name in keys}
        copied = {
            name: view
            for name, view in found.items()
            if view is not None and not (views and self._kind(name) is Kind.JAGGED)
        }
        values = dict(zip(copied, gathered(copied.values()), strict=True))
        for name, view in found.items():
            yield name, view, values.get(name)

    def _kind(self, name: str) -> Kind:
        """Of a column that has a view."""
        messages = self._messages
        place = None if messages is None else messages.place(name)
        return Kind.JAGGED if place is None else place.kind

    # In place

    def _view(self, name: str, chosen: ChosenRows | None) -> RaggedView | None:
        """The rows of a column where they lie; of a rectangle and of documents, too.

        None if they have to be read from each batch.
        """
        if self.device is not None:
            return None
        messages = self._messages
        view = None if messages is None else messages.view(name)
        if messages is None or view is None:
            return self._view_apart(name, chosen)
        rows, row_splits = self._rows_in(messages, chosen), view.row_splits
        if rows is not None:
            row_splits, starts = rows.among(0, row_splits)
            if view.starts is not None:
                starts = view.row_starts()[rows.at]
            view = replace(view, starts=starts)
        return replace(view, row_splits=self._pool_of(chosen).unique(row_splits))

    def _rows_in(self, messages: Messages, chosen: ChosenRows | None) -> ChosenRows | None:
        """Chosen rows among those of all messages; None for all of these, in their order.

        This takes memory for each row, so it is asked for columns whose rows have bytes.
        """
        if messages.in_order:
            return chosen
        if self._last is None or self._last[0] is not chosen:
            rows = self._own_rows(messages)
            self._last = chosen, ChosenRows(rows if chosen is None else rows[chosen.at])
        return self._last[1]

    def _own_rows(self, messages: Messages) -> IntArray:
        """(N,) the rows of all batches among those of all messages."""
        rows = []
        for i, message in enumerate(messages.which):
            chosen = self._part(i).chosen
            own: Any = range(self._counts[i]) if chosen is None else chosen.index
            rows.append(np.asarray(own, dtype=np.int64) + messages.firsts[message])
        return np.concatenate(rows)

    def _objects(
        self, name: str, view: RaggedView, data: torch.Tensor, chosen: ChosenRows | None
    ) -> Any:
        """Rows of objects, from their documents end to end."""
        raw = data.numpy().tobytes()
        # What may hold records is for the reader of its message.
        if not documents.may_hold_records(raw):
            with suppress(WireFormatError):  # found again, in the message that it is of
                ends = view.row_splits.host[1:].tolist()
                return leaf_of_rows(documents.unpack_rows(raw, ends, 0))
        return self._leaf_apart(name, chosen)

    # Batch by batch

    def _apart(
        self, name: str, chosen: ChosenRows | None
    ) -> tuple[Iterator[tuple[int, WireBatch]], IntArray | None]:
        """One column of each batch that rows were chosen of, and the order of these rows then."""
        ends = [*accumulate(self._counts)]
        begins = [end - count for end, count in zip(ends, self._counts, strict=True)]
        wanted: list[tuple[int, Any]]
        order: IntArray | None = None
        if chosen is None:
            wanted = [(i, None) for i in range(len(ends))]
        elif isinstance(chosen.index, range):
            start, stop = chosen.index.start, chosen.index.stop
            parts = range(bisect_right(ends, start), bisect_left(ends, stop) + 1)
            wanted = [(i, slice(max(0, start - begins[i]), stop - begins[i])) for i in parts]
        else:
            part_of = np.searchsorted(np.array(ends), chosen.index, side="right")
            order = np.argsort(part_of, kind="stable")
            numbers, firsts = np.unique(part_of[order], return_index=True)
            rows = np.split(chosen.index[order], firsts[1:])
            each = zip(numbers.tolist(), rows, strict=False)  # without rows there is one too many
            wanted = [(i, own - begins[i]) for i, own in each]
            if (order[:-1] < order[1:]).all():
                order = None
        if chosen is not None and not len(chosen):  # no rows, of any batch
            wanted = [(0, slice(0, 0))]
        columns = ((i, self._column(i, name, rows)) for i, rows in wanted)
        if order is not None:
            back = np.empty(len(order), dtype=np.int64)
            back[order] = np.arange(len(order))
            order = back
        return columns, order

    def _column(self, index: int, name: str, rows: Any) -> WireBatch:
        """Some rows of one column of a batch; None: all of them."""
        column = self._part(index).select([name])
        return column if rows is None else column.rows(rows)

    def _view_apart(self, name: str, chosen: ChosenRows | None) -> RaggedView | None:
        """The rows of a jagged column, which share what they share in their messages."""
        columns, order = self._apart(name, chosen)
        views: list[RaggedView] = []
        for i, batch in columns:
            # Before anything is made for each of the rows, of which a message can claim many.
            with in_message(i):
                if batch.schema[name].kind != "jagged":
                    return None
                ((_, view),) = batch.columns()
            if type(view) is not RaggedView:
                return None
            views.append(view)
        view = concat_views(views)
        if view is None:
            return None
        if order is not None:
            view = view.choose(order, RowSplits.from_lengths(view.row_splits.lengths[order]))
        return replace(view, row_splits=self._pool_of(chosen).unique(view.row_splits))

    def _leaf_apart(self, name: str, chosen: ChosenRows | None) -> Any:
        """A column as a leaf, put together."""
        columns, order = self._apart(name, chosen)
        leaves = []
        for i, batch in columns:
            with in_message(i):
                leaf = batch.leaf(name)
                leaves.append(leaf.to_tensordict() if isinstance(leaf, WireBatch) else leaf)
        path = f"concat_rows[{name!r}]"
        pool = self._pool_of(chosen)
        joined = concat_leaves(leaves, pool, path)
        return joined if order is None else select_leaf(joined, order, pool, path)

    def _pool_of(self, chosen: ChosenRows | None) -> RowSplitsPool:
        return self._pool if chosen is None else chosen.pool


# --- columns side by side ----------------------------------------------------------------------


class JoinedColumns(ColumnSource):
    """The columns of several batches of the same rows: a `ColumnSource`.

    A column is known by its own source, and by what that knows it.
    """

    def __init__(self, columns: Keys, batches: Sequence[WireBatch]) -> None:
        first = batches[0].source
        pickle = any(batch.source.allow_pickle for batch in batches)
        super().__init__(tuple(columns), first.sizes, first.device, pickle)
        self._columns = columns
        self._batches = batches
        self._pool = RowSplitsPool()

    @property
    def columns(self) -> Keys:
        """See `ColumnSource`."""
        return self._columns

    def meta(self) -> dict[str, Any]:
        """See `ColumnSource`."""
        return agreed(self.metas())

    def metas(self) -> list[dict[str, Any]]:
        """See `ColumnSource`."""
        return [batch.meta for batch in self._batches]

    def schema(self, name: str, key: Any, rows: int) -> FieldSchema:
        """See `ColumnSource`."""
        source, own = key
        schema: FieldSchema = source.schema(name, own, rows)
        return schema

    def row_lengths(self, name: str, key: Any, chosen: ChosenRows | None) -> IntArray | None:
        """See `ColumnSource`."""
        source, own = key
        lengths: IntArray | None = source.row_lengths(name, own, chosen)
        return lengths

    def leaf(self, name: str, key: Any, chosen: ChosenRows | None) -> Any:
        """See `ColumnSource`."""
        source, own = key
        return self._one_object(name, source.leaf(name, own, chosen), chosen)

    def leaves(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        leaves = self._each(keys, "leaves", chosen)
        return {name: self._one_object(name, leaf, chosen) for name, leaf in leaves.items()}

    def _one_object(self, name: str, leaf: Any, chosen: ChosenRows | None) -> Any:
        """A leaf that shares its offsets with columns of the same rows in other messages."""
        if not is_jagged(leaf):
            return leaf
        pool = self._pool if chosen is None else chosen.pool
        view = view_of(leaf, name, pool)
        return nested_tensor(values_of(view), pool.unique(view.row_splits), view.ragged_dim)

    def views(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        columns = self._each(keys, "views", chosen)
        pool = self._pool if chosen is None else chosen.pool
        for name, column in columns.items():
            if isinstance(column, RaggedView):
                columns[name] = replace(column, row_splits=pool.unique(column.row_splits))
        return columns

    def to_encode(self, keys: Keys, chosen: ChosenRows | None) -> dict[str, Any]:
        """See `ColumnSource`."""
        return self._each(keys, "to_encode", chosen)

    def narrow_names(self, keys: Keys) -> list[tuple[str, ...]]:
        """See `ColumnSource`."""
        return [name for source, own in self._by_source(keys) for name in source.narrow_names(own)]

    def _by_source(self, keys: Keys) -> list[tuple[Any, dict[str, Any]]]:
        found: dict[int, tuple[Any, dict[str, Any]]] = {}
        for name, (source, own) in keys.items():
            found.setdefault(id(source), (source, {}))[1][name] = own
        return list(found.values())

    def _each(self, keys: Keys, method: str, chosen: ChosenRows | None) -> dict[str, Any]:
        """What a method of each source returns of its columns, in the order of `keys`."""
        found: dict[str, Any] = {}
        for source, own in self._by_source(keys):
            found.update(getattr(source, method)(own, chosen))
        return {name: found[name] for name in keys}


# --- several messages --------------------------------------------------------------------------


def join_messages(sources: Sequence[Any], where: str) -> WireBatch:
    """The rows of several messages, given as lists of frames or as blobs, opened together.

    Raises:
        ArgumentKeyError: They do not have the same columns.
        WireFormatError: One is damaged, or not the message of a batch; it is said which.
    """
    # The caller may change lists of frames before a column is read.
    sources = [list(source) if isinstance(source, list) else source for source in sources]
    stacks, frames = open_messages(sources, where, DEFAULT_LIMITS)
    counts = np.zeros(len(sources), dtype=np.int64)
    for stack in stacks:
        if stack.node.kind is not Kind.TENSORDICT or stack.node.fields[0] != 1:
            # Batches in dicts, and such with more dims, each as it is.
            return join_rows([open_one(i, source) for i, source in enumerate(sources)], where)
        counts[stack.members] = stack.numbers[:, stack.node.dims]
    firsts = sorted((int(stack.members[0]), stack.node.fields[-1]) for stack in stacks)
    names = same_fields(firsts, where)
    messages = Messages(counts, stacks, frames, range(len(sources)))
    open_part = lambda i: open_one(i, sources[i])  # noqa: E731
    return WireBatch(JoinedRows(names, counts.tolist(), open_part, lambda: messages))


def join_rows(batches: Sequence[WireBatch], where: str) -> WireBatch:
    """The rows of several open batches, as chosen in each.

    Raises:
        ArgumentKeyError: They do not have the same columns.
        ArgumentError: They differ in their batch dims after the first.
    """
    names = same_fields(enumerate(batch.fields for batch in batches), where)
    first, parts = batches[0], []
    inner = first.source.sizes[1:]
    for i, batch in enumerate(batches):
        source = batch.source
        if source.sizes[1:] != inner:
            raise ArgumentError(
                "bad_shape",
                f"{where} of batch {i}",
                f"expected batch dims {list(inner)} after the first, like batch 0, "
                f"found {list(source.sizes[1:])}",
            )
        if isinstance(source, JoinedRows) and batch.chosen is None:
            parts += source.parts()
        else:
            parts.append(batch)
    counts = list(map(len, parts))
    find = lambda: _messages_of(parts)  # noqa: E731
    return WireBatch(JoinedRows(names, counts, parts.__getitem__, find, first.source))


def _messages_of(batches: Sequence[WireBatch]) -> Messages | None:
    """The messages of batches; None if not all of them are in memory."""
    known: dict[int, int] = {}
    sources: list[MessageColumns] = []
    frames: list[Sequence[ByteArray]] = []
    which = []
    in_order = True
    for batch in batches:
        source = batch.source
        number = known.setdefault(id(source), len(sources))
        if number == len(sources):
            if not isinstance(source, MessageColumns) or (held := source.frames) is None:
                return None
            sources.append(source)
            frames.append(held)
        which.append(number)
        in_order = in_order and batch.chosen is None
    counts = np.array([source.sizes[0] for source in sources], dtype=np.int64)
    stacks = stacked((i, each.message.header, each.node) for i, each in enumerate(sources))
    beside = any(source.beside for source in sources)
    in_order = in_order and len(which) == len(sources)
    return Messages(counts, stacks, Frames.of(frames), which, in_order=in_order, beside=beside)


def join_encoded(batches: Sequence[Any], where: str) -> WireBatch:
    """The rows of several messages, each open, as frames, or as a blob."""
    if not any(isinstance(batch, WireBatch) for batch in batches):
        return join_messages(batches, where)
    return join_rows(
        [b if isinstance(b, WireBatch) else open_one(i, b) for i, b in enumerate(batches)], where
    )


def open_one(index: int, source: Any) -> WireBatch:
    """One of several messages, opened; an error says which it is."""
    with in_message(index):
        return open_whole(source, f"message {index}")


def side_by_side(batches: Sequence[WireBatch]) -> WireBatch:
    """The columns of batches of the same rows; of two with one name, the later one."""
    # Rows that were chosen of one are not those that will be chosen of the others.
    whole = [b if b.chosen is None else join_rows([b], "join_columns") for b in batches]
    columns = {name: (b.source, key) for b in whole for name, key in b.column_keys.items()}
    return WireBatch(JoinedColumns(columns, whole))
