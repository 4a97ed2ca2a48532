"""Checks of single values of a header. Plain Python: no torch, no numpy, no msgpack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jagcodec.errors import Reason, WireFormatError
from jagcodec.wire.spec import MAX_EQUAL_HASHES, MAX_NDIM

INT64_MAX = (1 << 63) - 1


class Place(NamedTuple):
    """Where a value's bytes lie: a buffer of the table and a byte offset into it."""

    buffer: int
    offset: int


def fail(reason: Reason, detail: str, *, path: str = "$") -> WireFormatError:
    return WireFormatError(reason, path, detail)


def brief(value: Any) -> str:
    """A value in a few words, whatever its size: a stranger may have chosen it.

    Never its whole `repr`, which can be as long as the value, take as long, or raise.
    """
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if type(value) is int and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    plain = (int, str, bool, type(None))
    if type(value) in (list, tuple) and len(value) <= 8 and all(type(v) in plain for v in value):
        return f"[{', '.join(map(brief, value))}]"
    if type(value) in (list, tuple, dict):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def expect(ok: bool, reason: Reason, expected: str, found: Any, path: str = "$") -> None:
    if not ok:
        raise fail(reason, f"expected {expected}, found {brief(found)}", path=path)


def count(value: Any, what: str, reason: Reason = "bad_record", *, path: str = "$") -> int:
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise fail(reason, f"expected {what} (0 to 2**63 - 1), found {brief(value)}", path=path)
    return value


def counts(values: Sequence[Any], what: str, reason: Reason, *, path: str) -> None:
    """`count` of each."""
    if not _INT.issuperset(map(type, values)) or (
        values and not 0 <= min(values) <= max(values) <= INT64_MAX
    ):
        for value in values:
            count(value, what, reason, path=path)


_INT = frozenset((int,))


def within(place: Place, size: int, buffers: Sequence[int], path: str = "$") -> None:
    """Do `size` bytes lie at `place`? Nothing lies anywhere, so 0 bytes need no buffer."""
    if size == 0:
        return
    if place.buffer >= len(buffers):
        raise fail(
            "out_of_bounds",
            f"expected a buffer below {len(buffers)}, found buffer {place.buffer}",
            path=path,
        )
    if place.offset + size > buffers[place.buffer]:
        raise fail(
            "out_of_bounds",
            f"expected {size} bytes at {place.offset} of buffer {place.buffer}, "
            f"found a buffer of {buffers[place.buffer]}",
            path=path,
        )


def cells_of(shape: Any) -> int:
    """Check a shape and return its number of cells."""
    expect(
        type(shape) is list and len(shape) <= MAX_NDIM,
        "bad_record",
        f"a shape of at most {MAX_NDIM} dims",
        shape,
    )
    for dim in shape:
        count(dim, "a dim")
    # Strides are products of the other dims even where one dim is 0, so bound those too.
    nonzero = math.prod(dim for dim in shape if dim)
    expect(nonzero <= INT64_MAX, "bad_record", "fewer than 2**63 cells", shape)
    return 0 if 0 in shape else nonzero


def list_of(value: Any, what: str) -> list[Any]:
    expect(type(value) is list, "bad_record", f"a list of {what}", value)
    return value  # type: ignore[no-any-return]


def check_distinct(keys: Sequence[Any], what: str) -> None:
    """Refuse keys that a stranger chose to collide.

    Raises:
        WireFormatError: A key cannot be hashed, or too many distinct keys share one hash.
    """
    try:
        hashes = sorted(map(hash, keys))
    except TypeError as error:
        raise fail("bad_value", f"expected hashable {what}, found {error}") from error
    step = MAX_EQUAL_HASHES
    if any(a == b for a, b in zip(hashes, hashes[step:], strict=False)):
        raise fail("bad_value", f"expected {what} of distinct hashes, found over {step} alike")
