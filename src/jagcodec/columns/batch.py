"""`Column`, `Batch`: what an open batch is made of, and the one function that reads columns.

A column of an open batch is a node of a message, a value in memory, or joined from many messages.
`read_columns` asks each column for its value, or for its rows in place. One call then copies the
rows of all columns that wait, and each of them makes its value of its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec._dependencies import check_torch, with_or_without_torch
from jagcodec.columns.outside_errors import pass_on
from jagcodec.errors import WireFormatError
from jagcodec.memory.arrays import IntArray, is_numeric
from jagcodec.rows.chosen_rows import ChosenRows
from jagcodec.rows.copy_bytes import gathered_cells
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.views import RaggedView

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Name: TypeAlias = tuple[str, ...]
"""A column inside the library: the names of the nested batches that it is in, and its own.

Always a tuple, also of one name. What a caller writes is a `Key`.
"""

Key: TypeAlias = str | tuple[str, ...]
"""A column in arguments: its name, or for one in a nested batch all names on the way.

A caller may also write a tuple of one name; `_arguments.key_of` makes it a `Key`.
"""


class FieldSchema(NamedTuple):
    """The kind, dtype and shape of one column, as the header of its message has them.

    Attributes:
        kind: ``"jagged"`` (also of a `PackedColumn`), ``"tensor"``, ``"object"`` (also of a list
            and of an array of objects), ``"tensordict"`` (also of a dict), or another kind of the
            wire in small letters. Of a tensor in a layout that a message cannot have, its layout,
            such as ``"sparse_csr"``.
        dtype: Of its cells; None if it has no cells. Functions that take a schema also take the
            name of a dtype here, such as "bfloat16".
        shape: With None for the ragged dim; None if it is not a tensor.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None


def sizes_fit(wanted: Sequence[int | None], found: Sequence[int | None]) -> bool:
    """Whether a shape is the wanted one, in which None is any size."""
    fit = [size in (None, other) for size, other in zip(wanted, found, strict=False)]
    return len(wanted) == len(found) and all(fit)


def packed_field(
    dtype: Any, values: tuple[int, ...], position_ids: tuple[int, ...], rows: int
) -> FieldSchema:
    """The description of a `PackedColumn`, whose parts have these shapes."""
    dim = 0 if values[:1] == position_ids else 1
    return FieldSchema("jagged", dtype, (rows, *values[:dim], None, *values[dim + 1 :]))


class Columns(NamedTuple):
    """N rows by column: what `encode_fields` passes to `encode`.

    A column is a tensor, or the array over its memory; a `RaggedView`; a `CellRows`; an `Item`; a
    list of N objects; a `OneObject`; `Columns` inside; or any other leaf of a TensorDict.
    """

    rows: int
    columns: Mapping[str, Any]
    inner_sizes: Sequence[int] = ()  # batch dims after the first


class ColumnDict(dict[str, Any]):
    """The columns of a batch of `rows` rows that is a dict, such as a `BatchedDataDict`."""

    def __init__(self, columns: Mapping[str, Any], rows: int) -> None:
        super().__init__(columns)
        self.rows: int = rows


class CellRows(NamedTuple):
    """Rows of a tensor (N, ...) in place: each is one cell of the view."""

    view: RaggedView


class OneObject(NamedTuple):
    """One object for all N rows of a batch.

    If it is an array of N items that are not numbers, each row has its item instead.
    """

    data: Any
    rows: int
    inner_sizes: Sequence[int] = ()  # batch dims after the first

    def items(self) -> npt.NDArray[Any] | None:
        """The array of the objects of rows; None if all rows have one object."""
        data, sizes = self.data, (self.rows, *self.inner_sizes)
        may_have_rows = isinstance(data, np.ndarray) and not is_numeric(data)
        return data if may_have_rows and data.shape[: len(sizes)] == sizes else None


class As(Enum):
    """The forms in which columns are read."""

    VIEW = "rows whose lengths may differ as a `RaggedView`; else as VALUE"
    VALUE = "tensors; objects in an array; an open batch; a value in memory unchanged"
    HOST = "in place on the host, to send or as arrays: `RaggedView`, `CellRows`, `OneObject`, list"


class Read:
    """One read of columns: of which rows, in which form, and what it has used so far."""

    __slots__ = ("batch_type", "chosen", "columns", "form", "known", "value_module")

    def __init__(self, batch: Batch, columns: Mapping[str, Column], form: As) -> None:
        self.batch_type: type[Batch] = type(batch)  # of batches inside the batch
        self.chosen: ChosenRows | None = batch._chosen
        self.columns: Mapping[str, Column] = columns
        self.form: As = form
        self.known: dict[Any, Any] = {}  # what a message or a source keeps for this read, by it
        # The module that makes values of cells: tensors, or arrays where torch is not installed.
        self.value_module: Any = None if form is As.HOST else with_or_without_torch(*VALUES)

    def inside(self, batch: Batch) -> Read:
        """The same read of the columns of a batch inside the batch."""
        inner = Read(batch, batch._columns, As.VALUE)
        inner.known = self.known
        return inner


VALUES = "wire.read.tensor_values", "wire.read.array_values"
"""The two modules that make values of the cells of messages."""


class InPlace(NamedTuple):
    """Rows that must be copied end to end, and the function that makes a column of the copy."""

    view: RaggedView
    make: Callable[[Any], Any]  # of the copied bytes; of a tensor if torch copies


class Storage(NamedTuple):
    """How a column is stored in a message, and so sent on."""

    # The paths of columns that are stored narrow: its own, or for a batch those of its columns.
    narrow: Sequence[Name]
    elided: bool  # whether rows share cells


PLAIN_STORAGE = Storage((), False)


class Column:
    """N rows of an open batch, however they are held."""

    __slots__ = ()
    is_of_user: bool = False  # whether a type that a user registered decides what it is

    def field(self, rows: int) -> FieldSchema:
        """The description of the column with `rows` chosen rows."""
        raise NotImplementedError

    def row_lengths(self, chosen: ChosenRows | None) -> IntArray | None:
        """(N,) lengths of rows; None if rows do not differ in length."""
        raise NotImplementedError

    def read(self, how: Read) -> Any:
        """The column in the form of `how`; or an `InPlace`, of which `read_columns` makes it."""
        raise NotImplementedError

    def to_send(self, how: Read) -> Any:
        """The column as an entry of `Columns`; documents stay unread if that is possible."""
        raise NotImplementedError

    def fault(self, error: Exception) -> Exception:
        """The error to raise for one that was raised while the column was read."""
        return error

    def leaf(self, value: Any, how: Read) -> Any:
        """A value that was read as `As.VALUE`, in the form that a TensorDict holds."""
        raise NotImplementedError

    def user_value(self, value: Any, how: Read) -> Any:
        """A value that was read as `As.VALUE`, in the form that ``batch[name]`` returns."""
        return value

    def storage(self) -> Storage:
        """How the column, or those in it, are stored in a message."""
        return PLAIN_STORAGE


@dataclass(slots=True, eq=False)
class Source:
    """Where the columns of a batch come from."""

    names: Sequence[str]  # of all columns
    sizes: Sequence[int]  # (N, ...): the batch size, of all rows
    device: torch.device | None  # where tensors go; None leaves them where their cells are
    allow_pickle: bool  # whether pickled objects are unpickled, and pickled again to be sent on

    def columns(self) -> Mapping[str, Column]:
        """All columns by name. A source does not keep them, because each keeps its source."""
        raise NotImplementedError

    def meta(self) -> dict[str, Any]:
        """The `meta` of the whole batch."""
        raise NotImplementedError

    def metas(self) -> list[dict[str, Any]]:
        """The `meta` of each batch that was joined."""
        return [self.meta()]

    def shared(self, columns: dict[str, Any], chosen: ChosenRows | None) -> dict[str, Any]:
        """Columns that were read, with the offsets that this source has for equal rows."""
        return columns

    def pool_inside(self) -> RowSplitsPool:
        """The pool that batches inside this one share."""
        return RowSplitsPool()

    def decompress_ahead(self, how: Read) -> None:
        """Fetch and decompress the frames of several columns together, if there is need to."""

    def frames(self, batch: Batch) -> list[Any] | None:
        """The frames of a batch, cut out of its message; None if columns must be read."""
        return None


class Batch:
    """Names to columns, of which rows may be chosen. A `WireBatch` adds the methods for users."""

    __slots__ = ("__weakref__", "_all_columns", "_chosen", "_source")

    def __init__(
        self,
        source: Source,
        columns: Mapping[str, Column] | None = None,
        chosen: ChosenRows | None = None,
    ) -> None:
        """Use `open_wire`; without `columns`, all those of the source."""
        self._source: Source = source
        self._all_columns: Mapping[str, Column] | None = columns
        self._chosen: ChosenRows | None = chosen

    @property
    def _columns(self) -> Mapping[str, Column]:
        if self._all_columns is None:
            self._all_columns = self._source.columns()
        return self._all_columns

    def __len__(self) -> int:
        """N: the number of rows as chosen."""
        return self._source.sizes[0] if self._chosen is None else len(self._chosen)


# A `WireBatch` is public and has the attributes of `Batch`, so they are private to users. Other
# modules of the library read them by these four functions.


def names_in(batch: Batch) -> tuple[str, ...]:
    """The names of the columns of an open batch, in their order."""
    columns = batch._all_columns
    return tuple(batch._source.names if columns is None else columns)


def columns_in(batch: Batch) -> Mapping[str, Column]:
    """The columns of an open batch, by name."""
    return batch._columns


def source_in(batch: Batch) -> Source:
    """Where the columns of an open batch come from."""
    return batch._source


def chosen_in(batch: Batch) -> ChosenRows | None:
    """The chosen rows of an open batch; None for all."""
    return batch._chosen


def read_columns(columns: Mapping[str, Column], how: Read) -> dict[str, Any]:
    """Columns by name, with one copy for the rows of all."""
    values: dict[str, Any] = {}
    waiting: list[tuple[str, InPlace]] = []
    for name, column in columns.items():
        try:
            value = column.read(how)
        except Exception as error:
            _make_all(waiting, columns)  # the fault of a column before this one comes first
            _raise_fault(column, error)
        values[name] = value
        if type(value) is InPlace:
            waiting.append((name, value))
    if waiting:
        values |= _make_all(waiting, columns)
    return values


def _make_all(
    waiting: Sequence[tuple[str, InPlace]], columns: Mapping[str, Column]
) -> dict[str, Any]:
    """The columns that wait for copies of their rows; one call makes all copies."""
    values = {}
    copies = gathered_cells([each.view for _, each in waiting])
    for (name, each), cells in zip(waiting, copies, strict=True):
        try:
            values[name] = each.make(cells)
        except Exception as error:
            _raise_fault(columns[name], error)
    return values


def _raise_fault(column: Column, error: Exception) -> NoReturn:
    """Raise what the column makes of an error that its read raised."""
    fault = column.fault(error)
    if fault is error:
        raise error
    raise fault from error


def lengths_of_column(batch: Batch, name: str) -> IntArray | None:
    """(N,) lengths of the chosen rows of a column; None if its rows do not differ in length."""
    column = batch._columns[name]
    try:
        return column.row_lengths(batch._chosen)
    except Exception as error:
        _raise_fault(column, error)


def _read(batch: Batch, columns: Mapping[str, Column], form: As) -> tuple[dict[str, Any], Read]:
    """Columns by name in a form, and the read that they are of."""
    how = Read(batch, columns, form)
    batch._source.decompress_ahead(how)
    return read_columns(columns, how), how


def views_of(batch: Batch, form: As = As.VIEW) -> dict[str, Any]:
    """Each column in the form from which a rectangle is cheapest, or in `As.HOST`.

    A jagged column is a `RaggedView` over the messages, which callers may only read. An object of
    the whole batch stays one. Any other column is what ``batch[name]`` returns.
    """
    values, _ = _read(batch, batch._columns, form)
    return batch._source.shared(values, batch._chosen)


def leaves_of(batch: Batch, how: Read | None = None) -> dict[str, Any]:
    """Each column by name, as a TensorDict holds it; `how` is the read of a batch around it."""
    columns = batch._columns
    if how is None:
        values, how = _read(batch, columns, As.VALUE)
    else:
        how = how.inside(batch)
        values = read_columns(columns, how)
    for name, column in columns.items():
        try:
            values[name] = column.leaf(values[name], how)
        except Exception as error:
            _raise_fault(column, error)
    return batch._source.shared(values, batch._chosen)


def values_of_batch(batch: Batch, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Columns by name, each as ``batch[name]`` returns it."""
    columns = batch._columns
    if names is not None:
        columns = {name: columns[name] for name in names}
    values, how = _read(batch, columns, As.VALUE)
    for name, column in columns.items():
        values[name] = column.user_value(values[name], how)
    return batch._source.shared(values, batch._chosen)


def to_send(batch: Batch) -> Any:
    """The chosen columns and rows as input for `encode`; rows of documents are not read."""
    return to_send_inside(batch, Read(batch, batch._columns, As.HOST))


def to_send_inside(batch: Batch, how: Read) -> Any:
    """`to_send` of a batch inside the batch that `how` reads."""
    columns, entries = batch._columns, dict[str, Any]()
    inner = Read(batch, columns, As.HOST)
    inner.known = how.known
    for name, column in columns.items():
        try:
            entries[name] = column.to_send(inner)
        except Exception as error:
            _raise_fault(column, error)
    source = batch._source
    return Columns(len(batch), source.shared(entries, batch._chosen), source.sizes[1:])


def storage_of_batch(batch: Batch) -> Storage:
    """How messages store the columns. They are sent on so, and elided again if that pays."""
    return combined_storage([column.storage() for column in batch._columns.values()])


def combined_storage(each: Sequence[Storage]) -> Storage:
    """How several columns are stored."""
    if all(one is PLAIN_STORAGE for one in each):  # most batches
        return PLAIN_STORAGE
    return Storage([path for one in each for path in one.narrow], any(one.elided for one in each))


def closed(column: Any) -> Any:
    """A column in memory. An open batch is read, also inside a dict."""
    if isinstance(column, Batch):
        return closed_batch(column, leaves_of(column))
    return with_closed(column) if type(column) is dict else column


def with_closed(columns: dict[str, Any]) -> dict[str, Any]:
    """A dict of columns without open batches among them; the same dict if it has none."""
    values = {name: closed(column) for name, column in columns.items()}
    is_same = all(values[name] is column for name, column in columns.items())
    return columns if is_same else values


def closed_batch(batch: Batch, leaves: dict[str, Any]) -> TensorDict:
    """A TensorDict of the columns of a batch, which are passed as leaves."""
    check_torch("WireBatch.to_tensordict")
    from tensordict import TensorDict

    from jagcodec.rows.non_tensor import batch_of

    source = batch._source
    # Values of registered types decide what TensorDict's constructor makes of them.
    try:
        plain = not any(column.is_of_user for column in batch._columns.values())
        if plain and source.device is None and len(source.sizes) == 1:
            return batch_of(leaves, len(batch))
        sizes = [len(batch), *source.sizes[1:]]
        return TensorDict(leaves, batch_size=sizes, device=source.device)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # tensordict raises all kinds
        pass_on(error)
        detail = f"expected columns of one batch, found {error!s:.200}"
        raise WireFormatError("bad_value", "$", detail) from error
