"""`RowBuilder`: a row that grows. The class comes first, then its helpers by order of use."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Mapping
from copy import deepcopy
from importlib.util import find_spec
from typing import Any, Unpack

import numpy as np

from jagcodec._arguments import check_known, mapping_of, name_set, require_int
from jagcodec._compiling import untraced
from jagcodec._dependencies import with_or_without_torch
from jagcodec.columns.batch import FieldSchema
from jagcodec.errors import ArgumentError, ArgumentTypeError, JagcodecError
from jagcodec.memory.arrays import tensor_type
from jagcodec.produce.cell_dtypes import DEFAULT_DTYPES, STORED_DTYPES
from jagcodec.produce.cells import cells_of_rows, error_at_column
from jagcodec.produce.given_rows import read_dtypes
from jagcodec.produce.growing_column import CellArray, Chunk, GrowingColumn
from jagcodec.produce.number_types import (
    PYTHON_TYPES,
    types_of_rows,
)
from jagcodec.produce.numbers import cells_of_python
from jagcodec.produce.row_kinds import OBJECT_ROW, cells_tensors, described, kind_of_row
from jagcodec.produce.rows import (
    encode_rows,
    read_ragged_dims,
    shape_without_cells,
)
from jagcodec.wire.frames import Frame
from jagcodec.wire.items import RowCells
from jagcodec.wire.write.encoder import EncodeOptions


@untraced
class RowBuilder:
    """One row of a batch that grows: appended to per turn or chunk, cut, sent, and resumed.

    Example:
        >>> import torch
        >>> from jagcodec import RowBuilder
        >>> row = RowBuilder({"logprobs": torch.float32})
        >>> row.append(input_ids=[5, 6, 7], logprobs=0.0, loss_mask=False)  # the prompt
        >>> row.append(input_ids=[8, 9], logprobs=[-0.5, -0.25], loss_mask=True)
        >>> row.set(reward=0.5, answer="42")
        >>> frames = row.to_frames()  # a message of one row, at any time; appending goes on
        >>> len(row), row.to_row()["loss_mask"].tolist()
        (5, [False, False, False, True, True])
        >>> resumed = RowBuilder.from_message(frames)
        >>> resumed.append(input_ids=[1], logprobs=[-1.0], loss_mask=True)
        >>> resumed.to_row()["logprobs"].tolist()
        [0.0, 0.0, 0.0, -0.5, -0.25, -1.0]

    It needs neither torch nor tensordict, except for chunks and values that are tensors.
    ``len(row)`` counts the tokens of the columns of `same_length`, or of the longest column if
    that is empty. A row can be pickled and copied. Only one thread may use it at a time.

    Args:
        dtypes: Dtypes by name, as for `encode_rows`, or the schema of an earlier batch. A dtype,
            or the `FieldSchema` of a jagged column, which also says its ragged dim and the
            shape of its tokens, makes a per-token column that is there from the start. `object`,
            and any other `FieldSchema`, is for a value that you `set`.
            Other columns are made at their first `append`, and have the dtype that `encode_rows`
            gives all numbers so far, in any order: Python's ints become float32 when a float is
            appended, and all take the dtype of the first array, tensor or numpy scalar, if they
            fit. A column of empty lists alone is float32.
        same_length: Names of columns that must have as many tokens as each other after each
            `append`; None for all columns, ``()`` for none.
        ragged_dims: Name to the dim of the column that is ragged, as for `encode_rows`: chunks
            (layers, n, k) with ``{"experts": 2}``. Not needed if `dtypes` says it.

    Raises:
        ArgumentError: `dtypes` and `ragged_dims` say different dims, or a dim is out of range.
        ArgumentTypeError: `dtypes` is not a mapping of names to dtypes, nor `ragged_dims` one of
            names to dims.
    """

    def __init__(
        self,
        dtypes: Mapping[str, Any] | None = None,
        *,
        same_length: Collection[str] | None = None,
        ragged_dims: Mapping[str, int] | None = None,
    ) -> None:
        path = "RowBuilder(same_length)"
        # None for all columns, empty for none.
        self._same_length = None if same_length is None else name_set(same_length, path)
        self._columns: dict[str, GrowingColumn] = {}
        self._values: dict[str, Any] = {}
        self._value_dtypes: dict[str, Any] = {}
        path = "RowBuilder(dtypes)"
        schemas = read_dtypes({} if dtypes is None else dtypes, path)
        self._dims = read_ragged_dims(ragged_dims, schemas, "RowBuilder")
        for name, schema in schemas.items():
            if schema.kind not in ("", "jagged"):
                self._value_dtypes[name] = schema
                continue
            try:
                self._columns[name] = _column_of_schema(schema, self._dims.get(name, 1) - 1)
            except JagcodecError as error:
                raise error_at_column(error, f"{path}[{name!r}]", name) from None

    def __len__(self) -> int:
        counted = (column.tokens for name, column in self._columns.items() if self._counts(name))
        return max(counted, default=0)

    def __bool__(self) -> bool:
        return True  # a row without tokens is a row

    def __repr__(self) -> str:
        names = f"columns={list(self._columns)}, values={list(self._values)}"
        return f"RowBuilder(tokens={len(self)}, {names})"

    def append(self, start: Mapping[str, int] | None = None, /, **columns: Any) -> None:
        """More tokens: a chunk for each column. After an error, the row is as it was.

        Example:
            >>> from jagcodec import RowBuilder
            >>> row = RowBuilder(same_length=["ids"])
            >>> row.append(ids=[5, 6, 7], experts=[[0, 3], [2, 1]])
            >>> row.append({"experts": 1}, ids=[8], experts=[[2, 0], [1, 3]])  # from token 1 on
            >>> row.to_row()["experts"].tolist()
            [[0, 3], [2, 0], [1, 3]]

        Args:
            start: Name to the index of the first token of its chunk. The chunk replaces what the
                column holds from there on, which may be more tokens or fewer. Other chunks start
                where their column ends. It is positional, so that a column may have any name.
            **columns: Name to chunk, as a row of a jagged column for `encode_rows`; its first dim,
                or the ragged dim that `dtypes` or `ragged_dims` says, is tokens. One number fills
                all cells of as many tokens as the other chunks add, or is one token if all are
                numbers; the shape of these tokens is that of the first chunk that has one. A column
                that is left out gets no tokens.

        Raises:
            ArgumentError: Columns of `same_length` would differ in their tokens, a chunk has
                tokens of another shape, a number does not fit the dtype of its column (ints must
                be exact, finite floats must stay finite), or the name is that of a value. A start
                is after the end of its column, is not an integer of 0 or more, or is that of one
                number.
            ArgumentKeyError: `start` names a column that has no chunk.
            ArgumentTypeError: A chunk has another type, or holds what the column cannot: floats
                among integers of an array, a second dtype, bools among numbers, strings, None.
                `start` is not a mapping.
        """
        where = "RowBuilder.append"
        chunks: dict[str, Chunk] = {}
        for name, tokens in columns.items():
            path = f"{where}({name!r})"
            if name in self._values:
                detail = "expected a per-token column, found a value that was set once for the row"
                raise ArgumentError("conflict", path, detail)
            column = self._columns.get(name) or GrowingColumn(self._dims.get(name, 1) - 1)
            chunks[name] = _read_chunk(column, tokens, path, name)
        starts = {} if start is None else _read_starts(start, chunks, f"{where}(start)")
        added: dict[str, int] = {}
        for name, chunk in chunks.items():
            if chunk.tokens is not None:
                before = chunk.column.tokens
                added[name] = starts.get(name, before) + chunk.tokens - before
        to_fill = self._tokens_to_fill(added, where) if len(added) < len(chunks) else 0
        for name, chunk in chunks.items():
            if chunk.tokens is None:
                chunk.cells = chunk.column.fill(chunk.cells, to_fill)
                chunk.tokens = added[name] = to_fill
            elif chunk.tokens:
                chunk.column = chunk.column.in_shape_of(chunk.cells)
        grown = self._columns | {name: chunk.column for name, chunk in chunks.items()}
        self._check_token_counts(grown, added, where)
        # No error can follow: change the row.
        for name, chunk in chunks.items():
            column = chunk.column
            column.cut(starts.get(name, column.tokens))
            if chunk.tokens:
                column.chunks.append(chunk.cells)
                column.tokens += chunk.tokens
        self._columns = grown

    def _tokens_to_fill(self, added: Mapping[str, int], where: str) -> int:
        """How many tokens one number fills: as many as each chunk that is not a number adds."""
        counted = {name: n for name, n in added.items() if self._counts(name)} or added
        first, tokens = next(iter(counted.items()), ("", 1))
        for name, other in counted.items():
            if other != tokens or other < 0:
                expected = f"{tokens} more tokens like {first!r}" if tokens >= 0 else "more tokens"
                detail = (
                    f"expected {expected}, found {other}; "
                    "one number instead of a list fills as many tokens as there are"
                )
                raise ArgumentError("bad_length", f"{where}({name!r})", detail)
        return tokens

    def _check_token_counts(
        self, columns: Mapping[str, GrowingColumn], added: Mapping[str, int], where: str
    ) -> None:
        """Refuse chunks after which columns of `same_length` would differ in their tokens."""
        any_lengths = self._same_length is not None and not self._same_length
        named = [name for name in columns if self._counts(name) and not any_lengths]
        lengths = {name: columns[name].tokens + added.get(name, 0) for name in named}
        for name, tokens in lengths.items():
            expected = lengths[named[0]]
            if tokens != expected:
                detail = (
                    f"expected {expected} tokens in all like {named[0]!r}, found {tokens}; "
                    "append to every column, or name those that must agree in same_length="
                )
                raise ArgumentError("bad_length", f"{where}({name!r})", detail)

    def _counts(self, name: str) -> bool:
        """Whether `len` counts the tokens of a column."""
        return not self._same_length or name in self._same_length

    def set(self, /, **values: Any) -> None:
        """Values that the row has once, whatever its tokens: a reward, an answer, a version.

        Args:
            **values: Name to a row for `encode_rows`, which is kept, not copied, in place of an
                earlier one. A list of numbers comes back from a message as a per-token column,
                unless `dtypes` says that it is an `object`.

        Raises:
            ArgumentError: The name is that of a per-token column.
        """
        for name in values:
            if name in self._columns:
                detail = "expected a value of the whole row, found a per-token column; use append"
                raise ArgumentError("conflict", f"RowBuilder.set({name!r})", detail)
        self._values.update(values)

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of each column that ``len`` counts, and drop the rest.

        Raises:
            ArgumentError: There are fewer tokens.
        """
        path = "RowBuilder.truncate(tokens)"
        kept = require_int(tokens, 0, path, f"0 to {len(self)}")
        if kept > len(self):
            detail = f"expected at most the {len(self)} tokens, found {kept}"
            raise ArgumentError("bad_option", path, detail)
        for name, column in self._columns.items():
            if self._counts(name):
                column.cut(kept)

    def to_row(self) -> dict[str, Any]:
        """All columns and values so far, by name: a snapshot, which no later call changes.

        Per-token columns are numpy arrays that own their memory. Where numpy lacks the dtype, they
        are tensors, or arrays of unsigned words of its size if torch is not installed. The values
        that were set follow; they are not copied.
        """
        row = {name: _array_or_tensor(column.whole()) for name, column in self._columns.items()}
        return row | self._values

    def to_frames(self, **options: Unpack[EncodeOptions]) -> list[Frame]:
        """The row so far as a message of one row: a snapshot; appending may go on.

        Args:
            options: As for `encode`. The row keeps nothing of `meta`.

        Returns:
            Frames, those of ``encode_rows([row.to_row()], ...)`` with the `dtypes` of the row.
            Raises as `encode_rows`, of a value that was set.
        """
        dtypes = {name: dtype for name, dtype in self._value_dtypes.items() if name in self._values}
        dims = {name: dim for name, dim in self._dims.items() if name in self._values}
        for name, column in self._columns.items():
            if column.dim:
                dims[name] = column.dim + 1
                column.check_shape(f"RowBuilder.to_frames({name!r})", name)
        row = {name: column.whole() for name, column in self._columns.items()} | self._values
        return encode_rows([row], dtypes=dtypes or None, ragged_dims=dims or None, **options)

    @classmethod
    def from_message(
        cls, message: Any, *, same_length: Collection[str] | None = None
    ) -> RowBuilder:
        """A row that continues the row of a message: after an abort, or in another process.

        Args:
            message: A message of one row, as for `open_wire`; or an open one, such as
                ``open_wire(frames).rows([3])``.
            same_length: As for `RowBuilder`; of those columns that are jagged.

        Returns:
            A row with the jagged columns, copied, as per-token ones, and the others as values,
            which become columns of the same kind and dtype again. The message's `meta` is not
            kept.

        Raises:
            ArgumentError: It does not have one row, or jagged columns of `same_length` differ in
                their tokens.
            ArgumentTypeError: A column is a batch within the batch, or neither tensor nor payload.
            WireFormatError: As from `open_wire`.
        """
        where = "RowBuilder.from_message"
        columns_of_row = with_or_without_torch(
            "produce.builder_tensors", "produce.builder_arrays"
        ).columns_of_row
        from jagcodec.wire.read.wire_batch import WireBatch, open_wire

        batch = message if isinstance(message, WireBatch) else open_wire(message)
        if tuple(batch.batch_size) != (1,):
            detail = f"expected one row, found {len(batch)} rows; choose it with .rows([i])"
            raise ArgumentError("row_mismatch", f"{where}(message)", detail)
        row, schema = cls(same_length=same_length), batch.schema
        for name, value in columns_of_row(batch, where).items():
            if not isinstance(value, RowCells):
                row._values[name], row._value_dtypes[name] = value, schema[name]
                continue
            dim, cells = value.ragged_dim - 1, value.data
            column = GrowingColumn(
                dim, is_flat=False, schema=schema[name], dtype=value.dtype, dtype_is_fixed=True
            )
            column.shape, column.tokens = column.shape_of(cells.shape, 0), cells.shape[dim]
            column.chunks = [cells] if column.tokens else []
            row._columns[name] = column.with_copied_cells()
        row._check_token_counts(row._columns, {}, where)
        return row

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy: its columns are copied, so later appends do not change them."""
        columns = {name: column.with_copied_cells() for name, column in self._columns.items()}
        return {**vars(self), "_columns": columns, "_values": dict(self._values)}

    def __copy__(self) -> RowBuilder:
        row = object.__new__(type(self))
        vars(row).update(self.__getstate__())
        return row

    def __deepcopy__(self, memo: dict[int, Any]) -> RowBuilder:
        row = object.__new__(type(self))
        vars(row).update(deepcopy(self.__getstate__(), memo))
        return row

    def __reduce_ex__(self, protocol: Any) -> Any:
        columns = {}
        for name, column in self._columns.items():
            column.join_chunks()  # pickles one chunk instead of many
            columns[name] = vars(column)
        state = type(self), {**vars(self), "_columns": columns}
        if "torch" not in sys.modules:
            return _of_state, (state,)
        from jagcodec.wire.pickled import pickled_parts  # values may be tensors

        return pickled_parts(_of_state, state, protocol)


def _column_of_schema(schema: FieldSchema, dim: int) -> GrowingColumn:
    """A column without tokens, of the dtype and the shape that `dtypes` says."""
    dtype: Any = schema.dtype  # its name
    column = GrowingColumn(dim, schema=schema, dtype=dtype, dtype_is_fixed=dtype is not None)
    sizes = schema.shape[1:] if schema.shape else ()
    if len(sizes) > sizes.count(None):  # some size is known
        column.shape, column.is_flat = shape_without_cells(schema, dim + 1), False
    return column


def _read_chunk(column: GrowingColumn, chunk: Any, path: str, name: str) -> Chunk:
    """The cells of a chunk as its column stores them; an error if they do not fit."""
    if isinstance(chunk, tensor_type()):
        chunk = cells_tensors().on_host(chunk)
    if isinstance(chunk, (list, tuple, range, array)) and not len(chunk):
        return Chunk(column, _NO_CELLS, 0)
    if chunk is None:
        detail = "expected numbers, found None; pass [] for no tokens, or leave the column out"
        raise ArgumentTypeError("bad_type", path, detail)
    try:
        column, cells = _cells_of_chunk(column, chunk)
    except JagcodecError as error:
        raise error_at_column(error, path, name, of_rows=False) from None
    if not isinstance(cells, RowCells):
        detail = (
            "expected numbers (a list, a tuple, a range, an array or a tensor of them, or one), "
            f"found {described(chunk)}"
        )
        raise ArgumentTypeError("bad_type", path, detail)
    try:
        column.check_chunk(cells)
    except JagcodecError as error:
        raise error_at_column(error, path, name) from None
    return Chunk(column, cells.data, cells.lengths[0] if cells.lengths else None)


_NO_CELLS: CellArray = np.empty(0)


def _cells_of_chunk(column: GrowingColumn, chunk: Any) -> tuple[GrowingColumn, Any]:
    """The column, whose dtype may be new, and the cells of a chunk as it stores them."""
    dim = column.dim
    if column.dtype_is_fixed:
        return column, cells_of_rows([chunk], column.dtype, token_dim=dim)
    cells: Any = None
    if not dim and type(chunk) in (list, tuple):
        cells = cells_of_python([chunk])
    types = types_of_rows([chunk]) if cells is None else {_TYPE_OF_DTYPE[cells.dtype]}
    if not types <= PYTHON_TYPES and kind_of_row(chunk) == OBJECT_ROW:
        return column, None
    column = column.with_types(types, chunk)
    if column.stored != column.dtype and (cells is None or cells.dtype != column.dtype):
        cells_of_rows([chunk], column.dtype, token_dim=dim)  # refuses what does not fit
    if cells is None or cells.dtype != column.stored:
        cells = cells_of_rows([chunk], column.stored, token_dim=dim)
    return column, cells


_TYPE_OF_DTYPE: dict[str, type] = {dtype: number for number, dtype in DEFAULT_DTYPES.items()}
"""The type of Python's numbers that get a dtype; of ints next to floats, that is float."""


def _read_starts(start: Any, chunks: Mapping[str, Chunk], path: str) -> dict[str, int]:
    """The indices at which chunks start, by their names."""
    indices = mapping_of(start, path, "a dict of names to the index of a token")
    check_known(indices, chunks, path)
    starts = {}
    for name, index in indices.items():
        end, place = chunks[name].column.tokens, f"{path}[{name!r}]"
        first = require_int(index, 0, place, f"0 to {end}")
        if first > end:
            detail = f"expected at most {end}, where the column ends, found {first}"
            raise ArgumentError("bad_option", place, f"{detail}; append the tokens before it first")
        if chunks[name].tokens is None:
            detail = f"expected a list, an array or a tensor from token {first} on, found"
            raise ArgumentError("bad_option", place, f"{detail} one number")
        starts[name] = first
    return starts


def _array_or_tensor(cells: RowCells) -> Any:
    """Cells as an array; where numpy lacks their dtype as a tensor, or without torch as words."""
    if STORED_DTYPES[cells.dtype].name == cells.dtype or find_spec("torch") is None:
        return cells.data
    return cells_tensors().tensor_of(cells.data, cells.dtype)


def _of_state(state: Any) -> RowBuilder:
    """A row made of its type and attributes; each column is a dict of its attributes."""
    row_type, attributes = state
    row: RowBuilder = object.__new__(row_type)
    columns = {name: GrowingColumn(**fields) for name, fields in attributes["_columns"].items()}
    vars(row).update(attributes, _columns=columns)
    return row
