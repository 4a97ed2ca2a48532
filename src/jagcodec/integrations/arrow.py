"""`to_arrow`: batches as Arrow tables, for pandas, polars and duckdb.

`_arrow_of_column` finds in `_MAKERS`, at the end, the function for a kind of column. Functions for
numbers come first, then functions for objects. The argument `pa` of all of them is pyarrow, which
`to_arrow` imports; `path` names the column in errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import FOREIGN_ERRORS
from jagcodec._compiling import untraced
from jagcodec.columns.held import Array, DictBatch, HeldColumn, ViewColumn, column_of
from jagcodec.columns.tensor_columns import Dense, Jagged, StridedNested
from jagcodec.errors import ArgumentError, brief, describe
from jagcodec.memory.arrays import IntArray
from jagcodec.memory.plain_types import TENSOR_TYPES, remedy_for
from jagcodec.memory.tensor_bytes import number_array
from jagcodec.rows.copy_rows import gathered
from jagcodec.rows.views import RaggedView
from jagcodec.train.json_text import json_text
from jagcodec.wire.limits import DEFAULT_LIMITS
from jagcodec.wire.read.any_batch import columns_with_views, opened, row_count_of

if TYPE_CHECKING:
    import pyarrow


_SURROGATE = re.compile("[\ud800-\udfff]")

_LEAVE_OUT_OR_CONVERT = (
    "leave the column out (--columns of the command, select in Python), or convert it"
)
_AS_JSON_LINES = f"try .jsonl, which escapes it, {_LEAVE_OUT_OR_CONVERT}"


@untraced
def to_arrow(batch: Any) -> pyarrow.Table:
    """The columns of a batch as an Arrow table, to read rollouts with other tools.

    Example:
        >>> from jagcodec import encode_rows
        >>> from jagcodec.integrations.arrow import to_arrow
        >>> frames = encode_rows([{"ids": [5, 6], "answer": "42"}, {"ids": [7], "answer": None}])
        >>> to_arrow(frames).to_pylist()
        [{'ids': [5, 6], 'answer': '42'}, {'ids': [7], 'answer': None}]

    Args:
        batch: A TensorDict, a dict of columns, a `BatchedDataDict`, a `WireBatch`, frames, or a
            blob.

    Returns:
        A table of N rows with the columns of the batch in their order, without its `meta`:

        * Jagged columns (ragged in dim 1 or 2) become lists.
        * Columns (N,) of numbers, bools, text, bytes or times keep their type.
        * Columns (N, ...) become fixed-size lists.
        * A batch within the batch becomes a struct.
        * bfloat16 and float8 become float32, which holds them exactly.
        * Rows of objects become text, binary, dates or times if all of them are, null if all are
          None, and otherwise Arrow's JSON (``arrow.json``). The page on the command line has the
          table.

        The cells of the table are copies, or the memory of rectangles; do not write to these while
        the table is in use.

    Raises:
        ArgumentError: Arrow does not have the dtype, the layout or the name of a column, text is
            not UTF-8, an object is not one that JSON has, or pyarrow 19 or newer is not installed.
            The column is named, and the row.
        ArgumentTypeError: `batch` is not a batch.
        WireFormatError: A message is malformed.
    """
    pa = _pyarrow()
    source = opened(batch, "to_arrow(batch)")
    rows = row_count_of(source, "to_arrow(batch)")
    columns = columns_with_views(source, "to_arrow(batch)")
    return pa.Table.from_struct_array(_arrow_of_columns(pa, columns, rows, ""))


def _pyarrow() -> Any:
    """The package; an error if it is missing or too old."""
    try:
        import pyarrow
    except ImportError as error:
        detail = "expected pyarrow, which is not installed; pip install 'pyarrow>=19'"
        raise ArgumentError("bad_option", "to_arrow", detail) from error
    if not hasattr(pyarrow, "json_"):
        detail = f"expected pyarrow 19 or newer, found {pyarrow.__version__}"
        raise ArgumentError("bad_option", "to_arrow", f"{detail}; pip install 'pyarrow>=19'")
    return pyarrow


def _arrow_of_columns(pa: Any, columns: dict[str, Any], rows: int, above: str) -> Any:
    """The columns of a batch as one array of structs, one for each row."""
    parts = {}
    for name, column in columns.items():
        path = f"{above}[{brief(name)}]" if above else f"column {brief(name)}"
        if _SURROGATE.search(name):
            detail = "expected a name that UTF-8 has, found a lone surrogate"
            raise ArgumentError("bad_type", path, f"{detail}; {_AS_JSON_LINES}")
        parts[name] = _arrow_of_column(pa, column, rows, path)
    if not parts:  # without parts, from_arrays does not know the number of rows
        return pa.array([{}] * rows, pa.struct([]))
    return pa.StructArray.from_arrays([*parts.values()], names=[*parts])


def _arrow_of_column(pa: Any, column: Any, rows: int, path: str) -> Any:
    """A column as an Arrow array with one item for each row."""
    holder = column_of(column)
    if isinstance(holder, DictBatch):
        return _arrow_of_columns(pa, column, rows, path)
    make = _MAKERS.get(type(holder))
    if make is None:
        raise _no_arrow_form(path, describe(column))
    try:
        return make(pa, column, path)
    except pa.ArrowException as error:
        raise _no_arrow_form(path, f"{describe(column)}: {error!s:.200}") from error


# --- numbers -----------------------------------------------------------------------------------


def _arrow_of_nested(pa: Any, column: torch.Tensor, path: str) -> Any:
    """Rows that may differ in several dims, as lists in lists."""
    dims = column.dim() - 1  # of a row
    rows = [_numbers_of_tensor(row, path) for row in column.unbind()]
    shapes = np.array([row.shape for row in rows], dtype=np.int64).reshape(len(rows), dims)
    # Without rows, an empty array gives the dtype.
    empty = _numbers_of_tensor(torch.empty(0, dtype=column.dtype), path)
    elements = np.concatenate([empty, *(row.reshape(-1) for row in rows)])
    array = _array_of_elements(pa, elements, path)
    for dim in reversed(range(dims)):
        array = _array_of_lists(pa, array, np.repeat(shapes[:, dim], shapes[:, :dim].prod(axis=1)))
    return array


def _arrow_of_dense(pa: Any, column: torch.Tensor, path: str) -> Any:
    """Rows of one shape, as elements or as fixed-size lists."""
    if type(column) not in TENSOR_TYPES:
        raise _no_arrow_form(path, describe(column))
    return _array_of_cells(pa, _numbers_of_tensor(column, path), path)


def _arrow_of_view(pa: Any, view: RaggedView, path: str) -> Any:
    """Rows of tokens; with ragged dim 2, rows of A lists of tokens each."""
    if view.ragged_dim == 2:
        lists, tokens = (view.shape[0] * n for n in (view.row_splits.rows, view.row_splits.total))
        if lists - tokens > DEFAULT_LIMITS.objects:  # most of them are empty
            raise _no_arrow_form(path, f"{lists} lists of {tokens} cells in all")
    # Copy, because the memory of a message may be read-only, or begin at any address.
    values = _numbers_of_tensor(gathered([view])[0], path)
    lengths = view.row_splits.lengths
    if view.ragged_dim == 1:
        return _array_of_lists(pa, _array_of_cells(pa, values, path), lengths)
    if view.ragged_dim > 2:
        raise _no_arrow_form(path, f"a ragged dim of {view.ragged_dim}")
    rows = np.split(values, view.row_splits.offsets_array[1:-1], axis=1)
    cells = np.concatenate([row.reshape(-1, *values.shape[2:]) for row in rows])
    inner = _array_of_lists(pa, _array_of_cells(pa, cells, path), np.repeat(lengths, len(values)))
    return pa.FixedSizeListArray.from_arrays(inner, len(values))


def _array_of_lists(pa: Any, array: Any, lengths: IntArray) -> Any:
    """Lists of these lengths, end to end in an array."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), array)


def _array_of_cells(pa: Any, cells: npt.NDArray[Any], path: str) -> Any:
    """Cells (M, ...) as M cells, or fixed-size lists."""
    inner = cells.shape[1:]
    if 0 in inner:
        raise _no_arrow_form(path, f"cells of shape {list(inner)}")
    array = _array_of_elements(pa, cells, path)
    for dim in reversed(inner):
        array = pa.FixedSizeListArray.from_arrays(array, dim)
    return array


def _array_of_elements(pa: Any, cells: npt.NDArray[Any], path: str) -> Any:
    """The elements of cells, end to end."""
    kind, dtype = cells.dtype.kind, cells.dtype.newbyteorder("=")
    if kind in "US":  # text or bytes
        arrow_type = pa.large_string() if kind == "U" else pa.large_binary()
        items_per_row = math.prod(cells.shape[1:])
        return _array_of_items(pa, cells.reshape(-1).tolist(), arrow_type, path, items_per_row)
    if not _is_arrow_dtype(dtype):
        raise _no_arrow_form(path, f"an array of dtype {dtype}")
    flat = np.ascontiguousarray(cells, dtype).reshape(-1)
    if dtype == "M8[D]":
        days = flat[~np.isnat(flat)].view(np.int64)
        if (days != days.astype(np.int32)).any():  # pyarrow would keep only 32 bits
            raise _no_arrow_form(path, f"dates that need more than 32 bits, in {dtype}")
    return pa.array(flat)


def _is_arrow_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether Arrow has the numbers or the times of a dtype."""
    if dtype.kind not in "mM":
        return dtype.kind in "biuf" and dtype.itemsize <= 8
    unit, count = np.datetime_data(dtype)  # pyarrow ignores the count
    return count == 1 and unit in ("s", "ms", "us", "ns", *("D" if dtype.kind == "M" else ""))


def _numbers_of_tensor(tensor: torch.Tensor, path: str) -> npt.NDArray[Any]:
    """The cells as an array of a dtype that Arrow has."""
    if remedy_for(tensor) or tensor.is_complex() or tensor.is_quantized:
        raise _no_arrow_form(path, f"{tensor.dtype} on {tensor.device.type}")
    try:
        return number_array(tensor)
    except (TypeError, RuntimeError) as error:
        raise _no_arrow_form(path, f"{tensor.dtype}") from error


# --- objects -----------------------------------------------------------------------------------


def _arrow_of_array(pa: Any, column: npt.NDArray[Any], path: str) -> Any:
    """The rows of a numpy array: objects, or cells of one dtype."""
    if column.dtype == object:
        return _arrow_of_objects(pa, list(column), path)
    return _array_of_cells(pa, column, path)


def _arrow_of_objects(pa: Any, rows: list[Any], path: str) -> Any:
    """Rows of Python objects."""
    arrow_type = _type_of_objects(pa, [row for row in rows if row is not None])
    if arrow_type is not None:
        return _array_of_items(pa, rows, arrow_type, path)
    texts = [
        None if row is None else json_text(row, f"{path}, row {i}", _LEAVE_OUT_OR_CONVERT)
        for i, row in enumerate(rows)
    ]
    storage = pa.array(texts, pa.large_string())
    return pa.ExtensionArray.from_storage(pa.json_(storage.type), storage)


def _type_of_objects(pa: Any, objects: list[Any]) -> Any:
    """The Arrow type that holds all of these objects, without None; None if only JSON does."""
    kinds = set(map(type, objects))
    if not kinds:
        return pa.null()  # joins any type that the column has in another table
    if all(issubclass(kind, str) for kind in kinds):
        return pa.large_string()
    if all(issubclass(kind, bytes) for kind in kinds):
        return pa.large_binary()
    # Compare types exactly: a pandas timestamp is a datetime, but counts nanoseconds.
    if kinds == {date}:
        return pa.date32()
    if kinds == {timedelta}:
        return pa.duration("us")
    if kinds == {datetime} and len({time.tzinfo is None for time in objects}) == 1:
        return pa.timestamp("us", None if objects[0].tzinfo is None else "UTC")
    return None


def _array_of_items(
    pa: Any, items: list[Any], arrow_type: Any, path: str, items_per_row: int = 1
) -> Any:
    """Items as an array of a type; an error names the row of the first item that does not fit."""
    try:
        return pa.array(items, arrow_type)
    except FOREIGN_ERRORS:
        for i, item in enumerate(items):
            try:
                pa.array([item], arrow_type)
            except FOREIGN_ERRORS as error:
                detail = f"expected rows that Arrow has as {arrow_type}, found {brief(item)}"
                remedy = _AS_JSON_LINES if isinstance(item, str) else _LEAVE_OUT_OR_CONVERT
                where = f"{path}, row {i // items_per_row}"
                raise ArgumentError("bad_type", where, f"{detail}: {error}; {remedy}") from error
        raise


_MAKERS: dict[type[HeldColumn], Callable[[Any, Any, str], Any]] = {
    ViewColumn: _arrow_of_view,
    Array: _arrow_of_array,
    StridedNested: _arrow_of_nested,
    Jagged: _arrow_of_nested,
    Dense: _arrow_of_dense,
}
"""For each kind of column that `columns_with_views` returns, the function that makes its array."""


def _no_arrow_form(path: str, found: str) -> ArgumentError:
    """The error for a column that Arrow cannot hold."""
    detail = f"expected a column that an Arrow table can hold, found {found}"
    return ArgumentError("bad_type", path, f"{detail}; {_LEAVE_OUT_OR_CONVERT}")
