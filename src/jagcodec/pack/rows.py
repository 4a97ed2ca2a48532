"""`pack_rows`, `encode_rows`: rows to a batch or a message, without a rectangle."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec._arguments import check_known, check_options, known_names, name_set, named_columns
from jagcodec.errors import (
    ArgumentError,
    ArgumentKeyError,
    ArgumentTypeError,
    JagcodecError,
    brief,
    describe,
)
from jagcodec.memory.tensor_bytes import plain_arrays
from jagcodec.pack.cells import RowCells, cells_of_rows, misfit
from jagcodec.pack.fields import tensordict_of
from jagcodec.ragged.nested import is_jagged
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire import documents
from jagcodec.wire.dtypes import NUMPY_NAMES, TORCH_NAMES
from jagcodec.wire.encoder import Columns, EncodeOptions, meta_document, pending
from jagcodec.wire.frames import Frame, frames_of
from jagcodec.wire.header import NO_VALUES, start_of
from jagcodec.wire.leaf import FieldSchema
from jagcodec.wire.lowered import Item
from jagcodec.wire.place import frames_of_items
from jagcodec.wire.spec import PLAIN, Code


def pack_rows(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    dtypes: Mapping[str, Any] | None = None,
    same_length: Iterable[str] = (),
    rectangular: Iterable[str] = (),
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
            to N rows each: a list, a tuple, an array or a tensor (N, ...). A row is a list, tuple,
            `range` or `array` of numbers, or of lists of equal lengths of them, a numpy array, a
            tensor, a number, or any other Python value.
        dtypes: Name to the dtype of the column's cells (`torch.dtype`), to `object` for a column
            of Python objects, or to a `FieldSchema` of the `schema` of an earlier `WireBatch`. In
            other columns ints become int64, or float32 if a float follows and every int stays
            exact; floats float32, rounded as torch rounds; bools bool. Arrays and tensors keep
            their dtype.
        same_length: Names of columns whose rows must be as long as each other, row by row.
        rectangular: Names of columns whose rows are equally long and become a tensor (N, S, ...).
            Other sequences are jagged, even if they are equally long.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in the order of the first sample. One
        number per row makes a column (N,), sequences a jagged one, anything else one payload per
        row (`NonTensorStack`). Columns own their memory, one block each, and those with equal row
        lengths share one offsets tensor.

    Raises:
        ArgumentError: A number does not fit its cells (ints must fit exactly, finite floats must
            stay finite); rows differ in the shape of their cells, in length (`same_length`,
            `rectangular`), or columns in their number of rows; or all rows of a column are empty,
            or the batch is, and `dtypes` does not name it. Column and row are named.
        ArgumentKeyError: A name in `dtypes`, `same_length` or `rectangular` is not that of a
            column, or a sample does not have the names of the first.
        ArgumentTypeError: A row is of another type than the first (a string, a bool or None among
            numbers), or a `NonTensorStack`; or `rows` or an argument is of another type.
    """
    where = "pack_rows"
    return tensordict_of(_columns(rows, dtypes, same_length, rectangular, where, own=True), where)


def encode_rows(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    dtypes: Mapping[str, Any] | None = None,
    same_length: Iterable[str] = (),
    rectangular: Iterable[str] = (),
    **options: Unpack[EncodeOptions],
) -> list[Frame]:
    """Rows straight to a message: no tensor and no TensorDict in between.

    Example:
        >>> from jagcodec import decode, encode_rows, open_wire
        >>> rows = {"ids": [[5, 6], [7, 8, 9]], "reward": [0.0, 1.0]}
        >>> frames = encode_rows(rows, meta={"step": 3})
        >>> decode(frames)["ids"].values().tolist(), open_wire(frames).meta
        ([5, 6, 7, 8, 9], {'step': 3})

    The message is, byte for byte, that of ``encode(pack_rows(...), ...)``: `rows`, `dtypes`,
    `same_length` and `rectangular` are as for `pack_rows`, `options` as for `encode`.

    Returns:
        Frames, as `encode` returns them. If there is one row, a frame aliases an array or a tensor
        of 16 KiB or more. Raises as `pack_rows` and `encode` do.
    """
    where = "encode_rows"
    plain = dtypes is None and same_length == rectangular == ()
    if plain and type(rows) is list and len(rows) == 1 and options.keys() <= _OF_META:
        frames = _frames_of_row(rows[0], where, options)
        if frames is not None:
            return frames
    check_options(options, EncodeOptions.__annotations__, "encode_rows(options)")
    columns = _columns(rows, dtypes, same_length, rectangular, where, own=False)
    return frames_of(pending(columns, **options))


# --- columns -----------------------------------------------------------------------------------


def _columns(
    rows: Any, dtypes: Any, same_length: Any, rectangular: Any, where: str, *, own: bool
) -> Columns:
    """Checked columns: arrays, tensors, `RaggedView`s, lists of N objects."""
    count, given = _by_name(rows, dtypes, where)
    schema = {} if dtypes is None else read_dtypes(dtypes, f"{where}(dtypes)")
    check_known(schema, given, f"{where}(dtypes)")
    named = name_set(rectangular, f"{where}(rectangular)")
    check_known(named, given, f"{where}(rectangular)")
    lengths: dict[str, tuple[int, ...]] = {}
    splits: dict[tuple[int, ...], RowSplits] = {}
    columns: dict[str, Any] = {}
    for name, column in given.items():
        field = schema.get(name, _ANY)
        path = f"{where}({name!r})"
        dtype = object if field.kind == "object" else field.dtype
        try:
            made = cells_of_rows(column, dtype, own=own) if count else _without_rows(field)
        except JagcodecError as error:
            raise misfit(error, path) from None
        if type(made) is RowCells and made.lengths is not None:
            lengths[name] = made.lengths
            columns[name] = _of_sequences(made, made.lengths, field, name in named, splits, path)
        else:
            columns[name] = made.values if type(made) is RowCells else made
    if same_length != ():
        _check_lengths(same_length, lengths, columns, where)
    return Columns(count, columns)


def _without_rows(field: FieldSchema) -> RowCells | list[Any]:
    if field.kind == "object":
        return []
    if field.shape is None:
        detail = "expected rows, found none; pass dtypes={...: a FieldSchema, or object}"
        raise ArgumentError("bad_shape", "", detail)
    ragged = field.kind == "jagged"
    shape: Any = (0, *field.shape[2 if ragged else 1 :])
    return RowCells(torch.empty(shape, dtype=field.dtype), () if ragged else None)


def _of_sequences(
    made: RowCells,
    lengths: tuple[int, ...],
    field: FieldSchema,
    rectangular: bool,
    splits: dict[tuple[int, ...], RowSplits],
    path: str,
) -> Any:
    """The column of rows of cells; columns of equal row lengths share one `RowSplits`."""
    values = made.values
    if field.shape is not None and not sum(lengths):
        values = values.reshape(0, *field.shape[2:])
    if rectangular or (field.kind == "tensor" and field.shape and len(field.shape) > 1):
        for i, length in enumerate(lengths):
            if length != lengths[0]:
                expected = f"expected {lengths[0]} items like row 0, since rectangular= names it"
                raise ArgumentError("bad_length", f"{path}, row {i}", f"{expected}, found {length}")
        return values.reshape(len(lengths), lengths[0], *values.shape[1:])
    if lengths not in splits:
        splits[lengths] = RowSplits.from_lengths(np.array(lengths, dtype=np.int64))
    return RaggedView(values, made.dtype, tuple(values.shape), 1, None, splits[lengths])


# --- one row -----------------------------------------------------------------------------------

# The option that leaves the columns of a message unchanged.
_OF_META = {"meta"}

# Python's numbers as cells, and the nodes of such columns.
_NUMBERS: dict[type, tuple[struct.Struct, tuple[Any, ...]]] = {
    bool: (struct.Struct("<?"), (Code.TENSOR, "bool", 1)),
    int: (struct.Struct("<q"), (Code.TENSOR, "int64", 1)),
    float: (struct.Struct("<f"), (Code.TENSOR, "float32", 1)),
}


def _frames_of_row(row: Any, where: str, options: EncodeOptions) -> list[Frame] | None:
    """The message of one row, without a walk; None if a value needs `_columns`."""
    if type(row) is not dict:
        return None
    named_columns(row, f"{where}(rows), row 0")
    items: list[int | Item] = [1]
    nodes: list[tuple[Any, ...]] = []
    arrays = plain_arrays(row.values())
    for (name, value), array in zip(row.items(), arrays, strict=True):
        kind = type(value)
        if kind is list or kind is tuple:
            try:
                made = cells_of_rows((value,), own=False)
            except JagcodecError as error:
                raise misfit(error, f"{where}({name!r})") from None
            value = made.values if type(made) is RowCells else None
        elif kind is torch.Tensor:
            value = array
        if type(value) is np.ndarray:
            dtype, shape = NUMPY_NAMES.get(value.dtype), value.shape
            if dtype is None or not shape or not value.flags.c_contiguous:
                return None
            items.append((value, PLAIN, (1, shape[0], shape[0], b""), shape))
            nodes.append((Code.JAGGED, dtype, len(shape), 1))
        elif kind is str:
            packed = memoryview(documents.packer().pack(value))
            size = len(packed)
            items.append((packed, PLAIN, (1, size, size, b""), (size,)))
            nodes.append((Code.NON_TENSOR_ROWS,))
        elif kind in _NUMBERS:
            pack, node = _NUMBERS[kind]
            try:
                items.append((memoryview(pack.pack(value)), PLAIN, None, (1,)))
            except (struct.error, OverflowError):
                return None  # an error follows
            nodes.append(node)
        else:
            return None
    start = start_of((Code.TENSORDICT, 1, tuple(row), *nodes))
    values, meta = NO_VALUES, options.get("meta")
    if meta is not None:
        values = documents.packer().pack([meta_document(meta, False, None)])
    return frames_of_items(start, items, values)


# --- arguments ---------------------------------------------------------------------------------

_IN_LIST = "; put items of an iterator into a list, and values of the whole batch into meta="


def _by_name(rows: Any, dtypes: Any, where: str) -> tuple[int, dict[str, Sequence[Any]]]:
    """N, and the N rows of each column."""
    if isinstance(rows, Mapping):
        columns = named_columns(rows, f"{where}(rows)")
        given = {name: _listed(column, f"{where}({name!r})") for name, column in columns.items()}
        first, count = next(((name, len(column)) for name, column in given.items()), ("", 0))
        for name, column in given.items():
            if len(column) != count:
                detail = f"expected {count} rows like {first!r}, found {len(column)}"
                raise ArgumentError("row_mismatch", f"{where}({name!r})", detail)
        return count, given
    if not isinstance(rows, (Sequence, np.ndarray)) or isinstance(rows, (str, bytes)):
        detail = "expected a sequence of samples (mappings) or a mapping of names to rows, found "
        raise ArgumentTypeError("bad_type", f"{where}(rows)", f"{detail}{describe(rows)}{_IN_LIST}")
    if not len(rows):
        if not dtypes or not isinstance(dtypes, Mapping):
            detail = "expected samples, found none; pass dtypes=open_wire(other).schema"
            raise ArgumentError("bad_shape", f"{where}(rows)", detail)
        return 0, dict.fromkeys(dtypes, ())
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            detail = f"expected a mapping of names to values, found {describe(row)}"
            raise ArgumentTypeError("bad_type", f"{where}(rows), row {i}", detail)
        if i == 0:
            named_columns(row, f"{where}(rows), row 0")
            names = row.keys()
        elif row.keys() != names:
            name = min(names ^ row.keys(), key=brief)
            detail = "expected the names of row 0, found a sample "
            detail += f"{'without' if name in names else 'with'} {brief(name)}"
            raise ArgumentKeyError("no_such_field", f"{where}({brief(name)}), row {i}", detail)
    return len(rows), {name: [row[name] for row in rows] for name in names}


def _listed(column: Any, path: str) -> Sequence[Any]:
    """The rows of a column."""
    if isinstance(column, (list, tuple)):
        return column
    if isinstance(column, torch.Tensor):
        strided = is_jagged(column) or (column.layout is torch.strided and not column.is_nested)
        if strided and column.dim():
            return list(column.detach().unbind())
    elif is_non_tensor(column) and column.batch_dims:
        return rows_of_leaf(column, column.batch_size[0])
    elif isinstance(column, np.ndarray):
        if column.ndim:
            return list(column)
    elif isinstance(column, Sequence) and not isinstance(column, (str, bytes, bytearray)):
        return list(column)
    detail = f"expected a list, tuple, array or tensor of N rows, found {describe(column)}"
    raise ArgumentTypeError("bad_type", path, detail + _IN_LIST)


_ANY = FieldSchema("", None, None)


def read_dtypes(dtypes: Any, path: str) -> dict[str, FieldSchema]:
    """What `dtypes` says about each column it names; of a bare dtype the kind is empty."""
    if not isinstance(dtypes, Mapping):
        detail = f"expected a dict of names to dtypes, found {describe(dtypes)}"
        raise ArgumentTypeError("bad_type", path, detail)
    fields: dict[str, FieldSchema] = {}
    for name, dtype in dtypes.items():
        if not isinstance(name, str):
            detail = f"expected names that are strings, found {brief(name)}"
            raise ArgumentTypeError("bad_type", path, detail)
        field = dtype
        if dtype is object:
            field = FieldSchema("object", None, None)
        elif isinstance(dtype, torch.dtype) and dtype in TORCH_NAMES:
            field = FieldSchema("", dtype, None)
        elif not isinstance(dtype, FieldSchema):
            detail = f"expected a torch dtype, object or a FieldSchema, found {dtype!r:.80}"
            raise ArgumentTypeError("bad_type", f"{path}[{brief(name)}]", detail)
        elif dtype.kind != "object":
            kind, shape = dtype.kind, dtype.shape
            if not shape or not (kind == "tensor" or (kind == "jagged" and shape[1] is None)):
                detail = f"expected the schema of a column that rows can make, found {kind!r}"
                raise ArgumentError("bad_type", f"{path}[{brief(name)}]", detail)
        fields[name] = field
    return fields


def _check_lengths(
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
        first, found = lengths[named[0]], lengths[name]
        if found != first:
            row = next(i for i, length in enumerate(first) if length != found[i])
            detail = f"expected length {first[row]} like {named[0]!r}, found {found[row]}"
            raise ArgumentError("bad_length", f"{where}({name!r}), row {row}", detail)
