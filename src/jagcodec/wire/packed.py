"""Msgpack bytes that a stranger chose. No torch, no numpy."""

from __future__ import annotations

from typing import Any

import msgpack

from jagcodec.errors import WireFormatError


def unpack_plain(data: bytes, path: str) -> Any:
    """Msgpack's own types out of bytes that a stranger chose.

    Raises:
        WireFormatError: It is not one whole msgpack object of such types.
    """
    try:
        walk(data)
        return msgpack.unpackb(data, strict_map_key=True, unicode_errors="surrogatepass")
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise not_msgpack(error, path) from error


def not_msgpack(error: Exception, path: str) -> WireFormatError:
    """What to say of bytes that msgpack does not take."""
    text = str(error) or type(error).__name__
    return WireFormatError(
        "bad_header",
        path,
        f"expected whole msgpack, found {text:.200}; it was cut, or frames were joined",
    )


# Below this size unpacking allocates half a megabyte at most on the word of forged counts.
TRUSTED_SIZE = 512


def walk(data: bytes) -> None:
    """See that the counts in msgpack bytes have bytes behind them, without building anything.

    msgpack allocates a list as soon as it reads its count.
    """
    if len(data) > TRUSTED_SIZE:
        scanner = msgpack.Unpacker(max_buffer_size=len(data))
        scanner.feed(data)
        scanner.skip()
