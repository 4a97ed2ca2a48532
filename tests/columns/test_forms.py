"""The forms of one batch: they join, and come back from messages and pickles."""

import copy
import itertools
import pickle
from typing import Any, NamedTuple, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    RowBuilder,
    WireBatch,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    encode_fields,
    encode_rows,
    join_columns,
    kernels,
    materialize,
    open_wire,
    pack_jagged_fields,
    pack_rows,
    plan_micro_batches,
    plan_packing,
    repeat_rows,
    select_rows,
    split_rows,
    to_blob,
    to_rows,
)
from jagcodec.memory.tensor_bytes import from_bytes
from jagcodec.rows.nested import is_jagged
from jagcodec.testing import is_same
from jagcodec.types import Layout, PackedColumn
from jagcodec.wire.spec import TORCH_ITEMSIZES
from tests.helpers import MESSAGES, Store, run_python
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
    "strings": lambda numbers, tag: [None if n == 9 else "x" * n for n in numbers],
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
# Older tensordicts make tensors of numbers, and torch has one byte order.
NOT_IN_TENSORDICTS = {"packed", "numbers of another byte order"}
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
    forms = [*IN_MEMORY, *ENCODED]
    fit = [x for x in forms if kind not in NOT_IN_TENSORDICTS or "TensorDict" not in x]
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


@settings(max_examples=200)
@given(st.data())
def test_columns_in_memory_next_to_a_message_are_read_like_those_of_one_dict(data):
    """However many of the parts are messages, and whichever rows are chosen, joined or sent on."""
    numbers = data.draw(numbers_of_rows())
    kinds = data.draw(st.tuples(KIND, KIND))
    own = {name: KINDS[kind](numbers, "a") for name, kind in zip("ab", kinds, strict=True)}
    message = encode({"batch": TensorDict({"m": jagged(numbers)}, [len(numbers)])})
    count = torch.tensor(numbers)  # because not every column says how many rows there are
    others = [{name: own[name], f"rows of {name}": count} for name in own]
    parts = data.draw(st.permutations([message, *others]))
    found: Any = join_columns(parts)
    plain = {"m": jagged(numbers)} | others[0] | others[1]
    assert type(found) is WireBatch
    order = data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=4))
    expected = table(plain, len(numbers))
    chosen: Any = found.rows(order)
    sent: list[Any] = [chosen, decode(chosen.to_frames()), pickle.loads(pickle.dumps(chosen))]
    for batch in sent:
        assert table(batch, len(order)) == [expected[i] for i in order]
    both: Any = concat_rows([found, chosen, found.to_frames()])
    assert table(both, len(both)) == expected + [expected[i] for i in order] + expected
    lengths = found.row_lengths("m").tolist()
    for name, kind in zip("ab", kinds, strict=True):
        ragged = kind in ("jagged", "of ragged dim 2", "packed")
        of_rows = found.row_lengths(name)
        assert (of_rows.tolist() == lengths) if ragged else of_rows is None
        if is_jagged(found[name]):
            assert found[name].offsets() is found["m"].offsets()
            assert chosen[name].offsets() is chosen["m"].offsets()


@settings(max_examples=200)
@given(st.data())
def test_every_form_opens_to_the_same_methods(data):
    kind = data.draw(KIND)
    own = data.draw(held(kind))
    opened = open_wire(own.batch)
    assert (type(opened), opened.fields) == (WireBatch, ("x", "rows of x"))
    some = st.lists(st.sampled_from(range(len(own.rows))), max_size=4) if own.rows else st.just([])
    order = data.draw(some)
    assert table(opened, len(opened)) == own.rows
    assert table(opened.rows(order), len(order)) == [own.rows[i] for i in order]
    assert table(opened.select(["x"]), len(opened)) == [{"x": row["x"]} for row in own.rows]
    lengths = opened.row_lengths("x")
    ragged = kind in ("jagged", "of ragged dim 2", "packed")
    expected = [n % 3 for n in opened["rows of x"].tolist()] if ragged else None
    assert (None if lengths is None else lengths.tolist()) == expected


@pytest.mark.parametrize("options", [{"copy": True}, {"device": "cpu"}, {"allow_pickle": True}])
def test_options_of_messages_are_refused_for_batches_in_memory(options):
    for batch in ({"x": [1]}, TensorDict({"x": [1]}, [1]), open_wire({"x": [1]})):
        with pytest.raises(ArgumentError, match=r"open_wire\(source\).*found a batch in memory"):
            open_wire(batch, **options)


def test_dims_with_names_are_refused_where_a_batch_becomes_like_that_of_a_message():
    td: Any = TensorDict({"x": torch.ones(2)}, [2], names=["rows"])
    message = encode(TensorDict({"m": torch.ones(2)}, [2]))
    calls: dict[str, Any] = {
        r"open_wire\(source\)": lambda: open_wire(td),
        r"join_columns\(batches\[1\]\)": lambda: join_columns([message, td]),
    }
    for where, call in calls.items():
        with pytest.raises(ArgumentError, match=rf"{where}.*names, found \['rows'\]; set td.names"):
            call()
    td.names = None
    assert join_columns([message, td]).fields == ("m", "x")


def test_gradients_of_columns_next_to_a_message_are_those_of_the_dict():
    weights, values = torch.ones(3, requires_grad=True), torch.arange(4.0, requires_grad=True)
    column = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3, 4]))
    message = encode({"batch": TensorDict({"m": jagged([1, 2, 1])}, [3])})
    batch = join_columns([message, {"weight": weights, "x": column}])
    assert batch["weight"] is weights
    plan = plan_packing(batch["m"])
    for each in (batch, batch.rows([2, 0, 2]), concat_rows([batch, batch])):
        packed = plan_packing(each["m"]).pack(each)
        total = packed["x"].sum() + packed["weight"].sum() + each["x"].values().sum()
        total.backward()
    assert weights.grad.tolist() == [4, 3, 5]
    assert values.grad.tolist() == [8, 6, 6, 10]
    assert plan.pack(decode(batch.to_frames()))["x"].tolist() == [0, 1, 2, 3]


def test_rows_of_all_jagged_columns_of_a_batch_are_chosen_in_one_call():
    columns = {"a": jagged([1, 2, 0]), "b": jagged([4, 5, 3]), "c": jagged([1, 2, 0], 2)}
    message = open_wire(encode({"batch": TensorDict({"m": jagged([1, 2, 0])}, [3])}))
    forms = (columns, BatchedDataDict(columns), TensorDict(columns, [3]))
    joined = join_columns([message, columns]).select([*columns]).rows([1, 0])
    expected = [table(columns, 3)[i] for i in (1, 0)]
    calls: list[Any] = [lambda form=form: select_rows(form, [1, 0]) for form in forms]
    for call in (*calls, joined.to_tensordict):
        with mock.patch.object(kernels, "copy_all", wraps=kernels.copy_all) as copied:
            found = call()
        assert copied.call_count == 1
        assert table(found, 2) == expected


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


# --- a column that one function returns, in every other -----------------------------------------


def as_dict(column, numbers):
    return {"x": column, "rows of x": torch.tensor(numbers)}  # not every column says how many rows


def as_td(column, numbers):
    return TensorDict(as_dict(column, numbers), [len(numbers)])


def next_to_a_message(column, numbers):
    message = encode(TensorDict({"m": torch.tensor(numbers)}, [len(numbers)]))
    return join_columns([message, as_dict(column, numbers)])


def planned(column, numbers):
    keep: Any = ["x", ("x", "tokens"), ("x", "y")]
    return plan_packing([1] * len(numbers)).pack(as_dict(column, numbers), keep_jagged=keep)


def restored(results, numbers):
    rows = len(numbers)
    return plan_micro_batches([1] * rows, rows_per_batch=rows).restore([results])


def first_of(batches, numbers):
    joined: Any = concat_rows(batches)
    return joined.rows(range(len(numbers)))


OPEN: dict[str, Any] = {
    "in memory": lambda x, n: open_wire(as_dict(x, n)),
    "a TensorDict in memory": lambda x, n: open_wire(as_td(x, n)),
    "of a dict": lambda x, n: open_wire(encode(BatchedDataDict(as_dict(x, n)))),
    "of a TensorDict": lambda x, n: open_wire(encode(as_td(x, n))),
    "in a store": lambda x, n: open_wire(Store(encode(BatchedDataDict(as_dict(x, n))))),
    "joined": lambda x, n: first_of([encode(BatchedDataDict(as_dict(x, n)))] * 2, n),
    "joined with a batch in memory": lambda x, n: first_of(
        [open_wire(as_dict(x, n)), encode(BatchedDataDict(as_dict(x, n)))], n
    ),
    "chosen": lambda x, n: open_wire(encode(BatchedDataDict(as_dict(x, n)))).rows([*range(len(n))]),
    "chosen of a TensorDict": lambda x, n: open_wire(as_td(x, n)).rows([*range(len(n))]),
    "side by side": next_to_a_message,
}
READERS: dict[str, Any] = {
    **{name: lambda x, n, make=make: make(x, n)["x"] for name, make in OPEN.items()},
    "materialize": lambda x, n: materialize(as_dict(x, n), "jagged")["x"],
    "materialize, packed": lambda x, n: materialize(as_dict(x, n), "packed")["x"],
    "plan.pack": lambda x, n: planned(x, n)["x"],
    "restore": lambda x, n: restored(as_dict(x, n), n)["x"],
    "select_rows": lambda x, n: select_rows(as_dict(x, n), [*range(len(n))])["x"],
    "decode of a dict": lambda x, n: decode(encode(BatchedDataDict(as_dict(x, n))))["x"],
    "decode of a TensorDict": lambda x, n: decode(encode(as_td(x, n))).get("x"),
    "td[name] of a TensorDict": lambda x, n: decode(encode(as_td(x, n)))["x"],
    "to_tensordict": lambda x, n: open_wire(as_dict(x, n)).to_tensordict().get("x"),
    "to_rows": lambda x, n: [row["x"] for row in to_rows(as_dict(x, n))],
    "list(column)": lambda x, n: list(open_wire(as_dict(x, n))["x"]),
}
ACCEPT: dict[str, Any] = {
    "encode": lambda x, n: decode(encode(as_dict(x, n))),
    "encode of a BatchedDataDict": lambda x, n: decode(encode(BatchedDataDict(as_dict(x, n)))),
    "encode of a TensorDict": lambda x, n: decode(encode(as_td(x, n))),
    "encode_fields": lambda x, n: decode(encode_fields(as_dict(x, n))),
    "pack_jagged_fields": lambda x, n: pack_jagged_fields(as_dict(x, n)),
    "encode_rows": lambda x, n: decode(encode_rows(as_dict(x, n))),
    "pack_rows": lambda x, n: pack_rows(as_dict(x, n)),
    "join_columns": lambda x, n: join_columns([{"m": torch.tensor(n)}, as_dict(x, n)]),
    "join_columns with a message": next_to_a_message,
    "concat_rows": lambda x, n: concat_rows([as_dict(x, n)]),
    "select_rows": lambda x, n: select_rows(as_dict(x, n), [*range(len(n))]),
    "restore": lambda x, n: restored(as_dict(x, n), n),
    "restore of a column": lambda x, n: as_dict(restored(x, n), n),
    "restore of a TensorDict": lambda x, n: restored(as_td(x, n), n),
    "materialize": lambda x, n: materialize(as_dict(x, n), "jagged"),
    "plan.pack": planned,
    "open_wire": lambda x, n: open_wire(as_dict(x, n)),
    "open_wire of a TensorDict": lambda x, n: open_wire(as_td(x, n)),
    "BatchedDataDict": lambda x, n: BatchedDataDict(as_dict(x, n)),
    "BatchedDataDict.union": lambda x, n: BatchedDataDict(as_dict(x, n)).union(as_dict(x, n)),
}
OF_OBJECTS = {"list", "strings", "objects", "stack", "array in a leaf", "payload"}
AS_LIST, TAKES_ROWS = {"to_rows", "list(column)"}, {"encode_rows", "pack_rows"}


def is_open(kind, reader):
    return kind in ("dict", "BatchedDataDict", "TensorDict") and reader in OPEN


def fits(kind, reader, function=""):
    """Whether the reader takes columns of this kind, and the function what the reader returns."""
    if "TensorDict" in function and (reader == "materialize, packed" or is_open(kind, reader)):
        return False  # a TensorDict takes no PackedColumn, and an open batch as one payload
    if "TensorDict" in reader + function and kind in NOT_IN_TENSORDICTS:
        return False
    if kind == "strided nested":  # rows that differ in two dims
        return function not in TAKES_ROWS and reader not in {"materialize, packed", *AS_LIST}
    if kind == "of the whole batch":
        return function not in {*TAKES_ROWS, "restore of a column"} and reader not in AS_LIST
    if reader == "td[name] of a TensorDict":
        return kind != "payload"  # tensordict returns the payload itself
    return reader not in AS_LIST or kind in OF_OBJECTS | {"text", "times"}


@settings(max_examples=250)
@given(KIND, st.sampled_from([*READERS]), numbers_of_rows())
def test_a_column_that_one_function_returns_is_accepted_by_every_other(kind, reader, numbers):
    if not fits(kind, reader):
        return
    made, rows = KINDS[kind](numbers, "a"), len(numbers)
    column, expected = READERS[reader](made, numbers), table(as_dict(made, numbers), rows)
    for name, function in ACCEPT.items():
        if fits(kind, reader, name):
            found = table(function(column, numbers), rows)
            assert [row["x"] for row in found] == [row["x"] for row in expected], name
    again = READERS[reader](made, numbers)
    assert is_same(as_dict(column, numbers), as_dict(again, numbers))


@settings(max_examples=100)
@given(st.sampled_from(sorted(OF_OBJECTS)), st.sampled_from([*OPEN]), numbers_of_rows())
def test_whoever_reads_objects_gets_an_array_of_those_that_were_sent(kind, form, numbers):
    made, rows = KINDS[kind](numbers, "a"), len(numbers)
    sent = {"strings": made, "payload": [{"tag": "a"}] * rows}.get(kind, listed(numbers))
    batch = OPEN[form](made, numbers)
    nested = open_wire({"in": batch, "n": torch.tensor(numbers)})
    found = [batch["x"], dict(batch.items())["x"], batch.get("x"), nested["in"]["x"]]
    found += [materialize(batch)["x"], planned(made, numbers)["x"]]
    for column in found:
        assert (type(column), column.dtype, column.shape) == (np.ndarray, object, (rows,))
        assert_same(column.tolist(), sent)
    assert isinstance(batch.to_tensordict().get("x"), (NonTensorData, NonTensorStack))


@given(KIND, st.sampled_from([*OPEN]), numbers_of_rows())
def test_a_nested_batch_is_read_as_an_open_batch(kind, form, numbers):
    if not fits(kind, form):
        return
    made, rows = {"y": KINDS[kind](numbers, "a"), "n": torch.tensor(numbers)}, len(numbers)
    found = OPEN[form](made, numbers)["x"]
    assert (type(found), found.fields, len(found)) == (WireBatch, ("y", "n"), rows)
    assert table(found, rows) == table(made, rows)
    order = [*reversed(range(rows))]
    assert table(found.rows(order), rows) == table(made, rows)[::-1]


@given(st.data(), numbers_of_rows())
def test_groups_are_read_from_every_form(data, numbers):
    kind = data.draw(st.sampled_from(["strings", "text", "times", "scalars"]))
    reader = data.draw(st.sampled_from([*READERS]))
    firsts = [numbers.index(n) for n in numbers]
    lengths = [*range(1, len(numbers) + 1)]
    most = max(
        sum(n for n, first in zip(lengths, firsts, strict=True) if first == k) for k in firsts
    )

    def plan(groups):
        return plan_micro_batches(lengths, groups=groups, max_tokens=most).order.tolist()

    assert plan(READERS[reader](KINDS[kind](numbers, "a"), numbers)) == plan(firsts)


# --- pickles -----------------------------------------------------------------------------------


def pickled(value, protocol=5):
    """A value from its pickle, whose buffers are out of band where that is possible."""
    buffers: list[Any] = []
    with_buffers: Any = {"buffer_callback": buffers.append} if protocol == 5 else {}
    data = pickle.dumps(value, protocol, **with_buffers)
    return pickle.loads(data, buffers=[bytearray(buffer.raw()) for buffer in buffers])


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_of_an_open_batch_keeps_its_rows_and_meta_but_not_metas_and_options(protocol):
    metas = [{"step": step, "run": "a"} for step in (1, 2)]
    messages = [encode(TensorDict({"x": torch.arange(2)}, [2]), meta=meta) for meta in metas]
    chosen: Any = concat_rows(messages)
    chosen = chosen.rows([3, 0])
    found = pickled(chosen, protocol)
    assert (found.meta, found["x"].tolist()) == ({"run": "a"}, [1, 0])
    assert (chosen.metas, found.metas) == (metas, [{"run": "a"}])
    on_meta = open_wire(messages[0], device="meta")
    assert pickled(on_meta, protocol)["x"].device.type == "cpu"
    objects = encode(BatchedDataDict({"x": [Plain(1)]}), allow_pickle=True)
    found = pickled(open_wire(objects, allow_pickle=True), protocol)
    with pytest.raises(WireFormatError, match="pass allow_pickle=True on both sides"):
        found["x"]


class Plain:
    """What cannot be encoded, and can be pickled."""

    def __init__(self, value):
        self.value = value


class Kept(BatchedDataDict):
    """A batch with an attribute of its own."""

    note: str


# Below protocol 5, numpy pickles numbers in the byte order of the machine.
NATIVE = KIND.filter(lambda kind: "byte order" not in kind)


@given(st.lists(NATIVE, max_size=3, unique=True), numbers_of_rows(), st.integers(2, 5))
def test_a_batch_is_the_same_from_its_pickle(kinds, numbers, protocol):
    columns = {f"c{i}": KINDS[kind](numbers, "a") for i, kind in enumerate(kinds)}
    meta = {"step": 7, "weights": torch.ones(2, dtype=torch.float8_e5m2)}
    batch = BatchedDataDict({**columns, "inner": BatchedDataDict(columns, meta_info=meta)})
    batch.meta_info["again"] = meta
    found = pickled(batch, protocol)
    assert_same(found, batch)
    assert_same((found.meta_info, found["inner"].meta_info), (batch.meta_info, meta))
    ragged: list[Any] = [x for x in found.values() if is_jagged(x)]
    assert len({id(column.offsets()) for column in ragged}) <= 1


@pytest.mark.parametrize("protocol", [2, 5])
def test_tensors_of_every_dtype_are_pickled_wherever_they_are(protocol):
    for name in TORCH_ITEMSIZES:
        dtype = getattr(torch, name, None)
        if dtype is None:  # which this torch lacks
            continue
        cells = from_bytes(np.full(4 * dtype.itemsize, 1, np.uint8), dtype, (4,))
        column = torch.nested.nested_tensor_from_jagged(cells, torch.tensor([0, 1, 4]))
        batch = BatchedDataDict(
            {"jagged": column, "flat": cells[:2], "rows": [cells[:1], (cells[1:], {"x": cells})]},
            packed=materialize({"x": column}, "packed")["x"],
            td=TensorDict({"x": cells[2:], "jagged": column}, [2], device="cpu").lock_(),
            inner={"flat": cells[2:], "objects": object_array([{"x": cells}, None])},
            meta_info={"tensors": {"x": [cells]}},
        )
        found = pickled(batch, protocol)
        assert_same(found, batch)
        assert_same(found.meta_info, batch.meta_info)
        row = RowBuilder({"x": dtype})
        row.append(x=cells)
        row.set(image=cells.view(2, 2), note="text")
        again = pickled(row, protocol)
        assert_same(again.to_row(), row.to_row())
        again.append(x=cells)
        assert (len(again), len(row)) == (8, 4)


@pytest.mark.filterwarnings("ignore:TypedStorage")  # which torch uses for quantized tensors
def test_what_a_pickle_keeps_besides_values():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    leaf = torch.ones(2, requires_grad=True)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    packed = materialize({"a": jagged([1, 2]), "b": jagged([1, 2])}, "packed")
    shared = [Plain(1), Plain(torch.ones(2))]
    columns = {"weight": weight, "leaf": leaf, "again": leaf, "quantized": quantized, **packed}
    batch = Kept(columns, objects=shared, more=shared, csr=torch.eye(2).to_sparse_csr())
    batch.note = "kept"
    found = pickled(batch)
    assert (type(found), found.note) == (Kept, "kept")
    assert isinstance(found["weight"], torch.nn.Parameter)
    assert found["leaf"].requires_grad
    assert found["again"] is found["leaf"]
    assert found["more"] is found["objects"]
    assert found["objects"][0].value == 1
    assert found["a"].cu_seqlens is found["b"].cu_seqlens
    assert found["quantized"].is_quantized
    assert found["csr"].layout is torch.sparse_csr
    (found["leaf"] * 2).sum().backward()


def test_copies_alias_and_deep_copies_do_not():
    batch = Kept(
        {"ids": jagged([1, 2]), "x": torch.ones(2, dtype=torch.uint16)}, meta_info={"a": []}
    )
    one, other = copy.copy(batch), copy.deepcopy(batch)
    assert one["ids"] is batch["ids"]
    assert (type(one), one.meta_info["a"] is batch.meta_info["a"]) == (Kept, True)
    assert_same(other, batch)
    other["x"].zero_()
    other.meta_info["a"].append(1)
    assert (batch["x"].tolist(), batch.meta_info) == ([1, 1], {"a": []})
    row = RowBuilder()
    row.append(ids=[1, 2])
    row.set(note=[])
    for again in (copy.copy(row), copy.deepcopy(row)):
        again.append(ids=[3])
        assert (len(again), len(row)) == (3, 2)
    assert copy.copy(row).to_row()["note"] is row.to_row()["note"]


def test_large_columns_are_buffers_out_of_band_and_a_new_process_reads_them(tmp_path):
    batch = BatchedDataDict(x=torch.ones(2, 100_000, dtype=torch.uint16), text=["a", "b"])
    buffers: list[Any] = []
    data = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    assert len(data) < 2000
    assert 400_000 < sum(len(buffer.raw()) for buffer in buffers) < 402_000
    (tmp_path / "batch").write_bytes(pickle.dumps(batch))
    code = "import pickle, sys; b = pickle.load(open(sys.argv[1], 'rb')); print(b, b['x'].dtype)"
    printed = run_python(code, tmp_path / "batch").stdout
    assert printed == "BatchedDataDict(rows=2, columns=['x', 'text']) torch.uint16\n"


# --- gradients ---------------------------------------------------------------------------------


def followed(kind):
    """Rows of 3 and 2 cells that autograd follows, and the tensor that gets the gradient."""
    cells = torch.arange(1.0, 6)
    if kind == "values":
        cells.requires_grad_()
        return torch.nested.nested_tensor_from_jagged(cells, torch.tensor([0, 3, 5])), cells
    leaf = torch.nested.nested_tensor([cells[:3], cells[3:]], layout=torch.jagged).detach()
    leaf.requires_grad_()
    return (leaf if kind == "leaf" else torch.mul(leaf, 1)), leaf


PASS_GRADIENTS: dict[str, Any] = {
    "materialize": lambda x: materialize({"x": x})["x"],
    "materialize, moved": lambda x: materialize({"x": x}, device="cpu")["x"],
    "materialize, jagged": lambda x: materialize({"x": x}, "jagged", pad_to_seqlen=9)["x"].values(),
    "materialize, packed": lambda x: materialize({"x": x}, "packed")["x"].values,
    "pack": lambda x: plan_packing([3, 2], row_multiple=4).pack(x),
    "pack, a batch": lambda x: plan_packing([3, 2]).pack({"x": x})["x"],
    "select_rows": lambda x: select_rows({"x": x}, [1, 0])["x"].values(),
    "split_rows": lambda x: torch.cat([each["x"].values() for each in split_rows({"x": x}, 2)]),
    "repeat_rows": lambda x: repeat_rows({"x": x}, 2)["x"].values()[[0, 1, 2, -2, -1]],
    "concat_rows": lambda x: concat_rows([{"x": x}, {"x": x.detach()}])["x"].values(),
    "join_columns": lambda x: join_columns([{"x": x}, {"y": torch.ones(2)}])["x"].values(),
    "to_rows": lambda x: torch.cat([row["x"] for row in to_rows({"x": x})]),
}


@pytest.mark.parametrize("name", PASS_GRADIENTS)
def test_gradients_pass_whatever_autograd_follows(name):
    for kind in ("values", "leaf", "function"):
        column, leaf = followed(kind)
        PASS_GRADIENTS[name](column).sum().backward()
        found: Any = leaf.grad
        assert (found.values() if found.is_nested else found).tolist() == [1] * 5, kind
