"""Where the columns and rows of several messages lie, as numbers; nothing of them is read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.ragged.row_index import Chosen
from jagcodec.wire.dtypes import torch_dtype
from jagcodec.wire.header import NO_VALUES
from jagcodec.wire.schema import Node
from jagcodec.wire.spec import PLAIN, Kind
from jagcodec.wire.stacked import NO_FRAMES, Frames, Stack, of_message


class _Column(NamedTuple):
    """A column whose rows can be read where they lie, in every message.

    Attributes:
        kind: Of its nodes.
        dtype: Of its cells; bytes of documents.
        inner: Dims of a cell.
        place: (messages,) bytes before its first cell, if all frames lie end to end.
        cells: (messages,) cells of it; bytes of documents.
        group: (messages,) its ragged group.
    """

    kind: Kind
    dtype: torch.dtype
    inner: tuple[int, ...]
    place: IntArray
    cells: IntArray
    group: IntArray


class Messages:
    """The messages of a join: what their headers say, and where their frames are.

    Attributes:
        counts: (messages,) rows of each.
        ends: (messages,) rows of it and of those before it.
        buffers: The frames of all messages.
    """

    def __init__(
        self,
        counts: IntArray,
        open_part: Callable[[int], Any],
        stacks: Sequence[tuple[Stack, Mapping[str, Node]]] = (),
        frames: Frames = NO_FRAMES,
        *,
        beside: bool = False,
    ) -> None:
        """Messages of some `counts` of rows, which `open_part` opens one by one.

        Args:
            counts: As above.
            open_part: Opens one message as a batch of its own.
            stacks: Those of one schema together, and the nodes of their columns; none where columns
                have to be read from each message by itself.
            frames: Their frames.
            beside: Whether anything stands beside the batch in some of the messages.
        """
        self.counts: IntArray = counts
        self.ends: IntArray = counts.cumsum()
        self.buffers: tuple[ByteArray, ...] = frames.buffers
        self._stacks = stacks
        self._beside = beside
        self._open_part = open_part
        self._parts: dict[int, Any] = {}
        self._first = frames.first
        self._columns = _columns_in_place(stacks, frames)
        self._rows_of_groups: dict[bytes, tuple[IntArray, IntArray, IntArray] | None] = {}

    def open_part(self, index: int) -> Any:
        """One message as a batch of its own."""
        found = self._parts.get(index)
        if found is None:
            try:
                found = self._parts[index] = self._open_part(index)
            except WireFormatError as error:
                raise of_message(index, error) from error
        return found

    def with_metas(self) -> list[int | None]:
        """For each message the first that says the same of the batch as a whole; None: nothing.

        That is seen without opening them.
        """
        if self._beside or not self._stacks:
            return list(range(len(self.counts)))
        found: list[int | None] = [None] * len(self.counts)
        for stack, _ in self._stacks:
            first: dict[bytes, int | None] = {NO_VALUES: None}
            for i, packed in zip(stack.members.tolist(), stack.values, strict=True):
                found[i] = first.setdefault(packed, i)
        return found

    def meta(self, index: int | None) -> dict[str, Any]:
        """What belongs to a message as a whole, of those that `with_metas` names."""
        return {} if index is None else self.open_part(index).meta

    def find(self, rows: Chosen) -> tuple[IntArray, IntArray]:
        """Which message each of these rows is of, and which row of it."""
        index = np.asarray(rows, dtype=np.int64)
        part = np.searchsorted(self.ends, index, side="right")
        return part, index - (self.ends - self.counts)[part]

    def column(self, name: str) -> _Column | None:
        """A column as it can be read in place.

        None where it has to be read from each message: because messages differ in the column, its
        cells are stored narrow, or it is of another kind.
        """
        return self._columns.get(name)

    @cached_property
    def of_rows(self) -> IntArray:
        """(rows,) which message each row is of."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def rows_of_groups(self, groups: IntArray) -> tuple[IntArray, IntArray, IntArray] | None:
        """The rows of a ragged group of each message: lengths, first cells, and the cells of each.

        None where they are not the rows of their message, or not sound: then it is for the reader
        of one message to say so.
        """
        key = groups.tobytes()
        if key not in self._rows_of_groups:
            self._rows_of_groups[key] = self._read_groups(groups)
        return self._rows_of_groups[key]

    def _read_groups(self, groups: IntArray) -> tuple[IntArray, IntArray, IntArray] | None:
        buffer, offset, rows, low, high = np.empty((5, len(self.counts)), dtype=np.int64)
        numbers = (buffer, offset, rows, low, high)
        for stack, _ in self._stacks:
            index = np.arange(len(stack.members)), groups[stack.members]
            for number, found in zip(numbers, stack.groups[index].T, strict=True):
                number[stack.members] = found
        if (rows != self.counts).any():
            return None
        lengths = np.repeat(high, rows)
        many = np.flatnonzero(rows > 1)
        if len(many):
            counts = rows[many] + 1
            frames = (self._first[many] + buffer[many]).tolist()
            at = zip(frames, counts.tolist(), offset[many].tolist(), strict=True)
            # A copy: offsets that were checked must not change with the messages' memory.
            offsets = np.concatenate(
                [np.frombuffer(self.buffers[i], np.int64, held, start) for i, held, start in at]
            )
            firsts = counts.cumsum() - counts
            steps = offsets[1:] - offsets[:-1]
            of_rows = np.ones(len(steps), dtype=bool)
            of_rows[firsts[1:] - 1] = False
            steps = steps[of_rows]
            begins = firsts - np.arange(len(many))
            if (
                offsets[firsts].any()
                or (offsets < 0).any()
                or (np.minimum.reduceat(steps, begins) != low[many]).any()
                or (np.maximum.reduceat(steps, begins) != high[many]).any()
            ):
                return None
            if len(many) == len(rows):
                lengths = steps
            else:
                lengths[np.repeat(rows > 1, rows)] = steps
        edges = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.add.accumulate(lengths, out=edges[1:])
        bounds = edges[np.concatenate([[0], self.ends])]
        return lengths, edges[:-1] - np.repeat(bounds[:-1], rows), np.diff(bounds)


def _columns_in_place(
    stacks: Sequence[tuple[Stack, Mapping[str, Node]]], frames: Frames
) -> dict[str, _Column]:
    """The columns that can be read where they lie, those of all stacks put together."""
    if not stacks:
        return {}
    forms = [_forms(stack, nodes) for stack, nodes in stacks]
    names = [name for name, form in forms[0].items() if all(form == of[name] for of in forms)]
    names = [name for name in names if forms[0][name] is not None]
    # Where each frame begins if all lie end to end; one more for messages without frames.
    bases = np.zeros(len(frames.sizes) + 1, dtype=np.int64)
    np.add.accumulate(frames.sizes, out=bases[1:])
    place, cells, group = (np.empty((len(names), len(frames.first)), np.int64) for _ in range(3))
    for stack, nodes in stacks:
        found, members = stack.cells, stack.members
        at = {node: k for k, node in enumerate(found.nodes)}
        order = [at[nodes[name]] for name in names]
        buffer, offset = found.buffer, found.offset
        held = found.size > 0
        if not held.all():  # what is empty lies anywhere
            buffer, offset = np.where(held, buffer, 0), np.where(held, offset, 0)
        places = bases[frames.first[members][:, None] + buffer] + offset
        place[:, members] = places[:, order].T
        cells[:, members] = found.dims[:, order, 0].T
        group[:, members] = found.group[:, order].T
    columns = zip(names, place, cells, group, strict=True)
    known: Any = forms[0]
    return {name: _Column(*known[name], *numbers) for name, *numbers in columns}


_Form = tuple[Kind, torch.dtype, tuple[int, ...]]


def _forms(stack: Stack, nodes: Mapping[str, Node]) -> dict[str, _Form | None]:
    """The kind, dtype and cell dims of each column; None where rows cannot be read in place."""
    found = stack.cells
    alike = (found.stored == PLAIN).all(axis=0)
    if found.dims.shape[2] > 1:
        alike &= (found.dims[:, :, 1:] == found.dims[:1, :, 1:]).all(axis=(0, 2))
    at = {node: k for k, node in enumerate(found.nodes)}
    regular = dict(zip(found.nodes, alike.tolist(), strict=True))
    forms: dict[str, _Form | None] = {}
    for name, node in nodes.items():
        kind, rank = node.kind, node.end - node.dims
        form: _Form | None = None
        if kind is Kind.NON_TENSOR_ROWS:
            form = (kind, torch.uint8, ()) if regular.get(node) else None
        elif regular.get(node) and rank and (kind is Kind.TENSOR or node.fields[2] == 1):
            inner = tuple(found.dims[0, at[node], 1:rank].tolist()) if rank > 1 else ()
            with suppress(WireFormatError):  # a dtype that this torch has not: for who reads it
                form = (kind, torch_dtype(node.fields[0]), inner)
        forms[name] = form
    return forms
