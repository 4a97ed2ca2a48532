"""Classes for columns of tensors and for leaves of TensorDicts: imported when there is one.

First come tensors and `PackedColumn`, then what only a TensorDict holds. Functions that make
tensors and leaves of rows in other forms follow; some have a second name, by which `held` makes
what ``batch[name]`` returns. `add_kinds` at the end has the table of types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

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

from jagcodec._arguments import FOREIGN_ERRORS
from jagcodec.columns.batch import CellRows, FieldSchema, Name, OneObject, packed_field
from jagcodec.columns.held import (
    Array,
    HeldBatch,
    HeldColumn,
    Mover,
    ObjectList,
    ShapedColumn,
    add_kinds,
    column_of,
    not_a_column,
)
from jagcodec.errors import ArgumentError, ArgumentTypeError
from jagcodec.memory.arrays import is_numeric
from jagcodec.memory.plain_types import TENSOR_TYPES, check_plain
from jagcodec.memory.staging import to_device
from jagcodec.memory.tensor_bytes import array_in_storage, as_bytes, resolved
from jagcodec.rows import non_tensor
from jagcodec.rows.copy_rows import owned_values, values_of
from jagcodec.rows.nested import (
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
from jagcodec.rows.non_tensor import leaf_of_rows as leaf_of_rows  # `held` calls it from here
from jagcodec.rows.row_splits import RowSplits, RowSplitsPool
from jagcodec.rows.varlen import PackedColumn, check_varlen, varlen_column, view_of_varlen
from jagcodec.rows.views import RaggedView


class TensorColumn(ShapedColumn):
    """A tensor of any layout."""

    __slots__ = ()
    family = torch.Tensor
    is_leaf = True
    has_tensor = True

    def check(self, path: str) -> None:
        check_column(self.value, path)

    def column_from(self, other: HeldColumn, path: str) -> Any:
        numbers = isinstance(other, Array) and is_numeric(other.value)
        return other.leaf(0, path) if numbers or isinstance(other, Packed) else None

    def moved(self, mover: Mover, key: Name) -> Any:
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

    def on_host(self, path: str) -> Any:
        check_plain(self.value, path)
        tensor = self.value
        splits, shape = RowSplits.of_cells(len(tensor)), tuple(tensor.shape)
        return CellRows(RaggedView(as_bytes(tensor), tensor.dtype, shape, 1, None, splits))

    def array_for_join(self, *, numbers: bool) -> npt.NDArray[Any] | None:
        tensor = self.value
        with suppress(TypeError, RuntimeError):  # numpy lacks the dtype
            if numbers and tensor.is_cpu and not tensor.requires_grad:
                array: npt.NDArray[Any] = resolved(tensor).numpy()
                return array
        return None


class Sparse(TensorColumn):
    """A tensor of a layout whose rows cannot be chosen."""

    __slots__ = ()

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema(str(self.value.layout).removeprefix("torch."), None, None)


class StridedNested(TensorColumn):
    """A nested tensor of torch's older layout: rows that may differ in every dim."""

    __slots__ = ()

    def row_count(self, path: str) -> int | None:
        check_column(self.value, path)
        return int(self.value.size(0))

    def sizes(self, wanted: list[int]) -> list[int]:
        return [self.value.size(0), *wanted[1:]]  # only the first dim has one size

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
        """A value of this class is never of a subclass."""

    def row_count(self, path: str) -> int | None:
        return rows_in(self.value)

    def sizes(self, wanted: list[int]) -> list[int]:
        # To ask for its shape takes longer.
        return [
            rows_in(self.value),
            *(self.value.shape[1 : len(wanted)] if len(wanted) > 1 else ()),
        ]

    def field(self, rows: int) -> FieldSchema:
        values, _, _, dim = parts_of(self.value)
        inner: list[int | None] = [*values.shape]
        inner[dim - 1] = None
        return FieldSchema("jagged", self.value.dtype, (rows, *inner))

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        return view_of(self.value, path, pool, detach=detach)

    def on_host(self, path: str) -> Any:
        return _rows_on_host(view_of(self.value, path))

    def jagged_view(self, path: str, pool: RowSplitsPool) -> RaggedView | None:
        return view_of(self.value, path, pool)

    def with_shared_offsets(self, path: str, pool: RowSplitsPool) -> Any:
        view = view_of(self.value, path, pool, detach=False)
        row_splits = pool.unique(view.row_splits)
        offsets = row_splits.offsets_tensors.get(self.value.device)
        if offsets is offsets_of(self.value) and view.is_end_to_end:
            return self.value
        return nested_tensor(values_of(view), row_splits, view.ragged_dim)

    def moved(self, mover: Mover, key: Name) -> Any:
        if mover.is_there(self.value):
            return self.value
        parts = parts_of(self.value, detach=False)
        view = mover.view(view_of_parts(parts, mover.path_of(key), mover.pool, mover.copies))
        copy = nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
        mover.pool.remember(parts_of(copy).offsets, view.row_splits)
        return copy

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
    """A `PackedColumn`: rows end to end, with `cu_seqlens` and position ids."""

    __slots__ = ()
    family = PackedColumn
    needs_leaf_form = True
    is_packed = True

    def row_count(self, path: str) -> int | None:
        check_varlen(self.value, path)
        return len(self.value.cu_seqlens) - 1

    def sizes(self, wanted: list[int]) -> list[int]:
        return [len(self.value.cu_seqlens) - 1]

    def on_host(self, path: str) -> Any:
        return _rows_on_host(self.view(path, RowSplitsPool(), detach=True))

    def field(self, rows: int) -> FieldSchema:
        values, ids = self.value.values, self.value.position_ids
        return packed_field(values.dtype, tuple(values.shape), tuple(ids.shape), rows)

    def view(self, path: str, pool: RowSplitsPool, *, detach: bool) -> RaggedView | None:
        column = self.value
        if detach:
            column = column._replace(values=column.values.detach())
        return view_of_varlen(column, path, pool)

    def leaf(self, rows: int, path: str) -> Any:
        return leaf_of_view(view_of_varlen(self.value, path))

    def from_view(self, view: RaggedView, path: str) -> Any:
        return varlen_column(view, path)

    def column_from(self, other: HeldColumn, path: str) -> Any:
        if not isinstance(other, Jagged):
            return None
        return varlen_column(view_of(other.value, path, detach=False), path)

    def moved(self, mover: Mover, key: Name) -> Any:
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


class Unbatched(HeldColumn):
    """An `UnbatchedTensor`: one tensor that belongs to all rows."""

    __slots__ = ()
    family = UnbatchedTensor
    # Before tensordict 0.12 it is a tensorclass.
    is_leaf: ClassVar[bool] = issubclass(UnbatchedTensor, torch.Tensor)

    def check(self, path: str) -> None:
        check_column(self.value, path)

    def row_count(self, path: str) -> int | None:
        return None

    def sizes(self, wanted: list[int]) -> list[int]:
        return wanted

    def moved(self, mover: Mover, key: Name) -> Any:
        size, tensor = non_tensor.unbatched_parts(self.value)
        if mover.is_there(tensor):
            return self.value
        return non_tensor.unbatched_of(size, mover.checked_tensor(tensor, key))

    def cells(self) -> torch.Tensor | None:
        return self.value if isinstance(self.value, torch.Tensor) else None

    def tensors(self) -> Sequence[Any]:
        return (non_tensor.unbatched_parts(self.value)[1],)


# --- what a TensorDict holds -------------------------------------------------------------------


class _HasBatchSize(HeldColumn):
    """A value that knows its batch size, whose first number is that of the rows."""

    __slots__ = ()

    def row_count(self, path: str) -> int | None:
        sizes = non_tensor.sizes_of_batch(self.value)
        if not sizes:
            raise not_a_column(self.value, path)
        return int(sizes[0])

    def sizes(self, wanted: list[int]) -> list[int]:
        return non_tensor.sizes_of_batch(self.value)[: len(wanted)]


class Payloads(_HasBatchSize):
    """A leaf of a TensorDict with Python objects: one for each row, or one of the whole batch."""

    __slots__ = ()
    family = NonTensorData
    is_leaf = True

    def array_for_join(self, *, numbers: bool) -> npt.NDArray[Any] | None:
        return non_tensor.array_of_leaf(self.value)

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("object", None, None)

    def objects(self) -> list[Any] | None:
        return non_tensor.rows_of_leaf(self.value, self.value.batch_size[0])

    def on_host(self, path: str) -> Any:
        if non_tensor.is_stack(self.value):
            return self.object_array()
        rows, *inner = self.value.batch_size
        return OneObject(self.value.data, rows, tuple(inner))

    def objects_to_send(self) -> list[Any] | None:
        stack = self.value
        return non_tensor.payloads_of_stack(stack) if non_tensor.is_stack(stack) else None

    def object_array(self) -> Any:
        return non_tensor.objects_of_leaf(self.value)

    def user_value(self, path: str) -> Any:
        return self.object_array()

    def column_from(self, other: HeldColumn, path: str) -> Any:
        if isinstance(other, ObjectList):
            return other.leaf(0, path)
        if not isinstance(other, Array) or is_numeric(other.value):
            return None
        if non_tensor.array_of_leaf(self.value) is None:
            return non_tensor.leaf_of_array(other.value)
        return NonTensorData(other.value, batch_size=[len(other.value)])


class TensorDictBatch(_HasBatchSize, HeldBatch):
    """A TensorDict: a batch of any number of batch dims, whose first dim has the rows."""

    __slots__ = ()
    family = TensorDictBase
    has_columns = True

    def check_batch(self, path: str) -> None:
        if not self.value.batch_dims:
            detail = "expected batch size (N, ...), found no batch dim; set batch_size = [N]"
            raise ArgumentError("bad_shape", path, detail)

    def leaves(self) -> Iterable[tuple[str, Any]] | None:
        pairs: Iterable[tuple[str, Any]] = self.value.items()
        return pairs

    def inner_sizes(self, path: str) -> tuple[int, ...]:
        return tuple(self.value.batch_size[1:])

    def moved(self, mover: Mover, key: Name) -> Any:
        td = self.value
        device = None if td.device is None else mover.device
        columns = mover.columns(td, key)
        return TensorDict(columns, batch_size=td.batch_size, names=_names_of(td), device=device)

    def with_columns(self, columns: dict[str, Any], rows: int) -> Any:
        td, names = self.value, _names_of(self.value)
        flat = all(column_of(leaf).is_leaf for leaf in columns.values())
        if flat and names is None and td.device is None and td.batch_dims == 1:
            return non_tensor.batch_of(columns, rows)
        sizes = [rows, *td.batch_size[1:]]
        return TensorDict(columns, batch_size=sizes, names=names, device=td.device)


class LazyStack(TensorDictBatch):
    """A lazy stack of TensorDicts, whose members may differ."""

    __slots__ = ()

    def check_batch(self, path: str) -> None:
        raise ArgumentTypeError("bad_type", path, _lazy_stack_detail(self.value))

    def leaves(self) -> Iterable[tuple[str, Any]] | None:
        return None

    def inner_sizes(self, path: str) -> tuple[int, ...]:
        raise ArgumentError("bad_option", path, _lazy_stack_detail(self.value))

    def inner_columns(self) -> Iterable[Any] | None:
        members: Iterable[Any] = self.value.tensordicts
        return members

    def moved(self, mover: Mover, key: Name) -> Any:
        members = [column_of(member).moved(mover, key) for member in self.value.tensordicts]
        return LazyStackedTensorDict(*members, stack_dim=self.value.stack_dim)


def _lazy_stack_detail(stack: LazyStackedTensorDict) -> str:
    """The detail of the error for a lazy stack, with a remedy that works for this one."""
    members = stack.tensordicts
    are_rows = not members[0].batch_dims
    remedy = "pass each of its .tensordicts"
    if are_rows:
        remedy = "pass pack_rows(stack.tensordicts), or encode_rows(stack.tensordicts) to send it"
    try:
        most = _differing_dims(members)
    except FOREIGN_ERRORS:  # of a leaf that tensordict or torch cannot describe
        most = None
    if most == 0:
        remedy = f"call .contiguous() on it, or {remedy}"
    elif most == 1 and are_rows:
        remedy = f"call .densify(layout=torch.jagged) on it, or {remedy}"
    detail = "expected a TensorDict, found a lazy stack, whose rows may differ in keys and shapes"
    return f"{detail}; {remedy}"


def _differing_dims(members: Sequence[TensorDictBase]) -> int | None:
    """In how many dims leaves differ between members, at most; None if not only in sizes."""
    if len({frozenset(member.keys(include_nested=True)) for member in members}) > 1:
        return None
    forms: dict[Any, list[Any]] = {}
    for member in members:
        for name, leaf in member.items(include_nested=True, leaves_only=True):
            forms.setdefault(name, []).append(leaf)
    most = 0
    for leaves in forms.values():
        kinds = {(leaf.dtype, leaf.ndim, leaf.layout, leaf.is_nested) for leaf in leaves}
        if len(leaves) < len(members) or len(kinds) > 1 or leaves[0].layout != torch.strided:
            return None
        sizes = zip(*(leaf.shape for leaf in leaves), strict=True)
        most = max(most, sum(len({*each}) > 1 for each in sizes))
    return most


class TensorClass(HeldBatch):
    """A tensorclass: a TensorDict of its fields, and a dict of those that it cannot hold."""

    __slots__ = ()
    family = "tensorclass"

    def row_count(self, path: str) -> int | None:
        return TensorDictBatch(self.value).row_count(path)

    def sizes(self, wanted: list[int]) -> list[int]:
        return TensorDictBatch(self.value).sizes(wanted)

    def field(self, rows: int) -> FieldSchema:
        return FieldSchema("user", None, None)

    def inner_columns(self) -> Iterable[Any] | None:
        return [non_tensor.fields_of(self.value)[0]]

    def other_fields(self) -> dict[str, Any] | None:
        return non_tensor.fields_of(self.value)[1]

    def column_from(self, other: HeldColumn, path: str) -> Any:
        return None

    def moved(self, mover: Mover, key: Name) -> Any:
        fields, others = non_tensor.fields_of(self.value)
        columns = column_of(fields).moved(mover, key)
        return non_tensor.tensorclass_of(type(self.value), columns, others)


# --- tensors and leaves of rows in other forms -------------------------------------------------


def nested_of_view(view: RaggedView) -> torch.Tensor:
    """The rows of a view as a nested tensor, which may alias its memory."""
    return nested_tensor(values_of(view), view.row_splits, view.ragged_dim)


def leaf_of_view(view: RaggedView) -> torch.Tensor:
    """The rows of a view as a nested tensor in memory that may be written to."""
    return nested_tensor(owned_values(view), view.row_splits, view.ragged_dim)


def tensor_of_view(view: RaggedView) -> torch.Tensor:
    """Rows of one cell each as a tensor in memory that may be written to."""
    return owned_values(view)


def array_leaf(array: npt.NDArray[Any], path: str) -> Any:
    """An array (N, ...) as a leaf: numbers as a tensor, which may alias it."""
    try:
        return non_tensor.leaf_of_array(array)
    except TypeError as error:  # torch lacks a dtype of numbers
        detail = f"expected a dtype that torch has, found {array.dtype}; convert it by .astype"
        raise ArgumentTypeError("bad_dtype", path, detail) from error


# --- what ``batch[name]`` returns --------------------------------------------------------------

# `columns.user_arrays` has functions of these names, too: `held` calls those of one module. They
# are the functions above, without a call between.
user_value_of_view = leaf_of_view
user_value_of_rectangle = tensor_of_view
user_value_of_numbers = array_leaf

# --- leaves of a TensorDict --------------------------------------------------------------------


def on_device(leaf: Any, device: torch.device) -> Any:
    """A leaf on a device; a leaf without cells is returned unchanged."""
    return to_device(leaf, device) if isinstance(leaf, torch.Tensor) else leaf


def leaf_of_one_object(one: OneObject) -> NonTensorData:
    """An object of N rows as a leaf of a TensorDict."""
    return NonTensorData(one.data, batch_size=[one.rows, *one.inner_sizes])


def batch_of_leaves(leaves: dict[str, Any], rows: int) -> TensorDict:
    """A TensorDict (N,) of leaves."""
    return TensorDict(leaves, batch_size=[rows])


def _names_of(batch: Any) -> Any:
    """The dim names of a TensorDict; None if no dim has one."""
    # tensordict 0.10 rejects names, even None, if a leaf is a NonTensorStack.
    return batch.names if any(name is not None for name in batch.names) else None


def _rows_on_host(view: RaggedView | None) -> RaggedView | None:
    """The rows of a view, whose memory may be a tensor on a device, end to end on the host."""
    if view is None or not view.is_tensor:
        return view
    values = values_of(view)
    data, shape = as_bytes(values), tuple(values.shape)
    return RaggedView(data, values.dtype, shape, view.ragged_dim, None, view.row_splits)


# --- the table ---------------------------------------------------------------------------------


def _tensor_kind(tensor: torch.Tensor) -> type[HeldColumn]:
    """The class of a tensor, whose type does not say its layout."""
    if tensor.is_nested:
        return StridedNested
    return Dense if tensor.layout is torch.strided else Sparse


add_kinds(
    (
        (UnbatchedTensor, Unbatched),  # a tensor or a tensorclass, by the version of tensordict
        (non_tensor.NonTensorDataBase, Payloads),
        (NonTensorStack, Payloads),
        (NESTED_TENSOR, Jagged),
        (torch.Tensor, _tensor_kind),
        (PackedColumn, Packed),
        (LazyStackedTensorDict, LazyStack),
        (TensorDictBase, lambda value: TensorClass if is_tensorclass(value) else TensorDictBatch),
    ),
    (object, lambda value: TensorClass if is_tensorclass(value) else HeldColumn),
    {
        **dict.fromkeys(TENSOR_TYPES, _tensor_kind),
        **dict.fromkeys((NonTensorData, NonTensorStack), Payloads),
        PackedColumn: Packed,
        TensorDict: TensorDictBatch,
        LazyStackedTensorDict: LazyStack,
        UnbatchedTensor: Unbatched,
        NESTED_TENSOR: Jagged,
    },
)
