"""A second reader of the wire format, written from docs/wire-format.md alone.

It shares no line with the library and imports neither it nor torch, so that what both of them read
alike is what the specification says, and not what one program happens to do. Values come out
neutral: msgpack's own types as themselves, and everything else as a tuple that starts with the
kind's name.
"""

import itertools
import math
import re
import struct
import zlib

import msgpack
import numpy as np

LIMIT = 1 << 63
MAGIC = b"jagcodec"
SIZES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "bfloat16": 2}
SIZES |= {f"{sign}{bits}": bits // 8 for sign in ("int", "uint") for bits in (8, 16, 32, 64)}
SIZES |= {f"{sign}{bits}": 1 for sign in ("int", "uint") for bits in range(1, 8)}
SIZES |= {"float16": 2, "float32": 4, "float64": 8, "float4_e2m1fn_x2": 1, "float8_e8m0fnu": 1}
SIZES |= {f"float8_{name}": 1 for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
SIZES |= {"bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1}
INTEGERS = {"bool", *(f"{s}{bits}" for s in ("int", "uint") for bits in (8, 16, 32, 64))}
NUMPY_DTYPE = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)|\|[SV]\d+|[<>]U\d+|[<>][mM]8(\[\w+\])?"
)
LONG_DOUBLES = {"float80": 16, "complex160": 32, "float128": 16, "complex256": 32}
KINDS = {17: "BIG_INT", 18: "COMPLEX", 19: "TUPLE", 20: "SET", 21: "FROZENSET", 22: "DICT"}
KINDS |= {23: "RANGE", 24: "SLICE", 25: "BYTES", 32: "ARRAY", 33: "OBJECT_ARRAY"}
KINDS |= {34: "FIELD_ARRAY", 35: "STRING_ARRAY", 36: "SCALAR", 37: "STRING_SCALAR", 48: "TENSOR"}
KINDS |= {49: "JAGGED", 50: "STRIDED_NESTED", 51: "SPARSE_COO", 52: "SPARSE_COMPRESSED"}
KINDS |= {53: "SIZE", 54: "DTYPE", 55: "DEVICE", 56: "TENSOR_VIEWS", 64: "TENSORDICT"}
KINDS |= {65: "LAZY_STACK", 66: "NON_TENSOR_DATA", 67: "NON_TENSOR_ROWS", 68: "NON_TENSOR_STACK"}
KINDS |= {80: "USER", 81: "PICKLE"}


NO_KEYS = {"SET", "DICT", "ARRAY", "OBJECT_ARRAY", "FIELD_ARRAY", "STRING_ARRAY"}
NO_KEYS |= {"TENSOR", "JAGGED", "STRIDED_NESTED", "SPARSE_COO", "SPARSE_COMPRESSED"}
NO_KEYS |= {"TENSOR_VIEWS", "TENSORDICT", "LAZY_STACK"}

LEAVES = {"TENSOR", "JAGGED", "STRIDED_NESTED", "SPARSE_COO", "SPARSE_COMPRESSED", "TENSORDICT"}
LEAVES |= {"LAZY_STACK", "NON_TENSOR_DATA", "NON_TENSOR_ROWS", "NON_TENSOR_STACK"}


class RefusedError(Exception):
    """The bytes are no message of format version 1."""


def need(condition, why):
    if not condition:
        raise RefusedError(why)


def unpack(data):
    """The one msgpack object in the bytes; maps come out as tuples of pairs."""
    try:
        return msgpack.unpackb(
            bytes(data),
            strict_map_key=False,
            unicode_errors="surrogatepass",
            object_pairs_hook=tuple,
        )
    except Exception as error:
        raise RefusedError(f"no msgpack: {error!r}") from None


def count(value):
    need(type(value) is int and 0 <= value < LIMIT, f"no count: {value!r:.50}")
    return value


def counts(value):
    need(type(value) is list, "no array of counts")
    return [count(item) for item in value]


def shape_of(value):
    shape = counts(value)
    need(len(shape) <= 64, "too many dims")
    need(math.prod(dim for dim in shape if dim) < LIMIT, "too many cells")
    return tuple(shape)


def read(message):
    """The neutral value of a message, given as a list of frames or as one buffer."""
    return Reader(message if isinstance(message, list) else split(message)).value


def split(blob):
    """The frames of a message in one buffer."""
    blob = bytes(blob)
    if blob[:8] != MAGIC:
        return [blob]
    need(len(blob) >= 24, "cut")
    version, zero, size = struct.unpack_from("<IIQ", blob, 8)
    need(version == 1, "version")
    need(zero == 0 and size <= 1 << 33 and 24 + size <= len(blob), "preamble")
    frames, at = [blob[24 : 24 + size]], 24 + size
    for length in header_of(frames[0])["buffers"]:
        at += -at % 64
        need(at + length <= len(blob), "cut")
        frames.append(blob[at : at + length])
        at += length
    return frames


def header_of(frame):
    need(bytes(frame[:10]) in (b"\x84\xa8" + MAGIC[:8], b"\x85\xa8" + MAGIC[:8]), "magic")
    header = unpack(frame)
    keys = ["jagcodec", "buffers", "ragged", "tree"]
    if len(header) == 5:
        keys.insert(3, "checksums")
    need(header[0][1] == 1 and type(header[0][1]) is int, "version")
    need([key for key, _ in header] == keys, "keys")
    header = dict(header)
    need(sum(counts(header["buffers"])) < LIMIT, "buffers")
    tree = header["tree"]
    need(isinstance(tree, msgpack.ExtType) and tree.code == 16, "tree")
    return header


class Reader:
    """One message being read."""

    def __init__(self, frames):
        frames = [bytes(frame) for frame in frames]
        need(frames, "no header")
        header = header_of(frames[0])
        self.buffers = frames[1:]
        need([len(frame) for frame in self.buffers] == header["buffers"], "frames")
        tree = header["tree"].data
        self.tree = len(tree)
        if "checksums" in header:
            found = [zlib.crc32(part) for part in (tree, *self.buffers)]
            need(header["checksums"] == found, "checksum")
        need(type(header["ragged"]) is list, "groups")
        self.groups = header["ragged"]
        for fields in self.groups:
            need(len(counts(fields)) == 5, "group")
            buffer, start, rows = fields[:3]
            self.cells(buffer, start, 8 * (rows + 1))
            need(fields[3] <= fields[4], "min and max")
        payload = sum(map(len, self.buffers))
        need(sum(8 * (fields[2] + 1) for fields in self.groups) <= payload, "groups overlap")
        self.unread = payload
        self.depth = 0
        try:
            self.value = self.node(unpack(tree))
        except RecursionError:
            raise RefusedError("depth") from None

    def cells(self, buffer, offset, size):
        """The bytes at a place."""
        buffer, offset = count(buffer), count(offset)
        need(size < LIMIT, "too many bytes")
        if size == 0:
            return b""
        need(buffer < len(self.buffers), "no such buffer")
        need(offset + size <= len(self.buffers[buffer]), "outside of the buffer")
        return self.buffers[buffer][offset : offset + size]

    def once(self, buffer, offset, size):
        """Bytes that become a copy: all of them together are no more than the payload."""
        self.unread -= size
        need(self.unread >= 0, "copies of the same bytes")
        return self.cells(buffer, offset, size)

    def offsets(self, group):
        """The offsets of a ragged group; only of one that a value names."""
        need(count(group) < len(self.groups), "group")
        buffer, offset, rows, low, high = self.groups[group]
        data = self.cells(buffer, offset, 8 * (rows + 1))
        offsets = [item[0] for item in struct.iter_unpack("<q", data)]
        lengths = [end - start for start, end in itertools.pairwise(offsets)]
        need(offsets[0] == 0 and min(lengths, default=0) >= 0, "offsets")
        need((low, high) == (min(lengths, default=0), max(lengths, default=0)), "min and max")
        return offsets

    def fields(self, value, number):
        need(type(value) is list and len(value) == number, "fields")
        return value

    def node(self, value):
        """The neutral value of a node of the tree."""
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if type(value) is list:
            return [self.node(item) for item in value]
        if type(value) is tuple:
            need(all(type(key) is str for key, _ in value), "key")
            need(len(dict(value)) == len(value), "twice")
            return {key: self.node(item) for key, item in value}
        need(isinstance(value, msgpack.ExtType) and value.code in KINDS, "kind")
        self.depth += 1
        need(self.depth <= 104, "depth")
        kind = KINDS[value.code]
        fields = unpack(value.data)
        need(type(fields) is list, "fields")
        try:
            result = getattr(self, kind.lower())(*fields)
        except TypeError as error:
            raise RefusedError(f"{kind}: {error}") from None
        self.depth -= 1
        return result[0] if kind == "BIG_INT" else (kind, *result)

    # One method per kind, its arguments the kind's fields.

    def big_int(self, data):
        need(type(data) is bytes and data, "data")
        return (int.from_bytes(data, "little", signed=True),)

    def complex(self, real, imag):
        need(type(real) is float and type(imag) is float, "floats")
        return real, imag

    def items(self, items):
        need(type(items) is list, "items")
        return [self.node(item) for item in items]

    def tuple(self, items):
        return (self.items(items),)

    def set(self, items):
        members = self.items(items)
        keys = [self.key(member) for member in members]
        need(len({*keys}) == len(keys), "twice")
        return (sorted(members, key=repr),)

    def frozenset(self, items):
        return self.set(items)

    def dict(self, items):
        need(len(items) % 2 == 0, "a key without a value")
        items = self.items(items)
        keys = [self.key(key) for key in items[::2]]
        need(len(set(keys)) == len(keys), "twice")
        return (items,)

    def key(self, value):
        """What tells a dict key or set member apart from others."""
        need(type(value) not in (list, dict), "no key")
        need(type(value) is not tuple or value[0] not in NO_KEYS, "no key")
        if type(value) in (bool, int, float) and value == value:
            return value
        return repr(value)

    def range(self, start, stop, step):
        start, stop, step = (self.integer(item) for item in (start, stop, step))
        need(step != 0, "step")
        return start, stop, step

    def integer(self, value):
        value = self.node(value)
        need(type(value) is int, "integer")
        return value

    def slice(self, start, stop, step):
        return self.node(start), self.node(stop), self.node(step)

    def bytes(self, size, buffer, offset):
        return (self.once(buffer, offset, count(size)),)

    def numpy_size(self, dtype, objects=False):
        """The bytes per cell of a numpy dtype; `|O` is for the fields of a FIELD_ARRAY."""
        if type(dtype) is str:
            if dtype in LONG_DOUBLES:
                return LONG_DOUBLES[dtype]
            if dtype == "|O":
                need(objects, "objects")
                return 8
            need(NUMPY_DTYPE.fullmatch(dtype), "dtype")
            try:
                return np.dtype(dtype).itemsize
            except (TypeError, ValueError) as error:
                raise RefusedError(f"dtype: {error}") from None
        need(type(dtype) is list and dtype, "dtype")
        if dtype[0] == "sub":
            _, inner, shape = self.fields(dtype, 3)
            return self.numpy_size(inner, objects) * math.prod(shape_of(shape))
        need(dtype[0] == "struct", "dtype")
        _, size, aligned, fields = self.fields(dtype, 4)
        need(type(aligned) is bool and type(fields) is list, "struct")
        names = [self.fields(field, 4)[0] for field in fields]
        need(all(type(name) is str for name in names) and len(set(names)) == len(names), "names")
        for _, title, offset, inner in fields:
            need(title is None or type(title) is str, "title")
            need(count(offset) + self.numpy_size(inner, objects) <= count(size), "field outside")
        return size

    def array(self, dtype, shape, buffer, offset):
        shape, size = shape_of(shape), self.numpy_size(dtype)
        data = self.cells(buffer, offset, math.prod(shape) * size)
        if type(dtype) is str and dtype[1:2] == "U":
            points = np.frombuffer(data, f"{dtype[0]}u4")
            need((points <= 0x10FFFF).all(), "code points")
        return dtype, shape, data

    def object_array(self, shape, items):
        shape = shape_of(shape)
        need(type(items) is list and len(items) == math.prod(shape), "one item per cell")
        return shape, self.items(items)

    def field_array(self, dtype, shape, columns):
        shape, columns = shape_of(shape), self.items(columns)
        need(type(dtype) is list and dtype[:1] == ["struct"], "struct")
        size = self.numpy_size(dtype, objects=True) * math.prod(shape)
        need(size <= 64 * (1024 + self.tree + sum(map(len, self.buffers))), "cells out of nowhere")
        need(len(columns) == len(dtype[3]), "one column per field")
        for column in columns:
            need(type(column) is tuple and column[0].endswith("ARRAY"), "columns")
            shapes = column[1] if column[0] == "OBJECT_ARRAY" else column[2]
            need(shapes[: len(shape)] == shape, "columns")
        return dtype, shape, columns

    def string_array(self, shape, items, coerce, has_na, na):
        shape = shape_of(shape)
        need(type(items) is list and len(items) == math.prod(shape), "one item per cell")
        need(all(item is None or type(item) is str for item in items), "strings")
        need(type(coerce) is bool and type(has_na) is bool, "flags")
        need(has_na or None not in items, "na")
        return shape, items, coerce, has_na, self.node(na)

    def scalar(self, dtype, data):
        if dtype is None:
            data = self.node(data)
            need(type(data) is tuple and data[0].endswith("_ARRAY") and () in data[1:3], "rank 0")
            return dtype, data
        need(type(data) is bytes and len(data) == self.numpy_size(dtype), "size")
        return dtype, data

    def string_scalar(self, value):
        need(type(value) in (str, bytes), "string")
        return (value,)

    def torch_cells(self, dtype, shape, buffer, offset):
        """The dtype's name, the shape and the cells, as wide as the dtype says."""
        shape, stored = shape_of(shape), None
        if type(dtype) is list:
            dtype, stored = self.fields(dtype, 2)
            need(type(dtype) is str and dtype in INTEGERS and type(stored) is str, "narrow")
        need(type(dtype) is str and dtype in SIZES, "dtype")
        cells, wide = math.prod(shape), SIZES[dtype]
        if stored is None:
            return dtype, shape, self.cells(buffer, offset, cells * wide)
        if stored == "bits":
            data = self.once(buffer, offset, (cells + 7) // 8)
            bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
            out = np.zeros((cells, wide), np.uint8)
            out[:, 0] = bits[:cells]
            return dtype, shape, out.tobytes()
        signed = stored[:1] == "i"
        need(stored[:1] in ("u", "i") and stored[1:] in tuple("1234567"), "stored")
        need(int(stored[1:]) < wide and not (signed and dtype[0] != "i"), "stored")
        data = self.once(buffer, offset, cells * int(stored[1:]))
        narrow = np.frombuffer(data, np.uint8).reshape(cells, int(stored[1:]))
        out = np.zeros((cells, wide), np.uint8)
        out[:, : narrow.shape[1]] = narrow
        if signed:
            out[narrow[:, -1] >= 128, narrow.shape[1] :] = 255
        return dtype, shape, out.tobytes()

    tensor = torch_cells

    def jagged(self, dtype, shape, buffer, offset, group, ragged_dim):
        dtype, shape, data = self.torch_cells(dtype, shape, buffer, offset)
        need(1 <= count(ragged_dim) <= len(shape), "ragged dim")
        offsets = self.offsets(group)
        need(shape[ragged_dim - 1] == offsets[-1], "offsets end elsewhere")
        return dtype, shape, ragged_dim, self.rows(dtype, shape, data, offsets, ragged_dim - 1)

    def rows(self, dtype, shape, data, offsets, dim):
        """Every row as (shape, bytes)."""
        cells = np.frombuffer(data, f"V{SIZES[dtype]}").reshape(shape)
        parts = [
            cells[(slice(None),) * dim + (slice(start, end),)]
            for start, end in itertools.pairwise(offsets)
        ]
        return [(part.shape, part.tobytes()) for part in parts]

    def tensor_views(self, starts, ends, dtype, shape, buffer, offset):
        need(type(dtype) is str, "views are not narrow")
        dtype, shape, data = self.torch_cells(dtype, shape, buffer, offset)
        starts, ends = counts(starts), counts(ends)
        need(shape and len(starts) == len(ends), "views")
        need(all(a <= b <= shape[0] for a, b in zip(starts, ends, strict=True)), "views")
        size = SIZES[dtype] * math.prod(shape[1:])
        views = zip(starts, ends, strict=True)
        return dtype, [((b - a, *shape[1:]), data[a * size : b * size]) for a, b in views]

    def part(self, value, dtype=None):
        """A TENSOR that is part of another value."""
        value = self.node(value)
        need(type(value) is tuple and value[0] == "TENSOR" and dtype in (None, value[1]), "part")
        return value

    def strided_nested(self, sizes, values):
        sizes, values = self.part(sizes, "int64"), self.part(values)
        need(len(sizes[2]) == 2 and len(values[2]) == 1, "rank")
        table = np.frombuffer(sizes[3], "<i8").reshape(sizes[2]).tolist()
        total, rows = 0, []
        for shape in map(shape_of, table):
            step = math.prod(shape) * SIZES[values[1]]
            rows.append((shape, values[3][total : total + step]))
            total += step
        need(total == len(values[3]), "cells")
        return values[1], rows

    def sparse_coo(self, shape, indices, values, coalesced):
        shape, indices, values = shape_of(shape), self.part(indices, "int64"), self.part(values)
        need(type(coalesced) is bool and len(indices[2]) == 2 and values[2], "sparse")
        sparse, cells = indices[2]
        need(sparse <= len(shape) and values[2] == (cells, *shape[sparse:]), "sparse")
        table = np.frombuffer(indices[3], "<i8").reshape(indices[2])
        for row, dim in zip(table, shape, strict=False):
            need(cells == 0 or (row.min() >= 0 and row.max() < dim), "index")
        if coalesced:
            keys = list(zip(*table.tolist(), strict=True))
            need(all(a < b for a, b in itertools.pairwise(keys)), "coalesced")
        return shape, indices, values, coalesced

    def sparse_compressed(self, layout, shape, compressed, plain, values):
        need(layout in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"), "layout")
        return layout, shape_of(shape), *map(self.part, (compressed, plain, values))

    def size(self, shape):
        need(type(shape) is list, "dims")
        need(all(type(dim) is int and -LIMIT <= dim < LIMIT for dim in shape), "dims")
        return (tuple(shape),)

    def dtype(self, name):
        need(type(name) is str, "name")
        return (name,)

    def device(self, type_, number):
        need(type(type_) is str and (number is None or count(number) < 128), "device")
        return type_, number

    def batch_size(self, value):
        """A batch size, which may count rows that nothing in the message shows."""
        shape = shape_of(value)
        rows = math.prod(dim for dim in shape if dim)
        need(rows <= 1 << 24 or rows <= sum(map(len, self.buffers)), "too many rows")
        return shape

    def names(self, names, shape):
        if names is not None:
            need(type(names) is list and len(names) == len(shape), "names")
            given = [name for name in names if name is not None]
            need(all(type(name) is str for name in given), "names")
            need(len(set(given)) == len(given), "names")
        return names

    def tensordict(self, batch_size, names, items):
        shape = self.batch_size(batch_size)
        need(type(items) is list and len(items) % 2 == 0, "items")
        need(all(type(key) is str for key in items[::2]), "key")
        need(len(set(items[::2])) == len(items) // 2, "twice")
        values = self.items(items[1::2])
        for value in values:
            found = self.batch_of(value)
            need(found is None or found[: len(shape)] == shape, "rows")
        return shape, self.names(names, shape), dict(zip(items[::2], values, strict=True))

    def batch_of(self, value):
        """The first dims of a leaf of a TENSORDICT, or None where they take more to know."""
        need(type(value) is tuple, "leaf")
        kind, *fields = value
        if kind == "JAGGED":
            return (len(fields[3]), *fields[1][: fields[2] - 1])
        if kind in ("TENSORDICT", "NON_TENSOR_DATA", "SPARSE_COO"):
            return fields[0]
        need(kind in LEAVES, "leaf")
        return fields[1] if kind in ("TENSOR", "SPARSE_COMPRESSED") else None

    def lazy_stack(self, stack_dim, dim_name, items):
        need(dim_name is None or type(dim_name) is str, "name")
        return count(stack_dim), dim_name, self.members(items, "TENSORDICT", "LAZY_STACK")

    def members(self, items, *kinds):
        items = self.items(items)
        need(all(type(item) is tuple and item[0] in kinds for item in items), "members")
        return items

    def non_tensor_data(self, batch_size, payload):
        return self.batch_size(batch_size), self.node(payload)

    def non_tensor_rows(self, payloads):
        return (self.items(payloads),)

    def non_tensor_stack(self, stack_dim, items):
        return count(stack_dim), self.members(
            items, "NON_TENSOR_DATA", "NON_TENSOR_ROWS", "NON_TENSOR_STACK"
        )

    def user(self, name, state):
        raise RefusedError(f"no such type: {name!r:.80}")

    def pickle(self, data):
        raise RefusedError("a pickle")
