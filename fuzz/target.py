"""What the fuzzer runs: any bytes -> a message that begins well -> the readers -> a verdict.

Needs no atheris, so that `tests/repo/test_fuzz_corpus.py` replays the corpus through the same
functions.

The bytes of an input are a *script*: its first two bytes choose the reader and how the message is
made, the rest says what is in it. A script that ends early goes on in zeros, so that every input
makes a message, and nearly every message gets past the magic and the version:

* seed: a real message, taken apart; some nodes of its tree, cells of its payload or places of its
  buffers are replaced, and it is put together with lengths and checksums that fit.
* tree: a value tree written by the script, record by record, over a small payload.
* raw tree: the script's bytes as the packed value tree.
* raw header, raw blob: the script's bytes behind the fixed start of a header or of a blob.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from tensordict.base import TensorDictBase

import jagcodec
from jagcodec import (
    ArgumentError,
    UnsupportedTypeError,
    WireFormatError,
    decode,
    encode,
    load,
    open_wire,
    register_type,
)
from jagcodec.errors import REASONS
from jagcodec.wire.header import read_any_header, read_plain_header
from jagcodec.wire.spec import BLOB_MAGIC, MAGIC, TORCH_DTYPES, VERSION, Kind

START = b"\x84" + msgpack.packb(MAGIC)
PREAMBLE = struct.Struct("<8sIIQ")

# What one input may add to the peak of resident memory. Inputs are a few KB.
MEMORY_BOUND = 64 << 20


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
        "ids": torch.arange(12).view(3, 4),
        "logprob": torch.linspace(-1, 0, 12).view(3, 4),
        "mask": torch.ones(3, 4, dtype=torch.bool),
        "reward": torch.tensor([0.5, -1.0, 2.0]),
        "message": np.array(["a", {"b": (1, 2)}, None], dtype=object),
    }
    return jagcodec.pack_jagged_fields(
        fields,
        lengths=torch.tensor([2, 4, 0]),
        token_aligned_fields=["ids", "logprob", "mask"],
    )


def _strings(items: list[Any], **options: Any) -> Any:
    dtypes: Any = getattr(np, "dtypes", None)
    # numpy 1 has no such dtype; something else keeps the place.
    return np.array(items, dtypes.StringDType(**options) if hasattr(dtypes, "StringDType") else "O")


def _values() -> list[tuple[Any, dict[str, bool]]]:
    """Values and the options to encode them with. Scripts name them by place: append only."""
    sparse = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    base = torch.arange(24, dtype=torch.int32).view(12, 2)
    record = np.zeros(2, dtype=[("a", "<i4"), ("b", "<f8", (2,)), ("c", "S3")])
    mixed = np.zeros(2, dtype=[("x", "<i2"), ("o", "O")])
    mixed["o"] = ["text", [1, 2]]
    members = [TensorDict({"x": torch.zeros(2)}, [2]), TensorDict({"x": torch.ones(2)}, [2])]
    plain: list[Any] = [
        {"i": 1, "f": 0.5, "s": "text", "n": None, "t": True, "l": [1, -2, 2**40]},
        [10**30, -(10**20), 1 + 2j, (1, (2, "x")), {1, 2}, frozenset(["a", "b"])],
        [{1: "a", (2, 3): "b"}, range(0, 10, 2), slice(1, None, 2), b"bytes"],
        b"\x00\x01" * 2048,
        np.arange(6, dtype="<i8").reshape(2, 3),
        [np.array(["ab", "c"]), np.array(["2026-01-01"], dtype="M8[D]"), np.array(1.5)],
        record,
        mixed,
        np.array([1, "x", None], dtype=object),
        [np.float32(1.5), np.int64(3), np.str_("s"), np.bytes_(b"b"), np.datetime64(5, "s")],
        torch.arange(6).view(2, 3),
        [torch.tensor(1.5), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, 3)],
        _jagged(torch.arange(5.0), [2, 0, 3]),
        _jagged(torch.arange(20).view(4, 5), [2, 3], 2),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 4)]),
        sparse.to_sparse(),
        sparse.to_sparse().coalesce(),
        sparse.to_sparse_csr(),
        sparse.to_sparse_csc(),
        sparse.to_sparse_bsr((1, 2)),
        [torch.Size([2, 3]), torch.float32, torch.device("cpu")],
        [base[0:3], base[3:4], base[4:9]],
        TensorDict({"a": torch.ones(2, 3), "n": TensorDict({}, [2]), "t": "text"}, [2]),
        TensorDict({"a": torch.ones(2)}, [2], names=["rows"]),
        LazyStackedTensorDict(*members, stack_dim=0),
        NonTensorData({"k": [1]}, batch_size=[3]),
        NonTensorStack("a", "b", {"c": 1}),
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")),
        _rollout(),
        Sampling(0.5, ("x",)),
        _strings(["a", "bcd"]),
        _strings(["a", None], na_object=None),
        np.array([1.5], dtype=np.longdouble),
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
    ]


class Ext:
    """An extension of a seed's tree, taken apart."""

    __slots__ = ("code", "fields")

    def __init__(self, code: int, fields: list[Any]) -> None:
        self.code = code
        self.fields = fields


def _apart(node: Any) -> Any:
    if isinstance(node, msgpack.ExtType):
        return Ext(node.code, _apart(_unpack(node.data)))
    if isinstance(node, list):
        return [_apart(item) for item in node]
    if isinstance(node, dict):
        return {key: _apart(item) for key, item in node.items()}
    return node


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=msgpack.ExtType, unicode_errors="surrogatepass")


@dataclass
class Seed:
    """A message taken apart: what a script edits."""

    tree: Any
    ragged: list[list[int]]
    payload: list[bytes]
    checksum: bool
    frames: list[bytes]


def _seed(value: Any, options: dict[str, bool]) -> Seed:
    frames = [bytes(memoryview(frame)) for frame in encode(value, **options)]
    header = _unpack(frames[0])
    tree = _apart(_unpack(header["tree"].data))
    return Seed(tree, header["ragged"], frames[1:], "checksums" in header, frames)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SEEDS = [_seed(value, options) for value, options in _values()]


# --- scripts -> messages -----------------------------------------------------------------------


class Script:
    """The bytes of an input, read in order; zeros behind the end."""

    __slots__ = ("_at", "_data", "as_leaf")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.as_leaf = False

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


_EDGES = (
    0,
    1,
    2,
    3,
    5,
    8,
    24,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    16384,
    2**16,
    2**24,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -2,
    -128,
    -(2**31),
    -(2**63),
)
_KEYS = ("a", "b", "x", "", "a.b", "batch_size", "names", "data", "\ud800", "é" * 20, "_td", "0")
_TORCH_NAMES = tuple(TORCH_DTYPES)
_STORED = ("bits", "u1", "u2", "u3", "u4", "u7", "i1", "i3", "i7", "u0", "i8", "x")
_NUMPY_NAMES = (
    "<i4",
    "<i8",
    "|u1",
    "|b1",
    ">f4",
    "<f8",
    "<c16",
    "|S3",
    "|S0",
    "<U2",
    "<U0",
    "|V3",
    "|V0",
    "<M8[ns]",
    "<m8",
    "<M8[7D]",
    "float80",
    "complex160",
    "float128",
    "|O",
    "<f2",
    "|S9999999999",
    "<M8[000000000s]",
)


def _dim(s: Script) -> int:
    value = s.byte()
    return value % 5 if value < 200 else _EDGES[value % len(_EDGES)]


def _shape(s: Script) -> Any:
    return [_dim(s) for _ in range(s.byte() % 4)]


def _small(s: Script) -> Any:
    value = s.byte()
    return value % 3 if value < 220 else _EDGES[value % len(_EDGES)]


def _offset(s: Script) -> Any:
    value = s.byte()
    return value if value < 200 else _EDGES[value % len(_EDGES)]


def _torch_name(s: Script) -> Any:
    value = s.byte()
    if value < 128:
        return _TORCH_NAMES[value % len(_TORCH_NAMES)]
    return [_TORCH_NAMES[value % 12], s.pick(_STORED)]


def _numpy_dtype(s: Script, depth: int = 0) -> Any:
    value = s.byte()
    if value < 160 or depth > 3:
        return _NUMPY_NAMES[value % len(_NUMPY_NAMES)]
    if value < 190:
        return ["sub", _numpy_dtype(s, depth + 1), _shape(s)]
    return _struct(s, depth)


def _struct(s: Script, depth: int = 0) -> Any:
    fields = [
        [s.pick(_KEYS), None if s.byte() < 250 else s.pick(_KEYS), _offset(s) % 64, dtype]
        for dtype in [_numpy_dtype(s, depth + 1) for _ in range(s.byte() % 4)]
    ]
    return ["struct", _offset(s), s.byte() > 200, fields]


def _list(s: Script, depth: int) -> Any:
    return [_node(s, depth) for _ in range(s.byte() % 5)]


def _pairs(s: Script, depth: int) -> Any:
    items: list[Any] = []
    for _ in range(s.byte() % 4):
        items += (_node(s, depth), _node(s, depth))
    return items


def _leaves(s: Script, depth: int) -> Any:
    items: list[Any] = []
    for _ in range(s.byte() % 4):
        items += (s.pick(_KEYS), _record(s.pick(_LEAVES), s, depth))
    return items


_ARRAY_KINDS = (Kind.ARRAY, Kind.OBJECT_ARRAY, Kind.STRING_ARRAY, Kind.FIELD_ARRAY)
_LEAVES = (
    Kind.TENSOR,
    Kind.JAGGED,
    Kind.TENSORDICT,
    Kind.NON_TENSOR_DATA,
    Kind.NON_TENSOR_ROWS,
    Kind.STRIDED_NESTED,
    Kind.SPARSE_COO,
    Kind.LAZY_STACK,
    Kind.NON_TENSOR_STACK,
    Kind.SPARSE_COMPRESSED,
)

Rule = Callable[[Script, int], Any]


def _of(*kinds: Kind) -> Rule:
    return lambda s, depth: _record(s.pick(kinds), s, depth)


def _many(*kinds: Kind) -> Rule:
    return lambda s, depth: [_record(s.pick(kinds), s, depth) for _ in range(s.byte() % 4)]


def _plain(rule: Callable[[Script], Any]) -> Rule:
    return lambda s, depth: rule(s)


_FLAG = _plain(lambda s: bool(s.byte() & 1))
_NAME = _plain(lambda s: s.pick((*_KEYS, None)))
_PLACE = (_plain(_small), _plain(_offset))
_DIMS = _plain(_shape)
_DTYPE = _plain(_torch_name)
_TENSOR = _of(Kind.TENSOR)


def _node(s: Script, depth: int) -> Any:
    """Any value."""
    op = s.byte()
    if op >= 254 and depth == 0:
        return _onion(s)
    if op < 128 and depth < 8:
        return _record(_ALL_KINDS[op % len(_ALL_KINDS)], s, depth)
    return _NATIVE[op % len(_NATIVE)](s, depth + 1)


_NATIVE: tuple[Rule, ...] = (
    lambda s, d: None,
    _FLAG,
    lambda s, d: s.byte(),
    lambda s, d: s.pick(_EDGES),
    lambda s, d: s.byte() / 4,
    lambda s, d: s.pick((float("nan"), float("inf"), -0.0, 1e308)),
    lambda s, d: s.pick(_KEYS),
    lambda s, d: s.take(s.byte() % 20),
    lambda s, d: _list(s, d) if d < 9 else [],
    lambda s, d: {s.pick(_KEYS): _node(s, d) for _ in range(s.byte() % 4)} if d < 9 else {},
    lambda s, d: msgpack.ExtType(s.byte() % 128, s.take(s.byte() % 20)),
)
_NODE: Rule = _node
_FIELDS: dict[int, tuple[Rule, ...]] = {
    Kind.BIG_INT: (_plain(lambda s: s.take(s.byte() % 20)),),
    Kind.COMPLEX: (_plain(lambda s: s.byte() / 2), _plain(lambda s: s.byte() / 2)),
    Kind.TUPLE: (_list,),
    Kind.SET: (_list,),
    Kind.FROZENSET: (_list,),
    Kind.DICT: (_pairs,),
    Kind.RANGE: (_plain(_offset), _plain(_offset), _plain(_offset)),
    Kind.SLICE: (_NODE, _NODE, _NODE),
    Kind.BYTES: (_plain(_offset), *_PLACE),
    Kind.ARRAY: (_plain(_numpy_dtype), _DIMS, *_PLACE),
    Kind.OBJECT_ARRAY: (_DIMS, _list),
    Kind.FIELD_ARRAY: (_plain(_struct), _DIMS, _many(*_ARRAY_KINDS)),
    Kind.STRING_ARRAY: (
        _DIMS,
        lambda s, d: [s.pick((*_KEYS, None)) for _ in range(s.byte() % 5)],
        _FLAG,
        _FLAG,
        _NODE,
    ),
    Kind.SCALAR: (
        lambda s, d: _numpy_dtype(s) if s.byte() < 200 else None,
        lambda s, d: s.take(s.byte() % 33) if s.byte() < 200 else _node(s, d),
    ),
    Kind.STRING_SCALAR: (_plain(lambda s: s.pick((*_KEYS, b"", b"\x00\xff"))),),
    Kind.TENSOR: (_DTYPE, _DIMS, *_PLACE),
    Kind.JAGGED: (_DTYPE, _DIMS, *_PLACE, _plain(lambda s: s.byte() % 5), _plain(_small)),
    Kind.STRIDED_NESTED: (_TENSOR, _TENSOR),
    Kind.SPARSE_COO: (_DIMS, _TENSOR, _TENSOR, _FLAG),
    Kind.SPARSE_COMPRESSED: (
        _plain(lambda s: s.pick(("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"))),
        _DIMS,
        _TENSOR,
        _TENSOR,
        _TENSOR,
    ),
    Kind.SIZE: (_DIMS,),
    Kind.DTYPE: (_plain(lambda s: s.pick((*_TORCH_NAMES, "quint8", "load", "dtype"))),),
    Kind.DEVICE: (
        _plain(lambda s: s.pick(("cpu", "cuda", "meta", "cuda:1", "mps", "", "xla"))),
        _plain(lambda s: s.pick((None, 0, 1, 127, 128))),
    ),
    Kind.TENSOR_VIEWS: (_DIMS, _DIMS, _DTYPE, _DIMS, *_PLACE),
    Kind.TENSORDICT: (
        _DIMS,
        lambda s, d: None if s.byte() < 200 else [s.pick((*_KEYS, None)) for _ in range(2)],
        _leaves,
    ),
    Kind.LAZY_STACK: (_plain(_small), _NAME, _many(Kind.TENSORDICT, Kind.LAZY_STACK)),
    Kind.NON_TENSOR_DATA: (_DIMS, _NODE),
    Kind.NON_TENSOR_ROWS: (_list,),
    Kind.NON_TENSOR_STACK: (
        _plain(_small),
        _many(Kind.NON_TENSOR_DATA, Kind.NON_TENSOR_STACK, Kind.NON_TENSOR_ROWS),
    ),
    Kind.USER: (
        _plain(lambda s: s.pick(("fuzz.Sampling", "os.system", ""))),
        lambda s, d: (
            {"temperature": _node(s, d), "stop": _node(s, d)} if s.byte() < 128 else _node(s, d)
        ),
    ),
    Kind.PICKLE: (_plain(lambda s: s.take(s.byte() % 8)),),
}
_ALL_KINDS = tuple(_FIELDS)


def _layer(kind: Kind, *before: Any) -> Callable[[Any], Any]:
    return lambda node: msgpack.ExtType(int(kind), _pack([*before, [node]]))


_LAYERS: tuple[Callable[[Any], Any], ...] = (
    _layer(Kind.LAZY_STACK, 0, None),
    _layer(Kind.NON_TENSOR_STACK, 0),
    _layer(Kind.TUPLE),
    _layer(Kind.OBJECT_ARRAY, [1]),
    lambda node: msgpack.ExtType(int(Kind.TENSORDICT), _pack([[1], None, ["a", node]])),
    lambda node: msgpack.ExtType(int(Kind.NON_TENSOR_DATA), _pack([[1], node])),
    lambda node: [node],
    lambda node: {"a": node},
)


def _onion(s: Script) -> Any:
    """A leaf in many layers of one kind, beyond the limit of what may nest."""
    fields = s.pick(_LAYERS)
    node = _record(s.pick(_LEAVES), s, 8)
    for _ in range(s.byte() % 120):
        node = fields(node)
    return node


def _record(kind: int, s: Script, depth: int) -> Any:
    """A record with fields of the right kind; now and then one field of any kind, or one more."""
    if depth > 8:
        return None
    odd = s.byte()
    fields = [rule(s, depth + 1) for rule in _FIELDS[kind]]
    if odd >= 232:
        if odd >= 248:
            fields.append(_node(s, depth + 1))
        else:
            fields[odd % len(fields)] = _node(s, depth + 1)
    return msgpack.ExtType(int(kind), _pack(fields))


# Packers keep their buffers, so one is made anew for each message.
def _pack(value: Any) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass")


class _Editing:
    """A seed's tree, with some of its nodes replaced on the way to the packed tree."""

    def __init__(self, s: Script, edits: dict[int, int]) -> None:
        self._s = s
        self._edits = edits
        self._at = -1

    def node(self, node: Any) -> Any:
        """`node` edited, and those below it."""
        self._at += 1
        edit = self._edits.get(self._at)
        if edit is not None:
            return self._edited(node, edit)
        kind = type(node)
        if kind is Ext:
            return msgpack.ExtType(node.code, _pack([self.node(item) for item in node.fields]))
        if kind is list:
            return [self.node(item) for item in node]
        if kind is dict:
            return {key: self.node(item) for key, item in node.items()}
        return node

    def _edited(self, node: Any, edit: int) -> Any:
        s = self._s
        kind = type(node)
        if kind is int and edit < 128:
            return _fits(node + edit - 64) if edit & 1 else _EDGES[edit % len(_EDGES)]
        if edit < 64:
            return _node(s, 0)
        if kind is list:
            items = [self.node(item) for item in node]
            if edit < 128 and items:
                return items[:-1]
            if edit < 160:
                return items * 2
            if edit < 192:
                return items[::-1]
            return [*items, _node(s, 0)]
        if kind is Ext:
            fields = [self.node(item) for item in node.fields]
            code = int(s.pick(_ALL_KINDS)) if edit < 128 else node.code
            if edit >= 192:
                fields[edit % len(fields)] = _node(s, 0)
            return msgpack.ExtType(code, _pack(fields))
        if kind is str and edit < 192:
            return s.pick((*_TORCH_NAMES, *_NUMPY_NAMES, *_KEYS))
        if kind is int:
            return int.from_bytes(s.take(8), "little", signed=True)
        return _node(s, 0)


def _fits(value: int) -> int:
    return max(-(2**63), min(value, 2**64 - 1))


def _header(tree: bytes, sizes: Any, ragged: Any, checksums: Any = None) -> bytes:
    fields = {MAGIC: VERSION, "buffers": sizes, "ragged": ragged}
    if checksums is not None:
        fields["checksums"] = checksums
    fields["tree"] = msgpack.ExtType(16, tree)
    return _pack(fields)


def _tree(s: Script, tree: Any) -> bytes:
    """A packed value tree; as the column of a batch, if the script wants it so."""
    if s.as_leaf:
        rows = s.byte() % 5
        leaves = ["a", tree] if s.byte() < 192 else ["a", tree, "b", _record(s.pick(_LEAVES), s, 0)]
        tree = msgpack.ExtType(int(Kind.TENSORDICT), _pack([[rows], None, leaves]))
    return _pack(tree)


def _seed_message(s: Script) -> list[bytes]:
    seed = SEEDS[s.byte() % len(SEEDS)]
    count = s.byte()
    edits: dict[int, int] = {}
    for _ in range(count & 3):
        at = s.byte()
        edits[at] = s.byte()
    groups: Any = seed.ragged
    payload = seed.payload
    if count & 4 and payload:
        # Cells of the payload, offsets and indices among them; eight bytes, or one.
        changed = [bytearray(part) for part in payload]
        for _ in range(1 + (count >> 3 & 1)):
            part = changed[s.byte() % len(changed)]
            at = 8 * s.byte()
            value = s.byte()
            if value < 128:
                word = struct.pack("<q", value - 64)
            else:
                word = struct.pack("<Q", _EDGES[value % len(_EDGES)] % 2**64)
            end = min(at + 8, len(part))
            part[at:end] = word[: max(0, end - at)]
        payload = [bytes(part) for part in changed]
    if count & 16:
        groups = _Editing(s, {s.byte() % 16: s.byte()}).node(groups)
    tree = _tree(s, _Editing(s, edits).node(seed.tree))
    sizes: Any = [len(part) for part in payload]
    if count & 32 and s.byte() > 128:
        sizes = _Editing(s, {s.byte() % 4: s.byte()}).node(sizes)
    sums = None
    if seed.checksum or count & 64:
        sums = [zlib.crc32(tree), *map(zlib.crc32, payload)]
        if s.byte() > 250:
            sums[s.byte() % len(sums)] ^= 1
    return [_header(tree, sizes, groups, sums), *payload]


# Offsets of rows 2, 0 and 3, then numbers that serve as sizes and indices.
_PAYLOAD = struct.pack("<16q", 0, 2, 2, 5, 0, 1, 0, 1, 2, 3, 1, 1, 4, 0, 1, 2) + bytes(range(72))
_PAYLOAD += bytes(24)
_GROUPS = [[0, 0, 3, 0, 3], [0, 32, 1, 1, 1], [0, 200, 2, 0, 0], [0, 0, 0, 0, 0]]


def _tree_message(s: Script) -> list[bytes]:
    return [_header(_tree(s, _node(s, 0)), [len(_PAYLOAD)], _GROUPS), _PAYLOAD]


def _raw_tree_message(s: Script) -> list[bytes]:
    return [_header(s.rest(), [len(_PAYLOAD)], _GROUPS), _PAYLOAD]


def _raw_header_message(s: Script) -> list[bytes]:
    sizes = s.byte() % 4
    return [START + s.rest(), *[_PAYLOAD] * (sizes & 1)]


_MAKERS = (
    *[_seed_message] * 4,
    *[_tree_message] * 2,
    _raw_tree_message,
    _raw_header_message,
)


def _blob(frames: list[bytes]) -> bytes:
    # Not with to_blob: it would instrument, and time, the writer.
    header, *payload = frames
    blob = PREAMBLE.pack(BLOB_MAGIC, VERSION, 0, len(header)) + header
    for part in payload:
        blob += bytes(-len(blob) % 64) + part
    return blob


class Counts(ctypes.Structure):
    """How far the inputs of a run got. Plain memory, so that processes can share it."""

    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("past_start", ctypes.c_int64),
        ("past_header", ctypes.c_int64),
        ("values", ctypes.c_int64),
    )


class BrokenPromiseError(AssertionError):
    """An input did something that SECURITY.md promises no message does."""


class Target:
    """The readers behind one function. `path` is a file that may be written to, for `load`."""

    def __init__(self, path: str | os.PathLike[str], counts: Counts | None = None) -> None:
        self.counts = Counts() if counts is None else counts
        self._path = Path(path)
        self._peak = 0

    def __call__(self, data: bytes) -> None:
        """Give one input to one reader.

        Raises:
            BrokenPromiseError: What was read cannot be read again, took memory out of
                proportion, or is another for another reader of headers. Whatever else comes out
                is what the reader should not have raised.
        """
        s = Script(data)
        frames, reader, deep = self.message(s)
        self._peak = self._peak or _peak()
        self.counts.inputs += 1
        self.counts.past_start += _begins_well(frames)
        if isinstance(frames, list):
            _check_readers(bytes(frames[0]))
        try:
            value = reader(frames)
        except WireFormatError as error:
            _check_error(error)
            self.counts.past_header += error.path.startswith("$")
        else:
            self.counts.past_header += 1
            self.counts.values += 1
            if value is not None:
                touch(value)
                if deep:
                    _check_stable(value)
        finally:
            peak = _peak()
            grown, self._peak = peak - self._peak, max(peak, self._peak)
        if grown > MEMORY_BOUND:
            raise BrokenPromiseError(f"{grown >> 20} MiB for an input of {len(data)} bytes")

    def message(self, s: Script) -> tuple[Any, Callable[[Any], Any], bool]:
        """The message of a script, who reads it, and whether to look closely at the value."""
        how, where = s.byte(), s.byte()
        form = where % 16
        # What costs most is done least often.
        deep = where >= 224
        s.as_leaf = bool(where & 16 and (form > 10 or where & 32))
        if how >= 252:
            # Behind the magic and the version of a blob, anything.
            blob = BLOB_MAGIC + struct.pack("<I", VERSION) + s.rest()
            return blob, decode if how & 1 else _opened(deep), deep
        frames = _MAKERS[how % len(_MAKERS)](s)
        if form < 5:
            return frames, decode, deep
        if form < 7:  # writable, so that it is aliased
            return [bytearray(frame) for frame in frames], decode, deep
        if form == 7:  # at an odd address
            return [memoryview(bytearray(b"x" + frame))[1:] for frame in frames], decode, deep
        if form == 8:
            return bytearray(_blob(frames)), decode, deep
        if form == 9:
            return _blob(frames), self._mapped, deep
        if form == 10:
            return _blob(frames), self._loaded, deep
        return (frames if form < 14 else _blob(frames)), _opened(deep), deep

    def _mapped(self, blob: bytes) -> Any:
        self._path.write_bytes(blob)
        return load(self._path, mmap=True)

    def _loaded(self, blob: bytes) -> Any:
        self._path.write_bytes(blob)
        return load(self._path)


def _begins_well(message: Any) -> bool:
    start = message if isinstance(message, (bytes, bytearray)) else message[0]
    # Not its first byte: a header with checksums is a map of five.
    return start[1 : len(START)] == START[1:] or start[: len(BLOB_MAGIC)] == BLOB_MAGIC


def _opened(choose: bool) -> Callable[[Any], Any]:
    return _chosen if choose else _whole


def _whole(message: Any) -> Any:
    batch = open_wire(message)
    _ = batch.fields, batch.batch_size, batch.schema
    return batch.to_tensordict()


def _chosen(message: Any) -> Any:
    """Some rows of a batch; what cannot be chosen from may say so."""
    batch = open_wire(message)
    for name in batch.fields:
        _ = batch.schema[name]
    try:
        rows = min(len(batch), 8)
        picked = batch.rows(list(range(0, rows, 2)))
        touch(picked.to_tensordict())
        return batch.select(batch.fields[:1]).rows(slice(1, rows)).to_tensordict()
    except ArgumentError:
        return None


def _peak() -> int:
    # Not getrusage's, which begins with the peak of whoever started this process.
    with open("/proc/self/status", "rb") as file:
        high_water = next(line for line in file if line.startswith(b"VmHWM:"))
    return int(high_water.split()[1]) * 1024


def _check_error(error: WireFormatError) -> None:
    if error.reason not in REASONS or not error.path or not error.detail:
        raise BrokenPromiseError(f"an error that says nothing: {error!r}")
    cause: BaseException | None = error
    while cause is not None:
        # torch reports that memory ran out as a RuntimeError, which becomes a WireFormatError.
        if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
            raise BrokenPromiseError("memory ran out") from error
        cause = cause.__cause__


def _check_readers(header: bytes) -> None:
    """What the compiled reader of headers reads, the one in Python reads too (or raises)."""
    found = read_plain_header(header)
    if found is not None and found._replace(batch=None, held=0) != read_any_header(header):
        raise BrokenPromiseError("the two readers of headers differ")


def _check_stable(value: Any) -> None:
    """What was read can be written, and what was written reads as the same."""
    try:
        first = encode(value)
    except UnsupportedTypeError:
        return
    second = encode(decode([bytearray(memoryview(frame)) for frame in first]))
    if list(map(bytes, first)) != list(map(bytes, second)):
        raise BrokenPromiseError("encode(decode(encode(value))) differs from encode(value)")


def touch(value: Any) -> None:
    """Read every byte of a value, as a consumer would."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            _touch_tensor(item)
        elif isinstance(item, np.ndarray):
            if item.dtype.hasobject:
                stack.extend(item.ravel().tolist())
            elif item.dtype.kind == "T":
                item.tolist()
            elif item.nbytes:
                item.tobytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
            stack.extend(item)
        elif isinstance(item, (LazyStackedTensorDict, NonTensorStack)):
            stack.extend(item.tensordicts)
            _ = item.batch_size
        elif isinstance(item, NonTensorData):
            stack.append(item.data)
        elif isinstance(item, TensorDictBase):
            _ = item.batch_size, item.names
            for key, leaf in item.items():
                stack += (key, leaf)
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)


def _touch_tensor(tensor: torch.Tensor) -> None:
    inner: Any = tensor
    if isinstance(tensor, torch.nested._internal.nested_tensor.NestedTensor):
        _touch_cells(inner._values)
        _touch_cells(inner._offsets)
        _ = tensor.shape
    elif tensor.layout is torch.sparse_coo:
        _touch_cells(inner._indices())
        _touch_cells(inner._values())
    elif tensor.layout is not torch.strided:
        _touch_cells(tensor.values())
    elif tensor.is_nested:
        for part in tensor.unbind() if tensor.size(0) else ():
            _touch_cells(part)
    else:
        _touch_cells(tensor)


def _touch_cells(tensor: torch.Tensor) -> None:
    if tensor.numel():
        flat = tensor.reshape(-1).view(torch.uint8)
        flat.numpy().tobytes()


def main(paths: list[str]) -> int:
    """Replay inputs, each with the frames that it makes: ``python fuzz/target.py INPUT...``."""
    failed = 0
    for path in paths:
        data = Path(path).read_bytes()
        with tempfile.NamedTemporaryFile() as file:
            run = Target(file.name)
            message, reader, _ = run.message(Script(data))
            print(f"{path}: {reader.__name__}")
            for frame in [message] if isinstance(message, (bytes, bytearray)) else message:
                print(f"  {bytes(frame)!r}")
            try:
                run(data)
            except Exception:
                failed += 1
                traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
