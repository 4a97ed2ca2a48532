"""The forms of one batch: with columns of every kind they join, and come back from a message."""

import itertools
import pickle
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor

from jagcodec import (
    BatchedDataDict,
    WireBatch,
    concat_rows,
    decode,
    encode,
    join_columns,
    materialize,
    open_wire,
    select_rows,
    to_blob,
    to_rows,
)
from jagcodec.types import Layout, PackedColumn
from tests.helpers import MESSAGES, Store
from tests.oracle import assert_same, table
from tests.wire.values import Turn

# --- columns of every kind, from the numbers of their rows -------------------------------------


def object_array(items, *shape):
    array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array.reshape(-1, *shape) if shape else array


def tokens(numbers):
    """Cells end to end, and where rows begin: of number n as many as it has after a division."""
    lengths = [n % 3 for n in numbers]
    return torch.tensor(numbers).repeat_interleave(torch.tensor(lengths)), np.cumsum([0, *lengths])


def jagged(numbers, dim=1):
    values, offsets = tokens(numbers)
    values = values.repeat(11, 1) if dim == 2 else values  # packed, no other dim has 11
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets), jagged_dim=dim)


def packed(numbers):
    values, offsets = tokens(numbers)
    steps = [i for a, b in itertools.pairwise(offsets) for i in range(b - a)]
    positions = torch.tensor(steps, dtype=torch.int64)
    return PackedColumn(
        values, torch.from_numpy(offsets).int(), int(np.diff(offsets).max()), positions
    )


def inner(numbers, tag):
    return {
        "tokens": jagged(numbers),
        "text": [{"n": n} for n in numbers],
        "tag": whole(numbers, tag),
    }


def turn(numbers):
    make: Any = Turn
    return make(tokens=torch.tensor(numbers), role="user", batch_size=[len(numbers)])


def whole(numbers, payload):
    return NonTensorData(payload, batch_size=[len(numbers)])


def listed(numbers):
    return [{"n": n} for n in numbers]


KINDS: dict[str, Any] = {
    "jagged": lambda numbers, tag: jagged(numbers),
    "of ragged dim 2": lambda numbers, tag: jagged(numbers, 2),
    "packed": lambda numbers, tag: packed(numbers),
    "scalars": lambda numbers, tag: torch.tensor(numbers).float(),
    "rectangle": lambda numbers, tag: torch.tensor([[n, -n] for n in numbers], dtype=torch.uint16),
    "strided nested": lambda numbers, tag: torch.nested.nested_tensor(
        [torch.full((n % 2, 1 + n % 3), float(n)) for n in numbers]
    ),
    "list": lambda numbers, tag: listed(numbers),
    "objects": lambda numbers, tag: object_array(listed(numbers)),
    "objects of two dims": lambda numbers, tag: object_array([*numbers, *listed(numbers)], 2),
    "stack": lambda numbers, tag: NonTensorStack(*listed(numbers)),
    "array in a leaf": lambda numbers, tag: whole(numbers, object_array(listed(numbers))),
    "payload": lambda numbers, tag: whole(numbers, {"tag": tag}),
    "text": lambda numbers, tag: np.array(["x" * n for n in numbers]),
    "bytes": lambda numbers, tag: np.array([[b"x" * n, b"y"] for n in numbers]),
    "times": lambda numbers, tag: np.array(numbers, dtype="M8[s]"),
    "numbers": lambda numbers, tag: np.array([[n, -n] for n in numbers], dtype=np.int16),
    "numbers of another byte order": lambda numbers, tag: np.array(numbers, dtype=">f8"),
    "dict": inner,
    "BatchedDataDict": lambda numbers, tag: BatchedDataDict(inner(numbers, tag)),
    "TensorDict": lambda numbers, tag: TensorDict(inner(numbers, tag), [len(numbers)]),
    "tensorclass": lambda numbers, tag: turn(numbers),
    "of the whole batch": lambda numbers, tag: UnbatchedTensor(torch.arange(5)),
}


# --- batches of such a column, in every form ---------------------------------------------------

IN_MEMORY: dict[str, Any] = {
    "TensorDict": lambda columns, rows: TensorDict(columns, [rows]),
    "dict": lambda columns, rows: columns,
    "BatchedDataDict": lambda columns, rows: BatchedDataDict(columns),
    "materialized": lambda columns, rows: materialize(columns, "jagged"),
    "decoded": lambda columns, rows: decode(encode(BatchedDataDict(columns))),
}
ENCODED = [*itertools.product(MESSAGES, ("TensorDict", "BatchedDataDict"))]


def held_as(form, columns, rows):
    if form in IN_MEMORY:
        return IN_MEMORY[form](columns, rows)
    kind, value = form
    return MESSAGES[kind](encode(IN_MEMORY[value](columns, rows)))


class Held(NamedTuple):
    """A batch of some form, and its rows."""

    batch: Any
    rows: list[dict[str, Any]]
    is_encoded: bool


def numbers_of_rows():
    return st.lists(st.integers(0, 9), min_size=1, max_size=4)


@st.composite
def held(draw, kind, name="x", numbers=None, tags="ab"):
    numbers = numbers or draw(numbers_of_rows())
    columns = {name: KINDS[kind](numbers, draw(st.sampled_from(tags)))}
    columns[f"rows of {name}"] = torch.tensor(numbers)  # because not every column says how many
    fit = [x for x in [*IN_MEMORY, *ENCODED] if kind != "packed" or "TensorDict" not in x]
    form = draw(st.sampled_from(fit))
    batch, rows = held_as(form, columns, len(numbers)), table(columns, len(numbers))
    chosen = draw(st.sampled_from([None, None, [0], []]))
    if chosen is not None and name == "x":
        batch, rows = select_rows(batch, chosen), [rows[i] for i in chosen]
    return Held(batch, rows, form in ENCODED)


def two(kind, **options):
    return st.tuples(held(kind, **options), held(kind, **options))


KIND = st.sampled_from([*KINDS])


@settings(max_examples=400)
@given(KIND.flatmap(two))
def test_every_two_forms_of_a_batch_join(pair):
    listed, rows = [each.batch for each in pair], pair[0].rows + pair[1].rows
    found = concat_rows(listed)
    assert table(found, len(rows)) == rows
    assert table(materialize(listed, "jagged"), len(rows)) == rows
    in_memory = [each.batch for each in pair if not each.is_encoded]
    assert type(found) is (type(in_memory[0]) if in_memory else WireBatch)
    if in_memory and isinstance(in_memory[0], dict):
        assert form_of(found["x"]) is form_of(in_memory[0]["x"])


def form_of(column):
    return NonTensorData if isinstance(column, NonTensorStack) else type(column)


@settings(max_examples=200)
@given(st.data())
def test_columns_of_every_two_forms_stand_side_by_side(data):
    numbers = data.draw(numbers_of_rows())
    pair = [data.draw(held(data.draw(KIND), name, numbers)) for name in ("a", "b")]
    found = join_columns([each.batch for each in pair])
    rows = [left | right for left, right in zip(*(each.rows for each in pair), strict=True)]
    assert table(found, len(numbers)) == rows


@settings(max_examples=300)
@given(st.data(), st.sampled_from(get_args(Layout)))
def test_what_materialize_returns_is_the_same_from_its_message(data, layout):
    """Of any columns, of any form; and messages of it are read, cut, joined and sent on."""
    numbers = data.draw(numbers_of_rows())
    known = KIND.filter(lambda kind: layout != "packed" or kind != "strided nested")
    kinds = data.draw(st.lists(known, max_size=3, unique=True))
    pairs = [data.draw(held(kind, f"c{i}", numbers)) for i, kind in enumerate(kinds)]
    batch = join_columns([each.batch for each in pairs]) if pairs else BatchedDataDict()
    found = materialize(batch, layout)
    frames = encode(found)
    for message in (frames, to_blob(frames), open_wire(Store(frames)), decode(frames)):
        assert_same(dict(materialize(message, layout)), dict(found))
    opened = open_wire(frames)
    assert (opened.fields, len(opened)) == (tuple(found), len(found))
    order = data.draw(st.permutations(range(len(numbers))))[: len(found)]
    chosen, rows = opened.rows(order), table(select_rows(found, order), len(order))
    sent = chosen.to_frames()
    parts: list[Any] = [chosen, sent, decode(sent), pickle.loads(pickle.dumps(chosen))]
    for part in parts:
        assert table(concat_rows([part]), len(order)) == rows
    assert_same(
        materialize([chosen, sent], "jagged"),
        materialize(concat_rows([found] * 2).rows([*order] * 2), "jagged"),
    )


@given(KIND.flatmap(lambda kind: two(kind, name="y", numbers=[3, 0, 5], tags="a")))
def test_rows_are_the_same_from_every_form(pair):
    for form in ("tensor", "list"):
        first, second = (to_rows(each.batch, as_=form) for each in pair)
        assert_same(second, first)
