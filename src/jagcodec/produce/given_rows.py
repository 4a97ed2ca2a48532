"""What a caller of `encode_rows` passes, checked: rows, `dtypes` and `same_length`.

`collect_columns` makes columns of rows, `read_dtypes` a `FieldSchema` of each dtype.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jagcodec._arguments import (
    check_array,
    items_of,
    known_names,
    mapping_of,
    named_columns,
)
from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import FieldSchema
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    brief,
    describe,
)
from jagcodec.memory.arrays import tensor_type
from jagcodec.produce.row_kinds import (
    OBJECT_ROW,
    has_length,
    kind_of_row,
)
from jagcodec.wire.dtypes import is_torch_dtype, name_of_dtype
from jagcodec.wire.spec import MAX_BYTES

_REMEDY = (
    "; put items of an iterator into a list, "
    "and values of the whole batch into meta= of encode_rows"
)


class GivenColumns(NamedTuple):
    """The rows that a caller passes, by column."""

    rows: int  # N
    columns: Mapping[str, Sequence[Any]]  # name to N rows; or to a batch of N rows
    dims_of_rows: Mapping[str, int]  # name to the ragged dim, of columns that are jagged tensors


def collect_columns(rows: Any, dtypes: Any, where: str) -> GivenColumns:
    """Samples, or rows that are given by column, as columns; `dtypes` names those of no rows."""
    if type(rows) is list:
        of_dicts = _columns_of_dicts(rows, f"{where}(rows), row 0")
        if of_dicts is not None:
            return GivenColumns(len(rows), of_dicts, {})
    if isinstance(rows, Mapping):
        return _read_columns(rows, where)
    if isinstance(rows, np.ndarray):
        check_array(rows, f"{where}(rows)")
    sized = isinstance(rows, Sequence) or (isinstance(rows, np.ndarray) and rows.ndim)
    if not sized or isinstance(rows, (str, bytes)):
        detail = (
            "expected a sequence of samples (mappings) or a mapping of names to rows, "
            f"found {describe(rows)}{_REMEDY}"
        )
        raise ArgumentTypeError("bad_type", f"{where}(rows)", detail)
    if not len(rows):
        names = mapping_of({} if dtypes is None else dtypes, f"{where}(dtypes)", _DTYPES)
        if not names:
            detail = "expected samples, found none; pass dtypes=open_wire(other).schema"
            raise ArgumentError("bad_shape", f"{where}(rows)", detail)
        return GivenColumns(0, dict.fromkeys(names, ()), {})
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            detail = f"expected a mapping of names to values, found {describe(row)}"
            raise ArgumentTypeError("bad_type", f"{where}(rows), row {i}", detail)
        if i == 0:
            named_columns(row, f"{where}(rows), row 0")
            first_names = row.keys()
        elif row.keys() != first_names:
            raise _other_names(rows[0], row, i, where)
    columns = {name: [row[name] for row in rows] for name in first_names}
    return GivenColumns(len(rows), columns, {})


def _other_names(
    first: Mapping[str, Any], row: Mapping[str, Any], i: int, where: str
) -> ArgumentKeyError:
    """The error for a sample that does not have the names of the first one."""
    name = min(first.keys() ^ row.keys(), key=brief)
    lacks = name in first
    sample = f"a sample {'without' if lacks else 'with'} {brief(name)}"
    value = (first if lacks else row)[name]
    empty = "None" if kind_of_row(value) == OBJECT_ROW else "a number of the same type"
    if has_length(value):
        empty = "[] for an empty row"
    remedy = f"pass it in every sample, in {'this one' if lacks else 'row 0'} as {empty}"
    detail = f"expected the names of row 0, found {sample}; {remedy}"
    return ArgumentKeyError("no_such_field", f"{where}({brief(name)}), row {i}", detail)


def _columns_of_dicts(rows: list[Any], path: str) -> dict[str, tuple[Any, ...]] | None:
    """The columns of rows that are all dicts with the same names in one order; None for others."""
    if set(map(type, rows)) != {dict}:
        return None
    names = named_columns(rows[0], path)
    if len(rows) == 1:  # five times as fast as below
        return {name: (value,) for name, value in names.items()}
    if set(map(tuple, rows)) != {tuple(names)}:
        return None
    try:
        return dict(zip(names, zip(*map(dict.values, rows), strict=True), strict=True))
    except (RuntimeError, ValueError):  # another thread changes a row
        return None


def _read_columns(rows: Mapping[Any, Any], where: str) -> GivenColumns:
    """`collect_columns` for rows that are given by column."""
    columns: dict[str, Any] = {}
    dims_of_rows: dict[str, int] = {}
    count = 0
    for name, column in named_columns(rows, f"{where}(rows)").items():
        path = f"{where}({name!r})"
        column_rows, dim = _rows_as_sequence(column, path)
        if dim is not None:
            dims_of_rows[name] = dim
        if columns and len(column_rows) != count:
            detail = f"expected {count} rows like {next(iter(columns))!r}, found {len(column_rows)}"
            raise ArgumentError("row_mismatch", path, detail)
        columns[name], count = column_rows, len(column_rows)
    return GivenColumns(count, columns, dims_of_rows)


def _rows_as_sequence(column: Any, path: str) -> tuple[Any, int | None]:
    """The rows of a column, and its ragged dim if it is jagged; a batch itself."""
    if type(column) is list or type(column) is tuple:
        return column, None
    if isinstance(column, np.ndarray):
        check_array(column, path)
        if column.ndim:
            return list(column), None
    elif isinstance(column, (dict, tensor_type())) or "tensordict" in sys.modules:
        both: Any = module_with_torch("produce.rows_tensors", path).rows_of_column(column, path)
        if both is not None:
            return both  # type: ignore[no-any-return]
    if isinstance(column, Sequence) and not isinstance(column, (str, bytes, bytearray)):
        return items_of(column, path, "a list"), None
    detail = f"expected a list, tuple, array or tensor of N rows, found {describe(column)}{_REMEDY}"
    raise ArgumentTypeError("bad_type", path, detail)


@functools.cache
def rows_tensors() -> Any:
    """The module for tensors and batches: imported when there is one, because it imports torch."""
    return module_with_torch("produce.rows_tensors", "encode_rows")


ANY_FIELD = FieldSchema("", None, None)
_DTYPES = "a dict of names to dtypes"


def read_dtypes(dtypes: Any, path: str) -> dict[str, FieldSchema]:
    """The `FieldSchema` of each column that `dtypes` names, with the name of its dtype.

    A bare dtype has an empty kind.
    """
    fields: dict[str, FieldSchema] = {}
    for name, dtype in mapping_of(dtypes, path, _DTYPES).items():
        if not isinstance(name, str):
            detail = f"expected names that are strings, found {brief(name)}"
            raise ArgumentTypeError("bad_type", path, detail)
        place = f"{path}[{brief(name)}]"
        if dtype is object:
            fields[name] = FieldSchema("object", None, None)
        elif isinstance(dtype, FieldSchema):
            fields[name] = dtype if dtype.kind == "object" else _checked_schema(dtype, place)
        else:
            fields[name] = FieldSchema("", _checked_dtype(dtype, place), None)
    return fields


def _checked_dtype(dtype: Any, path: str) -> Any:
    """The name of a dtype of cells; an error for anything else."""
    name = name_of_dtype(dtype)
    if name is None:
        expected, found = f"{_EXPECTED_DTYPE}, object or a FieldSchema", brief(dtype)
        if isinstance(dtype, np.dtype) or is_torch_dtype(dtype):
            expected, found = _EXPECTED_DTYPE, f"{dtype}; use another dtype"
        raise ArgumentTypeError("bad_type", path, f"expected {expected}, found {found}")
    return name


_EXPECTED_DTYPE = "a dtype whose cells can be encoded (torch.float32, 'float32')"


def _checked_schema(field: FieldSchema, path: str) -> FieldSchema:
    """A schema with the name of its dtype; an error if no column of rows can have it."""
    shape: Any = field.shape
    sizes = shape[1:] if isinstance(shape, tuple) and shape else (-1,)
    name: Any = None if field.dtype is None else name_of_dtype(field.dtype)
    if (
        not all(size is None or (type(size) is int and size >= 0) for size in sizes)
        or not (field.kind == "tensor" or (field.kind == "jagged" and None in sizes))
        or not (field.dtype is None or name is not None)
        or 16 * math.prod(size or 1 for size in sizes) >= MAX_BYTES
    ):
        dtype = str(field.dtype) if is_torch_dtype(field.dtype) else brief(field.dtype)
        detail = (
            "expected the schema of a column that rows can make (tensor or jagged, "
            f"{_EXPECTED_DTYPE}, and a shape), found {brief(field.kind)}, {dtype}, {brief(shape)}"
        )
        raise ArgumentError("bad_type", path, detail)
    return field._replace(dtype=name)


def ragged_dim_of(field: FieldSchema) -> int:
    """The ragged dim of a jagged column: the first after its rows that has no size."""
    shape = field.shape or ()
    return shape.index(None, 1)


def check_same_lengths(
    same_length: Any, lengths: Mapping[str, tuple[int, ...]], columns: Mapping[str, Any], where: str
) -> None:
    """Check that the rows of the named columns are as long as each other."""
    path = f"{where}(same_length)"
    named = known_names(same_length, columns, path)
    for name in named:
        if name not in lengths:
            rows = "Python objects" if isinstance(columns[name], list) else "one number per row"
            detail = f"expected columns of sequences, found {rows} in {name!r}"
            raise ArgumentTypeError("bad_type", path, detail)
        first, these = lengths[named[0]], lengths[name]
        if these != first:
            row = next(i for i, length in enumerate(first) if length != these[i])
            detail = f"expected length {first[row]} like {named[0]!r}, found {these[row]}"
            raise ArgumentError("bad_length", f"{where}({name!r}), row {row}", detail)
