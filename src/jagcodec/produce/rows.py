"""`pack_rows`, `encode_rows`: rows to a batch or a message, without a rectangle.

Both make their columns with `_checked_columns`. The parts after it are in the order of its calls:
what the options say of each column, and how one column is made. `RowBuilder` uses the functions
without an underscore.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from jagcodec._arguments import (
    check_known,
    check_options,
    mapping_of,
    name_set,
    named_columns,
    require_int,
)
from jagcodec._compiling import untraced
from jagcodec._dependencies import module_with_torch
from jagcodec.columns.batch import Columns, FieldSchema, sizes_fit
from jagcodec.errors import (
    ArgumentError,
    ArgumentTypeError,
    JagcodecError,
    brief,
)
from jagcodec.produce.cell_dtypes import STORED_DTYPES
from jagcodec.produce.cells import cells_of_rows, error_at_column
from jagcodec.produce.given_rows import (
    ANY_FIELD,
    check_same_lengths,
    collect_columns,
    ragged_dim_of,
    read_dtypes,
    rows_tensors,
)
from jagcodec.produce.row_kinds import OBJECT_TYPES, are_lists_of_equal_arrays
from jagcodec.produce.warnings import warn_of_objects
from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.frames import Frame, frames_of
from jagcodec.wire.items import RowCells
from jagcodec.wire.spec import MAX_NDIM
from jagcodec.wire.write.encoder import EncodeOptions, pending

if TYPE_CHECKING:
    from tensordict import TensorDict

_NO_NAMES: tuple[str, ...] = ()
"""The default of options that are names. Code asks for it by identity, not by length.

A caller may pass an iterator, which can only be read once.
"""


@untraced
def pack_rows(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    dtypes: Mapping[str, Any] | None = None,
    same_length: Iterable[str] = _NO_NAMES,
    rectangular: Iterable[str] = _NO_NAMES,
    ragged_dims: Mapping[str, int] | None = None,
) -> TensorDict:
    """Rows to a batch: one column per name, jagged where a row is a sequence.

    Example:
        >>> from jagcodec import pack_rows
        >>> samples = [{"ids": [5, 6], "tag": "x"}, {"ids": [7, 8, 9], "tag": "y"}]
        >>> td = pack_rows(samples)
        >>> td["ids"].values().tolist(), list(td["tag"])
        ([5, 6, 7, 8, 9], ['x', 'y'])

    Args:
        rows: A sequence of N mappings with the same names, one per sample; or a mapping of names
            to N rows each: a list, a tuple, an array, a tensor (N, ...), a `PackedColumn`, or a
            batch of N rows, which stays one and is aliased. A row is a list, tuple,
            `range` or `array` of numbers, or of lists of equal lengths of them, a numpy array, a
            tensor, a number, or any other Python value.
        dtypes: Name to the dtype of the column's cells (of torch, of numpy, or a name such as
            ``"bfloat16"``), to `object` for a column of Python objects, or to a `FieldSchema` of
            the `schema` of an earlier `WireBatch`. In other columns ints become int64, or float32
            if there are floats and every int stays exact; floats float32, rounded as torch rounds;
            bools bool. Arrays, tensors and numpy scalars keep their dtype, which Python's numbers
            next to them take. No order matters. A `FieldSchema` also says the shape of the rows,
            except for their tokens. A row may be a list of arrays of one shape, one per token, if
            `dtypes` names its dtype; otherwise it is an object, with a warning.
        same_length: Names of columns whose rows must be as long as each other, row by row.
        rectangular: Names of columns whose rows are equally long and become a tensor (N, S, ...).
            Other sequences are jagged, even if they are equally long.
        ragged_dims: Name to the dim of the column that is ragged, if that is not 1: for MRoPE
            position ids, rows (3, n), ``{"position_ids": 2}`` makes a column (N, 3, j). Not needed
            for a jagged column, nor where a `FieldSchema` in `dtypes` says it.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in the order of the first sample. One
        number per row makes a column (N,), sequences a jagged one, anything else one payload per
        row (`NonTensorStack`). Columns own their memory, one block each, and those with equal row
        lengths share one offsets tensor.

    Raises:
        ArgumentError: A number does not fit its cells (ints must fit exactly, finite floats must
            stay finite, a Python float next to float16 or bfloat16 must not change); rows differ in
            the shape of their cells, in length (`same_length`, `rectangular`), or columns in their
            number of rows; rows have another shape than their `FieldSchema`; or all rows of a
            column are empty, or the batch is, and `dtypes` does not name it. Column and row are
            named.
        ArgumentKeyError: A name in `dtypes`, `same_length`, `rectangular` or `ragged_dims` is not
            that of a column, or a sample does not have the names of the first.
        ArgumentTypeError: Rows or their numbers are of types that do not go together (a string, a
            bool or None among numbers, two dtypes, a dtype of integers and Python's floats), or a
            `NonTensorStack`; or `rows` or an argument is of another type.
    """
    where = "pack_rows"
    tensordict_of = module_with_torch("produce.tensordicts", where).tensordict_of
    columns = _checked_columns(
        rows, dtypes, same_length, rectangular, ragged_dims, where, for_tensordict=True
    )
    leaves = {
        name: rows_tensors().view_of_cells(column) if type(column) is RowCells else column
        for name, column in columns.columns.items()
    }
    batch: TensorDict = tensordict_of(Columns(columns.rows, leaves), where)
    return batch


@untraced
def encode_rows(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    dtypes: Mapping[str, Any] | None = None,
    same_length: Iterable[str] = _NO_NAMES,
    rectangular: Iterable[str] = _NO_NAMES,
    ragged_dims: Mapping[str, int] | None = None,
    **options: Unpack[EncodeOptions],
) -> list[Frame]:
    """Rows straight to a message: no tensor and no TensorDict in between.

    It needs neither torch nor tensordict, where no row and no column is a tensor or a batch.

    Example:
        >>> from jagcodec import decode, encode_rows, open_wire
        >>> rows = {"ids": [[5, 6], [7, 8, 9]], "reward": [0.0, 1.0]}
        >>> frames = encode_rows(rows, meta={"step": 3})
        >>> decode(frames)["ids"].values().tolist(), open_wire(frames).meta
        ([5, 6, 7, 8, 9], {'step': 3})

    The message is, byte for byte, that of ``encode(pack_rows(...), ...)``: `rows`, `dtypes`,
    `same_length`, `rectangular` and `ragged_dims` are as for `pack_rows`, `options` as for
    `encode`.

    Returns:
        Frames, as `encode` returns them. If there is one row, a frame aliases an array or a tensor
        of 16 KiB or more. Raises as `pack_rows` and `encode` do.
    """
    where = "encode_rows"
    if options:
        check_options(options, EncodeOptions.__annotations__, "encode_rows(options)")
    columns = _checked_columns(
        rows, dtypes, same_length, rectangular, ragged_dims, where, for_tensordict=False
    )
    return frames_of(pending(columns, **options))


_LISTS = frozenset((list, tuple))


class _ColumnOptions(NamedTuple):
    """What the options of a call say of one column."""

    schema: FieldSchema  # `ANY_FIELD` if `dtypes` does not name it
    ragged_dim: int
    is_rectangular: bool
    has_named_dim: bool  # whether `ragged_dims` names it


_NO_OPTIONS = _ColumnOptions(ANY_FIELD, 1, is_rectangular=False, has_named_dim=False)
"""The options of most columns. Code asks for it by identity, not by value.

A caller may pass options that equal these: they still name the column, so they count.
"""


def _checked_columns(
    rows: Any,
    dtypes: Any,
    same_length: Any,
    rectangular: Any,
    ragged_dims: Any,
    where: str,
    *,
    for_tensordict: bool,
) -> Columns:
    """Checked columns: `RowCells`, views of cells on a device, lists of objects, and batches.

    Without `for_tensordict` they are for a message: cells may alias their rows, and what writes the
    message refuses tensors that cannot be read.
    """
    count, rows_by_name, dims_of_rows = collect_columns(rows, dtypes, where)
    options_by_name: dict[str, _ColumnOptions] = {}
    has_options = dtypes is not None or ragged_dims is not None or rectangular is not _NO_NAMES
    if has_options or dims_of_rows:
        options_by_name = _read_options(
            rows_by_name, dims_of_rows, dtypes, rectangular, ragged_dims, where
        )
    lengths: dict[str, tuple[int, ...]] = {}  # of the rows of columns of sequences
    splits: dict[tuple[int, ...], RowSplits] = {}  # those of jagged columns, by their row lengths
    columns: dict[str, Any] = {}
    are_lists = count > 0 and _LISTS.issuperset(map(type, rows_by_name.values()))
    options = _NO_OPTIONS
    for name, rows_of_column in rows_by_name.items():
        if options_by_name:
            options = options_by_name.get(name, _NO_OPTIONS)
        try:
            if are_lists and options is _NO_OPTIONS:  # most columns
                column: Any = cells_of_rows(rows_of_column, copied=for_tensordict)
            else:
                column = _make_column(rows_of_column, options, count, copied=for_tensordict)
        except JagcodecError as error:
            raise error_at_column(error, f"{where}({name!r})", name) from None
        columns[name] = column
        if type(column) is RowCells:
            if column.lengths is not None:
                lengths[name] = column.lengths
                if not options.is_rectangular:
                    _make_jagged(column, options.ragged_dim, splits)
            if type(column.data) is not np.ndarray:
                columns[name] = rows_tensors().view_of_cells(column)
        elif type(column) is list and options.schema.kind != "object":
            _warn_of_equal_arrays(column, where, name)
            if for_tensordict:
                rows_tensors().check_tensors(column, f"{where}({name!r})")
    if same_length is not _NO_NAMES:
        check_same_lengths(same_length, lengths, columns, where)
    return Columns(count, columns)


def _make_jagged(cells: RowCells, ragged_dim: int, splits: dict[Any, RowSplits]) -> None:
    """Give cells their ragged dim, and the row splits that columns of equal row lengths share.

    `splits` has those of the columns before, by their row lengths.
    """
    lengths: Any = cells.lengths
    shared = splits.get(lengths)
    if shared is None:
        shared = splits[lengths] = RowSplits.from_counts(lengths)
    cells.splits, cells.ragged_dim = shared, ragged_dim


def _warn_of_equal_arrays(rows: Sequence[Any], where: str, name: str) -> None:
    """Warn of objects that could be cells."""
    if rows and type(rows[0]) not in OBJECT_TYPES and are_lists_of_equal_arrays(rows):
        warn_of_objects(f"{where}({name!r})", brief(name))


# --- what the options say of each column -------------------------------------------------------


def _read_options(
    columns: Mapping[str, Any],  # that the caller passes
    dims_of_rows: Mapping[str, int],  # the ragged dims of columns that are jagged tensors
    dtypes: Any,
    rectangular: Any,
    ragged_dims: Any,
    where: str,
) -> dict[str, _ColumnOptions]:
    """The options of each column that one of them names, or that is a jagged tensor."""
    schema = {} if dtypes is None else read_dtypes(dtypes, f"{where}(dtypes)")
    if schema:
        check_known(schema, columns, f"{where}(dtypes)")
    rectangles: Set[Any] = name_set(rectangular, f"{where}(rectangular)")
    if rectangles:
        check_known(rectangles, columns, f"{where}(rectangular)")
    rectangles |= {name for name, field in schema.items() if _is_rectangle(field)}
    dims_of_caller: dict[str, int] = {}
    if ragged_dims is not None:
        path = f"{where}(ragged_dims)"
        dims_of_caller = _read_dims(ragged_dims, columns, schema, rectangles, path)
    dims = _agreed_dims(dims_of_caller, dims_of_rows, schema, rectangles, where)
    return {
        name: _ColumnOptions(
            schema.get(name, ANY_FIELD),
            dims.get(name, 1),
            is_rectangular=name in rectangles,
            has_named_dim=name in dims_of_caller,
        )
        for name in {**schema, **dims, **dict.fromkeys(rectangles)}
    }


def _is_rectangle(field: FieldSchema) -> bool:
    """Whether a schema is of a tensor (N, S, ...)."""
    return field.kind == "tensor" and len(field.shape or ()) > 1


def read_ragged_dims(
    ragged_dims: Any, schema: Mapping[str, FieldSchema], where: str
) -> dict[str, int]:
    """The ragged dims by name, from `ragged_dims` and a schema, of columns yet to be made."""
    path = f"{where}(ragged_dims)"
    dims = named_columns({} if ragged_dims is None else ragged_dims, path, "dims")
    objects = {name for name, field in schema.items() if field.kind == "object"}
    dims_of_caller = _read_dims(dims, dims, schema, objects, path)
    return _agreed_dims(dims_of_caller, {}, schema, frozenset(), where)


def _read_dims(
    ragged_dims: Any,
    columns: Mapping[str, Any],
    schema: Mapping[str, FieldSchema],
    not_jagged: Set[str],
    path: str,
) -> dict[str, int]:
    """The dims that the argument `ragged_dims` names, after they are checked."""
    dims = mapping_of(ragged_dims, path, "a dict of names to dims")
    check_known(dims, columns, path)
    dims_of_caller = {}
    for name, dim in dims.items():
        place, expected = f"{path}[{brief(name)}]", f"a dim of the column, 1 to {MAX_NDIM}"
        dims_of_caller[name] = require_int(dim, 1, place, expected)
        if dims_of_caller[name] > MAX_NDIM:
            raise ArgumentError("bad_option", place, f"expected {expected}, found {brief(dim)}")
        if name in not_jagged or schema.get(name, ANY_FIELD).kind == "tensor":
            detail = "expected a jagged column, found one that rectangular= or dtypes= says is not"
            raise ArgumentError("conflict", place, detail)
    return dims_of_caller


def _agreed_dims(
    dims_of_caller: Mapping[str, int],
    dims_of_rows: Mapping[str, int],
    schema: Mapping[str, FieldSchema],
    rectangles: Set[str],
    where: str,
) -> dict[str, int]:
    """The ragged dims by name. The caller, the schema and jagged columns must agree on them."""
    dims = dict(dims_of_caller)
    others = [
        (name, ragged_dim_of(field), "dtypes=")
        for name, field in schema.items()
        if field.kind == "jagged"
    ]
    others += [(name, dim, "the rows") for name, dim in dims_of_rows.items()]
    for name, dim, whose in others:
        if name not in rectangles and dims.setdefault(name, dim) != dim:
            detail = f"expected one ragged dim, found {dims[name]} and {dim} (by {whose})"
            raise ArgumentError("conflict", f"{where}({name!r})", detail)
    return dims


# --- one column --------------------------------------------------------------------------------


def _make_column(column: Any, options: _ColumnOptions, count: int, *, copied: bool) -> Any:
    """The cells of a column or the list of its objects, by its options; a batch unchanged."""
    schema, dim = options.schema, options.ragged_dim
    may_be_batch = type(column) not in _LISTS and "tensordict" in sys.modules
    if may_be_batch and rows_tensors().is_nested_batch(column):
        if options is not _NO_OPTIONS:
            detail = (
                "expected rows of cells or objects, as an option names the column, found a batch"
            )
            raise ArgumentTypeError("bad_type", "", detail)
        return column
    if count:
        dtype = object if schema.kind == "object" else schema.dtype
        cells: Any = cells_of_rows(column, dtype, copied=copied, token_dim=dim - 1)
    else:
        cells = _column_without_rows(schema, dim)
    if options is _NO_OPTIONS:
        return cells
    if count and schema.shape is not None:
        check_row_shape(cells, schema.shape, dim)
    if type(cells) is RowCells and cells.lengths is not None:
        return _shape_tokens(cells, options)
    if options.has_named_dim:
        kind = "one number per row" if type(cells) is RowCells else "Python objects"
        detail = f"expected rows of cells, as ragged_dims= names the column, found {kind}"
        raise ArgumentTypeError("bad_type", "", detail)
    return cells


def _column_without_rows(schema: FieldSchema, dim: int) -> RowCells | list[Any]:
    """A column without rows, made as its `FieldSchema` describes it."""
    if schema.kind == "object":
        return []
    if schema.shape is None or schema.dtype is None:
        detail = "expected rows, found none; pass dtypes={...: a FieldSchema, or object}"
        raise ArgumentError("bad_shape", "", detail)
    if schema.kind == "jagged":
        shape, lengths = shape_without_cells(schema, dim), ()
    else:
        shape, lengths = shape_without_cells(schema, 0), None
    dtype: Any = schema.dtype
    return RowCells(np.empty(shape, STORED_DTYPES[dtype]), lengths, dtype)


def shape_without_cells(schema: FieldSchema, dim: int) -> tuple[int, ...]:
    """The shape of a column's cells if it has none along `dim`: its ragged dim, or 0 (rows)."""
    sizes = [0 if d == dim else size for d, size in enumerate(schema.shape or ())]
    if None in sizes:
        detail = (
            "expected the size of each dim but the ragged one, as no row shows it, "
            f"found {list(schema.shape or ())} in dtypes="
        )
        raise ArgumentError("bad_shape", "", detail)
    # The cells of jagged rows are end to end along `dim`, so they have no dim of rows, which is
    # the first. With `dim` 0, the rows themselves are that dim.
    return tuple(sizes[min(dim, 1) :])  # type: ignore[arg-type]


def check_row_shape(cells: Any, shape: Sequence[int | None], dim: int) -> None:
    """Refuse rows whose shape is not that of a `FieldSchema`; any number of tokens fits.

    `cells` is what `cells_of_rows` returned, and the tokens are the column's dim `dim`.
    """
    wanted = [None if d == dim else size for d, size in enumerate(shape) if d]
    expected = f"expected rows of shape {wanted}, as its FieldSchema says"
    if type(cells) is not RowCells:
        raise ArgumentError("bad_shape", "", f"{expected}, found Python objects")
    if cells.lengths is None:
        if wanted:
            raise ArgumentError("bad_shape", "", f"{expected}, found one number per row")
        return
    row_shape = [None if d == dim else size for d, size in enumerate(cells.dims, start=1)]
    if not sum(cells.lengths):  # lists without numbers do not show the shape of their cells
        wanted = wanted[: len(row_shape)]
    if not sizes_fit(wanted, row_shape):
        raise ArgumentError("bad_shape", "", f"{expected}, found {row_shape}")


def _shape_tokens(cells: RowCells, options: _ColumnOptions) -> RowCells:
    """The cells of rows of tokens in the shape that the options say."""
    values, lengths = cells.data, cells.lengths or ()
    schema, dim = options.schema, options.ragged_dim
    if not sum(lengths) and values.ndim < max(dim, len(schema.shape or ()) - 1):
        if schema.shape is None:
            detail = (
                f"expected a row that shows the dims before dim {dim}, found empty lists; "
                "pass dtypes={...: a FieldSchema}"
            )
            raise ArgumentError("bad_shape", "", detail)
        # Empty lists do not show the shape of their cells.
        values = values.reshape(shape_without_cells(schema, dim))
    if options.is_rectangular:
        width = lengths[0] if lengths else 0
        for i, length in enumerate(lengths):
            if length != width:
                detail = (
                    f"expected {width} items like row 0, as the column is rectangular, "
                    f"found {length}"
                )
                raise ArgumentError("bad_length", f", row {i}", detail)
        values = values.reshape(len(lengths), width, *values.shape[1:])
    return RowCells(values, cells.lengths, cells.dtype)
