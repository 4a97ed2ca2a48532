"""Many messages, opened together: the numbers of those with one schema are checked as one array.

What is sound at first sight, as nearly every message is, costs no call of Python per number. Of any
other it is for `read_header` to say what is wrong with it, or that nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.wire import documents
from jagcodec.wire.compress import opened_frames
from jagcodec.wire.frames import frame_arrays, is_blob
from jagcodec.wire.header import (
    NO_VALUES,
    Header,
    behind_numbers,
    header_parts,
    read_header,
)
from jagcodec.wire.limits import Limits
from jagcodec.wire.message import check_frames, check_sizes, open_message
from jagcodec.wire.schema import Node, Schema, read_schema
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind


class Cells(NamedTuple):
    """The columns of messages with one schema: those of tensors, and of one document per row.

    Columns of very many dims are not among them.

    Attributes:
        nodes: Of the columns, in the order of the schema.
        buffer: (messages, columns), as are all that follow: the frame behind the header.
        offset: Bytes in it.
        stored: How the cells are stored.
        group: The ragged group; -1 of a tensor.
        dims: (messages, columns, most dims): of the values, with ones behind the last; the bytes of
            all documents.
        size: Bytes of the values as wide as their dtype, in float64, where no product wraps around.
    """

    nodes: list[Node]
    buffer: IntArray
    offset: IntArray
    stored: IntArray
    group: IntArray
    dims: IntArray
    size: npt.NDArray[np.float64]

    @classmethod
    def of(cls, schema: Schema, numbers: IntArray) -> Cells:
        """Those of the (messages, K) numbers of headers with one schema."""
        nodes = [node for node in schema.nodes if _has_cells(node)]
        most = max([1, *(node.end - node.dims for node in nodes)])
        count, width = numbers.shape
        # What a column has not is looked up behind the numbers.
        known = np.empty((count, width + 2), dtype=np.int64)
        known[:, :width] = numbers
        known[:, width:] = (-1, 1)
        nothing, one = width, width + 1
        index = []
        for node in nodes:
            i = node.number
            own = [*range(i, node.end)]
            if node.kind is Kind.TENSOR:
                own.insert(3, nothing)
            index.append(own + [one] * (4 + most - len(own)))
        found = known[:, np.array(index, dtype=np.int64).reshape(len(nodes), 4 + most)]
        dims = found[:, :, 4:]
        with np.errstate(over="ignore", invalid="ignore"):
            size = dims.prod(axis=2, dtype=np.float64)
            size *= [node.itemsize or 1 for node in nodes]  # of documents, bytes
        buffer, offset, stored, group_of = (found[:, :, i] for i in range(4))
        return cls(nodes, buffer, offset, stored, group_of, dims, size)


_MOST_DIMS = 8
"""Of a column of `Cells`, each of which takes as many numbers as the one with the most dims."""


def _has_cells(node: Node) -> bool:
    """Whether `Cells` tells of a node."""
    return node.kind in _WITH_CELLS and node.end - node.dims <= _MOST_DIMS


_WITH_CELLS = (Kind.TENSOR, Kind.JAGGED, Kind.NON_TENSOR_ROWS)


class Stack(NamedTuple):
    """Messages of one schema, with as many ragged groups and frames each.

    Attributes:
        schema: What they are made of.
        members: Which messages they are, in ascending order.
        numbers: (messages, K) those of their headers.
        groups: (messages, groups, 5) those of their ragged groups, as in `Group`.
        cells: Those of their columns.
        values: The documents in the header of each, packed.
    """

    schema: Schema
    members: IntArray
    numbers: IntArray
    groups: IntArray
    cells: Cells
    values: Sequence[bytes]

    @classmethod
    def of(
        cls,
        schema: Schema,
        members: IntArray,
        numbers: IntArray,
        groups: int,
        values: Sequence[bytes],
    ) -> Stack:
        """Of (messages, K) numbers."""
        first = schema.numbers + 2
        of_groups = numbers[:, first : first + 5 * groups].reshape(len(numbers), groups, 5)
        return cls(schema, members, numbers, of_groups, Cells.of(schema, numbers), values)


class Frames(NamedTuple):
    """The frames behind the headers of several messages, one message after the other.

    Attributes:
        buffers: All of them.
        sizes: (buffers,) bytes of each.
        first: (messages,) the first of each message.
    """

    buffers: tuple[ByteArray, ...]
    sizes: IntArray
    first: IntArray

    @classmethod
    def of(cls, frames: Sequence[Sequence[ByteArray]]) -> Frames:
        """Of the frames of each message."""
        buffers = tuple(chain.from_iterable(frames))
        held = np.fromiter(map(len, frames), dtype=np.int64, count=len(frames))
        sizes = np.fromiter(map(len, buffers), dtype=np.int64, count=len(buffers))
        return cls(buffers, sizes, held.cumsum() - held)


NO_FRAMES = Frames.of([])
"""Of messages that are read one by one."""


def open_messages(sources: Sequence[Any], where: str, limits: Limits) -> tuple[list[Stack], Frames]:
    """Checked messages in stacks, and the frames behind the header of each.

    Raises:
        ArgumentTypeError: One of `sources` is neither a list of frames nor a blob.
        WireFormatError: One is not a message; it is said which.
    """
    behind: list[list[ByteArray]] = []
    opened: list[tuple[int, Header]] = []
    # Headers of as many bytes before as many frames, most of which differ in their numbers alone.
    alike: dict[tuple[int, int], tuple[list[int], list[Any]]] = {}
    for i, source in enumerate(sources):
        header, *rest = frame_arrays(source, where)
        if not rest and is_blob(header):
            try:
                message = open_message(header, where, limits, by_range=True)
                read, rest = message.header, list(message.frames or ())[1:]
            except WireFormatError as error:
                raise of_message(i, error) from error
            opened.append((i, read))
        else:
            key = len(header), len(rest)
            known = alike.get(key)
            if known is None:
                known = alike[key] = ([], [])
            known[0].append(i)
            known[1].append(header)
        behind.append(rest)
    frames = Frames.of(behind)
    stacks: list[Stack] = []
    for (size, count), (members, headers) in alike.items():
        # A copy: what was checked must not change with the message's memory.
        whole = b"".join(headers)
        several = _Headers(whole, size, np.array(members, dtype=np.int64), count)
        left = _open_alike(several, frames, limits, stacks)
        for at in left.tolist():
            i = members[at]
            try:
                read = read_header(several.header(at), limits)
                check_sizes(read, [len(frame) for frame in behind[i]])
                if read.checksums is not None:
                    check_frames(behind[i], read.checksums)
            except WireFormatError as error:
                raise of_message(i, error) from error
            opened.append((i, read))
    compressed = [(i, read) for i, read in opened if read.compressed]
    for i, read in compressed:
        try:
            behind[i] = opened_frames(read, behind[i])
        except WireFormatError as error:
            raise of_message(i, error) from error
    return [*stacks, *stacked(opened)], Frames.of(behind) if compressed else frames


class _Headers(NamedTuple):
    """Headers of `size` bytes each, end to end, of messages with `frames` more frames."""

    whole: bytes
    size: int
    members: IntArray
    frames: int

    def header(self, at: int) -> bytes:
        """One of them."""
        return self.whole[at * self.size : (at + 1) * self.size]


_MOST_FORMS = 4
"""Of headers with as many bytes; those of any other form are read one by one."""


def _open_alike(headers: _Headers, frames: Frames, limits: Limits, stacks: list[Stack]) -> IntArray:
    """Stack the headers that are sound at first sight; the others are to be read one by one."""
    whole, size, members, count = headers
    matrix = np.frombuffer(whole, dtype=np.uint8).reshape(len(members), size)
    left, rest = np.arange(len(members)), []
    for _ in range(_MOST_FORMS):
        if not len(left):
            break
        one = headers.header(int(left[0]))
        try:
            _, packed_schema, packed_numbers, values = header_parts(one, limits)
            schema = read_schema(packed_schema)
        except WireFormatError as error:
            raise of_message(int(members[left[0]]), error) from error
        # As this library writes it: the numbers stand right before their end.
        last = size - len(values)
        end = size - len(behind_numbers(values))
        begin = end - len(packed_numbers)
        # The same schema in the same bytes, and as many bytes of numbers and of values.
        like = matrix[left]
        same = (like[:, :begin] == like[0, :begin]).all(axis=1)
        same &= (like[:, end:last] == like[0, end:last]).all(axis=1)
        groups, odd = divmod(len(packed_numbers) // 8 - schema.numbers - 2 - count, 5)
        if not one.endswith(behind_numbers(values)) or groups < 0 or odd:
            # Of another writer, with checksums, or not the numbers of a header.
            rest.append(left[:1])
            left = left[1:]
            continue
        numbers = like[same, begin:end].view(np.int64)
        alike = left[same]
        different = (like[same, last:] != like[0, last:]).any()
        packed = (
            [whole[(at + 1) * size - len(values) : (at + 1) * size] for at in alike.tolist()]
            if different
            else [values] * len(alike)
        )
        stack = Stack.of(schema, members[alike], numbers, groups, packed)
        sound = _sound(stack, frames, size, limits)
        if sound.all():
            stacks.append(stack)
        else:
            good = alike[sound]
            if len(good):
                chosen = [
                    values for values, fits in zip(packed, sound.tolist(), strict=True) if fits
                ]
                stacks.append(Stack.of(schema, members[good], numbers[sound], groups, chosen))
            rest.append(alike[~sound])
        left = left[~same]
    return np.concatenate([*rest, left])


def stacked(headers: Iterable[tuple[int, Header]]) -> list[Stack]:
    """Messages whose headers were read, with the place of each among all messages."""
    alike: dict[tuple[int, int, int], tuple[Schema, list[int], list[list[int]], list[bytes]]] = {}
    for i, header in headers:
        key = (id(header.schema), len(header.groups), len(header.sizes))
        _, members, numbers, values = alike.setdefault(key, (header.schema, [], [], []))
        members.append(i)
        # Without checksums, which messages of one stack may have or not.
        first = header.schema.numbers + 2
        numbers.append(header.numbers[: first + 5 * key[1] + key[2]])
        values.append(header.packed_values)
    return [
        Stack.of(
            schema,
            np.array(members, dtype=np.int64),
            np.array(numbers, dtype=np.int64),
            groups,
            values,
        )
        for (_, groups, _), (schema, members, numbers, values) in alike.items()
    ]


def of_message(index: int, error: WireFormatError) -> WireFormatError:
    """The error of one message of several."""
    return WireFormatError(error.reason, f"message {index}: {error.path}", error.detail)


def _sound(
    stack: Stack, frames: Frames, header_bytes: int, limits: Limits
) -> npt.NDArray[np.bool_]:
    """Which messages of a stack are sound at first sight; the others may be, too.

    As `read_header` checks them one by one.
    """
    schema, numbers, cells = stack.schema, stack.numbers, stack.cells
    count, groups = stack.groups.shape[:2]
    none = np.zeros(count, dtype=bool)
    batches = [node for node in schema.nodes if not _has_cells(node)]
    simple = all(node.kind in (Kind.TENSORDICT, Kind.NON_TENSOR_DATA) for node in batches)
    if not simple or schema.depth > limits.depth:
        return none
    first = schema.numbers + 2
    held = numbers.shape[1] - first - 5 * groups
    sizes = frames.sizes[frames.first[stack.members][:, None] + np.arange(held)]
    sound = (numbers[:, first - 2 : first] == (groups, held)).all(axis=1)
    sound &= (numbers[:, first + 5 * groups :] == sizes).all(axis=1)
    if not sound.all() or (numbers < 0).any():
        return none
    payload = sizes.sum(axis=1)
    sound &= payload + header_bytes <= limits.bytes
    fits = {values: _values_fit(values, schema.values) for values in set(stack.values)}
    if not all(fits.values()):
        sound &= np.array([fits[values] for values in stack.values])
    # Rows that no cell vouches for.
    if any(node.end - node.dims != 1 for node in batches):
        return none
    sound &= (numbers[:, [node.dims for node in batches]] <= MAX_UNBACKED_ROWS).all(axis=1)

    group_buffer, group_offset, rows, low, high = stack.groups.transpose(2, 0, 1)
    few = rows < 2
    right = np.where(few, (low == high) & ((rows == 1) | (high == 0)), low <= high)
    sound &= (right & (rows <= payload[:, None])).all(axis=1)
    sound &= ((cells.stored == PLAIN) & (cells.group < groups)).all(axis=1)
    # Of no cells, too: torch multiplies dims before it looks at the one that is 0.
    with np.errstate(over="ignore"):
        strides = np.maximum(cells.dims, 1).prod(axis=2, dtype=np.float64)
    sound &= (strides < 1 << 62).all(axis=1)

    buffer = np.concatenate([group_buffer, cells.buffer], axis=1)
    offset = np.concatenate([group_offset, cells.offset], axis=1)
    size = np.concatenate([np.where(few, 0, 8 * (rows + 1)), cells.size], axis=1)
    inside = size == 0
    if held:
        room = sizes[np.arange(count)[:, None], np.minimum(buffer, held - 1)]
        inside |= (buffer < held) & (offset + size <= room)
    sound &= inside.all(axis=1) & (size.sum(axis=1) <= payload)

    objects = np.full(count, schema.size + groups + held)
    documents_of = [k for k, node in enumerate(cells.nodes) if node.kind is Kind.NON_TENSOR_ROWS]
    if documents_of and groups:
        known = np.minimum(cells.group[:, documents_of], groups - 1)
        objects += rows[np.arange(count)[:, None], known].sum(axis=1)
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
