"""Documents: values that need no buffers, as msgpack.

msgpack writes a value of its own types unchanged. Any other value is a *record*: an array whose
first item is a *tag*, an empty extension with the code of the record's kind. Nothing nests in an
extension, so one pass unpacks a document, however deep it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from jagcodec.columns.outside_errors import pass_on
from jagcodec.errors import WireFormatError, brief
from jagcodec.wire.spec import Kind

RECORDS: dict[Kind, tuple[str, ...]] = {
    Kind.BIG_INT: ("data",),
    Kind.TUPLE: ("*items",),
    Kind.SET: ("*items",),
    Kind.FROZENSET: ("*items",),
    Kind.DICT: ("*items",),
    Kind.NUMBERS: ("dtype", "data"),
    Kind.SCALAR: ("dtype", "data"),
    Kind.USER: ("name", "state"),
    Kind.PICKLE: ("data",),
}
"""The fields of each kind of record, after its tag. A star means any number of items."""


# --- writing -----------------------------------------------------------------------------------

TAGS = {kind: msgpack.ExtType(kind, b"") for kind in RECORDS}


def writer() -> Any:
    """A msgpack packer for documents; one per thread at a time."""
    return msgpack.Packer(strict_types=True, unicode_errors="surrogatepass", default=_record_of_int)


def _record_of_int(value: Any) -> list[Any]:
    # msgpack calls this for values that it cannot write. The encoder passes only large ints.
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} is not part of a document")
    size = value.bit_length() // 8 + 1
    return [TAGS[Kind.BIG_INT], value.to_bytes(size, "little", signed=True)]


# --- reading -----------------------------------------------------------------------------------

_KINDS = {int(kind): kind for kind in RECORDS}


def _tag(code: int, data: bytes) -> Kind:
    """The kind of a record, from its tag."""
    if code not in _KINDS:
        detail = (
            f"expected the code of a known record, found {code}; "
            "the sender may be newer than this reader"
        )
        raise WireFormatError("unknown_kind", "$", detail)
    if data:
        raise WireFormatError("bad_record", "$", f"expected an empty tag, found {brief(data)}")
    return _KINDS[code]


_OPTIONS: dict[str, Any] = {"strict_map_key": True, "unicode_errors": "surrogatepass"}


def parsed(data: bytes, path: str = "$", *, records: bool = True) -> Any:
    """One unpacked document. A record in it is a list that begins with its `Kind`.

    Without `records`, tags stay extensions of msgpack.
    """
    hook = {"ext_hook": _tag} if records else {}
    try:
        if scanner := _scanner(data):
            scanner.skip()
        return msgpack.unpackb(data, **hook, **_OPTIONS)
    except WireFormatError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise not_msgpack(error, path) from error


def parsed_rows(data: bytes, ends: Sequence[int], rows: Sequence[int]) -> list[Any]:
    """Unpack documents that are end to end, each up to its end in `ends`; errors name the row."""
    size = len(data)
    unpacker = msgpack.Unpacker(ext_hook=_tag, max_buffer_size=max(size, 1), **_OPTIONS)
    items: list[Any] = []
    try:
        scanner = _scanner(data)
        unpacker.feed(data)
        for end in ends:
            if scanner:
                scanner.skip()
            item = unpacker.unpack()
            if unpacker.tell() != end:
                detail = f"expected a document up to {end}, found {unpacker.tell()}"
                raise WireFormatError("bad_value", "$", detail)
            items.append(item)
    except WireFormatError as error:
        raise WireFormatError(error.reason, f"$[{rows[len(items)]}]", error.detail) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise not_msgpack(error, f"$[{rows[len(items)]}]") from error
    return items


def not_msgpack(error: Exception, path: str) -> WireFormatError:
    """The error for bytes that msgpack rejects."""
    pass_on(error)
    text = str(error) or type(error).__name__
    detail = f"expected whole msgpack, found {text:.200}; it was cut, or frames were joined"
    return WireFormatError("bad_header", path, detail)


# Up to this size, unpacking a document with forged counts allocates half a megabyte at most.
_TRUSTED_SIZE = 512


def _scanner(data: bytes) -> msgpack.Unpacker | None:
    """An unpacker that skips documents, and so fails at a forged count; None if `data` is small.

    It comes before unpacking: msgpack allocates a list as soon as it reads the list's count.
    """
    if len(data) <= _TRUSTED_SIZE:
        return None
    scanner = msgpack.Unpacker(max_buffer_size=len(data))
    scanner.feed(data)
    return scanner
