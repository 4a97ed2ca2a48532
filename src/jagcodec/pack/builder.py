"""A row that grows: partial rollouts, and conversations of many turns."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from jagcodec._arguments import name_set, whole_number
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.pack.chunks import Chunk, as_dtype, cells_of, dtype_of, numbers_of, tensor_over
from jagcodec.ragged.copy_rows import gathered
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire.encoder import Columns, EncodeOptions, pending
from jagcodec.wire.field_schema import FieldSchema
from jagcodec.wire.frames import Frame, frames_of
from jagcodec.wire.lazy import WireBatch, open_wire


class RowBuilder:
    """One row of a batch that grows: appended to per turn or chunk, cut, sent, and resumed.

    Example:
        >>> import torch
        >>> from jagcodec import RowBuilder, open_wire
        >>> row = RowBuilder({"logprobs": torch.float32})
        >>> row.append(input_ids=[5, 6, 7], logprobs=0.0, loss_mask=False)  # the prompt
        >>> row.append(input_ids=[8, 9], logprobs=[-0.5, -0.25], loss_mask=True)
        >>> frames = row.to_frames()  # what there is so far; appending goes on
        >>> row.append(input_ids=[3], logprobs=0.0, loss_mask=False)  # what a tool answered
        >>> row.set(reward=0.5, answer="42")
        >>> len(row), row.to_row()["loss_mask"].tolist()
        (6, [False, False, False, True, True, False])
        >>> resumed = RowBuilder.from_message(frames)
        >>> resumed.append(input_ids=[1], logprobs=[-1.0], loss_mask=True)
        >>> resumed.to_row()["logprobs"].tolist()
        [0.0, 0.0, 0.0, -0.5, -0.25, -1.0]

    ``len(row)`` is its tokens: those of the columns of `same_length`, or, if that is empty, of the
    longest. A row can be pickled and copied. Threads may share one: each call is carried out
    entirely before another one begins, in an order that nobody promises.

    Args:
        dtypes: Dtypes of per-token columns by name, or the schema of an earlier batch, whose
            jagged columns are taken. The columns are there from the start. Those not named are
            made at their first `append`, and have the dtype of its array or tensor; of
            Python's numbers int64, float32 and bool; one that only got empty lists is float32, as
            ``torch.tensor([])`` is, so name the dtypes of rows that may stay empty.
        same_length: Names of columns that must have as many tokens as each other after each
            `append`; None for all columns, ``()`` for none.

    Raises:
        ArgumentTypeError: `dtypes` is no mapping of names to torch dtypes, or a dtype is not one
            of numbers.
    """

    def __init__(
        self,
        dtypes: Mapping[str, Any] | None = None,
        *,
        same_length: Collection[str] | None = None,
    ) -> None:
        path = "RowBuilder(same_length)"
        self._same = None if same_length is None else name_set(same_length, path)
        self._columns: dict[str, _Column] = {}
        self._values: dict[str, Any] = {}
        # Values that are rows of rectangular columns.
        self._rectangular: set[str] = set()
        self._lock = threading.RLock()
        for name, dtype in _dtypes(dtypes):
            self._columns[name] = _Column(dtype)

    def __len__(self) -> int:
        with self._lock:
            return max((self._columns[name].tokens for name in self._counted()), default=0)

    def __bool__(self) -> bool:
        return True  # a row without tokens is a row

    def __repr__(self) -> str:
        with self._lock:
            return (
                f"RowBuilder(tokens={len(self)}, columns={list(self._columns)}, "
                f"values={list(self._values)})"
            )

    def append(self, /, **columns: Any) -> None:
        """More tokens: a chunk for each column. If one is refused, none is appended.

        Args:
            **columns: Name to chunk: a list or tuple of numbers, nested where a token has several;
                an `array.array`, a range, a numpy array or a tensor of one dim or more, the first
                being tokens. One number fills as many tokens as the other chunks have, or is one
                token if all are numbers. A column that is left out gets no tokens, which is an
                error where others of `same_length` get some.

        Raises:
            ArgumentError: Columns of `same_length` would differ in their tokens, a chunk has
                tokens of another shape, a number cannot be held exactly by the dtype of its
                column (an int beyond its range, or that a float would round; fractions are
                rounded to the dtype, as torch does it), or the name is that of a value.
            ArgumentTypeError: A chunk is none of these, such as a generator, or holds what the
                column cannot: floats among integers, strings, None.
        """
        where = "RowBuilder.append"
        with self._lock:
            for name in columns:
                if name in self._values:
                    raise ArgumentError(
                        "conflict",
                        f"{where}({name!r})",
                        "expected a per-token column, found a value that was set once for the row",
                    )
            chunks = {
                name: numbers_of(chunk, f"{where}({name!r})") for name, chunk in columns.items()
            }
            fill = self._tokens_to_fill(chunks, where)
            ready: list[tuple[_Column, torch.dtype | None, npt.NDArray[Any], int]] = []
            added: dict[str, int] = {}
            for name, chunk in chunks.items():
                path = f"{where}({name!r})"
                column = self._columns.get(name) or _Column(None)
                dtype = column.dtype or dtype_of(chunk)
                cells = cells_of(chunk, dtype or torch.float32, path, name)
                tokens = fill if chunk.is_scalar else len(cells)
                if chunk.is_empty:
                    dtype = None
                elif column.is_known and not chunk.is_scalar:
                    column.check_cells(cells, path)
                ready.append((column, dtype, cells, tokens))
                added[name] = tokens
            self._check_lengths(added, where)
            # All memory before all changes: there may be none.
            for column, dtype, cells, tokens in ready:
                if dtype is not None:
                    column.reserve(dtype, cells, tokens)
            for name, (column, _, cells, tokens) in zip(chunks, ready, strict=True):
                if tokens:
                    column.extend(cells, tokens)
                self._columns[name] = column

    def _tokens_to_fill(self, chunks: Mapping[str, Chunk], where: str) -> int:
        """How many tokens a number stands for."""
        if not any(chunk.is_scalar for chunk in chunks.values()):
            return 0
        tokens = {name: x.shape[0] for name, x in chunks.items() if not x.is_scalar}
        counted = {name: n for name, n in tokens.items() if self._is_counted(name)} or tokens
        if not counted:
            return 1
        first, found = next(iter(counted.items()))
        for name, other in counted.items():
            if other != found:
                raise ArgumentError(
                    "bad_length",
                    f"{where}({name!r})",
                    f"expected {found} tokens like {first!r}, so that a number can fill as many, "
                    f"found {other}",
                )
        return found

    def _check_lengths(self, added: Mapping[str, int], where: str) -> None:
        """Refuse a chunk after which columns of `same_length` would differ in their tokens."""
        names = [name for name in {**self._columns, **added} if self._is_counted(name)]
        lengths = {}
        for name in names:
            column = self._columns.get(name)
            lengths[name] = (column.tokens if column else 0) + added.get(name, 0)
        if (not self._same and self._same is not None) or len(set(lengths.values())) < 2:
            return
        first = names[0]
        name = next(name for name in names if lengths[name] != lengths[first])
        raise ArgumentError(
            "bad_length",
            f"{where}({name!r})",
            f"expected {lengths[first]} tokens in all like {first!r}, found {lengths[name]}, of "
            f"which {added.get(name, 0)} are new; append to all columns that must be as long as "
            "each other, or say with same_length which those are",
        )

    def _is_counted(self, name: str) -> bool:
        return not self._same or name in self._same

    def _counted(self) -> list[str]:
        return [name for name in self._columns if self._is_counted(name)]

    def set(self, /, **values: Any) -> None:
        """Values that the row has once, whatever its tokens: a reward, an answer, a version.

        Args:
            **values: Name to value, which is kept and not copied; in the place of one that was
                set before. In a message each is what it is as the row of a column.

        Raises:
            ArgumentError: The name is that of a per-token column.
        """
        with self._lock:
            for name in values:
                if name in self._columns:
                    raise ArgumentError(
                        "conflict",
                        f"RowBuilder.set({name!r})",
                        "expected a name that no per-token column has, found one that is appended "
                        "to",
                    )
            self._values.update(values)
            self._rectangular.difference_update(values)

    def truncate(self, tokens: int) -> None:
        """Keep the first tokens of each column that ``len`` counts, and drop the rest.

        Args:
            tokens: How many, up to ``len(row)``. With a `same_length` of some names the other
                columns stay as they are; with ``()`` all columns are cut to that many.

        Raises:
            ArgumentError: There are fewer tokens.
        """
        with self._lock:
            path = "RowBuilder.truncate(tokens)"
            whole = whole_number(tokens, 0, path, f"0 to {len(self)}")
            if whole > len(self):
                raise ArgumentError(
                    "bad_option", path, f"expected at most the {len(self)} tokens, found {whole}"
                )
            for name in self._counted():
                column = self._columns[name]
                column.tokens = min(column.tokens, whole)

    def to_row(self) -> dict[str, Any]:
        """What there is so far, by name: a snapshot, which no later call changes.

        Returns:
            Per-token columns as numpy arrays of their own (as tensors, where numpy lacks the
            dtype), then the values that were set, as they are.
        """
        with self._lock:
            row = {name: column.snapshot() for name, column in self._columns.items()}
            return {**row, **self._values}

    def to_frames(self, **options: Unpack[EncodeOptions]) -> list[Frame]:
        """What there is so far, as a message of one row: a snapshot; appending may go on.

        Args:
            options: As for `encode`: `narrow`, `elide`, `compress`, `checksum`,
                `allow_pickle`, `default` (of values), and `meta`, of which the row itself keeps
                nothing.

        Returns:
            Frames, as `encode` returns them. Per-token columns are jagged ones. A number or a
            boolean is a row of a rectangular column, an array or a tensor one of a jagged column,
            and any other value a payload.

        Raises:
            UnsupportedTypeError: As from `encode`, of a value that was set.
        """
        with self._lock:
            row, rectangular = self.to_row(), frozenset(self._rectangular)
        columns = {name: _column_of(x, name in rectangular) for name, x in row.items()}
        return frames_of(pending(Columns(1, columns), **options))

    @classmethod
    def from_message(
        cls, message: Any, *, same_length: Collection[str] | None = None
    ) -> RowBuilder:
        """A row that goes on where one ended: at an abort, or in another process.

        Args:
            message: A message of one row, as `open_wire` takes it; or an open one, such as
                ``open_wire(frames).rows([3])``.
            same_length: As for `RowBuilder`; of those columns that are jagged.

        Returns:
            A row with the jagged columns, copied, as per-token ones, and the others as values.
            Nothing is kept of the message's `meta`: pass it to `to_frames` again.

        Raises:
            ArgumentError: It has not one row, jagged columns of `same_length` differ in their
                tokens, or one is ragged in another dim than its tokens.
            ArgumentTypeError: A column is a batch within the batch, or neither tensor nor payload.
            WireFormatError: As from `open_wire`.
        """
        where = "RowBuilder.from_message"
        batch = message if isinstance(message, WireBatch) else open_wire(message)
        if tuple(batch.batch_size) != (1,):
            raise ArgumentError(
                "row_mismatch",
                f"{where}(message)",
                f"expected one row, found batch size {tuple(batch.batch_size)}; choose one with "
                "open_wire(message).rows([i])",
            )
        row = cls(same_length=same_length)
        for name, leaf in batch.columns():
            path = f"{where}({name!r})"
            if isinstance(leaf, RaggedView):
                if leaf.ragged_dim != 1:
                    raise ArgumentError(
                        "bad_shape",
                        path,
                        f"expected tokens along dim 1, found ragged dim {leaf.ragged_dim}",
                    )
                (values,) = gathered([leaf])
                cells = cells_of(numbers_of(values, path), leaf.dtype, path, name)
                column = row._columns[name] = _Column(leaf.dtype)
                column.reserve(leaf.dtype, cells, len(cells))
                column.extend(cells, len(cells))
            elif isinstance(leaf, np.ndarray):
                row._values[name] = leaf[0]
            elif is_non_tensor(leaf):
                row._values[name] = rows_of_leaf(leaf, 1)[0]
            elif type(leaf) is torch.Tensor and leaf.layout is torch.strided:
                row._values[name] = contiguous_bits(leaf[0]).clone()
                row._rectangular.add(name)
            else:
                raise ArgumentTypeError(
                    "bad_type",
                    path,
                    f"expected a tensor or a payload, found {type(leaf).__name__}; select the "
                    "other columns",
                )
        row._check_lengths({}, where)
        return row

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            columns = {name: column.trimmed() for name, column in self._columns.items()}
            state = {**vars(self), "_columns": columns, "_values": dict(self._values)}
            state["_rectangular"] = set(self._rectangular)
            del state["_lock"]
            return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())


_FEWEST = 64
"""Tokens that a column has room for, at least."""


class _Column:
    """The cells of a per-token column, and room for more.

    Attributes:
        dtype: None until a number is known of.
        tokens: How many there are.
    """

    __slots__ = ("_cells", "dtype", "tokens")

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.tokens = 0
        self._cells: npt.NDArray[Any] | None = None

    @property
    def is_known(self) -> bool:
        """Whether there were tokens, which say the shape of a token."""
        return self._cells is not None

    @property
    def cell_shape(self) -> tuple[int, ...]:
        """Of one token."""
        return () if self._cells is None else self._cells.shape[1:]

    def check_cells(self, cells: npt.NDArray[Any], path: str) -> None:
        """Refuse tokens of another shape."""
        if cells.shape[1:] != self.cell_shape:
            raise ArgumentError(
                "bad_shape",
                path,
                f"expected tokens of shape {self.cell_shape} like those before, found "
                f"{cells.shape[1:]}",
            )

    def reserve(self, dtype: torch.dtype, cells: npt.NDArray[Any], tokens: int) -> None:
        """Make room for so many tokens that are, or are all filled with, these cells."""
        needed = self.tokens + tokens
        if self._cells is None:
            self._cells = np.empty((max(needed, _FEWEST), *cells.shape[1:]), cells.dtype)
            self.dtype = dtype
        elif needed > len(self._cells):
            wider = np.empty((max(needed, 2 * len(self._cells)), *self.cell_shape), cells.dtype)
            wider[: self.tokens] = self._cells[: self.tokens]
            self._cells = wider

    def extend(self, cells: npt.NDArray[Any], tokens: int) -> None:
        """Add tokens that there is room for."""
        if self._cells is not None:
            end = self.tokens + tokens
            self._cells[self.tokens : end] = cells
            self.tokens = end

    def snapshot(self) -> Any:
        """A copy of the cells: an array, or a tensor if numpy has not the dtype."""
        dtype = self.dtype or torch.float32  # as torch.tensor([]) is
        if self._cells is None:
            return as_dtype(np.empty(0, dtype=np.float32), dtype)
        cells = self._cells[: self.tokens].copy()
        tensor = tensor_over(cells, dtype)
        return cells if tensor is None else tensor

    def trimmed(self) -> _Column:
        """A copy without room."""
        column = _Column(self.dtype)
        column.tokens = self.tokens
        column._cells = None if self._cells is None else self._cells[: self.tokens].copy()
        return column


def _dtypes(dtypes: Any) -> list[tuple[str, torch.dtype]]:
    """Names and dtypes of the columns that are there from the start."""
    path = "RowBuilder(dtypes)"
    if dtypes is None:
        return []
    if not isinstance(dtypes, Mapping):
        raise ArgumentTypeError(
            "bad_type", path, f"expected a dict of names to dtypes, found {type(dtypes).__name__}"
        )
    listed = []
    for name, dtype in dtypes.items():
        if isinstance(dtype, FieldSchema):
            if dtype.kind != "jagged":
                continue
            dtype = dtype.dtype
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise ArgumentTypeError(
                "bad_type",
                f"{path}[{name!r:.80}]",
                f"expected a name and a torch dtype, found {dtype!r:.80}",
            )
        as_dtype(np.empty(0, dtype=np.float32), dtype, f"{path}[{name!r}]")
        listed.append((name, dtype))
    return listed


def _column_of(value: Any, rectangular: bool) -> Any:
    """What a row is as a column of one row."""
    if isinstance(value, (bool, int, float)) and type(value) in (bool, int, float):
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float32}[type(value)]
        try:
            return torch.tensor([value], dtype=dtype)
        except (OverflowError, RuntimeError, ValueError):  # beyond 64 bits
            return [value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return [value]
    value = contiguous_bits(value)
    if rectangular or not value.dim():
        return value.unsqueeze(0)
    return end_to_end(value, RowSplits.from_lengths(np.array([len(value)], dtype=np.int64)))
