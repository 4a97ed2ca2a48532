"""`pack_jagged_fields`, `encode_fields`: padded columns to a batch or a message."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Unpack, overload

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec._arguments import check_fields, check_known, check_options, check_rectangle, name_set
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.buffers import Target
from jagcodec.memory.tensor_bytes import contiguous_bits, plain_arrays
from jagcodec.pack.cells import described
from jagcodec.pack.checks import (
    check_pads,
    refused_rectangle,
    warn_of_leftovers,
    warn_of_rectangle,
)
from jagcodec.pack.mask import read_mask
from jagcodec.ragged.copy_rows import gathered, values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, read_rows, view_of
from jagcodec.ragged.non_tensor import batch_of, is_non_tensor, leaf_of_rows
from jagcodec.ragged.row_splits import LENGTH_DTYPES, Lengths, RowSplitsPool
from jagcodec.ragged.views import RaggedView, rows_of_rectangle
from jagcodec.wire.encoder import Columns, EncodeOptions, pending
from jagcodec.wire.frames import Frame, frames_of, write_to
from jagcodec.wire.place import frames_of_columns


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None = None,
    token_aligned_fields: Iterable[str] | None = None,
    mask: torch.Tensor | str | None = None,
    strict: bool = False,
) -> TensorDict:
    """Padded columns to a batch of jagged ones: the write site of a producer.

    Example:
        >>> import torch
        >>> from jagcodec import pack_jagged_fields
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "reward": torch.tensor([0.0, 1.0])},
        ...     lengths=torch.tensor([2, 3]),
        ...     token_aligned_fields=["ids"],
        ... )
        >>> td["ids"].values().tolist(), td["reward"].tolist()
        ([5, 6, 7, 8, 9], [0.0, 1.0])

    Args:
        fields: Name to column: tensors (N, ...), jagged tensors of N rows, object arrays (N,),
            lists of N strings, or payloads as a TensorDict holds them (`NonTensorStack`,
            `NonTensorData` of batch size (N,)). A TensorDict of such columns is also accepted.
        lengths: (N,) valid tokens per row: a tensor, an array, a list or a tuple; or a jagged
            tensor, whose row lengths count and whose offsets object the packed columns get. None
            without a `mask` packs nothing and reads N from the columns.
        token_aligned_fields: Names of the per-token columns, packed as by `pack_per_token_field`
            (with its fallback); every other one stays rectangular. Names that are not columns
            are ignored, so that one set of names serves every batch. None: each tensor is packed
            or not as `maybe_pack_jagged` guesses from its shape; with a `mask` each tensor is
            packed whose first two dims are those of the mask.
        mask: In place of `lengths`, for prompts padded on the left, or for holes: (N, S) booleans,
            or integers 0 and 1, or the name of the column that is the mask. Row i of a packed
            column is its cells where row i of the mask is True.
        strict: If True, raise an error for three likely mistakes:

            * a name in `token_aligned_fields` is not a column;
            * a named column with two or more dims cannot be packed;
            * the cells that are left out are not all one constant, bit for bit, in any of the
              packed columns of integers. This happens if you pass prompt or response lengths for
              columns that hold both.

            If False, warn (`JagcodecWarning`, once per calling line) when a named column cannot be
            packed, and when the first and the last cell after a row differ in the first packed
            column of integers on the CPU (not with a `mask`).

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in their order and no device. Packed
        columns own their memory, one block that is freed with the last of them, and share one
        offsets tensor, so ``td["a"] * td["b"]`` works; so do jagged columns with the same row
        lengths. Rectangular columns are detached and alias contiguous input. Object arrays, and
        lists of strings, bytes, dicts and None, become one payload per row (`NonTensorStack`),
        aliased.

    Raises:
        ArgumentError: A column does not have N rows, `lengths` is not one-dimensional, or one of
            them is negative; the mask is not (N, S) of 0 and 1, or `lengths` is given, too; or
            `strict` rejects a column.
        ArgumentKeyError: `mask` is not the name of a column; or `strict` is set, and a name is not
            that of a column.
        ArgumentTypeError: A column has another type (it is named), or lengths are not
            integers.
    """
    where = "pack_jagged_fields"
    return tensordict_of(
        _columns(fields, lengths, token_aligned_fields, mask, where, strict), where
    )


class _FieldOptions(EncodeOptions, total=False):
    lengths: Lengths | None
    token_aligned_fields: Iterable[str] | None
    mask: torch.Tensor | str | None
    strict: bool


@overload
def encode_fields(
    fields: Mapping[str, Any], *, out: None = ..., **options: Unpack[_FieldOptions]
) -> list[Frame]: ...


@overload
def encode_fields(
    fields: Mapping[str, Any], *, out: Target, **options: Unpack[_FieldOptions]
) -> int: ...


def encode_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None = None,
    token_aligned_fields: Iterable[str] | None = None,
    mask: torch.Tensor | str | None = None,
    out: Target | None = None,
    strict: bool = False,
    **options: Unpack[EncodeOptions],
) -> list[Frame] | int:
    """Padded columns straight to a message: no jagged tensor and no TensorDict in between.

    Example:
        >>> import torch
        >>> from jagcodec import decode, encode_fields
        >>> columns = {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}
        >>> frames = encode_fields(columns, lengths=torch.tensor([2, 3]))
        >>> decode(frames)["ids"].values().tolist()
        [5, 6, 7, 8, 9]

    The message is, byte for byte, that of ``encode(pack_jagged_fields(...))``.

    Args:
        fields: As for `pack_jagged_fields`.
        lengths: As for `pack_jagged_fields`.
        token_aligned_fields: As for `pack_jagged_fields`.
        mask: As for `pack_jagged_fields`. Rows with holes are copied before they are written.
        out: As for `encode`.
        strict: As for `pack_jagged_fields`.
        options: As for `encode`.

    Returns:
        Frames, as `encode` returns them; with `out` the bytes written to it. Rectangular columns
        are aliased by their frames; packed ones are gathered into frame 1 if they are below
        16 KiB, and into one allocation, which is freed with the last of their frames; or
        straight into `out`.

    Raises:
        ArgumentError: As from `pack_jagged_fields`; or `out` is too small, or overlaps a column.
        ArgumentKeyError: As from `pack_jagged_fields`.
        ArgumentTypeError: As from `pack_jagged_fields`; or `out` is not a writable buffer.
        UnsupportedTypeError: As from `encode`.
    """
    columns = _columns(fields, lengths, token_aligned_fields, mask, "encode_fields", strict)
    if out is None and not options:
        frames = frames_of_columns(columns)
        if frames is not None:
            return frames
    check_options(options, EncodeOptions.__annotations__, "encode_fields(options)")
    message = pending(columns, **options)
    return frames_of(message) if out is None else write_to(message, out, "encode_fields(out)")


def _columns(
    fields: Mapping[str, Any],
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None,
    mask: Any,
    where: str,
    strict: bool,
) -> Columns:
    """Checked columns: tensors, arrays over them, `RaggedView`s of packed rows, lists of objects.

    Nothing of them is read but the lengths or the mask, and cells after rows: two per row of the
    first column of integers, with `strict` all of every column of integers.
    """
    check_fields(fields, f"{where}(fields)")
    row_splits = None if lengths is None else read_rows(lengths, f"{where}(lengths)")
    masked = None
    if mask is not None:
        if row_splits is not None:
            detail = "expected lengths or a mask, found both; pass one"
            raise ArgumentError("conflict", f"{where}(mask)", detail)
        masked = read_mask(mask, fields, where)
        row_splits = masked.row_splits
    named = None
    if token_aligned_fields is not None:
        named = name_set(token_aligned_fields, f"{where}(token_aligned_fields)")
        if strict:
            check_known(named, fields.keys(), f"{where}(token_aligned_fields)")
    rows = None if row_splits is None else row_splits.rows
    # Widths that are packed: as `pack_per_token_field` for columns that are named, else as
    # `maybe_pack_jagged`.
    least = most = 0
    if masked is not None:
        least = most = masked.valid.shape[1]
    elif row_splits is not None:
        least, most = row_splits.max, row_splits.max if named is None else sys.maxsize
    columns: dict[str, Any] = {}
    stay: list[str] = []  # rectangles that were named, and are not packed
    integers: list[tuple[str, torch.Tensor]] = []  # whose cells after rows `strict` compares
    looked = masked is not None  # at cells after rows
    arrays = plain_arrays(fields.values())
    for (name, column), array in zip(fields.items(), arrays, strict=True):
        shape: tuple[int, ...] = () if array is None else array.shape
        if not shape or shape[0] != rows:
            rows = _check_rows(column, rows, f"{where}({name!r})")
            if not isinstance(column, torch.Tensor):
                columns[name] = column if is_non_tensor(column) else list(column)
                continue
            shape = () if is_jagged(column) else tuple(column.shape)
        if (
            row_splits is None
            or len(shape) < 2
            or (named is not None and name not in named)
            or not least <= shape[1] <= most
        ):
            columns[name] = column if array is None else array
            if named is not None and name in named and len(shape) > 1:
                stay.append(name)
            continue
        if strict:
            if column.dtype in LENGTH_DTYPES:
                integers.append((f"{where}({name!r})", column))
        elif not looked and array is not None and array.dtype.kind in "iu":
            warn_of_leftovers(array, row_splits, f"{where}({name!r})")
            looked = True
        rectangle = column.detach() if array is None else column
        view = rows_of_rectangle(rectangle, row_splits, where, array)
        columns[name] = view if masked is None else masked.rows(view)
    if integers and row_splits is not None:
        valid = np.arange(row_splits.max) < row_splits.lengths[:, None]
        check_pads(integers, valid if masked is None else masked.valid)
    for name in stay:
        path = f"{where}({name!r})"
        if strict:
            width = str(least) if least == most else f"{least} or more"
            found = tuple(fields[name].shape)
            raise refused_rectangle(found, None if row_splits is None else (rows, width), path)
        if row_splits is not None:
            warn_of_rectangle(path)
    return Columns(rows or 0, columns)


def _check_rows(column: Any, rows: int | None, path: str) -> int:
    """The number of rows of a column, if it can be one, and has as many as the others."""
    found = _row_count(column, path)
    if rows is not None and found != rows:
        expected = f"expected {rows} rows, as the lengths or the other columns have"
        raise ArgumentError("row_mismatch", path, f"{expected}, found {found}")
    return found


_OBJECTS = frozenset((str, bytes, dict, type(None)))
"""A list of these holds one object per row: none of them can be cells."""


def _row_count(column: Any, path: str) -> int:
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        return len(column)
    if type(column) is list and all(type(row) in _OBJECTS for row in column):
        return len(column)
    if is_non_tensor(column) and column.batch_dims:
        return int(column.batch_size[0])
    if isinstance(column, torch.Tensor):
        if not is_jagged(column):
            check_rectangle(column, path)
        if column.dim() == 0:
            raise ArgumentError("bad_shape", path, "expected (N, ...), found a 0-d tensor")
        return int(column.shape[0])
    found = f"{described(column)}{' without batch dims' if is_non_tensor(column) else ''}"
    detail = "expected a tensor, an (N,) object array, a list of N strings, bytes, dicts and None, "
    detail += f"or payloads as a TensorDict holds them, found {found}; use torch.from_numpy for an "
    detail += "array of numbers, stack_or_nest for a list of tensors, and for anything else an "
    detail += "(N,) array: column = numpy.empty(N, dtype=object); column[i] = row i"
    raise ArgumentTypeError("bad_type", path, detail)


def tensordict_of(columns: Columns, where: str) -> TensorDict:
    """Checked columns as a TensorDict, whose columns of equal rows share one offsets tensor.

    Rows that are apart are copied, all of them into one block; other cells are aliased.
    """
    pool = RowSplitsPool()
    leaves = {
        name: view_of(column, f"{where}({name!r})", pool) if is_jagged(column) else column
        for name, column in columns.columns.items()
    }
    apart = {
        name: leaf
        for name, leaf in leaves.items()
        if isinstance(leaf, RaggedView) and leaf.starts is not None
    }
    copied = dict(zip(apart, gathered(apart.values()), strict=True))
    for name, leaf in leaves.items():
        if isinstance(leaf, RaggedView):
            values = copied[name] if name in copied else values_of(leaf)
            leaves[name] = nested_tensor(values, pool.unique(leaf.row_splits), leaf.ragged_dim)
        elif isinstance(leaf, list):
            leaves[name] = leaf_of_rows(leaf)
        elif isinstance(leaf, (torch.Tensor, np.ndarray)):
            leaves[name] = contiguous_bits(torch.as_tensor(leaf))
    return batch_of(leaves, columns.rows)
