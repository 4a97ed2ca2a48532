"""Packing a dict of columns."""

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from jagcodec import pack_jagged_fields, stack_or_nest
from jagcodec.testing import assert_same, jagged_batches, rows_of


@given(jagged_batches())
def test_columns_keep_rows_order_and_payloads(batch):
    td = pack_jagged_fields(
        batch.fields, lengths=batch.lengths, token_aligned_fields=batch.token_aligned_fields
    )
    assert td.batch_size == (len(batch.lengths),)
    assert td.device is None
    assert list(td.keys()) == list(batch.fields)
    for name, column in batch.fields.items():
        leaf = td.get(name)
        if name in batch.token_aligned_fields:
            assert rows_of(leaf) == rows_of(column, batch.lengths.tolist())
        elif isinstance(column, torch.Tensor):
            assert_same(leaf, column)
        elif len(column):
            assert_same(leaf.tolist(), list(column))


def test_columns_packed_together_multiply():
    lengths = torch.tensor([1, 3, 0])
    fields = {"a": torch.ones(3, 3), "b": 2 * torch.ones(3, 8), "r": torch.ones(3)}
    fields["c"] = stack_or_nest([torch.ones(1), torch.ones(3), torch.ones(0)])
    td = pack_jagged_fields(fields, lengths=lengths, token_aligned_fields={"a", "b", "absent"})
    assert (td["a"] * td["b"]).values().tolist() == [2.0] * 4
    assert (td["a"] * td["c"]).values().tolist() == [1.0] * 4


def test_without_names_the_shape_decides():
    fields = {"a": torch.ones(2, 3), "b": torch.ones(2, 4), "c": torch.ones(2)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([1, 3]))
    assert [td[name].is_nested for name in fields] == [True, False, False]


def test_with_names_the_shape_does_not_decide():
    td = pack_jagged_fields(
        {"grid": torch.ones(2, 3)}, lengths=torch.tensor([1, 3]), token_aligned_fields=[]
    )
    assert not td["grid"].is_nested


def test_without_lengths_nothing_is_packed():
    words = np.array(["x", None], dtype=object)
    td = pack_jagged_fields({"a": torch.ones(2, 3), "words": words}, lengths=None)
    assert td.batch_size == (2,)
    assert not td["a"].is_nested
    assert td.get("words").tolist() == ["x", None]
    assert pack_jagged_fields({}, lengths=None).batch_size == (0,)


def test_the_batch_is_detached():
    fields = {"a": torch.ones(2, 3, requires_grad=True), "b": torch.ones(2, 5, requires_grad=True)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([1, 3]))
    assert not td["a"].requires_grad
    assert not td["b"].requires_grad


LENGTHS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("column", "error", "text"),
    [
        (torch.ones(3, 2), ValueError, "'bad'.*expected 2 rows.*found 3"),
        (torch.tensor(1.0), ValueError, "'bad'.*0-d"),
        (np.ones(2), TypeError, "'bad'.*from_numpy"),
        (np.array(["a", "b"]), TypeError, "'bad'.*object"),
        (["a", "b"], TypeError, "'bad'.*list"),
        (torch.eye(2).to_sparse(), TypeError, "'bad'.*sparse"),
        (TensorDict({}, [2]), TypeError, "'bad'.*TensorDict"),
    ],
)
def test_columns_that_cannot_ride_are_named(column, error, text):
    with pytest.raises(error, match=text):
        pack_jagged_fields({"good": torch.ones(2), "bad": column}, lengths=LENGTHS)


def test_bad_lengths_and_names():
    with pytest.raises(ValueError, match=r"row 0.*-1"):
        pack_jagged_fields({}, lengths=torch.tensor([-1]))
    with pytest.raises(TypeError, match="put it in a list"):
        pack_jagged_fields({}, lengths=LENGTHS, token_aligned_fields="input_ids")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (None, "dict of names"),
        ([torch.ones(2)], "found list"),
        ({1: torch.ones(2)}, "no strings"),
        ({"grid": np.empty((2, 2), dtype=object)}, "numpy.empty"),
        ({"q": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)}, "dequantise"),
    ],
)
def test_fields_that_are_none(fields, text):
    with pytest.raises(TypeError, match=text):
        pack_jagged_fields(fields, lengths=LENGTHS)


def test_a_jagged_column_with_holes_joins_its_rows():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 2, 6]), lengths=torch.tensor([1, 2])
    )
    fields = {"a": torch.ones(2, 3), "b": holes}
    td = pack_jagged_fields(fields, lengths=LENGTHS, token_aligned_fields=["a"])
    assert (td["a"] * td["b"]).values().tolist() == [0.0, 2.0, 3.0]


def test_names_that_are_no_set():
    with pytest.raises(TypeError, match="set of names"):
        pack_jagged_fields({}, lengths=LENGTHS, token_aligned_fields=5)
