"""Checks of single values that came in a message. Plain Python: no torch, no numpy, no msgpack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jagcodec.errors import Reason, WireFormatError, brief
from jagcodec.wire.spec import MAX_EQUAL_HASHES, MAX_NDIM

INT64_MAX = (1 << 63) - 1


def fail(reason: Reason, detail: str, *, path: str = "$") -> WireFormatError:
    """The error to raise."""
    return WireFormatError(reason, path, detail)


def expect(ok: bool, reason: Reason, expected: str, found: Any, path: str = "$") -> None:
    """Refuse what is not `ok`."""
    if not ok:
        raise fail(reason, f"expected {expected}, found {brief(found)}", path=path)


def count(value: Any, what: str, reason: Reason = "bad_record", *, path: str = "$") -> int:
    """Refuse anything but an integer from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise fail(reason, f"expected {what} (0 to 2**63 - 1), found {brief(value)}", path=path)
    return value


def cells_of(shape: Any) -> int:
    """Check a shape, and return its number of cells."""
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
    """Refuse anything but a list."""
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
