"""Rectangles trimmed and put back: the same bits, whatever the rows begin and end with."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from jagcodec import decode, encode
from jagcodec.integrations._trim import Trimmed, trim, trim_batch, untrim, untrim_batch
from jagcodec.memory import blocks
from tests.device import on_device, watched, with_tensors
from tests.oracle import assert_same

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64]
DTYPES += [torch.float16, torch.complex64, torch.complex128, torch.float8_e4m3fn]


def put_back(column):
    return untrim({"column": trim(column)})["column"]


@st.composite
def rectangles(draw):
    """Columns of few different values, so that runs of one value are long and many."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    shapes = [(rows, width), (rows, width, 2), (rows, 2, width), (rows, width, 1, 2)]
    shape, dtype = draw(st.sampled_from(shapes)), draw(st.sampled_from(DTYPES))
    cell = st.integers(0, draw(st.sampled_from([1, 1 if dtype is torch.bool else 255])))
    size = math.prod(shape)
    cells = draw(st.lists(cell, min_size=size, max_size=size))
    column = torch.tensor(cells, dtype=torch.float32).to(dtype).view(shape)
    order = draw(st.sampled_from(["in order", "apart", "transposed"]))
    if order == "apart":
        wide = torch.zeros(rows, shape[1] + 2, *shape[2:], dtype=torch.float32).to(dtype)
        wide[:, 1:-1] = column
        return wide[:, 1:-1]
    return column if order == "in order" else column.transpose(0, 1).contiguous().transpose(0, 1)


NANS = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FC00000], dtype=torch.int32).view(torch.float32)


def large(before, after):
    """New memory of so many bytes comes zeroed; around the cells it must not stay so."""
    column = torch.full((2, 40_000), after)
    column[:, :9] = before
    column[:, 9:12] = torch.tensor([[7, 8, 9], [5, 6, 4]])
    return column


@given(rectangles())
@example(torch.stack([torch.tensor([0.0, -0.0, 0.0]), NANS]))  # equal, or not, but other values
@example(large(0, 0))
@example(large(1, 0))
@example(large(0, 1))
def test_what_was_trimmed_comes_back(column):
    before = column.clone()
    blocks.release()
    found = put_back(column)
    assert_same(found, before)
    found.zero_()  # memory of its own
    assert_same(column, before)


def masked(ends, width):
    mask = torch.zeros(len(ends), width, dtype=torch.int64)
    for row, (start, end) in enumerate(ends):
        mask[row, start:end] = 1
    return mask


def grid():
    positions = torch.zeros(2, 3, 50, dtype=torch.int64)
    positions[:, :, 5:8] = torch.arange(1, 10).view(3, 3)
    return positions


# Of position ids as verl computes them, left pads are 0 and right pads each row's last position:
# the first position is a left pad like those before it, the last a right pad.
POSITIONS = (masked([(3, 8), (0, 6), (7, 12)], 12).cumsum(dim=1) - 1).clip(min=0)
KEPT = [
    (POSITIONS, [1, 2, 3, 0, 1, 2, 3, 4, 1, 2, 3, 4]),
    (masked([(20, 60), (0, 30), (50, 100)], 100), [1, 1, 1]),  # a mask: one for each
    (grid(), [*range(1, 10)] * 2),  # along the widest dim
]


@pytest.mark.parametrize(("column", "cells"), KEPT, ids=["positions", "mask", "grid"])
def test_only_these_cells_are_kept(column, cells):
    assert trim(column).cells.tolist() == cells
    assert_same(put_back(column), column)


def sent(**changes):
    return trim(torch.tensor([[0, 0, 5, 6, 0], [0, 7, 8, 9, 1]]))._replace(**changes)


WRONG: dict[str, list[Any]] = {
    "shape": [(2, -5), (2, True), (3, 5), (2, 4)],
    "dim": [0, 2],
    "starts": [*(np.array([2, n], dtype=np.int32) for n in (-1, 2**31 - 1)), np.array([2.0, 0.0])],
    "lengths": [np.array([2, 2**63 - 1]), np.array([2])],
    "cells": [torch.arange(3), torch.zeros(6, 2, dtype=torch.int64)],
    "before": [torch.zeros(0, dtype=torch.int64)],
    "after": [torch.zeros(3, dtype=torch.int64), torch.zeros(1)],
    "constant": [True],
}


def test_parts_that_contradict_each_other_are_refused():
    assert untrim({"a": sent()})["a"].tolist() == [[0, 0, 5, 6, 0], [0, 7, 8, 9, 1]]
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match="a: expected"):
                untrim({"a": sent(**{name: value})})


def make_batch():
    ids = torch.rand(64, 100)
    ids[:, :30], ids[:, 60:] = 0, -1
    columns = {
        "ids": ids,
        "image": torch.rand(64, 20, 20),
        "mask": masked([(10, 40)] * 64, 100).bool(),
        "reward": torch.rand(64),
        "tiny": torch.zeros(64, 3),
        "notes": NonTensorStack(*map(str, range(64))),
    }
    return TensorDict(columns, batch_size=[64])


def test_a_batch_comes_back_in_its_order_and_only_what_pays_is_trimmed():
    for batch, trimmed in (
        (make_batch(), {"ids", "mask"}),
        (TensorDict({}, [3]), set()),
        (TensorDict({"no rows": torch.zeros(0, 5)}, [0]), set()),
        (TensorDict({"small": torch.zeros(2, 5)}, [2]), set()),
    ):
        state = trim_batch(batch)
        assert set(state["trimmed"]) == trimmed
        found = untrim_batch(**decode(encode(state)))
        assert list(found.keys()) == list(batch.keys())
        assert_same(found, batch)


def test_a_batch_on_a_device_is_the_same_message_after_one_wait_for_its_rectangles(device):
    batch = make_batch()
    expected = decode(encode(trim_batch(batch)))
    there = on_device(batch, device)
    with watched(device) as traffic:
        state = trim_batch(there)
    assert traffic.waits == 1
    assert set(state["trimmed"]) == {"ids", "mask"}
    state["batch"] = with_tensors(state["batch"], torch.Tensor.cpu)
    assert_same(decode(encode(state)), expected)
    trimmed = {name: Trimmed(**parts) for name, parts in state["trimmed"].items()}
    on_the_device = {
        name: parts._replace(**{x: getattr(parts, x).to(device) for x in TENSORS})
        for name, parts in trimmed.items()
    }
    with watched(device) as traffic:
        found = untrim(on_the_device)
    assert traffic.waits <= 1
    assert {column.device for column in found.values()} == {device}
    assert_same({name: column.cpu() for name, column in found.items()}, untrim(trimmed))


TENSORS = ("before", "after", "cells")


@pytest.mark.parametrize(
    "changes", [{"batch": {}}, {"order": ["ids"]}, {"trimmed": {}}, {"order": ["ids"] * 4}], ids=str
)
def test_a_state_whose_parts_do_not_fit_is_refused(changes):
    with pytest.raises(ValueError, match="expected"):
        untrim_batch(**{**trim_batch(make_batch()), **changes})
