"""Remedies in errors work for the value at hand: tests take them from the text and run them."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, lazy_stack

from jagcodec import (
    BatchedDataDict,
    RowBuilder,
    concat_rows,
    decode,
    encode_rows,
    materialize,
    open_wire,
    pack_rows,
    select_rows,
    to_rows,
)
from jagcodec.errors import ArgumentError, ArgumentKeyError, ArgumentTypeError, JagcodecError

NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name.isprintable())


def said(call, kind=JagcodecError):
    """The text of the error of a call."""
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def option(text, name):
    """The value of an option in a remedy, such as ``dtypes={'ids': object}``."""
    known = {"torch": torch, "object": object}
    (found,) = {*re.findall(rf"{name}=(\{{.*?: [\w.]+\}})", text)[-1:]}
    return eval(found, known)


# --- names of columns --------------------------------------------------------------------------


REFUSED_ROWS = [  # rows of a column, and the option whose value in the error makes cells of them
    ([np.ones((4, 3)), np.ones((4, 2))], "ragged_dims"),
    ([[[1, 2], [3, 4]], [[5], [6]]], "ragged_dims"),
    ([[1, 2], "text"], "dtypes"),
    ([[1, None]], "dtypes"),
    ([[1, [2]]], "dtypes"),
    ([np.ones(2, np.int32), [0.5]], "dtypes"),
    ([np.ones(2, np.int32), np.ones(2)], "dtypes"),
    ([torch.ones(2).bfloat16(), [0.1]], "dtypes"),
    ([np.uint8(3), 300], "dtypes"),
    ([True, 2], "dtypes"),
]


@pytest.mark.parametrize(("rows", "name"), REFUSED_ROWS)
@pytest.mark.parametrize("make", [encode_rows, pack_rows])
@given(column=NAMES)
def test_remedies_name_the_column(make, rows, name, column):
    text = said(lambda: make({"first": [0] * len(rows), column: rows}))
    assert "..." not in text.replace(repr(column), "")
    options = {name: option(text, name)}
    assert list(options[name]) == [column]
    made = make({"first": [0] * len(rows), column: rows}, **options)
    assert len(made["first"] if make is pack_rows else open_wire(made)) == len(rows)


def test_remedies_of_columns_without_a_number_name_them():
    for call in (
        lambda: encode_rows({"ids": [[], []]}),
        lambda: encode_rows([], dtypes={"ids": torch.int64}),
        lambda: encode_rows({"ids": [[], []]}, dtypes={"ids": int}, ragged_dims={"ids": 2}),
        lambda: encode_rows({"ids": [[], []]}, dtypes={"ids": "int8"}, ragged_dims={"ids": 2}),
    ):
        assert re.search(r"dtypes=\{'ids': |dtypes\)\['ids'\]", said(call))


def test_remedies_of_a_growing_row_name_the_column():
    row = RowBuilder()
    row.append(ids=np.ones(2, np.int32))
    text = said(lambda: row.append(ids=[0.5]))
    again = RowBuilder(option(text, "dtypes"))
    again.append(ids=np.ones(2, np.int32))
    again.append(ids=[0.5])
    assert again.to_row()["ids"].tolist() == [1, 1, 0.5]


def test_warnings_name_the_column():
    lists = {"x y": [[np.ones(2), np.ones(2)]]}
    with pytest.warns(
        UserWarning, match=r"dtypes=\{'x y': their dtype\}.*dtypes=\{'x y': object\}"
    ):
        encode_rows(lists)
    ids, kinds = [[1, 2, 3], [1, 2, 3]], [np.ones((2, 3), np.int64)] * 2
    batch: dict[str, Any] = {"ids": ids, "kinds": kinds}
    with pytest.warns(UserWarning, match=r"\('kinds'\).*ragged_dims=\{'kinds': 2\}"):
        materialize(pack_rows(batch), pad_to_multiple=8)
    materialize(pack_rows(batch, ragged_dims={"kinds": 2}), pad_to_multiple=8)


# --- joins -------------------------------------------------------------------------------------


def in_each_form(frames) -> Iterator[list[Any]]:
    """Messages, batches of tensordict and dicts of columns."""
    yield frames
    yield [*map(decode, frames)]
    yield [BatchedDataDict(dict(decode(each).items())) for each in frames]


def plain(value):
    return value.tolist() if hasattr(value, "tolist") else value


NOT_ALIKE = [  # rows of a column in two processes: Python objects, and cells
    ([None, None], [np.ones((3, 2)), np.zeros((1, 2))]),
    ([None], [[1, 2]]),
    (["text"], [1.5]),
    ([{"a": 1}], [True, False]),
    ([b"png", None], [torch.ones(2)]),
]


@pytest.mark.parametrize(("objects", "cells"), NOT_ALIKE)
@pytest.mark.parametrize("order", [1, -1])
def test_columns_of_objects_and_of_cells_join_as_the_error_says(objects, cells, order):
    processes = [objects, cells][::order]
    for batches in in_each_form([encode_rows({"image": rows}) for rows in processes]):
        text = said(lambda batches=batches: concat_rows(batches)["image"], ArgumentTypeError)
        assert "expected one kind of column" in text
        dtypes = option(text, "dtypes")
        for joined in in_each_form([encode_rows({"image": x}, dtypes=dtypes) for x in processes]):
            rows = [row["image"] for row in to_rows(concat_rows(joined))]
            assert [*map(plain, rows)] == [plain(row) for rows in processes for row in rows]


def test_ragged_dims_of_a_join():
    wide = [torch.ones(3, n) for n in (5, 7)]
    for batches in in_each_form([encode_rows({"kinds": [row]}) for row in wide]):
        dims = option(said(lambda batches=batches: concat_rows(batches)["kinds"]), "ragged_dims")
        sent = [encode_rows({"kinds": [row]}, ragged_dims=dims) for row in wide]
        for joined in in_each_form(sent):
            assert [row.shape[-1] for row in concat_rows(joined)["kinds"].unbind()] == [5, 7]


def test_kinds_that_are_both_cells_are_not_made_objects():
    batches: list[dict[str, Any]] = [{"x": np.ones(1)}, {"x": TensorDict({}, [1])}]
    text = said(lambda: concat_rows(batches))
    assert "convert one of them" in text
    assert "object" not in text


# --- samples that lack something ---------------------------------------------------------------

LACKED: dict[str, tuple[Any, Any]] = {  # a row, and what stands for one that is missing
    "list": ([1, 2], []),
    "tuple": ((1.5, 2.5), []),
    "range": (range(3), []),
    "lists": ([[1, 2], [3, 4]], []),
    "array": (np.ones(3, np.int16), []),
    "image": (np.ones((3, 4, 4)), []),
    "bfloat16": (torch.ones(2, 3).bfloat16(), []),
    "float8": (torch.ones(2).to(torch.float8_e5m2), []),
    "messages": ([{"role": "user"}], []),
    "number": (1.5, 0.0),
    "bool": (True, False),
    "array of no dims": (np.array(3, np.uint8), np.uint8(0)),
    "text": ("text", None),
    "dict": ({"a": 1}, None),
    "bytes": (b"png", None),
}
SAID = {"list": "as [] for an empty row", "NoneType": "as None"}


@pytest.mark.parametrize("kind", LACKED)
@pytest.mark.parametrize("at", [0, 1])
def test_a_sample_without_a_name_gets_what_the_error_says(kind, at):
    row, other = LACKED[kind]
    samples = [{"uid": i, "x": row} for i in range(3)]
    del samples[at]["x"]
    text = said(lambda: encode_rows(samples), ArgumentKeyError)
    expected = "a sample with 'x'" if at == 0 else "a sample without 'x'"
    assert f"encode_rows('x'), row 1: expected the names of row 0, found {expected}" in text
    place = "in row 0" if at == 0 else "in this one"
    what = SAID.get(type(other).__name__, "as a number of the same type")
    assert text.endswith(f"pass it in every sample, {place} {what}")
    samples[at]["x"] = other
    found = [sample["x"] for sample in to_rows(encode_rows(samples))]
    if type(other) is list:
        assert [*map(len, found)] == [0 if i == at else len(row) for i in range(3)]
    else:
        assert [plain(each) == plain(row) for each in found] == [i != at for i in range(3)]


OF_TOKENS = [kind for kind, (row, other) in LACKED.items() if type(other) is list]


@pytest.mark.parametrize("kind", OF_TOKENS)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("dtypes", [None, {"x": torch.float32}])
def test_none_in_a_jagged_column_becomes_an_empty_row_as_the_error_says(kind, at, dtypes):
    if kind == "messages" or (dtypes and kind == "float8"):
        return  # objects; and numbers that do not become another dtype
    rows = [LACKED[kind][0]] * 3
    rows[at] = None
    text = said(lambda: encode_rows({"x": rows}, dtypes=dtypes), ArgumentTypeError)
    found = f"encode_rows('x'), row {at}: expected a row of numbers, found None"
    assert text.startswith(f"{found}; for a row without any, pass []; for a column of Python")
    rows[at] = []
    lengths = [0 if i == at else len(LACKED[kind][0]) for i in range(3)]
    assert open_wire(encode_rows({"x": rows}, dtypes=dtypes)).row_lengths("x").tolist() == lengths
    rows[at] = None
    objects = option(text, "dtypes")
    assert to_rows(encode_rows({"x": rows}, dtypes=objects))[at]["x"] is None


def test_none_among_numbers_still_asks_for_a_number():
    for rows in ([1.5, None], [[1.5, None]], [None, 2]):
        assert "put a number in its place" in said(lambda rows=rows: encode_rows({"x": rows}))


FEW_NUMBERS = {
    "bools": st.booleans(),
    "ints": st.integers(0, 99),
    "floats": st.integers(-99, 99).map(float),
    "int16": st.integers(-99, 99).map(np.int16),
    "float16": st.integers(-99, 99).map(np.float16),
    "bool_": st.booleans().map(np.bool_),
    "bfloat16": st.integers(-99, 99).map(lambda x: torch.tensor(x).bfloat16()),
    "uint8": st.integers(0, 99).map(lambda x: torch.tensor(x).byte()),
}
NAMED_DTYPES = {"bools": ["bool"], "ints": ["int8", "uint16", "float16", "float64"]} | {
    "floats": ["bfloat16", "float64"]
}


@given(st.data())
def test_what_the_error_puts_in_the_place_of_none_keeps_the_dtype(data):
    kind = data.draw(st.sampled_from(list(FEW_NUMBERS)))
    numbers = data.draw(st.lists(FEW_NUMBERS[kind], min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([None, *NAMED_DTYPES.get(kind, ())]))
    at = data.draw(st.integers(0, len(numbers)))
    form = data.draw(st.sampled_from([lambda x: x, lambda x: [x], lambda x: [[[y] for y in x]]]))
    dtypes = None if dtype is None else {"x": dtype}

    def encoded(numbers):
        return encode_rows({"x": form(numbers)}, dtypes=dtypes)

    text = said(lambda: encoded([*numbers[:at], None, *numbers[at:]]), ArgumentTypeError)
    (example,) = re.findall(r"in its place, such as (.*?);", text)
    value = eval(example)
    made = open_wire(encoded([*numbers[:at], value, *numbers[at:]]))
    assert made.schema["x"].dtype == open_wire(encoded(numbers)).schema["x"].dtype


@pytest.mark.parametrize("dtype", [None, "int64", "float32", "bool"])
def test_what_a_growing_row_puts_in_the_place_of_none_keeps_the_dtype(dtype):
    row = RowBuilder(None if dtype is None else {"x": dtype})
    row.append(x=[1, 1] if dtype != "bool" else [True, False])
    before = row.to_row()["x"].dtype
    text = said(lambda: row.append(x=[None]), ArgumentTypeError)
    (example,) = re.findall(r"in its place, such as (.*)$", text)
    row.append(x=[eval(example)])
    assert row.to_row()["x"].dtype == before


@pytest.mark.parametrize("dtypes", [None, {"ids": torch.int64}])
def test_none_for_a_growing_row_becomes_no_tokens_as_the_error_says(dtypes):
    row = RowBuilder(dtypes)
    row.append(ids=[1], mask=True)
    text = said(lambda: row.append(ids=None, mask=True), ArgumentTypeError)
    assert text.endswith("found None; pass [] for no tokens, or leave the column out")
    row.append(ids=[], mask=True)  # one number fills no tokens
    row.append({"mask": 1}, mask=[])
    assert [len(cells) for cells in row.to_row().values()] == [1, 1]


# --- lazy stacks -------------------------------------------------------------------------------


def of_sizes(*sizes, dtype=torch.float32, **more):
    return [TensorDict({"x": torch.ones(size, dtype=dtype), **more}, []) for size in sizes]


def batches(*sizes):
    return [TensorDict({"x": torch.ones(2, *size)}, [2]) for size in sizes]


TEXT = {"text": NonTensorData("a")}
REMEDIES = {
    ".contiguous()": lambda stack: stack.contiguous(),
    ".densify(layout=torch.jagged)": lambda stack: stack.densify(layout=torch.jagged),
    "pack_rows(stack.tensordicts)": lambda stack: pack_rows(stack.tensordicts),
    "encode_rows(stack.tensordicts)": lambda stack: encode_rows(stack.tensordicts),
    "each of its .tensordicts": lambda stack: concat_rows(stack.tensordicts),
}
CONTIGUOUS, DENSIFY, *ROWS, EACH = REMEDIES
STACKS = {  # a stack, and the remedies that work for it
    "rows of one size": (lazy_stack(of_sizes(2, 2)), [CONTIGUOUS, *ROWS]),
    "rows with objects": (lazy_stack(of_sizes(2, 2, **TEXT)), [CONTIGUOUS, *ROWS]),
    "ragged rows": (lazy_stack(of_sizes(1, 2)), [DENSIFY, *ROWS]),
    "ragged rows with objects": (lazy_stack(of_sizes(0, 2, **TEXT)), [DENSIFY, *ROWS]),
    "ragged cells": (lazy_stack(of_sizes((4, 2), (3, 2))), [DENSIFY, *ROWS]),
    "batches of one size": (lazy_stack(batches((3,), (3,))), [CONTIGUOUS, EACH]),
    "columns of one size": (lazy_stack(batches((3,), (3,)), 1), [CONTIGUOUS, EACH]),
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("function", [select_rows, materialize, to_rows])
def test_remedies_for_a_lazy_stack_work_for_this_one(name, function):
    stack, expected = STACKS[name]
    index = ([0],) if function is select_rows else ()
    text = said(lambda: function(stack, *index), ArgumentTypeError)
    assert [remedy for remedy in REMEDIES if remedy in text] == expected
    results = [materialize(REMEDIES[remedy](stack)) for remedy in expected]
    for made in results:
        function(made, *index)
    if EACH not in expected:
        assert all(torch.equal(made["x"], results[0]["x"]) for made in results)
        assert [*map(len, results)] == [len(stack)] * len(results)


NOT_DENSE = {
    "keys": [TensorDict({"x": torch.ones(2)}, []), TensorDict({"y": torch.ones(2)}, [])],
    "objects": [*of_sizes(2), *of_sizes(2, **TEXT)],
    "dtypes": [*of_sizes(2), *of_sizes(2, dtype=torch.int64)],
    "two dims": of_sizes((1, 2), (2, 1)),
    "numbers of dims": of_sizes((1, 2), (2,)),
    "kinds": [TensorDict({"x": torch.tensor(1)}, []), TensorDict({"x": NonTensorData(1)}, [])],
}


@pytest.mark.parametrize("name", NOT_DENSE)
def test_remedies_that_would_lose_columns_or_fail_are_not_named(name):
    stack = lazy_stack(NOT_DENSE[name])
    text = said(lambda: materialize(stack), ArgumentTypeError)
    assert [remedy for remedy in REMEDIES if remedy in text] == ROWS
    if name != "kinds":  # whose rows are two numbers
        assert "pass" in said(lambda: encode_rows(stack.tensordicts))  # has remedies of its own
    ragged = lazy_stack(batches((3,), (4,)), 1)
    text = said(lambda: select_rows({"x": ragged}, [0]), ArgumentError)
    assert [remedy for remedy in REMEDIES if remedy in text] == [EACH]
    assert [materialize(each)["x"].shape for each in ragged.tensordicts] == [(2, 3), (2, 4)]
