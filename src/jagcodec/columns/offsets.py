"""The row lengths of columns on devices, read with one wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jagcodec.columns.column import HeldColumn, column_of
from jagcodec.errors import ArgumentError
from jagcodec.rows.row_splits import RowSplitsPool

if TYPE_CHECKING:
    import torch


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
    """All columns, with inner batches replaced by their columns."""
    for leaf in leaves:
        column = column_of(leaf)
        inner = column.inner()
        if inner is None:
            yield column
        else:
            yield from each_leaf(inner)
