"""`to_rows`: a batch as one dict per row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import check_option, known_names, name_list
from jagcodec._compiling import untraced
from jagcodec._dependencies import has_torch, module_with_torch
from jagcodec.columns.batch import As, CellRows, OneObject, views_of
from jagcodec.columns.held import column_of
from jagcodec.errors import ArgumentTypeError
from jagcodec.memory.arrays import torch_name
from jagcodec.memory.extents import ListBudget, check_extent, lists_of
from jagcodec.memory.small_floats import numbers_of
from jagcodec.rows.column_arrays import ColumnArrays, arrays_of_view, rectangle_of_view
from jagcodec.rows.views import RaggedView
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.read.any_batch import AnyBatch, opened, row_count_of
from jagcodec.wire.read.wire_batch import WireBatch, open_memory

RowsAs = Literal["tensor", "array", "list"]
"""What the rows of tensors and arrays become in `to_rows`."""


@untraced
def to_rows(
    batch: AnyBatch, columns: Iterable[str] | None = None, as_: RowsAs = "tensor"
) -> list[dict[str, Any]]:
    """The rows of a batch, one mapping of names to values each.

    Example:
        >>> from jagcodec import encode_rows, to_rows
        >>> frames = encode_rows({"ids": [[5, 6], [7, 8, 9]], "reward": [0.0, 1.0]})
        >>> to_rows(frames, as_="list")
        [{'ids': [5, 6], 'reward': 0.0}, {'ids': [7, 8, 9], 'reward': 1.0}]

    Args:
        batch: As for `select_rows`; columns may be sparse, too.
        columns: None for all columns, or a list of names for these in this order.
        as_: What rows of tensors and of arrays of numbers become. ``"tensor"``: tensors, of a
            column of one dim 0-d ones; arrays where torch is not installed. ``"array"``: numpy
            arrays, with unsigned words of the same bits for a dtype that numpy lacks. ``"list"``:
            Python's numbers, in lists as deep as a row has dims. Rows of an array of times are
            those of the array in each form.

    Returns:
        A new list. Python objects are the objects of the batch; one that belongs to the whole batch
        is in every row. Rows of a batch within the batch, a tensorclass among them, are dicts.
        Tensors and arrays are views of the column, so a row that is kept keeps the column. Writing
        to a tensor writes to the batch; arrays are only to be read. Gradients flow through tensors.
        Two kinds of columns are copied once, all rows together: jagged ones with holes between the
        rows, and what `decode` copies of a message, such as read-only frames.

    Raises:
        ArgumentError: `as_` is unknown, `batch` has no batch dim, columns differ in their rows, or
            dims next to one of 0 would be more than 2^22 lists without numbers.
        ArgumentKeyError: A name is not that of a column.
        ArgumentTypeError: `batch` is not a batch, `columns` is not a list of names, or a column's
            dtype or layout has no rows of this form.
        WireFormatError: A message is malformed.
    """
    where = "to_rows"
    check_option(as_, get_args(RowsAs), f"{where}(as_)")
    names = None if columns is None else name_list(columns, f"{where}(columns)")
    source = opened(batch, where)
    rows = row_count_of(source, where)
    if names is not None:
        names = known_names(names, source.keys(), where)
        if not names:
            return [{} for _ in range(rows)]
        is_open = isinstance(source, WireBatch)
        source = source.select(names) if is_open else {name: source.get(name) for name in names}
    if as_ == "tensor" and has_torch():
        of_tensors = module_with_torch("train.to_tensor_rows", where)
        samples: list[dict[str, Any]] = of_tensors.rows_of_tensors(source, rows, where)
        return samples
    form = "array" if as_ == "tensor" else as_
    return rows_on_host(open_memory(source, where), form, where)


def rows_on_host(
    batch: WireBatch, form: str, path: str, budget: ListBudget | None = None
) -> list[dict[str, Any]]:
    """The rows of an open batch, as "array", "list" or "numbers".

    "numbers" are arrays in which small floats, such as bfloat16, are widened to numbers of numpy.
    """
    budget = budget or ListBudget(DEFAULT_LIMITS.objects)  # one for all columns
    columns = views_of(batch, As.HOST)
    if not columns:
        return [{} for _ in range(len(batch))]
    rows = len(batch)
    each = [_rows_of(columns[name], rows, form, f"{path}[{name!r}]", budget) for name in columns]
    return rows_of_each(columns, each)


def rows_of_each(names: Iterable[str], each: Iterable[list[Any]]) -> list[dict[str, Any]]:
    """One dict per row, given the rows of each column."""
    names = tuple(names)
    return [dict(zip(names, row, strict=True)) for row in zip(*each, strict=True)]


def _rows_of(column: Any, rows: int, form: str, path: str, budget: ListBudget) -> list[Any]:
    """The rows of a column that was read as `As.HOST`."""
    if isinstance(column, OneObject):
        items = column.items()
        if items is None:
            return [column.data] * column.rows
        column = items
    if isinstance(column, WireBatch):
        return rows_on_host(column, form, path, budget)
    if isinstance(column, np.ndarray):
        # In a list, times would become counts of nanoseconds.
        as_numbers = form == "list" and column.dtype.kind not in "mM"
        return (
            _lists_of(ColumnArrays(column, None, None), path, budget) if as_numbers else [*column]
        )
    if not isinstance(column, (RaggedView, CellRows)):
        return _rows_of_others(column, rows, form, path, budget)
    view = column.view if isinstance(column, CellRows) else column
    check_extent(view.values_shape, view.dtype.itemsize, path)
    arrays = rectangle_of_view(view) if isinstance(column, CellRows) else arrays_of_view(view)
    if form == "numbers":
        with suppress(TypeError):  # cells of some dtypes have no numbers
            arrays = arrays._replace(values=numbers_of(arrays.values, torch_name(view.dtype)))
    if form != "list":
        return arrays.unbind()
    arrays = arrays._replace(values=_numbers(arrays.values, view.dtype, path))
    return _lists_of(arrays, path, budget)


def _rows_of_others(column: Any, rows: int, form: str, path: str, budget: ListBudget) -> list[Any]:
    """The rows of a column of torch or tensordict whose cells are not on the host."""
    holder = column_of(column)
    other_fields = holder.other_fields()
    if other_fields is not None:  # the column is a tensorclass
        (fields,) = holder.inner_columns() or ()
        samples = rows_on_host(open_memory(fields, path), form, path, budget)
        return [{**row, **other_fields} for row in samples]
    if holder.is_batch:
        holder.check_batch(path)
    of_tensors = module_with_torch("train.to_tensor_rows", path)
    items: list[Any] = of_tensors.rows_of_others(
        column, rows, path, lambda cells, path: _rows_of(cells, 1, form, path, budget)[0]
    )
    return items


def _numbers(cells: npt.NDArray[Any], dtype: Any, path: str) -> npt.NDArray[Any]:
    """Cells as numbers of numpy; an error for a dtype that has none."""
    try:
        return numbers_of(cells, torch_name(dtype))
    except TypeError as error:
        detail = f"expected rows as_='list', found {dtype}; use as_='tensor' or 'array'"
        raise ArgumentTypeError("bad_dtype", path, detail) from error


def _lists_of(column: ColumnArrays, path: str, budget: ListBudget) -> list[Any]:
    """The rows of numbers as lists."""
    values = column.values
    lists = lists_of(values.shape)
    if column.row_splits is None or column.ragged_dim is None:
        lists -= len(values)  # the rows
    else:  # every row has its own lists for the dims before its tokens
        lists += (column.row_splits.size - 2) * lists_of((*values.shape[: column.ragged_dim], 1))
    budget.claim(lists, values.size, values.ndim, path)
    if column.row_splits is not None and not column.ragged_dim:  # one pass over all cells
        cells = column.values.tolist()
        return [cells[start:end] for start, end in itertools.pairwise(column.row_splits.tolist())]
    if column.row_splits is not None:
        return [row.tolist() for row in column.unbind()]
    rows: list[Any] = column.values.tolist()
    return rows
