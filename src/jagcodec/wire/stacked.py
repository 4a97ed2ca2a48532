"""Many messages, opened together: the numbers of those with one schema are checked as one array.

What is sound at first sight, as nearly every message is, costs no call of Python per number. Of any
other it is for `read_header` to say what is wrong with it, or that nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jagcodec.errors import WireFormatError
from jagcodec.memory.tensor_bytes import ByteArray, IntArray
from jagcodec.wire import documents
from jagcodec.wire.frames import frame_arrays, is_blob
from jagcodec.wire.header import NO_VALUES, Header, header_parts, read_header
from jagcodec.wire.limits import Limits
from jagcodec.wire.message import check_frames, check_sizes, open_blob
from jagcodec.wire.schema import Schema, read_schema
from jagcodec.wire.spec import MAX_UNBACKED_ROWS, PLAIN, Kind


class Stack(NamedTuple):
    """Messages of one schema, with as many ragged groups and frames each. All were checked.

    Attributes:
        schema: What they are made of.
        members: Which messages they are.
        numbers: (messages, K) int64, those of their headers.
        values: The documents in the header of each, packed.
    """

    schema: Schema
    members: IntArray
    numbers: IntArray
    values: Sequence[bytes]

    def group(self, index: IntArray, field: int) -> IntArray:
        """A field of one ragged group of each message: buffer, offset, rows, min or max."""
        first = self.schema.numbers + 2
        return self.numbers[np.arange(len(index)), first + 5 * index + field]


class _Form(NamedTuple):
    """What headers have in common that differ in nothing but their numbers.

    Attributes:
        before: The bytes before the numbers, the schema among them.
        behind: Those behind, the values among them.
    """

    before: bytes
    behind: bytes
    schema: Schema
    values: bytes


def open_messages(
    sources: Sequence[Any], where: str, limits: Limits
) -> tuple[list[Stack], list[list[ByteArray]]]:
    """Checked messages in stacks, and the frames behind the header of each.

    Raises:
        ArgumentTypeError: One of `sources` is neither a list of frames nor a blob.
        WireFormatError: One is not a message; it is said which.
    """
    frames: list[list[ByteArray]] = []
    headers: list[bytes] = []
    opened: list[tuple[int, Header]] = []
    by_schema: dict[tuple[int, int], tuple[Schema, list[tuple[int, int, bytes]], list[bytes]]] = {}
    forms: dict[int, _Form] = {}
    for i, source in enumerate(sources):
        header, *rest = frame_arrays(source, f"{where}[{i}]")
        try:
            if not rest and is_blob(header):
                read, (_, *rest) = open_blob(header, limits)
                if read.checksums is not None:
                    check_frames(rest, read.checksums)
                opened.append((i, read))
                headers.append(b"")
                frames.append(rest)
                continue
            # A copy: what was checked must not change with the message's memory.
            whole = header.tobytes()
            size = len(whole)
            form = forms.get(size)
            if form and whole.startswith(form.before) and whole.endswith(form.behind):
                numbers = whole[len(form.before) : size - len(form.behind)]
                schema, values = form.schema, form.values
            else:
                _, packed, numbers, values = header_parts(whole, limits)
                schema = read_schema(packed)
                if len(numbers) > 8 and whole.count(numbers) == 1:
                    before, behind = whole.split(numbers)
                    forms[size] = _Form(before, behind, schema, values)
        except WireFormatError as error:
            raise of_message(i, error) from error
        found = by_schema.get((id(schema), len(numbers)))
        if found is None:
            found = by_schema[id(schema), len(numbers)] = (schema, [], [])
        found[1].append((i, size, values))
        found[2].append(numbers)
        headers.append(whole)
        frames.append(rest)
    stacks = stacked(opened)
    for schema, parts, packed_numbers in by_schema.values():
        numbers_of = np.frombuffer(b"".join(packed_numbers), dtype=np.int64)
        matrix = numbers_of.reshape(len(parts), -1)
        sound = _sound(schema, parts, matrix, frames, limits)
        for part in np.flatnonzero(~sound).tolist():
            i = parts[part][0]
            try:
                read = read_header(headers[i], limits)
                check_sizes(read, [len(frame) for frame in frames[i]])
                if read.checksums is not None:
                    check_frames(frames[i], read.checksums)
            except WireFormatError as error:
                raise of_message(i, error) from error
        members = np.array([i for i, _, _ in parts], dtype=np.int64)
        counts = matrix[:, schema.numbers : schema.numbers + 2]
        for pair in np.unique(counts, axis=0):
            same = np.flatnonzero((counts == pair).all(axis=1))
            packed_values = [parts[k][2] for k in same.tolist()]
            stacks.append(Stack(schema, members[same], matrix[same], packed_values))
    return stacks, frames


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
        Stack(schema, np.array(members, dtype=np.int64), np.array(numbers, dtype=np.int64), values)
        for schema, members, numbers, values in alike.values()
    ]


def of_message(index: int, error: WireFormatError) -> WireFormatError:
    """The error of one message of several."""
    return WireFormatError(error.reason, f"message {index}: {error.path}", error.detail)


_SIMPLE = frozenset(
    (Kind.TENSORDICT, Kind.TENSOR, Kind.JAGGED, Kind.NON_TENSOR_ROWS, Kind.NON_TENSOR_DATA)
)


def _sound(
    schema: Schema,
    parts: Sequence[tuple[int, int, bytes]],
    numbers: IntArray,
    frames: Sequence[Sequence[ByteArray]],
    limits: Limits,
) -> npt.NDArray[np.bool_]:
    """Which messages of one schema are sound at first sight; the others may be, too.

    As `read_header` checks them one by one, but no product is made of numbers that are larger
    than the payload, so that none can wrap around.
    """
    count, first = len(parts), schema.numbers + 2
    none = np.zeros(count, dtype=bool)
    simple = all(node.kind in _SIMPLE for node in schema.nodes)
    too_much = schema.columns > limits.columns or schema.depth > limits.depth
    if numbers.shape[1] < first or not simple or too_much:
        return none
    groups, sizes = numbers[0, first - 2 : first].tolist()
    if groups < 0 or sizes < 0 or first + 5 * groups + sizes != numbers.shape[1]:
        return none  # with checksums, or not numbers of a header
    sound = (numbers[:, first - 2 : first] == (groups, sizes)).all(axis=1)
    sound &= (numbers >= 0).all(axis=1)
    given = [[len(frame) for frame in frames[i]] for i, _, _ in parts]
    if not sound.all() or any(len(found) != sizes for found in given):
        return none
    size_of = np.array(given, dtype=np.int64).reshape(count, sizes)
    sound &= (numbers[:, first + 5 * groups :] == size_of).all(axis=1)
    payload = size_of.sum(axis=1)
    sound &= payload + np.array([size for _, size, _ in parts]) <= limits.bytes
    fits = {values: _values_fit(values, schema.values) for _, _, values in parts}
    sound &= np.array([fits[values] for _, _, values in parts])

    rows = np.arange(count)
    left = payload.copy()

    def claim(buffer: IntArray, offset: IntArray, size: IntArray) -> npt.NDArray[np.bool_]:
        """Whether bytes lie at a place; sizes are at most one more than those of the payload."""
        np.subtract(left, size, out=left)
        if not sizes:
            nothing: npt.NDArray[np.bool_] = size == 0
            return nothing
        held = size_of[rows, np.minimum(buffer, sizes - 1)]
        fits: npt.NDArray[np.bool_] = (buffer < sizes) & (offset <= held - size)
        fits |= size == 0
        return fits

    group_rows = np.zeros((count, groups), dtype=np.int64)
    for k in range(groups):
        buffer, offset, held, low, high = numbers[:, first + 5 * k : first + 5 * k + 5].T
        group_rows[:, k] = held
        sound &= (low <= high) & (held <= payload)
        few = held < 2
        sound &= ~few | ((low == high) & ((held == 1) | (high == 0)))
        fits = np.minimum(held, payload)
        sound &= claim(buffer, offset, np.where(few, 0, np.minimum(8 * (fits + 1), payload + 1)))
    objects = np.full(count, schema.size + groups + sizes, dtype=np.int64)
    for node in schema.nodes:
        i = node.number
        dims = numbers[:, node.dims : node.end]
        if node.kind is Kind.TENSORDICT or node.kind is Kind.NON_TENSOR_DATA:
            sound &= len(dims.T) == 1 and (dims[:, 0] <= MAX_UNBACKED_ROWS)
            continue
        if node.kind is Kind.NON_TENSOR_ROWS:
            group = numbers[:, i + 3]
            size = np.minimum(numbers[:, i + 2], payload + 1)
            known = np.minimum(group, max(groups - 1, 0))
            sound &= group < groups
            objects += group_rows[rows, known] if groups else 0
        else:
            sound &= numbers[:, i + 2] == PLAIN
            if node.kind is Kind.JAGGED:
                sound &= numbers[:, i + 3] < groups
            size = np.full(count, node.itemsize, dtype=np.int64)
            for dim in dims.T:
                # Both are at most 2**31 or so in any honest message; larger ones are looked at
                # one by one.
                sound &= (dim <= _MOST) & (size <= _MOST)
                size = np.minimum(size, _MOST) * np.minimum(dim, _MOST)
            sound &= size <= payload
            size = np.minimum(size, payload + 1)
        sound &= claim(numbers[:, i], numbers[:, i + 1], size)
    whole: npt.NDArray[np.bool_] = sound & (left >= 0) & (objects <= limits.objects)
    return whole


def _values_fit(packed: bytes, count: int) -> bool:
    if packed == NO_VALUES:
        return not count
    try:
        values = documents.unpack(packed, "values")
    except WireFormatError:
        return False
    return type(values) is list and len(values) - count in (0, 1)


_MOST = 1 << 31
"""Of factors whose product cannot wrap around."""
