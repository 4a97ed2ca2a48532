"""The library against a second reader, which was written from docs/wire-format.md alone.

What `encode` writes, the second reader must read as a plain description of the value, made here
from the value itself. What one of the two refuses, the other must refuse too, except where the
page leaves it to the reader.
"""

import itertools
import random
import re
import struct

import msgpack
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack

from jagcodec import WireFormatError, decode, encode, to_blob
from jagcodec.testing import tensordicts, trees
from tests.wire import spec_reader

OPTIONS = (
    {},
    {"narrow": True},
    {"checksum": True, "narrow": True},
    {"compress": "zstd"},
    {"compress": ("zstd", -7), "checksum": True},
)


# --- values in the second reader's terms -------------------------------------------------------


def neutral(value):
    """What the second reader must make of a value, from the value alone."""
    if isinstance(value, torch.Tensor):
        return neutral_tensor(value)
    if isinstance(value, NonTensorStack):
        members = value.tensordicts
        if value.stack_dim == 0 and value.batch_dims == 1 and not any(map(stacked, members)):
            return ("NON_TENSOR_ROWS", [neutral(member.data) for member in members])
        return ("NON_TENSOR_STACK", value.stack_dim, [neutral(member) for member in members])
    if isinstance(value, NonTensorData):
        return ("NON_TENSOR_DATA", value.batch_size, neutral(value.data))
    if isinstance(value, LazyStackedTensorDict):
        members = [neutral(member) for member in value.tensordicts]
        return ("LAZY_STACK", value.stack_dim, members)
    if hasattr(value, "batch_size"):
        leaves = {key: neutral(value._get_str(key, None)) for key in value.keys()}  # noqa: SIM118
        return ("TENSORDICT", value.batch_size, leaves)
    if isinstance(value, np.ndarray):
        return neutral_array(value)
    if isinstance(value, np.str_):
        return ("USER", "numpy.str_", str(value))
    if isinstance(value, np.bytes_):
        return ("USER", "numpy.bytes_", bytes(value))
    if isinstance(value, np.generic):
        return ("SCALAR", *neutral_array(np.array(value))[1::2])
    return neutral_native(value)


def neutral_native(value):
    kind = type(value)
    if kind is dict and all(type(key) is str for key in value):
        return {key: neutral(item) for key, item in value.items()}
    if kind is dict:
        return ("DICT", [neutral(part) for item in value.items() for part in item])
    if kind is list:
        return [neutral(item) for item in value]
    if kind is tuple:
        return ("TUPLE", [neutral(item) for item in value])
    if kind in (set, frozenset):
        return (kind.__name__.upper(), sorted((neutral(item) for item in value), key=repr))
    if kind in (range, slice):
        parts = (value.start, value.stop, value.step)
        return ("USER", kind.__name__, ("TUPLE", [*map(neutral, parts)]))
    if kind is torch.Size:
        return ("USER", "torch.Size", [*value])
    if kind is torch.dtype:
        return ("USER", "torch.dtype", str(value).removeprefix("torch."))
    if kind is torch.device:
        return ("USER", "torch.device", ("TUPLE", [value.type, value.index]))
    if kind is complex:
        return ("USER", "complex", ("TUPLE", [value.real, value.imag]))
    return value


def stacked(member):
    return isinstance(member, NonTensorStack) or member.batch_dims


def cells(tensor):
    """The bytes of a strided tensor, row-major."""
    if not tensor.numel():
        return b""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex() and tensor.itemsize > 8:
        tensor = torch.view_as_real(tensor)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.itemsize]).numpy().tobytes()


def dense(tensor):
    return ("TENSOR", str(tensor.dtype).removeprefix("torch."), tensor.shape, cells(tensor))


def neutral_tensor(value):
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is torch.jagged:
        values, starts = value.values(), value.offsets().tolist()
        dim = next(i for i, size in enumerate(value.shape[1:]) if not isinstance(size, int))
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        lengths = lengths if value.lengths() is None else value.lengths().tolist()
        rows = [values.narrow(dim, a, n) for a, n in zip(starts, lengths, strict=False)]
        shape = [*values.shape]
        shape[dim] = sum(lengths)
        return ("JAGGED", dtype, shape, dim + 1, [(row.shape, cells(row)) for row in rows])
    if value.is_nested:
        rows = value.unbind() if value.size(0) else ()  # type: ignore[assignment]
        return ("STRIDED_NESTED", dtype, [(row.shape, cells(row)) for row in rows])
    if value.layout is torch.strided:
        return dense(value)
    parts = map(dense, (value._indices(), value._values()))
    return ("SPARSE_COO", value.shape, *parts, value.is_coalesced())


def neutral_array(value):
    dtype, shape = value.dtype, value.shape
    if dtype.kind == "O":
        return ("OBJECT_ARRAY", shape, [neutral(item) for item in value.flat])
    return ("ARRAY", dtype.str, shape, value.tobytes())


def plain(value):
    """A neutral value as text that differs wherever two values do: floats by their bits."""
    return repr(_plain(value))


def _plain(value):
    if type(value) is float:
        return ("float", struct.pack(">d", value).hex())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and value and type(value[0]) is str:
        if value[0] == "TENSOR_VIEWS":  # what is stored is the list's business alone
            return [_plain(("TENSOR", value[1], *view)) for view in value[2]]
        if value[0] == "DICT" and all(type(key) is str for key in value[1][::2]):
            return _plain(dict(zip(value[1][::2], value[1][1::2], strict=True)))
        if value[0] in ("SET", "FROZENSET"):
            return (value[0], sorted((_plain(item) for item in value[1]), key=repr))
        return tuple(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def assert_reads(message, value):
    assert plain(spec_reader.read(message)) == plain(neutral(value))


@settings(max_examples=150)
@given(trees() | tensordicts(trees(max_leaves=3)), st.sampled_from(OPTIONS))
def test_the_second_reader_reads_what_encode_writes(value, options):
    frames = [bytes(memoryview(frame)) for frame in encode(value, **options)]
    assert_reads(frames, value)
    assert_reads(bytes(to_blob(frames)) + b"page", value)


@settings(max_examples=50)
@given(st.lists(trees(max_leaves=3), min_size=1, max_size=4), st.sampled_from(OPTIONS))
def test_the_second_reader_reads_rows_that_hold_tensors(values, options):
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = {"row": value}
    frames = [bytes(memoryview(frame)) for frame in encode(array, **options)]
    assert_reads(frames, array)


# --- damage ------------------------------------------------------------------------------------

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    17,
    33,
    64,
    100,
    1 << 24,
    1 << 31,
    1 << 40,
    (1 << 62),
    (1 << 63) - 1,
)


def damaged(frames, draw):
    """A message with one or two things changed; `draw` is a `random.Random`."""
    frames = [bytearray(frame) for frame in frames]
    for _ in range(draw.choice((1, 1, 2))):
        if draw.random() < 0.15 and len(frames) > 1 and frames[1]:
            frame = frames[1]
            frame[draw.randrange(min(len(frame), 256))] = draw.choice(
                (0, 1, 0x6A, draw.randrange(256))
            )
        elif draw.random() < 0.2:
            frames[0][draw.randrange(10, len(frames[0]))] = draw.randrange(256)
        else:
            frames[0] = bytearray(damaged_header(frames[0], draw))
    return [bytes(frame) for frame in frames]


def damaged_header(frame, draw):
    try:
        header = msgpack.unpackb(bytes(frame), strict_map_key=False)
        schema = msgpack.unpackb(header["schema"].data, unicode_errors="surrogatepass")
        values = msgpack.unpackb(
            header["values"],
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        numbers = [x for (x,) in struct.iter_unpack("<q", header["numbers"])]
    except Exception:  # damaged before
        return frame
    part = draw.choice(("schema", "numbers", "numbers", "numbers", "values"))
    if part == "numbers" and numbers:
        at = draw.randrange(len(numbers))
        near = (numbers[at] - 1, numbers[at] + 1, draw.choice(numbers))
        numbers[at] = draw.choice((*NUMBERS, *near, *near, *near, -1))
        numbers[at] = min(numbers[at], (1 << 63) - 1)
    elif part == "schema":
        schema = altered(schema, draw, node=True)
    else:
        values = altered(values, draw)
    try:
        header["schema"] = msgpack.ExtType(
            16, msgpack.packb(schema, unicode_errors="surrogatepass")
        )
        header["values"] = msgpack.packb(values, unicode_errors="surrogatepass")
        header["numbers"] = struct.pack(f"<{len(numbers)}q", *numbers)
        return msgpack.packb(header)
    except Exception:  # what was unpacked may be what packb does not take: a timestamp
        return frame


def altered(value, draw, node=False):
    """A msgpack object with one thing in it changed."""
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        copy = [*value]
        action = draw.random()
        if action < 0.1:
            del copy[at]
        elif action < 0.2:
            copy.insert(at, copy[at])
        elif action < 0.25:
            copy.reverse()
        else:
            copy[at] = altered(value[at], draw, node)
        return copy
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice([*value])
        if draw.random() < 0.8:
            return {**value, key: altered(value[key], draw)}
        return {("other" if k == key else k): v for k, v in value.items()}
    if type(value) is int and draw.random() < 0.7:
        return draw.choice((value - 1, value + 1, draw.choice(NUMBERS)))
    if type(value) is bytes and value and draw.random() < 0.7:
        return draw.choice((value[1:], value + b"\0", value[:-1] + bytes([draw.randrange(256)])))
    if type(value) is str and value and draw.random() < 0.7:
        names = [*spec_reader.SIZES, "|O", "|V3", "<U2", "|S0", value[1:], value + "x"]
        return draw.choice(names)
    if isinstance(value, msgpack.ExtType) and draw.random() < 0.8:
        codes = [*spec_reader.RECORDS, 16, 5, 99]
        return msgpack.ExtType(draw.choice(codes), draw.choice((b"", b"", b"", b"\0")))
    leaves = [None, True, 0, 1, 1.5, float("nan"), "", "a", b"", b"\1", [], {}, [None], {"a": 1}]
    if node:
        kinds = [[code] for code in spec_reader.NODES]
        leaves += [[48, "int64", 0], [48, "uint8", 1], [32, "<i8", 1], [26, None], *kinds]  # type: ignore[list-item]
    else:
        leaves += [
            [msgpack.ExtType(code, b""), *draw.choice(([], [1], [1, 1], [1, 2, 3]))]
            for code in spec_reader.RECORDS
        ]
    return draw.choice(leaves)


def verdicts(message):
    """What both readers make of a message: text of the value, or None where it is refused."""
    try:
        second = plain(spec_reader.read(message))
    except spec_reader.RefusedError as error:
        second, why = None, str(error)
    else:
        why = ""
    try:
        first = plain(neutral(decode([bytearray(frame) for frame in message])))
    except WireFormatError as error:
        first, why = None, why or f"{error.reason} {error}"
    return first, second, why


# What the page leaves to the reader, by what the library says of it.
LIBRARY_MAY = re.compile(
    "create_nt_buffer|fill_cpu|expected a (DEVICE|device type)|too_deep"
    "|expected a dtype of (torch|numpy)"
    "|array is too big|number of dimensions|hashable (dict keys|set members)|hash generic"
)
# And by what the second reader says.
SECOND_READER_MAY = re.compile("^(dtype|names|hashes|offset 0)$")


@settings(max_examples=100)
@given(trees() | tensordicts(trees(max_leaves=3)), st.sampled_from(OPTIONS), st.integers(0))
def test_both_readers_refuse_the_same_messages(value, options, seed):
    frames = [bytes(memoryview(frame)) for frame in encode(value, **options)]
    draw = random.Random(seed)
    for _ in range(20):
        message = damaged(frames, draw)
        first, second, why = verdicts(message)
        left = LIBRARY_MAY.search(why) if first is None else SECOND_READER_MAY.search(why)
        assert first == second or (left and None in (first, second)), (why, message)
