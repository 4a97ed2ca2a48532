"""Columns and devices: moved from one to another, and their offsets read, with one wait.

Separate copies to the host would each wait for everything that the device was asked to do before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from jagcodec.columns.batch import Name
from jagcodec.columns.held import column_of, each_leaf, read_offsets
from jagcodec.memory.plain_types import TENSOR_TYPES, check_plain
from jagcodec.memory.staging import HostCopies, to_device
from jagcodec.rows.copy_rows import values_of
from jagcodec.rows.row_splits import RowSplitsPool
from jagcodec.rows.views import RaggedView, end_to_end

PathOf = Callable[[Name], str]
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
    complete. `non_blocking` is as for `to_device`.
    """
    copies = None
    if device.type == "cpu":
        copies = HostCopies(independent=True)
        each = (part for leaf in each_leaf(columns.values()) for part in leaf.tensors())
        copies.fetch(part for part in each if _is_plain(part))
    else:  # jagged columns are made again from their row lengths, which another device may have
        jagged = (leaf for leaf in each_leaf(columns.values()) if not leaf.is_packed)
        away = ((leaf.value, leaf.offsets()) for leaf in jagged)
        read_offsets([x for x, there in away if there is not None and there.device != device], pool)
    return _Move(device, pool, path_of, non_blocking, copies).columns(columns, ())


@dataclass(slots=True)
class _Move:
    """Moves one batch to a device."""

    device: torch.device
    pool: RowSplitsPool
    path_of: PathOf
    non_blocking: bool
    copies: HostCopies | None  # of all tensors, if they go to the host
    # Tensors that were moved, by id: the tensor, so that the id stays its own, and its copy.
    copies_by_id: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def columns(self, columns: Any, key: Name) -> dict[str, Any]:
        # Use items: iterating over a TensorDict gives its rows.
        return {name: column_of(leaf).moved(self, (*key, name)) for name, leaf in columns.items()}

    def has(self, view: RaggedView) -> bool:
        return view.device_name == str(self.device)

    def is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def checked_tensor(self, tensor: torch.Tensor, key: Name) -> torch.Tensor:
        """The copy of a tensor whose cells are in memory, unless they are not needed."""
        if tensor.is_meta or (_is_plain(tensor) and self.device.type != "meta"):
            check_plain(tensor, self.path_of(key))
        return self.tensor(tensor)

    def view(self, view: RaggedView) -> RaggedView:
        """The rows of a view on the device, end to end: holes are removed before the copy."""
        row_splits, dim = self.pool.unique(view.row_splits), view.ragged_dim
        whole: Any = view.memory if view.is_tensor and view.is_end_to_end else values_of(view)
        return end_to_end(self.tensor(whole), row_splits, dim)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of one tensor, which columns may share."""
        both = self.copies_by_id.get(id(tensor))
        if both is None:
            both = self.copies_by_id[id(tensor)] = tensor, self._copy_tensor(tensor)
        return both[1]

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.copies is not None and _is_plain(tensor):
            self.copies.fetch([tensor])  # does nothing, unless the tensor was compacted only now
            return self.copies.of(tensor)
        return to_device(tensor, self.device, non_blocking=self.non_blocking)


def _is_plain(leaf: Any) -> bool:
    """Whether `HostCopies` can copy a value."""
    if type(leaf) not in TENSOR_TYPES or leaf.layout is not torch.strided:
        return False
    return not (leaf.is_nested or leaf.is_quantized or leaf.is_meta)
