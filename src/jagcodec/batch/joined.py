"""Several open messages as one batch: their rows one after the other, or their columns beside.

A join is made without a look at any payload. Jagged columns and rectangles of messages in memory
are then read in place: one kernel call writes the rows of all messages to one rectangle. Whatever
else messages hold is read from each, and put together as `concat_rows` does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from jagcodec._arguments import known_names, unknown_name
from jagcodec.batch.leaves import concat_leaves, same_values, select_leaf
from jagcodec.batch.messages import Messages
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    WireFormatError,
    describe,
)
from jagcodec.memory.tensor_bytes import IntArray, array_bytes
from jagcodec.ragged.copy_rows import gathered, values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.non_tensor import batch_of, leaf_of_rows, rows_of_leaf
from jagcodec.ragged.row_index import Chosen, choose_rows
from jagcodec.ragged.row_splits import RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import documents
from jagcodec.wire.encoder import Columns, encode
from jagcodec.wire.field_schema import FieldSchema
from jagcodec.wire.frames import Frame
from jagcodec.wire.lazy import WireBatch, open_whole
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.spec import Kind
from jagcodec.wire.stacked import (
    Frames,
    Stack,
    of_message,
    open_messages,
    stacked,
)


class _Composite(WireBatch):
    """What batches over several messages share: all of it follows from their columns."""

    def __init__(self, fields: Iterable[str], rows: int, like: WireBatch | None = None) -> None:
        self._fields = tuple(fields)
        # Of messages that say so: batch dims behind the first, and where tensors go.
        self._sizes = [rows] if like is None else [rows, *like.batch_size[1:]]
        self._device = None if like is None else like.device
        self._allow_pickle = like is not None and like.allow_pickle

    @property
    def fields(self) -> tuple[str, ...]:
        return self._fields

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size(self._sizes)

    def __len__(self) -> int:
        return self._sizes[0]

    @property
    def device(self) -> torch.device | None:
        return self._device

    @property
    def allow_pickle(self) -> bool:
        return self._allow_pickle

    @property
    def schema(self) -> Mapping[str, FieldSchema]:
        return MappingProxyType({name: self._schema(name) for name in self._fields})

    def leaf(self, name: str) -> Any:
        self._check_name(name, "leaf")
        return self._leaves([name])[name]

    def to_tensordict(self) -> TensorDict:
        leaves = self._leaves(self._fields)
        if self._device is None and len(self._sizes) == 1:
            return batch_of(leaves, len(self))
        try:
            return TensorDict(leaves, batch_size=self._sizes, device=self._device)
        except Exception as error:  # tensordict raises all kinds
            raise WireFormatError(
                "bad_value", "$", f"expected columns of one batch, found {error!s:.200}"
            ) from error

    def to_frames(self) -> list[Frame]:
        value: Any = None
        if self._device is None and len(self._sizes) == 1:
            columns = dict(self.columns())
            for name, column in columns.items():
                if isinstance(column, np.ndarray):
                    columns[name] = list(column)
            value = Columns(len(self), columns)
        options: Any = {"allow_pickle": self._allow_pickle, "meta": self.meta or None}
        if value is not None and value.repeats():
            options["elide"] = True
        return encode(self.to_tensordict() if value is None else value, **options)

    def whole(self) -> WireBatch:
        return self

    def chosen_rows(self) -> Chosen | None:
        return None

    def in_place(self) -> None:
        return None

    def _check_name(self, name: str, where: str) -> None:
        if name not in self._fields:
            raise unknown_name(name, self._fields, f"WireBatch.{where}")

    def _leaves(self, names: Iterable[str]) -> dict[str, Any]:
        raise NotImplementedError


# --- rows one after the other ------------------------------------------------------------------


class JoinedRows(_Composite):
    """The rows of several messages, one message after the other; or some of them."""

    def __init__(
        self,
        messages: Messages,
        fields: Iterable[str],
        chosen: Chosen | None,
        like: WireBatch | None,
    ) -> None:
        rows = int(messages.counts.sum()) if chosen is None else len(chosen)
        super().__init__(fields, rows, like)
        self._like = like
        self._messages = messages
        self._chosen = chosen
        self._pool = RowSplitsPool()
        self._splits: dict[int, tuple[Any, RowSplits]] = {}
        self._views: dict[str, RaggedView | None] = {}

    @property
    def meta(self) -> dict[str, Any]:
        """What all messages agree on."""
        messages = self._messages
        first, *others = [messages.meta(i) for i in dict.fromkeys(messages.with_metas())] or [{}]
        return {
            name: value
            for name, value in first.items()
            if all(name in other and same_values(other[name], value) for other in others)
        }

    @property
    def metas(self) -> list[dict[str, Any]]:
        """`meta` of each message, in their order."""
        return [self._messages.meta(i) for i in self._messages.with_metas()]

    def select(self, names: Iterable[str]) -> WireBatch:
        listed = known_names(names, self._fields, "WireBatch.select")
        return JoinedRows(self._messages, listed, self._chosen, self._like)

    def rows(self, index: Any) -> WireBatch:
        chosen = choose_rows(index, len(self), "WireBatch.rows(index)")
        if self._chosen is not None:
            chosen = (
                self._chosen[chosen.start : chosen.stop]
                if isinstance(chosen, range)
                else np.asarray(self._chosen, dtype=np.int64)[chosen]
            )
        return JoinedRows(self._messages, self._fields, chosen, self._like)

    def row_lengths(self, name: str) -> IntArray | None:
        self._check_name(name, "row_lengths")
        if self._schema(name).kind != "jagged":
            return None
        view = self._view(name) or view_of(self._read_apart(name), name, self._pool)
        return view.row_splits.lengths

    def _schema(self, name: str) -> FieldSchema:
        self._check_name(name, "schema")
        kind, dtype, shape = self._messages.open_part(0).select([name]).schema[name]
        return FieldSchema(kind, dtype, shape if shape is None else (len(self), *shape[1:]))

    def _kind(self, name: str) -> Kind | None:
        """Of a column that is read in place."""
        column = self._messages.column(name)
        if column is None:
            return None if self._view_of_views(name) is None else Kind.JAGGED
        return column.kind

    def _leaves(self, names: Iterable[str]) -> dict[str, Any]:
        """Columns as leaves, those that lie in place all copied together."""
        views = {name: self._view(name) for name in names}
        values = iter(gathered([view for view in views.values() if view is not None]))
        leaves: dict[str, Any] = {}
        for name, view in views.items():
            if view is None:
                leaves[name] = self._read_apart(name)
            elif self._kind(name) is Kind.NON_TENSOR_ROWS:
                leaves[name] = self._documents(name, view, next(values))
            elif self._kind(name) is Kind.JAGGED:
                leaves[name] = nested_tensor(next(values), view.row_splits)
            else:
                leaves[name] = next(values)
        return leaves

    def columns(self) -> list[tuple[str, Any]]:
        views = {name: self._view(name) for name in self._fields}
        apart = {
            name: view
            for name, view in views.items()
            if view is not None and self._kind(name) is not Kind.JAGGED
        }
        values = dict(zip(apart, gathered(apart.values()), strict=True))
        columns: list[tuple[str, Any]] = []
        for name, view in views.items():
            column: Any = view
            if view is None:
                column = self._read_apart(name)
                if is_jagged(column):
                    column = view_of(column, name, self._pool)
            elif self._kind(name) is Kind.NON_TENSOR_ROWS:
                leaf = self._documents(name, view, values[name])
                column = rows_of_leaf(leaf, len(self))
            elif name in values:
                column = values[name]
            columns.append((name, column))
        return columns

    # In place

    def _view(self, name: str) -> RaggedView | None:
        """The rows of a column where they lie; of a rectangle and of documents, too.

        None where they have to be read from each message.
        """
        messages = self._messages
        column = messages.column(name)
        if column is None:
            return self._view_of_views(name)
        kind, dtype, inner, place, cells, groups = column
        cell = math.prod(inner) * dtype.itemsize
        if kind is Kind.TENSOR:
            return self._rows_of_rectangles(dtype, inner, place, cells, cell)
        rows = messages.rows_of_groups(groups)
        if rows is None or (rows[2] != cells).any():
            return None
        lengths, begins, _ = rows
        known = self._splits.get(id(lengths))
        index: Any = self._chosen
        picked = index
        if isinstance(picked, range):
            picked = slice(picked.start, picked.stop)
        if known is None:
            own = lengths if picked is None else np.ascontiguousarray(lengths[picked])
            if len(own) and int(own.max()) * len(own) >= 1 << 62:
                return None  # rows may repeat, and cells of no bytes may be many
            known = lengths, self._pool.unique(RowSplits.from_lengths(own))
            self._splits[id(lengths)] = known
        if picked is None:
            starts = place[messages.of_rows]
            starts += begins if cell == 1 else begins * cell
        else:
            part, _ = messages.find(index)
            starts = place[part] + begins[picked] * cell
        row_splits = known[1]
        shape = (row_splits.total, *inner)
        return RaggedView(messages.buffers, dtype, shape, 1, starts, row_splits)

    def _view_of_views(self, name: str) -> RaggedView | None:
        """The rows of a jagged column that messages store narrow, or make of parts.

        Each message is opened for itself, and its rows share what they share there.
        """
        if name not in self._views:
            self._views[name] = self._put_together(name)
        return self._views[name]

    def _put_together(self, name: str) -> RaggedView | None:
        messages = self._messages
        part_of: Any = None
        row, wanted = None, list(range(len(messages.counts)))
        if self._chosen is not None:
            part_of, row = messages.find(self._chosen)
            wanted = np.unique(part_of).tolist()
        # Before anything is made for each of the rows, of which a message can claim many.
        if wanted and messages.open_part(wanted[0]).select([name]).schema[name].kind != "jagged":
            return None
        if part_of is None:
            part_of = messages.of_rows
        memories: list[Any] = []
        views: list[tuple[int, int, RaggedView]] = []
        end = 0
        for i in wanted:
            part = messages.open_part(i).select([name])
            if part.schema[name].kind != "jagged":
                return None
            try:
                ((_, view),) = part.columns()
            except WireFormatError as error:
                raise of_message(i, error) from error
            first = views[0][2] if views else view
            if (
                type(view) is not RaggedView
                or view.ragged_dim != 1
                or isinstance(view.memory, torch.Tensor)
                or (view.dtype, view.shape[1:]) != (first.dtype, first.shape[1:])
            ):
                return None
            own = view.memory if isinstance(view.memory, tuple) else (array_bytes(view.memory),)
            views.append((i, end, view))
            memories += own
            end += sum(map(len, own))
        if not views or not views[0][2].cell_bytes:
            return None
        cell = views[0][2].cell_bytes
        most = max(1 if view.runs is None else view.runs.shape[1] for _, _, view in views)
        starts = np.zeros((len(part_of), most), dtype=np.int64)
        runs = np.zeros_like(starts)
        for i, base, view in views:
            here = np.flatnonzero(part_of == i)
            own_rows: Any = slice(None) if row is None else row[here]
            unit = 1 if isinstance(view.memory, tuple) else cell
            lengths = view.row_splits.lengths[:, None] if view.runs is None else view.runs
            held = lengths.shape[1]
            found = view.row_starts()[own_rows].reshape(len(here), held)
            starts[here, :held] = found * unit + base
            runs[here, :held] = lengths[own_rows]
        if float(runs.max(initial=0)) * runs.size >= 1 << 62:
            return None  # rows may repeat, and cells of no bytes may be many
        splits = self._pool.unique(RowSplits.from_lengths(runs.sum(axis=1)))
        shape = (splits.total, *views[0][2].shape[1:])
        own_runs = None if most == 1 else runs
        begins = np.ascontiguousarray(starts[:, 0]) if most == 1 else starts
        return RaggedView(tuple(memories), views[0][2].dtype, shape, 1, begins, splits, own_runs)

    def _rows_of_rectangles(
        self, dtype: torch.dtype, inner: tuple[int, ...], place: IntArray, rows: IntArray, cell: int
    ) -> RaggedView | None:
        messages = self._messages
        if (rows != messages.counts).any():
            return None
        if self._chosen is None:
            lengths, starts = rows, place
        else:
            part, row = messages.find(self._chosen)
            starts = place[part] + row * cell
            lengths = np.ones(len(part), dtype=np.int64)
        splits = RowSplits.from_lengths(lengths)
        return RaggedView(messages.buffers, dtype, (splits.total, *inner), 1, starts, splits)

    def _documents(self, name: str, view: RaggedView, data: torch.Tensor) -> Any:
        """Rows of objects, from their documents end to end."""
        array = data.numpy()
        starts, lengths = view.row_splits.starts, view.row_splits.lengths
        heads = array[np.minimum(starts, len(array) - 1)] if len(array) else starts
        raw = array.tobytes()
        # What may be a message of its own, or hold records, is for the reader of its message.
        messages = ((heads == 0) | (heads == ord("j"))) & (lengths > 1)
        if not messages.any() and not documents.may_hold_records(raw):
            try:
                ends = view.row_splits.host[1:].tolist()
                return leaf_of_rows(documents.unpack_rows(raw, ends, 0))
            except WireFormatError:
                pass  # to be found again, in the message that it is of
        return self._read_apart(name)

    # Message by message

    def _read_apart(self, name: str) -> Any:
        """A column as a leaf, read from each message that rows were chosen of."""
        messages = self._messages
        if self._chosen is None:
            wanted: list[tuple[int, IntArray | None]] = [
                (i, None) for i in range(len(messages.counts))
            ]
            order = None
        else:
            part_of, row = messages.find(self._chosen)
            order = np.argsort(part_of, kind="stable")
            parts, begins = np.unique(part_of[order], return_index=True)
            rows = np.split(row[order], begins[1:]) if len(parts) else []
            wanted = list(zip(parts.tolist(), rows, strict=True))
            if (order[:-1] < order[1:]).all():
                order = None
        if not wanted:  # no rows, of any message
            wanted = [(0, np.empty(0, dtype=np.int64))]
        leaves = []
        for i, picked in wanted:
            part = messages.open_part(i)
            try:
                leaf = (part if picked is None else part.rows(picked)).leaf(name)
            except WireFormatError as error:
                raise of_message(i, error) from error
            leaves.append(leaf.to_tensordict() if isinstance(leaf, WireBatch) else leaf)
        joined = concat_leaves(leaves, self._pool, f"concat_rows[{name!r}]")
        if order is None:
            return joined
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return select_leaf(joined, back, self._pool, f"concat_rows[{name!r}]")


# --- columns side by side ----------------------------------------------------------------------


class JoinedColumns(_Composite):
    """The columns of several batches of the same rows."""

    def __init__(
        self, sources: Mapping[str, WireBatch], batches: Sequence[WireBatch], like: WireBatch
    ) -> None:
        super().__init__(sources, len(like), like)
        self._sources = sources
        self._batches = batches
        self._pool = RowSplitsPool()

    @property
    def meta(self) -> dict[str, Any]:
        """What no two messages disagree on."""
        return _agreed(self.metas)

    @property
    def metas(self) -> list[dict[str, Any]]:
        """`meta` of each batch, in their order."""
        return [batch.meta for batch in self._batches]

    def select(self, names: Iterable[str]) -> WireBatch:
        listed = known_names(names, self._fields, "WireBatch.select")
        sources = {name: self._sources[name] for name in listed}
        return JoinedColumns(sources, self._batches, self._batches[0])

    def rows(self, index: Any) -> WireBatch:
        chosen = choose_rows(index, len(self), "WireBatch.rows(index)")
        picked = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
        batches = [batch.rows(picked) for batch in self._batches]
        new = {id(old): batch for old, batch in zip(self._batches, batches, strict=True)}
        sources = {name: new[id(batch)] for name, batch in self._sources.items()}
        return JoinedColumns(sources, batches, batches[0])

    def row_lengths(self, name: str) -> IntArray | None:
        self._check_name(name, "row_lengths")
        return self._sources[name].row_lengths(name)

    def columns(self) -> list[tuple[str, Any]]:
        found: dict[str, Any] = {}
        for batch in self._batches:
            names = [name for name, source in self._sources.items() if source is batch]
            for name, column in batch.select(names).columns():
                if isinstance(column, RaggedView):
                    column = replace(column, row_splits=self._pool.unique(column.row_splits))
                found[name] = column
        return [(name, found[name]) for name in self._fields]

    def _schema(self, name: str) -> FieldSchema:
        self._check_name(name, "schema")
        return self._sources[name].schema[name]

    def _leaves(self, names: Iterable[str]) -> dict[str, Any]:
        leaves: dict[str, Any] = {}
        for name in names:
            leaf = self._sources[name].leaf(name)
            if is_jagged(leaf):
                view = view_of(leaf, name, self._pool)
                row_splits = self._pool.unique(view.row_splits)
                leaf = nested_tensor(values_of(view), row_splits, view.ragged_dim)
            leaves[name] = leaf.to_tensordict() if isinstance(leaf, WireBatch) else leaf
        return leaves


def _agreed(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    agreed: dict[str, Any] = {}
    for meta in metas:
        for name, value in meta.items():
            others = [other[name] for other in metas if name in other]
            if all(same_values(value, other) for other in others):
                agreed.setdefault(name, value)
    return agreed


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
    with_nodes = []
    for stack in stacks:
        root = stack.schema.root
        if root.kind is not Kind.TENSORDICT or root.fields[0] != 1:
            # Batches in dicts, and such with more dims, each as it is.
            return join_rows([open_one(i, source) for i, source in enumerate(sources)], where)
        with_nodes.append((stack, dict(zip(root.fields[1], root.children, strict=True))))
        counts[stack.members] = stack.numbers[:, root.dims]
    fields = _same_fields([(int(s.members[0]), nodes) for s, nodes in with_nodes], where)
    messages = Messages(counts, lambda i: open_one(i, sources[i]), with_nodes, frames)
    return JoinedRows(messages, fields, None, None)


def join_rows(batches: Sequence[WireBatch], where: str) -> WireBatch:
    """The rows of several open batches, as chosen in each.

    Raises:
        ArgumentKeyError: They do not have the same columns.
        ArgumentError: They differ in their batch dims behind the first.
    """
    fields = _same_fields(list(enumerate(batch.fields for batch in batches)), where)
    first = batches[0]
    for i, batch in enumerate(batches):
        if batch.batch_size[1:] != first.batch_size[1:]:
            raise ArgumentError(
                "bad_shape",
                f"{where} of batch {i}",
                f"expected batch dims {list(first.batch_size[1:])} behind the first, like batch 0, "
                f"found {list(batch.batch_size[1:])}",
            )
    whole = [batch.whole() for batch in batches]
    counts = np.array([len(batch) for batch in whole], dtype=np.int64)
    known: Any = [batch.in_place() for batch in whole]
    stacks: list[Stack] = []
    if None not in known:
        stacks = stacked((i, header) for i, (header, _, _) in enumerate(known))
        nodes = [(stack, known[int(stack.members[0])][1]) for stack in stacks]
    # Batches in messages of one schema may be other nodes of it.
    if stacks and all(
        known[i][1] == of_first for stack, of_first in nodes for i in stack.members.tolist()
    ):
        beside = any(batch.has_more for batch in whole)
        held = Frames.of([frames for _, _, frames in known])
        messages = Messages(counts, whole.__getitem__, nodes, held, beside=beside)
    else:
        messages = Messages(counts, whole.__getitem__)
    chosen = [batch.chosen_rows() for batch in batches]
    if all(rows is None for rows in chosen):
        return JoinedRows(messages, fields, None, first)
    index = [
        np.arange(count) if rows is None else np.asarray(rows, dtype=np.int64)
        for rows, count in zip(chosen, counts.tolist(), strict=True)
    ]
    bases = np.repeat(np.cumsum(counts) - counts, [len(rows) for rows in index])
    return JoinedRows(messages, fields, np.concatenate(index) + bases, first)


def readable(source: Any, where: str) -> Any:
    """A batch of what `materialize` takes: a message in any form, several of them, or a batch."""
    if isinstance(source, (WireBatch, TensorDictBase)):
        return source
    if isinstance(source, (list, tuple)) and source:
        items = [type(item) for item in source]
        if any(issubclass(kind, (list, tuple)) for kind in items):
            if all(issubclass(kind, (list, tuple)) for kind in items):
                return join_messages(source, where)
            source = [
                item if isinstance(item, WireBatch) else open_one(i, item)
                for i, item in enumerate(source)
            ]
            items = [WireBatch]
        if all(issubclass(kind, WireBatch) for kind in items):
            return join_rows(source, where)
        return open_whole(source, where)
    if isinstance(source, (bytes, bytearray, memoryview, np.ndarray, torch.Tensor)):
        return open_whole(source, where)
    raise ArgumentTypeError(
        "bad_type",
        where,
        "expected a TensorDict, a message (its frames, a blob, or a WireBatch), or a list of "
        f"messages, found {describe(source)}",
    )


def open_one(index: int, source: Any) -> WireBatch:
    """One of several messages, opened; an error says which it is."""
    try:
        return open_whole(source, f"message {index}")
    except WireFormatError as error:
        raise of_message(index, error) from error


def _same_fields(batches: Sequence[tuple[int, Iterable[str]]], where: str) -> tuple[str, ...]:
    """The columns of the first, which all must have."""
    ordered = sorted(batches, key=lambda pair: pair[0])
    first = dict.fromkeys(ordered[0][1])
    for i, names in ordered[1:]:
        for name in first.keys() ^ dict.fromkeys(names).keys():
            raise ArgumentKeyError(
                "no_such_field",
                f"{where} of batch {i}",
                f"expected the columns of the first batch, found {name!r} "
                f"{'missing' if name in first else 'besides'}; select the ones that all have",
            )
    return tuple(first)
