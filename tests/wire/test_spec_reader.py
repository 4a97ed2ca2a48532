"""The library against a second reader, which was written from docs/wire-format.md alone.

What `encode` writes, the second reader must read as a plain description of the value, made here
from the value itself. What one of the two refuses, the other must refuse too, except where the
page leaves it to the reader.
"""

import itertools
import random
import re
import struct

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack

from jagcodec import WireFormatError, decode, encode
from tests.strategies import tensordicts, trees
from tests.wire import spec_reader
from tests.wire.damage import damaged

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


@settings(max_examples=50)
@given(st.lists(trees(max_leaves=3), min_size=1, max_size=4), st.sampled_from(OPTIONS))
def test_the_second_reader_reads_rows_that_hold_tensors(values, options):
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = {"row": value}
    frames = [bytes(memoryview(frame)) for frame in encode(array, **options)]
    assert_reads(frames, array)


# --- damage ------------------------------------------------------------------------------------


def verdicts(message):
    """What both readers make of a message: text of the value, or None where it is refused."""
    try:
        second = plain(spec_reader.read(message))
    except spec_reader.RefusedError as error:
        second, why = None, str(error)
    else:
        why = ""
    whole = isinstance(message, bytes)
    try:
        first = plain(neutral(decode(message if whole else [*map(bytearray, message)])))
    except WireFormatError as error:
        first, why = None, why or f"{error.reason} {error}"
    return first, second, why


# What the page leaves to the reader, by what the library says of it.
LIBRARY_MAY = re.compile(
    "create_nt_buffer|fill_cpu|Expected one of cpu|expected a (DEVICE|device type)|too_deep"
    "|expected a dtype of (torch|numpy)"
    "|array is too big|number of dimensions|hashable (dict keys|set members)|hash generic"
)
# And by what the second reader says.
SECOND_READER_MAY = re.compile("^(dtype|names|hashes|offset 0)$")


def agree(message, *about):
    """Whether both readers read a message, and alike; fails if only one does, but for what the
    page leaves to the reader.
    """
    first, second, why = verdicts(message)
    left = LIBRARY_MAY.search(why) if first is None else SECOND_READER_MAY.search(why)
    assert first == second or (left and None in (first, second)), (why, message, *about)
    return first is not None


@settings(max_examples=100)
@given(trees() | tensordicts(trees(max_leaves=3)), st.sampled_from(OPTIONS), st.integers(0))
def test_both_readers_refuse_the_same_messages(value, options, seed):
    frames = [bytes(memoryview(frame)) for frame in encode(value, **options)]
    rng = random.Random(seed)
    for _ in range(20):
        agree(damaged(frames, rng))
