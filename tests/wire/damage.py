"""Messages damaged at random: one or two things in them changed, and put together again to fit.

Tests read what comes out with several readers, and the fuzzer (`fuzz/`) mutates its inputs with it.
"""

import struct
from typing import Any

import msgpack

from tests.wire import spec_reader
from tests.wire.forge import crc, int64s, packed

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
        schema, values = packed(self.schema), packed(self.values)
        numbers = [min(number, (1 << 63) - 1) for number in self.numbers]
        if self.checksums:
            plain = numbers[: -self.checksums]
            sums = [crc(schema, int64s(*plain), values), *map(crc, payload)]
            numbers = [*plain, *sums]
        fields = {"schema": msgpack.ExtType(16, schema), "numbers": int64s(*numbers)}
        return packed({"jagcodec": 1, **fields, "values": values})


def unpacked(data):
    return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


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
