"""`to_arrow`: batches as Arrow tables, for pandas, polars and duckdb."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from jagcodec.batch.columns import columns_with_views, opened, row_count_of
from jagcodec.columns.column import Array, DictBatch, HeldColumn, ViewColumn, column_of
from jagcodec.columns.of_tensors import Dense, Jagged, StridedNested
from jagcodec.errors import ArgumentError, brief, describe
from jagcodec.memory.plain_types import TENSOR_TYPES, remedy_for
from jagcodec.memory.tensor_bytes import number_array
from jagcodec.ragged.copy_rows import gathered
from jagcodec.ragged.views import RaggedView

if TYPE_CHECKING:
    import pyarrow


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
        A table of N rows with the columns of the batch in their order, without its `meta`. Jagged
        columns (ragged in dim 1 or 2) become lists, (N,) numbers and bools themselves, (N, ...)
        fixed-size lists, rows of `str` or None text, of `bytes` or None binary, rows of other
        objects text with each as JSON, and a batch within the batch a struct. bfloat16 and float8
        become float32, which holds them exactly. The cells of the table are copies, or the memory
        of rectangles; do not write to these while the table is in use.

    Raises:
        ArgumentError: Arrow does not have the dtype or layout of a column, an object is not one
            that JSON has, or pyarrow is not installed. The column is named.
        ArgumentTypeError: `batch` is not a batch.
        WireFormatError: A message is malformed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        detail = "expected pyarrow, which is not installed; pip install 'pyarrow>=15'"
        raise ArgumentError("bad_option", "to_arrow", detail) from error
    source = opened(batch, "to_arrow(batch)")
    rows = row_count_of(source, "to_arrow(batch)")
    columns = columns_with_views(source, "to_arrow(batch)")
    arrays = []
    for name, column in columns.items():
        path = f"column {brief(name)}"
        try:
            arrays.append(_arrow_array(pa, column, rows, path))
        except pa.ArrowException as error:
            raise _no_arrow_form(path, f"{describe(column)}: {error!s:.200}") from error
    return pa.Table.from_arrays(arrays, names=[*columns])


def _arrow_array(pa: Any, column: Any, rows: int, path: str) -> Any:
    holder = column_of(column)
    if isinstance(holder, DictBatch):
        return _arrow_struct(pa, column, rows, path)
    make = _ARROW_OF.get(type(holder))
    if make is None:
        raise _no_arrow_form(path, describe(column))
    return make(pa, column, path)


def _arrow_struct(pa: Any, columns: dict[str, Any], rows: int, path: str) -> Any:
    parts = {
        name: _arrow_array(pa, column, rows, f"{path}[{name!r}]")
        for name, column in columns.items()
    }
    if not parts:  # an array of no parts has no length
        return pa.array([{}] * rows, pa.struct([]))
    return pa.StructArray.from_arrays([*parts.values()], names=[*parts])


def _arrow_of_array(pa: Any, column: npt.NDArray[Any], path: str) -> Any:
    if column.dtype == object and column.ndim == 1:
        return _arrow_objects(pa, list(column), path)
    if column.dtype.kind not in "biuf":
        raise _no_arrow_form(path, describe(column))
    return _fixed(pa, column, column.shape[1:], path)


def _arrow_of_nested(pa: Any, column: torch.Tensor, path: str) -> Any:
    # Rows may differ in several dims: each is a value by itself.
    return pa.array([_arrow_numbers(row, path).tolist() for row in column.unbind()])


def _arrow_of_dense(pa: Any, column: torch.Tensor, path: str) -> Any:
    if type(column) not in TENSOR_TYPES:
        raise _no_arrow_form(path, describe(column))
    return _fixed(pa, _arrow_numbers(column, path), tuple(column.shape[1:]), path)


def _arrow_lists(pa: Any, view: RaggedView, path: str) -> Any:
    """Rows of tokens; with ragged dim 2, rows of A lists of tokens each."""
    # A copy: the memory of a message may be read-only, or begin at any address.
    values = _arrow_numbers(gathered([view])[0], path)
    offsets = pa.array(view.row_splits.offsets_array)
    inner = values.shape[view.ragged_dim :]
    if view.ragged_dim == 1:
        return pa.LargeListArray.from_arrays(offsets, _fixed(pa, values, inner, path))
    if view.ragged_dim > 2:
        raise _no_arrow_form(path, f"a ragged dim of {view.ragged_dim}")
    rows = np.split(values, view.row_splits.offsets_array[1:-1], axis=1)
    cells = np.concatenate([row.reshape(-1, *inner) for row in rows])
    ends = np.cumsum(np.repeat(view.row_splits.lengths, len(values)))
    offsets = pa.array(np.concatenate([[0], ends]))
    lists = pa.LargeListArray.from_arrays(offsets, _fixed(pa, cells, inner, path))
    return pa.FixedSizeListArray.from_arrays(lists, len(values))


def _fixed(pa: Any, cells: npt.NDArray[Any], inner: tuple[int, ...], path: str) -> Any:
    """Cells (M, *inner) as fixed-size lists."""
    if 0 in inner:
        raise _no_arrow_form(path, f"cells of shape {list(inner)}")
    array = pa.array(np.ascontiguousarray(cells).reshape(-1))
    for dim in reversed(inner):
        array = pa.FixedSizeListArray.from_arrays(array, dim)
    return array


def _arrow_numbers(tensor: torch.Tensor, path: str) -> npt.NDArray[Any]:
    """The cells as an array of a dtype that Arrow has."""
    if remedy_for(tensor) or tensor.is_complex() or tensor.is_quantized:
        raise _no_arrow_form(path, f"{tensor.dtype} on {tensor.device.type}")
    try:
        return number_array(tensor)
    except (TypeError, RuntimeError) as error:
        raise _no_arrow_form(path, f"{tensor.dtype}") from error


def _arrow_objects(pa: Any, items: list[Any], path: str) -> Any:
    kinds = {type(item) for item in items} - {type(None)}
    try:
        if kinds <= {bytes} and kinds:
            return pa.array(items, pa.large_binary())
        if kinds <= {str}:
            return pa.array(items, pa.large_string())
        return pa.array([None if x is None else json.dumps(x) for x in items], pa.large_string())
    except (TypeError, ValueError, RecursionError) as error:
        raise _no_arrow_form(
            path, f"objects that JSON does not have: {brief(str(error))}"
        ) from error


_ARROW_OF: dict[type[HeldColumn], Callable[[Any, Any, str], Any]] = {
    ViewColumn: _arrow_lists,
    Array: _arrow_of_array,
    StridedNested: _arrow_of_nested,
    Jagged: _arrow_of_nested,
    Dense: _arrow_of_dense,
}
"""What makes an Arrow array of each kind of column that `columns_with_views` returns."""


def _no_arrow_form(path: str, found: str) -> ArgumentError:
    expected = f"expected a column that an Arrow table can hold, found {found}"
    detail = f"{expected}; leave the column out, or convert it"
    return ArgumentError("bad_type", path, detail)
