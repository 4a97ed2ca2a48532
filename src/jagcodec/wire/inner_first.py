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
from jagcodec.wire.lowered import InnerFirst
from jagcodec.wire.message import Message, joined_rows, other_total, torch_dtype
from jagcodec.wire.schema import Node
from jagcodec.wire.stored_cells import MOST_RANGES

Picked = Mapping[int, Chosen]
"""Cells chosen along inner dims, by the dim."""

ALL: Picked = {}

NOTHING_PICKED: Mapping[Node, Picked] = {}
"""Of a batch of whose columns all cells are wanted."""


def tensor_of(
    message: Message, node: Node, chosen: Chosen | None = None, picked: Picked = ALL
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
    message: Message, node: Node, chosen: Chosen | None = None, picked: Picked = ALL
) -> RaggedView:
    """The rows of an INNER_FIRST where they lie, as those of the column; only to be read."""
    return rows_back(*_moved(message, node, chosen, picked))


def column_of(
    message: Message, node: Node, chosen: Chosen | None = None, picked: Picked = ALL
) -> InnerFirst:
    """The same as `encode` takes it, to send it on."""
    values, dim, row_splits = _moved(message, node, chosen, picked)
    shape = tuple(values.shape)
    return InnerFirst(dim, RaggedView(values, values.dtype, shape, 2, None, row_splits))


def _moved(
    message: Message, node: Node, chosen: Chosen | None, picked: Picked
) -> tuple[torch.Tensor, int, RowSplits]:
    values, row_splits = _cells(message, node, chosen, picked)
    return values, node.fields[0], row_splits


def _cells(
    message: Message, node: Node, chosen: Chosen | None, picked: Picked
) -> tuple[torch.Tensor, RowSplits]:
    """(extent of the dim, total, the rest): what was chosen of the child's values, to be read."""
    (child,), (dim,) = node.children, node.fields
    group = message.numbers[child.number + 3]
    whole = message.row_splits(group)
    extent, total, *_ = shape = message.shape(child)
    if whole.total != total:
        raise other_total(group, total, whole.total)
    outer = picked.get(dim, range(extent))
    row_splits = whole if chosen is None else message.row_splits(group, chosen)
    values = _read(message, child, shape, outer, chosen, whole, row_splits)
    for other, cells in picked.items():
        if other != dim:
            # Behind the dim that was moved, a dim is where it is in the column.
            values = pick(values, other + (other < dim), cells)
    return values, row_splits


def _read(
    message: Message,
    child: Node,
    shape: tuple[int, ...],
    outer: Chosen,
    chosen: Chosen | None,
    whole: RowSplits,
    row_splits: RowSplits,
) -> torch.Tensor:
    """The values of these rows in these parts of the outermost dim; no more than that is read,
    where ranges are fetched.
    """
    dtype = torch_dtype(child.fields[0])
    _, total, *rest = shape
    cell = math.prod(rest)
    wanted = (len(outer), row_splits.total, *rest)
    if not math.prod(wanted):
        return torch.empty(wanted, dtype=dtype)
    parts = joined_rows(outer if isinstance(outer, range) else np.asarray(outer))
    host = whole.host
    if not message.payload.in_memory and chosen is not None:
        rows = [(int(host[a]), int(host[b])) for a, b in joined_rows(chosen)]
        rows = [(a, b) for a, b in rows if a < b]
        if len(outer) * len(rows) <= MOST_RANGES:
            each = [k * total for a, b in parts for k in range(a, b)]
            runs = [((k + a) * cell, (k + b) * cell) for k in each for a, b in rows]
            return in_memory(_joined(message, child, runs), dtype, wanted)
    runs = [(a * total * cell, b * total * cell) for a, b in parts]
    values = in_memory(_joined(message, child, runs), dtype, (len(outer), total, *rest))
    if chosen is None:
        return values
    if isinstance(chosen, range):
        return values[:, int(host[chosen.start]) : int(host[chosen.stop])]
    starts = whole.starts[chosen]
    return values_of(RaggedView(values, dtype, tuple(values.shape), 2, starts, row_splits))


def _joined(message: Message, child: Node, runs: list[tuple[int, int]]) -> ByteArray:
    """Ranges of cells end to end; one alone where it lies."""
    data = [message.cell_range(child, a, b, keep=False) for a, b in runs]
    return data[0] if len(data) == 1 else np.concatenate(data)
