"""The header: bytes to schema, numbers and values, and back.

A header is one msgpack map::

    {"jagcodec": version, "schema": Ext(16, ...), "numbers": int64s, "values": array of documents}

The numbers are those of the schema's nodes, then the counts of ragged groups and of frames, the
groups, the sizes of the frames and, if there are any, their stored sizes and checksums.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from jagcodec.errors import WireFormatError, brief
from jagcodec.wire import documents
from jagcodec.wire.checks import INT64_MAX, fail
from jagcodec.wire.documents import not_msgpack
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS, Limits, exceeded
from jagcodec.wire.schema import (
    Group,
    Schema,
    check_numbers,
    keep,
    read_schema,
)
from jagcodec.wire.spec import EXPANSION, MAGIC, VERSION, Kind


class Header(NamedTuple):
    """A checked header.

    Attributes:
        schema: What the message is made of.
        numbers: Those of the schema's nodes, and more after them.
        values: The documents in it, records as arrays with a tag (see `documents`).
        packed_numbers: All numbers, as bytes.
        packed_values: The values, as bytes.
        records: Whether there may be any.
        groups: The ragged groups.
        sizes: Bytes of each frame after the header, before it was compressed.
        stored: Bytes of each as it is sent; `sizes` itself where no frame is compressed.
        total: Bytes of the header and of the frames as they are sent.
        checksums: The CRC-32 of each of them, or None.
        objects: How many objects it asks for, as `Limits` count them.
    """

    schema: Schema
    numbers: list[int]
    values: list[Any]
    packed_numbers: bytes
    packed_values: bytes
    records: bool
    groups: list[Group]
    sizes: list[int]
    stored: list[int]
    total: int
    checksums: list[int] | None
    objects: int

    @property
    def compressed(self) -> bool:
        """Whether the message has stored sizes."""
        return self.stored is not self.sizes


# --- writing -----------------------------------------------------------------------------------

_KEYS = (MAGIC, "schema", "numbers", "values")
_known: dict[Any, bytes] = {}


def _start_of(tree: Any) -> bytes:
    """A header up to its numbers: with its schema, nested tuples of names, numbers and so on."""
    known = _known.get(tree)
    if known is None:
        schema: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
        known = _until_numbers(schema)
        # The tuples of names and numbers take more memory than their bytes.
        keep(_known, tree, known, 64 * len(schema))
    return known


def write_header(
    tree: Any,
    numbers: list[int],
    values: bytes,
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> bytes:
    """The header of a message without stored sizes and checksums, from the parts of `Header`.

    Raises:
        ValueError: It is too large for msgpack.
    """
    start = _start_of(tree)
    all_numbers = [*numbers, len(groups), len(sizes)]
    for group in groups:
        all_numbers += group
    all_numbers += sizes
    packed = struct.pack(f"<{len(all_numbers)}q", *all_numbers)
    # Put together from what msgpack makes of the keys: it takes longer to begin than this does.
    return b"".join((start, _size(_BIN_SIZES, len(packed)), packed, behind_numbers(values)))


def with_stored_sizes(header: bytes, stored: Sequence[int]) -> bytes:
    """A header that ends with the sizes of its frames, with their stored sizes."""
    _, schema, numbers, values = header_parts(header, NO_LIMITS)
    return _with_numbers(schema, numbers, stored, values)


def with_checksums(header: bytes, frames: Sequence[int]) -> bytes:
    """A header with its own checksum and those of the frames after it."""
    _, schema, numbers, values = header_parts(header, NO_LIMITS)
    whole = _header_checksum(schema, numbers, values)
    return _with_numbers(schema, numbers, (whole, *frames), values)


def _with_numbers(schema: bytes, numbers: bytes, added: Sequence[int], values: bytes) -> bytes:
    more = numbers + struct.pack(f"<{len(added)}q", *added)
    size = _size(_BIN_SIZES, len(more))
    return b"".join((_until_numbers(schema), size, more, behind_numbers(values)))


def _until_numbers(schema: bytes) -> bytes:
    """What begins a header: everything before its numbers."""
    size = _size(_EXT_SIZES, len(schema))
    return b"".join((_BEFORE_SCHEMA, size, _SCHEMA_CODE, schema, _BEFORE_NUMBERS))


def behind_numbers(values: bytes) -> bytes:
    """The end of a header: everything after its numbers."""
    return b"".join((_BEFORE_VALUES, _size(_BIN_SIZES, len(values)), values))


_BEFORE_SCHEMA = b"\x84" + b"".join(map(msgpack.packb, (MAGIC, VERSION, "schema")))
_BEFORE_NUMBERS, _BEFORE_VALUES = map(msgpack.packb, ("numbers", "values"))
_SCHEMA_CODE = bytes([Kind.SCHEMA])
# The first bytes of an extension and of a byte string, by how many bytes their size needs.
_EXT_SIZES = (b"\xc7", b"\xc8", b"\xc9")
_BIN_SIZES = (b"\xc4", b"\xc5", b"\xc6")


def _size(first: tuple[bytes, bytes, bytes], size: int) -> bytes:
    """What msgpack writes before `size` bytes."""
    if size < 1 << 8:
        return first[0] + size.to_bytes(1, "big")
    if size < 1 << 16:
        return first[1] + size.to_bytes(2, "big")
    if size < 1 << 32:
        return first[2] + size.to_bytes(4, "big")
    raise ValueError(f"{size} bytes of schema, numbers or values; msgpack allows 2**32 - 1")


def _header_checksum(schema: bytes, numbers: bytes, values: bytes) -> int:
    return zlib.crc32(values, zlib.crc32(numbers, zlib.crc32(schema)))


# --- reading -----------------------------------------------------------------------------------

_START = b"\x84" + msgpack.packb(MAGIC)
_VERSION = msgpack.packb(VERSION)
NO_VALUES = b"\x90"
_WITHOUT_VALUES = behind_numbers(NO_VALUES)


def read_header(data: Any, limits: Limits = DEFAULT_LIMITS, *, in_row: bool = False) -> Header:
    """Check frame 0, and every number in it, without the other frames.

    Args:
        data: The header's bytes (any contiguous buffer).
        limits: Bounds for the message.
        in_row: Whether the message is a row of another.

    Raises:
        WireFormatError: `data` is not a valid header of this version.
    """
    known = _parts_at_sight(data, limits)
    if known is not None:
        size, schema, packed_numbers, packed_values = known
    else:
        size, packed_schema, packed_numbers, packed_values = header_parts(data, limits)
        schema = read_schema(packed_schema)
        if packed_values == NO_VALUES:
            keep(_starts, _until_numbers(packed_schema), schema, schema.weight)
    numbers = memoryview(packed_numbers).cast("q").tolist()
    first = schema.numbers
    if len(numbers) < first + 2:
        raise fail(
            "bad_header",
            f"expected {first + 2} numbers or more, found {len(numbers)}",
            path="header",
        )
    if not packed_numbers[7::8].isascii():  # their high bytes, with the signs
        raise fail(
            "bad_header", f"expected no negative number, found {min(numbers)}", path="header"
        )
    first += 2
    ends = first + 5 * numbers[first - 2]
    count = numbers[first - 1]
    sizes = numbers[ends : ends + count]
    stored, checksums = sizes, numbers[ends + count :]
    more = len(numbers) - ends - count
    if more > 0 and count and more in (count, 1 + 2 * count):
        stored, checksums = checksums[:count], checksums[count:]
    if more < 0 or len(checksums) not in (0, 1 + count):
        raise fail(
            "bad_header",
            f"expected numbers of {numbers[first - 2]} groups and {count} frames, "
            f"found {len(numbers) - first} numbers",
            path="header",
        )
    groups = [Group(*numbers[i : i + 5]) for i in range(first, ends, 5)]
    if checksums:
        covered = packed_numbers[: -8 * len(checksums)]
        found = _header_checksum(schema.packed, covered, packed_values)
        check_crc(found, checksums[0], "header")

    payload = sum(sizes)
    if payload > INT64_MAX:
        raise fail("bad_header", f"expected sizes below 2**63, found {brief(sizes)}", path="header")
    total = size + payload
    if total > limits.bytes:
        raise exceeded("bytes", limits.bytes, total, "bytes of header and frames", "header")
    if schema.depth > limits.depth:
        raise exceeded("depth", limits.depth, schema.depth, "levels", "header")
    if stored is not sizes:
        _check_stored(stored, sizes, in_row=in_row)
        total = size + sum(stored)
    expanded, asked = check_numbers(schema, numbers, groups, sizes, in_row=in_row)
    beyond = expanded - EXPANSION * total
    if stored is not sizes:
        beyond += payload
        _check_rectangles(schema, numbers, groups, total, limits)
    if beyond > limits.expanded:
        what = f"bytes of values and frames beyond {EXPANSION} for each byte of the message"
        raise exceeded("expanded", limits.expanded, beyond, what, "header")
    objects = schema.size + len(groups) + count + asked
    if objects > limits.objects:
        raise exceeded("objects", limits.objects, objects, "objects", "header")
    values: list[Any] = []
    records = False
    if packed_values != NO_VALUES or schema.values:
        values = documents.unpack(packed_values, "values")
        records = documents.may_hold_records(packed_values)
        # One more than the schema has is what belongs to the whole message.
        if type(values) is not list or len(values) - schema.values not in (0, 1):
            raise fail(
                "bad_header",
                f"expected {schema.values} values, found {brief(values)}",
                path="header",
            )
    frames = checksums[1:] or None
    packed = packed_numbers, packed_values
    parts = schema, numbers, values, *packed, records, groups, sizes, stored, total, frames, objects
    return Header(*parts)


def _check_rectangles(
    schema: Schema, numbers: list[int], groups: list[Group], total: int, limits: Limits
) -> None:
    """Refuse compressed rows that ask for more, once they are padded, than plain rows could.

    Plain rows have offsets and cells in the message, so their rectangles are smaller than the
    square of its bytes.
    """
    padded = 0
    for node in schema.nodes:
        if node.kind is Kind.JAGGED:
            inner = numbers[node.dims : node.end]
            del inner[node.fields[2] - 1]
            group = groups[numbers[node.number + 3]]
            padded += group.rows * group.max * math.prod(inner) * node.itemsize
    if padded > max(total**2, limits.expanded):
        what = "bytes of padded rows, more than the square of the message's bytes"
        raise exceeded("expanded", limits.expanded, padded, what, "header")


_starts: dict[bytes, Schema] = {}
_SCHEMA_AT = len(_BEFORE_SCHEMA)
_SHORT = 1 << 16


def _parts_at_sight(data: Any, limits: Limits) -> tuple[int, Schema, bytes, bytes] | None:
    """As `header_parts`, of a header without values as this library writes it, whose bytes up to
    its numbers are known, and with the schema itself; None of any other.
    """
    view = memoryview(data)
    if not 64 < len(view) <= min(_SHORT, limits.header):
        return None
    # A copy: what was checked must not change with the message's memory.
    whole = bytes(view)
    first, size = whole[_SCHEMA_AT], whole[_SCHEMA_AT + 1]
    if first == 0xC7:
        at = _SCHEMA_AT + 3 + size + len(_BEFORE_NUMBERS)
    else:  # of an extension of 256 bytes or more, or the bytes are not known
        at = _SCHEMA_AT + 4 + (size << 8 | whole[_SCHEMA_AT + 2]) + len(_BEFORE_NUMBERS)
    schema = _starts.get(whole[:at])
    if schema is None or at + 3 > len(whole):
        return None
    first, size = whole[at], whole[at + 1]
    at += 2
    if first == 0xC5:
        size = size << 8 | whole[at]
        at += 1
    elif first != 0xC4:
        return None
    numbers = whole[at : at + size]
    if size % 8 or whole[at + size :] != _WITHOUT_VALUES:
        return None
    return len(whole), schema, numbers, NO_VALUES


def is_accepted(header: bytes, documents: int) -> bool:
    """Whether readers accept a message by default, as many bytes of whose documents are indirect.

    A writer that makes a message smaller asks this, because less may be made of few bytes.
    """
    try:
        total = read_header(header, DEFAULT_LIMITS).total
    except WireFormatError:
        return False
    return EXPANSION * (documents - EXPANSION * total) <= DEFAULT_LIMITS.expanded


def _check_stored(stored: Sequence[int], sizes: Sequence[int], *, in_row: bool) -> None:
    """Check the stored sizes of frames."""
    if in_row:
        raise fail("bad_record", "expected no compressed frames in a row, found some")
    for i, (sent, size) in enumerate(zip(stored, sizes, strict=True)):
        if sent > size:
            path = f"frame {i + 1}"
            raise fail("bad_header", f"expected at most {size} bytes, found {sent}", path=path)


def header_parts(data: Any, limits: Limits) -> tuple[int, bytes, bytes, bytes]:
    """The size of frame 0, and the bytes of its schema, numbers and values, all unchecked.

    Raises:
        WireFormatError: `data` is not a header of this version.
    """
    # Before the rest is copied: a frame of something else may be large.
    view = memoryview(data)
    start = bytes(view[: len(_START) + 1])
    if start != _START + _VERSION:
        _check_start(data, start)
    if len(view) > limits.header:
        raise exceeded("header", limits.header, len(view), "bytes", "header")
    # A copy: what was checked must not change with the message's memory.
    whole = bytes(data)
    try:
        fields = msgpack.unpackb(whole, max_array_len=0, max_map_len=4, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise not_msgpack(error, "header") from error
    if tuple(fields) != _KEYS:
        raise fail(
            "bad_header",
            f"expected the keys {', '.join(_KEYS)}, found {brief(list(fields))}",
            path="header",
        )
    _, schema, numbers, values = fields.values()
    if type(schema) is not msgpack.ExtType or schema.code != Kind.SCHEMA:
        expected = f"a schema (extension {Kind.SCHEMA:d})"
        raise fail("bad_header", f"expected {expected}, found {brief(schema)}", path="header")
    if type(numbers) is not bytes or len(numbers) % 8:
        raise fail("bad_header", f"expected int64 numbers, found {brief(numbers)}", path="header")
    if type(values) is not bytes:
        raise fail("bad_header", f"expected values, found {brief(values)}", path="header")
    return len(whole), schema.data, numbers, values


def _check_start(data: Any, start: bytes) -> None:
    """Check the first bytes of a header."""
    if start[: len(_START)] != _START:
        raise fail(
            "foreign",
            f"expected a map that begins with the key {MAGIC!r}, found {start[:-1]!r}; either "
            "this is not a jagcodec message (pickled data is never read), or its frames are out of "
            "order, or the transport's routing frames come first",
            path="header",
        )
    version_bytes = bytes(memoryview(data)[len(_START) : len(_START) + 16])
    # Without a bound it allocates a mebibyte for any input.
    unpacker = msgpack.Unpacker(max_buffer_size=len(version_bytes) or 1)
    unpacker.feed(version_bytes)
    try:
        version = unpacker.unpack()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise not_msgpack(error, "header") from error
    if type(version) is not int or version != VERSION:
        raise fail(
            "unknown_version",
            f"expected format version {VERSION}, found {brief(version)}; upgrade the older side",
            path="header",
        )


def check_crc(found: int, expected: int, path: str) -> None:
    """Compare a CRC-32 (the one of zlib, PNG and Ethernet)."""
    if found != expected:
        raise fail(
            "bad_checksum",
            f"expected a CRC-32 of {brief(expected)}, found {found}; the bytes were damaged or "
            "changed places on the way, or were written to after they were encoded",
            path=path,
        )
