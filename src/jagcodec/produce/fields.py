"""`pack_jagged_fields`, `encode_fields`: padded columns to a batch or a message.

Both read their columns with `_checked_columns`. A `_JaggedRule` says which of them become jagged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Unpack, overload

import numpy as np
import torch
from tensordict import TensorDict

from jagcodec._arguments import (
    check_known,
    check_options,
    name_set,
    named_columns,
    require_flag,
)
from jagcodec._compiling import untraced
from jagcodec.columns.batch import Columns
from jagcodec.columns.held import Array, ObjectList, Open, column_of, row_count
from jagcodec.columns.tensor_columns import Dense, Packed, Payloads, Sparse, Unbatched
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.buffers import Target
from jagcodec.memory.plain_types import check_plain, check_rectangle
from jagcodec.memory.tensor_bytes import plain_arrays
from jagcodec.produce.masks import Mask, read_mask
from jagcodec.produce.pads import check_constant_pads, first_unpadded
from jagcodec.produce.row_kinds import are_objects, described
from jagcodec.produce.tensordicts import leaf_of_column, tensordict_of
from jagcodec.produce.warnings import (
    FEW_CELLS,
    MISSING_CELL,
    warn_of_leftovers,
    warn_of_missing_cells,
    warn_of_rectangle,
    warn_of_width,
)
from jagcodec.rows.lengths import Lengths, read_row_lengths
from jagcodec.rows.non_tensor import (
    payloads_of_rows,
)
from jagcodec.rows.of_tensors import rows_of_rectangle
from jagcodec.rows.row_splits import RowSplits
from jagcodec.wire.frames import Frame, frames_of, write_to
from jagcodec.wire.write.encoder import EncodeOptions, pending


@untraced
def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None = None,
    token_aligned_fields: Iterable[str] | None = None,
    mask: torch.Tensor | str | None = None,
    strict: bool = False,
) -> TensorDict:
    """Pack padded columns into a batch of jagged ones, where a producer writes it.

    Example:
        >>> import torch
        >>> from jagcodec import pack_jagged_fields
        >>> columns = {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "reward": torch.ones(2)}
        >>> td = pack_jagged_fields(columns, lengths=[2, 3], token_aligned_fields=["ids"])
        >>> td["ids"].values().tolist(), td["reward"].tolist()
        ([5, 6, 7, 8, 9], [1.0, 1.0])

    Args:
        fields: A dict or a TensorDict of columns: tensors (N, ...), jagged tensors, arrays, lists
            of objects that cannot be cells (strings, dicts, None, arrays next to None), or whatever
            else a TensorDict or a `BatchedDataDict` holds. Lists of numbers are refused, because
            they may be padded or not: pass a tensor, or rows to `pack_rows`.
        lengths: (N,) valid tokens per row: a tensor, an array, a list or a tuple. Or a jagged
            tensor: its row lengths count, and the packed columns share its offsets object. Without
            `lengths` and `mask`, nothing is packed.
        token_aligned_fields: Names of the per-token columns, packed as by `pack_per_token_field`
            (with its fallback). Names that are not columns are ignored, so that one set of names
            serves every batch. None packs each tensor whose shape passes the guess of
            `maybe_pack_jagged`; with a `mask`, each tensor whose first two dims are those of the
            mask.
        mask: Takes the place of `lengths` for padding on the left, or for holes: (N, S) booleans,
            or integers 0 and 1, or the name of the column that is the mask. Row i of a packed
            column has the cells for which row i of the mask is True.
        strict: If True, raise an error for three likely mistakes:

            * a name in `token_aligned_fields` is not a column;
            * a named column with two or more dims cannot be packed;
            * in each packed column of integers, the cells that are left out are not all one
              constant, bit for bit. This happens if you pass prompt or response lengths for
              columns that hold both.

            If False, warn (`JagcodecWarning`, once per calling line) of the second mistake; and,
            without a `mask`, if in each packed column of integers on the CPU the first and the last
            cell after some row differ. If `token_aligned_fields` is None, also warn of a rectangle
            that is one or two cells narrower than the longest row or the mask; and if `lengths`
            pack nothing, although a rectangle is wider than the longest row.

    Returns:
        ``TensorDict(batch_size=[N])`` with the columns in their order and no device. Packed
        columns own their memory, one block that is freed with the last of them. Jagged columns of
        equal row lengths share one offsets tensor, so ``td["a"] * td["b"]`` works. Other tensors
        are detached and alias contiguous input. Object arrays and lists become one payload per row
        (`NonTensorStack`), aliased. All else is what a TensorDict holds of it: an array of numbers
        a tensor, a `PackedColumn` a jagged one, a dict a batch.

    Raises:
        ArgumentError: A column does not have N rows; `lengths` is not (N,) or has a negative one;
            the mask is not (N, S) of 0 and 1, or both are given; or `strict` rejects a column.
        ArgumentKeyError: `mask` is not the name of a column, or `strict` rejects a name.
        ArgumentTypeError: A column has another type (it is named), or lengths are not integers.
    """
    where = "pack_jagged_fields"
    columns = _checked_columns(fields, lengths, token_aligned_fields, mask, where, strict)
    return tensordict_of(columns, where)


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


@untraced
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
    """Encode padded columns straight to a message, without jagged tensors or a TensorDict.

    Example:
        >>> import torch
        >>> from jagcodec import decode, encode_fields
        >>> columns = {"ids": torch.tensor([[5, 6, 0], [7, 8, 9]])}
        >>> frames = encode_fields(columns, lengths=[2, 3], token_aligned_fields=["ids"])
        >>> decode(frames)["ids"].values().tolist()
        [5, 6, 7, 8, 9]

    The message is, byte for byte, that of ``encode(pack_jagged_fields(...))``. `fields`, `lengths`,
    `token_aligned_fields`, `mask` and `strict` are as for `pack_jagged_fields`, `out` and
    `options` as for `encode`.

    Returns:
        Frames, as `encode` returns them; with `out` the bytes written to it. Rectangular columns
        are aliased by their frames. Packed ones are copied into frame 1 if they are below 16 KiB,
        else into one allocation, which is freed with the last of their frames; or straight into
        `out`. Rows of a mask with holes are copied twice. It raises the errors of
        `pack_jagged_fields` and `encode`.
    """
    where = "encode_fields"
    columns = _checked_columns(fields, lengths, token_aligned_fields, mask, where, strict)
    check_options(options, EncodeOptions.__annotations__, f"{where}(options)")
    message = pending(columns, **options)
    return frames_of(message) if out is None else write_to(message, out, f"{where}(out)")


def _checked_columns(
    fields: Mapping[str, Any],
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None,
    mask: Any,
    where: str,
    strict: bool,
) -> Columns:
    """The columns, which all have N rows. Those that become jagged are views of their rows."""
    leaves = {
        name: column
        if isinstance(column, torch.Tensor)
        else _as_column(column, f"{where}({name!r})")
        for name, column in named_columns(fields, f"{where}(fields)").items()
    }
    strict = require_flag(strict, f"{where}(strict)")
    rule = _read_rule(leaves, lengths, token_aligned_fields, mask, where, strict)
    row_splits, makes_jagged = rule.row_splits, rule.makes_jagged
    rows = None if row_splits is None else row_splits.rows
    columns: dict[str, Any] = {}
    jagged: dict[str, Any] = {}  # rectangles that become jagged, for the checks of their pads
    has_wide_rectangle = False
    arrays = plain_arrays(leaves.values())
    for (name, column), array in zip(leaves.items(), arrays, strict=True):
        shape: tuple[int, ...] = () if array is None else array.shape
        if not shape or shape[0] != rows:
            rows = _check_rows(column, rows, f"{where}({name!r})")
            shape = tuple(column.shape) if _is_rectangle(column) else ()
        cells = column if array is None else array
        if len(shape) < 2:  # one value per row
            columns[name] = cells
        elif row_splits is None or not makes_jagged(name, shape[1]):
            columns[name] = cells
            rule.check_left_out(name, shape, where, strict)
            has_wide_rectangle |= rule.is_too_wide(shape[1])
        else:
            # `check_constant_pads` reads tensors, `first_unpadded` is faster with arrays.
            jagged[name] = column if strict else cells
            rectangle = column.detach() if array is None else column
            view = rows_of_rectangle(rectangle, row_splits, where, array)
            columns[name] = view if rule.mask is None else rule.mask.rows_in(view)
    if row_splits is not None and jagged:
        if strict:
            check_constant_pads(jagged, row_splits, rule.mask, where)
        elif rule.mask is None:
            unpadded = first_unpadded(jagged, row_splits)
            if unpadded is not None:
                warn_of_leftovers(f"{where}({unpadded!r})")
    elif has_wide_rectangle and rule.mask is None:
        warn_of_width(f"{where}(lengths)")
    return Columns(rows or 0, columns)


def _as_column(column: Any, path: str) -> Any:
    """A column that is not a tensor, in the form that a TensorDict holds."""
    holder = column_of(column)
    if isinstance(holder, ObjectList):
        column = list(iter(column))  # a subclass may report another length
        if _holds_only_objects(column):
            return payloads_of_rows(column, path)
    elif isinstance(holder, Array) and column.ndim > 0:
        check_plain(column, path)
        if holder.objects() is not None:
            return payloads_of_rows(column, path)
        return leaf_of_column(column, path)
    elif isinstance(holder, Payloads):
        if column.batch_dims:
            return column
        raise _not_a_column(f"{described(column)} without batch dims", path)
    elif isinstance(holder, (Packed, Unbatched, Open)) or holder.is_batch:
        return leaf_of_column(column, path)
    raise _not_a_column(described(column), path)


def _not_a_column(description: str, path: str) -> ArgumentTypeError:
    """The error for a value that is not a column of padded cells or of objects."""
    detail = (
        "expected a tensor, an array, a list of strings, bytes, dicts and other objects, a "
        f"PackedColumn, a batch, or payloads of a TensorDict, found {description}; use "
        "torch.tensor or stack_or_nest for cells, encode_rows for rows, "
        "numpy.empty(N, dtype=object) for objects, and meta= of encode_fields for what "
        "belongs to the whole batch"
    )
    return ArgumentTypeError("bad_type", path, detail)


def _holds_only_objects(items: list[Any]) -> bool:
    """Whether a list can only hold objects. Cells are refused: they may be padded, or rows."""
    if any(item is None for item in items):  # arrays next to None cannot be cells
        items = [item for item in items if not isinstance(item, (np.ndarray, torch.Tensor))]
    has_tensor = any(issubclass(item_type, torch.Tensor) for item_type in set(map(type, items)))
    return not has_tensor and are_objects(items)


def _check_rows(column: Any, rows: int | None, path: str) -> int | None:
    """Refuse a column whose N differs from that of those before it, which is `rows`; return N.

    None if no column has shown it yet.
    """
    if _is_rectangle(column):
        check_rectangle(column, path)
        if column.dim() == 0:
            raise ArgumentError("bad_shape", path, "expected (N, ...), found a 0-d tensor")
    count = row_count(column, path)
    if count is None:
        return rows
    if rows in (None, count):
        return count
    detail = f"expected {rows} rows, as the lengths or the other columns have, found {count}"
    raise ArgumentError("row_mismatch", path, detail)


def _is_rectangle(column: Any) -> bool:
    """Whether a column is a tensor (N, ...); a nested or unbatched one is not."""
    return isinstance(column_of(column), (Dense, Sparse))


# --- which columns become jagged ---------------------------------------------------------------


class _JaggedRule(NamedTuple):
    """Which rectangles (N, S, ...) become jagged, and which of their cells are in rows."""

    row_splits: RowSplits | None  # None if no column becomes jagged
    mask: Mask | None  # None if the cells of a row are the first ones
    names: frozenset[Any] | None  # of per-token columns; None if their shape alone decides
    least_width: int  # the smallest S of a rectangle that becomes jagged
    most_width: int  # the largest S

    def makes_jagged(self, name: str, width: int) -> bool:
        """Whether a rectangle (N, width, ...) becomes jagged."""
        fits_name = self.names is None or name in self.names
        return fits_name and self.least_width <= width <= self.most_width

    def is_too_wide(self, width: int) -> bool:
        """Whether a rectangle (N, width, ...) is wider than those that become jagged."""
        return width > self.most_width > 0

    def check_left_out(self, name: str, shape: tuple[int, ...], where: str, strict: bool) -> None:
        """Raise or warn if a rectangle that stays one was probably meant to become jagged."""
        path = f"{where}({name!r})"
        if self.names is None:
            if self.least_width - FEW_CELLS <= shape[1] < self.least_width:
                warn_of_missing_cells(path)
        elif name in self.names:
            if strict:
                raise self._misfit_error(shape, path)
            if self.row_splits is not None:
                warn_of_rectangle(path)

    def _misfit_error(self, shape: tuple[int, ...], path: str) -> ArgumentError:
        """The error for a column that is named as per-token, and cannot become jagged."""
        if self.row_splits is None:
            detail = "expected lengths or a mask to pack it by, found neither"
            return ArgumentError("bad_option", path, detail)
        least = self.least_width
        width = f"{least}" if least == self.most_width else f"{least} or more"
        detail = (
            f"expected a per-token column ({self.row_splits.rows}, {width}, ...), "
            f"found shape {shape}. {MISSING_CELL}. "
            "If it does not hold one value per token, leave it out of token_aligned_fields"
        )
        return ArgumentError("bad_shape", path, detail)


def _read_rule(
    fields: Mapping[str, Any],
    lengths: Lengths | None,
    token_aligned_fields: Iterable[str] | None,
    mask: Any,
    where: str,
    strict: bool,
) -> _JaggedRule:
    """The rule that the arguments give: by `lengths`, by a `mask`, or by neither."""
    row_splits = None if lengths is None else read_row_lengths(lengths, f"{where}(lengths)")
    row_mask = None
    if mask is not None:
        if row_splits is not None:
            detail = "expected lengths or a mask, found both; pass one"
            raise ArgumentError("conflict", f"{where}(mask)", detail)
        row_mask = read_mask(mask, fields, where)
    names = None
    if token_aligned_fields is not None:
        names = name_set(token_aligned_fields, f"{where}(token_aligned_fields)")
        if strict:
            check_known(names, fields.keys(), f"{where}(token_aligned_fields)")
    if row_mask is not None:
        width = row_mask.valid.shape[1]
        return _JaggedRule(row_mask.row_splits, row_mask, names, width, width)
    if row_splits is None:
        return _JaggedRule(None, None, names, 0, 0)
    # Named columns are packed as by `pack_per_token_field`, others as by `maybe_pack_jagged`.
    most_width = row_splits.max if names is None else sys.maxsize
    return _JaggedRule(row_splits, None, names, row_splits.max, most_width)
