"""Any bytes -> a message that begins well, for the fuzzer's readers in `target.py`.

The bytes of an input are a *script*: its first byte chooses how the message is made, the rest says
what is in it. A script that ends early goes on in zeros, so that every input makes a message, and
nearly every message gets past the magic and the version:

* seed: a real message, taken apart; some of its nodes, numbers, documents or payload bytes are
  replaced, and it is put together with lengths, counts and checksums that fit.
* tree: a schema written by the script node by node, with numbers over a payload that grows with
  it, documents, and rows of documents that have messages in them.
* raw: the script's bytes as the schema, the numbers, the values or the rows of a message, or
  behind the fixed start of a header or of a blob.
"""

from __future__ import annotations

import math
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import msgpack
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec.errors import WireFormatError
from jagcodec.wire import schema as wire_schema
from jagcodec.wire.documents import RECORDS
from jagcodec.wire.encoder import encode
from jagcodec.wire.header import read_header
from jagcodec.wire.plain_types import PLAIN_TYPES
from jagcodec.wire.registry import register_type
from jagcodec.wire.schema import FORMS, PER_KEY, numpy_itemsize
from jagcodec.wire.spec import (
    BLOB_MAGIC,
    BLOBS,
    INDIRECT,
    MAGIC,
    NO_INDEX,
    ONE_OBJECT,
    STORED_WIDTHS,
    TORCH_DTYPES,
    VERSION,
    Kind,
)

START = b"\x84" + msgpack.packb(MAGIC)
PREAMBLE = struct.Struct("<8sIIQ")


# --- messages in parts -------------------------------------------------------------------------


@dataclass
class Node:
    """A node of a schema with its numbers. A child that is not a node is a document."""

    kind: int
    fields: list[Any]
    numbers: list[int]
    children: list[Any]

    def nodes(self) -> Iterator[Node]:
        """The node and those below it."""
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.nodes()

    def copy(self) -> Node:
        """A copy whose lists are its own."""
        children = [c.copy() if isinstance(c, Node) else c for c in self.children]
        return Node(self.kind, list(self.fields), list(self.numbers), children)


@dataclass
class Draft:
    """A message before it is put together."""

    root: Any
    groups: list[list[int]] = field(default_factory=list)
    payload: list[bytearray] = field(default_factory=list)
    checksum: bool = False
    extra: list[int] = field(default_factory=list)  # numbers that nothing asks for
    stored: list[bytes] | None = None  # what is sent of each frame, if some are compressed

    def copy(self) -> Draft:
        """A copy that may be edited."""
        return Draft(
            self.root.copy() if isinstance(self.root, Node) else self.root,
            [list(group) for group in self.groups],
            [bytearray(part) for part in self.payload],
            self.checksum,
        )

    def frames(self) -> list[bytes]:
        """The message, with lengths, counts and checksums that fit."""
        numbers: list[int] = []
        values: list[Any] = []

        def plain(item: Any) -> Any:
            if not isinstance(item, Node):
                values.append(item)
                return None
            numbers.extend(item.numbers)
            return [item.kind, *item.fields, *map(plain, item.children)]

        packed = _pack(plain(self.root))
        numbers += [*self.extra, len(self.groups), len(self.payload)]
        numbers += [number for group in self.groups for number in group]
        numbers += map(len, self.payload)
        sent: Any = self.payload
        if self.stored is not None:
            sent = self.stored
            numbers += map(len, sent)
        return _message(packed, _words(numbers), _pack(values), sent, self.checksum)


def _message(
    schema: bytes, numbers: bytes, values: bytes, payload: Any, checksum: bool = False
) -> list[bytes]:
    if checksum:
        whole = zlib.crc32(values, zlib.crc32(numbers, zlib.crc32(schema)))
        numbers += _words([whole, *map(zlib.crc32, payload)])
    fields = {MAGIC: VERSION, "schema": msgpack.ExtType(int(Kind.SCHEMA), schema)}
    header = _pack({**fields, "numbers": numbers, "values": values})
    return [header, *map(bytes, payload)]


# Packers keep their buffers, so one is made anew for each message.
def _pack(value: Any) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass")


def _words(numbers: Any) -> bytes:
    return b"".join(struct.pack("<q", max(-(2**63), min(n, 2**63 - 1))) for n in numbers)


def blob_of(frames: list[bytes]) -> bytes:
    """Frames in one buffer."""
    # Not with to_blob: it would instrument, and time, the writer.
    header, *payload = frames
    blob = PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, len(header)) + header
    for part in payload:
        blob += bytes(-len(blob) % 64) + part
    return blob


# --- seeds -------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """A registered type, so that messages can hold one."""

    temperature: float
    stop: Any = ()


register_type(Sampling, "fuzz.Sampling")


def _jagged(values: torch.Tensor, lengths: list[int], dim: int = 1) -> torch.Tensor:
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, jagged_dim=dim, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def _rollout() -> TensorDict:
    fields = {
        "ids": _jagged(torch.arange(6), [2, 4, 0]),
        "logprob": _jagged(torch.linspace(-1, 0, 6), [2, 4, 0]),
        "mask": _jagged(torch.ones(6, dtype=torch.bool), [2, 4, 0]),
        "reward": torch.tensor([0.5, -1.0, 2.0]),
        "message": NonTensorStack("a", {"b": (1, torch.ones(2))}, None),
    }
    return TensorDict(fields, [3])


def _repeats() -> TensorDict:
    """A batch that repeats rows, beginnings of rows, cells, positions and columns."""
    prompts = [[1000 + k * k % 77 for k in range(36)]] * 3
    answers = [[9000 + k * k % 31 + i for k in range(20)] for i in range(3)]
    both = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    def column(rows: list[list[int]]) -> torch.Tensor:
        cells = torch.tensor([cell for row in rows for cell in row])
        return _jagged(cells, list(map(len, rows)))

    fields = {
        "prompts": column(prompts),
        "both": column(both),
        "mask": column([[1] * 56] * 3),
        "positions": column([list(range(56))] * 3),
        "zeros": torch.zeros(3, 200),
    }
    return TensorDict(fields, [3])


def _values() -> list[tuple[Any, dict[str, bool]]]:
    """Values and the options to encode them with. Scripts name them by place: append only."""
    sparse = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    base = torch.arange(24, dtype=torch.int32).view(12, 2)
    members = [TensorDict({"x": torch.zeros(2)}, [2]), TensorDict({"x": torch.ones(2)}, [2])]
    deep = np.array([{"t": torch.ones(3)}, None, np.array([torch.ones(2), "x"], object)], object)
    plain: list[Any] = [
        {"i": 1, "f": 0.5, "s": "text", "n": None, "t": True, "l": [1, -2, 2**40]},
        [10**30, -(10**20), 1 + 2j, (1, (2, "x")), {1, 2}, frozenset(["a", "b"])],
        [{1: "a", (2, 3): "b"}, range(0, 10, 2), slice(1, None, 2), b"bytes"],
        {1: torch.ones(2), "a": 5},
        slice(torch.tensor(1), None, (torch.tensor(2), "x")),
        b"\x00\x01" * 2048,
        np.arange(6, dtype="<i8").reshape(2, 3),
        [np.array(["ab", "c"]), np.array(["2026-01-01"], dtype="M8[D]"), np.array(1.5)],
        np.arange(4, dtype=">u2"),
        np.array(["text", [1, 2]], dtype=object),
        np.void(b"\x00\x01"),
        np.array([1, "x", None], dtype=object),
        deep,
        [np.float32(1.5), np.int64(3), np.str_("s"), np.bytes_(b"b"), np.datetime64(5, "s")],
        torch.arange(6).view(2, 3),
        [torch.tensor(1.5), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, 3)],
        _jagged(torch.arange(5.0), [2, 0, 3]),
        _jagged(torch.arange(20).view(4, 5), [2, 3], 2),
        _jagged(torch.arange(6), [6]),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 4)]),
        sparse.to_sparse(),
        torch.sparse_coo_tensor(torch.tensor([[1, 0, 1]]), torch.ones(3), (2,)),
        sparse.to_sparse(1),
        sparse.to_sparse().to(torch.int8),
        torch.ones(2, 2, dtype=torch.bool).to_sparse(),
        [torch.Size([2, 3]), torch.float32, torch.device("cpu")],
        [base[0:3], base[3:4], base[4:9]],
        TensorDict({"a": torch.ones(2, 3), "n": TensorDict({}, [2]), "t": "text"}, [2]),
        TensorDict({"a": torch.ones(2, 3)}, [2, 3]),
        TensorDict({"s": sparse.to_sparse(), "n": torch.nested.nested_tensor([base, base])}, [2]),
        LazyStackedTensorDict(*members, stack_dim=0),
        TensorDict({"l": LazyStackedTensorDict(*members, stack_dim=1)}, [2]),
        NonTensorData({"k": [1]}, batch_size=[3]),
        NonTensorStack("a", "b", {"c": 1}),
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")),
        _rollout(),
        Sampling(0.5, ("x",)),
        Sampling(0.5, torch.ones(2)),
        np.array([b"a", b"bcd"]),
        np.array([None, "a"], dtype=object),
        np.array([1.5], dtype=">f8"),
        {"big": torch.arange(2100), "small": torch.arange(3)},
    ]
    numbers = {"bool": torch.tensor([True, False, True]), "int": torch.arange(-2, 300)}
    return [
        *((value, {}) for value in plain),
        (_rollout(), {"narrow": True, "checksum": True}),
        (numbers, {"narrow": True}),
        (torch.arange(70_000, 70_003), {"narrow": True}),
        ([torch.arange(4)], {"checksum": True}),
        ({"f": [len]}, {"allow_pickle": True}),
        (_repeats(), {"elide": True}),
        (_repeats(), {"elide": True, "narrow": True}),
        (NonTensorStack(*[{"tools": "x" * 500}] * 3), {"elide": True}),
        (NonTensorStack(*["y" * 1100 + end for end in ("", "z", "")]), {"elide": True}),
    ]


@dataclass
class Seed:
    """A message, and the same taken apart: what a script edits."""

    frames: list[bytes]
    draft: Draft


def _seed(value: Any, options: dict[str, Any]) -> Seed:
    frames = [bytes(memoryview(frame)) for frame in encode(value, **options)]
    header = read_header(frames[0])
    packed = msgpack.unpackb(frames[0])["values"]
    values = msgpack.unpackb(packed, ext_hook=msgpack.ExtType, unicode_errors="surrogatepass")

    def apart(node: wire_schema.Node) -> Any:
        if node.kind is Kind.VALUE:
            return values[node.value]
        numbers = header.numbers[node.number : node.end]
        return Node(int(node.kind), node.fields, numbers, list(map(apart, node.children)))

    root, groups = apart(header.schema.root), [list(group) for group in header.groups]
    payload = [bytearray(frame) for frame in frames[1:]]
    return Seed(frames, Draft(root, groups, payload, header.checksums is not None))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SEEDS = [_seed(value, options) for value, options in _values()]


# --- scripts -----------------------------------------------------------------------------------


class Script:
    """The bytes of an input, read in order; zeros behind the end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        """The next byte."""
        at = self._at
        self._at = at + 1
        return self._data[at] if at < len(self._data) else 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end."""
        at = self._at
        self._at = at + size
        return self._data[at : at + size]

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))

    def pick(self, options: Any) -> Any:
        """One of `options`."""
        return options[self.byte() % len(options)]

    def number(self, small: int = 5) -> int:
        """Mostly a small number, now and then one at an edge."""
        value = self.byte()
        return value % small if value < 236 else _EDGES[value % len(_EDGES)]


_EDGES = (
    *(0, 1, 2, 3, 5, 8, 24, 63, 64, 65, 100, 127, 128, 255, 256, 16384, 2**16, 2**24, 2**24 + 1),
    *(2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**60, 2**61, 2**62, 2**62 + 1, 2**63 - 1, -1, -2),
    *(-(2**63), 2**63, 2**64 - 1),
)
_KEYS = ("a", "b", "x", "", "a.b", "batch_size", "names", "data", "\ud800", "é" * 20, "_td", "0")
_TORCH_NAMES = tuple(TORCH_DTYPES)
_PLAIN_NAMES = tuple(name for name, *_ in PLAIN_TYPES.values())
_STORED = (0, 1, *STORED_WIDTHS, 0x10, 0x18, 2)
_NUMPY_NAMES = (
    *("<i4", "<i8", "|u1", "|b1", ">f4", "<f8", "<c16", "|S3", "|S0", "<U2", "<U0", "|V3", "|V0"),
    *("<M8[ns]", "<m8", "<M8[7D]", "float80", "complex160", "float128", "|O", "<f2"),
    *("|S9999999999", "<M8[000000000s]", ">U1", "<c8"),
)


def _numpy_dtype(s: Script) -> Any:
    value = s.byte()
    if value < 240:
        return _NUMPY_NAMES[value % len(_NUMPY_NAMES)]
    return ["sub", "<i4", [2]] if value < 248 else ["struct", 4, False, [["a", None, 0, "<i4"]]]


def _numpy_size(dtype: Any) -> int:
    try:
        return numpy_itemsize(dtype)
    except WireFormatError:
        return 0


# --- documents ---------------------------------------------------------------------------------


def _document(s: Script, depth: int = 0) -> Any:
    """Any document."""
    op = s.byte()
    if depth > 5:
        return op
    if op >= 254 and depth == 0:
        document = _document(s, 5)
        layer = s.byte()
        for _ in range(s.byte() % 120):
            document = _DOCUMENT_LAYERS[layer % len(_DOCUMENT_LAYERS)](document)
        return document
    if op < 128:
        return _record(s, _ALL_RECORDS[op % len(_ALL_RECORDS)], depth + 1)
    return _NATIVE[op % len(_NATIVE)](s, depth + 1)


def _documents(s: Script, depth: int) -> list[Any]:
    return [_document(s, depth) for _ in range(s.byte() % 5)]


def _tag(kind: int) -> Any:
    return msgpack.ExtType(kind, b"")


_DOCUMENT_LAYERS: tuple[Callable[[Any], Any], ...] = (
    lambda document: [document],
    lambda document: {"a": document},
    lambda document: [_tag(Kind.TUPLE), document],
    lambda document: [_tag(Kind.FROZENSET), document],
    lambda document: [_tag(Kind.DICT), 1, document],
    lambda document: [_tag(Kind.USER), "slice", [_tag(Kind.TUPLE), document, None, None]],
    lambda document: [_tag(Kind.USER), "fuzz.Sampling", {"temperature": document, "stop": 1}],
)
_NATIVE: tuple[Callable[[Script, int], Any], ...] = (
    lambda s, d: None,
    lambda s, d: bool(s.byte() & 1),
    lambda s, d: s.byte(),
    lambda s, d: s.number(),
    lambda s, d: s.byte() / 4,
    lambda s, d: s.pick((float("nan"), float("inf"), -0.0, 1e308)),
    lambda s, d: s.pick(_KEYS),
    lambda s, d: s.take(s.byte() % 20),
    _documents,
    lambda s, d: {s.pick(_KEYS): _document(s, d) for _ in range(s.byte() % 4)},
    lambda s, d: msgpack.ExtType(s.byte() % 128, s.take(s.byte() % 20)),
    lambda s, d: msgpack.Timestamp(s.byte()),
)
_FIELDS: dict[str, Callable[[Script, int], Any]] = {
    "data": lambda s, d: s.take(s.byte() % 33),
    "dtype": lambda s, d: _numpy_dtype(s),
    "name": lambda s, d: s.pick(("fuzz.Sampling", *_PLAIN_NAMES, "load", "os.system")),
    "keys": lambda s, d: [],
    "stack_dim": lambda s, d: s.number(2),
    "coalesced": lambda s, d: s.byte() & 1,
    "state": lambda s, d: (
        {"temperature": _document(s, d), "stop": 1}
        if (odd := s.byte()) < 96
        else [_tag(Kind.TUPLE), *_documents(s, d)]
        if odd < 160
        else _document(s, d)
    ),
}
_ALL_RECORDS = tuple(RECORDS)


def _record(s: Script, kind: Kind, depth: int) -> list[Any]:
    """A record; now and then with one field of any kind, or one more."""
    odd = s.byte()
    names = RECORDS[kind]
    if names[0] == "*items":
        items = _documents(s, depth)
        fields = items * 2 if odd & 1 else items
    else:
        fields = [_FIELDS[name](s, depth) for name in names]
        if kind is Kind.SCALAR and odd < 128:
            fields[1] = fields[1].ljust(min(_numpy_size(fields[0]), 256), b"\0")
        if kind is Kind.NUMBERS and odd < 128:
            fields[0] = s.pick(("bool", "int8", "int16", "int32", "int64", "float64"))
    if odd >= 248 or (odd >= 232 and not fields):
        fields.append(_document(s, depth))
    elif odd >= 232:
        fields[odd % len(fields)] = _document(s, depth)
    return [_tag(kind), *fields]


# --- trees -------------------------------------------------------------------------------------

# Offsets of rows 2, 0 and 3, then numbers that serve as sizes and indices.
_PAYLOAD = struct.pack("<16q", 0, 2, 2, 5, 0, 1, 0, 1, 2, 3, 1, 1, 4, 0, 1, 2) + bytes(range(72))
_GROUPS = ([0, 0, 3, 0, 3], [0, 32, 1, 1, 1], [0, 192, 2, 0, 0], [0, 0, 0, 0, 0])

_ALL_KINDS = tuple(FORMS)
_STACKS = (Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_ROWS, Kind.NON_TENSOR_STACK)
_DENSE = (Kind.TENSOR, Kind.JAGGED, Kind.STRIDED_NESTED, Kind.SPARSE_COO)
_LEAVES = (*_DENSE, Kind.TENSORDICT, Kind.LAZY_STACK, *_STACKS)
_MEMBERS: dict[Kind, tuple[Kind, ...]] = {
    Kind.TENSORDICT: _LEAVES,
    Kind.LAZY_STACK: (Kind.TENSORDICT, Kind.LAZY_STACK),
    Kind.NON_TENSOR_STACK: _STACKS,
}


class Tree:
    """A message that a script writes node by node."""

    def __init__(self, s: Script, level: int = 0) -> None:
        self.s = s
        self.draft = Draft(None, [list(group) for group in _GROUPS], [bytearray(_PAYLOAD)])
        self._rows = s.byte() % 4
        self._level = level  # how many messages this one is a row of

    def write(self) -> Draft:
        """The message."""
        self.draft.root = self.item(0)
        return self.draft

    def item(self, depth: int) -> Any:
        """A node or a document."""
        op = self.s.byte()
        if op >= 254 and depth == 0:
            return self._onion()
        if op >= 192 or depth > 5:
            return _document(self.s, 1)
        return self.node(_ALL_KINDS[op % len(_ALL_KINDS)], depth)

    def node(self, kind: Kind, depth: int, dims: Any = None, dtype: Any = None) -> Node:
        """A node that is sound more often than not."""
        s, form = self.s, FORMS[kind]
        odd = s.byte()
        if dims is None:
            dims = [s.number() for _ in range(s.byte() % 4)]
            if kind is Kind.JAGGED:
                dims = dims or [self._rows]
            if dims and odd & 1:
                dims[0] = self._rows
        facts = self._facts(kind, dims, dtype, odd)
        children = self._children(kind, depth + 1, dims, facts)
        fields = [
            facts[name] if name in facts else _FIELDS[name](s, len(dims)) for name in form.fields
        ]
        if form.children == PER_KEY:
            fields[-1] = list("abcd")[: len(children)]
        numbers = [facts[name] if name in facts else s.byte() & 1 for name in form.numbers[:-1]]
        if form.numbers:
            last = form.numbers[-1]
            numbers += dims if last == "*" else [facts[last]]
        node = Node(int(kind), fields, numbers, children)
        if odd >= 240:
            _bend(s, node)
        return node

    def _facts(self, kind: Kind, dims: list[int], dtype: Any, odd: int) -> dict[str, Any]:
        """What the fields and numbers of a node are, by their names."""
        s, form = self.s, FORMS[kind]
        rank, cells, indirect = len(dims), max(0, math.prod(dims)), False
        lengths: list[int] = []
        if kind is Kind.TENSOR and rank and 0 < cells < 512:
            lengths = [1] * dims[0]
        facts: dict[str, Any] = {"rank": rank, "group": s.byte() % 5, "stored": 0}
        if "dtype" in form.fields:
            if kind is Kind.ARRAY:
                facts["dtype"] = _numpy_dtype(s) if dtype is None else dtype
                itemsize = _numpy_size(facts["dtype"])
            else:
                facts["dtype"] = s.pick(_TORCH_NAMES) if dtype is None else dtype
                itemsize = TORCH_DTYPES[facts["dtype"]]
                how = s.byte()
                facts["stored"] = 0 if how < 192 or how >= 240 else s.pick(_STORED)
                indirect = how >= 240
        if kind is Kind.JAGGED:
            dim = facts["ragged_dim"] = 1 + s.byte() % rank
            if odd & 2:
                lengths = [s.byte() % 5 for _ in range(self._rows)]
                facts["group"] = self.group(lengths)
                dims[dim - 1] = sum(lengths)
                cells = math.prod(dims)
        if "size" in form.numbers and "group" in form.numbers:
            rows = self._rows if kind is Kind.NON_TENSOR_ROWS else cells
            facts |= self._documents(min(rows, 4), repeat=odd & 12 == 12)
        elif indirect and any(lengths) and 0 < cells < 512:
            group = facts["group"] if kind is Kind.JAGGED else None
            table = self.table(lengths, group, cells // sum(lengths) * itemsize)
            facts["buffer"], facts["offset"], facts["stored"] = table
        elif "buffer" in form.numbers:
            facts["size"] = cells
            size = cells if kind is Kind.BYTES else cells * itemsize
            facts["buffer"], facts["offset"] = self._place(size)
        return facts

    def _children(self, kind: Kind, depth: int, dims: list[int], facts: Any) -> list[Any]:
        s, form = self.s, FORMS[kind]
        if not form.children or depth > 8:
            return []
        if kind is Kind.SPARSE_COO:
            sparse, cells = s.byte() % (len(dims) + 1), s.byte() % 4
            indices = self.node(Kind.TENSOR, depth, [sparse, cells], "int64")
            return [indices, self.node(Kind.TENSOR, depth, [cells, *dims[sparse:]])]
        if kind is Kind.STRIDED_NESTED:
            shapes = [[s.number() for _ in dims] or [1] for _ in range(self._rows)]
            total = max(0, sum(math.prod(shape) for shape in shapes))
            sizes = self._integers(
                [len(shapes), len(dims) or 1], [dim for shape in shapes for dim in shape]
            )
            return [self.node(Kind.TENSOR, depth, [total]), sizes]
        if kind is Kind.TENSOR_VIEWS:
            bounds = sorted(s.number() for _ in range(s.byte() % 4 * 2))
            base = self.node(Kind.TENSOR, depth, dims or [self._rows])
            return [base, self._integers([len(bounds) // 2, 2], bounds)]
        count = s.byte() % 4 if form.children < 0 else form.children
        kinds = _MEMBERS.get(kind)
        items = [
            self.node(s.pick(kinds), depth) if kinds else self.item(depth) for _ in range(count)
        ]
        if kind is Kind.DICT:
            return [[_document(s, 4) for _ in items], *items]
        if kind is Kind.USER:
            return [Node(Kind.MAP, [["temperature", "stop"]], [], items * 2)]
        return items

    def _integers(self, shape: list[int], cells: list[int]) -> Node:
        """A TENSOR of these int64s."""
        numbers = [*self.put(_words(cells)), 0, *shape]
        return Node(int(Kind.TENSOR), ["int64", len(shape)], numbers, [])

    def put(self, data: bytes) -> tuple[int, int]:
        """The place of new bytes of the payload."""
        part = self.draft.payload[0]
        part += bytes(-len(part) % 8)
        part += data
        return 0, len(part) - len(data)

    def _place(self, size: int) -> tuple[int, int]:
        """A place of that many bytes, or one that may not have them."""
        how = self.s.byte()
        if how < 220 and 0 <= size <= 4096:
            start = self.s.take(how & 15)
            return self.put(start[:size].ljust(size, b"\0"))
        return (0, 4 * (how - 220)) if how < 246 else (self.s.number(2), self.s.number(200))

    def group(self, lengths: list[int]) -> int:
        """A ragged group of these rows."""
        place = self.put(_words([0, *accumulate(lengths)])) if len(lengths) > 1 else (0, 0)
        ends = [min(lengths), max(lengths)] if lengths else [0, 0]
        self.draft.groups.append([*place, len(lengths), *ends])
        return len(self.draft.groups) - 1

    def table(
        self, lengths: list[int], group: int | None, cell: int, cells: bytes | None = None
    ) -> tuple[int, int, int]:
        """The place of a table of runs of these rows, and how a column says that it is one.

        Args:
            lengths: Of the rows.
            group: Theirs; None of a tensor, which has one run.
            cell: Bytes of one cell.
            cells: Those of documents, which have one run; None for whatever the script says.
        """
        s, table = self.s, list[int]()
        one = group is None or cells is not None or s.byte() < 128
        count, left = 1 if one else 2 + s.byte() % 3, lengths
        for k in range(count):
            own = left if k == count - 1 else [s.byte() % (n + 1) for n in left]
            left = [n - taken for n, taken in zip(left, own, strict=True)]
            number = min(sum(own), max(own) + s.byte() % 4)
            if cells is not None:
                number = len(cells) // cell
            data = s.take(s.byte() & 15) if cells is None else cells
            place = self.put(data[: number * cell].ljust(number * cell, b"\0"))
            how = s.byte()
            at, narrow = (NO_INDEX, 0), 0
            if how < 192 or group is None:
                index = [s.byte() % max(1, number - n + 1) for n in own]
                narrow = 17 if how < 128 else 0
                at = self.put(bytes(index) if narrow else _words(index))
            # Groups of equal rows are one, as `encode` has it; of one run, it is the column's.
            own_group = (group or 0) if one else self.group(own)
            numbers = [own_group, *place, 0, number, *at, narrow]
            if s.byte() >= 200:
                numbers[s.byte() % len(numbers)] = s.number(80)
            table += numbers
        stored = ONE_OBJECT if cells is not None and s.byte() < 128 else INDIRECT + count
        return (*self.put(_words(table)), stored + (s.byte() >= 250))

    def _documents(self, rows: int, *, repeat: bool = False) -> dict[str, int]:
        """The numbers of rows of documents; some of them are messages, or indirect."""
        s, data, ends = self.s, bytearray(), [0]
        blobs = self._level < 4 and s.byte() >= 192
        for _ in range(rows):
            if blobs:
                how = s.byte()
                draft = Tree(s, self._level + 1).write() if how & 1 else s.pick(SEEDS).draft
                data += blob_of(draft.frames())
                data += bytes(-len(data) % 64 if how < 224 else s.byte() % 70)
            else:
                data += _pack(_document(s, 1))
            ends.append(len(data))
        lengths = [b - a for a, b in pairwise(ends)]
        how_stored = BLOBS if blobs else 0
        if repeat and lengths:
            # All rows are as long as the first, which they mostly are.
            lengths = [lengths[0]] * len(lengths)
            group = self.group(lengths)
            buffer, offset, stored = self.table(lengths, group, 1, bytes(data[: lengths[0]]))
            size = sum(lengths)
            place = {"buffer": buffer, "offset": offset, "stored": stored + how_stored}
            return {**place, "size": size, "group": group}
        buffer, offset = self.put(bytes(data))
        group = self.group(lengths)
        place = {"buffer": buffer, "offset": offset, "stored": how_stored}
        return {**place, "size": len(data), "group": group}

    def _onion(self) -> Any:
        """A leaf in many layers of one kind, beyond the limit of what may nest."""
        layer = self.s.pick(_LAYERS)
        item: Any = self.node(self.s.pick(_LEAVES), 7)
        for _ in range(self.s.byte() % 120):
            item = layer(self, item)
        return item


def _in_row(tree: Tree, item: Any) -> Node:
    blob = blob_of(Draft(item, tree.draft.groups, tree.draft.payload).frames())
    blob += bytes(-len(blob) % 64)
    tree.draft.groups, tree.draft.payload = [[0, 0, 1, len(blob), len(blob)]], [bytearray(blob)]
    return Node(Kind.NON_TENSOR_ROWS, [], [0, 0, BLOBS, 0, len(blob)], [])


_LAYERS: tuple[Callable[[Tree, Any], Node], ...] = (
    lambda tree, item: Node(Kind.LAZY_STACK, [0, None], [], [item]),
    lambda tree, item: Node(Kind.NON_TENSOR_STACK, [0], [], [item]),
    lambda tree, item: Node(Kind.TUPLE, [], [], [item]),
    lambda tree, item: Node(Kind.MAP, [["a"]], [], [item]),
    lambda tree, item: Node(Kind.DICT, [], [], [[1], item]),
    lambda tree, item: Node(Kind.TENSORDICT, [1, None, ["a"]], [1], [item]),
    lambda tree, item: Node(Kind.NON_TENSOR_DATA, [1], [1], [item]),
    _in_row,
)


# --- scripts -> messages -----------------------------------------------------------------------


def _bend(s: Script, node: Node) -> None:
    """Change something about a node."""
    op = s.byte()
    what = (node.numbers, node.fields, node.children)[op % 3]
    if op >= 192:
        node.kind = int(s.pick(_ALL_KINDS))
    elif not what or op >= 176:
        what.append(s.number() if what is node.numbers else _document(s))
    elif op >= 160:
        what.pop(s.byte() % len(what))
    else:
        at = s.byte() % len(what)
        if what is node.numbers:
            old = node.numbers[at]
            node.numbers[at] = old + s.byte() - 64 if op & 1 else s.number(255)
        elif what is node.fields:
            node.fields[at] = _changed(s, node.fields[at])
        else:
            node.children[at] = s.pick(SEEDS).draft.copy().root if op & 1 else _document(s)


def _changed(s: Script, old: Any) -> Any:
    """Something else than a field or a document, or than a part of it."""
    op = s.byte()
    if isinstance(old, list) and old and op < 192:
        at = op % len(old)
        if op >= 160:
            return old[:at] + old[at + 1 :]
        if op >= 128:
            return [*old, old[at]]
        return [*old[:at], _changed(s, old[at]), *old[at + 1 :]]
    if isinstance(old, dict) and old and op < 192:
        key = list(old)[op % len(old)]
        return {**old, key: _changed(s, old[key])}
    if isinstance(old, str) and op < 192:
        return s.pick((*_TORCH_NAMES, *_NUMPY_NAMES, *_KEYS))
    if isinstance(old, int) and op < 192:
        return s.number(8)
    return _document(s)


def _edit(s: Script, draft: Draft) -> None:
    """Change something about a message."""
    op = s.byte()
    nodes = list(draft.root.nodes()) if isinstance(draft.root, Node) else []
    if op < 112 and nodes:
        _bend(s, nodes[s.byte() % len(nodes)])
    elif op < 144:
        holders = [(n, i) for n in nodes for i, c in enumerate(n.children) if type(c) is not Node]
        if holders:
            node, at = holders[s.byte() % len(holders)]
            node.children[at] = _changed(s, node.children[at])
        elif not nodes:
            draft.root = _changed(s, draft.root)
    elif op < 208 and draft.payload:
        # A word, offsets and indices among them; or one byte, of documents as well.
        part = s.pick(draft.payload)
        if op & 1:
            word, at = _words([s.number(8)]), 8 * s.byte()
        else:
            word, at = s.take(1), s.byte()
        end = min(at + len(word), len(part))
        part[at:end] = word[: max(0, end - at)]
    elif op < 224 and draft.groups:
        group = s.pick(draft.groups)
        group[s.byte() % 5] = s.number(8)
    elif op < 232 and draft.payload:
        draft.payload.append(draft.payload.pop(s.byte() % len(draft.payload)))
        del draft.payload[-1][s.byte() :]
    elif op < 248:
        draft.extra.append(s.number())
    else:
        draft.checksum = True


def _seed_message(s: Script) -> Draft:
    draft = s.pick(SEEDS).draft.copy()
    for _ in range(s.byte() % 4):
        _edit(s, draft)
    return draft


def _raw_schema(s: Script) -> list[bytes]:
    packed = s.rest()
    numbers = values = 0
    with suppress(WireFormatError):
        found = wire_schema.Schema(packed)
        numbers, values = found.numbers, found.values
    # As many as there must be, and small: places, sizes and dims in turn.
    words = [*([0, 32, 1, 1, 2, 1] * (numbers // 6 + 1))[:numbers], len(_GROUPS), 1]
    words += [number for group in _GROUPS for number in group]
    payload = _PAYLOAD * 8
    return _message(
        packed, _words([*words, len(payload)]), _pack([["a"]] * min(values, 99)), [payload]
    )


def _raw_numbers(s: Script) -> list[bytes]:
    """The numbers of a seed, some of them the script's."""
    frames = s.pick(SEEDS).frames
    fields = msgpack.unpackb(frames[0])
    numbers = fields["numbers"]
    at = 8 * (s.byte() % (len(numbers) // 8))
    new = s.rest()[: len(numbers) - at]
    numbers = numbers[:at] + new + numbers[at + len(new) :]
    return _message(fields["schema"].data, numbers, fields["values"], frames[1:])


def _raw_values(s: Script) -> list[bytes]:
    """One document, or rows of documents, as the script's bytes have it."""
    rows = s.byte() % 5
    if not rows:
        return _message(b"\xc0", _words([0, 0]), b"\x91" + s.rest(), [])
    lengths = [s.byte() for _ in range(rows - 1)]
    data = s.rest()
    lengths.append(max(0, len(data) - sum(lengths)))
    payload = bytearray(data + bytes(-len(data) % 8) + _words([0, *accumulate(lengths)]))
    group = [0, len(payload) - 8 * (rows + 1), rows, min(lengths), max(lengths)]
    node = Node(Kind.NON_TENSOR_ROWS, [], [0, 0, 0, 0, sum(lengths)], [])
    return Draft(node, [group], [payload]).frames()


def _raw_header(s: Script) -> list[bytes]:
    buffers = s.byte() & 1
    return [START + s.rest(), *[_PAYLOAD] * buffers]


def _stored(s: Script, frame: bytearray) -> bytes:
    """What is sent of a frame: its bytes as they are or as zstd, a run of zstd, or anything."""
    how, size = s.byte(), len(frame)
    start = _ZSTD_START.pack(0xFD2FB528, 0xA0, size)
    if how >= 240:
        return s.take(size)
    if how >= 96 and size > len(start) + 4:
        return start + (3 | size << 3).to_bytes(3, "little") + bytes(frame[:1])
    if how >= 64:
        return start + (1 | size << 3).to_bytes(3, "little") + bytes(frame)
    return bytes(frame)


# Of a frame of zstd that is one segment.
_ZSTD_START = struct.Struct("<IBI")
_HOW_COMPRESSED = 251

_DRAFTS = (*[_seed_message] * 6, *[lambda s: Tree(s).write()] * 6)
_RAW = (_raw_schema, _raw_schema, _raw_numbers, _raw_values, _raw_values, _raw_header)


def frames_of(s: Script, how: int, as_leaf: bool) -> list[bytes]:
    """The message of a script; as a column of a batch with `as_leaf`."""
    compressed = how == _HOW_COMPRESSED
    how = s.byte() % len(_DRAFTS) if compressed else how % (len(_DRAFTS) + len(_RAW))
    if how >= len(_DRAFTS):
        return _RAW[how - len(_DRAFTS)](s)
    draft = _DRAFTS[how](s)
    if as_leaf:
        # As a column of a batch, alone or beside another.
        rows, root = s.byte(), draft.root
        beside = [s.pick(SEEDS).draft.root] if rows >= 192 else []
        keys = ["a", "b"][: 1 + len(beside)]
        draft.root = Node(Kind.TENSORDICT, [1, None, keys], [rows % 5], [root, *beside])
    if compressed:
        draft.stored = [_stored(s, part) for part in draft.payload]
    return draft.frames()
