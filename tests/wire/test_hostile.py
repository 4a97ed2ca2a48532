"""Messages that are cut, forged, foreign or newer: one error that says where, from every reader.

The messages by hand are in `golden/`. Here all readers get them, and they get the golden messages
with every part of them cut, flipped or replaced. What one of the library and the second reader
refuses, the other must refuse too, except where the page leaves it to the reader.
"""

import itertools
import random
from typing import Any
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from jagcodec import ArgumentError, WireFormatError, decode, encode, materialize, open_wire, to_blob
from jagcodec.errors import REASONS, TransportError
from jagcodec.wire.header import read_header
from jagcodec.wire.limits import DEFAULT_LIMITS, NO_LIMITS
from jagcodec.wire.many.stacked import _open_stack
from jagcodec.wire.read.message import Message
from jagcodec.wire.schema import ROW_KINDS, runs_of
from jagcodec.wire.spec import BITS, INDIRECT, MAX_UNBACKED_ROWS, PLAIN, Kind
from tests.helpers import Store, message_in, nested, node_of, receive, rollout
from tests.oracle import assert_same
from tests.strategies import tensordicts, trees
from tests.wire import forge, readers, spec_reader
from tests.wire.forge import list_of, message, message_of_rows, node, packed, tensor, tensordict
from tests.wire.readers import BATCH_READERS, OPTIONS, agree, opened, outcome, peak_of, refused
from tests.wire.test_golden import BAD, GOOD, MAY_ACCEPT, NAMES, OPAQUE, kept, message_of

pytestmark = pytest.mark.filterwarnings("ignore")

# Too large for the file.
MAPS = message(None, values=b"\x91" + b"\x81\xa1a" * 100_000 + b"\1")
ALL_BAD = BAD | {"maps_100_000": (MAPS, "bad_header")}
# What a reader of one message knows only of all of it, and what a row may not have.
OF_FRAMES = ("frame_count", "frame_size", "no_message")
NOT_IN_ROWS = ("compressed", "indirect")
# A reader of parts never sees these.
NOT_IN_PARTS = {"checksum_frame", "checksum_frames_swapped"}


# --- messages by hand --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL_BAD)
def test_every_reader_refuses_a_bad_message(name):
    message, reason = ALL_BAD[name]
    is_list = isinstance(message, list) and message and all(type(part) is bytes for part in message)
    refused(decode, message, reason)
    size = sum(map(len, message)) if is_list else 1000
    assert peak_of(outcome, decode, message) < 100 * size + (1 << 20)
    if name not in MAY_ACCEPT:
        with pytest.raises(spec_reader.RefusedError):
            spec_reader.read(message)
    if is_list and reason not in OF_FRAMES:
        refused(decode, bytes(to_blob(message)), reason)
        if not name.startswith(("compressed", "zstd")):
            in_a_row = message_of_rows("a" * 200, forge.row_message(message))
            error = refused(decode, in_a_row, "" if name.startswith("indirect") else reason)
            assert error.path.startswith("$[1]")
    if name in NOT_IN_PARTS or not is_list:
        return
    is_batch = type(outcome(lambda m: open_wire(m).fields, message)) is list
    for read in readers.WHOLE_BATCH_READERS.values():
        refused(read, message, reason if is_batch else "")


@pytest.mark.parametrize("name", GOOD)
def test_every_reader_reads_a_good_message(name):
    message = GOOD[name]
    assert agree(message)
    if not isinstance(message, list):
        return
    if not name.startswith(NOT_IN_ROWS) and not name.endswith("_deep"):
        assert agree(message_of_rows("a", forge.row_message(message), kind="OBJECT_ARRAY"))
    if isinstance(decode(message), TensorDict):
        for read in BATCH_READERS.values():
            assert not isinstance(outcome(read, message), Exception)


def test_every_reason_that_a_message_can_give_is_given():
    found = {reason for _, reason in BAD.values()}
    others = {
        *("timed_out", "no_peer", "peer_failed", "no_such_key", "busy", "conflict"),
        *("bad_type", "bad_dtype", "bad_shape", "bad_length", "bad_pad", "bad_option"),
        *("row_mismatch", "row_too_long", "empty_prompt", "no_such_field", "no_such_row"),
        *("new_field", "unsupported_type"),
    }
    assert found == REASONS - others


UNKNOWN = tensor("float33")
WRONG = forge.record("BIG_INT", b"")


@pytest.mark.parametrize(
    ("frames", "path"),
    [
        (message(UNKNOWN), "$"),
        (message(list_of(1, UNKNOWN)), "$[1]"),
        (message(forge.map_of({"a": list_of(forge.map_of({"b c": UNKNOWN}))})), "$.a[0]['b c']"),
        (message(node("TUPLE", children=[0, list_of(UNKNOWN)])), "$[1][0]"),
        (message(tensordict([1], {"ids": UNKNOWN})), "$.ids"),
        (message(tensordict([], {"x": tensordict([], {"y": UNKNOWN})})), "$.x.y"),
        (message(list_of(0, tensor(buffer=9))), "$[1]"),
        (message(forge.map_of({"td": tensordict([], {"x": tensor(buffer=9)})})), "$.td.x"),
        (message(WRONG), "$"),
        (message({"a": [{"b c": WRONG}]}), "$.a[0]['b c']"),
        (message(forge.record("TUPLE", 0, [WRONG])), "$[1][0]"),
        (message_of_rows("a", WRONG), "$[1]"),
        (message_of_rows("a", forge.row_message(message(forge.map_of({"x": UNKNOWN})))), "$[1].x"),
        (message_of_rows("a", forge.RowMessage(forge.blob(message(1))[:-1])), "$[1] (header)"),
    ],
)
def test_an_error_names_the_path(frames, path):
    refused(decode, frames, path=path)


def test_an_unknown_version_names_both():
    refused(decode, message(1, fields={"jagcodec": 7}), says="version 1.*7")


# --- real messages, damaged --------------------------------------------------------------------


def golden(name):
    return message_of(kept(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_message_cut_anywhere_is_refused(name):
    frames = golden(name)
    header, *payload = frames
    whole = bytes(to_blob(frames))
    bad: list[Any] = [[header[:end], *payload] for end in range(len(header))]
    bad += [whole[:end] for end in (*range(24 + len(header)), len(whole) - 1)]
    for i, frame in enumerate(frames):
        others = frames[:i], frames[i + 1 :]
        bad += [[*others[0], part, *others[1]] for part in (frame[:-1], frame + b"\0") if frame]
        bad += [[*others[0], *others[1]]] if i else []
    bad += [[*frames, b""], *([frames[::-1]] if payload else [])]
    for read in (decode, opened):
        for broken in bad:
            assert isinstance(outcome(read, broken), WireFormatError), broken


def flipped(data, bit):
    data = bytearray(data)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_gives_a_value_or_the_error(name):
    """And both readers come to one verdict."""
    frames, rng = golden(name), random.Random(name)
    for i, frame in enumerate(frames[:3]):
        bits = range(8 * min(len(frame), 2000))
        for bit in rng.sample(bits, min(len(bits), 150 if i == 0 else 60)):
            message = [*frames[:i], flipped(frame, bit), *frames[i + 1 :]]
            # numpy's scalars keep neither the order of their bytes nor all bits of a bool.
            if bit < 80 or name in OPAQUE | {"scalar"}:
                outcome(decode, message)
            else:
                agree(message, i, bit)
            outcome(opened, message)
    whole = bytes(to_blob(frames))
    for bit in range(8 * 24):
        outcome(decode, flipped(whole, bit))


@pytest.mark.parametrize("name", sorted({*NAMES} - OPAQUE))
def test_any_number_may_be_any_other(name):
    """One number of a message at a time; both readers come to one verdict."""
    frames, rng = golden(name), random.Random(name)
    parts = forge.Parts(frames[0])
    for at, number in enumerate(parts.numbers[: len(parts.numbers) - parts.checksums]):
        for other in {number - 1, number + 1, *rng.sample(forge.NUMBERS, 4)}:
            message = forge.with_number(frames, at, min(other, 2**63 - 1))
            read = agree(message, at, other)
            assert not (read and other < 0)
            outcome(opened, message)


@pytest.mark.parametrize("limits", [DEFAULT_LIMITS, NO_LIMITS])
@pytest.mark.parametrize("name", ["rollout", "small_batch", "tensordict"])
def test_what_is_sound_at_first_sight_passes_the_checks_one_by_one(name, limits):
    """Of messages that are opened together the numbers are checked as one array, which may wrap."""
    frames = golden(name)
    count = len(forge.Parts(frames[0]).numbers)
    for at, number in itertools.product(range(count), forge.NUMBERS):
        (header, *_) = forge.with_number(frames, at, number)
        # Those of a blob, before its size is known.
        found = _open_stack([np.frombuffer(header, np.uint8)], np.zeros(1, int), None, limits)
        if found is not None:
            read_header(header, limits)


@given(st.binary(max_size=64), st.lists(st.binary(max_size=8), max_size=3))
def test_noise_is_refused(head, rest):
    refused(decode, [head, *rest])


@given(st.integers(0))
@example(273523)  # a frame of 2^31 bytes, which only a reader of ranges does not miss
def test_any_damage_gives_every_reader_of_a_batch_a_value_or_the_error(seed):
    rng = random.Random(seed)
    frames = forge.damaged(golden(rng.choice(["rollout", "rollout_narrow", "rollout_elided"])), rng)
    value, _, why = readers.verdicts(frames)
    for name, reader in BATCH_READERS.items():
        found = outcome(reader, frames)
        if value is None and name in readers.WHOLE_BATCH_READERS and "checksum" not in why:
            # A reader of ranges does not miss bytes that it never asks for: the page says so.
            unseen = name == "a callable" and outcome(decode, frames).reason in OF_FRAMES
            assert unseen or isinstance(found, WireFormatError), name


@settings(max_examples=100)
@given(trees() | tensordicts(trees(max_leaves=3)), st.sampled_from(OPTIONS), st.integers(0))
def test_both_readers_refuse_the_same_messages(value, options, seed):
    frames = [bytes(memoryview(frame)) for frame in encode(value, **options)]
    rng = random.Random(seed)
    for _ in range(20):
        agree(forge.damaged(frames, rng))


def test_a_row_that_is_a_message_is_cut_anywhere_and_flipped_anywhere():
    inner = forge.row_message(message(list_of(tensor(), 5), b"\7", checksum=True))
    for end in range(2, len(inner)):
        refused(decode, message_of_rows(forge.RowMessage(inner[:end]), "other"))
    for bit in range(8 * len(inner)):
        agree(message_of_rows("a", forge.RowMessage(flipped(inner, bit))), bit)


def test_a_message_in_a_row_may_be_trusted_as_the_one_around_it():
    hidden = forge.row_message(message(forge.record("PICKLE", b"\x80\x04K\x01.")))
    refused(decode, message_of_rows(hidden), "pickle_refused")
    assert decode(message_of_rows(hidden), allow_pickle=True).tolist() == [1]


def test_a_stock_receiver_fails_readably_and_unpickles_nothing():
    """vLLM's and TransferQueue's decoders unpickle extension codes 1 to 5, and raise on others."""
    codes: list[int] = []
    for value in (1, "plain", {"a": [1, 2]}, rollout()):
        msgpack.unpackb(bytes(encode(value)[0]), ext_hook=lambda code, data: codes.append(code))
    assert {*codes} == {16}
    assert not {int(kind) for kind in Kind} & {1, 2, 3, 4, 5}


def test_what_was_checked_does_not_change_with_the_message():
    """Another process may write to it: indices, offsets and tables are copied before."""
    values: Any = [torch.eye(3).to_sparse_coo(), nested([[1, 2], [3]])]
    for value, part in zip(values, (torch.Tensor._indices, type(values[1]).offsets), strict=True):
        frames = receive(encode(value))
        back = decode(frames, copy=False)
        frames[1][:] = b"\xff" * len(frames[1])
        assert part(back).equal(part(value))
    frames = receive(GOOD["indirect_anywhere"])
    batch = open_wire(frames)
    view = message_in(batch).view(node_of(batch, "a"))
    frames[1][:] = b"\xff" * len(frames[1])
    assert view.row_starts().tolist() == [1, 1]
    assert batch["a"].values().shape == (5,)


# --- indirect columns: every number of their tables, bombs ------------------------------------


SAMPLES = (
    *("runs", "empty_rows", "wide", "signed", "at_first", "tensor", "tensor_of_one_cell"),
    *("documents", "documents_at_first", "one_object_inside", "object_array"),
)


def tables_of(frames):
    """Where each table begins, and how many runs it has."""
    header = read_header(bytes(frames[0]))
    nodes = [node for node in header.schema.nodes if node.kind in ROW_KINDS]
    places = [header.numbers[node.number + 1 : node.number + 3] for node in nodes]
    found = [(at, runs_of(node.kind, how)) for node, (at, how) in zip(nodes, places, strict=True)]
    return [(at, runs) for at, runs in found if runs]


def agree_in_batches(frames):
    """One verdict of both readers, and of all ways to read a batch."""
    read = agree(frames)
    for name, reader in BATCH_READERS.items():
        if read or name not in ("rows", "to_frames"):  # a row that is not read may be bad
            found = outcome(reader, frames)
            assert isinstance(found, Exception) != read, (name, found)
            assert read or isinstance(found, WireFormatError), (name, found)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_number_of_a_table_and_of_its_node(name):
    frames = GOOD[f"indirect_{name}"]
    ((start, runs),) = tables_of(frames)
    for at in range(start, start + 64 * runs, 8):
        for value in {*forge.NUMBERS, 2, 4, 5, 34}:
            payload = bytearray(frames[1])
            payload[at : at + 8] = forge.int64s(value)
            agree([frames[0], bytes(payload)], at, value)
            if name != "object_array" and value in (-1, 1, 65, 2**63 - 1):
                agree_in_batches([frames[0], bytes(payload)])
    for at in range(len(forge.Parts(frames[0]).numbers)):
        for value in (*forge.NUMBERS, 2, 4, 5, 66, 67, 71, 73, 128, 130):
            agree(forge.with_number(frames, at, value), at, value)


NOT_MSGPACK, LONGER = b"\xc1" * 5, b"\3text"  # 0xc1 begins nothing, and 3 is an integer of one byte


def in_turn(kind, stored, *rows):
    """A message of these rows twice, in an array or in a column: documents, which are indirect if
    it says how they are stored; or messages (256).
    """
    if stored in (65, 129):
        runs = forge.run_of(b"".join(rows), [0, len(rows[0])] * 2)
        return forge.batch_of(kind, runs, lengths=[*map(len, rows)] * 2, stored=stored)
    made: Any = rows
    if stored:
        made = [forge.row_message(message(None, values=b"\x91" + row)) for row in rows]
    f = forge.Draft()
    root = forge.rows_of(f, *made * 2, kind=kind)
    return f.message(root if kind == "OBJECT_ARRAY" else tensordict([4], {"a": root}))


@pytest.mark.parametrize("bad", [NOT_MSGPACK, LONGER, forge.packed(forge.record("BIG_INT", b""))])
@pytest.mark.parametrize("stored", [0, 65, 129, 256])
def test_a_bad_document_names_its_row(bad, stored):
    """Whether each row is an object of its own, or rows of the same bytes are one."""
    error = refused(decode, in_turn("OBJECT_ARRAY", stored, forge.TEXT, bad))
    assert error.path.removesuffix(" (values)") == "$[1]"
    frames = in_turn("NON_TENSOR_ROWS", stored, forge.TEXT, bad)
    # Rows that are sent on as they are are not read.
    all_readers = BATCH_READERS if stored in (65, 129) else readers.WHOLE_BATCH_READERS
    for read in (decode, *all_readers.values()):
        path = refused(read, frames).path.removeprefix("message 0: ")
        assert path.removesuffix(" (values)") == "$.a[1]"
    for rows, first in (([1], 1), ([3, 1], 3), ([2, 0, 1], 1), (slice(2, 4), 3), (slice(1, 3), 1)):
        chosen = open_wire(frames).rows(rows)
        error = refused(type(chosen).to_tensordict, chosen)
        assert error.path.removesuffix(" (values)") == f"$.a[{first}]"
    assert open_wire(frames).rows([2, 0])["a"].tolist() == ["text", "text"]


def test_what_repeats_does_not_repeat_at_every_level():
    """The billion laughs: 60 rows, each of which is a message of 60 rows, and so on."""
    frames = message(tensor("int64", [800], 0, 0, 1), bytes(100))
    for level in range(6):
        row, f = forge.row_message(frames), forge.Draft()
        rows = forge.column(f, "NON_TENSOR_ROWS", [forge.run_of(row)], [len(row)] * 60, stored=321)
        frames = f.message(rows)
        assert agree(frames) == (level == 0)
        assert peak_of(outcome, decode, frames) < 10 << 20


# --- faults that the fuzzer or a search by hand found -----------------------------------------


def test_rows_that_repeat_do_not_count_past_2_to_the_63():
    """A row of cells without bytes may be long, but not as often as the caller likes."""
    row = 1 << 55
    column = forge.jagged(dtype="uint8", shape=[row, 0], offset=0)
    frames = message(tensordict([1], {"a": column}), groups=[[0, 0, 1, row, row]])
    assert open_wire(frames).rows([0]).to_tensordict()["a"].values().shape == (row, 0)
    for rows in (256, 257, 512):
        chosen = open_wire(frames).rows([0] * rows)
        with pytest.raises(ArgumentError, match=r"rows\(index\), column 'a': .*take fewer rows"):
            chosen.to_tensordict()


@pytest.mark.parametrize("stored", [PLAIN, BITS, INDIRECT + 1])
@pytest.mark.parametrize(
    "read",
    [
        decode,
        materialize,
        lambda frames: materialize([frames, frames]),
        lambda frames: open_wire(frames).to_tensordict(),
        lambda frames: open_wire(Store(frames)).to_tensordict(),
        lambda frames: open_wire(frames).rows(slice(1, None)).to_tensordict(),
        lambda frames: open_wire(frames).rows(slice(1, None)).to_frames(),
        lambda frames: encode(open_wire(frames)),
        lambda frames: encode(open_wire(frames), narrow=True, elide=True),
    ],
)
def test_rows_without_bytes_take_no_memory(read, stored):
    column = forge.tensor("float32", (MAX_UNBACKED_ROWS, 0), stored=stored)
    frames = message(tensordict([MAX_UNBACKED_ROWS], {"a": column}))
    assert peak_of(read, frames) < 1 << 20


@pytest.mark.parametrize("read", BATCH_READERS.values(), ids=BATCH_READERS)
def test_values_that_are_cut_are_refused(read):
    header, *rest = receive(encode(TensorDict({"a": torch.arange(3)}, [3]), meta={"step": 5}))
    start, values = bytes(header).split(packed("values"))
    values = msgpack.unpackb(values)
    for size in range(len(values)):
        refused(
            read,
            [start + packed("values") + msgpack.packb(values[:size]), *rest],
            says="expected whole msgpack",
        )


def test_foreign_frames_and_messages_inside_each_other_are_read_in_little_memory():
    assert peak_of(refused, decode, [np.full(64 << 20, 7, dtype=np.uint8)]) < 1 << 20
    start = b"\x84" + packed("jagcodec")
    for rest in (b"", b"\xcd\x01", packed(2), b"\xdd\xff\xff\xff\xff" * 4):
        assert peak_of(refused, decode, [start + rest]) < 1 << 17
    frames = message(node("BYTES", numbers=[0, 0, 1 << 20]), bytes(1 << 20))
    for _ in range(50):  # which are not copied at every level
        frames = message_of_rows(forge.row_message(frames), kind="OBJECT_ARRAY")
    assert peak_of(decode, frames) < 4 << 20


def test_rows_that_tensordict_refuses_are_refused():
    """tensordict takes a payload out of what it is in, and a stack has more than one."""
    f = forge.Draft()
    column = forge.rows_of(f, forge.row_message(message_of_rows(1, 2)))
    frames = f.message(forge.batch(column, rows=1))
    refused(decode, frames, "bad_value")
    for read in (opened, materialize, lambda frames: open_wire(frames).rows([0])["a"]):
        refused(read, frames, "bad_value", "$.a[0]")


ROWS = torch.arange(6.0).view(3, 2)
VIEWS = [ROWS[:1], ROWS[1:]]
TERABYTE = forge.zstd(b"", size=1 << 40, width=8)[:13]


@pytest.mark.parametrize(
    ("owner", "name", "value", "place", "written"),
    [
        # While torch looks at indices, once bounds or shapes were read, once a frame was checked.
        (torch, "sparse_coo_tensor", torch.eye(3).to_sparse().coalesce(), slice(24), bytes(24)),
        (Message, "int64s_at", VIEWS, slice(64, None), b"\x7f" * 32),
        (Message, "int64s_at", torch.nested.nested_tensor(VIEWS), slice(64, None), b"\x7f" * 32),
        (zstandard, "get_frame_parameters", torch.zeros(5000), slice(13), TERABYTE),
    ],
)
def test_what_was_checked_is_what_is_used(monkeypatch, owner, name, value, place, written):
    """Somebody writes to the message's memory while it is read."""
    frames = receive(encode(value, compress="zstd"))
    real = getattr(owner, name)

    def scribbled(*args, **kwargs):
        found = real(*args, **kwargs)
        frames[-1][place] = written
        return found

    monkeypatch.setattr(owner, name, scribbled)
    assert_same(decode(frames), value)
    assert frames[-1][place] == written


@pytest.mark.parametrize("size", [0, 1, 2, 4])
def test_a_dictionary_of_value_0_is_none(size):
    def stored(dictionary):
        frame = forge.zstd((b"\7", 320), size=320, dictionary=dictionary)
        return forge.compressed(tensor(shape=[320], dtype="uint8"), [320], frame)

    assert agree(stored(bytes(size)))
    if size:
        assert not agree(stored(bytes(size - 1) + b"\1"))


@pytest.mark.parametrize("failure", [TransportError("no_peer", "store", "gone"), OSError("cut")])
def test_what_a_source_raises_is_not_blamed_on_the_message(failure):
    source = Mock(side_effect=Store(encode(TensorDict({"a": torch.arange(9000)}, [9000]))))
    batch = open_wire(source)
    source.side_effect = failure
    with pytest.raises(type(failure)) as caught:
        batch.to_tensordict()
    assert caught.value is failure


def test_a_tensor_of_no_cells_and_a_huge_dim_is_packed():
    huge = torch.empty(2, 1, 0, dtype=torch.int64).expand(2, 2**51, 0)
    td = decode(encode(TensorDict({"a": huge}, [2])))
    assert td["a"].shape == materialize(td)["a"].shape == (2, 2**51, 0)
