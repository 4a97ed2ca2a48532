"""Many messages, opened together: one schema's numbers are checked as one array.

What is sound at first sight, as nearly every message is, costs no call of Python per number. Any
other is opened by itself: then `read_header` decides whether it is valid, and names its fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.wire import documents
from jagcodec.wire.frames import frame_arrays, is_blob
from jagcodec.wire.header import NO_VALUES, Header, behind_numbers, header_parts
from jagcodec.wire.limits import Limits
from jagcodec.wire.schema import Node, Schema, read_schema
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind


class StackedCells(NamedTuple):
    """The place of a column in several messages.

    Attributes:
        buffer: (messages,), as are the next three.
        offset: In the buffer.
        stored: How its cells are stored.
        group: Its ragged group; None of a rectangle.
        dims: (messages, rank); the last of documents is how many bytes they have.
    """

    buffer: IntArray
    offset: IntArray
    stored: IntArray
    group: IntArray | None
    dims: IntArray


class Stack(NamedTuple):
    """Messages with one schema, and with as many ragged groups and frames each.

    Attributes:
        node: The batch in the schema: its last field names the columns, its children.
        members: Which messages they are, in ascending order.
        numbers: (messages, K) the numbers of their headers.
        groups: (messages, groups, 5) the numbers of their ragged groups, as in `Group`.
        values: The packed documents in the header of each.
    """

    node: Node
    members: IntArray
    numbers: IntArray
    groups: IntArray
    values: Sequence[bytes]

    def cells(self, node: Node) -> StackedCells:
        """The numbers of one of `_IN_PLACE`."""
        own = self.numbers[:, node.number : node.end]
        if node.kind is Kind.TENSOR:
            return StackedCells(own[:, 0], own[:, 1], own[:, 2], None, own[:, 3:])
        return StackedCells(own[:, 0], own[:, 1], own[:, 2], own[:, 3], own[:, 4:])


class Frames(NamedTuple):
    """The frames after the headers of several messages, one message after the other.

    Attributes:
        buffers: All of them.
        starts: (buffers + 1,) where each starts if they are end to end, and where the last ends.
        first: (messages,) the first of each message.
    """

    buffers: tuple[ByteArray, ...]
    starts: IntArray
    first: IntArray

    @classmethod
    def of(cls, frames: Sequence[Sequence[ByteArray]]) -> Frames:
        """Of the frames of each message."""
        buffers = tuple(chain.from_iterable(frames))
        held = np.fromiter(map(len, frames), dtype=np.int64, count=len(frames))
        starts = np.zeros(len(buffers) + 1, dtype=np.int64)
        sizes = np.fromiter(map(len, buffers), dtype=np.int64, count=len(buffers))
        np.add.accumulate(sizes, out=starts[1:])
        return cls(buffers, starts, held.cumsum() - held)


@contextmanager
def in_message(index: int) -> Iterator[None]:
    """Errors inside name the message."""
    try:
        yield
    except WireFormatError as error:
        path = f"message {index}: {error.path}"
        raise WireFormatError(error.reason, path, error.detail) from error


def stacked(batches: Iterable[tuple[int, Header, Node]]) -> list[Stack]:
    """Batches in messages whose headers were read, each with its place among all messages."""
    alike: dict[tuple[int, int, int], tuple[Node, list[int], list[Header]]] = {}
    for i, header, node in batches:
        key = (id(node), len(header.groups), len(header.sizes))
        _, members, headers = alike.setdefault(key, (node, [], []))
        members.append(i)
        headers.append(header)
    stacks = []
    for (_, groups, frames), (node, members, headers) in alike.items():
        first = headers[0].schema.numbers + 2
        # Without the sizes of compressed frames and without checksums, which only some may have.
        width = first + 5 * groups + frames
        packed = b"".join([header.packed_numbers[: 8 * width] for header in headers])
        numbers = np.frombuffer(packed, dtype=np.int64).reshape(len(members), width)
        values = [header.packed_values for header in headers]
        stacks.append(
            Stack(node, np.array(members), numbers, _groups(numbers, first, groups), values)
        )
    return stacks


def _groups(numbers: IntArray, first: int, groups: int) -> IntArray:
    return numbers[:, first : first + 5 * groups].reshape(len(numbers), groups, 5)


# --- opening -----------------------------------------------------------------------------------


def open_stacks(
    sources: Sequence[Any], where: str, limits: Limits
) -> tuple[list[Stack], list[Sequence[ByteArray] | None]]:
    """The messages that are sound at first sight, and the frames after the header of each.

    None in place of the frames of a message that is to be opened by itself.

    Raises:
        ArgumentTypeError: One of `sources` is neither a list of frames nor a blob.
    """
    headers: list[ByteArray] = []
    behind: list[Sequence[ByteArray]] = []
    # Headers of as many bytes before as many frames, most of which differ in their numbers alone.
    alike: dict[tuple[int, int], list[int]] = {}
    for i, source in enumerate(sources):
        header, *frames = frame_arrays(source, where)
        headers.append(header)
        behind.append(frames)
        alike.setdefault((len(header), len(frames)), []).append(i)
    stacks: list[Stack] = []
    found: list[Sequence[ByteArray] | None] = [None] * len(behind)
    for (_, held), members in alike.items():
        if not held and is_blob(headers[members[0]]):
            continue
        sizes = [*map(len, chain.from_iterable([behind[i] for i in members]))]
        shaped = np.array(sizes, dtype=np.int64).reshape(len(members), held)
        own = [headers[i] for i in members]
        stack = _open_alike(own, np.array(members), shaped, limits)
        if stack is not None:
            stacks.append(stack)
            for i in stack.members.tolist():
                found[i] = behind[i]
    return stacks, found


def _open_alike(
    headers: Sequence[ByteArray], members: IntArray, sizes: IntArray, limits: Limits
) -> Stack | None:
    """The messages that are like the first, and sound at first sight."""
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
    groups, odd = divmod(len(packed_numbers) // 8 - first - sizes.shape[1], 5)
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
        return _open_alike(headers, members[like], sizes[like], limits)
    numbers = np.ascontiguousarray(matrix[:, begin:end]).view(np.int64)
    packed = [values] * len(headers)
    if (matrix[:, last:] != matrix[0, last:]).any():
        packed = [whole[at - len(values) : at] for at in range(size, len(whole) + 1, size)]
    stack = Stack(schema.root, members, numbers, _groups(numbers, first, groups), packed)
    with np.errstate(over="ignore", invalid="ignore"):
        sound = _sound(schema, stack, sizes, size, limits)
    if sound.all():
        return stack
    if not sound.any():
        return None
    packed = [v for v, fits in zip(packed, sound.tolist(), strict=True) if fits]
    return Stack(schema.root, members[sound], numbers[sound], stack.groups[sound], packed)


_IN_PLACE = (Kind.TENSOR, Kind.JAGGED, Kind.NON_TENSOR_ROWS)
_BATCHES = (Kind.TENSORDICT, Kind.NON_TENSOR_DATA)


def _sound(
    schema: Schema, stack: Stack, sizes: IntArray, header_bytes: int, limits: Limits
) -> npt.NDArray[np.bool_]:
    """Which messages of a stack are sound at first sight; the others may be, too.

    As `read_header` checks them one by one. `sizes` are those of their frames, (messages, frames).
    """
    numbers, (count, groups) = stack.numbers, stack.groups.shape[:2]
    held, first = sizes.shape[1], schema.numbers + 2
    # Rows that no cell vouches for have one dim.
    simple = all(
        node.kind in _IN_PLACE or (node.kind in _BATCHES and node.end - node.dims == 1)
        for node in schema.nodes
    )
    sound = (numbers[:, first - 2 : first] == (groups, held)).all(axis=1)
    if not simple or schema.depth > limits.depth or (numbers < 0).any():
        return np.zeros(count, dtype=bool)
    sound &= (numbers[:, first + 5 * groups :] == sizes).all(axis=1)
    payload = sizes.sum(axis=1)
    sound &= payload + header_bytes <= limits.bytes
    fits = {values: _values_fit(values, schema.values) for values in set(stack.values)}
    if not all(fits.values()):
        sound &= [fits[values] for values in stack.values]
    objects = np.full(count, schema.size + groups + held)
    each = np.arange(count)[:, None]
    buffer, offset, rows, low, high = stack.groups.transpose(2, 0, 1)
    short = rows < 2
    right = np.where(short, (low == high) & ((rows == 1) | (high == 0)), low <= high)
    sound &= right.all(axis=1)
    # Sizes are in float64, in which no product wraps around.
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
        # Of no cells, too: torch multiplies dims before it looks at the one that is 0.
        strides = np.maximum(dims, 1).prod(axis=2, dtype=np.float64)
        known = (strides < 1 << 62) & (found[:, :, 2] == PLAIN)
        if kind is not Kind.TENSOR:
            known &= found[:, :, 3] < groups
        sound &= known.all(axis=1)
        itemsizes = [node.itemsize or 1 for node in nodes]  # of documents, bytes
        size = dims.prod(axis=2, dtype=np.float64) * itemsizes
        places.append((found[:, :, 0], found[:, :, 1], size))
        if kind is Kind.NON_TENSOR_ROWS and groups:
            objects += rows[each, np.minimum(found[:, :, 3], groups - 1)].sum(axis=1)
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
