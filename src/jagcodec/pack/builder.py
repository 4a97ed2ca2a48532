"""A row that grows: partial rollouts, and conversations of many turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np
import torch

from jagcodec._arguments import name_set, whole_number
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.tensor_bytes import contiguous_bits
from jagcodec.pack.cells import MisfitError, Rows, cast, cells_of, described, torch_dtype_of
from jagcodec.pack.rows import encode_rows
from jagcodec.ragged.copy_rows import gathered
from jagcodec.ragged.non_tensor import is_non_tensor, rows_of_leaf
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.dtypes import TORCH_NAMES
from jagcodec.wire.encoder import EncodeOptions
from jagcodec.wire.field_schema import FieldSchema
from jagcodec.wire.frames import Frame
from jagcodec.wire.wire_batch import WireBatch, open_wire


@dataclass
class _Grown:
    """A per-token column: its tokens, and the cells of each chunk of them."""

    dtype: torch.dtype | None = None  # until a number says it
    is_chosen: bool = False  # by `dtypes`, or by an array or a tensor
    tokens: int = 0
    chunks: list[Any] = field(default_factory=list)

    def whole(self) -> Any:
        """All cells, which from now on are one chunk; a tensor only if numpy lacks the dtype."""
        if not self.chunks:
            # float32 if nothing says the dtype, as torch.tensor([]) is
            return _values([torch.empty(0, dtype=self.dtype or torch.float32)])
        if len(self.chunks) > 1:
            self.chunks = [_values(self.chunks)]
        return self.chunks[0]


def _values(chunks: list[Any]) -> Any:
    made = cells_of(chunks)
    return _as_array(made.values if isinstance(made, Rows) else made)


def _as_array(cells: Any) -> Any:
    try:
        return cells.numpy() if isinstance(cells, torch.Tensor) else cells
    except TypeError:  # numpy does not have the dtype
        return cells


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
    longest. A row can be pickled and copied. Only one thread may use it at a time.

    Args:
        dtypes: Dtypes by name, as for `encode_rows`, or the schema of an earlier batch. A torch
            dtype, or the `FieldSchema` of a jagged column, makes a per-token column that is there
            from the start; `object`, and any other `FieldSchema`, says what a value that is `set`
            becomes. Columns that are not named are made at their first `append`, and have the
            dtype of its array or tensor; of Python's numbers int64, float32 and bool. A column of
            int64 becomes float32 when a float is appended, if every int stays exact. A column that
            only got empty lists is float32, so name the dtypes of rows that may stay empty.
        same_length: Names of columns that must have as many tokens as each other after each
            `append`; None for all columns, ``()`` for none.

    Raises:
        ArgumentTypeError: `dtypes` is not a mapping of names to dtypes.
    """

    def __init__(
        self,
        dtypes: Mapping[str, Any] | None = None,
        *,
        same_length: Collection[str] | None = None,
    ) -> None:
        path = "RowBuilder(same_length)"
        self._same = None if same_length is None else name_set(same_length, path)
        self._columns: dict[str, _Grown] = {}
        self._values: dict[str, Any] = {}
        self._dtypes: dict[str, Any] = {}  # of values
        for name, said in _checked(dtypes):
            dtype = said.dtype if isinstance(said, FieldSchema) and said.kind == "jagged" else said
            if isinstance(dtype, torch.dtype):
                self._columns[name] = _Grown(dtype, is_chosen=True)
            else:
                self._dtypes[name] = said

    def __len__(self) -> int:
        counted = (column.tokens for name, column in self._columns.items() if self._counts(name))
        return max(counted, default=0)

    def __bool__(self) -> bool:
        return True  # a row without tokens is a row

    def __repr__(self) -> str:
        return (
            f"RowBuilder(tokens={len(self)}, columns={list(self._columns)}, "
            f"values={list(self._values)})"
        )

    def append(self, /, **columns: Any) -> None:
        """More tokens: a chunk for each column. If one is refused, none is appended.

        Args:
            **columns: Name to chunk: what can be a row of a jagged column for `encode_rows`, such
                as a list, a numpy array or a tensor of one dim or more, the first being tokens.
                One number fills as many tokens as the other chunks have, or is one token if all
                are numbers. A column that is left out gets no tokens, which is an error where
                others of `same_length` get some.

        Raises:
            ArgumentError: Columns of `same_length` would differ in their tokens, a chunk has
                tokens of another shape, a number does not fit the dtype of its column (ints must
                be exact, finite floats must stay finite), or the name is that of a value.
            ArgumentTypeError: A chunk is none of these, such as a generator, or holds what the
                column cannot: floats among integers, bools among numbers, strings, None.
        """
        where = "RowBuilder.append"
        read = {}
        for name, chunk in columns.items():
            path = f"{where}({name!r})"
            if name in self._values:
                raise ArgumentError(
                    "conflict",
                    path,
                    "expected a per-token column, found a value that was set once for the row",
                )
            read[name] = _read(self._columns.get(name) or _Grown(), chunk, path, name)
        fill = self._tokens_to_fill(read, where)
        added = {
            name: fill if rows.lengths is None else rows.lengths[0]
            for name, (_, rows) in read.items()
        }
        self._check_lengths(added, where)
        chunks = {
            name: rows.values if rows.lengths else _repeated(rows.values, added[name], column)
            for name, (column, rows) in read.items()
        }
        for name, (column, _) in read.items():
            if added[name]:
                column.chunks.append(chunks[name])
                column.tokens += added[name]
            self._columns[name] = column

    def _tokens_to_fill(self, read: Mapping[str, tuple[_Grown, Rows]], where: str) -> int:
        """How many tokens a number stands for."""
        tokens = {name: rows.lengths[0] for name, (_, rows) in read.items() if rows.lengths}
        counted = {name: n for name, n in tokens.items() if self._counts(name)} or tokens
        if not counted or len(tokens) == len(read):
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
        if self._same is not None and not self._same:
            return
        lengths = {name: column.tokens for name, column in self._columns.items()}
        lengths |= {name: lengths.get(name, 0) + tokens for name, tokens in added.items()}
        names = [name for name in lengths if self._counts(name)]
        for name in names:
            if lengths[name] != lengths[names[0]]:
                raise ArgumentError(
                    "bad_length",
                    f"{where}({name!r})",
                    f"expected {lengths[names[0]]} tokens in all like {names[0]!r}, found "
                    f"{lengths[name]}, of which {added.get(name, 0)} are new; append to all "
                    "columns that must be as long as each other, or name those in same_length",
                )

    def _counts(self, name: str) -> bool:
        return not self._same or name in self._same

    def set(self, /, **values: Any) -> None:
        """Values that the row has once, whatever its tokens: a reward, an answer, a version.

        Args:
            **values: Name to value, which is kept and not copied; in the place of one that was
                set before. In a message each is what it is as the row of a column for
                `encode_rows`: a list of numbers is a jagged one.

        Raises:
            ArgumentError: The name is that of a per-token column.
        """
        for name in values:
            if name in self._columns:
                raise ArgumentError(
                    "conflict",
                    f"RowBuilder.set({name!r})",
                    "expected a name that no per-token column has, found one that is appended to",
                )
        self._values.update(values)

    def truncate(self, tokens: int) -> None:
        """Keep the first tokens of each column that ``len`` counts, and drop the rest.

        Args:
            tokens: How many, up to ``len(row)``. With a `same_length` of some names the other
                columns stay as they are; with ``()`` all columns are cut to that many.

        Raises:
            ArgumentError: There are fewer tokens.
        """
        path = "RowBuilder.truncate(tokens)"
        most = whole_number(tokens, 0, path, f"0 to {len(self)}")
        if most > len(self):
            raise ArgumentError(
                "bad_option", path, f"expected at most the {len(self)} tokens, found {most}"
            )
        for name, column in self._columns.items():
            if self._counts(name) and column.tokens > most:
                column.chunks, column.tokens = [_copied(column.whole()[:most])], most

    def to_row(self) -> dict[str, Any]:
        """What there is so far, by name: a snapshot, which no later call changes.

        Returns:
            Per-token columns as numpy arrays of their own (as tensors, where numpy lacks the
            dtype), then the values that were set, as they are.
        """
        row = {name: _copied(column.whole()) for name, column in self._columns.items()}
        return {**row, **self._values}

    def to_frames(self, **options: Unpack[EncodeOptions]) -> list[Frame]:
        """What there is so far, as a message of one row: a snapshot; appending may go on.

        Args:
            options: As for `encode`: `narrow`, `elide`, `compress`, `checksum`,
                `allow_pickle`, `default` (of values), and `meta`, of which the row itself keeps
                nothing.

        Returns:
            Frames, those of ``encode_rows([row.to_row()], ...)`` with the `dtypes` of the row.
            Per-token columns are jagged ones.

        Raises:
            ArgumentError: As from `encode_rows`, of a value that was set.
            ArgumentTypeError: As from `encode_rows`, of a value that was set.
            UnsupportedTypeError: As from `encode`, of a value that was set.
        """
        said = {name: said for name, said in self._dtypes.items() if name in self._values}
        return encode_rows([self.to_row()], dtypes=said or None, **options)

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
            A row with the jagged columns, copied, as per-token ones, and the others as values,
            which become columns of the same kind and dtype again. Nothing is kept of the message's
            `meta`: pass it to `to_frames` again.

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
        row, schema = cls(same_length=same_length), batch.schema
        for name, leaf in batch.columns():
            path = f"{where}({name!r})"
            if isinstance(leaf, RaggedView):
                if leaf.ragged_dim != 1:
                    raise ArgumentError(
                        "bad_shape",
                        path,
                        f"expected tokens along dim 1, found ragged dim {leaf.ragged_dim}",
                    )
                values = _values(gathered([leaf]))
                row._columns[name] = _Grown(leaf.dtype, True, len(values), [values])
                continue
            if isinstance(leaf, np.ndarray):
                value = leaf[0]
            elif is_non_tensor(leaf):
                value = rows_of_leaf(leaf, 1)[0]
            elif schema[name].kind == "tensor":
                value = contiguous_bits(leaf[0]).clone()
            else:
                raise ArgumentTypeError(
                    "bad_type",
                    path,
                    f"expected a tensor or a payload, found {type(leaf).__name__}; select the "
                    "other columns",
                )
            row._values[name], row._dtypes[name] = value, schema[name]
        row._check_lengths({}, where)
        return row

    def __getstate__(self) -> dict[str, Any]:
        columns = {}
        for name, column in self._columns.items():
            column.whole()
            columns[name] = replace(column, chunks=list(column.chunks))
        return {
            **vars(self),
            "_columns": columns,
            "_values": dict(self._values),
            "_dtypes": dict(self._dtypes),
        }


def _checked(dtypes: Any) -> list[tuple[str, Any]]:
    path = "RowBuilder(dtypes)"
    if dtypes is None:
        return []
    if not isinstance(dtypes, Mapping):
        raise ArgumentTypeError(
            "bad_type", path, f"expected a dict of names to dtypes, found {type(dtypes).__name__}"
        )
    for name, said in dtypes.items():
        known = said in TORCH_NAMES if isinstance(said, torch.dtype) else said is object
        if not isinstance(name, str) or not (known or isinstance(said, FieldSchema)):
            raise ArgumentTypeError(
                "bad_type",
                f"{path}[{name!r:.80}]",
                f"expected a name and a torch dtype, object or a FieldSchema, found {said!r:.80}",
            )
    return list(dtypes.items())


def _read(column: _Grown, chunk: Any, path: str, name: str) -> tuple[_Grown, Rows]:
    """The cells of a chunk, and the column that they go to, whose dtype they may decide."""
    is_typed = isinstance(chunk, (np.ndarray, np.generic, torch.Tensor))
    if isinstance(chunk, torch.Tensor) and not chunk.is_meta:
        chunk = chunk.detach().cpu()
    made: Any
    try:
        if not is_typed and isinstance(chunk, Sized) and not len(chunk):
            return column, Rows(np.empty(0), (0,))
        try:
            made = cells_of([chunk], column.dtype)
        except MisfitError as misfit:
            if column.is_chosen or not isinstance(misfit.found, float):
                raise
            made = cells_of([chunk], torch.float32)
            chunks = [cast(column.whole(), torch.float32)] if column.chunks else []
            column = replace(column, dtype=torch.float32, chunks=chunks)
    except MisfitError as misfit:
        raise misfit.error(path, name, of_rows=False) from None
    if not isinstance(made, Rows):
        raise ArgumentTypeError(
            "bad_type",
            path,
            "expected numbers (a list, a tuple, a range, an array or a tensor of them, or one), "
            f"found {described(chunk)}",
        )
    shape = made.values.shape[1:]
    if column.chunks and made.lengths and shape != column.chunks[0].shape[1:]:
        raise ArgumentError(
            "bad_shape",
            path,
            f"expected tokens of shape {tuple(column.chunks[0].shape[1:])} like those before, "
            f"found {tuple(shape)}",
        )
    if column.dtype is None:
        column = replace(column, dtype=torch_dtype_of(made.values), is_chosen=is_typed)
    return column, Rows(_as_array(made.values), made.lengths)


def _repeated(values: Any, tokens: int, column: _Grown) -> Any:
    """One number as the cells of so many tokens."""
    shape = (tokens, *(column.chunks[0].shape[1:] if column.chunks else ()))
    if isinstance(values, torch.Tensor):
        return values.view(*[1] * len(shape)).expand(shape).clone()
    return np.full(shape, values[0], dtype=values.dtype)


def _copied(cells: Any) -> Any:
    return cells.clone() if isinstance(cells, torch.Tensor) else cells.copy()
