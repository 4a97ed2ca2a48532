"""Rectangles trimmed and put back: the same bits, whatever the rows begin and end with."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from jagcodec import decode, encode
from jagcodec.integrations._trim import Trimmed, padded_batch, trim, trimmed_batch, untrimmed
from tests.oracle import assert_same

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def put_back(column):
    return untrimmed({"column": trim(column)})["column"]


@st.composite
def rectangles(draw):
    """Columns of few different values, so that runs of one value are long and many."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    shape = draw(
        st.sampled_from([(rows, width), (rows, width, 2), (rows, 2, width), (rows, width, 1, 2)])
    )
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["few", "many"]))
    bound = 1 if kind == "few" or dtype is torch.bool else 255
    cells = draw(
        st.lists(st.integers(0, bound), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    )
    numbers = torch.tensor(cells, dtype=torch.float32)
    column = numbers.to(dtype).view(shape)
    if draw(st.booleans()):  # rows that lie apart
        wide = torch.zeros(rows, shape[1] + 2, *shape[2:], dtype=torch.float32).to(dtype)
        wide[:, 1:-1] = column
        return wide[:, 1:-1]
    if draw(st.booleans()):
        return column.transpose(0, 1).contiguous().transpose(0, 1)
    return column


@given(rectangles())
def test_what_was_trimmed_comes_back(column):
    before = column.clone()
    assert_same(put_back(column), before)
    assert_same(column, before)


@given(st.data())
def test_left_and_right_pads_are_left_behind(data):
    width = data.draw(st.integers(4, 12))
    rows, expected = [], 0
    for _ in range(data.draw(st.integers(1, 6))):
        left = data.draw(st.integers(0, width - 4))
        length = data.draw(st.integers(4, width - left))
        tokens = list(range(1, length + 1))
        rows.append([0] * left + tokens + [0] * (width - left - length))
        expected += length
    column = torch.tensor(rows)
    trimmed = trim(column)
    ends = [row.index(1) for row in rows], [row[::-1].index(max(row)) for row in rows]
    singles = sum(end == 1 for part in ends for end in part)  # cheaper as cells
    assert len(trimmed.cells) == expected + singles
    assert_same(put_back(column), column)


def test_position_ids_need_no_one_pad():
    """Left pads are 0 and right pads each row's last position, as verl computes them."""
    mask = torch.zeros(3, 12, dtype=torch.int64)
    for row, (start, end) in enumerate([(3, 8), (0, 6), (7, 12)]):
        mask[row, start:end] = 1
    positions = (mask.cumsum(dim=1) - 1).clip(min=0)
    trimmed = trim(positions)
    # The first position is a left pad like those before it, the last a right pad.
    assert trimmed.cells.tolist() == [1, 2, 3, 0, 1, 2, 3, 4, 1, 2, 3, 4]
    assert trimmed.before.tolist() == [0]
    assert trimmed.after[:2].tolist() == [4, 5]
    assert_same(put_back(positions), positions)


def test_a_mask_costs_its_ends_alone():
    mask = torch.zeros(4, 100, dtype=torch.int64)
    for row, (start, end) in enumerate([(20, 60), (0, 30), (50, 100), (0, 0)]):
        mask[row, start:end] = 1
    trimmed = trim(mask)
    assert trimmed.constant
    assert len(trimmed.cells) == 4
    assert_same(put_back(mask), mask)


def test_nothing_is_lost_to_equality():
    """Zeros of both signs, and NaNs of other bits, are other values."""
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FC00000], dtype=torch.int32)
    column = torch.stack([torch.tensor([0.0, -0.0, 0.0]), nans.view(torch.float32)])
    assert_same(put_back(column), column)


def test_an_image_grid_is_trimmed_along_its_widest_dim():
    positions = torch.zeros(2, 3, 50, dtype=torch.int64)
    positions[:, :, 5:8] = torch.arange(1, 10).view(3, 3)
    trimmed = trim(positions)
    assert trimmed.dim == 2
    assert len(trimmed.cells) == 18
    assert_same(put_back(positions), positions)


def test_columns_are_restored_together():
    columns = {"a": torch.arange(12).view(3, 4), "b": torch.zeros(2, 5), "c": torch.ones(1, 1)}
    found = untrimmed({name: trim(column) for name, column in columns.items()})
    assert list(found) == list(columns)
    for name, column in columns.items():
        assert_same(found[name], column)
        found[name].zero_()  # memory of its own
    assert columns["a"].sum() == 66


@pytest.mark.parametrize("first", [0, 1])
def test_new_memory_that_is_zero_already_is_not_filled_again(first):
    """From 32 MiB on it comes zeroed; before the cells it must not stay so."""
    column = torch.zeros(2, 2_200_000, dtype=torch.int64)
    column[:, :9] = first
    column[:, 9:12] = torch.tensor([[7, 8, 9], [5, 6, 4]])
    assert column.nbytes > 32 << 20
    assert torch.equal(put_back(column), column)


def sent(**changes):
    return trim(torch.tensor([[0, 0, 5, 6, 0], [0, 7, 8, 9, 1]]))._replace(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2, -5)},
        {"shape": (2, True)},
        {"shape": (3, 5)},
        {"shape": (2, 4)},
        {"dim": 0},
        {"dim": 2},
        {"starts": np.array([2, -1], dtype=np.int32)},
        {"starts": np.array([2, 2**31 - 1], dtype=np.int32)},
        {"starts": np.array([2.0, 0.0])},
        {"lengths": np.array([2, 2**63 - 1])},
        {"lengths": np.array([2])},
        {"cells": torch.arange(3)},
        {"cells": torch.zeros(6, 2, dtype=torch.int64)},
        {"before": torch.zeros(0, dtype=torch.int64)},
        {"after": torch.zeros(3, dtype=torch.int64)},
        {"after": torch.zeros(1)},
        {"constant": True},
    ],
    ids=str,
)
def test_parts_that_contradict_each_other_are_refused(changes):
    assert untrimmed({"a": sent()})["a"].tolist() == [[0, 0, 5, 6, 0], [0, 7, 8, 9, 1]]
    assert isinstance(sent(**changes), Trimmed)
    with pytest.raises(ValueError, match="a: expected"):
        untrimmed({"a": sent(**changes)})


# --- whole batches -----------------------------------------------------------------------------


def padded(*shape, left=3, right=5):
    column = torch.rand(shape)
    column[:, :left] = 0
    column[:, shape[1] - right :] = -1
    return column


def batch_columns():
    mask = torch.zeros(64, 100, dtype=torch.bool)
    mask[:, 10:40] = True
    return {
        "ids": padded(64, 100, left=30, right=40),
        "image": torch.rand(64, 20, 20),
        "mask": mask,
        "reward": torch.rand(64),
        "tiny": torch.zeros(64, 3),
    }


def sent_and_restored(batch):
    return padded_batch(**decode(encode(trimmed_batch(batch))))


def test_a_batch_comes_back_in_its_order():
    columns = batch_columns()
    td = TensorDict(columns, batch_size=[64])
    td["notes"] = NonTensorStack(*map(str, range(64)))
    state = trimmed_batch(td)
    assert set(state["trimmed"]) == {"ids", "mask"}
    frames = encode(state)
    padded = sum(column.nbytes for column in columns.values())
    assert sum(memoryview(frame).nbytes for frame in frames) < padded
    found = sent_and_restored(td)
    assert list(found.keys()) == list(td.keys())
    assert_same(found, td)


@pytest.mark.parametrize(
    "batch",
    [
        TensorDict({}, batch_size=[3]),
        TensorDict({"a": torch.zeros(0, 5)}, batch_size=[0]),
        TensorDict({"a": torch.zeros(2, 5)}, batch_size=[2]),
    ],
    ids=["no columns", "no rows", "small"],
)
def test_nothing_to_trim(batch):
    assert trimmed_batch(batch)["trimmed"] == {}
    assert_same(sent_and_restored(batch), batch)


@pytest.mark.parametrize(
    "changes", [{"batch": {}}, {"order": ["ids"]}, {"trimmed": {}}, {"order": ["ids"] * 4}], ids=str
)
def test_a_state_whose_parts_do_not_fit_is_refused(changes):
    state = trimmed_batch(TensorDict(batch_columns(), batch_size=[64]))
    with pytest.raises(ValueError, match="expected"):
        padded_batch(**{**state, **changes})
