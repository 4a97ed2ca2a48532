"""A dict of columns to a batch, or to a message: what a producer calls at its write site."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Unpack, overload

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from jagcodec._arguments import check_fields, check_known, check_rectangle, name_set
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, describe
from jagcodec.memory.buffers import Target
from jagcodec.memory.tensor_bytes import contiguous_bits, plain_arrays
from jagcodec.pack.fields import check_rows, leaves_of
from jagcodec.pack.strictness import (
    check_pads,
    differ_after_rows,
    is_rounded_up,
    look_behind_rows,
    stays_rectangular,
    warn_of_pads,
    warn_of_width,
)
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, read_rows, view_of
from jagcodec.ragged.non_tensor import batch_of, is_non_tensor, leaf_of_rows
from jagcodec.ragged.row_splits import Lengths, RowSplits, RowSplitsPool
from jagcodec.ragged.views import RaggedView, rows_of_rectangle
from jagcodec.wire.encoder import Columns, EncodeOptions, pending
from jagcodec.wire.frames import Frame, blob_size, frames_of, writable_bytes, write_blob


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None = None,
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
            packs nothing and takes N from the columns.
        token_aligned_fields: Names of the per-token columns, packed as by `pack_per_token_field`
            (with its fallback); every other one stays rectangular. Names that are not columns
            are ignored, so that one set of names serves every batch. None: each tensor is packed
            or not as `maybe_pack_jagged` guesses from its shape.
        strict: Refuse what is likely to be a mistake: a name in `token_aligned_fields` that is no
            column, a column of two dims or more named there that cannot be packed, and cells
            behind rows that are not all one constant, bit for bit, as they are not where the
            lengths of prompts or of responses are passed for both. False warns, as
            `JagcodecWarning`, once per line that calls: of such a column; if the first and the
            last cell after a row differ in the first packed column of integers on the CPU; and
            where nothing was packed by guess although a width is the longest row rounded up to a
            multiple of 8 to 128.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in their order and no device. Packed
        columns own their memory, one block that is freed with the last of them, and share one
        offsets tensor, so ``td["a"] * td["b"]`` works; so do jagged columns with the same row
        lengths. Rectangular columns are detached and alias contiguous input. Object arrays, and
        lists of strings, bytes, dicts and None, become one payload per row (`NonTensorStack`),
        aliased.

    Raises:
        ArgumentError: A column does not have N rows, `lengths` is not one-dimensional, or one of
            them is negative; or `strict` refuses a column.
        ArgumentKeyError: `strict` is set, and a name is not that of a column.
        ArgumentTypeError: A column is none of the above (it is named), or lengths are not
            integers.
    """
    where = "pack_jagged_fields"
    rows, columns = _columns(fields, lengths, token_aligned_fields, where, strict)
    pool = RowSplitsPool()
    leaves: list[tuple[str, Any]] = []
    for name, column in columns.items():
        if is_jagged(column):
            column = view_of(column, f"{where}({name!r})", pool)
        elif isinstance(column, (torch.Tensor, np.ndarray)):
            column = contiguous_bits(fields[name])
        leaves.append((name, column))
    return batch_of(leaves_of(leaves), rows)


@overload
def encode_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None = ...,
    out: None = ...,
    strict: bool = ...,
    **options: Unpack[EncodeOptions],
) -> list[Frame]: ...


@overload
def encode_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None = ...,
    out: Target,
    strict: bool = ...,
    **options: Unpack[EncodeOptions],
) -> int: ...


def encode_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None = None,
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
        lengths: As there.
        token_aligned_fields: As there.
        out: Memory to write the message to as one blob, as by `encode_into`; or a function that
            is called once with the bytes that it takes, and returns such memory.
        strict: As for `pack_jagged_fields`.
        options: As for `encode`: `narrow`, `elide`, `compress`, `checksum`,
            `allow_pickle`, `default` (of payloads), `meta`.

    Returns:
        Frames, as `encode` returns them; with `out` the bytes written to it. Rectangular columns
        are aliased by their frames; packed ones are gathered into one allocation, which is freed
        with the last of their frames, or straight into `out`.

    Raises:
        ArgumentError: As from `pack_jagged_fields`; or `out` is too small, or overlaps a column.
        ArgumentKeyError: As from `pack_jagged_fields`.
        ArgumentTypeError: As from `pack_jagged_fields`; or `out` is not a writable buffer.
        UnsupportedTypeError: As from `encode`.
    """
    columns = _columns(fields, lengths, token_aligned_fields, "encode_fields", strict)
    message = pending(columns, **options)
    if out is None:
        return frames_of(message)
    target = out(blob_size(message)) if callable(out) else out
    return write_blob(message, writable_bytes(target, "encode_fields(out)"))


def _columns(
    fields: Mapping[str, Any],
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None,
    where: str,
    strict: bool,
) -> Columns:
    """Checked columns: tensors, `RaggedView`s of the rectangles to be packed, lists of N objects.

    Nothing of them is read but the lengths, and cells after rows: of the first column of integers
    two per row, with `strict` all of every column.
    """
    check_fields(fields, f"{where}(fields)")
    row_splits = None if lengths is None else read_rows(lengths, f"{where}(lengths)")
    named = None
    if token_aligned_fields is not None:
        named = name_set(token_aligned_fields, f"{where}(token_aligned_fields)")
    rows = longest = None
    if row_splits is not None:
        rows, longest = row_splits.rows, row_splits.max
    if strict and named is not None:
        check_known(named, fields.keys(), f"{where}(token_aligned_fields)")
    columns: dict[str, Any] = {}
    rectangles: list[tuple[str, tuple[int, ...]]] = []  # that are not packed
    packed = False
    looked = False  # at the cells after rows
    shape: tuple[int, ...]
    arrays = plain_arrays(fields.values())
    for (name, column), array in zip(fields.items(), arrays, strict=True):
        if array is not None and array.ndim and len(array) == rows:
            shape = array.shape
        else:
            like = "one per length" if row_splits else "like the others"
            rows = check_rows(column, rows, like, f"{where}({name!r})")
            if array is None and not isinstance(column, torch.Tensor):
                columns[name] = column if is_non_tensor(column) else list(column)
                continue
            shape = () if is_jagged(column) else tuple(column.shape)
        if (
            row_splits is None
            or longest is None
            or len(shape) < 2
            or (named is not None and name not in named)
            # As `pack_per_token_field` for columns that are named, else as `maybe_pack_jagged`.
            or (shape[1] < longest if named is not None else shape[1] != longest)
        ):
            columns[name] = column if array is None else array
            if len(shape) > 1:
                rectangles.append((name, shape))
            continue
        packed = True
        if strict:
            check_pads(column, row_splits, f"{where}({name!r})")
        elif not looked and array is not None and array.dtype.kind in "iu":
            looked = True  # of one column is enough: lengths are common to all
            if differ_after_rows(array, row_splits):
                warn_of_pads(f"{where}({name!r})")
        if array is not None and array.flags.c_contiguous:
            cells = (shape[0] * shape[1], *shape[2:])
            columns[name] = RaggedView(array, column.dtype, cells, 1, shape[1], row_splits)
        else:
            columns[name] = rows_of_rectangle(column.detach(), row_splits, name, array)
    for name, shape in rectangles:
        if named is not None:
            if name in named:
                stays_rectangular(shape, row_splits, f"{where}({name!r})", strict)
        elif longest and not packed and is_rounded_up(shape[1], longest):
            warn_of_width(f"{where}({name!r})")
            break
    return Columns(rows or 0, columns)


def merge_columns(
    batch: TensorDictBase,
    columns: Mapping[str, Any],
    *,
    like: str | tuple[str, ...] | None = None,
    token_aligned_fields: Iterable[str] = (),
    replace: bool = False,
    strict: bool = False,
) -> TensorDict:
    """A batch with columns that a worker wrote back, each checked against the batch.

    Example:
        >>> import torch
        >>> from jagcodec import merge_columns, pack_jagged_fields, stack_or_nest
        >>> td = pack_jagged_fields(
        ...     {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}, lengths=torch.tensor([2, 3])
        ... )
        >>> values = stack_or_nest([torch.ones(2), torch.ones(3)])
        >>> merged = merge_columns(td, {"values": values, "reward": torch.tensor([0.5, 1.0])})
        >>> (td["ids"] * merged["values"]).values().tolist()
        [5.0, 6.0, 7.0, 8.0, 9.0]
        >>> padded = {"scores": torch.tensor([[1, 2, 0], [3, 4, 5]])}
        >>> merged = merge_columns(td, padded, token_aligned_fields=["scores"])
        >>> merged["scores"].values().tolist()
        [1, 2, 3, 4, 5]

    Args:
        batch: TensorDict of batch size (N,).
        columns: Name to column, as for `pack_jagged_fields`: jagged tensors of N rows, tensors
            (N, ...), object arrays (N,), lists of N strings, or payloads with N rows.
        like: Name of the batch's jagged column whose row lengths every jagged one of `columns`
            must have; a tuple of names for one in a nested TensorDict. None: those of any jagged
            column of the batch, nested ones included. In a batch without jagged columns only
            the number of rows can be checked.
        token_aligned_fields: Names of those of `columns` that have one value per token. A padded
            one (N, S, ...) of them is packed by the row lengths of the batch, which its rows
            begin with. Names that are not among `columns` are ignored.
        replace: Let columns take the place of those of the same name.
        strict: Refuse a name in `token_aligned_fields` that is not among `columns`, and a padded
            column of them whose cells behind rows are not all one constant, bit for bit. False
            warns, as `JagcodecWarning`, where the first and the last cell behind a row of integers
            differ.

    Returns:
        A new TensorDict with the batch's leaves (the same objects), names and device, then the
        new columns in their order. A jagged one has the offsets object of the batch's column
        that it was checked against, so that ``batch["a"] * merged["b"]`` works; where several
        have its row lengths, the first. Values are aliased where they are contiguous and on the
        batch's device, and gradients flow through them. Object arrays become one payload per row.

    Raises:
        ArgumentError: A column does not have N rows, its row lengths are not the batch's (the row
            is named), its name is taken, or `batch` does not have one batch dim. A padded column
            of `token_aligned_fields` is narrower than a row, or the batch's jagged columns differ
            in their row lengths and `like` does not say which to take.
        ArgumentKeyError: `like` is not a column of the batch; or `strict` is set, and a name is
            not among `columns`.
        ArgumentTypeError: A column is none of the above, `like` is not jagged, or an argument
            is of another type.
    """
    where = "merge_columns"
    if not isinstance(batch, TensorDictBase) or isinstance(batch, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type", f"{where}(batch)", f"expected a TensorDict, found {type(batch).__name__}"
        )
    if len(batch.batch_size) != 1:
        raise ArgumentError(
            "bad_shape",
            f"{where}(batch)",
            f"expected batch size (N,), found {tuple(batch.batch_size)}",
        )
    if isinstance(columns, LazyStackedTensorDict):
        raise ArgumentTypeError(
            "bad_type", f"{where}(columns)", "expected a dict of columns, found a lazy stack"
        )
    check_fields(columns, f"{where}(columns)")
    rows = batch.batch_size[0]
    pool = RowSplitsPool()
    known = _row_splits_of(batch, like, pool, where)
    per_token = name_set(token_aligned_fields, f"{where}(token_aligned_fields)")
    if strict:
        check_known(per_token, columns.keys(), f"{where}(token_aligned_fields)")
    leaves: dict[str, Any] = dict(batch.items())
    for name, column in columns.items():
        path = f"{where}({name!r})"
        if name in leaves and not replace:
            raise ArgumentError(
                "conflict",
                path,
                "expected a new name, found a column of it in the batch; pass replace=True",
            )
        check_rows(column, rows, "like the batch", path)
        if isinstance(column, (np.ndarray, list)):
            leaves[name] = leaf_of_rows(list(column))
        elif is_jagged(column):
            view = view_of(column, path, pool, detach=False)
            row_splits = pool.unique(view.row_splits)
            if known:
                _check_known(row_splits, known, path)
            values = values_of(view)
            if batch.device is not None:
                values = values.to(batch.device)
            leaves[name] = nested_tensor(values, row_splits, view.ragged_dim)
        elif name in per_token and isinstance(column, torch.Tensor) and column.dim() > 1:
            check_rectangle(column, path)
            row_splits = _the_one(known, path)
            view = rows_of_rectangle(column, row_splits, path)
            look_behind_rows(column, row_splits, path, strict)
            values = values_of(view)
            if batch.device is not None:
                values = values.to(batch.device)
            leaves[name] = nested_tensor(values, row_splits)
        else:
            leaves[name] = column
    names = batch.names if any(name is not None for name in batch.names) else None
    return TensorDict(leaves, batch_size=[rows], names=names, device=batch.device)


def _the_one(known: Mapping[str, RowSplits], path: str) -> RowSplits:
    """The rows by which a padded column is packed."""
    if len(known) == 1:
        return next(iter(known.values()))
    raise ArgumentError(
        "bad_length",
        path,
        "expected a batch whose jagged columns have the same row lengths, found "
        + (f"{len(known)} different ones; say which with like=" if known else "none in it"),
    )


def _row_splits_of(
    batch: TensorDictBase, like: str | tuple[str, ...] | None, pool: RowSplitsPool, where: str
) -> dict[str, RowSplits]:
    """The rows that written-back columns may have, by the name of a column that has them."""
    jagged = dict(_jagged_columns(batch, ()))
    if like is not None:
        key = (like,) if isinstance(like, str) else like
        if not isinstance(key, tuple) or key not in batch.keys(include_nested=True):
            raise ArgumentKeyError(
                "no_such_field",
                f"{where}(like)",
                f"expected a column of the batch, found {like!r}",
            )
        if key not in jagged:
            raise ArgumentTypeError(
                "bad_type",
                f"{where}(like)",
                f"expected a jagged column, found {describe(batch.get(key))} in {like!r}",
            )
        jagged = {key: jagged[key]}
    known: dict[str, RowSplits] = {}
    for key, column in jagged.items():
        name = ".".join(key)
        row_splits = pool.unique(view_of(column, f"{where}({name!r})", pool).row_splits)
        if not any(row_splits is other for other in known.values()):
            known[name] = row_splits
    return known


def _jagged_columns(
    batch: TensorDictBase, above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    leaf: Any
    for name, leaf in batch.items():
        if is_jagged(leaf):
            yield (*above, name), leaf
        elif isinstance(leaf, TensorDict):
            yield from _jagged_columns(leaf, (*above, name))


def _check_known(row_splits: RowSplits, known: Mapping[str, RowSplits], path: str) -> None:
    """Refuse rows that no column of the batch has, and name the first that differs."""
    if any(row_splits is other for other in known.values()):
        return
    name, expected = next(iter(known.items()))
    row = int(np.flatnonzero(row_splits.lengths != expected.lengths)[0])
    others = f", nor like any of {len(known) - 1} other lengths" if len(known) > 1 else ""
    raise ArgumentError(
        "bad_length",
        f"{path}, row {row}",
        f"expected {expected.lengths[row]} tokens like {name!r}, "
        f"found {row_splits.lengths[row]}{others}",
    )
