"""Compressed messages: every value and every part of them comes back, and no block is believed."""

import contextlib
import itertools
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import (
    ArgumentError,
    ArgumentTypeError,
    Compression,
    Limits,
    MsgpackEncoder,
    RowBuilder,
    WireFormatError,
    concat_rows,
    decode,
    decode_batch,
    dump,
    encode,
    encode_batch_into,
    encode_fields,
    encode_into,
    encode_rows,
    encoded_size,
    load,
    materialize,
    open_wire,
    to_blob,
)
from jagcodec.memory import blocks
from jagcodec.testing import assert_same, compressions, jagged_batches, trees
from jagcodec.wire import codecs, compressed, compression, header, spec
from tests.helpers import make_batch, message, receive, size
from tests.wire import corpus, forge, spec_reader
from tests.wire.test_golden import OPAQUE, VALUES

CODECS = spec.CODECS
SMALL = {
    codec: Compression(codec, threshold=0, block_size=1000, threads=1) for codec in spec.CODECS
}


@pytest.fixture
def always(monkeypatch):
    """Compress messages that it makes larger too, so that small ones have every form."""
    monkeypatch.setattr(compression, "_is_smaller", lambda frames, others: True)


def is_compressed(frames):
    return header.read_header(frames[0]).schema.root.kind == spec.Kind.COMPRESSED


def batch(rows=40, tokens=900):
    """Jagged columns that are large, and compress more or less."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(0, tokens, (rows,), generator=generator).tolist()
    return TensorDict(
        {
            "ids": _nest([torch.arange(n) // 7 for n in lengths]),
            "noise": _nest([torch.randn(n, generator=generator) for n in lengths]),
            "mask": _nest([torch.ones(n, dtype=torch.bool) for n in lengths]),
            "reward": torch.arange(float(rows)),
        },
        batch_size=[rows],
    )


def _nest(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


class Store:
    """A blob of which parts are fetched, and how many bytes of it were."""

    def __init__(self, frames):
        self.blob = bytes(to_blob(frames))
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, offset, size):
        self.ranges.append((offset, size))
        return self.blob[offset : offset + size]

    @property
    def fetched(self):
        return sum(size for _, size in self.ranges)


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*VALUES} - {"pickle"}))
@pytest.mark.parametrize("codec", CODECS)
def test_every_golden_value_comes_back(name, codec, always):
    _, make, options = VALUES[name]
    frames = encode(make(), **{**options, "compress": SMALL[codec]})
    assert is_compressed(frames) or len(frames) == 1
    for form in (frames, receive(frames), to_blob(frames), receive(frames, bytes)):
        assert_same(decode(form), make())
    if name not in OPAQUE:
        plain = encode(make(), **{**options, "compress": None})
        assert repr(spec_reader.read(message(frames))) == repr(spec_reader.read(message(plain)))


@given(trees(max_leaves=4), compressions(), st.booleans(), st.booleans())
def test_every_value_comes_back(value, how, narrow, checksum):
    frames = encode(value, compress=how, narrow=narrow, checksum=checksum)
    assert size(frames) <= size(encode(value, narrow=narrow, checksum=checksum))
    assert_same(decode(receive(frames)), value)


@given(jagged_batches(), compressions(), st.data())
def test_every_part_of_a_batch_comes_back(drawn, how, data):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compression, "_is_smaller", lambda frames, others: True)
        options = {"lengths": drawn.lengths, "token_aligned_fields": drawn.token_aligned_fields}
        plain = encode_fields(drawn.fields, **options)
        frames = receive(encode_fields(drawn.fields, compress=how, **options))
    rows = len(drawn.lengths)
    index = data.draw(st.lists(st.integers(0, rows - 1), max_size=4) if rows else st.just([]))
    start = data.draw(st.integers(0, rows))
    for chosen in (slice(start, rows), index):
        wanted = open_wire(plain).rows(chosen)
        for source in (frames, Store(frames)):
            found = open_wire(source).rows(chosen)
            assert_same(found.to_tensordict(), wanted.to_tensordict())
            assert_same(decode(found.to_frames()), wanted.to_tensordict())


@pytest.mark.parametrize("codec", CODECS)
def test_everything_that_encodes_takes_it(codec, tmp_path):
    how, value = codec, {"zeros": torch.zeros(50_000), "step": 3}
    frames = encode(value, compress=how)
    assert is_compressed(frames)
    assert size(frames) < 10_000
    assert message(MsgpackEncoder(compress=how).encode(value)) == message(frames)
    blob = bytearray(encoded_size(value, compress=how))
    assert encode_into(value, blob, compress=how) == len(blob)
    assert blob == to_blob(frames)
    several = encode_batch_into([value, 1], bytearray, compress=how)
    assert_same(decode_batch(several), [value, 1])
    dump(value, tmp_path / "file", compress=how)
    assert (tmp_path / "file").read_bytes() == blob
    assert_same(load(tmp_path / "file"), value)
    assert_same(load(tmp_path / "file", mmap=True), value)

    columns = {"ids": torch.zeros(2, 9000, dtype=torch.int64)}
    lengths = torch.tensor([9000, 8000])
    of_fields = encode_fields(columns, lengths=lengths, compress=how)
    rows = {"ids": [[0] * 9000, [0] * 8000]}
    assert message(encode_rows(rows, compress=how)) == message(of_fields)
    assert is_compressed(of_fields)
    one = encode_rows([{"ids": np.zeros(9000, dtype=np.int64)}], compress=how)
    assert is_compressed(one)
    builder = RowBuilder()
    builder.append(ids=np.zeros(9000, dtype=np.int64))
    assert message(builder.to_frames(compress=how)) == message(one)
    (tmp_path / "file").write_bytes(to_blob(of_fields))
    assert open_wire(tmp_path / "file").rows([1])["ids"].values().shape == (8000,)


def test_meta_and_checksums():
    value, meta = batch(), {"step": 3, "model": "m"}
    frames = receive(encode(value, compress="zstd", checksum=True, meta=meta))
    assert open_wire(frames).meta == meta
    assert open_wire(Store(frames)).meta == meta
    assert_same(decode(frames), value)
    for i in range(1, len(frames)):
        frames[i][5] ^= 1
        with pytest.raises(WireFormatError, match=f"frame {i}: .*CRC-32"):
            decode(frames)
        with pytest.raises(WireFormatError, match=f"frame {i}: .*CRC-32"):
            materialize(frames)
        frames[i][5] ^= 1


def test_what_does_not_shrink_is_sent_as_it_is():
    generator = np.random.default_rng(1)
    for value in (7, [1, 2, 3], generator.bytes(100_000), torch.ones(900), {"a": torch.ones(3)}):
        for checksum in (False, True):
            plain = encode(value, checksum=checksum)
            for how in CODECS:
                assert message(encode(value, compress=how, checksum=checksum)) == message(plain)
    # Frames that do not are sent as they are, and so are small ones.
    noise = torch.frombuffer(bytearray(generator.bytes(40_000)), dtype=torch.int64)
    zeros = torch.zeros(5000)
    frames = encode([noise, zeros, torch.zeros(8)], compress="zstd")
    assert [len(frame) for frame in frames[1:3]] == [32, 40_000]
    assert frames[2].obj is not None
    assert np.shares_memory(np.asarray(frames[2]), noise.numpy())
    whole = encode([noise, zeros], compress=Compression(threshold=20_001))
    assert not is_compressed(whole)


def test_equal_values_give_equal_bytes():
    for codec in CODECS:
        first, *others = (
            message(encode(batch(), compress=Compression(codec, block_size=1 << 14, threads=n)))
            for n in (1, 2, 3, 0)
        )
        assert is_compressed(first)
        assert all(other == first for other in others)


def test_a_join_takes_compressed_messages_among_others():
    batches = [make_batch(50, lengths) for lengths in ([900, 3], [0, 5, 800], [700])]
    wanted = materialize([encode(one) for one in batches])
    sent: list[Any] = [
        encode(batches[0], compress="zstd"),
        encode(batches[1]),
        [to_blob(encode(batches[2], compress="lz4", checksum=True))],
    ]
    assert is_compressed(sent[0])
    found = materialize([list(frames) for frames in sent])
    for name in ("ids", "logprobs", "experts", "embedding", "reward"):
        assert_same(found[name], wanted[name])
    joined = concat_rows([open_wire(frames) for frames in sent]).rows([4, 0, 5])
    again = concat_rows([open_wire(encode(one)) for one in batches]).rows([4, 0, 5])
    assert_same(joined.to_tensordict(), again.to_tensordict())
    assert_same(decode(joined.to_frames()), decode(again.to_frames()))
    with pytest.raises(WireFormatError, match="message 1"):
        materialize([sent[0], [*sent[0][:-1], bytes(memoryview(sent[0][-1]))[:-1]]])


# --- parts -------------------------------------------------------------------------------------


def test_a_range_takes_the_blocks_that_hold_it():
    value = batch(rows=400)
    how = Compression("zstd", block_size=4096)
    frames = encode(value, compress=how)
    store = Store(frames)
    assert is_compressed(frames)
    opened = open_wire(store)
    fixed = 24 + len(frames[0])
    assert store.fetched == fixed
    # The rewards and the offsets lie in frame 1, and are read with the blocks around them.
    assert opened["reward"].tolist() == value["reward"].tolist()
    assert store.fetched <= fixed + 2 * 4096
    store.ranges.clear()
    row = opened.rows([200])["noise"]
    assert_same(row.values(), value["noise"][200])
    tokens = len(value["noise"][200])
    offsets = 8 * 401 + 2 * 4096
    assert store.fetched <= offsets + 4 * tokens + 2 * 4096
    # Neighbours are in a block that is known.
    store.ranges.clear()
    for i in range(201, 204):
        assert_same(opened.rows([i])["noise"].values(), value["noise"][i])
    assert store.fetched <= 4 * sum(len(value["noise"][i]) for i in range(201, 204)) + 4096


def test_what_was_fetched_twice_is_not_shared():
    """Blocks are kept, and what is handed out may be written to."""
    frames = encode({"a": TensorDict({"x": torch.zeros(4, 2000)}, [4])}, compress="zstd")
    opened = open_wire(Store(frames))
    first = opened.rows([3])["x"]
    first += 1
    assert opened.rows([3])["x"].sum() == 0
    assert opened.rows([2, 3])["x"].sum() == 0


def test_frames_in_memory_are_decompressed_once_and_only_if_asked_for(monkeypatch):
    done: list[str] = []
    inflated = codecs.inflated

    def counted(decompress, codec, data, size, path):
        done.append(path)
        return inflated(decompress, codec, data, size, path)

    monkeypatch.setattr(compressed, "inflated", counted)
    frames = encode(batch(rows=400), compress=Compression(block_size=1 << 22))
    opened = open_wire(frames)
    assert done == []
    expected = batch(rows=400)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda i: opened.rows([i])["ids"].values(), range(8)))
    for i, row in enumerate(rows):
        assert_same(row, expected["ids"][i])
    assert len(done) == len(set(done)) <= 2  # its own, and that of the offsets
    assert_same(opened.to_tensordict(), expected)
    assert len(done) == len(set(done))


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_are_shared_by_threads(codec, monkeypatch):
    monkeypatch.setattr(codecs, "_WORTH_A_THREAD", 1)
    used: set[int] = set()
    inflated = codecs.inflated

    def noted(*args):
        used.add(threading.get_ident())
        return inflated(*args)

    monkeypatch.setattr(compressed, "inflated", noted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    value = batch(rows=200)
    frames = encode(value, compress=Compression(codec, block_size=1000, threads=3))
    assert_same(decode(frames), value)
    assert used
    assert threading.get_ident() not in used
    damaged = receive(frames)
    damaged[2] = bytearray(len(damaged[2]))  # in every block of it, and so in every thread
    with pytest.raises(WireFormatError, match=r"frame 2: expected"):
        decode(damaged)


@pytest.mark.parametrize("copy", [None, True, False])
def test_what_comes_out_belongs_to_the_caller(copy):
    value = [torch.zeros(5000), torch.from_numpy(np.random.default_rng(0).random(5000))]
    frames = receive(encode(value, compress="zstd"), bytes if copy is None else bytearray)
    before = message(frames)
    first, second = decode(frames, copy=copy)
    first += 1
    if copy is not False:
        second += 1
        assert message(frames) == before
    assert_same(decode(frames, copy=True)[0], value[0])


# --- arguments ---------------------------------------------------------------------------------


ENCODE: Any = encode
ENCODE_ROWS: Any = encode_rows
COMPRESSION: Any = Compression


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: COMPRESSION("gzip"), ArgumentError, "'zstd' or 'lz4', found 'gzip'"),
        (lambda: COMPRESSION(1), ArgumentTypeError, "expected a name, found int"),
        (lambda: COMPRESSION(level=23), ArgumentError, "expected -7 to 22, found 23"),
        (lambda: COMPRESSION("lz4", level=2), ArgumentError, "expected -64 to 1, found 2"),
        (lambda: COMPRESSION(level=1.0), ArgumentTypeError, "expected an integer, found float"),
        (lambda: COMPRESSION(block_size=0), ArgumentError, "expected 1 to 67108864, found 0"),
        (lambda: COMPRESSION(threshold=-1), ArgumentError, "expected 0 or more, found -1"),
        (lambda: COMPRESSION(threads=True), ArgumentTypeError, "expected an integer, found bool"),
        (lambda: ENCODE(1, compress="gzip"), ArgumentError, "found 'gzip'"),
        (lambda: ENCODE(1, compress=True), ArgumentTypeError, "found bool"),
        (lambda: ENCODE_ROWS([{"a": 1}], compress=3), ArgumentTypeError, "found int"),
    ],
)
def test_other_choices_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(("codec", "module"), [("zstd", "zstandard"), ("lz4", "lz4.block")])
def test_a_library_that_is_missing_is_named_with_the_remedy(codec, module, monkeypatch):
    value = {"zeros": torch.zeros(50_000)}
    frames = encode(value, compress=codec)
    fields = encode(TensorDict({"zeros": torch.zeros(50, 1000)}, [50]), compress=codec)
    for name in (module, "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    codecs.codec_of.cache_clear()
    try:
        for call in (
            lambda: encode(value, compress=codec),
            lambda: decode(frames),
            lambda: open_wire(fields),
            lambda: open_wire(Store(fields)),
            lambda: materialize([fields, fields]),
        ):
            with pytest.raises(ArgumentError, match=rf"pip install 'jagcodec\[{codec}\]'"):
                call()
        # What is wrong with a message is said all the same, and before.
        with pytest.raises(WireFormatError):
            decode(corpus.BAD["compressed_ends_few"][2])
        assert_same(decode(encode(value)), value)
    finally:
        codecs.codec_of.cache_clear()


# --- hostile messages --------------------------------------------------------------------------

FORGED = [name for name in corpus.BAD if name.startswith(("compressed_", "zstd_", "lz4_"))]


@pytest.mark.parametrize("name", FORGED)
def test_forged_messages_are_refused_by_every_reader(name):
    reason, _, frames = corpus.BAD[name]
    inner = corpus.batch(forge.tensor(shape=[2, 50]))
    readers = [decode, lambda frames: decode(to_blob(frames))]
    if name not in ("compressed_in_a_row", "compressed_in_a_list"):
        readers.append(lambda frames: materialize([frames, frames]))
    for read in readers:
        with pytest.raises(WireFormatError) as caught:
            read(frames)
        assert caught.value.reason == reason
    if reason == "bad_value":  # then it is for the range that is asked for to find it
        packed, *sent = frames
        whole = forge.message(inner, b"\7" * 100)
        codec = "lz4" if name.startswith("lz4") else "zstd"
        ends = [*header.read_header(packed).values[1]]
        forged = forge.compressed(whole, 64, ends, *sent, codec=codec)
        for source in (forged, Store(forged)):
            with pytest.raises(WireFormatError) as caught:
                open_wire(source)["a"]
            assert caught.value.reason == reason


def test_what_a_message_claims_is_checked_before_memory_is_taken(monkeypatch):
    def none(size):
        raise AssertionError(f"{size} bytes")

    monkeypatch.setattr(compressed, "new_block", none)
    for name in FORGED:
        reason, _, frames = corpus.BAD[name]
        if reason != "bad_value":
            with pytest.raises(WireFormatError):
                decode(frames)
    inner = corpus.bomb(1 << 20)
    total = (1 << 20) + len(forge.message(forge.tensor(shape=[1 << 20]), sizes=[1 << 20])[0])
    with pytest.raises(WireFormatError, match=r"limits=Limits\(bytes=") as caught:
        decode(inner, limits=Limits(bytes=total - 1))
    assert caught.value.reason == "too_large"
    monkeypatch.undo()
    assert decode(inner, limits=Limits(bytes=total)).sum() == 0


def test_no_block_takes_more_memory_than_its_own(monkeypatch):
    """Whatever the frame in it holds: 2^17 bytes for every four, in the end."""
    for says in (None, 64, 1 << 27):
        runs = forge.zstd(*[(b"\0", 1 << 17)] * 1000, size=says, window=56)
        frames = forge.compressed(
            forge.message(forge.tensor(shape=[8192]), sizes=[8192]), 8192, [len(runs)], runs
        )
        tracemalloc.start()
        try:
            with pytest.raises(WireFormatError):
                decode(frames)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_block_of_lz4_that_refers_to_itself_shows_no_memory():
    """An offset of 0: refused, or zeros; never what lay there before."""
    forged = forge.sevens(64)[:2] + b"\0\0" + forge.sevens(64)[4:]
    frames = corpus.of_sevens(forged, b"\7" * 36, codec="lz4")
    for _ in range(50):
        junk = [b"\xee" * 64 for _ in range(50)]
        del junk
        with contextlib.suppress(WireFormatError):
            assert set(decode(frames)[1:59].tolist()) == {0}


def test_an_old_lz4_is_refused(monkeypatch):
    monkeypatch.setattr("lz4.library_version_number", lambda: 10800)
    codecs.codec_of.cache_clear()
    try:
        with pytest.raises(ArgumentError, match="pip install --upgrade lz4"):
            encode(torch.zeros(50_000), compress="lz4")
    finally:
        codecs.codec_of.cache_clear()


@pytest.mark.parametrize("codec", CODECS)
def test_a_writer_makes_no_bombs(codec):
    """Zeros are sent as they are where they would come to more than what a reader takes."""
    for cells in (1 << 20, 3 << 20, 40 << 20):
        value = torch.zeros(cells, dtype=torch.uint8)
        frames = encode(value, compress=Compression(codec, block_size=1 << 14))
        inner = header.read_header(frames[0]).values[0]
        sent = len(inner) + size(frames[1:])
        assert cells <= spec.FREE_EXPANSION + spec.MAX_EXPANSION * sent
        assert size(frames) < cells // 50 + 20_000
        assert_same(decode(frames), value)
    blocks.release()


@pytest.mark.parametrize("codec", CODECS)
def test_damage_gives_a_value_or_the_error(codec, always):
    frames = receive(encode(make_batch(), compress=SMALL[codec]))
    assert is_compressed(frames)
    part = frames[1]
    for bit in itertools.chain(range(0, 8 * 80), range(0, 8 * len(part), 97)):
        part[bit // 8] ^= 1 << bit % 8
        for source in (frames, Store(frames)):
            with contextlib.suppress(WireFormatError):
                open_wire(source).to_tensordict()
        part[bit // 8] ^= 1 << bit % 8
    assert_same(decode(frames), make_batch())
