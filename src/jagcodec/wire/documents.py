"""Documents: values that need no buffers, as msgpack.

msgpack's own types mean themselves. Anything else is a *record*: an array whose first item is
a *tag*, an empty extension with the code of the record's kind. Extensions hold nothing, so nothing
nests in one, and a document is unpacked in one pass however deep it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgpack

from jagcodec.errors import WireFormatError, brief
from jagcodec.wire.spec import INLINE_BYTES, LONG_LIST, Kind

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
"""The fields of each kind of record, after its tag; a star is any number of items."""


# --- writing -----------------------------------------------------------------------------------

TAGS = {kind: msgpack.ExtType(kind, b"") for kind in RECORDS}


def packer() -> Any:
    """A msgpack packer for documents; one per thread at a time."""
    return msgpack.Packer(strict_types=True, unicode_errors="surrogatepass", default=_packed_int)


def _packed_int(value: Any) -> list[Any]:
    # msgpack asks only about what it cannot hold; the encoder lets nothing else through.
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} is not part of a document")
    size = value.bit_length() // 8 + 1
    return [TAGS[Kind.BIG_INT], value.to_bytes(size, "little", signed=True)]


NATIVE = frozenset((str, int, float, bool, type(None)))
"""The types that msgpack gives back as they were."""

_NUMBERS = frozenset((int, float, bool))
_STRING, _LIST, _DICT = map(frozenset, ((str,), (list,), (dict,)))
_WITH_BYTES = NATIVE | {bytes}
_KNOWN = _WITH_BYTES | _LIST | _DICT
_MOST_ITEMS = 1 << 20  # in one level: what is in itself several times would fill the memory


def packed_at_once(rows: Sequence[Any], levels: int) -> list[bytes] | None:
    """The documents of rows, if msgpack writes them as a walk would; None: ask the walk.

    `levels` is how many containers may be in each other.
    """
    pack = packer().pack
    try:
        if NATIVE.issuperset(map(type, rows)):
            return list(map(pack, rows))
        if not _is_native(rows, levels):
            return None
        if len(set(map(id, rows))) == len(rows):
            return list(map(pack, rows))
        # Rows that are one object are packed once, so that `elide` finds them.
        made = {id(row): pack(row) for row in rows if type(row) not in NATIVE}
        return [pack(row) if type(row) in NATIVE else made[id(row)] for row in rows]
    except (TypeError, ValueError, RuntimeError):  # too large, or changed by another thread
        return None


def _is_native(level: Sequence[Any], levels: int) -> bool:
    """Whether values are strings, numbers, None, short bytes, and lists and dicts of such."""
    # All values of one level are looked at together, which enters no function for each of them.
    while True:
        kinds = set(map(type, level))
        if bytes in kinds and (not levels or _has_long_bytes(level)):
            return False  # a walk counts them as containers
        if kinds <= _WITH_BYTES:
            return True
        if not levels or not kinds <= _KNOWN:
            return False
        levels -= 1
        if len(kinds) == 1:
            lists, dicts = (level, []) if kinds == _LIST else ([], level)
        else:
            lists = [item for item in level if type(item) is list]
            dicts = [item for item in level if type(item) is dict]
        if dicts and not _STRING.issuperset(map(type, chain.from_iterable(dicts))):
            return False
        if lists and _has_long_numbers(lists):
            return False
        if sum(map(len, lists)) + sum(map(len, dicts)) > _MOST_ITEMS:
            return False
        level = list(chain(*lists, *map(dict.values, dicts)))


def _has_long_bytes(level: Sequence[Any]) -> bool:
    return any(type(item) is bytes and len(item) >= INLINE_BYTES for item in level)


def _has_long_numbers(lists: Sequence[list[Any]]) -> bool:
    """Whether a document may hold one of the lists as the bytes of its numbers."""
    longest = max(map(len, lists))
    return longest >= LONG_LIST and any(
        len(each) >= LONG_LIST and type(each[0]) in _NUMBERS for each in lists
    )


# --- reading -----------------------------------------------------------------------------------

_KINDS = {int(kind): kind for kind in RECORDS}


def _tag(code: int, data: bytes) -> Kind:
    """The kind of a record, from its tag."""
    if code not in _KINDS:
        found = f"found {code}; the sender may be newer than this reader"
        raise WireFormatError("unknown_kind", "$", f"expected the code of a known record, {found}")
    if data:
        raise WireFormatError("bad_record", "$", f"expected an empty tag, found {brief(data)}")
    return _KINDS[code]


# The first bytes of msgpack's extensions; they occur in other data too. Extension -1 is msgpack's
# own timestamp, which it turns into an object without asking.
_MARKS = tuple(bytes([mark]) for mark in (0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8))


def may_hold_records(data: bytes) -> bool:
    """Whether bytes may hold records; False is certain. To ask each value would take far longer."""
    return any(map(data.__contains__, _MARKS))


_OPTIONS: dict[str, Any] = {"strict_map_key": True, "unicode_errors": "surrogatepass"}


def unpack(data: bytes, path: str = "$", *, records: bool = True) -> Any:
    """One document, its records as arrays that begin with their kind, or as msgpack has them."""
    hook = {"ext_hook": _tag} if records else {}
    try:
        if scanner := _scanner(data):
            scanner.skip()
        return msgpack.unpackb(data, **hook, **_OPTIONS)
    except WireFormatError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise not_msgpack(error, path) from error


def unpack_rows(data: bytes, ends: Sequence[int], rows: Sequence[int]) -> list[Any]:
    """Documents end to end, each of which must end exactly at its `ends`; errors name the row."""
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
                found = f"found {unpacker.tell()}"
                raise WireFormatError("bad_value", "$", f"expected a document up to {end}, {found}")
            items.append(item)
    except WireFormatError as error:
        raise WireFormatError(error.reason, f"$[{rows[len(items)]}]", error.detail) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise not_msgpack(error, f"$[{rows[len(items)]}]") from error
    return items


def not_msgpack(error: Exception, path: str) -> WireFormatError:
    """The error for bytes that msgpack rejects."""
    text = str(error) or type(error).__name__
    found = f"found {text:.200}; it was cut, or frames were joined"
    return WireFormatError("bad_header", path, f"expected whole msgpack, {found}")


# Below this size unpacking allocates half a megabyte at most on the word of forged counts.
_TRUSTED_SIZE = 512


def _scanner(data: bytes) -> msgpack.Unpacker | None:
    """A scanner that checks a document's counts against its bytes first; None if it is small."""
    # msgpack allocates a list as soon as it reads its count.
    if len(data) <= _TRUSTED_SIZE:
        return None
    scanner = msgpack.Unpacker(max_buffer_size=len(data))
    scanner.feed(data)
    return scanner
