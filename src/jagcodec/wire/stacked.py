"""Many messages, opened together: one schema's numbers are checked as one array.

What is sound at first sight, as nearly every message is, costs no call of Python per number. Any
other is opened by itself: then `read_header` decides whether it is valid, and names its fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.wire import documents
from jagcodec.wire.frames import frame_arrays, frames_of_blob, header_of_blob, is_blob
from jagcodec.wire.header import NO_VALUES, behind_numbers, header_parts
from jagcodec.wire.limits import Limits
from jagcodec.wire.schema import Node, Schema, read_schema
from jagcodec.wire.spec import MAX_BYTES, MAX_UNBACKED_ROWS, PLAIN, Kind


class InMemory(NamedTuple):
    """A sound message with its frames in memory."""

    node: Node  # of the batch; its last field names the columns, its children
    first_group: int  # which of the numbers is the first of a ragged group
    numbers: bytes  # those of its header
    values: Any  # the packed documents in it; of one node, equal ones have equal `meta`s
    buffers: Sequence[ByteArray]  # the frames after it


class Stack(NamedTuple):
    """Sound messages of one schema, whose headers have as many numbers each."""

    node: Node  # as of `InMemory`
    first_group: int
    members: IntArray  # which messages they are, in ascending order
    numbers: IntArray  # (messages, K)
    values: Sequence[Any]  # of each, as of `InMemory`


def stacks_of(messages: Mapping[int, InMemory]) -> list[Stack]:
    """Messages that were opened one by one, by which of several each is."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, message in messages.items():
        alike.setdefault((id(message.node), len(message.numbers)), []).append(i)
    stacks = []
    for members in alike.values():
        some = [messages[i] for i in members]
        packed = b"".join([message.numbers for message in some])
        numbers = np.frombuffer(packed, dtype=np.int64).reshape(len(some), -1)
        values = [message.values for message in some]
        stacks.append(Stack(*some[0][:2], np.array(members), numbers, values))
    return stacks


def open_together(
    sources: Sequence[Any], where: str, limits: Limits
) -> tuple[list[list[ByteArray]], list[Stack]]:
    """The frames of messages, and those messages that are sound at first sight."""
    frames = [frame_arrays(source, where) for source in sources]
    # Headers of as many bytes before as many frames, most of which differ in their numbers alone.
    alike: dict[tuple[int, int], list[tuple[int, ByteArray]]] = defaultdict(list)
    for i, own in enumerate(frames):
        header, held = own[0], len(own) - 1
        if not held and is_blob(header):
            try:
                header, held = header_of_blob(header), _IN_BLOBS
            except WireFormatError:  # which is raised when it is opened by itself
                continue
        alike[len(header), held].append((i, header))
    stacks: list[Stack] = []
    for (_, held), messages in alike.items():
        members, headers = zip(*messages, strict=True)
        sizes = None
        if held != _IN_BLOBS:
            every = map(len, chain.from_iterable(frames[i] for i in members))
            sizes = np.fromiter(every, np.int64).reshape(len(members), 1 + held)[:, 1:]
        stack = _open_alike(headers, np.array(members), sizes, limits)
        if stack is not None and (sizes is not None or _are_split(stack, frames)):
            stacks.append(stack)
    return frames, stacks


_IN_BLOBS = -1
"""In the place of the number of frames, which only the header of a blob knows."""


def _are_split(stack: Stack, frames: list[list[ByteArray]]) -> bool:
    """Split the blobs of a stack into frames; False if one is too short for those it claims."""
    first = stack.first_group
    groups = int(stack.numbers[0, first - 2])
    sizes = stack.numbers[:, first + 5 * groups :].tolist()
    try:
        for i, own in zip(stack.members.tolist(), sizes, strict=True):
            (blob,) = frames[i]
            frames[i] = frames_of_blob(blob, header_of_blob(blob), own)
    except WireFormatError:
        return False
    return True


def _open_alike(
    headers: Sequence[ByteArray], members: IntArray, sizes: IntArray | None, limits: Limits
) -> Stack | None:
    """The messages that are like the first, and sound at first sight; blobs have no `sizes` yet."""
    size = len(headers[0])
    # A copy: what was checked must not change with the messages' memory.
    whole = b"".join(headers)  # type: ignore[arg-type]
    try:
        _, packed_schema, packed_numbers, values = header_parts(whole[:size], limits)
        schema = read_schema(packed_schema)
    except WireFormatError:  # `read_header` reports it
        return None
    # As this library writes it: the numbers are right before their end.
    last = size - len(values)
    end = size - len(behind_numbers(values))
    begin = end - len(packed_numbers)
    first = schema.numbers + 2
    told = packed_numbers[8 * first - 8 : 8 * first]
    held = int.from_bytes(told, "little") if sizes is None else sizes.shape[1]
    groups, odd = divmod(len(packed_numbers) // 8 - first - held, 5)
    if not whole[:size].endswith(behind_numbers(values)) or groups < 0 or odd:
        return None  # of another writer, with checksums, or not the numbers of a header
    if schema.root.kind is not Kind.TENSORDICT or schema.root.fields[0] != 1:
        return None
    # The same schema in the same bytes, and as many bytes of numbers and of values.
    matrix = np.frombuffer(whole, dtype=np.uint8).reshape(len(headers), size)
    same = (matrix[:, :begin] == matrix[0, :begin]).all(axis=1)
    same &= (matrix[:, end:last] == matrix[0, end:last]).all(axis=1)
    if not same.all():
        like = np.flatnonzero(same)
        headers = [headers[at] for at in like.tolist()]
        return _open_alike(headers, members[like], None if sizes is None else sizes[like], limits)
    numbers = np.ascontiguousarray(matrix[:, begin:end]).view(np.int64)
    if sizes is None:
        sizes = numbers[:, first + 5 * groups :]
    packed = [values] * len(headers)
    if (matrix[:, last:] != matrix[0, last:]).any():
        packed = [whole[at - len(values) : at] for at in range(size, len(whole) + 1, size)]
    fits = {each: _values_fit(each, schema.values) for each in set(packed)}
    with np.errstate(over="ignore", invalid="ignore"):
        sound = _sound(schema, numbers, groups, sizes, size, limits)
    if not all(fits.values()):
        sound &= [fits[each] for each in packed]
    if not sound.all():
        members, numbers = members[sound], numbers[sound]
        packed = [each for each, fit in zip(packed, sound.tolist(), strict=True) if fit]
    return Stack(schema.root, first, members, numbers, packed) if len(members) else None


_IN_PLACE = (Kind.TENSOR, Kind.JAGGED, Kind.NON_TENSOR_ROWS)
_BATCHES = (Kind.TENSORDICT, Kind.NON_TENSOR_DATA)


def _sound(
    schema: Schema,
    numbers: IntArray,  # (messages, K)
    groups: int,  # of each
    sizes: IntArray,  # (messages, frames)
    header_bytes: int,
    limits: Limits,
) -> npt.NDArray[np.bool_]:
    """Which messages pass the checks of `read_header` at first sight; the others may be sound."""
    # Plain cells never ask for more than `EXPANSION` allows: `limits.expanded` is not compared.
    (count, held), first = sizes.shape, schema.numbers + 2
    # A batch size has no cells to compare it with: a single dim is easy to bound.
    simple = all(
        node.kind in _IN_PLACE or (node.kind in _BATCHES and node.end - node.dims == 1)
        for node in schema.nodes
    )
    sound = (numbers[:, first - 2 : first] == (groups, held)).all(axis=1)
    if not simple or schema.depth > limits.depth or (numbers < 0).any():
        return np.zeros(count, dtype=bool)
    sound &= (numbers[:, first + 5 * groups :] == sizes).all(axis=1)
    # Compared as floats first: integers of a stranger may wrap around when they are added up. What
    # is below is exact as a float, too, in which no product wraps around.
    sound &= sizes.sum(axis=1, dtype=np.float64) < MAX_BYTES / 16
    payload = sizes.sum(axis=1)
    sound &= payload + header_bytes <= limits.bytes
    objects = np.full(count, schema.size + groups + held)
    each = np.arange(count)[:, None]
    ragged = numbers[:, first : first + 5 * groups].reshape(count, groups, 5)
    buffer, offset, rows, low, high = ragged.transpose(2, 0, 1)
    short = rows < 2  # as in `check_groups`
    right = np.where(short, (low == high) & ((rows == 1) | (high == 0)), low <= high)
    sound &= right.all(axis=1)
    places = [(buffer, offset, np.where(short, 0.0, 8.0 * (rows + 1.0)))]
    # Columns with as many numbers are checked together.
    alike: dict[tuple[Kind, int], list[Node]] = {}
    for node in schema.nodes:
        alike.setdefault((node.kind, node.end - node.number), []).append(node)
    for (kind, width), nodes in alike.items():
        index = np.array([node.number for node in nodes])[:, None] + np.arange(width)
        found = numbers[:, index]
        if kind in _BATCHES:
            sound &= (found <= MAX_UNBACKED_ROWS).all(axis=(1, 2))
            continue
        dims = found[:, :, 3:] if kind is Kind.TENSOR else found[:, :, 4:]
        itemsizes = [node.itemsize or 1 for node in nodes]  # of documents, bytes
        # As in `cells_of`. A float may be a little less than the product.
        extents = np.maximum(dims, 1).prod(axis=2, dtype=np.float64) * itemsizes
        known = (extents < MAX_BYTES / 2) & (found[:, :, 2] == PLAIN)
        if kind is not Kind.TENSOR:
            known &= found[:, :, 3] < groups
        sound &= known.all(axis=1)
        size = dims.prod(axis=2, dtype=np.float64) * itemsizes
        places.append((found[:, :, 0], found[:, :, 1], size))
        if kind is Kind.NON_TENSOR_ROWS and groups:
            objects += rows[each, np.minimum(found[:, :, 3], groups - 1)].sum(axis=1)
    # As in `Places.claim`.
    buffer, offset, size = (np.concatenate(parts, axis=1) for parts in zip(*places, strict=True))
    inside = size == 0
    if held:
        room = sizes[each, np.minimum(buffer, held - 1)]
        inside |= (buffer < held) & (offset + size <= room)
    sound &= inside.all(axis=1) & (size.sum(axis=1) <= payload)
    whole: npt.NDArray[np.bool_] = sound & (objects <= limits.objects)
    return whole


def _values_fit(packed: bytes, count: int) -> bool:
    if packed == NO_VALUES:
        return not count
    try:
        values = documents.unpack(packed, "values")
    except WireFormatError:
        return False
    return type(values) is list and len(values) - count in (0, 1)
