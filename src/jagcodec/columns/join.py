"""Rows of columns and batches in memory, chosen and joined: cells are copied once, in one call.

Cells on the host become views, whose rows are chosen in place. Several columns become one view over
the buffers of all of them. One call copies the rows of all columns of a batch. Torch copies cells
on devices, and cells that autograd follows.

Tensordict does not choose or join rows here, because its releases differ: below 0.15, it cannot
choose or join rows of jagged leaves.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import InPlace
from jagcodec.columns.held import (
    Array,
    DictBatch,
    HeldBatch,
    HeldColumn,
    ObjectList,
    OneObjectColumn,
    column_of,
    not_a_column,
    row_count,
    with_columns,
)
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    brief,
    with_name_in_remedy,
)
from jagcodec.memory.arrays import IntArray, array_bytes, object_array
from jagcodec.memory.extents import check_extent, total_of
from jagcodec.rows.copy_bytes import array_of_view, gathered_cells
from jagcodec.rows.row_splits import Chosen, RowSplits, RowSplitsPool
from jagcodec.rows.views import RaggedView, concat_views, end_to_end, in_buffers


def chosen_leaf(leaf: Any, chosen: Chosen, pool: RowSplitsPool, path: str) -> Any:
    """Chosen rows of a column or a batch. A range of a tensor is a slice; all else is copied."""
    return _row_chooser(chosen, pool).join([leaf], path)


def plan_rows(leaf: Any, chosen: Chosen, pool: RowSplitsPool, path: str) -> Any:
    """What `chosen_leaf` returns; or `InPlace`, so that several columns are copied together."""
    return _row_chooser(chosen, pool).plan_join([leaf], path)


def _row_chooser(chosen: Chosen | None, pool: RowSplitsPool) -> RowJoiner:
    """A joiner of columns of one batch: a value that belongs to the whole batch is one object."""
    return RowJoiner(chosen, pool, operator.is_, 0)


def join_leaves(
    leaves: Sequence[Any],
    chosen: Chosen | None,
    pool: RowSplitsPool,
    path: str,
    same: Callable[[Any, Any], bool],
    model_index: int = 0,
) -> Any:
    """The rows of several columns joined, or those `chosen`, in the form of one of the columns.

    `same` compares values that belong to whole batches.
    """
    return RowJoiner(chosen, pool, same, model_index).join(leaves, path)


def join_views(
    views: Sequence[RaggedView], chosen: Chosen | None, pool: RowSplitsPool, path: str
) -> RaggedView:
    """`join_leaves` for views over memory that callers must not change, such as a message's."""
    joiner = _row_chooser(chosen, pool)
    joiner.check_joinable(views, path)
    whole = views[0] if len(views) == 1 else concat_views(views)
    if whole is None:
        whole = joiner.concat(views)
    if chosen is not None:
        whole = joiner.chosen_view(whole, path)
    splits, dim = pool.unique(whole.row_splits), whole.ragged_dim
    cells, shape = gathered_cells([whole])[0], whole.values_shape
    return RaggedView(cells, whole.dtype, shape, dim, None, splits)


def require_same_names(batches: Iterable[tuple[int, Sequence[str]]], where: str) -> Sequence[str]:
    """The names of the columns of the first batch; an error if another batch differs."""
    first: Sequence[str] | None = None
    for i, names in batches:
        if first is None or names == first:
            first = names
            continue
        # Keep the order of the columns: the hash seed decides the order of a set.
        expected, present = dict.fromkeys(first), dict.fromkeys(names)
        differences = [(name, "missing") for name in expected if name not in present]
        differences += [(name, "in addition") for name in present if name not in expected]
        for name, difference in differences:
            detail = (
                f"expected the columns of batch 0, found {brief(name)} {difference}; "
                "select the others"
            )
            raise ArgumentKeyError("no_such_field", f"{where} of batch {i}", detail)
    return first or ()


class RowJoiner:
    """Joins rows of several columns, or chooses rows: one joiner for all columns of a batch.

    `same` compares values that belong to whole batches.
    """

    def __init__(
        self,
        chosen: Chosen | None,  # None means all rows
        pool: RowSplitsPool,
        same: Callable[[Any, Any], bool],
        model_index: int,  # of the column, or batch, whose form the result has
    ) -> None:
        self.chosen = chosen
        self.pool = pool
        self.same = same
        self.model_index = model_index
        # By the id of row splits: these splits, so that the id stays theirs, and the chosen ones.
        self._splits: dict[int, tuple[RowSplits, RowSplits]] = {}
        self._cells: tuple[IntArray, RowSplits] | None = None

    def join(self, leaves: Sequence[Any], path: str) -> Any:
        """The rows of all leaves, each a column or a batch, as one."""
        return make_column(self.plan_join(leaves, path))

    def plan_join(self, leaves: Sequence[Any], path: str) -> Any:
        """The joined column; or an `InPlace`, if its rows must be copied first."""
        columns = [column_of(leaf) for leaf in leaves]
        family = columns[self.model_index].family
        if any(column.family is not family for column in columns):
            columns = [
                self._like_model(column, columns, i, path) for i, column in enumerate(columns)
            ]
        if columns[0].family is None:
            raise not_a_column(leaves[0], path)
        join_columns = _JOIN_OF_KIND.get(type(columns[0]))
        if join_columns is None:  # of tensors, or of leaves of TensorDicts
            _tensors()
            join_columns = _JOIN_OF_KIND[type(columns[0])]
        return join_columns(self, columns, path)

    def _like_model(
        self, column: HeldColumn, columns: Sequence[HeldColumn], i: int, path: str
    ) -> HeldColumn:
        """A column in the form of the model, if that can hold the same; an error otherwise."""
        model = columns[self.model_index]
        if column.family is model.family:
            return column
        if column.family is None or model.family is None:
            lacks_rows = column if column.family is None else model
            raise not_a_column(lacks_rows.value, f"{path} of batch {i}")
        made = model.column_from(column, path)
        if made is not None:
            return column_of(made)
        other = (columns[0] if i else model).value
        names = f"{type(other).__name__} and {type(column.value).__name__}"
        detail = f"expected one kind of column in all batches, found {names}; convert one of them"
        if any(each.objects() is not None for each in (column, column_of(other))):
            detail += _OBJECT_REMEDY
        raise ArgumentTypeError("bad_type", f"{path} of batch {i}", detail)

    def only_chooses(self, columns: Sequence[Any]) -> bool:
        """Whether rows are chosen from one column, so that nothing is joined."""
        return len(columns) == 1 and self.chosen is not None

    def check_extent(self, rows: int, cell: Sequence[int], itemsize: int, path: str) -> None:
        """Refuse a result whose sizes int64 cannot hold, before and after rows are chosen."""
        most = max(rows, 0 if self.chosen is None else len(self.chosen))
        check_extent((most, *cell), itemsize, path)

    # Objects

    def chosen_items(self, items: Iterable[Any]) -> list[Any]:
        """The items of the chosen rows."""
        all_items = list(items)
        return all_items if self.chosen is None else [all_items[i] for i in self.chosen]

    def join_lists(self, columns: Sequence[HeldColumn], path: str) -> list[Any]:
        """Lists of objects as one list."""
        # A subclass of list may report another length.
        lists = (list.copy(column.value) for column in columns)
        return self.chosen_items(itertools.chain.from_iterable(lists))

    def join_one_objects(self, columns: Sequence[HeldColumn], path: str) -> Any:
        """One object again if all batches have the same; else an array with an item per row."""
        first, *others = values = [column.value for column in columns]
        arrays = [value.items() for value in values]
        if all(array is not None for array in arrays):
            joined = make_column(self.join_arrays([*map(column_of, arrays)], path))
            return first._replace(data=joined, rows=len(joined))
        none_is_array = all(array is None for array in arrays)
        if none_is_array and all(self.same(first.data, other.data) for other in others):
            return first._replace(rows=self.total_rows(values, path))
        objects = itertools.chain.from_iterable(column.objects() or () for column in columns)
        return object_array(self.chosen_items(objects))

    def join_arrays(self, columns: Sequence[HeldColumn], path: str) -> Any:
        """Arrays as one array; or an `InPlace` of their chosen rows."""
        check_columns(columns, path)
        arrays = [column.value for column in columns]
        whole, only_chooses = arrays[0], self.only_chooses(arrays)
        if not only_chooses:
            # Arrays of texts may differ in length: the result has the longest.
            dtypes = [array.dtype for array in arrays]
            kinds = [each.kind if each.kind in "US" else each.newbyteorder("=") for each in dtypes]
            check_equal(kinds, "dtype", path, CONVERT_REMEDY)
            check_equal([array.shape[1:] for array in arrays], "row shape", path)
            models = arrays[self.model_index], *arrays
            whole = max(models, key=operator.attrgetter("dtype.itemsize"))
        self.check_extent(sum(map(len, arrays)), whole.shape[1:], whole.itemsize, path)
        if only_chooses:
            return whole[indexer(self.chosen)]
        if self.chosen is None:
            return np.concatenate(arrays, dtype=whole.dtype)
        return self._plan_rows_of_arrays(arrays, whole)

    def _plan_rows_of_arrays(self, arrays: Sequence[Any], like_array: Any) -> Any:
        """The chosen rows of several arrays."""
        dtype, inner, chosen = like_array.dtype, like_array.shape[1:], self.chosen
        plain = not dtype.hasobject and all(
            array.dtype == dtype and array.flags.c_contiguous and array.nbytes for array in arrays
        )
        if not plain or chosen is None:
            return np.concatenate(arrays, dtype=dtype)[indexer(chosen)]
        rows, ones = self.rows_as_cells(chosen)
        cell = like_array.itemsize * math.prod(inner)
        view = in_buffers(as_buffers(arrays), np.dtype(np.uint8), (cell,), rows * cell, ones)
        sizes = (len(rows), *inner)
        return InPlace(view, lambda cells: cells.view(dtype).reshape(sizes))

    # Cells

    def rows_as_cells(self, chosen: Chosen) -> tuple[IntArray, RowSplits]:
        """The numbers of the chosen rows, and their row splits if each row is one cell."""
        if self._cells is None:
            rows = np.arange(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
            self._cells = rows, RowSplits.from_lengths(np.ones(len(rows), np.int64))
        return self._cells

    # Views

    def check_joinable(self, views: Sequence[RaggedView], path: str) -> None:
        """Refuse views whose rows cannot be joined."""
        view = views[0]
        check_equal([each.dtype for each in views], "dtype", path, CONVERT_REMEDY)
        check_equal([each.device_name for each in views], "device", path)
        check_equal([each.ragged_dim for each in views], "ragged dim", path, _RAGGED_DIM_REMEDY)
        dim = view.ragged_dim
        inner = [(*each.shape[: dim - 1], *each.shape[dim:]) for each in views]
        check_equal(inner, "row shape", path, _RAGGED_DIM_REMEDY)
        total = sum(each.row_splits.total for each in views)
        check_extent((total, *inner[0]), view.dtype.itemsize, path)

    def concat(self, views: Sequence[RaggedView]) -> RaggedView:
        """The rows of views that `check_joinable` accepts, copied end to end."""
        if any(view.is_tensor for view in views):
            joined: RaggedView = _tensors().concat(views, self.pool)
            return joined
        dim, splits = views[0].ragged_dim, self.pool.joined([each.row_splits for each in views])
        values = np.concatenate([array_of_view(view) for view in views], axis=dim - 1)
        data = array_bytes(values)
        return RaggedView(data, views[0].dtype, values.shape, dim, None, splits)

    def chosen_splits(self, row_splits: RowSplits, view: RaggedView, path: str) -> RowSplits:
        """The row splits of the chosen rows of a view, or of views like it."""
        both = self._splits.get(id(row_splits))
        if both is None:
            lengths = row_splits.lengths[indexer(self.chosen)]
            total = total_of(lengths)
        else:
            total = both[1].total
        dim = view.ragged_dim
        check_extent((*view.shape[: dim - 1], total, *view.shape[dim:]), view.dtype.itemsize, path)
        if both is None:
            both = row_splits, self.pool.unique(RowSplits.from_lengths(lengths))
            self._splits[id(row_splits)] = both
        return both[1]

    def chosen_view(self, view: RaggedView, path: str) -> RaggedView:
        """The chosen rows of a view in place. A range that can be aliased becomes end to end."""
        row_splits, chosen = self.chosen_splits(view.row_splits, view, path), self.chosen
        memory: Any = view.memory
        if isinstance(chosen, range) and view.is_end_to_end and view.ragged_dim == 1:
            first = int(view.row_splits.offsets_array[chosen.start])
            if view.is_tensor and memory.is_contiguous():
                return end_to_end(memory[first : first + row_splits.total], row_splits)
        rows: Any = indexer(chosen)
        return view.choose(rows, row_splits)

    # Batches

    def join_batches(self, columns: Sequence[HeldBatch], path: str) -> Any:
        """Batches with the same columns: join each column, in the order of the first batch."""
        model, rows = columns[self.model_index], 0
        sizes = [each.inner_sizes(path) for each in columns]
        batches = [dict(column.items()) for column in columns]
        if not model.needs_leaf_form:
            check_equal(sizes, _INNER_SIZES, path)
            rows = self.total_rows([column.value for column in columns], path)
        names = require_same_names(enumerate(map(list, batches)), path)
        planned: dict[str, Any] = {}
        for name in names:
            leaves = [batch[name] for batch in batches]
            try:
                planned[name] = self.plan_join(leaves, f"{path}[{name!r}]")
            except (ArgumentError, ArgumentTypeError) as error:
                raise with_name_in_remedy(error, name) from error.__cause__
        return with_columns(model.value, make_columns(planned), rows)

    def total_rows(self, leaves: Sequence[Any], path: str) -> int:
        """How many rows the result has."""
        if self.chosen is not None:
            return len(self.chosen)
        rows = sum(row_count(leaf, "") or 0 for leaf in leaves)
        check_extent([rows], 1, path)
        return rows

    def require_same(self, values: Sequence[Any], expected: str, remedy: str, path: str) -> Any:
        """The value that all batches must have; an error if one has another."""
        for i, value in enumerate(values[1:], 1):
            if not self.same(values[0], value):
                detail = f"expected {expected} for all rows, as in batch 0, found another; {remedy}"
                raise ArgumentError("conflict", f"{path} of batch {i}", detail)
        return values[0]


Join: TypeAlias = Callable[[RowJoiner, Sequence[Any], str], Any]

_JOIN_OF_KIND: dict[type[HeldColumn], Join] = {
    DictBatch: RowJoiner.join_batches,
    Array: RowJoiner.join_arrays,
    ObjectList: RowJoiner.join_lists,
    OneObjectColumn: RowJoiner.join_one_objects,
}
"""How rows of each kind of column are joined and chosen."""


def add_joins(joins: Mapping[type[HeldColumn], Join]) -> None:
    """Join columns of more kinds."""
    _JOIN_OF_KIND.update(joins)


def _tensors() -> Any:
    """The module that joins columns of tensors: imported when there is one."""
    return module_with_torch("columns.join_tensors", "rows of tensors")


def make_column(planned: Any) -> Any:
    """The column that was planned. If its rows must be copied, they are copied for it alone."""
    return planned.make(gathered_cells([planned.view])[0]) if type(planned) is InPlace else planned


def make_columns(planned: dict[str, Any]) -> dict[str, Any]:
    """The columns that were planned. One call copies the rows of all that must be copied."""
    waiting = {name: made for name, made in planned.items() if type(made) is InPlace}
    if waiting:
        values = gathered_cells([made.view for made in waiting.values()])
        for (name, made), cells in zip(waiting.items(), values, strict=True):
            planned[name] = made.make(cells)
    return planned


def as_buffers(arrays: Iterable[Any]) -> list[Any]:
    """Contiguous arrays as flat bytes over their memory."""
    return [array.reshape(-1).view(np.uint8) for array in arrays]


def indexer(chosen: Any) -> Any:
    """Chosen rows as numpy and torch index with them."""
    return slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen


_INNER_SIZES = "batch dims after the first"

# What errors of a join advise.
PACK_REMEDY = "; pack per-token columns first: pack_jagged_fields(columns, lengths=...)"
_RAGGED_DIM_REMEDY = (
    "; if tokens are along dim 2 of the column, pass ragged_dims={...: 2} to encode_rows"
)
_OBJECT_REMEDY = (
    ", or pass dtypes={...: object} to encode_rows in every process, for Python objects"
)
CONVERT_REMEDY = "; convert the column, or pass its dtype to encode_rows in every process (dtypes=)"


def check_columns(columns: Sequence[HeldColumn], path: str) -> None:
    """Raise an error for a column that is a subclass of a tensor or of an array."""
    for i, column in enumerate(columns):
        column.check(f"{path} of batch {i}" if i else path)


def check_equal(found: Sequence[Any], what: str, path: str, remedy: str = "") -> None:
    """Raise an error for a batch that differs from batch 0; `found` has a value of each batch."""
    if found.count(found[0]) == len(found):
        return
    for i, value in enumerate(found):
        if value != found[0]:
            detail = f"expected {what} {found[0]} like batch 0, found {value}{remedy}"
            raise ArgumentError("bad_shape", f"{path} of batch {i}", detail)
