"""Limits of readers: what each counts, that nothing past one is asked for, and how deep values go.

Everything that may be inside itself is read or refused, in a thread of little stack.
"""

import bisect
import dataclasses
import math
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    Limits,
    WireFormatError,
    decode,
    dump,
    encode,
    load,
    open_wire,
)
from jagcodec.errors import ArgumentTypeError, JagcodecError
from jagcodec.wire.documents import RECORDS as RECORD_FIELDS
from jagcodec.wire.schema import FORMS
from tests.wire import forge
from tests.wire.forge import message, message_of_rows, nest, node, record, tensor, tensordict
from tests.wire.readers import chosen, fetched, on_a_small_stack, outcome, peak_of, refused
from tests.wire.values import objects

FRAMES = jagcodec.encode_fields(
    {"ids": torch.arange(12).view(3, 4), "reward": torch.ones(3)}, lengths=torch.tensor([2, 4, 3])
)


@pytest.mark.parametrize(
    ("frames", "objects", "depth"),
    [
        (FRAMES, 3 + 1 + 1, 1),  # nodes, groups and frames
        (message(1), 1, 0),
        (message(forge.list_of(forge.list_of(1), 2)), 4, 2),
        (message(record("TUPLE", record("TUPLE"))), 1, 1),
        (message_of_rows("a", "b", "c"), 1 + 1 + 1 + 3, 0),
        # Messages in rows: their nodes are objects, and lie inside the node of the rows.
        (message_of_rows("a", forge.row_message(message(forge.list_of(1, 2)))),
         1 + 1 + 1 + 2 + 1 + 3, 2),
        (message(forge.tensor_views(2),
                 forge.int64s(0, 0, 1, 1) + b"\1"), 3 + 1 + 2, 1),
        (message(forge.strided_nested(0, 2), forge.int64s(0, 0)),
         3 + 1 + 2, 1),
        (message(tensordict([1], {"a": tensordict([1], {"x": tensor(), "y": tensor(shape=(1, 0))}),
                                  "b": tensor(shape=(1, 0)), "c": tensor(shape=(1, 0))}), b"\1"),
         7, 2),
        # All kinds of containers are levels, also in a message in a row.
        (message(tensordict([1], {})), 1, 0),
        (encode([[objects([[torch.ones(1)]])]]), 3 + 1 + 1 + 1 + 3 + 1, 5),
        (encode([[objects(TensorDict({"a": {"b": torch.ones(1)}}, [1]))]]),
         3 + 1 + 1 + 1 + 3 + 1, 5),
        (encode([[objects(torch.nested.nested_tensor([torch.ones(1)]))]]),
         3 + 1 + 1 + 1 + 3 + 1 + 1, 4),
    ],
)  # fmt: skip
def test_what_each_limit_counts(frames, objects, depth):
    size, header = sum(map(len, frames)), len(frames[0])
    least = {"objects": objects, "depth": depth, "bytes": size, "header": header, "expanded": 0}
    for name, limit in least.items():
        decode(frames, limits=Limits(**{name: limit}))
        if limit:
            refused(partial(decode, limits=Limits(**{name: limit - 1})), frames)


def test_every_reader_takes_limits(tmp_path):
    dump({"a": torch.arange(5)}, path := tmp_path / "x.jag")
    blob_ = bytes(jagcodec.to_blob(FRAMES))
    readers = (
        lambda limits: decode(FRAMES, limits=limits),
        lambda limits: decode(blob_, limits=limits),
        lambda limits: load(path, limits=limits),
        lambda limits: load(path, mmap=True, limits=limits),
        lambda limits: jagcodec.MsgpackDecoder(limits=limits).decode(FRAMES),
        lambda limits: open_wire(FRAMES, limits=limits),
        lambda limits: open_wire(lambda offset, size: blob_[offset : offset + size], limits=limits),
    )
    for read in readers:
        read(None)
        read(Limits())
        for limit in ("bytes", "header", "objects", "depth"):
            reason = "too_deep" if limit == "depth" else "too_large"
            says = rf"at most 0.*the limit {limit!r}.*pass limits=Limits\({limit}="
            refused(read, Limits(**{limit: 0}), reason, says=says)
        with pytest.raises(ArgumentTypeError, match="expected Limits"):
            read({"bytes": 5})


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    ("at", "forged", "size", "text"),
    [
        (0, b"not a blob, whatever its size" * 2, 1 << 40, "this is not a jagcodec blob"),
        (0, b"", 1 << 40, f"found {1 << 40}"),
        (16, (1 << 30).to_bytes(8, "little"), 2 << 30, "the limit 'header'"),
    ],
)
def test_a_file_is_measured_before_it_is_read(tmp_path, mmap, at, forged, size, text):
    dump({"a": torch.arange(5)}, path := tmp_path / "x.jag")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(forged)
        file.truncate(size)  # a file of holes, larger than memory
    assert peak_of(partial(refused, says=text), partial(load, mmap=mmap), path) < 1 << 20


@pytest.mark.parametrize("mmap", [False, True])
def test_the_padding_of_a_blob_is_not_counted(tmp_path, mmap):
    dump({str(i): torch.arange(i) for i in range(50)}, path := tmp_path / "x.jag")
    size = sum(map(len, encode(load(path))))
    assert size < path.stat().st_size
    load(path, mmap=mmap, limits=Limits(bytes=size))
    less = partial(load, mmap=mmap, limits=Limits(bytes=size - 1))
    refused(less, path, says="the limit 'bytes'")


def test_limits_are_numbers_in_range():
    for limits, error, text in (
        ({"bytes": -1}, ArgumentError, "0 or more"),
        ({"depth": 105}, ArgumentError, "0 to 104"),
        ({"header": 1.5}, ArgumentTypeError, "an integer"),
    ):
        with pytest.raises(error, match=text):
            Limits(**limits)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Limits(), "bytes", 5)  # noqa: B010
    assert Limits() == Limits()


def claims(*shape):
    """A message of one row of so many bytes, which are not there."""
    return message(tensordict([1], {"x": tensor(shape=(1, *shape))}), sizes=[math.prod(shape)])


@pytest.mark.parametrize(
    ("data", "limits"),
    [
        # 8 GiB of header on the word of 24 bytes, and a payload of 2^50 on that of a header
        (forge.blob([b"x"], size=1 << 33), Limits()),
        (forge.blob(claims(2**50)), Limits()),
        (forge.blob(claims(2**20)), Limits(bytes=1000)),
    ],
)
def test_a_source_is_asked_for_no_more_than_the_limits(data, limits):
    asked = []

    def source(offset, size):
        asked.append(size)
        assert size <= limits.header
        return data[offset : offset + size].ljust(size, b"\0")

    read = partial(open_wire, limits=limits)
    refused(lambda source: read(source).to_tensordict(), source, "too_large")
    assert sum(asked) < 1000


def test_the_defaults_hold_for_large_honest_batches():
    """16,384 rows, each with objects, as members of a stack, and as nodes of a list."""
    texts = TensorDict({"text": torch.zeros(16_384)}, batch_size=[16_384])
    for name in ("prompt", "answer"):
        texts[name] = ["x"] * 16_384
    assert decode(encode(texts)).batch_size == (16_384,)
    assert len(decode(encode([torch.ones(1) for _ in range(16_384)]))) == 16_384
    member = TensorDict({"ids": torch.ones(2)}, batch_size=[])
    stack = LazyStackedTensorDict(*[member] * 512, stack_dim=0)
    assert decode(encode(stack)).batch_size == (512,)
    # 2^28 tokens, 40 layers, 8 experts: 86 GB
    tokens = 16_384 * 16_384
    data = forge.blob(claims(tokens, 320)[:1])
    opened = open_wire(lambda offset, size: data[offset : offset + size])
    assert opened.schema["x"].shape == (1, tokens, 320)


# --- depth -------------------------------------------------------------------------------------

LEVELS = 102

NODES = {
    "TUPLE": lambda part: node("TUPLE", children=[part]),
    "LIST": forge.list_of,
    "MAP": lambda part: forge.map_of({"a": part}),
    "DICT": lambda part: node("DICT", children=[[1], part]),
    "NON_TENSOR_DATA": lambda part: forge.payload(part, 1),
    "TENSORDICT": lambda part: tensordict([1], {"a": part}),
    "USER": lambda part: node("USER", "slice", children=[node("TUPLE", children=[part, 0, 0])]),
    "LAZY_STACK": lambda part: node("LAZY_STACK", 0, children=[part]),
    "NON_TENSOR_STACK": lambda part: node("NON_TENSOR_STACK", 0, children=[part]),
    "SPARSE_COO": lambda part: forge.sparse_coo(part, 0),
    "STRIDED_NESTED": lambda part: node("STRIDED_NESTED", 1, children=[part, 0]),
    "TENSOR_VIEWS": lambda part: node("TENSOR_VIEWS", children=[part, 0]),
    "ARRAY_ROWS": lambda part: forge.array_rows(part, 0),
}
RECORDS = {
    **{"list": lambda value: [value], "map": lambda value: {"a": value}},
    **{kind: partial(record, kind) for kind in ("TUPLE", "SET", "FROZENSET", "BIG_INT", "PICKLE")},
    **{"DICT": partial(record, "DICT", 1), "DICT, key": lambda value: record("DICT", value, 1)},
    **{"SCALAR": partial(record, "SCALAR", "<i4"), "NUMBERS": partial(record, "NUMBERS", "int8")},
    "USER": lambda value: forge.user("slice", value, 0, 0),
}
ROWS = {
    kind: lambda frames, kind=kind: message_of_rows(forge.row_message(frames), kind=kind)
    for kind in ("NON_TENSOR_ROWS", "OBJECT_ARRAY")
}
# These hold themselves, and are no deeper than what encode writes: they are read.
READ = {
    *("TUPLE", "LIST", "MAP", "DICT", "NON_TENSOR_DATA", "TENSORDICT", "list", "map"),
    *("FROZENSET", "USER", "OBJECT_ARRAY"),
}
BYTE = node("BYTES", numbers=[0, 0, 1])


def nested_tensordicts(levels):
    return message(nest(NODES["TENSORDICT"], levels, tensordict([1], {})))


def read(frames, *readers):
    """What `decode` makes of frames, after every other reader; errors for values."""
    for reader in (*readers, decode):
        found = on_a_small_stack(reader, frames)
        assert not isinstance(found, Exception) or isinstance(found, JagcodecError), repr(found)
    assert not isinstance(found, Exception) or len(str(found)) < 1000 * LEVELS
    return found


@pytest.mark.parametrize("name", [*NODES, *RECORDS, *ROWS])
def test_a_kind_in_itself(name):
    # A slice lies around its tuple, which is a level of its own.
    levels = LEVELS // 2 if name == "USER" else LEVELS
    made, wrong = [], []
    if name in NODES:
        leaf = forge.batch(forge.payload(BYTE, 1), 1) if name == "TENSORDICT" else BYTE
        part = nest(NODES[name], levels, leaf)
        made.append(message(part, b"x"))
        # In a batch these are two levels more.
        column = part if name == "TENSORDICT" else tensordict([1], {"a": forge.payload(part, 1)})
        read(message(column, b"x"), chosen, fetched)
    if name in RECORDS:
        value = nest(RECORDS[name], levels, 7)
        made += [message(value), message_of_rows(value)]
        made += [message_of_rows(value, forge.row_message(message(1)))]
        made += [message_of_rows(forge.row_message(message(value)))]
        read(message(forge.batch(forge.payload(value, 1), 1)), chosen, fetched)
        wrong.append(message(nest(RECORDS[name], 100, record("BIG_INT", b""))))
    if name in ROWS:
        made += [nest(ROWS[name], LEVELS, root) for root in (message(7), message(BYTE, b"x"))]
        unknown = message(node("TENSOR", "float33", 0, numbers=[0, 0, 0]))
        wrong.append(nest(ROWS[name], 100, unknown))
    for frames in made:
        found = read(frames)
        assert name not in READ or not isinstance(found, Exception), found
    for frames in wrong:  # only the innermost is, so that its error comes through every level
        assert isinstance(read(frames), WireFormatError)


def test_every_kind_that_holds_others_is_here():
    assert {kind.name for kind, form in FORMS.items() if form.children != 0} == {*NODES}
    named = {name.split(",")[0] for name in RECORDS} - {"list", "map"}
    assert named == {kind.name for kind in RECORD_FIELDS}


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda n: message(nest(NODES["TUPLE"], n, BYTE), b"x"), 104),
        (lambda n: message(nest(RECORDS["TUPLE"], n, 1)), 104),
        (lambda n: message_of_rows(nest(RECORDS["TUPLE"], n - 1, 1)), 104),
        (lambda n: nest(ROWS["OBJECT_ARRAY"], n, message(1)), 104),
        (lambda n: nest(ROWS["OBJECT_ARRAY"], 50, nested_tensordicts(n - 50)), 104),
        (lambda n: message(nest(NODES["LAZY_STACK"], n, tensordict([1], {}))), 8),
        (lambda n: message(nest(NODES["NON_TENSOR_STACK"], n, forge.payload("x", 1))), 8),
    ],
)
def test_the_limit_of_depth(make, most):
    """Up to it a value is read, and past it refused."""
    for levels in (most - 4 if most > 100 else most, most + 2, most + 30, 4 * most):
        found = read(make(levels))
        assert isinstance(found, WireFormatError) == (levels > most)
        assert levels <= most or found.reason == "too_deep"


@pytest.mark.parametrize("text", ["x", "\u05e9", "\u00c7\u00d4"])  # the last bytes look like tags
@pytest.mark.parametrize("rows", [False, True])
def test_depth_does_not_depend_on_text(text, rows):
    for levels in (3, 4, 5, 50, 300):
        value: Any = text
        for i in range(levels):
            value = {"k": value} if i % 3 else [value]
        frames = message_of_rows(value) if rows else message(value)
        found = outcome(partial(decode, limits=Limits(depth=3 + rows)), frames)
        assert isinstance(found, WireFormatError) == (levels > 4), found
        assert levels <= 4 or found.reason == "too_deep"


WRAPS = {
    "tuple": lambda value: (value,),
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "dict, key 1": lambda value: {1: value},
    "slice": lambda value: slice(None, value),
    "payload": lambda value: NonTensorData((value,), batch_size=[1]),
    "object array": objects,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_encode_writes_decode_reads_at_the_deepest(wrap):
    leaves = [
        *((), torch.zeros(1), torch.eye(2).to_sparse_coo(), 2**70, 1j, b"x" * 5000, {2**70: 2**70}),
        *(torch.nested.nested_tensor([torch.ones(1)]), frozenset({2**70}), range(2**70)),
        *(objects(torch.ones(1)), TensorDict({"a": torch.eye(2).to_sparse_coo()}, [2])),
    ]
    for leaf in leaves:
        values = [leaf]
        for _ in range(105):
            values.append(WRAPS[wrap](values[-1]))
        too_deep = bisect.bisect_left(
            values, True, key=lambda value: isinstance(outcome(encode, value), TypeError)
        )
        assert too_deep > 31
        found = on_a_small_stack(lambda deepest: decode(encode(deepest)), values[too_deep - 1])
        assert not isinstance(found, Exception), found


@st.composite
def nested_values(draw, leaves, wraps=tuple(WRAPS)):
    """Values inside a few containers, some of which are nodes, some records."""
    value = draw(st.sampled_from(leaves))
    for wrap in draw(st.lists(st.sampled_from(wraps), max_size=5)):
        value = WRAPS[wrap](value)
    return value


LEAVES = [7, {}, 2**70, slice(0, 1), torch.ones(2), objects(1, [2]), objects([])]


@st.composite
def nested_batches(draw):
    """Messages of batches, each in one of the forms that `open_wire` reads, nested or not."""
    plain = nested_values(LEAVES[:2], ("list", "dict"))
    rows = draw(st.sampled_from([plain, nested_values(LEAVES[:4]), nested_values(LEAVES)]))
    rows = draw(st.lists(rows, min_size=2, max_size=2))
    payload = draw(st.just(1) | nested_values(LEAVES))
    stacks = {"rows": NonTensorStack(*map(NonTensorData, rows)), "ids": torch.ones(2)}
    batch = TensorDict({**stacks, "payload": NonTensorData((payload,), batch_size=[2])}, [2])
    if draw(st.booleans()):
        batch = TensorDict({"in": batch, "ids": torch.ones(2)}, [2])
    columns = {"rows": rows, "array": objects(*rows), "ids": torch.ones(2)}
    inner = {"in": columns, "inner": BatchedDataDict(columns)}
    dicts = [BatchedDataDict(each) for each in (columns, inner, {"rows": rows})]
    for each in dicts:
        each.meta_info = {"more": payload}
    forms = [batch, {"b": batch}, {"b": batch, "more": payload}, OrderedDict(b=batch, more=payload)]
    return encode(draw(st.sampled_from(forms + dicts)))


def each_column(batch):
    for column in map(batch.__getitem__, batch.fields):
        if isinstance(column, jagcodec.WireBatch):
            each_column(column)


@given(nested_batches())
def test_every_reader_of_a_batch_counts_the_same_levels(frames):
    readers = {
        "whole": lambda batch: batch.to_tensordict(),
        "each column": each_column,
        "rows": lambda batch: batch.rows([1, 0]).to_tensordict(),
        "joined": lambda batch: jagcodec.concat_rows([batch] * 2).to_tensordict(),
        "padded": jagcodec.materialize,
    }

    def opened(read, limits, frames):
        batch = open_wire(frames, limits=limits)
        _ = batch.meta
        read(batch)

    for depth in range(24):
        limits = Limits(depth=depth)
        whole = outcome(partial(decode, limits=limits), frames)
        for name, read in readers.items():
            found = outcome(partial(opened, read, limits), frames)
            expected = getattr(whole, "reason", None)
            assert getattr(found, "reason", None) == expected, (name, depth, expected, found)
