"""`BatchedDataDict`: a dict of columns with one entry per row.

After the class come its parts in pickles, and its state in messages. Pickles name `_of_parts` and
`_Parts`, so these keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from tensordict import TensorDict

from jagcodec._arguments import (
    FOREIGN_ERRORS,
    check_name,
    iterator_of,
    known_names,
    mapping_of,
    named_columns,
    require_flag,
)
from jagcodec._compiling import untraced
from jagcodec.columns.batch import ColumnDict, closed, with_closed
from jagcodec.columns.devices import moved
from jagcodec.columns.held import common_row_count, read_offsets, row_count
from jagcodec.columns.join import chosen_leaf
from jagcodec.errors import ArgumentError, ArgumentTypeError, brief, describe
from jagcodec.memory.plain_types import LENGTH_DTYPES, usable_device
from jagcodec.rows.chosen_rows import choose_rows
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.varlen import PackedColumn
from jagcodec.wire.compare import same_values
from jagcodec.wire.pickled import pickled_parts
from jagcodec.wire.registry import register_type, require_type
from jagcodec.wire.spec import BATCHED_DATA_DICT, PACKED_COLUMN

Self = TypeVar("Self", bound="BatchedDataDict")


@untraced
class BatchedDataDict(dict[str, Any]):
    """A dict of columns with N rows each: what `materialize` returns.

    `repeat_rows`, `split_rows`, `concat_rows` and the other functions of rows accept it. A column
    is a tensor (N, ...), a jagged tensor, a `PackedColumn`, a numpy array (N, ...), a list of N, or
    a batch of its own (a `WireBatch` is read); anything else belongs in `meta_info`.
    ``len(batch)`` is N, and not the number of columns. It can be pickled: its tensors are then in
    one message, from protocol 5 on in buffers out of band.

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
        super().__init__(_columns_by_name("BatchedDataDict(columns)", columns, **named))
        common_row_count(self, "BatchedDataDict")
        self.meta_info = {}
        if meta_info is not None:
            path = "BatchedDataDict(meta_info)"
            self.meta_info.update(mapping_of(meta_info, path, "a mapping of values by name"))

    @classmethod
    def of_equal_rows(cls: type[Self], columns: dict[str, Any]) -> Self:
        """A batch of columns that have the same number of rows, which is not checked."""
        batch = cls.__new__(cls)
        dict.update(batch, columns)
        batch.meta_info = {}
        return batch

    # A dict whose values are checked

    def __len__(self) -> int:
        """N, the number of rows; 0 without columns."""
        counts = (row_count(column, name) for name, column in self.items())
        return next((count for count in counts if count is not None), 0)

    def __bool__(self) -> bool:
        """Whether there are columns, as for any dict. A batch of columns without rows is true."""
        return bool(self.keys())

    def __setitem__(self, name: str, column: Any) -> None:
        check_name(name, "BatchedDataDict[name]")
        column = closed(column)
        count = row_count(column, f"BatchedDataDict[{name!r}]")
        others = (row_count(other, key) for key, other in self.items() if key != name)
        rows = next((other for other in others if other is not None), None)
        if count is not None and rows not in (None, count):
            detail = f"expected {rows} rows like the other columns, found {count}"
            raise ArgumentError("row_mismatch", f"BatchedDataDict[{name!r}]", detail)
        super().__setitem__(name, column)

    def setdefault(self, name: str, default: Any = None) -> Any:
        check_name(name, "BatchedDataDict.setdefault(name)")
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **named: Any) -> None:
        for name, column in _columns_by_name("BatchedDataDict.update", *args, **named).items():
            self[name] = column

    def __ior__(self: Self, other: Any) -> Self:  # type: ignore[override]
        self.update(other)
        return self

    def __or__(self: Self, other: Any) -> Self:  # type: ignore[override]
        return self.with_columns({**self, **_columns_by_name("BatchedDataDict | other", other)})

    def copy(self: Self) -> Self:
        """Another dict of the same columns."""
        return self.with_columns(self)

    __copy__ = copy

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        columns, attributes = deepcopy((dict(self), vars(self)), memo)
        return _of_parts(_Parts(type(self), columns, attributes))  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return pickled_parts(_of_parts, _split_for_pickle(self), 4)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self).__reduce__ is not BatchedDataDict.__reduce__:
            return self.__reduce__()  # a subclass has its own
        return pickled_parts(_of_parts, _split_for_pickle(self), protocol)

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
        return chosen_leaf(self, rows, pool, "BatchedDataDict")  # type: ignore[no-any-return]

    def select(self: Self, names: Iterable[str]) -> Self:
        """The columns of these names, in this order; aliased.

        Raises:
            ArgumentKeyError: A name is not a column.
        """
        names = known_names(names, self, "BatchedDataDict.select")
        return self.with_columns({name: self[name] for name in names})

    def union(self: Self, other: Mapping[str, Any]) -> Self:
        """The columns of both, and the `meta_info` of both; aliased.

        Raises:
            ArgumentError: A column, or an entry of `meta_info`, is in both with unequal values
                (compared bit for bit; NaN equals itself), or numbers of rows differ.
            ArgumentTypeError: A value is not a column.
        """
        both, path = self.with_columns(self), "BatchedDataDict.union(other)"
        for name, column in with_closed(named_columns(other, path)).items():
            if name not in both:
                both[name] = column
            elif not same_values(both[name], column):
                raise _conflict(f"union(other)[{name!r}]", "the same values")
        meta = mapping_of(getattr(other, "meta_info", {}), f"{path}.meta_info", "a mapping")
        for key, value in meta.items():
            if not same_values(both.meta_info.setdefault(key, value), value):
                where = f"union(other).meta_info[{brief(key)}]"
                raise _conflict(where, brief(both.meta_info[key]))
        return both

    def to(self: Self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Every tensor on another device; columns of equal rows still share their offsets.

        Columns that are there already, and columns without tensors, are aliased. Copies to the host
        are always complete on return, even with `non_blocking`. With it, an accelerator may still
        be reading columns that are in page-locked memory: wait before you change them.

        Raises:
            ArgumentError: There is no such device.
        """
        where = "BatchedDataDict.to"
        target = usable_device(device, f"{where}(device)")
        non_blocking = require_flag(non_blocking, f"{where}(non_blocking)")
        if target is None:
            return self.copy()

        def path_of(key: tuple[str, ...]) -> str:
            return f"{where}({'.'.join(key)!r})"

        columns = moved(self, target, RowSplitsPool(), path_of, non_blocking=non_blocking)
        return self.with_columns(columns)


def _columns_by_name(path: str, *columns: Any, **named: Any) -> dict[str, Any]:
    """Columns by name, from what the constructor of a dict accepts."""
    try:
        pairs = (each if hasattr(each, "keys") else iterator_of(each) for each in columns)
        by_name = dict(*pairs, **named)
    except FOREIGN_ERRORS as error:
        detail = f"expected columns by name, or pairs of them, found {describe(columns[0])}"
        raise ArgumentTypeError("bad_type", path, detail) from error
    return with_closed(named_columns(by_name, path))


def _conflict(where: str, expected: str) -> ArgumentError:
    """The error for one name that has unequal values in both batches of a union."""
    detail = f"expected {expected:.80} under one name in both, found others; rename one"
    return ArgumentError("conflict", f"BatchedDataDict.{where}", detail)


# --- pickled -----------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """A batch taken apart for a pickle; batches that are its columns are taken apart, too."""

    kind: Any
    columns: dict[str, Any]
    attributes: dict[str, Any]


def _split_for_pickle(batch: Any) -> Any:
    """The parts of a batch, so that all its tensors are in one message; any other column itself."""
    if isinstance(batch, BatchedDataDict):
        attributes = vars(batch)
    elif type(batch) is TensorDict and not batch.is_memmap():
        size, device, lock = batch.batch_size, batch.device, batch.is_locked
        attributes = {"batch_size": size, "device": device, "lock": lock}
        if any(name is not None for name in batch.names):
            attributes["names"] = batch.names
    else:
        return batch
    # Ask for items, because a TensorDict iterates over its rows.
    columns = {name: _split_for_pickle(column) for name, column in batch.items()}
    return _Parts(type(batch), columns, attributes)


def _of_parts(parts: Any) -> Any:
    """The batch that `_split_for_pickle` took apart; any other column itself."""
    if not isinstance(parts, _Parts):
        return parts
    columns = {name: _of_parts(column) for name, column in parts.columns.items()}
    if parts.kind is TensorDict:
        return TensorDict(columns, **parts.attributes)
    batch = parts.kind(columns, meta_info=parts.attributes["meta_info"])
    vars(batch).update(parts.attributes)
    return batch


# --- on the wire -------------------------------------------------------------------------------


def _state_of_batch(batch: BatchedDataDict) -> list[dict[str, Any]]:
    """The columns and the `meta_info` of a batch, for a message."""
    # Columns may have changed since they were set.
    rows = common_row_count(batch, "BatchedDataDict") or 0
    return [ColumnDict(batch, rows), batch.meta_info]


def _batch_of_state(state: Any) -> BatchedDataDict:
    """The batch of a state, which a stranger may have written."""
    columns, meta_info = state
    return BatchedDataDict(columns, meta_info=meta_info)


def _packed_of_state(state: Any) -> PackedColumn:
    """The packed column of a state, which a stranger may have written: its parts are checked."""
    # Pass fields by name: one that a later version adds has a default for earlier messages.
    column = PackedColumn(**require_type(state, dict))
    require_type(column.max_seqlen, int)
    values, cu_seqlens, _, position_ids = column
    tensors = values, cu_seqlens, position_ids
    dims = [require_type(tensor, torch.Tensor).dim() for tensor in tensors]
    strided = all(tensor.layout is torch.strided for tensor in tensors)
    # The reader of rows checks whether the offsets fit the values.
    offsets = dims[1] == 1 and cu_seqlens.dtype in LENGTH_DTYPES and len(cu_seqlens) > 0
    if not (strided and offsets and dims[0]):
        raise ValueError("expected values, (N + 1,) integers as cu_seqlens, and position_ids")
    return column


# What `materialize` returns can itself be sent.
register_type(
    BatchedDataDict, BATCHED_DATA_DICT, to_state=_state_of_batch, from_state=_batch_of_state
)
register_type(
    PackedColumn, PACKED_COLUMN, to_state=PackedColumn._asdict, from_state=_packed_of_state
)
