"""What reads and writes headers in C beside the same in Python: it does the same, or nothing."""

import gc
import os
import re
import subprocess
import sys
import tracemalloc

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from jagcodec import WireFormatError, decode, encode, encode_fields, open_wire
from jagcodec.testing import assert_same
from jagcodec.testing.strategies import jagged_batches
from jagcodec.wire import header as headers
from jagcodec.wire import records
from jagcodec.wire.spec import TORCH_DTYPES, Kind
from tests.helpers import receive

try:
    from jagcodec.wire import _batch as compiled
except ImportError:
    compiled = None
needs_compiled = pytest.mark.skipif(
    compiled is None or headers._batch is None, reason="not built, or JAGCODEC_HEADER=python"
)

INT64_MAX = 2**63 - 1


@pytest.fixture
def in_python(monkeypatch):
    monkeypatch.setattr(headers, "_batch", None)


def outcome(frames):
    try:
        return decode(frames)
    except WireFormatError as error:
        return error.reason, error.path, re.sub(r"\bj\d+", "j", error.detail)


def assert_readers_agree(data):
    """What the compiled reader reads, the other reads too; says whether it read anything."""
    found = headers.read_plain_header(data)
    if found is None:
        return False
    expected = headers.read_any_header(data)
    assert found._replace(batch=None, held=0) == expected
    assert type(found.buffers) is type(found.groups) is list
    assert list(map(type, found.groups)) == list(map(type, expected.groups))
    root = headers.outline(expected)
    assert root.code == Kind.TENSORDICT
    record = headers.read_record(expected, root)
    assert record.names is None
    assert record.batch_size == found.batch.batch_size
    assert record.items[::2] == list(found.batch.leaves)
    size = 0
    for leaf, read in zip(record.items[1::2], found.batch.leaves.values(), strict=True):
        assert type(leaf) is msgpack.ExtType
        if leaf.code in (Kind.TENSOR, Kind.JAGGED):
            leaf = headers.read_record(expected, leaf)
            size += TORCH_DTYPES[leaf.dtype] * int(np.prod(leaf.shape, dtype=object))
        assert read == leaf
        assert type(read) is type(leaf)
        if type(leaf) is not msgpack.ExtType:
            assert list(map(type, read)) == list(map(type, leaf))
    assert found.held == size
    return True


# --- messages that writers make ----------------------------------------------------------------


def rollout(**options):
    fields = {
        "ids": torch.arange(12).view(3, 4),
        "logprob": torch.rand(3, 4),
        "reward": torch.rand(3),
        "message": np.array(["a", {"b": (1, 2)}, None], dtype=object),
    }
    frames = encode_fields(
        fields,
        lengths=torch.tensor([2, 4, 1]),
        token_aligned_fields=["ids", "logprob"],
        **options,
    )
    return receive(frames, bytes)


@needs_compiled
def test_what_a_producer_sends_is_read_by_the_compiled_reader():
    assert assert_readers_agree(rollout()[0])
    td = TensorDict(
        {"x": torch.ones(2, 3), "note": NonTensorStack("a", "b"), "é": torch.zeros(2).bool()}, [2]
    )
    assert assert_readers_agree(bytes(encode(td)[0]))
    many = TensorDict({f"c{i}": torch.ones(70000) for i in range(300)}, [70000])
    assert assert_readers_agree(bytes(encode(many)[0]))
    deep = TensorDict({"x": torch.ones(1, 2, 1, 3, 1, 1)}, [1, 2, 1])
    assert assert_readers_agree(bytes(encode(deep)[0]))


@needs_compiled
@pytest.mark.parametrize(
    "frames",
    [
        encode([1, 2]),
        encode({"x": torch.ones(2)}),
        encode(TensorDict({"x": torch.ones(0, 2)}, [0])),
        encode(TensorDict({"x": torch.ones(2, 0)}, [2])),
        encode(TensorDict({"x": torch.ones(2)}, [2], names=["rows"])),
        rollout(checksum=True),
        rollout(narrow=True),
    ],
)
def test_what_it_does_not_know_is_left_alone(frames):
    assert headers.read_plain_header(bytes(frames[0])) is None
    decode(receive(frames))


@given(jagged_batches(), st.booleans(), st.booleans())
def test_readers_agree_on_batches(batch, checksum, narrow):
    frames = encode_fields(
        batch.fields,
        lengths=batch.lengths,
        token_aligned_fields=batch.token_aligned_fields,
        checksum=checksum,
        narrow=narrow,
    )
    assert_readers_agree(bytes(frames[0]))


# --- messages that nobody's writer makes -------------------------------------------------------

NUMBERS = st.sampled_from([0, 1, 2, 3, 7, 8, 24, 2**16, INT64_MAX, 2**63, 2**64 - 1, -1, None, 1.0])
TENSOR_DTYPES = st.sampled_from(["int64", "bool", "float32", "complex128"])
FORGED = {
    "number": NUMBERS,
    "dtype": st.sampled_from(["int65", "", ["int64", "u1"], None]),
    "name": st.sampled_from(["a", 3, None, b"a"]),
    "leaf": st.sampled_from([1, "x", None, [], msgpack.Timestamp(3)]),
    "fields": st.sampled_from([[], [0]]),
}


def pack(value):
    return msgpack.packb(value, unicode_errors="surrogatepass")


@st.composite
def forged_headers(draw):
    """A header of a batch in which a few things may be anything."""
    left = draw(st.integers(0, 3))

    def maybe(what, value):
        nonlocal left
        if left and draw(st.integers(0, 5)) == 0:
            left -= 1
            return draw(FORGED[what])
        return value

    def extension(kind, *fields):
        behind = maybe("fields", [])
        return msgpack.ExtType(int(kind), pack([*fields, *(behind or [])]))

    def leaf():
        kind = draw(st.sampled_from([Kind.TENSOR, Kind.JAGGED, Kind.JAGGED, Kind.NON_TENSOR_ROWS]))
        if kind == Kind.NON_TENSOR_ROWS:
            return msgpack.ExtType(int(kind), draw(st.binary(max_size=20)))
        dtype = maybe("dtype", draw(TENSOR_DTYPES))
        shape = [maybe("number", n) for n in draw(st.lists(st.integers(1, 5), max_size=3))]
        place = [draw(st.integers(0, 1)), draw(st.integers(0, 64))]
        group = [draw(st.integers(0, 1)), draw(st.integers(1, 2))] if kind == Kind.JAGGED else []
        return extension(kind, dtype, shape, *(maybe("number", n) for n in place + group))

    names = draw(st.lists(st.sampled_from(["a", "b", "é\ud800", "", "n" * 40]), unique=True))
    items = [part for name in names for part in (maybe("name", name), maybe("leaf", leaf()))]
    dims = draw(st.lists(st.integers(1, 3), max_size=2))
    batch = extension(
        Kind.TENSORDICT,
        [maybe("number", dim) for dim in dims],
        draw(st.sampled_from([None] * 9 + [["a"]])),
        items,
    )
    sizes = draw(st.lists(st.sampled_from([64, 4096, 65536]), min_size=2, max_size=3))
    groups = [[0, 0, 0, 0, 0], [0, 8, 2, 0, 2]][: draw(st.sampled_from([2, 2, 2, 1, 0]))]
    return pack(
        {
            "jagcodec": draw(st.sampled_from([1] * 9 + [2])),
            "buffers": [maybe("number", size) for size in sizes],
            "ragged": [[maybe("number", n) for n in group] for group in groups],
            "tree": msgpack.ExtType(draw(st.sampled_from([16] * 9 + [17])), pack(batch)),
        }
    )


@given(forged_headers(), st.data())
def test_readers_agree_on_forged_headers(data, draw):
    assert_readers_agree(data)
    edited = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(edited)))
        edited[at : at + draw.draw(st.integers(0, 2))] = draw.draw(st.binary(max_size=2))
    assert_readers_agree(bytes(edited))


# --- writing -----------------------------------------------------------------------------------

WIDTHS = [0, 1, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, INT64_MAX, 2**64 - 1]
COUNTS = st.one_of(st.integers(0, 200), st.sampled_from(WIDTHS))
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from([31, 32, 255, 256]).map("n".__mul__))
DIMS = st.lists(COUNTS, max_size=20)
WRITTEN = st.one_of(
    st.builds(records.Tensor, TEXTS, DIMS, COUNTS, COUNTS),
    st.builds(records.Tensor, st.just(["int64", "u1"]), DIMS, COUNTS, COUNTS),
    st.builds(records.Jagged, TEXTS, DIMS, COUNTS, COUNTS, COUNTS, COUNTS),
    st.builds(
        lambda code, size: msgpack.ExtType(code, b"x" * size),
        st.integers(0, 127),
        st.sampled_from([*range(20), 255, 256, 2**16 - 1, 2**16]),
    ),
)
GROUPS = st.builds(records.Group, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)


def both_write(batch, buffers, groups):
    written = headers.HeaderWriter().header(batch, buffers, groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "_batch", None)
        assert written == headers.HeaderWriter().header(batch, buffers, groups)
    return written


@given(
    DIMS,
    st.dictionaries(st.one_of(TEXTS, st.just("\ud800")), WRITTEN, max_size=9),
    st.lists(COUNTS, max_size=20),
    st.lists(GROUPS, max_size=3),
)
def test_writers_agree(dims, leaves, buffers, groups):
    both_write(records.Batch(dims, leaves), buffers, groups)


@needs_compiled
def test_writers_agree_on_many_columns():
    for count in (7, 8, 40000):
        batch = records.Batch(
            [1], {f"{i}": records.Tensor("bool", [i], 0, i) for i in range(count)}
        )
        both_write(batch, [2**20], [])
        assert compiled.write([2**20], [], *batch, *headers._BATCH_TYPES)


@needs_compiled
def test_what_is_no_number_is_left_to_the_other_writer():
    for odd in (-1, 2**64, 1.0, True, None, "1"):
        for leaf in (records.Tensor("bool", [odd], 0, 0), records.Tensor("bool", [1], odd, 0), odd):
            assert compiled.write([1], [], [1], {"x": leaf}, *headers._BATCH_TYPES) is None
        assert compiled.write([odd], [], [1], {}, *headers._BATCH_TYPES) is None
        assert compiled.write([1], [odd], [1], {}, *headers._BATCH_TYPES) is None
        assert compiled.write([1], [], [odd], {}, *headers._BATCH_TYPES) is None
        assert compiled.write([1], [], [1], {odd: records.Size([1])}, *headers._BATCH_TYPES) is None
    assert compiled.write([1], [], [1], {}, *headers._BATCH_TYPES) is not None


@given(jagged_batches())
def test_frames_are_the_same(batch):
    options = {"lengths": batch.lengths, "token_aligned_fields": batch.token_aligned_fields}
    written = encode_fields(batch.fields, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "_batch", None)
        again = encode_fields(batch.fields, **options)
    assert list(map(bytes, written)) == list(map(bytes, again))


# --- what it makes of odd ones -----------------------------------------------------------------


@needs_compiled
def test_numbers_may_be_longer_than_they_need_be():
    """As other writers of msgpack make them; but no other sign, and no other type."""
    plain = bytes(encode(TensorDict({"x": torch.arange(3)}, [3]))[0])
    assert plain.count(b"\x93\x91\x03\xc0") == 1
    for three, read in (
        (b"\xcc\x03", True),
        (b"\xcd\0\x03", True),
        (b"\xce\0\0\0\x03", True),
        (b"\xcf\0\0\0\0\0\0\0\x03", True),
        (b"\xd0\x03", False),
        (b"\xcb\x40\x08\0\0\0\0\0\0", False),
        (b"\xc3", False),
    ):
        # The batch size, and the sizes of the two extensions around it.
        longer = plain.replace(b"\x93\x91\x03\xc0", b"\x93\x91" + three + b"\xc0")
        grown = len(three) - 1
        at = longer.index(b"\xc7", longer.index(b"tree"))
        longer = bytearray(longer)
        longer[at + 1] += grown
        longer[longer.index(b"\xc7", at + 1) + 1] += grown
        assert assert_readers_agree(bytes(longer)) is read


@needs_compiled
def test_every_cut_and_every_flipped_bit():
    whole = rollout()[0]
    for end in range(len(whole)):
        assert headers.read_plain_header(whole[:end]) is None
    assert headers.read_plain_header(whole + b"\0") is None
    flipped = bytearray(whole)
    for position in range(len(whole)):
        for bit in range(8):
            flipped[position] ^= 1 << bit
            assert_readers_agree(bytes(flipped))
            flipped[position] ^= 1 << bit


@needs_compiled
def test_nothing_is_left_behind():
    """Whatever a header breaks off at: what was made of it by then is let go."""
    whole = rollout()[0]
    forged = [whole[:end] for end in range(len(whole))]
    for position in range(len(whole)):
        forged += [
            whole[:position] + bytes([byte]) + whole[position + 1 :]
            for byte in (0, 0x7F, 0x80, 0x91, 0xC0, 0xCF, 0xFF)
        ]

    def blocks():
        for data in forged:
            headers.read_plain_header(data)
        gc.collect()
        return sys.getallocatedblocks()

    blocks()
    before = blocks()
    # Each of the messages is one of hundreds; a block that one of them loses is lost every time.
    for _ in range(20):
        after = blocks()
    assert after - before < 20


def test_errors_are_the_same(monkeypatch):
    frames = rollout()
    flipped = bytearray(frames[0])
    for position in range(len(flipped)):
        flipped[position] ^= 0x15
        message = [bytes(flipped), *frames[1:]]
        here = outcome(message)
        with monkeypatch.context() as patch:
            patch.setattr(headers, "_batch", None)
            there = outcome(message)
        assert type(here) is type(there)
        if isinstance(here, tuple):
            assert here == there
        else:
            assert_same(here, there)
        flipped[position] ^= 0x15


@pytest.mark.usefixtures("in_python")
def test_without_the_compiled_reader_everything_is_read():
    frames = rollout()
    assert headers.read_header(frames[0]).batch is None
    batch = open_wire(frames)
    assert batch.fields == ("ids", "logprob", "reward", "message")
    assert_same(batch.to_tensordict(), decode(frames))


@needs_compiled
def test_the_compiled_reader_takes_only_what_it_can_read():
    plain = rollout()[0]
    types = headers._BATCH_TYPES
    with pytest.raises(TypeError):
        compiled.read(bytearray(plain), *types, TORCH_DTYPES)
    with pytest.raises(TypeError, match="derived from tuple"):
        compiled.read(plain, *types[:3], dict, TORCH_DTYPES)
    with pytest.raises(TypeError):
        compiled.read(plain, *types)
    assert compiled.read(plain, *types, {}) is None


@needs_compiled
@pytest.mark.parametrize("choice", ["python", "compiled", ""])
def test_the_reader_is_chosen_by_the_environment(choice):
    code = "from jagcodec.wire import header; print(header._batch is None)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAGCODEC_HEADER": choice},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(choice == "python")


@pytest.mark.parametrize("choice", ["compiled", ""])
def test_where_it_was_not_built_python_reads_unless_it_was_asked_for(choice):
    code = (
        "import sys; sys.modules['jagcodec.wire._batch'] = None\n"
        "from jagcodec.wire import header; print(header._batch)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAGCODEC_HEADER": choice},
        capture_output=True,
        text=True,
    )
    if choice:
        assert "found 'compiled', which cannot be imported" in found.stderr
    else:
        assert found.stdout.strip() == "None"


def test_a_foreign_frame_is_not_copied_before_it_is_refused():
    frame = np.full(64 << 20, 7, dtype=np.uint8)
    tracemalloc.start()
    try:
        assert outcome([frame])[0] == "foreign"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_reader_that_there_is_not_is_refused():
    found = subprocess.run(
        [sys.executable, "-c", "import jagcodec"],
        env={**os.environ, "JAGCODEC_HEADER": "fortran"},
        capture_output=True,
        text=True,
    )
    assert "JAGCODEC_HEADER: expected 'compiled' or 'python', found 'fortran'" in found.stderr
