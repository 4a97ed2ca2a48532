"""Everything that may lie inside itself, 102 times: read or refused where there is little stack."""

import pytest

from jagcodec import WireFormatError, decode, open_wire
from jagcodec.errors import JagcodecError
from jagcodec.wire.schema import FORMS, PER_KEY
from jagcodec.wire.spec import Kind
from tests.wire.forge import (
    blob,
    message,
    message_of_rows,
    node,
    record,
    row_message,
    sparse_coo,
    tensordict,
)
from tests.wire.many import WRAPS
from tests.wire.test_hostile import on_a_small_stack

LEVELS = 102


def of_stacks(kind):
    return lambda part: node(kind, 0, children=[part])


NODES = {
    **WRAPS,
    "LAZY_STACK": of_stacks("LAZY_STACK"),
    "NON_TENSOR_STACK": of_stacks("NON_TENSOR_STACK"),
    "SPARSE_COO": lambda part: sparse_coo(part, 0),
    "STRIDED_NESTED": lambda part: node("STRIDED_NESTED", 1, children=[part, 0]),
    "TENSOR_VIEWS": lambda part: node("TENSOR_VIEWS", children=[part, 0]),
}
RECORDS = {
    "list": lambda value: [value],
    "map": lambda value: {"a": value},
    "TUPLE": lambda value: record("TUPLE", value),
    "SET": lambda value: record("SET", value),
    "FROZENSET": lambda value: record("FROZENSET", value),
    "DICT": lambda value: record("DICT", 1, value),
    "DICT, key": lambda value: record("DICT", value, 1),
    "SCALAR": lambda value: record("SCALAR", "<i4", value),
    "NUMBERS": lambda value: record("NUMBERS", "int8", value),
    "BIG_INT": lambda value: record("BIG_INT", value),
    "USER": lambda value: record("USER", "growth.Box", {"value": value}),
    "PICKLE": lambda value: record("PICKLE", value),
}
ROWS = {
    kind: lambda frames, kind=kind: message_of_rows(row_message(frames), kind=kind)
    for kind in ("NON_TENSOR_ROWS", "OBJECT_ARRAY")
}
# These hold themselves, and are no deeper than what encode writes: they are read.
READ = {
    *("TUPLE", "LIST", "MAP", "DICT", "NON_TENSOR_DATA", "TENSORDICT", "list", "map"),
    *("FROZENSET", "USER", "NON_TENSOR_ROWS", "OBJECT_ARRAY"),
}
MIXED = ["TUPLE", "MAP", "DICT", "LIST", "NON_TENSOR_DATA", "USER"]


def leaf():
    return node("BYTES", numbers=[0, 0, 1])


def levels_of(name):
    """A registered type lies around its state, which is a level of its own."""
    return LEVELS // 2 if name == "USER" else LEVELS


def inside(wraps, value, levels=LEVELS):
    for level in range(levels):
        value = wraps[level % len(wraps)](value)
    return value


def batch_of(part):
    """A batch of one column that holds this."""
    return tensordict([1], {"x": node("NON_TENSOR_DATA", 1, numbers=[1], children=[part])})


def chosen(frames):
    batch = open_wire(frames)
    _ = batch.schema, batch.rows([0, 0]).to_tensordict()
    return batch.rows([0]).to_frames()


def fetched(frames):
    whole = blob(frames)
    return open_wire(lambda offset, size: whole[offset : offset + size]).to_tensordict()


def read(frames, *readers):
    """What `decode` makes of frames, after every other reader; errors for values."""
    outcomes = []
    for reader in (*readers, decode):
        found = on_a_small_stack(lambda reader=reader: reader(frames))
        assert not isinstance(found, Exception) or isinstance(found, JagcodecError), repr(found)
        outcomes.append(found)
    return outcomes[-1]


def check(name, found):
    if name in READ:
        assert not isinstance(found, Exception), found
    elif isinstance(found, WireFormatError):
        # Texts of errors go around every level, too.
        assert len(str(found)) < 1000 * LEVELS


@pytest.mark.parametrize("name", NODES)
def test_nodes(name):
    innermost = batch_of(leaf()) if name == "TENSORDICT" else leaf()
    part = inside([NODES[name]], innermost, levels_of(name))
    check(name, read(message(part, b"x")))
    if name == "TENSORDICT":
        check(name, read(message(part, b"x"), open_wire, chosen, fetched))
    else:
        # Two levels more, and its readers of columns.
        read(message(batch_of(part), b"x"), chosen, fetched)


@pytest.mark.parametrize("name", RECORDS)
def test_documents(name):
    value = inside([RECORDS[name]], 7, levels_of(name))
    check(name, read(message(value)))
    check(name, read(message_of_rows(value)))
    check(name, read(message_of_rows(value, row_message(message(1)))))
    check(name, read(message_of_rows(row_message(message(value)))))
    read(message(batch_of(value)), chosen, fetched)
    # Only the innermost is wrong, so that its error comes through every level.
    wrong = inside([RECORDS[name]], record("BIG_INT", b""), 100)
    assert isinstance(read(message(wrong)), WireFormatError)


@pytest.mark.parametrize("name", ROWS)
def test_messages_in_rows(name):
    for root in (message(7), message(leaf(), b"x"), message(record("TUPLE", 7))):
        check(name, read(inside([ROWS[name]], root)))
    # Each level is a row of a batch.
    frames = message(7)
    for _ in range(51):
        rows = row_message(message(batch_of(7))), 7
        frames = message_of_rows(row_message(frames), *rows, kind="OBJECT_ARRAY")
    assert not isinstance(read(frames), Exception)
    wrong = message(node("TENSOR", "float33", 0, numbers=[0, 0, 0]))
    assert isinstance(read(inside([ROWS[name]], wrong, 100)), WireFormatError)


@pytest.mark.parametrize("first", range(0, len(MIXED), 2))
def test_kinds_in_each_other(first):
    wraps = [NODES[name] for name in (*MIXED[first:], *MIXED[:first])]
    assert not isinstance(read(message(inside(wraps, leaf(), 80), b"x")), Exception)
    wraps = [RECORDS[name] for name in ("TUPLE", "map", "DICT", "list", "USER")]
    deep = inside(wraps, 7, 40)
    assert not isinstance(read(message_of_rows(row_message(message(deep)))), Exception)
    frames = message_of_rows(deep)
    for _ in range(40):
        frames = message_of_rows(row_message(frames), kind="OBJECT_ARRAY")
    assert not isinstance(read(frames), Exception)


def test_every_kind_that_holds_others_is_here():
    holders = {kind.name for kind, form in FORMS.items() if form.children not in (0,)}
    # COMPRESSED is at the root only.
    assert holders - {"COMPRESSED"} == set(NODES)
    assert PER_KEY != 0
    named = {name.split(",")[0] for name in RECORDS} - {"list", "map"}
    assert named == {kind.name for kind in Kind if kind.name in named}
