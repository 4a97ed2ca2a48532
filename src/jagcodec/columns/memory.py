"""Batches in memory: a `MemorySource` holds their columns, and a `MemoryColumn` reads one of them.

Columns of a message that are documents are in memory once they have been read. The caller owns what
a read returns, so their sources read them again for the next read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jagcodec.columns.batch import (
    As,
    Batch,
    CellRows,
    Column,
    FieldSchema,
    OneObject,
    Read,
    Source,
    closed_batch,
    leaves_of,
    to_send_inside,
)
from jagcodec.columns.held import DictBatch, HeldColumn, column_of, not_a_column
from jagcodec.columns.join import chosen_leaf, plan_rows
from jagcodec.errors import ArgumentError
from jagcodec.memory.arrays import IntArray, object_array
from jagcodec.rows.chosen_rows import CHOSEN, ChosenRows
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.views import RaggedView

if TYPE_CHECKING:
    import torch


class MemorySource(Source):
    """A batch in memory: a TensorDict, a dict, or columns of a message that are documents."""

    __slots__ = ("_meta", "_values", "path", "pool")

    def __init__(
        self,
        columns: Mapping[str, Any],
        sizes: Sequence[int],
        meta: Mapping[str, Any],
        outer: Any = None,
        path: str = "WireBatch",
    ) -> None:
        """`outer` is their message or source; None if they are the caller's own objects.

        `path` is the place of the batch, for errors.
        """
        self.names: Sequence[str] = tuple(columns)
        self.sizes: Sequence[int] = [*sizes]
        self.device: torch.device | None = None if outer is None else outer.device
        self.allow_pickle: bool = outer is not None and outer.allow_pickle
        self.path: str = path
        is_nested = isinstance(outer, Source)
        self.pool: RowSplitsPool = outer.pool_inside() if is_nested else RowSplitsPool()
        self._values = columns
        self._meta = meta

    def columns(self) -> Mapping[str, Column]:
        return {name: MemoryColumn(self, name, value) for name, value in self._values.items()}

    def meta(self) -> dict[str, Any]:
        return dict(self._meta)

    def pool_inside(self) -> RowSplitsPool:
        return self.pool

    def take_column(self, name: str | None, value: Any) -> Any:
        """A column for a caller, who may change it; `value` is that of the first read."""
        return value

    def reread(self, name: str | None) -> Callable[[], Any] | None:
        """A function that reads a column again from its message; None for the caller's own."""
        return None

    def check_rows(self, column: Any, *names: str) -> None:
        """Check that a column, which the caller may have changed, has the rows of the batch."""
        sizes: Any = self.sizes
        holder = column_of(column)
        sizes_now = holder.sizes(sizes) if sizes else sizes
        if sizes_now != sizes or type(holder) is HeldColumn:
            path = "".join([self.path, *(f"[{name!r}]" for name in names)])
            if type(holder) is HeldColumn:
                raise not_a_column(column, path)
            remedy = "open the batch again after a change of its columns"
            detail = f"expected batch size {sizes}, as when it was opened, found {sizes_now}"
            detail += f"; {remedy}"
            raise ArgumentError("row_mismatch", path, detail)
        for name, leaf in holder.leaves() or ():
            self.check_rows(leaf, *names, name)


class DocumentSource(MemorySource):
    """The columns of a message, or of a dict in one, that are documents.

    The caller owns what was read and may change it, so each read returns new objects.
    """

    __slots__ = ("_read_again", "_untaken")

    def __init__(
        self,
        columns: Mapping[str, Any],
        sizes: Sequence[int],
        meta: Mapping[str, Any],
        outer: Any,
        read_again: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
        path: str = "WireBatch",
    ) -> None:
        """`read_again` returns the columns and `meta` as new objects."""
        super().__init__(columns, sizes, meta, outer, path)
        self._read_again = read_again
        # What no caller has yet: columns by name, and `meta` by `_META`.
        self._untaken: dict[Any, Any] = {**columns, _META: meta}

    def meta(self) -> dict[str, Any]:
        return dict(self._take_once(_META))

    def take_column(self, name: str | None, value: Any) -> Any:
        return self._take_once(name)

    def reread(self, name: str | None) -> Callable[[], Any] | None:
        return lambda: self._read_again()[0][name]  # type: ignore[index]

    def _take_once(self, name: Any) -> Any:
        """A column by name, or `meta` by `_META`: a new object, which no later call returns."""
        value = self._untaken.pop(name, _TAKEN)
        if value is _TAKEN:
            columns, meta = self._read_again()
            # Keep the others: a caller who reads each column in turn unpacks the documents once.
            untaken: dict[Any, Any] = {**columns, _META: meta}
            value = untaken.pop(name)
            self._untaken = untaken
        return value


_TAKEN = object()
"""Stands for a column that a caller has."""

_META = object()
"""Stands for the name of a column in a look-up of `meta`."""


class BuiltSource(MemorySource):
    """The source of one column, a dict that was built from a node of a message."""

    __slots__ = ("_build",)

    def __init__(self, sizes: Sequence[int], outer: Source, build: Callable[[], Any]) -> None:
        """`build` returns the column as a new object."""
        super().__init__({}, sizes, {}, outer, "$")
        self._build = build

    def reread(self, name: str | None) -> Callable[[], Any] | None:
        return self._build


class MemoryColumn(Column):
    """A column in memory. A read of all rows returns the column itself, unless it is a batch."""

    __slots__ = ("name", "source", "value")

    def __init__(self, source: MemorySource, name: str | None, value: Any) -> None:
        """The column of this name; or without a name, the only one of its source."""
        self.source: MemorySource = source
        self.name: str | None = name
        self.value: Any = value

    def field(self, rows: int) -> FieldSchema:
        return column_of(self.value).field(rows)

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        source, value = self.source, self.value
        source.check_rows(value, *self._names())
        view = column_of(value).view(self._path(), source.pool, detach=True)
        if view is None:
            return None
        return view.row_splits.lengths if chosen is None else view.row_splits.lengths[chosen.at]

    def read(self, how: Read) -> Any:
        self._check_all(how)
        column, chosen = self.source.take_column(self.name, self.value), how.chosen
        holder = column_of(column)
        # A batch is read column by column. Without torch, a TensorDict is, too.
        if isinstance(holder, DictBatch) or (how.form is As.HOST and holder.leaves() is not None):
            return self._nested(column, how)
        # These forms choose rows without a copy, so they come before forms that need one.
        if holder.is_in_place:
            return chosen_in_place(column, chosen)
        # A form in place, if the reader asks for one and the column has it.
        if how.form is As.VIEW:
            view = self._view(holder, chosen, detach=False)
            if view is not None:
                return view
        elif how.form is As.HOST:
            on_host = holder.on_host(self._path())
            if on_host is not None:
                return chosen_in_place(on_host, chosen)
        # Any other column: all rows are the column itself, chosen ones are a copy.
        if chosen is not None:
            column = plan_rows(column, chosen.index, chosen.pool, self._path_in(CHOSEN))
        is_object_list = how.form is not As.VALUE and type(column) is list
        return object_array(column) if is_object_list else column

    def to_send(self, how: Read) -> Any:
        self._check_all(how)
        column, chosen = self.source.take_column(self.name, self.value), how.chosen
        holder = column_of(column)
        if isinstance(holder, DictBatch):
            return to_send_inside(self._nested(column, how), how)
        if holder.is_in_place:
            return chosen_in_place(column, chosen)
        if holder.is_sent_in_place():
            view = self._view(holder, chosen, detach=True)
            if view is not None:
                return view
        if chosen is not None:
            entry = _chosen_to_send(holder, chosen)
            if entry is not None:
                return entry
            column = chosen_leaf(column, chosen.index, chosen.pool, self._path_in(CHOSEN))
        return leaf_in_memory(column, self.source, self._path()) if holder.is_packed else column

    def leaf(self, value: Any, how: Read) -> Any:
        if isinstance(value, Batch):
            return closed_batch(value, leaves_of(value, how))
        return leaf_in_memory(value, self.source, self._path())

    def user_value(self, value: Any, how: Read) -> Any:
        return user_value_in_memory(value, self.source, self._path(), how)

    def _view(
        self, holder: HeldColumn, chosen: ChosenRows | None, *, detach: bool
    ) -> RaggedView | None:
        """The chosen rows of a jagged or packed column in place; None for any other column."""
        pool = self.source.pool
        view = holder.view(self._path(), pool, detach=detach)
        if view is None:
            return None
        splits = pool.unique(view.row_splits)
        if splits is not view.row_splits:
            view = replace(view, row_splits=splits)
        return view if chosen is None else chosen.of_view(view)

    def _nested(self, column: Any, how: Read) -> Batch:
        """A batch in the batch, as an open batch of the same rows."""
        source = self.source
        reread = source.reread(self.name)
        inner = nested_source(column, source.sizes[:1], source, self._path(), reread)
        return how.batch_type(inner, None, how.chosen)

    def _check_all(self, how: Read) -> None:
        """Check the rows of all columns that are read of this source, before the first is read."""
        source = self.source
        if source not in how.known:
            how.known[source] = None
            for column in how.columns.values():
                if isinstance(column, MemoryColumn) and column.source is source:
                    source.check_rows(column.value, *column._names())

    def _names(self) -> tuple[str, ...]:
        return () if self.name is None else (self.name,)

    def _path(self) -> str:
        """The place of the column, for errors."""
        return self._path_in(self.source.path)

    def _path_in(self, place: str) -> str:
        """The place of the column in a batch that is at this place."""
        return place if self.name is None else f"{place}[{self.name!r}]"


def chosen_in_place(rows: Any, chosen: ChosenRows | None) -> Any:
    """The chosen rows of a `RaggedView`, a `CellRows`, a `OneObject` or an array."""
    if chosen is None:
        return rows
    if isinstance(rows, CellRows):
        return CellRows(chosen.of_view(rows.view))
    if isinstance(rows, OneObject):
        items = rows.items()
        data = rows.data if items is None else items[chosen.at]
        return rows._replace(data=data, rows=len(chosen))
    return chosen.of_view(rows) if isinstance(rows, RaggedView) else rows[chosen.at]


def _chosen_to_send(holder: HeldColumn, chosen: ChosenRows) -> Any:
    """Chosen rows of one size as a `CellRows`, objects as a list; None for any other column."""
    objects = holder.objects_to_send()
    if objects is not None:
        return [objects[i] for i in chosen.rows]
    if isinstance(chosen.index, range):
        return None  # a slice of the tensor aliases it
    array = holder.array()
    return None if array is None else CellRows(chosen.of_array(array, holder.value.dtype))


def columns_and_meta(batch: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The columns of a batch, and its `meta_info` if it is a `BatchedDataDict`."""
    return dict(batch.items()), getattr(batch, "meta_info", {})


def nested_source(
    batch: Any,
    sizes: Sequence[int],
    outer: Source,
    path: str,
    reread: Callable[[], Any] | None = None,
) -> MemorySource:
    """The source of a batch in a batch; `reread` reads it again if it is from a message."""
    columns, meta = columns_and_meta(batch)
    if reread is None:
        return MemorySource(columns, sizes, meta, outer, path)
    return DocumentSource(columns, sizes, meta, outer, lambda: columns_and_meta(reread()), path)


def leaf_in_memory(column: Any, source: Source, path: str) -> Any:
    """A column in the form that a TensorDict holds, on the device of its source."""
    holder = column_of(column)
    return _on_device(holder.leaf(0, path), source) if holder.needs_leaf_form else column


def user_value_in_memory(column: Any, source: Source, path: str, how: Read) -> Any:
    """A column in memory as ``batch[name]`` returns it."""
    if isinstance(column, Batch):
        return column
    holder = column_of(column)
    if holder.leaves() is not None:
        return how.batch_type(nested_source(column, [*column.batch_size], source, path))
    value = holder.user_value(path)
    return _on_device(value, source) if holder.needs_leaf_form else value


def _on_device(leaf: Any, source: Source) -> Any:
    """A leaf on the device of its source; unchanged if the source has none."""
    if source.device is None:
        return leaf
    from jagcodec.columns.tensor_columns import on_device  # where there is a device, torch is here

    return on_device(leaf, source.device)
