"""Columns and devices: moved from one to another, and their offsets read, with one wait.

Separate copies to the host would each wait for everything that the device was asked to do before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    is_tensorclass,
)

from jagcodec.errors import ArgumentError
from jagcodec.memory.plain_types import TENSOR_TYPES, check_plain
from jagcodec.memory.staging import HostCopies, to_device
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.forms import like
from jagcodec.ragged.nested import (
    check_column,
    is_jagged,
    nested_tensor,
    offsets_of,
    parts_of,
    view_of_parts,
)
from jagcodec.ragged.non_tensor import (
    fields_of,
    is_non_tensor,
    tensorclass_of,
    unbatched_of,
    unbatched_parts,
)
from jagcodec.ragged.row_splits import RowSplitsPool
from jagcodec.ragged.varlen import PackedColumn, view_of_varlen
from jagcodec.ragged.views import RaggedView, end_to_end
from jagcodec.wire.lowered import Columns

PathOf = Callable[[tuple[str, ...]], str]
"""Where an error about a column is, by all the names of the column."""


def moved(
    columns: Mapping[str, Any],
    device: torch.device,
    pool: RowSplitsPool,
    path_of: PathOf,
    *,
    non_blocking: bool = False,
) -> dict[str, Any]:
    """Columns by name with their tensors on a device; gradients flow through them.

    A column without a tensor, or on that device, is returned unchanged. Copies to the host are
    complete. `non_blocking` is that of `to_device`.
    """
    move = _Move(device, pool, path_of, non_blocking)
    if device.type == "cpu":
        move.copies.fetch(
            part for leaf in _each_leaf(columns.values()) for part in _tensors_to_fetch(leaf)
        )
    return move.columns(columns, ())


@dataclass(slots=True)
class _Move:
    """Moves one batch to a device."""

    device: torch.device
    pool: RowSplitsPool
    path_of: PathOf
    non_blocking: bool
    copies: HostCopies = field(default_factory=lambda: HostCopies(kept=True))
    # Tensors that were moved, by id, each with its copy.
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def columns(self, columns: Mapping[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
        # Use items: iterating over a TensorDict gives its rows.
        return {name: self.leaf(leaf, (*above, name)) for name, leaf in columns.items()}

    def leaf(self, leaf: Any, key: tuple[str, ...]) -> Any:
        if isinstance(leaf, UnbatchedTensor):
            size, tensor = unbatched_parts(leaf)
            if self._is_there(tensor):
                return leaf
            self._check_memory(tensor, key)
            return unbatched_of(size, self._move_tensor(tensor))
        if isinstance(leaf, torch.Tensor):
            if self._is_there(leaf):
                return leaf
            if is_jagged(leaf):
                return self._move_jagged(leaf, key)
            check_column(leaf, self.path_of(key))
            self._check_memory(leaf, key)
            return self._move_tensor(leaf)
        if isinstance(leaf, PackedColumn):
            return leaf if self._is_there(leaf.values) else self._move_packed(leaf)
        if isinstance(leaf, RaggedView):
            return leaf if self._is_there(leaf) else self._move_view(leaf)
        return self._move_batch(leaf, key) if _is_batch(leaf) else leaf

    def _check_memory(self, tensor: torch.Tensor, key: tuple[str, ...]) -> None:
        """Refuse a tensor whose cells are not in memory, unless they are not needed."""
        if tensor.is_meta or (_is_plain(tensor) and self.device.type != "meta"):
            check_plain(tensor, self.path_of(key))

    def _is_there(self, leaf: torch.Tensor | RaggedView) -> bool:
        return leaf.device == self.device

    def _move_batch(self, leaf: Any, key: tuple[str, ...]) -> Any:
        """A batch inside the batch, of the same type."""
        if isinstance(leaf, Columns):
            return leaf._replace(columns=self.columns(leaf.columns, key))
        if isinstance(leaf, dict):
            return like(leaf, self.columns(leaf, key), 0)
        if isinstance(leaf, LazyStackedTensorDict):
            members = [self._move_batch(member, key) for member in leaf.tensordicts]
            return LazyStackedTensorDict(*members, stack_dim=leaf.stack_dim)
        if isinstance(leaf, TensorDictBase):
            names = leaf.names if any(name is not None for name in leaf.names) else None
            device = None if leaf.device is None else self.device
            columns = self.columns(leaf, key)
            return TensorDict(columns, batch_size=leaf.batch_size, names=names, device=device)
        fields, others = fields_of(leaf)  # the leaf is a tensorclass
        return tensorclass_of(type(leaf), self._move_batch(fields, key), others)

    def _move_jagged(self, leaf: torch.Tensor, key: tuple[str, ...]) -> torch.Tensor:
        parts = parts_of(leaf, detach=False)
        view = self._move_view(view_of_parts(parts, self.path_of(key), self.pool, self.copies))
        made = nested_tensor(values_of(view), view.row_splits, view.ragged_dim)
        self.pool.remember(parts_of(made).offsets, view.row_splits)
        return made

    def _move_packed(self, column: PackedColumn) -> PackedColumn:
        values, cu_seqlens, longest, position_ids = column
        places, positions = self._move_tensor(cu_seqlens), self._move_tensor(position_ids)
        return PackedColumn(self._move_tensor(values), places, longest, positions)

    def _move_view(self, view: RaggedView) -> RaggedView:
        """The rows of a view on the device, end to end: holes are removed before the copy."""
        row_splits, dim = self.pool.unique(view.row_splits), view.ragged_dim
        memory = view.memory
        aliased = isinstance(memory, torch.Tensor) and view.starts is None
        whole: Any = memory if aliased else values_of(view)
        return end_to_end(self._move_tensor(whole), row_splits, dim)

    def _move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of one tensor, which columns may share."""
        known = self.known.get(id(tensor))
        if known is None:
            known = self.known[id(tensor)] = tensor, self._copy_tensor(tensor)
        return known[1]

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cpu" and _is_plain(tensor):
            self.copies.fetch([tensor])  # does nothing, unless the tensor was compacted only now
            return self.copies.of(tensor)
        return to_device(tensor, self.device, non_blocking=self.non_blocking)


def read_offsets(leaves: Iterable[Any], pool: RowSplitsPool) -> None:
    """Read the row lengths of columns on devices into a pool, with one wait for each device.

    Columns with holes between their rows are left out: their readers wait for them.
    """
    away: list[tuple[torch.Tensor, Any]] = []
    for leaf in _each_leaf(leaves):
        numbers: torch.Tensor | None = None
        if is_jagged(leaf):
            numbers = offsets_of(leaf)
        elif isinstance(leaf, PackedColumn):
            numbers = leaf.cu_seqlens
        if numbers is None or numbers.is_cpu or numbers.is_meta:
            continue
        if pool.of_source(numbers) is None:
            away.append((numbers, leaf))
    if not away:
        return
    copies = HostCopies()
    copies.fetch(numbers for numbers, _ in away)
    for _, leaf in away:
        with suppress(ArgumentError):  # the reader of the column raises it, with its name
            if is_jagged(leaf):
                view_of_parts(parts_of(leaf), "", pool, copies)
            else:
                view_of_varlen(leaf, "", pool, copies)


def _each_leaf(leaves: Iterable[Any]) -> Iterator[Any]:
    """All leaves, with inner batches replaced by their leaves."""
    for leaf in leaves:
        if isinstance(leaf, (torch.Tensor, np.ndarray, list)) or not _is_batch(leaf):
            yield leaf
        elif isinstance(leaf, Columns):
            yield from _each_leaf(leaf.columns.values())
        elif isinstance(leaf, LazyStackedTensorDict):
            yield from _each_leaf(leaf.tensordicts)
        elif isinstance(leaf, (dict, TensorDictBase)):
            yield from _each_leaf(leaf.values())
        else:
            yield from _each_leaf([fields_of(leaf)[0]])


def _is_batch(leaf: Any) -> bool:
    if isinstance(leaf, UnbatchedTensor) or is_non_tensor(leaf):
        return False
    return isinstance(leaf, (Columns, dict, TensorDictBase)) or is_tensorclass(leaf)


def _tensors_to_fetch(leaf: Any) -> list[torch.Tensor]:
    """The tensors of a column that are copied to the host unchanged."""
    parts: list[Any] = [leaf]
    if is_jagged(leaf):
        values, offsets, lengths, _ = parts_of(leaf, detach=False)
        # Rows with holes are compacted on their device, once offsets and lengths are known.
        parts = [offsets, values if lengths is None else lengths]
    elif isinstance(leaf, UnbatchedTensor):
        parts = [unbatched_parts(leaf)[1]]
    elif isinstance(leaf, PackedColumn):
        parts = [leaf.values, leaf.cu_seqlens, leaf.position_ids]
    elif isinstance(leaf, RaggedView):
        parts = [] if leaf.starts is not None else [leaf.memory]
    return [part for part in parts if _is_plain(part)]


def _is_plain(leaf: Any) -> bool:
    """Whether `HostCopies` can copy a value."""
    if type(leaf) not in TENSOR_TYPES or leaf.layout is not torch.strided:
        return False
    return not (leaf.is_nested or leaf.is_quantized or leaf.is_meta)
