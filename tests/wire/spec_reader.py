"""A second reader of the wire format, written from docs/wire-format.md alone.

It shares no line with the library and imports neither it nor torch, so that what both of them read
alike is what the specification says, and not what one program happens to do. Values come out
neutral: msgpack's own types as themselves, and everything else as a tuple that starts with the
kind's name. A value is the same whether a node or a document holds it.
"""

import collections
import itertools
import math
import struct
import zlib

import msgpack
import numpy as np

LIMIT, MOST = 1 << 63, 1 << 56
MAGIC = b"jagcodec"

SIZES = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "bfloat16": 2}
SIZES |= {f"{sign}{bits}": bits // 8 for sign in ("int", "uint") for bits in (8, 16, 32, 64)}
INTEGERS = {name for name in SIZES if name == "bool" or "int" in name}
SIZES |= {f"{sign}{bits}": 1 for sign in ("int", "uint") for bits in range(1, 8)}
SIZES |= {"float16": 2, "float32": 4, "float64": 8, "float4_e2m1fn_x2": 1, "float8_e8m0fnu": 1}
SIZES |= {f"float8_{name}": 1 for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
SIZES |= {"bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1}
ARRAYS = {"bool": "|b1", "int8": "|i1", "uint8": "|u1", "int16": "<i2", "int32": "<i4"}
ARRAYS |= {"int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8"}
QUANTIZED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")

# code: kind, fields, numbers, children (None: any number of them; "keys": one per key).
NODES = {
    19: ("TUPLE", "", "", None),
    22: ("DICT", "", "", None),
    25: ("BYTES", "", "buffer offset size", 0),
    26: ("LIST", "", "", None),
    27: ("MAP", "keys", "", "keys"),
    32: ("ARRAY", "dtype rank", "buffer offset dims", 0),
    33: ("OBJECT_ARRAY", "rank", "buffer offset stored group size dims", 0),
    48: ("TENSOR", "dtype rank", "buffer offset stored dims", 0),
    49: ("JAGGED", "dtype rank ragged_dim", "buffer offset stored group dims", 0),
    50: ("STRIDED_NESTED", "rank", "", 2),
    51: ("SPARSE_COO", "rank coalesced", "dims", 2),
    56: ("TENSOR_VIEWS", "", "", 2),
    64: ("TENSORDICT", "rank keys", "dims", "keys"),
    65: ("LAZY_STACK", "stack_dim", "", None),
    66: ("NON_TENSOR_DATA", "rank", "dims", 1),
    67: ("NON_TENSOR_ROWS", "", "buffer offset stored group size", 0),
    68: ("NON_TENSOR_STACK", "stack_dim", "", None),
    69: ("ARRAY_ROWS", "holder tensors", "", 2),
    80: ("USER", "name", "", 1),
}
RECORDS = {17: "BIG_INT", 19: "TUPLE", 20: "SET", 21: "FROZENSET", 22: "DICT"}
RECORDS |= {28: "NUMBERS", 36: "SCALAR", 80: "USER", 81: "PICKLE"}
NO_KEYS = ("SET", "DICT")
STACKS = ("LAZY_STACK", "NON_TENSOR_STACK")
NON_TENSORS = ("NON_TENSOR_DATA", "NON_TENSOR_ROWS", "NON_TENSOR_STACK")


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


def count(value, limit=LIMIT):
    need(type(value) is int and 0 <= value < limit, f"no count: {value!r:.50}")
    return value


def cell_of(kind, dtype=None, **_):
    """Bytes of a cell of a node; 0 of one without cells of its own."""
    if kind == "OBJECT_ARRAY":
        return 8
    return 0 if dtype is None else numpy_size(dtype) if kind == "ARRAY" else SIZES[dtype]


def shape_of(value, cell=0):
    """Dims of a value whose cells have so many bytes; 0 of one without cells of its own."""
    need(type(value) in (list, tuple) and len(value) <= 64, "dims")
    shape = tuple(count(dim) for dim in value)
    others = math.prod(dim for dim in shape if dim)
    need(others < LIMIT and (0 not in shape or others * cell < MOST), "too many cells")
    return shape


def strings(value):
    """A list of strings, none twice."""
    need(type(value) is list and all(type(item) is str for item in value), "names")
    need(len(set(value)) == len(value), "names")
    return value


def read(message):
    """The neutral value of a message, given as a list of frames or as one buffer."""
    try:
        if isinstance(message, list):
            need(message, "no header")
            header, frames = Header(bytes(message[0])), [bytes(frame) for frame in message[1:]]
        else:
            header, frames, _ = split(bytes(message))
        return Reader(header, frames).value
    except RecursionError:
        raise RefusedError("depth") from None


def split(blob):
    """The header and the other frames of a message in one buffer, and where it ends."""
    if blob[:8] != MAGIC:
        return Header(blob), [], len(blob)
    need(len(blob) >= 24, "cut")
    version, zero, size = struct.unpack_from("<IIQ", blob, 8)
    need(version == 1, "version")
    need(zero == 0 and size <= 1 << 33 and 24 + size <= len(blob), "preamble")
    header, frames, at = Header(blob[24 : 24 + size]), [], 24 + size
    for length in header.stored:
        at += -at % 64
        need(at + length <= len(blob), "cut")
        frames.append(blob[at : at + length])
        at += length
    return header, frames, at


def zstd(data, size):
    """What is stored of a frame, as the frame itself."""
    if len(data) == size:
        return data
    need(len(data) > 5 and data[:4] == b"\x28\xb5\x2f\xfd" and not data[4] & 0b1000, "zstd")
    segment = data[4] >> 5 & 1
    if not segment:
        exponent, mantissa = divmod(data[5], 8)
        need((8 + mantissa) << (7 + exponent) <= 1 << 23, "window")
    width = {0: segment, 1: 2, 2: 4, 3: 8}[data[4] >> 6]
    at = 6 - segment
    dictionary = (0, 1, 2, 4)[data[4] & 3]
    need(not any(data[at : at + dictionary]), "dictionary")
    at += dictionary
    says = int.from_bytes(data[at : at + width], "little") + 256 * (width == 2)
    need(width and len(data) >= at + width and says == size, "content size")
    import zstandard  # only compressed messages need it

    reader = zstandard.ZstdDecompressor()
    try:
        frame = reader.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RefusedError(f"zstd: {error}") from None
    need(len(frame) == size, "size")
    return frame


class Header:
    """Frame 0, taken apart."""

    def __init__(self, frame):
        need(frame[:10] == b"\x84\xa8" + MAGIC, "magic")
        header = unpack(frame)
        need(type(header[0][1]) is int and header[0][1] == 1, "version")
        need([key for key, _ in header] == ["jagcodec", "schema", "numbers", "values"], "keys")
        _, schema, numbers, values = (value for _, value in header)
        need(isinstance(schema, msgpack.ExtType) and schema.code == 16, "schema")
        need(type(numbers) is bytes and type(values) is bytes and len(numbers) % 8 == 0, "bin")
        self.schema, self.values = unpack(schema.data), unpack(values)
        self.numbers = [number for (number,) in struct.iter_unpack("<q", numbers)]
        need(min(self.numbers, default=0) >= 0, "below 0")
        more = len(self.values) - self.check(self.schema) if type(self.values) is list else -1
        need(more in (0, 1), "values")
        rest = iter(self.numbers[self.count(self.schema) :])
        groups, frames = (next(rest, None) for _ in range(2))
        need(groups is not None and frames is not None, "counts")
        need(5 * groups + frames <= len(self.numbers), "numbers")  # type: ignore[operator]
        self.groups = [tuple(itertools.islice(rest, 5)) for _ in range(groups)]  # type: ignore[arg-type]
        self.sizes = list(itertools.islice(rest, frames))
        need(not groups or len(self.groups[-1]) == 5, "numbers")
        need(len(self.sizes) == frames and sum(self.sizes) < MOST, "numbers")
        more = list(rest)
        need(len(more) in (0, frames, 1 + frames, 1 + 2 * frames), "numbers")  # type: ignore[operator]
        self.compressed = frames > 0 and len(more) in (frames, 1 + 2 * frames)  # type: ignore[operator]
        self.stored = more[:frames] if self.compressed else self.sizes
        self.checksums = more[frames:] if self.compressed else more
        need(all(map(int.__le__, self.stored, self.sizes)), "stored sizes")
        self.total = len(frame) + sum(self.stored)
        if self.checksums:
            plain = numbers[: len(numbers) - 8 * len(self.checksums)]
            need(zlib.crc32(schema.data + plain + values) == self.checksums[0], "checksum")

    def check(self, node, depth=0):
        """How many values the node takes; refuses what has no form of a node."""
        need(depth <= 104, "depth")
        if node is None:
            return 1
        need(type(node) is list and node and type(node[0]) is int and node[0] in NODES, "kind")
        kind, names, _, number = NODES[node[0]]
        fields, children = self.parts(node)
        need(len(fields) == len(names.split()), f"{kind}: fields")
        keys = strings(fields.get("keys", []))
        need(number is None or len(children) == (len(keys) if number == "keys" else number), kind)
        rank = count(fields.get("rank", 0), 65)
        need(1 <= count(fields.get("ragged_dim", 1)) <= max(rank, 1), "ragged dim")
        need(type(fields.get("name", "")) is str, "name")
        count(fields.get("stack_dim", 0))
        need(kind != "DICT" or children[:1] == [None], "keys")
        count(fields.get("coalesced", 0), 2)
        count(fields.get("holder", 0), 3)
        count(fields.get("tensors", 0), 2)
        if kind in ("TENSOR", "JAGGED"):
            need(type(fields["dtype"]) is str and fields["dtype"] in SIZES, "dtype")
        need(rank or kind != "JAGGED", "rank")
        return sum(self.check(child, depth + 1) for child in children)

    def parts(self, node):
        """The fields of a node by their names, and its children."""
        names = NODES[node[0]][1].split()
        return dict(zip(names, node[1:], strict=False)), node[1 + len(names) :]

    def count(self, node):
        """How many numbers the node and those below it take."""
        if node is None:
            return 0
        fields, children = self.parts(node)
        names = NODES[node[0]][2].split()
        own = len(names) + (fields["rank"] - 1 if "dims" in names else 0)
        return own + sum(map(self.count, children))


class Reader:
    """One message being read."""

    def __init__(self, header, frames, depth=0, *, in_row=False):
        need([len(frame) for frame in frames] == header.stored, "frames")
        checksums = [zlib.crc32(frame) for frame in frames]
        need(not header.checksums or checksums == header.checksums[1:], "checksum")
        need(not (in_row and header.compressed), "compressed in a row")
        self.header, self.payload, self.expanded = header, sum(header.sizes), 0
        self.counted(self.payload if header.compressed else 0)
        self.buffers = list(map(zstd, frames, header.sizes))
        self.in_row, self.made = in_row, 0
        self.depth, self.stacks = depth, 0
        self.numbers, self.values = iter(header.numbers), iter(header.values)
        self.unclaimed, self.stored = self.payload, []
        for buffer, offset, rows, low, high in header.groups:
            self.cells(buffer, offset, 8 * (rows + 1) if rows > 1 else 0)
            self.counted(64 * 8 * (rows + 1) if rows > 1 else 0)
            need(low <= high and (rows or not high) and (rows != 1 or low == high), "min and max")
        self.value = self.node(header.schema)

    def counted(self, size):
        """Counts bytes that are made of the message."""
        self.expanded += size
        need(self.expanded <= 64 * self.header.total + (1 << 26), "too much")

    def cells(self, buffer, offset, size):
        """The bytes at a place; all of them together are no more than the payload."""
        if size == 0:
            return b""
        self.unclaimed -= size
        need(self.unclaimed >= 0, "copies of the same bytes")
        need(buffer < len(self.buffers), "no such buffer")
        need(offset + size <= len(self.buffers[buffer]), "outside of the buffer")
        return self.buffers[buffer][offset : offset + size]

    def integers(self, buffer, offset, number):
        return np.frombuffer(self.cells(buffer, offset, 8 * number), "<i8").tolist()

    def offsets(self, group, end=None):
        """The offsets of a ragged group; only of one that a value names."""
        need(group < len(self.header.groups), "group")
        buffer, offset, rows, low, high = self.header.groups[group]
        offsets = [0, high][: rows + 1]
        if rows > 1:
            data = self.buffers[buffer][offset : offset + 8 * (rows + 1)]
            offsets = np.frombuffer(data, "<i8").tolist()
        lengths = lengths_of(offsets)
        need(offsets[0] == 0 and min(lengths, default=0) >= 0, "offsets")
        need((low, high) == (min(lengths, default=0), max(lengths, default=0)), "min and max")
        need(end is None or offsets[-1] == end, "offsets end elsewhere")
        return offsets

    def node(self, node):
        """The neutral value of a node of the schema."""
        need(self.depth <= 104, "depth")
        if node is None:
            return document(next(self.values))
        kind, _, names, _ = NODES[node[0]]
        fields, children = self.header.parts(node)
        numbers = {name: next(self.numbers) for name in names.split() if name != "dims"}
        if "rank" in fields:
            rank = fields.pop("rank")
            if "dims" in names.split():
                dims = [next(self.numbers) for _ in range(rank)]
                numbers["dims"] = shape_of(dims, cell_of(kind, **fields))
            else:
                numbers["rank"] = rank
        around = self.depth, self.stacks
        self.depth += 1
        self.stacks = 0 if kind == "NON_TENSOR_DATA" else self.stacks + (kind in STACKS)
        need(self.stacks <= 8, "stacks")
        children = (self.node(child) for child in children)
        result = getattr(self, kind.lower())(*children, **fields, **numbers)
        self.depth, self.stacks = around
        return result if kind in ("LIST", "MAP", "BYTES", "ARRAY_ROWS") else (kind, *result)

    # One method per kind of node: its children, then its fields and numbers by name.

    def tuple(self, *items):
        return ([*items],)

    def list(self, *items):
        return [*items]

    def map(self, *items, keys):
        return dict(zip(keys, items, strict=True))

    def dict(self, keys=None, *items):
        need(type(keys) is list and len(keys) == len(items), "keys")
        distinct(keys)
        return ([part for pair in zip(keys, items, strict=True) for part in pair],)

    def bytes(self, buffer, offset, size):
        return self.cells(buffer, offset, size)

    def array(self, dtype, buffer, offset, dims):
        data = self.cells(buffer, offset, math.prod(dims) * numpy_size(dtype))
        return dtype, dims, text(dtype, data)

    def documents(self, buffer, offset, stored, group, size):
        """The values of rows of documents."""
        blobs, stored = size > 0 and stored & 256, stored & ~256
        if size > 0 and stored in (65, 129):
            offsets = self.offsets(group, size)
            lengths = lengths_of(offsets)
            place = (buffer, offset, 1)
            data = self.indirect(*place, "uint8", 1, lengths, group, one_object=stored == 129)
        else:
            need(stored == 0 or not size, "documents are stored as they are")
            self.counted(64 * size)
            data, offsets = self.cells(buffer, offset, size), self.offsets(group, size)
        rows = [data[start:end] for start, end in itertools.pairwise(offsets)]
        return [self.message(row) if blobs else document(unpack(row)) for row in rows]

    def message(self, row):
        """The value of a row that is a message of its own."""
        need(row[:8] == MAGIC, "no message")
        header, frames, end = split(row)
        need(row[end:] == bytes(-end % 64), "zeros up to a multiple of 64")
        return Reader(header, frames, self.depth, in_row=True).value

    def object_array(self, dims, **place):
        items = self.documents(**place)
        need(len(items) == math.prod(dims), "one document per cell")
        return dims, items

    def tensor(self, dtype, buffer, offset, stored, dims):
        """The dtype's name, the shape and the cells, as wide as the dtype says."""
        cells = math.prod(dims)
        self.stored.append(stored)  # for the sparse tensor, whose indices are not narrow
        if cells and 64 < stored <= 72:
            need(dims and stored == 65, "an indirect tensor")
            need(dims[0] <= 8 * self.payload, "more rows than the payload has bits")
            rows = [1] * dims[0]
            return dtype, dims, self.indirect(buffer, offset, 1, dtype, cells // dims[0], rows)
        self.counted(cells * SIZES[dtype] if stored else 0)
        data = self.cells(buffer, offset, stored_size(dtype, stored, cells))
        return dtype, dims, widened(dtype, stored, cells, data)

    def jagged(self, dtype, ragged_dim, group, dims, buffer, offset, stored):
        if math.prod(dims) and 64 < stored <= 72:
            need(ragged_dim == 1, "indirect rows of another ragged dim")
            offsets = self.offsets(group, dims[0])
            cell = math.prod(dims[1:])
            place = (buffer, offset, stored - 64)
            data = self.indirect(*place, dtype, cell, lengths_of(offsets), group)
        else:
            dtype, dims, data = self.tensor(dtype, buffer, offset, stored, dims)
            offsets = self.offsets(group, dims[ragged_dim - 1])
        return dtype, dims, ragged_dim, rows_of(dtype, dims, data, offsets, ragged_dim - 1)

    def indirect(self, buffer, offset, count, dtype, cell, lengths, group=None, one_object=None):
        """The cells of rows of these lengths that lie elsewhere; of documents, whether rows that
        begin at one byte are `one_object`.
        """
        need(not self.in_row, "indirect columns in a row")
        step, total = cell * SIZES[dtype], sum(lengths)
        self.counted(total * step + 32 * len(lengths) * count)
        table = self.integers(buffer, offset, 8 * count)
        rows, ends = [b""] * len(lengths), [0] * len(lengths)
        for own, at, offset, stored, cells, *index in zip(*[iter(table)] * 8, strict=True):
            mine = lengths
            if group is not None:
                need(0 <= own < len(self.header.groups), "group")
                need(count > 1 or own == group, "group of the only run")
                mine = lengths_of(self.offsets(own))
                need(len(mine) == len(lengths), "rows of a run")
            need(0 <= cells <= sum(mine), "cells")
            data = self.shared(at, offset, stored, dtype, cells * cell)
            starts = [0] * len(mine)
            if index[0] == -1:
                need(group is not None, "a tensor without an index")
            else:
                numbers = self.shared(index[0], index[1], index[2], "int64", len(mine))
                starts = np.frombuffer(numbers, "<i8").tolist()
            need(all(0 <= a <= cells - n for a, n in zip(starts, mine, strict=True)), "rows")
            if one_object is not None:
                distinct = {*zip(starts, mine, strict=True)}
                need(not one_object or len(distinct) == len({*starts}), "one object")
                self.made += sum(n for _, n in distinct) if one_object else total
            for i, (a, n) in enumerate(zip(starts, mine, strict=True)):
                rows[i] += data[a * step : (a + n) * step]
                ends[i] += n
        need(ends == lengths, "runs of other rows")
        need(self.made <= 64 * self.header.total + (1 << 20), "too many documents")
        return b"".join(rows)

    def shared(self, buffer, offset, stored, dtype, cells):
        """Cells at a place that others may have too."""
        if cells == 0:
            return b""
        size = stored_size(dtype, stored, cells)
        need(0 <= buffer < len(self.buffers), "no such buffer")
        need(0 <= offset <= len(self.buffers[buffer]) - size, "outside of the buffer")
        return widened(dtype, stored, cells, self.buffers[buffer][offset : offset + size])

    def rows_of_integers(self, base, rows, width):
        """The parts of a TENSOR, and the rows of a TENSOR of int64s, which was read last."""
        need(tensors(base, rows) and rows[1] == "int64" and not self.stored[-1], "children")
        need(len(rows[2]) == 2 and rows[2][1] == width, "integers in a row")
        self.counted(64 * len(rows[3]))
        return *base[1:], np.frombuffer(rows[3], "<i8").reshape(rows[2]).tolist()

    def strided_nested(self, cells, sizes, rank):
        dtype, dims, data, sizes = self.rows_of_integers(cells, sizes, rank or 1)
        need(len(dims) == 1 and (rank or all(row == [1] for row in sizes)), "components")
        step = SIZES[dtype]
        shapes = [shape_of(row[:rank], step) for row in sizes]
        ends = [0, *itertools.accumulate(map(math.prod, shapes))]
        need(ends[-1] == dims[0], "cells")
        parts = (data[step * a : step * b] for a, b in itertools.pairwise(ends))
        return dtype, list(zip(shapes, parts, strict=True))

    def tensor_views(self, base, bounds):
        dtype, dims, data, bounds = self.rows_of_integers(base, bounds, 2)
        need(dims and all(0 <= start <= end <= dims[0] for start, end in bounds), "views")
        size = SIZES[dtype] * math.prod(dims[1:])
        return dtype, [((b - a, *dims[1:]), data[a * size : b * size]) for a, b in bounds]

    def array_rows(self, values, table, holder, tensors):
        """The value that has these rows: objects, an array of objects or a list."""
        need(type(values) is tuple and values[0] == "JAGGED" and len(values[2]) == 1, "rows")
        need(type(table) is tuple and table[:2] == ("TENSOR", "int64"), "dims of rows")
        dtype, rows, dims = values[1], values[4], table[2]
        need(tensors or dtype in ARRAYS, "dtype of arrays")
        need(len(dims) == 2 and dims[0] == len(rows) and 1 <= dims[1] <= 65, "dims of rows")
        self.counted(512 * len(rows))
        made = []
        table = np.frombuffer(table[3], "<i8").reshape(dims).tolist()
        for (exists, *shape), ((cells,), data) in zip(table, rows, strict=True):
            need(exists in (0, 1), "whether a row exists")
            need(exists or not (cells or any(shape)), "dims of nothing")
            shape = shape_of(shape, SIZES[dtype])
            need(not exists or math.prod(shape) == cells, "elements of a row")
            row = (
                ("TENSOR", dtype, shape, data) if tensors else ("ARRAY", ARRAYS[dtype], shape, data)
            )
            made.append(row if exists else None)
        if holder == 2:
            return made
        return ("OBJECT_ARRAY", (len(made),), made) if holder else ("NON_TENSOR_ROWS", made)

    def sparse_coo(self, indices, values, coalesced, dims):
        need(tensors(indices, values) and not any(self.stored[-2:-1]), "sparse")
        need(indices[1] == "int64", "sparse")
        need(len(indices[2]) == 2 and indices[2][0] <= len(dims), "indices")
        sparse, cells = indices[2]
        need(values[2] == (cells, *dims[sparse:]), "values")
        table = np.frombuffer(indices[3], "<i8").reshape(indices[2])
        for row, dim in zip(table, dims, strict=False):
            need(cells == 0 or (row.min() >= 0 and row.max() < dim), "index")
        if coalesced:
            keys = list(zip(*table.tolist(), strict=True)) if sparse else [()] * min(cells, 2)
            need(all(a < b for a, b in itertools.pairwise(keys)), "coalesced")
        return dims, indices, values, bool(coalesced)

    def batch_size(self, dims):
        """A batch size, which may count rows that nothing in the message shows."""
        rows = math.prod(dim for dim in dims if dim)
        need(rows <= 1 << 24 or rows <= self.payload, "too many rows")
        return dims

    def tensordict(self, *items, keys, dims):
        for item in items:
            need(batch_of(item)[: len(dims)] == self.batch_size(dims), "rows")
        return self.batch_size(dims), dict(zip(keys, items, strict=True))

    def lazy_stack(self, *items, stack_dim):
        stack_of(items, stack_dim, ("TENSORDICT", "LAZY_STACK"))
        return stack_dim, [*items]

    def non_tensor_data(self, payload, dims):
        return self.batch_size(dims), payload

    def non_tensor_rows(self, **place):
        rows = self.documents(**place)
        need(not any(type(row) is tuple and row[0] in NON_TENSORS for row in rows), "payload")
        return (rows,)

    def non_tensor_stack(self, *items, stack_dim):
        stack_of(items, stack_dim, NON_TENSORS)
        return stack_dim, [*items]

    def user(self, state, name):
        return user(name, state)


def stored_size(dtype, stored, cells):
    """The bytes of cells that are stored as `stored` says."""
    if stored == 0 or cells == 0:
        return cells * SIZES[dtype]
    need(dtype in INTEGERS, "stored")
    if stored == 1:
        return (cells + 7) // 8
    signed, width = stored >= 32, stored % 16
    need(16 < stored < 48 and 1 <= width <= 4 and width < SIZES[dtype], "stored")
    need(not signed or dtype[0] == "i", "stored")
    return cells * width


def widened(dtype, stored, cells, data):
    """Cells as wide as their dtype."""
    if stored == 0 or cells == 0:
        return data
    narrow = np.frombuffer(data, np.uint8)
    if stored == 1:
        narrow = np.unpackbits(narrow, count=cells, bitorder="little")
    narrow = narrow.reshape(cells, -1)
    out = np.zeros((cells, SIZES[dtype]), np.uint8)
    if stored >= 32:  # negative ones are 255 in their higher bytes
        out[narrow[:, -1] >= 128] = 255
    out[:, : narrow.shape[1]] = narrow
    return out.tobytes()


def lengths_of(offsets):
    return [end - start for start, end in itertools.pairwise(offsets)]


def tensors(*values):
    return all(type(value) is tuple and value[0] == "TENSOR" for value in values)


def rows_of(dtype, dims, data, offsets, dim):
    """Every row as (shape, bytes)."""
    step = math.prod(dims[dim + 1 :]) * SIZES[dtype]
    outer = range(0, len(data), step * dims[dim]) if data else ()
    return [
        (
            (*dims[:dim], end - start, *dims[dim + 1 :]),
            b"".join(data[at + start * step : at + end * step] for at in outer),
        )
        for start, end in itertools.pairwise(offsets)
    ]


def batch_of(value):
    """The first dims of a leaf of a TENSORDICT, as far as they are the same in all rows."""
    need(type(value) is tuple, "leaf")
    kind, *fields = value
    if kind == "JAGGED":
        return (len(fields[3]), *fields[1][: fields[2] - 1])
    if kind == "STRIDED_NESTED":
        columns = zip(*(shape for shape, _ in fields[1]), strict=True)
        same = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
        return (len(fields[1]), *(column[0] for column in same))
    if kind in STACKS:
        return stack_of(fields[-1], fields[0], (*NON_TENSORS, "TENSORDICT", "LAZY_STACK"))
    if kind == "NON_TENSOR_ROWS":
        return (len(fields[0]),)
    leaves = ("TENSORDICT", "NON_TENSOR_DATA", "SPARSE_COO", "TENSOR")
    need(kind in leaves, "leaf")
    return fields[1] if kind == "TENSOR" else fields[0]


def stack_of(items, dim, kinds):
    """The batch size of a stack, -1 for dims in which its members differ."""
    need(all(type(item) is tuple and item[0] in kinds for item in items), "members")
    sizes = [batch_of(item) for item in items] or [()]
    need(len({*map(len, sizes)}) == 1 and dim <= len(sizes[0]), "members")
    size = [dims[0] if len({*dims}) == 1 else -1 for dims in zip(*sizes, strict=True)]
    return (*size[:dim], len(items), *size[dim:])


def numpy_size(dtype):
    """The bytes per cell of a numpy dtype."""
    need(type(dtype) is str, "dtype")
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise RefusedError(f"dtype: {error}") from None
    need(found.str == dtype and found.kind in "biufcSUVmM", "dtype")
    need(found.kind not in "fc" or found.itemsize <= (8 if found.kind == "f" else 16), "dtype")
    return found.itemsize


def text(dtype, data):
    """The cells; refuses strings of U that hold no code points."""
    if dtype[1] == "U":
        need((np.frombuffer(data, f"{dtype[0]}u4") <= 0x10FFFF).all(), "code points")
    return data


# --- documents ---------------------------------------------------------------------------------


def document(value):
    """The neutral value of a document."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is tuple:
        keys = strings([key for key, _ in value])
        return {key: document(item) for key, (_, item) in zip(keys, value, strict=True)}
    need(type(value) is list, "an extension out of its place")
    if not value or not isinstance(value[0], msgpack.ExtType):
        return [document(item) for item in value]
    tag, *fields = value
    need(tag.code in RECORDS and tag.data == b"", "tag")
    kind = RECORDS[tag.code]
    need(kind != "PICKLE", "a pickle")
    fields = [document(field) for field in fields]
    try:
        result = DOCUMENTS[kind](*fields)  # type: ignore[operator]
    except TypeError as error:
        raise RefusedError(f"{kind}: {error}") from None
    return result[0] if kind in ("BIG_INT", "NUMBERS") else (kind, *result)


def big_int(data):
    need(type(data) is bytes and data, "data")
    return (int.from_bytes(data, "little", signed=True),)


def numbers(dtype, data):
    code = {"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float64": "d"}
    need(type(dtype) is str and dtype in code, "dtype")
    need(type(data) is bytes and len(data) % SIZES[dtype] == 0, "data")
    need(dtype != "bool" or set(data) <= {0, 1}, "bools")
    return ([*struct.unpack(f"<{len(data) // SIZES[dtype]}{code[dtype]}", data)],)


def set_(*members):
    distinct(members)
    return (sorted(members, key=repr),)


def dict_(*items):
    need(len(items) % 2 == 0, "a key without a value")
    distinct(items[::2])
    return ([*items],)


def distinct(members):
    """Refuses keys that are equal, that cannot be keys, or whose hashes collide on purpose."""
    keys = [key_of(member) for member in members]
    need(len(set(keys)) == len(keys), "twice")
    hashes = collections.Counter(hash(key) for key in keys if type(key) is not str)
    need(max(hashes.values(), default=0) <= 64, "hashes")


def key_of(value):
    """What tells a dict key or set member apart from others."""
    need(type(value) not in (list, dict), "no key")
    if type(value) in (bool, int, float, complex) and value == value:
        return value
    if type(value) is tuple:
        kind, *fields = value
        need(kind not in NO_KEYS, "no key")
        if kind == "USER":
            return key_of_user(*fields)
        if kind == "TUPLE":
            return tuple(map(key_of, fields[0]))
        if kind == "FROZENSET":
            return frozenset(map(key_of, fields[0]))
        if kind == "SCALAR" and fields[1] and fields[0][1] in "biufcSU":
            return key_of(np.ndarray((), fields[0], fields[1]).item())
    return object() if value != value else repr(value)


def key_of_user(name, state):
    need(name != "collections.OrderedDict", "no key")
    if name == "complex":
        return complex(*state[1]) if state[1] == state[1] else object()
    if name == "range":
        return range(*state[1])
    if name == "torch.Size":
        return tuple(state)
    return key_of(state) if name.startswith("numpy") else (name, repr(state))


def scalar(dtype, data):
    need(type(data) is bytes and len(data) == numpy_size(dtype), "size")
    return dtype, text(dtype, data)


def is_dict(value):
    return type(value) is dict or (type(value) is tuple and value[0] in ("DICT", "MAP"))


def row_count(column):
    """The rows of a column of a `BatchedDataDict`; None of one that may have any number."""
    if type(column) is list:
        return len(column)
    kind = column[0] if type(column) is tuple else None
    if kind == "USER" and column[1] == "jagcodec.PackedColumn":
        return column[2]["cu_seqlens"][2][0] - 1
    if kind == "USER" and column[1] == "jagcodec.BatchedDataDict":
        return next(map(row_count, column[2][0].values()), None)
    if kind in ("JAGGED", "NON_TENSOR_ROWS", "STRIDED_NESTED"):
        return len(column[-1])
    need(kind in ("TENSOR", "ARRAY", "OBJECT_ARRAY", "SPARSE_COO", "TENSORDICT"), "column")
    dims = column[2] if kind in ("TENSOR", "ARRAY") else column[1]
    need(len(dims) > 0, "column without rows")
    return dims[0]


def user(name, state):
    """A value of one of the types that every reader knows."""
    is_tuple = type(state) is tuple and state[0] == "TUPLE"
    parts = state[1] if is_tuple else []
    types = [type(part) for part in parts]
    known = {
        "collections.OrderedDict": is_dict(state) or (len(parts) == 2 and is_dict(parts[0])),
        "complex": types == [float, float],
        "range": types == [int] * 3 and parts[2] != 0,
        "slice": len(parts) == 3,
        "torch.Size": type(state) is list
        and all(type(dim) is int and -LIMIT <= dim < LIMIT for dim in state),
        "torch.dtype": type(state) is str and state in {*SIZES, *QUANTIZED},
        "torch.device": types in ([str, int], [str, type(None)])
        and (parts[1] is None or 0 <= parts[1] < 128),
        "numpy.str_": type(state) is str,
        "numpy.bytes_": type(state) is bytes,
        "jagcodec.BatchedDataDict": type(state) is list
        and [*map(type, state)] == [dict, dict]
        and len({row_count(column) for column in state[0].values()} - {None}) < 2,
        "jagcodec.PackedColumn": type(state) is dict
        and {*state} == {"values", "cu_seqlens", "max_seqlen", "position_ids"}
        and tensors(state["values"], state["cu_seqlens"], state["position_ids"])
        and len(state["values"][2]) > 0
        and state["cu_seqlens"][1] in INTEGERS - {"bool"}
        and len(state["cu_seqlens"][2]) == 1
        and state["cu_seqlens"][2][0] > 0
        and type(state["max_seqlen"]) is int,
    }
    need(type(name) is str and name in known, f"no such type: {name!r:.80}")
    need(known[name], f"state of {name}")
    return name, state


DOCUMENTS = {
    "BIG_INT": big_int,
    "TUPLE": lambda *items: ([*items],),
    "SET": set_,
    "FROZENSET": set_,
    "DICT": dict_,
    "NUMBERS": numbers,
    "SCALAR": scalar,
    "USER": user,
}
