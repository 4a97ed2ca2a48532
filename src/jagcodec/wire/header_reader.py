"""`read_header`: frame 0 to a `Header`, with every number in it checked."""

from __future__ import annotations

from typing import Any

from jagcodec.errors import WireFormatError, brief
from jagcodec.wire import documents
from jagcodec.wire.claims import check_claims
from jagcodec.wire.header import (
    NO_VALUES,
    Header,
    bad_header,
    check_crc,
    header_checksum,
    opened_header,
)
from jagcodec.wire.limits import DEFAULT_LIMITS, Limits
from jagcodec.wire.schema import GROUP_NUMBERS, Group, Schema
from jagcodec.wire.spec import EXPANSION


def read_header(data: Any, limits: Limits = DEFAULT_LIMITS, *, in_row: bool = False) -> Header:
    """Check frame 0, and every number in it; `in_row`: the message is a row of another."""
    size, schema, packed_numbers, packed_values = opened_header(data, limits)
    numbers = memoryview(packed_numbers).cast("q").tolist()
    if len(numbers) < schema.first_group:
        raise bad_header(f"{schema.first_group} numbers or more", len(numbers))
    if not packed_numbers[7::8].isascii():  # their high bytes, with the signs
        raise bad_header("no negative number", min(numbers))
    groups, sizes, stored, checksums = _after_nodes(schema, numbers)
    if checksums:
        covered = packed_numbers[: -8 * len(checksums)]
        check_crc(header_checksum(schema.packed, covered, packed_values), checksums[0], "header")
    total, objects = check_claims(schema, numbers, groups, sizes, stored, size, limits, in_row)
    values: list[Any] = []
    if packed_values != NO_VALUES or schema.value_count:
        values = _read_values(schema, packed_values)
    return Header(
        schema,
        numbers,
        values,
        packed_numbers,
        packed_values,
        groups,
        sizes,
        stored,
        total,
        checksums[1:] if checksums else None,
        objects,
    )


def _after_nodes(
    schema: Schema, numbers: list[int]
) -> tuple[list[Group], list[int], list[int], list[int]]:
    """The numbers after those of the nodes: groups, sizes, stored sizes and checksums.

    The stored sizes are the sizes themselves where no frame is compressed.
    """
    frames, begin = numbers[schema.frame_count], schema.first_group
    first_size = schema.first_size(numbers[schema.group_count])
    end = first_size + frames
    sizes = stored = numbers[first_size:end]
    checksums: list[int] = []
    more = len(numbers) - end
    if more:
        checksums = numbers[end:]
        if frames and more in (frames, 1 + 2 * frames):
            stored, checksums = checksums[:frames], checksums[frames:]
        if more < 0 or len(checksums) not in (0, 1 + frames):
            what = f"numbers of {numbers[schema.group_count]} groups and {frames} frames"
            raise bad_header(what, f"{len(numbers) - begin} numbers")
    groups = [
        Group._make(numbers[i : i + GROUP_NUMBERS]) for i in range(begin, first_size, GROUP_NUMBERS)
    ]
    return groups, sizes, stored, checksums


def _read_values(schema: Schema, packed: bytes) -> list[Any]:
    values = documents.unpack(packed, "values")
    # One value more than the schema has is the `meta` of the whole message.
    if type(values) is not list or len(values) - schema.value_count not in (0, 1):
        raise bad_header(f"{schema.value_count} values", brief(values))
    return values


def is_accepted(header: bytes, indirect_bytes: int) -> bool:
    """Whether readers accept, by default, this many bytes of indirect documents in a message."""
    try:
        total = read_header(header, DEFAULT_LIMITS).total
    except WireFormatError:
        return False
    return EXPANSION * (indirect_bytes - EXPANSION * total) <= DEFAULT_LIMITS.expanded
