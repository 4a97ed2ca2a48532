"""Every kind of column, in every form of a batch, for every reader: always the same rows."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor

from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    concat_rows,
    decode,
    encode,
    encode_fields,
    join_columns,
    materialize,
    open_wire,
    plan_micro_batches,
    select_rows,
    to_rows,
)
from jagcodec.errors import ArgumentTypeError
from jagcodec.types import PackedColumn
from tests.oracle import bits, pad_rows
from tests.wire.values import Turn

ROWS = [[5], [], [7, 8, 9]]
"""The cells of the rows of most columns."""


def object_array(items):
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def nested(layout, dtype=torch.int64):
    return torch.nested.nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in ROWS], layout=layout
    )


def of_ragged_dim_2():
    values = torch.tensor([[5, 7, 8, 9], [-5, -7, -8, -9]])
    offsets = torch.tensor([0, 1, 1, 4])
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)


def packed():
    offsets, steps = torch.tensor([0, 1, 1, 4], dtype=torch.int32), torch.tensor([0, 0, 1, 2])
    return PackedColumn(torch.tensor([5, 7, 8, 9]), offsets, 3, steps)


def inner():
    return {"ids": nested(torch.jagged), "uid": [*"abc"], "reward": torch.tensor([1.0, 2.0, 3.0])}


def inner_rows():
    pairs = zip(cells(ROWS), [*"abc"], [1.0, 2.0, 3.0], strict=True)
    return [{"ids": a, "uid": b, "reward": cell(c, torch.float32)} for a, b, c in pairs]


def cell(numbers, dtype=torch.int64):
    """A tensor as its dtype, and its bits in nested lists."""
    return str(dtype), bits(torch.tensor(numbers, dtype=dtype))


def cells(rows, dtype=torch.int64):
    return [cell(row, dtype) for row in rows]


OBJECTS = [{"n": 1}, None, "text"]
TURN: Any = Turn
KINDS: dict[str, tuple[Any, list[Any]]] = {
    "scalars": (lambda: torch.tensor([1.0, -2.0, 3.0]), cells([1.0, -2.0, 3.0], torch.float32)),
    "rectangle": (lambda: torch.tensor([[1, 2], [3, 4], [5, 6]]), cells([[1, 2], [3, 4], [5, 6]])),
    "jagged": (lambda: nested(torch.jagged), cells(ROWS)),
    "ragged dim 2": (of_ragged_dim_2, cells([[row, [-n for n in row]] for row in ROWS])),
    "strided nested": (
        lambda: nested(torch.strided, torch.float32),
        cells(ROWS, torch.float32),
    ),
    "sparse": (
        lambda: torch.tensor([[0, 1], [2, 0], [0, 0]]).to_sparse(),
        cells([[0, 1], [2, 0], [0, 0]]),
    ),
    "packed": (packed, cells(ROWS)),
    "numbers": (
        lambda: np.array([[1, 2], [3, 4], [5, 6]], np.int16),
        cells([[1, 2], [3, 4], [5, 6]], torch.int16),
    ),
    "texts": (lambda: np.array(["a", "bcd", ""]), ["a", "bcd", ""]),
    "times": (
        lambda: np.array([1, 2, 3], "M8[s]"),
        [np.datetime64(n, "s") for n in (1, 2, 3)],
    ),
    "array of objects": (lambda: object_array(OBJECTS), OBJECTS),
    "list": (lambda: [*OBJECTS], OBJECTS),
    "NonTensorStack": (lambda: NonTensorStack(*map(NonTensorData, OBJECTS)), OBJECTS),
    "NonTensorData": (lambda: NonTensorData({"v": 1}, batch_size=[3]), [{"v": 1}] * 3),
    "UnbatchedTensor": (lambda: UnbatchedTensor(torch.arange(2)), [cell([0, 1])] * 3),
    "tensorclass": (
        lambda: TURN(tokens=torch.tensor([1, 2, 3]), role="user", batch_size=[3]),
        [{"tokens": cell(n), "role": "user"} for n in (1, 2, 3)],
    ),
    "dict": (inner, inner_rows()),
    "BatchedDataDict": (lambda: BatchedDataDict(inner()), inner_rows()),
    "TensorDict": (lambda: TensorDict(inner(), [3]), inner_rows()),
}


def columns_of(kind):
    return {"x": KINDS[kind][0](), "n": torch.arange(3)}


def as_dict(kind):
    return BatchedDataDict(columns_of(kind))


def message(kind):
    return encode(as_dict(kind))


def side_by_side(kind):
    return join_columns([encode(TensorDict({"m": torch.arange(3)}, [3])), columns_of(kind)])


def restored(kind):
    plan = plan_micro_batches([2, 1, 3], max_tokens=3)
    steps = [rows for steps in plan for rows in steps]
    assert len(steps) > 1
    return plan.restore([select_rows(columns_of(kind), rows) for rows in steps])


ALL, SOME, RANGE = [0, 1, 2], [2, 0, 2], [1, 2]
FORMS: dict[str, tuple[Any, list[int]]] = {
    "dict": (columns_of, ALL),
    "BatchedDataDict": (as_dict, ALL),
    "TensorDict": (lambda kind: TensorDict(columns_of(kind), [3]), ALL),
    "rows of a dict": (lambda kind: select_rows(columns_of(kind), SOME), SOME),
    "opened, rows of a dict": (lambda kind: open_wire(columns_of(kind)).rows(SOME), SOME),
    "opened, range of a dict": (lambda kind: open_wire(columns_of(kind)).rows(slice(1, 3)), RANGE),
    "joined dicts": (lambda kind: concat_rows([columns_of(kind)] * 2), ALL * 2),
    "message": (message, ALL),
    "message of a TensorDict": (lambda kind: encode(TensorDict(columns_of(kind), [3])), ALL),
    "rows of a message": (lambda kind: open_wire(message(kind)).rows(SOME), SOME),
    "range of a message": (lambda kind: open_wire(message(kind)).rows(slice(1, 3)), RANGE),
    "joined messages": (lambda kind: concat_rows([message(kind)] * 2), ALL * 2),
    "rows of joined messages": (
        lambda kind: concat_rows([message(kind)] * 2).rows([5, 0, 4]),
        [2, 0, 1],
    ),
    "side by side": (side_by_side, ALL),
    "rows side by side": (lambda kind: side_by_side(kind).rows(SOME), SOME),
    "results of micro-batches": (restored, ALL),
}


def rows_of(column, count):
    """The rows of a column: tensors as `cell`, objects unchanged, batches as dicts of these."""
    if hasattr(column, "row_lengths"):
        column = column.to_tensordict()
    if isinstance(column, UnbatchedTensor):
        tensor = column if isinstance(column, torch.Tensor) else column.data
        return [row_of(torch.Tensor.as_subclass(tensor, torch.Tensor))] * count
    if isinstance(column, NonTensorStack):
        return [row_of(item) for item in column.tolist()]
    if isinstance(column, NonTensorData):
        data = column.data
        return [row_of(x) for x in data] if isinstance(data, np.ndarray) else [data] * count
    if isinstance(column, PackedColumn):
        pairs = itertools.pairwise(column.cu_seqlens.tolist())
        return [row_of(column.values[a:b]) for a, b in pairs]
    if isinstance(column, torch.Tensor):
        return [row_of(row) for row in column.unbind()]
    if isinstance(column, (np.ndarray, list)):
        return [row_of(item) for item in column]
    if isinstance(column, TURN):
        return [row_of(column[i]) for i in range(count)]
    names = {name: rows_of(leaf, count) for name, leaf in column.items()}
    return [{name: rows[i] for name, rows in names.items()} for i in range(count)]


def row_of(value):
    if isinstance(value, TURN):
        return {"tokens": row_of(value.tokens), "role": value.role}
    if isinstance(value, np.ndarray | np.number) and value.dtype.kind in "iuf":
        value = torch.from_numpy(np.asarray(value))
    if isinstance(value, torch.Tensor):
        return str(value.dtype), bits(value.to_dense())
    if isinstance(value, dict):
        return {name: row_of(each) for name, each in value.items()}
    return value


READERS: dict[str, Any] = {
    "batch[name]": lambda batch, count: rows_of(open_wire(batch)["x"], count),
    "to_tensordict": lambda batch, count: rows_of(open_wire(batch).to_tensordict().get("x"), count),
    "materialize": lambda batch, count: rows_of(materialize(batch, "jagged")["x"], count),
    "to_rows": lambda batch, count: [row_of(row["x"]) for row in to_rows(batch)],
    "decode": lambda batch, count: rows_of(decode(encode(open_wire(batch))).get("x"), count),
    "to_frames": lambda batch, count: rows_of(open_wire(open_wire(batch).to_frames())["x"], count),
}


NOT_IN_TENSORDICTS = {"packed"}
WHOLE = {"dict", "BatchedDataDict", "TensorDict", "message", "message of a TensorDict"}
WHOLE |= {"side by side"}
"""The forms in which rows were neither chosen nor joined."""


def cells_of_table():
    """Each kind with each form that can hold it."""
    for kind, form in itertools.product(KINDS, FORMS):
        if kind not in NOT_IN_TENSORDICTS or "TensorDict" not in form:
            yield pytest.param(kind, form, id=f"{kind}, {form}")


@pytest.mark.parametrize(("kind", "form"), [*cells_of_table()])
def test_a_column_has_the_same_rows_in_every_form_for_every_reader(kind, form):
    (make, order), expected = FORMS[form], KINDS[kind][1]
    for name, read in READERS.items():
        if kind == "sparse" and form not in WHOLE:
            with pytest.raises(ArgumentError, match=r"'x'.*call \.to_dense\(\)"):
                read(make(kind), len(order))
        else:
            assert read(make(kind), len(order)) == [expected[i] for i in order], name


@pytest.mark.parametrize(("kind", "form"), [*itertools.product(["jagged", "packed"], FORMS)])
def test_a_rectangle_of_a_column_is_the_same_from_every_form(kind, form):
    if kind == "packed" and "TensorDict" in form:
        return
    make, order = FORMS[form]
    found = materialize(make(kind), pad_value_dict={"x": -1})["x"]
    rows = [ROWS[i] for i in order]
    assert bits(found) == pad_rows(rows, max(map(len, rows)), -1)


# --- what is not a column ----------------------------------------------------------------------


class Unknown:
    """A type that is not in the table of columns."""


DOORS: dict[str, Any] = {
    "open_wire(source)['x']": open_wire,
    "select_rows(batch)['x']": lambda batch: select_rows(batch, [0]),
    "concat_rows(batches[0])['x']": lambda batch: concat_rows([batch, batch]),
    "join_columns(batches[0])['x']": lambda batch: join_columns([batch, {"y": [1, 2]}]),
    "encode_fields('x')": encode_fields,
    "materialize(td)['x']": materialize,
    "to_rows['x']": to_rows,
    "BatchedDataDict['x']": BatchedDataDict,
}


@pytest.mark.parametrize("path", DOORS)
def test_a_value_that_is_not_a_column_is_refused_with_its_path_its_type_and_a_remedy(path):
    """Alone, and in a dict of columns; before any column is read."""
    remedies = r"put values of the batch into meta_info|use torch.tensor or stack_or_nest"
    for value, named in ((Unknown(), "Unknown"), (range(2), "range"), (3, "int|3")):
        for batch, inner in (({"x": value}, ""), ({"x": {"y": value}}, "y")):
            with pytest.raises(ArgumentTypeError) as caught:
                DOORS[path]({"n": torch.arange(2), **batch})
            error = caught.value
            assert error.reason == "bad_type"
            assert error.path.startswith(path.rstrip(")]").rstrip("'")), error.path
            assert inner in error.path
            assert re.search(rf"expected .*, found (?:{named})\b.*; (?:{remedies})", error.detail)
