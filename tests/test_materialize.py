"""Wire batch to trainer columns."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from jagcodec import (
    BatchedDataDict,
    decode,
    encode,
    materialize,
    pack_jagged_fields,
    stack_or_nest,
)
from jagcodec.testing import assert_same, bits, jagged_batches, pad_rows, rows_of


def blank(column, cells):
    """A cell of `column` with all bits 0, as the model writes it."""
    zero = torch.zeros(1, *column.shape[2:], dtype=torch.uint8).to(torch.int64)
    zero = zero.unsqueeze(-1).expand(*zero.shape, 2) if column.itemsize == 16 else zero
    return zero[0].tolist()


@given(jagged_batches(), st.integers(0, 9))
def test_the_whole_way_and_back(batch, wider):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    lengths = batch.lengths.tolist()
    longest = max(lengths, default=0)
    width = max(wider, longest) if wider else longest
    columns = materialize(decode(encode(td)), pad_to_seqlen=width if wider else 0)
    assert type(columns) is BatchedDataDict
    assert list(columns) == list(batch.fields)
    for name, column in batch.fields.items():
        if name in batch.token_aligned_fields:
            expected = pad_rows(rows_of(column, lengths), width, blank(column, width))
            assert bits(columns[name]) == expected
            assert columns[name].shape == (len(lengths), width, *column.shape[2:])
            assert columns[name].is_contiguous()
        else:
            assert_same(columns[name], column)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 2**63 - 1),
        (torch.int64, -(2**53) - 1),
        (torch.uint64, 2**64 - 1),
        (torch.uint16, 65535),
        (torch.int32, -100),
        (torch.bool, True),
        (torch.float32, -0.0),
        (torch.float32, math.nan),
        (torch.bfloat16, -math.inf),
        (torch.float8_e4m3fn, 1.5),
        (torch.float64, 0.1),
        (torch.complex64, 1 - 2j),
        (torch.complex128, 3.5),
    ],
)
def test_pads_are_exact(dtype, pad):
    rows = [
        torch.zeros(1, dtype=torch.uint8).to(dtype),
        torch.zeros(3, dtype=torch.uint8).to(dtype),
    ]
    td = TensorDict({"x": stack_or_nest(rows)}, [2])
    cell = bits(torch.tensor([pad], dtype=dtype))[0]
    padded = materialize(td, pad_value_dict={"x": pad, "absent": 1})["x"]
    assert bits(padded)[0][1:] == [cell, cell]


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int32, 2**31),
        (torch.uint8, -1),
        (torch.int64, 0.5),
        (torch.int64, math.nan),
        (torch.bool, 2),
        (torch.float16, 151643),
        (torch.float32, 2**24 + 1),
        (torch.float32, 1e300),
        (torch.float32, 1j),
        (torch.int64, "pad"),
        (torch.int64, None),
    ],
)
def test_pads_that_do_not_fit_are_errors(dtype, pad):
    rows = [torch.zeros(n, dtype=torch.uint8).to(dtype) for n in (1, 3)]
    td = TensorDict({"x": stack_or_nest(rows)}, [2])
    with pytest.raises((ValueError, TypeError), match=r"materialize\('x'\)"):
        materialize(td, pad_value_dict={"x": pad})


def test_rectangles_are_left_alone():
    grid = torch.ones(2, 3)
    td = TensorDict({"grid": grid, "x": stack_or_nest([torch.ones(1), torch.ones(2)])}, [2])
    columns = materialize(td, pad_to_seqlen=8)
    assert columns["grid"].data_ptr() == grid.data_ptr()
    assert columns["x"].shape == (2, 8)


def test_ragged_dim_two_pads_its_own_dim():
    rows = [torch.arange(6).view(3, 2), torch.arange(12).view(3, 4)]
    td = TensorDict({"position_ids": stack_or_nest(rows)}, [2])
    padded = materialize(decode(encode(td)), pad_to_seqlen=5)["position_ids"]
    assert padded.shape == (2, 3, 5)
    assert padded[0].tolist() == [[0, 1, 0, 0, 0], [2, 3, 0, 0, 0], [4, 5, 0, 0, 0]]
    assert padded[1, :, :4].tolist() == rows[1].tolist()


def test_rows_longer_than_the_width_are_named():
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(7)])}, [2])
    with pytest.raises(ValueError, match=r"'x'.*row 1.*pad_to_seqlen=4.*found 7"):
        materialize(td, pad_to_seqlen=4)


def test_jagged_passes_through():
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(7)])}, [2])
    assert materialize(td, "jagged")["x"] is td["x"]


def test_packed_is_what_varlen_attention_takes():
    fields = {"ids": torch.arange(12).view(3, 4), "logprob": torch.rand(3, 4), "r": torch.ones(3)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([2, 4, 0]))
    columns = materialize(td, layout="packed")
    ids = columns["ids"]
    assert ids._fields == ("values", "cu_seqlens", "max_seqlen", "position_ids")
    assert ids.values.data_ptr() == td["ids"].values().data_ptr()
    assert ids.values.tolist() == [0, 1, 4, 5, 6, 7]
    assert_same(ids.cu_seqlens, torch.tensor([0, 2, 6, 6], dtype=torch.int32))
    assert ids.max_seqlen == 4
    assert_same(ids.position_ids, torch.tensor([0, 1, 0, 1, 2, 3]))
    assert columns["logprob"].cu_seqlens is ids.cu_seqlens
    assert columns["r"].tolist() == [1, 1, 1]


def test_position_ids_of_ragged_dim_two_are_packed_beside_the_tokens():
    td = TensorDict({"x": stack_or_nest([torch.ones(3, 1), torch.ones(3, 2)])}, [2])
    column = materialize(td, "packed")["x"]
    assert column.values.shape == (3, 3)
    assert column.cu_seqlens.tolist() == [0, 1, 3]


def test_what_is_materialized_can_be_sent_on():
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(2)])}, [2])
    for layout in ("padded", "packed"):
        columns = materialize(td, layout)
        back = decode(encode(columns))
        assert type(back) is BatchedDataDict
        assert type(back["x"]) is type(columns["x"])
        assert_same([*back["x"]], [*columns["x"]])


@pytest.mark.parametrize("layout", ["padded", "jagged", "packed"])
def test_no_layout_lets_a_longer_row_pass(layout):
    td = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(3)])}, [2])
    with pytest.raises(ValueError, match="row 1"):
        materialize(td, layout, None, 2)
    assert materialize(td, layout, pad_to_seqlen=np.int64(3)) is not None


def test_non_tensors_become_rows():
    stack = NonTensorStack(NonTensorData({"a": (1,)}), NonTensorData([1, 2]), NonTensorData(None))
    array = np.array(["x", ["y"], 3], dtype=object)
    td = TensorDict(
        {
            "stack": stack,
            "array": array,
            "whole": NonTensorData({"epoch": 1}, batch_size=[3]),
            "text": "same for all",
        },
        [3],
    )
    columns = materialize(decode(encode(td)))
    assert_same(columns["stack"].tolist(), [{"a": (1,)}, [1, 2], None])
    assert_same(columns["array"], array)
    assert_same(columns["whole"].tolist(), [{"epoch": 1}] * 3)
    assert_same(columns["text"].tolist(), ["same for all"] * 3)
    assert {c.shape for c in columns.values()} == {(3,)}
    assert {c.dtype for c in columns.values()} == {np.dtype(object)}


def test_nested_tensordicts_become_nested_columns():
    inner = TensorDict({"x": stack_or_nest([torch.ones(1), torch.ones(2)])}, [2])
    td = TensorDict({"inner": inner}, [2])
    columns = materialize(td, pad_value_dict={("inner", "x"): 9})
    assert columns["inner"]["x"].tolist() == [[1, 9], [1, 1]]
    assert type(columns["inner"]) is BatchedDataDict


def test_the_container_is_the_callers_choice():
    td = TensorDict({"x": torch.ones(2)}, [2])
    assert type(materialize(td, container=dict)) is dict
    assert list(materialize(td, container=list)) == ["x"]


def test_gradient_carrying_columns_can_be_padded():
    leaf = torch.nested.nested_tensor(
        [torch.ones(1), torch.ones(2)], layout=torch.jagged, requires_grad=True
    )
    assert materialize(TensorDict({"x": leaf}, [2]))["x"].tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda td: materialize(td, "Padded"), ValueError, "'padded'.*'Padded'"),
        (lambda td: materialize(td, pad_to_seqlen=-1), ValueError, "pad_to_seqlen"),
        (lambda td: materialize(td, pad_to_seqlen=2.0), ValueError, "pad_to_seqlen"),
        (lambda td: materialize(td, pad_value_dict=0), TypeError, "pad_value_dict"),
        (lambda td: materialize(td, pad_value_dict=["x"]), TypeError, "found list"),
        (lambda td: materialize(dict(td)), TypeError, "expected a TensorDict, found dict"),
        (lambda td: materialize(TensorDict({}, [])), ValueError, "batch dim"),
        (
            lambda td: materialize(LazyStackedTensorDict(td, td, stack_dim=0)),
            TypeError,
            "stack_or_nest",
        ),
    ],
)
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call(TensorDict({"x": torch.ones(2)}, [2]))
