"""Rows of Python values, one column at a time: numbers to cells in one block, or objects."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch

from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.tensor_bytes import NUMPY_DTYPES, contiguous_bits, plain_arrays
from jagcodec.pack.numbers import (
    CODES,
    default_dtype,
    filled,
    misfits,
    option_of,
    plain_number,
    refusal,
)
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.dtypes import TORCH_NAMES


@dataclass
class Wanted:
    """What a caller said of a column.

    Attributes:
        dtype: Of its cells; `object` for a column of objects; None for what the rows say.
        rectangular: Whether sequences are rows of a rectangle.
        cell_shape: Of the cells where there are no rows; None where nothing is known of them.
        jagged: Whether they are then rows of none.
    """

    dtype: Any = None
    rectangular: bool = False
    cell_shape: tuple[int, ...] | None = None
    jagged: bool = False


ANYTHING = Wanted()


_TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in NUMPY_DTYPES.items()}
_IN_TORCH = {
    **_TORCH_DTYPES,
    **{code.dtype: dtype for dtype, code in CODES.items() if code[0] in "HIQ"},
}

# What a row is, by its type.
_NUMBER, _SEQUENCE, _ARRAY, _OBJECT = "a number", "a sequence", "an array", "an object"
_SORTS: dict[type, str] = {
    **dict.fromkeys((bool, int, float), _NUMBER),
    **dict.fromkeys((list, tuple), _SEQUENCE),
    **dict.fromkeys((np.ndarray, torch.Tensor, array), _ARRAY),
    **dict.fromkeys((str, bytes, dict, type(None)), _OBJECT),
}
_BASES: tuple[tuple[Any, str], ...] = (
    ((np.bool_, np.integer, np.floating, np.ndarray, torch.Tensor, array), _ARRAY),
    ((int, float), _NUMBER),
    ((list, tuple), _SEQUENCE),
)
_ARRAYS, _TENSORS = {np.ndarray}, {torch.Tensor}


def _sort(kind: type) -> str:
    known = _SORTS.get(kind)
    if known is None:
        known = next((sort for base, sort in _BASES if issubclass(kind, base)), _OBJECT)
    return known


def _is_tensor_of_numbers(row: Any) -> bool:
    """Whether an array or a tensor has cells that a column can have."""
    if isinstance(row, torch.Tensor):
        plain = row.layout is torch.strided and not row.is_nested
        return plain and row.dtype in TORCH_NAMES and not row.is_meta
    if isinstance(row, array):
        return row.typecode not in "uw"
    return row.dtype.newbyteorder("=") in _IN_TORCH or row.dtype.name in ("complex64", "complex128")


class RowColumns:
    """Makes columns of rows: arrays, tensors, `RaggedView`s, or lists of N objects.

    Attributes:
        lengths: Of the rows of each column of sequences.
        first: What errors call the row that decides what a column is.
    """

    first = "row 0"

    def __init__(self, where: str, own: bool) -> None:
        """Name `where` in errors. With `own` no column may alias its rows."""
        self._where = where
        self._own = own
        self._row_splits: dict[tuple[int, ...], RowSplits] = {}
        self.lengths: dict[str, tuple[int, ...]] = {}

    def column(self, name: str, rows: Sequence[Any], wanted: Wanted) -> Any:
        """The column of N rows, of which there is one at least.

        Raises:
            ArgumentError: They do not fit together, or not into their cells; the row is named.
            ArgumentTypeError: One is of another type than the others.
        """
        if len(rows) == 1:
            row = rows[0]
            kind = type(row)
            if kind is np.ndarray and wanted is ANYTHING and not self._own:
                # A message of one row, which is to cost no more than one row.
                dtype = _TORCH_DTYPES.get(row.dtype)
                shape = row.shape
                if dtype is not None and shape and row.flags.c_contiguous:
                    self.lengths[name] = lengths = shape[:1]
                    row_splits = self._row_splits.get(lengths) or self._splits(lengths)
                    return RaggedView(row, dtype, shape, 1, None, row_splits)
            kinds = {kind}
        else:
            kinds = set(map(type, rows))
        if wanted.dtype is object:
            return list(rows)
        if kinds == _TENSORS:
            # Each attribute of a tensor takes longer than to take most of them for arrays.
            plain = plain_arrays(rows)
            if not any(array is None for array in plain):
                return self._arrays(name, plain, wanted)
        elif kinds == _ARRAYS:
            return self._arrays(name, rows, wanted)
        sorts = {_SORTS.get(kind) or _sort(kind) for kind in kinds}
        if _ARRAY in sorts:
            sorts = {self._sort_of_row(row) for row in rows}
        if sorts == {_NUMBER}:
            return self._numbers(name, rows, wanted)
        if sorts == {_ARRAY}:
            return self._arrays(name, rows, wanted)
        if sorts == {_SEQUENCE}:
            return self._sequences(name, rows, wanted)
        if _OBJECT in sorts:
            return self._objects(name, rows, wanted)
        return self._mixed(name, rows, wanted)

    def empty(self, name: str, wanted: Wanted) -> Any:
        """A column of no rows.

        Raises:
            ArgumentError: Nobody said what it would be a column of.
        """
        if wanted.dtype is object:
            return []
        if wanted.dtype is None or wanted.cell_shape is None:
            raise ArgumentError(
                "bad_shape",
                self._at(name),
                "expected rows, found none; to make an empty column, say what it would be with "
                f"dtypes={{{name!r}: ...}}: a FieldSchema (open_wire(frames).schema), or object",
            )
        shape = (0, *wanted.cell_shape)
        if wanted.jagged:
            self.lengths[name] = ()
            return self._jagged(torch.empty(shape, dtype=wanted.dtype), ())
        return torch.empty(shape, dtype=wanted.dtype)

    @staticmethod
    def _sort_of_row(row: Any) -> str:
        sort = _sort(type(row))
        return _OBJECT if sort is _ARRAY and not _is_tensor_of_numbers(row) else sort

    # Errors

    def _at(self, name: str, row: int | None = None) -> str:
        """Where a column is, or one of its rows."""
        return f"{self._where}({name!r})" + ("" if row is None else f", row {row}")

    def _option(self, name: str, dtype: str) -> str:
        """How a caller says what the cells of a column are."""
        return option_of(name, dtype)

    def _as_objects(self, name: str) -> str:
        """What to do about rows that are no numbers."""
        return f"; for a column of Python objects pass {option_of(name, 'object')}"

    # Numbers

    def _numbers(self, name: str, rows: Sequence[Any], wanted: Wanted) -> Any:
        """One number per row: a column (N,)."""
        dtype = wanted.dtype or default_dtype(rows[0])
        values = self._filled(name, [rows], (len(rows),), dtype, None)
        return _as_array(values)

    def _filled(
        self,
        name: str,
        rows: Sequence[Sequence[Any]],
        lengths: tuple[int, ...],
        dtype: torch.dtype,
        cell: int | None,
    ) -> Any:
        """The cells of rows of numbers. `cell`: numbers of one cell; None: rows are numbers."""
        if dtype not in CODES:
            raise ArgumentTypeError(
                "bad_dtype",
                self._at(name),
                f"expected a dtype that Python's numbers can have, found {dtype}; make the rows "
                "tensors",
            )
        try:
            values, bad = filled(rows, lengths, dtype)
        except (ValueError, IndexError) as error:
            raise ArgumentError("row_mismatch", self._at(name), str(error)) from error
        if bad is not None:
            row, index = bad
            # One number per row, or the rows themselves.
            self._refuse(name, index if cell is None else row, rows[row][index], dtype)
        return values

    def _refuse(self, name: str, row: int, item: Any, dtype: torch.dtype) -> NoReturn:
        """Say why a number is none of a column's."""
        path = self._at(name, row)
        number = item if isinstance(item, (int, float)) else plain_number(item)
        plain = isinstance(number, (int, float)) and not isinstance(number, bool)
        if plain and dtype != torch.bool:
            raise refusal(path, number, dtype, partial(self._option, name))
        wanted = str(dtype).removeprefix("torch.")
        expected = "bools" if dtype == torch.bool else f"numbers (the column is {wanted})"
        self._unlike(path, name, expected, item)

    def _unlike(self, path: str, name: str, expected: str, item: Any) -> NoReturn:
        found = brief(item) if isinstance(item, (bool, int, float, str)) else describe(item)
        raise ArgumentTypeError(
            "bad_type",
            path,
            f"expected {expected}, found {found}{self._as_objects(name)}",
        )

    # Sequences

    def _sequences(self, name: str, rows: Sequence[Any], wanted: Wanted) -> Any:
        lengths = tuple(map(len, rows))
        first = next((row[0] for row in rows if len(row)), None)
        if first is None and not any(lengths):
            dtype, shape = wanted.dtype, wanted.cell_shape or ()
            if dtype is None:
                raise ArgumentError(
                    "bad_dtype",
                    self._at(name),
                    "expected a number in one of the rows, found only empty ones; say what the "
                    f"cells are with {self._option(name, 'torch.int64')}{self._as_objects(name)}",
                )
            return self._rows(name, torch.empty((0, *shape), dtype=dtype), lengths, wanted)
        leaf: Any = first
        while isinstance(leaf, (list, tuple)) and len(leaf):
            leaf = leaf[0]
        if not _is_number(leaf) and not isinstance(leaf, (list, tuple)):
            return self._objects(name, rows, wanted)
        flat, shape = rows, ()
        if isinstance(first, (list, tuple)):
            flat, shape = self._flattened(name, rows, leaf)
        dtype = wanted.dtype or default_dtype(leaf)
        cell = math.prod(shape)
        sizes = tuple(length * cell for length in lengths) if shape else lengths
        values = self._filled(name, flat, sizes, dtype, cell)
        if shape:
            values = values.reshape(sum(lengths), *shape)
        return self._rows(name, values, lengths, wanted)

    def _flattened(
        self, name: str, rows: Sequence[Any], leaf: Any
    ) -> tuple[Sequence[Any], tuple[int, ...]]:
        """Rows of lists of equal lengths as flat rows, and the shape of a cell."""
        shape: tuple[int, ...] = ()
        first: Any = next(row[0] for row in rows if len(row))
        flat: list[Any] = list(rows)
        while isinstance(first, (list, tuple)):
            size = len(first)
            for i, row in enumerate(flat):
                for item in row:
                    if not isinstance(item, (list, tuple)) or len(item) != size or not size:
                        raise ArgumentError(
                            "bad_shape",
                            self._at(name, i),
                            f"expected lists of {size} in a row, found {brief(item)}; for lists "
                            f"of any length pass dtypes={{{name!r}: object}}",
                        )
            flat = [list(chain.from_iterable(row)) for row in flat]
            shape = (*shape, size)
            first = first[0]
        return flat, shape

    def _objects(self, name: str, rows: Sequence[Any], wanted: Wanted) -> list[Any]:
        """A column of objects, among which no row may be numbers."""
        numbers = [self._is_numbers(row) for row in rows]
        if wanted.dtype is not None or any(numbers):
            like = wanted.dtype is not None or numbers[0]
            i = (
                next(i for i, found in enumerate(numbers) if found is not True)
                if like
                else (numbers.index(True))
            )
            self._check_gaps(name, rows)
            of_first = f"as {type(rows[0]).__name__} in {self.first}"
            expected = "numbers" if like else f"an object, {of_first}"
            self._unlike(self._at(name, i), name, expected, rows[i])
        return list(rows)

    def _check_gaps(self, name: str, rows: Sequence[Any]) -> None:
        """Name the cell where a row of numbers has None, as engines give for a first token."""
        for i, row in enumerate(rows):
            if self._sort_of_row(row) is not _SEQUENCE:
                continue
            gaps = [k for k, cell in enumerate(row) if cell is None]
            if gaps and all(cell is None or _is_number(cell) for cell in row):
                raise ArgumentTypeError(
                    "bad_type",
                    f"{self._at(name, i)}, cell {gaps[0]}",
                    "expected a number, found None; put a number in its place, such as "
                    f"float('nan'){self._as_objects(name)}",
                )

    def _is_numbers(self, row: Any) -> bool:
        sort = self._sort_of_row(row)
        if sort is _SEQUENCE:
            return bool(len(row)) and _is_number(row[0])
        return sort is not _OBJECT

    # Arrays

    def _arrays(self, name: str, rows: Sequence[Any], wanted: Wanted) -> Any:
        """Rows that are arrays or tensors, all of them."""
        parts: list[Any] = list(rows)
        first = rows[0]
        if set(map(type, rows)) != _ARRAYS:
            parts = self._parts(rows)
            first = parts[0]
        if first.dtype not in (_TORCH_DTYPES if type(first) is np.ndarray else TORCH_NAMES):
            if not all(map(_is_tensor_of_numbers, parts)):
                return self._objects(name, rows, wanted)
            parts = [
                torch.from_numpy(part.astype(part.dtype.newbyteorder("=")))
                if isinstance(part, np.ndarray)
                else part
                for part in parts
            ]
            first = parts[0]
        if wanted.dtype is not None or isinstance(rows[0], array):
            parts = [self._cast(name, i, part, wanted.dtype) for i, part in enumerate(parts)]
            parts = self._parts(parts)
            first = parts[0]
        if len(parts) > 1:
            self._check_alike(name, parts)
        if first.ndim == 0:
            if len(parts) == 1:
                return first.reshape(1)
            return np.array(parts) if type(first) is np.ndarray else torch.stack(parts)
        if len(parts) == 1:
            lengths: tuple[int, ...] = (int(first.shape[0]),)
            if self._own:
                values = first.copy() if type(first) is np.ndarray else first.clone()
            else:
                values = first
        else:
            lengths = tuple(map(len, parts))
            plain = type(first) is np.ndarray
            values = np.concatenate(parts) if plain else torch.cat(parts)
        return self._rows(name, values, lengths, wanted)

    @staticmethod
    def _parts(rows: Sequence[Any]) -> list[Any]:
        """Rows as arrays where all of them are plain ones, else as tensors."""
        parts: list[Any] = []
        for row in rows:
            if isinstance(row, torch.Tensor):
                parts.append(contiguous_bits(row.as_subclass(torch.Tensor)))
            elif isinstance(row, array):
                parts.append(np.array(row))
            else:
                parts.append(np.asarray(row))
        if any(type(part) is torch.Tensor for part in parts):
            arrays = plain_arrays(parts)
            if all(array is not None for array in arrays):
                return list(arrays)
            if any(type(part) is np.ndarray for part in parts):
                return [
                    torch.from_numpy(np.array(part)) if type(part) is np.ndarray else part
                    for part in parts
                ]
        return parts

    def _check_alike(self, name: str, parts: list[Any]) -> None:
        """See that rows have one dtype and one shape of cells."""
        first = parts[0]
        dtype, shape = first.dtype, first.shape[1:]
        ndim = first.ndim
        for i, part in enumerate(parts):
            if part.dtype != dtype:
                raise ArgumentTypeError(
                    "bad_dtype",
                    self._at(name, i),
                    f"expected {dtype} like {self.first}, found {part.dtype}; "
                    f"say which with {self._option(name, '...')}",
                )
            if part.ndim != ndim or part.shape[1:] != shape:
                expected = ("tokens", *shape) if ndim else ()
                raise ArgumentError(
                    "bad_shape",
                    self._at(name, i),
                    f"expected shape ({', '.join(map(str, expected))}) like {self.first}, "
                    f"found {tuple(part.shape)}",
                )

    def _cast(self, name: str, row: int, part: Any, dtype: torch.dtype | None) -> Any:
        """An array or a tensor with other cells, which hold the same numbers."""
        if dtype is None:  # numbers in an `array` are as those in a list
            dtype = torch.float32 if part.dtype.kind == "f" else torch.int64
        tensor = part if isinstance(part, torch.Tensor) else None
        found = _IN_TORCH[part.dtype] if tensor is None else tensor.dtype
        if found == dtype:
            return part
        if tensor is None:
            tensor = torch.from_numpy(np.array(part))
        if dtype not in CODES or found.is_complex or torch.bool in (found, dtype):
            raise ArgumentTypeError(
                "bad_dtype",
                self._at(name, row),
                f"expected {dtype}, found {found}",
            )
        bad = misfits(tensor, dtype)
        if bad.any():
            at = int(np.argmax(bad.reshape(-1)))
            self._refuse(name, row, tensor.reshape(-1)[at].item(), dtype)
        cast = tensor.to(dtype)
        return cast.numpy() if dtype in NUMPY_DTYPES and cast.is_cpu else cast

    def _mixed(self, name: str, rows: Sequence[Any], wanted: Wanted) -> Any:
        """Rows some of which are lists and others arrays, or numbers and 0-d arrays."""
        first = rows[0]
        if self._sort_of_row(first) is _ARRAY:
            parts = self._parts([first])
            dtype = wanted.dtype or (
                parts[0].dtype if isinstance(parts[0], torch.Tensor) else _IN_TORCH[parts[0].dtype]
            )
        else:
            leaf = first
            while isinstance(leaf, (list, tuple)) and len(leaf):
                leaf = leaf[0]
            dtype = wanted.dtype or (default_dtype(leaf) if _is_number(leaf) else torch.int64)
        parts = []
        for i, row in enumerate(rows):
            if self._sort_of_row(row) is _ARRAY:
                parts.append(row)
                continue
            single = RowColumns(f"{self._at(name, i)}: ", False)
            made = single.column(name, [row], Wanted(dtype, rectangular=True))
            made = made if isinstance(made, torch.Tensor) else torch.from_numpy(made)
            parts.append(made[0])
        return self._arrays(name, parts, Wanted(dtype, wanted.rectangular))

    # Rows

    def _rows(self, name: str, values: Any, lengths: tuple[int, ...], wanted: Wanted) -> Any:
        """Rows that lie end to end, as a jagged column or a rectangle."""
        self.lengths[name] = lengths
        if not wanted.rectangular:
            return self._jagged(values, lengths)
        for i, length in enumerate(lengths):
            if length != lengths[0]:
                raise ArgumentError(
                    "bad_length",
                    self._at(name, i),
                    f"expected {lengths[0]} items like row 0, since rectangular= names the column, "
                    f"found {length}",
                )
        return _as_array(values.reshape(len(lengths), lengths[0], *values.shape[1:]))

    def _splits(self, lengths: tuple[int, ...]) -> RowSplits:
        found = self._row_splits.get(lengths)
        if found is None:
            found = RowSplits.from_lengths(np.array(lengths, dtype=np.int64))
            self._row_splits[lengths] = found
        return found

    def _jagged(self, values: Any, lengths: tuple[int, ...]) -> RaggedView:
        row_splits = self._splits(lengths)
        memory = _as_array(values)
        dtype = memory.dtype
        if type(memory) is np.ndarray:
            if not memory.flags.c_contiguous:
                memory = np.ascontiguousarray(memory)
            dtype = _TORCH_DTYPES[dtype]
        return RaggedView(memory, dtype, tuple(memory.shape), 1, None, row_splits)


def _is_number(item: Any) -> bool:
    if isinstance(item, (int, float, np.bool_, np.integer, np.floating)):
        return True
    return (
        isinstance(item, (np.ndarray, torch.Tensor))
        and item.ndim == 0
        and (_is_tensor_of_numbers(item))
    )


def _as_array(values: Any) -> Any:
    """Values in an array where numpy and torch both have the dtype, else in a tensor."""
    if type(values) is np.ndarray and values.dtype not in _TORCH_DTYPES:
        return torch.from_numpy(values)
    return values
