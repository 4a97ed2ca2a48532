"""Rows as producers hold them, to a batch or a message: no rectangle and no pads in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack, overload

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec._arguments import check_fields, known_names, name_set
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, brief, describe
from jagcodec.memory.buffers import Target
from jagcodec.pack.fields import leaves_of
from jagcodec.pack.one_row import ordered_columns
from jagcodec.pack.row_columns import ANYTHING, RowColumns, Wanted
from jagcodec.ragged.nested import is_jagged
from jagcodec.ragged.non_tensor import batch_of, is_non_tensor, rows_of_leaf
from jagcodec.wire import documents
from jagcodec.wire.encoder import Columns, EncodeOptions, meta_document, pending
from jagcodec.wire.field_schema import FieldSchema
from jagcodec.wire.frames import Frame, blob_size, frames_of, writable_bytes, write_blob
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.place import frames_in_order


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
        >>> samples = [
        ...     {"ids": [5, 6], "reward": 0.0, "tag": "x"},
        ...     {"ids": [7, 8, 9], "reward": 1.0, "tag": "y"},
        ... ]
        >>> td = pack_rows(samples)
        >>> td["ids"].values().tolist(), td["reward"].tolist(), list(td["tag"])
        ([5, 6, 7, 8, 9], [0.0, 1.0], ['x', 'y'])

    Args:
        rows: A sequence of N mappings with the same names, one per sample; or a mapping of names
            to N rows each: lists, tuples, arrays or tensors (N, ...). Not generators or iterators.
            A row is a list, tuple or `array` of ints, floats or bools, a numpy array, a tensor, a
            number, or any other Python value. Lists of lists of equal lengths are rows of cells
            with as many dims.
        dtypes: Name to the dtype of the column's cells (`torch.dtype`), to `object` for a column
            of Python objects, or to a `FieldSchema`; so the `schema` of an earlier `WireBatch`
            does. It need not name every column. Of those that it does not name, the first number
            decides: ints become int64, floats float32, rounded as torch rounds; arrays and tensors
            keep their dtype, `array` is taken for a list.
        same_length: Names of columns whose rows must be as long as each other, row by row.
        rectangular: Names of columns whose rows are equally long and become a tensor (N, S, ...).
            Other sequences are jagged, even if they are equally long.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in the order of the first sample. One
        number per row makes a column (N,), sequences a jagged one; what is neither numbers nor
        sequences of them makes one payload per row (`NonTensorStack`). Columns own their memory,
        one block each, and those with equal row lengths share one offsets tensor.

    Raises:
        ArgumentError: A number does not fit its cells (ints must fit exactly, finite floats must
            stay finite), rows differ in the shape of their cells, in length (`same_length`,
            `rectangular`) or in their names, columns in their number of rows; or all rows of a
            column are empty, or there are none, and `dtypes` does not say of what. Column and row
            are named.
        ArgumentKeyError: A name in `dtypes`, `same_length` or `rectangular` is not that of a
            column, or a sample lacks a name that the first has, or has another.
        ArgumentTypeError: A row is of another type than the first (a float among ints, a string
            among numbers, a bool among either), or `rows` or an argument is of another type.
    """
    columns = _columns(rows, dtypes, same_length, rectangular, "pack_rows", own=True)
    leaves = [
        (name, torch.from_numpy(column) if type(column) is np.ndarray else column)
        for name, column in columns.columns.items()
    ]
    return batch_of(leaves_of(leaves), columns.rows)


@overload
def encode_rows(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    dtypes: Mapping[str, Any] | None = ...,
    same_length: Iterable[str] = ...,
    rectangular: Iterable[str] = ...,
    out: None = ...,
    **options: Unpack[EncodeOptions],
) -> list[Frame]: ...


@overload
def encode_rows(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    dtypes: Mapping[str, Any] | None = ...,
    same_length: Iterable[str] = ...,
    rectangular: Iterable[str] = ...,
    out: Target,
    **options: Unpack[EncodeOptions],
) -> int: ...


def encode_rows(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    dtypes: Mapping[str, Any] | None = None,
    same_length: Iterable[str] = (),
    rectangular: Iterable[str] = (),
    out: Target | None = None,
    **options: Unpack[EncodeOptions],
) -> list[Frame] | int:
    """Rows straight to a message: no tensor and no TensorDict in between.

    Example:
        >>> from jagcodec import decode, encode_rows, open_wire
        >>> rows = {"ids": [[5, 6], [7, 8, 9]], "reward": [0.0, 1.0]}
        >>> frames = encode_rows(rows, meta={"step": 3})
        >>> decode(frames)["ids"].values().tolist(), open_wire(frames).meta
        ([5, 6, 7, 8, 9], {'step': 3})

    The message is, byte for byte, that of ``encode(pack_rows(...), ...)`` with the same options.

    Args:
        rows: As for `pack_rows`.
        dtypes: As there.
        same_length: As there.
        rectangular: As there.
        out: Memory to write the message to as one blob, as by `encode_into`; or a function that
            is called once with the bytes that it takes, and returns such memory.
        options: As for `encode`: `narrow`, `elide`, `compress`, `checksum`,
            `allow_pickle`, `default` (of payloads), `meta`.

    Returns:
        Frames, as `encode` returns them; with `out` the bytes written to it. Of one row that is
        an array or a tensor of 16 KiB or more, the frame aliases it.

    Raises:
        ArgumentError: As from `pack_rows`; or `out` is too small, or overlaps a row.
        ArgumentKeyError: As from `pack_rows`.
        ArgumentTypeError: As from `pack_rows`; or `out` is not a writable buffer.
        UnsupportedTypeError: As from `encode`.
    """
    where = "encode_rows"
    plain = out is None and dtypes is None and same_length == rectangular == ()
    if plain and type(rows) is list and len(rows) == 1 and options.keys() <= _OF_META:
        row = rows[0]
        if type(row) is dict:
            check_fields(row, f"{where}(rows), row 0")
            simple = ordered_columns(row, where)
            if simple is not None:
                values, meta = NO_VALUES, options.get("meta")
                if meta is not None:
                    pickles = options.get("allow_pickle", False)
                    document = meta_document(meta, pickles, options.get("default"))
                    values = documents.packer().pack([document])
                return frames_in_order(simple[0], 1, simple[1], values)
    columns = _columns(rows, dtypes, same_length, rectangular, where, own=False)
    message = pending(columns, **options)
    if out is None:
        return frames_of(message)
    target = out(blob_size(message)) if callable(out) else out
    return write_blob(message, writable_bytes(target, "encode_rows(out)"))


# The options that leave the columns of a message as they are.
_OF_META = {"meta", "allow_pickle", "default"}


def _columns(
    rows: Any, dtypes: Any, same_length: Any, rectangular: Any, where: str, *, own: bool
) -> Columns:
    """Checked columns: arrays, tensors, `RaggedView`s, lists of N objects."""
    count, given = _by_name(rows, dtypes, where)
    wanted = _wanted(dtypes, rectangular, given, where)
    maker = RowColumns(where, own)
    columns: dict[str, Any] = {}
    for name, column in given.items():
        said = wanted.get(name, ANYTHING)
        columns[name] = maker.column(name, column, said) if count else maker.empty(name, said)
    if same_length != ():
        _check_lengths(same_length, maker.lengths, columns, where)
    return Columns(count, columns)


# --- arguments ---------------------------------------------------------------------------------


def _by_name(rows: Any, dtypes: Any, where: str) -> tuple[int, dict[str, Sequence[Any]]]:
    """N, and the N rows of each column."""
    if type(rows) is list:
        pass  # as most are
    elif isinstance(rows, Mapping):
        return _of_mapping(rows, where)
    elif not isinstance(rows, (Sequence, np.ndarray)) or isinstance(rows, (str, bytes)):
        raise ArgumentTypeError(
            "bad_type",
            f"{where}(rows)",
            "expected a sequence of samples (mappings) or a mapping of names to rows, found "
            f"{describe(rows)}; put what an iterator or a generator gives into a list",
        )
    if not len(rows):
        if not dtypes or not isinstance(dtypes, Mapping):
            raise ArgumentError(
                "bad_shape",
                f"{where}(rows)",
                "expected samples, found none, which have no names; say what the columns are with "
                "dtypes= (the schema of a WireBatch), or pass a mapping of names to rows",
            )
        return 0, dict.fromkeys(dtypes, ())
    first = rows[0]
    if type(first) is not dict or len(rows) > 1:
        _check_samples(rows, where)
    check_fields(first, f"{where}(rows), row 0")
    if len(rows) == 1:
        return 1, {name: (row,) for name, row in first.items()}
    names = list(first.keys())  # iterating over a TensorDict gives its rows
    return len(rows), {name: [row[name] for row in rows] for name in names}


def _check_samples(rows: Sequence[Any], where: str) -> None:
    """See that every sample is a mapping with the names of the first."""
    names: Any = None
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ArgumentTypeError(
                "bad_type",
                f"{where}(rows), row {i}",
                f"expected a mapping of names to values, found {describe(row)}",
            )
        if names is None:
            names = row.keys()
        elif row.keys() != names:
            known, found = set(names), set(row.keys())
            lacks = next((name for name in names if name not in found), None)
            name = lacks if lacks is not None else next(iter(found - known))
            raise ArgumentKeyError(
                "no_such_field",
                f"{where}({brief(name)}), row {i}",
                "expected the names of row 0, found a sample "
                + ("without" if lacks is not None else "with")
                + f" {brief(name)}",
            )


def _of_mapping(rows: Mapping[str, Any], where: str) -> tuple[int, dict[str, Sequence[Any]]]:
    check_fields(rows, f"{where}(rows)")
    count: int | None = None
    first = ""
    given: dict[str, Sequence[Any]] = {}
    for name, column in rows.items():
        if type(column) is not list:
            column = _listed(column, f"{where}({name!r})")
        if count is None:
            count, first = len(column), name
        elif len(column) != count:
            raise ArgumentError(
                "row_mismatch",
                f"{where}({name!r})",
                f"expected {count} rows like {first!r}, found {len(column)}",
            )
        given[name] = column
    return count or 0, given


def _listed(column: Any, path: str) -> Sequence[Any]:
    """The rows of a column."""
    if isinstance(column, tuple):
        return column
    if isinstance(column, (np.ndarray, torch.Tensor)):
        if isinstance(column, torch.Tensor):
            strided = is_jagged(column) or (column.layout is torch.strided and not column.is_nested)
            if strided and column.dim():
                return list(column.detach().unbind())
        elif column.ndim:
            return list(column)
    elif is_non_tensor(column) and column.batch_dims:
        return list(rows_of_leaf(column, column.batch_size[0]))
    elif isinstance(column, Sequence) and not isinstance(column, (str, bytes, bytearray)):
        return list(column)
    raise ArgumentTypeError(
        "bad_type",
        path,
        f"expected a list, tuple, array or tensor of N rows, found {describe(column)}; put what an "
        "iterator or a generator gives into a list",
    )


def _wanted(
    dtypes: Any, rectangular: Any, columns: Mapping[str, Any], where: str
) -> dict[str, Wanted]:
    """What the caller said of columns."""
    wanted: dict[str, Wanted] = {}
    if dtypes is not None:
        if not isinstance(dtypes, Mapping):
            raise ArgumentTypeError(
                "bad_type",
                f"{where}(dtypes)",
                f"expected a mapping of names to dtypes, found {describe(dtypes)}",
            )
        for name in known_names(dtypes, columns, f"{where}(dtypes)"):
            wanted[name] = _wanted_of(dtypes[name], f"{where}(dtypes)[{brief(name)}]")
    if rectangular != ():
        path = f"{where}(rectangular)"
        for name in known_names(sorted(name_set(rectangular, path), key=str), columns, path):
            wanted.setdefault(name, Wanted()).rectangular = True
    return wanted


def _wanted_of(said: Any, path: str) -> Wanted:
    if isinstance(said, torch.dtype) or said is object:
        return Wanted(said)
    if not isinstance(said, FieldSchema):
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected a torch.dtype, object or a FieldSchema, found {brief(said)}",
        )
    if said.kind == "object":
        return Wanted(object)
    if said.kind == "jagged" and said.shape is not None and said.shape[1] is None:
        cell: Any = said.shape[2:]
        return Wanted(said.dtype, cell_shape=cell, jagged=True)
    if said.kind == "tensor" and said.shape is not None:
        cell = said.shape[1:]
        return Wanted(said.dtype, rectangular=len(said.shape) > 1, cell_shape=cell)
    raise ArgumentError(
        "bad_type", path, f"expected the schema of a column that rows can make, found {said.kind!r}"
    )


def _check_lengths(
    same_length: Any,
    lengths: Mapping[str, tuple[int, ...]],
    columns: Mapping[str, Any],
    where: str,
) -> None:
    """See that the rows of the named columns are as long as each other."""
    path = f"{where}(same_length)"
    names = same_length if isinstance(same_length, (list, tuple)) else name_set(same_length, path)
    named = known_names([*dict.fromkeys(names)], columns, path)
    for name in named:
        if name not in lengths:
            column = columns[name]
            found = "Python objects" if isinstance(column, list) else "one number per row"
            raise ArgumentTypeError(
                "bad_type", path, f"expected columns of sequences, found {found} in {name!r}"
            )
        expected, found_lengths = lengths[named[0]], lengths[name]
        if found_lengths == expected:
            continue
        row = next(i for i, length in enumerate(expected) if length != found_lengths[i])
        raise ArgumentError(
            "bad_length",
            f"{where}({name!r}), row {row}",
            f"expected {expected[row]} items like {named[0]!r}, found {found_lengths[row]}",
        )
