"""`join_rows`: the rows of several batches as one `WireBatch`.

Joining reads no payload. Later, jagged columns, rectangles and documents of messages in memory are
read in place: one kernel call writes the rows of all messages to one rectangle. Other columns are
read from each message and then joined, as by `concat_rows`.

`join_rows` comes first. It returns a batch whose source is `JoinedRows`, and whose columns are
`JoinedColumn`s. `JoinedColumn.read` takes the first of three ways that can read the column:

1. in place, if the `MessageTable` has it (`JoinedRows.in_place`);
2. if it has objects, and their form differs between messages, form by form (`read_by_form`);
3. batch by batch (`read_by_batch`), together with all other such columns of the read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jagcodec._dependencies import with_or_without_torch
from jagcodec.columns.batch import (
    PLAIN_STORAGE,
    VALUES,
    As,
    CellRows,
    Column,
    FieldSchema,
    InPlace,
    OneObject,
    Read,
    Source,
    Storage,
    chosen_in,
    closed_batch,
    columns_in,
    combined_storage,
    leaves_of,
    source_in,
    to_send_inside,
    views_of,
)
from jagcodec.columns.held import as_leaf, column_of
from jagcodec.columns.join import join_leaves, join_views, require_same_names
from jagcodec.columns.memory import nested_source, user_value_in_memory
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    WireFormatError,
    with_name_in_remedy,
)
from jagcodec.memory.arrays import ByteArray, IntArray, object_array
from jagcodec.memory.extents import check_extent
from jagcodec.rows.chosen_rows import ChosenRows
from jagcodec.rows.copy_bytes import array_of_cells, gathered_bytes
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, concat_views
from jagcodec.wire import documents
from jagcodec.wire.array_rows import array_maker, rows_of_arrays
from jagcodec.wire.checks import in_message
from jagcodec.wire.compare import common_meta, same_values
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.items import item_of_view
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.many.message_table import ColumnInPlace, MessageTable
from jagcodec.wire.many.stacked import Stack, open_together, stacks_of
from jagcodec.wire.native import are_values
from jagcodec.wire.read.message_source import MessageInMemory, MessageSource
from jagcodec.wire.read.wire_batch import WireBatch, open_whole
from jagcodec.wire.spec import Kind


def join_rows(sources: Iterable[Any], where: str) -> WireBatch:
    """The rows of several batches: frames, blobs, and the chosen rows of `WireBatch`es."""
    parts: list[Any] = list(sources)
    stacks: list[Stack] = []
    if any(issubclass(kind, WireBatch) for kind in set(map(type, parts))):
        parts = [*chain.from_iterable(map(_parts_of_join, parts))]
        buffers: list[Sequence[ByteArray]] = [()] * len(parts)
    else:  # this copies lists of frames: the caller may change them before a column is read
        frames, stacks = open_together(parts, where, DEFAULT_LIMITS)
        parts, buffers = list[Any](frames), [message[1:] for message in frames]
    row_counts = np.full(len(parts), -1, dtype=np.int64)
    # Of the first message of each stack, which all others of the stack are like, and of each other
    # batch: the names of the columns, and the batch dims after the first.
    fields: dict[int, Sequence[str]] = {}
    inner_sizes: dict[int, Sequence[int]] = {}
    for stack in stacks:
        row_counts[stack.members] = stack.numbers[:, stack.node.dims]
        first_member = int(stack.members[0])
        fields[first_member] = stack.node.fields[-1]
        inner_sizes[first_member] = []  # a stack has only messages of one batch dim
    in_memory: dict[int, MessageInMemory] = {}
    for i in np.flatnonzero(row_counts < 0).tolist():
        if not isinstance(parts[i], WireBatch):
            parts[i] = _open_one(i, parts[i])
        batch: WireBatch = parts[i]
        source = source_in(batch)
        inner_sizes[i] = source.sizes[1:]
        row_counts[i] = len(batch)
        fields[i] = batch.fields
        if isinstance(source, MessageSource) and chosen_in(batch) is None:
            message = source.in_memory()
            if message is not None:
                in_memory[i], buffers[i] = message, message.buffers
    _require_same_inner_sizes(inner_sizes, where)
    names = require_same_names(sorted(fields.items()), where)
    table = None
    if len(in_memory) + sum(len(stack.members) for stack in stacks) == len(parts):
        table = MessageTable(row_counts, [*stacks, *stacks_of(in_memory)], buffers)
    return WireBatch(JoinedRows(names, row_counts.tolist(), parts, table))


def _parts_of_join(source: Any) -> Sequence[Any]:
    """The batches of a join whose rows are not chosen; [source] for any other source."""
    joined = source_in(source) if isinstance(source, WireBatch) else None
    if isinstance(joined, JoinedRows) and chosen_in(source) is None:
        return [part.select(source.fields) for part in joined.parts()]
    return [source]


def _require_same_inner_sizes(inner_sizes: Mapping[int, Sequence[int]], where: str) -> None:
    """Refuse batches whose dims after the first differ from those of batch 0."""
    expected = inner_sizes[0]
    different = [i for i, found in inner_sizes.items() if found != expected]
    if different:
        i = min(different)
        detail = f"expected the batch dims {expected} after the first, found {inner_sizes[i]}"
        raise ArgumentError("bad_shape", f"{where} of batch {i}", detail)


def _open_one(index: int, source: Any) -> WireBatch:
    """The batch of one message; an error names the message by its index."""
    try:
        return open_whole(source, f"message {index}")
    except WireFormatError as error:
        raise in_message(error, index) from error


class JoinedRows(Source):
    """The rows of several batches, one batch after the other."""

    __slots__ = ("_forms", "_messages", "_parts", "_pool", "_row_counts")

    def __init__(
        self,
        names: Sequence[str],
        row_counts: list[int],
        parts: list[Any],
        messages: MessageTable | None,
    ) -> None:
        """`parts` are `WireBatch`es, or messages to open. `row_counts` has the rows of each.

        `messages` reads columns of all parts in place; None if a part cannot be read so.
        """
        rows = sum(row_counts)
        check_extent([rows], 1, "concat_rows")
        if isinstance(parts[0], WireBatch):
            first = source_in(parts[0])
            sizes = [rows, *first.sizes[1:]]
            super().__init__(names, sizes, first.device, first.allow_pickle)
        else:
            super().__init__(names, [rows], None, allow_pickle=False)
        self._row_counts = row_counts
        self._parts = parts
        self._messages = messages
        self._pool = RowSplitsPool()  # if all rows are read; `ChosenRows` have their own pool
        self._forms: dict[str, list[_RowsOfForm]] = {}

    def columns(self) -> Mapping[str, Column]:
        return {name: JoinedColumn(self, name) for name in self.names}

    def in_place(self, name: str) -> ColumnInPlace | None:
        """The rows of a column in all messages; None if they must be read one by one."""
        return None if self._messages is None else self._messages.column(name)

    def forms(self, name: str) -> list[_RowsOfForm]:
        """The rows of each form that a column of objects has.

        The list is empty if there is only one form, or if the column is not one of objects.
        """
        if name not in self._forms:
            tables = self._messages.tables_by_form(name) if self._messages else []
            self._forms[name] = [
                _RowsOfForm(form.rows, self._joined_members(form.members, form.table))
                for form in tables
            ]
        return self._forms[name]

    def _joined_members(self, members: IntArray, table: MessageTable) -> JoinedRows:
        """The rows of some parts, which `table` reads in place."""
        listed = members.tolist()
        row_counts, parts = [self._row_counts[i] for i in listed], [self._parts[i] for i in listed]
        return JoinedRows(self.names, row_counts, parts, table)

    def forms_by_example(self, name: str) -> Sequence[int]:
        """The indices of batches among which each form of a column occurs; batch 0 is left out."""
        return self._messages.examples(name) if self._messages else range(1, len(self._parts))

    def parts(self) -> Iterator[WireBatch]:
        """The batches, each opened when the caller comes to it."""
        return map(self.part, range(len(self._parts)))

    def read_each(self, read: Callable[[WireBatch], Any]) -> list[Any]:
        """The results of `read` for each batch; an error names the message."""
        results = []
        for i, part in enumerate(self.parts()):
            try:
                results.append(read(part))
            except WireFormatError as error:
                raise in_message(error, i) from error
        return results

    def part(self, index: int) -> WireBatch:
        """One of the batches, which is opened at its first use."""
        part = self._parts[index]
        if not isinstance(part, WireBatch):
            part = self._parts[index] = _open_one(index, part)
        return part

    def pool_inside(self) -> RowSplitsPool:
        return self._pool

    def meta(self) -> dict[str, Any]:
        if any(NO_VALUES in stack.values for stack in self._stacks()):
            return {}  # a message without documents has no `meta`, so all agree on nothing
        return common_meta([self.part(i).meta for i in sorted(set(self._indices_with_meta()))])

    def metas(self) -> list[dict[str, Any]]:
        return [self.part(i).meta for i in self._indices_with_meta()]

    def _stacks(self) -> Sequence[Stack]:
        return self._messages.stacks if self._messages else ()

    def _indices_with_meta(self) -> list[int]:
        """For each batch, the index of one to read its `meta` from.

        That is the first batch whose header has the same documents, and so the same `meta`.
        """
        first = [*range(len(self._parts))]
        for stack in self._stacks():
            members = stack.members.tolist()
            first_of_values = dict(zip(reversed(stack.values), reversed(members), strict=True))
            for i, values in zip(members, stack.values, strict=True):
                first[i] = first_of_values[values]
        return first

    def choose(self, view: RaggedView, chosen: ChosenRows | None) -> RaggedView:
        """The chosen rows of a column; columns of equal row lengths share one `RowSplits`."""
        if chosen is None:
            row_splits = self._pool.unique(view.row_splits)
            return view if row_splits is view.row_splits else replace(view, row_splits=row_splits)
        return chosen.of_view(view)

    def read_by_form(self, name: str, how: Read) -> Any:
        """A column of objects whose form differs between messages, read form by form.

        Returns None for any other column, and if a message must be read alone to name its fault.
        """
        forms, chosen = self.forms(name), how.chosen
        if not forms:
            return None
        index = np.arange(self.sizes[0])[slice(None) if chosen is None else chosen.at]
        objects = np.empty(len(index), dtype=object)
        place = np.empty(self.sizes[0], dtype=np.int64)
        for rows, joined in forms:
            place.fill(-1)
            place[rows] = np.arange(len(rows))
            wanted = place[index]
            at = np.flatnonzero(wanted >= 0)
            everything = np.array_equal(wanted[at], np.arange(len(rows)))
            chosen_of_form = None if everything else ChosenRows(wanted[at])
            column = {name: JoinedColumn(joined, name)}
            try:
                objects[at] = views_of(WireBatch(joined, column, chosen_of_form), As.HOST)[name]
            except WireFormatError:
                return None
        return objects

    def read_by_batch(self, name: str, how: Read) -> Any:
        """Read a column from each batch, and join the parts, in the form of `As.VIEW`.

        The first call reads all such columns of one read, so that each batch is opened only once.
        """
        columns = how.known.get(self)
        if columns is None:
            own_names = [
                column.name
                for column in how.columns.values()
                if isinstance(column, JoinedColumn) and column.source is self
            ]
            names = [x for x in own_names if not self.in_place(x) and not self.forms(x)]
            columns = how.known[self] = self._read_batches(names, how) if names else {}
        if name not in columns:  # the table has the column, but could not read its objects
            columns |= self._read_batches([name], how)
        return columns.pop(name)

    # Reading batch by batch

    def _read_batches(self, names: Sequence[str], how: Read) -> dict[str, Any]:
        """Read columns from each batch and join them, in the form of `As.VIEW` or `As.HOST`."""
        chosen, form = how.chosen, As.HOST if how.form is As.HOST else As.VIEW
        wanted = self._rows_of_parts(chosen)
        pool = self._pool if chosen is None else chosen.pool
        return self._read_wanted(names, wanted, form, pool)

    def check_field(self, name: str, index: int) -> None:
        """Refuse a column of the batch at `index` that cannot be joined with that of batch 0.

        It joins no rows of the two, so it reads no cells, and raises what a read of rows raises.
        """
        wanted = _WantedRows([(0, slice(0, 0)), (index, slice(0, 0))], None)
        self._read_wanted([name], wanted, As.VIEW, RowSplitsPool())

    def _read_wanted(
        self, names: Sequence[str], wanted: _WantedRows, form: As, pool: RowSplitsPool
    ) -> dict[str, Any]:
        """Read the wanted rows of columns batch by batch, and join them."""
        columns_by_name: dict[str, list[Any]] = {name: [] for name in names}
        for i, rows in wanted.rows_by_part:
            part = self.part(i)
            columns = columns_in(part)
            chosen_columns = {name: columns[name] for name in names}
            batch = WireBatch(source_in(part), chosen_columns, chosen_in(part))
            batch = batch if rows is None else batch.rows(rows)
            try:
                away = self.device is not None and form is As.VIEW
                for name, column in (leaves_of(batch) if away else views_of(batch, form)).items():
                    columns_by_name[name].append(_columns_inside(column, form))
            except WireFormatError as error:
                raise in_message(error, i) from error
        joined = {}
        for name, columns_of_parts in columns_by_name.items():
            try:
                joined[name] = _joined_column(name, columns_of_parts, wanted.order, pool)
            except (ArgumentError, ArgumentTypeError) as error:
                renumbered = _with_true_indices(error, [i for i, _ in wanted.rows_by_part])
                raise with_name_in_remedy(renumbered, name) from error.__cause__
        return joined

    def _rows_of_parts(self, chosen: ChosenRows | None) -> _WantedRows:
        """Which of the chosen rows to read from which batch."""
        if chosen is None:
            return _WantedRows([(i, None) for i in range(len(self._parts))], None)
        if not len(chosen):
            return _WantedRows([(0, slice(0, 0))], None)
        index, ends = chosen.index, np.cumsum(self._row_counts)
        begins = [0, *ends.tolist()]
        if isinstance(index, range):
            first, last = np.searchsorted(ends, (index.start, index.stop - 1), side="right")
            spans = [(i, begins[i]) for i in range(first, last + 1)]
            parts = [(i, slice(max(0, index.start - at), index.stop - at)) for i, at in spans]
            return _WantedRows(parts, None)
        part_of = np.searchsorted(ends, index, side="right")
        order = np.argsort(part_of, kind="stable")
        numbers, firsts = np.unique(part_of[order], return_index=True)
        rows = np.split(index[order], firsts[1:])
        in_order = bool((order[:-1] < order[1:]).all())
        return _WantedRows(
            [(i, members - begins[i]) for i, members in zip(numbers.tolist(), rows, strict=True)],
            None if in_order else np.argsort(order),
        )


class _RowsOfForm(NamedTuple):
    """The rows of a join in whose messages a column of objects has one form."""

    rows: IntArray  # the indices of these rows among all rows of the join
    source: JoinedRows  # these rows alone


class _WantedRows(NamedTuple):
    """Which rows to read from which of the batches of a join."""

    # The index of each batch to read from, and its rows as an index; None for all of its rows.
    rows_by_part: list[tuple[int, Any]]
    order: IntArray | None  # puts the rows that were read in order; None if they are in order


class JoinedColumn(Column):
    """A column of several batches, one after the other."""

    __slots__ = ("name", "source")

    def __init__(self, source: JoinedRows, name: str) -> None:
        self.source: JoinedRows = source
        self.name: str = name

    def field(self, rows: int) -> FieldSchema:
        first = self._field_in_part(0, rows)
        for i in self.source.forms_by_example(self.name):
            if self._field_in_part(i, rows) != first:
                self.source.check_field(self.name, i)
        return first

    def _field_in_part(self, index: int, rows: int) -> FieldSchema:
        kind, dtype, shape = columns_in(self.source.part(index))[self.name].field(rows)
        return FieldSchema(kind, dtype, shape if shape is None else (rows, *shape[1:]))

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        in_place = self.source.in_place(self.name)
        if in_place:
            of_parts = [in_place.view.row_splits.lengths if in_place.kind is Kind.JAGGED else None]
        else:
            of_parts = self.source.read_each(lambda part: part.row_lengths(self.name))
        jagged = [lengths for lengths in of_parts if lengths is not None]
        if len(jagged) < len(of_parts):
            return None
        lengths = np.concatenate(jagged)
        return lengths if chosen is None else lengths[chosen.at]

    def storage(self) -> Storage:
        in_place = self.source.in_place(self.name)
        if in_place:  # not elided: the table reads no such columns
            return Storage([(self.name,)], False) if in_place.narrow else PLAIN_STORAGE
        narrow, elided = combined_storage([column.storage() for column in self._columns_of_parts()])
        return Storage([*dict.fromkeys(narrow)], elided)

    def _columns_of_parts(self) -> Sequence[Column]:
        """The column in each form, or in each batch, where the table does not have it."""
        forms = self.source.forms(self.name)
        if forms:
            return [JoinedColumn(form.source, self.name) for form in forms]
        return self.source.read_each(lambda part: columns_in(part)[self.name])

    def read(self, how: Read) -> Any:
        in_place, source, chosen = self.source.in_place(self.name), self.source, how.chosen
        if not in_place:
            return self._read_parts(how)
        view = source.choose(in_place.view, chosen)
        if in_place.dims is not None:
            dims = source.choose(in_place.dims, chosen)
            rows = _joined_arrays(view, dims, in_place)
            return self._read_parts(how) if rows is None else rows
        splits = view.row_splits
        if in_place.kind is Kind.JAGGED:
            return view if how.form is not As.VALUE else _jagged_in_place(view, how)
        if in_place.kind is Kind.TENSOR:
            if how.form is As.HOST:
                return CellRows(view)
            return InPlace(view, lambda cells: how.value_module.values_from_cells(cells, view))

        def make_objects(cells: ByteArray) -> Any:
            rows = _joined_objects(cells, splits, in_place.levels)
            return self._read_parts(how) if rows is None else rows

        return InPlace(view, make_objects)

    def _read_parts(self, how: Read) -> Any:
        """Read the column form by form, or batch by batch, because the table cannot read it."""
        rows = self.source.read_by_form(self.name, how)
        if rows is not None:
            return rows
        column = self.source.read_by_batch(self.name, how)
        if type(column) is dict:  # a nested batch
            rows = self.source.sizes[0] if how.chosen is None else len(how.chosen)
            path = _path(self.name)
            return how.batch_type(nested_source(column, [rows], self.source, path))
        if how.form is not As.VALUE or not isinstance(column, RaggedView):
            return column
        return _jagged_in_place(column, how)

    def to_send(self, how: Read) -> Any:
        in_place, source = self.source.in_place(self.name), self.source
        if in_place and in_place.dims is None:
            view = source.choose(in_place.view, how.chosen)
            has_objects = in_place.kind is Kind.NON_TENSOR_ROWS
            if view.row_splits.rows or not has_objects:
                dtype = None if has_objects else in_place.dtype
                return item_of_view(view, dtype, ragged=in_place.kind is not Kind.TENSOR)
        column = self.read(how)
        if isinstance(column, InPlace):  # objects of no rows
            column = column.make(gathered_bytes([column.view])[0])
        if isinstance(column, WireBatch):
            return to_send_inside(column, how)
        are_objects = isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1
        return list(column) if are_objects else column

    def leaf(self, value: Any, how: Read) -> Any:
        if isinstance(value, WireBatch):
            return closed_batch(value, leaves_of(value, how))
        rows = self.source.sizes[0] if how.chosen is None else len(how.chosen)
        return as_leaf(value, rows, _path(self.name))

    def user_value(self, value: Any, how: Read) -> Any:
        return user_value_in_memory(value, self.source, _path(self.name), how)


def _jagged_in_place(view: RaggedView, how: Read) -> InPlace:
    """A jagged column that is made once its rows are copied."""
    value_module, splits, dim = how.value_module, view.row_splits, view.ragged_dim

    def make(cells: ByteArray) -> Any:
        values = value_module.values_from_cells(cells, view)
        return value_module.jagged_of_values(values, splits, dim)

    return InPlace(view, make)


def _joined_objects(data: ByteArray, row_splits: RowSplits, levels: int) -> Any:
    """The (N,) objects of documents that are end to end; None if each message must be read."""
    raw, bounds = data.tobytes(), row_splits.offsets_array.tolist()
    with suppress(WireFormatError):  # reading each message raises it again, with its place
        items = documents.parsed_rows(raw, bounds[1:], range(row_splits.rows))
        if are_values(items, levels):
            return object_array(items)
    return None


def _joined_arrays(view: RaggedView, dims: RaggedView, column: ColumnInPlace) -> Any:
    """The (N,) objects of rows that are arrays; None if each message must be read."""
    data, table = gathered_bytes([view, dims])
    lengths, itemsize = view.row_splits.lengths, view.dtype.itemsize
    make_row = with_or_without_torch(*VALUES).rows_of_cells(data, view) if column.tensors else None
    if make_row is None:
        make_row = array_maker(array_of_cells(data, view))
    with suppress(WireFormatError):  # reading each message raises it again, with its place
        numbers = array_of_cells(table, dims)
        return object_array(
            rows_of_arrays(make_row, itemsize, lengths, numbers, range(len(lengths)))
        )
    return None


def _joined_column(
    name: str, columns: Sequence[Any], order: IntArray | None, pool: RowSplitsPool
) -> Any:
    """Join a column of several batches, and put its rows in the order asked for."""
    if all(isinstance(column, RaggedView) for column in columns):
        view = concat_views(columns)
        if view is None:
            return join_views(columns, order, pool, _path(name))
        if order is not None:  # a choice from the view: rows that share cells still share them
            view = view.choose(order, RowSplits.from_lengths(view.row_splits.lengths[order]))
        return replace(view, row_splits=pool.unique(view.row_splits))
    if not all(isinstance(column, OneObject) for column in columns):
        columns = [
            column_of(column).object_array() if isinstance(column, OneObject) else column
            for column in columns
        ]
    if all(type(column) is dict for column in columns):
        names_of_parts = enumerate([*column] for column in columns)
        inner = require_same_names(names_of_parts, _path(name))
        return {x: _joined_column(x, [column[x] for column in columns], order, pool) for x in inner}
    if all(isinstance(column, CellRows) for column in columns):
        return CellRows(join_views([column.view for column in columns], order, pool, _path(name)))
    leaves = [as_leaf(x, 0, _path(name)) if isinstance(x, RaggedView) else x for x in columns]
    joined = join_leaves(leaves, order, pool, _path(name), same_values)
    view = column_of(joined).jagged_view(_path(name), pool)
    return joined if view is None else view


def _with_true_indices(error: JagcodecError, indices: Sequence[int]) -> JagcodecError:
    """The error of a join of some batches, with the `indices` that these have in the whole join."""

    def numbered(match: re.Match[str]) -> str:
        return f"{match[1]} batch {indices[int(match[2])]}"

    path = re.sub(r"\b(of) batch (\d+)$", numbered, error.path)
    detail = re.sub(r"\b(of|like|in) batch (\d+)\b", numbered, error.detail)
    return type(error)(error.reason, path, detail)


def _columns_inside(column: Any, form: As) -> Any:
    """A nested batch, read in a form; any other column is returned unchanged.

    The result is a TensorDict, or a dict of columns where torch is not installed or for `As.HOST`.
    """
    if not isinstance(column, WireBatch):
        return column
    # Jagged columns of equal row lengths share their offsets in a TensorDict.
    if form is As.VIEW and with_or_without_torch(*VALUES).HAS_LEAVES:
        return column.to_tensordict()
    return {name: _columns_inside(x, form) for name, x in views_of(column, form).items()}


def _path(name: str) -> str:
    """The place of a column, for errors."""
    return f"concat_rows[{name!r}]"
