"""`column_of`: the one table from the type of a value to the class that holds its rows.

A class is one way to hold N rows in memory. Its methods are what functions over columns are made
of; they ask a column for its rows, its view or its objects, and never for its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)
from tensordict.tensorclass import NonTensorDataBase

from jagcodec._arguments import mapping_of
from jagcodec.columns.batch import Batch
from jagcodec.columns.fields import FieldSchema, packed_field
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.plain_types import TENSOR_TYPES
from jagcodec.memory.tensor_bytes import array_in_storage, resolved
from jagcodec.ragged import non_tensor
from jagcodec.ragged.copy_rows import owned_values, values_of
from jagcodec.ragged.nested import (
    NESTED_TENSOR,
    check_column,
    nested_tensor,
    offsets_of,
    parts_of,
    rows_in,
    view_of,
    view_of_parts,
    view_of_strided,
)
from jagcodec.ragged.of_tensors import device_of
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, check_varlen, varlen_column, view_of_varlen
from jagcodec.ragged.views import RaggedView

Key: TypeAlias = tuple[str, ...]
"""All the names of a column that is inside batches."""


class Mover(Protocol):
    """What moves the columns of one batch to a device, see `columns.devices`."""

    pool: RowSplitsPool
    copies: Any  # `HostCopies` of the offsets that are on a device
    device: torch.device

    def path_of(self, key: Key) -> str: ...
    def is_there(self, tensor: torch.Tensor) -> bool: ...
    def tensor(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def checked_tensor(self, tensor: torch.Tensor, key: Key) -> torch.Tensor: ...
    def view(self, view: RaggedView) -> RaggedView: ...
    def columns(self, columns: Any, key: Key) -> dict[str, Any]: ...


class HeldColumn:
    """N rows in memory. A class that has no such rows says so, and returns its value unchanged."""

    __slots__ = ("value",)
    family: ClassVar[Any] = None  # columns of one family can be joined; None if none can
    is_batch: ClassVar[bool] = False
    is_flat: ClassVar[bool] = False  # whether a TensorDict holds it as it is
    is_in_dict: ClassVar[bool] = False  # whether a dict may have it, but not a TensorDict

    def __init__(self, value: Any) -> None:
        self.value: Any = value

    def check(self, path: str) -> None:
        """Refuse a subclass of a tensor or of an array."""

    def row_count(self, path: str) -> int | None:
        """N; None if any N fits."""
        raise not_a_column(self.value, path)

    def field(self, rows: int) -> FieldSchema:
        """Its description, as the header of its message would give it."""
        return FieldSchema("user", None, None)

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        """Its rows in place, if its type lets them differ in length."""
        return None

    def is_sent_in_place(self) -> bool:
        """Whether its view is sent. `encode` fetches tensors from devices, together."""
        cells = self.cells()
        return cells is not None and cells.is_cpu

    def view_or_copy(self, path: str, pool: RowSplitsPool) -> RaggedView | None:
        """Its rows, if its type lets them differ in length; gradients flow through them."""
        return self.view(path, pool, detach=False)

    def array(self) -> npt.NDArray[Any] | None:
        """Its rows of one size, in order on the host, as an array over them; None for others."""
        return None

    def objects(self) -> list[Any] | None:
        """Its Python objects, one for each row; None if it has no such rows."""
        return None

    def own_objects(self) -> list[Any] | None:
        """`objects` if each row has one of its own, and `Columns` may have them as a list."""
        return None

    def leaf(self, rows: int, path: str) -> Any:
        """What a TensorDict of these rows holds of it."""
        return self.value

    def object_array(self) -> Any:
        """Its objects in an array (N,); any other value unchanged."""
        return self.value

    def face(self, path: str) -> Any:
        """What ``batch[name]`` of an open batch gives of it."""
        return self.leaf(0, path)

    def made_of(self, view: RaggedView, path: str) -> Any:
        """A column like this one that has the rows of a view, which may alias its memory."""
        return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)

    def converted(self, other: HeldColumn, path: str) -> Any:
        """The rows of another column in this form, unchanged; None if it does not hold such."""
        return None

    def inner(self) -> Iterable[Any] | None:
        """The columns of a batch; None for any other column."""
        return None

    def moved(self, mover: Mover, key: Key) -> Any:
        """The value with its tensors on a device."""
        return self.value

    def cells(self) -> torch.Tensor | None:
        """The tensor that has its cells."""
        return None

    def tensors(self) -> Sequence[Any]:
        """The tensors that are copied to the host unchanged."""
        return ()

    def offsets(self) -> torch.Tensor | None:
        """The tensor that alone says how long the rows are."""
        return None

    def read_offsets(self, pool: RowSplitsPool, copies: Any) -> None:
        """Read the row lengths into a pool."""


# --- tensors -----------------------------------------------------------------------------------


class ShapedColumn(HeldColumn):
    """A tensor or an array, whose first dim has the rows."""

    __slots__ = ()

    def check(self, path: str) -> None:
        check_column(self.value, path)

    def row_count(self, path: str) -> int | None:
        check_column(self.value, path)
        if not self.value.shape:
            raise not_a_column(self.value, path)
        return int(self.value.shape[0])


class TensorColumn(ShapedColumn):
    """A tensor of any layout."""

    __slots__ = ()
    family = torch.Tensor
    is_flat = True

    def converted(self, other: HeldColumn, path: str) -> Any:
        numbers = isinstance(other, Array) and non_tensor.is_numeric(other.value)
        return other.leaf(0, path) if numbers or isinstance(other, Packed) else None

    def moved(self, mover: Mover, key: Key) -> Any:
        if mover.is_there(self.value):
            return self.value
        check_column(self.value, mover.path_of(key))
        return mover.checked_tensor(self.value, key)

    def cells(self) -> torch.Tensor | None:
        tensor: torch.Tensor = self.value
        return tensor

    def tensors(self) -> Sequence[Any]:
        return (self.value,)

    @property
    def layout_name(self) -> str:
        """What errors call the layout."""
        return str(self.value.layout)


class Dense(TensorColumn):
    """A strided tensor (N, ...)."""

    __slots__ = ()

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("tensor", self.value.dtype, (rows, *self.value.shape[1:]))

    def array(self) -> npt.NDArray[Any] | None:
        return array_in_storage(self.value.detach())


class Sparse(TensorColumn):
    """A tensor of a layout whose rows cannot be chosen."""

    __slots__ = ()

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("sparse_coo", None, None)


class StridedNested(TensorColumn):
    """A nested tensor of torch's older layout: rows that may differ in every dim."""

    __slots__ = ()

    def row_count(self, path: str) -> int | None:
        check_column(self.value, path)
        return int(self.value.size(0))

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("strided_nested", None, None)

    def view_or_copy(self, path: str, pool: RowSplitsPool) -> RaggedView | None:
        check_column(self.value, path)
        return view_of_strided(self.value, path)

    @property
    def layout_name(self) -> str:
        return "nested"


class Jagged(TensorColumn):
    """A `torch.jagged` nested tensor."""

    __slots__ = ()

    def check(self, path: str) -> None:
        """It is of no other type."""

    def row_count(self, path: str) -> int | None:
        return rows_in(self.value)

    def field(self, rows: int) -> FieldSchema:
        values, _, _, dim = parts_of(self.value)
        inner: list[int | None] = [*values.shape]
        inner[dim - 1] = None
        return FieldSchema("jagged", self.value.dtype, (rows, *inner))

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        return view_of(self.value, path, pool, detach=detach)

    def moved(self, mover: Mover, key: Key) -> Any:
        if mover.is_there(self.value):
            return self.value
        parts = parts_of(self.value, detach=False)
        view = mover.view(view_of_parts(parts, mover.path_of(key), mover.pool, mover.copies))
        made = nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
        mover.pool.remember(parts_of(made).offsets, view.row_splits)
        return made

    def tensors(self) -> Sequence[Any]:
        values, offsets, lengths, _ = parts_of(self.value, detach=False)
        # Rows with holes are compacted on their device, once offsets and lengths are known.
        return offsets, values if lengths is None else lengths

    def offsets(self) -> torch.Tensor | None:
        return offsets_of(self.value)

    def read_offsets(self, pool: RowSplitsPool, copies: Any) -> None:
        view_of_parts(parts_of(self.value), "", pool, copies)

    @property
    def layout_name(self) -> str:
        return "jagged"


class Packed(HeldColumn):
    """A `PackedColumn`."""

    __slots__ = ()
    family = PackedColumn
    is_in_dict = True

    def row_count(self, path: str) -> int | None:
        check_varlen(self.value, path)
        return len(self.value.cu_seqlens) - 1

    def field(self, rows: int) -> FieldSchema:
        values, ids = self.value.values, self.value.position_ids
        return packed_field(values.dtype, tuple(values.shape), tuple(ids.shape), rows)

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        column = self.value
        if detach:
            column = column._replace(values=column.values.detach())
        return view_of_varlen(column, path, pool)

    def leaf(self, rows: int, path: str) -> Any:
        return ViewColumn(view_of_varlen(self.value, path)).leaf(rows, path)

    def made_of(self, view: RaggedView, path: str) -> Any:
        return varlen_column(view, path)

    def converted(self, other: HeldColumn, path: str) -> Any:
        if not isinstance(other, Jagged):
            return None
        return varlen_column(view_of(other.value, path, detach=False), path)

    def moved(self, mover: Mover, key: Key) -> Any:
        values, cu_seqlens, longest, position_ids = self.value
        if mover.is_there(values):
            return self.value
        places, positions = mover.tensor(cu_seqlens), mover.tensor(position_ids)
        return PackedColumn(mover.tensor(values), places, longest, positions)

    def cells(self) -> torch.Tensor | None:
        cells: torch.Tensor = self.value.values
        return cells

    def tensors(self) -> Sequence[Any]:
        return self.value.values, self.value.cu_seqlens, self.value.position_ids

    def offsets(self) -> torch.Tensor | None:
        offsets: torch.Tensor = self.value.cu_seqlens
        return offsets

    def read_offsets(self, pool: RowSplitsPool, copies: Any) -> None:
        view_of_varlen(self.value, "", pool, copies)


class ViewColumn(HeldColumn):
    """A `RaggedView`."""

    __slots__ = ()

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        view: RaggedView = self.value
        return view

    def is_sent_in_place(self) -> bool:
        return True

    def leaf(self, rows: int, path: str) -> Any:
        view = self.value
        return nested_tensor(owned_values(view), view.row_splits, view.ragged_dim)

    def moved(self, mover: Mover, key: Key) -> Any:
        there = device_of(self.value) == mover.device
        return self.value if there else mover.view(self.value)

    def tensors(self) -> Sequence[Any]:
        return (self.value.memory,) if self.value.is_end_to_end else ()


class Unbatched(HeldColumn):
    """An `UnbatchedTensor`: one tensor that belongs to all rows."""

    __slots__ = ()
    family = UnbatchedTensor
    is_flat: ClassVar[bool] = issubclass(
        UnbatchedTensor, torch.Tensor
    )  # below 0.12 it is a tensorclass

    def check(self, path: str) -> None:
        check_column(self.value, path)

    def row_count(self, path: str) -> int | None:
        return None

    def moved(self, mover: Mover, key: Key) -> Any:
        size, tensor = non_tensor.unbatched_parts(self.value)
        if mover.is_there(tensor):
            return self.value
        return non_tensor.unbatched_of(size, mover.checked_tensor(tensor, key))

    def cells(self) -> torch.Tensor | None:
        return self.value if isinstance(self.value, torch.Tensor) else None

    def tensors(self) -> Sequence[Any]:
        return (non_tensor.unbatched_parts(self.value)[1],)


# --- arrays and objects ------------------------------------------------------------------------


class Array(ShapedColumn):
    """A numpy array (N, ...): numbers, texts, dates, or objects."""

    __slots__ = ()
    family = np.ndarray
    is_in_dict = True

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("object" if self.value.dtype == object else "array", None, None)

    def objects(self) -> list[Any] | None:
        return list(self.value) if self.value.dtype == object and self.value.ndim == 1 else None

    def leaf(self, rows: int, path: str) -> Any:
        try:
            return non_tensor.leaf_of_array(self.value)
        except TypeError as error:  # torch lacks a dtype of numbers
            found = f"found {self.value.dtype}; convert it by .astype"
            detail = f"expected a dtype that torch has, {found}"
            raise ArgumentTypeError("bad_dtype", path, detail) from error

    def face(self, path: str) -> Any:
        return self.leaf(0, path) if non_tensor.is_numeric(self.value) else self.value

    def converted(self, other: HeldColumn, path: str) -> Any:
        if isinstance(other, TensorColumn):
            return self._numbers_of(other.value)
        found = non_tensor.array_of_leaf(other.value) if isinstance(other, Payloads) else None
        if found is None and self.value.dtype == object and self.value.ndim == 1:
            items = other.objects()
            return None if items is None else non_tensor.object_array(items)
        return found

    def _numbers_of(self, tensor: torch.Tensor) -> Any:
        plain = tensor.layout is torch.strided and tensor.is_cpu and not tensor.requires_grad
        with suppress(TypeError, RuntimeError):  # numpy lacks the dtype, or it is nested
            if plain and non_tensor.is_numeric(self.value):
                return resolved(tensor).numpy()
        return None


class ObjectList(HeldColumn):
    """A list of N objects."""

    __slots__ = ()
    family = list
    is_in_dict = True

    def row_count(self, path: str) -> int | None:
        return list.__len__(self.value)  # a subclass may report another length

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("object", None, None)

    def objects(self) -> list[Any] | None:
        items: list[Any] = self.value
        return items

    def leaf(self, rows: int, path: str) -> Any:
        return non_tensor.leaf_of_rows(self.value)

    def object_array(self) -> Any:
        # A subclass may report another length.
        return non_tensor.object_array(list.copy(self.value))

    def face(self, path: str) -> Any:
        return self.object_array()

    def converted(self, other: HeldColumn, path: str) -> Any:
        return other.objects()


class Payloads(HeldColumn):
    """A leaf of a TensorDict with Python objects: one for each row, or one of the whole batch."""

    __slots__ = ()
    family = NonTensorData
    is_flat = True

    def row_count(self, path: str) -> int | None:
        sizes = non_tensor.sizes_of_batch(self.value)
        if not sizes:
            raise not_a_column(self.value, path)
        return int(sizes[0])

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("object", None, None)

    def objects(self) -> list[Any] | None:
        return non_tensor.rows_of_leaf(self.value, self.value.batch_size[0])

    def own_objects(self) -> list[Any] | None:
        stack = self.value
        return non_tensor.payloads_of_stack(stack) if non_tensor.is_stack(stack) else None

    def object_array(self) -> Any:
        return non_tensor.objects_of_leaf(self.value)

    def face(self, path: str) -> Any:
        return self.object_array()

    def converted(self, other: HeldColumn, path: str) -> Any:
        if isinstance(other, ObjectList):
            return other.leaf(0, path)
        if not isinstance(other, Array) or non_tensor.is_numeric(other.value):
            return None
        if non_tensor.array_of_leaf(self.value) is None:
            return non_tensor.leaf_of_array(other.value)
        return NonTensorData(other.value, batch_size=[len(other.value)])


# --- batches -----------------------------------------------------------------------------------


class InnerBatch(HeldColumn):
    """A batch inside a batch."""

    __slots__ = ()
    is_batch = True

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("tensordict", None, None)

    def items(self) -> Iterable[tuple[str, Any]]:
        """Its columns by name."""
        pairs: Iterable[tuple[str, Any]] = self.value.items()
        return pairs

    def inner(self) -> Iterable[Any] | None:
        values: Iterable[Any] = self.value.values()
        return values

    def converted(self, other: HeldColumn, path: str) -> Any:
        same = isinstance(other, (DictBatch, TensorDictBatch))
        return other.value if same else None


class DictBatch(InnerBatch):
    """A dict of columns."""

    __slots__ = ()
    family = dict
    is_in_dict = True

    def row_count(self, path: str) -> int | None:
        return row_counts(self.value, path)

    def leaf(self, rows: int, path: str) -> Any:
        names = self.value.items()
        leaves = {name: as_leaf(inner, rows, f"{path}[{name!r}]") for name, inner in names}
        return TensorDict(leaves, batch_size=[rows])

    def moved(self, mover: Mover, key: Key) -> Any:
        return like(self.value, mover.columns(self.value, key), 0)


class TensorDictBatch(InnerBatch):
    """A TensorDict."""

    __slots__ = ()
    family = TensorDictBase

    def row_count(self, path: str) -> int | None:
        sizes = non_tensor.sizes_of_batch(self.value)
        if not sizes:
            raise not_a_column(self.value, path)
        return int(sizes[0])

    def moved(self, mover: Mover, key: Key) -> Any:
        td = self.value
        device = None if td.device is None else mover.device
        columns = mover.columns(td, key)
        return TensorDict(columns, batch_size=td.batch_size, names=_names_of(td), device=device)


class LazyStack(TensorDictBatch):
    """A lazy stack of TensorDicts, whose members may differ."""

    __slots__ = ()

    def inner(self) -> Iterable[Any] | None:
        members: Iterable[Any] = self.value.tensordicts
        return members

    def moved(self, mover: Mover, key: Key) -> Any:
        members = [column_of(member).moved(mover, key) for member in self.value.tensordicts]
        return LazyStackedTensorDict(*members, stack_dim=self.value.stack_dim)


class TensorClass(InnerBatch):
    """A tensorclass: a TensorDict of its fields, and a dict of those that it cannot hold."""

    __slots__ = ()
    family = "tensorclass"

    def row_count(self, path: str) -> int | None:
        return TensorDictBatch(self.value).row_count(path)

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("user", None, None)

    def inner(self) -> Iterable[Any] | None:
        return [non_tensor.fields_of(self.value)[0]]

    def converted(self, other: HeldColumn, path: str) -> Any:
        return None

    def moved(self, mover: Mover, key: Key) -> Any:
        fields, others = non_tensor.fields_of(self.value)
        made = column_of(fields).moved(mover, key)
        return non_tensor.tensorclass_of(type(self.value), made, others)


class Open(HeldColumn):
    """An open batch, such as a `WireBatch`: it reads its columns when it is asked for them."""

    __slots__ = ()


# --- the table ---------------------------------------------------------------------------------


def _tensor_kind(tensor: torch.Tensor) -> type[HeldColumn]:
    """The class of a tensor, whose type does not say its layout."""
    if tensor.is_nested:
        return StridedNested
    return Dense if tensor.layout is torch.strided else Sparse


def _tensordict_kind(value: Any) -> type[HeldColumn]:
    return TensorClass if is_tensorclass(value) else TensorDictBatch


_Kind: TypeAlias = "type[HeldColumn] | Callable[[Any], type[HeldColumn]]"

_KINDS: tuple[tuple[type, _Kind], ...] = (
    (UnbatchedTensor, Unbatched),  # a tensor or a tensorclass, by the version of tensordict
    (NonTensorDataBase, Payloads),
    (NonTensorStack, Payloads),
    (NESTED_TENSOR, Jagged),
    (torch.Tensor, _tensor_kind),
    (dict, DictBatch),
    (np.ndarray, Array),
    (list, ObjectList),
    (PackedColumn, Packed),
    (LazyStackedTensorDict, LazyStack),
    (TensorDictBase, _tensordict_kind),
    (RaggedView, ViewColumn),
    (Batch, Open),
)
"""Types and what holds a value of each; the first that fits counts."""

_KIND_OF_TYPE: dict[type, _Kind] = {
    **dict.fromkeys((int, float, bool, str, bytes, tuple, type(None)), HeldColumn),
    **dict(_KINDS),
    **dict.fromkeys(TENSOR_TYPES, _tensor_kind),
    **dict.fromkeys((NonTensorData, NonTensorStack), Payloads),
    TensorDict: TensorDictBatch,
    UnbatchedTensor: Unbatched,
    NESTED_TENSOR: Jagged,
}
"""The same by the exact type of most columns: to ask about all others takes longer."""


def column_of(value: Any) -> HeldColumn:
    """The column that a value is."""
    kind: Any = _KIND_OF_TYPE.get(type(value)) or _kind_of(value)
    if kind is _tensor_kind:
        plain = value.layout is torch.strided and not value.is_nested  # as most are
        kind = Dense if plain else _tensor_kind(value)
    made: HeldColumn = kind(value)
    return made


def _kind_of(value: Any) -> type[HeldColumn]:
    """The class of a value of a rarer type."""
    for known, kind in _KINDS:
        if isinstance(value, known):
            return kind if isinstance(kind, type) else kind(value)
    return TensorClass if is_tensorclass(value) else HeldColumn


# --- functions over columns --------------------------------------------------------------------


def row_count(column: Any, path: str) -> int | None:
    """N, for any column; None if any N fits, as for a dict without columns."""
    return column_of(column).row_count(path)


def row_counts(columns: Mapping[str, Any], path: str) -> int | None:
    """N of a dict of columns, which must all have N rows; None if no column has rows."""
    rows: int | None = None
    if type(columns).items is not dict.items:  # a subclass may return other items
        columns = mapping_of(columns, path, "a dict of columns")
    for name, column in columns.items():
        found = row_count(column, f"{path}[{name!r}]")
        rows = found if rows is None else rows
        if found not in (None, rows):
            detail = f"expected {rows} rows like the columns before it, found {found}"
            raise ArgumentError("row_mismatch", f"{path}[{name!r}]", detail)
    return rows


def not_a_column(column: Any, path: str) -> ArgumentTypeError:
    """The error for a leaf without rows."""
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


def like(batch: Any, columns: dict[str, Any], rows: int) -> Any:
    """A batch of other columns, like a TensorDict (dim names, device) or a dict (`meta_info`)."""
    if isinstance(batch, dict):
        make: Callable[[dict[str, Any]], dict[str, Any]] = getattr(batch, "with_columns", dict)
        return make(columns)
    names = _names_of(batch)
    flat = all(column_of(leaf).is_flat for leaf in columns.values())
    if flat and names is None and batch.device is None and batch.batch_dims == 1:
        return non_tensor.batch_of(columns, rows)
    sizes = [rows, *batch.batch_size[1:]]
    return TensorDict(columns, batch_size=sizes, names=names, device=batch.device)


def _names_of(batch: Any) -> Any:
    """The dim names of a TensorDict; None if no dim has one."""
    # tensordict 0.10 rejects names, even None, if a leaf is a NonTensorStack.
    return batch.names if any(name is not None for name in batch.names) else None
