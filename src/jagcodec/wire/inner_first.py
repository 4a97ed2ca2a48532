"""INNER_FIRST: rows whose one inner dim lies outermost, of which only what is wanted is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from jagcodec.memory.tensor_bytes import ByteArray
from jagcodec.ragged.copy_rows import values_of
from jagcodec.ragged.inner_dims import in_memory, moved_back, pick, rows_back
from jagcodec.ragged.nested import nested_tensor
from jagcodec.ragged.row_index import Chosen
from jagcodec.ragged.row_splits import RowSplits
from jagcodec.ragged.views import RaggedView
from jagcodec.wire.leaf import MOST_RANGES, Leaf, cell_range
from jagcodec.wire.lowered import InnerFirst
from jagcodec.wire.message import ChosenRows, Message, joined_rows
from jagcodec.wire.schema import Node

Picked = Mapping[int, Chosen]
"""Cells chosen along inner dims, by the dim."""

ALL: Picked = {}

NOTHING_PICKED: Mapping[Node, Picked] = {}
"""Of a batch of whose columns all cells are wanted."""


def tensor_of(
    message: Message, node: Node, chosen: ChosenRows | None = None, picked: Picked = ALL
) -> torch.Tensor:
    """The nested tensor of an INNER_FIRST, or some of its rows and of the cells in them.

    Raises:
        WireFormatError: It is malformed.
    """
    values, row_splits = _cells(message, node, chosen, picked)
    if message.device is not None:
        values = values.to(message.device)
    return nested_tensor(moved_back(values, node.fields[0]), row_splits)


def view_of(
    message: Message, node: Node, chosen: ChosenRows | None = None, picked: Picked = ALL
) -> RaggedView:
    """The rows of an INNER_FIRST where they lie, as those of the column; only to be read."""
    return rows_back(*_moved(message, node, chosen, picked))


def column_of(
    message: Message, node: Node, chosen: ChosenRows | None = None, picked: Picked = ALL
) -> InnerFirst:
    """The same as `encode` takes it, to send it on."""
    values, dim, row_splits = _moved(message, node, chosen, picked)
    shape = tuple(values.shape)
    return InnerFirst(dim, RaggedView(values, values.dtype, shape, 2, None, row_splits))


def _moved(
    message: Message, node: Node, chosen: ChosenRows | None, picked: Picked
) -> tuple[torch.Tensor, int, RowSplits]:
    values, row_splits = _cells(message, node, chosen, picked)
    return values, node.fields[0], row_splits


def _cells(
    message: Message, node: Node, chosen: ChosenRows | None, picked: Picked
) -> tuple[torch.Tensor, RowSplits]:
    """(extent of the dim, total, the rest): what was chosen of the child's values, to be read."""
    (child,), (dim,) = node.children, node.fields
    leaf = message.leaf(child)
    whole = message.splits(leaf)
    outer = picked.get(dim, range(leaf.shape[0]))
    row_splits = whole if chosen is None else chosen.among(leaf.group, whole)[0]
    values = _read(message, leaf, outer, chosen, whole, row_splits)
    for other, cells in picked.items():
        if other != dim:
            # Behind the dim that was moved, a dim is where it is in the column.
            values = pick(values, other + (other < dim), cells)
    return values, row_splits


def _read(
    message: Message,
    leaf: Leaf,
    outer: Chosen,
    chosen: ChosenRows | None,
    whole: RowSplits,
    row_splits: RowSplits,
) -> torch.Tensor:
    """The values of these rows in these parts of the outermost dim; no more than that is read,
    where ranges are fetched.
    """
    dtype, cell = leaf.dtype, leaf.inner
    _, total, *rest = leaf.shape
    wanted = (len(outer), row_splits.total, *rest)
    if not math.prod(wanted):
        return torch.empty(wanted, dtype=dtype)
    parts = joined_rows(outer if isinstance(outer, range) else np.asarray(outer))
    host = whole.host
    if not message.payload.in_memory and chosen is not None:
        rows = [(int(host[r.start]), int(host[r.stop])) for r in joined_rows(chosen.index)]
        rows = [(a, b) for a, b in rows if a < b]
        if len(outer) * len(rows) <= MOST_RANGES:
            each = [k * total for part in parts for k in part]
            runs = [((k + a) * cell, (k + b) * cell) for k in each for a, b in rows]
            return in_memory(_joined(message, leaf, runs), dtype, wanted)
    runs = [(part.start * total * cell, part.stop * total * cell) for part in parts]
    values = in_memory(_joined(message, leaf, runs), dtype, (len(outer), total, *rest))
    if chosen is None:
        return values
    if isinstance(chosen.index, range):
        return values[:, int(host[chosen.index.start]) : int(host[chosen.index.stop])]
    starts = chosen.among(leaf.group, whole)[1]
    return values_of(RaggedView(values, dtype, tuple(values.shape), 2, starts, row_splits))


def _joined(message: Message, leaf: Leaf, runs: list[tuple[int, int]]) -> ByteArray:
    """Ranges of cells end to end; one alone where it lies."""
    data = [cell_range(message.payload, leaf.place, a, b, keep=False) for a, b in runs]
    return data[0] if len(data) == 1 else np.concatenate(data)
