"""Everything that may lie inside itself: read or refused, in a thread of little stack."""

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from jagcodec import WireFormatError, decode, encode
from jagcodec.errors import JagcodecError
from jagcodec.wire.documents import RECORDS as RECORD_FIELDS
from jagcodec.wire.schema import FORMS
from tests.wire.forge import (
    list_of,
    map_of,
    message,
    message_of_rows,
    node,
    record,
    row_message,
    sparse_coo,
    tensordict,
)
from tests.wire.readers import chosen, fetched, on_a_small_stack

LEVELS = 102

NODES = {
    "TUPLE": lambda part: node("TUPLE", children=[part]),
    "LIST": list_of,
    "MAP": lambda part: map_of({"a": part}),
    "DICT": lambda part: node("DICT", children=[[1], part]),
    "NON_TENSOR_DATA": lambda part: node("NON_TENSOR_DATA", 1, numbers=[1], children=[part]),
    "TENSORDICT": lambda part: tensordict([1], {"a": part}),
    "USER": lambda part: node("USER", "slice", children=[node("TUPLE", children=[part, 0, 0])]),
    "LAZY_STACK": lambda part: node("LAZY_STACK", 0, children=[part]),
    "NON_TENSOR_STACK": lambda part: node("NON_TENSOR_STACK", 0, children=[part]),
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
    "USER": lambda value: record("USER", "slice", record("TUPLE", value, 0, 0)),
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
BYTE = node("BYTES", numbers=[0, 0, 1])
PAYLOAD = NODES["NON_TENSOR_DATA"]("x")


def inside(wraps, value, levels):
    for level in range(levels):
        value = wraps[level % len(wraps)](value)
    return value


def read(frames, *readers):
    """What `decode` makes of frames, after every other reader; errors for values."""
    for reader in (*readers, decode):
        found = on_a_small_stack(reader, frames)
        assert not isinstance(found, Exception) or isinstance(found, JagcodecError), repr(found)
    # Texts of errors go around every level, too.
    assert not isinstance(found, Exception) or len(str(found)) < 1000 * LEVELS
    return found


def batch_of(part):
    """A batch of one column that holds this."""
    return tensordict([1], {"x": node("NON_TENSOR_DATA", 1, numbers=[1], children=[part])})


@pytest.mark.parametrize("name", [*NODES, *RECORDS, *ROWS])
def test_a_kind_in_itself(name):
    # A slice lies around its tuple, which is a level of its own.
    levels = LEVELS // 2 if name == "USER" else LEVELS
    made, wrong = [], []
    if name in NODES:
        leaf = batch_of(BYTE) if name == "TENSORDICT" else BYTE
        part = inside([NODES[name]], leaf, levels)
        made.append(message(part, b"x"))
        # In a batch these are two levels more.
        read(message(part if name == "TENSORDICT" else batch_of(part), b"x"), chosen, fetched)
    if name in RECORDS:
        value = inside([RECORDS[name]], 7, levels)
        made += [message(value), message_of_rows(value)]
        made += [message_of_rows(value, row_message(message(1)))]
        made += [message_of_rows(row_message(message(value)))]
        read(message(batch_of(value)), chosen, fetched)
        wrong.append(message(inside([RECORDS[name]], record("BIG_INT", b""), 100)))
    if name in ROWS:
        made += [inside([ROWS[name]], root, LEVELS) for root in (message(7), message(BYTE, b"x"))]
        unknown = message(node("TENSOR", "float33", 0, numbers=[0, 0, 0]))
        wrong.append(inside([ROWS[name]], unknown, 100))
    for frames in made:
        found = read(frames)
        assert name not in READ or not isinstance(found, Exception), found
    for frames in wrong:  # only the innermost is, so that its error comes through every level
        assert isinstance(read(frames), WireFormatError)


def test_kinds_in_each_other():
    wraps = [NODES[name] for name in ("TUPLE", "MAP", "DICT", "LIST", "NON_TENSOR_DATA", "USER")]
    assert not isinstance(read(message(inside(wraps, BYTE, 80), b"x")), Exception)
    wraps = [RECORDS[name] for name in ("TUPLE", "map", "DICT", "list", "USER")]
    frames = message_of_rows(inside(wraps, 7, 40))
    assert not isinstance(read(inside([ROWS["OBJECT_ARRAY"]], frames, 40)), Exception)


def test_every_kind_that_holds_others_is_here():
    assert {kind.name for kind, form in FORMS.items() if form.children != 0} == {*NODES}
    named = {name.split(",")[0] for name in RECORDS} - {"list", "map"}
    assert named == {kind.name for kind in RECORD_FIELDS}


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda n: message(inside([NODES["TUPLE"]], BYTE, n), b"x"), 104),
        (lambda n: message(inside([RECORDS["TUPLE"]], 1, n)), 104),
        (lambda n: message_of_rows(inside([RECORDS["TUPLE"]], 1, n - 1)), 104),
        (lambda n: inside([ROWS["OBJECT_ARRAY"]], message(1), n), 104),
        (lambda n: message(inside([NODES["LAZY_STACK"]], tensordict([1], {}), n)), 8),
        (lambda n: message(inside([NODES["NON_TENSOR_STACK"]], PAYLOAD, n)), 8),
    ],
)
def test_the_limit_of_depth(make, most):
    """Up to it a value is read, and past it refused."""
    for levels in (most - 4 if most > 100 else most, most + 2, most + 30, 4 * most):
        found = read(make(levels))
        assert isinstance(found, WireFormatError) == (levels > most)
        assert levels <= most or found.reason == "too_deep"


def cells_of(value):
    cells = np.empty(1, dtype=object)
    cells[0] = value
    return cells


WRAPS = {
    "tuple": lambda value: (value,),
    "list": lambda value: [value],
    "dict": lambda value: {"a": value},
    "dict, key 1": lambda value: {1: value},
    "slice": lambda value: slice(None, value),
    "payload": lambda value: NonTensorData((value,), batch_size=[1]),
    "object array": cells_of,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_encode_writes_decode_reads_at_the_deepest(wrap):
    leaves = [
        *((), torch.zeros(1), torch.eye(2).to_sparse_coo(), 2**70, 1j, b"x" * 5000, {2**70: 2**70}),
        *(torch.nested.nested_tensor([torch.ones(1)]), frozenset({2**70}), range(2**70)),
        *(cells_of(torch.ones(1)), TensorDict({"a": torch.eye(2).to_sparse_coo()}, [2])),
    ]
    for leaf in leaves:
        values = [leaf]
        for _ in range(105):
            values.append(WRAPS[wrap](values[-1]))
        # As deep as it goes, looked for from both ends.
        low, high = 0, 105
        while high - low > 1:
            middle = (low + high) // 2
            try:
                encode(values[middle])
                low = middle
            except TypeError:
                high = middle
        assert low > 30
        found = on_a_small_stack(lambda deepest=values[low]: decode(encode(deepest)))
        assert not isinstance(found, Exception), found


def test_as_many_stacks_as_encode_writes_are_read():
    stack = TensorDict({"x": torch.ones(1)}, [])
    for _ in range(8):
        stack = LazyStackedTensorDict(stack, stack_dim=0)
    assert decode(encode(stack)).batch_size == (1,) * 8
    with pytest.raises(TypeError, match="8 stacks"):
        encode([LazyStackedTensorDict(stack, stack_dim=0)])
