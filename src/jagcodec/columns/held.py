"""`column_of`: the one table from the type of a value to the class that holds its rows.

A class is one way to hold N rows in memory. Functions over columns call its methods: they ask a
column for its rows, its view or its objects, and never for its type. `HeldColumn` has all methods.
The classes of arrays, objects and dicts follow, then the table, then functions over columns. The
classes of tensors and of leaves of TensorDicts are in `tensor_columns`, which is imported when
there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from jagcodec._arguments import check_array, mapping_of
from jagcodec._dependencies import module_with_torch, with_or_without_torch
from jagcodec.columns.batch import Batch, CellRows, FieldSchema, Name, OneObject
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.arrays import is_numeric, is_of_torch, object_array
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.views import RaggedView

if TYPE_CHECKING:
    import torch


class Mover(Protocol):
    """Moves the columns of one batch to a device: what `moved` asks of `columns.devices`."""

    pool: RowSplitsPool
    copies: Any  # `HostCopies` of all tensors if they go to the host, else None
    device: torch.device

    def path_of(self, key: Name) -> str: ...
    def has(self, view: RaggedView) -> bool: ...
    def is_there(self, tensor: torch.Tensor) -> bool: ...
    def tensor(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def checked_tensor(self, tensor: torch.Tensor, key: Name) -> torch.Tensor: ...
    def view(self, view: RaggedView) -> RaggedView: ...
    def columns(self, columns: Any, key: Name) -> dict[str, Any]: ...


class HeldColumn:
    """N rows in memory, or a value that has no rows.

    The methods here answer for a value without rows; subclasses answer for theirs. They ask about
    its rows, for its forms, about a batch, and for what joins and moves between devices need.
    """

    __slots__ = ("value",)
    family: ClassVar[Any] = None  # columns of one family can be joined; None if none can
    # Whether it is a batch in memory, whose columns can be listed. A tensorclass is one.
    is_batch: ClassVar[bool] = False
    # Whether functions over batches accept it. They accept an open batch, whose columns are not in
    # memory, but not a tensorclass, which has other fields besides its columns.
    has_columns: ClassVar[bool] = False
    has_tensor: ClassVar[bool] = False  # whether it is a tensor
    is_packed: ClassVar[bool] = False  # whether it is a `PackedColumn`
    is_in_place: ClassVar[bool] = False  # whether its rows are views, or one object
    is_leaf: ClassVar[bool] = False  # whether a TensorDict holds it as it is
    needs_leaf_form: ClassVar[bool] = False  # whether a TensorDict holds it only as its `leaf`

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    # Rows

    def row_count(self, path: str) -> int | None:
        """N; None if any N fits."""
        raise not_a_column(self.value, path)

    def sizes(self, wanted: list[int]) -> list[int]:
        """Its sizes along the batch dims; `wanted` itself if it has no rows of its own."""
        return wanted

    def check(self, path: str) -> None:
        """Raise an error for a subclass of a tensor or of an array."""

    def check_batch(self, path: str) -> None:
        """Refuse a batch without rows, or one whose rows may have different columns."""

    def field(self, rows: int) -> FieldSchema:
        """Its description, as the header of its message would give it."""
        return FieldSchema("user", None, None)

    # Forms

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        """Its rows in place if its type lets them differ in length; None for any other type."""
        return None

    def view_or_copy(self, path: str, pool: RowSplitsPool) -> RaggedView | None:
        """The `view` with gradients. Rows that are not end to end may be copied for it."""
        return self.view(path, pool, detach=False)

    def jagged_view(self, path: str, pool: RowSplitsPool) -> RaggedView | None:
        """Its rows in place if it is a jagged tensor; None for any other column."""
        return None

    def is_sent_in_place(self) -> bool:
        """Whether its view is sent. Tensors on devices are sent whole: one wait fetches all."""
        cells = self.cells()
        return cells is not None and cells.is_cpu

    def cells(self) -> torch.Tensor | None:
        """The tensor with its cells; None if it has no such tensor."""
        return None

    def array(self) -> npt.NDArray[Any] | None:
        """An array over its rows if they have one size and are in order on the host; else None."""
        return None

    def on_host(self, path: str) -> Any:
        """Its rows on the host: a `RaggedView`, `CellRows`, array or `OneObject`; else None."""
        return None

    def objects(self) -> list[Any] | None:
        """Its Python objects, one for each row; None if its rows are not objects."""
        return None

    def objects_to_send(self) -> list[Any] | None:
        """`objects` if they are sent as a list, because each row has an object; None otherwise."""
        return None

    def object_array(self) -> Any:
        """Its objects in an array (N,); any other value unchanged."""
        return self.value

    def leaf(self, rows: int, path: str) -> Any:
        """Its form in a TensorDict of these rows."""
        return self.value

    def user_value(self, path: str) -> Any:
        """The value that ``batch[name]`` of an open batch returns."""
        return self.leaf(0, path)

    # Batches

    def leaves(self) -> Iterable[tuple[str, Any]] | None:
        """Its leaves by name if it is a TensorDict, but not a lazy stack; None otherwise."""
        return None

    def inner_columns(self) -> Iterable[Any] | None:
        """The columns of a batch; None for any other column."""
        return None

    def other_fields(self) -> dict[str, Any] | None:
        """The fields of a tensorclass that are not columns; None for any other column."""
        return None

    def with_columns(self, columns: dict[str, Any], rows: int) -> Any:
        """A batch of other columns, with the dim names and device, or `meta_info`, of this one."""
        raise not_a_column(self.value, "batch")

    # Joining

    def column_from(self, other: HeldColumn, path: str) -> Any:
        """`other`, converted to this form; None if that would change it."""
        return None

    def array_for_join(self, *, numbers: bool) -> npt.NDArray[Any] | None:
        """The array that joins an `Array` of numbers, or of other items; None if it has none."""
        return None

    def from_view(self, view: RaggedView, path: str) -> Any:
        """A column of this form with the rows of a view, whose memory it may alias."""
        return _tensors().nested_of_view(view)

    def with_shared_offsets(self, path: str, pool: RowSplitsPool) -> Any:
        """Its value. A jagged tensor gets the offsets that the pool has for its row lengths."""
        return self.value

    # Devices

    def moved(self, mover: Mover, key: Name) -> Any:
        """Its value with all tensors on the device of `mover`."""
        return self.value

    def tensors(self) -> Sequence[Any]:
        """The tensors that are copied to the host unchanged."""
        return ()

    def offsets(self) -> torch.Tensor | None:
        """Its offsets tensor, if the row lengths follow from it alone; None otherwise."""
        return None

    def read_offsets(self, pool: RowSplitsPool, copies: Any) -> None:
        """Read its row lengths into a pool. `copies` has its offsets on the host."""


# --- arrays, objects and rows in place ---------------------------------------------------------


class ShapedColumn(HeldColumn):
    """A tensor or an array, whose first dim has the rows."""

    __slots__ = ()

    def row_count(self, path: str) -> int | None:
        self.check(path)
        if not self.value.shape:
            raise not_a_column(self.value, path)
        return int(self.value.shape[0])

    def sizes(self, wanted: list[int]) -> list[int]:
        return [*self.value.shape[: len(wanted)]]


class Array(ShapedColumn):
    """A numpy array (N, ...): numbers, texts, dates, or objects."""

    __slots__ = ()
    family = np.ndarray
    needs_leaf_form = True

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("object" if self.value.dtype == object else "array", None, None)

    def check(self, path: str) -> None:
        check_array(self.value, path)

    def objects(self) -> list[Any] | None:
        return list(self.value) if self.value.dtype == object and self.value.ndim == 1 else None

    def leaf(self, rows: int, path: str) -> Any:
        return _tensors().array_leaf(self.value, path)

    def on_host(self, path: str) -> Any:
        return self.value

    def user_value(self, path: str) -> Any:
        numbers = is_numeric(self.value)
        return _user_values().user_value_of_numbers(self.value, path) if numbers else self.value

    def column_from(self, other: HeldColumn, path: str) -> Any:
        array = other.array_for_join(numbers=is_numeric(self.value))
        if array is None and self.value.dtype == object and self.value.ndim == 1:
            items = other.objects()
            return None if items is None else object_array(items)
        return array


class ObjectList(HeldColumn):
    """A list of N objects."""

    __slots__ = ()
    family = list
    needs_leaf_form = True

    def row_count(self, path: str) -> int | None:
        return list.__len__(self.value)  # a subclass may report another length

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("object", None, None)

    def objects(self) -> list[Any] | None:
        items: list[Any] = self.value
        return items

    def leaf(self, rows: int, path: str) -> Any:
        return _tensors().leaf_of_rows(self.value)

    def sizes(self, wanted: list[int]) -> list[int]:
        return [list.__len__(self.value)]

    def object_array(self) -> Any:
        # A subclass may report another length.
        return object_array(list.copy(self.value))

    def user_value(self, path: str) -> Any:
        return self.object_array()

    def column_from(self, other: HeldColumn, path: str) -> Any:
        return other.objects()


class ViewColumn(HeldColumn):
    """A `RaggedView`: rows whose lengths may differ, in place."""

    __slots__ = ()
    needs_leaf_form = True
    is_in_place = True

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        view: RaggedView = self.value
        return view

    def on_host(self, path: str) -> Any:
        return self.value

    def is_sent_in_place(self) -> bool:
        return True

    def leaf(self, rows: int, path: str) -> Any:
        return _tensors().leaf_of_view(self.value)

    def user_value(self, path: str) -> Any:
        return _user_values().user_value_of_view(self.value)

    def sizes(self, wanted: list[int]) -> list[int]:
        return [self.value.row_splits.rows]

    def moved(self, mover: Mover, key: Name) -> Any:
        there = mover.has(self.value)
        return self.value if there else mover.view(self.value)

    def tensors(self) -> Sequence[Any]:
        return (self.value.memory,) if self.value.is_end_to_end else ()


class CellsColumn(HeldColumn):
    """A `CellRows`: rows of one size in place."""

    __slots__ = ()
    needs_leaf_form = True
    is_in_place = True

    def sizes(self, wanted: list[int]) -> list[int]:
        return [*self.value.view.values_shape[: len(wanted)]]

    def on_host(self, path: str) -> Any:
        return self.value

    def leaf(self, rows: int, path: str) -> Any:
        return _tensors().tensor_of_view(self.value.view)

    def user_value(self, path: str) -> Any:
        return _user_values().user_value_of_rectangle(self.value.view)


class OneObjectColumn(HeldColumn):
    """A `OneObject`: one object that all rows share, or an array with an item for each row."""

    __slots__ = ()
    needs_leaf_form = True
    is_in_place = True
    family = OneObject

    def row_count(self, path: str) -> int | None:
        rows: int = self.value.rows
        return rows

    def sizes(self, wanted: list[int]) -> list[int]:
        return [self.value.rows, *self.value.inner_sizes][: len(wanted)]

    def objects(self) -> list[Any] | None:
        items = self.value.items()
        return [self.value.data] * self.value.rows if items is None else list(items)

    def object_array(self) -> Any:
        items = self.value.items()
        return object_array([self.value.data] * self.value.rows) if items is None else items

    def on_host(self, path: str) -> Any:
        return self.value

    def leaf(self, rows: int, path: str) -> Any:
        return _tensors().leaf_of_one_object(self.value)

    def user_value(self, path: str) -> Any:
        return self.object_array()


# --- batches -----------------------------------------------------------------------------------


class HeldBatch(HeldColumn):
    """A batch in memory: the outermost one, or one that is a column of another."""

    __slots__ = ()
    is_batch = True

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("tensordict", None, None)

    def inner_sizes(self, path: str) -> tuple[int, ...]:
        """Its batch dims after the first; an error if its rows cannot be chosen and joined."""
        return ()

    def items(self) -> Iterable[tuple[str, Any]]:
        """Its columns by name."""
        pairs: Iterable[tuple[str, Any]] = self.value.items()
        return pairs

    def inner_columns(self) -> Iterable[Any] | None:
        values: Iterable[Any] = self.value.values()
        return values

    def column_from(self, other: HeldColumn, path: str) -> Any:
        return other.value if other.is_batch and other.has_columns else None


class DictBatch(HeldBatch):
    """A dict of columns."""

    __slots__ = ()
    family = dict
    has_columns = True
    needs_leaf_form = True

    def row_count(self, path: str) -> int | None:
        return common_row_count(self.value, path)

    def leaf(self, rows: int, path: str) -> Any:
        names = self.value.items()
        leaves = {name: as_leaf(inner, rows, f"{path}[{name!r}]") for name, inner in names}
        return _tensors().batch_of_leaves(leaves, rows)

    def sizes(self, wanted: list[int]) -> list[int]:
        return wanted  # its columns are checked when they are read

    def moved(self, mover: Mover, key: Name) -> Any:
        return self.with_columns(mover.columns(self.value, key), 0)

    def with_columns(self, columns: dict[str, Any], rows: int) -> Any:
        make: Callable[[dict[str, Any]], Any] = getattr(self.value, "with_columns", dict)
        return make(columns)


class Open(HeldColumn):
    """An open batch, such as a `WireBatch`: it reads its columns when it is asked for them.

    It is not a `HeldBatch`, because its columns are not in memory.
    """

    __slots__ = ()
    has_columns = True

    def sizes(self, wanted: list[int]) -> list[int]:
        return wanted


# --- the table ---------------------------------------------------------------------------------

HeldKind: TypeAlias = "type[HeldColumn] | Callable[[Any], type[HeldColumn]]"
"""The class that holds a value; or a function that returns it for the value."""

_KINDS: list[tuple[type, HeldKind]] = [
    (dict, DictBatch),
    (np.ndarray, Array),
    (list, ObjectList),
    (RaggedView, ViewColumn),
    (CellRows, CellsColumn),
    (OneObject, OneObjectColumn),
    (Batch, Open),
]
"""Types, each with the class that holds a value of it. The first type that fits counts."""

_KIND_OF_TYPE: dict[type, HeldKind] = {
    **dict.fromkeys((int, float, bool, str, bytes, tuple, type(None)), HeldColumn),
    **dict(_KINDS),
}
"""The same by exact type, for most columns: a lookup is faster than `isinstance`."""


def add_kinds(
    first: Sequence[tuple[type, HeldKind]],
    last: tuple[type, HeldKind],
    exact: Mapping[type, HeldKind],
) -> None:
    """Hold values of more types; `exact` has those of most columns."""
    _KINDS[:0] = first
    _KINDS.append(last)
    _KIND_OF_TYPE.update(exact)


def column_of(value: Any) -> HeldColumn:
    """A value in the class that holds its rows, by its type."""
    kind: Any = _KIND_OF_TYPE.get(type(value)) or _kind_of(value)
    column: HeldColumn = (kind if isinstance(kind, type) else kind(value))(value)
    return column


def _kind_of(value: Any) -> HeldKind:
    """The class for a rarer type. The first value that may be of torch adds torch's classes."""
    kind = _listed_kind(value)
    if kind is None and is_of_torch(type(value)):
        _tensors()
        kind = _KIND_OF_TYPE.get(type(value)) or _listed_kind(value)
    return kind or HeldColumn


def _listed_kind(value: Any) -> HeldKind | None:
    """The class for the first type in `_KINDS` that the value has; None if it has none of them."""
    return next((kind for value_type, kind in _KINDS if isinstance(value, value_type)), None)


def _tensors() -> Any:
    """The module of columns of tensors, imported only where there is one, or one is asked for."""
    return module_with_torch("columns.tensor_columns", "columns")


def _user_values() -> Any:
    """The module that makes what ``batch[name]`` returns: tensors, or arrays without torch."""
    return with_or_without_torch("columns.tensor_columns", "columns.user_arrays")


# --- functions over columns --------------------------------------------------------------------


def row_count(column: Any, path: str) -> int | None:
    """N, for any column; None if any N fits, as for a dict without columns."""
    return column_of(column).row_count(path)


def common_row_count(columns: Mapping[str, Any], path: str) -> int | None:
    """N of a dict of columns, which must all have N rows; None if no column has rows."""
    rows: int | None = None
    if type(columns).items is not dict.items:  # a subclass may return other items
        columns = mapping_of(columns, path, "a dict of columns")
    for name, column in columns.items():
        count = row_count(column, f"{path}[{name!r}]")
        rows = count if rows is None else rows
        if count not in (None, rows):
            detail = f"expected {rows} rows like the columns before it, found {count}"
            raise ArgumentError("row_mismatch", f"{path}[{name!r}]", detail)
    return rows


def not_a_column(column: Any, path: str) -> ArgumentTypeError:
    """The error for a value that is not a column of N rows."""
    detail = "expected a column of N rows (a tensor, an array, a list, a PackedColumn, or a dict of"
    detail += f" columns), found {type(column).__name__}; put values of the batch into meta_info, "
    detail += "or meta= of encode"
    return ArgumentTypeError("bad_type", path, detail)


def field_in_memory(column: Any, rows: int) -> FieldSchema:
    """The description of a column in memory, as the header of its message would give it."""
    return column_of(column).field(rows)


def as_leaf(column: Any, rows: int, path: str) -> Any:
    """A column of a dict, or a `RaggedView`, as a TensorDict of these rows would hold it."""
    return column_of(column).leaf(rows, path)


def with_columns(batch: Any, columns: dict[str, Any], rows: int) -> Any:
    """A batch of other columns: with the dim names and device of a TensorDict, or `meta_info`."""
    return column_of(batch).with_columns(columns, rows)


def read_offsets(leaves: Iterable[Any], pool: RowSplitsPool) -> None:
    """Read the row lengths of columns on devices into a pool, with one wait for each device.

    Columns with holes between their rows are left out: their readers wait for them.
    """
    away: list[tuple[torch.Tensor, HeldColumn]] = []
    for leaf in each_leaf(leaves):
        numbers = leaf.offsets()
        if numbers is None or numbers.is_cpu or numbers.is_meta:
            continue
        if pool.of_source(numbers) is None:
            away.append((numbers, leaf))
    if not away:
        return
    from jagcodec.memory.staging import HostCopies  # where there is a device, torch is here

    copies = HostCopies()
    copies.fetch(numbers for numbers, _ in away)
    for _, leaf in away:
        with suppress(ArgumentError):  # the reader of the column raises it, with its name
            leaf.read_offsets(pool, copies)


def each_leaf(leaves: Iterable[Any]) -> Iterator[HeldColumn]:
    """Each column; in place of an inner batch, each of its columns."""
    for leaf in leaves:
        column = column_of(leaf)
        inner = column.inner_columns()
        if inner is None:
            yield column
        else:
            yield from each_leaf(inner)
