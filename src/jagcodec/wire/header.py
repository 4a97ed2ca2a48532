"""The message layer: header bytes <-> checked plain records. msgpack only, no torch, no numpy.

A header is one msgpack map::

    {"jagcodec": version, "buffers": [size, ...], "ragged": [group, ...], "tree": Ext(16, ...)}

The tree holds msgpack's own types as they are and everything else as an extension whose payload is
the msgpack array of one *record*'s fields. Reading checks each record against the buffer table
before anyone builds something from it; what is then built is the caller's business (`build`).

Where it was built, `_batch.c` reads and writes the header of a plain batch, a message's commonest
value, in a fraction of the time: small batches take as long as their header. What it does not know,
or finds wrong, is read and written here. ``JAGCODEC_HEADER=python`` leaves it all to this module.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from jagcodec.errors import ArgumentError, WireFormatError
from jagcodec.wire.checks import INT64_MAX, Place, brief, counts, expect, fail, within
from jagcodec.wire.records import (
    CHECKS,
    KINDS,
    RECORDS,
    Batch,
    Group,
    Header,
    Jagged,
    Tensor,
    TensorDict,
)
from jagcodec.wire.spec import LEAF_LEVELS, MAGIC, MAX_DEPTH, TORCH_DTYPES, VERSION, Kind

_missing = ""
try:
    from jagcodec.wire import _batch
except ImportError as error:  # no compiler at install
    _batch, _missing = None, f", which cannot be imported ({error})"  # type: ignore[assignment]
_BATCH_TYPES = (Group, Tensor, Jagged, msgpack.ExtType)
_choice = os.environ.get("JAGCODEC_HEADER") or ("python" if _missing else "compiled")
if _choice not in ("compiled", "python") or (_choice == "compiled" and _missing):
    raise ArgumentError(
        "bad_option",
        "JAGCODEC_HEADER",
        f"expected 'compiled' or 'python', found {_choice!r}{_missing}",
    )
if _choice == "python":
    _batch = None  # type: ignore[assignment]

# Below this size unpacking allocates half a megabyte at most on the word of forged counts; above
# it, a count is believed only after the bytes behind it were walked (see _unpack).
_TRUSTED_SIZE = 512

# How many bytes of a refused message are looked through for the path to what is wrong.
_SEARCHED = 1 << 20


# --- writing -----------------------------------------------------------------------------------


_SETS = frozenset((Kind.SET, Kind.FROZENSET))


class HeaderWriter:
    """Packs records and, at the end, the header. One per message: it is not for sharing."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(
            strict_types=True, unicode_errors="surrogatepass", default=_big_int
        )

    def extension(self, record: Any) -> msgpack.ExtType:
        """One record as the extension that stands for it in the tree."""
        kind = KINDS[type(record)]
        if kind in _SETS:
            # Sorted by encoded bytes: a set's own order follows the process's hash seed.
            members = sorted(self._packer.pack(item) for item in record.items)
            length = msgpack.Packer().pack_array_header(len(members))
            return msgpack.ExtType(kind, b"\x91" + length + b"".join(members))
        return _extension(kind, self._packer.pack(list(record)))

    def header(
        self,
        tree: Any,
        buffers: list[int],
        groups: list[Group],
        checksums: Sequence[int] | None = None,
    ) -> bytes:
        """Frame 0. `checksums` are those of the buffers; the tree's is added here."""
        if type(tree) is Batch:
            if _batch is not None and checksums is None:
                whole = _batch.write(buffers, groups, tree.batch_size, tree.leaves, *_BATCH_TYPES)
                if whole is not None:
                    return whole
            tree = self._packed(tree)
        packed = self._packer.pack(tree)
        fields: dict[str, Any] = {
            MAGIC: VERSION,
            "buffers": list(buffers),
            "ragged": [list(group) for group in groups],
        }
        if checksums is not None:
            fields["checksums"] = [zlib.crc32(packed), *checksums]
        fields["tree"] = msgpack.ExtType(Kind.TREE, packed)
        return bytes(self._packer.pack(fields))

    def _packed(self, batch: Batch) -> msgpack.ExtType:
        items: list[Any] = []
        for name, leaf in batch.leaves.items():
            items += (name, self.extension(leaf) if type(leaf) in _CELLS else leaf)
        return self.extension(TensorDict(batch.batch_size, None, items))


_CELLS = (Tensor, Jagged)


def _extension(code: int, payload: bytes) -> msgpack.ExtType:
    """An extension of a code and a payload that msgpack, or this module, has made."""
    # Its constructor would check them again, at three times the cost.
    return tuple.__new__(msgpack.ExtType, (code, payload))


def _big_int(value: Any) -> msgpack.ExtType:
    # msgpack asks only about what it cannot hold; the encoder lets nothing else through.
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} is not a record")
    size = value.bit_length() // 8 + 1
    data = value.to_bytes(size, "little", signed=True)
    return msgpack.ExtType(Kind.BIG_INT, msgpack.packb([data]))


# --- reading -----------------------------------------------------------------------------------


_START = b"\x84" + msgpack.packb(MAGIC)


def read_header(data: Any) -> Header:
    """Check frame 0 down to, but not into, the value tree.

    Args:
        data: The header's bytes (any contiguous buffer).

    Raises:
        WireFormatError: `data` is not a header of this version.
    """
    # Before the rest is copied: a frame of something else may be large.
    start = bytes(memoryview(data)[: len(_START)])
    if start[1:] != _START[1:]:
        raise fail(
            "foreign",
            f"expected a map that begins with the key {MAGIC!r}, found {start!r}; this is no "
            "jagcodec message (pickled data is never read), its frames changed places, or routing "
            "frames of the transport stand before it",
            path="header",
        )
    # A copy: what was checked must not change with the message's memory.
    whole = bytes(data)
    return read_plain_header(whole) or read_any_header(whole)


def read_plain_header(data: bytes) -> Header | None:
    """What the compiled reader makes of frame 0; None if it does not know it, or is not there."""
    found = None if _batch is None else _batch.read(data, *_BATCH_TYPES, TORCH_DTYPES)
    if found is None:
        return None
    buffers, groups, tree, batch_size, leaves, held = found
    return Header(VERSION, buffers, groups, None, tree, Batch(batch_size, leaves), held)


def read_any_header(data: bytes) -> Header:
    """`read_header` in Python, of what begins as a header does."""
    fields = _unpack(data, _extension, "header")
    expect(type(fields) is dict, "foreign", "a map", fields, "header")
    count_byte = 0x80 | len(fields)
    expect(data[0] == count_byte, "bad_header", "every key once", fields, "header")
    version = fields[MAGIC]
    if type(version) is not int or version != VERSION:
        raise fail(
            "unknown_version",
            f"expected format version {VERSION}, found {brief(version)}; "
            "upgrade the side that is behind",
            path="header",
        )
    keys = [MAGIC, "buffers", "ragged", *(["checksums"] if "checksums" in fields else []), "tree"]
    if list(fields) != keys:
        raise fail(
            "bad_header",
            f"expected the keys {', '.join(keys)}, found {brief(list(fields))}",
            path="header",
        )
    buffers, ragged, tree = fields["buffers"], fields["ragged"], fields["tree"]
    expect(type(buffers) is list, "bad_header", "a list of buffer sizes", buffers, "header")
    counts(buffers, "a buffer size", "bad_header", path="header")
    expect(sum(buffers) <= INT64_MAX, "bad_header", "sizes below 2**63", buffers, "header")
    expect(type(ragged) is list, "bad_header", "a list of ragged groups", ragged, "header")
    groups = [_group(fields, buffers, f"ragged group {i}") for i, fields in enumerate(ragged)]
    # Each is read, and so copied, by itself: they must not all lie over the same bytes.
    size = sum(8 * (group.rows + 1) for group in groups)
    expect(size <= sum(buffers), "out_of_bounds", "groups that do not overlap", size, "header")
    expect(
        type(tree) is msgpack.ExtType and tree.code == Kind.TREE,
        "bad_header",
        f"a value tree (extension {Kind.TREE:d})",
        tree,
        "header",
    )
    checksums = fields.get("checksums")
    if "checksums" in fields:
        whole = type(checksums) is list and len(checksums) == 1 + len(buffers)
        expect(whole, "bad_header", f"{1 + len(buffers)} checksums", checksums, "header")
        check_crc(tree.data, checksums[0], "header")
    return Header(version, buffers, groups, checksums, tree.data)


def check_crc(data: Any, expected: Any, path: str) -> None:
    """Compare a CRC-32 (the one of zlib, PNG and Ethernet)."""
    found = zlib.crc32(data)
    if type(expected) is not int or found != expected:
        raise fail(
            "bad_checksum",
            f"expected a CRC-32 of {brief(expected)}, found {found}; the bytes were damaged or "
            "changed places on the way, or were written to after they were encoded",
            path=path,
        )


def _group(fields: Any, buffers: Sequence[int], path: str) -> Group:
    expect(type(fields) is list and len(fields) == 5, "bad_header", "5 integers", fields, path)
    counts(fields, "a count", "bad_header", path=path)
    group = Group(*fields)
    expect(group.min <= group.max, "bad_offsets", "min <= max", (group.min, group.max), path)
    within(Place(group.buffer, group.offset), 8 * (group.rows + 1), buffers, path)
    return group


def read_tree(header: Header, build: Callable[[Any], Any]) -> Any:
    """Unpack the value tree, turning each checked record into `build(record)`.

    Records inside records are built first. `build` may return the record itself to look at a
    message without making anything of it, and raises `WireFormatError` with a path that begins
    with ``$``; the path to the record is put before it.

    Raises:
        WireFormatError: A record is unknown, malformed, or points outside its buffer.
    """
    reader = _TreeReader(header, build)
    if header.batch is None:
        return reader.level(header.tree, 0, Kind.TREE)
    items: list[Any] = []
    for name, leaf in header.batch.leaves.items():
        try:
            unread = type(leaf) is msgpack.ExtType
            value = reader.value(leaf.code, leaf.data, 1) if unread else build(leaf)
        except WireFormatError as error:
            raise _moved(error, child_path("", name)) from error
        items += (name, value)
    return build(TensorDict(header.batch.batch_size, None, items))


def outline(header: Header) -> Any:
    """The value tree with its extensions unread (`msgpack.ExtType`)."""
    return _unpack(header.tree, _extension, "$")


def read_record(header: Header, extension: msgpack.ExtType) -> Any:
    """The checked record of one extension, with the extensions inside it unread.

    Raises:
        WireFormatError: It is unknown or malformed.
    """
    record = _known(extension.code)
    fields = _unpack(extension.data, _extension, "$")
    return CHECKS[record](_record(record, fields), header)


def read_extension(header: Header, extension: msgpack.ExtType, build: Callable[[Any], Any]) -> Any:
    """The value of one leaf of the outermost record, as `read_tree` would make it."""
    return _TreeReader(header, build).value(extension.code, extension.data, 1)


def _known(code: int) -> Any:
    record = RECORDS.get(code)
    if record is None:
        raise fail(
            "unknown_kind",
            f"expected a known extension code, found {code}; "
            "the sender may be newer than this reader",
        )
    return record


class _TreeReader:
    # A class, because closures that call each other are a reference cycle, and would keep the
    # received memory alive until the next garbage collection.
    def __init__(self, header: Header, build: Callable[[Any], Any]) -> None:
        self._header = header
        self._build = build
        self._to_search = _SEARCHED

    def level(self, data: bytes, depth: int, kind: int) -> Any:
        """Unpack one level of extensions, and those below it on the way."""
        if depth > MAX_DEPTH + LEAF_LEVELS:
            raise fail("too_deep", f"expected at most {MAX_DEPTH} levels, found more")
        failed: list[msgpack.ExtType] = []

        def hook(code: int, payload: bytes) -> Any:
            try:
                return self.value(code, payload, depth)
            except WireFormatError:
                failed.append(_extension(code, payload))
                raise

        try:
            return _unpack(data, hook, "$")
        except WireFormatError as error:
            if not failed:
                raise
            # Only now, on the way out, is it worth asking where in the tree this was; and only
            # while that is little work, because a stranger may have made it much.
            steps = "[...]"
            if len(data) <= self._to_search:
                self._to_search -= len(data)
                steps = _find(_unpack(data, _extension, "$"), failed[0], kind)
            raise _moved(error, steps) from error

    def value(self, code: int, payload: bytes, depth: int) -> Any:
        """What one extension stands for."""
        record = _known(code)
        fields = self.level(payload, depth + 1, code)
        return self._build(CHECKS[record](_record(record, fields), self._header))


def _record(record: Any, fields: Any) -> Any:
    expected = len(record._fields)
    if type(fields) is not list or len(fields) != expected:
        raise fail(
            "bad_record",
            f"expected {expected} fields of {record.__name__}, found {brief(fields)}",
        )
    return record(*fields)


def _unpack(data: bytes, ext_hook: Callable[[int, bytes], Any], path: str) -> Any:
    try:
        if len(data) > _TRUSTED_SIZE:
            # msgpack allocates a list as soon as it reads its count. Walking the bytes first,
            # without building anything, leaves only counts that the message has bytes for.
            scanner = msgpack.Unpacker(max_buffer_size=len(data))
            scanner.feed(data)
            scanner.skip()
            del scanner
        value = msgpack.unpackb(
            data,
            ext_hook=ext_hook,
            strict_map_key=True,
            unicode_errors="surrogatepass",
        )
    except WireFormatError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise fail(
            "bad_header",
            f"expected whole msgpack, found {text:.200}; it was cut, or frames were joined",
            path=path,
        ) from error
    if (
        b"\xff" in data
        and _may_hold_timestamps(data)
        and any(type(item) is msgpack.Timestamp for _, item in _walk(value))
    ):
        raise fail("unknown_kind", "expected a known extension code, found -1", path=path)
    return value


# msgpack turns its own extension -1 into a Timestamp without asking the hook.
_TIMESTAMP_MARKS = (
    b"\xd6\xff",
    b"\xd7\xff",
    *(
        head + bytes([size]) + b"\xff"
        for head in (b"\xc7", b"\xc8\0", b"\xc9\0\0\0")
        for size in (4, 8, 12)
    ),
)
_BEFORE_TIMESTAMPS = frozenset(mark[-2:-1] for mark in _TIMESTAMP_MARKS)


def _may_hold_timestamps(data: bytes) -> bool:
    # Bytes of 255 are rare: the way from one to the next passes over text many times as fast as
    # a search for each mark. Where they are not, that search is the faster one.
    if data.count(b"\xff") * 100 > len(data):
        return any(mark in data for mark in _TIMESTAMP_MARKS)
    at = data.find(b"\xff")
    while at >= 0:
        if data[max(at - 1, 0) : at] in _BEFORE_TIMESTAMPS:
            return True
        at = data.find(b"\xff", at + 1)
    return False


# Paths, for errors only


class _Link(NamedTuple):
    """A step of a path, linked to those before it: a path is put together for one value only."""

    above: _Link | None
    key: Any
    is_name: bool


def _walk(value: Any) -> Iterator[tuple[_Link | None, Any]]:
    """Every value of a native tree with its path, depth first, without recursion."""
    stack: list[tuple[_Link | None, Any]] = [(None, value)]
    while stack:
        link, item = stack.pop()
        yield link, item
        if type(item) is list:
            stack.extend((_Link(link, i, False), item[i]) for i in reversed(range(len(item))))
        elif type(item) is dict:
            stack.extend([(_Link(link, key, True), item[key]) for key in item][::-1])


def _find(value: Any, target: msgpack.ExtType, kind: int) -> str:
    """The path in the fields of an extension of `kind` to the extension `target`."""
    if kind != Kind.TREE:
        if type(value) is not list or not value or type(value[-1]) is not list:
            return ""
        value = value[-1]
    if kind in (Kind.TENSORDICT, Kind.DICT):
        keys, items = value[::2], value[1::2]
        value = {
            brief(k) if type(k) is not str else k: v for k, v in zip(keys, items, strict=False)
        }
    elif kind != Kind.TREE and kind not in _LIST_KINDS:
        return ""
    for link, item in _walk(value):
        if type(item) is msgpack.ExtType and item == target:
            steps = []
            while link is not None:
                steps.append(child_path("", link.key) if link.is_name else f"[{link.key}]")
                link = link.above
            return "".join(reversed(steps))
    return ""


_LIST_KINDS = (Kind.TUPLE, Kind.LAZY_STACK, Kind.NON_TENSOR_ROWS, Kind.OBJECT_ARRAY)


def _key_text(key: Any) -> str:
    return key if type(key) is str else f"{brief(key)}"


def child_path(path: str, key: Any) -> str:
    """`path` extended by a dict key: ``$.name``, or ``$['odd name']``."""
    if type(key) is str and len(key) <= 60 and key.isidentifier():
        return f"{path}.{key}"
    return f"{path}[{brief(key)}]"


def _moved(error: WireFormatError, steps: str) -> WireFormatError:
    return WireFormatError(error.reason, f"${steps}{error.path.removeprefix('$')}", error.detail)
