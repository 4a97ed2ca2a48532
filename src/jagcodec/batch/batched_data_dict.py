"""`BatchedDataDict`: a dict of columns with one entry per row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from jagcodec._arguments import known_names
from jagcodec.batch.compare import same_values
from jagcodec.batch.devices import moved, read_offsets
from jagcodec.errors import ArgumentError
from jagcodec.memory.plain_types import usable_device
from jagcodec.memory.tensor_bytes import as_words, from_words
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.nested import is_jagged, nested_tensor, view_of
from jagcodec.ragged.row_index import choose_rows
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.select import row_count, row_counts, select_leaf
from jagcodec.ragged.varlen import PackedColumn
from jagcodec.wire.lowered import ColumnDict
from jagcodec.wire.registry import BATCHED_DATA_DICT, register_type

Self = TypeVar("Self", bound="BatchedDataDict")


class BatchedDataDict(dict[str, Any]):
    """A dict of columns with N rows each: what `materialize` returns.

    `repeat_rows`, `split_rows`, `concat_rows` and the other functions of rows accept it. A column
    is a tensor (N, ...), a jagged tensor, a `PackedColumn`, a numpy array (N, ...), a list of N, or
    a `BatchedDataDict` of its own; anything else belongs in `meta_info`. ``len(batch)`` is N, and
    not the number of columns.

    Attributes:
        meta_info: What belongs to the whole batch, by name. It goes where the batch goes: on the
            wire, in pickles, and into every batch made from this one (the dict is copied, its
            values are not).

    Args:
        columns: Name to column, or pairs of them, as for `dict`.
        meta_info: The attribute. A column of this name can be set by ``batch["meta_info"]``.
        **named: More columns.

    Raises:
        ArgumentError: Columns differ in their number of rows, here or when one is set.
        ArgumentTypeError: A value is not a column.

    Example:
        >>> import torch
        >>> from jagcodec import BatchedDataDict, split_rows
        >>> batch = BatchedDataDict({"reward": torch.arange(4.0)}, meta_info={"step": 7})
        >>> shuffled = batch.rows(torch.randperm(4))
        >>> [(len(mini), mini.meta_info["step"]) for mini in split_rows(shuffled, 2)]
        [(2, 7), (2, 7)]
    """

    meta_info: dict[str, Any]

    def __init__(
        self,
        columns: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        /,
        *,
        meta_info: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(columns, **named)
        row_counts(self, "BatchedDataDict")
        self.meta_info = dict(meta_info or {})

    @classmethod
    def of_equal_rows(cls: type[Self], columns: dict[str, Any]) -> Self:
        """A batch of columns that are known to have the same number of rows: nothing is checked."""
        batch = cls.__new__(cls)
        dict.update(batch, columns)
        batch.meta_info = {}
        return batch

    # A dict whose values are checked

    def __len__(self) -> int:
        """N, the number of rows; 0 where there is no column."""
        counts = (row_count(column, name) for name, column in self.items())
        return next((count for count in counts if count is not None), 0)

    def __bool__(self) -> bool:
        """Whether there are columns, as for any dict; a batch of no rows is still a batch."""
        return bool(self.keys())

    def __setitem__(self, name: str, column: Any) -> None:
        found = row_count(column, f"BatchedDataDict[{name!r}]")
        others = (row_count(other, key) for key, other in self.items() if key != name)
        rows = next((count for count in others if count is not None), None)
        if found is not None and rows not in (None, found):
            detail = f"expected {rows} rows like the other columns, found {found}"
            raise ArgumentError("row_mismatch", f"BatchedDataDict[{name!r}]", detail)
        super().__setitem__(name, column)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **named: Any) -> None:
        for name, column in dict(*args, **named).items():
            self[name] = column

    def __ior__(self: Self, other: Any) -> Self:  # type: ignore[override]
        self.update(other)
        return self

    def __or__(self: Self, other: Any) -> Self:  # type: ignore[override]
        return self.with_columns({**self, **other})

    def copy(self: Self) -> Self:
        """Another dict of the same columns."""
        return self.with_columns(self)

    def __reduce__(self) -> Any:
        # Without what its tensors are slices of; a column of two names stays one.
        kept: dict[int, Any] = {}
        for column in self.values():
            if isinstance(column, PackedColumn):
                kept[id(column)] = column._replace(values=_without_rest(column.values))
            elif isinstance(column, torch.Tensor):
                kept[id(column)] = _without_rest(column)
        columns = {name: kept.get(id(column), column) for name, column in self.items()}
        return partial(type(self), meta_info=self.meta_info), (columns,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={len(self)}, columns={list(self)})"

    def with_columns(self: Self, columns: Mapping[str, Any]) -> Self:
        """A batch of other columns and the same `meta_info`."""
        return type(self)(columns, meta_info=self.meta_info)

    # Rows and columns

    def rows(self: Self, index: Any) -> Self:
        """These rows, in this order; see `select_rows`."""
        rows, pool = choose_rows(index, len(self), "select_rows(index)"), RowSplitsPool()
        read_offsets([self], pool)
        return select_leaf(self, rows, pool, "BatchedDataDict")  # type: ignore[no-any-return]

    def select(self: Self, names: Iterable[str]) -> Self:
        """The columns of these names, in this order; aliased.

        Raises:
            ArgumentKeyError: A name is not a column.
        """
        listed = known_names(names, self, "BatchedDataDict.select")
        return self.with_columns({name: self[name] for name in listed})

    def union(self: Self, other: Mapping[str, Any]) -> Self:
        """The columns of both, and the `meta_info` of both; aliased.

        Raises:
            ArgumentError: A column, or an entry of `meta_info`, is in both with unequal values
                (compared bit for bit; NaN equals itself), or numbers of rows differ.
            ArgumentTypeError: A value is not a column.
        """
        both = self.with_columns(self)
        for name, column in other.items():
            if name not in both:
                both[name] = column
            elif not same_values(both[name], column):
                raise _conflict(f"union(other)[{name!r}]", "the same values")
        for key, value in getattr(other, "meta_info", {}).items():
            if not same_values(both.meta_info.setdefault(key, value), value):
                raise _conflict(f"union(other).meta_info[{key!r}]", repr(both.meta_info[key]))
        return both

    def to(self: Self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Every tensor on another device; columns of equal rows still share their offsets.

        Columns that are there already, and those without tensors, are aliased. Whatever goes to
        the host has arrived when this returns, with `non_blocking`, too. With it, an accelerator
        may still be reading columns that are in page-locked memory: wait before you change them.

        Raises:
            ArgumentError: There is no such device.
        """
        where = "BatchedDataDict.to"
        target = usable_device(device, f"{where}(device)")
        if target is None:
            return self.copy()
        place = lambda key: f"{where}({'.'.join(key)!r})"  # noqa: E731
        columns = moved(self, target, RowSplitsPool(), place, non_blocking=non_blocking)
        return self.with_columns(columns)


def _conflict(where: str, expected: str) -> ArgumentError:
    detail = f"expected {expected:.80} under one name in both, found others; rename one"
    return ArgumentError("conflict", f"BatchedDataDict.{where}", detail)


# --- pickled -----------------------------------------------------------------------------------


def _without_rest(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage, which pickle writes whole, holds nothing else; copied if a slice."""
    # Only leaves of autograd are pickled, and a slice is not one.
    if leaf.requires_grad or (leaf.is_nested and not is_jagged(leaf)):
        return leaf
    if is_jagged(leaf):
        view = view_of(leaf, "pickle")
        values = _without_rest(values_of(view)) if view.starts is None else values_of(view)
        if values is view.memory:
            return leaf
        return nested_tensor(values, view.row_splits, view.ragged_dim)
    if leaf.layout is not torch.strided or leaf.untyped_storage().nbytes() <= leaf.nbytes:
        return leaf
    return from_words(as_words(leaf).clone(), leaf.dtype)


# --- on the wire -------------------------------------------------------------------------------


def _state(batch: BatchedDataDict) -> list[dict[str, Any]]:
    return [ColumnDict(batch), batch.meta_info]


def _of_state(state: Any) -> BatchedDataDict:
    columns, meta_info = state
    return BatchedDataDict(columns, meta_info=meta_info)


# So that what `materialize` returns can itself be sent on.
register_type(BatchedDataDict, BATCHED_DATA_DICT, to_state=_state, from_state=_of_state)
register_type(PackedColumn, "jagcodec.PackedColumn", to_state=tuple, from_state=PackedColumn._make)
