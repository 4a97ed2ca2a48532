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
from msgpack import ExtType, UnpackException, unpackb

from jagcodec.errors import UnsupportedTypeError, WireFormatError, brief
from jagcodec.wire import documents
from jagcodec.wire.checks import fail
from jagcodec.wire.documents import not_msgpack
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS, Limits, exceeded
from jagcodec.wire.schema import Group, Schema, check_numbers, keep, read_schema
from jagcodec.wire.spec import EXPANSION, MAGIC, MAX_BYTES, VERSION, Kind


class Header(NamedTuple):
    """A checked header."""

    schema: Schema
    numbers: list[int]  # those of the schema's nodes, and more after them
    values: list[Any]  # documents; records in them are arrays with a tag (see `documents`)
    packed_numbers: bytes
    packed_values: bytes
    records: bool  # whether there may be any
    groups: list[Group]
    sizes: list[int]  # bytes of each frame after the header, before it was compressed
    stored: list[int]  # bytes as it is sent; `sizes` itself where no frame is compressed
    total: int  # bytes of the header and of the frames as they are sent
    checksums: list[int] | None  # the CRC-32 of each frame after the header
    objects: int  # how many it asks for, as `Limits` count them

    @property
    def compressed(self) -> bool:
        """Whether the message has stored sizes."""
        return self.stored is not self.sizes


# --- writing -----------------------------------------------------------------------------------

_KEYS = [MAGIC, "schema", "numbers", "values"]
_known: dict[Any, bytes] = {}


def start_of(tree: Any) -> bytes:
    """A header up to its numbers: with its schema, nested tuples of names, numbers and so on."""
    known = _known.get(tree)
    if known is None:
        try:
            schema: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
        except ValueError as error:
            raise _too_large(str(error)) from error
        known = _until_numbers(schema)
        # The tuples of names and numbers take more memory than their bytes.
        keep(_known, tree, known, 64 * len(schema))
    return known


def write_header(
    start: bytes,
    numbers: list[int],
    values: bytes,
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> bytes:
    """The header that begins with `start`, of a message without stored sizes and checksums."""
    all_numbers = [*numbers, len(groups), len(sizes)]
    for group in groups:
        all_numbers += group
    all_numbers += sizes
    packed = struct.pack(f"<{len(all_numbers)}q", *all_numbers)
    return _joined(start, packed, values)


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
    return _joined(_until_numbers(schema), more, values)


def _joined(start: bytes, numbers: bytes, values: bytes) -> bytes:
    # What msgpack makes of the map, which takes longer to begin than this does.
    end = _WITHOUT_VALUES if values == NO_VALUES else behind_numbers(values)
    return b"".join((start, _BEFORE_NUMBERS, _bin_start(numbers), numbers, end))


def _until_numbers(schema: bytes) -> bytes:
    """What begins a header: everything before the key of its numbers."""
    mark, *size = _bin_start(schema)
    # An extension begins as a byte string does, with a mark that is three higher, and has a code.
    return _BEFORE_SCHEMA + bytes((mark + 3, *size, _SCHEMA)) + schema


def behind_numbers(values: bytes) -> bytes:
    """The end of a header: everything after its numbers."""
    return b"".join((_BEFORE_VALUES, _bin_start(values), values))


_BEFORE_SCHEMA = b"\x84" + b"".join(map(msgpack.packb, (MAGIC, VERSION, "schema")))
_BEFORE_NUMBERS, _BEFORE_VALUES = map(msgpack.packb, ("numbers", "values"))
_SCHEMA = int(Kind.SCHEMA)


def _bin_start(data: bytes) -> bytes:
    """What msgpack writes before a byte string."""
    size = len(data)
    if size < 1 << 8:
        return b"\xc4" + size.to_bytes(1, "big")
    if size < 1 << 16:
        return b"\xc5" + size.to_bytes(2, "big")
    if size < 1 << 32:
        return b"\xc6" + size.to_bytes(4, "big")
    raise _too_large(f"expected schema, numbers and values below 2**32 bytes each, found {size}")


def _too_large(detail: str) -> UnsupportedTypeError:
    return UnsupportedTypeError("too_large", "$", detail)


def _header_checksum(schema: bytes, numbers: bytes, values: bytes) -> int:
    return zlib.crc32(values, zlib.crc32(numbers, zlib.crc32(schema)))


# --- reading -----------------------------------------------------------------------------------

_MAGIC = b"\x84" + msgpack.packb(MAGIC)
_START = _MAGIC + msgpack.packb(VERSION)
NO_VALUES = b"\x90"


def read_header(data: Any, limits: Limits = DEFAULT_LIMITS, *, in_row: bool = False) -> Header:
    """Check frame 0, and every number in it; `in_row`: the message is a row of another."""
    known = _known_parts(data, limits)
    if known is not None:
        size, schema, packed_numbers, packed_values = known
    else:
        size, packed_schema, packed_numbers, packed_values = header_parts(data, limits)
        schema = read_schema(packed_schema)
        if packed_values == NO_VALUES:
            keep(_starts, _until_numbers(packed_schema), schema, schema.weight)
    numbers = memoryview(packed_numbers).cast("q").tolist()
    first = schema.numbers + 2
    if len(numbers) < first:
        raise _bad(f"{first} numbers or more", len(numbers))
    if not packed_numbers[7::8].isascii():  # their high bytes, with the signs
        raise _bad("no negative number", min(numbers))
    count = numbers[first - 1]
    ends = first + 5 * numbers[first - 2]
    sizes = stored = numbers[ends : ends + count]
    checksums: list[int] = []
    more = len(numbers) - ends - count
    if more:
        checksums = numbers[ends + count :]
        if count and more in (count, 1 + 2 * count):
            stored, checksums = checksums[:count], checksums[count:]
        if more < 0 or len(checksums) not in (0, 1 + count):
            what = f"numbers of {numbers[first - 2]} groups and {count} frames"
            raise _bad(what, f"{len(numbers) - first} numbers")
    groups = [Group._make(numbers[i : i + 5]) for i in range(first, ends, 5)]
    if checksums:
        covered = packed_numbers[: -8 * len(checksums)]
        check_crc(_header_checksum(schema.packed, covered, packed_values), checksums[0], "header")

    payload = sum(sizes)
    if payload >= MAX_BYTES:
        raise _bad("sizes below 2**56 in all", brief(sizes))
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
            raise _bad(f"{schema.values} values", brief(values))
    return Header(
        schema,
        numbers,
        values,
        packed_numbers,
        packed_values,
        records,
        groups,
        sizes,
        stored,
        total,
        checksums[1:] if checksums else None,
        objects,
    )


_starts: dict[bytes, Schema] = {}
_SHORT = 1 << 16
_WITHOUT_VALUES = behind_numbers(NO_VALUES)


def _known_parts(data: Any, limits: Limits) -> tuple[int, Schema, bytes, bytes] | None:
    """As `header_parts`, with the schema itself, if it is known and the header has no values."""
    size = len(data)
    if size > _SHORT or size > limits.header:
        return None
    # A copy: what was checked must not change with the message's memory.
    start, _, rest = bytes(data).partition(_BEFORE_NUMBERS)
    schema, end = _starts.get(start), len(rest) - len(_WITHOUT_VALUES)
    begin = 2 if end < 258 else 3
    numbers = rest[begin:end]
    if schema is None or rest[end:] != _WITHOUT_VALUES or len(numbers) % 8:
        return None
    return (size, schema, numbers, NO_VALUES) if rest[:begin] == _bin_start(numbers) else None


def _check_rectangles(
    schema: Schema, numbers: list[int], groups: list[Group], total: int, limits: Limits
) -> None:
    """Refuse compressed rows that ask for larger rectangles than plain rows could."""
    # The cells of plain rows are in the message: rectangles are less than the square of its bytes.
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


def is_accepted(header: bytes, documents: int) -> bool:
    """Whether readers accept, by default, a message with so many bytes of indirect documents."""
    try:
        total = read_header(header, DEFAULT_LIMITS).total
    except WireFormatError:
        return False
    return EXPANSION * (documents - EXPANSION * total) <= DEFAULT_LIMITS.expanded


def _check_stored(stored: Sequence[int], sizes: Sequence[int], *, in_row: bool) -> None:
    if in_row:
        raise fail("bad_record", "expected no compressed frames in a row, found some")
    for i, (sent, size) in enumerate(zip(stored, sizes, strict=True)):
        if sent > size:
            path = f"frame {i + 1}"
            raise fail("bad_header", f"expected at most {size} bytes, found {sent}", path=path)


def header_parts(data: Any, limits: Limits) -> tuple[int, bytes, bytes, bytes]:
    """The size of frame 0, and the bytes of its schema, numbers and values, all unchecked."""
    # Before the rest is copied: a frame of something else may be large.
    start = bytes(data[: len(_START)])
    if start != _START:
        _check_start(data, start)
    size = len(data)
    if size > limits.header:
        raise exceeded("header", limits.header, size, "bytes", "header")
    try:
        # A copy: what was checked must not change with the message's memory.
        fields = unpackb(bytes(data), max_array_len=0, max_map_len=4, strict_map_key=True)
    except (ValueError, TypeError, UnpackException) as error:
        raise not_msgpack(error, "header") from error
    if [*fields] != _KEYS:
        raise _bad(f"the keys {', '.join(_KEYS)}", brief(list(fields)))
    _, schema, numbers, values = fields.values()
    if type(schema) is not ExtType or schema.code != _SCHEMA:
        raise _bad(f"a schema (extension {_SCHEMA})", brief(schema))
    if type(numbers) is not bytes or len(numbers) % 8:
        raise _bad("int64 numbers", brief(numbers))
    if type(values) is not bytes:
        raise _bad("values", brief(values))
    return size, schema.data, numbers, values


def _check_start(data: Any, start: bytes) -> None:
    """Refuse the first bytes of something else, or of another version."""
    if not start.startswith(_MAGIC):
        detail = f"expected a map that begins with the key {MAGIC!r}, found {start[:-1]!r}; either "
        detail += "this is not a jagcodec message (pickled data is never read), or its frames are "
        detail += "out of order, or the transport's routing frames come first"
        raise fail("foreign", detail, path="header")
    version_bytes = bytes(data[len(_MAGIC) : len(_MAGIC) + 16])
    # Without a bound it allocates a mebibyte for any input.
    unpacker = msgpack.Unpacker(max_buffer_size=len(version_bytes) or 1)
    unpacker.feed(version_bytes)
    try:
        version = unpacker.unpack()
    except (ValueError, TypeError, RecursionError, UnpackException) as error:
        raise not_msgpack(error, "header") from error
    if type(version) is not int or version != VERSION:
        detail = f"expected format version {VERSION}, found {brief(version)}; upgrade the older one"
        raise fail("unknown_version", detail, path="header")


def _bad(expected: str, found: Any) -> WireFormatError:
    return fail("bad_header", f"expected {expected}, found {found}", path="header")


def check_crc(found: int, expected: int, path: str) -> None:
    """Compare a CRC-32 (the one of zlib, PNG and Ethernet)."""
    if found != expected:
        detail = (
            f"expected a CRC-32 of {brief(expected)}, found {found}; the bytes were damaged or "
        )
        detail += "changed places on the way, or were written to after they were encoded"
        raise fail("bad_checksum", detail, path=path)
