"""The library against a second reader, which was written from docs/wire-format.md alone.

What `encode` writes, the second reader must read as a plain description of the value, made here
from the value itself. What one of the two refuses, the other must refuse too, except where the
page leaves it to the reader.
"""

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from jagcodec import WireFormatError, decode, encode
from tests.oracle import described
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


def plain(value):
    """A value of the second reader as `described` has it, from the value alone."""
    if type(value) in (float, int):
        return described(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and value and type(value[0]) is str:
        if value[0] == "TENSOR_VIEWS":  # what is stored is the list's business alone
            return [plain(("TENSOR", value[1], *view)) for view in value[2]]
        if value[0] == "DICT" and all(type(key) is str for key in value[1][::2]):
            return plain(dict(zip(value[1][::2], value[1][1::2], strict=True)))
        if value[0] in ("SET", "FROZENSET"):
            return (value[0], sorted(map(plain, value[1]), key=repr))
        return tuple(map(plain, value))
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def assert_reads(message, value):
    assert repr(plain(spec_reader.read(message))) == repr(described(value))


# --- damage ------------------------------------------------------------------------------------


def verdicts(message):
    """What both readers make of a message: text of the value, or None where it is refused."""
    try:
        second = repr(plain(spec_reader.read(message)))
    except spec_reader.RefusedError as error:
        second, why = None, str(error)
    else:
        why = ""
    whole = isinstance(message, bytes)
    try:
        first = repr(described(decode(message if whole else [*map(bytearray, message)])))
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
