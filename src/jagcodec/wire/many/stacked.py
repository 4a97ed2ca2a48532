"""Many messages, opened together: one schema's numbers are checked as one array.

Nearly every message is sound at first sight, and then costs no call of Python per number. Any other
message is opened by itself: then `read_header` decides whether it is valid, and names its fault.
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
from jagcodec.wire.claims import plan_of, sound_at_sight
from jagcodec.wire.frames import frame_arrays, frames_of_blob, header_of_blob, is_blob
from jagcodec.wire.header import NO_VALUES, header_end, split_any_header
from jagcodec.wire.limits import Limits
from jagcodec.wire.read.message_source import MessageInMemory
from jagcodec.wire.schema import GROUP_NUMBERS, Node, Schema, read_schema
from jagcodec.wire.spec import Kind


class Stack(NamedTuple):
    """Sound messages of one schema, whose headers have the same number of numbers."""

    node: Node  # as in `MessageInMemory`
    first_group: int  # as in `MessageInMemory`
    members: IntArray  # (messages,) the position of each in the list that was opened, ascending
    numbers: IntArray  # (messages, K) the numbers of their headers
    values: Sequence[Any]  # for each message, as in `MessageInMemory`
    levels: int  # the lowest limit of depth


def stacks_of(messages: Mapping[int, MessageInMemory]) -> list[Stack]:
    """Stack messages that were opened one by one; the keys are their positions."""
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
        node, first_group = some[0].node, some[0].first_group
        stacks.append(Stack(node, first_group, np.array(members), numbers, values, levels))
    return stacks


def open_together(
    sources: Sequence[Any], where: str, limits: Limits
) -> tuple[list[list[ByteArray]], list[Stack]]:
    """The frames of all messages, and stacks of those that are sound at first sight.

    The caller opens each message that is in no stack by itself.
    """
    frames = [frame_arrays(source, where) for source in sources]
    # Group messages by header size and number of frames. Most in a group differ only in numbers.
    by_form: dict[tuple[int, int], list[tuple[int, ByteArray]]] = defaultdict(list)
    for i, parts in enumerate(frames):
        header, count = parts[0], len(parts) - 1
        if not count and is_blob(header):
            try:
                header, count = header_of_blob(header), _IN_BLOBS
            except WireFormatError:  # raised again when the message is opened by itself
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
    """Split the blobs of a stack into frames; False if one is too short for its frames."""
    count = int(stack.numbers[0, stack.first_group - 1])  # frames of each message
    sizes = stack.numbers[:, stack.numbers.shape[1] - count :].tolist()
    try:
        for i, each in zip(stack.members.tolist(), sizes, strict=True):
            (blob,) = frames[i]
            frames[i] = frames_of_blob(blob, header_of_blob(blob), each)
    except WireFormatError:
        return False
    return True


class _HeaderPlaces(NamedTuple):
    """Where the parts of a header are, if this library wrote it without checksums."""

    schema: Schema
    numbers: slice  # of bytes
    values: slice  # of bytes, up to the end of the header
    groups: int  # how many ragged groups
    frames: int  # how many frames after the header


def _places_of_header(header: bytes, frames: int | None, limits: Limits) -> _HeaderPlaces | None:
    """Where the parts of a header are; None if its message must be opened by itself.

    `frames` is the number of frames after it; None for a blob, whose header gives the number.
    """
    try:
        _, schema_bytes, number_bytes, values = split_any_header(header, limits)
        schema = read_schema(schema_bytes)
    except WireFormatError:  # `read_header` raises it again
        return None
    root, end = schema.root, len(header) - len(header_end(values))
    numbers = memoryview(number_bytes).cast("q")
    if root.kind is not Kind.TENSORDICT or root.fields[0] != 1 or len(numbers) < schema.first_group:
        return None
    frames = numbers[schema.frame_count] if frames is None else frames
    groups, more = divmod(len(numbers) - schema.first_group - frames, GROUP_NUMBERS)
    if not header.endswith(header_end(values)) or groups < 0 or more:
        # Another writer wrote it, or it has checksums or sent sizes, or its numbers are wrong.
        return None
    slices = slice(end - len(number_bytes), end), slice(len(header) - len(values), len(header))
    return _HeaderPlaces(schema, *slices, groups, frames)


def _open_stack(
    headers: Sequence[ByteArray], members: IntArray, sizes: IntArray | None, limits: Limits
) -> Stack | None:
    """The messages whose headers are like the first one, and that are sound at first sight.

    Headers of another schema are left out, so their messages are opened one by one. This is slow
    if messages of two schemas, with headers of one size, take turns. `sizes` is None for blobs.
    """
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
    """Which headers equal the first one, except for the numbers and the values."""
    before, between = matrix[:, : places.numbers.start], matrix[:, places.numbers.stop :]
    between = between[:, : places.values.start - places.numbers.stop]
    same: npt.NDArray[np.bool_] = (before == before[0]).all(axis=1)
    same &= (between == between[0]).all(axis=1)
    return same


def _sound(
    places: _HeaderPlaces, numbers: IntArray, sizes: IntArray | None, header: int, limits: Limits
) -> npt.NDArray[np.bool_]:
    """Which messages are sound at first sight, from their (messages, K) numbers.

    The others may be sound, too: the rule decides.
    """
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
        are_sound, *_ = sound_at_sight(
            schema,
            columns,
            ragged,
            columns[first:],
            header,
            limits,
            table=partial(_Table, count),
            largest=np.maximum.reduce,
        )
    sound &= are_sound & (not plan_of(schema).others)
    return sound


class _Table:
    """A lookup table with a column per message. An array of indices picks an entry of each."""

    def __init__(self, count: int, entries: list[Any]) -> None:
        self._entries = np.empty((len(entries), count))
        for i, entry in enumerate(entries):
            self._entries[i] = entry
        self._each = np.arange(count)

    def __getitem__(self, index: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        within = np.minimum(index, len(self._entries) - 1).astype(np.intp)
        entries: npt.NDArray[np.float64] = self._entries[within, self._each]
        return entries


def _values_fit(data: bytes, count: int) -> bool:
    """Whether the documents of a header are a list of `count`, or of one more, which is `meta`."""
    if data == NO_VALUES:
        return not count
    try:
        values = documents.parsed(data, "values")
    except WireFormatError:
        return False
    return type(values) is list and len(values) - count in (0, 1)
