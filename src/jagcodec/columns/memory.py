"""The columns of a batch in memory, or of one that is a document of a message."""

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
    sent_inside,
)
from jagcodec.columns.column import DictBatch, HeldColumn, column_of, not_a_column
from jagcodec.columns.join import chosen_leaf, plan_rows
from jagcodec.errors import ArgumentError
from jagcodec.memory.arrays import IntArray, object_array
from jagcodec.rows.chosen_rows import CHOSEN, ChosenRows
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.views import RaggedView

if TYPE_CHECKING:
    import torch

"""The place of an error about rows that were chosen."""


class MemorySource(Source):
    """A batch in memory: a TensorDict, a dict, or columns of a message that are documents."""

    __slots__ = ("_meta", "_values", "path", "pool")

    def __init__(
        self,
        columns: Mapping[str, Any],
        sizes: Sequence[int],
        meta: Mapping[str, Any],
        around: Any = None,
        path: str = "WireBatch",
    ) -> None:
        """`around` is the message or source that the columns are from; None for the caller's.

        `path` is the place of the batch, for errors.
        """
        self.names: Sequence[str] = tuple(columns)
        self.sizes: Sequence[int] = [*sizes]
        self.device: torch.device | None = None if around is None else around.device
        self.allow_pickle: bool = around is not None and around.allow_pickle
        self.path: str = path
        inside = isinstance(around, Source)
        self.pool: RowSplitsPool = around.pool_inside() if inside else RowSplitsPool()
        self._values = columns
        self._meta = meta

    def columns(self) -> Mapping[str, Column]:
        return {name: MemoryColumn(self, name, value) for name, value in self._values.items()}

    def meta(self) -> dict[str, Any]:
        return dict(self._meta)

    def pool_inside(self) -> RowSplitsPool:
        return self.pool

    def take(self, name: str | None, value: Any) -> Any:
        """A column for a caller, who may change it."""
        return value

    def again(self, name: str | None) -> Callable[[], Any] | None:
        """A function that reads a column again from its message; None if the caller owns it."""
        return None

    def check_rows(self, column: Any, *names: str) -> None:
        """Check that a column, which the caller may have changed, has the rows of the batch."""
        sizes: Any = self.sizes
        holder = column_of(column)
        found = holder.sizes(sizes) if sizes else sizes
        if found != sizes or type(holder) is HeldColumn:
            path = "".join([self.path, *(f"[{name!r}]" for name in names)])
            if type(holder) is HeldColumn:
                raise not_a_column(column, path)
            remedy = "open the batch again after a change of its columns"
            detail = f"expected batch size {sizes}, as when it was opened, found {found}; {remedy}"
            raise ArgumentError("row_mismatch", path, detail)
        for name, leaf in holder.leaves() or ():
            self.check_rows(leaf, *names, name)


class DocumentSource(MemorySource):
    """The columns of a message, or of a dict in one, that are documents.

    The caller owns what was read and may change it, so each read returns new objects.
    """

    __slots__ = ("_again", "_unread")

    def __init__(
        self,
        columns: Mapping[str, Any],
        sizes: Sequence[int],
        meta: Mapping[str, Any],
        around: Any,
        again: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
        path: str = "WireBatch",
    ) -> None:
        """`again` reads the columns and `meta` once more."""
        super().__init__(columns, sizes, meta, around, path)
        self._again = again
        self._unread: dict[Any, Any] = {**columns, None: meta}  # no caller has these

    def meta(self) -> dict[str, Any]:
        return dict(self._take(None))

    def take(self, name: str | None, value: Any) -> Any:
        return self._take(name)

    def again(self, name: str | None) -> Callable[[], Any] | None:
        return lambda: self._again()[0][name]  # type: ignore[index]

    def _take(self, name: str | None) -> Any:
        """A column by name, or `meta` by None: a new object, which no later call returns."""
        unread = self._unread
        taken = unread.pop(name, _TAKEN)
        if taken is _TAKEN:
            columns, meta = self._again()
            # The others are kept: a reader of each column in turn unpacks the documents once.
            unread = {**columns, None: meta}
            taken = unread.pop(name)
            self._unread = unread
        return taken


_TAKEN = object()
"""Stands for a column that a caller has."""


class BuiltSource(MemorySource):
    """One column of a dict in a message, which was built of its node."""

    __slots__ = ("_build",)

    def __init__(self, sizes: Sequence[int], around: Source, build: Callable[[], Any]) -> None:
        """`build` makes the column once more."""
        super().__init__({}, sizes, {}, around, "$")
        self._build = build

    def again(self, name: str | None) -> Callable[[], Any] | None:
        return self._build


class MemoryColumn(Column):
    """A column in memory; without chosen rows it is returned itself, unless it is a batch."""

    __slots__ = ("name", "source", "value")

    def __init__(self, source: MemorySource, name: str | None, value: Any) -> None:
        """Without a name, it is the whole of its source."""
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
        column, chosen = self.source.take(self.name, self.value), how.chosen
        holder = column_of(column)
        if isinstance(holder, DictBatch) or (how.form is As.HOST and holder.leaves() is not None):
            return self._nested(column, how)
        if holder.is_in_place:
            return chosen_in_place(column, chosen)
        found = self._in_form(holder, how)
        if found is not None:
            return found
        if chosen is not None:
            column = plan_rows(column, chosen.index, chosen.pool, self._at(CHOSEN))
        as_array = how.form is not As.VALUE and type(column) is list
        return object_array(column) if as_array else column

    def _in_form(self, holder: HeldColumn, how: Read) -> Any:
        """The chosen rows in place, or on the host; None for a column that is read as VALUE."""
        if how.form is As.VALUE:
            return None
        if how.form is As.VIEW:
            return self._view(holder, how.chosen, detach=False)
        found = holder.on_host(self._path())
        return None if found is None else chosen_in_place(found, how.chosen)

    def to_send(self, how: Read) -> Any:
        self._check_all(how)
        column, chosen = self.source.take(self.name, self.value), how.chosen
        holder = column_of(column)
        if isinstance(holder, DictBatch):
            return sent_inside(self._nested(column, how), how)
        if holder.is_in_place:
            return chosen_in_place(column, chosen)
        if holder.is_sent_in_place():
            view = self._view(holder, chosen, detach=True)
            if view is not None:
                return view
        if chosen is not None:
            found = _chosen_to_send(holder, chosen)
            if found is not None:
                return found
            column = chosen_leaf(column, chosen.index, chosen.pool, self._at(CHOSEN))
        return leaf_in_memory(column, self.source, self._path()) if holder.is_packed else column

    def leaf(self, value: Any, how: Read) -> Any:
        if isinstance(value, Batch):
            return closed_batch(value, leaves_of(value, how))
        return leaf_in_memory(value, self.source, self._path())

    def face(self, value: Any, how: Read) -> Any:
        return face_in_memory(value, self.source, self._path(), how)

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
        """A dict in the batch, as an open batch of the same rows."""
        source = self.source
        again = source.again(self.name)
        inner = nested_source(column, source.sizes[:1], source, self._path(), again)
        return how.batch_type(inner, None, how.chosen)

    def _check_all(self, how: Read) -> None:
        """Check the rows of all columns of the source that are read, before the first of them."""
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
        return self._at(self.source.path)

    def _at(self, place: str) -> str:
        return place if self.name is None else f"{place}[{self.name!r}]"


def chosen_in_place(found: Any, chosen: ChosenRows | None) -> Any:
    """The chosen rows of a column whose rows are in place, an array, or one object."""
    if chosen is None:
        return found
    if isinstance(found, CellRows):
        return CellRows(chosen.of_view(found.view))
    if isinstance(found, OneObject):
        items = found.items()
        data = found.data if items is None else items[chosen.at]
        return found._replace(data=data, rows=len(chosen))
    return chosen.of_view(found) if isinstance(found, RaggedView) else found[chosen.at]


def _chosen_to_send(holder: HeldColumn, chosen: ChosenRows) -> Any:
    """Chosen rows of one size in place, or of objects as a list; None for any other column."""
    objects = holder.own_objects()
    if objects is not None:
        return [objects[i] for i in chosen.rows]
    if isinstance(chosen.index, range):
        return None  # a slice of the tensor aliases it
    array = holder.array()
    return None if array is None else CellRows(chosen.of_array(array, holder.value.dtype))


def columns_and_meta(batch: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The columns of a batch, and the values next to them if it is a dict."""
    return dict(batch.items()), getattr(batch, "meta_info", {})


def nested_source(
    batch: Any,
    sizes: Sequence[int],
    around: Source,
    path: str,
    again: Callable[[], Any] | None = None,
) -> MemorySource:
    """A batch in a batch in memory; `again` reads it once more if it is from a message."""
    columns, meta = columns_and_meta(batch)
    if again is None:
        return MemorySource(columns, sizes, meta, around, path)
    read = again
    return DocumentSource(columns, sizes, meta, around, lambda: columns_and_meta(read()), path)


def leaf_in_memory(column: Any, source: Source, path: str) -> Any:
    """A column as a leaf. One that only a dict may have goes to the device of its source."""
    holder = column_of(column)
    return _on_device(holder.leaf(0, path), source) if holder.is_in_dict else column


def face_in_memory(column: Any, source: Source, path: str, how: Read) -> Any:
    """A column in memory as ``batch[name]`` returns it."""
    if isinstance(column, Batch):
        return column
    holder = column_of(column)
    if holder.leaves() is not None:
        return how.batch_type(nested_source(column, [*column.batch_size], source, path))
    found = holder.face(path)
    return _on_device(found, source) if holder.is_in_dict else found


def _on_device(leaf: Any, source: Source) -> Any:
    if source.device is None:
        return leaf
    from jagcodec.columns.of_tensors import on_device  # where there is a device, torch is here

    return on_device(leaf, source.device)
