"""Many messages, opened together: the numbers of those with one schema are checked as one array.

What is sound at first sight, as nearly every message is, costs no call of Python per number. Of any
other it is for `read_header` to say what is wrong with it, or that nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
)
from jagcodec.wire.limits import Limits
from jagcodec.wire.message import open_message
from jagcodec.wire.schema import Node, Schema, read_schema
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind


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

    @property
    def columns(self) -> Mapping[str, Node]:
        """The columns of the batch, by name."""
        return dict(zip(self.node.fields[-1], self.node.children, strict=True))


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
        schema = headers[0].schema
        # Without the sizes of compressed frames and without checksums, which only some may have.
        width = schema.numbers + 2 + 5 * groups + frames
        packed = b"".join([header.packed_numbers[: 8 * width] for header in headers])
        numbers = np.frombuffer(packed, dtype=np.int64).reshape(len(members), width)
        values = [header.packed_values for header in headers]
        stacks.append(
            Stack(node, np.array(members), numbers, _groups(schema, numbers, groups), values)
        )
    return stacks


def _groups(schema: Schema, numbers: IntArray, groups: int) -> IntArray:
    first = schema.numbers + 2
    return numbers[:, first : first + 5 * groups].reshape(len(numbers), groups, 5)


# --- opening -----------------------------------------------------------------------------------


def open_messages(sources: Sequence[Any], where: str, limits: Limits) -> tuple[list[Stack], Frames]:
    """Checked messages in stacks, and the frames behind the header of each.

    Raises:
        ArgumentTypeError: One of `sources` is neither a list of frames nor a blob.
        WireFormatError: One is not a message; it is said which.
    """
    behind: list[Sequence[ByteArray]] = []
    one_by_one: list[int] = []
    # Headers of as many bytes before as many frames, most of which differ in their numbers alone.
    alike: dict[tuple[int, int], tuple[list[int], list[Any]]] = {}
    for i, source in enumerate(sources):
        header, *rest = frame_arrays(source, where)
        behind.append(rest)
        if not rest and is_blob(header):
            one_by_one.append(i)
        else:
            members, headers = alike.setdefault((len(header), len(rest)), ([], []))
            members.append(i)
            headers.append(header)
    frames = Frames.of(behind)
    stacks: list[Stack] = []
    for (size, count), (members, headers) in alike.items():
        # A copy: what was checked must not change with the message's memory.
        several = _Headers(b"".join(headers), size, np.array(members), count)
        one_by_one += _open_alike(several, frames, limits, stacks).tolist()
    if not one_by_one:
        return stacks, frames
    opened: list[tuple[int, Header, Node]] = []
    for i in sorted(one_by_one):
        with in_message(i):
            message = open_message(sources[i], where, limits, by_range=True)
            read, rest = message.header, list(message.frames or ())[1:]
            behind[i] = opened_frames(read, rest) if read.compressed else rest
            opened.append((i, read, read.schema.root))
    return [*stacks, *stacked(opened)], Frames.of(behind)


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
    """Stack the messages that are sound at first sight, and return those to read one by one."""
    whole, size, members, count = headers
    matrix = np.frombuffer(whole, dtype=np.uint8).reshape(len(members), size)
    left, rest = np.arange(len(members)), []
    for _ in range(_MOST_FORMS):
        if not len(left):
            break
        one = headers.header(int(left[0]))
        with in_message(int(members[left[0]])):
            _, packed_schema, packed_numbers, values = header_parts(one, limits)
            schema = read_schema(packed_schema)
        # As this library writes it: the numbers stand right before their end.
        last = size - len(values)
        end = size - len(behind_numbers(values))
        begin = end - len(packed_numbers)
        groups, odd = divmod(len(packed_numbers) // 8 - schema.numbers - 2 - count, 5)
        if not one.endswith(behind_numbers(values)) or groups < 0 or odd:
            # Of another writer, with checksums, or not the numbers of a header.
            rest.append(left[:1])
            left = left[1:]
            continue
        # The same schema in the same bytes, and as many bytes of numbers and of values.
        like = matrix[left]
        same = (like[:, :begin] == like[0, :begin]).all(axis=1)
        same &= (like[:, end:last] == like[0, end:last]).all(axis=1)
        of_form, like = left[same], like[same]
        numbers = like[:, begin:end].view(np.int64)
        packed = [values] * len(of_form)
        if (like[:, last:] != like[0, last:]).any():
            packed = [headers.header(at)[last:] for at in of_form.tolist()]
        of_groups = _groups(schema, numbers, groups)
        stack = Stack(schema.root, members[of_form], numbers, of_groups, packed)
        sound = _sound(schema, stack, frames, size, limits)
        if not sound.all():
            rest.append(of_form[~sound])
            packed = [v for v, fits in zip(packed, sound.tolist(), strict=True) if fits]
            stack = Stack(
                schema.root, members[of_form[sound]], numbers[sound], of_groups[sound], packed
            )
        if len(stack.members):
            stacks.append(stack)
        left = left[~same]
    found: IntArray = members[np.concatenate([*rest, left])]
    return found


_MOST_DIMS = 8
"""Of a column that is checked with others; each takes as many numbers as the one with most."""
_CELLS = (Kind.TENSOR, Kind.JAGGED, Kind.NON_TENSOR_ROWS)
_BATCHES = (Kind.TENSORDICT, Kind.NON_TENSOR_DATA)


def _sound(
    schema: Schema, stack: Stack, frames: Frames, header_bytes: int, limits: Limits
) -> npt.NDArray[np.bool_]:
    """Which messages of a stack are sound at first sight; the others may be, too.

    As `read_header` checks them one by one.
    """
    numbers = stack.numbers
    count, groups = stack.groups.shape[:2]
    none = np.zeros(count, dtype=bool)
    columns = [node for node in schema.nodes if node.kind in _CELLS]
    batches = [node for node in schema.nodes if node.kind in _BATCHES]
    simple = len(columns) + len(batches) == len(schema.nodes)
    few = all(node.end - node.dims <= _MOST_DIMS for node in columns)
    # Rows that no cell vouches for have one dim.
    few = few and all(node.end - node.dims == 1 for node in batches)
    if not (simple and few) or schema.depth > limits.depth:
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
    sound &= (numbers[:, [node.dims for node in batches]] <= MAX_UNBACKED_ROWS).all(axis=1)

    group_buffer, group_offset, rows, low, high = stack.groups.transpose(2, 0, 1)
    short = rows < 2
    right = np.where(short, (low == high) & ((rows == 1) | (high == 0)), low <= high)
    sound &= (right & (rows <= payload[:, None])).all(axis=1)

    buffer, offset, stored, group, dims = _cells(columns, numbers)
    sound &= ((stored == PLAIN) & (group < groups)).all(axis=1)
    # Of no cells, too: torch multiplies dims before it looks at the one that is 0. In float64,
    # where no product wraps around.
    with np.errstate(over="ignore", invalid="ignore"):
        strides = np.maximum(dims, 1).prod(axis=2, dtype=np.float64)
        of_cells = dims.prod(axis=2, dtype=np.float64)
        of_cells *= [node.itemsize or 1 for node in columns]  # of documents, bytes
    sound &= (strides < 1 << 62).all(axis=1)
    buffer = np.concatenate([group_buffer, buffer], axis=1)
    offset = np.concatenate([group_offset, offset], axis=1)
    size = np.concatenate([np.where(short, 0, 8 * (rows + 1)), of_cells], axis=1)
    inside = size == 0
    if held:
        room = sizes[np.arange(count)[:, None], np.minimum(buffer, held - 1)]
        inside |= (buffer < held) & (offset + size <= room)
    sound &= inside.all(axis=1) & (size.sum(axis=1) <= payload)

    objects = np.full(count, schema.size + groups + held)
    documents_of = [k for k, node in enumerate(columns) if node.kind is Kind.NON_TENSOR_ROWS]
    if documents_of and groups:
        known = np.minimum(group[:, documents_of], groups - 1)
        objects += rows[np.arange(count)[:, None], known].sum(axis=1)
    whole: npt.NDArray[np.bool_] = sound & (objects <= limits.objects)
    return whole


def _cells(columns: Sequence[Node], numbers: IntArray) -> tuple[IntArray, ...]:
    """(messages, columns): buffer, offset, how cells are stored, group, -1 of a tensor; and dims.

    Behind the last dim of a column are ones.
    """
    most = max([1, *(node.end - node.dims for node in columns)])
    count, width = numbers.shape
    # What a column does not have is looked up after the numbers.
    known = np.empty((count, width + 2), dtype=np.int64)
    known[:, :width] = numbers
    known[:, width:] = (-1, 1)
    index = []
    for node in columns:
        own = [*range(node.number, node.end)]
        if node.kind is Kind.TENSOR:
            own.insert(3, width)
        index.append(own + [width + 1] * (4 + most - len(own)))
    found = known[:, np.array(index, dtype=np.int64).reshape(len(columns), 4 + most)]
    return *(found[:, :, i] for i in range(4)), found[:, :, 4:]


def _values_fit(packed: bytes, count: int) -> bool:
    if packed == NO_VALUES:
        return not count
    try:
        values = documents.unpack(packed, "values")
    except WireFormatError:
        return False
    return type(values) is list and len(values) - count in (0, 1)
