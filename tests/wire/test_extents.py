"""Columns without cells, whose other dims may be anything: a value, or an error of this library.

Torch multiplies the dims next to one of 0, and joins, chosen rows, rectangles and masks add them up
and multiply them again.
"""

import functools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import jagcodec
from jagcodec import (
    ArgumentError,
    BatchedDataDict,
    Limits,
    WireFormatError,
    concat_rows,
    decode,
    encode,
    materialize,
    open_wire,
    select_rows,
)
from jagcodec.memory.extents import lists_of
from tests.helpers import nested
from tests.wire import forge
from tests.wire.forge import Draft, jagged, message, tensor, tensordict
from tests.wire.readers import BATCH_READERS, WHOLE_BATCH_READERS, agree, outcome, refused

pytestmark = pytest.mark.filterwarnings("ignore")

# What two of them multiply to, and a hundred add up to, is below, at and past 2**56 and 2**63. None
# is between 4 and 2**48: no machine has as many bytes, so that a mask of such rows is refused.
DIMS = st.sampled_from(
    [0, 0, 0, 1, 1, 2, 3, *(1 << bits for bits in (48, 50, 52, 53, 55, 56, 60, 62))]
    + [(1 << 53) - 1, (1 << 56) - 1, (1 << 63) - 8, (1 << 63) - 1]
)
DTYPES = st.sampled_from(
    ["uint8", "bool", "int4", "int16", "bits16", "float32", "int64", "uint64", "complex128"]
)
MANY = 130


def without_cells(draw, *dims):
    """Dims that begin like this, with one of 0 among them."""
    shape = [*dims, *draw(st.lists(DIMS, max_size=2))]
    return shape if 0 in shape else [*shape, 0]


@st.composite
def columns(draw, f, rows):
    """A column of a batch under way."""
    kind = draw(st.sampled_from(["tensor", "jagged", "jagged 2", "sparse", "nested", "components"]))
    dtype = draw(DTYPES)
    lengths = draw(st.lists(DIMS, min_size=rows, max_size=rows))
    total = sum(lengths)
    if kind == "nested":
        return tensordict([rows], {"x": draw(columns(f, rows))})
    if kind == "sparse":
        dims = [rows, *draw(st.lists(DIMS, min_size=1, max_size=2))]
        indices, values = tensor("int64", [len(dims), 0]), tensor(dtype, [0])
        return forge.sparse_coo(indices, values, 0, dims)
    if kind == "components" and rows:
        sizes = [size for _ in range(rows) for size in without_cells(draw, draw(DIMS))[-2:]]
        children = [tensor(dtype, [0]), tensor("int64", [rows, 2], *f.put(forge.int64s(*sizes)))]
        return forge.node("STRIDED_NESTED", 2, children=children)
    if kind == "tensor" or total >= 1 << 63:
        return tensor(dtype, without_cells(draw, rows))
    before = [draw(DIMS)] if kind == "jagged 2" else []
    shape = without_cells(draw, *before, total)
    return jagged(f.shared_group(lengths), len(before) + 1, shape, dtype, 0, 0)


@st.composite
def messages(draw):
    f, rows = Draft(), draw(st.integers(0, 3))
    leaves = {name: draw(columns(f, rows)) for name in ("a", "b")}
    return f.message(tensordict([rows], leaves)), rows


PADDINGS: list[dict[str, Any]] = [
    {},
    *({"pad_to_multiple": multiple} for multiple in (8, 1 << 62)),
    *({"padding_side": side} for side in ("left", {"a": "left"})),
    *({"layout": layout} for layout in ("jagged", "packed")),
    *({"attention_mask_of": name} for name in ("a", {"a": "m", "b": "n"})),
    *({"pad_to_seqlen": width} for width in (1 << 56, (1 << 63) - 1)),
]


def calls_on(batch, rows):
    """What may be done with a batch in memory, open, or in a message."""
    some = [[0], [0] * MANY] if rows else []
    for padding in PADDINGS:
        yield functools.partial(materialize, batch, **padding)
        yield functools.partial(materialize, [batch] * 2, **padding)
    for index in ([], slice(0, 1), *some):
        yield functools.partial(select_rows, batch, index)
        yield lambda index=index: materialize(select_rows(batch, index))
    for number in (2, MANY):
        yield functools.partial(concat_rows, [batch] * number)
        yield functools.partial(materialize, [batch] * number)
        yield functools.partial(jagcodec.repeat_rows, batch, number)
    for form in ("tensor", "array", "list"):
        yield functools.partial(jagcodec.to_rows, batch, as_=form)
    yield functools.partial(jagcodec.split_rows, batch, 1)
    yield functools.partial(jagcodec.padding_tax, batch)
    for options in ({}, {"narrow": True, "elide": True}):
        yield lambda options=options: decode(encode(materialize(batch), **options))


def calls_on_open(frames, rows):
    """What may be done with one open message or several, which read columns when they are asked."""
    some = [[0], [0] * MANY] if rows else []
    chosen = [lambda index=index: open_wire(frames).rows(index) for index in ([], *some)]
    joined = [lambda n=n: concat_rows([frames] * n) for n in (2, MANY)]
    for opened in (lambda: open_wire(frames), *chosen, *joined):
        yield lambda opened=opened: opened().to_tensordict()
        yield lambda opened=opened: decode(opened().to_frames())
        yield lambda opened=opened: materialize(opened())
        yield lambda opened=opened: pickle.loads(pickle.dumps(opened())).to_tensordict()
        yield lambda opened=opened: [*opened().schema.items(), opened().row_lengths("a")]


@settings(max_examples=30)
@given(messages())
def test_any_dims_in_a_message(made):
    """Both readers agree. What is read can be used, or is the caller's mistake; nothing wraps."""
    frames, rows = made
    if not agree(frames):
        for read in (decode, *WHOLE_BATCH_READERS.values()):
            refused(read, frames)
        return
    for read in BATCH_READERS.values():
        assert not isinstance(outcome(read, frames), WireFormatError)
    value = decode(frames)
    for call in (*calls_on(frames, rows), *calls_on(value, rows), *calls_on_open(frames, rows)):
        assert not isinstance(outcome(lambda _: call(), frames), WireFormatError)  # noqa: B023


@st.composite
def columns_in_memory(draw, rows):
    """A column that torch or numpy makes, with dims that no message has."""
    kind = draw(st.sampled_from(["tensor", "array", "jagged", "components"]))
    dtype = getattr(torch, draw(st.sampled_from(["uint8", "float32", "complex128", "int4"])))
    shape = without_cells(draw, rows)
    if kind == "tensor":
        return torch.empty(shape, dtype=dtype)
    if kind == "array":
        return np.empty(shape, np.int16)
    lengths = draw(st.lists(DIMS, min_size=rows, max_size=rows))
    if kind == "components":
        parts = [torch.empty([length, 0], dtype=dtype) for length in lengths]
        return torch.nested.as_nested_tensor(parts, layout=torch.strided)
    values = torch.empty([sum(lengths), *shape[1:], 0], dtype=dtype)
    offsets = torch.tensor([0, *np.cumsum(lengths, dtype=object)])
    bounds: Any = {"min_seqlen": min(lengths, default=0), "max_seqlen": max(lengths, default=0)}
    return torch.nested.nested_tensor_from_jagged(values, offsets, **bounds)


def made_by_torch(draw, rows):
    """Such a column, or another one where torch itself refuses the dims."""
    try:
        return draw(columns_in_memory(rows))
    except (RuntimeError, ValueError, TypeError):
        return torch.empty(rows, 0)


@settings(max_examples=30)
@given(st.integers(0, 3), st.data())
def test_any_dims_in_memory(rows, data):
    made = {name: made_by_torch(data.draw, rows) for name in ("a", "b")}
    batches: list[Any] = [BatchedDataDict(made)]
    if not any(isinstance(column, np.ndarray) for column in made.values()):
        batches.append(TensorDict(made, [rows]))
    for batch in batches:
        for call in calls_on(batch, rows):
            assert not isinstance(outcome(lambda _: call(), None), WireFormatError)  # noqa: B023


@pytest.mark.parametrize("itemsize", [1, 2, 8, 16])
def test_the_bound_of_dims_next_to_one_of_zero(itemsize):
    """A column that could have cells is read, whatever its dims are; past that all refuse it."""
    name = {1: "uint8", 2: "int16", 8: "int64", 16: "complex128"}[itemsize]
    most = (1 << 56) // itemsize
    for wide in (151_936, 1 << 40, most - 1, most):
        column = torch.empty(0, wide, dtype=getattr(torch, name))
        for leaf, groups in (
            (tensor(name, [2, 0, wide]), []),
            (jagged(0, 1, [0, wide], name, 0, 0), [[0, 0, 2, 0, 0]]),
        ):
            frames = message(tensordict([2], {"a": leaf}), bytes(24), groups=groups)
            accepted = wide * itemsize * (2 if not groups else 1) < 1 << 56
            assert agree(frames) == accepted
            for read in WHOLE_BATCH_READERS.values():
                assert isinstance(outcome(read, frames), WireFormatError) != accepted
        batch = TensorDict({"a": column}, [0])
        for value in (batch, [column, column], column.numpy(), {"a": column}):
            found = outcome(encode, value)
            assert isinstance(found, jagcodec.UnsupportedTypeError) != (wide < most)
            assert wide < most or (found.reason, "next to 0" in found.detail) == ("too_large", True)


def lists_in(value):
    """The lists within a list, and itself, counted one by one."""
    return isinstance(value, list) and 1 + sum(map(lists_in, value))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_how_many_lists_an_array_becomes(shape):
    assert lists_of(shape) == lists_in(np.empty(shape).tolist()) - 1


def ragged_second(rows, wide):
    """So many rows (wide, 0), whose tokens are along their dim 1."""
    offsets = torch.zeros(rows + 1, dtype=torch.int64)
    return torch.nested.nested_tensor_from_jagged(torch.empty(wide, 0), offsets, jagged_dim=2)


MOST = Limits().objects
MANY_LISTS = {
    "rectangle": torch.empty(2, 1 << 40, 0),
    "several dims": torch.empty(2, 1 << 12, 1 << 12, 0, dtype=torch.bfloat16),
    "array": np.empty((2, 1 << 40, 0), np.float32),
    "text": np.empty((2, 1 << 40, 0), "U3"),
    "jagged": torch.nested.nested_tensor_from_jagged(
        torch.empty(1 << 40, 0), torch.tensor([0, 1, 1 << 40]), min_seqlen=1, max_seqlen=1 << 40
    ),
    "cells": torch.nested.nested_tensor_from_jagged(
        torch.empty(3, 1 << 40, 0), torch.tensor([0, 1, 3])
    ),
    "ragged dim 2": ragged_second(2, MOST),
    "components": torch.nested.as_nested_tensor(
        [torch.empty(MOST - 9, 0), torch.empty(9, 0)], layout=torch.strided
    ),
}


@pytest.mark.parametrize("kind", MANY_LISTS)
def test_lists_without_numbers_are_bounded(kind):
    """An array without cells takes no memory; as lists it could take all there is."""
    column = MANY_LISTS[kind]
    batch = BatchedDataDict({"x": column, "y": torch.ones(2)})
    if kind == "components":
        batch = BatchedDataDict({"x": column, "y": torch.empty(2, 5, 0)})  # of all columns together
    for source in (batch, encode(batch)):
        with pytest.raises(ArgumentError, match=r"\['[xy]'\]: .* lists without numbers") as caught:
            jagcodec.to_rows(source, as_="list")
        assert caught.value.reason == "too_large"
        assert len(jagcodec.to_rows(source, as_="array" if kind != "text" else "tensor")) == 2


def test_lists_with_numbers_are_not_bounded(monkeypatch):
    """Nor are the rows, of which each has a dict anyway."""
    monkeypatch.setattr("jagcodec.train.to_rows.DEFAULT_LIMITS", Limits(objects=0))
    columns = {"ids": nested([[1, 2], [3]]), "grid": torch.ones(2, 3, 4), "none": torch.ones(2, 0)}
    first, _ = jagcodec.to_rows(columns, as_="list")
    assert first == {"ids": [1, 2], "grid": [[1.0] * 4] * 3, "none": []}
    with pytest.raises(ArgumentError, match="at most 0 lists"):
        jagcodec.to_rows({"x": torch.ones(2, 1, 0)}, as_="list")


def test_too_many_rows_of_large_dims_name_the_column():
    frames = message(tensordict([2], {"x": tensor("uint8", [2, 1 << 54, 0])}))
    value, twice = decode(frames), [0, 1] * 256
    for call, path in (
        (lambda: concat_rows([frames] * 256).to_tensordict(), "concat_rows['x']"),
        (lambda: concat_rows([value] * 256), "concat_rows['x']"),
        (lambda: select_rows(value, twice), "select_rows(batch)['x']"),
        (lambda: open_wire(frames).rows(twice)["x"], "column 'x'"),
        (lambda: materialize(frames, pad_to_multiple=1 << 62), "materialize('x')"),
        (lambda: materialize(frames, attention_mask_of="x"), "materialize"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert (caught.value.reason, path in caught.value.path) == ("too_large", True)
