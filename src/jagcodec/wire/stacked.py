"""Many messages, opened together: one schema's numbers are checked as one array.

What is sound at first sight, as nearly every message is, costs no call of Python per number. Any
other is opened by itself: then `read_header` decides whether it is valid, and names its fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec.errors import WireFormatError
from jagcodec.memory.arrays import ByteArray, IntArray
from jagcodec.wire import documents
from jagcodec.wire.claims import sound_at_sight
from jagcodec.wire.frames import frame_arrays, frames_of_blob, header_of_blob, is_blob
from jagcodec.wire.header import NO_VALUES, end_of, header_parts
from jagcodec.wire.limits import Limits
from jagcodec.wire.schema import GROUP_NUMBERS, Node, Schema, read_schema
from jagcodec.wire.spec import Kind


class MessageInMemory(NamedTuple):
    """A sound message with its frames in memory."""

    node: Node  # of the batch; its last field names the columns, its children
    first_group: int  # which of the numbers is the first of a ragged group
    numbers: bytes  # those of its header
    values: Any  # the bytes of the documents in it
    # Two messages with one node and equal `values` have equal `meta`.
    buffers: Sequence[ByteArray]  # the frames after it
    levels: int  # the limit of depth with which it was opened


class Stack(NamedTuple):
    """Sound messages of one schema, whose headers have the same number of numbers."""

    node: Node  # as of `MessageInMemory`
    first_group: int
    members: IntArray  # which messages they are, in ascending order
    numbers: IntArray  # (messages, K)
    values: Sequence[Any]  # of each, as of `MessageInMemory`
    levels: int  # the least of their limits of depth


def stacks_of(messages: Mapping[int, MessageInMemory]) -> list[Stack]:
    """Stack messages that were opened one by one; a key is the position of its message."""
    by_form: dict[tuple[int, int], list[int]] = {}
    for i, message in messages.items():
        by_form.setdefault((id(message.node), len(message.numbers)), []).append(i)
    stacks = []
    for members in by_form.values():
        some = [messages[i] for i in members]
        joined = b"".join([message.numbers for message in some])
        numbers = np.frombuffer(joined, dtype=np.int64).reshape(len(some), -1)
        values = [message.values for message in some]
        levels = min(message.levels for message in some)
        stacks.append(Stack(*some[0][:2], np.array(members), numbers, values, levels))
    return stacks


def open_together(
    sources: Sequence[Any], where: str, limits: Limits
) -> tuple[list[list[ByteArray]], list[Stack]]:
    """The frames of messages, and those messages that are sound at first sight."""
    frames = [frame_arrays(source, where) for source in sources]
    # Group messages by header size and number of frames. Most in a group differ only in numbers.
    by_form: dict[tuple[int, int], list[tuple[int, ByteArray]]] = defaultdict(list)
    for i, parts in enumerate(frames):
        header, count = parts[0], len(parts) - 1
        if not count and is_blob(header):
            try:
                header, count = header_of_blob(header), _IN_BLOBS
            except WireFormatError:  # which is raised when it is opened by itself
                continue
        by_form[len(header), count].append((i, header))
    stacks: list[Stack] = []
    for (_, count), messages in by_form.items():
        members, headers = zip(*messages, strict=True)
        sizes = None
        if count != _IN_BLOBS:
            every = map(len, chain.from_iterable(frames[i] for i in members))
            sizes = np.fromiter(every, np.int64).reshape(len(members), 1 + count)[:, 1:]
        stack = _open_stack(headers, np.array(members), sizes, limits)
        if stack is not None and (sizes is not None or _split_blobs(stack, frames)):
            stacks.append(stack)
    return frames, stacks


_IN_BLOBS = -1
"""Stands for a blob's number of frames, which only its header has."""


def _split_blobs(stack: Stack, frames: list[list[ByteArray]]) -> bool:
    """Split the blobs of a stack into frames; False if one is too short for those it claims."""
    count = int(stack.numbers[0, stack.first_group - 1])  # of frames
    sizes = stack.numbers[:, stack.numbers.shape[1] - count :].tolist()
    try:
        for i, each in zip(stack.members.tolist(), sizes, strict=True):
            (blob,) = frames[i]
            frames[i] = frames_of_blob(blob, header_of_blob(blob), each)
    except WireFormatError:
        return False
    return True


class _HeaderPlaces(NamedTuple):
    """The places of the parts of a header that this library wrote without checksums."""

    schema: Schema
    numbers: slice  # the bytes of its numbers
    values: slice  # the bytes of its values, which are its last
    groups: int
    frames: int


def _places_of_header(header: bytes, frames: int | None, limits: Limits) -> _HeaderPlaces | None:
    """The places in a header; None if its message must be opened by itself.

    `frames` is the number of frames after it; None for a blob, whose header has the number.
    """
    try:
        _, schema_bytes, number_bytes, values = header_parts(header, limits)
        schema = read_schema(schema_bytes)
    except WireFormatError:  # `read_header` reports it
        return None
    root, end = schema.root, len(header) - len(end_of(values))
    numbers = memoryview(number_bytes).cast("q")
    if root.kind is not Kind.TENSORDICT or root.fields[0] != 1 or len(numbers) < schema.first_group:
        return None
    frames = numbers[schema.frame_count] if frames is None else frames
    groups, more = divmod(len(numbers) - schema.first_group - frames, GROUP_NUMBERS)
    if not header.endswith(end_of(values)) or groups < 0 or more:
        return None  # of another writer, with checksums, or not the numbers of a header
    slices = slice(end - len(number_bytes), end), slice(len(header) - len(values), len(header))
    return _HeaderPlaces(schema, *slices, groups, frames)


def _open_stack(
    headers: Sequence[ByteArray], members: IntArray, sizes: IntArray | None, limits: Limits
) -> Stack | None:
    """The messages that are like the first, and sound at first sight; blobs have no `sizes` yet."""
    size = len(headers[0])
    # A copy: what was checked must not change with the messages' memory.
    whole = b"".join(headers)  # type: ignore[arg-type]
    places = _places_of_header(whole[:size], None if sizes is None else sizes.shape[1], limits)
    if places is None:
        return None
    matrix = np.frombuffer(whole, dtype=np.uint8).reshape(len(headers), size)
    same = _equal_but_for_numbers(matrix, places)
    if not same.all():
        like = np.flatnonzero(same)
        headers = [headers[at] for at in like.tolist()]
        return _open_stack(headers, members[like], None if sizes is None else sizes[like], limits)
    numbers = np.ascontiguousarray(matrix[:, places.numbers]).view(np.int64)
    sound = _sound(places, numbers, sizes, size, limits)
    first = places.values.start
    values = [whole[at + first : at + size] for at in range(0, len(whole), size)]
    fits = {each: _values_fit(each, places.schema.value_count) for each in set(values)}
    if not all(fits.values()):
        sound &= [fits[each] for each in values]
    if not sound.all():
        members, numbers = members[sound], numbers[sound]
        values = [each for each, fit in zip(values, sound.tolist(), strict=True) if fit]
    if not len(members):
        return None
    schema = places.schema
    return Stack(schema.root, schema.first_group, members, numbers, values, limits.depth)


def _equal_but_for_numbers(matrix: ByteArray, places: _HeaderPlaces) -> npt.NDArray[np.bool_]:
    """Which headers are the first one in all but the numbers and the values."""
    before, between = matrix[:, : places.numbers.start], matrix[:, places.numbers.stop :]
    between = between[:, : places.values.start - places.numbers.stop]
    same: npt.NDArray[np.bool_] = (before == before[0]).all(axis=1)
    same &= (between == between[0]).all(axis=1)
    return same


def _sound(
    places: _HeaderPlaces, numbers: IntArray, sizes: IntArray | None, header: int, limits: Limits
) -> npt.NDArray[np.bool_]:
    """Which messages of (messages, K) numbers are sound at first sight; the others may be, too."""
    count, (schema, _, _, groups, frames) = len(numbers), places
    first = schema.first_size(groups)
    counts = numbers[:, schema.group_count : schema.first_group]
    sound: npt.NDArray[np.bool_] = (counts == (groups, frames)).all(axis=1)
    if sizes is not None:
        sound &= (numbers[:, first:] == sizes).all(axis=1)
    if (numbers < 0).any():
        return np.zeros(count, dtype=bool)
    columns = list(numbers.T.astype(np.float64, order="C"))
    ragged = [
        columns[i : i + GROUP_NUMBERS] for i in range(schema.first_group, first, GROUP_NUMBERS)
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        found, *_ = sound_at_sight(
            schema,
            columns,
            ragged,
            columns[first:],
            header,
            limits,
            table=partial(_Table, count),
            largest=np.maximum.reduce,
        )
    sound &= found & (not schema.plan.others)
    return sound


class _Table:
    """A lookup table with one column per message; an array of indices picks one entry in each."""

    def __init__(self, count: int, entries: list[Any]) -> None:
        self._entries = np.empty((len(entries), count))
        for i, entry in enumerate(entries):
            self._entries[i] = entry
        self._each = np.arange(count)

    def __getitem__(self, index: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        known = np.minimum(index, len(self._entries) - 1).astype(np.intp)
        found: npt.NDArray[np.float64] = self._entries[known, self._each]
        return found


def _values_fit(data: bytes, count: int) -> bool:
    if data == NO_VALUES:
        return not count
    try:
        values = documents.parsed(data, "values")
    except WireFormatError:
        return False
    return type(values) is list and len(values) - count in (0, 1)
