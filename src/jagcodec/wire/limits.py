"""`Limits`: bounds for messages from strangers."""

from __future__ import annotations

import dataclasses

from jagcodec._compiling import untraced
from jagcodec.errors import ArgumentError, ArgumentTypeError, Reason, WireFormatError, brief
from jagcodec.memory import ALIGNMENT
from jagcodec.wire.spec import MAX_LEVELS


@untraced
@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds for a message. A larger one is rejected before memory is allocated for it.

    The defaults hold for batches of 16,384 rows of 16,384 tokens. Lower them for peers that you
    trust less, raise them for larger batches.

    Args:
        bytes: Of a message, its header and all frames: 1 KiB for each of 2^28 tokens.
        header: Bytes of the header. From a callable source no more is asked for.
        objects: What a message asks a reader to make, other than the items in its documents: nodes
            of the schema, frames, ragged groups, rows of objects, views of a list, components of
            strided nested tensors, and those of messages in its rows.
        expanded: Bytes of memory that a message asks for, after 64 for each byte of its own. They
            are counted for frames before they were compressed, narrow cells as wide as their dtype,
            what columns repeat (`elide`), as 64 for each byte of documents and offsets, and as 512
            for each row of arrays or None. Without `compress`, `elide` and narrow columns of such
            rows, no message asks for more than its 64. Of compressed rows also the
            bytes that they take padded, if these are more than the square of the message's.
        depth: Nodes, lists, dicts and records inside each other, counted through messages in rows;
            104 at most, which is the format's own bound.

    Raises:
        ArgumentError: A limit is negative, or `depth` above 104.
        ArgumentTypeError: One is not an integer.

    Example:
        >>> from jagcodec import Limits, WireFormatError, decode, encode
        >>> frames = encode({"ids": [1, 2, 3]})
        >>> decode(frames, limits=Limits(bytes=1 << 20))
        {'ids': [1, 2, 3]}
        >>> try:
        ...     decode(frames, limits=Limits(bytes=10))
        ... except WireFormatError as error:
        ...     print(error.reason)
        too_large
    """

    bytes: int = 1 << 38
    header: int = 1 << 28
    objects: int = 1 << 22
    expanded: int = 1 << 26
    depth: int = MAX_LEVELS

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            path = f"Limits({field.name})"
            if type(value) is not int:
                found = type(value).__name__
                raise ArgumentTypeError("bad_type", path, f"expected an integer, found {found}")
            if value < 0 or (field.name == "depth" and value > MAX_LEVELS):
                most = f" to {MAX_LEVELS}" if field.name == "depth" else " or more"
                raise ArgumentError("bad_option", path, f"expected 0{most}, found {brief(value)}")


DEFAULT_LIMITS = Limits()
# These are for transports whose peers may run code in this process anyway.
NO_LIMITS = Limits(*[1 << 62] * 4)


def exceeded(limit: str, most: int, found: int, what: str, path: str = "$") -> WireFormatError:
    """The error for a message above a limit."""
    reason: Reason = "too_deep" if limit == "depth" else "too_large"
    remedy = f"; if it is honest, pass limits=Limits({limit}={found}) or more"
    if limit == "depth" and found > MAX_LEVELS:
        remedy = ""
    return WireFormatError(
        reason, path, f"expected at most {most} {what} (the limit {limit!r}), found {found}{remedy}"
    )


def check_blob_size(size: int, limits: Limits, path: str) -> None:
    """Refuse a blob that is too large for any message within the limits, before it is read.

    The limit counts neither the preamble nor the padding, of which each frame has less than 64
    bytes. The header of the blob tells how much it has, so opening the blob checks the exact limit.
    """
    if size > limits.bytes + ALIGNMENT * (limits.objects + 1):
        raise exceeded("bytes", limits.bytes, size, "bytes of header and frames", path)


def usable_limits(limits: object, path: str) -> Limits:
    """A caller's limits."""
    if limits is None:
        return DEFAULT_LIMITS
    if not isinstance(limits, Limits):
        found = type(limits).__name__
        raise ArgumentTypeError("bad_type", path, f"expected Limits or None, found {found}")
    return limits
