"""`to_rows`: a batch as one dict per row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import numpy.typing as npt
import torch

from jagcodec._arguments import check_option, known_names, name_list
from jagcodec.batch.columns import AnyBatch, columns_with_views, opened, row_count_of
from jagcodec.columns.column import (
    Array,
    Dense,
    DictBatch,
    HeldColumn,
    Jagged,
    Sparse,
    StridedNested,
    TensorClass,
    Unbatched,
    ViewColumn,
    column_of,
)
from jagcodec.errors import ArgumentTypeError
from jagcodec.memory.extents import check_extent
from jagcodec.memory.plain_types import check_memory, check_plain
from jagcodec.memory.tensor_bytes import array_tensor, lacks_kernel, number_array
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.non_tensor import fields_of, unbatched_parts
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.wire_batch import WireBatch

RowsAs = Literal["tensor", "list"]
"""What the rows of tensors and arrays become in `to_rows`."""


def to_rows(
    batch: AnyBatch, columns: Iterable[str] | None = None, as_: RowsAs = "tensor"
) -> list[dict[str, Any]]:
    """The rows of a batch, one mapping of names to values each.

    Example:
        >>> from jagcodec import pack_rows, to_rows
        >>> td = pack_rows({"ids": [[5, 6], [7, 8, 9]], "reward": [0.0, 1.0]})
        >>> to_rows(td, as_="list")
        [{'ids': [5, 6], 'reward': 0.0}, {'ids': [7, 8, 9], 'reward': 1.0}]

    Args:
        batch: As for `select_rows`; columns may be sparse, too.
        columns: None for all columns, or a list of names for these in this order.
        as_: What rows of tensors and of arrays of numbers become. ``"tensor"``: tensors, of a
            column of one dim 0-d ones. ``"list"``: Python's numbers, in lists as deep as a row has
            dims. Rows of an array of times are those of the array in both forms.

    Returns:
        A new list. Python objects are the objects of the batch; one that belongs to the whole batch
        is in every row. Rows of a batch within the batch, a tensorclass among them, are dicts.
        Tensors are views of the column, so a row that is kept keeps the column, and writing to one
        writes to the batch; gradients flow through them. Two kinds of columns are copied once, all
        rows together: jagged ones with holes between the rows, and what `decode` copies of a
        message, such as read-only frames.

    Raises:
        ArgumentError: `as_` is unknown, `batch` has no batch dim, or columns differ in their rows.
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
        is_open = isinstance(source, WireBatch)
        source = source.select(names) if is_open else {name: source.get(name) for name in names}
    return _RowMaker(as_).samples(columns_with_views(source, where, kept=True), rows, where)


class _RowMaker:
    """One call of `to_rows`."""

    def __init__(self, form: RowsAs) -> None:
        self._form = form
        # Row lengths in the form that torch needs, by the row splits.
        self._lengths: dict[RowSplits, list[int]] = {}

    def samples(self, columns: dict[str, Any], rows: int, path: str) -> list[dict[str, Any]]:
        """One dict per row."""
        if not columns:
            return [{} for _ in range(rows)]
        each = [
            self._rows_of_column(column, rows, f"{path}[{name!r}]")
            for name, column in columns.items()
        ]
        return [dict(zip(columns, row, strict=True)) for row in zip(*each, strict=True)]

    def _rows_of_column(self, column: Any, rows: int, path: str) -> list[Any]:
        holder = column_of(column)
        if isinstance(holder, DictBatch):
            return self.samples(column, rows, path)
        if isinstance(holder, Unbatched):
            return [self._row_of_tensor(unbatched_parts(column)[1], path)] * rows
        return _ROWS_OF[type(holder)](self, column, path)

    def _rows_of_tensorclass(self, column: Any, path: str) -> list[Any]:
        fields, others = fields_of(column)
        columns = columns_with_views(fields, path, kept=True)
        inner = self.samples(columns, row_count_of(fields, path), path)
        return [{**row, **others} for row in inner]

    def _rows_of_view(self, view: RaggedView, path: str) -> list[Any]:
        row_splits, dim = view.row_splits, view.ragged_dim - 1
        if not row_splits.rows:
            return []
        values = values_of(view)
        check_extent(values.shape, values.itemsize, path)
        if self._form == "tensor":
            if row_splits not in self._lengths:
                self._lengths[row_splits] = row_splits.lengths.tolist()
            return list(torch.split_with_sizes(values, self._lengths[row_splits], dim))
        array = self._readable_numbers(values, path)
        ends = itertools.pairwise(row_splits.offsets_array.tolist())
        if not dim:  # in one pass, and not row by row
            cells = array.tolist()
            return [cells[start:end] for start, end in ends]
        before = (slice(None),) * dim
        return [array[(*before, slice(start, end))].tolist() for start, end in ends]

    def _rows_of_tensor(self, column: torch.Tensor, path: str) -> list[Any]:
        if column.layout is torch.strided and not column.is_nested:
            check_extent(column.shape, column.itemsize, path)
        if self._form == "tensor":
            if column.layout in (torch.strided, torch.sparse_coo):
                return _unbound(column, path)
        elif column.is_nested:
            return [self._row_of_tensor(row, path) for row in column.unbind()]
        elif column.layout is torch.strided:
            return self._rows_of_array(self._readable_numbers(column, path), path)
        remedy = "use as_='tensor'" if column.layout is torch.sparse_coo else "leave it out"
        detail = f"expected a column that has rows as_={self._form!r}, found a {column.layout}; "
        raise ArgumentTypeError("bad_type", path, detail + remedy)

    def _rows_of_array(self, column: npt.NDArray[Any], path: str) -> list[Any]:
        if self._form == "list" and column.dtype.kind not in "mM":  # it would count nanoseconds
            rows: list[Any] = column.tolist()
            return rows
        if column.dtype.kind not in "biufc":
            return list(column)  # of strings, say, which are not tensors
        try:
            return list(array_tensor(column).unbind())
        except TypeError as error:  # a long double
            detail = f"expected a dtype that torch has, found {column.dtype}"
            raise ArgumentTypeError("bad_dtype", path, detail) from error

    def _row_of_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        """One tensor that is a row."""
        return tensor if self._form == "tensor" else self._readable_numbers(tensor, path).tolist()

    def _readable_numbers(self, tensor: torch.Tensor, path: str) -> npt.NDArray[Any]:
        """The cells of a strided tensor, as arrays of Python's numbers have them."""
        check_plain(tensor, path)
        try:
            return number_array(tensor)
        except (TypeError, RuntimeError) as error:
            detail = f"expected rows as_={self._form!r}, found {tensor.dtype}; use as_='tensor'"
            raise ArgumentTypeError("bad_dtype", path, detail) from error


_ROWS_OF: dict[type[HeldColumn], Callable[[_RowMaker, Any, str], list[Any]]] = {
    **dict.fromkeys((Dense, Sparse, StridedNested, Jagged), _RowMaker._rows_of_tensor),
    ViewColumn: _RowMaker._rows_of_view,
    Array: _RowMaker._rows_of_array,
    TensorClass: _RowMaker._rows_of_tensorclass,
}
"""The rows of each kind of column that `columns_with_views` returns."""


def _unbound(column: torch.Tensor, path: str) -> list[torch.Tensor]:
    """The rows of a tensor, as views of it."""
    check_memory(column, path)
    try:
        return list(column.unbind(0))  # a MemoryMappedTensor asks for the dim
    except RuntimeError as error:  # of sparse tensors of most dtypes
        if not lacks_kernel(error):
            raise
        detail = f"expected rows that torch can take apart, found {column.dtype}"
        remedy = f"; convert the column, or call .to_dense(), of a {column.layout}"
        raise ArgumentTypeError("bad_dtype", path, detail + remedy) from error
