# mypy: disable-error-code="call-arg, misc"
"""Messages made by hand, with msgpack alone: well-formed by default, every part replaceable.

A message is a tree of `Part`s, whose schemas, numbers and values `header` puts into frame 0; or
what `damaged` makes of another message.
"""

import itertools
import math
import struct
import zlib
from typing import Any, NamedTuple

import msgpack

from jagcodec.wire.spec import RUN_NUMBERS, Kind
from tests.wire import spec_reader
from tests.wire.spec_reader import SIZES


class Part(NamedTuple):
    """A node of a schema, and what stands elsewhere for it and for the nodes in it."""

    schema: Any
    numbers: list[int]
    values: list[Any]


def part_of(value):
    """A part, or the node of a value without buffers."""
    return value if isinstance(value, Part) else Part(None, [], [value])


def code_of(kind):
    return int(Kind[kind] if isinstance(kind, str) else kind)


def node(kind, *fields, numbers=(), children=()):
    """A node of any kind; children that are not parts are documents."""
    parts = [part_of(child) for child in children]
    return Part(
        [code_of(kind), *fields, *(part.schema for part in parts)],
        [*numbers, *(number for part in parts for number in part.numbers)],
        [value for part in parts for value in part.values],
    )


def tag(kind, data=b""):
    return msgpack.ExtType(code_of(kind), data)


def record(kind, *fields):
    """A record of a document."""
    return [tag(kind), *fields]


def user(name, *parts):
    """A record of a type whose state is a tuple."""
    return record("USER", name, record("TUPLE", *parts))


def nest(wrap, levels, value):
    for _ in range(levels):
        value = wrap(value)
    return value


# --- nodes that many messages are made of ------------------------------------------------------


def list_of(*items):
    return node("LIST", children=items)


def map_of(items):
    return node("MAP", list(items), children=items.values())


def tensor(dtype="uint8", shape=(1,), buffer=0, offset=0, stored=0):
    return node("TENSOR", dtype, len(shape), numbers=[buffer, offset, stored, *shape])


def array(dtype, shape=(1,), buffer=0, offset=0):
    return node("ARRAY", dtype, len(shape), numbers=[buffer, offset, *shape])


def jagged(group=0, dim=1, shape=(5,), dtype="uint8", buffer=0, offset=24, stored=0):
    numbers = [buffer, offset, stored, group, *shape]
    return node("JAGGED", dtype, len(shape), dim, numbers=numbers)


def tensor_views(views, shape=(1,), cells_at=(0, 0), bounds_at=(0, 0)):
    bounds = tensor("int64", (views, 2), *bounds_at)
    return node("TENSOR_VIEWS", children=[tensor("uint8", shape, *cells_at), bounds])


def strided_nested(cells, components, rank=1, cells_at=(0, 0), sizes_at=(0, 0)):
    sizes = tensor("int64", (components, rank or 1), *sizes_at)
    children = [tensor("uint8", (cells,), *cells_at), sizes]
    return node("STRIDED_NESTED", rank, children=children)


def sparse_coo(indices, values, coalesced=0, shape=(1,)):
    return node("SPARSE_COO", len(shape), coalesced, numbers=shape, children=[indices, values])


def array_rows(cells, dims, holder=0, tensors=0):
    return node("ARRAY_ROWS", holder, tensors, children=[cells, dims])


def arrays_in_rows(f, dims, dtype="uint8", holder=0, tensors=0, lengths=None, stored=0, data=None):
    """A node of rows that are arrays, of these rows of integers; the cells are 0, 1, 2 ..."""
    counts = [row[0] * math.prod(row[1:]) for row in dims] if lengths is None else lengths
    size = sum(counts) * SIZES[dtype]
    data = bytes(i % 256 for i in range(size)) if data is None else data
    cells = jagged(f.shared_group(counts), 1, [sum(counts)], dtype, *f.put(data))
    table = numbers_of([number for row in dims for number in row], stored)
    shape = len(dims), len(dims[0]) if dims else 1
    return array_rows(cells, tensor("int64", shape, *f.put(table), stored=stored), holder, tensors)


def message_of_arrays(*dims, holder=1, **changes):
    """A message of such a node, in a TensorDict if it can only be there."""
    f = Draft()
    made = arrays_in_rows(f, dims, holder=holder, **changes)
    return f.message(made)


def tensordict(size, leaves):
    return node("TENSORDICT", len(size), list(leaves), numbers=size, children=leaves.values())


def payload(value, *rows):
    return node("NON_TENSOR_DATA", len(rows), numbers=rows, children=[value])


def object_array(shape, size, buffer=0, offset=0, group=0, stored=0):
    return node("OBJECT_ARRAY", len(shape), numbers=[buffer, offset, stored, group, size, *shape])


def rows_node(size, buffer=0, offset=0, group=0, stored=0):
    return node("NON_TENSOR_ROWS", numbers=[buffer, offset, stored, group, size])


# --- headers and messages ----------------------------------------------------------------------


def int64s(*numbers):
    return struct.pack(f"<{len(numbers)}q", *numbers)


def crc(*parts):
    return zlib.crc32(b"".join(parts))


def packed(value):
    """A msgpack object; bytes are taken for packed already."""
    if isinstance(value, bytes):
        return value
    return msgpack.packb(value, unicode_errors="surrogatepass")


def header(root, sizes=(), groups=(), payload=None, **changes):
    """Frame 0 before frames of these sizes; with the `payload` itself, it has their checksums.

    `changes` takes the place of a part: `schema` or `values` (bytes, or what to pack), `numbers` of
    the nodes, `counts`, `stored` sizes, `checksums`, `behind` (numbers at the end), or `fields`.
    """
    part = part_of(root)
    schema = packed(changes.pop("schema", part.schema))
    values = packed(changes.pop("values", part.values))
    numbers = [*changes.pop("numbers", part.numbers)]
    numbers += changes.pop("counts", [len(groups), len(sizes)])
    for group in groups:
        numbers += group
    numbers += sizes
    numbers += changes.pop("stored", [])
    checksums = []
    if payload is not None:
        checksums = [crc(schema, int64s(*numbers), values), *map(crc, payload)]
    numbers += changes.pop("checksums", checksums)
    numbers += changes.pop("behind", [])
    entries = {
        "jagcodec": 1,
        "schema": msgpack.ExtType(16, schema),
        "numbers": int64s(*numbers),
        "values": values,
    }
    entries.update(changes.pop("fields", {}))
    assert not changes
    return msgpack.packb(entries)


def message(root, *payload, groups=(), sizes=None, checksum=False, **changes):
    """The frames of a message."""
    sizes = [len(frame) for frame in payload] if sizes is None else sizes
    covered = payload if checksum else None
    return [header(root, sizes, groups, payload=covered, **changes), *payload]


def blob(frames, version=1, zero=0, size=None):
    """Frames in one buffer."""
    size = len(frames[0]) if size is None else size
    out = bytearray(struct.pack("<8sIIQ", b"jagcodec", version, zero, size))
    out += frames[0]
    for frame in frames[1:]:
        out += bytes(-len(out) % 64) + frame
    return bytes(out)


class RowMessage(bytes):
    """A row that is a message of its own."""


def rows_of(f, *items, kind="NON_TENSOR_ROWS"):
    """A node of documents in rows; bytes are a row unchanged. If one is a message, all are."""
    blobs = any(isinstance(item, RowMessage) for item in items)
    rows = [
        row_message(message(item)) if blobs and not isinstance(item, bytes) else packed(item)
        for item in items
    ]
    data, group = b"".join(rows), f.shared_group([*map(len, rows)])
    place = len(data), *f.put(data), group, 256 * blobs
    return rows_node(*place) if kind == "NON_TENSOR_ROWS" else object_array([len(rows)], *place)


def message_of_rows(*items, kind="NON_TENSOR_ROWS"):
    """A message of one node of documents, one per row."""
    f = Draft()
    return f.message(rows_of(f, *items, kind=kind))


def row_message(frames):
    """A message in a row: before zeros up to a multiple of 64."""
    data = blob(frames)
    return RowMessage(data + bytes(-len(data) % 64))


# --- compressed frames -------------------------------------------------------------------------


def zstd(*blocks, size=None, width=4, window=None, flags=0, dictionary=b""):
    """A frame of zstd, by hand, of blocks: bytes as they are, or (a byte, how often).

    It says that its content has this `size`, in 1, 2, 4 or 8 bytes, or nothing. `window` is the
    byte of its window; without one it is a single segment, if it says a size. `dictionary` is the
    field that names one: 0, 1, 2 or 4 bytes.
    """
    flags |= len(dictionary).bit_length()  # 0, 1, 2 and 3
    if size is None:
        out = struct.pack("<IBB", 0xFD2FB528, flags, window or 0)
    else:
        flags |= width.bit_length() - 1 << 6 | (0b100000 if window is None else 0)
        out = struct.pack("<IB", 0xFD2FB528, flags) + bytes([] if window is None else [window])
        out += dictionary
        out += (size - (256 if width == 2 else 0)).to_bytes(width, "little")
    for i, part in enumerate(blocks):
        runs = isinstance(part, tuple)
        data, length = part if runs else (part, len(part))
        head = int(i == len(blocks) - 1) | runs << 1 | length << 3
        out += head.to_bytes(3, "little") + data
    return out


def compressed(root, sizes, *sent, **changes):
    """A message whose frames are of these sizes, and are stored as `sent`."""
    stored = changes.pop("stored", [len(frame) for frame in sent])
    return message(root, *sent, sizes=sizes, stored=stored, **changes)


# --- a message under way -----------------------------------------------------------------------


class Draft:
    """A message under way: its payload, with buffers `apart` or in one frame, and its groups."""

    def __init__(self, *, apart=False):
        self._apart = apart
        self.payload = [bytearray()]
        self.groups: list[list[int]] = []
        self._shared: dict[Any, Any] = {}

    def put(self, data: bytes) -> tuple[int, int]:
        """The place of these bytes, which are the message's from now on."""
        if not data:
            return 0, 0
        if self._apart:
            self.payload.append(bytearray(data))
            return len(self.payload) - 1, 0
        frame = self.payload[0]
        frame.extend(bytes(-len(frame) % 8))
        frame += data
        return 0, len(frame) - len(data)

    def group(self, lengths):
        """A new ragged group of rows of these lengths."""
        many = len(lengths) > 1
        place = self.put(int64s(0, *itertools.accumulate(lengths))) if many else (0, 0)
        self.groups.append([*place, len(lengths), min(lengths, default=0), max(lengths, default=0)])
        return len(self.groups) - 1

    def once(self, key, make):
        """What `make` gave when it was called for this key first."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def shared_group(self, lengths):
        """The ragged group of these lengths, one for the message."""
        return self.once(("group", tuple(lengths)), lambda: self.group(lengths))

    def message(self, root, *more, checksum=False):
        """The frames of a message of this root."""
        frames = [*map(bytes, self.payload), *more]
        return message(root, *frames, groups=self.groups, checksum=checksum)


# --- indirect columns --------------------------------------------------------------------------

TEXT = msgpack.packb("text")


def numbers_of(values, narrow=0):
    """Bytes of an index, stored as the wire's code `narrow` says."""
    if narrow == 1:
        bits = sum(value << i for i, value in enumerate(values))
        return bits.to_bytes((len(values) + 7) // 8, "little")
    width, signed = (narrow % 16, narrow >= 32) if narrow else (8, True)
    return b"".join(value.to_bytes(width, "little", signed=signed) for value in values)


def run_of(data=b"", index=None, /, *, rows=None, narrow=0, **changes):
    """A run of `column` before its cells have a place: bytes, or a place that has them already.

    `index` says at which cell each row begins (None: all at the first), `rows` how long its rows
    are if they are not those of the column. Changes replace numbers of it.
    """
    return data, index, rows, narrow, changes


def column(f, kind, runs, lengths=(2, 3), dtype="uint8", inner=(), **changes):
    """An indirect column. Changes are its `stored`, its `group`, its `size` or its `dim`."""
    lengths = [*lengths]
    cell = SIZES[dtype] * math.prod(inner)
    rows: list[int] = []
    for cells, index, own, narrow, replaced in runs:
        size = len(cells) // cell if isinstance(cells, bytes) else 0
        place = f.put(cells) if isinstance(cells, bytes) else cells
        group = 0 if kind == "TENSOR" else f.shared_group(lengths if own is None else own)
        at = (-1, 0) if index is None else f.put(numbers_of(index, narrow))
        numbers = dict(zip(RUN_NUMBERS, (group, *place, 0, size, *at, narrow), strict=True))
        rows += {**numbers, **replaced}.values()
    place = f.put(int64s(*rows))
    stored, total = changes.pop("stored", 64 + len(runs)), changes.pop("size", sum(lengths))
    if kind == "TENSOR":
        return tensor(dtype, [total, *inner], *place, stored=stored)
    group = changes.pop("group", None)
    group = f.shared_group(lengths) if group is None else group
    if kind == "NON_TENSOR_ROWS":
        return rows_node(total, *place, group=group, stored=stored)
    if kind == "OBJECT_ARRAY":
        return object_array([len(lengths)], total, *place, group=group, stored=stored)
    dim = changes.pop("dim", 1)
    return jagged(
        group, dim, [total, *inner] if dim == 1 else [*inner, total], dtype, *place, stored
    )


def batch_of(kind, *runs, lengths=(2, 3), frames=(), **options):
    """A message of one indirect column, in a TensorDict if it may be in one."""
    f = Draft()
    made = column(f, kind, runs, lengths, **options)
    root = made if kind == "OBJECT_ARRAY" else tensordict([len(lengths)], {"a": made})
    return f.message(root, *frames)


# --- pieces that many messages are made of -----------------------------------------------------

# Offsets of two rows of 2 and 3 cells, and cells after them.
PAYLOAD = int64s(0, 2, 5) + bytes(range(40))


def batch(leaf, rows=2):
    """A TensorDict of one column."""
    return tensordict([rows], {"a": leaf})


def zeros(size):
    """A frame of zeros, which takes four bytes for 2^17."""
    return zstd(*[(b"\0", 1 << 17)] * (size >> 17), size=size)


# --- damage ------------------------------------------------------------------------------------

NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 16, 17, 18, 24, 33, 63, 64, 65, 72, 100, 129, 1 << 24, 1 << 31, 1 << 32),
    *(1 << 40, 1 << 53, 1 << 60, 1 << 61, 1 << 62, (1 << 63) - 8, (1 << 63) - 1),
    *(-1, -2, -8, -(1 << 63)),
)
BYTES = (0, 1, 0x6A, 0x80, 0x91, 0xC1, 0xC7, 0xD6, 0xDD, 0xFF)


class Parts:
    """The parts of a header, to change and to put together; an error if it is none."""

    def __init__(self, frame):
        header = msgpack.unpackb(bytes(frame), strict_map_key=False)
        self.schema = unpacked(header["schema"].data)
        self.values = unpacked(header["values"])
        self.numbers = [number for (number,) in struct.iter_unpack("<q", header["numbers"])]
        try:
            self.checksums = len(spec_reader.Header(bytes(frame)).checksums)
        except spec_reader.RefusedError:
            self.checksums = 0

    def frame(self, payload=()):
        """Frame 0; its checksums, if there were any, are of these frames."""
        numbers = [min(number, (1 << 63) - 1) for number in self.numbers]
        part = Part(self.schema, numbers[: len(numbers) - self.checksums], self.values)
        return header(part, counts=[], payload=payload if self.checksums else None)


def unpacked(data):
    return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


def squeezed(frames):
    """A message with its frames compressed, where that makes them smaller."""
    import zstandard

    parts = Parts(frames[0])
    sent = [min(frame, zstandard.compress(frame), key=len) for frame in frames[1:]]
    parts.numbers += map(len, sent)
    return [parts.frame(), *sent]


def with_number(frames, at, number):
    """A message with another number at this place among its numbers."""
    parts = Parts(frames[0])
    parts.numbers[at] = number
    return [parts.frame(frames[1:]), *frames[1:]]


def damaged(frames, rng):
    """A message with one or two things changed, by a `random.Random`."""
    frames = [bytearray(frame) for frame in frames]
    for _ in range(rng.choice((1, 1, 2))):
        what = rng.random()
        if what < 0.15 and any(frames[1:]):
            _change_bytes(rng.choice([frame for frame in frames[1:] if frame]), rng)
        elif what < 0.25 and len(frames[0]) > 10:
            frames[0][rng.randrange(10, len(frames[0]))] = rng.randrange(256)
        else:
            frames[0] = bytearray(_damaged_header(frames, rng))
    return [bytes(frame) for frame in frames]


def _change_bytes(frame, rng):
    """A byte of the first few, or a number at a multiple of 8, as offsets and tables have them."""
    at = rng.randrange(min(len(frame), 256))
    if rng.random() < 0.5:
        frame[at] = rng.choice((*BYTES, rng.randrange(256)))
    else:
        at -= at % 8
        number = int64s(rng.choice(NUMBERS))
        frame[at : at + 8] = number[: len(frame) - at]


def _damaged_header(frames, rng):
    try:
        parts = Parts(frames[0])
    except Exception:  # damaged before
        return frames[0]
    what = rng.choice(("schema", "numbers", "numbers", "numbers", "values"))
    numbers = parts.numbers
    if what == "numbers" and numbers:
        at = rng.randrange(len(numbers))
        near = (numbers[at] - 1, numbers[at] + 1, rng.choice(numbers))
        numbers[at] = rng.choice((*NUMBERS, *near * 5))
    elif what == "schema":
        parts.schema = _changed(parts.schema, rng, node=True)
    else:
        parts.values = _changed(parts.values, rng)
    try:
        return parts.frame(frames[1:])
    except Exception:  # what was unpacked may be what cannot be packed: a timestamp
        return frames[0]


def _changed(value, rng, *, node=False):
    """A msgpack object with one thing in it changed."""
    inside = rng.random() < 0.85
    if isinstance(value, list) and value and inside:
        at, how = rng.randrange(len(value)), rng.random()
        if how < 0.25:
            return rng.choice(([*value[:at], *value[at + 1 :]], [*value, value[at]], value[::-1]))
        return [*value[:at], _changed(value[at], rng, node=node), *value[at + 1 :]]
    if isinstance(value, dict) and value and inside:
        key = rng.choice([*value])
        if rng.random() < 0.8:
            return {**value, key: _changed(value[key], rng, node=node)}
        return {("other" if k == key else k): v for k, v in value.items()}
    if rng.random() < 0.7:
        if type(value) is int:
            return rng.choice((value - 1, value + 1, rng.choice(NUMBERS)))
        if type(value) is bytes and value:
            last = value[:-1] + bytes([rng.randrange(256)])
            return rng.choice((value[1:], value + b"\0", last))
        if type(value) is str and value:
            names = [*spec_reader.SIZES, "|O", "|V3", "<U2", "|S0", value[1:], value + "x"]
            return rng.choice(names)
        if isinstance(value, msgpack.ExtType):
            codes = [*spec_reader.RECORDS, 16, 5, 99]
            return msgpack.ExtType(rng.choice(codes), rng.choice((b"", b"", b"", b"\0")))
    return _anything(rng, node=node)


def _anything(rng, *, node):
    """Any object, a small node or record among them."""
    leaves: list[Any] = [None, True, 0, 1, 1.5, float("nan"), "", "a", b"", b"\1", [], {}, [None]]
    if node:
        nodes = [[48, "int64", 0], [48, "uint8", 1], [32, "<i8", 1], [26, None]]
        return rng.choice([*leaves, *nodes, *([code] for code in spec_reader.NODES)])
    fields: Any = rng.choice(([], [1], [1, 1], [1, 2, 3]))
    records = [[msgpack.ExtType(code, b""), *fields] for code in spec_reader.RECORDS]
    return rng.choice([*leaves, {"a": 1}, *records])
