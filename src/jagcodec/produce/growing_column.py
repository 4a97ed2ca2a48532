"""`GrowingColumn`: a per-token column of a `RowBuilder`; and `Chunk`, what one `append` adds.

Methods that read and change cells come first, then those for shapes.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jagcodec.columns.batch import FieldSchema
from jagcodec.errors import ArgumentError
from jagcodec.produce.cell_dtypes import STORED_DTYPES
from jagcodec.produce.cells import cells_of_rows
from jagcodec.produce.number_types import (
    NARROW,
    PYTHON_TYPES,
    LocatedItem,
    check_floats,
    dtype_of_types,
    located_numbers,
)
from jagcodec.produce.rows import (
    check_row_shape,
)
from jagcodec.wire.items import RowCells

CellArray = npt.NDArray[Any]
"""Cells of a dtype, as an array of `STORED_DTYPES`."""


@dataclass
class GrowingColumn:
    """A per-token column: chunks of cells, and what they have shown of their dtype and shape.

    Methods that change the dtype or the shape return a new column; `cut` and `join_chunks` change
    this one. Pickles of a `RowBuilder` name the fields.
    """

    dim: int = 0  # the dim of a chunk along which its tokens are
    shape: tuple[int, ...] | None = None  # without tokens; None if no chunk or schema has shown it
    is_flat: bool = True  # whether a token is a number, because nothing has shown its shape
    schema: FieldSchema | None = None  # says the shape of its chunks
    dtype: str | None = None  # None until a number decides it
    dtype_is_fixed: bool = False  # whether `dtypes` or a message decided the dtype
    types: frozenset[Any] = frozenset()  # of the numbers so far, unless the dtype is fixed
    # The dtype of the chunks. It is float64 for Python's floats, because a float64 may follow.
    stored: str | None = None
    tokens: int = 0
    chunks: list[CellArray] = field(default_factory=list)  # none of them is empty

    @property
    def axis(self) -> int:
        """The dim of the chunks along which the tokens are."""
        return 0 if self.is_flat else self.dim

    def join_chunks(self) -> CellArray:
        """Make one chunk of all, and return it: the cells as they are stored."""
        if not self.chunks:
            # Without numbers the dtype is float32, as in torch.tensor([]).
            stored = self.stored or self.dtype or "float32"
            return np.empty(self.shape or (0,), STORED_DTYPES[stored])
        if len(self.chunks) > 1:
            self.chunks = [np.concatenate(self.chunks, self.axis)]
        return self.chunks[0]

    def whole(self) -> RowCells:
        """A copy of all cells."""
        stored, dtype = self.join_chunks(), self.dtype or self.stored or "float32"
        with np.errstate(all="ignore"):  # a NaN may warn
            cells = stored.astype(STORED_DTYPES[dtype], order="C")
        return RowCells(cells, (self.tokens,), dtype)

    def with_types(self, types: Set[Any], chunk: Any) -> GrowingColumn:
        """The column, ready for a chunk of these types: its cells get the common dtype."""
        # In a narrow dtype each Python float is checked: it must not be rounded.
        has_narrow_floats = self.dtype in NARROW and float in types
        if types <= self.types and not has_narrow_floats:
            return self
        all_types = self.types | types
        before = [LocatedItem("", number_type, 0.0) for number_type in self.types]
        dtype = dtype_of_types(all_types, lambda: [*before, *located_numbers([chunk])])
        stored = "float64" if float in all_types and all_types <= PYTHON_TYPES else dtype
        column = replace(self, types=all_types, dtype=dtype, stored=stored)
        if not self.chunks or dtype == self.dtype:
            return column
        chunk_before = self.join_chunks()
        cells: Any = cells_of_rows([chunk_before], dtype, token_dim=self.axis)
        if float in self.types and dtype in NARROW:
            check_floats(chunk_before.reshape(-1).astype(np.float64), dtype, lambda _: "")
        is_stored = stored == dtype
        new_chunk = cells.data if is_stored else chunk_before.astype(STORED_DTYPES[stored])
        return replace(column, chunks=[new_chunk])

    def with_copied_cells(self) -> GrowingColumn:
        """The column with a copy of its cells."""
        return replace(self, chunks=[self.join_chunks().copy(order="C")] if self.chunks else [])

    def in_shape_of(self, cells: CellArray) -> GrowingColumn:
        """The column with tokens of the shape that a chunk shows; each number fills a token."""
        if not self.is_flat:
            return self
        chunks = self.chunks
        if chunks:
            numbers = self.join_chunks().reshape(-1, *(1,) * (cells.ndim - self.dim - 1))
            chunks = [np.broadcast_to(numbers, self.shape_of(cells.shape, self.tokens)).copy()]
        return replace(self, chunks=chunks, is_flat=False)

    def cut(self, tokens: int) -> None:
        """Keep the first `tokens` tokens. The time grows only with what is dropped."""
        while self.tokens > tokens:
            last = self.chunks.pop()
            if not self.is_flat:
                self.shape = self.shape_of(last.shape, 0)
            self.tokens -= last.shape[self.axis]
            if self.tokens < tokens:
                part = last[(slice(None),) * self.axis + (slice(tokens - self.tokens),)]
                memory: Any = part.base
                # Copy a small part, so that the rest of its memory is freed.
                self.chunks.append(part.copy() if 2 * part.nbytes < memory.nbytes else part)
                self.tokens = tokens

    def shape_of(self, like: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """A shape like this one, with so many tokens."""
        return (*like[: self.dim], tokens, *like[self.dim + 1 :])

    def shape_so_far(self) -> tuple[int, ...] | None:
        """The shape of the chunks; only the number of tokens differs between them."""
        return tuple(self.chunks[0].shape) if self.chunks else self.shape

    def cell_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one token of cells of this shape."""
        return (*shape[: self.dim], *shape[self.dim + 1 :])

    def fill(self, number: CellArray, tokens: int) -> CellArray:
        """So many tokens whose cells all hold the number; plain numbers if the column is flat."""
        shape = (tokens,) if self.is_flat else self.shape_of(self.shape_so_far() or (0,), tokens)
        return np.full(shape, number, number.dtype)

    def check_shape(self, path: str, name: str) -> None:
        """Refuse to send tokens along a later dim if nothing has shown the dims before it."""
        if self.is_flat:
            detail = "expected a chunk that shows the dims of its tokens, found none so far; append"
            remedy = f"one, or pass dtypes={{{name!r}: a FieldSchema}}"
            raise ArgumentError("bad_shape", path, f"{detail} {remedy} to RowBuilder")

    def check_chunk(self, chunk: RowCells) -> None:
        """Refuse a chunk, or a number that fills one, that is not like those before."""
        shape = None if self.schema is None else self.schema.shape
        before = self.shape_so_far() if self.chunks or shape is None else None
        before = None if self.is_flat else before
        if chunk.lengths and before is not None:
            expected, cell_shape = self.cell_shape(before), self.cell_shape(chunk.dims)
            if expected != cell_shape:
                detail = (
                    f"expected tokens of shape {expected} like those before, found {cell_shape}"
                )
                if expected == ():  # such as a prompt that a number filled
                    detail += "; to say their shape first, pass dtypes={...: a FieldSchema}"
                raise ArgumentError("bad_shape", "", detail)
        if shape is not None:
            if not chunk.lengths:  # one number
                chunk = RowCells(self.fill(chunk.data, 1), (1,), chunk.dtype)
            check_row_shape(chunk, shape, self.dim + 1)


@dataclass(slots=True)
class Chunk:
    """A chunk that was read, but not yet appended."""

    column: GrowingColumn  # a new one if the chunk changes its dtype or shape
    cells: CellArray  # as the column stores them
    tokens: int | None  # None for one number, which fills as many tokens as other chunks add
