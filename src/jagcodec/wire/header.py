"""The header: schema, numbers and values to bytes, and bytes to these parts.

A header is one msgpack map::

    {"jagcodec": version, "schema": Ext(16, ...), "numbers": bytes, "values": bytes}

The numbers are int64s, and the values msgpack of an array of documents, each in one byte string.
First come the numbers of the schema's nodes, then the counts of ragged groups and of frames, the
groups, the sizes of the frames and, if there are any, their sent sizes and checksums. Sent sizes
are the *stored sizes* of the wire format: sizes after compression.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
from msgpack import ExtType, UnpackException, unpackb

from jagcodec.errors import UnsupportedTypeError, WireFormatError, brief
from jagcodec.wire import documents
from jagcodec.wire.checks import fail
from jagcodec.wire.claims import check_claims
from jagcodec.wire.documents import not_msgpack
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS, Limits, exceeded
from jagcodec.wire.schema import GROUP_NUMBERS, Group, Schema, keep, read_schema
from jagcodec.wire.spec import EXPANSION, MAGIC, VERSION, Kind


class Header(NamedTuple):
    """A checked header."""

    schema: Schema
    numbers: list[int]  # the numbers of the schema's nodes, then all others
    values: list[Any]  # documents, in which records are arrays with a tag (see `documents`)
    number_bytes: bytes
    value_bytes: bytes
    groups: list[Group]
    sizes: list[int]  # bytes of each frame after the header, before it was compressed
    sent_sizes: list[int]  # bytes of each frame as sent; `sizes` itself if no frame is compressed
    total: int  # bytes of the message as sent, with the header
    checksums: list[int] | None  # the CRC-32 of each frame after the header
    objects: int  # how many objects the message asks for, as `Limits` count them

    @property
    def compressed(self) -> bool:
        """Whether the message has sent sizes."""
        return self.sent_sizes is not self.sizes


# --- writing -----------------------------------------------------------------------------------

_KEYS = [MAGIC, "schema", "numbers", "values"]
_start_of_tree: dict[Any, bytes] = {}


def header_start(tree: Any) -> bytes:
    """The bytes of a header up to its numbers; `tree` is its schema as nested tuples."""
    start = _start_of_tree.get(tree)
    if start is None:
        try:
            schema: bytes = msgpack.packb(tree, unicode_errors="surrogatepass")
        except ValueError as error:
            raise _too_large(str(error)) from error
        start = _until_numbers(schema)
        # Count 64 bytes of memory for each byte: the key holds tuples of names and numbers.
        keep(_start_of_tree, tree, start, 64 * len(schema))
    return start


def write_header(
    start: bytes,
    numbers: list[int],
    values: bytes,
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> bytes:
    """The header that begins with `start`, without sent sizes and checksums."""
    all_numbers = [*numbers, len(groups), len(sizes)]
    for group in groups:
        all_numbers += group
    all_numbers += sizes
    packed = struct.pack(f"<{len(all_numbers)}q", *all_numbers)
    return _join_header(start, packed, values)


def with_sent_sizes(header: bytes, sent_sizes: Sequence[int]) -> bytes:
    """A header with the sizes of its frames as they are sent, added to its numbers."""
    _, schema, numbers, values = split_any_header(header, NO_LIMITS)
    return _with_numbers(schema, numbers, sent_sizes, values)


def with_checksums(header: bytes, frames: Sequence[int]) -> bytes:
    """A header with its own checksum, and those of `frames`, added to its numbers."""
    _, schema, numbers, values = split_any_header(header, NO_LIMITS)
    whole = header_checksum(schema, numbers, values)
    return _with_numbers(schema, numbers, (whole, *frames), values)


def _with_numbers(schema: bytes, numbers: bytes, added: Sequence[int], values: bytes) -> bytes:
    more = numbers + struct.pack(f"<{len(added)}q", *added)
    return _join_header(_until_numbers(schema), more, values)


def _join_header(start: bytes, numbers: bytes, values: bytes) -> bytes:
    # These are the bytes that msgpack writes for the map; calling msgpack takes longer.
    end = _WITHOUT_VALUES if values == NO_VALUES else header_end(values)
    return b"".join((start, _BEFORE_NUMBERS, _bin_start(numbers), numbers, end))


def _until_numbers(schema: bytes) -> bytes:
    """The start of a header: everything before the key of its numbers."""
    mark, *size = _bin_start(schema)
    # An extension begins like a byte string, but its mark is three higher, and its code follows.
    return _BEFORE_SCHEMA + bytes((mark + 3, *size, _SCHEMA)) + schema


def header_end(values: bytes) -> bytes:
    """The end of a header: everything after its numbers."""
    return b"".join((_BEFORE_VALUES, _bin_start(values), values))


_BEFORE_SCHEMA = b"\x84" + b"".join(map(msgpack.packb, (MAGIC, VERSION, "schema")))
_BEFORE_NUMBERS, _BEFORE_VALUES = map(msgpack.packb, ("numbers", "values"))
_SCHEMA = int(Kind.SCHEMA)


def _bin_start(data: bytes) -> bytes:
    """The bytes that msgpack writes before a byte string."""
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


def header_checksum(schema: bytes, numbers: bytes, values: bytes) -> int:
    return zlib.crc32(values, zlib.crc32(numbers, zlib.crc32(schema)))


# --- bytes to parts ----------------------------------------------------------------------------

_MAGIC = b"\x84" + msgpack.packb(MAGIC)
_MAGIC_AND_VERSION = _MAGIC + msgpack.packb(VERSION)
NO_VALUES = b"\x90"


_schema_of_start: dict[bytes, Schema] = {}


def split_header(data: Any, limits: Limits) -> tuple[int, Schema, bytes, bytes]:
    """The size of frame 0, its schema, and the bytes of its numbers and values, unchecked."""
    parts = _split_known(data, limits)
    if parts is not None:
        return parts
    size, schema_bytes, numbers, values = split_any_header(data, limits)
    schema = read_schema(schema_bytes)
    if values == NO_VALUES:
        keep(_schema_of_start, _until_numbers(schema_bytes), schema, schema.memory_bytes)
    return size, schema, numbers, values


_LONGEST_LOOKED_UP = 1 << 16  # bytes of a header that is looked up by its start
_MOST_IN_BIN_8 = 2 + 255  # bytes of a byte string with msgpack's shortest start, which has two
_WITHOUT_VALUES = header_end(NO_VALUES)


def _split_known(data: Any, limits: Limits) -> tuple[int, Schema, bytes, bytes] | None:
    """What `split_header` returns, found faster; None if the schema is new or there are values."""
    size = len(data)
    if size > _LONGEST_LOOKED_UP or size > limits.header:
        return None
    # A copy: what was checked must not change with the message's memory.
    start, _, rest = bytes(data).partition(_BEFORE_NUMBERS)
    schema = _schema_of_start.get(start)
    end = len(rest) - len(_WITHOUT_VALUES)  # of the byte string of numbers
    # A longer byte string starts with three bytes (bin 16): it is below `_LONGEST_LOOKED_UP`.
    begin = 2 if end <= _MOST_IN_BIN_8 else 3
    numbers = rest[begin:end]
    if schema is None or rest[end:] != _WITHOUT_VALUES or len(numbers) % 8:
        return None
    return (size, schema, numbers, NO_VALUES) if rest[:begin] == _bin_start(numbers) else None


def split_any_header(data: Any, limits: Limits) -> tuple[int, bytes, bytes, bytes]:
    """The size of frame 0, and the bytes of its schema, numbers and values, all unchecked."""
    # Check the magic before copying the rest: a frame of something else may be large.
    start = bytes(data[: len(_MAGIC_AND_VERSION)])
    if start != _MAGIC_AND_VERSION:
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
        raise bad_header(f"the keys {', '.join(_KEYS)}", brief(list(fields)))
    _, schema, numbers, values = fields.values()
    if type(schema) is not ExtType or schema.code != _SCHEMA:
        raise bad_header(f"a schema (extension {_SCHEMA})", brief(schema))
    if type(numbers) is not bytes or len(numbers) % 8:
        raise bad_header("int64 numbers", brief(numbers))
    if type(values) is not bytes:
        raise bad_header("values", brief(values))
    return size, schema.data, numbers, values


def _check_start(data: Any, start: bytes) -> None:
    """Raise the error for bytes that are not the start of a header of this version."""
    if not start.startswith(_MAGIC):
        detail = (
            f"expected a map that begins with the key {MAGIC!r}, found {start[:-1]!r}; either this "
            "is not a jagcodec message (pickled data is never read), or its frames are out of "
            "order, or the transport's routing frames come first"
        )
        raise fail("foreign", detail, path="header")
    version_bytes = bytes(data[len(_MAGIC) : len(_MAGIC) + 16])
    # Without `max_buffer_size`, msgpack allocates a mebibyte for any input.
    unpacker = msgpack.Unpacker(max_buffer_size=len(version_bytes) or 1)
    unpacker.feed(version_bytes)
    try:
        version = unpacker.unpack()
    except (ValueError, TypeError, RecursionError, UnpackException) as error:
        raise not_msgpack(error, "header") from error
    if type(version) is not int or version != VERSION:
        detail = f"expected format version {VERSION}, found {brief(version)}; upgrade the older one"
        raise fail("unknown_version", detail, path="header")


def bad_header(expected: str, found: Any) -> WireFormatError:
    return fail("bad_header", f"expected {expected}, found {found}", path="header")


def check_crc(found: int, expected: int, path: str) -> None:
    """Refuse bytes whose CRC-32 (as in zlib, PNG and Ethernet) is not the expected one."""
    if found != expected:
        detail = (
            f"expected a CRC-32 of {brief(expected)}, found {found}; the bytes were damaged or "
            "changed places on the way, or were written to after they were encoded"
        )
        raise fail("bad_checksum", detail, path=path)


# --- the checked header ------------------------------------------------------------------------


def read_header(data: Any, limits: Limits = DEFAULT_LIMITS, *, in_row: bool = False) -> Header:
    """The checked header in frame 0; `in_row` if the message is a row of another."""
    size, schema, number_bytes, value_bytes = split_header(data, limits)
    numbers = memoryview(number_bytes).cast("q").tolist()
    if len(numbers) < schema.first_group:
        raise bad_header(f"{schema.first_group} numbers or more", len(numbers))
    if not number_bytes[7::8].isascii():  # the highest byte of a number has its sign
        raise bad_header("no negative number", min(numbers))
    groups, sizes, sent_sizes, checksums = _after_nodes(schema, numbers)
    if checksums:
        covered = number_bytes[: -8 * len(checksums)]
        check_crc(header_checksum(schema.data, covered, value_bytes), checksums[0], "header")
    total, objects = check_claims(schema, numbers, groups, sizes, sent_sizes, size, limits, in_row)
    values: list[Any] = []
    if value_bytes != NO_VALUES or schema.value_count:
        values = _read_values(schema, value_bytes)
    return Header(
        schema,
        numbers,
        values,
        number_bytes,
        value_bytes,
        groups,
        sizes,
        sent_sizes,
        total,
        checksums[1:] if checksums else None,
        objects,
    )


def _after_nodes(
    schema: Schema, numbers: list[int]
) -> tuple[list[Group], list[int], list[int], list[int]]:
    """The numbers after those of the nodes: groups, sizes, sent sizes and checksums.

    If no frame is compressed, the sent sizes are the same list as the sizes.
    """
    frames, begin = numbers[schema.frame_count], schema.first_group
    first_size = schema.first_size(numbers[schema.group_count])
    end = first_size + frames
    sizes = sent_sizes = numbers[first_size:end]
    checksums: list[int] = []
    more = len(numbers) - end
    if more:
        checksums = numbers[end:]
        if frames and more in (frames, 1 + 2 * frames):
            sent_sizes, checksums = checksums[:frames], checksums[frames:]
        if more < 0 or len(checksums) not in (0, 1 + frames):
            what = f"numbers of {numbers[schema.group_count]} groups and {frames} frames"
            raise bad_header(what, f"{len(numbers) - begin} numbers")
    groups = [
        Group._make(numbers[i : i + GROUP_NUMBERS]) for i in range(begin, first_size, GROUP_NUMBERS)
    ]
    return groups, sizes, sent_sizes, checksums


def _read_values(schema: Schema, data: bytes) -> list[Any]:
    values = documents.parsed(data, "values")
    # If there is one value more than the schema has, it is the `meta` of the whole message.
    if type(values) is not list or len(values) - schema.value_count not in (0, 1):
        raise bad_header(f"{schema.value_count} values", brief(values))
    return values


def is_accepted(header: bytes, repeated_bytes: int) -> bool:
    """Whether readers with default limits accept a message with this header.

    `repeated_bytes` is the size of its repeated documents that become objects.
    """
    try:
        total = read_header(header, DEFAULT_LIMITS).total
    except WireFormatError:
        return False
    return EXPANSION * (repeated_bytes - EXPANSION * total) <= DEFAULT_LIMITS.expanded
